"""Register tiles of a network's products, whose factors lie in shared memory as rows.

A thread has MR x NR sums. Its rows are ROW_STEP apart, so that neighbouring lanes read neighbouring
rows, whose pitch is an odd number of 16 bytes: no two of them share a bank. Each function has two
texts: LLVM for the compiler, where `memory` is an address and all places are in elements, and
Python for Numba's simulator, where it is an array.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.accesses import read_vector, write_vector
from numfuse.backends.cuda.compile.intrinsics import (
    ACCUMULATORS,
    FORMATS,
    GLOBAL,
    I32,
    I64,
    block_barrier,
    fused,
    intrinsic_of,
    read_registers,
    shared_address,
    write_registers,
)
from numfuse.backends.cuda.compile.toolchain import SIMULATED, ir


@dataclass(frozen=True)
class Tile:
    """A thread's part of the products of a block; all sizes are in values."""

    real: str
    #: Columns of every matrix, and values from a row to the next.
    width: int
    pitch: int
    #: Rows and columns of a thread, and the steps between them.
    mr: int
    nr: int
    row_step: int
    #: Threads along the columns: of the stacks' products, and along both axes of a gradient's.
    across: int
    #: Neighbours of one access.
    few: int
    #: How warps multiply on tensor cores, so many sums of each thread: "float64" (`network_warps`),
    #: "bf16x6" or "tf32" (`network_split`); "": threads multiply.
    tensor: str = ""
    #: Values of K of a slice of the weights and stages of their ring; 0: weights lie there whole.
    slice: int = 0
    stages: int = 0
    #: Whether groups of four warps multiply, by wgmma ("bf16x6" alone, in slices: `network_parts`).
    grouped: bool = False

    @property
    def back_pitch(self) -> int:
        """Return the pitch of the rows of weights that `rows_by_rows` reads: of whole slices."""
        return self.slice + self.pitch - self.width if self.slice else self.pitch

    @property
    def ahead(self) -> int:
        """Return the rows of a gradient's loop: the loads of some go beside the sums of others."""
        return 2 * self.few if self.slice and self.nr > self.few else self.few

    @property
    def fetches(self) -> int:
        """Return the registers of what :func:`fetch` has: X's values, and the first row of Y's."""
        return self.few * self.mr + self.nr

    @property
    def stage(self) -> int:
        """Return the values of a slice, whichever way it lies; of three 16-bit parts, in words."""
        if self.grouped:
            return self.slice * self.width * 3 // 2
        return max(self.slice * self.pitch, self.width * self.back_pitch)

    @property
    def key(self) -> str:
        return str(self)

    @property
    def sums(self) -> int:
        return self.mr * self.nr

    def column(self, i: int, threads: int) -> int:
        """Return where value `i` of a thread lies along an axis that so many threads share."""
        return i // self.few * threads * self.few + i % self.few


def function_of(
    name: str, tile: Tile, operands: str, body: Any, simulated: Any, results: str = ""
) -> Any:
    """Return a function of a tile: an intrinsic, or its text for the simulator."""
    if SIMULATED:
        simulated.numfuse_key = f"{name}({tile.key})"
        return simulated
    return intrinsic_of(name, tile.key, operands, body, results)


@functools.cache
def rows_by_columns(tile: Tile) -> Any:
    """``multiply(sums, memory, x, y)``: sums += X Y for `few` values of k."""

    def body(builder, y, left, total):
        for k in range(tile.few):
            _add_row(builder, tile, left, _row_of(builder, tile, y, k), k, total)

    return _of_rows("rows_by_columns", tile, body, _by_columns(tile))


def _by_columns(tile: Tile) -> Any:
    """Return which element of Y column j has the value of k, where k runs down its rows."""
    return lambda j, k: k * tile.pitch + tile.column(j, tile.across)


def _row_of(builder: Any, tile: Tile, y: Any, k: int) -> list[Any]:
    """Return a thread's columns of a row of Y."""
    kind, size = FORMATS[tile.real]
    found: list[Any] = []
    for j in range(0, tile.nr, tile.few):
        found += read_vector(builder, y, _by_columns(tile)(j, k) * size, kind, tile.few)
    return found


