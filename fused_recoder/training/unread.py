"""Numbers that steps have left on the device, until the host looks at them.

To read one number of a GPU's is to wait for all that it has yet to do. So the loop reads none:
every step leaves its numbers here, and they are read together when a row of metrics is due, before
a checkpoint and at the end of an epoch. On the CPU, where reading costs nothing, after every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepNumbers:
    """What a step has found."""

    step: int  # its number, from 0
    length: int  # time steps
    lr: float
    loss: float
    norm: float  # of the whole gradient
    nll: float
    norms: list[float]  # of the gradient of each parameter

    @property
    def finite(self) -> bool:
        """Whether it may change the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Unread:
    """The numbers of the last steps.

    `halt` is what PyTorch's fused optimizers look at on the device (`optimizer.found_inf`): from
    the first step whose loss or gradient is not finite it is 1, and they leave the weights alone.
    """

    def __init__(self, device: torch.device):
        self.costs_waiting = device.type != "cpu"
        self.halt = torch.zeros((), device=device)
        self._steps: list[tuple[int, int, float, Tensor]] = []

    def add(
        self, step: int, length: int, lr: float, loss: Tensor, nll: Tensor, norms: Tensor
    ) -> Tensor:
        """Keeps them; returns the norm of the whole gradient, from those of its parts."""
        norm = torch.linalg.vector_norm(norms)
        values = torch.cat([torch.stack([loss, norm, nll]), norms])
        self._steps.append((step, length, lr, values))
        if self.costs_waiting:
            bad = values[:2].isfinite().all().logical_not()
            self.halt.copy_(torch.maximum(self.halt, bad.to(self.halt.dtype)))
        return norm

    def read(self) -> list[StepNumbers]:
        """Waits for the device. They stay unread until `clear`."""
        if not self._steps:
            return []
        rows = torch.stack([values for *_, values in self._steps]).tolist()
        return [
            StepNumbers(*about, *row[:3], norms=row[3:])
            for (*about, _), row in zip(self._steps, rows, strict=True)
        ]

    def clear(self) -> None:
        """They were read, and all of them were finite."""
        self._steps.clear()
