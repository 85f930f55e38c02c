"""Sums and factors of `network_parts`: wgmma of parts, and where a lane's values lie."""

# mypy: disable-error-code="no-untyped-def"
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
from numfuse.backends.cuda.compile.engines import PartProduct, group_parts, multiply_wait
from numfuse.backends.cuda.compile.intrinsics import (
    F32,
    GLOBAL,
    I16,
    I32,
    I64,
    dynamic_shared_of,
    intrinsic_of,
    read_registers,
    write_registers,
)
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.kernels.network_panels import across, along
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
