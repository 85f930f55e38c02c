"""The formula of every operation: what is done to a product's sums, or to arrays' elements.

An :class:`Epilogue` maps accumulators (the sums over K of a product, or of several that share a
factor) and operands, element by element, to results. A forward is written here once, as an ordinary
function; its backward, its double backward, its forward mode and its jet are derived from the
recorded graph (`numfuse.language.derivatives`), with the activations' own derivatives as leaves. A
backend prints what it is given and knows no formula.

In a derived epilogue the names tell what is meant: ``d_x`` is the gradient by ``x``, ``x_dot`` a
tangent, ``x_ddot`` a second derivative along a curve, ``grad`` the cotangent of the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from typing import Any, NamedTuple, TypeVar, cast

from numfuse.language.curves import (
    Curve,
    call,
    expand,
    inputs,
    leaf,
    present,
    rebuilt,
    replace_leaves,
)
from numfuse.language.derivatives import forward, reverse, second_order
from numfuse.language.graph import Expr, constant, node, topological
from numfuse.language.keys import Keyed
from numfuse.language.operations import TRUTH
from numfuse.language.text import dumps

_Made = TypeVar("_Made", bound=Callable[..., Any])


def _once(make: _Made) -> _Made:
    """Let an epilogue, or a curve, keep what a function makes of it: first calls ask for it again.

    It is the function's first argument, and keeps by function and names in its dict `derived`.
    """

    @wraps(make)
    def found(of: Any, *names: Any) -> Any:
        made = of.derived.get((make, names))
        if made is None:
            made = of.derived[make, names] = make(of, *names)
        return made

    return cast(_Made, found)


@dataclass(frozen=True, eq=False)
class Epilogue(Keyed):
    """Formulas over accumulators and operands."""

    name: str
    #: The inputs, in the order in which a kernel is given them.
    accumulators: tuple[str, ...]
    operands: tuple[str, ...]
    #: The outputs: each one's name and its graph over the inputs.
    results: tuple[tuple[str, Expr], ...]
    #: A user's own formula, with which all that is made of it goes.
    ties: tuple[Expr, ...] = ()

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Return what was derived from it before, by the method and its arguments."""
        return {}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The accumulators, then the operands."""
        return self.accumulators + self.operands

    @cached_property
    def graphs(self) -> tuple[Expr, ...]:
        """The graphs of the results."""
        return tuple(expr for _, expr in self.results)

    @_once
    def named(self) -> tuple[Any, ...]:
        """Return a key that stands for it, whenever it is derived anew, and holds no formula."""
        names = tuple(name for name, _ in self.results)
        return self.name, self.accumulators, self.operands, names, dumps(expand(self.graphs))

    def formulas(self) -> list[Expr]:
        """Return the graphs of the curves that it calls: with them goes what is kept of it."""
        curves = [e.payload for e in topological(self.graphs) if isinstance(e.payload, Curve)]
        return [*self.ties, *(formula for curve in curves for formula in curve.formulas())]

    def __getitem__(self, name: str) -> Expr:
        return dict(self.results)[name]

    @_once
    def select(self, *names: str) -> Epilogue:
        """Return the epilogue with these results alone, and the inputs that they depend on.

        One that was left out, as it is zero everywhere, is the constant 0.
        """
        known = dict(self.results)
        results = tuple((name, known.get(name, constant(0))) for name in names)
        used = set(inputs(expr for _, expr in results))
        return Epilogue(
            self.name,
            tuple(name for name in self.accumulators if name in used),
            tuple(name for name in self.operands if name in used),
            results,
            self.ties,
        )

    @_once
    def without(self, *absent: str) -> Epilogue:
        """Return the epilogue in which these inputs are zero, and what they multiply is left out.

        A result of which nothing is left is no result any more. (A sum with an absent operand is
        the other operand itself: not that plus 0, which would turn -0 to 0.)
        """
        made: dict[Expr, Expr | None] = {}
        for e in topological(self.graphs):
            if e.op == "input":
                made[e] = None if e.payload in absent else e
            else:
                made[e] = present(e, [made[a] for a in e.args])
        return Epilogue(
            self.name,
            tuple(name for name in self.accumulators if name not in absent),
            tuple(name for name in self.operands if name not in absent),
            tuple((name, kept) for name, expr in self.results if (kept := made[expr]) is not None),
            self.ties,
        )

    @_once
    def guarded(self) -> Epilogue:
        """Return the epilogue with 0 for every derivative of a curve that is not finite."""
        made: dict[Expr, Expr] = {}
        for e in topological(self.graphs):
            made[e] = rebuilt(e, [made[a] for a in e.args])
            if isinstance(e.payload, Curve) and e.payload.order:
                made[e] = node("finite", made[e])
        results = tuple((name, made[expr]) for name, expr in self.results)
        return Epilogue(self.name, self.accumulators, self.operands, results, self.ties)

    # --- derivatives ------------------------------------------------------------------------
    @_once
    def backward(self) -> Epilogue:
        """Return the gradient ``d_x`` by every input x, weighted with the results' cotangents.

        A cotangent is an operand: ``grad`` where there is one result, else ``grad_`` and the
        result's name. A gradient that is zero everywhere is left out.
        """
        cotangents = {name: f"grad_{name}" for name, _ in self.results}
        if len(self.results) == 1:
            cotangents = {self.results[0][0]: "grad"}
        return self.pulled_back(cotangents, {name: f"d_{name}" for name in self.inputs})

    def pulled_back(self, cotangents: Mapping[str, str], gradients: Mapping[str, str]) -> Epilogue:
        """Return a vector-Jacobian product.

        `cotangents` is {result: the name of its cotangent}, `gradients` {input: what its gradient
        is called}; what is left out has none.
        """
        weights = [
            leaf(cotangents[name]) if name in cotangents else None for name, _ in self.results
        ]
        found = reverse(self.graphs, weights, [leaf(name) for name in gradients])
        results = tuple(
            (name, expr)
            for name, expr in zip(gradients.values(), found, strict=True)
            if expr is not None
        )
        extra = tuple(name for name in cotangents.values() if name not in self.inputs)
        inputs = self.accumulators, self.operands + extra
        return Epilogue(f"{self.name} backward", *inputs, results, self.ties)

    @_once
    def tangent(self, moving: tuple[str, ...] | None = None) -> Epilogue:
        """Return the results and, behind each, its derivative ``x_dot`` along the inputs' tangents.

        `moving` names the inputs that have one (default: all). The tangents of accumulators are
        accumulators, those of operands are operands.
        """
        moving = self.inputs if moving is None else moving
        dots = {leaf(name): leaf(f"{name}_dot") for name in moving}
        moved = forward(self.graphs, dots)
        results: list[tuple[str, Expr]] = []
        for (name, expr), dot in zip(self.results, moved, strict=True):
            results += [(name, expr), (f"{name}_dot", constant(0) if dot is None else dot)]
        return Epilogue(
            f"{self.name} tangent",
            self.accumulators + tuple(f"{n}_dot" for n in self.accumulators if n in moving),
            self.operands + tuple(f"{n}_dot" for n in self.operands if n in moving),
            tuple(results),
            self.ties,
        )

    def jet(self) -> Epilogue:
        """Return a result's Taylor coefficients by the accumulators, up to the second.

        The results are the value, ``slope_x`` for each accumulator x and ``bend_x_y`` for each
        pair. A direction d and a weighted second derivative s of the result are then

            out_dot[d] = sum_x slope_x x_dot[d]
            out_ddot[s] = sum_x slope_x x_ddot[s] + sum_xy bend_x_y sum_d w[s, d] x_dot[d] y_dot[d]

        and the sums over directions are the kernel's: a formula has none.
        """
        (name, expr) = self.results[0]
        slopes, bends = second_order(expr, [leaf(x) for x in self.accumulators])
        results: list[tuple[str, Expr]] = [(name, expr)]
        for x, slope in zip(self.accumulators, slopes, strict=True):
            if slope is not None:
                results.append((f"slope_{x}", slope))
        for (i, j), bend in bends.items():
            results.append((f"bend_{self.accumulators[i]}_{self.accumulators[j]}", bend))
        inputs = self.accumulators, self.operands
        return Epilogue(f"{self.name} jet", *inputs, tuple(results), self.ties)


def record(
    formula: Callable[..., Any], accumulators: int, name: str | None = None, out: str = "out"
) -> Epilogue:
    """Call a formula once with named inputs and return what it does as an epilogue.

    Its parameters are so many accumulators, then the operands. It returns one value, or several.
    """
    parameters = tuple(inspect.signature(formula).parameters)
    made = formula(*(leaf(parameter) for parameter in parameters))
    if isinstance(made, tuple):
        results = tuple((f"{out}_{i}", constant(value)) for i, value in enumerate(made))
    else:
        results = ((out, constant(made)),)
    return Epilogue(
        name or formula.__name__, parameters[:accumulators], parameters[accumulators:], results
    )


class Jet(NamedTuple):
    """How a function of z hands on Taylor coefficients: a value, a direction, a second derivative.

    `value` has ``out``, `direction` (for one of several) ``out_dot`` and ``bent``, `second`
    ``straight``: without what is zero everywhere. Along curves with the first derivatives z_dot[d],

        out_ddot[s] = straight(z_ddot[s]) + sum_d weights[s, d] bent(z_dot[d])

    and that sum is the kernel's: a formula has none. In a backward each of the three adds to the
    `totals`, ``grad_bent`` is what a direction's ``bent`` is weighted with,
    sum_s weights[s, d] grad_ddot[s], and ``d_z_dot`` and ``d_z_ddot`` are the other gradients.
    """

    value: Epilogue
    direction: Epilogue
    second: Epilogue

    def each(self, make: Callable[[Epilogue], Epilogue]) -> Jet:
        """Return what a function makes of each part."""
        return Jet(*map(make, self))

    @property
    def totals(self) -> tuple[str, ...]:
        """Return the gradients to which all parts add: ``d_z``, and those of operands."""
        names = dict.fromkeys(["d_z", *(name for part in self for name, _ in part.results)])
        return tuple(x for x in names if x == "d_z" or x.startswith("d_x_"))

    def parts(
        self, written: Collection[str], backward: bool, directions: int, seconds: int
    ) -> dict[str, Epilogue]:
        """Return the formulas of a pass over points that writes these results, by their names.

        They are those of the value, of a direction, of a second derivative and, in a forward, of
        what a direction adds to second derivatives (bend). What they share is hoisted; one that has
        no result which is used is left out.
        """
        value, direction, second = self.hoisted()
        totals = self.totals
        wanted = {
            "direction": (
                direction,
                (*totals, "d_z_dot") if backward else ("out_dot",),
                directions,
            ),
            "bend": (direction, () if backward else ("bent",), directions and seconds),
            "second": (second, (*totals, "d_z_ddot") if backward else ("straight",), seconds),
        }
        found, used = dict[str, Epilogue](), {"d_z", "bent", "straight", *written}
        for part, (epilogue, results, count) in wanted.items():
            there = dict(epilogue.results)
            chosen = [x for x in results if count and x in there and x in used]
            if chosen:
                found[part] = epilogue.select(*chosen)
        used |= {x for part in found.values() for x in part.inputs}
        names = [x for x, _ in value.results if x in used]
        return {"value": value.select(*names), **found} if names else found

    def hoisted(self) -> Jet:
        """Return parts that share what depends on a point's value and operands alone: slopes.

        `value` has it as further results, ``shared_0`` and so on, which are inputs of the others.
        """
        shared: dict[Expr, Expr] = {}
        fixed = {name for part in self for name in part.inputs if _is_of_point(name)}

        def alone(of: Epilogue) -> Epilogue:
            whole: dict[Expr, bool] = {}
            made: dict[Expr, Expr] = {}

            def cut(e: Expr) -> Expr:
                if not whole[e] or e.op == "const":
                    return made[e]
                if e.op in TRUTH:  # (what is handed on are numbers)
                    return rebuilt(e, [cut(a) for a in e.args])
                return shared.setdefault(e, leaf(f"shared_{len(shared)}"))

            for e in topological(of.graphs):
                whole[e] = e.payload in fixed if e.op == "input" else all(whole[a] for a in e.args)
                made[e] = e if whole[e] else rebuilt(e, [cut(a) for a in e.args])
            results = tuple((name, cut(e)) for name, e in of.results)
            operands = inputs(e for _, e in results)
            return Epilogue(of.name, (), operands, results, of.ties)

        direction, second = alone(self.direction), alone(self.second)
        value = self.value
        more = tuple((str(name.payload), e) for e, name in shared.items())
        operands = dict.fromkeys([*value.operands, *sorted(fixed - {"z"})])
        head = value.name, ("z",), tuple(operands)
        return Jet(Epilogue(*head, (*value.results, *more), value.ties), direction, second)


def _is_of_point(name: str) -> bool:
    """Whether an input of a jet's parts is the value's sum or an operand, which do not move."""
    return not name.startswith("grad") and not name.endswith(("_dot", "_ddot"))


# --- the table ----------------------------------------------------------------------------------
# One function per operation: the formula of its forward. Everything else is derived from it.


@_once
def layer(f: Curve) -> Epilogue:
    """Return the epilogue of activation(a @ b + bias), with the pre-activation as ``pre``."""
    pre = leaf("z") + leaf("bias")
    return Epilogue("layer", ("z",), ("bias",), (("out", call(f, pre)), ("pre", pre)))


@_once
def layer_double_backward(f: Curve) -> Epilogue:
    """Return what the double backward of a layer does element by element.

    With P = z + bias and T = t + w, z being a sum of a @ b and t one of u @ b + a @ v, the results
    are ``d_grad`` = f'(P) T, ``q`` = grad f''(P) T and ``s`` = grad f'(P), the gradient by P that
    the backward itself makes.
    """
    backward = layer(f).select("out").backward().select("d_z")
    twice = backward.pulled_back({"d_z": "t"}, {"grad": "d_grad", "z": "q"})
    graphs = replace_leaves((*twice.graphs, backward["d_z"]), {leaf("t"): leaf("t") + leaf("w")})
    names = (*(name for name, _ in twice.results), "s")
    results = tuple(zip(names, graphs, strict=True))
    return Epilogue("layer double backward", ("z", "t"), ("bias", "w", "grad"), results)


@_once
def layer_tangent(f: Curve) -> Epilogue:
    """Return a layer's value ``out`` and its derivative ``out_dot`` along a moving ``z_dot``."""
    return layer(f).select("out").tangent(("z",))


