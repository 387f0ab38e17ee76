"""The two theorems on the baseline's states: jobs, table and figure."""

from __future__ import annotations

from pathlib import Path

import fused_recoder as fr

from ..analysis.theorems import later_effect, signal_change, windows
from ..training import Corpus, load_model
from ..training.curves import COLOURS
from .jobs import Measurement, Training
from .plots import STYLE, pyplot, save
from .report import markdown, write_jsonl, write_text
from .rows import result
from .scales import Scale
from .variants import BASELINE, SIMILAR_PRIOR, ensemble

STEPS = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
# Of the baseline, and of a model that has several decoders.
SIGNALS = {
    "nll": lambda: fr.signals.NLL(),
    "surprisal": lambda: fr.signals.Surprisal(),
    "entropy": lambda: fr.signals.Entropy(),
    "mc_dropout": lambda: fr.signals.MCDropout(num_samples=5, p=0.42, mask="shared"),
    "variational": lambda: fr.signals.Variational(num_samples=5, p=0.2),
    "ensemble": lambda: fr.signals.Ensemble(),
}
GUARANTEED = "1/L (guaranteed)"
# Step sizes for the second theorem; the thesis's for its surprisal.
LATER = dict.fromkeys(SIGNALS, 0.3) | {"surprisal": 5.0}
AT, LATER_STEPS = 10, 10  # the recoded time step of the second theorem, and how far it looks


def measure(folders: list[Path], data: Path) -> dict:
    plain, members = (load_model(folder) for folder in folders)
    tokens = Corpus(data, vocabulary=plain.vocabulary)["valid"]
    models = {name: members.model if name == "ensemble" else plain.model for name in SIGNALS}
    inputs, targets = windows(tokens, max(2, min(40, len(tokens) // 40)), 30)
    steps = {f"{step:g}": step for step in STEPS}
    steps |= {GUARANTEED: "lipschitz", "backtracking": "backtracking"}
    first = [
        {
            "signal": name,
            "step": label,
            **signal_change(models[name], signal(), step, ("h",), inputs, targets),
        }
        for name, signal in SIGNALS.items()
        for label, step in steps.items()
    ]
    # One position of every sequence counts here, so there are more of them.
    inputs, targets = windows(tokens, max(2, min(400, len(tokens) // 40)), AT + LATER_STEPS + 1)
    second = [
        {"signal": name, "step": step, "others": others, **row}
        for name, step in LATER.items()
        for others in (False, True)
        for row in later_effect(
            models[name], SIGNALS[name](), step, ("h", "c"), inputs, targets, at=AT, others=others
        )
    ]
    return {"first": first, "second": second}


def jobs(scale: Scale, out: Path, seeds: int) -> list:
    ((name, settings),) = ensemble(scale, prior=SIMILAR_PRIOR).items()
    trainings = [
        Training(BASELINE, scale.plain),
        Training(name, scale.plain.replace(**settings)),
    ]
    return [*trainings, Measurement("theorems", {}, tuple(t.name for t in trainings), measure)]


def report(scale: Scale, out: Path, seeds: int) -> str:
    found = result(out, "theorems")
    if found is None:
        return "The theorems are not measured yet.\n"
    names = list(dict.fromkeys(row["step"] for row in found["first"]))
    rows = []
    for signal in SIGNALS:
        by_step = {row["step"]: row for row in found["first"] if row["signal"] == signal}
        shares = {name: f"{by_step[name]['not_raised']:.1%}" for name in names}
        rows.append({"signal": signal, **shares})
    text = (
        "## Theorem 1: positions where recoding h does not raise the signal of the re-decoded "
        f"state, by step size\n\n{markdown(rows)}\n"
    )
    later = []
    for signal, step in LATER.items():
        chosen = [r for r in found["second"] if r["signal"] == signal and r["others"]]
        later.append(
            {
                "signal": signal,
                "step": f"{step:g}",
                **{
                    f"k = {r['k']}": f"{r['mean_change']:+.4f} ({r['lowered']:.0%})"
                    for r in chosen
                    if r["k"] in (0, 1, 2, 5, 10)
                },
            }
        )
    text += (
        "\n## Theorem 2: change of the signal k steps after one recoding, all other steps recoded "
        f"(share of positions where it is lower)\n\n{markdown(later)}\n"
    )
    folder = out / "tables"
    folder.mkdir(exist_ok=True)
    write_text(folder / "theorems.md", text)
    write_jsonl(folder / "theorems.jsonl", found["first"] + found["second"])
    _draw(found, out)
    return text


def _draw(found: dict, out: Path) -> list[Path]:
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
        # Where curves coincide, those below are seen around those above.
        sizes = range(len(SIGNALS) + 2, 1, -1)
        for (signal, step), colour, size in zip(LATER.items(), COLOURS, sizes, strict=False):
            rows = [r for r in found["first"] if r["signal"] == signal]
            fixed = [r for r in rows if r["step"][0].isdigit() and r["step"] != GUARANTEED]
            (proven,) = [r for r in rows if r["step"] == GUARANTEED]
            x = [float(r["step"]) for r in fixed]
            style = {"color": colour, "linewidth": 1.2}
            raised = [100 * (1 - r["not_raised"]) for r in fixed]
            left.plot(x, raised, "o-", markersize=size, label=signal, **style)
            ratio = [r["mean_delta_after"] / r["mean_delta"] for r in fixed]
            middle.plot(x, ratio, "o-", markersize=3, label=signal, **style)
            middle.plot(
                proven["mean_step"], proven["mean_delta_after"] / proven["mean_delta"],
                "*", color=colour, markersize=10, markeredgecolor="white",
            )  # fmt: skip
            later = [r for r in found["second"] if r["signal"] == signal and r["others"]]
            k = [r["k"] for r in later][1:]
            mean = [r["mean_change"] for r in later][1:]
            error = [1.96 * r["standard_error"] for r in later][1:]
            low, high = ([m + s * e for m, e in zip(mean, error, strict=True)] for s in (-1, 1))
            right.plot(k, mean, "o-", markersize=3, label=f"{signal}, step {step:g}", **style)
            right.fill_between(k, low, high, color=colour, alpha=0.12, linewidth=0)
        middle.plot([], [], "*", color="#787774", markersize=9, label="1/L, guaranteed")
        for axis in (left, middle):
            axis.set_xscale("log")
            axis.set_xlabel("step size")
        left.legend(loc="upper left")
        left.set_title("positions where recoding raises δ (%)", loc="left")
        middle.set_title("mean δ after recoding / before", loc="left")
        middle.set_ylim(0, 1.25)
        middle.legend(loc="lower left")
        right.axhline(0, color="#787774", linewidth=0.8)
        right.set_xlabel("steps after the recoding")
        right.set_title("mean change of δ at later steps", loc="left")
        right.locator_params(axis="x", integer=True)
        right.legend()
        return save(figure, out, "theorems")
