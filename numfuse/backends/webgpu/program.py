"""Recorded calls: their dispatches over numbered buffers.

What a call dispatches depends on the shapes, strides and offsets of its arrays, never on what is in
them. A call on arrays of the device that looks like an earlier one takes over its pipelines,
uniforms and grids, and only the buffers are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from numpy import ndarray

from numfuse.backends import Call, latest
from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.arrays import DeviceArray
from numfuse.backends.webgpu.device.commands import fetch
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.device.memory import Binding, Buffer, Waiting
from numfuse.backends.webgpu.device.submits import clock

_HANDLE = attrgetter("handle")
_NEW = object.__new__
#: Bytes of a step: its bind groups for `tiling.KEPT_SETS` sets of buffers, 250 each.
_STEP_BYTES = 2048


@dataclass(slots=True, eq=False)
class Program:
    """The steps of a call over numbered buffers: the caller's, those of new results, temporaries.

    Attributes
    ----------
    nbytes : int
        What it takes, about.
    """

    #: (pipeline, numbers and sizes of buffers or other bindings, grid)
    _steps: list[Any]
    #: Bytes of the buffers of new results, and of the temporaries.
    _sizes: list[int]
    _spares: list[int]
    #: None, the number of an array of the caller's, or shape, strides and dtype of a new one.
    _results: list[Any]
    #: The type of the results; None of a single one.
    _kind: Any
    _call: Call | None
    #: What it counts of `tiling.WAITING_BYTES`.
    _work: int
    #: The number of `Device.spares` that has room for the temporaries.
    _spared: int = -1
    #: What is submitted with the buffers met last: those of a loop are a few sets, by turns.
    _sets: dict[tuple[Any, ...], Waiting] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        steps: Sequence[Any],
        owners: Sequence[Buffer],
        given: Sequence[DeviceArray],
        result: Any,
    ) -> Program | None:
        """Return the program of this thread's latest call; None where it binds parts of buffers.

        `owners` are the buffers of the `given` arrays of the caller's, each once.
        """
        kind = type(result) if isinstance(result, tuple) else None
        places = {id(x): i for i, x in enumerate(given)}
        results: list[Any] = []
        new: list[Buffer] = []
        for x in result if kind else (result,):
            if x is None or id(x) in places:
                results.append(None if x is None else places[id(x)])
            else:
                results.append((x.shape, x.strides, x.dtype))
                new.append(x.buffer)
        numbers = {id(buffer): i for i, buffer in enumerate((*owners, *new))}
        spares: list[int] = []
        made = []
        for pipeline, bindings, grid in steps:
            parts: list[Any] = []
            for b in bindings:
                if not isinstance(b, Binding):
                    parts.append(b)
                    continue
                if b.offset or b.size != b.buffer.size:
                    return None
                if id(b.buffer) not in numbers:
                    numbers[id(b.buffer)] = len(numbers)
                    spares.append(b.size)
                parts.append((numbers[id(b.buffer)], b.size))
            made.append((pipeline, parts, grid))
        sizes = [x.size for x in new]
        work = sum(sizes) + sum(spares) + sum([x.nbytes for x in given])
        work += tiling.DISPATCH_BYTES * len(made)
        return cls(made, sizes, spares, results, kind, latest.call, work)

    @property
    def nbytes(self) -> int:
        return _STEP_BYTES * len(self._steps)

    def run(
        self,
        device: Device,
        owners: Sequence[Buffer],
        given: Sequence[DeviceArray] = (),
        downloads: Sequence[ndarray] | None = None,
    ) -> Any:
        """Repeat the call with these arrays, and return its result.

        Without `downloads` the call waits for its submit (`device.submits`). With these, arrays
        like the results, wait for its results and return them as such.
        """
        # No method is called but the few that have to be, and there is no comprehension, which is a
        # call too: this is the way of nearly every call.
        made: list[Any] = []
        if self._sizes:
            for size, handle in zip(
                self._sizes, device.free.take_each(None, self._sizes), strict=True
            ):
                buffer = None
                if handle is not None:
                    buffer = _NEW(Buffer)
                    buffer.device, buffer.handle, buffer.size = device, handle, size
                made.append(buffer)
            while None in made:
                at = made.index(None)
                made[at] = device.buffer(self._sizes[at])
        buffers = [*owners, *made]
        if self._spares:
            number, spares = device.spares
            if number != self._spared:
                number, spares = device.spare(self._spares)
                self._spared = number if number == device.spares[0] else -1
            buffers += spares[: len(self._spares)]
        handles = tuple(map(_HANDLE, buffers))
        call = self._sets.get(handles)
        if call is None:
            call = self._bound(device, buffers, handles)
        latest.call = self._call
        if downloads is not None:
            parts = [(Binding(made[i], 0, x.nbytes), x) for i, x in enumerate(downloads)]
            return fetch(device, call[1], parts) if parts else []
        if self._steps:
            device.waiting.append(call)
            device.left -= self._work
            if device.left < 0 or clock() > device.due:
                device.turn()
        found: list[Any] = []
        at = 0
        for result in self._results:
            if type(result) is tuple:
                x = _NEW(DeviceArray)
                x.shape, x.strides, x.dtype = result
                x.device, x.buffer, x.offset = device, made[at], 0
                at += 1
                found.append(x)
            else:
                found.append(None if result is None else given[result])
        return found[0] if self._kind is None else tuple.__new__(self._kind, found)

    def _bound(
        self, device: Device, buffers: Sequence[Buffer], handles: tuple[Any, ...]
    ) -> Waiting:
        """Return the handles, and the dispatches with these buffers."""
        dispatches = []
        for pipeline, parts, grid in self._steps:
            bindings = []
            for part in parts:
                if type(part) is tuple:
                    buffer, size = buffers[part[0]], part[1]
                    if part[0] < len(buffers) - len(self._spares):
                        size = min(buffer.size, device.binding_limit)
                    part = Binding(buffer, 0, size)
                bindings.append(part)
            dispatches.append((pipeline, device.group(pipeline.layout, bindings), grid))
        while len(self._sets) >= tiling.KEPT_SETS:
            self._sets.pop(next(iter(tuple(self._sets))), None)
        self._sets[handles] = found = handles, dispatches
        return found
