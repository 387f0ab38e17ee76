"""Reading times: what is measured of a word, and effects that are planted are found, others not."""

import copy
import csv
import dataclasses
import functools
import itertools
import math
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_text import TINY, write_text
from torch.nn import functional as F

import fused_recoder as fr
from fused_recoder.analysis import reading_times
from fused_recoder.analysis.predictors import Coverage, Frequencies, make_predictors
from fused_recoder.analysis.reading_times import compare
from fused_recoder.analysis.regression import bootstrap, held_out_log_likelihood
from fused_recoder.analysis.sentences import NATS_PER_BIT, read, tokenize
from fused_recoder.analysis.stories import Stories, read_stories
from fused_recoder.analysis.word_measures import measure
from fused_recoder.cli import main
from fused_recoder.training import Config, Corpus, Trainer, Vocabulary, build_model, load_model

DATA = Path(os.environ.get("FUSED_RECODER_DATA", "/nowhere"))
STEP = 0.5
VOCABULARY = Vocabulary(["<eos>", "<unk>", "the", "old", "man", "boats", "it", "'s", ",", "@-@"])


def made_words(stories: int, length: int) -> list[list[str]]:
    """As `tiny_text` makes them: what comes next depends on the word."""
    draw, found = random.Random(5), []
    for _ in range(stories):
        word, words = draw.randrange(20), []
        for _ in range(length):
            words.append(f"w{word}")
            word = (2 * word + draw.randint(1, 3)) % 20 if draw.random() < 0.9 else 7
        found.append(words)
    return found


WORDS = made_words(stories=6, length=110)


def write_stories(path: Path, stories: list[list[str]], times) -> Path:
    """Times are those of all words one after the other; none: not a number."""
    rows = [(s, p, word) for s, words in enumerate(stories, 1) for p, word in enumerate(words, 1)]
    with open(path, "w") as file:
        file.write("story\tposition\tword\tgeometric_mean_rt\n")
        for (*row, word), time in zip(rows, times, strict=True):
            text = "" if math.isnan(time) else f"{time:.4f}"
            file.write("\t".join([*map(str, row), word, text]) + "\n")
    return path


