"""Training steps as CUDA graphs. Without a GPU: on the stand-in; with one: on both."""

import copy
from contextlib import contextmanager

import pytest
import torch
from cuda_stand_in import cuda_stand_in
from test_variants import V, make_pair
from variants import SIGNALS, has_own_masks

import fused_recoder as fr

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=[pytest.mark.gpu, no_gpu])])
def cuda(request):
    if request.param == "gpu":
        yield None
        return
    with cuda_stand_in() as stand_in:
        yield stand_in


@contextmanager
def never_waiting(cuda):
    """The host does not wait for the GPU."""
    if cuda is None:
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")
        return
    cuda.waits.clear()
    yield
    assert cuda.waits == []


def make_model(signal="nll", step="learned", device="cuda", **options):
    lm, _ = make_pair(signal, step, dtype=torch.float32, **options)
    return lm.to(device)


def make_texts(count, T=5, B=3, device="cuda"):
    return list(torch.randint(V, (count, T + 1, B)).to(device))


def graphed(lm, text, **options):
    return fr.GraphedStep(lm, text[:-1], text[1:], **options)


def gradients(lm):
    return {n: p.grad.clone() for n, p in lm.named_parameters() if p.grad is not None}


def eager_gradients(lm, text, hx=None):
    """Those of a copy, so that nothing of the model is touched."""
    lm = copy.deepcopy(lm)
    lm.zero_grad()
    lm(text[:-1], text[1:], hx).loss.backward()
    return gradients(lm)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("signal", [s for s in SIGNALS if not s.startswith(("custom", "class"))])
def test_a_replayed_step_equals_the_eager_one(cuda, signal):
    if cuda is None and signal.startswith("mc-shared"):
        pytest.skip("an eager step draws the seed of shared masks on the host, a graph on the GPU")
    lm = make_model(signal, **{"embedding_dropout" if has_own_masks(signal) else "dropout": 0.3})
    first, second = make_texts(2)
    step = graphed(lm, first)
    hx = None
    for text in (first, second):
        state, eager = torch.cuda.get_rng_state(), copy.deepcopy(lm)
        want = eager(text[:-1], text[1:], hx and tuple(state.detach() for state in hx))
        want.loss.backward()
        torch.cuda.set_rng_state(state)
        with never_waiting(cuda):
            loss, nll, states = step(text[:-1], text[1:], hx)
        torch.testing.assert_close(loss, want.loss)
        torch.testing.assert_close(nll, want.nll)
        torch.testing.assert_close(states, want.hx)
        assert_same(gradients(lm), gradients(eager))
        hx = want.hx  # the graph cares for no history


def test_every_replay_draws_masks_of_its_own(cuda):
    lm = make_model("mc-unit")
    (text,) = make_texts(1)
    step = graphed(lm, text)
    nll = step(text[:-1], text[1:]).nll.clone()
    assert not torch.equal(step(text[:-1], text[1:]).nll, nll)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_survive_zero_grad(cuda, set_to_none):
    """It sets them to None by default: optimizers then skip every parameter."""
    lm = make_model()
    step = graphed(lm, make_texts(1)[0])
    for text in make_texts(3):
        lm.zero_grad(set_to_none=set_to_none)
        step(text[:-1], text[1:])
        assert_same(gradients(lm), eager_gradients(lm, text))


def test_a_loop_with_an_optimizer_trains_as_the_eager_one(cuda):
    models = [make_model() for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.5, fused=True) for m in models]
    texts = make_texts(4)
    step, before = graphed(models[0], texts[0]), copy.deepcopy(models[0])
    for text in texts:
        for lm, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if lm is models[0]:
                step(text[:-1], text[1:])
            else:
                lm(text[:-1], text[1:]).loss.backward()
            optimizer.step()
    parameters, start = (dict(m.named_parameters()) for m in (models[0], before))
    assert all(not torch.equal(parameters[name], start[name]) for name in start)
    assert_same(parameters, dict(models[1].named_parameters()))


def test_gradients_survive_an_eager_backward_between_two_replays(cuda):
    lm = make_model()
    first, second, third = make_texts(3)
    step = graphed(lm, first)
    step(first[:-1], first[1:])
    lm(second[:-1], second[1:]).loss.backward()  # on top of them
    assert_same(gradients(lm), total(*(eager_gradients(lm, text) for text in (first, second))))
    step(third[:-1], third[1:])
    assert_same(gradients(lm), eager_gradients(lm, third))
    lm.zero_grad()
    lm(second[:-1], second[1:]).loss.backward()  # in other memory
    assert_same(gradients(lm), eager_gradients(lm, second))
    step(third[:-1], third[1:])
    assert_same(gradients(lm), eager_gradients(lm, third))


def total(*parts):
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def test_gradients_are_overwritten_unless_they_shall_accumulate(cuda):
    lm = make_model()
    texts = make_texts(3)
    step, each = graphed(lm, texts[0]), [eager_gradients(lm, text) for text in texts]
    for text, want in zip(texts, each, strict=True):
        step(text[:-1], text[1:])
        assert_same(gradients(lm), want)
    lm.zero_grad()
    for count, text in enumerate(texts, 1):
        step(text[:-1], text[1:], accumulate=True)
        assert_same(gradients(lm), total(*each[:count]))


