"""From arrays to a launch: the descriptor of a product or of an elementwise pass.

`gemm` is the one driver.  Forward, grad_pre, d_a and d_b are the same call with strides turned
round and another row function.

A plan knows the arrays of a call by their numbers only.  So it serves every call of its form:
alone (`run`), or as a step of a `Sequence`, which runs several plans in one native call.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numfuse.backends import Call, latest
from numfuse.backends.cpu import host, launch, tiling
from numfuse.backends.cpu.kernels import library, protocol
from numfuse.backends.cpu.launch import Sequence
from numfuse.backends.cpu.llvm import microkernel
from numfuse.runtime import lifetimes
from numfuse.runtime.specialise import Kernel, readable_name


class Operand(NamedTuple):
    """An array (..., rows, columns) as a plan sees it: which one of the call, and its form."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def turned(self) -> Operand:
        """Its transpose."""
        *batch, rows, columns = self.shape
        *steps, row_stride, column_stride = self.strides
        return Operand(
            self.number, (*batch, columns, rows), (*steps, column_stride, row_stride), self.itemsize
        )


def operand(number: int, x: np.ndarray) -> Operand:
    return Operand(number, x.shape, x.strides, x.itemsize)


def temporary(number: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Operand:
    """A contiguous array that only the call itself knows."""
    strides = [dtype.itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return Operand(number, shape, tuple(reversed(strides)), dtype.itemsize)


class Slots(NamedTuple):
    """Operands of a row function in the order of `protocol.SLOTS`."""

    bias: Operand | None = None
    extra: Operand | None = None
    grad: Operand | None = None
    out: Operand | None = None
    pre: Operand | None = None
    sums: Operand | None = None
    a: Operand | None = None
    b: Operand | None = None


def _layout(t: tiling.Tiling, r: tiling.Registers, group: int) -> tuple[dict[str, int], int]:
    """The words that lay out a thread's workspace, and its bytes.

    Regions start at odd numbers of cache lines, so that they do not all begin in one cache set.
    """
    line, page = tiling.LINE, launch.PAGE
    scratch_stride = tiling.round_up(t.nc * 8, line) + line
    scratch = protocol.CONTEXT_BYTES
    slack = 2 * r.vector_bytes  # vectors of packing may overhang the last panel
    panel_stride = tiling.round_up(t.kc * r.panel_rows * r.factor + slack, line)
    # A group of panels is packed while the group before it is used.
    count = t.panels if t.panels > 1 else 2 * group if group > 1 else 1
    panels = tiling.round_up(scratch + protocol.SLOT_COUNT * scratch_stride, page)
    block = tiling.round_up(panels + count * panel_stride, page) + 3 * line
    block_bytes = t.kc * t.nc * r.factor + t.nc // r.nr * line + slack
    block_stride = tiling.round_up(block_bytes, page) + 5 * line
    strip = tiling.round_up(block + 2 * block_stride, page) + 9 * line
    strip_stride = t.nc * r.itemsize + line
    plane = tiling.round_up(strip + 2 * r.mr * strip_stride, page) + 7 * line
    total = tiling.round_up(plane + t.plane_rows * t.plane_columns * r.itemsize, page) + page
    words = {
        "D_PANEL": panels,
        "D_PANEL_STRIDE": panel_stride,
        "D_PANELS": count,
        "D_GROUP": group,
        "D_BLOCK": block,
        "D_BLOCK_STRIDE": block_stride,
        "D_PLANE": plane,
        "D_STRIP": strip,
        "D_STRIP_STRIDE": strip_stride,
        "D_SCRATCH": scratch,
        "D_SCRATCH_STRIDE": scratch_stride,
    }
    return words, total


@dataclass(slots=True, eq=False)
class Plan:
    """Everything of a product or pass but its operands' addresses."""

    cell: int
    descriptor: array[int]
    #: (word, number of the array) of every operand that is there.
    places: tuple[tuple[int, int], ...]
    cells: int
    stride: int
    threads: int
    call: Call
    #: Those whose addresses are in it.
    kernels: tuple[Kernel, ...]
    #: The plan as a sequence of its own, once it has been asked for.
    alone: Sequence | None = None


_Operands = tuple[Operand | None, ...]
# Operands by number: A, B, then the slots.
_WORDS = (
    protocol.DESCRIPTOR["D_A"],
    protocol.DESCRIPTOR["D_B"],
    *range(protocol.D_SLOTS, protocol.D_SLOTS + 3 * protocol.SLOT_COUNT, 3),
)


def _strides(x: Operand | None, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Byte strides of (..., rows, columns) along `batch`; 0 where it is broadcast."""
    if x is None:
        return (0,) * len(batch)
    missing = len(batch) - (len(x.shape) - 2)
    own = zip(x.shape[:-2], x.strides[:-2], strict=True)
    return (0,) * missing + tuple(0 if size == 1 else stride for size, stride in own)


def _slot_words(slots: _Operands, n: int) -> list[int]:
    words = [0] * (3 * protocol.SLOT_COUNT)
    for slot, x in enumerate(slots):
        if x is None:
            continue
        (*_, rows, columns), (*_, row_stride, column_stride) = x.shape, x.strides
        # An axis of length 1 is broadcast: no step.  But where the result has one column as well,
        # any step is right, and that of contiguous elements spares the scratch row.
        words[3 * slot + 1] = 0 if rows == 1 else row_stride
        words[3 * slot + 2] = column_stride if columns != 1 else (x.itemsize if n == 1 else 0)
    return words


def _plan(
    cell: Kernel,
    head: dict[str, int],
    operands: _Operands,
    axes: list[int],
    t: tiling.Tiling,
    r: tiling.Registers,
    elements: int,
    count: int,
    row: Kernel | None,
    group: int = 1,
    tier: str | None = None,
    others: tuple[Kernel, ...] = (),
) -> Plan:
    layout, stride = _layout(t, r, group)
    head |= layout | {
        "D_KC": t.kc,
        "D_NC": t.nc,
        "D_CELL_M": t.cell_m,
        "D_CELL_N": t.cell_n,
        "D_CELLS_M": t.cells_m,
        "D_CELLS_N": t.cells_n,
        "D_ROW": 0 if row is None else row.address,
    }
    present = [(i, x) for i, x in enumerate(operands) if x is not None]
    places = tuple((_WORDS[i], x.number) for i, x in present)
    head["D_NAMED"] = sum(1 << i for i, _ in present)
    words = [head.get(name, 0) for name in protocol.DESCRIPTOR]
    descriptor = array("q", words + _slot_words(operands[2:], head["D_N"]) + axes)
    kernel = " + ".join(readable_name(x.name) for x in (cell, row) if x is not None)
    call = Call("cpu", host.name(), tier or host.vector_name(), kernel, t)
    kernels = tuple(x for x in (cell, row, *others) if x is not None)
    return Plan(cell.address, descriptor, places, t.cells * elements, stride, count, call, kernels)


def _by_row(make: Callable[..., Plan | None]) -> Callable[..., Plan | None]:
    """Keep plans by their arguments, as long as the formulas of their row function live."""
    table = lifetimes.Table(4096)

    @functools.wraps(make)
    def found(*args: Any) -> Plan | None:
        plan: Plan | None = table.get(args)
        if plan is None:
            plan = make(*args)
            row = next((x for x in args if isinstance(x, Kernel)), None)
            formulas = [] if row is None else [formula() for formula in row.formulas]
            living = [formula for formula in formulas if formula is not None]
            if plan is not None and len(living) == len(formulas):
                plan = table.keep(args, plan, living)
        return plan

    return found


@_by_row
def _gemm_plan(
    a: Operand,
    b: Operand,
    slots: Slots,
    left: str,
    right: str,
    row: Kernel,
    batch: tuple[int, ...],
    summed: tuple[int, ...],
    threads: int,
) -> Plan | None:
    operands = (a, b, *slots)
    m, k = a.shape[-2:]
    n = b.shape[-1]
    acc = library.accumulator(left)
    kind = library.kind(left, right)
    r = library.registers(acc, kind)
    strides = [_strides(x, batch) for x in operands]
    sizes = {axis: size for axis, size in enumerate(batch) if size != 1}
    outer = [axis for axis in sizes if axis not in summed]
    inner = [axis for axis in sizes if axis in summed]
    axes = [word for axis in outer for word in (batch[axis], *(s[axis] for s in strides))]
    axes += [word for axis in inner for word in (batch[axis], *(s[axis] for s in strides[:2]))]
    elements = math.prod(batch[axis] for axis in outer)
    sums = math.prod(batch[axis] for axis in inner)
    if m == 0 or n == 0 or elements == 0:
        return None
    count = 1 if m * n * k * elements * sums < tiling.parallel_fmas(kind) else threads
    # Rows of the partial column sums belong to whole chunks.
    rows = r.chunk if slots.sums is not None else r.mr
    t = tiling.gemm(m, n, k, elements, sums, count, r, rows)
    a_row, a_k = a.strides[-2:]
    b_k, b_column = b.strides[-2:]
    packing = library.pack_a(left, acc, kind), library.pack_b(right, acc, kind)
    head = {
        "D_M": m,
        "D_N": n,
        "D_K": k,
        "D_PACK_A": packing[0].address,
        "D_PACK_B": packing[1].address,
        "D_BATCH_AXES": len(outer),
        "D_SUM_AXES": len(inner),
        "D_SUM_SIZE": sums,
        "D_A_ROW": a_row,
        "D_A_K": a_k,
        "D_B_K": b_k,
        "D_B_COLUMN": b_column,
        "D_B_DIRECT": int(right == acc and tiling.reads_in_place(m, k, b_k, b_column, r)),
    }
    asked = [
        slot
        for slot, x in enumerate(slots)
        if x is not None
        and slot != protocol.SLOTS["S_SUMS"]
        and x.shape[-2] > 1
        and x.strides[-1] == x.itemsize
    ]
    for name, slot in zip(("D_ASK", "D_ASK_2", "D_ASK_3"), [*asked, -1, -1, -1], strict=False):
        head[name] = slot
    head["D_B_BY_ROWS"] = int(b_column == microkernel.itemsize(right))
    # Columns of A in memory are packed by groups of panels.
    by_columns = a_row == microkernel.itemsize(left) != a_k
    group = r.column_group if by_columns else 1
    cell = library.gemm_cell(acc, kind, left)
    tier = host.product_name(kind, left)
    return _plan(cell, head, operands, axes, t, r, elements, count, row, group, tier, packing)


@_by_row
def _elementwise_plan(
    m: int,
    n: int,
    slots: Slots,
    row: Kernel,
    batch: tuple[int, ...],
    chunk: int,
    threads: int,
    stream: Kernel | None,
) -> Plan | None:
    operands = (None, None, *slots)
    elements = math.prod(batch)
    if m * n * elements == 0:
        return None
    strides = [_strides(x, batch) for x in operands]
    axes = [word for axis, size in enumerate(batch) for word in (size, *(s[axis] for s in strides))]
    count = 1 if m * n * elements < tiling.PARALLEL_ELEMENTS else threads
    head = {"D_M": m, "D_N": n, "D_BATCH_AXES": len(batch)}
    t = tiling.elementwise(m, n, chunk)
    if stream is not None:
        written = slots.out
        assert written is not None
        head |= {
            "D_STREAM": stream.address,
            "D_STREAM_ITEM": written.itemsize,
            "D_STREAM_STEP": tiling.STREAM_STEP,
        }
        t = tiling.streamed(m, n, written.itemsize)
    r = library.registers("float64")
    cell = library.elementwise_cell()
    others = () if stream is None else (stream,)
    return _plan(cell, head, operands, axes, t, r, elements, count, row, others=others)


@_by_row
def _join_plan(cell: Kernel, slots: Slots, threads: int) -> Plan | None:
    assert slots.sums is not None
    *batch, rows, n = slots.sums.shape
    elements = math.prod(batch)
    if n * elements == 0:
        return None
    operands = (None, None, *slots)
    strides = [_strides(x, tuple(batch)) for x in operands]
    axes = [word for axis, size in enumerate(batch) for word in (size, *(s[axis] for s in strides))]
    count = 1 if rows * n * elements < tiling.PARALLEL_ELEMENTS else threads
    # The cell gives one row; the rows that it sums are the third length, as the K of a product is.
    head = {"D_M": 1, "D_N": n, "D_K": rows, "D_BATCH_AXES": len(batch)}
    t = tiling.elementwise(1, n, 1)
    r = library.registers("float64")
    return _plan(cell, head, operands, axes, t, r, elements, count, None)


def gemm(
    a: Operand,
    a_format: str,
    b: Operand,
    b_format: str,
    row: Kernel,
    slots: Slots,
    batch: tuple[int, ...] = (),
    summed: tuple[int, ...] = (),
) -> Plan | None:
    """``row(sum over summed axes of a @ b)`` for every batch element.

    `batch` is the batch shape that factors and slots broadcast to; the axes whose numbers are in
    `summed` are summed over inside the product (the slots have no such axes, or of length 1).
    None where there is nothing to compute.
    """
    # The number of threads costs a call into Numba: not asked for where one is certain.
    limit = tiling.parallel_fmas(library.kind(a_format, b_format))
    small = not batch and a.shape[0] * a.shape[1] * b.shape[-1] < limit
    threads = 1 if small else launch.threads()
    return _gemm_plan(a, b, slots, a_format, b_format, row, batch, summed, threads)


def elementwise(
    m: int,
    n: int,
    row: Kernel,
    slots: Slots,
    batch: tuple[int, ...] = (),
    chunk: int = 1,
    stream: Kernel | None = None,
) -> Plan | None:
    """``row`` over every row of (*batch, m, n); cells are whole chunks of `chunk` rows.

    `stream` is the same row function storing past the caches, for results (`slots.out`, and
    `slots.extra` if that is there) of contiguous rows.  None where there is nothing to compute.
    """
    small = not batch and m * n < tiling.PARALLEL_ELEMENTS
    threads = 1 if small else launch.threads()
    return _elementwise_plan(m, n, slots, row, batch, chunk, threads, stream)


def join(
    cell: Kernel,
    sums: Operand,
    out: Operand | None,
    before: Operand | None = None,
    after: Operand | None = None,
) -> Plan | None:
    """``out = before + the sum of the rows of sums``, of every batch element; None where there is
    nothing to write.

    A sum that is to go on is written to `after` in float64, two rows (the sum, and the rounding
    errors made in it), and has no `out`.
    """
    small = math.prod(sums.shape) < tiling.PARALLEL_ELEMENTS
    threads = 1 if small else launch.threads()
    return _join_plan(cell, Slots(extra=before, out=out, pre=after, sums=sums), threads)


def alone(plan: Plan) -> Sequence:
    """A plan as a sequence of one step."""
    if plan.alone is None:
        plan.alone = sequence([[(plan, {})]], ())
    return plan.alone


def nothing() -> None:
    """Record a call that launches nothing, as its results have no element or no term."""
    latest.call = Call("cpu", host.name(), host.vector_name(), "nothing", None)


def run(plan: Plan, arrays: tuple[np.ndarray | None, ...], workspace: int = 0) -> None:
    """Launch a plan on the arrays of a call, each at its number.

    `workspace` is the address of ``alone(plan).size`` bytes; without it the launch finds its own.
    """
    own = plan.alone or alone(plan)
    if workspace:
        launch.launch_in(workspace, own, arrays)
    else:
        launch.launch(own, arrays)
    latest.call = plan.call


def places(temporaries: Iterable[Operand], start: int) -> tuple[dict[int, int], int]:
    """Where contiguous temporaries lie in memory from `start` on, by number, and its new end.

    Whole pages and a few lines, so that not all begin in one cache set.
    """
    found: dict[int, int] = {}
    for x in temporaries:
        found[x.number] = start
        start += tiling.round_up(math.prod(x.shape) * x.itemsize, launch.PAGE) + 3 * tiling.LINE
    return found, start


#: A plan, and by number how many bytes behind the array's beginning its operand begins.
Step = tuple[Plan, Mapping[int, int]]


def sequence(
    phases: Iterable[list[Step]],
    temporaries: Iterable[Operand],
    beside: tuple[int, int] | None = None,
) -> Sequence:
    """Plans as one; those of a phase beside one another, when the phases before it are finished.

    Contiguous `temporaries` get places behind the workspaces.  `beside`: the numbers of an array
    and of a temporary that is to begin in the same place of a page, almost (`open_sequence`).
    """
    phases = [phase for phase in phases if phase]
    steps = [step for phase in phases for step in phase]
    threads = max(
        min(max(plan.threads for plan, _ in phase), sum(plan.cells for plan, _ in phase))
        for phase in phases
    )
    stride = max(plan.stride for plan, _ in steps)
    own, table = places(temporaries, threads * stride)
    words = array("q", (-1, 0))
    if beside is not None and beside[1] in own:
        words = array("q", (beside[0], own[beside[1]]))
        table += launch.PAGE
    end = 0
    for phase in phases:
        before = end
        for plan, offsets in phase:
            end += plan.cells
            words.extend((plan.cell, end, before, len(plan.descriptor)))
            start = len(words)
            words.extend(plan.descriptor)
            for word, number in plan.places:
                temporary = number in own
                offset = offsets.get(number, 0) + own.get(number, 0)
                name = protocol.NUMBERS if temporary else number
                words[start + word] = offset << protocol.NUMBER_BITS | name
    size = table + 8 * (protocol.TABLE["T_ENTRIES"] + len(words))
    kernels = tuple(dict.fromkeys(kernel for plan, _ in steps for kernel in plan.kernels))
    return Sequence(
        words,
        words.buffer_info()[0],
        len(steps),
        threads,
        stride,
        table,
        size,
        steps[-1][0].call,
        kernels,
    )


def run_sequence(sequence: Sequence, arrays: tuple[np.ndarray | None, ...]) -> None:
    """Run a sequence on the arrays of a call, each at its number."""
    launch.launch(sequence, arrays)
    latest.call = sequence.call
