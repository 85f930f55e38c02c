"""Every block size of the CPU backend, chosen from the problem and the host, each with its reason.

Nothing here imports Numba: the host's vector width is passed in by the backend that knows it.
"""

from __future__ import annotations

import functools
import glob
import math
import pathlib
from dataclasses import dataclass, field

from numfuse.tiling import RUN as RUN
from numfuse.tiling import round_up as round_up

#: Registers: (MR, vectors of NR) by vector bytes.  An ``MR x (vectors * VL)`` tile must leave
#: registers for the row of B and one broadcast, and have at least (latency x FMA ports) = 8-10
#: independent sums.
#: 64 bytes: 32 registers, 28 sums + 2 + 1; 14x2 measured at 99-100% of the FMA peak on Zen 4 and
#:   Granite Rapids, 12x2 and 8x3 at 95-98%.
#: 32 bytes: 16 registers, 12 sums + 2 + 1 (the Haswell tile of the literature, 6x16 in f32).
#: 16 bytes: 8x2 = 16 sums: SSE2's 16 registers spill, which costs time only.
REGISTER_TILES = {64: (14, 2), 32: (6, 2), 16: (8, 2)}
#: Register tiles down and across that a call of the micro-kernel makes, one after another. What
#: happens between two calls takes 50 to 100 ns, and a tile of 6 x 2 vectors with K = 64 no more
#: than 130: four tiles a call are 384 sums in float32, where one of 64 bytes has 448.
TILES_A_CALL = {64: (1, 1), 32: (2, 2), 16: (1, 1)}
#: The same where an FMA takes a factor from a lane of a register (NEON), so that A is read by
#: vectors too.  Neoverse V1 and V2 and Apple's cores have 4 ports of latency 4: 16 sums keep them
#: busy only if each is resumed in the very cycle it is ready.  8x3 has 24, with 3 registers of B
#: and 2 (f32) or 4 (f64) of A 29 or 31 of 32.  It loads 5 (7) registers for 24 FMAs where 8x2 loads
#: 4 (6) for 16, of the 2-3 loads a cycle; 12x2 loads 5 (8), 6x4 has rows that are no whole vectors.
#: Its assembly is inspected (no spills), no such processor was at hand to time it.
LANE_TILES = {16: (8, 3)}
#: The kinds of product: fused multiply-adds of widened factors; dot products of pairs along K
#: (AVX512-BF16); products of AMX tiles.  Values of K that a step of the micro-kernel takes.
K_STEPS = {"fma": 1, "dot": 2, "amx": 32, "bf16x6": 32, "bf16x3": 32}
#: The kinds that split float32 into parts of bfloat16, and how many: tiles multiply these.
PARTS = {"bf16x6": 3, "bf16x3": 2}
#: Rows, columns and depth from which on such a product is made: below, splitting a factor takes
#: longer than what its few products save.  Measured on Granite Rapids, one thread, as multiples of
#: the speed of fused multiply-adds, six products and three: 64 cubed 0.82 and 1.01, 128 cubed 1.07
#: and 1.52, 256 cubed 1.31 and 2.16, 64 x 1024 x 1024 0.94 and 1.07.
LEAST_SPLIT = {"bf16x6": 96, "bf16x3": 48}
#: Fused multiply-adds a cycle, in vectors of sums: two ports, two of a pair each, and 16 x 16 x 32
#: of AMX in 16 cycles.
KIND_VECTORS = {"fma": 2, "dot": 4, "amx": 32 * 2, "bf16x6": 32 * 2 / 6, "bf16x3": 32 * 2 / 3}
#: Rows and vectors of columns of AMX: 2 x 2 tiles of 16 x 16 sums, which leaves four of the eight
#: tiles for factors.
AMX_TILE = 32, 2

