"""The CPU backend: each operation as launches of the kernels in `kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from numfuse import tiling
from numfuse.backends.cpu import driver, host, launch, library
from numfuse.backends.cpu.driver import Slots
from numfuse.backends.cpu.peak import fma_peak
from numfuse.expr import SYMBOL

if TYPE_CHECKING:
    from numfuse.activations import Activation
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


def _summed_axes(gradient: np.ndarray, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of `batch` that a gradient (..., rows, columns) lacks or has with length 1."""
    if not batch:
        return ()
    own = (1,) * (len(batch) - (gradient.ndim - 2)) + gradient.shape[:-2]
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


class CpuBackend:
    """Fused kernels on the host's vector units, parallel over cells of the output."""

    name = "cpu"

    def __init__(self) -> None:
        #: Plans of small plain forwards by everything that they depend on.
        self._small: dict[tuple[Any, ...], driver.Plan] = {}

    def forward(self, p: GemmProblem) -> None:
        """``out = act(a @ b + bias + residual)``, and the pre-activation where asked for."""
        key = None
        if not p.batch and p.residual is None and p.pre is None:
            # At 64 x 64 x 64 the arithmetic takes 3 us: what is looked up here in one step would
            # take as long again in several.
            a, b, bias, out = p.a, p.b, p.bias, p.out
            key = (
                p.activation.trace(0), p.dtype, p.m, p.n, p.k, a.strides, b.strides, out.strides,
                None if bias is None else bias.strides,
            )  # fmt: skip
            plan = self._small.get(key)
            if plan is not None:
                driver.run(plan, (a, b, bias, None, None, out))
                return
        fmt = FORMATS[p.dtype]
        row = library.forward_row(
            p.activation.trace(0),
            fmt,
            p.bias is not None,
            p.residual is not None,
            p.pre is not None,
        )
        slots = Slots(bias=p.bias, extra=p.residual, out=p.out, pre=p.pre)
        plan = driver.gemm(p.a, fmt, p.b, fmt, row, slots, p.batch)
        if key is not None and plan is not None and plan.threads == 1:
            if p.m * p.n * p.k < tiling.PARALLEL_FMAS:  # one thread whatever Numba's setting
                if len(self._small) >= tiling.SMALL_PLANS:
                    self._small.clear()
                self._small[key] = plan

    def backward(self, p: GemmBackwardProblem) -> None:
        """grad_pre with the column sums of d_bias in its epilogue, then d_a and d_b."""
        fmt = FORMATS[p.dtype]
        batch = p.batch
        sums = None if p.d_bias is None else self._sums(p)
        products = p.d_a is not None or p.d_b is not None
        if not products and sums is None:
            return
        if p.activation.trace(0) is SYMBOL:
            grad_pre, grad_format = p.grad, fmt
            if sums is not None:
                chunk = library.registers(library.accumulator(fmt)).chunk
                row = library.column_sums_row(fmt)
                slots = Slots(grad=p.grad, sums=sums)
                driver.elementwise(p.m, p.n, row, slots, batch, chunk)
        else:
            grad_pre, grad_format = self._grad_pre(p, sums, products)
        if p.d_bias is not None and sums is not None:
            _reduce_sums(sums, p.d_bias, batch)
        store = library.store_row(fmt)
        if p.d_a is not None:
            summed = _summed_axes(p.d_a, batch)
            right, slots = p.b.swapaxes(-1, -2), Slots(out=p.d_a)
            driver.gemm(grad_pre, grad_format, right, fmt, store, slots, batch, summed)
        if p.d_b is not None:
            summed = _summed_axes(p.d_b, batch)
            left, slots = p.a.swapaxes(-1, -2), Slots(out=p.d_b)
            driver.gemm(left, fmt, grad_pre, grad_format, store, slots, batch, summed)

    def _sums(self, p: GemmBackwardProblem) -> np.ndarray:
        """Room for the partial column sums: one row for every chunk of rows."""
        chunk = library.registers(FORMATS[p.acc_dtype]).chunk
        return np.empty((*p.batch, -(-p.m // chunk), p.n), p.acc_dtype)

    def _grad_pre(
        self, p: GemmBackwardProblem, sums: np.ndarray | None, products: bool
    ) -> tuple[np.ndarray, str]:
        fmt, acc = FORMATS[p.dtype], p.acc_dtype
        # Kept in the accumulator's dtype: d_a and d_b then read it without another rounding.
        out = np.empty((*p.batch, p.m, p.n), acc) if products else None
        saved = None if p.pre is None else p.pre.astype(acc, copy=False)
        bias = p.bias if saved is None else None
        row = library.grad_pre_row(
            p.activation.trace(1), fmt, bias is not None, saved is not None, products,
            sums is not None, p.guard,
        )  # fmt: skip
        slots = Slots(bias, saved, p.grad, out, None, sums)
        if saved is None:
            driver.gemm(p.a, fmt, p.b, fmt, row, slots, p.batch)
        else:
            chunk = library.registers(FORMATS[acc]).chunk
            driver.elementwise(p.m, p.n, row, slots, p.batch, chunk)
        return (p.grad if out is None else out), FORMATS[acc]

    def gated(self, p: GatedProblem) -> None:
        """``out = act(a) * b``"""
        out, a, b = _merged((p.out, p.a, p.b))
        row = library.gated_row(p.activation.trace(0), FORMATS[p.dtype])
        slots = Slots(a=a, b=b, out=out)
        driver.elementwise(out.shape[-2], out.shape[-1], row, slots, out.shape[:-2])

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
        slots = Slots(grad=grad, a=a, b=b, out=d_a, extra=d_b)
        driver.elementwise(a.shape[-2], a.shape[-1], row, slots, a.shape[:-2])

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
            for act in activations:
                for call in library.rows_of(act, fmt):
                    yield f"{act.name} {fmt}", call


def _reduce_sums(sums: np.ndarray, d_bias: np.ndarray, batch: tuple[int, ...]) -> None:
    """Join the partial column sums, in float64: a fixed order, whatever ran on how many threads."""
    axes = (*_summed_axes(d_bias, batch), sums.ndim - 2)
    total = np.add.reduce(sums, axis=axes, dtype=np.float64, keepdims=True)
    d_bias[...] = total.reshape(d_bias.shape)


BACKEND = CpuBackend()
