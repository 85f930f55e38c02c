"""The gradients of a whole network in 16 bits as one launch on Hopper: see `network_groups`.

A warp group goes forward and back with 64 rows of its own. In shared memory it leaves what went
into each layer, X, and the gradients by each layer's sums, Q. When all of a tile's are there, the
tensor cores add Q' X up for every layer, from there, into sums that stay in registers for the whole
launch; the first product of the next tile goes with these. X has a column of ones beside it: so the
sums of Q's columns, the biases' gradients, come with the product.

A group makes these products for its own rows and waits for no other one. Where the sums of all
layers are too many for a thread's registers, the groups of a block share them: each has some of the
layers, and the rows of all groups.

Rows of x and of the cotangents are copied to shared memory a tile ahead. Where Q of a hidden layer
goes, the slopes of its activation are kept until then; those of relu are made of its values.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import fetch_commit
from numfuse.backends.cuda.compile.engines import copy_fence
from numfuse.backends.cuda.compile.intrinsics import group_barrier, least, same, warp_barrier
from numfuse.backends.cuda.compile.scalars import both
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_fragments import (
    load_bits,
    poke_bits,
    poke_word,
    store_real_if,
    word_if,
)
from numfuse.backends.cuda.kernels.network_groups import begin
from numfuse.backends.cuda.kernels.network_half import inside, prepare
from numfuse.backends.cuda.kernels.network_layers import Layers, Rows, Steps, own_rows
from numfuse.backends.cuda.kernels.network_panels import (
    descriptor,
    panel_place,
    peek_fragment,
    place_of_fragment,
    poke_fragment,
)
from numfuse.backends.cuda.kernels.network_passes import width_of


# --- rows of x and of the cotangents --------------------------------------------------------------
# What follows is bound once for x and once for the cotangents. UNITS of a row, of UNIT values, are
# numbered as if they were a power of two, of SPREAD_BITS. TEAM threads bring TEAM_ROWS rows.
def fetch_rows(raw, to, u, x: Rows, first, count):
    """Begin to bring a tile's rows, from `first` on, to shared memory.

    16 bytes are copied there by themselves; single values are loaded, and stored by `settle_rows`.
    """
    for k in unrolled(PER_THREAD):
        i = u + TEAM * k
        row = i >> SPREAD_BITS
        unit = i & ((1 << SPREAD_BITS) - 1)
        begin_at = x.address + least(first + row, count - 1) * (x.row * 2)
        if UNIT == 8:
            if row < TEAM_ROWS and unit < UNITS:
                at = to + panel_place(row, unit * 8, 64, SIDE_WIDTH)
                COPY(at, begin_at + unit * 16, 16 * (first + row < count))
        else:
            raw[k] = load_bits(begin_at + least(unit, UNITS - 1) * (x.column * 2))


def settle_rows(raw, to, u, first, count):
    """Store what `fetch_rows` loaded, 0 behind the last row."""
    if UNIT == 1:
        for k in unrolled(PER_THREAD):
            i = u + TEAM * k
            row = i >> SPREAD_BITS
            unit = i & ((1 << SPREAD_BITS) - 1)
            if row < TEAM_ROWS and unit < UNITS:
                at = to + panel_place(row, unit, 64, SIDE_WIDTH)
                poke_bits(at, word_if(first + row < count, raw[k]))


# --- shared memory beside the weights -------------------------------------------------------------
def fill(memory, t):
    """Write the panel of ones, and what lies around the rows of x and of the cotangents.

    These are zeros but for a column of ones where x leaves room for one.
    """
    for i in range(t, ONES_BYTES // 4, THREADS):
        poke_word(memory + ONES_AT + i * 4, ONES_WORD)
    if PADDED:
        for i in range(t, GROUPS * GROUP_BYTES // 4, THREADS):
            poke_word(memory + GROUPS_AT + i * 4, 0)
    if ONE_INSIDE:
        BARRIER()
        for i in range(t, GROUPS * 128, THREADS):
            tile = memory + GROUPS_AT + (i >> 7) * GROUP_BYTES + ((i >> 6) & 1) * X_BYTES
            at = tile + panel_place(i & 63, WIDTHS[0], 64, X_WIDTH)
            poke_bits(at, ONES_WORD & 0xFFFF)


def clear_rows(base, lane, row, end):
    """Write 0 to a warp's rows of which there is no point: nothing of them is added."""
    warp_barrier()
    while row < end:
        for layer in unrolled(COUNT - 1):
            at = base + row * (WIDTH * 2) + lane * 4
            if lane * 4 < WIDTH * 2:
                poke_word(at + (LEFT_AT + layer * TILE_BYTES), 0)
                poke_word(at + (RIGHT_AT + layer * TILE_BYTES), 0)
        row += 1


