"""The double backward and the tangents as sums of differentiable pieces, for every adapter.

A fused double backward is differentiated again through what it is made of: products (the fused
functions with the activation "none", which know every batch rule) and the gates act^(k)(x) * y of
the table's derivatives (`Activation.derived`). Each piece has a derivative of its own, so there is
no last order but that of the table, past which a derivative raises.

`ops` is an adapter, or anything else with the public functions under their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from numfuse.activations import Activation

__all__ = [
    "backward",
    "double_backward",
    "gated_backward",
    "gated_double_backward",
    "gated_tangent",
    "is_linear",
    "linear_backward_tangent",
    "moved",
    "tangent",
]

NONE = "none"


def is_linear(activation: Activation) -> bool:
    """Whether the activation is the identity."""
    return activation.trace(0).op == "x"


def total(terms: Sequence[Any], zero: Callable[[], Any]) -> Any:
    """The sum of the terms that are there."""
    there = [term for term in terms if term is not None]
    return reduce(lambda x, y: x + y, there) if there else zero()


def moved(ops: Any, u: Any, v: Any, w: Any, a: Any, b: Any, bias: Any, backend: Any) -> Any:
    """T = u @ b + a @ v + w, in the result's shape; None where all are None."""
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
    """The bias in the result's shape; `a` and `b` give that alone, whatever their values."""
    zeros = ops.zeros_like
    return ops.matmul_bias_activation(zeros(a), zeros(b), bias, NONE, backend=backend)


def _sloped(
    ops: Any, pre: Any, y: Any, activation: Activation, order: int, guard: bool, backend: Any
) -> Any:
    """activation^(order)(pre) * y; with the guard, a derivative that is not finite counts as 0."""
    if not guard:
        return _gate(ops, pre, y, activation.derived(order), backend)
    # (of a gate's backward alone there is a guard: its factor is 1 here)
    wide = y if pre.dtype == y.dtype else ops.widened(y)
    found = ops.activation_mul_bwd(
        wide,
        pre,
        ops.ones_like(pre),
        activation.derived(order - 1),
        needs=("a",),
        backend=backend,
    )
    return found.d_a if pre.dtype == y.dtype else ops.narrowed(found.d_a, y)


def _gate(ops: Any, pre: Any, y: Any, activation: Activation, backend: Any) -> Any:
    """activation(pre) * y in y's dtype; a saved `pre` may have the accumulator's."""
    if pre.dtype == y.dtype:
        return ops.activation_mul(pre, y, activation, backend=backend)
    wide = ops.activation_mul(pre, ops.widened(y), activation, backend=backend)
    return ops.narrowed(wide, y)


def backward(
    ops: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: Activation,
    needs: Sequence[str],
    backend: Any,
    pre: Any = None,
    guard: bool = False,
) -> dict[str, Any]:
    """{operand: gradient} of act(a @ b + bias); with a saved `pre`, that in its place."""
    if pre is None:
        pre = ops.matmul_bias_activation(a, b, bias, NONE, backend=backend)
    s = _sloped(ops, pre, grad, activation, 1, guard, backend)
    found = ops.matmul_bias_activation_bwd(s, a, b, bias, NONE, needs=needs, backend=backend)
    return dict(zip(("a", "b", "bias"), found, strict=True))


def linear_backward_tangent(
    ops: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    grad_dot: Any,
    a_dot: Any,
    b_dot: Any,
    how: Any,
) -> tuple[Any, ...]:
    """Tangents of the gradients `how.needs` of a @ b + bias, which are bilinear."""
    found: dict[str, Any] = {}
    for moved_names, operands in (
        (("a", "b", "bias"), (grad_dot, a, b)),
        (("a",), (grad, a, b_dot)),
        (("b",), (grad, a_dot, b)),
    ):
        needs = tuple(name for name in moved_names if name in how.needs)
        if needs and all(x is not None for x in operands):
            part = ops.product_bwd(*operands, bias, how._replace(needs=needs))
            for i, name in enumerate(needs):
                found[name] = part[i] if name not in found else found[name] + part[i]
    like = {"a": a, "b": b, "bias": bias}
    names = [name for name in like if name in how.needs]
    return tuple(found[name] if name in found else ops.zeros_like(like[name]) for name in names)


