"""From words to token ids and back: a token is a word, a character, or a piece of a word.

A tokenizer reads the words of a line (what stands between white space) one by one, so every token
belongs to one word, or is the `<eos>` that ends a line and counts as a word of its own.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .files import errors_naming, read_lines

EOS, UNK = "<eos>", "<unk>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class Tokenizer(ABC):
    """What the rest of the package knows of words, characters and pieces of words."""

    unit: str  # what its tokens are called
    eos: int  # the id of <eos>
    unknown: int | None  # that of <unk>, if it has one

    @classmethod
    @abstractmethod
    def from_text(cls, path: Path, max_size: int | None = None, min_count: int = 1) -> Tokenizer:
        """That of a text, with at most `max_size` tokens."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, content: bytes) -> Tokenizer:
        """What `to_bytes` gave."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """All there is to it, as UTF-8 text."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, word: str) -> bool:
        """Whether a word can be told from all others."""

    @abstractmethod
    def encode(self, words: Sequence[str]) -> list[int]:
        """The ids of words, one after the other."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text: words with a space between them, lines where `<eos>` ends one."""

    @property
    @abstractmethod
    def begins_word(self) -> np.ndarray:
        """bool `[V]`: which tokens are the first of a word."""

    def count_words(self, ids: np.ndarray) -> int:
        """How many words tokens `[N]` are, each `<eos>` one of them."""
        return int(np.count_nonzero(self.begins_word[ids]))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.to_bytes() == self.to_bytes()


class Vocabulary(Tokenizer):
    """Words and their ids, in the order of their first appearance in the training text.

    That is the order the usual PyTorch word language models have, so their weights fit.
    """

    unit = "words"

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            twice = next(w for w, n in Counter(self.words).items() if n > 1)
            raise ValueError(f"vocabulary holds {twice!r} more than once")
        if EOS not in self.ids:
            raise ValueError(f"vocabulary of {len(self)} words has no {EOS}, which ends every line")
        self.eos, self.unknown = self.ids[EOS], self.ids.get(UNK)

    @classmethod
    def from_text(cls, path: Path, max_size: int | None = None, min_count: int = 1) -> Vocabulary:
        """All words of a text, or its `max_size` most frequent ones, or those that occur
        `min_count` times; `<eos>` and `<unk>` are among them in any case."""
        if max_size is not None and max_size < 2:
            raise ValueError(f"max_vocab must be at least 2 ({EOS} and {UNK}), got {max_size}")
        counts = Counter()
        for words in word_lines(path):
            counts.update(words)
            counts[EOS] += 1
        counts.setdefault(UNK, 0)
        return cls(_frequent(counts, max_size, min_count, always=(EOS, UNK)))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """A file with one word per line, in the order of the ids."""
        words = list(read_lines(path))
        with errors_naming(path):
            return cls(words)

    @classmethod
    def from_bytes(cls, content: bytes) -> Vocabulary:
        return cls(content.decode().removesuffix("\n").split("\n"))

    def to_bytes(self) -> bytes:
        return ("\n".join(self.words) + "\n").encode()

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self.ids

    def encode(self, words: Sequence[str]) -> list[int]:
        """Ids of words; that of `<unk>` for unknown ones."""
        found = [self.ids.get(word, self.unknown) for word in words]
        if None in found:
            word = words[found.index(None)]
            raise ValueError(f"{word!r} is not in the vocabulary, and the vocabulary has no {UNK}")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        text = "".join("\n" if i == self.eos else f" {self.words[i]}" for i in ids)
        return text.replace("\n ", "\n").removeprefix(" ")

    @property
    def begins_word(self) -> np.ndarray:
        return np.ones(len(self), dtype=bool)


class Subwords(Tokenizer):
    """A tokenizer of the package `tokenizers`. It knows every text and loses nothing of it.

    Each word is written with a space before it, and tokens are parts of that; so the token that a
    word begins with shows it, and text is put together again by writing tokens one after the other.
    """

    def __init__(self, model: Any):
        self.model = model  # a tokenizers.Tokenizer
        self.model.encode_special_tokens = True  # "<eos>" in a text is text
        self.eos, self.unknown = model.token_to_id(EOS), None
        self._encoded: dict[str, list[int]] = {}  # words that were met

    @classmethod
    def from_bytes(cls, content: bytes) -> Subwords:
        try:
            return cls(_package().Tokenizer.from_str(content.decode()))
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"not a tokenizer: {error}") from error

    def to_bytes(self) -> bytes:
        return self.model.to_str().encode()

    def __len__(self) -> int:
        return self.model.get_vocab_size()

    def __contains__(self, word: str) -> bool:
        return True

    def encode(self, words: Sequence[str]) -> list[int]:
        found: list[int] = []
        for word in words:
            ids = self._encoded.get(word)
            if ids is None:
                ids = self._encoded[word] = self.model.encode([word], is_pretokenized=True).ids
            found += ids
        return found

    def decode(self, ids: Sequence[int]) -> str:
        lines: list[list[int]] = [[]]
        for i in ids:
            lines.append([]) if i == self.eos else lines[-1].append(i)
        return "\n".join(self.model.decode(line).removeprefix(" ") for line in lines)

    @functools.cached_property
    def begins_word(self) -> np.ndarray:
        space = self.model.encode(["."], is_pretokenized=True).tokens[0][0]  # how it is written
        tokens = [self.model.id_to_token(i) for i in range(len(self))]
        return np.array([token == EOS or token.startswith(space) for token in tokens])


