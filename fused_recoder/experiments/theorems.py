"""The two theorems on the baseline's states: jobs, table and figure."""

from __future__ import annotations

from pathlib import Path

import fused_recoder as fr

from ..analysis.theorems import later_effect, signal_change, windows
from ..training import Corpus, load_model
from ..training.curves import COLOURS
from .jobs import Measurement, Training, result
from .plots import STYLE, pyplot, save
from .report import markdown, write_jsonl, write_text
from .scales import Scale
from .variants import BASELINE

STEPS = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SIGNALS = {
    "nll": lambda: fr.signals.NLL(),
    "surprisal": lambda: fr.signals.Surprisal(),
    "entropy": lambda: fr.signals.Entropy(),
    "mc_dropout": lambda: fr.signals.MCDropout(num_samples=5, p=0.42, mask="shared"),
}
BOUNDED = ("nll", "surprisal", "entropy")  # those whose curvature has a bound
LATER = {"nll": 0.3, "surprisal": 5.0, "entropy": 0.3, "mc_dropout": 0.3}
AT, LATER_STEPS = 10, 10  # the recoded time step of the second theorem, and how far it looks


def measure(folders: list[Path], data: Path) -> dict:
    loaded = load_model(folders[0])
    tokens = Corpus(data, vocabulary=loaded.vocabulary)["valid"]
    inputs, targets = windows(tokens, max(2, min(40, len(tokens) // 40)), 30)
    first = []
    for name, signal in SIGNALS.items():
        steps = {f"{step:g}": step for step in STEPS}
        if name in BOUNDED:
            steps["1/L (guaranteed)"] = "lipschitz"
        steps["backtracking"] = "backtracking"
        for label, step in steps.items():
            row = signal_change(loaded.model, signal(), step, ("h",), inputs, targets)
            first.append({"signal": name, "step": label, **row})
    # One position of every sequence counts here, so there are more of them.
    inputs, targets = windows(tokens, max(2, min(400, len(tokens) // 40)), AT + LATER_STEPS + 1)
    second = [
        {"signal": name, "step": step, "others": others, **row}
        for name, step in LATER.items()
        for others in (False, True)
        for row in later_effect(
            loaded.model, SIGNALS[name](), step, ("h", "c"), inputs, targets, at=AT, others=others
        )
    ]
    return {"first": first, "second": second}


def jobs(scale: Scale, out: Path, seeds: int) -> list:
    training = Training(BASELINE, scale.plain)
    return [training, Measurement("theorems", {}, (training.name,), measure)]


def report(scale: Scale, out: Path, seeds: int) -> str:
    found = result(out, "theorems")
    names = list(dict.fromkeys(row["step"] for row in found["first"]))
    rows = []
    for signal in SIGNALS:
        by_step = {row["step"]: row for row in found["first"] if row["signal"] == signal}
        shares = {
            name: f"{by_step[name]['not_raised']:.1%}" if name in by_step else "-" for name in names
        }
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
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for signal, colour in zip(SIGNALS, COLOURS, strict=False):
            rows = [r for r in found["first"] if r["signal"] == signal]
            fixed = [r for r in rows if r["step"][0].isdigit() and "L" not in r["step"]]
            left.plot(
                [float(r["step"]) for r in fixed],
                [100 * r["not_raised"] for r in fixed],
                "o-", color=colour, markersize=3.5, label=signal,
            )  # fmt: skip
            proven = [r for r in rows if "L" in r["step"]]
            left.plot(
                [r["mean_step"] for r in proven],
                [100 * r["not_raised"] for r in proven],
                "*", color=colour, markersize=10,
            )  # fmt: skip
            later = [r for r in found["second"] if r["signal"] == signal and r["others"]]
            k = [r["k"] for r in later][1:]
            mean = [r["mean_change"] for r in later][1:]
            error = [1.96 * r["standard_error"] for r in later][1:]
            low, high = ([m + s * e for m, e in zip(mean, error, strict=True)] for s in (-1, 1))
            label = f"{signal}, step {LATER[signal]:g}"
            right.plot(k, mean, "o-", color=colour, markersize=3, label=label)
            right.fill_between(k, low, high, color=colour, alpha=0.15, linewidth=0)
        left.plot([], [], "*", color="#787774", markersize=9, label="1/L, guaranteed")
        left.set_xscale("log")
        left.set_ylim(top=100.5)
        left.set_xlabel("step size")
        left.set_title("positions where recoding does not raise δ (%)", loc="left")
        left.legend(loc="lower left")
        right.axhline(0, color="#787774", linewidth=0.8)
        right.set_xlabel("steps after the recoding")
        right.set_title("mean change of δ at later steps", loc="left")
        right.locator_params(axis="x", integer=True)
        right.legend()
        return save(figure, out, "theorems")
