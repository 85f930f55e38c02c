"""Networks' values that one kernel makes, and gradients that one makes, on a CUDA device's arrays.

A call is recorded and repeated as every operation is (`call.entry`). Which networks have such a
kernel is `plan.networks`' to say; all others go layer by layer (:mod:`numfuse.chains`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation, get
from numfuse.adapters import cuda_whole
from numfuse.adapters.signatures import Signature, arguments_of
from numfuse.adapters.stacks import Array, Arrays
from numfuse.backends import latest
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
from numfuse.problem.shapes import merge_axes

#: Networks of a call at most: the blocks of a grid along y.
_MOST_NETWORKS = (1 << 16) - 1
#: Rows of x at most: kernels count them, and some beyond, in 32 bits.
_MOST_ROWS = 1 << 30


class ValueOperation(Operation):
    """The value of a network of so many layers, or its gradients.

    `moves` says that the gradient by the points is made; `length` is the shape of the array that
    has all gradients by weights and biases: a row of each network where there are several.
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
        self, activation: Activation, out: Any, guard: bool, moves: bool, length: Any,
        **given: ndarray | None,
    ) -> NetworkProblem:  # fmt: skip
        arrays = {name: y for name, y in given.items() if y is not None}
        x = arrays["points"]
        weights = [arrays[f"weights_{i}"] for i in range(self.layers)]
        widths = x.shape[-1], *(w.shape[-1] for w in weights)
        every = [y for name, y in arrays.items() if name != "u"]
        batch = next((y.shape[:1] for y in every if y.ndim == 3), ())
        results: Any
        if self.backward:
            results = np.empty(x.shape, x.dtype) if moves else None, np.empty(length, x.dtype)
            arrays |= {n: y for n, y in zip(self.results, results, strict=True) if y is not None}
        else:
            shape = *batch, x.shape[-2], widths[-1]
            if out is None:
                results = np.empty(shape, x.dtype)
            else:
                others = {self.label(name): y for name, y in arrays.items()}
                results = output("out", out, shape, x.dtype, others)
            arrays["u"] = results
        functions = (*[activation] * (self.layers - 1), get("none"))
        how = (
            functions,
            widths,
            x.shape[-2],
            x.dtype,
            np.zeros((0, widths[0]), x.dtype),
            None,
            b"",
            0,
        )
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


_arguments = arguments_of(_Signature)


def _form(
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
    flat: Array, s: HalfSizes, biases: Sequence[Array | None], compact: Callable[[Array], Array]
) -> tuple[list[Array], list[Array | None]]:
    """Return the gradients by weights and biases: parts of the flat array.

    Those of several networks lie apart there, and are compact copies.
    """
    (to, bias_to), several = s.ends, len(flat.shape) > 1
    told = latest.call

    def part(at: int, *shape: int) -> Array:
        found = flat[..., at : at + prod(shape)].reshape(*flat.shape[:-1], *shape)
        return compact(found) if several else found

    d_weights = [part(at, *pair) for at, pair in zip(to, pairwise(s.widths), strict=True)]
    d_biases = [
        None if bias is None else part(at, n).reshape(tuple(bias.shape))
        for at, n, bias in zip(bias_to, s.widths[1:], biases, strict=True)
    ]
    latest.call = told  # and not a copy
    return d_weights, d_biases


def _has_axes(x: Any, weights: Sequence[Any]) -> bool:
    """Return whether x has more axes than rows and columns, and there is one network."""
    single = all(len(getattr(w, "shape", ())) == 2 for w in weights)
    return single and len(getattr(x, "shape", ())) > 2


