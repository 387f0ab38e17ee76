"""SIGINT and SIGTERM: a run ends where it can go on."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopSignals:
    """While it is entered, remembers a SIGINT or SIGTERM rather than dying of it.

    Args:
        impatient: whether a second SIGINT ends the process at once.
    """

    def __init__(self, *, impatient: bool):
        self.impatient = impatient
        self.received: signal.Signals | None = None
        self._handlers: dict[int, object] = {}  # that were there before

    def __enter__(self) -> StopSignals:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._remember)
        except ValueError:
            pass  # not in the main thread: somebody else listens
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if number == signal.SIGINT and self.impatient:
            signal.signal(signal.SIGINT, signal.default_int_handler)
