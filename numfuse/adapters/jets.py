"""Jets of layers and of networks as the adapters have them: flat calls, and the plain way.

A call is what it depends on beside its arrays. Its operands are a flat sequence, None for those
that are not there; its two constants are arrays on the host, or None: directions (of a network)
and weights of the second derivatives. `forward` and `backward` run on NumPy's arrays. `plain` is
made of products and formulas element by element, which a library differentiates to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

import numpy as np

from numfuse.activations import Activation, get
from numfuse.definitions import UserEpilogue
from numfuse.fusion import elementwise
from numfuse.jets import matmul_bias_activation_jet, matmul_bias_activation_jet_bwd, weights_of
from numfuse.language.curves import leaf, replace_leaves
from numfuse.language.graph import SYMBOL
from numfuse.networks import mlp_jet, mlp_jet_bwd
from numfuse.perceptron import Network
from numfuse.problem.jets import make
from numfuse.problem.results import LayerJet, LayerJetGradients, NetworkGradients, NetworkJet

Constants = tuple[Any, Any]
#: Results of a jet.
RESULTS = 3


@dataclass(frozen=True)
class LayerCall:
    """A layer's jet: its operands are a, b, bias, a_dot, a_ddot."""

    activation: Activation
    guard: bool
    backend: Any

    names: ClassVar = ("a", "b", "bias", "a_dot", "a_ddot")
    result: ClassVar = LayerJet

    def forward(self, x: Sequence[Any], constants: Constants, keep: bool) -> tuple[Any, Any]:
        """Return the results, and what the backward takes as `kept`."""
        a, b, bias, a_dot, a_ddot = x
        found = matmul_bias_activation_jet(
            a, b, bias, self.activation, a_dot, a_ddot, weights=constants[1], keep=keep,
            guard=self.guard, backend=self.backend,
        )  # fmt: skip
        return found if keep else (found, None)

    def backward(
        self,
        grads: Sequence[Any],
        x: Sequence[Any],
        constants: Constants,
        needs: Sequence[bool],
        kept: Any = None,
    ) -> list[Any]:
        """Return the gradient of each operand, None where it is not needed."""
        a, b, bias, a_dot, a_ddot = x
        wanted = tuple([name for name, need in zip(self.names, needs, strict=True) if need])
        g, g_dot, g_ddot = grads
        found = matmul_bias_activation_jet_bwd(
            g, g_dot, g_ddot, a, b, bias, self.activation, a_dot, a_ddot, weights=constants[1],
            kept=kept, needs=wanted, guard=self.guard, backend=self.backend,
        )  # fmt: skip
        return list(found)

    def shapes(self, x: Sequence[Any], constants: Constants) -> tuple[tuple[int, ...], ...]:
        """Return the results' shapes, of operands and constants of which only these are read."""
        a, b, bias, a_dot, _ = x
        own = [() if y is None else tuple(y.shape[:-2]) for y in (a, b, bias)]
        value = *np.broadcast_shapes(*own), *tuple(a.shape)[-2:-1], *tuple(b.shape)[1:][-1:]
        seconds = a_dot if constants[1] is None else constants[1]
        return value, (a_dot.shape[0], *value), (seconds.shape[0], *value)

    def check(self, x: Sequence[Any], constants: Constants) -> None:
        """Raise for shapes and dtypes that do not fit; nothing of the arrays is read."""
        a, b, bias, a_dot, a_ddot = x
        weights, pattern = weights_of(constants[1], a, a_dot, a_ddot)
        operands = {"a": a, "b": b, "bias": bias, "a_dot": a_dot, "a_ddot": a_ddot}
        how = self.activation, (), None, self.guard, False, pattern, None
        make(False, {**operands, "weights": weights}, *how)

    def plain(self, ops: Any, x: Sequence[Any], constants: Constants) -> tuple[Any, ...]:
        """Return the results by `ops`."""
        a, b, bias, a_dot, a_ddot = x
        row, column = a.ndim == 1, b.ndim == 1
        if row:
            a, a_dot = a[None, :], a_dot[:, None, :]
            a_ddot = None if a_ddot is None else a_ddot[:, None, :]
        found = _layer(
            ops, self.activation, a, b[:, None] if column else b, bias, a_dot, a_ddot, constants[1]
        )
        if column:
            found = tuple([y[..., 0] for y in found])
        if row:
            found = tuple([y[..., 0] if column else y[..., 0, :] for y in found])
        return found

    def wanted(self, needs: Sequence[str]) -> list[bool]:
        """Return of which operands a public function's `needs` asks for gradients."""
        return [name in needs for name in self.names]

    def gradients(self, found: Sequence[Any], needs: Sequence[str]) -> LayerJetGradients:
        """Return gradients, one for each operand, as the public function has them."""
        return LayerJetGradients(*found)


