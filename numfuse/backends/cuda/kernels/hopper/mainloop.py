"""The loops that multiply on Hopper: a consumer's slices of K, as they arrive in the ring."""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import shared_load2_f32, shared_load_f32
from numfuse.backends.cuda.compile.engines import multiply_wait1
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_arrive,
    barrier_wait,
    fresh,
    group_any,
    group_barrier,
)
from numfuse.backends.cuda.compile.scalars import is_finite, select
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.hopper.parts import split, split_carefully


def next_stage(stage, parity):
    """The stage behind one, and the parity of its barriers."""
    stage += 1
    if stage == STAGES:
        stage = 0
        parity ^= 1
    return stage, parity


def descriptors(shared, stage, x_offset):
    """The lower words of wgmma's matrix descriptors of the slices of X and Y in a stage."""
    x_at = shared + stage * STAGE_BYTES
    x = X_DESCRIPTOR | (((x_at + x_offset) & 0x3FFFF) >> 4)
    y = Y_DESCRIPTOR | (((x_at + X_BYTES) & 0x3FFFF) >> 4)
    return x, y


def multiply_slices(acc, shared, x_offset, stage, parity, count, next_turn, leader):
    """acc = the sum of `count` slices' products, from `stage` on; the stage behind them.

    In "ping-pong" the other group's turn begins (at the barrier `next_turn`) when this one's last
    products are on their way: the tensor cores never wait.  One slice's products are in flight
    while the next one's are issued.
    """
    full = shared + FULL_AT
    empty = full + 8 * STAGES
    before = stage
    done = 0
    while done < count:
        barrier_wait(full + 8 * stage, parity)
        x, y = descriptors(shared, stage, x_offset)
        MULTIPLY(acc, x, y, done != 0)
        if done > 0:
            multiply_wait1()
            barrier_arrive(empty + 8 * before, leader)
        before = stage
        done += 1
        stage, parity = next_stage(stage, parity)
    if PING_PONG:
        barrier_arrive(next_turn, leader)
    MULTIPLY_WAIT(acc)
    barrier_arrive(empty + 8 * before, leader)
    return stage, parity


def row_of(thread):
    """The first of a thread's two rows of its group's 64, of which the other is 8 below.

    It is the one of wgmma's fragments, but that the eight of a warp take turns: a thread with a
    part of each of rows 0, 4, 2 and 6 of X reads other banks than its neighbours, where rows 0 and
    1 have the same pieces in exchanged places.
    """
    lane = thread & 31
    row = lane >> 2
    if PLANES > 1:
        row = (row & 2) | ((row & 1) << 2) | (row >> 2)
    return 16 * (thread >> 5) + row


def place_of(thread, row):
    """Where a thread's numbers of X begin in a slice, of which its first row is `row`.

    Its fragment of 16 of K (9.7.15.5.1.1.1) has numbers 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, for t
    the thread's number modulo 4, of this row and of the one eight behind it.  The copy engine
    exchanges pieces of 16 bytes of a line of 128 by the line's number modulo 8.
    """
    t = thread & 3
    if X_TURNED:  # lines are 32 rows of X
        piece = ((row & 31) >> 2) ^ (2 * t)
        place = (row >> 5) * 8192 + 256 * t + 16 * piece + 4 * (row & 3)
    else:  # lines are 32 numbers of K
        place = row * 128 + 16 * ((t >> 1) ^ (row & 7)) + 8 * (t & 1)
    return place


def load_fragment(v, slice_at, place, s):
    """A thread's numbers of the s-th 16 of K of a slice of X, as `split` takes them."""
    for h in unrolled(2):
        if X_TURNED:
            for r in unrolled(2):
                for c in unrolled(2):
                    at = slice_at + (place ^ (16 * c + 32 * r)) + 128 * c
                    v[4 * h + 2 * r + c] = shared_load_f32(at + 1024 * h + 2048 * s)
        else:
            at = slice_at + (place ^ (32 * h + 64 * (s & 1))) + (s >> 1) * (BLOCK_M * 128)
            v[4 * h], v[4 * h + 1] = shared_load2_f32(at)
            v[4 * h + 2], v[4 * h + 3] = shared_load2_f32(at + 1024)


