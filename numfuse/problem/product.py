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
from numpy import empty, may_share_memory, ndarray

from numfuse.activations import get as get_activation
from numfuse.problem.operands import ACCUMULATORS, as_plain, output, same_dtype
from numfuse.problem.results import (
    GATED_NEEDS,
    GEMM_NEEDS,
    RESIDUAL_NEEDS,
    GatedGradients,
    GemmGradients,
    GemmResidualGradients,
    ResidualGradient,
    allocate,
    check_needs,
    check_outputs,
)
from numfuse.problem.shapes import (
    GemmShape,
    fold,
    gemm_shape,
    merge_rows,
    residual_view,
    shares_weights,
)

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
#: Of each gradient; None where its operand is not there.
_Shapes = tuple[tuple[int, ...] | None, ...]


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
    """The gradients of act(a @ b + bias), given the gradient of the result.

    Every axis of `batch` that a gradient lacks, or has with length 1, is summed over: with
    sum_batch, `d_b` is simply (K, N) beside a batched `b`.
    """

    #: What has a row for each of M.
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
    #: Whether all three are known to be C-contiguous (it may be left unsaid).
    contiguous: bool
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
    #: Whether all are known to be C-contiguous (it may be left unsaid).
    contiguous: bool
    result: GatedGradients


def gemm(
    a: Any,
    b: Any,
    bias: Any,
    activation: Any,
    save_pre: bool = False,
    out: Any = None,
    residual: tuple[Any] | None = None,
) -> GemmProblem:
    """The problem of `matmul_bias_activation`; see there for what is accepted and raised.

    With (residual,) that of `matmul_bias_residual`.
    """
    act = get_activation(activation)
    # The plain case on its own: at 64 x 64 x 64 the arithmetic takes a few microseconds, and the
    # general path below would take as much again. It decides nothing that the general path decides
    # otherwise; whatever is not plain, errors included, goes there.
    plain = _plain_product(a, b, bias)
    if plain is not None:
        m, n, k, dtype, acc_dtype = plain
        full = None if residual is None else residual[0]
        if (residual is None or _is_plain(full, (m, n), dtype)) and (
            out is None or _plain_output(out, (m, n), dtype, (a, b, bias, full))
        ):
            if out is None:
                out = empty((m, n), dtype)
            pre = empty((m, n), acc_dtype) if save_pre else None
            return GemmProblem(
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
                full,
                out,
                pre,
                (out, pre) if save_pre else out,
            )
    return _general_gemm(a, b, bias, act, save_pre, out, residual)


def _plain_product(a: Any, b: Any, bias: Any) -> tuple[int, int, int, _DType, _DType] | None:
    """M, N, K, dtype and accumulator of a product that needs no conversion; None of another."""
    if type(a) is not ndarray or type(b) is not ndarray or a.ndim != 2 or b.ndim != 2:
        return None
    dtype = a.dtype
    acc_dtype = ACCUMULATORS.get(dtype)
    m, k = a.shape
    b_k, n = b.shape
    if (
        acc_dtype is not None
        and b.dtype is dtype
        and b_k == k
        and a.flags.aligned
        and b.flags.aligned
        and (bias is None or _is_plain(bias, (n,), dtype))
    ):
        return m, n, k, dtype, acc_dtype
    return None


def _is_plain(x: Any, shape: tuple[int, ...], dtype: _DType) -> bool:
    """Whether `x` needs no conversion to be an operand of this shape and dtype."""
    return type(x) is ndarray and x.dtype is dtype and x.shape == shape and x.flags.aligned


def _plain_output(
    out: Any, shape: tuple[int, ...], dtype: _DType, others: tuple[ndarray | None, ...]
) -> bool:
    """Whether `out` needs none of the longer checks of `operands.output`."""
    if type(out) is not ndarray or out.dtype is not dtype or out.shape != shape:
        return False
    if out.flags.num & _TARGET != _TARGET:
        return False
    return _is_apart(out, *others)


def gemm_residual(a: Any, b: Any, bias: Any, residual: Any, out: Any = None) -> GemmProblem:
    """The problem of `matmul_bias_residual`; see there for what is accepted and raised."""
    return gemm(a, b, bias, "none", False, out, (residual,))


