"""Takes every barrier out of nvcc's code, one at a time, and runs the checks of its kernel:
`python tests/ptx/barriers.py` prints those that nobody misses. A few minutes."""

from __future__ import annotations

import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for running it by hand
from ptx import build, report

ENTRY = re.compile(r"\.entry _ZN13fused_recoder4cuda\d+(?P<kernel>\w+?)_kernelI(?P<type>.)")
LOCATION = re.compile(r"\.loc\s+\d+ \d+ \d+(, function_name \S+, inlined_at \d+ (?P<line>\d+))?")
TYPES = {"f": "float", "d": "double", "6": "half", "1": "bfloat16", "L": ""}


@dataclass(frozen=True)
class Barrier:
    line: int  # of the PTX, from 0
    caller: str  # line of the kernel's own source
    kernel: str
    type: str


def find(ptx: list[str]) -> list[Barrier]:
    kernel = kind = caller = ""
    found = []
    for number, line in enumerate(ptx):
        if match := ENTRY.search(line):
            kernel, kind = match["kernel"], TYPES[match["type"]]
        elif match := LOCATION.search(line):
            caller = match["line"] or caller
        elif line.strip().startswith("bar.sync"):
            found.append(Barrier(number, caller, kernel, kind))
    return found


def checks_of(barrier: Barrier, checks: list[str]) -> list[str]:
    name = "softmax_signal" if barrier.kernel == "softmax_scan" else barrier.kernel
    return [c for c in checks if c.startswith(name) and c.endswith(barrier.type)]


def is_noticed(barrier: Barrier, ptx: list[str], checks: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as name:
        without = Path(name, "without.ptx")
        without.write_text("\n".join([*ptx[: barrier.line], "", *ptx[barrier.line + 1 :]]))
        return any(
            report.run("kernels", check, ptx=without).returncode != 0
            for check in checks_of(barrier, checks)
        )


def main() -> None:
    ptx = (report.folder() / "kernels.ptx").read_text().split("\n")
    checks = report.run("kernels", "--list").stdout.split()
    barriers = find(ptx)
    with ThreadPoolExecutor(2) as pool:
        noticed = pool.map(lambda barrier: is_noticed(barrier, ptx, checks), barriers)
        results = list(tqdm(noticed, total=len(barriers)))
    spare = [barrier for barrier, found in zip(barriers, results, strict=True) if not found]
    print(f"{len(barriers)} barriers; {len(spare)} are missed by no check")
    for barrier in spare:
        place = f"line {barrier.caller} of its source, {barrier.line + 1} of the PTX"
        print(f"{barrier.kernel} <{barrier.type}>: {place}")


if __name__ == "__main__":
    if reason := build.missing():
        sys.exit(f"cannot build: {reason}")
    main()
