"""Hop 4: a problem becomes products over batches (`batches`), and passes beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from numfuse import epilogues
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import passes
from numfuse.backends.cuda.kernels.elementwise import is_short
from numfuse.backends.cuda.kernels.pointwise import Result, Source
from numfuse.backends.cuda.kernels.pointwise import launch as pass_over_elements
from numfuse.backends.cuda.plan import batches, places
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.language.curves import leaf
from numfuse.problem.shapes import equal

if TYPE_CHECKING:
    from numfuse.epilogues import Epilogue
    from numfuse.problem.product import (
        GatedBackwardProblem,
        GatedProblem,
        GemmBackwardProblem,
        GemmProblem,
    )
    from numfuse.problem.second_order import GemmTangentProblem

__all__ = [
    "Backward",
    "Bind",
    "backward",
    "forward",
    "gate",
    "gate_backward",
    "guarded",
    "layer_of",
    "over_fields",
    "pointwise",
    "slopes",
]

#: How a run gets the view of a problem's array, by the name of the operand that it is of.
Bind = Callable[[str, ndarray], View]


def forward(rec: Recorder, p: GemmProblem, bind: Bind) -> None:
    """out = act(a @ b + bias) + residual."""
    batches.product(
        rec,
        bind("a", p.a),
        bind("b", p.b),
        p.batch,
        bind("out", p.out),
        p.acc_dtype.name,
        epilogue=layer_of(p),
        bias=None if p.bias is None else bind("bias", p.bias),
        extra=None if p.residual is None else bind("residual", p.residual),
        pre=None if p.pre is None else bind("pre", p.pre),
    )


def layer_of(p: GemmProblem | GemmTangentProblem) -> Epilogue:
    """Return the epilogue of a forward."""
    if p.residual is not None:
        return epilogues.residual_layer()
    return epilogues.layer(p.activation.curve)


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
            self.d_a = out.rows
            if self.d_a is None:
                apart = rec.fresh(out.shape, out.dtype)
                self.late = apart, out
                self.d_a = apart.rows


def _last(view: View | None) -> View | None:
    """The matrix of a batch of one."""
    if view is None:
        return None
    return replace(view, shape=view.shape[-2:], strides=view.strides[-2:])


def backward(rec: Recorder, p: GemmBackwardProblem, bind: Bind) -> None:
    """Record the gradients of a layer; a residual's is a sum over grad alone."""
    if p.d_a is not None or p.d_b is not None or p.d_bias is not None:
        _gradients(rec, p, bind)
    if p.d_residual is not None:
        source, target = bind("grad", p.grad), bind("d_residual", p.d_residual)
        batches.sum_to(rec, source, target, p.acc_dtype.name)


def _gradients(rec: Recorder, p: GemmBackwardProblem, bind: Bind) -> None:
    """Record grad_pre = grad * act'(pre), and what is made of it."""
    acc = p.acc_dtype.name
    made = epilogues.layer(p.activation.curve).select("out").backward().select("d_z")
    linear = made["d_z"] is leaf("grad")
    v = Backward.of(rec, p, bind, not linear and p.pre is None)
    grad_pre = v.grad
    if not linear:
        # rows as the fast loads want them
        pitch = tiling.pitch(p.n, p.dtype.itemsize)
        whole = rec.fresh((*v.batch, v.m, pitch), p.dtype.name)
        grad_pre = replace(whole, shape=(*v.batch, v.m, p.n))
        slopes(rec, v, p.n, p.k, acc, guarded(p, made), grad_pre)
    elif v.d_bias is not None:
        slopes(rec, v, p.n, p.k, acc, made, None)
    if v.d_a is not None and v.b is not None:
        batches.product(rec, grad_pre, v.b.turned, v.batch, v.d_a, acc)
    if v.d_b is not None and v.a is not None:
        batches.product(rec, v.a.turned, grad_pre, v.batch, v.d_b, acc, free=True)
    if v.late is not None:
        batches.copy(rec, *v.late)


