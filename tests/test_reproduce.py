"""`fused-recoder reproduce`: jobs, statistics, tables and the study's choices."""

import functools
import json
import math
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tiny_text import write_text

from fused_recoder.experiments import (
    adapting,
    command,
    jobs,
    plots,
    report,
    rows,
    study,
    study_report,
    tables,
)
from fused_recoder.experiments.adapting import best_choice, edges, search_grid
from fused_recoder.experiments.explore import explore
from fused_recoder.experiments.jobs import Measurement, Training, work
from fused_recoder.experiments.rows import result
from fused_recoder.experiments.scales import SCALES, first_lines
from fused_recoder.experiments.statistics import compare, compare_seeds, describe
from fused_recoder.experiments.variants import BASELINE
from fused_recoder.training import Config, Trainer

SMOKE = SCALES["smoke"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), train=60, other=10)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FUSED_RECODER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(jobs, "WAIT", 0.01)


def quiet(line):
    pass


def tiny(**changes):
    settings = {
        "signal": None,
        "hidden_size": 6,
        "batch_size": 4,
        "bptt": 5,
        "epochs": 1,
        "lr": 1.0,
    }
    return Config(**settings | changes)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_result(out, name, **values):
    row = {"name": name, "status": "finished", "test_tokens_per_second": 1000.0} | values
    forget(out, name)
    with open(out / rows.ROWS, "a") as file:
        file.write(json.dumps(row) + "\n")


def forget(out, name):
    """As if the job had not been done."""
    (out / name / rows.RESULT).unlink(missing_ok=True)
    path = out / rows.ROWS
    kept = [row for row in read_lines(path) if row["name"] != name] if path.exists() else []
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


# Jobs