def some_stories(tmp_path: Path, *stories: str, times=None) -> Stories:
    words = [story.split() for story in stories]
    times = times or [300.0] * sum(map(len, words))
    return read_stories(write_stories(tmp_path / "some.tsv", words, times), "geometric_mean_rt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A plain and a recoding model, and the text they were trained on."""
    folder = tmp_path_factory.mktemp("reading")
    text = write_text(folder / "text", train=500)
    settings = TINY | {"optimizer": "adam", "lr": 0.02}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_RECODER_CACHE", str(folder / "cache"))
        for name, recoder in {
            "plain": {"signal": None},
            "nll": {"signal": "nll", "step": STEP},
        }.items():
            Trainer(Config(**settings | recoder), text, folder / name).train()
    return folder


def by_hand(lm, ids: list[int], step: float) -> dict[str, np.ndarray]:
    """Token by token with autograd, from the <eos> that is the first of `ids`."""
    lm = copy.deepcopy(lm).double()
    rnn, rows = lm.rnn, []
    h = c = [torch.zeros(rnn.hidden_size).double() for _ in range(rnn.num_layers)]
    for before, token in itertools.pairwise(ids):
        below, new_h, new_c = lm.encoder.weight[before], [], []
        for l in range(rnn.num_layers):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            w_ih, w_hh, b_ih, b_hh = (getattr(rnn, f"{name}_l{l}") for name in names)
            i, f, g, o = (w_ih @ below + b_ih + w_hh @ h[l] + b_hh).chunk(4)
            new_c.append(f.sigmoid() * c[l] + i.sigmoid() * g.tanh())
            new_h.append(o.sigmoid() * new_c[l].tanh())
            below = new_h[l]
        nll = F.cross_entropy(lm.decoder(new_h[-1]), torch.tensor(token))
        grads = torch.autograd.grad(nll, new_h + new_c)
        h, c = (
            [(s - step * g).detach() for s, g in zip(states, of_states, strict=True)]
            for states, of_states in ((new_h, grads[: len(h)]), (new_c, grads[len(h) :]))
        )
        after = F.cross_entropy(lm.decoder(h[-1]), torch.tensor(token))
        row = {"surprisal": nll.item() / NATS_PER_BIT, "correction": (nll - after).item()}
        for number, grad in enumerate(grads):
            name = f"gradient_{'hc'[number // rnn.num_layers]}{number % rnn.num_layers}"
            row[name] = grad.norm().item()
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture(scope="module")
def truth(runs):
    """Of WORDS in the recoding model: numbers of all words one after the other."""
    loaded = load_model(runs / "nll")
    by_story = [
        by_hand(loaded.model, loaded.vocabulary.encode(["<eos>", *words]), STEP) for words in WORDS
    ]
    return {name: np.concatenate([found[name] for found in by_story]) for name in by_story[0]}


@pytest.fixture(scope="module")
def measured(runs, tmp_path_factory):
    """WORDS without times, and their predictors in the recoding model."""
    path = write_stories(tmp_path_factory.mktemp("words") / "a.tsv", WORDS, [math.nan] * 660)
    stories, loaded = read_stories(path, "geometric_mean_rt"), load_model(runs / "nll")
    found = measure(loaded.model, loaded.vocabulary, stories, eos="story")
    return stories, make_predictors(stories, np.zeros(len(stories)), found)


# What is measured of a word


def test_measures_are_those_of_autograd(measured, truth):
    _, predictors = measured
    found = predictors.columns
    for name, numbers in truth.items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-9, atol=1e-12, err_msg=name)
    assert (found["pieces"] == 1).all()
    assert all((found[f"step_{state}{l}"] == STEP).all() for state in "hc" for l in (0, 1))


def test_the_gradient_of_a_plain_model_is_measured_and_changes_nothing(runs, tmp_path):
    loaded = load_model(runs / "plain")
    stories = some_stories(tmp_path, "w1 w3 w8 w17", "w2 w6")
    found = measure(loaded.model, loaded.vocabulary, stories, eos="story").values
    ids = [loaded.vocabulary.encode(["<eos>", *s.split()]) for s in ("w1 w3 w8 w17", "w2 w6")]
    hand = [by_hand(loaded.model, row, step=0.0) for row in ids]
    for name in hand[0]:
        numbers = np.concatenate([of_story[name] for of_story in hand])
        np.testing.assert_allclose(found[name], numbers, rtol=1e-9, atol=1e-12, err_msg=name)
    assert (found["correction"] == 0).all()


def test_of_error_feedback_the_surprisal_is_measured(tmp_path):
    config = Config(hidden_size=5, signal=None, architecture="error-feedback", dtype="float64")
    lm = build_model(config, len(VOCABULARY)).eval()
    with torch.no_grad():
        lm.rnn.feedback.weight.normal_()
    stories = some_stories(tmp_path, "the old man", "it 's old the boats")
    found = measure(lm, VOCABULARY, stories, eos="story").values
    words = ["<eos>", "it", "'s", "old", "the", "boats"]
    ids = torch.tensor([VOCABULARY.encode(words)]).t()  # [T + 1, 1]
    alone = lm(ids[:-1], ids[1:]).nll[:, 0].detach() / NATS_PER_BIT
    np.testing.assert_allclose(found["surprisal"][3:], alone, rtol=1e-10)
    assert found.keys() == {"pieces", "surprisal"}


def untrained(signal="nll", **options):
    torch.manual_seed(3)
    return fr.RecodingLanguageModel(
        len(VOCABULARY), 5, 5, signal=signal, step=0.3, **options
    ).eval()  # fmt: skip


