"""Hopper: products of float16 and bfloat16 by the copy engine (TMA) and wgmma.

And of float32 where the caller allowed it: as six or three products of bfloat16 parts ("bf16x6",
"bf16x3"), or rounded to tf32.  `kernel.Gemm` describes a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.kernels.epilogue import finishing, in_elements
from numfuse.backends.cuda.kernels.hopper.factors import HALF, Factor, factor_of, fitted
from numfuse.backends.cuda.kernels.hopper.kernel import ARGUMENTS, PRODUCTS, SHARED_BYTES, Gemm
from numfuse.backends.cuda.kernels.hopper.maps import TensorMap
from numfuse.backends.cuda.kernels.hopper.records import Fetched, Maps, Second, Work
from numfuse.backends.cuda.kernels.hopper.tiling import (
    LOW_ROWS,
    HopperTile,
    Lies,
    box_width,
    hopper_cut,
    hopper_splits,
    hopper_tile,
    sideways_tiles,
    too_low,
)
from numfuse.backends.cuda.kernels.hopper.tiling import ways as hopper_ways
from numfuse.backends.cuda.kernels.planes import Planes
from numfuse.backends.cuda.plan.product import (
    Derived,
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
    Tier,
    Way,
)


def _boxed(
    operand: Operand, product: Product, width: int, rows: int, columns: int | None = None
) -> TensorMap | None:
    """The map by which a 16-bit result or extra operand is moved in boxes of `rows` x `width`."""
    n = product.n if columns is None else columns
    place, row, column = operand.strides
    if product.places > 1 and place == 0:
        return None
    fit = fitted(operand, product.m, n, row, column, product.places)
    if fit is None:
        return None
    sizes = n, product.m, product.places
    made = TensorMap(operand.dtype, sizes, fit, (width, rows))
    return made if made.possible() else None


def available(device: DeviceInfo) -> bool:
    """Return whether a device has the instructions, and the shared memory."""
    return device.capability[0] == 9 and device.shared_per_block >= SHARED_BYTES


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """Launches for a product of 16-bit operands, or of float32 ones that may be split."""
    kind = _kind(product)
    if kind is None or not available(device):
        return None
    m, n, k, places = product.m, product.n, product.k, product.places
    split = PRODUCTS.get(kind, 0)
    if product.y1 is not None and kind not in HALF:
        return None
    slices = -(-k // (32 if kind == "tf32" else 64)) * (1 + (product.x1 is not None))
    x_places, y_places = (places if o.strides[0] else 1 for o in (product.x, product.y))
    if kind not in HALF and not hopper_splits(m, n, k, x_places, y_places, places, split):
        return None  # exact float32 is faster
    low = _is_low(product, kind, slices, device)
    rows = _stored_by_rows(product, kind)
    lies = _lies(product, kind, low)
    if low and not lies.sideways:
        return None
    how: dict[str, Any] = {"split": split, "heavy": product.is_curved, "rows": rows, "lies": lies}
    sizes = m, n, slices, places, device.multiprocessors
    if not (product.free or product.whole or product.is_rich):
        nbytes = (m * k * x_places + k * n * y_places + m * n * places) * product.x.itemsize
        # (by the factors alone: it does not ask what is made of the sum, and where that goes)
        alone = lies._replace(sideways=lies.sideways and "all")
        cut = hopper_cut(*sizes, split, alone, nbytes)
        if cut is not None:
            return plan_with(product, kind, device, *cut)
    tile, parts = hopper_tile(*sizes, **how, free=product.free)
    if product.has_two_sums:
        if parts > 1:
            return None
        tile, _ = hopper_tile(*sizes, **how, sums=2)
    return plan_with(product, kind, device, tile, parts)


def _kind(product: Product) -> str | None:
    dtypes = {product.x.dtype, product.y.dtype}
    others = product.bias, product.extra, product.x1, product.y1, product.bias1
    dtypes |= {o.dtype for o in others if o is not None}
    if product.out.dtype != "float32" or product.extra is not None:
        dtypes.add(product.out.dtype)  # but a bare sum may stay a float32
    if len(dtypes) > 1 or product.accumulator != "float32":
        return None
    if max(product.m, product.n, product.k) >= 1 << 30 or product.places > 65535:
        return None
    dtype = dtypes.pop()
    if dtype in HALF:
        return dtype
    if dtype == "float32" and product.precision in ("tf32", *PRODUCTS):
        return product.precision
    return None


def ways(product: Product, device: DeviceInfo) -> Iterator[Way]:
    """Return the ways to run it: every tile, in every number of parts that its model knows."""
    p, kind = product, _kind(product)
    if kind is None or not available(device):
        return
    slices = -(-p.k // (32 if kind == "tf32" else 64)) * (1 + (p.x1 is not None))
    cut = not (p.whole or p.has_two_sums)
    sums = 1 + p.has_two_sums
    rows = _stored_by_rows(p, kind)
    low = _is_low(p, kind, slices, device)
    how = PRODUCTS.get(kind, 0), p.is_curved, rows, cut, _lies(p, kind, low), sums
    for cost, tile, parts in hopper_ways(p.m, p.n, slices, p.places, device.multiprocessors, *how):
        name = f"{tile}, K in {parts} parts" if parts > 1 else str(tile)
        yield Way(name, cost, partial(plan_with, p, kind, device, tile, parts))


def _is_low(product: Product, kind: str, slices: int, device: DeviceInfo) -> bool:
    """Return whether `too_low` holds of a product of 16 bits."""
    p = product
    return kind in HALF and too_low(p.m, p.n, slices, p.places, device.multiprocessors)


def _lies(product: Product, kind: str, low: bool = False) -> Lies:
    """Return how the factors and blocks lie; a copy has rows of whole lines.

    `low`: rows are so few, and K so short, that a block's epilogue decides (`too_low`).
    """

    def lines(operand: Operand) -> int:
        # (one of the strides is 1, where it is taken as it lies)
        row = operand.strides[1] * operand.strides[2] * operand.itemsize
        return 2 if operand.fits_copies() and row % 128 else 1

    _, deep, own = product.y.strides
    across, sideways = abs(own) < abs(deep), _on_its_side(product, kind, low)
    return Lies(across, lines(product.x), lines(product.y), sideways, _step(product))


def _on_its_side(product: Product, kind: str, low: bool) -> str:
    """Return which blocks may lie on their side, as `Lies` has it.

    Those of one sum in 16 bits, whose factors come as they lie, and whose results and operand are
    moved in boxes; planes of a sum in parts are not.
    """
    p, tiles = product, sideways_tiles(product.m, _step(product))
    if not tiles or kind not in HALF or (p.m <= LOW_ROWS and not low):
        return ""
    if p.has_two_sums or p.bias1 is not None or p.pre1 is not None or p.woven:
        return ""
    if _factors(p, kind, tiles[0], tiles[0].block_n) is None:
        return ""
    return "parts" if _ways_sideways(p, p.out, tiles[0]) is None else "all"


def _step(product: Product) -> int:
    """Return of what the rows of a block on its side are a multiple: those of a box of X are 32."""
    _, row, column = product.x.strides
    return 8 if abs(column) < abs(row) else 32


def _stored_by_rows(product: Product, kind: str) -> bool:
    """Return whether a 16-bit result has rows that the copy engine does not take."""
    out, n = product.out, product.n
    if product.woven_out:
        out, n = product.wide("out"), 2 * n
    _, row, column = out.strides
    fit = fitted(out, product.m, n, row, column, product.places)
    return kind in HALF and fit is None


WGMMA = Tier("wgmma", take, ways)


def plan_with(
    product: Product, kind: str, device: DeviceInfo, tile: HopperTile, parts: int
) -> Plan | None:
    """The launches of a product in blocks of a tile, with K in so many parts."""
    m, n, places = product.m, product.n, product.places
    term_slices = -(-product.k // (32 if kind == "tf32" else 64))
    slices = term_slices * (1 + (product.x1 is not None))
    part_slices = -(-slices // parts)
    parts = -(-slices // part_slices)
    columns = tile.block_n // (1 + product.has_two_sums)
    if tile.sideways:
        m, n = n, m
    row_blocks, column_blocks = -(-m // tile.block_m), -(-n // columns)
    units = row_blocks * column_blocks * places * parts
    found = _factors(product, kind, tile, columns)
    if found is None or units >= 1 << 31:
        return None
    x, y = found["x"], found["y"]
    planes = Planes.padded(product, parts)
    product = planes.stored
    out = product.out
    ways = _ways_of(product, out, tile, box_width(columns))
    if ways is None:
        return None
    gemm = _gemm(product, kind, tile, x, y, out, ways, parts)
    slice_bytes = gemm.stage_bytes
    if gemm.planes == 1:
        slice_bytes = sum(
            64 * b * 2 if f.turned else 128 * f.map.box[1]
            for f, b in ((x, tile.block_m), *[(y, gemm.y_columns)] * (1 + gemm.two_rights))
        )
    there = {name: Fetched(Derived(f.slot, f.map), f.places, f.plane) for name, f in found.items()}
    maps = {
        name: Derived(Slot(name), made) if made else 0
        for name, made in zip(("out", "extra", "pre", "pre1"), ways[2:], strict=True)
    }
    nothing = Fetched(0, 0, 0)
    arguments = gemm.schema(
        x=there["x"],
        y=there["y"],
        second=Second(
            there.get("x1", nothing),
            there.get("y1", nothing),
            in_elements(Slot("bias1"), product.bias1),
            in_elements(Slot("pre1"), product.pre1),
            maps.pop("pre1"),
        ),
        maps=Maps(**maps),
        work=Work(
            *(m, n, units, row_blocks, column_blocks, places),
            *(slices, part_slices, term_slices, planes.steps[1]),
        ),
        slice_bytes=slice_bytes,
        **finishing(product, out, planes.slot, in_elements),
    )
    grid = (min(units, device.multiprocessors), 1, 1)
    launch = Launch(gemm.kernel(), grid, arguments, gemm.shared_bytes, overlaps=True)
    launches = (*(made for f in found.values() for made in f.launches), launch)
    shown = f"{tile}, {gemm.stages} stages"
    rows = tile.block_n if tile.sideways else 64 * tile.halves
    made = planes.plan(launches, device, shown, rows)
    return replace(made, part=part_slices if parts > 1 else 0)


def _factors(
    product: Product, kind: str, tile: HopperTile, columns: int
) -> dict[str, Factor] | None:
    """How a kernel with so many columns of the result in a block gets its factors.

    Factors that are the even and the odd columns of one array are this one, as "y". For blocks on
    their side see `_factors_sideways`.
    """
    if tile.sideways:
        return _factors_sideways(product, kind, tile)
    right = columns
    names = "x", "y", "x1", "y1"
    if product.woven:
        product = replace(product, n=2 * product.n, y=product.wide("y"))
        right, names = tile.block_n, ("x", "y")  # type: ignore[assignment]
    found: dict[str, Factor] = {}
    for name in names:
        if getattr(product, name) is not None:
            block = tile.block_m if name[0] == "x" else right
            factor = factor_of(product, name, kind, block)
            like = found.get(name[0], factor)
            if factor is None or like is None or like.turned != factor.turned:
                return None
            found[name] = factor
    return found


def _factors_sideways(product: Product, kind: str, tile: HopperTile) -> dict[str, Factor] | None:
    """Return the same for blocks on their side, where factors change places.

    They are taken as they lie alone, and the instruction's Y along K, or in whole boxes.
    """
    upright = replace(tile, sideways=False)
    found = _factors(_turned(product), kind, upright, tile.block_n)
    if found is None or any(f.launches for f in found.values()):
        return None
    if found["y"].turned and tile.block_n % 32:
        return None
    names = {"x": "y", "y": "x", "x1": "y1", "y1": "x1"}
    return {name: replace(f, slot=Slot(names[name])) for name, f in found.items()}


def _turned(product: Product) -> Product:
    """Return the product whose factors make the same sums, turned: (X Y)^T = Y^T X^T."""

    def turned(operand: Operand | None) -> Any:
        if operand is None:
            return None
        place, row, column = operand.strides
        return replace(operand, strides=(place, column, row))

    p = product
    right = {"x": turned(p.y), "x1": turned(p.y1)}
    return replace(p, m=p.n, n=p.m, y=turned(p.x), y1=turned(p.x1), **right)


class _Ways(NamedTuple):
    """How the result leaves a block and the residual or grad comes to it (`Gemm.out`, `.extra`)."""

    out: str
    extra: str
    out_map: TensorMap | None = None
    extra_map: TensorMap | None = None
    #: Of a pre-activation in 16 bits, where the result goes by warps.
    pre_map: TensorMap | None = None
    pre1_map: TensorMap | None = None


def _ways(product: Product, out: Operand, width: int) -> _Ways:
    extra = product.extra
    line = extra is not None and not extra.strides[2]
    if out.dtype == "float32":
        return _Ways("float32", "" if extra is None else "line" if line else "float32")
    extra_map = None if extra is None or line else _boxed(extra, product, width, 64)
    # by warps, or by groups where the residual or grad takes the same way
    rows = 16 if extra_map is None else 64
    if product.woven_out:
        out_map = _boxed(product.wide("out"), product, width, rows, 2 * product.n)
    else:
        out_map = _boxed(out, product, width, rows)
    if out_map is None:
        return _Ways("rows", "" if extra is None else "line" if line else "rows")
    way = "" if extra is None else "line" if line else "rows" if extra_map is None else "map"
    if product.woven_out:
        return _Ways("map", way, out_map, extra_map)
    pres = [x for x in (product.pre, product.pre1) if x is not None and x.dtype in HALF]
    # (pieces of three results as wide as those of two would take a stage of the ring)
    narrow = width if len(pres) < 2 else 32
    pre_maps = [_boxed(x, product, narrow, rows) for x in pres]
    if None in pre_maps or (product.pre1 is not None and len(pres) < 2):
        return _Ways("map", way, out_map, extra_map)
    if narrow < width:
        out_map = _boxed(out, product, narrow, rows)
        extra_map = _boxed(extra, product, narrow, 64) if extra_map and extra else None
    return _Ways("map", way, out_map, extra_map, *pre_maps)


def _ways_sideways(product: Product, out: Operand, tile: HopperTile) -> _Ways | None:
    """Return the same for blocks on their side; None where there is no such way."""
    extra, pre = product.extra, product.pre
    if out.dtype == "float32":
        return _Ways("float32", "") if extra is None and pre is None else None
    if pre is not None and pre.dtype == "float32":  # (which threads store)
        pre = None
    arrays = [x for x in (out, extra, pre) if x is not None]
    if (extra is not None and not extra.strides[2]) or any(x.dtype not in HALF for x in arrays):
        return None
    maps = {id(x): _boxed(x, product, 64, tile.piece_rows) for x in arrays}
    if None in maps.values():
        return None
    of_extra, of_pre = (None if x is None else maps[id(x)] for x in (extra, pre))
    return _Ways("map", "" if extra is None else "map", maps[id(out)], of_extra, of_pre)


def _ways_of(product: Product, out: Operand, tile: HopperTile, width: int) -> _Ways | None:
    """Return those of a tile's blocks, whose pieces have so many columns where they stand."""
    if tile.sideways:
        return _ways_sideways(product, out, tile)
    return _ways(product, out, width)