def test_workers_share_the_jobs(tmp_path):
    done, together = [], threading.Barrier(2)

    def measure(name, folders, data):
        done.append(name)
        time.sleep(0.02)
        return {}

    wanted = [
        Measurement(f"job{i}", {}, (), functools.partial(measure, f"job{i}")) for i in range(6)
    ]

    def worker():
        together.wait()
        work(lambda: wanted, tmp_path, tmp_path, say=quiet)

    workers = [threading.Thread(target=worker) for _ in range(2)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert sorted(done) == [f"job{i}" for i in range(6)]


def test_what_a_job_has_found_is_asked_for_the_next(tmp_path):
    def jobs_so_far():
        found = [Measurement("first", {}, (), lambda folders, data: {"value": 3})]
        if (row := result(tmp_path, "first")) is not None:
            value = row["value"]
            found.append(Measurement("second", {}, (), lambda f, d: {"value": value + 1}))
        return found

    found = work(jobs_so_far, tmp_path, tmp_path, say=quiet)
    assert [row["value"] for row in found] == [3, 4]


def test_a_run_that_diverges_is_a_result_and_what_needs_it_is_left_out(text, tmp_path):
    training = Training("wild", tiny(lr=1e30, clip=None, epochs=2))
    wanted = [training, Measurement("on it", {}, (training.name,), lambda f, d: {})]
    (row,) = work(lambda: wanted, tmp_path, text, say=quiet)
    assert row["status"] == "diverged"
    assert "not finite" in row["error"] or "nan" in row["error"]


def test_a_result_may_be_kept_without_its_model(text, tmp_path):
    """What would be measured on the model is left out then."""
    training = Training("a", tiny())
    work(lambda: [training], tmp_path, text, say=quiet)
    wanted = [training, Measurement("on it", {}, (training.name,), lambda f, d: {})]
    model = tmp_path / training.name / "best.safetensors"
    model.rename(tmp_path / "elsewhere")
    assert [row["name"] for row in work(lambda: wanted, tmp_path, text, say=quiet)] == ["a.seed1"]
    (tmp_path / "elsewhere").rename(model)
    assert len(work(lambda: wanted, tmp_path, text, say=quiet)) == 2


def test_a_folder_with_other_settings_is_refused(text, tmp_path):
    work(lambda: [Training("a", tiny())], tmp_path, text, say=quiet)
    with pytest.raises(ValueError, match="other settings"):
        work(lambda: [Training("a", tiny(lr=2.0))], tmp_path, text, say=quiet)


def test_a_killed_reproduction_goes_on(text, tmp_path):
    """Killed without warning in the middle of a training, then started again."""

    def start(out):
        arguments = ["reproduce", str(text), "theorems", "--scale", "smoke", "--out", str(out)]
        return subprocess.Popen(
            [sys.executable, "-m", "fused_recoder", *arguments, "--threads", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    metrics = tmp_path / "killed" / "baseline.seed1" / "metrics.jsonl"
    process = start(tmp_path / "killed")
    while not (metrics.exists() and metrics.stat().st_size > 0) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert result(tmp_path / "killed", "theorems") is None

    for folder in ("killed", "whole"):
        process = start(tmp_path / folder)
        output, _ = process.communicate()
        assert process.returncode == 0, output
    whole, killed = (result(tmp_path / f, "baseline.seed1") for f in ("whole", "killed"))
    assert killed["test_perplexity"] == whole["test_perplexity"]
    assert "Theorem 1" in output
    guaranteed = [r for r in result(tmp_path / "whole", "theorems")["first"] if "1/L" in r["step"]]
    assert len(guaranteed) == 6
    assert all(row["not_raised"] == 1.0 for row in guaranteed)


def test_a_text_is_cut(text, tmp_path):
    folder = first_lines(text, 20, tmp_path)
    assert len((folder / "train.txt").read_text().splitlines()) == 20
    assert len((folder / "test.txt").read_text().splitlines()) == 2
    assert (text / "train.txt").read_text().startswith((folder / "train.txt").read_text())


# Rows


def test_what_is_finished_is_known_from_the_rows_alone(text, tmp_path, monkeypatch):
    """Of a study whose folders are lost: nothing is trained again, other settings are noticed."""
    job = Training("a", tiny())
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    (row,) = work(lambda: [job], whole, text, say=quiet)
    rest.mkdir()
    (whole / rows.ROWS).rename(rest / rows.ROWS)
    monkeypatch.setattr(Training, "run", lambda *_: pytest.fail("trained again"))
    wanted = [job, Measurement("on it", {}, (job.name,), lambda f, d: {})]
    assert work(lambda: wanted, rest, text, say=quiet) == [row]
    with pytest.raises(ValueError, match=r"'a\.seed1' with other settings"):
        work(lambda: [Training("a", tiny(lr=2.0))], rest, text, say=quiet)


def test_a_run_that_is_not_gathered_yet_is_taken_up(tmp_path):
    """Killed after its result, or copied from another machine; metrics come along, thinned."""
    folder = tmp_path / "a.seed1"
    folder.mkdir()
    (folder / rows.RESULT).write_text(json.dumps({"name": "a.seed1", "status": "finished"}))
    train = [
        {
            "kind": "train",
            "step": 7 * n,
            "epoch": n / 9,
            "loss": 1 / n,
            "lr": 1.0,
            "step_size/h0": n,
        }
        for n in range(1, 2 * rows.POINTS)
    ]
    epochs = [{"kind": "epoch", "epoch": 1, "valid_perplexity": 12.3456789, "seconds": 1.0}]
    lines = "".join(json.dumps(row) + "\n" for row in train + epochs)
    (folder / rows.METRICS).write_text(lines)
    rows.gather(tmp_path)
    course = rows.course(tmp_path, "a.seed1")
    assert course["epoch"] == [{"epoch": 1, "valid_perplexity": 12.3457}]
    assert len(course["train"]) == rows.POINTS
    last = 2 * rows.POINTS - 1
    loss, epoch = float(f"{1 / last:.6g}"), float(f"{last / 9:.6g}")
    shown = {"step": 7 * last, "epoch": epoch, "loss": loss, "step_size/h0": last}
    assert course["train"][-1] == shown
    before = (tmp_path / rows.ROWS).read_bytes()
    rows.gather(tmp_path)  # nothing is taken up twice
    assert (tmp_path / rows.ROWS).read_bytes() == before


WORKER = """
import sys, time
from pathlib import Path
from fused_recoder.experiments.jobs import Measurement, work
out, who = Path(sys.argv[1]), sys.argv[2]
(out / f"{who} is ready").touch()
while len(list(out.glob("* is ready"))) < 2:
    time.sleep(0.001)
long = {"text": 9000 * who}
wanted = [Measurement(f"{who}{i}", {}, (), lambda folders, data: long) for i in range(25)]
work(lambda: wanted, out, out, say=lambda line: None)
"""


def test_rows_of_two_processes_do_not_mix(tmp_path):
    """Nor is one lost, though each writes the whole file."""
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [subprocess.Popen([*command, who]) for who in "ab"]
    assert [worker.wait() for worker in workers] == [0, 0]
    names = sorted(row["name"] for row in read_lines(tmp_path / rows.ROWS))
    assert names == sorted(f"{who}{i}" for who in "ab" for i in range(25))


def test_a_full_disk_leaves_the_rows_as_they_were(tmp_path, monkeypatch):
    write_result(tmp_path, "a.seed1")
    before = (tmp_path / rows.ROWS).read_bytes()
    (tmp_path / "b.seed1").mkdir()
    (tmp_path / "b.seed1" / rows.RESULT).write_text('{"status": "finished"}')

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        rows.gather(tmp_path)
    assert (tmp_path / rows.ROWS).read_bytes() == before
    monkeypatch.undo()
    rows.gather(tmp_path)
    assert [row["name"] for row in read_lines(tmp_path / rows.ROWS)] == ["a.seed1", "b.seed1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"name": "b", "status": "fini', " is not valid JSON"),
        ('["b"]', " must be a JSON object, got list"),
        ('{"name": "b"}', " has no 'status'"),
        ('{"name": "a", "status": "finished"}', ": a second row of 'a'"),
        ('{"name": ["b"], "status": "finished"}', ": name must be a str, got ['b']"),
        ('{"name": "b", "status": "finished", "seed": "1"}', ": seed must be an int, got '1'"),
        (
            '{"name": "b", "status": "finished", "test_perplexity": "9"}',
            ": test_perplexity must be a number, got '9'",
        ),
        (
            '{"name": "baseline.seed1", "status": "finished"}',
            ": the row of 'baseline.seed1' has no 'seed'",
        ),
    ],
)
def test_a_broken_row_is_named(text, tmp_path, capsys, line, message):
    write_result(tmp_path, "a")
    with open(tmp_path / rows.ROWS, "a") as file:
        file.write(line + "\n")
    assert reproduce(text, "study", "--report", "--out", tmp_path) == 1
    said = capsys.readouterr().err
    assert f"{str(tmp_path / rows.ROWS)!r}, line 2{message}" in said


@pytest.mark.parametrize("name", [rows.RESULT, rows.CONFIG])
def test_a_broken_file_of_a_job_is_named(text, tmp_path, capsys, name):
    folder = tmp_path / "baseline.seed1"
    folder.mkdir()
    (folder / rows.RESULT).write_text('{"status": "finished"}')
    for content, message in (('{"lr": ', "is not valid JSON"), ("[]", "must be a JSON object")):
        (folder / name).write_text(content)
        assert reproduce(text, "study", "--report", "--out", tmp_path) == 1
        assert f"{folder / name} {message}" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(command.EXPERIMENTS))
def test_an_experiment_that_has_not_begun_has_a_report(text, tmp_path, name):
    assert reproduce(text, name, "--report", "--out", tmp_path) == 0


# Statistics


def test_comparison_with_the_baseline():
    # By hand: means 2 and 5, pooled variance 1, standard error sqrt(2/3), t = -3.674, 4 degrees.
    found = compare([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert found.difference == -3
    assert found.p_better == pytest.approx(0.010656, abs=1e-6)
    assert found.p_better == pytest.approx(found.p_better_welch)  # equal variances and counts
    assert found.effect == pytest.approx(3 * (1 - 3 / 15))
    half_width = 2.776445 * (2 / 3) ** 0.5
    assert found.interval == pytest.approx((-3 - half_width, -3 + half_width), abs=1e-5)
    assert compare([4.0, 5.0, 6.0], [1.0, 2.0, 3.0]).p_better == pytest.approx(
        1 - 0.010656, abs=1e-6
    )


def test_single_runs_have_no_significance():
    found = compare([1.0], [2.0, 3.0])
    assert found.difference == -1.5
    assert found.p_better is None
    assert found.interval is None
    assert str(describe([3.0])) == "3.00"
    assert str(describe([2.0, 4.0])) == "3.00 ± 1.41"


def test_a_seed_is_compared_with_the_same_seed():
    """With the mean of all, a lucky seed would look like a gain."""
    assert compare_seeds({1: 99.0}, {1: 98.0, 2: 104.0}).difference == 1.0
    assert compare_seeds({1: 99.0, 2: 101.0}, {1: 98.0, 2: 104.0}).difference == -1.0
    assert compare_seeds({3: 99.0}, {1: 98.0}) is None


# Tables


def test_tables_hold_the_published_numbers():
    steps = tables.step_size(SMOKE, 1)
    published = {(row.model, row.setting): row.published for row in steps.rows}
    assert published["Baseline", "-"] == (126.60, 4.06)
    assert published["Surprisal", "5"] == (125.33, 1.32)
    assert published["MC Dropout", "0.001"] == (139.61, 7.28)
    samples = tables.samples(SCALES["full"], 1)
    speeds = {(row.model, row.setting): row.published_speed for row in samples.rows}
    assert speeds["Baseline", "-"] == 406.35
    assert speeds["MC Dropout", "50"] == 7.35
    assert speeds["BAE", "25"] == 8.05


@pytest.mark.parametrize("name", tables.TABLES)
@pytest.mark.parametrize("scale", SCALES)
def test_jobs_of_tables_are_consistent(name, scale):
    """A name means the same settings in all tables, so runs are shared."""
    seen = {}
    for other in tables.TABLES:
        for job in tables.TABLES[other](SCALES[scale], 2).jobs():
            if isinstance(job, Training):
                assert seen.setdefault(job.name, job.config) == job.config
    order = [job.name for job in tables.TABLES[name](SCALES[scale], 2).jobs()]
    measured = [j for j in tables.TABLES[name](SCALES[scale], 2).jobs() if j.needs]
    assert all(order.index(need) < order.index(job.name) for job in measured for need in job.needs)


def test_a_table_is_written(tmp_path):
    table = tables.dropout_rate(SMOKE, 2)
    for row in table.rows:
        for i, job in enumerate(row.jobs):
            base = 100.0 if row.model == "Baseline" else 90.0 + 10 * float(row.setting)
            write_result(tmp_path, job.name, test_perplexity=base + i)
    diverged = table.rows[-1].jobs[0].name
    write_result(tmp_path, diverged, status="diverged", error="nan")
    text = report.write_table(table, tmp_path)
    lines = text.splitlines()
    assert lines[4].split("|")[1:4] == [" Baseline ", " - ", " 2 "]
    assert "| MC Dropout | 0.1 | 2 | **91.50 ± 0.71** | -9.00 | 0.003 | 141.32 ± 4.83 |" in lines
    assert "1 (+1 diverged)" in lines[-1]
    latex = (tmp_path / "tables" / "dropout_rate.tex").read_text()
    assert r"\textbf{91.50 $\pm$ 0.71}" in latex
    line = read_lines(tmp_path / "tables" / "dropout_rate.jsonl")[1]
    assert line["perplexities"] == [91.0, 92.0]
    assert line["comparison"]["difference"] == -9


def test_a_run_that_lacks_its_baseline_is_not_compared_with_another(tmp_path):
    table = tables.dropout_rate(SMOKE, 2)
    baseline, model = table.rows[0].jobs, table.rows[1].jobs
    write_result(tmp_path, baseline[0].name, test_perplexity=100.0)
    write_result(tmp_path, baseline[1].name, test_perplexity=110.0)
    write_result(tmp_path, model[1].name, test_perplexity=108.0)
    _, line, *_ = report.lines(table, tmp_path)
    assert line.comparison.difference == -2


# The study


def test_the_study_chooses_on_the_validation_text(tmp_path):
    names = list(study.candidates(SMOKE))
    for i, name in enumerate(names):
        # The test text would choose another one.
        write_result(tmp_path, f"{name}.seed1", valid_perplexity=100 - i, test_perplexity=100 + i)
    best = names[-1]
    assert study.best_candidate(tmp_path, names) == best
    wanted = [job.name for job in study.jobs(SMOKE, tmp_path, 3)]
    assert {f"{best}.seed2", f"{best}.seed3"} <= set(wanted)
    assert {f"{study.DYNAMIC}.{best}.seed{n}" for n in (1, 2, 3)} <= set(wanted)
    assert f"{study.DYNAMIC}.{best}" in study.measured_variants(best)
    forget(tmp_path, f"{best}.seed1")
    assert study.best_candidate(tmp_path, names) is None
    wanted = [job.name for job in study.jobs(SMOKE, tmp_path, 3)]
    assert f"{best}.seed2" not in wanted
    assert {f"{BASELINE}.seed{n}" for n in (1, 2, 3)} <= set(wanted)
    assert {f"{study.HYPOTHESIS}.seed{n}" for n in (1, 2, 3)} <= set(wanted)


def test_the_study_compares_exact_with_detached_gradients(tmp_path):
    names = [job.name for job in study.jobs(SMOKE, tmp_path, 4)]
    assert sorted(n for n in names if n.startswith(study.EXACT)) == [
        f"{study.EXACT}.seed{n}" for n in (1, 2, 3)
    ]
    assert names.index(f"{study.WITHOUT}.seed1") < names.index(f"{BASELINE}.seed2")
    found = {
        name: [{"seed": seed, "test_perplexity": first + seed} for seed in seeds]
        for name, first, seeds in (
            (study.EXACT, 90, (1, 2, 3)),
            (study.HYPOTHESIS, 92, (1, 2, 3, 4)),  # the fourth has no partner
        )
    }
    text = study_report.of_exact_gradients(found)
    assert "92.00 ± 1.00 against 94.00 ± 1.00, difference -2.00" in text


def test_the_studys_single_seeds_are_compared_with_their_own_baseline(tmp_path):
    for seed, perplexity in ((1, 100.0), (2, 104.0)):
        write_result(tmp_path, f"{BASELINE}.seed{seed}", seed=seed, test_perplexity=perplexity)
    write_result(tmp_path, "surprisal-hc-5.seed1", seed=1, test_perplexity=101.0)
    text = study_report.report(SMOKE, tmp_path, 2)
    assert "| surprisal-hc-5 | 1 | - | 101.00 | +1.00 | - | - | - |" in text


def test_the_study_says_where_a_better_point_may_lie(tmp_path):
    write_result(tmp_path, f"{BASELINE}.seed1", seed=1, test_perplexity=100.0)
    found = [[0.1, 1.0, 90.0], [0.1, 2.0, 95.0], [0.2, 1.0, 95.0], [0.2, 2.0, 95.0]]
    name = f"{study.DYNAMIC}.{BASELINE}.seed1"
    write_result(tmp_path, name, seed=1, test_perplexity=80.0, choices=found)
    assert "not bracketed: for 1 of 1 models" in study_report.report(SMOKE, tmp_path, 1)
    better = [[x, y, abs(x - 0.1) + abs(y - 1.0)] for x in (0.0, 0.1, 0.2) for y in (0.5, 1.0, 2.0)]
    write_result(tmp_path, name, seed=1, test_perplexity=80.0, choices=better)
    assert "bracketed" not in study_report.report(SMOKE, tmp_path, 1)


# Grids that grow


def bowl(x, y):
    """Least at 1/16 and 1000; nothing comes of it where both are large."""
    return math.nan if x * y > 2000 else abs(math.log2(16 * x)) + abs(math.log10(y / 1000))


def test_a_grid_grows_until_the_best_point_lies_inside():
    choices = search_grid(bowl, (1.0, 0.5), (1.0, 10.0), extensions=4)
    point, value = best_choice(choices)
    assert (point, value) == ([1 / 16, 1000.0], 0.0)
    assert not edges(choices)
    assert sorted({x for x, _, _ in choices}) == [2.0**-n for n in range(5, -1, -1)]
    assert sorted({y for _, y, _ in choices}) == [10.0**n for n in range(5)]


def test_a_grid_does_not_grow_for_ever():
    choices = search_grid(lambda x: x, (1.0, 2.0), extensions=3)
    assert [x for x, _ in choices] == [1.0, 2.0, 0.5, 0.25, 0.125]
    assert edges(choices) == [(0, False)]
    assert edges(search_grid(lambda x: -x, (1.0, 2.0), extensions=0)) == [(0, True)]


def test_dynamic_evaluation_says_whether_its_optimum_is_bracketed(text, tmp_path, monkeypatch):
    monkeypatch.setattr(adapting, "EXTENSIONS", 1)
    training = Training("a", tiny())
    name = f"{study.DYNAMIC}.a.seed1"
    wanted = [training, Measurement(name, {}, (training.name,), adapting.dynamic_evaluation)]
    _, row = work(lambda: wanted, tmp_path, text, say=quiet)
    assert row["bracketed"] == (not edges(row["choices"]))
    assert [row["lr"], row["decay"], row["tuning_perplexity"]] in row["choices"]
    assert row["tuning_perplexity"] < row["tuning_perplexity_static"]


# The command


def reproduce(*arguments):
    from fused_recoder.cli import main

    with pytest.raises(SystemExit) as end:
        main(["reproduce", *map(str, arguments), "--threads", "1"])
    return end.value.code


def test_many_settings_are_drawn_as_dots(tmp_path):
    table = explore(SMOKE, 2)
    for i, job in enumerate(table.jobs()):
        course = {"train": {}, "epoch": {"epoch": [1, 2], "valid_perplexity": [99 + i, 98 + i]}}
        write_result(tmp_path, job.name, course=course)
    png, svg = plots.draw_table(table, tmp_path)
    assert png.name == "explore.png"
    assert png.stat().st_size > 10_000
    drawn = svg.read_text()
    assert all(f"<!-- {row.setting} -->" in drawn for row in table.rows[1:4])


def test_tables_from_text_to_figures(text, tmp_path, capsys):
    out = tmp_path / "out"
    for _ in range(2):  # the second time nothing is left to do
        assert reproduce(text, "samples", "--scale", "smoke", "--seeds", 2, "--out", out) == 0
    printed = capsys.readouterr().out
    assert printed.count("baseline.seed1 finished") == 1
    assert "## Number of samples" in printed
    found = read_lines(out / rows.ROWS)
    assert len(found) == 2 * (1 + len(SMOKE.samples) + len(SMOKE.members))
    assert all(np.isfinite(row["test_perplexity"]) for row in found)
    for name in ("samples-curves", "samples-uncertainty"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 10_000
        assert (out / "figures" / f"{name}.svg").exists()


def test_the_recoder_is_taken_off_and_put_on(text, tmp_path, monkeypatch):
    """Ablation, of the surprisal model alone to be quick."""
    kept = {key: value for key, value in tables.DYNAMIC.items() if key[0] == tables.SURPRISAL}
    monkeypatch.setattr(tables, "DYNAMIC", kept)
    out = tmp_path / "out"
    wanted = ("ablation", "dynamic_steps", "--scale", "smoke", "--seeds", 1)
    assert reproduce(text, *wanted, "--out", out) == 0

    def test_perplexity(name):
        return result(out, f"{name}.seed1")["test_perplexity"]

    assert test_perplexity("without-recoder.surprisal-hc-5") != test_perplexity("surprisal-hc-5")
    assert test_perplexity("baseline-with.surprisal-hc-5") != test_perplexity("baseline")
    learned = test_perplexity("baseline-with.surprisal-hc-learned")
    assert learned not in (test_perplexity("baseline"), test_perplexity("surprisal-hc-learned"))
    assert (out / "figures" / "dynamic_steps-steps.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "experiment must be of"),
        (["samples", "--seeds", "0"], "--seeds must be at least 1"),
        (["samples", "--epochs", "0"], "--epochs must be at least 1"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(text, tmp_path, capsys, arguments, message):
    assert reproduce(text, *arguments, "--out", tmp_path / "out") == 1
    assert message in capsys.readouterr().err


def test_runs_can_be_shorter_than_their_scale_says(text, tmp_path):
    short = ("theorems", "--scale", "smoke", "--epochs", 1, "--out", tmp_path)
    assert reproduce(text, *short) == 0
    assert result(tmp_path, "baseline.seed1")["epochs"] == 1


def test_every_experiment_is_offered():
    assert {*tables.TABLES, "theorems", "signal_shape", "study", "explore"} <= set(
        command.EXPERIMENTS
    )


def test_a_finished_run_that_was_not_written_down_is_not_trained_again(text, tmp_path, monkeypatch):
    """Killed between the end of the training and its result."""
    job = Training("a", tiny())
    monkeypatch.setattr(Training, "tidy", lambda self, out: None)
    (row,) = work(lambda: [job], tmp_path, text, say=quiet)
    forget(tmp_path, job.name)
    monkeypatch.setattr(Trainer, "step", lambda self: pytest.fail("trained again"))
    (again,) = work(lambda: [job], tmp_path, text, say=quiet)
    assert again["test_perplexity"] == row["test_perplexity"]
