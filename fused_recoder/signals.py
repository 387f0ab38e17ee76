"""Error signals: what a recoding step tries to lower.

Each is a small module that only declares; the mathematics is in `csrc/kernels/math.h` for the
fused engine and in `reference.py` for the oracle.

Signals that read the gold token are legitimate only where the gold token of step t is the input
of step t+1, as in language modelling. In a tagger they would carry the label forward.
"""

from __future__ import annotations

from torch import nn


class Signal(nn.Module):
    """Base class. `name` is how the engine knows it, `reads_target` whether it looks at tokens."""

    name: str
    reads_target = False
    target = "gold"

    def extra_repr(self) -> str:
        return f"target={self.target!r}" if self.target != "gold" else ""


class _TargetSignal(Signal):
    reads_target = True

    def __init__(self, target: str = "gold"):
        super().__init__()
        if target not in ("gold", "argmax"):
            raise ValueError(f"target must be 'gold' or 'argmax', got {target!r}")
        self.target = target


class NLL(_TargetSignal):
    """`-log p` of the gold token (of the most probable one where no targets are given)."""

    name = "nll"

    def __init__(self):
        super().__init__()


class Surprisal(_TargetSignal):
    """The thesis's surprisal, `p^(-p) - 1`.

    It is not monotone: below p = 1/e, where nearly all gold tokens of a language model lie,
    descending it *lowers* the probability of the token. `NLL` is what its prose describes.
    `target="argmax"` recodes towards the most probable token, as the thesis's code trained.
    """

    name = "surprisal"


class Entropy(Signal):
    """Entropy of the prediction. Sees no target, so the model predicts from the recoded state."""

    name = "entropy"


NAMES = {"nll": NLL, "surprisal": Surprisal, "entropy": Entropy}


def as_signal(signal: str | Signal | None) -> Signal | None:
    """A signal object from what users write: an object, a name, or None."""
    if signal is None or isinstance(signal, Signal):
        return signal
    if isinstance(signal, str) and signal in NAMES:
        return NAMES[signal]()
    raise ValueError(f"signal must be one of {sorted(NAMES)}, a Signal or None, got {signal!r}")
