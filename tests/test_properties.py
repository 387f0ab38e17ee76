"""Over shapes and options that nobody thought of (hypothesis)."""

import torch
from conftest import STATES, assert_all_close, make_inputs, make_pair, run_with_gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fused_recoder import signals

SIGNALS = [None, "nll", "surprisal", "entropy"]
SIGNALS += [kind(target="argmax") for kind in (signals.NLL, signals.Surprisal)]
size = st.integers(1, 9)
options = st.fixed_dictionaries(
    {
        "signal": st.sampled_from(SIGNALS),
        "states": st.sampled_from(STATES),
        "step": st.one_of(st.floats(-1, 3), st.just("learned")),
        "dropout": st.sampled_from([0.0, 0.5]),
        "output_dropout": st.sampled_from([0.0, 0.5]),
        "bias": st.booleans(),
        "batch_first": st.booleans(),
    }
)
thorough = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@thorough
@given(size, size, size, size, st.integers(1, 3), st.integers(2, 40), options, st.data())
def test_fused_equals_reference(T, B, I, H, L, V, options, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    fused, oracle, _ = make_pair(I, H, L, V, **options)
    x, hx, y = make_inputs(fused, T, B, V)
    if options["batch_first"]:
        x, y = x.detach().transpose(0, 1).requires_grad_(), y.t()
    ignored = torch.rand(y.shape) < data.draw(st.sampled_from([0.0, 0.3]))
    arguments = {"targets": y.masked_fill(ignored, -100)}
    if options["signal"] not in ("nll", "surprisal") and data.draw(st.booleans()):
        arguments = {}
    if data.draw(st.booleans()):
        arguments["lengths"] = torch.randint(1, T + 1, (B,))
    if data.draw(st.booleans()):
        arguments["recode_mask"] = torch.rand(y.shape) < 0.5
    got = run_with_gradients(fused, x, hx, **arguments)
    want = run_with_gradients(oracle, x, hx, **arguments)
    assert_all_close(got, want, tolerance=1e-9)


@thorough
@given(size, size, size, st.integers(2, 3), st.data())
def test_rows_do_not_see_each_other(T, B, H, L, data):
    """The results of a row depend on nothing but that row."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    signal = data.draw(st.sampled_from(["nll", "surprisal", "entropy"]))
    rnn, _, _ = make_pair(3, H, L, 7, signal=signal)
    x, hx, y = make_inputs(rnn, T, B, 7)
    b = data.draw(st.integers(0, B - 1))
    whole, _ = rnn(x, hx, targets=y)
    alone, _ = rnn(x[:, b : b + 1], tuple(s[:, b : b + 1] for s in hx), targets=y[:, b : b + 1])
    torch.testing.assert_close(alone[:, 0], whole[:, b], rtol=1e-12, atol=1e-14)


@thorough
@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.001, 2.0), st.data())
def test_recoding_states_moves_them_by_step_times_gradient(T, B, step, data):
    """What the trace says is what happened: |s' - s| = step * |gradient| at the last step."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    rnn, _, _ = make_pair(3, 6, 1, 9, signal="nll", step=step, states="h")
    x, hx, y = make_inputs(rnn, T, B, 9)
    output, (h_n, _), trace = rnn(x, hx, targets=y, return_trace=True)
    moved = (h_n[-1] - output[-1]).norm(dim=-1)
    torch.testing.assert_close(moved, (trace.step_size * trace.grad_norm)[0, 0, -1])