@pytest.mark.parametrize("signal", ["nll", "entropy", "surprisal"])
def test_a_story_is_read_as_analyze_reads_it(signal, tmp_path):
    """Over the borders of windows, stories of different lengths side by side."""
    lm, stories = untrained(signal), ["the old man the boats " * 15, "it 's old , man"]
    found = measure(lm, VOCABULARY, some_stories(tmp_path, *stories), eos="story")
    readings = read(lm, VOCABULARY, [tokenize(story, VOCABULARY) for story in stories])
    for name in ("surprisal", "correction"):
        expected = [
            value
            for reading in readings
            for value in (
                reading.surprisal
                if name == "surprisal"
                else np.subtract(reading.delta, reading.delta_after)
            )
        ]
        np.testing.assert_allclose(found.values[name], expected, rtol=1e-9, atol=1e-13)


def test_pieces_of_a_word_are_summed(tmp_path):
    lm = untrained()
    together = measure(lm, VOCABULARY, some_stories(tmp_path, "the old-man, it's"), eos="story")
    apart = measure(lm, VOCABULARY, some_stories(tmp_path, "the old @-@ man , it 's"), eos="story")
    assert [[t.text for t in of_word] for of_word in together.pieces] == [
        ["the"], ["old", "@-@", "man", ","], ["it", "'s"],
    ]  # fmt: skip
    assert together.values["pieces"].tolist() == [1, 4, 2]
    for name in ("surprisal", "gradient_h0", "gradient_c0", "correction"):
        numbers = apart.values[name]
        sums = [numbers[0], numbers[1:5].sum(), numbers[5:].sum()]
        np.testing.assert_allclose(together.values[name], sums, rtol=1e-12)
    np.testing.assert_allclose(together.values["step_h0"], 0.3, rtol=1e-6)  # not 4 or 2 of them


def test_sentences_end_with_eos_where_they_are_said_to(tmp_path):
    lm = untrained()
    stories = some_stories(tmp_path, "it 's old. The man")
    whole = measure(lm, VOCABULARY, stories, eos="story").values["surprisal"]
    parted = measure(lm, VOCABULARY, stories, eos="sentence").values["surprisal"]
    ids = VOCABULARY.encode(["<eos>", "it", "'s", "old", "<eos>", "the", "man"])
    hand = by_hand(lm, ids, step=0.3)["surprisal"][[0, 1, 2, 4, 5]]  # <eos> is part of no word
    np.testing.assert_allclose(parted, hand, rtol=1e-6)  # the step is a float32
    np.testing.assert_allclose(whole[:3], parted[:3], rtol=1e-12)
    assert (whole[3:] != parted[3:]).all()


# Stories


def test_sentences_begin_after_marks_that_end_them(tmp_path):
    story = "Mr. Boar said: 'Who is there?' he cried. 'It is (old).' The end! 'no way' Dr. Who?"
    stories = some_stories(tmp_path, story, "one two")
    first = [w for w, s in zip(stories.words, stories.sentence_starts(), strict=True) if s]
    assert first == ["Mr.", "'It", "The", "one"]
    assert stories.sentence_position()[-8:].tolist() == [1, 2, 3, 4, 5, 6, 1, 2]


def test_words_before_are_those_of_the_same_story(tmp_path):
    stories = some_stories(tmp_path, "a b c", "d e")
    np.testing.assert_equal(
        stories.previous(np.arange(5.0), 2), [math.nan, math.nan, 0, math.nan, math.nan]
    )


