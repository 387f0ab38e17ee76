"""Interruptions, damaged files and other processes: nothing is lost, and nothing goes unnoticed."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_text import TINY, exact_metrics, write_text

from fused_recoder.analysis.agreement import read_giulianelli, read_gulordava
from fused_recoder.analysis.sentences import read_sentences
from fused_recoder.experiments import jobs, rows
from fused_recoder.training import (
    Callback,
    Config,
    Trainer,
    Vocabulary,
    draw_curves,
    load_model,
    run_folder,
)
from fused_recoder.training.checkpoint import load_checkpoint
from fused_recoder.training.config import read_recipe
from fused_recoder.training.files import only_process_in


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(run_folder, "draw_curves", lambda *folders: None)


def tiny(**changes):
    return Config.from_dict(TINY | changes)


# Interrupts


@pytest.fixture
def first_epoch_is_best(monkeypatch):
    """So the best weights are not the last ones. Returns what to do before a text is read."""
    evaluate, before = Trainer.evaluate, {}

    def worse_and_worse(self, split, *arguments):
        before.get(split, lambda: None)()
        result = evaluate(self, split, *arguments)
        return dataclasses.replace(result, nll=result.nll + self.progress.epoch)

    monkeypatch.setattr(Trainer, "evaluate", worse_and_worse)
    return before


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_while_the_test_text_is_read_keeps_the_last_weights(
    text, tmp_path, first_epoch_is_best
):
    """Not the best ones, which read the test text."""
    Trainer(tiny(epochs=3), text, tmp_path / "whole").train()
    first_epoch_is_best["test"] = interrupt
    stopped = Trainer(tiny(epochs=2), text, tmp_path / "run").train()
    assert not stopped["finished"]
    first_epoch_is_best.clear()
    summary = Trainer.resume(tmp_path / "run", epochs=3).train()
    assert summary["best_epoch"] == 1
    assert exact_metrics(tmp_path / "run") == exact_metrics(tmp_path / "whole")
    for name in ("checkpoint.safetensors", "best.safetensors"):
        a, b = (load_file(tmp_path / run / name) for run in ("whole", "run"))
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_test_text_is_read_by_the_best_model(text, tmp_path, first_epoch_is_best):
    Trainer(tiny(epochs=1), text, tmp_path / "short").train()
    trainer = Trainer(tiny(epochs=2), text, tmp_path / "long")
    trainer.train()
    tests = [exact_metrics(tmp_path / run)[-1]["perplexity"] for run in ("short", "long")]
    # The fixture adds the epochs done to the nll.
    assert tests[1] == pytest.approx(tests[0] * torch.e, rel=1e-12)
    # The trainer itself stays where its checkpoint is.
    kept = load_file(tmp_path / "long" / "checkpoint.safetensors")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, kept[f"model.{name}"])


# Other processes


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_process_is_refused_before_it_touches_anything(text, tmp_path):
    folder = tmp_path / "run"
    Trainer(tiny(epochs=1), text, folder).train()
    (folder / "checkpoint.safetensors.1.tmp").write_bytes(b"what the first one is writing")
    with only_process_in(folder):
        before = files_of(folder)
        with pytest.raises(RuntimeError, match="another process is training in"):
            Trainer.resume(folder, epochs=2).train()
        assert files_of(folder) == before


def test_of_two_new_runs_in_one_folder_the_second_is_refused(text, tmp_path):
    """Though there was no run yet when it was made."""
    folder = tmp_path / "run"
    first, second = (Trainer(tiny(epochs=1, seed=seed), text, folder) for seed in (1, 2))
    first.train()
    before = files_of(folder)
    with pytest.raises(FileExistsError, match="holds a run already"):
        second.train()
    assert files_of(folder) == before


def test_a_trainer_that_was_stopped_can_go_on_itself(text, tmp_path):
    Trainer(tiny(), text, tmp_path / "whole").train()

    class Stop(Callback):
        def on_step(self, trainer, row):
            if trainer.progress.step in (20, 50):
                trainer.stop()

    trainer = Trainer(tiny(), text, tmp_path / "run", callbacks=[Stop()])
    assert [trainer.train()["finished"] for _ in range(3)] == [False, False, True]
    assert exact_metrics(tmp_path / "run") == exact_metrics(tmp_path / "whole")


# Damage


@pytest.fixture
def finished(text, tmp_path):
    Trainer(tiny(epochs=1), text, tmp_path / "run").train()
    return tmp_path / "run"


def data_start(path):
    """Where the tensors begin: after the length of the header and the header."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_in_a_checkpoint_is_noticed(finished, place):
    for name, load in (
        ("checkpoint.safetensors", lambda: Trainer.resume(finished, epochs=2)),
        ("best.safetensors", lambda: load_model(finished)),
    ):
        path = finished / name
        content = bytearray(path.read_bytes())
        start, end = data_start(path), len(content) - 1
        content[{"first": start, "middle": (start + end) // 2, "last": end}[place]] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is damaged: .*checksum"):
            load()


def test_a_damaged_header_is_noticed(finished):
    """Settings and vocabulary, that is: a digit of the learning rate, a letter of a word."""
    path = finished / "best.safetensors"
    whole = path.read_bytes()
    for old, new in ((rb"\"lr\": 2.0, \"m", rb"\"lr\": 3.0, \"m"), (rb"\nw7\n", rb"\nv7\n")):
        assert whole.count(old) == 1
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match=r"best\.safetensors is damaged: .*checksum"):
            load_model(finished)


def test_checkpoints_without_a_checksum_still_load(finished):
    """Those of the format that had none; in the present one it cannot get lost."""
    path = finished / "best.safetensors"
    rewrite(path)
    assert load_model(finished).config.hidden_size == 10
    rewrite(path, format="fused_recoder checkpoint 2")
    with pytest.raises(ValueError, match=r"best\.safetensors has no 'checksum'"):
        load_model(finished)
    rewrite(path, format="fused_recoder checkpoint 3")
    with pytest.raises(ValueError, match=r"best\.safetensors is of format .* 3"):
        load_model(finished)


def rewrite(path, **header):
    """In the format without a checksum, with other entries in the header; None takes one out."""
    with safe_open(path, "pt") as file:
        entries = file.metadata() | {"format": "fused_recoder checkpoint 1", "checksum": None}
    entries |= header
    save_file(load_file(path), path, {k: v for k, v in entries.items() if v is not None})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"vocabulary": None}, "has no 'vocabulary'"),
        ({"about": None}, "has no 'about'"),
        ({"about": "{}"}, "has no 'config'"),
        ({"about": "[1]"}, "about must be"),
        ({"about": '{"config": '}, "about is not valid JSON"),
        ({"about": '{"config": {"size": 3}}'}, r"unknown settings: \['size'\]"),
        ({"vocabulary": "a\nb\n"}, "has no <eos>"),
    ],
    ids=str,
)
def test_what_is_missing_in_a_checkpoint_is_named_with_its_file(finished, header, message):
    for name, load in (
        ("checkpoint.safetensors", lambda: Trainer.resume(finished, epochs=2)),
        ("best.safetensors", lambda: load_model(finished)),
    ):
        rewrite(finished / name, **header)
        with pytest.raises(ValueError, match=rf"{name}.*{message}"):
            load()


