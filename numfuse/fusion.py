"""Hop 1 of epilogues: a user's own formula at the end of a matrix product, or of none.

The conventions are those of :mod:`numfuse.functional`. An operand broadcasts to the result, as in
NumPy; a Python number is one of the arrays' dtype, whose value is not compiled. What is returned of
a number is a 0-d array in the accumulator's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends import Backend
from numfuse.definitions import UserEpilogue, get
from numfuse.epilogues import Epilogue
from numfuse.functional import BackendLike
from numfuse.operations import Operation
from numfuse.problem import fused
from numfuse.problem.fused import Form
from numfuse.problem.operands import array_of, as_plain
from numfuse.problem.results import EpilogueGradients, Tangent, check_needs
from numfuse.runtime.dispatch import adapter_for

__all__ = [
    "elementwise",
    "elementwise_bwd",
    "matmul_epilogue",
    "matmul_epilogue_bwd",
    "matmul_epilogue_jvp",
]

EpilogueLike = str | UserEpilogue | Callable[..., Any]
#: Python's numbers: each is an operand of the arrays' dtype.
NUMBERS = frozenset((int, float))
_FLAGS = {"forward": (), "tangent": ("guard",)}
#: By kind, the end of a function's name.
SUFFIXES = {
    "forward": "", "backward": "_bwd", "tangent": "_jvp", "double_backward": "_double_bwd"
}  # fmt: skip


class FusedOperation(Operation):
    """A call of an epilogue, of one form; `form` names its arrays.

    `whole` returns the formulas of the forward from what a call gives in the place of an
    activation. With `keep` a forward returns its sums too, in the operands' dtype if it is
    "stored". `known` is what makes an activation of a name.
    """

    def __init__(
        self, name: str, form: Form, whole: Callable[[Any], Epilogue], keep: bool | str = False,
        known: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.kind, self.form, self.whole, self.keep = name, "fused", form, whole, keep
        self.mark = name, form, keep
        own = [*form.factor_names, *form.others]
        grads = [f"g_{i}" for i in range(form.results)]
        back = "backward" in form.kind
        self.operands = own
        if form.kind == "tangent":
            self.operands = [*own, *(f"{x}_dot" for x in own)]
        elif back:
            double = form.kind == "double_backward"
            self.operands = [*(f"c_{x}" for x in own if double), *grads, *own, *form.sums]
        self.needs = (*(grads if form.kind == "double_backward" else ()), *own) if back else ()
        self.scalars = self.operands
        self.flags = list(_FLAGS.get(form.kind, ("guard", "sum_batch")))
        self.options = ["activation", "needs", "out", *self.flags]
        self.named, self.taken = tuple(self.options), [True] * len(self.options)
        made = [f"d_{x}" for x in self.needs]
        if not back:
            for i in range(form.results):
                made += [f"out_{i}", *([f"out_{i}_dot"] if form.kind == "tangent" else ())]
            made += [f"pre_{i}" for i in range(form.factors) if keep]
        self.results = tuple(made)
        self.fields = (*self.operands, *made)
        self.several = back or len(made) > 1
        self.in_place = not form.factors and form.kind == "forward"
        self.problem = self._problem
        self._kin = {(form.kind, keep): self}
        if known is not None:
            self.known = known

    def of(self, kind: str, keep: bool | str = False) -> FusedOperation:
        """Return the operation of another kind of call of the same formula."""
        found = self._kin.get((kind, keep))
        if found is None:
            name = self.name.removesuffix(SUFFIXES[self.form.kind]) + SUFFIXES[kind]
            form = self.form._replace(kind=kind)
            found = FusedOperation(name, form, self.whole, keep, self.known)
            found._kin = self._kin
            self._kin[kind, keep] = found
        return found

    def _problem(
        self, activation: Any, needs: Any = (), out: Any = None, guard: bool = True,
        sum_batch: bool = False, ghosts: bool = False,
        gathered: Callable[[ndarray], ndarray] | None = None, **given: Any,
    ) -> fused.FusedProblem:  # fmt: skip
        outs = entries("out", out, len(self.results)) if self.several else (out,)
        how = needs, outs, guard, self.keep, sum_batch, ghosts, gathered
        return fused.make(self.form, self.whole(activation), activation, given, *how)

    def other(
        self, operands: tuple[Any, ...], activation: Any, flags: tuple[bool | str, ...],
        needs: Any, out: Any, backend: str | Backend | None,
    ) -> Any:  # fmt: skip
        """Run a call on arrays that an adapter serves, or that NumPy has to copy or view first."""
        given = dict(zip(self.operands, operands, strict=True))
        arrays = {name: x for name, x in given.items() if type(x) not in NUMBERS}
        adapter = adapter_for(**arrays)
        if adapter is not None:
            run = getattr(adapter, "fused", None)
            if run is None:
                kind = adapter.__name__.rpartition(".")[2]
                raise TypeError(f"{self.name} must have NumPy arrays, got those of {kind}")
            return run(self, operands, activation, flags, needs, out, backend)
        for name, x in arrays.items():
            if x is not None:
                given[name] = as_plain(self.form.label(name), array_of(x))
        dtype = next((given[name].dtype for name, x in arrays.items() if x is not None), None)
        for name, x in given.items():
            if name not in arrays:
                given[name] = _number(x, np.dtype(np.float64) if dtype is None else dtype)
        return self(tuple(given.values()), activation, flags, needs, out, backend)


def operation(
    f: EpilogueLike, name: str, kind: str, factors: int, several: bool,
    numbers: tuple[bool, ...], keep: bool | str = False,
) -> tuple[FusedOperation, UserEpilogue]:  # fmt: skip
    """Return the operation of a call, and its epilogue; TypeError for another count of operands.

    `numbers` says which operands are Python numbers.
    """
    made = get(f)
    key = name, kind, factors, several, numbers, keep
    found: FusedOperation | None = made.made.get(key)
    if found is None:
        count = len(made.parameters)
        if count < factors:
            raise TypeError(
                f"the epilogue {made.name!r} must have a parameter for each of {factors} products, "
                f"got {count} ({', '.join(made.parameters)})"
            )
        if count != factors + len(numbers):
            sums, rest = made.parameters[:factors], made.parameters[factors:]
            took = f", {factors} for products ({', '.join(sums)}), then {len(rest)} operands"
            raise TypeError(
                f"the epilogue {made.name!r} takes {count} arguments{took if factors else ''} "
                f"({', '.join(rest)}), got {len(numbers)} operands"
            )
        if factors and made.several:
            raise TypeError(
                f"the epilogue {made.name!r} of a product must return one value, got a tuple of "
                f"{len(made.graphs)}: numfuse.elementwise takes such"
            )
        form = Form(kind, factors, several, made.parameters[factors:], numbers, len(made.graphs))
        found = FusedOperation(name, form, lambda f: f.over(factors), keep, known=lambda f: f)
        made.made[key] = found
    return found, made


def _numbers(operands: Sequence[Any]) -> tuple[bool, ...]:
    """Return which operands are Python numbers."""
    return tuple([type(x) in NUMBERS for x in operands])


def _arrays(given: Sequence[Any]) -> tuple[Any, ...]:
    """Return operands with Python numbers as arrays, where the first operand is NumPy's."""
    first = next((x for x in given if x is not None and type(x) not in NUMBERS), None)
    if type(first) is not ndarray:
        return tuple(given)
    dtype = first.dtype
    return tuple([_number(x, dtype) if type(x) in NUMBERS else x for x in given])


