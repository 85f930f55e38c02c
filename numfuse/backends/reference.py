"""The meaning of every operation, in plain NumPy: slow, and what the other backends are held to.

Operands are widened, the formulas of the activation table are called with arrays in float64, and
the result is rounded once, to the problem's dtype, at the end. Products are made in long double: it
is wider than float64 where the machine has it, and NumPy computes it with plain loops instead of
BLAS, so that the order of summation over K is k = 0, 1, 2 ... whatever the layout, and a view gives
bit for bit what its copy gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends import Call, latest
from numfuse.gradients import settled
from numfuse.layout import as_one, sum_to

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.higher import (
        GatedDoubleBackwardProblem,
        GatedTangentProblem,
        GemmDoubleBackwardProblem,
        GemmTangentProblem,
    )
    from numfuse.problem import (
        GatedBackwardProblem,
        GatedProblem,
        GemmBackwardProblem,
        GemmProblem,
    )

__all__ = ["BACKEND", "Reference"]

_F64 = np.dtype(np.float64)
_LONG = np.dtype(np.longdouble)


class Reference:
    """The reference backend; see :class:`numfuse.backends.Backend` for what each method is."""

    name = "reference"

    def forward(self, p: GemmProblem) -> None:
        """out = act(a @ b + bias) + residual."""
        if settled(p):
            return _record("forward", p.activation)
        with np.errstate(all="ignore"):
            pre = _pre_activation(p)
            out = p.activation(pre)
            if p.residual is not None:
                out = out + _wide(p.residual)
            if p.pre is not None:
                p.pre[...] = pre
            p.out[...] = out
        _record("forward", p.activation)

    def backward(self, p: GemmBackwardProblem) -> None:
        """grad_pre = grad * act'(pre), and from it the gradients."""
        if settled(p):
            return _record("backward", p.activation)
        p, outs = _in_rows(p)
        with np.errstate(all="ignore"):
            pre = _pre_activation(p) if p.pre is None else _wide(p.pre)
            grad_pre = _wide(p.grad) * _slope(p.activation, pre, p.guard)
            if p.d_a is not None:
                p.d_a[...] = sum_to(_product(grad_pre, p.b.swapaxes(-1, -2)), p.d_a.shape, _LONG)
            if p.d_b is not None:
                p.d_b[...] = sum_to(_product(p.a.swapaxes(-1, -2), grad_pre), p.d_b.shape, _LONG)
            if p.d_bias is not None:
                p.d_bias[...] = sum_to(grad_pre, p.d_bias.shape, _LONG)
        for out, rows in outs:
            out[...] = rows.reshape(out.shape)
        _record("backward", p.activation)

    def gated(self, p: GatedProblem) -> None:
        """out = act(a) * b; `out` may be `a` or `b`, so it is written last."""
        if settled(p):
            return _record("gated", p.activation)
        with np.errstate(all="ignore"):
            p.out[...] = p.activation(_wide(p.a)) * _wide(p.b)
        _record("gated", p.activation)

    def gated_backward(self, p: GatedBackwardProblem) -> None:
        """d_a = grad * b * act'(a), d_b = grad * act(a)."""
        if settled(p):
            return _record("gated_backward", p.activation)
        with np.errstate(all="ignore"):
            a, grad = _wide(p.a), _wide(p.grad)
            if p.d_a is not None:
                p.d_a[...] = grad * _wide(p.b) * _slope(p.activation, a, p.guard)
            if p.d_b is not None:
                p.d_b[...] = grad * p.activation(a)
        _record("gated_backward", p.activation)

    def double_backward(self, p: GemmDoubleBackwardProblem) -> None:
        """T, Q and S, and from them the gradients of the backward's gradients."""
        if settled(p):
            return _record("double_backward", p.activation)
        p, outs = _in_rows(p)
        with np.errstate(all="ignore"):
            pre = _pre_activation(p) if p.pre is None else _wide(p.pre)
            slope, grad = _slope(p.activation, pre, p.guard), _wide(p.grad)
            t = _moved(p, grad.shape)
            q, s = _bent(p, pre, grad * t), grad * slope
            if p.d_grad is not None:
                p.d_grad[...] = slope * t
            if p.d_a is not None:
                p.d_a[...] = _sum(
                    p.d_a, _product(q, p.b.swapaxes(-1, -2)),
                    None if p.v is None else _product(s, p.v.swapaxes(-1, -2)),
                )  # fmt: skip
            if p.d_b is not None:
                p.d_b[...] = _sum(
                    p.d_b, _product(p.a.swapaxes(-1, -2), q),
                    None if p.u is None else _product(p.u.swapaxes(-1, -2), s),
                )  # fmt: skip
            if p.d_bias is not None:
                p.d_bias[...] = sum_to(q, p.d_bias.shape, _LONG)
        for out, rows in outs:
            out[...] = rows.reshape(out.shape)
        _record("double_backward", p.activation)

    def tangent(self, p: GemmTangentProblem) -> None:
        """out as in the forward, out_dot = act'(pre) * T."""
        if settled(p):
            return _record("tangent", p.activation)
        with np.errstate(all="ignore"):
            pre = _pre_activation(p)
            out = p.activation(pre)
            if p.residual is not None:
                out = out + _wide(p.residual)
            p.out[...] = out
            p.out_dot[...] = _slope(p.activation, pre, p.guard) * _moved(p, pre.shape)
        _record("tangent", p.activation)

    def gated_double_backward(self, p: GatedDoubleBackwardProblem) -> None:
        """The gradients of grad * b * act'(a) and grad * act(a), weighted with u and v."""
        if settled(p):
            return _record("gated_double_backward", p.activation)
        with np.errstate(all="ignore"):
            a, b, grad = _wide(p.a), _wide(p.b), _wide(p.grad)
            slope = _slope(p.activation, a, p.guard)
            zero = np.zeros_like(grad)
            d_grad = d_a = d_b = zero
            if p.u is not None:
                u = _wide(p.u)
                d_grad, d_b = u * b * slope, u * grad * slope
                d_a = _bent(p, a, u * grad * b)
            if p.v is not None:
                v = _wide(p.v)
                d_grad, d_a = d_grad + v * p.activation(a), d_a + v * grad * slope
            for out, value in ((p.d_grad, d_grad), (p.d_a, d_a), (p.d_b, d_b)):
                if out is not None:
                    out[...] = value
        _record("gated_double_backward", p.activation)

    def gated_tangent(self, p: GatedTangentProblem) -> None:
        """out = act(a) * b, and its derivative along u and v."""
        if settled(p):
            return _record("gated_tangent", p.activation)
        with np.errstate(all="ignore"):
            a, b = _wide(p.a), _wide(p.b)
            value = p.activation(a)
            dot = np.zeros_like(b)
            if p.u is not None:
                dot = dot + _wide(p.u) * b * _slope(p.activation, a, p.guard)
            if p.v is not None:
                dot = dot + _wide(p.v) * value
            p.out[...], p.out_dot[...] = value * b, dot
        _record("gated_tangent", p.activation)

    def describe(self) -> dict[str, Any]:
        """What `info` shows."""
        return {"device": "NumPy", "arithmetic": "float64, products in long double"}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ndarray:
        """A new array for this backend."""
        return np.empty(shape, dtype)

    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing is compiled."""


def _in_rows(p: Any) -> tuple[Any, list[tuple[ndarray, ndarray]]]:
    """A batch over one b as one product, of copies where it takes copies; (result, its copy) of
    each result that is to be written back."""
    p, outs = as_one(p), []
    if not p.batch:
        for name in p.BY_ROWS:
            x = getattr(p, name)
            if x is not None and x.ndim > 2:
                setattr(p, name, x.reshape(-1, x.shape[-1]))
                if name in ("d_a", "d_grad"):
                    outs.append((x, getattr(p, name)))
    return p, outs


def _wide(x: ndarray) -> ndarray:
    return x.astype(_F64, copy=False)


def _product(a: ndarray, b: ndarray) -> ndarray:
    product: ndarray = a.astype(_LONG) @ b.astype(_LONG)
    return product


def _pre_activation(p: GemmProblem | GemmBackwardProblem) -> ndarray:
    pre = _product(p.a, p.b)
    if p.bias is not None:
        pre = pre + _wide(p.bias)
    return _wide(pre)


def _slope(activation: Activation, x: ndarray, guard: bool) -> ndarray:
    """act'(x), with the guard: 0 where that is not finite."""
    slope: ndarray = activation.derivative(x)
    return np.where(np.isfinite(slope), slope, 0.0) if guard else slope


