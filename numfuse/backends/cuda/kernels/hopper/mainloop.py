"""The loops that multiply on Hopper: a consumer's slices of K, as they arrive in the ring."""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.engines import multiply_wait1
from numfuse.backends.cuda.compile.intrinsics import barrier_arrive, barrier_wait
from numfuse.backends.cuda.compile.scalars import is_finite, select
from numfuse.backends.cuda.compile.unroll import unrolled


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


def multiply_split(low, high, total, shared, x_offset, stage, parity, count, next_turn, leader):
    """total = the sum of the six (of two planes, three) products of each of `count` slices, of
    which a stage has all planes, from `stage` on; the stage behind them.  Turns as in
    `multiply_slices`.

    A plane that is in shared memory is used two or three times: one product after the other, each
    over all of K, would take twice as much from the second-level cache, which is then the limit.
    The products with a low part have sums of their own, which are small and go on to the end.
    That of the high parts holds no more than PROMOTE slices at a time and is added to `total`: the
    tensor cores add with fewer bits than float32 has, a float32 addition does not.
    """
    full = shared + FULL_AT
    empty = full + 8 * STAGES
    before = stage
    NEXT_PLANE = PLANE_BYTES >> 4
    LAST = PLANES - 1
    CLEAR(total)
    done = 0
    while done < count:
        barrier_wait(full + 8 * stage, parity)
        x, y = descriptors(shared, stage, x_offset)
        MULTIPLY(low, x, y + LAST * NEXT_PLANE, True)
        if done > 0:
            # with that one on its way, those of the slice before are done
            multiply_wait1()
            barrier_arrive(empty + 8 * before, leader)
        if PLANES == 3:
            MULTIPLY(low, x + 2 * NEXT_PLANE, y, True)
            MULTIPLY(low, x + NEXT_PLANE, y + NEXT_PLANE, True)
            MULTIPLY(low, x, y + NEXT_PLANE, True)
        MULTIPLY(low, x + NEXT_PLANE, y, True)
        MULTIPLY(high, x, y, (done & (PROMOTE - 1)) != 0)
        before = stage
        done += 1
        stage, parity = next_stage(stage, parity)
        if (done & (PROMOTE - 1)) == 0 and done < count:
            # (the compiler lets nothing read a sum while another one is on its way)
            MULTIPLY_WAIT(low)
            MULTIPLY_WAIT(high)
            ADD(total, high)
    if PING_PONG:
        barrier_arrive(next_turn, leader)
    MULTIPLY_WAIT(low)
    MULTIPLY_WAIT(high)
    barrier_arrive(empty + 8 * before, leader)
    ADD(total, high)
    # where a low part is no number (of an infinity) or its product overflows, the high parts'
    # product alone has IEEE's infinity or NaN
    for i in unrolled(VALUES):
        total[i] = total[i] + finite(low[i])
    return stage, parity


def finite(x):
    """x, or 0 where it is an infinity or no number."""
    return select(is_finite(x), x, ZERO)
