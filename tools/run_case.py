"""What a case of `tools.cases` computes, by name: results, traces, gradients. Public API alone.

Weights and inputs come from generators of their own, keyed by name: they depend neither on the
order in which modules make their parameters nor on how these start."""

from __future__ import annotations

import zlib
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fused_recoder as fr
from fused_recoder import reference, signals, steps

from .cases import Case

INPUT = 9  # features of the input, or of the embeddings
CLASSES = 4
MEMBERS = SAMPLES = 3


class Insensitive(AssertionError):
    """A result that is not finite, or zero where it must not be: it would tell nothing."""


def draw(name: str, *shape: int, bound: float = 1.0) -> Tensor:
    """Numbers in [-bound, bound], float64: the same for the same name and shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.rand(shape, dtype=torch.float64, generator=generator) * 2 - 1) * bound


def draw_ints(name: str, below: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(below, shape, generator=generator)


def fill(module: nn.Module, prefix: str = "") -> None:
    """Gives every parameter its value."""
    with torch.no_grad():
        for name, parameter in module.named_parameters(prefix):
            fan = parameter.shape[-1] if parameter.dim() > 1 else 8
            parameter.copy_(draw(name, *parameter.shape, bound=2 / fan**0.5))


# ---------------------------------------------------------------------------------- what is built


def _cube_of_the_logits(logits: Tensor, hidden: Tensor, targets: Tensor | None) -> Tensor:
    delta = (logits / 3).pow(3).mean(-1) + hidden.square().mean(-1)
    if targets is not None:
        delta = delta - logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return delta


def _classifiers(hidden: int, dtype: torch.dtype) -> dict[str, signals.Classifier]:
    def classifier(name: str, classes: int, **place) -> signals.Classifier:
        weight = draw(f"{name}.weight", classes, hidden).to(dtype)
        return signals.Classifier(weight, draw(f"{name}.bias", classes).to(dtype), **place)

    return {
        "classifier": classifier("binary", 1),
        "classifier-of-c": classifier("of c", 1, layer=0, state="c"),
        "classifier-of-classes": classifier("classes", CLASSES, layer=0),
        "classifiers": [
            classifier("binary", 1), classifier("classes of c", CLASSES, layer=0, state="c"),
        ],
    }  # fmt: skip


def make_signal(name: str, hidden: int, dtype: torch.dtype):
    """What the option `signal` stands for."""
    if name.startswith("classifier"):
        return _classifiers(hidden, dtype)[name]
    return {
        "none": lambda: None,
        "nll": signals.NLL,
        "surprisal": signals.Surprisal,
        "surprisal-argmax": lambda: signals.Surprisal(target="argmax"),
        "entropy": signals.Entropy,
        "mc-unit": lambda: signals.MCDropout(SAMPLES, 0.3),
        "mc-unit-one": lambda: signals.MCDropout(1, 0.3),
        "mc-unit-undropped": lambda: signals.MCDropout(2, 0.0),
        "mc-shared": lambda: signals.MCDropout(SAMPLES, 0.3, "shared"),
        "mc-shared-one": lambda: signals.MCDropout(1, 0.3, "shared"),
        "mc-shared-mostly-dropped": lambda: signals.MCDropout(SAMPLES, 0.7, "shared"),
        "mc-weight": lambda: signals.MCDropout(SAMPLES, 0.3, "weight"),
        "ensemble": signals.Ensemble,
        "ensemble-mean-logits": signals.Ensemble,
        "variational": lambda: signals.Variational(SAMPLES, 0.3),
        "custom": lambda: signals.Custom(_cube_of_the_logits),
        "custom-unlabelled": lambda: signals.Custom(_cube_of_the_logits, sees_targets=False),
    }[name]()


def make_step(case: Case):
    """What the option `step` stands for. All numbers are exact in float32."""
    values = torch.tensor([[0.75, 0.5], [0.25, 1.0], [0.5, 0.125]])
    return {
        "number": lambda: 0.75,
        "tensor": lambda: values[: case.layers, : len(case.states)],
        "dict": lambda: {case.states[-1]: 0.5, (0, case.states[0]): 0.25},
        "learned": lambda: steps.Learned(0.5),
        "learned-unit": lambda: steps.Learned(0.5, per="unit"),
        "predicted": lambda: steps.Predicted((5, 4), init=0.5),
        "lipschitz": lambda: steps.Lipschitz(0.5),
        "backtracking": lambda: steps.Backtracking(8.0, 0.5, 6),
        "zero": lambda: 0,
    }[case.step]()


def make_gate(case: Case):
    """What the option `gate` stands for."""
    middle = 0.5 if case.signal.startswith("surprisal") else 1.5
    return {"none": None, "threshold": middle, "quantile": fr.Gate(quantile=0.4)}[case.gate]


def make_decoder(case: Case, dtype: torch.dtype) -> nn.Module:
    """The decoder of the case's signal, with its weights."""
    options = {"bias": case.decoder_bias, "dtype": dtype}
    if case.signal.startswith("ensemble"):
        predict = "mean_logits" if case.signal == "ensemble-mean-logits" else "members"
        decoder = fr.EnsembleDecoder(
            case.hidden, case.vocab, num_members=MEMBERS, predict=predict, **options
        )
    else:
        decoder = nn.Linear(case.hidden, case.vocab, **options)
    fill(decoder, "decoder")
    return decoder


