"""Dropout that is held for a whole sequence: of states, of weights, of words."""

import pytest
import torch
from conftest import assert_all_close, make_inputs, make_pair, run_with_gradients
from torch.nn.utils.rnn import pack_padded_sequence

import fused_recoder as fr

HELD = {"dropout": 0.3, "output_dropout": 0.4, "dropout_kind": "sequence", "weight_dropout": 0.2}


@pytest.mark.parametrize("gradient", ["detached", "exact"])
@pytest.mark.parametrize("signal", [None, "nll", "entropy", "mc_dropout"])
def test_float64_agrees_with_the_oracle(signal, gradient):
    fused, oracle, _ = make_pair(layers=3, signal=signal, step="learned", gradient=gradient, **HELD)
    x, hx, y = make_inputs(fused)
    for lengths in (None, torch.tensor([4, 2, 1])):
        got, want = (
            run_with_gradients(rnn, x, hx, targets=y, lengths=lengths) for rnn in (fused, oracle)
        )
        assert_all_close(got, want)


def zeros_over_time(output):
    return (output == 0).all(0), (output == 0).any(0)  # [B, H]


def test_a_mask_is_held_for_a_call_and_drawn_anew_for_the_next():
    rnn, _, _ = make_pair(layers=1, signal="nll", output_dropout=0.5, dropout_kind="sequence")
    x, hx, y = make_inputs(rnn, T=6)
    calls = [rnn(x, hx, targets=y)[0] for _ in range(2)]
    for output in calls:
        always, ever = zeros_over_time(output)
        assert torch.equal(always, ever)
        assert 0 < always.double().mean() < 1
    assert not torch.equal(calls[0] == 0, calls[1] == 0)
    always, ever = zeros_over_time(make_pair(layers=1, output_dropout=0.5)[0](x, hx, targets=y)[0])
    assert not torch.equal(always, ever)


def test_packed_and_padded_batches_have_the_same_masks():
    rnn, _, _ = make_pair(signal="nll", **HELD)
    x, hx, y = make_inputs(rnn)
    lengths = torch.tensor([4, 3, 1])
    torch.manual_seed(3)
    padded, _ = rnn(x, hx, targets=y, lengths=lengths)
    torch.manual_seed(3)
    packed, _ = rnn(pack_padded_sequence(x, lengths), hx, targets=pack_padded_sequence(y, lengths))
    torch.testing.assert_close(packed.data, pack_padded_sequence(padded, lengths).data)


@pytest.mark.parametrize("batch_first", [False, True])
def test_words_and_embeddings_are_dropped_as_wholes(batch_first):
    lm = fr.RecodingLanguageModel(
        9, 40, 7, signal=None, embedding_dropout=0.5, word_dropout=0.5, dropout_kind="sequence",
        batch_first=batch_first,
    )  # fmt: skip
    tokens = torch.randint(9, (30, 5))
    x = lm._embed(tokens if not batch_first else tokens.t())
    x = x.transpose(0, 1) if batch_first else x
    dropped_words = {int(w) for w in tokens.unique() if (x[tokens == w] == 0).all()}
    assert 0 < len(dropped_words) < 9
    kept = x[~torch.isin(tokens, torch.tensor(sorted(dropped_words)))]
    assert (kept != 0).any(1).all()
    known = lm.encoder(tokens)
    factors = torch.unique((x / known)[(x != 0)].round(decimals=3))
    assert factors.tolist() == [4.0]
    of_instances = (x == 0) | torch.isin(tokens, torch.tensor(sorted(dropped_words))).unsqueeze(2)
    live = ~torch.isin(tokens, torch.tensor(sorted(dropped_words)))
    for b in range(5):
        of_instance = of_instances[live[:, b], b]
        assert torch.equal(of_instance.all(0), of_instance.any(0))
    assert torch.equal(lm.eval()._embed(tokens), lm.encoder(tokens))


def test_without_training_nothing_is_dropped():
    rnn, _, _ = make_pair(signal="nll", **HELD)
    x, hx, y = make_inputs(rnn)
    rnn.eval()
    assert torch.equal(rnn(x, hx, targets=y)[0], rnn(x, hx, targets=y)[0])
    assert not rnn.drops
    lm = fr.RecodingLanguageModel(9, 5, 7, signal="nll", word_dropout=0.1)
    with pytest.raises(RuntimeError, match="a reader reads without dropout"):
        lm.reader()
    lm.eval().reader()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dropout_kind": "word"}, "dropout_kind must be 'step' or 'sequence', got 'word'"),
        ({"weight_dropout": 1.0}, r"weight_dropout must be in \[0, 1\), got 1"),
        ({"word_dropout": -0.1}, r"word_dropout must be in \[0, 1\), got -0.1"),
    ],
)
def test_bad_options_are_named(option, message):
    with pytest.raises(ValueError, match=message):
        fr.RecodingLanguageModel(9, 5, 7, **option)


def test_compiled_and_eager_agree():
    rnn, _, _ = make_pair(signal="nll", step=fr.steps.Learned(0.5, per="unit"), **HELD)
    x, hx, y = make_inputs(rnn)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    want = rnn(x, hx, targets=y)[0]
    torch.manual_seed(4)
    got = compiled(x, hx, targets=y)[0]
    torch.testing.assert_close(got, want)
