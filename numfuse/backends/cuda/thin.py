"""Products of few rows on CUDA cores: what matters is how fast Y comes through memory.

A block has 32 columns of the result, all rows and all of K. Y comes by cp.async in slices through a
long ring in shared memory, so that most of that is on its way at any time. Of each slice every warp
has its share of K, for all rows: an element is the sum of eight chains, one a warp, added up in the
order of the warps. That order depends on K and the dtype alone.

Up to 16 rows a lane has one column and all of them. Of more it has 8, and 4 or 8 columns: each of
its values comes from shared memory once for 4 or 8 products.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numfuse import tiling
from numfuse.backends.cuda import intrinsics, scalars
from numfuse.backends.cuda.epilogue import Epilogue
from numfuse.backends.cuda.intrinsics import (
    block_barrier,
    fetch16,
    fetch_commit,
    least,
    most,
    shared_address,
)
from numfuse.backends.cuda.product import DeviceInfo, Launch, Plan, Product, Slot
from numfuse.backends.cuda.slices import runs_wide
from numfuse.backends.cuda.toolchain import Kernel, cuda, kernel, types
from numfuse.backends.cuda.unroll import expanded, inlined, names_of, unrolled

i32, i64 = np.int32, np.int64
#: Columns of a block, one a lane.
COLUMNS = 32


def _of_eight(lane):
    """A lane's number along the axis of 8 of a warp's 8 x 4 lanes; `simt` says why so."""
    return i32((lane >> 1) & 7)


def _of_four(lane):
    """Its number along the axis of 4."""
    return i32((lane & 1) | ((lane >> 3) & 2))


def _copy_y(to, at, step, bytes_left, lines_left):
    """This thread's copies of a slice of Y; zeros for what is not there."""
    for c in unrolled(COPIES):
        inside = i32(least(most(bytes_left, 0), 16)) if c * REACH < lines_left else i32(0)
        fetch16(i32(to + c * (REACH * PITCH)), at, inside)
        at = at + step


def _copy_x(to, at, step, left, row0, m):
    """The same of X."""
    for c in unrolled(X_COPIES):
        if row0 + c * X_STEP < ROWS:
            inside = i32(least(most(left, 0), X_VALUES) * SIZE)
            inside = inside if row0 + c * X_STEP < m else i32(0)
            FETCH_X(i32(to + c * (X_STEP * X_PITCH)), at, inside)
        at = at + step


