"""`Custom`: any differentiable function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from .base import Signal

if TYPE_CHECKING:
    from ..reference import TimeStep


class Custom(Signal):
    """Any differentiable function of a time step: the door for research.

    Args:
        fn: called at every time step with `logits` `[B, V]`, `hidden` `[B, H]` (what was decoded)
            and `targets` `[B]` or None; returns delta `[B]`. Its gradient is taken by autograd.
        sees_targets: whether it looks at the targets. If so, predictions come from the unrecoded
            state, so that none leaks; if not, it gets None.

    The whole sequence runs in plain PyTorch: slow and open.
    """

    name = "custom"
    fused = False

    def __init__(
        self, fn: Callable[[Tensor, Tensor, Tensor | None], Tensor], sees_targets: bool = True
    ):
        super().__init__()
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        self.fn, self.sees_labels = fn, bool(sees_targets)

    def tokens(self, now: TimeStep, prediction: Tensor) -> Tensor | None:
        return now.targets() if self.sees_labels and now.call.targets is not None else None

    def delta(self, now: TimeStep, logits: Tensor, top: Tensor) -> Tensor:
        return self.fn(logits, now.decoded(top), now.tokens)

    def extra_repr(self) -> str:
        return f"{getattr(self.fn, '__name__', self.fn)}, sees_targets={self.sees_labels}"
