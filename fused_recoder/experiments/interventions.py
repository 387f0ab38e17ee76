"""Diagnostic classifiers and agreement with and without interventions: jobs and table."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np

from ..analysis.agreement import Agreement, read_giulianelli, read_gulordava
from ..analysis.interventions import agreement, train_classifiers
from ..training import load_model
from ..training.curves import COLOURS
from .jobs import Job, Measurement, Training
from .plots import BASELINE_COLOUR, STYLE, pyplot, save
from .report import markdown, write_jsonl, write_text
from .rows import result
from .scales import Scale
from .statistics import describe
from .variants import BASELINE

STEPS = (1.0, 3.0, 5.0, 10.0, 30.0, 100.0, 300.0)
# Large steps always win by accuracy: they make the model forget what else it has read. So a step
# may raise the perplexity of the sentences by that factor at most.
PRICE = 1.1
TRAINING, VALIDATION = 1000, 200  # rows of the larger file; the rest is for testing
ONE_ATTRACTOR, GENERAL, NONSENSE = "one attractor", "held out", "nonsense (Gulordava)"


def read_sets(folder: Path) -> tuple[dict[str, list[Agreement]], list[Agreement]]:
    """Test sets by name, and the items for training and validating."""
    general = read_giulianelli(folder / "giulianelli" / "wd_k0_l5_m0_a-.tsv")
    attractors = read_giulianelli(folder / "giulianelli" / "wd_k0_l5_m0_a3.tsv")
    random.Random(0).shuffle(general)
    known = TRAINING + VALIDATION
    nonsense = read_gulordava(folder / "gulordava" / "generated.tab")
    sets = {GENERAL: general[known:], ONE_ATTRACTOR: attractors, NONSENSE: nonsense}
    return sets, general[:known]


def measure(folders: list[Path], data: Path, *, sets: Path) -> dict:
    loaded = load_model(folders[0], signal=None)
    model, vocabulary = loaded.model, loaded.vocabulary
    tests, own = read_sets(sets)
    coverage = {
        name: [sum(item.known(vocabulary) for item in items), len(items)]
        for name, items in {"training": own, **tests}.items()
    }
    own = [item for item in own if item.known(vocabulary)]
    split = round(len(own) * TRAINING / (TRAINING + VALIDATION))
    training, validation = own[:split], own[split:]
    diagnoses = train_classifiers(model, vocabulary, training, validation)
    untouched = agreement(model, vocabulary, validation)
    choices = []
    for until in (True, False):
        for step in STEPS:
            moved = agreement(model, vocabulary, validation, diagnoses, step, until_verb=until)
            price = moved["perplexity"] / untouched["perplexity"]
            choice = {"step": step, "until_verb": until, "accuracy": moved["accuracy"]}
            choices.append({**choice, "price": price})
    best = choose(choices)
    step, until = best["step"], best["until_verb"]
    rows = []
    for name, items in tests.items():
        known = [item for item in items if item.known(vocabulary)]
        if not known:
            continue
        plain = agreement(model, vocabulary, known)
        moved = agreement(model, vocabulary, known, diagnoses, step, until_verb=until)
        rows.append({"set": name, "plain": plain, "intervention": moved})
    return {
        "coverage": coverage,
        "classifiers": [
            {"layer": d.layer, "state": d.state, "accuracy": d.accuracy} for d in diagnoses
        ],
        "step": step,
        "until_verb": until,
        "validation_accuracy": untouched["accuracy"],
        "choices": choices,
        "sets": rows,
    }


def choose(choices: list[dict]) -> dict:
    """The most accurate of those that are cheap enough; were there none, the cheapest."""
    cheapest = min(choices, key=lambda choice: choice["price"])
    allowed = [choice for choice in choices if choice["price"] <= PRICE] or [cheapest]
    return max(allowed, key=lambda choice: choice["accuracy"])


def jobs(scale: Scale, out: Path, seeds: int, *, sets: Path) -> list[Job]:
    found: list[Job] = []
    for seed in range(1, seeds + 1):
        plain = Training(BASELINE, scale.plain.replace(seed=seed))
        about = {"variant": "interventions", "seed": seed}
        run = functools.partial(measure, sets=sets)
        found += [plain, Measurement(f"interventions.seed{seed}", about, (plain.name,), run)]
    return found


def report(scale: Scale, out: Path, seeds: int) -> str:
    found = [result(out, f"interventions.seed{seed}") for seed in range(1, seeds + 1)]
    found = [row for row in found if row is not None]
    if not found:
        return "No intervention is measured yet.\n"
    rows = []
    for i, one in enumerate(found[0]["sets"]):
        of_runs = [row["sets"][i] for row in found]
        known, items = found[0]["coverage"][one["set"]]

        def shown(kind: str, number: str, factor: float, of_runs=of_runs) -> str:
            return f"{describe([factor * run[kind][number] for run in of_runs])}"

        rows.append(
            {
                "set": one["set"],
                "items (known)": f"{items} ({known})",
                "accuracy, %": shown("plain", "accuracy", 100),
                "with intervention, %": shown("intervention", "accuracy", 100),
                "perplexity": shown("plain", "perplexity", 1),
                "with intervention": shown("intervention", "perplexity", 1),
            }
        )
    classifiers = []
    for i, one in enumerate(found[0]["classifiers"]):
        accuracies = [100 * row["classifiers"][i]["accuracy"] for row in found]
        place = {"layer": f"{one['layer'] + 1}", "state": one["state"]}
        classifiers.append({**place, "accuracy, %": f"{describe(accuracies)}"})
    chosen = ", ".join(
        f"{row['step']:g} {'until the verb' if row['until_verb'] else 'at the subject'}"
        for row in found
    )
    text = (
        f"## Interventions\n\n{markdown(rows)}\n\n"
        "Steps chosen on validation items, by accuracy among those "
        f"that raise their perplexity by {PRICE - 1:.0%} at most: {chosen}.\n\n"
        f"Diagnostic classifiers for the number of the subject:\n\n{markdown(classifiers)}\n"
    )
    folder = out / "tables"
    folder.mkdir(exist_ok=True)
    write_text(folder / "interventions.md", text)
    write_jsonl(folder / "interventions.jsonl", found)
    _draw(found, out)
    return text


def _draw(found: list[dict], out: Path) -> list[Path]:
    """Accuracy with and without, by set; what it costs on the validation items as steps grow."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
        names = [row["set"] for row in found[0]["sets"]]
        for i in range(len(names)):
            for run, y in zip(found, np.linspace(i - 0.15, i + 0.15, len(found)), strict=True):
                plain, moved = (
                    100 * run["sets"][i][kind]["accuracy"] for kind in ("plain", "intervention")
                )
                left.plot([plain, moved], [y, y], color="#b4b2ad", linewidth=1, zorder=1)
                left.plot(plain, y, "o", color=BASELINE_COLOUR, markersize=5)
                left.plot(moved, y, "o", color=COLOURS[0], markersize=5)
        left.plot([], [], "o", color=BASELINE_COLOUR, label="plain")
        left.plot([], [], "o", color=COLOURS[0], label="with interventions")
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - 0.5, -0.5)
        left.set_xlabel("correct form of the verb preferred, %")
        left.set_title("agreement, a line per model", loc="left")
        left.legend()
        for until, label, colour in (
            (False, "at the subject", COLOURS[1]),
            (True, "until the verb", COLOURS[2]),
        ):
            for run in found:
                shown = [c for c in run["choices"] if c["until_verb"] == until]
                accuracies = [run["validation_accuracy"], *(c["accuracy"] for c in shown)]
                right.plot(
                    [1, *(c["price"] for c in shown)],
                    [100 * accuracy for accuracy in accuracies],
                    marker="o", markersize=3, linewidth=1.2, color=colour,
                    label=label if run is found[0] else None,
                )  # fmt: skip
        right.axvline(PRICE, color="#787774", linewidth=0.8, linestyle=":")
        right.annotate("allowed", (PRICE, 0.93), (-3, 0), ("data", "axes fraction"),
                       "offset points", ha="right", fontsize=8)  # fmt: skip
        right.set_xlabel("perplexity, relative to the plain model's")
        right.set_title("validation items: accuracy (%) over its price", loc="left")
        right.legend()
        return save(figure, out, "interventions")
