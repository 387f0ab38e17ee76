"""Results as Markdown, LaTeX and JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..training.files import atomic_file
from .rows import result
from .statistics import Comparison, Sample, compare_seeds, describe
from .tables import Published, Table

MISSING = "-"


@dataclass(frozen=True)
class Line:
    """A row of a table with its numbers."""

    table: str
    model: str
    setting: str
    perplexities: tuple[float, ...]  # on the test text, one per finished run
    sample: Sample | None
    diverged: int  # runs that ended in a loss that is not finite
    comparison: Comparison | None  # None for the baseline itself
    speed: float | None  # tokens per second in testing, mean
    published: Published
    published_speed: float | None


def lines(table: Table, out: Path) -> list[Line]:
    """The first row is the baseline."""
    found: list[Line] = []
    baseline: dict[int, float] = {}
    for row in table.rows:
        results = [result(out, job.name) for job in row.jobs]  # of one seed after the other
        finished = {i: r for i, r in enumerate(results) if r and r["status"] == "finished"}
        by_seed = {i: r["test_perplexity"] for i, r in finished.items()}
        values = tuple(by_seed.values())
        speeds = [r["test_tokens_per_second"] for r in finished.values()]
        baseline = baseline if found else by_seed
        found.append(
            Line(
                table.name,
                row.model,
                row.setting,
                values,
                describe(values) if values else None,
                sum(r is not None for r in results) - len(finished),
                compare_seeds(by_seed, baseline) if found else None,
                sum(speeds) / len(speeds) if speeds else None,
                row.published,
                row.published_speed,
            )
        )
    return found


def cells(found: Sequence[Line], table: Table) -> list[dict[str, str]]:
    """What is shown of the lines, by column."""
    rows = []
    for line in found:
        comparison = line.comparison
        row = {
            "model": line.model,
            table.setting: line.setting,
            "n": f"{len(line.perplexities)}"
            + (f" (+{line.diverged} diverged)" if line.diverged else ""),
            "test perplexity": f"{line.sample}" if line.sample else MISSING,
            "Δ baseline": f"{comparison.difference:+.2f}" if comparison else MISSING,
            "p-value": _p(comparison),
        }
        if table.speed:
            row["tokens/s"] = f"{line.speed:,.0f}" if line.speed else MISSING
        if any(other.published for other in found):
            published = line.published
            row["thesis"] = "{:.2f} ± {:.2f}".format(*published) if published else MISSING
        if table.speed:
            speed = line.published_speed
            row["thesis, tokens/s"] = f"{speed:g}" if speed else MISSING
        rows.append(row)
    return rows


def _p(comparison: Comparison | None) -> str:
    if comparison is None or comparison.p_better is None:
        return MISSING
    return f"{comparison.p_better:.3f}" if comparison.p_better >= 0.001 else "< 0.001"


def best_row(found: Sequence[Line]) -> int | None:
    means = {i: line.sample.mean for i, line in enumerate(found) if line.sample}
    return min(means, key=means.get, default=None)


def markdown(rows: list[dict[str, str]], bold: int | None = None, column: str = "") -> str:
    if bold is not None:
        rows = [dict(row) for row in rows]
        rows[bold][column] = f"**{rows[bold][column]}**"
    names = list(rows[0])
    words = ("model", "change", "signal", "recoder", "recoded", "set", "predictors", "beyond")
    numbers = [n for n in names if n not in words]
    head = [f"| {' | '.join(names)} |"]
    head.append("|" + "|".join("---:" if n in numbers else "---" for n in names) + "|")
    return "\n".join(head + [f"| {' | '.join(row.values())} |" for row in rows])


LATEX = {"±": r"$\pm$", "Δ": r"$\Delta$", "<": "$<$", "_": r"\_", "%": r"\%"}


def latex(rows: list[dict[str, str]], bold: int | None = None, column: str = "") -> str:
    """A `tabular` for the package booktabs."""

    def text(value: str) -> str:
        for symbol, command in LATEX.items():
            value = value.replace(symbol, command)
        return value

    names = list(rows[0])
    body = []
    for i, row in enumerate(rows):
        values = [text(value) for value in row.values()]
        if i == bold:
            values[names.index(column)] = rf"\textbf{{{values[names.index(column)]}}}"
        body.append(" & ".join(values) + r" \\")
    return "\n".join(
        [
            rf"\begin{{tabular}}{{ll{'r' * (len(names) - 2)}}}",
            r"\toprule",
            " & ".join(text(name) for name in names) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


FOOTNOTE = (
    "Mean ± standard deviation over n runs; diverged runs ended in a loss that is not finite. "
    "Δ baseline: to the baselines of the same seeds. p-value: one-tailed Student's t-test that the "
    "model has a lower perplexity than they."
)
PUBLISHED_NOTE = " Thesis: Ulmer 2019, 2x650 on PTB, four runs, speed on one NVIDIA 1080 Ti."


def write_table(table: Table, out: Path) -> str:
    """Writes `tables/<name>.md`, `.tex` and `.jsonl`; returns the Markdown."""
    found = lines(table, out)
    rows, best = cells(found, table), best_row(found)
    text = f"## {table.title}\n\n{markdown(rows, best, 'test perplexity')}\n"
    folder = out / "tables"
    folder.mkdir(exist_ok=True)
    note = FOOTNOTE + (PUBLISHED_NOTE if any(line.published for line in found) else "")
    write_text(folder / f"{table.name}.md", f"{text}\n{note}\n")
    write_text(folder / f"{table.name}.tex", latex(rows, best, "test perplexity") + "\n")
    write_jsonl(folder / f"{table.name}.jsonl", [asdict(line) for line in found])
    return text


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def write_jsonl(path: Path, rows: Sequence[dict]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
