"""Hop 2 beyond the first derivative: the problems of the double backward and of forward mode.

What :mod:`numfuse.problem.product` promises to a backend holds here too. `u`, `v`, `w` and `z` are
moved along with `a`, `b`, `bias` and a residual, and have their shapes: cotangents of d_a, d_b,
d_bias and d_residual in a double backward, tangents in forward mode. None is zero, and costs
nothing. Where grad or a result meets them there is one matrix of them all,

    T = u @ b + a @ v + w + z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy import empty, ndarray

from numfuse.activations import get as get_activation
from numfuse.problem.operands import (
    array_of,
    as_operands,
    as_plain,
    required,
    same_dtype,
    saved_pre_activation,
    shaped,
)
from numfuse.problem.product import GemmBackwardProblem, GemmProblem
from numfuse.problem.results import (
    GATED_SECOND_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_SECOND_NEEDS,
    GatedSecondGradients,
    GemmResidualSecondGradients,
    GemmSecondGradients,
    Tangent,
    check_needs,
)
from numfuse.problem.shapes import column_view, fold_rows, gemm_shape, residual_view, row_view

if TYPE_CHECKING:
    from numfuse.activations import Activation

__all__ = [
    "GatedDoubleBackwardProblem",
    "GatedTangentProblem",
    "GemmDoubleBackwardProblem",
    "GemmTangentProblem",
    "gated_double_backward",
    "gated_tangent",
    "gemm_double_backward",
    "gemm_residual_double_backward",
    "gemm_residual_tangent",
    "gemm_tangent",
]

_DType: TypeAlias = np.dtype[Any]
_Maybe: TypeAlias = ndarray | None


@dataclass(slots=True, eq=False, repr=False)
class GemmDoubleBackwardProblem(GemmBackwardProblem):
    """The gradients of the backward's d_a, d_b and d_bias, weighted with u, v and w.

    With Q = grad * act''(pre) * T and S = grad * act'(pre): d_grad = act'(pre) * T,
    d_a = Q @ b^T + S @ v^T, d_b = a^T @ Q + u^T @ S, d_bias = sum(Q). Where act'' is zero
    everywhere, so is Q, whatever T is. `z` is there with the activation "none" alone. Nothing
    depends on a residual, so d_residual = 0.
    """

    BY_ROWS: ClassVar[tuple[str, ...]] = ("a", "grad", "pre", "d_a", "u", "d_grad", "z")

    u: ndarray | None
    v: ndarray | None
    w: ndarray | None
    z: ndarray | None
    d_grad: ndarray | None


@dataclass(slots=True, eq=False, repr=False)
class GemmTangentProblem(GemmProblem):
    """out as in the forward, and out_dot = act'(pre) * T."""

    u: ndarray | None
    v: ndarray | None
    w: ndarray | None
    z: ndarray | None
    guard: bool
    out_dot: ndarray


@dataclass(slots=True, eq=False, repr=False)
class GatedDoubleBackwardProblem:
    """The gradients of the gate's d_a and d_b, weighted with u and v; all of one shape.

    d_grad = u * b * act'(a) + v * act(a), d_a = u * grad * b * act''(a) + v * grad * act'(a),
    d_b = u * grad * act'(a). Where act'' is zero everywhere, so is its product.
    """

    shape: tuple[int, ...]
    dtype: _DType
    acc_dtype: _DType
    activation: Activation
    u: ndarray | None
    v: ndarray | None
    grad: ndarray
    a: ndarray
    b: ndarray
    guard: bool
    d_grad: ndarray | None
    d_a: ndarray | None
    d_b: ndarray | None
    result: GatedSecondGradients


@dataclass(slots=True, eq=False, repr=False)
class GatedTangentProblem:
    """out = act(a) * b, out_dot = u * b * act'(a) + v * act(a); all of one shape."""

    shape: tuple[int, ...]
    dtype: _DType
    acc_dtype: _DType
    activation: Activation
    a: ndarray
    b: ndarray
    u: ndarray | None
    v: ndarray | None
    guard: bool
    out: ndarray
    out_dot: ndarray
    result: Tangent


#: What u, v, w and z move along with, in their order.
_MOVED = ("a", "b", "bias", "residual")


