"""Products, copies and sums over batches, as launches.

A product is one launch (or a few) over *places*, the elements of the batch of its result. Where the
result is summed over a part of the batch, that part is folded into K if the strides allow, and else
each element makes a plane, and the planes are joined in their order. What is launched depends on
the shapes, strides and alignments alone, so it is recorded once (`plans.Recorder`) and repeated
with other addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import passes
from numfuse.backends.cuda.plan.product import Operand, Product, Slot
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.epilogues import sum_of_terms
from numfuse.problem.shapes import equal, merge_axes

if TYPE_CHECKING:
    from numfuse.epilogues import Epilogue

__all__ = [
    "Places",
    "alignment",
    "as_rows",
    "copy",
    "join",
    "launch",
    "matrix",
    "packed_rows",
    "product",
    "split",
    "sum_to",
    "turned",
]


# --- axes ---------------------------------------------------------------------------------------
def _steps(view: View | None, axes: int) -> tuple[int, ...]:
    """The strides of a view's batch axes, 0 where they repeat, with leading ones that it lacks."""
    if view is None:
        return (0,) * axes
    own = tuple(0 if n == 1 else s for n, s in zip(view.shape[:-2], view.strides[:-2], strict=True))
    return (0,) * (axes - len(own)) + own


def alignment(view: View, steps: Sequence[int]) -> int:
    """The power of two, at most 16, that divides every address base + sum of index * step."""
    found = 16
    for distance in (view.alignment, view.offset, *(s * view.itemsize for s in steps)):
        while distance % found:
            found //= 2
    return found


