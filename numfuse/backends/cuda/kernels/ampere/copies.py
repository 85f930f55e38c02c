"""Which float32 factors are copied before a product on CUDA cores, by what that saves and costs.

Such a kernel reads a factor in place where its neighbours lie along its own axis in whole accesses
of 16 bytes. One that lies along K is turned in registers on the way, any other comes value by
value; or a copy lays it out (`layouts`).

Costs are in multiply-adds of one multiprocessor, as those of `tiling.cost`.
"""

from __future__ import annotations

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels.ampere.slices import SIDE, Fetch
from numfuse.backends.cuda.plan.product import Product
from numfuse.backends.cuda.tiling import CudaBlock

#: Shares of a product's time that X and Y take when they are turned in registers. (On an H200
#: 4096 x 1024 x 4096 takes 1.015 times as long with X in blocks of 64 x 128, 1.03 in 64 x 64;
#: 2048 cubed with both 1.15 and 1.13.) And in slices of 8, of which a thread's neighbours have less
#: of a line: 577 x 1792 x 6144, (out, in), takes 339 us with Y copied, 350 with both. Fitted to 330
#: ways of 50 products, as what follows is.
TURNED, TURNED_SHORT = (0.03, 0.18), (0.04, 0.28)
#: And a factor that comes by so many values at a time: one by one a product takes 1.2 to 1.4 times
#: as long with both; two at a time is a guess between that and nothing.
NARROW = {1: 0.13, 2: 0.05}
#: The share of the fused multiply-adds of CUDA cores that a product reaches: 51.4 of 59 TFLOP/s.
REACHED = 0.87
#: An element's way through memory in a copy, in multiply-adds of all multiprocessors: 8 bytes at
#: 3.7 TB/s are 64, measured for 64 MiB; smaller ones take longer, by the same sweep. And what a
#: copy takes to begin and end (2 us): the launch behind it is ready by then, as all of these
#: overlap.
COPY_COST = 85
COPY_START = 400_000
#: Rows and columns of a result for whose whole numbers a factor is read.
WHOLE = 64


def share(way: Fetch, own: int) -> float:
    """Return the share of the time that a factor fetched so takes; `own`: 1 for X, 2 for Y."""
    if way.held:
        return (TURNED if way.depth >= SIDE[1] else TURNED_SHORT)[own - 1]
    return NARROW.get(way.values, 0.0)


def of_tile(part: float, own: int, tile: CudaBlock) -> float:
    """Return the share that a factor takes in a tile; `part` is that in a block of 64 x 128.

    Of blocks with fewer rows there are more, and each reads its slice of Y. (By the sweep's times
    X costs the narrow ones no more.)
    """
    return part if own == 1 else part * WHOLE / tile.block_m


def ways(work: int, elements: int, part: float, multiprocessors: int) -> tuple[float, float]:
    """Return the work that a factor of so many elements adds, copied and read as it lies.

    `work` are the multiply-adds of the product, `part` is the `share` of one that is read as it
    lies.
    """
    copied = elements * COPY_COST / multiprocessors + COPY_START
    return copied, part * work / multiprocessors / REACHED


def added(
    product: Product, elements: int, part: float, is_copied: bool, multiprocessors: int
) -> float:
    """Return the work that a factor of so many elements adds, copied or read as it lies."""
    return ways(_work(product), elements, part, multiprocessors)[not is_copied]


def pays(product: Product, elements: int, part: float, multiprocessors: int) -> bool:
    """Return whether a copy of a factor costs less than to read it as it lies."""
    copied, read = ways(_work(product), elements, part, multiprocessors)
    return copied < read


def _work(product: Product) -> int:
    """Return the multiply-adds of a product, those of a block's empty rows and columns too."""
    p = product
    return tiling.round_up(p.m, WHOLE) * tiling.round_up(p.n, WHOLE) * p.k * p.places
