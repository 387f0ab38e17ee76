"""What a call of the engine would launch on a GPU: kernels, counted by the shim, and library calls,
counted by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

from .backend import bytes_moved, kernels_of_cuda

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::_addmm_activation"}
# Nothing happens on the device: views, and memory.
FREE = {
    "aten::alias", "aten::as_strided", "aten::detach", "aten::empty", "aten::empty_strided",
    "aten::expand", "aten::flatten", "aten::narrow", "aten::reshape", "aten::select",
    "aten::slice", "aten::t", "aten::transpose", "aten::unsqueeze", "aten::view",
}  # fmt: skip


class Counts(NamedTuple):
    products: int  # matrix products, one library call each
    others: int  # kernels, and library calls that are no products
    kernel_bytes: int  # moved by kernels' loads and stores
    product_bytes: int  # operands and results of the products, each once
    flops: int  # of the products

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))


def _product(event, itemsize: int) -> tuple[int, int]:
    """Bytes and operations."""
    first = 1 if "addmm" in event.name else 0  # what is added to comes first, `out` last
    left, right = event.input_shapes[first : first + 2]
    rows, inner, columns = prod(left[:-1]), left[-1], right[-1]
    elements = rows * inner + prod(right) + rows * columns
    return itemsize * elements, 2 * rows * inner * columns


def _library_calls(event) -> Iterator:
    """What the engine itself calls: through autograd's wrappers, not into the library."""
    for child in event.cpu_children:
        if child.name.startswith("aten::"):
            yield child
        elif not child.name.startswith("fused_recoder::"):
            yield from _library_calls(child)


def count(op: str, call: Callable[[], object], itemsize: int) -> Counts:
    """Of the calls of `fused_recoder::op` inside `call()`."""
    with kernels_of_cuda() as launches:
        launched, moved = launches(), bytes_moved()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            call()
        launched, moved = launches() - launched, bytes_moved() - moved
    calls = [
        call
        for event in recorded.events()
        if event.name == f"fused_recoder::{op}"
        for call in _library_calls(event)
        if call.name not in FREE
    ]
    products = [_product(event, itemsize) for event in calls if event.name in PRODUCTS]
    return Counts(
        products=len(products),
        others=len(calls) - len(products) + launched,
        kernel_bytes=moved,
        product_bytes=sum(b for b, _ in products),
        flops=sum(f for _, f in products),
    )
