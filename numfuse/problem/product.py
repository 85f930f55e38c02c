"""Hop 2: the caller's arrays become a problem that a backend can run without asking anything.

Every check and every shape rule is applied here, before anything is computed and before any output
is touched. A backend trusts what it gets:

- every array is a plain, aligned numpy.ndarray of the storage dtype (a saved pre-activation may
  have the accumulator's), with any strides, zero and negative ones included;
- `a` is (..., M, K), `b` (..., K, N), `bias` (..., 1, N), `residual` (..., M or 1, N or 1), each
  with batch axes of its own that broadcast to `batch`; `out`, `pre`, `grad` are (*batch, M, N);
- outputs overlap neither an input nor one another (only the gated forward's `out` may be exactly
  `a` or `b`), and are never read before they are written;
- a batch over one shared `b` has been folded into M where that takes no copy.

An operand that is not needed, or not there, is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy import empty, generic, ndarray

from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.problem.operands import (
    array_of,
    checked,
    output,
    required,
    saved_pre_activation,
    shaped,
)
from numfuse.problem.results import GEMM_NEEDS, Fields, made_gradients
from numfuse.problem.shapes import fold_rows, gemm_shape, residual_view

_DType = np.dtype[Any]
#: A pre-activation that is asked for in the operands' dtype; adapters keep such for a backward.
STORED = "stored"


@dataclass(slots=True, eq=False, repr=False)
class GemmOperands:
    """act(a @ b + bias), and its sizes."""

    m: int
    n: int
    k: int
    batch: tuple[int, ...]
    dtype: _DType
    acc_dtype: _DType
    activation: Activation
    a: ndarray
    b: ndarray
    bias: ndarray | None


@dataclass(slots=True, eq=False, repr=False)
class GemmProblem(GemmOperands):
    """out = act(a @ b + bias) (+ residual, then with the activation "none")."""

    #: What has a row for each of M; a residual may have one for all.
    BY_ROWS: ClassVar[tuple[str, ...]] = ("a", "out", "pre", "residual")

    residual: ndarray | None
    out: ndarray
    #: Where to write the pre-activation, in acc_dtype or dtype; None where it is not asked for.
    pre: ndarray | None
    #: What the caller gets: `out` in the visible shape, or (out, pre) in theirs.
    result: Any


@dataclass(slots=True, eq=False, repr=False)
class GemmBackwardProblem(GemmOperands):
    """The gradients of act(a @ b + bias) (+ residual), given the gradient of the result.

    Every axis of `batch` that a gradient lacks, or has with length 1, is summed over: with
    sum_batch, `d_b` is simply (K, N) beside a batched `b`.
    """

    #: What has a row for each of M, but for a residual's gradient, which may have one for all.
    BY_ROWS: ClassVar[tuple[str, ...]] = ("a", "grad", "pre", "d_a")

    grad: ndarray
    #: The saved pre-activation, in acc_dtype or dtype; None: recompute it.
    pre: ndarray | None
    #: Whether a non-finite derivative counts as 0.
    guard: bool
    d_a: ndarray | None
    d_b: ndarray | None
    d_bias: ndarray | None
    #: A sum over grad alone: (..., M or 1, N or 1).
    d_residual: ndarray | None
    result: Any


class Layer:
    """The operands of a layer, and what moves along with them, checked and promoted.

    `moved` is {operand that moves along: the operand whose shape it has}. The attributes are
    `given`, the operands that are there as plain arrays in their own shapes; `head`, the fields of
    `GemmOperands`; `moved`, what moves along by its name, None where it is not there.
    """

    def __init__(self, activation: Any, moved: Mapping[str, str], **operands: Any) -> None:
        if type(activation) is not Activation:
            activation = get_activation(activation)
        x, self.dtype, self.acc_dtype = checked(operands)
        self.given = x
        self.shape, a, b, bias = gemm_shape(x["a"], x["b"], x.get("bias"))
        self.head: Fields = dict(zip(("m", "n", "k", "batch"), self.shape, strict=False))
        self.head |= {"dtype": self.dtype, "acc_dtype": self.acc_dtype, "activation": activation}
        self.head |= {"a": a, "b": b, "bias": bias}
        self.grad: Any = None
        if "grad" in x:
            if x["grad"].shape != self.shape.visible:
                shaped(x["grad"], "grad", self.shape.visible)
            self.grad = self.promoted("grad", x["grad"])
        self.residual = residual_view(self.shape, x["residual"]) if "residual" in x else None
        self.moved: Fields = dict.fromkeys(moved)
        for name, of in moved.items():
            if name in x and of not in x:
                raise ValueError(f"{name} must be None where {of} is None, got an array")
            if name in x:
                shaped(x[name], name, x[of].shape, f"the shape of {of}")
                self.moved[name] = self.promoted(of, x[name])

    def promoted(self, of: str, x: ndarray) -> ndarray:
        """Return an array of the shape of an operand as a problem has that."""
        if of == "residual":
            return residual_view(self.shape, x)
        if of == "grad":
            return x if self.shape.promote is None else x[self.shape.promote]
        return x if x.ndim > 1 else x[:, None] if of == "b" else x[None, :]

    def saved(self, pre: Any) -> ndarray:
        """Return a saved pre-activation, checked and promoted."""
        found = saved_pre_activation(pre, self.shape.visible, self.dtype, self.acc_dtype)
        self.given["pre_activation"] = found
        return self.promoted("grad", found)

    def gradients(
        self, names: tuple[str, ...], needs: Any, out: Any = None, sum_batch: bool = False
    ) -> tuple[Fields, Any]:
        """Return the gradients of the operands of these names for a problem, and for the caller."""
        if "residual" in self.given:
            names = (*names, "residual")
        shapes = {}
        for name in names:
            if name in self.given:
                shapes[name] = self.given[name].shape
        if sum_batch and self.given["b"].ndim > 2:
            shapes["b"] = self.given["b"].shape[-2:]
        made, result = made_gradients(names, shapes, needs, out, self.dtype, self.given)
        for name in names:
            x = made[f"d_{name}"]
            if x is not None and (x.ndim < 2 or name in ("grad", "residual")):
                made[f"d_{name}"] = self.promoted(name, x)
        made.setdefault("d_residual", None)
        return made, result


def gemm(
    a: Any,
    b: Any,
    bias: Any,
    activation: Any = "none",
    return_pre_activation: bool | str = False,
    out: Any = None,
    residual: Any = None,
) -> GemmProblem:
    """The problem of `matmul_bias_activation`; see there for what is accepted and raised."""
    x = Layer(activation, {}, a=a, b=b, bias=bias, residual=residual)
    visible, promote = x.shape.visible, x.shape.promote
    if out is None:
        result: Any = empty(visible, x.dtype)
        target = result
    else:
        result, target = out, output("out", out, visible, x.dtype, x.given)
    pre = None
    if return_pre_activation:
        pre = empty(visible, x.dtype if return_pre_activation == STORED else x.acc_dtype)
        result = result, pre
    if promote is not None:
        target, pre = target[promote], None if pre is None else pre[promote]
    p = GemmProblem(**x.head, residual=x.residual, out=target, pre=pre, result=result)
    if p.batch:
        fold_rows(p, p.BY_ROWS)
    return p


def gemm_residual(a: Any, b: Any, bias: Any, residual: Any, out: Any = None) -> GemmProblem:
    """The problem of `matmul_bias_residual`; see there for what is accepted and raised."""
    required({"residual": residual})
    return gemm(a, b, bias, out=out, residual=residual)


def gemm_backward(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: Any = "none",
    pre_activation: Any = None,
    needs: Any = None,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
    residual: Any = None,
) -> GemmBackwardProblem:
    """The problem of `matmul_bias_activation_bwd` or, with a residual, `matmul_bias_residual_bwd`.

    See there for what is accepted and raised.
    """
    if isinstance(grad, generic):
        grad = array_of(grad)
    x = Layer(activation, {}, grad=grad, a=a, b=b, bias=bias, residual=residual)
    pre = None if pre_activation is None else x.saved(pre_activation)
    made, result = x.gradients(GEMM_NEEDS, needs, out, sum_batch)
    given: Fields = {"grad": x.grad, "pre": pre, "guard": bool(guard)}
    p = GemmBackwardProblem(**x.head, **given, **made, result=result)
    if p.batch:
        fold_rows(p, (*p.BY_ROWS, "d_residual"))
    return p