@_once
def layer_jet(f: Curve) -> Jet:
    """Return how a layer hands on Taylor coefficients."""
    return _taylor(layer(f))


@_once
def layer_jet_backward(f: Curve) -> Jet:
    """Return the gradients of a layer's jet by the sums z, z_dot and z_ddot."""
    return _taylor_backward(layer_jet(f), ())


@_once
def epilogue_jet(whole: Epilogue) -> Jet:
    """Return how a user's formula of one sum hands on Taylor coefficients.

    Its operands do not move. As a layer it has the sum itself as ``pre``.
    """
    z = leaf("z")
    graphs = replace_leaves(whole.graphs, {leaf(x): z for x in whole.accumulators})
    results = ("out", graphs[0]), ("pre", z)
    return _taylor(Epilogue(whole.name, ("z",), whole.operands, results, whole.ties))


@_once
def epilogue_jet_backward(whole: Epilogue) -> Jet:
    """Return the gradients of a formula's jet by the sums z, z_dot and z_ddot, and by operands."""
    return _taylor_backward(epilogue_jet(whole), whole.operands)


def _taylor(whole: Epilogue) -> Jet:
    """Return how the first result of a formula of z hands on Taylor coefficients."""
    found = dict(whole.jet().results)
    slope, bend = found.get("slope_z"), found.get("bend_z_z")
    dot, ddot = leaf("z_dot"), leaf("z_ddot")
    moved, straight = dict[str, Expr](), dict[str, Expr]()
    if slope is not None:
        moved["out_dot"], straight["straight"] = slope * dot, slope * ddot
    if bend is not None:
        moved["bent"] = bend * (dot * dot)

    def part(name: str, moving: str, made: dict[str, Expr]) -> Epilogue:
        results = tuple(made.items())
        return Epilogue(f"{whole.name} {name}", ("z", moving), whole.operands, results, whole.ties)

    return Jet(whole, part("direction", "z_dot", moved), part("second", "z_ddot", straight))


