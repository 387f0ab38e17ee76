"""`Fixed`: numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import StartsAt


class Fixed(StartsAt):
    """A number for all states, a tensor `[L, S]`, or a dict `{(layer, state): value}`.

    In a dict a bare state name stands for all layers: `{"h": 0.1, (1, "c"): 0.3}`; what it does
    not name is not recoded (step 0).
    """

    value: Tensor  # [L, S]

    def __init__(self, value: float | Tensor | Mapping):
        super().__init__()
        if not _is_finite(value):
            raise ValueError(f"step must be finite, got {value}")
        self.given = value

    def bind(
        self, num_layers: int, states: Sequence[str], hidden_size: int, **factory: Any
    ) -> None:
        self.numbers = self._numbers(num_layers, list(states))
        # Not persistent: a state dict of nn.LSTM loads as it is.
        self.register_buffer("value", torch.tensor(self.numbers, **factory), persistent=False)

    def _numbers(self, num_layers: int, states: list[str]) -> list[list[float]]:
        if isinstance(self.given, Mapping):
            return _by_name(self.given, num_layers, states)
        shape = (num_layers, len(states))
        if isinstance(self.given, (int, float)):
            return [[float(self.given)] * shape[1] for _ in range(shape[0])]
        if self.given.dim() > 0 and self.given.shape != shape:
            raise ValueError(
                f"step must be a number or have shape [L, S] = {shape}, "
                f"got {tuple(self.given.shape)}"
            )
        return self.given.detach().double().expand(shape).tolist()

    def held(self) -> Tensor:
        return self.value

    def forward(self) -> Tensor:
        """The step sizes `[L, S]`."""
        return self.value

    def extra_repr(self) -> str:
        return f"{self.given}"


def _by_name(given: Mapping, num_layers: int, states: list[str]) -> list[list[float]]:
    numbers = [[0.0] * len(states) for _ in range(num_layers)]
    # Names of a single (layer, state) win over names of a whole state.
    for key in sorted(given, key=lambda key: isinstance(key, tuple)):
        layer, state = key if isinstance(key, tuple) else (None, key)
        if state not in states:
            raise ValueError(f"step names state {state!r}, but states are {tuple(states)}")
        if layer is not None and not 0 <= layer < num_layers:
            raise ValueError(f"step names layer {layer}, but there are {num_layers}")
        for l in range(num_layers) if layer is None else (layer,):
            numbers[l][states.index(state)] = float(given[key])
    return numbers


def _is_finite(given: float | Tensor | Mapping) -> bool:
    if isinstance(given, Mapping):
        return all(math.isfinite(value) for value in given.values())
    if isinstance(given, Tensor):
        return bool(torch.isfinite(given).all())
    return math.isfinite(given)  # without a tensor: under FakeTensorMode those have no values
