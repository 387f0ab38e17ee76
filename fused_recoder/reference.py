"""The specification: recoding in plain PyTorch, its gradients by autograd.

Every fused path is tested against this module, and every benchmark compares with it. It is
written to be read, and to be as fast as eager PyTorch honestly can be: the input GEMM of layer 0
is one call for all steps, a cell is two GEMMs and a few pointwise operations, K samples are one
GEMM, one call of `autograd.grad` per step serves all layers, and nothing is computed twice.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ._module import (
    IGNORE,
    Call,
    RecodingLSTMBase,
    RecodingTrace,
    Result,
    counted_positions,
    live_positions,
    skipped_positions,
)
from .functional import (
    INPUT_STREAM,
    LAYER_STREAM,
    OUTPUT_STREAM,
    RECURRENT_STREAM,
    SAMPLE_STREAM,
    dropout_mask,
)
from .language_model import RecodingLanguageModel as FusedLanguageModel


def gold_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p [B] of targets [B] under logits [B, V]; 0 where they are ignored."""
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)


def log_mean_softmax(logits: Tensor) -> Tensor:
    """log of the mean prediction [..., V] of logits [K, ..., V]."""
    return torch.logsumexp(F.log_softmax(logits, -1), 0) - math.log(logits.shape[0])


def entropy(log_o: Tensor) -> Tensor:
    """[...] of log probabilities [..., V]"""
    return -(log_o.exp() * log_o).sum(-1)


def signal_value(name: str, logits: Tensor, targets: Tensor | None) -> Tensor:
    """delta [B] of logits [B, V]; 0 where the target [B] is ignored."""
    if name == "entropy":
        return entropy(F.log_softmax(logits, -1))
    nll = gold_nll(logits, targets)
    if name == "nll":
        return nll
    if name == "surprisal":  # p^(-p) - 1
        return torch.expm1(torch.exp(-nll) * nll)
    raise ValueError(f"unknown signal {name!r}")


class Masks:
    """The masks of one call, the same as the fused engine's, given the same seed."""

    def __init__(self, rnn: RecodingLSTMBase, call: Call):
        self.rnn, self.call = rnn, call
        T, B, I = call.input.shape
        H, L, signal = rnn.hidden_size, rnn.num_layers, rnn.signal
        self.dtype = torch.float64 if call.input.dtype == torch.float64 else torch.float32
        self.held = signal is not None and signal.name == "variational"
        layer_p, output_p = (signal.p, signal.p) if self.held else rnn.active_dropout
        rows = B * rnn._rows_per_instance

        def mask(stream: int, p: float, units: int) -> Tensor | None:
            if p == 0:
                return None
            steps, time = (1, 0) if self.held else (T, call.time)
            return dropout_mask(call.seed, stream, p, steps, rows, units, self.dtype, time=time)

        # [T or 1, R, units] each, or None
        self.up = [mask(LAYER_STREAM + l, layer_p, H) for l in range(L - 1)]
        self.up.append(mask(OUTPUT_STREAM, output_p, H))
        held_p = signal.p if self.held else 0
        self.input = mask(INPUT_STREAM, held_p, I)
        self.recurrent = [mask(RECURRENT_STREAM + l, held_p, H) for l in range(L)]

    def apply_up(self, layer: int, t: int, hidden: Tensor) -> Tensor:
        """What layer `layer` hands up at step t, [R, H]."""
        mask = self.up[layer]
        return hidden if mask is None else hidden * mask[0 if self.held else t]

    def apply_recurrent(self, layer: int, hidden: Tensor) -> Tensor:
        mask = self.recurrent[layer]
        return hidden if mask is None else hidden * mask[0]

    def samples(self, t: int) -> Tensor:
        """Of MC Dropout: [K, B, H], [K, 1, H] or [K, V, H]."""
        signal, (V, H) = self.rnn.signal, self.rnn.decoder.weight.shape
        rows = {"unit": self.call.input.shape[1], "shared": 1, "weight": V}[signal.mask]
        return torch.cat(
            [
                dropout_mask(
                    self.call.seed, SAMPLE_STREAM, signal.p, 1, rows, H, self.dtype,
                    sample=k, time=self.call.time + t,
                )
                for k in range(signal.samples)
            ]
        )  # fmt: skip


