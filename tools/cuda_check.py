"""Builds the extension for real: an environment with the CUDA build of PyTorch (about 5 GB), nvcc,
linker, import, and what can be asserted without a GPU. `python -m tools.cuda_check [--folder DIR]`;
the folder lies outside of the repository and is used again by the next run."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from . import cuda_toolkit
from .clean_environment import ONLY_PYPI, ROOT, copy_sources, make_environment, pins, run

DEFAULT_FOLDER = Path.home() / ".cache" / "fused-recoder" / "cuda-check"
ARCHITECTURES = "8.0 9.0+PTX"
BUILD_REQUIREMENTS = ("torch", "numpy", "setuptools", "wheel", "ninja", "pybind11")
NVCC = ["nvidia-cuda-nvcc==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-crt==13.0.88",
        "nvidia-cuda-cccl==13.0.85"]  # fmt: skip


def make_cuda_environment(folder: Path) -> Path:
    """A Python with the CUDA build of torch and, where there is no nvcc, NVIDIA's package of it."""
    python = make_environment(folder / "env", sys.executable)
    nvcc = NVCC if cuda_toolkit.find_nvcc() is None else []
    run(python, "-m", "pip", "install", "--quiet", *pins(*BUILD_REQUIREMENTS), *nvcc, **ONLY_PYPI)
    return python


def build(python: Path, source: Path) -> None:
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        text=True, capture_output=True, check=True,
    ).stdout.strip()  # fmt: skip
    # Headers and libraries that PyTorch's own depend on (cuBLAS and others) come with it.
    with_torch = Path(packages, "nvidia", "cu13")
    nvcc = cuda_toolkit.find_nvcc() or with_torch / "bin" / "nvcc"
    run(
        python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--quiet",
        "-e", source,
        FORCE_CUDA="1", CUDA_HOME=str(nvcc.parent.parent), TORCH_CUDA_ARCH_LIST=ARCHITECTURES,
        CPATH=str(with_torch / "include"), LIBRARY_PATH=str(with_torch / "lib"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    folder = parser.parse_args().folder.resolve()
    if folder.is_relative_to(ROOT):
        sys.exit("--folder must lie outside of the repository")
    folder.mkdir(parents=True, exist_ok=True)
    python = make_cuda_environment(folder)
    source = copy_sources(folder / "source")
    build(python, source)
    run(python, source / "tools" / "cuda_facts.py")


if __name__ == "__main__":
    main()
