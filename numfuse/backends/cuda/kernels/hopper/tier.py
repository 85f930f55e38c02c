"""Hopper: products of float16 and bfloat16 by the copy engine (TMA) and wgmma.

And of float32 where the caller allowed it: as six products of bfloat16 parts ("bf16x6"), or
rounded to tf32.  `kernel.Gemm` describes a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from numfuse.backends.cuda.kernels import joins
from numfuse.backends.cuda.kernels.epilogue import addresses, formula_of, steps
from numfuse.backends.cuda.kernels.hopper.factors import (
    HALF,
    factor_of,
    fitted,
    tensor_map,
)
from numfuse.backends.cuda.kernels.hopper.kernel import SHARED_BYTES, Gemm
from numfuse.backends.cuda.kernels.hopper.maps import TensorMap
from numfuse.backends.cuda.kernels.hopper.tiling import (
    HOPPER_BY_MAP,
    HopperTile,
    hopper_splits,
    hopper_tile,
)
from numfuse.backends.cuda.plan.product import (
    Derived,
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
)


def _pairs(operand: Operand, n: int) -> bool:
    """Whether two neighbours of a row are one aligned access, in every row and place."""
    place, row, column = operand.strides
    wide = 2 * operand.itemsize
    return column == 1 and not (place % 2 or row % 2 or n % 2) and operand.alignment >= wide


def _vectors(operand: Operand, n: int) -> bool:
    """Whether each 8 values of a row are 16 aligned bytes, in every row and place."""
    place, row, column = operand.strides
    return column == 1 and not (place % 8 or row % 8 or n % 8) and operand.alignment >= 16


def _boxed(operand: Operand, product: Product, width: int, rows: int) -> TensorMap | None:
    """The map by which a 16-bit result or extra operand is moved in boxes of `rows` x `width`."""
    place, row, column = operand.strides
    if product.places > 1 and place == 0:
        return None
    fit = fitted(operand, product.m, product.n, row, column, product.places)
    if fit is None:
        return None
    made = tensor_map(operand.dtype, product.n, product.m, product.places, *fit, (width, rows))
    return made if made.possible() else None


class _Hopper:
    """The tier."""

    name = "wgmma"

    def take(self, product: Product, device: DeviceInfo) -> Plan | None:
        """Launches for a product of 16-bit operands, or of float32 ones that may be split."""
        kind = self._kind(product)
        if device.capability[0] != 9 or kind is None or device.shared_per_block < SHARED_BYTES:
            return None
        return _plan(product, kind, device)

    @staticmethod
    def _kind(product: Product) -> str | None:
        dtypes = {product.x.dtype, product.y.dtype}
        dtypes |= {o.dtype for o in (product.bias, product.extra) if o is not None}
        if product.out.dtype != "float32" or product.extra is not None:
            dtypes.add(product.out.dtype)  # but a bare sum may stay a float32
        if len(dtypes) > 1 or product.accumulator != "float32":
            return None
        if product.pre is not None and product.pre.dtype != "float32":
            return None
        if max(product.m, product.n, product.k) >= 1 << 30 or product.places > 65535:
            return None
        dtype = dtypes.pop()
        if dtype in HALF:
            return dtype
        if dtype == "float32" and product.precision in ("bf16x6", "tf32"):
            return product.precision
        return None


WGMMA = _Hopper()


def _plan(product: Product, kind: str, device: DeviceInfo) -> Plan | None:
    m, n, k, places = product.m, product.n, product.k, product.places
    split = kind == "bf16x6"
    slices = -(-k // (32 if kind == "tf32" else 64))
    x_places, y_places = (places if o.strides[0] else 1 for o in (product.x, product.y))
    if kind not in HALF and not hopper_splits(
        m, n, k, x_places, y_places, places, 6 if split else 1
    ):
        return None  # exact float32 is faster
    _, row, column = product.out.strides
    whole = fitted(product.out, m, n, row, column, places) is not None
    tile, parts = hopper_tile(
        m,
        n,
        slices,
        places,
        device.multiprocessors,
        split=split,
        heavy=product.is_curved,
        free=product.free,
        rows=kind in HALF and not whole,
    )
    return plan_with(product, kind, device, tile, parts)


def plan_with(
    product: Product,
    kind: str,
    device: DeviceInfo,
    tile: HopperTile,
    parts: int,
    by_map: bool = HOPPER_BY_MAP,
) -> Plan | None:
    """The launches of a product in blocks of a tile, with K in so many parts.

    `by_map`: whether the copy engine stores the result and fetches the residual or grad, too.
    """
    m, n, k, places = product.m, product.n, product.k, product.places
    slices = -(-k // (32 if kind == "tf32" else 64))
    part_slices = -(-slices // parts)
    parts = -(-slices // part_slices)
    x = factor_of(product, "x", kind, tile.block_m)
    if x is None:
        return None
    y = factor_of(product, "y", kind, tile.block_n)
    if y is None:
        return None
    half = kind in HALF
    width = min(64, tile.block_n)
    out, extra = product.out, product.extra
    joined: tuple[Launch, ...] = ()
    workspace = 0
    out_slot, out_part, out_map, extra_map = Slot("out"), 0, None, None
    extra_kind = "" if extra is None else "rows" if half else "float32"
    if parts > 1:
        pitch = -(-n // 4) * 4
        out_kind, out_slot = "float32", Slot("work")
        planes = Operand("float32", (m * pitch, pitch, 1), 16)
        out_part = places * m * pitch
        workspace = parts * out_part * 4
        lengths, steps_of = (places, parts, m, n), (m * pitch, out_part, pitch)
        joined = (joins.rows("float32", out_slot, out, lengths, steps_of, overlaps=True),)
        out = planes
    elif half and out.dtype != "float32":
        out_kind = "vectors" if _vectors(out, n) else "rows"
        if by_map or out_kind == "rows":
            if extra is not None:
                extra_map = _boxed(extra, product, width, 64)
            # by warps, or by groups where the residual or grad takes the same way
            out_map = _boxed(out, product, width, 16 if extra_map is None else 64)
        if out_map is not None:
            out_kind = "map"
            if extra_map is not None:
                extra_kind = "map"
        elif extra is not None:
            extra_map = None
            if _vectors(extra, n):
                extra_kind = "vectors"
    else:
        out_kind = "float32"
    bias = product.bias
    bias_kind = ""
    if bias is not None:
        bias_kind = "half" if half else "float32"
    pre = product.pre
    gemm = Gemm(
        kind,
        x.turned,
        y.turned,
        tile,
        out_kind,
        extra=extra_kind,
        bias=bias_kind,
        sums=product.sums,
        # the planes' rows have room for a neighbour of the last column
        out_pairs=out_kind == "float32" and ((parts > 1 and n % 2 == 0) or _pairs(out, n)),
        extra_pairs=extra_kind == "float32" and extra is not None and _pairs(extra, n),
        pre="" if pre is None else "pairs" if _pairs(pre, n) else "single",
        # short: the sums themselves are good to some units in the last place
        formula=formula_of(product, short=True),
    )
    row_blocks, column_blocks = -(-m // tile.block_m), -(-n // tile.block_n)
    units = row_blocks * column_blocks * places * parts
    if units >= 1 << 31:
        return None
    slice_bytes = gemm.planes * sum(
        64 * b * 2 if f.turned else 128 * f.map.box[1]
        for f, b in ((x, tile.block_m), (y, tile.block_n))
    )
    arguments = gemm.schema(
        x_map=Derived(x.slot, x.map),
        y_map=Derived(y.slot, y.map),
        out_map=0 if out_map is None else Derived(Slot("out"), out_map),
        extra_map=0 if extra_map is None else Derived(Slot("extra"), extra_map),
        m=m,
        n=n,
        slices=slices,
        row_blocks=row_blocks,
        column_blocks=column_blocks,
        places=places,
        units=units,
        part_slices=part_slices,
        slice_bytes=slice_bytes,
        x_places=x.places,
        y_places=y.places,
        x_plane=x.plane,
        y_plane=y.plane,
        out_part=out_part,
        **addresses(product, out_slot),
        **steps("elements", product, out),
    )
    grid = (min(units, device.multiprocessors), 1, 1)
    launch = Launch(
        gemm.kernel(),
        grid,
        arguments,
        shared_bytes=gemm.shared_bytes,
        overlaps=True,
    )
    return Plan(
        (*x.launches, *y.launches, launch, *joined),
        tiling=HopperTiling(tile, gemm.stages, parts),
        workspace=workspace,
        block_m=64 * tile.halves,
    )


@dataclass(frozen=True)
class HopperTiling:
    """The tiling that `last_call` shows."""

    tile: HopperTile
    stages: int
    #: Planes that the sum over K is cut into.
    parts: int

    def __str__(self) -> str:
        return f"{self.tile}, {self.stages} stages" + (
            f", K in {self.parts} parts" if self.parts > 1 else ""
        )
