"""Callbacks: what they are told, and that they can end a run."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_text import TINY, exact_metrics, write_text

from fused_recoder.training import Callback, Config, Trainer
from fused_recoder.training.checkpoint import load_checkpoint
from fused_recoder.training.curves import read_metrics

STEPS_PER_EPOCH = 36  # of the tiny text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def train(text, tmp_path):
    def run(name, *callbacks, test=True, **changes):
        config = Config.from_dict(TINY | changes)
        return Trainer(config, text, tmp_path / name, callbacks=callbacks, test=test).train()

    return run


class Listener(Callback):
    def __init__(self):
        self.heard = []

    def on_step(self, trainer, row):
        self.heard.append(("step", trainer.progress.step, row))

    def on_epoch_end(self, trainer, row):
        _, about, _ = load_checkpoint(trainer.folder.checkpoint)
        self.heard.append(("epoch", about["progress"]["epoch"], row))

    def on_end(self, trainer, summary):
        assert (trainer.folder.path / "summary.json").exists() == summary["finished"]
        self.heard.append(("end", trainer.progress.step, summary))


class StopAt(Callback):
    """Asks to stop after a step, or after an epoch."""

    def __init__(self, *, step=None, epoch=None):
        self.step, self.epoch = step, epoch

    def on_step(self, trainer, row):
        if trainer.progress.step == self.step:
            trainer.stop("a test")

    def on_epoch_end(self, trainer, row):
        if row["epoch"] == self.epoch:
            trainer.stop("a test")


def test_a_callback_that_overrides_nothing_changes_nothing(train, tmp_path):
    train("alone")
    assert train("with", Callback(), Callback())["finished"]
    assert exact_metrics(tmp_path / "with") == exact_metrics(tmp_path / "alone")


def test_callbacks_hear_of_steps_epochs_and_the_end(train, tmp_path):
    listener = Listener()
    summary = train("run", listener, log_every=30)
    kinds = [kind for kind, _, _ in listener.heard]
    epoch = ["step"] * STEPS_PER_EPOCH + ["epoch"]
    assert kinds == epoch * 2 + ["end"]
    steps = [(number, row) for kind, number, row in listener.heard if kind == "step"]
    assert [number for number, _ in steps] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    written = read_metrics(tmp_path / "run")
    for kind, told in (
        ("train", [row | {"step": number} for number, row in steps if row is not None]),
        ("epoch", [row for kind, _, row in listener.heard if kind == "epoch"]),
    ):
        assert len(told) == 2
        for row, on_disk in zip(told, written[kind], strict=True):
            assert row.items() <= on_disk.items()
    # The checkpoint that is there when an epoch is told of is that of its end.
    assert [number for kind, number, _ in listener.heard if kind == "epoch"] == [1, 2]
    assert listener.heard[-1][2] is summary


@pytest.mark.parametrize(
    ("when", "steps"),
    [({"step": 1}, 1), ({"step": 50}, 50), ({"epoch": 1}, 36), ({"epoch": 2}, 72)],
    ids=str,
)
def test_a_run_that_a_callback_stops_goes_on_bit_by_bit(train, tmp_path, capsys, when, steps):
    whole = train("whole", dropout=0.3)
    listener = Listener()
    stopped = train("parts", StopAt(**when), listener, dropout=0.3)
    assert stopped == {"finished": False, "steps": steps, "stopped_by": "a test"}
    assert listener.heard[-1] == ("end", steps, stopped)
    assert "Stopped by a test" in capsys.readouterr().out
    torch.manual_seed(99)
    resumed = Trainer.resume(tmp_path / "parts", callbacks=[listener]).train()
    assert listener.heard[-1][2] is resumed
    assert resumed["test_perplexity"] == whole["test_perplexity"]
    assert exact_metrics(tmp_path / "parts") == exact_metrics(tmp_path / "whole")
    for name in ("checkpoint.safetensors", "best.safetensors"):
        a, b = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_what_a_callback_raises_spares_the_checkpoint(train, tmp_path):
    class Clumsy(Callback):
        def on_step(self, trainer, row):
            if trainer.progress.step == 40:
                raise LookupError("oops")

    with pytest.raises(LookupError, match="oops"):
        train("run", Clumsy())
    train("whole")
    assert Trainer.resume(tmp_path / "run").progress.epoch == 1
    Trainer.resume(tmp_path / "run").train()
    assert exact_metrics(tmp_path / "run") == exact_metrics(tmp_path / "whole")


def test_the_test_text_can_be_left_alone(train, tmp_path, monkeypatch, capsys):
    read, evaluate = [], Trainer.evaluate
    monkeypatch.setattr(
        Trainer,
        "evaluate",
        lambda self, split, *more: read.append(split) or evaluate(self, split, *more),
    )
    summary = train("run", test=False)
    assert summary["finished"]
    assert not [name for name in summary if name.startswith("test")]
    assert read == ["valid", "valid"]
    assert "test perplexity" not in capsys.readouterr().out
    assert read_metrics(tmp_path / "run")["test"] == []
    # It can be read later.
    assert Trainer.resume(tmp_path / "run").train()["test_perplexity"] > 1
