"""Fused engine and reference against a NumPy implementation that shares no code with them
(`numpy_oracle`): step sizes, signals and layouts, in float64 to 1e-10."""

from __future__ import annotations

import copy

import numpy as np
import numpy_oracle as oracle
import pytest
import torch
from conftest import relative_error
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import fused_recoder as fr
from fused_recoder import functional, signals, steps

T, B, I, H, V, K = 5, 3, 4, 6, 9, 3
SEED = 12345  # of the masks, drawn through a generator that gives nothing else
MODULES = [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM]
IDS = ["fused", "reference"]
SIGNALS = ["nll", "surprisal", "entropy", "renyi-0.5", "renyi-1.1", "renyi-3", "mc-unit",
           "mc-shared", "mc-weight", "ensemble", "mean-logits", "variational"]  # fmt: skip
STEPS = ["number", "tensor", "dict", "learned", "predicted", "lipschitz", "backtracking"]


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def make_signal(name: str):
    kind, _, mask = name.partition("-")
    if kind == "mc":
        return signals.MCDropout(K, 0.3, mask)
    more = {"nll": lambda: signals.NLL(mask or "gold"),
            "surprisal": lambda: signals.Surprisal(mask or "gold"),
            "renyi": lambda: signals.Renyi(float(mask)),
            "variational": lambda: signals.Variational(K, 0.3), "ensemble": signals.Ensemble,
            "mean": signals.Ensemble}  # fmt: skip
    return more.get(kind, lambda: name)()


def make_step(name: str, layers: int, states: str):
    """What is given to the module. None of the numbers is exact in float32."""
    table = torch.linspace(0.3, 0.7, layers * len(states), dtype=torch.float64)
    return {
        "number": 0.3,
        "tensor": table.view(layers, len(states)),
        "dict": {states[-1]: 0.3, (0, states[0]): 0.7},
        "learned": steps.Learned(0.3),
        "predicted": steps.Predicted((5, 4), init=0.3),
        "lipschitz": steps.Lipschitz(0.7),
        "backtracking": steps.Backtracking(30.1, 0.7, 7),
    }[name]


def make_module(
    cls, signal="nll", step="number", layers=2, states="hc", **options
) -> fr.FusedRecodingLSTM:
    if signal in ("ensemble", "mean-logits"):
        predict = "mean_logits" if signal == "mean-logits" else "members"
        decoder = fr.EnsembleDecoder(H, V, K, predict=predict, dtype=torch.float64)
    else:
        decoder = nn.Linear(H, V, dtype=torch.float64)
    with torch.no_grad():
        decoder.weight.mul_(4)  # a prediction that is sure of something
    return cls(I, H, layers, decoder=decoder, signal=make_signal(signal), dtype=torch.float64,
               step=make_step(step, layers, states), states=tuple(states), **options)  # fmt: skip


# ------------------------------------------------------------- from a module's arrays to the oracle


def factors(
    seed: torch.Tensor, stream: int, p: float, rows: int, units: int, **place
) -> np.ndarray:
    """Dropout factors [rows, units]: which units are dropped is not the oracle's business."""
    mask = functional.dropout_mask(seed, stream, p, 1, rows, units, torch.float64, **place)
    return as_array(mask[0])


def sample_factors(rnn, seed: torch.Tensor, t: int) -> np.ndarray:
    """[K, B, H], or [K, V, H] of single weights."""
    rows = {"unit": B, "shared": 1, "weight": V}[rnn.signal.mask]
    drawn = [
        factors(seed, functional.SAMPLE_STREAM, 0.3, rows, H, sample=k, time=t) for k in range(K)
    ]
    return np.broadcast_to(np.stack(drawn), (K, V if rnn.signal.mask == "weight" else B, H))


