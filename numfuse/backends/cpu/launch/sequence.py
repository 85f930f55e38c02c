"""From plans to a program, and running that on the arrays of a call."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numfuse.backends import Call, latest
from numfuse.backends.cpu import host, tiling
from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.launch import entries, threads, workspace
from numfuse.backends.cpu.launch.workspace import PAGE
from numfuse.backends.cpu.llvm import vectors
from numfuse.expr import Expr
from numfuse.problem.operands import format_of
from numfuse.runtime.specialise import Kernel
from numfuse.runtime.strided import contiguous


class Operand(NamedTuple):
    """An array (..., rows, columns) as a plan sees it: its name in the call, and its form."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    fmt: str
    itemsize: int

    def turned(self) -> Operand:
        """Return the transpose."""
        *batch, rows, columns = self.shape
        *steps, row_stride, column_stride = self.strides
        return self._replace(
            shape=(*batch, columns, rows), strides=(*steps, column_stride, row_stride)
        )

    def lies_by_columns(self) -> bool:
        """Whether columns are contiguous, several and long, and rows are not."""
        *_, rows, columns = self.shape
        *_, row_stride, column_stride = self.strides
        return row_stride == self.itemsize != column_stride and min(rows, columns) > tiling.NARROW


def operand(name: str, x: np.ndarray) -> Operand:
    """Return an array of the call as an operand."""
    return Operand(name, x.shape, x.strides, format_of(x.dtype), x.itemsize)


def operands(p: Any, names: Iterable[str]) -> dict[str, Operand]:
    """Return those arrays of a problem that are there, by the names of their fields."""
    found = {}
    for name in names:
        x = getattr(p, name, None)
        if x is not None:
            found[name] = Operand(name, x.shape, x.strides, format_of(x.dtype), x.itemsize)
    return found


def temporary(name: str, shape: tuple[int, ...], fmt: str) -> Operand:
    """Return a contiguous array that only the call itself knows."""
    itemsize = vectors.itemsize(fmt)
    return Operand(name, shape, contiguous(shape, itemsize), fmt, itemsize)


@dataclass(slots=True, eq=False)
class Plan:
    """Everything of a product or pass but its operands' addresses."""

    cell: int
    descriptor: array[int]
    #: (word, name) of every operand that is there.
    places: tuple[tuple[int, str], ...]
    cells: int
    stride: int
    threads: int
    call: Call
    #: Those whose addresses are in it.
    kernels: tuple[Kernel, ...]


#: A plan, and by name how many bytes behind the array's beginning its operand begins.
Step = tuple[Plan, Mapping[str, int]]


class Sequence(NamedTuple):
    """Steps that are run in one native call."""

    #: The steps that `open_sequence` reads, their address, and how many they are.
    words: array[int]
    address: int
    steps: int
    #: Threads, and the bytes of workspace of each.
    threads: int
    stride: int
    #: Where in the memory of a launch its table lies.
    table: int


class Sum(NamedTuple):
    """An array that is another one's sum over axes, made by NumPy before all else.

    Both are reshaped, which never takes a copy: a call may have them with other axes.
    """

    source: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: np.dtype[Any]
    target: int
    target_shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        names: Several[str],
        source: str,
        x: np.ndarray,
        target: str,
        out: np.ndarray,
        dtype: np.dtype[Any],
    ) -> Sum:
        """Return the sum of x over the axes that `out` has with length 1."""
        axes = [i for i, (n, own) in enumerate(zip(x.shape, out.shape, strict=True)) if n != own]
        return cls(names.index(source), x.shape, tuple(axes), dtype, names.index(target), out.shape)


