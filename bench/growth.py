"""How time and memory of a training step grow with T, B, V and K, one at a time."""

from __future__ import annotations

import statistics
from dataclasses import replace

from . import measure
from .cases import ENTROPY, FUSED, LARGE_GEMM, NLL, PLAIN, SHARED, Contender, Shape, Variant
from .contenders import make_job

BASE = Shape(B=16, T=32, H=200, L=2, V=10_000)
AXES = {
    "T": (8, 32, 128, 512),
    "B": (1, 4, 16, 64, 256),
    "V": (1_000, 4_000, 16_000, 64_000),
    "K": (1, 2, 5, 10, 25, 50),
}
CONTENDERS = [Contender(PLAIN), Contender(FUSED, NLL), Contender(FUSED, ENTROPY)]
MIXTURES = [Contender(FUSED, SHARED), Contender(FUSED, replace(SHARED, mask="unit"))]


def at(axis: str, value: int, contender: Contender) -> tuple[Contender, Shape]:
    if axis == "K":
        variant: Variant = replace(contender.variant, K=value)
        return replace(contender, variant=variant), BASE
    return contender, replace(BASE, **{axis: value})


def run(rounds: int, memory: bool) -> dict:
    axes = {axis: measure.in_a_fresh_process(_run, axis, rounds, memory) for axis in AXES}
    return {"base": str(BASE), "axes": axes}


def _run(axis: str, rounds: int, memory: bool) -> dict[str, list[dict]]:
    """A list of points for each contender."""
    contenders = MIXTURES if axis == "K" else CONTENDERS
    series = {str(c).split(", K=")[0]: [] for c in contenders}
    jobs = {
        (i, v): make_job(*at(axis, v, c), "train")
        for i, c in enumerate(contenders)
        for v in AXES[axis]
    }
    times, _ = measure.interleave(jobs, rounds, f"growth over {axis}", LARGE_GEMM)
    for (i, value), seconds in times.items():
        name = list(series)[i]
        megabytes = (
            measure.memory_in_a_fresh_process("growth", f"{axis}/{value}/{i}") if memory else None
        )
        series[name].append(
            {"value": value, "seconds": statistics.median(seconds), "memory": megabytes}
        )
    return series


def job_for_memory(spec: str):
    axis, value, index = spec.split("/")
    contender = (MIXTURES if axis == "K" else CONTENDERS)[int(index)]
    return at(axis, int(value), contender)
