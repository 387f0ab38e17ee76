"""A sentence as a figure: surprisal and signal over its words, as in the thesis."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..experiments.plots import STYLE, pyplot
from ..training.curves import COLOURS
from .compare import SIGNIFICANT, SentenceNumbers, p_values


def draw_sentence(by_model: dict[str, SentenceNumbers], path: Path) -> list[Path]:
    """Surprisal above, the signal below; PNG and SVG of this name.

    After a word comes, half a step to the right, the value predicted from the recoded state. Bands
    are one standard deviation over runs; triangles mark words at which a model differs from the
    first one (two-tailed t-test, p < 0.05).
    """
    first = next(iter(by_model.values()))
    recoding = {
        name: numbers
        for name, numbers in by_model.items()
        if not np.isnan(numbers.values["delta"]).all()
    }
    plt = pyplot()
    with plt.rc_context(STYLE):
        rows = 2 if recoding else 1
        width = max(5.0, 0.85 * len(first.tokens) + 1.2)
        figure, axes = plt.subplots(
            rows, 1, figsize=(width, 2.7 * rows + 0.3), squeeze=False, sharex=True,
            layout="constrained",
        )  # fmt: skip
        top = axes[0][0]
        colours = dict(zip(by_model, COLOURS * 3, strict=False))
        for name, numbers in by_model.items():
            _line(top, numbers, "surprisal_before", "surprisal_after", colours[name], name)
        _markers(top, by_model, "surprisal_before")
        top.set_ylabel("surprisal (bits)")
        if recoding:
            bottom = axes[1][0]
            for name, numbers in recoding.items():
                _line(bottom, numbers, "delta", "delta_after", colours[name], name)
            if len(recoding) > 1:
                _markers(bottom, recoding, "delta")
            bottom.set_ylabel("signal δ")
        if len(by_model) > 1 or recoding:
            top.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        last = axes[-1][0]
        words = [f"{t.text}*" if t.unknown else t.text for t in first.tokens]
        last.set_xticks(range(len(words)), words, rotation=30, ha="right")
        for axis in axes[:, 0]:
            low, high = axis.get_ylim()
            axis.set_ylim(bottom=min(low, -0.02 * high))  # 0 is seen, and points at 0 whole
            axis.grid(axis="x", visible=False)
        paths = [path.with_suffix(f".{kind}") for kind in ("png", "svg")]
        for each in paths:
            figure.savefig(each)
        plt.close(figure)
    return paths


def _line(axis, numbers: SentenceNumbers, before: str, after: str, colour: str, name: str) -> None:
    """Before and, where the word was recoded, after it."""
    x, values, spread = [], [], []
    for t, recoded in enumerate(numbers.recoded):
        for place, kind in ((t, before), (t + 0.5, after))[: 1 + recoded]:
            x.append(place)
            values.append(numbers.mean(kind)[t])
            spread.append(numbers.deviation(kind)[t])
    x, values, spread = np.array(x), np.array(values), np.array(spread)
    axis.plot(x, values, color=colour, linewidth=1.3, label=name)
    on_word = x == np.floor(x)
    axis.plot(x[on_word], values[on_word], "o", color=colour, markersize=4)
    axis.plot(x[~on_word], values[~on_word], "o", color=colour, markersize=3.5,
              markerfacecolor="white")  # fmt: skip
    if spread.any():
        low, high = values - spread, values + spread
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _markers(axis, by_model: dict[str, SentenceNumbers], name: str) -> None:
    models = list(by_model.values())
    for other in models[1:]:
        if len(other.tokens) != len(models[0].tokens):
            continue
        p = p_values(models[0].values[name], other.values[name])
        for t in np.flatnonzero(p < SIGNIFICANT):
            height = max(models[0].mean(name)[t], other.mean(name)[t])
            axis.annotate("▼", (t, height), (0, 6), textcoords="offset points", ha="center",
                          color="#787774", fontsize=7)  # fmt: skip
