"""The derivatives that no fused function gives, as sums of differentiable pieces.

A fused double backward is differentiated again through what it is made of: products (the fused
functions with the activation "none", which know every batch rule) and the gates act^(k)(x) * y of
the table's derivatives (`Activation.derived`). Each piece has a derivative of its own, so there is
no last order but that of the table, past which a derivative raises.

What is done element by element is no text here: it is the operation's epilogue, which
`numfuse.epilogues` derives from the forward, evaluated over arrays (:func:`evaluate`). The products
around it are the adjoints of a matrix product.

`ops` is an adapter, or anything else with the public functions under their names. Every function
takes the operands of the primitive that it stands for (`numfuse.adapters.primitives`), and returns
what that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from operator import add, mul
from typing import Any

import numpy as np

from numfuse import epilogues
from numfuse.activations import Activation, get
from numfuse.adapters.primitives import How
from numfuse.expr import SYMBOL, Expr, constant, exp
from numfuse.language.curves import Curve

NONE = "none"

# --- formulas over arrays -------------------------------------------------------------------------
_BENT = exp(SYMBOL)
#: Stand-ins for an activation: which of its derivatives are zero everywhere is all that the form of
#: a derived formula depends on. So a formula is derived once, and keeps no activation alive.
_STAND_INS = {
    "linear": Curve("linear", lambda order: (SYMBOL, constant(1), constant(0))[min(order, 2)]),
    "bent at corners": Curve("f", lambda order: _BENT if order < 2 else constant(0)),
    "bent": Curve("f", lambda order: _BENT),
}
#: By operation: its derived formula, over an activation's curve.
_FORMULAS: dict[str, Callable[[Curve], epilogues.Epilogue]] = {
    "product_bwd": lambda f: epilogues.layer(f).select("out").backward().without("bias"),
    "product_double": lambda f: epilogues.layer_double_backward(f).without("bias", "w"),
    "product_tangent": lambda f: epilogues.layer_tangent(f).without("bias"),
    "product_third": lambda f: (
        epilogues.layer_double_backward(f)
        .without("bias", "w")
        .pulled_back(
            {"d_grad": "g", "q": "x", "s": "y"}, {"t": "d_t", "grad": "d_grad", "z": "d_z"}
        )
    ),
    "gate_double": epilogues.gate_double_backward,
    "gate_tangent": lambda f: epilogues.gate(f).tangent(),
}


@cache
def _formula(name: str, stand_in: str, absent: tuple[str, ...]) -> epilogues.Epilogue:
    return _FORMULAS[name](_STAND_INS[stand_in]).without(*absent)


def evaluate(
    ops: Any,
    name: str,
    how: How,
    inputs: Mapping[str, Any],
    guard: bool = False,
    curves_of: dict[Expr, Any] | None = None,
) -> Callable[[str], Any]:
    """Return the function from a result's name to its array; None for one that is zero.

    `name` is the operation whose derived formula it is. An input is an array, a function that makes
    one where a result depends on it, or None for zero. With `guard`, a derivative of the activation
    that is not finite counts as 0. In `curves_of` the derivatives of the activation are kept as
    arrays, for several formulas over the same inputs that have many terms; without it, each term is
    one gate.
    """
    act = how.activation
    absent = tuple(x for x, array in inputs.items() if array is None)
    stand_in = "bent"
    if act.is_identity and name.startswith("product"):
        stand_in = "linear"  # (a gate stays one, and its value depends on all that it is made of)
    # (past the table the second derivative raises, where something is to be multiplied by it)
    elif (
        name.endswith(("_double", "_third"))
        and not {"t", "x", "y"} & inputs.keys() <= set(absent)
        and act.second_derivative_is_zero()
    ):
        stand_in = "bent at corners"
    results = dict(_formula(name, stand_in, absent).results)
    known: dict[Expr, Any] = {}

    def value(e: Expr) -> Any:
        if e not in known:
            known[e] = compute(e)
        return known[e]

    def compute(e: Expr) -> Any:
        if e.op == "input":
            x = inputs[str(e.payload)]
            return x() if callable(x) else x
        if e.op == "add":
            return value(e.args[0]) + value(e.args[1])
        curves, rest = _factors(e)
        if not curves:
            return reduce(mul, map(value, rest))
        # one derivative of the activation, times what is left: a gate
        (curve,) = curves
        assert isinstance(curve.payload, Curve)
        y = reduce(mul, map(value, rest))
        if curves_of is not None:
            if curve not in curves_of:
                x = value(curve.args[0])
                curves_of[curve] = ops.activation(x, act.derived(curve.payload.order))
            slope = curves_of[curve]
            if type(y) is np.ndarray and len(rest) > 1 and slope.dtype == y.dtype:
                return np.multiply(slope, y, out=y)  # (nobody else has it: no fresh pages)
            return slope * y if slope.dtype == y.dtype else ops.narrowed(slope * ops.widened(y), y)
        return _gate(ops, value(curve.args[0]), y, act, curve.payload.order, guard, how.backend)

    return lambda result: value(results[result]) if result in results else None


def _factors(e: Expr) -> tuple[list[Expr], list[Expr]]:
    """Return the factors of a product that are calls of an activation, and the others."""
    if e.op != "mul":
        return ([e], []) if e.op == "call" else ([], [e])
    parts = [_factors(factor) for factor in e.args]
    return [x for curves, _ in parts for x in curves], [x for _, rest in parts for x in rest]


def _gate(
    ops: Any, x: Any, y: Any, activation: Activation, order: int, guard: bool, backend: Any
) -> Any:
    """Return activation^(order)(x) * y in y's dtype; a saved `x` may have the accumulator's."""
    narrow = x.dtype == y.dtype
    wide = y if narrow else ops.widened(y)
    if guard:
        # (of a gate's backward alone there is a guard: its factor is 1 here)
        ones, act = ops.ones_like(x), activation.derived(order - 1)
        found = ops.activation_mul_bwd(wide, x, ones, act, needs=("a",), backend=backend).d_a
    else:
        found = ops.activation_mul(x, wide, activation.derived(order), backend=backend)
    return found if narrow else ops.narrowed(found, y)


# --- products -------------------------------------------------------------------------------------
def moved(ops: Any, u: Any, v: Any, w: Any, a: Any, b: Any, bias: Any, backend: Any) -> Any:
    """Return T = u @ b + a @ v + w in the result's shape, or None where all are None."""
    terms, enlarged = [], w is not None
    if u is not None:
        terms.append(ops.matmul_bias_activation(u, b, w, NONE, backend=backend))
        w = None
    if v is not None:
        terms.append(ops.matmul_bias_activation(a, v, w, NONE, backend=backend))
        w = None
    if w is not None:
        terms.append(_zeros(ops, a, b, w, backend))
    if not terms:
        return None
    result = terms[0]
    if len(terms) > 1:
        result = result + terms[1]
    if bias is not None and bias.ndim > 1 and not enlarged:
        # A bias of its own batch enlarges the result even where it is not moved.
        result = result + _zeros(ops, a, b, ops.zeros_like(bias), backend)
    return result


