"""Planes: the parts of a sum over K (split-K), stored apart, and what makes a result of them.

A product whose K is cut stores bare sums, one plane a part, in the workspace. A bare result is the
join of them (`joins`). Any other is finished by the kernel here: the parts of an element are added
up in their order, what that loses is added behind, and then comes the epilogue, its bias, its extra
operand, its results and their column sums, as at the end of a product that is not cut. Two sums
have planes each, those of the second behind all of the first.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, elements, intrinsics
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.schema import Ends, Schema
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of, unrolled
from numfuse.backends.cuda.kernels import joins
from numfuse.backends.cuda.kernels.ampere.epilogue import Second, finish_values
from numfuse.backends.cuda.kernels.epilogue import element, finishing, in_bytes, parts_of
from numfuse.backends.cuda.kernels.joins import add_planes, corrected
from numfuse.backends.cuda.kernels.passes import one_value, store_one, threads_of
from numfuse.backends.cuda.plan.product import (
    WIDE_SINCE,
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
)
from numfuse.epilogues import Epilogue, sum_of_terms
from numfuse.language.curves import leaf


@dataclass
class Parts:
    """The planes of a place; steps in bytes."""

    address: Any
    #: Those of the second sum.
    second: Any
    #: Their number, and the steps from one to the next, from a place and from a row.
    depth: Any
    step: Any
    place: Any
    row: Any


def finish_planes(
    parts: Parts, ends: Ends, second: Second, sums, m, n, row_blocks, column_blocks
):  # fmt: skip
    """One block of ROWS rows and LANES accesses of VALUES columns: out = EPILOGUE(their sums).

    Strides are in bytes. The sums of a block's columns go in the order of its rows.
    """
    if OVERLAPS:
        grid_wait()
        grid_release()
    if SUMS:
        shared = cuda.shared.array(ROWS * LANES * VALUES, REAL)
    total = cuda.local.array(VALUES, REAL)
    error = cuda.local.array(VALUES, REAL)
    ahead = cuda.local.array(VALUES * AHEAD, REAL)
    total1 = cuda.local.array(VALUES, REAL)
    offset1 = cuda.local.array(VALUES, REAL)
    offset = cuda.local.array(VALUES, REAL)
    added = cuda.local.array(VALUES, REAL)
    made = cuda.local.array(VALUES, REAL)
    t = cuda.threadIdx.x
    place, block_row, column0 = block_at(cuda.blockIdx.x, row_blocks, column_blocks)
    for i in range(t, ROWS * LANES, THREADS):
        r = i // LANES
        row, column = block_row * ROWS + r, column0 + (i - r * LANES) * VALUES
        for v in unrolled(VALUES):
            made[v] = ZERO
        if row < m and column < n:
            at = place * parts.place + row * parts.row + column * ITEMSIZE
            sum_planes(total, error, ahead, parts.address + at, parts)
            load_values(offset, added, ends, place, row, column)
            if TWO_SUMS:
                sum_planes(total1, error, ahead, parts.second + at, parts)
                load_second(offset1, second, place, column)
            finish_values(total, total1, offset, offset1, added, 0, made)
            store_values(total, made, ends, place, row, column)
            if PRE1:
                STORE_PRE1(second.pre.address + element(second.pre, place, row, column), total1)
        if SUMS:
            for v in unrolled(VALUES):
                shared[i * VALUES + v] = made[v]
    if SUMS:
        cuda.syncthreads()
        sum_columns(shared, sums, t, place, block_row, row_blocks, column0, m, n)


def sum_planes(total, error, ahead, at, parts: Parts):
    """The sums of VALUES neighbours of all planes, the first of which are at `at`."""
    for v in unrolled(VALUES):
        total[v] = ZERO
        error[v] = ZERO
    add_planes(total, error, ahead, at, parts.depth, parts.step)
    for v in unrolled(VALUES):
        total[v] = corrected(total[v], error[v])


def block_at(number, row_blocks, column_blocks):
    """Return the place of a block, its row of blocks and its first column."""
    rest = number // column_blocks
    column0 = (number - rest * column_blocks) * (LANES * VALUES)
    place = rest // row_blocks
    return place, rest - place * row_blocks, column0


def load_values(offset, added, ends: Ends, place, row, column):
    """Load what an epilogue reads beside the sums of VALUES neighbours.

    (The registers are the caller's: in the simulator, threads share the `cuda` of a device
    function.)
    """
    for v in unrolled(VALUES):
        offset[v] = ZERO
        added[v] = ZERO
    if BIAS:
        for v in unrolled(VALUES):
            along = element(ends.bias, place, 0, column + v)
            offset[v] = LOAD_BIAS(ends.bias.address + along, 0)
    if EXTRA:
        loaded = LOAD_EXTRA(ends.extra.address + element(ends.extra, place, row, column))
        for v in unrolled(VALUES):
            added[v] = loaded[v]


def load_second(offset1, second: Second, place, column):
    """Load the other operand like the bias of two sums."""
    for v in unrolled(VALUES):
        offset1[v] = ZERO
    if BIAS1:
        for v in unrolled(VALUES):
            along = element(second.bias, place, 0, column + v)
            offset1[v] = LOAD_BIAS1(second.bias.address + along, 0)


def store_values(total, made, ends: Ends, place, row, column):
    """Store the first two results of VALUES neighbours."""
    if PRE:
        STORE_PRE(ends.pre.address + element(ends.pre, place, row, column), total)
    STORE_OUT(ends.out.address + element(ends.out, place, row, column), made)


def sum_columns(shared, sums, t, place, block_row, row_blocks, column0, m, n):
    """The sums of the columns of a block in shared memory, in the order of its rows, to `sums`."""
    height = min(m - block_row * ROWS, ROWS)
    to = sums + ((place * row_blocks + block_row) * n + column0) * ITEMSIZE
    for j in range(t, min(n - column0, LANES * VALUES), THREADS):
        run = ZERO
        for r in range(height):
            run = run + shared[r * (LANES * VALUES) + j]
        STORE_SUM(to, j, run)


FINISH = Schema(finish_planes)


def _accesses(dtype: str, accumulator: str, values: int, repeats: bool = False) -> tuple[Any, Any]:
    """Return how a thread reads and writes so many neighbours of a row."""
    if values == 1:
        load = inlined(one_value, LOAD_ELEMENT=elements.loads(dtype))
        return load, inlined(store_one, STORE_ELEMENT=elements.stores(dtype))
    wide = accesses.load_repeated if repeats else accesses.load
    return wide(dtype, values, accumulator), accesses.store_array(dtype, values, accumulator)


@dataclass(frozen=True)
class Finish:
    """How blocks of RUN rows finish a product: values of an access, the names of the templates."""

    values: int
    threads: int
    bindings: dict[str, Any]
    row_blocks: int
    column_blocks: int
    grid: tuple[int, int, int]


def finish_of(product: Product, info: DeviceInfo, aligned: bool, turns: int = 1) -> Finish:
    """Return how a kernel finishes a product (`load_values` to `sum_columns`).

    `aligned`: what it reads of a sum may be read for 16 bytes of values at once. `turns`: accesses
    that a thread has of a block.
    """
    p, acc = product, product.accumulator
    size = intrinsics.itemsize(acc)
    values = 16 // size
    repeated = p.extra is not None and not p.extra.strides[2]
    others = p.out, p.pre, p.pre1, None if repeated else p.extra
    wide = aligned and info.capability >= WIDE_SINCE[p.out.dtype]
    if not wide or p.n % values or not all(o is None or o.in_wholes(p.n, values) for o in others):
        values = 1
    threads = threads_of(info)
    lanes = tiling.SIMULATED_TILE.block_n
    if info.capability[0]:
        lanes = turns * threads // tiling.RUN
    bindings = parts_of(p) | {
        "TWO_SUMS": p.has_two_sums,
        "THREADS": threads,
        "ROWS": tiling.RUN,
        "LANES": lanes,
        "VALUES": values,
        "REAL": getattr(types, acc),
        "ZERO": np.dtype(acc).type(0),
        "ITEMSIZE": size,
        "STORE_SUM": elements.stores(acc),
        "STORE_OUT": _accesses(p.out.dtype, acc, values)[1],
    }
    if p.bias is not None:
        bindings["LOAD_BIAS"] = elements.loads(p.bias.dtype)
    if p.extra is not None:
        bindings["LOAD_EXTRA"] = _accesses(p.extra.dtype, acc, values, repeated)[0]
    if p.pre is not None:
        bindings["STORE_PRE"] = _accesses(p.pre.dtype, acc, values)[1]
    if p.bias1 is not None:
        bindings["LOAD_BIAS1"] = elements.loads(p.bias1.dtype)
    if p.pre1 is not None:
        bindings["STORE_PRE1"] = _accesses(p.pre1.dtype, acc, values)[1]
    row_blocks, column_blocks = -(-p.m // tiling.RUN), -(-p.n // (lanes * values))
    grid = row_blocks * column_blocks * p.places, 1, 1
    return Finish(values, threads, bindings, row_blocks, column_blocks, grid)


def finished(
    product: Product,
    info: DeviceInfo,
    planes: Slot,
    depth: int,
    steps: tuple[int, int, int],
    overlaps: bool = False,
    second: Slot | None = None,
) -> Launch:
    """Return the launch that finishes a product of `depth` planes.

    `steps` lead from a place, a plane and a row to the next, in values of the accumulator, 16 bytes
    each at the least where rows are whole 16 bytes. `overlaps`: it may begin before the launch
    before it has ended. `second`: where the planes of a second sum are.
    """
    p, size = product, intrinsics.itemsize(product.accumulator)
    how = finish_of(product, info, all(step * size % 16 == 0 for step in steps))
    few, deep = tiling.FINISH_FEW, (tiling.JOIN_AHEAD, tiling.JOIN_THEN)
    ahead, then = deep if depth >= tiling.FINISH_DEEP else few
    bindings = how.bindings | {
        "AHEAD": ahead,
        "THEN": then,
        "OVERLAPS": overlaps,
        "LOAD": _accesses(p.accumulator, p.accumulator, how.values)[0],
    }
    name = f"finish {p.epilogue.name}"
    # (a count of blocks keeps the assembler from spilling for more of them)
    made = kernel_of(finish_planes, FINISH, bindings, threads=how.threads, blocks=2, name=name)
    place, plane, row = (step * size for step in steps)
    arguments = FINISH(
        parts=Parts(planes, second or 0, depth, plane, place, row),
        second=Second.of(p, in_bytes(Slot("y1"), None)),
        m=p.m,
        n=p.n,
        row_blocks=how.row_blocks,
        column_blocks=how.column_blocks,
        **finishing(p, p.out, Slot("out"), in_bytes),
    )
    return Launch(made, how.grid, arguments, overlaps=overlaps)


@dataclass(frozen=True)
class Planes:
    """Where the parts of a product's sum are stored; the only part of one goes to the result."""

    product: Product
    #: What the kernel makes: the product, or where K is cut its bare sums, the planes.
    stored: Product
    slot: Slot
    parts: int
    #: From a place, a part and a row to the next, in values.
    steps: tuple[int, int, int] = (0, 0, 0)
    #: Where those of a second sum are.
    second: Slot | None = None
    #: Whether their rows are whole 16 bytes, so that any result is joined by rows.
    is_padded: bool = False

    @classmethod
    def of(cls, product: Product, parts: int, workspace: int = 0) -> Planes:
        """Return the planes behind so many bytes of the workspace, those of a place together."""
        p = product
        if parts == 1:
            return cls(p, p, Slot("out"), parts)
        steps = parts * p.m * p.n, p.m * p.n, p.n
        second = None
        if p.has_two_sums:
            nbytes = p.places * steps[0] * intrinsics.itemsize(p.accumulator)
            second = Slot("work", workspace + tiling.round_up(nbytes, 256))
        return cls(p, _bare(p, p.n), Slot("work", workspace), parts, steps, second)

    @classmethod
    def padded(cls, product: Product, parts: int) -> Planes:
        """Return the planes of which rows are whole 16 bytes, those of a part together."""
        p = product
        if parts == 1:
            return cls(p, p, Slot("out"), parts)
        pitch = tiling.round_up(p.n, 16 // intrinsics.itemsize(p.accumulator))
        steps = p.m * pitch, p.places * p.m * pitch, pitch
        return cls(p, _bare(p, pitch), Slot("work"), parts, steps, is_padded=True)

    def release(self, info: DeviceInfo) -> bool:
        """Return whether the launch that makes planes lets the one behind begin when it does.

        That one waits for all planes; its start is no part of the time then. (On an H200 some
        microsecond.)
        """
        return self.parts > 1 and info.capability >= (9, 0)

    def plan(
        self,
        launches: tuple[Launch, ...],
        info: DeviceInfo,
        tile: Any,
        block_m: int,
        workspace: int = 0,
    ) -> Plan:
        """Return the plan of these launches, and of those that make the result of the planes.

        `tile` and `block_m` are those of a product that is not cut, `workspace` are the bytes that
        `launches` use.
        """
        if self.parts == 1:
            return Plan(launches, tile, workspace, block_m)
        joined, end = self._joined(info)
        shown = f"{tile}, K in {self.parts} parts"
        workspace = max(workspace, end)
        return Plan((*launches, *joined), shown, workspace, tiling.RUN, self.parts)

    def _joined(self, info: DeviceInfo) -> tuple[tuple[Launch, ...], int]:
        """Return the launches that make the result of the planes, and the end of the workspace."""
        p, acc, itemsize = self.product, self.product.accumulator, self.stored.out.itemsize
        early = self.release(info)
        last = self.second or self.slot
        end = last.offset + p.places * self.parts * self.stored.out.strides[0] * itemsize
        graphs = p.epilogue.graphs
        if p.sums or p.has_two_sums or len(graphs) > 1 or graphs[0] is not leaf("z"):
            how = self.slot, self.parts, self.steps, early, self.second
            return (finished(p, info, *how),), end
        lengths = p.places, self.parts, p.m, p.n
        # (older devices round to bfloat16 by integers, value by value)
        wide = info.capability >= (8, 0) and p.places <= joins.MOST_ALONG_Y
        if self.is_padded or (wide and p.out.in_wholes(p.n, 16 // itemsize)):
            made = joins.rows(info, acc, self.slot, p.out, lengths, self.steps, early)
            return (made,), end
        stage = Slot("work", -(-end // 256) * 256)
        launches, staged = joins.joins(info, acc, self.slot, p.out, lengths, stage)
        return launches, stage.offset + staged


def _bare(product: Product, pitch: int) -> Product:
    """Return the product that stores planes with rows of so many values: it has no epilogue."""
    plane = Operand(product.accumulator, (product.m * pitch, pitch, 1), 16)
    made = replace(product, epilogue=sum_of_terms(0), out=plane, sums=False)
    made = replace(made, bias=None, extra=None, pre=None, bias1=None, pre1=None)
    if made.has_two_sums:
        both = Epilogue("sums", ("z", "z1"), (), (("out", leaf("z")), ("pre", leaf("z1"))))
        made = replace(made, epilogue=both, pre=plane, alternate=made.alternate and "y")
    return made
