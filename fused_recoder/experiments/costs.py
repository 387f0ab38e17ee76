"""What a model costs: parameters, and floating point operations per token of training.

Counted are products of matrices, a multiplication and an addition each; all else is small beside
them. A product of the forward pass has two in the backward pass: one for the operand, one for the
weight.
"""

from __future__ import annotations

import torch

from ..training import Config, build_model

# Products of a state with the decoder, per token. Training a plain model: logits, and twice back. A
# detached recoder shares them with the loss. Exact gradients: logits and dh forward; then the
# logits again beside the cotangent of u, both back into the weight, one back into the state.
PLAIN_PRODUCTS, EXACT_PRODUCTS = 3, 7
FEEDBACK_PRODUCTS = 5  # error feedback decodes once for the error, once for the loss


def parameters(config: Config, vocab_size: int) -> int:
    """How many a model has."""
    with torch.device("meta"):  # nothing is computed
        return sum(p.numel() for p in build_model(config, vocab_size).parameters())


def training_flops(config: Config, vocab_size: int) -> int:
    """Per token."""
    H, L = config.hidden_size, config.num_layers
    below = [config.embedding_size or H] + [H] * (L - 1)
    from_below, from_before = 2 * 4 * H * sum(below), 2 * 4 * H * H * L
    upwards = 2 * 4 * H * H * (L - 1)  # what a recoding gradient goes down through
    recoder = 0
    if config.signal is not None:
        recoder = upwards * (3 if config.gradient == "exact" else 1)
    decoder = 2 * H * vocab_size * _decoder_products(config)
    return 3 * (from_below + from_before) + recoder + decoder


def _decoder_products(config: Config) -> int:
    exact = config.gradient == "exact"
    if config.architecture == "error-feedback":
        return EXACT_PRODUCTS if exact else FEEDBACK_PRODUCTS
    return EXACT_PRODUCTS if exact and config.signal is not None else PLAIN_PRODUCTS


def widened(config: Config, cost, target: int) -> Config:
    """The narrowest model like this one whose `cost(config)` is at least `target`."""
    low, high = config.hidden_size, config.hidden_size
    while cost(config.replace(hidden_size=high)) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if cost(config.replace(hidden_size=middle)) < target:
            low = middle
        else:
            high = middle
    return config.replace(hidden_size=high)
