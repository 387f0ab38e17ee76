"""`Renyi`: entropies in which unlikely words count for more, or for less."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Signal
from .entropy import Entropy
from .formulas import entropy, widened
from .gold import nll_bound

LARGEST_ORDER = 1e30  # exponents of float32 stay finite


class Renyi(Signal):
    """Rényi entropy of the prediction, `H_q = log(sum_j o_j^q) / (1 - q)`, of an order q above 0.

    The smaller the order, the more unlikely words count: towards 0 it is the log of their number,
    at 1 it is `Entropy`, at 2 `-log` of the probability that two draws agree, for large orders
    `-log` of the largest probability. Sees no target, so the model predicts from the recoded state.

    Curvature, with `r = softmax(q l)`: the second derivative is `q/(1-q) (q Var_r(u) - Var_o(u))`.
    Variances are not negative, and bounded as for `NLL` whatever the distribution: `q^2 / (1-q)`
    times the bound of `NLL` below order 1, `q / (q-1)` times above. Towards order 1 these grow
    without limit; order 1 itself has the bound of `Entropy`.
    """

    name = "renyi"
    single_prediction = True

    def __init__(self, order: float = 2.0):
        super().__init__()
        if not 0 < order <= LARGEST_ORDER:
            raise ValueError(f"order must be above 0 and at most {LARGEST_ORDER:g}, got {order!r}")
        self.order = float(order)

    def spec_fields(self) -> dict[str, Any]:
        return {"signal": self.name, "order": self.order}

    def value(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        log_o, excess = F.log_softmax(logits, -1), self.order - 1
        if excess == 0:
            return entropy(log_o)
        if abs(excess) < 0.25:  # the sum is nearly 1: what it lacks is summed instead
            return -torch.log1p((log_o.exp() * torch.expm1(excess * log_o)).sum(-1)) / excess
        return -torch.logsumexp(self.order * log_o, -1) / excess

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        if self.order == 1:
            return Entropy().bound(weight, output_p)
        scale = self.order * min(self.order, 1.0) / abs(self.order - 1)
        return nll_bound(weight) * scale * widened(output_p)

    def extra_repr(self) -> str:
        return f"order={self.order:g}"
