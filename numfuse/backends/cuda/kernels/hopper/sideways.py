"""How a consumer of `gemm` finishes a block that lies on its side, as templates.

The instruction's rows are columns of the result, and its columns rows of it, of which a block has
any multiple of 8: where a result has few rows, blocks of 64 or 128 of them would be empty in part.
The sums are turned by stmatrix on their way to shared memory, where a group's 64 columns are rows
of 128 bytes, as the copy engine's swizzle has them; the residual or grad comes from there by
ldmatrix, likewise. Biases belong to the instruction's rows, and so a thread has two. Results and
operands of 16 bits come and go by the copy engine alone; the planes of a sum in parts, and
pre-activations in float32, are written by threads.
"""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import global_store_f32
from numfuse.backends.cuda.compile.engines import (
    copy_fence,
    matrix_load_turned,
    matrix_store_turned,
    store_commit,
    store_wait_read0,
    tensor_load,
    tensor_store,
)
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_expect,
    barrier_wait,
    fresh,
    group_barrier,
    quotient,
    select,
    shuffle_xor,
)
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.hopper.epilogue import element
from numfuse.backends.cuda.kernels.hopper.records import Maps, Unit, Work


def finish_sideways(
    acc,
    maps: Maps,
    biases,
    ends: Ends,
    sums,
    staging,
    arrived,
    extra_parity,
    consumer,
    thread,
    here: Unit,
    work: Work,
):
    """The epilogue of a block, PIECE_ROWS rows of the result x 64 columns at a time.

    Of each 8 rows a thread has two neighbours of one column, and of the column 8 behind it.
    """
    leader = thread == 0
    # computed here, and not kept while the block is multiplied
    thread, part, place = fresh(thread), fresh(here.part), fresh(here.place)
    lane, warp = thread & 31, thread >> 5
    # the row that this lane names, of 16: two eights of the two 16-byte pieces of its warp
    own = staging + (((lane >> 4) << 3) + (lane & 7)) * 128
    own += ((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4
    column = here.row0 + 16 * warp + (lane >> 2)
    ends.out.address += (part * work.part_step + place * ends.out.place) * OUT_SIZE
    ends.pre.address += place * ends.pre.place * PRE_SIZE
    summed = cuda.local.array(2, types.float32)
    summed[0], summed[1] = ZERO, ZERO
    for c in unrolled(CHUNKS):
        top = fresh(here.column0 + c * PIECE_ROWS)
        if EXTRA == "map":
            # (its buffer was free when it was asked for, and so was that of the pre-activations)
            barrier_wait(arrived, (extra_parity ^ c) & 1)
        elif OUT == "map":
            if leader:
                store_wait_read0()
            group_barrier(1 + consumer, 128)
        for g in unrolled((PIECE_ROWS + 15) // 16):
            LONE = PIECE_ROWS - 16 * g == 8
            at = own + 16 * g * 128
            if LONE:  # all lanes name its 8 rows
                at -= (lane >> 4) * 1024
            row = top + 16 * g + 2 * (lane & 3)
            # an index that is no literal: `eight` is compiled once, the constant inlined
            index = types.int64(c * (PIECE_ROWS // 2) + 8 * g)
            e0, e1, e2, e3 = 0, 0, 0, 0
            if EXTRA == "map":
                e0, e1, e2, e3 = matrix_load_turned(at)
            w0, w1, p0, p1 = eight(
                acc, index, biases, summed, e0, e1, row, column, ends, work.n, work.m
            )
            w2, w3, p2, p3 = w0, w1, p0, p1
            if not LONE:
                w2, w3, p2, p3 = eight(
                    acc, index + 4, biases, summed, e2, e3, row + 8, column, ends, work.n, work.m
                )
            if OUT == "map":
                matrix_store_turned(at, w0, w1, w2, w3)
            if PRE == "map":
                matrix_store_turned(at + BUFFER_BYTES, p0, p1, p2, p3)
        if OUT == "map":
            copy_fence()
            group_barrier(1 + consumer, 128)
            if leader:
                tensor_store(maps.out, here.row0, top, place, staging)
                if PRE == "map":
                    tensor_store(maps.pre, here.row0, top, place, staging + BUFFER_BYTES)
                store_commit()
                if EXTRA == "map" and c + 1 < CHUNKS:
                    store_wait_read0()
                    barrier_expect(arrived, BUFFER_BYTES)
                    tensor_load(staging, maps.extra, here.row0, top + PIECE_ROWS, place, arrived)
    if SUMS:
        blocks = work.column_blocks
        at = sums + (place * blocks + quotient(here.column0, BLOCK_N)) * work.m * 4
        for i in unrolled(2):
            value = summed[i]
            value += shuffle_xor(value, 1)
            value += shuffle_xor(value, 2)
            own_column = column + 8 * i
            inside = ((lane & 3) == 0) & (own_column < work.m)
            global_store_f32(at + own_column * 4, value, inside)


def eight(acc, index, biases, summed, low, high, row, column, ends: Ends, m, n):
    """The epilogue of 8 rows of a warp's 16 columns: words of the results, first and second.

    `low` and `high` are words of the operand: two rows of a thread's first column, and of the other
    one.
    """
    v = cuda.local.array(4, types.float32)
    g = cuda.local.array(4, types.float32)
    kept = cuda.local.array(4, types.float32)
    if EXTRA == "map":
        g[0], g[1], g[2], g[3] = LOW(low), HIGH(low), LOW(high), HIGH(high)
    for i in unrolled(4):
        bias = ZERO
        if BIAS != "":
            bias = biases[i // 2]
        v[i], kept[i], _ = element(acc, index + i, bias, ZERO, g[i])
    if SUMS:
        for i in unrolled(4):
            # rows below the last are products of zeros and a bias: they do not count
            summed[i // 2] += select(v[i], ZERO, row + i % 2 < m)
    if PRE == "single":
        store_four(ends.pre, row, column, m, n, kept)
    if OUT == "float32":
        store_four(ends.out, row, column, m, n, v)
        return 0, 0, 0, 0
    elif PRE == "map":
        first, second = PACK(kept[0], kept[1]), PACK(kept[2], kept[3])
        return PACK(v[0], v[1]), PACK(v[2], v[3]), first, second
    else:
        return PACK(v[0], v[1]), PACK(v[2], v[3]), 0, 0


def store_four(array: Array, row, column, m, n, values):
    """Two rows of a thread's two columns in float32, where they are inside."""
    for i in unrolled(4):
        own_row, own_column = row + i % 2, column + 8 * (i // 2)
        at = array.address + (own_row * array.row + own_column * array.column) * 4
        global_store_f32(at, values[i], (own_row < m) & (own_column < n))
