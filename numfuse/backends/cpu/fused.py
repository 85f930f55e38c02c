"""An epilogue of products and operands, and the gradients' products that follow it.

All sums but the last are made in the accumulator's format for a block of rows, which stays in the
caches; the last product's pass reads them, does what is elementwise and makes the partial `sums` of
rows, columns and totals. A result that is summed over a batch alone is a product with ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from numfuse.backends.cpu import descriptors, tiling
from numfuse.backends.cpu.descriptors import Slots
from numfuse.backends.cpu.kernels import library, protocol, rows
from numfuse.backends.cpu.kernels.printer import Result, Source, Total
from numfuse.backends.cpu.launch.sequence import Operand, Program, Step, program, temporary
from numfuse.backends.cpu.launch.sequence import operands as operands_of
from numfuse.backends.cpu.llvm import vectors
from numfuse.backends.cpu.schedule import Factors, Part, Pass, Work, merged, record
from numfuse.backends.cpu.sums import Partials, partial_sums
from numfuse.epilogues import Epilogue
from numfuse.language.curves import leaf, replace_leaves
from numfuse.moduli import count_of
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.problem.fused import FusedProblem

#: The slots of what is read, and of what is stored behind the first; the second's is `extra`.
_SLOTS = [name[2:].lower() for name in protocol.SLOTS]
_FREE = ["extra", *(name for name in _SLOTS if name not in ("out", "sums", "grad", "extra"))]


class _Places:
    """The slots of a pass, filled one by one."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.results: list[Result] = []
        self.sums: list[Total] = []
        self._taken: dict[str, Operand] = {}
        self._free = iter(_FREE)

    def _slot(self, x: Operand, first: str) -> str:
        slot = first if first and first not in self._taken else next(self._free, "")
        if not slot:
            raise ValueError(
                f"an epilogue on the CPU must have at most {protocol.MOST_SLOTS - 3} arrays"
            )
        self._taken[slot] = x
        return slot

    def read(self, name: str, x: Operand, once: bool) -> None:
        """Let an input be read from an operand."""
        self.sources.append(Source(name, self._slot(x, ""), x.fmt, once))

    def store(self, name: str, x: Operand) -> None:
        """Let a result be stored."""
        self.results.append(Result(name, self._slot(x, "out"), x.fmt))

    def add(self, name: str, x: Operand, across: bool) -> None:
        """Let a result be added up, down its columns or `across` its rows."""
        self.sums.append(Total(name, self._slot(x, "" if across else "sums"), across))

    def slots(self, over: Operand | None = None) -> Slots:
        """Return the operands in their slots."""
        taken = self._taken if over is None else {**self._taken, "grad": over}
        return _in_order(taken)


def _in_order(taken: Mapping[str, Operand]) -> Slots:
    """Return operands by the names of their slots."""
    every = list(map(taken.get, _SLOTS))
    while len(every) > protocol.SLOT_COUNT and every[-1] is None:
        every.pop()
    return Slots._make((*every[: protocol.SLOT_COUNT], tuple(every[protocol.SLOT_COUNT :])))


def fused(p: FusedProblem, names: Sequence[str], threads: int, precision: str = "ieee") -> Program:
    """Return the program of an epilogue's problem."""
    zeroed = list(map(names.index, p.zeroed))
    if not (p.sums or p.products or p.summed):
        return _elements(p, names, threads, zeroed)
    arrays = {n: x for n, x in operands_of(p, names).items() if n not in p.zeroed}
    fmt, acc = format_of(p.dtype), format_of(p.acc_dtype)
    # Sums over rows follow the blocks, which so depend on nothing that a call may leave out.
    summing = bool(p.summed or p.products)
    wide, held = (max(p.width, 1) - 1, p.width) if summing else (max(0, len(p.sums) - 1), 0)
    itemsize = wide * vectors.itemsize(acc) + held * vectors.itemsize(library.grad_pre_format(fmt))
    itemsize = max(itemsize, summing * vectors.itemsize(acc))
    blocks = max(1, p.m), max(1, math.prod(p.batch))
    whole = precision != "ieee" and count_of(precision)  # (a block would make residues anew)
    if itemsize and not whole:
        kept = p.k if p.dtype != p.acc_dtype else 0
        blocks = tiling.backward_block(p.m, p.n, kept, itemsize, library.chunk(fmt))
    part = Part(arrays, *blocks, partial(work, p), _by_rows(p), (*p.summed, *p.products))
    return record(p, names, [part], threads, zeroed, precision=precision)


