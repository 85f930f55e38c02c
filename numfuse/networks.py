"""Hop 1 of networks: a multilayer perceptron's derivatives by its inputs, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends import resolve
from numfuse.functional import ActivationLike, BackendLike
from numfuse.kept import Kept, check_kept, given_back
from numfuse.packs import Packed
from numfuse.perceptron import Memory, Network, silently, store
from numfuse.problem.operands import array_of, as_plain, output, same_dtype, shaped
from numfuse.problem.results import NetworkGradients, NetworkJet, check_needs, network_outputs
from numfuse.repeats import Checked, Repeat, again, content
from numfuse.runtime.dispatch import adapter_for

__all__ = ["mlp_jet", "mlp_jet_bwd"]

_NEEDS = ("x", "weights", "biases")


def mlp_jet(
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any] | None,
    activation: ActivationLike | Sequence[ActivationLike] = "tanh",
    *,
    directions: Any = None,
    second: Any = None,
    final: ActivationLike = "none",
    keep: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> Any:
    r"""A network's value, and its first and second derivatives by its input, in one forward pass.

    .. math::

        u(x), \qquad \dot u_d = \partial_t u(x + t v_d), \qquad
        \ddot u_s = \textstyle\sum_d W_{sd} \, \partial_t^2 u(x + t v_d) \qquad (t = 0)

    Parameters
    ----------
    x : (..., M, d_0) array
        The points.
    weights : sequence of (..., d_i, d_i+1) arrays
        Layer by layer; leading axes are a batch of networks, as in :func:`numpy.matmul`.
    biases : sequence of (d_i+1,) or (..., 1, d_i+1) arrays or None, or None
    activation : str or Activation, or a sequence of them, default "tanh"
        Of the hidden layers: one, or ``len(weights) - 1``.
    directions : (D, d_0) array_like, optional
        The v_d; default: the unit vectors. Constants.
    second : (S, D) array_like, optional
        W; default: the identity, all pure second derivatives. ``numpy.ones((1, D))`` is the
        Laplacian, ``numpy.zeros((0, D))`` none. What a zero multiplies is not computed.
    final : str or Activation, default "none"
        The activation of the last layer.
    keep : bool, default False
        Return ``(result, kept)``, for ``kept=`` of the backward, which then computes nothing again:
        two arrays (..., M, 1 + D + S, d_i) for each hidden layer, in the accumulator's dtype.
        Nothing is kept where that takes more time: see the notes.
    guard : bool, default True
        Count a derivative of an activation that is not finite as 0.
    out : tuple (u, u_dot, u_ddot), optional
        Where to write; None entries are allocated.
    backend : str or backend object, optional

    Returns
    -------
    NetworkJet
        A named tuple: u (..., M, d_out), u_dot (D, ..., M, d_out), u_ddot (S, ..., M, d_out).

    Raises
    ------
    ValueError
        For shapes or lengths that do not fit, or an overlapping `out`.
    TypeError
        For dtypes that differ, or arrays that are neither NumPy's nor numfuse's own of a device.
    BackendUnavailable
        See :func:`matmul_bias_activation`.

    Notes
    -----
    PyTorch's tensors on the CPU, JAX's arrays and autograd's boxes are differentiated through;
    `out` must be None for them.

    On the CPU a network whose layers are at most 256 wide is one launch: blocks of points pass all
    layers in the caches of a core. Its backward makes the blocks again, which takes a third of the
    time that keeping and reading them would: `keep` keeps nothing there. Other networks go layer by
    layer; without `keep` their points go by blocks, and 8 MiB are held between layers.

    Half types are widened to float32, and the results rounded once. Arrays of a device
    (:func:`to_device`) stay there: their points go at once, and half types are rounded at every
    layer. On WebGPU a network of float32 or float16 whose layers are at most 64 wide is one
    dispatch each way, which keeps nothing and rounds once.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> w = [np.ones((1, 1)), np.ones((1, 1))]
    >>> nf.mlp_jet(np.zeros((1, 1)), w, None)
    NetworkJet(u=array([[0.]]), u_dot=array([[[1.]]]), u_ddot=array([[[0.]]]))
    """
    outs = tuple(out) if isinstance(out, (tuple, list)) else ()
    repeat = None
    if out is None or len(outs) == 3:
        options = bool(guard), content(directions), content(second)
        call = activation, final, options, backend
        repeat = again("mlp_jet", x, weights, biases, (), outs, *call)
        if type(repeat) is tuple:
            found = NetworkJet(*repeat)
            return (found, Kept()) if keep else found
    weights, biases = listed(weights), listed(biases)
    serve = _serving(x, weights, biases)
    if serve is not None:
        rest = (activation, final, guard, backend), (directions, second)
        return serve(None, x, weights, biases, *rest, keep, (), out)
    how = activation, directions, second, final, guard, backend
    net = Network("mlp_jet", x, weights, biases, *how)
    made, results = _outputs(net, out)
    whole = getattr(resolve(backend), "network_jet", None)
    if whole is not None and whole(net, made, repeat) is not None:
        found = _stored(results, made)
        return (found, Kept()) if keep else found
    blocks = [slice(0, net.x.shape[-2])] if keep else net.blocks(2)
    memory = Memory(net, blocks[0].stop, keep, False)
    for rows in blocks:
        inputs, sums = net.run(rows, tuple(y[..., rows, :] for y in made), memory)
    if keep:
        kept = Kept(inputs, sums, memory)
    else:
        memory.slab.release()
    found = _stored(results, made)
    return (found, kept) if keep else found


def _stored(results: Sequence[ndarray], made: Sequence[ndarray]) -> NetworkJet:
    """Return the results, to which goes what was computed elsewhere."""
    for target, y in zip(results, made, strict=True):
        if target is not y:
            store(target, y)
    return NetworkJet(*results)


def listed(given: Any) -> Any:
    """Return a sequence of arrays as one of Python's: a library's own (a ParameterList) too."""
    if given is None or isinstance(given, (Sequence, ndarray)) or not hasattr(given, "__len__"):
        return given
    return list(given)


def _serving(x: Any, weights: Any, biases: Any, grads: Sequence[Any] = ()) -> Any:
    """Return what an adapter runs the networks of its arrays with; None for NumPy's."""
    if not isinstance(weights, Sequence):
        return None
    named = {"x": x} | {f"weights[{i}]": w for i, w in enumerate(weights)}
    named |= {f"biases[{i}]": y for i, y in enumerate(biases or ()) if y is not None}
    named |= {name: y for name, y in zip(("grad", "grad_dot", "grad_ddot"), grads, strict=False)}
    return getattr(adapter_for(**named), "network", None)


