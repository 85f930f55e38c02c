"""Stacks of the members of points as views, and a jet's pass over points as launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import jet_lines, jets
from numfuse.backends.cuda.kernels.elementwise import is_short
from numfuse.backends.cuda.plan import batches, fused, places
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.product import NUMBER
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.problem.jets import MEMBERS
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.problem.jets import JetProblem


# --- stacks ---------------------------------------------------------------------------------------
def tall(x: View, members: int, n: int) -> View:
    """Return a stack (..., M, members * pitch) as a matrix with a row of N for each member."""
    *batch, m, width = x.shape
    strides = *x.strides[:-2], width // members, 1
    return replace(x, shape=(*batch, m * members, n), strides=strides)


def members_of(
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


def stack(rec: Recorder, p: JetProblem, n: int, dtype: str) -> View:
    """Return a new stack of N columns for each point, with rows as the fast loads want them."""
    itemsize = rec.fresh((0,), dtype).itemsize
    return rec.fresh((*p.batch, p.m, p.members * tiling.pitch(n, itemsize)), dtype)


def all_members(p: JetProblem) -> int:
    """Return the rows of a point in stacks of results and their cotangents."""
    return 1 + p.directions + p.seconds


def spread(x: View, axes: int) -> View:
    """Return an array of members with `axes` axes between that of the members and the matrix."""
    missing = (1,) * (axes + 3 - len(x.shape))
    strides = x.strides[0], *(0 for _ in missing), *x.strides[1:]
    return replace(x, shape=(x.shape[0], *missing, *x.shape[1:]), strides=strides)


def product(rec: Recorder, p: JetProblem, x: View, y: View, out: View, name: str) -> None:
    """Record out = X Y, where what `name` names has members, for all of these."""
    batch, acc = p.batch, format_of(p.acc_dtype)
    if name in MEMBERS:
        axes, batch = len(batch), (x.shape[0], *batch)
        x, out = spread(x, axes), spread(out, axes)
    batches.product(rec, x, y, batch, out, acc)


# --- the pass -------------------------------------------------------------------------------------
def pass_over_points(
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
    written = {name: x for name, x in written.items() if 0 not in x.shape}
    counts, weighted = (p.directions, p.seconds), "weights" in p.arrays
    names = frozenset(written)
    sums = d_bias is not None or rows is not None
    made = jet_lines.of(p.jet, names, p.backward, counts, weighted, sums, rows is not None)
    record_pass(rec, p, bind, made, arrays, written, d_bias, rows)


def record_pass(
    rec: Recorder,
    p: JetProblem,
    bind: Bind,
    made: jet_lines.Pass,
    arrays: Mapping[str, View],
    written: Mapping[str, View],
    d_bias: View | None = None,
    rows: View | None = None,
    point_sums: Any = None,
) -> None:
    """Record what a pass computes; see `pass_over_points`, and `Pass.table` for `point_sums`."""
    acc = format_of(p.acc_dtype)
    if not (written or made.sums):
        return
    given = dict(arrays)
    for name in ("bias", *p.operands):
        x = bind(name) if name in made.read else None
        if x is not None:
            number = x.dtype == NUMBER
            given[name] = fused.stored(rec, x, format_of(p.dtype), acc) if number else x
    views = {name: x for name, x in given.items() if name in made.read} | dict(written)
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
    launch, chunks = jets.launch(*how, batch=prod(p.batch), table=point_sums)
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
        target = spread(rows, len(p.batch))
        batches.join_columns(rec, others, (p.directions, *p.batch), chunks, target, acc)
