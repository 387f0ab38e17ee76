"""When to recode: only where the signal is large enough."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """Recodes an instance at a time step only where `delta` exceeds a threshold.

    Args:
        threshold: a fixed one; or
        quantile: the threshold follows this quantile of delta over training (0.8 recodes about one
            position in five); until the first training batch everything is recoded.
        momentum: how slowly it follows.
    """

    threshold: Tensor  # [1]

    def __init__(
        self,
        threshold: float | None = None,
        *,
        quantile: float | None = None,
        momentum: float = 0.99,
    ):
        super().__init__()
        if (threshold is None) == (quantile is None):
            raise ValueError("give either threshold or quantile")
        if threshold is not None and math.isnan(threshold):
            raise ValueError(f"threshold must be a number, got {threshold}")
        if quantile is not None and not 0 <= quantile <= 1:
            raise ValueError(f"quantile must be in [0, 1], got {quantile}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.quantile, self.momentum = quantile, momentum
        value = torch.tensor([-math.inf if threshold is None else float(threshold)])
        # A fixed threshold is an option, not a state.
        self.register_buffer("threshold", value, persistent=quantile is not None)

    def update(self, delta: Tensor, counted: Tensor | None) -> None:
        """Follows the deltas `[T, B]` of a training batch, where `counted` `[T, B]`."""
        if self.quantile is None:
            return
        with torch.no_grad():
            values = delta.detach() if counted is None else torch.where(counted, delta, torch.nan)
            new = torch.nanquantile(values.flatten().to(self.threshold), self.quantile)
            followed = self.momentum * self.threshold + (1 - self.momentum) * new
            followed = torch.where(torch.isinf(self.threshold), new, followed)
            self.threshold.copy_(torch.where(torch.isnan(followed), self.threshold, followed))

    def extra_repr(self) -> str:
        if self.quantile is None:
            return f"threshold={self.threshold.item()}"
        return f"quantile={self.quantile}, momentum={self.momentum}"


GateLike: TypeAlias = float | Gate | None


def as_gate(gate: GateLike) -> Gate | None:
    """A gate from what users write: an object, a threshold, or None."""
    if gate is None or isinstance(gate, Gate):
        return gate
    if isinstance(gate, (int, float)) and not isinstance(gate, bool):
        return Gate(gate)
    raise TypeError(f"gate must be a number, a Gate or None, got {type(gate).__name__}")
