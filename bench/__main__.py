"""`python -m bench`: recoding language models against the plain one, the reference, the limit.

The full run takes about an hour; `--only train read` or `--quick` take less.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from . import growth, measure, plots, report, run
from .cases import CASES, EXPERIMENTS, TINY
from .contenders import make_job

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = [e.name for e in EXPERIMENTS + TINY]
    parser.add_argument("--only", nargs="+", metavar="EXPERIMENT", help=f"any of {names}, or job")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does it run at all?")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--precision",
        choices=measure.PRECISIONS,
        default="float32",
        help="of all contenders: float32 without TF32, with it, or autocast (not for reading)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[torch.get_num_threads()],
        help="the first for everything, the others for the core experiments",
    )
    parser.add_argument("--no-compiled", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    parser.add_argument("--growth", action="store_true", help="also: growth with T, B, V and K")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and plots")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds already")
    parser.add_argument(
        "--page",
        action="store_true",
        help="measure nothing: write the table of --out (or bench/results) into docs/benchmarks.md",
    )
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def print_memory_of(experiment: str, contender: str) -> None:
    """Peak extra resident memory of the first step after a tiny one."""
    if experiment == "growth":
        who, shape = growth.job_for_memory(contender)
        job = "train"
    else:
        found = next(e for e in EXPERIMENTS + TINY if e.name == experiment)
        who = next(c for c in found.contenders if str(c) == contender)
        shape, job = found.shape, found.job
    make_job(who, CASES["tiny"], job)()
    step = make_job(who, shape, job)
    before = measure.peak_megabytes()
    step()
    print(json.dumps(measure.peak_megabytes() - before))


def chosen(arguments: argparse.Namespace) -> list:
    experiments = TINY if arguments.quick else EXPERIMENTS
    if arguments.only:
        wanted = set(arguments.only)
        known = {e.name for e in EXPERIMENTS + TINY} | {e.job for e in EXPERIMENTS}
        if wanted - known:
            raise SystemExit(f"--only: no experiment called {', '.join(sorted(wanted - known))}")
        experiments = [e for e in experiments if {e.name, e.job} & wanted]
    if measure.PRECISIONS[arguments.precision] is not None:
        experiments = [e for e in experiments if e.job != "read"]
    if arguments.no_compiled:
        experiments = [e.without("compiled") for e in experiments]
    if arguments.device.startswith("cuda"):
        experiments = [e.with_graphs() for e in experiments]
    return experiments


def save(results: dict, folder: Path) -> None:
    """After every experiment: an interrupted run loses nothing that was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    # A resumed run may hold experiments that have since been renamed: they come last.
    order = {e.name: i for i, e in enumerate(EXPERIMENTS + TINY)}
    results["experiments"].sort(key=lambda e: (-e["threads"], order.get(e["name"], len(order))))
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    (folder / "results.md").write_text(report.markdown(results))


def main() -> None:
    arguments = parse()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured.")
        return
    measure.use_precision(arguments.precision)
    if arguments.device != "cpu":  # as it costs every call something
        torch.set_default_device(arguments.device)
    if arguments.memory_of:
        print_memory_of(*arguments.memory_of)
        return
    if arguments.page:
        report.write_into_page(PAGE, arguments.out or HERE / "results")
        return
    results = {"machine": measure.machine(), "experiments": []}
    if arguments.resume:
        results = json.loads((arguments.out / "results.json").read_text())
    measured = {(e["name"], e["threads"]) for e in results["experiments"]}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for experiment in chosen(arguments):
            other = threads != arguments.threads[0] and not experiment.core
            if other or (experiment.name, threads) in measured:
                continue
            result = run.run(experiment, arguments.rounds, not arguments.no_memory)
            results["experiments"].append(result)
            print(report.table(result), flush=True)
            if arguments.out:
                save(results, arguments.out)
    if arguments.out and results["experiments"]:
        plots.draw(results, arguments.out)
    if arguments.growth:
        grown = growth.run(max(2, arguments.rounds // 3), not arguments.no_memory)
        if arguments.out:
            (arguments.out / "growth.json").write_text(json.dumps(grown, indent=1))
            plots.growth(grown, arguments.out / "growth.png")


if __name__ == "__main__":
    main()
