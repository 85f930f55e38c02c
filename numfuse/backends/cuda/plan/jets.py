"""A layer's jet as launches: a product of the rows of all members, and a pass over points.

The sums of a point's members lie in one stack, (..., M, members, N) in the accumulator's dtype: of
one tall product where the left operands are a stack too. A pass then makes all results of a point.
A backward's makes the gradients by the sums, Q, in their place and in the operands' dtype, and the
column sums of d_bias; d_a and its likes are products of Q and B', and d_b is one tall product of
the stack and Q.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from numfuse import epilogues
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels.jet_lines import WRITTEN_OUT
from numfuse.backends.cuda.plan import batches, fused, lower, members
from numfuse.backends.cuda.plan.jet_stacks import (
    all_members,
    members_of,
    pass_over_points,
    product,
    spread,
    stack,
    tall,
)
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.backends.cuda.plan.second_order import zero
from numfuse.problem.jets import GRADS, KEPT, LEFT, OUTS, SUMS, Q
from numfuse.problem.operands import format_of
from numfuse.problem.results import without_terms

if TYPE_CHECKING:
    from numfuse.problem.jets import JetProblem


def jet(rec: Recorder, p: JetProblem, bind: Bind) -> None:
    """Record a layer's jet, or its backward."""
    empty = without_terms(p)
    if empty is not None:
        for name in empty:
            zero(rec, bind(name))
        return
    (_backward if p.backward else _forward)(rec, p, bind)


# --- sums ---------------------------------------------------------------------------------------
def _sums(rec: Recorder, p: JetProblem, bind: Bind, kept: bool = False) -> dict[str, View]:
    """Record the sums of all members; return them. Those that are `kept` are results."""
    acc, b = format_of(p.acc_dtype), bind("b")
    if p.shared:
        z = bind("pre") if kept else rec.fresh((*p.batch, p.m, p.n), acc)
        batches.product(rec, bind("a"), b, p.batch, z, acc)
        return {"z": z, "z_dot": _row_sums(rec, p, bind)}
    if p.stacked:
        whole = bind("pre") if kept else stack(rec, p, p.n, acc)
        x, out = tall(bind("a"), p.members, p.k), tall(whole, p.members, p.n)
        batches.product(rec, x, b, p.batch, out, acc)
        return members_of(p, whole, SUMS, p.n, p.members)
    if kept:
        found = {z: bind(x) for z, x in zip(SUMS, KEPT, strict=True) if x in p.arrays}
    else:
        found = members_of(p, stack(rec, p, p.n, acc), SUMS, p.n, p.members)
    for name, z in zip(LEFT, SUMS, strict=True):
        if name in p.arrays and z in found and 0 not in found[z].shape:
            product(rec, p, bind(name), b, found[z], name)
    return found


def _row_sums(rec: Recorder, p: JetProblem, bind: Bind) -> View:
    """Record the sums of directions that are one row for all points: (D, ..., 1, N)."""
    b, acc = bind("b"), format_of(p.acc_dtype)
    own, v = b.shape[:-2], spread(bind("a_dot"), len(b.shape) - 2)
    made = rec.fresh((p.directions, *own, 1, p.n), acc)
    batches.product(rec, v, b, (p.directions, *own), made, acc)
    return made


def _left(rec: Recorder, p: JetProblem, bind: Bind) -> View:
    """Return the left operands as a tall matrix, gathered where they are no stack."""
    a = bind("a")
    if p.stacked:
        return tall(a, p.members, p.k)
    if p.members == 1:
        return a
    pitch = tiling.pitch(p.k, a.itemsize)
    whole = rec.fresh((*a.shape[:-1], p.members * pitch), a.dtype)
    for name, part in members_of(p, whole, LEFT, p.k, p.members).items():
        if name in p.arrays and 0 not in part.shape:
            batches.copy(rec, bind(name), part)
    return tall(whole, p.members, p.k)


# --- forward --------------------------------------------------------------------------------------
def _forward(rec: Recorder, p: JetProblem, bind: Bind) -> None:
    if members.forward(rec, p, bind):
        return
    kept = "pre" in p.arrays
    arrays = _sums(rec, p, bind, kept)
    if p.stacked:
        written = members_of(p, bind("out"), OUTS, p.n, all_members(p))
    else:
        written = {name: bind(name) for name in OUTS}
    if kept and "bias" in p.arrays:
        written["pre"] = arrays["z"]
    pass_over_points(rec, p, bind, arrays, written)


