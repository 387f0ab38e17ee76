"""The command line, as users type it."""

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch
from tiny_text import TINY, exact_metrics, write_text
from torch import nn

from fused_recoder import cli
from fused_recoder.training import load_model

FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
FLAGS += ["--threads=1"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text", train=60)


@pytest.fixture
def call(capsys):
    """Runs a command; returns exit code, what it printed and what it complained about."""

    def run(*arguments):
        threads = torch.get_num_threads()
        with pytest.raises(SystemExit) as stop:
            cli.main([str(a) for a in arguments])
        torch.set_num_threads(threads)
        said = capsys.readouterr()
        return stop.value.code, said.out, said.err

    return run


def test_one_command_from_text_to_model(text, tmp_path, call):
    out = tmp_path / "run"
    code, said, _ = call("train", text, "--out", out, *FLAGS, "--epochs=1", "--step=learned")
    assert code == 0
    for part in ("22 words", "recoding hc by nll, step learned", "epoch 1/1", "tok/s", "left",
                 "best epoch 1", "curves.png"):  # fmt: skip
        assert part in said
    code, said, _ = call("eval", out, "--json", tmp_path / "result.json")
    assert code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert f"{result['perplexity']:.2f}" in said
    summary = json.loads((out / "summary.json").read_text())
    assert result["perplexity"] == summary["test_perplexity"]
    assert (result["signal"], result["step"]) == ("nll", "learned")


def test_recipes_are_overridden_by_flags(text, tmp_path, call):
    out = tmp_path / "run"
    code, _, errors = call(
        "train", text, "--out", out, "--recipe", "thesis-nll", *FLAGS, "--epochs=1",
        "--no-tie-weights", "--clip=none", "--threads=1",
    )  # fmt: skip
    assert code == 0, errors
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["clip"], config["signal"]) == (10, None, "nll")
    assert (config["dropout"], config["states"]) == (0.15, "c")


def test_options_of_steps_and_signals(text, tmp_path, call):
    out = tmp_path / "run"
    code, _, errors = call(
        "train", text, "--out", out, *FLAGS, "--epochs=1", "--step=learned",
        "--step-option=init=0.25", "--signal=surprisal", "--signal-option", "target=argmax",
    )  # fmt: skip
    assert code == 0, errors
    config = json.loads((out / "config.json").read_text())
    assert config["step_options"] == {"init": 0.25}
    assert config["signal_options"] == {"target": "argmax"}
    assert load_model(out).model.rnn.signal.target == "argmax"


def test_the_recoder_is_changed_by_flags(text, tmp_path, call):
    out = tmp_path / "run"
    call("train", text, "--out", out, *FLAGS, "--epochs=1", "--signal=none")
    results = {}
    for name, flags in {
        "as it is": [],
        "none": ["--signal", "none"],
        "nll": ["--signal", "nll", "--step", "0.3"],
        "cells": ["--signal", "nll", "--step", "0.3", "--states", "c"],
    }.items():
        code, _, errors = call("eval", out, *flags, "--json", tmp_path / "result.json")
        assert code == 0, errors
        results[name] = json.loads((tmp_path / "result.json").read_text())
    assert results["as it is"]["nll"] == results["none"]["nll"]
    assert len({r["nll"] for r in results.values()}) == 3
    assert results["nll"]["signal"] == "nll"


def test_plain_weights_need_the_right_vocabulary(text, tmp_path, call):
    def save(vocab):
        encoder, rnn, decoder = nn.Embedding(vocab, 5), nn.LSTM(5, 5), nn.Linear(5, vocab)
        parts = {"encoder": encoder, "rnn": rnn, "decoder": decoder}
        torch.save(nn.ModuleDict(parts).state_dict(), tmp_path / "plain.pt")

    save(22)
    code, said, errors = call("eval", tmp_path / "plain.pt", "--data", text, "--signal=nll")
    assert code == 0, errors
    save(3)
    code, _, errors = call("eval", tmp_path / "plain.pt", "--data", text)
    assert code == 1
    assert "the model knows 3 words" in errors
    assert "has 22" in errors
    (tmp_path / "words.txt").write_text("<eos>\n<unk>\nw1\n")
    code, said, _ = call(
        "eval", tmp_path / "plain.pt", "--data", text, "--vocab", tmp_path / "words.txt"
    )
    assert code == 0
    assert "%" in said


