"""`FusedRecodingLSTM`: the drop-in for `nn.LSTM`, over the ops of the C++ engine."""

from __future__ import annotations

import torch

from ._module import Call, RecodingLSTMBase, RecodingTrace, Result, skipped_positions
from ._ops import ForwardArguments, ForwardResult
from .signals import Classifiers


class FusedRecodingLSTM(RecodingLSTMBase):
    """An LSTM whose states take a gradient step after every word, in closed form.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout: as in `nn.LSTM`.
        decoder: what turns the top state into logits, e.g. `nn.Linear(hidden_size, vocab_size)`.
            Held, not registered: the model that decodes with it owns it.
        signal: what to lower: a name (`"nll"`, `"surprisal"`, `"entropy"`, ...), a
            `fused_recoder.signals` object, a list of `Classifier` objects, or None for a plain
            LSTM.
        step: how far to go: a number, a name (`"learned"`, `"backtracking"`, ...), or a
            `fused_recoder.steps` object.
        output_dropout: dropout between the top state and the decoder; `output` comes dropped.
        states: which states to recode, `"h"`, `"c"` or both.
        gradient: `"detached"` treats the recoding gradient as a constant in training, as the
            thesis does; `"exact"` differentiates it, too. The inputs of predicted step sizes, and
            step sizes that are searched for or follow from bounds, stay constants.
        gate: recode only where delta exceeds it: a threshold or a `Gate`.
        probability: the share of positions recoded in training, drawn at random; a pair also says
            it for evaluation. Can be set at any time, e.g. by a schedule.

    Gold signals (`nll`, `surprisal`) leak labels outside language modelling: they are legitimate
    only where the gold token of step t is the input of step t+1.

    Under autocast GEMM operands are rounded to the autocast dtype; states, softmax and
    accumulation stay float32. Half-precision modules are computed in float32 on the CPU.
    """

    def _run(self, call: Call) -> Result:
        signal, step = self.signal, self.step
        if signal is not None and signal.name == "custom":
            from .reference import run  # which imports the language model, which imports us

            return run(self, call)
        x, weights = call.input, [w for layer in self.all_weights for w in layer]
        classifiers = signal.members if isinstance(signal, Classifiers) else []
        decodes = (signal is not None and not classifiers) or call.loss
        decoder_weight, decoder_bias = self.decoder_parameters() if decodes else (None, None)
        # Without a signal nothing is recoded, whatever the step.
        sizes = (
            x.new_zeros(self.num_layers, len(self.states)) if signal is None else step.sizes(self)
        )
        network = step.network_tensors() if signal is not None and step.kind == "predicted" else []
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, *weights = (t.to(dtype) for t in (x, *weights))
            decoder_weight = None if decoder_weight is None else decoder_weight.to(dtype)
            decoder_bias = None if decoder_bias is None else decoder_bias.to(dtype)
        learned_step = any(t.requires_grad for t in (sizes, *network))
        exact = self.gradient == "exact" and signal is not None
        decoder_grads = (call.loss or exact) and any(
            t is not None and t.requires_grad for t in (decoder_weight, decoder_bias)
        )
        tracked = [x, call.h0, call.c0, *weights]
        save = torch.is_grad_enabled() and (
            decoder_grads or learned_step or any(t.requires_grad for t in tracked)
        )
        dropout, output_dropout = self.active_dropout
        out = ForwardResult(
            *torch.ops.fused_recoder.recode_forward(
                *ForwardArguments(
                    input=x,
                    h0=call.h0,
                    c0=call.c0,
                    weights=weights,
                    decoder_weight=decoder_weight,
                    decoder_bias=decoder_bias,
                    classifiers=[t for c in classifiers for t in (c.weight, c.bias)],
                    step=sizes,
                    step_network=network,
                    gate=None if self.gate is None else self.gate.threshold,
                    targets=call.targets,
                    labels=call.labels,
                    mask=call.mask,
                    lengths=call.lengths,
                    seed=call.seed,
                    signal="none" if signal is None else signal.engine_name,
                    argmax=signal is not None and signal.target == "argmax",
                    samples=1 if signal is None else signal.samples,
                    sample_p=0.0 if signal is None else signal.p,
                    mean_logits=getattr(self.decoder, "predict", None) == "mean_logits",
                    classifier_states=[
                        2 * layer + (state == "c")
                        for layer, state in (signal.places if classifiers else [])
                    ],
                    recode_h="h" in self.states,
                    recode_c="c" in self.states,
                    dropout=dropout,
                    output_dropout=output_dropout,
                    step_kind=step.kind if signal is not None else "given",
                    shrink=getattr(step, "shrink", 0.5),
                    trials=getattr(step, "trials", 1),
                    time=call.time,
                    loss=call.loss,
                    exact=exact,
                    save=save,
                    save_step_grads=save and learned_step,
                    save_decoder_grads=save and decoder_grads,
                    trace=call.trace,
                )
            )
        )
        trace = None
        if call.trace and signal is None:
            nothing = out.delta.new_zeros((*sizes.shape, *out.delta.shape))
            none = torch.zeros_like(out.delta, dtype=torch.bool)
            trace = RecodingTrace(out.delta, out.delta, nothing, nothing, none)
        elif call.trace:
            skipped = skipped_positions(out.recoded.bool(), call)
            trace = RecodingTrace(out.delta, out.delta_after, out.step_size, out.grad_norm, skipped)
        output = out.output
        if signal is not None and signal.name == "variational":
            output = output.unflatten(1, (signal.samples, -1)).transpose(0, 1)  # [K, T, B, H]
        nll = objective = None
        if call.loss:
            nll = out.nll
            objective = out.objective if decoder_weight.dim() == 3 else nll
        return Result(output, out.h_n, out.c_n, nll, objective, out.delta, trace)
