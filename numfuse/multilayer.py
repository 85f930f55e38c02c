"""Hop 1 of networks' values: a multilayer perceptron, its gradients, theirs, and its tangent.

Where a backend has whole networks, each is one call of it. Else the layers' own operations follow
one another (:mod:`numfuse.chains`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from numfuse.backends import resolve
from numfuse.chains import NEEDS, SECOND_NEEDS, Chain
from numfuse.functional import ActivationLike, BackendLike
from numfuse.kept import Kept, check_kept, given_back
from numfuse.networks import gradients_again, gradients_of, stored_gradients
from numfuse.perceptron import rounded, store
from numfuse.problem.operands import array_of, as_plain, output, shaped
from numfuse.problem.results import (
    NetworkGradients,
    NetworkSecondGradients,
    Tangent,
    check_needs,
    network_outputs,
)
from numfuse.repeats import Checked, Repeat, again
from numfuse.runtime.dispatch import NETWORKS

__all__ = ["mlp", "mlp_bwd", "mlp_double_bwd", "mlp_jvp"]

#: What half types are computed in.
_WIDE = np.dtype(np.float32)


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
    pass all layers in the caches of a core; on WebGPU one of at most 64 in float32 or float16 is
    one dispatch; on CUDA one of at most 128 in float32, 64 in float64 and 256 in float16 or
    bfloat16 may be one launch, whose backward makes the forward again. Else the layers are calls of
    :func:`matmul_bias_activation`: of NumPy's half types in float32, and rounded once; of other
    arrays in their own dtype.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> nf.mlp(np.ones((1, 2)), [np.ones((2, 3)), np.ones((3, 1))], None, "relu")
    array([[6.]])
    """
    outs = () if out is None else (out,)
    options = (True,) if keep else (False,)
    repeat = again("mlp", x, weights, biases, (), outs, activation, final, options, backend)
    if type(repeat) is tuple:
        if keep:
            return repeat if len(repeat) > 1 else (repeat[0], Kept())
        return repeat[0]
    if type(repeat) is Checked:
        if repeat.widened:
            given = _widened(x, weights, biases)
            found = mlp(*given, activation, final=final, keep=keep, backend=backend)
            return (rounded(found[0], x.dtype), found[1]) if keep else rounded(found, x.dtype)
        call = Chain.checked(x, weights, biases, activation, final, True, backend)
        kept = Kept([], []) if keep else None
        found = call.run(kept)
        return (found, kept) if keep else found
    run = NETWORKS.get(type(x))
    if run is not None and not (keep or outs):
        found = run(x, weights, biases, activation, final, backend)
        if found is not None:
            return found
    call = Chain("mlp", x, weights, biases, activation, final, True, backend)
    net, kept = call.net, Kept([], []) if keep else None
    if net is None:

        def layers() -> Any:
            made = call.at_once(None, (), out, keep)
            if made is not None:
                return (made, Kept()) if keep else made
            made = call.run(kept, out)
            return (made, kept) if keep else made

        return layers() if outs else call.again((), ("mlp", bool(keep)), layers)
    shape, others = net.shapes[0], dict(net.given)
    target = made = None if out is None else output("out", out, shape, net.dtype, others)
    whole = getattr(resolve(backend), "network_jet", None)
    if made is None or net.dtype != net.acc:
        made = np.empty(shape, net.acc)
    found = None if whole is None else whole(net, (made,), repeat, keep)
    if found is None:
        call.run(kept, made)
    else:
        kept = found
    if type(repeat) is Repeat and out is None:
        _keep_checked(repeat, call, found is None, x, weights, biases)
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
    out: Any = None,
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
    out : tuple (d_x, d_weights, d_biases), optional
        Where to write: an array, and tuples of arrays, layer by layer; None entries are allocated.
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
    stacks, as_kept = getattr(kept, "stacks", None), kept
    kept = given_back(kept)
    repeat = None
    if kept is None:
        how = activation, final, (wanted, bool(guard)), backend
        grads = (grad,) if stacks is None else (grad, stacks)
        repeat = gradients_again("mlp_bwd", x, weights, biases, grads, wanted, out, *how)
        if type(repeat) is tuple:
            return gradients_of(repeat, wanted)
    elif out is None:
        others = grad, *kept.inputs, *kept.sums
        options = wanted, bool(guard), "kept"
        rest = activation, final, options, backend
        repeat = again("mlp_bwd", x, weights, biases, others, (), *rest)
    if type(repeat) is Checked:
        if repeat.widened:
            wider = grad.astype(_WIDE), *_widened(x, weights, biases)
            asked: Any = {"final": final, "needs": wanted, "guard": guard, "backend": backend}
            wide = mlp_bwd(*wider, activation, kept=as_kept, **asked)
            return NetworkGradients(*rounded(wide, x.dtype))
        call = Chain.checked(x, weights, biases, activation, final, bool(guard), backend)
        if kept is None:
            call.run(kept := Kept([], []))
        return call.back(grad, kept, wanted)
    call = Chain("mlp_bwd", x, weights, biases, activation, final, guard, backend)
    if kept is not None:
        check_kept(kept, len(call.layers), call.x)
    net = call.net
    if net is None:
        return _gradients(call, grad, kept, wanted, out)
    given = as_plain("grad", array_of(grad))
    grad = call.cast("grad", shaped(given, "grad", net.shapes[0]))
    named = {**net.given, "grad": given}
    shapes = net.operand_shapes
    targets = network_outputs(out, NEEDS, wanted, shapes, net.dtype, named, lambda _, y: y)
    whole = getattr(resolve(backend), "network_jet_bwd", None) if kept is None else None
    found = None if whole is None else whole(net, (grad,), wanted, targets, repeat, stacks)
    if type(repeat) is Repeat and out is None:
        _keep_checked(repeat, call, found is None, x, weights, biases)
    if found is not None:
        d_x, pairs = found
        return stored_gradients(net, d_x, pairs, wanted, targets)
    if kept is None:
        call.run(kept := Kept([], []))
    d_x, d_weights, d_biases = call.back(grad, kept, wanted)
    pairs = [
        [None if group is None else group[i] for group in (d_weights, d_biases)]
        for i in range(len(net.layers))
    ]
    return stored_gradients(net, d_x, pairs, wanted, targets)


