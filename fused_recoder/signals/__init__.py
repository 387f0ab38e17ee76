"""Error signals: what a recoding step tries to lower. One file per family; `base.py` says what a
signal is to the rest of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .base import Place, Signal
from .classifier import Classifier, Classifiers
from .custom import Custom
from .ensemble import Ensemble
from .entropy import Entropy
from .gold import NLL, Surprisal
from .mc_dropout import MCDropout
from .renyi import Renyi
from .variational import Variational

SignalLike: TypeAlias = str | Signal | Sequence[Classifier] | None

NAMES: dict[str, type[Signal]] = {
    "nll": NLL,
    "surprisal": Surprisal,
    "entropy": Entropy,
    "renyi": Renyi,
    "mc_dropout": MCDropout,
    "ensemble": Ensemble,
    "variational": Variational,
}


def as_signal(signal: SignalLike) -> Signal | None:
    """A signal object from what users write: an object, a name, a list of classifiers, or None."""
    if isinstance(signal, Classifier):
        return Classifiers([signal])
    if isinstance(signal, (list, tuple)):
        return Classifiers(signal)
    if signal is None or isinstance(signal, Signal):
        return signal
    if isinstance(signal, str) and signal in NAMES:
        return NAMES[signal]()
    raise ValueError(f"signal must be one of {sorted(NAMES)}, a Signal or None, got {signal!r}")


__all__ = [
    "NAMES",
    "NLL",
    "Classifier",
    "Classifiers",
    "Custom",
    "Ensemble",
    "Entropy",
    "MCDropout",
    "Place",
    "Renyi",
    "Signal",
    "SignalLike",
    "Surprisal",
    "Variational",
    "as_signal",
]
