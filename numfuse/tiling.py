"""Every block size, chosen from the problem and the host, each with its reason.

Nothing here imports Numba: the host's vector width is passed in by the backend that knows it.
"""

from __future__ import annotations

import functools
import glob
import math
import pathlib
from dataclasses import dataclass

#: Registers: (MR, vectors of NR) by vector bytes.  An ``MR x (vectors * VL)`` tile must leave
#: registers for the row of B and one broadcast, and have at least (latency x FMA ports) = 8-10
#: independent sums.
#: 64 bytes: 32 registers, 28 sums + 2 + 1; 14x2 measured at 99-100% of the FMA peak on Zen 4 and
#:   Granite Rapids, 12x2 and 8x3 at 95-98%.
#: 32 bytes: 16 registers, 12 sums + 2 + 1 (the Haswell tile of the literature, 6x16 in f32).
#: 16 bytes: 8x2 = 16 sums: fits the 32 registers of NEON; SSE2's 16 spill, which costs time only.
REGISTER_TILES = {64: (14, 2), 32: (6, 2), 16: (8, 2)}

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
#: Columns of an elementwise pass: a few rows of 1024 values stay in level 1.
ROW_BLOCK = 1024
#: Elements of an elementwise cell: 2**16 take 20-50 us, large against 0.1 us for fetching a cell.
ELEMENTWISE_CELL = 1 << 16
#: From how many fused multiply-adds or elements on a launch takes several threads.  It costs
#: 5-20 us (GNU OpenMP, two cores), and milliseconds where another library's pool still spins on the
#: other core (OpenBLAS after a product: measured): the work should take about 150 us, as 256^3 does
#: in float32.
PARALLEL_FMAS = 16 << 20
PARALLEL_ELEMENTS = 1 << 18
#: Plans of small calls kept by their exact form: 4096 of 2-4 KiB are 16 MiB at the most.
SMALL_PLANS = 4096
#: Cost of packing, in cycles an element, for choosing cells: measured with sources in level 3
#: (Granite Rapids: 2.5 and 0.6-1.8).
PACK_B_CYCLES = 2.0
PACK_A_CYCLES = 1.0
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
#: Rows of a chunk that are summed one by one.  A chunk of 56 is 7 runs of 8: chains of at most
#: 7 + 6 additions, where NumPy's pairwise sum has up to 18 in a block of 128 and one more for every
#: doubling.
RUN = 8


@dataclass(frozen=True, slots=True)
class Registers:
    """The register tile of one accumulator dtype on one host."""

    vector_bytes: int
    itemsize: int
    mr: int
    vectors: int

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
        whole = round_up(self.mr, self.vl)
        return whole if 7 * whole <= 8 * self.mr else self.mr

    @property
    def chunk(self) -> int:
        """Rows of a chunk of the column sums."""
        return CHUNK_TILES * self.mr


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
def registers(vector_bytes: int, itemsize: int) -> Registers:
    mr, vectors = REGISTER_TILES[vector_bytes]
    return Registers(vector_bytes, itemsize, mr, vectors)


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


def k_block(k: int, itemsize: int) -> int:
    """K in equal blocks of at most `KC`.  Depends on dtype and K alone, which makes the
    order of summation the same for every shape, slice and number of threads."""
    limit = KC[itemsize]
    blocks = max(1, -(-k // limit))
    return max(1, -(-k // blocks))


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


@functools.lru_cache(maxsize=4096)
def gemm(m: int, n: int, k: int, batch: int, sums: int, threads: int, r: Registers) -> Tiling:
    """Tiling of a product: `batch` outputs of (m, n), each a sum of `sums` products over k."""
    kc = k_block(k, r.itemsize)
    nc_limit = int(level2_bytes() * BLOCK_SHARE) // (kc * r.itemsize) // r.nr * r.nr
    # At least a panel, and no wider than a plane: with a small K the strips would grow instead.
    nc_limit = max(r.nr, min(nc_limit, PLANE_COLUMNS // r.nr * r.nr))
    single = sums == 1 and k <= kc
    best: tuple[float, Tiling] | None = None
    lanes = 2 * r.vl
    for split_n in range(1, max(1, min(2 * threads, -(-n // r.nr))) + 1):
        cell_n = round_up(-(-n // split_n), r.nr) if n else r.nr
        if not single:
            cell_n = min(cell_n, PLANE_COLUMNS)
        cells_n = max(1, -(-n // cell_n))
        blocks = max(1, -(-cell_n // nc_limit))
        nc = round_up(-(-cell_n // blocks), r.nr)
        rows_limit = round_up(m, r.chunk)
        if blocks > 1:
            rows_limit = min(rows_limit, PANELS_BYTES // (kc * r.itemsize))
        if not single:
            rows_limit = min(rows_limit, PLANE_BYTES // (cell_n * r.itemsize))
        # One cell a thread, or two where that balances better; whole chunks of rows.
        for target in {1, *(-(-threads * f // (batch * cells_n)) for f in (1, 2) if threads > 1)}:
            cell_m = max(r.chunk, round_up(-(-m // max(1, target)), r.chunk))
            if cell_m > max(rows_limit, r.chunk):
                parts = -(-m // max(r.chunk, rows_limit // r.chunk * r.chunk))
                cell_m = max(r.chunk, round_up(-(-m // parts), r.chunk))
            cells_m = max(1, -(-m // cell_m))
            rows = round_up(max(1, min(cell_m, m)), r.mr)
            compute = rows * cell_n * k * sums / lanes
            packing = k * sums * (PACK_B_CYCLES * cell_n + PACK_A_CYCLES * rows)
            cost = -(-batch * cells_m * cells_n // threads) * (compute + packing)
            if best is None or cost < best[0] * 0.999:
                panels = 1 if blocks == 1 else rows // r.mr
                plane = (0, 0) if single else (rows, round_up(cell_n, r.nr))
                best = cost, Tiling(kc, nc, cell_m, cell_n, cells_m, cells_n, panels, *plane)
    assert best is not None  # cells_n = 1 is always tried
    return best[1]


@functools.lru_cache(maxsize=4096)
def elementwise(m: int, n: int, chunk: int) -> Tiling:
    """Tiling of a pass over (m, n): cells of whole chunks of rows and of `ROW_BLOCK` columns."""
    nc = min(ROW_BLOCK, max(1, n))
    cell_n = min(max(1, n), round_up(ELEMENTWISE_CELL, nc))
    cell_m = max(chunk, round_up(ELEMENTWISE_CELL // cell_n, chunk))
    return Tiling(0, nc, cell_m, cell_n, max(1, -(-m // cell_m)), max(1, -(-n // cell_n)), 0, 0, 0)
