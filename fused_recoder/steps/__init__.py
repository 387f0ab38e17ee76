"""Step sizes: how far a recoding step goes. One file per policy; `base.py` says what a policy is to
the rest of the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from .backtracking import Backtracking
from .base import StepPolicy
from .fixed import Fixed
from .learned import Learned
from .lipschitz import Lipschitz
from .predicted import Predicted

StepLike: TypeAlias = float | str | Tensor | Mapping | StepPolicy

NAMES: dict[str, type[StepPolicy]] = {
    "learned": Learned,
    "predicted": Predicted,
    "lipschitz": Lipschitz,
    "backtracking": Backtracking,
}


def as_step(step: StepLike) -> StepPolicy:
    """A step object from what users write: an object, a name, a number, a tensor or a dict."""
    if isinstance(step, StepPolicy):
        return step
    if isinstance(step, str):
        if step not in NAMES:
            known = sorted(NAMES)
            raise ValueError(f"step must be a number, one of {known} or a StepPolicy, got {step!r}")
        return NAMES[step]()
    if isinstance(step, (int, float, Tensor, Mapping)) and not isinstance(step, bool):
        return Fixed(step)
    raise TypeError(
        f"step must be a number, a name, a dict or a StepPolicy, got {type(step).__name__}"
    )


__all__ = [
    "NAMES",
    "Backtracking",
    "Fixed",
    "Learned",
    "Lipschitz",
    "Predicted",
    "StepLike",
    "StepPolicy",
    "as_step",
]