GOOD = "story\tposition\tword\tgeometric_mean_rt"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["story\tword"], "line 1: no column 'position', 'geometric_mean_rt'"),
        ([""], "line 1: no column 'story'"),
        ([GOOD], "holds no words"),
        ([GOOD, "1\t1\tit\t300", "1\t2\told"], "line 3: 4 fields expected, as in line 1, got 3"),
        ([GOOD, "1\tone\tit\t300"], "line 2: position must be a whole number, got 'one'"),
        ([GOOD, "1\t1\tit\t300", "1\t3\told\t300"], "line 3: position must be 2"),
        ([GOOD, "1\t1\tit\t300", "2\t1\tit\t", "1\t2\told\t3"], "line 4: story '1' goes on"),
        ([GOOD, "1\t1\tit is\t300"], "line 2: word must be one word, got 'it is'"),
        ([GOOD, "1\t1\t\t300"], "line 2: word must be one word, got ''"),
        ([GOOD, "1\t1\tit\tfast"], "line 2: geometric_mean_rt must be a positive number of ms"),
        ([GOOD, "1\t1\tit\t0"], "got '0'"),
        ([GOOD, "1\t1\tit\tnan"], "got 'nan'"),
    ],
)
def test_errors_of_the_table_are_named_with_file_and_line(tmp_path, lines, message):
    path = tmp_path / "times.tsv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"times\.tsv") as error:
        read_stories(path, "geometric_mean_rt")
    assert message in str(error.value)


def test_columns_may_come_in_any_order_and_times_be_absent(tmp_path):
    path = tmp_path / "times.tsv"
    path.write_text("word\trt\tage\tposition\tstory\nit\tNA\t1\t7\tx\nis\t301.5\t2\t8\tx\n")
    stories = read_stories(path, "rt")
    assert (stories.names, stories.words) == (["x"], ["it", "is"])
    np.testing.assert_equal(stories.time, [math.nan, 301.5])


# Words that count


def test_unknown_words_do_not_count_nor_those_just_after_them(tmp_path):
    story = "the old man the zebra the old man the"
    stories = some_stories(tmp_path, story, "it it it", times=[*[300.0] * 8, math.nan, *[9.0] * 3])
    found = measure(untrained(), VOCABULARY, stories, eos="story")
    unknown = [i for i, known in enumerate(found.known) if not known]
    assert unknown == [4]
    assert all(np.isnan(values[4]) for values in found.values.values())
    coverage = Coverage.of(stories, found.known)
    assert np.flatnonzero(coverage.used).tolist() == [2, 3, 7, 11]
    assert str(coverage) == (
        "12 words, 11 with a reading time; left out of these: 4 without two words before them, 1 "
        "unknown, 2 after an unknown one; 4 used"
    )
    predictors = make_predictors(stories, np.zeros(12), found)
    finite = np.isfinite(np.stack(list(predictors.columns.values()))).all(0)
    assert np.flatnonzero(finite).tolist() == [2, 3, 7, 8, 11]  # one of them has no time


def test_frequencies_are_those_of_the_rarest_piece(tmp_path):
    (tmp_path / "train.txt").write_text("The the man 's 's 's , old\n")
    words = [tokenize(word, VOCABULARY) for word in ("the", "THE", "it's", "man's", "old,", ",")]
    logs = Frequencies.of_text(tmp_path).log([*words, []])
    assert np.exp(logs[:-1]) * 9 == pytest.approx([3, 3, 1, 2, 2, 2])  # 8 words and <eos>
    assert math.isnan(logs[-1])


# Regression


def test_held_out_log_likelihood_is_that_of_the_normal_equations():
    rng = np.random.default_rng(0)
    x, story = rng.normal(size=(60, 3)), np.repeat([0, 1, 2], 20)
    y = x @ [1, 0.5, 0] + 5 + rng.normal(size=60)
    found = held_out_log_likelihood(x * [1, 1000, 0.001] + 7, y, story)
    design = np.column_stack([np.ones(60), x])
    for s in range(3):
        train, test = story != s, story == s
        beta = np.linalg.solve(design[train].T @ design[train], design[train].T @ y[train])
        variance = ((y[train] - design[train] @ beta) ** 2).sum() / (40 - 4)
        expected = stats.norm.logpdf(y[test], design[test] @ beta, math.sqrt(variance))
        np.testing.assert_allclose(found[test], expected, rtol=1e-9)


