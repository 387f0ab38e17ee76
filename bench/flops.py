"""Floating-point operations that a job cannot do without, per token: what the limit is made of.

A multiply-add counts as two. Only matrix products count; everything else has to vanish beside them.
"""

from __future__ import annotations

from .cases import PLAIN, Contender, Shape


def lstm(shape: Shape) -> float:
    """Forward through all layers (inputs as wide as the states)."""
    return shape.L * 2 * 4 * shape.H * 2 * shape.H


def decoder(shape: Shape) -> float:
    return 2 * shape.H * shape.V


def signal(contender: Contender, shape: Shape) -> float:
    """Signal and recoding gradient: the decoder there and back, then down the layers."""
    v, D = contender.variant, decoder(shape)
    sweep = (shape.L - 1) * 2 * 4 * shape.H * shape.H
    if v.signal == "none" or contender.who == PLAIN:
        return 0
    if v.signal == "mc_dropout" and v.mask == "shared":
        return 2 * D * min(1 + min(v.p, 1 - v.p) * v.K, v.K) + sweep
    # An ensemble with mean logits is one decoder: the mean of its members'.
    decoders = 1 if v.predict == "mean_logits" else v.K
    return 2 * D * decoders + sweep


def second_order(contender: Contender, shape: Shape) -> float:
    """Of exact gradients: the logits again, the cotangent of u, back through both, the decoder's
    weight twice (once of which the loss of a gold signal shares); up the layers, and their weights.
    """
    v = contender.variant
    if v.gradient != "exact" or contender.who == PLAIN:
        return 0
    products = 4 if v.signal in ("nll", "surprisal") else 5 * v.K
    return products * decoder(shape) + (shape.L - 1) * 2 * 2 * 4 * shape.H * shape.H


def per_token(contender: Contender, shape: Shape, job: str) -> float:
    """Of the algorithm, not of who runs it: with whatever the algebra saves."""
    v, D = contender.variant, decoder(shape)
    recoding = signal(contender, shape)
    gold = recoding > 0 and v.signal in ("nll", "surprisal")
    members = v.K if v.signal == "ensemble" else 1
    extra = D if v.signal == "ensemble" and v.predict == "mean_logits" else 0
    if job == "train":
        # Gold signals: the loss shares the decoder's forward and input gradient with the recoder.
        loss = D if gold else 3 * D * members + extra
        return 3 * lstm(shape) + recoding + loss + second_order(contender, shape)
    loss = 0 if gold else D * members + extra
    return lstm(shape) + recoding + loss
