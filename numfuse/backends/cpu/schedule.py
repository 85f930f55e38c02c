"""The one scheduler: an operation's passes and products, in blocks of rows or of batch elements.

What an operation holds between its products (grad_pre, T, Q and S) is never held whole where it is
large. A block depends on the problem alone, never on threads, and blocks are taken in their order:
so the order of every sum over them is fixed. `layers` says what is done for a block, as data; here
that becomes plans, and the plans of all blocks a program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from numfuse.backends.cpu import descriptors, residues, tiling
from numfuse.backends.cpu.descriptors import Slots
from numfuse.backends.cpu.kernels import library, rows
from numfuse.backends.cpu.launch.sequence import (
    Operand,
    Plan,
    Program,
    Step,
    Sum,
    operand,
    program,
    temporary,
)
from numfuse.backends.cpu.sums import Partials, Turn, copied, growing, join, summed_axes
from numfuse.moduli import count_of
from numfuse.problem.operands import address, format_of
from numfuse.problem.shapes import merge_axes, runs_of_rows
from numfuse.runtime.specialise import Kernel

#: Operands that have a row for each of M, and are cut where an operation is cut by rows.
BY_ROWS = frozenset(("a", "grad", "pre", "d_a", "u", "z", "d_grad", "residual", "out", "out_dot"))
#: What may be summed over blocks, or over several products.
GRADIENTS = ("d_a", "d_b", "d_bias")
#: Which of them are results: a block's rows are brought to them, not from them.
RESULTS_BY_ROWS = ("d_a", "d_grad")

Factors = tuple[Operand, Operand]


# --- blocks -------------------------------------------------------------------------------------
class Block(NamedTuple):
    """Some rows of some batch elements."""

    batch: tuple[slice, ...]
    rows: slice
    #: Its batch shape, then its rows.
    sizes: tuple[int, ...]
    #: The names of what has a row for each of M.
    by_rows: frozenset[str] = BY_ROWS

    def of(self, x: Operand) -> tuple[Operand, int]:
        """Return the block's part of an operand, and the bytes before it.

        A broadcast axis stays as it is. One row that serves all is never cut.
        """
        *own, length, columns = x.shape
        parts = [*self.batch[len(self.batch) - len(own) :]]
        by_rows = x.name.removeprefix("total ") in self.by_rows
        if by_rows:
            own, parts = [*own, length], [*parts, self.rows]
        cut = [slice(0, 1) if size == 1 else s for size, s in zip(own, parts, strict=True)]
        sizes = [s.stop - s.start for s in cut]
        before = sum(s.start * step for s, step in zip(cut, x.strides, strict=False))
        lengths = (*sizes, columns) if by_rows else (*sizes, length, columns)
        return x._replace(shape=lengths), before


def cut(
    batch: tuple[int, ...],
    m: int,
    rows: int,
    members: int,
    by_rows: frozenset[str] = BY_ROWS,
) -> Iterator[Block]:
    """Yield blocks of `rows` rows of up to `members` batch elements; the first is the largest."""
    axes: list[list[slice]] = []
    for size in reversed(batch):
        step = max(1, min(size, members))
        members //= max(1, size)
        axes.insert(0, _pieces(size, step))
    axes.append(_pieces(m, max(1, rows)))
    for *parts, part in itertools.product(*axes):
        sizes = tuple(s.stop - s.start for s in (*parts, part))
        yield Block(tuple(parts), part, sizes, by_rows)


def _pieces(size: int, step: int) -> list[slice]:
    """Return a length in slices of `step`; an empty one is a slice too: its sums are zero."""
    return [slice(i, min(i + step, size)) for i in range(0, max(1, size), step)]


# --- what is done for a block -------------------------------------------------------------------
class Pass(NamedTuple):
    """An epilogue over a product, or over rows of operands where there is none."""

    row: Kernel
    slots: Slots
    factors: Factors | None = None
    #: Whether it makes sums of rows, which no transpose makes.
    across: bool = False
    #: Where the row function takes groups of rows.
    group: descriptors.Group | None = None
    #: Batch axes that are summed over inside the product.
    summed: tuple[int, ...] = ()
    #: The batch axes, where they are not the block's.
    batch: tuple[int, ...] | None = None


class Work(NamedTuple):
    """The work for a block: passes one after another, then the gradients beside one another."""

    passes: Sequence[Pass]
    #: {gradient: the products that it is the sum of}.
    gradients: Mapping[str, Sequence[Factors]] = {}
    #: {gradient: the partial sums that are joined to it}.
    partials: Mapping[str, Partials] = {}
    #: Contiguous arrays of the block's own.
    own: Sequence[Operand] = ()
    #: The gradients whose product, with ones, is a sum: IEEE's, whatever the precision is.
    sums: frozenset[str] = frozenset()


class Part(NamedTuple):
    """Some results of an operation: its operands, what a block is, and what is done for it.

    `work` maps the block's operands and its batch shape to a `Work`.
    """

    operands: Mapping[str, Operand]
    rows: int
    members: int
    work: Callable[[Mapping[str, Operand], tuple[int, ...]], Work]
    #: The operands that have a row for each of M, and what is summed over blocks.
    by_rows: frozenset[str] = BY_ROWS
    gradients: tuple[str, ...] = GRADIENTS


def scattered(p: Any, operands: Mapping[str, Operand]) -> list[str]:
    """Return the operands of which a block gathers its rows; see `problem.shapes.as_one`."""
    if p.batch:
        return []
    return [name for name, x in operands.items() if len(x.shape) > 2 and name in BY_ROWS]


def record(
    p: Any,
    names: Sequence[str],
    parts: Sequence[Part],
    threads: int,
    zeroed: Sequence[int] = (),
    sums: Sequence[Sum] = (),
    precision: str = "ieee",
) -> Program:
    """Return the program of an operation on the arrays of these names."""
    blocks: list[list[list[Step]]] = []
    own: list[Operand] = []
    totals: dict[str, Operand] = {}
    for part in parts:
        made = _Schedule(p, part, threads, precision)
        blocks += made.blocks()
        own += made.own
        totals |= made.totals
    step = max(1, tiling.BLOCKS_IN_ONE_LAUNCH)
    launches = [
        [phase for block in blocks[i : i + step] for phase in block]
        for i in range(0, len(blocks), step)
    ]
    return program(names, launches, own, [*totals.values()], zeroed, sums)


class _Schedule:
    """The plans of a part, block by block."""

    def __init__(self, p: Any, part: Part, threads: int, precision: str) -> None:
        self.p, self.part, self.threads, self.precision = p, part, threads, precision
        self.fmt, self.acc = format_of(p.dtype), format_of(p.acc_dtype)
        self.whole = part.operands
        self.apart = scattered(p, self.whole)
        self.own: list[Operand] = []
        #: Whether there is one block, which has every operand as it is.
        self.one = part.rows >= p.m and part.members >= math.prod(p.batch)
        if self.one:
            slices = tuple(map(slice, itertools.repeat(0), (*p.batch, p.m)))
            self.cuts = [Block(slices[:-1], slices[-1], (*p.batch, p.m), part.by_rows)]
        else:
            self.cuts = list(cut(p.batch, p.m, part.rows, part.members, part.by_rows))
        #: By a block's sizes, as few are of a form of their own: its operands and its work.
        self.works: dict[Any, tuple[Mapping[str, Operand], Work]] = {}
        for block in self.cuts:
            if block.sizes not in self.works:
                cut_up = self.apart or not self.one
                operands = self._operands(block) if cut_up else self.whole
                self.works[block.sizes] = operands, part.work(operands, block.sizes[:-1])
        #: What grows block by block: half types in the accumulator's format, d_bias in float64.
        self.totals: dict[str, Operand] = {}
        for name in part.gradients:
            if name in self.whole and self._grows(name):
                total = self._total(name, self.whole[name])
                if total is not None:
                    self.totals[total.name] = total

    def _operands(self, block: Block) -> dict[str, Operand]:
        operands = {}
        for name, x in self.whole.items():
            if name in self.apart:
                shape = block.rows.stop - block.rows.start, x.shape[-1]
                operands[name] = temporary(f"rows of {name}", shape, x.fmt)
            else:
                operands[name], _ = block.of(x)
        return operands

    def _turn(self, block: Block, name: str, x: Operand) -> Turn:
        """Return a block's turn in the sum of a gradient: over batch axes, and over rows."""
        batch = self.p.batch
        parts = [(block.batch[axis], batch[axis]) for axis in summed_axes(x, batch)]
        if name not in self.part.by_rows:
            parts.append((block.rows, self.p.m))
        return Turn(all(s.start == 0 for s, _ in parts), all(s.stop == n for s, n in parts))

    def _grows(self, name: str) -> bool:
        """Return whether a gradient is the sum of several products, of a block or of blocks."""
        for _, work in self.works.values():
            if len(work.gradients.get(name, ())) > 1:
                return True
        if self.one:
            return False
        x = self.whole[name]
        return any(self._turn(block, name, x) != Turn() for block in self.cuts)

    def _total(self, name: str, x: Operand) -> Operand | None:
        """Return where a gradient that grows is summed up, if that is not the gradient itself."""
        for _, work in self.works.values():
            if name in work.partials:
                return work.partials[name].total(name, x)
        if x.fmt == self.acc:
            return None
        shape = (self.p.m, x.shape[-1]) if name in self.apart else x.shape
        if x.lies_by_columns():
            *batch, m, n = shape
            return temporary(f"total {name}", (*batch, n, m), self.acc).turned()
        return temporary(f"total {name}", shape, self.acc)

    def blocks(self) -> Iterator[list[list[Step]]]:
        """Yield the phases of each block."""
        made: dict[Any, list[list[Plan]]] = {}
        for block in self.cuts:
            turns, offsets = dict.fromkeys(self.part.gradients, Turn()), {}
            if not self.one:
                for name, x in (*self.whole.items(), *self.totals.items()):
                    if name in turns:
                        turns[name] = self._turn(block, name, x)
                    if name not in self.apart:
                        offsets[name] = block.of(x)[1]
            form = block.sizes, *turns.values()
            if form not in made:
                made[form] = self._plans(block, turns)
            phases = made[form]
            steps: list[list[Step]] = [[(plan, offsets) for plan in phase] for phase in phases]
            before, after = self._moves(block, phases) if self.apart else ([], [])
            yield [before, *steps, after]

    def _plans(self, block: Block, turns: Mapping[str, Turn]) -> list[list[Plan]]:
        operands, work = self.works[block.sizes]
        batch = block.sizes[:-1]
        totals = self.totals
        if not self.one:
            totals = {name: block.of(x)[0] for name, x in totals.items()}
        self.own += work.own
        phases: list[list[Plan | None]] = []
        for one in work.passes:
            phases += self._pass(one, batch)
        most = max(map(len, work.gradients.values()), default=0)
        after: list[list[Plan | None]] = [[] for _ in range(max(1, most))]
        # Products whose factors are made ready first, one behind another: they share that memory.
        behind: list[list[list[Plan | None]]] = [[] for _ in after]
        copies: list[Plan | None] = []
        for name, partials in work.partials.items():
            total, turn, x = totals.get(f"total {name}"), turns[name], operands[name]
            joined = partials.made or x
            after[0].append(join(partials, joined, total, turn, batch, self.threads))
            if partials.made is not None and turn.last:
                copies.append(copied(joined, x, self.threads))
        for name, products in work.gradients.items():
            x, total = operands[name], totals.get(f"total {name}")
            for i, (left, right) in enumerate(products):
                turn = Turn(
                    turns[name].first and i == 0, turns[name].last and i == len(products) - 1
                )
                row, slots = growing(self.acc, x, total, turn)
                summed, members = summed_axes(x, batch), batch
                if left.shape[-2] == 1 != x.shape[-2]:
                    slots = slots.each(_rows_apart)
                    right, members = _rows_apart(right), (*batch, x.shape[-2])
                precision = "ieee" if name in work.sums else self.precision
                how = left, right, row, slots, members, summed
                *ahead, made = self._product(*how, precision=precision)
                if ahead:
                    behind[i] += [*ahead, made]
                else:
                    after[i] += made
        for beside, others in zip(after, behind, strict=True):
            phases += [beside, *others]
        if copies:
            phases.append(copies)
        return [[plan for plan in phase if plan is not None] for phase in phases]

    def _product(
        self,
        a: Operand,
        b: Operand,
        row: Kernel,
        slots: Slots,
        batch: tuple[int, ...],
        summed: tuple[int, ...],
        turns: bool = True,
        rows: descriptors.Group | None = None,
        precision: str = "",
    ) -> list[list[Plan | None]]:
        """Return the phases of a product: one, or what makes its factors ready before it."""
        precision = precision or self.precision
        how = a, b, row, slots, self.threads, batch, summed, turns, rows, precision
        if precision != "ieee" and count_of(precision):
            made = residues.product(*how)
            self.own += made.own
            return [[*phase] for phase in made.phases]
        return [[descriptors.product(*how)]]

    def _pass(self, x: Pass, batch: tuple[int, ...]) -> list[list[Plan | None]]:
        """Return the phases of a pass."""
        if x.factors is not None:
            batch = batch if x.batch is None else x.batch
            a, b = x.factors
            return self._product(a, b, x.row, x.slots, batch, x.summed, not x.across, x.group)
        return [[self._elements(x, batch)]]

    def _elements(self, x: Pass, batch: tuple[int, ...]) -> Plan | None:
        over = x.slots.grad or x.slots.out
        if x.group is not None:
            over = x.slots.out
        assert over is not None
        m, n = over.shape[-2:]
        if x.group is not None:
            chunk = 1 if x.slots.sums is None else library.chunk(self.fmt)
            form = self.threads, batch, chunk
            return descriptors.rows(m, n, x.row, x.slots, *form, held=x.group.held)
        if x.slots.sums is None and not x.across:
            for y in x.slots.all():
                if y is not None and y.shape != (m, n):
                    break
                if y is not None and y.strides != (n * y.itemsize, y.itemsize):
                    break
            else:
                # One row, for which the row function is called once a cell.
                slots = x.slots.each(lambda y: y._replace(shape=(1, m * n)))
                return descriptors.rows(1, m * n, x.row, slots, self.threads)
            return descriptors.rows(m, n, x.row, x.slots, self.threads, batch)
        chunk = 1 if x.slots.sums is None else library.chunk(self.fmt)
        group = library.group(self.fmt) if x.across else 1
        cell = None
        there = sum(y is not None for y in x.slots.all())
        if there == 2 and n <= tiling.NARROW and over.fmt == self.acc:
            cell = library.narrow_sums_cell(self.acc)
        return descriptors.rows(
            m, n, x.row, x.slots, self.threads, batch, chunk, cell=cell, group=group
        )

    def _moves(self, block: Block, phases: list[list[Plan]]) -> tuple[list[Step], list[Step]]:
        """Return the passes that gather a block's rows, and those that put results back."""
        before: list[Step] = []
        after: list[Step] = []
        used = {name for phase in phases for plan in phase for _, name in plan.places}
        for name in self.apart:
            x, held = getattr(self.p, name), self.works[block.sizes][0][name]
            if held.name not in used:
                continue
            self.own.append(held)
            back = name in RESULTS_BY_ROWS
            for index, start, _ in runs_of_rows(x.shape, block.rows.start, block.rows.stop):
                part = x[index]
                # (the first is never touched: it has the strides)
                inside, outside = merged((np.empty(part.shape, x.dtype), part))
                ends = operand(held.name, inside), operand(name, outside)
                source, target = ends if back else ends[::-1]
                *batch, m, n = inside.shape
                row, slots = rows.copy(held.fmt, held.fmt), Slots(extra=source, out=target)
                plan = descriptors.rows(m, n, row, slots, self.threads, tuple(batch))
                if plan is not None:
                    at = (start - block.rows.start) * x.shape[-1] * x.itemsize
                    offsets = {name: address(part) - address(x), held.name: at}
                    (after if back else before).append((plan, offsets))
        return before, after


def _rows_apart(x: Operand) -> Operand:
    """Return matrices as a batch of their rows."""
    *lead, m, n = x.shape
    *steps, row, column = x.strides
    return x._replace(shape=(*lead, m, 1, n), strides=(*steps, row, row, column))


def merged(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the elements, in one order, as (..., rows, columns) with as few axes as strides allow.

    The last axis is the one along which the first array is densest.
    """
    for x in arrays:
        if not x.flags.c_contiguous:
            break
    else:
        return [x.reshape(1, -1) for x in arrays]
    shape = arrays[0].shape
    order = sorted(range(len(shape)), key=lambda axis: -abs(arrays[0].strides[axis]))
    sizes, strides = merge_axes(
        [shape[axis] for axis in order], *([x.strides[axis] for axis in order] for x in arrays)
    )
    missing = 2 - len(sizes)
    return [
        np.lib.stride_tricks.as_strided(x, (1,) * missing + sizes, (0,) * missing + steps)
        for x, steps in zip(arrays, strides, strict=True)
    ]