def _number(x: float, dtype: np.dtype[Any]) -> ndarray:
    """Return a Python number as an array, rounded as IEEE rounds it: silently."""
    if x == 0 or 1e-4 < abs(x) < 65504:  # (no dtype is left, whose narrowest is float16)
        return np.array(x, dtype)
    try:
        wide = float(x)
    except OverflowError:
        wide = math.inf if x > 0 else -math.inf
    with np.errstate(all="ignore"):
        return np.array(wide, dtype)


def entries(name: str, given: Any, count: int) -> tuple[Any, ...]:
    """Return what a call gives as a tuple of so many; None is so many of None."""
    if given is None:
        return (None,) * count
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of {count}, got {type(given).__name__}")
    if len(given) != count:
        raise ValueError(f"{name} must have {count} entries, got {len(given)}")
    return tuple(given)


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
    op, f = operation(epilogue, name, "forward", len(factors), several, _numbers(operands), keep)
    outs = (out, *[None] * len(factors)) if keep and out is not None else out
    found = op(_arrays((a, *factors, *operands)), f, (), (), outs, backend)
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
    op, f = operation(epilogue, name, "backward", count, several, _numbers(operands))
    wanted = _needs(needs, op.form)
    outs = None
    if out is not None:
        d_a, d_b, d_operands = entries("out", out, 3)
        d_b = entries("d_b in out", d_b, count) if several else (d_b,)
        outs = d_a, *d_b, *entries("d_operands in out", d_operands, len(operands))
    saved = entries("pre_activation", pre_activation, count)
    given = _arrays((grad, a, *factors, *operands))
    d_a, *rest = op((*given, *saved), f, (bool(guard), False), wanted, outs, backend)
    d_b = tuple(rest[:count])
    return EpilogueGradients(d_a, d_b if several else d_b[0], tuple(rest[count:]))


def _needs(needs: Iterable[str | int] | None, form: Form) -> tuple[str, ...]:
    """Return the names here of the gradients that are wanted."""
    if needs is None:
        return (*form.factor_names, *form.others)
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
    op, f = operation(epilogue, name, "tangent", count, several, _numbers(operands))
    dots = entries("operand_dots", operand_dots, len(operands))
    b_dots = entries("b_dot", b_dot, count) if several else (b_dot,)
    given = _arrays((a, *factors, *operands, a_dot, *b_dots, *dots))
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
    op, f = operation(epilogue, "elementwise", "forward", 0, False, _numbers(operands))
    if f.several and not op.several:
        (out,) = entries("out", out, 1)
    found = op(_arrays(operands), f, (), (), out, backend)
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
    op, f = operation(epilogue, "elementwise_bwd", "backward", 0, False, _numbers(operands))
    given = entries("grads", grads, len(f.graphs)) if f.several else (grads,)
    wanted = _needs(needs, op.form)
    found = op(_arrays((*given, *operands)), f, (bool(guard), False), wanted, out, backend)
    return tuple(found)
