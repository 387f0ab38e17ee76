"""Several processes train one model."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_text import TINY, exact_metrics, write_text

from fused_recoder.training.checkpoint import load_checkpoint

FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
EXACT = [*FLAGS, "--dtype=float64", "--step=learned"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    root = Path(__file__).parent.parent
    return os.environ | {
        "FUSED_RECODER_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }


def command(*arguments, processes=2):
    if processes == 1:
        return [sys.executable, "-m", "fused_recoder", *map(str, arguments)]
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={processes}",
    ]  # fmt: skip
    if arguments[0] == "train":
        launcher += ["-m", "fused_recoder"]
    return [*launcher, *map(str, arguments)]


def run(environment, *arguments, processes=2):
    return subprocess.run(
        command(*arguments, processes=processes), env=environment, text=True, capture_output=True
    )


def test_two_processes_equal_one(text, environment, tmp_path):
    for processes in (1, 2):
        out = tmp_path / str(processes)
        result = run(environment, "train", text, f"--out={out}", *EXACT, processes=processes)
        assert result.returncode == 0, result.stderr
    one, two = (load_file(tmp_path / n / "checkpoint.safetensors") for n in "12")
    names = [name for name in one if name.startswith("model.")]
    assert len(names) == 12  # embeddings, 2 x 4 of the LSTM, 2 of the decoder, steps
    for name in names:
        assert two[name].dtype == torch.float64
        error = (one[name] - two[name]).abs().max() / one[name].abs().max()
        assert error <= 1e-10, name
    rows_one, rows_two = exact_metrics(tmp_path / "1"), exact_metrics(tmp_path / "2")
    assert len(rows_one) == len(rows_two) == 2 * 36 + 2 + 1
    for a, b in zip(rows_one, rows_two, strict=True):
        for name in ("loss", "gradient_norm", "valid_perplexity", "perplexity"):
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-10)
    assert "resumed" not in result.stdout
    assert result.stdout.count("best epoch") == 1  # the first process alone speaks


def test_two_processes_stop_and_go_on_exactly(text, environment, tmp_path):
    """With dropout, so every process has random numbers of its own."""
    flags = [*FLAGS, "--dropout=0.3", "--epochs=8"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = run(environment, "train", text, f"--out={whole}", *flags)
    assert result.returncode == 0, result.stderr
    started = subprocess.Popen(
        command("train", text, f"--out={parts}", *flags),
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    metrics = parts / "metrics.jsonl"
    while started.poll() is None and not (metrics.exists() and metrics.stat().st_size > 2000):
        time.sleep(0.005)
    started.send_signal(signal.SIGTERM)  # torchrun passes it on
    said, _ = started.communicate()
    _, about, _ = load_checkpoint(parts / "checkpoint.safetensors")
    assert 0 < about["progress"]["step"] < 8 * 36, "the signal should have come in between"
    assert f"torchrun --nproc-per-node 2 -m fused_recoder train --out {parts} --resume" in said
    result = run(environment, "train", f"--out={parts}", "--resume")
    assert result.returncode == 0, result.stderr
    assert exact_metrics(parts) == exact_metrics(whole)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
def test_no_thread_outlives_the_connection(text, environment, tmp_path):
    """One that does may abort the interpreter as it ends, after all work was done."""
    script = Path(__file__).with_name("parting.py")
    result = run(environment, script, "train", text, f"--out={tmp_path / 'run'}", *FLAGS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("of gloo: []") == 2, result.stdout
    assert "Warning" not in result.stderr


def test_a_dying_process_ends_the_job_and_spares_the_checkpoint(text, environment, tmp_path):
    out = tmp_path / "run"
    script = Path(__file__).with_name("dying.py")
    flags = [*FLAGS, "--checkpoint-seconds=0"]
    result = run(environment, script, "train", text, f"--out={out}", *flags)
    assert result.returncode != 0
    assert "the second process had enough" in result.stderr
    _, about, _ = load_checkpoint(out / "checkpoint.safetensors")
    assert about["progress"]["step"] == 20
    assert about["processes"] == 2


def test_one_process_can_ask_all_to_stop(text, environment, tmp_path):
    out = tmp_path / "run"
    result = run(environment, Path(__file__).with_name("stopping.py"), text, out)
    assert result.returncode == 0, result.stderr
    assert "process 0: another process" in result.stdout
    assert "process 1: a callback" in result.stdout
    assert result.stdout.count("everything is saved") == 1
    _, about, _ = load_checkpoint(out / "checkpoint.safetensors")
    assert about["progress"]["step"] == 20
