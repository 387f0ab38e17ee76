"""`make demo` from its first line to its pictures, on a small text."""

import importlib.util
from pathlib import Path

import pytest
from tiny_text import write_text

FILE = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("demo", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain = module.PLAIN.replace(hidden_size=8, batch_size=3, bptt=6, lr=1.0, epochs=1)
    recoding = plain.replace(signal="nll", step=1.0, states="c")
    monkeypatch.setattr(module, "PLAIN", plain)
    monkeypatch.setattr(module, "RECODING", recoding)
    monkeypatch.setattr(module, "NAMES", {"plain": plain, "recoding": recoding})
    monkeypatch.setattr(module, "GARDEN_PATH", "w1 w3 w8")
    monkeypatch.setattr(module, "sample_corpus", lambda since: write_text(tmp_path / "text"))
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return module


def test_the_demo_begins_with_what_convinces(demo, tmp_path, capsys):
    demo.main()
    said = capsys.readouterr().out
    order = ["float64", "loss", "tokens/s", "test perplexity", "garden_path.png"]
    places = [said.index(word) for word in order]
    assert places == sorted(places)
    for name in ("curves.png", "garden_path.png"):
        assert (tmp_path / "runs" / "demo" / name).read_bytes().startswith(b"\x89PNG")


def test_closed_form_and_autograd_agree(demo, tmp_path):
    corpus = demo.Corpus(write_text(tmp_path / "text"))
    tokens, targets = demo.Batches(corpus["train"], 3, 6)[0]
    loss, norm, distance = demo.compare_step(len(corpus.vocabulary), tokens, targets)
    for row in (loss, norm):
        assert len(row["fused"].split(".")[1]) == 12
        assert float(row["fused"]) == pytest.approx(float(row["autograd"]), abs=2e-12)
        assert float(row["fused"]) > 0.01
    assert float(distance["fused"]) < 1e-14
