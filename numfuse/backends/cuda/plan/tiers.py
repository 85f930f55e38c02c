"""Which tier runs a product: each is asked in turn, the fastest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numfuse.backends.cuda import block_tiling
from numfuse.backends.cuda.kernels.ampere.outer import SHORT_K
from numfuse.backends.cuda.kernels.ampere.simt import CORES
from numfuse.backends.cuda.kernels.ampere.tensor_core import TENSOR_CORES
from numfuse.backends.cuda.kernels.ampere.thin import FEW_ROWS
from numfuse.backends.cuda.kernels.ampere.vectors import VECTORS
from numfuse.backends.cuda.kernels.hopper.factors import HALF
from numfuse.backends.cuda.kernels.hopper.tier import WGMMA, available
from numfuse.backends.cuda.kernels.hopper.tiling import PLAIN, hopper_cut
from numfuse.backends.cuda.kernels.mirror import MIRROR
from numfuse.backends.cuda.kernels.residues.tier import RESIDUES
from numfuse.backends.cuda.kernels.small import SMALL
from numfuse.backends.cuda.plan.product import DeviceInfo, Plan, Product, Tier, Way
from numfuse.epilogues import sum_of_terms

#: The last takes every product. `_PRECISE` tiers know precisions other than IEEE's: what none of
#: them takes is an IEEE product for all others, which are exact and, of such a product, faster.
TIERS: tuple[Tier, ...] = (
    RESIDUES, SHORT_K, SMALL, FEW_ROWS, *VECTORS, WGMMA, CORES, TENSOR_CORES, MIRROR,
)  # fmt: skip
_PRECISE = RESIDUES, WGMMA

#: Rows above which two sums are made at once by blocks of cp.async: fewer have kernels of their own
#: (`FEW_ROWS`, and float64's clusters), and K from which on: below it products have, too.
_PAIR_ROWS, _PAIR_K = 64, 9
#: Their tiles.
_PAIR_TILES = {"float32": block_tiling.CORE_BLOCKS, "float64": block_tiling.DOUBLE_BLOCKS}


def takes_rich(dtype: str, info: DeviceInfo) -> bool:
    """Return whether a tier of this device takes rich products of factors of a dtype.

    Such a tier also takes two sums whose columns alternate in one array without a copy.
    """
    return dtype in HALF and available(info)


#: The tiers that take rich products, and those that make two sums, or two terms, in parts, too.
_RICH = SHORT_K, WGMMA, CORES, TENSOR_CORES
_IN_PARTS = CORES, TENSOR_CORES


def takes_pairs(dtype: str, info: DeviceInfo, precision: str) -> bool:
    """Return whether a tier takes products of two sums."""
    split = dtype == "float32" and precision != "ieee"
    return takes_rich(dtype, info) or (not split and info.capability >= (8, 0))


def stay_whole(
    dtype: str, info: DeviceInfo, precision: str, m: int, n: int, k: int, places: int
) -> bool:
    """Return whether sums of which a tier makes two at once are in one piece, alone as well.

    Two at once fill twice the blocks. Where even these leave a device idle, or parts of both save
    much by the model, each is cut as it is by itself, on Hopper in 16 bits in a launch of its own.
    (An H100 took 1145 us for 268 x 14668 x 1919 in float32 in one piece, and 899 in five; an H200
    81 us for 300 x 2000 -> 1001 in float64, PyTorch 68.)
    """
    if not takes_pairs(dtype, info, precision):
        return False
    if not takes_rich(dtype, info):
        tiles = _PAIR_TILES.get(dtype, block_tiling.HALF_BLOCKS)
        if m <= _PAIR_ROWS or k < _PAIR_K:
            return False
        height, width = tiles[0].block_m, tiles[0].block_n
        if -(-m // height) * -(-2 * n // width) * places < info.multiprocessors:
            return False
        where = k, places, False, info.multiprocessors
        _, part, parts, _ = block_tiling.block(tiles, m, n, *where)
        if parts == 1:
            return True
        *_, whole = block_tiling.block(tiles, m, 2 * n, *where, True)
        cut = block_tiling.in_parts(tiles, m, 2 * n, k, places, part, info.multiprocessors)
        return block_tiling.CUT_GAIN * whole <= min(x[0] for x in cut)
    nbytes = 2 * places * (m * k + 2 * k * n + m * n)
    sizes = m, 2 * n, -(-k // 64), places, info.multiprocessors
    return hopper_cut(*sizes, 0, PLAIN, nbytes) is None


def choose(
    product: Product, info: DeviceInfo, named: Callable[[Product], str] | None = None
) -> tuple[Tier, Plan] | None:
    """The first tier that takes it, and how it runs it; None of one that no tier takes.

    `named` tells of a product by which of its `ways` it goes in place of what a model chooses; "":
    by none.

    A tier takes those rich products alone of which it also takes the bare one: a sum has the same
    bits whatever is made of it, and whether it is made with another one or not; so one that is cut
    alone is cut to the same parts here.
    """
    rich: Tier | None = None
    if product.members is not None:
        return _of_members(product, info)
    if product.is_rich:
        nothing = dict.fromkeys(("x1", "y1", "bias", "bias1", "extra", "pre", "pre1"))
        single = replace(product, epilogue=sum_of_terms(0), **nothing)  # type: ignore[arg-type]
        if product.woven:  # one of the two sums as if its columns were neighbours
            single = replace(single, alternate="", y=product.wide("y"))
            if product.woven_out:
                single = replace(single, out=product.wide("out"))
        alone = choose(single, info, named) if product.k else None
        rich = alone[0] if alone is not None and alone[0] in _RICH else None
        if alone is None or rich is None:
            return None
        if product.x1 is not None and rich in _IN_PARTS:
            if product.free:
                return None
            # (each of its terms is cut as both of them fill the device)
        elif alone[1].tail is not None:
            return None
        elif not product.free and alone[1].parts > 1:
            if rich not in _IN_PARTS or not product.has_two_sums:
                return None
            product = replace(product, part=alone[1].part)
        if product.free and rich is not WGMMA:  # (which asks by itself whether a sum is cut)
            if alone[1].part:
                return None
            product = replace(product, free=False, whole=True)
    if named is not None and (name := named(product)):
        found = _by_name(product, info, name)
        if found is not None:
            return found
    if rich is not None:
        plan = rich.take(_seen(product, rich), info)
        return None if plan is None else (rich, plan)
    if product.precision != "ieee":
        for tier in _PRECISE if product.k else ():
            plan = tier.take(product, info)
            if plan is not None:
                return tier, plan
        product = replace(product, precision="ieee")
    for tier in TIERS if product.k else (MIRROR,):
        plan = tier.take(product, info)
        if plan is not None:
            return tier, plan
    raise AssertionError("the last tier takes every product")


def _seen(product: Product, tier: Tier) -> Product:
    """Return a product as a tier sees it: most know IEEE's precision alone."""
    return product if tier in _PRECISE else replace(product, precision="ieee")


