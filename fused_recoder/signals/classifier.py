"""`Classifier`: weak supervision of single states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Place, Signal
from .formulas import gold_nll
from .gold import nll_bound

if TYPE_CHECKING:
    from .._module import RecodingLSTMBase
    from ..reference import TimeStep


class Classifier(Signal):
    """Cross-entropy of a trained diagnostic classifier: weak supervision of the state it reads.

    Args:
        weight: `[H]` or `[1, H]` for a binary classifier, `[C, H]` for C classes.
        bias: `[]` or `[1]`, `[C]`; zeros if None.
        layer: which layer it reads; negative counts from the top.
        state: `"h"` or `"c"`.

    Only that state is recoded. `forward` takes the `labels` (`[T, B]`, -100 where there is none).
    Several classifiers of different states can be given together, in a list.
    """

    name = "classifier"
    sees_labels = True
    weight: Tensor
    bias: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, layer: int = -1, state: str = "h"
    ):
        super().__init__()
        weight = torch.as_tensor(weight).detach().clone()
        if weight.dim() == 1:
            weight = weight.unsqueeze(0)
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"weight must be floating point of shape [H] or [C, H], got {weight.dtype} of "
                f"shape {tuple(weight.shape)}"
            )
        bias = weight.new_zeros(weight.shape[0]) if bias is None else torch.as_tensor(bias)
        bias = bias.detach().clone().to(weight).reshape(-1)
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"bias must have {weight.shape[0]} elements like weight, got {bias.shape[0]}"
            )
        if state not in ("h", "c"):
            raise ValueError(f"state must be 'h' or 'c', got {state!r}")
        self.layer, self.state = layer, state
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @property
    def num_classes(self) -> int:
        """2 of a binary classifier."""
        return max(2, self.weight.shape[0])

    def place(self, rnn: RecodingLSTMBase) -> Place:
        """The state it reads, checked against the states there are."""
        layer = self.layer + rnn.num_layers if self.layer < 0 else self.layer
        if not 0 <= layer < rnn.num_layers:
            raise ValueError(f"Classifier reads layer {self.layer}, but there are {rnn.num_layers}")
        if self.state not in rnn.states:
            raise ValueError(f"Classifier reads state {self.state!r}, but states are {rnn.states}")
        if self.weight.shape[1] != rnn.hidden_size:
            raise ValueError(
                f"Classifier must read hidden_size = {rnn.hidden_size} features, got a weight of "
                f"shape {tuple(self.weight.shape)}"
            )
        return layer, self.state

    def nll(self, states: Tensor, labels: Tensor) -> Tensor:
        """`[B]` of states `[B, H]`; 0 where the label `[B]` is ignored."""
        logits = F.linear(states, self.weight.to(states), self.bias.to(states))
        return gold_nll(_two_classes(logits, 1), labels)

    def curvature(self) -> Tensor:
        """L `[]` in the state it reads."""
        return nll_bound(_two_classes(self.weight, 0))

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, layer={self.layer}, state={self.state!r}"


def _two_classes(of_classes: Tensor, dim: int) -> Tensor:
    """sigmoid(z) is the softmax of (0, z)."""
    if of_classes.shape[dim] > 1:
        return of_classes
    return torch.cat([torch.zeros_like(of_classes), of_classes], dim)


class Classifiers(Signal):
    """Several classifiers, each of a state of its own; delta is the sum of their signals."""

    name = "classifier"
    sees_labels = reads_labels = True
    needs_decoder = False

    def __init__(self, classifiers: Sequence[Classifier]):
        super().__init__()
        if not classifiers or not all(isinstance(c, Classifier) for c in classifiers):
            raise TypeError(f"signal must be a list of Classifier objects, got {classifiers!r}")
        self.members = nn.ModuleList(classifiers)
        self.reads: list[Place] = []  # the state of each

    def bind(self, rnn: RecodingLSTMBase) -> None:
        places = [classifier.place(rnn) for classifier in self._classifiers()]
        if len(set(places)) < len(places):
            raise ValueError(f"two Classifiers read the same state: {places}")
        self.reads = places

    def check_call(self, targets: Any, labels: Any) -> None:
        if labels is None:
            raise ValueError(
                "labels must be given for a Classifier signal, with -100 where there is none"
            )

    def spec_fields(self) -> dict[str, Any]:
        states = tuple(2 * layer + (state == "c") for layer, state in self.reads)
        return {"signal": self.name, "classifier_states": states}

    def tensors(self) -> list[Tensor]:
        return [tensor for c in self._classifiers() for tensor in (c.weight, c.bias)]

    def places(self, rnn: RecodingLSTMBase) -> list[Place]:
        return self.reads

    def begin(self, now: TimeStep) -> tuple[Tensor, dict[Place, Tensor]]:
        # Each recodes the state it reads, and no other: copies, which no other state goes into.
        read = {place: now.state(place).clone() for place in self.reads}
        return self.delta_after(now, read), read

    def delta_after(self, now: TimeStep, recoded: dict[Place, Tensor]) -> Tensor:
        labels = now.labels()
        pairs = zip(self._classifiers(), self.reads, strict=True)
        return torch.stack([c.nll(recoded[place], labels) for c, place in pairs]).sum(0)

    def bounds(self, rnn: RecodingLSTMBase) -> Tensor:
        shape, device = (rnn.num_layers, len(rnn.states)), rnn.weight_hh_l0.device
        result = torch.ones(shape, dtype=torch.float64, device=device)
        for classifier, (layer, state) in zip(self._classifiers(), self.reads, strict=True):
            result[layer, rnn.states.index(state)] = classifier.curvature()
        return result

    def bounded_by(self, rnn: RecodingLSTMBase) -> list[Tensor]:
        return [classifier.weight for classifier in self._classifiers()]

    def _classifiers(self) -> list[Classifier]:
        return [c for c in self.members if isinstance(c, Classifier)]