def make_model(case: Case, *, oracle: bool = False) -> nn.Module:
    """The recoding LSTM or language model of a case, the fused one or the reference."""
    dtype = getattr(torch, case.dtype)
    options = {
        "signal": make_signal(case.signal, case.hidden, dtype),
        "step": make_step(case),
        "states": tuple(case.states),
        "gradient": case.gradient,
        "bias": case.bias,
        "batch_first": case.layout == "batch",
        "output_dropout": case.output_dropout,
        "dropout_kind": case.dropout_kind,
        "weight_dropout": case.weight_dropout,
        "gate": make_gate(case),
        "probability": (case.probability, case.probability),
        "dtype": dtype,
    }
    if case.model == "rnn":
        cls = reference.RecodingLSTM if oracle else fr.FusedRecodingLSTM
        options |= {"decoder": make_decoder(case, dtype), "dropout": case.dropout}
        model = cls(INPUT, case.hidden, num_layers=case.layers, **options)
    else:
        cls = reference.RecodingLanguageModel if oracle else fr.RecodingLanguageModel
        options |= {"layer_dropout": case.dropout, "word_dropout": case.word_dropout}
        options["tie_weights"] = case.tied
        if case.signal.startswith("ensemble") or not case.decoder_bias:
            options["decoder"] = make_decoder(case, dtype)
        size = case.hidden if case.tied else INPUT
        model = cls(case.vocab, size, case.hidden, num_layers=case.layers, **options)
    fill(model)
    return model.train(case.training)


# ----------------------------------------------------------------------------- what is put into it


def _spread(tensor: Tensor) -> Tensor:
    """Equal, but not contiguous."""
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else tensor


