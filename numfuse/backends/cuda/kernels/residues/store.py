"""Sums of products of residues leave a thread: modulo the modulus of their plane, as bytes.

Of 64 columns of a row a thread of wgmma and of mma.sync has two neighbours of each 8, and those are
16 neighbours of the result (`split.place_of`): one store, and nothing by way of shared memory.
"""

# A template has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from typing import Any

from numfuse.backends.cuda.compile.accesses import global_store4_b32
from numfuse.backends.cuda.compile.integers import inverse_of, packed_remainders
from numfuse.backends.cuda.compile.intrinsics import fresh, quotient
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled


def store_residues(acc, at, plane, row, column, m, pitch):
    """Sums to `at`, the first element of a plane, of which rows are `pitch` bytes apart.

    A thread has HALVES tiles of rows, ROW_STEP apart, and SPAN columns; `row` is its first one,
    the other is 8 below, `column` the first of 16 of every 64. The planes of the moduli are
    numbered one after the other.
    """
    word = cuda.local.array(4, types.int32)
    modulus = plane - quotient(plane, COUNT) * COUNT
    inverse, negative = INVERSES[0], NEGATIVES[0]
    for i in unrolled(1, COUNT):
        if modulus == i:
            inverse, negative = INVERSES[i], NEGATIVES[i]
    for h in unrolled(HALVES):
        for b in unrolled(2):
            # computed here: no register keeps it
            own = fresh(row) + (ROW_STEP * h + 8 * b)
            for c in unrolled(SPAN // 64):
                there = fresh(column) + 64 * c
                for w in unrolled(4):
                    FIRST = h * (SPAN // 2) + 32 * c + 8 * w + 2 * b
                    word[w] = packed_remainders(
                        acc[FIRST], acc[FIRST + 1], acc[FIRST + 4], acc[FIRST + 5],
                        inverse, negative,
                    )  # fmt: skip
                inside = (own < m) & (there < pitch)
                to = at + own * pitch + there
                global_store4_b32(to, word[0], word[1], word[2], word[3], inside)


def store_bindings(moduli: tuple[int, ...], row_step: int, width: int) -> dict[str, Any]:
    """Return the UPPER-case names of `store_residues` but HALVES."""
    return {
        "COUNT": len(moduli),
        "INVERSES": tuple(map(inverse_of, moduli)) or (0,),
        "NEGATIVES": tuple(-p for p in moduli) or (0,),
        "ROW_STEP": row_step,
        "SPAN": width,
    }
