"""Hopper: products of float16 and bfloat16 by the copy engine (TMA) and wgmma.

And of float32 where the caller allowed it: as six products of bfloat16 parts ("bf16x6"), or
rounded to tf32.  `Gemm` describes a kernel and binds the templates of `hopper_gemm`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile.intrinsics import HALVES, multiply, multiply_wait
from numfuse.backends.cuda.compile.scalars import is_finite, select
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, kernel
from numfuse.backends.cuda.compile.unroll import Inlined, Template
from numfuse.backends.cuda.kernels.ampere.registers import add, clear
from numfuse.backends.cuda.kernels.elementwise import Formula
from numfuse.backends.cuda.kernels.epilogue import addresses, formula_of, steps
from numfuse.backends.cuda.kernels.hopper import copies
from numfuse.backends.cuda.kernels.hopper import gemm as hopper_gemm
from numfuse.backends.cuda.kernels.hopper.maps import TensorMap
from numfuse.backends.cuda.kernels.hopper.tiling import (
    HOPPER_BY_MAP,
    HOPPER_COPY,
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
from numfuse.language.graph import named

#: Slices of K (64 each) that the tensor cores add up before float32 addition takes over.
PROMOTE = 4
#: Bytes behind the stages: mbarriers.
EXTRA_BYTES = 256


@dataclass(frozen=True)
class Gemm:
    """A kernel of the product."""

    #: "bfloat16", "float16", "tf32" or "bf16x6".
    operands: str
    #: Whether an operand's contiguous axis is not K.
    x_turned: bool
    y_turned: bool
    tile: HopperTile
    #: "vectors", "rows" or "map" (16-bit values), "float32".
    out: str
    #: The residual or grad: "", "vectors", "rows", "map" or "float32".
    extra: str = ""
    #: "", "half" (16-bit values) or "float32".
    bias: str = ""
    sums: bool = False
    #: Which float32 arrays are read or written two neighbours at a time.
    out_pairs: bool = False
    extra_pairs: bool = False
    pre: str = ""
    formula: Formula = Formula((named("z"),), "float32", ("z", "bias", "extra"))

    def __str__(self) -> str:
        layout = f"{'t' if self.x_turned else 'n'}{'t' if self.y_turned else 'n'}"
        return f"wgmma {self.operands} {layout} {self.tile} -> {self.out}"

    @property
    def planes(self) -> int:
        """Parts of an operand."""
        return _planes(self.operands)

    @property
    def plane_bytes(self) -> int:
        """Bytes of a slice of K in both operands."""
        return (self.tile.block_m + self.tile.block_n) * 128

    @property
    def stage_bytes(self) -> int:
        return self.planes * self.plane_bytes

    @property
    def staged(self) -> bool:
        return self.out != "float32"

    @property
    def width(self) -> int:
        """Columns of the pieces in which the epilogue takes a block."""
        return min(64, self.tile.block_n)

    @property
    def chunks(self) -> int:
        return self.tile.halves * self.tile.block_n // self.width

    @property
    def buffers(self) -> int:
        """Pieces that wait in shared memory to be stored, or arrive there.

        Four in "ping-pong" would cost a stage of the ring: 0-2% slower at K = 4096.
        """
        return min(2, self.chunks)

    @property
    def alone(self) -> bool:
        """Whether a warp has the copy engine store its rows without waiting for the others."""
        return self.out == "map" and self.extra != "map"

    @property
    def bias_bytes(self) -> int:
        """Bytes of a block's bias as float32; of each block at work two are kept by turns."""
        return 4 * max(128, self.tile.block_n) if self.bias else 0

    @property
    def staging_bytes(self) -> int:
        needed = self.buffers * 128 * self.width if self.staged else 0
        if self.sums:
            needed = max(needed, 16 * self.tile.block_n)
        return -(-needed // 1024) * 1024 * self.tile.consumers

    @property
    def stages(self) -> int:
        room = SHARED_BYTES - EXTRA_BYTES - self.staging_bytes - self._biases
        return min(MOST_STAGES, room // self.stage_bytes)

    @property
    def _biases(self) -> int:
        return 2 * self.bias_bytes * (2 if self.tile.ping_pong else 1)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.staging_bytes + self._biases + EXTRA_BYTES

    def bindings(self) -> dict[str, Any]:
        """All UPPER-case names of the templates."""
        t = self.tile
        half = "bfloat16" if self.planes > 1 else self.operands
        kind = {"bfloat16": "bf16", "float16": "f16", "tf32": "tf32"}[half]
        values = t.halves * t.block_n // 2
        y_box = min(64, t.block_n)
        # bytes of K (or of 16 rows of K) from one instruction to the next
        steps = (2048 if self.x_turned else 32, 32 * y_box if self.y_turned else 32)
        wait = multiply_wait(values)
        (x_low, x_high), (y_low, y_high) = (
            divmod(_descriptor(turned, box), 1 << 32)[::-1]
            for turned, box in ((self.x_turned, 64), (self.y_turned, y_box))
        )
        step = multiply(
            t.block_n,
            t.halves,
            kind,
            (int(self.x_turned), int(self.y_turned)),
            steps,
            8192,
            (x_high, y_high),
        )
        b: dict[str, Any] = {
            "BLOCK_M": t.block_m,
            "BLOCK_N": t.block_n,
            "DEPTH": 32 if kind == "tf32" else 64,
            "GROUP": t.group,
            "HALVES": t.halves,
            "PING_PONG": t.ping_pong,
            "READERS": 1 if t.ping_pong else t.consumers,
            "CONSUMERS": t.consumers,
            "VALUES": values,
            "STAGES": self.stages,
            # 2^32 / STAGES: exact quotients up to 2^28
            "PER_STAGE": -(-(1 << 32) // self.stages),
            "STAGE_BYTES": self.stage_bytes,
            "X_BYTES": t.block_m * 128,
            "X_TURNED": self.x_turned,
            "Y_TURNED": self.y_turned,
            "Y_BOX": y_box,
            "X_DESCRIPTOR": x_low,
            "Y_DESCRIPTOR": y_low,
            "PLANES": self.planes,
            "PLANE_BYTES": self.plane_bytes,
            "PROMOTE": PROMOTE,
            "STAGING_AT": self.stages * self.stage_bytes,
            "BIAS_AT": self.stages * self.stage_bytes + self.staging_bytes,
            "FULL_AT": self.stages * self.stage_bytes + self.staging_bytes + self._biases,
            "BIAS_BYTES": self.bias_bytes,
            "BIASES": max(1, t.block_n // 128),
            "ALONE": self.alone,
            "BUFFERS": self.buffers,
            "BUFFER_BYTES": self.staging_bytes // t.consumers // self.buffers,
            "WIDTH": self.width,
            "CHUNKS": self.chunks,
            "ROW_CHUNKS": t.block_n // self.width,
            "PIECES": self.width // 8,
            "SHIFT": 3 if self.width == 64 else 2,
            "STAGED": self.staged,
            "OUT": self.out,
            "OUT_SIZE": 2 if self.staged else 4,
            "EXTRA": self.extra,
            "EXTRA_SIZE": 4 if self.extra == "float32" else 2,
            "BIAS": self.bias,
            "BIAS_SIZE": 4 if self.bias == "float32" else 2,
            "PRE": self.pre != "",
            "SUMS": self.sums,
            "EPILOGUE": self.formula,
            "ZERO": np.float32(0),
            "MULTIPLY": step,
            "MULTIPLY_WAIT": wait,
            "CLEAR": clear(values),
            "ADD": add(values),
        }
        if half in HALVES:
            b["PACK"], b["LOW"], b["HIGH"] = HALVES[half]
        part = hopper_gemm
        b["FINITE"] = Inlined(part.finite, {"IS_FINITE": is_finite, "SELECT": select, **b})
        b["LOAD_BIAS"] = Inlined(part.load_bias, b)
        b["LOAD_EXTRA"] = Inlined(part.load_two, {"PAIRS": self.extra_pairs})
        b["STORE_PRE"] = Inlined(part.store_two, {"PAIRS": self.pre == "pairs"})
        b["STORE_OUT"] = Inlined(part.store_two, {"PAIRS": self.out_pairs})
        b["FETCH_ROWS"] = Inlined(part.fetch_rows, b)
        b["FETCH_VECTORS"] = Inlined(part.fetch_vectors, b)
        b["STORE_VECTORS"] = Inlined(part.store_vectors, b)
        b["STORE_ROWS"] = Inlined(part.store_rows, b)
        b["PIECE"] = Inlined(part.piece, b)
        b["UNIT_AT"] = Inlined(part.unit_at, b)
        b["COUNT"] = Inlined(part.slices_of, b)
        b["PAST"] = Inlined(part.past, b)
        b["NEXT"] = Inlined(part.next_stage, b)
        b["PRODUCE"] = Inlined(part.produce, b)
        b["MULTIPLY_SLICES"] = Inlined(part.multiply_slices, b)
        b["MULTIPLY_SPLIT"] = Inlined(part.multiply_split, b)
        b["SUM_COLUMNS"] = Inlined(part.sum_columns, b)
        b["FINISH"] = Inlined(part.finish, b)
        b["CONSUME"] = Inlined(part.consume, b)
        return b

    @property
    def schema(self) -> Schema:
        """The arguments: strides are in elements."""
        there = {"out_map": self.out == "map", "extra_map": self.extra == "map"}
        maps = ["x_map", "y_map", *(name for name, is_map in there.items() if is_map)]
        return Schema(hopper_gemm.gemm, map=" ".join(maps))

    def kernel(self) -> Kernel:
        return _kernel(self)


#: Shared memory of a block on Hopper, and more stages than ever helped.
SHARED_BYTES = 232448
MOST_STAGES = 12


def _planes(kind: str) -> int:
    """Parts of an operand of the kind `Gemm.operands`."""
    return 3 if kind == "bf16x6" else 1


def _descriptor(turned: bool, box: int) -> int:
    """The constant part of a wgmma matrix descriptor (PTX ISA 9.7.15.5.1.2.2).

    Bits 62-63: 1 for rows of 128 bytes that are swizzled, 2 of 64.  Bits 32-45: from 8 rows to the
    next 8; bits 16-29: from one box along the contiguous axis to the next, which only operands
    that are turned have more than one of.  Both in 16 bytes.
    """
    row = 2 * box
    swizzle = 1 if row == 128 else 2
    if not turned:
        row, swizzle = 128, 1
    return swizzle << 62 | (8 * row >> 4) << 32 | ((64 * row >> 4) if turned else 1) << 16


@functools.lru_cache(maxsize=1024)
def _kernel(g: Gemm) -> Kernel:
    template = Template(hopper_gemm.gemm, g.bindings())
    return kernel(
        template,
        g.schema.signature,
        threads=128 * (1 + g.tile.consumers),
        blocks=1,
        feature="a",
        name=str(g),
        **template.others,
    )


# --- from a product to launches -------------------------------------------------------------------

_HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class _Factor:
    """X or Y as the kernel reads it: a copy that a launch makes, or the array itself."""

    turned: bool
    #: Where it lies, and places of one plane of a split operand.
    slot: Slot
    map: TensorMap
    #: 0 where every place has the same.
    places: int
    plane: int
    launches: tuple[Launch, ...] = ()


def _fit(
    operand: Operand, outer: int, inner: int, outer_stride: int, inner_stride: int, places: int
) -> tuple[int, int] | None:
    """Strides (outer, place) of an array as the copy engine takes it, or None."""
    unit = 16 // operand.itemsize
    if operand.alignment < 16 or (inner_stride != 1 and inner > 1):
        return None
    if outer == 1:
        outer_stride = -(-inner // unit) * unit
    place = operand.strides[0] if places > 1 else 0
    if place == 0:
        place = -(-outer_stride * outer // unit) * unit
    if outer_stride <= 0 or outer_stride % unit or place <= 0 or place % unit:
        return None
    return outer_stride, place


def _factor(product: Product, name: str, kind: str, block: int) -> _Factor | None:
    """How the kernel gets X ("x") or Y ("y")."""
    operand = product.x if name == "x" else product.y
    long = product.m if name == "x" else product.n
    place, row, column = operand.strides
    # strides along the operand's own axis, and along K
    own, deep = (row, column) if name == "x" else (column, row)
    places = product.places if place else 1
    if kind in _HALF:
        for turned in (False, True):
            outer, inner = (product.k, long) if turned else (long, product.k)
            strides = (deep, own) if turned else (own, deep)
            fit = _fit(operand, outer, inner, *strides, places)
            if fit is None:
                continue
            made = _map(kind, inner, outer, places, *fit, _box(turned, block, long, kind))
            if made.possible():
                return _Factor(turned, Slot(name), made, int(places > 1), 0)
        if product.m * product.n * product.k * product.places < HOPPER_COPY:
            return None
    # a copy: along its contiguous axis, where it may
    turned = kind != "tf32" and (own == 1 or (deep != 1 and abs(own) < abs(deep)))
    outer, inner = (product.k, long) if turned else (long, product.k)
    outer_stride, inner_stride = (deep, own) if turned else (own, deep)
    pitch = tiling.pitch(inner, 2)  # at least what a thread of `convert` writes, 8 values
    parts = _planes(kind)
    plane = places * outer * pitch
    exchanged = kind == "tf32" and inner_stride != 1 and outer_stride == 1
    copy = f"{name} copy"
    launch = _copy(
        operand,
        kind,
        exchanged,
        outer,
        inner,
        pitch,
        places,
        plane,
        outer_stride,
        inner_stride,
        Slot(name),
        (copy, parts * plane * (4 if kind == "tf32" else 2)),
    )
    if launch is None:
        return None
    dtype = {"tf32": "float32", "bf16x6": "bfloat16"}.get(kind, kind)
    made = _map(
        dtype, inner, outer, places * parts, pitch, outer * pitch, _box(turned, block, long, kind)
    )
    return _Factor(turned, Slot(copy), made, int(places > 1), places if parts > 1 else 0, (launch,))


def _box(turned: bool, block: int, long: int, kind: str) -> tuple[int, int]:
    """Elements of a box: a row has 128 bytes (64 where a block of Y is narrower).

    Rows that no operand has are not asked for: the engine takes as long for a row that it fills
    with zeros.  What they hold instead reaches no row of the result that is stored.
    """
    if turned:
        return min(64, block), 64
    return (32 if kind == "tf32" else 64), min(block, -(-long // 8) * 8)


def _map(
    dtype: str,
    inner: int,
    outer: int,
    places: int,
    outer_stride: int,
    place_stride: int,
    box: tuple[int, int],
) -> TensorMap:
    return TensorMap(dtype, (inner, outer, places), (outer_stride, place_stride), box)


def _copy(
    operand: Operand,
    kind: str,
    exchanged: bool,
    outer: int,
    inner: int,
    pitch: int,
    places: int,
    plane: int,
    outer_stride: int,
    inner_stride: int,
    source: Slot,
    makes: tuple[str, int],
) -> Launch | None:
    """The launch that copies an operand into rows that the copy engine takes."""
    place = operand.strides[0] if places > 1 else 0
    numbers = (outer, inner, pitch, plane, place, outer_stride, inner_stride)
    if exchanged:
        made = copy_kernel("turn", "tf32", False)
        grid = (-(-pitch // 32), -(-outer // 32), places)
        shared = 32 * 33 * 4
    else:
        wide = (
            kind not in _HALF
            and operand.alignment >= 16
            and inner_stride == 1
            and not (outer_stride % 4 or place % 4 or inner % 4)
        )
        made = copy_kernel("convert", kind if kind not in _HALF else "copy", wide)
        grid = (-(-pitch // 512), -(-outer // 4), places)
        shared = 0
    if grid[1] > 65535 or grid[2] > 65535:
        return None
    return Launch(
        made,
        grid,
        (source, Slot(makes[0]), *numbers),
        shared_bytes=shared,
        overlaps=True,
        makes=makes,
    )


@functools.lru_cache(maxsize=64)
def copy_kernel(template: str, kind: str, wide: bool) -> Kernel:
    """A kernel of `hopper_copies`."""
    pack, low, _ = HALVES[kind if kind in HALVES else "bfloat16"]
    real = np.float32
    b: dict[str, Any] = {
        "KIND": kind,
        "WIDE": wide,
        "PACK": pack,
        "LOW": low,
        "ZERO": real(0),
        "SOURCE_SIZE": 2 if kind == "copy" else 4,
        "OUT_SIZE": 4 if kind in ("tf32", "float32") else 2,
        # of bfloat16 the largest number and the smallest subnormal; the largest float32
        "LARGEST": real(2.0**127 * (2 - 2.0**-7)),
        "SMALLEST": real(2.0**-133),
        "MAXIMUM": np.finfo(real).max,
    }
    b["NEAREST"] = Inlined(copies.nearest, b)
    b["HIGH_PART"] = Inlined(copies.high_part, b)
    b["REST"] = Inlined(copies.rest, b)
    made = Template(getattr(copies, template), b)
    count = 10 if template == "join" else 9
    signature = " ".join(["i64"] * count)
    return kernel(
        made,
        signature,
        threads=256,
        name=f"{template} {kind}{' wide' if wide else ''}",
        **made.others,
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
    fit = _fit(operand, product.m, product.n, row, column, product.places)
    if fit is None:
        return None
    made = _map(operand.dtype, product.n, product.m, product.places, *fit, (width, rows))
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
        if dtype in _HALF:
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
    if kind not in _HALF and not hopper_splits(
        m, n, k, x_places, y_places, places, 6 if split else 1
    ):
        return None  # exact float32 is faster
    _, row, column = product.out.strides
    whole = _fit(product.out, m, n, row, column, places) is not None
    tile, parts = hopper_tile(
        m,
        n,
        slices,
        places,
        device.multiprocessors,
        split=split,
        heavy=product.is_curved,
        free=product.free,
        rows=kind in _HALF and not whole,
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
    x = _factor(product, "x", kind, tile.block_m)
    if x is None:
        return None
    y = _factor(product, "y", kind, tile.block_n)
    if y is None:
        return None
    half = kind in _HALF
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
        joined = (_join(product, pitch, out_part, parts, out_slot),)
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


def _join(product: Product, pitch: int, plane: int, parts: int, planes: Slot) -> Launch:
    """The launch that adds up the planes of a product."""
    out = product.out
    place, row, column = out.strides
    wide = (
        column == 1
        and not (row % 4 or place % 4 or product.n % 4)
        and out.alignment >= 4 * out.itemsize
    )
    made = copy_kernel("join", out.dtype, wide)
    grid = (-(-product.m * (pitch // 4) // 256), product.places, 1)
    return Launch(
        made,
        grid,
        (planes, Slot("out"), product.m, product.n, pitch, plane, parts, place, row, column),
        overlaps=True,
    )
