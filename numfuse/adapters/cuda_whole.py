"""Networks that one kernel runs whole, on arrays of a CUDA device: the operation, and its calls.

It is recorded and repeated as every operation is (`call.entry`); which networks it serves is
`plan.networks`' to say, and all others go layer by layer (`stacks`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation, get
from numfuse.adapters.signatures import JetSignature, arguments_of
from numfuse.backends import latest
from numfuse.backends.cuda.call.entry import run
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.plan.network_sizes import Sizes, sizes_of
from numfuse.operations import Operation
from numfuse.problem.networks import NetworkProblem

if TYPE_CHECKING:
    from numfuse.adapters.stacks import Array, DeviceNetwork

#: Whether one kernel runs a network that it can run; else its layers do.
ENABLED = os.environ.get("NUMFUSE_CUDA_NETWORKS") != "0"
#: Whether it also runs those of 16-bit types.
HALF = True

#: Networks of a call at most: the blocks of a grid along y.
_MOST_NETWORKS = (1 << 16) - 1
#: Rows of x at most: kernels count them, and some beyond, in 32 bits.
_MOST_ROWS = 1 << 30

_FLAGS = ["guard", "pattern", "seconds", "units", "weights", "length"]


class NetworkOperation(Operation):
    """A network of so many layers, its jet or the backward of it.

    What is constant, the directions and the weights of the second derivatives, are flags: bytes in
    the arrays' dtype. `length` is that of a backward's one result, or the shape of what is kept.
    """

    def __init__(self, layers: int, backward: bool) -> None:
        self.name, self.kind, self.backward = "mlp_jet", "network", backward
        self.layers, self.mark = layers, ("network", layers, backward)
        named = [f"{name}_{i}" for name in ("weights", "biases") for i in range(layers)]
        grads = ["grad", "grad_dot", "grad_ddot", "kept"] if backward else []
        self.operands = ["points", *named, *grads]
        self.needs = ()
        self.flags, self.options = _FLAGS, ["activation", "out", *_FLAGS]
        self.results = ("flat",) if backward else ("u", "u_dot", "u_ddot", "kept")
        self.fields = (*self.operands, *self.results)
        self.several, self.in_place = True, False
        self.problem = self._problem

    def label(self, name: str) -> str:
        """Return what a message calls an array."""
        group, _, number = name.rpartition("_")
        return f"{group}[{number}]" if group in ("weights", "biases") else name

    def _problem(
        self, activation: Activation, out: Any, guard: bool, pattern: bytes, seconds: int,
        units: bytes, weights: bytes | None, length: tuple[int, ...] | int, **given: ndarray | None,
    ) -> NetworkProblem:  # fmt: skip
        arrays = {name: y for name, y in given.items() if y is not None}
        x = arrays["points"]
        made = np.empty(length, x.dtype) if length else None
        results = (made,) if self.backward else (*out[:3], made)
        arrays |= {name: y for name, y in zip(self.results, results, strict=True) if y is not None}
        wide = np.frombuffer(units, x.dtype).reshape(-1, x.shape[-1])
        table = None
        if weights is not None:
            table = np.frombuffer(weights, x.dtype).reshape(seconds, len(wide))
        layers = [arrays[f"weights_{i}"].shape[-1] for i in range(self.layers)]
        widths = (x.shape[-1], *layers)
        every = (*[activation] * (self.layers - 1), get("none"))
        how = every, widths, x.shape[-2], x.dtype, wide, table, pattern, seconds, guard
        keep = "kept" in arrays
        kept = keep and not self.backward, keep and self.backward
        return NetworkProblem(*how, self.backward, *kept, arrays, results)


class _Signature(JetSignature):
    """The arguments of a network."""

    def result_names(self, x: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the results."""
        found: tuple[str, ...] = self._operation.results  # type: ignore[attr-defined]
        return found


@functools.cache
def _operation(layers: int, backward: bool) -> NetworkOperation:
    return NetworkOperation(layers, backward)


_arguments = arguments_of(_Signature)


