"""Error signals: what a recoding step tries to lower.

Each is a small module that only declares; the mathematics is in `csrc/kernels` for the fused
engine and in `reference.py` for the oracle.

Signals that read the gold token are legitimate only where the gold token of step t is the input
of step t+1, as in language modelling. In a tagger they would carry the label forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .ensemble import EnsembleDecoder


class Signal(nn.Module):
    """Base class: what the engine has to know of a signal."""

    name: str  # how users and recipes call it
    reads_target = False  # looks at the gold token
    target = "gold"
    sees_labels = False  # predictions must come from the unrecoded state: no label may leak
    samples = 1  # K predictions whose mean counts
    p = 0.0  # dropout of the samples

    @property
    def engine_name(self) -> str:
        """How the fused engine calls it."""
        return self.name

    def bind(self, num_layers: int, states: Sequence[str], decoder: nn.Module | None) -> None:
        """Called once by the RNN that uses this signal, to check that they fit together."""
        if isinstance(decoder, EnsembleDecoder):
            raise ValueError(
                f"signal {self.name!r} reads one decoder, got an EnsembleDecoder: use Ensemble()"
            )

    def extra_repr(self) -> str:
        return f"target={self.target!r}" if self.target != "gold" else ""


class _TargetSignal(Signal):
    reads_target = sees_labels = True

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

    It is not monotone: below p = 1/e, where most gold tokens of a language model lie,
    descending it *lowers* the probability of the token. `NLL` is what its prose describes.
    `target="argmax"` recodes towards the most probable token, as the thesis's code trained.
    """

    name = "surprisal"


class Entropy(Signal):
    """Entropy of the prediction. Sees no target, so the model predicts from the recoded state."""

    name = "entropy"


def _check_samples(num_samples: int, p: float) -> None:
    if not isinstance(num_samples, int) or not 1 <= num_samples < 2**20:
        raise ValueError(f"num_samples must be an int of at least 1, got {num_samples!r}")
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")


class MCDropout(Signal):
    """Predictive entropy: that of the mean of K predictions under dropout of the top state.

    Args:
        num_samples: K.
        p: probability of dropping a unit (or weight).
        mask: `"unit"` draws a mask per instance, step and sample (the thesis's code), `"shared"`
            one per step and sample for the whole batch (cheaper: only the dropped columns of the
            decoder are multiplied), `"weight"` one of all decoder weights per step and sample
            (its equations to the letter).
        prior_scale: draw the decoder anew from N(0, prior_scale), a variance, when the RNN is
            built, as the thesis's code does. Off by default: it may explain that code's results.

    Masks are drawn in training and in evaluation alike: they are the estimate. They follow from
    `torch.manual_seed`, or from the `generator=` given to `forward`.
    """

    name = "mc_dropout"

    def __init__(
        self,
        num_samples: int = 10,
        p: float = 0.2,
        mask: str = "unit",
        prior_scale: float | None = None,
    ):
        super().__init__()
        _check_samples(num_samples, p)
        if mask not in ("unit", "shared", "weight"):
            raise ValueError(f"mask must be 'unit', 'shared' or 'weight', got {mask!r}")
        if prior_scale is not None and not (math.isfinite(prior_scale) and prior_scale > 0):
            raise ValueError(f"prior_scale must be positive and finite, got {prior_scale}")
        self.samples, self.p, self.mask, self.prior_scale = num_samples, float(p), mask, prior_scale

    @property
    def engine_name(self) -> str:
        return f"mc_{self.mask}"

    def bind(self, num_layers, states, decoder):
        super().bind(num_layers, states, decoder)
        if self.prior_scale is not None:
            with torch.no_grad():
                for parameter in decoder.parameters():
                    parameter.normal_(0, math.sqrt(self.prior_scale))

    def extra_repr(self) -> str:
        prior = f", prior_scale={self.prior_scale}" if self.prior_scale is not None else ""
        return f"num_samples={self.samples}, p={self.p}, mask={self.mask!r}{prior}"


class Ensemble(Signal):
    """Predictive entropy of an anchored ensemble; its decoder is an `EnsembleDecoder`.

    That of the mean of the members' probabilities, or of the softmax of their mean logits, as the
    decoder predicts.
    """

    name = "ensemble"

    def bind(self, num_layers, states, decoder):
        if not isinstance(decoder, EnsembleDecoder):
            raise TypeError(
                "Ensemble() needs decoder=EnsembleDecoder(hidden_size, vocab_size, ...), got "
                f"{type(decoder).__name__}"
            )
        self.samples = decoder.num_members


