"""Hop 4: a problem becomes products over batches (`batches`), and passes beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from numfuse import epilogues
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import passes
from numfuse.backends.cuda.kernels.elementwise import is_short
from numfuse.backends.cuda.kernels.pointwise import Result, Source
from numfuse.backends.cuda.kernels.pointwise import launch as pass_over_elements
from numfuse.backends.cuda.plan import batches, places
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.language.curves import leaf
from numfuse.problem.fields import FIELD_OF, FIELDS
from numfuse.problem.operands import format_of
from numfuse.problem.shapes import equal, shares_weights

if TYPE_CHECKING:
    from numfuse.epilogues import Epilogue
    from numfuse.problem.product import GemmBackwardProblem, GemmProblem
    from numfuse.problem.second_order import GemmTangentProblem

__all__ = [
    "Backward",
    "Bind",
    "backward",
    "forward",
    "gate",
    "guarded",
    "layer",
    "layer_of",
    "pointwise",
    "slopes",
]

#: From the name of a problem's field to the view of its array; None of one that is not there.
Bind = Callable[[str], Any]


def forward(rec: Recorder, p: GemmProblem, bind: Bind) -> None:
    """Record out = act(a @ b + bias) + residual."""
    layer(rec, p, bind, bind("out"), bind("pre"), layer_of(p))


def layer(
    rec: Recorder, p: Any, bind: Bind, out: View, pre: View | None, epilogue: Epilogue
) -> None:
    """Record an epilogue of a @ b, bias and residual."""
    batches.product(
        rec,
        bind("a"),
        bind("b"),
        p.batch,
        out,
        format_of(p.acc_dtype),
        epilogue=epilogue,
        bias=bind("bias"),
        extra=bind("residual"),
        pre=pre,
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
        wanted = {
            "a": recomputed or p.d_b is not None,
            "b": recomputed or p.d_a is not None,
            "bias": recomputed,
        }
        names = ("grad", "a", "b", "bias", "pre", "d_a", "d_b", "d_bias")
        views: Any = {name: bind(name) if wanted.get(name, True) else None for name in names}
        made = cls(p.m, p.batch, **views)
        if p.batch and shares_weights(p) and all(p.batch):
            made._fold(rec)
        return made

    def _fold(self, rec: Recorder) -> None:
        self.m, self.batch = self.m * prod(self.batch), ()
        for name in ("grad", "a", "pre"):
            setattr(self, name, _each(lambda x: batches.packed_rows(rec, x), getattr(self, name)))
        for name in ("b", "bias", "d_b", "d_bias"):
            setattr(self, name, _each(batches.matrix_of, getattr(self, name)))
        out = self.d_a
        if out is not None and out.rows is None:
            apart = rec.fresh(out.shape, out.dtype)
            self.late, out = (apart, out), apart
        self.d_a = None if out is None else out.rows


def _each(made: Callable[[View], View], view: View | None) -> View | None:
    return None if view is None else made(view)


def backward(rec: Recorder, p: GemmBackwardProblem, bind: Bind) -> None:
    """Record the gradients of a layer; a residual's is a sum over grad alone."""
    if p.d_a is not None or p.d_b is not None or p.d_bias is not None:
        _gradients(rec, p, bind)
    if p.d_residual is not None:
        batches.sum_to(rec, bind("grad"), bind("d_residual"), format_of(p.acc_dtype))


def _gradients(rec: Recorder, p: GemmBackwardProblem, bind: Bind) -> None:
    """Record grad_pre = grad * act'(pre), and what is made of it."""
    acc = format_of(p.acc_dtype)
    made = epilogues.layer(p.activation.curve).select("out").backward().select("d_z")
    linear = made["d_z"] is leaf("grad")
    v = Backward.of(rec, p, bind, not linear and p.pre is None)
    grad_pre = v.grad
    if not linear:
        # rows as the fast loads want them
        pitch = tiling.pitch(p.n, p.dtype.itemsize)
        whole = rec.fresh((*v.batch, v.m, pitch), format_of(p.dtype))
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
    table: View | None = None
    rows = 0
    if m and n and prod(batch):
        views = {"extra": v.grad}
        if grad_pre is not None:
            views["out"] = grad_pre
            given = {"pre": v.pre} if v.pre is not None else {"x": v.a, "y": v.b, "bias": v.bias}
            views |= {name: view for name, view in given.items() if view is not None}
        if "x" in views:
            sums = d_bias is not None
            made = batches.launch(
                rec, m, n, k, batch, order, views, acc, epilogue=epilogue, sums=sums
            )
            table, rows = made or (None, 0)
        else:
            there = places.Places(batch, views, order)
            operands = {
                name: there.operand(name, *places.matrix(view)) for name, view in views.items()
            }
            length = passes.chunk(m, n)
            if d_bias is not None:
                rows = -(-m // length)
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
                length,
                d_bias is not None,
            )
            for first, at in there:
                if table is not None:
                    at["sums"] = table.at(first * rows * n)
                rec.launches((launch,), at)
    if d_bias is not None:
        depth = prod(batch[i] for i in inner) * rows
        batches.join(rec, table or rec.fresh((0,), acc), depth, d_bias, acc)


def gate(kind: str, rec: Recorder, p: Any, bind: Bind) -> None:
    """Record a gate, or its derivative, as one pass over the arrays of its problem.

    An input that is not there is left out of the epilogue.
    """
    there = [name for name in FIELDS[kind][1] if getattr(p, name) is not None]
    if not there or not prod(p.shape):
        return
    whole = epilogues.GATES[kind](p.activation.curve)
    field = {name: FIELD_OF.get(name, name) for name in whole.inputs}
    absent = [name for name in whole.inputs if getattr(p, field[name]) is None]
    made = (guarded(p, whole) if hasattr(p, "guard") else whole).without(*absent).select(*there)
    sources = {name: bind(field[name]) for name in made.inputs}
    results = {name: bind(name) for name in there}
    pointwise(rec, made, format_of(p.acc_dtype), format_of(p.dtype), sources, results)


def guarded(p: Any, epilogue: Epilogue) -> Epilogue:
    """Return the epilogue as a problem wants it."""
    return epilogue.guarded() if p.guard else epilogue


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
