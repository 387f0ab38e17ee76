"""What PyTorch needs to know about the ops of `torch.ops.fused_recoder` beside their kernels: their
shapes (fake kernels, for `torch.compile`) and their derivatives. Schemas: `csrc/ops/bindings.cpp`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _C
from .spec import decode

ops = torch.ops.fused_recoder


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_devices(like: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Mixed devices end up here, not in a kernel, if one of them is "meta"."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != like.device:
            raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")


# ------------------------------------------------------------------------------- recode_forward


class ForwardArguments(NamedTuple):
    """The arguments of `recode_forward`, in order. Shapes: `csrc/engine/problem.h`."""

    input: Tensor
    h0: Tensor
    c0: Tensor
    weights: list[Tensor]
    decoder_weight: Tensor | None
    decoder_bias: Tensor | None
    signal: list[Tensor]
    step: list[Tensor]
    gate: Tensor | None
    targets: Tensor | None
    labels: Tensor | None
    mask: Tensor | None
    lengths: Tensor | None
    seed: Tensor | None
    spec: str


class ForwardResult(NamedTuple):
    """What it returns. Shapes: `csrc/engine/forward.h`."""

    output: Tensor
    h_n: Tensor
    c_n: Tensor
    nll: Tensor
    objective: Tensor
    delta: Tensor
    delta_after: Tensor
    step_size: Tensor
    grad_norm: Tensor
    recoded: Tensor
    saved: list[Tensor]


def _is_ensemble(weight: Tensor | None) -> bool:
    return weight is not None and weight.dim() == 3


def _saved_tensors(a: ForwardArguments, sizes: dict[str, int], dtype: torch.dtype) -> list[Tensor]:
    """What `csrc/cell/saved.cpp` says is kept, with the dimensions filled in."""
    ensemble = _is_ensemble(a.decoder_weight)
    layout = _C.saved_layout(a.spec, bool(sizes["L"] > 1), ensemble, a.decoder_bias is not None)
    like = {"decoder_weight": a.decoder_weight, "decoder_bias": a.decoder_bias}

    def shape(symbols: str) -> list[int]:
        if symbols in like:
            return list(like[symbols].shape)
        return [sizes[symbol] for symbol in symbols.split()]

    return [
        a.input.new_empty(shape(symbols), dtype=torch.int64 if is_index else dtype)
        for _, symbols, is_index in layout
    ]


@torch.library.register_fake("fused_recoder::recode_forward")
def _(*arguments):
    a = ForwardArguments(*arguments)
    spec = decode(a.spec)
    _check_devices(
        a.input,
        # A seed may have been drawn by the host.
        **{n: t for n, t in a._asdict().items() if isinstance(t, Tensor) and n != "seed"},
        **{f"weights[{i}]": w for i, w in enumerate(a.weights)},
    )
    T, B, _ = a.input.shape
    L, R, H = a.h0.shape
    S = int(spec.recode_h) + int(spec.recode_c)
    ensemble = _is_ensemble(a.decoder_weight)
    K = a.decoder_weight.shape[0] if ensemble else 1
    sizes = {"T": T, "B": B, "R": R, "H": H, "G": 4 * H, "L": L, "L-1": L - 1, "S": S, "K": K}
    compute = _accumulate_dtype(a.input.dtype)

    def accumulated(present, *shape, dtype=compute):
        return a.input.new_empty(shape if present else (0,), dtype=dtype)

    traced = spec.trace and spec.signal != "none" and S > 0
    return (
        a.input.new_empty(T, R, H),
        a.h0.new_empty(L, R, H),
        a.h0.new_empty(L, R, H),
        accumulated(spec.loss, T, B),
        accumulated(spec.loss and ensemble, T, B),
        accumulated(True, T, B),
        accumulated(traced, T, B),
        accumulated(traced, L, S, T, B),
        accumulated(traced, L, S, T, B),
        accumulated(traced, T, B, dtype=torch.uint8),
        _saved_tensors(a, sizes, compute) if spec.save else [],
    )


def _save_for_recode_backward(ctx, inputs, output):
    a, out = ForwardArguments(*inputs), ForwardResult(*output)
    spec = decode(a.spec)
    ctx.set_materialize_grads(False)
    constant = [out.delta, out.delta_after, out.step_size, out.grad_norm, out.recoded, *out.saved]
    constant += [] if spec.loss else [out.nll]
    constant += [] if out.objective.numel() > 0 else [out.objective]
    ctx.mark_non_differentiable(*constant)
    ctx.spec = spec
    # What only the gradient of the loss needs is not kept without one; gate and mask are of no
    # more use.
    kept = a._replace(gate=None, mask=None)
    ctx.output = None
    tensors = [*out.saved, *([out.output] if spec.loss else [])]
    ctx.num_saved = len(out.saved)
    ctx.layout = []
    for argument in kept[:-1]:
        items = argument if isinstance(argument, (list, tuple)) else [argument]
        ctx.layout.append(
            len(items) if isinstance(argument, (list, tuple)) else argument is not None
        )
        tensors += [t for t in items if t is not None]
    ctx.save_for_backward(*tensors)


def _saved_arguments(ctx) -> tuple[list[Tensor], Tensor | None, ForwardArguments]:
    """What `_save_for_recode_backward` kept: saved tensors, output, arguments."""
    tensors = list(ctx.saved_tensors)
    saved, rest = tensors[: ctx.num_saved], tensors[ctx.num_saved :]
    output = rest.pop(0) if ctx.spec.loss else None
    arguments = []
    for entry in ctx.layout:
        if entry is True or entry is False:
            arguments.append(rest.pop(0) if entry else None)
        else:
            arguments.append([rest.pop(0) for _ in range(entry)])
    return saved, output, ForwardArguments(*arguments, ctx.spec.encode())


def _recode_backward(ctx, grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective, *_):
    spec = ctx.spec
    if not spec.save:
        raise RuntimeError(
            "fused_recoder::recode_forward was called with save=False, so there is nothing to "
            "differentiate"
        )
    saved, output, a = _saved_arguments(ctx)
    if all(g is None for g in (grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective)):
        grad_h_n = torch.zeros_like(a.h0)
    spec = spec.replace(input_grad=ctx.needs_input_grad[0])
    (
        grad_input, grad_h0, grad_c0, grad_weights, grad_weight, grad_bias, grad_step,
    ) = ops.recode_backward(
        grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective, saved, output, a.input, a.h0,
        a.c0, a.weights, a.decoder_weight, a.decoder_bias, a.signal, a.step, a.targets, a.labels,
        a.lengths, a.seed, spec.encode(),
    )  # fmt: skip
    gradients: dict = dict.fromkeys(ForwardArguments._fields)
    gradients |= {
        "input": grad_input if spec.input_grad else None,
        "h0": grad_h0,
        "c0": grad_c0,
        "weights": grad_weights,
        "decoder_weight": grad_weight if grad_weight.numel() > 0 else None,
        "decoder_bias": grad_bias if grad_bias.numel() > 0 else None,
        "signal": [None] * len(a.signal),
        "step": (
            [g.to(t.dtype) for g, t in zip(grad_step, a.step, strict=True)]
            if grad_step
            else [None] * len(a.step)
        ),
    }
    return tuple(gradients.values())


torch.library.register_autograd(
    "fused_recoder::recode_forward", _recode_backward, setup_context=_save_for_recode_backward
)


@torch.library.register_fake("fused_recoder::recode_backward")
def _(
    grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective, saved, output, input, h0, c0,
    weights, decoder_weight, decoder_bias, signal, step, targets, labels, lengths, seed, spec,
):  # fmt: skip
    wanted = decode(spec)
    recodes = wanted.signal != "none" and (wanted.recode_h or wanted.recode_c)
    of_loss = grad_nll is not None or grad_objective is not None
    of_decoder = wanted.decoder_grad and (of_loss or (wanted.exact and recodes))
    compute = _accumulate_dtype(input.dtype)

    def like(tensor: Tensor | None, present: bool) -> Tensor:
        return input.new_empty(tensor.shape if present and tensor is not None else (0,))

    return (
        like(input, wanted.input_grad),
        torch.empty_like(h0),
        torch.empty_like(c0),
        [torch.empty_like(w) for w in weights],
        like(decoder_weight, of_decoder),
        like(decoder_bias, of_decoder),
        [torch.empty_like(t, dtype=compute) for t in step] if wanted.step_grad and recodes else [],
    )


# ----------------------------------------------------------------------------- signal_gradient


@torch.library.register_fake("fused_recoder::signal_gradient")
def _(hidden, weight, bias, targets, spec):
    _check_devices(hidden, weight=weight, bias=bias, targets=targets)
    return (
        hidden.new_empty(hidden.shape[0], dtype=_accumulate_dtype(hidden.dtype)),
        hidden.new_empty(hidden.shape),
    )


def _save_for_signal_gradient_backward(ctx, inputs, output):
    hidden, weight, bias, targets, ctx.spec = inputs
    ctx.has_bias, ctx.has_targets = bias is not None, targets is not None
    ctx.save_for_backward(hidden, weight, *[t for t in (bias, targets) if t is not None])


def _signal_gradient_backward(ctx, delta_bar, grad_bar):
    hidden, weight, *rest = ctx.saved_tensors
    bias = rest.pop(0) if ctx.has_bias else None
    targets = rest.pop(0) if ctx.has_targets else None
    hidden_bar, weight_bar, bias_bar = ops.signal_gradient_backward(
        delta_bar, grad_bar, hidden, weight, bias, targets, ctx.spec
    )
    return hidden_bar, weight_bar, bias_bar if ctx.has_bias else None, None, None


torch.library.register_autograd(
    "fused_recoder::signal_gradient",
    _signal_gradient_backward,
    setup_context=_save_for_signal_gradient_backward,
)


@torch.library.register_fake("fused_recoder::signal_gradient_backward")
def _(delta_bar, grad_bar, hidden, weight, bias, targets, spec):
    return torch.empty_like(hidden), torch.empty_like(weight), weight.new_empty(weight.shape[0])


# ------------------------------------------------------------------------------- dropout_mask


@torch.library.register_fake("fused_recoder::dropout_mask")
def _(seed, stream, sample, p, time, steps, rows, units, dtype):
    return seed.new_empty(steps, rows, units, dtype=dtype)


# ------------------------------------------------------------------ derivatives not on offer


def _refuse_further_derivative(op: str, instead: str):
    def backward(ctx, *_):
        raise RuntimeError(
            f"{op} cannot be differentiated again by the fused engine; use {instead}"
        )

    torch.library.register_autograd(f"fused_recoder::{op}", backward)


_refuse_further_derivative(
    "recode_backward",
    "fused_recoder.reference.RecodingLSTM, which is plain PyTorch, for further derivatives",
)
_refuse_further_derivative(
    "signal_gradient_backward", "plain PyTorch operations, for third derivatives"
)
