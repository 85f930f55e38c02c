"""How a kernel on Hopper gets X and Y: by tensor maps of the arrays themselves, or of copies.

The copy engine wants rows that begin at multiples of 16 bytes. `convert` brings an operand of any
strides into such rows; on the way it splits Y's float32 into three or two bfloat16 parts. (Those of
X are made by the kernel.)
"""

# A template has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile.accesses import (
    global_load4_f32,
    global_load16,
    global_load_f32,
    global_store4_b32,
)
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.intrinsics import (
    block_index,
    block_index_y,
    block_index_z,
    thread_index,
)
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, types
from numfuse.backends.cuda.compile.unroll import kernel_of, unrolled
from numfuse.backends.cuda.kernels import layouts
from numfuse.backends.cuda.kernels.hopper import parts
from numfuse.backends.cuda.kernels.hopper.kernel import planes_of
from numfuse.backends.cuda.kernels.hopper.maps import TensorMap
from numfuse.backends.cuda.kernels.hopper.parts import split_carefully
from numfuse.backends.cuda.kernels.hopper.tiling import box_width, copy_pays, reads_in_place
from numfuse.backends.cuda.plan.product import Launch, Operand, Product, Slot

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
    """How the kernel gets X ("x", "x1") or Y ("y", "y1")."""
    operand, axis = getattr(product, name), 1 if name[0] == "x" else 2
    long = product.m if axis == 1 else product.n
    # strides along the operand's own axis, and along K
    own, deep = operand.strides[axis], operand.strides[3 - axis]
    places = product.places if operand.strides[0] else 1
    lies = operand, product.k, long, deep, own, places
    if axis == 1 and planes_of(kind) > 1:
        kind = "float32"  # of which the kernel makes the parts
    if kind in (*HALF, "float32"):
        found = _as_it_lies(kind, *lies, lambda turned: box_of(turned, block, long, kind))
        if found is not None:
            return Factor(found[0], Slot(name), found[1], int(places > 1), 0)
    if kind in HALF:
        if not copy_pays(product.m, product.n, product.k, product.places, axis):
            return None
        other = product.n if axis == 1 else product.m
        in_place = reads_in_place(other, long * product.k * places)
        if in_place and all(f.comes_by(2) for f in (product.x, *product.rights)):
            return None
    # a copy: along its contiguous axis, where it may
    copy = Slot(f"{name} copy")
    turned = kind != "tf32" and (own == 1 or (deep != 1 and abs(own) < abs(deep)))
    outer, inner = (product.k, long) if turned else (long, product.k)
    parts, dtype = planes_of(kind), {"tf32": "float32"}.get(kind, kind)
    if parts > 1:
        dtype = "bfloat16"
    if dtype == "float32":
        shape = (long, product.k) if axis == 1 else (product.k, long)
        contiguous = axis if turned else 3 - axis
        if not layouts.fits(shape, places, contiguous):
            return None
        launch, laid, _ = layouts.laid_out(
            operand, shape, places, contiguous, Slot(name), copy, tf32=kind == "tf32", shared=True
        )
        pitch = laid.strides[3 - contiguous]
    else:
        # at least what a thread of `convert` writes, 8 values
        pitch = tiling.pitch(inner, 2)
        step = operand.strides[0] if places > 1 else 0
        source = (step, deep, own) if turned else (step, own, deep)
        converted = copy_of(operand, kind, (places, outer, inner, pitch), source, name, copy)
        if converted is None:
            return None
        launch = converted
    strides = pitch, outer * pitch
    box = box_of(turned, block, long, kind)
    made = TensorMap(dtype, (inner, outer, places * parts), strides, box)
    return Factor(turned, copy, made, int(places > 1), places if parts > 1 else 0, (launch,))


def _as_it_lies(
    dtype: str, operand: Operand, k: int, long: int, deep: int, own: int, places: int,
    box: Callable[[bool], tuple[int, int]],
) -> tuple[bool, TensorMap] | None:  # fmt: skip
    """Return whether a factor is turned, and its map, where the copy engine takes it as it is."""
    for turned in (False, True):
        outer, inner = (k, long) if turned else (long, k)
        strides = (deep, own) if turned else (own, deep)
        fit = fitted(operand, outer, inner, *strides, places)
        if fit is not None:
            made = TensorMap(dtype, (inner, outer, places), fit, box(turned))
            if made.possible():
                return turned, made
    return None


