"""A fuzzer with known findings, to test what finds them."""

from __future__ import annotations

import ctypes
import time


def check(seed: int) -> None:
    """1 is wrong, 2 crashes, 3 hangs, 4 prints; all others are fine."""
    if seed == 1:
        raise AssertionError("one is wrong")
    if seed == 2:
        ctypes.string_at(0)
    if seed == 3:
        time.sleep(3600)
    if seed == 4:
        print("null")
