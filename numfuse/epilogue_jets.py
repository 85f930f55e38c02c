"""Hop 1 of jets of a user's own formula at the end of a matrix product.

The conventions are those of :mod:`numfuse.jets` and :mod:`numfuse.fusion`: operands come as a
tuple, and broadcast to the result; a Python number is one of the arrays' dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends import Backend
from numfuse.definitions import UserEpilogue, get
from numfuse.functional import BackendLike
from numfuse.fused_operations import (
    NUMBERS,
    EpilogueLike,
    arrays_of,
    form_of,
    number,
    numbers_of,
)
from numfuse.jets import JetOperation, weights_of
from numfuse.problem.results import EpilogueJetGradients, LayerJet, check_needs, entries
from numfuse.runtime.dispatch import adapter_for

__all__ = ["matmul_epilogue_jet", "matmul_epilogue_jet_bwd"]


class EpilogueJetOperation(JetOperation):
    """The jet of a user's formula of one product, of one form; see :class:`JetOperation`."""

    @staticmethod
    def known(f: Any) -> Any:
        """Return the epilogue, as the call has it."""
        return f

    def other(
        self, operands: tuple[Any, ...], activation: Any, flags: tuple[Any, ...],
        needs: Any, out: Any, backend: str | Backend | None,
    ) -> Any:  # fmt: skip
        """Run a call on arrays that an adapter serves, or that NumPy has to copy or view first."""
        given = dict(zip(self.operands, operands, strict=True))
        arrays = {x: y for x, y in given.items() if x != "weights" and type(y) not in NUMBERS}
        if adapter_for(**arrays) is None:
            dtypes = [y.dtype for y in arrays.values() if isinstance(y, (ndarray, np.generic))]
            dtype = dtypes[0] if dtypes else np.dtype(np.float64)
            operands = tuple([number(y, dtype) if type(y) in NUMBERS else y for y in operands])
        return super().other(operands, activation, flags, needs, out, backend)


def _operation(
    f: EpilogueLike, name: str, backward: bool, b: Any, operands: Any
) -> tuple[EpilogueJetOperation, UserEpilogue]:
    """Return the operation of a call, and its epilogue."""
    if isinstance(b, (tuple, list)):
        raise TypeError(
            f"b must be an array, got a {type(b).__name__}: {name} has one product, "
            f"matmul_epilogue up to three"
        )
    if not isinstance(operands, (tuple, list)):
        raise TypeError(
            f"operands must be a tuple, one for each operand of the formula, got "
            f"{type(operands).__name__}"
        )
    made = get(f)
    numbers = numbers_of(operands)
    key = name, numbers
    found: EpilogueJetOperation | None = made.made.get(key)
    if found is None:
        form = form_of(made, "jet", 1, False, numbers)
        found = made.made[key] = EpilogueJetOperation(name, backward, None, form)
    return found, made


