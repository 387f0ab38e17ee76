"""The study's table and figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ..training.curves import COLOURS
from .adapting import edges
from .plots import BASELINE_COLOUR, STYLE, band, draw_steps, pyplot, save
from .report import latex, markdown, write_jsonl, write_text
from .rows import course, result
from .scales import Scale
from .statistics import compare_seeds, describe
from .study import DYNAMIC, EXACT, HYPOTHESIS, best_candidate, candidates, measured_variants
from .variants import BASELINE

FOOTNOTE = (
    "Mean ± standard deviation over n seeds. Models are chosen by validation perplexity (seed 1); "
    "each reads the test text once. Δ: difference of the mean test perplexities to the baselines "
    "of the same seeds, with Welch's 95 % interval; g: Hedges' effect size, positive where the "
    "model is better; p-value: one-tailed Student's t-test."
)


def report(scale: Scale, out: Path, seeds: int) -> str:
    """Of what is there: a study that is still running gives a preliminary table."""
    best = best_candidate(out, list(candidates(scale)))
    names = [BASELINE, *candidates(scale), *measured_variants(best)]
    found = {name: _results(out, name, seeds) for name in names}
    found = {name: rows for name, rows in found.items() if rows}
    baseline = _by_seed(found.get(BASELINE, []))
    rows, records = [], []
    for name, runs in found.items():
        test = list(_by_seed(runs).values())
        valid = [row["valid_perplexity"] for row in runs if "valid_perplexity" in row]
        against = compare_seeds(_by_seed(runs), baseline) if name != BASELINE else None
        interval = against and against.interval
        marks = " (hypothesis)" * (name == HYPOTHESIS) + " (best on validation)" * (name == best)
        rows.append(
            {
                "model": name + marks,
                "n": f"{len(runs)}",
                "validation": f"{describe(valid)}" if valid else "-",
                "test": f"{describe(test)}",
                "Δ": f"{against.difference:+.2f}" if against else "-",
                "95 % interval": "[{:+.2f}, {:+.2f}]".format(*interval) if interval else "-",
                "g": f"{against.effect:.2f}" if interval else "-",
                "p-value": _p(against.p_better) if interval else "-",
            }
        )
        records.append(
            {"variant": name, "valid": valid, "test": test, "hypothesis": name == HYPOTHESIS,
             "best": name == best, "comparison": against and asdict(against)}
        )  # fmt: skip
    if not rows:
        return "No run of the study is finished yet.\n"
    title = "Does recoding beat its baseline?" + (" (preliminary)" if best is None else "")
    text = f"## {title}\n\n{markdown(rows)}\n{of_exact_gradients(found)}{of_the_grid(found)}"
    folder = out / "tables"
    folder.mkdir(exist_ok=True)
    write_text(folder / "study.md", f"{text}\n{FOOTNOTE}\n")
    write_text(folder / "study.tex", latex(rows) + "\n")
    write_jsonl(folder / "study.jsonl", records)
    _draw(out, scale, seeds, best)
    return text


def of_exact_gradients(found: dict[str, list[dict]]) -> str:
    """Models of the same seeds, trained with and without the gradient of the recoding gradient."""
    exact, detached = (_by_seed(found.get(name, [])) for name in (EXACT, HYPOTHESIS))
    seeds = sorted(exact.keys() & detached.keys())
    if len(seeds) < 2:
        return ""
    against = compare_seeds(exact, detached)
    low, high = against.interval
    return (
        f"\nExact against detached gradients ({HYPOTHESIS}, seeds {seeds[0]} to {seeds[-1]}): test "
        f"perplexity {describe([exact[s] for s in seeds])} against "
        f"{describe([detached[s] for s in seeds])}, difference {against.difference:+.2f} "
        f"[{low:+.2f}, {high:+.2f}], p {_p(against.p_better, '= ')}.\n"
    )


def of_the_grid(found: dict[str, list[dict]]) -> str:
    """Whether dynamic evaluation might do better with settings that were not tried."""
    runs = [row for name, rows in found.items() if name.startswith(DYNAMIC) for row in rows]
    beyond = [row for row in runs if edges(row["choices"])]
    if not beyond:
        return ""
    return (
        f"\nThe optimum of dynamic evaluation is not bracketed: for {len(beyond)} of {len(runs)} "
        "models the best learning rate or decay lies on the edge of the grid that was tried, so it "
        "may do better than shown.\n"
    )


def _by_seed(runs: list[dict]) -> dict[int, float]:
    return {row["seed"]: row["test_perplexity"] for row in runs}


def _p(value: float, equals: str = "") -> str:
    return f"{equals}{value:.4f}" if value >= 0.0001 else "< 0.0001"


def _results(out: Path, variant: str, seeds: int) -> list[dict]:
    rows = [result(out, f"{variant}.seed{seed}") for seed in range(1, seeds + 1)]
    return [row for row in rows if row is not None and row["status"] == "finished"]


def _runs(out: Path, variant: str, seeds: int) -> list[dict]:
    courses = [course(out, f"{variant}.seed{seed}") for seed in range(1, seeds + 1)]
    return [found for found in courses if found is not None]


def _draw(out: Path, scale: Scale, seeds: int, best: str | None) -> None:
    shown = {BASELINE: BASELINE_COLOUR}
    names = [name for name in (HYPOTHESIS, EXACT, best, "nll-c-0.3", "surprisal-hc-5") if name]
    shown |= dict(zip(dict.fromkeys(names), COLOURS, strict=False))
    runs = {name: found for name in shown if (found := _runs(out, name, seeds))}
    if HYPOTHESIS not in runs:
        return
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.3), layout="constrained")
        for name, found in runs.items():
            label = f"{name} (n={len(found)})"
            x = [row["epoch"] for row in found[0]["train"]]
            losses = [[row["loss"] for row in run["train"]] for run in found]
            band(left, x, losses, shown[name], label)
            x = [row["epoch"] for row in found[0]["epoch"]]
            valid = [[row["valid_perplexity"] for row in run["epoch"]] for run in found]
            band(
                middle, x, valid, shown[name], f"{name} (n={len(found)})", marker="o", markersize=3
            )
        draw_steps(right, runs[HYPOTHESIS])
        top = max(row["loss"] for row in runs[HYPOTHESIS][0]["train"][3:])
        left.set_ylim(top=top)
        left.set_title("training loss (nats per word)", loc="left")
        middle.set_title("validation perplexity", loc="left")
        right.set_title(f"step sizes of {HYPOTHESIS}", loc="left")
        for axis in (left, middle, right):
            axis.set_xlabel("epoch")
            axis.legend()
        middle.locator_params(axis="x", integer=True)
        save(figure, out, "study")
