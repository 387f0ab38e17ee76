"""Runs the programs of this folder and reads what they have counted."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from . import build


@dataclass
class Requests:
    """Accesses of whole warps: `parts` are sectors of global, rounds of shared memory; `least` as
    many as the same bytes would take side by side."""

    count: int = 0
    parts: int = 0
    least: int = 0
    bytes: int = 0

    def __iadd__(self, other: Requests) -> Requests:
        self.count += other.count
        self.parts += other.parts
        self.least += other.least
        self.bytes += other.bytes
        return self


@dataclass
class Kernel:
    launches: int
    warps: int
    instructions: int  # of warps
    lanes: int  # that took part in them
    doubles: int  # instructions in double precision
    branches: int
    parted: int
    loads: Requests
    stores: Requests
    shared: Requests
    places: dict[str, Requests] = field(default_factory=lambda: defaultdict(Requests))


@dataclass
class Report:
    kernels: dict[str, Kernel]
    forms: dict[str, bool]  # whether it was executed


@cache
def folder() -> Path:
    return build.build()


def run(program: str, *arguments: str, ptx: Path | None = None, **environment: str):
    """The finished process. `ptx`: another file than the program's own."""
    file = ptx or folder() / f"{program}.ptx"
    return subprocess.run(
        [folder() / program, *arguments],
        env=os.environ | {"PTX_FILE": str(file)} | environment,
        text=True, capture_output=True,
    )  # fmt: skip


def counted(program: str, *arguments: str, **environment: str) -> Report:
    """What a run has counted; it must succeed."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "report")
        result = run(program, *arguments, PTX_REPORT=str(path), **environment)
        if result.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {result.stdout}{result.stderr}")
        return read(path.read_text())


def read(text: str) -> Report:
    """Of the lines that launch.cpp writes."""
    report = Report({}, {})
    for line in text.splitlines():
        kind, name, *rest = line.split("\t")
        if kind == "kernel":
            numbers = [int(n) for n in rest]
            requests = [Requests(*numbers[i : i + 4]) for i in (7, 11, 15)]
            report.kernels[name] = Kernel(*numbers[:7], *requests)
        elif kind == "access":
            place = f"{rest[0]} {rest[1]}"
            report.kernels[name].places[place] += Requests(*map(int, rest[2:]))
        else:
            report.forms[name] = report.forms.get(name, False) or kind == "executed"
    return report
