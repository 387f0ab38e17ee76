"""The layouts users bring (time or batch first, unbatched, packed), and the way to the one that is
computed in, time-major, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ._call import RecodingTrace, Result


class Layout:
    """That of one call's input, which its targets, labels and masks have, too.

    Args:
        input: as given by the user.
        lengths: `[B]`, as given by the user.
        batch_first: whether tensors that are padded are `[B, T, ...]`.
    """

    def __init__(
        self, input: Tensor | PackedSequence, lengths: Any, batch_first: bool, input_size: int
    ):
        self.packed = input if isinstance(input, PackedSequence) else None
        if self.packed is not None:
            if lengths is not None:
                raise ValueError("lengths must not be given with a PackedSequence: it has its own")
            input, lengths = pad_packed_sequence(self.packed, batch_first)
        if not isinstance(input, Tensor):
            raise TypeError(f"input must be a Tensor or PackedSequence, got {type(input).__name__}")
        self.lead = tuple(input.shape[:-1])  # what tensors beside the input have for a shape
        if len(self.lead) not in (1, 2):
            raise ValueError(f"input must have 2 or 3 dimensions, got shape {tuple(input.shape)}")
        if input.shape[-1] != input_size:
            raise ValueError(
                f"input must have input_size = {input_size} features, got shape "
                f"{tuple(input.shape)}"
            )
        if 0 in self.lead:
            raise ValueError(f"input must not be empty, got shape {tuple(input.shape)}")
        self.unbatched, self.batch_first = len(self.lead) == 1, batch_first
        self.input = self._turned(input)  # [T, B, I]
        self.lengths: Tensor | None = None  # [B]
        if lengths is not None:
            self.lengths = torch.as_tensor(lengths, dtype=torch.int64, device=input.device)

    @property
    def batch_size(self) -> int:
        return self.input.shape[1]

    def time_major(
        self, name: str, given: Tensor | PackedSequence | None, dtype: torch.dtype, fill: float
    ) -> Tensor | None:
        """The argument of this name, checked, as `[T, B]`; `fill` goes into padding."""
        if isinstance(given, PackedSequence) and self.packed is not None:
            if not torch.equal(given.batch_sizes, self.packed.batch_sizes):
                raise ValueError(f"{name} must have the batch_sizes of input")
            given = pad_packed_sequence(given, self.batch_first, padding_value=fill)[0]
        if given is None:
            return None
        if not isinstance(given, Tensor) or given.dtype != dtype:
            what = getattr(given, "dtype", type(given).__name__)
            raise TypeError(f"{name} must be a {dtype} tensor, got {what}")
        if self.packed is not None:
            given = self._without_padding_for_all(given)
        if tuple(given.shape) != self.lead:
            raise ValueError(
                f"{name} must have shape {self.lead} like input, got {tuple(given.shape)}"
            )
        return self._turned(given)

    def _without_padding_for_all(self, given: Tensor) -> Tensor:
        """A batch may have been padded beyond its longest sequence, which packing undoes."""
        time = 1 if self.batch_first else 0
        wider = given.dim() == 2 and given.shape[time] > self.lead[time]
        return given.narrow(time, 0, self.lead[time]) if wider else given

    def _turned(self, given: Tensor) -> Tensor:
        if self.unbatched:
            return given.unsqueeze(1)
        return given.transpose(0, 1) if self.batch_first else given

    def restore(self, result: Result, rows_per_instance: int) -> Result:
        """What was computed, in the layout of the input."""
        output, h_n, c_n, nll, objective, delta, trace = result
        if self.unbatched:
            output = output.squeeze(-2)
            if rows_per_instance == 1:
                h_n, c_n = h_n.squeeze(1), c_n.squeeze(1)
            trace = None if trace is None else RecodingTrace(*(t.squeeze(-1) for t in trace))
        elif self.batch_first and self.packed is None:
            output = output.transpose(-3, -2)
        if self.packed is not None:
            output = self._repack(output, self.packed)
        nll, objective, delta = (self._back(values) for values in (nll, objective, delta))
        return Result(output, h_n, c_n, nll, objective, delta, trace)

    def _back(self, per_token: Tensor | None) -> Tensor | None:
        if per_token is None:
            return None
        if self.unbatched:
            return per_token.squeeze(1)
        return per_token.transpose(0, 1) if self.batch_first else per_token

    def _repack(self, output: Tensor, packed: PackedSequence) -> PackedSequence:
        """`output` [T, B, H] in the original order, packed exactly as the input was."""
        assert self.lengths is not None
        lengths, order = self.lengths.cpu(), packed.sorted_indices
        if order is not None:
            output, lengths = output.index_select(1, order), lengths[order.cpu()]
        data = pack_padded_sequence(output, lengths).data
        return PackedSequence(data, packed.batch_sizes, order, packed.unsorted_indices)
