"""A layer's jet: a product of the rows of all members, and a pass over points.

The sums of a point's members lie in one stack, (..., M, members, N) in the accumulator's dtype: of
one tall product where the left operands are a stack too. A pass then makes all results of a point.
A backward's makes the gradients by the sums, Q, in their place, and the column sums of d_bias; d_a
and its likes are products of Q and B', and d_b is one tall product of the stack and Q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.lower.elementwise import zeroed
from numfuse.backends.webgpu.lower.places import BINDINGS, repeated
from numfuse.backends.webgpu.lower.products import product
from numfuse.backends.webgpu.lower.sums import add_up
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.jets import JetPass, Member, loop_of
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.problem.jets import GRADS, KEPT, LEFT, MEMBERS, OUTS, SUMS, Q
from numfuse.problem.operands import format_of
from numfuse.problem.shapes import merge_axes
from numfuse.runtime.strided import contiguous, walk

if TYPE_CHECKING:
    from numfuse.problem.jets import JetProblem

#: Where to write each of the results, and whether it is added to what is there.
_Outs: TypeAlias = Mapping[str, tuple[Region, bool]]


def jet(store: Store, p: JetProblem, outs: _Outs) -> None:
    """Record a layer's jet, or its backward."""
    if zeroed(store, p, outs):
        return
    (_backward if p.backward else _forward)(store, p, outs)


# --- stacks -------------------------------------------------------------------------------------
def _tall(x: Region, members: int) -> Region:
    """Return a stack (..., M, members * columns) as a matrix of a row for each member."""
    *batch, m, n = x.shape
    n //= members
    return replace(x, shape=(*batch, m * members, n), strides=(*x.strides[:-2], n, 1))


def _members(p: JetProblem, x: Region, names: tuple[str, str, str], n: int) -> dict[str, Region]:
    """Return the parts of a stack, by their names, each with its members as the leading axis."""
    steps = *x.strides[:-1], 1
    counts = p.directions, p.seconds
    value, *rest = names
    found = {value: replace(x, shape=(*x.shape[:-1], n), strides=steps)}
    first = 1
    for name, count in zip(rest, counts, strict=True):
        if count and (first + count) * n <= x.shape[-1]:
            shape = (count, *x.shape[:-1], n)
            at = x.offset + first * n
            found[name] = replace(x, shape=shape, strides=(n, *steps), offset=at)
        first += count
    return found


def _spread(x: Region, axes: int) -> Region:
    """Return an array of members with `axes` axes between that of the members and the matrix."""
    missing = (1,) * (axes + 3 - len(x.shape))
    strides = x.strides[0], *(0 for _ in missing), *x.strides[1:]
    return replace(x, shape=(x.shape[0], *missing, *x.shape[1:]), strides=strides)


def _product(
    store: Store, p: JetProblem, x: Region, y: Region, out: Region, name: str, add: bool = False
) -> None:
    """Record out = X Y, or out += X Y; where `name` has members, for all of these."""
    batch = p.batch
    if name in MEMBERS:
        axes, batch = len(batch), (x.shape[0], *batch)
        x, out = _spread(x, axes), _spread(out, axes)
    product(store, x, y, batch, {"out": out}, p.acc_dtype, add=add)


def _sums(store: Store, p: JetProblem, kept: Mapping[str, Region]) -> dict[str, Region]:
    """Record the sums of all members; return them. Those that are `kept` are results."""
    b = store.source(p.arrays["b"])
    shape = (*p.batch, p.m, p.members * p.n)
    if p.shared:
        value = kept.get("pre") or fresh(store.device, p.shape, p.acc_dtype, "sums")
        product(store, store.source(p.arrays["a"]), b, p.batch, {"out": value}, p.acc_dtype)
        return {"z": value, "z_dot": _row_sums(store, p)}
    if p.stacked:
        whole = kept.get("pre") or fresh(store.device, shape, p.acc_dtype, "sums")
        x, out = _tall(store.source(p.arrays["a"]), p.members), _tall(whole, p.members)
        product(store, x, b, p.batch, {"out": out}, p.acc_dtype)
        return _members(p, whole, SUMS, p.n)
    if kept:
        found = {z: kept[x] for z, x in zip(SUMS, KEPT, strict=True) if x in kept}
    else:
        found = _members(p, fresh(store.device, shape, p.acc_dtype, "sums"), SUMS, p.n)
    for name, z in zip(LEFT, SUMS, strict=True):
        if name in p.arrays and z in found and 0 not in found[z].shape:
            _product(store, p, store.source(p.arrays[name]), b, found[z], name)
    return found