def _outputs(net: Network, out: Any) -> tuple[Any, list[ndarray]]:
    """Return where the results are computed, and where they go."""
    names = "u", "u_dot", "u_ddot"
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 3):
        raise TypeError(f"out must be a tuple of 3 ({', '.join(names)}), got {type(out).__name__}")
    results, others = [], dict(net.given)
    for name, shape, given in zip(names, net.shapes, out or (None,) * 3, strict=True):
        target = np.empty(shape, net.dtype)
        if given is not None:
            target = output(name, given, shape, net.dtype, others)
        results.append(target)
        others[name] = target
    made = [y if net.dtype == net.acc else np.empty(y.shape, net.acc) for y in results]
    return tuple(made), results


def mlp_jet_bwd(
    grad: Any,
    grad_dot: Any,
    grad_ddot: Any,
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any] | None,
    activation: ActivationLike | Sequence[ActivationLike] = "tanh",
    *,
    directions: Any = None,
    second: Any = None,
    final: ActivationLike = "none",
    needs: Iterable[str] = ("weights", "biases"),
    kept: Any = None,
    guard: bool = True,
    out: Any = None,
    backend: BackendLike = None,
) -> NetworkGradients:
    """Return the gradients of :func:`mlp_jet`: of a loss that holds derivatives, by the weights.

    Parameters
    ----------
    grad, grad_dot, grad_ddot : arrays of the results' shapes, or None
        The cotangents of u, u_dot and u_ddot; None is zero.
    x, weights, biases, activation, directions, second, final
        As they were in the forward.
    needs : iterable of "x", "weights", "biases", default ("weights", "biases")
        The gradients that are wanted; the others are None.
    kept : optional
        What the forward returned with ``keep=True``. Without it the points go by blocks, of which
        the forward is made again: 8 MiB are held.
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
        As :func:`mlp_jet`.
    """
    wanted = check_needs(needs, _NEEDS)
    grads = grad, grad_dot, grad_ddot
    repeat = None
    if kept is None or (type(kept) is Kept and not kept.inputs):
        options = wanted, bool(guard), content(directions), content(second)
        call = activation, final, options, backend
        repeat = gradients_again("mlp_jet_bwd", x, weights, biases, grads, wanted, out, *call)
        if type(repeat) is tuple:
            return gradients_of(repeat, wanted)
    weights, biases = listed(weights), listed(biases)
    serve = _serving(x, weights, biases, grads)
    if serve is not None:
        rest = (activation, final, guard, backend), (directions, second)
        found: NetworkGradients = serve(grads, x, weights, biases, *rest, kept, wanted, out)
        return found
    kept = given_back(kept)
    how = activation, directions, second, final, guard, backend
    net = Network("mlp_jet_bwd", x, weights, biases, *how)
    if kept is not None:
        check_kept(kept, len(net.layers), net.x)
    given = []
    names = "grad", "grad_dot", "grad_ddot"
    for name, y, shape in zip(names, grads, net.shapes, strict=True):
        if y is not None:
            y = shaped(as_plain(name, array_of(y)), name, shape)
            same_dtype({"x": x, name: y})
            y = y.astype(net.acc, copy=False)
        given.append(y)
    there = {name: y for name, y in zip(names, grads, strict=True) if y is not None}
    others = net.given | {name: array_of(y) for name, y in there.items()}
    how_out = out, _NEEDS, wanted, net.operand_shapes, net.dtype, others
    targets = network_outputs(*how_out, lambda _, y: y)

    whole = getattr(resolve(backend), "network_jet_bwd", None) if kept is None else None
    if not there:  # a cotangent that is not given meets no infinity, as a zero would
        d_x = np.zeros(net.x.shape, net.acc) if "x" in wanted else None
        return stored_gradients(net, d_x, [[None, None]] * len(net.layers), wanted, targets)
    gradients = None if whole is None else whole(net, given, wanted, targets, repeat)
    if gradients is not None:
        return stored_gradients(net, gradients[0], gradients[1], wanted, targets)
    totals: list[list[Any]] = [[None, None] for _ in net.layers]
    points = net.x.shape[-2]
    d_x = np.zeros(net.x.shape, net.acc) if "x" in wanted else None
    again = kept is None
    blocks = net.blocks(2 * len(net.layers)) if again else [slice(0, points)]
    memory = Memory(net, blocks[0].stop, True, True, again)
    for rows in blocks:
        inputs, sums = net.run(rows, None, memory) if again else (kept.inputs, kept.sums)
        d_rows = net.back_through(given, rows, inputs, sums, wanted, totals, memory)
        if d_x is not None and d_rows is not None:
            d_x[..., rows, :] = d_rows
    memory.slab.release()
    return stored_gradients(net, d_x, totals, wanted, targets)


