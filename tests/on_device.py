"""numfuse on arrays of a device, for tests that are written for NumPy arrays.

`OnDevice` stands in for the package in a test's module: what is called with NumPy arrays is called
with arrays of the device and comes back as NumPy's, and every call is held to what is promised of
such arrays. `poisoned` fills whatever memory a device gives with NaN: a kernel that reads what is
not an array's, or leaves a part of a result unwritten, gives NaN and not what chanced to be there.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from arrays import address, bits, in_layout
from conftest import traits
from numpy import ndarray
from numpy.lib.stride_tricks import as_strided

import numfuse as nf
from numfuse.adapters.surface import NAMES
from numfuse.runtime.dispatch import adapter_for

#: Layouts of what a test gives in C order: as it is, a slice at an offset, every third column,
#: reversed.
LAYOUTS = ("c", "offset", "inner_sliced", "reversed")
#: How the names of functions of epilogues begin.
FUSED = ("matmul_epilogue", "matmul_activation_mul", "elementwise")

#: Functions of jets, and the parameters that are constants of the host.
CONSTANTS = {
    "matmul_bias_activation_jet": ("weights",),
    "matmul_epilogue_jet": ("weights",),
    "mlp_jet": ("directions", "second"),
}
JETS = (*CONSTANTS, *(f"{name}_bwd" for name in CONSTANTS))


def moved(x: ndarray, kind: str, backend: str) -> Any:
    """An array of the device: numfuse's own, or CuPy's."""
    if kind == "cupy":
        import cupy

        return cupy.asarray(x)
    return nf.to_device(x, backend)


def strided(x: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A view of an array of the device of one axis; strides in bytes, as NumPy's."""
    if hasattr(x, "ghost"):
        return x._view(as_strided(x.ghost[offset:], shape, strides))
    import cupy

    return cupy.lib.stride_tricks.as_strided(x[offset:], shape, strides)


def root(x: ndarray) -> ndarray:
    """The array that owns the memory of a view."""
    while isinstance(x.base, ndarray):
        x = x.base
    return x


class Memory:
    """All of the memory that NumPy arrays are views of, on the device."""

    def __init__(self, x: ndarray, kind: str, backend: str) -> None:
        self.root = root(x)
        # (the owner's axes may lie in memory in any order, as a copy keeps that of its source)
        order = np.argsort([-step for step in self.root.strides], kind="stable")
        self.flat = self.root.transpose(order).reshape(-1)
        assert self.flat.dtype == x.dtype and address(self.flat) == address(self.root)
        self.there = moved(self.flat, kind, backend)

    def view(self, x: ndarray) -> Any:
        """The array of the device that is to this memory what `x` is to the host's."""
        offset = (address(x) - address(self.flat)) // x.itemsize
        return strided(self.there, offset, x.shape, x.strides)

    def assert_unwritten(self) -> None:
        """The device has what the host has, around the arrays too."""
        assert (bits(nf.to_numpy(self.there)) == bits(self.flat)).all(), "an operand was written"

    def bring_back(self) -> None:
        """All of it to the host."""
        self.flat[...] = nf.to_numpy(self.there)