def box_of(turned: bool, block: int, long: int, kind: str) -> tuple[int, int]:
    """Elements of a box: a row has 128 bytes (64 where a block of Y has half a row more).

    Rows that no operand has are not asked for: the engine takes as long for a row that it fills
    with zeros.  What they hold instead reaches no row of the result that is stored.  (In parts it
    would have a kernel make a sum again that is no number.)
    """
    if kind == "float32":
        return 32, 64 if turned else block
    if turned:
        return box_width(block), 64
    if planes_of(kind) > 1:
        return 64, block
    return (32 if kind == "tf32" else 64), min(block, -(-long // 8) * 8)


def copy_of(
    operand: Operand,
    kind: str,
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    name: str,
    copy: Slot,
) -> Launch | None:
    """The launch that copies an operand into rows that the copy engine takes.

    `sizes`: places, rows, columns and from a row to the next; `strides`: of the source, as rows.
    """
    places, rows, columns, pitch = sizes
    plane = places * rows * pitch
    wide = (
        kind not in HALF
        and operand.alignment >= 16
        and strides[2] == 1
        and not (strides[0] % 4 or strides[1] % 4 or columns % 4)
    )
    grid = (-(-pitch // 512), -(-rows // 4), places)
    if max(grid[1:]) > 65535:
        return None
    source = Array(Slot(name), *strides)
    kind_of_copy = "copy" if kind in HALF else kind
    return Launch(
        copy_kernel(kind_of_copy, wide),
        grid,
        ARGUMENTS(source=source, out=copy, rows=rows, columns=columns, pitch=pitch, plane=plane),
        overlaps=True,
        makes=(copy.name, planes_of(kind) * plane * 2),
        beside=functools.partial(copy_kernel, kind_of_copy, wide, beside=True),
    )


# --- the copy ------------------------------------------------------------------------------------
def convert(source: Array, out, rows, columns, pitch, plane):
    """out[place, row, column] = source[place, row, column]: 8 columns a thread.

    `pitch`: elements of a row of `out`, a multiple of 8; `plane`: of a part of a split operand.
    What lies between `columns` and `pitch` is written with zeros, and never read.
    """
    if not BESIDE:
        grid_wait()
    grid_release()
    thread = thread_index() + 0
    column = (block_index() * 64 + (thread & 63)) * 8
    row = block_index_y() * 4 + (thread >> 6)
    place = block_index_z() + 0
    inside = (row < rows) & (column < pitch)
    at = source.address
    at += (place * source.place + row * source.row + column * source.column) * SOURCE_SIZE
    to = out + ((place * rows + row) * pitch + column) * 2
    if KIND == "copy":
        word = cuda.local.array(4, types.int32)
        for i in unrolled(4):
            low = global_load16(at + 4 * i * source.column, inside & (column + 2 * i < columns))
            high = global_load16(
                at + (4 * i + 2) * source.column, inside & (column + 2 * i + 1 < columns)
            )
            word[i] = low | (high << 16)
        global_store4_b32(to, word[0], word[1], word[2], word[3], inside)
    else:
        v = cuda.local.array(8, types.float32)
        if WIDE:
            for h in unrolled(2):
                v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3] = global_load4_f32(
                    at + 16 * h, inside & (column + 4 * h < columns)
                )
        else:
            for i in unrolled(8):
                v[i] = global_load_f32(at + 4 * i * source.column, inside & (column + i < columns))
        words = cuda.local.array(4 * PLANES, types.int32)
        split_carefully(v, words)
        for p in unrolled(PLANES):
            first = 4 * p
            a, b, c, d = words[first], words[first + 1], words[first + 2], words[first + 3]
            global_store4_b32(to + p * plane * 2, a, b, c, d, inside)
    if BESIDE:
        grid_wait()  # what comes behind waits for this launch alone


#: Strides are in elements.
ARGUMENTS = Schema(convert)


@functools.lru_cache(maxsize=64)
def copy_kernel(kind: str, wide: bool, beside: bool = False) -> Kernel:
    """The kernel that copies 16-bit values ("copy"), or splits float32 ("bf16x6", "bf16x3").

    `beside`: it begins when the launch before it does, which has waited for all that it reads.
    """
    bindings = parts.bindings() | {
        "KIND": kind,
        "PLANES": planes_of(kind),
        "WIDE": wide,
        "BESIDE": beside,
        "SOURCE_SIZE": 2 if kind == "copy" else 4,
    }
    name = f"convert {kind}{' wide' * wide}{' beside' * beside}"
    return kernel_of(convert, ARGUMENTS, bindings, threads=256, name=name)
