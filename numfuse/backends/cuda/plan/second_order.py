"""The double backward and forward mode as launches: products (`batches`), passes over elements.

T = u @ b + a @ v + w + z and the pre-activation are made in the accumulator's dtype; a pass turns
them into the elementwise results and into Q and S (in the operands' dtype, as grad_pre); what is
left are the products of a backward, with Q and S in place of grad_pre. Where a result is the sum of
two products, each is made on its own and the next pass adds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cuda.compile import scalars
from numfuse.backends.cuda.compile.toolchain import cuda, kernel
from numfuse.backends.cuda.kernels import elementwise
from numfuse.backends.cuda.kernels.passes import grid_of, threads_of
from numfuse.backends.cuda.plan import batches, lower
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.product import Launch, Slot
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.expr import Expr
from numfuse.problem.shapes import equal

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.problem.second_order import (
        GatedDoubleBackwardProblem,
        GatedTangentProblem,
        GemmDoubleBackwardProblem,
        GemmTangentProblem,
    )

__all__ = ["double_backward", "gated_double_backward", "gated_tangent", "tangent", "zero"]

#: (name of a value, its formula, the input that it is of, whether it is guarded)
_Values = Sequence[tuple[str, Expr | None, str, bool]]


# --- a pass over elements -----------------------------------------------------------------------
def pointwise_text(
    inputs: Sequence[str], values: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str]]
) -> str:
    """The kernel: outputs are expressions of `<input>_here` and of values at one input."""
    arguments = ", ".join([*inputs, *(name for name, _ in outputs), "size"])
    return "\n".join(
        [
            f"def pointwise({arguments}):",
            "    for i in range(cuda.grid(1), size, cuda.gridsize(1)):",
            *(f"        {name}_here = LOAD_{name.upper()}({name}, i)" for name in inputs),
            *(f"        {name} = {name.upper()}({of}_here)" for name, of in values),
            *(f"        STORE_{name.upper()}({name}, i, {text})" for name, text in outputs),
            "",
        ]
    )


def _pass(
    rec: Recorder,
    what: str,
    accumulator: str,
    storage: str,
    inputs: dict[str, View],
    values: _Values,
    outputs: dict[str, tuple[View, str]],
) -> None:
    """Record one pass over arrays of one shape; what is not contiguous is copied first or last."""
    found: dict[str, View] = {}
    late: list[tuple[View, View]] = []
    for name, view in inputs.items():
        found[name] = view
        if not view.contiguous:
            found[name] = rec.fresh(view.shape, view.dtype)
            batches.copy(rec, view, found[name])
    for name, (view, _) in outputs.items():
        found[name] = view
        if not view.contiguous:
            found[name] = rec.fresh(view.shape, view.dtype)
            late.append((found[name], view))
    equal("the arrays of a pass", *(view.shape for view in found.values()))
    size = prod(next(iter(found.values())).shape)
    if not size:
        return
    text = pointwise_text(
        tuple(inputs),
        tuple((name, of) for name, _, of, _ in values),
        tuple((name, text) for name, (_, text) in outputs.items()),
    )
    scope: dict[str, Any] = {"cuda": cuda, "__name__": __name__}
    exec(compile(text, "<numfuse pointwise>", "exec"), scope)
    template = scope["pointwise"]
    template.numfuse_key = f"pointwise {hashlib.sha256(text.encode()).hexdigest()}"
    bindings: dict[str, Any] = {"ZERO": np.dtype(accumulator).type(0)}
    for name, view in inputs.items():
        bindings[f"LOAD_{name.upper()}"] = scalars.loads(view.dtype)
    for name, (view, _) in outputs.items():
        bindings[f"STORE_{name.upper()}"] = scalars.stores(view.dtype)
    for name, graph, _, guard in values:
        bindings[name.upper()] = elementwise.scalar(
            graph, accumulator, storage, guard=guard, constant=graph is None
        )
    made = kernel(
        template,
        " ".join(["u64"] * len(found) + ["i64"]),
        threads=threads_of(rec.device.info),
        name=what,
        **bindings,
    )
    arguments: tuple[Slot | int, ...] = (*(Slot(name) for name in found), size)
    rec.launches(
        (Launch(made, grid_of(size, rec.device.info), arguments),),
        {name: (view.buffer, view.offset) for name, view in found.items()},
    )
    for source, out in late:
        batches.copy(rec, source, out)


def zero(rec: Recorder, out: View) -> None:
    """Record out = 0."""
    accumulator = "float64" if out.dtype == "float64" else "float32"
    _pass(rec, "zero", accumulator, out.dtype, {}, (), {"out": (out, "ZERO")})


# --- products -----------------------------------------------------------------------------------
def _wide(rec: Recorder, p: Any) -> View:
    """Room for a matrix of the result's shape in the accumulator's dtype."""
    return rec.fresh((*p.batch, p.m, p.n), p.acc_dtype.name)


def _pre(rec: Recorder, p: Any, bind: Bind) -> View:
    """Record the pre-activation."""
    pre = _wide(rec, p)
    batches.product(
        rec,
        bind("a", p.a),
        bind("b", p.b),
        p.batch,
        pre,
        p.acc_dtype.name,
        bias=None if p.bias is None else bind("bias", p.bias),
    )
    return pre


def _moves(p: Any) -> bool:
    return not (p.u is None and p.v is None and p.w is None and p.z is None)


def _without_products(view: View, axis: int) -> View:
    """A factor of a sum of no products: its axis of K has length 0."""
    shape = list(view.shape)
    shape[axis] = 0
    return replace(view, shape=tuple(shape))


def _moved(rec: Recorder, p: Any, bind: Bind, out: View | None) -> tuple[dict[str, View], str]:
    """Record T = u @ b + a @ v + w + z.

    One product goes to `out`, where that is given; two go to matrices of their own. Returned are
    the inputs of a pass, and the expression of T in them.
    """
    acc = p.acc_dtype.name
    a, b = bind("a", p.a), bind("b", p.b)
    factors = []
    if p.u is not None:
        factors.append((bind("u", p.u), b))
    if p.v is not None:
        factors.append((a, bind("v", p.v)))
    if not factors:
        factors.append((_without_products(a, -1), _without_products(b, -2)))
    w, z = (None if x is None else bind(name, x) for name, x in (("w", p.w), ("z", p.z)))
    found: dict[str, View] = {}
    for i, (x, y) in enumerate(factors):
        target = out if out is not None and len(factors) == 1 else _wide(rec, p)
        if i:
            batches.product(rec, x, y, p.batch, target, acc)
        else:
            batches.product(rec, x, y, p.batch, target, acc, bias=w, extra=z)
        found[f"t{i}"] = target
    return found, f"({' + '.join(f'{name}_here' for name in found)})"


def _sum_of_products(
    rec: Recorder, p: Any, factors: list[tuple[View, View]], out: View, free: bool
) -> None:
    """Record out = the sum of products, rounded once."""
    acc = p.acc_dtype.name
    if len(factors) == 1:
        ((x, y),) = factors
        batches.product(rec, x, y, p.batch, out, acc, free=free)
        return
    parts: dict[str, View] = {}
    for i, (x, y) in enumerate(factors):
        parts[f"p{i}"] = target = rec.fresh(out.shape, acc)
        batches.product(rec, x, y, p.batch, target, acc, free=free)
    text = " + ".join(f"{name}_here" for name in parts)
    _pass(rec, "sum of products", acc, out.dtype, parts, (), {"out": (out, text)})


def _column_sums(rec: Recorder, p: Any, x: View, out: View) -> None:
    """Record out = the sums of the columns of x, as the backward's of d_bias."""
    m, batch = p.m, p.batch
    shared = all(length == 1 for y in (p.b, p.bias) if y is not None for length in y.shape[:-2])
    if batch and shared and all(batch):
        rows = batches.as_rows(x)
        assert rows is not None, "x is contiguous"
        m, batch, x = m * prod(batch), (), rows
        out = replace(out, shape=out.shape[-2:], strides=out.strides[-2:])
    v = lower.Backward(m, batch, x, None, None, None, None, None, None, out)
    lower.slopes(rec, v, p.n, 0, p.acc_dtype.name, None, False, None)


