"""`Predicted`: a network per layer and state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .base import StepPolicy, check_init, inverse_softplus

if TYPE_CHECKING:
    from .._module import RecodingLSTMBase
    from ..reference import TimeStep
    from ..signals import Place


class Predicted(StepPolicy):
    """`softplus(MLP(state))`, a network per layer and recoded state, each reading its own state.

    The state it reads is a constant for training (in every `gradient=` mode), as in the thesis.
    `init` is the step size it starts near. Keep it out of weight decay: its parameters carry
    `no_weight_decay = True`.
    """

    def __init__(self, hidden: Sequence[int] = (300, 100), init: float = 0.1):
        super().__init__()
        if not all(isinstance(size, int) and size >= 1 for size in hidden):
            raise ValueError(f"hidden must be positive ints, got {hidden}")
        self.hidden, self.init = tuple(hidden), check_init(init)

    def bind(
        self, num_layers: int, states: Sequence[str], hidden_size: int, **factory: Any
    ) -> None:
        self.shape = (num_layers, len(states))
        sizes = (hidden_size, *self.hidden, 1)

        def network() -> nn.Sequential:
            maps = [nn.Linear(a, b, **factory) for a, b in pairwise(sizes)]
            nn.init.constant_(maps[-1].bias, inverse_softplus(self.init))
            layers = [module for linear in maps for module in (linear, nn.ReLU())]
            return nn.Sequential(*layers[:-1], nn.Softplus())

        self.networks = nn.ModuleList(network() for _ in range(num_layers * len(states)))
        for parameter in self.parameters():
            parameter.no_weight_decay = True  # type: ignore[attr-defined]

    def predict(self, layer: int, state: int, value: Tensor) -> Tensor:
        """Step sizes `[R, 1]` for the states `[R, H]`."""
        return self.networks[layer * self.shape[1] + state](value.detach())

    def sizes(self, rnn: RecodingLSTMBase) -> Tensor:
        """They follow at every time step: zeros."""
        return rnn.weight_hh_l0.new_zeros(self.shape)

    def spec_fields(self) -> dict[str, Any]:
        return {"step": "predicted"}

    def tensors(self, rnn: RecodingLSTMBase) -> list[Tensor]:
        """Weight and bias of every linear map, network by network."""
        maps = [module for module in self.networks.modules() if isinstance(module, nn.Linear)]
        return [tensor for linear in maps for tensor in (linear.weight, linear.bias)]

    def choose(
        self, now: TimeStep, sizes: Tensor, grads: dict[Place, Tensor], delta: Tensor
    ) -> dict[Place, Tensor]:
        index = now.rnn.states.index
        return {place: self.predict(place[0], index(place[1]), now.state(place)) for place in grads}

    def traced(self, now: TimeStep, sizes: Tensor, chosen: dict[Place, Tensor]) -> Tensor:
        """The mean of an instance's rows, of states that no classifier reads, too."""
        found = [
            torch.stack(
                [self.predict(l, i, now.state((l, s))) for i, s in enumerate(now.rnn.states)]
            )
            for l in range(now.rnn.num_layers)
        ]
        return torch.stack(found).squeeze(3).unflatten(2, (now.rnn.rows_per_instance, -1)).mean(2)
