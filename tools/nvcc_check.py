"""Compiles the CUDA kernels with nvcc for every architecture and fails on any register spill.
Prints registers and shared memory per kernel: `python -m tools.nvcc_check`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import cuda_toolkit

SOURCE = Path(__file__).resolve().parent.parent / "csrc" / "kernels" / "cuda" / "kernels.cu"
ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
# The defines are PyTorch's: an extension cannot use the conversion operators of half.
COMPILER_FLAGS = [
    "-std=c++20", "-O3", "--expt-relaxed-constexpr",
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
]  # fmt: skip
FLAGS = [*COMPILER_FLAGS, "-Xptxas", "-v,-warn-spills"]

REPORT = re.compile(
    r"Function properties for (?P<name>\S+)\s+"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\s+"
    r"ptxas info\s+: Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?"
)


@dataclass(frozen=True)
class Usage:
    kernel: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def readable(mangled: list[str]) -> list[str]:
    """`recode_kernel<__half, 2>` for what the compiler calls it."""
    names = subprocess.run(
        ["c++filt"], input="\n".join(mangled), text=True, capture_output=True, check=True
    ).stdout.splitlines()
    return [
        re.sub(r"\(.*", "", re.sub(r"fused_recoder::(cuda::)?|^void ", "", name)) for name in names
    ]


def parse(report: str, architecture: str) -> list[Usage]:
    """What `ptxas -v` reports."""
    matches = list(REPORT.finditer(report))
    names = readable([match["name"] for match in matches])
    return [
        Usage(
            name, architecture, int(match["registers"]), int(match["shared"] or 0),
            int(match["stack"]), int(match["stores"]) + int(match["loads"]),
        )
        for name, match in zip(names, matches, strict=True)
    ]  # fmt: skip


def compile_for(architecture: str, nvcc: Path, folder: Path) -> list[Usage]:
    result = subprocess.run(
        [nvcc, *FLAGS, f"-arch={architecture}", "-cubin", SOURCE, "-o",
         folder / f"{architecture}.cubin"],
        text=True, capture_output=True,
    )  # fmt: skip
    output = result.stdout + result.stderr
    if result.returncode != 0:
        raise RuntimeError(f"nvcc failed for {architecture}:\n{output[-4000:]}")
    return parse(output, architecture)


def compile_all(nvcc: Path, folder: Path) -> list[Usage]:
    """Writes folder/ARCHITECTURE.cubin for all architectures."""
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda name: compile_for(name, nvcc, folder), ARCHITECTURES)
        return [usage for part in parts for usage in part]


def spills(usages: list[Usage]) -> list[str]:
    """What is wrong, in words."""
    return [
        f"{usage.kernel} spills on {usage.architecture}: {usage.spill_bytes} bytes, "
        f"stack frame {usage.stack_bytes} bytes"
        for usage in usages
        if usage.spill_bytes > 0 or usage.stack_bytes > 0
    ]


def table(usages: list[Usage]) -> str:
    """Registers per architecture, and shared memory, in Markdown."""
    by_place = {(usage.kernel, usage.architecture): usage for usage in usages}
    lines = [f"| kernel | {' | '.join(ARCHITECTURES)} | shared bytes |"]
    lines.append("|---" * (len(ARCHITECTURES) + 2) + "|")
    for kernel in sorted({usage.kernel for usage in usages}):
        row = [by_place[kernel, name] for name in ARCHITECTURES]
        shared = "/".join(str(n) for n in sorted({usage.shared_bytes for usage in row}))
        registers = " | ".join(str(usage.registers) for usage in row)
        lines.append(f"| `{kernel}` | {registers} | {shared} |")
    return "\n".join(lines)


def main() -> int:
    nvcc = cuda_toolkit.find_nvcc()
    if nvcc is None:
        print("skipped: there is no nvcc (set CUDA_HOME or pip install nvidia-cuda-nvcc)")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        usages = compile_all(nvcc, Path(folder))
    print(table(usages))
    wrong = spills(usages)
    kernels = len({usage.kernel for usage in usages})
    print(f"\n{kernels} kernels for {', '.join(ARCHITECTURES)}: {len(wrong)} with spills")
    print("\n".join(wrong))
    return 1 if wrong or not usages else 0


if __name__ == "__main__":
    sys.exit(main())
