"""Language models and optimizers from plain settings, and from other people's weights."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import fused_recoder as fr

from .._build import has_cuda_kernels, why_gpus_stay_idle
from .config import Config


def build_model(
    config: Config, vocab_size: int, *, dataset_size: int | None = None, model_class=None
) -> fr.RecodingLanguageModel:
    """The model a config describes, freshly initialised, on the CPU.

    Args:
        dataset_size: training tokens, for the anchors of an ensemble of decoders.
        model_class: `fr.RecodingLanguageModel`, or its slow twin in `fr.reference`.
    """
    dtype = getattr(torch, config.dtype)
    options = dict(config.rnn_options)
    if config.decoder_options is not None:
        decoder_options = {"dataset_size": dataset_size} | config.decoder_options
        options["decoder"] = _ensemble_decoder(config.hidden_size, vocab_size, decoder_options)
        options["decoder"].to(dtype)
    model = (model_class or fr.RecodingLanguageModel)(
        vocab_size,
        config.embedding_size or config.hidden_size,
        config.hidden_size,
        config.num_layers,
        signal=build_signal(config.signal, config.signal_options),
        # A plain model has no step, so nothing to learn about it either.
        step=build_step(config.step, config.step_options) if config.signal else 0.0,
        dropout=config.dropout,
        tie_weights=config.tie_weights,
        states=tuple(config.states),
        gradient=config.gradient,
        dtype=dtype,
        **options,
    )
    if config.init_bound is not None:
        initialised = [*model.encoder.parameters(), *model.rnn.parameters(recurse=False)]
        if config.decoder_options is None:  # an ensemble starts from its prior
            initialised += model.decoder.parameters()
        for parameter in initialised:
            nn.init.uniform_(parameter, -config.init_bound, config.init_bound)
    return model


def build_signal(name: str | None, options: dict):
    return None if name is None else _from_registry("signal", fr.signals.NAMES, name, options)


def build_step(step: float | str, options: dict):
    if not isinstance(step, str):
        if options:
            raise ValueError(f"a step that is a number takes no step_options, got {options}")
        return float(step)
    return _from_registry("step", fr.steps.NAMES, step, options)


def _from_registry(kind: str, registry: dict, name: str, options: dict):
    if name not in registry:
        numbers = "a number or " if kind == "step" else "'none' or "
        raise ValueError(f"{kind} must be {numbers}one of {sorted(registry)}, got {name!r}")
    return _call(f"{kind}_options of {name!r}", registry[name], options)


def _ensemble_decoder(hidden_size: int, vocab_size: int, options: dict) -> nn.Module:
    decoder_class = getattr(fr, "EnsembleDecoder", None)
    if decoder_class is None:
        raise ValueError("decoder_options: this version has no ensembles of decoders")
    return _call("decoder_options", decoder_class, options, hidden_size, vocab_size)


def _call(what: str, make, options: dict, *arguments):
    """`make(*arguments, **options)`, with a message about `what` if the options are not its."""
    known = list(inspect.signature(make).parameters)[len(arguments) :]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"{what} must be among {known}, got {unknown}")
    return make(*arguments, **options)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Weight decay for all but the parameters that ask to be left out, e.g. learned steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    exempt = [p for p in parameters if getattr(p, "no_weight_decay", False)]
    decayed = [p for p in parameters if not getattr(p, "no_weight_decay", False)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, config.lr, config.momentum, fused=True)
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return classes[config.optimizer](groups, config.lr, fused=True)


def choose_device(name: str) -> torch.device:
    """The device of this name; for "auto" a GPU, if there is one and this build has kernels."""
    if name != "auto":
        return torch.device(name)
    if why_not := why_gpus_stay_idle():
        warnings.warn(f"There is a GPU, but the CPU is used: {why_not}", stacklevel=2)
    usable = torch.cuda.is_available() and has_cuda_kernels()
    return torch.device("cuda" if usable else "cpu")


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], *, other_recoder: bool = False
) -> None:
    """Weights into a model; with `other_recoder` its recoder may be another one than theirs."""
    weights = dict(weights)
    if getattr(model.decoder, "weight", None) is model.encoder.weight:
        weights.setdefault("decoder.weight", weights["encoder.weight"])
    result = model.load_state_dict(weights, strict=False)
    recoder = ("rnn.step.", "rnn.signal.") if other_recoder else ()
    missing = [n for n in result.missing_keys if not n.startswith(recoder)]
    surplus = [n for n in result.unexpected_keys if not n.startswith(recoder)]
    if missing or surplus:
        raise ValueError(f"weights do not fit the model: missing {missing}, surplus {surplus}")


def read_plain_weights(path: Path) -> tuple[Config, int, dict[str, Tensor]]:
    """Sizes, vocabulary size and weights of a PyTorch word language model's state dict.

    Expects `encoder.weight`, `rnn.weight_ih_l0` and so on, `decoder.weight`, as in PyTorch's own
    examples; in a file of `torch.save(model.state_dict(), ...)` or in safetensors.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        weights = load_file(path)
    else:
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path} is not a state dict: save it with torch.save(model.state_dict(), ...), "
                f"not the model itself ({type(error).__name__})"
            ) from error
    if not isinstance(weights, dict) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path} must hold a state dict: names and tensors")
    weights = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    needed = ("encoder.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "decoder.weight")
    if missing := [name for name in needed if name not in weights]:
        raise ValueError(f"{path} has no {missing}; it holds {sorted(weights)}")
    vocab_size, embedding_size = weights["encoder.weight"].shape
    rows, hidden_size = weights["rnn.weight_hh_l0"].shape
    if rows != 4 * hidden_size:
        raise ValueError(
            f"{path} does not hold an LSTM: rnn.weight_hh_l0 has {rows} rows for {hidden_size} "
            "hidden units, an LSTM has four per unit"
        )
    weights.setdefault("decoder.bias", weights["decoder.weight"].new_zeros(vocab_size))
    config = Config(
        embedding_size=embedding_size,
        hidden_size=hidden_size,
        num_layers=sum(name.startswith("rnn.weight_hh_l") for name in weights),
        tie_weights=torch.equal(weights["encoder.weight"], weights["decoder.weight"]),
        dtype=str(weights["decoder.weight"].dtype).removeprefix("torch."),
        rnn_options={} if "rnn.bias_ih_l0" in weights else {"bias": False},
        signal=None,
    )
    return config, vocab_size, weights
