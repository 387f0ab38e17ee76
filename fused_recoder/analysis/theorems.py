"""The thesis's two theorems, measured on text.

1. Recoding lowers the signal of the re-decoded state. True if the step is at most 2/L, with L a
   bound on the signal's curvature; measured for steps of all sizes.
2. Recoding at one time step lowers the signal of later ones. The thesis's argument takes the
   gradient of the *later* signal for the step that was made along the gradient of the present one,
   so nothing is promised; measured.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

import fused_recoder as fr

from ..training.data import Batches
from ..training.model import load_weights

ROUNDING = 1e-12  # relative; everything here is computed in float64


def windows(tokens: np.ndarray, batch_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [T, B]: as many places of the text, read from there."""
    return Batches(tokens, batch_size, length)[0]


def with_recoder(
    model: fr.RecodingLanguageModel, signal, step, states, dtype: torch.dtype = torch.float64
) -> fr.RecodingLanguageModel:
    """A copy of a model in this precision, with this recoder."""
    rnn = model.rnn
    ensemble = isinstance(model.decoder, fr.EnsembleDecoder)
    new = fr.RecodingLanguageModel(
        model.encoder.num_embeddings,
        rnn.input_size,
        rnn.hidden_size,
        rnn.num_layers,
        signal=signal,
        step=step,
        states=states,
        bias=rnn.bias,
        decoder=copy.deepcopy(model.decoder).to(dtype) if ensemble else None,
        dtype=dtype,
    )
    load_weights(new, model.state_dict(), other_recoder=True)
    return new.eval()


@torch.no_grad()
def signal_change(
    model: fr.RecodingLanguageModel, signal, step, states, inputs: Tensor, targets: Tensor
) -> dict:
    """How the signal of the re-decoded state compares with the signal, over all positions."""
    recoding = with_recoder(model, signal, step, states)
    trace = recoding(inputs, targets, return_trace=True).trace
    before, after = trace.delta, trace.delta_after  # [T, B]
    allowed = before + ROUNDING * before.abs().clamp(min=1)
    return {
        "positions": before.numel(),
        "lowered": (after < before).double().mean().item(),
        "not_raised": (after <= allowed).double().mean().item(),
        "mean_change": (after - before).mean().item(),
        "mean_delta": before.mean().item(),
        "mean_delta_after": after.mean().item(),
        "mean_step": trace.step_size.mean().item(),
    }


@torch.no_grad()
def later_effect(
    model: fr.RecodingLanguageModel,
    signal,
    step,
    states,
    inputs: Tensor,
    targets: Tensor,
    *,
    at: int,
    others: bool,
) -> list[dict]:
    """The signal k steps after time `at`, with and without recoding there.

    Args:
        others: whether all other steps are recoded (the theorem), or none (the thesis's figure).
    """
    recoding = with_recoder(model, signal, step, states)
    mask = torch.full(inputs.shape, others)  # [T, B]

    def trace_of(here: bool) -> fr.RecodingTrace:
        mask[at] = here
        same_masks = torch.Generator().manual_seed(0)
        return recoding(
            inputs, targets, recode_mask=mask, return_trace=True, generator=same_masks
        ).trace

    without, trace = trace_of(False).delta, trace_of(True)
    # At the step itself what counts is the signal of the re-decoded state.
    recoded = torch.cat([trace.delta_after[at : at + 1], trace.delta[at + 1 :]])  # [T - at, B]
    rows = []
    for k in range(inputs.shape[0] - at):
        difference = recoded[k] - without[at + k]  # [B]
        moved = difference != 0
        rows.append(
            {
                "k": k,
                "mean_change": difference.mean().item(),
                "standard_error": (difference.std() / difference.numel() ** 0.5).item(),
                "lowered": (difference < 0).double().sum().item() / max(1, int(moved.sum())),
            }
        )
    return rows
