"""Step sizes: how far a recoding step goes.

A step turns into a tensor `[L, S]`, one value per layer and recoded state; everything learned
about it flows through that tensor by ordinary autograd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class Step(nn.Module):
    """Base class. `forward()` gives the step sizes, `[L, S]`, on the module's device."""

    def bind(self, num_layers: int, states: Sequence[str], **factory) -> None:
        """Called once by the RNN that uses this step."""
        raise NotImplementedError


class Fixed(Step):
    """A number for all states, a tensor `[L, S]`, or a dict `{(layer, state): value}`.

    In a dict a bare state name stands for all layers: `{"h": 0.1, (1, "c"): 0.3}`; what it does
    not name is not recoded (step 0).
    """

    def __init__(self, value: float | Tensor | Mapping):
        super().__init__()
        self.given = value

    def bind(self, num_layers, states, **factory):
        shape = (num_layers, len(states))
        given = self.given
        if isinstance(given, Mapping):
            value = torch.zeros(shape)
            # Names of a single (layer, state) win over names of a whole state.
            for key in sorted(given, key=lambda k: isinstance(k, tuple)):
                layer, state = key if isinstance(key, tuple) else (slice(None), key)
                if state not in states:
                    raise ValueError(f"step names state {state!r}, but states are {states}")
                if not isinstance(layer, slice) and not 0 <= layer < num_layers:
                    raise ValueError(f"step names layer {layer}, but there are {num_layers}")
                value[layer, states.index(state)] = float(given[key])
        else:
            value = torch.as_tensor(given, dtype=torch.get_default_dtype()).detach().clone()
            if value.dim() > 0 and value.shape != shape:
                raise ValueError(
                    f"step must be a number or have shape [L, S] = {shape}, "
                    f"got {tuple(value.shape)}"
                )
            value = value.expand(shape)
        if not torch.isfinite(value).all():
            raise ValueError(f"step must be finite, got {given}")
        # Not persistent: a state dict of nn.LSTM loads as it is.
        self.register_buffer("value", value.to(**factory).contiguous(), persistent=False)

    def forward(self) -> Tensor:
        return self.value

    def extra_repr(self) -> str:
        return f"{self.given}"


class Learned(Step):
    """`softplus(rho)`, one parameter per layer and recoded state, starting at `init`.

    Keep it out of weight decay: its parameter carries `no_weight_decay = True`.
    """

    def __init__(self, init: float = 0.1):
        super().__init__()
        if not (math.isfinite(init) and init > 0):
            raise ValueError(f"init must be positive and finite, got {init}")
        self.init = init

    def bind(self, num_layers, states, **factory):
        rho = self.init + math.log(-math.expm1(-self.init))  # the inverse of softplus
        self.rho = nn.Parameter(torch.full((num_layers, len(states)), rho, **factory))
        self.rho.no_weight_decay = True

    def forward(self) -> Tensor:
        return nn.functional.softplus(self.rho)

    def extra_repr(self) -> str:
        return f"init={self.init}"


NAMES = {"learned": Learned}


def as_step(step: float | str | Tensor | Mapping | Step) -> Step:
    """A step object from what users write: an object, a name, a number, a tensor or a dict."""
    if isinstance(step, Step):
        return step
    if isinstance(step, str):
        if step not in NAMES:
            known = sorted(NAMES)
            raise ValueError(f"step must be a number, one of {known} or a Step, got {step!r}")
        return NAMES[step]()
    if isinstance(step, (int, float, Tensor, Mapping)) and not isinstance(step, bool):
        return Fixed(step)
    raise TypeError(f"step must be a number, a name, a dict or a Step, got {type(step).__name__}")
