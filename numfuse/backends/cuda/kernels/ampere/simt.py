"""Products on CUDA cores: float32 by fused multiply-adds of register tiles, strictly IEEE.

A thread has MR x NR sums, each over K in its order, in chains that are the same whatever the tile
(`tiling.CHAIN`). Factors come from shared memory by fours, where K is their outer axis:
cp.async copies there what lies so in memory, the other layout is turned, on its way or, where the
other factor is long, by a copy before. The threads of a warp share them: 8 of them lie along M and
4 along N, so that a warp's part is square where MR = 8 and NR = 16.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from numfuse.backends.cuda import block_tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.backends.cuda.compile.accesses import read_vector
from numfuse.backends.cuda.compile.intrinsics import F32, fused
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import inlined
from numfuse.backends.cuda.kernels import layouts
from numfuse.backends.cuda.kernels.ampere import blocks, copies, tails
from numfuse.backends.cuda.kernels.ampere.blocks import Engine
from numfuse.backends.cuda.kernels.ampere.registers import arithmetic
from numfuse.backends.cuda.kernels.ampere.slices import SIDE, Fetch
from numfuse.backends.cuda.plan.product import (
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
    Tier,
    Way,
)

i32 = np.int32

#: Values of an access of shared memory.
FOUR = 4


def _thread_row(t):
    """A thread's number along M: 8 of a warp.

    Neighbouring lanes share their rows, and every second pair its columns: a warp's 16-byte reads
    then take two turns of shared memory instead of four.
    """
    return (t >> 5) // WARPS_N * 8 + ((t >> 1) & 7)


def _thread_column(t):
    """Return a thread's number along N: 4 of a warp."""
    return (t >> 5) % WARPS_N * 4 + ((t & 1) | ((t >> 3) & 2))


def _from(t, memory):
    return i32(memory + NUMBER(t) * 16)


def _put_to(t, memory):
    return i32(memory + ROW(t) * (4 * PITCH) + COLUMN(t) * 16)


def _pass_row(r, turn):
    return r + turn * PASS_ROWS


class _Factor:
    """A thread's values of one factor, and how it reads them: by fours.

    In shared memory K is outermost; the fours of the threads of a warp are neighbours, and those
    of one thread a part of the block apart.
    """

    def __init__(self, fetch: Fetch, count: int) -> None:
        self.fetch, self.count = fetch, count

    def place(self, i: int) -> int:
        """Where a thread's value `i` lies, from its first."""
        return i // FOUR * (self.fetch.block * FOUR // self.count) + i % FOUR

    def line(self, builder: Any, at: Any, k: int) -> list[Any]:
        """All values for one `k`."""
        own, along = self.fetch.offsets
        found = []
        for i in range(0, self.count, FOUR):
            offset = self.place(i) * own + self.fetch.row(k) * along
            found += read_vector(builder, at, offset, F32, FOUR)
        return found


class _Tile:
    """The arithmetic of a thread's tile, as LLVM instructions.

    One value of k after the other, and one row after the other: a factor of X is used NR times in
    a row, so that an instruction reads two registers and not three. (Four values of k of X or of Y
    as one access need no turning, but ptxas then streams the registers of one bank: 0.74 to 0.92
    of the speed on an H200, in every order of the same instructions that was tried.) The factors of
    the next k are on their way while this one's are multiplied.
    """

    def __init__(self, x: _Factor, y: _Factor) -> None:
        self.x, self.y = x, y

    @property
    def factors(self) -> int:
        """Registers: of X and Y for this k, and for the next."""
        return 2 * (self.x.count + self.y.count)

    def first(self, builder: Any, x: Any, y: Any) -> list[Any]:
        """The factors of the first k, and room for the next."""
        return (self.x.line(builder, x, 0) + self.y.line(builder, y, 0)) * 2

    def rows(
        self, builder: Any, total: list[Any], now: list[Any], part: int, x: Any, y: Any, next_k: int
    ) -> list[Any]:
        """Four rows (number `part`) for one k, of which the successor is `next_k` of x and y."""
        half, n = len(now) // 2, self.y.count
        current, following = now[:half], now[half:]
        if part == 0:
            following = self.x.line(builder, x, next_k) + self.y.line(builder, y, next_k)
        a, b = current[: self.x.count], current[self.x.count :]
        for i in range(FOUR * part, FOUR * part + FOUR):
            # back and forth: the turn shares a factor of Y
            for j in range(n) if i % 2 == 0 else reversed(range(n)):
                total[i * n + j] = fused(builder, a[i], b[j], total[i * n + j])
        last = part == self.x.count // FOUR - 1
        return following * 2 if last else current + following


