"""Every block size, chosen from the problem and the host, each with its reason.

Nothing here imports Numba: the host's vector width is passed in by the backend that knows it.
"""

from __future__ import annotations

import functools
import glob
import math
import pathlib
from dataclasses import dataclass, replace

#: Registers: (MR, vectors of NR) by vector bytes.  An ``MR x (vectors * VL)`` tile must leave
#: registers for the row of B and one broadcast, and have at least (latency x FMA ports) = 8-10
#: independent sums.
#: 64 bytes: 32 registers, 28 sums + 2 + 1; 14x2 measured at 99-100% of the FMA peak on Zen 4 and
#:   Granite Rapids, 12x2 and 8x3 at 95-98%.
#: 32 bytes: 16 registers, 12 sums + 2 + 1 (the Haswell tile of the literature, 6x16 in f32).
#: 16 bytes: 8x2 = 16 sums: SSE2's 16 registers spill, which costs time only.
REGISTER_TILES = {64: (14, 2), 32: (6, 2), 16: (8, 2)}
#: The same where an FMA takes a factor from a lane of a register (NEON), so that A is read by
#: vectors too.  Neoverse V1 and V2 and Apple's cores have 4 ports of latency 4: 16 sums keep them
#: busy only if each is resumed in the very cycle it is ready.  8x3 has 24, with 3 registers of B
#: and 2 (f32) or 4 (f64) of A 29 or 31 of 32.  It loads 5 (7) registers for 24 FMAs where 8x2 loads
#: 4 (6) for 16, of the 2-3 loads a cycle; 12x2 loads 5 (8), 6x4 has rows that are no whole vectors.
#: Its assembly is inspected (no spills), no such processor was at hand to time it.
LANE_TILES = {16: (8, 3)}
#: The kinds of product: fused multiply-adds of widened factors; dot products of pairs along K
#: (AVX512-BF16); products of AMX tiles.  Values of K that a step of the micro-kernel takes.
K_STEPS = {"fma": 1, "dot": 2, "amx": 32}
#: Fused multiply-adds a cycle, in vectors of sums: two ports, two of a pair each, and 16 x 16 x 32
#: of AMX in 16 cycles.
KIND_VECTORS = {"fma": 2, "dot": 4, "amx": 32 * 2}
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
KC_HALVES = {"dot": 1024, "amx": 256}
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
#: Elements of an elementwise cell: 2**14 take 5-12 us, large against 0.1 us for fetching a cell.
ELEMENTWISE_CELL = 1 << 14
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
#: From how many fused multiply-adds or elements on a launch takes several threads.  It costs
#: 5-20 us (GNU OpenMP, two cores), and milliseconds where another library's pool still spins on the
#: other core (OpenBLAS after a product: measured): the work should take about 150 us, as 256^3 does
#: in float32.
PARALLEL_FMAS = 16 << 20
#: The same in relation, for products that are faster.
PARALLEL_SPEED = {"fma": 1, "dot": 2, "amx": 8}
PARALLEL_ELEMENTS = 1 << 18
#: Calls kept by their exact form, and bytes of them: most take 1-4 KiB, a backward by many blocks
#: more.  A step of one that is not one launch is Python objects of about so many bytes.
KEPT_PLANS = 4096
KEPT_PLAN_BYTES = 32 << 20
KEPT_STEP_BYTES = 2048
#: Blocks of a backward up to which it is one launch: a block's steps are 3 KiB.
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
#: Rows of A up to which a B that fits level 2 is read in place (`reads_in_place`).
IN_PLACE_ROWS = 192
#: Rows of a d_bias chunk, in register tiles: the matrix of its partial sums, two rows a chunk
#: (M / 28 x N), is 4% of grad_pre.
CHUNK_TILES = 4
#: The same with AMX: 64 rows.
CHUNK_TILES_AMX = 2
#: Rows of a chunk that are summed one by one.  A chunk of 56 is 7 runs of 8: chains of at most
#: 7 + 6 additions, where NumPy's pairwise sum has up to 18 in a block of 128 and one more for every
#: doubling.
RUN = 8

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