def _by_rows(p: FusedProblem) -> frozenset[str]:
    """Return the names of what has a row for each of M."""
    right = {b for pairs in p.sums.values() for _, b in pairs}
    right |= {f.name for terms in p.products.values() for pair in terms for f in pair if f.turned}
    right -= {a for pairs in p.sums.values() for a, _ in pairs}
    found: list[str] = []
    for name, x in p.arrays.items():
        left = any(x.turned and x.name == name for terms in p.products.values() for x, _ in terms)
        one_row = name in p.summed and x.shape[-2] == 1 != p.m
        if left or (name not in right and not one_row and not _is_right_gradient(p, name)):
            found.append(name)
    return frozenset(found)


def _is_right_gradient(p: FusedProblem, name: str) -> bool:
    return name in p.products and p.products[name][0][0].turned


def _is_whole(p: FusedProblem, name: str) -> bool:
    """Whether a summed result is summed over the batch alone."""
    return p.arrays[name].shape[-2:] == (p.m, p.n) and p.m != 1


def _wholes(p: FusedProblem) -> list[str]:
    return [name for name in p.summed if _is_whole(p, name)]


def _direction(p: FusedProblem, name: str) -> str:
    """Return which sums a summed result is joined of, as `sums.Partials` has it.

    A row that is one of several where a batch is folded is summed as each of these.
    """
    rows_, columns = p.arrays[name].shape[-2:]
    if columns == p.n:
        return "columns"
    return "rows" if rows_ == p.m and (p.m > 1 or p.width) else "all"


# --- products -------------------------------------------------------------------------------------
def work(p: FusedProblem, x: Mapping[str, Operand], batch: tuple[int, ...]) -> Work:
    """Return what is done for a block."""
    block = _Block(p, x, batch)
    epilogue, last = block.sums()
    block.results()
    block.totals()
    block.last_pass(epilogue, last)
    gradients = block.gradients()
    return Work(block.passes, gradients, block.partials, block.own, frozenset(_wholes(p)))


