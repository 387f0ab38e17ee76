"""What a training run is made of, and the recipes it can start from."""

# ruff: noqa: RUF009 (_option is dataclasses.field with a help text)

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .files import read_lines


def _option(default, help: str, choices: tuple | None = None):
    metadata = {"help": help, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """All settings of a run. Plain values, so that they can be saved, compared and printed."""

    # Data
    max_vocab: int | None = _option(None, "most frequent words kept; others become <unk>")
    min_count: int = _option(1, "words seen less often in the training text become <unk>")
    batch_size: int = _option(20, "parts of the text read side by side, over all processes")
    bptt: int = _option(35, "time steps per window; states are carried on, gradients are not")
    eval_batch_size: int = _option(10, "batch size for validation and test")
    # Model
    embedding_size: int | None = _option(None, "hidden_size if absent")
    hidden_size: int = _option(200, "units per layer")
    num_layers: int = _option(2, "LSTM layers")
    dropout: float = _option(0.0, "of embeddings, between layers and before the decoder")
    tie_weights: bool = _option(False, "one matrix for embeddings and decoder")
    init_bound: float | None = _option(None, "all weights start uniform within +- this")
    dtype: str = _option("float32", "precision", ("float32", "float64"))
    # Recoder
    signal: str | None = _option("nll", "what the recoder lowers: a name, or none for a plain LM")
    signal_options: dict = _option({}, "arguments of the signal, e.g. num_samples=15")
    step: float | str = _option(0.1, "how far it goes: a number or a name, e.g. learned")
    step_options: dict = _option({}, "arguments of a named step, e.g. init=0.3")
    states: str = _option("hc", "what is recoded", ("h", "c", "hc"))
    gradient: str = _option(
        "detached", "whether training differentiates the recoder", ("detached", "exact")
    )
    rnn_options: dict = _option({}, "further arguments of the RNN, e.g. probability=0.5")
    decoder_options: dict | None = _option(
        None, "arguments of the ensemble of decoders that the signal 'ensemble' needs"
    )
    # Optimisation
    optimizer: str = _option("sgd", "how weights are updated", ("sgd", "adam", "adamw"))
    lr: float = _option(20.0, "learning rate at the start")
    momentum: float = _option(0.0, "of sgd")
    weight_decay: float = _option(0.0, "learned steps are left out of it")
    clip: float | None = _option(0.25, "largest norm of the gradient; none for no limit")
    loss: str = _option(
        "mean", "over time: its mean, or its sum; a mean over rows", ("mean", "sum")
    )
    epochs: int = _option(8, "how often the text is read")
    schedule: str = _option(
        "plateau",
        "plateau: lr times decay after an epoch without improvement; decay: after every epoch "
        "from decay_after on; cosine: to zero, over all steps",
        ("plateau", "decay", "cosine", "constant"),
    )
    decay: float = _option(0.5, "factor of the learning rate")
    decay_after: int = _option(4, "epochs at the full learning rate with schedule=decay")
    # Run
    seed: int = _option(1, "of initialisation and masks")
    device: str = _option("auto", "cpu, cuda, or auto: a GPU if there is one and kernels for it")
    graph: bool = _option(
        True, "on a GPU: replay steps from a CUDA graph, where their step size and shape allow it"
    )
    log_every: int = _option(100, "steps between two lines of metrics")
    checkpoint_seconds: float = _option(300.0, "time between two checkpoints")

    def __post_init__(self):
        # What files and command lines can say for "nothing" and for numbers.
        if self.signal in ("none", ""):
            object.__setattr__(self, "signal", None)
        if isinstance(self.step, str):
            with contextlib.suppress(ValueError):  # then it is a name
                object.__setattr__(self, "step", float(self.step))
        if self.signal == "ensemble" and self.decoder_options is None:
            object.__setattr__(self, "decoder_options", {})
        self._check()

    def _check(self) -> None:
        for name in (
            "batch_size", "bptt", "eval_batch_size", "hidden_size", "num_layers", "min_count",
            "epochs", "log_every",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        for name in ("lr", "clip", "init_bound", "decay"):
            value = getattr(self, name)
            optional = name in ("clip", "init_bound") and value is None
            if not optional and not (_is_number(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for name in ("weight_decay", "momentum", "checkpoint_seconds", "decay_after"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise ValueError(f"{name} must be a number and not negative, got {value!r}")
        for f in dataclasses.fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            if choices and value not in choices:
                raise ValueError(f"{f.name} must be one of {list(choices)}, got {value!r}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is for optimizer='sgd', not for {self.optimizer!r}")

    @classmethod
    def from_dict(cls, values: dict) -> Config:
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown settings: {unknown}; there are {sorted(known)}")
        return cls(**values)

    @classmethod
    def recipe(cls, name: str | Path, **changes) -> Config:
        """The settings of a recipe (a name, or a TOML file of your own), with changes."""
        return cls.from_dict(override(read_recipe(name), changes))

    def replace(self, **changes) -> Config:
        return self.from_dict(override(dataclasses.asdict(self), changes))

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def override(settings: dict, changes: dict) -> dict:
    """Settings with changes; the options of a signal or step go when another one comes."""
    settings = dict(settings)
    for name in ("signal", "step"):
        if name in changes and changes[name] != settings.get(name):
            settings.pop(f"{name}_options", None)
    return settings | changes


def recipe_names() -> list[str]:
    folder = resources.files(__package__) / "recipes"
    return sorted(
        p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")
    )


def read_recipe(name: str | Path) -> dict:
    """The settings a recipe names, those of its `base` first."""
    if str(name).endswith(".toml"):
        text = "\n".join(read_lines(Path(name)))
    elif name in recipe_names():
        text = (resources.files(__package__) / "recipes" / f"{name}.toml").read_text("utf-8")
    else:
        raise ValueError(f"recipe must be a .toml file or one of {recipe_names()}, got {name!r}")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {name} is not valid TOML: {error}") from error
    base = values.pop("base", None)
    return values if base is None else read_recipe(base) | values


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
