"""What `FusedRecodingLSTM` and its oracle `reference.RecodingLSTM` have in common: options, and the
translation of everything users pass into one time-major, checked call of `_run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ._call import Call, RecodingTrace, Result, counted_positions
from ._layout import Layout
from ._masks import SKIP_STREAM, dropout_mask
from ._parameters import LSTMParameters
from ._transforms import refuse_forward_mode
from .gate import GateLike, as_gate
from .signals import SignalLike, as_signal
from .signals.base import refuse_labels
from .signals.formulas import IGNORE
from .spec import RecoderSpec
from .steps import StepLike, as_step

States = tuple[Tensor, Tensor]  # (h, c)
Output = Tensor | PackedSequence
Self = TypeVar("Self", bound="RecodingLSTMBase")


class RecodingLSTMBase(LSTMParameters):
    """Everything but the time loop."""

    _held_decoder: tuple[nn.Module | None]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        *,
        decoder: nn.Module | None,
        signal: SignalLike = "nll",
        step: StepLike = 0.1,
        output_dropout: float = 0.0,
        states: str | Sequence[str] = ("h", "c"),
        gradient: str = "detached",
        gate: GateLike = None,
        probability: float | tuple[float, float] = 1.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self._refuse(bidirectional=bidirectional, proj_size=proj_size)
        super().__init__(input_size, hidden_size, num_layers, bias, device, dtype)
        self.batch_first = bool(batch_first)
        self.dropout, self.output_dropout = _dropouts(dropout, output_dropout)
        self.states = _in_order(states)
        if gradient not in ("detached", "exact"):
            raise ValueError(f"gradient must be 'detached' or 'exact', got {gradient!r}")
        self.gradient = gradient
        self.probability = probability
        self.gate = as_gate(gate)
        if self.gate is not None:
            self.gate.to(device)
        self.signal = as_signal(signal)
        self.step = as_step(step)
        self.step.bind(num_layers, self.states, hidden_size, device=device, dtype=dtype)
        self._hold(decoder)
        if self.signal is not None:
            self.signal.initialise(decoder)
            self.signal.to(device=device, dtype=dtype)

    @classmethod
    def _refuse(cls, **options: object) -> None:
        for name, value in options.items():
            if value:
                raise NotImplementedError(
                    f"{cls.__name__} does not support {name}: recoding carries a corrected state "
                    "from one time step to the next, in reading order, at its full size"
                )

    @classmethod
    def from_lstm(
        cls: type[Self], lstm: nn.LSTM, decoder: nn.Module | None, **options: Any
    ) -> Self:
        """A recoding LSTM that shares the weights of `lstm` and takes over its settings."""
        cls._refuse(bidirectional=lstm.bidirectional, proj_size=lstm.proj_size)
        settings = {"batch_first": lstm.batch_first, "dropout": lstm.dropout} | options
        weight = lstm.weight_hh_l0
        assert isinstance(weight, Tensor)
        new = cls(
            lstm.input_size,
            lstm.hidden_size,
            lstm.num_layers,
            lstm.bias,
            decoder=decoder,
            device=weight.device,
            dtype=weight.dtype,
            **settings,
        )
        for name, _ in list(new.named_parameters(recurse=False)):
            setattr(new, name, getattr(lstm, name))
        new.train(lstm.training)
        return new

    # ------------------------------------------------------------------------------------ options

    @property
    def probability(self) -> tuple[float, float]:
        """The share of positions that are recoded, in training and in evaluation."""
        return self._probability

    @probability.setter
    def probability(self, value: float | tuple[float, float]) -> None:
        training, evaluation = value if isinstance(value, tuple) else (value, 1.0)
        for share in (training, evaluation):
            if not 0 < share <= 1:
                raise ValueError(f"probability must be in (0, 1], got {share}")
        self._probability = (float(training), float(evaluation))

    @property
    def active_probability(self) -> float:
        """The share of positions that are recoded in the present mode; 1 without a signal."""
        return 1.0 if self.signal is None else self._probability[0 if self.training else 1]

    @property
    def active_dropout(self) -> tuple[float, float]:
        """Dropout probabilities in force: between layers, before the decoder."""
        if not self.training:
            return 0.0, 0.0
        return self.dropout if self.num_layers > 1 else 0.0, self.output_dropout

    @property
    def rows_per_instance(self) -> int:
        """How many rows of states an instance of the batch has."""
        return 1 if self.signal is None else self.signal.rows_per_instance

    # ------------------------------------------------------------------------------------ decoder

    @property
    def decoder(self) -> nn.Module | None:
        """What turns the top state into logits. Held, not registered: it belongs to the model that
        also decodes with it."""
        return self._held_decoder[0]

    @decoder.setter
    def decoder(self, decoder: nn.Module | None) -> None:
        self._hold(decoder)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "decoder":  # nn.Module would register it, past the property
            object.__setattr__(self, name, value)
        elif name == "qconfig":  # what torch.ao.quantization sets on all modules before it begins
            raise NotImplementedError(
                "a model that recodes cannot be quantized: its decoder would be exchanged for one "
                "that has no weight to differentiate in"
            )
        else:
            super().__setattr__(name, value)

    def _hold(self, decoder: nn.Module | None) -> None:
        if decoder is not None or (self.signal is not None and self.signal.needs_decoder):
            self._check_decoder(decoder)
        before = self.__dict__.get("_held_decoder", (None,))
        # In a tuple, so that it is held and deep-copied with us, but not registered.
        self._held_decoder = (decoder,)
        try:
            if self.signal is not None:
                self.signal.bind(self)
        except Exception:
            self._held_decoder = before
            raise

    def _check_decoder(self, decoder: nn.Module | None) -> None:
        weight = getattr(decoder, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() not in (2, 3):
            raise TypeError(
                "decoder must be a Linear-like module with a weight [V, H], or an EnsembleDecoder, "
                f"got {type(decoder).__name__}"
            )
        if weight.shape[-1] != self.hidden_size:
            raise ValueError(
                f"decoder must read hidden_size = {self.hidden_size} features, got a weight of "
                f"shape {tuple(weight.shape)}"
            )

    def decoder_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, H] and bias [V] or None of the held decoder."""
        weight, bias = getattr(self.decoder, "weight", None), getattr(self.decoder, "bias", None)
        assert isinstance(weight, Tensor)
        if hasattr(weight, "full_tensor"):  # a DTensor: it is gathered when the decoder is called
            raise NotImplementedError(
                "decoder must not be sharded by itself (fully_shard): the RNN reads its weight "
                "before it is called. Shard the model that holds both instead"
            )
        if getattr(self, "_is_replica", False):
            # A DataParallel replica still holds the original decoder: copy it over, differentiably.
            device = self.weight_hh_l0.device
            weight, bias = weight.to(device), None if bias is None else bias.to(device)
        return weight, bias

    @property
    def mean_logits(self) -> bool:
        """Whether the decoder is an ensemble that predicts with the mean of its logits."""
        return getattr(self.decoder, "predict", None) == "mean_logits"

    @property
    def spec(self) -> RecoderSpec:
        """What the fused engine is told of this recoder, whatever it is called with."""
        fields = {} if self.signal is None else self.signal.spec_fields() | self.step.spec_fields()
        return RecoderSpec(
            recode_h="h" in self.states,
            recode_c="c" in self.states,
            mean_logits=self.mean_logits,
            exact=self.gradient == "exact" and self.signal is not None,
            **fields,
        )

    # --------------------------------------------------------------------------------------- calls

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: States | None = None,
        *,
        targets: Tensor | PackedSequence | None = None,
        labels: Tensor | PackedSequence | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        recode_mask: Tensor | PackedSequence | None = None,
        return_trace: bool = False,
        generator: torch.Generator | None = None,
        loss: bool | None = None,
    ) -> tuple[Output, States] | tuple[Output, States, RecodingTrace] | Result:
        """Like `nn.LSTM`, recoding on the way.

        Args:
            input: `[T, B, I]`, `[B, T, I]` with `batch_first`, `[T, I]` unbatched, or packed
                (but for a variational signal).
            hx: `(h_0, c_0)`, each `[L, B, H]` (`[L, H]` unbatched); zeros if absent. With a
                variational signal `[L, K*B, H]`, or `[L, B, H]` for all samples.
            targets: gold tokens, int64, in the layout of the input (padded or packed for packed
                input). -100: no recoding there. Gold signals need them.
            labels: of a `Classifier`, int64, in the layout of the input; -100: none.
            lengths: `[B]`, real lengths of a padded batch.
            recode_mask: bool, in the layout of the input: where recoding is allowed.
            return_trace: also return a `RecodingTrace`.
            generator: where the seed of this call's masks comes from, instead of torch's own.
            loss: for language models, which want everything by name: return a `Result`, with the
                targets' nll if true.

        Returns:
            `output, (h_n, c_n)` as `nn.LSTM` does. `output` is the state to decode: that of the
            top layer before recoding for signals that see the gold token, after it for the
            others. `h_n` and `c_n` are the recoded states, for the next call.
        """
        result = self.read(
            input, hx, targets=targets, labels=labels, lengths=lengths, recode_mask=recode_mask,
            return_trace=return_trace, generator=generator, loss=bool(loss),
        )  # fmt: skip
        if loss is not None:
            return result
        states = (result.h_n, result.c_n)
        if result.trace is not None:
            return result.output, states, result.trace
        return result.output, states

    def read(
        self,
        input: Tensor | PackedSequence,
        hx: States | None = None,
        *,
        targets: Tensor | PackedSequence | None = None,
        labels: Tensor | PackedSequence | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        recode_mask: Tensor | PackedSequence | None = None,
        return_trace: bool = False,
        generator: torch.Generator | None = None,
        loss: bool = False,
    ) -> Result:
        """`forward` by name, with the targets' nll (in the layout of the input) if asked for."""
        if self.signal is None:
            refuse_labels(labels)
        else:
            self.signal.check_call(targets, labels)
        layout = Layout(input, lengths, self.batch_first, self.input_size)
        if layout.packed is not None and self.signal is not None and self.signal.separate_states:
            raise ValueError(
                f"input must not be packed with {type(self.signal).__name__}: no PackedSequence "
                "holds the output [K, T, B, H] of K samples; give the padded batch (see "
                "torch.nn.utils.rnn.pad_packed_sequence) and lengths= instead"
            )
        x = layout.input
        h0, c0 = self.initial_states(hx, layout.batch_size, x.device, layout.unbatched)
        seed = self._draw_seed(x.device, generator)
        mask = layout.time_major("recode_mask", recode_mask, torch.bool, False)
        call = Call(
            x, h0, c0,
            layout.time_major("targets", targets, torch.int64, IGNORE),
            layout.time_major("labels", labels, torch.int64, IGNORE),
            self._thinned_out(mask, seed, x),
            layout.lengths, seed, 0, loss, return_trace,
        )  # fmt: skip
        refuse_forward_mode(self.differentiable(call))
        result = self._run(call)
        if self.gate is not None and self.training and result.delta is not None:
            self.gate.update(result.delta, counted_positions(call))
        return layout.restore(result, self.rows_per_instance)

    def _run(self, call: Call) -> Result:
        """The time loop."""
        raise NotImplementedError

    def differentiable(self, call: Call) -> list[Tensor | None]:
        """All that results may be differentiated in."""
        decoder = () if self.decoder is None else self.decoder_parameters()
        return [call.input, call.h0, call.c0, *self.parameters(), *self.buffers(), *decoder]

    def initial_states(
        self,
        hx: States | None,
        batch_size: int,
        device: torch.device,
        unbatched: bool = False,
    ) -> States:
        """`hx` checked, as two states `[L, R, H]`; zeros if it is None."""
        L, K, H = self.num_layers, self.rows_per_instance, self.hidden_size
        rows = (L, K * batch_size, H)
        if hx is None:
            # Not in the input's dtype: under autocast that may be half, and states are carried on.
            zeros = torch.zeros(rows, dtype=self.weight_hh_l0.dtype, device=device)
            return zeros, zeros
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            raise TypeError("hx must be a tuple (h_0, c_0)")
        expected = (L, H) if unbatched else (L, batch_size, H)
        for name, state in zip(("h_0", "c_0"), hx, strict=True):
            if tuple(state.shape) not in (expected, rows):
                alternative = f" or {rows}" if K > 1 else ""
                raise ValueError(
                    f"hx: {name} must have shape {expected}{alternative}, got {tuple(state.shape)}"
                )

        def for_all_samples(state: Tensor) -> Tensor:
            state = state.unsqueeze(1) if state.dim() == 2 else state
            return state if tuple(state.shape) == rows else state.repeat(1, K, 1)

        return for_all_samples(hx[0]), for_all_samples(hx[1])

    def _draw_seed(self, device: torch.device, generator: torch.Generator | None) -> Tensor | None:
        """The seed of this call's masks, `[1]`; None if nothing is random."""
        samples_p = 0.0 if self.signal is None else self.signal.p
        if self.active_dropout == (0.0, 0.0) and samples_p == 0 and self.active_probability == 1:
            return None
        # Not while a CUDA graph is captured: every replay draws a seed of its own, on the device.
        if (
            device.type == "cuda"
            and self.signal is not None
            and self.signal.seed_on_host
            and (generator is None or generator.device.type == "cpu")
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
        ):
            device = torch.device("cpu")
        return torch.randint(2**63 - 1, (1,), device=device, generator=generator)

    def _thinned_out(self, mask: Tensor | None, seed: Tensor | None, x: Tensor) -> Tensor | None:
        """Where recoding is allowed `[T, B]`, without what `probability` leaves out."""
        share = self.active_probability
        if share == 1:
            return mask
        assert seed is not None
        T, B, _ = x.shape
        kept = dropout_mask(seed.to(x.device), SKIP_STREAM, 1 - share, T, B, 1, torch.float32)
        kept = kept.squeeze(2) > 0
        return kept if mask is None else mask & kept

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {
            "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0,
            "output_dropout": 0.0, "states": ("h", "c"), "gradient": "detached",
            "probability": (1.0, 1.0),
        }  # fmt: skip
        parts += [f"{n}={getattr(self, n)!r}" for n, d in defaults.items() if getattr(self, n) != d]
        if self.signal is None:
            parts.append("signal=None")
        return ", ".join(parts)


def _dropouts(dropout: float, output_dropout: float) -> tuple[float, float]:
    for name, p in (("dropout", dropout), ("output_dropout", output_dropout)):
        if not 0 <= p < 1:
            raise ValueError(f"{name} must be in [0, 1), got {p}")
    return float(dropout), float(output_dropout)


def _in_order(states: str | Sequence[str]) -> tuple[str, ...]:
    states = (states,) if isinstance(states, str) else tuple(states)
    if not states or len(set(states)) != len(states) or set(states) - {"h", "c"}:
        raise ValueError(f"states must be 'h', 'c' or both, got {states}")
    return tuple(state for state in ("h", "c") if state in states)
