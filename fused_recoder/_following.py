"""Whoever replaces the decoder of a model replaces it for the recoder, too."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ._module import RecodingLSTMBase


def follow(owner: nn.Module, name: str, new: nn.Module | None) -> None:
    """PyTorch calls it before `owner.name = new`, whatever these are."""
    old = owner._modules.get(name)
    # The modules of a replica (nn.DataParallel) are set while it still has the original's RNN.
    if old is None or new is None or new is old or getattr(owner, "_is_replica", False):
        return
    for module in owner.modules():
        if isinstance(module, RecodingLSTMBase) and module.decoder is old:
            module.decoder = new


def register() -> None:
    """Called once, at import."""
    register_module_module_registration_hook(follow)
