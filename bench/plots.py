"""Pictures of the results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .cases import COMPILED, FUSED, GRAPHED, PLAIN, REFERENCE

# Ulmer (2019), table of test perplexities for different numbers of samples: tokens per second.
THESIS_BASELINE = 406
THESIS = {
    "MC Dropout": {1: 66.9, 5: 48.3, 10: 31.2, 25: 14, 50: 7.4},
    "ensemble": {1: 59.2, 5: 32.2, 10: 18.6, 25: 8.1},
}
COLOURS = {
    FUSED: "#2a6f97", GRAPHED: "#61a5c2", REFERENCE: "#c97b63", COMPILED: "#b8a04a",
    PLAIN: "#555555",
}  # fmt: skip


def throughput(experiments: list[dict], path: Path) -> None:
    """Bars of speed relative to the plain LM, which is the line at 1."""
    chosen = [e for e in experiments if e["job"] == "train"]
    heights = [sum("failed" not in r and r["who"] != "plain" for r in e["rows"]) for e in chosen]
    figure, axes = plt.subplots(
        len(chosen), 1, figsize=(7, 0.9 * len(chosen) + 0.27 * sum(heights)), sharex=True,
        gridspec_kw={"height_ratios": heights}, squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, experiment in zip(axes[:, 0], chosen, strict=True):
        rows = [r for r in experiment["rows"] if "failed" not in r and r["who"] != "plain"]
        for i, row in enumerate(rows):
            low, middle, high = row["to_plain"]
            axis.barh(i, middle, color=COLOURS[row["who"]], height=0.7)
            axis.plot([low, high], [i, i], color="black", linewidth=1)
        axis.set_yticks(range(len(rows)), [r["name"] for r in rows], fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1, color=COLOURS[PLAIN], linewidth=1, linestyle="--")
        axis.set_title(f"{experiment['name']}: {experiment['shape']}", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("training throughput / the plain LM's (dashed); black: quartiles")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def slow_down(experiments: list[dict], path: Path) -> None:
    """Evaluation slow-down over K, the thesis's published slow-downs beside ours."""
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, points in THESIS.items():
        ks = list(points)
        style = "o:" if name == "MC Dropout" else "s:"
        axis.plot(
            ks, [THESIS_BASELINE / points[k] for k in ks], style, color="#a33c3c", markersize=4,
            label=f"thesis, {name}",
        )  # fmt: skip
    for experiment in experiments:
        rows = [r for r in experiment["rows"] if r.get("K", 1) >= 1 and r.get("who") == "fused"]
        rows = [r for r in rows if "K=" in r["name"]]
        if experiment["job"] != "evaluate" or not rows:
            continue
        ks = [r["K"] for r in rows]
        label = rows[0]["variant"].split(", K=")[0]
        axis.plot(
            ks, [1 / r["to_plain"][1] for r in rows], "o-", markersize=4, label=f"ours, {label}"
        )
    axis.set(xscale="log", yscale="log", xlabel="samples or members K")
    axis.set_ylabel("time of an evaluation relative to the plain LM's")
    axis.set_xticks([1, 5, 10, 25, 50], ["1", "5", "10", "25", "50"])
    axis.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def share_of_limit(experiments: list[dict], path: Path) -> None:
    """How much of a large GEMM's speed each fused job reaches."""
    rows = [
        (f"{e['name']}: {r['name'].removeprefix('fused, ')}", r["share_of_limit"])
        for e in experiments
        for r in e["rows"]
        if r.get("who") == "fused" and e["job"] != "read"
    ]
    figure, axis = plt.subplots(figsize=(7, 0.22 * len(rows) + 0.8), layout="constrained")
    for i, (_, (low, middle, high)) in enumerate(rows):
        axis.barh(i, 100 * middle, color=COLOURS[FUSED], height=0.7)
        axis.plot([100 * low, 100 * high], [i, i], color="black", linewidth=1)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel("% of a large GEMM's speed, in FLOPs the algorithm needs")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def growth(results: dict, path: Path) -> None:
    """Time and memory over each dimension, others fixed."""
    axes_of = results["axes"]
    points = [p for series in axes_of.values() for line in series.values() for p in line]
    quantities = {"seconds": "seconds per training step"}
    if any(p["memory"] is not None for p in points):  # not with --no-memory
        quantities["memory"] = "extra memory, MB"
    figure, grid = plt.subplots(
        len(quantities), len(axes_of), figsize=(3 * len(axes_of), 2.5 * len(quantities)),
        layout="constrained", squeeze=False, sharey="row",
    )  # fmt: skip
    for column, (axis_name, series) in enumerate(axes_of.items()):
        for row, (quantity, label) in enumerate(quantities.items()):
            axis = grid[row][column]
            for name, line in series.items():
                values = [p["value"] for p in line]
                style = "--" if name.startswith("plain") else "o-"
                axis.plot(values, [p[quantity] for p in line], style, markersize=3, label=name)
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(values, [f"{x:,}" for x in values])
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            if row == len(quantities) - 1:
                axis.set_xlabel(axis_name)
            if column == 0:
                axis.set_ylabel(label)
        grid[0][column].legend(fontsize=7, frameon=False)
    figure.suptitle(f"one dimension at a time, the others as in {results['base']}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw(results: dict, folder: Path) -> None:
    threads = max(e["threads"] for e in results["experiments"])
    experiments = [e for e in results["experiments"] if e["threads"] == threads]
    if any(e["job"] == "train" for e in experiments):
        throughput(experiments, folder / "throughput.png")
    if any(e["job"] != "read" for e in experiments):
        share_of_limit(experiments, folder / "limit.png")
    if any(e["job"] == "evaluate" for e in experiments):
        slow_down(experiments, folder / "slow_down.png")
