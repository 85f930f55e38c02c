"""Products, copies and sums over batches, as launches.

A product is one launch (or a few) over *places*, the elements of the batch of its result. Where the
result is summed over a part of the batch, that part is folded into K if the strides allow, and else
each element makes a plane, and the planes are joined in their order. What is launched depends on
the shapes, strides and alignments alone, so it is recorded once (`program.Recorder`) and repeated
with other addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import joins, passes
from numfuse.backends.cuda.plan.places import Places, matrix, split
from numfuse.backends.cuda.plan.product import ITEMSIZES, Operand, Product, Slot
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.epilogues import sum_of_terms
from numfuse.problem.shapes import equal, merge_axes
from numfuse.runtime.strided import contiguous, walk

if TYPE_CHECKING:
    from numfuse.epilogues import Epilogue


def launch(
    rec: Recorder,
    sizes: tuple[int, int, int],
    lengths: Sequence[int],
    order: Sequence[int],
    views: dict[str, View],
    accumulator: str,
    *,
    epilogue: Epilogue | None = None,
    factors: dict[str, tuple[int, int]] | None = None,
    sums: bool = False,
    free: bool = False,
    whole: bool = False,
) -> tuple[View | None, int]:
    """Record one product over the axes `order` of a batch; its column sums, and their rows.

    Without `x` and `y` among the views it is a pass over the others. `epilogue` is by default the
    sum itself. `factors` are strides (row, column) of x and y in place of their own. `free` and
    `whole` say whether K is cut (`Product`). With `y1` among the views (`Product.y1`) the rows are
    -1, and nothing is recorded, where no tier takes it.
    """
    m, n, k = sizes
    places = Places(lengths, views, order)
    strides = {name: matrix(view) for name, view in views.items()} | (factors or {})
    operands: dict[str, Any] = {name: places.operand(name, *strides[name]) for name in views}
    for name in operands.keys() & {"bias", "bias1"}:
        bias = operands[name]
        operands[name] = replace(bias, strides=(bias.strides[0], 0, bias.strides[2]))
    if epilogue is None:
        epilogue = sum_of_terms(0)
    elif "bias" not in views:
        epilogue = epilogue.without("bias")
    if "x" in views:
        names = [name for name, _ in epilogue.results]
        alternate = ""
        if "y1" in views and "x1" not in views and _are_woven(views, "y", "y1"):
            two = "pre1" not in views and _are_woven(views, "out", "pre")
            alternate = "y out" if two else "y"
        product = Product(
            *(m, n, k, places.count),
            accumulator=accumulator,
            precision=rec.precision_of(views["x"].dtype),
            epilogue=epilogue.select(*names[:1], *(x for x in names[1:] if x in views)),
            sums=sums,
            free=free,
            whole=whole,
            alternate=alternate,
            **operands,
        )
        plan = rec.choose(product)
        if plan is None:
            return None, -1
        rows = (plan.sum_rows or -(-m // plan.block_m)) if sums else 0
        record = partial(rec.plan, plan)
    else:
        read = operands.get("pre"), operands["extra"], operands.get("out")
        slopes, chunks = passes.slopes(
            rec.device.info, epilogue, accumulator, *read, m, n, places.count, sums
        )
        rows = chunks if sums else 0
        record = partial(rec.launches, (slopes,))
    table = None
    if sums:
        table = rec.fresh((prod(lengths[i] for i in order), rows, n), accumulator)
    for first, at in places:
        if table is not None:
            at["sums"] = table.at(first * rows * n)
        record(at)
    return table, rows


def _are_woven(views: dict[str, View], even: str, odd: str) -> bool:
    """Return whether two of some views are every other column of one array."""
    return odd in views and views[even].woven_with(views[odd]) is not None


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
    **others: View | None,
) -> None:
    """Record out = X Y, summed over the batch axes that `out` lacks, with an epilogue.

    With `free` the order of the sum may depend on its length: d_b, the sum over the rows. `others`
    are the epilogue's arrays: bias, extra and pre.
    """
    if epilogue is None and out.strides[-2] == 1 and out.strides[-1] > 1:
        # by columns: a kernel writes rows
        x, y, out = y.turned, x.turned, out.turned
    m, k = x.shape[-2:]
    n = y.shape[-1]
    outer, inner = split(batch, out.shape[:-2])
    if not (m and n and all(batch[i] for i in outer)):
        return
    given = {"x": x, "y": y, **others, "out": out}
    views = {name: view for name, view in given.items() if view is not None}
    factors = None
    if inner:
        # there is no epilogue: it is d_a or d_b
        full = all(_length(view, i, batch) == batch[i] for view in (x, y) for i in inner)
        if not prod(batch[i] for i in inner):
            k = 0
        elif full and free:
            # d_b: the rows of all elements in their order, by a copy where need be
            views["x"], x_k = _along_k(rec, x.turned, batch, outer, inner)
            views["y"], y_k = _along_k(rec, y, batch, outer, inner)
            k *= prod(batch[i] for i in inner)
            factors = {
                "x": (matrix(views["x"])[1], x_k),
                "y": (y_k, matrix(views["y"])[1]),
            }
            views["x"] = views["x"].turned
        else:
            _summed(rec, views, batch, outer, inner, out, accumulator)
            return
    how = (m, n, k), batch, outer, views, accumulator
    launch(rec, *how, epilogue=epilogue, factors=factors, free=free)


def _length(view: View, axis: int, batch: tuple[int, ...]) -> int:
    """Return the length of an axis of the batch in a view, which may lack the axis."""
    own = axis - (len(batch) + 2 - len(view.shape))
    return view.shape[own] if own >= 0 else 1


def _along_k(
    rec: Recorder, view: View, batch: tuple[int, ...], outer: list[int], inner: list[int]
) -> tuple[View, int]:
    """Return a view (..., K, N) whose axes `inner` and K are one step apart, and that step."""
    steps = view.batch_steps(len(batch))
    lengths = [*(batch[i] for i in inner), view.shape[-2]]
    found, (k_steps,) = merge_axes(lengths, [*(steps[i] for i in inner), view.strides[-2]])
    if len(found) <= 1:
        return view, k_steps[0] if k_steps else 0
    lead = len(batch) + 2 - len(view.shape)
    order = [i - lead for i in (*outer, *inner) if i >= lead]
    order = [i for i in range(len(view.shape) - 2) if i not in order] + order
    order += [len(view.shape) - 2, len(view.shape) - 1]
    packed = _copied(rec, view.axes(order), view.dtype)
    return packed.axes([order.index(i) for i in range(len(order))]), packed.strides[-2]


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
    itemsize, plane = ITEMSIZES[accumulator], m * n
    room = max(1, tiling.PLANES_BYTES // max(1, plane * count * itemsize))
    axis = inner[0]
    rest = segments // batch[axis]
    # Beyond that in turns, along the first axis that is summed over: each adds to the sum of those
    # before.
    step = batch[axis] if segments <= room else max(1, room // max(1, rest))
    turns = range(0, batch[axis], step)
    depth = min(step, batch[axis]) * rest + (len(turns) > 1)
    planes = rec.fresh((count, depth, m, n), accumulator)
    for first in turns:
        last = min(first + step, batch[axis])
        lead = 1 if first else 0  # plane 0 is the sum of the turns before
        lengths = tuple(last - first if i == axis else length for i, length in enumerate(batch))
        order = outer + inner
        steps = [0] * len(batch)
        for axes, first_step in ((inner, plane), (outer, depth * plane)):
            for i, stride in zip(axes, contiguous([lengths[i] for i in axes]), strict=True):
                steps[i] = stride * first_step
        start = planes.offset + lead * plane
        target = replace(planes, offset=start, shape=(*lengths, m, n), strides=(*steps, n, 1))
        parts = {
            name: view.part(axis - (len(batch) + 2 - len(view.shape)), first, last)
            for name, view in views.items()
            if name != "out"
        }
        launch(rec, (m, n, k), lengths, order, {**parts, "out": target}, accumulator)
        used = (last - first) * rest + lead
        if last == batch[axis] and len(turns) == 1:
            join(rec, planes, depth, out, accumulator)
        else:
            # places are `depth` planes apart, of which `used` hold something
            done = last == batch[axis]
            for place, (at,) in enumerate(walk(out.shape[:-2], out.strides)):
                start = planes.offset + place * depth * plane
                one = replace(planes, offset=start, shape=(1, used, m, n))
                goal = replace(one, shape=(m, n), strides=(n, 1))
                if done:
                    goal = replace(matrix_of(out), offset=out.offset + at)
                join(rec, one, used, goal, accumulator)


def matrix_of(view: View) -> View:
    """Return the first matrix of a batch."""
    return replace(view, shape=view.shape[-2:], strides=view.strides[-2:])


def join(rec: Recorder, planes: View, depth: int, out: View, accumulator: str) -> None:
    """Record out[o] = the sum of planes[o, q] over q; contiguous planes of a matrix each."""
    *batch, rows, columns = out.shape
    if not prod(out.shape):
        return
    equal("planes and their sums", prod(planes.shape), depth * prod(out.shape))
    steps = contiguous(batch, depth * rows * columns)
    stacked = replace(planes, shape=(*batch, depth * rows, columns), strides=(*steps, columns, 1))
    places = Places(batch, {"planes": stacked, "out": out}, range(len(batch)))
    row, column = out.strides[-2:]
    target = Operand(out.dtype, (places.step["out"], row, column), out.itemsize)
    lengths = places.count, depth, rows, columns
    launches, workspace = joins.joins(
        rec.device.info, accumulator, Slot("planes"), target, lengths, Slot("work")
    )
    for _, at in places:
        rec.launches(launches, at, workspace)


def join_columns(
    rec: Recorder, table: View, batch: tuple[int, ...], chunks: int, target: View, accumulator: str
) -> None:
    """Record target = the sum of a table of (places, chunks, N), the places in their order."""
    outer, inner = split(batch, target.shape[:-2])
    n = table.shape[-1]
    out, depth = target, prod(batch[i] for i in inner) * chunks
    if [*outer, *inner] != sorted([*outer, *inner]):
        out, depth = rec.fresh((*batch, 1, n), accumulator), chunks
    elif target.shape[-1] != n:
        out = rec.fresh((*target.shape[:-1], n), accumulator)
    join(rec, table, depth, out, accumulator)
    if out is not target:
        sum_to(rec, out, target, accumulator)


def sum_to(rec: Recorder, source: View, target: View, accumulator: str) -> None:
    """Record target = source summed over the axes along which target was broadcast to it."""
    planes, target, depth = source.summed_to(target)
    if not prod(target.shape):
        return
    if source.shape == target.shape:
        copy(rec, source, target)
        return
    if not planes.contiguous or planes.dtype != accumulator:
        planes = _copied(rec, planes, accumulator)
    # the target has the rest in the same order: as one row, or in a contiguous copy
    whole = target if target.contiguous else rec.fresh(target.shape, target.dtype)
    row = replace(whole, shape=(1, prod(target.shape)), strides=(0, 1))
    join(rec, planes, depth, row, accumulator)
    if whole is not target:
        copy(rec, whole, target)


def copy(rec: Recorder, source: View, out: View) -> None:
    """Record out = source, converted; one shape, any strides."""
    equal("the source and the target of a copy", source.shape, out.shape)
    lengths, (steps, out_steps) = merge_axes(out.shape, source.strides, out.strides)
    if not prod(lengths):
        return
    lead = max(0, len(lengths) - passes.COPY_AXES)
    accumulator = "float64" if out.dtype == "float64" else "float32"
    axes = lengths[lead:], steps[lead:], out_steps[lead:]
    launch = passes.copies(rec.device.info, accumulator, source.dtype, out.dtype, *axes)
    for first, out_first in walk(lengths[:lead], steps, out_steps):
        rec.launches((launch,), {"x": source.at(first), "out": out.at(out_first)})


def _copied(rec: Recorder, view: View, dtype: str) -> View:
    """Return a contiguous copy in a dtype."""
    packed = rec.fresh(view.shape, dtype)
    copy(rec, view, packed)
    return packed


def packed_rows(rec: Recorder, view: View) -> View:
    """Return (..., M, N) as one matrix of all rows, by a copy where need be."""
    found = view.rows or _copied(rec, view, view.dtype).rows
    assert found is not None, "a copy is contiguous"
    return found
