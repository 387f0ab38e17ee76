"""What a model says of every word of stories, all of it once the word has been seen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

import fused_recoder as fr

from ..training import Vocabulary
from ..training.data import EOS, IGNORE
from .sentences import NATS_PER_BIT, Token, pieces
from .stories import Stories
from .theorems import with_recoder

WINDOW = 50  # time steps of a call: how soon an interrupt is noticed
GRADIENT, STEP, CORRECTION = "gradient_", "step_", "correction"


@dataclass(frozen=True)
class Measures:
    """Of one run, for every word [N]."""

    pieces: list[list[Token]]  # what the vocabulary makes of each word
    known: np.ndarray  # [N] bool
    values: dict[str, np.ndarray]  # [N] by name; not a number where the word is unknown


def measure(
    model: fr.RecodingLanguageModel,
    vocabulary: Vocabulary,
    stories: Stories,
    *,
    eos: str,
    seed: int = 1,
    progress: Callable[[range], Iterable[int]] = iter,
) -> Measures:
    """Reads all stories side by side, each from a fresh state after `<eos>`.

    The numbers of a word's pieces are summed, but step sizes, of which the mean is taken. In
    float64, whatever the model's own precision; the model itself stays as it is.

    Args:
        eos: "sentence": `<eos>` is also read between two sentences; "story": it is not.
        progress: goes through the windows that are read, and may show where it is.
    """
    words = [pieces(word, vocabulary) for word in stories.words]
    tokens, owners = _sequences(stories, words, vocabulary, after_sentences=eos == "sentence")
    by_token = _read(_measuring(model), tokens, seed, progress)
    known = np.array([bool(found) and not any(t.unknown for t in found) for found in words])
    counts = np.array([len(found) for found in words])
    values = {"pieces": counts.astype(float)}
    of_words = owners >= 0  # [T, B]
    for name, numbers in by_token.items():
        sums = np.bincount(owners[of_words], numbers[of_words], minlength=len(stories))
        values[name] = sums / np.maximum(counts, 1) if name.startswith(STEP) else sums
    return Measures(words, known, {n: np.where(known, v, np.nan) for n, v in values.items()})


def _sequences(
    stories: Stories, words: list[list[Token]], vocabulary: Vocabulary, *, after_sentences: bool
) -> tuple[torch.Tensor, np.ndarray]:
    """Tokens [T + 1, B] of all stories, from `<eos>` on and padded with targets to ignore; and
    whose piece each token but the first is, [T, B]: the number of a word, -1 for none."""
    end = vocabulary.ids[EOS]
    ids: list[list[int]] = [[end] for _ in stories.names]
    owners: list[list[int]] = [[] for _ in stories.names]
    for number, (start, found) in enumerate(zip(stories.sentence_starts(), words, strict=True)):
        b = stories.story[number]
        if start and after_sentences and owners[b]:
            ids[b].append(end)
            owners[b].append(-1)
        ids[b] += [token.id for token in found]
        owners[b] += [number] * len(found)
    length = max(len(row) for row in owners)
    tokens = torch.full((length + 1, len(ids)), IGNORE)
    padded = np.full((length, len(ids)), -1)
    for b, (row, owner) in enumerate(zip(ids, owners, strict=True)):
        tokens[: len(row), b] = torch.tensor(row)
        padded[: len(owner), b] = owner
    return tokens, padded


def _measuring(model: fr.RecodingLanguageModel) -> fr.RecodingLanguageModel:
    """The model; a plain one with a recoder that takes no step, and only measures gradients."""
    if model.rnn.signal is None and isinstance(model, fr.RecodingLanguageModel):
        return with_recoder(model, "nll", 0.0, ("h", "c"))
    return copy.deepcopy(model).double().eval()


@torch.no_grad()
def _read(
    model: fr.RecodingLanguageModel,
    tokens: torch.Tensor,
    seed: int,
    progress: Callable[[range], Iterable[int]],
) -> dict[str, np.ndarray]:
    """Numbers [T, B] by name, of tokens [T + 1, B] but the first."""
    inputs, targets = tokens[:-1].clamp(min=0), tokens[1:]  # [T, B]; padding may be any word
    generator, hx, windows = torch.Generator().manual_seed(seed), None, []
    for start in progress(range(0, len(targets), WINDOW)):
        time = slice(start, start + WINDOW)
        out = model(inputs[time], targets[time], hx, return_trace=True, generator=generator)
        hx = out.hx
        windows.append(_columns(out, model.rnn))
    return {name: np.concatenate([window[name] for window in windows]) for name in windows[0]}


def _columns(out, rnn) -> dict[str, np.ndarray]:
    """Of one window, [T, B] each; of a model that cannot recode the surprisal alone."""
    columns, trace = {"surprisal": out.nll / NATS_PER_BIT}, out.trace
    if trace is not None:
        columns[CORRECTION] = trace.delta - trace.delta_after
        for layer in range(rnn.num_layers):
            for s, state in enumerate(rnn.states):
                columns[f"{GRADIENT}{state}{layer}"] = trace.grad_norm[layer, s]
                columns[f"{STEP}{state}{layer}"] = trace.step_size[layer, s]
    return {name: values.numpy() for name, values in columns.items()}
