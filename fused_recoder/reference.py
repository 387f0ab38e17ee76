"""The specification: recoding in plain PyTorch, its gradients by autograd.

Every fused path is tested against this module, and every benchmark compares with it. It is
written to be read, and to be as fast as eager PyTorch honestly can be: the input GEMM of layer 0
is one call for all time steps, a cell is two GEMMs and a few pointwise operations, K samples are
one GEMM, one call of `autograd.grad` per time step serves all layers, and nothing is computed
twice. What a signal is worth and how far a step goes, they say themselves: `signals/`, `steps/`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._call import (
    Call,
    RecodingTrace,
    Result,
    counted_positions,
    empty_trace,
    live_positions,
    skipped_positions,
)
from ._language_model import LanguageModelBase
from ._masks import INPUT_STREAM, LAYER_STREAM, OUTPUT_STREAM, RECURRENT_STREAM, dropout_mask
from ._module import RecodingLSTMBase
from .signals import Place, Signal
from .signals.formulas import IGNORE, gold_nll, log_mean_softmax

Layer = tuple[Tensor, Tensor, Tensor | None]  # w_ih [4H, in], w_hh^T [H, 4H], bias [4H]


class RecodingLSTM(RecodingLSTMBase):
    """Same signature and semantics as `FusedRecodingLSTM`."""

    def _run(self, call: Call) -> Result:
        return run(self, call)


class RecodingLanguageModel(LanguageModelBase):
    """Same signature and semantics as `fused_recoder.RecodingLanguageModel`."""

    rnn_class = RecodingLSTM


def run(rnn: RecodingLSTMBase, call: Call) -> Result:
    """A call, also in inference mode, where autograd has to be allowed for the recoder."""
    if not torch.is_inference_mode_enabled():
        return run_over_time(rnn, call)
    with torch.inference_mode(False), torch.no_grad():
        copies = (value.clone() if isinstance(value, Tensor) else value for value in call)
        return run_over_time(rnn, Call._make(copies))


def run_over_time(rnn: RecodingLSTMBase, call: Call) -> Result:
    """The time loop."""
    outer_grad, signal = torch.is_grad_enabled(), rnn.signal
    masks = Masks(rnn, call)
    live, counted = live_positions(call), counted_positions(call)  # [T, B] or None
    sizes = None if signal is None else rnn.step.sizes(rnn)  # [L, S] or [L, S, H]
    layers: list[Layer] = [
        (w[0], w[1].t(), w[2] + w[3] if rnn.bias else None) for w in rnn.weights_of(call)
    ]
    projected = project(call.input, masks, layers[0])  # T x [R, 4H]
    h, c = list(call.h0.unbind(0)), list(call.c0.unbind(0))  # recoded, L x [R, H]
    outputs: list[Tensor] = []
    records: list[Record] = []
    for t in range(len(projected)):
        # Recoding differentiates also where the caller does not.
        with torch.enable_grad():
            now = TimeStep(rnn, call, masks, t)
            output = now.read(projected[t], layers, h, c)
            h_new, c_new = list(now.h), list(now.c)
            if signal is not None and sizes is not None:
                recoded = recode(now, sizes, counted, outer_grad)
                for (l, state), value in recoded.states.items():
                    (h_new if state == "h" else c_new)[l] = value
                if not signal.sees_labels:
                    output = now.decoded(h_new[-1])
                records.append(record(now, recoded, sizes))
        if live is not None:  # behind the end of a sequence its states stay as they are
            inside = live[t].repeat(rnn.rows_per_instance).unsqueeze(1)
            h_new = [torch.where(inside, new, old) for new, old in zip(h_new, h, strict=True)]
            c_new = [torch.where(inside, new, old) for new, old in zip(c_new, c, strict=True)]
            output = torch.where(inside, output, 0)
        if not outer_grad:
            h_new, c_new = ([s.detach() for s in states] for states in (h_new, c_new))
            output = output.detach()
        h, c = h_new, c_new
        outputs.append(output)
    return make_result(rnn, call, torch.stack(outputs), torch.stack(h), torch.stack(c), records)


class Masks:
    """The masks of one call, the same as the fused engine's, given the same seed."""

    def __init__(self, rnn: RecodingLSTMBase, call: Call):
        self.dtype = torch.float64 if call.input.dtype == torch.float64 else torch.float32
        T, B, I = call.input.shape
        H, L, signal = rnn.hidden_size, rnn.num_layers, rnn.signal
        seed = None if call.seed is None else call.seed.to(call.input.device)
        held_p = signal.p if signal is not None and signal.holds_masks else None
        self.held = held_p is not None or rnn.dropout_kind == "sequence"
        self.samples = rnn.rows_per_instance
        layer_p, output_p = rnn.active_dropout if held_p is None else (held_p, held_p)

        def mask(stream: int, p: float | None, units: int) -> Tensor | None:
            if not p or seed is None:
                return None
            steps, time = (1, 0) if self.held else (T, call.time)
            rows = B * self.samples
            return dropout_mask(seed, stream, p, steps, rows, units, self.dtype, time=time)

        # [T or 1, R, units] each, or None
        self.up = [mask(LAYER_STREAM + l, layer_p, H) for l in range(L - 1)]
        self.up.append(mask(OUTPUT_STREAM, output_p, H))
        self.input = mask(INPUT_STREAM, held_p, I)
        self.recurrent = [mask(RECURRENT_STREAM + l, held_p, H) for l in range(L)]

    def apply_up(self, layer: int, t: int, hidden: Tensor) -> Tensor:
        """What layer `layer` hands up at time step t, [R, H]."""
        mask = self.up[layer]
        return hidden if mask is None else hidden * mask[0 if self.held else t]

    def apply_recurrent(self, layer: int, hidden: Tensor) -> Tensor:
        """What layer `layer` hands on to its next time step, [R, H]."""
        mask = self.recurrent[layer]
        return hidden if mask is None else hidden * mask[0]


