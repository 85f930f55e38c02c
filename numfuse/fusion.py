"""Hop 1 of epilogues: a user's own formula at the end of a matrix product, or of none.

The conventions are those of :mod:`numfuse.functional`. An operand broadcasts to the result, as in
NumPy; a Python number is one of the arrays' dtype, whose value is not compiled. What is returned of
a number is a 0-d array in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numfuse.functional import BackendLike
from numfuse.fused_operations import EpilogueLike, arrays_of, numbers_of, operation
from numfuse.problem.forms import Form
from numfuse.problem.results import EpilogueGradients, Tangent, check_needs, entries

__all__ = [
    "elementwise",
    "elementwise_bwd",
    "matmul_epilogue",
    "matmul_epilogue_bwd",
    "matmul_epilogue_jvp",
]


def _right(b: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the right factors, and whether they came as a tuple."""
    if isinstance(b, (tuple, list)):
        if not 1 <= len(b) <= 3:
            raise ValueError(f"b must be an array or a tuple of 1 to 3 arrays, got {len(b)}")
        return tuple(b), True
    return (b,), False


def matmul_epilogue(
    a: Any,
    b: Any,
    epilogue: EpilogueLike,
    *operands: Any,
    return_pre_activation: bool = False,
    out: Any = None,
    backend: BackendLike = None,
) -> Any:
    r"""A formula of matrix products and operands, in one pass: ``epilogue(a @ b, *operands)``.

    .. math:: out = f(A B_0, A B_1, \ldots, x_0, x_1, \ldots)

    Parameters
    ----------
    a : (..., M, K) array
    b : (K, N) or (..., K, N) array, or a tuple of 1 to 3
        The right factors. `a` is read once for all of them.
    epilogue : callable, UserEpilogue or str
        A formula of scalars, written as for :func:`epilogue`: first one parameter for each right
        factor, then one for each operand. A plain function is recorded at its first call.
    *operands : arrays that broadcast to (..., M, N), or Python numbers
        Of the dtype of `a`. A number is a run-time value: another one compiles nothing.
    return_pre_activation : bool, default False
        Return ``(out, sums)`` too, `sums` the tuple of the products, in the accumulator's dtype.
    out : (..., M, N) array, optional
    backend : str or backend object, optional

    Returns
    -------
    out : (..., M, N) array
        Computed in the accumulator's dtype, and rounded once.

    Raises
    ------
    ValueError
        For a shape that does not fit, an overlapping `out`, or a number around the formula that has
        changed since it was recorded.
    TypeError
        For dtypes that differ, a formula that cannot be recorded, or another count of operands.
    BackendUnavailable
        See :func:`matmul_bias_activation`.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> nf.matmul_epilogue(np.eye(2), np.ones((2, 2)), lambda z, s: z * z + s, 3.0)
    array([[4., 4.],
           [4., 4.]])
    """
    factors, several = _right(b)
    name, keep = "matmul_epilogue", bool(return_pre_activation)
    op, f = operation(epilogue, name, "forward", len(factors), several, numbers_of(operands), keep)
    outs = (out, *[None] * len(factors)) if keep and out is not None else out
    found = op(arrays_of((a, *factors, *operands)), f, (), (), outs, backend)
    return (found[0], tuple(found[1:])) if keep else found


