"""A multilayer perceptron as the layers' jets see it: stacks, layer by layer.

Between layers the value, the directions and the second derivatives of a point lie one behind the
other, (..., M, 1 + D + S, width), as the layers' kernels read and write them. The tangents of the
first layer's input are constants and its second derivatives zero; an identity at the end is one
product over all rows. Half types are widened first, and results rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.functional import BackendLike, matmul_bias_activation, matmul_bias_activation_bwd
from numfuse.jets import BACKWARD, FORWARD, weights_of
from numfuse.packs import Packed
from numfuse.problem.jets import Stack
from numfuse.problem.operands import array_of, as_plain, check_group, check_sequence, same_dtype
from numfuse.runtime.dispatch import adapter_for
from numfuse.runtime.slabs import Slab
from numfuse.tiling import round_up

#: Bytes that a block of points may have between layers; beyond, points go by several blocks.
BLOCK_BYTES = 8 << 20
#: What NumPy does with an overflow or underflow when a result is rounded: nothing, as the kernels.
silently = np.errstate(all="ignore")


@silently
def rounded(x: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array, or those of a tuple, in a dtype: itself where it has it. None is None."""
    if isinstance(x, tuple):
        return tuple([rounded(y, dtype) for y in x])
    return None if x is None else x.astype(dtype, copy=False)


@silently
def store(target: ndarray, x: ndarray) -> None:
    """Write an array's values, rounded, to where they go."""
    target[...] = x


@silently
def added(x: ndarray, y: ndarray) -> ndarray:
    """Return the sum of two arrays."""
    return x + y


class Memory:
    """The stacks of a block of points, which every block has in the same places."""

    def __init__(
        self, net: Network, points: int, keep: bool, grads: bool, first: bool = True
    ) -> None:
        layers = range(len(net.layers))
        each = [
            points * prod(net.batches[i + 1]) * w.shape[-1]
            for i, (w, _, _) in enumerate(net.layers)
        ]
        first_input = points * prod(net.batches[0]) * net.x.shape[-1]
        # (the gradients of x, too, are a stack)
        widest = max(first_input, *each) * net.members(1)
        self.count = len(net.layers)
        self.keep = keep
        inputs = [first_input * net.members(0)]
        inputs += [each[i] * net.members(1) for i in layers] if keep else [widest] * 2
        sums = [each[i] * net.members(i) for i in layers] if keep else []
        sizes = [
            *(inputs if first else ()),
            *(sums if first else ()),
            *([widest] * 2 if grads else ()),
        ]
        self.dtype, self.firsts = (
            net.acc,
            (0, len(inputs) * first, (len(inputs) + len(sums)) * first),
        )
        self.slab = Slab([size * net.acc.itemsize for size in sizes])

    def stack(self, layer: int, shape: tuple[int, ...]) -> ndarray:
        """Return room for the stack of a layer's inputs."""
        region = layer if self.keep or not layer else 1 + layer % 2
        return self.slab.array(region, shape, self.dtype)

    def sums(self, layer: int, shape: tuple[int, ...]) -> ndarray:
        """Return room for the stack of a layer's sums."""
        return self.slab.array(self.firsts[1] + layer, shape, self.dtype)

    def grads(self, layer: int, shape: tuple[int, ...]) -> ndarray:
        """Return room for the stack of the gradients of a layer's inputs."""
        return self.slab.array(self.firsts[2] + layer % 2, shape, self.dtype)


def sequences(
    weights: Any, biases: Any, activation: Any, final: Any
) -> tuple[Sequence[Any], Sequence[Any], tuple[Any, ...]]:
    """Return weights, biases and activations, one of each for every layer."""
    check_sequence(weights)
    count = len(weights)
    if biases is None:
        biases = (None,) * count
    check_group("biases", biases, count)
    if isinstance(activation, (str, Activation)):
        activation = (activation,) * (count - 1)
    if len(activation) != count - 1:
        raise ValueError(f"activation must be one or {count - 1}, got {len(activation)}")
    return weights, biases, (*activation, final)


