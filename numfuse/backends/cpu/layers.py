"""The operations of a layer, each as products, the epilogues of their passes, and places.

========== ========================================= ==========================================
operation  passes                                    gradients
========== ========================================= ==========================================
forward    a b -> out, pre
backward   a b (or a saved pre) -> grad_pre, sums    d_a = grad_pre b', d_b = a' grad_pre
double     T = u b + a v + w + z, then a b (or pre)  d_a = q b' + s v', d_b = a' q + u' s
backward   -> d_grad, q, s, sums
tangent    T, then a b -> out, out_dot
========== ========================================= ==========================================

The product that comes last, a b or (where that is saved) the last one of T, has in its epilogue all
that is elementwise. The identity has no grad_pre: grad stands for it, and for s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.descriptors import Slots
from numfuse.backends.cpu.kernels import library, rows
from numfuse.backends.cpu.launch.sequence import (
    Operand,
    Program,
    Sum,
    operands,
    temporary,
)
from numfuse.backends.cpu.llvm import vectors
from numfuse.backends.cpu.schedule import (
    Factors,
    Part,
    Pass,
    Work,
    record,
    scattered,
)
from numfuse.backends.cpu.sums import Partials, partial_sums
from numfuse.moduli import count_of
from numfuse.problem.operands import format_of
from numfuse.problem.shapes import as_one

if TYPE_CHECKING:
    from numfuse.problem.product import GemmBackwardProblem, GemmProblem
    from numfuse.problem.second_order import GemmDoubleBackwardProblem, GemmTangentProblem

Operands = Mapping[str, Operand]
Batch = tuple[int, ...]


def _less(arrays: Mapping[str, Operand], *names: str) -> dict[str, Operand]:
    return {name: x for name, x in arrays.items() if name not in names}


# --- programs -----------------------------------------------------------------------------------
def forward(p: GemmProblem, names: Sequence[str], threads: int, precision: str = "ieee") -> Program:
    """Return the program of a forward on the arrays of these fields of the problem."""
    whole = Part(operands(p, names), p.m, math.prod(p.batch), partial(_forward, p))
    return record(p, names, [whole], threads, precision=precision)


def backward(
    p: GemmBackwardProblem, names: Sequence[str], threads: int, precision: str = "ieee"
) -> Program:
    """Return the program of a backward, in blocks that bound what it holds."""
    sums = (
        []
        if p.d_residual is None
        else [Sum.of(names, "grad", p.grad, "d_residual", p.d_residual, p.acc_dtype)]
    )
    if p.batch:
        p = as_one(p)
    arrays = operands(p, names)
    arrays.pop("d_residual", None)
    fmt = format_of(p.dtype)
    chunk, size = library.chunk(fmt), vectors.itemsize(library.grad_pre_format(fmt))
    if not p.activation.is_identity:
        held = p.k if p.dtype != p.acc_dtype else 0
        blocks = tiling.backward_block(p.m, p.n, held, size, chunk)
        if precision != "ieee" and count_of(precision):  # (a block would make residues anew)
            blocks = max(1, p.m), max(1, math.prod(p.batch))
        whole = Part(arrays, *blocks, partial(_backward, p))
        return record(p, names, [whole], threads, precision=precision)
    # No grad_pre has to be held: the products in one piece, the partial sums of d_bias in blocks
    # that take as much room as grad_pre would.
    parts = []
    if p.d_a is not None or p.d_b is not None:
        parts.append(_whole(p, _less(arrays, "pre", "d_bias"), _backward, precision))
    if p.d_bias is not None:
        joined = _less(arrays, "pre", "d_a", "d_b")
        size = p.acc_dtype.itemsize
        count, members = tiling.backward_block(-(-p.m // chunk), p.n, 0, size, 1)
        count *= chunk
        if scattered(p, joined):  # here grad is held; whole chunks are joined in any blocks
            count, members = tiling.backward_block(p.m, p.n, 0, size, chunk)
        parts.append(Part(joined, count, members, partial(_backward, p)))
    return record(p, names, parts, threads, sums=sums, precision=precision)


def double_backward(
    p: GemmDoubleBackwardProblem, names: Sequence[str], threads: int, precision: str = "ieee"
) -> Program:
    """Return the program of a double backward; what nothing contributes to is set to zero."""
    residual = p.d_residual is not None
    if p.batch:
        p = as_one(p)
    arrays = operands(p, names)
    arrays.pop("d_residual", None)
    identity = p.activation.is_identity
    moved = any(name in arrays for name in "uvwz")
    bent = moved and not identity and not p.activation.second_derivative_is_zero()
    there = {
        "d_grad": moved,
        "d_a": bent or "v" in arrays,
        "d_b": bent or "u" in arrays,
        "d_bias": bent,
    }
    absent = [name for name, contributes in there.items() if not contributes]
    zeroed = [names.index(name) for name in absent if name in arrays]
    if residual:
        zeroed.append(names.index("d_residual"))
    arrays = _less(arrays, *absent)
    parts = []
    if identity:
        if "d_grad" in arrays:
            work = partial(_moved, p, "d_grad")
            parts.append(Part(_less(arrays, "pre", "d_a", "d_b"), *_rows(p, precision), work))
        if "d_a" in arrays or "d_b" in arrays:
            parts.append(_whole(p, _less(arrays, "pre", "d_grad"), _linear, precision))
    elif any(name in arrays for name in there):
        parts.append(Part(arrays, *_rows(p, precision), partial(_double_backward, p, bent)))
    return record(p, names, parts, threads, zeroed, precision=precision)


def tangent(
    p: GemmTangentProblem, names: Sequence[str], threads: int, precision: str = "ieee"
) -> Program:
    """Return the program of the forward with its derivative along tangents."""
    arrays = operands(p, names)
    moved = any(name in arrays for name in "uvwz")
    if moved and not p.activation.is_identity:
        # A tangent of the bias alone is read as it is: no T is held that a block would bound.
        products = "u" in arrays or "v" in arrays
        blocks = _rows(p, precision) if products else (max(1, p.m), max(1, math.prod(p.batch)))
        whole = Part(arrays, *blocks, partial(_tangent, p))
        return record(p, names, [whole], threads, precision=precision)
    parts = []
    if "out" in arrays:  # (the tangent of the identity needs no value)
        alone = _less(arrays, "u", "v", "w", "z", "out_dot")
        parts.append(_whole(p, alone, _forward, precision))
    if moved:
        work = partial(_moved, p, "out_dot")
        parts.insert(0, Part(_less(arrays, "residual", "out"), *_rows(p, precision), work))
    zeroed = [] if moved else [names.index("out_dot")]
    return record(p, names, parts, threads, zeroed, precision=precision)


def _whole(p: Any, arrays: Mapping[str, Operand], work: Any, precision: str) -> Part:
    """Return a part that holds nothing, so in one block; but of what has to be gathered one block
    of K of d_b's product. The sums are the same, as they begin with zero in each. Those of tiles of
    halves do not, and residues are scaled by all that is summed.
    """
    fmt = format_of(p.dtype)
    kind, count = library.kind(fmt, fmt, precision), max(1, p.m)
    whole = kind == "amx" or (precision != "ieee" and count_of(precision))
    if not whole and scattered(p, arrays):
        count = tiling.k_block(p.m, p.acc_dtype.itemsize, kind)
    return Part(arrays, count, max(1, math.prod(p.batch)), partial(work, p))


def _rows(p: GemmDoubleBackwardProblem | GemmTangentProblem, precision: str) -> tuple[int, int]:
    """Return rows and batch elements of a block in which T, Q and S are held."""
    if precision != "ieee" and count_of(precision):
        return max(1, p.m), max(1, math.prod(p.batch))
    fmt = format_of(p.dtype)
    held = p.k if p.dtype != p.acc_dtype else 0
    itemsize = p.acc_dtype.itemsize + 2 * vectors.itemsize(library.grad_pre_format(fmt))
    return tiling.backward_block(p.m, p.n, held, itemsize, library.chunk(fmt))


# --- what is done for a block -------------------------------------------------------------------
def _forward(p: Any, x: Operands, batch: Batch) -> Work:
    bias, residual, pre = x.get("bias"), x.get("residual"), x.get("pre")
    how = bias is not None, residual is not None, None if pre is None else pre.fmt
    row = rows.forward(p.activation.curve, format_of(p.dtype), *how)
    slots = Slots(bias=bias, extra=residual, out=x["out"], pre=pre)
    return Work([Pass(row, slots, (x["a"], x["b"]))])


def _backward(p: Any, x: Operands, batch: Batch) -> Work:
    fmt, grad = format_of(p.dtype), x["grad"]
    products = "d_a" in x or "d_b" in x
    sums = partials(p, x, batch)
    own = [] if sums is None else [sums]
    if p.activation.is_identity:
        passes = [Pass(rows.column_sums(fmt), Slots(grad=grad, sums=sums))] if own else []
        return Work(
            passes, _gradients(x, grad), {} if sums is None else {"d_bias": Partials(sums)}, own
        )
    if not products and sums is None:
        return Work([])
    pre = x.get("pre")
    bias = x.get("bias") if pre is None else None
    saved = None if pre is None else pre.fmt
    out = None
    # Few columns are summed by a pass of their own, from grad_pre as it is stored.
    narrow = sums is not None and grad.shape[-1] <= tiling.NARROW and fmt == p.acc_dtype.name
    if products or narrow:
        # In the accumulator's dtype: d_a and d_b then read it without another rounding.
        # But products of halves as they are take it in halves too.
        out = temporary("grad_pre", (*batch, *grad.shape[-2:]), library.grad_pre_format(fmt))
        own.append(out)
    fused = None if narrow else sums
    row = rows.grad_pre(
        p.activation.curve,
        fmt,
        bias is not None,
        saved,
        out is not None,
        fused is not None,
        p.guard,
    )
    slots = Slots(bias, pre, grad, out, None, fused)
    factors = (x["a"], x["b"]) if pre is None else None
    passes = [Pass(row, slots, factors)]
    if narrow:
        passes.append(Pass(rows.column_sums(fmt), Slots(grad=out, sums=sums)))
    return Work(passes, _gradients(x, out), {} if sums is None else {"d_bias": Partials(sums)}, own)


def _linear(p: Any, x: Operands, batch: Batch) -> Work:
    """Return d_a and d_b of an identity's double backward."""
    return Work([], _gradients(x, None, x["grad"]))