class Step:
    """The states of one time step, and everything that follows from its prediction."""

    def __init__(self, rnn: RecodingLSTMBase, call: Call, masks: Masks, t: int):
        self.rnn, self.call, self.masks, self.t = rnn, call, masks, t
        self.h, self.c, self.o = [], [], []  # unrecoded states and output gates, L x [R, H]
        signal = rnn.signal
        self.mc_masks = None
        if signal is not None and signal.name == "mc_dropout":
            self.mc_masks = masks.samples(t) if signal.p > 0 else None

    def states(self, l: int, state: str) -> Tensor:
        return (self.h if state == "h" else self.c)[l]

    def decoded(self, top: Tensor) -> Tensor:
        """What the decoder reads of a top state [R, H]."""
        return self.masks.apply_up(self.rnn.num_layers - 1, self.t, top)

    def logits(self, top: Tensor) -> Tensor:
        """Predictions of a top state [R, H]: [B, V], or [K, B, V] of signals that mean K."""
        signal, (weight, bias) = self.rnn.signal, self.rnn.decoder_parameters()
        if signal.name == "mc_dropout":
            K, B = signal.samples, top.shape[0]
            if self.mc_masks is None:
                return F.linear(top, weight, bias).expand(K, -1, -1)
            if signal.mask == "weight":
                masked = (self.mc_masks * weight).mT  # [K, H, V]
                out = top.to(masked.dtype) @ masked
                return out if bias is None else out + bias
            return F.linear((self.mc_masks * top).flatten(0, 1), weight, bias).view(K, B, -1)
        if signal.name == "ensemble":
            logits = self.decoded(top) @ weight.mT  # [K, B, V]
            logits = logits if bias is None else logits + bias.unsqueeze(1)
            return logits.mean(0) if self.rnn.decoder.predict == "mean_logits" else logits
        logits = F.linear(self.decoded(top), weight, bias)
        if signal.name == "variational":
            return logits.view(signal.samples, -1, logits.shape[-1])
        return logits

    def predict(self) -> None:
        """Logits of the unrecoded top state and the token that the signal looks at."""
        signal = self.rnn.signal
        self.prediction = self.logits(self.h[-1])
        self.gold = None  # [B]
        if signal.reads_target:
            if self.call.targets is None or signal.target == "argmax":
                self.gold = self.prediction.detach().argmax(-1)
            else:
                self.gold = self.targets()

    def targets(self) -> Tensor:
        """The gold tokens [B], ignored behind the end of their sequence."""
        if self.call.lengths is None:
            return self.call.targets[self.t]
        return torch.where(self.t < self.call.lengths, self.call.targets[self.t], IGNORE)

    def delta(self, logits: Tensor, top: Tensor) -> Tensor:
        """The signal [B] of logits and the top state [R, H] that gave them."""
        signal = self.rnn.signal
        if signal.name == "custom":
            with_targets = signal.sees_labels and self.call.targets is not None
            return signal.fn(logits, self.decoded(top), self.targets() if with_targets else None)
        if logits.dim() == 3:
            return entropy(log_mean_softmax(logits))
        if signal.name == "ensemble":  # of mean logits
            return entropy(F.log_softmax(logits, -1))
        return signal_value(signal.name, logits, self.gold)

    def classified(self, states: dict) -> Tensor:
        """The signal [B] of classifiers, given states [B, H] by (layer, name)."""
        labels = self.call.labels[self.t]
        if self.call.lengths is not None:
            labels = torch.where(self.t < self.call.lengths, labels, IGNORE)
        total = 0
        for classifier, place in zip(self.rnn.signal.members, self.rnn.signal.places, strict=True):
            logits = F.linear(
                states[place],
                classifier.weight.to(states[place]),
                classifier.bias.to(states[place]),
            )
            if logits.shape[1] == 1:  # sigmoid(z) is the softmax of (0, z)
                logits = torch.cat([torch.zeros_like(logits), logits], 1)
            total = total + gold_nll(logits, labels)
        return total

    def delta_after(self, recoded: dict) -> Tensor:
        """The signal [B] of recoded states [R, H] by (layer, name)."""
        if self.rnn.signal.name == "classifier":
            return self.classified(recoded)
        top = self.rnn.num_layers - 1
        # If only c is recoded: the h that the recoded c would have given.
        h = recoded[top, "h"] if "h" in self.rnn.states else self.o[-1] * recoded[top, "c"].tanh()
        return self.delta(self.logits(h), h)


class RecodingLSTM(RecodingLSTMBase):
    """Same signature and semantics as `FusedRecodingLSTM`."""

    def _run(self, call: Call) -> Result:
        return run(self, call)


