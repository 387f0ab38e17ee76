"""What PyTorch needs to know about the ops of `torch.ops.fused_recoder` beside their kernels: their
shapes (fake kernels, for `torch.compile`) and their derivatives. Schemas: `csrc/bindings.cpp`.
"""

from __future__ import annotations

import torch

ops = torch.ops.fused_recoder

STATES = ("h", "c")


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_devices(like: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Mixed devices end up here, not in a kernel, if one of them is "meta"."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != like.device:
            raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")


# ------------------------------------------------------------------------------- recode_forward


@torch.library.register_fake("fused_recoder::recode_forward")
def _(
    input, h0, c0, weights, decoder_weight, decoder_bias, step, targets, mask, lengths, seed,
    signal, argmax, recode_h, recode_c, dropout, output_dropout, loss, save, save_step_grads,
    save_decoder_grads, trace,
):  # fmt: skip
    _check_devices(
        input, h0=h0, c0=c0, decoder_weight=decoder_weight, decoder_bias=decoder_bias, step=step,
        targets=targets, recode_mask=mask, lengths=lengths, seed=seed,
        **{f"weights[{i}]": w for i, w in enumerate(weights)},
    )  # fmt: skip
    T, B, _ = input.shape
    L, _, H = h0.shape
    S = int(recode_h) + int(recode_c)
    recodes = signal != "none" and S > 0
    compute = _accumulate_dtype(input.dtype)

    def accumulated(*shape):
        return input.new_empty(shape, dtype=compute)

    traced = trace and recodes
    saved = []
    if save:
        has_inputs = L > 1 and ((recodes and recode_h) or dropout > 0)
        saved = [
            accumulated(L, T, B, 4 * H),
            accumulated(L, T, B, H),
            accumulated(L, T, B, H),
            accumulated(*((L - 1, T, B, H) if has_inputs else (0,))),
            accumulated(*((L, S, T, B, H) if recodes and save_step_grads else (0,))),
            accumulated(*((T, B, H) if loss else (0,))),
            accumulated(*(decoder_weight.shape if loss and save_decoder_grads else (0,))),
            accumulated(
                *(decoder_bias.shape if loss and save_decoder_grads and decoder_bias is not None
                  else (0,))
            ),
        ]  # fmt: skip
    return (
        input.new_empty(T, B, H),
        h0.new_empty(L, B, H),
        h0.new_empty(L, B, H),
        accumulated(*((T, B) if loss else (0,))),
        accumulated(T, B),
        accumulated(*((T, B) if traced else (0,))),
        accumulated(*((L, S, T, B) if traced else (0,))),
        accumulated(*((L, S, T, B) if traced else (0,))),
        saved,
    )


def _save_for_recode_backward(ctx, inputs, output):
    (
        input, h0, c0, weights, decoder_weight, decoder_bias, step, targets, _, lengths, seed,
        signal, _, recode_h, recode_c, dropout, output_dropout, loss, save, save_step_grads,
        save_decoder_grads, _,
    ) = inputs  # fmt: skip
    ctx.set_materialize_grads(False)
    hidden, _, _, nll, *trace, saved = output
    ctx.mark_non_differentiable(*trace, *saved, *([] if loss else [nll]))
    ctx.saved_anything = save
    ctx.num_weights = len(weights)
    ctx.has_step_grad = save_step_grads and signal != "none"
    ctx.has_decoder_grads = save_decoder_grads
    ctx.options = (signal, recode_h, recode_c, dropout, output_dropout)
    # What only the gradient of the loss needs is not kept without one.
    of_loss = (decoder_weight, decoder_bias, targets, hidden) if loss else (None,) * 4
    optional = (*of_loss, lengths, seed)
    ctx.present = [t is not None for t in optional]
    kept = [t for t in optional if t is not None]
    ctx.save_for_backward(input, h0, c0, step, *kept, *weights, *saved)


def _recode_backward(ctx, grad_output, grad_h_n, grad_c_n, grad_nll, *_):
    if not ctx.saved_anything:
        raise RuntimeError(
            "fused_recoder::recode_forward was called with save=False, so there is nothing to "
            "differentiate"
        )
    input, h0, c0, step, *rest = ctx.saved_tensors
    decoder_weight, decoder_bias, targets, hidden, lengths, seed = (
        rest.pop(0) if present else None for present in ctx.present
    )
    weights, saved = rest[: ctx.num_weights], rest[ctx.num_weights :]
    if all(grad is None for grad in (grad_output, grad_h_n, grad_c_n, grad_nll)):
        grad_h_n = torch.zeros_like(h0)
    grads = ops.recode_backward(
        grad_output, grad_h_n, grad_c_n, grad_nll, saved, input, h0, c0, weights, decoder_weight,
        decoder_bias, step, targets, lengths, seed, hidden, *ctx.options, ctx.needs_input_grad[0],
    )  # fmt: skip
    grad_input, grad_h0, grad_c0, grad_weights, grad_weight, grad_bias, grad_step = grads
    with_decoder = ctx.has_decoder_grads and grad_nll is not None
    return (
        grad_input if ctx.needs_input_grad[0] else None,
        grad_h0,
        grad_c0,
        grad_weights,
        # Without a loss nothing: the recoding gradient is a constant.
        grad_weight if with_decoder else None,
        grad_bias if with_decoder and decoder_bias is not None else None,
        grad_step.to(step.dtype) if ctx.has_step_grad else None,
        *[None] * 15,
    )


torch.library.register_autograd(
    "fused_recoder::recode_forward", _recode_backward, setup_context=_save_for_recode_backward
)


@torch.library.register_fake("fused_recoder::recode_backward")
def _(
    grad_output, grad_h_n, grad_c_n, grad_nll, saved, input, h0, c0, weights, decoder_weight,
    decoder_bias, step, targets, lengths, seed, output, signal, recode_h, recode_c, dropout,
    output_dropout, need_input_grad,
):  # fmt: skip
    step_grads, decoder_weight_grad, decoder_bias_grad = saved[4], saved[6], saved[7]
    no_loss = grad_nll is None
    return (
        torch.empty_like(input) if need_input_grad else input.new_empty(0),
        torch.empty_like(h0),
        torch.empty_like(c0),
        [torch.empty_like(w) for w in weights],
        input.new_empty(0 if no_loss else decoder_weight_grad.shape),
        input.new_empty(0 if no_loss else decoder_bias_grad.shape),
        input.new_empty(
            step.shape if step_grads.numel() > 0 else (0,), dtype=_accumulate_dtype(input.dtype)
        ),
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
def _(seed, stream, p, time, steps, rows, units, dtype):
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
    "fused_recoder.reference.RecodingLSTM, which is plain PyTorch, for second derivatives",
)
_refuse_further_derivative(
    "signal_gradient_backward", "plain PyTorch operations, for third derivatives"
)
