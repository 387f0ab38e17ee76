"""The predictors of reading times: what they are, and which words have all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..training.data import count_words
from .regression import varies
from .sentences import Token
from .stories import Stories
from .word_measures import CORRECTION, GRADIENT, STEP, Measures

SPILL_OVER = 2  # words back whose predictors a word has, too
BASE, SURPRISAL, SQUARE, GRADIENTS, CORRECTIONS = (
    "base", "surprisal", "surprisal²", "gradient", "correction",
)  # fmt: skip


@dataclass(frozen=True)
class Predictors:
    """Of one run."""

    columns: dict[str, np.ndarray]  # [N] by name
    groups: dict[str, list[str]]  # names of the columns, by group

    def matrix(self, groups: Sequence[str], used: np.ndarray) -> np.ndarray:
        """[n, p] of the words that are used [N]."""
        names = [name for group in groups for name in self.groups[group]]
        return np.stack([self.columns[name][used] for name in names], axis=1)

    def has(self, group: str, used: np.ndarray) -> bool:
        """Whether there is anything in it that is not the same for all words."""
        return bool(self.groups[group]) and varies(self.matrix([group], used)).any()


def make_predictors(stories: Stories, log_frequency: np.ndarray, measures: Measures) -> Predictors:
    """Those of one run, log frequency [N] being that of all runs."""
    values = {
        "length": np.array([float(len(word)) for word in stories.words]),
        "log_frequency": log_frequency,
        **measures.values,
    }
    values["surprisal_squared"] = values["surprisal"] ** 2
    columns = {
        "sentence_position": stories.sentence_position().astype(float),
        "story_position": stories.position.astype(float),
    }
    groups = {BASE: list(columns), SURPRISAL: [], SQUARE: [], GRADIENTS: [], CORRECTIONS: []}
    for name, of_word in values.items():
        for back in range(SPILL_OVER + 1):
            column = f"{name}_{back}" if back else name
            columns[column] = stories.previous(of_word, back) if back else of_word
            groups[_group(name)].append(column)
    return Predictors(columns, groups)


def _group(name: str) -> str:
    if name.startswith(GRADIENT):
        return GRADIENTS
    if name == CORRECTION or name.startswith(STEP):
        return CORRECTIONS
    return {"surprisal": SURPRISAL, "surprisal_squared": SQUARE}.get(name, BASE)


@dataclass(frozen=True)
class Frequencies:
    """How often words occur in a text, in any case."""

    path: Path
    counts: Counter[str]

    @classmethod
    def of_text(cls, path: Path) -> Frequencies:
        """Those of a text, or of the `train.txt` in a folder."""
        path = path / "train.txt" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"no text {path} to count words in: name one with --counts")
        counts: Counter[str] = Counter()
        for word, count in count_words(path).items():
            counts[word.lower()] += count
        return cls(path, counts)

    def log(self, pieces: Sequence[Sequence[Token]]) -> np.ndarray:
        """log((count + 1) / words of the text) of each word's rarest piece [N]; marks do not count
        unless there is nothing else. Not a number where there are no pieces."""
        total = sum(self.counts.values())
        found = np.full(len(pieces), math.nan)
        for i, tokens in enumerate(pieces):
            lettered = [token for token in tokens if token.has_letters] or tokens
            if lettered:
                rarest = min(self.counts[token.text.lower()] for token in lettered)
                found[i] = math.log((rarest + 1) / total)
        return found


@dataclass(frozen=True)
class Coverage:
    """Which words have all predictors in all runs, and why the others don't."""

    used: np.ndarray  # [N] bool
    timed: int  # words with a reading time; the following are among them
    early: int  # without two words before them
    unknown: int  # to a run
    after_unknown: int  # one of the two before is unknown

    @classmethod
    def of(cls, stories: Stories, known: np.ndarray) -> Coverage:
        """`known` [N]: to all runs."""
        timed = ~np.isnan(stories.time)
        before = [stories.previous(known.astype(float), b + 1) for b in range(SPILL_OVER)]
        early = timed & np.isnan(before[-1])
        unknown = timed & ~early & ~known
        after = timed & ~early & known & ~np.all(before, axis=0)
        used = timed & ~early & ~unknown & ~after
        return cls(used, *(int(words.sum()) for words in (timed, early, unknown, after)))

    def __str__(self) -> str:
        return (
            f"{len(self.used):,} words, {self.timed:,} with a reading time; left out of these: "
            f"{self.early:,} without two words before them, {self.unknown:,} unknown, "
            f"{self.after_unknown:,} after an unknown one; {int(self.used.sum()):,} used"
        )