def _zeros(ops: Any, a: Any, b: Any, bias: Any, backend: Any) -> Any:
    """Return the bias in the result's shape; `a` and `b` give that alone, whatever their values."""
    zeros = ops.zeros_like
    return ops.matmul_bias_activation(zeros(a), zeros(b), bias, NONE, backend=backend)


def _pre(ops: Any, a: Any, b: Any, bias: Any, how: How) -> Callable[[], Any]:
    return lambda: ops.pre_activation(how, a, b, bias)


# --- the primitives' own --------------------------------------------------------------------------
def _product_bwd(
    ops: Any, how: How, grad: Any, a: Any, b: Any, bias: Any, pre: Any = None, guard: bool = False
) -> tuple[Any, ...]:
    z = _pre(ops, a, b, bias, how) if pre is None else pre
    s = evaluate(ops, "product_bwd", how, {"z": z, "grad": grad}, guard)("d_z")
    found = ops.matmul_bias_activation_bwd(
        s, a, b, bias, NONE, needs=how.needs, backend=how.backend
    )
    return tuple(x for x in found if x is not None)


def _product_double(
    ops: Any, how: How, *x: Any, pre: Any = None, guard: bool = False
) -> tuple[Any, ...]:
    """Return the gradients `how.needs` of the backward's gradients, weighted with u, v and w.

    With a saved `pre`, that is in the place of a @ b + bias. Where `how.needs` has "pre", it is an
    operand of its own: the part of the gradients that goes through it is its own, and theirs not.
    """
    u, v, w, grad, a, b, bias = x
    z = _pre(ops, a, b, bias, how) if pre is None else pre
    t = moved(ops, u, v, w, a, b, bias, how.backend)
    element = evaluate(ops, "product_double", how, {"z": z, "t": t, "grad": grad}, guard)
    sums: dict[str, Any] = dict.fromkeys(how.needs)
    adjoint = _adjoints(ops, how, a, b, bias, sums)
    if "grad" in sums:
        sums["grad"] = element("d_grad")
    if "pre" not in sums:
        adjoint(element, "q", a, b, "a b bias")
    elif (q := element("q")) is not None:
        sums["pre"] = ops.narrowed(q, pre)
    adjoint(element, "s", u, v, "a b")
    likes = {"grad": grad, "a": a, "b": b, "bias": bias, "pre": pre}
    return tuple(ops.zeros_like(likes[n]) if x is None else x for n, x in sums.items())


