"""Results as a Markdown table (which is also what the terminal shows)."""

from __future__ import annotations


def markdown(results: dict) -> str:
    machine = ", ".join(f"{k} {v}" for k, v in results["machine"].items())
    lines = [f"Machine: {machine}. {results['rounds']} interleaved rounds.", ""]
    for case in results["cases"]:
        lines += [
            f"### {case['name']}: {case['shape']}, signal `{case['signal']}`, forward + backward",
            "",
            "| contender | tokens/s | speed relative to the reference: median (quartiles) "
            "| extra memory, MB |",
            "|---|---|---|---|",
        ]
        for row in case["rows"]:
            if "failed" in row:
                lines.append(f"| {row['name']} | did not run: {row['failed']} | | |")
                continue
            low, middle, high = row["relative"]
            memory = "" if row["memory"] is None else f"{row['memory']:.0f}"
            lines.append(
                f"| {row['name']} | {row['tokens_per_second']:,.0f} "
                f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {memory} |"
            )
        lines += ["", f"A large GEMM in the same run: {case['gemm_gflops']:.0f} GFLOP/s.", ""]
    return "\n".join(lines)
