"""Loads the compiled extension, or says in one sentence why it cannot and what to do."""

from __future__ import annotations

import torch

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def check() -> None:
    """Compares the torch this was built against with the one that is running."""
    try:
        from . import _C
    except ImportError as error:
        if "_C" in str(error) and "cannot import name" in str(error):
            raise ImportError(
                f"fused_recoder is not built here: run `{REBUILD}` in its folder."
            ) from error
        raise ImportError(f"{_refusal('another one')} The loader said: {error}") from error
    built = minor(_C.torch_version)
    if built != minor(torch.__version__):
        raise ImportError(_refusal(f"torch {built}"))


def minor(version: str) -> str:
    """`2.13` of `2.13.0+cpu`: within it extensions stay compatible."""
    return ".".join(version.split(".")[:2])


def _refusal(built: str) -> str:
    running = torch.__version__
    return (
        f"torch {running} is running, but fused_recoder was built against {built}. Either build it "
        f"for the running one, with `{REBUILD}` in its folder, or install a wheel of it that has "
        f"torch{minor(running)} in its name; both leave torch as it is."
    )
