"""The trainer: what it learns, what it keeps, and that it goes on exactly where it was."""

import dataclasses
import json
import math
import os
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file
from tiny_text import TINY, exact_metrics, write_text
from torch import nn

import fused_recoder as fr
from fused_recoder.training import (
    Batches,
    Config,
    Corpus,
    NonFiniteError,
    Processes,
    Trainer,
    build_model,
    evaluate,
    load_model,
    run_folder,
)
from fused_recoder.training.checkpoint import load_checkpoint
from fused_recoder.training.curves import read_metrics
from fused_recoder.training.files import only_process_in
from fused_recoder.training.model import build_optimizer
from fused_recoder.training.schedule import Schedule


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    if request.function is not test_a_summary_and_a_picture_are_left:  # they take most of the time
        monkeypatch.setattr(run_folder, "draw_curves", lambda *folders: None)


def tiny(**changes):
    return Config.from_dict(TINY | changes)


def optimised(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# Learning


def test_it_learns_what_there_is_to_learn(text, tmp_path):
    config = tiny(epochs=10, optimizer="adam", lr=0.02, hidden_size=20, log_every=36)
    summary = Trainer(config, text, tmp_path / "run").train()
    # Of 22 words three may follow another, or the line may end.
    assert summary["finished"]
    assert summary["test_perplexity"] < 7
    best = load_model(tmp_path / "run")
    corpus = Corpus(text, vocabulary=best.vocabulary)
    result = evaluate(best.model, corpus["test"], batch_size=3, bptt=7)
    assert result.perplexity == summary["test_perplexity"]


ALL_SIGNALS = ["nll", "surprisal", "entropy", "mc_dropout", "ensemble", "variational"]
ALL_STEPS = ["learned", "predicted", "lipschitz", "backtracking"]


@pytest.mark.parametrize("name", [None, *ALL_SIGNALS])
def test_every_signal_trains(text, tmp_path, name):
    if name is not None and name not in fr.signals.NAMES:
        pytest.skip(f"this version has no signal {name}")
    trainer = Trainer(tiny(signal=name, step=0.01, epochs=1), text, tmp_path / "run")
    before = optimised(trainer.model)
    trainer.train()
    assert all(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    rows = read_metrics(tmp_path / "run")["train"]
    assert rows[-1]["perplexity"] < rows[0]["perplexity"]
    assert ("delta" in rows[0]) == (name is not None)


@pytest.mark.parametrize("name", ALL_STEPS)
def test_every_step_trains(text, tmp_path, name):
    if name not in fr.steps.NAMES:
        pytest.skip(f"this version has no step {name}")
    Trainer(tiny(step=name, epochs=1), text, tmp_path / "run").train()
    rows = read_metrics(tmp_path / "run")["train"]
    assert rows[-1]["perplexity"] < rows[0]["perplexity"]
    assert all(rows[-1][f"step_size/{state}"] > 0 for state in ("h0", "c0", "h1", "c1"))


def test_states_are_carried_detached_and_recoded(text, tmp_path):
    trainer = Trainer(tiny(), text, tmp_path / "run")
    trainer.step()
    hx = trainer.hx
    assert all(not state.requires_grad for state in hx)
    seen = []
    trainer.model.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    trainer.step()
    assert seen[0] is hx


def test_learned_steps_do_not_decay(text):
    config = tiny(step="learned", weight_decay=0.1, optimizer="adamw")
    model = build_model(config, 21)
    groups = build_optimizer(model, config).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert groups[1]["params"] == [model.rnn.step.rho]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_a_decoder_with_anchors_adds_their_loss(text, tmp_path):
    trainer = Trainer(tiny(clip=None, signal=None), text, tmp_path / "run")
    decoder = trainer.model.decoder
    loss, out = trainer.objective(*trainer.batches[0])
    assert loss is out.loss
    decoder.anchor_loss = lambda: 3 * decoder.bias.sum()
    anchored, out = trainer.objective(*trainer.batches[0])
    assert torch.equal(anchored, out.loss + 3 * decoder.bias.sum())
    gradients = [torch.autograd.grad(x, decoder.bias)[0] for x in (loss, anchored)]
    torch.testing.assert_close(gradients[1] - gradients[0], torch.full((22,), 3.0))


def test_the_sum_over_time_is_the_mean_times_its_length(text, tmp_path):
    norms = {}
    for kind in ("mean", "sum"):
        trainer = Trainer(tiny(loss=kind, clip=None), text, tmp_path / kind)
        norms[kind] = trainer.step()["gradient_norm"]
    assert norms["sum"] == pytest.approx(7 * norms["mean"], rel=1e-5)


def test_clipping_limits_the_update(text, tmp_path):
    trainer = Trainer(tiny(clip=1e-3, lr=1.0), text, tmp_path / "run")
    before = optimised(trainer.model)
    trainer.step()
    change = torch.cat([(before[n] - p).flatten() for n, p in trainer.model.named_parameters()])
    assert change.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_uniform_initialisation_covers_all_weights():
    model = build_model(tiny(init_bound=0.05, hidden_size=50), 200)
    for name, p in model.named_parameters():
        assert 0.045 < p.abs().max() <= 0.05, name


# Learning rates


def rates(config, improvements, steps=10):
    schedule, found = Schedule(config, steps), []
    for epoch, improved in enumerate(improvements, 1):
        found.append(schedule.lr(steps * epoch - 1))
        schedule.end_epoch(epoch, improved)
    return found


def test_plateau_halves_after_an_epoch_without_improvement():
    config = tiny(schedule="plateau", lr=20.0)
    assert rates(config, [True, False, True, False, True]) == [20, 20, 10, 10, 5]


def test_zaremba_halves_after_the_fourth_epoch():
    config = Config.recipe("zaremba-small")
    assert rates(config, [True] * 13) == [1.0] * 4 + [0.5**i for i in range(1, 10)]


def test_cosine_ends_at_zero():
    schedule = Schedule(tiny(schedule="cosine", lr=2.0, epochs=4), 10)
    assert schedule.lr(0) == 2.0
    assert schedule.lr(20) == pytest.approx(1.0)
    assert schedule.lr(40) == pytest.approx(0.0)


# Going on


def stop_after(trainer, steps, monkeypatch):
    """A signal arrives in the middle of that step."""
    step = trainer.step

    def and_signal():
        if trainer.progress.step + 1 == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    monkeypatch.setattr(trainer, "step", and_signal)


STEPS_PER_EPOCH = 36  # of the tiny text
VARIANTS = {
    "nll and dropout": {"signal": "nll", "dropout": 0.3},
    "learned step, momentum": {"step": "learned", "momentum": 0.9, "lr": 0.2},
    "entropy, adamw, cosine, tied": {
        "signal": "entropy", "optimizer": "adamw", "schedule": "cosine", "lr": 0.01,
        "tie_weights": True, "weight_decay": 0.01,
    },
    "plain, rows of seven steps": {"signal": None, "dropout": 0.3, "log_every": 7},
    "MC Dropout, predicted step": {"signal": "mc_dropout", "step": "predicted"},
    "ensemble": {"signal": "ensemble", "step": 0.01, "decoder_options": {"num_members": 3}},
    "variational": {"signal": "variational", "step": 0.01, "signal_options": {"num_samples": 3}},
}  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("stops", [[12], [STEPS_PER_EPOCH], [1, 37, 38]], ids=str)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(
    text, tmp_path, monkeypatch, changes, stops
):
    config = tiny(**changes)
    whole = Trainer(config, text, tmp_path / "whole")
    assert len(whole.batches) == STEPS_PER_EPOCH
    summary = whole.train()

    trainer = Trainer(config, text, tmp_path / "parts")
    for stop in stops:
        stop_after(trainer, stop, monkeypatch)
        result = trainer.train()
        assert result == {"finished": False, "steps": stop, "stopped_by": "SIGTERM"}
        assert trainer.stopped_by == signal.SIGTERM
        torch.manual_seed(99)  # whatever the process did in between
        trainer = Trainer.resume(tmp_path / "parts")
    resumed = trainer.train()

    assert exact_metrics(tmp_path / "parts") == exact_metrics(tmp_path / "whole")
    assert resumed["test_perplexity"] == summary["test_perplexity"]
    for name in ("checkpoint.safetensors", "best.safetensors"):
        a, b = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_signal_during_validation_repeats_the_validation(text, tmp_path, monkeypatch):
    Trainer(tiny(), text, tmp_path / "whole").train()
    trainer = Trainer(tiny(), text, tmp_path / "run")
    evaluate_split = trainer.evaluate

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate_split(*arguments)

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    assert not trainer.train()["finished"]
    assert trainer.progress.step == STEPS_PER_EPOCH
    assert not (tmp_path / "run" / "best.safetensors").exists()
    Trainer.resume(tmp_path / "run").train()
    assert exact_metrics(tmp_path / "run") == exact_metrics(tmp_path / "whole")


def test_signals_say_how_to_go_on_and_handlers_are_put_back(text, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trainer = Trainer(tiny(), text, tmp_path / "run")
    stop_after(trainer, 3, monkeypatch)
    trainer.train()
    assert f"train --out {tmp_path / 'run'} --resume" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_epochs_can_be_added_to_a_finished_run(text, tmp_path):
    Trainer(tiny(epochs=3), text, tmp_path / "whole").train()
    Trainer(tiny(epochs=2), text, tmp_path / "run").train()
    Trainer.resume(tmp_path / "run", epochs=3).train()
    assert exact_metrics(tmp_path / "run") == exact_metrics(tmp_path / "whole")


@pytest.fixture
def finished(text, tmp_path):
    Trainer(tiny(epochs=1), text, tmp_path / "run").train()
    return tmp_path / "run"


def test_a_run_is_not_overwritten(text, finished):
    with pytest.raises(FileExistsError, match="holds a run already"):
        Trainer(tiny(), text, finished)


def test_resuming_refuses_what_would_not_be_the_same_run(finished, tmp_path, text):
    with pytest.raises(ValueError, match=r"cannot change \['hidden_size'\].* hidden_size=10"):
        Trainer.resume(finished, hidden_size=11)
    with pytest.raises(ValueError, match="unknown settings"):
        Trainer.resume(finished, epoch=11)
    other = write_text(tmp_path / "other", train=149)
    with pytest.raises(ValueError, match=r"train\.txt is not the text"):
        Trainer.resume(finished, other)
    with pytest.raises(ValueError, match="of 1 processes"):
        Trainer.resume(finished, processes=PretendedPair())
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Trainer.resume(tmp_path / "nothing")


@dataclasses.dataclass(frozen=True)
class PretendedPair(Processes):
    """Two processes as far as a constructor can tell."""

    world: int = 2

    def wait(self):
        pass


def test_a_text_that_moved_can_be_named(finished, text, tmp_path):
    moved = write_text(tmp_path / "moved")
    Trainer.resume(finished, moved, epochs=2).train()


def test_damaged_checkpoints_are_recognised(finished, tmp_path):
    path = finished / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or not a checkpoint"):
        Trainer.resume(finished)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged or not a checkpoint"):
        Trainer.resume(finished)


def test_two_runs_cannot_share_a_folder(finished):
    with only_process_in(finished), pytest.raises(RuntimeError, match="another process"):
        Trainer.resume(finished, epochs=2).train()


def test_leftovers_of_a_killed_process_are_removed(text, tmp_path):
    leftover = tmp_path / "run" / "checkpoint.safetensors.123.tmp"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half")
    Trainer(tiny(epochs=1), text, tmp_path / "run").train()
    assert not leftover.exists()


# When things go wrong


def test_a_full_disk_keeps_the_last_good_checkpoint(text, tmp_path, monkeypatch, capsys):
    Trainer(tiny(), text, tmp_path / "whole").train()
    trainer = Trainer(tiny(checkpoint_seconds=0), text, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    step, limits = trainer.step, resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = []

    def with_a_full_disk():
        number = trainer.progress.step + 1
        if number == 10:  # files may grow to 1000 bytes: nothing fits
            kept.append(path.read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        if number == 20:
            assert path.read_bytes() == kept[0]
            assert [p.name for p in path.parent.glob("*.tmp")] == []
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return step()

    monkeypatch.setattr(trainer, "step", with_a_full_disk)
    try:
        summary = trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert f"Cannot write {path}" in said
    assert "File too large" in said
    assert "Metrics cannot be written" in said
    assert summary["finished"]  # and all that was computed is right
    truth = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["test_perplexity"] == truth["test_perplexity"]
    assert load_checkpoint(path)[1]["progress"]["epoch"] == 2


# TensorBoard writes in a thread of its own, which dies of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_stays_full_is_an_error_at_the_end(text, tmp_path, monkeypatch, capsys):
    trainer = Trainer(tiny(epochs=1), text, tmp_path / "run")
    step, limits = trainer.step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def with_a_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        return step()

    monkeypatch.setattr(trainer, "step", with_a_full_disk)
    try:
        with pytest.raises(OSError, match="no model could be written"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Trainer.resume(tmp_path / "run").train()["finished"]


def test_an_unwritable_folder_is_reported_before_training(text, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write into"):
        Trainer(tiny(), text, tmp_path / "file" / "run").train()


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch):
    trainer = Trainer(tiny(checkpoint_seconds=0), text, tmp_path / "run")
    step = trainer.step

    def poisoned():
        if trainer.progress.step == STEPS_PER_EPOCH + 4:
            with torch.no_grad():
                trainer.model.rnn.weight_hh_l1[0, 0] = math.nan
        return step()

    monkeypatch.setattr(trainer, "step", poisoned)
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    for part in ("loss is nan", "epoch 2, window 5 of 36", "step 41", "gradients that are not"):
        assert part in str(error.value)
    tensors, about, _ = load_checkpoint(tmp_path / "run" / "checkpoint.safetensors")
    assert about["progress"]["step"] == STEPS_PER_EPOCH + 4
    assert f"of step {about['progress']['step']}" in str(error.value)
    assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


def test_a_gradient_that_is_not_finite_is_named_and_not_applied(text, tmp_path):
    trainer = Trainer(tiny(), text, tmp_path / "run")
    trainer.model.decoder.bias.register_hook(lambda gradient: gradient * math.inf)
    before = optimised(trainer.model)
    with pytest.raises(NonFiniteError, match=r"not finite: decoder\.bias\)\. Nothing was saved"):
        trainer.step()
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


def test_a_batch_that_processes_cannot_share_is_refused(text, tmp_path):
    pair = PretendedPair()
    with pytest.raises(ValueError, match=r"batch_size must be a multiple .*\(2\), got 5"):
        Trainer(tiny(batch_size=5), text, tmp_path / "run", processes=pair)


# What it writes


def test_metrics_and_tensorboard_know_the_recoder(finished):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    rows = read_metrics(finished)["train"]
    names = {"loss", "perplexity", "lr", "gradient_norm", "tokens_per_second", "delta"}
    names |= {f"{kind}/{state}{layer}" for kind in ("step_size", "recoding_gradient_norm")
              for state in "hc" for layer in (0, 1)}  # fmt: skip
    assert names <= rows[0].keys()
    assert rows[0]["step_size/h0"] == pytest.approx(0.1)
    board = event_accumulator.EventAccumulator(str(finished / "tensorboard"))
    board.Reload()
    assert {f"train/{name}" for name in names} <= set(board.Tags()["scalars"])
    assert [e.value for e in board.Scalars("train/loss")] == pytest.approx(
        [r["loss"] for r in rows]
    )


def test_traces_are_computed_only_for_rows(text, tmp_path):
    trainer = Trainer(tiny(log_every=3), text, tmp_path / "run")
    asked = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, options: asked.append(options["return_trace"]), with_kwargs=True
    )
    for _ in range(6):
        trainer.step()
    assert asked == [False, False, True] * 2


def test_a_summary_and_a_picture_are_left(finished, capsys):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["finished"]
    assert summary["best_epoch"] == 1
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((finished / "config.json").read_text())["hidden_size"] == 10


def test_the_best_model_is_kept(text, tmp_path, monkeypatch):
    trainer = Trainer(tiny(epochs=3, schedule="plateau"), text, tmp_path / "run")
    evaluate_split = trainer.evaluate

    def worse_and_worse(*arguments):
        result = evaluate_split(*arguments)
        nll = result.nll + (0, 10, 20, 30)[trainer.progress.epoch]
        return dataclasses.replace(result, nll=nll)

    monkeypatch.setattr(trainer, "evaluate", worse_and_worse)
    summary = trainer.train()
    assert summary["best_epoch"] == 1
    _, about, _ = load_checkpoint(tmp_path / "run" / "best.safetensors")
    assert about["progress"]["epoch"] == 1
    assert [row["lr"] for row in read_metrics(tmp_path / "run")["epoch"]] == [2.0, 2.0, 1.0]


# Evaluation


def test_evaluation_is_the_mean_over_all_tokens(text):
    corpus, config = Corpus(text), tiny(dtype="float64")
    model = build_model(config, len(corpus.vocabulary))
    slow = build_model(
        config, len(corpus.vocabulary), model_class=fr.reference.RecodingLanguageModel
    )
    slow.load_state_dict(model.state_dict())
    tokens = torch.from_numpy(corpus["valid"].astype("int64"))
    truth = slow(tokens[:-1, None], tokens[1:, None]).nll.mean().item()
    state = torch.get_rng_state()
    result = evaluate(model, corpus["valid"], batch_size=1, bptt=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.tokens == len(tokens) - 1
    assert result.nll == pytest.approx(truth, rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(truth))
    assert result.bits_per_word == pytest.approx(truth / math.log(2))
    # Rows are texts of their own, whatever process reads them.
    whole = evaluate(model, corpus["valid"], batch_size=3, bptt=7)
    batches = Batches(corpus["valid"], 3, 1000, keep_all=True)
    inputs, targets = batches[0]
    nll = slow(inputs, targets).nll
    assert whole.nll == pytest.approx((nll.sum() / (targets != -100).sum()).item(), rel=1e-12)


class WordLanguageModel(nn.Module):
    """What people have: encoder, nn.LSTM, decoder."""

    def __init__(self, vocab, size, hidden, layers, bias=True):
        super().__init__()
        self.encoder = nn.Embedding(vocab, size)
        self.rnn = nn.LSTM(size, hidden, layers, bias=bias)
        self.decoder = nn.Linear(hidden, vocab)

    def nll(self, tokens):
        output, _ = self.rnn(self.encoder(tokens[:-1, None]))
        return nn.functional.cross_entropy(self.decoder(output)[:, 0], tokens[1:]).item()


@pytest.mark.parametrize("kind", ["pt", "safetensors", "DataParallel", "no bias", "tied"])
def test_plain_pytorch_weights_load(text, tmp_path, kind):
    from safetensors.torch import save_file

    corpus = Corpus(text)
    vocab = len(corpus.vocabulary)
    model = WordLanguageModel(vocab, 9 if kind == "tied" else 6, 9, 2, bias=kind != "no bias")
    if kind == "tied":
        model.decoder.weight = model.encoder.weight
    path = tmp_path / "model.pt"
    if kind == "safetensors":
        path = tmp_path / "model.safetensors"
        save_file(model.state_dict(), path)
    elif kind == "DataParallel":
        torch.save({f"module.{n}": t for n, t in model.state_dict().items()}, path)
    else:
        torch.save(model.state_dict(), path)
    loaded = load_model(path)
    assert loaded.vocabulary is None
    tokens = torch.from_numpy(corpus["test"].astype("int64"))
    result = evaluate(loaded.model, corpus["test"], batch_size=1)
    assert result.nll == pytest.approx(model.nll(tokens), rel=1e-5)
    recoding = load_model(path, signal="nll", step=0.3)
    assert recoding.model.rnn.signal.name == "nll"
    other = evaluate(recoding.model, corpus["test"], batch_size=1)
    assert abs(other.nll - result.nll) > 1e-4


def test_what_is_no_plain_lstm_is_refused(tmp_path):
    model = WordLanguageModel(8, 5, 5, 1)
    torch.save(model, tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"save it with torch.save\(model.state_dict"):
        load_model(tmp_path / "whole.pt")
    torch.save({"encoder.weight": torch.zeros(3, 3)}, tmp_path / "part.pt")
    with pytest.raises(ValueError, match=r"has no \['rnn.weight_ih_l0'"):
        load_model(tmp_path / "part.pt")
    gru = model.state_dict() | {f"rnn.{n}": t for n, t in nn.GRU(5, 5).state_dict().items()}
    torch.save(gru, tmp_path / "gru.pt")
    with pytest.raises(ValueError, match="does not hold an LSTM"):
        load_model(tmp_path / "gru.pt")
    with pytest.raises(FileNotFoundError, match="no model"):
        load_model(tmp_path / "absent.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="neither best"):
        load_model(tmp_path / "empty")


def test_the_recoder_comes_off_and_goes_on(text, tmp_path):
    Trainer(tiny(step="learned", epochs=1), text, tmp_path / "run").train()
    best = load_model(tmp_path / "run")
    plain, fixed = (load_model(tmp_path / "run", signal=s, step=0.5) for s in (None, "surprisal"))
    assert plain.model.rnn.signal is None
    assert fixed.model.rnn.signal.name == "surprisal"
    assert torch.equal(plain.model.decoder.weight, best.model.decoder.weight)
    corpus = Corpus(text, vocabulary=best.vocabulary)
    results = {evaluate(m.model, corpus["test"]).nll for m in (best, plain, fixed)}
    assert len(results) == 3


# Settings


def test_recipes_are_what_they_are_called():
    thesis = Config.recipe("thesis")
    assert (thesis.num_layers, thesis.hidden_size, thesis.batch_size, thesis.bptt) == (
        2,
        650,
        64,
        35,
    )
    assert (thesis.lr, thesis.clip, thesis.epochs, thesis.dropout) == (20, 0.25, 8, 0.15)
    assert (thesis.signal, thesis.schedule, thesis.decay) == (None, "plateau", 0.5)
    surprisal = Config.recipe("thesis-surprisal")
    assert surprisal == thesis.replace(signal="surprisal", step=5.0)
    dropout = Config.recipe("thesis-mc-dropout")
    assert (dropout.signal, dropout.step, dropout.signal_options["p"]) == (
        "mc_dropout",
        0.001,
        0.42,
    )
    ensemble = Config.recipe("thesis-ensemble")
    assert ensemble.decoder_options == {"num_members": 15, "prior_scale": 0.29}
    zaremba = Config.recipe("zaremba-small")
    assert (zaremba.num_layers, zaremba.hidden_size, zaremba.batch_size, zaremba.bptt) == (
        2, 200, 20, 20,
    )  # fmt: skip
    assert (zaremba.lr, zaremba.loss, zaremba.clip, zaremba.init_bound) == (1, "sum", 5, 0.1)
    assert (zaremba.dropout, zaremba.epochs, zaremba.signal) == (0, 13, None)


def test_options_go_with_their_signal():
    config = Config.recipe("thesis-mc-dropout", signal="nll")
    assert config.signal_options == {}
    kept = Config.recipe("thesis-mc-dropout", step=0.1)
    assert kept.signal_options["num_samples"] == 15


def test_recipes_of_ones_own(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "zaremba-small"\nlr = 0.7\n')
    assert Config.recipe(tmp_path / "mine.toml") == Config.recipe("zaremba-small", lr=0.7)
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(ValueError, match="not valid TOML"):
        Config.recipe(tmp_path / "bad.toml")
    with pytest.raises(ValueError, match=r"one of .*'thesis'.*, got 'thesys'"):
        Config.recipe("thesys")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("size = 3", r"unknown settings: \['size'\]"),
        ('dropout = "much"', "dropout must be of type float, got 'much'"),
        ("tie_weights = 1", "tie_weights must be of type bool, got 1"),
        ("signal_options = 3", "signal_options must be of type dict, got 3"),
        ("max_vocab = 0", "max_vocab must be a positive int or None, got 0"),
        ('embedding_size = "x"', "embedding_size must be a positive int or None, got 'x'"),
        (f"seed = {2**70}", "seed must have at most 64 bits"),
        ('base = "thesys"', r"one of .*'thesis'.*, got 'thesys'"),
        ("base = 3", r"one of .*'thesis'.*, got 3"),
        ('base = "{here}"', "is its own base: .*mine.toml > .*mine.toml"),
    ],
    ids=lambda value: value.split()[0],
)
def test_what_is_wrong_in_a_recipe_is_said_with_its_name(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_text(content.replace("{here}", str(path)))
    with pytest.raises(ValueError, match=rf"mine\.toml.*{message}"):
        Config.recipe(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ({"lr": -1.0}, "lr must be a positive number, got -1"),
        ({"weight_decay": -1.0}, "weight_decay must be a number and not negative"),
        ({"optimizer": "sgdd"}, "optimizer must be one of .*, got 'sgdd'"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is for optimizer='sgd'"),
        ({"learning_rate": 1.0}, r"unknown settings: \['learning_rate'\]"),
    ],
    ids=str,
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.from_dict(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"signal": "sorrow"}, "signal must be 'none' or one of .*'nll'.*, got 'sorrow'"),
        ({"step": "long"}, "step must be a number or one of .*'learned'.*, got 'long'"),
        ({"signal_options": {"q": 1}}, r"signal_options of 'nll' must be among .*\['q'\]"),
        ({"step": 0.1, "step_options": {"init": 1}}, "a step that is a number takes no"),
        (
            {"signal": "mc_dropout", "signal_options": {"p": "x"}},
            "signal_options of 'mc_dropout': ",
        ),
        ({"step": "learned", "step_options": {"init": -1}}, "step_options of 'learned': init must"),
        ({"signal": "ensemble", "decoder_options": {"num_members": "x"}}, "decoder_options: num_m"),
    ],
    ids=str,
)
def test_bad_recoders_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_model(tiny(**settings), 21)
