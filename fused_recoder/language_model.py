"""`RecodingLanguageModel`: encoder, recoding LSTM and decoder, with the loss fused in."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._module import IGNORE, RecodingTrace
from .lstm import FusedRecodingLSTM
from .reader import Reader


class LanguageModelOutput(NamedTuple):
    loss: Tensor | None  # [] mean nll of the tokens that are not ignored; 0 if there is none
    nll: Tensor | None  # [T, B] (layout of the tokens); 0 where ignored
    hx: tuple[Tensor, Tensor]  # recoded final states, each [L, B, H]
    trace: RecodingTrace | None
    logits: Tensor | None  # [T, B, V], only if asked for


class RecodingLanguageModel(nn.Module):
    """A word-level language model that recodes while it reads.

    Linear decoder, softmax, cross-entropy and recoding are one fused computation: no `T x B x V`
    tensor exists, and for gold signals the decoder's gradient serves the loss and the recoder.
    Submodules are called `encoder`, `rnn` and `decoder`, so state dicts of the usual PyTorch
    word-level language models load.

    Args:
        vocab_size, embedding_size, hidden_size, num_layers: sizes.
        signal, step: see `FusedRecodingLSTM`.
        dropout: of embeddings, between layers and before the decoder; `embedding_dropout`,
            `layer_dropout` and `output_dropout` set them one by one.
        tie_weights: use the encoder's weight in the decoder (`embedding_size == hidden_size`).
        decoder: instead of the `nn.Linear(hidden_size, vocab_size)` that is made otherwise, e.g. an
            `EnsembleDecoder`.
        options: everything else goes to the RNN (`states`, `batch_first`, `bias`, ...).
    """

    rnn_class = FusedRecodingLSTM

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        signal="nll",
        step=0.1,
        dropout: float = 0.0,
        embedding_dropout: float | None = None,
        layer_dropout: float | None = None,
        output_dropout: float | None = None,
        tie_weights: bool = False,
        decoder: nn.Module | None = None,
        device=None,
        dtype=None,
        **options,
    ):
        super().__init__()
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size must be a positive int, got {vocab_size!r}")
        if tie_weights and embedding_size != hidden_size:
            raise ValueError(
                f"tie_weights needs embedding_size == hidden_size, got {embedding_size} and "
                f"{hidden_size}"
            )
        self.embedding_dropout = dropout if embedding_dropout is None else embedding_dropout
        if not 0 <= self.embedding_dropout < 1:
            raise ValueError(f"embedding_dropout must be in [0, 1), got {self.embedding_dropout}")
        factory = {"device": device, "dtype": dtype}
        self.encoder = nn.Embedding(vocab_size, embedding_size, **factory)
        if decoder is None:
            self.decoder = nn.Linear(hidden_size, vocab_size, **factory)
        elif tie_weights:
            raise ValueError("tie_weights makes the decoder itself: do not give one")
        elif decoder.weight.shape[-2] != vocab_size:
            raise ValueError(
                f"decoder must predict vocab_size = {vocab_size} words, got a weight of shape "
                f"{tuple(decoder.weight.shape)}"
            )
        else:
            self.decoder = decoder
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.reset_parameters()
        self.rnn = self.rnn_class(
            embedding_size,
            hidden_size,
            num_layers,
            decoder=self.decoder,
            signal=signal,
            step=step,
            dropout=dropout if layer_dropout is None else layer_dropout,
            output_dropout=dropout if output_dropout is None else output_dropout,
            **factory,
            **options,
        )

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
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
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
        x = F.dropout(self.encoder(tokens), self.embedding_dropout, self.training)
        result = self.rnn.read(
            x, hx, targets=targets, labels=labels, lengths=lengths, recode_mask=recode_mask,
            return_trace=return_trace, generator=generator, loss=targets is not None,
        )  # fmt: skip
        loss = None
        if targets is not None:
            counted = (targets != IGNORE).sum()
            if lengths is not None:
                counted = self._counted(targets, lengths)
            loss = result.objective.sum() / counted.clamp(min=1)
        return LanguageModelOutput(
            loss,
            result.nll,
            (result.h_n, result.c_n),
            result.trace,
            self._logits(result.output) if logits else None,
        )

    def _logits(self, output: Tensor) -> Tensor:
        """`[T, B, V]`; of a variational RNN the log of the mean prediction."""
        logits = self.decoder(output)
        if logits.dim() > output.dim() or output.dim() < 4:
            return logits
        return torch.logsumexp(F.log_softmax(logits, -1), 0) - math.log(logits.shape[0])

    def reader(self, batch_size: int = 1, hx=None, *, generator=None) -> Reader:
        """Reads word by word: see `Reader`."""
        return Reader(self, batch_size, hx, generator=generator)

    def _counted(self, targets: Tensor, lengths: Tensor) -> Tensor:
        """How many targets are inside their sequence and not ignored."""
        time_dim = 1 if self.rnn.batch_first and targets.dim() == 2 else 0
        time = torch.arange(targets.shape[time_dim], device=targets.device)
        lengths = torch.as_tensor(lengths, device=targets.device)
        inside = time < lengths.unsqueeze(1)  # [B, T]
        if time_dim == 0:
            inside = inside.t()
        return ((targets != IGNORE) & inside).sum()

    def extra_repr(self) -> str:
        tied = self.decoder.weight is self.encoder.weight
        parts = [f"embedding_dropout={self.embedding_dropout}"] if self.embedding_dropout else []
        return ", ".join(parts + (["tie_weights=True"] if tied else []))
