"""Products of few rows on CUDA cores: what matters is how fast Y comes through memory.

A block has 32 columns of the result, all rows and all of K. Y comes by cp.async in slices through a
long ring in shared memory, so that most of that is on its way at any time. Of each slice every warp
has its share of K, for all rows: an element is the sum of eight parts, one a warp, added up in the
order of the warps, each in chains of `few_tiling.THIN_CHAIN`. That order depends on K and the dtype
alone, but where columns are so few that K is cut into parts, each a sum like this (`planes`).

Up to 16 rows a lane has one column and all of them. Of more it has a quarter or an eighth of them,
and 4 or 8 columns: a value comes from shared memory once for 4 to 8 products.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from numfuse.backends.cuda import block_tiling, few_tiling, tiling
from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.accesses import read_vector, write_vector
from numfuse.backends.cuda.compile.intrinsics import (
    FORMATS,
    fused,
    intrinsic_of,
    read_registers,
    write_registers,
)
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel
from numfuse.backends.cuda.compile.unroll import bound, inlined, kernel_of
from numfuse.backends.cuda.kernels.ampere import simt
from numfuse.backends.cuda.kernels.ampere.blocks import RESERVED_BYTES
from numfuse.backends.cuda.kernels.ampere.registers import add, clear
from numfuse.backends.cuda.kernels.ampere.thin_gemm import i32, thin_product
from numfuse.backends.cuda.kernels.epilogue import finish_of, finishing, in_bytes
from numfuse.backends.cuda.kernels.planes import Planes
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Plan, Product, Slot, Tier, Way

#: Columns of a block.
COLUMNS = 32


def _of_eight(lane):
    """A lane's number along the axis of 8 of a warp's 8 x 4 lanes; `simt` says why so."""
    return i32((lane >> 1) & 7)


def _of_four(lane):
    """Its number along the axis of 4."""
    return i32((lane & 1) | ((lane >> 3) & 2))


#: Strides are in bytes.
ARGUMENTS = Schema(thin_product, i32="m n k part parts")


@dataclass(frozen=True)
class Thin:
    """A kernel, and what `last_call` shows."""

    #: "float32" or "float64": of X, Y and the sums.
    dtype: str
    #: Whether Y's neighbours lie along K.
    along_k: bool
    #: Whether X is copied by 16 bytes along K, or value by value.
    x_wide: bool
    #: A power of two up to 16, a multiple of 4 up to 32, of 8 up to 64.
    rows: int
    stages: int
    #: Blocks of a multiprocessor.
    resident: int

    @property
    def size(self) -> int:
        return intrinsics.itemsize(self.dtype)

    @property
    def depth(self) -> int:
        """Values of K in a slice."""
        return few_tiling.THIN_SLICE // (COLUMNS * self.size)

    @property
    def share(self) -> int:
        """Values of K in a warp's share of a slice."""
        return self.depth // few_tiling.THIN_WARPS

    @property
    def pitch(self) -> int:
        """Bytes from a line of a slice to the next: 16 more where lanes read lines of their own."""
        return self.depth * self.size + 16 if self.along_k else COLUMNS * self.size

    @property
    def y_bytes(self) -> int:
        return self.pitch * (COLUMNS if self.along_k else self.depth)

    @property
    def lanes_m(self) -> int:
        """Lanes along M, and the columns of each."""
        return 1 if self.rows <= few_tiling.THIN_OWN else 4 if self.rows <= 32 else 8

    @property
    def part_m(self) -> int:
        """Rows of a lane."""
        return self.rows // self.lanes_m

    @property
    def x_pitch(self) -> int:
        """Bytes from a row of X to the next: 16 more where lanes read rows of their own."""
        return self.depth * self.size + (16 if self.lanes_m > 1 else 0)

    @property
    def parts(self) -> int:
        """Parts of a warp's share; copies go between them where arithmetic takes the most time."""
        return self.share * self.size // 16 if self.lanes_m > 1 else 1

    @property
    def slice_bytes(self) -> int:
        return self.y_bytes + self.rows * self.x_pitch

    @property
    def key(self) -> str:
        """All that the intrinsics depend on."""
        return f"{self.dtype},{self.along_k},{self.rows},{self.depth}"

    def __str__(self) -> str:
        together = "" if self.resident == 1 else f", {self.resident} on a multiprocessor"
        return f"{self.rows}x{COLUMNS}x{self.depth}, {self.stages} stages{together}"


