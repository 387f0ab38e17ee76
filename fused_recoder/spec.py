"""`RecoderSpec`: the options of a recoder as one value, which travels to the engine as one string.

Its fields are the table in `csrc/ops/spec.h`, so that both languages have the same ones: a new
option is a line there, and then it exists here, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _C

_PARSERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "tuple": lambda text: tuple(int(item) for item in text.split(",") if item),
}
_TYPES = {"str": str, "bool": bool, "int": int, "float": float, "tuple": tuple}


def _encode_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else repr(value).strip("'")


class _Spec:
    """What `RecoderSpec` can do beside having fields."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def replace(self, **changes: Any) -> RecoderSpec:
        """The same but for `changes`."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def encode(self) -> str:
        """What the ops take: `name=value` of every field that is not as usual."""
        return ";".join(
            f"{name}={_encode_value(getattr(self, name))}"
            for name, default in _DEFAULTS.items()
            if getattr(self, name) != default
        )


_FIELDS = _C.spec_fields()
_DEFAULTS = {name: _PARSERS[kind](default) for name, kind, default, _ in _FIELDS}

if TYPE_CHECKING:
    RecoderSpec = _Spec
else:
    RecoderSpec = dataclasses.make_dataclass(
        "RecoderSpec",
        [(name, _TYPES[kind], _DEFAULTS[name]) for name, kind, _, _ in _FIELDS],
        bases=(_Spec,),
        frozen=True,
    )
    RecoderSpec.__module__ = __name__
    RecoderSpec.__doc__ = "\n".join(
        ["The options of a recoder.", "", *(f"{n}: {meaning}" for n, _, _, meaning in _FIELDS)]
    )


def decode(encoded: str) -> RecoderSpec:
    """A spec from what `encode` made of it."""
    kinds = {name: kind for name, kind, _, _ in _FIELDS}
    items = (item.split("=", 1) for item in encoded.split(";") if item)
    return RecoderSpec(**{name: _PARSERS[kinds[name]](text) for name, text in items})
