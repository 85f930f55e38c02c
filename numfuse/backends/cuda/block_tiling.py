"""Blocks by cp.async on CUDA: their tiles, and a model of the time of a product by each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from numfuse.tiling import round_up

#: Values of K of a part of blocks by cp.async, at the least, d_b's as well. (An H200 took 30.8 us
#: for a backward of 2185 x 205 x 74 in float32 with a d_b in parts of 512, of 256 26.1, of 128
#: 24.4.)
CUT_PART = 128
#: Of blocks by cp.async, whose models know more, it is so much; and K is cut where they are fewer
#: than so many for each multiprocessor: of one and a half the second round is half empty. (On an
#: H100 203 blocks of 1840 x 4644 x 862 in float64 took 380 us, cuBLAS 312; 77 x 4864 x 12288 in
#: float32, transposed, 627 in one part and 396 in five.)
CUT_GAIN, CUT_ROUNDS = 0.94, 2


@dataclass(frozen=True)
class CudaBlock:
    """A thread block's block of a product, fetched by cp.async, and the part of one worker of it.

    A worker is a thread on CUDA cores, a warp on tensor cores.
    """

    block_m: int
    block_n: int
    block_k: int
    part_m: int
    part_n: int
    #: Copies of the slices in shared memory.
    stages: int
    #: Blocks that share a multiprocessor.
    resident: int
    #: Of K in one instruction of a tensor core; 0: CUDA cores.
    chunk: int = 0
    #: Rows of blocks that are worked on together: their slices of Y are found in the L2 cache.
    group: int = 8
    #: Speed of a full device, in relation to the largest tile.
    speed: float = 1.0
    #: Where the chains of a long sum add up, "registers" or "shared" memory; "": all is one chain.
    kept: str = "registers"

    @property
    def threads(self) -> int:
        workers = self.block_m // self.part_m * (self.block_n // self.part_n)
        return workers * 32 if self.chunk else workers

    def __str__(self) -> str:
        kind = "warp" if self.chunk else "thread"
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}, {self.part_m}x{self.part_n} a {kind}, "
            f"{self.stages} stages"
        )


#: float32 on CUDA cores: at 4096 cubed on an H200 the first does 51.4 TFLOP/s (cuBLAS 51.8), the
#: others less ("Blocks that were measured"), or more where their blocks fill the rounds. The small
#: ones are for results of few blocks, the last for those of one round. The sum of chains that have
#: ended waits in shared memory, which holds it of three blocks beside the slices (2766 us; in
#: registers, with two blocks on a multiprocessor, 2896).
CORE_BLOCKS = (
    CudaBlock(64, 128, 16, 8, 8, 3, 3, kept="shared"),
    CudaBlock(64, 64, 16, 8, 8, 3, 4, speed=0.98),
    CudaBlock(32, 64, 16, 4, 8, 4, 6, speed=0.86),
    CudaBlock(64, 32, 32, 4, 4, 5, 3, speed=0.62),
    CudaBlock(32, 32, 32, 4, 4, 5, 4, speed=0.59),
    CudaBlock(128, 128, 8, 8, 16, 4, 2, speed=1.05, kept="shared"),
)
#: Shared memory of a multiprocessor that holds two blocks of the last of them, sums included.
CORE_SHARED = 200 << 10
#: Of K in an instruction of float64.
DOUBLE_CHUNK = 8
#: float64 on tensor cores, likewise: 60.0 TFLOP/s, and 55.8 with the epilogue of gelu (cuBLAS 63.0,
#: and 30.8 with passes). Two are for results of one block on each multiprocessor, which have its
#: shared memory to themselves: with three slices on their way that of 256 x 768 x 1600
#: waits for memory. (An H200: 21.9 us, by the first 27.7, cuBLAS's product 23.3; 128 x 1000 x 1600
#: 17.7, by the second 22.4, cuBLAS 22.8.) The last two are for few columns. (An H100:
#: 128991 x 87 x 14 with relu 57 and 66 us, by the first 68; with gelu, which takes a tile the time
#: of all its columns, 93 and 83, by the first 141.)
DOUBLE_BLOCKS = (
    CudaBlock(64, 64, 16, 32, 32, 3, 3, 8),
    CudaBlock(32, 64, 16, 32, 16, 4, 3, 8, speed=0.98),
    CudaBlock(32, 32, 32, 16, 16, 4, 2, 8, speed=0.92),
    CudaBlock(64, 64, 16, 32, 16, 6, 1, 8, speed=1.23),
    CudaBlock(32, 64, 16, 32, 16, 8, 1, 8, speed=1.18),
    CudaBlock(64, 32, 16, 32, 16, 4, 4, 8, speed=0.65),
    CudaBlock(128, 16, 16, 32, 16, 3, 4, 8, speed=0.6),
)
#: Those for several chains, which registers add up, of products of all members of points: where K
#: is that of a network's layer a block ends and begins in an eighth of its time, and another one
#: multiplies meanwhile. (No GPU has timed this yet.)
DOUBLE_MEMBERS = (
    CudaBlock(64, 64, 16, 32, 32, 4, 2, 8, speed=0.95),
    CudaBlock(32, 64, 16, 32, 16, 4, 3, 8, speed=0.92),
    CudaBlock(32, 32, 32, 16, 16, 4, 2, 8, speed=1.0),
)
#: And those of all other sums of several chains: at 4096 cubed 2528 us, beside 2530 of one chain in
#: `DOUBLE_BLOCKS`. (An H200, the second beside what was chosen without it: 1500 x 9216 x 192 in 140
#: us for 151, 577 x 22016 x 160 in 129 for 142, 196 x 11008 x 576 in 77 for 86.)
DOUBLE_LONG = (
    CudaBlock(64, 128, 16, 32, 32, 4, 1, 8),
    CudaBlock(128, 64, 16, 32, 32, 4, 1, 8, speed=0.98),
    *DOUBLE_MEMBERS,
    CudaBlock(64, 64, 16, 32, 16, 6, 1, 8, speed=1.05),
    CudaBlock(32, 64, 16, 32, 16, 8, 1, 8, speed=1.16),
)
#: 16-bit types by mma.sync: 64 x 64 a warp reads 8 matrices of 16 x 16 for 32 instructions. On an
#: H200, which has wgmma for what is aligned, 370 TFLOP/s; two blocks of 128 x 128 do 337. Sums are
#: one chain, as wgmma's: what the unit cuts off is below the rounding of a 16-bit result, and 128
#: sums a thread leave no registers for a second set.
HALF_BLOCKS = (
    CudaBlock(128, 256, 32, 64, 64, 4, 1, 16, kept=""),
    CudaBlock(128, 128, 32, 64, 64, 4, 2, 16, speed=0.9, kept=""),
    CudaBlock(64, 64, 32, 32, 32, 4, 4, 16, speed=0.7, kept=""),
    CudaBlock(32, 64, 32, 32, 16, 4, 4, 16, speed=0.6, kept=""),
)
#: The same where a factor comes value by value through registers: fewer sums leave room for them.
HALF_BLOCKS_HELD = (
    CudaBlock(128, 128, 32, 64, 32, 3, 1, 16, kept=""),
    CudaBlock(64, 64, 32, 32, 32, 3, 3, 16, speed=0.8, kept=""),
)
#: Sums that keep a multiprocessor's tensor cores busy. Fewer do less: their share of them to the
#: power of 0.6, in float64 of 0.4. On CUDA cores it is warps that count, as none has the next slice
#: ready while it multiplies this one: those of a scheduler, of which the one with the most is the
#: last. (Three blocks of two warps: two of four schedulers have two.) Numbers and powers are
#: fitted to sweeps of an H200, as the speeds of `CORE_BLOCKS` and `DOUBLE_BLOCKS` are.
BUSY_SUMS, BUSY_SUMS_POWER = 12288, 0.6
DOUBLE_BUSY_SUMS, DOUBLE_BUSY_POWER = 14800, 0.4
SCHEDULERS, BUSY_WARPS, BUSY_WARPS_POWER = 4, 2.1, 0.35
#: Values of K in the time of which a block begins and ends, on tensor cores and on CUDA cores.
FILL, CORE_FILL = 64, 50
#: Rounds of blocks that the parts of a sum may fill, beyond two, and from which K on: 72 blocks
#: fill half of 132 multiprocessors, 3 parts of each 1.6 rounds, 11 six. (A float64 d_b of 768 x 768
#: over 106,496 rows was at 34 TFLOP/s in one part, where d_a was at 53.)
MORE_ROUNDS = 3, 4, 6
DEEP = 1 << 14
#: The same of results whose blocks are more than half a round: 203 of 132 take two, and three parts
#: of each five thirds.
FINE_ROUNDS = 3, 5, 8
#: In float64 also so many blocks for each multiprocessor, and every number below that which leaves
#: none of them alone behind whole rounds: 48 blocks of 256 x 11008 x 1536 take three rounds in
#: eight parts. (An H200: 174 us, and 195 without; 1500 x 9216 x 192 in 11 parts 123 for 133. With
#: every number, 11 shapes took 0.90 to 1.08 times as long, and 77 x 5504 x 3584 in three parts,
#: four blocks where three have room, was at 0.74 of cuBLAS on an H100. In float32 32 shapes took
#: 0.87 to 1.26 times as long.)
EVEN = 8
#: What a join takes to begin and end, in multiply-adds of one multiprocessor, by tensor cores, by
#: these in float64 and by CUDA cores (2 to 3 us), and what a value of a plane takes on its way
#: through memory, in those of all.
LAUNCH_COST, DOUBLE_LAUNCH, CORE_LAUNCH = 1_400_000, 800_000, 450_000
PLANE_COST, CORE_PLANE = 50, 65
#: Rounds of blocks behind which the last rows may be made apart.
TAIL_ROUNDS = 5
#: And a launch that runs beside the one before it: what its blocks wait for at their end. (A guess
#: that no GPU has timed.)
BESIDE_COST = 450_000


def _work(tile: CudaBlock, blocks: int, part: int, multiprocessors: int) -> float:
    """Return the multiply-adds of the multiprocessor with the most, at the speed of a full one.

    On CUDA cores blocks that begin together end together. Who is ready first then takes several of
    those that are left, while others have none: less so after more rounds, in which they drift. One
    that is left takes the time of a block that is alone. (448 blocks of 256 x 64 x 14336 took an
    H100 28.6 us, 224 of twice the size in one round 22.6.)
    """
    most: float = -(-blocks // multiprocessors)
    rounds = blocks // (tile.resident * multiprocessors)
    if rounds and not tile.chunk:
        left = blocks / multiprocessors - rounds * tile.resident
        alone = 1 / _warps_busy(tile.threads / 32) / rounds if left else 0
        last = min(tile.resident, max(left * (1 + rounds**-2), alone))
        most = max(most, rounds * tile.resident + last)
    area, together = tile.block_m * tile.block_n, min(most, tile.resident)
    fill, warps = FILL, together * tile.threads / 32
    if not tile.chunk:
        busy, fill = _warps_busy(warps), CORE_FILL
    elif tile.chunk == DOUBLE_CHUNK:
        busy = min(1.0, together * area / DOUBLE_BUSY_SUMS) ** DOUBLE_BUSY_POWER
    else:
        busy = min(1.0, together * area / BUSY_SUMS) ** BUSY_SUMS_POWER
    return most * area * (part + fill) / (tile.speed * busy)


def _warps_busy(warps: float) -> float:
    """Return the share of CUDA cores that so many warps of a multiprocessor keep busy."""
    most = -(-warps // SCHEDULERS)
    return float(warps / (SCHEDULERS * most) * min(1.0, most / BUSY_WARPS) ** BUSY_WARPS_POWER)


def _counts(
    tile: CudaBlock, blocks: int, k: int, multiprocessors: int, part: int
) -> list[tuple[int, int]]:
    """Return (length, number) of parts of a sum that fill so many blocks to whole rounds."""
    slots = tile.resident * multiprocessors
    more = MORE_ROUNDS if k >= DEEP else FINE_ROUNDS if 2 * blocks > slots else ()
    rounds = 0.5, 1, 0 if tile.chunk else 2, *more
    wanted = {max(1, int(x * slots) // max(1, blocks)) for x in rounds}
    if tile.chunk == DOUBLE_CHUNK:
        wanted |= {
            max(1, each * multiprocessors // max(1, blocks))
            for each in range(1, EVEN + 1)
            if each <= tile.resident or each % tile.resident == 0
        }
    found: dict[tuple[int, int], None] = {}
    for number in wanted | {1}:
        length = round_up(-(-k // min(number, max(1, k // part))), tile.block_k)
        number = -(-k // length) if number > 1 else 1
        # (parts that are too short leave one of all of K, which is there once)
        found[length if number > 1 else max(1, k), number] = None
    return list(found)


def _launch_cost(tile: CudaBlock) -> int:
    """Return what another launch takes to begin and end, in the multiply-adds of a tile."""
    return {0: CORE_LAUNCH, DOUBLE_CHUNK: DOUBLE_LAUNCH}.get(tile.chunk, LAUNCH_COST)


def cost(
    tile: CudaBlock, m: int, n: int, places: int, length: int, number: int, multiprocessors: int
) -> float:
    """Return the work of a way: a tile, and a sum in `number` parts of such a length."""
    blocks = -(-m // tile.block_m) * -(-n // tile.block_n) * places
    found = _work(tile, blocks * number, length, multiprocessors)
    if number > 1:
        found += _launch_cost(tile)
        plane = PLANE_COST if tile.chunk else CORE_PLANE
        found += places * m * n * number * plane / multiprocessors
    return found


#: The cost of a way to run a product, its tile, and (length, number) of the parts of its sum.
_Way = tuple[float, CudaBlock, int, int]


def ways(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, places: int, part: int,
    multiprocessors: int, beside: tuple[float, ...] = (), terms: int = 1,
) -> list[_Way]:  # fmt: skip
    """Return the ways to run a product; K is cut to parts of `part` at least, 0: it is not.

    `beside` is what each tile costs beside that, 0 where it is empty. Of a sum of several `terms`
    each is cut so, and the parts of all are planes of one launch.
    """
    found = []
    for tile, more in zip(tiles, beside or (0.0,) * len(tiles), strict=True):
        blocks = -(-m // tile.block_m) * -(-n // tile.block_n) * places * terms
        cuts = [(max(1, k), 1)]
        if part:
            cuts = _counts(tile, blocks, k, multiprocessors, part)
        for length, number in cuts:
            expected = cost(tile, m, n, places, length, terms * number, multiprocessors)
            found.append((expected + terms * more, tile, length, number))
    return found


def in_parts(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, places: int, part: int,
    multiprocessors: int, beside: tuple[float, ...] = (),
) -> list[_Way]:  # fmt: skip
    """Return the ways to run a product whose K is cut to parts of `part` values, or is one."""
    number = max(1, -(-k // part))
    return [
        (cost(tile, m, n, places, part, number, multiprocessors) + more, tile, part, number)
        for tile, more in zip(tiles, beside or (0.0,) * len(tiles), strict=True)
        if number == 1 or part % tile.block_k == 0
    ]


def way_name(tile: object, length: int, number: int) -> str:
    """Return a way in words: a tile, and the parts of its sum."""
    return f"{tile}, K in {number} parts of {length}" if number > 1 else str(tile)


def _cheapest(*how: Any) -> _Way:
    """Return the way with the least work; the arguments are those of `ways`."""
    return min(ways(*how), key=itemgetter(0))


@functools.lru_cache(maxsize=4096)
def block(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, places: int, free: bool,
    multiprocessors: int, whole: bool = False, beside: tuple[float, ...] = (),
) -> tuple[CudaBlock, int, int, float]:  # fmt: skip
    """The tile of a product, (length, number) of the parts of its sum, its work.

    It has the least work on the multiprocessor that has the most. Where the sum is `free`, the
    parts (not the tile) depend on the sizes of one place: an element of a batch gives what it gives
    alone. Else there is one part, but where the first tile's blocks of all places are fewer than
    `CUT_ROUNDS` of multiprocessors, and parts save much (never where K shall stay `whole`).
    `beside` is what each tile costs beside its work.
    """
    count = 1 if free else places
    best = _cheapest(tiles, m, n, k, count, CUT_PART if free else 0, multiprocessors, beside)
    blocks = -(-m // tiles[0].block_m) * -(-n // tiles[0].block_n) * places
    if not (free or whole) and blocks < CUT_ROUNDS * multiprocessors:
        cut = _cheapest(tiles, m, n, k, places, CUT_PART, multiprocessors, beside)
        if cut[0] < CUT_GAIN * best[0]:
            best = cut
    work, tile, part, parts = best
    if free and places > 1:  # the parts are fixed, but all places share the device
        together = in_parts(tiles, m, n, k, places, part, multiprocessors, beside)
        work, tile, *_ = min(together, key=itemgetter(0))
    return tile, part, parts, work


@functools.lru_cache(maxsize=4096)
def tail(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, multiprocessors: int,
    beside: tuple[float, ...] = (),
) -> tuple[float, CudaBlock, int, CudaBlock, int, int] | None:  # fmt: skip
    """The cheapest way to make the last rows apart: their sums alone are in parts.

    That is its work, the tile of the rows before these and their number, which fill rounds of
    blocks, and the tile and (length, number) of the parts of the last ones. None where no rows fill
    a round.
    """
    best: tuple[float, CudaBlock, int, CudaBlock, int, int] | None = None
    for tile, more in zip(tiles, beside or (0.0,) * len(tiles), strict=True):
        lines, columns = m // tile.block_m, -(-n // tile.block_n)
        for each in range(1, TAIL_ROUNDS * tile.resident + 1):
            rows = each * multiprocessors // columns * tile.block_m
            if not 0 < rows < m or rows > lines * tile.block_m:
                continue
            first = cost(tile, rows, n, 1, k, 1, multiprocessors) + more + BESIDE_COST
            if best is not None and first >= best[0]:
                break
            last = _cheapest(tiles, m - rows, n, k, 1, CUT_PART, multiprocessors, beside)
            if best is None or first + last[0] < best[0]:
                best = first + last[0], tile, rows, *last[1:]
    return best


def two_terms(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, places: int, multiprocessors: int,
    beside: tuple[float, ...] = (),
) -> tuple[CudaBlock, int, int] | None:  # fmt: skip
    """The tile of a sum of two products, and (length, number) of the parts of each of its terms.

    All parts of both are planes of one launch: two launches have half of the blocks each. None
    where these take less time than that and the planes. `beside` is what each tile costs beside its
    work.
    """
    how = places, CUT_PART, multiprocessors, beside, 2
    work, tile, length, number = _cheapest(tiles, m, n, k, *how)
    apart = 2 * block(tiles, m, n, k, places, False, multiprocessors, beside=beside)[3]
    apart += _launch_cost(tile)
    return (tile, length, number) if work < CUT_GAIN * apart else None
