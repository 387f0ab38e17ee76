"""What is handed to others is whole: the source distribution has all that a build needs."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGED = ("csrc", "fused_recoder")
BESIDE_THEM = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff"}


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *folders], cwd=ROOT, text=True, capture_output=True
    )
    if listed.returncode != 0:
        pytest.skip("needs a git clone")
    return {path for path in listed.stdout.split("\0") if path and (ROOT / path).exists()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> set[str]:
    """The paths in a source distribution of a clean copy, where no earlier build left a list."""
    copy = tmp_path_factory.mktemp("clone")
    for path in tracked():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"], cwd=copy, text=True, capture_output=True
    )
    assert made.returncode == 0, made.stderr
    (archive,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        return {member.name.partition("/")[2] for member in file if member.isfile()}


def test_the_source_distribution_has_all_sources(sdist):
    sources = tracked(*PACKAGED)
    assert any(path.endswith(".cu") for path in sources)
    assert sources - sdist == set()
    assert BESIDE_THEM - sdist == set()


def test_the_hooks_before_a_commit_are_the_linters():
    """The same tools that `make lint` runs, each by its own command; nothing is downloaded."""
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    commands = [hook["entry"] for hook in repository["hooks"]]
    assert all(hook["language"] == "system" for hook in repository["hooks"])
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for line in lint.splitlines()[1:]:
        tool = line.replace("$(BIN)", ".venv/bin").split("$(PY)")[0].split("$(CPP)")[0].split()
        assert any(command.split()[: len(tool)] == tool for command in commands), line
