"""The CPU backend: each operation as launches of the kernels in `kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from numfuse.backends import Traits, latest
from numfuse.backends.cpu import descriptors, host, launch, second_order, tiling
from numfuse.backends.cpu.descriptors import Slots, operand
from numfuse.backends.cpu.kernels import gemm, library, rows
from numfuse.backends.cpu.llvm import microkernel
from numfuse.backends.cpu.peak import fma_peak
from numfuse.backends.cpu.schedule import (
    Block,
    Held,
    Launches,
    Move,
    Schedule,
    Step,
    Total,
    Turn,
    cut,
)
from numfuse.errors import BackendUnavailable
from numfuse.expr import SYMBOL
from numfuse.problem.results import settled
from numfuse.problem.shapes import as_one, merge_axes, runs_of_rows
from numfuse.runtime import lifetimes

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.expr import Expr
    from numfuse.problem.product import (
        GatedBackwardProblem,
        GatedProblem,
        GemmBackwardProblem,
        GemmProblem,
    )
    from numfuse.problem.second_order import (
        GatedDoubleBackwardProblem,
        GatedTangentProblem,
        GemmDoubleBackwardProblem,
        GemmTangentProblem,
    )
    from numfuse.runtime.specialise import Kernel

#: Storage dtypes by their names (`dtype.name` takes two microseconds to say the same).
FORMATS = {np.dtype(t): np.dtype(t).name for t in ("f8", "f4", "f2")}
FORMATS[np.dtype(ml_dtypes.bfloat16)] = "bfloat16"

__all__ = ["BACKEND", "CpuBackend", "fma_peak"]

# The arrays of a call by number, as plans know them: those of the caller, then the call's own.
A, B, BIAS, RESIDUAL, PRE, OUT = range(6)  # of a forward
GRAD, D_A, D_B, D_BIAS, GRAD_PRE, SUMS = 3, 5, 6, 7, 8, 9  # of a backward; 0-2 and PRE as above
TOTAL_A, TOTAL_B, TOTAL_BIAS = 10, 11, 12  # gradients that grow block by block
# cut where a backward is cut by rows
BY_ROWS = (A, GRAD, PRE, D_A, TOTAL_A, *second_order.BY_ROWS)
# The block's own array in which the rows of another are gathered, or results of rows made.
GATHERED = {
    number: second_order.S + 1 + i
    for i, number in enumerate(
        (A, GRAD, PRE, D_A, second_order.U, second_order.Z, second_order.D_GRAD)
    )
}
RESULTS_BY_ROWS = (D_A, second_order.D_GRAD)
NUMBERS = second_order.S + 1 + len(GATHERED)


def _optional(number: int, x: np.ndarray | None) -> descriptors.Operand | None:
    return None if x is None else operand(number, x)


def _summed_axes(
    gradient: np.ndarray | descriptors.Operand, batch: tuple[int, ...]
) -> tuple[int, ...]:
    """Axes of `batch` that a gradient (..., rows, columns) lacks or has with length 1."""
    if not batch:
        return ()
    own = (1,) * (len(batch) - (len(gradient.shape) - 2)) + gradient.shape[:-2]
    return tuple(axis for axis, size in enumerate(batch) if own[axis] == 1 and size != 1)


def _scattered(
    p: GemmProblem | GemmBackwardProblem, arrays: Sequence[np.ndarray | None]
) -> list[int]:
    """The numbers of arrays of which a block gathers its rows; see `layout.as_one`."""
    if p.batch:
        return []
    there = (number for number in GATHERED if number < len(arrays))
    return [number for number in there if (x := arrays[number]) is not None and x.ndim > 2]


def _moves(
    p: GemmProblem | GemmBackwardProblem,
    arrays: Sequence[np.ndarray | None],
    scattered: Sequence[int],
    span: slice,
    own: Sequence[descriptors.Operand],
) -> tuple[list[Move], list[Move]]:
    """How these rows of arrays are gathered in a block's own, and those of results brought back."""
    before: list[Move] = []
    after: list[Move] = []
    mine = {x.number for x in own}
    for number in scattered:
        x, held = arrays[number], GATHERED[number]
        if x is None or held not in mine:
            continue
        back = number in RESULTS_BY_ROWS
        dtype = p.acc_dtype if number == PRE else p.dtype
        for index, start, _ in runs_of_rows(x.shape, span.start, span.stop):
            part = x[index]
            # (the first is never touched: it has the strides)
            inside, outside = _merged((np.empty(part.shape, dtype), part))
            ends = operand(held, inside), operand(number, outside)
            formats = FORMATS[dtype], FORMATS[x.dtype]
            if not back:
                ends, formats = ends[::-1], formats[::-1]
            *batch, m, n = inside.shape
            row, slots = rows.copy(*formats), Slots(extra=ends[0], out=ends[1])
            plan = descriptors.elementwise(m, n, row, slots, tuple(batch))
            if plan is None:
                continue
            at = (start - span.start) * x.shape[-1] * dtype.itemsize
            offsets = {number: _address(part) - _address(x), held: at}
            alone = descriptors.sequence([[(plan, offsets)]], ())
            (after if back else before).append(Move(plan, offsets, alone))
    return before, after


