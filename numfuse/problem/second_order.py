"""Hop 2 beyond the first derivative: the problems of the double backward and of forward mode.

What :mod:`numfuse.problem.product` promises to a backend holds here too. `u`, `v`, `w` and `z` are
moved along with `a`, `b`, `bias` and a residual, and have their shapes: cotangents of d_a, d_b,
d_bias and d_residual in a double backward, tangents in forward mode. None is zero, and costs
nothing. Where grad or a result meets them there is one matrix of them all,

    T = u @ b + a @ v + w + z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy import empty, ndarray

from numfuse.problem.product import (
    GemmBackwardProblem,
    GemmProblem,
    Layer,
)
from numfuse.problem.results import (
    GEMM_SECOND_NEEDS,
    Fields,
    Tangent,
)
from numfuse.problem.shapes import fold_rows


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

    BY_ROWS: ClassVar[tuple[str, ...]] = ("a", "out", "out_dot", "residual", "u", "z")

    u: ndarray | None
    v: ndarray | None
    w: ndarray | None
    z: ndarray | None
    guard: bool
    out_dot: ndarray


def gemm_double_backward(
    u: Any,
    v: Any,
    w: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: Any = "none",
    pre_activation: Any = None,
    needs: Any = None,
    guard: bool = True,
    residual: Any = None,
    z: Any = None,
) -> GemmDoubleBackwardProblem:
    """The problem of `matmul_bias_activation_double_bwd` or, with a residual, of that one's.

    See there for what is accepted and raised.
    """
    operands = {"grad": grad, "a": a, "b": b, "bias": bias, "residual": residual}
    moved = {"u": "a", "v": "b", "w": "bias", "z": "residual"}
    x = Layer(activation, moved, **operands, u=u, v=v, w=w, z=z)
    pre = None if pre_activation is None else x.saved(pre_activation)
    made, result = x.gradients(GEMM_SECOND_NEEDS, needs)
    given: Fields = {"grad": x.grad, "pre": pre, "guard": bool(guard)}
    p = GemmDoubleBackwardProblem(**x.head, **given, **made, result=result, **x.moved)
    if p.batch:
        fold_rows(p, p.BY_ROWS)
    return p


def gemm_tangent(
    a: Any,
    b: Any,
    bias: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    activation: Any = "none",
    guard: bool = True,
    residual: Any = None,
    residual_dot: Any = None,
) -> GemmTangentProblem:
    """The problem of `matmul_bias_activation_jvp` or, with a residual, `matmul_bias_residual_jvp`.

    See there for what is accepted and raised.
    """
    operands = {"a": a, "b": b, "bias": bias, "residual": residual}
    tangents = {"a_dot": a_dot, "b_dot": b_dot, "bias_dot": bias_dot, "residual_dot": residual_dot}
    x = Layer(activation, dict(zip(tangents, operands, strict=True)), **operands, **tangents)
    visible, promote = x.shape.visible, x.shape.promote
    made = Tangent(empty(visible, x.dtype), empty(visible, x.dtype))
    out, out_dot = made if promote is None else (made.out[promote], made.out_dot[promote])
    given: Fields = dict(zip("uvwz", x.moved.values(), strict=True))
    given |= {"residual": x.residual, "pre": None, "guard": bool(guard)}
    p = GemmTangentProblem(**x.head, **given, out=out, out_dot=out_dot, result=made)
    if p.batch:
        fold_rows(p, p.BY_ROWS)
    return p
