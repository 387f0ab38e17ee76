"""`Reader`: word-by-word reading with a recoding language model."""

from __future__ import annotations

import torch
from torch import Tensor

from .signals import Classifiers


class Reader:
    """Feeds a language model one word at a time; made by `RecodingLanguageModel.reader`.

    Weights are packed once. A gold signal is completed when the gold token arrives, which is the
    next word fed. Reading a sentence gives what one call over the sentence gives, masks included.

        reader = lm.eval().reader()
        for token in sentence:
            log_probabilities = reader.feed(token)      # [B, V], of the next word
    """

    def __init__(self, lm, batch_size: int = 1, hx=None, *, generator=None):
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive int, got {batch_size!r}")
        rnn = lm.rnn
        if lm.training and (lm.embedding_dropout or rnn.active_dropout != (0.0, 0.0)):
            raise RuntimeError("a reader reads without dropout: call lm.eval() first")
        if rnn.signal is not None and rnn.signal.name == "custom":
            raise NotImplementedError("a Custom signal has no reader: call the model step by step")
        self.lm, self.batch_size = lm, batch_size
        self._like = torch.zeros(1, batch_size, rnn.input_size, device=lm.encoder.weight.device)
        self.reset(hx, generator=generator)

    def reset(self, hx=None, *, generator=None) -> None:
        """Starts anew, from states `hx` (zeros if None) and with masks of its own."""
        rnn = self.lm.rnn
        self._seed = rnn._draw_seed(self._like, generator)
        h, c = rnn._initial_states(hx, self._like, False, None)
        self._make(h, c, 0)

    def feed(self, tokens: Tensor | int, labels: Tensor | int | None = None) -> Tensor:
        """Reads `tokens` `[B]` and returns the log probabilities `[B, V]` of the next ones.

        `labels` `[B]` are those of a `Classifier` for this step.
        """
        with torch.no_grad():
            self._refresh()
            return self._reader.feed(
                self._as_batch(tokens), None if labels is None else self._as_batch(labels)
            )

    def finish(self, gold: Tensor | int) -> None:
        """Tells the gold tokens `[B]` of the last step without reading on (-100: none)."""
        with torch.no_grad():
            self._refresh()
            self._reader.finish(self._as_batch(gold))

    @property
    def hx(self) -> tuple[Tensor, Tensor]:
        """The states, each `[L, B, H]`: recoded, but for a last step whose gold is not known."""
        dtype = self.lm.rnn.weight_hh_l0.dtype
        return self._reader.h().to(dtype), self._reader.c().to(dtype)

    @property
    def delta(self) -> Tensor:
        """The signal `[B]` of the last step that was recoded."""
        return self._reader.delta()

    @property
    def time(self) -> int:
        """How many words have been read."""
        return self._reader.time()

    def _as_batch(self, tokens: Tensor | int) -> Tensor:
        if isinstance(tokens, int):
            tokens = torch.full((self.batch_size,), tokens, device=self._like.device)
        return tokens

    def _versions(self) -> list:
        parameters = [*self.lm.parameters(), *self.lm.rnn.buffers()]
        return [(p.data_ptr(), p._version) for p in parameters]

    def _refresh(self) -> None:
        """Packs anew if a parameter has changed."""
        if self._versions() == self._packed_for:
            return
        if self._reader.pending():
            raise RuntimeError(
                "a parameter changed while the last step waits for its gold token: "
                "call finish() or reset() first"
            )
        self._make(*self.hx, self.time)

    def _make(self, h: Tensor, c: Tensor, time: int) -> None:
        lm, rnn = self.lm, self.lm.rnn
        signal, step = rnn.signal, rnn.step
        classifiers = signal.members if isinstance(signal, Classifiers) else []
        with torch.no_grad():
            weight, bias = rnn.decoder_parameters()
            recodes = signal is not None
            sizes = step.sizes(rnn) if recodes else h.new_zeros(rnn.num_layers, len(rnn.states))
            self._packed_for = self._versions()
            self._reader = torch.classes.fused_recoder.Reader(
                lm.encoder.weight,
                h,
                c,
                [w for layer in rnn.all_weights for w in layer],
                weight,
                bias,
                [t for classifier in classifiers for t in (classifier.weight, classifier.bias)],
                sizes,
                step.network_tensors() if recodes and step.kind == "predicted" else [],
                None if rnn.gate is None else rnn.gate.threshold,
                self._seed,
                signal.engine_name if recodes else "none",
                recodes and signal.target == "argmax",
                signal.samples if recodes else 1,
                signal.p if recodes else 0.0,
                getattr(lm.decoder, "predict", None) == "mean_logits",
                [2 * layer + (s == "c") for layer, s in (signal.places if classifiers else [])],
                "h" in rnn.states,
                "c" in rnn.states,
                step.kind if recodes else "given",
                getattr(step, "shrink", 0.5),
                getattr(step, "trials", 1),
                time,
                rnn.active_probability if recodes else 1.0,
            )
