"""`fused-recoder reproduce`: the thesis's tables and the study of this project."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import (
    controls,
    controls_report,
    interventions,
    signal_shape,
    study,
    study_report,
    theorems,
)
from .explore import explore
from .jobs import Interrupted, Job, work
from .plots import draw_table
from .report import write_table
from .rows import gather
from .scales import SCALES, Scale, first_lines
from .tables import TABLES, Table

INTERVENTIONS = "interventions"


@dataclass(frozen=True)
class Experiment:
    jobs: Callable[[Scale, Path, int], list[Job]]  # of a scale, folder and number of seeds
    report: Callable[[Scale, Path, int], str]  # writes tables and figures, returns Markdown


def _of_table(make: Callable[[Scale, int], Table]) -> Experiment:
    def report(scale: Scale, out: Path, seeds: int) -> str:
        table = make(scale, seeds)
        draw_table(table, out)
        return write_table(table, out)

    return Experiment(lambda scale, out, seeds: make(scale, seeds).jobs(), report)


EXPERIMENTS = {name: _of_table(make) for name, make in TABLES.items()} | {
    "theorems": Experiment(theorems.jobs, theorems.report),
    "signal_shape": Experiment(signal_shape.jobs, signal_shape.report),
    "study": Experiment(study.jobs, study_report.report),
    "explore": _of_table(explore),
    "controls": Experiment(controls.jobs, controls_report.report),
    INTERVENTIONS: Experiment(interventions.jobs, interventions.report),
}


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "reproduce",
        help="the thesis's tables, and whether recoding beats its baseline",
        description="Trains and measures what the chosen experiments need, in one folder per job. "
        "Start it again to go on; start it several times to share the jobs among processes.",
    )
    parser.add_argument("data", type=Path, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument(
        "experiments", nargs="*", metavar="experiment",
        help=f"of {', '.join(EXPERIMENTS)}; if absent all but the last, which needs --agreement",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of the jobs and results")
    parser.add_argument("--scale", choices=list(SCALES), default="smoke", help="size of the models")
    parser.add_argument("--seeds", type=int, help="runs per model; 4, or 2 at scale smoke")
    parser.add_argument("--epochs", type=int, help="of a training run, instead of the scale's")
    parser.add_argument(
        "--agreement", type=Path,
        help=f"folder with giulianelli/ and gulordava/, for {INTERVENTIONS}; the text should cover "
        "their words, as WikiText-2 does",
    )  # fmt: skip
    parser.add_argument(
        "--report", action="store_true", help="no jobs: tables and figures of what is done"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    if unknown := [name for name in arguments.experiments if name not in EXPERIMENTS]:
        raise ValueError(f"experiment must be of {list(EXPERIMENTS)}, got {unknown}")
    for name in ("seeds", "epochs"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    names = arguments.experiments or [name for name in EXPERIMENTS if name != INTERVENTIONS]
    if INTERVENTIONS in names and arguments.agreement is None and not arguments.report:
        raise ValueError(f"{INTERVENTIONS} needs --agreement, the folder of the agreement sets")
    scale, out, data = SCALES[arguments.scale], arguments.out, arguments.data
    seeds = arguments.seeds or scale.seeds
    if arguments.epochs:
        scale = replace(scale, plain=scale.plain.replace(epochs=arguments.epochs))
    if scale.lines is not None and not arguments.report:
        data = first_lines(data, scale.lines, out)
    say = functools.partial(print, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    gather(out)
    try:
        for name in names:
            experiment = EXPERIMENTS[name]
            if not arguments.report:
                jobs = functools.partial(experiment.jobs, scale, out, seeds)
                if name == INTERVENTIONS:
                    jobs = functools.partial(jobs, sets=arguments.agreement)
                work(jobs, out, data, say=say)
            say(experiment.report(scale, out, seeds))
    except Interrupted:
        say("stopped; start the same command again to go on")
        return 130
    return 0
