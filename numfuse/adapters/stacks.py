"""Networks' jets on arrays of a device: the stacks stay there from layer to layer.

Every step is a call on arrays of the device, which is found again by its fingerprint; nothing is
waited for. Points go at once, and stacks are in the arrays' dtype: half types are rounded at every
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy import ndarray

from numfuse.functional import matmul_bias_activation, matmul_bias_activation_bwd
from numfuse.fusion import elementwise
from numfuse.jets import BACKWARD, FORWARD
from numfuse.perceptron import Network
from numfuse.problem.jets import Stack, outputs
from numfuse.problem.operands import output, shaped
from numfuse.problem.results import NetworkGradients, NetworkJet, network_outputs

#: An array of a device, with the views of NumPy's (`numfuse.runtime.views.GhostViews`).
Array: TypeAlias = Any
#: Constants by device and content: directions, and zeros.
_CONSTANTS: WeakKeyDictionary[Any, dict[Any, Array]] = WeakKeyDictionary()
_MOST_CONSTANTS = 64
#: From so many bytes of the first layer's tangents on, their product is of one row each: a forward
#: and a backward then write and read these 5 times less, and take three launches more, of about
#: 2 us each. At 3 TB/s the two are equal at 3.6 MB.
SHARED_BYTES = 4 << 20
#: The most directions of it: the backward has a sum of each in registers.
MOST_SHARED = 4


@dataclass
class Kept:
    """The stacks of each layer's inputs and of its sums, as a forward keeps them."""

    inputs: list[Array]
    sums: list[Array]


def _same(x: Any) -> Any:
    return x


def _sum(x: Any, y: Any) -> Any:
    return x + y