def _row_sums(store: Store, p: JetProblem) -> Region:
    """Record the sums of directions that are one row for all points: (D, ..., 1, N)."""
    b, v = store.source(p.arrays["b"]), store.source(p.arrays["a_dot"])
    own = b.shape[:-2]
    made = fresh(store.device, (p.directions, *own, 1, p.n), p.acc_dtype, "sums of directions")
    batch = p.directions, *own
    product(store, _spread(v, len(own)), b, batch, {"out": made}, p.acc_dtype)
    return made


# --- forward ------------------------------------------------------------------------------------
def _forward(store: Store, p: JetProblem, outs: _Outs) -> None:
    kept = {name: outs[name][0] for name in KEPT if name in outs}
    arrays = _sums(store, p, kept)
    written = {name: x for name, (x, _) in outs.items() if name.startswith("out")}
    if p.stacked:
        written = _members(p, written["out"], OUTS, p.n)
    if kept and "bias" in p.arrays:
        written["pre"] = arrays["z"]
    _Pass(store, p, arrays, written).record()


# --- backward -----------------------------------------------------------------------------------
def _backward(store: Store, p: JetProblem, outs: _Outs) -> None:
    n = p.n
    arrays = {x: store.source(p.arrays[x]) for x in (*GRADS, *KEPT) if x in p.arrays}
    if p.stacked:
        arrays |= _members(p, arrays["grad"], GRADS, n)
    if "pre" in arrays and p.shared:
        arrays |= {"z": arrays["pre"], "z_dot": _row_sums(store, p)}
    elif "pre" in arrays and p.stacked:
        arrays |= _members(p, arrays["pre"], SUMS, n)
    elif "pre" in arrays:
        arrays |= {z: arrays[x] for z, x in zip(SUMS, KEPT, strict=True) if x in arrays}
    elif any(name in SUMS for part in p.jet for name in part.inputs):
        arrays |= _sums(store, p, {})
    q, written = None, dict[str, Region]()
    apart = p.directions if p.shared and "d_b" in outs else 0
    if apart:
        q = fresh(store.device, (*p.batch, p.m, n), p.acc_dtype, "gradients of sums")
        written = {"d_z": q}
    elif any(name != "d_bias" and name not in p.slopes for name in outs):
        shape = (*p.batch, p.m, p.members * n)
        q = fresh(store.device, shape, p.acc_dtype, "gradients of sums")
        written = _members(p, q, Q, n)
    wholes = _wholes(store, p, outs)
    tables = _Pass(
        store, p, arrays, written | wholes, "d_bias" in outs or apart > 0, apart
    ).record()
    for name, whole in wholes.items():
        out, add = outs[name]
        if whole is not out:
            add_up(store, whole, out, p.acc_dtype, add)
    if tables is not None and "d_bias" in outs:
        add_up(store, _part(tables, 0), outs["d_bias"][0], p.acc_dtype, outs["d_bias"][1])
    if q is None:
        return
    b = store.source(p.arrays["b"])
    if apart and tables is not None:
        _shared_gradient(store, p, q, tables, *outs["d_b"])
    tall = _tall(q, 1 if apart else p.members)
    if "d_b" in outs and not apart:
        stack = _tall(_stack(store, p), p.members)
        out, add = outs["d_b"]
        product(store, stack.turned, tall, p.batch, {"out": out}, p.acc_dtype, free=True, add=add)
    if p.stacked and not p.shared and "d_a" in outs:
        out, add = outs["d_a"]
        into = {"out": _tall(out, p.members)}
        product(store, tall, b.turned, p.batch, into, p.acc_dtype, add=add)
        return
    for name, left in zip(Q, LEFT, strict=True):
        if f"d_{left}" in outs and name in written:
            out, add = outs[f"d_{left}"]
            _product(store, p, written[name], b.turned, out, left, add)


def _part(x: Region, i: int) -> Region:
    """Return an element of the first axis."""
    return replace(x.part(0, i, i + 1), shape=x.shape[1:], strides=x.strides[1:])


