"""The CPU backend: each operation as launches of the kernels in `kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from numfuse import tiling
from numfuse.backends.cpu import driver, host, launch, library
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

#: Storage dtypes by their names (`dtype.name` takes two microseconds to say the same).
FORMATS = {np.dtype(t): np.dtype(t).name for t in ("f8", "f4", "f2")}
FORMATS[np.dtype(ml_dtypes.bfloat16)] = "bfloat16"

__all__ = ["BACKEND", "CpuBackend", "fma_peak"]

# The arrays of a call by number, as plans know them: those of the caller, then the call's own.
A, B, BIAS, RESIDUAL, PRE, OUT = range(6)  # of a forward
GRAD, D_A, D_B, D_BIAS, GRAD_PRE, SUMS = 3, 5, 6, 7, 8, 9  # of a backward; 0-2 and PRE as above


def _optional(number: int, x: np.ndarray | None) -> driver.Operand | None:
    return None if x is None else operand(number, x)


def _summed_axes(gradient: np.ndarray | driver.Operand, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of `batch` that a gradient (..., rows, columns) lacks or has with length 1."""
    if not batch:
        return ()
    own = (1,) * (len(batch) - (len(gradient.shape) - 2)) + gradient.shape[:-2]
    return tuple(axis for axis, size in enumerate(batch) if own[axis] == 1 and size != 1)


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
        """grad_pre with the column sums of d_bias in its epilogue, then d_a and d_b."""
        # Where the activation is the identity, grad_pre is grad itself and there is no slope.
        identity = p.activation.trace(0) is SYMBOL
        slope = None if identity else p.activation.trace(1)
        a, b, bias, grad, d_a, d_b, d_bias = p.a, p.b, p.bias, p.grad, p.d_a, p.d_b, p.d_bias
        pre = p.pre
        if pre is not None:
            pre = None if identity else pre.astype(p.acc_dtype, copy=False)
        arrays = (a, b, bias, grad, pre, d_a, d_b, d_bias)
        key = None
        # grad_pre of a sequence lies in the workspace, which is kept: so M x N is bounded too.
        if not p.batch and _is_small(p) and p.m * p.n < tiling.PARALLEL_ELEMENTS:
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
        plans, own = self._backward_plans(p, arrays, slope)
        if key is not None:
            if plans:
                driver.run_sequence(self._keep(key, plans, own), arrays)
            return
        room = {x.number: np.empty(x.shape, p.acc_dtype) for x in own}
        every = (*arrays, room.get(GRAD_PRE), room.get(SUMS))
        for plan in plans:
            driver.run(plan, every)
        if d_bias is not None and p.batch:
            _join_batch(room[SUMS], d_bias, p.batch)

    def _backward_plans(
        self, p: GemmBackwardProblem, arrays: tuple[np.ndarray | None, ...], slope: Expr | None
    ) -> tuple[list[driver.Plan], list[driver.Operand]]:
        """The launches of a backward, and the arrays of its own that they need (in acc_dtype).

        With batch axes the partial sums of d_bias are left to be joined.
        """
        fmt, acc, batch = FORMATS[p.dtype], FORMATS[p.acc_dtype], p.batch
        chunk = library.registers(acc).chunk
        a, b, bias, grad, pre, d_a, d_b, d_bias = (
            _optional(number, x) for number, x in enumerate(arrays)
        )
        assert a is not None and b is not None and grad is not None
        plans: list[driver.Plan | None] = []
        own: list[driver.Operand] = []
        sums = None
        if d_bias is not None:
            # Two rows of partial sums for every chunk of rows.
            sums = driver.temporary(SUMS, (*batch, 2 * -(-p.m // chunk), p.n), p.acc_dtype)
            own.append(sums)
        products = d_a is not None or d_b is not None
        grad_pre, grad_format = grad, fmt
        if slope is None:
            if sums is not None:
                row = library.column_sums_row(fmt)
                slots = Slots(grad=grad, sums=sums)
                plans.append(driver.elementwise(p.m, p.n, row, slots, batch, chunk))
        elif products or sums is not None:
            out = None
            if products:
                # In the accumulator's dtype: d_a and d_b then read it without another rounding.
                out = driver.temporary(GRAD_PRE, (*batch, p.m, p.n), p.acc_dtype)
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
                plans.append(driver.elementwise(p.m, p.n, row, slots, batch, chunk))
        if d_bias is not None and sums is not None and not batch:
            plans.append(driver.join(library.join_cell(fmt), sums, d_bias))
        store = library.store_row(fmt)
        if d_a is not None:
            summed, slots = _summed_axes(d_a, batch), Slots(out=d_a)
            right = b.turned()
            plans.append(
                driver.gemm(grad_pre, grad_format, right, fmt, store, slots, batch, summed)
            )
        if d_b is not None:
            summed, slots = _summed_axes(d_b, batch), Slots(out=d_b)
            left = a.turned()
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
            yield f"column sums {fmt}", partial(library.column_sums_row, fmt)
            yield f"joined sums {fmt}", partial(library.join_cell, fmt)
            for act in activations:
                for call in library.rows_of(act, fmt):
                    yield f"{act.name} {fmt}", call


def _join_batch(sums: np.ndarray, d_bias: np.ndarray, batch: tuple[int, ...]) -> None:
    """Join the partial column sums (*batch, rows, N); those of summed axes one after another."""
    summed = _summed_axes(d_bias, batch)
    outer = [axis for axis, size in enumerate(batch) if size != 1 and axis not in summed]
    inner = [axis for axis in range(sums.ndim - 1) if axis not in outer]
    rows = math.prod(sums.shape[axis] for axis in inner)
    sums = sums.transpose(*outer, *inner, sums.ndim - 1)
    sums = sums.reshape(*sums.shape[: len(outer)], rows, sums.shape[-1])
    missing = len(batch) - (d_bias.ndim - 2)
    out = d_bias[tuple(slice(None) if a in outer else 0 for a in range(missing, len(batch)))]
    plan = driver.join(library.join_cell(FORMATS[d_bias.dtype]), operand(0, sums), operand(1, out))
    if plan is not None:
        driver.run(plan, (sums, out))


BACKEND = CpuBackend()
