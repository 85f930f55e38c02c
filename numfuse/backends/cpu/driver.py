"""From arrays to a launch: the descriptor of a product or of an elementwise pass.

`gemm` is the one driver.  Forward, grad_pre, d_a and d_b are the same call with strides turned
round and another row function.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numfuse import tiling
from numfuse.backends import Call, latest
from numfuse.backends.cpu import host, launch, library, microkernel, protocol
from numfuse.specialise import Kernel, readable_name


class Slots(NamedTuple):
    """Operands of a row function, (..., rows, columns), in the order of `protocol.SLOTS`."""

    bias: np.ndarray | None = None
    extra: np.ndarray | None = None
    grad: np.ndarray | None = None
    out: np.ndarray | None = None
    pre: np.ndarray | None = None
    sums: np.ndarray | None = None
    a: np.ndarray | None = None
    b: np.ndarray | None = None


def _layout(t: tiling.Tiling, r: tiling.Registers, group: int) -> tuple[dict[str, int], int]:
    """The words that lay out a thread's workspace, and its bytes.

    Regions start at odd numbers of cache lines, so that they do not all begin in one cache set.
    """
    line, page = tiling.LINE, launch.PAGE
    scratch_stride = tiling.round_up(t.nc * 8, line) + line
    scratch = protocol.CONTEXT_BYTES
    slack = 2 * r.vector_bytes  # vectors of packing may overhang the last panel
    panel_stride = tiling.round_up(t.kc * r.panel_rows * r.itemsize + slack, line)
    count = t.panels if t.panels > 1 else group
    panels = tiling.round_up(scratch + protocol.SLOT_COUNT * scratch_stride, page)
    block = tiling.round_up(panels + count * panel_stride, page) + 3 * line
    block_bytes = t.kc * t.nc * r.itemsize + t.nc // r.nr * line + slack
    block_stride = tiling.round_up(block_bytes, page) + 5 * line
    strip = tiling.round_up(block + 2 * block_stride, page) + 9 * line
    strip_stride = t.nc * r.itemsize + line
    plane = tiling.round_up(strip + 2 * r.mr * strip_stride, page) + 7 * line
    total = tiling.round_up(plane + t.plane_rows * t.plane_columns * r.itemsize, page) + page
    words = {
        "D_PANEL": panels, "D_PANEL_STRIDE": panel_stride, "D_PANELS": count, "D_GROUP": group,
        "D_BLOCK": block, "D_BLOCK_STRIDE": block_stride, "D_PLANE": plane,
        "D_STRIP": strip, "D_STRIP_STRIDE": strip_stride,
        "D_SCRATCH": scratch, "D_SCRATCH_STRIDE": scratch_stride,
    }  # fmt: skip
    return words, total


class Plan(NamedTuple):
    """Everything of a launch but its operands' addresses."""

    cell: int
    descriptor: array[int]
    #: (word, operand number) of every operand that is there.
    places: tuple[tuple[int, int], ...]
    cells: int
    stride: int
    threads: int
    call: Call


#: What a plan depends on of an operand; None where it is absent.
_Form = tuple[tuple[int, ...], tuple[int, ...]] | None
# Operands by number: A, B, then the slots.
_WORDS = (
    protocol.DESCRIPTOR["D_A"],
    protocol.DESCRIPTOR["D_B"],
    *range(protocol.D_SLOTS, protocol.D_SLOTS + 3 * protocol.SLOT_COUNT, 3),
)


