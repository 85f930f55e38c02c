"""The double backward and forward mode on the CPU: the products of the backward with other row
functions.

Both begin with T = u @ b + a @ v + w + z, summed up in the accumulator's dtype. The product that
comes last, a @ b or (where that is saved) the last one of T, has in its epilogue all that is
elementwise; what is left are products with Q and S in place of grad_pre. As in a backward, all of
it goes by blocks of rows, so that T, Q and S are never held whole where they are large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cpu import descriptors, tiling
from numfuse.backends.cpu.descriptors import Operand, Slots, operand
from numfuse.backends.cpu.kernels import library, rows
from numfuse.backends.cpu.llvm import microkernel
from numfuse.backends.cpu.schedule import Launches, Schedule, Turn
from numfuse.expr import SYMBOL
from numfuse.problem.shapes import as_one
from numfuse.runtime import specialise

if TYPE_CHECKING:
    from numfuse.backends.cpu.face import CpuBackend
    from numfuse.expr import Expr
    from numfuse.problem.second_order import (
        GatedDoubleBackwardProblem,
        GatedTangentProblem,
        GemmDoubleBackwardProblem,
        GemmTangentProblem,
    )

#: The arrays of a call by number: those of a backward (its grad_pre is Q here), then these.
A, B, BIAS, GRAD, PRE, D_A, D_B, D_BIAS, Q, SUMS, TOTAL_A, TOTAL_B, TOTAL_BIAS = range(13)
U, V, W, Z, D_GRAD, OUT, T, S = range(13, 21)
#: Cut where a backward is cut by rows, beside those of a backward.
BY_ROWS = (U, Z, D_GRAD, OUT)

Arrays = tuple[np.ndarray | None, ...]
Operands = tuple[Operand | None, ...]


# --- products -----------------------------------------------------------------------------------
def double_backward(backend: CpuBackend, p: GemmDoubleBackwardProblem) -> None:
    """Zero what nothing contributes to; run the rest as one schedule, or as two for an identity."""
    p = as_one(p)
    identity = p.activation.trace(0) is SYMBOL
    moved = not (p.u is None and p.v is None and p.w is None and p.z is None)
    bent = moved and not identity and not p.activation.second_derivative_is_zero()
    wanted: list[np.ndarray | None] = []
    for x, there in (
        (p.d_grad, moved),
        (p.d_a, bent or p.v is not None),
        (p.d_b, bent or p.u is not None),
        (p.d_bias, bent),
    ):
        if x is not None and not there:
            x[...] = 0
        wanted.append(x if there else None)
    d_grad, d_a, d_b, d_bias = wanted
    if all(x is None for x in wanted):
        return
    arrays: Arrays = (
        p.a,
        p.b,
        p.bias,
        p.grad,
        None if identity else p.pre,
        d_a,
        d_b,
        d_bias,
        *(None,) * 5,
        p.u,
        p.v,
        p.w,
        p.z,
        d_grad,
        None,
        None,
        None,
    )
    if identity:
        make = partial(_identity_schedules, backend, p)
        backend.scheduled(p, arrays, ("double backward",), make)
        return
    graphs = p.activation.trace(1), p.activation.trace(2) if bent else None
    make = partial(_double_backward_schedules, backend, p, graphs)
    formulas = tuple(graph for graph in graphs if graph is not None)
    backend.scheduled(p, arrays, ("double backward", p.guard), make, formulas)


def tangent(backend: CpuBackend, p: GemmTangentProblem) -> None:
    """The forward with the tangent in its epilogue."""
    value = p.activation.trace(0)
    moved = not (p.u is None and p.v is None and p.w is None and p.z is None)
    arrays: Arrays = (
        p.a,
        p.b,
        p.bias,
        *(None,) * 10,
        p.u,
        p.v,
        p.w,
        p.z,
        p.out_dot,
        p.out,
        None,
        None,
    )
    if moved and value is not SYMBOL:
        graphs = value, p.activation.trace(1)
        key = None
        if not p.batch:
            # Found in one step, as in a forward: at 256 x 256 x 256 the general key takes 2% of it.
            key = (
                "jvp",
                value.serial,
                graphs[1].serial,
                p.guard,
                p.dtype,
                p.m,
                p.n,
                p.k,
                p.a.strides,
                p.b.strides,
                p.out.strides,
                p.out_dot.strides,
                backend.threads_of(p),
                None if p.bias is None else p.bias.strides,
                None if p.u is None else p.u.strides,
                None if p.v is None else p.v.strides,
                None if p.w is None else p.w.strides,
            )
            if backend._ran(key, arrays):
                return
        make = partial(_tangent_schedules, backend, p, graphs)
        backend.scheduled(p, arrays, ("jvp", p.guard), make, graphs, key)
        return
    if moved:
        backend.scheduled(p, arrays, ("jvp",), partial(_identity_schedules, backend, p))
    else:
        p.out_dot[...] = 0
    backend.forward(p)


def _rows(p: GemmDoubleBackwardProblem | GemmTangentProblem) -> tuple[int, int]:
    """Rows and batch elements of a block in which T, Q and S are held."""
    fmt = p.dtype.name
    held = p.k if p.dtype != p.acc_dtype else 0
    itemsize = p.acc_dtype.itemsize + 2 * microkernel.itemsize(library.grad_pre_format(fmt))
    return tiling.backward_block(p.m, p.n, held, itemsize, library.chunk(fmt))


def _double_backward_schedules(
    backend: CpuBackend,
    p: GemmDoubleBackwardProblem,
    graphs: tuple[Expr, Expr | None],
    arrays: Arrays,
) -> list[Schedule]:
    twice = (
        graphs[1] is not None and arrays[D_A] is not None and arrays[V] is not None,
        graphs[1] is not None and arrays[D_B] is not None and arrays[U] is not None,
    )
    plans = partial(_double_backward_plans, p, graphs)
    return [backend._schedule(p, arrays, None, *_rows(p), plans, twice)]


def _identity_schedules(
    backend: CpuBackend, p: GemmDoubleBackwardProblem | GemmTangentProblem, arrays: Arrays
) -> list[Schedule]:
    """T itself, and the products with grad, which stands for S."""
    found = []
    if arrays[D_GRAD] is not None:
        chosen = [x if i not in (D_A, D_B) else None for i, x in enumerate(arrays)]
        plans = partial(_moved_plans, p)
        found.append(backend._schedule(p, tuple(chosen), None, *_rows(p), plans))
    if arrays[D_A] is not None or arrays[D_B] is not None:
        whole = backend.whole_rows(p, arrays), max(1, math.prod(p.batch))
        plans = partial(_double_backward_plans, p, None)
        found.append(backend._schedule(p, arrays, None, *whole, plans))
    return found


def _tangent_schedules(
    backend: CpuBackend, p: GemmTangentProblem, graphs: tuple[Expr, Expr], arrays: Arrays
) -> list[Schedule]:
    # A tangent of the bias alone is read as it is: no T is held that a block would bound.
    whole = max(1, p.m), max(1, math.prod(p.batch))
    rows = whole if arrays[U] is None and arrays[V] is None else _rows(p)
    return [backend._schedule(p, arrays, None, *rows, partial(_tangent_plans, p, graphs))]


def _moved_products(x: Operands) -> list[tuple[Operand, Operand]]:
    a, b, u, v = x[A], x[B], x[U], x[V]
    assert a is not None and b is not None
    return [*(() if u is None else ((u, b),)), *(() if v is None else ((a, v),))]


def _summed_up(
    products: list[tuple[Operand, Operand]],
    fmt: str,
    acc: str,
    t: Operand,
    w: Operand | None,
    batch: tuple[int, ...],
) -> list[list[descriptors.Plan | None]]:
    """``t = w + the products``, one after another."""
    phases: list[list[descriptors.Plan | None]] = []
    for i, (left, right) in enumerate(products):
        row = rows.terms(fmt, acc, True, i == 0 and w is not None, False, i > 0)
        slots = Slots(bias=None if i else w, pre=t if i else None, out=t)
        phases.append([descriptors.gemm(left, fmt, right, fmt, row, slots, batch)])
    return phases


def _moved_plans(
    p: GemmDoubleBackwardProblem | GemmTangentProblem,
    x: Operands,
    batch: tuple[int, ...],
    turns: Sequence[Turn],
) -> Launches:
    """T rounded to its result: the d_grad, or the tangent, of an identity."""
    fmt, acc = p.dtype.name, p.acc_dtype.name
    out, w, z = x[D_GRAD], x[W], x[Z]
    assert out is not None
    m, n = out.shape[-2:]
    products = _moved_products(x)
    if not products:
        row = rows.terms(fmt, fmt, False, w is not None, z is not None, False)
        return _launches([[descriptors.elementwise(m, n, row, Slots(w, z, out=out), batch)]], [])
    phases: list[list[descriptors.Plan | None]] = []
    own: list[Operand] = []
    before = None
    if len(products) > 1:
        before = descriptors.temporary(T, (*batch, m, n), p.acc_dtype)
        own.append(before)
        phases += _summed_up(products[:-1], fmt, acc, before, w, batch)
        w = None
    row = rows.terms(fmt, fmt, True, w is not None, z is not None, before is not None)
    left, right = products[-1]
    slots = Slots(bias=w, extra=z, out=out, pre=before)
    phases.append([descriptors.gemm(left, fmt, right, fmt, row, slots, batch)])
    return _launches(phases, own)


def _tangent_plans(
    p: GemmTangentProblem,
    graphs: tuple[Expr, Expr],
    x: Operands,
    batch: tuple[int, ...],
    turns: Sequence[Turn],
) -> Launches:
    fmt, acc = p.dtype.name, p.acc_dtype.name
    a, b, bias, out, w = x[A], x[B], x[BIAS], x[OUT], x[W]
    assert a is not None and b is not None and out is not None
    products = _moved_products(x)
    t, t_format, own = w, fmt, []
    if products:
        t, t_format = descriptors.temporary(T, (*batch, *out.shape[-2:]), p.acc_dtype), acc
        own.append(t)
        phases = _summed_up(products, fmt, acc, t, w, batch)
    else:
        phases = []
    row = rows.tangent(p.activation.curve, fmt, p.guard, t_format, bias is not None)
    slots = Slots(bias=bias, extra=t, out=out, a=x[D_GRAD])
    phases.append([descriptors.gemm(a, fmt, b, fmt, row, slots, batch)])
    return _launches(phases, own)


def _double_backward_plans(
    p: GemmDoubleBackwardProblem | GemmTangentProblem,
    graphs: tuple[Expr, Expr | None] | None,
    x: Operands,
    batch: tuple[int, ...],
    turns: Sequence[Turn],
) -> Launches:
    """The launches of a block; without graphs (of an identity) d_a and d_b alone."""
    from numfuse.backends.cpu.face import _growing, _summed_axes

    fmt, acc = p.dtype.name, p.acc_dtype.name
    grad, d_a, d_b, a, b = x[GRAD], x[D_A], x[D_B], x[A], x[B]
    assert grad is not None and a is not None and b is not None
    phases: list[list[descriptors.Plan | None]] = []
    own: list[Operand] = []
    q: Operand | None = None
    s: Operand | None = grad
    joined, held = None, fmt
    if graphs is not None:
        q, s, joined, held = _elementwise_part(p, graphs, x, batch, phases, own)
    after: list[list[descriptors.Plan | None]] = [[], []]
    if joined is not None and not batch:
        turn, total = turns[2], x[TOTAL_BIAS]
        after[0].append(
            descriptors.join(
                library.join_cell(fmt),
                joined,
                x[D_BIAS] if turn.last else None,
                None if turn.first else total,
                None if turn.last else total,
            )
        )
    for gradient, total, turn, products in (
        (d_a, x[TOTAL_A], turns[0], ((q, b.turned()), (s, _turned(x[V])))),
        (d_b, x[TOTAL_B], turns[1], ((a.turned(), q), (_turned(x[U]), s))),
    ):
        if gradient is None:
            continue
        there = [(left, right) for left, right in products if left and right]
        summed = _summed_axes(gradient, batch)
        for i, (left, right) in enumerate(there):
            own_turn = Turn(turn.first and i == 0, turn.last and i == len(there) - 1)
            store, slots = _growing(fmt, acc, gradient, total, own_turn)
            formats = (held, fmt) if gradient is d_a else (fmt, held)
            after[i].append(
                descriptors.gemm(left, formats[0], right, formats[1], store, slots, batch, summed)
            )
    return _launches([*phases, *after], own)


def _elementwise_part(
    p: GemmDoubleBackwardProblem | GemmTangentProblem,
    graphs: tuple[Expr, Expr | None],
    x: Operands,
    batch: tuple[int, ...],
    phases: list[list[descriptors.Plan | None]],
    own: list[Operand],
) -> tuple[Operand | None, Operand | None, Operand | None, str]:
    """T, then the pass that makes d_grad, Q, S and the partial sums of d_bias: adds its launches
    and the arrays they need, and returns Q, S, the sums and the format of Q and S."""
    fmt, acc = p.dtype.name, p.acc_dtype.name
    second = graphs[1]
    chunk, held = library.chunk(fmt), library.grad_pre_format(fmt)
    a, b, bias, grad, pre, w, d_grad = (x[i] for i in (A, B, BIAS, GRAD, PRE, W, D_GRAD))
    assert a is not None and b is not None and grad is not None
    m, n = grad.shape[-2:]

    def temporary(number: int, dtype: np.dtype[Any], rows: int = m) -> Operand:
        made = descriptors.temporary(number, (*batch, rows, n), dtype)
        own.append(made)
        return made

    products = x[D_A] is not None or x[D_B] is not None
    q = s = sums = None
    sums_wanted = x[D_BIAS] is not None and second is not None
    if sums_wanted:
        sums = temporary(SUMS, p.acc_dtype, 2 * -(-m // chunk))
    if pre is not None and pre.itemsize != p.acc_dtype.itemsize:
        pre = descriptors.temporary(PRE, pre.shape, p.acc_dtype)
        own.append(pre)
    moved: list[tuple[Operand, Operand]] = []
    t_wanted = d_grad is not None or (second is not None and (products or sums_wanted))
    if t_wanted:
        moved = _moved_products(x)
    else:
        w = None
    last = moved.pop() if pre is not None and moved else None
    t, t_format, added = None, None, bias if pre is None else None
    if moved:
        t, t_format = temporary(T, p.acc_dtype), acc
        phases += _summed_up(moved, fmt, acc, t, w, batch)
    elif w is not None and last is not None:
        added = w
    elif w is not None:
        t, t_format = w, fmt
    stored = p.dtype if held == fmt else p.acc_dtype
    if (x[D_A] is not None and x[V] is not None) or (x[D_B] is not None and x[U] is not None):
        s = temporary(S, stored)
    if second is not None and products:
        q = temporary(Q, stored)  # the last: it is moved within a page, as grad_pre is
    made = {"d_grad": d_grad, "q": q, "s": s}
    row = rows.double_backward(
        p.activation.curve,
        fmt,
        p.guard,
        t_format,
        saved=pre is not None,
        last=last is not None,
        added=added is not None,
        results=tuple(name for name, x in made.items() if x is not None),
        sums=sums is not None,
    )
    slots = Slots(added, t, grad, d_grad, pre, sums, q, s)
    if pre is None:
        phases.append([descriptors.gemm(a, fmt, b, fmt, row, slots, batch)])
    elif last is not None:
        phases.append([descriptors.gemm(last[0], fmt, last[1], fmt, row, slots, batch)])
    else:
        phases.append([descriptors.elementwise(m, n, row, slots, batch, chunk)])
    return q, s, sums, held


def _turned(x: Operand | None) -> Operand | None:
    return None if x is None else x.turned()


def _launches(phases: list[list[descriptors.Plan | None]], own: list[Operand]) -> Launches:
    return Launches([[plan for plan in phase if plan is not None] for phase in phases], own)


# --- gates --------------------------------------------------------------------------------------
def gated_double_backward(backend: CpuBackend, p: GatedDoubleBackwardProblem) -> None:
    """One pass over up to five operands and three results."""
    bent = p.u is not None and not p.activation.second_derivative_is_zero()
    wanted: list[np.ndarray | None] = []
    moved = p.u is not None or p.v is not None
    for x, there in (
        (p.d_grad, moved),
        (p.d_a, bent or p.v is not None),
        (p.d_b, p.u is not None),
    ):
        if x is not None and not there:
            x[...] = 0
        wanted.append(x if there else None)
    if not p.a.size or all(x is None for x in wanted):
        return
    # An operand that no result needs would be read for nothing: its place is taken by `a`.
    graphs = p.activation.trace(0), p.activation.trace(1), p.activation.trace(2)
    arrays: Arrays = (p.a, p.b, p.grad, p.u, p.v, *wanted)
    names = ("d_grad", "d_a", "d_b")
    results = tuple(name for name, x in zip(names, wanted, strict=True) if x is not None)
    u, v = p.u is not None, p.v is not None
    curve, fmt = p.activation.curve, p.dtype.name
    row = rows.gate_double_backward(curve, fmt, p.guard, u, v, results)
    what = "double gate", p.guard, *(graph.serial for graph in graphs)
    _elementwise(backend, what, graphs, row, None, arrays, _SECOND_SLOTS)


#: The slots of the arrays of a gate's passes, in their order.
_SECOND_SLOTS = ("a", "b", "grad", "extra", "pre", "out", "bias", "sums")
_TANGENT_SLOTS = ("a", "b", "grad", "pre", "out", "extra")


def gated_tangent(backend: CpuBackend, p: GatedTangentProblem) -> None:
    """One pass; of large results past the caches."""
    if not p.a.size:
        return descriptors.nothing()
    if p.u is None and p.v is None:
        p.out_dot[...] = 0
        backend._gated(p.activation, p.dtype, (p.a, p.b, p.out), False)
        return
    graphs = p.activation.trace(0), p.activation.trace(1)
    arrays: Arrays = (p.a, p.b, p.u, p.v, p.out, p.out_dot)
    make = partial(
        rows.gate_tangent,
        p.activation.curve,
        p.dtype.name,
        p.guard,
        p.u is not None,
        p.v is not None,
    )
    what = "gated jvp", p.guard, *(graph.serial for graph in graphs)
    _elementwise(backend, what, graphs, make(), partial(make, True), arrays, _TANGENT_SLOTS)


def _elementwise(
    backend: CpuBackend,
    name: tuple[Any, ...],
    formulas: tuple[Expr, ...],
    row: specialise.Kernel,
    stream: Callable[[], specialise.Kernel] | None,
    arrays: Arrays,
    slots: tuple[str, ...],
) -> None:
    from numfuse.backends.cpu.face import _merged, _streams

    first = arrays[0]
    assert first is not None
    key = None
    if first.size < tiling.PARALLEL_ELEMENTS:
        forms = tuple(None if x is None else x.strides for x in arrays)
        key = (*name, first.dtype, first.shape, forms)
        if backend._ran(key, arrays):
            return
    there = [i for i, x in enumerate(arrays) if x is not None]
    # The last axis is the one along which the first array is densest: a result, as in a gate.
    order = sorted(there, key=lambda i: slots[i] != "out")
    flat = dict(zip(order, _merged([arrays[i] for i in order]), strict=True))  # type: ignore[misc]
    found = Slots(**{slots[i]: operand(i, x) for i, x in flat.items()})
    results = [flat[i] for i in there if slots[i] in ("out", "extra")]
    streamed = stream() if stream is not None and _streams(results) else None
    backend._run_elementwise(row, found, arrays, flat[order[0]].shape, streamed, key, formulas)
