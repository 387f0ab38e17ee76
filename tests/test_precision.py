"""Half precision and autocast: operands of products are rounded, everything else stays float32."""

import copy

import pytest
import torch
from conftest import (
    as_dtype,
    forward_arguments,
    make_inputs,
    make_pair,
    relative_error,
    run_with_gradients,
)
from torch import nn
from variants import PAIRS, STEPS, build, classifies

import fused_recoder as fr

HALVES = [torch.bfloat16, torch.float16]
I = 16
FUSED_PAIRS = [(a, b) for a, b in PAIRS if a != "none" and not a.startswith("custom")]


def autocast(dtype):
    return torch.autocast("cpu", dtype=dtype)


def inputs_in(dtype, rnn, T=6, B=5, vocab=50):
    """Inputs and states that half can represent, wanting gradients, and targets."""
    x, hx, y = make_inputs(rnn, T, B, vocab, dtype=torch.float32)
    x, *hx = (t.detach().bfloat16().half().to(dtype).requires_grad_() for t in (x, *hx))
    return x, tuple(hx), y


# ------------------------------------------------------------------------------------ one product


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (5, 64, 33), (97, 301, 20), (2, 8193, 3)])
def test_a_product_is_that_of_rounded_operands(dtype, shape, threads):
    """One cell from states of zero: gates are one product, of an inner size of any kind."""
    B, inner, H = shape
    rnn = fr.FusedRecodingLSTM(inner, H, decoder=None, signal=None, bias=False)
    x = torch.randn(1, B, inner)
    with torch.no_grad():
        rnn.weight_ih_l0.normal_(0, inner**-0.5)
        with autocast(dtype):
            _, (h_n, c_n) = rnn(x)
    rounded = [t.to(dtype).double() for t in (x[0], rnn.weight_ih_l0)]
    i, _, g, o = (rounded[0] @ rounded[1].t()).chunk(4, 1)
    c = torch.sigmoid(i) * torch.tanh(g)
    torch.testing.assert_close(c_n[0].double(), c.detach(), rtol=3e-5, atol=3e-6)
    h = torch.sigmoid(o) * torch.tanh(c)
    torch.testing.assert_close(h_n[0].double(), h.detach(), rtol=3e-5, atol=3e-6)
    assert h_n.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_a_weights_gradient_is_a_product_of_rounded_operands(dtype):
    """That of the decoder, whose operands are known: directions and states."""
    lm = fr.RecodingLanguageModel(300, 40, 40, signal=None)
    tokens = torch.randint(300, (8, 9))
    with autocast(dtype):
        out = lm(tokens[:-1], tokens[1:])
    out.loss.backward()
    with torch.no_grad(), autocast(dtype):
        h = lm.rnn(lm.encoder(tokens[:-1]))[0].flatten(0, 1)
    weight, bias = lm.decoder.weight.detach(), lm.decoder.bias.detach()
    logits = h.double() @ weight.to(dtype).double().t() + bias.double()
    u = torch.softmax(logits, 1)
    u[torch.arange(len(u)), tokens[1:].flatten()] -= 1
    want = u.to(dtype).double().t() @ h.double() / len(u)
    assert relative_error(lm.decoder.weight.grad, want) < 2e-3


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_stays_so(dtype, value):
    rnn = fr.FusedRecodingLSTM(5, 4, decoder=None, signal=None)
    x = torch.randn(1, 3, 5)
    x[0, 1, 2] = value
    with torch.no_grad(), autocast(dtype):
        _, (_, c_n) = rnn(x)
    assert torch.isfinite(c_n[0, [0, 2]]).all()
    assert torch.isnan(value * torch.ones(())) == torch.isnan(c_n[0, 1]).all()