def _taylor_backward(made: Jet, operands: tuple[str, ...]) -> Jet:
    """Return the gradients of a jet by its sums and by these operands."""
    bent = {"out_dot": "grad_dot", "bent": "grad_bent"}
    to = {name: f"d_{name}" for name in ("z", *operands)}
    return Jet(
        made.value.select("out").pulled_back({"out": "grad"}, to),
        made.direction.pulled_back(bent, to | {"z_dot": "d_z_dot"}),
        made.second.pulled_back({"straight": "grad_ddot"}, to | {"z_ddot": "d_z_ddot"}),
    )


@_once
def gate_double_backward(f: Curve) -> Epilogue:
    """Return the gradients of a gate's ``d_a`` and ``d_b``, weighted with ``u`` and ``v``."""
    gradients = {"grad": "d_grad", "a": "d_a", "b": "d_b"}
    return gate(f).backward().pulled_back({"d_a": "u", "d_b": "v"}, gradients)


@cache
def residual_layer() -> Epilogue:
    """Return the epilogue of a @ b + bias + residual."""
    return record(lambda z, bias, residual: z + bias + residual, 1, "residual layer")


@_once
def gate(f: Curve) -> Epilogue:
    """Return the formula of activation(a) * b, which has no product."""
    return record(lambda a, b: call(f, a) * b, 0, "gate")


