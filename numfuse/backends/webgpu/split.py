"""Problems that are larger than what a device binds at once, in pieces that are not.

A piece is a range of the batch, of M and of N. A result that several pieces add to (d_b where M is
cut, d_a where N is, whatever a cut axis of the batch is summed over) is kept on the device in the
accumulator's dtype until the last of them, and rounded once. So it is to second order.

Here too a batch over one b that strides keep from being one product becomes one, where sums run
over its rows: by copies on the device, or of the caller's arrays on their way there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.lower import gates, layers
from numfuse.backends.webgpu.lower.elementwise import zero
from numfuse.backends.webgpu.lower.sums import sum_to
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.problem.shapes import as_one

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device
    from numfuse.problem.product import GemmBackwardProblem, GemmProblem

__all__ = [
    "backward",
    "double_backward",
    "forward",
    "gated",
    "gated_backward",
    "gated_double_backward",
    "gated_tangent",
    "tangent",
]

#: The axes of M and N that the last two axes of an array are, by the array's name; None is K, or
#: one row of a bias.
_AXES: dict[str, tuple[str | None, str | None]] = {
    "a": ("m", None),
    "b": (None, "n"),
    "bias": (None, "n"),
    "residual": ("m", "n"),
    "out": ("m", "n"),
    "pre": ("m", "n"),
    "grad": ("m", "n"),
    "grad_pre": ("m", "n"),
    "d_a": ("m", None),
    "d_b": (None, "n"),
    "d_bias": (None, "n"),
    "u": ("m", None),
    "v": (None, "n"),
    "w": (None, "n"),
    "z": ("m", "n"),
    "d_grad": ("m", "n"),
    "out_dot": ("m", "n"),
}


@dataclass(frozen=True)
class Piece:
    """A range of each axis of the batch, of M and of N."""

    batch: tuple[tuple[int, int], ...]
    m: tuple[int, int]
    n: tuple[int, int]

    def index(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The piece's part of an array of this shape."""
        found = []
        axes = (*self.batch, *({"m": self.m, "n": self.n, None: None}[a] for a in _AXES[name]))
        for part, length in zip(axes[len(axes) - len(shape) :], shape, strict=True):
            found.append(slice(None) if part is None or length == 1 else slice(*part))
        return tuple(found)

    def bytes(self, name: str, shape: tuple[int, ...], itemsize: int) -> int:
        """How large that part is."""
        return itemsize * prod(
            len(range(*part.indices(length)))
            for part, length in zip(self.index(name, shape), shape, strict=True)
        )

    def halves(self, axis: int | str) -> tuple[Piece, Piece]:
        """The piece cut in two along an axis of the batch (its number), "m" or "n"."""
        first, last = self.batch[axis] if isinstance(axis, int) else getattr(self, axis)
        middle = (first + last) // 2
        if middle - first > 256:  # whole tiles
            middle = first + (middle - first) // 128 * 128
        made = []
        for part in ((first, middle), (middle, last)):
            if isinstance(axis, int):
                batch = (*self.batch[:axis], part, *self.batch[axis + 1 :])
                made.append(replace(self, batch=batch))
            else:
                made.append(replace(self, m=part) if axis == "m" else replace(self, n=part))
        return made[0], made[1]


def _arrays(p: GemmProblem | GemmBackwardProblem) -> dict[str, ndarray]:
    found = {name: getattr(p, name, None) for name in _AXES}
    return {name: x for name, x in found.items() if x is not None}


def _pieces(device: Device, p: GemmProblem | GemmBackwardProblem) -> list[Piece]:
    """The pieces of a problem, in order; ValueError where an axis that has to be cut is K."""
    arrays = _arrays(p)
    sizes = {name: (x.shape, x.itemsize) for name, x in arrays.items()}
    if "grad" in arrays or "out_dot" in arrays:  # or T, Q, S and the pre-activation
        sizes["grad_pre"] = (*p.batch, p.m, p.n), p.acc_dtype.itemsize
    limit = device.room

    def cut(piece: Piece) -> Iterator[Piece]:
        name, nbytes = max(
            ((name, piece.bytes(name, *size)) for name, size in sizes.items()), key=lambda s: s[1]
        )
        if nbytes <= limit:
            yield piece
            return
        lengths: dict[int | str, int] = {
            i: last - first for i, (first, last) in enumerate(piece.batch)
        }
        own = sizes[name][0]
        lead = len(piece.batch) - (len(own) - 2)
        for axis in list(lengths):
            assert isinstance(axis, int)
            if axis < lead or own[axis - lead] == 1:
                del lengths[axis]  # the array does not shrink with it
        if max(lengths.values(), default=1) == 1:
            first_axis = next((axis for axis in _AXES[name] if axis is not None), "n")
            first, last = getattr(piece, first_axis)
            lengths = {first_axis: last - first}
            if _AXES[name] == ("m", "n") and last - first == 1:
                lengths = {"n": piece.n[1] - piece.n[0]}
        axis = max(lengths, key=lambda a: lengths[a])
        if lengths[axis] <= 1:
            raise ValueError(
                f"{name} must have rows and columns of at most max-storage-buffer-binding-size = "
                f"{device.binding_limit} bytes on {device.name}, got one of {nbytes} bytes "
                f"(shape {own}, K = {p.k})"
            )
        for half in piece.halves(axis):
            yield from cut(half)

    return list(cut(Piece(tuple((0, length) for length in p.batch), (0, p.m), (0, p.n))))


