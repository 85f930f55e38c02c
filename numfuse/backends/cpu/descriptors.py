"""From operands to a plan: the descriptor of a product, of a pass over rows, or of a joined sum.

`product` is the one driver.  Forward, grad_pre, d_a and d_b are the same call with strides turned
round and another row function.  A plan knows the arrays of a call by their names only, so it serves
every call of its form.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import NamedTuple

from numfuse.backends import Call
from numfuse.backends.cpu import host, tiling
from numfuse.backends.cpu.kernels import library, protocol
from numfuse.backends.cpu.launch.sequence import Operand, Plan
from numfuse.backends.cpu.launch.workspace import PAGE
from numfuse.runtime.specialise import Kernel, readable_name


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


def layout(t: tiling.Tiling, r: tiling.Registers, group: int) -> tuple[dict[str, int], int]:
    """Return the words that lay out a thread's workspace, and its bytes.

    Regions start at odd numbers of cache lines, so that they do not all begin in one cache set.
    """
    line, page = tiling.LINE, PAGE
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
    threads: int,
    others: tuple[Kernel, ...] = (),
    group: int = 1,
    tier: str | None = None,
) -> Plan:
    """Return a plan; the first of the other kernels is the row function, if there is one."""
    words, stride = layout(t, r, group)
    head |= words | {
        "D_KC": t.kc,
        "D_NC": t.nc,
        "D_CELL_M": t.cell_m,
        "D_CELL_N": t.cell_n,
        "D_CELLS_M": t.cells_m,
        "D_CELLS_N": t.cells_n,
        "D_ROW": others[0].address if others else 0,
    }
    present = [(i, x) for i, x in enumerate(operands) if x is not None]
    places = tuple((_WORDS[i], x.name) for i, x in present)
    head["D_NAMED"] = sum(1 << i for i, _ in present)
    slots = _slot_words(operands[2:], head["D_N"])
    descriptor = array("q", [*protocol.DESCRIPTOR.words(head), *slots, *axes])
    kernel = " + ".join(readable_name(x.name) for x in (cell, *others[:1]))
    call = Call("cpu", host.name(), tier or host.vector_name(), kernel, t)
    kernels = cell, *others
    return Plan(
        cell.address, descriptor, places, t.cells * elements, stride, threads, call, kernels
    )


def _axes(sizes: Iterable[tuple[int, int]], strides: Several[tuple[int, ...]]) -> list[int]:
    """Return the words of batch axes: the size of each, and every operand's stride along it."""
    return [word for axis, size in sizes for word in (size, *(s[axis] for s in strides))]


def product(
    a: Operand,
    b: Operand,
    row: Kernel,
    slots: Slots,
    threads: int,
    batch: tuple[int, ...] = (),
    summed: tuple[int, ...] = (),
) -> Plan | None:
    """``row(sum over summed axes of a @ b)`` for every batch element, on so many threads at most.

    `batch` is the batch shape that factors and slots broadcast to; the axes whose numbers are in
    `summed` are summed over inside the product (the slots have no such axes, or of length 1).
    None where there is nothing to compute.
    """
    if tiling.NARROW >= b.shape[-1] < a.shape[-2] and slots.sums is None:
        # Few columns: their transpose has long rows, which waste no lane of a vector and no call of
        # the row function. An element is the same sum in the same order.
        a, b = b.turned(), a.turned()
        slots = Slots(*(None if x is None else x.turned() for x in slots))
    operands = (a, b, *slots)
    m, k = a.shape[-2:]
    n = b.shape[-1]
    left, right = a.fmt, b.fmt
    acc = library.accumulator(left)
    kind = library.kind(left, right)
    r = library.registers(acc, kind)
    strides = [_strides(x, batch) for x in operands]
    outer = [(axis, n) for axis, n in enumerate(batch) if n != 1 and axis not in summed]
    inner = [(axis, n) for axis, n in enumerate(batch) if n != 1 and axis in summed]
    axes = _axes(outer, strides) + _axes(inner, strides[:2])
    elements, sums = (math.prod(size for _, size in sizes) for sizes in (outer, inner))
    if m == 0 or n == 0 or elements == 0:
        return None
    # Rows of the partial column sums belong to whole chunks.
    rows = r.chunk if slots.sums is not None else r.mr
    a_row, a_k = a.strides[-2:]
    b_k, b_column = b.strides[-2:]
    head = {
        "D_M": m,
        "D_N": n,
        "D_K": k,
        "D_BATCH_AXES": len(outer),
        "D_SUM_AXES": len(inner),
        "D_SUM_SIZE": sums,
        "D_A_ROW": a_row,
        "D_A_K": a_k,
        "D_B_K": b_k,
        "D_B_COLUMN": b_column,
    }
    if (
        m <= tiling.THIN_ROWS
        and left == right == acc
        and b.itemsize in (b_k, b_column)
        and k * sums > 0
    ):
        count = 1 if n * k * elements * sums < tiling.PARALLEL_THIN else threads
        t = tiling.thin(n, k, elements, count, r, rows)
        cell = library.thin_cell(acc, b_column == b.itemsize)
        return _plan(cell, head, operands, axes, t, r, elements, count, (row,))
    count = 1 if m * n * k * elements * sums < tiling.parallel_fmas(r) else threads
    steps = (b_k, b_column) if right == acc else None
    t = tiling.gemm(m, n, k, elements, sums, count, r, rows, steps)
    packing = library.pack_a(left, acc, kind), library.pack_b(right, acc, kind)
    head |= {
        "D_PACK_A": packing[0].address,
        "D_PACK_B": packing[1].address,
        "D_B_DIRECT": int(t.in_place),
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
    head["D_B_BY_ROWS"] = int(b_column == b.itemsize)
    # Columns of A in memory are packed by groups of panels.
    by_columns = a_row == a.itemsize != a_k
    group = r.column_group if by_columns else 1
    cell = library.gemm_cell(acc, kind, left)
    tier = host.product_name(kind, left)
    others = row, *packing
    return _plan(cell, head, operands, axes, t, r, elements, count, others, group, tier)


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
) -> Plan | None:
    """``row`` over every row of (*batch, m, n); cells are whole chunks of `chunk` rows.

    `stream` is the same row function storing past the caches, for results (`slots.out`, and
    `slots.extra` if that is there) of contiguous rows; `cell` one that does the work of `row`.
    None where there is nothing to compute.
    """
    operands = (None, None, *slots)
    elements = math.prod(batch)
    if m * n * elements == 0:
        return None
    strides = [_strides(x, batch) for x in operands]
    axes = _axes(enumerate(batch), strides)
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
    cell = cell or library.elementwise_cell()
    others = (row,) if stream is None else (row, stream)
    return _plan(cell, head, operands, axes, t, r, elements, count, others)


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
    slots = Slots(extra=before, out=out, pre=after, sums=sums)
    *batch, rows, n = sums.shape
    elements = math.prod(batch)
    if n * elements == 0:
        return None
    operands = (None, None, *slots)
    strides = [_strides(x, tuple(batch)) for x in operands]
    axes = _axes(enumerate(batch), strides)
    count = 1 if rows * n * elements < tiling.PARALLEL_ELEMENTS else threads
    # The cell gives one row; the rows that it sums are the third length, as the K of a product is.
    head = {"D_M": 1, "D_N": n, "D_K": rows, "D_BATCH_AXES": len(batch)}
    t = tiling.elementwise(1, n, 1)
    r = library.registers("float64")
    return _plan(cell, head, operands, axes, t, r, elements, count)