def _add_row(builder: Any, tile: Tile, left: Any, right: Any, k: int, total: list[Any]) -> None:
    for i in range(tile.mr):
        for j in range(tile.nr):
            at = i * tile.nr + j
            total[at] = fused(builder, left[i][k], right[j], total[at])


@functools.cache
def rows_by_rows(tile: Tile) -> Any:
    """``multiply(sums, memory, x, y)``: sums += X Y' for `few` values of k, along rows of both.

    The columns of a thread are as many apart as there are threads along them.
    """
    kind, size = FORMATS[tile.real]
    step = tile.across * tile.back_pitch

    def body(builder, y, left, total):
        for j in range(tile.nr):
            right = read_vector(builder, y, j * step * size, kind, tile.few)
            for k in range(tile.few):
                for i in range(tile.mr):
                    at = i * tile.nr + j
                    total[at] = fused(builder, left[i][k], right[k], total[at])

    def place_of(j, k):
        return j * step + k

    return _of_rows("rows_by_rows", tile, body, place_of)


def _of_rows(name: str, tile: Tile, add: Any, place_of: Any) -> Any:
    """Return a product with `few` values of k along the rows of X.

    `add` adds it to the sums, given what it reads of X and where Y is; `place_of` says at which
    element of Y column j has the value of k.
    """

    def body(builder, sums, memory, x, y):
        x, y = (elements.shared_place(builder, memory, at, tile.real) for at in (x, y))
        total = read_registers(builder, sums, 0, tile.sums)
        add(builder, y, _left(builder, tile, x), total)
        write_registers(builder, sums, 0, total)

    return function_of(name, tile, "arrr", body, _simulated(tile, place_of))


def _left(builder: Any, tile: Tile, x: Any) -> list[Any]:
    """Return `few` values of k of each of a thread's rows of X."""
    kind, size = FORMATS[tile.real]
    row = tile.row_step * tile.pitch * size
    return [read_vector(builder, x, i * row, kind, tile.few) for i in range(tile.mr)]


def _simulated(tile: Tile, place_of: Any) -> Any:
    """Return the text of a product with `few` values of k for the simulator."""
    row = tile.row_step * tile.pitch

    def simulated(sums, memory, x, y):
        for i in range(tile.mr):
            for j in range(tile.nr):
                for k in range(tile.few):
                    sums[i * tile.nr + j] += memory[x + i * row + k] * memory[y + place_of(j, k)]

    return simulated


def _fetched(builder: Any, tile: Tile, x: Any, y: Any) -> list[Any]:
    left = [value for run in _left(builder, tile, x) for value in run]
    return left + _row_of(builder, tile, y, 0)


@functools.cache
def fetch(tile: Tile) -> Any:
    """``fetch(ahead, memory, x, y)``: what a product X Y begins with, to registers."""

    def body(builder, ahead, memory, x, y):
        x, y = (elements.shared_place(builder, memory, at, tile.real) for at in (x, y))
        write_registers(builder, ahead, 0, _fetched(builder, tile, x, y))

    def simulated(ahead, memory, x, y):
        pass

    return function_of("fetch", tile, "arrr", body, simulated)


@functools.cache
def rows_fetched(tile: Tile) -> Any:
    """``multiply(sums, ahead, memory, x, y, next_x, next_y)``: sums += X Y for 2 `few` values of k.

    What the first half begins with is there. What the next one begins with is on its way while one
    is multiplied: to other registers, and behind the second to `ahead`, so that none is moved.
    """
    size = FORMATS[tile.real][1]
    plain = _simulated(tile, _by_columns(tile))

    def body(builder, sums, ahead, memory, x, y, next_x, next_y):
        x, y, *after = (
            elements.shared_place(builder, memory, at, tile.real) for at in (x, y, next_x, next_y)
        )
        rows = tile.few * tile.pitch * size
        second = [builder.add(x, I32(tile.few * size)), builder.add(y, I32(rows))]
        total = read_registers(builder, sums, 0, tile.sums)
        held = read_registers(builder, ahead, 0, tile.fetches)
        for here, there in ((y, second), (second[1], after)):
            left = [held[i * tile.few : (i + 1) * tile.few] for i in range(tile.mr)]
            right = held[tile.few * tile.mr :]
            held = _fetched(builder, tile, *there)
            for k in range(tile.few):
                following = _row_of(builder, tile, here, k + 1) if k + 1 < tile.few else []
                _add_row(builder, tile, left, right, k, total)
                right = following
        write_registers(builder, ahead, 0, held)
        write_registers(builder, sums, 0, total)

    def simulated(sums, ahead, memory, x, y, next_x, next_y):
        plain(sums, memory, x, y)
        plain(sums, memory, x + tile.few, y + tile.few * tile.pitch)

    return function_of("rows_fetched", tile, "aarrrrr", body, simulated)