class Values:
    """Networks on a device's arrays, by a kernel each; `arrays_of` is that of `cuda_networks`."""

    def __init__(self, arrays_of: Callable[[str, Any], Arrays]) -> None:
        self._arrays_of = arrays_of

    def _served(
        self, x: Any, weights: Any, biases: Any, how: tuple[Any, ...], backward: bool,
        grad: Any = None, moves: bool = False,
    ) -> Any:  # fmt: skip
        """Return the arrays' operations, the sizes, the activation and the number of networks.

        None: layers run it, and say what is wrong with operands that do not fit.
        """
        if not cuda_whole.ENABLED or len(biases) != len(weights):
            return None
        activation, final, _, _ = how
        try:
            hidden = _hidden(activation, final, len(weights))
            form = _form(x, weights, biases, backward, moves)
            if hidden is None or form is None:
                return None
            widths, networks = form
            shape = *((networks,) if networks else ()), x.shape[-2], widths[-1]
            if grad is not None and (tuple(grad.shape) != shape or grad.dtype != x.dtype):
                return None
            arrays = self._arrays_of("mlp", x)
            info, dtype = device(arrays.place(x)).info, arrays.dtype(x).name
            if dtype in HALF_DTYPES and not cuda_whole.HALF:
                return None
        except (AttributeError, BackendUnavailable, TypeError, ValueError):
            return None
        sizes = _sizes(info, dtype, widths, backward)
        if sizes is None or (networks and not isinstance(sizes, HalfSizes)):
            return None
        return arrays, sizes, hidden, networks

    def _rows(self, x: Any) -> Any:
        """Return a view whose leading axes are one; None where there is none."""
        try:
            ghost = self._arrays_of("mlp", x).ghost(x)
        except (AttributeError, TypeError, ValueError):
            return None
        lengths, _ = merge_axes(ghost.shape[:-1], ghost.strides[:-1])
        return x.reshape(prod(x.shape[:-1]), x.shape[-1]) if len(lengths) < 2 else None

    def at_once(
        self, grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
        needs: Sequence[str], out: Any,
    ) -> Any:  # fmt: skip
        """Return the value or, with a cotangent, the gradients; None: layers run it."""
        if not _has_axes(x, weights):
            return self._of_rows(grad, x, weights, biases, how, needs, out)
        lead = tuple(x.shape[:-1])
        if out is not None or (grad is not None and tuple(grad.shape[:-1]) != lead):
            return None
        points, cotangents = self._rows(x), None if grad is None else self._rows(grad)
        if points is None or (grad is not None and cotangents is None):
            return None
        found = self._of_rows(cotangents, points, weights, biases, how, needs, None)
        if found is None:
            return None
        if grad is None:
            return found.reshape(*lead, found.shape[-1])
        return found._replace(d_x=None if found.d_x is None else found.d_x.reshape(*x.shape))

    def _of_rows(
        self, grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
        needs: Sequence[str], out: Any,
    ) -> Any:  # fmt: skip
        """Return what `at_once` does, of x with rows and columns alone, or of several networks."""
        if grad is not None and (out is not None or not needs):
            return None
        own = (None,) * len(weights) if biases is None else biases
        moves = "x" in needs
        found = self._served(x, weights, own, how, grad is not None, grad, moves)
        if found is None:
            return None
        arrays, sizes, hidden, networks = found
        _, _, guard, backend = how
        operation = _operation(len(weights), grad is not None)
        operands = x, *weights, *own
        if grad is None:
            flags: Any = (guard, False, 0)
            return run(operation, operands, hidden, flags, (), out, backend, _arguments)
        flags = (guard, moves, (networks, sizes.flat) if networks else sizes.flat)
        made = run(operation, (*operands, grad), hidden, flags, (), None, backend, _arguments)
        d_x, flat = made

        if isinstance(sizes, HalfSizes):
            groups: Any = half_gradients(flat, sizes, own, arrays.compact)
        else:
            groups = cuda_whole.gradients(flat, sizes, own, arrays.compact)
        pairs = zip(("weights", "biases"), groups, strict=True)
        return NetworkGradients(d_x, *[tuple(y) if name in needs else None for name, y in pairs])

    def is_whole(self, x: Any, weights: Any, biases: Any, how: tuple[Any, ...]) -> bool:
        """Return whether one kernel makes the value, and one the gradients."""
        biases = (None,) * len(weights) if biases is None else biases
        points = self._rows(x) if _has_axes(x, weights) else x
        if points is None:
            return False
        both = [self._served(points, weights, biases, how, back) for back in (False, True)]
        return None not in both
