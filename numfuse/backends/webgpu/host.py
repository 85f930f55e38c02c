"""Problems of NumPy arrays: each operand is uploaded, each result downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.lib.stride_tricks import as_strided

from numfuse.backends.webgpu import split
from numfuse.backends.webgpu.arrays import DeviceArray
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.device.memory import Binding, Buffer
from numfuse.backends.webgpu.program import Program
from numfuse.backends.webgpu.stores import Region, Store, fresh
from numfuse.problem.fields import FIELDS
from numfuse.problem.fused import FusedProblem
from numfuse.problem.jets import JetProblem
from numfuse.problem.networks import NetworkProblem
from numfuse.problem.shapes import sum_to
from numfuse.runtime.strided import contiguous


class _Packed(NamedTuple):
    """How an operand is brought to the device, without what repeats, in the order of its memory.

    So a transposed array takes no copy on the way, and a broadcast one its own size.
    """

    part: tuple[slice, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, x: ndarray) -> _Packed:
        part = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides)
        strides = x[part].strides
        return cls(part, tuple(sorted(range(x.ndim), key=lambda axis: -abs(strides[axis]))))

    def __call__(self, x: ndarray) -> ndarray:
        return np.array(x[self.part].transpose(self.order), order="C", copy=None)


class _SeveralSubmits(Exception):
    """A problem takes more than one submit, so there is no program of it."""


class _HostStore(Store):
    """Operands are uploaded before a submit, and results downloaded behind it.

    Results are written at the very end: a failure before that has touched none of them.
    """

    def __init__(self, device: Device, recording: bool = False) -> None:
        super().__init__(device)
        self._recording = recording
        self.sources: dict[int, tuple[ndarray, _Packed, Region]] = {}
        self.targets: list[tuple[ndarray, Region]] = []
        self.results: list[tuple[ndarray, ndarray]] = []

    def source(self, x: ndarray) -> Region:
        known = self.sources.get(id(x))
        if known is not None:
            return known[2]
        packed = _Packed.of(x)
        unique = [x[packed.part].shape[axis] for axis in packed.order]
        size = max(prod(unique) * x.itemsize, 16)
        buffer = self.device.buffer(size, f"an operand of shape {x.shape}")
        strides = [0] * x.ndim
        for axis, stride in zip(packed.order, contiguous(unique), strict=True):
            strides[axis] = stride if x.strides[axis] else 0
        view = Region(buffer, 0, x.shape, tuple(strides), x.dtype.name, x.itemsize)
        self.sources[id(x)] = x, packed, view
        return view

    def numbers(self, x: ndarray) -> Any:
        return self.source(x).bound(self.device)[0]

    def target(self, x: ndarray, over: Sequence[ndarray] = ()) -> Region:
        view = fresh(self.device, x.shape, x.dtype, f"a result of shape {x.shape}")
        if x.size:
            self.targets.append((x, view))
        return view

    def reserve(self, x: ndarray) -> None:
        """Do nothing: parts of a result are downloaded one by one."""

    def sum_here(self, x: ndarray, out: ndarray, accumulator: np.dtype[Any]) -> bool:
        if x.nbytes <= self.device.room:
            return False
        with np.errstate(all="ignore"):
            self.results.append((out, sum_to(x, out.shape, accumulator)))
        return True

    def rows(self, x: ndarray) -> ndarray:
        return x.reshape(-1, x.shape[-1])

    def result_rows(self, x: ndarray) -> ndarray:
        made = np.empty((prod(x.shape[:-1]), x.shape[-1]), x.dtype)
        self.results.append((x, made))  # by now without content
        return made

    def flush(self) -> None:
        if self._recording:
            raise _SeveralSubmits
        for x, packed, view in self.sources.values():
            self.device.upload(packed(x), view.buffer)
        targets, self.targets = self.targets, []
        found = self.commands.submit([(Binding(v.buffer, 0, x.nbytes), x) for x, v in targets])
        self.results[:0] = zip((x for x, _ in targets), found, strict=True)
        self.sources.clear()

    def finish(self) -> None:
        self.flush()
        for x, value in self.results:
            x[...] = value.reshape(x.shape)


def run(device: Device, kind: str, p: Any) -> None:
    """Run a problem of this kind."""
    store = _HostStore(device)
    split.run(store, kind, p)
    store.finish()


class HostProgram(NamedTuple):
    """A recorded call on NumPy arrays."""

    device: Device
    program: Program
    #: The operands and the results: number among the arrays, shape, strides; how one is packed.
    sources: list[tuple[int, tuple[int, ...], tuple[int, ...], _Packed, int]]
    targets: list[tuple[int, tuple[int, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, device: Device, kind: str, p: Any, names: Any) -> HostProgram | None:
        """Return the program of a problem, whose fields of these names have the arrays of a run.

        Return None where it takes several submits, or copies on the host.
        """
        # A view of each operand: two may be one array this time.
        if isinstance(p, (FusedProblem, JetProblem, NetworkProblem)):
            given = {n: x if n in p.results else x.view() for n, x in p.arrays.items()}
            p = replace(p, arrays=given)
        else:
            given = {name: getattr(p, name) for name in FIELDS[kind][0]}
            p = replace(p, **{name: x.view() for name, x in given.items() if x is not None})
        numbers = {id(getattr(p, name, None)): i for i, name in enumerate(names)}
        store = _HostStore(device, recording=True)
        try:
            split.run(store, kind, p)
        except _SeveralSubmits:
            return None
        sources = list(store.sources.values())
        arrays = [x for x, *_ in sources] + [x for x, _ in store.targets]
        if store.results or any(id(x) not in numbers for x in arrays):
            return None
        results = [DeviceArray(device, v.buffer, x.shape, (), x.dtype) for x, v in store.targets]
        owners = [view.buffer for *_, view in sources]
        program = Program.of(store.commands.steps, owners, (), tuple(results))
        if program is None:
            return None
        return cls(
            device,
            program,
            [(numbers[id(x)], x.shape, x.strides, how, v.buffer.size) for x, how, v in sources],
            [(numbers[id(x)], x.shape, x.strides) for x, _ in store.targets],
        )

    def run(self, arrays: tuple[Any, ...]) -> None:
        """Run the program on arrays, each at its number; one may have other axes than recorded."""
        device = self.device
        found = []
        seen: list[Any] = [*self.sources, *self.targets]
        for number, shape, strides, *_ in seen:
            x = arrays[number]
            if x.shape != shape or x.strides != strides:
                x = as_strided(x, shape, strides)
            found.append(x)
        owners: list[Buffer] = []
        for x, (*_, packed, size) in zip(found, self.sources, strict=False):
            owners.append(device.buffer(size))
            device.upload(packed(x), owners[-1])
        outs = found[len(owners) :]
        for x, value in zip(outs, self.program.run(device, owners, (), outs), strict=True):
            x[...] = value
