"""`Reader`: word-by-word reading with a recoding language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._engine import make_reader
from ._versions import Versions

if TYPE_CHECKING:
    from ._language_model import LanguageModelBase
    from ._module import States


class Reader:
    """Feeds a language model one word at a time; made by `RecodingLanguageModel.reader`.

    Weights are packed once. A gold signal is completed when the gold token arrives, which is the
    next word fed. Reading a sentence gives what one call over the sentence gives, masks included.
    It reads in the mode the model was in when it was made or reset: `lm.train()` in between changes
    neither masks nor the share of positions that are recoded. Changed parameters are noticed.

        reader = lm.eval().reader()
        for token in sentence:
            log_probabilities = reader.feed(token)      # [B, V], of the next word
    """

    def __init__(
        self,
        lm: LanguageModelBase,
        batch_size: int = 1,
        hx: States | None = None,
        *,
        generator: torch.Generator | None = None,
    ):
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive int, got {batch_size!r}")
        signal = lm.rnn.signal
        if signal is not None and not signal.fused:
            raise NotImplementedError("a Custom signal has no reader: call the model step by step")
        self.lm, self.batch_size = lm, batch_size
        self.reset(hx, generator=generator)

    def reset(self, hx: States | None = None, *, generator: torch.Generator | None = None) -> None:
        """Starts anew, from states `hx` (zeros if None) and with masks of its own."""
        lm, rnn, device = self.lm, self.lm.rnn, self.lm.encoder.weight.device
        if lm.drops:
            raise RuntimeError("a reader reads without dropout: call lm.eval() first")
        self._seed, self._probability = rnn._draw_seed(device, generator), rnn.active_probability
        h, c = rnn.initial_states(hx, self.batch_size, device)
        self._make(h, c, 0)

    def feed(self, tokens: Tensor | int, labels: Tensor | int | None = None) -> Tensor:
        """Reads `tokens` `[B]` and returns the log probabilities `[B, V]` of the next ones.

        `labels` `[B]` are those of a `Classifier` for this time step.
        """
        with torch.no_grad():
            self._refresh()
            return self._reader.feed(
                self._as_batch(tokens), None if labels is None else self._as_batch(labels)
            )

    def finish(self, gold: Tensor | int) -> None:
        """Tells the gold tokens `[B]` of the last time step without reading on (-100: none).

        It is recoded with the weights that predicted it, also if they have changed since.
        """
        with torch.no_grad():
            self._reader.finish(self._as_batch(gold))

    @property
    def hx(self) -> tuple[Tensor, Tensor]:
        """The states, each `[L, B, H]`: recoded, but for a last word whose gold is not known."""
        dtype = self.lm.rnn.weight_hh_l0.dtype
        return self._reader.h().to(dtype), self._reader.c().to(dtype)

    @property
    def delta(self) -> Tensor:
        """The signal `[B]` of the last time step that was recoded."""
        return self._reader.delta()

    @property
    def time(self) -> int:
        """How many words have been read."""
        return self._reader.time()

    def _as_batch(self, tokens: Tensor | int) -> Tensor:
        if isinstance(tokens, int):
            tokens = torch.full((self.batch_size,), tokens, device=self.lm.encoder.weight.device)
        return tokens

    def _tensors(self) -> list[Tensor]:
        return [*self.lm.parameters(), *self.lm.rnn.buffers()]

    def _refresh(self) -> None:
        """Packs anew if a parameter has changed."""
        if self._packed_for.hold_for(self._tensors()):
            return
        if self._reader.pending():
            raise RuntimeError(
                "a parameter changed while the last time step waits for its gold token: "
                "call finish() or reset() first"
            )
        self._make(*self.hx, self.time)

    def _make(self, h: Tensor, c: Tensor, time: int) -> None:
        self.lm._share_decoder()
        with torch.no_grad():
            self._packed_for = Versions(self._tensors())
            if self._seed is None:  # a signal that drops nothing may have been told to
                self._seed = self.lm.rnn._draw_seed(h.device, None)
            self._reader = make_reader(self.lm, h, c, self._seed, time, self._probability)
