"""Hop 1 of networks: a multilayer perceptron's derivatives by its inputs, layer by layer.

Between layers the value, the directions and the second derivatives of a point lie one behind the
other, (..., M, 1 + D + S, width), as the layers' kernels read and write them. The tangents of the
first layer's input are constants and its second derivatives zero; an identity at the end is one
product over all rows. Half types are widened first, and results rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.functional import (
    ActivationLike,
    BackendLike,
    matmul_bias_activation,
    matmul_bias_activation_bwd,
)
from numfuse.jets import BACKWARD, FORWARD, weights_of
from numfuse.problem.jets import Stack
from numfuse.problem.operands import array_of, output, same_dtype, shaped
from numfuse.problem.results import NetworkGradients, NetworkJet, check_needs
from numfuse.problem.shapes import sum_to
from numfuse.runtime.dispatch import adapter_for

__all__ = ["mlp_jet", "mlp_jet_bwd"]

_NEEDS = ("x", "weights", "biases")
#: Bytes that a block of points may have between layers; beyond, points go by several blocks.
BLOCK_BYTES = 8 << 20


class Kept(NamedTuple):
    """What the forward of a network keeps: the stacks of each layer's inputs and of its sums."""

    inputs: list[ndarray]
    sums: list[ndarray | None]


class _Network:
    """The operands of a call, checked; `layers` has (weights, bias, activation)."""

    def __init__(
        self, name: str, x: Any, weights: Any, biases: Any, activation: Any, directions: Any,
        second: Any, final: Any, guard: bool, backend: BackendLike,
    ) -> None:  # fmt: skip
        if isinstance(weights, ndarray) or not isinstance(weights, Sequence) or not weights:
            raise TypeError(f"weights must be a sequence of arrays, got {type(weights).__name__}")
        count = len(weights)
        if biases is None:
            biases = (None,) * count
        if isinstance(biases, ndarray) or not isinstance(biases, Sequence) or len(biases) != count:
            raise ValueError(f"biases must be None or a sequence of {count} arrays or None")
        if isinstance(activation, (str, Activation)):
            activation = (activation,) * (count - 1)
        if len(activation) != count - 1:
            raise ValueError(f"activation must be one or {count - 1}, got {len(activation)}")
        named = {"x": x} | {f"weights[{i}]": w for i, w in enumerate(weights)}
        named |= {f"biases[{i}]": y for i, y in enumerate(biases) if y is not None}
        adapter = adapter_for(**named)
        if adapter is not None:
            kind = adapter.__name__.rpartition(".")[2]
            raise TypeError(f"{name} must have NumPy arrays, got those of {kind}")
        for label, y in named.items():
            if not isinstance(array_of(y), ndarray):
                raise TypeError(f"{label} must be a NumPy array, got {type(y).__name__}")
        self.dtype, self.acc = same_dtype(named)
        self.given, self.backend, self.guard = named, backend, bool(guard)
        self.x = x = x.astype(self.acc, copy=False)
        if x.ndim < 2:
            raise ValueError(f"x must have shape (..., M, d_0), got {x.shape}")
        self.layers: list[tuple[ndarray, ndarray | None, Activation]] = []
        width, self.batches = x.shape[-1], [x.shape[:-2]]
        for i, (w, bias, f) in enumerate(zip(weights, biases, (*activation, final), strict=True)):
            if w.ndim < 2 or w.shape[-2] != width:
                raise ValueError(f"weights[{i}] must have shape (..., {width}, N), got {w.shape}")
            width = w.shape[-1]
            if bias is not None and (
                bias.shape != (width,) if bias.ndim < 2 else bias.shape[-2:] != (1, width)
            ):
                raise ValueError(
                    f"biases[{i}] must have shape ({width},) or (..., 1, {width}), got {bias.shape}"
                )
            own = () if bias is None else bias.shape[:-2]
            try:
                self.batches.append(np.broadcast_shapes(self.batches[-1], w.shape[:-2], own))
            except ValueError:
                raise ValueError(
                    f"the batch axes of weights[{i}] must broadcast with {self.batches[-1]}, "
                    f"got {w.shape[:-2]}"
                ) from None
            bias = None if bias is None else bias.astype(self.acc, copy=False)
            f = f if type(f) is Activation else get_activation(f)
            self.layers.append((w.astype(self.acc, copy=False), bias, f))
        units = np.eye(x.shape[-1]) if directions is None else np.asarray(directions)
        if units.ndim != 2 or units.shape[1] != x.shape[-1]:
            raise ValueError(f"directions must have shape (D, {x.shape[-1]}), got {units.shape}")
        self.units = units.astype(self.acc)
        self.weights, self.pattern = weights_of(second, x, self.units, name="second")
        self.directions = len(units)
        self.seconds = self.directions if self.weights is None else len(self.weights)
        #: Where the last layer is a product alone, of all rows.
        self.plain = self.layers[-1][2].is_identity

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the value, the directions and the second derivatives."""
        value = *self.batches[-1], self.x.shape[-2], self.layers[-1][0].shape[-1]
        return value, (self.directions, *value), (self.seconds, *value)

    def members(self, layer: int) -> int:
        """Return the rows of a point in the inputs of a layer."""
        return 1 + self.directions + (self.seconds if layer else 0)

    def blocks(self, layers: int) -> Iterator[slice]:
        """Yield blocks of points, of which so many layers are held at once."""
        widest = max(w.shape[-1] for w, _, _ in self.layers)
        batch = max(prod(shape) for shape in self.batches)
        one = batch * widest * self.members(1) * self.acc.itemsize * layers
        count, step = self.x.shape[-2], max(256, BLOCK_BYTES // max(1, one))
        pieces = max(1, -(-count // step))
        step = max(1, -(-count // pieces))
        for start in range(0, max(1, count), step):
            yield slice(start, min(count, start + step))

    # --- layers ---------------------------------------------------------------------------------
    def first(self, rows: slice) -> ndarray:
        """Return the stack of the first layer's inputs."""
        x = self.x[..., rows, :]
        stack = np.empty((*x.shape[:-1], self.members(0), x.shape[-1]), self.acc)
        stack[..., 0, :] = x
        stack[..., 1:, :] = self.units
        return stack

    def views(self, stack: ndarray, whole: bool = True) -> tuple[Any, Any, Any]:
        """Return the value, the directions and the second derivatives of a stack."""
        axis, d = stack.ndim - 2, self.directions
        order = (axis, *range(axis), axis + 1)
        value, rest = stack[..., 0, :], stack.transpose(order)
        seconds = rest[1 + d :] if whole and self.seconds else None
        return value, rest[1 : 1 + d], seconds

    def empty(self, layer: int, points: int, members: int) -> ndarray:
        """Return a stack as wide as a layer's results."""
        width = self.layers[layer][0].shape[-1]
        return np.empty((*self.batches[layer + 1], points, members, width), self.acc)

    def stack(self, layer: int) -> Stack:
        """Return the form of a layer's call."""
        return Stack(self.directions, self.seconds, layer > 0)

    def forward(self, layer: int, stack: ndarray, out: ndarray, sums: ndarray | None) -> None:
        """Run a layer on a stack of inputs."""
        w, bias, f = self.layers[layer]
        flags = self.guard, sums is not None, self.pattern, self.stack(layer)
        outs = out, None, None
        if sums is not None:
            outs = *outs, sums, None, None
        operands = stack, w, bias, None, None, self.weights
        FORWARD(operands, f, flags, (), outs, self.backend)

    def last(self, stack: ndarray, out: tuple[ndarray, ndarray, ndarray]) -> None:
        """Run a last layer that is a product alone: of all members at once."""
        w, bias, _ = self.layers[-1]
        made = matmul_bias_activation(_tall(stack), w, backend=self.backend)
        members = stack.shape[-2]
        made = made.reshape(*made.shape[:-2], stack.shape[-3], members, made.shape[-1])
        value, dot, ddot = self.views(made, len(self.layers) > 1)
        _assign(out, (value if bias is None else value + bias, dot, ddot))

    def run(
        self, rows: slice, out: tuple[Any, Any, Any] | None, keep: bool
    ) -> tuple[list[ndarray], list[ndarray | None]]:
        """Run a block of points through all layers; return what is kept."""
        points, last = rows.stop - rows.start, len(self.layers) - 1
        stack = self.first(rows)
        inputs, kept = [stack], []
        for layer in range(last + 1):
            if layer == last and (self.plain or out is None):
                if out is not None:
                    self.last(stack, out)
                break
            target = self.empty(layer, points, self.members(1))
            sums = self.empty(layer, points, self.members(layer)) if keep else None
            self.forward(layer, stack, target, sums)
            kept.append(sums)
            if layer == last:
                _assign(out, self.views(target))
            else:
                stack = target
                inputs = [*inputs, stack] if keep else [stack]
        return inputs, kept

    # --- backward -------------------------------------------------------------------------------
    def grads(self, given: Sequence[ndarray | None], rows: slice) -> ndarray:
        """Return the stack of the cotangents of a block's results."""
        last = len(self.layers) - 1
        members = self.members(last if self.plain else 1)
        stack = self.empty(last, rows.stop - rows.start, members)
        views = self.views(stack, last > 0 or not self.plain)
        _assign(views, [None if x is None else x[..., rows, :] for x in given])
        return stack

    def back(
        self, layer: int, grads: ndarray, stack: ndarray, sums: ndarray | None, needs: Sequence[str]
    ) -> Any:
        """Return the stack of the gradients of a layer's inputs, and its own gradients."""
        w, bias, f = self.layers[layer]
        wanted = [y for y, of in (("b", "weights"), ("bias", "biases")) if of in needs]
        if layer or "x" in needs:
            wanted.append("a")
        flags = self.guard, False, self.pattern, self.stack(layer)
        operands = grads, None, None, stack, w, bias, None, None, self.weights, sums, None, None
        return BACKWARD(operands, f, flags, tuple(wanted), None, self.backend)

    def back_through(
        self, given: Sequence[ndarray | None], rows: slice, inputs: Sequence[ndarray],
        kept: Sequence[ndarray | None], needs: Sequence[str], totals: Any,
    ) -> ndarray | None:  # fmt: skip
        """Add a block's gradients to the totals of each layer; return that of x."""
        layer, d_x, grads = len(self.layers) - 1, None, self.grads(given, rows)
        if self.plain:
            w, bias, _ = self.layers[-1]
            wanted = ("a", "b") if "weights" in needs else ("a",)
            tall = _tall(grads), _tall(inputs[-1]), w
            d_a, d_b, _ = matmul_bias_activation_bwd(*tall, needs=wanted, backend=self.backend)
            d_bias = None
            if "biases" in needs and bias is not None and given[0] is not None:
                d_bias = sum_to(given[0][..., rows, :], bias.shape, self.acc)
            _add(totals[layer], d_b, d_bias)
            grads = d_a.reshape(inputs[-1].shape)
            d_x = grads[..., 0, :]
            layer -= 1
        for i in range(layer, -1, -1):
            found = self.back(i, grads, inputs[i], kept[i] if i < len(kept) else None, needs)
            _add(totals[i], found.d_b, found.d_bias)
            if found.d_a is not None:
                grads, d_x = found.d_a, found.d_a[..., 0, :]
        return d_x