def _by_name(product: Product, info: DeviceInfo, name: str) -> tuple[Tier, Plan] | None:
    """Return the tier and the plan of one of a product's ways, if it still has such a one."""
    for tier in TIERS:
        for way in tier.ways(_seen(product, tier), info):
            if f"{tier.name}: {way.name}" == name:
                plan = way.make()
                return None if plan is None else (tier, plan)
    return None


def ways(product: Product, info: DeviceInfo, reorder: bool = False) -> list[tuple[str, Way, Plan]]:
    """Return the other ways to run a product, by name, those of the least expected time first.

    They are those of the tier that takes it, with the sum over K in the same order, and none where
    sums over the rows, whose order a tile decides on, are asked for. With `reorder` they are all of
    all tiers, that tier's first; but of a product that has the bits of another one (rich, `whole`).
    """
    chosen = choose(product, info)
    if chosen is None or not product.k:
        return []
    own, plan = chosen
    found = []
    tiers = [own]
    reorder &= not (product.is_rich or product.whole)
    if reorder:
        tiers += [tier for tier in TIERS if tier is not own]
    for tier in tiers:
        for way in sorted(tier.ways(_seen(product, tier), info), key=lambda x: x.cost):
            made = way.make()
            if made is None or _launched(made) == _launched(plan):
                continue
            same = made.order == plan.order and not product.sums
            if reorder or same:
                found.append((f"{tier.name}: {way.name}", way, made))
    return found


def name_of(product: Product, info: DeviceInfo) -> str:
    """Return the name of the way that a model chooses; "" if it is none of the tier's."""
    chosen = choose(product, info)
    if chosen is None or not product.k:
        return ""
    tier, plan = chosen
    for way in tier.ways(_seen(product, tier), info):
        made = way.make()
        if made is not None and _launched(made) == _launched(plan):
            return f"{tier.name}: {way.name}"
    return ""


def _launched(plan: Plan) -> list[tuple[Any, ...]]:
    """Return what tells the launches of two plans of a product apart."""
    return [(launch.kernel, launch.grid) for launch in plan.launches]


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
