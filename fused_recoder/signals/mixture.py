"""Predictive entropy: that of the mean of K predictions."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from .base import Signal
from .entropy import entropy_bound
from .formulas import entropy, log_mean_softmax, row_norm_squared, spectral_norm_squared


class PredictiveEntropy(Signal):
    """What MC Dropout, ensembles and variational RNNs have in common.

    Curvature, for the mean m of K predictions: the second derivative is at most
    `1/K sum_k E_k(s (u_k - E_k u_k)^2)` with `s = -log m`. As `m >= o_k / K`, `s <= -log o_k +
    ln K`, and `(a - b)^2 <= 2 a^2 + 2 b^2` gives `2 sigma^2 / e + 2 rho^2 (ln V + 2 ln K)`,
    averaged over the members of an ensemble.
    """

    def value(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        if logits.dim() == 2:  # one prediction
            return entropy(F.log_softmax(logits, -1))
        return entropy(log_mean_softmax(logits))


def mixture_bound(weight: Tensor, samples: int, sigma_squared: Tensor | None = None) -> Tensor:
    """For weights `[V, H]` or, averaged, `[K, V, H]`."""
    sigma_squared = spectral_norm_squared(weight) if sigma_squared is None else sigma_squared
    if samples == 1:
        return entropy_bound(weight, sigma_squared).mean()
    spread = math.log(weight.shape[-2]) + 2 * math.log(samples)
    return (2 / math.e * sigma_squared + 2 * spread * row_norm_squared(weight)).mean()
