"""Averaged weights: the mean of what every step left, kept, tested, and resumed bit by bit."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_text import TINY, exact_metrics, write_text

from fused_recoder.training import Callback, Config, Trainer, load_model

SETTINGS = TINY | {"epochs": 3, "average_after": 1, "signal": "nll", "step": "learned"}
NAMES = ("rnn.weight_hh_l0", "encoder.weight", "rnn.step.rho")


class Collect(Callback):
    """The weights after every step of the epochs that count."""

    def __init__(self, first_epoch):
        self.first_epoch, self.seen = first_epoch, []

    def on_step(self, trainer, row):
        if trainer.progress.epoch >= self.first_epoch:
            weights = dict(trainer.model.named_parameters())
            self.seen.append({name: weights[name].detach().clone() for name in NAMES})


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, row):
        if trainer.progress.step == self.step:
            trainer.stop("the test")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))


def test_the_mean_of_all_steps_is_validated_and_kept(text, tmp_path):
    collect = Collect(1)
    trainer = Trainer(Config.from_dict(SETTINGS), text, tmp_path / "run", callbacks=[collect])
    trainer.train()
    kept = dict(trainer.kept_model.named_parameters())
    for name in NAMES:
        mean = torch.stack([weights[name] for weights in collect.seen]).mean(0)
        torch.testing.assert_close(kept[name], mean, rtol=1e-4, atol=1e-6)
        assert not torch.equal(kept[name], dict(trainer.model.named_parameters())[name])
    history = trainer.progress.history
    assert trainer.evaluate("valid").perplexity == history[-1]["valid_perplexity"]
    best = load_file(tmp_path / "run" / "best.safetensors")
    if history[-1]["best"]:
        assert torch.equal(best["rnn.weight_hh_l0"], kept["rnn.weight_hh_l0"])
    assert load_model(tmp_path / "run").config.average_after == 1


@pytest.mark.parametrize("stop", [20, 50])  # before averaging begins, and in the midst of it
def test_a_run_that_was_stopped_ends_with_the_same_bits(text, tmp_path, stop):
    config = Config.from_dict(SETTINGS)
    Trainer(config, text, tmp_path / "whole").train()
    Trainer(config, text, tmp_path / "parts", callbacks=[StopAt(stop)]).train()
    Trainer.resume(tmp_path / "parts").train()
    assert exact_metrics(tmp_path / "parts") == exact_metrics(tmp_path / "whole")
    whole, parts = (load_file(tmp_path / n / "checkpoint.safetensors") for n in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    in_progress = load_model(tmp_path / "parts" / "checkpoint.safetensors").model
    averaged = whole["average.model.rnn.weight_hh_l0"]
    assert torch.equal(in_progress.rnn.weight_hh_l0, averaged)


def test_tied_weights_stay_tied(text, tmp_path):
    config = Config.from_dict(SETTINGS | {"tie_weights": True})
    trainer = Trainer(config, text, tmp_path / "run")
    trainer.train()
    assert trainer.kept_model.decoder.weight is trainer.kept_model.encoder.weight
    assert trainer.kept_model.rnn.decoder is trainer.kept_model.decoder


def test_averaging_begins_within_the_run():
    with pytest.raises(ValueError, match=r"average_after must be in \[0, epochs = 3\), got 3"):
        Config.from_dict(SETTINGS | {"average_after": 3})
