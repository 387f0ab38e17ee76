"""What others may do while a run goes on: look at it, and ask it to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """Overrides what it wants to hear of; `Trainer(..., callbacks=[...])` calls it.

    `trainer.stop()` asks the run to end after the current step, saved and ready to be resumed.
    What a callback raises ends the run at once, with the last checkpoint as it was. Every process
    of a run calls its own callbacks; `trainer.processes.is_first` is true in one of them.
    Checkpoints keep nothing of a callback: a resumed run is given new ones.
    """

    def on_step(self, trainer: Trainer, row: dict | None) -> None:
        """After every window; `row` holds the metrics where they are due, else it is None."""

    def on_epoch_end(self, trainer: Trainer, row: dict) -> None:
        """After an epoch was validated and saved; `row` is its row in `metrics.jsonl`."""

    def on_end(self, trainer: Trainer, summary: dict) -> None:
        """When `train()` is about to return `summary`, of a run that is finished or was stopped."""