def oracle_decoder(rnn, name: str, seed, t: int) -> oracle.Decoder:
    weight, bias = as_array(rnn.decoder.weight), as_array(rnn.decoder.bias)
    if name == "ensemble":
        return oracle.Decoder(weight, bias)
    if name == "mean-logits":
        return oracle.Decoder(weight.mean(0, keepdims=True), bias.mean(0, keepdims=True))
    if name == "variational":
        held = factors(seed, functional.OUTPUT_STREAM, 0.3, K * B, H).reshape(K, B, H)
        return oracle.Decoder(np.stack([weight] * K), np.stack([bias] * K), held, True)
    if not name.startswith("mc"):
        return oracle.Decoder(weight[None], bias[None])
    drawn = sample_factors(rnn, seed, t)
    weights, biases = np.stack([weight] * K), np.stack([bias] * K)
    if name == "mc-weight":
        return oracle.Decoder(weights * drawn, biases)
    return oracle.Decoder(weights, biases, drawn)


def oracle_layers(rnn, name: str, seed) -> list[oracle.Layer]:
    layers = []
    for l in range(rnn.num_layers):
        parts = [as_array(getattr(rnn, f"{kind}_l{l}")) for kind in
                 ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]  # fmt: skip
        layer = oracle.Layer(parts[0], parts[1], parts[2] + parts[3])
        if name == "variational":
            below = functional.LAYER_STREAM + l - 1 if l else functional.INPUT_STREAM
            layer.input_factors = factors(seed, below, 0.3, K * B, H if l else I)
            recurrent = functional.RECURRENT_STREAM + l
            layer.recurrent_factors = factors(seed, recurrent, 0.3, K * B, H)
        layers.append(layer)
    return layers


def curvature(rnn, name: str) -> float:
    weight, bare = as_array(rnn.decoder.weight), 1 / 0.7**2
    if name == "ensemble":
        return oracle.mixture_curvature(weight)
    if name in ("mc-unit", "mc-shared"):
        return oracle.mixture_curvature(np.stack([weight] * K)) * bare
    if name == "variational":
        return oracle.mixture_curvature(np.stack([weight] * K)) * bare / K
    return oracle.curvature(name, weight)


def oracle_step(rnn, step: str, name: str):
    L, states = rnn.num_layers, rnn.states
    places = [(l, s) for l in range(L) for s in states]
    if step == "backtracking":
        return oracle.Backtracking(30.1, 0.7, 7)
    if step == "predicted":
        arrays = {n: as_array(p) for n, p in rnn.step.named_parameters()}
        maps = [[(arrays[f"networks.{n}.{m}.weight"], arrays[f"networks.{n}.{m}.bias"])
                 for m in (0, 2, 4)] for n in range(len(places))]  # fmt: skip
        return oracle.Predicted(dict(zip(places, maps, strict=True)))
    if step == "tensor":
        sizes = np.linspace(0.3, 0.7, len(places))
    elif step == "dict":
        named = {(l, states[-1]): 0.3 for l in range(L)} | {(0, states[0]): 0.7}
        return {place: named.get(place, 0.0) for place in places}
    elif step == "learned":
        sizes = oracle.softplus(as_array(rnn.step.rho)).ravel()
    else:
        size = 0.3 if step == "number" else 0.7 / curvature(rnn, name)
        sizes = [size] * len(places)
    return dict(zip(places, sizes, strict=True))


def make_oracle(rnn, name: str, step: str):
    """`recoder_of(t)`, with the masks that the module draws from SEED."""
    generator = torch.Generator().manual_seed(SEED)
    seed = torch.randint(2**63 - 1, (1,), generator=generator)
    layers, sizes = oracle_layers(rnn, name, seed), oracle_step(rnn, step, name)
    kind = name if name in ("nll", "surprisal") or name.startswith("renyi") else "entropy"

    def recoder_of(t: int) -> oracle.Recoder:
        decoder = oracle_decoder(rnn, name, seed, t)
        return oracle.Recoder(layers, decoder, kind, sizes, "".join(rnn.states))

    return recoder_of


def as_states(hx, copies: int = 1) -> dict:
    """[R, H] by (layer, name), of two [L, B, H]."""
    return {(l, s): np.tile(as_array(state[l]), (copies, 1))
            for s, state in zip("hc", hx, strict=True) for l in range(len(state))}  # fmt: skip


