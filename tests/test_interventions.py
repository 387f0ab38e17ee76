"""Agreement sets, diagnostic classifiers, interventions."""

import json

import numpy as np
import pytest
import torch

from fused_recoder.analysis.agreement import (
    Agreement,
    other_form,
    read_giulianelli,
    read_gulordava,
)
from fused_recoder.analysis.interventions import agreement, states_until_verb, train_classifiers
from fused_recoder.training import Config, Vocabulary, build_model

NOUNS = {0: ["dog", "cat", "bird"], 1: ["dogs", "cats", "birds"]}
VERBS = ("runs", "run")
WORDS = ["<eos>", "<unk>", "the", "near", "old", *NOUNS[0], *NOUNS[1], *VERBS]
VOCABULARY = Vocabulary(WORDS)


@pytest.mark.parametrize(
    ("singular", "plural"),
    [
        ("is", "are"), ("was", "were"), ("has", "have"), ("does", "do"), ("carries", "carry"),
        ("passes", "pass"), ("teaches", "teach"), ("mixes", "mix"), ("runs", "run"),
        ("plays", "play"), ("makes", "make"), ("goes", "go"),
    ],
)  # fmt: skip
def test_the_other_form_of_a_verb(singular, plural):
    assert other_form(singular, "sing") == plural
    assert other_form(plural, "plur") == singular


