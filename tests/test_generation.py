"""Generation: the same as choosing from one call over the text so far, word after word."""

import pytest
import torch
from test_reader import READABLE, V, make_model
from variants import classifies

from fused_recoder.generation import Sampling

GENERATING = [name for name in READABLE if not classifies(name)]
PROMPT = torch.tensor([[1, 5], [7, 2], [3, 3]])  # [T, B]


def seeded(seed=11):
    return torch.Generator().manual_seed(seed)


def plainly(log_p, number, temperature=1.0, top_k=None, top_p=None):
    """A word from log probabilities [V], word by word through the ranking."""
    if temperature == 0:
        return int(log_p.argmax())
    p = (log_p.double() / temperature).softmax(0)
    ranking = sorted(range(V), key=lambda word: (-p[word].item(), word))[:top_k]
    kept, share = [], 0.0
    for word in ranking:
        kept.append(word)
        share += p[word].item()
        if top_p is not None and share >= top_p * sum(p[w].item() for w in ranking):
            break
    passed = 0.0
    for word in kept:
        passed += p[word].item()
        if number * sum(p[w].item() for w in kept) < passed:
            return word
    raise AssertionError("the shares of all words are one")


def loop(lm, prompt, length, **choice):
    """[length, B]: every word by a call of the model over all that came before it."""
    generator, rows = seeded(), prompt.shape[1]
    lm.rnn._draw_seed(torch.device("cpu"), generator)  # of the masks
    seeds = torch.randint(2**62, (rows,), generator=generator).tolist()
    numbers = [torch.rand(length, dtype=torch.float64, generator=seeded(s)) for s in seeds]
    text = prompt
    for t in range(length):
        gold = None
        if lm.rnn.signal is not None and lm.rnn.signal.needs_targets:
            gold = torch.cat([text[1:], torch.full((1, rows), -100)])
        with torch.no_grad():
            logits = lm(text, gold, logits=True, generator=seeded()).logits[-1]  # [B, V]
        log_p = logits.log_softmax(-1)
        words = [plainly(log_p[b], numbers[b][t].item(), **choice) for b in range(rows)]
        text = torch.cat([text, torch.tensor([words])])
    return text[len(prompt) :]


@pytest.mark.parametrize("signal", GENERATING)
def test_it_is_a_loop_of_calls_over_growing_prefixes(signal):
    lm = make_model(signal)
    lm.decoder.weight.data.mul_(20)  # opinions, so that states matter
    for choice in ({"temperature": 0}, {}, {"temperature": 2.0, "top_k": 6, "top_p": 0.8}):
        got = lm.generate(PROMPT, 7, generator=seeded(), **choice)
        assert torch.equal(got, loop(lm, PROMPT, 7, **choice))


def test_a_chosen_word_is_gold():
    """Recoded towards other words the model would go on differently."""
    lm = make_model("nll")
    lm.decoder.weight.data.mul_(20)
    words = lm.generate(PROMPT, 20, generator=seeded())
    lm.rnn.signal.target = "argmax"
    assert not torch.equal(words, lm.generate(PROMPT, 20, generator=seeded()))


@pytest.mark.parametrize("signal", GENERATING)
def test_a_row_depends_neither_on_the_rows_after_it_nor_on_the_length(signal):
    if signal == "variational":
        pytest.skip("the masks of its samples are laid out by the size of the batch")
    lm = make_model(signal)
    many = lm.generate(PROMPT[:, :1].expand(3, 4), 9, generator=seeded())
    alone = lm.generate(PROMPT[:, 0], 5, generator=seeded())
    assert torch.equal(many[:5, 0], alone)
    assert not torch.equal(many[:, 0], many[:, 1])  # equal prompts draw different words
    assert torch.equal(many, lm.generate(PROMPT[:, :1].expand(3, 4), 9, generator=seeded()))
    assert not torch.equal(many, lm.generate(PROMPT[:, :1].expand(3, 4), 9, generator=seeded(5)))


def test_greedy_is_the_same_for_equal_prompts():
    words = make_model("nll").generate(PROMPT[:, :1].expand(3, 4), 9, temperature=0)
    assert torch.equal(words, words[:, :1].expand(9, 4))