#: Bytes of a cache line.  Where lines are longer, some prefetches repeat; no result changes.
LINE = 64
#: Share of the level-2 cache that a packed block of B may take.  The next block, packed meanwhile,
#: takes as much; what is left is for the panel of A, the strips, and what has been asked for.
#: Measured on Granite Rapids (2 MiB): 0.25 and 0.375 even, 0.5 up to 12% slower.
BLOCK_SHARE = 0.375
#: K values of a block, by bytes of an accumulator element.  Panels of A and B stream from level 2
#: (a rank-1 update reads 3 lines in 14 cycles in f32, 4 in f64); the larger KC, the rarer the
#: updates of the plane, and K <= KC needs none.  Measured on Granite Rapids: f32 within 1% from 256
#: to 512 at K >= 1024; f64 even from 128 to 512 up to 1024^3, 2-4% better at 512 beyond.
KC = {4: 512, 8: 512}
#: The same by the kind of product where factors are not widened.  Dot products: panels of as many
#: bytes as in float32.  AMX takes 4 KiB of A and B in 64 cycles, more than level 2 gives: 16 KiB of
#: A must stay in level 1.  Measured on Granite Rapids: the kernel does 2.6, 2.2 and 1.8 TFLOP/s at
#: 256, 512 and 1024, and whole products take 7-17% less time at 256 than at 1024.
KC_HALVES = {"dot": 1024, "amx": 256, "bf16x6": 256, "bf16x3": 512}
#: Updates after which a tile's sums begin anew, at least half of KC.  Rounding errors grow with the
#: root of the length of a chain of sums: at K = 512 the error is that of OpenBLAS with 256, and 1.4
#: (values around 0) to 2 times that (positive ones) with 512.
CHAIN = 256
#: Bytes and columns of an accumulator plane (only where K has several blocks): they bound the
#: workspace.  The plane lives in level 3; 16 MiB are 2048 x 2048 values of float32, and packing A
#: and B is then spread over 2048 rows and columns, 0.1% each at two cycles an element.
PLANE_BYTES = 16 << 20
PLANE_COLUMNS = 2048
#: Bytes of kept panels of A, likewise, where a cell has several blocks of columns: at 8 MiB the
#: packing of B is spread over >= 4096 rows.
PANELS_BYTES = 8 << 20
#: Panels that are packed together where the columns of A are contiguous (A^T in d_b): 8 x 14 values
#: of float32 are seven lines of a row; one panel at a time would fetch each line twice.
COLUMN_GROUP = 8
#: With AMX a panel's 32 rows are a line of halves by themselves: two panels make up for a source
#: that begins in the middle of a line.
COLUMN_GROUP_AMX = 2
#: Columns of an elementwise pass: a few rows of 1024 values stay in level 1.
ROW_BLOCK = 1024
#: Columns up to which rows of an elementwise pass that lie behind one another are done as long rows
#: of so many elements, although an operand has one row for all, which is then repeated; and
#: elements from which on. A call of a row function takes 5 ns: (x - m) * s of 20,000 x 4 in float32
#: takes 13 us on one core in place of 100, of 20,000 x 30 74 in place of 160.
SHORT_ROW, JOINED_ROW, LEAST_JOINED = 64, 512, 1 << 11
#: Elements of an elementwise cell: 2**14 take 5-20 us, large against 0.1 us for fetching a cell. A
#: smaller pass is cut in some cells all the same, as it may be the first of a sequence on threads.
ELEMENTWISE_CELL = 1 << 14
SMALLEST_ELEMENTWISE_CELL = 1 << 11
ELEMENTWISE_CELLS = 4
#: Bytes of results from which on an elementwise pass stores past the caches: they would not stay in
#: level 2 (2 MiB), and one core reads level 3 no faster than memory where that is shared by many
#: (relu on one thread: 1.09 times the speed of usual stores at 2 MiB, 1.25 at 4, 8 and 16, 1.29 at
#: 32; silu 1.14, 1.12, 1.10, 0.95 and 1.04).
STREAM_BYTES = 4 << 20
#: Elements that such a pass computes between its stores: few, so that stores and arithmetic
#: overlap, but a loop so long that LLVM makes vectors of it before it unrolls it.  One thread,
#: 2**25 elements: silu 15.4 GB/s with 64, 13.5 with 128, 10.6 with a row in level 1 copied to its
#: place when it is finished, 13.9 with usual stores; with 16 LLVM makes scalars.
STREAM_STEP = 64
#: Columns of such a pass: nothing has to stay in level 1, and fewer blocks have fewer edges (relu
#: on one thread: 18 GB/s with 1024, 21 with 4096).
STREAM_ROW_BLOCK = 4096
#: Its cells: at least so many, for balance, but no larger than a huge page.  Two threads that touch
#: a new huge page at once would both clear one, and small cells of one page go to several threads.
STREAM_CELLS = 32
STREAM_CELL_BYTES = 2 << 20
#: From how many fused multiply-adds on a product takes several threads: of float32 with 512-bit
#: vectors, about 10 us.  A launch costs 1 us where helpers wait for it, 5 us where one is woken.
PARALLEL_FMAS = 1 << 19
#: The same in relation, for products that are faster.
PARALLEL_SPEED = {"fma": 1, "dot": 2, "amx": 8, "bf16x6": 2, "bf16x3": 4}
#: Elements of a pass, likewise.
PARALLEL_ELEMENTS = 1 << 15
#: Programs kept by the form of their call, and bytes of them: most take 1-4 KiB, a backward by
#: many blocks more.
KEPT_PLANS = 4096
KEPT_PLAN_BYTES = 32 << 20
#: Blocks of a backward in one launch, whose steps are copied there: 3 KiB a block.
BLOCKS_IN_ONE_LAUNCH = 64
#: Cost of packing, in cycles an element, for choosing cells: measured with sources in level 3
#: (Granite Rapids).
PACK_B_CYCLES = 0.7
PACK_A_CYCLES = 0.5
#: Cells a thread, at the most.  Each packs its own part of B; several are there for balance.
CELLS = 4
#: What a launch loses in waiting for the thread that is last, as a share of a cell, for each
#: doubling of the threads beyond two.  Measured on 16 threads (8 cores of Emerald Rapids): a loss
#: of 0.3 in all is ahead of 0.1 by 9% in float64, and both of one cell a thread by 20-40%: threads
#: that share a core, or lose it for a while, are late by that much.  On two threads (two cores)
#: one cell a thread is ahead by 5%.
LATE = 0.1
#: Rows of A below which a B beyond level 2 is read in place all the same: packing takes longer than
#: the arithmetic that it could hide behind (measured even at 2-4).
STREAMED_ROWS = 4
#: Ways of the level-2 cache (8 to 20 in current processors), for telling strides that clash.
LEVEL2_WAYS = 16
#: Columns up to which a product of more rows is computed as its transpose.
NARROW = 12
#: Rows of a product up to which nothing is packed (`kernels.thin`), columns of its blocks, and
#: values of B from which on it takes several threads: 5 us.
THIN_ROWS = 12
THIN_COLUMNS = 512
#: The rows that pass a block of B together, by whether B's rows are contiguous. Then four have
#: sums for tiles of six vectors, and the next four find the block in level 2. Where B's columns are
#: contiguous they are turned in registers, once for all rows: measured on Zen 5, 8 rows take 0.54
#: to 0.75 of the time of packed products, 10 to 12 rows 0.68 to 1.12.
THIN_GROUPS = {True: 4, False: 8}
#: Vectors of a block's columns where more rows than a group's pass: four tiles, of which half a
#: block of K takes 384 KiB.
THIN_VECTORS = 24
#: The share of level 2 beyond which more rows than a group's pass a B whose rows are contiguous;
#: other products of more rows are packed. Measured on Zen 5 with 5 to 12 rows: a larger B takes
#: 0.52 to 0.99 of the time of packed products, one of 300 x 300 in float32, read in place, 1.35.
THIN_SHARE = BLOCK_SHARE
#: Bytes of vectors with which packing itself asks for the lines of the source, and how many rows of
#: B, or columns of A, ahead. A call of the micro-kernel makes four tiles there, and blocks of B are
#: narrow where level 2 is small: one line of the source is asked for behind a call, and 4 to 28 are
#: packed. Measured on Zen 3, one thread: B in 0.8 of the time, A by columns in a third, products of
#: float32 2 to 5% faster; 4, 16 and 32 rows even or slower.
PACKED_WITH_REQUESTS, PACKED_AHEAD = (32,), 8
#: Elements of a result up to which each is a sum by itself, of any K and from DOT_DEEP values on:
#: lanes of vectors are columns, so one column has one chain at a time, and each multiply-add waits
#: for the one before. And the blocks of K whose chains run side by side. (Zen 5, float32, all in
#: microseconds: 1 x 17049 x 1 27.4 and by itself 6.4, 1 x 1024 x 1 3.1 and 2.3, 2 x 17049 x 1 18.9
#: and 11.1, but 2 x 1024 x 1 2.6 and 3.0, 4 x 17049 x 1 19.0 and 21.0.)
DOTS, DEEP_DOTS, DOT_DEEP = 1, 2, 2048
DOT_BLOCKS = 8
#: Bytes of vectors whose tiles of few rows are so narrow that such a B passes in long pieces, and
#: sums of a block's columns: four rows of B x 4000 in float32 took 24 of its columns at a time,
#: which is 96 bytes of each row.
STREAMED_VECTORS, THIN_SUMS = (32,), 1 << 14
PARALLEL_THIN = 1 << 16
#: Rows of a cell up to which a B that fits level 2 is read in place (`reads_in_place`), by vector
#: bytes, and what that costs, as a share of the arithmetic. Narrower tiles take more time for it:
#: six rows share a row of B in place of fourteen. On Zen 3, packing is even with 16 rows of
#: 256 x 256, and ahead by 9 to 15% with 24 to 128 rows of 64 to 256 columns, in float64 by 14 to
#: 60%.
IN_PLACE_ROWS = {64: 192, 32: 0, 16: 0}
IN_PLACE = 0.12
#: Rows of a d_bias chunk, in register tiles: the matrix of its partial sums, two rows a chunk
#: (M / 28 x N), is 4% of grad_pre.
CHUNK_TILES = 4
#: The same with AMX: 64 rows.
CHUNK_TILES_AMX = 2
#: Sums to which a total's partials are added by turns: 4 vectors hide an addition's latency.
TOTAL_LANES = 32
#: Bytes of a block of grad_pre, which bound what a backward holds beside its operands and results.
#: Measured against grad_pre in one piece of fresh memory (Granite Rapids, 1 and 2 threads): 2-8%
#: faster at 8192 x 2048 x 512, 12-18% at 4096 x 4096 x 64, 3-10% at 100000 x 64 x 64, even at
#: 8192 x 512 x 2048 and 2048^3; from 2 to 12 MiB nothing clear, so it is the larger, for the
#: launches on many cores.  Each block packs B twice and adds to d_b once: 5 to 6 cycles an element
#: of B, against 3 rows / (2 VL) of arithmetic: 96 at 1024 rows in float32.
GRAD_PRE_BYTES = 12 << 20
#: Rows that a block has at least, however wide: a block of K in d_b.  Reached where N > 6144 in
#: float32, N > 3072 in float64; blocks then have 512 N values.
GRAD_PRE_ROWS = 512
#: Bytes of workspaces that are kept for the next call, in all.  A thread's workspace has at most 27
#: MiB, and only in products that take it tens of milliseconds; fresh pages cost 0.1 ms a MiB.
KEPT_BYTES = 256 << 20


