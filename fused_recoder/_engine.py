"""How modules call the C++ engine: with tensors, and with one spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._call import Call
from ._module import RecodingLSTMBase
from ._ops import ForwardArguments, ForwardResult

if TYPE_CHECKING:
    from ._language_model import LanguageModelBase


def recode_forward(rnn: RecodingLSTMBase, call: Call) -> ForwardResult:
    """The call of the op."""
    signal, spec = rnn.signal, rnn.spec
    weights = [weight for layer in rnn.all_weights for weight in layer]
    decodes = call.loss or (signal is not None and signal.needs_decoder)
    decoder = rnn.decoder_parameters() if decodes else (None, None)
    step = step_tensors(rnn)
    x, weights, decoder = autocast(call.input, weights, decoder)
    saves = what_to_save(
        [x, call.h0, call.c0, *weights], step, decoder if call.loss or spec.exact else ()
    )
    dropout, output_dropout = rnn.active_dropout
    nothing = [call.h0.new_empty(0)]  # AOTInductor would hand an empty list on as None
    arguments = ForwardArguments(
        input=x, h0=call.h0, c0=call.c0, weights=weights,
        decoder_weight=decoder[0], decoder_bias=decoder[1],
        signal=signal_tensors(rnn) or nothing, step=step or nothing, gate=gate_threshold(rnn),
        targets=call.targets, labels=call.labels, mask=call.mask, lengths=call.lengths,
        seed=call.seed,
        spec=spec.replace(
            time=call.time, dropout=dropout, output_dropout=output_dropout, loss=call.loss,
            trace=call.trace, **saves,
        ).encode(),
    )  # fmt: skip
    return ForwardResult(*torch.ops.fused_recoder.recode_forward(*arguments))


def make_reader(
    lm: LanguageModelBase,
    h: Tensor,
    c: Tensor,
    seed: Tensor | None,
    time: int,
    probability: float,
) -> Any:
    """The engine's own reader, with the weights packed as they are now."""
    rnn = lm.rnn
    decoder_weight, decoder_bias = rnn.decoder_parameters()
    weights = [weight for layer in rnn.all_weights for weight in layer]
    # A time step that waits for its gold token is recoded with the weights that predicted it.
    waits = rnn.signal is not None and rnn.signal.needs_targets

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if waits else tensor

    def maybe_own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else own(tensor)

    return torch.classes.fused_recoder.Reader(
        lm.encoder.weight, h, c, [own(w) for w in weights],
        own(decoder_weight), maybe_own(decoder_bias),
        signal_tensors(rnn), [own(t) for t in step_tensors(rnn)],
        maybe_own(gate_threshold(rnn)), seed,
        rnn.spec.replace(time=time, probability=probability).encode(),
    )  # fmt: skip


def signal_tensors(rnn: RecodingLSTMBase) -> list[Tensor]:
    """What the signal gives to the engine beside the decoder."""
    return [] if rnn.signal is None else rnn.signal.tensors()


def step_tensors(rnn: RecodingLSTMBase) -> list[Tensor]:
    """What the step gives to the engine. Without a signal nothing is recoded, whatever the step."""
    return [] if rnn.signal is None else rnn.step.tensors(rnn)


def gate_threshold(rnn: RecodingLSTMBase) -> Tensor | None:
    """Of the gate, `[1]`, where there is one."""
    return None if rnn.gate is None else rnn.gate.threshold


def autocast(x: Tensor, weights: list[Tensor], decoder: tuple) -> tuple[Tensor, list, tuple]:
    """Operands of products in the precision of autocast, where that is on."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x, weights, decoder
    dtype = torch.get_autocast_dtype(x.device.type)
    decoder = tuple(None if t is None else t.to(dtype) for t in decoder)
    return x.to(dtype), [w.to(dtype) for w in weights], decoder


def what_to_save(tracked: list[Tensor], step: list[Tensor], decoder: tuple) -> dict[str, bool]:
    """Which gradients will be asked for: of anything, of the step, of the decoder."""
    step_grad = any(t.requires_grad for t in step)
    decoder_grad = any(t is not None and t.requires_grad for t in decoder)
    wanted = step_grad or decoder_grad or any(t.requires_grad for t in tracked)
    save = torch.is_grad_enabled() and wanted
    return {"save": save, "step_grad": save and step_grad, "decoder_grad": save and decoder_grad}