def test_predictors_that_add_nothing_change_nothing():
    """Constants, and copies of others."""
    rng = np.random.default_rng(0)
    x, y, story = rng.normal(size=(60, 2)), rng.normal(size=60), np.repeat([0, 1, 2], 20)
    more = np.column_stack([x, np.full(60, 0.3), x[:, 0] - 2 * x[:, 1]])
    np.testing.assert_allclose(
        held_out_log_likelihood(more, y, story), held_out_log_likelihood(x, y, story), rtol=1e-9
    )


@pytest.mark.parametrize(
    ("y", "story", "message"),
    [
        (range(6), [0] * 6, "at least two stories"),
        ([1.0] * 6, [0, 0, 0, 1, 1, 1], "too few words, or too simple"),
        (range(4), [0, 0, 1, 1], "too few words"),
    ],
)
def test_what_cannot_be_judged_is_refused(y, story, message):
    x = np.arange(len(y), dtype=float)[:, None]
    with pytest.raises(ValueError, match=message):
        held_out_log_likelihood(x, np.array(y, float), np.array(story))


def test_the_bootstrap_knows_words_and_stories():
    rng = np.random.default_rng(0)
    story = np.repeat(np.arange(40), 50)
    noise, of_story = rng.normal(size=2000), rng.normal(size=40)[story]
    values = np.column_stack([np.full(2000, 3.0), noise, of_story, 2 * of_story])
    constant, words, stories, twice = bootstrap(values, story, 1000, rng)
    assert (constant.low, constant.high) == pytest.approx((3, 3))
    # Words vary by 1 / sqrt(2000) around their stories' means, which do so by as much.
    assert (words.high - words.low) / 2 == pytest.approx(1.96 * math.sqrt(2 / 2000), rel=0.15)
    assert (stories.high - stories.low) / 2 == pytest.approx(1.96 / math.sqrt(40), rel=0.25)
    assert twice.low == pytest.approx(2 * stories.low)  # the same draws for all
    assert stories.mean == pytest.approx(of_story.mean())


def test_noise_is_not_found():
    """60 times: of 95 % intervals some two would be above 0 if nothing were held out."""
    rng, story, found = np.random.default_rng(1), np.repeat(np.arange(6), 60), 0
    for _ in range(60):
        x, y = rng.normal(size=(360, 4)), rng.normal(size=360)
        gain = held_out_log_likelihood(x, y, story) - held_out_log_likelihood(x[:, :1], y, story)
        found += bootstrap(gain[:, None], story, 200, rng)[0].above_zero
    assert found <= 2


# The command


def reading(runs: Path, out: Path, *arguments, models=("plain", "nll")) -> int:
    with pytest.raises(SystemExit) as end:
        main(
            ["reading-times", *(str(runs / m) for m in models), "--out", str(out), "--threads=1",
             "--samples=300", "--eos=story", *map(str, arguments)]
        )  # fmt: skip
    return end.value.code


def planted(truth, *, surprisal=0.0, square=0.0, gradient=0.0) -> np.ndarray:
    """Reading times [N] with these effects, half of them again one word later, and noise."""
    effect = surprisal * truth["surprisal"] + square * (truth["surprisal"] - 3) ** 2
    effect = effect + gradient * truth["gradient_h1"]
    of_stories = effect.reshape(len(WORDS), -1)
    later = np.pad(of_stories, ((0, 0), (1, 0)))[:, :-1].ravel()
    noise = np.random.default_rng(2).normal(size=len(effect), scale=0.1)
    return np.exp(5.7 + effect + later / 2 + noise)


