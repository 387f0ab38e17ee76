"""The oracle itself: against nn.LSTM, against finite differences, against the formulas."""

import pytest
import torch
from conftest import STATES, make_inputs, make_pair
from torch import nn

import fused_recoder as fr


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("options", [{"signal": None}, {"signal": "nll", "step": 0.0}])
@pytest.mark.parametrize("bias", [True, False])
def test_without_recoding_it_is_nn_lstm(layers, options, bias):
    lstm = nn.LSTM(5, 7, layers, bias=bias, dtype=torch.float64)
    decoder = nn.Linear(7, 11, dtype=torch.float64)
    ours = fr.reference.RecodingLSTM.from_lstm(lstm, decoder, **options)
    x, hx, y = make_inputs(ours)
    output, (h_n, c_n) = ours(x, hx, targets=y)
    expected, (h_e, c_e) = lstm(x, hx)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(h_n, h_e, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(c_n, c_e, rtol=1e-12, atol=1e-14)
    cotangent = torch.randn_like(output)
    got = torch.autograd.grad(output, [x, *lstm.parameters()], cotangent)
    want = torch.autograd.grad(expected, [x, *lstm.parameters()], cotangent)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-13)


def one_step(rnn, x, h0, c0, nudge=None):
    """One unrecoded step by hand; `nudge` = (layer, state, [B, H]) is added to a state as soon as
    it exists. Returns the top h [B, H], and the states h, c [L, B, H]."""
    below, hs, cs = x, [], []
    for l, (w_ih, w_hh, b_ih, b_hh) in enumerate(rnn.all_weights):
        gates = below @ w_ih.t() + h0[l] @ w_hh.t() + b_ih + b_hh
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c0[l] + i.sigmoid() * g.tanh()
        if nudge is not None and nudge[:2] == (l, "c"):
            c = c + nudge[2]
        h = o.sigmoid() * c.tanh()
        if nudge is not None and nudge[:2] == (l, "h"):
            h = h + nudge[2]
        below = h
        hs.append(h)
        cs.append(c)
    return below, torch.stack(hs), torch.stack(cs)


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_recoding_step_is_the_finite_difference_of_the_signal(signal, layers):
    alpha = 0.7
    _, oracle, decoder = make_pair(layers=layers, signal=signal, step=alpha)
    x, (h0, c0), y = make_inputs(oracle, T=1)
    with torch.no_grad():
        _, (h_n, c_n) = oracle(x, (h0, c0), targets=y)
        _, h_raw, c_raw = one_step(oracle, x[0], h0, c0)

        def delta(nudge):
            o = decoder(one_step(oracle, x[0], h0, c0, nudge)[0]).softmax(-1)
            p = o.gather(1, y[0].unsqueeze(1)).squeeze(1)
            values = {"nll": -p.log(), "surprisal": p**-p - 1, "entropy": -(o * o.log()).sum(-1)}
            return values[signal]

        eps = 1e-6
        for l in range(layers):
            for state, raw, recoded in (("h", h_raw, h_n), ("c", c_raw, c_n)):
                for j in range(oracle.hidden_size):
                    e = torch.zeros_like(raw[l])
                    e[:, j] = eps
                    slope = (delta((l, state, e)) - delta((l, state, -e))) / (2 * eps)
                    torch.testing.assert_close(
                        recoded[l][:, j], raw[l][:, j] - alpha * slope, rtol=0, atol=1e-8
                    )


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
@pytest.mark.parametrize("states", STATES, ids="".join)
def test_exact_mode_is_the_derivative_of_the_forward_pass(signal, states):
    decoder = nn.Linear(3, 5, dtype=torch.float64)
    oracle = fr.reference.RecodingLSTM(
        2, 3, 2, decoder=decoder, signal=signal, step="learned", states=states,
        gradient="exact", dtype=torch.float64,
    )  # fmt: skip
    x, hx, y = make_inputs(oracle, T=2, B=2, vocab=5)
    names = [n for n, _ in oracle.named_parameters()]

    def f(x, h0, c0, w_dec, *params):
        new = {f"rnn.{n}": p for n, p in zip(names, params, strict=True)}
        new["decoder.weight"] = w_dec
        output, (h_n, c_n) = torch.func.functional_call(
            Both(oracle, decoder), new, (x, (h0, c0), y)
        )
        return output, h_n, c_n

    assert torch.autograd.gradcheck(f, (x, *hx, decoder.weight, *oracle.parameters()))


class Both(nn.Module):
    """A model that owns the decoder its rnn holds."""

    def __init__(self, rnn, decoder):
        super().__init__()
        self.rnn, self.decoder = rnn, decoder

    def forward(self, x, hx, y):
        return self.rnn(x, hx, targets=y)


def test_detached_gradients_ignore_the_recoder_but_not_the_step():
    """ds'/ds = I: the states are shifted by a constant, so gradients are those of an LSTM with
    that constant added."""
    _, oracle, _ = make_pair(layers=1, signal="nll", step="learned")
    x, hx, y = make_inputs(oracle, T=1)
    _, (h_n, c_n) = oracle(x, hx, targets=y)
    _, h_raw, c_raw = one_step(oracle, x[0], *hx)
    shift_h, shift_c = (h_n - h_raw).detach(), (c_n - c_raw).detach()
    got = torch.autograd.grad((h_n * c_n).sum(), x)
    want = torch.autograd.grad(((h_raw + shift_h) * (c_raw + shift_c)).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
