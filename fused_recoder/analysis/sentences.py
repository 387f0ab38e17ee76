"""Word by word: what a model expects, and what its recoder does about it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import fused_recoder as fr

from ..training import Tokenizer
from ..training.data import IGNORE
from ..training.files import read_lines

NATS_PER_BIT = math.log(2)
GLUED = re.compile(r"^(.*\w)([.,;:!?]+)$")
CURLY = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}  # typographic quotation marks


@dataclass(frozen=True)
class Token:
    """A word, or a mark of punctuation."""

    text: str  # as the sentence has it
    ids: tuple[int, ...]  # one of a word, several of its characters or pieces
    unknown: bool


def read_sentences(path: Path) -> list[str]:
    """One per line; blank lines are left out."""
    found = [line.strip() for line in read_lines(path) if line.strip()]
    if not found:
        raise ValueError(f"{path} holds no sentences")
    return found


def tokenize(sentence: str, vocabulary: Tokenizer) -> list[Token]:
    """The words of a sentence as the vocabulary writes them.

    A word is looked up as it is, then with plain quotation marks and in lower case. Punctuation
    glued to a word is split off, and left out where the vocabulary has no such mark (PTB has none
    at all). Characters and pieces of words know every word as it is.
    """
    found = []
    for raw in sentence.split():
        plain = raw if raw in vocabulary else raw.translate(CURLY)
        known = _spelling(plain, vocabulary) is not None
        glued = None if known else GLUED.match(plain)
        for text in glued.groups() if glued else (plain,):
            spelling = _spelling(text, vocabulary)
            if spelling is None and not any(c.isalnum() for c in text):
                continue
            ids = vocabulary.encode([spelling or text])
            found.append(Token(text, tuple(ids), ids == [vocabulary.unknown]))
    if not found:
        raise ValueError(f"no words in {sentence!r}")
    return found


def _spelling(word: str, vocabulary: Tokenizer) -> str | None:
    return next((w for w in (word, word.lower()) if w in vocabulary), None)


@dataclass(frozen=True)
class Reading:
    """Numbers of every word of one sentence, in one model. Surprisals in bits, else as the signal.

    Of a word of several tokens the sum over these, but the mean of their steps. Without a recoder
    before and after are the same, and delta is not a number.
    """

    tokens: list[Token]
    recoded: list[bool]
    surprisal: list[float]  # of the model's own prediction
    surprisal_before: list[float]  # predicted from the state as it was
    surprisal_after: list[float]  # predicted from the recoded state
    surprisal_uncorrected: list[float]  # as surprisal, had the last correction been left out
    delta: list[float]
    delta_after: list[float]
    steps: dict[str, list[float]]  # by state and layer, e.g. "c1"


def places_mask(places: str | Sequence[int], length: int) -> list[bool]:
    """Where to recode: "all", "none", or the numbers of words, from 1."""
    if places == "all":
        return [True] * length
    if places == "none":
        return [False] * length
    return [number in places for number in range(1, length + 1)]


@torch.no_grad()
def read(
    model: fr.RecodingLanguageModel,
    vocabulary: Tokenizer,
    sentences: Sequence[list[Token]],
    *,
    recode: str | Sequence[int] = "all",
    seed: int = 1,
) -> list[Reading]:
    """Reads sentences side by side, each from a fresh state after `<eos>`.

    In float64, whatever the model's own precision; the model itself stays as it is.
    """
    rnn = model.rnn
    if rnn.signal is not None and rnn.signal.name in ("variational", "classifier", "custom"):
        raise ValueError(f"signal {rnn.signal.name!r} cannot be read word by word here")
    model = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(seed)
    words = [_words_of_tokens(sentence) for sentence in sentences]
    length, count = max(len(w) for w in words), len(sentences)
    targets = torch.full((length, count), IGNORE)
    inputs = torch.zeros(length, count, dtype=torch.int64)
    mask = torch.zeros(length, count, dtype=torch.bool)
    for b, sentence in enumerate(sentences):
        ids = torch.tensor([i for token in sentence for i in token.ids])
        targets[: len(ids), b] = ids
        inputs[: len(ids), b] = torch.cat([torch.tensor([vocabulary.eos]), ids[:-1]])
        mask[: len(ids), b] = torch.tensor(places_mask(recode, len(sentence)))[words[b]]

    hx, without, columns = None, None, []
    for t in range(length):
        now = inputs[t : t + 1], targets[t : t + 1], mask[t]
        columns.append(_step(model, *now, hx, without, generator))
        hx, without = columns[-1].pop("hx"), columns[-1].pop("without")
    return [_reading(sentence, b, columns, rnn, recode) for b, sentence in enumerate(sentences)]


def _words_of_tokens(sentence: Sequence[Token]) -> list[int]:
    """Which word each token of a sentence belongs to."""
    return [number for number, token in enumerate(sentence) for _ in token.ids]


def _step(model, tokens: Tensor, targets: Tensor, mask: Tensor, hx, without, generator) -> dict:
    """One word of all sentences [1, B]: numbers [B] by name, and the states to go on with, recoded
    (hx) and without this last correction."""
    rnn = model.rnn
    gold = targets[0].clamp(min=0)

    def bits(hidden: Tensor) -> Tensor:
        log_p = F.log_softmax(model.decoder(hidden), -1)
        return -log_p.gather(1, gold.unsqueeze(1)).squeeze(1) / NATS_PER_BIT

    if rnn.signal is None:
        out = model(tokens, targets, hx)
        before = bits(out.hx[0][-1])
        nothing = torch.full_like(before, torch.nan)
        return {
            "hx": out.hx, "without": out.hx, "before": before, "after": before, "own": before,
            "uncorrected": before, "delta": nothing, "delta_after": nothing, "step_size": None,
        }  # fmt: skip
    still = torch.zeros_like(mask).unsqueeze(0)
    plain = model(tokens, targets, hx, recode_mask=still, generator=generator)
    out = model(
        tokens, targets, hx, recode_mask=mask.unsqueeze(0), return_trace=True, generator=generator
    )
    (h, c), (h_after, c_after) = ([s[-1] for s in o.hx] for o in (plain, out))  # [B, H] each
    if "h" not in rnn.states:
        # Only c was recoded: what the output gate o makes of it, h = o tanh(c).
        h_after = torch.where(c == 0, h, h * c_after.tanh() / c.tanh())
    before, after = bits(h), bits(h_after)
    trace = out.trace
    # Labels must not leak; and where h is not recoded there is nothing new to decode.
    late = rnn.signal.sees_labels or "h" not in rnn.states
    if late:  # the last correction was made at the word before
        again = model(tokens, targets, without, recode_mask=still, generator=torch.Generator())
    return {
        "hx": out.hx,
        "without": plain.hx,
        "before": before,
        "after": after,
        "own": before if late else after,
        "uncorrected": bits(again.hx[0][-1]) if late else before,
        "delta": trace.delta[0],
        "delta_after": torch.where(mask, trace.delta_after[0], trace.delta[0]),
        "step_size": trace.step_size[:, :, 0],  # [L, S, B]
    }


def _reading(sentence: list[Token], b: int, columns: list[dict], rnn, recode) -> Reading:
    places = torch.tensor(_words_of_tokens(sentence))
    columns = columns[: len(places)]

    def sums(values: list[Tensor]) -> Tensor:
        values = torch.stack(values)  # [tokens]
        return values.new_zeros(len(sentence)).index_add_(0, places, values)

    def column(name: str) -> list[float]:
        return sums([step[name][b] for step in columns]).tolist()

    steps = {}
    if rnn.signal is not None:
        counts = places.bincount()
        for layer in range(rnn.num_layers):
            for s, state in enumerate(rnn.states):
                sizes = sums([step["step_size"][layer, s, b] for step in columns]) / counts
                steps[f"{state}{layer}"] = sizes.tolist()
    return Reading(
        sentence,
        places_mask(recode if rnn.signal is not None else "none", len(sentence)),
        column("own"),
        column("before"),
        column("after"),
        column("uncorrected"),
        column("delta"),
        column("delta_after"),
        steps,
    )
