"""Interleaved timing and peak memory.

Machines are noisy, so contenders take turns, round by round, and what is reported is the ratio of
two of them within a round: its median and quartiles over the rounds.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import torch
from tqdm import tqdm

STEADY_SECONDS = 1.0  # of a measurement; longer jobs run once
# What contenders compute in, by name, and what autocast rounds to.
PRECISIONS = {
    "float32": None, "tf32": None, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
precision = "float32"


def use_precision(name: str) -> None:
    """Of all contenders alike: by itself cuDNN takes TF32 for float32, and cuBLAS does not."""
    global precision
    precision = name
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        backend.allow_tf32 = name != "float32"


def autocast() -> torch.autocast:
    """For the forward pass of a job."""
    dtype = PRECISIONS[precision]
    kind = torch.get_default_device().type
    return torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None)


def seconds(f: Callable[[], object]) -> float:
    finish_all_work()
    start = time.perf_counter()
    f()
    finish_all_work()
    return time.perf_counter() - start


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def finish_all_work() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def steady_seconds(f: Callable[[], object], about: float) -> float:
    """Seconds per call of something that takes `about` so long.

    Short jobs are repeated, and a first call is not counted: it finds caches and the allocator as
    the contender before has left them.
    """
    repetitions = min(10, round(STEADY_SECONDS / about))
    if repetitions <= 1:
        return seconds(f)
    f()
    return seconds(lambda: [f() for _ in range(repetitions)]) / repetitions


def interleave(
    contenders: dict[str, Callable[[], object]], rounds: int, label: str, gemm_size: int
) -> tuple:
    """Seconds of the contenders, and of a large GEMM right before each: two {name: [rounds]}."""
    about = {}
    for name, f in tqdm(contenders.items(), desc=f"{label}: warm-up", leave=False):
        f()
        about[name] = seconds(f)
    times = {name: [] for name in contenders}
    gemm = {name: [] for name in contenders}
    large = large_gemms(gemm_size)
    for _ in tqdm(range(rounds), desc=label, leave=False):
        for name, f in contenders.items():
            # The best of three: the limit is what undisturbed arithmetic reaches at this moment.
            gemm[name].append(min(seconds(multiply) for multiply in large for _ in range(3)))
            times[name].append(steady_seconds(f, about[name]))
    return times, gemm


def large_gemms(size: int) -> list[Callable[[], object]]:
    """Ways to multiply two large matrices. The limit is the fastest: MKL, which `torch.mm` takes,
    leaves AVX-512 unused on some machines, and oneDNN does not."""
    a = torch.randn(size, size)
    found = [lambda: torch.mm(a, a)]
    if not on_gpu() and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(a, size)
        linear = torch.ops.mkldnn._linear_pointwise
        found.append(lambda: linear(a, packed, None, "none", [], ""))
    return found


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """25 %, 50 %, 75 %."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(times: dict, fast: str, slow: str) -> tuple[float, float, float]:
    """How many times faster `fast` is than `slow`: quartiles over the rounds."""
    return quartiles([s / f for s, f in zip(times[slow], times[fast], strict=True)])


def peak_megabytes() -> float:
    """Highest memory of this process so far (not of the one that started it): what is allocated on
    the GPU, or what is resident."""
    if on_gpu():
        return torch.cuda.max_memory_allocated() / 2**20
    with open("/proc/self/status") as f:
        line = next(line for line in f if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def in_a_fresh_process(f: Callable, *arguments, environment: dict | None = None):
    """f(*arguments) with this process's threads, device and precision, but not its past: what the
    allocator has done before decides, among other things, how many page faults the plain LM has."""
    with (
        patch.dict("os.environ", environment or {}),
        ProcessPoolExecutor(1, get_context("spawn"), _as_here, _settings()) as process,
    ):
        return process.submit(f, *arguments).result()


def _settings() -> tuple:
    return torch.get_num_threads(), str(torch.get_default_device()), precision


def _as_here(threads: int, device: str, precision: str) -> None:
    torch.set_num_threads(threads)
    use_precision(precision)
    if device != "cpu":
        torch.set_default_device(device)


def memory_in_a_fresh_process(case: str, contender: str) -> float | None:
    """Peak extra memory of the first step after a tiny one, in MB."""
    result = subprocess.run(
        [
            sys.executable, "-m", "bench", "--device", str(torch.get_default_device()),
            "--precision", precision, "--memory-of", case, contender,
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if result.returncode != 0:
        tqdm.write(f"no memory figure for {contender}: {result.stderr.splitlines()[-1]}")
        return None
    return json.loads(result.stdout.splitlines()[-1])


def machine() -> dict:
    """What a reader needs to judge the numbers."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            model = next(line for line in f if line.startswith("model name")).split(":")[1].strip()
    except (OSError, StopIteration):
        pass
    from fused_recoder import _C, __version__

    return {
        "cpu": model,
        "gpu": torch.cuda.get_device_name() if on_gpu() else None,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "kernels": _C.cpu_instruction_set(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fused_recoder": __version__,
    }
