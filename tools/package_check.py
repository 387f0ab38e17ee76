"""Source distribution and wheel, built and installed as others would, in environments of their own:
`python -m tools.package_check`. Compiles once; takes as long as a build and two installations."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from .clean_environment import copy_sources, make_environment, pins, run
from .make_wheel import make_wheel

TRAINING_STEP = """
import torch
import fused_recoder as fr
lm = fr.RecodingLanguageModel(50, 8, 8, 2, signal="nll", step="learned")
tokens = torch.randint(50, (6, 3))
lm(tokens[:-1], tokens[1:]).loss.backward()
assert "site-packages" in fr.__file__, fr.__file__
assert torch.isfinite(lm.rnn.step.rho.grad).all()
lm.eval().reader().feed(torch.tensor([1]))
"""
ANOTHER_TORCH = "import torch; torch.__version__ = '2.99.0'; import fused_recoder"


def says(words: str, *command: str | Path, cwd: Path) -> None:
    """The command fails, and its output has these words."""
    print("+", *command, flush=True)
    result = subprocess.run(command, cwd=cwd, text=True, capture_output=True)
    said = result.stdout + result.stderr
    if result.returncode == 0 or words not in " ".join(said.split()):
        sys.exit(f"should have failed with {words!r}, but said:\n{said}")


def torch_version(python: Path, folder: Path) -> str:
    command = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.check_output(command, text=True, cwd=folder)


def check(folder: Path) -> None:
    source = copy_sources(folder / "source")
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    wheel = make_wheel(sdist, folder / "wheels")
    python = make_environment(folder / "env", sys.executable)
    run(python, "-m", "pip", "install", "--quiet", *pins("torch", "numpy"))
    before = torch_version(python, folder)
    # Without --no-build-isolation: one clear sentence, and nothing is exchanged.
    says("pip install --no-build-isolation", python, "-m", "pip", "install", sdist, cwd=folder)
    run(python, "-m", "pip", "install", "--quiet", wheel)
    assert torch_version(python, folder) == before
    run(python, "-c", TRAINING_STEP, cwd=folder)
    run(python, "-m", "fused_recoder", "env", cwd=folder)
    says("packages are missing: pip install 'fused-recoder[train]'",
         python.parent / "fused-recoder", "train", "x", "--out", "y", cwd=folder)  # fmt: skip
    says("torch 2.99.0 is running", python, "-c", ANOTHER_TORCH, cwd=folder)
    print(f"{sdist.name} and {wheel.name} work")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="package-check-") as folder:
        check(Path(folder))


if __name__ == "__main__":
    main()
