"""The producer of Hopper's kernel: slices of X and Y, on their way to the ring of stages.

Of operands that lie as the kernel multiplies them, one thread asks the copy engine for every slice.
Where X comes as float32 though its parts are multiplied (`Gemm.splits_x`), its slices arrive in a
place of their own, and all 128 threads of the group make the parts of them in the stage: no launch
before reads all of X and writes half as much again.
"""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import shared_load4_f32, shared_store4_b32
from numfuse.backends.cuda.compile.engines import copy_fence, tensor_load
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_arrive,
    barrier_expect,
    barrier_wait,
    block_count,
    block_index,
    fresh,
    group_barrier,
    quotient,
    thread_index,
)
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.hopper.mainloop import next_stage
from numfuse.backends.cuda.kernels.hopper.parts import high_part, rest
from numfuse.backends.cuda.kernels.hopper.records import Fetched, Second, Unit, Work


def unit_at(unit, work: Work):
    """Where a unit of work is.

    GROUP rows of blocks are worked on together, column by column: the slices of X and Y that blocks
    at work share are then found in the second-level cache.
    """
    blocks = work.row_blocks * work.column_blocks
    part, place, block = 0, 0, unit
    if unit >= blocks:  # a division takes as long as the addresses of 16 sums
        outer = quotient(unit, blocks)
        block = unit - outer * blocks
        part = quotient(outer, work.places)
        place = outer - part * work.places
    # computed here: no register keeps it
    strip = quotient(block, GROUP * fresh(work.column_blocks))
    first = strip * GROUP
    height = min(GROUP, work.row_blocks - first)
    rest = block - first * work.column_blocks
    column = quotient(rest, height)
    row = first + rest - column * height
    return Unit(part, place, row * BLOCK_M, column * COLUMNS)