class Inputs:
    """What a case's model reads. Everything has the layout that the case asks for."""

    def __init__(self, case: Case):
        T, B = case.time, case.rows
        self.case, self.dtype = case, getattr(torch, case.dtype)
        self.real = torch.tensor([T - i % T for i in range(B)])  # lengths, [B]
        self.x = self.lay_out(draw("x", T, B, INPUT).to(self.dtype))
        self.tokens = draw_ints("tokens", case.vocab, T + 1, B)
        targets = self.tokens[1:].clone()
        if case.ignored:
            targets.view(-1)[1::3] = -100
        self.targets = self.lay_out(targets)
        self.hx = None
        if case.hx:
            shape = (case.layers, B, case.hidden)
            self.hx = tuple(self._state(draw(name, *shape)) for name in ("h_0", "c_0"))

    def _state(self, state: Tensor) -> Tensor:
        state = state.to(self.dtype)
        state = state.squeeze(1) if self.case.layout == "unbatched" else state
        return _spread(state) if self.case.strided else state

    def lay_out(self, tensor: Tensor):
        """From [T, B, ...]."""
        layout = self.case.layout
        if layout == "packed":
            return pack_padded_sequence(tensor, self.real, enforce_sorted=False)
        if layout == "unbatched":
            tensor = tensor.squeeze(1)
        elif layout == "batch":
            tensor = tensor.transpose(0, 1).contiguous()
        return _spread(tensor) if self.case.strided else tensor

    def arguments(self) -> dict:
        """Those of `forward`, by name."""
        case = self.case
        T, B = case.time, case.rows
        arguments = {"targets": self.targets, "return_trace": case.trace}
        if case.signal.startswith("classifier"):
            classes = CLASSES if case.signal == "classifier-of-classes" else 2
            labels = draw_ints("labels", classes, T, B)
            if case.ignored:
                labels.view(-1)[1::4] = -100
            arguments["labels"] = self.lay_out(labels)
        if case.mask:
            arguments["recode_mask"] = self.lay_out(draw("mask", T, B) > -0.4)
        if case.lengths:
            arguments["lengths"] = self.real
        return arguments


# --------------------------------------------------------------------------------- what comes out


