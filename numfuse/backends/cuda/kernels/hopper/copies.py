"""Templates of the kernels that run before a product on Hopper.

The copy engine wants rows that begin at multiples of 16 bytes.  `convert` brings an operand of any
strides into such rows; on the way it splits float32 into three bfloat16 parts or rounds it to tf32.
`turn` does the last with the axes exchanged, through shared memory: tf32 has no transpose bit.
"""

from __future__ import annotations

from typing import Any

from numfuse.backends.cuda.compile.accesses import (
    global_load4_f32,
    global_load16,
    global_load_f32,
    global_store4_b32,
    global_store4_f32,
    global_store_f32,
    shared_load_f32,
    shared_store_f32,
)
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.intrinsics import (
    block_barrier,
    block_index,
    block_index_y,
    block_index_z,
    dynamic_shared,
    round_tf32,
    select,
    thread_index,
)
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def convert(
    source: int,
    out: int,
    rows: int,
    columns: int,
    pitch: int,
    plane: int,
    source_place: int,
    source_row: int,
    source_column: int,
) -> None:
    """out[place, row, column] = source[place, row, column]: 8 columns a thread.

    `pitch`: elements of a row of `out`, a multiple of 8; `plane`: of a part of a split operand.
    What lies between `columns` and `pitch` is written with zeros, and never read.
    """
    grid_wait()
    grid_release()
    thread = thread_index() + 0
    column = (block_index() * 64 + (thread & 63)) * 8
    row = block_index_y() * 4 + (thread >> 6)
    place = block_index_z() + 0
    inside = (row < rows) & (column < pitch)
    at = source + (place * source_place + row * source_row + column * source_column) * SOURCE_SIZE
    to = out + ((place * rows + row) * pitch + column) * OUT_SIZE
    if KIND == "copy":
        word = cuda.local.array(4, types.int32)
        for i in unrolled(4):
            low = global_load16(at + 4 * i * source_column, inside & (column + 2 * i < columns))
            high = global_load16(
                at + (4 * i + 2) * source_column, inside & (column + 2 * i + 1 < columns)
            )
            word[i] = low | (high << 16)
        global_store4_b32(to, word[0], word[1], word[2], word[3], inside)
    else:
        v = cuda.local.array(8, types.float32)
        if WIDE:
            for h in unrolled(2):
                v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3] = global_load4_f32(
                    at + 16 * h, inside & (column + 4 * h < columns)
                )
        else:
            for i in unrolled(8):
                v[i] = global_load_f32(at + 4 * i * source_column, inside & (column + i < columns))
        if KIND == "tf32":
            for h in unrolled(2):
                global_store4_f32(
                    to + 16 * h,
                    round_tf32(v[4 * h]),
                    round_tf32(v[4 * h + 1]),
                    round_tf32(v[4 * h + 2]),
                    round_tf32(v[4 * h + 3]),
                    inside,
                )
        else:
            part = cuda.local.array(8, types.float32)
            for i in unrolled(8):
                part[i] = HIGH_PART(v[i])
                v[i] = REST(v[i], part[i])
            for p in unrolled(3):
                if p > 0:
                    for i in unrolled(8):
                        part[i] = v[i]
                        v[i] -= NEAREST(v[i])
                global_store4_b32(
                    to + p * plane * 2,
                    PACK(part[0], part[1]),
                    PACK(part[2], part[3]),
                    PACK(part[4], part[5]),
                    PACK(part[6], part[7]),
                    inside,
                )


def nearest(x: Any) -> Any:
    """x rounded to bfloat16, as a float32."""
    return LOW(PACK(x, ZERO))


def high_part(x: Any) -> Any:
    """The first of the three bfloat16 parts of x.

    A finite number stays finite (rounding would make an infinity of those above LARGEST), and no
    number but 0 becomes 0: an infinity in the other operand must not meet a zero that is none.
    """
    near = NEAREST(x)
    near = select(LARGEST, near, (x > LARGEST) & (x <= MAXIMUM))
    near = select(-LARGEST, near, (x < -LARGEST) & (x >= -MAXIMUM))
    near = select(SMALLEST, near, (x > ZERO) & (near == ZERO))
    return select(-SMALLEST, near, (x < ZERO) & (near == ZERO))


def rest(x: Any, part: Any) -> Any:
    """Return what `part` leaves of x, exactly; 0 if x is an infinity or not a number."""
    return select(x - part, ZERO, (x >= -MAXIMUM) & (x <= MAXIMUM))


def turn(
    source: int,
    out: int,
    rows: int,
    columns: int,
    pitch: int,
    plane: int,
    source_place: int,
    source_row: int,
    source_column: int,
) -> None:
    """out[place, row, column] = tf32(source[place, row, column]) where source_row is 1.

    A block takes 32 x 32 elements through shared memory, 33 words a row (no bank conflicts), and
    so reads along the rows of `source`'s memory and writes along those of `out`'s.
    """
    grid_wait()
    grid_release()
    thread = thread_index() + 0
    column0 = block_index() * 32
    row0 = block_index_y() * 32
    place = block_index_z() + 0
    shared = dynamic_shared() + 0
    lane, strip = thread & 31, thread >> 5
    for i in unrolled(4):
        row, column = row0 + lane, column0 + strip + 8 * i
        at = source + (place * source_place + row * source_row + column * source_column) * 4
        value = global_load_f32(at, (row < rows) & (column < columns))
        shared_store_f32(shared + ((strip + 8 * i) * 33 + lane) * 4, round_tf32(value))
    block_barrier()
    for i in unrolled(4):
        row, column = row0 + strip + 8 * i, column0 + lane
        value = shared_load_f32(shared + (lane * 33 + strip + 8 * i) * 4)
        to = out + ((place * rows + row) * pitch + column) * 4
        global_store_f32(to, value, (row < rows) & (column < pitch))
