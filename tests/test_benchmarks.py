"""The benchmark command runs, and the kernels have pytest-benchmark cases
(`pytest --benchmark-enable --benchmark-only tests/test_benchmarks.py`). Nothing here asserts a
time."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_inputs, make_pair

from bench import cases, contenders, flops, measure, plots, report
from bench.__main__ import save

ROOT = Path(__file__).parent.parent


def test_the_benchmark_command_writes_its_report(tmp_path):
    result = subprocess.run(
        [
            sys.executable, "-m", "bench", "--quick", "--rounds", "2", "--no-compiled",
            "--out", str(tmp_path),
        ],
        # One thread: at this size a second one is waited for and does nothing.
        cwd=ROOT, text=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "| fused, nll |" in result.stdout
    experiments = json.loads((tmp_path / "results.json").read_text())["experiments"]
    train, evaluate, exact, read = experiments
    rows = {row["name"]: row for row in train["rows"]}
    assert {"plain LM (stock PyTorch)", "fused, no signal", "fused, nll", "reference, nll"} <= set(
        rows
    )
    assert rows["plain LM (stock PyTorch)"]["to_plain"] == [1.0, 1.0, 1.0]
    assert rows["reference, nll"]["to_reference"] == [1.0, 1.0, 1.0]
    assert rows["fused, nll"]["memory"] is not None
    assert all(len(row["seconds"]) == 2 for row in train["rows"])
    assert [row["K"] for row in evaluate["rows"]] == [1, 1, 5]
    assert {"fused, nll, exact gradient", "reference, nll, exact gradient"} <= {
        row["name"] for row in exact["rows"]
    }
    assert len(read["rows"]) == 4
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "limit.png", "slow_down.png", "throughput.png",
    }  # fmt: skip


def test_the_table_of_the_page_is_generated(tmp_path):
    rows = [
        {
            "name": "fused, nll", "who": "fused", "to_plain": [1.0, 1.1, 1.2],
            "to_reference": [2.0, 2.1, 2.2], "share_of_limit": [0.7, 0.8, 0.9], "memory": 30.0,
        },
        {"name": "plain LM (stock PyTorch)", "who": "plain", "memory": 60.0},
    ]  # fmt: skip
    results = {
        "machine": {"cpu": "x", "kernels": "avx2", "torch": "2"},
        "experiments": [{"name": "train thesis", "threads": 2, "shape": "B=1", "rows": rows}],
    }
    page = tmp_path / "benchmarks.md"
    folder = tmp_path / "fast"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    page.write_text("a\n<!-- bench/fast: begin -->\nold\n<!-- bench/fast: end -->\nb\n")
    report.write_into_page(page, folder)
    text = page.read_text()
    assert "| train | B=1 | nll | 2 | 1.10 (1.00-1.20) | 2.10 (2.00-2.20) | 80% | 0.50 |" in text
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")


@pytest.mark.parametrize("megabytes", [10.0, None])
def test_growth_is_drawn_with_and_without_memory(tmp_path, megabytes):
    line = [{"value": v, "seconds": v / 100, "memory": megabytes} for v in (1, 10, 100)]
    plots.growth({"base": "B=1", "axes": {"T": {"fused, nll": line}}}, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 0


def test_experiments_of_a_resumed_run_are_saved_in_order(tmp_path):
    """Also those that have been renamed since: nothing measured is lost."""
    names = ["of an older run", "read", "train thesis"]
    experiments = [
        {"name": n, "shape": "B=1", "threads": 2, "rounds": 1, "gemm_gflops": 1.0, "rows": []}
        for n in names
    ]
    save({"machine": {}, "experiments": experiments}, tmp_path)
    kept = json.loads((tmp_path / "results.json").read_text())["experiments"]
    assert [e["name"] for e in kept] == names[::-1]


def test_flops_of_the_thesis_shape():
    """The figures of the design: MFLOP per token, and the slow-downs that FLOPs alone give."""
    shape = cases.CASES["thesis"]
    plain, nll = cases.Contender(cases.PLAIN), cases.Contender(cases.FUSED, cases.NLL)

    def work(contender, job):
        return flops.per_token(contender, shape, job)

    assert work(plain, "train") / 1e6 == pytest.approx(79.5, abs=0.3)
    assert work(nll, "train") / 1e6 == pytest.approx(83, abs=0.3)
    assert work(nll, "evaluate") / work(plain, "evaluate") == pytest.approx(1.62, abs=0.01)
    # One sample is decoded as a whole, which is less than what the design counts (2.3).
    for K, slow_down in {1: 2.1, 5: 3.2, 10: 4.2, 25: 7.3, 50: 12.4}.items():
        variant = dataclasses.replace(cases.SHARED, K=K)
        mc = work(cases.Contender(cases.FUSED, variant), "evaluate")
        assert mc / work(plain, "evaluate") == pytest.approx(slow_down, abs=0.1)
    members = work(cases.Contender(cases.FUSED, cases.ENSEMBLE), "evaluate")
    mean = work(cases.Contender(cases.FUSED, cases.MEAN_LOGITS), "evaluate")
    # K decoders there and back, or one; the mean's own logits.
    saved = (2 * cases.ENSEMBLE.K - 2 - 1) * flops.decoder(shape)
    assert members - mean == pytest.approx(saved)


def test_ratios_are_taken_within_rounds():
    times = {"a": [1.0, 10.0, 2.0], "b": [2.0, 20.0, 8.0]}
    assert measure.ratio(times, "a", "b") == (2.0, 2.0, 3.0)


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
def test_softmax_signal_kernel(benchmark, signal):
    hidden, weight = torch.randn(64, 64), torch.randn(10_000, 64)
    targets = torch.randint(10_000, (64,))
    benchmark(
        torch.ops.fused_recoder.signal_gradient, hidden, weight, None, targets, f"signal={signal}"
    )


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
    benchmark(torch.ops.fused_recoder.dropout_mask, seed, 0, 0, 0.2, 0, 35, 64, 650, torch.float32)


def test_all_large_products_are_whole_ones():
    torch.manual_seed(0)
    products = [multiply() for multiply in measure.large_gemms(40)]
    torch.manual_seed(0)
    a = torch.randn(40, 40).double()
    torch.testing.assert_close(products[0].double(), a @ a, rtol=1e-4, atol=1e-4)
    for product in products[1:]:  # of a linear map, which transposes its weight
        torch.testing.assert_close(product.double(), a @ a.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", measure.PRECISIONS)
@pytest.mark.parametrize("job", ["train", "evaluate"])
def test_a_precision_is_that_of_every_contender(monkeypatch, name, job):
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    for backend in backends:
        monkeypatch.setattr(backend, "allow_tf32", backend.allow_tf32)  # put back at the end
    monkeypatch.setattr(measure, "precision", "float32")
    measure.use_precision(name)
    assert all(backend.allow_tf32 == (name != "float32") for backend in backends)
    products = []
    for who in (cases.PLAIN, cases.FUSED, cases.REFERENCE):
        contender = cases.Contender(who, cases.NONE if who == cases.PLAIN else cases.NLL)
        model = contenders.make_model(contender, cases.CASES["tiny"])
        model.register_forward_hook(
            lambda *_: products.append((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)
        )
        with monkeypatch.context() as patched:
            patched.setattr(contenders, "make_model", lambda *_, model=model: model)
            contenders.make_job(contender, cases.CASES["tiny"], job)()
    assert products == 3 * [measure.PRECISIONS[name] or torch.float32]