# --- a tile ---------------------------------------------------------------------------------------
def give(low, high, near, width):
    """Return two values that a hidden layer gives, from column `near`, and their slopes.

    Of relu these are no slopes.
    """
    if RECTIFIED:
        word = RECTIFY(inside(low, near, width, 0), inside(high, near, width, 1))
        return word, word
    low, low_slope = ACTIVATE(low)
    high, high_slope = ACTIVATE(high)
    word = PACK(inside(low, near, width, 0), inside(high, near, width, 1))
    slopes = PACK(inside(low_slope, near, width, 0), inside(high_slope, near, width, 1))
    return word, slopes


def ahead(sums, left, bent, at, to, slopes, near, width):
    """Make what a hidden layer gives, and leave it and the slopes in shared memory."""
    for j in unrolled(WIDTH // 16):
        for h in unrolled(2):
            for r in unrolled(2):
                AT = (2 * j + h) * 4 + 2 * r
                COLUMN = 16 * j + 8 * h
                words = give(sums[AT], sums[AT + 1], near + COLUMN, width)
                left[4 * j + 2 * h + r] = words[0]
                if not RECTIFIED:
                    bent[2 * h + r] = words[1]
        poke_fragment((at ^ (32 * j)) + to, left, 4 * j)
        if not RECTIFIED:
            poke_fragment((at ^ (32 * j)) + slopes, bent, 0)


def bend(low, high, kept):
    """Return two gradients by a hidden layer's sums: `kept` are slopes, or what relu gives."""
    if RECTIFIED and BY_WORDS:
        return TIMES(PACK(low, high), ONES_ABOVE(kept))
    if RECTIFIED:
        ones = ONES_ABOVE(kept)
        return PACK(low * LOW(ones), high * HIGH(ones))
    return PACK(low * LOW(kept), high * HIGH(kept))


def back(sums, left, bent, at, kept, to):
    """Make the gradients by a hidden layer's sums of those by what it gives.

    `kept` are its slopes, which the gradients may replace, or of relu what it gives.
    """
    for j in unrolled(WIDTH // 16):
        peek_fragment((at ^ (32 * j)) + kept, bent, 0)
        for h in unrolled(2):
            for r in unrolled(2):
                AT = (2 * j + h) * 4 + 2 * r
                word = bend(sums[AT], sums[AT + 1], bent[2 * h + r])
                left[4 * j + 2 * h + r] = word
        poke_fragment((at ^ (32 * j)) + to, left, 4 * j)


def write_points_gradient(sums, lane, d_x: Rows, first, count):
    """Write the gradients by a warp's rows of x."""
    for j in unrolled(IN_WIDTH // 8):
        for r in unrolled(2):
            row = first + 8 * r + (lane >> 2)
            n = 8 * j + (lane & 3) * 2
            at = d_x.address + row * (d_x.row * 2) + n * (d_x.column * 2)
            word = PACK(sums[4 * j + 2 * r], sums[4 * j + 2 * r + 1])
            if MOVES_PAIRS:
                STORE_WORD(at, word, both(row < count, n < WIDTHS[0]))
            else:
                STORE_LOW(at, word, both(row < count, n < WIDTHS[0]))
                STORE_HIGH(at + d_x.column * 2, word, both(row < count, n + 1 < WIDTHS[0]))


def meet(group):
    """Wait for all who share a tile's rows: the warp group, or the block."""
    if SHARED:
        BARRIER()
    else:
        group_barrier(1 + group, 128)


def add_gradients(total, sums, words, memory, group, turned, turned_tail, x, y):
    """Add Q' X up for every layer; with these goes the product that the next tile begins with.

    That is of the descriptors x and y. A group does so for its own rows or, where groups share a
    tile, for the rows of all and for some layers.
    """
    for g in unrolled(ADDERS):
        if not SHARED or group == g:
            for i in unrolled(TASK_COUNT[g]):
                LAYER = TASKS[g][i]
                for r in unrolled(SOURCES):
                    AT = 2 * (i * SOURCES + r)
                    base = memory + (GROUPS_AT + r * GROUP_BYTES)
                    if not SHARED:
                        base = base + group * GROUP_BYTES
                    rows = base + (LEFT_AT + (LAYER - 1) * TILE_BYTES)
                    if LAYER == 0:
                        rows = base + turned
                    gradients = base + (RIGHT_AT + LAYER * TILE_BYTES)
                    if LAYER == COUNT - 1:
                        gradients = base + TAIL_AT + turned_tail
                    words[AT] = descriptor(gradients, 0)
                    if LAYER == 0 and ONE_INSIDE:
                        words[AT + 1] = descriptor(rows, POINTS_ACROSS)
                    else:
                        # from the one panel to the ones
                        ones = memory + ONES_AT
                        words[AT + 1] = descriptor(rows, ((ones - rows) >> 4) << 16)
            words[2 * TASK_COUNT[g] * SOURCES] = x
            words[2 * TASK_COUNT[g] * SOURCES + 1] = y
            if g == 0:
                ADD_0(total, 0, sums, 0, words)
            if g == 1:
                ADD_1(total, 0, sums, 0, words)
            if g == 2:
                ADD_2(total, 0, sums, 0, words)


def write_gradients(total, lane, row, group, plane):
    """Write a group's sums to its plane, without the rows and columns that pad them."""
    for g in unrolled(ADDERS):
        if not SHARED or group == g:
            for i in unrolled(TASK_COUNT[g]):
                LAYER = TASKS[g][i]
                for j in unrolled(TOTAL_COLUMNS[LAYER] // 8):
                    for h in unrolled(2):
                        for b in unrolled(2):
                            n = row + (lane >> 2) + 8 * h
                            k = 8 * j + (lane & 3) * 2 + b
                            value = total[TOTAL_AT[LAYER] + 4 * j + 2 * h + b]
                            there = n < WIDTHS[LAYER + 1]
                            if 8 * j < WIDTHS[LAYER]:
                                to = WEIGHTS_TO[LAYER] + k * WIDTHS[LAYER + 1] + n
                                inside_too = both(there, k < WIDTHS[LAYER])
                                store_real_if(plane + to * 4, value, inside_too)
                            if 8 * j <= ONE_COLUMN[LAYER] and ONE_COLUMN[LAYER] < 8 * j + 8:
                                to = BIASES_TO[LAYER] + n
                                of_ones = both(there, k == ONE_COLUMN[LAYER])
                                store_real_if(plane + to * 4, value, of_ones)


# --- the kernel -----------------------------------------------------------------------------------
def backward(x: Rows, layers: Layers, steps: Steps, grad: Rows, count, planes, d_x: Rows):
    """Add up a network's gradients over a group's tiles, and write those by the points.

    There is a network a row of the grid.
    """
    memory = MEMORY() + 0
    held = cuda.local.array(HELD, REAL)
    sums = cuda.local.array(SUMS, REAL)
    left = cuda.local.array(WIDTH // 4, WORD)
    bent = cuda.local.array(4, WORD)
    raw = cuda.local.array(POINTS_PER_THREAD, WORD)
    raw_tail = cuda.local.array(COTANGENTS_PER_THREAD, WORD)
    words = cuda.local.array(WORDS, WORD)
    total = cuda.local.array(TOTALS, REAL)
    for i in unrolled(TOTALS):
        total[i] = ZERO
    t = cuda.threadIdx.x
    lane = t & 31
    prepare(memory, t, layers, steps, held)
    fill(memory, t)
    copy_fence()
    BARRIER()
    points: Rows = own_rows(x, steps.x)
    cotangents: Rows = own_rows(grad, steps.out)
    moved: Rows = own_rows(d_x, steps.d_x)
    group = same(t >> 7)
    u = t & 127
    row = (u >> 5) * 16
    near = (lane & 3) * 2
    bias = memory + BIAS_AT[0] + near * 4
    base = memory + GROUPS_AT + group * GROUP_BYTES
    at = place_of_fragment(lane, row, WIDTH)
    head = descriptor(memory + WEIGHTS_AT[0], HEAD)
    inner = descriptor(memory + WEIGHTS_AT[1], INNER)
    inner_back = descriptor(memory + WEIGHTS_AT[1], ALONG)
    tail_back = descriptor(memory + WEIGHTS_AT[COUNT - 1], ALONG)
    head_back = descriptor(memory + WEIGHTS_AT[0], ALONG)
    blocks = cuda.gridsize(1) // THREADS
    first = (cuda.blockIdx.x * GROUPS + group) * 64
    lag = 0
    if SHARED:  # groups go on as long as the block's first one has rows
        lag = group * 64
    step = blocks * (GROUPS * 64)
    turned, turned_tail = 0, 0
    x_at = base + turned
    tail_at = base + TAIL_AT + turned_tail
    FETCH_POINTS(raw, x_at, u, points, first, count)
    if TAIL_TWO:
        FETCH_COTANGENTS(raw_tail, tail_at, u, cotangents, first, count)
    fetch_commit()
    FETCH_WAIT()
    SETTLE_POINTS(raw, x_at, u, first, count)
    if TAIL_TWO:
        SETTLE_COTANGENTS(raw_tail, tail_at, u, first, count)
    copy_fence()
    meet(group)
    begin(sums, bias)
    MULTIPLY_FIRST(sums, descriptor(x_at, ALONG), head)
    while first - lag < count:
        read, read_tail = turned, turned_tail
        turned ^= X_BYTES
        next_x = base + turned
        next_tail = tail_at
        if TAIL_TWO:
            turned_tail ^= TAIL_BYTES
            next_tail = base + TAIL_AT + turned_tail
            FETCH_COTANGENTS(raw_tail, next_tail, u, cotangents, first + step, count)
        else:
            FETCH_COTANGENTS(raw_tail, tail_at, u, cotangents, first, count)
            fetch_commit()
        FETCH_POINTS(raw, next_x, u, points, first + step, count)
        fetch_commit()
        keep, slopes = base + LEFT_AT, base + RIGHT_AT
        kept = keep if RECTIFIED else slopes
        ahead(sums, left, bent, at, keep, slopes, near, width_of(0))
        for layer in range(1, COUNT - 1):
            begin(sums, bias + layer * (WIDTH * 4))
            MULTIPLY(sums, left, inner + (layer - 1) * (WIDTH * WIDTH * 2 // 16))
            to = layer * TILE_BYTES
            ahead(sums, left, bent, at, keep + to, slopes + to, near, width_of(layer))
        if not TAIL_TWO:
            FETCH_WAIT_TAIL()
            SETTLE_COTANGENTS(raw_tail, tail_at, u, first, count)
            copy_fence()
            group_barrier(1 + group, 128)
        warp_barrier()
        MULTIPLY_LAST_BACK(sums, descriptor(tail_at, ALONG), tail_back)
        to = (COUNT - 2) * TILE_BYTES
        back(sums, left, bent, at, kept + to, slopes + to)
        for layer in range(COUNT - 2, 0, -1):
            MULTIPLY_BACK(sums, left, inner_back + (layer - 1) * (WIDTH * WIDTH * 2 // 16))
            to = (layer - 1) * TILE_BYTES
            back(sums, left, bent, at, kept + to, slopes + to)
        if MOVES:
            MULTIPLY_MOVED(sums, left, head_back)
            write_points_gradient(sums, lane, moved, first + row, count)
        if first + 64 > count:
            clear_rows(base, lane, max(row, count - first), row + 16)
        FETCH_WAIT()
        SETTLE_POINTS(raw, next_x, u, first + step, count)
        if TAIL_TWO:
            SETTLE_COTANGENTS(raw_tail, next_tail, u, first + step, count)
        copy_fence()
        meet(group)
        begin(sums, bias)
        rows = descriptor(next_x, ALONG)
        add_gradients(total, sums, words, memory, group, read, read_tail, rows, head)
        # all that the tile left in shared memory has been read
        meet(group)
        x_at, tail_at = next_x, next_tail
        first += step
    part = cuda.blockIdx.y * blocks + cuda.blockIdx.x
    if not SHARED:
        part = part * GROUPS + group
    write_gradients(total, lane, row, group, planes + part * (LENGTH * 4))


#: Strides are in elements, `planes` is an address.
GROUP_BACKWARD = Schema(backward)