def _strides(form: _Form, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Byte strides of (..., rows, columns) along `batch`; 0 where it is broadcast."""
    if form is None:
        return (0,) * len(batch)
    shape, strides = form
    missing = len(batch) - (len(shape) - 2)
    own = zip(shape[:-2], strides[:-2], strict=True)
    return (0,) * missing + tuple(0 if size == 1 else stride for size, stride in own)


def _slot_words(forms: tuple[_Form, ...], n: int, items: tuple[int, ...]) -> list[int]:
    words = [0] * (3 * protocol.SLOT_COUNT)
    for slot, form in enumerate(forms):
        if form is None:
            continue
        (*_, rows, columns), (*_, row_stride, column_stride) = form
        # An axis of length 1 is broadcast: no step.  But where the result has one column as well,
        # any step is right, and that of contiguous elements spares the scratch row.
        words[3 * slot + 1] = 0 if rows == 1 else row_stride
        words[3 * slot + 2] = column_stride if columns != 1 else (items[slot] if n == 1 else 0)
    return words


def _plan(
    cell: Kernel, head: dict[str, int], forms: tuple[_Form, ...], items: tuple[int, ...],
    axes: list[int], t: tiling.Tiling, r: tiling.Registers, elements: int, count: int,
    row: Kernel, group: int = 1,
) -> Plan:  # fmt: skip
    layout, stride = _layout(t, r, group)
    head |= layout | {
        "D_KC": t.kc, "D_NC": t.nc, "D_CELL_M": t.cell_m, "D_CELL_N": t.cell_n,
        "D_CELLS_M": t.cells_m, "D_CELLS_N": t.cells_n, "D_ROW": row.address,
    }  # fmt: skip
    places = tuple((_WORDS[i], i) for i, form in enumerate(forms) if form is not None)
    if launch.OBJECTS_CAN_BE_READ:
        head["D_OBJECTS"] = sum(1 << i for _, i in places)
    words = [head.get(name, 0) for name in protocol.DESCRIPTOR]
    descriptor = array("q", words + _slot_words(forms[2:], head["D_N"], items) + axes)
    kernel = f"{readable_name(cell.name)} + {readable_name(row.name)}"
    call = Call("cpu", host.name(), host.vector_name(), kernel, t)
    return Plan(cell.address, descriptor, places, t.cells * elements, stride, count, call)


@functools.lru_cache(maxsize=4096)
def _gemm_plan(
    forms: tuple[_Form, ...], items: tuple[int, ...], left: str, right: str, row: Kernel,
    batch: tuple[int, ...], summed: tuple[int, ...], threads: int,
) -> Plan | None:  # fmt: skip
    a, b = forms[0], forms[1]
    assert a is not None and b is not None  # the factors of a product are always there
    m, k = a[0][-2:]
    n = b[0][-1]
    acc = library.accumulator(left)
    r = library.registers(acc)
    strides = [_strides(form, batch) for form in forms]
    sizes = {axis: size for axis, size in enumerate(batch) if size != 1}
    outer = [axis for axis in sizes if axis not in summed]
    inner = [axis for axis in sizes if axis in summed]
    axes = [word for axis in outer for word in (batch[axis], *(s[axis] for s in strides))]
    axes += [word for axis in inner for word in (batch[axis], *(s[axis] for s in strides[:2]))]
    elements = math.prod(batch[axis] for axis in outer)
    sums = math.prod(batch[axis] for axis in inner)
    if m == 0 or n == 0 or elements == 0:
        return None
    count = 1 if m * n * k * elements * sums < tiling.PARALLEL_FMAS else threads
    t = tiling.gemm(m, n, k, elements, sums, count, r)
    head = {
        "D_M": m, "D_N": n, "D_K": k,
        "D_PACK_A": library.pack_a(left, acc).address,
        "D_PACK_B": library.pack_b(right, acc).address,
        "D_BATCH_AXES": len(outer), "D_SUM_AXES": len(inner), "D_SUM_SIZE": sums,
        "D_A_ROW": a[1][-2], "D_A_K": a[1][-1], "D_B_K": b[1][-2], "D_B_COLUMN": b[1][-1],
        "D_B_DIRECT": int(right == acc and tiling.reads_in_place(m, k, b[1][-2], b[1][-1], r)),
    }  # fmt: skip
    asked = [
        slot for slot, (form, item) in enumerate(zip(forms[2:], items, strict=True))
        if form is not None and slot != protocol.SLOTS["S_SUMS"] and form[0][-2] > 1
        and form[1][-1] == item
    ]  # fmt: skip
    for name, slot in zip(("D_ASK", "D_ASK_2", "D_ASK_3"), [*asked, -1, -1, -1], strict=False):
        head[name] = slot
    head["D_B_BY_ROWS"] = int(b[1][-1] == microkernel.itemsize(right))
    # Columns of A in memory are packed by groups of panels.
    by_columns = a[1][-2] == microkernel.itemsize(left) != a[1][-1]
    group = tiling.COLUMN_GROUP if by_columns else 1
    cell = library.gemm_cell(acc)
    return _plan(cell, head, forms, items, axes, t, r, elements, count, row, group)


@functools.lru_cache(maxsize=4096)
def _elementwise_plan(
    m: int, n: int, forms: tuple[_Form, ...], items: tuple[int, ...], row: Kernel,
    batch: tuple[int, ...], chunk: int, threads: int,
) -> Plan | None:  # fmt: skip
    elements = math.prod(batch)
    if m * n * elements == 0:
        return None
    strides = [_strides(form, batch) for form in forms]
    axes = [word for axis, size in enumerate(batch) for word in (size, *(s[axis] for s in strides))]
    count = 1 if m * n * elements < tiling.PARALLEL_ELEMENTS else threads
    head = {"D_M": m, "D_N": n, "D_BATCH_AXES": len(batch)}
    t = tiling.elementwise(m, n, chunk)
    r = library.registers("float64")
    cell = library.elementwise_cell()
    return _plan(cell, head, forms, items, axes, t, r, elements, count, row)


def run(plan: Plan, operands: Sequence[np.ndarray | None]) -> None:
    """Launch a plan on operands of the forms that it was made for."""
    descriptor = plan.descriptor[:]
    if launch.OBJECTS_CAN_BE_READ:
        for word, i in plan.places:
            descriptor[word] = id(operands[i])
    else:
        for word, i in plan.places:
            descriptor[word] = operands[i].__array_interface__["data"][0]  # type: ignore[union-attr]
    launch.launch(plan.cell, descriptor.buffer_info()[0], plan.cells, plan.stride, plan.threads)
    latest.call = plan.call


def _forms(operands: Sequence[np.ndarray | None]) -> tuple[_Form, ...]:
    return tuple([None if x is None else (x.shape, x.strides) for x in operands])


def _items(operands: Sequence[np.ndarray | None]) -> tuple[int, ...]:
    return tuple([0 if x is None else x.itemsize for x in operands])


def gemm(
    a: np.ndarray,
    a_format: str,
    b: np.ndarray,
    b_format: str,
    row: Kernel,
    slots: Slots,
    batch: tuple[int, ...] = (),
    summed: tuple[int, ...] = (),
) -> Plan | None:
    """``row(sum over summed axes of a @ b)`` for every batch element.

    `batch` is the batch shape that factors and slots broadcast to; the axes whose numbers are in
    `summed` are summed over inside the product (the slots have no such axes, or of length 1).
    Returns what was launched; None where there is nothing to compute.
    """
    operands = (a, b, *slots)
    # The number of threads costs a call into Numba: not asked for where one is certain.
    small = not batch and a.size * b.shape[-1] < tiling.PARALLEL_FMAS
    threads = 1 if small else launch.threads()
    plan = _gemm_plan(
        _forms(operands), _items(slots), a_format, b_format, row, batch, summed, threads
    )
    if plan is not None:
        run(plan, operands)
    return plan


def elementwise(
    m: int, n: int, row: Kernel, slots: Slots, batch: tuple[int, ...] = (), chunk: int = 1
) -> None:
    """``row`` over every row of (*batch, m, n); cells are whole chunks of `chunk` rows."""
    operands = (None, None, *slots)
    small = not batch and m * n < tiling.PARALLEL_ELEMENTS
    threads = 1 if small else launch.threads()
    plan = _elementwise_plan(m, n, _forms(operands), _items(slots), row, batch, chunk, threads)
    if plan is not None:
        run(plan, operands)
