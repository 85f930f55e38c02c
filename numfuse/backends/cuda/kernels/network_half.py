"""A whole network in float16 or bfloat16 as one launch: a warp takes rows through all layers.

The weights of all layers lie in a block's shared memory as long as it stays, and what goes from a
layer to the next is in the registers of the warp that has the rows (`network_fragments`): warps
wait for nobody. Sums, biases and activations are float32; between layers a value has 16 bits.

The columns of x and of the result are numbered so that a lane's values are neighbours in memory: of
8 PAIRS columns it has 2 PAIRS together (`column_of`). The first layer's rows of weights, and the
last one's columns, lie in that order.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.intrinsics import least, quotient
from numfuse.backends.cuda.compile.scalars import both, select
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_fragments import (
    load_bits,
    peek_reals,
    place_of_rows,
    poke_real,
    word_if,
    word_of,
)
from numfuse.backends.cuda.kernels.network_layers import Layers, Rows, Steps, own_layer, own_rows
from numfuse.backends.cuda.kernels.network_passes import width_of


def column_of(place, pairs):
    """Return the column of x, or of the result, that a place among its columns stands for.

    With one pair it is the place.
    """
    group = place // (8 * pairs)
    inner = place - group * (8 * pairs)
    return group * (8 * pairs) + ((inner & 7) >> 1) * (2 * pairs) + (inner >> 3) * 2 + (inner & 1)


# --- what a block keeps in shared memory ----------------------------------------------------------
def bring(to, t, layer, held, shape, padded, turned):
    """Bring a layer's weights and bias to shared memory: `shape` of `padded`, with 0 around them.

    Neighbouring threads read neighbours in memory: of a row, or where `turned` is 1 of a column.
    """
    weights, row, column, bias, step = layer
    rows, columns, in_pairs, out_pairs = shape
    down, across, bias_to = padded
    along = across + (down - across) * turned
    for first in range(t, down * across, THREADS * HELD):
        for v in unrolled(HELD):
            i = least(first + v * THREADS, down * across - 1)
            far = quotient(i, along)
            near = i - far * along
            p = far + (near - far) * turned
            q = near + (far - near) * turned
            k, n = column_of(p, in_pairs), column_of(q, out_pairs)
            value = LOAD(weights, least(k, rows - 1) * row + least(n, columns - 1) * column)
            held[v] = select(both(k < rows, n < columns), value, ZERO)
        for v in unrolled(HELD):
            i = least(first + v * THREADS, down * across - 1)
            far = quotient(i, along)
            near = i - far * along
            p = far + (near - far) * turned
            q = near + (far - near) * turned
            POKE_HALF(to + PLACE_OF(p, q, down, across), held[v])
    for q in range(t, across, THREADS):
        n = column_of(q, out_pairs)
        value = ZERO
        if bias != 0 and n < columns:
            value = LOAD(bias, n * step)
        poke_real(bias_to + q * 4, value)


def prepare(memory, t, layers: Layers, steps: Steps, held):
    """Bring the weights and biases of all layers of the block's network to shared memory."""
    network = cuda.blockIdx.y
    for i in unrolled(COUNT):
        shape = WIDTHS[i], WIDTHS[i + 1], SPREAD[i], SPREAD[i + 1]
        padded = DOWN[i], ACROSS[i], memory + BIAS_AT[i]
        layer = own_layer(layers, steps, i, network)
        bring(memory + WEIGHTS_AT[i], t, layer, held, shape, padded, TURNED[i])