def _adjoints(ops: Any, how: How, a: Any, b: Any, bias: Any, sums: dict[str, Any]) -> Any:
    """Return what adds the adjoints of a product of two factors to the gradients `sums`.

    It takes the function from a result to its array, the result, the factors, and the names of the
    gradients with respect to them, and to a bias. A factor that is None is zero.
    """
    none = How(get(NONE), (), True, how.backend)

    def adjoint(source: Callable[[str], Any], result: str, left: Any, right: Any, to: str) -> None:
        names = dict(zip(to.split(), ("a", "b", "bias"), strict=False))
        others = {"a": right, "b": left, "bias": a}
        needs = {k: n for k, n in names.items() if k in sums and others[n] is not None}
        value = source(result) if needs else None
        if value is None:
            return
        operands = (a if left is None else left, b if right is None else right)
        made = none._replace(needs=tuple(needs.values()))
        parts = ops.primitive("product_bwd", made, value, *operands, bias)
        for name, part in zip(needs, parts, strict=True):
            sums[name] = part if sums[name] is None else sums[name] + part

    return adjoint


def third(
    ops: Any, how: How, found: Sequence[Any], x: Sequence[Any], wanted: Sequence[str]
) -> list[Any]:
    """Return the gradients of a double backward's results, weighted with cotangents, or None each.

    `found` are the cotangents of d_grad, d_a, d_b and d_bias, where None is zero, `x` the operands
    u, v, w, grad, a, b, bias, and `wanted` the names of those whose gradients are returned.

    The results are sums of products of two factors (:func:`_product_double`), and so are these: the
    cotangents take the places of u, v and w, and each product has two adjoints.
    """
    u, v, w, grad, a, b, bias = x
    g, of_a, of_b, of_bias = found
    none = How(get(NONE), (), True, how.backend)

    def product(left: Any, right: Any) -> Any:
        given = left is not None and right is not None
        return ops.primitive("product", none, left, right, None) if given else None

    inputs = {
        "z": _pre(ops, a, b, bias, how),
        "t": moved(ops, u, v, w, a, b, bias, how.backend),
        "grad": grad,
    }
    curves: dict[Expr, Any] = {}
    element = evaluate(ops, "product_double", how, inputs, curves_of=curves)
    terms = [product(of_a, v), product(u, of_b)]
    there = [term for term in terms if term is not None]
    if there and bias is not None and bias.ndim > 1:  # (which may enlarge the result)
        there.append(_zeros(ops, a, b, ops.zeros_like(bias), how.backend))
    inputs |= {
        "g": g,
        "x": moved(ops, of_a, of_b, of_bias, a, b, bias, how.backend),
        "y": reduce(add, there) if there else None,
    }
    twice = evaluate(ops, "product_third", how, inputs, curves_of=curves)
    sums: dict[str, Any] = dict.fromkeys(wanted)
    if "grad" in sums:
        sums["grad"] = twice("d_grad")

    adjoint = _adjoints(ops, how, a, b, bias, sums)
    adjoint(twice, "d_t", a, b, "u v w")
    adjoint(element, "s", of_a, of_b, "u v")
    adjoint(twice, "d_z", a, b, "a b bias")
    adjoint(twice, "d_t", u, v, "a b")
    adjoint(element, "q", of_a, of_b, "a b")
    return [sums[name] for name in wanted]


def _product_tangent(ops: Any, how: How, a: Any, b: Any, bias: Any, u: Any, v: Any, w: Any) -> Any:
    t = moved(ops, u, v, w, a, b, bias, how.backend)
    z = _pre(ops, a, b, bias, how)
    if t is None:
        return ops.zeros_like(z())
    return evaluate(ops, "product_tangent", how, {"z": z, "z_dot": t})("out_dot")


def _gate_double(ops: Any, how: How, u: Any, v: Any, grad: Any, a: Any, b: Any) -> tuple[Any, ...]:
    inputs = {"a": a, "b": b, "grad": grad, "u": u, "v": v}
    found = evaluate(ops, "gate_double", how, inputs)
    results = (found(f"d_{name}") for name in how.needs)
    return tuple(ops.zeros_like(a) if x is None else x for x in results)


def _gate_tangent(ops: Any, how: How, a: Any, b: Any, u: Any, v: Any) -> Any:
    inputs = {"a": a, "b": b, "a_dot": u, "b_dot": v}
    found = evaluate(ops, "gate_tangent", how, inputs)("out_dot")
    return ops.zeros_like(a) if found is None else found


#: By primitive: (ops, how, its operands) to what it returns, through what it is made of.
COMPOSITES: dict[str, Callable[..., Any]] = {
    "product_bwd": _product_bwd,
    "product_double": _product_double,
    "product_tangent": _product_tangent,
    "gate_double": _gate_double,
    "gate_tangent": _gate_tangent,
}
