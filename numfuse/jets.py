"""Hop 1 of jets: derivatives of a layer's value by its inputs, and their exact backward.

The conventions are those of :mod:`numfuse.functional`. Directions and second derivatives come as a
leading axis; `weights` are constants on the host, which a call casts to the accumulator's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends import Backend, resolve
from numfuse.functional import ActivationLike, BackendLike
from numfuse.operations import Operation
from numfuse.problem import jets
from numfuse.problem.forms import Form
from numfuse.problem.operands import ACCUMULATORS
from numfuse.problem.results import LayerJet, LayerJetGradients, entries
from numfuse.runtime.dispatch import adapter_for

__all__ = ["matmul_bias_activation_jet", "matmul_bias_activation_jet_bwd"]

_KEPT = ["pre", "pre_dot", "pre_ddot"]
_FLAGS = ["guard", "keep", "pattern", "stack"]


#: Operations with weights of their own that are kept; a program has one or two.
_MOST_BOUND = 64


def _content(x: ndarray | None) -> Hashable:
    """Return what tells an array from others."""
    return None if x is None else (x.shape, x.dtype, x.tobytes())


class JetOperation(Operation):
    """A layer's jet, its forward or its backward; `weights` are NumPy's whatever the others are.

    `own` is what makes the operation with weights of its own (`bound`), which are no operand then.
    With a `form` it is the jet of a user's formula, whose operands are in the bias' place.
    """

    def __init__(
        self, name: str, backward: bool, own: tuple[ndarray | None] | None = None,
        form: Form | None = None,
    ) -> None:  # fmt: skip
        self.name, self.kind, self.backward, self.form = name, "jet", backward, form
        self.mark, self._own, self._bound = (name, form), own, dict[Any, JetOperation]()
        grads, others = (
            ["grad", "grad_dot", "grad_ddot"],
            ("bias",) if form is None else form.others,
        )
        points = ["a", "b", *others, "a_dot", "a_ddot", "weights"]
        self.operands = [*grads, *points, *_KEPT] if backward else points
        if own is not None:
            self.mark = name, form, _content(*own)
            self.operands = [x for x in self.operands if x != "weights"]
        self.needs = jets.needs_of(form) if backward else ()
        self.scalars = self.operands
        self.flags = _FLAGS
        self.options = ["activation", "needs", "out", *_FLAGS]
        self.named = ("activation", "needs", "out", *_FLAGS)
        self.taken = [True] * len(self.named)
        made = [f"d_{x}" for x in self.needs] or ["out", "out_dot", "out_ddot", *_KEPT]
        self.results, self.fields = tuple(made), (*self.operands, *made)
        self.several, self.in_place = True, False
        self.problem = self._problem

    def _problem(
        self, activation: Any, needs: Any, out: Any, guard: bool, keep: bool, pattern: bytes,
        stack: jets.Stack | None, **given: Any,
    ) -> jets.JetProblem:  # fmt: skip
        how = activation, needs, out, guard, keep, pattern, stack
        if self._own is not None:
            (given["weights"],) = self._own
        return jets.make(self.backward, given, *how, self._own is not None, self.form)

    def label(self, name: str) -> str:
        """Return what a message calls an array."""
        return jets.label_of(self.form, name)

    def bound(self, operands: tuple[Any, ...]) -> tuple[JetOperation, tuple[Any, ...]]:
        """Return the operation with the weights of a call as its own, and the other operands.

        It is for arrays of a device: where the weights are others, so is the program.
        """
        if self._own is not None:
            return self, operands
        at = self.operands.index("weights")
        key = _content(operands[at])
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            how = self.name, self.backward, (operands[at],), self.form
            found = self._bound[key] = type(self)(*how)
        return found, operands[:at] + operands[at + 1 :]

    def other(
        self, operands: tuple[Any, ...], activation: Any, flags: tuple[Any, ...],
        needs: Any, out: Any, backend: str | Backend | None,
    ) -> Any:  # fmt: skip
        """Run a call on arrays that an adapter serves, or that NumPy has to copy or view first."""
        given = dict(zip(self.operands, operands, strict=True))
        adapter = adapter_for(**{name: x for name, x in given.items() if name != "weights"})
        if adapter is None:
            return self._first(operands, self.known(activation), flags, needs, out, backend, None)
        run = getattr(adapter, "jet" if self.form is None else "epilogue_jet", None)
        if run is None:
            kind = adapter.__name__.rpartition(".")[2]
            raise TypeError(f"{self.name} must have NumPy arrays, got those of {kind}")
        return run(self, operands, activation, flags, needs, out, backend)

    def _first(self, *call: Any) -> Any:
        *_, backend, _ = call
        chosen = resolve(backend)
        if not hasattr(chosen, "jet"):
            raise ValueError(
                f"backend must have the operation 'jet', got {chosen.name!r} without it"
            )
        return super()._first(*call)


FORWARD = JetOperation("matmul_bias_activation_jet", False)
BACKWARD = JetOperation("matmul_bias_activation_jet_bwd", True)


def weights_of(
    weights: Any, a: Any, a_dot: Any, a_ddot: Any = None, name: str = "weights"
) -> tuple[ndarray | None, bytes]:
    """Return weights in the accumulator's dtype, and which of them are not zero.

    No weights are the identity, and need as many second derivatives as directions.
    """
    count = a_dot.shape[0] if getattr(a_dot, "ndim", 0) else 0
    if weights is None:
        moved = getattr(a_ddot, "shape", (count,))[:1]
        if moved != (count,):
            told = f"{count} directions and a_ddot {a_ddot.shape}"
            raise ValueError(f"{name} must be given unless a_ddot has one for each, got {told}")
        return None, _identity(count)
    dtype = getattr(a, "dtype", None)
    acc = ACCUMULATORS.get(dtype, np.dtype(np.float32)) if isinstance(dtype, np.dtype) else None
    made = np.asarray(weights)
    if made.dtype.kind not in "fiub" and made.dtype not in ACCUMULATORS:
        raise TypeError(f"{name} must be real numbers, got dtype {made.dtype}")
    made = np.ascontiguousarray(made, acc or np.float64)
    if made.ndim != 2 or made.shape[1] != count:
        raise ValueError(f"{name} must have shape (S, D) = (S, {count}), got {made.shape}")
    return made, (made != 0).tobytes()


@functools.cache
def _identity(count: int) -> bytes:
    return np.eye(count, dtype=bool).tobytes()


def matmul_bias_activation_jet(
    a: Any,
    b: Any,
    bias: Any,
    activation: ActivationLike,
    a_dot: Any,
    a_ddot: Any = None,
    *,
    weights: Any = None,
    keep: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> Any:
    r"""A dense layer with first and second derivatives along directions, in one operation.

    .. math::

        Z = A B + bias, \qquad \dot Z_d = \dot A_d B, \qquad \ddot Z_s = \ddot A_s B

    .. math::

        out = f(Z), \qquad \dot{out}_d = f'(Z) \dot Z_d, \qquad
        \ddot{out}_s = f'(Z) \ddot Z_s + f''(Z) \textstyle\sum_d w_{sd} \dot Z_d^2

    Layer after layer, from a_dot = unit vectors and a_ddot = 0 on, that is the value of a network,
    its derivatives by its inputs and weighted sums of its pure second derivatives. What B is
    multiplied with is one product: B is read once.

    Parameters
    ----------
    a : (..., M, K) array
    b : (K, N) or (..., K, N) array
    bias : (N,) or (..., 1, N) array, or None
    activation : str or Activation
    a_dot : (D, ..., M, K) array
        The derivatives of `a` along D directions; D may be 0.
    a_ddot : (S, ..., M, K) array, optional
        The second derivatives of `a`; None is zero, and is not computed with.
    weights : (S, D) array_like, optional
        Constants; default: the identity, S = D. A weight of 0 leaves its direction out.
    keep : bool, default False
        Return ``(result, kept)``: Z and its derivatives, in the accumulator's dtype, for
        ``kept=`` of the backward.
    guard : bool, default True
        Count a derivative of the activation that is not finite as 0.
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
        For a shape that does not fit, or an overlapping `out`.
    TypeError
        For dtypes that differ, or weights that are no real numbers.
    BackendUnavailable
        See :func:`matmul_bias_activation`.

    Notes
    -----
    The second derivative of relu counts as 0. On the CPU the rows of `a`, `a_dot` and `a_ddot` are
    brought together, block by block.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> x = np.zeros((1, 1))
    >>> found = nf.matmul_bias_activation_jet(x, np.eye(1), None, "softplus", np.ones((1, 1, 1)))
    >>> [float(y.item()) for y in (found.out_dot, found.out_ddot)]
    [0.5, 0.25]
    """
    made, pattern = weights_of(weights, a, a_dot, a_ddot)
    flags = bool(guard), bool(keep), pattern, None
    found = FORWARD((a, b, bias, a_dot, a_ddot, made), activation, flags, (), out, backend)
    return (LayerJet(*found[:3]), tuple(found[3:])) if keep else found


def matmul_bias_activation_jet_bwd(
    grad: Any,
    grad_dot: Any,
    grad_ddot: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: ActivationLike,
    a_dot: Any,
    a_ddot: Any = None,
    *,
    weights: Any = None,
    kept: Any = None,
    needs: Iterable[str] = jets.NEEDS,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> LayerJetGradients:
    r"""The gradients of :func:`matmul_bias_activation_jet`, exact in every argument.

    .. math::

        r_d = \textstyle\sum_s w_{sd} \ddot g_s, \qquad
        Q = g f' + f'' (\textstyle\sum_d \dot g_d \dot Z_d + \sum_s \ddot g_s \ddot Z_s)
        + f''' \textstyle\sum_d r_d \dot Z_d^2

    .. math::

        \dot Q_d = \dot g_d f' + 2 f'' r_d \dot Z_d, \qquad \ddot Q_s = \ddot g_s f'

    .. math::

        d_a = Q B^T, \quad d_{\dot a_d} = \dot Q_d B^T, \quad d_{\ddot a_s} = \ddot Q_s B^T, \quad
        d_b = A^T Q + \textstyle\sum_d \dot A_d^T \dot Q_d + \sum_s \ddot A_s^T \ddot Q_s, \quad
        d_{bias} = \textstyle\sum_m Q

    Parameters
    ----------
    grad : (..., M, N) array, or None
    grad_dot : (D, ..., M, N) array, or None
    grad_ddot : (S, ..., M, N) array, or None
        The cotangents of the results; None is zero.
    a, b, bias, activation, a_dot, a_ddot, weights
        As they were in the forward.
    kept : optional
        What the forward returned with ``keep=True``; without it the product is made again.
    needs : iterable of "a", "b", "bias", "a_dot", "a_ddot", optional
        The gradients that are wanted (default: all). The others are None and cost nothing.
    guard : bool, default True
        Count a derivative of the activation that is not finite as 0.
    out : tuple like the result, optional
        Where to write; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    LayerJetGradients
        A named tuple (d_a, d_b, d_bias, d_a_dot, d_a_ddot), each of its operand's shape and dtype;
        None where not needed, or where there is no operand.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_jet`.
    """
    made, pattern = weights_of(weights, a, a_dot, a_ddot)
    flags = bool(guard), False, pattern, None
    saved = entries("kept", kept, 3)
    operands = grad, grad_dot, grad_ddot, a, b, bias, a_dot, a_ddot, made, *saved
    gradients: LayerJetGradients = BACKWARD(operands, activation, flags, needs, out, backend)
    return gradients
