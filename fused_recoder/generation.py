"""Text from a language model: read the prompt, choose a word, read it, and so on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._language_model import LanguageModelBase
    from ._module import States


@dataclass(frozen=True)
class Sampling:
    """How a word is chosen from a prediction.

    Args:
        temperature: divides the log probabilities; 0 takes the most probable word.
        top_k: only from so many most probable words.
        top_p: only from the fewest most probable words that have this share together.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite, at least 0, got {self.temperature!r}")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be a positive int, got {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")

    def choose(self, log_probabilities: Tensor, numbers: Tensor) -> Tensor:
        """Words `[B]` from predictions `[B, V]` and uniform numbers `[B]` in [0, 1)."""
        if self.temperature == 0:
            return log_probabilities.argmax(-1)
        by_rank = log_probabilities.double().sort(descending=True, stable=True)
        # Less the largest, so that a temperature near 0 makes no infinity of it.
        ratios = by_rank.values - by_rank.values[:, :1]
        p = (ratios / self.temperature).softmax(-1)  # [B, V]
        if self.top_k is not None:
            p[:, self.top_k :] = 0
        if self.top_p is not None:
            total = p.cumsum(-1)
            p = p * (total - p < self.top_p * total[:, -1:])  # while those before have less
        total = p.cumsum(-1)
        rank = torch.searchsorted(total / total[:, -1:], numbers.unsqueeze(1), right=True)
        return by_rank.indices.gather(1, rank).squeeze(1)


def generate(
    lm: LanguageModelBase,
    prompt: Tensor,
    length: int,
    sampling: Sampling,
    *,
    eos: int | None = None,
    hx: States | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """One word `[B]` after another, up to `length`, that continue prompts `[T, B]`."""
    _check(lm, prompt, length, eos)
    rows = prompt.shape[1]
    reader = lm.reader(rows, hx, generator=generator)
    numbers = _uniform(rows, length, generator).to(prompt.device)  # [length, B]
    *read, word = prompt
    for earlier in read:
        reader.feed(earlier)
    ended = torch.zeros(rows, dtype=torch.bool, device=prompt.device)
    for now in numbers:
        word = sampling.choose(reader.feed(word), now)
        if eos is not None:
            word = word.masked_fill(ended, eos)
            ended |= word == eos
        yield word
        if eos is not None and ended.all():
            return


def _uniform(rows: int, length: int, generator: torch.Generator | None) -> Tensor:
    """Numbers `[length, rows]`. More of one dimension leave those that were there as they are."""
    device = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**62, (rows,), generator=generator, device=device).tolist()
    columns = [
        torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(columns, 1)


def _check(lm: LanguageModelBase, prompt: Tensor, length: int, eos: int | None) -> None:
    signal = lm.rnn.signal
    if signal is not None and signal.reads_labels:
        raise ValueError(
            f"signal {signal.name!r} needs a label for every word, and generated ones have none"
        )
    if prompt.numel() == 0:
        raise ValueError(f"prompt must hold at least one token, got shape {tuple(prompt.shape)}")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length must be a positive int, got {length!r}")
    if eos is not None and not 0 <= eos < lm.encoder.num_embeddings:
        raise ValueError(f"eos must be in [0, {lm.encoder.num_embeddings}), got {eos}")