def _wanted(case: Case, everything: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those tensors of a case that want a gradient, by name."""

    def is_wanted(name: str) -> bool:
        group = "input" if name in ("x", "h_0", "c_0", "hidden", "encoder.weight") else "recurrent"
        group = "decoder" if name.startswith("decoder") else group
        return case.wants in ("everything", group)

    for name, tensor in everything.items():
        tensor.requires_grad_(is_wanted(name))
    return {name: tensor for name, tensor in everything.items() if tensor.requires_grad}


def _gradients(outs: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Of the outs, weighed by numbers of their names."""
    outs = {name: out for name, out in outs.items() if out is not None and out.requires_grad}
    if not outs or not wanted:
        return {}
    weights = [draw(f"weights of {name}", *out.shape).to(out.dtype) for name, out in outs.items()]
    grads = torch.autograd.grad(
        list(outs.values()), list(wanted.values()), weights, allow_unused=True
    )
    return {f"grad {name}": grad for name, grad in zip(wanted, grads, strict=True)}


def _traced(trace) -> dict[str, Tensor]:
    return {} if trace is None else {f"trace {n}": t for n, t in trace._asdict().items()}


def _autocast(case: Case):
    return torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()


def _warm_up(case: Case, model: nn.Module, call) -> None:
    """A gate that follows a quantile has seen nothing before its first call in training."""
    if case.gate == "quantile":
        model.train()
        with torch.no_grad(), _autocast(case):
            call()
        model.train(case.training and case.model != "reader")


def _run_rnn(case: Case, rnn: nn.Module) -> dict[str, Tensor | None]:
    inputs, decoder = Inputs(case), rnn.decoder
    everything = {"x": inputs.x.data if case.layout == "packed" else inputs.x}
    everything |= {} if inputs.hx is None else dict(zip(("h_0", "c_0"), inputs.hx, strict=True))
    everything |= dict(rnn.named_parameters())
    wanted = _wanted(case, everything | dict(decoder.named_parameters("decoder")))
    arguments = inputs.arguments()
    _warm_up(case, rnn, lambda: rnn(inputs.x, inputs.hx, **arguments))
    torch.manual_seed(1)
    with torch.set_grad_enabled(case.wants != "nothing"), _autocast(case):
        output, (h_n, c_n), *trace = rnn(inputs.x, inputs.hx, **arguments)
    if isinstance(output, PackedSequence):
        output = output.data
    outs = {"output": output, "h_n": h_n, "c_n": c_n}
    return outs | _traced(*trace or [None]) | _gradients(outs, wanted)


def _run_lm(case: Case, lm: nn.Module) -> dict[str, Tensor | None]:
    inputs = Inputs(case)
    everything = {} if inputs.hx is None else dict(zip(("h_0", "c_0"), inputs.hx, strict=True))
    wanted = _wanted(case, everything | dict(lm.named_parameters()))
    arguments = inputs.arguments() | {"logits": case.time == 1}
    tokens = inputs.lay_out(inputs.tokens[:-1])
    _warm_up(case, lm, lambda: lm(tokens, hx=inputs.hx, **arguments))
    torch.manual_seed(1)
    with torch.set_grad_enabled(case.wants != "nothing"), _autocast(case):
        out = lm(tokens, hx=inputs.hx, **arguments)
    results = {"loss": out.loss, "nll": out.nll, "h_n": out.hx[0], "c_n": out.hx[1]}
    if out.logits is not None:
        results["logits"] = out.logits
    arrives = {"loss": out.loss} if case.reduce == "loss" else {"nll": out.nll, "h_n": out.hx[0]}
    return results | _traced(out.trace) | _gradients(arrives, wanted)


def _run_reader(case: Case, lm: nn.Module) -> dict[str, Tensor]:
    inputs, tokens = Inputs(case), Inputs(case).tokens
    labels = inputs.arguments().get("labels", [None] * case.time)
    lm.eval()
    more = {} if labels[0] is None else {"labels": labels}
    _warm_up(case, lm, lambda: lm(tokens[:-1], tokens[1:], inputs.hx, **more))
    torch.manual_seed(1)
    reader = lm.reader(case.rows, inputs.hx)
    predictions = [reader.feed(tokens[t], labels[t]) for t in range(case.time)]
    if case.signal in ("nll", "surprisal"):
        reader.finish(tokens[-1])
    h, c = reader.hx
    results = {"log_probabilities": torch.stack(predictions), "h_n": h, "c_n": c}
    return results if case.signal == "none" else results | {"delta": reader.delta}


def _run_function(case: Case, _) -> dict[str, Tensor | None]:
    dtype = getattr(torch, case.dtype)
    hidden = draw("hidden", case.rows, case.hidden).to(dtype)
    targets = draw_ints("targets", case.vocab, case.rows)
    if case.ignored:
        targets[1::3] = -100
    if case.strided:
        hidden, targets = _spread(hidden), _spread(targets)
    decoder = make_decoder(case, dtype)
    everything = {"hidden": hidden, **dict(decoder.named_parameters("decoder"))}
    wanted = _wanted(case, everything)
    with torch.set_grad_enabled(case.wants != "nothing"):
        delta, grad = fr.functional.signal_gradient(
            hidden, decoder.weight, decoder.bias, targets,
            signal=make_signal(case.signal, case.hidden, dtype),
        )  # fmt: skip
    outs = {"delta": delta, "grad": grad}
    return outs | _gradients(outs, wanted)


def run(case: Case, *, oracle: bool = False) -> dict[str, Tensor | None]:
    """All that a case computes, by name; None is a gradient that autograd does not know of."""
    model = None if case.model == "function" else make_model(case, oracle=oracle)
    runners = {"rnn": _run_rnn, "lm": _run_lm, "reader": _run_reader, "function": _run_function}
    results = runners[case.model](case, model)
    return {n: None if t is None else t.detach() for n, t in results.items()}


# Where nothing is ignored, masked or gated away these are never zero.
TELLING = ("output", "h_n", "c_n", "loss", "nll", "log_probabilities", "grad weight_ih_l0")


def check_telling(results: dict[str, Tensor | None]) -> None:
    """Raises if a result is not finite, or one that should not be is all zero."""
    for name, tensor in results.items():
        if tensor is None:
            continue
        if not torch.isfinite(tensor).all():
            raise Insensitive(f"{name} is not finite")
        if name in TELLING and not tensor.any():
            raise Insensitive(f"{name} is all zero")
