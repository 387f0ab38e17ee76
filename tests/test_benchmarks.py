"""The benchmark command runs, and the kernels have pytest-benchmark cases
(`pytest --benchmark-enable --benchmark-only tests/test_benchmarks.py`). Nothing here asserts a
time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_inputs, make_pair

from bench import measure

ROOT = Path(__file__).parent.parent


def test_the_benchmark_command_writes_its_report(tmp_path):
    result = subprocess.run(
        [
            sys.executable, "-m", "bench", "--case", "tiny", "--rounds", "2", "--no-compiled",
            "--out", str(tmp_path),
        ],
        cwd=ROOT, text=True, capture_output=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "| fused |" in result.stdout
    case = json.loads((tmp_path / "results.json").read_text())["cases"][0]
    names = [row["name"] for row in case["rows"]]
    assert names == ["fused", "fused engine, no signal", "reference", "nn.LSTM"]
    assert all(len(row["seconds"]) == 2 for row in case["rows"])
    assert case["rows"][2]["relative"] == [1.0, 1.0, 1.0]


def test_ratios_are_taken_within_rounds():
    times = {"a": [1.0, 10.0, 2.0], "b": [2.0, 20.0, 8.0]}
    assert measure.ratio(times, "a", "b") == (2.0, 2.0, 3.0)


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
def test_softmax_signal_kernel(benchmark, signal):
    hidden, weight = torch.randn(64, 64), torch.randn(10_000, 64)
    targets = torch.randint(10_000, (64,))
    benchmark(torch.ops.fused_recoder.signal_gradient, hidden, weight, None, targets, signal)


@pytest.mark.parametrize("signal", [None, "nll", "entropy"])
def test_forward_kernels(benchmark, signal):
    rnn, _, _ = make_pair(200, 200, 2, 1000, signal=signal, dtype=torch.float32)
    x, hx, y = make_inputs(rnn, 10, 20, 1000, dtype=torch.float32)
    with torch.no_grad():
        benchmark(rnn, x, hx, targets=y)


def test_backward_kernels(benchmark):
    rnn, _, _ = make_pair(200, 200, 2, 1000, signal="nll", dtype=torch.float32)
    x, hx, y = make_inputs(rnn, 10, 20, 1000, dtype=torch.float32)
    output, _ = rnn(x, hx, targets=y)
    cotangent = torch.randn_like(output)
    benchmark(torch.autograd.grad, output, x, cotangent, retain_graph=True)


def test_mask_kernel(benchmark):
    seed = torch.tensor([1])
    benchmark(torch.ops.fused_recoder.dropout_mask, seed, 0, 0.2, 0, 35, 64, 650, torch.float32)
