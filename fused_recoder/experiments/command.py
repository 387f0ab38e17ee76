"""`fused-recoder reproduce`: the thesis's tables and the study of this project."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from . import study, tables
from .jobs import Interrupted, work
from .plots import draw_table
from .report import write_results, write_table
from .scales import SCALES, first_lines

EXPERIMENTS = {**tables.EXPERIMENTS, "study": study.jobs}


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
        help=f"of {', '.join(EXPERIMENTS)}; all if absent",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of the jobs and results")
    parser.add_argument("--scale", choices=list(SCALES), default="smoke", help="size of the models")
    parser.add_argument("--seeds", type=int, default=4, help="runs per model")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if unknown := [name for name in arguments.experiments if name not in EXPERIMENTS]:
        raise ValueError(f"experiment must be of {list(EXPERIMENTS)}, got {unknown}")
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    scale, out, data = SCALES[arguments.scale], arguments.out, arguments.data
    if scale.lines is not None:
        data = first_lines(data, scale.lines, out)
    say = functools.partial(print, flush=True)
    try:
        for name in arguments.experiments or EXPERIMENTS:
            make_jobs = EXPERIMENTS[name]
            work(functools.partial(make_jobs, scale, out, arguments.seeds), out, data, say=say)
            if name in tables.TABLES:
                table = tables.TABLES[name](scale, arguments.seeds)
                say(write_table(table, out))
                draw_table(table, out)
            write_results(out)
    except Interrupted:
        say("stopped; start the same command again to go on")
        return 130
    return 0