def _product(
    x, y, bias, extra, pre, out, sums, m, n, k,
    x_place, x_row, x_column, y_place, y_row, y_column, bias_place, bias_column,
    extra_place, extra_row, extra_column, pre_place, pre_row, pre_column,
    out_place, out_row, out_column,
):  # fmt: skip
    memory = i32(shared_address(cuda.shared.array(0, dtype=types.int64)))
    t = i32(cuda.threadIdx.x)
    lane, warp = i32(t & 31), i32(t >> 5)
    place = i64(cuda.blockIdx.y)
    column0 = i32(cuda.blockIdx.x * 32)
    slices = i32((k + (DEPTH - 1)) // DEPTH)

    # What this thread copies of a slice: every REACH-th line, the same 16 bytes of it. Lines are
    # values of K where Y's columns are neighbours, else columns.
    line, piece = i32(t >> PIECE_BITS), i32(t & (PIECES - 1))
    to = i32(memory + line * PITCH + piece * 16)
    if ALONG_K:
        y_at = y + place * y_place + i64(column0 + line) * y_column + piece * 16
        lines_left = i32(n - column0 - line)
        bytes_left = i32(k * SIZE - piece * 16)
        y_line, y_slice = y_column * REACH, i64(DEPTH * SIZE)
    else:
        y_at = y + place * y_place + i64(line) * y_row + i64(column0) * SIZE + piece * 16
        lines_left = i32(k - line)
        bytes_left = i32(least(i32((n - column0) * SIZE), LINE_BYTES) - piece * 16)
        y_line, y_slice = y_row * REACH, y_row * DEPTH
    # ... and of X's: the same K of every X_STEP-th row
    x_k, x_row0 = i32((t & (X_PIECES - 1)) * X_VALUES), i32(t >> X_BITS)
    x_to = i32(memory + Y_SLICE + x_row0 * X_PITCH + x_k * SIZE)
    x_at = x + place * x_place + i64(x_row0) * x_row + x_k * x_column
    x_left = i32(k - x_k)
    x_line, x_slice = x_row * X_STEP, x_column * DEPTH
    write = i32(0)
    while write < (STAGES - 1) * SLICE:
        COPY_Y(i32(to + write), y_at, y_line, bytes_left, lines_left)
        COPY_X(i32(x_to + write), x_at, x_line, x_left, x_row0, m)
        fetch_commit()
        y_at, x_at, x_left = y_at + y_slice, x_at + x_slice, i32(x_left - DEPTH)
        if ALONG_K:
            bytes_left = i32(bytes_left - DEPTH * SIZE)
        else:
            lines_left = i32(lines_left - DEPTH)
        write = i32(write + SLICE)

    total = cuda.local.array(PART_M * PART_N, dtype=ACCUMULATOR)
    ys = cuda.local.array(FEW * PART_N, dtype=ACCUMULATOR)
    for r in unrolled(PART_M * PART_N):
        total[r] = ACCUMULATOR(0)
    # a lane's first row and column; its share of K begins at that of the warp
    own_row, own_column = i32(0), lane
    if LANES_M > 1:
        own_row, own_column = LANE_ROW(lane), i32(LANE_COLUMN(lane) * (1 if ALONG_K else FEW))
    y_from = i32(memory + (own_column * PITCH + warp * (SHARE * SIZE)))
    if not ALONG_K:
        y_from = i32(memory + (own_column * SIZE + warp * (SHARE * PITCH)))
    x_from = i32(memory + (Y_SLICE + own_row * X_PITCH + warp * (SHARE * SIZE)))
    read = i32(0)
    while slices > 0:
        WAIT()
        block_barrier()  # the slice is there, and the one before has been read by all
        COPY_Y(i32(to + write), y_at, y_line, bytes_left, lines_left)
        COPY_X(i32(x_to + write), x_at, x_line, x_left, x_row0, m)
        fetch_commit()
        y_at, x_at, x_left = y_at + y_slice, x_at + x_slice, i32(x_left - DEPTH)
        if ALONG_K:
            bytes_left = i32(bytes_left - DEPTH * SIZE)
        else:
            lines_left = i32(lines_left - DEPTH)
        write = i32(write + SLICE) if write < (STAGES - 1) * SLICE else i32(0)
        x_now, y_now = i32(x_from + read), i32(y_from + read)
        q = i32(0)
        while q < SHARE:
            for u in unrolled(STEP // FEW):
                if ALONG_K:
                    for j in unrolled(PART_N):
                        some = TAKE(i32(y_now + (j * (LANES_N * PITCH) + u * 16)))
                        for v in unrolled(FEW):
                            ys[v * PART_N + j] = some[v]
                if not ALONG_K:
                    for v in unrolled(FEW):
                        if PART_N == 1:
                            ys[v] = TAKE_ONE(i32(y_now + (u * FEW + v) * PITCH))
                        for j in unrolled(PART_N // FEW):
                            some = TAKE(i32(y_now + ((u * FEW + v) * PITCH + j * (LANES_N * 16))))
                            for w in unrolled(FEW):
                                ys[v * PART_N + j * FEW + w] = some[w]
                for r in unrolled(PART_M):
                    factors = TAKE(i32(x_now + (r * (LANES_M * X_PITCH) + u * 16)))
                    for v in unrolled(FEW):
                        for j in unrolled(PART_N):
                            total[r * PART_N + j] = FUSED(
                                factors[v], ys[v * PART_N + j], total[r * PART_N + j]
                            )
            y_now = i32(y_now + STEP * (SIZE if ALONG_K else PITCH))
            x_now = i32(x_now + STEP * SIZE)
            q = i32(q + STEP)
        read = i32(read + SLICE) if read < (STAGES - 1) * SLICE else i32(0)
        slices = i32(slices - 1)
    WAIT_ALL()
    block_barrier()
    put_at = i32(memory + ((warp * ROWS + own_row) * 32 + own_column) * SIZE)
    for r in unrolled(PART_M):
        for j in unrolled(PART_N):
            if ALONG_K:
                away = i32((r * (LANES_M * 32) + j * LANES_N) * SIZE)
            else:
                away = i32((r * (LANES_M * 32) + j // FEW * (FEW * LANES_N) + j % FEW) * SIZE)
            PUT_ONE(i32(put_at + away), total[r * PART_N + j])
    block_barrier()

    column = i64(column0 + lane)
    inside_n = column0 + lane < n
    offset = ACCUMULATOR(0)
    if BIAS:
        if inside_n:
            offset = LOAD_BIAS(bias + place * bias_place + column * bias_column)
    # each warp finishes every WARPS-th row
    row_here = i32(warp)
    while row_here < ROWS:
        row = i64(row_here)
        result = ACCUMULATOR(0)
        if row_here < m and inside_n:
            at = i32(memory + (row_here * 32 + lane) * SIZE)
            value = TAKE_ONE(at)
            for w in unrolled(1, WARPS):
                value = value + TAKE_ONE(i32(at + w * (ROWS * 32 * SIZE)))
            value = value + offset
            if PRE:
                STORE_PRE(pre + place * pre_place + row * pre_row + column * pre_column, value)
            if EXTRA:
                added = LOAD_EXTRA(
                    extra + place * extra_place + row * extra_row + column * extra_column
                )
            if HAS_FUNCTION:
                result = FUNCTION(value)
            else:
                result = value
            if RESIDUAL:
                result = result + added
            if SLOPE:
                if HAS_FUNCTION:
                    result = result * added
                else:
                    result = added
            STORE_OUT(out + place * out_place + row * out_row + column * out_column, result)
        if SUMS:
            # behind the chains' sums, which other warps may still read
            PUT_ONE(i32(memory + ((WARPS * ROWS + row_here) * 32 + lane) * SIZE), result)
        row_here = i32(row_here + WARPS)
    if SUMS:
        block_barrier()
        if t < 32 and inside_n:
            result_sum = ACCUMULATOR(0)
            at = i32(0)
            while at < m:
                result_sum = result_sum + TAKE_ONE(
                    i32(memory + ((WARPS * ROWS + at) * 32 + lane) * SIZE)
                )
                at = i32(at + 1)
            STORE_SUM(sums + (place * n + column) * SIZE, result_sum)


#: Addresses, sizes, strides in bytes.
SIGNATURE = " ".join(["i64"] * 7 + ["i32"] * 3 + ["i64"] * 17)


@dataclass(frozen=True)
class Thin:
    """A kernel, and what `last_call` shows."""

    #: "float32" or "float64": of X, Y and the sums.
    dtype: str
    #: Whether Y's neighbours lie along K.
    along_k: bool
    #: Whether X is copied by 16 bytes along K, or value by value.
    x_wide: bool
    #: A power of two.
    rows: int
    stages: int

    @property
    def size(self) -> int:
        return intrinsics.itemsize(self.dtype)

    @property
    def depth(self) -> int:
        """Values of K in a slice."""
        return tiling.CUDA_THIN_SLICE // (COLUMNS * self.size)

    @property
    def pitch(self) -> int:
        """Bytes from a line of a slice to the next: 16 more where lanes read lines of their own."""
        return self.depth * self.size + 16 if self.along_k else COLUMNS * self.size

    @property
    def y_bytes(self) -> int:
        return self.pitch * (COLUMNS if self.along_k else self.depth)

    @property
    def part_m(self) -> int:
        """Rows of a lane; it has `lanes_m` columns."""
        return self.rows if self.rows <= 16 else 8

    @property
    def lanes_m(self) -> int:
        """Lanes along M."""
        return self.rows // self.part_m

    @property
    def x_pitch(self) -> int:
        """Bytes from a row of X to the next: 16 more where lanes read rows of their own."""
        return self.depth * self.size + (16 if self.lanes_m > 1 else 0)

    @property
    def slice_bytes(self) -> int:
        return self.y_bytes + self.rows * self.x_pitch

    def __str__(self) -> str:
        return f"{self.rows}x{COLUMNS}x{self.depth}, {self.stages} stages"


@functools.lru_cache(maxsize=256)
def _kernel(thin: Thin, epilogue: Epilogue) -> Kernel:
    one, acc, size = intrinsics, thin.dtype, thin.size
    threads = 32 * tiling.CUDA_THIN_WARPS
    line_bytes = thin.depth * size if thin.along_k else COLUMNS * size
    pieces = line_bytes // 16
    reach = threads // pieces
    lines = COLUMNS if thin.along_k else thin.depth
    few = 16 // size
    share = thin.depth // tiling.CUDA_THIN_WARPS
    x_values = few if thin.x_wide else 1
    x_pieces = thin.depth // x_values
    x_step = max(1, threads // x_pieces)
    bindings: dict[str, Any] = {
        "ROWS": thin.rows, "DEPTH": thin.depth, "SHARE": share, "FEW": few,
        "STEP": few if thin.rows > 8 else share, "WARPS": tiling.CUDA_THIN_WARPS,
        "ALONG_K": thin.along_k, "SIZE": size, "PITCH": thin.pitch, "LINE_BYTES": line_bytes,
        "PIECES": pieces, "PIECE_BITS": pieces.bit_length() - 1, "REACH": reach,
        "COPIES": lines // reach, "STAGES": thin.stages, "SLICE": thin.slice_bytes,
        "Y_SLICE": thin.y_bytes, "PART_M": thin.part_m, "PART_N": thin.lanes_m,
        "LANES_M": thin.lanes_m, "LANES_N": 32 // thin.lanes_m, "X_PITCH": thin.x_pitch,
        "LANE_ROW": inlined(_of_eight if thin.lanes_m == 8 else _of_four),
        "LANE_COLUMN": inlined(_of_four if thin.lanes_m == 8 else _of_eight),
        "X_PIECES": x_pieces, "X_BITS": x_pieces.bit_length() - 1,
        "X_VALUES": x_values, "X_STEP": x_step, "X_COPIES": -(-thin.rows // x_step),
        "FETCH_X": one.fetch(x_values * size, partial=True, ahead=""),
        "WAIT": one.fetch_wait(thin.stages - 2), "WAIT_ALL": one.fetch_wait0,
        "TAKE": one.load(acc, few, acc, one.SHARED), "FUSED": scalars.fused,
        **epilogue.bindings(),
    }  # fmt: skip
    bindings["COPY_Y"] = inlined(_copy_y, **bindings)
    bindings["COPY_X"] = inlined(_copy_x, **bindings)
    template = expanded(_product, bindings)
    return kernel(
        template, SIGNATURE, threads=threads, blocks=1, name=f"few rows {epilogue.kind}",
        **names_of(template, bindings),
    )  # fmt: skip


def plan(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it, whatever its sizes; None where Y has no 16 bytes to copy, or few fit."""
    p = product
    few = 16 // intrinsics.itemsize(p.y.dtype)
    along_k = runs_wide(p.y, 1, few)
    if p.places > 65535 or not (along_k or runs_wide(p.y, 2, few)):
        return None
    rows = 1 << (p.m - 1).bit_length()
    made = Thin(p.y.dtype, along_k, runs_wide(p.x, 2, few), rows, 0)
    stages = min(tiling.CUDA_THIN_STAGES, device.shared_per_block // made.slice_bytes)
    if stages < 3:
        return None
    made = replace(made, stages=stages)
    none = (0, 0, 0)
    bias = p.bias.steps if p.bias else none
    arguments = (
        Slot("x"), Slot("y"), Slot("bias") if p.bias else 0, Slot("extra") if p.extra else 0,
        Slot("pre") if p.pre else 0, Slot("out"), Slot("sums") if p.sums else 0,
        p.m, p.n, p.k, *p.x.steps, *p.y.steps, bias[0], bias[2],
        *(p.extra.steps if p.extra else none), *(p.pre.steps if p.pre else none), *p.out.steps,
    )  # fmt: skip
    built = _kernel(made, Epilogue.of(p, p.out.dtype))
    grid = (-(-p.n // COLUMNS), p.places, 1)
    launch = Launch(built, grid, arguments, stages * made.slice_bytes)
    return Plan((launch,), made, block_m=p.m)


class FewRows:
    """Takes products whose time is that of reading Y once; see the module."""

    name = "cores"

    def take(self, product: Product, device: DeviceInfo) -> Plan | None:
        """How to run it; None for more rows, few columns, and before compute capability 8.0."""
        p = product
        if device.capability < (8, 0) or p.free or max(p.n, p.k) >= 1 << 26:
            return None
        if p.m > tiling.CUDA_THIN_ROWS.get(p.y.dtype, 0) or p.accumulator != p.y.dtype:
            return None
        if p.x.dtype != p.y.dtype or min(p.n, p.k) < tiling.CUDA_THIN_LEAST:
            return None
        return plan(p, device)


FEW_ROWS = FewRows()