class Characters(Subwords):
    """The characters of the training text, and the bytes that all others consist of."""

    unit = "characters and bytes"

    @classmethod
    def from_text(cls, path: Path, max_size: int | None = None, min_count: int = 1) -> Characters:
        """All characters of a text, or its most frequent ones, or those that occur `min_count`
        times; `<eos>`, space and 256 bytes are among its `max_size` tokens in any case."""
        package, always = _package(), (EOS, *BYTES, " ")
        _check_size(max_size, len(always))
        counts = Counter(dict.fromkeys(always, 0))
        for words in word_lines(path):
            for word in words:
                counts.update(word)
        vocabulary = _frequent(counts, max_size, min_count, always)
        ids = {token: i for i, token in enumerate(vocabulary)}
        model = package.Tokenizer(package.models.BPE(vocab=ids, merges=[], byte_fallback=True))
        model.normalizer = _with_a_space_before()
        decoders = package.decoders
        model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        model.add_special_tokens([EOS])
        return cls(model)


class BytePairs(Subwords):
    """Pieces of words: pairs of bytes, merged by frequency (Sennrich et al. 2016)."""

    unit = "pieces of words"

    @classmethod
    def from_text(cls, path: Path, max_size: int | None = None, min_count: int = 1) -> BytePairs:
        """`<eos>`, 256 bytes, and as many merged pairs that occur `min_count` times as there are
        until there are `max_size` tokens."""
        package = _package()
        pre = package.pre_tokenizers
        if max_size is None:
            raise ValueError("tokenizer='bpe' needs max_vocab (--vocab-size): how many pieces")
        _check_size(max_size, 1 + len(BYTES))
        model = package.Tokenizer(package.models.BPE())
        model.normalizer = _with_a_space_before()
        model.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        model.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=max_size, min_frequency=min_count, special_tokens=[EOS],
            initial_alphabet=pre.ByteLevel.alphabet(),
        )  # fmt: skip
        model.train_from_iterator((" ".join(words) for words in word_lines(path)), trainer)
        return cls(model)


TOKENIZERS: dict[str, type[Tokenizer]] = {
    "word": Vocabulary,
    "char": Characters,
    "bpe": BytePairs,
}


def word_lines(path: Path) -> Iterator[list[str]]:
    """The words of every line; blank lines are lines too."""
    any_words = False
    for line in read_lines(path):
        words = line.split()
        any_words = any_words or bool(words)
        yield words
    if not any_words:
        raise ValueError(f"{path} holds no words")


def _frequent(
    counts: Counter, max_size: int | None, min_count: int, always: Iterable[str]
) -> list[str]:
    """What was counted often enough, the `max_size` most frequent, in the order of `counts`."""
    always = set(always)
    kept = [token for token, n in counts.items() if n >= min_count or token in always]
    if max_size is None or len(kept) <= max_size:
        return kept
    # Stable: of equally frequent ones those that come first in the text.
    by_rank = sorted(kept, key=lambda token: (token not in always, -counts[token]))
    chosen = set(by_rank[:max_size])
    return [token for token in kept if token in chosen]


def _check_size(max_size: int | None, least: int) -> None:
    if max_size is not None and max_size < least:
        raise ValueError(
            f"max_vocab must be at least {least} ({EOS} and all bytes are among them), "
            f"got {max_size}"
        )


def _with_a_space_before():
    """White space becomes one space, before every word."""
    package = _package()
    parts = package.normalizers
    any_space = package.Regex(r"\s+")
    return parts.Sequence([parts.Replace(any_space, " "), parts.Strip(), parts.Prepend(" ")])


def _package():
    """Not needed for words."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "characters and pieces of words need a package: pip install tokenizers"
        ) from error
    return tokenizers
