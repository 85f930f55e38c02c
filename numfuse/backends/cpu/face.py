"""The CPU backend: each operation as a fingerprint, and the program that was recorded for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends import Traits
from numfuse.backends.cpu import gates, host, layers, tiling
from numfuse.backends.cpu.kernels import gemm, library, rows
from numfuse.backends.cpu.launch import sequence, threads
from numfuse.backends.cpu.launch.sequence import Program
from numfuse.errors import BackendUnavailable
from numfuse.problem.results import settled
from numfuse.problem.shapes import as_one, sum_to
from numfuse.runtime import specialise
from numfuse.runtime.replay import Replay

if TYPE_CHECKING:
    from numfuse.activations import Activation
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

__all__ = ["BACKEND", "CpuBackend"]


class CpuBackend:
    """Fused kernels on the host's vector units, parallel over cells of the output.

    An operation looks for its program by everything that depends on but addresses. For the small
    calls the fingerprint is made in place: at 64 x 64 x 64 the arithmetic takes 3 us.
    """

    name = "cpu"

    def __init__(self) -> None:
        self.replay: Replay[Program] = Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES)

    def _record(
        self, fingerprint: Hashable, p: Any, make: Callable[[Any, int], Program], most: int
    ) -> Program:
        """Return the program of a problem on so many threads at most, and keep it."""
        if settled(p):
            return sequence.nothing()
        made = make(p, most)
        refs = [formula() for kernel in made.kernels for formula in kernel.formulas]
        formulas = [formula for formula in refs if formula is not None]
        if len(formulas) < len(refs):
            return made  # one was redefined meanwhile
        return self.replay.keep(fingerprint, made, formulas, made.nbytes)

    @property
    def traits(self) -> Traits:
        """Return what the processor's products leave open."""
        halves = ("float16", "bfloat16")
        return Traits(grad_pre=tuple(x for x in halves if library.grad_pre_format(x) == x))

    def forward(self, p: GemmProblem) -> None:
        """``out = act(a @ b + bias + residual)``, and the pre-activation where asked for."""
        a, b, bias, residual, pre, out = arrays = (p.a, p.b, p.bias, p.residual, p.pre, p.out)
        most = 1
        forms: Any = None
        if p.batch:
            most, forms = threads.number(), tuple([x if x is None else x.shape for x in arrays])
        elif p.m * p.n * p.k >= tiling.PARALLEL_FMAS:
            most = threads.number()
        fingerprint = (
            p.activation.curve.serial,
            p.dtype,
            p.m,
            p.n,
            p.k,
            a.strides,
            b.strides,
            out.strides,
            most,
            None if bias is None else bias.strides,
            None if residual is None else (residual.shape, residual.strides),
            None if pre is None else pre.strides,
            forms,
        )
        program = self.replay.find(fingerprint)
        if program is None:
            program = self._record(fingerprint, p, layers.forward, most)
        sequence.run(program, arrays)

    def backward(self, p: GemmBackwardProblem) -> None:
        """grad_pre with the column sums of d_bias in its epilogue, then d_a and d_b; by blocks of
        rows where grad_pre is large.
        """
        if p.d_residual is not None:
            with np.errstate(all="ignore"):  # as silent as the kernels
                p.d_residual[...] = sum_to(p.grad, p.d_residual.shape, p.acc_dtype)
        most, batch = 1, p.batch
        forms: Any = None
        if batch:
            p = as_one(p)
        a, b, bias, grad, pre = p.a, p.b, p.bias, p.grad, p.pre
        d_a, d_b, d_bias = p.d_a, p.d_b, p.d_bias
        arrays = (a, b, bias, grad, pre, d_a, d_b, d_bias)
        if batch:
            most, forms = threads.number(), tuple([x if x is None else x.shape for x in arrays])
        elif p.m * p.n * p.k >= tiling.PARALLEL_FMAS or p.m * p.n >= tiling.PARALLEL_ELEMENTS:
            most = threads.number()
        fingerprint = (
            p.activation.curve.serial,
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
            most,
            forms,
        )
        program = self.replay.find(fingerprint)
        if program is None:
            program = self._record(fingerprint, p, layers.backward, most)
        sequence.run(program, arrays)

    def double_backward(self, p: GemmDoubleBackwardProblem) -> None:
        """The gradients of the backward's gradients, weighted with cotangents."""
        if p.d_residual is not None:
            p.d_residual[...] = 0
        if p.batch:
            p = as_one(p)
        first = p.a, p.b, p.bias, p.grad, p.pre, p.d_a, p.d_b, p.d_bias
        arrays = (*first, p.u, p.v, p.w, p.z, p.d_grad)
        self._run("double backward", p, arrays, p.pre, layers.double_backward)

    def tangent(self, p: GemmTangentProblem) -> None:
        """The forward, and its derivative along tangents."""
        moved = p.u, p.v, p.w, p.z
        arrays = (p.a, p.b, p.bias, p.residual, *moved, p.out_dot, p.out)
        self._run("tangent", p, arrays, None, layers.tangent)

    def _run(
        self,
        what: str,
        p: GemmDoubleBackwardProblem | GemmTangentProblem,
        arrays: tuple[np.ndarray | None, ...],
        pre: np.ndarray | None,
        make: Callable[[Any, int], Program],
    ) -> None:
        most = 1
        if (
            p.batch
            or p.m * p.n * p.k >= tiling.PARALLEL_FMAS
            or (p.m * p.n >= tiling.PARALLEL_ELEMENTS)
        ):
            most = threads.number()
        fingerprint = (
            what,
            p.activation.curve.serial,
            p.guard,
            p.dtype,
            p.batch,
            p.m,
            most,
            None if pre is None else pre.dtype,
            tuple([None if x is None else (x.shape, x.strides) for x in arrays]),
        )
        program = self.replay.find(fingerprint)
        if program is None:
            program = self._record(fingerprint, p, make, most)
        sequence.run(program, arrays)

    def gated(self, p: GatedProblem) -> None:
        """``out = act(a) * b``"""
        self._run_gate("gate", p, (p.a, p.b, p.out), p.contiguous, gates.gate)

    def gated_backward(self, p: GatedBackwardProblem) -> None:
        """``d_a = grad * b * act'(a)``, ``d_b = grad * act(a)``"""
        arrays = (p.a, p.b, p.grad, p.d_a, p.d_b)
        what = "backward", p.guard
        self._run_gate(what, p, arrays, p.contiguous, gates.backward)

    def gated_double_backward(self, p: GatedDoubleBackwardProblem) -> None:
        """Compute the gradients of a gate's gradients, weighted with cotangents."""
        arrays = (p.a, p.b, p.grad, p.u, p.v, p.d_grad, p.d_a, p.d_b)
        what = "double backward", p.guard
        self._run_gate(what, p, arrays, False, gates.double_backward)

    def gated_tangent(self, p: GatedTangentProblem) -> None:
        """A gate, and its derivative along tangents."""
        arrays = (p.a, p.b, p.u, p.v, p.out, p.out_dot)
        what = "tangent", p.guard
        self._run_gate(what, p, arrays, False, gates.tangent)

    def _run_gate(
        self,
        what: Hashable,
        p: Any,
        arrays: tuple[np.ndarray | None, ...],
        contiguous: bool,
        make: Callable[[Any, int], Program],
    ) -> None:
        size = p.a.size
        most = 1 if size < tiling.PARALLEL_ELEMENTS else threads.number()
        form = size
        if not contiguous:
            form = p.a.shape, *[None if x is None else x.strides for x in arrays]
        fingerprint = what, p.activation.curve.serial, p.dtype, most, form
        program = self.replay.find(fingerprint)
        if program is None:
            program = self._record(fingerprint, p, make, most)
        sequence.run(program, arrays)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.empty(shape, dtype)

    def describe(self) -> dict[str, Any]:
        """Return what `python -m numfuse info` tells about this backend, by name."""
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
            "threads": threads.number(),
            "threading layer": threads.layer(),
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
        yield "launching", threads.warmup
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
                yield f"add and store {fmt}", partial(rows.add_and_store, fmt)
            yield f"column sums {fmt}", partial(rows.column_sums, fmt)
            yield f"joined sums {fmt}", partial(library.join_cell, fmt)
            for act in activations:
                for call in rows.of_activation(act, fmt):
                    yield f"{act.name} {fmt}", call


if (_refused := host.refused_setting()) is not None:
    raise BackendUnavailable("cpu", _refused)
BACKEND = CpuBackend()
