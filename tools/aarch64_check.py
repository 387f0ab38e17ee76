"""The CPU kernels on another architecture: `python -m tools.aarch64_check`. They are compiled for
aarch64 and for the machine at hand, with the flags that setup.py gives, run on the same numbers, by
QEMU where that is needed, and give the same results but for rounding (aarch64 fuses products)."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .clean_environment import ROOT, run

FLAGS = ["-std=c++20", "-O3", "-Wall", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math",
         "-DFR_ISA=baseline", "-DFR_VECTOR_BYTES=16"]  # fmt: skip
SOURCES = ["tests/arch/kernels.cpp", "csrc/kernels/cpu/kernels.cpp"]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TOLERANCE = {"4": 2e-5, "8": 1e-13}  # relative to the largest element, by bytes of the type
Results = dict[str, list[float]]


def results(compiler: str, folder: Path, *emulator: str) -> Results:
    """What the kernels give, by kernel, argument and size of the type."""
    program = folder / compiler
    run(compiler, *FLAGS, *SOURCES, "-o", program, cwd=ROOT)
    lines = subprocess.check_output([*emulator, program], text=True).splitlines()
    return {name: [float(x) for x in values] for name, *values in (l.split() for l in lines)}


def worst(ours: Results, theirs: Results) -> dict[str, float]:
    """The largest error relative to what is allowed, by kernel and argument."""
    assert ours.keys() == theirs.keys()
    found = {}
    for name, values in ours.items():
        scale = max(abs(x) for x in values) or 1.0
        error = max(abs(a - b) for a, b in zip(values, theirs[name], strict=True)) / scale
        # A NaN compares false to everything: it must not pass.
        found[name] = error / TOLERANCE[name[-1]] if error == error else float("inf")
    return found


def main() -> None:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing: apt-get install g++-aarch64-linux-gnu qemu-user")
    with tempfile.TemporaryDirectory() as folder:
        ours = results("g++", Path(folder))
        theirs = results(COMPILER, Path(folder), EMULATOR, "-L", "/usr/aarch64-linux-gnu")
    found = worst(ours, theirs)
    name = max(found, key=found.__getitem__)
    size, numbers = name[-1], sum(map(len, ours.values()))
    print(
        f"{len(found)} results of {platform.machine()} and aarch64, {numbers} numbers; the worst, "
        f"{name[:-1]} in {size} bytes, at {found[name]:.2f} of what is allowed"
    )
    if found[name] > 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
