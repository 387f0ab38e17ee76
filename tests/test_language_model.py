"""RecodingLanguageModel: loss, nll and every gradient against the oracle and the plain model."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import SIGNALS, STATES, assert_all_close
from torch import nn

import fused_recoder as fr

V, E, H = 13, 5, 7


def make_pair(dtype=torch.float64, **options):
    options = {"signal": "nll", "step": 0.5, "num_layers": 2} | options
    layers = options.pop("num_layers")
    fused = fr.RecodingLanguageModel(V, options.pop("size", E), H, layers, dtype=dtype, **options)
    oracle = fr.reference.RecodingLanguageModel(
        V, fused.encoder.embedding_dim, H, layers, dtype=dtype, **options
    )
    oracle.load_state_dict(fused.state_dict())
    return fused, oracle


def make_batch(T=5, B=3, L=2):
    tokens = torch.randint(V, (T + 1, B))
    targets = tokens[1:].clone()
    targets[1, 1] = -100
    hx = tuple(torch.randn(L, B, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return tokens[:-1], targets, hx


def run(model, tokens, targets, hx, reduce=lambda out: out.loss, **arguments):
    """Everything that a training step computes, by name."""
    torch.manual_seed(1)
    out = model(tokens, targets, hx, return_trace=True, **arguments)
    results = {"loss": out.loss, "nll": out.nll, "h_n": out.hx[0], "c_n": out.hx[1]}
    results |= out.trace._asdict()
    wanted = {"h_0": hx[0], "c_0": hx[1], **dict(model.named_parameters())}
    grads = torch.autograd.grad(reduce(out), list(wanted.values()), allow_unused=True)
    for (name, tensor), grad in zip(wanted.items(), grads, strict=True):
        results[f"grad {name}"] = torch.zeros_like(tensor) if grad is None else grad
    return {name: value.detach() for name, value in results.items()}


def weighted(out):
    """Any weights at the per-token nll, beside the loss and the states."""
    torch.manual_seed(3)
    weights = torch.randn(out.nll.shape, dtype=torch.float64).to(out.nll.device)
    return out.loss + (weights * out.nll).sum() + out.hx[0].sum() - out.hx[1].square().sum()


REDUCTIONS = {"loss": lambda out: out.loss, "sum": lambda out: out.nll.sum(), "weighted": weighted}


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("states", STATES, ids="".join)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("step", [0.7, "learned"])
def test_float64_agrees_with_the_oracle(signal, states, reduction, step):
    for layers, dropout, lengths, masked in itertools.product(
        (1, 2), (0.0, 0.3), (None, [5, 2, 1]), (False, True)
    ):
        fused, oracle = make_pair(
            signal=signal, states=states, step=step, num_layers=layers, dropout=dropout
        )
        tokens, targets, hx = make_batch(L=layers)
        arguments = {
            "lengths": None if lengths is None else torch.tensor(lengths),
            "recode_mask": torch.rand(tokens.shape) < 0.6 if masked else None,
            "reduce": REDUCTIONS[reduction],
        }
        got = run(fused, tokens, targets, hx, **arguments)
        assert_all_close(got, run(oracle, tokens, targets, hx, **arguments))


@pytest.mark.parametrize("target", ["gold", "argmax"])
def test_argmax_recoding_still_predicts_the_gold_token(target):
    fused, oracle = make_pair(signal=fr.signals.Surprisal(target=target))
    batch = make_batch()
    assert_all_close(run(fused, *batch), run(oracle, *batch))


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("V_large", [9001, 70_001])
def test_many_chunks_of_logits(signal, V_large):
    """Several updates of the decoder's gradient per sequence, the last of them partial."""
    torch.manual_seed(0)
    models = [
        cls(V_large, 3, 4, 1, signal=signal, step=0.5, dtype=torch.float64)
        for cls in (fr.RecodingLanguageModel, fr.reference.RecodingLanguageModel)
    ]
    models[1].load_state_dict(models[0].state_dict())
    T = 19 if V_large > 10_000 else 50
    tokens, targets = torch.randint(V_large, (2, T, 31))
    hx = tuple(torch.randn(1, 31, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert_all_close(*(run(m, tokens, targets, hx) for m in models))


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tied_weights(signal, reduction):
    fused, oracle = make_pair(signal=signal, size=H, tie_weights=True)
    assert fused.decoder.weight is fused.encoder.weight
    batch = make_batch()
    got, want = (run(m, *batch, reduce=REDUCTIONS[reduction]) for m in (fused, oracle))
    assert_all_close(got, want)


def test_without_recoding_it_is_the_plain_model():
    fused, _ = make_pair(signal=None)
    tokens, targets, hx = make_batch()
    lstm = nn.LSTM(E, H, 2, dtype=torch.float64)
    lstm.load_state_dict(fused.rnn.state_dict())
    output, states = lstm(fused.encoder(tokens), hx)
    logits = fused.decoder(output)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    out = fused(tokens, targets, hx, logits=True)
    torch.testing.assert_close(out.loss, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.logits, logits, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(out.hx, states, rtol=1e-12, atol=1e-14)
    got = torch.autograd.grad(out.loss, list(fused.decoder.parameters()))
    expected = torch.autograd.grad(want, list(fused.decoder.parameters()))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_logits_are_those_of_the_loss(signal):
    fused, _ = make_pair(signal=signal)
    tokens, targets, hx = make_batch()
    out = fused(tokens, targets, hx, logits=True)
    want = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(out.loss, want, rtol=1e-12, atol=0)


def test_state_dict_of_a_plain_word_language_model_loads():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Embedding(V, E), nn.Linear(H, V)
            self.rnn = nn.LSTM(E, H, 2)

    model = fr.RecodingLanguageModel(V, E, H, 2, signal="surprisal")
    model.load_state_dict(Plain().state_dict())
    assert set(model.state_dict()) == set(Plain().state_dict())


def test_dropout_is_applied_at_all_three_places():
    model = fr.RecodingLanguageModel(V, E, H, 2, dropout=0.3, output_dropout=0.4)
    assert (model.embedding_dropout, model.rnn.dropout, model.rnn.output_dropout) == (0.3, 0.3, 0.4)
    tokens, targets, _ = make_batch()
    losses = {model(tokens, targets).loss.item() for _ in range(5)}
    assert len(losses) == 5
    model.eval()
    assert len({model(tokens, targets).loss.item() for _ in range(5)}) == 1


def test_batch_first():
    fused, _ = make_pair()
    tokens, targets, hx = make_batch()
    lengths = torch.tensor([5, 2, 3])
    out = fused(tokens, targets, hx, lengths=lengths)
    fused.rnn.batch_first = True
    turned = fused(tokens.t(), targets.t(), hx, lengths=lengths)
    torch.testing.assert_close(turned.nll.t(), out.nll, rtol=0, atol=0)
    torch.testing.assert_close(turned.loss, out.loss, rtol=1e-14, atol=0)


def test_loss_is_the_mean_over_counted_tokens_and_zero_without_any():
    fused, _ = make_pair()
    tokens, targets, hx = make_batch()
    out = fused(tokens, targets, hx)
    torch.testing.assert_close(out.loss, out.nll[targets != -100].mean())
    nothing = fused(tokens, torch.full_like(targets, -100), hx)
    assert nothing.loss == 0
    nothing.loss.backward()
    assert all((p.grad == 0).all() for n, p in fused.named_parameters() if p.grad is not None)


def test_without_targets_there_is_no_loss():
    fused, oracle = make_pair(signal=fr.signals.NLL(target="argmax"))
    tokens, _, hx = make_batch()
    out, want = fused(tokens, hx=hx, logits=True), oracle(tokens, hx=hx, logits=True)
    assert out.loss is None
    assert out.nll is None
    torch.testing.assert_close(out.logits, want.logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("freeze", ["encoder", "rnn", "decoder"])
def test_frozen_parts_get_no_gradient_and_change_nothing_for_the_others(freeze):
    fused, oracle = make_pair(step="learned")
    tokens, targets, _ = make_batch()
    for model in (fused, oracle):
        getattr(model, freeze).requires_grad_(False)
        model(tokens, targets).loss.backward()
    for (name, p), q in zip(fused.named_parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-13)


def test_backward_twice_gives_the_same_gradient_twice():
    fused, _ = make_pair()
    tokens, targets, _ = make_batch()
    loss = fused(tokens, targets).loss
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in fused.parameters()]
    loss.backward()
    for p, g in zip(fused.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g, rtol=1e-12, atol=0)


@pytest.mark.parametrize("signal", SIGNALS)
def test_no_grad_evaluates_the_same(signal):
    fused, oracle = make_pair(signal=signal)
    batch = make_batch()
    want = fused(*batch)
    with torch.no_grad():
        got, reference = fused(*batch), oracle(*batch)
    torch.testing.assert_close(got.nll, want.nll.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(reference.nll, want.nll.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("reduction", ["loss", "weighted"])
def test_compiled_and_eager_agree(signal, reduction):
    torch._dynamo.reset()
    fused, _ = make_pair(signal=signal, step="learned")
    batch = make_batch()
    want = run(fused, *batch, reduce=REDUCTIONS[reduction])
    got = run(_Named(torch.compile(fused, fullgraph=True), fused), *batch,
              reduce=REDUCTIONS[reduction])  # fmt: skip
    assert_all_close(got, want, tolerance=1e-11)


class _Named:
    """A compiled module with the parameter names of the original."""

    def __init__(self, compiled, original):
        self.compiled, self.named_parameters = compiled, original.named_parameters

    def __call__(self, *args, **kwargs):
        return self.compiled(*args, **kwargs)


def test_no_tensor_of_all_logits_is_ever_allocated():
    """The largest allocation during a training step is far below T x B x V."""
    model = fr.RecodingLanguageModel(50_000, 4, 4, 1)
    tokens, targets = torch.randint(50_000, (2, 120, 8))
    with torch.profiler.profile(profile_memory=True) as profile:
        model(tokens, targets).loss.backward()
    largest = max(e.cpu_memory_usage for e in profile.events())
    assert largest < 120 * 8 * 50_000 * 4 / 3


@pytest.mark.parametrize("signal", ["nll", "surprisal"])
@pytest.mark.parametrize("B", [1, 2, 5, 20])
def test_words_that_a_bias_rules_out_count_nothing(signal, B):
    """Whole pieces of the vocabulary among them: an empty piece has no maximum."""
    words, allowed = 2000, 700
    models = [
        module.RecodingLanguageModel(words, 8, 8, 1, signal=signal, step=0.3, dtype=torch.float64)
        for module in (fr, fr.reference)
    ]
    with torch.no_grad():
        models[0].decoder.bias[allowed:] = -math.inf
    models[1].load_state_dict(models[0].state_dict())
    tokens, targets = torch.randint(allowed, (2, 4, B))
    hx = tuple(torch.randn(1, B, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert_all_close(*(run(model, tokens, targets, hx) for model in models))


def test_autocast_trains():
    model = fr.RecodingLanguageModel(V, E, H, 2)
    tokens, targets, _ = make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens, targets)
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    full = model(tokens, targets).loss
    assert abs(out.loss - full) < 0.02
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be a positive int"),
        ({"tie_weights": True}, ValueError, "tie_weights needs embedding_size == hidden_size"),
        ({"embedding_dropout": 1.0}, ValueError, "embedding_dropout must be in"),
        ({"dropout": -1.0}, ValueError, "dropout must be in"),
    ],
)
def test_bad_options(build, error, message):
    sizes = {"vocab_size": V, "embedding_size": E, "hidden_size": H}
    with pytest.raises(error, match=message):
        fr.RecodingLanguageModel(**(sizes | build))


def test_bad_tokens():
    model = fr.RecodingLanguageModel(V, E, H)
    with pytest.raises(TypeError, match=r"tokens must be an int64 tensor, got torch\.float32"):
        model(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"targets must have shape \(3, 2\)"):
        model(torch.zeros(3, 2).long(), torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match=r"targets must be in \[0, 13\)"):
        model(torch.zeros(3, 2).long(), torch.full((3, 2), 13))


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    text = torch.randint(V, (10,)).repeat(13)  # something to learn by heart
    for signal in SIGNALS:
        model = fr.RecodingLanguageModel(V, 16, 16, 1, signal=signal, step="learned")
        optimizer = torch.optim.Adam(model.parameters(), 0.03)
        tokens, targets = text[:-1].view(-1, 1), text[1:].view(-1, 1)
        first = None
        for _ in range(30):
            loss = model(tokens, targets).loss
            first = first or loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < first / 2, signal


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 20, 64, 65])
@pytest.mark.parametrize("hidden", [5, 40])
@pytest.mark.parametrize("signal", ["nll", "surprisal"])
def test_few_rows_are_decoded_in_one_pass_over_the_weight(rows, hidden, signal):
    """Blocks of words, chunks of blocks, tails of both; a target is ignored, logits far apart."""
    vocab, results = 1237, []
    for module in (fr, fr.reference):
        torch.manual_seed(0)
        model = module.RecodingLanguageModel(
            vocab, 3, hidden, 1, signal=signal, step=0.5, dtype=torch.float64
        )
        with torch.no_grad():
            model.decoder.weight.mul_(60)
        tokens, targets = torch.randint(vocab, (2, 3, rows))
        targets[1, 0] = -100
        out = model(tokens, targets, return_trace=True)
        out.loss.backward()
        results.append(
            {n: p.grad for n, p in model.named_parameters()}
            | {"nll": out.nll.detach(), "delta": out.trace.delta, "h": out.hx[0].detach()}
        )
    assert_all_close(*results)