# --- operations ---------------------------------------------------------------------------------
def tangent(rec: Recorder, p: GemmTangentProblem, bind: Bind) -> None:
    """out as in the forward, out_dot = act'(pre) * T."""
    acc, out_dot = p.acc_dtype.name, bind("out_dot", p.out_dot)
    slope = lower.slope_of(p.activation)
    pre = None
    if _moves(p) and slope is not None:
        pre = _wide(rec, p)
    # as the forward with its pre-activation, so with the same bits
    batches.product(
        rec,
        bind("a", p.a),
        bind("b", p.b),
        p.batch,
        bind("out", p.out),
        acc,
        function=lower.value_of(p.activation),
        bias=None if p.bias is None else bind("bias", p.bias),
        extra=None if p.residual is None else bind("residual", p.residual),
        pre=pre,
    )
    if not _moves(p):
        zero(rec, out_dot)
        return
    parts, text = _moved(rec, p, bind, out_dot if pre is None else None)
    if pre is None and len(parts) == 1:
        return
    values: _Values = () if pre is None else (("slope", slope, "pre", p.guard),)
    inputs = dict(parts)
    if pre is not None:
        inputs["pre"], text = pre, f"slope * {text}"
    _pass(rec, "tangent", acc, p.dtype.name, inputs, values, {"out_dot": (out_dot, text)})


