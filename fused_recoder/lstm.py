"""`FusedRecodingLSTM`: the drop-in for `nn.LSTM`, over the ops of the C++ engine."""

from __future__ import annotations

from ._call import Call, RecodingTrace, Result, empty_trace, skipped_positions
from ._engine import recode_forward
from ._module import RecodingLSTMBase
from ._transforms import refuse_function_transforms
from .reference import run


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
    only where the gold token of time step t is the input of time step t+1.

    Under autocast inputs and weights are rounded to the autocast dtype; states, softmax and
    accumulation stay float32. Half-precision modules are computed in float32 on the CPU.
    """

    def _run(self, call: Call) -> Result:
        signal = self.signal
        if signal is not None and not signal.fused:
            return run(self, call)
        refuse_function_transforms(self.differentiable(call))
        out = recode_forward(self, call)
        output = out.output
        if signal is not None and signal.separate_states:
            output = output.unflatten(1, (signal.samples, -1)).transpose(0, 1)  # [K, T, B, H]
        trace = None
        if call.trace and signal is None:
            trace = empty_trace(out.delta, self.num_layers, len(self.states))
        elif call.trace:
            skipped = skipped_positions(out.recoded.bool(), call)
            trace = RecodingTrace(out.delta, out.delta_after, out.step_size, out.grad_norm, skipped)
        nll = out.nll if call.loss else None
        # Only of an ensemble is the objective another than the nll.
        objective = out.objective if call.loss and out.objective.numel() > 0 else nll
        delta = None if signal is None else out.delta
        return Result(output, out.h_n, out.c_n, nll, objective, delta, trace)
