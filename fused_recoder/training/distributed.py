"""One process, or several that `torchrun` started and that train one model together."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """Which process this is, of how many, and how they talk."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, *values: float) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: tuple[float, ...], operation) -> list[float]:
        if self.world == 1:
            return list(values)
        # Of the hosts: on a GPU they would wait for all that it has yet to do.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def average_(self, tensors: list[Tensor]) -> None:
        """Replaces every tensor by its mean over the processes.

        Not DistributedDataParallel: it sends gradients while others are being computed, but ours
        come from one fused backward, all at once; and it holds on to the connection, see below.
        """
        if self.world == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.world
        for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, on the CPU; all of one shape."""
        if self.world == 1:
            return [tensor.detach().cpu()]
        tensor = tensor.detach().to(self.device).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor)
        return [part.cpu() for part in parts]

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first process alone, then the others: who comes later finds the work done."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()


@contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """The processes `torchrun` started, connected: hosts by gloo, GPUs by NCCL."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield Processes(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Functions of this module take the connection as a default argument if there is one when it
    # is imported (optimizers import it), and keep it. Gloo's threads then live on as the
    # interpreter ends, and now and then abort it (pytorch PR 179291).
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    yield Processes(dist.get_rank(), world, device)
    # Not after an error: that would wait for processes that wait for this one.
    dist.destroy_process_group()
