"""Hop 4: a problem becomes products over batches (`batches`), and passes beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from numpy import ndarray

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import elementwise, gated, passes
from numfuse.backends.cuda.plan import batches
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.problem.shapes import equal

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.expr import Expr
    from numfuse.problem.product import (
        GatedBackwardProblem,
        GatedProblem,
        GemmBackwardProblem,
        GemmProblem,
    )

__all__ = [
    "Backward",
    "Bind",
    "backward",
    "forward",
    "gate",
    "gate_backward",
    "slope_of",
    "slopes",
    "value_of",
]

#: How a run gets the view of a problem's array, by the name of the operand that it is of.
Bind = Callable[[str, ndarray], View]


def value_of(activation: Activation) -> Expr | None:
    """The graph of an activation; None of the identity."""
    graph = activation.trace(0)
    return None if graph.op == "x" else graph


def slope_of(activation: Activation) -> Expr | None:
    """The graph of its derivative; None where that is 1 everywhere."""
    graph = activation.trace(1)
    return None if graph.op == "const" and graph.payload == 1 else graph


def forward(rec: Recorder, p: GemmProblem, bind: Bind) -> None:
    """out = act(a @ b + bias) + residual."""
    batches.product(
        rec,
        bind("a", p.a),
        bind("b", p.b),
        p.batch,
        bind("out", p.out),
        p.acc_dtype.name,
        function=value_of(p.activation),
        bias=None if p.bias is None else bind("bias", p.bias),
        extra=None if p.residual is None else bind("residual", p.residual),
        pre=None if p.pre is None else bind("pre", p.pre),
    )


@dataclass
class Backward:
    """The arrays of a backward; where one `b` and one `bias` serve the batch, it is folded into M.

    The problem has folded it where that takes no copy. Here the others are copied: the sums of d_b
    and d_bias are then made in the order of the rows, whatever the strides are.
    """

    m: int
    batch: tuple[int, ...]
    grad: View
    #: Where they are read: for the pre-activation, or for d_b.
    a: View | None
    b: View | None
    bias: View | None
    pre: View | None
    d_a: View | None
    d_b: View | None
    d_bias: View | None
    #: What is copied to the caller's d_a at the end.
    late: tuple[View, View] | None = None

    @classmethod
    def of(cls, rec: Recorder, p: GemmBackwardProblem, bind: Bind, recomputed: bool) -> Backward:
        def view(name: str, x: ndarray | None, needed: bool = True) -> View | None:
            return bind(name, x) if x is not None and needed else None

        made = cls(
            p.m,
            p.batch,
            bind("grad", p.grad),
            view("a", p.a, recomputed or p.d_b is not None),
            view("b", p.b, recomputed or p.d_a is not None),
            view("bias", p.bias, recomputed),
            view("pre", p.pre),
            view("d_a", p.d_a),
            view("d_b", p.d_b),
            view("d_bias", p.d_bias),
        )
        shared = all(length == 1 for x in (p.b, p.bias) if x is not None for length in x.shape[:-2])
        if p.batch and shared and all(p.batch):
            made._fold(rec)
        return made

    def _fold(self, rec: Recorder) -> None:
        self.m *= prod(self.batch)
        self.batch = ()
        self.grad = batches.packed_rows(rec, self.grad)
        self.a = None if self.a is None else batches.packed_rows(rec, self.a)
        self.pre = None if self.pre is None else batches.packed_rows(rec, self.pre)
        self.b, self.bias = _last(self.b), _last(self.bias)
        self.d_b, self.d_bias = _last(self.d_b), _last(self.d_bias)
        if self.d_a is not None:
            out = self.d_a
            self.d_a = batches.as_rows(out)
            if self.d_a is None:
                apart = rec.fresh(out.shape, out.dtype)
                self.late = apart, out
                self.d_a = batches.as_rows(apart)


def _last(view: View | None) -> View | None:
    """The matrix of a batch of one."""
    if view is None:
        return None
    return replace(view, shape=view.shape[-2:], strides=view.strides[-2:])


def backward(rec: Recorder, p: GemmBackwardProblem, bind: Bind) -> None:
    """grad_pre = grad * act'(pre), and what is made of it."""
    acc = p.acc_dtype.name
    slope = slope_of(p.activation)
    products = p.d_a is not None or p.d_b is not None
    if not products and p.d_bias is None:
        return
    v = Backward.of(rec, p, bind, slope is not None and p.pre is None)
    grad_pre = v.grad
    if slope is not None:
        # rows as the fast loads want them
        pitch = tiling.pitch(p.n, p.dtype.itemsize)
        whole = rec.fresh((*v.batch, v.m, pitch), p.dtype.name)
        grad_pre = replace(whole, shape=(*v.batch, v.m, p.n))
        slopes(rec, v, p.n, p.k, acc, slope, p.guard, grad_pre)
    elif v.d_bias is not None:
        slopes(rec, v, p.n, p.k, acc, None, False, None)
    if v.d_a is not None and v.b is not None:
        batches.product(rec, grad_pre, batches.turned(v.b), v.batch, v.d_a, acc)
    if v.d_b is not None and v.a is not None:
        batches.product(rec, batches.turned(v.a), grad_pre, v.batch, v.d_b, acc, free=True)
    if v.late is not None:
        batches.copy(rec, *v.late)


