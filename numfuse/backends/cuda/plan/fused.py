"""An epilogue of sums and operands as launches, and the products that follow it.

Two sums of one left factor are made by one product that ends in the epilogue, where a tier has
such a product (`_Elements._pair`). Else every sum but the last is made in memory, in the
accumulator's dtype. The last one's product ends in the epilogue where a product's kernel can give
it all that it reads (`_Elements._end`); else its sum is made in memory too, and one pass over
elements does the rest. Sums of columns are made on the way. The products that follow are those of
`plan.sums`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

from numfuse.backends.cuda.kernels import pointwise, rows
from numfuse.backends.cuda.kernels.elementwise import is_short
from numfuse.backends.cuda.kernels.pointwise import Result, Source
from numfuse.backends.cuda.plan import batches, places, sums
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.product import NUMBER
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.backends.cuda.plan.second_order import zero
from numfuse.backends.cuda.plan.tiers import stay_whole, takes_pairs, takes_rich
from numfuse.epilogues import Epilogue
from numfuse.language.curves import inputs as leaves_of
from numfuse.language.curves import leaf, rebuilt, replace_leaves
from numfuse.language.graph import Expr, bottom_up, topological
from numfuse.problem.results import without_terms

if TYPE_CHECKING:
    from numfuse.problem.fused import FusedProblem


def fused(rec: Recorder, p: FusedProblem, bind: Bind) -> None:
    """Record the results of an epilogue, and the products that they are factors of."""
    nothing = without_terms(p)
    for name in p.zeroed if nothing is None else nothing:
        zero(rec, bind(name))
    if nothing is not None:
        return
    results = {name: bind(name) for name in p.stored}
    if p.products:
        results |= sums.factors(rec, p, bind, results)
    summed = {name: bind(name) for name in p.summed}
    if not (results or summed):
        return
    if p.sums:
        _Elements(rec, p, bind, dict(results), summed).record()
    else:
        how = p.epilogue, {x: bind(x) for x in p.epilogue.operands}, results
        if summed or not _flat(rec, p, *how):
            _pass(rec, p, *how, summed)
    if p.products:
        sums.record(rec, p, bind, results)


# --- the epilogue ---------------------------------------------------------------------------------
#: What an epilogue makes, by the names of a product.
_RESULTS = "out", "pre", "pre1"
#: A result: its graph, and where it is stored.
_Made = tuple[Expr, View]


class _Elements:
    """An epilogue of which less is left to do with every product that is recorded."""

    def __init__(
        self,
        rec: Recorder,
        p: FusedProblem,
        bind: Bind,
        results: dict[str, View],
        summed: dict[str, View],
    ) -> None:
        self.rec, self.p, self.bind = rec, p, bind
        #: The arrays of results that are not made yet, and those to which results are summed.
        self.results, self.summed = results, summed
        self.graphs = {name: e for name, e in p.epilogue.results if name in results | summed}
        #: The arrays that are there, by the names of inputs.
        self.sources: dict[str, View] = {name: bind(name) for name in p.epilogue.operands}
        self.acc = p.acc_dtype.name

    def record(self) -> None:
        """Record everything."""
        if self._pair():
            return
        products: list[tuple[str, tuple[str, str]]] = []
        for name in self.p.epilogue.accumulators:
            *first, last = self.p.sums[name]
            for i, pair in enumerate(first):
                before = f"{name}_before{i}"
                self._replace(leaf(name), leaf(name) + leaf(before))
                products.append((before, pair))
            products.append((name, last))
        made = self._alternate_sums(products)
        for name, pair in products:
            if name not in made:
                self._product(name, pair)
        if self.graphs:
            epilogue = self._epilogue(self.graphs.items())
            sources = {name: self.sources[name] for name in epilogue.operands}
            how = epilogue, sources, self.results
            if self.summed or not _flat(self.rec, self.p, *how):
                _pass(self.rec, self.p, *how, self.summed)

    def _replace(self, old: Expr, new: Expr) -> None:
        """Put a graph in the place of another one."""

        def made(e: Expr, args: Sequence[Expr]) -> Expr:
            return new if e is old else rebuilt(e, args) if args else e

        graphs = bottom_up(self.graphs.values(), made)
        self.graphs = dict(zip(self.graphs, graphs, strict=True))

    def _epilogue(
        self, results: Iterable[tuple[str, Expr]], accumulators: tuple[str, ...] = ()
    ) -> Epilogue:
        results, whole = tuple(results), self.p.epilogue
        used = leaves_of(e for _, e in results)
        names = dict.fromkeys([*whole.operands, *used])  # in the order of the whole
        operands = tuple(x for x in names if x in used and x not in accumulators)
        return Epilogue(whole.name, accumulators, operands, results, whole.ties)

    def _drop(self, names: Iterable[str]) -> None:
        """Leave out results that are made."""
        for name in names:
            self.graphs.pop(name, None)
            self.results.pop(name, None)
            self.summed.pop(name, None)

    # --- products ---------------------------------------------------------------------------
    def _pair(self) -> bool:
        """Record two sums of one left factor and all results as one product, if a tier can."""
        p, storage = self.p, self.p.dtype.name
        names = p.epilogue.accumulators
        pairs = [pair for name in names for pair in p.sums[name]]
        if not takes_pairs(storage, self.rec.device.info, self.rec.precision_of(storage)):
            return False
        if self.summed or not 1 <= len(self.results) <= 3 or not len(names) == len(pairs) == 2:
            return False
        if pairs[0][0] != pairs[1][0] or any(x.dtype != storage for x in self.results.values()):
            return False
        used = [x for x in leaves_of(self.graphs.values()) if x not in names]
        lines = [x for x in used if self.sources[x].shape[-2] == 1]
        wide = [x for x in used if x not in lines]
        if len(lines) > 2 or len(wide) > 1:
            return False
        if any(self.sources[x].dtype not in (storage, NUMBER) for x in used):
            return False
        slots = dict(zip((*lines, *wide), ("bias", "bias1")[: len(lines)], strict=False))
        slots |= dict.fromkeys(wide, "extra")
        made = [(e, self.results[x]) for x, e in self.graphs.items()]
        # of arrays whose columns alternate that with the even ones comes first
        if self.bind(pairs[1][1]).woven_with(self.bind(pairs[0][1])) is not None:
            names, pairs = names[::-1], pairs[::-1]
        if len(made) == 2 and made[1][1].woven_with(made[0][1]) is not None:
            made.reverse()
        factors = dict(zip(("x", "y", "y1"), (*pairs[0], pairs[1][1]), strict=True))
        return self._launch(names, factors, made, slots)[1] >= 0

    def _alternate_sums(self, products: list[tuple[str, tuple[str, str]]]) -> set[str]:
        """Record sums over alternate columns of one array, two at once; return their names.

        Alone, each would read a copy. Where none would be made, the last sum's product ends in all
        that it can.
        """
        made: set[str] = set()
        storage, info = self.p.dtype.name, self.rec.device.info
        cores = storage == "float32" and takes_pairs(storage, info, self.rec.precision_of(storage))
        if not (cores or takes_rich(storage, info)):
            return made
        for (name, (x, y)), (other, (x1, y1)) in itertools.permutations(products, 2):
            alike = x == x1 and self.bind(y).woven_with(self.bind(y1)) is not None
            if not alike or made & {name, other}:
                continue
            views = [self.rec.fresh(self.p.shape, self.acc) for _ in range(2)]
            sums = list(zip((leaf(name), leaf(other)), views, strict=True))
            factors = {"x": x, "y": y, "y1": y1}
            if self._launch((name, other), factors, sums, {})[1] >= 0:
                made |= {name, other}
                self.sources |= dict(zip((name, other), views, strict=True))
        return made

    def _launch(
        self,
        accumulators: Sequence[str],
        factors: dict[str, str],
        made: list[_Made],
        slots: dict[str, str],
        *,
        sums: bool = False,
    ) -> tuple[View | None, int]:
        """Record a product of sums and the operands that `slots` names; see `batches.launch`."""
        p = self.p
        sources = dict(zip(accumulators, ("z", "z1"), strict=False)) | slots
        leaves = {leaf(x): leaf(slot) for x, slot in sources.items()}
        before, there = self.rec.mark(), dict(self.sources)
        results = zip(_RESULTS, replace_leaves([e for e, _ in made], leaves), strict=False)
        views = dict(zip(_RESULTS, [view for _, view in made], strict=False))
        views |= {slot: self._array(x) for x, slot in slots.items()}
        views |= {slot: self.bind(x) for slot, x in factors.items()}
        k = views["x"].shape[-1]
        how = (p.m, p.n, k), p.batch, range(len(p.batch)), views, self.acc
        epilogue = self._epilogue(results, ("z", "z1")[: len(accumulators)])
        # a sum has the bits that it has beside another one, in one product
        sizes = self.rec.precision_of(p.dtype.name), p.m, p.n, k, prod(p.batch)
        whole = p.width > 1 and stay_whole(p.dtype.name, self.rec.device.info, *sizes)
        table, chunks = batches.launch(self.rec, *how, epilogue=epilogue, sums=sums, whole=whole)
        if chunks < 0:  # and numbers that it would have read are stored in vain
            self.rec.undo(before)
            self.sources = there
        return table, chunks

    def _product(self, name: str, pair: tuple[str, str]) -> None:
        """Record the product whose sum is an input, and at its end what can be made of it there.

        A result comes out the same whichever others are asked for. So columns are summed here by a
        rule that asks nothing of these: where the sum is read with the bias alone whose gradient
        they are. All others are summed in the pass.
        """
        whole = self._with_bias(name, list(self.graphs.values()))
        mine = [n for n, e in self.graphs.items() if name in leaves_of((e,))]
        ready = [n for n in mine if n in self.results and self._is_ready(name, self.graphs[n])]
        made = [(n, self.graphs[n], self.results[n]) for n in ready]
        summed = [n for n in mine if n in self.summed and self._is_of_bias(name, n)]
        sums = [self.summed[n] for n in summed]
        if summed:
            graph = self.graphs[summed[0]]
            made.sort(key=lambda x: x[1] is not graph)
            if not made or made[0][1] is not graph:
                made.insert(0, ("", graph, self.rec.fresh(self.p.shape, self.p.dtype.name)))
        names = {*summed, *(n for n, _, _ in made)}
        if 1 <= len(made) <= 2 and names >= set(mine):
            if self._end(name, pair, [x[1:] for x in made], *sums):
                self._drop(names)
                return
        kept = name if whole is leaf(name) else f"{name}_whole"
        same = [x for x in made if x[1] is whole and x[2].dtype == self.acc]
        target = same[0][2] if same else self.rec.fresh(self.p.shape, self.acc)
        for n, e, view in made[:1] if summed else [] if same else made:
            if self._end(name, pair, [(e, view), (whole, target)], *sums):
                self._drop({n, *summed})
                break
        else:
            self._drop({n for n, _, _ in same[:1]})
            self._end(name, pair, [(whole, target)], must=True)
        self._replace(whole, leaf(kept))
        self.sources[kept] = target

    def _with_bias(self, name: str, graphs: Sequence[Expr]) -> Expr:
        """Return a sum with a bias, where graphs never read it without that; else the sum alone."""
        z = leaf(name)
        uses = [e for e in topological(graphs) if any(a is z for a in e.args)]
        if len(uses) == 1 and uses[0].op == "add" and not any(e is z for e in graphs):
            others = [e for e in uses[0].args if e is not z]
            if len(others) == 1 and others[0].op == "input":
                bias = self.sources.get(str(others[0].payload))
                if bias is not None and bias.shape[-2] == 1 and bias.dtype == self.p.dtype.name:
                    return uses[0]
        return z

    def _is_of_bias(self, name: str, result: str) -> bool:
        """Whether a result is the gradient of the bias with which alone it reads a sum."""
        graph = self.graphs[result]
        bias = leaf(result.removeprefix("d_"))
        whole = self._with_bias(name, [graph])
        there = any(a is bias for a in whole.args)
        return there and _is_column(self.summed[result]) and self._is_ready(name, graph)

    def _is_ready(self, name: str, graph: Expr) -> bool:
        """Whether all inputs of a result are there with this sum."""
        return all(x == name or x in self.sources for x in leaves_of((graph,)))

    def _end(
        self, name: str, pair: tuple[str, str], made: list[_Made], *sums: View, must: bool = False
    ) -> bool:
        """Record a product that ends in one or two results, if a product's kernel can do that.

        It takes one or two arrays that are the same for all rows, as biases, and another one of any
        shape, in the dtype of the factors. The columns of the first result may be summed to `sums`.
        """
        storage = self.p.dtype.name
        names = [x for x in leaves_of(e for e, _ in made) if x != name]
        lines = [x for x in names if self.sources[x].shape[-2] == 1]
        lines.sort(key=lambda x: self.sources[x].shape[-1] == 1)
        there = all(self.sources[x].dtype in (storage, NUMBER) for x in names)
        # a second operand that is the same for all rows comes as a bias where a tier takes two
        biases = 2 if takes_rich(storage, self.rec.device.info) and not must else 1
        slots = dict(zip(lines[:biases], ("bias", "bias1"), strict=False))
        others = [x for x in names if x not in slots]
        if len(others) > 1 or not there:
            assert not must, "a sum has one bias"
            return False
        slots |= dict.fromkeys(others, "extra")
        factors = dict(zip("xy", pair, strict=True))
        table, chunks = self._launch([name], factors, made, slots, sums=bool(sums))
        if chunks < 0 and "bias1" in slots.values() and not others:
            slots[lines[1]] = "extra"
            table, chunks = self._launch([name], factors, made, slots, sums=bool(sums))
        if chunks < 0:
            return False
        for target in sums:
            assert table is not None
            _join(self.rec, self.p, table, chunks, target)
        return True

    def _array(self, name: str) -> View:
        """Return an input as an array: a number is stored before."""
        x = self.sources[name]
        if x.dtype == NUMBER:
            x = self.sources[name] = stored(self.rec, x, self.p.dtype.name, self.acc)
        return x


def stored(rec: Recorder, x: View, dtype: str, accumulator: str) -> View:
    """Record a number as an array of one element; return that."""
    made = rec.fresh((1, 1), dtype)
    epilogue = Epilogue("number", (), ("x",), (("out", leaf("x")),))
    read, written = Source("x", "x", NUMBER, True), Result("out", "out", made.dtype)
    info = rec.device.info
    launch = pointwise.launch(info, epilogue, accumulator, [read], [written], 1, 1, False)
    rec.launches((launch,), {"x": x.at(), "out": made.at()})
    return made


# --- the pass -------------------------------------------------------------------------------------
def _pass(
    rec: Recorder,
    p: FusedProblem,
    epilogue: Epilogue,
    sources: dict[str, View],
    results: dict[str, View],
    summed: dict[str, View],
) -> None:
    """Record one pass over rows: an epilogue's results, stored or summed to arrays."""
    acc, m, n = p.acc_dtype.name, p.m, p.n
    columns = [name for name, target in summed.items() if _is_column(target)]
    lines = [name for name, x in summed.items() if name not in columns and x.shape[-1] == 1]
    wholes = {name: rec.fresh(p.shape, acc) for name in summed if name not in [*columns, *lines]}
    results = results | wholes
    numbers = {name: x.at() for name, x in sources.items() if x.dtype == NUMBER}
    arrays = {name: x for name, x in sources.items() if name not in numbers} | results
    if not (columns or lines) and all(_is_turned(x) for x in results.values()):
        m, n, arrays = n, m, {name: x.turned for name, x in arrays.items()}
    spots = places.Places(p.batch, arrays, range(len(p.batch)))
    operands = {name: spots.operand(name, *places.matrix(x)) for name, x in arrays.items()}
    read = [Source(name, name, x.dtype, name in numbers) for name, x in sources.items()]
    written = [Result(name, name, x.dtype) for name, x in results.items()]
    sizes, short = (m, n, spots.count), is_short(acc, p.dtype.name)
    how = read, written, operands, rows.Sums(columns, lines), sizes, short
    odd = {y: x for x in results for y in results if arrays[x].woven_with(arrays[y]) is not None}
    launch, chunks, parts = rows.launch(rec.device.info, epilogue, acc, *how, odd)
    tables = {f"sums_{x}": rec.fresh((prod(p.batch), chunks, n), acc) for x in columns}
    tables |= {f"rows_{x}": rec.fresh((*p.batch, m, parts), acc) for x in lines}
    for first, at in spots:
        for slot, table in tables.items():
            at[slot] = table.at(first * (chunks * n if slot.startswith("sums_") else m * parts))
        rec.launches((launch,), at | numbers)
    for name in columns:
        _join(rec, p, tables[f"sums_{name}"], chunks, summed[name])
    for name in lines:
        batches.sum_to(rec, tables[f"rows_{name}"], summed[name], acc)
    for name, view in wholes.items():
        batches.sum_to(rec, view, summed[name], acc)


