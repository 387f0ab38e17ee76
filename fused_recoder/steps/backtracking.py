"""`Backtracking`: steps that are tried before they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import StartsAt

if TYPE_CHECKING:
    from ..reference import TimeStep
    from ..signals import Place


class Backtracking(StartsAt):
    """Starts at `initial` and multiplies by `shrink` until the re-decoded signal falls.

    For every instance and time step by itself, `trials` times at most; where none of them lowers
    the signal the state stays as it is. The same guarantee as `Lipschitz`, for every signal, with
    useful steps; it costs re-decodings. All states of an instance take the same step.
    """

    value: Tensor  # [L, S], all the same

    def __init__(self, initial: float = 1.0, shrink: float = 0.5, trials: int = 8):
        super().__init__()
        if not (math.isfinite(initial) and initial > 0):
            raise ValueError(f"initial must be positive and finite, got {initial}")
        if not 0 < shrink < 1:
            raise ValueError(f"shrink must be in (0, 1), got {shrink}")
        if not isinstance(trials, int) or trials < 1:
            raise ValueError(f"trials must be a positive int, got {trials!r}")
        self.initial, self.shrink, self.trials = initial, shrink, trials

    def bind(
        self, num_layers: int, states: Sequence[str], hidden_size: int, **factory: Any
    ) -> None:
        self.numbers = [[float(self.initial)] * len(states) for _ in range(num_layers)]
        self.register_buffer("value", torch.tensor(self.numbers, **factory), persistent=False)

    def held(self) -> Tensor:
        return self.value

    def forward(self) -> Tensor:
        """The step sizes `[L, S]` that are tried first."""
        return self.value

    def spec_fields(self) -> dict[str, Any]:
        return {"step": "backtracking", "shrink": self.shrink, "trials": self.trials}

    @torch.no_grad()
    def choose(
        self, now: TimeStep, sizes: Tensor, grads: dict[Place, Tensor], delta: Tensor
    ) -> dict[Place, Tensor]:
        samples = now.rnn.rows_per_instance
        alpha = sizes[0, 0].to(delta).expand_as(delta)  # [B]
        settled = torch.zeros_like(delta, dtype=torch.bool)
        for trial in range(1, self.trials + 1):
            rows = alpha.repeat(samples).unsqueeze(1)
            tried = {place: now.state(place) - rows * grad for place, grad in grads.items()}
            settled = settled | (now.signal.delta_after(now, tried) < delta)
            shrink = 0.0 if trial == self.trials else self.shrink
            alpha = torch.where(settled, alpha, alpha * shrink)
            if settled.all():
                break
        return dict.fromkeys(grads, alpha.repeat(samples).unsqueeze(1))

    def traced(self, now: TimeStep, sizes: Tensor, chosen: dict[Place, Tensor]) -> Tensor:
        alpha = next(iter(chosen.values()))[: now.call.input.shape[1], 0]  # [B]
        return alpha.expand(*sizes.shape, -1)

    def extra_repr(self) -> str:
        return f"initial={self.initial}, shrink={self.shrink}, trials={self.trials}"
