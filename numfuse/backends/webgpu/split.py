"""Problems that are larger than what a device binds at once, in pieces that are not.

A piece is a range of the batch, of M and of N. A result that several
pieces add to (d_b where M is cut, d_a where N is, whatever a cut axis of the batch is summed over)
is kept on the device in the accumulator's dtype until the last of them, and rounded once.

Here too a batch over one b that strides keep from being one product becomes one, where sums run
over its rows: by copies on the device, or of the caller's arrays on their way there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from math import prod
from typing import Any, TypeAlias

from numpy import ndarray

from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.lower.elementwise import zero
from numfuse.backends.webgpu.lower.fused import fused
from numfuse.backends.webgpu.lower.jets import jet
from numfuse.backends.webgpu.lower.layers import LAYERS
from numfuse.backends.webgpu.lower.networks import network
from numfuse.backends.webgpu.lower.sums import sum_to
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.epilogues import GATES
from numfuse.problem.fields import FIELDS
from numfuse.problem.fused import FusedProblem
from numfuse.problem.jets import MEMBERS, JetProblem
from numfuse.problem.networks import NetworkProblem
from numfuse.problem.shapes import as_one

#: By the method of a backend, what records its problem.
OPERATIONS: dict[str, Callable[[Store, Any, Any], None]] = {
    **LAYERS,
    **dict.fromkeys((*GATES, "fused"), fused),
    "jet": jet,
}

#: First and last of each axis of the batch, of M and of N.
_Piece: TypeAlias = tuple[tuple[int, int], ...]
_Index: TypeAlias = tuple[slice, ...]

#: The arrays whose last axis but one is M, and those whose last axis is N.
_ROWS = frozenset(
    "a residual out pre grad grad_pre d_a u z d_grad out_dot".split()  # (not b, nor a bias)
)
_COLUMNS = frozenset(
    "b bias residual out pre grad grad_pre d_b d_bias v w z d_grad out_dot".split()
)


def run(store: Store, kind: str, p: Any) -> None:
    """Record a problem of this kind, the method of a backend, and do all pieces but a single one.

    An operation gets the results that are wanted by name: where to write each, and whether it is
    added to what is there.
    """
    if isinstance(p, NetworkProblem):  # (one piece, as who made it asked)
        network(store, p)
        return
    read: list[ndarray] = []
    if isinstance(p, FusedProblem):
        for name in p.zeroed:
            zero(store, store.target(p.arrays[name]), p.acc_dtype)
        outputs = p.results
        arrays = {name: x for name, x in p.arrays.items() if name not in p.zeroed}
        if not (p.sums or p.products or p.summed):  # (a result may be an operand)
            read = [arrays[name] for name in p.epilogue.operands]
    elif isinstance(p, JetProblem):
        outputs = p.results
        arrays = {name: x for name, x in p.arrays.items() if name != "weights"}
    else:
        outputs = FIELDS[kind][1]
        if "d_bias" in outputs:
            p = _as_one(store, p, outputs)
        every = {name: getattr(p, name) for names in FIELDS[kind] for name in names}
        arrays = {name: x for name, x in every.items() if x is not None}
    results = [name for name in outputs if name in arrays]
    if not results:
        return
    operation = OPERATIONS[kind]
    pieces = list(_pieces(store.device, p, arrays))
    if len(pieces) == 1:
        operation(store, p, {name: (store.target(arrays[name], read), False) for name in results})
        return
    for name in results:
        store.reserve(arrays[name])

    def key(piece: _Piece, name: str) -> tuple[str, str]:
        return name, str(_index(p, piece, name, arrays[name].shape))

    left = Counter(key(piece, name) for piece in pieces for name in results)
    totals: dict[tuple[str, str], Region] = {}
    several = {k for k, count in left.items() if count > 1}
    for piece in pieces:
        part = _part(p, piece, arrays)
        outs: dict[str, tuple[Region, bool]] = {}
        for name in results:
            mine, x = key(piece, name), getattr(part, name)
            if mine not in several:
                outs[name] = store.target(x), False
                continue
            add = mine in totals
            if not add:
                totals[mine] = fresh(store.device, x.shape, p.acc_dtype, f"a sum for {name}")
            outs[name] = totals[mine], add
        operation(store, part, outs)
        for name in results:
            mine = key(piece, name)
            left[mine] -= 1
            if mine in several and not left[mine]:
                copy(store.commands, totals.pop(mine), store.target(getattr(part, name)))
        store.flush()


def _as_one(store: Store, p: Any, outputs: Sequence[str]) -> Any:
    """Return a backward over one b as one product, after the gradient of its residual."""
    if p.d_residual is not None:
        _residual(store, p, p.d_residual)
    p = as_one(p)
    for name in () if p.batch else p.BY_ROWS:
        x = getattr(p, name)
        if x is not None and x.ndim > 2:
            setattr(p, name, store.result_rows(x) if name in outputs else store.rows(x))
    return p


def _residual(store: Store, p: Any, out: ndarray) -> None:
    """Record the gradient of a residual; to second order it is zero."""
    if hasattr(p, "d_grad"):
        zero(store, store.target(out), p.acc_dtype)
    elif not store.sum_here(p.grad, out, p.acc_dtype):
        sum_to(store, p.grad, out, p.acc_dtype)


def _axes(p: Any, name: str, shape: tuple[int, ...]) -> list[int | None]:
    """Return the axis of a piece that each axis of an array is; None of K, and where it repeats."""
    m = len(p.batch)
    if isinstance(p, FusedProblem):
        left, right = _factors(p)
        by_rows, by_columns = name not in right, name not in left
    elif isinstance(p, JetProblem):
        by_rows = name not in ("b", "bias", "d_b", "d_bias")
        # A stack has its members beside the columns: it is cut by points alone.
        by_columns = not p.stacked and "a" not in name.split("_")
    else:
        by_rows, by_columns = name in _ROWS, name in _COLUMNS
    axes: list[int | None] = [*range(m), m if by_rows else None]
    axes.append(m + 1 if by_columns else None)
    if isinstance(p, JetProblem) and (name in MEMBERS or name == "sums"):
        axes = [None, *axes[len(axes) + 1 - len(shape) :]]
    lead = len(axes) - len(shape)
    return [None if n == 1 else axis for n, axis in zip(shape, axes[lead:], strict=True)]


def _index(p: Any, piece: _Piece, name: str, shape: tuple[int, ...]) -> _Index:
    """Return the part of an array that belongs to a piece."""
    return tuple(
        slice(None) if axis is None else slice(*piece[axis]) for axis in _axes(p, name, shape)
    )


def _factors(p: FusedProblem) -> tuple[set[str], set[str]]:
    """Return the names of what has K as its last axis, and of what has it as its last but one."""
    left = {a for pairs in p.sums.values() for a, _ in pairs}
    right = {b for pairs in p.sums.values() for _, b in pairs}
    for name, terms in p.products.items():
        (right if terms[0][0].turned else left).add(name)
        for x, y in terms:
            left |= {x.name} if x.turned else set()
            right |= {y.name} if y.turned else set()
    return left, right


def _has_temporaries(p: Any, names: Container[str]) -> bool:
    """Whether a problem may keep what has its shape, in the accumulator's dtype."""
    if isinstance(p, FusedProblem):
        return bool(p.products or p.summed or len(p.sums) > 1)
    return "grad" in names or "out_dot" in names


