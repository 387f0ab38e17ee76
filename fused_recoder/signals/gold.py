"""Signals that read the gold token.

They are legitimate only where the gold token of time step t is the input of time step t+1, as in
language modelling. In a tagger they would carry the label forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import Signal
from .formulas import gold_nll, row_norm_squared, spectral_norm_squared, widened

if TYPE_CHECKING:
    from ..reference import TimeStep


class GoldSignal(Signal):
    """Reads one token: the gold one, or with `target="argmax"` the most probable."""

    reads_target = sees_labels = single_prediction = True

    def __init__(self, target: str = "gold"):
        super().__init__()
        if target not in ("gold", "argmax"):
            raise ValueError(f"target must be 'gold' or 'argmax', got {target!r}")
        self.target = target

    def spec_fields(self) -> dict[str, Any]:
        return {"signal": self.name, "argmax": self.target == "argmax"}

    def tokens(self, now: TimeStep, prediction: Tensor) -> Tensor:
        return now.targets() if self.needs_targets else prediction.detach().argmax(-1)


class NLL(GoldSignal):
    """`-log p` of the gold token.

    `target="argmax"` recodes towards the most probable token instead, which needs no targets.

    Curvature: delta = logsumexp(l) - l_y, so the second derivative is `Var(u)`. A variance is at
    most a quarter of the squared range, and two entries of u differ by at most `sqrt(2) sigma`:
    `sigma^2 / 2`. It is also at most the mean square distance from any fixed point, such as the
    mean row of W: `R^2 = max_j |w_j - mean(w)|^2`. The smaller of both.
    """

    name = "nll"

    def value(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        return gold_nll(logits, tokens)

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        return nll_bound(weight) * widened(output_p)


def nll_bound(weight: Tensor) -> Tensor:
    """Of the cross-entropy of one linear map `[V, H]`."""
    spread = row_norm_squared(weight.double() - weight.double().mean(-2, keepdim=True))
    return torch.minimum(spectral_norm_squared(weight) / 2, spread)


class Surprisal(GoldSignal):
    """The thesis's surprisal, `p^(-p) - 1`.

    It is not monotone: below p = 1/e, where most gold tokens of a language model lie,
    descending it *lowers* the probability of the token. `NLL` is what its prose describes.
    `target="argmax"` recodes towards the most probable token, as the thesis's code trained.

    Curvature: delta = f(n) with n = -log p, so the second derivative is
    `f'(n) Var(u) + f''(n) (E(u) - u_y)^2`. With `Var(u) <= sigma^2 / 2` and
    `(E(u) - u_y)^2 <= 2 sigma^2 (1 - p)^2` its maximum over p stays below `sigma^2 / 4`.
    """

    name = "surprisal"

    def value(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        nll = gold_nll(logits, tokens)
        return torch.expm1(torch.exp(-nll) * nll)

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        return spectral_norm_squared(weight) / 4 * widened(output_p)
