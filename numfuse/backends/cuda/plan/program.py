"""Launches of a call, recorded once and repeated with other addresses.

What a call launches depends on the shapes, strides and alignments of its arrays, never on what is
in them or where they lie. `lower` records it as launches over numbered buffers: the workspace, the
tiers' own, then the arrays by name.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.call.arrays import DeviceArray, pool_of, upload
from numfuse.backends.cuda.compile.toolchain import SIMULATED
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.driver.launcher import PLAN, launch_all
from numfuse.backends.cuda.plan import tuned
from numfuse.backends.cuda.plan.product import ITEMSIZES, Launch, Plan, Product, Slot
from numfuse.errors import DeviceLost
from numfuse.moduli import count_of
from numfuse.problem.shapes import merge_axes
from numfuse.runtime.strided import Strided, contiguous

_WORK, _SCRATCH = 0, 1
_ALIGNED = 256
#: Slots that launches of products and passes read and never write.
_READ = frozenset(
    "x,y,x1,y1,a,b,bias,bias1,extra,grad,planes,x copy,y copy,x1 copy,y1 copy,x scales,"
    "y scales".split(",")
)
_STATUS, _USE_COUNT = PLAN.index("STATUS"), PLAN.index("USE_COUNT")


@dataclass(frozen=True, slots=True)
class View(Strided):
    """A strided part of a numbered buffer."""

    #: A power of two, at most 16, that divides the buffer's address.
    alignment: int

    @property
    def rows(self) -> View | None:
        """(..., M, N) as one matrix of all rows; None if the strides do not allow it."""
        lengths, (steps,) = merge_axes(self.shape[:-1], self.strides[:-1])
        if len(lengths) > 1:
            return None
        count, step = (lengths[0], steps[0]) if lengths else (1, 0)
        return replace(self, shape=(count, self.shape[-1]), strides=(step, self.strides[-1]))

    def woven_with(self, other: View) -> View | None:
        """Return the array of which this view has the even columns and another one the odd ones.

        None is returned of two views that are no such pair.
        """
        (*batch, m, n), (*steps, row, column) = self.shape, self.strides
        if column != 2 or n < 2 or other != replace(self, offset=self.offset + 1):
            return None
        return replace(self, shape=(*batch, m, 2 * n), strides=(*steps, row, 1))

    def at(self, index: int = 0) -> tuple[int, int]:
        """Return the number of the buffer, and the bytes from there to an element."""
        return self.buffer, (self.offset + index) * self.itemsize

    def aligned(self, steps: Sequence[int]) -> int:
        """Return the power of two, at most 16, that divides every address base + index * step."""
        found = 16
        for distance in (self.alignment, *(s * self.itemsize for s in (self.offset, *steps))):
            while distance % found:
                found //= 2
        return found


class Recorder:
    """A record of what a run asks for; `precision` is one of `face.PRECISIONS`."""

    def __init__(self, device: Device, precision: str = "ieee") -> None:
        self.device, self.precision = device, precision
        self._numbers: dict[str, int] = {}
        self._work = self._scratch = 0
        self._steps: list[tuple[Any, tuple[tuple[int, int], ...]]] = []
        #: Of the product with the most arithmetic: that, its kernel and tiling.
        self._chief: tuple[int, str, Any] | None = None
        self._tiers: dict[str, None] = {}
        #: Where there is a copy of a factor, by what it was made of; and their bytes.
        self._copies: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._copied = 0
        #: What the program holds on the device.
        self._held: list[DeviceArray] = []

    def precision_of(self, dtype: str) -> str:
        """Return the precision of products of a dtype: another one's is not theirs."""
        of = "float64" if count_of(self.precision) else "float32"
        return self.precision if dtype == of else "ieee"

    def constant(self, x: np.ndarray[Any, Any]) -> int:
        """Return the address of numbers of the host, copied for as long as the program lives."""
        self._held.append(upload(self.device, x))
        self.device.synchronize()  # the program may run on any stream
        return self._held[-1].address

    def mark(self) -> tuple[Any, ...]:
        """Return what :meth:`undo` takes: the state of the record."""
        return len(self._steps), self._work, self._chief

    def undo(self, mark: tuple[Any, ...]) -> None:
        """Forget the launches since a mark, if no copy of a factor is among them."""
        steps, self._work, self._chief = mark
        del self._steps[steps:]

    def number(self, name: str) -> int:
        """The number of the buffer of an array."""
        return self._numbers.setdefault(name, len(self._numbers) + 2)

    def fresh(self, shape: tuple[int, ...], dtype: str) -> View:
        """A new C-contiguous view of the workspace, of any content."""
        itemsize = ITEMSIZES[dtype]
        offset = self._room(max(1, prod(shape)) * itemsize) // itemsize
        return View(_WORK, offset, shape, contiguous(shape), dtype, itemsize, 16)

    def _room(self, nbytes: int) -> int:
        offset = self._work
        self._work += tiling.round_up(nbytes, _ALIGNED)
        return offset

    def choose(self, product: Product) -> Plan | None:
        """How a tier runs a product; kept by the device. None: no tier takes it."""
        products, key = self.device.kept_products, product.named()
        found = products.find(key)
        if found is None:
            found = tuned.choose(product, self.device.info)
            if found is None:
                return None
            products.keep(key, found, product.formulas())
        tier, plan = found
        self._tiers.setdefault(tier.name)
        work = product.m * product.n * max(1, product.k) * product.places
        if self._chief is None or work > self._chief[0]:
            self._chief = work, plan.launches[0].kernel.name, plan.tiling
        return plan

    def plan(self, plan: Plan, at: dict[str, tuple[int, int]]) -> None:
        """Record a tier's launches; `at` has (buffer, offset) of its slots.

        A copy of a factor that an earlier product made is not made again.
        """
        found = dict(at)
        workspace = plan.workspace
        there = set()
        for launch in plan.launches:
            if launch.makes is None:
                continue
            copy, nbytes = launch.makes
            (source,) = (
                at[a.name] for a in launch.arguments if isinstance(a, Slot) and a.name in at
            )
            numbers = tuple(a for a in launch.arguments if not isinstance(a, Slot))
            key = source, launch.kernel, launch.grid, numbers
            if key in self._copies:
                there.add(copy)
            elif self._copied + nbytes > tiling.COPIES_BYTES:  # room that others take too
                room = tiling.round_up(workspace, _ALIGNED)
                found[copy], workspace = (_SCRATCH, room), room + nbytes
                continue
            else:
                self._copies[key] = _WORK, self._room(nbytes)
                self._copied += nbytes
            found[copy] = self._copies[key]
        wanted = [x for x in plan.launches if x.makes is None or x.makes[0] not in there]
        for number, (before, launch) in enumerate(pairwise(wanted), 1):
            if before.beside is not None and launch.beside is not None:
                wanted[number] = replace(launch, kernel=launch.beside())
        self.launches(tuple(wanted), found, workspace)

    def launches(
        self,
        launches: tuple[Launch, ...],
        at: dict[str, tuple[int, int]],
        workspace: int = 0,
        ahead: bool = False,
    ) -> None:
        """Record launches that want so many bytes at the slot "work".

        No call is named after those that are `ahead` of what they make something for.
        """
        self._scratch = max(self._scratch, workspace)
        known = {**at, "work": (_SCRATCH, 0)}
        for launch in launches:
            prepared = self.device.prepare(launch)
            self._steps.append((prepared, tuple(known[name] for name in prepared.table)))
            if launch.makes is None:
                # of what is written, no copy is one any more
                written = {known[name][0] for name in prepared.table if name not in _READ}
                self._copies = {k: v for k, v in self._copies.items() if k[0][0] not in written}
            if self._chief is None and not ahead:
                self._chief = 0, launch.kernel.name, None

    def program(self, names: tuple[str, ...]) -> Program:
        """Return what was recorded, over the arrays of these names in this order."""
        order = {number: 2 + names.index(name) for name, number in self._numbers.items()}
        order |= {_WORK: _WORK, _SCRATCH: _SCRATCH}
        launches = tuple(
            (prepared, tuple([(order[buffer], offset) for buffer, offset in refs]))
            for prepared, refs in self._steps
        )
        made = " + ".join(self._tiers) or "pass", self._chief, len(names)
        held = tuple(self._held)
        return Program(self.device, launches, self._work, self._scratch, *made, held)


