"""Hop 1 of the gated layer: two products of one left factor, their gate, and all derivatives.

The conventions are those of :mod:`numfuse.functional` and :mod:`numfuse.differentials`. The two
weights may be views of one array (halves, or every other column): no copy of them is made for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from numfuse import epilogues
from numfuse.activations import get
from numfuse.functional import ActivationLike, BackendLike
from numfuse.fused_operations import SUFFIXES, FusedOperation
from numfuse.problem.forms import Form
from numfuse.problem.product import STORED
from numfuse.problem.results import (
    GatedLayerGradients,
    GatedLayerSecondGradients,
    Tangent,
    check_needs,
    entries,
)

__all__ = [
    "matmul_activation_mul",
    "matmul_activation_mul_bwd",
    "matmul_activation_mul_double_bwd",
    "matmul_activation_mul_jvp",
]

NEEDS = ("a", "b_gate", "b_up", "bias_gate", "bias_up")
SECOND_NEEDS = ("grad", *NEEDS)
#: The names of operands in a problem.
_NAMES = dict(zip(SECOND_NEEDS, ("g_0", "a", "b_0", "b_1", "x_0", "x_1"), strict=True))

#: In a problem, those that are wanted by default.
_EVERY = tuple(map(_NAMES.__getitem__, NEEDS))


@cache
def layer(kind: str, keep: bool | str = False) -> FusedOperation:
    """Return the operation of a kind of call; `keep` asks a forward for its pre-activations."""
    form = Form(kind, 2, True, ("bias_gate", "bias_up"), (False, False), biases=True)
    name = f"matmul_activation_mul{SUFFIXES[kind]}"
    return FusedOperation(name, form, lambda f: epilogues.gated_layer(f.curve), keep, get)


def _wanted(needs: Iterable[str], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in a problem of the gradients that are wanted."""
    return tuple([_NAMES[name] for name in check_needs(needs, names)])


def matmul_activation_mul(
    a: Any,
    b_gate: Any,
    b_up: Any,
    bias_gate: Any = None,
    bias_up: Any = None,
    activation: ActivationLike = "silu",
    *,
    return_pre_activation: bool = False,
    out: Any = None,
    backend: BackendLike = None,
) -> Any:
    r"""A gated layer in one operation: SwiGLU with "silu", GeGLU with "gelu".

    .. math:: out = f(A B_{gate} + bias_{gate}) \cdot (A B_{up} + bias_{up})

    Parameters
    ----------
    a : (..., M, K) array
        Read once for both products.
    b_gate, b_up : (K, N) or (..., K, N) arrays
    bias_gate, bias_up : arrays that broadcast to (..., M, N), as (N,), or None
    activation : str or Activation, default "silu"
    return_pre_activation : bool, default False
        Return ``(out, (pre_gate, pre_up))``, the arguments of the gate with their biases, in the
        dtype of `out`: half types round them once. Without it they are never stored.
    out : (..., M, N) array, optional
    backend : str or backend object, optional

    Returns
    -------
    out : (..., M, N) array
        Computed in the accumulator's dtype, and rounded once.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation`.

    Notes
    -----
    Shazeer 2020, arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> x = np.array([[1.0, -2.0]])
    >>> nf.matmul_activation_mul(x, np.eye(2), 3 * np.eye(2), activation="relu")
    array([[ 3., -0.]])
    """
    keep = STORED if return_pre_activation else False
    outs = (out, None, None) if keep and out is not None else out
    operands = a, b_gate, b_up, bias_gate, bias_up
    found = layer("forward", keep)(operands, activation, (), (), outs, backend)
    return (found[0], tuple(found[1:])) if keep else found


