"""From arrays to a launch: the descriptor of a product or of an elementwise pass.

`gemm` is the one driver.  Forward, grad_pre, d_a and d_b are the same call with strides turned
round and another row function.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numfuse import tiling
from numfuse.backends.cpu import kernels, launch, library, microkernel

#: Operands of a row function by slot (`kernels.SLOTS`); an absent one is None.
Slots = dict[int, np.ndarray | None]

S_BIAS, S_EXTRA, S_GRAD, S_OUT, S_PRE, S_SUMS, S_A, S_B = range(kernels.SLOT_COUNT)


class Factor(NamedTuple):
    """One factor of a product: (..., rows, K) for the left one, (..., K, columns) for the right."""

    array: np.ndarray
    fmt: str


def address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def _batch_strides(x: np.ndarray | None, batch: Sequence[int]) -> list[int]:
    """Byte strides of `x` (..., rows, columns) along `batch`; 0 where it is broadcast."""
    if x is None:
        return [0] * len(batch)
    missing = len(batch) - (x.ndim - 2)
    own = zip(x.shape[:-2], x.strides[:-2], strict=True)
    return [0] * missing + [0 if size == 1 else stride for size, stride in own]


def _slot_words(slots: Slots, n: int) -> list[int]:
    words = [0] * (3 * kernels.SLOT_COUNT)
    for slot, x in slots.items():
        if x is None:
            continue
        rows, columns = x.shape[-2:]
        row_stride, column_stride = x.strides[-2:]
        words[3 * slot] = x.__array_interface__["data"][0]
        # An axis of length 1 is broadcast: no step.  But where the result has one column as well,
        # any step is right, and that of contiguous elements spares the scratch row.
        words[3 * slot + 1] = 0 if rows == 1 else row_stride
        words[3 * slot + 2] = column_stride if columns != 1 else (x.itemsize if n == 1 else 0)
    return words


def _layout(t: tiling.Tiling, r: tiling.Registers) -> tuple[tuple[int, ...], int]:
    """Offsets of a thread's workspace (panels, their stride, block, plane, its stride, scratch, its
    stride) and its bytes.  Regions start at odd numbers of cache lines, so that they do not all
    begin in the same cache set.
    """
    line, page = tiling.LINE, launch.PAGE
    scratch_stride = tiling.round_up(t.nc * 8, line) + line
    scratch = kernels.CONTEXT_BYTES
    slack = 2 * r.vector_bytes  # vectors of packing may overhang the last panel
    panel_stride = tiling.round_up(t.kc * r.mr * r.itemsize + slack, line)
    panels = tiling.round_up(scratch + kernels.SLOT_COUNT * scratch_stride, page)
    if t.panels == 1:
        panel_bytes, panel_stride = panel_stride, 0  # every panel takes the place of the one before
    else:
        panel_bytes = t.panels * panel_stride
    block = tiling.round_up(panels + panel_bytes, page) + 3 * line
    block_bytes = t.kc * t.nc * r.itemsize + t.nc // r.nr * line + slack
    plane = tiling.round_up(block + block_bytes, page) + 9 * line
    plane_stride = t.plane_columns * r.itemsize + line
    total = tiling.round_up(plane + t.plane_rows * plane_stride, page) + page
    return (panels, panel_stride, block, plane, plane_stride, scratch, scratch_stride), total


def _launch(
    cell: int, head: list[int], slots: list[int], axes: list[int], cells: int, stride: int, count: int
) -> None:
    descriptor = array("q", head + slots + axes)
    launch.launch(cell, descriptor.buffer_info()[0], cells, stride, count)


def gemm(
    left: Factor,
    right: Factor,
    row: int,
    slots: Slots,
    batch: Sequence[int] = (),
    summed: Sequence[int] = (),
) -> tiling.Tiling:
    """``row(sum over summed axes of left @ right)`` for every batch element.

    `batch` is the batch shape that factors and slots broadcast to; the axes whose numbers are in
    `summed` are summed over inside the product (the slots have no such axes, or of length 1).
    """
    a, b = left.array, right.array
    m, k = a.shape[-2:]
    n = b.shape[-1]
    acc = "float64" if left.fmt == "float64" else "float32"
    r = library.registers(acc)
    axes: list[int] = []
    batch_axes = sum_axes = 0
    elements = sums = 1
    if batch:
        a_strides, b_strides = _batch_strides(a, batch), _batch_strides(b, batch)
        slot_strides = [_batch_strides(slots.get(s), batch) for s in range(kernels.SLOT_COUNT)]
        tail: list[int] = []
        for axis, size in enumerate(batch):
            if axis in summed:
                sums *= size
                sum_axes += 1
                tail += (size, a_strides[axis], b_strides[axis])
            else:
                elements *= size
                batch_axes += 1
                axes += (size, a_strides[axis], b_strides[axis], *(s[axis] for s in slot_strides))
        axes += tail
    if m == 0 or n == 0 or elements == 0:
        return tiling.gemm(m, n, k, 1, 1, 1, r)
    count = 1 if m * n * k * elements * sums < tiling.PARALLEL_FMAS else launch.threads()
    t = tiling.gemm(m, n, k, elements, sums, count, r)
    offsets, stride = _layout(t, r)
    head = [
        m, n, k, t.kc, t.nc, t.cell_m, t.cell_n, t.cells_m, t.cells_n,
        library.pack_a(left.fmt, acc).address, library.pack_b(right.fmt, acc).address, row,
        batch_axes, sum_axes, sums,
        address(a), *a.strides[-2:], address(b), *b.strides[-2:],
        *offsets,
    ]  # fmt: skip
    words = _slot_words(slots, n)
    _launch(library.gemm_cell(acc).address, head, words, axes, t.cells * elements, stride, count)
    return t


def elementwise(
    shape: Sequence[int], row: int, slots: Slots, batch: Sequence[int] = (), chunk: int = 1
) -> tiling.Tiling:
    """``row`` over every row of (*batch, *shape); cells are whole chunks of `chunk` rows."""
    m, n = shape
    r = library.registers("float64")
    elements = math.prod(batch)
    size = m * n * elements
    count = 1 if size < tiling.PARALLEL_ELEMENTS else launch.threads()
    t = tiling.elementwise(m, n, chunk)
    if size == 0:
        return t
    axes: list[int] = []
    if batch:
        slot_strides = [_batch_strides(slots.get(s), batch) for s in range(kernels.SLOT_COUNT)]
        for axis, length in enumerate(batch):
            axes += (length, 0, 0, *(s[axis] for s in slot_strides))
    offsets, stride = _layout(t, r)
    head = [
        m, n, 0, t.kc, t.nc, t.cell_m, t.cell_n, t.cells_m, t.cells_n,
        0, 0, row, len(batch), 0, 1, 0, 0, 0, 0, 0, 0, *offsets,
    ]  # fmt: skip
    words = _slot_words(slots, n)
    cell = library.elementwise_cell().address
    _launch(cell, head, words, axes, t.cells * elements, stride, count)
    return t
