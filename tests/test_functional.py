"""signal_gradient: against autograd, finite differences, and at the edge of the number range."""

import math

import pytest
import torch
from conftest import relative_error

import fused_recoder as fr
from fused_recoder.functional import signal_gradient
from fused_recoder.signals import Renyi, as_signal

NAMED = ["nll", "surprisal", "entropy"]
SIGNALS = [*NAMED, Renyi(0.5), Renyi(1.1), Renyi(3)]


def make(shape=(4, 3), H=6, V=13, dtype=torch.float64):
    hidden = torch.randn(*shape, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(V, shape)


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 3), (2, 3, 4)])
def test_value_and_gradient_are_autograds(signal, shape):
    hidden, weight, bias, targets = make(shape)
    delta, grad = signal_gradient(hidden, weight, bias, targets, signal=signal)
    logits = (hidden @ weight.t() + bias).reshape(-1, 13)
    want = as_signal(signal).value(logits, targets.reshape(-1))
    assert delta.shape == shape
    assert grad.shape == hidden.shape
    torch.testing.assert_close(delta.reshape(-1), want, rtol=1e-12, atol=1e-14)
    (want_grad,) = torch.autograd.grad(want.sum(), hidden)
    torch.testing.assert_close(grad, want_grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_both_results_can_be_differentiated_once(signal, with_bias):
    hidden, weight, bias, targets = make((3,))
    targets[1] = -100
    tensors = (hidden, weight, bias) if with_bias else (hidden, weight)

    def f(hidden, weight, bias=None):
        return signal_gradient(hidden, weight, bias, targets, signal=signal)

    assert torch.autograd.gradcheck(f, tensors)


def test_a_third_derivative_is_refused():
    hidden, weight, bias, targets = make((3,))
    _, grad = signal_gradient(hidden, weight, bias, targets, signal="nll")
    (second,) = torch.autograd.grad(grad.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivatives"):
        second.sum().backward()


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_chunks_of_rows_do_not_show(signal):
    hidden, weight, bias, targets = make((50,), V=100_003, H=3)
    whole = signal_gradient(hidden, weight, bias, targets, signal=signal)
    parts = [
        signal_gradient(hidden[i : i + 1], weight, bias, targets[i : i + 1], signal=signal)
        for i in (0, 41, 42, 49)
    ]
    for which in (0, 1):
        part = torch.cat([p[which] for p in parts])
        assert relative_error(part, whole[which][[0, 41, 42, 49]]) < 1e-12


def test_ignored_rows_have_neither_signal_nor_gradient():
    for signal in SIGNALS:
        hidden, weight, bias, targets = make((4,))
        targets[2] = -100
        delta, grad = signal_gradient(hidden, weight, bias, targets, signal=signal)
        assert delta[2] == 0
        assert (grad[2] == 0).all()
        assert (delta[[0, 1, 3]] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signal", NAMED)
@pytest.mark.parametrize("log_p", [-1e-6, -1e-3, -69.07, -87.0, -100.0, -1000.0])
def test_extreme_probabilities_have_finite_limits(dtype, signal, log_p):
    """Gold tokens from p = 1 - 1e-6 down to p = 1e-434: two tokens, logits set by the bias."""
    gap = math.log(math.expm1(-log_p)) if log_p > -30 else -log_p  # logit of the other token
    weight = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    bias = torch.tensor([0.0, gap], dtype=dtype)
    hidden = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    delta, grad = signal_gradient(hidden, weight, bias, torch.tensor([0]), signal=signal)
    p = math.exp(log_p)
    kappa = math.exp((1 - p) * log_p) * (log_p + 1)
    q = -math.expm1(log_p)
    entropy = -(p * log_p + (q * math.log1p(-p) if q > 0 else 0.0))
    # d(delta)/d(hidden) = u_0 - u_1; u = scale * (o - onehot) has u_1 = -u_0
    u_0 = {
        "nll": -q,
        "surprisal": -q * kappa,
        "entropy": -p * (log_p + entropy),
    }[signal]
    want = {"nll": -log_p, "surprisal": math.expm1(-p * log_p), "entropy": entropy}[signal]
    # Next to a probability of 1 nothing is better than an ulp of 1; here the entropy always is.
    certain = log_p > -1 or signal == "entropy"
    near_one = 4 * torch.finfo(dtype).eps if certain else 1e-30
    tight = 1e-4 if dtype == torch.float32 else 1e-9
    assert delta.item() == pytest.approx(want, rel=tight, abs=near_one)
    assert grad.item() == pytest.approx(2 * u_0, rel=tight, abs=near_one)
    (second,) = torch.autograd.grad(grad.sum() + delta.sum(), hidden)
    assert torch.isfinite(second).all()


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_certain_and_impossible_tokens(signal):
    """p = 1 to the last bit, and a token whose logit is -inf."""
    weight = torch.randn(3, 2, dtype=torch.float32)
    hidden = torch.zeros(2, 2)
    bias = torch.tensor([1e4, 0.0, -math.inf])
    delta, grad = signal_gradient(hidden, weight, bias, torch.tensor([0, 1]), signal=signal)
    assert torch.isfinite(delta).all()
    assert torch.isfinite(grad).all()
    assert delta[0] == 0
    assert (grad[0] == 0).all()


def test_nan_logits_are_not_hidden():
    weight = torch.randn(3, 2)
    for signal in SIGNALS:
        delta, _ = signal_gradient(
            torch.full((1, 2), math.nan), weight, None, torch.tensor([0]), signal=signal
        )
        assert torch.isnan(delta).all()


def test_works_for_another_models_states():
    """A Transformer's hidden states, [B, T, H], with its tied output embedding."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    embedding = torch.nn.Embedding(20, 8)
    tokens = torch.randint(20, (3, 5))
    hidden = layer(embedding(tokens))
    delta, grad = signal_gradient(hidden, embedding.weight, targets=tokens, signal="nll")
    logits = hidden @ embedding.weight.t()
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), reduction="none"
    )
    torch.testing.assert_close(delta.flatten(), want)
    after, _ = signal_gradient(hidden - 0.05 * grad, embedding.weight, targets=tokens, signal="nll")
    assert (after < delta).all()
    delta.mean().backward()
    assert embedding.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"signal": None}, ValueError, "signal must be 'nll', 'surprisal' or 'entropy', got None"),
        ({"signal": "novelty"}, ValueError, "signal must be one of"),
        ({"targets": torch.tensor([0, 1])}, ValueError, r"targets must have shape \(4,\)"),
        ({"targets": torch.tensor([0, 1, 2, 13])}, ValueError, r"in \[0, 13\) or -100, got 13"),
        ({"targets": torch.tensor([0, 1, 2, -1])}, ValueError, "got -1"),
        ({"targets": torch.tensor([0, 1, 2, 3.0])}, TypeError, "targets must be int64"),
        ({"hidden": torch.zeros(4, 5)}, ValueError, "weight must have shape"),
        ({"hidden": torch.zeros(0, 6)}, ValueError, "hidden must not be empty"),
        ({"hidden": torch.zeros(4, 6, dtype=torch.int32)}, TypeError, "hidden must be float32"),
        ({"hidden": torch.zeros(4, 6, dtype=torch.float64)}, TypeError, "weight must have dtype"),
        ({"bias": torch.zeros(12)}, ValueError, r"bias must have shape \[V\]"),
        ({"weight": torch.zeros(0, 6)}, ValueError, "weight must have shape"),
        ({"weight": torch.zeros(13, 6, device="meta")}, ValueError, "weight must be on cpu"),
    ],
)
def test_bad_input_names_the_argument(change, error, message):
    arguments = {
        "hidden": torch.zeros(4, 6),
        "weight": torch.zeros(13, 6),
        "bias": torch.zeros(13),
        "targets": torch.zeros(4, dtype=torch.int64),
        "signal": "nll",
    } | change
    if "hidden" in change and change["hidden"].shape[0] == 0:
        arguments["targets"] = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(error, match=message):
        signal_gradient(
            arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("bias"),
            arguments.pop("targets"), **arguments,
        )  # fmt: skip


@pytest.mark.parametrize("kind", [fr.signals.NLL, fr.signals.Surprisal])
def test_the_most_probable_token_can_be_asked_for(kind):
    hidden, weight, bias, targets = make((4,))
    targets[1] = -100
    argmax = (hidden @ weight.t() + bias).argmax(-1)
    want = signal_gradient(hidden, weight, bias, argmax, signal=kind())
    without = signal_gradient(hidden, weight, bias, signal=kind(target="argmax"))
    torch.testing.assert_close(without, want)
    # Targets only say what to ignore.
    delta, grad = signal_gradient(hidden, weight, bias, targets, signal=kind(target="argmax"))
    counted = targets != -100
    torch.testing.assert_close((delta[counted], grad[counted]), tuple(w[counted] for w in want))
    assert not delta[1]
    assert not grad[1].any()


@pytest.mark.parametrize("signal", ["nll", "surprisal"])
def test_a_gold_signal_needs_its_gold(signal):
    hidden, weight, bias, _ = make((4,))
    with pytest.raises(ValueError, match=r"targets must be given.*target=.argmax.\)"):
        signal_gradient(hidden, weight, bias, signal=signal)
