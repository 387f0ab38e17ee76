"""What PyTorch needs to know about the ops of `torch.ops.fused_recoder` beside their kernels: their
shapes (fake kernels, for `torch.compile`) and their derivatives. Schemas: `csrc/bindings.cpp`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    """The arguments of `recode_forward`, in order. Shapes: `csrc/engine/sequence.h`."""

    input: Tensor
    h0: Tensor
    c0: Tensor
    weights: list[Tensor]
    decoder_weight: Tensor | None
    decoder_bias: Tensor | None
    classifiers: list[Tensor]
    step: Tensor
    step_network: list[Tensor]
    gate: Tensor | None
    targets: Tensor | None
    labels: Tensor | None
    mask: Tensor | None
    lengths: Tensor | None
    seed: Tensor | None
    signal: str = "none"
    argmax: bool = False
    samples: int = 1
    sample_p: float = 0.0
    mean_logits: bool = False
    classifier_states: tuple[int, ...] = ()
    recode_h: bool = True
    recode_c: bool = True
    dropout: float = 0.0
    output_dropout: float = 0.0
    step_kind: str = "given"
    shrink: float = 0.5
    trials: int = 1
    time: int = 0
    loss: bool = False
    exact: bool = False
    save: bool = False
    save_step_grads: bool = False
    save_decoder_grads: bool = False
    trace: bool = False


class ForwardResult(NamedTuple):
    """What it returns. Shapes: `csrc/engine/ops.h`."""

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


@torch.library.register_fake("fused_recoder::recode_forward")
def _(*arguments):
    a = ForwardArguments(*arguments)
    _check_devices(
        a.input,
        # A seed may have been drawn by the host.
        **{n: t for n, t in a._asdict().items() if isinstance(t, Tensor) and n != "seed"},
        **{f"weights[{i}]": w for i, w in enumerate(a.weights)},
    )
    T, B, _ = a.input.shape
    L, R, H = a.h0.shape
    S = int(a.recode_h) + int(a.recode_c)
    recodes = a.signal != "none" and S > 0
    ensemble = a.decoder_weight is not None and a.decoder_weight.dim() == 3
    between_layers = a.sample_p if a.signal == "variational" else a.dropout
    compute = _accumulate_dtype(a.input.dtype)

    def accumulated(present, *shape, dtype=compute):
        return a.input.new_empty(shape if present else (0,), dtype=dtype)

    saved = []
    if a.save:
        exact = a.exact and recodes
        of_gradient = exact and a.signal != "classifier"
        gold = a.signal in ("nll", "surprisal")
        # The backward pass makes the logits of a gold signal again, and its loss's gradients.
        loss = a.loss and not (exact and gold and not a.argmax)
        decoder_grads = loss and a.save_decoder_grads
        saved = [
            accumulated(True, L, T, R, 4 * H),
            accumulated(True, L, T, R, H),
            accumulated(True, L, T, R, H),
            accumulated(L > 1 and ((recodes and a.recode_h) or between_layers > 0), L - 1, T, R, H),
            accumulated(recodes and a.save_step_grads and not of_gradient, L, S, T, R, H),
            accumulated(loss, T, R, H),
            accumulated(decoder_grads, *(a.decoder_weight.shape if decoder_grads else ())),
            accumulated(
                decoder_grads and a.decoder_bias is not None,
                *(a.decoder_weight.shape[:-1] if decoder_grads else ()),
            ),
            accumulated(
                a.loss and ensemble, *((a.decoder_weight.shape[0], T, B) if ensemble else ())
            ),
            accumulated(of_gradient, L, T, R, H),
            accumulated(exact, L, S, T, R),
            accumulated(
                of_gradient and gold, T, B, dtype=torch.int64 if of_gradient and gold else compute
            ),
        ]
    traced = a.trace and recodes
    return (
        a.input.new_empty(T, R, H),
        a.h0.new_empty(L, R, H),
        a.h0.new_empty(L, R, H),
        accumulated(a.loss, T, B),
        accumulated(a.loss and ensemble, T, B),
        accumulated(True, T, B),
        accumulated(traced, T, B),
        accumulated(traced, L, S, T, B),
        accumulated(traced, L, S, T, B),
        accumulated(traced, T, B, dtype=torch.uint8),
        saved,
    )


def _save_for_recode_backward(ctx, inputs, output):
    a, out = ForwardArguments(*inputs), ForwardResult(*output)
    ctx.set_materialize_grads(False)
    constant = [out.delta, out.delta_after, out.step_size, out.grad_norm, out.recoded, *out.saved]
    constant += [] if a.loss else [out.nll]
    constant += [] if out.objective.numel() > 0 else [out.objective]
    ctx.mark_non_differentiable(*constant)
    ctx.saved_anything = a.save
    ctx.num_weights, ctx.num_network = len(a.weights), len(a.step_network)
    ctx.num_classifiers = len(a.classifiers)
    ctx.has_step_grad = a.save_step_grads and a.signal != "none"
    ctx.has_decoder_grads = a.save_decoder_grads
    ctx.exact = a.exact and a.signal != "none" and (a.recode_h or a.recode_c)
    ctx.options = (
        a.signal, a.argmax, a.samples, a.sample_p, a.mean_logits, a.classifier_states, a.recode_h,
        a.recode_c, a.dropout, a.output_dropout, a.step_kind, a.time, ctx.exact,
    )  # fmt: skip
    # What only the gradient of the loss or of the recoding gradient needs is not kept without one.
    decoder = (a.decoder_weight, a.decoder_bias) if a.loss or ctx.exact else (None, None)
    of_loss = (a.targets, out.output) if a.loss else (None, None)
    optional = (*decoder, *of_loss, a.labels if ctx.exact else None, a.lengths, a.seed)
    ctx.present = [t is not None for t in optional]
    kept = [t for t in optional if t is not None]
    ctx.save_for_backward(
        a.input, a.h0, a.c0, a.step, *kept, *a.weights, *a.step_network, *a.classifiers, *out.saved
    )


def _recode_backward(ctx, grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective, *_):
    if not ctx.saved_anything:
        raise RuntimeError(
            "fused_recoder::recode_forward was called with save=False, so there is nothing to "
            "differentiate"
        )
    input, h0, c0, step, *rest = ctx.saved_tensors
    decoder_weight, decoder_bias, targets, hidden, labels, lengths, seed = (
        rest.pop(0) if present else None for present in ctx.present
    )
    weights, rest = rest[: ctx.num_weights], rest[ctx.num_weights :]
    step_network, rest = rest[: ctx.num_network], rest[ctx.num_network :]
    classifiers, saved = rest[: ctx.num_classifiers], rest[ctx.num_classifiers :]
    of_loss = grad_nll is not None or grad_objective is not None
    with_decoder = ctx.has_decoder_grads and (of_loss or (ctx.exact and decoder_weight is not None))
    if all(g is None for g in (grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective)):
        grad_h_n = torch.zeros_like(h0)
    (
        grad_input, grad_h0, grad_c0, grad_weights, grad_weight, grad_bias, grad_step, grad_network,
    ) = ops.recode_backward(
        grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective, saved, input, h0, c0, weights,
        decoder_weight, decoder_bias, classifiers, step, step_network, targets, labels, lengths,
        seed, hidden, *ctx.options, ctx.needs_input_grad[0], ctx.has_step_grad, with_decoder,
    )  # fmt: skip
    predicted = ctx.has_step_grad and ctx.num_network > 0
    gradients = dict.fromkeys(ForwardArguments._fields)
    gradients |= {
        "input": grad_input if ctx.needs_input_grad[0] else None,
        "h0": grad_h0,
        "c0": grad_c0,
        "weights": grad_weights,
        # Without a loss nothing, unless the recoding gradient is differentiated, too.
        "decoder_weight": grad_weight if with_decoder else None,
        "decoder_bias": grad_bias if with_decoder and decoder_bias is not None else None,
        "classifiers": [None] * ctx.num_classifiers,
        # Autograd takes an empty list of ints for an empty list of tensors.
        "classifier_states": [] if ctx.num_classifiers == 0 else None,
        "step": grad_step.to(step.dtype) if ctx.has_step_grad and not predicted else None,
        "step_network": grad_network if predicted else [None] * ctx.num_network,
    }
    return tuple(gradients.values())


torch.library.register_autograd(
    "fused_recoder::recode_forward", _recode_backward, setup_context=_save_for_recode_backward
)


@torch.library.register_fake("fused_recoder::recode_backward")
def _(
    grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective, saved, input, h0, c0, weights,
    decoder_weight, decoder_bias, classifiers, step, step_network, targets, labels, lengths, seed,
    output, signal, argmax, samples, sample_p, mean_logits, classifier_states, recode_h, recode_c,
    dropout, output_dropout, step_kind, time, exact, need_input_grad, need_step_grad,
    need_decoder_grad,
):  # fmt: skip
    predicted = step_kind == "predicted"
    return (
        torch.empty_like(input) if need_input_grad else input.new_empty(0),
        torch.empty_like(h0),
        torch.empty_like(c0),
        [torch.empty_like(w) for w in weights],
        input.new_empty(decoder_weight.shape if need_decoder_grad else (0,)),
        input.new_empty(
            decoder_bias.shape if need_decoder_grad and decoder_bias is not None else (0,)
        ),
        input.new_empty(
            step.shape if need_step_grad and not predicted else (0,),
            dtype=_accumulate_dtype(input.dtype),
        ),
        [torch.empty_like(w) for w in step_network] if need_step_grad and predicted else [],
    )


# ----------------------------------------------------------------------------- signal_gradient


@torch.library.register_fake("fused_recoder::signal_gradient")
def _(hidden, weight, bias, targets, signal):
    _check_devices(hidden, weight=weight, bias=bias, targets=targets)
    return (
        hidden.new_empty(hidden.shape[0], dtype=_accumulate_dtype(hidden.dtype)),
        hidden.new_empty(hidden.shape),
    )


def _save_for_signal_gradient_backward(ctx, inputs, output):
    hidden, weight, bias, targets, ctx.signal = inputs
    ctx.has_bias, ctx.has_targets = bias is not None, targets is not None
    ctx.save_for_backward(hidden, weight, *[t for t in (bias, targets) if t is not None])


def _signal_gradient_backward(ctx, delta_bar, grad_bar):
    hidden, weight, *rest = ctx.saved_tensors
    bias = rest.pop(0) if ctx.has_bias else None
    targets = rest.pop(0) if ctx.has_targets else None
    hidden_bar, weight_bar, bias_bar = ops.signal_gradient_backward(
        delta_bar, grad_bar, hidden, weight, bias, targets, ctx.signal
    )
    return hidden_bar, weight_bar, bias_bar if ctx.has_bias else None, None, None


torch.library.register_autograd(
    "fused_recoder::signal_gradient",
    _signal_gradient_backward,
    setup_context=_save_for_signal_gradient_backward,
)


@torch.library.register_fake("fused_recoder::signal_gradient_backward")
def _(delta_bar, grad_bar, hidden, weight, bias, targets, signal):
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
