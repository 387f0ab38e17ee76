"""A second opinion: recoding in NumPy float64, written from the formulas of docs/mathematics.md.

It shares no class and no function with the package and knows no autograd: parameters come in as
plain arrays. What the fused engine and `fused_recoder.reference` have in common (step sizes,
layouts, names) can be wrong in both; here it would show.

B batch, R rows of states (B, or K*B of a variational RNN), H hidden, V vocabulary, K predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Place = tuple[int, str]  # (layer, "h" or "c")


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def log_softmax(logits: Array) -> Array:
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


# ------------------------------------------------------------------------------------- prediction


@dataclass
class Decoder:
    """K linear decoders, or K views of one: `logits_k = W_k (factor_k * h_k) + b_k`."""

    weights: Array  # [K, V, H]
    biases: Array  # [K, V]
    factors: Array | float = 1.0  # [K, B, H]: dropout
    own_states: bool = False  # sample k reads states of its own: R = K * B

    def logits(self, top: Array) -> Array:
        """[K, B, V] of the top state [R, H]."""
        K, _, H = self.weights.shape
        states = top.reshape(K, -1, H) if self.own_states else top[None]
        read = np.broadcast_to(states * self.factors, (K, *states.shape[1:]))
        return np.einsum("kbh,kvh->kbv", read, self.weights) + self.biases[:, None]

    def state_gradient(self, u: Array) -> Array:
        """d(delta)/dh [R, H] of u = d(delta)/d(logits) [K, B, V]."""
        of_samples = np.einsum("kbv,kvh->kbh", u, self.weights) * self.factors
        H = self.weights.shape[2]
        return of_samples.reshape(-1, H) if self.own_states else of_samples.sum(0)


def signal(name: str, logits: Array, gold: Array | None) -> tuple[Array, Array]:
    """delta [B] and u = d(delta)/d(logits) [K, B, V] of logits [K, B, V] and tokens [B]. A Rényi
    entropy has its order in its name: "renyi-0.5"."""
    K, B, _ = logits.shape
    log_o = log_softmax(logits)
    o = np.exp(log_o)
    if name in ("nll", "surprisal"):
        log_p = log_o[0, np.arange(B), gold]
        p, u = np.exp(log_p), o.copy()
        u[0, np.arange(B), gold] -= 1
        if name == "nll":
            return -log_p, u
        kappa = p ** (1 - p) * (log_p + 1)
        return p**-p - 1, kappa[None, :, None] * u
    if name.startswith("renyi"):
        order = float(name.partition("-")[2])
        powers = o**order
        r = powers / powers.sum(-1, keepdims=True)
        return np.log(powers.sum(-1))[0] / (1 - order), order / (1 - order) * (r - o)
    log_m = np.logaddexp.reduce(log_o, 0) - np.log(K)  # [B, V]
    expected = (o * log_m).sum(-1, keepdims=True)  # [K, B, 1]
    return -(np.exp(log_m) * log_m).sum(-1), -o * (log_m - expected) / K


# -------------------------------------------------------------------------------------- step sizes


def curvature(name: str, weight: Array) -> float:
    """The proven bound L for `1/L` steps, of one decoder [V, H], without dropout. The largest
    singular value is taken a millionth larger, so that its own rounding cannot break the proof."""
    sigma_squared = np.linalg.svd(weight, compute_uv=False)[0] ** 2 * (1 + 1e-6)
    if name == "nll":
        around_mean = weight - weight.mean(0)
        return min(sigma_squared / 2, (around_mean**2).sum(1).max())
    if name == "surprisal":
        return sigma_squared / 4
    if name.startswith("renyi"):
        order = float(name.partition("-")[2])
        return curvature("nll", weight) * (order**2 if order < 1 else order) / abs(1 - order)
    return sigma_squared * (2 / np.e + np.sqrt(np.log(len(weight) - 1) ** 2 / 4 + 1))


def mixture_curvature(weights: Array) -> float:
    """The same for the entropy of the mean of K > 1 decoders [K, V, H]."""
    K, V, _ = weights.shape
    sigma_squared = np.linalg.svd(weights, compute_uv=False)[:, 0] ** 2 * (1 + 1e-6)
    rho_squared = (weights**2).sum(2).max(1)
    return (2 / np.e * sigma_squared + 2 * (np.log(V) + 2 * np.log(K)) * rho_squared).mean()


@dataclass
class Backtracking:
    """The first of a falling series that lowers delta, for each instance; none of them: 0."""

    initial: float
    shrink: float
    trials: int

    def choose(self, delta: Array, delta_of: Callable[[Array], Array]) -> Array:
        """[B]; `delta_of` gives the signal [B] after steps [B]."""
        chosen = np.zeros_like(delta)
        for trial in reversed(range(self.trials)):
            size = np.full_like(delta, self.initial * self.shrink**trial)
            chosen = np.where(delta_of(size) < delta, size, chosen)
        return chosen


@dataclass
class Predicted:
    """softplus(MLP(state)) with ReLU between the maps: weights and biases by (layer, state)."""

    networks: dict[Place, list[tuple[Array, Array]]]

    def choose(self, place: Place, state: Array) -> Array:
        """[R] of states [R, H]."""
        *hidden, (weight, bias) = self.networks[place]
        for w, b in hidden:
            state = np.maximum(state @ w.T + b, 0)
        return softplus(state @ weight.T + bias)[:, 0]


# ------------------------------------------------------------------------------------ the recoder


@dataclass
class Layer:
    """Gates in the order i, f, g, o. Dropout factors [R, .], 1 without."""

    w_ih: Array  # [4H, in]
    w_hh: Array  # [4H, H]
    bias: Array | float  # [4H], both biases' sum
    input_factors: Array | float = 1.0  # of what it reads from below
    recurrent_factors: Array | float = 1.0


@dataclass
class Cell:
    """One layer's time step and all that its derivative needs, each [R, H]."""

    i: Array
    f: Array
    g: Array
    o: Array
    c_before: Array
    c: Array
    h: Array

    def cell_gradient(self, dh: Array) -> Array:
        """dc, inside this step."""
        return dh * self.o * (1 - np.tanh(self.c) ** 2)

    def gate_gradient(self, dh: Array, dc: Array) -> Array:
        """Of the pre-activations, [R, 4H]."""
        i, f, g, o = self.i, self.f, self.g, self.o
        di, df = dc * g * i * (1 - i), dc * self.c_before * f * (1 - f)
        dg, do = dc * i * (1 - g**2), dh * np.tanh(self.c) * o * (1 - o)
        return np.concatenate([di, df, dg, do], 1)


