"""What is kept in results/: little, and enough to make every table again and to go on."""

import functools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fused_recoder.experiments.command import EXPERIMENTS, INTERVENTIONS
from fused_recoder.experiments.jobs import Training, work
from fused_recoder.experiments.rows import read
from fused_recoder.experiments.scales import SCALES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
SHORT = replace(SCALES["small"], plain=SCALES["small"].plain.replace(epochs=2))
# By folder: scale, seeds and experiments, as results/README.md has them in its commands.
KEPT = {
    "study": (SCALES["small"], 4, ("study", "theorems")),
    "tiny": (SCALES["tiny"], 2, ("signal_shape", "explore")),
    "wikitext2": (SHORT, 2, (INTERVENTIONS,)),
}
CASES = [(folder, name) for folder, (_, _, names) in KEPT.items() for name in names]


def git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True)


in_a_clone = pytest.mark.skipif(git("rev-parse").returncode != 0, reason="needs a git clone")


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_tables_are_made_from_the_rows_alone(tmp_path, folder, name):
    scale, seeds, _ = KEPT[folder]
    shutil.copy(RESULTS / folder / "rows.jsonl", tmp_path)
    EXPERIMENTS[name].report(scale, tmp_path, seeds)
    made = (tmp_path / "tables" / f"{name}.md").read_text()
    assert made == (RESULTS / folder / "tables" / f"{name}.md").read_text()
    assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_nothing_finished_is_done_again(tmp_path, monkeypatch, folder, name):
    """Models are gone, so what was not measured on them is left out; seeds of the best are open."""
    scale, seeds, _ = KEPT[folder]
    shutil.copy(RESULTS / folder / "rows.jsonl", tmp_path)
    monkeypatch.setattr(Training, "run", lambda job, *_: pytest.fail(f"{job.name} is trained"))
    options = {"sets": tmp_path} if name == INTERVENTIONS else {}
    jobs = functools.partial(EXPERIMENTS[name].jobs, scale, tmp_path, seeds, **options)
    rows = work(jobs, tmp_path, tmp_path, say=pytest.fail)
    assert {job.name for job in jobs() if isinstance(job, Training)} <= {r["name"] for r in rows}


@in_a_clone
def test_few_files_are_kept():
    kept = git("ls-files", "results").stdout.splitlines()
    assert 10 < len(kept) <= 60


@in_a_clone
@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("study/rows.jsonl", False),
        ("study/tables/study.md", False),
        ("study/figures/study.png", False),
        ("later/rows.jsonl", False),
        ("study/.rows.lock", True),
        ("study/baseline.seed9/best.safetensors", True),
        ("study/baseline.seed9/metrics.jsonl", True),
        ("study/baseline.seed9/result.json", True),
        ("study/baseline.seed9.log", True),
        ("study/rows.jsonl.17.tmp", True),
        ("study/tables/study.tex", True),
        ("study/figures/study.svg", True),
    ],
)
def test_what_a_job_leaves_is_not_committed(path, ignored):
    assert git("check-ignore", "--no-index", f"results/{path}").returncode == (0 if ignored else 1)


def test_the_page_quotes_the_runs_of_zarembas_model():
    page = (RESULTS / "README.md").read_text()
    runs = read(RESULTS / "zaremba").values()
    assert len(runs) == 2
    for row in runs:
        assert f"{row['test_perplexity']:.2f}" in page
        assert f"{row['valid_perplexity']:.2f}" in page


def test_the_page_quotes_the_large_step():
    """Of `nll` on h and c: no variant may be said to help that does not."""
    rows = read(RESULTS / "tiny")
    means = {
        name: sum(rows[f"{name}.seed{seed}"]["test_perplexity"] for seed in (1, 2)) / 2
        for name in ("nll-hc-3", "baseline")
    }
    page = (RESULTS / "README.md").read_text()
    assert f"{means['nll-hc-3']:.2f}, the baseline {means['baseline']:.2f}" in page


def test_backtracking_took_its_first_step_everywhere():
    """As docs/signals-and-steps.md says, which warns of it."""
    first = read(RESULTS / "study")["theorems"]["first"]
    (row,) = [r for r in first if (r["signal"], r["step"]) == ("nll", "backtracking")]
    assert (row["positions"], row["mean_step"]) == (1200, 1.0)
    assert row["mean_delta_after"] / row["mean_delta"] == pytest.approx(1 / 3, abs=0.05)