def double_backward(rec: Recorder, p: GemmDoubleBackwardProblem, bind: Bind) -> None:
    """T, Q and S, and from them the gradients of the backward's gradients."""
    act = p.activation
    identity, moved = lower.value_of(act) is None, _moves(p)
    bent = moved and not identity and not act.second_derivative_is_zero()
    wanted: dict[str, View] = {}
    for name, there in (
        ("d_grad", moved),
        ("d_a", bent or p.v is not None),
        ("d_b", bent or p.u is not None),
        ("d_bias", bent),
    ):
        x = getattr(p, name)
        if x is not None and there:
            wanted[name] = bind(name, x)
        elif x is not None:
            zero(rec, bind(name, x))
    if not wanted:
        return
    q: View | None = None
    s: View | None = bind("grad", p.grad)
    q_wide: View | None = None
    if identity:
        if "d_grad" in wanted:
            parts, text = _moved(rec, p, bind, wanted["d_grad"])
            if len(parts) > 1:
                outs = {"d_grad": (wanted["d_grad"], text)}
                _pass(rec, "sum", p.acc_dtype.name, p.dtype.name, parts, (), outs)
    else:
        q, q_wide, s = _elementwise(rec, p, bind, wanted, bent)
    pairs: dict[str, list[tuple[View, View]]] = {"d_a": [], "d_b": []}
    a, b = bind("a", p.a), bind("b", p.b)
    if q is not None:
        pairs["d_a"].append((q, batches.turned(b)))
        pairs["d_b"].append((batches.turned(a), q))
    if p.v is not None and s is not None:
        pairs["d_a"].append((s, batches.turned(bind("v", p.v))))
    if p.u is not None and s is not None:
        pairs["d_b"].append((batches.turned(bind("u", p.u)), s))
    for name, factors in pairs.items():
        if name in wanted:
            _sum_of_products(rec, p, factors, wanted[name], name == "d_b")
    if "d_bias" in wanted and q_wide is not None:
        _column_sums(rec, p, q_wide, wanted["d_bias"])