def gradients_again(
    name: str, x: Any, weights: Any, biases: Any, grads: tuple[Any, ...],
    wanted: tuple[str, ...], out: Any, activation: Any, final: Any, options: Any, backend: Any,
) -> tuple[Any, ...] | Checked | Repeat | None:  # fmt: skip
    """Run a backward that came before, and return its results; see :func:`numfuse.repeats.again`.

    `out` is (d_x, d_weights, d_biases), of which each may be None.
    """
    outs: tuple[Any, ...] = ()
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != len(_NEEDS):
            return None
        count = len(weights) if isinstance(weights, Sequence) else 0
        outs = (out[0],)
        for group in out[1:]:
            if group is None:
                outs += (None,) * count
            elif type(group) in (tuple, list) and len(group) == count:
                outs += tuple(group)
            else:
                return None
    others = grads
    if type(weights) is Packed:
        every = range(len(weights))
        others += tuple(weights.turned(i) if i or "x" in wanted else None for i in every)
    how = activation, final, options, backend
    return again(name, x, weights, biases, others, outs, *how)


def gradients_of(results: Sequence[Any], wanted: Sequence[str]) -> NetworkGradients:
    """Return the results of a repeated backward: d_x, those by weights, those by biases."""
    count = len(results) // 2
    groups = results[1 : 1 + count], results[1 + count :]
    made = [tuple(y) if n in wanted else None for n, y in zip(_NEEDS[1:], groups, strict=True)]
    return NetworkGradients(results[0], *made)


@silently
def stored_gradients(
    net: Network,
    d_x: ndarray | None,
    totals: Sequence[Sequence[Any]],
    wanted: Sequence[str],
    targets: Mapping[str, ndarray],
) -> NetworkGradients:
    """Return the gradients in the dtype of the operands, in `targets` where there is one.

    Those that nothing adds to are zero.
    """

    def written(name: str, y: ndarray) -> ndarray:
        target = targets.get(name)
        if target is None:
            return y.astype(net.dtype, copy=False)
        if target is not y:
            target[...] = y
        return target

    made: list[list[Any]] = [[], []]
    for layer, ((w, bias, _), pair) in enumerate(zip(net.layers, totals, strict=True)):
        for i, (of, name) in enumerate(((w, "weights"), (bias, "biases"))):
            y = pair[i]
            if name in wanted and of is not None and y is None:
                y = np.zeros(of.shape, net.acc)
            made[i].append(None if y is None else written(f"d_{name}[{layer}]", y))
    d_x = None if d_x is None else written("d_x", d_x)
    groups = [tuple(y) if n in wanted else None for n, y in zip(_NEEDS[1:], made, strict=True)]
    return NetworkGradients(d_x, *groups)
