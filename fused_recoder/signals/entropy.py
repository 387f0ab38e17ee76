"""`Entropy`: how undecided the prediction is."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from .base import Signal
from .formulas import entropy, spectral_norm_squared, widened


class Entropy(Signal):
    """Entropy of the prediction. Sees no target, so the model predicts from the recoded state.

    Curvature, with the surprise `s_j = -log o_j` of each token: the second derivative is
    `Cov(s, (u - E u)^2) - Var(u)`. Writing the square out, `Cov(s, u^2) <= E(s u^2) <= sigma^2 / e`
    (`-o log o` is at most 1/e), and `2 |E u| |Cov(s, u)| <= sd(s) E(u^2)`, where the variance of s
    is at most `ln(V-1)^2 / 4 + 1`. We keep `sigma^2 (2/e + sqrt(ln(V-1)^2 / 4 + 1))`, above that.
    """

    name = "entropy"
    single_prediction = True

    def value(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        return entropy(F.log_softmax(logits, -1))

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        return entropy_bound(weight, spectral_norm_squared(weight)) * widened(output_p)


def entropy_bound(weight: Tensor, sigma_squared: Tensor) -> Tensor:
    """For weights `[..., V, H]` with these spectral norms."""
    spread = math.sqrt(math.log(max(weight.shape[-2] - 1, 1)) ** 2 / 4 + 1)
    return sigma_squared * (2 / math.e + spread)