def run(rnn: RecodingLSTMBase, call: Call) -> Result:
    """The time loop."""
    outer_grad, exact = torch.is_grad_enabled(), rnn.gradient == "exact"
    signal = rnn.signal
    masks = Masks(rnn, call)
    live, counted = live_positions(call), counted_positions(call)  # [T, B] or None
    sizes = rnn.step.sizes(rnn) if signal is not None else None  # [L, S]
    samples = rnn._rows_per_instance
    layers = [
        (w[0], w[1].t(), w[2] + w[3] if rnn.bias else None) for w in rnn.all_weights
    ]  # w_ih [4H, in], w_hh^T [H, 4H], bias [4H]
    x = call.input.repeat(1, samples, 1)  # [T, R, I]
    if masks.input is not None:
        x = x * masks.input
    projected = F.linear(x, layers[0][0], layers[0][2]).unbind(0)  # T x [R, 4H]

    h, c = list(call.h0.unbind(0)), list(call.c0.unbind(0))  # recoded, L x [R, H]
    outputs, predictions, deltas, trace = [], [], [], []
    for t in range(len(projected)):
        # Recoding differentiates also where the caller does not.
        with torch.enable_grad():
            step, below = Step(rnn, call, masks, t), None
            for l, (w_ih, w_hh, bias) in enumerate(layers):
                gates = projected[t] if l == 0 else F.linear(below, w_ih, bias)
                recurrent = masks.apply_recurrent(l, h[l])
                i, f, g, o = torch.addmm(gates, recurrent, w_hh).chunk(4, 1)
                cell = torch.sigmoid(f) * c[l] + torch.sigmoid(i) * torch.tanh(g)
                if not cell.requires_grad:
                    cell.requires_grad_()  # something must start the graph
                step.o.append(torch.sigmoid(o))
                step.c.append(cell)
                step.h.append(step.o[l] * torch.tanh(cell))
                below = masks.apply_up(l, t, step.h[l])
            h_new, c_new, output = list(step.h), list(step.c), below

            if signal is not None:
                grads, delta, active = recoding_gradient(step, outer_grad, exact, counted)
                steps = choose_steps(step, sizes, grads, delta)
                recoded = {
                    place: step.states(*place) - steps[place].unsqueeze(-1) * grads[place]
                    for place in grads
                }
                for (l, state), value in recoded.items():
                    (h_new if state == "h" else c_new)[l] = value
                if not signal.sees_labels:
                    output = step.decoded(h_new[-1])
                deltas.append(delta.detach())
                if call.loss and signal.reads_target:
                    # The prediction is that of the unrecoded state: these logits.
                    predictions.append(gold_nll(step.prediction, step.targets()))

        if call.trace and signal is not None:
            with torch.no_grad():
                trace.append(trace_step(step, recoded, grads, steps, active))
        if live is not None:
            inside = live[t].repeat(samples).unsqueeze(1)
            h_new = [torch.where(inside, a, b) for a, b in zip(h_new, h, strict=True)]
            c_new = [torch.where(inside, a, b) for a, b in zip(c_new, c, strict=True)]
            output = torch.where(inside, output, 0)
        if not outer_grad:
            h_new, c_new = ([s.detach() for s in states] for states in (h_new, c_new))
            output = output.detach()
        h, c = h_new, c_new
        outputs.append(output)

    output = torch.stack(outputs)  # [T, R, H]
    delta = torch.stack(deltas) if deltas else None
    if delta is not None and counted is not None:
        delta = delta.where(counted, 0)
    nll = objective = None
    if call.loss and predictions:
        nll = torch.stack(predictions)
        nll = objective = nll if outer_grad else nll.detach()
    elif call.loss:
        nll, objective = losses(rnn, call, output, live)
    if samples > 1 or (signal is not None and signal.name == "variational"):
        output = output.unflatten(1, (samples, -1)).transpose(0, 1)  # [K, T, B, H]
    traced = make_trace(rnn, call, delta, trace, counted) if call.trace else None
    return Result(output, torch.stack(h), torch.stack(c), nll, objective, delta, traced)


def recoding_gradient(step: Step, outer_grad: bool, exact: bool, counted: Tensor | None):
    """d(delta)/d(state) by (layer, name) [R, H], delta [B], and which rows [B] (or None: all) it is
    taken in; 0 in the others."""
    rnn, call, t = step.rnn, step.call, step.t
    active = None if counted is None else counted[t]
    if call.mask is not None:
        active = call.mask[t] if active is None else active & call.mask[t]
    if rnn.signal.name == "classifier":
        wanted = rnn.signal.places
        # Each classifier recodes the state it reads, and no other.
        read = {place: step.states(*place).detach().requires_grad_() for place in wanted}
        if exact and outer_grad:
            read = {place: step.states(*place) * 1 for place in wanted}
        delta = step.classified(read)
        inputs = list(read.values())
    else:
        wanted = [(l, s) for l in range(rnn.num_layers) for s in rnn.states]
        step.predict()
        delta = step.delta(step.prediction, step.h[-1])
        inputs = [step.states(*place) for place in wanted]
    if rnn.gate is not None:
        opened = delta.detach() > rnn.gate.threshold.to(delta.dtype)
        active = opened if active is None else active & opened
    grads = torch.autograd.grad(
        delta.sum(), inputs, retain_graph=outer_grad, create_graph=exact and outer_grad
    )
    if active is not None:
        rows = active.repeat(rnn._rows_per_instance).unsqueeze(1)
        grads = [torch.where(rows, g, 0) for g in grads]
    return dict(zip(wanted, grads, strict=True)), delta, active


