"""`MCDropout`: predictive entropy under dropout of the top state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._masks import SAMPLE_STREAM, dropout_mask
from .base import check_samples
from .entropy import entropy_bound
from .formulas import spectral_norm_squared, widened
from .mixture import PredictiveEntropy, mixture_bound

if TYPE_CHECKING:
    from ..reference import TimeStep


class MCDropout(PredictiveEntropy):
    """Predictive entropy: that of the mean of K predictions under dropout of the top state.

    Args:
        num_samples: K.
        p: probability of dropping a unit (or weight).
        mask: `"unit"` draws a mask per instance, time step and sample (the thesis's code),
            `"shared"` one per time step and sample for the whole batch (cheaper: only the dropped
            columns of the decoder are multiplied), `"weight"` one of all decoder weights per time
            step and sample (its equations to the letter).
        prior_scale: draw the decoder anew from N(0, prior_scale), a variance, when the RNN is
            built, as the thesis's code does. Off by default: it may explain that code's results.

    Masks are drawn in training and in evaluation alike: they are the estimate. They follow from
    `torch.manual_seed`, or from the `generator=` given to `forward`.

    Curvature: that of a mixture; a mask of single weights is bounded through the Frobenius norm.
    """

    name = "mc_dropout"

    def __init__(
        self,
        num_samples: int = 10,
        p: float = 0.2,
        mask: str = "unit",
        prior_scale: float | None = None,
    ):
        super().__init__()
        check_samples(num_samples, p)
        if mask not in ("unit", "shared", "weight"):
            raise ValueError(f"mask must be 'unit', 'shared' or 'weight', got {mask!r}")
        if prior_scale is not None and not (math.isfinite(prior_scale) and prior_scale > 0):
            raise ValueError(f"prior_scale must be positive and finite, got {prior_scale}")
        self.samples, self.p, self.mask, self.prior_scale = num_samples, float(p), mask, prior_scale

    @property
    def seed_on_host(self) -> bool:  # type: ignore[override]
        """Columns of shared masks are listed on the host."""
        return self.mask == "shared"

    def initialise(self, decoder: nn.Module | None) -> None:
        if self.prior_scale is None or decoder is None:
            return
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.normal_(0, math.sqrt(self.prior_scale))

    def spec_fields(self) -> dict[str, Any]:
        return {"signal": f"mc_{self.mask}", "samples": self.samples, "sample_p": self.p}

    def draw(self, now: TimeStep) -> Tensor | None:
        """`[K, B, H]`, `[K, 1, H]` or `[K, V, H]`; None if nothing is dropped."""
        seed = now.call.seed
        if self.p == 0 or seed is None:
            return None
        V, H = now.rnn.decoder_parameters()[0].shape
        rows = {"unit": now.call.input.shape[1], "shared": 1, "weight": V}[self.mask]
        masks = [
            dropout_mask(
                seed.to(now.call.input.device), SAMPLE_STREAM, self.p, 1, rows, H, now.masks.dtype,
                sample=k, time=now.call.time + now.t,
            )
            for k in range(self.samples)
        ]  # fmt: skip
        return torch.cat(masks)

    def logits(self, now: TimeStep, top: Tensor) -> Tensor:
        weight, bias = now.rnn.decoder_parameters()
        # The masks act on the undropped top state and do not stack with the RNN's dropout.
        if now.drawn is None:
            return F.linear(top, weight, bias).expand(self.samples, -1, -1)
        if self.mask == "weight":
            masked = (now.drawn * weight).mT  # [K, H, V]
            out = top.to(masked.dtype) @ masked
            return out if bias is None else out + bias
        logits = F.linear((now.drawn * top).flatten(0, 1), weight, bias)
        return logits.view(self.samples, top.shape[0], -1)

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        if self.p == 0:
            return entropy_bound(weight, spectral_norm_squared(weight))
        frobenius = weight.double().square().sum() if self.mask == "weight" else None
        return mixture_bound(weight, self.samples, frobenius) * widened(self.p)

    def extra_repr(self) -> str:
        prior = f", prior_scale={self.prior_scale}" if self.prior_scale is not None else ""
        return f"num_samples={self.samples}, p={self.p}, mask={self.mask!r}{prior}"
