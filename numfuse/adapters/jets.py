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
from numfuse.epilogue_jets import matmul_epilogue_jet, matmul_epilogue_jet_bwd
from numfuse.epilogues import epilogue_jet
from numfuse.fused_operations import NUMBERS
from numfuse.fusion import elementwise
from numfuse.jets import matmul_bias_activation_jet, matmul_bias_activation_jet_bwd, weights_of
from numfuse.language.curves import expand, leaf, replace_leaves
from numfuse.language.graph import SYMBOL, constant
from numfuse.networks import mlp_jet, mlp_jet_bwd
from numfuse.perceptron import Network
from numfuse.problem.forms import Form
from numfuse.problem.jets import label_of, make, needs_of
from numfuse.problem.operands import check_group
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
        return _layer_shapes(a, b, bias, a_dot, constants)

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

        def run(a: Any, b: Any, a_dot: Any, a_ddot: Any, _: Any) -> Any:
            return _layer(ops, self.activation, a, b, bias, a_dot, a_ddot, constants[1])

        return _as_matrices(run, a, b, a_dot, a_ddot)

    def wanted(self, needs: Sequence[str]) -> list[bool]:
        """Return of which operands a public function's `needs` asks for gradients."""
        return [name in needs for name in self.names]

    def gradients(self, found: Sequence[Any], needs: Sequence[str]) -> LayerJetGradients:
        """Return gradients, one for each operand, as the public function has them."""
        return LayerJetGradients(*found)


@dataclass(frozen=True)
class FormulaCall:
    """The jet of a user's formula: its operands are a, b, those of the formula, a_dot, a_ddot."""

    epilogue: UserEpilogue
    guard: bool
    backend: Any

    result: ClassVar = LayerJet

    @property
    def form(self) -> Form:
        """Return the form of a call whose operands are arrays."""
        labels = self.epilogue.parameters[1:]
        return Form("jet", 1, False, labels, (False,) * len(labels))

    @property
    def names(self) -> tuple[str, ...]:
        """Return what messages call the operands."""
        return tuple([label_of(self.form, name) for name in needs_of(self.form)])

    def _call(self, x: Sequence[Any], constants: Constants) -> tuple[Any, dict[str, Any]]:
        a, b, *operands, a_dot, a_ddot = x
        options = {"weights": constants[1], "guard": self.guard, "backend": self.backend}
        return (a, b, self.epilogue, tuple(operands), a_dot, a_ddot), options

    def forward(self, x: Sequence[Any], constants: Constants, keep: bool) -> tuple[Any, Any]:
        """Return the results, and what the backward takes as `kept`."""
        given, options = self._call(x, constants)
        found = matmul_epilogue_jet(*given, keep=keep, **options)
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
        given, options = self._call(x, constants)
        places = ("a", "b", *range(len(x) - 4), "a_dot", "a_ddot")
        wanted = tuple([name for name, need in zip(places, needs, strict=True) if need])
        g, g_dot, g_ddot = grads
        options |= {"needs": wanted, "kept": kept}
        d_a, d_b, d_operands, *rest = matmul_epilogue_jet_bwd(g, g_dot, g_ddot, *given, **options)
        return [d_a, d_b, *d_operands, *rest]

    def shapes(self, x: Sequence[Any], constants: Constants) -> tuple[tuple[int, ...], ...]:
        """Return the results' shapes, of operands and constants of which only these are read."""
        return _layer_shapes(x[0], x[1], None, x[-2], constants)

    def check(self, x: Sequence[Any], constants: Constants) -> None:
        """Raise for shapes and dtypes that do not fit; nothing of the arrays is read."""
        weights, pattern = weights_of(constants[1], x[0], *x[-2:])
        operands = dict(zip(needs_of(self.form), x, strict=True))
        how = self.epilogue, (), None, self.guard, False, pattern, None, False, self.form
        make(False, {**operands, "weights": weights}, *how)

    def plain(self, ops: Any, x: Sequence[Any], constants: Constants) -> tuple[Any, ...]:
        """Return the results by `ops`."""
        a, b, *operands, a_dot, a_ddot = x

        def run(a: Any, b: Any, a_dot: Any, a_ddot: Any, spread: Any) -> Any:
            own = [spread(y) for y in operands]
            how = _formula(self.epilogue), constants[1], own
            return _moved(ops, *how, ops.matmul(a, b), b, a_dot, a_ddot)

        return _as_matrices(run, a, b, a_dot, a_ddot)

    def wanted(self, needs: Sequence[str]) -> list[bool]:
        """Return of which operands a public function's `needs` asks for gradients."""
        return [name in needs for name in needs_of(self.form)]

    def gradients(self, found: Sequence[Any], needs: Sequence[str]) -> tuple[Any, ...]:
        """Return gradients, one for each operand, as the operation has them."""
        return tuple(found)