def matmul_epilogue_jet(
    a: Any,
    b: Any,
    epilogue: EpilogueLike,
    operands: Sequence[Any],
    a_dot: Any,
    a_ddot: Any = None,
    *,
    weights: Any = None,
    keep: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> Any:
    r""":func:`matmul_epilogue` with first and second derivatives along directions.

    .. math::

        Z = A B, \qquad \dot Z_d = \dot A_d B, \qquad \ddot Z_s = \ddot A_s B, \qquad
        out = f(Z, x_0, x_1, \ldots)

    .. math::

        \dot{out}_d = \frac{\partial f}{\partial z} \dot Z_d, \qquad
        \ddot{out}_s = \frac{\partial f}{\partial z} \ddot Z_s +
        \frac{\partial^2 f}{\partial z^2} \textstyle\sum_d w_{sd} \dot Z_d^2

    The derivatives are derived from the recorded formula. Its operands are constants along the
    directions.

    Parameters
    ----------
    a : (..., M, K) array
    b : (K, N) or (..., K, N) array
    epilogue : callable, UserEpilogue or str
        A formula of the product and of operands, as for :func:`matmul_epilogue`.
    operands : tuple of arrays that broadcast to (..., M, N), or Python numbers
        Of the dtype of `a`; ``()`` where the formula has none.
    a_dot : (D, ..., M, K) array
        The derivatives of `a` along D directions; D may be 0.
    a_ddot : (S, ..., M, K) array, optional
        The second derivatives of `a`; None is zero, and is not computed with.
    weights : (S, D) array_like, optional
        Constants; default: the identity, S = D. A weight of 0 leaves its direction out.
    keep : bool, default False
        Return ``(result, kept)``: the sums, in the accumulator's dtype, for ``kept=`` of the
        backward.
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0.
    out : tuple (out, out_dot, out_ddot), optional
        Where to write; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    LayerJet
        A named tuple: out (..., M, N), out_dot (D, ..., M, N), out_ddot (S, ..., M, N), of the
        dtype of `a`, each rounded once.

    Raises
    ------
    ValueError
        For a shape that does not fit, an overlapping `out`, or a number around the formula that has
        changed since it was recorded.
    TypeError
        For dtypes that differ, weights that are no real numbers, several right factors, a formula
        that cannot be recorded, or another count of operands.
    BackendUnavailable
        See :func:`matmul_bias_activation`.

    Notes
    -----
    Where a formula has a kink (``numfuse.expr.where``, ``maximum``, ``abs``) its second derivative
    is that of the piece on which the sum lies: that of a relu counts as 0.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> x, along = np.array([[3.0]]), np.ones((1, 1, 1))
    >>> found = nf.matmul_epilogue_jet(x, np.eye(1), lambda z, s: s * z * z, (0.5,), along)
    >>> [float(y.item()) for y in found]
    [4.5, 3.0, 1.0]
    """
    op, f = _operation(epilogue, "matmul_epilogue_jet", False, b, operands)
    made, pattern = weights_of(weights, a, a_dot, a_ddot)
    given = arrays_of((a, b, *operands, a_dot, a_ddot))
    found = op((*given, made), f, (bool(guard), bool(keep), pattern, None), (), out, backend)
    return (LayerJet(*found[:3]), tuple(found[3:])) if keep else found


def matmul_epilogue_jet_bwd(
    grad: Any,
    grad_dot: Any,
    grad_ddot: Any,
    a: Any,
    b: Any,
    epilogue: EpilogueLike,
    operands: Sequence[Any],
    a_dot: Any,
    a_ddot: Any = None,
    *,
    weights: Any = None,
    kept: Any = None,
    needs: Iterable[str | int] | None = None,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> EpilogueJetGradients:
    r"""The gradients of :func:`matmul_epilogue_jet`, exact in every argument.

    With :math:`r_d = \sum_s w_{sd} \ddot g_s`, and f' and so on the derivatives by the sum,

    .. math::

        Q = g f' + f'' (\textstyle\sum_d \dot g_d \dot Z_d + \sum_s \ddot g_s \ddot Z_s)
        + f''' \textstyle\sum_d r_d \dot Z_d^2, \qquad
        \dot Q_d = \dot g_d f' + 2 f'' r_d \dot Z_d, \qquad \ddot Q_s = \ddot g_s f'

    .. math::

        d_{x_j} = \textstyle\sum \; g \frac{\partial f}{\partial x_j} +
        \frac{\partial f'}{\partial x_j}
        (\textstyle\sum_d \dot g_d \dot Z_d + \sum_s \ddot g_s \ddot Z_s)
        + \frac{\partial f''}{\partial x_j} \textstyle\sum_d r_d \dot Z_d^2

    over the axes along which x_j was broadcast; d_a, d_b and their likes as in
    :func:`matmul_bias_activation_jet_bwd`.

    Parameters
    ----------
    grad : (..., M, N) array, or None
    grad_dot : (D, ..., M, N) array, or None
    grad_ddot : (S, ..., M, N) array, or None
        The cotangents of the results; None is zero.
    a, b, epilogue, operands, a_dot, a_ddot, weights
        As they were in the forward.
    kept : optional
        What the forward returned with ``keep=True``; without it the product is made again.
    needs : iterable of "a", "b", positions of operands, "a_dot", "a_ddot", optional
        The gradients that are wanted (default: all). The others are None and cost nothing.
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0.
    out : tuple like the result, optional
        Where to write; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    EpilogueJetGradients
        A named tuple (d_a, d_b, d_operands, d_a_dot, d_a_ddot), each gradient of its operand's
        shape and dtype, d_operands a tuple; None where not needed. That of a Python number is a 0-d
        array in the accumulator's dtype.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_epilogue_jet`.
    """
    op, f = _operation(epilogue, "matmul_epilogue_jet_bwd", True, b, operands)
    made, pattern = weights_of(weights, a, a_dot, a_ddot)
    assert op.form is not None
    count, others, wanted = len(operands), op.form.others, op.needs
    if needs is not None:
        names: dict[Any, str] = {"a": "a", "b": "b", **dict(enumerate(others))}
        names |= {"a_dot": "a_dot", "a_ddot": "a_ddot"}
        wanted = tuple([names[x] for x in check_needs(needs, tuple(names))])
    outs = None
    if out is not None:
        d_a, d_b, d_operands, *rest = entries("out", out, 5)
        outs = d_a, d_b, *entries("d_operands in out", d_operands, count), *rest
    given = arrays_of((grad, grad_dot, grad_ddot, a, b, *operands, a_dot, a_ddot))
    saved = entries("kept", kept, 3)
    flags = bool(guard), False, pattern, None
    found = op((*given, made, *saved), f, flags, wanted, outs, backend)
    d_a, d_b, *rest = found
    return EpilogueJetGradients(d_a, d_b, tuple(rest[:count]), *rest[count:])
