"""`Lipschitz`: steps that follow from a bound on the signal's curvature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._versions import Versions
from .base import StepPolicy

if TYPE_CHECKING:
    from .._module import RecodingLSTMBase


class Lipschitz(StepPolicy):
    """`safety / L`, with L a proven upper bound on the signal's curvature in the top state.

    With it and `states=("h",)` no recoding step raises the signal of the re-decoded top state (the
    thesis's first theorem), up to rounding. Bounds and their derivations are with the signals.
    Computed anew when the decoder has changed (what is written through `.data` goes unnoticed, as
    autograd does not notice it either). The steps are small: see `Backtracking`.
    """

    capturable = False  # the eigenvalues need the host

    def __init__(self, safety: float = 1.0):
        super().__init__()
        if not 0 < safety <= 2:
            raise ValueError(f"safety must be in (0, 2], got {safety}")
        self.safety = safety
        self._known: tuple[Versions, tuple, Tensor] | None = None  # computed from what, and sizes

    def bind(
        self, num_layers: int, states: Sequence[str], hidden_size: int, **factory: Any
    ) -> None:
        pass

    def sizes(self, rnn: RecodingLSTMBase) -> Tensor:
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return self._compute(rnn)
        assert rnn.signal is not None
        tensors = rnn.signal.bounded_by(rnn)
        like = rnn.weight_hh_l0
        options = (self.safety, rnn.active_dropout, like.dtype, like.device)
        if self._known is not None and not any(tensor.is_inference() for tensor in tensors):
            versions, known_options, sizes = self._known
            if known_options == options and versions.hold_for(tensors):
                return sizes
        # What is kept may be needed in training after it was computed for inference.
        with torch.inference_mode(False), torch.no_grad():
            sizes = self._compute(rnn)
        self._known = (Versions(tensors), options, sizes)
        return sizes

    def _compute(self, rnn: RecodingLSTMBase) -> Tensor:
        assert rnn.signal is not None
        # A decoder of zeros has no curvature and no gradient.
        bounds = rnn.signal.bounds(rnn).clamp_min(torch.finfo(torch.float32).tiny)
        return self.safety / bounds.to(rnn.weight_hh_l0.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None}

    def extra_repr(self) -> str:
        return f"safety={self.safety}"
