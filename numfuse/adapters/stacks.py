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

import numpy as np
from numpy import ndarray

from numfuse.functional import matmul_bias_activation, matmul_bias_activation_bwd
from numfuse.fusion import elementwise
from numfuse.jets import BACKWARD, FORWARD
from numfuse.kept import check_kept, given_back
from numfuse.perceptron import Network
from numfuse.problem.jets import Stack, outputs
from numfuse.problem.operands import output, shaped
from numfuse.problem.results import NetworkGradients, NetworkJet, network_outputs

#: An array of a device, with NumPy's shape, slices and reshape.
Array: TypeAlias = Any
_MOST_CONSTANTS = 64
#: From so many bytes of the first layer's tangents on, their product is of one row each: a forward
#: and a backward then write and read these 5 times less, and take three launches more, of about
#: 2 us each. At 3 TB/s the two are equal at 3.6 MB.
SHARED_BYTES = 4 << 20
#: The most directions of it, where layers are no chain: a backward has sums of each in registers.
MOST_SHARED = 4


@dataclass
class Kept:
    """The stacks of each layer's inputs and of its sums, as a forward keeps them."""

    inputs: list[Array]
    sums: list[Array]
    #: What a kernel of all layers keeps instead.
    whole: Array | None = None


def _same(x: Any) -> Any:
    return x


def _sum(x: Any, y: Any) -> Any:
    return x + y