@functools.cache
def _multiply(thin: Thin) -> Any:
    """``multiply(total, part, x, y)``: a lane's sums go on by a part of a warp's share of a slice,
    whose rows of X and columns of Y begin at these addresses.
    """
    kind, size = FORMATS[thin.dtype]
    few, columns = 16 // size, thin.lanes_m
    lanes_n = 32 // columns

    def factors(builder: Any, x: Any, y: Any, u: int) -> tuple[list[list[Any]], list[list[Any]]]:
        """Return the factors of `few` values of K: those of each row, and those of each column."""

        def taken(at: Any, offset: int, count: int) -> list[Any]:
            return read_vector(builder, at, offset, kind, count)

        rows = [taken(x, r * columns * thin.x_pitch + 16 * u, few) for r in range(thin.part_m)]
        if thin.along_k:
            return rows, [taken(y, j * lanes_n * thin.pitch + 16 * u, few) for j in range(columns)]
        count = min(few, columns)
        lines = [
            [
                value
                for j in range(0, columns, count)
                for value in taken(y, (few * u + v) * thin.pitch + j * lanes_n * size, count)
            ]
            for v in range(few)
        ]
        return rows, [[line[j] for line in lines] for j in range(columns)]

    def emit(builder: Any, total: Any, part: int, x: Any, y: Any) -> None:
        sums = read_registers(builder, total, 0, thin.part_m * columns)
        steps = thin.share // few // thin.parts
        for u in range(steps * part, steps * (part + 1)):
            rows, ys = factors(builder, x, y, u)
            for v in range(few):
                for r, row in enumerate(rows):
                    # back and forth: the turn shares a factor of Y
                    for j in range(columns) if r % 2 == 0 else reversed(range(columns)):
                        i = r * columns + j
                        sums[i] = fused(builder, row[v], ys[j][v], sums[i])
        write_registers(builder, total, 0, sums)

    return intrinsic_of("multiply", thin.key, "anrr", emit)