def _part(p: Any, piece: Piece, arrays: dict[str, ndarray]) -> Any:
    """The problem of a piece."""
    return replace(
        p,
        m=piece.m[1] - piece.m[0],
        n=piece.n[1] - piece.n[0],
        batch=tuple(last - first for first, last in piece.batch),
        **{name: x[piece.index(name, x.shape)] for name, x in arrays.items()},
    )


def _apart(
    store: Store, p: Any, results: Sequence[str], operation: Callable[[Store, Any], None]
) -> None:
    """Run an operation, each part of whose results is of one piece."""
    pieces = _pieces(store.device, p)
    if len(pieces) == 1:
        operation(store, p)
        return
    arrays = _arrays(p)
    for name in results:
        if name in arrays:
            store.reserve(arrays[name])
    for piece in pieces:
        operation(store, _part(p, piece, arrays))
        store.flush()


def _summed(
    store: Store,
    p: Any,
    names: Sequence[str],
    operation: Callable[[Store, Any, dict[str, tuple[Region, bool]]], None],
) -> None:
    """Run an operation, parts of whose results are sums over pieces."""
    if p.d_residual is not None:
        _residual(store, p, p.d_residual)
    p = as_one(p)
    if not p.batch:
        for name in p.BY_ROWS:
            x = getattr(p, name)
            if x is not None and x.ndim > 2:
                setattr(p, name, store.result_rows(x) if name in names else store.rows(x))
    pieces = _pieces(store.device, p)
    arrays = _arrays(p)
    results = [name for name in names if name in arrays]
    if len(pieces) == 1:
        operation(store, p, {name: (store.target(arrays[name]), False) for name in results})
        return
    for name in results:
        store.reserve(arrays[name])

    def key(piece: Piece, name: str) -> tuple[str, str]:
        return name, str(piece.index(name, arrays[name].shape))

    left = Counter(key(piece, name) for piece in pieces for name in results)
    totals: dict[tuple[str, str], Region] = {}
    several = {k for k, count in left.items() if count > 1}
    for piece in pieces:
        part = _part(p, piece, arrays)
        outs: dict[str, tuple[Region, bool]] = {}
        for name in results:
            mine = key(piece, name)
            if mine not in several:
                outs[name] = store.target(getattr(part, name)), False
            elif mine in totals:
                outs[name] = totals[mine], True
            else:
                shape = getattr(part, name).shape
                totals[mine] = fresh(store.device, shape, p.acc_dtype, f"a sum for {name}")
                outs[name] = totals[mine], False
        operation(store, part, outs)
        for name in results:
            mine = key(piece, name)
            left[mine] -= 1
            if mine in several and not left[mine]:
                copy(store.commands, totals.pop(mine), store.target(getattr(part, name)))
        store.flush()


def _residual(store: Store, p: GemmBackwardProblem, out: ndarray) -> None:
    """Run the gradient of a residual; to second order it is zero."""
    if hasattr(p, "d_grad"):
        zero(store, out, p.acc_dtype)
    elif not store.sum_here(p.grad, out, p.acc_dtype):
        sum_to(store, p.grad, out, p.acc_dtype)


def _gated(
    store: Store, p: Any, results: tuple[str, ...], operands: tuple[str, ...], operation: Any
) -> None:
    """Run an operation, in halves where its arrays are too large."""
    names = [name for name in (*operands, *results) if getattr(p, name) is not None]
    limit = store.device.room
    if prod(p.shape) * p.dtype.itemsize <= limit:
        operation(store, p)
        return
    for name in results:
        if getattr(p, name) is not None:
            store.reserve(getattr(p, name))

    def cut(p: Any) -> None:
        if prod(p.shape) * p.dtype.itemsize <= limit:
            operation(store, p)
            store.flush()
            return
        axis = int(np.argmax(p.shape))
        middle = p.shape[axis] // 2
        for part in (slice(0, middle), slice(middle, None)):
            index = (*(slice(None),) * axis, part)
            views = {name: getattr(p, name)[index] for name in names}
            cut(replace(p, shape=views["a"].shape, **views))

    cut(p)


forward = partial(_apart, results=("out", "pre"), operation=layers.forward)
tangent = partial(_apart, results=("out", "out_dot"), operation=layers.tangent)
backward = partial(_summed, names=("d_a", "d_b", "d_bias"), operation=layers.backward)
double_backward = partial(
    _summed, names=("d_grad", "d_a", "d_b", "d_bias"), operation=layers.double_backward
)
gated = partial(_gated, results=("out",), operands=("a", "b"), operation=gates.gated)
gated_backward = partial(
    _gated, results=("d_a", "d_b"), operands=("grad", "a", "b"), operation=gates.gated_backward
)
gated_double_backward = partial(
    _gated,
    results=("d_grad", "d_a", "d_b"),
    operands=("grad", "a", "b", "u", "v"),
    operation=gates.gated_double_backward,
)
gated_tangent = partial(
    _gated,
    results=("out", "out_dot"),
    operands=("a", "b", "u", "v"),
    operation=gates.gated_tangent,
)
