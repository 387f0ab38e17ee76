"""Checkpoints: one safetensors file each, with all else as JSON in its header.

One file, so that it is whole or absent; nothing in it is pickled, so loading runs no code; a
checksum over all of it, so that what a disk or a copy has damaged is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from .config import Config
from .files import atomic_file, errors_naming, parse_json, require
from .tokenizer import TOKENIZERS, Tokenizer

FORMAT = "fused_recoder checkpoint 2"
WITHOUT_CHECKSUM = "fused_recoder checkpoint 1"


def save_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], about: dict, vocabulary: Tokenizer
) -> None:
    """Writes a checkpoint; the file that was there stays until the new one is whole."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header = {
        "format": FORMAT,
        "about": json.dumps(about),
        "vocabulary": vocabulary.to_bytes().decode(),
    }
    data = save(tensors, header | {"checksum": _checksum(tensors, header)})
    with atomic_file(path) as file:
        file.write(data)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict, Tokenizer]:
    """Tensors, what was said about them, and the vocabulary."""
    header = checkpoint_header(path)
    if header is None:
        raise ValueError(f"{path} is not a checkpoint of fused_recoder")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if header["format"] == FORMAT:
        require(path, header, ["checksum"])
        if _checksum(tensors, header) != header["checksum"]:
            raise ValueError(f"{path} is damaged: its content does not have its checksum")
    require(path, header, ["about", "vocabulary"])
    about = parse_json(header["about"], f"{path}: about", ["config"])
    with errors_naming(path):
        tokenizer = TOKENIZERS[Config.from_dict(about["config"]).tokenizer]
        vocabulary = tokenizer.from_bytes(header["vocabulary"].encode())
    return tensors, about, vocabulary


def checkpoint_header(path: Path) -> dict[str, str] | None:
    """What a checkpoint says about itself; None for safetensors files that are not ours."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a checkpoint: {error}") from error
    if not header.get("format", "").startswith("fused_recoder checkpoint"):
        return None
    if header["format"] not in (FORMAT, WITHOUT_CHECKSUM):
        raise ValueError(f"{path} is of format {header['format']!r}, this reads {FORMAT!r}")
    return header


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """Of all tensors and of the header's other entries, whatever order they are in."""
    digest = hashlib.blake2b(digest_size=16)
    entries = {name: text for name, text in header.items() if name != "checksum"}
    digest.update(json.dumps(entries, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def tensors_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, by what follows."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


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
    """Gives an optimizer what `optimizer_tensors` found in one of the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
