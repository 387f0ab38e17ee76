"""Builds the package against one version of PyTorch, in an environment of its own, and runs the
tests that say whether they fit together: `python -m tools.torch_check 2.15.0 --python python3.13`.

PyTorch comes from the package index as a CUDA build, with some 5 GB of packages; the extension is
built for the CPU. The environment is deleted afterwards, unless it has a `--folder`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .clean_environment import ONLY_PYPI, copy_sources, make_environment, pins, run

BUILD = ("numpy", "setuptools", "wheel", "ninja", "pybind11")
SMOKE = ("exactness", "ops", "module", "language_model", "reader", "build")
# Exactness against the reference, opcheck, torch.compile, saving, packing, training, reading.
CHOSEN = (
    "odd_shapes or float32_error or opcheck or compiled or packed or saved_whole or pickling or "
    "exchanged or nn_lstm or plain_model or training_lowers or one_call_over or another"
)


def check(version: str, python: str, folder: Path) -> None:
    interpreter = make_environment(folder / "env", python)
    run(
        interpreter, "-m", "pip", "install", "--quiet", f"torch=={version}",
        *pins(*BUILD, "pytest"), **ONLY_PYPI,
    )  # fmt: skip
    source = copy_sources(folder / "source")
    run(
        interpreter, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--quiet",
        "-e", source, USE_CUDA="0", **ONLY_PYPI,
    )  # fmt: skip
    run(interpreter, "-m", "fused_recoder", "env", cwd=source)
    tests = [f"tests/test_{name}.py" for name in SMOKE]
    run(interpreter, "-m", "pytest", "-o", "addopts=", "-q", "-k", CHOSEN, *tests, cwd=source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="of PyTorch, e.g. 2.15.0")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to build for")
    parser.add_argument("--folder", type=Path, help="where to build; it is kept for the next time")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        return check(arguments.version, arguments.python, arguments.folder.resolve())
    with tempfile.TemporaryDirectory(prefix="torch-check-") as folder:
        check(arguments.version, arguments.python, Path(folder))


if __name__ == "__main__":
    main()