class Variational(Signal):
    """Predictive entropy of a variational RNN (Gal and Ghahramani 2016).

    K samples read every sequence, each under masks of its own for the inputs of all layers, the
    recurrent states and the output, drawn once per call and held for all time steps. Their states
    are separate: `hx` is `[L, K*B, H]` (a `[L, B, H]` one is repeated), `output` `[K, T, B, H]`,
    and the prediction is the mean of the K softmaxes.
    """

    name = "variational"

    def __init__(self, num_samples: int = 10, p: float = 0.2):
        super().__init__()
        _check_samples(num_samples, p)
        self.samples, self.p = num_samples, float(p)

    def extra_repr(self) -> str:
        return f"num_samples={self.samples}, p={self.p}"


class Classifier(Signal):
    """Cross-entropy of a trained diagnostic classifier: weak supervision of the state it reads.

    Args:
        weight: `[H]` or `[1, H]` for a binary classifier, `[C, H]` for C classes.
        bias: `[]` or `[1]`, `[C]`; zeros if None.
        layer: which layer it reads; negative counts from the top.
        state: `"h"` or `"c"`.

    Only that state is recoded. `forward` takes the `labels` (`[T, B]`, -100 where there is none).
    Several classifiers of different states can be given together, in a list.
    """

    name = "classifier"
    sees_labels = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None, layer: int = -1, state="h"):
        super().__init__()
        weight = torch.as_tensor(weight).detach().clone()
        if weight.dim() == 1:
            weight = weight.unsqueeze(0)
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"weight must be floating point of shape [H] or [C, H], got {weight.dtype} of "
                f"shape {tuple(weight.shape)}"
            )
        bias = weight.new_zeros(weight.shape[0]) if bias is None else torch.as_tensor(bias)
        bias = bias.detach().clone().to(weight).reshape(-1)
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"bias must have {weight.shape[0]} elements like weight, got {bias.shape[0]}"
            )
        if state not in ("h", "c"):
            raise ValueError(f"state must be 'h' or 'c', got {state!r}")
        self.layer, self.state = layer, state
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @property
    def num_classes(self) -> int:
        return max(2, self.weight.shape[0])

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, layer={self.layer}, state={self.state!r}"


class Classifiers(Signal):
    """Several classifiers, each of a state of its own; delta is the sum of their signals."""

    name = "classifier"
    sees_labels = True

    def __init__(self, classifiers: Sequence[Classifier]):
        super().__init__()
        if not classifiers or not all(isinstance(c, Classifier) for c in classifiers):
            raise TypeError(f"signal must be a list of Classifier objects, got {classifiers!r}")
        self.members = nn.ModuleList(classifiers)

    def bind(self, num_layers, states, decoder):
        places = []
        for classifier in self.members:
            layer = classifier.layer + num_layers if classifier.layer < 0 else classifier.layer
            if not 0 <= layer < num_layers:
                raise ValueError(
                    f"Classifier reads layer {classifier.layer}, but there are {num_layers}"
                )
            if classifier.state not in states:
                raise ValueError(
                    f"Classifier reads state {classifier.state!r}, but states are {tuple(states)}"
                )
            places.append((layer, classifier.state))
        if len(set(places)) < len(places):
            raise ValueError(f"two Classifiers read the same state: {places}")
        self.places = places

    def check_labels(self, labels: Tensor | None) -> None:
        if labels is None:
            raise ValueError(
                "labels must be given for a Classifier signal, with -100 where there is none"
            )


class Custom(Signal):
    """Any differentiable function of a step: the door for research.

    Args:
        fn: called at every step with `logits` `[B, V]`, `hidden` `[B, H]` (what was decoded) and
            `targets` `[B]` or None; returns delta `[B]`. Its gradient is taken by autograd.
        sees_targets: whether it looks at the targets. If so, predictions come from the unrecoded
            state, so that none leaks; if not, it gets None.

    The whole sequence runs in plain PyTorch: slow and open.
    """

    name = "custom"

    def __init__(self, fn: Callable, sees_targets: bool = True):
        super().__init__()
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        self.fn, self.sees_labels = fn, bool(sees_targets)

    def extra_repr(self) -> str:
        return f"{getattr(self.fn, '__name__', self.fn)}, sees_targets={self.sees_labels}"


NAMES = {
    "nll": NLL,
    "surprisal": Surprisal,
    "entropy": Entropy,
    "mc_dropout": MCDropout,
    "ensemble": Ensemble,
    "variational": Variational,
}


def as_signal(signal) -> Signal | None:
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