def _general_gemm(
    a: Any,
    b: Any,
    bias: Any,
    act: Activation,
    save_pre: bool,
    out: Any,
    residual: tuple[Any] | None,
) -> GemmProblem:
    operands = {"a": as_plain("a", a), "b": as_plain("b", b)}
    if bias is not None:
        operands["bias"] = as_plain("bias", bias)
    if residual is not None:
        operands["residual"] = as_plain("residual", residual[0])
    dtype, acc_dtype = same_dtype(operands)
    shape, a, b, bias = gemm_shape(operands["a"], operands["b"], operands.get("bias"))
    full_residual = None if residual is None else residual_view(shape, operands["residual"])
    plain_out = output("out", out, shape.visible, dtype, operands)
    result = plain_out if out is None else out
    full_out = shape.full(plain_out)
    pre = None
    if save_pre:
        pre = empty(shape.visible, acc_dtype)
        result = result, pre
        pre = shape.full(pre)
    problem = GemmProblem(
        shape.m,
        shape.n,
        shape.k,
        shape.batch,
        dtype,
        acc_dtype,
        act,
        a,
        b,
        bias,
        full_residual,
        full_out,
        pre,
        result,
    )
    _fold(problem, ("a", "out", "pre", "residual"))
    return problem


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
    problem, _ = _backward(
        grad,
        a,
        b,
        bias,
        get_activation(activation),
        pre_activation,
        needs,
        sum_batch,
        guard,
        out,
        None,
    )
    return problem


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
) -> tuple[GemmBackwardProblem, ResidualGradient | None]:
    """The problem of `matmul_bias_residual_bwd`, and its residual's gradient if that is needed.

    The residual's gradient is a sum over grad alone, so it is no part of the backend's problem.
    """
    return _backward(
        grad,
        a,
        b,
        bias,
        get_activation("none"),
        pre_activation,
        needs,
        sum_batch,
        guard,
        out,
        (residual,),
    )


def _backward(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    act: Activation,
    pre: Any,
    needs: Any,
    sum_batch: bool,
    guard: bool,
    out: Any,
    residual: tuple[Any] | None,
) -> tuple[GemmBackwardProblem, ResidualGradient | None]:
    names: tuple[str, ...] = GEMM_NEEDS if residual is None else RESIDUAL_NEEDS
    needs = check_needs(needs, names)
    outs = check_outputs(out, names)
    # The plain case on its own, for the same reason as in gemm.
    plain = _plain_product(a, b, bias)
    if plain is not None:
        m, n, k, dtype, acc_dtype = plain
        if (
            _is_plain(grad, (m, n), dtype)
            and (pre is None or _is_plain(pre, (m, n), acc_dtype))
            and (residual is None or _is_plain(residual[0], (m, n), dtype))
        ):
            shapes: _Shapes = ((m, k), (k, n), None if bias is None else (n,))
            others: tuple[ndarray | None, ...] = (grad, a, b, bias, pre)
            if residual is not None:
                shapes, others = (*shapes, (m, n)), (*others, *residual)
            found: list[Any] | None
            if out is None and needs is names:
                found = [None if shape is None else empty(shape, dtype) for shape in shapes]
            else:
                found = _plain_gradients(names, shapes, needs, outs, dtype, others)
            if found is not None:
                d_a, d_b, d_bias = found[:3]
                gradients = GemmGradients if residual is None else GemmResidualGradients
                problem = GemmBackwardProblem(
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
                    grad,
                    pre,
                    bool(guard),
                    d_a,
                    d_b,
                    None if d_bias is None else d_bias[None],
                    gradients(*found),
                )
                if residual is None or found[3] is None:
                    return problem, None
                return problem, ResidualGradient(grad, found[3])
    return _general_backward(grad, a, b, bias, act, pre, needs, sum_batch, guard, outs, residual)


def _plain_gradients(
    names: tuple[str, ...],
    shapes: _Shapes,
    needs: tuple[str, ...],
    outs: tuple[Any, ...],
    dtype: _DType,
    others: tuple[ndarray | None, ...],
) -> list[Any] | None:
    """The arrays of `gradients.allocate`; None where an output needs its longer checks."""
    found: list[Any] = []
    for name, shape, given in zip(names, shapes, outs, strict=True):
        if shape is None or name not in needs:
            if given is not None:
                return None
            found.append(None)
        elif given is None:
            found.append(empty(shape, dtype))
        elif _plain_output(given, shape, dtype, others):
            found.append(given)
            others = (*others, given)
        else:
            return None
    return found


