"""`StepPolicy`: all that the rest of the package knows of a step.

A step policy gives a tensor of sizes, `[L, S]` per layer and recoded state or `[L, S, H]` for each
of their units (everything learned about it flows through that tensor by ordinary autograd), or says
how the engine finds the sizes at every time step: with a network, or by trial. It is its own
specification: `reference.py` asks it what to choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .._module import RecodingLSTMBase
    from ..reference import TimeStep
    from ..signals import Place


class StepPolicy(nn.Module):
    """Base class of how far a recoding step goes."""

    capturable = True  # its sizes can be found inside a CUDA graph

    def bind(
        self,
        num_layers: int,
        states: Sequence[str],
        hidden_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Called once by the RNN that uses this step."""
        raise NotImplementedError

    def sizes(self, rnn: RecodingLSTMBase) -> Tensor:
        """The step sizes `[L, S]` or `[L, S, H]` for `rnn` as it is now."""
        return self()

    # ------------------------------------------------------------------------ for the fused engine

    def spec_fields(self) -> dict[str, Any]:
        """What the fused engine has to be told."""
        return {"step": "given"}

    def tensors(self, rnn: RecodingLSTMBase) -> list[Tensor]:
        """The tensors the fused engine gets: the sizes, or those of a network."""
        return [self.sizes(rnn)]

    # ------------------------------------------------------------------------------ specification

    def choose(
        self, now: TimeStep, sizes: Tensor, grads: dict[Place, Tensor], delta: Tensor
    ) -> dict[Place, Tensor]:
        """Step sizes `[]`, `[R, 1]` or `[H]` for the states that have a gradient `[R, H]`, given
        delta `[B]`."""
        index = now.rnn.states.index
        return {(layer, state): sizes[layer, index(state)] for layer, state in grads}

    def traced(self, now: TimeStep, sizes: Tensor, chosen: dict[Place, Tensor]) -> Tensor:
        """The sizes `[L, S, B]` of a time step, as the trace shows them: means over units."""
        of_states = sizes.mean(2) if sizes.dim() == 3 else sizes
        return of_states.unsqueeze(2).expand(-1, -1, now.call.input.shape[1])


class StartsAt(StepPolicy):
    """A step whose tensor starts at given numbers, and keeps them: in another precision it is
    filled anew from them, unless somebody has changed it."""

    numbers: list[list[float]] | None = None  # [L, S], known once bound

    def start(self) -> Tensor:
        """The numbers it starts at, float64."""
        return torch.tensor(self.numbers, dtype=torch.float64, device="cpu")

    def held(self) -> Tensor:
        """The tensor that starts there."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StartsAt:
        if self.numbers is None:
            return super()._apply(fn, recurse)
        before = self.held().detach()
        super()._apply(fn, recurse)
        held = self.held()
        changed = held.dtype != before.dtype
        if before.is_meta or (changed and torch.equal(before, self.start().to(before))):
            with torch.no_grad():
                held.copy_(self.start())
        return self


def check_init(init: float) -> float:
    """Of a step that starts there."""
    if not (math.isfinite(init) and init > 0):
        raise ValueError(f"init must be positive and finite, got {init}")
    return init


def inverse_softplus(value: float) -> float:
    """x with softplus(x) = value."""
    return value + math.log(-math.expm1(-value))