@dataclass(frozen=True, slots=True)
class Registers:
    """The register tile of one accumulator dtype on one host."""

    vector_bytes: int
    itemsize: int
    mr: int
    vectors: int
    #: Whether the micro-kernel reads A by vectors and multiplies by their lanes.
    lanes: bool = False
    #: How factors are multiplied: a key of `K_STEPS`.
    kind: str = "fma"

    @property
    def vl(self) -> int:
        """Lanes of a vector."""
        return self.vector_bytes // self.itemsize

    @property
    def nr(self) -> int:
        return self.vectors * self.vl

    @property
    def panel_rows(self) -> int:
        """Rows that a packed panel of A has room for: whole vectors where that wastes little, so
        that packing writes whole lines (14 values to 16: measured 0.2 against 0.4 cycles each).
        """
        if self.kind == "amx":
            return self.mr
        whole = round_up(self.mr, self.vl)
        return whole if 7 * whole <= 8 * self.mr else self.mr

    @property
    def chunk(self) -> int:
        """Rows of a chunk of the column sums."""
        return (CHUNK_TILES_AMX if self.kind == "amx" else CHUNK_TILES) * self.mr

    @property
    def k_step(self) -> int:
        """Values of K that a step of the micro-kernel takes: packing pads with zeros to it."""
        return K_STEPS[self.kind]

    @property
    def factor(self) -> int:
        """Bytes of a packed factor: a half where it is not widened."""
        return self.itemsize if self.kind == "fma" else 2

    @property
    def requests(self) -> int:
        """Requests to the caches in a step of the micro-kernel: one beside a row of fused
        multiply-adds (14 cycles), two of each of nine streams in a step of tiles (64 cycles).
        """
        return 18 if self.kind == "amx" else 1

    @property
    def column_group(self) -> int:
        """Panels of A that are packed together where its columns are contiguous."""
        return COLUMN_GROUP_AMX if self.kind == "amx" else COLUMN_GROUP


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

    @property
    def cells(self) -> int:
        """Cells of one batch element."""
        return self.cells_m * self.cells_n


@functools.cache
def registers(
    vector_bytes: int, itemsize: int, lanes: bool = False, kind: str = "fma"
) -> Registers:
    tiles = LANE_TILES if lanes else REGISTER_TILES
    mr, vectors = AMX_TILE if kind == "amx" else tiles[vector_bytes]
    return Registers(vector_bytes, itemsize, mr, vectors, lanes, kind)


def parallel_fmas(kind: str) -> int:
    """From how many fused multiply-adds on a product takes several threads."""
    return PARALLEL_FMAS * PARALLEL_SPEED[kind]


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


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


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
    return not clash and m <= (IN_PLACE_ROWS if fits else CHUNK_TILES * r.mr)


#: Rows and columns of a cell of a product inside a user's njit function. Its workspace is new
#: memory for every call (1.3 MiB in float32, of which a small product touches little), and at 256
#: packing is 1/16 of the arithmetic.
NJIT_CELL = 256


