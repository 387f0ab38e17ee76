"""What the documentation shows works: Python blocks run, commands and flags exist, links lead."""

import re
from pathlib import Path

import pytest

from fused_recoder.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page):
    namespace = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
                    found.append((page.name, line.split("#")[0].strip()))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_exist(page, line, capsys):
    _, command, *arguments = line.split()
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    for flag in (a for a in arguments if a.startswith("--")):
        assert re.search(rf"{flag}\b", shown), f"{command} has no {flag}"


def test_the_readme_shows_the_table_of_the_study():
    table = (ROOT / "results" / "study" / "tables" / "study.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"<!-- study: begin -->\n(.*?)<!-- study: end -->", readme, re.S)
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
