"""`Variational`: predictive entropy of K recurrent networks that share their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .base import check_samples
from .formulas import widened
from .mixture import PredictiveEntropy, mixture_bound

if TYPE_CHECKING:
    from .._module import RecodingLSTMBase
    from ..reference import TimeStep


class Variational(PredictiveEntropy):
    """Predictive entropy of a variational RNN (Gal and Ghahramani 2016).

    K samples read every sequence, each under masks of its own for the inputs of all layers, the
    recurrent states and the output, drawn once per call and held for all time steps. Their states
    are separate: `hx` is `[L, K*B, H]` (a `[L, B, H]` one is repeated), `output` `[K, T, B, H]`,
    and the prediction is the mean of the K softmaxes.

    Curvature: that of a mixture; the K states share the 1/K, so it is K times smaller.
    """

    name = "variational"
    holds_masks = separate_states = True

    def __init__(self, num_samples: int = 10, p: float = 0.2):
        super().__init__()
        check_samples(num_samples, p)
        self.samples, self.p = num_samples, float(p)

    def bind(self, rnn: RecodingLSTMBase) -> None:
        super().bind(rnn)
        if rnn.dropout or rnn.output_dropout:
            raise ValueError(
                "dropout and output_dropout must be 0 with Variational: it has masks of its own"
            )

    def spec_fields(self) -> dict[str, Any]:
        return {"signal": self.name, "samples": self.samples, "sample_p": self.p}

    def logits(self, now: TimeStep, top: Tensor) -> Tensor:
        logits = super().logits(now, top)  # [K * B, V]
        return logits.view(self.samples, -1, logits.shape[-1])

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        return mixture_bound(weight, self.samples) * widened(self.p) / self.samples

    def extra_repr(self) -> str:
        return f"num_samples={self.samples}, p={self.p}"
