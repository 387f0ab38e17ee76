"""Every signal and step there is, by name, built anew for each test."""

from __future__ import annotations

import torch
from torch import nn

import fused_recoder as fr
from fused_recoder import signals, steps


def _linear(hidden, vocab, dtype):
    return nn.Linear(hidden, vocab, dtype=dtype)


def _ensemble(predict):
    def decoder(hidden, vocab, dtype):
        return fr.EnsembleDecoder(
            hidden, vocab, num_members=3, dataset_size=100, predict=predict, dtype=dtype
        )

    return decoder


def _classifiers(hidden, dtype):
    top = signals.Classifier(torch.randn(hidden, dtype=dtype), torch.randn((), dtype=dtype))
    below = signals.Classifier(
        torch.randn(4, hidden, dtype=dtype), torch.randn(4, dtype=dtype), layer=0, state="c"
    )
    return top, below


def cube_of_the_logits(logits, hidden, targets):
    """A custom signal that reads everything it is given."""
    delta = (logits / 3).pow(3).mean(-1) + hidden.square().mean(-1)
    if targets is not None:
        delta = delta - logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return delta


# name -> (signal of (hidden, dtype), decoder of (hidden, vocab, dtype))
SIGNALS = {
    "none": (lambda h, d: None, _linear),
    "nll": (lambda h, d: signals.NLL(), _linear),
    "nll-argmax": (lambda h, d: signals.NLL(target="argmax"), _linear),
    "surprisal": (lambda h, d: signals.Surprisal(), _linear),
    "surprisal-argmax": (lambda h, d: signals.Surprisal(target="argmax"), _linear),
    "entropy": (lambda h, d: signals.Entropy(), _linear),
    "renyi": (lambda h, d: signals.Renyi(0.5), _linear),
    "renyi-near-1": (lambda h, d: signals.Renyi(1.1), _linear),
    "mc-unit": (lambda h, d: signals.MCDropout(3, 0.3), _linear),
    "mc-shared": (lambda h, d: signals.MCDropout(3, 0.3, "shared"), _linear),
    "mc-shared-mostly-dropped": (lambda h, d: signals.MCDropout(3, 0.7, "shared"), _linear),
    "mc-weight": (lambda h, d: signals.MCDropout(3, 0.3, "weight"), _linear),
    "ensemble": (lambda h, d: signals.Ensemble(), _ensemble("members")),
    "ensemble-mean-logits": (lambda h, d: signals.Ensemble(), _ensemble("mean_logits")),
    "variational": (lambda h, d: signals.Variational(3, 0.3), _linear),
    "classifier": (lambda h, d: _classifiers(h, d)[0], _linear),
    "classifiers": (_classifiers, _linear),
    "custom": (lambda h, d: signals.Custom(cube_of_the_logits), _linear),
    "custom-unlabelled": (
        lambda h, d: signals.Custom(cube_of_the_logits, sees_targets=False),
        _linear,
    ),
}

STEPS = {
    "fixed": lambda: 0.7,
    "learned": lambda: "learned",
    "predicted": lambda: steps.Predicted((5, 4), init=0.5),
    "lipschitz": lambda: steps.Lipschitz(),
    "backtracking": lambda: steps.Backtracking(8.0, 0.5, 6),
}

PAIRS = [
    (signal, step)
    for signal in SIGNALS
    for step in STEPS
    if not (signal.startswith("custom") and step == "lipschitz")  # no bound is known
]


def has_own_masks(signal: str) -> bool:
    return signal == "variational"


def classifies(signal: str) -> bool:
    return signal.startswith("classifier")


def build(signal: str, hidden: int, vocab: int, dtype=torch.float64):
    """(signal object, decoder)"""
    make_signal, make_decoder = SIGNALS[signal]
    return make_signal(hidden, dtype), make_decoder(hidden, vocab, dtype)
