"""`Ensemble`: predictive entropy of several decoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..ensemble import EnsembleDecoder
from .formulas import widened
from .mixture import PredictiveEntropy, mixture_bound

if TYPE_CHECKING:
    from .._module import RecodingLSTMBase
    from ..reference import TimeStep


class Ensemble(PredictiveEntropy):
    """Predictive entropy of an anchored ensemble; its decoder is an `EnsembleDecoder`.

    That of the mean of the members' probabilities, or of the softmax of their mean logits, as the
    decoder predicts.
    """

    name = "ensemble"

    def bind(self, rnn: RecodingLSTMBase) -> None:
        if not isinstance(rnn.decoder, EnsembleDecoder):
            raise TypeError(
                "Ensemble() needs decoder=EnsembleDecoder(hidden_size, vocab_size, ...), got "
                f"{type(rnn.decoder).__name__}"
            )
        self.samples = rnn.decoder.num_members

    def spec_fields(self) -> dict[str, Any]:
        return {"signal": self.name, "samples": self.samples}

    def logits(self, now: TimeStep, top: Tensor) -> Tensor:
        weight, bias = now.rnn.decoder_parameters()
        logits = now.decoded(top) @ weight.mT  # [K, B, V]
        logits = logits if bias is None else logits + bias.unsqueeze(1)
        return logits.mean(0) if now.rnn.mean_logits else logits

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        return mixture_bound(weight, self.samples) * widened(output_p)
