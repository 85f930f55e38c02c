"""Hop 2 beyond the first derivative: the problems of the double backward and of forward mode.

What :mod:`numfuse.problem.product` promises to a backend holds here too. `u`, `v`, `w` and `z` are
moved along with `a`, `b`, `bias` and a residual, and have their shapes: cotangents of d_a, d_b,
d_bias and d_residual in a double backward, tangents in forward mode. None is zero, and costs
nothing. Where grad or a result meets them there is one matrix of them all,

    T = u @ b + a @ v + w + z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy import empty, ndarray

from numfuse.activations import get as get_activation
from numfuse.problem import product as problem
from numfuse.problem.operands import ACCUMULATORS, as_plain, same_dtype
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
from numfuse.problem.shapes import GemmShape, gemm_shape, residual_view

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

_DType = np.dtype[Any]


@dataclass(slots=True, eq=False, repr=False)
class GemmDoubleBackwardProblem(GemmBackwardProblem):
    """The gradients of the backward's d_a, d_b and d_bias, weighted with u, v and w.

    With Q = grad * act''(pre) * T and S = grad * act'(pre): d_grad = act'(pre) * T,
    d_a = Q @ b^T + S @ v^T, d_b = a^T @ Q + u^T @ S, d_bias = sum(Q). Where act'' is zero
    everywhere, so is Q, whatever T is. `z` is there with the activation "none" alone.
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


class _Product:
    """The operands of a product and what moves along with them, checked and promoted."""

    def __init__(
        self,
        known: dict[str, Any],
        moved: dict[str, tuple[str, Any]],
        grad: tuple[Any] | None = None,
    ) -> None:
        """`known`: a, b, bias and maybe residual, by name; `moved`: for each of u, v, w, z the name
        of what it moves."""
        operands: dict[str, ndarray] = {}
        if grad is not None:
            operands["grad"] = as_plain("grad", _array(grad[0]))
        for name, x in known.items():
            if x is not None or name != "bias":
                operands[name] = as_plain(name, _array(x))
        self.given = operands
        everything = dict(operands)
        for name, x in moved.values():
            if x is not None:
                everything[name] = as_plain(name, _array(x))
        self.dtype, self.acc_dtype = same_dtype(everything)
        self.shape: GemmShape
        self.shape, self.a, self.b, self.bias = gemm_shape(
            operands["a"], operands["b"], operands.get("bias")
        )
        self.residual: ndarray | None = None
        if "residual" in operands:
            self.residual = residual_view(self.shape, operands["residual"])
        self.grad: ndarray | None = None
        if grad is not None:
            self.grad = self.shape.full(
                problem._shaped(operands["grad"], "grad", self.shape.visible)
            )
        promote = {"a": _row, "b": _column, "bias": _row, "residual": self._residual}
        self.moved: dict[str, ndarray | None] = {}
        for letter, (of, (name, x)) in zip(
            "uvwz", zip(("a", "b", "bias", "residual"), moved.values(), strict=True), strict=True
        ):
            self.moved[letter] = None
            if x is None:
                continue
            if of not in operands:
                raise ValueError(f"{name} must be None where {of} is None, got an array")
            wanted = operands[of].shape
            x = problem._shaped(everything[name], name, wanted, f"the shape of {of}")
            self.moved[letter] = promote[of](x)

    def _residual(self, x: ndarray) -> ndarray:
        return residual_view(self.shape, x)


def _array(x: Any) -> Any:
    # Arithmetic on 0-d arrays gives NumPy scalars.
    return np.asarray(x) if isinstance(x, np.generic) and x.dtype in ACCUMULATORS else x


def _row(x: ndarray) -> ndarray:
    return x[None, :] if x.ndim == 1 else x


def _column(x: ndarray) -> ndarray:
    return x[:, None] if x.ndim == 1 else x


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
    act, needs = get_activation(activation), check_needs(needs, GEMM_SECOND_NEEDS)
    moved = {"u": ("u", u), "v": ("v", v), "w": ("w", w), "z": ("z", None)}
    product = _Product({"a": a, "b": b, "bias": bias}, moved, (grad,))
    return _double_backward(product, act, pre_activation, needs, guard)


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
    needs = check_needs(needs, RESIDUAL_SECOND_NEEDS)
    moved = {"u": ("u", u), "v": ("v", v), "w": ("w", w), "z": ("z", z)}
    known = {"a": a, "b": b, "bias": bias, "residual": residual}
    product = _Product(known, moved, (grad,))
    return _double_backward(product, get_activation("none"), None, needs, guard)


