"""`Learned`: one parameter per layer and state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base import StartsAt, check_init, inverse_softplus


class Learned(StartsAt):
    """`softplus(rho)`, one parameter per layer and recoded state, starting at `init`.

    Keep it out of weight decay: its parameter carries `no_weight_decay = True`.
    """

    rho: Tensor  # [L, S]

    def __init__(self, init: float = 0.1):
        super().__init__()
        self.init = check_init(init)

    def bind(
        self, num_layers: int, states: Sequence[str], hidden_size: int, **factory: Any
    ) -> None:
        rho = inverse_softplus(self.init)
        self.numbers = [[rho] * len(states) for _ in range(num_layers)]
        parameter = nn.Parameter(torch.tensor(self.numbers, **factory))
        parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self.rho = parameter

    def held(self) -> Tensor:
        return self.rho

    def forward(self) -> Tensor:
        """The step sizes `[L, S]`."""
        return nn.functional.softplus(self.rho)

    def extra_repr(self) -> str:
        return f"init={self.init}"
