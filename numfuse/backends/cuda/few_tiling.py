"""Products of few rows, columns or vectors on CUDA: their blocks, and parts of K."""

from __future__ import annotations

from numfuse.backends.cuda import block_tiling, tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.backends.cuda.tiling import round_up

#: float64 of few rows on Hopper: one block on each multiprocessor, with most of its shared memory
#: full of slices on their way, and a cluster of them that shares K. On an H200 at K = N = 4096 they
#: take 0.64 to 0.77 times as long as the tiles above, and with half of the slices no less.
DOUBLE_FEW = (
    CudaBlock(16, 64, 32, 16, 16, 4, 1, 8),
    CudaBlock(32, 64, 16, 32, 16, 8, 1, 8),
    CudaBlock(64, 64, 16, 32, 16, 6, 1, 8),
)
#: Columns and values of K from which on; values of K of a block and blocks of a cluster, at most;
#: the least share of multiprocessors that one round of blocks keeps busy. (An H100, float64, beside
#: the best of the tiles above: 16, 32 and 64 x 4096 x 4096 60, 63 and 67 us for 63, 64 and 68,
#: 16 x 2048 x 8192 62 for 63. Clusters of more blocks do not fill its groups of multiprocessors:
#: 32 x 8192 x 2048 by fours 90 for 66, 64 x 9216 x 1664 by fives 104 for 65; and two rounds for
#: 64 x 1664 x 9216 took 96 for 80.)
FEW_LEAST = 1024
CLUSTER_K = 256
CLUSTER = 2
FEW_SHARE = 0.85


