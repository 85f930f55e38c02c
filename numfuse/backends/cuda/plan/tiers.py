"""Which tier runs a product: each is asked in turn, the fastest first."""

from __future__ import annotations

from dataclasses import replace

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels.ampere.outer import SHORT_K
from numfuse.backends.cuda.kernels.ampere.simt import CORES
from numfuse.backends.cuda.kernels.ampere.tensor_core import TENSOR_CORES
from numfuse.backends.cuda.kernels.ampere.thin import FEW_ROWS
from numfuse.backends.cuda.kernels.hopper.factors import HALF
from numfuse.backends.cuda.kernels.hopper.tier import WGMMA, available
from numfuse.backends.cuda.kernels.hopper.tiling import hopper_cut
from numfuse.backends.cuda.kernels.mirror import MIRROR
from numfuse.backends.cuda.plan.product import DeviceInfo, Plan, Product, Tier
from numfuse.epilogues import sum_of_terms

#: The last takes every product.
TIERS: tuple[Tier, ...] = (SHORT_K, FEW_ROWS, WGMMA, CORES, TENSOR_CORES, MIRROR)


#: Rows above which two sums are made at once by blocks of cp.async: fewer have kernels of their own
#: (`FEW_ROWS`, and float64's clusters), and K from which on: below it products have, too.
_PAIR_ROWS, _PAIR_K = 64, 9
#: Their tiles.
_PAIR_TILES = {"float32": tiling.CORE_BLOCKS, "float64": tiling.DOUBLE_BLOCKS}


def takes_rich(dtype: str, info: DeviceInfo) -> bool:
    """Return whether a tier of this device takes rich products of factors of a dtype."""
    return dtype in HALF and available(info)


#: The tiers that take rich products.
_RICH = WGMMA, CORES, TENSOR_CORES


def takes_pairs(dtype: str, info: DeviceInfo, precision: str) -> bool:
    """Return whether a tier takes products of two sums."""
    split = dtype == "float32" and precision != "ieee"
    return takes_rich(dtype, info) or (not split and info.capability >= (8, 0))


def stay_whole(
    dtype: str, info: DeviceInfo, precision: str, m: int, n: int, k: int, places: int
) -> bool:
    """Return whether sums of which a tier makes two at once are in one piece, alone as well.

    Two at once fill twice the blocks. Where even these leave a device idle, each is cut by itself.
    """
    if not takes_pairs(dtype, info, precision):
        return False
    if not takes_rich(dtype, info):
        tiles = _PAIR_TILES.get(dtype, tiling.HALF_BLOCKS)
        if m <= _PAIR_ROWS or k < _PAIR_K:
            return False
        return tiling.block(tiles, m, 2 * n, k, places, False, info.multiprocessors)[2] == 1
    nbytes = 2 * places * (m * k + 2 * k * n + m * n)
    sizes = m, 2 * n, -(-k // 64), places, info.multiprocessors
    return hopper_cut(*sizes, False, nbytes) is None


def choose(product: Product, info: DeviceInfo) -> tuple[Tier, Plan] | None:
    """The first tier that takes it, and how it runs it; None of one that no tier takes.

    A tier takes those rich products alone of which it also takes the bare one: a sum has the same
    bits whatever is made of it, and whether it is made with another one or not; so none of a sum
    that is cut alone is in one piece here.
    """
    if product.is_rich:
        nothing = dict.fromkeys(("x1", "y1", "bias", "bias1", "extra", "pre", "pre1"))
        single = replace(product, epilogue=sum_of_terms(0), **nothing)  # type: ignore[arg-type]
        alone = choose(single, info) if product.k else None
        tier = alone[0] if alone is not None else MIRROR
        same = alone is not None and (product.free or alone[1].parts == 1)
        plan = tier.take(product, info) if same and tier in _RICH else None
        return None if plan is None else (tier, plan)
    if product.members is not None:
        return _of_members(product, info)
    for tier in TIERS if product.k else (MIRROR,):
        plan = tier.take(product, info)
        if plan is not None:
            return tier, plan
    raise AssertionError("the last tier takes every product")


def _of_members(product: Product, info: DeviceInfo) -> tuple[Tier, Plan] | None:
    """Return the tier of a product of the members of points, and how it runs it.

    None of one that no tier takes: before 8.0 of a GPU, where rows are not whole accesses of 16
    bytes, and of float32 in another precision than IEEE's.
    """
    if not info.capability[0]:  # the simulator
        return MIRROR, MIRROR.take(product, info)  # type: ignore[return-value]
    values = 16 // product.out.itemsize
    ends = product.out, product.pre, product.extra, product.bias
    if not all(x is None or x.in_wholes(product.n, values) for x in ends):
        return None
    for tier in (CORES, TENSOR_CORES):
        plan = tier.take(product, info)
        if plan is not None:
            return tier, plan
    return None