def test_the_same_command_can_be_repeated_with_resume(text, tmp_path, call):
    command = ["train", text, "--out", tmp_path / "run", *FLAGS, "--resume"]
    code, said, _ = call(*command)
    assert code == 0
    assert "resumed" not in said
    code, said, _ = call(*command)
    assert code == 0
    assert "resumed   after step" in said
    code, said, _ = call("train", "--out", tmp_path / "run", "--resume", "--epochs", 3)
    assert code == 0
    assert "epoch 3/3 done" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "{tmp}/absent", "--out={tmp}/run"], "no folder"),
        (["train", "{text}", "--out={tmp}/run", "--signal=sorrow"], "got 'sorrow'"),
        (["train", "{text}", "--out={tmp}/run", "--batch-size=100000"], "too short"),
        (["train", "{text}", "--out={tmp}/run", "--recipe=cake"], "one of ['thesis'"),
        (["train", "{text}", "--out={tmp}/run", "--device=none"], "device"),
        (["train", "--out={tmp}/run", "--resume"], "nothing to resume"),
        (["eval", "{tmp}/absent"], "no model"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_mistakes_are_answered_in_a_sentence(text, tmp_path, call, arguments, message):
    code, _, errors = call(*(a.format(tmp=tmp_path, text=text) for a in arguments))
    assert code == 1
    assert errors.startswith(f"fused-recoder {arguments[0]}: ")
    assert len(errors.splitlines()) <= 3
    assert message in errors


def test_threads_are_those_a_machine_may_have(text, tmp_path, call):
    for threads in ("0", "-1", "1000000", "many"):
        code, _, errors = call("train", text, "--out", tmp_path / "run", "--threads", threads)
        assert code == 2
        assert "--threads" in errors


def test_an_interrupt_is_no_traceback(call, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_eval", interrupted)
    assert call("eval", "x") == (130, "", "fused-recoder eval: interrupted\n")


def test_bench_is_that_of_the_clone(capfd, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "--help"])
    assert stop.value.code == 0
    assert "python -m bench" in capfd.readouterr().out
    monkeypatch.setattr(cli, "__file__", "/nowhere/fused_recoder/cli.py")
    with pytest.raises(SystemExit, match="in a clone"):
        cli.main(["bench"])


def test_unknown_flags_are_refused(text, call):
    code, _, errors = call("train", text, "--out=x", "--learning-rate=3")
    assert code == 2
    assert "--learning-rate=3" in errors
    code, _, errors = call("train", text, "--out=x", "--step-option=init")
    assert code == 2
    assert "must be NAME=VALUE" in errors


def test_a_terminal_gets_a_bar(text, tmp_path):
    terminal, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "fused_recoder", "train", text, "--out", tmp_path / "run", *FLAGS],
        stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # it has hung up
            break
        if not part:
            break
        seen += part
    os.close(terminal)
    assert process.wait() == 0
    for part in (b"\r", b"epoch 2/2", b"100%", b"tok/s", b"loss=", b"ppl=", b"lr="):
        assert part in seen


def test_a_log_file_gets_lines_and_an_interrupt_says_how_to_go_on(text, tmp_path):
    out = tmp_path / "run"
    flags = [*FLAGS, "--epochs=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fused_recoder", "train", text, "--out", out, *flags],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    metrics = out / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 3000):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "\r" not in said + errors  # no bar
    assert f"fused-recoder train --out {out} --resume" in said
    steps = exact_metrics(out)[-1]["step"]
    assert f"at step {steps}" in said


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [
        ("safetensors", "train", ["train", "x", "--out", "y"]),
        ("safetensors", "train", ["eval", "--help"]),
        ("safetensors", "experiments", ["analyze", "x", "--sentence", "a b", "--out", "y"]),
        ("optuna", "experiments", ["search", "x", "--out", "y"]),
        ("scipy", "experiments", ["reproduce", "x", "study", "--out", "y"]),
    ],
)
def test_missing_packages_are_the_answer_to_any_arguments(
    monkeypatch, call, missing, extra, arguments
):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    code, _, said = call(*arguments)
    assert code == (
        f"fused-recoder {arguments[0]}: packages are missing: pip install 'fused-recoder[{extra}]'"
    )
    assert said == ""


def test_what_needs_no_further_packages_still_works(monkeypatch, call):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name == "tqdm" else find(name)
    )
    code, said, _ = call("env")
    assert code == 0
    assert "fused_recoder" in said
