"""Recoding language models for Hugging Face transformers, and the tools that are built on it.

    model = RecodingForCausalLM.from_run("runs/mine")
    tokenizer = tokenizer_from_run("runs/mine")

Needs the packages of `pip install fused-recoder[hf]`. When this module is imported, the `Auto`
classes of transformers get to know it.
"""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

from .signals.formulas import IGNORE
from .training import Config, Tokenizer, Vocabulary, build_model
from .training.evaluation import load_run
from .training.tokenizer import EOS, UNK

# What a model is made of, as in the settings of a training run.
SETTINGS = (
    "embedding_size", "hidden_size", "num_layers", "dropout", "signal", "signal_options", "step",
    "step_options", "states", "gradient", "rnn_options", "decoder_options",
)  # fmt: skip


class RecodingConfig(PreTrainedConfig):
    """What a `RecodingForCausalLM` is made of: see `fused_recoder.training.Config`.

    `vocab_size` counts the padding token, where there is one: it is the last, and never predicted.
    """

    model_type = "recoding_lm"
    attribute_map = {"num_hidden_layers": "num_layers"}  # noqa: RUF012 (as transformers has it)

    vocab_size: int = 10_000
    embedding_size: int | None = None
    hidden_size: int = 200
    num_layers: int = 2
    dropout: float = 0.0
    signal: str | None = "nll"
    signal_options: dict = field(default_factory=dict)
    step: float | str = 0.1
    step_options: dict = field(default_factory=dict)
    states: str = "hc"
    gradient: str = "detached"
    rnn_options: dict = field(default_factory=dict)
    decoder_options: dict | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    @property
    def words(self) -> int:
        """How many tokens are read and predicted."""
        if self.pad_token_id not in (None, self.vocab_size - 1):
            raise ValueError(
                "pad_token_id must be the last token, "
                f"{self.vocab_size - 1}, or None, got {self.pad_token_id}"
            )
        return self.vocab_size - (self.pad_token_id is not None)

    def settings(self) -> Config:
        """The same for `build_model`."""
        chosen = {name: getattr(self, name) for name in SETTINGS}
        chosen["rnn_options"] = chosen["rnn_options"] | {"batch_first": True}
        return Config(tie_weights=self.tie_word_embeddings, dtype="float64", **chosen)


