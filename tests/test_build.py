"""The build and what it says about itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_recoder as fr
from fused_recoder import _C, _build, cli

ROOT = Path(__file__).parent.parent


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, text=True, capture_output=True
    )


def test_env_command_prints_what_bug_reports_need(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["env"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for part in (fr.__version__, torch.__version__, _C.build_decision, _C.cpu_instruction_set()):
        assert part in printed


def test_module_can_be_run():
    result = subprocess.run(
        [sys.executable, "-m", "fused_recoder", "env"], text=True, capture_output=True
    )
    assert result.returncode == 0
    assert "kernels in use" in result.stdout


def test_another_torch_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    with pytest.raises(ImportError, match=r"built against torch .* but torch 2\.99\.1 is running"):
        _build.check()


INSTRUCTION_SETS = ["baseline", "avx2", "avx512", "avx512bf16"]


def supported(name):
    code = "from fused_recoder import _C; _C.cpu_instruction_set()"
    return run(code, FUSED_RECODER_ISA=name).returncode == 0


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_instruction_set_passes_the_odd_shapes(name):
    if not supported(name):
        pytest.skip(f"this CPU has no {name}")
    tests = [str(ROOT / "tests" / f"test_{name}.py") for name in ("exactness", "precision")]
    result = subprocess.run(
        [
            sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider",
            "-k", "odd_shapes or float32_error or threads_gives or a_product_is",
        ],
        env=os.environ | {"FUSED_RECODER_ISA": name},
        text=True, capture_output=True, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:]
    check = run("from fused_recoder import _C; print(_C.cpu_instruction_set())",
                FUSED_RECODER_ISA=name)  # fmt: skip
    assert check.stdout.strip() == name


def test_an_unknown_instruction_set_is_refused():
    code = "from fused_recoder import _C; _C.cpu_instruction_set()"
    result = run(code, FUSED_RECODER_ISA="sse9")
    assert result.returncode != 0
    assert "FUSED_RECODER_ISA must be one of " in result.stderr
    assert "; got 'sse9'" in result.stderr


def test_kernels_use_more_than_one_thread():
    """A build without OpenMP would silently run serially."""
    assert torch.backends.openmp.is_available()
    libraries = subprocess.run(["ldd", _C.__file__], text=True, capture_output=True).stdout
    assert "gomp" in libraries or "omp" in libraries


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"USE_CUDA": "0"}, "CPU only, because USE_CUDA=0"),
        ({"DEBUG": "1"}, "debug build"),
        ({"FORCE_CUDA": "1"}, "FORCE_CUDA=1, but "),
        ({"FORCE_CUDA": "1", "USE_CUDA": "0"}, "contradict each other"),
        ({}, "CPU kernels for baseline"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_setup_prints_its_decision(environment, message):
    clean = {k: v for k, v in os.environ.items() if k not in ("USE_CUDA", "FORCE_CUDA", "DEBUG")}
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT, env=clean | environment, text=True, capture_output=True,
    )  # fmt: skip
    assert message in result.stderr
