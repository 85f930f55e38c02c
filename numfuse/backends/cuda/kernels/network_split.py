"""The products of a network in float32 on tensor cores: of bfloat16 parts, or rounded to tf32.

They have the names and the texts of `network_tiles`, which the simulator runs instead, and a warp
has 32 rows and 8 NR columns of sums. Shared memory holds float32; a lane splits what it reads of
it, x = x0 + x1 + x2, each part the nearest bfloat16 to what those before left ("bf16x6"). So nobody
waits for a pass that splits, and a block needs no more memory than in IEEE float32.

"bf16x6" has two sums for each result: x0 y0, and the five smaller products, which is added at the
end (`SETTLE`), and counts as 0 where it is not finite. No chain is longer than a tile.

Rows and columns are dealt to lanes so that a lane's values are neighbours in memory, and those of
the lanes that read together lie in different banks at a pitch of 4 beyond a multiple of 32 values.
With lane 4 g + s of an instruction (PTX ISA 9.7.14.5.8), g is row, or column, 2 g and 2 g + 1 of
each 16, one of either half of a piece of 16 rows, or of two pieces of 8 columns. Values of K are
the instruction's: 2 s, 2 s + 1, 2 s + 8, 2 s + 9. So a lane has sums of columns 4 s to 4 s + 3.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

from numfuse.backends.cuda.compile.accesses import read_vector, write_vector
from numfuse.backends.cuda.compile.elements import shared_place
from numfuse.backends.cuda.compile.engines import mma_half, mma_tf32
from numfuse.backends.cuda.compile.intrinsics import (
    F32,
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

_SIZE = 4
CHUNK = 16
#: Neighbouring rows, columns and values of K that a lane has: see `network.own_row`.
DEALT = 2
#: Pieces of 16 rows of a warp; pieces of 8 columns that are multiplied together: a lane's two
#: neighbours.
_ROWS, _TOGETHER = 2, 2
#: Of "bf16x6": parts of the left and of the right factor, and whether the product is a small one.
#: The small ones come first, the smallest of them at the beginning.
SIX = (
    (0, 2, True),
    (2, 0, True),
    (1, 1, True),
    (0, 1, True),
    (1, 0, True),
    (0, 0, False),
)
#: Of "tf32": the first and the second half of a chunk.
_TWO = ((0, 0, False), (1, 1, False))

_Pair = list[Any]


def is_split(tile: Tile) -> bool:
    """Return whether factors are three parts, and sums those of large and of small products."""
    return tile.tensor == "bf16x6"


def parts_of(builder: Any, pair: _Pair) -> list[Any]:
    """Return the three parts of two neighbours, each as a word."""
    found = []
    for n in range(3):
        word = emit(builder, "cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff", pair)
        found.append(word)
        if n < 2:
            halves = builder.shl(word, I32(16)), builder.and_(word, I32(-65536))
            near = [builder.bitcast(half, F32) for half in halves]
            pair = [builder.fsub(x, y) for x, y in zip(pair, near, strict=True)]
    return found


def _rounded(builder: Any, x: Any) -> Any:
    """Return the nearest tf32, halves away from zero (9.7.9.21)."""
    return emit(builder, "cvt.rna.tf32.f32 $0, $1;", "r", "f", [x])


def _fragments(builder: Any, split: bool, pairs: list[_Pair]) -> list[list[Any]]:
    """Return the registers of a factor's rows, or columns: by parts, or by halves of a chunk.

    `pairs` are neighbours along K, those of the chunk's first half and of its second.
    """
    if split:
        return [list(words) for words in zip(*(parts_of(builder, p) for p in pairs), strict=True)]
    return [[_rounded(builder, x) for x in pair] for pair in pairs]


def left_words(builder: Any, split: bool, rows: list[list[_Pair]]) -> list[list[Any]]:
    """Return the registers of a left factor, whose two rows an instruction names by turns."""
    both = zip(*(_fragments(builder, split, pairs) for pairs in rows), strict=True)
    return [[x for pair in zip(*halves, strict=True) for x in pair] for halves in both]


def _half(builder: Any, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    return mma_half(builder, "bfloat16", a, b, c)


def _multiply(name: str, tile: Tile, left: Any, right: Any) -> Any:
    """Return ``multiply(sums, memory, x, y)`` for 16 values of k.

    ``left(builder, x, n)`` and ``right(builder, y, n)`` read a lane's pairs of k of the n-th 16
    rows, or columns: a list for each of its two.
    """
    split, pieces = is_split(tile), tile.nr
    multiply = _half if split else mma_tf32

    def body(builder, sums, memory, x, y):
        x, y = (shared_place(builder, memory, at, tile.real) for at in (x, y))
        total = read_registers(builder, sums, 0, (1 + split) * tile.sums)
        a = [left_words(builder, split, left(builder, x, i)) for i in range(_ROWS)]
        for first in range(0, pieces, _TOGETHER):
            found = right(builder, y, first // _TOGETHER)
            b = [_fragments(builder, split, pairs) for pairs in found]
            for p, q, small in SIX if split else _TWO:
                for i in range(_ROWS):
                    for j in range(_TOGETHER):
                        at = (i * pieces + first + j) * 4 + small * tile.sums
                        given = a[i][p], b[j][q], total[at : at + 4]
                        total[at : at + 4] = multiply(builder, *given)
        write_registers(builder, sums, 0, total)

    return intrinsic_of(name, tile.key, "arrr", body)


def along_rows(tile: Tile) -> Any:
    """Return what reads rows with k along them."""

    def read(builder, at, n):
        places = [(16 * n + row) * tile.pitch for row in range(2)]
        return [
            [read_vector(builder, at, (place + k) * _SIZE, F32, 2) for k in (0, 8)]
            for place in places
        ]

    return read


def across_rows(tile: Tile) -> Any:
    """Return what reads columns with k down them."""

    def read(builder, at, n):
        rows = [
            read_vector(builder, at, (k * tile.pitch + 16 * n) * _SIZE, F32, 2)
            for k in (0, 1, 8, 9)
        ]
        return [[[rows[k][column], rows[k + 1][column]] for k in (0, 2)] for column in range(2)]

    return read


def _runs(tile: Tile, pitch: int) -> list[tuple[list[int], int]]:
    """Return (registers, place from a lane's first) of each 4 neighbours of the sums."""
    return [
        (
            [(i * tile.nr + first + e % 2) * 4 + 2 * h + e // 2 for e in range(4)],
            (16 * i + h) * pitch + 8 * first,
        )
        for i in range(_ROWS)
        for h in range(2)
        for first in range(0, tile.nr, 2)
    ]


@functools.cache
def bindings(tile: Tile) -> dict[str, Any]:
    """Return the functions that take the place of those of threads' own tiles."""
    key, along, across = tile.key, along_rows(tile), across_rows(tile)
    split, square, zero = is_split(tile), _runs(tile, tile.width), ir.Constant(F32, 0.0)

    def put(builder, sums, memory, at):
        begin = shared_place(builder, memory, at, tile.real)
        for registers, offset in _runs(tile, tile.pitch):
            values = [read_registers(builder, sums, at, 1)[0] for at in registers]
            write_vector(builder, begin, offset * _SIZE, values)

    def load_square(builder, sums, address):
        for registers, offset in square:
            where = builder.add(address, I64(offset * _SIZE))
            values = read_vector(builder, where, 0, F32, 4, GLOBAL)
            for at, value in zip(registers, values, strict=True):
                write_registers(builder, sums, at, [value])

    def add_square(builder, sums, before, address):
        for registers, offset in square:
            pairs = (
                [read_registers(builder, y, at, 1)[0] for at in registers] for y in (sums, before)
            )
            values = [builder.fadd(a, b) for a, b in zip(*pairs, strict=True)]
            write_vector(builder, builder.add(address, I64(offset * _SIZE)), 0, values, GLOBAL)

    def clear(builder, sums):
        write_registers(builder, sums, 0, [zero] * (2 if split else 1) * tile.sums)

    def settle(builder, sums):
        main = read_registers(builder, sums, 0, tile.sums)
        small = read_registers(builder, sums, tile.sums, tile.sums)
        for i, x in enumerate(small):
            none = builder.fsub(x, x)
            x = builder.select(builder.fcmp_unordered("uno", none, none), zero, x)
            write_registers(builder, sums, i, [builder.fadd(main[i], x)])

    made = intrinsic_of("put_pairs", key, "arr", put)
    return {
        "MULTIPLY": _multiply("rows_by_columns", tile, along, across),
        "MULTIPLY_BACK": _multiply("rows_by_rows", tile, along, along),
        "MULTIPLY_OUTER": _multiply("columns_by_columns", tile, across, across),
        "PUT": made,
        "PUT_BACK": made,
        "LOAD_SQUARE": intrinsic_of("load_square", key, "al", load_square),
        "ADD_SQUARE": intrinsic_of("add_square", key, "aal", add_square),
        "CLEAR": intrinsic_of("clear", key, "a", clear),
        "SETTLE": intrinsic_of("settle", key, "a", settle),
    }