@dataclass(frozen=True)
class NetworkCall:
    """A network's jet: its operands are x, the weights, and the biases."""

    #: The last one is the last layer's.
    activations: tuple[Activation, ...]
    guard: bool
    backend: Any

    result: ClassVar = NetworkJet

    @property
    def names(self) -> tuple[str, ...]:
        """Return what messages call the operands."""
        layers = range(len(self.activations))
        return "x", *(f"weights[{i}]" for i in layers), *(f"biases[{i}]" for i in layers)

    def _apart(self, x: Sequence[Any]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        count = len(self.activations)
        return x[0], tuple(x[1 : 1 + count]), tuple(x[1 + count :])

    def _options(self, constants: Constants) -> Mapping[str, Any]:
        return {
            "directions": constants[0],
            "second": constants[1],
            "final": self.activations[-1],
            "guard": self.guard,
            "backend": self.backend,
        }

    def forward(self, x: Sequence[Any], constants: Constants, keep: bool) -> tuple[Any, Any]:
        """Return the results, and what the backward takes as `kept`."""
        options = self._options(constants)
        found = mlp_jet(*self._apart(x), self.activations[:-1], keep=keep, **options)
        return found if keep else (found, None)

    def backward(
        self,
        grads: Sequence[Any],
        x: Sequence[Any],
        constants: Constants,
        needs: Sequence[bool],
        kept: Any = None,
    ) -> list[Any]:
        """Return the gradient of each operand, None where it is not needed."""
        groups = dict(zip(("x", "weights", "biases"), self._apart(needs), strict=True))
        wanted = tuple([name for name, need in groups.items() if need is True or any_of(need)])
        options = {"needs": wanted, "kept": kept, **self._options(constants)}
        operands: Any = *grads, *self._apart(x), self.activations[:-1]
        found = mlp_jet_bwd(*operands, **options)
        nothing = (None,) * len(self.activations)
        flat = [found.d_x, *(found.d_weights or nothing), *(found.d_biases or nothing)]
        return [d if need else None for d, need in zip(flat, needs, strict=True)]

    def shapes(self, x: Sequence[Any], constants: Constants) -> tuple[tuple[int, ...], ...]:
        """Return the results' shapes, of operands and constants of which only these are read."""
        points, weights, biases = self._apart(x)
        matrices = [y for y in (points, *weights) if y is not None]
        matrices += [y for y in biases if y is not None and y.ndim > 1]
        batch = np.broadcast_shapes(*[tuple(y.shape[:-2]) for y in matrices])
        value = *batch, points.shape[-2], weights[-1].shape[-1]
        first, second = constants
        count = points.shape[-1] if first is None else first.shape[0]
        return value, (count, *value), (count if second is None else second.shape[0], *value)

    def check(self, x: Sequence[Any], constants: Constants) -> None:
        """Raise for shapes and dtypes that do not fit; nothing of the arrays is read."""
        hidden, final = self.activations[:-1], self.activations[-1]
        options: Any = hidden, *constants, final, self.guard, self.backend
        Network("mlp_jet", *self._apart(x), *options)

    def plain(self, ops: Any, x: Sequence[Any], constants: Constants) -> tuple[Any, ...]:
        """Return the results by `ops`."""
        h, weights, biases = self._apart(x)
        units, second = constants
        units = np.eye(h.shape[-1]) if units is None else units
        units = ops.constant(units, h)
        shape = units.shape[0], *(1,) * (h.ndim - 1), h.shape[-1]
        dot, ddot = ops.broadcast_to(units.reshape(shape), (shape[0], *h.shape)), None
        for w, bias, f in zip(weights, biases, self.activations, strict=True):
            h, dot, ddot = _layer(ops, f, h, w, bias, dot, ddot, second)
        return h, dot, ddot

    def wanted(self, needs: Sequence[str]) -> list[bool]:
        """Return of which operands a public function's `needs` asks for gradients."""
        count = len(self.activations)
        return ["x" in needs, *["weights" in needs] * count, *["biases" in needs] * count]

    def gradients(self, found: Sequence[Any], needs: Sequence[str]) -> NetworkGradients:
        """Return gradients, one for each operand, as the public function has them."""
        groups = zip(self._apart(found), ("x", "weights", "biases"), strict=True)
        return NetworkGradients(*[y if name in needs else None for y, name in groups])


JetCall = LayerCall | NetworkCall


def any_of(needs: Any) -> bool:
    """Return whether something of a group is needed."""
    return isinstance(needs, tuple) and any(needs)


# --- from the public functions --------------------------------------------------------------------
def layer_call(
    operation: Any, operands: Sequence[Any], activation: Any, flags: Sequence[Any], out: Any,
    backend: Any, what: str,
) -> tuple[LayerCall, list[Any], list[Any], Constants, bool]:  # fmt: skip
    """Return a call of a layer's jet: what it is, its cotangents, operands and constants, and
    whether it keeps what its backward needs; `what` forbids `out`.
    """
    given = dict(zip(operation.operands, operands, strict=True))
    _refuse_out(out, what)
    guard, keep = flags[:2]
    grads = [given[name] for name in ("grad", "grad_dot", "grad_ddot") if name in given]
    x = [given[name] for name in LayerCall.names]
    return LayerCall(get(activation), guard, backend), grads, x, (None, given["weights"]), keep


def network_call(
    x: Any, weights: Sequence[Any], biases: Any, activation: Any, final: Any, guard: bool,
    backend: Any,
) -> tuple[NetworkCall, list[Any]]:  # fmt: skip
    """Return the call of a network's jet, and its operands."""
    count = len(weights)
    if isinstance(activation, (str, Activation)):
        activation = (activation,) * (count - 1)
    if len(activation) != count - 1:
        raise ValueError(f"activation must be one or {count - 1}, got {len(activation)}")
    biases = (None,) * count if biases is None else biases
    if len(biases) != count:
        raise ValueError(f"biases must be None or a sequence of {count} arrays or None")
    call = NetworkCall(tuple(map(get, (*activation, final))), bool(guard), backend)
    return call, [x, *weights, *biases]


def network_entry(
    run: Callable[..., Any], run_backward: Callable[..., Any], what: str
) -> Callable[..., Any]:
    """Return what runs a network's jet, or with cotangents its backward, which may have what was
    kept, by an adapter's two ways; `what` forbids `out`.
    """

    def network(
        grads: Any, x: Any, weights: Sequence[Any], biases: Any, how: Sequence[Any],
        constants: Constants, keep: Any, needs: Sequence[str], out: Any = None,
    ) -> Any:  # fmt: skip
        _refuse_out(out, what)
        call, operands = network_call(x, weights, biases, *how)
        if grads is None:
            return run(call, operands, constants, keep)
        return run_backward(call, grads, operands, constants, keep, needs)

    return network


def _refuse_out(out: Any, what: str) -> None:
    if out is not None:
        raise ValueError(f"out must be None under {what}, got an array")


# --- the plain way --------------------------------------------------------------------------------
class FusedFormulas:
    """The part of an adapter's operations that is the same for each: formulas, by this package."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def elementwise(self, f: UserEpilogue, z: Any) -> Any:
        """Return the results of a formula of `z`, none where it has none."""
        return elementwise(f, z, backend=self._backend) if f.graphs else ()


@lru_cache(maxsize=64)
def curves(f: Activation) -> tuple[UserEpilogue, tuple[float | None, ...]]:
    """Return the formula of an activation's value and of those of its first two derivatives that
    are no constants, and the constants, None for what the formula has."""
    traces = [f.trace(order) for order in range(3)]
    values: list[Any] = [e.payload if e.op == "const" else None for e in traces]
    constants = tuple([None if c is None else float(c) for c in values])
    pairs = zip(traces, constants, strict=True)
    graphs = replace_leaves([e for e, c in pairs if c is None], {SYMBOL: leaf("p_0")})
    name, source = f"{f.name} and derivatives", "an activation's, derived"
    return UserEpilogue(name, source, ("z",), graphs, True), constants


def _layer(
    ops: Any, f: Activation, a: Any, b: Any, bias: Any, a_dot: Any, a_ddot: Any, weights: Any
) -> tuple[Any, Any, Any]:
    """Return a layer's value, directions and second derivatives."""
    z = ops.matmul(a, b)
    if bias is not None:
        z = z + bias
    dot = ops.matmul(_spread(a_dot, z.ndim), b)
    formula, constants = curves(f)
    varying = iter(ops.elementwise(formula, z))
    value, slope, bend = [next(varying) if c is None else c for c in constants]
    seconds = len(dot) if weights is None else weights.shape[0]
    ddot: Any = ops.broadcast_to(0 * z[None], (seconds, *z.shape))
    if a_ddot is not None:
        ddot = slope * ops.matmul(_spread(a_ddot, z.ndim), b)
    if constants[2] != 0:
        square = dot * dot
        if weights is not None:
            flat = square.reshape((square.shape[0], prod(square.shape[1:])))
            square = ops.matmul(ops.constant(weights, z), flat)
            square = square.reshape((seconds, *dot.shape[1:]))
        ddot = bend * square if a_ddot is None else ddot + bend * square
    members = [
        y if y.shape[1:] == z.shape else ops.broadcast_to(y, (y.shape[0], *z.shape))
        for y in (slope * dot, ddot)
    ]
    return value, members[0], members[1]


def _spread(x: Any, rank: int) -> Any:
    """Return members whose own axes are as many as the result's."""
    more = rank + 1 - x.ndim
    return x.reshape((x.shape[0], *(1,) * more, *x.shape[1:])) if more > 0 else x