@pytest.mark.parametrize(
    "name", ["progress", "processes", "digests", "data", "metrics_bytes", "train_tokens"]
)
def test_what_a_run_needs_to_go_on_is_named_if_it_is_missing(finished, name):
    path = finished / "checkpoint.safetensors"
    about = load_checkpoint(path)[1]
    del about[name]
    rewrite(path, about=json.dumps(about))
    with pytest.raises(ValueError, match=rf"checkpoint\.safetensors has no '{name}'"):
        Trainer.resume(finished, epochs=2)


def test_the_best_model_is_not_taken_for_a_run(finished):
    shutil.copy(finished / "best.safetensors", finished / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors has no .*'random\.cpu\.0'"):
        Trainer.resume(finished, epochs=2)


def test_a_folder_with_dollars_in_its_name_is_drawn(text, tmp_path):
    for name in ("$_^$", "$b$"):
        Trainer(tiny(epochs=1), text, tmp_path / name).train()
    assert draw_curves(tmp_path / "$_^$", tmp_path / "$b$").is_file()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"status": "fin', "is not valid JSON"),
        ("[]", "must be a JSON object, got list"),
        ("{}", "has no 'status'"),
    ],
)
def test_a_broken_result_of_a_job_is_named(tmp_path, content, message):
    (tmp_path / "nll.seed1").mkdir()
    (tmp_path / "nll.seed1" / "result.json").write_text(content)
    with pytest.raises(ValueError, match=rf"nll\.seed1.result\.json {message}"):
        rows.gather(tmp_path)


@pytest.mark.parametrize("content", ['{"lr": ', '{"size": 3}'])
def test_broken_settings_of_a_job_are_named(tmp_path, content):
    (tmp_path / "nll.seed1").mkdir()
    (tmp_path / "nll.seed1" / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"nll\.seed1.config\.json"):
        jobs.Training("nll", tiny()).check(tmp_path)


@pytest.mark.parametrize(
    "read", [Vocabulary.load, read_recipe, read_sentences, read_giulianelli, read_gulordava]
)
def test_a_text_that_is_not_utf_8_is_named(tmp_path, read):
    path = tmp_path / "latin-1.toml"
    path.write_bytes("<eos>\nna\xefve\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin-1\.toml, line 2: byte 3 \(0xef\) is not UTF-8"):
        read(path)
