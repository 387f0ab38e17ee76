"""What `FusedRecodingLSTM` and its oracle `reference.RecodingLSTM` have in common: parameters,
options, and the translation of everything users pass into one time-major, checked call of `_run`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .signals import as_signal
from .steps import as_step

IGNORE = -100


class RecodingTrace(NamedTuple):
    """What the recoder did. Time-major like `h_n`, whatever `batch_first` says; 0 in padding."""

    delta: Tensor  # [T, B] the signal
    delta_after: Tensor  # [T, B] the signal of the re-decoded, recoded top state
    step_size: Tensor  # [L, S, T, B] over the recoded states S; 0 where nothing was recoded
    grad_norm: Tensor  # [L, S, T, B]


class Call(NamedTuple):
    """One forward call, time-major and checked. What `_run` gets."""

    input: Tensor  # [T, B, I]
    h0: Tensor  # [L, B, H]
    c0: Tensor  # [L, B, H]
    targets: Tensor | None  # [T, B] int64
    mask: Tensor | None  # [T, B] bool
    lengths: Tensor | None  # [B] int64
    seed: Tensor | None  # [1] int64, of this sequence's dropout masks
    loss: bool  # also compute nll
    trace: bool


class Result(NamedTuple):
    """What `_run` gives back, time-major."""

    output: Tensor  # [T, B, H] the state to decode
    h_n: Tensor  # [L, B, H]
    c_n: Tensor  # [L, B, H]
    nll: Tensor | None  # [T, B] of the targets; 0 where ignored
    trace: RecodingTrace | None


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
        probability: float = 1.0,
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
        if gate is not None:
            raise NotImplementedError("gate= is not implemented yet: pass recode_mask to forward")
        if probability != 1.0:
            raise NotImplementedError(
                "probability= is not implemented yet: pass recode_mask to forward"
            )
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

        self.signal = as_signal(signal)
        self.step = as_step(step)
        self.step.bind(num_layers, self.states, **factory)
        if decoder is not None or self.signal is not None:
            self._check_decoder(decoder)
        # In a tuple, so that it is held and deep-copied with us, but not registered: it belongs to
        # the model that also decodes with it.
        self._held_decoder = (decoder,)

    @property
    def decoder(self) -> nn.Module | None:
        return self._held_decoder[0]

    def _check_decoder(self, decoder) -> None:
        weight = getattr(decoder, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise TypeError(
                "decoder must be a Linear-like module with a weight [V, H], got "
                f"{type(decoder).__name__}"
            )
        if weight.shape[1] != self.hidden_size:
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
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
        recode_mask: Tensor | PackedSequence | None = None,
        return_trace: bool = False,
    ):
        """Like `nn.LSTM`, recoding on the way.

        Args:
            input: `[T, B, I]`, `[B, T, I]` with `batch_first`, `[T, I]` unbatched, or packed.
            hx: `(h_0, c_0)`, each `[L, B, H]` (`[L, H]` unbatched); zeros if absent.
            targets: gold tokens, int64, in the layout of the input. -100: no recoding there.
                Gold signals without targets recode towards the most probable token.
            lengths: `[B]`, real lengths of a padded batch.
            recode_mask: bool, in the layout of the input: where recoding is allowed.
            return_trace: also return a `RecodingTrace`.

        Returns:
            `output, (h_n, c_n)` as `nn.LSTM` does. `output` is the state to decode: that of the
            top layer before recoding for signals that see the gold token, after it for the
            others. `h_n` and `c_n` are the recoded states, for the next call.
        """
        result = self.read(
            input, hx, targets=targets, labels=labels, lengths=lengths, recode_mask=recode_mask,
            return_trace=return_trace,
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
        loss: bool = False,
    ) -> Result:
        """`forward` by name, with the targets' nll (in the layout of the input) if asked for."""
        if labels is not None:
            raise NotImplementedError("labels are for Classifier signals, which do not exist yet")
        packed = input if isinstance(input, PackedSequence) else None
        if packed is not None:
            if lengths is not None:
                raise ValueError("lengths must not be given with a PackedSequence: it has its own")
            input, lengths = pad_packed_sequence(packed)
            targets = self._unpack("targets", targets, packed, IGNORE)
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
        call = Call(
            x, h0, c0, to_time_major(targets), to_time_major(recode_mask), lengths,
            self._draw_seed(x), loss, return_trace,
        )  # fmt: skip
        output, h_n, c_n, nll, trace = self._run(call)

        if unbatched:
            output, h_n, c_n = output.squeeze(1), h_n.squeeze(1), c_n.squeeze(1)
            nll = None if nll is None else nll.squeeze(1)
            trace = trace and RecodingTrace(*(t.squeeze(-1) for t in trace))
        elif packed is not None:
            output = self._repack(output, packed, lengths)
        elif not time_major:
            output = output.transpose(0, 1)
            nll = None if nll is None else nll.transpose(0, 1)
        return Result(output, h_n, c_n, nll, trace)

    def _run(self, call: Call) -> Result:
        """The time loop."""
        raise NotImplementedError

    def _initial_states(self, hx, x: Tensor, unbatched: bool, packed) -> tuple[Tensor, Tensor]:
        shape = (self.num_layers, x.shape[1], self.hidden_size)
        if hx is None:
            # Not in the input's dtype: under autocast that may be half, and states are carried on.
            zeros = torch.zeros(shape, dtype=self.weight_hh_l0.dtype, device=x.device)
            return zeros, zeros
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            raise TypeError("hx must be a tuple (h_0, c_0)")
        expected = (shape[0], shape[2]) if unbatched else shape
        for name, state in zip(("h_0", "c_0"), hx, strict=True):
            if tuple(state.shape) != expected:
                raise ValueError(f"hx: {name} must have shape {expected}, got {tuple(state.shape)}")
        h0, c0 = hx
        return (h0.unsqueeze(1), c0.unsqueeze(1)) if unbatched else (h0, c0)

    def _draw_seed(self, x: Tensor) -> Tensor | None:
        """The seed of this call's masks, from torch's generator; None if nothing is random."""
        if self.active_dropout == (0.0, 0.0):
            return None
        return torch.randint(2**63 - 1, (1,), device=x.device)

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
        }  # fmt: skip
        parts += [f"{n}={getattr(self, n)!r}" for n, d in defaults.items() if getattr(self, n) != d]
        if self.signal is None:
            parts.append("signal=None")
        return ", ".join(parts)
