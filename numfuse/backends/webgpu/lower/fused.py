"""An epilogue of a user's own, with products or without, and the products that follow it.

The sums over one left factor are made by the shader that ends in the epilogue; any others come from
temporaries in the accumulator's dtype. Where that takes more arrays than a device binds, all sums
are temporaries, and the results come in as many passes as there have to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.lower.elementwise import elementwise, zeroed
from numfuse.backends.webgpu.lower.places import BINDINGS, Cut, Places, tile_of
from numfuse.backends.webgpu.lower.products import group, launch, sum_of_products
from numfuse.backends.webgpu.lower.sums import add_up, join, planes_of
from numfuse.backends.webgpu.shaders.epilogues import FACTORS
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.epilogues import Epilogue
from numfuse.language.curves import inputs, leaf, rebuilt
from numfuse.language.graph import bottom_up, topological
from numfuse.language.operations import TRUTH

if TYPE_CHECKING:
    from numfuse.problem.forms import Factor
    from numfuse.problem.fused import FusedProblem

#: Where to write each of the results, and whether it is added to what is there.
_Outs: TypeAlias = Mapping[str, tuple[Region, bool]]


def fused(store: Store, p: FusedProblem, outs: _Outs) -> None:
    """Record the epilogue of sums and operands, and what is made of its results."""
    if zeroed(store, p, outs):
        return
    if p.summed and prod(p.shape) == p.n >= 2 * tiling.LONG_ROW and not (p.sums or p.products):
        _long_row(store, p, outs)
        return
    found = _factors(store, p)
    made = {name: outs[name][0] for name in p.stored}
    made |= {name: x for name, (x, new) in found.items() if new}
    planes: dict[str, Region] = {}
    for name in p.summed:
        target = outs[name][0]
        if _is_whole(p, target):
            planes[name], made[name] = planes_of(store, p.shape, target, p.acc_dtype)
    if made or p.summed:
        _Pass(store, p, made, outs).record()
    for name, x in planes.items():
        target, add = outs[name]
        join(store, x, 1, prod(x.shape) // prod(target.shape), target, add)
    if p.products:
        _gradients(store, p, {name: x for name, (x, _) in found.items()}, outs)


def _long_row(store: Store, p: FusedProblem, outs: _Outs) -> None:
    """Record an epilogue of one long row, and its totals, as that of a matrix and of the rest."""
    length = tiling.LONG_ROW
    whole, inner = p.n // length * length, dict(outs)
    for name in p.summed:
        out, add = outs[name]
        if out.dtype != p.acc_dtype.name:
            inner[name] = fresh(store.device, out.shape, p.acc_dtype, "a total"), add
    for first, last, rows in ((0, whole, whole // length), (whole, p.n, 1)):
        columns = (last - first) // rows

        def form(x: Any, columns: int = columns, rows: int = rows) -> dict[str, Any]:
            (*lead, _, _), (*steps, _, step) = x.shape, x.strides
            return {"shape": (*lead, rows, columns), "strides": (*steps, columns * step, step)}

        arrays = dict(p.arrays)
        for name, x in p.arrays.items():
            if x.shape[-1] != 1:
                arrays[name] = as_strided(x[..., first:last], **form(x))
        there = {}
        for name, (out, add) in inner.items():
            if out.shape[-1] != 1:
                out = replace(out.part(len(out.shape) - 1, first, last), **form(out))
            there[name] = out, add or (first > 0 and name in p.summed)
        if columns:
            fused(store, replace(p, m=rows, n=columns, arrays=arrays), there)
    for name, (out, _) in inner.items():
        if out is not outs[name][0]:
            copy(store.commands, out, outs[name][0])


def _is_whole(p: FusedProblem, target: Region) -> bool:
    """Whether a summed result is summed over the batch alone."""
    return target.shape[-2:] == (p.m, p.n)


def _factors(store: Store, p: FusedProblem) -> dict[str, tuple[Region, bool]]:
    """Return where the results that are factors of products are, and whether they are to be made.

    Those that are stand in one buffer, if the device binds that at once.
    """
    used = dict.fromkeys(f.name for terms in p.products.values() for pair in terms for f in pair)
    found: dict[str, tuple[Region, bool]] = {}
    new = []
    for name, expr in p.epilogue.results:
        if name in used:
            x = p.arrays.get(str(expr.payload)) if expr.op == "input" else None
            if x is not None and x.shape == p.shape:
                found[name] = store.source(x), False
            else:
                new.append(name)
    size = prod(p.shape) * p.acc_dtype.itemsize
    stacks = [new] if size * len(new) <= store.device.room else [[name] for name in new]
    for names in stacks:
        if names:
            every = fresh(store.device, (len(names), *p.shape), p.acc_dtype, "gradients of sums")
            for i, name in enumerate(names):
                part = replace(every.part(0, i, i + 1), shape=p.shape, strides=every.strides[1:])
                found[name] = part, True
    return found


class _Pass:
    """Records results of the epilogue, and sums of their columns and rows."""

    def __init__(
        self,
        store: Store,
        p: FusedProblem,
        made: Mapping[str, Region],
        outs: _Outs,
    ) -> None:
        self.store, self.p, self.made, self.outs = store, p, made, outs
        self.results, self.epilogue = list(dict.fromkeys([*made, *p.summed])), p.epilogue
        self.arrays = {x: store.source(p.arrays[x]) for x in p.epilogue.operands if x in p.arrays}
        #: The sums that the shader makes: the most that have one left factor.
        self.own: tuple[str, ...] = ()
        by_left: dict[str, tuple[str, ...]] = {}
        for name, pairs in p.sums.items():
            if len(pairs) == 1:
                left = pairs[0][0]
                same = by_left[left] = (*by_left.get(left, ()), name)
                if len(self.own) < len(same) < len(FACTORS):
                    self.own = same
        self._sums(name for name in p.sums if name not in self.own)

    def record(self) -> None:
        """Record all results, in one pass if the device has the bindings for it."""
        if self._results(self.results):
            return
        self._sums(self.own)
        self.own = ()
        self._bound_once()
        self._in_parts(self.results)

    def _in_parts(self, results: list[str]) -> None:
        if self._results(results):
            return
        if len(results) == 1:
            self._shorten(results[0])
            self._in_parts(results)
            return
        for half in results[: len(results) // 2], results[len(results) // 2 :]:
            self._in_parts(half)

    def _shorten(self, result: str) -> None:
        """Record a part of a result as a temporary, which takes the place of its operands."""
        store, p, made = self.store, self.p, self.epilogue
        limit, part = store.device.limits[BINDINGS], None
        most = 1
        for e in topological([made[result]]):
            count = len(inputs([e]))
            if e.args and e.op not in TRUTH and most < count < limit:
                most, part = count, e
        if part is None:
            raise ValueError(
                f"the epilogue {made.name!r} must have at most as many arrays as "
                f"{store.device.name} binds, {BINDINGS} = {limit}"
            )
        name = f"part_{len(self.arrays)}"
        out = fresh(store.device, p.shape, p.acc_dtype, "a part of an epilogue")
        alone = Epilogue(made.name, (), inputs([part]), ((name, part),), made.ties)
        formula = Formula.whole(alone).choose(name)
        elementwise(store, formula, self.arrays, {name: out}, p.acc_dtype)
        self.arrays[name] = out
        graphs = bottom_up(made.graphs, lambda e, x: leaf(name) if e is part else rebuilt(e, x))
        names = [name for name, _ in made.results]
        results = tuple(zip(names, graphs, strict=True))
        self.epilogue = Epilogue(made.name, (), inputs(graphs), results, made.ties)

    def _sums(self, names: Any) -> None:
        """Record sums as temporaries, which are operands then."""
        store, p = self.store, self.p
        for name in names:
            pairs = [(p.arrays[a], p.arrays[b]) for a, b in p.sums[name]]
            factors = [(store.source(a), store.source(b)) for a, b in pairs]
            out = self.arrays[name] = fresh(store.device, p.shape, p.acc_dtype, f"the sum {name}")
            sum_of_products(store, p.batch, p.acc_dtype, factors, out)

    def _bound_once(self) -> None:
        """Copy the operands of one element to one buffer, and those that are results too."""
        device, results = self.store.device, list(self.made.values())
        single = [name for name, x in self.arrays.items() if prod(x.shape) == 1]
        line = fresh(device, (len(single),), self.p.dtype, "operands of one element")
        for name, x in self.arrays.items():
            made = None
            if name in single and x.dtype == line.dtype:
                i = single.index(name)
                made = replace(line, offset=i, shape=x.shape, strides=(0,) * len(x.shape))
            elif x in results:
                made = fresh(device, x.shape, self.p.dtype, "an operand that is overwritten")
            if made is not None:
                copy(self.store.commands, x, made)
                self.arrays[name] = made

    def _results(self, results: Sequence[str]) -> bool:
        """Record some results; False where the device binds fewer arrays."""
        store, p = self.store, self.p
        made = {name: self.made[name] for name in results if name in self.made}
        summed = [name for name in results if name not in self.made]
        columns = tuple(name for name in summed if self.outs[name][0].shape[-2] == 1 != p.m)
        across = tuple(name for name in summed if name not in columns)
        formula = Formula.whole(self.epilogue).choose(*made, summed=columns, across=across)
        own = tuple(name for name in self.own if name in formula.inputs)
        if not (own or summed):
            return elementwise(store, formula, self.arrays, made, p.acc_dtype)
        lefts = [p.arrays[p.sums[name][0][0]] for name in own[:1]]
        factors = [store.source(x) for x in [*lefts, *(p.arrays[p.sums[x][0][1]] for x in own)]]
        count = max(1, len(own))
        tile = tile_of(store.device, p.m, p.n, p.acc_dtype, factors=count, bare=not summed)
        forms = {
            "column_sums": (len(columns), *p.batch, -(-p.m // tile.block_m), p.n),
            "row_sums": (len(across), *p.batch, -(-p.n // tile.block_n), p.m),
        }
        sums = {
            x: fresh(store.device, form, p.acc_dtype, x) for x, form in forms.items() if form[0]
        }
        k, places = p.k if own else 0, Places.of(p.batch, p.batch)
        how = (p.m, p.n, k), places, Cut(k), tile, p.acc_dtype, formula, self.arrays, made
        if not launch(store, *how, factors, sums, accumulators=own):
            return False
        for of, names in ("column_sums", columns), ("row_sums", across):
            for i, name in enumerate(names):
                x = sums[of].part(0, i, i + 1)
                x = replace(x, shape=sums[of].shape[1:], strides=sums[of].strides[1:])
                self._join(name, x, of == "row_sums")
        return True

    def _join(self, name: str, x: Region, across: bool) -> None:
        """Record a summed result: the sum of its partials, of columns or, `across`, of rows."""
        store, p = self.store, self.p
        target, add = self.outs[name]
        target = target.turned if across else target
        if target.shape[-1] != x.shape[-1]:  # along the rows too: what is left is small
            _, over, _ = x.summed_to(target)
            line = fresh(store.device, (*over.shape[:-1], x.shape[-1]), p.acc_dtype, "column sums")
            add_up(store, x, line, p.acc_dtype, False)
            x = line
        add_up(store, x, target, p.acc_dtype, add)


def _gradients(store: Store, p: FusedProblem, made: Mapping[str, Region], outs: _Outs) -> None:
    """Record the gradients of factors, sums of products of results and arrays."""

    def factor(f: Factor) -> Region:
        x = made[f.name] if f.name in made else store.source(p.arrays[f.name])
        return x.turned if f.turned else x

    terms = {name: [(factor(x), factor(y)) for x, y in of] for name, of in p.products.items()}
    # Those of right factors, over one read of the left one.
    right = [name for name, of in p.products.items() if len(of) == 1 and of[0][0].turned]
    shapes = {outs[name][0].shape for name in right}
    if len(right) > 1 and len(shapes) == 1 and all(map(prod, shapes)):
        (x, _), factors = terms[right[0]][0], [terms[name][0][1] for name in right]
        if group(store, x, factors, p.batch, [outs[name] for name in right], p.acc_dtype):
            terms = {name: of for name, of in terms.items() if name not in right}
    for name, pairs in terms.items():
        batch, free = p.batch, p.products[name][0][0].turned
        if len(pairs) > 1 and not free and p.n <= p.m:
            # One product over all: the columns of the left factors, the rows of the right ones. (Of
            # few rows the sums cost less than putting the right factors side by side.)
            whole = _stacked(store, [x for x, _ in pairs], len(batch), False)
            other = whole and _stacked(store, [y for _, y in pairs], len(batch), True)
            if whole is not None and other is not None:
                batch, pairs = (len(pairs), *batch), [(whole, other)]
        sum_of_products(store, batch, p.acc_dtype, pairs, *outs[name], free=free)


def _stacked(store: Store, regions: Sequence[Region], axes: int, copied: bool) -> Region | None:
    """Return regions of one shape as one, with an axis more in front; `copied` lets it be new.

    None where they do not lie so that one binding has them all.
    """
    first, second, *_ = regions
    if any(x.shape != first.shape or x.dtype != first.dtype for x in regions):
        return None
    missing = axes + 2 - len(first.shape)
    step = second.offset - first.offset
    shape = (len(regions), *(1,) * missing, *first.shape)
    found = replace(first, shape=shape, strides=(step, *(0,) * missing, *first.strides))
    same = all(
        x.buffer is first.buffer
        and x.strides == first.strides
        and x.offset == first.offset + i * step
        for i, x in enumerate(regions)
    )
    if same and found.span <= store.device.room:
        return found
    if not copied or prod(shape) * first.itemsize > store.device.room:
        return None
    turned = first.turned
    made = fresh(store.device, (*shape[:-2], *turned.shape[-2:]), np.dtype(first.dtype), "factors")
    for i, x in enumerate(regions):
        part = made.part(0, i, i + 1)
        part = replace(part, shape=turned.shape, strides=made.strides[1 + missing :])
        copy(store.commands, x.turned, part)
    return made.turned
