"""Hop 4: a problem becomes dispatches.

A product is one kernel over *places*, the elements of the batch of its result. A place may add up
several *segments*, the elements of a batch that its result is summed over, in groups, and its K may
be cut in *parts*; each part of each group is then a plane of its own, and the planes are joined in
their order. Which parts and groups there are depends on the problem alone, and so do the bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.device.device import Binding, Device
from numfuse.backends.webgpu.shaders.kernels import Gated, Gemm, Join, Operand
from numfuse.backends.webgpu.stores import Store, View, copy, fresh
from numfuse.problem.shapes import equal

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.backends.webgpu.tiling import WebGpuTile
    from numfuse.expr import Expr
    from numfuse.problem.product import (
        GatedBackwardProblem,
        GatedProblem,
        GemmBackwardProblem,
        GemmProblem,
    )

__all__ = ["backward", "forward", "gated", "gated_backward", "sum_to", "tile_of"]

#: The operands of the epilogue in the order of a place.
_TAILS = ("bias", "extra", "out", "pre")


def tile_of(
    device: Device, m: int, n: int, accumulator: np.dtype[Any], depth: int = 0
) -> WebGpuTile:
    """The tile of an M x N result on this device, of which sums over `depth` may be cut."""
    limits = device.limits
    return tiling.tile(
        m,
        n,
        accumulator.itemsize,
        limits["max-compute-workgroup-storage-size"],
        min(
            limits["max-compute-invocations-per-workgroup"],
            limits["max-compute-workgroup-size-x"],
        ),
        device.adapter.kind == "CPU",
        depth,
    )


def _factor(view: View, outputs: int, depth: int) -> Operand:
    """How a kernel may read a factor, the axes of which are the result's and that of the sum."""
    shape, strides = view.shape, view.strides
    if strides[depth] == 1 or strides[outputs] == 1:
        turned = strides[depth] == 1
    else:
        turned = abs(strides[depth]) < abs(strides[outputs])
    along, across = (depth, outputs) if turned else (outputs, depth)
    wide = (
        strides[along] == 1
        and shape[along] % 4 == 0
        and view.offset % 4 == 0
        and all(s % 4 == 0 for s in (strides[across], *strides[:-2]))
    )
    return Operand(view.dtype, wide, turned)


def _rows(view: View) -> Operand:
    """How a kernel may read or write an array along its rows."""
    wide = (
        view.strides[-1] == 1
        and view.shape[-1] % 4 == 0
        and view.offset % 4 == 0
        and all(s % 4 == 0 for s in _repeated(view.shape, view.strides)[:-1])
    )
    return Operand(view.dtype, wide)


def _repeated(lengths: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with 0 for axes of length 1: those are read again and again."""
    return tuple(0 if n == 1 else s for n, s in zip(lengths, strides, strict=True))


def _steps(view: View | None, axes: int) -> tuple[int, ...]:
    """The strides of a view's batch axes, with leading ones for those that it lacks."""
    if view is None:
        return (0,) * axes
    own = _repeated(view.shape[:-2], view.strides[:-2])
    return (0,) * (axes - len(own)) + own


@dataclass(frozen=True)
class Places:
    """The batch of a product: axes that its result has, and axes that it is summed over."""

    batch: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]

    @classmethod
    def of(cls, batch: tuple[int, ...], result: tuple[int, ...]) -> Places:
        """For a result with these batch axes of its own."""
        own = (1,) * (len(batch) - len(result)) + result
        axes = [i for i, length in enumerate(batch) if length != 1]
        return cls(
            batch, tuple(i for i in axes if own[i] != 1), tuple(i for i in axes if own[i] == 1)
        )

    @property
    def count(self) -> int:
        return prod(self.batch[i] for i in self.outer)

    @property
    def segments(self) -> int:
        return prod(self.batch[i] for i in self.inner)

    def each(self) -> Places:
        """Every element of the batch a place of its own, in the same order."""
        return Places(self.batch, self.outer + self.inner, ())

    def table(self, views: list[View | None]) -> bytes:
        """Where each of these begins, place by place and segment by segment."""
        order = self.outer + self.inner
        columns = []
        for view in views:
            at = np.full((), 0 if view is None else view.offset, np.int64)
            steps = _steps(view, len(self.batch))
            for axis in order:
                at = np.add.outer(at, np.arange(self.batch[axis]) * steps[axis])
            columns.append(at.reshape(-1))
        return np.stack(columns, axis=1).astype(np.uint32).tobytes()


