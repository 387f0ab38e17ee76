"""Is surprisal the right signal? Jobs, table and figure."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np

from ..analysis.signal_shape import (
    PEAK,
    gold_probabilities,
    surprisal,
    surprisal_push,
    wrong_way,
)
from ..training import Corpus, load_model
from ..training.curves import COLOURS
from .adapting import recoder_at_inference
from .jobs import Job, Measurement, Training
from .plots import BASELINE_COLOUR, STYLE, pyplot, save
from .report import markdown, write_jsonl, write_text
from .rows import result
from .scales import Scale
from .statistics import describe
from .variants import BASELINE, gold

TRAINED = {"nll": (0.1, 0.3, 1.0, 3.0), "surprisal": (0.1, 1.0, 5.0, 10.0)}
BINS = np.linspace(-8, 0, 81)  # of log10 p


def probabilities(folders: list[Path], data: Path) -> dict:
    loaded = load_model(folders[0], signal=None)
    p = gold_probabilities(loaded.model, Corpus(data, vocabulary=loaded.vocabulary)["valid"])
    counts, _ = np.histogram(np.log10(p).clip(BINS[0], BINS[-1]), BINS)
    return {
        "tokens": len(p),
        "wrong_way": wrong_way(p),
        "median_p": float(np.median(p)),
        "histogram": counts.tolist(),
        # Of the whole push |kappa| that all words get, the part that goes the wrong way.
        "wrong_push": float(-surprisal_push(p)[p < PEAK].sum() / np.abs(surprisal_push(p)).sum()),
    }


def jobs(scale: Scale, out: Path, seeds: int) -> list[Job]:
    found: list[Job] = []
    for seed in range(1, seeds + 1):
        plain = Training(BASELINE, scale.plain.replace(seed=seed))
        found += [
            plain,
            Measurement(f"probabilities.seed{seed}", {"seed": seed}, (plain.name,), probabilities),
            *inference_jobs(plain, seed),
        ]
    for signal, steps in TRAINED.items():
        for step in steps:
            ((name, settings),) = gold(signal, step).items()
            for seed in range(1, seeds + 1):
                found.append(Training(name, scale.plain.replace(seed=seed, **settings)))
    return found


def inference_jobs(plain: Training, seed: int) -> list[Measurement]:
    """A recoder on the trained baseline: both signals, cell states or both."""
    return [
        Measurement(
            f"inference.{signal}-{states}.seed{seed}",
            {"variant": f"inference.{signal}-{states}", "seed": seed},
            (plain.name,),
            functools.partial(recoder_at_inference, signal=signal, states=states),
        )
        for signal in TRAINED
        for states in ("hc", "c")
    ]


def report(scale: Scale, out: Path, seeds: int) -> str:
    numbers = [result(out, f"probabilities.seed{seed}") for seed in range(1, seeds + 1)]
    numbers = [row for row in numbers if row is not None]
    if not numbers:
        return "The probabilities of the words are not measured yet.\n"
    baseline = _valid(out, BASELINE, seeds)
    share = describe([100 * row["wrong_way"] for row in numbers])
    push = describe([100 * row["wrong_push"] for row in numbers])
    rows = [{"recoder": "none", "step": "-", "validation perplexity": f"{describe(baseline)}"}]
    for signal in TRAINED:
        for states in ("hc", "c"):
            by_step = _inference(out, signal, states, seeds)
            for step, values in by_step.items():
                rows.append(
                    {
                        "recoder": f"{signal} on {states}, at inference",
                        "step": f"{step:g}",
                        "validation perplexity": f"{describe(values)}",
                    }
                )
    for signal, steps in TRAINED.items():
        for step in steps:
            values = _valid(out, f"{signal}-hc-{step:g}", seeds)
            shown = f"{describe(values)}" if values else "diverged"
            label = f"{signal} on hc, in training"
            rows.append({"recoder": label, "step": f"{step:g}", "validation perplexity": shown})
    text = (
        "## Is surprisal the right signal?\n\n"
        f"Share of words with p < 1/e, which descending surprisal makes less probable: {share} %; "
        f"of the whole push on the words that much goes the wrong way: {push} %.\n\n"
        f"{markdown(rows)}\n"
    )
    folder = out / "tables"
    folder.mkdir(exist_ok=True)
    write_text(folder / "signal_shape.md", text)
    write_jsonl(folder / "signal_shape.jsonl", rows)
    _draw(numbers[0], baseline, out, seeds)
    return text


def _valid(out: Path, variant: str, seeds: int) -> list[float]:
    """Validation perplexities of the runs that did not diverge."""
    rows = [result(out, f"{variant}.seed{seed}") for seed in range(1, seeds + 1)]
    return [
        row["valid_perplexity"] for row in rows if row is not None and row["status"] == "finished"
    ]


def _inference(out: Path, signal: str, states: str, seeds: int) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for seed in range(1, seeds + 1):
        row = result(out, f"inference.{signal}-{states}.seed{seed}") or {"by_step": []}
        for step, value in row["by_step"]:
            if step > 0:
                found.setdefault(step, []).append(value)
    return found


def _draw(numbers: dict, baseline: list[float], out: Path, seeds: int) -> list[Path]:
    plt = pyplot()
    colours = dict(zip(TRAINED, COLOURS, strict=False))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
        p = np.logspace(-8, 0, 800)
        _signal_panel(axes[0][0], p, numbers, colours)
        _push_panel(axes[0][1], p, colours)
        for signal in TRAINED:
            for states, style in (("hc", "-"), ("c", "--")):
                by_step = _inference(out, signal, states, seeds)
                label = f"{signal}, {'h and c' if states == 'hc' else 'c only'}"
                _points(axes[1][0], by_step, colours[signal], label, style)
            trained = {
                step: values
                for step in TRAINED[signal]
                if (values := _valid(out, f"{signal}-hc-{step:g}", seeds))
            }
            _points(axes[1][1], trained, colours[signal], f"{signal}, h and c", "-")
        for axis, title in ((axes[1][0], "added at inference"), (axes[1][1], "in training")):
            mean = float(np.mean(baseline))
            axis.axhline(mean, color=BASELINE_COLOUR, linestyle=":", label="no recoding")
            axis.set_xscale("log")
            axis.set_xlabel("step size")
            axis.set_title(f"validation perplexity, recoder {title}", loc="left")
            _near(axis, mean)
            axis.legend()
        return save(figure, out, "signal_shape")


def _signal_panel(axis, p, numbers, colours) -> None:
    axis.plot(p, surprisal(p), color=colours["surprisal"], label=r"surprisal $p^{-p}-1$")
    axis.plot(p, -np.log(p) / 40, color=colours["nll"], label=r"nll $-\log p$, divided by 40")
    counts = np.asarray(numbers["histogram"], float)
    share = counts / counts.max() * 0.4
    axis.stairs(share, 10**BINS, fill=True, color="#d3d1cb", label="words of the validation text")
    axis.axvline(PEAK, color="#787774", linewidth=0.8, linestyle=":")
    axis.annotate(
        f"← {numbers['wrong_way']:.0%} of the words", (PEAK, 0.48), (-6, 0),
        textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    axis.annotate("p = 1/e", (PEAK, 0.53), (-6, 0), textcoords="offset points", ha="right",
                  fontsize=8)  # fmt: skip
    axis.set_xscale("log")
    axis.set_xlim(1e-7, 1)
    axis.set_ylim(0, 0.75)
    axis.set_xlabel("probability p of the gold token")
    axis.set_title("the signals, and where words lie", loc="left")
    axis.legend(loc="upper left")


def _push_panel(axis, p, colours) -> None:
    axis.plot(p, surprisal_push(p), color=colours["surprisal"], label=r"surprisal: $\kappa(p)$")
    axis.plot(p, np.ones_like(p), color=colours["nll"], label="nll: 1")
    axis.axhline(0, color="#787774", linewidth=0.8)
    axis.axvspan(1e-7, PEAK, color=colours["surprisal"], alpha=0.08, linewidth=0)
    axis.annotate("here the gold token\nbecomes less probable", (3e-7, -0.15), fontsize=8)
    axis.set_xscale("log")
    axis.set_xlim(1e-7, 1)
    axis.set_xlabel("probability p of the gold token")
    axis.set_title(r"factor of $(o - \mathrm{onehot})$ in the gradient", loc="left")
    axis.legend(loc="upper left", bbox_to_anchor=(0, 0.92))


def _points(axis, by_step: dict[float, list[float]], colour: str, label: str, style: str) -> None:
    if not by_step:
        return
    samples = {step: describe(values) for step, values in by_step.items()}
    axis.errorbar(
        list(samples),
        [s.mean for s in samples.values()],
        [s.deviation or 0 for s in samples.values()],
        fmt=f"o{style}", color=colour, markersize=3.5, capsize=2, label=label,
    )  # fmt: skip


def _near(axis, baseline: float) -> None:
    """Steps that are far too large would hide what happens at the others."""
    low, high = axis.get_ylim()
    top = min(high, baseline * 1.15)
    axis.set_ylim(min(low, baseline * 0.97) if math.isfinite(low) else None, top)
