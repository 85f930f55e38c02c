"""A problem of NumPy arrays: operands are copied to the device, results back at the very end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends import latest
from numfuse.backends.cuda.call.arrays import pool_of
from numfuse.backends.cuda.call.memory import Block
from numfuse.backends.cuda.call.record import REPLAY, recorded
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.problem.fields import FIELDS
from numfuse.problem.fused import FusedProblem
from numfuse.problem.jets import JetProblem
from numfuse.runtime.strided import contiguous
from numfuse.runtime.views import address


class _Arrays:
    """The arrays of a problem on the device."""

    def __init__(self, device: Device, outputs: Sequence[str]) -> None:
        self._device, self._outputs = device, outputs
        self._pool = pool_of(device)
        #: {name: its block}
        self.blocks: dict[str, Block] = {}
        self._targets: list[tuple[ndarray, str]] = []

    def bind(self, rec: Recorder, name: str, x: ndarray) -> View:
        """Return an operand, copied; or room for a result."""
        return View(rec.number(name), 0, x.shape, self.place(name, x), x.dtype.name, x.itemsize, 16)

    def place(self, name: str, x: ndarray) -> tuple[int, ...]:
        """Make a block, and fill it where it is an operand's; return the strides there."""
        strides, packed, written = contiguous(x.shape), x, name in self._outputs
        if written:
            self._targets.append((x, name))
        else:
            # An axis that repeats one slice is copied once, and the rest in the order of memory: a
            # transposed array takes no copy on the way.
            once = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides)]
            order = sorted(range(x.ndim), key=lambda axis: -abs(once.strides[axis]))
            packed = np.array(once.transpose(order), order="C", copy=None)
            steps = dict(zip(order, contiguous(packed.shape), strict=True))
            strides = tuple([steps[i] if step else 0 for i, step in enumerate(x.strides)])
        block = self._pool.take(max(1, packed.nbytes), 0, f"{name} {x.shape}", 0)
        self.blocks[name] = block
        if not written and packed.size:
            self._device.upload(address(packed), block.address, packed.nbytes, 0)
        return strides

    def finish(self) -> None:
        """Bring the results back; before that, none of them is touched."""
        found = []
        for x, name in self._targets:
            direct = x.flags.c_contiguous and len(self._targets) == 1
            value = x if direct else np.empty(x.shape, x.dtype)
            if value.size:
                at = self.blocks[name].address
                self._device.download(at, address(value), value.nbytes, 0)
            found.append((x, value))
        for x, value in found:
            if value is not x:
                x[...] = value

    def close(self) -> None:
        """Give the memory back."""
        for block in self.blocks.values():
            self._pool.give(block)
        self.blocks = {}


def run(device: Device, precision: str, kind: str, p: Any) -> None:
    """Run a problem of NumPy arrays."""
    form: list[Any] = [getattr(p, name, None) for name in ("guard", "dtype", "batch", "k")]
    if isinstance(p, FusedProblem):
        names, outputs = tuple(p.arrays), p.results
        form += p.epilogue.named(), p.stored, p.summed, p.zeroed
        form += *p.sums.items(), *p.products.items()
    elif isinstance(p, JetProblem):
        names, outputs = tuple(x for x in p.arrays if x != "weights"), p.results
        form += [part.named() for part in p.jet]
        form += p.directions, p.seconds, p.moved, p.backward, p.stacked
        form.append(None if p.weights is None else p.weights.tobytes())
    else:
        inputs, outputs = FIELDS[kind]
        names = (*inputs, *outputs)
    arrays = {name: x for name in names if (x := getattr(p, name, None)) is not None}
    form += ((name, x.shape, x.strides, x.dtype) for name, x in arrays.items())
    key = device.ordinal, kind, precision, p.activation.serial, *form
    there = _Arrays(device, outputs)
    try:
        kept = REPLAY.find(key)
        if kept is None:
            device.release(0)
            made = recorded(device, precision, kind, p, there.bind, names)
            formulas = p.activation.formulas()
            kept = REPLAY.keep(key, (*made, tuple(there.blocks)), formulas)
        else:
            for name in kept[2]:
                there.place(name, arrays[name])
        program, told, _ = kept
        blocks = (there.blocks.get(name) for name in names)
        program.launch(0, [0 if block is None else block.address for block in blocks], 0)
        there.finish()
    finally:
        there.close()
    latest.call = told
