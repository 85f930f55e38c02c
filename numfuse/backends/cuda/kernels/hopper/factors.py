"""How a kernel on Hopper gets X and Y: by tensor maps of the arrays themselves, or of copies."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile.intrinsics import HALVES
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, kernel
from numfuse.backends.cuda.compile.unroll import Inlined, Template
from numfuse.backends.cuda.kernels.hopper import copies
from numfuse.backends.cuda.kernels.hopper.kernel import planes_of
from numfuse.backends.cuda.kernels.hopper.maps import TensorMap
from numfuse.backends.cuda.kernels.hopper.tiling import (
    HOPPER_COPY,
)
from numfuse.backends.cuda.plan.product import (
    Launch,
    Operand,
    Product,
    Slot,
)

# --- from a product to launches -------------------------------------------------------------------

HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Factor:
    """X or Y as the kernel reads it: a copy that a launch makes, or the array itself."""

    turned: bool
    #: Where it lies, and places of one plane of a split operand.
    slot: Slot
    map: TensorMap
    #: 0 where every place has the same.
    places: int
    plane: int
    launches: tuple[Launch, ...] = ()


def fitted(
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


def factor_of(product: Product, name: str, kind: str, block: int) -> Factor | None:
    """How the kernel gets X ("x") or Y ("y")."""
    operand = product.x if name == "x" else product.y
    long = product.m if name == "x" else product.n
    place, row, column = operand.strides
    # strides along the operand's own axis, and along K
    own, deep = (row, column) if name == "x" else (column, row)
    places = product.places if place else 1
    if kind in HALF:
        for turned in (False, True):
            outer, inner = (product.k, long) if turned else (long, product.k)
            strides = (deep, own) if turned else (own, deep)
            fit = fitted(operand, outer, inner, *strides, places)
            if fit is None:
                continue
            made = tensor_map(kind, inner, outer, places, *fit, box_of(turned, block, long, kind))
            if made.possible():
                return Factor(turned, Slot(name), made, int(places > 1), 0)
        if product.m * product.n * product.k * product.places < HOPPER_COPY:
            return None
    # a copy: along its contiguous axis, where it may
    turned = kind != "tf32" and (own == 1 or (deep != 1 and abs(own) < abs(deep)))
    outer, inner = (product.k, long) if turned else (long, product.k)
    outer_stride, inner_stride = (deep, own) if turned else (own, deep)
    pitch = tiling.pitch(inner, 2)  # at least what a thread of `convert` writes, 8 values
    parts = planes_of(kind)
    plane = places * outer * pitch
    exchanged = kind == "tf32" and inner_stride != 1 and outer_stride == 1
    copy = f"{name} copy"
    launch = copy_of(
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
    made = tensor_map(
        dtype, inner, outer, places * parts, pitch, outer * pitch, box_of(turned, block, long, kind)
    )
    return Factor(turned, Slot(copy), made, int(places > 1), places if parts > 1 else 0, (launch,))


def box_of(turned: bool, block: int, long: int, kind: str) -> tuple[int, int]:
    """Elements of a box: a row has 128 bytes (64 where a block of Y is narrower).

    Rows that no operand has are not asked for: the engine takes as long for a row that it fills
    with zeros.  What they hold instead reaches no row of the result that is stored.
    """
    if turned:
        return min(64, block), 64
    return (32 if kind == "tf32" else 64), min(block, -(-long // 8) * 8)


def tensor_map(
    dtype: str,
    inner: int,
    outer: int,
    places: int,
    outer_stride: int,
    place_stride: int,
    box: tuple[int, int],
) -> TensorMap:
    return TensorMap(dtype, (inner, outer, places), (outer_stride, place_stride), box)


def copy_of(
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
    numbers = {"rows": outer, "columns": inner, "pitch": pitch, "plane": plane}
    steps = {"source_place": place, "source_row": outer_stride, "source_column": inner_stride}
    if exchanged:
        made = copy_kernel("turn", "tf32", False)
        grid = (-(-pitch // 32), -(-outer // 32), places)
        shared = 32 * 33 * 4
    else:
        wide = (
            kind not in HALF
            and operand.alignment >= 16
            and inner_stride == 1
            and not (outer_stride % 4 or place % 4 or inner % 4)
        )
        made = copy_kernel("convert", kind if kind not in HALF else "copy", wide)
        grid = (-(-pitch // 512), -(-outer // 4), places)
        shared = 0
    if grid[1] > 65535 or grid[2] > 65535:
        return None
    return Launch(
        made,
        grid,
        ARGUMENTS(source=source, out=Slot(makes[0]), **numbers, **steps),
        shared_bytes=shared,
        overlaps=True,
        makes=makes,
    )


#: Of both copies; strides are in elements.
ARGUMENTS = Schema(copies.convert)


@functools.lru_cache(maxsize=64)
def copy_kernel(template: str, kind: str, wide: bool) -> Kernel:
    """Return a kernel of `copies`."""
    pack, low, _ = HALVES[kind if kind in HALVES else "bfloat16"]
    real = np.float32
    b: dict[str, Any] = {
        "KIND": kind,
        "WIDE": wide,
        "PACK": pack,
        "LOW": low,
        "ZERO": real(0),
        "SOURCE_SIZE": 2 if kind == "copy" else 4,
        "OUT_SIZE": 4 if kind == "tf32" else 2,
        # of bfloat16 the largest number and the smallest subnormal; the largest float32
        "LARGEST": real(2.0**127 * (2 - 2.0**-7)),
        "SMALLEST": real(2.0**-133),
        "MAXIMUM": np.finfo(real).max,
    }
    b["NEAREST"] = Inlined(copies.nearest, b)
    b["HIGH_PART"] = Inlined(copies.high_part, b)
    b["REST"] = Inlined(copies.rest, b)
    made = Template(getattr(copies, template), b)
    return kernel(
        made,
        ARGUMENTS.signature,
        threads=256,
        name=f"{template} {kind}{' wide' if wide else ''}",
        **made.others,
    )