def lstm_cell(layer: Layer, x: Array, h: Array, c: Array) -> Cell:
    recurrent = (h * layer.recurrent_factors) @ layer.w_hh.T
    gates = (x * layer.input_factors) @ layer.w_ih.T + recurrent + layer.bias
    i, f, g, o = np.split(gates, 4, 1)
    i, f, g, o = sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)
    after = f * c + i * g
    return Cell(i, f, g, o, c, after, o * np.tanh(after))


@dataclass
class StepResult:
    output: Array  # [R, H] the state to decode, without the decoder's dropout
    states: dict[Place, Array]  # [R, H] each, recoded
    delta: Array  # [B]
    delta_after: Array  # [B]
    sizes: dict[Place, Array] = field(default_factory=dict)  # [B] of the recoded states
    norms: dict[Place, Array] = field(default_factory=dict)  # [B] of their gradients


@dataclass
class Recoder:
    """`step`: numbers by (layer, state), `Predicted` or `Backtracking`."""

    layers: list[Layer]
    decoder: Decoder
    signal: str
    step: dict[Place, float] | Predicted | Backtracking
    recoded: str = "hc"

    def gradients(self, cells: list[Cell], u: Array) -> dict[Place, Array]:
        """d(delta)/d(state), from the top layer down; nothing goes back in time."""
        found, dh = {}, self.decoder.state_gradient(u)
        for l in reversed(range(len(cells))):
            dc = cells[l].cell_gradient(dh)
            found |= {(l, "h"): dh, (l, "c"): dc}
            below = cells[l].gate_gradient(dh, dc) @ self.layers[l].w_ih
            dh = below * self.layers[l].input_factors
        return {place: g for place, g in found.items() if place[1] in self.recoded}

    def delta_of(self, states: dict[Place, Array], top: Cell, gold: Array | None) -> Array:
        """[B] of recoded states; if only c is recoded, of the h that c' would have given."""
        last = len(self.layers) - 1
        h = states[last, "h"] if "h" in self.recoded else top.o * np.tanh(states[last, "c"])
        return signal(self.signal, self.decoder.logits(h), gold)[0]

    def sizes(self, states: dict, grads: dict, delta: Array, top: Cell, gold) -> dict[Place, Array]:
        """[R] each."""
        rows = len(top.h)
        if isinstance(self.step, Predicted):
            return {place: self.step.choose(place, states[place]) for place in grads}
        if isinstance(self.step, Backtracking):

            def delta_of(size: Array) -> Array:
                alpha = np.tile(size, rows // len(size))[:, None]
                return self.delta_of({p: states[p] - alpha * grads[p] for p in grads}, top, gold)

            chosen = self.step.choose(delta, delta_of)
            return dict.fromkeys(grads, np.tile(chosen, rows // len(chosen)))
        return {place: np.full(rows, self.step[place]) for place in grads}

    def read(self, x: Array, states: dict[Place, Array], gold: Array | None) -> StepResult:
        """One time step: x [R, I], states [R, H] by place, gold [B] (-100: no recoding)."""
        cells, below = [], x
        for l, layer in enumerate(self.layers):
            cells.append(lstm_cell(layer, below, states[l, "h"], states[l, "c"]))
            below = cells[l].h
        top = cells[-1]
        after = {(l, s): getattr(cell, s) for l, cell in enumerate(cells) for s in "hc"}
        logits = self.decoder.logits(top.h)
        B = logits.shape[1]
        sees_gold = self.signal in ("nll", "surprisal")
        counted = np.ones(B, bool) if gold is None else gold != -100
        if sees_gold:
            gold = logits[0].argmax(-1) if gold is None else np.where(counted, gold, 0)
        delta, u = signal(self.signal, logits, gold)
        grads = self.gradients(cells, u * counted[None, :, None])
        sizes = self.sizes(after, grads, delta, top, gold)
        for place, g in grads.items():
            after[place] = after[place] - sizes[place][:, None] * g
        result = StepResult(top.h if sees_gold else after[len(cells) - 1, "h"], after, delta, delta)
        result.delta = delta * counted
        result.delta_after = self.delta_of(after, top, gold) * counted
        for place, g in grads.items():
            result.sizes[place] = sizes[place].reshape(-1, B).mean(0) * counted
            result.norms[place] = np.sqrt((g**2).sum(1).reshape(-1, B).sum(0))
        return result


def read_sequence(
    recoder_of: Callable[[int], Recoder], x: Array, states: dict[Place, Array], gold: Array | None
) -> list[StepResult]:
    """x [T, R, I] and gold [T, B], step by step; `recoder_of(t)` holds the masks of step t."""
    results = []
    for t in range(len(x)):
        result = recoder_of(t).read(x[t], states, None if gold is None else gold[t])
        states = result.states
        results.append(result)
    return results