# --- rows of x and of the result ------------------------------------------------------------------
# What follows is bound once for x and once for the result (SIDE): see `plan.half_networks`.
def load_rows(raw, lane, x: Rows, first, count):
    """Load a warp's rows, from `first` on, as they lie in memory: nothing waits for them here.

    What is not there is read as its neighbour: there is no branch.
    """
    for i in unrolled(PIECES):
        for r in unrolled(2):
            row = first + (16 * i + 8 * r) + (lane >> 2)
            begin = x.address + least(row, count - 1) * (x.row * 2)
            for group in unrolled(SIDE_WIDTH // (8 * SIDE_PAIRS)):
                column = group * (8 * SIDE_PAIRS) + (lane & 3) * (2 * SIDE_PAIRS)
                if WIDE:
                    words = LOAD_WORDS(begin + column * 2)
                for j in unrolled(SIDE_PAIRS):
                    AT = (2 * i + r) * (SIDE_WIDTH // 8) + group * SIDE_PAIRS + j
                    if WIDE:
                        raw[AT] = words[j]
                    else:
                        n = column + 2 * j
                        step = x.column * 2
                        raw[2 * AT] = load_bits(begin + least(n, SIDE_COLUMNS - 1) * step)
                        raw[2 * AT + 1] = load_bits(begin + least(n + 1, SIDE_COLUMNS - 1) * step)


def place_rows(found, raw, lane, first, count):
    """Make fragments of the rows that `load_rows` loaded; 0 behind the last of `count` rows."""
    for i in unrolled(PIECES):
        for r in unrolled(2):
            there = first + (16 * i + 8 * r) + (lane >> 2) < count
            for group in unrolled(SIDE_WIDTH // (8 * SIDE_PAIRS)):
                column = group * (8 * SIDE_PAIRS) + (lane & 3) * (2 * SIDE_PAIRS)
                for j in unrolled(SIDE_PAIRS):
                    FROM = (2 * i + r) * (SIDE_WIDTH // 8) + group * SIDE_PAIRS + j
                    PLACE = SIDE_PAIRS * group + j
                    AT = (i * (SIDE_WIDTH // 16) + PLACE // 2) * 4 + PLACE % 2 * 2 + r
                    if WIDE:
                        found[AT] = word_if(there, raw[FROM])
                    else:
                        n = column + 2 * j
                        low = word_if(both(there, n < SIDE_COLUMNS), raw[2 * FROM])
                        high = word_if(both(there, n + 1 < SIDE_COLUMNS), raw[2 * FROM + 1])
                        found[AT] = word_of(low, high)


def put(words, lane, out: Rows, first, count, column):
    """Write the neighbours of 8 SIDE_PAIRS columns that a lane has, from `column` on."""
    for i in unrolled(PIECES):
        for r in unrolled(2):
            row = first + (16 * i + 8 * r) + (lane >> 2)
            begin = out.address + row * (out.row * 2)
            if WIDE:
                if row < count:
                    STORE_WORDS(begin + column * 2, words, (i * 2 + r) * SIDE_PAIRS)
            else:
                for j in unrolled(SIDE_PAIRS):
                    word = words[(i * 2 + r) * SIDE_PAIRS + j]
                    n = column + 2 * j
                    at = begin + n * (out.column * 2)
                    STORE_LOW(at, word, both(row < count, n < SIDE_COLUMNS))
                    at = at + out.column * 2
                    STORE_HIGH(at, word, both(row < count, n + 1 < SIDE_COLUMNS))


# --- the kernel -----------------------------------------------------------------------------------
def start(sums, at):
    """Let the sums of 16 columns begin with their biases, of which a lane's first is `at`."""
    for h in unrolled(2):
        bias = peek_reals(at + h * 32)
        for i in unrolled(PIECES):
            for r in unrolled(2):
                for b in unrolled(2):
                    sums[(i * 2 + h) * 4 + 2 * r + b] = bias[b]


def inside(value, near, width, place):
    """Return a value, 0 behind the columns of a layer; `near` is this lane's first one."""
    if FULL:
        return value
    return select(near + place < width, value, ZERO)


def multiply(sums, given, left, weights, bias, first):
    """Make the sums of 16 columns of a hidden layer: of x where it is the first, else of `left`."""
    start(sums, bias)
    if first:
        MULTIPLY_FIRST(sums, given, weights)
    else:
        MULTIPLY(sums, left, weights)


def hidden(sums, given, left, made, weights, bias, near, width, first):
    """Make what a hidden layer gives: of x where it is the first, else of what the last one gave.

    `weights` and `bias` are where this lane reads them.
    """
    for j in unrolled(WIDTH // 16):
        multiply(sums, given, left, weights + j * 32, bias + j * 64, first)
        for i in unrolled(PIECES):
            for h in unrolled(2):
                for r in unrolled(2):
                    AT = (i * 2 + h) * 4 + 2 * r
                    low = inside(ACTIVATE(sums[AT]), near, width, 16 * j + 8 * h)
                    high = inside(ACTIVATE(sums[AT + 1]), near, width, 16 * j + 8 * h + 1)
                    made[(i * (WIDTH // 16) + j) * 4 + 2 * h + r] = PACK(low, high)


def write_results(sums, left, words, lane, weights, bias, out: Rows, first, count):
    """Write the results of a warp's rows: the last layer is a product alone."""
    for group in unrolled(OUT_WIDTH // (8 * OUT_PAIRS)):
        for pair in unrolled(OUT_PAIRS // 2):
            PLACE = group * (OUT_PAIRS // 2) + pair
            start(sums, bias + PLACE * 64)
            MULTIPLY_LAST(sums, left, weights + PLACE * 32)
            for i in unrolled(PIECES):
                for h in unrolled(2):
                    for r in unrolled(2):
                        AT = (i * 2 + h) * 4 + 2 * r
                        word = PACK(sums[AT], sums[AT + 1])
                        words[(i * 2 + r) * OUT_PAIRS + 2 * pair + h] = word
        column = group * (8 * OUT_PAIRS) + (lane & 3) * (2 * OUT_PAIRS)
        PUT_RESULTS(words, lane, out, first, count, column)


def forward(x: Rows, layers: Layers, steps: Steps, out: Rows, count):
    """Write the results of a network, of which there is one a row of the grid.

    A warp takes every so many rows of x.
    """
    memory = WINDOW(cuda.shared.array(0, dtype=REAL))
    held = cuda.local.array(HELD, REAL)
    sums = cuda.local.array(PIECES * 8, REAL)
    raw = cuda.local.array(RAW_POINTS, WORD)
    given = cuda.local.array(PIECES * (IN_WIDTH // 4), WORD)
    left = cuda.local.array(PIECES * (WIDTH // 4), WORD)
    made = cuda.local.array(PIECES * (WIDTH // 4), WORD)
    words = cuda.local.array(PIECES * 2 * OUT_PAIRS, WORD)
    t = cuda.threadIdx.x
    lane = t & 31
    prepare(memory, t, layers, steps, held)
    BARRIER()
    own: Rows = own_rows(x, steps.x)
    to: Rows = own_rows(out, steps.out)
    head = memory + WEIGHTS_AT[0] + place_of_rows(lane, WIDTH + 8)
    inner = memory + WEIGHTS_AT[1] + place_of_rows(lane, WIDTH + 8)
    tail = memory + WEIGHTS_AT[COUNT - 1] + place_of_rows(lane, OUT_WIDTH + 8)
    near = (lane & 3) * 2
    bias = memory + BIAS_AT[0] + near * 4
    first = (cuda.grid(1) >> 5) * (16 * PIECES)
    step = (cuda.gridsize(1) >> 5) * (16 * PIECES)
    if POINTS_AHEAD:
        LOAD_POINTS(raw, lane, own, first, count)
    while first < count:
        if not POINTS_AHEAD:
            LOAD_POINTS(raw, lane, own, first, count)
        PLACE_POINTS(given, raw, lane, first, count)
        hidden(sums, given, left, made, head, bias, near, width_of(0), True)
        if POINTS_AHEAD:
            # (the next rows are on their way while these go through the other layers)
            LOAD_POINTS(raw, lane, own, first + step, count)
        for layer in range(1, COUNT - 1):
            for i in unrolled(PIECES * (WIDTH // 4)):
                left[i] = made[i]
            at = (layer - 1) * (WIDTH * (WIDTH + 8) * 2)
            begin = bias + layer * (WIDTH * 4)
            hidden(sums, given, left, made, inner + at, begin, near, width_of(layer), False)
        last = bias + (COUNT - 1) * (WIDTH * 4)
        write_results(sums, made, words, lane, tail, last, to, first, count)
        first += step


#: Strides are in elements.
HALF_FORWARD = Schema(forward)