class _Product:
    """The operands of a product and what moves along with them, checked and promoted.

    Parameters
    ----------
    operands : dict
        grad (in a double backward), a, b, bias, residual by name; the last two may be None.
    names, moved : tuple of str, tuple
        What moves along with a, b, bias and residual, and what to call each in a message.
    """

    def __init__(
        self, operands: dict[str, Any], names: tuple[str, ...], moved: tuple[Any, ...]
    ) -> None:
        x = self.given = as_operands(**{name: array_of(x) for name, x in operands.items()})
        tangents = {
            name: as_plain(name, array_of(t))
            for name, t in zip(names, moved, strict=True)
            if t is not None
        }
        self.dtype, self.acc_dtype = same_dtype({**x, **tangents})
        self.shape, self.a, self.b, self.bias = gemm_shape(x["a"], x["b"], x.get("bias"))
        self.residual = self._residual(x["residual"]) if "residual" in x else None
        self.grad: ndarray | None = None
        if "grad" in x:
            self.grad = self.shape.full(shaped(x["grad"], "grad", self.shape.visible))
        promote = (row_view, column_view, row_view, self._residual)
        found: list[_Maybe] = [None] * 4
        for at, (of, name) in enumerate(zip(_MOVED, names, strict=True)):
            if name not in tangents:
                continue
            if of not in x:
                raise ValueError(f"{name} must be None where {of} is None, got an array")
            found[at] = promote[at](shaped(tangents[name], name, x[of].shape, f"the shape of {of}"))
        self.u, self.v, self.w, self.z = found

    def _residual(self, x: ndarray) -> ndarray:
        return residual_view(self.shape, x)


def gemm_double_backward(
    u: Any,
    v: Any,
    w: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: Any,
    pre_activation: Any = None,
    needs: Any = GEMM_SECOND_NEEDS,
    guard: bool = True,
) -> GemmDoubleBackwardProblem:
    """The problem of `matmul_bias_activation_double_bwd`; see there for what is accepted."""
    operands = {"grad": grad, "a": a, "b": b, "bias": bias, "residual": None}
    moved = (u, v, w, None)
    return _double_backward(operands, moved, activation, pre_activation, needs, guard)


def gemm_residual_double_backward(
    u: Any,
    v: Any,
    w: Any,
    z: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    needs: Any = RESIDUAL_SECOND_NEEDS,
    guard: bool = True,
) -> GemmDoubleBackwardProblem:
    """The problem of `matmul_bias_residual_double_bwd`; see there for what is accepted."""
    required({"residual": residual})
    operands = {"grad": grad, "a": a, "b": b, "bias": bias, "residual": residual}
    return _double_backward(operands, (u, v, w, z), "none", None, needs, guard)


def _double_backward(
    operands: dict[str, Any],
    moved: tuple[Any, ...],
    activation: Any,
    pre: Any,
    needs: Any,
    guard: bool,
) -> GemmDoubleBackwardProblem:
    act = get_activation(activation)
    names = GEMM_SECOND_NEEDS if operands["residual"] is None else RESIDUAL_SECOND_NEEDS
    needs = check_needs(needs, names)
    x = _Product(operands, ("u", "v", "w", "z"), moved)
    shape, dtype = x.shape, x.dtype
    if pre is not None:
        pre = shape.full(saved_pre_activation(pre, shape.visible, dtype, x.acc_dtype))
    made = [
        empty(x.given[name].shape, dtype) if name in needs and name in x.given else None
        for name in names
    ]
    d_grad, d_a, d_b, d_bias = made[:4]
    gradients: Any = GemmSecondGradients(*made[:4])
    d_residual = None
    if x.residual is not None:
        gradients = GemmResidualSecondGradients(*made)
        d_residual = None if made[4] is None else residual_view(shape, made[4])
    assert x.grad is not None
    d_grad = None if d_grad is None else shape.full(d_grad)
    d_a, d_b, d_bias = row_view(d_a), column_view(d_b), row_view(d_bias)
    sizes: tuple[Any, ...] = (*shape[:4], dtype, x.acc_dtype, act)
    backward: tuple[Any, ...] = (x.a, x.b, x.bias, x.grad, pre, bool(guard))
    results: tuple[Any, ...] = (d_a, d_b, d_bias, d_residual, gradients, x.u, x.v, x.w, x.z, d_grad)
    p = GemmDoubleBackwardProblem(*sizes, *backward, *results)
    fold_rows(p, p.BY_ROWS)
    return p


