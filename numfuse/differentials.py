"""Hop 1 beyond the first derivative: the double backward and forward mode, in public.

The conventions are those of :mod:`numfuse.functional`. A cotangent or a tangent has its operand's
shape and dtype; None stands for zero, and what depends on it alone is not computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numfuse.functional import ActivationLike, Array, BackendLike
from numfuse.operations import OPERATIONS
from numfuse.problem.results import (
    GATED_SECOND_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_SECOND_NEEDS,
    GatedSecondGradients,
    GemmResidualSecondGradients,
    GemmSecondGradients,
    Tangent,
)

__all__ = [
    "activation_mul_double_bwd",
    "activation_mul_jvp",
    "matmul_bias_activation_double_bwd",
    "matmul_bias_activation_jvp",
    "matmul_bias_residual_double_bwd",
    "matmul_bias_residual_jvp",
]


_LAYER_DOUBLE_BACKWARD = OPERATIONS["matmul_bias_activation_double_bwd"]
_RESIDUAL_DOUBLE_BACKWARD = OPERATIONS["matmul_bias_residual_double_bwd"]
_LAYER_TANGENT = OPERATIONS["matmul_bias_activation_jvp"]
_RESIDUAL_TANGENT = OPERATIONS["matmul_bias_residual_jvp"]
_GATE_DOUBLE_BACKWARD = OPERATIONS["activation_mul_double_bwd"]
_GATE_TANGENT = OPERATIONS["activation_mul_jvp"]


def matmul_bias_activation_double_bwd(
    u: Array | None,
    v: Array | None,
    w: Array | None,
    grad: Array,
    a: Array,
    b: Array,
    bias: Array | None = None,
    activation: ActivationLike = "none",
    *,
    needs: Iterable[str] = GEMM_SECOND_NEEDS,
    pre_activation: Any = None,
    guard: bool = True,
    backend: BackendLike = None,
) -> GemmSecondGradients:
    r"""The exact vector-Jacobian product of :func:`matmul_bias_activation_bwd`.

    With u, v, w the cotangents of its results d_a, d_b, d_bias:

    .. math::

        P &= A B + bias, \qquad T = u B + A v + w \\
        Q &= grad \cdot f''(P) \cdot T, \qquad S = grad \cdot f'(P) \\
        d_{grad} &= f'(P) \cdot T, \qquad d_a = Q B^T + S v^T \\
        d_b &= A^T Q + u^T S, \qquad d_{bias} = \textstyle\sum_m Q

    Parameters
    ----------
    u, v, w : arrays of the shapes of `a`, `b` and `bias`, or None
        The cotangents; None is zero. `w` is None where `bias` is.
    grad, a, b, bias, activation
        As they were in the backward.
    needs : iterable of str, default ("grad", "a", "b", "bias")
        The results that are wanted. The others are None and cost nothing.
    pre_activation : (..., M, N) array, optional
        What the forward returned with `return_pre_activation`, in its dtype or the operands'.
        Without it, a @ b + bias is computed again: seven products rather than six.
    guard : bool, default True
        Count a derivative, first or second, that is not finite as 0, as in the backward.
    backend : str or backend object, optional

    Returns
    -------
    GemmSecondGradients
        A named tuple (d_grad, d_a, d_b, d_bias), each of its operand's shape and dtype, summed over
        the axes along which the operand was broadcast; None where not needed, or where `bias` is.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_bwd`; also for a cotangent of another shape (ValueError).

    Notes
    -----
    relu''(x) = 0, also at 0. Where f'' is zero everywhere, Q is zero, whatever T is. A backward by
    ``sum_batch=True`` has the cotangent v of shape (K, N): give ``numpy.broadcast_to(v, b.shape)``.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> one = np.ones((1, 1))
    >>> r = nf.matmul_bias_activation_double_bwd(one, None, None, one, 2 * one, one, None, "none")
    >>> float(r.d_grad[0, 0]), float(r.d_a[0, 0]), float(r.d_b[0, 0])
    (1.0, 0.0, 1.0)
    """
    operands = u, v, w, grad, a, b, bias, pre_activation
    return _LAYER_DOUBLE_BACKWARD(operands, activation, (bool(guard),), needs, None, backend)


def matmul_bias_residual_double_bwd(
    u: Array | None,
    v: Array | None,
    w: Array | None,
    z: Array | None,
    grad: Array,
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array,
    *,
    needs: Iterable[str] = RESIDUAL_SECOND_NEEDS,
    guard: bool = True,
    backend: BackendLike = None,
) -> GemmResidualSecondGradients:
    r"""The exact vector-Jacobian product of :func:`matmul_bias_residual_bwd`.

    .. math::

        d_{grad} = u B + A v + w + z, \qquad d_a = grad \, v^T, \qquad d_b = u^T grad

    and d_bias = d_residual = 0, as the operation is linear in both.

    Parameters
    ----------
    u, v, w, z : arrays of the shapes of `a`, `b`, `bias` and `residual`, or None
        The cotangents of d_a, d_b, d_bias and d_residual; None is zero.
    grad, a, b, bias, residual
        As they were in the backward.
    needs : iterable of str, default ("grad", "a", "b", "bias", "residual")
    guard : bool, default True
        Without effect: the derivative is 1.
    backend : str or backend object, optional

    Returns
    -------
    GemmResidualSecondGradients
        A named tuple (d_grad, d_a, d_b, d_bias, d_residual); None where not needed.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_double_bwd`.
    """
    operands = u, v, w, z, grad, a, b, bias, residual
    return _RESIDUAL_DOUBLE_BACKWARD(operands, "none", (bool(guard),), needs, None, backend)


def matmul_bias_activation_jvp(
    a: Array,
    b: Array,
    bias: Array | None,
    a_dot: Array | None,
    b_dot: Array | None,
    bias_dot: Array | None,
    activation: ActivationLike = "none",
    *,
    guard: bool = True,
    backend: BackendLike = None,
) -> Tangent:
    r""":func:`matmul_bias_activation` and its derivative along a direction: forward mode.

    .. math::

        P = A B + bias, \qquad out = f(P), \qquad
        \dot{out} = f'(P) \cdot (\dot A B + A \dot B + \dot{bias})

    Parameters
    ----------
    a, b, bias
        As in the forward.
    a_dot, b_dot, bias_dot : arrays of the shapes of `a`, `b` and `bias`, or None
        The tangents; None is zero and spares its product. `bias_dot` is None where `bias` is.
    activation : str or Activation, default "none"
    guard : bool, default True
        Count a derivative that is not finite as 0, as in :func:`matmul_bias_activation_bwd`.
    backend : str or backend object, optional

    Returns
    -------
    Tangent
        A named tuple (out, out_dot) of the result's shape and the operands' dtype. `out` has the
        bits of the forward's.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation`; also for a tangent of another shape (ValueError).

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> x = np.array([[3.0]])
    >>> r = nf.matmul_bias_activation_jvp(x, x, None, np.ones_like(x), None, None)
    >>> float(r.out[0, 0]), float(r.out_dot[0, 0])
    (9.0, 3.0)
    """
    operands = a, b, bias, a_dot, b_dot, bias_dot
    return _LAYER_TANGENT(operands, activation, (bool(guard),), backend=backend)


def matmul_bias_residual_jvp(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array,
    a_dot: Array | None,
    b_dot: Array | None,
    bias_dot: Array | None,
    residual_dot: Array | None,
    *,
    backend: BackendLike = None,
) -> Tangent:
    r""":func:`matmul_bias_residual` and its derivative along a direction.

    .. math::

        out = A B + bias + residual, \qquad
        \dot{out} = \dot A B + A \dot B + \dot{bias} + \dot{residual}

    Parameters
    ----------
    a, b, bias, residual
        As in the forward.
    a_dot, b_dot, bias_dot, residual_dot : arrays of their shapes, or None
        The tangents; None is zero.
    backend : str or backend object, optional

    Returns
    -------
    Tangent
        A named tuple (out, out_dot).

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_jvp`.
    """
    operands = a, b, bias, residual, a_dot, b_dot, bias_dot, residual_dot
    return _RESIDUAL_TANGENT(operands, backend=backend)


def activation_mul_double_bwd(
    u: Array | None,
    v: Array | None,
    grad: Array,
    a: Array,
    b: Array,
    activation: ActivationLike,
    *,
    needs: Iterable[str] = GATED_SECOND_NEEDS,
    guard: bool = True,
    backend: BackendLike = None,
) -> GatedSecondGradients:
    r"""The exact vector-Jacobian product of :func:`activation_mul_bwd`.

    With u, v the cotangents of its results d_a, d_b:

    .. math::

        d_{grad} &= u \cdot b \cdot f'(a) + v \cdot f(a) \\
        d_a &= u \cdot grad \cdot b \cdot f''(a) + v \cdot grad \cdot f'(a) \\
        d_b &= u \cdot grad \cdot f'(a)

    Parameters
    ----------
    u, v : arrays of the operands' shape, or None
        The cotangents; None is zero.
    grad, a, b : arrays of one shape
    activation : str or Activation
    needs : iterable of str, default ("grad", "a", "b")
        The results that are wanted. The others are None and cost nothing.
    guard : bool, default True
        Count a derivative, first or second, that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    GatedSecondGradients
        A named tuple (d_grad, d_a, d_b) of the operands' shape and dtype; None where not needed.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`activation_mul_bwd`.
    """
    operands = u, v, grad, a, b
    return _GATE_DOUBLE_BACKWARD(operands, activation, (bool(guard),), needs, None, backend)


def activation_mul_jvp(
    a: Array,
    b: Array,
    a_dot: Array | None,
    b_dot: Array | None,
    activation: ActivationLike,
    *,
    guard: bool = True,
    backend: BackendLike = None,
) -> Tangent:
    r""":func:`activation_mul` and its derivative along a direction: forward mode.

    .. math::

        out = f(a) \cdot b, \qquad
        \dot{out} = \dot a \cdot b \cdot f'(a) + \dot b \cdot f(a)

    Parameters
    ----------
    a, b : arrays of one shape
    a_dot, b_dot : arrays of that shape, or None
        The tangents; None is zero.
    activation : str or Activation
    guard : bool, default True
        Count a derivative that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    Tangent
        A named tuple (out, out_dot) of the operands' shape and dtype. `out` has the bits of the
        forward's.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`activation_mul`.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> x = np.array([2.0])
    >>> nf.activation_mul_jvp(x, 3 * x, np.ones_like(x), None, "relu")
    Tangent(out=array([12.]), out_dot=array([6.]))
    """
    return _GATE_TANGENT((a, b, a_dot, b_dot), activation, (bool(guard),), backend=backend)
