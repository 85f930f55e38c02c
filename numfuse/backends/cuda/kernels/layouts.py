"""A copy of a float32 factor whose rows begin at 16 bytes, turned where it lies the other way.

It may be rounded to tf32, which wgmma reads along K alone: it has no transpose bit for that.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.intrinsics import round_tf32, shared_address
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, types
from numfuse.backends.cuda.compile.unroll import kernel_of, unrolled
from numfuse.backends.cuda.plan.product import Launch, Operand, Slot

#: A block's square, and the rows of 16 threads in it.
SQUARE, ROWS = 64, 16


def lay_out(out, outer, inner, source: Array, to_place, to_outer):
    """out[place, o, i] = source[place, o, i], where `out` has i inside; steps in bytes.

    `source` has o as its rows and i as its columns.
    A thread has 4 x 4 values. Behind the last of a row it writes zeros, to a multiple of four.
    """
    if OVERLAPS:
        if not BESIDE:
            grid_wait()
        grid_release()
    t = cuda.threadIdx.x
    i0, o0 = cuda.blockIdx.x * SQUARE, cuda.blockIdx.y * SQUARE
    source.address += cuda.blockIdx.z * source.place
    out += cuda.blockIdx.z * to_place
    fours, line = t & 15, t >> 4
    # A thread reads a four of each of four lines: of the source's rows or, where these are turned,
    # of its columns. All loads are on their way before the first value is used.
    if TURNED:
        first, first_end, first_step = o0 + 4 * fours, outer, source.row
        other, other_end, other_step = i0 + 4 * line, inner, source.column
    else:
        first, first_end, first_step = i0 + 4 * fours, inner, source.column
        other, other_end, other_step = o0 + line, outer, source.row
    at = source.address + first * first_step + other * other_step
    held = cuda.local.array(16, types.float32)
    for v in unrolled(16):
        held[v] = ZERO
    for r in unrolled(4):
        if WIDE:
            if other + r * LINES < other_end and first < first_end:
                loaded = LOAD_4(at + r * LINES * other_step)
                for v in unrolled(4):
                    held[4 * r + v] = loaded[v]
        else:
            for v in unrolled(4):
                if other + r * LINES < other_end and first + v < first_end:
                    held[4 * r + v] = LOAD(at + r * LINES * other_step + v * first_step)
    if TURNED:
        # turned within the thread, then to the rows of `out`; their fours are exchanged so that
        # eight threads of any access meet all banks
        square = shared_address(cuda.shared.array(0, dtype=types.int64))
        for v in unrolled(4):
            to = square + ((4 * fours + v) * SQUARE + 4 * (line ^ fours)) * 4
            PUT_4(to, held[v], held[4 + v], held[8 + v], held[12 + v])
        cuda.syncthreads()
    for r in unrolled(4):
        row, i = line + r * ROWS, i0 + 4 * fours
        if o0 + row < outer and i < inner:
            to = out + (o0 + row) * to_outer + i * 4
            if TURNED:
                taken = TAKE_4(square + (row * SQUARE + 4 * (fours ^ (row >> 2))) * 4)
                put_4(to, taken[0], taken[1], taken[2], taken[3])
            else:
                put_4(to, held[4 * r], held[4 * r + 1], held[4 * r + 2], held[4 * r + 3])
    if OVERLAPS and BESIDE:
        grid_wait()  # what comes behind waits for this launch alone


def put_4(to, a, b, c, d):
    """Four values to `out`."""
    if TF32:
        a, b, c, d = round_tf32(a), round_tf32(b), round_tf32(c), round_tf32(d)
    STORE_4(to, a, b, c, d)


ARGUMENTS = Schema(lay_out)


def fits(shape: tuple[int, int], places: int, inner: int) -> bool:
    """Whether a grid has enough blocks along y and z."""
    return max(places, -(-shape[2 - inner] // SQUARE)) < 1 << 16


def laid_out(
    operand: Operand,
    shape: tuple[int, int],
    places: int,
    inner: int,
    source: Slot,
    to: Slot,
    tf32: bool = False,
    shared: bool = False,
    overlaps: bool = False,
) -> tuple[Launch, Operand, int]:
    """The launch, the operand that it makes, and its bytes.

    `shape`: rows and columns; `inner`: the axis (1: rows, 2: columns) that is contiguous after it;
    `tf32`: rounded; `shared`: kept for other products of the factor. `overlaps`: the launch may
    begin before the one before it has ended, as one that is shared does.
    """
    overlaps |= shared
    outer = 3 - inner
    lengths = shape[outer - 1], shape[inner - 1]
    pitch = tiling.pitch(lengths[1], 4)
    many = places if operand.strides[0] else 1
    step = lengths[0] * pitch if many > 1 else 0
    turned = abs(operand.strides[outer]) < abs(operand.strides[inner])
    along, kind = outer if turned else inner, "float32"
    bindings = {
        "TURNED": turned,
        "TF32": tf32,
        "OVERLAPS": overlaps,
        "WIDE": operand.runs_wide(along, 4) and not shape[along - 1] % 4,
        "SQUARE": SQUARE,
        "ROWS": ROWS,
        # from a line that a thread reads to the next
        "LINES": 1 if turned else ROWS,
        "ZERO": np.float32(0),
        "LOAD": accesses.load(kind, 1, kind),
        "LOAD_4": accesses.load(kind, 4, kind),
        "STORE_4": accesses.store(kind, 4, kind),
        "TAKE_4": accesses.load(kind, 4, kind, intrinsics.SHARED),
        "PUT_4": accesses.store(kind, 4, kind, intrinsics.SHARED),
    }

    def made(beside: bool) -> Kernel:
        name = f"{'turned ' * turned}copy{' tf32' * tf32}{' beside' * beside}"
        bound = bindings | {"BESIDE": beside}
        return kernel_of(lay_out, ARGUMENTS, bound, threads=16 * ROWS, name=name)

    arguments = ARGUMENTS(
        source=Array(source, *(operand.steps[i] for i in (0, outer, inner))),
        out=to,
        outer=lengths[0],
        inner=lengths[1],
        to_place=step * 4,
        to_outer=pitch * 4,
    )
    size = many * lengths[0] * pitch * 4
    grid = -(-lengths[1] // SQUARE), -(-lengths[0] // SQUARE), many
    strides = (step, pitch, 1) if inner == 2 else (step, 1, pitch)
    shared_bytes = SQUARE * SQUARE * 4 if turned else 0
    launch = Launch(made(False), grid, arguments, shared_bytes, overlaps=overlaps)
    if overlaps:
        launch = replace(launch, beside=partial(made, True))
    if shared:
        launch = replace(launch, makes=(to.name, size))
    return launch, Operand("float32", strides, 16), size
