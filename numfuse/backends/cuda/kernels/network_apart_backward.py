"""The gradients of a whole network in 16 bits as one launch on Hopper, whose sums lie apart.

It is `network_groups_backward` with a warp group more in a block. GROUPS groups take rows forward
and back; the last one adds Q' X up, layer by layer, for the rows of all others, and has all of
these sums in its registers. So the others have none, are more, and take fewer registers each
(setmaxnreg): while one waits for its product, others make activations, and the last one multiplies.

A warp of a group brings its own rows of x and of the cotangents, and multiplies them from
registers: it waits for no other one. What is written for the last group has an mbarrier for each
group and layer: FULL when X and Q of the layer are there (its 4 warps arrive), FREE when they were
read. A phase of each is a tile.

What a layer's Q replaces: that of the last hidden layer lies in a place of its own, or in that of
the next rows of x; that of any other one in the place of X two layers further, which was read by
then. The slopes of relu are a bit of each value in registers (MASKS), or are made of X; those of
other activations stay in shared memory, where the lane that wrote them reads them.

The last group takes the tiles of a block in their order, and a tile's layers from the last to the
first: so sums have one order.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile.accesses import fetch_commit
from numfuse.backends.cuda.compile.engines import copy_fence
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_arrive,
    barrier_fence,
    barrier_init,
    barrier_wait,
    fresh,
    same,
    value_of_lane,
    warp_barrier,
)
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_fragments import peek_bias, poke_zeros
from numfuse.backends.cuda.kernels.network_groups_backward import (
    bend,
    fill,
    give,
    write_gradients,
    write_points_gradient,
)
from numfuse.backends.cuda.kernels.network_half import prepare
from numfuse.backends.cuda.kernels.network_layers import Layers, Rows, Steps, own_rows
from numfuse.backends.cuda.kernels.network_panels import (
    descriptor,
    peek_beyond,
    peek_fragment,
    place_of_fragment,
    poke_beyond,
)
from numfuse.backends.cuda.kernels.network_passes import width_of


# --- what a warp brings, and hands over -----------------------------------------------------------
def take_points(given, at, lane, row):
    """Read a warp's rows of x, as fragments."""
    place = place_of_fragment(lane, row, X_BOX)
    for j in unrolled(IN_WIDTH // 16):
        more = j // (X_BOX // 16) * (128 * X_BOX)
        peek_fragment((place ^ (32 * (j % (X_BOX // 16)))) + at + more, given, 4 * j)


def take_cotangents(given, at, lane, row):
    """Read a warp's rows of the cotangents, as fragments."""
    place = place_of_fragment(lane, row, TAIL_BOX)
    for j in unrolled(OUT_WIDTH // 16):
        peek_fragment((place ^ (32 * j)) + at, given, 4 * j)


def clear_rows(to, lane, row, end):
    """Write 0 to a warp's rows of 64 columns, from `end` on: nothing of them is added."""
    warp_barrier()
    for k in unrolled(4):
        i = lane + 32 * k
        if row + (i >> 3) >= end:
            poke_zeros(to + row * 128 + i * 16)


def hand_over(full, lane):
    """Tell the last group that this warp has written X and Q of a layer."""
    copy_fence()
    warp_barrier()
    barrier_arrive(full, lane == 0)


# --- a tile ---------------------------------------------------------------------------------------
@dataclass
class Own:
    """A thread's place: memory of its block and its group, mbarriers, its lane, its warp's row."""

    memory: Any
    base: Any
    full: Any
    free: Any
    lane: Any
    row: Any


@dataclass
class Tile:
    """A tile's first row, that of the group's next tile, all rows, and the mbarriers' parity."""

    first: Any
    next: Any
    count: Any
    parity: Any


def again(lane):
    """Return a lane's number, of which no register keeps what is made where there are FEW."""
    if FEW:
        return fresh(lane) & 31
    return lane


def go_forward(sums, left, bent, bits, given, raw, places, own: Own, tile: Tile, x: Rows, to):
    """Take a tile's rows through the hidden layers, and leave what these give in shared memory.

    `places` are where a lane's fragments begin there, one for each 16 columns; layers lie so many
    KiB further, which are a part of the instructions. The next rows of x go `to` their place.
    """
    near = (own.lane & 3) * 2
    bias = own.memory + BIAS_AT[0] + near * 4
    for layer in unrolled(COUNT - 1):
        for j in unrolled(WIDTH // 8):
            pair = peek_bias(bias, layer * (WIDTH // 8) + j)
            for r in unrolled(2):
                sums[4 * j + 2 * r] = pair[0]
                sums[4 * j + 2 * r + 1] = pair[1]
        weights = descriptor(own.memory + WEIGHTS_AT[layer], HEAD if layer == 0 else INNER)
        if layer == 0:
            MULTIPLY_FIRST(sums, given, weights)
        else:
            MULTIPLY(sums, left, weights)
        if layer < 2:
            # what is written over was read: X of the tile before, and Q
            barrier_wait(own.free + (1 - layer) * 8, tile.parity ^ 1)
        if layer == 1 and not NEXT_IS_SPARE:
            FETCH_POINTS(raw, to, again(own.lane), x, tile.next + own.row, tile.count)
            fetch_commit()
        if MASKS:
            bits[layer] = 0
        for j in unrolled(WIDTH // 16):
            for h in unrolled(2):
                for r in unrolled(2):
                    AT = 4 * j + 2 * h + r
                    low, high = sums[8 * j + 4 * h + 2 * r], sums[8 * j + 4 * h + 2 * r + 1]
                    words = give(low, high, near + (16 * j + 8 * h), width_of(layer))
                    left[AT] = words[0]
                    if MASKS and layer < COUNT - 2:
                        bits[layer] = KEEP_BITS(bits[layer], left[AT], AT)
                    if not RECTIFIED:
                        bent[2 * h + r] = words[1]
            poke_beyond(places[j], left, 4 * j, VALUES_KIB[layer])
            if not RECTIFIED:
                poke_beyond(places[j], bent, 0, SLOPES_KIB[layer])
        if MASKS and layer < COUNT - 2:
            # (else the assembler keeps all words, and makes the bits where they are read)
            bits[layer] = value_of_lane(bits[layer], own.lane)
        if tile.first + 64 > tile.count:
            here = own.base + 1024 * VALUES_KIB[layer]
            clear_rows(here, own.lane, own.row, tile.count - tile.first)


def go_back(
    sums, left, bent, bits, given, raw, raw_tail, places, own: Own, tile: Tile, x: Rows,
    grad: Rows, turned, to, to_tail,
):  # fmt: skip
    """Take the cotangents of a tile's rows back, and leave the gradients by sums in shared memory.

    Those of a layer replace what went into the one two layers further, and was read. The next
    cotangents go `to_tail`, the next rows of x `to` their place, `turned` bytes behind the first.
    """
    for i in unrolled(COUNT - 1):
        LAYER = COUNT - 2 - i
        weights = descriptor(own.memory + WEIGHTS_AT[LAYER + 1], ALONG)
        if i == 0:
            MULTIPLY_LAST_BACK(sums, given, weights)
        else:
            MULTIPLY_BACK(sums, left, weights)
            barrier_wait(own.free + (LAYER + 2) * 8, tile.parity)
        if i == 1:
            lane = again(own.lane)
            FETCH_COTANGENTS(raw_tail, to_tail, lane, grad, tile.next + own.row, tile.count)
            fetch_commit()
        if i == 2 and NEXT_IS_SPARE:
            FETCH_POINTS(raw, to, again(own.lane), x, tile.next + own.row, tile.count)
            fetch_commit()
        more = 0
        if i == 0 and NEXT_IS_SPARE:
            more = turned
        for j in unrolled(WIDTH // 16):
            if not (MASKS and i) and not (LEFT_IS_KEPT and i == 0):
                peek_beyond(places[j], bent, 0, KEPT_KIB[LAYER])
            for h in unrolled(2):
                for r in unrolled(2):
                    AT = 4 * j + 2 * h + r
                    low, high = sums[8 * j + 4 * h + 2 * r], sums[8 * j + 4 * h + 2 * r + 1]
                    if i and MASKS:
                        left[AT] = WHERE_BITS(bits[LAYER], PACK(low, high), AT)
                    elif LEFT_IS_KEPT and i == 0:
                        # (what the last hidden layer gives is still there)
                        left[AT] = bend(low, high, left[AT])
                    else:
                        left[AT] = bend(low, high, bent[2 * h + r])
            poke_beyond(places[j] + more, left, 4 * j, GRADIENTS_KIB[LAYER])
        if tile.first + 64 > tile.count:
            here = own.base + more + 1024 * GRADIENTS_KIB[LAYER]
            clear_rows(here, own.lane, own.row, tile.count - tile.first)
        hand_over(own.full + LAYER * 8, own.lane)


def pass_rows(memory, group, u, x: Rows, grad: Rows, d_x: Rows, blocks, count):
    """Take a group's rows forward and back, 64 at a time."""
    sums = cuda.local.array(SUMS, REAL)
    left = cuda.local.array(WIDTH // 4, WORD)
    bent = cuda.local.array(4, WORD)
    bits = cuda.local.array(COUNT - 1, WORD)
    given = cuda.local.array(GIVEN, WORD)
    raw = cuda.local.array(POINTS_PER_THREAD, WORD)
    raw_tail = cuda.local.array(COTANGENTS_PER_THREAD, WORD)
    places = cuda.local.array(WIDTH // 16, WORD)
    lane = u & 31
    row = (u >> 5) * 16
    base = memory + GROUPS_AT + group * GROUP_BYTES
    full = memory + FULL_AT + group * (COUNT * 8)
    own: Own = Own(memory, base, full, full + GROUPS * COUNT * 8, lane, row)
    for j in unrolled(WIDTH // 16):
        place = (place_of_fragment(lane, row, WIDTH) ^ (32 * j)) + base
        places[j] = value_of_lane(place, lane)
    first = (cuda.blockIdx.x * GROUPS + group) * 64
    step = blocks * (GROUPS * 64)
    turned, parity = 0, 0
    # a warp's rows of x and of the cotangents
    points_to, cotangents_to = base + row * (2 * X_BOX), base + TAIL_AT + row * (2 * TAIL_BOX)
    if NEXT_IS_SPARE:
        FETCH_COTANGENTS(raw_tail, cotangents_to, lane, grad, first + row, count)
        fetch_commit()
    FETCH_POINTS(raw, points_to, lane, x, first + row, count)
    fetch_commit()
    if not NEXT_IS_SPARE:
        FETCH_COTANGENTS(raw_tail, cotangents_to, lane, grad, first + row, count)
        fetch_commit()
    while first < count:
        tile: Tile = Tile(first, first + step, count, parity)
        if NEXT_IS_SPARE:
            FETCH_WAIT()
        else:
            FETCH_WAIT_FIRST()
        SETTLE_POINTS(raw, points_to + turned, lane, first + row, count)
        warp_barrier()
        take_points(given, base + turned, lane, row)
        turned ^= X_BYTES
        go_forward(sums, left, bent, bits, given, raw, places, own, tile, x, points_to + turned)
        if not NEXT_IS_SPARE:
            FETCH_WAIT_FIRST()
        SETTLE_COTANGENTS(raw_tail, cotangents_to, lane, first + row, count)
        hand_over(full + (COUNT - 1) * 8, lane)
        take_cotangents(given, base + TAIL_AT, lane, row)
        go_back(
            sums, left, bent, bits, given, raw, raw_tail, places, own, tile, x, grad, turned,
            points_to + turned, cotangents_to,
        )  # fmt: skip
        if MOVES:
            MULTIPLY_MOVED(sums, left, descriptor(memory + WEIGHTS_AT[0], ALONG))
            write_points_gradient(sums, again(lane), d_x, first + row, count)
        first += step
        parity ^= 1
    FETCH_WAIT()


# --- the sums of gradients ------------------------------------------------------------------------
def add_gradients(total, words, memory, count, blocks, lane):
    """Add Q' X up for every layer, and the rows of all groups."""
    first = cuda.blockIdx.x * (GROUPS * 64)
    more = blocks * (GROUPS * 64) - GROUPS * 64
    ones = memory + ONES_AT
    group, parity = 0, 0
    while first < count:
        base = memory + GROUPS_AT + group * GROUP_BYTES
        full = memory + FULL_AT + group * (COUNT * 8)
        free = full + GROUPS * COUNT * 8
        for i in unrolled(COUNT):
            LAYER = COUNT - 1 - i
            rows = base + LEFT_AT + (LAYER - 1) * TILE_BYTES
            if LAYER == 0:
                rows = base + parity * X_BYTES
            gradients = base + TAIL_AT
            if LAYER < COUNT - 1:
                gradients = base + 1024 * GRADIENTS_KIB[LAYER]
            if LAYER == COUNT - 2 and NEXT_IS_SPARE:
                gradients = base + (parity ^ 1) * X_BYTES
            words[0] = descriptor(gradients, 0)
            if LAYER == 0 and ONE_INSIDE:
                words[1] = descriptor(rows, POINTS_ACROSS)
            else:
                # from the one panel to the ones
                words[1] = descriptor(rows, ((ones - rows) >> 4) << 16)
            barrier_wait(full + LAYER * 8, parity)
            if LAYER == 0:
                ADD_FIRST(total, TOTAL_AT[LAYER], total, 0, words)
            elif LAYER == COUNT - 1:
                ADD_LAST(total, TOTAL_AT[LAYER], total, 0, words)
            else:
                ADD(total, TOTAL_AT[LAYER], total, 0, words)
            barrier_arrive(free + LAYER * 8, lane == 0)
        group += 1
        first += 64
        if group == GROUPS:
            group = 0
            parity ^= 1
            first += more


def add_up(memory, u, count, blocks, planes):
    """Add the gradients of a block's rows up, and write them to its plane."""
    total = cuda.local.array(TOTALS, REAL)
    words = cuda.local.array(2, WORD)
    for i in unrolled(TOTALS):
        total[i] = ZERO
    lane = u & 31
    add_gradients(total, words, memory, count, blocks, lane)
    part = cuda.blockIdx.y * blocks + cuda.blockIdx.x
    write_gradients(total, lane, (u >> 5) * 16, 0, planes + part * (LENGTH * 4))


# --- the kernel -----------------------------------------------------------------------------------
def backward(x: Rows, layers: Layers, steps: Steps, grad: Rows, count, planes, d_x: Rows):
    """Add up a network's gradients over a block's tiles, and write those by the points.

    There is a network a row of the grid.
    """
    memory = MEMORY() + 0
    held = cuda.local.array(HELD, REAL)
    t = cuda.threadIdx.x
    prepare(memory, t, layers, steps, held)
    fill(memory, t)
    if t < 2 * GROUPS * COUNT:
        barrier_init(memory + FULL_AT + t * 8, 4)
    barrier_fence()
    copy_fence()
    BARRIER()
    points: Rows = own_rows(x, steps.x)
    cotangents: Rows = own_rows(grad, steps.out)
    moved: Rows = own_rows(d_x, steps.d_x)
    group = same(t >> 7)
    blocks = cuda.gridsize(1) // THREADS
    if group == GROUPS:
        REGISTERS_MORE()
        add_up(memory, t & 127, count, blocks, planes)
    else:
        REGISTERS_FEWER()
        pass_rows(memory, group, t & 127, points, cotangents, moved, blocks, count)


#: Strides are in elements, `planes` is an address.
APART_BACKWARD = Schema(backward)