@functools.cache
def _put_part(thin: Thin) -> Any:
    """``put(total, at)``: a lane's sums to rows of 32 values in shared memory."""
    columns, size = thin.lanes_m, thin.size
    lanes_n = 32 // columns
    count = 1 if thin.along_k else min(16 // size, columns)

    def emit(builder: Any, total: Any, to: Any) -> None:
        for r in range(thin.part_m):
            for j in range(0, columns, count):
                offset = (r * columns * 32 + j * lanes_n) * size
                values = read_registers(builder, total, r * columns + j, count)
                write_vector(builder, to, offset, values)

    return intrinsic_of("put_part", thin.key, "ar", emit)


def _kernel(thin: Thin, product: Product, cut: bool, releases: bool) -> Kernel:
    size = thin.size
    threads = 32 * few_tiling.THIN_WARPS
    line_bytes = thin.depth * size if thin.along_k else COLUMNS * size
    pieces = line_bytes // 16
    reach = threads // pieces
    lines = COLUMNS if thin.along_k else thin.depth
    few = 16 // size
    x_values = few if thin.x_wide else 1
    x_pieces = thin.depth // x_values
    x_step = max(1, threads // x_pieces)
    sums = thin.part_m * thin.lanes_m
    bindings = bound(thin, "rows depth share parts along_k size pitch stages lanes_m x_pitch")
    bindings |= {
        "FEW": few,
        "WARPS": few_tiling.THIN_WARPS,
        "LINE_BYTES": line_bytes,
        "PIECES": pieces,
        "PIECE_BITS": pieces.bit_length() - 1,
        "REACH": reach,
        "COPIES": lines // reach,
        "SLICE": thin.slice_bytes,
        "Y_SLICE": thin.y_bytes,
        # what a slice takes of what is left of a line, and of the lines
        "Y_BYTES_STEP": line_bytes if thin.along_k else 0,
        "Y_LINES_STEP": 0 if thin.along_k else thin.depth,
        "PART": sums,
        "LANE_ROW": inlined(_of_eight if thin.lanes_m == 8 else _of_four),
        "LANE_COLUMN": inlined(_of_four if thin.lanes_m == 8 else _of_eight),
        "X_PIECES": x_pieces,
        "X_BITS": x_pieces.bit_length() - 1,
        "X_VALUES": x_values,
        "X_STEP": x_step,
        "X_COPIES": -(-thin.rows // x_step),
        "FETCH_X": accesses.fetch(x_values * size, partial=True, ahead=""),
        "FETCH_WHOLE_X": accesses.fetch_where(x_values * size, ahead=""),
        "FETCH_16": accesses.fetch(16, ahead=""),
        "WAIT": accesses.fetch_wait(thin.stages - 2),
        "WAIT_ALL": accesses.fetch_wait(0),
        "CLEAR": clear(sums),
        "MULTIPLY": _multiply(thin),
        "CHAIN": few_tiling.THIN_CHAIN // thin.share,
        "ADD": add(sums),
        "RUN": tiling.RUN,
        "CUT": cut,
        "RELEASES": releases,
        "PUT_PART": _put_part(thin),
        **finish_of(product, product.out.dtype),
    }
    name = f"few rows {product.epilogue.name}"
    return kernel_of(
        thin_product, ARGUMENTS, bindings, threads=threads, blocks=thin.resident, name=name
    )


def plan(product: Product, device: DeviceInfo, parts: int = 1) -> Plan | None:
    """How to run it, whatever its sizes; None where Y has no 16 bytes to copy, or few fit.

    K is cut into so many `parts` at the most.
    """
    p = product
    few = 16 // intrinsics.itemsize(p.y.dtype)
    along_k = p.y.runs_wide(1, few)
    if p.places * parts > 65535 or not p.y.comes_by(few):
        return None
    rows = 1 << (p.m - 1).bit_length() if p.m <= 16 else tiling.round_up(p.m, 4 if p.m <= 32 else 8)
    made = Thin(p.y.dtype, along_k, p.x.runs_wide(2, few), rows, 0, 1)
    blocks = -(-p.n // COLUMNS) * p.places * parts
    most = few_tiling.thin_resident(blocks, rows, device.multiprocessors)
    for resident in range(most, 0, -1):
        room = device.shared_per_multiprocessor // resident - RESERVED_BYTES
        stages = min(few_tiling.THIN_STAGES, min(room, device.shared_per_block) // made.slice_bytes)
        if stages >= few_tiling.THIN_FEWEST:
            break
    else:
        return None
    made = replace(made, stages=stages, resident=resident)
    # whole slices, which are whole accesses of 16 bytes
    part = tiling.round_up(-(-p.k // parts), made.depth)
    parts = -(-p.k // part)
    planes = Planes.of(product, parts)
    p = planes.stored
    arguments = ARGUMENTS(
        x=in_bytes(Slot("x"), p.x),
        y=in_bytes(Slot("y"), p.y),
        m=p.m,
        n=p.n,
        k=p.k,
        part=part,
        parts=parts,
        **finishing(p, p.out, planes.slot, in_bytes),
    )
    grid = (-(-p.n // COLUMNS), p.places * parts, 1)
    kernel = _kernel(made, p, parts > 1, planes.release(device))
    launch = Launch(kernel, grid, arguments, stages * made.slice_bytes)
    found = planes.plan((launch,), device, made, p.m)
    return replace(found, part=part if parts > 1 else 0)


def _takes(product: Product, device: DeviceInfo) -> bool:
    """Return whether it is a product of few rows, with columns and K that pay."""
    p = product
    if device.capability < (8, 0) or p.free or max(p.n, p.k) >= 1 << 26:
        return False
    if p.m > few_tiling.THIN_ROWS.get(p.y.dtype, 0) or p.accumulator != p.y.dtype:
        return False
    return p.x.dtype == p.y.dtype and min(p.n, p.k) >= few_tiling.THIN_LEAST


def ways(product: Product, device: DeviceInfo) -> Iterator[Way]:
    """Return the ways to run it: in one part, and in those that fill the device once and twice."""
    p, busy = product, device.multiprocessors
    if not _takes(p, device):
        return
    blocks, size = -(-p.n // COLUMNS) * p.places, intrinsics.itemsize(p.y.dtype)
    most = 1 if p.whole else p.k // few_tiling.THIN_PART
    for parts in sorted({1, *(max(1, min(most, x * busy // blocks)) for x in (1, 2))}):
        cost = few_tiling.thin_cost(blocks, p.m, p.k, size, parts, busy)
        name = f"{p.m} rows, K in {parts} parts"
        yield Way(name, cost, functools.partial(plan, p, device, parts))


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it; None for more rows, few columns, and before compute capability 8.0.

    And of float32 where tiles take less time.
    """
    p = product
    if not _takes(p, device):
        return None
    blocks, size = -(-p.n // COLUMNS) * p.places, intrinsics.itemsize(p.y.dtype)
    busy = device.multiprocessors
    parts = 1 if p.whole else few_tiling.thin_parts(blocks, p.m, p.k, size, busy)
    narrow = p.m > few_tiling.THIN_FEW and not p.x.runs_wide(2, 4)
    if p.y.dtype == "float32" and (narrow or p.m > few_tiling.THIN_SURE):
        # (here a turned Y costs nothing, and tiles turn it in registers, or by a copy)
        beside = simt.beside_of(p, block_tiling.CORE_BLOCKS, busy)
        where = p.places, parts, busy, p.whole, beside, narrow
        if not few_tiling.thin_pays(blocks, p.m, p.n, p.k, *where):
            return None
    return plan(p, device, parts)


FEW_ROWS = Tier("cores", take, ways)