def double_backward(
    ops: Any,
    u: Any,
    v: Any,
    w: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: Activation,
    needs: Sequence[str],
    backend: Any,
    pre: Any = None,
    guard: bool = False,
) -> dict[str, Any]:
    """{operand: gradient} of the backward's gradients, weighted with u, v and w.

    With a saved `pre`, that is in the place of a @ b + bias. Where `needs` has "pre", it is an
    operand of its own: the part of the gradients that goes through it is its own, and theirs not.
    """
    linear = is_linear(activation)
    t = moved(ops, u, v, w, a, b, bias, backend)
    q = None
    s = grad
    if not linear:
        if pre is None:
            pre = ops.matmul_bias_activation(a, b, bias, NONE, backend=backend)
        s = _sloped(ops, pre, grad, activation, 1, guard, backend)
        if t is not None and not activation.second_derivative_is_zero():
            q = _sloped(ops, pre, grad * t, activation, 2, guard, backend)

    def gradient(name: str, g: Any, x: Any, y: Any, beside: Any) -> Any:
        found = ops.matmul_bias_activation_bwd(
            g, x, y, beside, NONE, needs=(name,), backend=backend
        )
        return dict(zip(("a", "b", "bias"), found, strict=True))[name]

    found: dict[str, Any] = {}
    if "grad" in needs:
        if t is None:
            found["grad"] = ops.zeros_like(grad)
        else:
            found["grad"] = t if linear else _sloped(ops, pre, t, activation, 1, guard, backend)
    if "pre" in needs:
        found["pre"] = ops.zeros_like(pre) if q is None else ops.narrowed(q, pre)
        q = None
    for name, like in (("a", a), ("b", b), ("bias", bias)):
        if name not in needs or like is None:
            continue
        terms = []
        if q is not None:
            terms.append(gradient(name, q, a, b, bias))
        if name == "a" and v is not None:
            terms.append(gradient("a", s, a, v, bias))
        if name == "b" and u is not None:
            terms.append(gradient("b", s, u, b, bias))
        found[name] = total(terms, lambda like=like: ops.zeros_like(like))  # type: ignore[misc]
    return found


def tangent(
    ops: Any,
    a: Any,
    b: Any,
    bias: Any,
    u: Any,
    v: Any,
    w: Any,
    activation: Activation,
    backend: Any,
) -> Any:
    """out_dot = act'(a @ b + bias) * (u @ b + a @ v + w)."""
    t = moved(ops, u, v, w, a, b, bias, backend)
    pre = ops.matmul_bias_activation(a, b, bias, NONE, backend=backend)
    if t is None:
        return ops.zeros_like(pre)
    if is_linear(activation):
        return t
    return ops.activation_mul(pre, t, activation.derived(1), backend=backend)


def gated_backward(
    ops: Any,
    grad: Any,
    a: Any,
    b: Any,
    activation: Activation,
    needs: Sequence[str],
    backend: Any,
) -> dict[str, Any]:
    """{operand: gradient} of act(a) * b."""
    found = {}
    if "a" in needs:
        found["a"] = ops.activation_mul(a, grad * b, activation.derived(1), backend=backend)
    if "b" in needs:
        found["b"] = ops.activation_mul(a, grad, activation, backend=backend)
    return found


def gated_double_backward(
    ops: Any,
    u: Any,
    v: Any,
    grad: Any,
    a: Any,
    b: Any,
    activation: Activation,
    needs: Sequence[str],
    backend: Any,
) -> dict[str, Any]:
    """{operand: gradient} of the gate's gradients, weighted with u and v."""

    def gate(order: int, *factors: Any) -> Any:
        if any(factor is None for factor in factors):
            return None
        y = reduce(lambda x, y: x * y, factors)
        return ops.activation_mul(a, y, activation.derived(order), backend=backend)

    bent = not activation.second_derivative_is_zero()
    terms = {
        "grad": lambda: (gate(1, u, b), gate(0, v)),
        "a": lambda: (gate(2, u, grad, b) if bent else None, gate(1, v, grad)),
        "b": lambda: (gate(1, u, grad),),
    }
    return {name: total(terms[name](), lambda: ops.zeros_like(a)) for name in needs}


def gated_tangent(
    ops: Any, a: Any, b: Any, u: Any, v: Any, activation: Activation, backend: Any
) -> Any:
    """out_dot = u * b * act'(a) + v * act(a)."""
    terms = []
    if u is not None:
        terms.append(ops.activation_mul(a, u * b, activation.derived(1), backend=backend))
    if v is not None:
        terms.append(ops.activation_mul(a, v, activation, backend=backend))
    return total(terms, lambda: ops.zeros_like(a))