def split(batch: tuple[int, ...], result: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The axes of a batch that a result has, and those that it is summed over."""
    own = (1,) * (len(batch) - len(result)) + result
    axes = [i for i, length in enumerate(batch) if length != 1]
    return [i for i in axes if own[i] != 1], [i for i in axes if own[i] == 1]


# --- products -----------------------------------------------------------------------------------
class Places:
    """The places of a launch: axes of which the last is the kernel's, the others are loops."""

    def __init__(
        self, lengths: Sequence[int], views: dict[str, View], order: Sequence[int]
    ) -> None:
        steps = [_steps(view, len(lengths)) for view in views.values()]
        number = _contiguous([lengths[i] for i in order])
        found, made = merge_axes(
            [lengths[i] for i in order], *([s[i] for i in order] for s in steps), number
        )
        self.count = found[-1] if found else 1
        self._loops = found[:-1]
        #: Of each view, the step of a place, in elements.
        self.step = {name: s[-1] if s else 0 for name, s in zip(views, made, strict=False)}
        self._loop_steps = {name: s[:-1] for name, s in zip(views, made, strict=False)}
        self._numbers = made[-1][:-1]
        self._views = views

    def operand(self, name: str, row: int, column: int) -> Operand:
        """A view as a tier sees it."""
        view = self._views[name]
        return Operand(
            view.dtype, (self.step[name], row, column), alignment(view, self._loop_steps[name])
        )

    def __iter__(self) -> Any:
        """(number of the first place, {name: (buffer, offset)}) of each launch."""
        for index in np.ndindex(*self._loops):
            at = {
                name: (
                    view.buffer,
                    view.offset
                    + view.itemsize
                    * sum(i * s for i, s in zip(index, self._loop_steps[name], strict=True)),
                )
                for name, view in self._views.items()
            }
            yield sum(i * s for i, s in zip(index, self._numbers, strict=True)), at


def _contiguous(lengths: Sequence[int]) -> list[int]:
    found, run = [], 1
    for length in reversed(lengths):
        found.append(run)
        run *= length
    return found[::-1]


def matrix(view: View) -> tuple[int, int]:
    """The strides of row and column, 0 where they repeat."""
    row, column = view.strides[-2:]
    return (0 if view.shape[-2] == 1 else row), (0 if view.shape[-1] == 1 else column)


def launch(
    rec: Recorder,
    m: int,
    n: int,
    k: int,
    lengths: Sequence[int],
    order: Sequence[int],
    views: dict[str, View],
    accumulator: str,
    *,
    epilogue: Epilogue | None = None,
    factors: dict[str, tuple[int, int]] | None = None,
    sums: bool = False,
    free: bool = False,
) -> tuple[View, int] | None:
    """Record one product over the axes `order` of a batch; its column sums, and their rows.

    `epilogue` is by default the sum itself. `factors` are strides (row, column) of x and y in
    place of their own.
    """
    places = Places(lengths, views, order)
    strides = {name: matrix(view) for name, view in views.items()} | (factors or {})
    operands: dict[str, Any] = {name: places.operand(name, *strides[name]) for name in views}
    if "bias" in operands:
        bias = operands["bias"]
        operands["bias"] = replace(bias, strides=(bias.strides[0], 0, bias.strides[2]))
    if epilogue is None:
        epilogue = sum_of_terms(0)
    elif "bias" not in views:
        epilogue = epilogue.without("bias")
    out, *_ = (name for name, _ in epilogue.results)
    product = Product(
        m,
        n,
        k,
        places.count,
        accumulator=accumulator,
        precision=rec.precision if views["x"].dtype == "float32" else "ieee",
        epilogue=epilogue.select(out, *(["pre"] if "pre" in views else [])),
        sums=sums,
        free=free,
        **operands,
    )
    plan = rec.choose(product)
    table = None
    rows = 0
    if sums:
        rows = -(-m // plan.block_m)
        table = rec.fresh((prod(lengths[i] for i in order), rows, n), accumulator)
    for first, at in places:
        if table is not None:
            at["sums"] = table.buffer, table.offset + first * rows * n * table.itemsize
        rec.plan(plan, at)
    return None if table is None else (table, rows)


def product(
    rec: Recorder,
    x: View,
    y: View,
    batch: tuple[int, ...],
    out: View,
    accumulator: str,
    *,
    free: bool = False,
    epilogue: Epilogue | None = None,
    bias: View | None = None,
    extra: View | None = None,
    pre: View | None = None,
) -> None:
    """Record out = X Y, summed over the batch axes that `out` lacks, with an epilogue.

    With `free` the order of the sum may depend on its length: d_b, the sum over the rows.
    """
    m, k = x.shape[-2:]
    n = y.shape[-1]
    outer, inner = split(batch, out.shape[:-2])
    if not (m and n and all(batch[i] for i in outer)):
        return
    given = {"x": x, "y": y, "bias": bias, "extra": extra, "pre": pre, "out": out}
    views = {name: view for name, view in given.items() if view is not None}
    factors = None
    if inner:
        # there is no epilogue: it is d_a or d_b
        full = all(_length(view, i, batch) == batch[i] for view in (x, y) for i in inner)
        if not prod(batch[i] for i in inner):
            k = 0
        elif full and free:
            # d_b: the rows of all elements in their order, by a copy where need be
            views["x"], x_k = _along_k(rec, turned(x), batch, outer, inner)
            views["y"], y_k = _along_k(rec, y, batch, outer, inner)
            k *= prod(batch[i] for i in inner)
            factors = {
                "x": (matrix(views["x"])[1], x_k),
                "y": (y_k, matrix(views["y"])[1]),
            }
            views["x"] = turned(views["x"])
        else:
            _summed(rec, views, batch, outer, inner, out, accumulator)
            return
    launch(
        rec,
        m,
        n,
        k,
        batch,
        outer,
        views,
        accumulator,
        epilogue=epilogue,
        factors=factors,
        free=free,
    )


def _length(view: View, axis: int, batch: tuple[int, ...]) -> int:
    """Return the length of an axis of the batch in a view, which may lack the axis."""
    own = axis - (len(batch) + 2 - len(view.shape))
    return view.shape[own] if own >= 0 else 1


def _along_k(
    rec: Recorder, view: View, batch: tuple[int, ...], outer: list[int], inner: list[int]
) -> tuple[View, int]:
    """A view (..., K, N) whose axes `inner` and K are one step apart, and that step."""
    steps = _steps(view, len(batch))
    lengths = [*(batch[i] for i in inner), view.shape[-2]]
    found, (k_steps,) = merge_axes(lengths, [*(steps[i] for i in inner), view.strides[-2]])
    if len(found) <= 1:
        return view, k_steps[0] if k_steps else 0
    lead = len(batch) + 2 - len(view.shape)
    order = [i - lead for i in (*outer, *inner) if i >= lead]
    order = [i for i in range(len(view.shape) - 2) if i not in order] + order
    order += [len(view.shape) - 2, len(view.shape) - 1]
    turned = replace(
        view,
        shape=tuple(view.shape[i] for i in order),
        strides=tuple(view.strides[i] for i in order),
    )
    packed = rec.fresh(turned.shape, view.dtype)
    copy(rec, turned, packed)
    strides = [0] * len(order)
    for at, axis in enumerate(order):
        strides[axis] = packed.strides[at]
    return replace(packed, shape=view.shape, strides=tuple(strides)), packed.strides[-2]


def _summed(
    rec: Recorder,
    views: dict[str, View],
    batch: tuple[int, ...],
    outer: list[int],
    inner: list[int],
    out: View,
    accumulator: str,
) -> None:
    """Record a product of which every element of the axes `inner` makes a plane; and their join."""
    m, k = views["x"].shape[-2:]
    n = views["y"].shape[-1]
    count = prod(batch[i] for i in outer)
    segments = prod(batch[i] for i in inner)
    itemsize = 8 if accumulator == "float64" else 4
    plane = m * n * itemsize
    room = max(1, tiling.PLANES_BYTES // max(1, plane * count))
    if segments > room:
        # In turns, along the first axis that is summed over: each adds to the sum of those before.
        axis = inner[0]
        step = max(1, room // max(1, segments // batch[axis]))
    else:
        axis, step = inner[0], batch[inner[0]]
    rest = segments // batch[axis]
    turns = range(0, batch[axis], step)
    depth = min(step, batch[axis]) * rest + (len(turns) > 1)
    planes = rec.fresh((count, depth, m, n), accumulator)
    for first in turns:
        last = min(first + step, batch[axis])
        lead = 1 if first else 0  # plane 0 is the sum of the turns before
        lengths = tuple(last - first if i == axis else length for i, length in enumerate(batch))
        order = outer + inner
        steps = [0] * len(batch)
        for i, s in zip(inner, _contiguous([lengths[i] for i in inner]), strict=True):
            steps[i] = s * m * n
        for i, s in zip(outer, _contiguous([batch[i] for i in outer]), strict=True):
            steps[i] = s * depth * m * n
        target = View(
            planes.buffer,
            planes.offset + lead * plane,
            (*lengths, m, n),
            (*steps, n, 1),
            accumulator,
            planes.itemsize,
            planes.alignment,
        )
        parts = {
            name: view.part(axis - (len(batch) + 2 - len(view.shape)), first, last)
            for name, view in views.items()
            if name != "out"
        }
        launch(rec, m, n, k, lengths, order, {**parts, "out": target}, accumulator)
        used = (last - first) * rest + lead
        if last == batch[axis] and len(turns) == 1:
            join(rec, planes, count, depth, out, accumulator)
        else:
            # places are `depth` planes apart, of which `used` hold something
            done = last == batch[axis]
            for place in range(count):
                one = replace(
                    planes, offset=planes.offset + place * depth * plane, shape=(1, used, m, n)
                )
                goal = _nth(out, place) if done else replace(one, shape=(m, n), strides=(n, 1))
                join(rec, one, 1, used, goal, accumulator)


def _nth(out: View, number: int) -> View:
    """A matrix of a batch."""
    offset = 0
    for length, stride in zip(out.shape[:-2][::-1], out.strides[:-2][::-1], strict=True):
        number, index = divmod(number, length)
        offset += index * stride
    return replace(
        out,
        offset=out.offset + offset * out.itemsize,
        shape=out.shape[-2:],
        strides=out.strides[-2:],
    )


def join(rec: Recorder, planes: View, count: int, depth: int, out: View, accumulator: str) -> None:
    """Record out[o] = the sum of planes[o, q] over q; contiguous planes of a matrix each."""
    rows, columns = out.shape[-2:]
    if not prod(out.shape):
        return
    equal("planes and their sums", prod(planes.shape), depth * prod(out.shape))
    lengths, (steps,) = merge_axes(out.shape[:-2], out.strides[:-2])
    many = lengths[-1] if lengths else 1
    step = steps[-1] if steps else 0
    size = depth * rows * columns * planes.itemsize
    for number, index in enumerate(np.ndindex(*lengths[:-1])):
        offset = sum(i * s for i, s in zip(index, steps[:-1], strict=True)) * out.itemsize
        launches, workspace = passes.joins(
            rec.device.info,
            accumulator,
            Slot("planes"),
            Slot("out"),
            out.dtype,
            many,
            depth,
            rows,
            columns,
            (step, out.strides[-2], out.strides[-1]),
            Slot("work"),
        )
        rec.launches(
            launches,
            {
                "planes": (planes.buffer, planes.offset + number * many * size),
                "out": (out.buffer, out.offset + offset),
            },
            workspace,
        )


def sum_to(rec: Recorder, source: View, target: View, accumulator: str) -> None:
    """Record target = source summed over the axes along which target was broadcast to it."""
    missing = len(source.shape) - len(target.shape)
    target = replace(
        target, shape=(1,) * missing + target.shape, strides=(0,) * missing + target.strides
    )
    summed = [i for i, length in enumerate(target.shape) if length != source.shape[i]]
    if not prod(target.shape):
        return
    if not summed:
        copy(rec, source, target)
        return
    order = [*summed, *(i for i in range(len(source.shape)) if i not in summed)]
    turned = replace(
        source,
        shape=tuple(source.shape[i] for i in order),
        strides=tuple(source.strides[i] for i in order),
    )
    planes = rec.fresh(turned.shape, accumulator)
    copy(rec, turned, planes)
    depth = prod(source.shape[i] for i in summed)
    # the target has the rest in the same order: as one row, or in a contiguous copy
    row = replace(target, shape=(1, prod(target.shape)), strides=(0, 1))
    if target.contiguous:
        join(rec, planes, 1, depth, row, accumulator)
        return
    apart = rec.fresh(target.shape, target.dtype)
    join(rec, planes, 1, depth, replace(apart, shape=row.shape, strides=(0, 1)), accumulator)
    copy(rec, apart, target)


def copy(rec: Recorder, source: View, out: View) -> None:
    """Record out = source, converted; one shape, any strides."""
    equal("the source and the target of a copy", source.shape, out.shape)
    lengths, (steps, out_steps) = merge_axes(out.shape, source.strides, out.strides)
    if not prod(lengths):
        return
    lead = max(0, len(lengths) - passes.COPY_AXES)
    accumulator = "float64" if out.dtype == "float64" else "float32"
    launch = passes.copies(
        rec.device.info,
        accumulator,
        source.dtype,
        out.dtype,
        lengths[lead:],
        steps[lead:],
        out_steps[lead:],
    )
    for index in np.ndindex(*lengths[:lead]):
        at = {
            name: (
                view.buffer,
                view.offset + view.itemsize * sum(i * s for i, s in zip(index, mine, strict=False)),
            )
            for name, view, mine in (("x", source, steps), ("out", out, out_steps))
        }
        rec.launches((launch,), at)


# --- views --------------------------------------------------------------------------------------
def turned(view: View) -> View:
    """The transpose."""
    (*batch, m, n), (*steps, row, column) = view.shape, view.strides
    return replace(view, shape=(*batch, n, m), strides=(*steps, column, row))


def as_rows(view: View) -> View | None:
    """(..., M, N) as one matrix of all rows; None where the strides do not allow it."""
    lengths, (steps,) = merge_axes(view.shape[:-1], view.strides[:-1])
    if len(lengths) > 1:
        return None
    count, step = (lengths[0], steps[0]) if lengths else (1, 0)
    return replace(view, shape=(count, view.shape[-1]), strides=(step, view.strides[-1]))


def packed_rows(rec: Recorder, view: View) -> View:
    """Return (..., M, N) as one matrix of all rows, by a copy where need be."""
    found = as_rows(view)
    if found is None:
        packed = rec.fresh(view.shape, view.dtype)
        copy(rec, view, packed)
        found = as_rows(packed)
        assert found is not None
    return found
