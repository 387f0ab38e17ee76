"""`RecodingLanguageModel`: encoder, recoding LSTM and decoder, with the loss fused in."""

from __future__ import annotations

from ._language_model import LanguageModelBase, LanguageModelOutput
from .lstm import FusedRecodingLSTM

__all__ = ["LanguageModelOutput", "RecodingLanguageModel"]


class RecodingLanguageModel(LanguageModelBase):
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
        word_dropout: of whole words: all of a word's embeddings in a call.
        tie_weights: use the encoder's weight in the decoder (`embedding_size == hidden_size`).
        decoder: instead of the `nn.Linear(hidden_size, vocab_size)` that is made otherwise, e.g. an
            `EnsembleDecoder`.
        options: everything else goes to the RNN (`states`, `batch_first`, `dropout_kind`,
            `weight_dropout`, ...).
    """

    rnn_class = FusedRecodingLSTM
