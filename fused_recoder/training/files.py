"""Files that are whole or absent, whenever the process or the disk gives up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name only when all of it is on the disk.

    A reader sees the old content or the new one. If writing fails, the old file stays.
    """
    path = Path(path)
    # The process id: two processes may fill the same cache at the same time.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk only when the folder is."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows has no such thing
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Two runs that write into one folder would destroy each other's files."""
    if fcntl is None:
        yield
        return
    with open(folder / ".lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is training in {str(folder)!r}") from None
        yield  # the system gives the lock back when the process ends, however it ends