@dataclass(eq=False, repr=False)
class Program:
    """Launches over numbered buffers, to be repeated."""

    device: Device
    #: (prepared launch, (buffer, offset) of each address in the order of its table)
    _launches: tuple[tuple[Any, tuple[tuple[int, int], ...]], ...]
    #: Bytes of workspace, and of the tiers' own.
    _work: int
    _scratch: int
    #: The names of the tiers of its products.
    tiers: str
    #: Of its largest product: its work, kernel and tiling.
    chief: tuple[int, str, Any] | None
    #: How many addresses a launch takes.
    arrays: int
    #: Constants that the launches read.
    held: tuple[DeviceArray, ...] = ()

    def __post_init__(self) -> None:
        self.nbytes = self._work + self._scratch
        self._pool = pool_of(self.device) if self.nbytes else None
        #: Whether it is one launch without workspace: the same in a capture.
        self.simple = len(self._launches) == 1 and not self.nbytes
        self.names = ", ".join(prepared.name for prepared, _ in self._launches)
        self._lock = threading.Lock()
        self._graphs: dict[tuple[int, ...], int | None] = {}
        if self._launches and not SIMULATED:
            self._compile(2 + self.arrays)

    def _compile(self, buffers: int) -> None:
        """The tables of `launcher.launch_loop`."""
        launches: list[int] = []
        updates: list[int] = []
        maps: list[int] = []
        for launch, (prepared, refs) in enumerate(self._launches):
            launches += prepared.handles
            for where, index, extra in prepared.slots:
                buffer, offset = refs[index]
                updates += (where, buffer, offset + extra)
            for where, index, extra in prepared.maps:
                buffer, offset = refs[index]
                maps += (where, buffer, offset + extra, launch, 0)
        # a module once, however many launches it has
        uses = list(dict.fromkeys(p.module.uses for p, _ in self._launches if p.module.uses))
        self._bases, self._tables = _words([0] * buffers), []
        tables: list[int] = []
        for words, each in (launches, 3), (updates, 3), (maps, 5), (uses, 1):
            self._tables.append(_words(words))
            tables += len(words) // each, ctypes.addressof(self._tables[-1])
        self._plan = _words([*self.device.entries, *tables, ctypes.addressof(self._bases), 0, 0, 0])
        self._plan_at = ctypes.addressof(self._plan)
        self._call = launch_all()
        self._seen: dict[tuple[int, ...], int] = {}

    @property
    def native(self) -> tuple[int, int, int, int]:
        """Bytes of memory and of those the first base's; where the plan and its bases are, or 0."""
        there = bool(self._launches)
        plan, bases = (self._plan_at, ctypes.addressof(self._bases)) if there else (0, 0)
        return self.nbytes, self._work, plan, bases

    def __del__(self) -> None:
        graphs = getattr(self, "_graphs", {}).values()
        if graphs:
            self.device.retired.graphs.extend(graph for graph in graphs if graph is not None)

    def launch(self, stream: int, addresses: list[int], capture: int | None = None) -> None:
        """Launch all on a stream, with the addresses of the arrays.

        `capture` is the number of the graph that is being captured, where the caller knows it.
        """
        device, pool = self.device, self._pool
        if device.lost is not None:
            raise DeviceLost(device.lost)
        if not self._launches:
            return
        device.note(self.names)
        block, base, graph, failed = None, 0, 0, -1
        if pool is not None:
            block = pool.take(self.nbytes, stream, "workspace", capture)
            base = block.address
        try:
            bases = (base, base + self._work, *addresses)
            if SIMULATED:
                for prepared, refs in self._launches:
                    prepared.start(bases, refs)
                return
            with self._lock:  # the driver copies the arguments before it returns
                if len(self._launches) > 1:
                    graph = self._graph(stream, bases, capture)
                if not graph:
                    self._bases[:] = bases
                failed = self._call(self._plan_at, stream, graph)
                status = self._plan[_STATUS] if failed >= 0 else 0
        finally:
            if block is not None and pool is not None:
                pool.give(block)
        if failed >= 0:
            device.check(status, self._launches[failed][0].name)

    def _graph(self, stream: int, bases: tuple[int, ...], capture: int | None) -> int:
        """Return the launches with these addresses as a graph, or 0 if they came seldom."""
        device, found = self.device, self._graphs.get(bases)
        if found is None:
            if bases in self._graphs:
                return 0  # it could not be recorded
            seen = self._seen[bases] = self._seen.get(bases, 0) + 1
            if seen < tiling.GRAPH_AFTER:
                if len(self._seen) > 8 * tiling.KEPT_GRAPHS:
                    self._seen.clear()
                return 0
        if (device.capture(stream) if capture is None else capture) != 0:
            return 0  # the caller captures a graph of its own
        if found is None:
            self._bases[:] = bases
            # (this capture is no other's, and ends with these steps)
            uses, self._plan[_USE_COUNT] = self._plan[_USE_COUNT], 0
            try:
                found = device.record(lambda stream: self._call(self._plan_at, stream, 0))
            finally:
                self._plan[_USE_COUNT] = uses
            while len(self._graphs) >= tiling.KEPT_GRAPHS:
                old = self._graphs.pop(next(iter(self._graphs)))
                if old is not None:
                    device.drop(old)
            self._graphs[bases] = found
            self._seen.clear()
        return found or 0


