"""Has a single bit changed? Digests of results, traces and gradients over all options, instruction
sets and numbers of threads, to record before a change and to compare with after it:

    python -m tools.digest record FILE.json
    python -m tools.digest compare FILE.json

`--emulator` adds CUDA's kernels, run on the CPU (tests/emu; compiled at the first time), `--only`
takes the cases whose names match. A case that raises is digested as its message, one that kills its
process as the signal; `record` fails if one tells nothing (is not finite, or zero)."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from . import run_case
from .digest_cases import ERRORS, cpu_cases, emulator_cases

ROOT = Path(__file__).resolve().parent.parent
AVX512 = {"avx2", "fma", "avx512f", "avx512dq", "avx512bw", "avx512vl"}
INSTRUCTION_SETS = {  # and what they need of a CPU
    "baseline": set(),
    "avx2": {"avx2", "fma"},
    "avx512": AVX512,
    "avx512bf16": AVX512 | {"avx512_bf16"},
}
THREADS = (1, 2)
EMULATOR = "emulator"

Digests = dict[str, str]  # by the name of a tensor; an exception is called "error"
Run = dict[str, Digests]  # by the name of a case


# ----------------------------------------------------------------------------------- in a process


def digest(tensor: Tensor | None) -> str:
    """Of dtype, shape and bytes."""
    if tensor is None:
        return "no gradient"
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + data).hexdigest()[:16]


def digests_of(compute: Callable[[], dict[str, Tensor | None]]) -> Digests:
    """Of what a function computes, or its exception."""
    try:
        results = compute()
        run_case.check_telling(results)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: digest(tensor) for name, tensor in results.items()}


def jobs(emulator: bool, only: str = "") -> dict[str, Callable[[], dict[str, Tensor | None]]]:
    """What is computed, by name, in order."""
    cases = emulator_cases() if emulator else cpu_cases()
    named = {case.name: lambda case=case: run_case.run(case) for case in cases}
    named |= {} if emulator else ERRORS
    return {name: job for name, job in named.items() if re.search(only, name)}


def child(emulator: bool, threads: int, first: int, only: str) -> None:
    """Prints a line [name, digests] per job, from number `first` on."""
    torch.set_num_threads(threads)
    kernels = nullcontext()
    if emulator:
        sys.path.insert(0, str(ROOT / "tests"))
        from emu.backend import kernels_of_cuda

        kernels = kernels_of_cuda()
    with kernels:
        for name, job in list(jobs(emulator, only).items())[first:]:
            print(json.dumps([name, digests_of(job)]), flush=True)


# -------------------------------------------------------------------------------------- processes


def cpu_flags() -> list[str]:
    """What this CPU can do, as Linux says."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return sorted(next(line for line in lines if line.startswith("flags")).split()[2:])


def runs(emulator: bool) -> dict[str, tuple[str, int]]:
    """(instruction set, or the emulator, and number of threads) of every run, by its name."""
    flags = set(cpu_flags())
    usable = [isa for isa, needed in INSTRUCTION_SETS.items() if needed <= flags]
    chosen = {f"{isa}, threads: {n}": (isa, n) for isa in usable for n in THREADS}
    return chosen | ({EMULATOR: (EMULATOR, 1)} if emulator else {})


def digest_lines(kind: str, threads: int, first: int, only: str) -> Iterator[tuple[str, Digests]]:
    """What a child says until its end; the last one is (signal, {}) if it was killed."""
    # Threads that wait do not spin: there may be more of them than cores to spare.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    environment |= {} if kind == EMULATOR else {"FUSED_RECODER_ISA": kind}
    command = [sys.executable, "-m", "tools.digest", "child", "--threads", str(threads),
               "--first", str(first), "--only", only]  # fmt: skip
    command += ["--emulator"] if kind == EMULATOR else []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            yield tuple(json.loads(line))
    if process.returncode > 0:
        raise RuntimeError(f"a process of {kind} ended with exit code {process.returncode}")
    if process.returncode < 0:
        yield f"killed by {signal.Signals(-process.returncode).name}", {}


