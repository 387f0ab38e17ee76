"""Raw ops and the raw reader with one wrong argument: an error or a result, never a crash.

Arguments are not listed here. A valid call of the public API is made, what reaches the ops and the
reader is recorded, one value anywhere in it is changed, and the calls are made again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tools import run_case
from tools.cases import OPTIONS, Case, drawn, settled


@dataclass
class Recorded:
    """A call; `what` is an op, or the name of a reader's method ("" makes the reader)."""

    what: Any
    arguments: tuple


def _copied(arguments):
    return tree_map(lambda a: a.detach().clone() if isinstance(a, torch.Tensor) else a, arguments)


class _Ops(TorchDispatchMode):
    def __init__(self, calls: list[Recorded]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused_recoder" and not kwargs:
            self.calls.append(Recorded(func, _copied(args)))
        return func(*args, **(kwargs or {}))


class _Reader:
    """Stands before the real one and writes down what it is asked."""

    def __init__(self, calls: list[Recorded], make, *arguments):
        calls.append(Recorded("", _copied(arguments)))
        self._calls, self._reader = calls, make(*arguments)

    def __getattr__(self, name: str):
        def method(*arguments):
            self._calls.append(Recorded(name, _copied(arguments)))
            return getattr(self._reader, name)(*arguments)

        return method


@contextmanager
def _recording() -> Iterator[list[Recorded]]:
    calls: list[Recorded] = []
    space = torch.classes.fused_recoder
    real = space.Reader
    space.Reader = lambda *arguments: _Reader(calls, real, *arguments)
    try:
        with _Ops(calls):
            yield calls
    finally:
        space.Reader = real


def make_again(calls: list[Recorded]) -> None:
    """All results are looked at: memory that is not theirs shows under a sanitizer."""
    reader = None
    for call in calls:
        if call.what == "":
            result = reader = torch.classes.fused_recoder.Reader(*call.arguments)
            continue
        do = getattr(reader, call.what) if isinstance(call.what, str) else call.what
        result = do(*call.arguments)
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                value.double().sum().item()


# --------------------------------------------------------------------------------------- mutation

WORDS = [word for values in OPTIONS.values() for word in values if isinstance(word, str)]
INTEGERS = (0, 1, -1, 2, 7, -100, 2**31, -(2**31), 2**40, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-320, 1e308, float("inf"), -float("inf"), float("nan"))


def _other_values(generator: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, one element or all of them changed."""
    if tensor.dtype == torch.bool:
        return ~tensor
    value = generator.choice(FLOATS if tensor.is_floating_point() else INTEGERS)
    kind = torch.float64 if isinstance(value, float) else torch.int64
    value = torch.tensor(value, dtype=kind).to(tensor.dtype)  # what is too large becomes infinite
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    at = generator.randrange(tensor.numel()) if tensor.numel() else 0
    where = slice(None) if generator.random() < 0.5 else slice(at, at + 1)
    tensor.view(-1)[where] = value
    return tensor


def _other_shape(generator: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    dim = generator.randrange(max(1, tensor.dim()))
    ways = [lambda: tensor.unsqueeze(0), lambda: tensor.flatten(), lambda: tensor.new_empty(0)]
    if tensor.dim() > 0:
        size = tensor.shape[dim]
        ways += [
            lambda: tensor.narrow(dim, 0, max(0, size - 1)),
            lambda: tensor.narrow(dim, 0, 0),
            lambda: torch.cat([tensor, tensor], dim),
            lambda: tensor.select(dim, 0) if size else tensor,
            lambda: tensor.transpose(0, dim),
            lambda: tensor.narrow(dim, 0, min(1, size)).expand_as(tensor) if size else tensor,
        ]
    return generator.choice(ways)()


def _other_tensor(generator: random.Random, tensor: torch.Tensor) -> Any:
    if tensor.is_meta or tensor.is_sparse:  # changed before: odd enough
        return None
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
             torch.uint8, torch.bool, torch.complex64)  # fmt: skip
    return generator.choice(
        (
            lambda: _other_values(generator, tensor),
            lambda: _other_shape(generator, tensor),
            lambda: tensor.to(generator.choice(kinds)),
            lambda: tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else None,
            lambda: None,
            lambda: tensor.to("meta"),
            lambda: tensor.to_sparse() if tensor.numel() else tensor,
        )
    )()


def mutated(generator: random.Random, value: Any) -> Any:
    """Something else in its place."""
    if isinstance(value, torch.Tensor):
        return _other_tensor(generator, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return generator.choice((*INTEGERS, value + 1, value - 1, 3 * value))
    if isinstance(value, float):
        return generator.choice((*FLOATS, -value, value + 1))
    if isinstance(value, str):
        return generator.choice(("", value + "x", value[:-1], "\0", *WORDS, *_ENGINE_WORDS))
    return generator.choice((torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64), 0, None))


_ENGINE_WORDS = ("none", "mc_unit", "mc_shared", "mc_weight", "given", "predicted", "classifier")


def _mutated_list(generator: random.Random, values: list) -> list:
    """One too few, one too many, in another order, none at all, or another element."""
    values = list(values)
    if not values:
        return [torch.zeros(3, 3), torch.zeros(3)][: generator.randint(1, 2)]
    at = generator.randrange(len(values))
    return generator.choice(
        (
            lambda: values[:at] + values[at + 1 :],
            lambda: [*values, values[at]],
            lambda: values[::-1],
            lambda: [],
            lambda: [*values[:at], mutated(generator, values[at]), *values[at + 1 :]],
        )
    )()


def mutate_one(generator: random.Random, calls: list[Recorded]) -> str:
    """Changes one argument of one call; says which."""
    call = generator.choice([c for c in calls if c.arguments])
    at = generator.randrange(len(call.arguments))
    value = call.arguments[at]
    change = _mutated_list if isinstance(value, (list, tuple)) else mutated
    new = change(generator, value)
    call.arguments = (*call.arguments[:at], new, *call.arguments[at + 1 :])
    before, after = (_in_words(v) for v in (value, new))
    return f"{call.what or 'Reader'}: argument {at}: {before} became {after}"


def _in_words(value: Any) -> str:
    leaves, shape = tree_flatten(value)
    leaves = [
        f"{a.dtype}{list(a.shape)} on {a.device}" if isinstance(a, torch.Tensor) else a
        for a in leaves
    ]
    return f"{tree_unflatten(leaves, shape)!r:.400}"


# ------------------------------------------------------------------------------------------ cases


def case_of(seed: int) -> Case:
    generator = random.Random(seed)
    case = drawn(generator, rows=generator.randint(1, 4), time=generator.randint(1, 3))
    return settled(replace(case, hidden=7, vocab=generator.choice((2, 13)), autocast=False))


def mutant_of(seed: int) -> tuple[list[Recorded], str]:
    """Recorded calls with something wrong in them, and what it is."""
    case, generator = case_of(seed), random.Random(seed)
    torch.manual_seed(0)
    refusals = (ValueError, TypeError, NotImplementedError, RuntimeError, IndexError)
    # Where it is refused, what was called until then can be changed as well.
    with _recording() as calls, suppress(*refusals):
        run_case.run(case)
    if not any(call.arguments for call in calls):
        return [], "nothing was called"
    changes = [mutate_one(generator, calls) for _ in range(generator.choice((1, 1, 1, 2)))]
    return calls, "; ".join(changes)


def describe(seed: int) -> str:
    return f"{case_of(seed).name}: {mutant_of(seed)[1]}"


def check(seed: int) -> None:
    """Any error will do, but none that says we had not thought of it."""
    calls, _ = mutant_of(seed)
    try:
        make_again(calls)
    except Exception as error:
        said = str(error)
        if "INTERNAL ASSERT" in said or not said.strip():
            raise AssertionError(f"{describe(seed)}: {type(error).__name__} {said:.500}") from error