@dataclass(eq=False, repr=False)
class Part:
    """A program of several that are joined."""

    program: Program
    #: For each address that it takes: the number of a buffer, and the bytes from there to it.
    where: list[Any]


def joined(device: Device, parts: Sequence[Part], work: int, arrays: int) -> Program:
    """Return programs one after another as one, over a workspace and so many arrays.

    The first `work` bytes of the workspace are buffer 0 of `Part.where`, where the arrays begin at
    2. What a part has as a workspace of its own lies behind them, for all parts in the same place.
    """
    most = max(part.program.nbytes for part in parts)
    launches = []
    for part in parts:
        program = part.program
        own = [(0, work), (0, work + program._work), *part.where]
        for prepared, refs in program._launches:
            there = tuple([(own[b][0], own[b][1] + offset) for b, offset in refs])
            # (the words of its arguments are those of one place among the launches)
            launches.append((device.prepare(prepared.launch), there))
    chief = max((p.program.chief for p in parts if p.program.chief), default=None, key=_work_of)
    tiers = " + ".join(dict.fromkeys(p.program.tiers for p in parts))
    held = tuple(x for part in parts for x in part.program.held)
    return Program(device, tuple(launches), work + most, 0, tiers, chief, arrays, held)


def _work_of(chief: tuple[int, str, Any]) -> int:
    return chief[0]


def strides_of(x: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return the strides in elements."""
    return tuple([s // x.itemsize for s in x.strides])


def _words(values: list[int]) -> Any:
    """Integers that compiled code reads."""
    return (ctypes.c_int64 * max(1, len(values)))(*values)
