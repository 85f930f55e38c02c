"""Launches of a call, recorded once and repeated with other addresses.

What a call launches depends on the shapes, strides and alignments of its arrays, never on what is
in them or where they lie. `run` records it as launches over numbered buffers: the workspace, the
tiers' own, then the arrays by name. A call that looks like an earlier one repeats its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiers
from numfuse.backends.cuda.driver import Device
from numfuse.backends.cuda.memory import Pool
from numfuse.backends.cuda.product import ITEMSIZES, Launch, Plan, Product

__all__ = ["Recorder", "Steps", "View"]

_WORK, _SCRATCH = 0, 1
_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class View:
    """A strided part of a numbered buffer."""

    buffer: int
    #: In bytes.
    offset: int
    shape: tuple[int, ...]
    #: In elements.
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    #: A power of two, at most 16, that divides the buffer's address.
    alignment: int

    @property
    def contiguous(self) -> bool:
        """Whether it is one run in C order."""
        run = 1
        for length, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if length == 1:
                continue
            if stride != run:
                return False
            run *= length
        return True

    def part(self, axis: int, first: int, last: int) -> View:
        """A range of one axis; all of it where it is not there, or repeats."""
        if axis < 0 or self.shape[axis] == 1:
            return self
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        offset = self.offset + first * self.strides[axis] * self.itemsize
        return replace(self, shape=shape, offset=offset)


class Recorder:
    """What a run asks for.

    Parameters
    ----------
    device : Device
    precision : str
        Of float32: "ieee", "bf16x6" or "tf32".
    """

    def __init__(self, device: Device, precision: str = "ieee") -> None:
        self.device, self.precision = device, precision
        self._numbers: dict[str, int] = {}
        self._work = self._scratch = 0
        self._steps: list[tuple[Any, tuple[tuple[int, int], ...]]] = []
        #: Of the product with the most arithmetic: that, its tier, its plan.
        self._chief: tuple[int, str, str, Any] | None = None

    def number(self, name: str) -> int:
        """The number of the buffer of an array."""
        return self._numbers.setdefault(name, len(self._numbers) + 2)

    def fresh(self, shape: tuple[int, ...], dtype: str) -> View:
        """A new C-contiguous view of the workspace, of any content."""
        strides, run = [], 1
        for length in reversed(shape):
            strides.append(run)
            run *= max(1, length)
        itemsize = ITEMSIZES[dtype]
        offset = self._work
        self._work += -(-max(1, run) * itemsize // _ALIGNED) * _ALIGNED
        return View(_WORK, offset, shape, tuple(strides[::-1]), dtype, itemsize, 16)

    def choose(self, product: Product) -> Plan:
        """How a tier runs a product; kept by the device."""
        found = self.device.kept_products.get(product)
        if found is None:
            found = self.device.kept_products[product] = tiers.choose(product, self.device.info)
        tier, plan = found
        work = product.m * product.n * max(1, product.k) * product.places
        if self._chief is None or work > self._chief[0]:
            self._chief = work, tier.name, plan.launches[0].kernel.name, plan.tiling
        return plan

    def plan(self, plan: Plan, at: dict[str, tuple[int, int]]) -> None:
        """Record a tier's launches; `at` has (buffer, offset) of its slots."""
        self.launches(plan.launches, at, plan.workspace)

    def launches(
        self, launches: tuple[Launch, ...], at: dict[str, tuple[int, int]], workspace: int = 0
    ) -> None:
        """Record launches that want so many bytes at the slot "work"."""
        self._scratch = max(self._scratch, workspace)
        known = {**at, "work": (_SCRATCH, 0)}
        for launch in launches:
            prepared = self.device.prepare(launch)
            self._steps.append((prepared, tuple(known[name] for name in prepared.table)))
            if self._chief is None:
                self._chief = 0, "pass", launch.kernel.name, None

    def steps(self, names: tuple[str, ...]) -> Steps:
        """What was recorded, over the arrays of these names in this order."""
        order = {number: 2 + names.index(name) for name, number in self._numbers.items()}
        order |= {_WORK: _WORK, _SCRATCH: _SCRATCH}
        return Steps(
            tuple(
                (prepared.start, tuple((order[buffer], offset) for buffer, offset in refs))
                for prepared, refs in self._steps
            ),
            self._work,
            self._scratch,
            self._chief,
        )


class Steps:
    """Launches over numbered buffers, to be repeated."""

    __slots__ = ("_launches", "_work", "chief", "nbytes")

    def __init__(
        self,
        launches: tuple[tuple[Any, tuple[tuple[int, int], ...]], ...],
        work: int,
        scratch: int,
        chief: tuple[int, str, str, Any] | None,
    ) -> None:
        self._launches, self._work = launches, work
        #: Bytes of workspace.
        self.nbytes = work + scratch
        #: (work, tier, kernel, tiling) of what `last_call` tells.
        self.chief = chief

    @property
    def count(self) -> int:
        """How many launches."""
        return len(self._launches)

    def run(self, device: Device, pool: Pool, stream: int, addresses: list[int]) -> None:
        """Launch all on a stream, with the addresses of the arrays."""
        block = None
        base = 0
        if self.nbytes:
            block = pool.take(self.nbytes, stream)
            base = block.address
        table = [base, base + self._work, *addresses]
        before = device.enter()
        try:
            for start, refs in self._launches:
                start(stream, tuple([table[buffer] + offset for buffer, offset in refs]))
        finally:
            device.leave(before)
            if block is not None:
                pool.give(block)


def strides_of(x: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """In elements."""
    size = x.itemsize
    return tuple(s // size for s in x.strides)