def _double_backward(p: Any, bent: bool, x: Operands, batch: Batch) -> Work:
    fmt, acc = format_of(p.dtype), format_of(p.acc_dtype)
    held = library.grad_pre_format(fmt)
    grad, pre, w, d_grad = x["grad"], x.get("pre"), x.get("w"), x.get("d_grad")
    shape = *batch, *grad.shape[-2:]
    sums = partials(p, x, batch)
    own = [] if sums is None else [sums]
    wanted = bent and ("d_a" in x or "d_b" in x)
    moved = _moved_factors(x)
    if d_grad is None and not wanted and sums is None:
        moved, w = [], None
    last = moved.pop() if pre is not None and moved else None
    t, added = None, x.get("bias") if pre is None else None
    passes: list[Pass] = []
    if moved:
        t = temporary("t", shape, acc)
        own.append(t)
        passes = _summed_up(moved, fmt, t, w)
    elif w is not None and last is not None:
        added = w
    elif w is not None:
        t = w
    q = s = None
    if ("d_a" in x and "v" in x) or ("d_b" in x and "u" in x):
        own.append(s := temporary("s", shape, held))
    if wanted:
        own.append(q := temporary("q", shape, held))
    made = {"d_grad": d_grad, "q": q, "s": s}
    row = rows.double_backward(
        p.activation.curve,
        fmt,
        p.guard,
        None if t is None else t.fmt,
        saved=None if pre is None else pre.fmt,
        last=last is not None,
        added=added is not None,
        results=tuple(name for name, operand in made.items() if operand is not None),
        sums=sums is not None,
    )
    slots = Slots(added, t, grad, d_grad, pre, sums, q, s)
    passes.append(Pass(row, slots, (x["a"], x["b"]) if pre is None else last))
    return Work(
        passes, _gradients(x, q, s), {} if sums is None else {"d_bias": Partials(sums)}, own
    )


