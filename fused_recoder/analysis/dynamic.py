"""Dynamic evaluation (Krause et al. 2018): the weights follow the text that is read.

After every few words the model takes a gradient step on their loss, each weight scaled by the size
its gradients had on the training text, and is drawn back towards where it started:

    w <- w - lr * g / (rms + epsilon) + min(decay * rms / mean(rms), 1) * (w_0 - w)

Recoding moves states and forgets with them; this moves weights. It is what a reader compares first.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..training.data import IGNORE, Batches
from ..training.evaluation import Evaluation

EPSILON = 0.001  # of the published code for word-level models
SEGMENT = 5  # words between two updates, as published


def gradient_sizes(
    model: nn.Module, tokens: np.ndarray, *, batch_size: int = 100, windows: int = 300
) -> list[Tensor]:
    """Root mean square of every weight's gradient over windows of the training text."""
    batches = Batches(tokens, batch_size, SEGMENT)
    squares = [torch.zeros_like(p) for p in model.parameters()]
    count = min(windows, len(batches))
    hx = None
    model.eval()
    for window in range(count):
        _, hx = _backward(model, *batches[window], hx)
        for square, parameter in zip(squares, model.parameters(), strict=True):
            if parameter.grad is not None:
                square.addcmul_(parameter.grad, parameter.grad)
    return [(square / count).sqrt() for square in squares]


def _backward(model, inputs: Tensor, targets: Tensor, hx):
    """The output of a window [T, B], its gradients left in the model, and the states to go on."""
    model.zero_grad()
    out = model(inputs, targets, hx)
    out.loss.backward()
    return out, tuple(state.detach() for state in out.hx)


def evaluate_dynamically(
    model: nn.Module,
    tokens: np.ndarray,
    sizes: Sequence[Tensor],
    *,
    lr: float,
    decay: float,
    epsilon: float = EPSILON,
) -> Evaluation:
    """Mean nll of a text whose words are predicted before the weights learn from them.

    Reads it as one sequence (batch of one). The model itself stays as it is. `lr` 0: nothing moves.
    """
    model = copy.deepcopy(model).eval()
    parameters = list(model.parameters())
    start_values = [p.detach().clone() for p in parameters]
    average = torch.cat([s.flatten() for s in sizes]).mean()
    pulls = [(decay * s / average).clamp(max=1.0) for s in sizes]
    scales = [lr / (s + epsilon) for s in sizes]
    batches = Batches(tokens, 1, SEGMENT, keep_all=True)
    total, count, hx, start = 0.0, 0, None, time.perf_counter()
    for window in range(len(batches)):
        inputs, targets = batches[window]
        out, hx = _backward(model, inputs, targets, hx)
        total += out.nll.detach().double().sum().item()
        count += (targets != IGNORE).sum().item()
        if lr == 0:
            continue
        with torch.no_grad():
            for p, value, pull, scale in zip(parameters, start_values, pulls, scales, strict=True):
                if p.grad is not None:
                    p.addcmul_(p.grad, scale, value=-1.0)
                p.lerp_(value, pull)
    return Evaluation(count, total / count, time.perf_counter() - start, count)
