"""Products of few rows on CUDA cores: what matters is how fast Y comes through memory.

A block has 32 columns of the result, one a lane, all rows and all of K. Y comes by cp.async in
slices through a long ring in shared memory, so that most of that is on its way at any time. Of each
slice every warp has its share of K, for all rows: an element is the sum of eight chains, one a
warp, added up in the order of the warps. That order depends on K and the dtype alone.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse import tiling
from numfuse.backends.cuda import elementwise, intrinsics, scalars
from numfuse.backends.cuda.intrinsics import (
    block_barrier,
    fetch16,
    fetch_commit,
    least,
    most,
    shared_address,
)
from numfuse.backends.cuda.product import DeviceInfo, Launch, Operand, Plan, Product, Slot
from numfuse.backends.cuda.slices import runs_wide
from numfuse.backends.cuda.toolchain import Kernel, cuda, kernel, types
from numfuse.backends.cuda.unroll import expanded, names_of, unrolled

i32, i64 = np.int32, np.int64
#: Columns of a block, one a lane.
COLUMNS = 32


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
    write = i32(0)
    while write < (STAGES - 1) * SLICE:
        y_run = y_at
        for c in unrolled(COPIES):
            inside = i32(least(most(bytes_left, 0), 16)) if c * REACH < lines_left else i32(0)
            fetch16(i32(to + write + c * (REACH * PITCH)), y_run, inside)
            y_run = y_run + y_line
        fetch_commit()
        y_at = y_at + y_slice
        if ALONG_K:
            bytes_left = i32(bytes_left - DEPTH * SIZE)
        else:
            lines_left = i32(lines_left - DEPTH)
        write = i32(write + SLICE)

    # X: a slice ahead in registers (neighbours along K a thread), then turned in shared memory
    x_slices = i32(memory + STAGES * SLICE)
    ahead = cuda.local.array(AHEAD, dtype=ACCUMULATOR)
    x_k, x_row0 = i32(t & (DEPTH - 1)), i32(t // DEPTH)
    put = i32((x_k * ROWS + x_row0) * ACC_BYTES)
    x_at = x + place * x_place + i64(x_row0) * x_row + x_k * x_column
    x_left = i32(k - x_k)
    turn = i32(0)
    while turn < 2:
        if turn == 1:
            for i in unrolled(AHEAD):
                if x_row0 + i * ROW_STEP < ROWS:
                    PUT_X(i32(x_slices + put + i * ROW_STEP * ACC_BYTES), ahead[i])
        for i in unrolled(AHEAD):
            ahead[i] = ACCUMULATOR(0)
            if x_row0 + i * ROW_STEP < m and x_left > 0:
                ahead[i] = LOAD_X(x_at + i * ROW_STEP * x_row)
        x_at, x_left = x_at + DEPTH * x_column, i32(x_left - DEPTH)
        turn = i32(turn + 1)

    total = cuda.local.array(ROWS, dtype=ACCUMULATOR)
    for r in unrolled(ROWS):
        total[r] = ACCUMULATOR(0)
    # this warp's share of K begins here
    y_from = i32(memory + (lane * PITCH + warp * (SHARE * SIZE)))
    if not ALONG_K:
        y_from = i32(memory + (lane * SIZE + warp * (SHARE * PITCH)))
    x_from = i32(x_slices + warp * (SHARE * ROWS * ACC_BYTES))
    read, x_turn = i32(0), i32(0)
    while slices > 0:
        WAIT()
        block_barrier()  # the slice is there, and the one before has been read by all
        y_run = y_at
        for c in unrolled(COPIES):
            inside = i32(least(most(bytes_left, 0), 16)) if c * REACH < lines_left else i32(0)
            fetch16(i32(to + write + c * (REACH * PITCH)), y_run, inside)
            y_run = y_run + y_line
        fetch_commit()
        y_at = y_at + y_slice
        if ALONG_K:
            bytes_left = i32(bytes_left - DEPTH * SIZE)
        else:
            lines_left = i32(lines_left - DEPTH)
        write = i32(write + SLICE) if write < (STAGES - 1) * SLICE else i32(0)
        x_next = i32(x_slices + put + (X_SLICE - x_turn))
        for i in unrolled(AHEAD):
            if x_row0 + i * ROW_STEP < ROWS:
                PUT_X(i32(x_next + i * ROW_STEP * ACC_BYTES), ahead[i])
        for i in unrolled(AHEAD):
            ahead[i] = ACCUMULATOR(0)
            if x_row0 + i * ROW_STEP < m and x_left > 0:
                ahead[i] = LOAD_X(x_at + i * ROW_STEP * x_row)
        x_at, x_left = x_at + DEPTH * x_column, i32(x_left - DEPTH)
        x_now, y_now = i32(x_from + x_turn), i32(y_from + read)
        q = i32(0)
        while q < SHARE:
            if ALONG_K:
                for u in unrolled(STEP // FEW):
                    some = TAKE_Y(i32(y_now + u * (FEW * SIZE)))
                    for v in unrolled(FEW):
                        for g in unrolled(ROWS // GROUP):
                            factors = TAKE_X(
                                i32(x_now + ((u * FEW + v) * ROWS + g * GROUP) * ACC_BYTES)
                            )
                            if GROUP == 1:
                                total[0] = FUSED(factors, some[v], total[0])
                            else:
                                for r in unrolled(GROUP):
                                    total[g * GROUP + r] = FUSED(
                                        factors[r], some[v], total[g * GROUP + r]
                                    )
                y_now = i32(y_now + STEP * SIZE)
            else:
                for u in unrolled(STEP):
                    one = TAKE_Y(i32(y_now + u * PITCH))
                    for g in unrolled(ROWS // GROUP):
                        factors = TAKE_X(i32(x_now + (u * ROWS + g * GROUP) * ACC_BYTES))
                        if GROUP == 1:
                            total[0] = FUSED(factors, one, total[0])
                        else:
                            for r in unrolled(GROUP):
                                total[g * GROUP + r] = FUSED(factors[r], one, total[g * GROUP + r])
                y_now = i32(y_now + STEP * PITCH)
            x_now = i32(x_now + STEP * ROWS * ACC_BYTES)
            q = i32(q + STEP)
        x_turn = i32(X_SLICE - x_turn)
        read = i32(read + SLICE) if read < (STAGES - 1) * SLICE else i32(0)
        slices = i32(slices - 1)
    WAIT_ALL()
    block_barrier()
    for r in unrolled(ROWS):
        PUT_X(i32(memory + ((warp * ROWS + r) * 32 + lane) * ACC_BYTES), total[r])
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
            at = i32(memory + (row_here * 32 + lane) * ACC_BYTES)
            value = TAKE_ONE(at)
            for w in unrolled(1, WARPS):
                value = value + TAKE_ONE(i32(at + w * (ROWS * 32 * ACC_BYTES)))
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
            PUT_X(i32(memory + ((WARPS * ROWS + row_here) * 32 + lane) * ACC_BYTES), result)
        row_here = i32(row_here + WARPS)
    if SUMS:
        block_barrier()
        if t < 32 and inside_n:
            result_sum = ACCUMULATOR(0)
            at = i32(0)
            while at < m:
                result_sum = result_sum + TAKE_ONE(
                    i32(memory + ((WARPS * ROWS + at) * 32 + lane) * ACC_BYTES)
                )
                at = i32(at + 1)
            STORE_SUM(sums + (place * n + column) * ACC_BYTES, result_sum)


#: Addresses, sizes, strides in bytes.
SIGNATURE = " ".join(["i64"] * 7 + ["i32"] * 3 + ["i64"] * 17)


@dataclass(frozen=True)
class Thin:
    """A kernel, and what `last_call` shows."""

    dtype: str
    accumulator: str
    #: Whether Y's neighbours lie along K.
    along_k: bool
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
    def slice_bytes(self) -> int:
        return self.pitch * (COLUMNS if self.along_k else self.depth)

    @property
    def x_bytes(self) -> int:
        return (
            tiling.CUDA_THIN_WARPS * self.rows * self.depth * intrinsics.itemsize(self.accumulator)
        )

    @property
    def shared_bytes(self) -> int:
        # (of the ring, the end keeps the warps' sums)
        return self.stages * self.slice_bytes + self.x_bytes

    def __str__(self) -> str:
        return f"{self.rows}x{COLUMNS}x{self.depth}, {self.stages} stages"


@functools.lru_cache(maxsize=256)
def _kernel(
    thin: Thin, x: str, out: str, bias: str | None, extra: str | None, pre: bool, epilogue: str,
    sums: bool, function: Any,
) -> Kernel:  # fmt: skip
    one, acc = intrinsics, thin.accumulator
    threads = 32 * tiling.CUDA_THIN_WARPS
    line_bytes = thin.depth * thin.size if thin.along_k else COLUMNS * thin.size
    pieces = line_bytes // 16
    reach = threads // pieces
    lines = COLUMNS if thin.along_k else thin.depth
    few = 16 // thin.size if thin.along_k else 1
    group = min(thin.rows, 16 // one.itemsize(acc))
    share = thin.depth // tiling.CUDA_THIN_WARPS
    row_step = max(1, threads // thin.depth)
    bindings: dict[str, Any] = {
        "ROWS": thin.rows, "GROUP": group, "DEPTH": thin.depth, "SHARE": share,
        "STEP": min(share, 8 if thin.rows > 4 else 16), "WARPS": tiling.CUDA_THIN_WARPS,
        "AHEAD": -(-thin.rows * thin.depth // threads), "ROW_STEP": row_step,
        "X_SLICE": thin.x_bytes // 2, "TAKE_X": one.load(acc, group, acc, one.SHARED),
        "ALONG_K": thin.along_k, "SIZE": thin.size, "PITCH": thin.pitch, "LINE_BYTES": line_bytes,
        "PIECES": pieces, "PIECE_BITS": pieces.bit_length() - 1, "REACH": reach,
        "COPIES": lines // reach, "STAGES": thin.stages, "SLICE": thin.slice_bytes, "FEW": few,
        "ACCUMULATOR": one.ACCUMULATORS[acc][1], "ACC_BYTES": one.itemsize(acc),
        "WAIT": one.fetch_wait(thin.stages - 2), "WAIT_ALL": one.fetch_wait0,
        "LOAD_X": one.load(x, 1, acc), "PUT_X": one.store(acc, 1, acc, one.SHARED),
        "TAKE_Y": one.load(thin.dtype, few, acc, one.SHARED),
        "TAKE_ONE": one.load(acc, 1, acc, one.SHARED), "FUSED": scalars.fused,
        "BIAS": bias is not None, "EXTRA": extra is not None, "PRE": pre, "SUMS": sums,
        "RESIDUAL": epilogue == "residual", "SLOPE": epilogue == "slope",
        "HAS_FUNCTION": function is not None, "STORE_OUT": one.store(out, 1, acc),
        "STORE_PRE": one.store(acc, 1, acc), "STORE_SUM": one.store(acc, 1, acc),
    }  # fmt: skip
    if function is not None:
        bindings["FUNCTION"] = function
    if bias is not None:
        bindings["LOAD_BIAS"] = one.load(bias, 1, acc)
    if extra is not None:
        bindings["LOAD_EXTRA"] = one.load(extra, 1, acc)
    template = expanded(_product, bindings)
    return kernel(
        template, SIGNATURE, threads=threads, blocks=1, name=f"few rows {epilogue}",
        **names_of(template, bindings),
    )  # fmt: skip


def plan(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it, whatever its sizes; None where Y has no 16 bytes to copy, or few fit."""
    p = product
    size = intrinsics.itemsize(p.y.dtype)
    along_k = runs_wide(p.y, 1, 16 // size)
    if (
        p.m > tiling.CUDA_THIN_ROWS
        or p.places > 65535
        or not (along_k or runs_wide(p.y, 2, 16 // size))
    ):
        return None
    rows = 1 << (p.m - 1).bit_length()
    made = Thin(p.y.dtype, p.accumulator, along_k, rows, 2)
    room = device.shared_per_block - made.x_bytes
    stages = min(tiling.CUDA_THIN_STAGES, room // made.slice_bytes)
    if stages < 3:
        return None
    made = Thin(p.y.dtype, p.accumulator, along_k, rows, stages)
    function = None
    if p.function is not None:
        function = elementwise.scalar(p.function, p.accumulator, p.out.dtype, guard=p.guard)

    def steps(operand: Operand | None) -> tuple[int, int, int]:
        if operand is None:
            return 0, 0, 0
        place, row, column = (step * operand.itemsize for step in operand.strides)
        return place, row, column

    bias = steps(p.bias)
    arguments = (
        Slot("x"), Slot("y"), Slot("bias") if p.bias else 0, Slot("extra") if p.extra else 0,
        Slot("pre") if p.pre else 0, Slot("out"), Slot("sums") if p.sums else 0,
        p.m, p.n, p.k, *steps(p.x), *steps(p.y), bias[0], bias[2], *steps(p.extra),
        *steps(p.pre), *steps(p.out),
    )  # fmt: skip
    built = _kernel(
        made, p.x.dtype, p.out.dtype, p.bias.dtype if p.bias else None,
        p.extra.dtype if p.extra else None, p.pre is not None, p.epilogue, p.sums, function,
    )  # fmt: skip
    grid = (-(-p.n // COLUMNS), p.places, 1)
    launch = Launch(built, grid, arguments, made.shared_bytes)
    return Plan((launch,), made, block_m=p.m)


class FewRows:
    """Takes products whose time is that of reading Y once; see the module."""

    name = "cores"

    def take(self, product: Product, device: DeviceInfo) -> Plan | None:
        """How to run it; None for more rows, few columns, and before compute capability 8.0."""
        p = product
        if device.capability < (8, 0) or p.free or max(p.n, p.k) >= 1 << 26:
            return None
        if p.m > tiling.CUDA_THIN_ROWS or min(p.n, p.k) < tiling.CUDA_THIN_LEAST:
            return None
        if p.accumulator != ("float64" if p.y.dtype == "float64" else "float32"):
            return None
        return plan(p, device)


FEW_ROWS = FewRows()