def slopes(
    rec: Recorder,
    v: Backward,
    n: int,
    k: int,
    acc: str,
    slope: Expr | None,
    guard: bool,
    grad_pre: View | None,
) -> None:
    """Record grad_pre = grad * act'(pre), and d_bias from the sums of its columns."""
    m, batch, d_bias = v.m, v.batch, v.d_bias
    # places of one bias are neighbours
    outer, inner = batches.split(batch, () if d_bias is None else d_bias.shape[:-2])
    order = outer + inner
    table, rows = None, 0
    if m and n and prod(batch):
        views = {"extra": v.grad}
        if grad_pre is not None:
            views["out"] = grad_pre
        if slope is not None and v.pre is None:
            assert v.a is not None and v.b is not None
            views |= {"x": v.a, "y": v.b}
            if v.bias is not None:
                views["bias"] = v.bias
            made = batches.launch(
                rec,
                m,
                n,
                k,
                batch,
                order,
                views,
                acc,
                epilogue="slope",
                function=slope,
                guard=guard,
                sums=d_bias is not None,
            )
            if made is not None:
                table, rows = made
        else:
            function = None
            if v.pre is not None and slope is not None and grad_pre is not None:
                views["pre"] = v.pre
                function = elementwise.scalar(slope, acc, grad_pre.dtype, guard=guard)
            places = batches.Places(batch, views, order)
            strides = {
                name: (view.dtype, (places.step[name], *batches.matrix(view)))
                for name, view in views.items()
            }
            if d_bias is not None:
                rows = passes.chunks(m)
                table = rec.fresh((prod(batch[i] for i in order), rows, n), acc)
            launch = passes.slopes(
                rec.device.info,
                acc,
                function,
                strides.get("pre"),
                strides["extra"],
                strides.get("out"),
                m,
                n,
                places.count,
                table is not None,
            )
            for first, at in places:
                if table is not None:
                    at["sums"] = table.buffer, table.offset + first * rows * n * table.itemsize
                rec.launches((launch,), at)
    if d_bias is None:
        return
    depth = prod(batch[i] for i in inner) * rows
    if table is None:
        table = rec.fresh((0,), acc)
        depth = 0
    batches.join(rec, table, prod(batch[i] for i in outer), depth, d_bias, acc)


def gate(rec: Recorder, p: GatedProblem, bind: Bind) -> None:
    """out = act(a) * b."""
    size = prod(p.shape)
    if not size:
        return
    views = {"a": bind("a", p.a), "b": bind("b", p.b), "out": bind("out", p.out)}
    found, late = _as_one(rec, views, ("out",))
    launch = gated.forward(
        rec.device.info,
        p.dtype.name,
        p.acc_dtype.name,
        value_of(p.activation),
        size,
        min(batches.alignment(view, ()) for view in found.values()),
    )
    rec.launches((launch,), {name: (v.buffer, v.offset) for name, v in found.items()})
    for source, out in late:
        batches.copy(rec, source, out)


def gate_backward(rec: Recorder, p: GatedBackwardProblem, bind: Bind) -> None:
    """d_a = grad * b * act'(a), d_b = grad * act(a)."""
    size = prod(p.shape)
    if not size or (p.d_a is None and p.d_b is None):
        return
    views = {"grad": bind("grad", p.grad), "a": bind("a", p.a)}
    outs = []
    if p.d_a is not None:
        views |= {"b": bind("b", p.b), "d_a": bind("d_a", p.d_a)}
        outs.append("d_a")
    if p.d_b is not None:
        views["d_b"] = bind("d_b", p.d_b)
        outs.append("d_b")
    found, late = _as_one(rec, views, outs)
    launch = gated.backward(
        rec.device.info,
        p.dtype.name,
        p.acc_dtype.name,
        value_of(p.activation),
        slope_of(p.activation),
        p.guard,
        (p.d_a is not None, p.d_b is not None),
        size,
        min(batches.alignment(view, ()) for view in found.values()),
    )
    rec.launches((launch,), {name: (v.buffer, v.offset) for name, v in found.items()})
    for source, out in late:
        batches.copy(rec, source, out)


def _as_one(
    rec: Recorder, views: dict[str, View], outs: Sequence[str]
) -> tuple[dict[str, View], list[tuple[View, View]]]:
    """The arrays as runs of memory in one order; copies of those that are none, to be copied back.

    Arrays of one order need no copy, whatever that order is.
    """
    equal("the arrays of a gate", *(view.shape for view in views.values()))
    orders = {_order(view) for view in views.values()}
    if len(orders) == 1 and None not in orders:
        return views, []
    found: dict[str, View] = {}
    late = []
    for name, view in views.items():
        found[name] = view
        if not view.contiguous:
            found[name] = rec.fresh(view.shape, view.dtype)
            if name in outs:
                late.append((found[name], view))
            else:
                batches.copy(rec, view, found[name])
    return found, late


def _order(view: View) -> tuple[int, ...] | None:
    """The order of the axes of an array that is one run of memory; None of another."""
    order = sorted(
        (i for i, length in enumerate(view.shape) if length != 1), key=lambda i: -view.strides[i]
    )
    run = 1
    for axis in reversed(order):
        if view.strides[axis] != run:
            return None
        run *= view.shape[axis]
    return tuple(order)
