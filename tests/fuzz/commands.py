"""Command lines of all subcommands with something wrong in them: they do their work, stop when
asked, or say in some lines what is wrong; never a traceback. Flags are those the parser knows."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import random
import signal
import sys
import threading
import warnings

import torch

from fused_recoder import cli

from . import files

SECONDS = 3.0  # then it is asked to stop, as by ^C
TINY = [
    "--hidden-size=3", "--num-layers=1", "--batch-size=4", "--bptt=9", "--epochs=1",
    "--log-every=2", "--device=cpu", "--threads=1",
]  # fmt: skip
# Each works as it stands, in a copy of the folder of `files.workshop`.
LINES: dict[str, list[list[str]]] = {
    "train": [
        ["text", "--out", "new", *TINY],
        ["text", "--out", "new", "--recipe", "recipe.toml", *TINY],
        ["text", "--out", "new", *TINY, "--signal", "mc_dropout", "--signal-option", "p=0.3"],
        ["text", "--out", "new", *TINY, "--step", "learned", "--step-option", "init=0.3"],
        ["--out", "run", "--resume", "--epochs", "2"],
    ],
    "eval": [
        ["run"],
        ["run/best.safetensors", "--data", "text", "--signal", "nll", "--step", "0.3"],
        ["plain.pt", "--data", "text", "--vocab", "words.txt", "--json", "result.json"],
    ],
    "analyze": [
        ["run", "--sentence", "the dog saw", "--out", "new", "--figures", "0"],
        ["a=run", "b=run@2,3", "--sentences", "sentences.txt", "--out", "new", "--figures", "1"],
    ],
    "reproduce": [
        ["text", "study", "--out", "study", "--report"],
        ["text", "mc_dropout", "--out", "new", "--epochs", "1", "--seeds", "1"],
    ],
    "search": [["text", "--out", "new", "--trials", "1", "--epochs", "1", "--seed", "1"]],
    "env": [[]],
}  # fmt: skip
WORDS = (
    "", "0", "1", "-1", "2", "3.5", "1e9", "1e-9", "nan", "inf", "-inf", "none", "x", "--", "-",
    "@", "9" * 30, "nll", "learned", "variational", "ensemble", "text", "run", "run/", "study",
    "plain.pt", "words.txt", "recipe.toml", "run/best.safetensors", "absent", "absent/x",
    "/dev/null", "/dev/full", ".", "..x", "a" * 300, "\0", "\udcff", "$", "$x$", "=", "a=", "=b",
    "init=0.1", "init=", "init=-1", "p=2", "num_samples=1", 'x={"a":1}', "init=[1]",
    "sqlite:///s.db", "sqlite://", "nonsense://x", "mysql://a:b@c/d", "@0", "run@", "run@1",
    "run,run", "wörter", "{}", "[]", "%s",
)  # fmt: skip


@functools.cache
def _flags() -> dict[str, list[str]]:
    """Of every subcommand, by its name. `--traceback` asks for one."""
    parser = cli.make_parser()
    subcommands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: [flag for a in command._actions for flag in a.option_strings if flag != "--traceback"]
        for name, command in subcommands.choices.items()
        if name in LINES
    }


def _mutated(generator: random.Random, line: list[str], flags: list[str]) -> list[str]:
    """A word changed, added, removed, or moved."""
    line, word = list(line), generator.choice(WORDS)
    at = generator.randrange(len(line) + 1)
    way = generator.choice(("flag", "flag", "flag=", "change", "change", "add", "remove", "move"))
    if way in ("flag", "flag=") and flags:
        flag = generator.choice(flags)
        return [*line, f"{flag}={word}"] if way == "flag=" else [*line, flag, word]
    if way == "add" or at == len(line):
        return [*line[:at], word, *line[at:]]
    if way == "change":
        head, equals, _ = line[at].partition("=")
        return [*line[:at], f"{head}={word}" if equals else word, *line[at + 1 :]]
    rest = [*line[:at], *line[at + 1 :]]
    return rest if way == "remove" else [line[at], *rest]


def line_of(seed: int) -> list[str]:
    generator = random.Random(seed)
    command = generator.choice(("train", "train", "train", "eval", "analyze", "reproduce", "search",
                                "env"))  # fmt: skip
    line = generator.choice(LINES[command])
    for _ in range(generator.choice((1, 1, 2, 3))):
        line = _mutated(generator, line, _flags()[command])
    return [command, *line]


prepare = files.prepare


def describe(seed: int) -> str:
    return f"fused-recoder {' '.join(map(repr, line_of(seed)))}"


@contextlib.contextmanager
def _asked_to_stop(seconds: float):
    """As by ^C after some time, again and again; patience ends where the parent's does."""
    done = threading.Event()

    def ask() -> None:
        while not done.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield
    finally:
        done.set()
        asking.join()


@contextlib.contextmanager
def _into(said: io.StringIO):
    """What is printed, but for an interrupt that came while something was cleared away."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    finally:
        sys.unraisablehook = hook


def run(line: list[str]) -> tuple[object, str]:
    """Exit code and what was said, in a folder of its own."""
    said, before = io.StringIO(), os.getcwd()
    os.chdir(files.fresh_copy())
    try:
        with _into(said), _asked_to_stop(SECONDS), warnings.catch_warnings():
            cli.main(line)
    except SystemExit as end:
        return end.code, said.getvalue()
    except KeyboardInterrupt:  # it came when all was over
        return 130, said.getvalue()
    finally:
        os.chdir(before)
        torch.set_num_threads(1)
    return None, said.getvalue()


def check(seed: int) -> None:
    line = line_of(seed)
    code, said = run(line)
    what = f"{describe(seed)}: exit code {code}\n{said[-1000:]}"
    assert isinstance(code, (int, str)), what
    assert "Traceback" not in said, what
    if code == 1:
        assert f"fused-recoder {line[0]}: " in said, what
