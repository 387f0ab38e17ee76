"""From a folder of text files to batches of token ids.

A corpus is a folder with `train.txt`, `valid.txt` and `test.txt`: one sentence per line, words
between white space. Every line ends with `<eos>`; words outside the vocabulary become `<unk>`.
The ids are computed once and kept, memory-mapped, in a cache folder of their own.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .files import atomic_file, errors_naming, read_lines

EOS, UNK = "<eos>", "<unk>"
SPLITS = ("train", "valid", "test")
IGNORE = -100
CACHE_FORMAT = b"fused_recoder tokens 1"  # change it when the meaning of cached files changes


class Vocabulary:
    """Words and their ids, in the order of their first appearance in the training text.

    That is the order the usual PyTorch word language models have, so their weights fit.
    """

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            twice = next(w for w, n in Counter(self.words).items() if n > 1)
            raise ValueError(f"vocabulary holds {twice!r} more than once")
        if EOS not in self.ids:
            raise ValueError(f"vocabulary of {len(self)} words has no {EOS}, which ends every line")

    @classmethod
    def from_text(cls, path: Path, max_size: int | None = None, min_count: int = 1) -> Vocabulary:
        """All words of a text, or its `max_size` most frequent ones, or those that occur
        `min_count` times; `<eos>` and `<unk>` are among them in any case."""
        if max_size is not None and max_size < 2:
            raise ValueError(f"max_vocab must be at least 2 ({EOS} and {UNK}), got {max_size}")
        counts = Counter()
        for words in _lines(path):
            counts.update(words)
            counts[EOS] += 1
        counts.setdefault(UNK, 0)
        kept = [w for w, n in counts.items() if n >= min_count or w in (EOS, UNK)]
        if max_size is not None and len(kept) > max_size:
            # Stable: of equally frequent words those that come first in the text.
            by_rank = sorted(kept, key=lambda w: (w not in (EOS, UNK), -counts[w]))
            chosen = set(by_rank[:max_size])
            kept = [w for w in kept if w in chosen]
        return cls(kept)

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """A file with one word per line, in the order of the ids."""
        words = list(read_lines(path))
        with errors_naming(path):
            return cls(words)

    def __len__(self) -> int:
        return len(self.words)

    def __eq__(self, other) -> bool:
        return isinstance(other, Vocabulary) and self.words == other.words

    def encode(self, words: Sequence[str]) -> list[int]:
        """Ids of words; that of `<unk>` for unknown ones."""
        unknown = self.ids.get(UNK)
        found = [self.ids.get(word, unknown) for word in words]
        if None in found:
            word = words[found.index(None)]
            raise ValueError(f"{word!r} is not in the vocabulary, and the vocabulary has no {UNK}")
        return found

    def to_bytes(self) -> bytes:
        return ("\n".join(self.words) + "\n").encode()


class Corpus:
    """Vocabulary and token ids of a folder of text.

    Args:
        folder: holds `train.txt`, `valid.txt`, `test.txt`.
        vocabulary: an existing one, e.g. a checkpoint's; made from `train.txt` if absent.
        max_vocab, min_count: limits of the vocabulary that is made.
        cache: folder for the encoded text; `$FUSED_RECODER_CACHE` or the user's cache by default.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vocabulary: Vocabulary | None = None,
        max_vocab: int | None = None,
        min_count: int = 1,
        cache: str | Path | None = None,
    ):
        self.folder = Path(folder)
        self.cache = Path(cache) if cache is not None else cache_folder()
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"no folder {str(self.folder)!r}: a corpus is a folder with train.txt, valid.txt "
                "and test.txt"
            )
        self._digests: dict[str, str] = {}
        if vocabulary is None:
            vocabulary = self._make_vocabulary(max_vocab, min_count)
        self.vocabulary = vocabulary

    def __getitem__(self, split: str) -> np.ndarray:
        """`<eos>`, then all tokens of a split: int32 `[N + 1]`, memory-mapped."""
        key = self._key(split, self.vocabulary.to_bytes())
        path = self.cache / f"{key}.npy"
        if not path.exists():
            ids = array("i", [self.vocabulary.ids[EOS]])
            end = [EOS]
            for number, words in enumerate(_lines(self.path(split)), 1):
                try:
                    ids.extend(self.vocabulary.encode(words + end))
                except ValueError as error:
                    raise ValueError(f"{self.path(split)}, line {number}: {error}") from None
            with self._writing(path) as file:
                np.save(file, np.frombuffer(ids, dtype=np.int32))
        return np.load(path, mmap_mode="r")

    def encode(self) -> Corpus:
        """All splits, now: what is wrong with one should not show up hours later."""
        for split in SPLITS:
            self[split]
        return self

    def path(self, split: str) -> Path:
        """The text of a split, which is there and not empty."""
        path = self.folder / f"{split}.txt"
        if not path.is_file():
            found = sorted(p.name for p in self.folder.glob("*.txt")) or "no .txt file at all"
            raise FileNotFoundError(
                f"no {split}.txt in {str(self.folder)!r} (there is {found}): a corpus is a folder "
                "with train.txt, valid.txt and test.txt"
            )
        return path

    def digest(self, split: str) -> str:
        """Changes when the text changes."""
        if split not in self._digests:
            digest = hashlib.blake2b(digest_size=20)
            with open(self.path(split), "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            self._digests[split] = digest.hexdigest()
        return self._digests[split]

    def _make_vocabulary(self, max_vocab: int | None, min_count: int) -> Vocabulary:
        path = self.cache / f"{self._key('train', f'{max_vocab} {min_count}'.encode())}.vocab"
        if path.exists():
            return Vocabulary.load(path)
        vocabulary = Vocabulary.from_text(self.path("train"), max_vocab, min_count)
        with self._writing(path) as file:
            file.write(vocabulary.to_bytes())
        return vocabulary

    def _key(self, split: str, *details: bytes) -> str:
        parts = (CACHE_FORMAT, self.digest(split).encode(), *details)
        return hashlib.blake2b(b"\0".join(parts), digest_size=20).hexdigest()

    def _writing(self, path: Path):
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            if not os.access(self.cache, os.W_OK):
                raise PermissionError("it is not writable")
        except OSError as error:
            raise OSError(
                f"cannot keep encoded text in {str(self.cache)!r} ({error}): set "
                "FUSED_RECODER_CACHE to a folder that can be written"
            ) from error
        return atomic_file(path)


def cache_folder() -> Path:
    """`$FUSED_RECODER_CACHE`, or a folder among the user's other caches."""
    if given := os.environ.get("FUSED_RECODER_CACHE"):
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fused_recoder"


def _lines(path: Path) -> Iterator[list[str]]:
    """The words of every line; blank lines are lines too."""
    any_words = False
    for line in read_lines(path):
        words = line.split()
        any_words = any_words or bool(words)
        yield words
    if not any_words:
        raise ValueError(f"{path} holds no words")


def onto(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors on a device: to a GPU from pinned memory, so that nobody waits for the copies."""
    if device.type != "cuda":
        return tuple(tensor.to(device) for tensor in tensors)
    return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)


class Batches:
    """A text as windows `[T, B]`, each row going on where it ended in the window before.

    Row b reads the b-th of `batch_size` equal parts of the text, so states can be carried from
    window to window. Every token is a target once; the input is the token before it.

    Args:
        tokens: `[N + 1]`, `<eos>` and the text, as a `Corpus` gives it.
        batch_size, bptt: B and T. The last window may be shorter.
        part: `(rank, world_size)`: only this process's share of the rows.
        keep_all: pad with ignored targets rather than leave out the rest of N / B tokens.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        bptt: int,
        *,
        part: tuple[int, int] = (0, 1),
        keep_all: bool = False,
    ):
        inputs, targets = tokens[:-1], tokens[1:]
        length = -(-len(targets) // batch_size) if keep_all else len(targets) // batch_size
        if length == 0:
            raise ValueError(
                f"a text of {len(targets)} tokens is too short for batch_size={batch_size}"
            )
        missing = batch_size * length - len(targets)
        if missing > 0:
            inputs = np.pad(inputs, (0, missing))
            targets = np.pad(targets, (0, missing), constant_values=IGNORE)
        rank, world = part
        rows = slice(batch_size * rank // world, batch_size * (rank + 1) // world)
        shape, used = (batch_size, length), batch_size * length
        self.inputs = inputs[:used].reshape(shape)[rows]  # [B, N / B]
        self.targets = targets[:used].reshape(shape)[rows]  # [B, N / B]
        self.bptt = bptt

    @property
    def rows(self) -> int:
        return self.inputs.shape[0]

    def __len__(self) -> int:
        return -(-self.inputs.shape[1] // self.bptt)

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a window, int64 `[T, B]`."""
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        time = slice(window * self.bptt, (window + 1) * self.bptt)

        def time_major(rows: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(rows[:, time].T, dtype=np.int64))

        return time_major(self.inputs), time_major(self.targets)