class Network:
    """The operands of a call, checked; `layers` has (weights, bias, activation)."""

    def __init__(
        self, name: str, x: Any, weights: Any, biases: Any, activation: Any, directions: Any,
        second: Any, final: Any, guard: bool, backend: BackendLike,
    ) -> None:  # fmt: skip
        weights, biases, activations = sequences(weights, biases, activation, final)
        named = {"x": x} | {f"weights[{i}]": w for i, w in enumerate(weights)}
        named |= {f"biases[{i}]": y for i, y in enumerate(biases) if y is not None}
        adapter = adapter_for(**named)
        if adapter is not None:
            kind = adapter.__name__.rpartition(".")[2]
            raise TypeError(f"{name} must have NumPy arrays, got those of {kind}")
        plain = {label: as_plain(label, array_of(y)) for label, y in named.items()}
        self.dtype, self.acc = same_dtype(named)
        #: Weights that are packed, in the dtype of the computation.
        self.packed = weights if type(weights) is Packed and self.dtype == self.acc else None
        self.given, self.backend, self.guard = named, backend, bool(guard)
        self.x = x = plain["x"].astype(self.acc, copy=False)
        if x.ndim < 2:
            raise ValueError(f"x must have shape (..., M, d_0), got {x.shape}")
        self.layers: list[tuple[ndarray, ndarray | None, Activation]] = []
        width, self.batches = x.shape[-1], [x.shape[:-2]]
        for i, f in enumerate(activations):
            w, bias = plain[f"weights[{i}]"], plain.get(f"biases[{i}]")
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
                leads = self.batches[-1], w.shape[:-2], own
                self.batches.append(np.broadcast_shapes(*leads) if any(leads[1:]) else leads[0])
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
        # (copies: a call that is repeated has what these held, whatever becomes of them)
        self.units = np.array(rounded(units, self.acc))
        weights, self.pattern = weights_of(second, x, self.units, name="second")
        self.weights = None if weights is None else weights.copy()
        self.directions = len(units)
        self.seconds = self.directions if self.weights is None else len(self.weights)
        #: Where the last layer is a product alone, of all rows.
        self.plain = self.layers[-1][2].is_identity

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the value, the directions and the second derivatives."""
        value = *self.batches[-1], self.x.shape[-2], self.layers[-1][0].shape[-1]
        return value, (self.directions, *value), (self.seconds, *value)

    @property
    def operand_shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each operand, by its name; None of a bias that is None."""
        found: dict[str, tuple[int, ...] | None] = {"x": self.x.shape}
        found |= {f"weights[{i}]": w.shape for i, (w, _, _) in enumerate(self.layers)}
        for i, (_, bias, _) in enumerate(self.layers):
            found[f"biases[{i}]"] = None if bias is None else bias.shape
        return found

    def members(self, layer: int) -> int:
        """Return the rows of a point in the inputs of a layer."""
        return 1 + self.directions + (self.seconds if layer else 0)

    def blocks(self, layers: int) -> list[slice]:
        """Return blocks of points, the largest first; so many layers are held at once."""
        widest = max(w.shape[-1] for w, _, _ in self.layers)
        batch = max(prod(shape) for shape in self.batches)
        one = batch * widest * self.members(1) * self.acc.itemsize * layers
        count, step = self.x.shape[-2], max(256, BLOCK_BYTES // max(1, one))
        pieces = max(1, -(-count // step))
        step = max(1, round_up(-(-count // pieces), 8))
        return [slice(i, min(count, i + step)) for i in range(0, max(1, count), step)]

    # --- layers ---------------------------------------------------------------------------------
    def first(self, rows: slice, memory: Memory) -> ndarray:
        """Return the stack of the first layer's inputs."""
        x = self.x[..., rows, :]
        stack = memory.stack(0, (*x.shape[:-1], self.members(0), x.shape[-1]))
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

    def shape(self, layer: int, points: int, members: int) -> tuple[int, ...]:
        """Return the shape of a stack as wide as a layer's results."""
        return *self.batches[layer + 1], points, members, self.layers[layer][0].shape[-1]

    def stack(self, layer: int) -> Stack:
        """Return the form of a layer's call."""
        return Stack(self.directions, self.seconds, layer > 0 and self.seconds > 0)

    def forward(self, layer: int, stack: ndarray, out: ndarray, sums: ndarray | None) -> None:
        """Run a layer on a stack of inputs."""
        w, bias, f = self.layers[layer]
        flags = self.guard, sums is not None, self.pattern, self.stack(layer)
        outs: tuple[Any, ...] = out, None, None
        if sums is not None:
            outs = *outs, sums, None, None
        operands = stack, w, bias, None, None, self.weights
        FORWARD(operands, f, flags, (), outs, self.backend)

    def last(self, stack: ndarray, out: tuple[ndarray, ndarray, ndarray]) -> None:
        """Run a last layer that is a product alone: of all members at once."""
        w, bias, _ = self.layers[-1]
        made = matmul_bias_activation(tall_of(stack), w, backend=self.backend)
        members = stack.shape[-2]
        made = made.reshape(*made.shape[:-2], stack.shape[-3], members, made.shape[-1])
        value, dot, ddot = self.views(made, len(self.layers) > 1)
        assign(out, (value if bias is None else value + bias, dot, ddot))

    @silently
    def run(
        self, rows: slice, out: tuple[Any, Any, Any] | None, memory: Memory
    ) -> tuple[list[ndarray], list[ndarray]]:
        """Run a block of points through all layers; return what is kept."""
        points, last = rows.stop - rows.start, len(self.layers) - 1
        stack = self.first(rows, memory)
        inputs: list[ndarray] = [stack]
        kept: list[ndarray] = []
        for layer in range(last + 1):
            if layer == last and (self.plain or out is None):
                if out is not None:
                    self.last(stack, out)
                break
            target = memory.stack(layer + 1, self.shape(layer, points, self.members(1)))
            sums = None
            if memory.keep:
                kept.append(
                    sums := memory.sums(layer, self.shape(layer, points, self.members(layer)))
                )
            self.forward(layer, stack, target, sums)
            if layer == last and out is not None:
                assign(out, self.views(target))
            inputs.append(stack := target)
        return inputs, kept

    # --- backward -------------------------------------------------------------------------------
    def grads(self, given: Sequence[ndarray | None], rows: slice, memory: Memory) -> ndarray:
        """Return the stack of the cotangents of a block's results."""
        last = len(self.layers) - 1
        members = self.members(last if self.plain else 1)
        stack = memory.grads(last + 1, self.shape(last, rows.stop - rows.start, members))
        views = self.views(stack, last > 0 or not self.plain)
        assign(views, [None if x is None else x[..., rows, :] for x in given])
        return stack

    def back(
        self, layer: int, grads: ndarray, stack: ndarray, sums: ndarray | None,
        needs: Sequence[str], memory: Memory,
    ) -> Any:  # fmt: skip
        """Return the stack of the gradients of a layer's inputs, and its own gradients."""
        w, bias, f = self.layers[layer]
        wanted = [y for y, of in (("b", "weights"), ("bias", "biases")) if of in needs]
        out = None
        if layer or "x" in needs:
            wanted.append("a")
            out = memory.grads(layer, stack.shape), None, None, None, None
        flags = self.guard, False, self.pattern, self.stack(layer)
        operands = grads, None, None, stack, w, bias, None, None, self.weights, sums, None, None
        return BACKWARD(operands, f, flags, tuple(wanted), out, self.backend)

    @silently
    def back_through(
        self, given: Sequence[ndarray | None], rows: slice, inputs: Sequence[ndarray],
        kept: Sequence[ndarray], needs: Sequence[str], totals: Any, memory: Memory,
    ) -> ndarray | None:  # fmt: skip
        """Add a block's gradients to the totals of each layer; return that of x."""
        layer, d_x, grads = len(self.layers) - 1, None, self.grads(given, rows, memory)
        if self.plain:
            w, bias, _ = self.layers[-1]
            wanted = ("a", "b") if "weights" in needs else ("a",)
            stack = inputs[layer]
            tall = tall_of(grads), tall_of(stack), w
            out = tall_of(memory.grads(layer, stack.shape)), None, None
            how: Any = {"needs": wanted, "out": out, "backend": self.backend}
            d_a, d_b, _ = matmul_bias_activation_bwd(*tall, **how)
            d_bias = None
            if "biases" in needs and bias is not None and given[0] is not None:
                layer_of = given[0][..., rows, :], stack[..., 0, :], w, bias
                how |= {"needs": ("bias",), "out": None}
                d_bias = matmul_bias_activation_bwd(*layer_of, **how).d_bias
            add(totals[layer], d_b, d_bias)
            grads = d_a.reshape(stack.shape)
            d_x = grads[..., 0, :]
            layer -= 1
        for i in range(layer, -1, -1):
            sums = kept[i] if i < len(kept) else None
            found = self.back(i, grads, inputs[i], sums, needs, memory)
            add(totals[i], found.d_b, found.d_bias)
            if found.d_a is not None:
                grads, d_x = found.d_a, found.d_a[..., 0, :]
        return d_x


def assign(targets: Sequence[Any], values: Sequence[Any]) -> None:
    """Write values, where there is room for them; None is zero."""
    for to, x in zip(targets, values, strict=True):
        if to is not None and to.size:
            to[...] = 0 if x is None else x


def add(totals: list[Any], *found: Any) -> None:
    for i, x in enumerate(found):
        if x is not None:
            totals[i] = x if totals[i] is None else totals[i] + x


def tall_of(stack: ndarray) -> ndarray:
    *batch, m, members, k = stack.shape
    return stack.reshape(*batch, m * members, k)
