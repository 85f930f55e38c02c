"""Which float32 factors are copied before a product on CUDA cores, by what that saves and costs.

Such a kernel reads a factor in place where its neighbours lie along its own axis in whole accesses
of 16 bytes. One that lies along K is turned in registers on the way, any other comes value by
value; or a copy lays it out (`layouts`).

Costs are in multiply-adds of one multiprocessor, as those of `block_tiling.cost`.
"""

from __future__ import annotations

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.backends.cuda.kernels.ampere.slices import SIDE, Fetch
from numfuse.backends.cuda.plan.product import Product

#: Shares of a product's time that X and Y take when they are turned in registers: X in blocks of
#: 128 columns (of 64 twice as much), Y in any. And in slices of 8. Read off 120 pairs of one way
#: with and without a copy, of 50 products on an H200: of X 0 to 2% and 3 to 6%, in slices of 8 0 to
#: 2%. Of Y 5 to 20%, in slices of 8 3 to 10%, until the rows of 16 values of K were interleaved and
#: a block waited for memory once as it begins: 577 x 1792 x 6144 took 362 us with a copy of Y and
#: takes 344 without, 32768 x 64 x 320's backward 167 and 158, 5908 x 708 x 113 49.9 and 48.5.
TURNED, TURNED_SHORT = (0.015, 0.06), (0.01, 0.05)
#: And a factor that comes by so many values at a time, along K; one by one along its own axis.
NARROW = {1: 0.13, 2: 0.01}
NARROW_ACROSS = 0.06
#: The share of the fused multiply-adds of CUDA cores that a product reaches: 51.4 of 59 TFLOP/s.
REACHED = 0.87
#: An element's way through memory in a copy, in multiply-adds of all multiprocessors: 8 bytes at
#: 3.7 TB/s are 64, measured for 64 MiB; smaller ones take longer, by the same sweep. And what a
#: copy takes to begin and end (2 us): the launch behind it is ready by then, as all of these
#: overlap.
COPY_COST = 85
COPY_START = 400_000
#: Rows and columns of a result for whose whole numbers a factor is read, and columns of a block.
WHOLE, BROAD = 64, 128


def share(way: Fetch, own: int) -> float:
    """Return the share of the time that a factor fetched so takes; `own`: 1 for X, 2 for Y."""
    if way.held:
        return (TURNED if way.depth >= SIDE[1] else TURNED_SHORT)[own - 1]
    if way.values == 1 and not way.along_k:
        return NARROW_ACROSS
    return NARROW.get(way.values, 0.0)


def of_tile(part: float, own: int, tile: CudaBlock) -> float:
    """Return the share that a factor takes in a tile; `part` is that in a block of 64 x 128.

    Of blocks with fewer columns there are more, and each reads its slice of X.
    """
    return part * BROAD / tile.block_n if own == 1 else part


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
