"""The CPU backend: each operation as launches of the kernels in `kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from numfuse import tiling
from numfuse.backends.cpu import driver, host, launch, library, microkernel
from numfuse.backends.cpu.blocks import Block, Held, Schedule, Step, Total, Turn, cut
from numfuse.backends.cpu.driver import Slots, operand
from numfuse.backends.cpu.peak import fma_peak
from numfuse.expr import SYMBOL

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.expr import Expr
    from numfuse.problem import (
        GatedBackwardProblem,
        GatedProblem,
        GemmBackwardProblem,
        GemmProblem,
    )
    from numfuse.specialise import Kernel

#: Storage dtypes by their names (`dtype.name` takes two microseconds to say the same).
FORMATS = {np.dtype(t): np.dtype(t).name for t in ("f8", "f4", "f2")}
FORMATS[np.dtype(ml_dtypes.bfloat16)] = "bfloat16"

__all__ = ["BACKEND", "CpuBackend", "fma_peak"]

# The arrays of a call by number, as plans know them: those of the caller, then the call's own.
A, B, BIAS, RESIDUAL, PRE, OUT = range(6)  # of a forward
GRAD, D_A, D_B, D_BIAS, GRAD_PRE, SUMS = 3, 5, 6, 7, 8, 9  # of a backward; 0-2 and PRE as above
TOTAL_A, TOTAL_B, TOTAL_BIAS = 10, 11, 12  # gradients that grow block by block
BY_ROWS = (A, GRAD, PRE, D_A, TOTAL_A)  # cut where a backward is cut by rows


def _optional(number: int, x: np.ndarray | None) -> driver.Operand | None:
    return None if x is None else operand(number, x)


def _summed_axes(gradient: np.ndarray | driver.Operand, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of `batch` that a gradient (..., rows, columns) lacks or has with length 1."""
    if not batch:
        return ()
    own = (1,) * (len(batch) - (len(gradient.shape) - 2)) + gradient.shape[:-2]
    return tuple(axis for axis, size in enumerate(batch) if own[axis] == 1 and size != 1)


def _operands(arrays: Sequence[np.ndarray | None]) -> tuple[driver.Operand | None, ...]:
    """The arrays of a backward as plans know them; those that are not there at the end too."""
    missing = (None,) * (TOTAL_BIAS + 1 - len(arrays))
    return (*(_optional(number, x) for number, x in enumerate(arrays)), *missing)


