"""`rows.jsonl`: a line per finished job, all that tables and figures are made from.

A job that is done leaves `result.json` in its folder; `gather` takes it up into the one file, with
the job's settings and a thinned course of its training. That file alone is enough to go on:
folders may be lost or left behind. To have a job done again, remove its line and its folder.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ..training.curves import read_metrics
from ..training.files import atomic_file, fcntl, parse_json, read_json, require

ROWS, RESULT, CONFIG, METRICS = "rows.jsonl", "result.json", "config.json", "metrics.jsonl"
POINTS = 100  # of a run's course, at most
# What figures show of a run, by kind of the rows of its metrics; and step sizes, by their prefix.
COURSE = {"train": ("step", "epoch", "loss", "delta"), "epoch": ("epoch", "valid_perplexity")}
STEP_SIZE = "step_size/"
NUMBER, OBJECT, ANYTHING = ("a number", (int, float)), ("an object", dict), ("anything", object)
# Of entries whose names end so; others are the business of who reads them.
TYPES: dict[str, tuple[str, type | tuple]] = {
    "name": ("a str", str), "status": ("a str", str), "seed": ("an int", int), "config": OBJECT,
    "course": OBJECT, "perplexity": NUMBER, "per_second": NUMBER,
}  # fmt: skip


class Row(dict):
    """What a job has found. What it lacks, or has of another type, is said with the file's name."""

    def __init__(self, content: dict, where: str):
        super().__init__(content)
        self.where = where
        require(where, content, ["name", "status"])
        for key, value in content.items():
            what, kind = next((t for name, t in TYPES.items() if key.endswith(name)), ANYTHING)
            if not isinstance(value, kind):
                raise ValueError(f"{where}: {key} must be {what}, got {value!r}")

    def __missing__(self, key: str) -> NoReturn:
        raise ValueError(f"{self.where}: the row of {self.get('name')!r} has no {key!r}")


def result(out: Path, name: str) -> dict | None:
    """What a job has found; None if it is not done."""
    return read(out).get(name)


def course(out: Path, name: str) -> dict[str, list[dict]] | None:
    """How the training of a job went, rows by kind; None if it is not done or was none."""
    columns = (result(out, name) or {}).get("course")
    if columns is None:
        return None
    return {kind: _rows(table) for kind, table in columns.items()}


def _rows(columns: dict[str, list]) -> list[dict]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def read(out: Path) -> dict[str, dict]:
    """All rows of a folder by the name of their job; not to be changed."""
    try:
        state = (out / ROWS).stat()
    except FileNotFoundError:
        return {}
    return _parse(out / ROWS, (state.st_ino, state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=8)
def _parse(path: Path, state: tuple[int, int, int]) -> dict[str, dict]:
    """Once per `state` of the file: it is asked for every job again and again."""
    rows: dict[str, dict] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{str(path)!r}, line {number}"
        row = Row(parse_json(line, where), where)
        if row["name"] in rows:
            raise ValueError(f"{where}: a second row of {row['name']!r}; keep one of them")
        rows[row["name"]] = row
    return rows


def gather(out: Path) -> None:
    """Takes up the results of all folders that have no row yet; the file is whole at any time."""
    with _alone(out):
        known = read(out)
        folders = [path.parent for path in sorted(out.glob(f"*/{RESULT}"))]
        lines = [json.dumps(_row(folder)) for folder in folders if folder.name not in known]
        if not lines:
            return
        before = (out / ROWS).read_bytes() if known else b""
        with atomic_file(out / ROWS) as file:
            file.write(before + "".join(f"{line}\n" for line in lines).encode())


def _row(folder: Path) -> dict:
    path = folder / RESULT
    row = Row({**read_json(path), "name": folder.name}, str(path))
    if (folder / CONFIG).exists():
        row["config"] = read_json(folder / CONFIG)
    if (folder / METRICS).exists():
        row["course"] = _thin(read_metrics(folder))
    return row


def _thin(metrics: dict[str, list[dict]]) -> dict[str, dict[str, list]]:
    """Columns by kind and name: at most `POINTS` of each, the last one among them."""
    columns = {}
    for kind, names in COURSE.items():
        every = -(-len(metrics[kind]) // POINTS) or 1
        rows = metrics[kind][::-1][::every][::-1]
        first = rows[0] if rows else {}
        kept = [name for name in first if name in names or name.startswith(STEP_SIZE)]
        columns[kind] = {name: [_short(row.get(name)) for row in rows] for name in kept}
    return columns


def _short(value):
    """Six digits are more than a figure shows."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process writes the rows meanwhile; one that dies gives way."""
    if fcntl is None:  # Windows: one process only
        yield
        return
    with open(out / ".rows.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
