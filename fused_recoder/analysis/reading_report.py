"""What `reading-times` found, as a table, a figure and the predictors themselves."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..experiments.plots import BASELINE_COLOUR, STYLE, pyplot
from ..experiments.report import markdown, write_text
from ..training.curves import COLOURS
from ..training.files import atomic_file
from ..training.reporting import table
from .compare import ModelRuns
from .predictors import BASE, Coverage, Predictors
from .regression import LEVEL
from .stories import Stories

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .reading_times import Result

PER_MILLE = 1000  # gains are shown in thousandths of a nat


def write_report(
    out: Path,
    results: Sequence[Result],
    stories: Stories,
    coverage: Coverage,
    predictors: dict[str, list[Predictors]],
    models: Sequence[ModelRuns],
    counted: Path,
) -> None:
    """`reading-times.md`, `.png` and `.svg`, and a table of predictors per model."""
    out.mkdir(parents=True, exist_ok=True)
    rows = cells(results)
    facts = f"{stories.path.name}: {len(stories.names)} stories, {coverage}."
    counts = f"Word frequencies: counted in {counted}.\n{_mean_surprisals(predictors, coverage)}"
    text = f"# Reading times\n\n{markdown(rows)}\n\n{facts}\n{counts}\n\n{FOOTNOTE}\n"
    write_text(out / "reading-times.md", text)
    draw(results, out / "reading-times.png")
    for model in models:
        write_tsv(out / f"{model.file_name}.tsv", stories, coverage.used, model, predictors)
    print(f"{facts}\n{counts}\n\n{table(rows)}\n\n{out / 'reading-times.md'}")


def _mean_surprisals(predictors: dict[str, list[Predictors]], coverage: Coverage) -> str:
    bits = {
        name: np.mean([run.columns["surprisal"][coverage.used] for run in of_runs])
        for name, of_runs in predictors.items()
    }
    return f"Bits per used word: {', '.join(f'{name} {mean:.2f}' for name, mean in bits.items())}."


FOOTNOTE = (
    "Gain: of the log-likelihood per word in held-out stories, in thousandths of a nat, by adding "
    f"predictors to a linear regression of the log reading time, with a {LEVEL:.0%} interval "
    "(bootstrap over stories, and over words within them). A gain below zero: they were fitted to "
    "noise. All predictors come with those of the two words before. In a model that does not "
    "recode the gradient is measured and nothing is done with it."
)


def cells(results: Sequence[Result]) -> list[dict[str, str]]:
    """What is shown of the results, by column."""

    def per_mille(nats: float) -> str:
        return f"{PER_MILLE * nats:+.2f}"

    return [
        {
            "model": result.model,
            "runs": f"{result.runs}",
            "predictors": result.added,
            "beyond": ", ".join(result.beyond),
            "gain": per_mille(result.gain.mean),
            "interval": f"[{per_mille(result.gain.low)}, {per_mille(result.gain.high)}]",
            "above 0": "yes" if result.gain.above_zero else "no",
            "log-likelihood": f"{result.log_likelihood:.4f}",
        }
        for result in results
    ]


def write_tsv(
    path: Path,
    stories: Stories,
    used: np.ndarray,
    model: ModelRuns,
    predictors: dict[str, list[Predictors]],
) -> None:
    """Every word with all its predictors, one run of the model after the other; empty: none."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE,
                        quotechar=None)  # fmt: skip
    of_runs = predictors[model.name]
    names = list(dict.fromkeys(name for run in of_runs for name in run.columns))
    writer.writerow(["run", "story", "position", "word", "time", "log_time", "used", *names])
    for path_of_run, run in zip(model.paths, of_runs, strict=True):
        for i, word in enumerate(stories.words):
            time = stories.time[i]
            numbers = [_text(run.columns[name][i]) if name in run.columns else "" for name in names]
            writer.writerow(
                [path_of_run, stories.names[stories.story[i]], stories.position[i], word,
                 _text(time), _text(math.log(time)), int(used[i]), *numbers]
            )  # fmt: skip
    write_text(path, text.getvalue())


def _text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"


def draw(results: Sequence[Result], path: Path) -> list[Path]:
    """PNG and SVG of this name: gains of all models; surprisal's above, on a scale of its own."""
    models = list(dict.fromkeys(result.model for result in results))
    colours = dict(zip(models, COLOURS * (1 + len(models) // len(COLOURS)), strict=False))
    panels = [[r for r in results if (r.beyond == (BASE,)) == first] for first in (True, False)]
    panels = [panel for panel in panels if panel]
    heights = [len(_rows(panel)) for panel in panels]
    plt = pyplot()
    with plt.rc_context(STYLE | {"text.parse_math": False, "savefig.dpi": 300}):
        height = 1.1 + sum(heights) * (0.32 + 0.16 * len(models))
        figure, axes = plt.subplots(
            len(panels), 1, figsize=(6.3, height), squeeze=False, layout="constrained",
            gridspec_kw={"height_ratios": heights},
        )  # fmt: skip
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            _draw_gains(axis, panel, colours)
        axes[-1][0].set_xlabel(f"gain (nats per 1000 held-out words, {LEVEL:.0%} intervals)")
        if len(models) > 1:
            handles, labels = axes[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper right", ncols=len(models))
        paths = [path.with_suffix(f".{kind}") for kind in ("png", "svg")]
        for each in paths:
            with atomic_file(each) as file:
                figure.savefig(file, format=each.suffix[1:])
        plt.close(figure)
    return paths


def _rows(results: Sequence[Result]) -> list[tuple[str, tuple[str, ...]]]:
    """What is compared, each once."""
    return list(dict.fromkeys((r.added, r.beyond) for r in results))


def _draw_gains(axis: Axes, results: Sequence[Result], colours: dict[str, str]) -> None:
    rows, models = _rows(results), list(colours)
    places = np.linspace(-0.25, 0.25, len(models)) if len(models) > 1 else np.zeros(1)
    for model in models:
        found = [r for r in results if r.model == model]
        y = [rows.index((r.added, r.beyond)) + places[models.index(model)] for r in found]
        means = np.array([PER_MILLE * r.gain.mean for r in found])
        ends = PER_MILLE * np.array([[r.gain.low, r.gain.high] for r in found]).reshape(-1, 2)
        spread = np.abs(ends.T - means)  # [2, rows]
        axis.errorbar(means, y, xerr=spread, fmt="o", color=colours[model], label=model,
                      markersize=4, linewidth=1.4, capsize=0)  # fmt: skip
    axis.axvline(0, color=BASELINE_COLOUR, linewidth=1, zorder=1.9)
    axis.set_yticks(range(len(rows)), [_label(*row) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def _label(added: str, beyond: tuple[str, ...]) -> str:
    """All but the base, which is always there."""
    others = " and ".join(name for name in beyond if name != BASE)
    return f"{added}\nbeyond {others or 'the base regression'}"
