"""`python -m bench`: the modules against the reference, nn.LSTM and themselves without a signal."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from . import measure, report
from .cases import CASES, COMPILED, CONTENDERS, REFERENCE, make_contender


def run_case(name: str, signal: str, rounds: int, skip: set[str], memory: bool) -> dict:
    shape = CASES[name]
    torch._dynamo.reset()  # compiled for this shape, not for a general one
    contenders, failed = {}, {}
    for contender in CONTENDERS:
        if contender in skip:
            continue
        step = make_contender(contender, shape, signal)
        try:
            step()
        except Exception as error:  # a compiler that gives up is a result, not a crash
            if contender != COMPILED:
                raise
            failed[contender] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        contenders[contender] = step
    gemm = "large GEMM"
    times = measure.interleave(contenders | {gemm: measure.large_gemm()}, rounds, name)
    rows = [
        {
            "name": contender,
            "tokens_per_second": shape.B * shape.T / statistics.median(times[contender]),
            "relative": measure.ratio(times, contender, REFERENCE),
            "memory": measure.memory_in_a_fresh_process(name, contender) if memory else None,
            "seconds": times[contender],
        }
        for contender in contenders
    ]
    rows += [{"name": contender, "failed": why} for contender, why in failed.items()]
    flops = 2 * measure.LARGE_GEMM**3 / statistics.median(times[gemm])
    return {
        "name": name,
        "shape": str(shape),
        "signal": signal,
        "rows": rows,
        "gemm_gflops": flops / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, default=["thesis", "small", "reading"])
    parser.add_argument("--signal", default="surprisal", choices=["surprisal", "nll", "entropy"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compiled", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    parser.add_argument("--out", type=Path, help="folder for results.json and results.md")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    if arguments.memory_of:
        case, contender = arguments.memory_of
        make_contender(contender, CASES["tiny"], arguments.signal)()
        step = make_contender(contender, CASES[case], arguments.signal)
        before = measure.peak_megabytes()
        step()
        print(json.dumps(measure.peak_megabytes() - before))
        return

    skip = {COMPILED} if arguments.no_compiled else set()
    results = {"machine": measure.machine(), "rounds": arguments.rounds, "cases": []}
    for name in arguments.case:
        case = run_case(name, arguments.signal, arguments.rounds, skip, not arguments.no_memory)
        results["cases"].append(case)
        print(report.markdown(results | {"cases": [case]}), flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
        (arguments.out / "results.md").write_text(report.markdown(results))


if __name__ == "__main__":
    main()