def _double_backward(
    x: _Product, act: Activation, pre: Any, needs: tuple[str, ...], guard: bool
) -> GemmDoubleBackwardProblem:
    shape, dtype = x.shape, x.dtype
    if pre is not None:
        pre = shape.full(problem._pre_activation(pre, shape, dtype, x.acc_dtype))
    made: dict[str, ndarray | None] = dict.fromkeys(("grad", "a", "b", "bias"))
    for name in made:
        if name in needs and name in x.given:
            made[name] = empty(x.given[name].shape, dtype)
    d_grad, d_a, d_b, d_bias = made.values()
    gradients: Any = GemmSecondGradients(d_grad, d_a, d_b, d_bias)
    if x.residual is not None:
        # The result is linear in its residual: nothing depends on it.
        d_residual = None
        if "residual" in needs:
            d_residual = np.zeros(x.given["residual"].shape, dtype)
        gradients = GemmResidualSecondGradients(d_grad, d_a, d_b, d_bias, d_residual)
    assert x.grad is not None
    p = GemmDoubleBackwardProblem(
        m=shape.m,
        n=shape.n,
        k=shape.k,
        batch=shape.batch,
        dtype=dtype,
        acc_dtype=x.acc_dtype,
        activation=act,
        a=x.a,
        b=x.b,
        bias=x.bias,
        grad=x.grad,
        pre=pre,
        guard=bool(guard),
        d_a=None if d_a is None else _row(d_a),
        d_b=None if d_b is None else _column(d_b),
        d_bias=None if d_bias is None else _row(d_bias),
        result=gradients,
        d_grad=None if d_grad is None else shape.full(d_grad),
        **x.moved,
    )
    problem._fold(p, p.BY_ROWS)
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
    # The plain case on its own, for the same reason as in `problem.gemm`.
    plain = problem._plain_product(a, b, bias)
    if plain is not None:
        m, n, k, dtype, acc_dtype = plain
        if (
            (a_dot is None or problem._is_plain(a_dot, (m, k), dtype))
            and (b_dot is None or problem._is_plain(b_dot, (k, n), dtype))
            and (
                bias_dot is None or (bias is not None and problem._is_plain(bias_dot, (n,), dtype))
            )
        ):
            out, out_dot = empty((m, n), dtype), empty((m, n), dtype)
            return GemmTangentProblem(
                m,
                n,
                k,
                (),
                dtype,
                acc_dtype,
                act,
                a,
                b,
                None if bias is None else bias[None],
                None,
                out,
                None,
                Tangent(out, out_dot),
                a_dot,
                b_dot,
                None if bias_dot is None else bias_dot[None],
                None,
                bool(guard),
                out_dot,
            )
    moved = {
        "u": ("a_dot", a_dot),
        "v": ("b_dot", b_dot),
        "w": ("bias_dot", bias_dot),
        "z": ("residual_dot", None),
    }
    return _tangent(_Product({"a": a, "b": b, "bias": bias}, moved), act, guard)


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
    moved = {
        "u": ("a_dot", a_dot),
        "v": ("b_dot", b_dot),
        "w": ("bias_dot", bias_dot),
        "z": ("residual_dot", residual_dot),
    }
    known = {"a": a, "b": b, "bias": bias, "residual": residual}
    return _tangent(_Product(known, moved), get_activation("none"), True)


def _tangent(x: _Product, act: Activation, guard: bool) -> GemmTangentProblem:
    shape = x.shape
    out, out_dot = (empty(shape.visible, x.dtype) for _ in range(2))
    p = GemmTangentProblem(
        m=shape.m,
        n=shape.n,
        k=shape.k,
        batch=shape.batch,
        dtype=x.dtype,
        acc_dtype=x.acc_dtype,
        activation=act,
        a=x.a,
        b=x.b,
        bias=x.bias,
        residual=x.residual,
        out=shape.full(out),
        pre=None,
        result=Tangent(out, out_dot),
        guard=bool(guard),
        out_dot=shape.full(out_dot),
        **x.moved,
    )
    problem._fold(p, ("a", "out", "out_dot", "residual", "u", "z"))
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
    shape = x["a"].shape
    d_grad, d_a, d_b = (
        empty(shape, dtype) if name in needs else None for name in GATED_SECOND_NEEDS
    )
    return GatedDoubleBackwardProblem(
        shape,
        dtype,
        acc_dtype,
        act,
        x.get("u"),
        x.get("v"),
        x["grad"],
        x["a"],
        x["b"],
        bool(guard),
        d_grad,
        d_a,
        d_b,
        GatedSecondGradients(d_grad, d_a, d_b),
    )


def gated_tangent(
    a: Any, b: Any, a_dot: Any, b_dot: Any, activation: Any, guard: bool = True
) -> GatedTangentProblem:
    """The problem of `activation_mul_jvp`; see there for what is accepted and raised."""
    act = get_activation(activation)
    x, dtype, acc_dtype = _gate({"a": a, "b": b}, {"a_dot": a_dot, "b_dot": b_dot})
    out, out_dot = (empty(x["a"].shape, dtype) for _ in range(2))
    return GatedTangentProblem(
        out.shape,
        dtype,
        acc_dtype,
        act,
        x["a"],
        x["b"],
        x.get("a_dot"),
        x.get("b_dot"),
        bool(guard),
        out,
        out_dot,
        Tangent(out, out_dot),
    )


def _gate(
    known: dict[str, Any], moved: dict[str, Any]
) -> tuple[dict[str, ndarray], _DType, _DType]:
    every = {**known, **{name: x for name, x in moved.items() if x is not None}}
    found = {name: as_plain(name, _array(x)) for name, x in every.items()}
    dtype, acc_dtype = same_dtype(found)
    for name, x in found.items():
        problem._shaped(x, name, found["a"].shape, "the shape of a")
    return found, dtype, acc_dtype
