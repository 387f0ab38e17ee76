"""What is handed to others is whole: the source distribution has all that a build needs."""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fused_recoder as fr
from fused_recoder import _build
from tools import make_wheel

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
def copy(tmp_path_factory) -> Path:
    """A clean copy, where no earlier build left a list of files."""
    copy = tmp_path_factory.mktemp("clone")
    for path in tracked():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    return copy


def setup(folder: Path, *command: str) -> str:
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=folder, text=True, capture_output=True
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def sdist(copy) -> Iterator[tarfile.TarFile]:
    setup(copy, "sdist")
    (archive,) = (copy / "dist").glob("*.tar.gz")
    assert archive.name == f"fused_recoder-{fr.__version__}.tar.gz"
    with tarfile.open(archive) as file:
        yield file


def test_a_wheel_says_which_torch_it_is_for(copy):
    """In its name, and in what it requires: the minor version that is here, and no other."""
    minor = _build.minor(torch.__version__)
    setup(copy, "dist_info")
    (info,) = copy.glob(f"fused_recoder-{fr.__version__}+torch{minor}.dist-info")
    metadata = (info / "METADATA").read_text()
    assert f"Requires-Dist: torch=={minor}.*\n" in metadata
    assert f"Version: {fr.__version__}+torch{minor}\n" in metadata


def test_building_fetches_no_torch_of_its_own():
    """An isolated build would compile against it, and then exchange the installed one for it."""
    project = (ROOT / "pyproject.toml").read_text()
    (required,) = re.findall(r"^requires = (.*)$", project, re.M)
    assert "setuptools" in required
    assert "torch" not in required


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.modules['torch'] = None", "compiled against the PyTorch it shall run with"),
        ("sys.modules['setuptools.modified'] = None", "built with setuptools 80 or newer"),
        ("import torch; torch.__version__ = '1.13.1'", "needs torch 2.6 or newer, and found 1.13"),
    ],
    ids=["no torch", "old setuptools", "old torch"],
)
def test_what_cannot_be_built_is_said_in_a_sentence(code, words):
    program = f"import runpy, sys; {code}; runpy.run_path('setup.py')"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True
    )
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_the_source_distribution_has_all_sources(sdist):
    sources = tracked(*PACKAGED)
    assert any(path.endswith(".cu") for path in sources)
    packed = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    assert sources - packed == set()
    assert BESIDE_THEM - packed == set()


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


@pytest.mark.parametrize("name", ["tests", "wheels"])
def test_workflows_of_hosted_ci(name):
    """They can be read, their actions have versions, and what they run exists."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert workflow["name"] == name
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d[\d.]*", step.get("uses", "a/b@v1"))
            assert set(re.findall(r"\bmake ([\w-]+)", step.get("run", ""))) <= targets


def test_the_versions_of_hosted_ci_are_the_range_that_is_claimed():
    """The oldest and the newest PyTorch of setup.py; wheels leave its libraries alone."""
    setup = (ROOT / "setup.py").read_text()
    (claimed,) = re.findall(r"^OLDEST, NEWEST = \((.*?)\), \((.*?)\)", setup, re.M)
    tests, wheels = (
        (ROOT / ".github" / "workflows" / f"{name}.yml").read_text() for name in ("tests", "wheels")
    )
    tested = re.findall(r'torch: "(\d+\.\d+)\.\d+"', tests)
    assert tested == [version.replace(", ", ".") for version in claimed]
    for library in make_wheel.OF_TORCH:
        assert f'--exclude "{library}"' in wheels