def _elementwise(
    rec: Recorder, p: GemmDoubleBackwardProblem, bind: Bind, wanted: dict[str, View], bent: bool
) -> tuple[View | None, View | None, View | None]:
    """Record d_grad, and Q and S where they are needed: Q, Q before it was rounded, and S."""
    acc, storage = p.acc_dtype.name, p.dtype.name
    slope = lower.slope_of(p.activation)
    products = "d_a" in wanted or "d_b" in wanted
    sums = "d_bias" in wanted
    bends = bent and (products or sums)
    inputs: dict[str, View] = {}
    inputs["pre"] = _pre(rec, p, bind) if p.pre is None else bind("pre", p.pre)
    values: list[tuple[str, Expr | None, str, bool]] = []
    outs: dict[str, tuple[View, str]] = {}
    t = ""
    if bends or "d_grad" in wanted:
        parts, t = _moved(rec, p, bind, None)
        inputs |= parts
    shape = (*p.batch, p.m, p.n)
    if "d_grad" in wanted:
        outs["d_grad"] = wanted["d_grad"], t if slope is None else f"slope * {t}"
    q = q_wide = s = None
    if bends:
        values.append(("second", p.activation.trace(2), "pre", p.guard))
        text = f"grad_here * second * {t}"
        if products or storage == acc:
            q = rec.fresh(shape, storage)
            outs["q"] = q, text
        if sums:
            q_wide = q
            if storage != acc:
                q_wide = rec.fresh(shape, acc)
                outs["q_wide"] = q_wide, text
    if products and (p.u is not None or p.v is not None):
        s = rec.fresh(shape, storage)
        outs["s"] = s, "grad_here" if slope is None else "grad_here * slope"
    if bends or s is not None:
        inputs["grad"] = bind("grad", p.grad)
    if slope is not None and any("slope" in text for _, text in outs.values()):
        values.append(("slope", slope, "pre", p.guard))
    if outs:
        if not values:
            del inputs["pre"]
        _pass(rec, "double backward", acc, storage, inputs, values, outs)
    return q, q_wide, s


def _formulas(
    activation: Activation, names: Sequence[str], guard: bool
) -> list[tuple[str, Expr | None, str, bool]]:
    orders = {"value": 0, "slope": 1, "second": 2}
    return [
        (name, activation.trace(orders[name]), "a", guard and name != "value") for name in names
    ]


def _sum_text(*terms: str | None) -> str:
    return " + ".join(term for term in terms if term is not None) or "ZERO"


def gated_double_backward(rec: Recorder, p: GatedDoubleBackwardProblem, bind: Bind) -> None:
    """One pass over up to five operands and three results."""
    bent = p.u is not None and not p.activation.second_derivative_is_zero()
    u, v = p.u is not None, p.v is not None
    texts = {
        "d_grad": (
            p.d_grad,
            ("u_here * b_here * slope" if u else None, "v_here * value" if v else None),
        ),
        "d_a": (
            p.d_a,
            (
                "u_here * grad_here * b_here * second" if bent else None,
                "v_here * grad_here * slope" if v else None,
            ),
        ),
        "d_b": (p.d_b, ("u_here * grad_here * slope" if u else None,)),
    }
    wanted = {name: (x, _sum_text(*terms)) for name, (x, terms) in texts.items() if x is not None}
    arrays = {"a": p.a, "b": p.b, "grad": p.grad, "u": p.u, "v": p.v}
    _gate_pass(rec, p, "double gate", arrays, wanted, bind)


def gated_tangent(rec: Recorder, p: GatedTangentProblem, bind: Bind) -> None:
    """One pass over up to four operands and both results."""
    text = _sum_text(
        "u_here * b_here * slope" if p.u is not None else None,
        "v_here * value" if p.v is not None else None,
    )
    wanted = {"out": (p.out, "value * b_here"), "out_dot": (p.out_dot, text)}
    arrays = {"a": p.a, "b": p.b, "u": p.u, "v": p.v}
    _gate_pass(rec, p, "gate's tangent", arrays, wanted, bind)


def _gate_pass(
    rec: Recorder,
    p: Any,
    what: str,
    arrays: dict[str, Any],
    wanted: dict[str, tuple[Any, str]],
    bind: Bind,
) -> None:
    """Record a pass that reads what its expressions name."""
    if not wanted or not prod(p.shape):
        return
    text = " ".join(text for _, text in wanted.values())
    names = [name for name in ("value", "slope", "second") if name in text]
    inputs = {
        name: bind(name, x)
        for name, x in arrays.items()
        if x is not None and (f"{name}_here" in text or (name == "a" and names))
    }
    outs = {name: (bind(name, x), text) for name, (x, text) in wanted.items()}
    values = _formulas(p.activation, names, p.guard)
    _pass(rec, what, p.acc_dtype.name, p.dtype.name, inputs, values, outs)
