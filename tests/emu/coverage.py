"""Line coverage of csrc/kernels/cuda by the checks of this folder: `python tests/emu/coverage.py`
prints it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for running it by hand
from emu import build

KERNELS = build.ROOT / "csrc" / "kernels" / "cuda"


def measure() -> dict[str, dict[int, int]]:
    """How often each line was executed, by file name; a template's instances are added up."""
    folder = build.build("coverage", "kernels")
    for counts in folder.glob("*.gcda"):
        counts.unlink()
    checks = subprocess.run([folder / "kernels", "--list"], text=True, capture_output=True)
    for name in checks.stdout.split():
        subprocess.run([folder / "kernels", name], check=True)
    objects = [str(path) for path in folder.glob("*.gcda")]
    gcov = subprocess.run(
        ["gcov", "--json-format", "--stdout", *objects],
        cwd=folder, text=True, capture_output=True, check=True,
    )  # fmt: skip
    lines: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for document in gcov.stdout.splitlines():
        for file in json.loads(document)["files"]:
            path = Path(folder, file["file"]).resolve()
            if path.parent == KERNELS:
                for line in file["lines"]:
                    lines[path.name][line["line_number"]] += line["count"]
    return lines


def missed(lines: dict[int, int]) -> list[int]:
    return sorted(number for number, count in lines.items() if count == 0)


if __name__ == "__main__":
    if reason := build.missing():
        sys.exit(f"cannot measure: {reason}")
    print("| file | lines | covered | missed |\n|---|---|---|---|")
    for name, lines in sorted(measure().items()):
        gaps = missed(lines)
        print(f"| {name} | {len(lines)} | {len(lines) - len(gaps)} | {gaps or ''} |")