def matmul_epilogue_bwd(
    grad: Any,
    a: Any,
    b: Any,
    epilogue: EpilogueLike,
    *operands: Any,
    pre_activation: Any = None,
    needs: Iterable[str | int] | None = None,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> EpilogueGradients:
    r"""The gradients of :func:`matmul_epilogue`, derived from its formula.

    .. math::

        G_i = grad \cdot \partial f / \partial z_i, \qquad d_a = \textstyle\sum_i G_i B_i^T, \qquad
        d_{b_i} = A^T G_i, \qquad d_{x_j} = grad \cdot \partial f / \partial x_j

    Parameters
    ----------
    grad : (..., M, N) array
    a, b, epilogue, *operands
        As they were in the forward.
    pre_activation : tuple of (..., M, N) arrays, optional
        The sums that the forward returned; without them they are computed again.
    needs : iterable of "a", "b" and positions of operands, optional
        The gradients that are wanted (default: all). The others are None and cost nothing.
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0, as in
        :func:`matmul_bias_activation_bwd`.
    out : tuple (d_a, d_b, d_operands), optional
        Where to write, in the form of the result; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    EpilogueGradients
        A named tuple (d_a, d_b, d_operands), each gradient summed to its operand's shape: d_b a
        tuple where `b` is one, d_operands a tuple.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_epilogue`.
    """
    factors, several = _right(b)
    count, name = len(factors), "matmul_epilogue_bwd"
    op, f = operation(epilogue, name, "backward", count, several, numbers_of(operands))
    wanted = op.needs if needs is None else _needs(needs, op.form)
    outs = None
    if out is not None:
        d_a, d_b, d_operands = entries("out", out, 3)
        d_b = entries("d_b in out", d_b, count) if several else (d_b,)
        outs = d_a, *d_b, *entries("d_operands in out", d_operands, len(operands))
    saved = entries("pre_activation", pre_activation, count)
    given = arrays_of((grad, a, *factors, *operands))
    d_a, *rest = op((*given, *saved), f, (bool(guard), False), wanted, outs, backend)
    d_b = tuple(rest[:count])
    return EpilogueGradients(d_a, d_b if several else d_b[0], tuple(rest[count:]))


def _needs(needs: Iterable[str | int], form: Form) -> tuple[str, ...]:
    """Return the names here of the gradients that are wanted."""
    names: dict[Any, tuple[str, ...]] = {i: (x,) for i, x in enumerate(form.others)}
    if form.factors:
        names |= {"a": ("a",), "b": form.right}
    return tuple(x for need in check_needs(needs, tuple(names)) for x in names[need])


def matmul_epilogue_jvp(
    a: Any,
    b: Any,
    epilogue: EpilogueLike,
    operands: Sequence[Any],
    a_dot: Any,
    b_dot: Any,
    operand_dots: Sequence[Any] | None = None,
    *,
    guard: bool = True,
    backend: BackendLike = None,
) -> Tangent:
    r""":func:`matmul_epilogue` and its derivative along a direction: forward mode.

    .. math::

        \dot{out} = \textstyle\sum_i \frac{\partial f}{\partial z_i}
        (\dot A B_i + A \dot B_i) + \sum_j \frac{\partial f}{\partial x_j} \dot x_j

    Parameters
    ----------
    a, b, epilogue
        As in the forward.
    operands : tuple of arrays or numbers
    a_dot, b_dot : arrays of the shapes of `a` and `b`, or None
        The tangents; None is zero. `b_dot` is a tuple where `b` is one.
    operand_dots : tuple of arrays of the operands' shapes, numbers or None, optional
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    Tangent
        A named tuple (out, out_dot); `out` has the bits of the forward's.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_epilogue`.
    """
    factors, several = _right(b)
    if not isinstance(operands, (tuple, list)):
        raise TypeError(
            f"operands must be a tuple, one for each operand of the formula, got "
            f"{type(operands).__name__}"
        )
    count = len(factors)
    name = "matmul_epilogue_jvp"
    op, f = operation(epilogue, name, "tangent", count, several, numbers_of(operands))
    dots = entries("operand_dots", operand_dots, len(operands))
    b_dots = entries("b_dot", b_dot, count) if several else (b_dot,)
    given = arrays_of((a, *factors, *operands, a_dot, *b_dots, *dots))
    return Tangent(*op(given, f, (bool(guard),), (), None, backend))


def elementwise(
    epilogue: EpilogueLike, *operands: Any, out: Any = None, backend: BackendLike = None
) -> Any:
    r"""A formula of arrays, element by element, in one pass over memory.

    Parameters
    ----------
    epilogue : callable, UserEpilogue or str
        A formula of scalars, one for each operand, written as for :func:`epilogue`; it returns one
        value, or a tuple of several.
    *operands : arrays that broadcast to one shape, or Python numbers
        Of one dtype. A number is a run-time value: another one compiles nothing.
    out : array, or a tuple of arrays where the formula returns one, optional
        Each may be exactly one of the operands (in place); any other overlap is an error.
    backend : str or backend object, optional

    Returns
    -------
    array or tuple of arrays
        Of the operands' joint shape and dtype, computed in the accumulator's dtype and rounded
        once.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_epilogue`.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> x = np.array([1.0, 2.0])
    >>> nf.elementwise(lambda x, y, c: (x + c * y, x * y), x, x, 10.0)
    (array([11., 22.]), array([1., 4.]))
    """
    op, f = operation(epilogue, "elementwise", "forward", 0, False, numbers_of(operands))
    if f.several and not op.several:
        (out,) = entries("out", out, 1)
    found = op(arrays_of(operands), f, (), (), out, backend)
    return (found,) if f.several and not op.several else found


def elementwise_bwd(
    grads: Any,
    epilogue: EpilogueLike,
    *operands: Any,
    needs: Iterable[int] | None = None,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> tuple[Any, ...]:
    r"""The gradients of :func:`elementwise`, derived from its formula.

    Parameters
    ----------
    grads : array, or a tuple of arrays and None where the formula returns a tuple
        The gradients of the results, of their shape; None is zero.
    epilogue, *operands
        As they were in the forward.
    needs : iterable of positions of operands, optional
        The gradients that are wanted (default: all). The others are None and cost nothing.
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0.
    out : tuple, optional
        Where to write; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    tuple
        A gradient for each operand, summed to its shape; None where not needed.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_epilogue`.
    """
    op, f = operation(epilogue, "elementwise_bwd", "backward", 0, False, numbers_of(operands))
    given = entries("grads", grads, len(f.graphs)) if f.several else (grads,)
    wanted = op.needs if needs is None else _needs(needs, op.form)
    found = op(arrays_of((*given, *operands)), f, (bool(guard), False), wanted, out, backend)
    return tuple(found)