def _tangent(p: Any, x: Operands, batch: Batch) -> Work:
    fmt, bias, t = format_of(p.dtype), x.get("bias"), x.get("w")
    moved, own, passes = _moved_factors(x), [], []
    if moved:
        own = [temporary("t", (*batch, *x["out"].shape[-2:]), format_of(p.acc_dtype))]
        passes = _summed_up(moved, fmt, own[0], t)
        t = own[0]
    assert t is not None
    row = rows.tangent(p.activation.curve, fmt, p.guard, t.fmt, bias is not None)
    slots = Slots(bias=bias, extra=t, out=x["out"], a=x["out_dot"])
    return Work([*passes, Pass(row, slots, (x["a"], x["b"]))], own=own)


def _moved(p: Any, name: str, x: Operands, batch: Batch) -> Work:
    """Return T rounded to its result: the d_grad, or the tangent, of an identity."""
    fmt, out, w, z = format_of(p.dtype), x[name], x.get("w"), x.get("z")
    moved, own, passes, before = _moved_factors(x), [], [], None
    if len(moved) > 1:
        before = temporary("t", (*batch, *out.shape[-2:]), format_of(p.acc_dtype))
        own = [before]
        passes = _summed_up(moved[:-1], fmt, before, w)
        w = None
    there = (operand is not None for operand in (w, z, before))
    row = rows.terms(fmt, fmt, bool(moved), *there)
    slots = Slots(bias=w, extra=z, out=out, pre=before)
    return Work([*passes, Pass(row, slots, moved[-1] if moved else None)], own=own)