def _moved(p: GemmDoubleBackwardProblem | GemmTangentProblem, shape: tuple[int, ...]) -> ndarray:
    """T = u @ b + a @ v + w + z."""
    t = np.zeros(shape, _LONG)
    if p.u is not None:
        t = t + _product(p.u, p.b)
    if p.v is not None:
        t = t + _product(p.a, p.v)
    for x in (p.w, p.z):
        if x is not None:
            t = t + _wide(x)
    return _wide(t)


def _bent(
    p: GemmDoubleBackwardProblem | GatedDoubleBackwardProblem, x: ndarray, factor: ndarray
) -> ndarray:
    """factor * act''(x), with the guard; 0 where act'' is zero everywhere."""
    if p.activation.second_derivative_is_zero():
        return np.zeros_like(factor)
    second = p.activation.second_derivative(x)
    return factor * (np.where(np.isfinite(second), second, 0.0) if p.guard else second)


def _sum(out: ndarray, *products: ndarray | None) -> ndarray:
    """Products, each summed to the shape of a gradient, in long double."""
    total = np.zeros(out.shape, _LONG)
    for product in products:
        if product is not None:
            total = total + sum_to(product, out.shape, _LONG)
    return total


def _record(kernel: str, activation: Activation) -> None:
    latest.call = Call("reference", "NumPy", "float64", f"{kernel}/{activation.name}", None)


BACKEND = Reference()