@dataclass(slots=True, eq=False)
class Program:
    """How every call of one form is run."""

    sequences: tuple[Sequence, ...]
    #: Bytes of the memory of a launch.
    size: int
    #: The numbers of arrays that are set to zero before.
    zeroed: Several[int]
    sums: Several[Sum]
    #: Shape and dtype of what a call needs beside its arrays; they come behind these.
    totals: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    #: What `last_call` tells of it.
    call: Call
    #: Those whose addresses are in the steps.
    kernels: tuple[Kernel, ...]
    #: The most threads that a sequence takes, and bytes of the recorded steps.
    threads: int = 0
    nbytes: int = 0
    #: Whether anything comes before its steps.
    begins: bool = False
    #: Where it is one sequence in the calling thread alone: the native function, and what it takes
    #: beside arrays and memory (the steps' address, how many they are, where the table lies).
    alone: tuple[Any, int, int, int] | None = None


def nothing(zeroed: Several[int] = (), sums: Several[Sum] = ()) -> Program:
    """Return the program of a call whose results have no element or no term, but for `sums`."""
    call = Call("cpu", host.name(), host.vector_name(), "nothing", None)
    return Program((), 0, zeroed, sums, (), call, (), begins=True)


def program(
    names: Several[str],
    launches: Several[Several[Several[Step]]],
    temporaries: Several[Operand] = (),
    totals: Several[Operand] = (),
    zeroed: Several[int] = (),
    sums: Several[Sum] = (),
) -> Program:
    """Return plans as a program over arrays of these names, in the order of a call.

    Steps of a phase run beside one another, when the phases before it are finished. `temporaries`
    are contiguous arrays in the memory of the launches, behind the workspaces; `totals` contiguous
    arrays that every call allocates; `zeroed` the numbers of arrays that are set to zero.
    """
    count = stride = 0
    told: Plan | None = None
    plain = host.vector_name()
    kernels: dict[Kernel, None] = {}
    for phases in launches:
        for phase in phases:
            most = cells = 0
            for plan, _ in phase:
                most, cells = max(most, plan.threads), cells + plan.cells
                stride = max(stride, plan.stride)
                kernels.update(dict.fromkeys(plan.kernels))
                # (a sum behind products does not hide how these were made)
                if told is None or told.call.tier == plain or plan.call.tier != plain:
                    told = plan
            count = max(count, min(most, cells))
    if told is None:
        return nothing(zeroed, sums)
    own: dict[str, int] = {}
    table = count * stride
    if temporaries:
        own, table = _places(temporaries, table)
    head = {"H_BESIDE": -1}
    for name in ("grad_pre", "q"):
        if name in own:  # it is written while grad is read: see `entries.open_sequence`
            head = {"H_BESIDE": names.index("grad"), "H_PLACE": own[name]}
            table += PAGE
            break
    numbers = dict(zip(names, itertools.count(), strict=False))
    needed = []
    for i, total in enumerate(totals, len(names)):
        numbers[total.name] = i
        needed.append((total.shape, np.dtype(total.fmt)))
    made, most, nbytes = [], 0, 0
    for phases in launches:
        words = _words(head, phases, numbers, own)
        steps = sum(map(len, phases))
        if steps:
            made.append(Sequence(words, words.buffer_info()[0], steps, count, stride, table))
            most, nbytes = max(most, len(words)), nbytes + 8 * len(words)
    size = table + 8 * (protocol.TABLE["T_ENTRIES"] + most)
    call, used = told.call, tuple(kernels)
    begins = bool(zeroed or sums or needed)
    alone = None
    if len(made) == count == 1 and entries.OBJECTS_CAN_BE_READ:
        alone = entries.entry("here"), made[0].address, made[0].steps, table
    return Program(
        tuple(made), size, zeroed, sums, tuple(needed), call, used, count, nbytes, begins, alone
    )


def formulas_of(made: Program) -> list[Expr] | None:
    """Return the formulas that a program goes with; None where one is gone: it is for one call."""
    found = []
    for kernel in made.kernels:
        for ref in kernel.formulas:
            formula = ref()
            if formula is None:
                return None
            found.append(formula)
    return found


