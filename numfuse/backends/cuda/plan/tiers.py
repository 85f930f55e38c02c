"""Which tier runs a product: each is asked in turn, the fastest first."""

from __future__ import annotations

from numfuse.backends.cuda.kernels.ampere.outer import SHORT_K
from numfuse.backends.cuda.kernels.ampere.simt import CORES
from numfuse.backends.cuda.kernels.ampere.tensor_core import TENSOR_CORES
from numfuse.backends.cuda.kernels.ampere.thin import FEW_ROWS
from numfuse.backends.cuda.kernels.hopper.tier import WGMMA
from numfuse.backends.cuda.kernels.mirror import MIRROR
from numfuse.backends.cuda.plan.product import DeviceInfo, Plan, Product, Tier

#: The last takes every product.
TIERS: tuple[Tier, ...] = (SHORT_K, FEW_ROWS, WGMMA, CORES, TENSOR_CORES, MIRROR)


def choose(product: Product, info: DeviceInfo) -> tuple[Tier, Plan] | None:
    """The first tier that takes it, and how it runs it; None of one that no tier takes.

    Only the first of all takes products with a second term or sum, and not all of them.
    """
    twofold = (WGMMA,) if product.k else ()
    for tier in twofold if product.y1 is not None else TIERS if product.k else (MIRROR,):
        plan = tier.take(product, info)
        if plan is not None:
            return tier, plan
    assert product.y1 is not None, "the last tier takes every product"
    return None