def _gemm(
    product: Product,
    kind: str,
    tile: HopperTile,
    x: Factor,
    y: Factor,
    out: Operand,
    ways: _Ways,
    parts: int,
) -> Gemm:
    """The kernel, of which the result is `out`."""
    n, pre, extra = product.n, product.pre, product.extra
    pairs = all(x is None or x.in_wholes(n, 2) for x in (pre, product.pre1))
    woven_out = product.woven_out and ways.out == "map"
    pairs &= not tile.sideways  # (of which a thread has no neighbours in a row)
    stored = "map" if ways.pre_map or woven_out else "pairs" if pairs else "single"
    return Gemm(
        kind,
        x.turned,
        y.turned,
        tile,
        ways.out,
        extra=ways.extra,
        bias="" if product.bias is None else "half" if kind in HALF else "float32",
        sums=product.sums,
        # the planes' rows have room for a neighbour of the last column
        out_pairs=ways.out == "float32" and ((parts > 1 and n % 2 == 0) or out.in_wholes(n, 2)),
        extra_pairs=ways.extra == "float32" and extra is not None and extra.in_wholes(n, 2),
        pre="" if pre is None else stored,
        pre1="" if product.pre1 is None else stored,
        bias1=product.bias1 is not None,
        two_terms=product.x1 is not None,
        two_sums=product.has_two_sums,
        woven=product.woven,
        woven_out=woven_out,
        pre_half=pre is not None and pre.dtype in HALF,
        # short: the sums themselves are good to some units in the last place
        formula=formula(
            product.epilogue, (*ARGUMENTS, product.extra_name), product.accumulator, short=True
        ),
    )