class RecodingForCausalLM(PreTrainedModel):
    """A `RecodingLanguageModel` (`.lm`) that transformers knows how to call, save and load.

    The gold token of a position is the input of the next; the last one has none. What a position
    predicts does not depend on any input after it.
    """

    config_class = RecodingConfig
    base_model_prefix = "lm"
    _tied_weights_keys = {"lm.decoder.weight": "lm.encoder.weight"}  # noqa: RUF012

    def __init__(self, config: RecodingConfig):
        super().__init__(config)
        # from_pretrained makes a model without memory, to fill in what a file holds. That is not
        # all of ours: steps that are numbers are in no state dict.
        self._to_fill = torch.get_default_device().type == "meta"
        with torch.device("cpu"):
            self.lm = build_model(config.settings(), config.words).to(torch.get_default_dtype())
        self._made = self._recoder() if self._to_fill else {}
        self.post_init()

    @classmethod
    def from_run(cls, path: str | Path, **changes: Any) -> RecodingForCausalLM:
        """The best model of a run's folder, or a checkpoint; `changes` are settings to replace."""
        loaded, vocabulary = load_run(path, **changes)
        words, eos = len(vocabulary), vocabulary.eos
        chosen = {name: getattr(loaded.config, name) for name in SETTINGS}
        if (options := chosen["decoder_options"]) is not None:
            tokens = loaded.about["train_tokens"]
            chosen["decoder_options"] = {"dataset_size": tokens} | options
        config = RecodingConfig(
            vocab_size=words + 1, pad_token_id=words, bos_token_id=eos, eos_token_id=eos,
            tie_word_embeddings=loaded.config.tie_weights, dtype=loaded.config.dtype, **chosen,
        )  # fmt: skip
        model = cls(config)
        model.lm = loaded.model
        model.lm.rnn.batch_first = True
        return model.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits `[B, T, V]` of the tokens after `input_ids` `[B, T]`, in memory of their own.

        Args:
            attention_mask: `[B, T]`, 0 where there is padding, which must be on the right and is
                not read. Without it, where the padding token is.
            labels: `[B, T]`, usually the `input_ids`: the loss is the mean over those that are not
                -100, each predicted from the position before it.
            options: what the loss of transformers takes, e.g. `num_items_in_batch`.
        """
        read = self._what_is_read(input_ids, attention_mask)  # [B, T]
        tokens = input_ids.masked_fill(~read, 0)
        signal = self.lm.rnn.signal
        gold = None
        if signal is not None and signal.needs_targets:
            gold = F.pad(tokens.masked_fill(~read, IGNORE)[:, 1:], (0, 1), value=IGNORE)
        out = self.lm(tokens, gold, lengths=None if read.all() else read.sum(1), logits=True)
        assert out.logits is not None
        logits = out.logits.contiguous()
        if self.config.pad_token_id is not None:
            logits = F.pad(logits, (0, 1), value=torch.finfo(logits.dtype).min)
        loss = None if labels is None else self._loss(logits, labels, **options)
        if return_dict is None:
            return_dict = self.config.return_dict
        if not return_dict:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutput(loss=loss, logits=logits)

    def _what_is_read(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """bool `[B, T]`: what is no padding, which is on the right."""
        padding = self.config.pad_token_id
        if attention_mask is None:
            read = (
                torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding
            )
        elif attention_mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask must have shape {tuple(tokens.shape)} like input_ids, "
                f"got {tuple(attention_mask.shape)}"
            )
        else:
            read = attention_mask != 0
        if (read[:, 1:] & ~read[:, :-1]).any():
            raise ValueError(
                "padding must be on the right, since a recurrent model reads what is on the left: "
                "set tokenizer.padding_side = 'right'"
            )
        if padding is not None and (read & (tokens == padding)).any():
            raise ValueError("input_ids have padding tokens where attention_mask is not 0")
        return read

    def _loss(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        if self.config.pad_token_id is not None:
            labels = labels.masked_fill(labels == self.config.pad_token_id, IGNORE)
        return self.loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], **options
        )

    def _recoder(self) -> dict[str, Tensor]:
        """Parameters and buffers of step, signal and gate, by name."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: t for name, t in tensors.items() if re.match(r"lm\.rnn\.\w+\.", name)}

    def _init_weights(self, module: nn.Module) -> None:
        """What no file had: a recoder is as it was made, anything else as when training begins."""
        if not self._to_fill:
            return
        (place,) = (name for name, other in self.named_modules() if other is module)
        own = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        for name, tensor in own.items():
            if getattr(tensor, "_is_hf_initialized", False):
                continue
            made = self._made.get(f"{place}.{name}")
            nn.init.uniform_(tensor, -0.1, 0.1) if made is None else tensor.copy_(made)

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.encoder

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.decoder

    def resize_token_embeddings(self, *_: Any, **__: Any) -> nn.Embedding:
        raise NotImplementedError("the vocabulary is that of the text the model was trained on")


def tokenizer_from_run(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a run's folder, or of a checkpoint."""
    return make_tokenizer(load_run(path)[1])


def make_tokenizer(vocabulary: Tokenizer) -> PreTrainedTokenizerFast:
    """A vocabulary as transformers knows them. Nothing is put around a text; `<eos>` is the token
    to begin and to end one with."""
    if isinstance(vocabulary, Vocabulary):
        known = {} if vocabulary.unknown is None else {"unk_token": UNK}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary.ids, **known))
        model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    else:
        known = {}
        model = tokenizers.Tokenizer.from_str(vocabulary.to_bytes().decode())
    padding, taken = "<pad>", model.get_vocab()
    while padding in taken:
        padding = f"<{padding}>"
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token=EOS, eos_token=EOS, pad_token=padding, **known,
        padding_side="right", clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


AutoConfig.register(RecodingConfig.model_type, RecodingConfig)
AutoModelForCausalLM.register(RecodingConfig, RecodingForCausalLM)
