"""`FusedRecodingLSTM`: the drop-in for `nn.LSTM`, over the ops of the C++ engine."""

from __future__ import annotations

import torch

from ._module import Call, RecodingLSTMBase, RecodingTrace, Result


class FusedRecodingLSTM(RecodingLSTMBase):
    """An LSTM whose states take a gradient step after every word, in closed form.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout: as in `nn.LSTM`.
        decoder: what turns the top state into logits, e.g. `nn.Linear(hidden_size, vocab_size)`.
            Held, not registered: the model that decodes with it owns it.
        signal: what to lower: `"nll"`, `"surprisal"` (the thesis's), `"entropy"`, a
            `fused_recoder.signals` object, or None for a plain LSTM.
        step: how far to go: a number, `"learned"`, or a `fused_recoder.steps` object.
        output_dropout: dropout between the top state and the decoder; `output` comes dropped.
        states: which states to recode, `"h"`, `"c"` or both.
        gradient: `"detached"` treats the recoding gradient as a constant in training.

    Gold signals (`nll`, `surprisal`) leak labels outside language modelling: they are legitimate
    only where the gold token of step t is the input of step t+1.

    Under autocast GEMM operands are rounded to the autocast dtype; states, softmax and
    accumulation stay float32. Half-precision modules are computed in float32 on the CPU.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.gradient == "exact":
            raise NotImplementedError(
                'gradient="exact" is not fused yet: use fused_recoder.reference.RecodingLSTM'
            )

    def _run(self, call: Call) -> Result:
        signal = self.signal
        x, weights = call.input, [w for layer in self.all_weights for w in layer]
        decodes = signal is not None or call.loss
        decoder_weight, decoder_bias = self.decoder_parameters() if decodes else (None, None)
        step = self.step()
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, *weights = (t.to(dtype) for t in (x, *weights))
            decoder_weight = None if decoder_weight is None else decoder_weight.to(dtype)
            decoder_bias = None if decoder_bias is None else decoder_bias.to(dtype)
        decoder_grads = call.loss and any(
            t is not None and t.requires_grad for t in (decoder_weight, decoder_bias)
        )
        tracked = [x, call.h0, call.c0, step, *weights]
        save = torch.is_grad_enabled() and (decoder_grads or any(t.requires_grad for t in tracked))
        dropout, output_dropout = self.active_dropout
        output, h_n, c_n, nll, delta, delta_after, step_size, grad_norm, _ = (
            torch.ops.fused_recoder.recode_forward(
                x,
                call.h0,
                call.c0,
                weights,
                decoder_weight,
                decoder_bias,
                step,
                call.targets,
                call.mask,
                call.lengths,
                call.seed,
                "none" if signal is None else signal.name,
                signal is not None and signal.target == "argmax",
                "h" in self.states,
                "c" in self.states,
                dropout,
                output_dropout,
                call.loss,
                save,
                save and step.requires_grad,
                save and decoder_grads,
                call.trace,
            )
        )
        trace = None
        if call.trace:
            if signal is None:
                shape = (self.num_layers, len(self.states), *delta.shape)
                step_size = grad_norm = delta.new_zeros(shape)
                delta_after = delta
            trace = RecodingTrace(delta, delta_after, step_size, grad_norm)
        return Result(output, h_n, c_n, nll if call.loss else None, trace)