def test_gradients_survive_a_second_model_and_a_second_shape(cuda):
    lm, other = make_model(), make_model("entropy")
    (text,), (short,) = make_texts(1), make_texts(1, T=3)
    step = graphed(lm, text)
    step(text[:-1], text[1:])
    steps = {
        "this": (step, lm, text),
        "shorter": (graphed(lm, short), lm, short),
        "other": (graphed(other, text), other, text),
    }
    # Making them has taken nothing away.
    assert_same(gradients(lm), eager_gradients(lm, text))
    for name in ("shorter", "this", "other", "this", "shorter"):
        replay, model, read = steps[name]
        replay(read[:-1], read[1:])
        assert_same(gradients(model), eager_gradients(model, read))


def test_capturing_leaves_everything_as_it_was(cuda):
    """Warm-up is no training: neither gates nor gradients nor random numbers notice it."""
    lm = make_model("mc-unit", gate=fr.Gate(quantile=0.5), dropout=0.3)
    (text,) = make_texts(1)
    lm(text[:-1], text[1:]).loss.backward()
    threshold, kept = lm.rnn.gate.threshold.clone(), {n: p.grad for n, p in lm.named_parameters()}
    values, random = gradients(lm), (torch.get_rng_state(), torch.cuda.get_rng_state())
    step = graphed(lm, text)
    assert torch.equal(lm.rnn.gate.threshold, threshold)
    assert all(p.grad is kept[name] for name, p in lm.named_parameters())
    assert_same(gradients(lm), values)
    for state, before in zip((torch.get_rng_state(), torch.cuda.get_rng_state()), random,
                             strict=True):  # fmt: skip
        assert torch.equal(state, before)
    step(text[:-1], text[1:])  # and a replay moves the gate
    assert not torch.equal(lm.rnn.gate.threshold, threshold)


def test_it_is_captured_on_the_device_of_its_tokens(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are not two CUDA devices here")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        lm = make_model(device=device)
        text, another = make_texts(2, device=device)
        step = graphed(lm, text)
        loss, _, hx = step(another[:-1], another[1:])
        assert loss.device == hx[0].device == torch.device(device)
        assert_same(gradients(lm), eager_gradients(lm, another))
        assert torch.cuda.current_device() == 0


def test_states_are_carried(cuda):
    lm = make_model()
    first, second = make_texts(2)
    step = graphed(lm, first)
    hx = step(first[:-1], first[1:]).hx
    want = lm(second[:-1], second[1:], lm(first[:-1], first[1:]).hx)
    torch.testing.assert_close(step(second[:-1], second[1:], hx).nll, want.nll)
    torch.testing.assert_close(
        step(first[:-1], first[1:]).nll, lm(first[:-1], first[1:]).nll
    )  # from zeros


def test_weights_are_rounded_anew_by_every_replay(cuda):
    """Autocast keeps what it has rounded, for as long as it is on."""
    lm = make_model("custom", step="fixed")  # plain PyTorch, whose products autocast rounds
    (text,) = make_texts(1)
    with torch.autocast("cpu" if cuda is not None else "cuda", torch.bfloat16):
        lm(text[:-1], text[1:])
        step = graphed(lm, text)
        for _ in range(2):
            with torch.no_grad():
                lm.decoder.weight.mul_(1.5)
                torch.clear_autocast_cache()
            torch.testing.assert_close(step(text[:-1], text[1:]).nll, lm(text[:-1], text[1:]).nll)


def test_what_is_minimised_can_be_said(cuda):
    lm = make_model()
    (text,) = make_texts(1)
    plain, scaled = graphed(lm, text), graphed(lm, text, objective=lambda out: 3 * out.loss)
    loss = plain(text[:-1], text[1:]).loss.clone()
    want = total(*3 * [gradients(lm)])
    torch.testing.assert_close(scaled(text[:-1], text[1:]).loss, 3 * loss)
    assert_same(gradients(lm), want)


CHANGES = {
    "mode": lambda lm: lm.eval(),
    "dropout": lambda lm: setattr(lm, "embedding_dropout", 0.1),
    "probability": lambda lm: setattr(lm.rnn, "probability", 0.5),
    "signal": lambda lm: setattr(lm.rnn, "signal", fr.signals.Surprisal()),
    "gate": lambda lm: setattr(lm.rnn, "gate", fr.Gate(0.1).to("cuda")),
    "weights": lambda lm: setattr(lm.decoder.weight, "data", lm.decoder.weight.data.clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_has_changed_is_refused(cuda, change):
    lm = make_model(dropout=0.3)
    (text,) = make_texts(1)
    step = graphed(lm, text)
    assert step.is_current
    change(lm)
    assert not step.is_current
    with pytest.raises(ValueError, match="lm has changed since its step was captured"):
        step(text[:-1], text[1:])
    graphed(lm, text)(text[:-1], text[1:])


def test_what_cannot_be_captured_is_refused_by_name(cuda):
    (text,) = make_texts(1)
    with pytest.raises(ValueError, match="a Lipschitz step cannot be captured"):
        graphed(make_model(step="lipschitz"), text)
    with pytest.raises(ValueError, match="tokens must be on a CUDA device, got cpu"):
        graphed(make_model(device="cpu"), text.cpu())
    step = graphed(make_model(), text)
    with pytest.raises(ValueError, match=r"tokens must have the shape that was captured, \(5, 3\)"):
        step(text[:-2], text[1:-1])