# ------------------------------------------------------------------------------ modules, autocast


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("signal", [None, "nll", "surprisal", "entropy"])
def test_a_half_module_is_a_float32_module_under_autocast(dtype, signal):
    """... whose weights happen to be representable in half; results are rounded once."""
    rnn, _, decoder = make_pair(16, 24, 2, 50, signal=signal, step=0.5, dtype=torch.float32)
    half, half_decoder = as_dtype(rnn, decoder, dtype)
    same, _ = as_dtype(half, half_decoder, torch.float32)
    x, hx, y = inputs_in(dtype, rnn)
    got = run_with_gradients(half, x, hx, targets=y)
    wide = [t.detach().float().requires_grad_() for t in (x, *hx)]
    with autocast(dtype):
        want = run_with_gradients(same, wide[0], tuple(wide[1:]), targets=y)
    for name in ("output", "h_n", "c_n", "grad x", "grad h_0", "grad weight_ih_l1"):
        assert got[name].dtype == dtype
    for name in ("delta", "delta_after"):
        assert got[name].dtype == torch.float32
    for name in ("output", "h_n", "c_n"):
        assert torch.equal(got[name], want[name].to(dtype)), name
    eps = torch.finfo(dtype).eps
    for name in want:
        if name.startswith("grad "):  # cotangents were drawn in float64 and rounded to half
            assert relative_error(got[name], want[name]) < 4 * eps, name


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("signal", [None, "nll", "entropy"])
def test_states_are_not_rounded(dtype, signal):
    rnn, _, _ = make_pair(16, 24, 2, 50, signal=signal, step=0.5, dtype=torch.float32)
    x, hx, y = make_inputs(rnn, 6, 5, 50, dtype=torch.float32)
    with autocast(dtype):
        output, (h_n, c_n), trace = rnn(x, hx, targets=y, return_trace=True)
        _, carried = rnn(x, (h_n, c_n), targets=y)
    assert output.dtype == dtype
    for state in (h_n, c_n, trace.delta, *carried):
        assert state.dtype == torch.float32
    assert not torch.equal(h_n, h_n.to(dtype).float())
    output.float().sum().backward()
    assert rnn.weight_hh_l0.grad.dtype == torch.float32
    assert not torch.equal(rnn.weight_hh_l0.grad, rnn.weight_hh_l0.grad.to(dtype).float())


@pytest.mark.parametrize("dtype", HALVES)
def test_half_input_from_a_layer_before(dtype):
    """What autocast hands over is half; the weights are not."""
    rnn, _, _ = make_pair(16, 24, 2, 50, signal="nll", step=0.5, dtype=torch.float32)
    x, hx, y = make_inputs(rnn, 6, 5, 50, dtype=torch.float32)
    before = nn.Linear(16, 16)
    with autocast(dtype):
        given = before(x)
        assert given.dtype == dtype
        output, _ = rnn(given, hx, targets=y)
        again, _ = rnn(given.float(), hx, targets=y)
    assert torch.equal(output, again)
    output.float().sum().backward()
    assert before.weight.grad.norm() > 0


def test_autocast_without_states_carries_float32():
    rnn, _, _ = make_pair(16, 24, 1, 50, signal="nll", dtype=torch.float32)
    x, _, y = make_inputs(rnn, 3, 2, 50, dtype=torch.float32)
    with autocast(torch.bfloat16):
        _, hx = rnn(x, targets=y)
        _, (h_n, c_n) = rnn(x, hx, targets=y)
    assert h_n.dtype == c_n.dtype == torch.float32


def test_float64_is_left_alone_by_autocast():
    rnn, _, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)
    want = rnn(x, hx, targets=y)[0]
    with autocast(torch.bfloat16):
        got = rnn(x, hx, targets=y)[0]
    assert torch.equal(got, want)


def test_mixed_dtypes_are_refused():
    rnn, _, _ = make_pair(signal="nll", dtype=torch.float32)
    x, hx, y = make_inputs(rnn, dtype=torch.float32)
    with pytest.raises(TypeError, match="dtype"):
        rnn(x.double(), hx, targets=y)
    with pytest.raises(TypeError, match="c0 must have dtype"):
        rnn(x, (hx[0], hx[1].double()), targets=y)


# --------------------------------------------------------------------------------- the whole engine


def as_groups(results):
    """Numbers in float64; the many small gradients of the step as one vector."""
    steps = [v.flatten() for n, v in results.items() if n.startswith("grad step.")]
    numbers = {n: v.double() for n, v in results.items() if v.dtype != torch.bool}
    rest = {n: v for n, v in numbers.items() if not n.startswith("grad step.")}
    return rest | ({"grad step": torch.cat(steps).double()} if steps else {})


def make_models(signal, step, gradient, seed):
    """Fused and reference in float32 with equal weights, and the reference in float64."""
    torch.manual_seed(seed)
    kind, decoder = build(signal, 40, 300, torch.float32)
    options = {"signal": kind, "gradient": gradient}
    models = [
        cls(I, 40, 2, decoder=decoder, step=STEPS[step](), **options)
        for cls in (fr.FusedRecodingLSTM, fr.reference.RecodingLSTM)
    ]
    models[1].load_state_dict(models[0].state_dict())
    truth, _ = copy.deepcopy((models[1], decoder))
    truth.decoder.double()
    return *models, truth.double()


