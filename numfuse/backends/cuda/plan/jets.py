"""A layer's jet as launches: a product of the rows of all members, and a pass over points.

The sums of a point's members lie in one stack, (..., M, members, N) in the accumulator's dtype: of
one tall product where the left operands are a stack too. A pass then makes all results of a point.
A backward's makes the gradients by the sums, Q, in their place and in the operands' dtype, and the
column sums of d_bias; d_a and its likes are products of Q and B', and d_b is one tall product of
the stack and Q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from numfuse import epilogues
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import jet_lines, jets
from numfuse.backends.cuda.kernels.elementwise import is_short
from numfuse.backends.cuda.plan import batches, fused, lower, places
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.product import NUMBER
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.backends.cuda.plan.second_order import zero
from numfuse.problem.jets import GRADS, KEPT, LEFT, MEMBERS, OUTS, SUMS, Q
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


# --- stacks ---------------------------------------------------------------------------------------
def _tall(x: View, members: int, n: int) -> View:
    """Return a stack (..., M, members * pitch) as a matrix with a row of N for each member."""
    *batch, m, width = x.shape
    strides = *x.strides[:-2], width // members, 1
    return replace(x, shape=(*batch, m * members, n), strides=strides)


def _members(
    p: JetProblem, x: View, names: tuple[str, str, str], n: int, members: int
) -> dict[str, View]:
    """Return the parts of a stack, by their names, each with its members as the leading axis."""
    width = x.shape[-1]
    pitch, steps = width // members, (*x.strides[:-2], width, 1)
    value, *rest = names
    found = {value: replace(x, shape=(*x.shape[:-1], n), strides=steps)}
    first = 1
    for name, count in zip(rest, (p.directions, p.seconds), strict=True):
        if count and first + count <= members:
            shape, at = (count, *x.shape[:-1], n), x.offset + first * pitch
            found[name] = replace(x, shape=shape, strides=(pitch, *steps), offset=at)
        first += count
    return found


def _stack(rec: Recorder, p: JetProblem, n: int, dtype: str) -> View:
    """Return a new stack of N columns for each point, with rows as the fast loads want them."""
    itemsize = rec.fresh((0,), dtype).itemsize
    return rec.fresh((*p.batch, p.m, p.members * tiling.pitch(n, itemsize)), dtype)


def _all_members(p: JetProblem) -> int:
    """Return the rows of a point in stacks of results and their cotangents."""
    return 1 + p.directions + p.seconds


def _spread(x: View, axes: int) -> View:
    """Return an array of members with `axes` axes between that of the members and the matrix."""
    missing = (1,) * (axes + 3 - len(x.shape))
    strides = x.strides[0], *(0 for _ in missing), *x.strides[1:]
    return replace(x, shape=(x.shape[0], *missing, *x.shape[1:]), strides=strides)


def _product(rec: Recorder, p: JetProblem, x: View, y: View, out: View, name: str) -> None:
    """Record out = X Y, where what `name` names has members, for all of these."""
    batch, acc = p.batch, format_of(p.acc_dtype)
    if name in MEMBERS:
        axes, batch = len(batch), (x.shape[0], *batch)
        x, out = _spread(x, axes), _spread(out, axes)
    batches.product(rec, x, y, batch, out, acc)


def _sums(rec: Recorder, p: JetProblem, bind: Bind, kept: bool = False) -> dict[str, View]:
    """Record the sums of all members; return them. Those that are `kept` are results."""
    acc, b = format_of(p.acc_dtype), bind("b")
    if p.shared:
        z = bind("pre") if kept else rec.fresh((*p.batch, p.m, p.n), acc)
        batches.product(rec, bind("a"), b, p.batch, z, acc)
        return {"z": z, "z_dot": _row_sums(rec, p, bind)}
    if p.stacked:
        whole = bind("pre") if kept else _stack(rec, p, p.n, acc)
        x, out = _tall(bind("a"), p.members, p.k), _tall(whole, p.members, p.n)
        batches.product(rec, x, b, p.batch, out, acc)
        return _members(p, whole, SUMS, p.n, p.members)
    if kept:
        found = {z: bind(x) for z, x in zip(SUMS, KEPT, strict=True) if x in p.arrays}
    else:
        found = _members(p, _stack(rec, p, p.n, acc), SUMS, p.n, p.members)
    for name, z in zip(LEFT, SUMS, strict=True):
        if name in p.arrays and z in found and 0 not in found[z].shape:
            _product(rec, p, bind(name), b, found[z], name)
    return found


def _row_sums(rec: Recorder, p: JetProblem, bind: Bind) -> View:
    """Record the sums of directions that are one row for all points: (D, ..., 1, N)."""
    b, acc = bind("b"), format_of(p.acc_dtype)
    own, v = b.shape[:-2], _spread(bind("a_dot"), len(b.shape) - 2)
    made = rec.fresh((p.directions, *own, 1, p.n), acc)
    batches.product(rec, v, b, (p.directions, *own), made, acc)
    return made


def _left(rec: Recorder, p: JetProblem, bind: Bind) -> View:
    """Return the left operands as a tall matrix, gathered where they are no stack."""
    a = bind("a")
    if p.stacked:
        return _tall(a, p.members, p.k)
    if p.members == 1:
        return a
    pitch = tiling.pitch(p.k, a.itemsize)
    whole = rec.fresh((*a.shape[:-1], p.members * pitch), a.dtype)
    for name, part in _members(p, whole, LEFT, p.k, p.members).items():
        if name in p.arrays and 0 not in part.shape:
            batches.copy(rec, bind(name), part)
    return _tall(whole, p.members, p.k)


# --- forward --------------------------------------------------------------------------------------
def _forward(rec: Recorder, p: JetProblem, bind: Bind) -> None:
    kept = "pre" in p.arrays
    arrays = _sums(rec, p, bind, kept)
    if p.stacked:
        written = _members(p, bind("out"), OUTS, p.n, _all_members(p))
    else:
        written = {name: bind(name) for name in OUTS}
    if kept and "bias" in p.arrays:
        written["pre"] = arrays["z"]
    _pass(rec, p, bind, arrays, written)


# --- backward -------------------------------------------------------------------------------------
def _backward(rec: Recorder, p: JetProblem, bind: Bind) -> None:
    acc = format_of(p.acc_dtype)
    if p.stacked:
        arrays = _members(p, bind("grad"), GRADS, p.n, _all_members(p))
    else:
        arrays = {name: bind(name) for name in GRADS if name in p.arrays}
    if "pre" in p.arrays and p.shared:
        arrays |= {"z": bind("pre"), "z_dot": _row_sums(rec, p, bind)}
    elif "pre" in p.arrays and p.stacked:
        arrays |= _members(p, bind("pre"), SUMS, p.n, p.members)
    elif "pre" in p.arrays:
        arrays |= {z: bind(x) for z, x in zip(SUMS, KEPT, strict=True) if x in p.arrays}
    elif any(name in SUMS for part in p.jet for name in part.inputs):
        arrays |= _sums(rec, p, bind)
    results, written = p.results, dict[str, View]()
    rows = None
    if p.shared and "d_b" in results:
        own = bind("b").shape[:-2]
        rows = rec.fresh((p.directions, *own, 1, p.n), format_of(p.dtype))
        pitch = tiling.pitch(p.n, rows.itemsize)
        q = rec.fresh((*p.batch, p.m, pitch), rows.dtype)
        written = {"d_z": replace(q, shape=(*p.batch, p.m, p.n))}
    elif any(name != "d_bias" and name not in p.slopes for name in results):
        q = _stack(rec, p, p.n, format_of(p.dtype))
        written = _members(p, q, Q, p.n, p.members)
    wholes = {name: rec.fresh(p.shape, acc) for name in p.slopes}
    _pass(rec, p, bind, arrays, written | wholes, bind("d_bias"), rows)
    if wholes:
        there = {f"whole_{name}": x for name, x in wholes.items()}
        fused.fused(rec, p.operand_sums(), lambda name: there.get(name) or bind(name))
    if not written:
        return
    if rows is not None:
        _shared_gradient(rec, p, bind, written["d_z"], rows)
    elif "d_b" in results:
        left, tall = _left(rec, p, bind), _tall(q, p.members, p.n)
        batches.product(rec, left.turned, tall, p.batch, bind("d_b"), acc, free=True)
    if p.stacked and not p.shared and "d_a" in results:
        out = _tall(bind("d_a"), p.members, p.k)
        batches.product(rec, _tall(q, p.members, p.n), bind("b").turned, p.batch, out, acc)
        return
    for name, of in zip(Q, LEFT, strict=True):
        if f"d_{of}" in results and name in written:
            _product(rec, p, written[name], bind("b").turned, bind(f"d_{of}"), of)


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


# --- the pass -------------------------------------------------------------------------------------
def _pass(
    rec: Recorder,
    p: JetProblem,
    bind: Bind,
    arrays: Mapping[str, View],
    written: Mapping[str, View],
    d_bias: View | None = None,
    rows: View | None = None,
) -> None:
    """Record a pass over points, from `arrays` to those that are written and to d_bias.

    To `rows`, (D, ..., 1, N), go the column sums of the gradients by directions' sums.
    """
    acc = format_of(p.acc_dtype)
    written = {name: x for name, x in written.items() if 0 not in x.shape}
    counts, weighted = (p.directions, p.seconds), "weights" in p.arrays
    names = frozenset(written)
    sums = d_bias is not None or rows is not None
    made = jet_lines.of(p.jet, names, p.backward, counts, weighted, sums, rows is not None)
    if not (written or made.sums):
        return
    given = dict(arrays)
    for name in ("bias", *p.operands):
        x = bind(name) if name in made.read else None
        if x is not None:
            number = x.dtype == NUMBER
            given[name] = fused.stored(rec, x, format_of(p.dtype), acc) if number else x
    views = {name: x for name, x in given.items() if name in made.read} | written
    steps, inner = dict[str, int](), dict[str, View]()
    for name, x in views.items():
        lead = int(bool(jet_lines.loop_of(name)))
        steps[name] = x.strides[0] * x.itemsize if lead else 0
        inner[name] = replace(x, shape=x.shape[lead:], strides=x.strides[lead:])
    spots = places.Places(p.batch, inner, range(len(p.batch)))
    operands = {name: spots.operand(name, *places.matrix(x)) for name, x in inner.items()}
    weights = rec.constant(p.arrays["weights"].astype(p.acc_dtype)) if made.weighted else 0
    short, sizes = is_short(acc, format_of(p.dtype)), (p.m, p.n, spots.count)
    how = rec.device.info, made, acc, operands, steps, weights, sizes, short
    launch, chunks = jets.launch(*how, batch=prod(p.batch))
    tables = 1 + len(made.added)
    table = rec.fresh((tables, prod(p.batch), chunks, p.n), acc) if made.sums else None
    for first, at in spots:
        if table is not None:
            at["sums"] = table.at(first * chunks * p.n)
        rec.launches((launch,), at)
    if table is None:
        return
    value = replace(table, shape=table.shape[1:], strides=table.strides[1:])
    if d_bias is not None:
        batches.join_columns(rec, value, p.batch, chunks, d_bias, acc)
    if rows is not None:
        count, *rest = p.directions * table.shape[1], *table.shape[2:]
        offset = table.offset + table.strides[0]
        others = replace(value, shape=(count, *rest), offset=offset)
        target = _spread(rows, len(p.batch))
        batches.join_columns(rec, others, (p.directions, *p.batch), chunks, target, acc)
