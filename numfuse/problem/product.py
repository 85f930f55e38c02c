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
    RESIDUAL_NEEDS,
    GatedGradients,
    GemmGradients,
    GemmResidualGradients,
    allocate,
    check_needs,
    check_outputs,
)
from numfuse.problem.shapes import column_view, fold_rows, gemm_shape, residual_view, row_view

if TYPE_CHECKING:
    from numfuse.activations import Activation

__all__ = [
    "GatedBackwardProblem",
    "GatedProblem",
    "GemmBackwardProblem",
    "GemmProblem",
    "gated",
    "gated_backward",
    "gemm",
    "gemm_backward",
    "gemm_residual",
    "gemm_residual_backward",
]

_DType = np.dtype[Any]


@dataclass(slots=True, eq=False, repr=False)
class GemmProblem:
    """out = act(a @ b + bias) (+ residual, then with the activation "none")."""

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
    residual: ndarray | None
    out: ndarray
    #: Where to write the pre-activation, in acc_dtype; None where it is not asked for.
    pre: ndarray | None
    #: What the caller gets: `out` in the visible shape, or (out, pre) in theirs.
    result: Any


@dataclass(slots=True, eq=False, repr=False)
class GemmBackwardProblem:
    """The gradients of act(a @ b + bias) (+ residual), given the gradient of the result.

    Every axis of `batch` that a gradient lacks, or has with length 1, is summed over: with
    sum_batch, `d_b` is simply (K, N) beside a batched `b`.
    """

    #: What has a row for each of M, but for a residual's gradient, which may have one for all.
    BY_ROWS: ClassVar[tuple[str, ...]] = ("a", "grad", "pre", "d_a")

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
class GatedProblem:
    """out = act(a) * b; all three of one shape."""

    shape: tuple[int, ...]
    dtype: _DType
    acc_dtype: _DType
    activation: Activation
    a: ndarray
    b: ndarray
    #: Apart from the operands, or exactly one of them.
    out: ndarray
    result: Any


@dataclass(slots=True, eq=False, repr=False)
class GatedBackwardProblem:
    """d_a = grad * b * act'(a), d_b = grad * act(a); all of one shape."""

    shape: tuple[int, ...]
    dtype: _DType
    acc_dtype: _DType
    activation: Activation
    grad: ndarray
    a: ndarray
    b: ndarray
    guard: bool
    d_a: ndarray | None
    d_b: ndarray | None
    result: GatedGradients


def gemm(
    a: Any,
    b: Any,
    bias: Any,
    activation: Any,
    return_pre_activation: bool = False,
    out: Any = None,
    residual: Any = None,
) -> GemmProblem:
    """The problem of `matmul_bias_activation`; see there for what is accepted and raised."""
    act = get_activation(activation)
    x = as_operands(a=a, b=b, bias=bias, residual=residual)
    dtype, acc_dtype = same_dtype(x)
    shape, a, b, bias = gemm_shape(x["a"], x["b"], x.get("bias"))
    full = residual_view(shape, x["residual"]) if "residual" in x else None
    target = output("out", out, shape.visible, dtype, x)
    result = target if out is None else out
    target, pre = shape.full(target), None
    if return_pre_activation:
        pre = empty(shape.visible, acc_dtype)
        result = result, pre
        pre = shape.full(pre)
    problem = GemmProblem(*shape[:4], dtype, acc_dtype, act, a, b, bias, full, target, pre, result)
    fold_rows(problem, ("a", "out", "pre", "residual"))
    return problem


def gemm_residual(a: Any, b: Any, bias: Any, residual: Any, out: Any = None) -> GemmProblem:
    """The problem of `matmul_bias_residual`; see there for what is accepted and raised."""
    required({"residual": residual})
    return gemm(a, b, bias, "none", False, out, residual)


def gemm_backward(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: Any,
    pre_activation: Any = None,
    needs: Any = GEMM_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
) -> GemmBackwardProblem:
    """The problem of `matmul_bias_activation_bwd`; see there for what is accepted and raised."""
    operands = (grad, a, b, bias, pre_activation)
    return _backward(operands, None, activation, needs, sum_batch, guard, out)


