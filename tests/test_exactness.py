"""The fused engine against the oracle: every option in float64, an error budget in float32."""

import itertools
from collections import defaultdict

import pytest
import torch
from conftest import (
    SIGNALS,
    STATES,
    as_dtype,
    assert_all_close,
    make_inputs,
    make_pair,
    relative_error,
    run_with_gradients,
)
from torch import nn

import fused_recoder as fr
from fused_recoder import signals


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("states", STATES, ids="".join)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("step", [0.7, "learned"])
def test_float64_agrees_with_the_oracle(signal, states, layers, step):
    """All combinations of targets (given, some ignored, absent), masks, lengths and dropout."""
    most_probable = {"nll": signals.NLL("argmax"), "surprisal": signals.Surprisal("argmax")}
    for targets, mask, lengths, dropout, output_dropout in itertools.product(
        ("given", "absent"), (False, True), (None, [4, 2, 1]), (0.0, 0.3), (0.0, 0.4)
    ):
        reads = signal if targets == "given" else most_probable.get(signal, signal)
        fused, oracle, _ = make_pair(
            layers=layers, signal=reads, states=states, step=step,
            dropout=dropout, output_dropout=output_dropout,
        )  # fmt: skip
        x, hx, y = make_inputs(fused)
        y[1, 1] = -100
        arguments = {
            "targets": y if targets == "given" else None,
            "recode_mask": torch.rand(y.shape) < 0.6 if mask else None,
            "lengths": None if lengths is None else torch.tensor(lengths),
        }
        got = run_with_gradients(fused, x, hx, **arguments)
        want = run_with_gradients(oracle, x, hx, **arguments)
        assert_all_close(got, want)


ODD_SHAPES = [  # T, B, I, H, L, V
    (1, 1, 1, 1, 1, 2),
    (1, 1, 3, 9, 2, 17),
    (2, 1, 33, 31, 1, 257),
    (5, 7, 8, 16, 2, 64),
    (3, 13, 17, 33, 3, 1001),
    (6, 97, 4, 5, 1, 19),  # more rows than a block of the GEMM
    (4, 3, 450, 401, 1, 33),  # inner dimension in several blocks
    (4, 2, 3, 6, 1, 9001),  # a vocabulary of several summation blocks
]


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_odd_shapes(shape, signal):
    T, B, I, H, L, V = shape
    fused, oracle, _ = make_pair(I, H, L, V, signal=signal, step="learned")
    x, hx, y = make_inputs(fused, T, B, V)
    got = run_with_gradients(fused, x, hx, targets=y)
    assert_all_close(got, run_with_gradients(oracle, x, hx, targets=y))


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
@pytest.mark.parametrize("states", STATES, ids="".join)
@pytest.mark.parametrize("shape", [(7, 5, 24, 40, 2, 300), (20, 3, 65, 129, 1, 1000)], ids=str)
def test_float32_error_is_at_most_twice_the_references(shape, signal, states):
    """Both measured against float64, in norm and over several draws: single numbers are luck."""
    T, B, I, H, L, V = shape
    squares = defaultdict(lambda: [0.0, 0.0])  # name -> fused, reference
    for seed in range(10):
        torch.manual_seed(seed)
        fused, oracle, decoder = make_pair(I, H, L, V, signal=signal, states=states, step="learned")
        x, hx, y = make_inputs(fused, T, B, V)
        truth = run_with_gradients(oracle, x, hx, targets=y)
        for i, rnn in enumerate((fused, oracle)):
            rnn, _ = as_dtype(rnn, decoder, torch.float32)
            x32, *hx32 = (t.detach().float().requires_grad_() for t in (x, *hx))
            results = run_with_gradients(rnn, x32, tuple(hx32), targets=y)
            for name, want in truth.items():
                if want.dtype == torch.bool:
                    continue
                error = (results[name].double() - want).norm() / want.norm()
                squares[name][i] += error.item() ** 2
    worse = {n: (f / r) ** 0.5 for n, (f, r) in squares.items() if f > 4 * r}
    assert not worse, f"float32 error relative to the reference's: {worse}"


@pytest.mark.parametrize("signal", SIGNALS)
def test_float64_agrees_for_any_number_of_threads(signal, threads):
    fused, oracle, _ = make_pair(20, 33, 2, 501, signal=signal, step="learned", dropout=0.1)
    x, hx, y = make_inputs(fused, 5, 37, 501)
    got = run_with_gradients(fused, x, hx, targets=y)
    assert_all_close(got, run_with_gradients(oracle, x, hx, targets=y))


