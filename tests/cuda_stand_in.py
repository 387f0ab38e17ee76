"""A stand-in for CUDA where there is no GPU: `with cuda_stand_in() as cuda: ...`.

Inside, tensors may be on `cuda:0` and `cuda:1`: their memory and arithmetic are the CPU's, but they
say that they are there (`.device`, `.is_cuda`), and what is made of them is there, too. Imitated is
what Python code can get wrong:

* `torch.cuda.graph` records what is launched and executes nothing: what was written is put back,
  what was computed is nan. `replay()` runs it again, into the same memory.
* What makes the host wait (`item`, `tolist`, `nonzero`, blocking copies, `synchronize`) is noted in
  `cuda.waits`; while a graph is captured it raises.
* Tensors on different devices do not mix; a graph holds only what its own device and stream launch.

Not imitated: the order of streams, memory pools, and anything below Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST, PINNED = "cpu", "pinned"  # places beside "cuda:0" and "cuda:1"
aten = torch.ops.aten
# Ops whose result the host has to see, to go on or to know a shape.
READS = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2,
    aten.bincount, aten.repeat_interleave, aten._linalg_eigh,
}  # fmt: skip
INDEXED = {aten.index, aten.index_put_, aten._index_put_impl_}


def place_of(tensor: Tensor) -> str:
    """Where its memory is said to be."""
    return getattr(tensor.untyped_storage(), "place", HOST)


def put(tree: Any, place: str) -> Any:
    """The same tensors, said to be there."""
    for tensor in tensors_in(tree):
        tensor.untyped_storage().place = place
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def is_gpu(place: str | None) -> bool:
    return place is not None and place.startswith("cuda")


class Stream:
    def __init__(self, cuda: Cuda, device: Any = None):
        self.cuda, self.device = cuda, torch.device(cuda.place(device or "cuda"))

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        self.cuda.wait("Stream.synchronize")


class Event:
    def __init__(self, cuda: Cuda, enable_timing: bool = False):
        self.cuda = cuda

    def record(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.wait("Event.synchronize")


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: Cuda):
        self.cuda, self.stream = cuda, None
        self.launches: list[tuple[Callable, Any, list]] = []  # op, its arguments, its results
        self.written: dict[int, tuple] = {}  # memory from outside, and what it held
        self.own: dict[int, Tensor] = {}  # memory allocated during the capture

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        self.stream = self.cuda.current_stream()
        self.random = torch.get_rng_state()
        self.cuda.capturing = self

    def capture_end(self) -> None:
        """Nothing of it has happened."""
        self.cuda.capturing = None
        torch.set_rng_state(self.random)
        with quietly():
            for storage, before in self.written.values():
                storage.copy_(before)
            for tensor in self.own.values():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    def replay(self) -> None:
        self.cuda.replays += 1
        with quietly():
            for op, (args, kwargs), results in self.launches:
                for held, new in zip(results, tensors_in(op(*args, **kwargs)), strict=True):
                    if held is not None:
                        held.copy_(new)

    def record(self, op: Callable, args: tuple, kwargs: dict) -> Any:
        if self.cuda.current_stream() is not self.stream:
            raise RuntimeError(f"{op} was launched on another stream than the one captured")
        held = tree_map(_held, (args, kwargs))
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in _written(op, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.own:
                self.written.setdefault(storage._cdata, (storage, storage.clone()))
        result = op(*args, **kwargs)
        fresh = [t.untyped_storage()._cdata not in given for t in tensors_in(result)]
        kept = [
            t.detach() if new else None for t, new in zip(tensors_in(result), fresh, strict=True)
        ]
        self.own |= {t.untyped_storage()._cdata: t for t in kept if t is not None}
        if any(fresh) or op._schema.is_mutable or not kept:  # a view needs no launch
            self.launches.append((op, held, kept))
        return result


def _held(value: Any) -> Any:
    """What a launch keeps of an argument: an address, or the value of a number on the host."""
    if not isinstance(value, Tensor):
        return value
    return value.detach() if is_gpu(place_of(value)) else value.detach().clone()


def _written(op: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    found = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


@contextmanager
def quietly() -> Iterator[None]:
    """As the GPU itself works: seen by nobody."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class Cuda:
    """The state of all of it."""

    def __init__(self, devices: int):
        self.devices, self.device = devices, 0
        self.waits: list[str] = []  # what the host has waited for
        self.replays = 0
        self.capturing: Graph | None = None
        self.making: str | None = None  # where a factory shall put its tensor
        self.default_streams = [Stream(self, f"cuda:{i}") for i in range(devices)]
        self.streams = list(self.default_streams)

    def place(self, device: Any) -> str:
        if isinstance(device, int):
            return f"cuda:{device}"
        device = torch.device(device)
        if device.type != "cuda":
            return HOST
        index = self.device if device.index is None else device.index
        if index >= self.devices:
            raise RuntimeError(f"there is no cuda:{index}")
        return f"cuda:{index}"

    def current_stream(self, device: Any = "cuda") -> Stream:
        return self.streams[int(self.place("cuda" if device is None else device)[5:])]

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self.device = self.device, int(self.place(device)[5:])
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        with self.on_device(stream.device):
            before, self.streams[self.device] = self.streams[self.device], stream
            try:
                yield
            finally:
                self.streams[self.device] = before

    def wait(self, what: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"{what}: the host cannot wait while a CUDA graph is captured")
        self.waits.append(what)

    def copies(self, source: str, target: str, non_blocking: bool) -> None:
        """What a copy costs the host."""
        through_pinned = PINNED in (source, target) and non_blocking and is_gpu(target)
        if is_gpu(source) != is_gpu(target) and not through_pinned:
            self.wait(f"a copy from {source} to {target}")

    def move(
        self, tensor: Tensor, target: str | None, dtype: Any, non_blocking: bool, copy: bool = False
    ) -> Tensor:
        """`Tensor.to`"""
        source = place_of(tensor)
        if target is None or source == target or {source, target} == {HOST, PINNED}:
            return tensor.to(dtype=dtype, copy=copy)
        self.copies(source, target, non_blocking)
        return put(tensor.to(dtype=dtype, copy=True), target)

    def launch(self, op: Callable, args: tuple, kwargs: dict) -> Any:
        """An op, below autograd."""
        given = tensors_in((args, kwargs))
        place = self._place_of_launch(op, given)
        if not is_gpu(place):
            return op(*args, **kwargs)
        if op.overloadpacket in READS or _reads_a_mask(op, given):
            self.wait(str(op))
        result = self._execute(op, args, kwargs, place)
        for tensor in tensors_in(result):
            if not hasattr(tensor.untyped_storage(), "place"):
                put(tensor, place)
        return result

    def _execute(self, op: Callable, args: tuple, kwargs: dict, place: str) -> Any:
        if self.capturing is None:
            return op(*args, **kwargs)
        if place != (captured := str(self.capturing.stream.device)):
            raise RuntimeError(f"{op} was launched on {place} while {captured} is captured")
        return self.capturing.record(op, args, kwargs)

    def _place_of_launch(self, op: Callable, given: list[Tensor]) -> str | None:
        places = {place_of(t) for t in given if is_gpu(place_of(t)) or t.numel() > 1}
        gpus = sorted(filter(is_gpu, places))
        if op.overloadpacket is aten.copy_:
            target, source = (place_of(t) for t in given)
            self.copies(source, target, non_blocking=PINNED in places)
            return gpus[0] if gpus else None
        if gpus and len(places) > 1 and self.making is None:
            raise RuntimeError(f"{op}: all tensors must be on one device, found {sorted(places)}")
        return gpus[0] if gpus else self.making


