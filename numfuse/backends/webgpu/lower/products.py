"""A product with an epilogue, over all places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse import epilogues
from numfuse.backends.webgpu.lower.elementwise import elementwise
from numfuse.backends.webgpu.lower.places import (
    BINDINGS,
    Cut,
    Places,
    chains_of,
    cut_of,
    factor_access,
    repeated,
    row_access,
    tile_of,
    within,
)
from numfuse.backends.webgpu.lower.sums import join
from numfuse.backends.webgpu.shaders.epilogues import FACTORS, Array, Gemm
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.language.curves import leaf
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.backends.webgpu.tiling import WebGpuTile


@cache
def bare_product() -> epilogues.Epilogue:
    """Return the epilogue that stores a product's sum as it is."""
    return epilogues.sum_of_terms(0)


@cache
def bare_products(count: int) -> epilogues.Epilogue:
    """Return the epilogue that stores the sums of several products as they are."""
    names = tuple(f"z_{i}" for i in range(count))
    results = tuple((f"out_{name}", leaf(name)) for name in names)
    return epilogues.Epilogue("bare products", names, (), results)


def launch(
    store: Store,
    sizes: tuple[int, int, int],
    places: Places,
    cut: Cut,
    tile: WebGpuTile,
    accumulator: np.dtype[Any],
    formula: Formula,
    arrays: Mapping[str, Region],
    outs: Mapping[str, Region],
    factors: Sequence[Region] = (),
    sums: Mapping[str, Region] = MappingProxyType({}),
    stacked: bool = False,
    accumulators: tuple[str, ...] = ("z",),
) -> bool:
    """Record an (M, N) result of sums over K in every place, by `gemm.wgsl`.

    `sizes` are M, N and K. `arrays` has the formula's inputs, and may have others; `outs` is where
    its results go, a stack of planes where `stacked`. `factors` are X and a Y for each of the
    `accumulators` that the formula has. Of `sums`, those of its `summed` go to "column_sums", one
    behind another, a row for each row of blocks, and those of its `across` to "row_sums", M for
    each column of blocks. Nothing is recorded, and False returned, where the device binds fewer
    arrays.
    """
    device, (m, n, k) = store.device, sizes
    given = dict(zip(FACTORS, factors, strict=False))
    given |= {f"from_{name}": arrays[name] for name in formula.inputs if name in arrays}
    given |= {f"to_{name}": region for name, region in outs.items()}
    values = {"m": m, "n": n, "k": k, "part": cut.part, "parts": cut.parts}
    values |= {"segments": cut.per_group, "summed": places.segments, "groups": cut.groups}
    values["planes"] = total = places.count * cut.planes
    many = places.count != 1 or places.segments != 1
    bindings: dict[str, Any] = {}
    described = []
    for name, region in given.items():
        bindings[name], first = region.bound(device)
        given[name] = region = replace(region, offset=first)
        strides = region.strides[-2:]
        if stacked and name.startswith("to_"):
            strides = n, 1
        elif name not in FACTORS:
            strides = repeated(region.shape[-2:], strides)
        values[name] = 0 if many else first
        values[f"{name}_row"], values[f"{name}_column"] = strides
        way, _, plain = name.partition("_")
        if plain:
            by_column = way == "from" and region.shape[-2] == 1
            described.append(Array(plain, row_access(region), way == "to", by_column))
    bindings |= {name: region.bound(device)[0] for name, region in sums.items()}
    if many:
        table = [None if stacked and name.startswith("to_") else x for name, x in given.items()]
        bindings["places"] = device.constant(places.table(table), uniform=False)
    ways = ((-1, -2) if i else (-2, -1) for i in range(len(factors)))
    shader = Gemm(
        format_of(accumulator),
        formula,
        within(described, given, bindings),
        tile,
        tuple(factor_access(given[x], *way) for x, way in zip(FACTORS, ways, strict=False)) or None,
        places=many,
        segments=places.segments != 1,
        planes=stacked,
        accumulators=accumulators,
        one_rounding=device.one_rounding[format_of(accumulator)],
    )
    if len(shader.buffers) > device.limits[BINDINGS]:
        return False
    blocks = -(-m // tile.block_m) * -(-n // tile.block_n)
    for first in range(0, total, device.grid_limit):
        values["first_plane"] = first
        grid = (*device.grid(blocks), min(total - first, device.grid_limit))
        store.commands.dispatch(shader, bindings, values, grid)
    return True


BARE = Formula.of(bare_product, None).choose("out")


def group(
    store: Store,
    x: Region,
    right: Sequence[Region],
    batch: tuple[int, ...],
    outs: Sequence[tuple[Region, bool]],
    accumulator: np.dtype[Any],
) -> bool:
    """Record the products of X with several right factors over one read of X; as `product`, free.

    Nothing is recorded, and False returned, where the device binds fewer arrays.
    """
    device, (m, k), n = store.device, x.shape[-2:], right[0].shape[-1]
    places = Places.of(batch, outs[0][0].shape[:-2])
    # The sum is cut as that of one product alone, so that it has the bits of that.
    alone = tile_of(device, m, n, accumulator, k)
    cut = cut_of(device, m, n, k, places, alone, accumulator)
    tile = tile_of(device, m, n, accumulator, k, len(right))
    names = tuple(f"z_{i}" for i in range(len(right)))
    made = Formula.whole(bare_products(len(right))).choose(*(f"out_{name}" for name in names))
    arrays: dict[str, Region] = {}
    how = (m, n, k), places, cut, tile, accumulator, made, arrays
    if cut.planes == 1 and not any(add for _, add in outs):
        targets = dict(zip(made.results, (out for out, _ in outs), strict=True))
        return launch(store, *how, targets, (x, *right), accumulators=names)
    shape = places.count, cut.planes, m, n
    planes = {name: fresh(device, shape, accumulator, "planes") for name in made.results}
    if not launch(store, *how, planes, (x, *right), stacked=True, accumulators=names):
        return False
    for one, (out, add) in zip(planes.values(), outs, strict=True):
        join(store, one, places.count, cut.planes, out, add)
    return True


def sum_of_products(
    store: Store,
    batch: tuple[int, ...],
    accumulator: np.dtype[Any],
    factors: Sequence[tuple[Region, Region]],
    out: Region,
    add: bool = False,
    *,
    free: bool = False,
    formula: Formula = BARE,
    arrays: Mapping[str, Region] | None = None,
) -> None:
    """Record out = the sum of products, and of what `formula` adds of `arrays`, rounded once.

    With `add` it is out += the sum of products.
    """
    target = out
    if len(factors) > 1 and out.dtype != accumulator.name:
        target = fresh(store.device, out.shape, accumulator, "a sum of products")
    for x, y in factors:
        outs = {"out": target}
        product(store, x, y, batch, outs, accumulator, formula, arrays, free=free, add=add)
        formula, add = BARE, True
    if target is not out:
        copy(store.commands, target, out)


def product(
    store: Store,
    x: Region,
    y: Region,
    batch: tuple[int, ...],
    outs: Mapping[str, Region],
    accumulator: np.dtype[Any],
    formula: Formula = BARE,
    arrays: Mapping[str, Region] | None = None,
    *,
    free: bool = False,
    add: bool = False,
) -> None:
    """Record a formula of X Y, which is summed over the batch axes that ``outs["out"]`` lacks.

    With `free` the sum of a bare product may be cut into planes: that of d_b, over the rows, of
    which the order may depend on M. With `add` a bare product is added to what `out` holds.
    """
    m, k = x.shape[-2:]
    n = y.shape[-1]
    out = outs["out"]
    places = Places.of(batch, out.shape[:-2])
    if not (m and n and places.count):
        return
    if not places.segments:  # a sum of no products: one of length 0, as a kernel adds up
        places, k = replace(places, inner=()), 0
    cut = Cut(k, per_group=places.segments)
    tile = tile_of(store.device, m, n, accumulator, k if free else 0)
    if free:
        cut = cut_of(store.device, m, n, k, places, tile, accumulator)
    elif not add and (few := chains_of(store.device, m, n, k, places, accumulator)) is not None:
        _of_chains(store, x, y, outs, accumulator, formula, arrays or {}, places, *few)
        return
    how = (m, n, k), places, cut, tile, accumulator
    if not add and cut.planes == 1:
        launch(store, *how, formula, arrays or {}, outs, (x, y))
        return
    shape = places.count, cut.planes, m, n
    planes = fresh(store.device, shape, accumulator, "the planes of a product")
    launch(store, *how, BARE, {}, {"out": planes}, (x, y), stacked=True)
    join(store, planes, places.count, cut.planes, out, add)


def _of_chains(
    store: Store,
    x: Region,
    y: Region,
    outs: Mapping[str, Region],
    accumulator: np.dtype[Any],
    formula: Formula,
    arrays: Mapping[str, Region],
    places: Places,
    tile: WebGpuTile,
    cut: Cut,
) -> None:
    """Record a formula of X Y, whose chains of sums are planes that are added up in their order."""
    device, (m, k), n = store.device, x.shape[-2:], y.shape[-1]
    shape, out = (places.count, cut.planes, m, n), outs["out"]
    planes = fresh(device, shape, accumulator, "chains of a product")
    how = (m, n, k), places, cut, tile, accumulator
    launch(store, *how, BARE, {}, {"out": planes}, (x, y), stacked=True)
    if formula is BARE:
        join(store, planes, places.count, cut.planes, out, plain=True)
        return
    z = fresh(device, out.shape, accumulator, "a product")
    join(store, planes, places.count, cut.planes, z, plain=True)
    elementwise(store, formula, {**arrays, "z": z}, outs, accumulator)