@functools.cache
def columns_by_columns(tile: Tile, rows: int = 1) -> Any:
    """``multiply(sums, memory, x, y)``: sums += X' Y for some rows of both."""
    kind, size = FORMATS[tile.real]
    along, across = tile.width // tile.mr, tile.width // tile.nr

    def body(builder, sums, memory, x, y):
        x, y = (elements.shared_place(builder, memory, at, tile.real) for at in (x, y))
        total = read_registers(builder, sums, 0, tile.sums)

        def values(at, count, threads, row):
            found = []
            for i in range(0, count, tile.few):
                offset = row * tile.pitch + tile.column(i, threads)
                found += read_vector(builder, at, offset * size, kind, tile.few)
            return found

        for row in range(rows):
            left, right = values(x, tile.mr, along, row), values(y, tile.nr, across, row)
            for i in range(tile.mr):
                for j in range(tile.nr):
                    at = i * tile.nr + j
                    total[at] = fused(builder, left[i], right[j], total[at])
        write_registers(builder, sums, 0, total)

    def simulated(sums, memory, x, y):
        for row in range(rows):
            for i in range(tile.mr):
                for j in range(tile.nr):
                    a = memory[x + row * tile.pitch + tile.column(i, along)]
                    b = memory[y + row * tile.pitch + tile.column(j, across)]
                    sums[i * tile.nr + j] += a * b

    return function_of(f"columns_by_columns_{rows}", tile, "arrr", body, simulated)


@functools.cache
def dot(tile: Tile) -> Any:
    """``dot(total, memory, x, y)``: total + the products of `few` neighbours."""
    kind, _ = FORMATS[tile.real]

    def body(builder, total, memory, x, y):
        x, y = (elements.shared_place(builder, memory, at, tile.real) for at in (x, y))
        left, right = (read_vector(builder, at, 0, kind, tile.few) for at in (x, y))
        for a, b in zip(left, right, strict=True):
            total = fused(builder, a, b, total)
        return total

    def simulated(total, memory, x, y):
        for k in range(tile.few):
            total = total + memory[x + k] * memory[y + k]
        return total

    real = ACCUMULATORS[tile.real]
    return function_of("dot", tile, f"{real}rrr", body, simulated, real)


@functools.cache
def put_neighbours(tile: Tile) -> Any:
    """``put(sums, memory, at)``: the sums of `rows_by_columns` to rows of shared memory."""
    size = FORMATS[tile.real][1]

    def body(builder, sums, memory, at):
        at = elements.shared_place(builder, memory, at, tile.real)
        for i in range(tile.mr):
            for j in range(0, tile.nr, tile.few):
                values = read_registers(builder, sums, i * tile.nr + j, tile.few)
                offset = i * tile.row_step * tile.pitch + tile.column(j, tile.across)
                write_vector(builder, at, offset * size, values)

    def simulated(sums, memory, at):
        for i in range(tile.mr):
            for j in range(tile.nr):
                offset = i * tile.row_step * tile.pitch + tile.column(j, tile.across)
                memory[at + offset] = sums[i * tile.nr + j]

    return function_of("put_neighbours", tile, "arr", body, simulated)