@dataclass(frozen=True)
class Cut:
    """How the sum of a place is cut into planes."""

    part: int
    parts: int = 1
    per_group: int = 1
    groups: int = 1

    @property
    def planes(self) -> int:
        return self.parts * self.groups


def _launch(
    store: Store,
    m: int,
    n: int,
    k: int,
    places: Places,
    cut: Cut,
    tile: WebGpuTile,
    accumulator: np.dtype[Any],
    *,
    x: View | None = None,
    y: View | None = None,
    tails: dict[str, View | None],
    column_sums: View | None = None,
    stacked: bool = False,
    **features: Any,
) -> None:
    """Record one kernel of gemm.wgsl over all places and planes."""
    device = store.device
    bindings: list[Binding | Any] = []
    found: dict[str, View | None] = {}
    operands: dict[str, Operand] = {}
    for name, view in (("x", x), ("y", y), *((name, tails.get(name)) for name in _TAILS)):
        found[name] = None
        if view is None:
            continue
        binding, offset = view.bound(device)
        view = found[name] = replace(view, offset=offset)
        bindings.append(binding)
        if name == "x":
            operands[name] = _factor(view, -2, -1)
        elif name == "y":
            operands[name] = _factor(view, -1, -2)
        else:
            operands[name] = _rows(view)
    # the order of the kernel's bindings has pre before out
    order = [name for name in ("x", "y", "bias", "extra", "pre", "out") if found[name] is not None]
    by_name = dict(zip([name for name in found if found[name] is not None], bindings, strict=True))
    bindings = [by_name[name] for name in order]
    if column_sums is not None:
        bindings.append(column_sums.bound(device)[0])
    many = places.count != 1 or places.segments != 1
    # of a place: x, y, bias, extra, out, pre
    views = [found[name] for name in ("x", "y", *_TAILS)]
    if stacked:
        views[4] = None
    if many:
        bindings.append(device.constant(places.table(views), uniform=False))
    offsets = [0 if view is None or many else view.offset for view in views]
    kernel = Gemm(
        tile,
        accumulator.name,
        operands.get("x"),
        operands.get("y"),
        operands.get("bias"),
        operands.get("extra"),
        operands.get("pre"),
        out=operands.get("out"),
        column_sums=column_sums is not None,
        places=many,
        segments=places.segments != 1,
        planes=stacked,
        one_rounding=device.one_rounding[accumulator.name],
        **features,
    )

    def strides(name: str) -> tuple[int, ...]:
        view = found[name]
        return (0, 0) if view is None else _repeated(view.shape[-2:], view.strides[-2:])

    total = places.count * cut.planes
    blocks = -(-m // tile.block_m) * -(-n // tile.block_n)
    for first in range(0, total, device.grid_limit):
        store.commands.dispatch(
            kernel,
            bindings,
            (
                m,
                n,
                k,
                *(found["x"].strides[-2:] if found["x"] else (0, 0)),
                *(found["y"].strides[-2:] if found["y"] else (0, 0)),
                strides("bias")[1],
                *strides("extra"),
                *((n, 1) if stacked else strides("out")),
                *strides("pre"),
                first,
                cut.part,
                cut.parts,
                cut.per_group,
                places.segments,
                cut.groups,
                *offsets,
            ),
            (*device.grid(blocks), min(total - first, device.grid_limit)),
        )


def _product(
    store: Store,
    x: View,
    y: View,
    batch: tuple[int, ...],
    out: View,
    accumulator: np.dtype[Any],
    *,
    free: bool = False,
    add: bool = False,
    bias: View | None = None,
    extra: View | None = None,
    pre: View | None = None,
    function: Expr | None = None,
) -> None:
    """Record out = X Y, summed over the batch axes that `out` lacks, with the forward's epilogue.

    With `free` the sum may be cut into planes: that of d_b, over the rows, of which the order may
    depend on M. With `add` the result is added to what `out` holds.
    """
    m, k = x.shape[-2:]
    n = y.shape[-1]
    places = Places.of(batch, out.shape[:-2])
    if not (m and n and places.count):
        return
    if not places.segments:  # a sum of no products: one of length 0, as a kernel adds up
        places, k = Places(batch, places.outer, ()), 0
    cut = Cut(k, per_group=places.segments)
    tile = tile_of(store.device, m, n, accumulator, k if free else 0)
    if free:
        cut = _cut(store.device, m, n, k, places, tile, accumulator)
    stacked = add or cut.planes > 1
    target = out
    if stacked:
        target = fresh(
            store.device, (places.count, cut.planes, m, n), accumulator, "the planes of a product"
        )
    _launch(
        store,
        m,
        n,
        k,
        places,
        cut,
        tile,
        accumulator,
        x=x,
        y=y,
        tails={"bias": bias, "extra": extra, "pre": pre, "out": target},
        stacked=stacked,
        function=function,
    )
    if stacked:
        _join(store, target, places.count, cut.planes, out, add)


def _cut(
    device: Device,
    m: int,
    n: int,
    k: int,
    places: Places,
    tile: WebGpuTile,
    accumulator: np.dtype[Any],
) -> Cut:
    blocks = -(-m // tile.block_m) * -(-n // tile.block_n)
    # planes that one binding can hold
    room = max(1, device.binding_limit // max(1, m * n * accumulator.itemsize * places.count))
    # Where memory is not short, not of the number of places: an element of a batch gives what it
    # gives alone.
    part, parts = tiling.parts(blocks, k, room)
    segments = places.segments
    if segments <= 1:
        return Cut(part, parts, segments, 1)
    groups = tiling.groups(blocks * parts * places.count, segments, room // parts)
    per_group = -(-segments // groups)
    return Cut(part, parts, per_group, -(-segments // per_group))


def _join(store: Store, planes: View, count: int, depth: int, out: View, add: bool = False) -> None:
    """Record out[o] = sum of planes[o, q] over q, in stages where there are many."""
    device = store.device
    size = prod(out.shape) // count if count else 0
    if not size:
        return
    equal("planes and their sums", prod(planes.shape), depth * prod(out.shape))
    while depth > tiling.JOINED:
        stages = -(-depth // tiling.JOINED)
        stage = fresh(device, (count, stages, size), np.dtype(planes.dtype), "joined planes")
        _sum(store, planes, stage, count, depth, tiling.JOINED, size, False)
        planes, depth = stage, stages
    target = out
    if not out.contiguous:
        target = fresh(device, out.shape, np.dtype(out.dtype), "a joined result")
        if add:
            copy(store.commands, out, target)
    _sum(store, planes, target, count, depth, depth, size, add)
    if target is not out:
        copy(store.commands, target, out)


def _sum(
    store: Store, planes: View, out: View, count: int, depth: int, width: int, size: int, add: bool
) -> None:
    """Record out[o, g] = the sum of the planes [o, q] with q in the group g of `width`."""
    device = store.device
    (source, source_at), (target, target_at) = planes.bound(device), out.bound(device)
    wide = size % 4 == source_at % 4 == target_at % 4 == 0
    unit = 4 if wide else 1
    kernel = Join(planes.dtype, Operand(planes.dtype, wide), Operand(out.dtype, wide), add)
    groups = -(-depth // width) if depth else 1
    total = count * groups * size // unit
    store.commands.dispatch(
        kernel,
        (source, target),
        (size // unit, depth, width, groups, source_at // unit, target_at // unit, total),
        (*device.grid(-(-total // 256)), 1),
    )


def forward(store: Store, p: GemmProblem) -> None:
    """out = act(a @ b + bias) + residual."""
    _product(
        store,
        store.source(p.a),
        store.source(p.b),
        p.batch,
        store.target(p.out),
        p.acc_dtype,
        bias=None if p.bias is None else store.source(p.bias),
        extra=None if p.residual is None else store.source(p.residual),
        pre=None if p.pre is None else store.target(p.pre),
        function=value_of(p.activation),
    )


def value_of(activation: Activation) -> Expr | None:
    """The graph of an activation; None of the identity."""
    graph = activation.trace(0)
    return None if graph.op == "x" else graph


def slope_of(activation: Activation) -> Expr | None:
    """The graph of its derivative; None where that is 1 everywhere."""
    graph = activation.trace(1)
    return None if graph.op == "const" and graph.payload == 1 else graph


def _turned(view: View) -> View:
    """The transpose."""
    (*batch, m, n), (*steps, row, column) = view.shape, view.strides
    return replace(view, shape=(*batch, n, m), strides=(*steps, column, row))


def backward(store: Store, p: GemmBackwardProblem, outs: dict[str, tuple[View, bool]]) -> None:
    """grad_pre = grad * act'(pre), and what is made of it.

    `outs` has the gradients that are wanted, "d_a", "d_b" and "d_bias": where to write each, and
    whether it is added to what is there.
    """
    device, acc = store.device, p.acc_dtype
    slope = slope_of(p.activation)
    grad = store.source(p.grad)
    grad_pre: View | None = None
    if slope is not None and ("d_a" in outs or "d_b" in outs):
        grad_pre = fresh(device, (*p.batch, p.m, p.n), acc, "grad_pre")
    if slope is not None or "d_bias" in outs:
        _slopes(store, p, grad, slope, grad_pre, *outs.get("d_bias", (None, False)))
    if grad_pre is None:
        grad_pre = grad
    if "d_a" in outs:
        out, add = outs["d_a"]
        _product(store, grad_pre, _turned(store.source(p.b)), p.batch, out, acc, add=add)
    if "d_b" in outs:
        out, add = outs["d_b"]
        a = _turned(store.source(p.a))
        _product(store, a, grad_pre, p.batch, out, acc, free=True, add=add)


def _slopes(
    store: Store,
    p: GemmBackwardProblem,
    grad: View,
    slope: Expr | None,
    grad_pre: View | None,
    d_bias: View | None,
    add: bool,
) -> None:
    """Record grad_pre = grad * act'(pre), and d_bias from the sums of its columns."""
    m, n, k, acc, device = p.m, p.n, p.k, p.acc_dtype, store.device
    by_bias = Places.of(p.batch, () if d_bias is None else d_bias.shape[:-2])
    if slope is not None and grad_pre is None and d_bias is None:
        return
    places = by_bias.each()
    tails: dict[str, View | None] = {"extra": grad, "out": grad_pre}
    x = y = None
    if slope is None:
        k = 0
    elif p.pre is not None:
        tails["pre"], k = store.source(p.pre), 0
    else:
        x, y = store.source(p.a), store.source(p.b)
        tails["bias"] = None if p.bias is None else store.source(p.bias)
    tile = tile_of(device, m, n, acc)
    rows = -(-m // tile.block_m)
    sums = None
    if d_bias is not None:
        sums = fresh(device, (places.count, rows, n), acc, "column sums")
    if m and n and places.count:
        _launch(
            store,
            m,
            n,
            k,
            places,
            Cut(k),
            tile,
            acc,
            x=x,
            y=y,
            tails=tails,
            column_sums=sums,
            pre_is_read="pre" in tails,
            function=slope,
            slope=True,
            guard=p.guard,
        )
    if d_bias is not None and sums is not None:
        _join(store, sums, by_bias.count, by_bias.segments * rows, d_bias, add)


def sum_to(store: Store, x: ndarray, out: ndarray, accumulator: np.dtype[Any]) -> None:
    """Record out = x summed over the axes along which out was broadcast to the shape of x."""
    source, target = store.source(x), store.target(out)
    missing = x.ndim - out.ndim
    target = replace(
        target, shape=(1,) * missing + target.shape, strides=(0,) * missing + target.strides
    )
    if source.shape == target.shape:
        copy(store.commands, source, target)
        return
    total = target
    if target.dtype != accumulator.name and _beyond(store.device, source.shape, accumulator):
        total = fresh(store.device, target.shape, accumulator, "the sum of a residual")
    _sum_to(store, source, total, accumulator, False)
    if total is not target:
        copy(store.commands, total, target)


def _beyond(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether the device cannot bind an array of this shape at once."""
    return prod(shape) * dtype.itemsize > device.binding_limit - 2 * device.alignment


def _sum_to(
    store: Store, source: View, target: View, accumulator: np.dtype[Any], add: bool
) -> None:
    """Record target = source, or target += source, summed over the axes of which target has 1.

    What is beyond the device's limit is summed in halves; where they are of one sum, the target is
    in the accumulator's dtype.
    """
    if _beyond(store.device, source.shape, accumulator):
        axis = max(range(len(source.shape)), key=lambda i: source.shape[i])
        middle = source.shape[axis] // 2
        for first, last in ((0, middle), (middle, source.shape[axis])):
            half = source.part(axis, first, last)
            if target.shape[axis] == source.shape[axis]:
                _sum_to(store, half, target.part(axis, first, last), accumulator, add)
            else:
                _sum_to(store, half, target, accumulator, add or first > 0)
        return
    summed = [i for i, length in enumerate(target.shape) if length != source.shape[i]]
    order = [*summed, *(i for i in range(len(source.shape)) if i not in summed)]
    turned = replace(
        source,
        shape=tuple(source.shape[i] for i in order),
        strides=tuple(source.strides[i] for i in order),
    )
    planes = fresh(store.device, turned.shape, accumulator, "the summands of a residual")
    copy(store.commands, turned, planes)
    _join(store, planes, 1, prod(source.shape[i] for i in summed), target, add)


def gated(store: Store, p: GatedProblem) -> None:
    """out = act(a) * b."""
    arrays = {"a": store.source(p.a), "b": store.source(p.b)}
    acc = p.acc_dtype.name
    one_rounding = store.device.one_rounding[acc]
    kernel = Gated(acc, Operand(p.dtype.name), value_of(p.activation), one_rounding=one_rounding)
    _elementwise(store, kernel, p.shape, arrays, {"out": store.target(p.out)})


def gated_backward(store: Store, p: GatedBackwardProblem) -> None:
    """d_a = grad * b * act'(a), d_b = grad * act(a)."""
    kernel = Gated(
        p.acc_dtype.name,
        Operand(p.dtype.name),
        value_of(p.activation),
        slope_of(p.activation) if p.d_a is not None else None,
        backward=True,
        guard=p.guard,
        d_a=p.d_a is not None,
        d_b=p.d_b is not None,
        one_rounding=store.device.one_rounding[p.acc_dtype.name],
    )
    if p.d_a is None and p.d_b is None:
        return
    needed = {name for name, _, access in kernel.buffers if access == "read"}
    arrays = {
        name: store.source(x)
        for name, x in (("grad", p.grad), ("a", p.a), ("b", p.b))
        if name in needed
    }
    outs = {name: store.target(x) for name, x in (("d_a", p.d_a), ("d_b", p.d_b)) if x is not None}
    _elementwise(store, kernel, p.shape, arrays, outs)


def _elementwise(
    store: Store,
    kernel: Gated,
    shape: tuple[int, ...],
    arrays: dict[str, View],
    outs: dict[str, View],
) -> None:
    """Record a gated kernel; what is not one run in memory is copied to one first."""
    equal("the arrays of a gate", shape, *(x.shape for x in (*arrays.values(), *outs.values())))
    size = prod(shape)
    if not size:
        return
    device = store.device
    orders = {_order(view) for view in (*arrays.values(), *outs.values())}
    as_one = len(orders) == 1 and None not in orders
    found: dict[str, View] = {}
    late: list[tuple[View, View]] = []
    for name, view in (*arrays.items(), *outs.items()):
        found[name] = view
        if not (as_one or view.contiguous):
            found[name] = fresh(device, shape, np.dtype(view.dtype), "a contiguous copy")
            if name in arrays:
                copy(store.commands, view, found[name])
            else:
                late.append((found[name], view))
    # A device binds a part of a large array at a time.
    itemsize = next(iter(found.values())).itemsize
    step = (device.binding_limit - 2 * device.alignment) // itemsize // 4 * 4
    for start in range(0, size, step):
        _elementwise_part(store, kernel, found, start, min(step, size - start))
    for source, out in late:
        copy(store.commands, source, out)


def _order(view: View) -> tuple[int, ...] | None:
    """The order of the axes of an array that is one run in memory; None of another."""
    order = sorted(
        (i for i, length in enumerate(view.shape) if length != 1), key=lambda i: -view.strides[i]
    )
    run = 1
    for axis in reversed(order):
        if view.strides[axis] != run:
            return None
        run *= view.shape[axis]
    return tuple(order)


def _elementwise_part(
    store: Store, kernel: Gated, found: dict[str, View], start: int, size: int
) -> None:
    device = store.device
    bound = {
        name: replace(view, shape=(size,), strides=(1,), offset=view.offset + start).bound(device)
        for name, view in found.items()
    }
    bindings = [bound[name][0] for name, _, _ in kernel.buffers]
    offsets = [
        bound[name][1] if name in bound else 0 for name in ("grad", "a", "b", "out", "d_a", "d_b")
    ]
    fours = size // 4 if all(offset % 4 == 0 for offset in offsets) else 0
    for wide, first, last in ((True, 0, fours), (False, 4 * fours, size)):
        if first < last:
            unit = 4 if wide else 1
            store.commands.dispatch(
                replace(kernel, operand=replace(kernel.operand, wide=wide)),
                bindings,
                (first, last, *(offset // unit for offset in offsets)),
                (*device.grid(-(-(last - first) // 256)), 1),
            )
