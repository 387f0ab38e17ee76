"""make fuzz SECONDS=600, or: python -m tests.fuzz [FUZZER ...] [--seconds S] [--case SEED]

Runs fuzzers in turn with new seeds until the time is over; each finding is printed with the command
that repeats it."""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import sys
import time
from contextlib import ExitStack

from tqdm import tqdm

from .child import Child

FUZZERS = ("differential", "reading", "calls", "files", "commands")


def repeat(fuzzer: str, seed: int) -> None:
    """One case in this process, where a debugger reaches it."""
    module = importlib.import_module(f"tests.fuzz.{fuzzer}")
    print(f"{fuzzer} {seed}: {module.describe(seed)}")
    module.check(seed)
    print("nothing found")


def search(fuzzers: list[str], seconds: float, first: int) -> int:
    """How many cases went wrong."""
    found = tried = 0
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        children = [stack.enter_context(Child(fuzzer)) for fuzzer in fuzzers]
        bar = stack.enter_context(tqdm(total=round(seconds), unit="s", disable=None))
        for seed in itertools.count(first):
            for child in children:
                if time.monotonic() >= end:
                    print(f"{tried} cases from seed {first} on, {found} findings")
                    return found
                error = child.check(seed)
                tried += 1
                if error is not None:
                    found += 1
                    bar.write(f"python -m tests.fuzz {child.fuzzer} --case {seed}\n{error}\n")
                bar.n = min(bar.total, round(seconds - (end - time.monotonic())))
                bar.set_postfix(cases=tried, findings=found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("fuzzers", nargs="*", metavar="FUZZER", help=", ".join(FUZZERS))
    parser.add_argument("--seconds", type=float, default=60, help="how long")
    parser.add_argument("--first", type=int, help="seed to start from; by chance if absent")
    parser.add_argument("--case", type=int, metavar="SEED", help="one case, in this process")
    options = parser.parse_args()
    for name in options.fuzzers:
        if name not in FUZZERS:
            parser.error(f"FUZZER must be one of {', '.join(FUZZERS)}, got {name!r}")
    if options.case is not None:
        if len(options.fuzzers) != 1:
            parser.error(f"--case needs one FUZZER, got {len(options.fuzzers)}")
        repeat(options.fuzzers[0], options.case)
        return 0
    first = random.SystemRandom().randrange(10**9) if options.first is None else options.first
    return 1 if search(options.fuzzers or list(FUZZERS), options.seconds, first) else 0


if __name__ == "__main__":
    sys.exit(main())