def _general_backward(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    act: Activation,
    pre: Any,
    needs: tuple[str, ...],
    sum_batch: bool,
    guard: bool,
    outs: tuple[Any, ...],
    residual: tuple[Any] | None,
) -> tuple[GemmBackwardProblem, ResidualGradient | None]:
    if isinstance(grad, np.generic) and grad.dtype in ACCUMULATORS:
        # Arithmetic on the 0-d result of 1-D @ 1-D gives NumPy scalars, not arrays.
        grad = np.asarray(grad)
    operands = {"grad": as_plain("grad", grad), "a": as_plain("a", a), "b": as_plain("b", b)}
    if bias is not None:
        operands["bias"] = as_plain("bias", bias)
    if residual is not None:
        operands["residual"] = as_plain("residual", residual[0])
    dtype, acc_dtype = same_dtype(operands)
    shape, full_a, full_b, full_bias = gemm_shape(
        operands["a"], operands["b"], operands.get("bias")
    )
    plain_grad = _shaped(operands["grad"], "grad", shape.visible)
    if residual is not None:
        residual_view(shape, operands["residual"])
    if pre is not None:
        pre = operands["pre_activation"] = _pre_activation(pre, shape, dtype, acc_dtype)

    shapes: dict[str, tuple[int, ...] | None] = {
        "a": operands["a"].shape,
        "b": full_b.shape[-2:] if sum_batch and full_b.ndim > 2 else operands["b"].shape,
        "bias": None if bias is None else operands["bias"].shape,
    }
    if residual is not None:
        shapes["residual"] = operands["residual"].shape
    grads, result = allocate(outs, shapes, needs, dtype, operands)

    d_a, d_b, d_bias = grads[:3]
    if d_a is not None and d_a.ndim == 1:
        d_a = d_a[None, :]
    if d_b is not None and d_b.ndim == 1:
        d_b = d_b[:, None]
    if d_bias is not None and d_bias.ndim == 1:
        d_bias = d_bias[None, :]
    gradients = GemmGradients if residual is None else GemmResidualGradients
    problem = GemmBackwardProblem(
        shape.m,
        shape.n,
        shape.k,
        shape.batch,
        dtype,
        acc_dtype,
        act,
        full_a,
        full_b,
        full_bias,
        shape.full(plain_grad),
        None if pre is None else shape.full(pre),
        bool(guard),
        d_a,
        d_b,
        d_bias,
        gradients(*result),
    )
    _fold(problem, problem.BY_ROWS)
    if residual is None or grads[3] is None:
        return problem, None
    return problem, ResidualGradient(plain_grad, grads[3])


def gated(a: Any, b: Any, activation: Any, out: Any = None) -> GatedProblem:
    """The problem of `activation_mul`; see there for what is accepted and raised."""
    act = get_activation(activation)
    # The plain case on its own, for the same reason as in gemm: 64 x 64 elements take 2 us.
    if type(a) is ndarray and a.flags.num & _SOURCE == _SOURCE:
        dtype, shape = a.dtype, a.shape
        acc_dtype = ACCUMULATORS.get(dtype)
        if acc_dtype is not None and _is_flat(b, shape, dtype, _SOURCE):
            if out is None:
                out = empty(shape, dtype)
                return GatedProblem(shape, dtype, acc_dtype, act, a, b, out, True, out)
            if _is_flat(out, shape, dtype, _TARGET) and (
                out is a or out is b or not (may_share_memory(out, a) or may_share_memory(out, b))
            ):
                return GatedProblem(shape, dtype, acc_dtype, act, a, b, out, True, out)
    operands = {"a": as_plain("a", a), "b": as_plain("b", b)}
    dtype, acc_dtype = same_dtype(operands)
    a, b = operands["a"], _shaped(operands["b"], "b", operands["a"].shape, "the shape of a")
    plain_out = output("out", out, a.shape, dtype, operands, may_be=("a", "b"))
    result = plain_out if out is None else out
    return GatedProblem(a.shape, dtype, acc_dtype, act, a, b, plain_out, False, result)


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
    outs = check_outputs(out, GATED_NEEDS)
    # The plain case on its own, for the same reason as in gemm.
    if type(a) is ndarray and a.flags.num & _SOURCE == _SOURCE and needs is GATED_NEEDS:
        dtype, shape = a.dtype, a.shape
        acc_dtype = ACCUMULATORS.get(dtype)
        if (
            acc_dtype is not None
            and _is_flat(b, shape, dtype, _SOURCE)
            and _is_flat(grad, shape, dtype, _SOURCE)
        ):
            d_a, d_b = outs
            fits = True
            if d_a is None:
                d_a = empty(shape, dtype)
            else:
                fits = _is_flat(d_a, shape, dtype, _TARGET) and _is_apart(d_a, grad, a, b)
            if d_b is None:
                d_b = empty(shape, dtype)
            elif fits:
                fits = _is_flat(d_b, shape, dtype, _TARGET) and _is_apart(d_b, grad, a, b, d_a)
            if fits:
                return GatedBackwardProblem(
                    shape,
                    dtype,
                    acc_dtype,
                    act,
                    grad,
                    a,
                    b,
                    bool(guard),
                    d_a,
                    d_b,
                    True,
                    GatedGradients(d_a, d_b),
                )
    operands = {"grad": as_plain("grad", grad), "a": as_plain("a", a), "b": as_plain("b", b)}
    dtype, acc_dtype = same_dtype(operands)
    grad, a, b = operands["grad"], operands["a"], operands["b"]
    _shaped(b, "b", a.shape, "the shape of a")
    _shaped(grad, "grad", a.shape, "the shape of a")
    (d_a, d_b), result = allocate(outs, {"a": a.shape, "b": a.shape}, needs, dtype, operands)
    return GatedBackwardProblem(
        a.shape,
        dtype,
        acc_dtype,
        act,
        grad,
        a,
        b,
        bool(guard),
        d_a,
        d_b,
        False,
        GatedGradients(*result),
    )