class Whole:
    """A network on a device that one kernel runs: its results, or its gradients."""

    def __init__(
        self, of: DeviceNetwork, sizes: Sizes, activation: Activation, networks: int
    ) -> None:
        self._of, self._sizes, self._activation = of, sizes, activation
        #: The networks' axis, which a single one lacks.
        self._lead = (networks,) if networks else ()

    def _run(self, grads: Sequence[Array | None] | None, length: Any, out: Any) -> Any:
        of, net = self._of, self._of.net
        table = None if net.weights is None else net.weights.tobytes()
        constant = net.pattern, net.seconds, net.units.tobytes(), table
        operands = of.x, *of.weights, *of.biases, *(grads or ())
        flags: Any = (net.guard, *constant, length)
        operation = _operation(len(of.weights), grads is not None)
        return run(operation, operands, self._activation, flags, (), out, of.backend, _arguments)

    def forward(self, out: Sequence[Array], keep: bool) -> Array | None:
        """Write the results; return what is kept of hidden layers but the first, if anything."""
        s, points = self._sizes, self._of.x.shape[-2]
        of_layer = *self._lead, points, s.members, s.tile.width
        shape = (s.count - 2, *of_layer) if keep and s.count > 2 else 0
        kept = self._run(None, shape, tuple(out))[3]
        return kept

    def backward(
        self, grads: Sequence[Array | None], kept: Array | None, *_: Any
    ) -> tuple[None, list[Array | None], list[Array | None]]:
        """Return no gradient by x, and those by weights and by biases.

        These are parts of one array where they fill it.
        """
        of, s = self._of, self._sizes
        given = [None if y is not None and 0 in y.shape else y for y in grads]
        (flat,) = self._run([*given, kept], (*self._lead, s.flat), None)
        return None, *gradients(flat, s, of.biases, of.arrays.compact)


def gradients(
    flat: Array, s: Sizes, biases: Sequence[Array | None], compact: Callable[[Array], Array]
) -> tuple[list[Array | None], list[Array | None]]:
    """Return the gradients by weights and biases: parts of the flat array, or compact copies.

    Those of several networks lie apart there, and are copies.
    """
    told, several, lead = latest.call, len(flat.shape) > 1, flat.shape[:-1]
    width, widths, last = s.tile.width, s.widths, s.count - 1
    rows = flat[..., s.squares :].reshape(*lead, s.slots, width)
    squares = flat[..., : s.squares].reshape(*lead, s.count - 2, width, width)
    head, tail = last + widths[0], last + widths[0] + s.directions
    found = [rows[..., last:head, : widths[1]]]
    found += [squares[..., i, : widths[i + 1], : widths[i + 2]] for i in range(last - 1)]
    d_weights: list[Array | None] = [
        y if full == width and not several else compact(y)
        for y, full in zip(found, widths[1:-1], strict=True)
    ]
    tall = rows[..., tail : tail + widths[-1], :].reshape(*lead, width, widths[-1])
    tall = tall[..., : widths[-2], :]
    d_weights.append(compact(tall) if several else tall)
    lines = [rows[..., i, : widths[i + 1]] for i in range(last)] + [rows[..., -1, : widths[-1]]]
    d_biases = [
        None if bias is None else (compact(line) if several else line).reshape(tuple(bias.shape))
        for bias, line in zip(biases, lines, strict=True)
    ]
    latest.call = told  # and not a copy
    return d_weights, d_biases


def form_of(
    x: Array, weights: Sequence[Array], biases: Sequence[Array | None], backward: bool, moves: bool
) -> tuple[tuple[int, ...], int] | None:
    """Return the widths from x to the result, and the number of networks: 0 of a single one.

    None where operands do not fit, or an operand's gradient would be a sum over networks.
    """
    operands = [x, *weights, *biases]
    batches = {y.shape[0] for y in operands if y is not None and len(y.shape) == 3}
    if len(batches) > 1 or 0 in batches or len(x.shape) not in (2, 3) or not x.shape[-2]:
        return None
    networks = batches.pop() if batches else 0
    if networks > _MOST_NETWORKS or x.shape[-2] > _MOST_ROWS:
        return None
    found = [x.shape[-1]]
    for w, bias in zip(weights, biases, strict=True):
        if len(w.shape) not in (2, 3) or w.shape[-2] != found[-1] or w.dtype != x.dtype:
            return None
        width = w.shape[-1]
        found.append(width)
        if bias is None:
            continue
        shape = tuple(bias.shape)
        if shape not in ((width,), (1, width), (networks, 1, width)) or bias.dtype != x.dtype:
            return None
    if networks and backward:
        own = [*weights, *[y for y in biases if y is not None], *([x] if moves else [])]
        if any(len(y.shape) != 3 for y in own):
            return None
    return tuple(found), networks


def whole(of: DeviceNetwork, ordinal: int, backward: bool) -> Whole | None:
    """Return how one kernel runs a network on a device; None: its layers are run one by one."""
    net = of.net
    if not ENABLED:
        return None
    activations = {id(f): f for _, _, f in net.layers[:-1]}
    if not (net.plain and len(activations) == 1 and net.dtype == net.acc and prod(net.x.shape)):
        return None
    form = form_of(of.x, of.weights, of.biases, backward, False)
    if form is None or (form[1] and all(w.ndim == 2 for w, _, _ in net.layers)):
        return None  # (rows of one network are the layers' to put together)
    widths, networks = form
    counts = net.directions, net.seconds
    info = device(ordinal).info
    sizes = sizes_of(info, net.dtype.name, widths, *counts, backward)
    if sizes is None:
        return None
    (activation,) = activations.values()
    return Whole(of, sizes, get(activation), networks)
