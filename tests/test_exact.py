"""gradient="exact": against the oracle's double backward, and against finite differences."""

import gc
import itertools

import pytest
import torch
from conftest import STATES, assert_all_close, make_inputs
from torch import nn
from variants import PAIRS, SIGNALS, STEPS, build, classifies, has_own_masks

import fused_recoder as fr

H, V, I = 7, 11, 5
FUSED = [s for s in SIGNALS if s != "none" and not s.startswith("custom")]
FUSED_PAIRS = [(signal, step) for signal, step in PAIRS if signal in FUSED]


def make_pair(signal, step, layers=2, hidden=H, vocab=V, module="RecodingLSTM", **options):
    """Fused and reference modules with equal weights, each holding one and the same decoder."""
    torch.manual_seed(5)
    kind, decoder = build(signal, hidden, vocab, torch.float64)
    pair = []
    for cls in (fr.FusedRecodingLSTM, fr.reference.RecodingLSTM):
        torch.manual_seed(6)
        pair.append(
            cls(I, hidden, layers, decoder=decoder, signal=kind, step=STEPS[step](),
                gradient="exact", dtype=torch.float64, **options)
        )  # fmt: skip
    pair[1].load_state_dict(pair[0].state_dict())
    return *pair, decoder


def make_arguments(signal, T=4, B=3, vocab=V):
    y = torch.randint(vocab, (T, B))
    y[1, 1] = -100
    arguments = {"targets": y}
    if classifies(signal):
        arguments["labels"] = torch.randint(2, (T, B))
        arguments["labels"][2, 0] = -100
    return arguments


def make_states(rnn, signal, T=4, B=3, vocab=V):
    x, hx, _ = make_inputs(rnn, T, B, vocab)
    if signal == "variational":
        shape = (rnn.num_layers, rnn.signal.samples * B, rnn.hidden_size)
        hx = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in hx)
    return x, hx


def gradients(rnn, decoder, x, hx, **arguments):
    torch.manual_seed(1)
    output, (h_n, c_n) = rnn(x, hx, **arguments)
    torch.manual_seed(2)
    cotangents = [torch.randn_like(o) for o in (output, h_n, c_n)]
    wanted = {"x": x, "h_0": hx[0], "c_0": hx[1], **dict(rnn.named_parameters())}
    wanted |= {f"decoder.{n}": p for n, p in decoder.named_parameters()}
    grads = torch.autograd.grad(
        (output, h_n, c_n), list(wanted.values()), cotangents, allow_unused=True
    )
    return {
        name: torch.zeros_like(tensor) if grad is None else grad.detach()
        for (name, tensor), grad in zip(wanted.items(), grads, strict=True)
    }


def compare(fused, oracle, decoder, signal, T=4, B=3, vocab=V, **more):
    x, hx = make_states(fused, signal, T, B, vocab)
    arguments = make_arguments(signal, T, B, vocab) | more
    got, want = (gradients(m, decoder, x, hx, **arguments) for m in (fused, oracle))
    assert_all_close(got, want)
    return got


@pytest.mark.parametrize(("signal", "step"), FUSED_PAIRS)
def test_agrees_with_the_oracle(signal, step):
    """Every signal and every step meets all combinations, every pair a sixth."""
    combinations = itertools.product(
        STATES, (1, 2, 3), (False, True), (None, [4, 2, 1]), (0.0, 0.3), (None, 1.0)
    )
    sixth = (list(SIGNALS).index(signal) + list(STEPS).index(step)) % 6
    compared = 0
    for i, (states, layers, masked, lengths, dropout, gate) in enumerate(combinations):
        if (i + i // 6) % 6 != sixth:
            continue
        if signal == "classifiers" and (states != ("h", "c") or layers == 1):
            continue
        if signal == "classifier" and "h" not in states:
            continue
        if (has_own_masks(signal) and dropout) or (gate and masked):
            continue
        fused, oracle, decoder = make_pair(
            signal, step, layers, states=states, dropout=dropout, output_dropout=dropout, gate=gate
        )
        compare(
            fused, oracle, decoder, signal,
            recode_mask=torch.rand(4, 3) < 0.6 if masked else None,
            lengths=None if lengths is None else torch.tensor(lengths),
        )  # fmt: skip
        compared += 1
    assert compared > 0


@pytest.mark.parametrize("signal", FUSED)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 2), (2, 1, 31, 257), (3, 13, 33, 1001), (2, 3, 12, 9001)], ids=str
)
def test_odd_shapes(signal, shape):
    T, B, hidden, vocab = shape
    if signal == "classifiers" and hidden == 1:
        pytest.skip("four classes of one feature are all the same to a classifier")
    fused, oracle, decoder = make_pair(signal, "learned", hidden=hidden, vocab=vocab)
    x, hx, y = make_inputs(fused, T, B, vocab)
    arguments = {"targets": y}
    if classifies(signal):
        arguments["labels"] = torch.randint(2, (T, B))
    got, want = (gradients(m, decoder, x, hx, **arguments) for m in (fused, oracle))
    assert_all_close(got, want)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("signal", FUSED)
@pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])
def test_is_the_derivative_of_the_forward_pass(signal, layers, ragged):
    if signal == "classifiers" and layers == 1:
        pytest.skip("one of the classifiers reads the layer below the top")
    hidden, vocab = 3, 5
    rnn, _, decoder = make_pair(
        signal, "learned", layers, hidden, vocab, dropout=0.0 if signal == "variational" else 0.2
    )
    x, hx = make_states(rnn, signal, 3, 2, vocab)
    arguments = make_arguments(signal, 3, 2, vocab)
    if ragged:
        arguments |= {
            "lengths": torch.tensor([3, 2]),
            "recode_mask": torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool),
        }
    check_derivative(rnn, decoder, x, hx, arguments)


def check_derivative(rnn, decoder, x, hx, arguments):
    parameters = {f"rnn.{n}": p for n, p in rnn.named_parameters()}
    parameters |= {f"decoder.{n}": p for n, p in decoder.named_parameters()}
    model = Both(rnn, decoder)

    def function(x, h0, c0, *values):
        torch.manual_seed(3)  # the same masks every time
        new = dict(zip(parameters, values, strict=True))
        output, (h_n, c_n) = torch.func.functional_call(
            model, new, (x, (h0, c0)), {"arguments": arguments}
        )
        return output, h_n, c_n

    assert torch.autograd.gradcheck(function, (x, *hx, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
@pytest.mark.parametrize("step", ["predicted", "lipschitz", "backtracking"])
def test_steps_that_depend_on_states_are_constants(signal, step):
    """The derivative is that of the function with the step sizes of this call replayed."""
    rnn, _, decoder = make_pair(signal, step)
    x, hx, y = make_inputs(rnn, T=3, B=1)
    *_, trace = rnn(x, hx, targets=y, return_trace=True)
    assert trace.step_size.max() > 0

    def replayed(x, h, c, *weights):
        """Step by step, so that each has its own sizes; one number."""
        total = 0
        for t in range(3):
            fixed = fr.FusedRecodingLSTM(
                I, H, 2, decoder=decoder, signal=rnn.signal, step=trace.step_size[:, :, t, 0],
                dtype=torch.float64,
            )  # fmt: skip
            with torch.no_grad():
                for parameter, value in zip(fixed.parameters(), weights, strict=True):
                    parameter.copy_(value)
                output, (h, c) = fixed(x[t : t + 1], (h, c), targets=y[t : t + 1])
            total = total + output.sin().sum()
        return total + h.sin().sum() + c.cos().sum()

    weights = [w for layer in rnn.all_weights for w in layer]
    inputs = [x, *hx, *weights]
    output, (h, c) = rnn(x, hx, targets=y)
    value = output.sin().sum() + h.sin().sum() + c.cos().sum()
    grads = torch.autograd.grad(value, inputs)
    along = [torch.randn_like(t) for t in inputs]
    ahead, behind = (
        replayed(*(t.detach() + e * a for t, a in zip(inputs, along, strict=True)))
        for e in (1e-6, -1e-6)
    )
    slope = sum((g * a).sum() for g, a in zip(grads, along, strict=True))
    torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)


class Both(nn.Module):
    """A model that owns the decoder its rnn holds."""

    def __init__(self, rnn, decoder):
        super().__init__()
        self.rnn, self.decoder = rnn, decoder

    def forward(self, x, hx, arguments):
        return self.rnn(x, hx, **arguments)


# ------------------------------------------------------------------------------ language model


def make_models(signal, step, gradient="exact", **options):
    models = []
    for cls in (fr.RecodingLanguageModel, fr.reference.RecodingLanguageModel):
        torch.manual_seed(5)
        kind, decoder = build(signal, H, V)
        torch.manual_seed(6)
        models.append(
            cls(V, I, H, 2, signal=kind, step=STEPS[step](), gradient=gradient,
                decoder=decoder if signal.startswith("ensemble") else None, dtype=torch.float64,
                **options)
        )  # fmt: skip
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.mark.parametrize("of", ["loss", "nll", "both"])
@pytest.mark.parametrize("signal", FUSED)
def test_language_models_agree_with_the_oracle(signal, of):
    dropout = 0.0 if signal == "variational" else 0.25
    results = []
    tokens, targets = torch.randint(V, (2, 5, 3))
    targets[2, 1] = -100
    labels = torch.randint(2, (5, 3)) if classifies(signal) else None
    weights = torch.rand(5, 3, dtype=torch.float64)
    for model in make_models(signal, "learned", dropout=dropout):
        torch.manual_seed(1)
        out = model(tokens, targets, labels=labels, lengths=torch.tensor([5, 4, 2]))
        value = {"loss": out.loss, "nll": (out.nll * weights).sum()}
        value["both"] = value["loss"] + value["nll"] + out.hx[0].square().sum()
        value[of].backward()
        results.append({n: p.grad for n, p in model.named_parameters()} | {"loss": out.loss})
    assert_all_close(*results)


def test_exact_and_detached_differ():
    """Otherwise nothing above has been tested."""
    grads = []
    tokens, targets = torch.randint(V, (2, 5, 3))
    for gradient in ("exact", "detached"):
        model = make_models("nll", "fixed", gradient)[0]
        model(tokens, targets).loss.backward()
        grads.append(model.rnn.weight_ih_l0.grad)
    assert (grads[0] - grads[1]).abs().max() > 1e-3 * grads[1].abs().max()


def test_many_small_chunks_of_steps_give_the_same_weight_gradient():
    """Long sequences with a large vocabulary: the decoder's gradient is added up chunk by chunk."""
    kind, vocab = "nll", 40_000
    results = []
    for cls in (fr.RecodingLanguageModel, fr.reference.RecodingLanguageModel):
        torch.manual_seed(0)
        model = cls(vocab, 3, 4, 1, signal=kind, step=0.5, gradient="exact", dtype=torch.float64)
        tokens, targets = torch.randint(vocab, (2, 30, 7))
        model(tokens, targets).loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters()})
    assert_all_close(*results)


