"""The trainer on CUDA: steps from a graph, and a loop that does not wait. On the stand-in, whose
arithmetic is the CPU's: so what comes out is what comes out on the CPU, bit by bit."""

import math

import pytest
import torch
from cuda_stand_in import cuda_stand_in
from tiny_text import TINY, exact_metrics, write_text

pytest.importorskip("safetensors")

from safetensors.torch import load_file

from fused_recoder.training import Callback, Config, NonFiniteError, Trainer, run_folder
from fused_recoder.training.checkpoint import load_checkpoint

STEPS_PER_EPOCH = 36  # of the tiny text; the last is shorter


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_folder, "draw_curves", lambda *folders: None)  # takes most of the time


@pytest.fixture
def cuda():
    with cuda_stand_in() as stand_in:
        yield stand_in


def settings(**changes):
    defaults = {"device": "cuda", "log_every": 10, "epochs": 1, "lr": 0.5, "num_layers": 1}
    return Config.from_dict(TINY | defaults | changes)


class Watch(Callback):
    """What every step has waited for, and how many were replayed."""

    def __init__(self, cuda):
        self.cuda, self.waits, self.replayed = cuda, [], []

    def on_step(self, trainer, row):
        self.waits.append(list(self.cuda.waits))
        self.replayed.append(self.cuda.replays)
        self.cuda.waits.clear()
        self.cuda.replays = 0


VARIANTS = {
    "nll and dropout": {"dropout": 0.3, "loss": "sum", "lr": 0.0625},
    "learned step, momentum, two epochs": {"step": "learned", "momentum": 0.5, "epochs": 2},
    "MC Dropout, predicted step, adamw": {
        "signal": "mc_dropout", "step": "predicted", "optimizer": "adamw", "lr": 0.01,
        "schedule": "cosine",
    },
    "shared masks": {"signal": "mc_dropout", "signal_options": {"mask": "shared"}},
    "ensemble and its anchors": {"signal": "ensemble", "decoder_options": {"num_members": 3}},
    "variational": {"signal": "variational", "step": 0.01, "signal_options": {"num_samples": 3}},
    "plain": {"signal": None},
}  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_run_from_a_graph_is_the_run_on_the_cpu(text, tmp_path, changes):
    config = settings(**changes)
    on_cpu = Trainer(config.replace(device="cpu"), text, tmp_path / "cpu").train()
    with cuda_stand_in() as cuda:
        watch = Watch(cuda)
        trainer = Trainer(config, text, tmp_path / "cuda", callbacks=[watch])
        assert trainer.replays
        on_cuda = trainer.train()
    traced = [] if config.signal is None else [10, 20, 30, 40, 50, 60, 70]  # decode once more
    eager = {*traced, STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH}
    assert watch.replayed == [step + 1 not in eager for step in range(on_cuda["steps"])]
    assert exact_metrics(tmp_path / "cuda") == exact_metrics(tmp_path / "cpu")
    assert on_cuda["test_perplexity"] == on_cpu["test_perplexity"]
    for name in ("checkpoint.safetensors", "best.safetensors"):
        a, b = (load_file(tmp_path / run / name) for run in ("cuda", "cpu"))
        assert all(torch.equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("changes", [{}, {"signal": "entropy", "clip": None, "dropout": 0.2}])
def test_between_two_rows_nothing_is_waited_for(text, tmp_path, cuda, graph, changes):
    watch = Watch(cuda)
    config = settings(graph=graph, **changes)
    Trainer(config, text, tmp_path / "run", callbacks=[watch], test=False).train()
    # The first step is saved and captured before; the end of an epoch is looked at, too.
    assert [step for step, waits in enumerate(watch.waits, 1) if waits] == [
        1, 10, 20, 30, STEPS_PER_EPOCH,
    ]  # fmt: skip
    assert len(watch.waits[-1]) == 1  # all numbers at once; rows read the trace, too


def test_a_validation_waits_once(text, tmp_path, cuda):
    trainer = Trainer(settings(), text, tmp_path / "run")
    cuda.waits.clear()
    trainer.evaluate("valid")
    assert len(cuda.waits) == 1


def test_a_resumed_run_repeats_the_uninterrupted_one(text, tmp_path, cuda):
    class Stop(Callback):
        def on_step(self, trainer, row):
            if trainer.progress.step in (12, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1):
                trainer.stop()

    config = settings(epochs=2, dropout=0.3, step="learned", momentum=0.5)
    Trainer(config, text, tmp_path / "whole").train()
    Trainer(config, text, tmp_path / "parts", callbacks=[Stop()]).train()
    while not Trainer.resume(tmp_path / "parts", callbacks=[Stop()]).train()["finished"]:
        torch.manual_seed(99)
    assert exact_metrics(tmp_path / "parts") == exact_metrics(tmp_path / "whole")


class Poison(Callback):
    """Makes every gradient of the decoder's bias infinite from a step on, on the device."""

    def __init__(self, trainer, step):
        bias = trainer.model.decoder.bias
        self.step, self.factor = step, torch.ones((), device="cuda")
        bias.register_hook(lambda gradient: gradient * self.factor)
        self.before = None

    def on_step(self, trainer, row):
        if trainer.progress.step + 1 == self.step:
            self.factor.fill_(math.inf)
            self.before = [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("at", "checkpoint_seconds", "changes"),
    [
        (14, 1e9, {}), (20, 1e9, {}), (35, 1e9, {}), (14, 0, {}), (14, 1e9, {"graph": False}),
        (14, 1e9, {"optimizer": "adam", "lr": 0.01}), (14, 1e9, {"momentum": 0.5}),
    ],
    ids=str,
)  # fmt: skip
def test_a_gradient_that_is_not_finite_is_never_applied(
    text, tmp_path, cuda, at, checkpoint_seconds, changes
):
    """It is noticed when the next row is read, or before the next checkpoint is written."""
    config = settings(checkpoint_seconds=checkpoint_seconds, **changes)
    trainer = Trainer(config, text, tmp_path / "run", test=False)
    poison = Poison(trainer, at)
    trainer.callbacks.append(poison)
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    assert f"window {at} of 36 (step {at}, lr {config.lr:g}; " in str(error.value)
    assert "gradients that are not finite: decoder.bias)" in str(error.value)
    noticed = at if checkpoint_seconds == 0 else min(math.ceil(at / 10) * 10, STEPS_PER_EPOCH)
    assert trainer.progress.step in (noticed - 1, noticed)
    for p, before in zip(trainer.model.parameters(), poison.before, strict=True):
        assert torch.equal(p, before)
    saved = at - 1 if checkpoint_seconds == 0 else 0
    assert f"of step {saved}, is in" in str(error.value)
    tensors, about, _ = load_checkpoint(trainer.folder.checkpoint)
    assert about["progress"]["step"] == saved
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())
    with pytest.raises(NonFiniteError, match=f"step {at},"):  # and is not forgotten
        trainer.train()