@functools.cache
def engine(tile: CudaBlock, x_fetch: Fetch, y_fetch: Fetch) -> Engine:
    """The engine of a tile."""
    mr, nr = tile.part_m, tile.part_n
    rows, columns = _Factor(x_fetch, mr), _Factor(y_fetch, nr)
    part = _Tile(rows, columns)
    key = f"{tile},{x_fetch},{y_fetch}"
    parts = mr // FOUR
    put_pitch = (tile.block_n + FOUR) * 4

    def passed(turn: int) -> list[tuple[int, int, int]]:
        return [
            ((turn * FOUR + i) * nr + j, FOUR, rows.place(i) * put_pitch + columns.place(j) * 4)
            for i in range(FOUR)
            for j in range(0, nr, FOUR)
        ]

    made = arithmetic(
        key, mr * nr, part.factors, parts, range(1, tile.block_k), part.first, part.rows, passed
    )
    warps_n = tile.block_n // nr // 4
    row = inlined(_thread_row, WARPS_N=warps_n)
    column = inlined(_thread_column, WARPS_N=warps_n)
    pass_rows = tile.block_m * FOUR // mr
    return Engine(
        tile,
        x_fetch,
        y_fetch,
        factor=types.float32,
        arithmetic=made,
        x_from=inlined(_from, NUMBER=row),
        y_from=inlined(_from, NUMBER=column),
        put_to=inlined(_put_to, ROW=row, COLUMN=column, PITCH=put_pitch),
        put_pitch=put_pitch,
        passes=parts,
        pass_rows=pass_rows,
        pass_row=inlined(_pass_row, PASS_ROWS=pass_rows),
    )


def fetch(operand: Operand, own: int, block: int, tile: CudaBlock) -> Fetch:
    """How a factor comes to shared memory; `own`: its axis that is not K (1: rows, 2: columns)."""
    along_k = abs(operand.strides[3 - own]) < abs(operand.strides[own])
    axis = 3 - own if along_k else own
    values = next(v for v in (FOUR, 2, 1) if v == 1 or operand.runs_wide(axis, v))
    return Fetch(
        block,
        tile.block_k,
        tile.threads,
        4,
        along_k,
        values,
        k_inner=False,
        # neighbours along k are turned on their way through registers
        held=along_k and values > 1,
        # half a line of memory side by side: two sectors of a line are one request of the cache,
        # which its reads from shared memory wait for
        side_by_side=min(SIDE[values > 1], tile.block_k) // values if along_k else 0,
    )


def _share(operand: Operand, own: int, tile: CudaBlock) -> float:
    """Return the share of a tile's time that a factor takes as it lies (`copies`)."""
    return copies.share(fetch(operand, own, tile.block_m if own == 1 else tile.block_n, tile), own)


def _costly(product: Product, tile: CudaBlock) -> list[tuple[int, float]]:
    """Return elements of X and of Y, and the share of the time that they take as they lie.

    Two factors Y are one here: both come as they lie, or both are copied, side by side.
    """
    p, found = product, []
    for own, operands, length in ((1, [p.x], p.m), (2, p.rights, p.n * (1 + p.woven))):
        part = max(_share(operand, own, tile) for operand in operands)
        part = copies.of_tile(part, own, tile) * (1 + p.has_two_sums)
        places = sum(p.places if operand.strides[0] else 1 for operand in operands)
        found.append((places * length * p.k, part))
    return found


def copied(product: Product, device: DeviceInfo, tile: CudaBlock) -> tuple[bool, ...]:
    """Return whether X, and whether Y, is copied before: where that pays (`copies`)."""
    busy = device.multiprocessors
    return tuple(
        part > 0 and copies.pays(product, size, part, busy) for size, part in _costly(product, tile)
    )