class _Block:
    """The work for a block, put together step by step."""

    def __init__(self, p: FusedProblem, x: Mapping[str, Operand], batch: tuple[int, ...]) -> None:
        self.p, self.x, self.batch = p, x, batch
        self.fmt, self.acc = format_of(p.dtype), format_of(p.acc_dtype)
        self.sizes = _rows_of(p, x), p.n
        self.places = _Places()
        self.own: list[Operand] = []
        self.passes: list[Pass] = []
        self.partials: dict[str, Partials] = {}
        #: What the last pass stores for products to read.
        self.made: dict[str, Operand] = {}

    def _fresh(self, name: str, fmt: str) -> Operand:
        self.own.append(temporary(name, (*self.batch, *self.sizes), fmt))
        return self.own[-1]

    def sums(self) -> tuple[Epilogue, Factors | None]:
        """Make all sums but the last product; return the epilogue of that, and its factors."""
        p, x, acc = self.p, self.x, self.acc
        epilogue, last = p.epilogue, None
        for name in epilogue.accumulators:
            products = [(x[a], x[b]) for a, b in p.sums[name]]
            if name == epilogue.accumulators[-1]:
                *products, last = products
                self.places.sources.append(Source(name, None, acc))
                if products:
                    before = f"{name}_before"
                    epilogue = _with(epilogue, name, before)
                    name = before
            if products:
                t = self._fresh(f"sum {name}", acc)
                for i, factors in enumerate(products):
                    row = rows.terms(self.fmt, acc, True, False, False, i > 0)
                    self.passes.append(Pass(row, Slots(pre=t if i else None, out=t), factors))
                self.places.read(name, t, False)
        return epilogue, last

    def results(self) -> None:
        """Let the last pass store results, and what is a factor of products."""
        for name in self.p.stored:
            self.places.store(name, self.x[name])
        for terms in self.p.products.values():
            for factor in (f for pair in terms for f in pair):
                if factor.name not in self.x and factor.name not in self.made:
                    self._store(factor.name, factor.name, library.grad_pre_format(self.fmt))

    def _store(self, name: str, called: str, fmt: str) -> None:
        self.made[name] = self._fresh(called, fmt)
        self.places.store(name, self.made[name])

    def totals(self) -> None:
        """Let the last pass add up the results that are summed."""
        p, group = self.p, library.group(self.fmt)
        for name in p.summed:
            if _is_whole(p, name):
                self._store(name, f"whole {name}", self.acc)
                continue
            of = _direction(p, name)
            # (Of short rows, sums of columns are fewer.)
            across = of == "rows" or (of == "all" and p.n >= group)
            called = f"sums {name}"
            made = partial_sums(p, called, self.x[name], self.sizes, self.batch, across)
            self.own.append(made)
            self.partials[name] = Partials(made, of)
            self.places.add(name, made.turned() if across else made, across)

    def last_pass(self, epilogue: Epilogue, last: Factors | None) -> None:
        """Add the pass that does the rest."""
        x, places, (m, n) = self.x, self.places, self.sizes
        across = any(total.across for total in places.sums)
        turned = last is not None and not across and descriptors.is_turned(*last, places.slots())
        for name in (name for name in epilogue.operands if name in x):
            # one element serves a row, or a column where the transpose is made
            rows_, columns = x[name].shape[-2:]
            places.read(name, x[name], (rows_ == 1 != m) if turned else (columns == 1 != n))
        # (a pass without a product or a stored result goes over the shape of an operand)
        over = None
        if last is None and not places.results:
            over = next(y for y in places.slots().all() if y and y.shape[-2:] == (m, n))
        every = tuple(places.sources), tuple(places.results), tuple(places.sums)
        row = rows.fused(epilogue, self.fmt, *every)
        self.passes.append(Pass(row, places.slots(over), last, across))

    def gradients(self) -> dict[str, list[Factors]]:
        """Return the products that follow: those of gradients, and sums over a batch alone."""
        p, x, made = self.p, self.x, self.made
        found: dict[str, list[Factors]] = {}
        for name, terms in p.products.items():
            found[name] = []
            for pair in terms:
                left, right = (made[f.name] if f.name in made else x[f.name] for f in pair)
                left = left.turned() if pair[0].turned else left
                found[name].append((left, right.turned() if pair[1].turned else right))
        whole = _wholes(p)
        if whole:
            one = temporary("one", (1, 1), self.acc)
            self.own.append(one)
            self.passes.append(Pass(rows.constant(self.acc), Slots(out=one)))
            found |= {name: [(one, made[name])] for name in whole}  # every row for itself
        return found


def _rows_of(p: FusedProblem, x: Mapping[str, Operand]) -> int:
    """Return the rows of a block."""
    by_rows = _by_rows(p)
    return max((y.shape[-2] for name, y in x.items() if name in by_rows), default=1)


def _with(epilogue: Epilogue, name: str, before: str) -> Epilogue:
    """Return the epilogue with another operand added to one of its sums."""
    graphs = replace_leaves(epilogue.graphs, {leaf(name): leaf(name) + leaf(before)})
    results = zip([result for result, _ in epilogue.results], graphs, strict=True)
    inputs = epilogue.accumulators, (*epilogue.operands, before)
    return Epilogue(epilogue.name, *inputs, tuple(results), epilogue.ties)