def gemm_residual_backward(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    pre_activation: Any = None,
    needs: Any = RESIDUAL_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
) -> GemmBackwardProblem:
    """The problem of `matmul_bias_residual_bwd`; see there for what is accepted and raised."""
    required({"residual": residual})
    operands = (grad, a, b, bias, pre_activation)
    return _backward(operands, residual, "none", needs, sum_batch, guard, out)


def _backward(
    operands: tuple[Any, ...],
    residual: Any,
    activation: Any,
    needs: Any,
    sum_batch: bool,
    guard: bool,
    out: Any,
) -> GemmBackwardProblem:
    act = get_activation(activation)
    names: tuple[str, ...] = GEMM_NEEDS if residual is None else RESIDUAL_NEEDS
    gradients = GemmGradients if residual is None else GemmResidualGradients
    needs = check_needs(needs, names)
    outs = None if out is None else check_outputs(out, names)
    guard = bool(guard)
    grad, a, b, bias, pre = operands
    x = as_operands(grad=array_of(grad), a=a, b=b, bias=bias, residual=residual)
    dtype, acc = same_dtype(x)
    shape, a, b, bias = gemm_shape(x["a"], x["b"], x.get("bias"))
    grad = shape.full(shaped(x["grad"], "grad", shape.visible))
    if residual is not None:
        residual_view(shape, x["residual"])
    of_each = {name: x[name].shape if name in x else None for name in names}
    if sum_batch and b.ndim > 2:
        of_each["b"] = b.shape[-2:]
    if pre is not None:
        x["pre_activation"] = saved_pre_activation(pre, shape.visible, dtype, acc)
        pre = shape.full(x["pre_activation"])
    arrays, own = allocate(outs, of_each, needs, dtype, x)
    d_a, d_b, d_bias = row_view(arrays[0]), column_view(arrays[1]), row_view(arrays[2])
    d_residual = None if len(arrays) < 4 else arrays[3]
    if d_residual is not None:
        d_residual = residual_view(shape, d_residual)
    sizes = *shape[:4], dtype, acc, act
    result = gradients(*own)
    problem = GemmBackwardProblem(
        *sizes, a, b, bias, grad, pre, guard, d_a, d_b, d_bias, d_residual, result
    )
    fold_rows(problem, (*problem.BY_ROWS, "d_residual"))
    return problem


def gated(a: Any, b: Any, activation: Any, out: Any = None) -> GatedProblem:
    """The problem of `activation_mul`; see there for what is accepted and raised."""
    act = get_activation(activation)
    x = as_operands(a=a, b=b)
    dtype, acc_dtype = same_dtype(x)
    a, b = x["a"], shaped(x["b"], "b", x["a"].shape, "the shape of a")
    plain_out = output("out", out, a.shape, dtype, x, may_be=("a", "b"))
    result = plain_out if out is None else out
    return GatedProblem(a.shape, dtype, acc_dtype, act, a, b, plain_out, result)


def gated_backward(
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    needs: Any = GATED_NEEDS,
    guard: bool = True,
    out: Any = None,
) -> GatedBackwardProblem:
    """The problem of `activation_mul_bwd`; see there for what is accepted and raised."""
    act = get_activation(activation)
    needs = check_needs(needs, GATED_NEEDS)
    outs = None if out is None else check_outputs(out, GATED_NEEDS)
    x = as_operands(grad=grad, a=a, b=b)
    dtype, acc_dtype = same_dtype(x)
    grad, a, b = x["grad"], x["a"], x["b"]
    shape = a.shape
    shaped(b, "b", shape, "the shape of a")
    shaped(grad, "grad", shape, "the shape of a")
    (d_a, d_b), own = allocate(outs, {"a": shape, "b": shape}, needs, dtype, x)
    result = GatedGradients(*own)
    return GatedBackwardProblem(
        shape, dtype, acc_dtype, act, grad, a, b, bool(guard), d_a, d_b, result
    )
