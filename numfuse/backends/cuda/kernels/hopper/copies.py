"""Template of the kernel that copies a factor before a product on Hopper.

The copy engine wants rows that begin at multiples of 16 bytes.  `convert` brings an operand of any
strides into such rows; on the way it splits float32 into three bfloat16 parts.
"""

# A template has no annotations but records, and its UPPER-case names are bound by `factors`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import (
    global_load4_f32,
    global_load16,
    global_load_f32,
    global_store4_b32,
)
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.intrinsics import (
    block_index,
    block_index_y,
    block_index_z,
    select,
    thread_index,
)
from numfuse.backends.cuda.compile.schema import Array
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled


def convert(source: Array, out, rows, columns, pitch, plane):
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
    at = source.address
    at += (place * source.place + row * source.row + column * source.column) * SOURCE_SIZE
    to = out + ((place * rows + row) * pitch + column) * 2
    if KIND == "copy":
        word = cuda.local.array(4, types.int32)
        for i in unrolled(4):
            low = global_load16(at + 4 * i * source.column, inside & (column + 2 * i < columns))
            high = global_load16(
                at + (4 * i + 2) * source.column, inside & (column + 2 * i + 1 < columns)
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
                v[i] = global_load_f32(at + 4 * i * source.column, inside & (column + i < columns))
        part = cuda.local.array(8, types.float32)
        for i in unrolled(8):
            part[i] = high_part(v[i])
            v[i] = rest(v[i], part[i])
        for p in unrolled(3):
            if p > 0:
                for i in unrolled(8):
                    part[i] = v[i]
                    v[i] -= nearest(v[i])
            global_store4_b32(
                to + p * plane * 2,
                PACK(part[0], part[1]),
                PACK(part[2], part[3]),
                PACK(part[4], part[5]),
                PACK(part[6], part[7]),
                inside,
            )


def nearest(x):
    """x rounded to bfloat16, as a float32."""
    return LOW(PACK(x, ZERO))


def high_part(x):
    """The first of the three bfloat16 parts of x.

    A finite number stays finite (rounding would make an infinity of those above LARGEST), and no
    number but 0 becomes 0: an infinity in the other operand must not meet a zero that is none.
    """
    near = nearest(x)
    near = select(LARGEST, near, (x > LARGEST) & (x <= MAXIMUM))
    near = select(-LARGEST, near, (x < -LARGEST) & (x >= -MAXIMUM))
    near = select(SMALLEST, near, (x > ZERO) & (near == ZERO))
    return select(-SMALLEST, near, (x < ZERO) & (near == ZERO))


def rest(x, part):
    """Return what `part` leaves of x, exactly; 0 if x is an infinity or not a number."""
    return select(x - part, ZERO, (x >= -MAXIMUM) & (x <= MAXIMUM))
