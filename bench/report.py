"""Results as Markdown tables (which is also what the terminal shows)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .cases import PLAIN, Contender


def _ratio(values, digits: int = 2) -> str:
    if values is None:
        return ""
    low, middle, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _row(row: dict) -> str:
    if "failed" in row:
        return f"| {row['name']} | did not run: {row['failed']} | | | | | |"
    memory = "" if row["memory"] is None else f"{row['memory']:.0f}"
    low, share, high = row["share_of_limit"]
    return (
        f"| {row['name']} | {row['tokens_per_second']:,.0f} | {_ratio(row['to_plain'])} "
        f"| {_ratio(row['to_reference'])} | {_ratio(row['to_engine'])} "
        f"| {share:.0%} ({low:.0%}-{high:.0%}) | {memory} |"
    )


def table(experiment: dict) -> str:
    head = (
        f"### {experiment['name']}: {experiment['shape']}, {experiment['threads']} "
        f"thread{'s' if experiment['threads'] > 1 else ''}"
    )
    lines = [
        head,
        "",
        "| contender | tokens/s | speed / plain LM | speed / own reference "
        "| speed / own engine without a signal | share of the limit | extra memory, MB |",
        "|---|---|---|---|---|---|---|",
        *(_row(row) for row in experiment["rows"]),
        "",
        f"Medians (quartiles) over {experiment['rounds']} interleaved rounds; a large GEMM in the "
        f"same run: {experiment['gemm_gflops']:.0f} GFLOP/s.",
        "",
    ]
    return "\n".join(lines)


def markdown(results: dict) -> str:
    machine = ", ".join(f"{k} {v}" for k, v in results["machine"].items())
    parts = [f"Machine: {machine}.", ""]
    return "\n".join([*parts, *(table(e) for e in results["experiments"])])


def find(results: dict, experiment: str, name: str, threads: int) -> dict | None:
    for e in results["experiments"]:
        if e["name"] == experiment and e["threads"] == threads:
            return next((r for r in e["rows"] if r["name"] == name and "failed" not in r), None)
    return None


# The table of docs/benchmarks.md: job, experiment, contender.
SUMMARY = [
    ("train", "train thesis", "nll"),
    ("train", "train thesis", "surprisal"),
    ("train", "train thesis", "entropy"),
    ("train", "train MC Dropout", "MC Dropout unit, K=10"),
    ("train", "train MC Dropout", "MC Dropout shared, K=10"),
    ("train", "train ensemble", "ensemble members, K=10"),
    ("train", "train ensemble", "ensemble mean_logits, K=10"),
    ("train", "train exact", "nll, exact gradient"),
    ("train", "train small", "nll"),
    ("train", "train small", "surprisal"),
    ("train", "train small, freed memory kept", "nll"),
    ("train", "train small, freed memory kept", "surprisal"),
    ("train", "train wide-vocab", "nll"),
    ("train", "train long", "nll"),
    ("evaluate", "evaluate thesis", "nll"),
    ("evaluate", "evaluate thesis", "entropy"),
    ("evaluate", "evaluate MC shared", "MC Dropout shared, K=10"),
    ("read", "read", "nll"),
    ("read", "read small", "nll"),
]


def _share_of_memory(row: dict, plain: dict | None) -> str:
    known = plain and row.get("memory") and plain.get("memory")
    return f"{row['memory'] / plain['memory']:.2f}" if known else ""


def _remark(experiment: str) -> str:
    """What a name says behind its comma."""
    _, _, remark = experiment.partition(", ")
    return f" ({remark})" if remark else ""


def summary(results: dict) -> str:
    """The lines for docs/benchmarks.md."""
    counts = sorted({e["threads"] for e in results["experiments"]}, reverse=True)
    shapes = {e["name"]: e["shape"] for e in results["experiments"]}
    lines = [
        "| job | shape | signal | threads | speed / plain LM | speed / reference "
        "| share of the limit | memory / plain LM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for threads in counts:
        for job, experiment, variant in SUMMARY:
            row = find(results, experiment, f"fused, {variant}", threads)
            if row is None:
                continue
            plain = find(results, experiment, str(Contender(PLAIN)), threads)
            lines.append(
                f"| {job} | {shapes[experiment]}{_remark(experiment)} | {variant} | {threads} "
                f"| {_ratio(row['to_plain'])} | {_ratio(row['to_reference'])} "
                f"| {row['share_of_limit'][1]:.0%} | {_share_of_memory(row, plain)} |"
            )
    machine = results["machine"]
    lines += [
        "",
        f"Medians (quartiles) of interleaved rounds, {machine.get('precision', 'float32')}, "
        f"{machine['cpu']}, "
        f"{machine['kernels']} kernels, torch {machine['torch']}.",
    ]
    return "\n".join(lines)


def write_into_page(page: Path, folder: Path) -> None:
    """Replaces what is between the two marks of a folder of results."""
    text = page.read_text()
    start, end = (f"<!-- bench/{folder.name}: {place} -->" for place in ("begin", "end"))
    if start not in text or end not in text:
        raise ValueError(f"{page} has no place for the table: {start} ... {end}")
    results = json.loads((folder / "results.json").read_text())
    body = f"{start}\n{summary(results)}\n{end}"
    page.write_text(re.sub(f"{start}.*{end}", lambda _: body, text, flags=re.S))
