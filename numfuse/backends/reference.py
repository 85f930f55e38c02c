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
from numfuse.layout import sum_to

if TYPE_CHECKING:
    from numfuse.activations import Activation
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
        with np.errstate(all="ignore"):
            pre = _pre_activation(p) if p.pre is None else _wide(p.pre)
            grad_pre = _wide(p.grad) * _slope(p.activation, pre, p.guard)
            if p.d_a is not None:
                p.d_a[...] = sum_to(_product(grad_pre, p.b.swapaxes(-1, -2)), p.d_a.shape, _LONG)
            if p.d_b is not None:
                p.d_b[...] = sum_to(_product(p.a.swapaxes(-1, -2), grad_pre), p.d_b.shape, _LONG)
            if p.d_bias is not None:
                p.d_bias[...] = sum_to(grad_pre, p.d_bias.shape, _LONG)
        _record("backward", p.activation)

    def gated(self, p: GatedProblem) -> None:
        """out = act(a) * b; `out` may be `a` or `b`, so it is written last."""
        with np.errstate(all="ignore"):
            p.out[...] = p.activation(_wide(p.a)) * _wide(p.b)
        _record("gated", p.activation)

    def gated_backward(self, p: GatedBackwardProblem) -> None:
        """d_a = grad * b * act'(a), d_b = grad * act(a)."""
        with np.errstate(all="ignore"):
            a, grad = _wide(p.a), _wide(p.grad)
            if p.d_a is not None:
                p.d_a[...] = grad * _wide(p.b) * _slope(p.activation, a, p.guard)
            if p.d_b is not None:
                p.d_b[...] = grad * p.activation(a)
        _record("gated_backward", p.activation)

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


def _record(kernel: str, activation: Activation) -> None:
    latest.call = Call("reference", "NumPy", "float64", f"{kernel}/{activation.name}", None)


BACKEND = Reference()