def project(input: Tensor, masks: Masks, layer: Layer) -> tuple[Tensor, ...]:
    """The share of the input [T, B, I] in the cells of layer 0: T x [R, 4H]."""
    x = input.repeat(1, masks.samples, 1)  # [T, R, I]
    if masks.input is not None:
        x = x * masks.input
    return F.linear(x, layer[0], layer[2]).unbind(0)


class TimeStep:
    """The states of one time step, and everything that signals and steps want to know of it."""

    prediction: Tensor  # [B, V] or [K, B, V], logits of the unrecoded top state
    tokens: Tensor | None = None  # [B] what the signal looks at

    def __init__(self, rnn: RecodingLSTMBase, call: Call, masks: Masks, t: int):
        self.rnn, self.call, self.masks, self.t = rnn, call, masks, t
        self.h: list[Tensor] = []  # unrecoded states and output gates, L x [R, H]
        self.c: list[Tensor] = []
        self.o: list[Tensor] = []
        self.drawn = None if rnn.signal is None else rnn.signal.draw(self)

    def read(
        self, projected: Tensor, layers: list[Layer], h: list[Tensor], c: list[Tensor]
    ) -> Tensor:
        """Runs all layers from the recoded states before, L x [R, H]; gives what goes up from the
        top, [R, H]."""
        below = projected
        for l, (w_ih, w_hh, bias) in enumerate(layers):
            from_below = projected if l == 0 else F.linear(below, w_ih, bias)
            recurrent = self.masks.apply_recurrent(l, h[l])
            i, f, g, o = torch.addmm(from_below, recurrent, w_hh).chunk(4, 1)
            cell = torch.sigmoid(f) * c[l] + torch.sigmoid(i) * torch.tanh(g)
            if not cell.requires_grad:
                cell.requires_grad_()  # something must start the graph
            self.o.append(torch.sigmoid(o))
            self.c.append(cell)
            self.h.append(self.o[l] * torch.tanh(cell))
            below = self.masks.apply_up(l, self.t, self.h[l])
        return below

    @property
    def signal(self) -> Signal:
        """That of the RNN, where there is one."""
        assert self.rnn.signal is not None
        return self.rnn.signal

    def state(self, place: Place) -> Tensor:
        """An unrecoded state, [R, H]."""
        layer, name = place
        return (self.h if name == "h" else self.c)[layer]

    def decoded(self, top: Tensor) -> Tensor:
        """What the decoder reads of a top state [R, H]."""
        return self.masks.apply_up(self.rnn.num_layers - 1, self.t, top)

    def targets(self) -> Tensor:
        """The gold tokens [B], ignored behind the end of their sequence."""
        return self._inside(self.call.targets)

    def labels(self) -> Tensor:
        """The labels [B] of classifiers, likewise."""
        return self._inside(self.call.labels)

    def _inside(self, tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        if self.call.lengths is None:
            return tokens[self.t]
        return torch.where(self.t < self.call.lengths, tokens[self.t], IGNORE)


class Recoded(NamedTuple):
    """What recoding makes of a time step."""

    states: dict[Place, Tensor]  # [R, H]
    delta: Tensor  # [B]
    grads: dict[Place, Tensor]  # [R, H], 0 in rows that are not active
    sizes: dict[Place, Tensor]  # [], [R, 1] or [H]
    active: Tensor | None  # [B] bool, which instances are recoded; None: all


def recode(now: TimeStep, sizes: Tensor, counted: Tensor | None, outer_grad: bool) -> Recoded:
    """One step along the gradient of the signal, for every state that the signal recodes."""
    rnn = now.rnn
    exact = rnn.gradient == "exact" and outer_grad
    delta, inputs = now.signal.begin(now)
    grads = torch.autograd.grad(
        delta.sum(), list(inputs.values()), retain_graph=outer_grad, create_graph=exact
    )
    active = active_instances(now, counted, delta)
    if active is not None:
        rows = active.repeat(rnn.rows_per_instance).unsqueeze(1)
        grads = tuple(torch.where(rows, grad, 0) for grad in grads)
    by_place = dict(zip(inputs, grads, strict=True))
    chosen = rnn.step.choose(now, sizes, by_place, delta)
    states = {place: now.state(place) - chosen[place] * grad for place, grad in by_place.items()}
    return Recoded(states, delta.detach(), by_place, chosen, active)


def active_instances(now: TimeStep, counted: Tensor | None, delta: Tensor) -> Tensor | None:
    """[B] bool: has a signal, and neither mask nor gate leave it out; None: all."""
    conditions, gate = [], now.rnn.gate
    if counted is not None:
        conditions.append(counted[now.t])
    if now.call.mask is not None:
        conditions.append(now.call.mask[now.t])
    if gate is not None:
        conditions.append(delta.detach() > gate.threshold.to(delta.dtype))
    return torch.stack(conditions).all(0) if conditions else None


class Record(NamedTuple):
    """What is kept of a time step beside its states."""

    delta: Tensor  # [B]
    nll: Tensor | None  # [B] of the unrecoded state, where that is what is predicted from
    trace: tuple[Tensor, ...] | None  # see `trace_of`


def record(now: TimeStep, recoded: Recoded, sizes: Tensor) -> Record:
    nll = None
    if now.call.loss and now.signal.reads_target:
        # The prediction is that of the unrecoded state: these logits.
        nll = gold_nll(now.prediction, now.targets())
    return Record(recoded.delta, nll, trace_of(now, recoded, sizes) if now.call.trace else None)


@torch.no_grad()
def trace_of(now: TimeStep, recoded: Recoded, sizes: Tensor) -> tuple[Tensor, ...]:
    """delta_after [B], step sizes and gradient norms [L, S, B], instances recoded [B]."""
    rnn, B = now.rnn, now.call.input.shape[1]
    norms = now.h[0].new_zeros(rnn.num_layers, len(rnn.states), B)
    for (l, state), grad in recoded.grads.items():
        of_rows = grad.norm(dim=1).view(rnn.rows_per_instance, B)
        norms[l, rnn.states.index(state)] = of_rows.norm(dim=0)
    active = recoded.active
    if active is None:
        active = torch.ones(B, dtype=torch.bool, device=norms.device)
    made = rnn.step.traced(now, sizes, recoded.sizes).to(norms)
    return now.signal.delta_after(now, recoded.states), made * active, norms, active


def make_result(
    rnn: RecodingLSTMBase, call: Call, output: Tensor, h_n: Tensor, c_n: Tensor, records: list
) -> Result:
    """Everything that is made of all time steps at once; output [T, R, H]."""
    delta = nll = objective = None
    if records:
        delta = torch.stack([r.delta for r in records])
        counted = counted_positions(call)
        delta = delta if counted is None else delta.where(counted, 0)
    if call.loss and records and records[0].nll is not None:
        nll = torch.stack([r.nll for r in records])
        nll = objective = nll if torch.is_grad_enabled() else nll.detach()
    elif call.loss:
        nll, objective = losses(rnn, call, output)
    if rnn.signal is not None and rnn.signal.separate_states:
        output = output.unflatten(1, (rnn.rows_per_instance, -1)).transpose(0, 1)  # [K, T, B, H]
    trace = make_trace(rnn, call, delta, records) if call.trace else None
    return Result(output, h_n, c_n, nll, objective, delta, trace)


def losses(rnn: RecodingLSTMBase, call: Call, output: Tensor) -> tuple[Tensor, Tensor]:
    """nll and objective [T, B] of the states [T, R, H]: one large GEMM for all time steps."""
    assert call.targets is not None
    live = live_positions(call)
    targets = call.targets if live is None else call.targets.where(live, IGNORE)
    weight, bias = rnn.decoder_parameters()
    flat = targets.flatten()
    if weight.dim() == 3:  # an ensemble's
        logits = output.flatten(0, 1) @ weight.mT  # [K, T*B, V]
        logits = logits if bias is None else logits + bias.unsqueeze(1)
        objective = torch.stack([gold_nll(l, flat) for l in logits]).mean(0)
        mean = logits.mean(0) if rnn.mean_logits else log_mean_softmax(logits)
        return gold_nll(mean, flat).view_as(targets), objective.view_as(targets)
    logits = F.linear(output, weight, bias)
    if rnn.signal is not None and rnn.signal.separate_states:
        logits = log_mean_softmax(logits.unflatten(1, (rnn.rows_per_instance, -1)).transpose(0, 1))
    nll = gold_nll(logits.flatten(0, 1), flat).view_as(targets)
    return nll, nll


def make_trace(
    rnn: RecodingLSTMBase, call: Call, delta: Tensor | None, records: list[Record]
) -> RecodingTrace:
    """That of the whole call."""
    T, B, _ = call.input.shape
    if delta is None:
        return empty_trace(call.input.new_zeros(T, B), rnn.num_layers, len(rnn.states))
    columns = zip(*(r.trace for r in records if r.trace is not None), strict=True)
    after, sizes, norms, active = (torch.stack(column).detach() for column in columns)
    counted = counted_positions(call)
    after = after if counted is None else after.where(counted, 0)
    skipped = skipped_positions(active, call)
    return RecodingTrace(delta, after, sizes.movedim(0, 2), norms.movedim(0, 2), skipped)
