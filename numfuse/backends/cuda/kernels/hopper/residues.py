"""How a consumer of `gemm` finishes a block of sums of 8-bit products: modulo the place's modulus.

A thread's sums of 64 columns of a row are 16 bytes, one store (`residues.split.place_of`): nothing
goes by way of shared memory.
"""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import global_store4_b32
from numfuse.backends.cuda.compile.integers import packed_remainders
from numfuse.backends.cuda.compile.intrinsics import fresh, quotient
from numfuse.backends.cuda.compile.schema import Array
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.hopper.records import Unit, Work


def store_residues(acc, out: Array, thread, here: Unit, work: Work):
    """The sums of a block modulo the modulus of its place, which are numbered one after the other.

    Strides are in bytes; a row of `out` has whole 64 of them.
    """
    word = cuda.local.array(4, types.int32)
    thread, part, place = fresh(thread), fresh(here.part), fresh(here.place)
    lane, warp = thread & 31, thread >> 5
    modulus = place - quotient(place, COUNT) * COUNT
    inverse, negative = INVERSES[0], NEGATIVES[0]
    for i in unrolled(1, COUNT):
        if modulus == i:
            inverse, negative = INVERSES[i], NEGATIVES[i]
    at = out.address + part * work.part_step + place * out.place
    for h in unrolled(HALVES):
        for b in unrolled(2):
            row = fresh(here.row0) + (64 * h + 8 * b) + warp * 16 + (lane >> 2)
            for c in unrolled(BLOCK_N // 64):
                column = fresh(here.column0) + 64 * c + 16 * (lane & 3)
                for w in unrolled(4):
                    # of 8 columns a thread has two neighbours in a row, and two in the one 8 below
                    FIRST = h * (BLOCK_N // 2) + 32 * c + 8 * w + 2 * b
                    word[w] = packed_remainders(
                        acc[FIRST], acc[FIRST + 1], acc[FIRST + 4], acc[FIRST + 5],
                        inverse, negative,
                    )  # fmt: skip
                inside = (row < work.m) & (column < work.n)
                to = at + row * out.row + column
                global_store4_b32(to, word[0], word[1], word[2], word[3], inside)