# --- slices as they are ---------------------------------------------------------------------------
def produce(x: Fetched, y: Fetched, second: Second, shared, work: Work, slice_bytes):
    """The producer's thread: every slice of every unit of this block, in order."""
    full = shared + FULL_AT
    stage, parity, unit = 0, 1, block_index() + 0
    while unit < work.units:
        here: Unit = unit_at(unit, work)
        first = here.part * work.part_slices
        end = min(work.slices, first + work.part_slices)
        at = first
        while at < end:
            barrier = full + 8 * stage
            barrier_wait(barrier + 8 * STAGES, parity)
            barrier_expect(barrier, slice_bytes)
            x_at = shared + stage * STAGE_BYTES
            k, x_place, y_place = at * DEPTH, here.place * x.places, here.place * y.places
            if TWO_TERMS and at >= work.term_slices:
                k -= work.term_slices * DEPTH
                x_place, y_place = here.place * second.x.places, here.place * second.y.places
                fetch_x(second.x, x_at, here.row0, k, x_place, barrier)
                fetch_y(second.y, x_at + X_BYTES, here.column0, k, y_place, barrier)
            else:
                column = here.column0 * (Y_COLUMNS // COLUMNS)
                for _plane in unrolled(PLANES):
                    fetch_x(x, x_at, here.row0, k, x_place, barrier)
                    fetch_y(y, x_at + X_BYTES, column, k, y_place, barrier)
                    if TWO_RIGHTS:
                        y1_place = here.place * second.y.places
                        y1_at = x_at + X_BYTES + 128 * COLUMNS
                        fetch_y(second.y, y1_at, here.column0, k, y1_place, barrier)
                    x_at += PLANE_BYTES
                    x_place += x.plane
                    y_place += y.plane
            stage, parity = next_stage(stage, parity)
            at += 1
        unit += block_count()


def fetch_x(x: Fetched, at, row0, k, place, barrier):
    """A slice of X, on its way to shared memory."""
    if X_TURNED:
        for i in unrolled(BLOCK_M // 64):
            tensor_load(at + 8192 * i, x.map, row0 + 64 * i, k, place, barrier)
    else:
        tensor_load(at, x.map, k, row0, place, barrier)


def fetch_y(y: Fetched, at, column0, k, place, barrier):
    """A slice of Y, on its way to shared memory."""
    if Y_TURNED:
        for i in unrolled(Y_COLUMNS // Y_BOX):
            column = column0 + Y_BOX * i
            tensor_load(at + 128 * Y_BOX * i, y.map, column, k, place, barrier)
    else:
        tensor_load(at, y.map, k, column0, place, barrier)


# --- slices of X in parts -------------------------------------------------------------------------
def produce_parts(x: Fetched, y: Fetched, shared, work: Work, slice_bytes):
    """The producer's group: every slice of every unit, X's as the parts of what arrives.

    The slabs of 64 x 64 numbers of a slice arrive while those of the slice before are split: a slab
    is asked for as soon as its place has been read. A stage is full when the copy engine has
    brought Y's planes, and all threads have written X's.
    """
    thread = thread_index() + 0
    leader = thread == 0
    full = shared + FULL_AT
    source, arrived = shared + SLABS_AT, full + 16 * STAGES + 16 * BUFFERS + 16
    stage, parity, turn, unit = 0, 1, 0, block_index() + 0
    if unit < work.units:
        begin: Unit = unit_at(unit, work)
        if leader:
            for i in unrolled(SLABS):
                place, k = begin.place * x.places, begin.part * work.part_slices * DEPTH
                fetch_slab(x, source + 16384 * i, begin.row0 + 64 * i, k, place, arrived + 8 * i)
    while unit < work.units:
        here: Unit = unit_at(unit, work)
        first = here.part * work.part_slices
        end = min(work.slices, first + work.part_slices)
        at = first
        while at < end:
            barrier = full + 8 * stage
            barrier_wait(barrier + 8 * STAGES, parity)
            x_at = shared + stage * STAGE_BYTES
            if leader:
                barrier_expect(barrier, slice_bytes)
                y_at, y_place = x_at + X_BYTES, here.place * y.places
                for _plane in unrolled(PLANES):
                    fetch_y(y, y_at, here.column0, at * DEPTH, y_place, barrier)
                    y_at += PLANE_BYTES
                    y_place += y.plane
            # the slice behind this one, of the same unit or of the next
            at += 1
            row, k, place, more = here.row0, at * DEPTH, here.place, True
            if at == end:
                more = unit + block_count() < work.units
                if more:
                    there: Unit = unit_at(unit + block_count(), work)
                    row, place = there.row0, there.place
                    k = there.part * work.part_slices * DEPTH
            for i in unrolled(SLABS):
                barrier_wait(arrived + 8 * i, turn)
                split_slab(source + 16384 * i, x_at + 8192 * i, thread)
                # (the copy engine's side of shared memory, from which wgmma reads)
                copy_fence()
                group_barrier(4, 128)
                if leader and more:
                    slab = source + 16384 * i
                    fetch_slab(x, slab, row + 64 * i, k, place * x.places, arrived + 8 * i)
            barrier_arrive(barrier, leader)
            turn ^= 1
            stage, parity = next_stage(stage, parity)
        unit += block_count()


def fetch_slab(x: Fetched, at, row0, k, place, barrier):
    """64 x 64 numbers of X, on their way: two boxes, side by side along the contiguous axis."""
    barrier_expect(barrier, 16384)
    for i in unrolled(2):
        if X_TURNED:
            tensor_load(at + 8192 * i, x.map, row0 + 32 * i, k, place, barrier)
        else:
            tensor_load(at + 8192 * i, x.map, k + 32 * i, row0, place, barrier)


def split_slab(source, to, thread):
    """The planes of a slab, of which a thread makes 8 neighbours of four rows.

    Rows of 128 bytes are swizzled on both sides: 16-byte pieces are exchanged by the row's number
    modulo 8. Eight threads at work together have half a row and half of another one, of which the
    numbers differ in their first and third bit: so they read, and write, all banks.
    """
    low = ((thread >> 3) & 3) ^ (5 * ((thread >> 2) & 1))
    line = 128 * (8 * (thread >> 5) + low)
    piece = thread & 3
    one, other = line + 16 * ((2 * piece) ^ low), line + 16 * ((2 * piece + 1) ^ low)
    goal = to + line + 16 * (piece ^ low)
    v = cuda.local.array(8, types.float32)
    for j in unrolled(2):
        for h in unrolled(2):
            at = source + 8192 * h + 4096 * j
            v[0], v[1], v[2], v[3] = shared_load4_f32(at + one)
            v[4], v[5], v[6], v[7] = shared_load4_f32(at + other)
            split_eight(v, (goal ^ (64 * h)) + 4096 * j)


def split_eight(v, to):
    """The parts of 8 numbers, 16 bytes in each plane."""
    word = cuda.local.array(4, types.int32)
    part = cuda.local.array(8, types.float32)
    rare = False
    for i in unrolled(4):
        word[i] = PACK(v[2 * i], v[2 * i + 1])
        part[2 * i] = LOW(word[i])
        part[2 * i + 1] = HIGH(word[i])
    for i in unrolled(8):
        # what `high_part` is there for; of a NaN all parts may be one
        rare = rare | (v[i] > LARGEST) | (v[i] < -LARGEST) | ((part[i] == ZERO) & (v[i] != ZERO))
    if rare:
        for i in unrolled(8):
            part[i] = high_part(v[i])
            v[i] = rest(v[i], part[i])
        for i in unrolled(4):
            word[i] = PACK(part[2 * i], part[2 * i + 1])
    else:
        for i in unrolled(8):
            v[i] -= part[i]
    shared_store4_b32(to, word[0], word[1], word[2], word[3])
    for p in unrolled(PLANES - 1):
        for i in unrolled(4):
            word[i] = PACK(v[2 * i], v[2 * i + 1])
            if p < PLANES - 2:
                v[2 * i] -= LOW(word[i])
                v[2 * i + 1] -= HIGH(word[i])
        shared_store4_b32(to + PLANE_BYTES * (p + 1), word[0], word[1], word[2], word[3])
