"""Which tier runs a product: each is asked in turn, the fastest first."""

from __future__ import annotations

from dataclasses import replace

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


def takes_rich(dtype: str, info: DeviceInfo) -> bool:
    """Return whether a tier of this device takes rich products of factors of a dtype."""
    return dtype in HALF and available(info)


def stay_whole(dtype: str, info: DeviceInfo, m: int, n: int, k: int, places: int) -> bool:
    """Return whether sums of which a tier makes two at once are in one piece, alone as well.

    Two at once fill twice the blocks. Where even these leave a device idle, each is cut by itself.
    """
    if not takes_rich(dtype, info):
        return False
    nbytes = 2 * places * (m * k + 2 * k * n + m * n)
    sizes = m, 2 * n, -(-k // 64), places, info.multiprocessors
    return hopper_cut(*sizes, False, nbytes) is None


def choose(product: Product, info: DeviceInfo) -> tuple[Tier, Plan] | None:
    """The first tier that takes it, and how it runs it; None of one that no tier takes.

    One tier takes rich products, and those alone of which it also takes the bare one: a sum has the
    same bits whatever is made of it, and whether it is made with another one or not; so none of a
    sum that is cut alone is in one piece here.
    """
    if product.is_rich:
        nothing = dict.fromkeys(("x1", "y1", "bias", "bias1", "extra", "pre", "pre1"))
        single = replace(product, epilogue=sum_of_terms(0), **nothing)  # type: ignore[arg-type]
        alone = choose(single, info) if product.k else None
        same = alone is not None and alone[0] is WGMMA and (product.free or alone[1].parts == 1)
        plan = WGMMA.take(product, info) if same else None
        return None if plan is None else (WGMMA, plan)
    for tier in TIERS if product.k else (MIRROR,):
        plan = tier.take(product, info)
        if plan is not None:
            return tier, plan
    raise AssertionError("the last tier takes every product")
