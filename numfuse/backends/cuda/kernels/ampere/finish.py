"""The end of one sum: what `thin_gemm` and `vectors_gemm` do with it, a sum in a thread's hand."""

# A kernel has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import prefetch
from numfuse.backends.cuda.compile.schema import Ends
from numfuse.backends.cuda.kernels.epilogue import element


def ask_ahead(ends: Ends, place, row, column, first):
    """Ask for what an element's end reads: the second-level cache has it when its sum is made.

    The bias that elements share is asked for by the `first` of them: each request goes to that
    cache, and those of all blocks to one slice of it.
    """
    if BIAS:
        if first:
            prefetch(ends.bias.address + element(ends.bias, place, 0, column))
    if EXTRA:
        prefetch(ends.extra.address + element(ends.extra, place, row, column))


def bias_of(ends: Ends, place, column):
    """Return the bias of a column; 0 where there is none."""
    offset = ACCUMULATOR(0)
    if BIAS:
        offset = LOAD_BIAS(ends.bias.address + element(ends.bias, place, 0, column))
    return offset


def finish_sum(value, offset, ends: Ends, place, plane, row, column):
    """Return what the epilogue makes of a sum and its bias, stored; so is its pre-activation."""
    added = ACCUMULATOR(0)
    if EXTRA:
        added = LOAD_EXTRA(ends.extra.address + element(ends.extra, place, row, column))
    if PRE:
        result, value = EPILOGUE(value, offset, added)
        STORE_PRE(ends.pre.address + element(ends.pre, place, row, column), value)
    else:
        result = EPILOGUE(value, offset, added)
    STORE_OUT(ends.out.address + element(ends.out, plane, row, column), result)
    return result
