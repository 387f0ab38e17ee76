"""Word-by-word reading: the same as one call over the sentence, for every variant."""

import itertools

import pytest
import torch
from variants import SIGNALS, STEPS, build, classifies

import fused_recoder as fr

V, E, H = 13, 5, 7
READABLE = [s for s in SIGNALS if not s.startswith("custom")]


def make_model(signal, step="fixed", dtype=torch.float64, **options):
    torch.manual_seed(4)
    kind, decoder = build(signal, H, V, dtype)
    return fr.RecodingLanguageModel(
        V, E, H, 2, signal=kind, step=STEPS[step](), dtype=dtype,
        decoder=decoder if signal.startswith("ensemble") else None, **options
    ).eval()  # fmt: skip


def make_text(signal, T=6, B=1):
    tokens = torch.randint(V, (T + 1, B))
    labels = torch.randint(2, (T, B)) if classifies(signal) else None
    return tokens, labels


def read(reader, tokens, labels=None):
    """Log probabilities [T, B, V] of tokens[1:] given those before."""
    predictions = [
        reader.feed(x, None if labels is None else labels[t]) for t, x in enumerate(tokens[:-1])
    ]
    return torch.stack(predictions)


def assert_reads_like_one_call(lm, tokens, labels=None, hx=None, tolerance=1e-10):
    torch.manual_seed(3)
    reader = lm.reader(tokens.shape[1], hx)
    predictions = read(reader, tokens, labels)
    if lm.rnn.signal is not None and lm.rnn.signal.reads_target and reader._reader.pending():
        reader.finish(tokens[-1])
    torch.manual_seed(3)
    with torch.no_grad():
        extra = {} if labels is None else {"labels": labels}
        out = lm(tokens[:-1], tokens[1:], hx, logits=True, return_trace=True, **extra)
    want = torch.log_softmax(out.logits, -1)
    torch.testing.assert_close(predictions, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(reader.hx, out.hx, rtol=tolerance, atol=tolerance)
    if lm.rnn.signal is not None:
        delta = out.trace.delta[-1]
        torch.testing.assert_close(reader.delta, delta, rtol=tolerance, atol=tolerance)
    assert reader.time == len(tokens) - 1


@pytest.mark.parametrize("signal", READABLE)
@pytest.mark.parametrize("step", STEPS)
def test_reading_is_one_call_over_the_sentence(signal, step):
    for batch, options in itertools.product(
        (1, 2, 5), ({}, {"states": ("h",)}, {"gate": 2.3}, {"probability": (1.0, 0.5)})
    ):
        if signal == "classifiers" and "states" in options:
            continue
        lm = make_model(signal, step, **options)
        tokens, labels = make_text(signal, B=batch)
        rows = 3 * batch if signal == "variational" else batch
        hx = tuple(torch.randn(2, rows, H, dtype=torch.float64) for _ in range(2))
        assert_reads_like_one_call(lm, tokens, labels, hx)


@pytest.mark.parametrize("signal", READABLE)
@pytest.mark.parametrize("batch", [1, 3])
def test_float32(signal, batch):
    lm = make_model(signal, dtype=torch.float32)
    tokens, labels = make_text(signal, B=batch)
    assert_reads_like_one_call(lm, tokens, labels, tolerance=3e-5)


def test_streamed_gold_signals_give_the_same_bits():
    """One row: the same pass over W, with the gold token now or later."""
    for dtype in (torch.float32, torch.float64):
        lm = make_model("nll", dtype=dtype)
        tokens, _ = make_text("nll", T=10)
        reader = lm.reader()
        read(reader, tokens)
        reader.finish(tokens[-1])
        with torch.no_grad():
            out = lm(tokens[:-1], tokens[1:])
        for got, want in zip(reader.hx, out.hx, strict=True):
            torch.testing.assert_close(
                got, want, rtol=1e-6 if dtype.itemsize == 4 else 1e-14, atol=0
            )


@pytest.mark.parametrize("signal", ["nll", "entropy", "mc-shared", "none"])
def test_a_changed_parameter_is_noticed(signal):
    lm = make_model(signal)
    reader = lm.reader()
    first = reader.feed(3)
    if signal == "nll":
        reader.finish(4)
    with torch.no_grad():
        lm.decoder.weight.mul_(2)
    second = reader.feed(4)
    fresh = lm.reader(hx=None)
    assert not torch.equal(first, fresh.feed(3))
    assert second.shape == (1, V)
    assert reader.time == 2
    # Reading on gives what a reader of the changed model gives from the same states.
    again = lm.reader(hx=tuple(s.clone() for s in reader.hx))
    if signal in ("none", "entropy"):
        torch.testing.assert_close(reader.feed(5), again.feed(5), rtol=1e-12, atol=1e-13)


def test_an_optimizer_step_is_noticed():
    lm = make_model("none")
    optimizer = torch.optim.SGD(lm.parameters(), 0.5)
    reader = lm.reader()
    before = reader.feed(1)
    lm(torch.tensor([[1]]), torch.tensor([[2]])).loss.backward()
    optimizer.step()
    reader.reset()
    assert not torch.equal(before, reader.feed(1))


def test_a_parameter_that_changes_while_a_step_is_open_is_an_error():
    lm = make_model("nll")
    reader = lm.reader()
    reader.feed(3)
    with torch.no_grad():
        lm.decoder.weight.mul_(2)
    with pytest.raises(RuntimeError, match="waits for its gold token"):
        reader.feed(4)
    reader.reset()
    reader.feed(4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("step", STEPS)
def test_an_open_step_is_finished_with_the_weights_that_predicted_it(step, batch):
    lm = make_model("nll", step, gate=0.1)
    reader, untouched = lm.reader(batch), lm.reader(batch)
    for each in (reader, untouched):
        each.feed(torch.arange(batch))
    untouched.finish(torch.arange(batch) + 4)
    states = untouched.hx
    with torch.no_grad():
        for tensor in (*lm.parameters(), *lm.rnn.buffers()):
            tensor.mul_(1.5).add_(0.2)
    reader.finish(torch.arange(batch) + 4)
    torch.testing.assert_close(reader.hx, states, rtol=0, atol=0)
    torch.testing.assert_close(reader.delta, untouched.delta, rtol=0, atol=0)
    # And it reads on with the new ones.
    fresh = lm.reader(batch, states)
    following = torch.arange(batch) + 4
    torch.testing.assert_close(reader.feed(following), fresh.feed(following), rtol=0, atol=0)


@pytest.mark.parametrize("signal", ["nll", "entropy", "mc-unit"])
def test_the_mode_of_a_reader_is_that_of_its_making(signal):
    """`lm.train()` asks for masks that a reader has no seed for."""
    lm = make_model(signal, probability=0.5, embedding_dropout=0.1, dropout=0.2)
    readers = [lm.reader(2, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    want, got = [], []
    for t in (1, 2, 3):
        want.append(readers[0].feed(torch.tensor([t, t + 1])))
    for t in (1, 2, 3):
        got.append(readers[1].feed(torch.tensor([t, t + 1])))
        lm.train()
        if not readers[1]._reader.pending():
            with torch.no_grad():
                lm.decoder.bias.add_(1.0)  # packs anew, and changes no probability
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"call lm\.eval\(\) first"):
        readers[1].reset()


def test_reset_starts_anew_and_ignored_gold_leaves_the_state_alone():
    lm = make_model("nll")
    reader = lm.reader(2)
    tokens = torch.tensor([1, 2])
    first = reader.feed(tokens)
    reader.feed(tokens)
    reader.reset()
    torch.testing.assert_close(reader.feed(tokens), first, rtol=0, atol=0)
    before = reader.hx
    reader.finish(torch.tensor([-100, 3]))
    after = reader.hx
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, 0], b[:, 0])
        assert not torch.equal(a[:, 1], b[:, 1])


def test_one_shot_masks_come_from_a_generator_too():
    lm = make_model("mc-unit")
    readers = [lm.reader(generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    results = [[r.feed(t) for t in (1, 2, 3)][-1] for r in readers]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_tied_weights_and_another_layout_of_calls_do_not_matter():
    lm = fr.RecodingLanguageModel(
        V, H, H, 1, tie_weights=True, batch_first=True, dtype=torch.float64
    ).eval()
    tokens = torch.randint(V, (7,))
    reader = lm.reader()
    got = torch.cat([reader.feed(int(t)) for t in tokens[:-1]])
    with torch.no_grad():
        out = lm(tokens[:-1].unsqueeze(0), tokens[1:].unsqueeze(0), logits=True)
    torch.testing.assert_close(got, torch.log_softmax(out.logits[0], -1), rtol=1e-10, atol=1e-11)


def test_columns_of_a_text_and_expanded_words_can_be_fed():
    lm = make_model("nll")
    text = torch.tensor([[1, 5, 2], [7, 2, 2]])  # [B, T]: a column has a stride
    for columns in (text.t(), text[:1].t().expand(3, 2)):
        reader, contiguous = lm.reader(2), lm.reader(2)
        for column in columns:
            torch.testing.assert_close(reader.feed(column), contiguous.feed(column.clone()))


def test_bad_input():
    lm = make_model("nll")
    with pytest.raises(ValueError, match="batch_size must be a positive int, got 0"):
        lm.reader(0)
    with pytest.raises(ValueError, match=r"h_0 must have shape \(2, 1, 7\)"):
        lm.reader(1, (torch.zeros(2, 3, H), torch.zeros(2, 3, H)))
    reader = lm.reader(2)
    with pytest.raises(ValueError, match="no step to finish"):
        reader.finish(torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"tokens must have shape \[B\] = \[2\], got \[3\]"):
        reader.feed(torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match="tokens must be int64"):
        reader.feed(torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 13\)"):
        reader.feed(torch.tensor([1, 13]))
    with pytest.raises(ValueError, match="tokens must not be ignored"):
        reader.feed(torch.tensor([1, -100]))
    with pytest.raises(RuntimeError, match=r"call lm\.eval\(\) first"):
        fr.RecodingLanguageModel(V, E, H, dropout=0.1).reader()
    with pytest.raises(NotImplementedError, match="Custom signal has no reader"):
        make_model("custom").reader()
    with pytest.raises(ValueError, match="labels must be given"):
        make_model("classifier").reader().feed(1)