def _reads_a_mask(op: Callable, given: list[Tensor]) -> bool:
    return op.overloadpacket in INDEXED and any(t.dtype == torch.bool for t in given[1:])


class _Launches(TorchDispatchMode):
    def __init__(self, cuda: Cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self.cuda.launch(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions and attributes in which a device is named, asked for or left."""

    def __init__(self, cuda: Cuda):
        super().__init__()
        self.cuda = cuda
        self.special = {
            Tensor.device.__get__: lambda t, *_: torch.device(self._device(t)),
            Tensor.is_cuda.__get__: lambda t, *_: is_gpu(place_of(t)),
            Tensor.is_pinned: lambda t: place_of(t) == PINNED,
            Tensor.pin_memory: lambda t: put(t.clone(), PINNED),
            Tensor.cpu: lambda t: cuda.move(t, HOST, None, False),
            Tensor.cuda: lambda t, device="cuda", non_blocking=False: cuda.move(
                t, cuda.place(device), None, non_blocking
            ),
            Tensor.to: self._to,
            Tensor.tolist: self._tolist,
            Tensor.numpy: self._numpy,
            Tensor.__deepcopy__: lambda t, memo: put(Tensor.__deepcopy__(t, memo), place_of(t)),
            torch.as_tensor: self._as_tensor,
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self.special:
            return self.special[func](*args, **kwargs)
        device = kwargs.pop("device", None)
        if device is None:
            return func(*args, **kwargs)
        place = self.cuda.place(device)
        if func is torch.tensor and is_gpu(place):
            self.cuda.copies(HOST, place, non_blocking=False)
        before, self.cuda.making = self.cuda.making, place
        try:
            return put(func(*args, **kwargs), place)
        finally:
            self.cuda.making = before

    def _device(self, tensor: Tensor) -> str:
        place = place_of(tensor)
        return HOST if place == PINNED else place

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            return self.cuda.move(tensor, place_of(args[0]), args[0].dtype, False, copy)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        place = None if device is None else self.cuda.place(device)
        return self.cuda.move(tensor, place, dtype, non_blocking, copy)

    def _tolist(self, tensor: Tensor) -> Any:
        self.cuda.copies(place_of(tensor), HOST, non_blocking=False)
        return tensor.tolist()

    def _numpy(self, tensor: Tensor, **options: Any) -> Any:
        if is_gpu(place_of(tensor)):
            raise TypeError("a tensor on a GPU has no numpy(): use cpu() first")
        return tensor.numpy(**options)

    def _as_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        place = None if device is None else self.cuda.place(device)
        if isinstance(data, Tensor):
            return self.cuda.move(data, place, dtype, False)
        if is_gpu(place):
            self.cuda.copies(HOST, place, non_blocking=False)
        return put(torch.as_tensor(data, dtype=dtype), place or HOST)


def _grouped(group: Callable) -> Callable:
    """PyTorch groups tensors by device in C++, where they are all on the CPU."""

    def grouped(lists: list[list], *more: Any) -> dict:
        found = {}
        for (_, dtype), (tensors, indices) in group(lists, *more).items():
            first = next(t for t in tensors[0] if t is not None)
            found[first.device, dtype] = tensors, indices
        return found

    return grouped


@contextmanager
def cuda_stand_in(devices: int = 2) -> Iterator[Cuda]:
    cuda = Cuda(devices)
    names = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: cuda.device,
        "set_device": lambda device: setattr(cuda, "device", int(cuda.place(device)[5:])),
        "get_device_name": lambda device=None: "a stand-in",
        "device": cuda.on_device,
        "stream": cuda.on_stream,
        "Stream": lambda device=None: Stream(cuda, device),
        "Event": lambda *_, **options: Event(cuda, **options),
        "current_stream": cuda.current_stream,
        "synchronize": lambda device=None: cuda.wait("synchronize"),
        "empty_cache": lambda: None,
        "CUDAGraph": lambda: Graph(cuda),
        "is_current_stream_capturing": lambda: (
            cuda.capturing is not None and cuda.capturing.stream is cuda.current_stream()
        ),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    with ExitStack() as stack:
        for name, stand_in in names.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(torch.cuda.graph, "default_capture_stream", None))
        stack.enter_context(patch.object(torch._C, "_host_emptyCache", lambda: None, create=True))
        group = torch._C._group_tensors_by_device_and_dtype
        patched = patch.object(torch._C, "_group_tensors_by_device_and_dtype", _grouped(group))
        stack.enter_context(patched)
        stack.enter_context(_Launches(cuda))
        stack.enter_context(_Functions(cuda))
        yield cuda
