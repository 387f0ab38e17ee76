"""Where the CUDA toolkit is: CUDA_HOME, the nvcc on PATH, or NVIDIA's packages on PyPI."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path


def _home_of(nvcc: str) -> Path | None:
    """The toolkit that this nvcc belongs to; it may be a wrapper script in another folder."""
    result = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], text=True,
                            capture_output=True)  # fmt: skip
    top = re.search(r"^#\$ TOP=(.+)$", result.stderr, re.MULTILINE)
    return Path(top.group(1)).resolve() if top else None


def packaged_toolkits() -> list[Path]:
    """Where NVIDIA's packages on PyPI put their files, newest version first."""
    package = importlib.util.find_spec("nvidia")  # a namespace package
    folders = package.submodule_search_locations if package else []
    return [home for folder in folders for home in sorted(Path(folder).glob("cu[0-9]*"))[::-1]]


def _candidates():
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable])
    if nvcc := shutil.which("nvcc"):
        yield _home_of(nvcc)
    yield from packaged_toolkits()


def _first(relative: str) -> Path | None:
    homes = (home for home in _candidates() if home is not None)
    return next((home / relative for home in homes if (home / relative).exists()), None)


def find_include() -> Path | None:
    """The folder of cuda_runtime_api.h, or None."""
    header = _first("include/cuda_runtime_api.h")
    return header.parent if header else None


def find_nvcc() -> Path | None:
    return _first("bin/nvcc")


def find_nvdisasm() -> Path | None:
    return _first("bin/nvdisasm")
