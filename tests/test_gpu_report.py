"""`make gpu-report`, as far as it goes without a GPU, and its notebook."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import gpu_report
from tools.gpu_report import Part

ROOT = Path(__file__).parent.parent


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Runs these parts in the place of the real ones: (exit code, report)."""
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "build" / "report.md")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)

    def run(*parts, gpu=None):
        monkeypatch.setattr(gpu_report, "parts", lambda has_gpu: list(parts))
        monkeypatch.setattr(gpu_report.torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(gpu_report.torch.cuda, "get_device_name", lambda: gpu)
        monkeypatch.setattr(gpu_report, "has_kernels", lambda: True)
        return gpu_report.main(), gpu_report.REPORT.read_text()

    return run


def test_without_a_gpu_it_says_so_plainly(report):
    code, text = report(
        Part("Build", python("print('built')"), needs_gpu=False),
        Part("Tests", python("raise SystemExit('must not run')")),
    )
    assert code == 0
    assert "**There is no CUDA device here. Nothing below ran on a GPU.**" in text
    assert "| Build | done in" in text
    assert "| Tests | not run: there is no CUDA device here |" in text
    assert "```\nbuilt\n```" in text


def test_what_fails_is_reported_and_the_rest_is_done(report, tmp_path):
    page = tmp_path / "results.md"
    code, text = report(
        Part("Build", python("print('line\\n' * 99, 'no nvcc'); raise SystemExit(3)")),
        Part("Absent", ["no-such-command-here"]),
        Part("Silent", python("pass"), leaves=tmp_path / "nothing.md"),
        Part("Benchmarks", python(f"open({str(page)!r}, 'w').write('### train\\n| a |\\n')"),
             leaves=page),
        gpu="Some GPU",
    )  # fmt: skip
    assert code == 1
    assert "GPU: Some GPU." in text
    assert "| Build | **failed** with exit code 3 |" in text
    assert "no nvcc\n```" in text
    assert text.count("line\n") == gpu_report.LINES_OF_A_FAILURE - 1
    assert "| Absent | **failed** with exit code 127 |" in text
    assert "| Silent | **failed** with exit code 1 |" in text
    assert "nothing.md" in text
    assert "| Benchmarks | done in" in text
    assert "##### train\n| a |" in text
    assert sys.executable not in text


def test_an_interrupted_run_leaves_what_it_has_found(report, monkeypatch):
    def interrupted(has_gpu):
        raise KeyboardInterrupt

    second = Part("Tests", [])
    monkeypatch.setattr(second, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report(Part("Build", python("print('built')"), needs_gpu=False), second)
    text = gpu_report.REPORT.read_text()
    assert "| Build | done in" in text
    assert "| Tests | not reached |" in text


def test_its_commands_exist():
    for has_gpu in (True, False):
        titles = [part.title for part in gpu_report.parts(has_gpu)]
        assert titles[:4] == ["Hardware", "Build", "Environment", "Tests"]
        assert len(titles) == 4 + len(gpu_report.PRECISIONS)
    *_, benchmark = gpu_report.parts(True)
    assert benchmark.leaves.parent.relative_to(gpu_report.ROOT) == Path(benchmark.command[-1])
    result = subprocess.run(benchmark.command, cwd=ROOT, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr  # its flags are known
    assert "There is no CUDA device here" in result.stdout
    rules = subprocess.run(["make", "-n", "gpu-report"], cwd=ROOT, text=True, capture_output=True)
    assert "python -m tools.gpu_report" in rules.stdout


def test_the_notebook_makes_the_report(tmp_path, monkeypatch):
    """Its cells run, with make in the place of somebody's GPU."""
    notebook = json.loads((ROOT / "examples" / "gpu_report.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["accelerator"]) == (4, "GPU")
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    clone = tmp_path / "fused_recoder-main"
    (clone / "tools").mkdir(parents=True)
    (clone / "tools" / "gpu_report.py").touch()
    (clone / "Makefile").write_text(
        "gpu-report:\n\tmkdir -p build; echo done > build/gpu-report.md\n"
    )
    subprocess.run(["tar", "czf", "code.tar.gz", clone.name], cwd=tmp_path, check=True)
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "code.tar.gz").rename(work / "code.tar.gz")
    monkeypatch.chdir(work)
    shown = []
    display = SimpleNamespace(display=lambda *what: shown.extend(what), FileLink=str, Markdown=str)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    namespace = {}
    for cell in cells:
        exec(cell, namespace)
    assert shown[1] == "done\n"
