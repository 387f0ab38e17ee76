"""The files of a run: its settings, checkpoints, metrics and summary, in a folder of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from .checkpoint import save_checkpoint
from .config import Config
from .curves import draw_curves
from .evaluation import BEST, CHECKPOINT
from .files import atomic_file, cannot_write, only_process_in
from .reporting import Metrics
from .tokenizer import Tokenizer


class RunFolder:
    """Where a run writes.

    Args:
        path: the folder; made when it is opened.
        writes: whether this process writes at all; of several only the first does.
    """

    def __init__(self, path: str | Path, *, writes: bool = True):
        self.path, self.writes = Path(path), writes
        self.best, self.checkpoint = self.path / BEST, self.path / CHECKPOINT
        self.metrics_bytes: int | None = None  # to keep of those that are there
        self._metrics: Metrics | None = None

    def refuse_another_run(self) -> None:
        """Raises if the folder holds one already."""
        if self.checkpoint.exists():
            raise FileExistsError(
                f"{str(self.path)!r} holds a run already: resume it, or name another folder"
            )

    @contextmanager
    def opened(self, config: Config, step: int, *, new: bool) -> Iterator[None]:
        """Ready to be written from this step on, by this process alone."""
        if not self.writes:
            yield
            return
        with only_process_in(self.path):  # before anything is touched that may be another's
            if new:
                self.refuse_another_run()
            self._begin(config)
            self._metrics = Metrics(self.path, keep_bytes=self.metrics_bytes, step=step)
            try:
                yield
            finally:
                self.metrics_bytes = self._metrics.sync()  # for who opens it again
                self._metrics.close()

    def _begin(self, config: Config) -> None:
        for abandoned in self.path.glob("*.tmp"):
            abandoned.unlink()
        try:
            with atomic_file(self.path / "config.json") as file:
                file.write(json.dumps(config.to_dict(), indent=1).encode())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write_row(self, kind: str, step: int, row: dict) -> None:
        """A row of metrics, for `metrics.jsonl` and TensorBoard."""
        if self._metrics is not None:
            self._metrics.write(kind, step, row)

    def write_checkpoint(
        self, path: Path, tensors: dict[str, Tensor], about: dict, vocabulary: Tokenizer
    ) -> bool:
        """False, and a message, if it cannot be written."""
        if not self.writes:
            return True
        about = about | {"metrics_bytes": self._metrics.sync() if self._metrics is not None else 0}
        try:
            save_checkpoint(path, tensors, about, vocabulary)
        except OSError as error:
            print(
                f"Cannot write {path}: {error}. The file that was there before is kept, "
                "training goes on.",
                file=sys.stderr,
                flush=True,
            )
            return False
        return True

    def write_summary(self, summary: dict) -> None:
        """`summary.json` and `curves.png`; a message if they cannot be written."""
        if not self.writes:
            return
        try:
            with atomic_file(self.path / "summary.json") as file:
                file.write(json.dumps(summary, indent=1).encode())
            draw_curves(self.path)
        except OSError as error:
            print(f"Summary and curves cannot be written: {error}", file=sys.stderr)