#: Products by residues of 8 bits, in the time of a multiply-add of float64: multiply-adds by one
#: modulus, and for each modulus the time of an element on its way to residues or back. Measured on
#: one core of Granite Rapids (0.025 ns), whose tiles random bytes hold at half of their peak: a
#: product of two tiles takes 11 ns from level 2, of zeros 5.8.
RESIDUE_SPEED, RESIDUE_ELEMENT = 27, 16
#: Steps of 64 values of K after which their cells go on to the next panel. With 16 the sums of 32
#: bits are read and written twice as often: 2-7% slower at 2048 cubed.
RESIDUE_STEPS = 32
#: Rows and columns of their cells, at the most: residues of a modulus, of so many steps, and the
#: sums take 2 MiB, as much as level 2. 256 and 512 are even or slower by 4%.
RESIDUE_CELL = 384


@dataclass(frozen=True, slots=True)
class Registers:
    """The register tile of one accumulator dtype on one host."""

    vector_bytes: int
    itemsize: int
    #: Rows, and vectors of columns, of a call of the micro-kernel.
    mr: int
    vectors: int
    #: Whether the micro-kernel reads A by vectors and multiplies by their lanes.
    lanes: bool = False
    #: How factors are multiplied: a key of `K_STEPS`.
    kind: str = "fma"
    #: Register tiles down and across of which a call consists.
    tiles: tuple[int, int] = (1, 1)

    # What follows from these, as fields: a call asks for them dozens of times.
    #: Lanes of a vector.
    vl: int = field(init=False, compare=False)
    #: Rows, and vectors of columns, whose sums are in registers together.
    held_rows: int = field(init=False, compare=False)
    held_vectors: int = field(init=False, compare=False)
    nr: int = field(init=False, compare=False)
    #: Columns of a packed panel of B: those of a register tile.
    panel_columns: int = field(init=False, compare=False)
    #: Rows that a packed panel of A has room for, which are those of a register tile: whole vectors
    #: where that wastes little, so that packing writes whole lines (14 values to 16: measured 0.2
    #: against 0.4 cycles each).
    panel_rows: int = field(init=False, compare=False)
    #: Rows of a chunk of the column sums.
    chunk: int = field(init=False, compare=False)
    #: Values of K that a step of the micro-kernel takes: packing pads with zeros to it.
    k_step: int = field(init=False, compare=False)
    #: Bytes of a packed factor: a half where it is not widened.
    factor: int = field(init=False, compare=False)
    #: Requests to the caches in a step of the micro-kernel: one beside a rank-1 update of a tile
    #: in registers (14 cycles, or 6), two of each of nine streams in a step of AMX (64 cycles).
    requests: int = field(init=False, compare=False)
    #: Panels of A that are packed together where its columns are contiguous.
    column_group: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parts = PARTS.get(self.kind, 1)
        tiles = self.kind == "amx" or parts > 1
        down, across = self.tiles
        vl = self.vector_bytes // self.itemsize
        height, width = self.mr // down, self.vectors // across
        whole = round_up(height, vl)
        derived = {
            "vl": vl,
            "held_rows": height,
            "held_vectors": width,
            "panel_columns": width * vl,
            "nr": self.vectors * vl,
            "panel_rows": whole if 7 * whole <= 8 * height and not tiles else height,
            "chunk": (CHUNK_TILES_AMX if tiles else CHUNK_TILES) * self.mr,
            "k_step": K_STEPS[self.kind],
            "factor": self.itemsize if self.kind == "fma" else 2 * parts,
            "requests": (18 if parts == 1 else 36) if tiles else down * across,
            "column_group": COLUMN_GROUP_AMX if tiles else COLUMN_GROUP,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Blocks and cells of one launch."""

    kc: int
    nc: int
    cell_m: int
    cell_n: int
    cells_m: int
    cells_n: int
    panels: int
    plane_rows: int
    plane_columns: int
    #: Whether B is read where it is (`reads_in_place`).
    in_place: bool = False
    #: Rows of sums that a thread holds, each with room for 8 vectors more; 0: those of two panels.
    strips: int = 0


@functools.cache
def registers(
    vector_bytes: int, itemsize: int, lanes: bool = False, kind: str = "fma"
) -> Registers:
    if K_STEPS[kind] == 32:
        return Registers(vector_bytes, itemsize, *AMX_TILE, lanes, kind)
    rows, vectors = (LANE_TILES if lanes else REGISTER_TILES)[vector_bytes]
    down, across = TILES_A_CALL[vector_bytes]
    return Registers(
        vector_bytes, itemsize, down * rows, across * vectors, lanes, kind, (down, across)
    )


def parallel_fmas(r: Registers) -> int:
    """From how many fused multiply-adds on a product takes several threads."""
    return PARALLEL_FMAS * PARALLEL_SPEED[r.kind] * r.vl // 16


@functools.cache
def level2_bytes() -> int:
    """Level-2 cache of one core: from Linux's sysfs, else 1 MiB (a common size)."""
    for index in sorted(glob.glob("/sys/devices/system/cpu/cpu0/cache/index*")):
        try:
            level = pathlib.Path(index, "level").read_text().strip()
            size = pathlib.Path(index, "size").read_text().strip()
        except OSError:
            continue
        if level == "2" and size.endswith("K") and size[:-1].isdigit():
            # At least 256 KiB, the smallest in use; at most 4 MiB: more is shared by cores.
            return min(max(int(size[:-1]) << 10, 256 << 10), 4 << 20)
    return 1 << 20


def k_block(k: int, itemsize: int, kind: str = "fma") -> int:
    """K in equal blocks of at most `KC`.  Depends on dtype and K alone, which makes the
    order of summation the same for every shape, slice and number of threads."""
    limit = KC[itemsize] if kind == "fma" else KC_HALVES[kind]
    blocks = max(1, -(-k // limit))
    return round_up(max(1, -(-k // blocks)), K_STEPS[kind])


def reads_in_place(m: int, k: int, k_stride: int, column_stride: int, r: Registers) -> bool:
    """Whether rows of B are read where they are: contiguous, and used by few rows of A.

    Packing costs 0.3-2 cycles an element of B; read in place, its rows meet in fewer cache sets and
    cost the micro-kernel 12% (measured at 128-512).  With ``m / (2 VL)`` cycles of arithmetic an
    element the two are even near m = 256.  A B beyond level 2 is read faster by the long rows of
    packing than by the narrow panels of tiles, unless there is little arithmetic to hide packing.
    """
    if column_stride != r.itemsize:
        return False
    fits = k * abs(k_stride) <= level2_bytes() * BLOCK_SHARE
    if m <= r.mr:
        return fits or m < STREAMED_ROWS
    # Rows whose distance is a multiple of a large power of two meet in few sets of level 2.
    way = level2_bytes() // LEVEL2_WAYS
    apart = way // (math.gcd(abs(k_stride), way) or 1)
    clash = min(k, KC[r.itemsize]) > apart * LEVEL2_WAYS // 2
    limit = IN_PLACE_ROWS[r.vector_bytes]
    return not clash and m <= (limit if fits else min(limit, CHUNK_TILES * r.mr))


#: Rows and columns of a cell of a product inside a user's njit function. Its workspace is new
#: memory for every call (1.3 MiB in float32, of which a small product touches little), and at 256
#: packing is 1/16 of the arithmetic.
NJIT_CELL = 256


@functools.lru_cache(maxsize=4096)
def gemm(
    m: int,
    n: int,
    k: int,
    batch: int,
    sums: int,
    threads: int,
    r: Registers,
    unit: int,
    b_strides: tuple[int, int] | None = None,
) -> Tiling:
    """Tiling of a product: `batch` outputs of (m, n), each a sum of `sums` products over k.

    Cells have a multiple of `unit` rows (a multiple of MR). `b_strides`: those of a B that may be
    read in place.
    """
    kc = k_block(k, r.itemsize, r.kind)
    nc_limit = int(level2_bytes() * BLOCK_SHARE) // (kc * r.factor) // r.nr * r.nr
    # At least a panel, and no wider than a plane: with a small K the strips would grow instead.
    nc_limit = max(r.nr, min(nc_limit, widest := PLANE_COLUMNS // r.nr * r.nr))
    single = sums == 1 and k <= kc
    best: tuple[float, Tiling] | None = None
    for split_n in range(1, max(1, min(CELLS * threads, -(-n // r.nr))) + 1):
        cell_n = round_up(-(-n // split_n), r.nr) if n else r.nr
        if not single:
            cell_n = min(cell_n, widest)
        cells_n = max(1, -(-n // cell_n))
        blocks = max(1, -(-cell_n // nc_limit))
        nc = round_up(-(-cell_n // blocks), r.nr)
        rows_limit = round_up(m, unit)
        if blocks > 1:
            rows_limit = min(rows_limit, PANELS_BYTES // (kc * r.factor))
        if not single:
            rows_limit = min(rows_limit, PLANE_BYTES // (cell_n * r.itemsize))
        rows_limit = max(unit, rows_limit // unit * unit)
        targets = {1}
        for f in range(1, CELLS + 1) if threads > 1 else ():
            targets.add(-(-threads * f // (batch * cells_n)))
        for target in targets:
            cells_m = max(1, target, -(-m // rows_limit))
            cell_m = max(unit, round_up(-(-m // cells_m), unit))
            cells_m = max(1, -(-m // cell_m))
            rows = round_up(max(1, min(cell_m, m)), r.mr)
            compute = rows * cell_n * k * sums / (KIND_VECTORS[r.kind] * r.vl)
            in_place = b_strides is not None and reads_in_place(min(cell_m, m), k, *b_strides, r)
            packed = IN_PLACE * rows / KIND_VECTORS[r.kind] / r.vl if in_place else PACK_B_CYCLES
            packing = k * sums * (packed * cell_n + PACK_A_CYCLES * rows)
            late = LATE * max(0.0, math.log2(threads) - 1)
            cost = (compute + packing) * (-(-batch * cells_m * cells_n // threads) + late)
            if best is None or cost < best[0] * 0.999:
                panels = 1 if blocks == 1 else rows // r.mr
                plane = (0, 0) if single else (rows, round_up(cell_n, r.nr))
                best = (
                    cost,
                    Tiling(kc, nc, cell_m, cell_n, cells_m, cells_n, panels, *plane, in_place),
                )
    assert best is not None  # cells_n = 1 is always tried
    return best[1]


def streams(k: int, k_stride: int, r: Registers) -> bool:
    """Whether a B of contiguous rows passes few rows of A in long pieces (`kernels.thin`)."""
    return r.vector_bytes in STREAMED_VECTORS and is_large(k, k_stride)


def is_large(k: int, k_stride: int) -> bool:
    """Whether a B of contiguous rows is beyond its share of level 2."""
    return k * abs(k_stride) > level2_bytes() * THIN_SHARE


def thin(
    m: int, n: int, k: int, batch: int, threads: int, r: Registers, unit: int, by_rows: bool,
    streamed: bool = False,
) -> Tiling:  # fmt: skip
    """Tiling of a product of up to `THIN_ROWS` rows; `by_rows`: those of B are contiguous."""
    cells = -(-CELLS * threads // batch) if threads > 1 else 1
    wide = math.lcm(8 * r.vl, r.nr)
    cell_n, nc = round_up(max(1, -(-n // cells)), wide), THIN_COLUMNS // wide * wide
    if m > THIN_GROUPS[by_rows]:
        nc = THIN_VECTORS * r.vl
    if streamed:
        nc = min(cell_n, max(nc, THIN_SUMS // max(1, m) // wide * wide))
    kc = k_block(k, r.itemsize, r.kind)
    cell_m, strips = round_up(m, unit), (3 if streamed else 2) * m
    return Tiling(kc, nc, cell_m, cell_n, 1, max(1, -(-n // cell_n)), 1, 0, 0, strips=strips)


def residues(m: int, n: int, batch: int, threads: int, unit: int, moduli: int) -> Tiling:
    """Tiling of a product by residues: cells of whole units of rows, and panels of 32 columns."""
    rows, columns = max(unit, RESIDUE_CELL // unit * unit), RESIDUE_CELL
    while True:
        cells = batch * -(-m // rows) * -(-n // columns)
        if cells >= CELLS * threads or columns <= 64:
            break
        if rows >= columns and rows >= 2 * unit:
            rows = round_up(rows // 2, unit)
        else:
            columns = round_up(columns // 2, 32)
    rows, columns = min(rows, round_up(m, unit)), min(columns, round_up(n, 32))
    cells_m, cells_n = -(-m // rows), -(-n // columns)
    rows, columns = round_up(-(-m // cells_m), unit), round_up(-(-n // cells_n), 32)
    # Sums of 32 bits, and a byte for each modulus, in float64s.
    plane = -(-columns * (4 + moduli) // 8)
    cells_m, cells_n = -(-m // rows), -(-n // columns)
    return Tiling(8, columns, rows, columns, cells_m, cells_n, 1, rows, plane)


def panels(count: int) -> Tiling:
    """Tiling of a factor that becomes residues, in so many panels of 32 lines."""
    return Tiling(8, 192, 32, 1, count, 1, 1, 0, 0)


def backward_block(m: int, n: int, held: int, itemsize: int, chunk: int) -> tuple[int, int]:
    """Rows of a block of grad_pre (whole chunks), and how many batch elements it is of.

    `held`: rows of n values that blocks need beside it (K for half types: d_b in the accumulator's
    dtype).  Where M has no more than both together, one block takes less.  Depends on the problem
    alone, as the order of the sums in d_b and d_bias does.
    """
    rows = max(GRAD_PRE_ROWS, GRAD_PRE_BYTES // (max(1, n) * itemsize))
    if m <= rows + held:
        return max(1, m), max(1, rows // max(1, m))
    rows = max(chunk, rows // chunk * chunk)
    return round_up(-(-m // -(-m // rows)), chunk), 1


@functools.lru_cache(maxsize=4096)
def elementwise(m: int, n: int, chunk: int, group: int = 1) -> Tiling:
    """Tiling of a pass over (m, n): cells of whole chunks of rows, blocks of whole groups."""
    cell = max(SMALLEST_ELEMENTWISE_CELL, min(m * n // ELEMENTWISE_CELLS, ELEMENTWISE_CELL))
    # A chunk of few columns, which are whole lines.
    unit = math.lcm(16, group)
    columns = max(unit, round_up(cell // min(m, chunk), unit)) if m else ROW_BLOCK
    return _elementwise(m, n, chunk, min(ROW_BLOCK // unit * unit, columns), cell)


@functools.lru_cache(maxsize=4096)
def streamed(m: int, n: int, itemsize: int) -> Tiling:
    """Tiling of a pass whose results of `itemsize` bytes an element go past the caches."""
    cell = min(max(ELEMENTWISE_CELL, m * n // STREAM_CELLS), STREAM_CELL_BYTES // itemsize)
    return _elementwise(m, n, 1, STREAM_ROW_BLOCK, cell)


def _elementwise(m: int, n: int, chunk: int, row_block: int, cell: int) -> Tiling:
    nc = min(row_block, max(1, n))
    cell_n = min(max(1, n), round_up(cell, nc))
    if chunk > 1 and m > 0:
        cell_n = min(cell_n, round_up(max(1, cell // min(m, chunk)), nc))
    cell_m = max(chunk, cell // cell_n // chunk * chunk)
    return Tiling(0, nc, cell_m, cell_n, max(1, -(-m // cell_m)), max(1, -(-n // cell_n)), 0, 0, 0)
