"""Figures of a table's runs: curves, uncertainty estimates and step sizes, with bands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..training.curves import COLOURS
from .jobs import Training
from .rows import STEP_SIZE, course
from .tables import Row, Table

STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e5e5e5", "legend.frameon": False, "legend.fontsize": 8, "savefig.dpi": 150,
}  # fmt: skip
BASELINE_COLOUR = "#37352f"


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def band(axis, x, runs: Sequence[Sequence[float]], colour: str, label: str, **style) -> None:
    """The mean of runs, with a standard deviation around it."""
    length = min(len(run) for run in runs)
    values = np.asarray([run[:length] for run in runs], float)  # [n, points]
    mean = values.mean(0)
    axis.plot(x[:length], mean, color=colour, label=label, linewidth=1.4, **style)
    if len(runs) > 1:
        spread = values.std(0, ddof=1)
        low, high = mean - spread, mean + spread
        axis.fill_between(x[:length], low, high, color=colour, alpha=0.15, linewidth=0)


def draw_table(table: Table, out: Path) -> list[Path]:
    """All figures of a table, as PNG and SVG in `figures/`. Runs that are not done are left out."""
    trained = [row for row in table.rows if all(isinstance(job, Training) for job in row.jobs)]
    runs = {(row.model, row.setting): _courses(row, out) for row in trained}
    runs = {key: found for key, found in runs.items() if found}
    if len(runs) < 2:  # nothing to compare
        return []
    crowded = max(len(settings) for settings in _by_model(runs).values()) > len(COLOURS)
    written = [(_dots if crowded else _curves)(table, runs, out)]
    for kind, draw in (("uncertainty", _uncertainty), ("steps", _steps)):
        shown = {key: found for key, found in runs.items() if _has(kind, table, key, found)}
        if shown:
            written.append(draw(table, shown, out))
    return [path for paths in written for path in paths]


def _courses(row: Row, out: Path) -> list[dict[str, list[dict]]]:
    courses = [course(out, job.name) for job in row.jobs]
    return [found for found in courses if found is not None]


def _has(kind: str, table: Table, key: tuple[str, str], runs) -> bool:
    rows = runs[0]["train"]
    if not rows or "delta" not in rows[0]:
        return False
    if kind == "uncertainty":
        return table.name in ("samples", "dropout_rate")
    return table.name == "dynamic_steps" and key[1] != "fixed"


def _by_model(runs: dict) -> dict[str, dict]:
    models: dict[str, dict] = {}
    for (model, setting), found in runs.items():
        models.setdefault(model, {})[setting] = found
    return models


def _curves(table: Table, runs: dict, out: Path) -> list[Path]:
    """Training loss and validation perplexity, a row of panels per model."""
    models = _by_model(runs)
    baseline = next(iter(models.pop("Baseline").values()), None) if "Baseline" in models else None
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(models), 2, figsize=(9, 2.9 * len(models)), squeeze=False, layout="constrained"
        )
        for (model, by_setting), (left, right) in zip(models.items(), axes, strict=True):
            shown = zip(by_setting.items(), COLOURS, strict=False)
            lines = [(f"{table.setting} {s}", found, colour) for (s, found), colour in shown]
            if baseline is not None:
                lines.insert(0, ("baseline", baseline, BASELINE_COLOUR))
            for label, found, colour in lines:
                style = {"linestyle": "--"} if label == "baseline" else {}
                x = [row["epoch"] for row in found[0]["train"]]
                band(left, x, _column(found, "train", "loss"), colour, label, **style)
                x = [row["epoch"] for row in found[0]["epoch"]]
                valid = _column(found, "epoch", "valid_perplexity")
                band(right, x, valid, colour, label, marker="o", markersize=3, **style)
            left.set_title(f"{model}: training loss (nats per word)", loc="left")
            right.set_title(f"{model}: validation perplexity", loc="left")
            right.legend()
            for axis in (left, right):
                axis.set_xlabel("epoch")
                axis.locator_params(axis="x", integer=True)
            _end_in_view(left, _column([f for _, fs, _ in lines for f in fs], "train", "loss"))
        return save(figure, out, f"{table.name}-curves")


def _dots(table: Table, runs: dict, out: Path) -> list[Path]:
    """The best validation perplexity of every run, where curves would be too many to tell apart."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        height = 1 + 0.24 * len(runs)
        figure, axis = plt.subplots(figsize=(7.5, height), layout="constrained")
        for y, ((model, _), found) in enumerate(runs.items()):
            values = [min(run) for run in _column(found, "epoch", "valid_perplexity")]
            colour = BASELINE_COLOUR if model == "Baseline" else COLOURS[0]
            axis.plot(values, [y] * len(values), "o", color=colour, alpha=0.45, markersize=4)
            axis.plot(np.mean(values), y, "|", color=colour, markersize=12, markeredgewidth=1.6)
            if model == "Baseline":
                axis.axvline(np.mean(values), color=colour, linestyle=":", linewidth=1)
        names = [setting if setting != "-" else model for model, setting in runs]
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlabel("validation perplexity: every run, and the mean")
        axis.set_title(table.title, loc="left")
        return save(figure, out, table.name)


