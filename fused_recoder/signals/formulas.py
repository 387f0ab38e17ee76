"""What several signals are made of: probabilities, and norms of a decoder's weight."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target or label that does not count
ROUNDING = 1 + 1e-6  # of the eigenvalue computation, in float64


def gold_nll(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log p `[B]` of tokens `[B]` under logits `[B, V]`; 0 where they are ignored."""
    return F.cross_entropy(logits, tokens, reduction="none", ignore_index=IGNORE)


def log_mean_softmax(logits: Tensor) -> Tensor:
    """log of the mean prediction `[..., V]` of logits `[K, ..., V]`."""
    return torch.logsumexp(F.log_softmax(logits, -1), 0) - math.log(logits.shape[0])


def entropy(log_o: Tensor) -> Tensor:
    """`[...]` of log probabilities `[..., V]`."""
    return -(log_o.exp() * log_o).sum(-1)


def spectral_norm_squared(weight: Tensor) -> Tensor:
    """sigma^2 of `[..., V, H]`, exactly: the largest eigenvalue of W^T W."""
    weight = weight.double()
    return torch.linalg.eigvalsh(weight.mT @ weight)[..., -1] * ROUNDING


def row_norm_squared(weight: Tensor) -> Tensor:
    """rho^2 of `[..., V, H]`: the largest squared norm of a row."""
    return weight.double().square().sum(-1).amax(-1)


def widened(p: float) -> float:
    """By how much a dropout mask between state and decoder scales a bound at most."""
    return 1 / (1 - p) ** 2