@_once
def gated_layer(f: Curve) -> Epilogue:
    """Return the epilogue of activation(z_0) * z_1, the sums of a gated layer with their biases."""
    out = call(f, leaf("z_0")) * leaf("z_1")
    return Epilogue("gated layer", ("z_0", "z_1"), (), (("out_0", out),))


@_once
def gate_tangent(f: Curve) -> Epilogue:
    """Return a gate and its derivative along the tangents ``u`` and ``v`` of its factors."""
    made = gate(f).tangent()
    graphs = replace_leaves(made.graphs, {leaf("a_dot"): leaf("u"), leaf("b_dot"): leaf("v")})
    results = tuple(zip(("out", "out_dot"), graphs, strict=True))
    return Epilogue(made.name, (), ("a", "b", "u", "v"), results)


@_once
def gate_backward(f: Curve, names: str = "ab") -> Epilogue:
    """Return the gradients of a gate by these of its factors, weighted with ``grad``."""
    return gate(f).pulled_back({"out": "grad"}, {name: f"d_{name}" for name in names})


#: By the kind of a problem, what gives the formulas of a gate, or of a derivative of one.
GATES: dict[str, Callable[..., Epilogue]] = {
    "gated": gate,
    "gated_backward": gate_backward,
    "gated_double_backward": gate_double_backward,
    "gated_tangent": gate_tangent,
}


def sum_of_terms(terms: int) -> Epilogue:
    """Return the sum of a product's sum and of `terms` operands: what a matrix grows by."""
    names = tuple(f"term_{i}" for i in range(terms))
    return Epilogue("sum", ("z",), names, (("out", sum(map(leaf, names), leaf("z"))),))