class DeviceNetwork:
    """A network whose arrays are on a device; `net` has the checks and the sizes of the call."""

    def __init__(
        self, put: Callable[[ndarray, Any], Array], kind: Any, name: str, x: Any,
        weights: Any, biases: Any, *how: Any,
    ) -> None:  # fmt: skip
        if not isinstance(x, kind):
            kinds = "NumPy arrays or numfuse's own (numfuse.to_device)"
            raise TypeError(
                f"{name} must have {kinds}, got {type(x).__module__}.{type(x).__qualname__}"
            )
        self.put, self.device, self.kind = put, x.device, kind

        def like(y: Any) -> Any:
            if y is None or not hasattr(y, "dtype"):
                return y
            return np.broadcast_to(np.zeros((), y.dtype), y.shape)

        def each(y: Any) -> Any:
            return [like(one) for one in y] if isinstance(y, Sequence) else y

        self.net = Network(name, like(x), each(weights), each(biases), *how)
        self.x, self.weights = x, weights
        self.biases = (None,) * len(weights) if biases is None else tuple(biases)
        self.backend = self.net.backend
        named = {"x": x} | {f"weights[{i}]": y for i, y in enumerate(weights)}
        named |= {f"biases[{i}]": y for i, y in enumerate(self.biases)}
        self.check(named)
        self.ghosts = {label: y.ghost for label, y in named.items() if y is not None}

    def check(self, arrays: dict[str, Any]) -> None:
        """Raise TypeError for an array that is not on the device."""
        for label, y in arrays.items():
            if y is not None and (not isinstance(y, self.kind) or y.device is not self.device):
                raise TypeError(
                    f"{label} must be an array on {self.device} as x, got {type(y).__name__}"
                )

    # --- arrays -------------------------------------------------------------------------------
    def constant(self, x: ndarray, shape: tuple[int, ...]) -> Array:
        """Return an array of the host, repeated along leading axes."""
        known = _CONSTANTS.setdefault(self.device, {})
        x = x.astype(self.x.dtype)
        key = x.shape, x.dtype, x.tobytes()
        if key not in known:
            if len(known) >= _MOST_CONSTANTS:
                known.clear()
            known[key] = self.put(x, self.device)
        made = known[key]
        return made._view(np.broadcast_to(made.ghost, shape))

    def copy(self, source: Array | None, target: Array) -> None:
        """Write `target`; None is zero."""
        if target.size:
            if source is None:
                source = self.constant(np.zeros((1,) * target.ndim), target.shape)
            elementwise(_same, source, out=target, backend=self.backend)

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Return a new array of any content."""
        return self.kind.empty(self.device, shape, self.x.dtype)

    def views(self, stack: Array, whole: bool = True) -> list[Array]:
        """Return the value, the directions and the second derivatives of a stack."""
        axis, d = stack.ndim - 2, self.net.directions
        rest = stack.transpose((axis, *range(axis), axis + 1))
        return [rest[0], rest[1 : 1 + d], rest[1 + d :] if whole else None]

    @property
    def shared(self) -> bool:
        """Whether the first layer's tangents are one row for all points."""
        net, single = self.net, len(self.weights) == 1 and self.net.plain
        nbytes = prod(net.shape(0, net.x.shape[-2], net.directions)) * self.x.dtype.itemsize
        return 0 < net.directions <= MOST_SHARED and nbytes >= SHARED_BYTES and not single

    def form(self, layer: int) -> tuple[Stack, Array | None]:
        """Return the form of a layer's call, and the tangents that are one row for all points."""
        form = self.net.stack(layer)
        if layer or not self.shared:
            return form, None
        return form._replace(shared=True), self.constant(self.net.units, self.net.units.shape)

    # --- forward ------------------------------------------------------------------------------
    def first(self) -> Array:
        """Return the stack of the first layer's inputs."""
        x = self.x
        stack = self.empty((*x.shape[:-1], self.net.members(0), x.shape[-1]))
        self.copy(x, stack[..., 0, :])
        directions = stack[..., 1:, :]
        self.copy(self.constant(self.net.units, directions.shape), directions)
        return stack

    def run(self, keep: bool, out: Sequence[Array] | None) -> Kept:
        """Run all layers; return what is kept. Without `out` no result is made."""
        net, last = self.net, len(self.weights) - 1
        kept = Kept([self.x if self.shared else self.first()], [])
        for layer, (w, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            stack = kept.inputs[-1]
            if layer == last and (out is None or net.plain):
                if out is not None:
                    self._last(stack, *out)
                break
            form, dots = self.form(layer)
            flags = net.guard, keep, net.pattern, form
            operands = stack, w, bias, dots, None, net.weights
            how = net.layers[layer][2], flags, (), None, self.backend
            made, _, _, *sums = FORWARD(operands, *how)
            kept.sums += sums[:1]
            kept.inputs.append(made)
            if layer == last and out is not None:
                for source, target in zip(self.views(made), out, strict=True):
                    self.copy(source, target)
        return kept

    def _last(self, stack: Array, u: Array, u_dot: Array, u_ddot: Array) -> None:
        """Run a last layer that is a product alone: of all members at once."""
        w, bias = self.weights[-1], self.biases[-1]
        made = matmul_bias_activation(_tall(stack), w, backend=self.backend)
        made = made.reshape(*made.shape[:-2], *stack.shape[-3:-1], made.shape[-1])
        value, dot, ddot = self.views(made, len(self.weights) > 1)
        if bias is None or not value.size:
            self.copy(value, u)
        else:
            line = bias if bias.ndim > 1 else bias.reshape(1, *bias.shape)
            elementwise(_sum, value, line, out=u, backend=self.backend)
        self.copy(dot, u_dot)
        self.copy(ddot, u_ddot)

    # --- backward -----------------------------------------------------------------------------
    def grads(self, given: Sequence[Array | None]) -> Array:
        """Return the stack of the cotangents of the results."""
        net, last = self.net, len(self.weights) - 1
        members = net.members(last if net.plain else 1)
        value = net.shapes[0]
        stack = self.empty((*value[:-1], members, value[-1]))
        for source, target in zip(given, self.views(stack, last > 0 or not net.plain), strict=True):
            if target is not None:
                self.copy(source, target)
        return stack

    def back(
        self, given: Sequence[Array | None], kept: Kept, needs: Sequence[str],
        out: Mapping[str, Array],
    ) -> tuple[Array | None, list[Array | None], list[Array | None]]:  # fmt: skip
        """Return the gradients of x, and of each layer's weights and bias; `out` has some."""
        net, grads, d_x = self.net, self.grads(given), None
        d_weights: list[Array | None] = [None] * len(self.weights)
        d_biases = list(d_weights)
        for layer in range(len(self.weights) - 1, -1, -1):
            w, bias, stack = self.weights[layer], self.biases[layer], kept.inputs[layer]
            asked = ("b", "weights"), ("bias", "biases")
            wanted = [y for y, of in asked if of in needs and (y != "bias" or bias is not None)]
            wanted += ["a"] if layer or "x" in needs else []
            outs = [out.get(f"d_{group}[{layer}]") for group in ("weights", "biases")]
            if layer == len(self.weights) - 1 and net.plain:
                found = self._back_last(grads, stack, wanted, *outs)
            else:
                sums = kept.sums[layer] if layer < len(kept.sums) else None
                form, dots = self.form(layer)
                operands = grads, None, None, stack, w, bias, dots, None, net.weights
                flags = net.guard, False, net.pattern, form
                saved = sums, None, None
                into = (None, *outs, None, None) if any(y is not None for y in outs) else None
                how = net.layers[layer][2], flags, tuple(wanted), into, self.backend
                found = BACKWARD((*operands, *saved), *how)[:3]
            grads, d_weights[layer], d_biases[layer] = found
            d_x = grads
        if d_x is not None and not self.shared:
            d_x = d_x[..., 0, :]
        return d_x, d_weights, d_biases

    def _back_last(
        self, grads: Array, stack: Array, wanted: Sequence[str], d_b: Any, d_bias: Any
    ) -> list[Array | None]:
        """Return (d_a, d_b, d_bias) of a last layer that is a product alone.

        `d_b` and `d_bias` are where to write, if they are arrays.
        """
        w, bias = self.weights[-1], self.biases[-1]
        needs = tuple(y for y in wanted if y != "bias")
        tall = _tall(grads), _tall(stack), w
        outs = None if d_b is None else (None, d_b, None)
        made = matmul_bias_activation_bwd(*tall, needs=needs, out=outs, backend=self.backend)
        found: list[Array | None] = [*made]
        if found[0] is not None:
            found[0] = found[0].reshape(stack.shape)
        if "bias" in wanted:
            value = grads[..., 0, :], stack[..., 0, :], w, bias
            outs = None if d_bias is None else (None, None, d_bias)
            how: Any = {"needs": ("bias",), "out": outs, "backend": self.backend}
            made = matmul_bias_activation_bwd(*value, **how)
            found[2] = made.d_bias
        return found


def _tall(stack: Array) -> Array:
    *batch, m, members, k = stack.shape
    return stack.reshape(*batch, m * members, k)


def network(put: Callable[[ndarray, Any], Array], kind: Any) -> Callable[..., Any]:
    """Return what runs networks' jets of a kind of arrays; `put` copies one to a device."""

    def run(
        grads: Sequence[Any] | None, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
        form: tuple[Any, Any], keep: Any, needs: Sequence[str], out: Any = None,
    ) -> Any:  # fmt: skip
        """Return a forward's results or, with `grads`, the gradients; `keep`: what it kept."""
        activation, final, guard, backend = how
        name = "mlp_jet" if grads is None else "mlp_jet_bwd"
        rest = activation, *form, final, guard, backend
        net = DeviceNetwork(put, kind, name, x, weights, biases, *rest)
        if grads is None:
            return _forward(net, keep, out)
        return _backward(net, grads, x, keep, needs, out)

    return run


def _forward(net: DeviceNetwork, keep: bool, out: Any) -> Any:
    results = []
    names = ("u", "u_dot", "u_ddot")
    for name, y, shape in zip(names, outputs(out, (), 3), net.net.shapes, strict=True):
        net.check({name: y})
        if y is not None:
            output(name, y.ghost, shape, net.net.dtype, net.ghosts)
            net.ghosts[name] = y.ghost
        results.append(net.empty(shape) if y is None else y)
    kept = net.run(keep, results)
    found = NetworkJet(*results)
    return (found, kept) if keep else found


def _backward(
    net: DeviceNetwork, grads: Sequence[Any], x: Any, kept: Any, needs: Sequence[str], out: Any
) -> NetworkGradients:
    names = ("grad", "grad_dot", "grad_ddot")
    for name, y, shape in zip(names, grads, net.net.shapes, strict=True):
        net.check({name: y})
        if y is not None:
            shaped(y.ghost, name, shape)
            net.ghosts[name] = y.ghost

    def seen(name: str, y: Any) -> Any:
        net.check({name: y})
        return y.ghost

    groups = "x", "weights", "biases"
    how = groups, needs, net.net.operand_shapes, net.net.dtype, net.ghosts, seen
    outs = network_outputs(out, *how)
    d_x, d_weights, d_biases = net.back(grads, kept or net.run(True, None), needs, outs)
    pairs = (("weights", d_weights), ("biases", d_biases))
    found = [tuple(made) if name in needs else None for name, made in pairs]
    if "x" not in needs:
        return NetworkGradients(None, *found)
    made = outs["d_x"] if "d_x" in outs else net.empty(x.shape)
    net.copy(d_x, made)
    return NetworkGradients(made, *found)