def _moved_factors(x: Operands) -> list[Factors]:
    """Return the products of T."""
    found = []
    if "u" in x:
        found.append((x["u"], x["b"]))
    if "v" in x:
        found.append((x["a"], x["v"]))
    return found


def _summed_up(moved: list[Factors], fmt: str, t: Operand, w: Operand | None) -> list[Pass]:
    """Return ``t = w + the products``, one after another."""
    passes = []
    for i, factors in enumerate(moved):
        row = rows.terms(fmt, t.fmt, True, i == 0 and w is not None, False, i > 0)
        slots = Slots(bias=None if i else w, pre=t if i else None, out=t)
        passes.append(Pass(row, slots, factors))
    return passes


def _gradients(
    x: Operands, q: Operand | None, s: Operand | None = None
) -> dict[str, list[Factors]]:
    """Return the products of ``d_a = q b' + s v'`` and ``d_b = a' q + u' s`` that are there."""
    d_a: list[Factors] = []
    d_b: list[Factors] = []
    if q is not None and "d_a" in x:
        d_a.append((q, x["b"].turned()))
    if s is not None and "d_a" in x and "v" in x:
        d_a.append((s, x["v"].turned()))
    if q is not None and "d_b" in x:
        d_b.append((x["a"].turned(), q))
    if s is not None and "d_b" in x and "u" in x:
        d_b.append((x["u"].turned(), s))
    found = {"d_a": d_a, "d_b": d_b}
    return {name: products for name, products in found.items() if name in x}


def partials(p: Any, x: Operands, batch: Batch) -> Operand | None:
    """Return the partial column sums of d_bias, if it is there."""
    if "d_bias" not in x:
        return None
    return partial_sums(p, "sums", x["d_bias"], x["grad"].shape[-2:], batch)
