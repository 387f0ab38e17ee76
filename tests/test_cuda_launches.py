"""Launches per time step, counted: the products that the mathematics needs, and at most three more
and two per layer."""

import pytest
import torch
from emu import build
from emu.launches import count
from test_variants import E, H, V, make_batch, make_pair
from variants import SIGNALS

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

K = 3  # samples, and members of the ensembles, of variants.py


def per_step(signal, step, layers, **options):
    """What one time step more costs: (forward, backward)."""
    torch.manual_seed(0)
    lm, _ = make_pair(signal, step, layers, **options)

    def of_sequence(T):
        (tokens, targets, hx), labels = make_batch(signal, T=T, L=layers)
        out = []
        forward = count(
            "recode_forward", lambda: out.append(lm(tokens, targets, hx, **labels)), itemsize=8
        )
        return forward, count("recode_backward", out[0].loss.backward, itemsize=8)

    short, long = of_sequence(4), of_sequence(5)
    return long[0] - short[0], long[1] - short[1]


def needed_products(signal, layers):
    """Recurrent and upward products of the LSTM, decoder and back, and down the layers."""
    lstm = 2 * layers - 1
    if signal == "none":
        return lstm
    if signal == "classifier":
        return lstm + 2
    if signal == "classifiers":
        return lstm + 4
    decoder = {"mc-shared": 4, "mc-weight": 2 * K, "ensemble": 2 * K}.get(signal, 2)
    return lstm + decoder + layers - 1


@pytest.mark.parametrize("signal", [s for s in SIGNALS if not s.startswith("custom")])
@pytest.mark.parametrize("layers", [1, 2])
def test_launches_per_step_stay_within_the_budget(signal, layers):
    if signal == "classifiers" and layers == 1:
        pytest.skip("one of them reads the second layer")
    for step in ("fixed", "learned", "lipschitz"):
        forward, backward = per_step(signal, step, layers)
        assert forward.products == needed_products(signal, layers)
        assert forward.others <= 3 + 2 * layers
        assert backward.products == layers
        assert backward.others <= 3 + 2 * layers


@pytest.mark.parametrize(("signal", "decodings"), [("none", 3), ("nll", 3), ("entropy", 5)])
def test_operations_per_step_are_those_of_the_mathematics(signal, decodings):
    """`decodings`: logits, their gradient in h, and in W; nll shares them with the loss."""
    B = 3
    of_input, of_states, of_decoder = 2 * B * 4 * H * E, 2 * B * 4 * H * H, 2 * B * H * V
    down = 0 if signal == "none" else of_states  # the recoding gradient of the lower layer
    forward, backward = per_step(signal, "fixed", layers=2)
    assert forward.flops == of_input + 3 * of_states + down + decodings * of_decoder
    assert backward.flops == 2 * (of_input + 3 * of_states)


@pytest.mark.parametrize("signal", ["nll", "entropy", "mc-unit"])
def test_predicted_steps_cost_their_products_and_one_launch(signal):
    fixed, predicted = (per_step(signal, step, 2)[0] for step in ("fixed", "predicted"))
    networks = 2 * 2  # layers, states
    assert predicted.products == fixed.products + 3 * networks
    assert predicted.others == fixed.others + 1


def test_a_trial_costs_three_launches_and_a_product():
    (fixed, fixed_backward), (trials, backward) = (
        per_step("nll", step, 2) for step in ("fixed", "backtracking")
    )
    count = 6  # of variants.py: all are made, because nobody looks whether one was enough
    assert trials.products == fixed.products + count
    assert trials.others == fixed.others + 3 * count + 2
    assert backward == fixed_backward