def test_giulianelli_rows(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("the dog near the cats runs fast\tDT NN IN DT NNS VBZ RB\tsing\t1\t5\t0\t1\n")
    (item,) = read_giulianelli(path)
    assert item == Agreement(
        ("the", "dog", "near", "the", "cats"), 1, 0, "runs", "run", ("runs", "fast")
    )
    assert item.known(VOCABULARY)


def test_gulordava_rows(tmp_path):
    """The forms count, not the word that follows; fields may be quoted."""
    path = tmp_path / "generated.tab"
    names = "pattern constr_id sent_id correct_number form class type prefix n_attr punct freq"
    header = [*names.split(), "len_context", "len_prefix", "sent"]
    rows = [
        ["A", "1", "7", "plur", form, kind, "generated", "the dogs near the cat", "1", "False", "3",
         "4", "5", '"the dogs near the cat ""sang"" ."']
        for form, kind in (("run", "correct"), ("runs", "wrong"))
    ]  # fmt: skip
    path.write_text("\n".join("\t".join(row) for row in [header, *rows]) + "\n")
    (item,) = read_gulordava(path)
    assert item.words[item.subject] == "dogs"
    assert (item.label, item.correct, item.wrong, item.rest) == (1, "run", "runs", ())


def items(count, seed):
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        label = int(draw.integers(2))
        subject, attractor = (NOUNS[n][draw.integers(3)] for n in (label, draw.integers(2)))
        words = ("the", *("old",) * draw.integers(3), subject, "near", "the", attractor)
        correct, wrong = VERBS if label == 0 else VERBS[::-1]
        found.append(Agreement(words, words.index(subject), label, correct, wrong, (correct,)))
    return found


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return build_model(Config(hidden_size=24, signal=None), len(WORDS)).eval()


def test_states_are_those_from_subject_to_verb(model):
    chosen = items(5, 0)
    states, labels = states_until_verb(model, VOCABULARY, chosen)
    assert set(states) == {(0, "h"), (0, "c"), (1, "h"), (1, "c")}
    lengths = [len(item.words) - item.subject for item in chosen]
    assert len(labels) == sum(lengths) == len(states[1, "h"])
    # The last state of a sentence is the one the verb is predicted from.
    one = chosen[0]
    ids = torch.tensor([[0, *VOCABULARY.encode(one.words)]]).t()
    _, (h, c) = model.rnn(model.encoder(ids))
    found, _ = states_until_verb(model, VOCABULARY, [one])
    torch.testing.assert_close(torch.from_numpy(found[1, "c"][-1]), c[1, 0])
    torch.testing.assert_close(torch.from_numpy(found[0, "h"][-1]), h[0, 0])


def test_classifiers_find_the_number_and_interventions_put_it_right(model):
    """A random LSTM knows nothing about verbs: forms are set so that its decoder reads a direction
    of the state, and interventions along the classifiers move it there."""
    diagnoses = train_classifiers(model, VOCABULARY, items(300, 0), items(100, 1))
    assert len(diagnoses) == 4
    (top,) = [d for d in diagnoses if (d.layer, d.state) == (1, "h")]
    assert top.accuracy > 0.75
    with torch.no_grad():  # p("run") against p("runs") is what the classifier says, with noise
        direction = torch.as_tensor(top.weight, dtype=torch.float32)
        noise = torch.randn_like(direction) * direction.norm() / 24**0.5
        model.decoder.weight[VOCABULARY.ids["run"]] = direction + 2 * noise
        model.decoder.weight[VOCABULARY.ids["runs"]] = 0
        model.decoder.bias[VOCABULARY.ids["run"]] = top.bias
        model.decoder.bias[VOCABULARY.ids["runs"]] = 0
    tested = items(100, 2)
    plain = agreement(model, VOCABULARY, tested)
    still = agreement(model, VOCABULARY, tested, [top], 0.0)
    moved = agreement(model, VOCABULARY, tested, [top], 3.0)
    at_subject = agreement(model, VOCABULARY, tested, [top], 3.0, until_verb=False)
    assert plain == still
    assert plain["items"] == 100
    assert moved["accuracy"] > plain["accuracy"]
    assert moved["accuracy"] >= at_subject["accuracy"]
    assert moved["perplexity"] != plain["perplexity"]


def test_accuracy_by_hand(model):
    chosen = items(20, 3)
    right = 0
    for item in chosen:
        ids = torch.tensor([[0, *VOCABULARY.encode(item.words)]]).t()
        logits = model(ids, logits=True).logits[-1, 0]
        forms = [logits[VOCABULARY.ids[form]] for form in (item.correct, item.wrong)]
        right += bool(forms[0] > forms[1])
    assert agreement(model, VOCABULARY, chosen)["accuracy"] == right / 20


def test_a_step_may_cost_a_tenth_of_perplexity_at_most():
    from fused_recoder.experiments.interventions import choose

    far = {"accuracy": 0.9, "price": 1.5}
    near, nearer = {"accuracy": 0.7, "price": 1.1}, {"accuracy": 0.6, "price": 1.01}
    assert choose([nearer, near, far]) is near
    assert choose([{"accuracy": 0.9, "price": 1.6}, far]) is far


def test_interventions_as_an_experiment(tmp_path, capsys, monkeypatch):
    from fused_recoder.cli import main
    from fused_recoder.experiments import interventions

    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(interventions, "TRAINING", 60)
    monkeypatch.setattr(interventions, "VALIDATION", 20)
    text, sets = tmp_path / "text", tmp_path / "sets"
    for folder in (text, sets / "giulianelli", sets / "gulordava"):
        folder.mkdir(parents=True)
    for split, count, seed in (("train", 300, 0), ("valid", 40, 1), ("test", 40, 2)):
        lines = [" ".join(item.words + item.rest) for item in items(count, seed)]
        (text / f"{split}.txt").write_text("\n".join(lines) + "\n")
    for name, count, seed in (("a-", 100, 3), ("a3", 30, 4)):
        rows = [
            "\t".join([" ".join(i.words + i.rest), "-", ("sing", "plur")[i.label], str(i.subject),
                       str(len(i.words)), "0", "1"])
            for i in items(count, seed)
        ]  # fmt: skip
        path = sets / "giulianelli" / f"wd_k0_l5_m0_{name}.tsv"
        path.write_text("\n".join(rows) + "\n")
    names = ["pattern", "constr_id", "sent_id", "correct_number", "form", "class", "prefix",
             "len_context", "len_prefix"]  # fmt: skip
    rows = [
        [str(n), "1", "1", ("sing", "plur")[i.label], form, kind, " ".join(i.words),
         str(len(i.words) - i.subject), str(len(i.words))]
        for n, i in enumerate(items(20, 5))
        for form, kind in ((i.correct, "correct"), (i.wrong, "wrong"))
    ]  # fmt: skip
    path = sets / "gulordava" / "generated.tab"
    path.write_text("\n".join("\t".join(row) for row in [names, *rows]) + "\n")

    arguments = ["reproduce", str(text), "interventions", "--out", str(tmp_path / "out"),
                 "--seeds", "1", "--threads", "1"]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 1
    assert "needs --agreement" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--agreement", str(sets)])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "| held out | 20 (20) |" in printed
    assert "| one attractor | 30 (30) |" in printed
    (row,) = (tmp_path / "out" / "tables" / "interventions.jsonl").read_text().splitlines()
    found = json.loads(row)
    assert found["coverage"]["training"] == [80, 80]
    assert [one["set"] for one in found["sets"]][2] == "nonsense (Gulordava)"
    assert all(0 <= one["plain"]["accuracy"] <= 1 for one in found["sets"])
    assert (tmp_path / "out" / "figures" / "interventions.png").stat().st_size > 10_000
