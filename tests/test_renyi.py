"""Rényi entropies: what is theirs alone. (Fused against reference, gradients, readers, bounds and
CUDA's kernels are tested with all other signals: variants.py.)"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import assert_all_close, make_inputs, run_with_gradients

import fused_recoder as fr
from fused_recoder.functional import signal_gradient
from fused_recoder.signals import Entropy, Renyi

NEAR = [1 - 1e-3, 1 - 1e-6, 1 - 1e-9, 1 + 1e-12, 1 + 1e-9, 1 + 1e-6, 1 + 1e-3]
ORDERS = [0.05, 0.5, 0.74, 0.76, 1.24, 1.26, 2.0, 5.0, 50.0]


def exact(logits: torch.Tensor, order: float) -> tuple[torch.Tensor, torch.Tensor]:
    """delta [B] and u [B, V] of logits [B, V]: near order 1 by the series in (order - 1)."""
    log_o = logits.double().log_softmax(-1).numpy().astype(np.longdouble)
    o, a = np.exp(log_o), np.longdouble(order) - 1
    if abs(a) > 1e-2:
        powers = o ** (1 + a)
        total = powers.sum(-1, keepdims=True)
        delta, u = -np.log(total[:, 0]) / a, -(1 + a) / a * (powers / total - o)
    else:  # (o^q - o) / a = o log o (1 + a log o / 2 (1 + a log o / 3 (...)))
        series = np.ones_like(o)
        for n in range(12, 1, -1):
            series = 1 + a * log_o / n * series
        term = o * log_o * series
        mean = term.sum(-1, keepdims=True)
        delta, u = -np.log1p(a * mean[:, 0]) / a, -(1 + a) * (term - mean * o) / (1 + a * mean)
    return torch.from_numpy(delta.astype(float)), torch.from_numpy(u.astype(float))


@pytest.mark.parametrize("order", ORDERS + NEAR)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("vocab", [13, 1001])
def test_no_order_loses_digits(order, dtype, tolerance, vocab):
    """... of value and gradient; the decoder is the unit matrix, so that u is the gradient."""
    logits = torch.randn(3, vocab, dtype=dtype) * 4
    delta, grad = signal_gradient(logits, torch.eye(vocab, dtype=dtype), signal=Renyi(order))
    want_delta, want_u = exact(logits, order)
    assert ((delta - want_delta).abs() <= tolerance * want_delta).all()
    assert ((grad - want_u).abs().amax(1) <= tolerance * want_u.abs().amax(1)).all()


@pytest.mark.parametrize("order", ORDERS + NEAR)
def test_the_reference_loses_none_either(order):
    logits = (torch.randn(3, 101, dtype=torch.float64) * 4).requires_grad_()
    delta = Renyi(order).value(logits, None)
    (u,) = torch.autograd.grad(delta.sum(), logits)
    want_delta, want_u = exact(logits.detach(), order)
    assert ((delta - want_delta).abs() <= 1e-13 * want_delta).all()
    assert ((u - want_u).abs().amax(1) <= 1e-12 * want_u.abs().amax(1)).all()


@pytest.mark.parametrize("cls", [fr.FusedRecodingLSTM, fr.reference.RecodingLSTM])
@pytest.mark.parametrize("gradient", ["detached", "exact"])
@pytest.mark.parametrize("step", [0.5, "lipschitz"])
def test_order_1_is_the_entropy_to_the_last_bit(cls, gradient, step):
    decoder = torch.nn.Linear(7, 11)
    results = []
    for signal in (Entropy(), Renyi(1)):
        torch.manual_seed(1)
        rnn = cls(5, 7, 2, decoder=decoder, signal=signal, step=step, gradient=gradient)
        torch.manual_seed(2)
        x, hx, y = make_inputs(rnn, dtype=torch.float32)
        results.append(run_with_gradients(rnn, x, hx, targets=y))
    for name, want in results[0].items():
        assert torch.equal(results[1][name], want), name


def test_a_reader_of_order_1_is_the_entropys():
    lms = []
    for signal in (Entropy(), Renyi(1)):
        torch.manual_seed(1)
        lms.append(fr.RecodingLanguageModel(31, 6, 8, signal=signal, step=0.5).eval())
    readers = [lm.reader(2) for lm in lms]
    for tokens in torch.randint(31, (4, 2)):
        assert torch.equal(*(reader.feed(tokens) for reader in readers))
        assert torch.equal(*(reader.delta for reader in readers))


def test_orders_one_knows():
    """Of a uniform prediction all are log V; order 2 is -log of the chance that two draws agree;
    towards 0 the log of how many words are possible, towards infinity -log of the largest."""
    uniform, logits = torch.zeros(1, 10).double(), torch.randn(1, 10).double()
    unit, o = torch.eye(10).double(), logits.softmax(-1)
    impossible = logits.clone()
    impossible[0, :4] = -math.inf
    for order in ORDERS + NEAR:
        delta, grad = signal_gradient(uniform, unit, signal=Renyi(order))
        assert delta.item() == pytest.approx(math.log(10), rel=1e-14)
        assert grad.abs().max() < 1e-15

    def value(order, l=logits):
        zeros = torch.zeros(1, 1).double()
        return signal_gradient(zeros, torch.zeros(10, 1).double(), l[0], signal=Renyi(order))[0]

    assert value(2).item() == pytest.approx(-math.log(o.square().sum()), rel=1e-14)
    assert value(1e-9).item() == pytest.approx(math.log(10), rel=1e-7)
    assert value(1e-9, impossible).item() == pytest.approx(math.log(6), rel=1e-7)
    assert value(1e9).item() == pytest.approx(-math.log(o.max()), rel=1e-7)
    assert value(1e30).item() == pytest.approx(-math.log(o.max()), rel=1e-14)
    falling = [value(order).item() for order in sorted(ORDERS + NEAR)]
    assert all(a > b - 1e-12 for a, b in pairwise(falling))


def test_exact_gradients_near_order_1_tend_to_the_entropys():
    decoder = torch.nn.Linear(7, 11, dtype=torch.float64)
    results = []
    for signal in (Entropy(), Renyi(1 + 1e-9)):
        torch.manual_seed(1)
        rnn = fr.FusedRecodingLSTM(
            5, 7, decoder=decoder, signal=signal, gradient="exact", dtype=torch.float64
        )
        torch.manual_seed(2)
        x, hx, y = make_inputs(rnn)
        results.append(run_with_gradients(rnn, x, hx, targets=y))
    assert_all_close(results[1], results[0], 1e-7)


@pytest.mark.parametrize("order", [0, -1, math.inf, math.nan, 1e31])
def test_an_impossible_order_is_refused(order):
    with pytest.raises(ValueError, match="order must be above 0 and at most 1e"):
        Renyi(order)
