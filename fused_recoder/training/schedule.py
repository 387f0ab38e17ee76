"""The learning rate over a run: a function of how far it is and of how it went."""

from __future__ import annotations

import math

from .config import Config


class Schedule:
    def __init__(self, config: Config, steps_per_epoch: int):
        self.config = config
        self.total_steps = steps_per_epoch * config.epochs
        self.factor = 1.0  # of the learning rate, changed between epochs

    def lr(self, step: int) -> float:
        """The learning rate of the step with this number, from 0."""
        if self.config.schedule == "cosine":
            done = min(step / self.total_steps, 1.0)
            return self.config.lr * 0.5 * (1 + math.cos(math.pi * done))
        return self.config.lr * self.factor

    def end_epoch(self, epochs_done: int, improved: bool) -> None:
        kind = self.config.schedule
        if (kind == "plateau" and not improved) or (
            kind == "decay" and epochs_done >= self.config.decay_after
        ):
            self.factor *= self.config.decay