#: Bits of `ndarray.flags.num`, which is one look-up for what `flags` has names for.
_SOURCE = 0x0001 | 0x0100  # C-contiguous and aligned
_TARGET = _SOURCE | 0x0400  # and writable
_OWNER = 0x0004  # its memory is its own


def _is_flat(x: Any, shape: tuple[int, ...], dtype: _DType, flags: int) -> bool:
    """Whether `x` needs no conversion and none of the longer checks, and has these flags."""
    return (
        type(x) is ndarray
        and x.dtype is dtype
        and x.shape == shape
        and x.flags.num & flags == flags
    )


def _is_apart(x: ndarray, *others: ndarray | None) -> bool:
    """Whether `x` shares no memory with the others.  Two arrays that own theirs never do."""
    owner = x.flags.num & _OWNER
    for other in others:
        if other is None or (owner and other is not x and other.flags.num & _OWNER):
            continue
        if may_share_memory(x, other):
            return False
    return True


def _fold(problem: GemmProblem | GemmBackwardProblem, rows: tuple[str, ...]) -> None:
    """Fold the batch into M where one `b` and one `bias` serve all of it: one product, not many."""
    if not problem.batch or not shares_weights(problem):
        return
    # Neither b nor bias has a batch of its own, so a has all of it (less leading axes of length 1).
    views: dict[str, ndarray | None] = {}
    m = problem.m
    for length in problem.batch:
        m *= length
    for name in rows:
        x = getattr(problem, name)
        if x is None:
            continue
        if name in ("residual", "z") and x.size == x.shape[-1]:
            views[name] = x.reshape(1, x.shape[-1])  # one row for every row of the result
            continue
        merged = merge_rows(x)
        if merged is None or merged.shape[0] != m:
            return
        views[name] = merged
    fold(problem, views)


def _shaped(x: ndarray, name: str, shape: tuple[int, ...], what: str = "the result's shape") -> Any:
    if x.shape != shape:
        raise ValueError(f"{name} must have {what} {shape}, got {x.shape}")
    return x


def _pre_activation(pre: Any, shape: GemmShape, dtype: _DType, acc_dtype: _DType) -> ndarray:
    if isinstance(pre, np.generic) and pre.dtype in ACCUMULATORS:
        pre = np.asarray(pre)
    pre = as_plain("pre_activation", pre)
    if pre.dtype != acc_dtype and pre.dtype != dtype:
        wanted = f"{acc_dtype}" if acc_dtype == dtype else f"{acc_dtype} or {dtype}"
        raise TypeError(f"pre_activation must have dtype {wanted}, got {pre.dtype}")
    return _shaped(pre, "pre_activation", shape.visible)
