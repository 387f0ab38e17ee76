"""One forward call, time-major and checked: what goes into `_run`, and what comes out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .signals.formulas import IGNORE


class RecodingTrace(NamedTuple):
    """What the recoder did. Time-major like `h_n`, whatever `batch_first` says; 0 in padding."""

    delta: Tensor  # [T, B] the signal
    delta_after: Tensor  # [T, B] the signal of the re-decoded, recoded top state
    step_size: Tensor  # [L, S, T, B] over the recoded states S; 0 where nothing was recoded
    grad_norm: Tensor  # [L, S, T, B]
    skipped: Tensor  # [T, B] bool: has a signal, but mask, gate or probability left it out

    @property
    def skipped_fraction(self) -> Tensor:
        """[] the share of all positions that were left out."""
        return self.skipped.double().mean()


class Call(NamedTuple):
    """One forward call, time-major and checked. What `_run` gets."""

    input: Tensor  # [T, B, I]
    h0: Tensor  # [L, R, H], R = B or K * B for a variational signal
    c0: Tensor  # [L, R, H]
    targets: Tensor | None  # [T, B] int64
    labels: Tensor | None  # [T, B] int64
    mask: Tensor | None  # [T, B] bool
    lengths: Tensor | None  # [B] int64
    seed: Tensor | None  # [1] int64, of this sequence's masks
    time: int  # of the first time step, for the masks
    loss: bool  # also compute nll
    trace: bool


class Result(NamedTuple):
    """What `_run` gives back, time-major."""

    # [T, B, H] the state to decode; [K, T, B, H] of a variational signal; packed like the input
    output: Any
    h_n: Tensor  # [L, R, H]
    c_n: Tensor  # [L, R, H]
    nll: Tensor | None  # [T, B] of the targets; 0 where ignored
    objective: Tensor | None  # [T, B] what the loss is the mean of: nll, or an ensemble's members'
    delta: Tensor | None  # [T, B]; None without a signal
    trace: RecodingTrace | None


def live_positions(call: Call) -> Tensor | None:
    """[T, B] bool, inside its sequence; None: all."""
    if call.lengths is None:
        return None
    time = torch.arange(call.input.shape[0], device=call.lengths.device)
    return time.unsqueeze(1) < call.lengths


def counted_positions(call: Call) -> Tensor | None:
    """[T, B] bool, has a signal; None: all."""
    counted = live_positions(call)
    tokens = call.targets if call.labels is None else call.labels
    if tokens is None:
        return counted
    return tokens != IGNORE if counted is None else counted & (tokens != IGNORE)


def skipped_positions(recoded: Tensor, call: Call) -> Tensor:
    """[T, B] bool: counted, but not among those `recoded` [T, B]."""
    counted = counted_positions(call)
    return ~recoded if counted is None else counted & ~recoded


def empty_trace(delta: Tensor, num_layers: int, num_states: int) -> RecodingTrace:
    """Of an RNN without a signal; delta [T, B] is 0."""
    nothing = delta.new_zeros(num_layers, num_states, *delta.shape)
    return RecodingTrace(delta, delta, nothing, nothing, torch.zeros_like(delta, dtype=torch.bool))