def _assign(targets: Sequence[Any], values: Sequence[Any]) -> None:
    """Write values, where there is room for them; None is zero."""
    for to, x in zip(targets, values, strict=True):
        if to is not None and to.size:
            to[...] = 0 if x is None else x


def _add(totals: list[Any], *found: Any) -> None:
    for i, x in enumerate(found):
        if x is not None:
            totals[i] = x if totals[i] is None else totals[i] + x


def _tall(stack: ndarray) -> ndarray:
    *batch, m, members, k = stack.shape
    return stack.reshape(*batch, m * members, k)


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
        For dtypes that differ, or arrays that are not NumPy's.
    BackendUnavailable
        See :func:`matmul_bias_activation`.

    Notes
    -----
    Without `keep` the points go by blocks: 8 MiB are held between layers. Half types are widened to
    float32, and the results rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> w = [np.ones((1, 1)), np.ones((1, 1))]
    >>> nf.mlp_jet(np.zeros((1, 1)), w, None)
    NetworkJet(u=array([[0.]]), u_dot=array([[[1.]]]), u_ddot=array([[[0.]]]))
    """
    how = activation, directions, second, final, guard, backend
    net = _Network("mlp_jet", x, weights, biases, *how)
    made, results = _outputs(net, out)
    if keep:
        inputs, sums = net.run(slice(0, net.x.shape[-2]), made, True)
        kept = Kept(inputs, sums)
    else:
        for rows in net.blocks(2):
            net.run(rows, tuple(y[..., rows, :] for y in made), False)
    for target, y in zip(results, made, strict=True):
        if target is not y:
            target[...] = y
    found = NetworkJet(*results)
    return (found, kept) if keep else found


def _outputs(net: _Network, out: Any) -> tuple[Any, list[ndarray]]:
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
    how = activation, directions, second, final, guard, backend
    net = _Network("mlp_jet_bwd", x, weights, biases, *how)
    given = []
    names = "grad", "grad_dot", "grad_ddot"
    for name, y, shape in zip(names, (grad, grad_dot, grad_ddot), net.shapes, strict=True):
        if y is not None:
            y = shaped(array_of(y), name, shape)
            same_dtype({"x": x, name: y})
            y = y.astype(net.acc, copy=False)
        given.append(y)
    totals: list[list[Any]] = [[None, None] for _ in net.layers]
    points = net.x.shape[-2]
    d_x = np.zeros(net.x.shape, net.acc) if "x" in wanted else None
    for rows in [slice(0, points)] if kept is not None else net.blocks(2 * len(net.layers)):
        inputs, sums = kept if kept is not None else net.run(rows, None, True)
        found = net.back_through(given, rows, inputs, sums, wanted, totals)
        if d_x is not None and found is not None:
            d_x[..., rows, :] = found
    made: list[list[Any]] = [[], []]
    for (w, bias, _), pair in zip(net.layers, totals, strict=True):
        for i, (of, name) in enumerate(((w, "weights"), (bias, "biases"))):
            y = pair[i]
            if name in wanted and of is not None and y is None:
                y = np.zeros(of.shape, net.acc)
            made[i].append(None if y is None else y.astype(net.dtype, copy=False))
    d_x = None if d_x is None else d_x.astype(net.dtype, copy=False)
    groups = [tuple(y) if n in wanted else None for n, y in zip(_NEEDS[1:], made, strict=True)]
    return NetworkGradients(d_x, *groups)
