"""From operands to a plan: the descriptor of a product, of a pass over rows, or of a joined sum.

`product` is the one driver.  Forward, grad_pre, d_a and d_b are the same call with strides turned
round and another row function.  A plan knows the arrays of a call by their names only, so it serves
every call of its form.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from numfuse.backends import Call
from numfuse.backends.cpu import host, tiling
from numfuse.backends.cpu.kernels import library, protocol
from numfuse.backends.cpu.launch.sequence import Operand, Plan
from numfuse.backends.cpu.launch.workspace import PAGE
from numfuse.runtime.specialise import Kernel


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
    #: Those behind them.
    more: tuple[Operand | None, ...] = ()

    def all(self) -> tuple[Operand | None, ...]:
        """Return every operand, in the order of the slots."""
        first = self.bias, self.extra, self.grad, self.out, self.pre, self.sums, self.a, self.b
        return *first, *self.more

    def each(self, make: Callable[[Operand], Operand]) -> Slots:
        """Return the slots with what a function makes of each operand."""
        return Slots.of([None if x is None else make(x) for x in self.all()])

    @classmethod
    def of(cls, every: Sequence[Operand | None]) -> Slots:
        """Return the slots that have these operands, in their order."""
        return cls._make((*every[: protocol.SLOT_COUNT], tuple(every[protocol.SLOT_COUNT :])))


class Group(NamedTuple):
    """How a row function takes its rows: so many members of a point, and its scratch rows."""

    members: int
    held: int


def layout(
    t: tiling.Tiling,
    r: tiling.Registers,
    group: int,
    slots: int = protocol.SLOT_COUNT,
    held: int = 0,
) -> tuple[dict[str, int], int]:
    """Return the words that lay out a thread's workspace, and its bytes.

    There is a scratch row for each slot, and behind these so many are `held`. Regions start at odd
    numbers of cache lines, so that they do not all begin in one cache set.
    """
    line = tiling.LINE
    slack = 2 * r.vector_bytes  # vectors of packing may overhang the last panel
    scratch_stride = (t.nc * 8 + line - 1) // line * line + line
    panel_stride = (t.kc * r.panel_rows * r.factor + slack + line - 1) // line * line
    # A group of panels is packed while the group before it is used.
    down, across = r.tiles
    count = down * (t.panels if t.panels > 1 else 2 * group if group > 1 else 1)
    # (a product of few rows packs nothing)
    block_bytes = 0 if t.strips else t.kc * t.nc * r.factor + t.nc // r.nr * across * line + slack
    block_stride = (block_bytes + PAGE - 1) // PAGE * PAGE + 5 * line
    strip_stride = t.nc * r.itemsize + line
    strips = t.strips * (t.nc * r.itemsize + 8 * r.vector_bytes) or 2 * r.mr * strip_stride
    starts, at = [], protocol.CONTEXT_BYTES
    for size, lines in (
        ((slots + held) * scratch_stride, 0),
        (count * panel_stride, 3),
        (2 * block_stride, 9),
        (strips, 7),
        (t.plane_rows * t.plane_columns * r.itemsize, PAGE // line),
    ):
        starts.append(at)
        at = (at + size + PAGE - 1) // PAGE * PAGE + lines * line
    scratch, panels, block, strip, plane = starts
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
        "D_SLOT_COUNT": slots,
    }
    return words, at


_Operands = tuple[Operand | None, ...]
# Operands by number: A, B, then the slots.
_WORDS = (
    protocol.DESCRIPTOR["D_A"],
    protocol.DESCRIPTOR["D_B"],
    *range(protocol.D_SLOTS, protocol.D_SLOTS + 3 * len(protocol.SLOTS), 3),
)


class Axes(NamedTuple):
    """The batch axes of a plan."""

    #: The size of each, and every operand's stride along it; of those summed over, A's and B's.
    words: list[int]
    outer: int = 0
    summed: int = 0
    #: Elements of the axes, and of those that are summed over.
    elements: int = 1
    sums: int = 1


NO_AXES = Axes([])


def make_axes(batch: tuple[int, ...], operands: _Operands, summed: tuple[int, ...] = ()) -> Axes:
    """Return the axes of a batch; an operand that is broadcast along one has the stride 0."""
    outer: list[int] = []
    inner: list[int] = []
    counts, elements = [0, 0], [1, 1]
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        kind = axis in summed
        counts[kind] += 1
        elements[kind] *= size
        words = inner if kind else outer
        words.append(size)
        for x in operands[:2] if kind else operands:
            own = -1 if x is None else axis - len(batch) + len(x.shape) - 2
            words.append(0 if x is None or own < 0 or x.shape[own] == 1 else x.strides[own])
    return Axes(outer + inner, *counts, *elements)


def make_plan(
    cell: Kernel,
    head: dict[str, int],
    operands: _Operands,
    axes: Axes,
    t: tiling.Tiling,
    r: tiling.Registers,
    threads: int,
    others: tuple[Kernel, ...] = (),
    group: int = 1,
    tier: str | None = None,
    held: int = 0,
) -> Plan:
    """Return a plan; the first of the other kernels is the row function, if there is one."""
    words, stride = layout(t, r, group, len(operands) - 2, held)
    slots = [0] * (3 * len(operands) - 6)
    places: list[tuple[int, str]] = []
    named = 0
    for i, x in enumerate(operands):
        if x is None:
            continue
        places.append((_WORDS[i], x.name))
        named |= 1 << i
        if i > 1:
            # An axis of length 1 is broadcast: no step.  But where the result has one column as
            # well, any step is right, and that of contiguous elements spares the scratch row.
            (*_, rows, columns), (*_, row_stride, column_stride) = x.shape, x.strides
            if columns == 1:
                column_stride = x.itemsize if head["D_N"] == 1 else 0
            slots[3 * i - 5 : 3 * i - 3] = 0 if rows == 1 else row_stride, column_stride
    head |= words | {
        "D_KC": t.kc,
        "D_NC": t.nc,
        "D_CELL_M": t.cell_m,
        "D_CELL_N": t.cell_n,
        "D_CELLS_M": t.cells_m,
        "D_CELLS_N": t.cells_n,
        "D_ROW": others[0].address if others else 0,
        "D_BATCH_AXES": axes.outer,
        "D_NAMED": named,
    }
    descriptor = array("q", [*protocol.DESCRIPTOR.words(head), *slots, *axes.words])
    kernel = f"{cell.label} + {others[0].label}" if others else cell.label
    call = Call("cpu", host.name(), tier or host.vector_name(), kernel, t)
    cells = t.cells_m * t.cells_n * axes.elements
    kernels = cell, *others
    return Plan(cell.address, descriptor, tuple(places), cells, stride, threads, call, kernels)


def sizes_of(a: Operand, b: Operand, axes: Axes) -> dict[str, int]:
    """Return the words that tell a product's lengths and its factors' strides."""
    return {
        "D_M": a.shape[-2],
        "D_N": b.shape[-1],
        "D_K": a.shape[-1],
        "D_SUM_AXES": axes.summed,
        "D_SUM_SIZE": axes.sums,
        "D_A_ROW": a.strides[-2],
        "D_A_K": a.strides[-1],
        "D_B_K": b.strides[-2],
        "D_B_COLUMN": b.strides[-1],
    }


def is_turned(a: Operand, b: Operand, slots: Slots) -> bool:
    """Return whether the transpose of a product is made.

    A result of few columns has a transpose of long rows, which waste no lane of a vector and no
    call of the row function; one that lies by columns, a transpose that is written by rows. An
    element is the same sum in the same order.
    """
    out = slots.out
    narrow = tiling.NARROW >= b.shape[-1] < a.shape[-2]
    turned = out is not None and out.strides[-2] == out.itemsize and out.lies_by_columns()
    return slots.sums is None and (narrow or turned)


def product(
    a: Operand,
    b: Operand,
    row: Kernel,
    slots: Slots,
    threads: int,
    batch: tuple[int, ...] = (),
    summed: tuple[int, ...] = (),
    turns: bool = True,
    rows: Group | None = None,
    precision: str = "ieee",
) -> Plan | None:
    """``row(sum over summed axes of a @ b)`` for every batch element, on so many threads at most.

    `batch` is the batch shape that factors and slots broadcast to; the axes whose numbers are in
    `summed` are summed over inside the product (the slots have no such axes, or of length 1).
    `turns` lets the transpose be made; `rows` says that the row function takes groups of rows;
    `precision` is that of two factors of float32. None where there is nothing to compute.
    """
    turned = turns and rows is None and is_turned(a, b, slots)
    if turned:
        a, b = b.turned(), a.turned()
        slots = slots.each(Operand.turned)
    operands = (a, b, *slots.all())
    (*_, m, k), n = a.shape, b.shape[-1]
    (*_, a_row, a_k), (*_, b_k, b_column) = a.strides, b.strides
    axes = make_axes(batch, operands, summed) if batch else NO_AXES
    if m == 0 or n == 0 or axes.elements == 0:
        return None
    # Rows of the partial column sums belong to whole chunks.
    chunked = slots.sums is not None
    fmas = m * n * k * axes.elements * axes.sums
    acc = library.accumulator(a.fmt)
    head = sizes_of(a, b, axes)
    r, cell, pack_a, pack_b, tier = library.product(a.fmt, b.fmt, precision, turned)
    split = r.kind in tiling.PARTS
    by_rows = b_column == b.itemsize
    plain = a.fmt == b.fmt == acc and not split and (by_rows or b_k == b.itemsize)
    thin = m <= tiling.THIN_ROWS
    if thin and m > tiling.THIN_GROUPS[by_rows]:
        thin = by_rows and tiling.is_large(k, b_k)
    if thin and plain and fmas:
        r = library.registers_of(acc)
        count = 1 if fmas < m * tiling.PARALLEL_THIN else threads
        unit = r.chunk if chunked else r.mr
        streamed = by_rows and tiling.streams(k, b_k, r)
        t = tiling.thin(m, n, k, axes.elements, count, r, unit, by_rows, streamed)
        cell = library.thin_cell(acc, by_rows, streamed)
        held = 0 if rows is None else rows.held
        return make_plan(cell, head, operands, axes, t, r, count, (row,), held=held)
    count = 1 if fmas < tiling.parallel_fmas(r) else threads
    steps = (b_k, b_column) if b.fmt == acc and not split else None
    unit = r.mr
    if chunked:
        unit = library.chunk(a.fmt) if split else r.chunk
    if rows is not None:  # chunks are of points; a cell has whole groups
        unit = unit * rows.members if chunked else math.lcm(unit, rows.members)
    t = tiling.gemm(m, n, k, axes.elements, axes.sums, count, r, unit, steps)
    head |= {
        "D_PACK_A": pack_a.address,
        "D_PACK_B": pack_b.address,
        "D_B_DIRECT": int(t.in_place),
        "D_B_BY_ROWS": int(by_rows),
    }
    asked = []
    for slot, x in enumerate(slots.all() if rows is None else ()):
        if x is not None and x.shape[-2] > 1 and x.strides[-1] == x.itemsize:
            if slot != protocol.SLOTS["S_SUMS"]:
                asked.append(slot)
    for name, slot in zip(("D_ASK", "D_ASK_2", "D_ASK_3"), [*asked, -1, -1, -1], strict=False):
        head[name] = slot
    # Columns of A in memory are packed by groups of panels.
    by_columns = a_row == a.itemsize != a_k
    group = r.column_group if by_columns else 1
    others, held = (row, pack_a, pack_b), 0 if rows is None else rows.held
    return make_plan(cell, head, operands, axes, t, r, count, others, group, tier, held)


def rows(
    m: int,
    n: int,
    row: Kernel,
    slots: Slots,
    threads: int,
    batch: tuple[int, ...] = (),
    chunk: int = 1,
    stream: Kernel | None = None,
    cell: Kernel | None = None,
    group: int = 1,
    held: int = 0,
) -> Plan | None:
    """``row`` over every row of (*batch, m, n), in cells of whole chunks of `chunk` rows.

    Blocks of columns have whole groups of `group`.

    `stream` is the same row function storing past the caches, for results (`slots.out`, and
    `slots.extra` if that is there) of contiguous rows; `cell` one that does the work of `row`,
    which has so many scratch rows `held` behind those of its slots.
    None where there is nothing to compute.
    """
    operands = (None, None, *slots.all())
    axes = make_axes(batch, operands) if batch else NO_AXES
    elements = m * n * axes.elements
    if elements == 0:
        return None
    count = 1 if elements < tiling.PARALLEL_ELEMENTS else threads
    head = {"D_M": m, "D_N": n}
    if stream is not None:
        written = slots.out
        assert written is not None
        head |= {
            "D_STREAM": stream.address,
            "D_STREAM_ITEM": written.itemsize,
            "D_STREAM_STEP": tiling.STREAM_STEP,
        }
        t = tiling.streamed(m, n, written.itemsize)
    else:
        t = tiling.elementwise(m, n, chunk, group)
    r = library.registers("float64")
    cell = cell or library.elementwise_cell()
    others = (row,) if stream is None else (row, stream)
    return make_plan(cell, head, operands, axes, t, r, count, others, held=held)


def join(
    cell: Kernel,
    sums: Operand,
    threads: int,
    out: Operand | None,
    before: Operand | None = None,
    after: Operand | None = None,
) -> Plan | None:
    """``out = before + the sum of the rows of sums``, of every batch element; None where there is
    nothing to write.

    A sum that is to go on is written to `after` in float64, two rows (the sum, and the rounding
    errors made in it), and has no `out`.
    """
    operands = (None, None, *Slots(extra=before, out=out, pre=after, sums=sums).all())
    *batch, rows, n = sums.shape
    axes = make_axes(tuple(batch), operands) if batch else NO_AXES
    elements = n * axes.elements
    if elements == 0:
        return None
    count = 1 if rows * elements < tiling.PARALLEL_ELEMENTS else threads
    # The cell gives one row; the rows that it sums are the third length, as the K of a product is.
    head = {"D_M": 1, "D_N": n, "D_K": rows}
    t = tiling.elementwise(1, max(n, tiling.TOTAL_LANES), 1)
    r = library.registers("float64")
    return make_plan(cell, head, operands, axes, t, r, count)