def make_inputs(layers: int):
    x = torch.randn(T, B, I, dtype=torch.float64)
    hx = tuple(torch.randn(layers, B, H, dtype=torch.float64) for _ in range(2))
    return x, hx, torch.randint(V, (T, B))


def run_oracle(rnn, name: str, step: str, x, hx, targets) -> list[oracle.StepResult]:
    copies = K if name == "variational" else 1
    gold = None if targets is None else as_array(targets)
    return oracle.read_sequence(
        make_oracle(rnn, name, step), np.tile(as_array(x), (1, copies, 1)), as_states(hx, copies),
        gold,
    )  # fmt: skip


def expected_of(rnn, name: str, results: list[oracle.StepResult]) -> dict[str, torch.Tensor]:
    """What the module must return, by name."""
    outputs = np.stack([r.output for r in results])  # [T, R, H]
    if name == "variational":
        held = make_oracle(rnn, name, "number")(0).decoder.factors  # the state that is decoded
        outputs = (outputs.reshape(T, K, B, H) * held).transpose(1, 0, 2, 3)
    places = [[(l, s) for s in rnn.states] for l in range(rnn.num_layers)]

    def table(what: str) -> np.ndarray:  # [L, S, T, B]
        return np.array([[[getattr(r, what)[p] for r in results] for p in row] for row in places])

    final, L = results[-1].states, range(rnn.num_layers)
    arrays = {
        "output": outputs,
        "h_n": np.stack([final[l, "h"] for l in L]),
        "c_n": np.stack([final[l, "c"] for l in L]),
        "delta": np.stack([r.delta for r in results]),
        "delta_after": np.stack([r.delta_after for r in results]),
        "step_size": table("sizes"),
        "grad_norm": table("norms"),
    }
    return {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}


def results_of(rnn, x, hx, **arguments) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    output, (h_n, c_n), trace = rnn(x, hx, return_trace=True, generator=generator, **arguments)
    traced = {n: t for n, t in trace._asdict().items() if n != "skipped"}
    return {"output": output, "h_n": h_n, "c_n": c_n, **traced}


def assert_agree(results: dict, expected: dict) -> None:
    assert results.keys() == expected.keys()
    errors = {name: relative_error(results[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= 1e-10}
    assert not wrong, f"relative errors above 1e-10: {wrong}"


# -------------------------------------------------------------------------------- the oracle itself


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("nll", 1),
        ("surprisal", 1),
        ("entropy", 1),
        ("entropy", 3),
        ("renyi-0.5", 1),
        ("renyi-3", 1),
    ],
)
def test_the_oracles_gradient_is_the_slope_of_its_signal(name, samples):
    generator = np.random.default_rng(1)
    logits, gold = generator.normal(size=(samples, 2, 5)) * 2, np.array([1, 3])
    _, u = oracle.signal(name, logits, gold)
    for k, b, v in np.ndindex(*logits.shape):
        moved = [logits.copy(), logits.copy()]
        moved[0][k, b, v] += 1e-6
        moved[1][k, b, v] -= 1e-6
        up, down = (oracle.signal(name, m, gold)[0][b] for m in moved)
        assert abs((up - down) / 2e-6 - u[k, b, v]) < 1e-8