def _shared_gradient(
    store: Store, p: JetProblem, q: Region, tables: Region, out: Region, add: bool
) -> None:
    """Record d_b = A' Q + V' S, of which S are the column sums of directions' gradients."""
    b, v = store.source(p.arrays["b"]), store.source(p.arrays["a_dot"])
    own, acc = b.shape[:-2], p.acc_dtype
    rows = fresh(store.device, (p.directions, *own, 1, p.n), acc, "sums of directions")
    found = _spread(rows, len(p.batch))
    add_up(store, tables.part(0, 1, 1 + p.directions), found, acc, False)
    steps = *rows.strides[1:-2], rows.strides[0], 1
    tall = replace(rows, shape=(*own, p.directions, p.n), strides=steps)
    v = replace(v, shape=(p.directions, p.k), strides=(v.strides[0], v.strides[-1]))
    left = store.source(p.arrays["a"]).turned
    target = out
    if out.dtype != acc.name:
        target = fresh(store.device, out.shape, acc, "a sum of products")
    product(store, left, q, p.batch, {"out": target}, acc, free=True, add=add)
    product(store, v.turned, tall, own, {"out": target}, acc, add=True)
    if target is not out:
        copy(store.commands, target, out)


def _wholes(store: Store, p: JetProblem, outs: _Outs) -> dict[str, Region]:
    """Return where the gradients of operands go, before they are summed to their shapes.

    Those that are results as they are go there; the others have one buffer, if it is bound at once.
    """
    found, new = dict[str, Region](), []
    for name in p.slopes:
        out, add = outs[name]
        if out.shape == p.shape and not add:
            found[name] = out
        else:
            new.append(name)
    size = prod(p.shape) * p.acc_dtype.itemsize
    for names in [new] if size * len(new) <= store.device.room else [[name] for name in new]:
        if names:
            shape = len(names), *p.shape
            every = fresh(store.device, shape, p.acc_dtype, "gradients of operands")
            for i, name in enumerate(names):
                part = every.part(0, i, i + 1)
                found[name] = replace(part, shape=p.shape, strides=every.strides[1:])
    return found


def _stack(store: Store, p: JetProblem) -> Region:
    """Return the left operands as a stack, gathered where they are none."""
    a = store.source(p.arrays["a"])
    if p.stacked:
        return a
    shape = (*a.shape[:-1], p.members * p.k)
    made = fresh(store.device, shape, np.dtype(p.dtype), "a stack of left operands")
    for name, part in _members(p, made, LEFT, p.k).items():
        if name in p.arrays and 0 not in part.shape:
            copy(store.commands, store.source(p.arrays[name]), part)
    return made