@pytest.mark.parametrize("signal", ["nll", "entropy", "mc-unit", "ensemble-mean-logits"])
def test_compiled(signal):
    model = make_models(signal, "learned")[0]
    tokens, targets = torch.randint(V, (2, 5, 3))
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        torch.manual_seed(1)
        out = run(tokens, targets)
        out.loss.backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert_all_close(*results)


def test_a_third_derivative_is_refused():
    rnn, _, _ = make_pair("nll", "fixed")
    x, hx, y = make_inputs(rnn)
    output, _ = rnn(x, hx, targets=y)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(grad.sum(), x)


def test_custom_signals_are_exact_through_autograd():
    fused, oracle, decoder = make_pair("custom", "learned")
    compare(fused, oracle, decoder, "custom")


def resident_tensors() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if issubclass(type(o), torch.Tensor))


@pytest.mark.parametrize("signal", ["nll", "mc-shared"])
def test_memory_does_not_grow(signal):
    """The leak that kept the thesis from exact gradients: graphs that hold on to each other."""
    import resource

    model = make_models(signal, "learned")[0].float()
    tokens, targets = torch.randint(V, (2, 5, 3))

    def iterate(count):
        hx = None
        for _ in range(count):
            out = model(tokens, targets, hx)
            hx = tuple(s.detach() for s in out.hx)
            out.loss.backward()

    iterate(50)
    tensors = resident_tensors()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    iterate(1000)
    assert resident_tensors() <= tensors
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak  # kB
    assert grown < 2048, f"{grown} kB in 1000 iterations"
