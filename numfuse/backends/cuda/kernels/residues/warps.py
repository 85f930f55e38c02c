"""Sums of products of residues by mma.sync, on devices before Hopper: one block, part and modulus.

Slices of 64 bytes of K come to shared memory by cp.async, into a ring of stages. A row's four
pieces of 16 bytes are exchanged by its number, so that eight rows that ldmatrix reads meet all
banks. A warp has 32 rows and 64 columns of a block: fragments are those of 16-bit instructions,
byte for byte (PTX ISA 9.7.14.5.10).
"""

# A template has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile.accesses import fetch, fetch_commit, fetch_wait
from numfuse.backends.cuda.compile.engines import matrix_load, multiply_add_s8
from numfuse.backends.cuda.compile.intrinsics import (
    block_barrier,
    block_index,
    block_index_y,
    block_index_z,
    dynamic_shared,
    thread_index,
)
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import kernel_of, unrolled
from numfuse.backends.cuda.kernels.ampere.registers import clear
from numfuse.backends.cuda.kernels.mirror import block_of
from numfuse.backends.cuda.kernels.residues.store import store_bindings, store_residues
from numfuse.backends.cuda.plan.product import Launch, Slot

#: Rows and columns of a block, bytes of K in a slice, and slices on their way or read: two blocks
#: of 48 KiB fit a multiprocessor of 100 KiB, and with 256 threads its registers.
BLOCK, DEPTH, STAGES = 128, 64, 3
#: Warps of a block: four along rows, two along columns.
THREADS = 256
_FETCH = fetch(16, partial=True)


def multiply(
    x, y, out, m, k, row_blocks, column_blocks, x_plane, y_plane, plane, pitch, out_pitch,
    part_slices, part_step,
):  # fmt: skip
    """out[part, plane, row, column] = the sum over a part's k of x y, modulo the plane's modulus.

    Steps are bytes. A row of `out` has whole 64 of them, and so have the rows of y's planes.
    """
    shared = dynamic_shared() + 0
    t = thread_index() + 0
    number, part = block_index_y() + 0, block_index_z() + 0
    block_row, block_column = block_of(block_index() + 0, row_blocks, column_blocks)
    row0, column0 = block_row * BLOCK, block_column * BLOCK
    # a thread's piece of a slice: of two rows of X, and of two of Y
    piece, line = t & 3, t >> 2
    x_at = x + number * x_plane + (row0 + line) * pitch
    y_at = y + number * y_plane + (column0 + line) * pitch
    first = part * part_slices
    end = min(first + part_slices, (k + DEPTH - 1) // DEPTH)
    lane, warp = t & 31, t >> 5
    own_row, own_column = 32 * (warp >> 1), 64 * (warp & 1)
    acc = cuda.local.array(64, types.int32)
    CLEAR(acc)
    a = cuda.local.array(8, types.int32)
    for s in unrolled(STAGES - 1):
        bring(shared + s * (2 * BLOCK * DEPTH), x_at, y_at, first + s, end, piece, line,
              m - row0, out_pitch - column0, k, pitch)  # fmt: skip
        fetch_commit()
    stage, ahead, at = 0, STAGES - 1, first
    while at < end:
        WAIT()
        block_barrier()
        bring(shared + ahead * (2 * BLOCK * DEPTH), x_at, y_at, at + (STAGES - 1), end, piece, line,
              m - row0, out_pitch - column0, k, pitch)  # fmt: skip
        fetch_commit()
        x_from = shared + stage * (2 * BLOCK * DEPTH)
        y_from = x_from + BLOCK * DEPTH
        for step in unrolled(DEPTH // 32):
            for i in unrolled(2):
                row = own_row + 16 * i + (lane & 15)
                a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3] = matrix_load(
                    x_from + place(row, 2 * step + (lane >> 4))
                )
            for j in unrolled(4):
                column = own_column + 16 * j + (lane & 7) + ((lane >> 4) << 3)
                b0, b1, b2, b3 = matrix_load(y_from + place(column, 2 * step + ((lane >> 3) & 1)))
                for i in unrolled(2):
                    multiply_add_s8(
                        acc, 32 * i + 8 * j, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                        b0, b1,
                    )  # fmt: skip
                    multiply_add_s8(
                        acc, 32 * i + 8 * j + 4, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3],
                        b2, b3,
                    )  # fmt: skip
        at += 1
        stage = stage + 1 if stage < STAGES - 1 else 0
        ahead = ahead + 1 if ahead < STAGES - 1 else 0
    row, column = row0 + own_row + (lane >> 2), column0 + own_column + 16 * (lane & 3)
    store_residues(acc, out + part * part_step + number * plane, number, row, column, m, out_pitch)


def place(row, piece):
    """Where a piece of a row of a slice is."""
    return row * DEPTH + ((piece ^ ((row >> 1) & 3)) << 4)


def bring(to, x_at, y_at, number, end, piece, line, rows, columns, k, pitch):
    """A thread's pieces of a slice, on their way; zeros behind the last row and value of K."""
    at = number * DEPTH + piece * 16
    count = min(16, max(0, k - at)) if number < end else 0
    for i in unrolled(BLOCK // 64):
        there = place(line + 64 * i, piece)
        step = 64 * i * pitch + at
        FETCH(to + there, x_at + step, count if line + 64 * i < rows else 0)
        FETCH(to + (BLOCK * DEPTH) + there, y_at + step, count if line + 64 * i < columns else 0)


ARGUMENTS = Schema(multiply)


def launch(
    sizes: tuple[int, int, int], planes: int, moduli: tuple[int, ...],
    bytes_: tuple[int, int, int, int], factors: tuple[Slot, Slot], parts: int,
) -> tuple[Launch, int]:  # fmt: skip
    """Return the launch for so many planes, as `gemm.launch`, and the parts of K."""
    m, _, k = sizes
    x_plane, y_plane, pitch, out_pitch = bytes_
    slices = -(-k // DEPTH)
    part_slices = -(-slices // parts)
    parts = -(-slices // part_slices)
    rows, columns = -(-m // BLOCK), -(-out_pitch // BLOCK)
    bindings = store_bindings(moduli, 16, 64) | {
        "HALVES": 2,
        "BLOCK": BLOCK,
        "DEPTH": DEPTH,
        "STAGES": STAGES,
        "GROUP": tiling.MIRROR_TILE.group,
        "FETCH": _FETCH,
        "WAIT": fetch_wait(STAGES - 2),
        "CLEAR": clear(64),
    }
    made = kernel_of(multiply, ARGUMENTS, bindings, threads=THREADS, blocks=2, name="mma.sync s8")
    arguments = ARGUMENTS(
        x=factors[0], y=factors[1], out=Slot("work"), m=m, k=k, row_blocks=rows,
        column_blocks=columns, x_plane=x_plane, y_plane=y_plane, plane=m * out_pitch, pitch=pitch,
        out_pitch=out_pitch, part_slices=part_slices, part_step=planes * m * out_pitch,
    )  # fmt: skip
    shared = STAGES * 2 * BLOCK * DEPTH
    return Launch(made, (rows * columns, planes, parts), arguments, shared), parts
