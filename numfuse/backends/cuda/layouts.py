"""A copy of a float32 factor whose rows begin at 16 bytes, turned where it lies the other way."""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda import intrinsics
from numfuse.backends.cuda.product import Launch, Operand, Slot
from numfuse.backends.cuda.toolchain import cuda, kernel, types
from numfuse.backends.cuda.unroll import expanded, names_of, unrolled

__all__ = ["fits", "laid_out"]

#: A block's square, and the rows of threads in it.
SQUARE, ROWS = 64, 4


def lay_out(source, out, outer, inner, from_place, from_outer, from_inner, to_place, to_outer):
    """out[place, o, i] = source[place, o, i], where `out` has i inside; steps in bytes."""
    i0, o0 = cuda.blockIdx.x * SQUARE, cuda.blockIdx.y * SQUARE
    source += cuda.blockIdx.z * from_place
    out += cuda.blockIdx.z * to_place
    a = cuda.threadIdx.x & (SQUARE - 1)
    b = cuda.threadIdx.x // SQUARE
    # all loads are on their way before the first value is used
    held = cuda.local.array(SQUARE // ROWS, types.float32)
    if TURNED:
        # read along the source's rows, written along those of `out`
        square = cuda.shared.array((SQUARE, SQUARE + 1), types.float32)
        for r in unrolled(0, SQUARE, ROWS):
            if o0 + a < outer and i0 + b + r < inner:
                at = source + (o0 + a) * from_outer + (i0 + b + r) * from_inner
                held[r // ROWS] = LOAD(at)
        for r in unrolled(0, SQUARE, ROWS):
            if o0 + a < outer and i0 + b + r < inner:
                square[b + r, a] = held[r // ROWS]
        cuda.syncthreads()
        for r in unrolled(0, SQUARE, ROWS):
            if o0 + b + r < outer and i0 + a < inner:
                STORE(out + (o0 + b + r) * to_outer + (i0 + a) * 4, square[a, b + r])
    else:
        for r in unrolled(0, SQUARE, ROWS):
            if o0 + b + r < outer and i0 + a < inner:
                at = source + (o0 + b + r) * from_outer + (i0 + a) * from_inner
                held[r // ROWS] = LOAD(at)
        for r in unrolled(0, SQUARE, ROWS):
            if o0 + b + r < outer and i0 + a < inner:
                STORE(out + (o0 + b + r) * to_outer + (i0 + a) * 4, held[r // ROWS])


def fits(shape: tuple[int, int], places: int, inner: int) -> bool:
    """Whether a grid has enough blocks along y and z."""
    return max(places, -(-shape[2 - inner] // SQUARE)) < 1 << 16


def laid_out(
    operand: Operand, shape: tuple[int, int], places: int, inner: int, source: Slot, to: Slot
) -> tuple[Launch, Operand, int]:
    """The launch, the operand that it makes, and its bytes.

    `shape`: rows and columns; `inner`: the axis (1: rows, 2: columns) that is contiguous after it.
    """
    outer = 3 - inner
    lengths = shape[outer - 1], shape[inner - 1]
    pitch = -(-lengths[1] // 4) * 4
    many = places if operand.strides[0] else 1
    step = lengths[0] * pitch if many > 1 else 0
    turned = abs(operand.strides[outer]) < abs(operand.strides[inner])
    bindings = {
        "TURNED": turned, "SQUARE": SQUARE, "ROWS": ROWS,
        "LOAD": intrinsics.load("float32", 1, "float32"),
        "STORE": intrinsics.store("float32", 1, "float32"),
    }  # fmt: skip
    template = expanded(lay_out, bindings)
    made = kernel(
        template, " ".join(["i64"] * 9), threads=SQUARE * ROWS,
        name="turned copy" if turned else "copy", **names_of(template, bindings),
    )  # fmt: skip
    arguments = (
        source, to, *lengths, operand.strides[0] * 4, operand.strides[outer] * 4,
        operand.strides[inner] * 4, step * 4, pitch * 4,
    )  # fmt: skip
    grid = -(-lengths[1] // SQUARE), -(-lengths[0] // SQUARE), many
    strides = (step, pitch, 1) if inner == 2 else (step, 1, pitch)
    return (
        Launch(made, grid, arguments),
        Operand("float32", strides, 16),
        many * lengths[0] * pitch * 4,
    )
