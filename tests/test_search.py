"""`fused-recoder search`: ranges, resuming, pruning."""

import json
import os
import signal

import numpy as np
import optuna
import pytest
from tiny_text import write_text

from fused_recoder.experiments import search
from fused_recoder.experiments.search import RANGES, SPACES, THESIS, Range, settings_of
from fused_recoder.training import Config, Trainer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), train=40, other=10)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def find(text, out, *more):
    from fused_recoder.cli import main

    arguments = ["search", str(text), "--out", str(out), "--epochs", "2", "--threads", "1"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, *map(str, more)])
    return end.value.code


@pytest.mark.parametrize("name", RANGES)
def test_values_stay_in_their_range(name):
    one = RANGES[name]
    ends = one.value(0.0), one.value(1.0)
    assert ends == pytest.approx((one.low, one.high))
    values = [one.value(q) for q in np.linspace(0, 1, 101)]
    assert values == sorted(values)
    assert all(isinstance(value, int) == one.integer for value in values)


def test_exponential_values_have_the_thesis_distribution():
    """Density proportional to exp(-x / beta), beta a quarter of the width, cut off at the top."""
    one, draws = THESIS["step"], np.random.default_rng(0).random(100_000)
    offsets = np.array([one.value(q) for q in draws]) - one.low
    beta = (one.high - one.low) / 4
    below = (offsets < beta).mean()
    assert below == pytest.approx((1 - np.exp(-1)) / (1 - np.exp(-4)), abs=0.005)
    assert Range(2, 4, integer=True).value(0.5) == 3


@pytest.mark.parametrize("signal", SPACES)
def test_drawn_settings_make_a_model(signal, text):
    from fused_recoder.training import build_model

    values = {name: RANGES[name].value(0.01) for name in SPACES[signal]}
    config = Config(hidden_size=4, **settings_of(signal, values))
    assert build_model(config, 9, dataset_size=10).rnn.signal.name == signal


def test_a_search_goes_on_where_it_was(text, tmp_path, capsys):
    assert find(text, tmp_path, "--signal", "nll", "--trials", 2, "--seed", 1) == 0
    assert find(text, tmp_path, "--signal", "nll", "--trials", 4, "--seed", 2) == 0
    printed = capsys.readouterr().out
    assert [f"trial {i}:" in printed for i in range(5)] == [True] * 4 + [False]
    rows = [json.loads(r) for r in (tmp_path / "nll-smoke-2.jsonl").read_text().splitlines()]
    assert len({row["nll_step"] for row in rows}) == 4
    best = min(row["valid_perplexity"] for row in rows)
    assert f"| {best:.2f} |" in (tmp_path / "nll-smoke-2.md").read_text()
    assert (tmp_path / "nll-smoke-2.png").stat().st_size > 5_000
    recipe = Config.recipe(tmp_path / "nll-smoke-2.toml")
    assert (recipe.signal, recipe.step) == (
        "nll", min(rows, key=lambda row: row["valid_perplexity"])["nll_step"],
    )  # fmt: skip


def test_the_test_text_is_not_read(text, tmp_path, monkeypatch):
    read = []
    evaluate = Trainer.evaluate
    monkeypatch.setattr(
        Trainer,
        "evaluate",
        lambda self, split, *more: read.append(split) or evaluate(self, split, *more),
    )
    assert find(text, tmp_path, "--trials", 1) == 0
    assert read == ["valid", "valid"]


def test_an_interrupted_trial_is_tried_again_and_resumes(text, tmp_path, monkeypatch, capsys):
    """Stopped after the first epoch; the same draw is finished later, from its checkpoint."""
    report = search.Reporting.on_epoch_end

    def interrupted(self, trainer, row):
        report(self, trainer, row)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(search.Reporting, "on_epoch_end", interrupted)
        assert find(text, tmp_path, "--trials", 1, "--seed", 1) == 130
    (log,) = (tmp_path / "trials").glob("*.log")
    assert "epoch 1/2 done" in log.read_text()
    assert find(text, tmp_path, "--trials", 1, "--seed", 9) == 0
    assert [p.name for p in (tmp_path / "trials").glob("*.log")] == [log.name]
    assert log.read_text().count("epoch 1/2 done") == 1
    assert log.read_text().count("epoch 2/2 done") == 1


def test_hopeless_trials_are_pruned(text, tmp_path):
    """After the first epoch, when five others were better by far."""
    study = search.open_study("s", f"sqlite:///{tmp_path / 's.db'}", 1, pruning=True)
    for _ in range(5):
        good = study.ask()
        for epoch in (1, 2, 3):
            good.report(1.0, epoch)
        study.tell(good, 1.0)
    trial = study.ask()
    with pytest.raises(optuna.TrialPruned):
        search.objective(trial, "nll", Config(hidden_size=4, epochs=3, lr=1.0), text, tmp_path)
    (log,) = (tmp_path / "trials").glob("*.log")
    assert "Stopped by the pruner" in log.read_text()


def test_mistakes_are_answered_in_a_sentence(text, tmp_path, capsys):
    assert find(text, tmp_path, "--trials", 0) == 1
    assert "--trials and --epochs must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense://me:secret@x", "nonsense"),
        ("nonsense", "Could not parse"),
        ("sqlite:////nowhere/at/all.db", "unable to open database file"),
        ("oracle+cx_oracle://x", "cx_oracle"),
        ("{a}", "a"),
    ],
)
def test_a_database_that_cannot_be_opened_is_named(text, tmp_path, capsys, url, reason):
    assert find(text, tmp_path, "--storage", url) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--storage" in line
    assert reason in line
    assert url.replace("secret", "***") in line
