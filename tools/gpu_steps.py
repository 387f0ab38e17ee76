"""Launches, bytes and operations of a time step at the thesis's shape, counted by the shim of
tests/emu, and what they would take at the peak rates of three GPUs. `python -m tools.gpu_steps`
rewrites the part of docs/gpu.md between its markers."""

from __future__ import annotations

import sys

import torch

from bench.cases import CASES

from .gpu_tables import PAGE, replace_part

sys.path.insert(0, str(PAGE.parent.parent / "tests"))
from emu.launches import Counts, count

import fused_recoder as fr

SHAPE = CASES["thesis"]
K = 10
BEGIN = "<!-- begin: python -m tools.gpu_steps -->"

# float32 operations and bytes per second, from NVIDIA's data sheets: A100 40GB SXM4 (19.5 TFLOPS,
# 1,555 GB/s), H100 SXM5 (67 TFLOPS, 3,350 GB/s), GeForce RTX 4090 (82.6 TFLOPS, 1,008 GB/s).
DEVICES = {"A100": (19.5e12, 1.555e12), "H100": (67e12, 3.35e12), "RTX 4090": (82.6e12, 1.008e12)}

SIGNALS = {
    "none": None,
    "nll": "nll",
    "surprisal": "surprisal",
    "entropy": "entropy",
    f"MC Dropout unit, K={K}": fr.signals.MCDropout(K, 0.21),
    f"MC Dropout shared, K={K}": fr.signals.MCDropout(K, 0.21, "shared"),
}


def count_step(signal) -> Counts:
    """Of the forward pass, one time step more."""
    s = SHAPE
    decoder = torch.nn.Linear(s.H, s.V)
    rnn = fr.FusedRecodingLSTM(s.H, s.H, s.L, decoder=decoder, signal=signal)

    def of_sequence(T: int) -> Counts:
        x, y = torch.randn(T, s.B, s.H), torch.randint(s.V, (T, s.B))
        with torch.no_grad():
            return count("recode_forward", lambda: rnn(x, targets=y), itemsize=4)

    return of_sequence(2) - of_sequence(1)


def least_bytes(signal) -> int:
    """What the kernels of a step cannot do without: every operand read and every result written
    once, in float32."""
    s = SHAPE
    states = s.B * s.H
    cell = s.L * (8 + 1 + 2) * states  # gates in and out; c before; c and h
    if signal is None:
        return 4 * cell
    recode = s.L * (4 + 3 + 2) * states  # gates; c, h, dh; c' and h'
    recode += (s.L - 1) * (1 + 4) * states  # c before; gradients of the gates
    samples = getattr(signal, "samples", 1)
    masks = 2 * (samples + 1) * states if samples > 1 else 0
    logits = 2 * samples * s.B * s.V  # in; directions out
    return 4 * (cell + recode + masks + logits)


def microseconds(counts: Counts, rates: tuple[float, float]) -> float:
    operations, bandwidth = rates
    products = max(counts.flops / operations, counts.product_bytes / bandwidth)
    return 1e6 * (products + counts.kernel_bytes / bandwidth)


def make_table() -> str:
    devices = " | ".join(f"{name}, µs" for name in DEVICES)
    lines = [
        "| signal | products | other launches | kernels, MB | least, MB | products, MB | GFLOP | "
        f"{devices} |",
        "|---" * (7 + len(DEVICES)) + "|",
    ]
    for name, signal in SIGNALS.items():
        counts = count_step(signal)
        times = " | ".join(f"{microseconds(counts, rates):.0f}" for rates in DEVICES.values())
        lines.append(
            f"| {name} | {counts.products} | {counts.others} | {counts.kernel_bytes / 1e6:.1f} | "
            f"{least_bytes(signal) / 1e6:.1f} | {counts.product_bytes / 1e6:.1f} | "
            f"{counts.flops / 1e9:.2f} | {times} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    replace_part(BEGIN, f"{SHAPE}, float32, forward.\n\n{make_table()}")