def choose_steps(step: Step, sizes: Tensor, grads: dict, delta: Tensor) -> dict:
    """Step sizes [] or [R] by (layer, name)."""
    rnn = step.rnn
    if rnn.step.kind == "predicted":
        return {
            (l, s): rnn.step.predict(l, rnn.states.index(s), step.states(l, s)) for l, s in grads
        }
    if rnn.step.kind == "given":
        return {(l, s): sizes[l, rnn.states.index(s)] for l, s in grads}
    with torch.no_grad():  # backtracking
        samples = rnn._rows_per_instance
        alpha = torch.full_like(delta, rnn.step.initial)  # [B]
        settled = torch.zeros_like(delta, dtype=torch.bool)
        for trial in range(1, rnn.step.trials + 1):
            rows = alpha.repeat(samples).unsqueeze(1)
            recoded = {p: step.states(*p) - rows * g for p, g in grads.items()}
            settled = settled | (step.delta_after(recoded) < delta)
            shrink = 0.0 if trial == rnn.step.trials else rnn.step.shrink
            alpha = torch.where(settled, alpha, alpha * shrink)
            if settled.all():
                break
        return dict.fromkeys(grads, alpha.repeat(samples))


def losses(rnn: RecodingLSTMBase, call: Call, output: Tensor, live) -> tuple[Tensor, Tensor]:
    """nll and objective [T, B] of the states [T, R, H]: one large GEMM for all steps."""
    targets = call.targets if live is None else call.targets.where(live, IGNORE)
    weight, bias = rnn.decoder_parameters()
    flat = targets.flatten()
    if weight.dim() == 3:
        logits = output.flatten(0, 1) @ weight.mT  # [K, T*B, V]
        logits = logits if bias is None else logits + bias.unsqueeze(1)
        objective = torch.stack([gold_nll(l, flat) for l in logits]).mean(0)
        mean = logits.mean(0) if rnn.decoder.predict == "mean_logits" else log_mean_softmax(logits)
        return gold_nll(mean, flat).view_as(targets), objective.view_as(targets)
    logits = F.linear(output, weight, bias)
    if rnn.signal is not None and rnn.signal.name == "variational":
        logits = log_mean_softmax(logits.unflatten(1, (rnn.signal.samples, -1)).transpose(0, 1))
    nll = gold_nll(logits.flatten(0, 1), flat).view_as(targets)
    return nll, nll


def trace_step(step: Step, recoded: dict, grads: dict, steps: dict, active):
    """delta_after [B], step sizes and gradient norms [L, S, B], rows recoded [B]."""
    rnn = step.rnn
    K, B = rnn._rows_per_instance, step.call.input.shape[1]
    norms = step.h[0].new_zeros(rnn.num_layers, len(rnn.states), B)
    sizes = torch.zeros_like(norms)
    if rnn.step.kind == "given":
        sizes += rnn.step.sizes(rnn).to(sizes).unsqueeze(2)
    elif rnn.step.kind == "backtracking":
        sizes += next(iter(steps.values()))[:B]
    for (l, s), g in grads.items():
        norms[l, rnn.states.index(s)] = g.norm(dim=1).view(K, B).norm(dim=0)
    if rnn.step.kind == "predicted":  # of states that no classifier reads, too
        for l in range(rnn.num_layers):
            for i, s in enumerate(rnn.states):
                sizes[l, i] = rnn.step.predict(l, i, step.states(l, s)).view(K, B).mean(0)
    rows = torch.ones(B, dtype=torch.bool, device=norms.device) if active is None else active
    return step.delta_after(recoded), sizes * rows, norms, rows


def make_trace(rnn, call: Call, delta, trace: list, counted) -> RecodingTrace:
    T, B, _ = call.input.shape
    if not trace:
        nothing = call.input.new_zeros(rnn.num_layers, len(rnn.states), T, B)
        zero = call.input.new_zeros(T, B)
        return RecodingTrace(zero, zero, nothing, nothing, zero.bool())
    after, sizes, norms, rows = (
        torch.stack(column).detach() for column in zip(*trace, strict=True)
    )
    if counted is not None:
        after = after.where(counted, 0)
    return RecodingTrace(
        delta, after, sizes.movedim(0, 2), norms.movedim(0, 2), skipped_positions(rows, call)
    )


class RecodingLanguageModel(FusedLanguageModel):
    """Same signature and semantics as `fused_recoder.RecodingLanguageModel`."""

    rnn_class = RecodingLSTM