def gains(out: Path) -> dict[tuple[str, str, str], str]:
    """Whether an interval is above 0, by model, predictors and what they are beyond."""
    rows = [
        line.strip("| ").split(" | ")
        for line in (out / "reading-times.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    return {(r[0], r[2], r[3]): r[6] for r in rows[1:]}


SURPRISAL = ("surprisal", "base")
GRADIENT = ("gradient", "base", "surprisal")
GIVEN_SQUARE = ("gradient", "base", "surprisal", "surprisal²")


@pytest.mark.parametrize(
    ("effects", "found", "not_found"),
    [
        ({"surprisal": 0.03, "gradient": 0.2}, [SURPRISAL, GRADIENT, GIVEN_SQUARE], []),
        ({"surprisal": 0.03}, [SURPRISAL], [GRADIENT, GIVEN_SQUARE]),
        ({"square": 0.02}, [SURPRISAL], [GIVEN_SQUARE]),
        ({}, [], [SURPRISAL, GRADIENT, GIVEN_SQUARE]),
    ],
    ids=["gradient", "surprisal alone", "curved surprisal", "nothing"],
)
def test_what_is_planted_is_found_and_nothing_else(measured, truth, effects, found, not_found):
    stories, predictors = measured
    stories = dataclasses.replace(stories, time=planted(truth, **effects))
    used = ~np.isnan(stories.previous(stories.time, 2))
    results = compare({"nll": [predictors]}, stories, used, 300, 1)
    above = {(r.added, *r.beyond): r.gain.above_zero for r in results}
    assert {key: above[key] for key in found} == dict.fromkeys(found, True)
    assert {key: above[key] for key in not_found} == dict.fromkeys(not_found, False)


@pytest.fixture(scope="module")
def report(runs, truth, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    stories = [list(words) for words in WORDS]
    stories[0][4] = "zebra"
    times = planted(truth, surprisal=0.03, gradient=0.2)
    data = write_stories(out / "times.tsv", stories, times)
    assert reading(runs, out, "--data", data) == 0
    return out


def test_the_report_is_whole(report):
    text = (report / "reading-times.md").read_text()
    for part in ("6 stories, 660 words, 660 with a reading time", "12 without two words before",
                 "1 unknown, 2 after an unknown one; 645 used", "train.txt",
                 "Bits per used word: plain", "95% interval"):  # fmt: skip
        assert part in text
    said = gains(report)
    assert said["nll", "surprisal", "base"] == said["nll", "gradient", "base, surprisal"] == "yes"
    assert sum(model == "plain" for model, *_ in said) == 3  # nothing is corrected there
    assert sum(model == "nll" for model, *_ in said) == 4
    assert (report / "reading-times.png").stat().st_size > 10_000
    assert (report / "reading-times.svg").stat().st_size > 1000


def test_everybody_can_fit_a_regression_of_their_own(report, truth):
    with open(report / "nll.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 660
    word = rows[130]
    assert (word["story"], word["position"], word["word"]) == ("2", "21", WORDS[1][20])
    assert float(word["log_time"]) == pytest.approx(math.log(float(word["time"])))
    for column, expected in {
        "surprisal": truth["surprisal"][130],
        "gradient_h1_1": truth["gradient_h1"][129],
        "correction_2": truth["correction"][128],
        "surprisal_squared_1": truth["surprisal"][129] ** 2,
        "story_position": 21,
        "length_2": len(WORDS[1][18]),
        "step_c0": STEP,
    }.items():
        assert float(word[column]) == pytest.approx(expected, rel=1e-6), column
    zebra = rows[4]
    assert (zebra["word"], zebra["used"], zebra["surprisal"]) == ("zebra", "0", "")
    used = [row for row in rows if row["used"] == "1"]
    assert len(used) == 645
    assert all(value for row in used for value in row.values())


def test_runs_of_one_model_are_averaged(runs, measured, truth):
    stories, first = measured
    stories = dataclasses.replace(stories, time=planted(truth, surprisal=0.03))
    loaded = load_model(runs / "plain")
    found = measure(loaded.model, loaded.vocabulary, stories, eos="story")
    both = [make_predictors(stories, np.zeros(len(stories)), found), first]
    used = Coverage.of(stories, found.known).used
    together = compare({"m": both}, stories, used, 100, 1)
    single = [compare({"m": [one]}, stories, used, 100, 1) for one in both]
    for i in range(3):
        mean = np.mean([results[i].gain.mean for results in single])
        assert together[i].gain.mean == pytest.approx(mean)
    assert {result.runs for result in together} == {2}


def test_without_its_recoder_a_model_corrects_nothing(runs, truth, tmp_path):
    data = write_stories(tmp_path / "times.tsv", WORDS, planted(truth))
    assert reading(runs, tmp_path, "--data", data, models=("nll@none",)) == 0
    assert not any(predictors == "correction" for _, predictors, _ in gains(tmp_path))


@pytest.mark.parametrize(
    ("words", "arguments", "message"),
    [
        (["zebra yak", "gnu"], [], "knows none of the 3 words of"),
        (["zebra w1", "w2"], [], "can be used: 3 words, 3 with a reading time"),
        (["w1 w2 w3", "w1 w2 w3"], [], "no predictor varies over the 2 words"),
        (["w1 w2 w3 w4 w5", "w1 w2 w3"], [], "too few words"),
        (["w1 w2 w3 w4 w5"], [], "at least two stories"),
        (["w1 w2"], ["--time=rt"], "times.tsv, line 1: no column 'rt'"),
        (["w1 w2"], ["--counts=absent"], "no text absent to count words in"),
        (["w1 w2"], ["--samples=0"], "--samples must be at least 1"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(runs, tmp_path, capsys, words, arguments, message):
    stories = [story.split() for story in words]
    data = write_stories(tmp_path / "times.tsv", stories, [300.0] * sum(map(len, stories)))
    assert reading(runs, tmp_path / "out", "--data", data, *arguments, models=("nll",)) == 1
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_stories_are_not_recoded_at_single_words(runs, tmp_path, capsys):
    data = write_stories(tmp_path / "times.tsv", [["w1"]], [300.0])
    assert reading(runs, tmp_path, "--data", data, models=("nll@2",)) == 1
    assert "must recode all or none" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["_measure", "compare"])
def test_an_interrupt_leaves_no_halves(runs, truth, tmp_path, monkeypatch, capsys, where):
    original = getattr(reading_times, where)

    @functools.wraps(original)
    def interrupted(*arguments, **named):
        signal.raise_signal(signal.SIGINT)
        return original(*arguments, **named)

    monkeypatch.setattr(reading_times, where, interrupted)
    data = write_stories(tmp_path / "times.tsv", WORDS, planted(truth))
    assert reading(runs, tmp_path / "out", "--data", data) == 130
    assert "stopped; no file is half written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# The published times


@pytest.mark.skipif(
    not all((DATA / name).is_dir() for name in ("natural_stories", "wikitext2")),
    reason="FUSED_RECODER_DATA has no natural_stories and wikitext2; they are not ours to ship",
)
def test_natural_stories(tmp_path):
    stories = read_stories(DATA / "natural_stories" / "reading_times.tsv", "geometric_mean_rt")
    assert (len(stories.names), len(stories)) == (10, 10_256)
    assert np.isfinite(stories.time).sum() == 10_246
    # Longer words take longer, most of all one word later; the word after has not been seen.
    length = np.array([float(len(word)) for word in stories.words])
    known = np.isfinite(stories.time) & np.isfinite(stories.previous(length, 1))
    log_time = np.log(stories.time[known])
    later, now, next_one = (
        np.corrcoef(of_word[known], log_time)[0, 1]
        for of_word in (stories.previous(length, 1), length, np.roll(length, -1))
    )
    assert later > now > 0.15 > 0.1 > next_one
    vocabulary = Corpus(DATA / "wikitext2", max_vocab=10_000, cache=tmp_path).vocabulary
    torch.manual_seed(1)
    lm = fr.RecodingLanguageModel(len(vocabulary), 4, 4)
    found = measure(lm, vocabulary, stories, eos="story")
    coverage = Coverage.of(stories, found.known)
    assert (coverage.unknown, coverage.after_unknown, coverage.used.sum()) == (1245, 2038, 6953)
    predictors = make_predictors(stories, np.zeros(len(stories)), found)
    results = compare({"untrained": [predictors]}, stories, coverage.used, 50, 1)
    assert all(math.isfinite(result.gain.mean) for result in results)