def _parts(block: Block, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """A block's part of each array of a backward; None of those whose rows it gathers."""
    axes = len(block.batch) + 2
    return [
        None if x is None or x.ndim > axes else block.of(x, i in BY_ROWS)
        for i, x in enumerate(arrays)
    ]


def _with_totals(
    arrays: tuple[np.ndarray | None, ...], totals: Sequence[Total]
) -> tuple[np.ndarray | None, ...]:
    """The arrays of a backward, and new ones for what grows beside its gradient."""
    every = [*arrays, *(None,) * (TOTAL_BIAS + 1 - len(arrays))]
    for number, shape, dtype in totals:
        every[number] = np.empty(shape, dtype)
    return tuple(every)


def _phases(
    schedule: Schedule, arrays: tuple[np.ndarray | None, ...]
) -> Iterator[list[descriptors.Step]]:
    """A schedule without batch axes as phases of a sequence on these arrays' forms."""
    for step in schedule.steps:
        parts = arrays if step.block is None else _parts(step.block, arrays)
        offsets = {
            number: _address(part) - _address(x)
            for number, (part, x) in enumerate(zip(parts, arrays, strict=True))
            if part is not None and x is not None
        }
        yield [(move.plan, move.offsets) for move in step.before]
        for phase in step.launches.phases:
            yield [(plan, offsets) for plan in phase]
        yield [(move.plan, move.offsets) for move in step.after]


def _address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def _beside(grad: np.ndarray | None, address: int) -> int:
    """How far into a page after `address` grad_pre begins: see `launch.open_sequence`."""
    assert grad is not None
    distance = _address(grad) + tiling.LINE - address
    return distance % launch.PAGE // tiling.LINE * tiling.LINE


def _growing(
    fmt: str, acc: str, out: descriptors.Operand, total: descriptors.Operand | None, turn: Turn
) -> tuple[Kernel, Slots]:
    """The row function that stores a block's part of a sum or adds to it, and its operands.

    `total` is where a half type is summed; others are summed in `out`.
    """
    if turn.first:
        if turn.last or total is None:
            return rows.store(fmt), Slots(out=out)
        return rows.store(acc), Slots(out=total)
    if total is None:
        return rows.add(acc), Slots(out=out)
    if turn.last:
        return rows.add_and_store(fmt), Slots(extra=total, out=out)
    return rows.add(acc), Slots(out=total)


def _merged(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the elements, in one order, as (..., rows, columns) with as few axes as strides allow.

    The last axis is the one along which the first array is densest.
    """
    if all(x.flags.c_contiguous for x in arrays):
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


def _threads(p: GemmProblem | GemmBackwardProblem) -> int:
    """Threads of a product without batch axes: one below a size, whatever Numba's setting."""
    limit = tiling.PARALLEL_FMAS
    if p.dtype.itemsize == 2:
        fmt = FORMATS[p.dtype]
        limit = tiling.parallel_fmas(library.kind(fmt, fmt))
    return 1 if p.m * p.n * p.k < limit else launch.threads()


class Kept(NamedTuple):
    """How calls of one form are run: as a sequence, or, where that is None, step by step."""

    sequence: launch.Sequence | None
    #: What the sequence needs beside the arrays of the call.
    totals: Sequence[Total]
    schedules: Sequence[Schedule]


def _streams(results: Sequence[np.ndarray]) -> bool:
    """Whether results (..., rows, columns) are large, and rows of theirs contiguous."""
    return (
        all(x.strides[-1] == x.itemsize and x.shape[-1] >= tiling.STREAM_STEP for x in results)
        and sum(x.nbytes for x in results) >= tiling.STREAM_BYTES
    )


class CpuBackend:
    """Fused kernels on the host's vector units, parallel over cells of the output."""

    name = "cpu"

    def __init__(self) -> None:
        #: How calls are run, by everything that this depends on; formulas by their serial numbers.
        self._kept: dict[tuple[Any, ...], Kept] = {}
        self._kept_bytes = 0
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._ties = lifetimes.Ties(self._forget)

    def _keep(self, key: tuple[Any, ...], kept: Kept, formulas: Iterable[Expr]) -> Kept:
        size = tiling.KEPT_STEP_BYTES * sum(len(schedule.steps) for schedule in kept.schedules)
        if kept.sequence is not None:
            size += 8 * len(kept.sequence.words)
        if len(self._kept) >= tiling.KEPT_PLANS or self._kept_bytes + size > tiling.KEPT_PLAN_BYTES:
            self._kept.clear()
            self._sizes.clear()
            self._ties.clear()
            self._kept_bytes = 0
        self._kept[key] = kept
        # (two threads may have made the same)
        self._kept_bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        self._ties.tie(key, formulas)
        return kept

    def _forget(self, key: tuple[Any, ...]) -> None:
        self._kept.pop(key, None)
        self._kept_bytes -= self._sizes.pop(key, 0)

    def _ran(self, key: tuple[Any, ...], arrays: tuple[np.ndarray | None, ...]) -> bool:
        """Run a call of a form that is kept as one sequence; False: it is not kept."""
        known = self._kept.get(key)
        if known is None or known.sequence is None:
            return False
        launch.launch(known.sequence, arrays)
        latest.call = known.sequence.call
        return True

    @property
    def traits(self) -> Traits:
        """Return what the processor's products leave open."""
        halves = ("float16", "bfloat16")
        return Traits(grad_pre=tuple(x for x in halves if library.grad_pre_format(x) == x))

    def forward(self, p: GemmProblem) -> None:
        """``out = act(a @ b + bias + residual)``, and the pre-activation where asked for."""
        value = p.activation.trace(0)
        a, b, bias, residual, pre, out = arrays = (p.a, p.b, p.bias, p.residual, p.pre, p.out)
        key = None
        if not p.batch:
            # At 64 x 64 x 64 the arithmetic takes 3 us: what is looked up here in one step would
            # take as long again in several.
            key = (
                value.serial,
                p.dtype,
                p.m,
                p.n,
                p.k,
                a.strides,
                b.strides,
                out.strides,
                _threads(p),
                None if bias is None else bias.strides,
                None if residual is None else (residual.shape, residual.strides),
                None if pre is None else pre.strides,
            )
            if self._ran(key, arrays):
                return
        if not out.size:
            return descriptors.nothing()
        fmt = FORMATS[p.dtype]
        row = rows.forward(
            p.activation.curve, fmt, bias is not None, residual is not None, pre is not None
        )
        slots = Slots(
            bias=_optional(BIAS, bias),
            extra=_optional(RESIDUAL, residual),
            out=operand(OUT, out),
            pre=_optional(PRE, pre),
        )
        plan = descriptors.gemm(operand(A, a), fmt, operand(B, b), fmt, row, slots, p.batch)
        if plan is None:
            return
        if key is not None:
            self._keep(key, Kept(descriptors.alone(plan), (), ()), (value,))
        descriptors.run(plan, arrays)

    def backward(self, p: GemmBackwardProblem) -> None:
        """grad_pre with the column sums of d_bias in its epilogue, then d_a and d_b; by blocks of
        rows where grad_pre is large.
        """
        apart = False
        if p.batch:
            given, p = p, as_one(p)
            apart = p is not given  # (some rows are to be gathered)
        # Where the activation is the identity, grad_pre is grad itself and there is no slope.
        identity = p.activation.trace(0) is SYMBOL
        slope = None if identity else p.activation.trace(1)
        formula = None if slope is None else slope.serial
        a, b, bias, grad, d_a, d_b, d_bias = p.a, p.b, p.bias, p.grad, p.d_a, p.d_b, p.d_bias
        pre = None if identity else p.pre
        threads = launch.threads() if p.batch else _threads(p)
        if threads == 1 and pre is not None and pre.size < tiling.PARALLEL_ELEMENTS:
            pre = pre.astype(p.acc_dtype, copy=False)
        arrays = (a, b, bias, grad, pre, d_a, d_b, d_bias)
        key: tuple[Any, ...]
        if p.batch or apart:
            forms = tuple(None if x is None else (x.shape, x.strides) for x in arrays)
            saved = None if pre is None else pre.dtype
            key = (forms, formula, p.dtype, saved, p.batch, p.guard, threads)
        else:
            key = (
                formula,
                p.dtype,
                p.m,
                p.n,
                p.k,
                a.strides,
                b.strides,
                grad.strides,
                p.guard,
                None if bias is None else bias.strides,
                None if pre is None else (pre.dtype, pre.strides),
                None if d_a is None else d_a.strides,
                None if d_b is None else d_b.strides,
                None if d_bias is None else d_bias.strides,
                threads,
            )
        formulas = () if slope is None else (slope,)
        self._run_kept(p, key, arrays, lambda x: self._backward_schedules(p, x, slope), formulas)

    def threads_of(self, p: GemmProblem | GemmBackwardProblem) -> int:
        """The threads of a product, as a part of the key of its calls."""
        return launch.threads() if p.batch else _threads(p)

    def scheduled(
        self,
        p: GemmDoubleBackwardProblem | GemmTangentProblem,
        arrays: tuple[np.ndarray | None, ...],
        what: tuple[Any, ...],
        make: Callable[[tuple[np.ndarray | None, ...]], list[Schedule]],
        formulas: Sequence[Expr] = (),
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Run what `higher` has made of products; `what` and the formulas name it beside the forms
        of the arrays.

        `make` turns arrays into schedules, once for every form of call. `key` stands for `what` and
        the forms, where the caller has one.
        """
        threads = self.threads_of(p)
        pre = arrays[PRE]
        if threads == 1 and pre is not None and pre.size < tiling.PARALLEL_ELEMENTS:
            pre = pre.astype(p.acc_dtype, copy=False)
            arrays = (*arrays[:PRE], pre, *arrays[PRE + 1 :])
        forms = tuple(None if x is None else (x.shape, x.strides) for x in arrays)
        saved = None if pre is None else pre.dtype
        named = tuple(formula.serial for formula in formulas)
        key = key or (what, named, forms, p.dtype, saved, p.batch, p.m, threads)
        self._run_kept(p, key, arrays, make, formulas)

    def _run_kept(
        self,
        p: GemmProblem | GemmBackwardProblem,
        key: tuple[Any, ...],
        arrays: tuple[np.ndarray | None, ...],
        make: Callable[[tuple[np.ndarray | None, ...]], list[Schedule]],
        formulas: Sequence[Expr],
    ) -> None:
        known = self._kept.get(key)
        if known is None:
            if settled(p):
                return descriptors.nothing()
            known = self._keep(key, self._kept_schedules(p, arrays, make), formulas)
        sequence, totals, schedules = known
        if sequence is not None:
            descriptors.run_sequence(sequence, _with_totals(arrays, totals) if totals else arrays)
        elif schedules:
            self._step_by_step(p, arrays, schedules)

    def _kept_schedules(
        self,
        p: GemmProblem | GemmBackwardProblem,
        arrays: tuple[np.ndarray | None, ...],
        make: Callable[[tuple[np.ndarray | None, ...]], list[Schedule]],
    ) -> Kept:
        """How every call of this form is run."""
        arrays = _with_totals(arrays, ())
        schedules = make(arrays)
        pre = arrays[PRE]
        steps = sum(len(schedule.steps) for schedule in schedules)
        if (
            p.batch
            or (pre is not None and pre.dtype != p.acc_dtype)
            or steps > tiling.BLOCKS_IN_ONE_LAUNCH
        ):
            return Kept(None, (), schedules)
        phases = [phase for schedule in schedules for phase in _phases(schedule, arrays)]
        if not any(phases):
            return Kept(None, (), ())
        own: dict[int, descriptors.Operand] = {}
        for schedule in schedules:
            for x in schedule.steps[0].launches.own:
                # What several gather in one place has room for the largest.
                if x.number not in own or math.prod(own[x.number].shape) < math.prod(x.shape):
                    own[x.number] = x
        totals = [total for schedule in schedules for total in schedule.totals]
        return Kept(descriptors.sequence(phases, own.values(), (GRAD, GRAD_PRE)), totals, ())

    def _step_by_step(
        self,
        p: GemmProblem | GemmBackwardProblem,
        arrays: tuple[np.ndarray | None, ...],
        schedules: Sequence[Schedule],
    ) -> None:
        """A backward as many launches: where NumPy has to do something between them."""
        # All memory before anything is written.
        every_whole = [_with_totals(arrays, schedule.totals) for schedule in schedules]
        with launch.room(max(schedule.size for schedule in schedules)) as memory:
            for schedule, whole in zip(schedules, every_whole, strict=True):
                if not p.batch:  # some rows may have to be gathered
                    whole = (*whole, *(None,) * (NUMBERS - len(whole)))
                for step in schedule.steps:
                    every = [*whole] if step.block is None else _parts(step.block, whole)
                    for number, shape, dtype, offset in step.held:
                        place = offset
                        if number == GRAD_PRE:
                            grad = every[GRAD]
                            if grad is None:
                                grad = every[GATHERED[GRAD]]
                            place += _beside(grad, memory.address + offset)
                        held = memory.array(place, shape, dtype)
                        if number == PRE:
                            held[...] = every[PRE]
                        every[number] = held
                    called = tuple(every)
                    ends = called
                    if step.before or step.after:
                        ends = (*whole[: second_order.S + 1], *every[second_order.S + 1 :])
                    for move in step.before:
                        launch.launch_in(memory.address, move.alone, ends)
                    for plan in step.launches.plans:
                        descriptors.run(plan, called, memory.address)
                    for move in step.after:
                        launch.launch_in(memory.address, move.alone, ends)
                    sums, d_bias, total = every[SUMS], every[D_BIAS], every[TOTAL_BIAS]
                    if p.batch and sums is not None and d_bias is not None and total is not None:
                        _join_batch(sums, d_bias, total, step.turns[2])

    def _backward_schedules(
        self, p: GemmBackwardProblem, arrays: tuple[np.ndarray | None, ...], slope: Expr | None
    ) -> list[Schedule]:
        """A backward in blocks that bound what it holds."""
        a, b, bias, grad, _, d_a, d_b, d_bias, *rest = arrays
        fmt = FORMATS[p.dtype]
        chunk, itemsize = library.chunk(fmt), microkernel.itemsize(library.grad_pre_format(fmt))
        if slope is not None:
            held = p.k if p.dtype != p.acc_dtype else 0
            rows, members = tiling.backward_block(p.m, p.n, held, itemsize, chunk)
            return [self._schedule(p, arrays, slope, rows, members)]
        # No grad_pre has to be held: the products in one piece, the partial sums of d_bias in
        # blocks that take as much room as grad_pre would.
        schedules = []
        if d_a is not None or d_b is not None:
            products = (a, b, bias, grad, None, d_a, d_b, None, *rest)
            rows, members = self.whole_rows(p, arrays), max(1, math.prod(p.batch))
            schedules.append(self._schedule(p, products, None, rows, members))
        if d_bias is not None:
            sums = (a, b, bias, grad, None, None, None, d_bias, *rest)
            sum_size = p.acc_dtype.itemsize
            rows, members = tiling.backward_block(-(-p.m // chunk), p.n, 0, sum_size, 1)
            rows *= chunk
            if _scattered(p, sums):  # here grad is held; whole chunks are joined in any blocks
                rows, members = tiling.backward_block(p.m, p.n, 0, sum_size, chunk)
            schedules.append(self._schedule(p, sums, None, rows, members))
        return schedules

    def whole_rows(
        self, p: GemmProblem | GemmBackwardProblem, arrays: tuple[np.ndarray | None, ...]
    ) -> int:
        """Rows of a block where none has to be held: all, but of what has to be gathered one block
        of K of d_b's product. The sums are the same, where they begin with zero in each.
        """
        fmt = FORMATS[p.dtype]
        kind = library.kind(fmt, fmt)
        if kind == "amx" or not _scattered(p, arrays):
            return max(1, p.m)
        return tiling.k_block(p.m, p.acc_dtype.itemsize, kind)

    def _schedule(
        self,
        p: GemmProblem | GemmBackwardProblem,
        arrays: tuple[np.ndarray | None, ...],
        slope: Expr | None,
        rows: int,
        members: int,
        plans_of: Callable[..., Launches] | None = None,
        twice: tuple[bool, ...] = (),
    ) -> Schedule:
        """The blocks of a backward, with the plans of each: few are of a form of their own.

        `plans_of` makes them in place of `_backward_plans`; a gradient for which `twice` is true is
        the sum of two products, and grows within a block too.
        """
        if plans_of is None:
            plans_of = partial(self._backward_plans, p, slope)
        gradients = arrays[D_A : D_BIAS + 1]
        summed = [() if x is None else _summed_axes(x, p.batch) for x in gradients]
        parts = [
            (block, block.turns(summed, p.batch, p.m)) for block in cut(p.batch, p.m, rows, members)
        ]
        # d_bias grows in float64, half types in the accumulator's dtype, others where they are.
        scattered = _scattered(p, arrays)
        totals: list[Total] = []
        for i, x in enumerate(gradients):
            grows = any(turns[i] != Turn() for _, turns in parts) or any(twice[i : i + 1])
            if x is not None and i == 2 and (grows or p.batch):
                # The sum, and the rounding errors made in it.
                shape = (*x.shape[:-2], 2, x.shape[-1])
                totals.append(Total(TOTAL_A + i, shape, np.dtype(np.float64)))
            elif x is not None and grows and x.dtype != p.acc_dtype:
                shape = (p.m, x.shape[-1]) if D_A + i in scattered else x.shape
                totals.append(Total(TOTAL_A + i, shape, p.acc_dtype))
        whole: list[descriptors.Operand | None] = []
        for number, x in enumerate(arrays):
            if x is not None and number in scattered:
                dtype = p.acc_dtype if number == PRE else p.dtype
                whole.append(descriptors.temporary(GATHERED[number], (p.m, x.shape[-1]), dtype))
            else:
                whole.append(_optional(number, x))
        for total in totals:
            whole[total.number] = descriptors.temporary(*total)
        made: dict[Any, Launches] = {}
        for block, turns in parts:
            if (block.sizes, turns) not in made:
                operands = tuple(
                    None if x is None else x._replace(shape=block.shape(x.shape, i in BY_ROWS))
                    for i, x in enumerate(whole)
                )
                launches = plans_of(operands, block.sizes[:-1], turns)
                used = {number for plan in launches.plans for _, number in plan.places}
                gathered = [op for i in scattered if (op := operands[i]) and op.number in used]
                # Before the others: grad_pre is the last, and lies as grad does.
                launches = launches._replace(own=[*gathered, *launches.own])
                made[block.sizes, turns] = launches
        moves = [
            _moves(p, arrays, scattered, block.rows, made[block.sizes, turns].own)
            for block, turns in parts
        ]
        plans = [plan for x in made.values() for plan in x.plans]
        room = max((descriptors.alone(plan).size for plan in plans), default=0)
        room = max([room, *(move.alone.size for pair in moves for way in pair for move in way)])
        # The first block is the largest.
        block, turns = parts[0]
        places, size = descriptors.places(made[block.sizes, turns].own, room)
        size += launch.PAGE if size > room else 0  # for grad_pre, the last, to be moved within
        steps = []
        for (block, turns), (before, after) in zip(parts, moves, strict=True):
            launches = made[block.sizes, turns]
            held = [
                Held(
                    x.number, x.shape, p.dtype if x.itemsize == 2 else p.acc_dtype, places[x.number]
                )
                for x in launches.own
            ]
            steps.append(
                Step(block if len(parts) > 1 else None, turns, launches, held, before, after)
            )
        return Schedule(steps, size, totals)

    def _backward_plans(
        self,
        p: Any,
        slope: Expr | None,
        operands: tuple[descriptors.Operand | None, ...],
        batch: tuple[int, ...],
        turns: tuple[Turn, ...],
    ) -> Launches:
        """The launches of a block.  With batch axes the partial sums of d_bias are left to be
        joined.
        """
        fmt, acc = FORMATS[p.dtype], FORMATS[p.acc_dtype]
        chunk = library.chunk(fmt)
        a, b, bias, grad, pre, d_a, d_b, d_bias, _, _, total_a, total_b, total_bias = operands
        assert a is not None and b is not None and grad is not None
        m, n = grad.shape[-2:]
        first: list[descriptors.Plan | None] = []
        plans: list[descriptors.Plan | None] = []
        own: list[descriptors.Operand] = []
        sums = None
        if d_bias is not None:
            # Two rows of partial sums for every chunk of rows.
            sums = descriptors.temporary(SUMS, (*batch, 2 * -(-m // chunk), n), p.acc_dtype)
            own.append(sums)
        products = d_a is not None or d_b is not None
        grad_pre, grad_format = grad, fmt
        if slope is None:
            if sums is not None:
                row = rows.column_sums(fmt)
                slots = Slots(grad=grad, sums=sums)
                first.append(descriptors.elementwise(m, n, row, slots, batch, chunk))
        elif products or sums is not None:
            if pre is not None and pre.itemsize != p.acc_dtype.itemsize:
                pre = descriptors.temporary(PRE, pre.shape, p.acc_dtype)
                own.append(pre)
            out = None
            if products:
                # In the accumulator's dtype: d_a and d_b then read it without another rounding.
                # But products of halves as they are take it in halves too.
                grad_format = library.grad_pre_format(fmt)
                dtype = p.dtype if grad_format == fmt else p.acc_dtype
                out = descriptors.temporary(GRAD_PRE, (*batch, m, n), dtype)
                own.append(out)
                grad_pre = out
            has_bias, saved = bias is not None and pre is None, pre is not None
            curve, summed_too = p.activation.curve, sums is not None
            row = rows.grad_pre(curve, fmt, has_bias, saved, products, summed_too, p.guard)
            slots = Slots(None if pre is not None else bias, pre, grad, out, None, sums)
            if pre is None:
                first.append(descriptors.gemm(a, fmt, b, fmt, row, slots, batch))
            else:
                first.append(descriptors.elementwise(m, n, row, slots, batch, chunk))
        turn_a, turn_b, turn_bias = turns
        if d_bias is not None and sums is not None and not batch:
            plans.append(
                descriptors.join(
                    library.join_cell(fmt),
                    sums,
                    d_bias if turn_bias.last else None,
                    None if turn_bias.first else total_bias,
                    None if turn_bias.last else total_bias,
                )
            )
        if d_a is not None:
            summed, right = _summed_axes(d_a, batch), b.turned()
            store, slots = _growing(fmt, acc, d_a, total_a, turn_a)
            plans.append(
                descriptors.gemm(grad_pre, grad_format, right, fmt, store, slots, batch, summed)
            )
        if d_b is not None:
            summed, left = _summed_axes(d_b, batch), a.turned()
            store, slots = _growing(fmt, acc, d_b, total_b, turn_b)
            plans.append(
                descriptors.gemm(left, fmt, grad_pre, grad_format, store, slots, batch, summed)
            )
        return Launches(
            [[plan for plan in phase if plan is not None] for phase in (first, plans)], own
        )

    def gated(self, p: GatedProblem) -> None:
        """``out = act(a) * b``"""
        self._gated(p.activation, p.dtype, (p.a, p.b, p.out), p.contiguous)

    def _gated(
        self,
        activation: Activation,
        dtype: np.dtype[Any],
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        contiguous: bool,
    ) -> None:
        a, b, out = arrays
        size = out.size
        key = None
        if size < tiling.PARALLEL_ELEMENTS:
            form = size if contiguous else (out.shape, a.strides, b.strides, out.strides)
            key = activation.trace(0).serial, dtype, form
            if self._ran(key, arrays):
                return
        if not size:
            return descriptors.nothing()
        # Views that number the same elements in another way: the addresses are those of the arrays.
        flat_out, flat_a, flat_b = _merged((out, a, b))
        fmt = FORMATS[dtype]
        row = rows.gate(activation.curve, fmt)
        stream = None
        if _streams((flat_out,)):
            stream = rows.gate(activation.curve, fmt, True)
        slots = Slots(a=operand(0, flat_a), b=operand(1, flat_b), out=operand(2, flat_out))
        formulas = (activation.trace(0),)
        self._run_elementwise(row, slots, arrays, flat_out.shape, stream, key, formulas)

    def gated_backward(self, p: GatedBackwardProblem) -> None:
        """``d_a = grad * b * act'(a)``, ``d_b = grad * act(a)``"""
        a, b, grad, d_a, d_b = arrays = (p.a, p.b, p.grad, p.d_a, p.d_b)
        activation = p.activation
        if d_a is None:
            if d_b is not None:  # a forward with another factor
                self._gated(activation, p.dtype, (a, grad, d_b), False)
            return
        value, slope = activation.trace(0), activation.trace(1)
        key = None
        if a.size < tiling.PARALLEL_ELEMENTS:
            form: Any = a.size
            if not p.contiguous:
                form = a.shape, *(None if x is None else x.strides for x in arrays)
            key = value.serial, slope.serial, p.dtype, p.guard, form
            if self._ran(key, arrays):
                return
        if not a.size:
            return descriptors.nothing()
        fmt = FORMATS[p.dtype]
        flat_d_b = stream = None
        if d_b is None:
            flat_d_a, flat_grad, flat_a, flat_b = _merged((d_a, grad, a, b))
            row = rows.gate_backward(activation.curve, fmt, p.guard, False)
        else:
            flat_d_a, flat_d_b, flat_grad, flat_a, flat_b = _merged((d_a, d_b, grad, a, b))
            row = rows.gate_backward(activation.curve, fmt, p.guard)
            if _streams((flat_d_a, flat_d_b)):
                stream = rows.gate_backward(activation.curve, fmt, p.guard, True, True)
        slots = Slots(
            a=operand(0, flat_a),
            b=operand(1, flat_b),
            grad=operand(2, flat_grad),
            out=operand(3, flat_d_a),
            extra=_optional(4, flat_d_b),
        )
        self._run_elementwise(row, slots, arrays, flat_d_a.shape, stream, key, (value, slope))

    def double_backward(self, p: GemmDoubleBackwardProblem) -> None:
        """The gradients of the backward's gradients, weighted with cotangents."""
        second_order.double_backward(self, p)

    def tangent(self, p: GemmTangentProblem) -> None:
        """The forward, and its derivative along tangents."""
        second_order.tangent(self, p)

    def gated_double_backward(self, p: GatedDoubleBackwardProblem) -> None:
        """Compute the gradients of a gate's gradients, weighted with cotangents."""
        second_order.gated_double_backward(self, p)

    def gated_tangent(self, p: GatedTangentProblem) -> None:
        """A gate, and its derivative along tangents."""
        second_order.gated_tangent(self, p)

    def _run_elementwise(
        self,
        row: Kernel,
        slots: Slots,
        arrays: tuple[np.ndarray | None, ...],
        shape: tuple[int, ...],
        stream: Kernel | None,
        key: tuple[Any, ...] | None,
        formulas: Sequence[Expr],
    ) -> None:
        """A row function over every row of `shape`; kept as a sequence where there is a key."""
        *batch, m, n = shape
        plan = descriptors.elementwise(m, n, row, slots, tuple(batch), stream=stream)
        if plan is None:
            return
        if key is not None:
            self._keep(key, Kept(descriptors.alone(plan), (), ()), formulas)
        descriptors.run(plan, arrays)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.empty(shape, dtype)

    def describe(self) -> dict[str, Any]:
        """Return what `python -m numfuse info` tells about this backend, by name."""
        from numfuse.runtime import specialise

        return {
            "device": host.name(),
            "vector width": f"{8 * host.vector_bytes()} bits ({host.vector_name()})",
            "half products": {
                fmt: host.product_name(host.product(fmt), fmt) for fmt in ("float16", "bfloat16")
            },
            "register tile": {
                acc: f"{r.mr} x {r.nr}"
                for acc in ("float32", "float64")
                for r in [library.registers(acc)]
            },
            "level-2 cache": f"{tiling.level2_bytes() >> 10} KiB",
            "threads": launch.threads(),
            "threading layer": launch.threading_layer(),
            "kernel cache": specialise.cache_directory(gemm.gemm_cell),
        }

    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Compile every kernel that calls with these activations and dtypes can take."""
        for what, compile_one in self.warmup_steps(activations, dtypes):
            if progress is not None:
                progress(what)
            compile_one()

    def warmup_steps(
        self, activations: Sequence[Activation], dtypes: Sequence[np.dtype[Any]]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """(what is compiled, the call that compiles it): a progress bar counts them first."""
        yield "launching", launch.warmup
        yield "elementwise", library.elementwise_cell
        for fmt in dict.fromkeys(dtype.name for dtype in dtypes):
            acc = library.accumulator(fmt)
            kind = library.kind(fmt, fmt)
            yield f"gemm {acc}", partial(library.gemm_cell, acc, kind, fmt)
            for source in dict.fromkeys((fmt, library.grad_pre_format(fmt))):
                for pack in (library.pack_a, library.pack_b):
                    yield f"packing {source}", partial(pack, source, acc, kind)
            yield f"store {fmt}", partial(rows.store, fmt)
            yield f"copy {fmt}", partial(rows.copy, fmt, fmt)
            yield f"add {acc}", partial(rows.add, acc)
            if acc != fmt:
                yield f"store {acc}", partial(rows.store, acc)
                yield f"copy {acc}", partial(rows.copy, acc, acc)
                yield f"copy {fmt} as {acc}", partial(rows.copy, fmt, acc)
                yield f"add and store {fmt}", partial(rows.add_and_store, fmt)
            yield f"column sums {fmt}", partial(rows.column_sums, fmt)
            yield f"joined sums {fmt}", partial(library.join_cell, fmt)
            for act in activations:
                for call in rows.of_activation(act, fmt):
                    yield f"{act.name} {fmt}", call


def _join_batch(sums: np.ndarray, d_bias: np.ndarray, total: np.ndarray, turn: Turn) -> None:
    """Join the partial column sums (*batch, rows, N) of a block of batch elements to `total`, those
    of summed axes one after another, and round that to d_bias after the last."""
    batch = sums.shape[:-2]
    summed = _summed_axes(d_bias, batch)
    outer = [axis for axis, size in enumerate(batch) if size != 1 and axis not in summed]
    inner = [axis for axis in range(sums.ndim - 1) if axis not in outer]
    rows = math.prod(sums.shape[axis] for axis in inner)
    sums = sums.transpose(*outer, *inner, sums.ndim - 1)
    sums = sums.reshape(*sums.shape[: len(outer)], rows, sums.shape[-1])
    missing = len(batch) - (d_bias.ndim - 2)
    where = tuple(slice(None) if a in outer else 0 for a in range(missing, len(batch)))
    out, carried = d_bias[where], total[where]
    joined = operand(2, carried)
    plan = descriptors.join(
        library.join_cell(FORMATS[d_bias.dtype]),
        operand(0, sums),
        operand(1, out) if turn.last else None,
        None if turn.first else joined,
        None if turn.last else joined,
    )
    if plan is not None:
        descriptors.run(plan, (sums, out, carried))


if (_refused := host.refused_setting()) is not None:
    raise BackendUnavailable("cpu", _refused)
BACKEND = CpuBackend()
