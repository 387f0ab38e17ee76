"""Ways to differentiate that are not offered: refused, because they would be silently wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad


def refuse_forward_mode(tensors: Iterable[Tensor | None]) -> None:
    """The engine's operations drop tangents, and a detached recoding gradient has none."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(t is not None and _has_tangent(t) for t in tensors):
        raise NotImplementedError(
            "forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp, jacfwd, hessian) "
            "of a recoding LSTM are not offered: use reverse mode (backward, torch.autograd.grad)"
        )


def _has_tangent(tensor: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.maybe_get_level(tensor) in _levels_of_jvp():
            return True
        tensor = functorch.get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None


def _levels_of_jvp() -> list[int]:
    interpreters = functorch.get_interpreter_stack() or []
    return [i.level() for i in interpreters if i.key() == functorch.TransformType.Jvp]


def refuse_function_transforms(tensors: Iterable[Tensor | None]) -> None:
    """torch.func does not reach into the engine's operations."""
    if torch.compiler.is_compiling() or functorch.peek_interpreter_stack() is None:
        return
    if any(t is not None and functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise NotImplementedError(
            "transforms of torch.func (grad, vjp, jacrev, vmap) do not reach into the fused "
            "engine: use backward or torch.autograd.grad, or fused_recoder.reference.RecodingLSTM, "
            "which torch.func.grad, vjp and jacrev can transform"
        )