def beside_of(product: Product, tiles: Sequence[CudaBlock], busy: int) -> tuple[float, ...]:
    """Return what the factors cost each tile beside its arithmetic: copied or as they lie."""
    found = []
    for tile in tiles:
        factors = [factor for factor in _costly(product, tile) if factor[1]]
        ways = [[copies.added(product, *x, how, busy) for how in (True, False)] for x in factors]
        found.append(sum(map(min, ways)))
    return tuple(found)


def stacking_pays(m: int, n: int, k: int, rights: Sequence[Operand], device: DeviceInfo) -> bool:
    """Return whether a sum of products costs less as one product along all their K.

    For that the right factors (places, K, N) are copied, one below the other. Else the products
    come one after the other, and all but the first add to what those before them have made.
    """
    count, busy = len(rights), device.multiprocessors
    where = 1, False, busy
    apart, both = (
        block_tiling.block(block_tiling.CORE_BLOCKS, m, n, x, *where)[3] for x in (k, count * k)
    )
    apart = count * apart + (count - 1) * m * n * copies.COPY_COST / busy
    for right in rights:
        ways = copies.ways(m * n * k, k * n, _share(right, 2, block_tiling.CORE_BLOCKS[0]), busy)
        apart, both = apart + min(ways), both + ways[0]
    return both < apart


