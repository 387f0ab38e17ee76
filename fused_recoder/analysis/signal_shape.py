"""Is the thesis's surprisal the right signal? Its shape, and where the words of a text lie on it.

`p^(-p) - 1` is 0 at p = 0 and at p = 1 and largest at p = 1/e. To the left of that, descending it
makes the gold token less probable.
"""

from __future__ import annotations

import math

import numpy as np
import torch

import fused_recoder as fr

from ..training.data import IGNORE, Batches

PEAK = 1 / math.e


def surprisal(p: np.ndarray) -> np.ndarray:
    return np.expm1(-p * np.log(p))


def surprisal_slope(p: np.ndarray) -> np.ndarray:
    """d/dp: positive where descending lowers p."""
    return -np.exp(-p * np.log(p)) * (np.log(p) + 1)


def surprisal_push(p: np.ndarray) -> np.ndarray:
    """kappa, the factor of (o - onehot) in the gradient: `nll` has 1, negative is the wrong way."""
    return np.exp((1 - p) * np.log(p)) * (np.log(p) + 1)


@torch.no_grad()
def gold_probabilities(
    model: fr.RecodingLanguageModel, tokens: np.ndarray, *, batch_size: int = 10, bptt: int = 35
) -> np.ndarray:
    """The probability of every word of a text, [N]."""
    batches = Batches(tokens, batch_size, bptt, keep_all=True)
    model.eval()
    found, hx = [], None
    for window in range(len(batches)):
        inputs, targets = batches[window]
        out = model(inputs, targets, hx)
        found.append(out.nll[targets != IGNORE].double())
        hx = out.hx
    return torch.cat(found).neg().exp().numpy()


def wrong_way(p: np.ndarray) -> float:
    """The share of words whose probability descending `surprisal` lowers."""
    return float((p < PEAK).mean())