def test_options_that_a_callback_changes_are_seen(text, tmp_path):
    class Schedule(Callback):
        def on_step(self, trainer, row):
            if trainer.progress.step == 15:
                trainer.model.rnn.probability = 0.5

    config = settings()
    Trainer(config.replace(device="cpu"), text, tmp_path / "cpu", callbacks=[Schedule()]).train()
    with cuda_stand_in() as cuda:
        watch = Watch(cuda)
        callbacks = [Schedule(), watch]
        Trainer(config, text, tmp_path / "cuda", callbacks=callbacks).train()
    assert watch.replayed[15] == 1
    assert exact_metrics(tmp_path / "cuda") == exact_metrics(tmp_path / "cpu")


@pytest.mark.parametrize("changes", [{"step": "lipschitz"}, {"graph": False}, {"device": "cpu"}],
                         ids=str)  # fmt: skip
def test_where_no_graph_can_or_shall_be_steps_are_eager(text, tmp_path, cuda, changes):
    trainer = Trainer(settings(**changes), text, tmp_path / "run")
    assert not trainer.replays
    trainer.train()
    assert cuda.replays == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_on_a_gpu_a_graph_trains_as_eager_steps_do(text, tmp_path):
    class NeverWaiting(Callback):
        def on_step(self, trainer, row):
            step = trainer.progress.step
            mode = "error" if 1 <= step % 10 < 9 and step < STEPS_PER_EPOCH - 1 else "default"
            torch.cuda.set_sync_debug_mode(mode)

    losses = {}
    for graph in (True, False):
        trainer = Trainer(
            settings(graph=graph, step="learned", momentum=0.5), text, tmp_path / str(graph),
            callbacks=[NeverWaiting()],
        )  # fmt: skip
        assert trainer.replays == graph
        trainer.train()
        losses[graph] = [row["loss"] for row in exact_metrics(trainer.folder.path)[:3]]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