def _column(runs, kind: str, name: str) -> list[list[float]]:
    return [[row[name] for row in run[kind]] for run in runs]


def _end_in_view(axis, losses: list[list[float]]) -> None:
    """The first steps of training would press the rest into a corner."""
    later = np.concatenate([run[len(run) // 8 :] for run in losses])
    low, high = np.nanpercentile(later, [0.5, 99.5])
    margin = 0.08 * (high - low)
    axis.set_ylim(low - margin, high + margin)


def _uncertainty(table: Table, runs: dict, out: Path) -> list[Path]:
    """The mean signal of single batches in the last part of training."""
    models = _by_model(runs)
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(models), figsize=(4.5 * len(models) + 1, 3.2), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axis, (model, by_setting) in zip(axes[0], models.items(), strict=True):
            for (setting, found), colour in zip(by_setting.items(), COLOURS, strict=False):
                rows = found[0]["train"]
                last = slice(-min(40, max(1, len(rows) // 2)), None)
                x = [row["step"] for row in rows][last]
                deltas = [run[last] for run in _column(found, "train", "delta")]
                band(axis, x, deltas, colour, f"{table.setting} = {setting}")
            axis.set_title(f"{model}: predictive entropy δ (nats)", loc="left")
            axis.set_xlabel("batch")
            axis.legend()
        return save(figure, out, f"{table.name}-uncertainty")


def _steps(table: Table, runs: dict, out: Path) -> list[Path]:
    """Learned and predicted step sizes over training, by layer and state."""
    models = _by_model(runs)
    kinds = sorted({setting for by_setting in models.values() for setting in by_setting})
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(models), len(kinds), figsize=(4.5 * len(kinds), 2.7 * len(models)),
            squeeze=False, layout="constrained",
        )  # fmt: skip
        for row, (model, by_setting) in zip(axes, models.items(), strict=True):
            for axis, kind in zip(row, kinds, strict=True):
                axis.set_title(f"{model}: {kind} step size", loc="left")
                axis.set_xlabel("epoch")
                if kind in by_setting:
                    draw_steps(axis, by_setting[kind])
                    axis.legend()
        return save(figure, out, f"{table.name}-steps")


def draw_steps(axis, runs: list[dict[str, list[dict]]]) -> None:
    rows = runs[0]["train"]
    names = [name for name in rows[0] if name.startswith(STEP_SIZE)]
    for name, colour in zip(names, COLOURS, strict=False):
        state = name.split("/")[1]
        label = f"{'hidden' if state[0] == 'h' else 'cell'} state, layer {int(state[1:]) + 1}"
        band(axis, [r["epoch"] for r in rows], _column(runs, "train", name), colour, label)
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])


def save(figure, out: Path, name: str) -> list[Path]:
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path)
    pyplot().close(figure)
    return paths
