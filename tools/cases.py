"""Everything there is to choose from, in one list: the cases of the digests (`tools.digest`) and of
the fuzzers (`tests/fuzz`). A new option gets into both by being in OPTIONS and in `tools.run_case`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import fields, make_dataclass, replace

# The first value of each is its default.
OPTIONS: dict[str, tuple] = {
    "model": ("rnn", "lm", "reader", "function"),
    "signal": (
        "nll", "none", "surprisal", "surprisal-argmax", "entropy", "mc-unit", "mc-unit-one",
        "mc-unit-undropped", "mc-shared", "mc-shared-one", "mc-shared-mostly-dropped", "mc-weight",
        "ensemble", "ensemble-mean-logits", "variational", "classifier", "classifier-of-c",
        "classifier-of-classes", "classifiers", "custom", "custom-unlabelled",
    ),
    "step": (
        "number", "tensor", "dict", "learned", "learned-unit", "predicted", "lipschitz",
        "backtracking", "zero",
    ),
    "states": ("hc", "h", "c"),
    "gradient": ("detached", "exact"),
    "layers": (2, 1, 3),
    "bias": (True, False),
    "decoder_bias": (True, False),
    "dropout": (0.0, 0.3),
    "output_dropout": (0.0, 0.3),
    "dropout_kind": ("step", "sequence"),
    "weight_dropout": (0.0, 0.3),
    "word_dropout": (0.0, 0.3),
    "layout": ("time", "batch", "packed", "unbatched"),
    "lengths": (False, True),
    "mask": (False, True),
    "ignored": (False, True),
    "gate": ("none", "threshold", "quantile"),
    "probability": (1.0, 0.6),
    "training": (True, False),
    "trace": (True, False),
    "hx": (True, False),
    "strided": (False, True),  # inputs, states, targets that are not contiguous
    "wants": ("everything", "nothing", "input", "recurrent", "decoder"),  # gradients of what
    "reduce": ("loss", "nll"),  # where a language model's gradient arrives
    "tied": (False, True),
    "autocast": (False, True),
    "dtype": ("float64", "float32", "bfloat16"),
    "rows": (3, 1, 2, 5, 20, 70),
    "time": (4, 1, 2),
    "hidden": (7, 33),
    "vocab": (13, 301),
}  # fmt: skip

FUSED_SIGNALS = [s for s in OPTIONS["signal"] if not s.startswith("custom")]
FUNCTION_SIGNALS = ("nll", "surprisal", "surprisal-argmax", "entropy")

_OF_FUNCTION = {
    "model", "signal", "decoder_bias", "ignored", "strided", "wants", "dtype", "rows", "hidden",
    "vocab",
}  # fmt: skip
_NOT_OF = {
    "rnn": ("reduce", "tied", "word_dropout"),
    "lm": (),
    "reader": (
        "dropout", "output_dropout", "dropout_kind", "weight_dropout", "word_dropout", "layout",
        "lengths", "mask", "ignored", "training", "trace", "strided", "wants", "reduce", "autocast",
    ),
    "function": tuple(set(OPTIONS) - _OF_FUNCTION),
}  # fmt: skip


def _name(case: Case) -> str:
    """Model, signal, and all else that is not the default."""
    values = {f.name: getattr(case, f.name) for f in fields(case)}
    head = [values.pop("model"), values.pop("signal")]
    return " ".join(head + [f"{n}={v}" for n, v in values.items() if v != OPTIONS[n][0]])


Case = make_dataclass(
    "Case",
    [(name, type(values[0]), values[0]) for name, values in OPTIONS.items()],
    namespace={"name": property(_name), "__doc__": "One value of each option."},
    frozen=True,
)


def _reset(case: Case, *names: str) -> Case:
    return replace(case, **{name: OPTIONS[name][0] for name in names})


def settled(case: Case) -> Case:
    """The case, with the default in the place of what does not go with the rest of it."""
    case = _reset(case, *_NOT_OF[case.model])
    if case.model == "function" and case.signal not in FUNCTION_SIGNALS:
        case = _reset(case, "signal")
    if case.model == "reader" and case.signal.startswith("custom"):
        case = _reset(case, "signal")
    if case.model == "lm" and case.layout == "packed":
        case = _reset(case, "layout")
    if case.layout in ("packed", "unbatched"):
        case = _reset(case, "lengths")
    if case.layout == "unbatched":
        case = replace(case, rows=1)
    if case.signal == "variational":
        case = _reset(case, "dropout", "output_dropout")
    if case.signal.startswith("classifier"):
        read = {"classifier-of-c": "c", "classifiers": "hc"}.get(case.signal, "h")
        case = case if set(read) <= set(case.states) else _reset(case, "states")
    if case.signal.startswith("custom") and case.step == "lipschitz":
        case = _reset(case, "step")
    if case.signal.startswith("ensemble"):
        case = _reset(case, "tied")
    if case.tied:
        case = _reset(case, "decoder_bias")
    if case.autocast:
        case = replace(case, dtype="float32")
    return case


def product(**options: Iterable) -> list[Case]:
    """All combinations of some options, defaults elsewhere."""
    chosen = [dict(zip(options, values, strict=True))
              for values in itertools.product(*options.values())]  # fmt: skip
    return [settled(Case(**choice)) for choice in chosen]


def drawn(generator: random.Random, **fixed) -> Case:
    """A case by chance."""
    chosen = {name: generator.choice(values) for name, values in OPTIONS.items()}
    return settled(Case(**(chosen | fixed)))


def _pairs(case: Case) -> set:
    values = [(f.name, getattr(case, f.name)) for f in fields(case)]
    return set(itertools.combinations(values, 2))


def pairwise(seed: int, tries: int = 12) -> list[Case]:
    """Cases that hold every pair of values which can occur together: of some drawn ones always that
    with the most new pairs, until even a wanted pair put into them brings nothing."""
    generator = random.Random(seed)
    wanted = [
        {a: x, b: y}
        for a, b in itertools.combinations(OPTIONS, 2)
        for x, y in itertools.product(OPTIONS[a], OPTIONS[b])
    ]
    generator.shuffle(wanted)
    covered, chosen = set(), []
    for pair in wanted:
        if tuple(pair.items()) in covered:
            continue
        candidates = [drawn(generator, **pair) for _ in range(tries)]
        fitting = [c for c in candidates if tuple(pair.items()) in _pairs(c)]
        if not fitting:
            continue
        best = max(fitting, key=lambda case: len(_pairs(case) - covered))
        covered |= _pairs(best)
        chosen.append(best)
    return chosen
