"""`Signal`: all that the rest of the package knows of a signal.

A signal is a small module. It says what it needs and how states have to be laid out for it, how
the fused engine calls it, and it is its own specification: `reference.py` asks it for its value,
`steps.Lipschitz` for its curvature.

Bounds on the curvature: if the second derivative of delta in every direction is at most L, a
gradient step of length `a <= 2/L` cannot raise it: `delta(h - a g) <= delta(h) - a (1 - a L / 2)
|g|^2`. Only an upper bound counts (strong negative curvature helps), and it has to be a bound: a
power iteration approaches the norm of W from below and would promise too much.

The derivations, beside each signal, take a unit vector v; `u = W v` is the speed of the logits, `E`
and `Var` are the mean and the variance under the prediction o. `|u|^2 <= sigma^2` with sigma the
spectral norm of W, and `u_j^2 <= rho^2` with rho the largest norm of a row. A dropout mask between
state and decoder scales W by at most `1/(1-p)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch.nn.functional as F
from torch import Tensor, nn

from ..ensemble import EnsembleDecoder

if TYPE_CHECKING:
    from .._module import RecodingLSTMBase
    from ..reference import TimeStep

Place = tuple[int, str]  # a state: its layer, and "h" or "c"


class Signal(nn.Module):
    """Base class of what a recoding step tries to lower."""

    name: str  # how users and recipes call it
    reads_target = False  # looks at a token: the gold one, or the most probable
    target = "gold"
    sees_labels = False  # predictions must come from the unrecoded state: no label may leak
    reads_labels = False  # looks at labels, which only the caller knows
    needs_decoder = True
    samples = 1  # K predictions whose mean counts
    p = 0.0  # dropout of the samples
    holds_masks = False  # masks of its own, for a whole sequence, in place of the RNN's dropout
    separate_states = False  # every sample has states of its own: K rows per instance
    seed_on_host = False  # the host has to know the seed of the masks
    fused = True  # the C++ engine knows it
    single_prediction = False  # a function of one state alone: see `functional.signal_gradient`

    @property
    def rows_per_instance(self) -> int:
        """How many rows of states an instance of the batch has."""
        return self.samples if self.separate_states else 1

    @property
    def needs_targets(self) -> bool:
        """Whether it looks at the gold token."""
        return self.reads_target and self.target == "gold"

    # ------------------------------------------------------------------ before anything is computed

    def bind(self, rnn: RecodingLSTMBase) -> None:
        """Called by the RNN that uses this signal, to check that they fit together."""
        if isinstance(rnn.decoder, EnsembleDecoder):
            raise ValueError(
                f"signal {self.name!r} reads one decoder, got an EnsembleDecoder: use Ensemble()"
            )

    def initialise(self, decoder: nn.Module | None) -> None:
        """Called once, when the RNN is made: may set up the decoder."""

    def check_call(self, targets: Any, labels: Any) -> None:
        """Whether a call gives what the signal looks at."""
        refuse_labels(labels)
        if self.needs_targets and targets is None:
            kind = type(self).__name__
            raise ValueError(
                f"targets must be given: the signal {self.name!r} reads the gold token. To recode "
                f"towards the most probable token instead, as the thesis does, use "
                f'signals.{kind}(target="argmax")'
            )

    # ------------------------------------------------------------------------ for the fused engine

    def spec_fields(self) -> dict[str, Any]:
        """What the fused engine has to be told."""
        return {"signal": self.name}

    def tensors(self) -> list[Tensor]:
        """The tensors the fused engine gets beside the decoder's."""
        return []

    # ------------------------------------------------------------------------------ specification

    def value(self, logits: Tensor, tokens: Tensor | None) -> Tensor:
        """delta `[B]` of logits `[B, V]` (of K samples `[K, B, V]`) and, if it looks at them,
        tokens `[B]`; 0 where the token is ignored."""
        raise NotImplementedError

    def draw(self, now: TimeStep) -> Tensor | None:
        """The masks of the samples of a time step."""
        return None

    def logits(self, now: TimeStep, top: Tensor) -> Tensor:
        """Predictions of a top state `[R, H]`: `[B, V]`, or `[K, B, V]` of K samples."""
        weight, bias = now.rnn.decoder_parameters()
        return F.linear(now.decoded(top), weight, bias)

    def tokens(self, now: TimeStep, prediction: Tensor) -> Tensor | None:
        """The tokens `[B]` that the signal looks at."""
        return None

    def places(self, rnn: RecodingLSTMBase) -> list[Place]:
        """The states it recodes."""
        return [(layer, state) for layer in range(rnn.num_layers) for state in rnn.states]

    def begin(self, now: TimeStep) -> tuple[Tensor, dict[Place, Tensor]]:
        """delta `[B]` of the unrecoded states, and the states to differentiate it in."""
        now.prediction = self.logits(now, now.h[-1])
        now.tokens = self.tokens(now, now.prediction)
        delta = self.delta(now, now.prediction, now.h[-1])
        return delta, {place: now.state(place) for place in self.places(now.rnn)}

    def delta(self, now: TimeStep, logits: Tensor, top: Tensor) -> Tensor:
        """delta `[B]` of logits and the top state `[R, H]` that gave them."""
        return self.value(logits, now.tokens)

    def delta_after(self, now: TimeStep, recoded: dict[Place, Tensor]) -> Tensor:
        """delta `[B]` of recoded states `[R, H]`; lower layers are not run again."""
        layer = now.rnn.num_layers - 1
        if (layer, "h") in recoded:
            top = recoded[layer, "h"]
        else:  # the h that the recoded c would have given
            top = now.o[-1] * recoded[layer, "c"].tanh()
        return self.delta(now, self.logits(now, top), top)

    # ---------------------------------------------------------------------------------- curvature

    def bound(self, weight: Tensor, output_p: float = 0.0) -> Tensor:
        """L `[]` in the top state, for a decoder's weight behind dropout `output_p`."""
        self.refuse_bound()

    def bounds(self, rnn: RecodingLSTMBase) -> Tensor:
        """L per layer and recoded state, `[L, S]`; that of the top state stands for all."""
        weight, _ = rnn.decoder_parameters()
        return self.bound(weight, rnn.active_dropout[1]).expand(rnn.num_layers, len(rnn.states))

    def bounded_by(self, rnn: RecodingLSTMBase) -> list[Tensor]:
        """The tensors that `bounds` follows from."""
        return [rnn.decoder_parameters()[0]]

    def refuse_bound(self) -> NoReturn:
        raise ValueError(
            f"Lipschitz knows no bound for the signal {self.name!r}: use Backtracking instead"
        )

    def extra_repr(self) -> str:
        return f"target={self.target!r}" if self.target != "gold" else ""


def refuse_labels(labels: object) -> None:
    """For everything but classifiers."""
    if labels is not None:
        raise ValueError("labels are for Classifier signals; gold tokens are called targets")


def check_samples(num_samples: int, p: float) -> None:
    """Of signals that take the mean of K masked predictions."""
    if not isinstance(num_samples, int) or not 1 <= num_samples < 2**20:
        raise ValueError(f"num_samples must be an int of at least 1, got {num_samples!r}")
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
