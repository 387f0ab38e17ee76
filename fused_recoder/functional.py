"""Functions under the modules, for people who bring their own."""

from __future__ import annotations

import torch
from torch import Tensor

from ._masks import (
    INPUT_STREAM,
    LAYER_STREAM,
    OUTPUT_STREAM,
    RECURRENT_STREAM,
    SAMPLE_STREAM,
    SKIP_STREAM,
    WEIGHT_STREAM,
    dropout_mask,
)
from ._transforms import refuse_forward_mode, refuse_function_transforms
from .signals import Signal, as_signal
from .signals.formulas import IGNORE
from .spec import RecoderSpec

__all__ = [
    "INPUT_STREAM",
    "LAYER_STREAM",
    "OUTPUT_STREAM",
    "RECURRENT_STREAM",
    "SAMPLE_STREAM",
    "SKIP_STREAM",
    "WEIGHT_STREAM",
    "dropout_mask",
    "signal_gradient",
]


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
        targets: `[...]` int64, gold tokens; -100 gives a signal and a gradient of 0. Gold signals
            need them.
        signal: a name (`"nll"`, `"surprisal"`, `"entropy"`) or a `fused_recoder.signals` object.

    Returns:
        `delta` `[...]` and `d(delta)/d(hidden)` `[..., H]`. Both can be differentiated once, in
        hidden, weight and bias.
    """
    kind = as_signal(signal)
    if kind is None or not kind.single_prediction:
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
    kind.check_call(targets, None)
    refuse_forward_mode((hidden, weight, bias))
    refuse_function_transforms((hidden, weight, bias))
    ignored = None
    if targets is not None and not kind.needs_targets:
        ignored, targets = targets == IGNORE, None
    delta, grad = torch.ops.fused_recoder.signal_gradient(
        hidden.reshape(lead.numel(), hidden.shape[-1]),
        weight,
        bias,
        None if targets is None else targets.reshape(-1),
        RecoderSpec(**kind.spec_fields()).encode(),
    )
    delta, grad = delta.reshape(lead), grad.reshape(hidden.shape)
    if ignored is not None:
        delta = delta.masked_fill(ignored, 0)
        grad = grad.masked_fill(ignored.unsqueeze(-1), 0)
    return delta, grad
