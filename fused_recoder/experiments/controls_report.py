"""The controls' table, and perplexity against the arithmetic of training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ..training import Config
from .controls import BASELINE, arms, chosen
from .costs import training_flops
from .plots import STYLE, pyplot, save
from .report import markdown, write_jsonl, write_text
from .rows import result
from .scales import Scale
from .statistics import Comparison, compare_seeds, describe
from .study import DYNAMIC

FOOTNOTE = (
    "Mean ± standard deviation over n seeds; each model reads the test text once. MFLOP: "
    "arithmetic of training, per token: the matrix products of this implementation. Hours: of "
    "training. "
    "Δ: difference of the mean test perplexities to the tied baselines of the same seeds, with "
    "Welch's 95 % interval; g: Hedges' effect size, positive where the model is better. Dynamic: "
    "test perplexity with dynamic evaluation, its settings chosen on the validation text."
)
COLOURS = {"recoding": "#d1495b", "feedback": "#edae49", "plain": "#37352f"}


def report(scale: Scale, out: Path, seeds: int) -> str:
    """Of what is there: controls that are still running give a preliminary table."""
    names = list(arms(scale))
    found = {name: rows for name in names if (rows := _finished(out, name, seeds))}
    if not found:
        return "No run of the controls is finished yet.\n"
    baseline = _tests(found.get(BASELINE, []))
    rows, records = [], []
    for name, runs in found.items():
        against = compare_seeds(_tests(runs), baseline) if name != BASELINE else None
        dynamic = _finished(out, f"{DYNAMIC}.{name}", seeds)
        rows.append(_cells(name + " (chosen)" * (name == chosen(out)), runs, dynamic, against))
        records.append(
            {"variant": name, "test": _tests(runs), "dynamic": _tests(dynamic),
             "flops": _flops(runs[0]), "comparison": against and asdict(against)}
        )  # fmt: skip
    missing = [name for name in names if name not in found]
    text = f"## Is it the gradient?\n\n{markdown(rows)}\n"
    text += f"\nNot trained: {', '.join(missing)}.\n" if missing else ""
    folder = out / "tables"
    folder.mkdir(exist_ok=True)
    write_text(folder / "controls.md", f"{text}\n{FOOTNOTE}\n")
    write_jsonl(folder / "controls.jsonl", records)
    _draw(found, out)
    return text


def _finished(out: Path, variant: str, seeds: int) -> list[dict]:
    rows = [result(out, f"{variant}.seed{seed}") for seed in range(1, seeds + 1)]
    return [row for row in rows if row is not None and row["status"] == "finished"]


def _tests(runs: list[dict]) -> dict[int, float]:
    return {row["seed"]: row["test_perplexity"] for row in runs}


def _flops(run: dict) -> int:
    return training_flops(Config.from_dict(run["config"]), run["vocabulary"])


def _cells(name: str, runs: list[dict], dynamic: list[dict], against: Comparison | None) -> dict:
    interval = against and against.interval
    hours = [row["train_seconds"] / 3600 for row in runs]
    return {
        "model": name,
        "n": f"{len(runs)}",
        "units": f"{runs[0]['config']['hidden_size']}",
        "parameters": f"{runs[0]['parameters'] / 1e6:.2f} M",
        "MFLOP": f"{_flops(runs[0]) / 1e6:.1f}",
        "hours": f"{sum(hours) / len(hours):.2f}",
        "validation": f"{describe([row['valid_perplexity'] for row in runs])}",
        "test": f"{describe([row['test_perplexity'] for row in runs])}",
        "Δ": f"{against.difference:+.2f}" if against else "-",
        "95 % interval": "[{:+.2f}, {:+.2f}]".format(*interval) if interval else "-",
        "g": f"{against.effect:.2f}" if against and interval else "-",
        "dynamic": f"{describe([row['test_perplexity'] for row in dynamic])}" if dynamic else "-",
    }


def _kind(config: dict) -> str:
    if config["signal"] is not None:
        return "recoding"
    return "plain" if config["architecture"] == "recoding" else "feedback"


def _draw(found: dict[str, list[dict]], out: Path) -> None:
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
        for name, runs in found.items():
            sample = describe([row["test_perplexity"] for row in runs])
            x, colour = _flops(runs[0]) / 1e6, COLOURS[_kind(runs[0]["config"])]
            axis.errorbar(x, sample.mean, yerr=sample.deviation, fmt="o", color=colour, capsize=3)
            label = name.removeprefix("tied-")
            axis.annotate(label, (x, sample.mean), (6, 4), textcoords="offset points", fontsize=8)
        for kind, colour in COLOURS.items():
            axis.plot([], [], "o", color=colour, label=kind)
        axis.set_xlabel("arithmetic of training (MFLOP per token)")
        axis.set_ylabel("test perplexity")
        axis.margins(x=0.15)
        axis.legend()
        save(figure, out, "controls")
