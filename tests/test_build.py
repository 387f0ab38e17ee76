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
    built = _build.minor(_C.torch_version)
    said = rf"torch 2\.99\.1\+cpu is running, but .* built against torch {built}"
    with pytest.raises(ImportError, match=said) as refusal:
        _build.check()
    assert "--no-deps" in str(refusal.value)
    assert "torch2.99 in its name" in str(refusal.value)


def test_another_patch_release_of_torch_is_accepted(monkeypatch):
    monkeypatch.setattr(torch, "__version__", f"{_build.minor(_C.torch_version)}.99")
    _build.check()


INSTRUCTION_SETS = ["baseline", "avx2", "avx512"]


def supported(name):
    flags = torch.backends.cpu.get_cpu_capability()
    order = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}
    return INSTRUCTION_SETS.index(name) <= order.get(flags, 0)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_instruction_set_passes_the_odd_shapes(name):
    if not supported(name):
        pytest.skip(f"this CPU has no {name}")
    tests = ROOT / "tests" / "test_exactness.py"
    result = subprocess.run(
        [
            sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider",
            "-k", "odd_shapes or float32_error or threads_gives",
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
    assert "must be baseline, avx2 or avx512, got 'sse9'" in result.stderr


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