@functools.cache
def put_apart(tile: Tile) -> Any:
    """``put(sums, memory, at)``: the sums of `rows_by_rows` to rows of shared memory."""
    size = FORMATS[tile.real][1]

    def body(builder, sums, memory, at):
        at = elements.shared_place(builder, memory, at, tile.real)
        for i in range(tile.mr):
            for j in range(tile.nr):
                values = read_registers(builder, sums, i * tile.nr + j, 1)
                offset = i * tile.row_step * tile.pitch + j * tile.across
                write_vector(builder, at, offset * size, values)

    def simulated(sums, memory, at):
        for i in range(tile.mr):
            for j in range(tile.nr):
                offset = i * tile.row_step * tile.pitch + j * tile.across
                memory[at + offset] = sums[i * tile.nr + j]

    return function_of("put_apart", tile, "arr", body, simulated)


def _square(tile: Tile) -> list[tuple[int, int]]:
    """Return (register, element) of each access to the sums of `columns_by_columns` in memory."""
    along, across = tile.width // tile.mr, tile.width // tile.nr
    return [
        (i * tile.nr + j, tile.column(i, along) * tile.width + tile.column(j, across))
        for i in range(tile.mr)
        for j in range(0, tile.nr, tile.few)
    ]


@functools.cache
def load_square(tile: Tile) -> Any:
    """``load(sums, address)``: the sums of `columns_by_columns` from a matrix in memory."""
    kind, size = FORMATS[tile.real]

    def body(builder, sums, address):
        for at, offset in _square(tile):
            where = builder.add(address, I64(offset * size))
            values = read_vector(builder, where, 0, kind, tile.few, GLOBAL)
            write_registers(builder, sums, at, values)

    def simulated(sums, address):
        for at, offset in _square(tile):
            for i in range(tile.few):
                sums[at + i] = elements.loads(tile.real)(address, offset + i)

    return function_of("load_square", tile, "al", body, simulated)


@functools.cache
def add_square(tile: Tile) -> Any:
    """``add(sums, before, address)``: sums + before to a matrix in memory."""
    size = FORMATS[tile.real][1]

    def body(builder, sums, before, address):
        for at, offset in _square(tile):
            pairs = (read_registers(builder, y, at, tile.few) for y in (sums, before))
            values = [builder.fadd(a, b) for a, b in zip(*pairs, strict=True)]
            where = builder.add(address, I64(offset * size))
            write_vector(builder, where, 0, values, GLOBAL)

    def simulated(sums, before, address):
        for at, offset in _square(tile):
            for i in range(tile.few):
                elements.stores(tile.real)(address, offset + i, sums[at + i] + before[at + i])

    return function_of("add_square", tile, "aal", body, simulated)


@functools.cache
def clear(tile: Tile) -> Any:
    """``clear(sums)``: all are 0."""

    def body(builder, sums):
        zero = ir.Constant(FORMATS[tile.real][0], 0.0)
        write_registers(builder, sums, 0, [zero] * tile.sums)

    def simulated(sums):
        sums[:] = 0

    return function_of("clear", tile, "a", body, simulated)


def _itself(shared: Any) -> Any:
    return shared


def _wait() -> None:
    thread: Any = threading.current_thread()
    thread.syncthreads()


#: Shared memory as the functions here take it; a barrier that device functions may have, too.
window: Any = _itself if SIMULATED else shared_address
barrier: Any = _wait if SIMULATED else block_barrier


def bindings(tile: Tile) -> dict[str, Any]:
    """Return the functions of a tile, by the names that the kernel has for them."""
    return {
        "WINDOW": window,
        "BARRIER": barrier,
        "MULTIPLY": rows_by_columns(tile),
        "FETCH": fetch(tile),
        "MULTIPLY_FETCHED": rows_fetched(tile),
        "MULTIPLY_BACK": rows_by_rows(tile),
        "MULTIPLY_OUTER": columns_by_columns(tile),
        "MULTIPLY_OUTER_AHEAD": columns_by_columns(tile, tile.ahead),
        "DOT": dot(tile),
        "PUT": put_neighbours(tile),
        "PUT_BACK": put_apart(tile),
        "LOAD_SQUARE": load_square(tile),
        "ADD_SQUARE": add_square(tile),
        "CLEAR": clear(tile),
        "PEEK": elements.peek(tile.real),
        "POKE": elements.poke(tile.real),
    }
