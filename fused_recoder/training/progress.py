"""How far a run is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Progress:
    """How far a run is. Plain numbers, so that JSON keeps them exactly."""

    epoch: int = 0  # epochs done
    window: int = 0  # windows of the current epoch done
    step: int = 0  # windows of all epochs done
    seconds: float = 0.0  # spent on them
    epoch_nll: float = 0.0  # summed over the time steps of the epoch, mean over rows
    epoch_time: int = 0  # those time steps
    row_nll: float = 0.0  # the same since the last row of metrics
    row_time: int = 0
    lr_factor: float = 1.0
    best_nll: float | None = None  # on the validation text
    best_epoch: int | None = None
    history: list[dict] = field(default_factory=list)  # one row per epoch

    def __post_init__(self):
        # Where the row of metrics began, or was taken up again: no fields, as they are not kept.
        self._row_step, self._row_seconds = self.step, self.seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What runs inside is time spent on steps."""
        start = time.monotonic()
        yield
        self.seconds += time.monotonic() - start

    def count(self, length: int) -> None:
        """One more window of `length` time steps."""
        self.window += 1
        self.step += 1
        self.epoch_time += length
        self.row_time += length

    def add(self, nll: float, length: int) -> None:
        """The mean nll of a window, when it is known."""
        self.epoch_nll += nll * length
        self.row_nll += nll * length

    def since_last_row(self) -> tuple[int, float]:
        """Steps, and the seconds they took in this process."""
        return self.step - self._row_step, self.seconds - self._row_seconds

    def begin_row(self) -> None:
        """Sums of the next row of metrics start here."""
        self._row_step, self._row_seconds = self.step, self.seconds
        self.row_nll, self.row_time = 0.0, 0

    def end_epoch(self) -> None:
        """The next window is the first of an epoch."""
        self.epoch += 1
        self.window, self.epoch_nll, self.epoch_time = 0, 0.0, 0
