"""Ways to damage a file: its bytes, or what is written in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Damage = Callable[[random.Random, bytes], bytes]


def _part(generator: random.Random, content: bytes) -> tuple[int, int]:
    """Where a part of it begins and ends."""
    ends = sorted(generator.randint(0, len(content)) for _ in range(2))
    return ends[0], max(ends[1], min(ends[0] + 1, len(content)))


def _flip(generator: random.Random, content: bytes) -> bytes:
    """One bit, or some bytes."""
    damaged = bytearray(content)
    for _ in range(generator.choice((1, 1, 1, 20)) if content else 0):
        damaged[generator.randrange(len(content))] ^= generator.choice((1, 128, 255))
    return bytes(damaged)


def _truncate(generator: random.Random, content: bytes) -> bytes:
    return content[: _part(generator, content)[0]]


def _zero(generator: random.Random, content: bytes) -> bytes:
    """As disks do it that lose power."""
    begin, end = _part(generator, content)
    return content[:begin] + bytes(end - begin) + content[end:]


def _cut_out(generator: random.Random, content: bytes) -> bytes:
    begin, end = _part(generator, content)
    return content[:begin] + content[end:]


def _repeat(generator: random.Random, content: bytes) -> bytes:
    begin, end = _part(generator, content)
    return content[:end] + content[begin:]


def _append(generator: random.Random, content: bytes) -> bytes:
    return content + generator.randbytes(generator.choice((1, 8, 1000)))


def _empty(generator: random.Random, content: bytes) -> bytes:
    return b""


def _something_else(generator: random.Random, content: bytes) -> bytes:
    others = (b"\0" * 100, b"{}", b"[]\n", b"null", b"PK\x03\x04", b"\xff\xfe\n", b"<eos>\n", b"\n")
    return generator.choice(others)


BYTES: tuple[Damage, ...] = (
    _flip, _flip, _truncate, _zero, _cut_out, _repeat, _append, _empty, _something_else,
)  # fmt: skip

# ------------------------------------------------------------------------- what is written in it

VALUES = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**70, -0.5, 0.5, 1e308, float("nan"),
    float("inf"), "", "nll", "learned", "x", "\0", "../x", "$", [], [1], ["a"], {}, {"a": 1},
    {"init": -1}, {"p": "much"},
)  # fmt: skip


def mutated_tree(generator: random.Random, tree: Any) -> Any:
    """A tree of dicts, lists and values with one thing in it changed, removed or added."""
    if not isinstance(tree, (dict, list)) or not tree or generator.random() < 0.1:
        return generator.choice(VALUES)
    places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    at, tree = generator.choice(places), tree.copy()
    way = generator.choice(("deeper", "deeper", "deeper", "remove", "add"))
    if way == "deeper":
        tree[at] = mutated_tree(generator, tree[at])
    elif way == "remove":
        del tree[at]
    elif isinstance(tree, dict):
        tree[f"{at}x"] = tree[at]
    else:
        tree.insert(at, tree[at])
    return tree


def of_json(generator: random.Random, content: bytes) -> bytes:
    return json.dumps(mutated_tree(generator, json.loads(content))).encode()


def of_json_lines(generator: random.Random, content: bytes) -> bytes:
    lines = content.splitlines()
    at = generator.randrange(len(lines))
    lines[at] = of_json(generator, lines[at])
    return b"\n".join(lines)


def of_toml(generator: random.Random, content: bytes) -> bytes:
    """One line, `name = value` with a value that JSON knows, too, gets another one."""
    lines = content.decode().splitlines()
    at = generator.choice([i for i, line in enumerate(lines) if "=" in line])
    name, value = lines[at].split(" = ")
    new = generator.choice([mutated_tree(generator, json.loads(value)), *VALUES])
    text = "inf" if new == float("inf") else json.dumps(new).replace("NaN", "nan")
    lines[at] = generator.choice((f"{name} = {text}", "", f"{name}x = {text}"))
    return "\n".join(lines).encode()


def of_lines(generator: random.Random, content: bytes) -> bytes:
    """One line is gone, twice there, or has other words in it."""
    lines = content.splitlines()
    at = generator.randrange(len(lines))
    words = (b"", b"\0", b" ", b"\t\t", b"<eos>", b"\xe2\x80\xa8", "\N{KELVIN SIGN}".encode())
    new = generator.choice(([], [lines[at]] * 2, [generator.choice(words)], [lines[at] + b" x"]))
    return b"\n".join([*lines[:at], *new, *lines[at + 1 :]]) + b"\n"


def of_safetensors(generator: random.Random, content: bytes) -> bytes:
    """Its header, which is JSON behind its own length."""
    length = int.from_bytes(content[:8], "little")
    header = of_json(generator, content[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def of_tensors(generator: random.Random, tensors: dict[str, torch.Tensor]) -> dict:
    """One is gone, has another name, shape, type or place."""
    at, tensors = generator.choice(list(tensors)), dict(tensors)
    tensor = tensors.pop(at)
    new = generator.choice((
        {}, {f"{at}x": tensor}, {at: tensor[:-1] if tensor.dim() else tensor.repeat(2)},
        {at: tensor.unsqueeze(0)}, {at: tensor.flatten()}, {at: tensor.double()},
        {at: tensor.to(torch.int32)}, {at: tensor.half()}, {at: tensor.bool()},
        {at: tensor.to(torch.complex64)}, {at: torch.empty(0)},
    ))  # fmt: skip
    return tensors | new


def damage_file(generator: random.Random, path: Path, own: tuple[Damage, ...]) -> str:
    """Damages it in one of these ways, or in one that suits any file; says how."""
    if generator.random() < 0.03:
        path.unlink()
        return "removed"
    if generator.random() < 0.03:
        path.unlink()
        path.mkdir()
        return "a folder in its place"
    way = generator.choice(own if own and generator.random() < 0.6 else BYTES)
    path.write_bytes(way(generator, path.read_bytes()))
    return way.__name__.strip("_").replace("_", " ")
