"""Word by word, the theorems, the shape of surprisal, dynamic evaluation."""

import csv
import html
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from tiny_text import TINY, write_text

import fused_recoder as fr
from fused_recoder.analysis import dynamic, figures, signal_shape, theorems
from fused_recoder.analysis.compare import (
    NUMBERS,
    ModelRuns,
    SentenceNumbers,
    p_values,
    read_runs,
)
from fused_recoder.analysis.sentences import NATS_PER_BIT, read, tokenize
from fused_recoder.training import Config, Corpus, Trainer, Vocabulary, build_model, evaluate
from fused_recoder.training.data import IGNORE

WORDS = ["<eos>", "the", "old", "man", "boats", "it", "'s", "<unk>", ",", "N"]
VOCABULARY = Vocabulary(WORDS)
SENTENCES = ["The old man the boats.", "it 's old , man"]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_RECODER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def train(text, out, **settings):
    Trainer(Config(**TINY | settings), text, out).train()
    return out


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, settings in {
        "plain": {"signal": None},
        "nll": {"signal": "nll", "step": 0.5},
    }.items():
        found[name] = [train(text, folder / f"{name}{s}", seed=s, **settings) for s in (1, 2)]
    return found


def model(signal="nll", step=0.5, states="hc", **options):
    torch.manual_seed(3)
    config = Config(hidden_size=7, signal=signal, step=step, states=states, **options)
    lm = build_model(config, len(WORDS), dataset_size=100).double().eval()
    with torch.no_grad():  # a decoder with opinions, so that recoding matters
        lm.decoder.weight.mul_(8)
    return lm


def tokens():
    return [tokenize(sentence, VOCABULARY) for sentence in SENTENCES]


# Words


@pytest.mark.parametrize(
    ("sentence", "words", "unknown"),
    [
        ("The old man", ["The", "old", "man"], []),
        ("the boats.", ["the", "boats"], []),  # no full stop in the vocabulary
        ("old, man", ["old", ",", "man"], []),  # but a comma
        ("it \u2019s old", ["it", "'s", "old"], []),
        ("the zebra", ["the", "zebra"], ["zebra"]),
        ("the <unk>", ["the", "<unk>"], ["<unk>"]),
    ],
)
def test_words_are_found_as_the_vocabulary_has_them(sentence, words, unknown):
    found = tokenize(sentence, VOCABULARY)
    assert [token.text for token in found] == words
    assert [token.text for token in found if token.unknown] == unknown
    assert all(t.ids == (VOCABULARY.ids[t.text.lower()],) for t in found if not t.unknown)


def test_a_sentence_without_words_is_refused():
    with pytest.raises(ValueError, match="no words"):
        tokenize("... !", VOCABULARY)


@pytest.mark.parametrize("states", ["hc", "h", "c"])
@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
def test_reading_is_what_the_model_does_over_the_whole_sentence(signal, states):
    lm = model(signal, states=states)
    for sentence, found in zip(tokens(), read(lm, VOCABULARY, tokens()), strict=True):
        ids = torch.tensor([[0] + [i for t in sentence for i in t.ids]]).t()
        out = lm(ids[:-1], ids[1:], return_trace=True)
        bits = out.nll[:, 0] / NATS_PER_BIT
        assert found.surprisal == pytest.approx(bits.tolist(), rel=1e-10)
        assert found.delta == pytest.approx(out.trace.delta[:, 0].tolist(), rel=1e-10)
        assert found.delta_after == pytest.approx(out.trace.delta_after[:, 0].tolist(), rel=1e-10)
        redecoded = signal == "entropy" and "h" in states
        own = found.surprisal_after if redecoded else found.surprisal_before
        assert found.surprisal == own
        if signal == "nll":  # then delta is the surprisal in nats
            after = [bits * NATS_PER_BIT for bits in found.surprisal_after]
            assert after == pytest.approx(found.delta_after, rel=1e-9)
        assert found.steps == {f"{s}{l}": [0.5] * len(sentence) for l in (0, 1) for s in states}


@pytest.mark.parametrize(
    ("signal", "options"),
    [
        ("mc_dropout", {"signal_options": {"num_samples": 3, "p": 0.4}}),
        ("ensemble", {"decoder_options": {"num_members": 2}}),
    ],
)
def test_uncertainty_models_can_be_read(signal, options):
    lm = model(signal, **options)
    first, second = (read(lm, VOCABULARY, tokens(), seed=5)[0] for _ in range(2))
    assert first == second  # the masks follow from the seed
    assert first.surprisal == first.surprisal_after != first.surprisal_before


