"""Checkpoints: one safetensors file each, with all else as JSON in its header.

One file, so that it is whole or absent; nothing in it is pickled, so loading runs no code.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from .data import Vocabulary
from .files import atomic_file

FORMAT = "fused_recoder checkpoint 1"


def save_checkpoint(
    path: Path, tensors: dict[str, Tensor], about: dict, vocabulary: Vocabulary
) -> None:
    header = {
        "format": FORMAT,
        "about": json.dumps(about),
        "vocabulary": vocabulary.to_bytes().decode(),
    }
    data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, header)
    with atomic_file(path) as file:
        file.write(data)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict, Vocabulary]:
    """Tensors, what was said about them, and the vocabulary."""
    header = checkpoint_header(path)
    if header is None:
        raise ValueError(f"{path} is not a checkpoint of fused_recoder")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    words = header["vocabulary"].removesuffix("\n").split("\n")
    return tensors, json.loads(header["about"]), Vocabulary(words)


def checkpoint_header(path: Path) -> dict[str, str] | None:
    """What a checkpoint says about itself; None for safetensors files that are not ours."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a checkpoint: {error}") from error
    if "format" in header and header["format"].startswith("fused_recoder checkpoint"):
        if header["format"] != FORMAT:
            raise ValueError(f"{path} is of format {header['format']!r}, this reads {FORMAT!r}")
        return header
    return None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, tied tensors once."""
    found, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            found[name] = tensor
        seen.add(tensor.data_ptr())
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers about each parameter, as `<number>.<name>`."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": t for i, kept in state.items() for key, t in kept.items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