class Arrays:
    """Operations of a network on arrays of a kind, beside its layers: numfuse's own of a device.

    `put` copies an array of the host to a device.
    """

    def __init__(self, put: Callable[[ndarray, Any], Array], kind: Any) -> None:
        self.put, self.kind = put, kind
        #: Constants by device and content: directions, and zeros.
        self._constants: dict[Any, Array] = {}

    def ghost(self, x: Array) -> ndarray:
        """Return an array without memory that has the place and the strides of another one."""
        found: ndarray = x.ghost
        return found

    def place(self, x: Array) -> Any:
        """Return what tells an array's device from others."""
        return x.device

    def dtype(self, x: Array) -> np.dtype[Any]:
        """Return an array's dtype as NumPy has it."""
        found: np.dtype[Any] = x.dtype
        return found

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return a new array of any content, of the dtype and on the device of another one."""
        return self.kind.empty(like.device, shape, like.dtype)

    def constant(self, x: ndarray, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an array of the host, repeated along leading axes."""
        x = x.astype(self.dtype(like))
        key = self.place(like), x.shape, x.dtype, x.tobytes()
        if key not in self._constants:
            if len(self._constants) >= _MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = self.put(x, like.device)
        return self.repeated(self._constants[key], shape)

    def repeated(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return a view of a larger shape."""
        return x._view(np.broadcast_to(x.ghost, shape))

    def turned(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Return a view with the axes in another order."""
        return x.transpose(axes)

    def copy(self, source: Array | None, target: Array) -> None:
        """Write `target`; None is zero."""
        if target.size:
            if source is None:
                source = self.constant(np.zeros((1,) * target.ndim), target, target.shape)
            elementwise(_same, source, out=target)

    def add(self, x: Array, y: Array, out: Array) -> None:
        """Write x + y."""
        elementwise(_sum, x, y, out=out)

    def compact(self, x: Array) -> Array:
        """Return a copy in C order."""
        made = self.empty(x, tuple(x.shape))
        self.copy(x, made)
        return made

    def jet(self, operation: Any, *call: Any) -> Any:
        """Return the results of a layer's operation."""
        return operation(*call)

    def whole(self, network: DeviceNetwork, backward: bool, more: bool = False) -> Any:
        """Return what runs all layers in one kernel (`cuda_whole.Whole`); None: nothing does.

        `more` says that a gradient by x is needed, or that gradients are to be written somewhere.
        """

    def chains(self, net: Network) -> bool:
        """Return whether a backward goes from gradients by sums to those (`Stack.behind`)."""
        return False

    def product(self, a: Array, b: Array, backend: Any) -> Array:
        """Return a product of matrices."""
        return matmul_bias_activation(a, b, backend=backend)

    def product_bwd(self, *operands: Any, **how: Any) -> Any:
        """Return the gradients of a product."""
        return matmul_bias_activation_bwd(*operands, **how)


def refuse_kind(name: str, x: Any, more: str = "") -> TypeError:
    """Return the error of a function for an x of no kind that it serves."""
    kinds = f"NumPy arrays or numfuse's own (numfuse.to_device){more}"
    return TypeError(f"{name} must have {kinds}, got {type(x).__module__}.{type(x).__qualname__}")


class DeviceNetwork:
    """A network whose arrays are on a device; `net` has the checks and the sizes of the call."""

    def __init__(
        self, arrays: Arrays, name: str, x: Any, weights: Any, biases: Any, *how: Any
    ) -> None:
        self.arrays, self.device = arrays, getattr(x, "device", None)

        def like(y: Any) -> Any:
            if not isinstance(y, arrays.kind):
                return y
            return np.broadcast_to(np.zeros((), arrays.dtype(y)), tuple(y.shape))

        def each(y: Any) -> Any:
            return [like(one) for one in y] if isinstance(y, Sequence) else y

        named = {"x": x} | {f"weights[{i}]": y for i, y in enumerate(weights)}
        named |= {f"biases[{i}]": y for i, y in enumerate(biases or ())}
        self.check(named)
        self.net = Network(name, like(x), each(weights), each(biases), *how)
        self.x, self.weights = x, weights
        self.biases = (None,) * len(weights) if biases is None else tuple(biases)
        self.backend = self.net.backend
        self.named = {label: y for label, y in named.items() if y is not None}

    def check(self, arrays: dict[str, Any]) -> None:
        """Raise TypeError for an array that is not on the device."""
        for label, y in arrays.items():
            if y is None:
                continue
            if not isinstance(y, self.arrays.kind) or y.device != self.device:
                place = f" on {y.device}" if hasattr(y, "device") else ""
                raise TypeError(
                    f"{label} must be an array on {self.device} as x, got {type(y).__name__}{place}"
                )

    def ghosts(self) -> dict[str, ndarray]:
        """Return where the operands lie, for outputs that may not overlap them."""
        return {label: self.arrays.ghost(y) for label, y in self.named.items()}

    # --- arrays -------------------------------------------------------------------------------
    def empty(self, shape: tuple[int, ...]) -> Array:
        """Return a new array of any content."""
        return self.arrays.empty(self.x, shape)

    def views(self, stack: Array, whole: bool = True) -> list[Array]:
        """Return the value, the directions and the second derivatives of a stack."""
        axis, d = stack.ndim - 2, self.net.directions
        rest = self.arrays.turned(stack, (axis, *range(axis), axis + 1))
        return [rest[0], rest[1 : 1 + d], rest[1 + d :] if whole else None]

    @property
    def shared(self) -> bool:
        """Whether the first layer's tangents are one row for all points."""
        net, single = self.net, len(self.weights) == 1 and self.net.plain
        nbytes = prod(net.shape(0, net.x.shape[-2], net.directions)) * self.x.dtype.itemsize
        few = net.directions <= MOST_SHARED or self.arrays.chains(net)
        return few and net.directions > 0 and nbytes >= SHARED_BYTES and not single

    def form(self, layer: int) -> tuple[Stack, Array | None]:
        """Return the form of a layer's call, and the tangents that are one row for all points."""
        form = self.net.stack(layer)
        if layer or not self.shared:
            return form, None
        return form._replace(shared=True), self.arrays.constant(
            self.net.units, self.x, self.net.units.shape
        )

    # --- forward ------------------------------------------------------------------------------
    def first(self) -> Array:
        """Return the stack of the first layer's inputs."""
        x, arrays = self.x, self.arrays
        stack = self.empty((*x.shape[:-1], self.net.members(0), x.shape[-1]))
        arrays.copy(x, stack[..., 0, :])
        directions = stack[..., 1:, :]
        arrays.copy(arrays.constant(self.net.units, x, directions.shape), directions)
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
            made, _, _, *sums = self.arrays.jet(FORWARD, operands, *how)
            kept.sums += sums[:1]
            kept.inputs.append(made)
            if layer == last and out is not None:
                for source, target in zip(self.views(made), out, strict=True):
                    self.arrays.copy(source, target)
        return kept

    def _last(self, stack: Array, u: Array, u_dot: Array, u_ddot: Array) -> None:
        """Run a last layer that is a product alone: of all members at once."""
        w, bias, arrays = self.weights[-1], self.biases[-1], self.arrays
        made = arrays.product(_tall(stack), w, self.backend)
        made = made.reshape(*made.shape[:-2], *stack.shape[-3:-1], made.shape[-1])
        value, dot, ddot = self.views(made, len(self.weights) > 1)
        if bias is None or 0 in value.shape:
            arrays.copy(value, u)
        else:
            line = bias if bias.ndim > 1 else bias.reshape(1, *bias.shape)
            arrays.add(value, line, u)
        arrays.copy(dot, u_dot)
        arrays.copy(ddot, u_ddot)

    # --- backward -----------------------------------------------------------------------------
    def grads(self, given: Sequence[Array | None]) -> Array:
        """Return the stack of the cotangents of the results."""
        net, last = self.net, len(self.weights) - 1
        members = net.members(last if net.plain else 1)
        value = net.shapes[0]
        stack = self.empty((*value[:-1], members, value[-1]))
        for source, target in zip(given, self.views(stack, last > 0 or not net.plain), strict=True):
            if target is not None:
                self.arrays.copy(source, target)
        return stack

    def back(
        self, given: Sequence[Array | None], kept: Kept, needs: Sequence[str],
        out: Mapping[str, Array],
    ) -> tuple[Array | None, list[Array | None], list[Array | None]]:  # fmt: skip
        """Return the gradients of x, and of each layer's weights and bias; `out` has some."""
        net, grads, d_x = self.net, self.grads(given), None
        # in a chain: the weights behind, where `grads` are by the sums of their layer
        chain, behind = len(self.weights) > 1 and self.arrays.chains(net), None
        d_weights: list[Array | None] = [None] * len(self.weights)
        d_biases = list(d_weights)
        for layer in range(len(self.weights) - 1, -1, -1):
            w, bias, stack = self.weights[layer], self.biases[layer], kept.inputs[layer]
            asked = ("b", "weights"), ("bias", "biases")
            wanted = [y for y, of in asked if of in needs and (y != "bias" or bias is not None)]
            wanted += ["a"] if layer or "x" in needs else []
            outs = [out.get(f"d_{group}[{layer}]") for group in ("weights", "biases")]
            if layer == len(self.weights) - 1 and net.plain:
                own = [y for y in wanted if y != "a"] if chain else wanted
                found = self._back_last(grads, stack, own, *outs)
                found[0] = grads if chain else found[0]
            else:
                sums = kept.sums[layer] if layer < len(kept.sums) else None
                form, dots = self.form(layer)
                if behind is not None:
                    form = form._replace(behind=behind.shape[-1])
                form = form._replace(by_sums=chain and layer > 0)
                operands = grads, behind, None, stack, w, bias, dots, None, net.weights
                flags = net.guard, False, net.pattern, form
                saved = sums, None, None
                into = (None, *outs, None, None) if any(y is not None for y in outs) else None
                how = net.layers[layer][2], flags, tuple(wanted), into, self.backend
                found = self.arrays.jet(BACKWARD, (*operands, *saved), *how)[:3]
            grads, d_weights[layer], d_biases[layer] = found
            behind = w if chain else None
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
        w, bias, backward = self.weights[-1], self.biases[-1], self.arrays.product_bwd
        needs = tuple(y for y in wanted if y != "bias")
        tall = _tall(grads), _tall(stack), w
        outs = None if d_b is None else (None, d_b, None)
        found: list[Array | None] = [None, None, None]
        if needs:
            found = [*backward(*tall, needs=needs, out=outs, backend=self.backend)]
        if found[0] is not None:
            found[0] = found[0].reshape(stack.shape)
        if "bias" in wanted:
            value = grads[..., 0, :], stack[..., 0, :], w, bias
            outs = None if d_bias is None else (None, None, d_bias)
            how: Any = {"needs": ("bias",), "out": outs, "backend": self.backend}
            made = backward(*value, **how)
            found[2] = made.d_bias
        return found


def _tall(stack: Array) -> Array:
    *batch, m, members, k = stack.shape
    return stack.reshape(*batch, m * members, k)


def network(arrays_of: Callable[[str, Any], Arrays]) -> Callable[..., Any]:
    """Return what runs networks' jets; `arrays_of` is given a function's name and x."""

    def run(
        grads: Sequence[Any] | None, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
        form: tuple[Any, Any], keep: Any, needs: Sequence[str], out: Any = None,
    ) -> Any:  # fmt: skip
        """Return a forward's results or, with `grads`, the gradients; `keep`: what it kept."""
        activation, final, guard, backend = how
        name = "mlp_jet" if grads is None else "mlp_jet_bwd"
        rest = activation, *form, final, guard, backend
        net = DeviceNetwork(arrays_of(name, x), name, x, weights, biases, *rest)
        if grads is None:
            return forward(net, keep, out)
        return backward(net, grads, keep, needs, out)

    return run


def forward(net: DeviceNetwork, keep: bool, out: Any) -> Any:
    """Return the results; with `keep`, also what a backward takes."""
    results, given = [], outputs(out, (), 3)
    ghosts = net.ghosts() if out is not None else {}
    for name, y, shape in zip(("u", "u_dot", "u_ddot"), given, net.net.shapes, strict=True):
        net.check({name: y})
        if y is not None:
            ghost = net.arrays.ghost(y)
            output(name, ghost, shape, net.net.dtype, ghosts)
            ghosts[name] = ghost
        results.append(net.empty(shape) if y is None else y)
    whole = net.arrays.whole(net, False)
    if whole is None or (keep and net.arrays.whole(net, True) is None):
        kept = net.run(keep, results)
    else:
        kept = Kept([], [], whole.forward(results, keep))
    found = NetworkJet(*results)
    return (found, kept) if keep else found


def backward(
    net: DeviceNetwork, grads: Sequence[Any], kept: Any, needs: Sequence[str], out: Any
) -> NetworkGradients:
    """Return the gradients that are needed."""
    there = given_back(kept) is not None
    names = ("grad", "grad_dot", "grad_ddot")
    for name, y, shape in zip(names, grads, net.net.shapes, strict=True):
        net.check({name: y})
        if y is not None:
            ghost = net.arrays.ghost(y)
            shaped(ghost, name, shape)
            net.named[name] = y

    def seen(name: str, y: Any) -> Any:
        net.check({name: y})
        return net.arrays.ghost(y)

    ghosts = net.ghosts() if out is not None else {}
    groups = "x", "weights", "biases"
    how = groups, needs, net.net.operand_shapes, net.net.dtype, ghosts, seen
    outs = network_outputs(out, *how)
    whole = net.arrays.whole(net, True, "x" in needs or bool(outs))
    if whole is not None:
        d_x, d_weights, d_biases = whole.backward(grads, kept and kept.whole, needs, outs)
    else:
        if there:
            check_kept(kept, len(net.weights), net.x)
        made = kept if there else net.run(True, None)
        d_x, d_weights, d_biases = net.back(grads, made, needs, outs)
    pairs = (("weights", d_weights), ("biases", d_biases))
    found = [tuple(made) if name in needs else None for name, made in pairs]
    if "x" not in needs:
        return NetworkGradients(None, *found)
    made = d_x
    if whole is None:
        made = outs["d_x"] if "d_x" in outs else net.empty(net.x.shape)
        net.arrays.copy(d_x, made)
    return NetworkGradients(made, *found)