@pytest.mark.parametrize("name", ["nll", "entropy", "variational"])
def test_the_oracles_state_gradients_are_slopes_too(name):
    """Of the lower layer through the upper one's gates: one step, started from moved inputs."""
    rnn = make_module(fr.FusedRecodingLSTM, name)
    x, hx, targets = make_inputs(2)
    recoder, copies = make_oracle(rnn, name, "number")(0), K if name == "variational" else 1
    states, gold = as_states(hx, copies), as_array(targets[0])
    lower = oracle.lstm_cell(recoder.layers[0], np.tile(as_array(x[0]), (copies, 1)),
                             states[0, "h"], states[0, "c"])  # fmt: skip

    def upper(c: np.ndarray) -> oracle.Cell:
        h = lower.o * np.tanh(c)
        return oracle.lstm_cell(recoder.layers[1], h, states[1, "h"], states[1, "c"])

    def delta(c: np.ndarray) -> float:
        return oracle.signal(recoder.signal, recoder.decoder.logits(upper(c).h), gold)[0].sum()

    top = upper(lower.c)
    _, u = oracle.signal(recoder.signal, recoder.decoder.logits(top.h), gold)
    grads = recoder.gradients([lower, top], u)
    for index in np.ndindex(*lower.c.shape):
        nudge = np.zeros_like(lower.c)
        nudge[index] = 1e-6
        slope = (delta(lower.c + nudge) - delta(lower.c - nudge)) / 2e-6
        assert abs(slope - grads[0, "c"][index]) < 1e-7


# ------------------------------------------------------------------------------------ the package


