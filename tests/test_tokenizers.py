"""Words, characters and pieces of words: from text to ids and back, and what is said per word."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import TINY, write_text

from fused_recoder import cli
from fused_recoder.analysis.sentences import NATS_PER_BIT, read, tokenize
from fused_recoder.training import Config, Corpus, Trainer, evaluate, load_model
from fused_recoder.training import tokenizer as tokenizer_module
from fused_recoder.training.checkpoint import load_checkpoint, save_checkpoint
from fused_recoder.training.tokenizer import BytePairs, Characters

pytest.importorskip("tokenizers", reason="needs the package tokenizers")

KINDS = {"char": {"tokenizer": "char"}, "bpe": {"tokenizer": "bpe", "max_vocab": 262}}
LINES = "the café sat on the mat\n\n the dog , it 's  a dog <unk> sat <eos> there \n" * 20


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_RECODER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text(LINES)
    return folder


@pytest.fixture(scope="module")
def models(folder):
    path = folder / "train.txt"
    return {"char": Characters.from_text(path), "bpe": BytePairs.from_text(path, 300)}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), train=60)


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for kind, chosen in {"word": {}, **KINDS}.items():
        found[kind] = folder / kind
        Trainer(Config(**TINY | {"epochs": 1} | chosen), text, found[kind]).train()
    return found


# Text to ids and back


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(line=st.text())
@pytest.mark.filterwarnings("ignore")
def test_no_text_is_lost(models, kind, line):
    """But for white space, which stands between words as one space."""
    try:
        line.encode()
    except UnicodeEncodeError:  # half a surrogate pair is no text
        return
    words = line.split()
    ids = models[kind].encode(words)
    assert models[kind].decode(ids) == " ".join(words)
    assert models[kind].count_words(np.array(ids, dtype=np.int64)) == len(words)
    assert models[kind].eos not in ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", ["<eos>", "<0x41>", "Ġ", "▁", "\u00a0x", "日本", "\x00", "🙂"])
def test_nothing_in_a_text_has_a_meaning_of_its_own(models, kind, word):
    words = word.split()
    assert models[kind].decode(models[kind].encode(words)) == " ".join(words)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_come_back(folder, kind):
    corpus = Corpus(folder, **KINDS[kind])
    lines = [" ".join(line.split()) for line in LINES.splitlines()]
    assert corpus.vocabulary.decode(corpus["train"].tolist()).splitlines()[1:] == lines


def test_words_come_back(folder):
    vocabulary = Corpus(folder).vocabulary
    ids = vocabulary.encode(["the", "dog", "<eos>", "<eos>", "it", "'s", "zebra"])
    assert vocabulary.decode(ids) == "the dog\n\nit 's <unk>"


def test_what_the_tokens_are(models):
    assert models["char"].model.encode(["the", "ñu"], is_pretokenized=True).tokens == [
        " ", "t", "h", "e", " ", "<0xC3>", "<0xB1>", "u",
    ]  # fmt: skip
    assert models["bpe"].model.encode(["the", "them"], is_pretokenized=True).tokens == [
        "Ġthe", "Ġthe", "m",
    ]  # fmt: skip
    assert len(models["bpe"]) <= 300
    assert len(models["char"]) == 258 + len(set(LINES) - {" ", "\n"})


def test_characters_can_be_limited(folder):
    most = Characters.from_text(folder / "train.txt", 262)
    kept = [most.model.id_to_token(i) for i in range(258, len(most))]
    assert len(kept) == 4
    assert all(LINES.count(a) >= LINES.count(b) for a in kept for b in "cfé'")
    assert "é" not in Characters.from_text(folder / "train.txt", min_count=21).model.get_vocab()
    assert most.decode(most.encode(["café"])) == "café"


def test_training_it_twice_gives_the_same(folder, models):
    assert BytePairs.from_text(folder / "train.txt", 300) == models["bpe"]
    assert BytePairs.from_text(folder / "train.txt", 280) != models["bpe"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_survives_its_bytes(models, kind):
    again = type(models[kind]).from_bytes(models[kind].to_bytes())
    assert again == models[kind]
    assert again.encode(["the", "<eos>", "zebra"]) == models[kind].encode(["the", "<eos>", "zebra"])
    with pytest.raises(ValueError, match="not a tokenizer"):
        type(again).from_bytes(b"{}")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"tokenizer": "bpe"}, "max_vocab .* must be given for tokenizer='bpe'"),
        ({"tokenizer": "syllable"}, r"tokenizer must be one of \['word', 'char', 'bpe'\]"),
    ],
    ids=str,
)
def test_settings_are_checked(chosen, message):
    with pytest.raises(ValueError, match=message):
        Config(**chosen)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"tokenizer": "bpe"}, "needs max_vocab"),
        ({"tokenizer": "bpe", "max_vocab": 256}, "max_vocab must be at least 257"),
        ({"tokenizer": "char", "max_vocab": 257}, "max_vocab must be at least 258"),
        ({"tokenizer": "x"}, "tokenizer must be one of"),
    ],
    ids=str,
)
def test_a_corpus_checks_them_too(folder, chosen, message):
    with pytest.raises(ValueError, match=message):
        Corpus(folder, **chosen)


def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        Characters.from_text(folder / "train.txt")


# Training and evaluation


def test_a_word_counts_as_one_whatever_it_is_made_of(text, runs):
    words = {split: len(Corpus(text)[split]) - 1 for split in ("train", "valid", "test")}
    for run in runs.values():
        corpus = Corpus(text, vocabulary=load_model(run).vocabulary)
        assert {split: corpus.count_words(split) for split in words} == words


@pytest.mark.parametrize("kind", ["word", *KINDS])
def test_perplexity_per_word_is_that_of_all_its_tokens(text, runs, kind):
    loaded = load_model(runs[kind])
    corpus = Corpus(text, vocabulary=loaded.vocabulary)
    tokens = torch.from_numpy(corpus["test"].astype(np.int64)).unsqueeze(1)
    with torch.no_grad():
        total = loaded.model.eval()(tokens[:-1], tokens[1:]).nll.double().sum().item()
    per_word = math.exp(total / (len(Corpus(text)["test"]) - 1))
    result = evaluate(loaded.model, corpus["test"], words=corpus.count_words("test"), batch_size=1)
    assert result.perplexity_per_word == pytest.approx(per_word, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(total / (len(tokens) - 1)), rel=1e-5)
    assert result.bits_per_word == pytest.approx(math.log2(per_word), rel=1e-5)
    if kind == "word":
        assert result.perplexity_per_word == result.perplexity


def test_a_run_says_both(text, runs, tmp_path, capsys):
    summary = json.loads((runs["bpe"] / "summary.json").read_text())
    (epoch,) = summary["history"]
    for split, row in (("valid", epoch), ("test", summary), ("train", epoch)):
        assert row[f"{split}_perplexity"] < row[f"{split}_perplexity_per_word"]
    assert summary["valid_perplexity_per_word"] == epoch["valid_perplexity_per_word"]
    for name in ("word", "bpe"):
        with pytest.raises(SystemExit):
            cli.main(["eval", str(runs[name]), "--json", str(tmp_path / "result.json")])
        result = json.loads((tmp_path / "result.json").read_text())
        summary = json.loads((runs[name] / "summary.json").read_text())
        assert result["perplexity_per_word"] == summary["test_perplexity_per_word"]
        assert f"{result['perplexity_per_word']:.2f}" in capsys.readouterr().out


def test_the_command_line_has_both_names_of_the_size(text, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    for name, size in (("--vocab-size", 261), ("--max-vocab", 263)):
        out = tmp_path / name
        with pytest.raises(SystemExit) as end:
            cli.main(
                ["train", str(text), "--out", str(out), *flags, "--epochs=1", "--threads=1",
                 "--tokenizer=bpe", f"{name}={size}"]
            )  # fmt: skip
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert f"{size} pieces of words" in said
        assert "per word" in said
        assert len(load_model(out).vocabulary) == size


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_is_all_one_needs(runs, kind, tmp_path):
    shutil.copy(runs[kind] / "best.safetensors", tmp_path / "model.safetensors")
    alone, run = load_model(tmp_path / "model.safetensors"), load_model(runs[kind])
    assert alone.vocabulary == run.vocabulary
    assert alone.vocabulary.decode(alone.vocabulary.encode(["w1", "new"])) == "w1 new"


def test_checkpoints_of_before_are_of_words(runs, tmp_path):
    """Their settings say nothing of a tokenizer, and their vocabulary is one word per line."""
    out = shutil.copytree(runs["word"], tmp_path / "run")
    for name in ("best", "checkpoint"):
        tensors, about, vocabulary = load_checkpoint(out / f"{name}.safetensors")
        del about["config"]["tokenizer"]
        assert vocabulary.to_bytes().decode() == "\n".join(vocabulary.words) + "\n"
        save_checkpoint(out / f"{name}.safetensors", tensors, about, vocabulary)
    assert load_model(out).vocabulary == load_model(runs["word"]).vocabulary
    assert Trainer.resume(out, epochs=2).train()["epochs"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_with_its_own_tokenizer(runs, text, kind, tmp_path, monkeypatch):
    out = shutil.copytree(runs[kind], tmp_path / "run")
    before = load_model(out).vocabulary
    monkeypatch.setattr(
        tokenizer_module.TOKENIZERS[kind], "from_text", lambda *_: pytest.fail("made anew")
    )
    trainer = Trainer.resume(out, epochs=2)
    assert trainer.corpus.vocabulary == before
    assert trainer.train()["epochs"] == 2


def test_resuming_refuses_another_text_or_tokenizer(runs, text, tmp_path, monkeypatch):
    out = runs["bpe"]
    for changes, name in (({"tokenizer": "char"}, "tokenizer"), ({"max_vocab": 310}, "max_vocab")):
        with pytest.raises(ValueError, match=rf"cannot change .*'{name}'"):
            Trainer.resume(out, **changes)
    other = shutil.copytree(text, tmp_path / "other")
    (other / "train.txt").write_text("w1 w2 w3\n" * 100)
    with pytest.raises(ValueError, match="is not the text that"):
        Trainer.resume(out, other)
    # A release of the package that reads the same file in another way.
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))
    encode = BytePairs.encode
    monkeypatch.setattr(BytePairs, "encode", lambda self, words: encode(self, words)[:-1])
    with pytest.raises(ValueError, match=r"the text makes \d+ tokens, and made \d+ when"):
        Trainer.resume(out)


# Sentences word by word, and text


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_a_word_are_summed(runs, kind):
    loaded = load_model(runs[kind])
    sentences = [tokenize(text, loaded.vocabulary) for text in ("w1 Zebra. w17", "w3")]
    readings = read(loaded.model, loaded.vocabulary, sentences)
    lm = loaded.model.double()
    for sentence, reading in zip(sentences, readings, strict=True):
        ids = [i for token in sentence for i in token.ids]
        tokens = torch.tensor([loaded.vocabulary.eos, *ids]).unsqueeze(1)
        out = lm(tokens[:-1], tokens[1:], return_trace=True)
        start = 0
        for w, token in enumerate(sentence):
            pieces = slice(start, start := start + len(token.ids))
            assert reading.surprisal[w] == pytest.approx(
                out.nll[pieces, 0].sum().item() / NATS_PER_BIT, rel=1e-10
            )
            assert reading.delta[w] == pytest.approx(out.trace.delta[pieces, 0].sum().item())
            assert reading.steps["h0"][w] == pytest.approx(0.1)
        assert not any(token.unknown for token in sentence)
    assert [token.text for token in sentences[0]] == ["w1", "Zebra.", "w17"]
    assert len(readings[0].surprisal) == 3


def test_a_word_is_recoded_with_all_its_pieces(runs):
    loaded = load_model(runs["char"])
    words = [tokenize("w1 w3 w5 w7", loaded.vocabulary)]
    nowhere, second = (
        read(loaded.model, loaded.vocabulary, words, recode=where)[0] for where in ("none", (2,))
    )
    assert second.recoded == [False, True, False, False]
    assert second.surprisal[0] == pytest.approx(nowhere.surprisal[0], rel=1e-12)
    assert all(a != b for a, b in zip(second.surprisal[1:], nowhere.surprisal[1:], strict=True))


@pytest.mark.parametrize("kind", ["word", *KINDS])
def test_text_is_generated(runs, kind, capsys):
    def generate(*flags):
        with pytest.raises(SystemExit) as end:
            cli.main(["generate", str(runs[kind]), *flags, "--threads=1"])
        said = capsys.readouterr()
        assert end.value.code == 0, said.err
        return said.out

    flags = ["--prompt=w1 w3", "--length=30", "--top-k=20", "--top-p=0.95", "--temperature=0.9"]
    first = generate(*flags)
    assert first.startswith("w1 w3")
    assert first == generate(*flags) != generate(*flags, "--seed=2")
    three = generate(*flags, "--batch=3").split(f"\n{'-' * 20}\n")
    assert len({text.strip() for text in three}) == 3
    assert three[0].strip() == first.strip()
    assert len(generate(*flags, "--one-line").strip().splitlines()) == 1
    plain = generate(*flags, "--signal=none", "--temperature=0")
    assert plain == generate(*flags, "--signal=none", "--temperature=0", "--seed=3")


def test_bad_calls_of_generate_are_named(runs, tmp_path, capsys):
    torch.save(load_model(runs["word"], signal=None).model.state_dict(), tmp_path / "plain.pt")
    for arguments, message in (
        ([tmp_path / "plain.pt"], "has no vocabulary: it must be of fused-recoder train"),
        ([runs["word"], "--batch=0"], "batch must be at least 1, got 0"),
        ([runs["word"], "--top-p=2"], "top_p must be in (0, 1], got 2.0"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["generate", *map(str, arguments), "--threads=1"])
        assert end.value.code == 1
        assert message in capsys.readouterr().err
