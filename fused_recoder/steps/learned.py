"""`Learned`: parameters per layer and state, or for every unit of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base import StartsAt, check_init, inverse_softplus


class Learned(StartsAt):
    """`softplus(rho)`, starting at `init`.

    Args:
        init: the step size at the start.
        per: `"state"` learns one size per layer and recoded state, `"unit"` one for each of their
            units (as Meta-SGD has one for each weight).

    Keep it out of weight decay: its parameter carries `no_weight_decay = True`.
    """

    rho: Tensor  # [L, S] or [L, S, H]

    def __init__(self, init: float = 0.1, per: str = "state"):
        super().__init__()
        if per not in ("state", "unit"):
            raise ValueError(f"per must be 'state' or 'unit', got {per!r}")
        self.init, self.per = check_init(init), per

    def bind(
        self, num_layers: int, states: Sequence[str], hidden_size: int, **factory: Any
    ) -> None:
        rho = inverse_softplus(self.init)
        self.numbers = [[rho] * len(states) for _ in range(num_layers)]
        self.units = hidden_size if self.per == "unit" else None
        dtype = factory.get("dtype") or torch.get_default_dtype()
        parameter = nn.Parameter(self.start().to(device=factory.get("device"), dtype=dtype))
        parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self.rho = parameter

    def start(self) -> Tensor:
        """The numbers it starts at, `[L, S]` or `[L, S, H]` float64."""
        of_states = super().start()
        if self.units is None:
            return of_states
        return of_states.unsqueeze(2).repeat(1, 1, self.units)

    def held(self) -> Tensor:
        return self.rho

    def forward(self) -> Tensor:
        """The step sizes `[L, S]` or `[L, S, H]`."""
        return nn.functional.softplus(self.rho)

    def extra_repr(self) -> str:
        return f"init={self.init}" + (f", per={self.per!r}" if self.per != "state" else "")
