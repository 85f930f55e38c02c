"""Hop 1: the public functions and what they promise.

Each one hands its arguments to its row of `operations`, where a call is replayed or takes the hops
behind: the problem (hop 2: every check), which backend runs it (hop 3), and the backend (hop 4).

Conventions, for all of them
----------------------------
Arrays
    NumPy arrays in, NumPy arrays out, newly allocated and C-contiguous unless ``out=`` is given.
    Any strides are read in place: transposed, sliced, reversed and broadcast views give, bit for
    bit, what a contiguous copy gives. Inputs are never written.
dtypes
    float64, float32, float16 and ml_dtypes.bfloat16, one and the same for all operands. float64 is
    computed and accumulated in float64, the others in float32 and rounded once, at the store.
Shapes
    `a` (..., M, K), `b` (K, N) or (..., K, N), `bias` (N,) or (..., 1, N). Batch axes broadcast as
    in :func:`numpy.matmul`, a 1-D `a` or `b` is treated as there (the result of two is 0-d), and a
    gradient has its operand's shape: it is summed over the axes along which the operand was
    broadcast. M, N, K or a batch axis may be 0.
``out=``
    An array of the result's shape and dtype to write into; for a backward, a tuple like the result
    in which None entries are allocated. It may overlap neither an operand nor another output,
    judged by the bounds of the memory. A call that raises has not touched it.
``backend=``
    "cpu", "cuda", "webgpu", "reference" or a backend object; None takes that of
    :class:`numfuse.use_backend`, else the CPU. A backend asked for never falls back to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeVar, overload

from numfuse.activations import Activation
from numfuse.backends import Backend
from numfuse.operations import OPERATIONS
from numfuse.problem.results import (
    GATED_NEEDS,
    GEMM_NEEDS,
    RESIDUAL_NEEDS,
    GatedGradients,
    GemmGradients,
    GemmResidualGradients,
)

__all__ = [
    "activation_mul",
    "activation_mul_bwd",
    "gelu_mul",
    "gelu_mul_bwd",
    "matmul_bias_activation",
    "matmul_bias_activation_bwd",
    "matmul_bias_residual",
    "matmul_bias_residual_bwd",
    "relu_mul",
    "relu_mul_bwd",
    "sigmoid_mul",
    "sigmoid_mul_bwd",
    "silu_mul",
    "silu_mul_bwd",
]

Array = TypeVar("Array")
ActivationLike = str | Activation
BackendLike = str | Backend | None

# Bound methods: Python looks `__call__` of an object up in every call.
_LAYER = OPERATIONS["matmul_bias_activation"].__call__
_RESIDUAL = OPERATIONS["matmul_bias_residual"].__call__
_LAYER_BACKWARD = OPERATIONS["matmul_bias_activation_bwd"].__call__
_RESIDUAL_BACKWARD = OPERATIONS["matmul_bias_residual_bwd"].__call__
_GATE = OPERATIONS["activation_mul"].__call__
_GATE_BACKWARD = OPERATIONS["activation_mul_bwd"].__call__


@overload
def matmul_bias_activation(
    a: Array,
    b: Array,
    bias: Array | None = None,
    activation: ActivationLike = "none",
    *,
    return_pre_activation: Literal[False] = False,
    out: Array | None = None,
    backend: BackendLike = None,
) -> Array: ...
@overload
def matmul_bias_activation(
    a: Array,
    b: Array,
    bias: Array | None = None,
    activation: ActivationLike = "none",
    *,
    return_pre_activation: Literal[True],
    out: Array | None = None,
    backend: BackendLike = None,
) -> tuple[Array, Array]: ...
def matmul_bias_activation(
    a: Any,
    b: Any,
    bias: Any = None,
    activation: ActivationLike = "none",
    *,
    return_pre_activation: bool = False,
    out: Any = None,
    backend: BackendLike = None,
) -> Any:
    r"""A dense layer in one pass: activation(a @ b + bias).

    .. math:: out = f(A B + bias)

    Parameters
    ----------
    a : (..., M, K) or (K,) array
    b : (..., K, N), (K, N) or (K,) array
        A batch of `a` over one `b` is computed as a single product.
    bias : (N,) or (..., 1, N) array, optional
        The second form is a bias per member of a batch. (1,) where `b` is 1-D.
    activation : str or Activation, default "none"
        One of :func:`numfuse.activations`, by name or as the object.
    return_pre_activation : bool, default False
        Also return a @ b + bias, which spares the backward a product.
    out : array, optional
        Where to write the result.
    backend : str or backend object, optional

    Returns
    -------
    out : (..., M, N) array
        In the operands' dtype.
    pre : (..., M, N) array
        Only with `return_pre_activation`: float64 for float64 operands, float32 for all others (the
        accumulator, not rounded to a half type).

    Raises
    ------
    ValueError
        Shapes that do not fit, an unknown activation or backend, an `out` of the wrong shape, that
        is read-only or that overlaps an operand.
    TypeError
        Operands that are not plain arrays, an unsupported dtype or a mixture of dtypes.
    BackendUnavailable
        The backend cannot run here.

    Notes
    -----
    With u the unit roundoff of the accumulator, the pre-activation's error is at most
    gamma_(K+1) (\|A\| \|B\| + \|bias\|) componentwise, gamma_n = n u / (1 - n u); the activation
    multiplies it by at most max \|f'\| and adds a few u; a half type adds one rounding. The order
    of summation over K depends on dtype, K and N alone, never on the number of threads.

    A NaN or an infinity in row i of `a` stays in row i of the result.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> a = np.array([[1.0, -2.0]])
    >>> nf.matmul_bias_activation(a, np.eye(2), np.ones(2), "relu")
    array([[2., 0.]])
    """
    flags = (bool(return_pre_activation),)
    return _LAYER((a, b, bias), activation, flags, (), out, backend)


def matmul_bias_residual(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array,
    *,
    out: Array | None = None,
    backend: BackendLike = None,
) -> Array:
    r"""A dense layer that adds to a stream: a @ b + bias + residual.

    .. math:: out = A B + bias + residual

    Parameters
    ----------
    a : (..., M, K) or (K,) array
    b : (..., K, N), (K, N) or (K,) array
    bias : (N,) or (..., 1, N) array, or None
    residual : array
        Broadcasts to the result's shape, and does not enlarge it.
    out : array, optional
        Where to write the result. It may not overlap the residual either.
    backend : str or backend object, optional

    Returns
    -------
    out : (..., M, N) array
        In the operands' dtype, rounded once: the sum is made in the accumulator.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation`.
    """
    return _RESIDUAL((a, b, bias, residual), out=out, backend=backend)


def matmul_bias_activation_bwd(
    grad: Array,
    a: Array,
    b: Array,
    bias: Array | None = None,
    activation: ActivationLike = "none",
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = GEMM_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: tuple[Array | None, ...] | None = None,
    backend: BackendLike = None,
) -> GemmGradients:
    r"""The gradients of :func:`matmul_bias_activation`.

    .. math::

        P &= A B + bias, \qquad G = grad \cdot f'(P) \\
        d_a &= G B^T, \qquad d_b = A^T G, \qquad d_{bias} = \textstyle\sum_m G

    Parameters
    ----------
    grad : (..., M, N) array
        The gradient of the result: exactly its shape.
    a, b, bias, activation
        As they were in the forward.
    pre_activation : (..., M, N) array, optional
        What the forward returned with `return_pre_activation`, in its dtype or the operands'.
        Without it, a @ b + bias is computed again: three products rather than two.
    needs : iterable of str, default ("a", "b", "bias")
        The gradients that are wanted. The others are None and cost nothing.
    sum_batch : bool, default False
        With a batched `b`: return d_b summed over the batch, (K, N), without making the gradients
        of the members.
    guard : bool, default True
        Count a derivative that is not finite as 0. It zeroes the derivative only: a NaN or an
        infinity in an operand, or in grad, follows IEEE arithmetic. False lets NaN through.
    out : tuple (d_a, d_b, d_bias), optional
        Where to write; None entries are allocated. An entry that is not needed must be None.
    backend : str or backend object, optional

    Returns
    -------
    GemmGradients
        A named tuple (d_a, d_b, d_bias), each of its operand's shape and dtype, summed over the
        axes along which the operand was broadcast; None where not needed, or where `bias` is None.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation`; also for an unknown name in `needs` (ValueError), `needs`
        given as a str (TypeError) and an `out` that is not such a tuple.

    Notes
    -----
    relu'(0) = 0. Sums are made in the accumulator's dtype. Each result equals, bit for bit, what it
    is when the other gradients are asked for too.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> a, b = np.ones((1, 2)), np.eye(2)
    >>> nf.matmul_bias_activation_bwd(np.ones((1, 2)), a, b, activation="relu", needs=("a",))
    GemmGradients(d_a=array([[1., 1.]]), d_b=None, d_bias=None)
    """
    flags = bool(sum_batch), bool(guard)
    operands = grad, a, b, bias, pre_activation
    return _LAYER_BACKWARD(operands, activation, flags, needs, out, backend)


def matmul_bias_residual_bwd(
    grad: Array,
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array,
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = RESIDUAL_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: tuple[Array | None, ...] | None = None,
    backend: BackendLike = None,
) -> GemmResidualGradients:
    r"""The gradients of :func:`matmul_bias_residual`.

    .. math::

        d_a = grad\, B^T, \quad d_b = A^T grad, \quad d_{bias} = \textstyle\sum_m grad,
        \quad d_{residual} = grad

    Parameters
    ----------
    grad : (..., M, N) array
        The gradient of the result: exactly its shape.
    a, b, bias, residual
        As they were in the forward.
    pre_activation, guard
        Taken and checked as in :func:`matmul_bias_activation_bwd`, so that one call fits both. The
        derivative is 1, so neither changes anything.
    needs : iterable of str, default ("a", "b", "bias", "residual")
        The gradients that are wanted. The others are None and cost nothing.
    sum_batch : bool, default False
        With a batched `b`: return d_b summed over the batch, (K, N).
    out : tuple (d_a, d_b, d_bias, d_residual), optional
        Where to write; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    GemmResidualGradients
        A named tuple (d_a, d_b, d_bias, d_residual). `d_residual` is `grad` summed to the
        residual's shape in the accumulator's dtype, a new array also where that is a plain copy.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_bwd`.
    """
    flags = bool(sum_batch), bool(guard)
    operands = grad, a, b, bias, residual, pre_activation
    return _RESIDUAL_BACKWARD(operands, "none", flags, needs, out, backend)


def activation_mul(
    a: Array,
    b: Array,
    activation: ActivationLike,
    *,
    out: Array | None = None,
    backend: BackendLike = None,
) -> Array:
    r"""A gate in one pass: activation(a) * b.

    .. math:: out = f(a) \cdot b

    Parameters
    ----------
    a, b : arrays of one shape
    activation : str or Activation
        One of :func:`numfuse.activations`, by name or as the object.
    out : array, optional
        Where to write the result. Here alone it may be exactly `a` or `b` (in place); any other
        overlap is an error.
    backend : str or backend object, optional

    Returns
    -------
    out : array
        Of the operands' shape and dtype, computed in the accumulator's dtype and rounded once.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation`.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> nf.activation_mul(np.array([-1.0, 2.0]), np.array([3.0, 3.0]), "relu")
    array([0., 6.])
    """
    return _GATE((a, b), activation, (), (), out, backend)


def activation_mul_bwd(
    grad: Array,
    a: Array,
    b: Array,
    activation: ActivationLike,
    *,
    needs: Iterable[str] = GATED_NEEDS,
    guard: bool = True,
    out: tuple[Array | None, ...] | None = None,
    backend: BackendLike = None,
) -> GatedGradients:
    r"""The gradients of :func:`activation_mul`.

    .. math:: d_a = grad \cdot b \cdot f'(a), \qquad d_b = grad \cdot f(a)

    Parameters
    ----------
    grad, a, b : arrays of one shape
    activation : str or Activation
    needs : iterable of str, default ("a", "b")
        The gradients that are wanted. The others are None and cost nothing.
    guard : bool, default True
        Count a derivative that is not finite as 0, as in :func:`matmul_bias_activation_bwd`.
    out : tuple (d_a, d_b), optional
        Where to write; None entries are allocated. No entry may overlap an operand.
    backend : str or backend object, optional

    Returns
    -------
    GatedGradients
        A named tuple (d_a, d_b) of the operands' shape and dtype; None where not needed.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation_bwd`.
    """
    return _GATE_BACKWARD((grad, a, b), activation, (bool(guard),), needs, out, backend)


# --- gates by the names of their layers -----------------------------------------------------------
#: Activations whose gates have names of their own.
GATES = ("silu", "gelu", "relu", "sigmoid")


class _Gate(Protocol):
    def __call__(
        self, a: Array, b: Array, *, out: Array | None = None, backend: BackendLike = None
    ) -> Array: ...


class _GateBackward(Protocol):
    def __call__(
        self,
        grad: Array,
        a: Array,
        b: Array,
        *,
        needs: Iterable[str] = GATED_NEEDS,
        guard: bool = True,
        out: tuple[Array | None, ...] | None = None,
        backend: BackendLike = None,
    ) -> GatedGradients: ...


def _gate(activation: str, what: str) -> tuple[_Gate, _GateBackward]:
    """Return the gate of one activation, and its backward."""

    def forward(
        a: Array, b: Array, *, out: Array | None = None, backend: BackendLike = None
    ) -> Array:
        return _GATE((a, b), activation, (), (), out, backend)

    def backward(
        grad: Array,
        a: Array,
        b: Array,
        *,
        needs: Iterable[str] = GATED_NEEDS,
        guard: bool = True,
        out: tuple[Array | None, ...] | None = None,
        backend: BackendLike = None,
    ) -> GatedGradients:
        return _GATE_BACKWARD((grad, a, b), activation, (bool(guard),), needs, out, backend)

    name = f"{activation}_mul"
    forward.__name__ = forward.__qualname__ = name
    forward.__doc__ = f'{what}: :func:`activation_mul` with "{activation}".'
    backward.__name__ = backward.__qualname__ = f"{name}_bwd"
    backward.__doc__ = (
        f'The gradients of :func:`{name}`: :func:`activation_mul_bwd` with "{activation}".'
    )
    return forward, backward


silu_mul, silu_mul_bwd = _gate("silu", "silu(a) * b, the gate of SwiGLU")
gelu_mul, gelu_mul_bwd = _gate("gelu", "gelu(a) * b (tanh form), the gate of GeGLU")
relu_mul, relu_mul_bwd = _gate("relu", "relu(a) * b, the gate of ReGLU")
sigmoid_mul, sigmoid_mul_bwd = _gate("sigmoid", "sigmoid(a) * b, the gated linear unit")
