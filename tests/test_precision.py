"""Half precision and autocast: GEMM operands are rounded, everything else stays float32."""

import pytest
import torch
from conftest import as_dtype, make_inputs, make_pair, relative_error, run_with_gradients

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("signal", [None, "nll", "surprisal", "entropy"])
def test_half_modules_compute_in_float32(dtype, signal):
    """A half module is a float32 module whose inputs and weights happen to be representable in
    half, with results rounded once at the end."""
    rnn, _, decoder = make_pair(16, 24, 2, 50, signal=signal, step=0.5, dtype=torch.float32)
    half, half_decoder = as_dtype(rnn, decoder, dtype)
    same, _ = as_dtype(half, half_decoder, torch.float32)
    x, hx, y = make_inputs(rnn, 6, 5, 50, dtype=torch.float32)
    x, *hx = (t.detach().to(dtype).requires_grad_() for t in (x, *hx))
    got = run_with_gradients(half, x, tuple(hx), targets=y)
    wide = [t.detach().float().requires_grad_() for t in (x, *hx)]
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
def test_autocast_rounds_operands_and_keeps_states(dtype, signal):
    rnn, oracle, decoder = make_pair(16, 24, 2, 50, signal=signal, step=0.5, dtype=torch.float32)
    x, hx, y = make_inputs(rnn, 6, 5, 50, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        output, (h_n, c_n) = rnn(x, hx, targets=y)
    assert output.dtype == dtype
    assert h_n.dtype == c_n.dtype == torch.float32
    output.float().sum().backward()
    assert rnn.weight_hh_l0.grad.dtype == torch.float32

    # No worse than twice what autocast does to the plain PyTorch version, both against float64.
    exact, _ = as_dtype(oracle, decoder, torch.float64)
    truth, (h_true, c_true) = exact(x.double(), tuple(s.double() for s in hx), targets=y)
    with torch.autocast("cpu", dtype=dtype):
        plain, (h_plain, c_plain) = oracle(x, hx, targets=y)
    for got, reference, want in (
        (output, plain, truth), (h_n, h_plain, h_true), (c_n, c_plain, c_true)
    ):  # fmt: skip
        budget = 2 * relative_error(reference, want) + torch.finfo(dtype).eps
        assert relative_error(got, want) <= budget


def test_autocast_without_states_carries_float32():
    rnn, _, _ = make_pair(16, 24, 1, 50, signal="nll", dtype=torch.float32)
    x, _, y = make_inputs(rnn, 3, 2, 50, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, hx = rnn(x, targets=y)
        _, (h_n, c_n) = rnn(x, hx, targets=y)
    assert h_n.dtype == c_n.dtype == torch.float32


def test_float64_is_left_alone_by_autocast():
    rnn, _, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(rnn)
    want = rnn(x, hx, targets=y)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rnn(x, hx, targets=y)[0]
    assert torch.equal(got, want)


def test_mixed_dtypes_are_refused():
    rnn, _, _ = make_pair(signal="nll", dtype=torch.float32)
    x, hx, y = make_inputs(rnn, dtype=torch.float32)
    with pytest.raises(TypeError, match="dtype"):
        rnn(x.double(), hx, targets=y)
    with pytest.raises(TypeError, match="c0 must have dtype"):
        rnn(x, (hx[0], hx[1].double()), targets=y)