# --- backward -------------------------------------------------------------------------------------
def _backward(rec: Recorder, p: JetProblem, bind: Bind) -> None:
    acc = format_of(p.acc_dtype)
    arrays: dict[str, View] = {}
    if p.stacked and not p.behind:
        arrays = members_of(p, bind("grad"), GRADS, p.n, all_members(p))
    elif not p.stacked:
        arrays = {name: bind(name) for name in GRADS if name in p.arrays}
    if "pre" in p.arrays and p.shared:
        arrays |= {"z": bind("pre"), "z_dot": _row_sums(rec, p, bind)}
    elif "pre" in p.arrays and p.stacked:
        arrays |= members_of(p, bind("pre"), SUMS, p.n, p.members)
    elif "pre" in p.arrays:
        arrays |= {z: bind(x) for z, x in zip(SUMS, KEPT, strict=True) if x in p.arrays}
    elif any(name in SUMS for part in p.jet for name in part.inputs):
        arrays |= _sums(rec, p, bind)
    results, written = p.results, dict[str, View]()
    rows = None
    few = p.directions <= WRITTEN_OUT  # a pass adds up the columns of each in registers
    if p.shared and "d_b" in results and few:
        own = bind("b").shape[:-2]
        rows = rec.fresh((p.directions, *own, 1, p.n), format_of(p.dtype))
        pitch = tiling.pitch(p.n, rows.itemsize)
        q = rec.fresh((*p.batch, p.m, pitch), rows.dtype)
        written = {"d_z": replace(q, shape=(*p.batch, p.m, p.n))}
    elif any(name != "d_bias" and name not in p.slopes for name in results):
        there = bind("d_a") if p.by_sums else None
        q = stack(rec, p, p.n, format_of(p.dtype)) if there is None else there
        written = members_of(p, q, Q, p.n, p.members)
    wholes = {name: rec.fresh(p.shape, acc) for name in p.slopes}
    if not members.backward(rec, p, bind, arrays, written):
        if p.behind:
            arrays |= _grads(rec, p, bind)
        pass_over_points(rec, p, bind, arrays, written | wholes, bind("d_bias"), rows)
    if wholes:
        summed = {f"whole_{name}": x for name, x in wholes.items()}
        fused.fused(rec, p.operand_sums(), lambda name: summed.get(name) or bind(name))
    if not written:
        return
    if p.shared and "d_b" in results:
        rows = rows or _column_sums(rec, p, q)
        _shared_gradient(rec, p, bind, written["d_z"], rows)
    elif "d_b" in results:
        left, right = _left(rec, p, bind), tall(q, p.members, p.n)
        batches.product(rec, left.turned, right, p.batch, bind("d_b"), acc, free=True)
    if p.by_sums:
        return
    if p.stacked and not p.shared and "d_a" in results:
        out = tall(bind("d_a"), p.members, p.k)
        batches.product(rec, tall(q, p.members, p.n), bind("b").turned, p.batch, out, acc)
        return
    for name, of in zip(Q, LEFT, strict=True):
        if f"d_{of}" in results and name in written:
            product(rec, p, written[name], bind("b").turned, bind(f"d_{of}"), of)


def _grads(rec: Recorder, p: JetProblem, bind: Bind) -> dict[str, View]:
    """Record the gradients by a layer's results, of those by the sums of the layer behind."""
    acc, count = format_of(p.acc_dtype), all_members(p)
    pitch = tiling.pitch(p.n, p.acc_dtype.itemsize)
    whole = rec.fresh((*p.batch, p.m, count * pitch), acc)
    x, out = tall(bind("grad"), count, p.behind), tall(whole, count, p.n)
    batches.product(rec, x, bind("grad_dot").turned, p.batch, out, acc)
    return members_of(p, whole, GRADS, p.n, count)


def _column_sums(rec: Recorder, p: JetProblem, q: View) -> View:
    """Record the sums over the points of a stack's directions: (D, 1, N)."""
    width = q.shape[-1]
    points = replace(q, shape=(*q.shape[:-1], 1, width), strides=(*q.strides[:-1], width, 1))
    total = rec.fresh((1, width), q.dtype)
    batches.sum_to(rec, points, total, format_of(p.acc_dtype))
    pitch = width // p.members
    shape, strides = (p.directions, 1, p.n), (pitch, pitch, 1)
    return replace(total, shape=shape, strides=strides, offset=total.offset + pitch)


def _shared_gradient(rec: Recorder, p: JetProblem, bind: Bind, q: View, rows: View) -> None:
    """Record d_b = A' Q + V' S, of which S are the column sums of directions' gradients."""
    d_b, v, acc = bind("d_b"), bind("a_dot"), format_of(p.acc_dtype)
    parts = [rec.fresh(d_b.shape, acc) for _ in range(2)]
    batches.product(rec, bind("a").turned, q, p.batch, parts[0], acc, free=True)
    own = rows.shape[1:-2]
    steps = *rows.strides[1:-2], rows.strides[0], 1
    tall = replace(rows, shape=(*own, p.directions, p.n), strides=steps)
    v = replace(v, shape=(p.directions, p.k), strides=(v.strides[0], v.strides[-1]))
    batches.product(rec, v.turned, tall, own, parts[1], acc)
    made = epilogues.sum_of_terms(1)
    sources = dict(zip(made.inputs, parts, strict=True))
    lower.pointwise(rec, made, acc, format_of(p.dtype), sources, {"out": d_b})