@pytest.mark.parametrize("gradient", ["detached", "exact"])
@pytest.mark.parametrize(("signal", "step"), FUSED_PAIRS)
def test_the_error_is_at_most_twice_the_references_under_autocast(signal, step, gradient):
    """Both measured against float64, in norm and over several draws."""
    squares = {}
    for seed in range(3):
        fused, oracle, exact = make_models(signal, step, gradient, seed)
        x, hx, y = make_inputs(fused, 7, 5, 300, dtype=torch.float32)
        arguments = {"targets": y}
        if classifies(signal):
            arguments["labels"] = torch.randint(2, y.shape)
        wide = [t.detach().double().requires_grad_() for t in (x, *hx)]
        truth = as_groups(run_with_gradients(exact, wide[0], tuple(wide[1:]), **arguments))
        for i, rnn in enumerate((fused, oracle)):
            with autocast(torch.bfloat16):
                results = as_groups(run_with_gradients(rnn, x, hx, **arguments))
            for name, want in truth.items():
                sums = squares.setdefault(name, [0.0, 0.0])
                sums[i] += (results[name].double() - want).square().sum().item()
    worse = {n: (f / r) ** 0.5 for n, (f, r) in squares.items() if f > 4 * r + 1e-12}
    assert not worse, f"bfloat16 error relative to the reference's: {worse}"


@pytest.mark.parametrize("gradient", ["detached", "exact"])
def test_any_number_of_threads_gives_the_same_bits(gradient):
    rnn, _, _ = make_pair(
        20, 33, 2, 501, signal="nll", step="learned", gradient=gradient, dtype=torch.float32
    )
    x, hx, y = make_inputs(rnn, 5, 37, 501, dtype=torch.float32)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with autocast(torch.bfloat16):
            results.append(run_with_gradients(rnn, x, hx, targets=y))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("signal", ["nll", "classifier", "entropy"])
def test_backward_inside_autocast(dtype, signal):
    """Also where gradients go through ATen's own products."""
    gradients = []
    for inside in (True, False):
        rnn, _, _ = make_models(signal, "predicted", "exact", 3)
        x, hx, y = make_inputs(rnn, 4, 3, 300, dtype=torch.float32)
        labels = {"labels": torch.zeros_like(y)} if signal == "classifier" else {}
        with autocast(dtype):
            output, (h_n, _) = rnn(x.detach(), tuple(s.detach() for s in hx), targets=y, **labels)
            if inside:
                (output.float().sum() + h_n.sum()).backward()
        if not inside:
            (output.float().sum() + h_n.sum()).backward()
        gradients.append({n: p.grad for n, p in rnn.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_gradients_that_overflow_are_skipped_by_a_scaler():
    lm = fr.RecodingLanguageModel(50, 20, 20, signal="nll", step="learned", gradient="exact")
    optimizer = torch.optim.SGD(lm.parameters(), 0.1)
    tokens = torch.randint(50, (6, 4))
    for scale, moves in ((2.0**40, False), (2.0**4, True)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        before = lm.decoder.weight.detach().clone()
        optimizer.zero_grad()
        with autocast(torch.float16):
            loss = lm(tokens[:-1], tokens[1:]).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, lm.decoder.weight) != moves


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("signal", ["nll", "entropy", "mc_dropout"])
def test_a_reader_rounds_as_one_call_does(dtype, signal):
    lm = fr.RecodingLanguageModel(60, 30, 30, 2, signal=signal, step=0.5).eval()
    tokens = torch.randint(60, (8, 5))
    with torch.no_grad(), autocast(dtype):
        torch.manual_seed(1)
        out = lm(tokens[:-1], tokens[1:], logits=True)
        torch.manual_seed(1)
        reader = lm.reader(5)
        read = torch.stack([reader.feed(row) for row in tokens[:-1]])
    want = torch.log_softmax(out.logits.float(), -1)
    assert (read - want).abs().max() < 0.03
    assert reader.hx[0].dtype == torch.float32


def test_a_precision_that_is_none_is_refused():
    rnn, _, _ = make_pair(signal=None, dtype=torch.float32)
    a = forward_arguments(
        input=torch.zeros(1, 1, 5), h0=torch.zeros(2, 1, 7), c0=torch.zeros(2, 1, 7),
        weights=[w for layer in rnn.all_weights for w in layer], sizes=torch.zeros(2, 2),
        precision="int8",
    )  # fmt: skip
    with pytest.raises(ValueError, match="precision must be same, bfloat16 or float16, got 'int8'"):
        torch.ops.fused_recoder.recode_forward(*a)
