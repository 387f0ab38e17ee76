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


def has_cuda_kernels() -> bool:
    """Whether this was built with CUDA."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("fused_recoder::recode_forward", "CUDA")


def why_gpus_stay_idle() -> str | None:
    """What keeps this build from GPUs that torch sees; None if nothing does or there is none."""
    if not torch.cuda.is_available() or has_cuda_kernels():
        return None
    from . import _C

    return (
        f"fused_recoder has no CUDA kernels here (built for: {_C.build_decision}). Build it again "
        f"where the CUDA toolkit is found: `CUDA_HOME=... {REBUILD}`"
    )