def test_recoding_nowhere_is_no_recoding():
    plain = read(model(signal=None), VOCABULARY, tokens())
    found = read(model(), VOCABULARY, tokens(), recode="none")
    for a, b in zip(plain, found, strict=True):
        assert a.surprisal == pytest.approx(b.surprisal, rel=1e-12)
        assert not any(b.recoded)
        assert b.delta == b.delta_after
        assert all(math.isnan(d) for d in a.delta)


def test_recoding_one_word_changes_the_following_ones_only():
    nowhere = read(model(), VOCABULARY, tokens(), recode="none")[0]
    once = read(model(), VOCABULARY, tokens(), recode=(2,))[0]
    assert once.recoded == [False, True, False, False, False]
    assert once.surprisal[:2] == pytest.approx(nowhere.surprisal[:2], rel=1e-12)
    assert once.surprisal_after[1] < once.surprisal_before[1]
    assert all(a != b for a, b in zip(once.surprisal[2:], nowhere.surprisal[2:], strict=True))


def test_reading_leaves_the_model_as_it_is():
    lm = model().float().train()
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    read(lm, VOCABULARY, tokens())
    assert lm.training
    for name, tensor in lm.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("signal", ["nll", "entropy", "mc_dropout"])
@pytest.mark.parametrize("states", ["hc", "c"])
def test_what_the_last_correction_did(signal, states):
    """Every word once more, with the correction before its prediction left out by a mask."""
    lm = model(signal, states=states, step=0.5)
    ours = read(lm, VOCABULARY, tokens(), seed=5)[0]
    length = len(ours.tokens)
    late = signal == "nll" or states == "c"  # then the correction comes after the prediction
    assert late == (ours.surprisal == ours.surprisal_before)
    for t in range(length):
        left_out = t + 1 - late  # a number from 1; 0: there is none before the first word
        others = [n for n in range(1, length + 1) if n != left_out]
        once = read(lm, VOCABULARY, tokens(), recode=others, seed=5)[0]
        assert ours.surprisal_uncorrected[t] == pytest.approx(once.surprisal[t], rel=1e-9)
    assert ours.surprisal_uncorrected[1:] != pytest.approx(ours.surprisal[1:], rel=1e-3)


def test_variational_models_are_refused():
    with pytest.raises(ValueError, match="variational"):
        read(model("variational", signal_options={"num_samples": 2}), VOCABULARY, tokens())


# Several models


def test_models_are_named_on_the_command_line():
    assert ModelRuns.parse("runs/a") == ModelRuns("a", (ModelRuns.parse("runs/a").paths[0],))
    found = ModelRuns.parse("ours=runs/a,runs/b@2,5")
    assert (found.name, [str(p) for p in found.paths], found.recode) == (
        "ours", ["runs/a", "runs/b"], (2, 5),
    )  # fmt: skip
    assert ModelRuns.parse("a=x@none").recode == "none"
    for wrong in ("a=x@often", "=x", "a=x,,y"):
        with pytest.raises(ValueError, match=r"after @|a model is"):
            ModelRuns.parse(wrong)


def test_significance_word_by_word():
    a = np.array([[1.0, 5.0], [1.1, 5.0], [0.9, 6.0]])
    b = np.array([[2.0, 5.0], [2.1, 6.0], [1.9, 5.0]])
    p = p_values(a, b)
    assert p[0] < 0.001 < 0.05 < p[1]
    assert np.isnan(p_values(a[:1], b)).all()


def analyze(*arguments):
    from fused_recoder.cli import main

    with pytest.raises(SystemExit) as end:
        main(["analyze", *map(str, arguments), "--threads", "1"])
    return end.value.code


@pytest.fixture(scope="module")
def analysis(runs, tmp_path_factory):
    """Two models of two runs each on two sentences; the second has a nasty word."""
    out = tmp_path_factory.mktemp("analysis")
    file = out / "sentences.txt"
    file.write_text("w1 w3 w8 w17\n\nw2 </script> w5\n")
    models = [f"{name}={','.join(map(str, paths))}" for name, paths in runs.items()]
    assert analyze(*models, "--sentences", file, "--out", out) == 0
    return out


