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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy import empty, ndarray

from numfuse.activations import get as get_activation
from numfuse.problem.operands import (
    array_of,
    as_operands,
    output,
    required,
    same_dtype,
    saved_pre_activation,
    shaped,
)
from numfuse.problem.results import (
    GATED_NEEDS,
    GEMM_NEEDS,
    Fields,
    made_gradients,
)
from numfuse.problem.shapes import column_view, fold_rows, gemm_shape, residual_view, row_view

if TYPE_CHECKING:
    from numfuse.activations import Activation

__all__ = [
    "GateOperands",
    "GatedBackwardProblem",
    "GatedProblem",
    "GemmBackwardProblem",
    "GemmProblem",
    "Layer",
    "gate_operands",
    "gated",
    "gated_backward",
    "gemm",
    "gemm_backward",
    "gemm_residual",
]

_DType = np.dtype[Any]


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
    #: Where to write the pre-activation, in acc_dtype; None where it is not asked for.
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


@dataclass(slots=True, eq=False, repr=False)
class GateOperands:
    """act(a) * b; both of one shape, and so is all that a problem has beside them."""

    shape: tuple[int, ...]
    dtype: _DType
    acc_dtype: _DType
    activation: Activation
    a: ndarray
    b: ndarray


@dataclass(slots=True, eq=False, repr=False)
class GatedProblem(GateOperands):
    """out = act(a) * b"""

    #: Apart from the operands, or exactly one of them.
    out: ndarray
    result: Any


@dataclass(slots=True, eq=False, repr=False)
class GatedBackwardProblem(GateOperands):
    """d_a = grad * b * act'(a), d_b = grad * act(a)"""

    grad: ndarray
    guard: bool
    d_a: ndarray | None
    d_b: ndarray | None
    result: Any


class Layer:
    """The operands of a layer, and what moves along with them, checked and promoted.

    Parameters
    ----------
    activation : str or Activation
    moved : mapping
        {operand that moves along: the operand whose shape it has}
    operands
        Arrays by name; None where one is not there.

    Attributes
    ----------
    given : dict
        The operands as plain arrays, in their own shapes.
    head : dict
        The fields of `GemmOperands`.
    moved : dict
        What moves along, by its name; None where it is not there.
    """

    def __init__(self, activation: Any, moved: Mapping[str, str], **operands: Any) -> None:
        act = get_activation(activation)
        x = self.given = as_operands(**operands)
        self.dtype, self.acc_dtype = same_dtype(x)
        self.shape, a, b, bias = gemm_shape(x["a"], x["b"], x.get("bias"))
        self.head: Fields = dict(zip(("m", "n", "k", "batch"), self.shape, strict=False))
        self.head |= {"dtype": self.dtype, "acc_dtype": self.acc_dtype, "activation": act}
        self.head |= {"a": a, "b": b, "bias": bias}
        self.grad: Any = None
        if "grad" in x:
            self.grad = self.shape.full(shaped(x["grad"], "grad", self.shape.visible))
        self.residual = self.promoted("residual", x.get("residual"))
        for name, of in moved.items():
            if name in x and of not in x:
                raise ValueError(f"{name} must be None where {of} is None, got an array")
            if name in x:
                shaped(x[name], name, x[of].shape, f"the shape of {of}")
        self.moved: Fields = {name: self.promoted(of, x.get(name)) for name, of in moved.items()}

    def promoted(self, of: str, x: ndarray | None) -> ndarray | None:
        """Return an array of the shape of an operand as a problem has that."""
        if x is None or of == "grad":
            return None if x is None else self.shape.full(x)
        if of == "residual":
            return residual_view(self.shape, x)
        return column_view(x) if of == "b" else row_view(x)

    def saved(self, pre: Any) -> ndarray | None:
        """Return a saved pre-activation, checked and promoted."""
        if pre is None:
            return None
        found = saved_pre_activation(pre, self.shape.visible, self.dtype, self.acc_dtype)
        self.given["pre_activation"] = found
        return self.shape.full(found)

    def gradients(
        self, names: tuple[str, ...], needs: Any, out: Any = None, sum_batch: bool = False
    ) -> tuple[Fields, Any]:
        """Return the gradients of the operands of these names for a problem, and for the caller."""
        if "residual" in self.given:
            names = (*names, "residual")
        shapes = {name: self.given[name].shape for name in names if name in self.given}
        if sum_batch and self.given["b"].ndim > 2:
            shapes["b"] = self.given["b"].shape[-2:]
        made, result = made_gradients(names, shapes, needs, out, self.dtype, self.given)
        promoted = {f"d_{name}": self.promoted(name, made[f"d_{name}"]) for name in names}
        return {"d_residual": None, **promoted}, result


def gemm(
    a: Any,
    b: Any,
    bias: Any,
    activation: Any = "none",
    return_pre_activation: bool = False,
    out: Any = None,
    residual: Any = None,
) -> GemmProblem:
    """The problem of `matmul_bias_activation`; see there for what is accepted and raised."""
    x = Layer(activation, {}, a=a, b=b, bias=bias, residual=residual)
    target = output("out", out, x.shape.visible, x.dtype, x.given)
    result: Any = target if out is None else out
    pre = None
    if return_pre_activation:
        pre = empty(x.shape.visible, x.acc_dtype)
        result = result, pre
        pre = x.shape.full(pre)
    full = x.shape.full(target)
    p = GemmProblem(**x.head, residual=x.residual, out=full, pre=pre, result=result)
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
    x = Layer(activation, {}, grad=array_of(grad), a=a, b=b, bias=bias, residual=residual)
    pre = x.saved(pre_activation)
    made, result = x.gradients(GEMM_NEEDS, needs, out, sum_batch)
    given: Fields = {"grad": x.grad, "pre": pre, "guard": bool(guard)}
    p = GemmBackwardProblem(**x.head, **given, **made, result=result)
    fold_rows(p, (*p.BY_ROWS, "d_residual"))
    return p


def gate_operands(activation: Any, **operands: Any) -> tuple[dict[str, ndarray], Fields]:
    """Return the operands of a gate as plain arrays by name, and the fields of `GateOperands`."""
    act = get_activation(activation)
    x = as_operands(**operands)
    dtype, acc_dtype = same_dtype(x)
    shape = x["a"].shape
    for name, y in x.items():
        shaped(y, name, shape, "the shape of a")
    head: Fields = {"shape": shape, "dtype": dtype, "acc_dtype": acc_dtype, "activation": act}
    return x, head | {"a": x["a"], "b": x["b"]}


def gated(a: Any, b: Any, activation: Any, out: Any = None) -> GatedProblem:
    """The problem of `activation_mul`; see there for what is accepted and raised."""
    x, head = gate_operands(activation, a=a, b=b)
    target = output("out", out, head["shape"], head["dtype"], x, may_be=("a", "b"))
    return GatedProblem(**head, out=target, result=target if out is None else out)


def gated_backward(
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    needs: Any = None,
    guard: bool = True,
    out: Any = None,
) -> GatedBackwardProblem:
    """The problem of `activation_mul_bwd`; see there for what is accepted and raised."""
    x, head = gate_operands(activation, grad=grad, a=a, b=b)
    shapes = dict.fromkeys(GATED_NEEDS, head["shape"])
    made, result = made_gradients(GATED_NEEDS, shapes, needs, out, head["dtype"], x)
    given: Fields = {"grad": x["grad"], "guard": bool(guard)}
    return GatedBackwardProblem(**head, **given, **made, result=result)
