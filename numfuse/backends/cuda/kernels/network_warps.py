"""The products of a network in float64 on tensor cores: a warp has 32 x 32 sums, or 32 x 16.

They have the names and the texts of `network_tiles`, which the simulator runs instead. Lane 4 g + s
has, of a 16 x 8 result, columns 2 s and 2 s + 1 of rows g and g + 8 (PTX ISA 9.7.14.5); a pitch of
4 beyond a multiple of 16 values lets the lanes of half a warp read from different banks.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numfuse.backends.cuda.compile.accesses import read_vector, write_vector
from numfuse.backends.cuda.compile.elements import shared_place
from numfuse.backends.cuda.compile.engines import mma_double
from numfuse.backends.cuda.compile.intrinsics import (
    F64,
    GLOBAL,
    I32,
    I64,
    emit,
    intrinsic_of,
    read_registers,
    write_registers,
)
from numfuse.backends.cuda.compile.toolchain import ir
from numfuse.backends.cuda.kernels.network_tiles import Tile

_SIZE = 8
#: Pieces of 16 rows of a warp's part (of 8 columns it has as many as a thread has columns in
#: `network_tiles`); values of K of one instruction.
_ROWS = 2
CHUNK = 8
#: Neighbouring rows, columns and values of K that a lane has: see `network.own_row`.
DEALT = 1


def _multiply(
    name: str, tile: Tile, left: Callable[[int, int], int], right: Callable[[int, int], int]
) -> Any:
    """Return ``multiply(sums, memory, x, y)`` for 8 values of k.

    `left` says where row i is at k = 4 r, from a lane's first; `right`, where column j is.
    """

    def body(builder, sums, memory, x, y):
        x, y = (shared_place(builder, memory, at, tile.real) for at in (x, y))

        def value(at: Any, offset: int) -> Any:
            return read_vector(builder, at, offset * _SIZE, F64, 1)[0]

        b = [[value(y, right(8 * j, r)) for r in range(2)] for j in range(tile.nr)]
        total = read_registers(builder, sums, 0, tile.sums)
        for i in range(_ROWS):
            a = [value(x, left(16 * i + 8 * h, r)) for r in range(2) for h in range(2)]
            for j in range(tile.nr):
                at = (i * tile.nr + j) * 4
                total[at : at + 4] = mma_double(builder, CHUNK, a, b[j], total[at : at + 4])
        write_registers(builder, sums, 0, total)

    return intrinsic_of(name, f"warp {tile.key}", "arrr", body)


def _pairs(tile: Tile, pitch: int) -> list[tuple[int, int]]:
    """Return (register, place from a lane's first) of each pair of sums."""
    return [
        ((i * tile.nr + j) * 4 + 2 * h, (16 * i + 8 * h) * pitch + 8 * j)
        for i in range(_ROWS)
        for j in range(tile.nr)
        for h in range(2)
    ]


@functools.cache
def bindings(tile: Tile) -> dict[str, Any]:
    """Return the functions that take the place of those of threads' own tiles."""
    pitch, back, key = tile.pitch, tile.back_pitch, f"warp {tile.key}"

    def put(builder, sums, memory, at):
        # Lanes of odd rows begin with the second of a pair: so no two of half a warp meet in a
        # bank, where lanes of a quarter of one that write pairs do.
        row = builder.lshr(emit(builder, "mov.u32 $0, %tid.x;", "r", "", []), I32(2))
        odd = builder.trunc(row, ir.IntType(1))
        at = shared_place(builder, memory, at, tile.real)
        further = builder.select(odd, I32(_SIZE), I32(0))
        places = builder.add(at, further), builder.sub(builder.add(at, I32(_SIZE)), further)
        for first, offset in _pairs(tile, pitch):
            pair = read_registers(builder, sums, first, 2)
            for place, value, other in zip(places, pair, pair[::-1], strict=True):
                mine = builder.select(odd, other, value)
                write_vector(builder, place, offset * _SIZE, [mine])

    def load_square(builder, sums, address):
        for first, offset in _pairs(tile, tile.width):
            where = builder.add(address, I64(offset * _SIZE))
            write_registers(builder, sums, first, read_vector(builder, where, 0, F64, 2, GLOBAL))

    def add_square(builder, sums, before, address):
        for first, offset in _pairs(tile, tile.width):
            pairs = (read_registers(builder, y, first, 2) for y in (sums, before))
            values = [builder.fadd(a, b) for a, b in zip(*pairs, strict=True)]
            write_vector(builder, builder.add(address, I64(offset * _SIZE)), 0, values, GLOBAL)

    made = intrinsic_of("put_pairs", key, "arr", put)
    return {
        "MULTIPLY": _multiply(
            "rows_by_columns", tile, lambda i, r: i * pitch + 4 * r, lambda j, r: 4 * r * pitch + j
        ),
        "MULTIPLY_BACK": _multiply(
            "rows_by_rows", tile, lambda i, r: i * pitch + 4 * r, lambda j, r: j * back + 4 * r
        ),
        "MULTIPLY_OUTER": _multiply(
            "columns_by_columns",
            tile,
            lambda i, r: 4 * r * pitch + i,
            lambda j, r: 4 * r * pitch + j,
        ),
        "PUT": made,
        "PUT_BACK": made,
        "LOAD_SQUARE": intrinsic_of("load_square", key, "al", load_square),
        "ADD_SQUARE": intrinsic_of("add_square", key, "aal", add_square),
    }