def plan(
    product: Product,
    device: DeviceInfo,
    tile: CudaBlock,
    part: int,
    parts: int,
    rest: tuple[CudaBlock, int] | None = None,
    clustered: bool = False,
    copy: tuple[bool, ...] | None = None,
    turn: str = "",
) -> Plan | None:
    """How to run it with this tile; of the factors those are copied before that `copy` says.

    `rest` is another tile, and the column from which on it makes the result. The parts of K are
    planes, or blocks of a cluster (`clustered`). `turn` is that of `tails.plan`: the last rows'
    factors come as they lie. Return None where two factors of one side cannot come in the same way.
    """
    p = product
    before: list[Launch] = []
    workspace = 0
    operands = [p.x, *p.rights]
    slots = [Slot(name) for name in ("x", "y", "y1")[: len(operands)]]
    shapes = [(1, (p.m, p.k)), *[(2, (p.k, p.n * (1 + p.woven)))] * len(p.rights)]
    # on Hopper each of the launches is ready when the one before it ends
    overlaps = device.capability >= (9, 0)
    wanted = copied(p, device, tile) if copy is None else copy
    if p.x1 is not None or turn == "last":  # (two left factors come in the same way)
        wanted = False, False
    for number, (own, shape) in enumerate(shapes):
        if wanted[min(number, 1)] and layouts.fits(shape, p.places, own):
            to = Slot("work", workspace)
            launch, operands[number], size = layouts.laid_out(
                operands[number], shape, p.places, own, slots[number], to, overlaps=overlaps
            )
            before.append(launch)
            slots[number] = to
            workspace += -(-size // 256) * 256
    p = replace(p, x=operands[0], y=operands[1], y1=operands[2] if len(operands) > 2 else p.y1)
    waits = "first" if overlaps and before else ""
    if turn == "last" and overlaps:
        waits = "last"

    def of(tile: CudaBlock, first: int, last: int, before: list[Launch], *when: Any) -> Plan | None:
        x = fetch(p.x, 1, tile.block_m, tile)
        y, *others = (fetch(right, 2, tile.block_n, tile) for right in p.rights)
        own = blocks.paired(p, y)
        if own is None or any(other != y for other in others):
            return None
        if p.x1 is not None and fetch(p.x1, 1, tile.block_m, tile) != x:
            return None
        how = tuple(before), tuple(slots), workspace, (first, last), clustered, *when
        return blocks.plan(p, device, part, parts, engine(tile, x, own), "cores", *how)

    if rest is None:
        return of(tile, 0, p.n, before, waits, turn == "first" and runs_beside(device, wanted))
    other, first = rest
    beside = runs_beside(device, wanted)
    found = of(tile, 0, first, before, waits, beside)
    more = of(other, first, p.n, [], "last" if beside else "")
    assert found is not None and more is not None, "it has one right factor"
    return replace(found, launches=found.launches + more.launches)


def runs_beside(device: DeviceInfo, copy: tuple[bool, ...]) -> bool:
    """Return whether the launch for the last columns may run while the one before it does.

    It reads what the other one reads. That is nothing which a copy, that was waited for there
    alone, has just written.
    """
    return device.capability >= (9, 0) and not any(copy)


def _tiles(product: Product, device: DeviceInfo) -> tuple[CudaBlock, ...]:
    """Return the tiles that a device has room for; none of a product that is not taken."""
    p = product
    if not blocks.takes(p, device) or p.precision != "ieee":
        return ()
    if (p.x.dtype, p.y.dtype, p.accumulator) != ("float32",) * 3:
        return ()
    small = device.shared_per_multiprocessor < block_tiling.CORE_SHARED
    return block_tiling.CORE_BLOCKS[:-1] if small else block_tiling.CORE_BLOCKS


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it; None for other types, and before compute capability 8.0."""
    p, tiles = product, _tiles(product, device)
    if not tiles:
        return None
    where = p.k, p.places, p.free, device.multiprocessors
    n = p.n * (1 + p.has_two_sums)  # as many columns of sums
    beside = beside_of(p, tiles, device.multiprocessors)
    if p.x1 is not None:
        terms = block_tiling.two_terms(
            tiles, p.m, p.n, p.k, p.places, device.multiprocessors, beside
        )
        return None if terms is None else plan(p, device, *terms)
    if p.part:
        found = blocks.ways_of(p, tiles, device.multiprocessors, beside)
        _, tile, part, parts = min(found, key=itemgetter(0))
        return plan(p, device, tile, part, parts)
    tile, part, parts, work = block_tiling.block(tiles, p.m, n, *where, p.whole, beside)
    if p.is_rich:
        return plan(p, device, tile, part, parts) if parts == 1 else None
    tailed = tails.plan(p, device, tiles, beside, work, plan)
    if tailed is not None:
        return tailed
    beyond = p.n % tiles[0].block_n
    if parts == 1 and 0 < beyond < p.n and p.members is None:
        two = _in_two(p, device, dict(zip(tiles, beside, strict=True)), work)
        if two is not None:
            return two
    return plan(p, device, tile, part, parts)


def _in_two(
    product: Product, device: DeviceInfo, tiles: dict[CudaBlock, float], work: float
) -> Plan | None:
    """Return a plan with a launch of its own for the last columns, if that is less work.

    `tiles` have what each costs beside its work. These are columns in whose blocks most lies
    outside of the result. Column sums have one row for each row of blocks, so both launches have
    blocks of as many rows then.
    """
    first = next(iter(tiles))
    p, beyond = product, product.n % first.block_n
    where = p.k, p.places, False, device.multiprocessors, True
    beside = runs_beside(device, copied(p, device, first))
    launch = block_tiling.BESIDE_COST if beside else block_tiling.CORE_LAUNCH
    best = None
    for height in {tile.block_m for tile in tiles} if p.sums else {0}:
        fitting = tuple(tile for tile in tiles if height in (0, tile.block_m))
        costs = tuple(tiles[tile] for tile in fitting)
        wide, part, parts, most = block_tiling.block(fitting, p.m, p.n - beyond, *where, costs)
        thin, *_, more = block_tiling.block(fitting, p.m, beyond, *where)
        found = most + more + launch, wide, thin, part, parts
        if found[0] < work and (p.n - beyond) % wide.block_n == 0:
            work, best = found[0], found
    if best is None:
        return None
    _, wide, thin, part, parts = best
    return plan(p, device, wide, part, parts, (thin, p.n - beyond))


def ways(product: Product, device: DeviceInfo) -> Iterator[Way]:
    """Return all ways to run it: every tile, in the parts that a model names, with every copy."""
    p, busy = product, device.multiprocessors
    n = p.n * (1 + p.has_two_sums)
    for _, tile, part, parts in blocks.ways_of(p, _tiles(p, device), busy):
        factors = _costly(p, tile)
        can = [(False, True) if part else (False,) for _, part in factors]
        for copy in itertools.product(*can):
            name = block_tiling.way_name(tile, part, parts)
            work = block_tiling.cost(tile, p.m, n, p.places, part, parts, busy)
            for x, is_copied, factor in zip("XY", copy, factors, strict=True):
                name += f", {x} copied" if is_copied else ""
                work += copies.added(p, *factor, is_copied, busy)
            make = functools.partial(plan, p, device, tile, part, parts, copy=copy)
            yield Way(name, work, make)


CORES = Tier("cores", take, ways)