def slopes(
    rec: Recorder,
    v: Backward,
    n: int,
    k: int,
    acc: str,
    epilogue: Epilogue,
    grad_pre: View | None,
) -> None:
    """Record grad_pre = grad * act'(pre), and d_bias from the sums of its columns.

    Without a `grad_pre` it is grad itself that is summed.
    """
    m, batch, d_bias = v.m, v.batch, v.d_bias
    # places of one bias are neighbours
    outer, inner = places.split(batch, () if d_bias is None else d_bias.shape[:-2])
    order = outer + inner
    table, rows = None, 0
    if m and n and prod(batch):
        views = {"extra": v.grad}
        if grad_pre is not None:
            views["out"] = grad_pre
        if grad_pre is not None and v.pre is None:
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
                epilogue=epilogue,
                sums=d_bias is not None,
            )
            if made is not None:
                table, rows = made
        else:
            if v.pre is not None and grad_pre is not None:
                views["pre"] = v.pre
            there = places.Places(batch, views, order)
            operands = {
                name: there.operand(name, *places.matrix(view)) for name, view in views.items()
            }
            if d_bias is not None:
                rows = passes.chunks(m)
                table = rec.fresh((prod(batch[i] for i in order), rows, n), acc)
            launch = passes.slopes(
                rec.device.info,
                epilogue.without("bias"),
                acc,
                operands.get("pre"),
                operands["extra"],
                operands.get("out"),
                m,
                n,
                there.count,
                table is not None,
            )
            for first, at in there:
                if table is not None:
                    at["sums"] = table.at(first * rows * n)
                rec.launches((launch,), at)
    if d_bias is None:
        return
    depth = prod(batch[i] for i in inner) * rows
    if table is None:
        table = rec.fresh((0,), acc)
        depth = 0
    batches.join(rec, table, depth, d_bias, acc)


def gate(rec: Recorder, p: GatedProblem, bind: Bind) -> None:
    """out = act(a) * b."""
    over_fields(rec, p, bind, epilogues.gate(p.activation.curve), ("out",))


def gate_backward(rec: Recorder, p: GatedBackwardProblem, bind: Bind) -> None:
    """d_a = grad * b * act'(a), d_b = grad * act(a)."""
    made = epilogues.gate(p.activation.curve).backward()
    over_fields(rec, p, bind, guarded(p, made), ("d_a", "d_b"))


def guarded(p: Any, epilogue: Epilogue) -> Epilogue:
    """Return the epilogue as a problem wants it."""
    return epilogue.guarded() if p.guard else epilogue


def over_fields(
    rec: Recorder, p: Any, bind: Bind, epilogue: Epilogue, results: tuple[str, ...], **fields: str
) -> None:
    """Record one pass over the arrays of a problem.

    `fields` names the problem's field of an input that has another name; what is not there is left
    out of the epilogue.
    """
    field = {name: fields.get(name, name) for name in epilogue.inputs}
    absent = [name for name in epilogue.inputs if getattr(p, field[name]) is None]
    there = [name for name in results if getattr(p, name) is not None]
    if not there or not prod(p.shape):
        return
    made = epilogue.without(*absent)
    made = made.select(*there)
    sources = {name: bind(field[name], getattr(p, field[name])) for name in made.inputs}
    views = {name: bind(name, getattr(p, name)) for name in there}
    pointwise(rec, made, p.acc_dtype.name, p.dtype.name, sources, views)


def pointwise(
    rec: Recorder,
    epilogue: Epilogue,
    accumulator: str,
    storage: str,
    sources: dict[str, View],
    results: dict[str, View],
    twice: dict[str, str] | None = None,
) -> None:
    """Record one pass over arrays of one shape: an epilogue's results, by their names.

    Parameters
    ----------
    rec : Recorder
    epilogue : Epilogue
    accumulator, storage : str
        The dtype in which all is computed, and that of the problem.
    sources, results : dict
    twice : dict, optional
        {name in `results`: the epilogue's name} of a result that is stored a second time.
    """
    names = {slot: (twice or {}).get(slot, slot) for slot in results}
    size = prod(next(iter(results.values())).shape)
    if not size:
        return
    found, late = _as_one(rec, sources | results, results)
    launch = pass_over_elements(
        rec.device.info,
        epilogue,
        accumulator,
        [Source(name, name, found[name].dtype) for name in sources],
        [Result(name, slot, found[slot].dtype) for slot, name in names.items()],
        size,
        min(view.aligned(()) for view in found.values()),
        is_short(accumulator, storage),
    )
    rec.launches((launch,), {name: view.at() for name, view in found.items()})
    for copied, out in late:
        batches.copy(rec, copied, out)


def _as_one(
    rec: Recorder, views: dict[str, View], outs: Collection[str]
) -> tuple[dict[str, View], list[tuple[View, View]]]:
    """The arrays as runs of memory in one order; copies of those that are none, to be copied back.

    Arrays of one order need no copy, whatever that order is.
    """
    equal("the arrays of a pass", *(view.shape for view in views.values()))
    orders = {view.order for view in views.values()}
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
