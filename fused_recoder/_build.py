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
        raise ImportError(
            "fused_recoder was built for another PyTorch than the running one "
            f"({torch.__version__}): rebuild it with `{REBUILD}`. The loader said: {error}"
        ) from error
    built, running = _C.torch_version, torch.__version__.split("+")[0]
    if built != running:
        raise ImportError(
            f"fused_recoder was built against torch {built}, but torch {running} is running: "
            f"rebuild it with `{REBUILD}`."
        )
