"""Several models on the same sentences: means over their runs, and where they differ."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from ..training.evaluation import load_run
from .sentences import Reading, Token, read, tokenize

SIGNIFICANT = 0.05
NUMBERS = (
    "surprisal", "surprisal_before", "surprisal_after", "surprisal_uncorrected", "delta",
    "delta_after",
)  # fmt: skip


@dataclass(frozen=True)
class ModelRuns:
    """A model by name: runs of different seeds, and where they recode."""

    name: str
    paths: tuple[Path, ...]
    recode: str | tuple[int, ...] = "all"

    @classmethod
    def parse(cls, text: str) -> ModelRuns:
        """`[name=]path[,path...][@all|none|2,5]`"""
        paths, _, where = text.partition("@")
        name, equals, rest = paths.partition("=")
        if not equals:
            name, rest = Path(paths.split(",")[0]).name, paths
        recode: str | tuple[int, ...] = where or "all"
        if recode not in ("all", "none"):
            try:
                recode = tuple(int(number) for number in where.split(","))
            except ValueError:
                raise ValueError(
                    f"after @ must come all, none or numbers of words, got {where!r}"
                ) from None
        if not name or not all(rest.split(",")):
            raise ValueError(f"a model is [name=]path[,path...][@where], got {text!r}")
        return cls(name, tuple(Path(path) for path in rest.split(",")), recode)


@dataclass(frozen=True)
class SentenceNumbers:
    """One sentence in one model: values [n runs, words] by name.

    Those of unknown words are not numbers: what the model says there is about `<unk>`, which is
    frequent and looks easy, and not about the word.
    """

    tokens: list[Token]
    recoded: list[bool]
    values: dict[str, np.ndarray]
    steps: dict[str, np.ndarray]

    @classmethod
    def of_runs(cls, readings: Sequence[Reading]) -> SentenceNumbers:
        """What several runs of one model say of the same words."""
        first = readings[0]
        unknown = np.array([token.unknown for token in first.tokens])
        values = {
            name: np.where(unknown, np.nan, [getattr(r, name) for r in readings])
            for name in NUMBERS
        }
        steps = {key: np.array([r.steps[key] for r in readings]) for key in first.steps}
        return cls(first.tokens, first.recoded, values, steps)

    @property
    def unknown(self) -> list[int]:
        """Indices of the words that the model does not know."""
        return [t for t, token in enumerate(self.tokens) if token.unknown]

    def mean(self, name: str) -> np.ndarray:
        """Over runs, [words]."""
        return self.values[name].mean(0)

    def deviation(self, name: str) -> np.ndarray:
        """The standard deviation over runs, [words]; 0 of a single one."""
        values = self.values[name]
        return values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])


def read_runs(runs: ModelRuns, sentences: list[str], seed: int = 1) -> list[SentenceNumbers]:
    """All sentences with all runs of a model."""
    by_run: list[list[Reading]] = []
    for path in runs.paths:
        loaded, vocabulary = load_run(path)
        tokens = [tokenize(sentence, vocabulary) for sentence in sentences]
        by_run.append(read(loaded.model, vocabulary, tokens, recode=runs.recode, seed=seed))
    same_words = list(zip(*by_run, strict=True))
    for first, *others in same_words:
        if any(_known_words(other) != _known_words(first) for other in others):
            raise ValueError(f"the runs of {runs.name!r} have different vocabularies")
    return [SentenceNumbers.of_runs(readings) for readings in same_words]


def _known_words(reading: Reading) -> list[tuple[str, bool]]:
    return [(token.text, token.unknown) for token in reading.tokens]


def p_values(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Two-tailed Student's t-tests word by word of values [n, words]; NaN for single runs."""
    if min(len(a), len(b)) < 2 or a.shape[1] != b.shape[1]:
        return np.full(a.shape[1], np.nan)
    with warnings.catch_warnings():
        # Words all runs agree on to the last digit: no difference to speak of.
        warnings.simplefilter("ignore", RuntimeWarning)
        return stats.ttest_ind(a, b).pvalue


def write_tsv(path: Path, sentences: list[SentenceNumbers]) -> None:
    """`sentence_id`, `token_id`, `token`, `surprisal`, as surprisal tools read it, then ours."""
    states = list(sentences[0].steps)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE,
                            quotechar=None)  # fmt: skip
        names = list(NUMBERS[1:])
        writer.writerow(
            ["sentence_id", "token_id", "token", "surprisal", "runs", "surprisal_sd", *names,
             "recoded", "unknown", *(f"step_{s}" for s in states)]
        )  # fmt: skip
        for i, sentence in enumerate(sentences, 1):
            means = {name: sentence.mean(name) for name in NUMBERS}
            spread = sentence.deviation("surprisal")
            runs = len(sentence.values["surprisal"])
            steps = [sentence.steps[s].mean(0) for s in states]
            for t, token in enumerate(sentence.tokens):
                writer.writerow(
                    [i, t + 1, token.text, _text(means["surprisal"][t]), runs, _text(spread[t]),
                     *(_text(means[name][t]) for name in names),
                     int(sentence.recoded[t]), int(token.unknown), *(_text(s[t]) for s in steps)]
                )  # fmt: skip


def _text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
