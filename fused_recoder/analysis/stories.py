"""Stories and how long readers looked at each of their words, from a table."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..training.files import read_lines

NEEDED = ("story", "position", "word")
NO_TIME = ("", "NA")
SENTENCE_END = re.compile(r"""[.!?]["')\]]*$""")
OPENING = "\"'(["
TITLE = re.compile(r"(?i)(mr|mrs|ms|dr|prof|st)\.$")


@dataclass(frozen=True)
class Stories:
    """All words in their order, N of them."""

    path: Path
    names: list[str]  # of the stories
    words: list[str]  # [N] as they were shown
    story: np.ndarray  # [N] which of the names
    position: np.ndarray  # [N] in the story
    time: np.ndarray  # [N] ms; not a number where there is none

    def __len__(self) -> int:
        return len(self.words)

    def previous(self, values: np.ndarray, back: int) -> np.ndarray:
        """Of the word so many before in the same story, [N]; not a number where there is none."""
        found = np.full(len(self), np.nan)
        same = self.story[back:] == self.story[:-back]
        found[back:][same] = values[:-back][same]
        return found

    def sentence_starts(self) -> np.ndarray:
        """[N] bool: the first word of a story, and after a mark that ends sentences unless the next
        word is in lower case."""
        starts = np.ones(len(self), bool)
        for i in range(1, len(self)):
            if self.story[i] == self.story[i - 1]:
                before, word = self.words[i - 1], self.words[i]
                ends = SENTENCE_END.search(before) and not TITLE.match(before)
                starts[i] = bool(ends) and not word.lstrip(OPENING)[:1].islower()
        return starts

    def sentence_position(self) -> np.ndarray:
        """[N] from 1."""
        index = np.arange(len(self))
        first = np.maximum.accumulate(np.where(self.sentence_starts(), index, 0))
        return index - first + 1


def read_stories(path: Path, time_column: str) -> Stories:
    """A tab-separated table with a row per word, in reading order; further columns are ignored."""
    lines = enumerate(read_lines(path), 1)
    _, header = next(lines, (1, ""))
    columns = header.split("\t")
    if missing := [name for name in (*NEEDED, time_column) if name not in columns]:
        raise ValueError(
            f"{path}, line 1: no column {', '.join(map(repr, missing))}; there is {columns}"
        )
    names: list[str] = []
    rows: list[tuple[int, int, str, float]] = []
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise ValueError(
                f"{path}, line {number}: {len(columns)} fields expected, as in line 1, got "
                f"{len(fields)}"
            )
        row = dict(zip(columns, fields, strict=True))
        try:
            rows.append(_row(row, time_column, names, rows[-1] if rows else None))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no words")
    story, position, words, time = zip(*rows, strict=True)
    return Stories(
        path, names, list(words), np.array(story), np.array(position), np.array(time, float)
    )


def _row(
    row: dict[str, str], time_column: str, names: list[str], before: tuple | None
) -> tuple[int, int, str, float]:
    """Story (a new one is added to the names), position, word and time."""
    name, word = row["story"], row["word"]
    goes_on = bool(names) and name == names[-1]
    if not goes_on:
        if name in names:
            raise ValueError(f"story {name!r} goes on after another one")
        names.append(name)
    if not row["position"].isdecimal():
        raise ValueError(f"position must be a whole number, got {row['position']!r}")
    position = int(row["position"])
    if goes_on and before is not None and position != before[1] + 1:
        raise ValueError(
            f"position must be {before[1] + 1}, after that of the word before, got {position}: "
            "models read every word, also those without a time"
        )
    if not word or word.split() != [word]:
        raise ValueError(f"word must be one word, got {word!r}")
    return len(names) - 1, position, word, _time(row[time_column], time_column)


def _time(text: str, column: str) -> float:
    if text in NO_TIME:
        return math.nan
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not 0 < time < math.inf:
        raise ValueError(f"{column} must be a positive number of ms, or empty, got {text!r}")
    return time
