"""The specification: recoding in plain PyTorch, its gradients by autograd.

Every fused path is tested against this module, and every benchmark compares with it. It is
written to be read, and to be as fast as eager PyTorch honestly can be: the input GEMM of layer 0
is one call for all steps, a cell is two GEMMs and a few pointwise operations, one call of
`autograd.grad` per step serves all layers, and nothing is computed twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._module import IGNORE, Call, RecodingLSTMBase, RecodingTrace, Result
from .functional import LAYER_STREAM, OUTPUT_STREAM, dropout_mask
from .language_model import RecodingLanguageModel as FusedLanguageModel


def gold_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p [B] of targets [B] under logits [B, V]; 0 where they are ignored."""
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)


def signal_value(name: str, logits: Tensor, targets: Tensor | None) -> Tensor:
    """delta [B] of logits [B, V]; 0 where the target [B] is ignored."""
    if name == "entropy":
        log_o = F.log_softmax(logits, -1)
        return -(log_o.exp() * log_o).sum(-1)
    nll = gold_nll(logits, targets)
    if name == "nll":
        return nll
    if name == "surprisal":  # p^(-p) - 1
        return torch.expm1(torch.exp(-nll) * nll)
    raise ValueError(f"unknown signal {name!r}")


class RecodingLSTM(RecodingLSTMBase):
    """Same signature and semantics as `FusedRecodingLSTM`."""

    def _run(self, call: Call) -> Result:
        outer_grad, exact = torch.is_grad_enabled(), self.gradient == "exact"
        signal, L = self.signal, self.num_layers
        masks = self._dropout_masks(call)  # per layer [T, B, H] or None, of what goes up from it
        live = self._live(call)  # [T, B] or None: inside its sequence
        counted = live  # [T, B] or None: has a signal
        if call.targets is not None:
            kept = call.targets != IGNORE
            counted = kept if live is None else kept & live
        active = counted  # [T, B] or None: is recoded
        if call.mask is not None:
            active = call.mask if counted is None else call.mask & counted
        step = self.step()  # [L, S]
        layers = [
            (w[0], w[1].t(), w[2] + w[3] if self.bias else None) for w in self.all_weights
        ]  # w_ih [4H, in], w_hh^T [H, 4H], bias [4H]
        projected = F.linear(call.input, layers[0][0], layers[0][2]).unbind(0)  # T x [B, 4H]

        h, c = list(call.h0.unbind(0)), list(call.c0.unbind(0))  # recoded, L x [B, H]
        outputs, nlls, trace = [], [], []
        for t in range(len(projected)):
            # Recoding differentiates also where the caller does not.
            with torch.enable_grad():
                h_raw, c_raw, o_gates, below = [], [], [], None
                for l, (w_ih, w_hh, bias) in enumerate(layers):
                    gates = projected[t] if l == 0 else F.linear(below, w_ih, bias)
                    i, f, g, o = torch.addmm(gates, h[l], w_hh).chunk(4, 1)
                    cell = torch.sigmoid(f) * c[l] + torch.sigmoid(i) * torch.tanh(g)
                    if not cell.requires_grad:
                        cell.requires_grad_()  # something must start the graph
                    o = torch.sigmoid(o)
                    hidden = o * torch.tanh(cell)
                    below = hidden if masks[l] is None else hidden * masks[l][t]
                    h_raw.append(hidden)
                    c_raw.append(cell)
                    o_gates.append(o)
                h_new, c_new, output = list(h_raw), list(c_raw), below

                if signal is not None:
                    logits = F.linear(below, *self.decoder_parameters())  # [B, V]
                    gold = self._gold(call, t, logits)
                    delta = signal_value(signal.name, logits, gold)  # [B]
                    wanted = [(l, s) for l in range(L) for s in self.states]
                    grads = torch.autograd.grad(
                        delta.sum(),
                        [(h_raw if s == "h" else c_raw)[l] for l, s in wanted],
                        retain_graph=outer_grad,
                        create_graph=exact and outer_grad,
                    )
                    if active is not None:
                        grads = [torch.where(active[t].unsqueeze(1), g, 0) for g in grads]
                    for (l, s), g in zip(wanted, grads, strict=True):
                        state = h_new if s == "h" else c_new
                        state[l] = state[l] - step[l, self.states.index(s)] * g
                    if call.loss and signal.reads_target:
                        # The prediction is that of the unrecoded state: these logits.
                        nlls.append(gold_nll(logits, self._targets(call, t)))
                    if not signal.reads_target:
                        output = h_new[-1] if masks[-1] is None else h_new[-1] * masks[-1][t]

            if call.trace and signal is not None:
                with torch.no_grad():
                    # If only c is recoded: the h that the recoded c would have given.
                    top = h_new[-1] if "h" in self.states else o_gates[-1] * torch.tanh(c_new[-1])
                    after = F.linear(
                        top if masks[-1] is None else top * masks[-1][t],
                        *self.decoder_parameters(),
                    )
                    norms = torch.stack([g.norm(dim=1) for g in grads])
                    trace.append((delta, signal_value(signal.name, after, gold), norms))
            if live is not None:
                inside = live[t].unsqueeze(1)
                h_new = [torch.where(inside, a, b) for a, b in zip(h_new, h, strict=True)]
                c_new = [torch.where(inside, a, b) for a, b in zip(c_new, c, strict=True)]
                output = torch.where(inside, output, 0)
            if not outer_grad:
                h_new, c_new = ([s.detach() for s in states] for states in (h_new, c_new))
                output = output.detach()
            h, c = h_new, c_new
            outputs.append(output)

        output, nll = torch.stack(outputs), None
        if call.loss and nlls:
            nll = torch.stack(nlls) if outer_grad else torch.stack(nlls).detach()
        elif call.loss:  # one large GEMM for all steps
            targets = call.targets if live is None else call.targets.where(live, IGNORE)
            logits = F.linear(output, *self.decoder_parameters())
            nll = gold_nll(logits.flatten(0, 1), targets.flatten()).view_as(targets)
        return Result(
            output,
            torch.stack(h),
            torch.stack(c),
            nll,
            self._trace(call, trace, counted, active, step) if call.trace else None,
        )

    def _gold(self, call: Call, t: int, logits: Tensor) -> Tensor | None:
        """The token [B] that the signal of step t looks at."""
        if not self.signal.reads_target:
            return None
        if call.targets is None or self.signal.target == "argmax":
            return logits.detach().argmax(-1)
        return self._targets(call, t)

    def _targets(self, call: Call, t: int) -> Tensor:
        """The gold tokens [B] of step t, ignored behind the end of their sequence."""
        if call.lengths is None:
            return call.targets[t]
        return torch.where(t < call.lengths, call.targets[t], IGNORE)

    def _live(self, call: Call) -> Tensor | None:
        if call.lengths is None:
            return None
        time = torch.arange(call.input.shape[0], device=call.lengths.device)
        return time.unsqueeze(1) < call.lengths

    def _dropout_masks(self, call: Call) -> list[Tensor | None]:
        """The same masks as the fused engine's, given the same seed."""
        T, B, _ = call.input.shape
        dropout, output_dropout = self.active_dropout
        dtype = torch.float64 if call.input.dtype == torch.float64 else torch.float32
        streams = [(LAYER_STREAM + l, dropout) for l in range(self.num_layers - 1)]
        streams.append((OUTPUT_STREAM, output_dropout))
        return [
            None if p == 0 else dropout_mask(call.seed, stream, p, T, B, self.hidden_size, dtype)
            for stream, p in streams
        ]

    def _trace(self, call, trace, counted, active, step) -> RecodingTrace:
        T, B, _ = call.input.shape
        shape = (self.num_layers, len(self.states), T, B)
        if self.signal is None:
            nothing, zero = call.input.new_zeros(shape), call.input.new_zeros(T, B)
            return RecodingTrace(zero, zero, nothing, nothing)
        delta, after, norms = (torch.stack(column).detach() for column in zip(*trace, strict=True))
        if counted is not None:
            delta, after = delta.where(counted, 0), after.where(counted, 0)
        sizes = step.detach()[:, :, None, None].expand(shape)
        if active is not None:
            sizes = sizes * active
        return RecodingTrace(delta, after, sizes, norms.movedim(0, 1).reshape(shape))


class RecodingLanguageModel(FusedLanguageModel):
    """Same signature and semantics as `fused_recoder.RecodingLanguageModel`."""

    rnn_class = RecodingLSTM