def matmul_activation_mul_bwd(
    grad: Any,
    a: Any,
    b_gate: Any,
    b_up: Any,
    bias_gate: Any = None,
    bias_up: Any = None,
    activation: ActivationLike = "silu",
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> GatedLayerGradients:
    r"""The gradients of :func:`matmul_activation_mul`.

    .. math::

        P &= A B_{gate} + bias_{gate}, \qquad U = A B_{up} + bias_{up} \\
        G_{gate} &= grad \cdot U \cdot f'(P), \qquad G_{up} = grad \cdot f(P) \\
        d_a &= G_{gate} B_{gate}^T + G_{up} B_{up}^T, \qquad d_{b_i} = A^T G_i, \qquad
        d_{bias_i} = \textstyle\sum_m G_i

    Parameters
    ----------
    grad : (..., M, N) array
    a, b_gate, b_up, bias_gate, bias_up, activation
        As they were in the forward.
    pre_activation : tuple (pre_gate, pre_up), optional
        What the forward returned; without it both products are made again.
    needs : iterable of str, default ("a", "b_gate", "b_up", "bias_gate", "bias_up")
        The gradients that are wanted. The others are None and cost nothing.
    sum_batch : bool, default False
        Return the gradients of batched weights summed over the batch, as (K, N).
    guard : bool, default True
        Count a derivative of the activation that is not finite as 0.
    out : tuple like the result, optional
        Where to write; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    GatedLayerGradients
        A named tuple (d_a, d_b_gate, d_b_up, d_bias_gate, d_bias_up), each of its operand's shape.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_bwd`.
    """
    saved = entries("pre_activation", pre_activation, 2)
    operands = grad, a, b_gate, b_up, bias_gate, bias_up, *saved
    flags = bool(guard), bool(sum_batch)
    wanted = _EVERY if needs is NEEDS else _wanted(needs, NEEDS)
    found = layer("backward")(operands, activation, flags, wanted, out, backend)
    return GatedLayerGradients(*found)


def matmul_activation_mul_double_bwd(
    c_a: Any,
    c_b_gate: Any,
    c_b_up: Any,
    c_bias_gate: Any,
    c_bias_up: Any,
    grad: Any,
    a: Any,
    b_gate: Any,
    b_up: Any,
    bias_gate: Any = None,
    bias_up: Any = None,
    activation: ActivationLike = "silu",
    *,
    needs: Iterable[str] = SECOND_NEEDS,
    pre_activation: Any = None,
    guard: bool = True,
    backend: BackendLike = None,
) -> GatedLayerSecondGradients:
    r"""The exact vector-Jacobian product of :func:`matmul_activation_mul_bwd`.

    With :math:`c_x` the cotangent of its result :math:`d_x`, P and U as there:

    .. math::

        T_i &= c_a B_i + A \, c_{b_i} + c_{bias_i} \\
        d_{grad} &= U f'(P) T_{gate} + f(P) T_{up} \\
        Q_{gate} &= grad \, (U f''(P) T_{gate} + f'(P) T_{up}), \qquad
        Q_{up} = grad \, f'(P) T_{gate} \\
        d_a &= \textstyle\sum_i Q_i B_i^T + G_i c_{b_i}^T, \qquad
        d_{b_i} = A^T Q_i + c_a^T G_i, \qquad d_{bias_i} = \textstyle\sum_m Q_i

    Parameters
    ----------
    c_a, c_b_gate, c_b_up, c_bias_gate, c_bias_up : arrays of the operands' shapes, or None
        The cotangents; None is zero.
    grad, a, b_gate, b_up, bias_gate, bias_up, activation
        As they were in the backward.
    needs : iterable of str, default ("grad", "a", "b_gate", "b_up", "bias_gate", "bias_up")
        The results that are wanted. The others are None and cost nothing.
    pre_activation : tuple (pre_gate, pre_up), optional
        What the forward returned; without it both products are made again.
    guard : bool, default True
        Count a derivative, first or second, that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    GatedLayerSecondGradients
        A named tuple (d_grad, d_a, d_b_gate, d_b_up, d_bias_gate, d_bias_up).

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_double_bwd`.
    """
    saved = entries("pre_activation", pre_activation, 2)
    cotangents = c_a, c_b_gate, c_b_up, c_bias_gate, c_bias_up
    operands = *cotangents, grad, a, b_gate, b_up, bias_gate, bias_up, *saved
    flags = bool(guard), False
    wanted = _wanted(needs, SECOND_NEEDS)
    found = layer("double_backward")(operands, activation, flags, wanted, None, backend)
    return GatedLayerSecondGradients(*found)


def matmul_activation_mul_jvp(
    a: Any,
    b_gate: Any,
    b_up: Any,
    bias_gate: Any,
    bias_up: Any,
    a_dot: Any,
    b_gate_dot: Any,
    b_up_dot: Any,
    bias_gate_dot: Any = None,
    bias_up_dot: Any = None,
    activation: ActivationLike = "silu",
    *,
    guard: bool = True,
    backend: BackendLike = None,
) -> Tangent:
    r""":func:`matmul_activation_mul` and its derivative along a direction: forward mode.

    .. math::

        \dot{out} = U f'(P) (\dot A B_{gate} + A \dot B_{gate} + \dot{bias}_{gate})
        + f(P) (\dot A B_{up} + A \dot B_{up} + \dot{bias}_{up})

    Parameters
    ----------
    a, b_gate, b_up, bias_gate, bias_up
        As in the forward.
    a_dot, b_gate_dot, b_up_dot, bias_gate_dot, bias_up_dot : arrays of their shapes, or None
        The tangents; None is zero.
    activation : str or Activation, default "silu"
    guard : bool, default True
        Count a derivative that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    Tangent
        A named tuple (out, out_dot); `out` has the bits of the forward's.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_jvp`.
    """
    dots = a_dot, b_gate_dot, b_up_dot, bias_gate_dot, bias_up_dot
    operands = a, b_gate, b_up, bias_gate, bias_up, *dots
    return Tangent(*layer("tangent")(operands, activation, (bool(guard),), (), None, backend))
