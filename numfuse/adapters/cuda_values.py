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
from numfuse.backends.cuda.plan import half_networks
from numfuse.backends.cuda.plan.group_sizes import half_sizes_of
from numfuse.backends.cuda.plan.half_sizes import HALF_DTYPES, HalfSizes
from numfuse.backends.cuda.plan.network_sizes import Sizes, sizes_of
from numfuse.backends.cuda.plan.product import DeviceInfo
from numfuse.errors import BackendUnavailable
from numfuse.operations import Operation
from numfuse.problem.networks import NetworkProblem
from numfuse.problem.operands import output
from numfuse.problem.results import NetworkGradients, NetworkSecondGradients
from numfuse.problem.shapes import merge_axes


class ValueOperation(Operation):
    """The value of a network of so many layers, or its gradients.

    `along` says that there is a tangent of the points, too: then the value has one, and the
    gradients are those of the tangent, by its cotangent.

    `moves` says that the gradient by the points is made; `length` is the shape of the array that
    has all gradients by weights and biases: a row of each network where there are several. `groups`
    is that of `plan.half_networks`: a call is repeated with the kernels that it had.
    """

    def __init__(self, layers: int, backward: bool, groups: Any, along: bool) -> None:
        names = ("mlp_jvp", "mlp_double_bwd") if along else ("mlp", "mlp_bwd")
        self.name, self.kind = names[backward], "network"
        self.layers, self.backward, self.along = layers, backward, along
        self.mark = "network value", layers, backward, along, groups
        named = [f"{name}_{i}" for name in ("weights", "biases") for i in range(layers)]
        named += ["points_dot"] if along else []
        grad = "grad_dot" if along else "grad"
        self.operands = ["points", *named, *([grad] if backward else [])]
        self.needs = ()
        self.flags = ["guard", "moves", "length"]
        self.options = ["activation", "out", *self.flags]
        self.results = ("d_points", "flat") if backward else ("u", "u_dot")[: 1 + along]
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
            if self.along:
                results = np.empty(shape, x.dtype), np.empty(shape, x.dtype)
                arrays |= zip(self.results, results, strict=True)
            elif out is None:
                results = np.empty(shape, x.dtype)
            else:
                others = {self.label(name): y for name, y in arrays.items()}
                results = output("out", out, shape, x.dtype, others)
            if not self.along:
                arrays["u"] = results
        functions = (*[activation] * (self.layers - 1), get("none"))
        how = (
            functions,
            widths,
            x.shape[-2],
            x.dtype,
            np.zeros((int(self.along), widths[0]), x.dtype),
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
def _operation(layers: int, backward: bool, groups: Any, along: bool = False) -> ValueOperation:
    return ValueOperation(layers, backward, groups, along)


_arguments = arguments_of(_Signature)


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
    info: DeviceInfo, dtype: str, widths: tuple[int, ...], backward: bool, along: bool
) -> Sizes | HalfSizes | None:
    if dtype in HALF_DTYPES:
        return None if along else half_sizes_of(info, dtype, widths, backward)
    return sizes_of(info, dtype, widths, int(along), 0, backward, along)


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
        grad: Any = None, moves: bool = False, x_dot: Any = None,
    ) -> Any:  # fmt: skip
        """Return the arrays' operations, the sizes, the activation and the number of networks.

        None: layers run it, and say what is wrong with operands that do not fit.
        """
        if not cuda_whole.ENABLED or len(biases) != len(weights):
            return None
        activation, final, _, _ = how
        try:
            hidden = _hidden(activation, final, len(weights))
            form = cuda_whole.form_of(x, weights, biases, backward, moves)
            if hidden is None or form is None:
                return None
            widths, networks = form
            shape = *((networks,) if networks else ()), x.shape[-2], widths[-1]
            if grad is not None and (tuple(grad.shape) != shape or grad.dtype != x.dtype):
                return None
            if x_dot is not None and (x_dot.shape != x.shape or x_dot.dtype != x.dtype):
                return None
            arrays = self._arrays_of("mlp", x)
            info, dtype = device(arrays.place(x)).info, arrays.dtype(x).name
            if dtype in HALF_DTYPES and not cuda_whole.HALF:
                return None
        except (AttributeError, BackendUnavailable, TypeError, ValueError):
            return None
        sizes = _sizes(info, dtype, widths, backward, x_dot is not None)
        return None if sizes is None else (arrays, sizes, hidden, networks)

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
        operation = _operation(len(weights), grad is not None, half_networks.switches())
        operands = x, *weights, *own
        if grad is None:
            flags: Any = (guard, False, 0)
            return run(operation, operands, hidden, flags, (), out, backend, _arguments)
        flags = (guard, moves, (networks, sizes.flat) if networks else sizes.flat)
        made = run(operation, (*operands, grad), hidden, flags, (), None, backend, _arguments)
        return NetworkGradients(*_groups(made, sizes, own, arrays, needs))

    def is_whole(self, x: Any, weights: Any, biases: Any, how: tuple[Any, ...]) -> bool:
        """Return whether one kernel makes the value, and one the gradients."""
        biases = (None,) * len(weights) if biases is None else biases
        points = self._rows(x) if _has_axes(x, weights) else x
        if points is None:
            return False
        both = [self._served(points, weights, biases, how, back) for back in (False, True)]
        return None not in both

    def along(
        self, x_dot: Any, grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
        needs: Sequence[str],
    ) -> Any:  # fmt: skip
        """Return the value and its tangent along one of the points alone; None: layers run it.

        With a cotangent: the gradients of its product with the tangent, by it (the tangent), the
        points, weights and biases, as far as they are needed.
        """
        own = (None,) * len(weights) if biases is None else biases
        moves, rest = "x" in needs, [y for y in needs if y != "grad"]
        # the launches: of a value and its tangent, of gradients
        both = [False] if grad is None else [False] * ("grad" in needs) + [True] * bool(rest)
        served = [
            self._served(x, weights, own, how, back, grad, back and moves, x_dot) for back in both
        ]
        if not both or None in served:
            return None
        made: dict[bool, Any] = {}
        for back, (arrays, sizes, hidden, networks) in zip(both, served, strict=True):
            length = (networks, sizes.flat) if networks else sizes.flat
            flags: Any = (how[2], moves, length) if back else (how[2], False, 0)
            given = x, *weights, *own, x_dot, *((grad,) if back else ())
            operation = _operation(len(weights), back, half_networks.switches(), True)
            found = run(operation, given, hidden, flags, (), None, how[3], _arguments)
            made[back] = _groups(found, sizes, own, arrays, needs) if back else found
        if grad is None:
            return made[False]
        d_grad = made[False][1] if "grad" in needs else None
        return NetworkSecondGradients(d_grad, *made.get(True, (None,) * 3))


def _groups(
    made: Sequence[Array | None], sizes: Sizes | HalfSizes, biases: Sequence[Array | None],
    arrays: Arrays, needs: Sequence[str],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients by x, weights and biases of what a kernel has made."""
    d_x, flat = made
    part = half_gradients if isinstance(sizes, HalfSizes) else cuda_whole.gradients
    groups: Any = part(flat, sizes, biases, arrays.compact)  # type: ignore[arg-type]
    pairs = zip(("weights", "biases"), groups, strict=True)
    return d_x, *[tuple(y) if name in needs else None for name, y in pairs]
