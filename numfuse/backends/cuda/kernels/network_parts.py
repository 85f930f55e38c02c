"""The products of a network in float32 by Hopper's warp groups: wgmma of three bfloat16 parts.

x = x0 + x1 + x2, each part the nearest bfloat16 to what those before left ("bf16x6"), and a
product has two sums for each result, as in `network_split`. There every warp splits what it reads,
each weight again; here a value is split once:

- Weights by a launch before (`split_weights`), to images of the slices that a block's ring takes,
  in the swizzle that wgmma reads: 16 or 32 values of K along a row, all columns of the result one
  below the other. Images for a forward and for a backward lie one behind the other.
- A layer's inputs, which lie in the tile as float32, in the registers of the group that multiplies
  them: 64 rows of X, or 64 columns of it in the gradient of the weights.
- The gradients by a layer's sums, Q, where a pass makes them: they lie in shared memory as parts
  alone, which wgmma reads along their rows (for the gradients by a layer's inputs) and across them
  (for those of its weights).

So a backward has one tile of float32: the pass takes from it the gradients by a layer's results,
and leaves there what went into the layer before.

A group has 64 rows and all columns of sums. Lane 4 g + s of its warp w has, of 16 rows from 16 w
on, those of fragments, g and g + 8: which rows of the tile these are, who reads them says. They are
neighbours, 2 g and 2 g + 1, where a lane reads pairs of neighbours at a pitch of 4 beyond a
multiple of 32 values, so that 16 lanes meet no bank twice.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.engines import copy_fence, grid_release
from numfuse.backends.cuda.compile.intrinsics import same
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network import left_at
from numfuse.backends.cuda.kernels.network_layers import MOST_LAYERS, Layers, Steps, own_layer
from numfuse.backends.cuda.kernels.network_panels import GROUP_ROWS, descriptor, panel_place
from numfuse.backends.cuda.kernels.network_part_sums import ROWS_TOGETHER
from numfuse.backends.cuda.kernels.network_passes import (
    again_step,
    first_step,
    load_sums,
    width_of,
)
from numfuse.backends.cuda.kernels.network_split import DEALT


# --- the weights' images --------------------------------------------------------------------------
def split_weights(layers: Layers, steps: Steps, images, network_step):
    """Write the parts of all weights between hidden layers, in the order of a ring's slices.

    A thread has two values of K of one column. What is no weight is 0.
    """
    grid_release()  # (the network's launch waits before it asks for an image)
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    network = cuda.blockIdx.y
    square = WIDTH * WIDTH // 2
    image = i // square
    j = i - image * square
    layer, back = 1 + image // IMAGES, image % IMAGES
    if image < (COUNT - 2) * IMAGES:
        weights, row, column, _bias, _step = own_layer(layers, steps, layer, network)
        rows, columns = width_of(layer - 1), width_of(layer)
        # neighbouring threads have neighbours of a row of weights that lie as rows
        n, k = j % WIDTH, j // WIDTH * 2
        place = k
        if back == 1:
            n, k = j // (WIDTH // 2), j % (WIDTH // 2) * 2
            row, column, rows, columns = column, row, columns, rows
            place = dealt(k)
        low, high = ZERO, ZERO
        if n < columns:
            if k < rows:
                low = LOAD(weights, k * row + n * column)
            if k + 1 < rows:
                high = LOAD(weights, (k + 1) * row + n * column)
        at = images + network * network_step
        at = at + (layer - 1) * (IMAGES * IMAGE_BYTES) + back * IMAGE_BYTES
        at = at + place // SLICE * STAGE_BYTES + panel_place(n, place % SLICE, WIDTH, SLICE)
        STORE_PARTS(at, low, high)


#: `images` is an address, `network_step` in bytes, other strides in elements.
SPLIT = Schema(
    split_weights,
    u64=" ".join(f"layers_l{i}_{name}" for i in range(MOST_LAYERS) for name in ("weights", "bias")),
)


# --- products -------------------------------------------------------------------------------------
def copy_image(memory, t, image, number):
    """Copy the image of a slice to its stage."""
    to = WEIGHTS_AT + number % STAGES * STAGE + t * 4
    address = image + (number * STAGE_BYTES + t * 16)
    for v in unrolled((STAGE + (4 * THREADS - 1)) // (4 * THREADS)):
        here, there = to + v * (4 * THREADS), address + v * (16 * THREADS)
        if (v + 1) * (4 * THREADS) <= STAGE:
            COPY_FEW(memory, here, there)
        else:
            if t * 4 < STAGE - v * (4 * THREADS):
                COPY_FEW(memory, here, there)


def open_images(memory, t, image, row, column, rows, columns):
    """Begin to copy the first slices of a layer's image; nobody reads the ring."""
    slices = ((columns if BACK else rows) + (SLICE - 1)) // SLICE
    for number in unrolled(STAGES - 1):
        if number < slices:
            copy_image(memory, t, image + BACK * IMAGE_BYTES, number)
        COMMIT()


