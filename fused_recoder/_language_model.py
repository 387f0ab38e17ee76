"""What the fused language model and its oracle have in common: everything but the RNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._call import RecodingTrace, Result
from ._module import RecodingLSTMBase, States
from .reader import Reader
from .signals import SignalLike
from .signals.formulas import IGNORE, log_mean_softmax
from .steps import StepLike


class LanguageModelOutput(NamedTuple):
    """What a language model returns."""

    loss: Tensor | None  # [] mean nll of the tokens that are not ignored; 0 if there is none
    nll: Tensor | None  # [T, B] (layout of the tokens); 0 where ignored
    hx: States  # recoded final states, each [L, B, H]
    trace: RecodingTrace | None
    logits: Tensor | None  # [T, B, V], only if asked for


class LanguageModelBase(nn.Module):
    """Encoder, an RNN of `rnn_class`, and decoder."""

    rnn_class: ClassVar[type[RecodingLSTMBase]]
    encoder: nn.Embedding
    rnn: RecodingLSTMBase
    decoder: nn.Module

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        signal: SignalLike = "nll",
        step: StepLike = 0.1,
        dropout: float = 0.0,
        embedding_dropout: float | None = None,
        layer_dropout: float | None = None,
        output_dropout: float | None = None,
        tie_weights: bool = False,
        decoder: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size must be a positive int, got {vocab_size!r}")
        self.embedding_dropout = dropout if embedding_dropout is None else embedding_dropout
        if not 0 <= self.embedding_dropout < 1:
            raise ValueError(f"embedding_dropout must be in [0, 1), got {self.embedding_dropout}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.encoder = nn.Embedding(vocab_size, embedding_size, **factory)
        if decoder is None:
            self.decoder = nn.Linear(hidden_size, vocab_size, **factory)
        else:
            _check_vocabulary(decoder, vocab_size)
            self.decoder = decoder
        if tie_weights:
            self._tie(made_here=decoder is None)
        self.reset_parameters()
        options["dropout"] = dropout if layer_dropout is None else layer_dropout
        options["output_dropout"] = dropout if output_dropout is None else output_dropout
        self.rnn = self.rnn_class(
            embedding_size, hidden_size, num_layers, decoder=self.decoder, signal=signal,
            step=step, **factory, **options,
        )  # fmt: skip

    def _share_decoder(self) -> None:
        """The RNN recodes for the decoder that predicts, also if `_following.py` was not asked."""
        if self.rnn.decoder is not self.decoder:
            self.rnn.decoder = self.decoder

    def _tie(self, made_here: bool) -> None:
        if not made_here:
            raise ValueError("tie_weights makes the decoder itself: do not give one")
        embedding_size, hidden_size = self.encoder.embedding_dim, _weight(self.decoder).shape[1]
        if embedding_size != hidden_size:
            raise ValueError(
                f"tie_weights needs embedding_size == hidden_size, got {embedding_size} and "
                f"{hidden_size}"
            )
        self.decoder.weight = self.encoder.weight

    def reset_parameters(self, bound: float = 0.1) -> None:
        """What word-level language models usually start from; RNN and ensembles have their own."""
        nn.init.uniform_(self.encoder.weight, -bound, bound)
        if isinstance(self.decoder, nn.Linear):
            nn.init.uniform_(self.decoder.weight, -bound, bound)
            if self.decoder.bias is not None:
                nn.init.zeros_(self.decoder.bias)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        hx: States | None = None,
        *,
        labels: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        recode_mask: Tensor | None = None,
        return_trace: bool = False,
        generator: torch.Generator | None = None,
        logits: bool = False,
    ) -> LanguageModelOutput:
        """Reads `tokens` `[T, B]` (`[B, T]` with `batch_first`), predicting `targets`.

        A gradient may arrive at `loss` or at the per-token `nll`, with any weights. Without
        targets there is neither; ask for `logits` (which then exist, all `T x B x V` of them).
        `nll` is that of the prediction, which for an ensemble or a variational RNN is a mean; an
        ensemble's `loss` is its members' mean cross-entropy, without the anchors' term.
        """
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            given = getattr(tokens, "dtype", type(tokens).__name__)
            raise TypeError(f"tokens must be an int64 tensor, got {given}")
        self._share_decoder()
        x = F.dropout(self.encoder(tokens), self.embedding_dropout, self.training)
        result = self.rnn(
            x, hx, targets=targets, labels=labels, lengths=lengths, recode_mask=recode_mask,
            return_trace=return_trace, generator=generator, loss=targets is not None,
        )  # fmt: skip
        return LanguageModelOutput(
            self._loss(result, targets, lengths),
            result.nll,
            (result.h_n, result.c_n),
            result.trace,
            self._logits(result.output) if logits else None,
        )

    def _loss(
        self, result: Result, targets: Tensor | None, lengths: Tensor | Sequence[int] | None
    ) -> Tensor | None:
        if targets is None or result.objective is None:
            return None
        counted = targets != IGNORE
        if lengths is not None:
            counted = counted & self._inside(targets, lengths)
        return result.objective.sum() / counted.sum().clamp(min=1)

    def _inside(self, targets: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
        """Which targets are inside their sequence: bool, in their layout."""
        batch_first = self.rnn.batch_first and targets.dim() == 2
        time = torch.arange(targets.shape[1 if batch_first else 0], device=targets.device)
        inside = time < torch.as_tensor(lengths, device=targets.device).unsqueeze(1)  # [B, T]
        return inside if batch_first else inside.t()

    def _logits(self, output: Tensor) -> Tensor:
        """`[T, B, V]`; of a variational RNN the log of the mean prediction."""
        logits = self.decoder(output)
        separate = self.rnn.signal is not None and self.rnn.signal.separate_states
        return log_mean_softmax(logits) if separate else logits

    def reader(
        self,
        batch_size: int = 1,
        hx: States | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Reader:
        """Reads word by word: see `Reader`."""
        return Reader(self, batch_size, hx, generator=generator)

    def extra_repr(self) -> str:
        tied = self.decoder.weight is self.encoder.weight
        parts = [f"embedding_dropout={self.embedding_dropout}"] if self.embedding_dropout else []
        return ", ".join(parts + (["tie_weights=True"] if tied else []))


def _weight(decoder: nn.Module) -> Tensor:
    weight = decoder.weight
    assert isinstance(weight, Tensor)
    return weight


def _check_vocabulary(decoder: nn.Module, vocab_size: int) -> None:
    weight = _weight(decoder)
    if weight.shape[-2] != vocab_size:
        raise ValueError(
            f"decoder must predict vocab_size = {vocab_size} words, got a weight of shape "
            f"{tuple(weight.shape)}"
        )