def _parts(block: Block, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """A block's part of each array of a backward."""
    return [None if x is None else block.of(x, i in BY_ROWS) for i, x in enumerate(arrays)]


def _beside(grad: np.ndarray | None, address: int) -> int:
    """How far into a page after `address` grad_pre begins: a line further than grad does.

    The pass that writes grad_pre reads grad, and mostly a saved pre-activation, in the same places
    of other pages.  Reads that a processor takes ahead of a write wait where both agree in the
    address within a page: with grad_pre one or two KiB further, the pass was measured to take
    1.6 times as long.
    """
    assert grad is not None
    distance = grad.__array_interface__["data"][0] + tiling.LINE - address
    return int(distance % launch.PAGE // tiling.LINE * tiling.LINE)


def _growing(
    fmt: str, acc: str, out: driver.Operand, total: driver.Operand | None, turn: Turn
) -> tuple[Kernel, Slots]:
    """The row function that stores a block's part of a sum or adds to it, and its operands.

    `total` is where a half type is summed; others are summed in `out`.
    """
    if turn.first:
        if turn.last or total is None:
            return library.store_row(fmt), Slots(out=out)
        return library.store_row(acc), Slots(out=total)
    if total is None:
        return library.add_row(acc), Slots(out=out)
    if turn.last:
        return library.add_and_store_row(fmt), Slots(extra=total, out=out)
    return library.add_row(acc), Slots(out=total)


def _merged(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same elements, in one order, as (..., rows, columns) with as few axes as strides allow.

    The last axis is the one along which the first array is densest.
    """
    if all(x.flags.c_contiguous for x in arrays):
        return [x.reshape(1, -1) for x in arrays]
    shape = arrays[0].shape
    order = sorted(
        (axis for axis, size in enumerate(shape) if size != 1),
        key=lambda axis: -abs(arrays[0].strides[axis]),
    )
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []
    for axis in order:
        here = tuple(x.strides[axis] for x in arrays)
        size = shape[axis]
        if sizes and strides[-1] == tuple(step * size for step in here):
            sizes[-1] *= size
            strides[-1] = here
        else:
            sizes.append(size)
            strides.append(here)
    while len(sizes) < 2:
        sizes.insert(0, 1)
        strides.insert(0, (0,) * len(arrays))
    steps = zip(*strides, strict=True)
    return [
        np.lib.stride_tricks.as_strided(x, sizes, step)
        for x, step in zip(arrays, steps, strict=True)
    ]


def _is_small(p: GemmProblem | GemmBackwardProblem) -> bool:
    """Whether products without batch axes take one thread, whatever Numba's setting."""
    return p.m * p.n * p.k < tiling.PARALLEL_FMAS and launch.OBJECTS_CAN_BE_READ


class CpuBackend:
    """Fused kernels on the host's vector units, parallel over cells of the output."""

    name = "cpu"

    def __init__(self) -> None:
        #: Sequences of small plain calls by everything that they depend on.
        self._small: dict[tuple[Any, ...], driver.Sequence] = {}
        #: Schedules of other backwards, likewise.
        self._schedules: dict[tuple[Any, ...], Schedule] = {}

    def _keep(
        self, key: tuple[Any, ...], plans: list[driver.Plan], own: Sequence[driver.Operand]
    ) -> driver.Sequence:
        if len(self._small) >= tiling.SMALL_PLANS:
            self._small.clear()
        self._small[key] = made = driver.sequence(plans, own)
        return made

    def forward(self, p: GemmProblem) -> None:
        """``out = act(a @ b + bias + residual)``, and the pre-activation where asked for."""
        value = p.activation.trace(0)
        a, b, bias, residual, pre, out = arrays = (p.a, p.b, p.bias, p.residual, p.pre, p.out)
        key = None
        if not p.batch and _is_small(p):
            # At 64 x 64 x 64 the arithmetic takes 3 us: what is looked up here in one step would
            # take as long again in several.
            key = (
                value, p.dtype, p.m, p.n, p.k, a.strides, b.strides, out.strides,
                None if bias is None else bias.strides,
                None if residual is None else (residual.shape, residual.strides),
                None if pre is None else pre.strides,
            )  # fmt: skip
            known = self._small.get(key)
            if known is not None:
                driver.run_sequence(known, arrays)
                return
        fmt = FORMATS[p.dtype]
        row = library.forward_row(
            value, fmt, bias is not None, residual is not None, pre is not None
        )
        slots = Slots(
            bias=_optional(BIAS, bias), extra=_optional(RESIDUAL, residual),
            out=operand(OUT, out), pre=_optional(PRE, pre),
        )  # fmt: skip
        plan = driver.gemm(operand(A, a), fmt, operand(B, b), fmt, row, slots, p.batch)
        if plan is None:
            return
        if key is not None:
            driver.run_sequence(self._keep(key, [plan], ()), arrays)
        else:
            driver.run(plan, arrays)

    def backward(self, p: GemmBackwardProblem) -> None:
        """grad_pre with the column sums of d_bias in its epilogue, then d_a and d_b; by blocks of
        rows where grad_pre is large.
        """
        # Where the activation is the identity, grad_pre is grad itself and there is no slope.
        identity = p.activation.trace(0) is SYMBOL
        slope = None if identity else p.activation.trace(1)
        a, b, bias, grad, d_a, d_b, d_bias = p.a, p.b, p.bias, p.grad, p.d_a, p.d_b, p.d_bias
        pre = None if identity else p.pre
        # grad_pre of a sequence lies in the workspace, which is kept: so M x N is bounded too.
        if not p.batch and _is_small(p) and p.m * p.n < tiling.PARALLEL_ELEMENTS:
            if pre is not None:
                pre = pre.astype(p.acc_dtype, copy=False)
            arrays = (a, b, bias, grad, pre, d_a, d_b, d_bias)
            key = (
                slope, p.dtype, p.m, p.n, p.k, a.strides, b.strides, grad.strides, p.guard,
                None if bias is None else bias.strides,
                None if pre is None else pre.strides,
                None if d_a is None else d_a.strides,
                None if d_b is None else d_b.strides,
                None if d_bias is None else d_bias.strides,
            )  # fmt: skip
            known = self._small.get(key)
            if known is not None:
                driver.run_sequence(known, arrays)
                return
            plans, own = self._backward_plans(p, _operands(arrays), slope, (), (Turn(),) * 3)
            if plans:
                driver.run_sequence(self._keep(key, plans, own), arrays)
            return
        acc = FORMATS[p.acc_dtype]
        chunk, itemsize = library.registers(acc).chunk, microkernel.itemsize(acc)
        if not identity:
            held = p.k if p.dtype != p.acc_dtype else 0
            rows, members = tiling.backward_block(p.m, p.n, held, itemsize, chunk)
            self._backward_in_blocks(p, (pre, d_a, d_b, d_bias), slope, rows, members)
            return
        # No grad_pre has to be held: the products in one piece, the partial sums of d_bias in
        # blocks that take as much room as grad_pre would.
        if d_a is not None or d_b is not None:
            rows, members = max(1, p.m), max(1, math.prod(p.batch))
            self._backward_in_blocks(p, (None, d_a, d_b, None), None, rows, members)
        if d_bias is not None:
            rows, members = tiling.backward_block(-(-p.m // chunk), p.n, 0, itemsize, 1)
            self._backward_in_blocks(p, (None, None, None, d_bias), None, rows * chunk, members)

    def _backward_in_blocks(
        self, p: GemmBackwardProblem, varying: tuple[np.ndarray | None, ...], slope: Expr | None,
        rows: int, members: int,
    ) -> None:  # fmt: skip
        """grad_pre of `rows` rows of `members` batch elements, and what it adds to each gradient;
        then the next.  `varying`: the saved pre-activation, d_a, d_b, d_bias.
        """
        pre, *gradients = varying
        arrays = [p.a, p.b, p.bias, p.grad, pre, *gradients, *(None,) * 5]
        forms = tuple(None if x is None else (x.shape, x.strides) for x in arrays[:GRAD_PRE])
        threads = launch.threads()
        key = (
            forms, slope, p.dtype, None if pre is None else pre.dtype, p.batch, p.guard, rows,
            members, threads,
        )  # fmt: skip
        schedule = self._schedules.get(key)
        if schedule is None:
            if len(self._schedules) >= tiling.SMALL_PLANS:
                self._schedules.clear()
            schedule = self._schedules[key] = self._schedule(p, arrays, slope, rows, members)
        for number, shape, dtype in schedule.totals:
            arrays[number] = np.empty(shape, dtype)
        with launch.room(schedule.size) as memory:
            for step in schedule.steps:
                every = arrays[:] if step.block is None else _parts(step.block, arrays)
                for number, shape, dtype, offset in step.own:
                    place = offset
                    if number == GRAD_PRE:
                        place += _beside(every[GRAD], memory.address + offset)
                    held = memory.array(place, shape, dtype)
                    if number == PRE:
                        held[...] = every[PRE]
                    every[number] = held
                called = tuple(every)
                for plan in step.plans:
                    driver.run(plan, called, memory.address)
                sums, d_bias, total = every[SUMS], every[D_BIAS], every[TOTAL_BIAS]
                if p.batch and sums is not None and d_bias is not None and total is not None:
                    _reduce_sums(sums, d_bias, total, step.turns[2])

    def _schedule(
        self, p: GemmBackwardProblem, arrays: Sequence[np.ndarray | None], slope: Expr | None,
        rows: int, members: int,
    ) -> Schedule:  # fmt: skip
        """The blocks of a backward, with the plans of each: few are of a form of their own."""
        gradients = arrays[D_A : D_BIAS + 1]
        summed = [() if x is None else _summed_axes(x, p.batch) for x in gradients]
        parts = [
            (block, block.turns(summed, p.batch, p.m)) for block in cut(p.batch, p.m, rows, members)
        ]
        # d_bias grows in float64, half types in the accumulator's dtype, others where they are.
        totals: list[Total] = []
        for i, x in enumerate(gradients):
            grows = any(turns[i] != Turn() for _, turns in parts)
            if x is not None and i == 2 and (grows or p.batch):
                totals.append(Total(TOTAL_A + i, x.shape, np.dtype(np.float64)))
            elif x is not None and grows and x.dtype != p.acc_dtype:
                totals.append(Total(TOTAL_A + i, x.shape, p.acc_dtype))
        whole = list(_operands(arrays))
        for total in totals:
            whole[total.number] = driver.temporary(*total)
        made: dict[Any, tuple[list[driver.Plan], list[driver.Operand]]] = {}
        for block, turns in parts:
            if (block.sizes, turns) not in made:
                operands = tuple(
                    None if x is None else x._replace(shape=block.shape(x.shape, i in BY_ROWS))
                    for i, x in enumerate(whole)
                )
                made[block.sizes, turns] = self._backward_plans(
                    p, operands, slope, block.sizes[:-1], turns
                )
        room = max((plan.room for plans, _ in made.values() for plan in plans), default=0)
        # The first block is the largest.
        block, turns = parts[0]
        places, size = driver.places(made[block.sizes, turns][1], room)
        size += launch.PAGE if size > room else 0  # for grad_pre, the last, to be moved within
        steps = []
        for block, turns in parts:
            plans, temporaries = made[block.sizes, turns]
            own = [
                Held(
                    x.number, x.shape, p.dtype if x.itemsize == 2 else p.acc_dtype, places[x.number]
                )
                for x in temporaries
            ]
            steps.append(Step(block if len(parts) > 1 else None, turns, plans, own))
        return Schedule(steps, size, totals)

    def _backward_plans(
        self, p: GemmBackwardProblem, operands: tuple[driver.Operand | None, ...],
        slope: Expr | None, batch: tuple[int, ...], turns: tuple[Turn, ...],
    ) -> tuple[list[driver.Plan], list[driver.Operand]]:  # fmt: skip
        """The launches of a block, and the arrays of its own that they need (in acc_dtype).

        With batch axes the partial sums of d_bias are left to be joined.
        """
        fmt, acc = FORMATS[p.dtype], FORMATS[p.acc_dtype]
        chunk = library.registers(acc).chunk
        a, b, bias, grad, pre, d_a, d_b, d_bias, _, _, total_a, total_b, total_bias = operands
        assert a is not None and b is not None and grad is not None
        m, n = grad.shape[-2:]
        plans: list[driver.Plan | None] = []
        own: list[driver.Operand] = []
        sums = None
        if d_bias is not None:
            # One row of partial sums for every chunk of rows.
            sums = driver.temporary(SUMS, (*batch, -(-m // chunk), n), p.acc_dtype)
            own.append(sums)
        products = d_a is not None or d_b is not None
        grad_pre, grad_format = grad, fmt
        if slope is None:
            if sums is not None:
                row = library.column_sums_row(fmt)
                slots = Slots(grad=grad, sums=sums)
                plans.append(driver.elementwise(m, n, row, slots, batch, chunk))
        elif products or sums is not None:
            if pre is not None and pre.itemsize != p.acc_dtype.itemsize:
                pre = driver.temporary(PRE, pre.shape, p.acc_dtype)
                own.append(pre)
            out = None
            if products:
                # In the accumulator's dtype: d_a and d_b then read it without another rounding.
                out = driver.temporary(GRAD_PRE, (*batch, m, n), p.acc_dtype)
                own.append(out)
                grad_pre, grad_format = out, acc
            row = library.grad_pre_row(
                slope, fmt, bias is not None and pre is None, pre is not None, products,
                sums is not None, p.guard,
            )  # fmt: skip
            slots = Slots(None if pre is not None else bias, pre, grad, out, None, sums)
            if pre is None:
                plans.append(driver.gemm(a, fmt, b, fmt, row, slots, batch))
            else:
                plans.append(driver.elementwise(m, n, row, slots, batch, chunk))
        turn_a, turn_b, turn_bias = turns
        if d_bias is not None and sums is not None and not batch:
            plans.append(
                driver.join(
                    library.join_cell(fmt), sums, d_bias if turn_bias.last else None,
                    None if turn_bias.first else total_bias,
                    None if turn_bias.last else total_bias,
                )
            )  # fmt: skip
        if d_a is not None:
            summed, right = _summed_axes(d_a, batch), b.turned()
            store, slots = _growing(fmt, acc, d_a, total_a, turn_a)
            plans.append(
                driver.gemm(grad_pre, grad_format, right, fmt, store, slots, batch, summed)
            )
        if d_b is not None:
            summed, left = _summed_axes(d_b, batch), a.turned()
            store, slots = _growing(fmt, acc, d_b, total_b, turn_b)
            plans.append(driver.gemm(left, fmt, grad_pre, grad_format, store, slots, batch, summed))
        return [plan for plan in plans if plan is not None], own

    def gated(self, p: GatedProblem) -> None:
        """``out = act(a) * b``"""
        out, a, b = _merged((p.out, p.a, p.b))
        row = library.gated_row(p.activation.trace(0), FORMATS[p.dtype])
        slots = Slots(a=operand(0, a), b=operand(1, b), out=operand(2, out))
        plan = driver.elementwise(out.shape[-2], out.shape[-1], row, slots, out.shape[:-2])
        if plan is not None:
            driver.run(plan, (a, b, out))

    def gated_backward(self, p: GatedBackwardProblem) -> None:
        """``d_a = grad * b * act'(a)``, ``d_b = grad * act(a)``"""
        if p.d_a is None and p.d_b is None:
            return
        outputs = [x for x in (p.d_a, p.d_b) if x is not None]
        *outs, grad, a, b = _merged((*outputs, p.grad, p.a, p.b))
        row = library.gated_backward_row(
            p.activation.trace(0), p.activation.trace(1), FORMATS[p.dtype],
            p.d_a is not None, p.d_b is not None, p.guard,
        )  # fmt: skip
        d_a = outs[0] if p.d_a is not None else None
        d_b = outs[-1] if p.d_b is not None else None
        slots = Slots(
            a=operand(0, a), b=operand(1, b), grad=operand(2, grad),
            out=_optional(3, d_a), extra=_optional(4, d_b),
        )  # fmt: skip
        plan = driver.elementwise(a.shape[-2], a.shape[-1], row, slots, a.shape[:-2])
        if plan is not None:
            driver.run(plan, (a, b, grad, d_a, d_b))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.empty(shape, dtype)

    def describe(self) -> dict[str, Any]:
        """What `python -m numfuse info` tells about this backend."""
        from numfuse import specialise

        return {
            "device": host.name(),
            "vector width": f"{8 * host.vector_bytes()} bits ({host.vector_name()})",
            "register tile": {
                acc: f"{r.mr} x {r.nr}"
                for acc in ("float32", "float64")
                for r in [library.registers(acc)]
            },
            "level-2 cache": f"{tiling.level2_bytes() >> 10} KiB",
            "threads": launch.threads(),
            "threading layer": launch.threading_layer(),
            "kernel cache": specialise.cache_directory(),
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
            yield f"gemm {acc}", partial(library.gemm_cell, acc)
            for source in dict.fromkeys((fmt, acc)):
                for pack in (library.pack_a, library.pack_b):
                    yield f"packing {source}", partial(pack, source, acc)
            yield f"store {fmt}", partial(library.store_row, fmt)
            yield f"add {acc}", partial(library.add_row, acc)
            if acc != fmt:
                yield f"store {acc}", partial(library.store_row, acc)
                yield f"add and store {fmt}", partial(library.add_and_store_row, fmt)
            yield f"column sums {fmt}", partial(library.column_sums_row, fmt)
            yield f"joined sums {fmt}", partial(library.join_cell, fmt)
            for act in activations:
                for call in library.rows_of(act, fmt):
                    yield f"{act.name} {fmt}", call


def _reduce_sums(sums: np.ndarray, d_bias: np.ndarray, total: np.ndarray, turn: Turn) -> None:
    """Join the partial column sums of a block of batch elements to `total`, in float64, and round
    that to d_bias after the last: a fixed order, whatever ran on how many threads."""
    axes = (*_summed_axes(d_bias, sums.shape[:-2]), sums.ndim - 2)
    part = np.add.reduce(sums, axis=axes, dtype=np.float64, keepdims=True).reshape(total.shape)
    if turn.first:
        total[...] = part
    else:
        total += part
    if turn.last:
        d_bias[...] = total


BACKEND = CpuBackend()