def _flat(
    rec: Recorder,
    p: FusedProblem,
    epilogue: Epilogue,
    sources: dict[str, View],
    results: dict[str, View],
) -> bool:
    """Record a pass over arrays that are runs of memory in one order, and over single elements.

    Return False, and record nothing, for others.
    """
    views = sources | results
    first = next(iter(results.values()))
    order, size, alignment = first.order, prod(first.shape), 16
    read = []
    for name, x in views.items():
        own = prod(x.shape)
        once = name in sources and (x.dtype == NUMBER or own == 1 < size)
        if order is None or x.dtype not in (first.dtype, NUMBER):
            return False
        if not once:
            if own != size or x.order != order:
                return False
            alignment = min(alignment, x.aligned(()))
        read.append(Source(name, name, x.dtype, once))
    written = [Result(*x[:3]) for x in read[len(sources) :]]
    acc = p.acc_dtype.name
    how = read[: len(sources)], written, size, alignment, is_short(acc, p.dtype.name)
    launch = pointwise.launch(rec.device.info, epilogue, acc, *how)
    rec.launches((launch,), {name: x.at() for name, x in views.items()})
    return True


def _is_column(target: View) -> bool:
    """Whether what is summed to an array is summed over the rows."""
    return target.shape[-2] == 1


def _join(rec: Recorder, p: FusedProblem, table: View, chunks: int, target: View) -> None:
    """Record target = the sum of a table of (places, chunks, N), the places in their order."""
    batches.join_columns(rec, table, p.batch, chunks, target, p.acc_dtype.name)


def _is_turned(x: View) -> bool:
    """Whether the columns of a matrix lie closer than its rows."""
    return abs(x.strides[-2]) < abs(x.strides[-1]) and 1 not in x.shape[-2:]
