"""Files that are whole or absent, and errors that say which file they are about."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


SEAL = 16  # bytes


@contextmanager
def sealed_file(path: Path) -> Iterator[BinaryIO]:
    """An `atomic_file` that ends with a checksum of all before it: see `is_whole`."""
    with atomic_file(path) as file:
        yield file
        file.flush()
        with open(file.name, "rb") as written:
            file.write(_checksum(written, os.fstat(written.fileno()).st_size))


def is_whole(path: Path) -> bool:
    """Whether a `sealed_file` is there, and as it was written."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size - SEAL
            return size >= 0 and _checksum(file, size) == file.read()
    except OSError:
        return False


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Of the first `size` bytes, which are read."""
    digest = hashlib.blake2b(digest_size=SEAL)
    while size > 0 and (chunk := file.read(min(size, 1 << 20))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()


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


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends; a byte order mark is no part of the first."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: byte {error.start + 1} ({line[error.start]:#04x}) is "
                    "not UTF-8; convert the file first, e.g. with iconv"
                ) from None
            yield text.removesuffix("\n").removesuffix("\r")


def read_json(path: Path, needed: Iterable[str] = ()) -> dict:
    """The JSON object in a file, which has these entries."""
    return parse_json(Path(path).read_bytes(), str(path), needed)


def parse_json(text: str | bytes, what: str, needed: Iterable[str] = ()) -> dict:
    """A JSON object with these entries; errors call it `what`."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(found).__name__}")
    require(what, found, needed)
    return found


def require(what: str | Path, content: Mapping[str, object], names: Iterable[str]) -> None:
    """Raises, and says of what, unless its content has all of these."""
    if missing := [name for name in names if name not in content]:
        raise ValueError(f"{what} has no {', '.join(map(repr, missing))}")


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """What goes wrong with the content of a file is said with its name."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def cannot_write(folder: Path, error: OSError) -> OSError:
    """An error that says which folder it is about."""
    return OSError(f"cannot write into {str(folder)!r}: {error}")


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """A folder, made if it is absent, that no other process enters.

    Two runs that write into one folder would destroy each other's files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "wb")  # noqa: SIM115 (an error of what follows is another's)
    except OSError as error:
        raise cannot_write(folder, error) from error
    with lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is training in {str(folder)!r}") from None
        yield  # the system gives the lock back when the process ends, however it ends
