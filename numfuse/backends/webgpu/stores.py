"""Where the arrays of a problem are found on the device, and where its results go.

A problem holds NumPy arrays: the caller's own, or the ghosts of arrays of the device
(`arrays.DeviceArray`). A store turns them into regions of buffers. For the caller's own arrays that
is an upload before and a download after the work; for ghosts nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.arrays import DeviceArray
from numfuse.backends.webgpu.device.commands import Commands
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.device.memory import Binding, Buffer
from numfuse.backends.webgpu.shaders import plain
from numfuse.backends.webgpu.shaders.shader import Access
from numfuse.problem.operands import format_of
from numfuse.problem.shapes import equal, merge_axes
from numfuse.runtime.strided import Strided, contiguous, walk
from numfuse.runtime.views import address, bounds


class Region(Strided):
    """A strided part of a buffer of the device."""

    __slots__ = ()

    def bound(self, device: Device) -> tuple[Binding, int]:
        """Return what to bind, and the offset of the first element in that binding."""
        if self.buffer.size <= device.binding_limit or not prod(self.shape):
            size = min(self.buffer.size, device.binding_limit)
            return Binding(self.buffer, 0, size), self.offset
        low, high = bounds(self.offset, self.shape, self.strides, 1)
        first = low * self.itemsize // device.alignment * device.alignment
        last = min(-(-high * self.itemsize // 16) * 16, self.buffer.size)
        return Binding(self.buffer, first, last - first), self.offset - first // self.itemsize

    @property
    def span(self) -> int:
        """Bytes from its first to its last."""
        low, high = bounds(0, self.shape, self.strides, 1)
        return (high - low) * self.itemsize


def fresh(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> Region:
    """Return a new C-contiguous region with any content."""
    nbytes = prod(shape) * dtype.itemsize
    buffer = device.buffer(max(nbytes, 16), what)
    return Region(buffer, 0, shape, contiguous(shape), format_of(dtype), dtype.itemsize)


class Store:
    """The caller's arrays of the device, by their ghosts; any other result gets a buffer."""

    def __init__(
        self,
        device: Device,
        operands: Sequence[DeviceArray] = (),
        outputs: Sequence[DeviceArray] = (),
    ) -> None:
        self.device = device
        self.commands = Commands(device)
        #: Ranges of addresses that stand for buffers: first, last, that of the buffer's beginning.
        self._known: list[tuple[int, int, int, Buffer]] = []
        for x in (*operands, *outputs):
            base = address(x.buffer.ghost)
            self._known.append((base, base + x.buffer.size, base, x.buffer))
        owners = self._owners = [id(x.buffer) for x in outputs]
        read = {id(x.buffer) for x in operands}
        # One dispatch may not both read and write a buffer, nor write it twice, whatever the parts.
        self._shared = {owner for owner in owners if owner in read or owners.count(owner) > 1}
        #: What is copied at the next flush, and at the end: source, target.
        self._copies: list[tuple[Region, Region]] = []
        self._rows: list[tuple[Region, Region]] = []
        #: All that was done, where that is one submit; None where it was several.
        self.steps: list[Any] | None = None
        self._flushed = False

    def _find(self, x: ndarray) -> Region | None:
        at = address(x)
        size = x.itemsize
        for low, high, base, buffer in self._known:
            if x.size and low <= at < high:
                strides = tuple([s // size for s in x.strides])
                return Region(
                    buffer, (at - base) // size, x.shape, strides, format_of(x.dtype), size
                )
        return None

    def source(self, x: ndarray) -> Region:
        """Return an operand."""
        view = self._find(x)
        if view is None:
            return fresh(self.device, x.shape, x.dtype, "an empty operand")
        if view.span <= self.device.room:
            return view
        # A part of a large array whose rows lie too far apart to be bound at once.
        packed = fresh(self.device, x.shape, x.dtype, "a part of an operand")
        copy(self.commands, view, packed)
        return packed

    def numbers(self, x: ndarray) -> Any:
        """Return what to bind for a few numbers of the host, contiguous ones."""
        return self.device.constant(x.tobytes(), uniform=False)

    def target(self, x: ndarray, over: Sequence[ndarray] = ()) -> Region:
        """Return a result, to be written in full; it may be an operand out of those in `over`."""
        view = self.reserve(x)
        room = self.device.room
        if view is not None and view.span <= room:
            owner = id(view.buffer)
            read = [y for y in map(self._find, over) if y is not None and id(y.buffer) == owner]
            alone = self._owners.count(owner) == 1 and read and all(y == view for y in read)
            if owner not in self._shared or alone:
                return view
        apart = fresh(self.device, x.shape, x.dtype, f"a result of shape {x.shape}")
        if view is not None:
            self._copies.append((apart, view))
        return apart

    def reserve(self, x: ndarray) -> Region | None:
        """Give a new result its buffer, of which parts can be targets then; None if it is empty."""
        view = self._find(x)
        if view is None and x.size:
            made = fresh(self.device, x.shape, x.dtype, f"a result of shape {x.shape}")
            at = address(x)
            self._known.append((*bounds(at, x.shape, x.strides, x.itemsize), at, made.buffer))
            view = self._find(x)
        return view

    def sum_here(self, x: ndarray, out: ndarray, accumulator: np.dtype[Any]) -> bool:
        """Return whether x and `out` are on the host, where x is then summed to the shape of it."""
        return False

    def rows(self, x: ndarray) -> ndarray:
        """Return an operand (..., M, K) as one of (rows, K), copied."""
        return self._gathered(x, lambda view, made: copy(self.commands, view, made))

    def result_rows(self, x: ndarray) -> ndarray:
        """Return a result of (rows, K) in place of (..., M, K), copied there at the end."""
        return self._gathered(x, lambda view, made: self._rows.append((made, view)))

    def _gathered(self, x: ndarray, use: Callable[[Region, Region], None]) -> ndarray:
        view, made = self._find(x), np.empty((prod(x.shape[:-1]), x.shape[-1]), x.dtype)
        self.reserve(made)
        found = self._find(made)
        if view is not None and found is not None:
            use(view, replace(found, shape=x.shape, strides=contiguous(x.shape)))
        return made

    def flush(self) -> None:
        """Do what has been recorded so far."""
        self._flushed = True
        self._bring(self._copies)
        self.commands.submit()

    def finish(self) -> None:
        """Do the rest; afterwards the results are there."""
        self._bring(self._rows)
        self._bring(self._copies)
        if not self._flushed:
            self.steps = list(self.commands.steps)
        self.commands.submit()

    def _bring(self, copies: list[tuple[Region, Region]]) -> None:
        for source, out in copies:
            copy(self.commands, source, out)
        copies.clear()

    def result(self, x: ndarray) -> DeviceArray:
        """Return a new result as an array of the device."""
        view = self._find(x) or fresh(self.device, x.shape, x.dtype, "an empty result")
        return DeviceArray(self.device, view.buffer, x.shape, x.strides, x.dtype)


def copy(commands: Commands, source: Region, out: Region) -> None:
    """Record `out` = `source`, converted; one shape, any strides."""
    equal("the source and the target of a copy", source.shape, out.shape)
    device = commands.device
    room = device.room
    wide = source if source.span >= out.span else out
    if wide.span > room:
        axis = max(range(len(out.shape)), key=lambda i: abs(wide.strides[i]) * (out.shape[i] - 1))
        middle = out.shape[axis] // 2
        for first, last in ((0, middle), (middle, out.shape[axis])):
            copy(commands, source.part(axis, first, last), out.part(axis, first, last))
        return
    shape, (from_strides, to_strides) = merge_axes(out.shape, source.strides, out.strides)
    if not prod(shape):
        return
    lead = max(len(shape) - plain.COPY_AXES, 0)
    shader = plain.copy(Access(source.dtype), Access(out.dtype))
    (from_, from_first), (to, to_first) = source.bound(device), out.bound(device)
    values = {"size": prod(shape[lead:])}
    for name, lengths in {"source": from_strides, "out": to_strides, "shape": shape}.items():
        four = (int(name == "shape"),) * (plain.COPY_AXES - len(shape) + lead) + lengths[lead:]
        values |= {f"{name}_{axis}": length for axis, length in enumerate(four)}
    grid = (*device.grid(-(-values["size"] // 256)), 1)
    for from_at, to_at in walk(shape[:lead], from_strides, to_strides):
        values |= {"source_first": from_first + from_at, "out_first": to_first + to_at}
        commands.dispatch(shader, {"source": from_, "out": to}, values, grid)
