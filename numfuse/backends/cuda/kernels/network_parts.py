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

import functools
from typing import Any

from numfuse.backends.cuda.compile.accesses import (
    fetch_commit,
    fetch_wait,
    read_vector,
    write_vector,
)
from numfuse.backends.cuda.compile.elements import shared_place
from numfuse.backends.cuda.compile.engines import (
    PartProduct,
    copy_fence,
    grid_release,
    group_parts,
    multiply_wait,
)
from numfuse.backends.cuda.compile.intrinsics import (
    F32,
    GLOBAL,
    I16,
    I32,
    I64,
    dynamic_shared_of,
    intrinsic_of,
    read_registers,
    same,
    write_registers,
)
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network import left_at
from numfuse.backends.cuda.kernels.network_layers import MOST_LAYERS, Layers, Steps, own_layer
from numfuse.backends.cuda.kernels.network_panels import (
    GROUP_ROWS,
    across,
    along,
    descriptor,
    panel_place,
)
from numfuse.backends.cuda.kernels.network_passes import (
    again_step,
    first_step,
    load_sums,
    width_of,
)
from numfuse.backends.cuda.kernels.network_split import (
    DEALT,
    SIX,
    across_rows,
    along_rows,
    left_words,
    parts_of,
)
from numfuse.backends.cuda.kernels.network_tiles import Tile

#: Parts of a value, bytes of one, rows of a warp, and values of K of one instruction.
PARTS, PART_SIZE, WARP_ROWS, CHUNK = 3, 2, 16, 16
#: Rows that the gradient of weights takes together.
ROWS_TOGETHER = 32


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


def multiply_images(total, memory, t, image, row, column, rows, columns, last_row):
    """Add the product of the tile's rows and a layer's weights to the sums.

    `open_images` has begun it; behind it the ring is read until the next barrier.
    """
    words = cuda.local.array(WORDS, WORD)
    slices = (rows + (SLICE - 1)) // SLICE
    left = left_at(t)
    stage = 0
    for number in range(slices):
        ARRIVED()
        copy_fence()
        BARRIER()
        if number + (STAGES - 1) < slices:
            copy_image(memory, t, image, number + (STAGES - 1))
        COMMIT()
        SPLIT_ALONG(words, memory, left)
        y = descriptor(memory + (WEIGHTS_AT + stage * STAGE) * 4, IMAGE_REST)
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
        ARRIVED()
        copy_fence()
        BARRIER()
        if number + (STAGES - 1) < slices:
            copy_image(memory, t, image + IMAGE_BYTES, number + (STAGES - 1))
        COMMIT()
        if number < slices:
            y = descriptor(memory + (WEIGHTS_AT + stage * STAGE) * 4, IMAGE_REST)
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


# --- what these are bound to ----------------------------------------------------------------------
def image_bytes(tile: Tile) -> int:
    """Return the bytes of the image of one layer's weights, in one direction."""
    return tile.width * tile.width * PARTS * PART_SIZE


@functools.cache
def _split(tile: Tile, along: bool) -> Any:
    """``split(words, memory, x)``: the parts of a lane's values of X, as left factors.

    Of a slice of its rows, or of ROWS_TOGETHER rows of its columns: by chunks of K, then by parts.
    """
    chunks = (tile.slice if along else ROWS_TOGETHER) // CHUNK
    read = (along_rows if along else across_rows)(tile)
    step = CHUNK * 4 * (1 if along else tile.pitch)

    def body(builder, words, memory, x):
        x = shared_place(builder, memory, x, tile.real)
        for c in range(chunks):
            found = left_words(builder, True, read(builder, builder.add(x, I32(c * step)), 0))
            for p, part in enumerate(found):
                write_registers(builder, words, (c * PARTS + p) * 4, part)

    return intrinsic_of("split_along" if along else "split_across", tile.key, "arr", body)


def _products(tile: Tile, left: Any, right: Any, parts: tuple[int, int]) -> tuple[Any, ...]:
    """Return the instructions of six products of parts, chunk by chunk.

    `left` and `right` are bytes from a factor to its chunks (`left` None: it is in registers), and
    `parts` from a part to the next, of X and of Y.
    """
    found = []
    for c, y in enumerate(right):
        for p, q, small in SIX:
            x = (c * PARTS + p) * 4 if left is None else left[c] + p * parts[0]
            found.append(PartProduct(small * tile.sums, x, y + q * parts[1]))
    return tuple(found)


