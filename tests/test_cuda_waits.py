"""Where Python makes the host wait for a GPU: docs/gpu.md names the places."""

import pytest
import torch
from cuda_stand_in import cuda_stand_in
from test_variants import V, make_pair
from variants import SIGNALS, classifies

LENGTHS = [5, 2, 1]


@pytest.fixture
def cuda():
    with cuda_stand_in() as stand_in:
        yield stand_in


def make(signal, step="learned", **options):
    """A model and a batch, on the GPU."""
    lm = make_pair(signal, step, dtype=torch.float32, **options)[0].to("cuda")
    tokens, targets = torch.randint(V, (2, 5, 3), device="cuda")
    labels = torch.randint(2, (5, 3), device="cuda")
    return lm, tokens, targets, {"labels": labels} if classifies(signal) else {}


@pytest.mark.parametrize("signal", [s for s in SIGNALS if not s.startswith("mc-shared")])
def test_forward_and_backward_wait_for_nothing(cuda, signal):
    for step, gradient in (("learned", "detached"), ("predicted", "exact")):
        lm, tokens, targets, labels = make(signal, step, gradient=gradient, probability=0.5)
        lengths = torch.tensor(LENGTHS, device="cuda")
        cuda.waits.clear()
        hx = None
        for _ in range(2):
            out = lm(tokens, targets, hx, lengths=lengths, return_trace=True, **labels)
            out.loss.backward()
            hx = tuple(state.detach() for state in out.hx)
        assert cuda.waits == []


def test_shared_masks_are_waited_for(cuda):
    """The host lists their columns, and so draws their seed, which others may want on the GPU."""
    lm, tokens, targets, _ = make("mc-shared", probability=0.5)
    cuda.waits.clear()
    lm(tokens, targets)
    assert cuda.waits


def test_lengths_on_the_host_are_waited_for(cuda):
    lm, tokens, targets, _ = make("nll")
    cuda.waits.clear()
    lm(tokens, targets, lengths=LENGTHS)
    assert cuda.waits


def test_lipschitz_bounds_are_waited_for_when_the_decoder_has_changed(cuda):
    lm, tokens, targets, _ = make("nll", "lipschitz")
    for change in (True, False, True):
        if change:
            with torch.no_grad():
                lm.decoder.weight.mul_(2)
        cuda.waits.clear()
        lm(tokens, targets).loss.backward()
        assert bool(cuda.waits) == change
