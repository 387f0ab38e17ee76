"""Step sizes: how far a recoding step goes.

A step gives a tensor `[L, S]`, one value per layer and recoded state (everything learned about it
flows through that tensor by ordinary autograd), or says how the engine finds its sizes at every
step: with a network, or by trial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from . import lipschitz


class Step(nn.Module):
    """Base class."""

    kind = "given"  # how the engine finds the sizes: "given", "predicted" or "backtracking"

    def bind(self, num_layers: int, states: Sequence[str], hidden_size: int, **factory) -> None:
        """Called once by the RNN that uses this step."""
        raise NotImplementedError

    def forward(self) -> Tensor:
        """The step sizes `[L, S]`, on the module's device."""
        raise NotImplementedError

    def sizes(self, rnn: nn.Module) -> Tensor:
        """The step sizes `[L, S]` for `rnn` as it is now."""
        return self()


class Fixed(Step):
    """A number for all states, a tensor `[L, S]`, or a dict `{(layer, state): value}`.

    In a dict a bare state name stands for all layers: `{"h": 0.1, (1, "c"): 0.3}`; what it does
    not name is not recoded (step 0).
    """

    def __init__(self, value: float | Tensor | Mapping):
        super().__init__()
        self.given = value

    def bind(self, num_layers, states, hidden_size, **factory):
        shape = (num_layers, len(states))
        given = self.given
        if not _is_finite(given):
            raise ValueError(f"step must be finite, got {given}")
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
        # Not persistent: a state dict of nn.LSTM loads as it is.
        self.register_buffer("value", value.to(**factory).contiguous(), persistent=False)

    def forward(self) -> Tensor:
        return self.value

    def extra_repr(self) -> str:
        return f"{self.given}"


def _is_finite(given: float | Tensor | Mapping) -> bool:
    if isinstance(given, Mapping):
        return all(math.isfinite(value) for value in given.values())
    if isinstance(
        given, (int, float)
    ):  # without a tensor: under FakeTensorMode those have no values
        return math.isfinite(given)
    return bool(torch.isfinite(torch.as_tensor(given)).all())


def _check_init(init: float) -> float:
    if not (math.isfinite(init) and init > 0):
        raise ValueError(f"init must be positive and finite, got {init}")
    return init


def _inverse_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value))


class Learned(Step):
    """`softplus(rho)`, one parameter per layer and recoded state, starting at `init`.

    Keep it out of weight decay: its parameter carries `no_weight_decay = True`.
    """

    def __init__(self, init: float = 0.1):
        super().__init__()
        self.init = _check_init(init)

    def bind(self, num_layers, states, hidden_size, **factory):
        rho = _inverse_softplus(self.init)
        self.rho = nn.Parameter(torch.full((num_layers, len(states)), rho, **factory))
        self.rho.no_weight_decay = True

    def forward(self) -> Tensor:
        return nn.functional.softplus(self.rho)

    def extra_repr(self) -> str:
        return f"init={self.init}"


class Predicted(Step):
    """`softplus(MLP(state))`, a network per layer and recoded state, each reading its own state.

    The state it reads is a constant for training (in every `gradient=` mode), as in the thesis.
    `init` is the step size it starts near. Keep it out of weight decay: its parameters carry
    `no_weight_decay = True`.
    """

    kind = "predicted"

    def __init__(self, hidden: Sequence[int] = (300, 100), init: float = 0.1):
        super().__init__()
        if not all(isinstance(size, int) and size >= 1 for size in hidden):
            raise ValueError(f"hidden must be positive ints, got {hidden}")
        self.hidden, self.init = tuple(hidden), _check_init(init)

    def bind(self, num_layers, states, hidden_size, **factory):
        self.shape = (num_layers, len(states))
        sizes = (hidden_size, *self.hidden, 1)

        def network() -> nn.Sequential:
            maps = [nn.Linear(a, b, **factory) for a, b in pairwise(sizes)]
            nn.init.constant_(maps[-1].bias, _inverse_softplus(self.init))
            layers = [module for linear in maps for module in (linear, nn.ReLU())]
            return nn.Sequential(*layers[:-1], nn.Softplus())

        self.networks = nn.ModuleList(network() for _ in range(num_layers * len(states)))
        for parameter in self.parameters():
            parameter.no_weight_decay = True

    def network_tensors(self) -> list[Tensor]:
        """Weight and bias of every linear map, network by network."""
        return list(self.networks.parameters())

    def predict(self, layer: int, state: int, value: Tensor) -> Tensor:
        """Step sizes `[B]` for the states `[B, H]`."""
        return self.networks[layer * self.shape[1] + state](value.detach()).squeeze(1)

    def forward(self) -> Tensor:
        return next(self.parameters()).new_zeros(self.shape)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, init={self.init}"


class Lipschitz(Step):
    """`safety / L`, with L a proven upper bound on the signal's curvature in the top state.

    With it and `states=("h",)` no recoding step raises the signal of the re-decoded top state (the
    thesis's first theorem), up to rounding. Bounds and their derivations: `lipschitz.py`. Computed
    anew only when the decoder has changed. The steps are small: see `Backtracking`.
    """

    def __init__(self, safety: float = 1.0):
        super().__init__()
        if not 0 < safety <= 2:
            raise ValueError(f"safety must be in (0, 2], got {safety}")
        self.safety = safety
        self._known = None  # what the last bound was computed for, and the bound

    def bind(self, num_layers, states, hidden_size, **factory):
        self.shape = (num_layers, len(states))

    def sizes(self, rnn):
        with torch.no_grad():
            if torch.compiler.is_compiling():
                return self.safety / lipschitz.bounds(rnn)
            key = lipschitz.dependencies(rnn)
            if self._known is None or self._known[0] != key:
                self._known = (key, self.safety / lipschitz.bounds(rnn))
            return self._known[1]

    def extra_repr(self) -> str:
        return f"safety={self.safety}"


class Backtracking(Step):
    """Starts at `initial` and multiplies by `shrink` until the re-decoded signal falls.

    For every instance and time step by itself, `trials` times at most; where none of them lowers
    the signal the state stays as it is. The same guarantee as `Lipschitz`, for every signal, with
    useful steps; it costs re-decodings. All states of an instance take the same step.
    """

    kind = "backtracking"

    def __init__(self, initial: float = 1.0, shrink: float = 0.5, trials: int = 8):
        super().__init__()
        if not (math.isfinite(initial) and initial > 0):
            raise ValueError(f"initial must be positive and finite, got {initial}")
        if not 0 < shrink < 1:
            raise ValueError(f"shrink must be in (0, 1), got {shrink}")
        if not isinstance(trials, int) or trials < 1:
            raise ValueError(f"trials must be a positive int, got {trials!r}")
        self.initial, self.shrink, self.trials = initial, shrink, trials

    def bind(self, num_layers, states, hidden_size, **factory):
        value = torch.full((num_layers, len(states)), float(self.initial), **factory)
        self.register_buffer("value", value, persistent=False)

    def forward(self) -> Tensor:
        return self.value

    def extra_repr(self) -> str:
        return f"initial={self.initial}, shrink={self.shrink}, trials={self.trials}"


NAMES = {
    "learned": Learned,
    "predicted": Predicted,
    "lipschitz": Lipschitz,
    "backtracking": Backtracking,
}


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
