"""Operands that need no conversion, told in a few look-ups.

At 64 x 64 x 64 the arithmetic of a product takes a few microseconds, and the full checks would take
as much again. What is decided here is decided as they decide it; whatever is not plain, errors
included, goes to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy import empty, may_share_memory, ndarray

from numfuse.problem.operands import ACCUMULATORS

__all__ = [
    "SOURCE",
    "is_flat",
    "is_operand",
    "is_target",
    "plain_gate",
    "plain_gradients",
    "plain_product",
]

DType: TypeAlias = np.dtype[Any]

#: Bits of `ndarray.flags.num`, which is one look-up for what `flags` has names for.
SOURCE = 0x0001 | 0x0100  # C-contiguous and aligned
_TARGET = SOURCE | 0x0400  # and writable
_OWNER = 0x0004  # its memory is its own


def plain_product(a: Any, b: Any, bias: Any) -> tuple[int, int, int, DType, DType] | None:
    """Return M, N, K, dtype and accumulator of a plain product; None if it is not plain."""
    if type(a) is not ndarray or type(b) is not ndarray or a.ndim != 2 or b.ndim != 2:
        return None
    dtype = a.dtype
    acc_dtype = ACCUMULATORS.get(dtype)
    m, k = a.shape
    b_k, n = b.shape
    if (
        acc_dtype is not None
        and b.dtype is dtype
        and b_k == k
        and a.flags.aligned
        and b.flags.aligned
        and (bias is None or is_operand(bias, (n,), dtype))
    ):
        return m, n, k, dtype, acc_dtype
    return None


def plain_gate(a: Any, b: Any) -> tuple[DType, DType] | None:
    """Return dtype and accumulator of two plain factors of a gate; None if they are not plain."""
    if type(a) is not ndarray or a.flags.num & SOURCE != SOURCE:
        return None
    dtype = a.dtype
    acc_dtype = ACCUMULATORS.get(dtype)
    if acc_dtype is None or not is_flat(b, a.shape, dtype, SOURCE):
        return None
    return dtype, acc_dtype


def is_operand(x: Any, shape: tuple[int, ...], dtype: DType) -> bool:
    """Whether `x` needs no conversion to be an operand of this shape and dtype."""
    return type(x) is ndarray and x.dtype is dtype and x.shape == shape and x.flags.aligned


def is_flat(x: Any, shape: tuple[int, ...], dtype: DType, flags: int) -> bool:
    """Whether `x` needs no conversion and none of the longer checks, and has these flags."""
    return (
        type(x) is ndarray
        and x.dtype is dtype
        and x.shape == shape
        and x.flags.num & flags == flags
    )


def is_target(x: Any, shape: tuple[int, ...], dtype: DType, others: tuple[Any, ...]) -> bool:
    """Whether an output needs none of the longer checks of `operands.output`."""
    return is_flat(x, shape, dtype, _TARGET) and _is_apart(x, others)


def plain_gradients(
    names: tuple[str, ...],
    shapes: Sequence[tuple[int, ...] | None],
    needs: tuple[str, ...],
    outs: tuple[Any, ...] | None,
    dtype: DType,
    others: tuple[Any, ...],
) -> list[Any] | None:
    """Return the arrays of `results.allocate`; None where an output needs its longer checks."""
    if outs is None and needs is names:
        return [None if shape is None else empty(shape, dtype) for shape in shapes]
    found: list[Any] = []
    for name, shape, given in zip(names, shapes, outs or (None,) * len(names), strict=True):
        if shape is None or name not in needs:
            if given is not None:
                return None
            found.append(None)
        elif given is None:
            found.append(empty(shape, dtype))
        elif is_target(given, shape, dtype, others):
            found.append(given)
            others = (*others, given)
        else:
            return None
    return found


def _is_apart(x: ndarray, others: tuple[Any, ...]) -> bool:
    """Whether `x` shares no memory with the others.  Two arrays that own theirs never do."""
    owner = x.flags.num & _OWNER
    for other in others:
        if other is None or (owner and other is not x and other.flags.num & _OWNER):
            continue
        if may_share_memory(x, other):
            return False
    return True