class OnDevice:
    """The functions of numfuse, on arrays of one kind.

    Parameters
    ----------
    backend : str
    kind : str
        "device": numfuse's own; "cupy": CuPy's.
    test : str
        The test. It chooses, with the last axes of `a`, the layout of a call: calls that are
        compared have one, so that on CUDA they are of one tier.
    """

    def __init__(self, backend: str, kind: str, test: str) -> None:
        self._backend, self._kind, self._test = backend, kind, test

    def __getattr__(self, name: str) -> Any:
        found = getattr(nf, name)
        more = (name.startswith(FUSED) and self._has("fused")) or (
            name in JETS and self._has("jet")
        )
        if name not in NAMES and not more:
            return found

        def call(*args: Any, backend: str, **options: Any) -> Any:
            assert backend == self._backend
            return self._call(found, inspect.signature(found).bind(*args, **options))

        return call

    def _has(self, way: str) -> bool:
        """Whether the adapter of these arrays takes epilogues, or jets."""
        one = moved(np.ones(1, np.float32), self._kind, self._backend)
        return hasattr(adapter_for(one=one), way)

    def _layout(self, a: Any) -> str:
        return LAYOUTS[crc32(repr((self._test, np.shape(a)[-2:])).encode()) % len(LAYOUTS)]

    def _call(self, function: Any, bound: inspect.BoundArguments) -> Any:
        named = {name: _as_arrays(x) for name, x in bound.arguments.items()}
        out = named.pop("out", None)
        constants = CONSTANTS.get(function.__name__.removesuffix("_bwd"), ())
        fixed = {name: named.pop(name) for name in constants if name in named}
        layout = self._layout(named.get("a", _arrays((*named.values(),))[0]))
        written: dict[int, Memory] = {}
        for x in _arrays(out):
            written.setdefault(id(root(x)), Memory(x, self._kind, self._backend))
        there: dict[int, Any] = {}  # of every array that was given, and so lives on
        read = []
        for x in _arrays((*named.values(), out)):
            memory = written.get(id(root(x)))
            if memory is None and id(x) not in there:
                laid = in_layout(x, layout) if x.ndim and x.flags.c_contiguous else x
                read.append(Memory(laid, self._kind, self._backend))
                there[id(x)] = read[-1].view(laid)
            elif memory is not None:
                there[id(x)] = memory.view(x)

        def placed(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)(map(placed, x))
            return there[id(x)] if isinstance(x, ndarray) else x

        def called() -> Any:
            given = inspect.BoundArguments(bound.signature, OrderedDict())
            for name in bound.signature.parameters:
                if name in fixed:
                    given.arguments[name] = fixed[name]
                elif name in named or (name == "out" and out is not None):
                    given.arguments[name] = placed(out if name == "out" else named[name])
            return function(*given.args, **given.kwargs)

        result = called()
        back = {id(there[id(x)]): x for x in _arrays(out)}
        found = self._back(result, back, there.values())
        for memory in read:
            memory.assert_unwritten()
        for memory in written.values():
            memory.bring_back()
        if out is None and not traits(self._backend).simulator:
            # once more, by what the first call has left
            again = self._back(called(), back, there.values())
            for x, y in zip(_arrays((found,)), _arrays((again,)), strict=True):
                assert (bits(x) == bits(y)).all(), "the second call differs"
        return found

    def _back(self, result: Any, back: dict[int, ndarray], given: Iterable[Any]) -> Any:
        """A result as NumPy's; the caller's own array for its likeness on the device."""
        if isinstance(result, tuple):
            parts = [self._back(x, back, given) for x in result]
            return result._make(parts) if hasattr(result, "_make") else tuple(parts)
        if id(result) in back:
            return back[id(result)]
        if not hasattr(result, "strides"):
            return result
        assert all(type(result) is type(x) and owner(result) is not owner(x) for x in given)
        host = nf.to_numpy(result)
        assert (result.shape, result.dtype) == (host.shape, host.dtype)
        run = host.itemsize
        for length, stride in zip(host.shape[::-1], result.strides[::-1], strict=True):
            assert length <= 1 or not host.size or stride == run, "a new result is in C order"
            run *= length
        return host


def _as_arrays(x: Any) -> Any:
    """The same nest of tuples with 0-d arrays for NumPy's scalars."""
    if type(x) in (tuple, list):
        return type(x)(map(_as_arrays, x))
    return np.asarray(x) if isinstance(x, np.generic) else x


def _arrays(x: Any) -> list[ndarray]:
    """The arrays of a nest of tuples."""
    if isinstance(x, tuple | list):
        return [y for part in x for y in _arrays(part)]
    return [x] if isinstance(x, ndarray) else []


def owner(x: Any) -> Any:
    """What holds the memory of an array of the device."""
    for name in ("buffer", "memory"):
        if hasattr(x, name):
            return getattr(x, name)
    return x.data.mem


def poison(nbytes: int) -> ndarray:
    """Return so many bytes that are NaN in every dtype."""
    return np.full(nbytes, 255, np.uint8)


def _poison_webgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from numfuse.backends.webgpu.device.device import Device
    from numfuse.backends.webgpu.device.memory import Buffer
    from numfuse.runtime.pool import FreeBlocks

    buffer = Device.buffer

    def given(self: Device, size: int, what: str = "array") -> Buffer:
        made = buffer(self, size, what)
        self.submit()  # (a call that waits may use it)
        self.queue.write_buffer(made.handle, 0, poison(made.size))
        return made

    monkeypatch.setattr(Device, "buffer", given)
    # results of a call that came again, too
    monkeypatch.setattr(FreeBlocks, "take_each", lambda _, owner, sizes: [None for _ in sizes])


def _poison_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from numfuse.adapters.cuda_arrays import CuPy
    from numfuse.backends.cuda.call.memory import Block, Pool

    take, maker = Pool.take, CuPy.maker

    def taken(self: Pool, nbytes: int, stream: int, *rest: Any, **named: Any) -> Block:
        block = take(self, nbytes, stream, *rest, **named)
        if not block.owner[1]:  # (no upload while a graph is captured)
            content = poison(block.nbytes)
            self.device.upload(address(content), block.address, block.nbytes, stream)
        return block

    def making(self: CuPy, ordinal: int, shape: tuple[int, ...], dtype: str) -> Any:
        make = maker(self, ordinal, shape, dtype)

        def filled() -> Any:
            made = make()
            made.fill(np.nan)
            return made

        return filled

    monkeypatch.setattr(Pool, "take", taken)
    monkeypatch.setattr(CuPy, "maker", making)


#: How the memory that a device gives is filled: one function for each backend with such memory.
POISON: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "cuda": _poison_cuda,
    "webgpu": _poison_webgpu,
}


def poisoned(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let all memory that a device gives, of its pool or new, hold NaN; until the test is over."""
    if traits(backend).memory == "device":
        POISON[backend](monkeypatch)
