"""Functions under the modules, for people who bring their own."""

from __future__ import annotations

import torch
from torch import Tensor

from .signals import Signal, as_signal


def signal_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    signal: str | Signal,
) -> tuple[Tensor, Tensor]:
    """The error signal of any model's hidden states and its gradient in them.

    Args:
        hidden: `[..., H]`, what the decoder reads.
        weight: `[V, H]` and bias `[V]`: the decoder.
        targets: `[...]` int64, gold tokens; -100 gives a signal and a gradient of 0. Without
            targets, gold signals use the most probable token.
        signal: a name (`"nll"`, `"surprisal"`, `"entropy"`) or a `fused_recoder.signals` object.

    Returns:
        `delta` `[...]` and `d(delta)/d(hidden)` `[..., H]`. Both can be differentiated once, in
        hidden, weight and bias.
    """
    kind = as_signal(signal)
    if kind is None or kind.name not in ("nll", "surprisal", "entropy"):
        given = None if kind is None else kind.name
        raise ValueError(f"signal must be 'nll', 'surprisal' or 'entropy', got {given!r}")
    if hidden.dim() < 1:
        raise ValueError(f"hidden must have shape [..., H], got {tuple(hidden.shape)}")
    lead = hidden.shape[:-1]
    if targets is not None and targets.shape != lead:
        raise ValueError(
            f"targets must have shape {tuple(lead)} like hidden without its last dimension, "
            f"got {tuple(targets.shape)}"
        )
    ignored = None
    if targets is not None and (not kind.reads_target or kind.target == "argmax"):
        ignored, targets = targets == -100, None
    delta, grad = torch.ops.fused_recoder.signal_gradient(
        hidden.reshape(lead.numel(), hidden.shape[-1]),
        weight,
        bias,
        None if targets is None else targets.reshape(-1),
        kind.name,
    )
    delta, grad = delta.reshape(lead), grad.reshape(hidden.shape)
    if ignored is not None:
        delta = delta.masked_fill(ignored, 0)
        grad = grad.masked_fill(ignored.unsqueeze(-1), 0)
    return delta, grad


# Streams of a sequence's seed (csrc/kernels/math.h); the second and the last have one per layer.
OUTPUT_STREAM = 0
LAYER_STREAM = 1
SAMPLE_STREAM = 2048
INPUT_STREAM = 2049
SKIP_STREAM = 2050
RECURRENT_STREAM = 3072


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