def _places(temporaries: Iterable[Operand], start: int) -> tuple[dict[str, int], int]:
    """Return where temporaries lie in memory from `start` on, by name, and the end of the last.

    They begin whole pages and a few lines apart, so that not all begin in one cache set. Of those
    with one name the largest has room.
    """
    sizes: dict[str, int] = {}
    for x in temporaries:
        sizes[x.name] = max(sizes.get(x.name, 0), math.prod(x.shape) * x.itemsize)
    found = {}
    for name, size in sizes.items():
        found[name] = start
        start += tiling.round_up(size, PAGE) + 3 * tiling.LINE
    return found, start


def _words(
    head: Mapping[str, int],
    phases: Several[Several[Step]],
    numbers: Mapping[str, int],
    own: Mapping[str, int],
) -> array[int]:
    """Return the words of `HEAD`, then of each `STEP` with its descriptor."""
    words = array("q", protocol.HEAD.words(head))
    end = 0
    for phase in phases:
        before = end
        for plan, offsets in phase:
            end += plan.cells
            length = len(plan.descriptor)
            step = {"P_CELL": plan.cell, "P_END": end, "P_BEFORE": before, "P_LENGTH": length}
            words.extend(protocol.STEP.words(step))
            start = len(words)
            words.extend(plan.descriptor)
            for word, name in plan.places:
                offset = offsets.get(name, 0) + own.get(name, 0)
                number = protocol.NUMBERS if name in own else numbers[name]
                words[start + word] = offset << protocol.NUMBER_BITS | number
    return words


def run(program: Program, arrays: tuple[np.ndarray | None, ...]) -> None:
    """Run a program on the arrays of a call, each at its number.

    Trusts that the program and the arrays stay alive until the return, and that no kernel raises.
    """
    if program.begins:
        for number in program.zeroed:
            arrays[number][...] = 0  # type: ignore[index]
        for sum_ in program.sums:
            _sum(sum_, arrays)
        if program.totals:
            arrays = (*arrays, *[np.empty(shape, dtype) for shape, dtype in program.totals])
    # The usual case of `workspace.borrow` and `give_back` in place: each would take a call.
    try:
        memory = workspace.pool.pop()
    except IndexError:
        memory = None
    if memory is None or memory.size < program.size:
        memory = None  # it may be what the larger one lacks
        memory = workspace.borrow(program.size)
    if program.alone is not None:
        # what `_run_anyhow` comes to (a plain tuple is taken apart at once, a Sequence is not)
        here, address, steps, table = program.alone
        here(address, steps, id(arrays), memory.address, table)
    else:
        for sequence in program.sequences:
            _run_anyhow(sequence, arrays, memory.address)
    if workspace.pool or memory.size > workspace.usual_bytes:
        workspace.give_back(memory)
    else:
        workspace.pool.append(memory)
    latest.call = program.call


def _sum(how: Sum, arrays: tuple[Any, ...]) -> None:
    x, out = arrays[how.source].reshape(how.shape), arrays[how.target].reshape(how.target_shape)
    with np.errstate(all="ignore"):  # as silent as the kernels, whatever the caller has set
        if how.axes:
            # (NumPy adds in the order of memory: a view is to give what its copy gives)
            x = np.add.reduce(np.ascontiguousarray(x), how.axes, how.dtype, keepdims=True)
        out[...] = x


def _run_anyhow(sequence: Sequence, arrays: tuple[np.ndarray | None, ...], memory: int) -> None:
    """Run a sequence on any number of threads, whether or not array objects can be read."""
    if entries.OBJECTS_CAN_BE_READ:
        operands = id(arrays)
    else:
        data = [0 if x is None else x.__array_interface__["data"][0] for x in arrays]
        addresses = array("q", data)
        operands = addresses.buffer_info()[0]
    how = sequence.address, sequence.steps, operands, memory, sequence.table
    threads.run(how, sequence.stride, sequence.threads)
