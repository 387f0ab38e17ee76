"""What `FusedRecodingLSTM` and its oracle `reference.RecodingLSTM` have in common: parameters,
options, and the translation of everything users pass into one time-major, checked call of `_run`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .functional import SKIP_STREAM, dropout_mask
from .gate import as_gate
from .signals import Classifiers, as_signal
from .steps import as_step

IGNORE = -100


class RecodingTrace(NamedTuple):
    """What the recoder did. Time-major like `h_n`, whatever `batch_first` says; 0 in padding."""

    delta: Tensor  # [T, B] the signal
    delta_after: Tensor  # [T, B] the signal of the re-decoded, recoded top state
    step_size: Tensor  # [L, S, T, B] over the recoded states S; 0 where nothing was recoded
    grad_norm: Tensor  # [L, S, T, B]
    skipped: Tensor  # [T, B] bool: has a signal, but mask, gate or probability left it out

    @property
    def skipped_fraction(self) -> Tensor:
        """[] the share of all positions that were left out."""
        return self.skipped.double().mean()


class Call(NamedTuple):
    """One forward call, time-major and checked. What `_run` gets."""

    input: Tensor  # [T, B, I]
    h0: Tensor  # [L, R, H], R = B or K * B for a variational signal
    c0: Tensor  # [L, R, H]
    targets: Tensor | None  # [T, B] int64
    labels: Tensor | None  # [T, B] int64
    mask: Tensor | None  # [T, B] bool
    lengths: Tensor | None  # [B] int64
    seed: Tensor | None  # [1] int64, of this sequence's masks
    time: int  # of the first step, for the masks
    loss: bool  # also compute nll
    trace: bool


class Result(NamedTuple):
    """What `_run` gives back, time-major."""

    output: Tensor  # [T, B, H] the state to decode; [K, T, B, H] of a variational signal
    h_n: Tensor  # [L, R, H]
    c_n: Tensor  # [L, R, H]
    nll: Tensor | None  # [T, B] of the targets; 0 where ignored
    objective: Tensor | None  # [T, B] what the loss is the mean of: nll, or an ensemble's members'
    delta: Tensor | None  # [T, B]
    trace: RecodingTrace | None


def live_positions(call: Call) -> Tensor | None:
    """[T, B] bool, inside its sequence; None: all."""
    if call.lengths is None:
        return None
    time = torch.arange(call.input.shape[0], device=call.lengths.device)
    return time.unsqueeze(1) < call.lengths


def counted_positions(call: Call) -> Tensor | None:
    """[T, B] bool, has a signal; None: all."""
    counted = live_positions(call)
    tokens = call.targets if call.labels is None else call.labels
    if tokens is None:
        return counted
    return tokens != IGNORE if counted is None else counted & (tokens != IGNORE)


def skipped_positions(recoded: Tensor, call: Call) -> Tensor:
    """[T, B] bool: counted, but not among those `recoded` [T, B]."""
    counted = counted_positions(call)
    return ~recoded if counted is None else counted & ~recoded


class RecodingLSTMBase(nn.Module):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        decoder: nn.Module | None,
        signal="nll",
        step=0.1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        states=("h", "c"),
        gradient: str = "detached",
        gate=None,
        probability: float | tuple[float, float] = 1.0,
        device=None,
        dtype=None,
        **refused,
    ):
        super().__init__()
        for name in ("bidirectional", "proj_size"):
            if refused.pop(name, None):
                raise NotImplementedError(
                    f"{type(self).__name__} does not support {name}: recoding carries a corrected "
                    "state from one step to the next, in reading order, at its full size"
                )
        if refused:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(refused))}")
        for name, size in (
            ("input_size", input_size),
            ("hidden_size", hidden_size),
            ("num_layers", num_layers),
        ):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive int, got {size!r}")
        for name, p in (("dropout", dropout), ("output_dropout", output_dropout)):
            if not 0 <= p < 1:
                raise ValueError(f"{name} must be in [0, 1), got {p}")
        if gradient not in ("detached", "exact"):
            raise ValueError(f"gradient must be 'detached' or 'exact', got {gradient!r}")
        states = (states,) if isinstance(states, str) else tuple(states)
        if not states or len(set(states)) != len(states) or set(states) - {"h", "c"}:
            raise ValueError(f"states must be 'h', 'c' or both, got {states}")

        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first = bool(bias), bool(batch_first)
        self.dropout, self.output_dropout = float(dropout), float(output_dropout)
        self.states = tuple(s for s in ("h", "c") if s in states)
        self.gradient = gradient
        factory = {"device": device, "dtype": dtype}
        for layer in range(num_layers):
            below = input_size if layer == 0 else hidden_size
            shapes = {"weight_ih": (4 * hidden_size, below)}
            shapes["weight_hh"] = (4 * hidden_size, hidden_size)
            if self.bias:
                shapes["bias_ih"] = shapes["bias_hh"] = (4 * hidden_size,)
            for name, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(shape, **factory))
                self.register_parameter(f"{name}_l{layer}", parameter)
        self.reset_parameters()

        self.probability = probability
        self.gate = as_gate(gate)
        if self.gate is not None:
            self.gate.to(device)
        self.signal = as_signal(signal)
        self.step = as_step(step)
        self.step.bind(num_layers, self.states, hidden_size, **factory)
        classifies = isinstance(self.signal, Classifiers)
        if decoder is not None or (self.signal is not None and not classifies):
            self._check_decoder(decoder)
        if self.signal is not None:
            self.signal.bind(num_layers, self.states, decoder)
            self.signal.to(device=device, dtype=dtype)
        if classifies:
            for classifier in self.signal.members:
                if classifier.weight.shape[1] != hidden_size:
                    raise ValueError(
                        f"Classifier must read hidden_size = {hidden_size} features, got a weight "
                        f"of shape {tuple(classifier.weight.shape)}"
                    )
        if (
            self.signal is not None
            and self.signal.name == "variational"
            and (self.dropout or self.output_dropout)
        ):
            raise ValueError(
                "dropout and output_dropout must be 0 with Variational: it has masks of its own"
            )
        # In a tuple, so that it is held and deep-copied with us, but not registered: it belongs to
        # the model that also decodes with it.
        self._held_decoder = (decoder,)

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
        return self._probability[0 if self.training else 1]

    @property
    def decoder(self) -> nn.Module | None:
        return self._held_decoder[0]

    def _check_decoder(self, decoder) -> None:
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
        weight, bias = self.decoder.weight, getattr(self.decoder, "bias", None)
        if getattr(self, "_is_replica", False):
            # A DataParallel replica still holds the original decoder: copy it over, differentiably.
            device = self.weight_hh_l0.device
            weight, bias = weight.to(device), None if bias is None else bias.to(device)
        return weight, bias

    def reset_parameters(self) -> None:
        """The initialisation of nn.LSTM, in its order."""
        bound = 1 / math.sqrt(self.hidden_size)
        for weights in self.all_weights:
            for weight in weights:
                nn.init.uniform_(weight, -bound, bound)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """Per layer w_ih [4H, in], w_hh [4H, H] and, with bias, b_ih, b_hh [4H]."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self.bias else 2]
        return [[getattr(self, f"{k}_l{n}") for k in kinds] for n in range(self.num_layers)]

    @classmethod
    def from_lstm(cls, lstm: nn.LSTM, decoder: nn.Module | None, **options):
        """A recoding LSTM that shares the weights of `lstm` and takes over its settings."""
        if lstm.bidirectional or lstm.proj_size:
            raise NotImplementedError(
                f"{cls.__name__} supports neither bidirectional LSTMs nor proj_size"
            )
        settings = {"batch_first": lstm.batch_first, "dropout": lstm.dropout} | options
        weight = lstm.weight_hh_l0
        new = cls(
            lstm.input_size,
            lstm.hidden_size,
            lstm.num_layers,
            decoder=decoder,
            bias=lstm.bias,
            device=weight.device,
            dtype=weight.dtype,
            **settings,
        )
        for name, _ in list(new.named_parameters(recurse=False)):
            setattr(new, name, getattr(lstm, name))
        new.train(lstm.training)
        return new

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        targets: Tensor | PackedSequence | None = None,
        labels: Tensor | PackedSequence | None = None,
        lengths: Tensor | None = None,
        recode_mask: Tensor | PackedSequence | None = None,
        return_trace: bool = False,
        generator: torch.Generator | None = None,
    ):
        """Like `nn.LSTM`, recoding on the way.

        Args:
            input: `[T, B, I]`, `[B, T, I]` with `batch_first`, `[T, I]` unbatched, or packed.
            hx: `(h_0, c_0)`, each `[L, B, H]` (`[L, H]` unbatched); zeros if absent. With a
                variational signal `[L, K*B, H]`, or `[L, B, H]` for all samples.
            targets: gold tokens, int64, in the layout of the input. -100: no recoding there.
                Gold signals without targets recode towards the most probable token.
            labels: of a `Classifier`, int64, in the layout of the input; -100: none.
            lengths: `[B]`, real lengths of a padded batch.
            recode_mask: bool, in the layout of the input: where recoding is allowed.
            return_trace: also return a `RecodingTrace`.
            generator: where the seed of this call's masks comes from, instead of torch's own.

        Returns:
            `output, (h_n, c_n)` as `nn.LSTM` does. `output` is the state to decode: that of the
            top layer before recoding for signals that see the gold token, after it for the
            others. `h_n` and `c_n` are the recoded states, for the next call.
        """
        result = self.read(
            input, hx, targets=targets, labels=labels, lengths=lengths, recode_mask=recode_mask,
            return_trace=return_trace, generator=generator,
        )  # fmt: skip
        states = (result.h_n, result.c_n)
        return (result.output, states, result.trace) if return_trace else (result.output, states)

    def read(
        self,
        input: Tensor | PackedSequence,
        hx=None,
        *,
        targets=None,
        labels=None,
        lengths=None,
        recode_mask=None,
        return_trace: bool = False,
        generator: torch.Generator | None = None,
        loss: bool = False,
    ) -> Result:
        """`forward` by name, with the targets' nll (in the layout of the input) if asked for."""
        if isinstance(self.signal, Classifiers):
            self.signal.check_labels(labels)
        elif labels is not None:
            raise ValueError("labels are for Classifier signals; gold tokens are called targets")
        packed = input if isinstance(input, PackedSequence) else None
        if packed is not None:
            if lengths is not None:
                raise ValueError("lengths must not be given with a PackedSequence: it has its own")
            input, lengths = pad_packed_sequence(packed)
            targets = self._unpack("targets", targets, packed, IGNORE)
            labels = self._unpack("labels", labels, packed, IGNORE)
            recode_mask = self._unpack("recode_mask", recode_mask, packed, False)
        if not isinstance(input, Tensor):
            raise TypeError(f"input must be a Tensor or PackedSequence, got {type(input).__name__}")
        time_major = packed is not None or not self.batch_first
        unbatched = input.dim() == 2 and packed is None
        if not unbatched and input.dim() != 3:
            raise ValueError(f"input must have 2 or 3 dimensions, got shape {tuple(input.shape)}")
        if input.shape[-1] != self.input_size:
            raise ValueError(
                f"input must have input_size = {self.input_size} features, got shape "
                f"{tuple(input.shape)}"
            )
        lead = tuple(input.shape[:-1])
        if 0 in lead:
            raise ValueError(f"input must not be empty, got shape {tuple(input.shape)}")
        for name, tensor, dtype in (
            ("targets", targets, torch.int64),
            ("labels", labels, torch.int64),
            ("recode_mask", recode_mask, torch.bool),
        ):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
                given = getattr(tensor, "dtype", type(tensor).__name__)
                raise TypeError(f"{name} must be a {dtype} tensor, got {given}")
            if tuple(tensor.shape) != lead:
                raise ValueError(
                    f"{name} must have shape {lead} like input, got {tuple(tensor.shape)}"
                )

        def to_time_major(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            return t.unsqueeze(1) if unbatched else t if time_major else t.transpose(0, 1)

        x = to_time_major(input)
        h0, c0 = self._initial_states(hx, x, unbatched, packed)
        if lengths is not None:
            lengths = torch.as_tensor(lengths, dtype=torch.int64, device=x.device)
        seed = self._draw_seed(x, generator)
        mask = self._thin_out(to_time_major(recode_mask), seed, x)
        call = Call(
            x, h0, c0, to_time_major(targets), to_time_major(labels), mask, lengths, seed, 0, loss,
            return_trace,
        )  # fmt: skip
        result = self._run(call)
        if self.gate is not None and self.training:
            self.gate.update(result.delta, counted_positions(call))
        output, h_n, c_n, nll, objective, delta, trace = result

        if unbatched:
            output, h_n, c_n = output.squeeze(-2), self._unbatch(h_n), self._unbatch(c_n)
            nll, objective, delta = (None if t is None else t.squeeze(1) for t in result[3:6])
            trace = trace and RecodingTrace(*(t.squeeze(-1) for t in trace))
        elif packed is not None:
            output = self._repack(output, packed, lengths)
        elif not time_major:
            output = output.transpose(-3, -2)
            nll, objective, delta = (None if t is None else t.transpose(0, 1) for t in result[3:6])
        return Result(output, h_n, c_n, nll, objective, delta, trace)

    @property
    def _rows_per_instance(self) -> int:
        variational = self.signal is not None and self.signal.name == "variational"
        return self.signal.samples if variational else 1

    def _unbatch(self, state: Tensor) -> Tensor:
        return state if self._rows_per_instance > 1 else state.squeeze(1)

    def _run(self, call: Call) -> Result:
        """The time loop."""
        raise NotImplementedError

    def _initial_states(self, hx, x: Tensor, unbatched: bool, packed) -> tuple[Tensor, Tensor]:
        shape = (self.num_layers, x.shape[1], self.hidden_size)
        if hx is None:
            # Not in the input's dtype: under autocast that may be half, and states are carried on.
            rows = (shape[0], self._rows_per_instance * shape[1], shape[2])
            zeros = torch.zeros(rows, dtype=self.weight_hh_l0.dtype, device=x.device)
            return zeros, zeros
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            raise TypeError("hx must be a tuple (h_0, c_0)")
        samples = self._rows_per_instance
        of_samples = (shape[0], samples * shape[1], shape[2])
        expected = (shape[0], shape[2]) if unbatched else shape
        for name, state in zip(("h_0", "c_0"), hx, strict=True):
            if tuple(state.shape) not in (expected, of_samples):
                alternative = f" or {of_samples}" if samples > 1 else ""
                raise ValueError(
                    f"hx: {name} must have shape {expected}{alternative}, got {tuple(state.shape)}"
                )

        def for_all_samples(state: Tensor) -> Tensor:
            if state.dim() == 2:
                state = state.unsqueeze(1)
            return state if tuple(state.shape) == of_samples else state.repeat(1, samples, 1)

        return for_all_samples(hx[0]), for_all_samples(hx[1])

    def _draw_seed(self, x: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """The seed of this call's masks; None if nothing is random."""
        samples_p = 0.0 if self.signal is None else self.signal.p
        skips = self.signal is not None and self.active_probability < 1
        if self.active_dropout == (0.0, 0.0) and samples_p == 0 and not skips:
            return None
        device = x.device
        # Columns of shared masks are listed on the host, which then has to know the seed. Not while
        # a CUDA graph is captured: every replay draws a seed of its own, on the device.
        if (
            x.is_cuda
            and self.signal is not None
            and self.signal.engine_name == "mc_shared"
            and (generator is None or generator.device.type == "cpu")
            and not torch.compiler.is_compiling()
            and not torch.cuda.is_current_stream_capturing()
        ):
            device = torch.device("cpu")
        return torch.randint(2**63 - 1, (1,), device=device, generator=generator)

    def _thin_out(self, mask: Tensor | None, seed: Tensor | None, x: Tensor) -> Tensor | None:
        """Leaves out what `probability` says, `[T, B]`."""
        share = self.active_probability
        if self.signal is None or share == 1:
            return mask
        T, B, _ = x.shape
        seed = seed.to(x.device)
        kept = dropout_mask(seed, SKIP_STREAM, 1 - share, T, B, 1, torch.float32).squeeze(2) > 0
        return kept if mask is None else mask & kept

    @property
    def active_dropout(self) -> tuple[float, float]:
        """Dropout probabilities in force: between layers, before the decoder."""
        if not self.training:
            return 0.0, 0.0
        return self.dropout if self.num_layers > 1 else 0.0, self.output_dropout

    @staticmethod
    def _unpack(name: str, value, packed: PackedSequence, fill) -> Tensor | None:
        if not isinstance(value, PackedSequence):
            return value
        if not torch.equal(value.batch_sizes, packed.batch_sizes):
            raise ValueError(f"{name} must have the batch_sizes of input")
        return pad_packed_sequence(value, padding_value=fill)[0]

    @staticmethod
    def _repack(output: Tensor, packed: PackedSequence, lengths: Tensor) -> PackedSequence:
        """`output` [T, B, H] in the original order, packed exactly as the input was."""
        lengths = lengths.cpu()
        if packed.sorted_indices is not None:
            order = packed.sorted_indices
            output, lengths = output.index_select(1, order), lengths[order.cpu()]
        data = pack_padded_sequence(output, lengths).data
        return PackedSequence(
            data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )

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
