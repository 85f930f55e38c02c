"""Networks' values that one kernel makes, and gradients that one makes, on a CUDA device's arrays.

A call is recorded and repeated as every operation is (`call.entry`). Which networks have such a
kernel is `plan.networks`' to say; all others go layer by layer (:mod:`numfuse.chains`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation, get
from numfuse.adapters import cuda_whole
from numfuse.adapters.signatures import Signature
from numfuse.adapters.stacks import Array, Arrays
from numfuse.backends.cuda.call.entry import run
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.plan.half_sizes import HALF_DTYPES, HalfSizes, half_sizes_of
from numfuse.backends.cuda.plan.networks import Sizes, sizes_of
from numfuse.backends.cuda.plan.product import DeviceInfo
from numfuse.errors import BackendUnavailable
from numfuse.operations import Operation
from numfuse.problem.networks import NetworkProblem
from numfuse.problem.operands import output
from numfuse.problem.results import NetworkGradients


class ValueOperation(Operation):
    """The value of a network of so many layers, or its gradients.

    `moves` says that the gradient by the points is made; `length` is the number of values of the
    array that has all gradients by weights and biases.
    """

    def __init__(self, layers: int, backward: bool) -> None:
        self.name, self.kind = ("mlp_bwd" if backward else "mlp"), "network"
        self.layers, self.backward = layers, backward
        self.mark = "network value", layers, backward
        named = [f"{name}_{i}" for name in ("weights", "biases") for i in range(layers)]
        self.operands = ["points", *named, *(["grad"] if backward else [])]
        self.needs = ()
        self.flags = ["guard", "moves", "length"]
        self.options = ["activation", "out", *self.flags]
        self.results = ("d_points", "flat") if backward else ("u",)
        self.fields = (*self.operands, *self.results)
        self.several = self.in_place = False
        self.problem = self._problem

    def label(self, name: str) -> str:
        """Return what a message calls an array."""
        group, _, number = name.rpartition("_")
        named = {"points": "x", "u": "out"}
        return f"{group}[{number}]" if group in ("weights", "biases") else named.get(name, name)

    def _problem(
        self, activation: Activation, out: Any, guard: bool, moves: bool, length: int,
        **given: ndarray | None,
    ) -> NetworkProblem:  # fmt: skip
        arrays = {name: y for name, y in given.items() if y is not None}
        x = arrays["points"]
        widths = x.shape[1], *(arrays[f"weights_{i}"].shape[1] for i in range(self.layers))
        results: Any
        if self.backward:
            results = np.empty(x.shape, x.dtype) if moves else None, np.empty(length, x.dtype)
            arrays |= {n: y for n, y in zip(self.results, results, strict=True) if y is not None}
        else:
            shape = len(x), widths[-1]
            if out is None:
                results = np.empty(shape, x.dtype)
            else:
                others = {self.label(name): y for name, y in arrays.items()}
                results = output("out", out, shape, x.dtype, others)
            arrays["u"] = results
        every = (*[activation] * (self.layers - 1), get("none"))
        how = every, widths, len(x), x.dtype, np.zeros((0, widths[0]), x.dtype), None, b"", 0
        return NetworkProblem(*how, guard, self.backward, False, False, arrays, results)


class _Signature(Signature):
    """The arguments of a network's value."""

    def __init__(self, operation: ValueOperation) -> None:
        super().__init__(operation)
        self._results, self.label = operation.results, operation.label

    def arguments(self, operands: Sequence[Any], *call: Any) -> dict[str, Any]:
        """Return the arguments by name, in one form, of a call as `Operation.other` gets it."""
        activation, flags, _, out, backend = call
        x = dict(zip(self.arrays, operands, strict=True))
        x |= zip(self._operation.flags, flags, strict=True)
        return x | {"activation": get(activation), "out": out, "backend": backend}

    def result_names(self, x: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the results."""
        return self._results

    def outs(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs that a call's `out` gives, by the names of its results."""
        return {} if x["out"] is None else {"u": x["out"]}


@functools.cache
def _operation(layers: int, backward: bool) -> ValueOperation:
    return ValueOperation(layers, backward)


def _arguments(operation: ValueOperation, *call: Any) -> tuple[_Signature, dict[str, Any]]:
    signature = _Signature(operation)
    return signature, signature.arguments(*call[:-1])


def _widths(x: Array, weights: Sequence[Array], biases: Sequence[Array | None]) -> Any:
    """Return the widths of a network from x to its result; None where operands do not fit."""
    if len(x.shape) != 2 or not x.shape[0]:
        return None
    found = [x.shape[1]]
    for w, bias in zip(weights, biases, strict=True):
        if len(w.shape) != 2 or w.shape[0] != found[-1] or w.dtype != x.dtype:
            return None
        width = w.shape[1]
        found.append(width)
        if bias is None:
            continue
        if tuple(bias.shape) not in ((width,), (1, width)) or bias.dtype != x.dtype:
            return None
    return tuple(found)


def _hidden(activation: Any, final: Any, count: int) -> Activation | None:
    """Return the one activation of all hidden layers; None where there are others."""
    if not get(final).is_identity:
        return None
    if isinstance(activation, (str, Activation)):
        return get(activation)
    found = {id(f): f for f in map(get, activation)}
    return next(iter(found.values())) if len(found) == 1 and len(activation) == count - 1 else None


@functools.lru_cache(maxsize=512)
def _sizes(
    info: DeviceInfo, dtype: str, widths: tuple[int, ...], backward: bool
) -> Sizes | HalfSizes | None:
    if dtype in HALF_DTYPES:
        return half_sizes_of(info, dtype, widths, backward)
    return sizes_of(info, dtype, widths, 0, 0, backward)


def half_gradients(
    flat: Array, s: HalfSizes, biases: Sequence[Array | None]
) -> tuple[list[Array], list[Array | None]]:
    """Return the gradients by weights and biases: parts of the flat array."""
    to, bias_to = s.ends
    pairs = pairwise(s.widths)
    d_weights = [flat[at : at + k * n].reshape(k, n) for at, (k, n) in zip(to, pairs, strict=True)]
    d_biases = [
        None if bias is None else flat[at : at + n].reshape(tuple(bias.shape))
        for at, n, bias in zip(bias_to, s.widths[1:], biases, strict=True)
    ]
    return d_weights, d_biases


def perceptron(arrays_of: Callable[[str, Any], Arrays]) -> tuple[Callable[..., Any], ...]:
    """Return what runs networks, and what tells whether both directions of one go so.

    The first returns a value or, with a cotangent, the gradients; None where layers run it.
    """

    def served(
        x: Any, weights: Any, biases: Any, how: tuple[Any, ...], backward: bool, grad: Any = None
    ) -> Any:
        """Return the operations of the arrays, the sizes and the activation; None: layers run it.

        They say what is wrong with operands that do not fit.
        """
        if not cuda_whole.ENABLED or len(biases) != len(weights):
            return None
        activation, final, _, _ = how
        try:
            hidden = _hidden(activation, final, len(weights))
            widths = _widths(x, weights, biases)
            if hidden is None or widths is None:
                return None
            if grad is not None and (
                tuple(grad.shape) != (x.shape[0], widths[-1]) or grad.dtype != x.dtype
            ):
                return None
            arrays = arrays_of("mlp", x)
            info, dtype = device(arrays.place(x)).info, arrays.dtype(x).name
            if dtype in HALF_DTYPES and not cuda_whole.HALF:
                return None
        except (AttributeError, BackendUnavailable, TypeError, ValueError):
            return None
        sizes = _sizes(info, dtype, widths, backward)
        return None if sizes is None else (arrays, sizes, hidden)

    def at_once(
        grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...], needs: Sequence[str],
        out: Any,
    ) -> Any:  # fmt: skip
        """Return the value, or the gradients that are needed; None: layers run it."""
        if grad is not None and (out is not None or not needs):
            return None
        own = (None,) * len(weights) if biases is None else biases
        found = served(x, weights, own, how, grad is not None, grad)
        if found is None:
            return None
        arrays, sizes, hidden = found
        _, _, guard, backend = how
        operation = _operation(len(weights), grad is not None)
        operands = x, *weights, *own
        if grad is None:
            flags: Any = (guard, False, 0)
            return run(operation, operands, hidden, flags, (), out, backend, _arguments)
        flags = (guard, "x" in needs, sizes.flat)
        made = run(operation, (*operands, grad), hidden, flags, (), None, backend, _arguments)
        d_x, flat = made

        def compact(y: Array) -> Array:
            target = arrays.empty(x, tuple(y.shape))
            arrays.copy(y, target)
            return target

        if isinstance(sizes, HalfSizes):
            groups: Any = half_gradients(flat, sizes, own)
        else:
            groups = cuda_whole.gradients(flat, sizes, own, compact)
        pairs = zip(("weights", "biases"), groups, strict=True)
        return NetworkGradients(d_x, *[tuple(y) if name in needs else None for name, y in pairs])

    def is_whole(x: Any, weights: Any, biases: Any, how: tuple[Any, ...]) -> bool:
        """Return whether one kernel makes the value, and one the gradients."""
        biases = (None,) * len(weights) if biases is None else biases
        return all(served(x, weights, biases, how, y) is not None for y in (False, True))

    return at_once, is_whole
