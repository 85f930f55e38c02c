"""Sums of products of residues modulo each modulus: the plain loop, which the simulator runs."""

# A template has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.integers import load_signed, store_byte
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import kernel_of
from numfuse.backends.cuda.kernels.residues.split import place_of
from numfuse.backends.cuda.plan.product import Launch, Slot


def product(x, y, out, m, n, k, x_plane, y_plane, pitch, out_pitch):
    """out[place, modulus, row, column] = the sum over k of x y modulo the modulus.

    A thread has every so-many-th element; `place_of` says where a column of Y is.
    """
    number, count = cuda.threadIdx.x, THREADS
    plane = cuda.blockIdx.x  # place * MODULI + modulus
    modulus = LIST[plane % COUNT]
    for i in range(number, m * n, count):
        row, column = i // n, i % n
        x_at = x + plane * x_plane + row * pitch
        y_at = y + plane * y_plane + place_of(column) * pitch
        total = 0
        for j in range(k):
            total += load_signed(x_at + j) * load_signed(y_at + j)
        store_byte(out + (plane * m + row) * out_pitch + column, total % modulus)


ARGUMENTS = Schema(product)
#: Threads of the one block of a plane.
THREADS = 2


def launch(
    sizes: tuple[int, int, int], planes: int, moduli: tuple[int, ...],
    bytes_: tuple[int, int, int, int], factors: tuple[Slot, Slot],
) -> Launch:  # fmt: skip
    """Return the launch for so many planes; `bytes_`: planes of X and Y, and both pitches."""
    m, n, k = sizes
    x_plane, y_plane, pitch, out_pitch = bytes_
    bindings = {"THREADS": THREADS, "LIST": moduli, "COUNT": len(moduli), "TURNED": True}
    made = kernel_of(product, ARGUMENTS, bindings, threads=THREADS, name="product of residues")
    arguments = ARGUMENTS(
        x=factors[0], y=factors[1], out=Slot("work"), m=m, n=n, k=k, x_plane=x_plane,
        y_plane=y_plane, pitch=pitch, out_pitch=out_pitch,
    )  # fmt: skip
    return Launch(made, (planes, 1, 1), arguments)