def gemm_tangent(
    a: Any,
    b: Any,
    bias: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    activation: Any,
    guard: bool = True,
) -> GemmTangentProblem:
    """The problem of `matmul_bias_activation_jvp`; see there for what is accepted and raised."""
    act = get_activation(activation)
    operands = {"a": a, "b": b, "bias": bias, "residual": None}
    return _tangent(operands, (a_dot, b_dot, bias_dot, None), act, guard)


def gemm_residual_tangent(
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    residual_dot: Any,
) -> GemmTangentProblem:
    """The problem of `matmul_bias_residual_jvp`; see there for what is accepted and raised."""
    required({"residual": residual})
    operands = {"a": a, "b": b, "bias": bias, "residual": residual}
    moved = (a_dot, b_dot, bias_dot, residual_dot)
    return _tangent(operands, moved, get_activation("none"), True)


def _tangent(
    operands: dict[str, Any], moved: tuple[Any, ...], act: Activation, guard: bool
) -> GemmTangentProblem:
    x = _Product(operands, ("a_dot", "b_dot", "bias_dot", "residual_dot"), moved)
    shape = x.shape
    out, out_dot = (empty(shape.visible, x.dtype) for _ in range(2))
    sizes: tuple[Any, ...] = (*shape[:4], x.dtype, x.acc_dtype, act)
    result = Tangent(out, out_dot)
    forward: tuple[Any, ...] = (x.a, x.b, x.bias, x.residual, shape.full(out), None, result)
    moving: tuple[Any, ...] = (x.u, x.v, x.w, x.z, bool(guard), shape.full(out_dot))
    p = GemmTangentProblem(*sizes, *forward, *moving)
    fold_rows(p, ("a", "out", "out_dot", "residual", "u", "z"))
    return p


def gated_double_backward(
    u: Any,
    v: Any,
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    needs: Any = GATED_SECOND_NEEDS,
    guard: bool = True,
) -> GatedDoubleBackwardProblem:
    """The problem of `activation_mul_double_bwd`; see there for what is accepted and raised."""
    act, needs = get_activation(activation), check_needs(needs, GATED_SECOND_NEEDS)
    x, dtype, acc_dtype = _gate({"a": a, "b": b, "grad": grad}, {"u": u, "v": v})
    a, b, grad, u, v = (x.get(name) for name in ("a", "b", "grad", "u", "v"))
    d_grad, d_a, d_b = (
        empty(a.shape, dtype) if name in needs else None for name in GATED_SECOND_NEEDS
    )
    result = GatedSecondGradients(d_grad, d_a, d_b)
    return GatedDoubleBackwardProblem(
        a.shape, dtype, acc_dtype, act, u, v, grad, a, b, bool(guard), d_grad, d_a, d_b, result
    )


def gated_tangent(
    a: Any, b: Any, a_dot: Any, b_dot: Any, activation: Any, guard: bool = True
) -> GatedTangentProblem:
    """The problem of `activation_mul_jvp`; see there for what is accepted and raised."""
    act = get_activation(activation)
    x, dtype, acc_dtype = _gate({"a": a, "b": b}, {"a_dot": a_dot, "b_dot": b_dot})
    a, b, u, v = (x.get(name) for name in ("a", "b", "a_dot", "b_dot"))
    out, out_dot = empty(a.shape, dtype), empty(a.shape, dtype)
    result = Tangent(out, out_dot)
    return GatedTangentProblem(
        a.shape, dtype, acc_dtype, act, a, b, u, v, bool(guard), out, out_dot, result
    )


def _gate(
    known: dict[str, Any], moved: dict[str, Any]
) -> tuple[dict[str, Any], np.dtype[Any], np.dtype[Any]]:
    every = {**known, **{name: x for name, x in moved.items() if x is not None}}
    found = {name: as_plain(name, array_of(x)) for name, x in every.items()}
    dtype, acc_dtype = same_dtype(found)
    for name, x in found.items():
        shaped(x, name, found["a"].shape, "the shape of a")
    return found, dtype, acc_dtype
