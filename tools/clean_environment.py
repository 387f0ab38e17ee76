"""Environments that have nothing of this one, and copies of what is under version control."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# pip must not find a local CPU build of torch instead.
ONLY_PYPI = {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(p) for p in command], check=True, cwd=cwd, env=os.environ | environment)


def make_environment(folder: Path, python: str) -> Path:
    """The interpreter of a virtual environment of `python`, made where there is none."""
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        run(python, "-m", "venv", folder)
    return interpreter


def pins(*packages: str) -> list[str]:
    """What `requirements.txt` says of these packages."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in packages]


def copy_sources(folder: Path) -> Path:
    """The files under version control, as they are now, and none that were deleted."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)  # keeps time stamps: no needless compiling
    return folder