def test_surprisal_tools_can_read_the_table(analysis):
    with open(analysis / "nll.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert list(rows[0])[:4] == ["sentence_id", "token_id", "token", "surprisal"]
    assert [(r["sentence_id"], r["token_id"], r["token"]) for r in rows[3:6]] == [
        ("1", "4", "w17"), ("2", "1", "w2"), ("2", "2", "</script>"),
    ]  # fmt: skip
    assert [row["unknown"] for row in rows] == ["0"] * 5 + ["1", "0"]
    known = [row for row in rows if row["unknown"] == "0"]
    assert all(float(row["delta_after"]) < float(row["delta"]) for row in known)
    assert float(rows[0]["step_h0"]) == 0.5
    with open(analysis / "plain.tsv", newline="") as file:
        plain = list(csv.DictReader(file, delimiter="\t"))
    assert plain[0]["delta"] == ""
    assert float(plain[0]["surprisal"]) > 0


def test_unknown_words_have_no_numbers(analysis, capsys):
    for name in ("plain", "nll"):
        with open(analysis / f"{name}.tsv", newline="") as file:
            (row,) = [r for r in csv.DictReader(file, delimiter="\t") if r["unknown"] == "1"]
        assert row["token"] == "</script>"
        for column in ("surprisal", "surprisal_sd", *NUMBERS):
            assert row[column] == ""


def test_means_leave_unknown_words_out(runs, tmp_path, capsys):
    def bits(*sentences: str) -> list[str]:
        flags = [flag for sentence in sentences for flag in ("--sentence", sentence)]
        assert analyze(runs["nll"][0], *flags, "--out", tmp_path) == 0
        said = capsys.readouterr().out.splitlines()[0]
        return re.findall(r"([\d.]+) bits per known word", said)

    (mean,) = bits("w1 w3")
    assert bits("w1 w3 zebra", "yak") == [mean]
    assert bits("zebra") == []
    assert (tmp_path / "sentence-001.png").is_file()


def test_figures_are_drawn(analysis):
    assert sorted(p.name for p in analysis.glob("sentence-*")) == [
        "sentence-001.png", "sentence-001.svg", "sentence-002.png", "sentence-002.svg",
    ]  # fmt: skip
    assert (analysis / "sentence-001.png").stat().st_size > 10_000


def panels(monkeypatch, tmp_path, by_model):
    """The axes of a figure that is drawn, from above."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure.axes))
    figures.draw_sentence(by_model, tmp_path / "a.png")
    assert len(drawn) == 2
    return drawn[0]


def numbers_of(signal):
    runs = [read(model(signal), VOCABULARY, tokens())[0] for _ in range(2)]
    values = {name: np.array([getattr(r, name) for r in runs]) for name in NUMBERS}
    return SentenceNumbers(runs[0].tokens, runs[0].recoded, values, {})


def test_lines_go_through_predictions_only(monkeypatch, tmp_path):
    """The value decoded again from a recoded state knows its word: it is on no line."""
    plain, nll = numbers_of(None), numbers_of("nll")
    top, bottom = panels(monkeypatch, tmp_path, {"plain": plain, "nll": nll})
    lines = [line.get_ydata() for line in top.lines]
    np.testing.assert_allclose(lines, [plain.mean("surprisal"), nll.mean("surprisal")])
    change, zero = bottom.lines
    np.testing.assert_allclose(
        change.get_ydata(), nll.mean("surprisal") - nll.mean("surprisal_uncorrected")
    )
    assert zero.get_ydata() == [0, 0]


def test_lines_have_a_gap_where_a_word_is_unknown(runs, monkeypatch, tmp_path):
    numbers = read_runs(ModelRuns("nll", tuple(runs["nll"])), ["w1 w3 zebra w5 w6"])[0]
    top, bottom = panels(monkeypatch, tmp_path, {"nll": numbers})
    for axis in (top, bottom):
        assert np.flatnonzero(np.isnan(axis.lines[0].get_ydata())).tolist() == [2]
        (column,) = axis.patches
        assert column.get_x() + column.get_width() / 2 == pytest.approx(2)
        assert column.get_label() == "unknown word"


def test_a_signal_of_its_own_has_a_panel(monkeypatch, tmp_path):
    entropy = numbers_of("entropy")
    assert len(panels(monkeypatch, tmp_path, {"plain": numbers_of(None)})) == 1
    _, _, signal = panels(monkeypatch, tmp_path, {"entropy": entropy})
    before, after = signal.lines
    np.testing.assert_allclose(before.get_ydata(), entropy.mean("delta"))
    np.testing.assert_allclose(after.get_ydata(), entropy.mean("delta_after"))
    assert (before.get_linestyle(), after.get_linestyle()) == ("-", "None")


def test_the_page_needs_nothing_but_itself(analysis):
    page = (analysis / "index.html").read_text()
    assert not re.search(r"(src|href)\s*=|url\(|https?://|@import", page)
    content = re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S).group(1)
    data = json.loads(content)
    words = data["sentences"][1]["models"][1]["words"]
    assert [word["text"] for word in words] == ["w2", "</script>", "w5"]
    assert words[0]["after"] < words[0]["before"]


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium or Chrome is installed")
def test_the_page_in_a_browser(analysis, tmp_path):
    """Every word is there and coloured, and pointing at one shows its numbers."""
    page = (analysis / "index.html").read_text()
    point = """<script>
      const word = document.querySelector('.row[data-model="1"] .word');
      word.dispatchEvent(new Event("mouseenter"));
      </script></body>"""
    copy = tmp_path / "index.html"
    copy.write_text(page.replace("</body>", point))
    done = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/u",
         "--virtual-time-budget=3000", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    dom = done.stdout
    assert 'data-ready="yes"' in dom, done.stderr[-2000:]
    words = re.findall(
        r'<span class="word[^>]*style="background: (rgb\([^)]*\))[^>]*>([^<]*)<', dom
    )
    assert [html.unescape(text) for _, text in words] == [
        *["w1", "w3", "w8", "w17"] * 2, *["w2", "</script>", "w5"] * 2,
    ]  # fmt: skip
    assert len({colour for colour, _ in words}) > 3
    shown = re.search(r'<div id="tip"[^>]*>(.*?)</div>', dom, re.S)
    assert "display: block" in shown.group(0)
    for name in ("before recoding", "after recoding", "δ after", "step h0", "p against plain"):
        assert name in shown.group(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to read"),
        (["--sentence", "..."], "no words"),
        (["--sentences", "nowhere.txt"], "nowhere.txt"),
        (["--sentences", "latin-1.txt"], "latin-1.txt, line 2: byte 4 (0xe9) is not UTF-8"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    runs, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin-1.txt").write_bytes("w1 w2\nw3 \xe9\n".encode("latin-1"))
    assert analyze(runs["nll"][0], *arguments, "--out", tmp_path / "out") == 1
    assert message in capsys.readouterr().err


def test_dollars_are_no_formula(runs, tmp_path):
    """In a word and in a model's name; two of them in one text made matplotlib look for one."""
    out = tmp_path / "out"
    assert analyze(f"$x_^$={runs['nll'][0]}", "--sentence", "w1 $5_^$ w2", "--out", out) == 0
    assert "$5_^$" in (out / "index.html").read_text()
    drawn = (out / "sentence-001.svg").read_text()
    assert "<!-- $5_^$ -->" in drawn
    assert "<!-- $x_^$ -->" in drawn


def test_models_need_different_names(runs, tmp_path, capsys):
    path = runs["nll"][0]
    assert analyze(f"a={path}", f"a={path}", "--sentence", "w1", "--out", tmp_path) == 1
    assert "different names" in capsys.readouterr().err


# Theorems


def some_windows(length=12, count=5):
    torch.manual_seed(5)
    return tuple(torch.randint(len(WORDS), (length, count)) for _ in range(2))


@pytest.mark.parametrize("signal", ["nll", "surprisal", "entropy"])
def test_the_guaranteed_step_never_raises_the_signal(signal):
    lm = model(signal=None)
    found = theorems.signal_change(lm, signal, "lipschitz", ("h",), *some_windows())
    assert found["positions"] == 60
    assert found["not_raised"] == 1.0
    assert found["mean_change"] < 0


def test_a_step_that_is_too_large_raises_the_signal():
    found = theorems.signal_change(model(signal=None), "nll", 30.0, ("h",), *some_windows())
    assert found["not_raised"] < 1.0


def test_measuring_changes_no_prediction():
    lm = model(signal=None)
    tokens, targets = some_windows()
    same = theorems.with_recoder(lm, None, 0.0, ("h", "c"))
    assert torch.equal(same(tokens, targets).nll, lm(tokens, targets).nll)


def test_the_effect_on_later_steps():
    lm = model(signal=None)
    windows = some_windows()
    rows = theorems.later_effect(lm, "nll", 0.5, ("h", "c"), *windows, at=4, others=False)
    assert [row["k"] for row in rows] == list(range(8))
    # By hand: the same with a mask.
    recoding = model(signal="nll", step=0.5)
    mask = torch.zeros(12, 5, dtype=torch.bool)
    without = recoding(*windows, recode_mask=mask).nll
    mask[4] = True
    trace = recoding(*windows, recode_mask=mask, return_trace=True).trace
    now = (trace.delta_after[4] - without[4]).mean().item()
    later = (trace.delta[6] - without[6]).mean().item()
    assert rows[0]["mean_change"] == pytest.approx(now, rel=1e-9)
    assert rows[2]["mean_change"] == pytest.approx(later, rel=1e-9)
    assert rows[0]["lowered"] == 1.0


def test_samples_are_the_same_with_and_without():
    """Else the effect of other masks would be taken for that of recoding."""
    signal = fr.signals.MCDropout(num_samples=2, p=0.5)
    rows = theorems.later_effect(
        model(signal=None), signal, 0.0, ("h", "c"), *some_windows(), at=3, others=True
    )
    assert all(row["mean_change"] == 0 for row in rows)


# The shape of surprisal


def test_surprisal_and_its_slopes():
    p = np.array([0.001, 0.1, 0.3, 0.5, 0.9])
    assert signal_shape.surprisal(p) == pytest.approx(p ** (-p) - 1)
    step = 1e-6
    slope = (signal_shape.surprisal(p + step) - signal_shape.surprisal(p - step)) / (2 * step)
    assert signal_shape.surprisal_slope(p) == pytest.approx(slope, rel=1e-5)
    # d(delta)/d(logits) = d(delta)/dp * dp/d(logits), and dp/d(logits) = -p (o - onehot).
    assert signal_shape.surprisal_push(p) == pytest.approx(-p * signal_shape.surprisal_slope(p))
    assert (signal_shape.surprisal_push(p) < 0).tolist() == [True, True, True, False, False]
    assert signal_shape.wrong_way(p) == pytest.approx(3 / 5)


def test_probabilities_are_those_of_the_words(runs, text):
    from fused_recoder.training import load_model

    loaded = load_model(runs["plain"][0])
    tokens = Corpus(text, vocabulary=loaded.vocabulary)["test"]
    p = signal_shape.gold_probabilities(loaded.model, tokens, batch_size=3, bptt=7)
    assert len(p) == len(tokens) - 1
    mean = -np.log(p).mean()
    assert mean == pytest.approx(evaluate(loaded.model, tokens, batch_size=3).nll, rel=1e-5)


# Dynamic evaluation


@pytest.fixture
def reading(runs, text):
    from fused_recoder.training import load_model

    loaded = load_model(runs["plain"][0])
    corpus = Corpus(text, vocabulary=loaded.vocabulary)
    sizes = dynamic.gradient_sizes(loaded.model, corpus["train"], batch_size=4, windows=20)
    return loaded.model, corpus["test"], sizes


def test_without_learning_dynamic_evaluation_is_evaluation(reading):
    lm, tokens, sizes = reading
    found = dynamic.evaluate_dynamically(lm, tokens, sizes, lr=0.0, decay=0.0)
    static = evaluate(lm, tokens, batch_size=1)
    assert found.tokens == static.tokens
    assert found.nll == pytest.approx(static.nll, rel=1e-5)


def test_a_text_that_repeats_itself_is_learned(reading):
    lm, tokens, sizes = reading
    before = [p.clone() for p in lm.parameters()]
    again = np.concatenate([tokens[:8]] * 60)
    static = dynamic.evaluate_dynamically(lm, again, sizes, lr=0.0, decay=0.0)
    learned = dynamic.evaluate_dynamically(lm, again, sizes, lr=0.02, decay=0.0)
    assert learned.nll < 0.9 * static.nll
    # The model that was given stays as it was.
    assert all(torch.equal(a, b) for a, b in zip(before, lm.parameters(), strict=True))
    # Drawn all the way back after every update, it is static again.
    held = dynamic.evaluate_dynamically(
        lm, again, [torch.ones_like(s) for s in sizes], lr=1e-3, decay=1.0
    )
    assert held.nll == pytest.approx(static.nll, rel=1e-6)


def test_gradient_sizes_are_root_mean_squares(reading):
    lm, tokens, _ = reading
    (size,) = [
        s for s, (name, _) in zip(
            dynamic.gradient_sizes(lm, tokens, batch_size=4, windows=2), lm.named_parameters(),
            strict=True,
        ) if name == "decoder.bias"
    ]  # fmt: skip
    from fused_recoder.training import Batches

    batches, hx, squares = Batches(tokens, 4, dynamic.SEGMENT), None, 0.0
    for window in range(2):
        inputs, targets = batches[window]
        out = lm(inputs, targets, hx)
        (gradient,) = torch.autograd.grad(out.loss, lm.decoder.bias)
        squares, hx = squares + gradient.square(), tuple(s.detach() for s in out.hx)
    assert (targets != IGNORE).all()
    torch.testing.assert_close(size, (squares / 2).sqrt())
