"""The rules of shapes: promotion of 1-D operands, broadcasting of batch axes, folding into M."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

Shape = tuple[int, ...]

_ROW = (..., None, slice(None))  # puts back the M axis of a 1-D a
_COLUMN = (..., None)  # puts back the N axis of a 1-D b
_CELL = (..., None, None)


class GemmShape(NamedTuple):
    """The sizes of act(a @ b + bias), and what 1-D operands leave out of the result."""

    m: int
    n: int
    k: int
    batch: Shape
    #: The shape the caller sees: (*batch, M, N) less the axes of 1-D operands.
    visible: Shape
    #: The index that turns the visible shape into (*batch, M, N); None where they are the same.
    promote: tuple[Any, ...] | None

    def full(self, x: ndarray) -> ndarray:
        """An array of the visible shape (or one that broadcasts to it) as (..., M, N)."""
        return x if self.promote is None else x[self.promote]


def gemm_shape(
    a: ndarray, b: ndarray, bias: ndarray | None, what: str = "b"
) -> tuple[GemmShape, ndarray, ndarray, ndarray | None]:
    """Check the shapes and promote: a to (..., M, K), b to (..., K, N), bias to (..., 1, N)."""
    a_shape, b_shape = a.shape, b.shape
    if not a_shape:
        raise ValueError("a must have shape (..., M, K) or (K,), got ()")
    if not b_shape:
        raise ValueError(f"{what} must have shape (K, N), (..., K, N) or (K,), got ()")
    row, column = len(a_shape) == 1, len(b_shape) == 1
    if row:
        a = a[None, :]
    if column:
        b = b[:, None]
    m, k = a.shape[-2:]
    n = b.shape[-1]
    if b.shape[-2] != k:
        wanted = "(K,)" if column else "(..., K, N)"
        raise ValueError(
            f"{what} must have shape {wanted} with K = {k}, the last axis of a {a_shape}, "
            f"got {b_shape}"
        )
    batch = a.shape[:-2]
    if b.shape[:-2] != batch:
        batch = _broadcast(batch, b.shape[:-2], what, f"a {a_shape} and {what} {b_shape}")
    if bias is not None:
        bias_shape = bias.shape
        if len(bias_shape) == 1:
            if bias_shape[0] != n:
                raise ValueError(f"bias must have shape (N,) = ({n},), got {bias_shape}")
            bias = bias[None, :]
        elif column:
            raise ValueError(f"bias must have shape (1,) where b is 1-D, got {bias_shape}")
        elif not bias_shape:
            raise ValueError(f"bias must have shape (N,) = ({n},), got ()")
        elif bias_shape[-2:] != (1, n):
            raise ValueError(
                f"bias must have shape (N,) = ({n},) or (..., 1, N) = (..., 1, {n}), "
                f"got {bias_shape}"
            )
        else:
            batch = _broadcast(
                batch, bias_shape[:-2], "bias", f"a {a_shape}, b {b_shape} and bias {bias_shape}"
            )
    visible = batch + (() if row else (m,)) + (() if column else (n,))
    promote = (_CELL if column else _ROW) if row else (_COLUMN if column else None)
    return GemmShape(m, n, k, batch, visible, promote), a, b, bias


def residual_view(shape: GemmShape, residual: ndarray, what: str = "residual") -> ndarray:
    """An operand that broadcasts to the visible result, as (..., M or 1, N or 1)."""
    visible = shape.visible
    own = residual.shape
    fits = len(own) <= len(visible) and all(
        length in (1, wanted) for length, wanted in zip(own[::-1], visible[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{what} must broadcast to the result's shape {visible}, got {own}")
    missing = len(visible) - len(own)
    if missing:
        residual = residual[(None,) * missing]
    return shape.full(residual)


def equal(what: str, *sizes: Any) -> None:
    """Raise AssertionError unless all of these shapes, or counts of elements, are one and the same.

    For kernels that walk several arrays by the shape of one: with another shape they would read or
    write memory that is not the array's. (No assert statement, which ``python -O`` leaves out.)
    """
    if any(size != sizes[0] for size in sizes):
        raise AssertionError(f"{what} must have equal sizes, got {', '.join(map(str, sizes))}")


def merge_axes(lengths: Sequence[int], *strides: Sequence[int]) -> tuple[Shape, list[Shape]]:
    """The axes with neighbours made one where every array steps through them as one.

    `strides`: those of each array, in any unit. What is returned are the lengths and the strides of
    each array; axes of length 1 are left out.
    """
    found: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, length in enumerate(lengths):
        if length == 1:
            continue
        if found and all(
            mine[-1] == s[axis] * length for mine, s in zip(steps, strides, strict=True)
        ):
            found[-1] *= length
            for mine, s in zip(steps, strides, strict=True):
                mine[-1] = s[axis]
        else:
            found.append(length)
            for mine, s in zip(steps, strides, strict=True):
                mine.append(s[axis])
    return tuple(found), [tuple(mine) for mine in steps]


def _rows_of(name: str, x: ndarray) -> ndarray | None:
    """(..., M, K) as a 2-D view, every axis but the last merged; None if that takes a copy.

    What has one row for every row of the result keeps it.
    """
    if name in ("residual", "z", "d_residual") and x.size == x.shape[-1]:
        return x.reshape(1, x.shape[-1])
    if x.ndim == 2:
        return x
    lengths = x.shape[:-1]
    if x.size and len(merge_axes(lengths, x.strides[:-1])[0]) > 1:
        return None
    return x.reshape(prod(lengths), x.shape[-1])


def shares_weights(p: Any) -> bool:
    """Whether one `b` and one `bias` serve the whole batch of a problem."""
    return all(x is None or all(length == 1 for length in x.shape[:-2]) for x in (p.b, p.bias))


def fold(p: Any, views: dict[str, ndarray | None]) -> None:
    """Make a problem that `shares_weights` one product without batch axes.

    `views` are its operands and results with rows; what else has batch axes loses them here.
    """
    for name, view in views.items():
        setattr(p, name, view)
    for length in p.batch:
        p.m *= length
    p.batch = ()
    for name in ("b", "bias", "d_b", "d_bias", "v", "w"):
        x = getattr(p, name, None)
        if x is not None and x.ndim > 2:
            setattr(p, name, x[(0,) * (x.ndim - 2)])  # (a view: d_b and d_bias are written to)


def fold_rows(p: Any, rows: tuple[str, ...]) -> None:
    """Fold the batch into M where one `b` and one `bias` serve all of it: one product, not many.

    `rows` are the names of what has rows. A problem of which one cannot be merged without a copy
    stays as it is.
    """
    if not p.batch or not shares_weights(p):
        return
    # Neither b nor bias has a batch of its own, so a has all of it (less leading axes of length 1).
    views: dict[str, ndarray | None] = {}
    m = p.m * prod(p.batch)
    for name in rows:
        x = getattr(p, name)
        if x is None:
            continue
        merged = _rows_of(name, x)
        if merged is None or merged.shape[0] not in (m, 1):
            return
        views[name] = merged
    fold(p, views)


def as_one(p: Any) -> Any:
    """A backward or double backward whose sums over rows run over the whole batch as over one M.

    A batch over one `b` that strides keep from being folded comes as it is; but `d_b` and `d_bias`
    are to have the bits that copies give, in the order of a folded problem. This is that problem:
    what does not merge without a copy keeps its batch axes, so an array of more than two axes,
    where `batch` is (), is one whose rows have to be gathered. A problem without such a sum, or
    with a batch of its own, is returned as it is.

    The gradient of a residual has been made by then, and is left out: its sum is over other axes.
    """
    if p.d_residual is not None:
        p = replace(p, d_residual=None)
        fold_rows(p, p.BY_ROWS)
    if not p.batch or (p.d_b is None and p.d_bias is None) or not shares_weights(p):
        return p
    p = replace(p)
    rows = (*p.batch, p.m)
    views = {name: getattr(p, name) for name in p.BY_ROWS}
    for name, x in views.items():
        if x is None:
            continue
        if name == "z" and x.size != x.shape[-1]:
            x = np.broadcast_to(x, (*rows, x.shape[-1]))
        merged = _rows_of(name, x)
        views[name] = x if merged is None else merged
    fold(p, views)
    return p


def runs_of_rows(
    shape: Shape, first: int, last: int
) -> Iterator[tuple[tuple[int | slice, ...], int, int]]:
    """Rows [first, last) of (..., M, K) whose leading axes count as one M, in few pieces.

    Each is an index into the array, which gives (..., rows, K), and the rows it stands for.
    """
    if first == last:
        return
    if len(shape) == 2:
        yield (slice(first, last),), first, last
        return
    size = prod(shape[1:-1])
    whole, end = -(-first // size), last // size
    if whole > end:  # within one
        whole = end = last // size + 1
        edges = [(first // size, first, last)]
    else:
        edges = [(whole - 1, first, whole * size), (end, end * size, last)]
    for index, start, stop in edges:
        base = index * size
        for part, low, high in runs_of_rows(shape[1:], start - base, stop - base):
            yield (index, *part), base + low, base + high
    if whole < end:
        yield (slice(whole, end),), whole * size, end * size


def sum_to(x: ndarray, shape: Shape, acc_dtype: np.dtype[Any]) -> ndarray:
    """`x` summed over the axes along which `shape` was broadcast to x.shape, in `acc_dtype`.

    The transpose of broadcasting: axes that `shape` lacks, or has with length 1, are summed over.
    """
    if not x.size:  # NumPy would walk the axes of any length beside the empty one
        return np.zeros(shape, acc_dtype)
    lead = x.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + i for i, length in enumerate(shape) if length == 1 and x.shape[lead + i] != 1
    )
    if axes:
        x = np.sum(x, axis=axes, dtype=acc_dtype, keepdims=True)
    return x.reshape(shape)


def _broadcast(batch: Shape, other: Shape, name: str, operands: str) -> Shape:
    """Two batch shapes broadcast as in numpy.matmul (numpy.broadcast_shapes is far slower)."""
    if not other or batch == other:
        return batch
    long, short = (batch, other) if len(batch) >= len(other) else (other, batch)
    lead = len(long) - len(short)
    joint = list(long)
    for i, length in enumerate(short):
        wanted = joint[lead + i]
        if wanted == 1:
            joint[lead + i] = length
        elif length not in (1, wanted):
            raise ValueError(
                f"the batch axes of {name} must broadcast with {batch}, got {other}; "
                f"the operands are {operands}"
            )
    return tuple(joint)