def multiply_parts(acc, total, shared, place, stage, parity, count, next_turn, leader, group):
    """total = the sum of the six (of two planes, three) products of each of `count` slices, from
    `stage` on; the stage behind them.  Turns as in `multiply_slices`.

    A stage has X as float32, of which a thread makes the parts of its own numbers in registers,
    where wgmma takes them, while the products of those before are made; and all planes of Y.  The
    products with a low part come first, as long as a sum is small: the tensor cores add with fewer
    bits than float32 has, and lose as many as there are high parts to add, four for a slice.  That
    is added to `total`, in float32.
    """
    full = shared + FULL_AT
    empty = full + 8 * STAGES
    v = cuda.local.array(8, types.float32)
    words = cuda.local.array(4 * PLANES, types.int32)
    high = cuda.local.array(16, types.int32)
    CLEAR(total)
    done = 0
    while done < count:
        barrier_wait(full + 8 * stage, parity)
        x_at = shared + stage * STAGE_BYTES
        y = Y_DESCRIPTOR | (((x_at + X_BYTES) & 0x3FFFF) >> 4)
        for s in unrolled(4):
            load_fragment(v, x_at, place, s)
            split(v, words)
            MULTIPLY_LOW(acc, words, y + s * Y_STEP, s > 0)
            for i in unrolled(4):
                high[4 * s + i] = words[i]
        MULTIPLY_HIGH(acc, high, y, True)
        done += 1
        if PING_PONG:
            barrier_arrive(next_turn, leader & (done == count))
        MULTIPLY_WAIT(acc)
        bad = False
        for i in unrolled(VALUES):
            bad = bad | (not is_finite(acc[i]))
        # all of the group have read X, too
        if group_any(4 + group, 128, bad) != 0:
            add_carefully(acc, total, x_at, place, y)
            group_barrier(4 + group, 128)
        else:
            ADD(total, acc)
        barrier_arrive(empty + 8 * stage, leader)
        stage, parity = next_stage(stage, parity)
    return stage, parity


def add_carefully(acc, total, x_at, place, y):
    """total += a slice's products, some of which are no numbers.

    Of an infinity or NaN, or where a low part's product overflows, the high parts' product alone
    has what IEEE says.  Elements that are numbers are those of every other slice.
    """
    v = cuda.local.array(8, types.float32)
    words = cuda.local.array(4 * PLANES, types.int32)
    wrong = cuda.local.array(2, types.int32)
    wrong[0], wrong[1] = 0, 0
    for i in unrolled(VALUES):
        wrong[i // 32] |= (not is_finite(acc[i])) << (i % 32)
        total[i] += finite(acc[i])
    # (so that the compiler keeps two words, and not 64 truths)
    wrong[0], wrong[1] = fresh(wrong[0]), fresh(wrong[1])
    # the low parts' products first. (One loop for both: two would want other registers for acc.)
    for whole in range(2):
        for s in range(4):
            load_fragment(v, x_at, place, s)
            split_carefully(v, words)
            if whole:
                MULTIPLY_TOP(acc, words, y + s * Y_STEP, s > 0)
            else:
                MULTIPLY_LOW(acc, words, y + s * Y_STEP, s > 0)
            MULTIPLY_WAIT(acc)
        for i in unrolled(VALUES):
            counts = (whole != 0) | is_finite(acc[i])
            counts = counts & (((wrong[i // 32] >> (i % 32)) & 1) != 0)
            total[i] += select(counts, acc[i], ZERO)


def finite(x):
    """x, or 0 where it is an infinity or no number."""
    return select(is_finite(x), x, ZERO)
