"""Hop 1 of networks' values: a multilayer perceptron, its gradients, theirs, and its tangent.

Where a backend has whole networks, the value and its gradients are one call of it. Else, and for
what is beyond, the layers' own operations follow one another (:mod:`numfuse.chains`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from numfuse.backends import resolve
from numfuse.chains import NEEDS, SECOND_NEEDS, Chain, only
from numfuse.functional import ActivationLike, BackendLike
from numfuse.perceptron import Kept, rounded, store
from numfuse.problem.operands import array_of, as_plain, output, shaped
from numfuse.problem.results import (
    NetworkGradients,
    NetworkSecondGradients,
    Tangent,
    check_needs,
)

__all__ = ["mlp", "mlp_bwd", "mlp_double_bwd", "mlp_jvp"]


def mlp(
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any] | None,
    activation: ActivationLike | Sequence[ActivationLike] = "tanh",
    *,
    final: ActivationLike = "none",
    keep: bool = False,
    out: Any = None,
    backend: BackendLike = None,
) -> Any:
    """A multilayer perceptron, all of its layers in one call.

    Parameters
    ----------
    x : (..., M, d_0) array
    weights : sequence of (..., d_i, d_i+1) arrays
        Layer by layer; leading axes are a batch of networks, as in :func:`numpy.matmul`.
    biases : sequence of (d_i+1,) or (..., 1, d_i+1) arrays or None, or None
    activation : str or Activation, or a sequence of them, default "tanh"
        The hidden layers': one, or ``len(weights) - 1``.
    final : str or Activation, default "none"
        The activation of the last layer.
    keep : bool, default False
        Return ``(out, kept)``, for ``kept=`` of :func:`mlp_bwd`, which then makes nothing again
        that takes longer to make than to read.
    out : (..., M, d_n) array, optional
        Where to write.
    backend : str or backend object, optional

    Returns
    -------
    (..., M, d_n) array

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`matmul_bias_activation`, and for sequences of other lengths.

    Notes
    -----
    On the CPU a network whose layers are at most 256 wide is one launch, in which blocks of points
    pass all layers in the caches of a core. Else the layers are calls of
    :func:`matmul_bias_activation`: of NumPy's half types in float32, and rounded once; of other
    arrays in their own dtype.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> nf.mlp(np.ones((1, 2)), [np.ones((2, 3)), np.ones((3, 1))], None, "relu")
    array([[6.]])
    """
    call = Chain("mlp", x, weights, biases, activation, final, True, backend)
    net, kept = call.net, Kept([], []) if keep else None
    if net is None:
        made = call.run(kept, out)
        return (made, kept) if keep else made
    shape, others = net.shapes[0], dict(net.given)
    target = made = None if out is None else output("out", out, shape, net.dtype, others)
    whole = getattr(resolve(backend), "network_jet", None)
    if made is None or net.dtype != net.acc:
        made = np.empty(shape, net.acc)
    if whole is not None and whole(net, (made, *[np.empty(y, net.acc) for y in net.shapes[1:]])):
        kept = Kept()
    else:
        call.run(kept, made)
    if target is None:
        target = rounded(made, net.dtype)
    elif target is not made:
        store(target, made)
    target = target if out is None else out
    return (target, kept) if keep else target


def mlp_bwd(
    grad: Any,
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any] | None,
    activation: ActivationLike | Sequence[ActivationLike] = "tanh",
    *,
    final: ActivationLike = "none",
    needs: Iterable[str] = ("weights", "biases"),
    kept: Any = None,
    guard: bool = True,
    backend: BackendLike = None,
) -> NetworkGradients:
    """The gradients of :func:`mlp`, by its weights, biases and input.

    Parameters
    ----------
    grad : (..., M, d_n) array
        The cotangent of the result.
    x, weights, biases, activation, final
        As they were in the forward.
    needs : iterable of "x", "weights", "biases", default ("weights", "biases")
        The gradients that are wanted; the others are None.
    kept : optional
        What the forward returned with ``keep=True``; without it the forward is made again.
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    NetworkGradients
        A named tuple (d_x, d_weights, d_biases): d_x of the shape of x, the others tuples, with
        None for a bias that is None.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`mlp`.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> one = np.ones((1, 1))
    >>> found = nf.mlp_bwd(one, 3 * one, [one, 2 * one], None, "relu")
    >>> [float(d.item()) for d in found.d_weights]
    [6.0, 3.0]
    """
    wanted = check_needs(needs, NEEDS)
    call = Chain("mlp_bwd", x, weights, biases, activation, final, guard, backend)
    net = call.net
    if kept is not None and not kept.inputs:
        kept = None
    if net is not None:
        grad = call.cast("grad", shaped(as_plain("grad", array_of(grad)), "grad", net.shapes[0]))
        whole = getattr(resolve(backend), "network_jet_bwd", None) if kept is None else None
        found = None if whole is None else whole(net, (grad, None, None), wanted)
        if found is not None:
            d_x, pairs = found
            every = (d_x, *map(tuple, zip(*pairs, strict=True)))
            return NetworkGradients(*map(call.rounded, only(every, NEEDS, wanted)))
    if kept is None:
        call.run(kept := Kept([], []))
    return NetworkGradients(*map(call.rounded, call.back(grad, kept, wanted)))


def mlp_jvp(
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any] | None,
    x_dot: Any,
    weights_dot: Sequence[Any] | None,
    biases_dot: Sequence[Any] | None,
    activation: ActivationLike | Sequence[ActivationLike] = "tanh",
    *,
    final: ActivationLike = "none",
    guard: bool = True,
    backend: BackendLike = None,
) -> Tangent:
    """:func:`mlp`, and its derivative along tangents of its operands: forward mode.

    Parameters
    ----------
    x, weights, biases, activation, final
        As in :func:`mlp`.
    x_dot : array of the shape of x, or None
    weights_dot, biases_dot : sequence of arrays of the operands' shapes or None, or None
        The tangents; None is zero.
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    Tangent
        A named tuple (out, out_dot).

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`mlp`; also for a tangent of another shape (ValueError).

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> one = np.ones((1, 1))
    >>> nf.mlp_jvp(3 * one, [one, 2 * one], None, one, None, None, "relu")
    Tangent(out=array([[6.]]), out_dot=array([[2.]]))
    """
    call = Chain("mlp_jvp", x, weights, biases, activation, final, guard, backend)
    moved = call.group("weights_dot", weights_dot, 0), call.group("biases_dot", biases_dot, 1)
    *_, found = call.tangents(call.cast("x_dot", x_dot, call.x), *moved)
    return Tangent(*map(call.rounded, found))


def mlp_double_bwd(
    u: Any,
    v: Sequence[Any] | None,
    w: Sequence[Any] | None,
    grad: Any,
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any] | None,
    activation: ActivationLike | Sequence[ActivationLike] = "tanh",
    *,
    final: ActivationLike = "none",
    needs: Iterable[str] = SECOND_NEEDS,
    guard: bool = True,
    backend: BackendLike = None,
) -> NetworkSecondGradients:
    """The exact vector-Jacobian product of :func:`mlp_bwd`.

    Parameters
    ----------
    u : array of the shape of x, or None
        The cotangent of d_x; None is zero.
    v, w : sequence of arrays of the operands' shapes or None, or None
        The cotangents of d_weights and d_biases.
    grad, x, weights, biases, activation, final
        As they were in the backward.
    needs : iterable of str, default ("grad", "x", "weights", "biases")
        The results that are wanted; the others are None.
    guard : bool, default True
        Count a derivative, first or second, that is not finite as 0.
    backend : str or backend object, optional

    Returns
    -------
    NetworkSecondGradients
        A named tuple (d_grad, d_x, d_weights, d_biases), the last two tuples.

    Raises
    ------
    ValueError, TypeError, BackendUnavailable
        As :func:`mlp_bwd`; also for a cotangent of another shape (ValueError).

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> one = np.ones((1, 1))
    >>> found = nf.mlp_double_bwd(one, None, None, one, one, [3 * one], None)
    >>> float(found.d_grad.item()), float(found.d_weights[0].item())
    (3.0, 1.0)
    """
    chosen = check_needs(needs, SECOND_NEEDS)
    wanted = tuple(name for name in SECOND_NEEDS if name in chosen)
    call = Chain("mlp_double_bwd", x, weights, biases, activation, final, guard, backend)
    groups = call.group("v", v, 0), call.group("w", w, 1)
    if call.net is not None:
        grad = shaped(as_plain("grad", array_of(grad)), "grad", call.net.shapes[0])
        grad = call.cast("grad", grad)
    found = call.twice(call.cast("u", u, call.x), *groups, grad, wanted)
    return NetworkSecondGradients(*map(call.rounded, found))
