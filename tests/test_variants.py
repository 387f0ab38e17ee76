"""Language models of every variant: loss, nll and gradients against the oracle; training."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_all_close
from test_language_model import REDUCTIONS, run
from variants import PAIRS, SIGNALS, STEPS, build, classifies, has_own_masks

import fused_recoder as fr

V, E, H = 13, 5, 7


def make_pair(signal, step="fixed", layers=2, dtype=torch.float64, **options):
    models = []
    for cls in (fr.RecodingLanguageModel, fr.reference.RecodingLanguageModel):
        torch.manual_seed(4)
        kind, decoder = build(signal, H, V, dtype)
        models.append(
            cls(V, E, H, layers, signal=kind, step=STEPS[step](), dtype=dtype,
                decoder=decoder if signal.startswith("ensemble") else None, **options)
        )  # fmt: skip
    models[1].load_state_dict(models[0].state_dict())
    return models


def make_batch(signal, T=5, B=3, L=2):
    tokens = torch.randint(V, (T + 1, B))
    targets = tokens[1:].clone()
    targets[1, 1] = -100
    rows = 3 * B if signal == "variational" else B
    hx = tuple(torch.randn(L, rows, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    labels = {"labels": torch.randint(2, (T, B))} if classifies(signal) else {}
    return (tokens[:-1], targets, hx), labels


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_agrees_with_the_oracle(signal, reduction):
    for layers, dropout, lengths, step in itertools.product(
        (1, 2), (0.0, 0.3), (None, [5, 2, 1]), ("learned", "predicted")
    ):
        if signal == "classifiers" and layers == 1:
            continue
        embedding_only = has_own_masks(signal) and dropout > 0
        where = "embedding_dropout" if embedding_only else "dropout"
        fused, oracle = make_pair(signal, step, layers, **{where: dropout})
        batch, labels = make_batch(signal, L=layers)
        arguments = labels | {
            "lengths": None if lengths is None else torch.tensor(lengths),
            "reduce": REDUCTIONS[reduction],
        }
        got, want = (run(m, *batch, **arguments) for m in (fused, oracle))
        assert_all_close(got, want)


@pytest.mark.parametrize("signal", SIGNALS)
def test_logits_are_those_of_the_nll(signal):
    fused, _ = make_pair(signal)
    (tokens, targets, hx), labels = make_batch(signal)
    out = fused(tokens, targets, hx, logits=True, **labels)
    assert out.logits.shape == (5, 3, V)
    want = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(out.nll.flatten(), want, rtol=1e-10, atol=1e-12)
    assert out.hx[0].shape == hx[0].shape


@pytest.mark.parametrize("predict", ["members", "mean_logits"])
def test_an_ensembles_loss_is_its_members_mean_and_its_nll_that_of_the_mean(predict):
    decoder = fr.EnsembleDecoder(H, V, 4, dataset_size=10, predict=predict, dtype=torch.float64)
    lm = fr.RecodingLanguageModel(
        V, E, H, signal=fr.signals.Ensemble(), decoder=decoder, step=0.3, dtype=torch.float64
    )
    (tokens, targets, _), _ = make_batch("ensemble", L=1)
    out = lm(tokens, targets)
    states, _ = lm.rnn(lm.encoder(tokens), targets=targets)
    flat = targets.flatten()
    members = decoder.member_log_probabilities(states).flatten(1, 2)  # [K, T*B, V]
    losses = torch.stack([F.nll_loss(m, flat) for m in members])
    torch.testing.assert_close(out.loss, losses.mean(), rtol=1e-12, atol=0)
    prediction = decoder(states).flatten(0, 1)
    nll = F.cross_entropy(prediction, flat, reduction="none").view_as(targets)
    torch.testing.assert_close(out.nll, nll, rtol=1e-11, atol=1e-13)


def test_an_ensemble_decodes_without_a_recoder_too():
    decoder = fr.EnsembleDecoder(H, V, 4, dataset_size=10, dtype=torch.float64)
    models = [
        cls(V, E, H, signal=None, decoder=copy.deepcopy(decoder), dtype=torch.float64)
        for cls in (fr.RecodingLanguageModel, fr.reference.RecodingLanguageModel)
    ]
    models[1].load_state_dict(models[0].state_dict())
    batch, _ = make_batch("ensemble", L=1)
    assert_all_close(*(run(m, *batch, reduce=REDUCTIONS["weighted"]) for m in models))


def test_anchors_are_saved_moved_and_pull():
    decoder = fr.EnsembleDecoder(3, 5, 2, prior_scale=0.5, data_noise=0.1, dataset_size=10)
    state = decoder.state_dict()
    assert set(state) == {"weight", "bias", "anchor_weight", "anchor_bias"}
    other = fr.EnsembleDecoder(3, 5, 2, dataset_size=10)
    other.load_state_dict(state)
    assert torch.equal(other.anchor_weight, decoder.anchor_weight)
    assert decoder.double().anchor_weight.dtype == torch.float64
    want = sum(
        0.1 / 0.5 / 10 * ((w - a).square().sum() + (b - c).square().sum())
        for w, a, b, c in zip(
            decoder.weight, decoder.anchor_weight, decoder.bias, decoder.anchor_bias, strict=True
        )
    )
    torch.testing.assert_close(decoder.anchor_loss(), want / 2)
    decoder.anchor_loss().backward()
    assert decoder.weight.grad.norm() > 0
    shared = fr.EnsembleDecoder(3, 5, 2, dataset_size=10, anchor="shared")
    assert shared.anchor_weight.shape == (1, 5, 3)
    assert torch.isfinite(shared.anchor_loss())
    spread = fr.EnsembleDecoder(50, 400, 3, prior_scale=0.29).weight.var()
    assert abs(spread - 0.29) < 0.01


def test_states_of_a_variational_rnn_belong_to_their_samples():
    """Two calls with the states carried on: sample k goes on from the states of sample k."""
    fused, oracle = make_pair("variational")
    (tokens, targets, _), _ = make_batch("variational")
    first, second = [], []
    for model in (fused, oracle):
        torch.manual_seed(0)
        first.append(model(tokens, targets))
        second.append(model(tokens, targets, first[-1].hx))
    torch.testing.assert_close(second[0].nll, second[1].nll, rtol=1e-10, atol=1e-12)
    K, B = 3, 3
    h = first[0].hx[0].view(2, K, B, H)
    assert not torch.equal(h[:, 0], h[:, 1])
    repeated = fused.rnn(
        fused.encoder(tokens), tuple(torch.zeros(2, B, H, dtype=torch.float64) for _ in range(2))
    )
    assert repeated[0].shape == (K, 5, B, H)


def test_variational_masks_are_held_over_the_sequence_and_drawn_anew_for_the_next():
    decoder = torch.nn.Linear(40, V)
    rnn = fr.FusedRecodingLSTM(
        E, 40, decoder=decoder, signal=fr.signals.Variational(2, 0.5), step=0.0
    )
    output, _ = rnn(torch.randn(6, 3, E))  # [K, T, B, H]
    dropped = output == 0
    assert (dropped == dropped[:, :1]).all()
    assert 0.3 < dropped.double().mean() < 0.7
    again, _ = rnn(torch.randn(6, 3, E))
    assert ((again == 0) != dropped).any()


@pytest.mark.parametrize(("signal", "step"), PAIRS)
def test_training_lowers_the_loss(signal, step):
    torch.manual_seed(0)
    text = torch.randint(V, (8,)).repeat(4)  # something to learn by heart
    kind, decoder = build(signal, 16, V, torch.float32)
    lm = fr.RecodingLanguageModel(
        V, 12, 16, 2, signal=kind, step=STEPS[step](),
        decoder=decoder if signal.startswith("ensemble") else None,
    )  # fmt: skip
    optimizer = torch.optim.Adam(lm.parameters(), 0.03)
    tokens, targets = text[:-1].view(-1, 1), text[1:].view(-1, 1)
    labels = {"labels": tokens % 2} if classifies(signal) else {}
    losses = []
    for _ in range(25):
        out = lm(tokens, targets, **labels)
        losses.append(out.loss.item())
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("signal", [s for s in SIGNALS if not s.startswith("custom")])
@pytest.mark.parametrize("step", ["predicted", "backtracking"])
def test_compiled_and_eager_agree(signal, step):
    torch._dynamo.reset()
    fused, _ = make_pair(signal, step)
    (tokens, targets, _), labels = make_batch(signal)
    # Inductor itself is tested with fewer variants; this is about fake kernels and autograd.
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    grads = []
    with torch._inductor.config.patch(fallback_random=True):
        for model in (fused, compiled):
            torch.manual_seed(0)
            loss = model(tokens, targets, **labels).loss
            fused.zero_grad()
            loss.backward()
            grads.append([p.grad.clone() for p in fused.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 0
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