def test_torchs_own_seed_counts_without_a_generator():
    lm = make_model("mc-unit")
    torch.manual_seed(1)
    first = lm.generate(PROMPT, 9)
    torch.manual_seed(1)
    assert torch.equal(first, lm.generate(PROMPT, 9))


def test_rows_end_with_eos():
    lm = make_model("nll")
    lm.decoder.bias.data[4] += 1.5
    endless = lm.generate(PROMPT, 30, generator=seeded())
    ended = lm.generate(PROMPT, 30, generator=seeded(), eos=4)
    ends = (endless == 4).int().argmax(0).tolist()
    assert ends[0] != ends[1]
    assert len(ended) == max(ends) + 1
    for b, end in enumerate(ends):
        assert torch.equal(ended[: end + 1, b], endless[: end + 1, b])
        assert (ended[end:, b] == 4).all()


def test_layouts_and_states():
    lm = make_model("nll", batch_first=True)
    want = lm.generate(PROMPT.t(), 5, generator=seeded())  # [B, T]
    lm.rnn.batch_first = False
    assert torch.equal(lm.generate(PROMPT, 5, generator=seeded()).t(), want)
    assert lm.generate(PROMPT[:, 0], 5, generator=seeded()).shape == (5,)
    reader = lm.reader(2)
    reader.feed(PROMPT[0])
    reader.finish(PROMPT[1])
    later = lm.generate(PROMPT[1:], 5, hx=reader.hx, generator=seeded())
    assert torch.equal(later.t(), want)


def test_the_shares_of_words_are_their_probabilities():
    log_p = torch.log(torch.tensor([[0.1, 0.2, 0.4, 0.3]])).expand(4000, 4)
    numbers = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for sampling, want in {
        Sampling(): [400, 800, 1600, 1200],
        Sampling(temperature=0.5): [133, 533, 2134, 1200],
        Sampling(top_k=2): [0, 0, 2286, 1714],
        Sampling(top_p=0.7): [0, 0, 2286, 1714],
        Sampling(top_p=0.71): [0, 889, 1778, 1333],
        Sampling(top_k=2, top_p=0.5): [0, 0, 4000, 0],
        Sampling(top_k=99): [400, 800, 1600, 1200],
        Sampling(temperature=1e-300): [0, 0, 4000, 0],
    }.items():
        counts = sampling.choose(log_p, numbers).bincount(minlength=4)
        assert (counts - torch.tensor(want)).abs().max() <= 1, sampling


def test_the_ends_of_the_unit_interval_choose_words_that_are_allowed():
    log_p = torch.log(torch.tensor([[0.3, 0.3, 0.3, 0.1]]))
    almost_one = 1 - 2**-53
    for number, want in ((0.0, 0), (almost_one, 2)):
        chosen = Sampling(top_k=3).choose(log_p, torch.tensor([number], dtype=torch.float64))
        assert chosen.tolist() == [want]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "temperature must be finite, at least 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be a positive int, got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"length": 0}, "length must be a positive int, got 0"),
        ({"eos": V}, r"eos must be in \[0, 13\), got 13"),
        ({"prompt": torch.zeros(0, 2, dtype=torch.int64)}, "at least one token"),
        ({"prompt": [1, 2]}, r"prompt must be a tensor \[T\] or \[T, B\], got list"),
        ({"prompt": torch.tensor([V])}, r"tokens must be in \[0, 13\)"),
    ],
    ids=str,
)
def test_bad_input(arguments, message):
    arguments = {"prompt": PROMPT, "length": 3} | arguments
    with pytest.raises(ValueError, match=message):
        make_model("nll").generate(**arguments)


@pytest.mark.parametrize("signal", ["classifier", "classifiers"])
def test_classifiers_are_refused(signal):
    with pytest.raises(ValueError, match="needs a label for every word"):
        make_model(signal).generate(PROMPT, 3)


def test_what_has_no_reader_is_refused():
    with pytest.raises(NotImplementedError, match="Custom signal has no reader"):
        make_model("custom").generate(PROMPT, 3)
