"""A sentence as a figure: what a model expects of its words, and what its corrections change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..experiments.plots import STYLE, pyplot
from ..training.curves import COLOURS
from .compare import SIGNIFICANT, SentenceNumbers, p_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Models = dict[str, SentenceNumbers]


def draw_sentence(by_model: Models, path: Path) -> list[Path]:
    """PNG and SVG of this name: surprisal before a word is known, what the last correction did to
    it, and the signal where it is another quantity.

    Bands are one standard deviation over runs; triangles mark words at which a model differs from
    the first one (two-tailed t-test, p < 0.05). A word that is unknown leaves a gap in the lines of
    the models that do not know it, marked by a grey column.
    """
    colours = dict(zip(by_model, COLOURS * 3, strict=False))
    recoding = {name: n for name, n in by_model.items() if any(n.recoded)}
    others = {name: n for name, n in recoding.items() if not _is_surprisal(n)}
    panels = [(_surprisals, by_model), (_corrections, recoding), (_signals, others)]
    panels = [(draw, models) for draw, models in panels if models]
    tokens = next(iter(by_model.values())).tokens
    plt = pyplot()
    with plt.rc_context(STYLE | {"text.parse_math": False}):  # a word may have two "$"
        size = max(5.0, 0.85 * len(tokens) + 1.2), 2.3 * len(panels) + 0.7
        figure, axes = plt.subplots(
            len(panels), 1, figsize=size, squeeze=False, sharex=True, layout="constrained"
        )
        for (draw, models), axis in zip(panels, axes[:, 0], strict=True):
            draw(axis, models, colours)
            axis.grid(axis="x", visible=False)
            unknown = _mark_unknown(axis, models)
        if len(by_model) > 1 or unknown:
            axes[0][0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        bottom = axes[-1][0]
        bottom.set_xticks(range(len(tokens)), [t.text for t in tokens], rotation=30, ha="right")
        bottom.set_xlim(-0.5, len(tokens) - 0.5)  # also where all words are unknown
        paths = [path.with_suffix(f".{kind}") for kind in ("png", "svg")]
        for each in paths:
            figure.savefig(each)
        plt.close(figure)
    return paths


def _mark_unknown(axis: Axes, models: Models) -> list[int]:
    """Grey columns where words are unknown."""
    unknown = sorted({t for numbers in models.values() for t in numbers.unknown})
    for t in unknown:
        label = "unknown word" if t == unknown[0] else None
        axis.axvspan(t - 0.35, t + 0.35, color="#eeedeb", linewidth=0, zorder=0, label=label)
    return unknown


def _surprisals(axis: Axes, models: Models, colours: dict[str, str]) -> None:
    for name, numbers in models.items():
        _line(axis, numbers.values["surprisal"], colours[name], name)
    _markers(axis, models, "surprisal")
    axis.set_ylabel("surprisal (bits)")
    _show_zero(axis)


def _corrections(axis: Axes, models: Models, colours: dict[str, str]) -> None:
    for name, numbers in models.items():
        change = numbers.values["surprisal"] - numbers.values["surprisal_uncorrected"]
        _line(axis, change, colours[name], name)
    axis.axhline(0, color="#787774", linewidth=0.8, zorder=0)
    axis.set_ylabel("changed by the\nlast correction (bits)")


def _signals(axis: Axes, models: Models, colours: dict[str, str]) -> None:
    """After recoding as points: between them nothing happens that a line could show."""
    for name, numbers in models.items():
        _line(axis, numbers.values["delta"], colours[name], name)
        after = np.where(numbers.recoded, numbers.mean("delta_after"), np.nan)
        axis.plot(after, "o", color=colours[name], markersize=4, markerfacecolor="white")
    if len(models) > 1:
        _markers(axis, models, "delta")
    axis.set_ylabel("signal δ")
    _show_zero(axis)


def _is_surprisal(numbers: SentenceNumbers) -> bool:
    """Whether δ is the surprisal in nats, as that of `nll` is."""
    nats = numbers.values["surprisal_before"] * math.log(2)
    return np.allclose(numbers.values["delta"], nats, rtol=1e-3, equal_nan=True)


def _line(axis: Axes, runs: np.ndarray, colour: str, name: str) -> None:
    """The mean of values [n runs, words], and their standard deviation."""
    mean = runs.mean(0)
    axis.plot(mean, "o-", color=colour, linewidth=1.3, markersize=4, label=name)
    if len(runs) > 1:
        spread = runs.std(0, ddof=1)
        places = np.arange(len(mean))
        axis.fill_between(
            places, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0
        )


def _show_zero(axis: Axes) -> None:
    low, high = axis.get_ylim()
    axis.set_ylim(bottom=min(low, -0.02 * high))  # also points at 0 are seen whole


def _markers(axis: Axes, by_model: Models, name: str) -> None:
    models = list(by_model.values())
    for other in models[1:]:
        if len(other.tokens) != len(models[0].tokens):
            continue
        p = p_values(models[0].values[name], other.values[name])
        for t in np.flatnonzero(p < SIGNIFICANT):
            height = max(models[0].mean(name)[t], other.mean(name)[t])
            axis.annotate("▼", (t, height), (0, 6), textcoords="offset points", ha="center",
                          color="#787774", fontsize=7)  # fmt: skip
