"""Sets of sentences for subject-verb agreement, and how they are read.

Giulianelli et al. 2018: tab-separated rows without a header (sentence, POS tags, sing or plur,
index of the subject, index of the verb, helpful nouns, attractors). Two files are not what their
names say: the one that ends in `a3` has exactly one attractor (and no helpful noun) in every row,
the one that ends in `a-` has up to three, and up to four helpful nouns in spite of the `k0`. In
both the verb is the sixth word after the subject.

Gulordava et al. 2018: `generated.tab`, a correct and a wrong verb form per sentence and its prefix.
The word that follows the prefix in `sent` is another one in most rows, so what is compared are the
two forms after the prefix.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from ..training import Vocabulary
from ..training.files import errors_naming, read_lines, require

IRREGULAR = {"is": "are", "was": "were", "has": "have", "does": "do", "goes": "go"}
PLURAL_IRREGULAR = {plural: singular for singular, plural in IRREGULAR.items()}
NUMBERS = ("sing", "plur")  # labels 0 and 1
COLUMNS = (  # of `generated.tab`, those that are used
    "pattern", "constr_id", "sent_id", "class", "correct_number", "form", "prefix", "len_prefix",
    "len_context",
)  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """A prefix that ends before the verb, its subject, and the two forms the verb might have."""

    words: tuple[str, ...]  # of the prefix
    subject: int  # index of the subject among them
    label: int  # number of the subject, an index of NUMBERS
    correct: str
    wrong: str
    rest: tuple[str, ...] = ()  # the sentence from the verb on, where it is known

    def __post_init__(self):
        if not 0 <= self.subject < len(self.words):
            raise ValueError(f"there is no subject at {self.subject} of {self.words}")

    def known(self, vocabulary: Vocabulary) -> bool:
        """Whether both forms and the subject are in the vocabulary."""
        needed = (self.correct, self.wrong, self.words[self.subject])
        return all(word in vocabulary.ids for word in needed)


def other_form(verb: str, number: str) -> str:
    """The form of a present-tense verb that agrees with the other number."""
    if number == "sing":
        if verb in IRREGULAR:
            return IRREGULAR[verb]
        if verb.endswith("ies") and len(verb) > 4:
            return verb[:-3] + "y"
        if verb.endswith(("sses", "xes", "zes", "ches", "shes")):
            return verb[:-2]
        return verb.removesuffix("s")
    if verb in PLURAL_IRREGULAR:
        return PLURAL_IRREGULAR[verb]
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "x", "z", "ch", "sh")) else "s")


def read_giulianelli(path: Path) -> list[Agreement]:
    """One of their files, one item per row."""
    rows = [line.split("\t") for line in read_lines(path)]
    found = []
    with errors_naming(path):
        for sentence, _, number, subject, verb, *_ in rows:
            words, place = tuple(sentence.split()), int(verb)
            if not place < len(words):
                raise ValueError(f"there is no word {place} in {sentence!r}")
            forms = words[place], other_form(words[place], number)
            label = _label(number)
            found.append(Agreement(words[:place], int(subject), label, *forms, words[place:]))
    return found


def read_gulordava(path: Path) -> list[Agreement]:
    """`generated.tab`; one item per pair of rows."""
    pairs: dict[tuple, dict[str, dict]] = {}
    for row in _table(path, COLUMNS):
        key = (row["pattern"], row["constr_id"], row["sent_id"])
        pairs.setdefault(key, {})[row["class"]] = row
    found = []
    with errors_naming(path):
        for key, pair in pairs.items():
            require(f"the pair {key}", pair, ["correct", "wrong"])
            row = pair["correct"]
            words = tuple(row["prefix"].split())
            found.append(
                Agreement(
                    words,
                    int(row["len_prefix"]) - int(row["len_context"]),
                    _label(row["correct_number"]),
                    row["form"],
                    pair["wrong"]["form"],
                )
            )
    return found


def _label(number: str) -> int:
    if number not in NUMBERS:
        raise ValueError(f"a number must be one of {NUMBERS}, got {number!r}")
    return NUMBERS.index(number)


def _table(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Tab-separated rows under a header that names at least these columns."""
    try:
        rows = list(csv.DictReader(read_lines(path), delimiter="\t"))
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    for number, row in enumerate(rows, 2):
        short = [name for name, value in row.items() if value is None]
        require(f"{path}, line {number},", dict.fromkeys(set(row) - set(short)), columns)
    return rows