def run_all(kind: str, threads: int, only: str, bar: tqdm) -> Run:
    """A run. A job that kills its process is known by that, and the next process goes on."""
    names, result = list(jobs(kind == EMULATOR, only)), {}
    while len(result) < len(names):
        for name, digests in digest_lines(kind, threads, len(result), only):
            if not digests:
                name, digests = names[len(result)], {"error": name}
            result[name] = digests
            bar.update()
    return result


def record(emulator: bool, only: str) -> dict:
    """What goes into a file."""
    wanted = runs(emulator)
    total = sum(len(jobs(kind == EMULATOR, only)) for kind, _ in wanted.values())
    with tqdm(total=total, unit="case", smoothing=0.05) as bar:
        done = {}
        for name, (kind, threads) in wanted.items():
            bar.set_description(name)
            done[name] = run_all(kind, threads, only, bar)
    header = {"torch": torch.__version__, "machine": platform.machine(), "cpu": cpu_flags()}
    return {"header": header, "runs": done}


# -------------------------------------------------------------------------------------- comparing


def untelling(recorded: dict) -> list[str]:
    """Cases that would not notice a change."""
    return [
        f"{run}: {name}: {digests['error']}"
        for run, cases in recorded["runs"].items()
        for name, digests in cases.items()
        if digests.get("error", "").startswith(run_case.Insensitive.__name__)
    ]


def _difference(before: Digests, after: Digests) -> str:
    if "error" in before or "error" in after:
        was, now = (d.get("error", "a result") for d in (before, after))
        return f"was {was!r}, is {now!r}"
    changed = [n for n in before if n in after and before[n] != after[n]]
    parts = {"changed": changed, "missing": [n for n in before if n not in after]}
    parts["new"] = [n for n in after if n not in before]
    return "; ".join(f"{how}: {', '.join(names)}" for how, names in parts.items() if names)


def differences(before: dict, after: dict) -> list[str]:
    """In words, one per case: run, name, and the tensors that differ. Runs that only one of the two
    has are one difference each."""
    was, now = before["header"], after["header"]
    found = [f"{key} was {was[key]}, is {now[key]}" for key in was if was[key] != now[key]]
    old, new = before["runs"], after["runs"]
    found += [f"{run}: missing" for run in old if run not in new]
    found += [f"{run}: new" for run in new if run not in old]
    for run in (run for run in old if run in new):
        found += [f"{run}: {name}: missing" for name in old[run] if name not in new[run]]
        found += [f"{run}: {name}: new" for name in new[run] if name not in old[run]]
        for name in old[run]:
            if name in new[run] and old[run][name] != new[run][name]:
                found.append(f"{run}: {name}: {_difference(old[run][name], new[run][name])}")
    return found


def _kept(recorded: dict, emulator: bool, only: str) -> dict:
    """The part of a file that is asked for."""
    kept = {
        run: {name: d for name, d in cases.items() if re.search(only, name)}
        for run, cases in recorded["runs"].items()
        if emulator or run != EMULATOR
    }
    return recorded | {"runs": kept}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.digest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["record", "compare", "child"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--emulator", action="store_true", help="CUDA's kernels on the CPU, too")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names match")
    parser.add_argument("--threads", type=int, default=1, help="of a child")
    parser.add_argument("--first", type=int, default=0, help="job of a child")
    options = parser.parse_args(arguments)
    if options.command != "child" and options.file is None:
        parser.error(f"{options.command} needs a file")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.command == "child":
        child(options.emulator, options.threads, options.first, options.only)
        return 0
    before = None
    if options.command == "compare":
        before = _kept(json.loads(options.file.read_text()), options.emulator, options.only)
    after = record(options.emulator, options.only)
    if before is None:
        options.file.write_text(json.dumps(after, indent=0))
    found = untelling(after) if before is None else differences(before, after)
    print(*found, sep="\n", end="\n" if found else "")
    cases = sum(len(cases) for cases in after["runs"].values())
    verb = "tell nothing" if before is None else "differ"
    print(f"{cases} cases in {len(after['runs'])} runs, {len(found)} {verb}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