def _twos(width: int) -> list[tuple[int, int, int]]:
    """Return (register, row of a lane, column) of each two neighbours of the sums."""
    return [(4 * j + 2 * h, h, 8 * j) for j in range(width // 8) for h in range(2)]


def _fours(width: int) -> list[tuple[list[int], int]]:
    """Return (registers, place from a lane's first) of each four neighbours of a gradient."""
    return [
        ([first + 2 * h + x for first in (4 * j, 4 * j + 4) for x in range(2)], h * width + 8 * j)
        for j in range(0, width // 8, 2)
        for h in range(2)
    ]


def bindings(tile: Tile, rows: int, stride: int) -> dict[str, Any]:
    """Return the products of a group of warps, and what their texts are bound to.

    `stride` is the rows from a thread's point to its next one in a pass.
    """
    width = tile.width
    image, image_rest = along(width, tile.slice)
    q_along, along_rest = along(rows, width)
    q_across, across_rest = across(rows, width, ROWS_TOGETHER)
    image_part, q_part = width * tile.slice * PART_SIZE, rows * width * PART_SIZE
    chunks = tile.slice // CHUNK
    squares = _fours(width)

    def put(natural: bool) -> Any:
        below = 8 if natural else 1

        def body(builder, sums, memory, at):
            begin = shared_place(builder, memory, at, tile.real)
            for register, h, column in _twos(width):
                values = read_registers(builder, sums, register, 2)
                write_vector(builder, begin, (h * below * tile.pitch + column) * 4, values)

        return intrinsic_of("put_group", f"{tile.key} {natural}", "arr", body)

    def load_square(builder, sums, address):
        for registers, offset in squares:
            where = builder.add(address, I64(offset * 4))
            found = read_vector(builder, where, 0, F32, 4, GLOBAL)
            for register, value in zip(registers, found, strict=True):
                write_registers(builder, sums, register, [value])

    def add_square(builder, sums, before, address):
        for registers, offset in squares:
            own = [[read_registers(builder, y, i, 1)[0] for i in registers] for y in (sums, before)]
            values = [builder.fadd(a, b) for a, b in zip(*own, strict=True)]
            write_vector(builder, builder.add(address, I64(offset * 4)), 0, values, GLOBAL)

    def store_parts(builder, address, low, high):
        for p, word in enumerate(parts_of(builder, [low, high])):
            where = builder.add(address, I64(p * image_part))
            write_vector(builder, where, 0, [word], GLOBAL)

    def poke_two(builder, at, other, u, low, high):
        for p, word in enumerate(parts_of(builder, [low, high])):
            upper = builder.lshr(word, I32(16))
            for place, value in ((at, word), (other, upper)):
                offset = p * q_part + u * stride * 128
                write_vector(builder, place, offset, [builder.trunc(value, I16)])

    def poke_one(builder, at, u, value):
        for p, word in enumerate(parts_of(builder, [value, value])):
            offset = p * q_part + u * stride * 128
            write_vector(builder, at, offset, [builder.trunc(word, I16)])

    def poke_none(builder, at):
        for p in range(PARTS):
            write_vector(builder, at, p * q_part, [I32(0)])

    key = f"{tile.key} {rows} {stride}"
    high = image.high
    forward = _products(tile, None, image.steps, (0, image_part))
    # (a slice's chunks lie in one panel of 64 columns)
    back = _products(tile, q_along.steps[:chunks], image.steps, (q_part, image_part))
    outer = _products(tile, None, q_across.steps, (0, q_part))
    q_sides = False, q_along.high
    ring = {
        "SLICE": tile.slice,
        "STAGES": tile.stages,
        "STAGE": tile.stage,
        "STAGE_BYTES": tile.stage * 4,
        "IMAGE_BYTES": image_bytes(tile),
        "IMAGE_REST": image_rest,
        "ALONG_REST": along_rest,
        "ACROSS_REST": across_rest,
        "ROWS": rows,
        "WORD": types.int32,
        "WORDS": PARTS * 4 * max(chunks, ROWS_TOGETHER // CHUNK),
        "SPLIT_ALONG": _split(tile, True),
        "SPLIT_ACROSS": _split(tile, False),
        "MULTIPLY_ROWS": group_parts(width, 2 * tile.sums, outer, None, (True, q_across.high)),
        "COMMIT": fetch_commit,
        "ARRIVED": fetch_wait(tile.stages - 2),
    }
    return ring | {
        "WINDOW": dynamic_shared_of,
        "CHUNK": ROWS_TOGETHER,
        "WARP_ROWS": WARP_ROWS,
        "SPAN": width,
        "NEAR": DEALT,
        "DEALT": DEALT,
        "MULTIPLY": group_parts(width, 2 * tile.sums, forward, None, (False, high)),
        "START": group_parts(width, 2 * tile.sums, back, q_sides, (False, high), False),
        "WAIT": multiply_wait(2 * tile.sums, "bf16"),
        "STEADY": stride % 8 == 0,
        "PUT": put(False),
        "PUT_BACK": put(True),
        "LOAD_SQUARE": intrinsic_of("load_group_square", key, "al", load_square),
        "ADD_SQUARE": intrinsic_of("add_group_square", key, "aal", add_square),
        "STORE_PARTS": intrinsic_of("store_parts", key, "lff", store_parts),
        "POKE_TWO": intrinsic_of("poke_two", key, "rrnff", poke_two),
        "POKE_ONE": intrinsic_of("poke_one", key, "rnf", poke_one),
        "POKE_NONE": intrinsic_of("poke_none", key, "r", poke_none),
    }