@dataclass(frozen=True)
class NetworkOperands:
    """The operands of a network's call, x, the weights, and the biases, as one sequence."""

    #: The last one is the last layer's.
    activations: tuple[Activation, ...]
    guard: bool
    backend: Any

    @property
    def how(self) -> tuple[Any, ...]:
        """Return the hidden activations, the last one, the guard and the backend."""
        return self.activations[:-1], self.activations[-1], self.guard, self.backend

    @property
    def mark(self) -> tuple[Any, ...]:
        """Return what tells a call from others, but its operands and backend."""
        return (self.guard, *[f.serial for f in self.activations])

    @property
    def names(self) -> tuple[str, ...]:
        """Return what messages call the operands."""
        layers = range(len(self.activations))
        return "x", *(f"weights[{i}]" for i in layers), *(f"biases[{i}]" for i in layers)

    def apart(self, x: Sequence[Any]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """Return x, the weights and the biases, or what belongs to each of them."""
        count = len(self.activations)
        return x[0], tuple(x[1 : 1 + count]), tuple(x[1 + count :])

    def groups(self, needs: Sequence[bool]) -> tuple[str, ...]:
        """Return the `needs` of a public function that has the gradients of these operands."""
        every = zip(("x", "weights", "biases"), self.apart(needs), strict=True)
        return tuple([name for name, need in every if need is True or any_of(need)])

    def flat(self, found: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        """Return gradients as one sequence, None where one is not needed."""
        d_x, d_weights, d_biases = found
        nothing = (None,) * len(self.activations)
        every = d_x, *(d_weights or nothing), *(d_biases or nothing)
        return [d if need else None for d, need in zip(every, needs, strict=True)]


@dataclass(frozen=True)
class NetworkCall(NetworkOperands):
    """A network's jet."""

    result: ClassVar = NetworkJet

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
        found = mlp_jet(*self.apart(x), self.activations[:-1], keep=keep, **options)
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
        options = {"needs": self.groups(needs), "kept": kept, **self._options(constants)}
        operands: Any = *grads, *self.apart(x), self.activations[:-1]
        return self.flat(mlp_jet_bwd(*operands, **options), needs)

    def shapes(self, x: Sequence[Any], constants: Constants) -> tuple[tuple[int, ...], ...]:
        """Return the results' shapes, of operands and constants of which only these are read."""
        points, weights, biases = self.apart(x)
        matrices = [y for y in (points, *weights) if y is not None]
        matrices += [y for y in biases if y is not None and y.ndim > 1]
        batch = np.broadcast_shapes(*[tuple(y.shape[:-2]) for y in matrices])
        value = *batch, points.shape[-2], weights[-1].shape[-1]
        first, second = constants
        count = points.shape[-1] if first is None else first.shape[0]
        return value, (count, *value), (count if second is None else second.shape[0], *value)

    def check(self, x: Sequence[Any], constants: Constants) -> None:
        """Raise for shapes and dtypes that do not fit; nothing of the arrays is read."""
        hidden, *rest = self.how
        Network("mlp_jet", *self.apart(x), hidden, *constants, *rest)

    def plain(self, ops: Any, x: Sequence[Any], constants: Constants) -> tuple[Any, ...]:
        """Return the results by `ops`."""
        h, weights, biases = self.apart(x)
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
        groups = zip(self.apart(found), ("x", "weights", "biases"), strict=True)
        return NetworkGradients(*[y if name in needs else None for y, name in groups])


JetCall = LayerCall | FormulaCall | NetworkCall


def _layer_shapes(
    a: Any, b: Any, bias: Any, a_dot: Any, constants: Constants
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's results."""
    own = [() if y is None else tuple(y.shape[:-2]) for y in (a, b, bias)]
    value = *np.broadcast_shapes(*own), *tuple(a.shape)[-2:-1], *tuple(b.shape)[1:][-1:]
    seconds = a_dot if constants[1] is None else constants[1]
    return value, (a_dot.shape[0], *value), (seconds.shape[0], *value)


def _as_matrices(run: Any, a: Any, b: Any, a_dot: Any, a_ddot: Any) -> tuple[Any, ...]:
    """Return what `run` makes of matrices, with the axes that 1-D operands leave out.

    It is given too what puts these axes back in an operand of the result's axes.
    """
    row, column = a.ndim == 1, b.ndim == 1

    def spread(y: Any) -> Any:
        y = y[..., None] if column and y.ndim else y
        return y[..., None, :] if row and y.ndim else y

    if row:
        a, a_dot = a[None, :], a_dot[:, None, :]
        a_ddot = None if a_ddot is None else a_ddot[:, None, :]
    found = run(a, b[:, None] if column else b, a_dot, a_ddot, spread)
    if column:
        found = tuple([y[..., 0] for y in found])
    if row:
        found = tuple([y[..., 0] if column else y[..., 0, :] for y in found])
    return tuple(found)


def any_of(needs: Any) -> bool:
    """Return whether something of a group is needed."""
    return isinstance(needs, tuple) and any(needs)


# --- from the public functions --------------------------------------------------------------------
def layer_call(
    operation: Any, operands: Sequence[Any], activation: Any, flags: Sequence[Any], out: Any,
    backend: Any, what: str, array: Callable[[float, Any], Any],
) -> tuple[LayerCall | FormulaCall, list[Any], list[Any], Constants, bool]:  # fmt: skip
    """Return a call of a layer's or a formula's jet: what it is, its cotangents, operands and
    constants, and whether it keeps what its backward needs; `what` forbids `out`.

    `array` makes an array of a Python number, like another one.
    """
    given = dict(zip(operation.operands, operands, strict=True))
    _refuse_out(out, what)
    guard, keep = flags[:2]
    grads = [given[name] for name in ("grad", "grad_dot", "grad_ddot") if name in given]
    x = [given[name] for name in needs_of(operation.form)]
    first = next((y for y in x if hasattr(y, "dtype")), None)
    x = [array(y, first) if type(y) in NUMBERS else y for y in x]
    call: Any = LayerCall if operation.form is None else FormulaCall
    made = activation if operation.form is not None else get(activation)
    return call(made, guard, backend), grads, x, (None, given["weights"]), keep


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
    check_group("biases", biases, count)
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

    def elementwise(self, f: UserEpilogue, *x: Any) -> Any:
        """Return the results of a formula of elements, none where it has none."""
        return elementwise(f, *x, backend=self._backend) if f.graphs else ()


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
    return _moved(ops, curves(f), weights, (), z, b, a_dot, a_ddot)


@lru_cache(maxsize=64)
def _formula(f: UserEpilogue) -> tuple[UserEpilogue, tuple[float | None, ...]]:
    """Return a formula's value and its first two derivatives by the sum, as of `curves`.

    Activations are written out, as their own derivatives end with the third.
    """
    jet = dict(epilogue_jet(f.over(1)).value.jet().results)
    zero = constant(0)
    graphs = expand([jet["out"], jet.get("slope_z", zero), jet.get("bend_z_z", zero)])
    values: list[Any] = [e.payload if e.op == "const" else None for e in graphs]
    constants = tuple([None if c is None else float(c) for c in values])
    inputs = "z", *(f"x_{i}" for i in range(len(f.parameters) - 1))
    places = {leaf(name): leaf(f"p_{i}") for i, name in enumerate(inputs)}
    pairs = zip(graphs, constants, strict=True)
    made = replace_leaves([e for e, c in pairs if c is None], places)
    source = "a formula's, derived"
    return UserEpilogue(f"{f.name} and derivatives", source, f.parameters, made, True), constants


def _moved(
    ops: Any, curves: tuple[UserEpilogue, Any], weights: Any, operands: Sequence[Any], z: Any,
    b: Any, a_dot: Any, a_ddot: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the jet of a formula of z, the sum of a @ b."""
    dot = ops.matmul(_spread(a_dot, z.ndim), b)
    formula, constants = curves
    varying = iter(ops.elementwise(formula, z, *operands))
    value, slope, bend = [next(varying) if c is None else c for c in constants]
    value = value if constants[0] is None else ops.constant(value, z)
    value = value if value.shape == z.shape else ops.broadcast_to(value, z.shape)
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
