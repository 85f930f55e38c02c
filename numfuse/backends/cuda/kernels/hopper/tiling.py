"""Tiles of wgmma, what they cost, and which product takes which."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numfuse.backends.cuda.tiling import SPLIT_GAIN


@dataclass(frozen=True)
class HopperTile:
    """A block of a product by wgmma, and how the groups of 128 threads share it."""

    block_m: int
    block_n: int
    #: Groups of 128 threads that multiply.
    consumers: int
    #: Whether each of them has a block of its own, and not 64 rows of one.
    ping_pong: bool
    #: Whether a block lies on its side: `block_m` are columns of the result and `block_n` rows,
    #: any multiple of 8.
    sideways: bool = False
    #: Rows of blocks that are worked on together: their slices of Y are found in the L2 cache.
    group: int = 8

    @property
    def halves(self) -> int:
        """Tiles of 64 rows that a group has of a block."""
        return self.block_m // 64 if self.ping_pong else self.block_m // 64 // self.consumers

    @property
    def piece_rows(self) -> int:
        """Rows of the pieces in which the epilogue takes a block."""
        if not self.sideways:
            return 64
        return self.block_n if self.block_n <= 128 else self.block_n // 2

    def blocks(self, m: int, n: int) -> int:
        """Return how many blocks a result of m rows and n columns has."""
        if self.sideways:
            m, n = n, m
        return -(-m // self.block_m) * -(-n // self.block_n)

    def __str__(self) -> str:
        if self.sideways:
            return f"{self.block_n}x{self.block_m}x64 sideways"
        schedule = "ping-pong" if self.ping_pong else "cooperative"
        return f"{self.block_m}x{self.block_n}x64 {schedule}"


class Lies(NamedTuple):
    """How the factors of a product lie in memory."""

    #: Whether Y lies along N, rather than along K.
    across: bool = False
    #: Lines of 128 bytes that a row of a box of X, and of Y, is in: two of rows that do not begin
    #: with one.
    x_lines: int = 1
    y_lines: int = 1
    #: Whether a block may lie on its side: no (""), of a part of K alone ("parts"), or any ("all").
    sideways: str = ""
    #: Of what its rows are a multiple then.
    step: int = 8


PLAIN = Lies()


#: Blocks of wgmma, with the cycles that a slice of 64 of K takes a multiprocessor: numbers that
#: order the choices as an H200 does (the arithmetic alone is block_m * block_n / 32). Measured in
#: bfloat16, microseconds, 128 x 256 cooperative / 128 x 128 ping-pong: bare products
#: (8192,4096,4096) 369 / 367, (65536,512,512) 61 / 55, (4096,1024,4096) 53 / 50, 4096 cubed
#: 182 / 183; forward with gelu 369 / 371, 77 / 68, 61 / 55, 188 / 188. 64 x 256 ping-pong 2-14%
#: slower than 128 x 128, 128 x 128 cooperative 2-5%. 1024 cubed: 128 x 64 10.0, 64 x 128 11.4,
#: 64 x 64 13.0, 128 x 128 13.1 (bare: 9.2, 9.0, 11.1, 11.0); 512 cubed: 64 x 32 7.3, 64 x 64 7.4,
#: 128 x 64 8.7; M = 16, K = N = 4096: 64 x 64 21.7, 64 x 32 23.3. Of one block on each
#: multiprocessor, nanoseconds a slice: 128 x 256 665, 224 575, 192 496, 160 402, 128 325, 96 264,
#: 64 218; 64 x 256 372, 224 307, 192 284, 160 251, 128 216, 96 170, 64 135, 32 95. (128 bytes of a
#: row take the copy engine 1.1: that is what small blocks wait for.) Two multiprocessors that share
#: each slice of Y (a cluster, each fetching half of it for both) changed nothing: 0.97-1.00.
HOPPER_TILES: tuple[tuple[HopperTile, int], ...] = (
    (HopperTile(128, 256, 2, False), 1080),
    (HopperTile(128, 224, 2, False), 935),
    (HopperTile(128, 192, 2, True), 810),
    (HopperTile(128, 192, 2, False), 820),
    (HopperTile(128, 160, 2, True), 655),
    (HopperTile(128, 160, 2, False), 665),
    (HopperTile(128, 128, 2, True), 558),
    (HopperTile(128, 128, 2, False), 565),
    (HopperTile(128, 96, 2, True), 460),
    (HopperTile(128, 96, 2, False), 465),
    (HopperTile(128, 64, 2, False), 440),
    (HopperTile(64, 96, 1, False), 320),
    (HopperTile(64, 128, 1, False), 340),
    (HopperTile(64, 160, 1, False), 440),
    (HopperTile(64, 192, 1, False), 460),
    (HopperTile(64, 224, 1, False), 520),
    (HopperTile(64, 256, 1, False), 600),
    (HopperTile(64, 64, 1, False), 245),
    (HopperTile(64, 32, 1, False), 305),
)
#: The same of blocks on their side, by rows of the instruction: cycles of a slice, and more of them
#: for each of its columns; but no less than so many of these. (As the table has them.)
SIDEWAYS_SLICE = {128: (125.0, 3.5, 4.45), 64: (105.0, 2.1, 2.5)}
#: The same as `HOPPER_SLICE_BYTES` of these. (On an H200, microseconds on their side and upright:
#: 257 x 6144 x 5632 in float16, (out, in), 88 x 128 37.4 and 64 x 256 45.1; 257 x 5632 x 6144
#: 144 x 128 39.5 and 42.3; 576 x 2336 x 3528 144 x 128 21.0 and 128 x 192 25.2; in bfloat16
#: 577 x 1664 x 5632, (out, in), 208 x 128 21.8 and 128 x 224 23.1; 196 x 4544 x 5120 72 x 128 28.2
#: and 64 x 192 30.7; 77 x 2048 x 5120 80 x 64 13.1 and 128 x 64 14.2.)
SIDEWAYS_BYTES = {64: 57, 128: 51}
#: Rows of a result up to which blocks lie on their side, from one more than those that the smallest
#: block above has; and the most rows of such a block.
SIDEWAYS_ROWS, SIDEWAYS_MOST = (65, 1024), 256
#: The same for six products of bfloat16 parts, of which a thread has two sets of accumulators, with
#: the time in which it makes its own parts (of three products, half of them: no GPU has timed
#: these). Only two groups by turns hide that. Forward with gelu on an H200, 128 x 128 cooperative /
#: 64 x 128 ping-pong: (65536,512,512) 310 / 369, 4096 cubed 1077 / 1441, 1024 cubed 42 / 34.
HOPPER_SPLIT_TILES: tuple[tuple[HopperTile, int], ...] = (
    (HopperTile(128, 128, 2, False), 3700),
    (HopperTile(64, 128, 2, True), 2440),
    (HopperTile(128, 64, 2, False), 2600),
    (HopperTile(64, 128, 1, False), 2520),
    (HopperTile(64, 64, 1, False), 1700),
    (HopperTile(64, 32, 1, False), 1400),
)
#: Cycles that an element of the result costs at the end, with and without an activation, where two
#: groups of threads work on it; and where another group multiplies meanwhile (ping-pong): what is
#: taken away from that.
HOPPER_FINISH = (0.24, 0.09)
HOPPER_HIDDEN = (0.10, 0.05)
#: And of a result whose rows are not aligned to 16 bytes, and so stored value by value; nothing
#: hides that. (By way of an array with aligned rows and a launch that copies (4095,4097,4099) takes
#: 315 microseconds forward and 796 backward, not 288 and 736.)
HOPPER_ROWS = 0.25
#: A block takes no less than this, and this for an element: its way to memory. (Of short K, on an
#: H200, cycles a block: (12288,197,4608) 128 x 128 4250, 128 x 192 5700, 128 x 256 7300;
#: (9216,197,8192) 128 x 128 4080, 128 x 256 7090.)
HOPPER_BLOCK, HOPPER_ELEMENT = 750, 0.2
#: Bytes a cycle that all multiprocessors together move to and from memory.
HOPPER_BYTES = 2300
#: What parts of K add: the launch that adds them up, and bytes of an element of each. (Differences
#: of 40 pairs of ways, within 2000 cycles. With 4200 and 8 bytes 128 x 1664 x 80 was cut, which
#: took an H100 9.7 us for 8.9, with 6200 16 x 2560 x 896 was not, an H200 11.3 us for 10.5.)
HOPPER_JOIN, HOPPER_PLANE = 4800, 11
#: Cycles in which a multiprocessor gets a line of 128 bytes.
HOPPER_LINE = 1.74
#: Rows of a product up to which so few blocks share a slice of Y (and more than one) that a
#: multiprocessor gets slices at this rate, in bytes a cycle, by a block's rows. (257 x 6144 x 5632
#: in float16, (out, in), on an H200, microseconds: 64 x 256 45, 128 x 192 54, 128 x 128 62, or 68,
#: 51 and 35 bytes a cycle; 196 x 4544 x 6144 64 x 192 33, 128 x 128 35, or 58 and 52. Of 1024 rows
#: 64 x 128 takes the time of the table.)
HOPPER_FEW_ROWS, HOPPER_SLICE_BYTES = 640, {64: 62, 128: 48}
#: Of so few rows one warp of a group has all of an upright block's epilogue, and a multiprocessor
#: two such warps. With no more slices of K than this, and so many blocks of LOW_COLUMNS for each,
#: blocks lie on their side, of which all threads have some; where factors do not, blocks by
#: mma.sync take it, of which several have a multiprocessor. (16 x (8 x 96 x 14336) took an H200 26
#: us with relu, and 28 by mma.sync; with gelu by erf 44 to 58 and 30, and 23 on its side, where
#: PyTorch took 26.)
LOW_ROWS, LOW_SLICES, LOW_COLUMNS, LOW_ROUNDS = 16, 2, 256, 2
#: Slices of K of one part, at the least: the pipeline has to fill.
HOPPER_PART = 8
#: Below so many multiply-adds, or so long a K, an operand is not copied for the copy engine's sake:
#: the copy's launch and its way through memory cost more than tensor cores without it lose. Forward
#: and backward in bfloat16 without and with copies, microseconds on an H100: (333,1000,777)
#: 30 + 53 / 12 + 24, (64,3001,3001) 246 + 332 / 80 + 102, (4000,130,1001) 28 + 84 / 19 + 51,
#: (20,515,777) 22 + 41 / 16 + 25; (100,77,129) 12 + 27 / 15 + 26, (1000,77,333) 12 + 39 / 24 + 28.
#: (Least 2^22 until an H200 took 36 and 8.6 for both products of 196 x 493 x 16.)
HOPPER_COPY, HOPPER_COPY_K = 1 << 20, 128
#: But for a large result: of a shorter K a copy is nothing beside it. So many multiply-adds, the
#: least K, and how often an element of the copy is read for each value of K. Forward on an H200,
#: of PyTorch's speed without and with copies: (455,36,39429) 0.91 and 1.34, (390,45,4633) 1.03 and
#: 1.16, (275,77,24519) 1.05 and 1.23, (330,33,38970) 0.96 and 1.40, (3592,61,6067) 0.94 and 1.48;
#: (24941,34,438) 0.99 both, (8683,99,202) 1.25 and 1.20.
HOPPER_COPY_LARGE, HOPPER_COPY_LEAST, HOPPER_COPY_READ = 1 << 26, 16, 3
#: And where the other factor has so few rows or columns that a copy takes longer than the product:
#: (rows, elements of the copy at least), where all comes to mma.sync by 4 bytes. (An H100,
#: bfloat16, with copies and without: 16 x 4098 x 4098 48 and 28 us, 34 x 23678 x 3248, (out, in),
#: 181 and 86, 34 x 3002 x 2002 22 and 18, 64 x 5002 x 3002 43 and 37, 3290 x 5614 x 102 59 and 49,
#: but 100 x 778 x 1002 11.4 and 12.6, 128 x 3002 x 5002 43 and 47, 256 x 2002 x 3002 24 and 35.)
HOPPER_IN_PLACE = (16, 1 << 19), (64, 1 << 21), (112, 1 << 23)
#: Of float32, in operations and bytes a second of an H200: its CUDA cores, its tensor cores as they
#: are reached (a sixth of that for six products), its memory; and seconds of a launch.
HOPPER_CORES, HOPPER_TENSORS, HOPPER_MEMORY, HOPPER_LAUNCH = 48e12, 650e12, 3.5e12, 2.5e-6


def copy_pays(m: int, n: int, k: int, places: int, own: int) -> bool:
    """Return whether a 16-bit factor is copied for the copy engine: X (`own`: 1) or Y (2)."""
    work, other = m * n * k * places, n if own == 1 else m
    if k >= HOPPER_COPY_K:
        return work >= HOPPER_COPY
    large = work >= HOPPER_COPY_LARGE and k >= HOPPER_COPY_LEAST
    return large and other >= HOPPER_COPY_READ * k


def reads_in_place(other: int, elements: int) -> bool:
    """Return whether a 16-bit factor of so many elements is read as it lies, not from a copy.

    `other`: rows or columns of the other one, of which each reads all of them.
    """
    return any(other <= few and elements >= least for few, least in HOPPER_IN_PLACE)


def copies_pay(m: int, n: int, k: int) -> bool:
    """Return whether both 16-bit factors are copied, of however many places."""
    return all(copy_pays(m, n, k, 1, own) for own in (1, 2))


def hopper_splits(
    m: int, n: int, k: int, x_places: int, y_places: int, places: int, split: int
) -> bool:
    """Whether a float32 product is worth the copies that tensor cores need: of Y six bytes of parts
    (four of three products) for each element that is read; of tf32 four, of X as well."""
    strict = 2 * m * n * k * places / HOPPER_CORES
    x_bytes, y_bytes = {6: (4, 10), 3: (4, 8)}.get(split, (8, 8))
    copied = m * k * x_places * x_bytes + k * n * y_places * y_bytes
    rate = HOPPER_TENSORS / (split or 2)
    return 2 * m * n * k * places / rate + copied / HOPPER_MEMORY + 2 * HOPPER_LAUNCH < strict


def too_low(m: int, n: int, slices: int, places: int, multiprocessors: int) -> bool:
    """Return whether rows are so few, and K so short, that mma.sync has more warps at work."""
    blocks = -(-n // LOW_COLUMNS) * places
    return m <= LOW_ROWS and slices <= LOW_SLICES and blocks >= LOW_ROUNDS * multiprocessors


def sideways_tiles(m: int, step: int = 8) -> list[HopperTile]:
    """Return the blocks on their side that so many rows fill as well as 64 of upright ones.

    Their rows are a multiple of `step`. (Of 64 or 128 rows upright ones are as good: 1024 x 3200 x
    8192 takes both 76 us.) Up to LOW_ROWS they are for a product of which `too_low` holds.
    """
    least, most = SIDEWAYS_ROWS
    if m <= LOW_ROWS and step == 8:
        return [HopperTile(128, max(8, -(-m // 8) * 8), 2, False, True)]
    if not least <= m <= most:
        return []
    found: dict[int, None] = {}
    upright = -(-m // 64) * 64
    for count in range(-(-m // SIDEWAYS_MOST), -(-m // 64) + 1):
        rows = -(-m // count)
        # (of more than 128 a block is stored in two halves of whole eights)
        even = step if rows <= 128 else max(step, 16)
        rows = -(-rows // even) * even
        apart = rows % 64 or (step > 8 and rows > 128)
        if rows > 64 and apart and -(-m // rows) * rows <= upright:
            found[rows] = None
    return [HopperTile(64 * c, rows, c, False, True) for rows in found for c in (2, 1)]


def box_width(columns: int) -> int:
    """Return the columns of a box of a block so wide, of which rows have 128 bytes or 64."""
    return 32 if columns % 64 else 64


#: Cycles, a tile, and the number of parts of K.
_Way = tuple[float, HopperTile, int]


def hopper_tile(
    m: int, n: int, slices: int, places: int, multiprocessors: int, *, split: int = 0,
    heavy: bool = False, rows: bool = False, free: bool = False, lies: Lies = PLAIN,
    sums: int = 1, unit: int = 32,
) -> tuple[HopperTile, int]:  # fmt: skip
    """The tile, and the number of parts of K, of a product on Hopper.

    `split`: products of the operands' parts, six or three, or 0.  `heavy`: an epilogue that
    computes an activation.  `rows`: a result of unaligned rows.  `free`: K may be cut.
    `lies`: the factors' layout.  Of two `sums` a block has half its columns each, multiples of
    `unit`.
    """
    how = split, heavy, rows, free, lies, sums, unit
    return _cheapest(m, n, slices, places, multiprocessors, *how)[1:]


@functools.lru_cache(maxsize=4096)
def hopper_cut(
    m: int,
    n: int,
    slices: int,
    places: int,
    multiprocessors: int,
    split: int,
    lies: Lies,
    nbytes: int,
) -> tuple[HopperTile, int] | None:
    """The tile and the number of parts of a product whose K is cut though it is no `free` one.

    None but where blocks are fewer than multiprocessors and parts save much. Nothing of the
    epilogue is asked, as a sum has the same bits whatever is made of it. `nbytes` are those of the
    operands, at least: their way through memory takes its time in one part and in several.
    """
    if not m * n * slices * places:
        return None
    sizes = m, n, slices, places, multiprocessors, split, False, False
    one, tile, _ = _cheapest(*sizes, False, lies, 1)
    if tile.blocks(m, n) * places >= multiprocessors:
        return None
    cycles, tile, parts = _cheapest(*sizes, True, lies, 1)
    least = nbytes / HOPPER_BYTES
    if parts == 1 or max(cycles, least + HOPPER_JOIN) >= SPLIT_GAIN * max(one, least):
        return None
    return tile, parts


@functools.lru_cache(maxsize=4096)
def _cheapest(*how: Any) -> _Way:
    """Return the way of the fewest cycles; the arguments are those of `ways`."""
    best: _Way | None = None
    for way in ways(*how):
        if best is None or way[0] < best[0] * 0.995:
            best = way
    assert best is not None
    return best


def ways(
    m: int, n: int, slices: int, places: int, multiprocessors: int,
    split: int, heavy: bool, rows: bool, free: bool, lies: Lies, sums: int, unit: int = 32,
) -> Iterator[_Way]:  # fmt: skip
    """Return all ways to run a product; the arguments are those of `hopper_tile`."""
    n *= sums
    # of a Y across K, a box has 64 columns that begin a line of the L2 cache; one of 32 takes the
    # copy engine as long: a slice of 128 x 96 takes 346 ns then, and one of 128 x 128 takes 330
    line = 64 if lies.across else 32
    tiles = []
    for tile, _ in HOPPER_SPLIT_TILES if split else HOPPER_TILES:
        columns = tile.block_n // sums
        # (rows of shared memory have 64 bytes or 128)
        if columns % unit == 0 and (columns <= line or columns % line == 0):
            tiles.append(tile)
    if lies.sideways and sums == 1:
        tiles += sideways_tiles(m, lies.step)
    most = max(1, slices // HOPPER_PART) if free else 1
    for tile in tiles:
        for parts in sorted({1, *(p for p in (2, 3, 4, 6, 8, 12, 16, 24, 32) if p <= most)}):
            if tile.sideways and parts == 1 and lies.sideways != "all":
                continue
            if -(-slices // -(-slices // parts)) == parts:
                sizes = m, n, slices, places, multiprocessors
                yield cycles(tile, parts, *sizes, split, heavy, rows, lies, sums), tile, parts


def cycles(
    tile: HopperTile, parts: int, m: int, n: int, slices: int, places: int, multiprocessors: int,
    split: int, heavy: bool, rows: bool, lies: Lies, sums: int = 1,
) -> float:  # fmt: skip
    """Return the cycles of the multiprocessor with the most blocks."""
    each: float
    if split:
        each = dict(HOPPER_SPLIT_TILES)[tile] * split // 6
    else:
        x_lines, y_lines = lies.x_lines, lies.y_lines
        if tile.sideways:
            x_lines, y_lines = y_lines, x_lines
            start, more, least = SIDEWAYS_SLICE[tile.block_m]
            each = max(start + more * tile.block_n, least * tile.block_n)
        else:
            each = dict(HOPPER_TILES)[tile]
        each = max(each, HOPPER_LINE * (tile.block_m * x_lines + tile.block_n * y_lines))
        if 64 < m <= HOPPER_FEW_ROWS:
            rate = (SIDEWAYS_BYTES if tile.sideways else HOPPER_SLICE_BYTES)[tile.block_m]
            each = max(each, 128 * (tile.block_m + tile.block_n) / rate)
    work = -(-slices // parts) * each
    blocks = tile.blocks(m, n) * places
    elements, kind = tile.block_m * tile.block_n, 0 if heavy else 1
    finish = elements * (HOPPER_FINISH[kind] + (HOPPER_ROWS if rows else 0))
    # (one result of two sums is half of a block; a gate on an H200, bfloat16, microseconds by 64 x
    # 128, 128 x 64 and 64 x 64: 333 x 1000 x 777 14.3, 15.1, 16.7; 300 x 2000 x 1001 22.0, 23.9,
    # 24.9; 640 x 768 x 640 8.6, 9.2, 10.5; 1000 x 500 x 400 10.4, 10.9, 12.1; 500 x 700 x 611 13.8,
    # 13.2, 15.0)
    halved = sums == 2 and tile.block_n == 128
    if tile.ping_pong or (tile.consumers == 1 and not halved):
        finish *= 2  # one group alone
    units = -(-blocks * parts // multiprocessors)
    least = HOPPER_BLOCK + elements * HOPPER_ELEMENT
    if tile.ping_pong and not rows:  # one consumer finishes while the other multiplies
        cost = units * max(work + elements * HOPPER_HIDDEN[kind], least) + finish
    else:
        cost = units * max(work + finish, least)
    if parts > 1:
        cost += HOPPER_JOIN + HOPPER_PLANE * parts * m * n * places / HOPPER_BYTES
    return cost
