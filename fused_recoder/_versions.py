"""Whether tensors that something was computed from are still what they were."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor


class Versions:
    """Remembers tensors, and the state they are in.

    What is written through `.data` goes unnoticed, as it does by autograd; so do changes of tensors
    that were made in inference mode, which nobody counts.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        tensors = list(tensors)
        # An address alone may belong to another tensor by now: a parametrized weight is made anew
        # at every access, often at the same place.
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        self.states = [_state(tensor) for tensor in tensors]

    def hold_for(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these are the same tensors, unchanged."""
        tensors = list(tensors)
        return (
            len(tensors) == len(self.tensors)
            and all(known() is tensor for known, tensor in zip(self.tensors, tensors, strict=True))
            and self.states == [_state(tensor) for tensor in tensors]
        )


def _state(tensor: Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()