def _keep_checked(
    repeat: Repeat, call: Chain, by_layers: bool, x: Any, weights: Any, biases: Any
) -> None:
    """Let the next call of this form go without checks, if it is made of other calls alone."""
    net: Any = call.net
    if net.dtype != net.acc:
        if type(weights) in (list, tuple):
            repeat.keep_checked(True)
    elif by_layers and call.is_as_given(x, weights, biases):
        repeat.keep_checked(False)


def _widened(x: Any, weights: Any, biases: Any) -> tuple[Any, list[Any], list[Any] | None]:
    """Return the operands of a network of half types in float32."""
    if biases is not None:
        biases = [None if y is None else y.astype(_WIDE) for y in biases]
    return x.astype(_WIDE), [w.astype(_WIDE) for w in weights], biases


def _gradients(call: Chain, grad: Any, kept: Any, wanted: Sequence[str], out: Any) -> Any:
    """Return the gradients of arrays that are not NumPy's."""

    def layers() -> NetworkGradients:
        found = call.at_once(grad, wanted, out) if kept is None else None
        if found is not None:
            return found
        if out is not None:
            raise TypeError(
                f"out must be None where x is a {type(call.x).__name__} and its layers are calls "
                f"of their own, got a {type(out).__name__}"
            )
        stacks = kept
        if stacks is None:
            call.run(stacks := Kept([], []))
        return call.back(grad, stacks, wanted)

    if out is not None:
        return layers()
    arrays = [grad] if kept is None else [grad, *kept.inputs, *kept.sums]
    return call.again(arrays, ("mlp_bwd", tuple(wanted), len(arrays)), layers)


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

    Notes
    -----
    `out` has the bits of :func:`mlp`. On the CPU a network whose layers are at most 256 wide is one
    launch, and on CUDA one that a kernel of whole networks serves, where x alone moves; else each
    layer is a call of :func:`matmul_bias_activation_jvp`.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> one = np.ones((1, 1))
    >>> nf.mlp_jvp(3 * one, [one, 2 * one], None, one, None, None, "relu")
    Tangent(out=array([[6.]]), out_dot=array([[2.]]))
    """
    moving, repeat = _flat(weights, x_dot, weights_dot, biases_dot), None
    if moving is not None:
        how = activation, final, (bool(guard),), backend
        repeat = again("mlp_jvp", x, weights, biases, moving, (), *how)
        if type(repeat) is tuple:
            return Tangent(*repeat)
    call = Chain("mlp_jvp", x, weights, biases, activation, final, guard, backend)
    moved = call.group("weights_dot", weights_dot, 0), call.group("biases_dot", biases_dot, 1)
    x_dot = call.cast("x_dot", x_dot, call.x)
    found = None
    if call.net is not None:
        whole = getattr(resolve(backend), "network_jvp", None)
        found = None if whole is None else whole(call.net, x_dot, *moved, repeat)
    if found is None:

        def layers() -> Tangent:
            made = call.along(x_dot, moved)
            if made is None:
                *_, made = call.tangents(x_dot, *moved)
            return Tangent(*made)

        found = call.again((x_dot, *moved[0], *moved[1]), ("mlp_jvp",), layers)
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

    Notes
    -----
    With t the tangent of the result along (u, v, w), these are the gradients of ``sum(grad * t)``;
    d_grad is t. On the CPU a network whose layers are at most 256 wide is one launch, which makes
    the forward again, and on CUDA two are one that a kernel of whole networks serves, where `u`
    alone is there; else a layer is some calls, :func:`matmul_bias_activation_double_bwd` among
    them.

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
    moving, repeat = _flat(weights, u, v, w), None
    if moving is not None:
        how = activation, final, (wanted, bool(guard)), backend
        given = x, weights, biases, (*moving, grad), wanted, None
        repeat = gradients_again("mlp_double_bwd", *given, *how)
        if type(repeat) is tuple:
            return NetworkSecondGradients(repeat[0], *gradients_of(repeat[1:], wanted))
    call = Chain("mlp_double_bwd", x, weights, biases, activation, final, guard, backend)
    groups = call.group("v", v, 0), call.group("w", w, 1)
    u = call.cast("u", u, call.x)
    found = None
    if call.net is not None:
        grad = shaped(as_plain("grad", array_of(grad)), "grad", call.net.shapes[0])
        grad = call.cast("grad", grad)
        whole = getattr(resolve(backend), "network_double_bwd", None)
        found = None if whole is None else whole(call.net, u, *groups, grad, wanted, repeat)
    if found is None:
        arrays = u, *groups[0], *groups[1], grad

        def twice() -> NetworkSecondGradients:
            made: Any = call.along(u, groups, grad, wanted)
            return call.twice(u, *groups, grad, wanted) if made is None else made

        found = call.again(arrays, ("mlp_double_bwd", wanted), twice)
    return NetworkSecondGradients(*map(call.rounded, found))


def _flat(weights: Any, first: Any, *groups: Any) -> tuple[Any, ...] | None:
    """Return tangents, or cotangents, one after another; None where a group is not as `weights`."""
    count = len(weights) if isinstance(weights, Sequence) else 0
    found = (first,)
    for group in groups:
        if group is None:
            found += (None,) * count
        elif type(group) in (list, tuple) and len(group) == count:
            found += tuple(group)
        else:
            return None
    return found
