"""Trains in a child process that is killed again and again at random moments, then to the end.

    python tests/killing.py TEXT OUT KILLS SEED

The children are forked from this process, which has everything imported: so most of their life,
and most of the kills, fall into training and writing. Prints what happened as JSON.
"""

import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # the optimizer imports it at its first step: too late for a forked child
from tiny_text import TINY

from fused_recoder.training import Config, Trainer
from fused_recoder.training.evaluation import CHECKPOINT

SETTINGS = TINY | {"epochs": 10, "dropout": 0.2, "checkpoint_seconds": 0, "step": "learned"}


def train(text: str, out: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    if (out / CHECKPOINT).exists():
        Trainer.resume(out).train()
    else:
        Trainer(Config.from_dict(SETTINGS), text, out).train()


def wait_a_while(child, out: Path, draw: random.Random) -> None:
    """Some time for nothing but the start, or some steps; then a moment more."""
    steps = draw.randint(0, 15)
    if steps == 0:
        time.sleep(draw.uniform(0, 0.2))
    end = rows(out) + steps
    while child.is_alive() and rows(out) < end:
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.01))


def rows(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    text, out, kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    draw, happened = random.Random(seed), {"killed": 0, "exit": None, "halves": 0}
    fork = multiprocessing.get_context("fork")
    while True:
        child = fork.Process(target=train, args=(text, out))
        child.start()
        if happened["killed"] < kills:
            wait_a_while(child, out, draw)
            child.kill()
        child.join()
        happened["halves"] += len(list(out.glob("*.tmp")))  # files it was writing
        if child.exitcode != -9:
            happened["exit"] = child.exitcode
            break
        happened["killed"] += 1
    print(json.dumps(happened))


if __name__ == "__main__":
    main()