def _part(p: Any, piece: _Piece, arrays: Mapping[str, ndarray]) -> Any:
    """Return the problem of a piece."""
    views = {name: x[_index(p, piece, name, x.shape)] for name, x in arrays.items()}
    if isinstance(p, JetProblem) and "weights" in p.arrays:
        views["weights"] = p.arrays["weights"]
    lengths = tuple(last - first for first, last in piece)
    *batch, m, n = lengths
    whole = isinstance(p, (FusedProblem, JetProblem))
    fields: dict[str, Any] = {"arrays": views} if whole else views
    return replace(p, m=m, n=n, batch=tuple(batch), **fields)


def _pieces(device: Device, p: Any, arrays: Mapping[str, ndarray]) -> Iterator[_Piece]:
    """Return the pieces in order; ValueError where an axis that has to be cut is K."""
    axes = (*p.batch, p.m, p.n)
    shapes = {name: (x.shape, x.itemsize) for name, x in arrays.items()}
    # or T, Q, S and the pre-activation
    if isinstance(p, JetProblem):
        shapes["sums"] = (p.members, *axes), p.acc_dtype.itemsize
    elif _has_temporaries(p, shapes):
        shapes["grad_pre"] = axes, p.acc_dtype.itemsize
    whole = tuple(zip(repeat(0), axes, strict=False))
    for shape, itemsize in shapes.values():
        if itemsize * prod(shape) > device.room:
            break
    else:
        return iter((whole,))

    def size(name: str, piece: _Piece) -> int:
        shape, itemsize = shapes[name]
        index = _index(p, piece, name, shape)
        return itemsize * prod(
            len(range(*part.indices(length))) for part, length in zip(index, shape, strict=True)
        )

    def cut(piece: _Piece) -> Iterator[_Piece]:
        name = max(shapes, key=lambda name: size(name, piece))
        nbytes = size(name, piece)
        if nbytes <= device.room:
            yield piece
            return
        # The longest axis of the batch that the array has, else M, else N.
        own = shapes[name][0]
        lengths = {i: piece[i][1] - piece[i][0] for i in _axes(p, name, own) if i is not None}
        batch = [i for i in lengths if i < len(p.batch)]
        axis = max(batch, key=lambda i: lengths[i], default=None)
        if axis is None or lengths[axis] == 1:
            axis = next((i for i in lengths if lengths[i] > 1), None)
        if axis is None:
            raise ValueError(
                f"{name} must have rows and columns of at most max-storage-buffer-binding-size = "
                f"{device.binding_limit} bytes on {device.name}, got one of {nbytes} bytes "
                f"(shape {own}, K = {p.k})"
            )
        first, last = piece[axis]
        middle = (first + last) // 2
        if middle - first > 256:  # whole tiles
            middle = first + (middle - first) // 128 * 128
        for part in ((first, middle), (middle, last)):
            yield from cut((*piece[:axis], part, *piece[axis + 1 :]))

    return cut(whole)