def few(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, multiprocessors: int
) -> tuple[CudaBlock, int, int] | None:
    """The tile of a product of few rows, and (length, number) of the parts of K in a cluster.

    None for more rows, and where such blocks do not fill the device once. They depend on the sizes
    of one place, as in :func:`block`.
    """
    if min(n, k) < FEW_LEAST or m > tiles[-1].block_m:
        return None
    tile = next(tile for tile in tiles if m <= tile.block_m)
    columns = -(-n // tile.block_n)
    most = min(CLUSTER, k // CLUSTER_K, multiprocessors // columns)
    if columns * most < FEW_SHARE * multiprocessors:
        return None
    part = round_up(-(-k // most), tile.block_k)
    return tile, part, -(-k // part)


#: Products of few rows (`thin`): so many, and so many columns and values of K at the least (by the
#: tiles above an H100 took 32 us for 52 x 484 x 4375, whose bytes take 4). On an H200 they take
#: 0.39 to 0.85 times as long as the tiles at K = N = 4096. 16-bit types by the same way took longer
#: than tiles of wgmma.
THIN_ROWS = {"float32": 64, "float64": 8}
THIN_LEAST = 256
#: Warps of a block; bytes of a slice of Y; slices that are on their way, or read.
THIN_WARPS = 8
THIN_SLICE = 16384
THIN_STAGES = 8
#: Rows up to which a lane has one column and all of them: it reads X by broadcast, each value for
#: one product. (An H200, 16 x 4096 x 4096: 38 us so, and 32 by four columns and a quarter of the
#: rows; 8 x 1679 x 46008 110 and 99.)
THIN_OWN = 4
#: Blocks of a multiprocessor, where there are so many, of (rows, blocks): what one waits for as it
#: begins and ends is the time of another one. Each has fewer slices then, but not fewer than
#: THIN_FEWEST. (An H200: 8 x 1679 x 46008 117 us by one and 99 by two, 16 x 1024 x 16000 44 and 37,
#: 4 x 4096 x 11008 62 by one and 57 by three; but where one round has all of them 16 x 4096 x 4096
#: 32 by one and 34 by two.) The sums of more rows leave no registers for a second one.
THIN_RESIDENT = (8, 3), (32, 2)
THIN_FEWEST = 3
#: Values of K that a warp adds up behind one another in them. Libraries cut such sums into more
#: parts: with 256 the error of 8 x 1408 x 5504 in float32 was twice cuBLAS's. An end takes a 64th
#: of the arithmetic, in kernels that wait for memory.
THIN_CHAIN = 64


#: Where blocks are fewer than multiprocessors K is cut into parts of at least so many values, as
#: many as are on their way at once; a part begins in the time of so many. The bytes that a
#: multiprocessor takes in a cycle (an H200 took 69 us for 2 x 11008 x 768 in float64, by 24
#: blocks), and all of them from memory (an H200's 4 TB/s at 1.75 GHz); fused multiply-adds of
#: float32 of one in a cycle, of float64 half as many.
THIN_PART, THIN_FILL = 1024, 512
THIN_BYTES, MEMORY_BYTES = 24, 2300
FMAS = 128


def thin_resident(blocks: int, rows: int, multiprocessors: int) -> int:
    """Return the blocks of a multiprocessor at the most, of so many with these rows."""
    most = next((most for few, most in THIN_RESIDENT if rows <= few), 1)
    return min(most, -(-blocks // multiprocessors))


def thin_cost(
    blocks: int, rows: int, k: int, itemsize: int, parts: int, multiprocessors: int
) -> float:
    """Return the cycles of a product of few rows, with so many blocks of 32 columns.

    A value of K takes a block the time of its 32 values of Y, or of their products, and at least
    what memory takes for those of all blocks. Blocks of a multiprocessor share that.
    """
    line = 32 * itemsize
    cycles = max(line / THIN_BYTES, 32 * rows * itemsize / 4 / FMAS)
    shares = -(-blocks * parts // multiprocessors) / parts
    found = k * max(cycles * shares, blocks * line / MEMORY_BYTES)
    return found + (THIN_FILL * cycles + block_tiling.CORE_LAUNCH / FMAS if parts > 1 else 0)


#: Rows up to which nothing else is asked, of an X that comes by 16 bytes, and of one that comes
#: value by value. (float32 on an H200, such blocks and the fastest tiles: 17 x 519 x 16148 47 and
#: 25 us; by 16 bytes 16 x 4096 x 4096 32 and 40.) Of more, cycles of a value of K in a block: of
#: up to THIN_WIDE rows by 16 bytes (17 x 4096 x 11008 93 and 87, 24 x 2048 x 11008 55 and 51,
#: 32 x 12288 x 2560 106 and 78, 28 x 4096 x 4096 38 and 41, 32 x 4096 x 4096 47 and 48), or of
#: others, and more for each row; and cycles of a multiply-add of one multiprocessor's CUDA cores at
#: full speed. (24 x 4096 x 4096 took 44 us, and 68 by the tiles above, but 64 x 1792 x 22016 184
#: and 144, 64 x 1024 x 1024 21 and 15.)
THIN_SURE, THIN_FEW, THIN_WIDE = 16, 8, 32
THIN_WIDE_CYCLES, THIN_CYCLES, THIN_ROW_CYCLES = 13.0, 14.0, 0.2
CORE_CYCLES = 1 / 125
#: Values of K in the time of which such a block begins and ends: an H100 took 42.7 us for
#: 64 x 256 x 18944, which are five rounds of them, and 28.8 by the tiles above, but 32 and 33 for
#: 52 x 484 x 4375 with the weight as (out, in), which tiles have to turn.
THIN_ROUND = 200


def thin_pays(
    blocks: int, m: int, n: int, k: int, places: int, parts: int, multiprocessors: int, whole: bool,
    beside: tuple[float, ...], narrow: bool,
) -> bool:  # fmt: skip
    """Return whether rows take no longer by blocks of all of them, K cut in so many parts.

    `beside` is what the tiles of `CORE_BLOCKS` cost beside their work; `narrow`: X comes value by
    value.
    """
    rounds = -(-blocks * parts // multiprocessors)
    wide = m <= THIN_WIDE and not narrow
    cycles = THIN_WIDE_CYCLES if wide else THIN_CYCLES + THIN_ROW_CYCLES * m
    cycles *= rounds * (-(-k // parts) + THIN_ROUND)
    cycles += block_tiling.CORE_LAUNCH * CORE_CYCLES if parts > 1 else 0
    where = places, False, multiprocessors, whole, beside
    return cycles <= block_tiling.block(block_tiling.CORE_BLOCKS, m, n, k, *where)[3] * CORE_CYCLES


def thin_parts(blocks: int, rows: int, k: int, itemsize: int, multiprocessors: int) -> int:
    """Return the parts of K: more than one must save the launch that adds them up, and more."""

    def cost(parts: int) -> float:
        return thin_cost(blocks, rows, k, itemsize, parts, multiprocessors)

    # one to each multiprocessor, or as many more as a second one may take
    places = multiprocessors * thin_resident(2 * multiprocessors, rows, multiprocessors)
    fewest, most = (min(x // max(1, blocks), k // THIN_PART) for x in (multiprocessors, places))
    cut = min(range(max(2, fewest), most + 1), key=cost, default=1)
    return cut if cost(cut) < tiling.SPLIT_GAIN * cost(1) else 1


#: Bytes of the long factor of few vectors (`vectors`) that a block takes in a cycle, by bytes of an
#: access: four of each of 256 threads, in the 800 cycles that memory takes; and a multiprocessor.
VECTOR_RATE, VECTOR_BYTES = 4 * 256 / 800, 64


def vector_cost(blocks: int, nbytes: int, access: int, parts: int, multiprocessors: int) -> float:
    """Return the cycles of a product of few vectors, whose long factor has so many bytes.

    Blocks by their loads of `access` bytes, multiprocessors that have some, or memory take them the
    slowest. Parts have a join behind them.
    """
    busy = min(blocks * parts, multiprocessors)
    rate = min(VECTOR_RATE * access * blocks * parts, VECTOR_BYTES * busy, MEMORY_BYTES)
    return nbytes / max(1, rate) + (block_tiling.CORE_LAUNCH / FMAS if parts > 1 else 0)


def vector_parts(blocks: int, nbytes: int, access: int, most: int, multiprocessors: int) -> int:
    """Return the parts of K, `most` at the most.

    There are two blocks a multiprocessor, by accesses of 4 bytes and less four.
    They must save more than the launch that adds them up takes.
    """
    parts = min((2 if access > 4 else 4) * multiprocessors // max(1, blocks), most)
    if parts < 2:
        return 1
    one, cut = (vector_cost(blocks, nbytes, access, x, multiprocessors) for x in (1, parts))
    return parts if cut < tiling.SPLIT_GAIN * one else 1
