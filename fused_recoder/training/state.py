"""All that the next step of a run depends on, besides plain numbers: tensors by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checkpoint import (
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    tensors_under,
)
from .distributed import Processes
from .model import load_weights

States = tuple[Tensor, Tensor]  # h and c, [L, B, H] each


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, hx: States | None, processes: Processes
) -> dict[str, Tensor]:
    """Weights, what the optimizer remembers, and every process's random numbers and states."""
    tensors = {f"model.{n}": t for n, t in model_tensors(model).items()}
    tensors |= {f"optimizer.{n}": t for n, t in optimizer_tensors(optimizer).items()}
    for rank, state in enumerate(processes.gather(torch.get_rng_state())):
        tensors[f"random.cpu.{rank}"] = state
    if processes.device.type == "cuda":
        state = torch.cuda.get_rng_state(processes.device)
        for rank, part in enumerate(processes.gather(state)):
            tensors[f"random.cuda.{rank}"] = part
    if hx is not None:
        for name, state in zip("hc", hx, strict=True):
            for rank, part in enumerate(processes.gather(state)):
                tensors[f"state.{name}.{rank}"] = part.clone()
    return tensors


def load_state_tensors(
    tensors: dict[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    processes: Processes,
) -> States | None:
    """Puts them where they were; returns this process's carried states, if there were any."""
    rank, device = processes.rank, processes.device
    load_weights(model, tensors_under("model.", tensors))
    load_optimizer_tensors(optimizer, tensors_under("optimizer.", tensors))
    torch.set_rng_state(tensors[f"random.cpu.{rank}"])
    if f"random.cuda.{rank}" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"random.cuda.{rank}"], device)
    if f"state.h.{rank}" not in tensors:
        return None
    return tensors[f"state.h.{rank}"].to(device), tensors[f"state.c.{rank}"].to(device)