def test_non_contiguous_and_expanded_inputs():
    fused, oracle, _ = make_pair(signal="nll", step="learned")
    x = torch.randn(3, 5, 4, dtype=torch.float64).permute(2, 0, 1).requires_grad_()  # [4, 3, 5]
    h = torch.randn(2, 1, 7, dtype=torch.float64).requires_grad_()
    hx = (h.expand(2, 3, 7), h.flip(2).expand(2, 3, 7))
    y = torch.randint(11, (3, 4)).t()
    mask = torch.ones(1, 3, dtype=torch.bool).expand(4, 3)
    got, want = (run_with_gradients(m, x, hx, targets=y, recode_mask=mask) for m in (fused, oracle))
    assert_all_close(got, want)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("decoder_bias", [True, False])
def test_without_biases(bias, decoder_bias):
    decoder = nn.Linear(7, 11, bias=decoder_bias, dtype=torch.float64)
    fused, oracle, _ = make_pair(signal="surprisal", bias=bias, decoder=decoder)
    x, hx, y = make_inputs(fused)
    got = run_with_gradients(fused, x, hx, targets=y)
    assert_all_close(got, run_with_gradients(oracle, x, hx, targets=y))


PER_LAYER = [{"h": 0.3, (1, "c"): 2.0}, torch.tensor([[0.1, 0.2], [0.3, 0.4]])]


@pytest.mark.parametrize("step", PER_LAYER, ids=["dict", "tensor"])
def test_a_step_per_layer_and_state(step):
    fused, oracle, _ = make_pair(signal="nll", step=step)
    x, hx, y = make_inputs(fused)
    got = run_with_gradients(fused, x, hx, targets=y)
    assert_all_close(got, run_with_gradients(oracle, x, hx, targets=y))
    per_layer_and_state = got["step_size"][:, :, 0, 0]
    expected = torch.tensor([[0.3, 0], [0.3, 2]]) if isinstance(step, dict) else step
    torch.testing.assert_close(per_layer_and_state, expected.double())


def test_argmax_targets_are_used_and_ignored_positions_respected():
    fused, oracle, _ = make_pair(signal=fr.signals.Surprisal(target="argmax"))
    x, hx, y = make_inputs(fused)
    y[2, 1] = -100
    got = run_with_gradients(fused, x, hx, targets=y)
    assert_all_close(got, run_with_gradients(oracle, x, hx, targets=y))
    kept = torch.where(y == -100, -100, 0)
    elsewhere = run_with_gradients(fused, x, hx, targets=kept)
    assert_all_close(elsewhere, got, tolerance=0)  # the gold tokens themselves do not matter


def test_eval_mode_has_the_same_gradients_and_no_dropout():
    fused, oracle, _ = make_pair(signal="nll", dropout=0.5, output_dropout=0.5)
    fused.eval(), oracle.eval()
    x, hx, y = make_inputs(fused)
    got = run_with_gradients(fused, x, hx, targets=y)
    assert_all_close(got, run_with_gradients(oracle, x, hx, targets=y))
    assert (got["output"] != 0).all()


@pytest.mark.parametrize("signal", SIGNALS)
def test_no_grad_gives_the_same_values(signal):
    fused, _, _ = make_pair(signal=signal, layers=3)
    x, hx, y = make_inputs(fused, T=5)
    saving = fused(x, hx, targets=y, return_trace=True)
    with torch.no_grad():
        plain = fused(x, hx, targets=y, return_trace=True)
    torch.testing.assert_close(plain, saving, rtol=0, atol=0)


@pytest.mark.parametrize("signal", SIGNALS)
def test_any_number_of_threads_gives_the_same_bits(signal):
    """Of our own kernels; the large GEMMs of ATen may differ, so shapes stay small."""
    fused, _, decoder = make_pair(33, 65, 2, 1003, signal=signal, dropout=0.2, step="learned")
    fused, _ = as_dtype(fused, decoder, torch.float32)
    x, hx, y = make_inputs(fused, 6, 9, 1003, dtype=torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(run_with_gradients(fused, x, hx, targets=y))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name in ("output", "h_n", "c_n", "delta", "grad_norm"):
            assert torch.equal(other[name], results[0][name]), name


def test_carrying_states_over_calls_is_one_long_sequence():
    fused, _, _ = make_pair(signal="nll")
    x, hx, y = make_inputs(fused, T=6)
    whole, last = fused(x, hx, targets=y)
    first, carried = fused(x[:2], hx, targets=y[:2])
    second, final = fused(x[2:], carried, targets=y[2:])
    assert relative_error(torch.cat([first, second]), whole) < 1e-14
    torch.testing.assert_close(final, last, rtol=1e-13, atol=1e-14)
