"""Facts about the published texts that the documentation states and the experiments rest on.

`FUSED_RECODER_DATA` names the folder with `ptb/`, `wikitext2/`, `giulianelli/` and `gulordava/`.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from fused_recoder.experiments.interventions import (
    GENERAL,
    NONSENSE,
    ONE_ATTRACTOR,
    read_sets,
)
from fused_recoder.training import Corpus

DATA = Path(os.environ.get("FUSED_RECODER_DATA", "/nowhere"))


def needs(*names):
    absent = [name for name in names if not (DATA / name).is_dir()]
    reason = f"FUSED_RECODER_DATA has no {', '.join(absent)}; not all of it is free"
    return pytest.mark.skipif(bool(absent), reason=reason)


@needs("ptb")
def test_penn_treebank_has_its_known_counts():
    corpus = Corpus(DATA / "ptb")
    assert len(corpus.vocabulary) == 10_000
    counts = [len(corpus[split]) - 1 for split in ("train", "valid", "test")]
    assert counts == [929_589, 73_760, 82_430]
    assert corpus.vocabulary.words[24] == "<eos>"  # at the end of the first line


@needs("wikitext2", "giulianelli", "gulordava")
def test_coverage_of_the_agreement_sets():
    """What docs/interventions.md says."""
    vocabulary = Corpus(DATA / "wikitext2").vocabulary
    assert len(vocabulary) == 33_278
    sets, own = read_sets(DATA)
    covered = {
        name: (sum(item.known(vocabulary) for item in items), len(items))
        for name, items in {"training": own, **sets}.items()
    }
    assert covered == {
        "training": (1160, 1200),
        GENERAL: (285, 300),
        ONE_ATTRACTOR: (219, 227),
        NONSENSE: (352, 410),
    }


@needs("giulianelli", "gulordava")
def test_agreement_items_are_tested_on_sentences_that_nothing_was_trained_on():
    sets, own = read_sets(DATA)
    sentences = [item.words + item.rest for item in own + sets[GENERAL] + sets[ONE_ATTRACTOR]]
    assert len(set(sentences)) == len(sentences) == 1727


@needs("giulianelli")
@pytest.mark.parametrize(
    ("name", "helpful", "attractors"),
    [("a-", {0: 504, 1: 581, 2: 360, 3: 52, 4: 3}, {0: 840, 1: 448, 2: 177, 3: 35}),
     ("a3", {0: 227}, {1: 227})],
)  # fmt: skip
def test_what_the_names_of_the_files_do_not_say(name, helpful, attractors):
    text = (DATA / "giulianelli" / f"wd_k0_l5_m0_{name}.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    assert Counter(int(row[5]) for row in rows) == helpful
    assert Counter(int(row[6]) for row in rows) == attractors
    assert {int(row[4]) - int(row[3]) for row in rows} == {6}
