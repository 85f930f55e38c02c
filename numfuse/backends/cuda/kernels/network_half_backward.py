"""The gradients of a whole network in 16 bits as one launch: see `network_half`.

A block takes a tile of rows. Its warps first go through all layers and back with rows of their own,
and leave in shared memory what went into each layer and the gradients by each layer's sums, both in
16 bits. Then every warp adds its part of one layer's weights' gradient up over all rows of the
tile: these sums stay in registers for the whole launch. So a tile has two barriers.

Where a layer's sums go, the slopes of its activation are kept until their gradients replace them.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.intrinsics import shuffle_xor, warp_barrier
from numfuse.backends.cuda.compile.scalars import both
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_fragments import (
    peek_word,
    place_of_columns,
    place_of_rows,
    poke_word,
    store_real_if,
)
from numfuse.backends.cuda.kernels.network_half import column_of, inside, multiply, prepare
from numfuse.backends.cuda.kernels.network_layers import Layers, Rows, Steps, own_rows
from numfuse.backends.cuda.kernels.network_passes import width_of


# --- a warp's own rows ----------------------------------------------------------------------------
def leave_points(at, given):
    """Leave a warp's rows of x in shared memory, from `at` on, which is this lane's place."""
    for i in unrolled(PIECES):
        for c in unrolled(IN_WIDTH // 16):
            for h in unrolled(2):
                for r in unrolled(2):
                    PLACE = ((16 * i + 8 * r) * (IN_WIDTH + 8) + 16 * c + 8 * h) * 2
                    poke_word(at + PLACE, given[(i * (IN_WIDTH // 16) + c) * 4 + 2 * h + r])


def leave_cotangents(at, tail):
    """Leave a warp's rows of the cotangents there."""
    for i in unrolled(PIECES):
        for c in unrolled(OUT_WIDTH // 16):
            for h in unrolled(2):
                for r in unrolled(2):
                    PLACE = ((16 * i + 8 * r) * (OUT_WIDTH + 8) + 16 * c + 8 * h) * 2
                    poke_word(at + PLACE, tail[(i * (OUT_WIDTH // 16) + c) * 4 + 2 * h + r])


def ahead(sums, given, left, made, weights, bias, to, slopes, near, width, first):
    """Make what a hidden layer gives, and leave it and the slopes in shared memory."""
    for j in unrolled(WIDTH // 16):
        multiply(sums, given, left, weights + j * 32, bias + j * 64, first)
        for i in unrolled(PIECES):
            for h in unrolled(2):
                for r in unrolled(2):
                    AT = (i * 2 + h) * 4 + 2 * r
                    PLACE = ((16 * i + 8 * r) * (WIDTH + 8) + 16 * j + 8 * h) * 2
                    COLUMN = 16 * j + 8 * h
                    low, low_slope = ACTIVATE(sums[AT])
                    high, high_slope = ACTIVATE(sums[AT + 1])
                    low = inside(low, near, width, COLUMN)
                    high = inside(high, near, width, COLUMN + 1)
                    low_slope = inside(low_slope, near, width, COLUMN)
                    high_slope = inside(high_slope, near, width, COLUMN + 1)
                    word = PACK(low, high)
                    made[(i * (WIDTH // 16) + j) * 4 + 2 * h + r] = word
                    poke_word(to + PLACE, word)
                    poke_word(slopes + PLACE, PACK(low_slope, high_slope))


def back(sums, tail, left, made, weights, slopes, last):
    """Make the gradients by a layer's sums, of those by the sums of the next one or the results.

    They replace the slopes.
    """
    for j in unrolled(WIDTH // 16):
        for i in unrolled(PIECES * 8):
            sums[i] = ZERO
        if last:
            MULTIPLY_LAST_BACK(sums, tail, weights + j * (16 * (OUT_WIDTH + 8) * 2))
        else:
            MULTIPLY_BACK(sums, left, weights + j * (16 * (WIDTH + 8) * 2))
        for i in unrolled(PIECES):
            for h in unrolled(2):
                for r in unrolled(2):
                    AT = (i * 2 + h) * 4 + 2 * r
                    PLACE = ((16 * i + 8 * r) * (WIDTH + 8) + 16 * j + 8 * h) * 2
                    slope = peek_word(slopes + PLACE)
                    word = PACK(sums[AT] * LOW(slope), sums[AT + 1] * HIGH(slope))
                    made[(i * (WIDTH // 16) + j) * 4 + 2 * h + r] = word
                    poke_word(slopes + PLACE, word)


def write_points_gradient(sums, made, words, lane, weights, d_x: Rows, first, count):
    """Write the gradients by a warp's rows of x."""
    for group in unrolled(IN_WIDTH // (8 * IN_PAIRS)):
        for pair in unrolled(IN_PAIRS // 2):
            for i in unrolled(PIECES * 8):
                sums[i] = ZERO
            PLACE = group * (IN_PAIRS // 2) + pair
            MULTIPLY_BACK(sums, made, weights + PLACE * (16 * (WIDTH + 8) * 2))
            for i in unrolled(PIECES):
                for h in unrolled(2):
                    for r in unrolled(2):
                        AT = (i * 2 + h) * 4 + 2 * r
                        word = PACK(sums[AT], sums[AT + 1])
                        words[(i * 2 + r) * IN_PAIRS + 2 * pair + h] = word
        column = group * (8 * IN_PAIRS) + (lane & 3) * (2 * IN_PAIRS)
        PUT_MOVED(words, lane, d_x, first, count, column)


def clear_rows(memory, lane, row, end):
    """Write 0 to rows of which there is no point: nothing of them is added."""
    warp_barrier()
    while row < end:
        for layer in unrolled(COUNT):
            left = memory + LEFT_AT[layer] + row * ((DOWN[layer] + 8) * 2)
            right = memory + RIGHT_AT[layer] + row * ((ACROSS[layer] + 8) * 2)
            for n in range(lane * 2, DOWN[layer], 64):
                poke_word(left + n * 2, 0)
            for n in range(lane * 2, ACROSS[layer], 64):
                poke_word(right + n * 2, 0)
        row += 1


# --- a warp's part of the weights' gradients ------------------------------------------------------
def part_of(warp):
    """Return a warp's part: whose layer's (0: the first, 1: a hidden, 2: the last one's, 3: none),

    whether the bias's gradient goes with it, where the factors begin, the first row, the numbers of
    rows and columns of the weights, and where the gradients of weights and bias go.
    """
    for u in unrolled(PARTS):
        if warp == u:
            return (
                PART_KIND[u],
                PART_ROW[u] == 0,
                PART_LEFT[u],
                PART_RIGHT[u],
                PART_ROW[u],
                WIDTHS[PART_LAYER[u]],
                WIDTHS[PART_LAYER[u] + 1],
                PART_TO[u],
                PART_BIAS_TO[u],
            )
    return 3, False, 0, 0, 0, 0, 0, 0, 0


def add_part(total, columns, lane, x, y, rows, kind, added):
    """Add a tile's rows to a warp's sums; the factors begin at `x` and `y`."""
    for KIND in unrolled(3):
        if kind == KIND:
            left = x + place_of_columns(lane, KIND_DOWN[KIND] + 8)
            right = y + place_of_rows(lane, KIND_ACROSS[KIND] + 8)
            for k in range(0, rows, 16):
                at = left + k * ((KIND_DOWN[KIND] + 8) * 2)
                to = right + k * ((KIND_ACROSS[KIND] + 8) * 2)
                if KIND == 0:
                    if added:
                        OUTER_FIRST_ADDED(total, columns, at, to)
                    else:
                        OUTER_FIRST(total, columns, at, to)
                if KIND == 1:
                    if added:
                        OUTER_ADDED(total, columns, at, to)
                    else:
                        OUTER(total, columns, at, to)
                if KIND == 2:
                    if added:
                        OUTER_LAST_ADDED(total, columns, at, to)
                    else:
                        OUTER_LAST(total, columns, at, to)


def write_part(total, columns, lane, planes, kind, added, row, rows, count, to, bias_to):
    """Write a warp's sums to its block's plane, without the rows and columns that pad them."""
    for KIND in unrolled(3):
        if kind == KIND:
            near = (lane & 3) * (2 * KIND_PAIRS[KIND])
            for i in unrolled(PIECES_DOWN[KIND]):
                for h in unrolled(2):
                    k = row + (16 * i + 8 * h) + (lane >> 2)
                    if KIND == 0:
                        k = column_of(k, IN_PAIRS)
                    at = planes + (to + k * count + near) * 4
                    AT = i * PIECES_ACROSS[KIND] * 4 + 2 * h
                    if KIND == 0:
                        STORE_FIRST(total, AT, at, near, count, k < rows)
                    if KIND == 1:
                        STORE_INNER(total, AT, at, near, count, k < rows)
                    if KIND == 2:
                        STORE_LAST(total, AT, at, near, count, k < rows)
            for j in unrolled(PIECES_ACROSS[KIND]):
                value = columns[j]
                value = value + shuffle_xor(value, 1)
                value = value + shuffle_xor(value, 2)
                n = 8 * j + (lane >> 2)
                if KIND == 2:
                    n = column_of(n, OUT_PAIRS)
                at = planes + (bias_to + n) * 4
                store_real_if(at, value, both(both(added, (lane & 3) == 0), n < count))


# --- the kernel -----------------------------------------------------------------------------------
def backward(x: Rows, layers: Layers, steps: Steps, grad: Rows, count, planes, d_x: Rows):
    """Add up a network's gradients over a block's tiles, and write those by the points.

    There is a network a row of the grid.
    """
    memory = WINDOW(cuda.shared.array(0, dtype=REAL))
    held = cuda.local.array(HELD, REAL)
    sums = cuda.local.array(PIECES * 8, REAL)
    raw = cuda.local.array(RAW_POINTS, WORD)
    raw_tail = cuda.local.array(RAW_RESULTS, WORD)
    given = cuda.local.array(PIECES * (IN_WIDTH // 4), WORD)
    tail = cuda.local.array(PIECES * (OUT_WIDTH // 4), WORD)
    left = cuda.local.array(PIECES * (WIDTH // 4), WORD)
    made = cuda.local.array(PIECES * (WIDTH // 4), WORD)
    words = cuda.local.array(PIECES * 2 * IN_PAIRS, WORD)
    total = cuda.local.array(TOTALS, REAL)
    columns = cuda.local.array(COLUMNS, REAL)
    for i in unrolled(TOTALS):
        total[i] = ZERO
    for i in unrolled(COLUMNS):
        columns[i] = ZERO
    t = cuda.threadIdx.x
    lane = t & 31
    warp = t >> 5
    kind, added, left_at, right_at, row, rows, width, weights_to, bias_to = part_of(warp)
    prepare(memory, t, layers, steps, held)
    BARRIER()
    points: Rows = own_rows(x, steps.x)
    cotangents: Rows = own_rows(grad, steps.out)
    moved: Rows = own_rows(d_x, steps.d_x)
    g, s = lane >> 2, lane & 3
    bias = memory + BIAS_AT[0] + s * 8
    by_rows = memory + place_of_rows(lane, WIDTH + 8)
    by_columns = memory + place_of_columns(lane, WIDTH + 8)
    tail_at = memory + WEIGHTS_AT[COUNT - 1] + place_of_columns(lane, OUT_WIDTH + 8)
    first = cuda.blockIdx.x * ROWS
    while first < count:
        there = min(count - first, ROWS)
        own = warp * (16 * PIECES)
        while own < there:
            end = first + there
            LOAD_POINTS(raw, lane, points, first + own, end)
            LOAD_RESULTS(raw_tail, lane, cotangents, first + own, end)
            PLACE_POINTS(given, raw, lane, first + own, end)
            PLACE_RESULTS(tail, raw_tail, lane, first + own, end)
            at = memory + (own + g) * ((IN_WIDTH + 8) * 2) + s * 4
            leave_points(at + LEFT_AT[0], given)
            at = memory + (own + g) * ((OUT_WIDTH + 8) * 2) + s * 4
            leave_cotangents(at + RIGHT_AT[COUNT - 1], tail)
            at = memory + (own + g) * ((WIDTH + 8) * 2) + s * 4
            keep, slopes = at + LEFT_AT[1], at + RIGHT_AT[0]
            head, far = by_rows + WEIGHTS_AT[0], width_of(0)
            ahead(sums, given, left, made, head, bias, keep, slopes, 2 * s, far, True)
            for layer in range(1, COUNT - 1):
                for i in unrolled(PIECES * (WIDTH // 4)):
                    left[i] = made[i]
                weights = by_rows + (WEIGHTS_AT[1] + (layer - 1) * (WIDTH * (WIDTH + 8) * 2))
                step = layer * (ROWS * (WIDTH + 8) * 2)
                begin = bias + layer * (WIDTH * 4)
                to, far = keep + step, width_of(layer)
                down = slopes + step
                ahead(sums, given, left, made, weights, begin, to, down, 2 * s, far, False)
            step = (COUNT - 2) * (ROWS * (WIDTH + 8) * 2)
            back(sums, tail, left, made, tail_at, slopes + step, True)
            for layer in range(COUNT - 2, 0, -1):
                for i in unrolled(PIECES * (WIDTH // 4)):
                    left[i] = made[i]
                weights = by_columns + (WEIGHTS_AT[1] + (layer - 1) * (WIDTH * (WIDTH + 8) * 2))
                step = (layer - 1) * (ROWS * (WIDTH + 8) * 2)
                back(sums, tail, left, made, weights, slopes + step, False)
            if MOVES:
                weights = by_columns + WEIGHTS_AT[0]
                write_points_gradient(sums, made, words, lane, weights, moved, first + own, end)
            if own + 16 * PIECES > there:
                clear_rows(memory, lane, there, own + 16 * PIECES)
            own += WARPS * (16 * PIECES)
        BARRIER()
        add_part(total, columns, lane, memory + left_at, memory + right_at, there, kind, added)
        BARRIER()
        first += cuda.gridsize(1) // THREADS * ROWS
    blocks = cuda.gridsize(1) // THREADS
    plane = planes + (cuda.blockIdx.y * blocks + cuda.blockIdx.x) * (LENGTH * 4)
    write_part(total, columns, lane, plane, kind, added, row, rows, width, weights_to, bias_to)


#: Strides are in elements, `planes` is an address.
HALF_BACKWARD = Schema(backward)
