"""The build and what it says about itself."""

import fcntl
import os
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

import fused_recoder as fr
from fused_recoder import _C, _build, cli
from fused_recoder.training.model import choose_device
from tools import cuda_toolkit

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


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Some GPU")


@pytest.mark.skipif(_build.has_cuda_kernels(), reason="this build has CUDA kernels")
def test_a_gpu_that_stays_idle_is_spoken_of(a_gpu):
    with pytest.warns(UserWarning, match=r"There is a GPU, but the CPU is used: .*no CUDA kernels"):
        assert choose_device("auto") == torch.device("cpu")
    shown = cli.env()
    assert "Some GPU" in shown
    assert "WARNING        no GPU will be used: fused_recoder has no CUDA kernels here" in shown


def test_a_gpu_with_kernels_is_chosen(a_gpu, monkeypatch, recwarn):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: True)
    assert choose_device("auto") == torch.device("cuda")
    assert "WARNING" not in cli.env()
    assert not recwarn.list


def test_without_a_gpu_nothing_is_said(monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert "WARNING" not in cli.env()
    assert not recwarn.list


# A torch with CUDA on a machine without a toolkit, building until something would be compiled.
BUILD = """
import concurrent.futures, runpy, sys
import torch, torch.utils.cpp_extension as extensions
torch.version.cuda, extensions.CUDA_HOME = "13.0", None
concurrent.futures.ThreadPoolExecutor = lambda: sys.exit("compiling")
sys.argv = ["setup.py", "build_ext"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize("environment", [{}, {"USE_CUDA": "0"}], ids=str)
def test_a_build_without_the_toolkit_says_so_where_pip_hides_it(environment):
    """pip shows nothing of what a build prints; the terminal is still there."""
    terminal, inside = os.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("USE_CUDA", "FORCE_CUDA", "DEBUG")}
    result = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=ROOT, env=clean | environment, text=True,
        capture_output=True, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(inside, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    assert result.stderr.endswith("compiling\n"), result.stderr
    os.write(inside, b"the end")
    shown = os.read(terminal, 10_000).decode()
    said = "WARNING: fused_recoder is being built CPU only, because no CUDA toolkit was found"
    assert (said in shown) == (said in result.stderr) == (not environment)
    os.close(terminal), os.close(inside)


@pytest.mark.skipif(
    cuda_toolkit.find_include() is None or shutil.which("g++") is None,
    reason="the headers of the CUDA runtime and g++ are needed",
)
def test_the_cuda_backend_needs_the_runtimes_headers_alone(tmp_path):
    """Not those of cuBLAS and cuSPARSE, which are packages of their own."""
    from torch.utils.cpp_extension import include_paths

    # Only the CUDA build of torch has this header; it is empty or has switches for its libraries.
    generated = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    generated.parent.mkdir(parents=True)
    generated.touch()
    runtime = tmp_path / "runtime"  # without what else may lie beside the runtime's headers
    runtime.mkdir()
    for path in cuda_toolkit.find_include().iterdir():
        if not path.name.startswith(("cublas", "cusparse", "cusolver", "cufft", "curand")):
            (runtime / path.name).symlink_to(path)
    folders = [tmp_path, *include_paths(), runtime]
    flags = [word for folder in folders for word in ("-isystem", str(folder))]
    result = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", *flags, "csrc/engine/device_cuda.cpp"],
        cwd=ROOT, text=True, capture_output=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[:2000]


# pytest, and nothing of what else the tests of this folder import.
BARE_PYTEST = """
import sys
sys.modules |= dict.fromkeys(["hypothesis", "scipy", "sklearn", "optuna", "safetensors", "ninja"])
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only"]))
"""


def test_the_tests_for_a_gpu_need_torch_and_pytest_alone():
    result = subprocess.run(
        [sys.executable, "-c", BARE_PYTEST], cwd=ROOT, text=True, capture_output=True,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-2000:]
    assert "test_gpu.py::test_float64_agrees_with_the_oracle[loss-nll-fixed]" in result.stdout