# --- the pass -----------------------------------------------------------------------------------
class _Pass:
    """Records a pass over points: from `arrays` to those that are written, and column sums."""

    def __init__(
        self,
        store: Store,
        p: JetProblem,
        arrays: Mapping[str, Region],
        written: Mapping[str, Region],
        sums: bool = False,
        apart: int = 0,
    ) -> None:
        self.store, self.p, self.sums, self.apart = store, p, sums, apart
        self.written = {name: x for name, x in written.items() if 0 not in x.shape}
        names = {*self.written, *(["d_z_dot"] if apart else ())}
        made = p.jet.parts(names, p.backward, p.directions, p.seconds)
        #: The formulas hold none of these, which live as long as they are asked.
        self._made = made
        self.parts = tuple(
            (name, Formula.whole(x).choose(*(y for y, _ in x.results))) for name, x in made.items()
        )
        used = {name for _, formula in self.parts for name in formula.inputs}
        used |= {"grad_ddot"} if "grad_bent" in used else set()
        given = dict(arrays)
        for name in ("bias", *p.operands):
            if name in used and name in p.arrays:
                given[name] = store.source(p.arrays[name])
        self.read = {name: x for name, x in given.items() if name in used and 0 not in x.shape}

    def record(self) -> Region | None:
        """Record the pass; return the column sums, if they are asked for.

        They are (1 + apart, ..., chunks, N): of the points, then of each direction.
        """
        store, p = self.store, self.p
        device, acc = store.device, format_of(p.acc_dtype)
        arrays = {**self.read, **self.written}
        points = tiling.points(p.m, p.n) if self.sums else 1
        chunks = -(-p.m // points)
        table = None
        if self.sums:
            shape = 1 + self.apart, *p.batch, chunks, p.n
            table = fresh(device, shape, p.acc_dtype, "column sums")
        bound, places = self._bound(arrays)
        weighted = "weights" in p.arrays and self._bends()
        limit = device.limits[BINDINGS] - weighted - self.sums
        if len(bound) > limit:
            arrays = self._gathered(arrays)
            bound, places = self._bound(arrays)
        bindings = {name: binding for name, (binding, *_) in bound.items()}
        if weighted:
            bindings["weights"] = store.numbers(p.arrays["weights"])
        values = {"m": p.m, "n": p.n, "chunks": chunks, "points": points}
        values |= {"directions": p.directions, "seconds": p.seconds}
        values["plane"] = prod(p.batch) * chunks * p.n
        steps = []
        for name, x in arrays.items():
            lead = int(bool(loop_of(name)))
            row, column = repeated(x.shape[-2:], x.strides[-2:])
            values |= {f"{name}_row": row, f"{name}_column": column}
            if lead:
                values[f"{name}_member"] = x.strides[0]
            inner = replace(x, shape=x.shape[lead:], strides=x.strides[lead:])
            steps.append(inner.batch_steps(len(p.batch)))
        steps.append(tuple(s * chunks * p.n for s in contiguous(p.batch)))
        lengths, merged = merge_axes(p.batch, *steps)
        count = lengths[-1] if lengths else 1
        for name, own in zip(arrays, merged, strict=False):
            values[f"{name}_place"] = own[-1] if own else 0
        totals = ["d_z", *(x for x in p.slopes if x in self.written)]
        members = tuple(Member(n, x.dtype, places[n][0]) for n, x in arrays.items())
        shader = JetPass(
            acc, p.activation.name, self.parts, members,
            tuple((name, dtype, written) for name, (_, dtype, written) in bound.items()),
            p.backward, tuple(totals), p.directions > 0, p.seconds > 0, weighted, self.sums,
            self.apart, one_rounding=device.one_rounding[acc],
        )  # fmt: skip
        if table is not None:
            bindings["column_sums"], first = table.bound(device)
        values["total"] = total = count * chunks * p.n
        grid = (*device.grid(-(-total // 256)), 1)
        for at in walk(lengths[:-1], *merged):
            *each, sums = at
            values["column_sums"] = sums + (first if table is not None else 0)
            for (name, (_, start)), more in zip(places.items(), each, strict=True):
                values[name] = start + more
            store.commands.dispatch(shader, bindings, values, grid)
        return table

    def _bends(self) -> bool:
        """Whether directions add to second derivatives."""
        names = {x for part, formula in self.parts for x in (part, *formula.inputs)}
        return "grad_bent" in names if self.p.backward else "bend" in names

    def _bound(self, arrays: Mapping[str, Region]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is bound, each once: (binding, dtype, whether it is written) by its name.

        With it comes, by array, the name of its binding and where it begins there.
        """
        device = self.store.device
        found: dict[str, Any] = {}
        places: dict[str, Any] = {}
        owners: dict[Any, str] = {}
        # The parts of a stack that is larger than what is bound whole lie in the range of all.
        ranges: dict[int, tuple[int, int]] = {}
        for x in arrays.values():
            binding, _ = x.bound(device)
            key, last = id(x.buffer), binding.offset + binding.size
            low, high = ranges.get(key, (binding.offset, last))
            ranges[key] = min(low, binding.offset), max(high, last)
        for name, x in arrays.items():
            binding, first = x.bound(device)
            low, high = ranges[id(x.buffer)]
            if high - low <= device.binding_limit:
                first += (binding.offset - low) // x.itemsize
                binding = binding._replace(offset=low, size=high - low)
            part = id(x.buffer), binding.offset, binding.size, x.dtype
            owner = owners.setdefault(part, f"buffer_{len(owners)}")
            before = found.get(owner, (None, None, False))[2]
            found[owner] = binding, x.dtype, before or name in self.written
            places[name] = owner, first
        return found, places

    def _gathered(self, arrays: dict[str, Region]) -> dict[str, Region]:
        """Return arrays of which the saved sums are one stack, by copies."""
        p, store = self.p, self.store
        shape = (*p.batch, p.m, p.members * p.n)
        whole = fresh(store.device, shape, p.acc_dtype, "saved sums")
        parts = _members(p, whole, SUMS, p.n)
        for name in SUMS:
            if name in arrays:
                copy(store.commands, arrays[name], parts[name])
                arrays[name] = parts[name]
        return arrays