@pytest.mark.parametrize("cls", MODULES, ids=IDS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("states", ["h", "c", "hc"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("signal", SIGNALS)
def test_signals_and_steps(cls, signal, step, states, layers):
    if step == "lipschitz" and signal in ("mean-logits", "mc-weight"):
        pytest.skip("its bound is another one; tests/test_steps.py judges it")
    rnn = make_module(cls, signal, step, layers, states)
    x, hx, targets = make_inputs(layers)
    targets[1, 2] = targets[3, 0] = -100
    results = results_of(rnn, x, hx, targets=targets)
    expected = expected_of(rnn, signal, run_oracle(rnn, signal, step, x, hx, targets))
    assert_agree(results, expected)


@pytest.mark.parametrize("cls", MODULES, ids=IDS)
@pytest.mark.parametrize(
    ("step", "size"),
    [
        (0.3, 0.3),
        ({"h": 0.3}, 0.3),
        (torch.full((1, 1), 0.3, dtype=torch.float64), 0.3),
        (steps.Fixed(0.3), 0.3),
        (steps.Learned(0.3), 0.3),
        (steps.Backtracking(0.3, 0.5, 1), 0.3),
    ],
    ids=["number", "dict", "tensor", "Fixed", "Learned", "Backtracking"],
)
@pytest.mark.parametrize("how", ["dtype", "double"])
def test_a_step_is_the_number_that_was_asked_for(cls, step, size, how):
    options = {"decoder": nn.Linear(H, V), "step": copy.deepcopy(step), "states": ("h",)}
    if how == "dtype":
        options |= {"decoder": nn.Linear(H, V, dtype=torch.float64), "dtype": torch.float64}
    rnn = cls(I, H, **options).double()
    rnn.decoder.double()
    x, hx, targets = make_inputs(1)
    _, _, trace = rnn(x, hx, targets=targets, return_trace=True)
    taken = trace.step_size[trace.step_size > 0]
    assert taken.numel() > 0
    assert (taken - size).abs().max() <= 1e-15


@pytest.mark.parametrize("cls", MODULES, ids=IDS)
@pytest.mark.parametrize("signal", ["nll", "surprisal"])
def test_the_most_probable_token_may_be_gold(cls, signal):
    rnn = make_module(cls, f"{signal}-argmax")
    x, hx, _ = make_inputs(2)
    expected = expected_of(rnn, signal, run_oracle(rnn, signal, "number", x, hx, None))
    assert_agree(results_of(rnn, x, hx), expected)


@pytest.mark.parametrize("cls", MODULES, ids=IDS)
@pytest.mark.parametrize("signal", ["nll", "entropy", "mc-unit", "variational"])
def test_batch_first(cls, signal):
    rnn = make_module(cls, signal, batch_first=True)
    x, hx, targets = make_inputs(2)
    results = results_of(rnn, x.transpose(0, 1), hx, targets=targets.t().contiguous())
    results["output"] = results["output"].transpose(-3, -2)
    expected = expected_of(rnn, signal, run_oracle(rnn, signal, "number", x, hx, targets))
    assert_agree(results, expected)


def ragged_oracle(rnn, signal: str, x, hx, targets, lengths) -> dict[str, np.ndarray]:
    """Every sentence ends by itself: its states are those of its own last step. `output` is
    [T, B, H] or [K, T, B, H], 0 behind the ends."""
    results = run_oracle(rnn, signal, "number", x, hx, targets)
    output = expected_of(rnn, signal, results)["output"].numpy().copy()
    finals = {}
    for name in "hc":
        final = np.stack([results[-1].states[l, name] for l in range(rnn.num_layers)])
        for row in range(final.shape[1]):
            last = results[lengths[row % B] - 1].states
            final[:, row] = [last[l, name][row] for l in range(rnn.num_layers)]
        finals[f"{name}_n"] = final
    for b, length in enumerate(lengths):
        output[..., length:, b, :] = 0
    return {"output": output, **finals}


RAGGED = ["nll", "entropy", "mc-unit", "variational"]


@pytest.mark.parametrize("cls", MODULES, ids=IDS)
@pytest.mark.parametrize("signal", RAGGED)
def test_lengths(cls, signal):
    rnn = make_module(cls, signal)
    x, hx, targets = make_inputs(2)
    lengths = [2, 5, 3]
    results = results_of(rnn, x, hx, targets=targets, lengths=torch.tensor(lengths))
    expected = ragged_oracle(rnn, signal, x, hx, targets, lengths)
    for name, array in expected.items():
        assert relative_error(results[name], torch.from_numpy(array)) <= 1e-10, name


@pytest.mark.parametrize("cls", MODULES, ids=IDS)
@pytest.mark.parametrize("signal", RAGGED[:-1])  # no PackedSequence holds K samples
def test_packed(cls, signal):
    """`data` holds the words of step 0 of all sentences, longest first, then those of step 1..."""
    rnn = make_module(cls, signal)
    x, hx, targets = make_inputs(2)
    lengths = [2, 5, 3]
    pack = [pack_padded_sequence(t, torch.tensor(lengths), enforce_sorted=False)
            for t in (x, targets)]  # fmt: skip
    results = results_of(rnn, pack[0], hx, targets=pack[1])
    expected = ragged_oracle(rnn, signal, x, hx, targets, lengths)
    words = [(t, b) for t in range(T) for b in (1, 2, 0) if t < lengths[b]]
    data = np.stack([expected["output"][t, b] for t, b in words])  # [N, H]
    assert relative_error(results["output"].data, torch.from_numpy(data)) <= 1e-10
    for name in ("h_n", "c_n"):
        assert relative_error(results[name], torch.from_numpy(expected[name])) <= 1e-10, name


@pytest.mark.parametrize("cls", [fr.RecodingLanguageModel, fr.reference.RecodingLanguageModel])
@pytest.mark.parametrize("signal", ["nll", "entropy"])
def test_language_model(cls, signal):
    lm = cls(V, I, H, num_layers=2, signal=signal, step=0.3, dtype=torch.float64)
    tokens, targets = torch.randint(V, (T, B)), torch.randint(V, (T, B))
    targets[2, 1] = -100
    zeros = tuple(torch.zeros(2, B, H, dtype=torch.float64) for _ in range(2))
    x = lm.encoder.weight.detach()[tokens]
    results = run_oracle(lm.rnn, signal, "number", x, zeros, targets)
    gold = as_array(targets)
    counted = gold != -100
    logits = np.stack([r.output for r in results]) @ as_array(lm.decoder.weight).T
    log_o = oracle.log_softmax(logits + as_array(lm.decoder.bias))
    nll = -np.take_along_axis(log_o, np.where(counted, gold, 0)[..., None], -1)[..., 0] * counted
    out = lm(tokens, targets)
    assert relative_error(out.nll, torch.from_numpy(nll)) <= 1e-10
    assert abs(out.loss.item() - nll.sum() / counted.sum()) <= 1e-10
    final = np.stack([results[-1].states[l, "h"] for l in (0, 1)])
    assert relative_error(out.hx[0], torch.from_numpy(final)) <= 1e-10
