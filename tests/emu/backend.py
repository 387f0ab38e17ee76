"""CUDA's kernels, run by the shim, in the place of the CPU's: `with kernels_of_cuda() as launches`.
See backend.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from . import build

ORDERS = ["forward", "reverse", "random"]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build.build("module") / build.BACKEND))
    library.emu_install.argtypes = [ctypes.c_bool]
    library.emu_set_order.argtypes = [ctypes.c_int]
    for counter in (library.emu_launches, library.emu_unchecked, library.emu_bytes_moved):
        counter.restype = ctypes.c_long
    return library


def bytes_moved() -> int:
    """By loads and stores of kernels so far, from or to global memory."""
    return _library().emu_bytes_moved()


def unchecked_launches() -> int:
    """Launches whose errors nobody has asked for yet."""
    return _library().emu_unchecked()


@contextmanager
def kernels_of_cuda(host_reads: bool = False, order: str = "forward") -> Iterator[Callable]:
    """Gives a function that tells the number of launches so far. `host_reads` lets the engine look
    at values where it may on a CPU."""
    library = _library()
    library.emu_set_order(ORDERS.index(order))
    library.emu_install(host_reads)
    try:
        yield library.emu_launches
    finally:
        library.emu_uninstall()