# --- elements -------------------------------------------------------------------------------------
def _elements(
    p: FusedProblem, names: Sequence[str], threads: int, zeroed: Sequence[int]
) -> Program:
    """Return the program of an epilogue without a product or a sum: one pass over elements."""
    if not p.stored:
        return program(names, [], zeroed=zeroed)
    fmt, shape = format_of(p.dtype), (*p.batch, p.m, p.n)
    # (a result in the place of an operand comes behind it, and has its slot)
    used = p.stored + p.epilogue.operands
    if p.in_place:
        first = [name for name in p.stored if name not in p.in_place]
        used = *first, *p.epilogue.operands, *p.in_place
    # The last axis is the one along which the first result is densest.
    views = []
    for name in used:
        x = p.arrays[name]
        views.append(x if x.shape == shape else np.broadcast_to(x, shape))
    views = merged(views)
    *batch, m, n = views[0].shape
    # (the views number the same elements in another way: the addresses are those of the arrays)
    there = []
    for name, y in zip(used, views, strict=True):
        there.append(Operand(name, y.shape, y.strides, format_of(y.dtype), y.itemsize))
    before: list[Step] = []
    tail, own, count = 0, [], 1
    if n <= tiling.SHORT_ROW and not batch and m * n >= tiling.LEAST_JOINED:
        count = _short_rows(there)
    if count > 1:
        repeated = [x for x in there if x.strides == (0, x.itemsize)]
        for one in repeated:
            made = temporary(f"rows of {one.name}", (count, n), one.fmt)
            row, copied = rows.copy(one.fmt, one.fmt), one._replace(shape=(1, n))
            plan = descriptors.rows(count, n, row, Slots(extra=copied, out=made), threads)
            assert plan is not None  # (a row has elements)
            before.append((plan, {}))
            own.append(made)
        m, tail, n = m // count, m % count * n, count * n
        found = iter(own)
        there = [
            _joined(next(found), m, n, True) if x in repeated else _joined(x, m, n) for x in there
        ]
    slots: dict[str, Operand] = {}
    sources: dict[str, Source] = {}
    results, free, written = [], iter(_FREE), []
    for name, z in zip(used, there, strict=True):
        if name not in p.stored:
            slot, once = next(free), n > 1 and z.strides[-1] == 0
            sources[name], slots[slot] = Source(name, slot, z.fmt, once), z
            continue
        written.append(z)
        source = sources.get(p.in_place.get(name, ""))
        if source is not None and not source.once:
            results.append(Result(name, str(source.slot), z.fmt, source.name))
            continue
        slot = next(free) if "out" in slots else "out"
        results.append(Result(name, slot, z.fmt))
        slots[slot] = z
    head = p.epilogue, fmt, tuple(sources.values()), tuple(results), ()
    # (a line that was read is in the caches)
    streams = not p.in_place and len(written) <= 2 and _past_the_caches(written)
    stream = rows.fused(*head, True) if streams else None
    at = _in_order(slots)
    row = rows.fused(*head)
    plan = descriptors.rows(m, n, row, at, threads, tuple(batch), stream=stream)
    if plan is None:
        return program(names, [], zeroed=zeroed)
    steps: list[Step] = [(plan, {})]
    if tail:
        moved = {x.name: m * x.strides[-2] for x in there}
        last = descriptors.rows(1, tail, row, at.each(lambda x: _joined(x, 1, tail)), threads)
        if last is not None:
            steps.append((last, moved))
    return program(names, [[before, steps] if before else [steps]], own, zeroed=zeroed)


def _short_rows(operands: Sequence[Operand]) -> int:
    """Return how many short rows are done as one long row; 1 where each is done alone.

    All operands are rows behind one another, or one row for all, or one element.
    """
    m, n = operands[0].shape
    for x in operands:
        if x.strides not in ((n * x.itemsize, x.itemsize), (0, x.itemsize), (0, 0)):
            return 1
    return min(m, tiling.JOINED_ROW // n)


def _joined(x: Operand, m: int, n: int, repeats: bool = False) -> Operand:
    """Return rows of an operand behind one another, or one for all, as `m` rows of `n` elements.

    `repeats`: all that it has is one row for all.
    """
    step = 0 if x.strides[-2] == 0 or repeats else n * x.itemsize
    return x._replace(shape=(m, n), strides=(step, x.strides[-1]))


def _past_the_caches(results: Sequence[Operand]) -> bool:
    """Whether results (..., rows, columns) are large, and rows of theirs contiguous."""
    nbytes = 0
    for x in results:
        nbytes += math.prod(x.shape) * x.itemsize
        if x.strides[-1] != x.itemsize or x.shape[-1] < tiling.STREAM_STEP:
            return False
    return nbytes >= tiling.STREAM_BYTES