@functools.lru_cache(maxsize=4096)
def gemm(
    m: int, n: int, k: int, batch: int, sums: int, threads: int, r: Registers, unit: int
) -> Tiling:
    """Tiling of a product: `batch` outputs of (m, n), each a sum of `sums` products over k.

    Cells have a multiple of `unit` rows (a multiple of MR).
    """
    kc = k_block(k, r.itemsize, r.kind)
    nc_limit = int(level2_bytes() * BLOCK_SHARE) // (kc * r.factor) // r.nr * r.nr
    # At least a panel, and no wider than a plane: with a small K the strips would grow instead.
    nc_limit = max(r.nr, min(nc_limit, PLANE_COLUMNS // r.nr * r.nr))
    single = sums == 1 and k <= kc
    best: tuple[float, Tiling] | None = None
    for split_n in range(1, max(1, min(CELLS * threads, -(-n // r.nr))) + 1):
        cell_n = round_up(-(-n // split_n), r.nr) if n else r.nr
        if not single:
            cell_n = min(cell_n, PLANE_COLUMNS)
        cells_n = max(1, -(-n // cell_n))
        blocks = max(1, -(-cell_n // nc_limit))
        nc = round_up(-(-cell_n // blocks), r.nr)
        rows_limit = round_up(m, unit)
        if blocks > 1:
            rows_limit = min(rows_limit, PANELS_BYTES // (kc * r.factor))
        if not single:
            rows_limit = min(rows_limit, PLANE_BYTES // (cell_n * r.itemsize))
        rows_limit = max(unit, rows_limit // unit * unit)
        factors = range(1, CELLS + 1) if threads > 1 else ()
        for target in {1, *(-(-threads * f // (batch * cells_n)) for f in factors)}:
            cells_m = max(1, target, -(-m // rows_limit))
            cell_m = max(unit, round_up(-(-m // cells_m), unit))
            cells_m = max(1, -(-m // cell_m))
            rows = round_up(max(1, min(cell_m, m)), r.mr)
            compute = rows * cell_n * k * sums / (KIND_VECTORS[r.kind] * r.vl)
            packing = k * sums * (PACK_B_CYCLES * cell_n + PACK_A_CYCLES * rows)
            late = LATE * max(0.0, math.log2(threads) - 1)
            cost = (compute + packing) * (-(-batch * cells_m * cells_n // threads) + late)
            if best is None or cost < best[0] * 0.999:
                panels = 1 if blocks == 1 else rows // r.mr
                plane = (0, 0) if single else (rows, round_up(cell_n, r.nr))
                best = cost, Tiling(kc, nc, cell_m, cell_n, cells_m, cells_n, panels, *plane)
    assert best is not None  # cells_n = 1 is always tried
    return best[1]


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
def elementwise(m: int, n: int, chunk: int) -> Tiling:
    """Tiling of a pass over (m, n): cells of whole chunks of rows and of `ROW_BLOCK` columns."""
    return _elementwise(m, n, chunk, ROW_BLOCK, ELEMENTWISE_CELL)


@functools.lru_cache(maxsize=4096)
def streamed(m: int, n: int, itemsize: int) -> Tiling:
    """Tiling of a pass whose results of `itemsize` bytes an element go past the caches."""
    cell = min(max(ELEMENTWISE_CELL, m * n // STREAM_CELLS), STREAM_CELL_BYTES // itemsize)
    return _elementwise(m, n, 1, STREAM_ROW_BLOCK, cell)


def _elementwise(m: int, n: int, chunk: int, row_block: int, cell: int) -> Tiling:
    nc = min(row_block, max(1, n))
    cell_n = min(max(1, n), round_up(cell, nc))
    cell_m = max(chunk, cell // cell_n // chunk * chunk)
    return Tiling(0, nc, cell_m, cell_n, max(1, -(-m // cell_m)), max(1, -(-n // cell_n)), 0, 0, 0)


# --- WebGPU ---------------------------------------------------------------------------------------

#: Uniforms and tables of places that a device keeps, by their content: a training step makes a
#: dozen kinds of call with one or two each.
WEBGPU_KEPT_CONSTANTS = 1024
#: Plans of calls that a device keeps: words, no memory of the device.
WEBGPU_KEPT_PLANS = 256
#: Sets of buffers of which a plan keeps the bind groups: those that a loop's calls take by turns.
WEBGPU_KEPT_SETS = 8
#: Bind groups that a device keeps: one for each set of buffers that a call meets again.
WEBGPU_KEPT_GROUPS = 512
#: Bytes of free buffers that a device keeps: the temporaries and results of a step of training at
#: 4096 x 4096 in float32 are six of 64 MiB.
WEBGPU_POOL_BYTES = 512 << 20
#: Buffers to read from that a device keeps, and the bytes of the largest.
WEBGPU_KEPT_STAGING = 4
WEBGPU_STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class WebGpuTile:
    """A workgroup's block of a product on WebGPU, and an invocation's part of it."""

    block_m: int
    block_n: int
    block_k: int
    mr: int
    nr: int
    #: Rows of blocks that are worked on together: their Y blocks are found in the device's cache.
    group: int = 8
    #: Copies of the slices in workgroup memory: with two, one barrier a slice.
    stages: int = 1
    #: Whether neighbouring invocations fetch along K where that is the contiguous axis.
    k_first: bool = False

    @property
    def invocations(self) -> int:
        return self.block_m // self.mr * (self.block_n // self.nr)


#: Tiles of a GPU, the largest first.  128 x 128 x 16 with 8 x 16 sums an invocation: 6 reads of
#: four values from workgroup memory for 128 fused multiply-adds.  Measured on an H200 in float32,
#: in TFLOP/s at 4096, 2048 and 1024 cubed: this one 43.5, 42.7 and 10.9 (64 blocks for 132
#: multiprocessors), 64 x 64 with 8 x 8 40.7, 36.7 and 31.2, 32 x 64 with 8 x 8 39.4, 33.8 and
#: 31.7; less with slices of 8, 12 or 20 (31 to 35), two copies of the slices (25), 256 invocations
#: (33), 128 x 256 (39), 16 x 8 sums (35).  Fetching along K where it is contiguous: 1.04 to 1.16
#: times.  At 512 cubed the last gives 256 blocks and 10.0, 32 x 64 128 and 7.5.
WEBGPU_TILES = (
    WebGpuTile(128, 128, 16, 8, 16, k_first=True),
    WebGpuTile(64, 64, 16, 8, 8, k_first=True),
    WebGpuTile(32, 64, 16, 8, 8, k_first=True),
    WebGpuTile(32, 32, 16, 4, 4, k_first=True),
)
#: Of a CPU behind Vulkan (lavapipe): what its compiler takes 0.2 s for, and not 1.5.
WEBGPU_CPU_TILE = WebGpuTile(32, 32, 8, 4, 4)
#: Values of K that an invocation adds up behind one another, as `CUDA_CHAIN`: a multiple of every
#: tile's slices.
WEBGPU_CHAIN = 256
#: Blocks that keep a large device busy: two on each of 132 multiprocessors.
WEBGPU_BLOCKS = 264
#: Rows that a part of d_b adds up at the least: a block's arithmetic then outweighs its plane's way
#: through memory by 100 flops a byte.
WEBGPU_PART = 512
#: Planes that one invocation adds up; more are joined in stages.
WEBGPU_JOINED = 64


def webgpu_tile(
    m: int, n: int, itemsize: int, storage: int, invocations: int, cpu: bool, depth: int = 0
) -> WebGpuTile:
    """The largest tile that the device holds and of which the result has enough.

    Where its sums over `depth` may be cut, each part of one counts.
    """
    if cpu:
        return WEBGPU_CPU_TILE
    fitting = []
    for tile in WEBGPU_TILES:
        # an invocation's sums are registers: 128 of 4 bytes
        if tile.mr * tile.nr * itemsize > 512 or tile.invocations > invocations:
            continue
        block_k = tile.block_k
        while block_k >= 8 and storage < _workgroup_bytes(tile, block_k, itemsize):
            block_k //= 2
        if block_k >= 4:
            fitting.append(replace(tile, block_k=block_k))
    parts = max(1, depth // WEBGPU_PART)
    for tile in fitting:
        if -(-m // tile.block_m) * -(-n // tile.block_n) * parts >= WEBGPU_BLOCKS // 2:
            return tile
    return fitting[-1]


def _workgroup_bytes(tile: WebGpuTile, depth: int, itemsize: int) -> int:
    """Both factors, each row padded by four, and the sums of columns."""
    factors = (tile.block_m + tile.block_n + 8) * depth * tile.stages
    return (factors + 4 * tile.invocations) * itemsize


def webgpu_parts(blocks: int, k: int, room: int) -> tuple[int, int]:
    """(length, number) of the parts of a sum over `k`, for a result of so many blocks."""
    parts = max(1, min(WEBGPU_BLOCKS // max(1, blocks), k // WEBGPU_PART, room))
    # a part begins where a slice of any tile does
    part = -(-k // parts // 32) * 32 if parts > 1 else k
    return part, -(-k // part) if k else 1


def webgpu_groups(blocks: int, segments: int, room: int) -> int:
    """In how many groups the segments of a sum are added up."""
    return max(1, min(WEBGPU_BLOCKS // max(1, blocks), segments, room))


# --- CUDA -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaTile:
    """A thread block's block of a product, and a thread's part of it."""

    block_m: int
    block_n: int
    block_k: int
    mr: int
    nr: int
    #: Rows of blocks that are worked on together: their Y blocks are found in the L2 cache.
    group: int = 8

    @property
    def threads(self) -> int:
        return self.block_m // self.mr * (self.block_n // self.nr)


#: Of the tier that runs everywhere: 256 threads with 16 sums each fit every GPU since Maxwell, in
#: float64 too, with 16 KiB of shared memory.
CUDA_MIRROR_TILE = CudaTile(64, 64, 16, 4, 4)
#: In Numba's simulator, where every thread is one of Python's and costs 20 ms: few, with much.
CUDA_SIMULATED_TILE = CudaTile(16, 16, 8, 8, 8, group=2)
#: Values of K that a thread adds up behind one another before the sum is added to that of those
#: before, in every kernel: the errors of a chain grow with the root of its length. A power of two,
#: and a multiple of every tile's slices; 256 is half of what `KC` and `CHAIN` make of it on the
#: CPU. What 64 sums do at the end of a chain of 256 is 0.8% of their fused multiply-adds.
CUDA_CHAIN = 256
#: Blocks that keep the device busy, to a multiprocessor: where a product of sums over M has fewer,
#: these are cut into parts.
CUDA_BLOCKS_PER_MULTIPROCESSOR = 2
#: Rows that a part of d_b adds up at the least: a block's arithmetic then outweighs its plane's way
#: through memory by 100 flops a byte.
CUDA_PART = 512
#: Planes that one thread adds up; more are joined in stages.
CUDA_JOINED = 64
#: Bytes of the planes of one product of segments; more segments are added in turns.
CUDA_PLANES_BYTES = 256 << 20
#: Rows that one thread of a pass adds up: enough blocks for a tall array, few planes to join.
CUDA_PASS_ROWS = 64
#: Threads of a block of the passes over memory.
CUDA_PASS_THREADS = 256
#: Planes of which a thread of a join has 16 bytes each in flight.
CUDA_JOIN_AHEAD = 4
#: Threads that share a column in a join of few long columns (sums of rows of blocks: d_bias).
CUDA_JOIN_LANES = 16
#: Planes from which on they do.
CUDA_JOIN_DEEP = 16
#: Loads of 16 bytes of each array that a thread of a gate has in flight, by bytes of an element:
#: (forward, backward). Measured on an H200 at 2^27 elements (float64: 2^26), torch.compile's time
#: by ours: bfloat16 1.00 and 1.00 with one, 1.00 and 1.00 with two; float32 1.00 and 1.00, 0.99
#: and 0.98; float64 0.93 and 1.00, 0.99 and 0.99.
CUDA_GATE_VECTORS = {2: (1, 1), 4: (1, 1), 8: (2, 1)}
#: Plans of calls, and of products, that a device keeps: words, no memory of the device.
CUDA_KEPT_PLANS = 512
#: A call of several launches that comes so many times with the same addresses becomes a CUDA graph
#: (one launch of 6 us in place of four of 4.5 each; making it takes 100 us), and the graphs that it
#: keeps: a loop's results go round among a few sets of addresses.
CUDA_GRAPH_AFTER = 4
CUDA_KEPT_GRAPHS = 8
#: Bytes of free memory that a device's pool keeps for later calls: the workspace of a step of
#: training with 8192 x 8192 in float32 is six of 256 MiB.
CUDA_POOL_BYTES = 2 << 30
#: Copies of factors that a call keeps for its later products (grad_pre's and the operands' parts
#: are wanted by two each of a backward); beyond that each product makes its own.
CUDA_COPIES_BYTES = 4 << 30


def cuda_chain(k: int) -> int:
    """The length of the chains of a sum over `k`: equal ones, of whole slices of 32."""
    return round_up(-(-k // max(1, -(-k // CUDA_CHAIN))), 32)


def cuda_parts(blocks: int, k: int, multiprocessors: int, block_k: int) -> tuple[int, int]:
    """(length, number) of the parts of a sum over `k`, for a result of so many blocks."""
    wanted = CUDA_BLOCKS_PER_MULTIPROCESSOR * multiprocessors // max(1, blocks)
    parts = max(1, min(wanted, k // CUDA_PART))
    part = round_up(-(-k // parts), block_k) if parts > 1 else k
    return part, -(-k // part) if k else 1


# --- CUDA: Hopper -----------------------------------------------------------------------------


@dataclass(frozen=True)
class HopperTile:
    """A block of a product by wgmma, and how the groups of 128 threads share it."""

    block_m: int
    block_n: int
    #: Groups of 128 threads that multiply.
    consumers: int
    #: Whether each of them has a block of its own, and not 64 rows of one.
    ping_pong: bool
    #: Rows of blocks that are worked on together: their slices of Y are found in the L2 cache.
    group: int = 8

    @property
    def halves(self) -> int:
        """Tiles of 64 rows that a group has of a block."""
        return self.block_m // 64 if self.ping_pong else self.block_m // 64 // self.consumers

    def __str__(self) -> str:
        schedule = "ping-pong" if self.ping_pong else "cooperative"
        return f"{self.block_m}x{self.block_n}x64 {schedule}"


#: Blocks of wgmma, with the cycles that a slice of 64 of K takes a multiprocessor: numbers that
#: order the choices as an H200 does (the arithmetic alone is block_m * block_n / 32). Measured in
#: bfloat16, microseconds, 128 x 256 cooperative / 128 x 128 ping-pong: bare products
#: (8192,4096,4096) 369 / 367, (65536,512,512) 61 / 55, (4096,1024,4096) 53 / 50, 4096 cubed
#: 182 / 183; forward with gelu 369 / 371, 77 / 68, 61 / 55, 188 / 188. 64 x 256 ping-pong 2-14%
#: slower than 128 x 128, 128 x 128 cooperative 2-5%. 1024 cubed: 128 x 64 10.0, 64 x 128 11.4,
#: 64 x 64 13.0, 128 x 128 13.1 (bare: 9.2, 9.0, 11.1, 11.0); 512 cubed: 64 x 32 7.3, 64 x 64 7.4,
#: 128 x 64 8.7; M = 16, K = N = 4096: 64 x 64 21.7, 64 x 32 23.3. Two multiprocessors that share
#: each slice of Y (a cluster, each fetching half of it for both) changed nothing: 0.97-1.00.
HOPPER_TILES: tuple[tuple[HopperTile, int], ...] = (
    (HopperTile(128, 256, 2, False), 1080),
    (HopperTile(128, 128, 2, True), 570),
    (HopperTile(128, 128, 2, False), 580),
    (HopperTile(128, 64, 2, False), 400),
    (HopperTile(64, 128, 1, False), 330),
    (HopperTile(64, 64, 1, False), 200),
    (HopperTile(64, 32, 1, False), 220),
)
#: The same for six products of bfloat16 parts, of which a thread has three sets of accumulators:
#: cycles of all six. Measured with their splits, in microseconds, 128 x 128 cooperative / 64 x 128
#: ping-pong, forward with gelu: (65536,512,512) 386 / 384 (backward 1121 / 1090),
#: (4096,1024,4096) 301 / 320, 4096 cubed 1116 / 1203, 1024 cubed 48 / 36.
HOPPER_SPLIT_TILES: tuple[tuple[HopperTile, int], ...] = (
    (HopperTile(128, 128, 2, False), 3480),
    (HopperTile(64, 128, 2, True), 1840),
    (HopperTile(128, 64, 2, False), 2400),
    (HopperTile(64, 128, 1, False), 1980),
    (HopperTile(64, 64, 1, False), 1200),
    (HopperTile(64, 32, 1, False), 1320),
)
#: Whether the copy engine also stores 16-bit results and fetches the residual or grad ("map" in
#: `hopper_gemm`), or threads do ("vectors"): even within 1% in the forward.
HOPPER_BY_MAP = True
#: Cycles that an element of the result costs at the end, with and without an activation, where two
#: groups of threads work on it; and where another group multiplies meanwhile (ping-pong): what is
#: taken away from that.
HOPPER_FINISH = (0.24, 0.15)
HOPPER_HIDDEN = (0.10, 0.05)
#: And of a result whose rows are not aligned to 16 bytes, and so stored value by value; nothing
#: hides that. (By way of an array with aligned rows and a launch that copies (4095,4097,4099) takes
#: 315 microseconds forward and 796 backward, not 288 and 736.)
HOPPER_ROWS = 0.65
#: Cycles from a launch to its first product, and from its last to the end.
HOPPER_START = 2500
#: Bytes a cycle that all multiprocessors together move to and from memory.
HOPPER_BYTES = 2300
#: Slices of K of one part, at the least: the pipeline has to fill.
HOPPER_PART = 8
#: Below so many multiply-adds an operand is not copied for the copy engine's sake: the copy's
#: launch and its way through memory cost more than tensor cores without it lose.
HOPPER_COPY = 1 << 30
#: Of float32, in operations and bytes a second of an H200: its CUDA cores, its tensor cores as they
#: are reached (a sixth of that for six products), its memory; and seconds of a launch.
HOPPER_CORES, HOPPER_TENSORS, HOPPER_MEMORY, HOPPER_LAUNCH = 48e12, 650e12, 3.5e12, 2.5e-6


def hopper_splits(
    m: int, n: int, k: int, x_places: int, y_places: int, places: int, depth: int
) -> bool:  # fmt: skip
    """Whether a float32 product is worth the copies that tensor cores need: six bytes of parts (or
    four of tf32) for each element that is read."""
    strict = 2 * m * n * k * places / HOPPER_CORES
    copied = (m * k * x_places + k * n * y_places) * (10 if depth > 1 else 8)
    rate = HOPPER_TENSORS / (6 if depth > 1 else 2)
    return 2 * m * n * k * places / rate + copied / HOPPER_MEMORY + 2 * HOPPER_LAUNCH < strict


@functools.lru_cache(maxsize=4096)
def hopper_tile(
    m: int, n: int, slices: int, places: int, multiprocessors: int, *, split: bool = False,
    heavy: bool = False, rows: bool = False, free: bool = False,
) -> tuple[HopperTile, int]:  # fmt: skip
    """The tile, and the number of parts of K, of a product on Hopper.

    `split`: of operands in three parts.  `heavy`: an epilogue that computes an activation.
    `rows`: a result of unaligned rows.  `free`: K may be cut.
    """
    best: tuple[float, HopperTile, int] | None = None
    for tile, cycles in HOPPER_SPLIT_TILES if split else HOPPER_TILES:
        blocks = -(-m // tile.block_m) * -(-n // tile.block_n) * places
        elements, kind = tile.block_m * tile.block_n, 0 if heavy else 1
        finish = elements * (HOPPER_FINISH[kind] + (HOPPER_ROWS if rows else 0))
        if tile.ping_pong or tile.consumers == 1:
            finish *= 2  # one group alone
        most = max(1, slices // HOPPER_PART) if free else 1
        for parts in sorted({1, *(p for p in (2, 3, 4, 6, 8, 12, 16, 24, 32) if p <= most)}):
            length = -(-slices // parts)
            taken = -(-slices // length)
            if taken != parts:
                continue
            work = length * cycles
            units = -(-blocks * parts // multiprocessors)
            if tile.ping_pong and not rows:  # one consumer finishes while the other multiplies
                cost = units * (work + elements * HOPPER_HIDDEN[kind]) + finish
            else:
                cost = units * (work + finish)
            if parts > 1:
                cost += HOPPER_START + 8 * parts * m * n * places / HOPPER_BYTES
            if best is None or cost < best[0] * 0.995:
                best = cost, tile, parts
    assert best is not None
    return best[1], best[2]


# --- CUDA: blocks by cp.async ---------------------------------------------------------------------


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
    #: Where the chains of a long sum add up, "registers" or "shared" memory; "": it has one chain.
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


#: Rows (or columns) of the other factor from which on a float32 factor is copied before the
#: product: one that is not read by 16 bytes in place, and one (X, Y) that would be turned in
#: registers. On an H200 at 4096 cubed a copy takes 2 to 3% of the product's time, and the more the
#: fewer uses there are; value by value a product takes 1.2 to 1.4 times as long, with X turned in
#: registers 1.05 times (51.4 to 49.0 TFLOP/s), with Y too 1.15 times (44.8).
CUDA_COPY_USES = 512
CUDA_TURN_USES = (3072, 1024)
#: float32 on CUDA cores. Measured on an H200 at 4096 cubed, in TFLOP/s with both factors as they
#: are wanted (cuBLAS 51.8), with X turned, and with a slope's epilogue (cuBLAS and a pass 49.6):
#: 64 x 128 with 8 x 8 sums a thread and three blocks on a multiprocessor 51.4, 49.0 and 48.8;
#: 128 x 256 with 8 x 16, one block, 50.5, 46.9 and 47.0; 128 x 128 with 8 x 16, two blocks, 49.1,
#: 45.7 and 46.4; 64 x 64 with 8 x 8, X turned, 45. Slices of 8 and four stages are no better. The
#: small ones are for results of few blocks.
CUDA_CORE_BLOCKS = (
    CudaBlock(64, 128, 16, 8, 8, 3, 3, kept="shared"),
    CudaBlock(64, 64, 16, 8, 8, 3, 4, speed=0.92),
    CudaBlock(32, 64, 16, 4, 8, 4, 6, speed=0.8),
    CudaBlock(64, 32, 32, 4, 4, 5, 3, speed=0.85),
    CudaBlock(32, 32, 32, 4, 4, 5, 4, speed=0.9),
)
#: float64 on tensor cores. Measured likewise, the product alone and with the epilogue of gelu
#: (cuBLAS 63.0, and 30.8 with passes): 64 x 64 with 32 x 32 a warp and three blocks on a
#: multiprocessor 60.0 and 55.8, 128 x 64 with 64 x 32, two blocks, 58.5 and 52.5; 128 x 128 with
#: one block 55, chunks of 4 or 16 less.
CUDA_DOUBLE_BLOCKS = (
    CudaBlock(64, 64, 16, 32, 32, 3, 3, 8),
    CudaBlock(32, 64, 16, 32, 16, 4, 3, 8, speed=0.75),
    CudaBlock(32, 32, 32, 16, 16, 4, 2, 8, speed=0.8),
)
#: 16-bit types by mma.sync: 64 x 64 a warp reads 8 matrices of 16 x 16 for 32 instructions. On an
#: H200, which has wgmma for what is aligned, 370 TFLOP/s; two blocks of 128 x 128 do 337.
CUDA_HALF_BLOCKS = (
    CudaBlock(128, 256, 32, 64, 64, 4, 1, 16, kept=""),
    CudaBlock(128, 128, 32, 64, 64, 4, 2, 16, speed=0.9, kept=""),
    CudaBlock(64, 64, 32, 32, 32, 4, 4, 16, speed=0.7, kept=""),
    CudaBlock(32, 64, 32, 32, 16, 4, 4, 16, speed=0.6, kept=""),
)
#: The same where a factor comes value by value through registers: fewer sums leave room for them.
CUDA_HALF_BLOCKS_HELD = (
    CudaBlock(128, 128, 32, 64, 32, 3, 1, 16, kept=""),
    CudaBlock(64, 64, 32, 32, 32, 3, 3, 16, speed=0.8, kept=""),
)
#: Sums that keep a multiprocessor busy. Fewer do less: their share of them to the power of 0.6
#: (measured for float32: 2048 a third, 8192 four fifths of the speed).
CUDA_BUSY_SUMS = 12288
#: Values of K in the time of which a block begins and ends.
CUDA_FILL = 64
#: What a join takes to begin and end, in multiply-adds of one multiprocessor (7 us), and what a
#: value of a plane takes on its way through memory, in those of all.
CUDA_LAUNCH_COST = 1_400_000
CUDA_PLANE_COST = 50


#: Products of few rows (`thin`): so many, and so many columns and values of K at the least (fewer
#: take the time of a launch either way). On an H200, K = N = 4096, beside the tiles below and the
#: best of PyTorch, microseconds: float32, 1 row 27 / 70 / 26, 8 rows 29 / 70 / 52, 16 rows
#: 35 / 72 / 94, 32 rows 39 / - / 55, 64 rows 60 / 102 / 66; float64, 1 row 44 / 54 / 45, 8 rows
#: 47 / 55 / 58. 16-bit types by the same way took longer than tiles of wgmma.
CUDA_THIN_ROWS = {"float32": 64, "float64": 8}
CUDA_THIN_LEAST = 512
#: Warps of a block; bytes of a slice of Y; slices that are on their way, or read.
CUDA_THIN_WARPS = 8
CUDA_THIN_SLICE = 16384
CUDA_THIN_STAGES = 8


#: d_b of few rows (`outer`): K up to which, elements of the result from which on, threads of a
#: block and their rows. On an H200 the tiles above write d_b of 4096 x 4096 in float64 at 2.6 TB/s,
#: cuBLAS's kernel for K = 1 at 4.5.
CUDA_OUTER_K = 8
CUDA_OUTER_LEAST = 1 << 16
CUDA_OUTER_THREADS = 128
CUDA_OUTER_ROWS = 32
#: Bytes at whose multiples the rows of a copy begin, where they have so many times that: a run of
#: 128 bytes is then one line of the second-level cache and not two.
CUDA_LINE = 128
CUDA_LINES = 8


def cuda_pitch(length: int, itemsize: int) -> int:
    """Elements from a row to the next of a copy with rows of so many: whole 16 bytes at least."""
    long = length * itemsize >= CUDA_LINES * CUDA_LINE
    return round_up(length, (CUDA_LINE if long else 16) // itemsize)


#: float64 of few rows on Hopper: one block on each multiprocessor, with most of its shared memory
#: full of slices on their way, and a cluster of them that shares K. On an H200 at K = N = 4096,
#: microseconds beside the tiles above and the best of PyTorch: 16 rows 47 / 73 / 56, 32 rows
#: 50 / 73 / 58, 64 rows 57 / 74 / 62; with half of the slices 64 rows take 75, with twice the
#: blocks in clusters of 4 71, with 64 x 128 91, with four warps 63.
CUDA_DOUBLE_FEW = (
    CudaBlock(16, 64, 32, 16, 16, 4, 1, 8),
    CudaBlock(32, 64, 16, 32, 16, 8, 1, 8),
    CudaBlock(64, 64, 16, 32, 16, 6, 1, 8),
)
#: Columns and values of K from which on; values of K of a block and blocks of a cluster, at most.
CUDA_FEW_LEAST = 1024
CUDA_CLUSTER_K = 256
CUDA_CLUSTER = 8


def cuda_few(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, multiprocessors: int
) -> tuple[CudaBlock, int, int] | None:
    """The tile of a product of few rows, and (length, number) of the parts of K in a cluster.

    None for more rows, and for less than that pays for. They depend on the sizes of one place, as
    in :func:`cuda_block`.
    """
    if min(n, k) < CUDA_FEW_LEAST or m > tiles[-1].block_m:
        return None
    tile = next(tile for tile in tiles if m <= tile.block_m)
    most = min(CUDA_CLUSTER, k // CUDA_CLUSTER_K, multiprocessors // -(-n // tile.block_n))
    part = round_up(-(-k // max(1, most)), tile.block_k)
    return tile, part, -(-k // part)


@functools.lru_cache(maxsize=4096)
def cuda_block(
    tiles: tuple[CudaBlock, ...], m: int, n: int, k: int, places: int, free: bool,
    multiprocessors: int,
) -> tuple[CudaBlock, int, int]:  # fmt: skip
    """The tile of a product, and (length, number) of the parts of its sum, 1 but where `free`.

    The one with the least work on the multiprocessor that has the most. The parts depend on the
    sizes of one place: an element of a batch gives what it gives alone.
    """
    best: tuple[float, CudaBlock, int, int] | None = None
    places = 1 if free else places
    for tile in tiles:
        blocks = -(-m // tile.block_m) * -(-n // tile.block_n)
        choices = [(max(1, k), 1)]
        if free:
            wanted = tile.resident * multiprocessors // max(1, blocks)
            for parts in {max(1, wanted), max(1, wanted // 2)} - {1}:
                part = round_up(-(-k // min(parts, max(1, k // CUDA_PART))), tile.block_k)
                choices.append((part, -(-k // part)))
        for part, parts in choices:
            most = -(-blocks * places * parts // multiprocessors)
            area = tile.block_m * tile.block_n
            busy = min(1.0, min(most, tile.resident) * area / CUDA_BUSY_SUMS) ** 0.6
            cost = most * area * (part + CUDA_FILL) / (tile.speed * busy)
            if parts > 1:
                planes = places * m * n * parts * CUDA_PLANE_COST
                cost += CUDA_LAUNCH_COST + planes / multiprocessors
            if best is None or cost < best[0]:
                best = cost, tile, part, parts
    assert best is not None
    return best[1:]


# --- Dask -----------------------------------------------------------------------------------------

#: Blocks that one task of a sum over Dask blocks adds.  It is a constant because the order of a sum
#: follows from it.  A task holds that many partial results and its result (36 MiB for a d_b of
#: 512 x 2048 in float32), and the tasks of a sum are a seventh of those of its blocks; the depth,
#: and with it the latency, falls with the logarithm only: 4096 blocks take 4 levels, with 4 they
#: take 6 and a third more tasks, with 16 they take 3 (docs/distributed.md counts them).
DASK_SPLIT = 8
#: Bytes that chunks along K may make move before a warning: a second at 10 Gbit/s.
DASK_MOVED_BYTES = 1 << 30
