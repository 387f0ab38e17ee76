"""What nvcc's code asks of a GPU at the thesis's shape, counted by the interpreter of tests/ptx.
`python -m tools.ptx_counts` prints a table of all kernels, with `--write` into docs/gpu.md;
`python -m tools.ptx_counts recode` shows where the kernels of that name load and store."""

from __future__ import annotations

import argparse
import sys

from . import nvcc_check
from .gpu_tables import PAGE, replace_part

sys.path.insert(0, str(PAGE.parent.parent / "tests"))
from ptx import build, report
from ptx.report import Kernel, Requests

BEGIN = "<!-- begin: python -m tools.ptx_counts --write -->"
NOTE = """\
Counted, at H = 650 and V = 10,000, with 8 rows (then the alignment of their starts repeats) and
most optional arguments, in the PTX of {architecture}. Sectors of 32 bytes per load or store of a
warp, in brackets as many as the same bytes would take side by side; used: the share of the sectors'
bytes that the warp has asked for. Rounds per access of shared memory, in brackets without bank
conflicts. PTX instructions per warp; double: the share of them that compute in double precision;
idle: the share of lanes that sit an instruction out."""

# Checks that have no shape.
OTHERS = ("softmax_large", "softmax_without", "softmax_targets", "list_units_")


def count() -> dict[str, Kernel]:
    """All kernels, by name."""
    checks = report.run("kernels", "--list").stdout.split()
    kernels: dict[str, Kernel] = {}
    for check in checks:
        if not check.startswith(OTHERS):
            kernels |= report.counted("kernels", "--thesis-shape", check).kernels
    return kernels


def by_short_name(kernels: dict[str, Kernel]) -> dict[str, Kernel]:
    """`recode_kernel<__half, 2>` for what is demangled; sorted."""
    names = nvcc_check.readable(list(kernels))
    return dict(sorted(zip(names, kernels.values(), strict=True)))


def per_request(requests: Requests) -> str:
    if requests.count == 0:
        return ""
    return f"{requests.parts / requests.count:.1f} ({requests.least / requests.count:.1f})"


def used(kernel: Kernel) -> str:
    sectors = kernel.loads.parts + kernel.stores.parts
    return f"{100 * (kernel.loads.bytes + kernel.stores.bytes) / (32 * sectors):.0f} %"


def table(kernels: dict[str, Kernel]) -> str:
    lines = [
        "| kernel | sectors per load | per store | used | rounds | instructions | double | idle |",
        "|---" * 8 + "|",
    ]
    for name, kernel in kernels.items():
        lines.append(
            f"| `{name}` | {per_request(kernel.loads)} | {per_request(kernel.stores)} "
            f"| {used(kernel)} | {per_request(kernel.shared)} "
            f"| {kernel.instructions / kernel.warps:.0f} "
            f"| {100 * kernel.doubles / kernel.instructions:.0f} % "
            f"| {100 - 100 * kernel.lanes / (32 * kernel.instructions):.0f} % |"
        )
    return "\n".join(lines)


def places(kernels: dict[str, Kernel]) -> str:
    """Of single kernels: by source line, the most sectors first."""
    lines = []
    for name, kernel in kernels.items():
        lines += [f"\n{name}\n", "| place | requests | sectors | used |", "|---" * 4 + "|"]
        for place, requests in sorted(kernel.places.items(), key=lambda item: -item[1].parts):
            lines.append(
                f"| {place} | {requests.count} | {per_request(requests)} "
                f"| {100 * requests.bytes / (32 * requests.parts):.0f} % |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", nargs="?", help="the beginning of names: show their places")
    parser.add_argument("--write", action="store_true", help="the table into docs/gpu.md")
    arguments = parser.parse_args()
    if reason := build.missing():
        print(f"skipped: {reason}")
        return 0
    kernels = by_short_name(count())
    if arguments.kernel:
        print(places({n: k for n, k in kernels.items() if n.startswith(arguments.kernel)}))
    elif arguments.write:
        note = NOTE.format(architecture=build.ARCHITECTURE)
        replace_part(BEGIN, f"{note}\n\n{table(kernels)}\n")
    else:
        print(table(kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
