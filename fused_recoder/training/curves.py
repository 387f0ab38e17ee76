"""A picture of a run, or of several side by side, from their metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")


def read_metrics(folder: Path) -> dict[str, list[dict]]:
    """The rows of `metrics.jsonl` by kind."""
    rows: dict[str, list[dict]] = {"train": [], "epoch": [], "test": []}
    for line in (Path(folder) / "metrics.jsonl").read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a full disk
        if _is_row(row):
            rows[row["kind"]].append(row)
    return rows


def _is_row(row: object) -> bool:
    """Numbers by name, and what kind of row it is."""
    if not isinstance(row, dict) or row.get("kind") not in ("train", "epoch", "test"):
        return False
    return all(isinstance(value, (int, float)) for name, value in row.items() if name != "kind")


def _column(rows: list[dict], name: str) -> list[float]:
    """One number of each row; where it has none, not a number."""
    return [float(row.get(name, math.nan)) for row in rows]


def draw_curves(
    *folders: Path, out: Path | None = None, names: tuple[str, ...] | None = None
) -> Path | None:
    """Writes `curves.png` into the first folder (or `out`); None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [read_metrics(folder) for folder in folders]
    names = names or tuple(Path(folder).name for folder in folders)
    recoding = [i for i, run in enumerate(runs) if any("delta" in row for row in run["train"])]
    panels = 3 if recoding else 1
    style = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": "#e5e5e5", "legend.frameon": False,
        "text.parse_math": False,  # the name of a folder may have two "$"
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, panels, figsize=(4.5 * panels, 3.2), squeeze=False, layout="constrained"
        )
        _perplexities(axes[0][0], runs, names)
        if recoding:
            _signal(axes[0][1], [(runs[i], names[i], COLOURS[i]) for i in recoding])
            _by_state(axes[0][2], runs[recoding[0]])
        for axis in axes[0]:
            axis.set_xlabel("epoch")
        path = Path(out) if out is not None else Path(folders[0]) / "curves.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
    return path


def _perplexities(axis, runs, names) -> None:
    for run, name, colour in zip(runs, names, COLOURS, strict=False):
        train, epochs = run["train"], run["epoch"]
        prefix = f"{name}, " if len(runs) > 1 else ""
        x, y = _column(train, "epoch"), _column(train, "perplexity")
        axis.plot(x, y, color=colour, alpha=0.35, linewidth=1, label=prefix + "training")
        x, y = _column(epochs, "epoch"), _column(epochs, "valid_perplexity")
        axis.plot(x, y, "o-", color=colour, markersize=3.5, label=prefix + "validation")
    axis.set_yscale("log")
    axis.set_title("perplexity", loc="left")
    axis.legend()
    _plain_ticks(axis)


def _plain_ticks(axis) -> None:
    """100, 200, 500 rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _signal(axis, runs) -> None:
    for run, name, colour in runs:
        rows = [r for r in run["train"] if "delta" in r]
        x, delta, after = (_column(rows, name) for name in ("epoch", "delta", "delta_after"))
        prefix = f"{name}, " if len(runs) > 1 else ""
        axis.plot(x, delta, color=colour, alpha=0.4, label=prefix + "before")
        axis.plot(x, after, color=colour, label=prefix + "after recoding")
    axis.set_title("signal δ, mean over tokens", loc="left")
    axis.legend()


def _by_state(axis, run) -> None:
    """Step sizes where they change, else the norms of the recoding gradients."""
    rows = [r for r in run["train"] if "delta" in r]
    names = list(dict.fromkeys(name for row in rows for name in row))
    sizes = [name for name in names if name.startswith("step_size/")]
    change = any(len(set(_column(rows, name))) > 1 for name in sizes)
    kind = "step_size" if change else "recoding_gradient_norm"
    shown = [name for name in names if name.startswith(kind + "/")]
    for name, colour in zip(shown, COLOURS, strict=False):
        state = name.split("/")[1]
        label = f"{'hidden' if state[0] == 'h' else 'cell'} state, layer {state[1:]}"
        axis.plot(_column(rows, "epoch"), _column(rows, name), color=colour, label=label)
    title = "step size" if change else "norm of the recoding gradient"
    axis.set_title(f"{title}, mean over tokens", loc="left")
    if shown:
        axis.legend()
