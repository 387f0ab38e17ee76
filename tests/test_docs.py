"""What the documentation shows works: Python blocks run, commands and flags exist, links lead."""

import importlib.util
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fused_recoder as fr
from fused_recoder.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PAGES += [ROOT / "results" / "README.md"]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_runs(page, tmp_path, monkeypatch):
    """As it stands, in the order of the page, where nothing but the package is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path / "cache"))
    namespace = {}
    for block in blocks(page, "python"):
        exec(compile(block, page_name(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_all_code_is_in_blocks_that_run(page):
    """An indented or unnamed block of Python would escape the test above."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    assert not re.findall(r"^ {4}(?:import |from [\w.]+ import|def |\w+ = [\w.]+\().*", prose, re.M)
    fences = re.findall(r"^```([^\n]*)\n.*?^```", page.read_text(), re.S | re.M)
    assert set(fences) <= {"python", "sh", "diff"}


@pytest.fixture
def drop_in(tmp_path, monkeypatch):
    """Runs the word language model of the page on dropping in, before or after the change."""
    monkeypatch.chdir(tmp_path)
    (diff,) = blocks(DOCS / "recoding-lstm.md", "diff")

    def run(gone: str):
        lines = [line[1:] for line in diff.splitlines() if line[:1] != gone]
        path = tmp_path / "word_model.py"
        path.write_text("\n".join(lines))
        spec = importlib.util.spec_from_file_location("word_model", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "word_model", module)  # where loading finds the class
        spec.loader.exec_module(module)
        return module

    return run


def test_a_word_language_model_changes_in_five_lines():
    (diff,) = blocks(DOCS / "recoding-lstm.md", "diff")
    signs = [line[:1] for line in diff.splitlines()]
    assert set(signs) == {"", " ", "+", "-"}
    assert signs.count("+") == 5
    assert signs.count("-") < 5


@pytest.mark.parametrize(("gone", "rnn"), [("+", nn.LSTM), ("-", fr.FusedRecodingLSTM)])
def test_the_word_language_model_works_before_and_after(drop_in, gone, rnn):
    module = drop_in(gone)
    assert type(module.model.rnn) is rnn
    *training, evaluation = module.losses
    assert training[-1] < training[0] - 0.1
    assert evaluation < training[0]
    assert len(module.written) == 30
    assert all(0 <= word < 19 for word in module.written)


def test_the_word_language_model_generates_as_a_reader_reads(drop_in):
    """The states that its two calls per word carry on are those of the recoder."""
    module = drop_in("-")
    lm = fr.RecodingLanguageModel(19, 16, 16, 2, tie_weights=True).eval()
    lm.load_state_dict(module.model.state_dict())
    reader, hidden = lm.reader(), None
    words = module.text[:12, :1]
    for word, following in itertools.pairwise(words):
        logits, _, _ = module.model(word[None], hidden, torch.full((1, 1), -100))
        _, _, hidden = module.model(word[None], hidden, following[None])
        torch.testing.assert_close(logits.log_softmax(-1)[0], reader.feed(word))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", page.read_text()):
        path = page.parent / target
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in anchors


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("fused-recoder "):
                    found.append((page_name(page), line.split("#")[0].strip()))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_exist(page, line, capsys):
    _, command, *arguments = line.split()
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    for flag in (a for a in arguments if a.startswith("--")):
        assert re.search(rf"{flag}\b", shown), f"{command} has no {flag}"


def study_rows() -> dict[str, list[str]]:
    """The cells of the study's table, by model."""
    table = (ROOT / "results" / "study" / "tables" / "study.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
    return {cells[0].split(" (")[0]: cells for cells in rows}


def test_the_readme_has_a_short_way_in():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160
    assert len(re.findall(r"^!\[", text, re.M)) == 1
    (test_command,) = re.findall(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert any(
        line.startswith(test_command)
        for b in blocks(ROOT / "README.md", "sh")
        for line in b.splitlines()
    )


def test_the_readme_has_the_four_results_of_the_study():
    """The last of them beats recoding, and is not left out."""
    rows = re.findall(r"^\| .* \| (\d.*) \|$", (ROOT / "README.md").read_text(), re.M)
    study = study_rows()
    names = ("baseline", "nll-hc-learned", "nll-hc-learned-exact", "dynamic-evaluation.baseline")
    assert rows == [study[name][3] for name in names]


def test_the_page_of_results_shows_the_table_of_the_study():
    table = (ROOT / "results" / "study" / "tables" / "study.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    page = (ROOT / "results" / "README.md").read_text()
    (block,) = re.findall(r"<!-- study: begin -->\n(.*?)<!-- study: end -->", page, re.S)
    assert [line for line in block.splitlines() if line.startswith("|")] == rows


def test_the_page_on_exact_gradients_quotes_the_study():
    table = (ROOT / "results" / "study" / "tables" / "study.md").read_text()
    (said,) = re.findall(r"^Exact against.*$", table, re.M)
    page = (DOCS / "exact-gradients.md").read_text()
    for number in re.findall(r"\d+\.\d+ ± \d+\.\d+|[-+]?\d+\.\d+", said):
        assert number in page


def test_the_page_of_results_shows_their_tables():
    results = ROOT / "results"
    known = {
        row for table in results.glob("*/tables/*.md") for row in table.read_text().split("\n")
    }
    shown = [row for row in (results / "README.md").read_text().split("\n") if row[:1] == "|"]
    assert len(shown) > 15
    assert set(shown) <= known
