"""The masks of dropout, as the fused engine draws them."""

from __future__ import annotations

import torch
from torch import Tensor

# Streams of a sequence's seed (csrc/kernels/math.h); the second and the last
# two have one per layer.
OUTPUT_STREAM = 0
LAYER_STREAM = 1
SAMPLE_STREAM = 2048
INPUT_STREAM = 2049
SKIP_STREAM = 2050
RECURRENT_STREAM = 3072
WEIGHT_STREAM = 3584


def dropout_mask(
    seed: Tensor,
    stream: int,
    p: float,
    steps: int,
    rows: int,
    units: int,
    dtype: torch.dtype,
    *,
    sample: int = 0,
    time: int = 0,
) -> Tensor:
    """The factors (0 or 1/(1-p)) the fused engine applies: `[steps, rows, units]`."""
    return torch.ops.fused_recoder.dropout_mask(
        seed, stream, sample, p, time, steps, rows, units, dtype
    )