def next_slice(memory, t, image, number, slices, stage):
    """Wait for a slice, begin to copy a later one, and return the slice as a factor.

    When all threads are here, the slice before was read: its stage is the next to be filled.
    """
    ARRIVED()
    copy_fence()
    BARRIER()
    if number + (STAGES - 1) < slices:
        copy_image(memory, t, image, number + (STAGES - 1))
    COMMIT()
    return descriptor(memory + (WEIGHTS_AT + stage * STAGE) * 4, IMAGE_REST)


def multiply_images(total, memory, t, image, row, column, rows, columns, last_row):
    """Add the product of the tile's rows and a layer's weights to the sums.

    `open_images` has begun it; behind it the ring is read until the next barrier.
    """
    words = cuda.local.array(WORDS, WORD)
    slices = (rows + (SLICE - 1)) // SLICE
    left = left_at(t)
    stage = 0
    for number in range(slices):
        y = next_slice(memory, t, image, number, slices, stage)
        SPLIT_ALONG(words, memory, left)
        MULTIPLY(total, words, y)
        left += SLICE
        stage = stage + 1 if stage < STAGES - 1 else 0


def multiply_beside(
    total, memory, t, image, columns, ahead, given, made, weights, count, layer, sums
):
    """Add the product of Q and a layer's weights to the sums, beside a pass.

    `columns` are Q's. While a slice is multiplied, threads make a share of what went into that
    layer, the results of `layer`, in the tile: nobody needs anything else of it.
    """
    slices = (columns + (SLICE - 1)) // SLICE
    group = same(t >> 7)
    column, point = t % WIDTH, t // WIDTH
    inside = column < width_of(layer)
    place = point * (MEMBERS * PITCH) + column
    kept = point * (MEMBERS * WIDTH) + column
    if FETCHED:
        if layer > 0:
            load_sums(ahead, sums, kept, point, count)
    stage = 0
    for number in range(WIDTH // SLICE):
        y = next_slice(memory, t, image + IMAGE_BYTES, number, slices, stage)
        if number < slices:
            at = PARTS_AT * 4 + group * (GROUP_ROWS * 128)
            at = at + number * SLICE // 64 * (ROWS * 128) + number * SLICE % 64 * 2
            START(total, descriptor(memory + at, ALONG_REST), y)
        for _ in range(SHARE):
            if point < count:
                if layer > 0:
                    again_step(
                        memory, ahead, given, made, weights, count, sums, inside, point, place, kept
                    )
                else:
                    first_step(memory, given, made, weights, count, column, point, place)
            point += AT_ONCE * PARTS
            place += AT_ONCE * STRIDE * PITCH
            kept += AT_ONCE * STRIDE * WIDTH
        WAIT(total)
        stage = stage + 1 if stage < STAGES - 1 else 0


def add_rows(total, memory, t, down, first, end):
    """Add X' Q to the sums: for 64 columns of X, a warp's from `down` on, and all columns of Q.

    Rows come by ROWS_TOGETHER, and those behind the last point's are 0.
    """
    words = cuda.local.array(WORDS, WORD)
    near = (t & 3) * (DEALT * PITCH) + ((t & 31) >> 2) * DEALT + down
    for row in range(first, end, ROWS_TOGETHER):
        SPLIT_ACROSS(words, memory, row * PITCH + near)
        at = memory + (PARTS_AT * 4 + row * 128)
        MULTIPLY_ROWS(total, words, descriptor(at, ACROSS_REST))


def dealt(column):
    """Return which column of Q's parts is this one: of 16, 4 s + 2 f + e is 8 f + 2 s + e.

    So a lane's columns 2 s and 2 s + 1 of two pieces of 8 are four neighbours.
    """
    return (column & ~14) | ((column & 2) << 2) | ((column & 12) >> 1)


def part_place(row, column):
    """Return where a value of Q's first part lies, in bytes: in panels of 64 columns."""
    return PARTS_AT * 4 + panel_place(row, dealt(column), ROWS, WIDTH)


def write_parts(memory, made, u, point, places, column, inside):
    """Write the members of a point from registers to Q's parts; 0 where there is no column.

    STEADY: a thread's points are whole eights of rows apart, after which the swizzle repeats, and
    `places` has where its first one's members lie.
    """
    for m in unrolled(0, MEMBERS, 2):
        low = made[u * MEMBERS + m]
        high = made[u * MEMBERS + min(m + 1, MEMBERS - 1)]
        if not FULL:
            if not inside:
                low, high = ZERO, ZERO
        if STEADY:
            if m + 1 < MEMBERS:
                POKE_TWO(places[m], places[m + 1], u, low, high)
            else:
                POKE_ONE(places[m], u, low)
        else:
            row = point * MEMBERS + m
            at = memory + part_place(row, column)
            if m + 1 < MEMBERS:
                POKE_TWO(at, memory + part_place(row + 1, column), 0, low, high)
            else:
                POKE_ONE(at, 0, low)


def clear_parts(memory, t, rows):
    """Write 0 behind the rows of Q, up to those that are taken together."""
    for i in range(t, (-rows % ROWS_TOGETHER) * (WIDTH // 2), THREADS):
        row = rows + i // (WIDTH // 2)
        at = memory + part_place(row, i % (WIDTH // 2) * 2)
        POKE_NONE(at)
