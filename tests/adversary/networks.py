"""Calls of jets and of whole networks: ways to draw one for each function."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy import ndarray

from . import fused, layers, truths
from .cases import Case
from .draws import Draw
from .fused import FORMULAS
from .layers import NAMES

#: Numbers of directions.
COUNTS = (0, 1, 1, 2, 2, 3, 3, 5)


def second(d: Draw, count: int) -> ndarray:
    """Return weights of second derivatives, of one of few patterns of zeros: each is compiled."""
    patterns = [np.ones((1, count)), np.zeros((0, count)), np.eye(count)[:2]]
    patterns += [np.tri(3, count), np.zeros((2, count))]
    kept = d.palette.one("pattern", patterns)
    drawn = d.rng.integers(1, 5, kept.shape) * d.one((-0.5, 0.5)) * kept
    return drawn.astype(d.one(("float64", "float32")))


class Directions:
    """Tangents of a left factor, and the weights of second derivatives."""

    def __init__(self, d: Draw, a: ndarray) -> None:
        self.d = d
        self.count = d.palette.one("directions", COUNTS)
        self.seconds = self.count
        self.weights: Any = None
        if d.palette.chance("weights", 0.5):
            self.weights = second(d, self.count)
            self.seconds = len(self.weights)
        self.dot = d.array((self.count, *a.shape))
        self.ddot = d.some("ddot", 0.6, lambda: d.array((self.seconds, *a.shape)))
        if self.count:
            d.bound.append((self.dot, -1))
        self.used = np.eye(self.count) if self.weights is None else self.weights
        self.options = {} if self.weights is None else {"weights": self.weights}

    def numbers(self) -> tuple[list[Any], list[Any]]:
        n = self.d.number
        dots = [n(self.dot)[i] for i in range(self.count)]
        return dots, truths.members(n(self.ddot), self.seconds)

    def grads(self, out: tuple[int, ...]) -> list[ndarray | None]:
        """Return cotangents of the value, the directions and the seconds."""
        d = self.d
        shapes = out, (self.count, *out), (self.seconds, *out)
        return [
            d.some(f"grad {i}", 0.8, lambda shape=shape: d.array(shape))
            for i, shape in enumerate(shapes)
        ]


# --- layers -------------------------------------------------------------------------------------
class _Layer:
    def __init__(self, d: Draw) -> None:
        self.d = d
        self.a, (self.b,) = d.factors(vectors=False, work=d.limits.work // 4)
        self.out = layers.result(self.a, self.b)
        self.bias = d.some("bias", 0.6, lambda: d.bias(self.out, self.a, self.b))
        self.act, self.guard = d.palette.one("activation", NAMES), d.guard
        self.moved = Directions(d, self.a)
        self.operands = self.a, self.b, self.bias, self.act, self.moved.dot

    def truth(self) -> truths.Jet:
        n, (dots, ddots) = self.d.number, self.moved.numbers()
        a, b, bias = n(self.a), n(self.b), n(self.bias)
        return truths.layer_jet(a, b, bias, self.act, dots, ddots, self.moved.used, self.guard)


def layer_jet(d: Draw) -> Case:
    p = _Layer(d)
    kwargs = {"guard": p.guard, **p.moved.options}
    args = (*p.operands, p.moved.ddot)
    free = tuple(x for x in (p.a, p.b, p.bias, p.moved.dot, p.moved.ddot) if x is not None)
    return Case(
        "matmul_bias_activation_jet", args, kwargs, lambda: p.truth().result(), d, False, True,
        free=free, constants=(p.moved.weights,),
    )  # fmt: skip


def layer_jet_backward(d: Draw) -> Case:
    p = _Layer(d)
    grads, names = p.moved.grads(p.out), ("a", "b", "bias", "a_dot", "a_ddot")
    needs = d.needs(names)
    kwargs = {"guard": p.guard, "needs": needs, **p.moved.options}

    def truth() -> Any:
        n = d.number
        inputs = [n(p.a), n(p.b), n(p.bias), n(p.moved.dot), n(p.moved.ddot)]
        given = [n(g) for g in grads]
        return tuple(p.truth().backward(given, inputs, [x in needs for x in names]))

    args = (*grads, *p.operands, p.moved.ddot)
    case = Case("matmul_bias_activation_jet_bwd", args, kwargs, truth, d, False, True, names=names)
    case.constants = (p.moved.weights,)
    case.told["keep"] = ("matmul_bias_activation_jet", (*p.operands, p.moved.ddot), p.moved.options)
    return case


class _Formula:
    def __init__(self, d: Draw) -> None:
        # (factors are matrices, and small: a jet has several of each)
        self.p = p = fused.Operands(d, FORMULAS, vectors=False, work=d.limits.work // 4)
        self.moved, self.guard = Directions(d, p.a), d.guard
        self.operands = p.a, p.b, p.f, p.operands, self.moved.dot

    def truth(self) -> tuple[truths.Jet, truths.Fused]:
        dots, ddots = self.moved.numbers()
        made = self.p.truth(self.guard)
        return truths.fused_jet(made, dots, ddots, self.moved.used), made


def formula_jet(d: Draw) -> Case:
    p = _Formula(d)
    kwargs = {"guard": p.guard, **p.moved.options}
    free = (*p.p.free, *(x for x in (p.moved.dot, p.moved.ddot) if x is not None))
    args = (*p.operands, p.moved.ddot)
    return Case(
        "matmul_epilogue_jet", args, kwargs, lambda: p.truth()[0].result(), d, False, True,
        free=free, constants=(p.moved.weights,),
    )  # fmt: skip


def formula_jet_backward(d: Draw) -> Case:
    p = _Formula(d)
    q = p.p
    grads, names = p.moved.grads(q.out), (*q.names, "a_dot", "a_ddot")
    needs = d.needs(names)
    kwargs = {"guard": p.guard, "needs": needs, **p.moved.options}

    def truth() -> Any:
        n = d.number
        jet, made = p.truth()
        inputs = [*made.operands, n(p.moved.dot), n(p.moved.ddot)]
        given = [n(g) for g in grads]
        d_a, d_b, *rest = jet.backward(given, inputs, [x in needs for x in names])
        others = zip(rest[:-2], q.operands, strict=True)
        return d_a, d_b, tuple(q.wanted(y, x) for y, x in others), *rest[-2:]

    args = (*grads, *p.operands, p.moved.ddot)
    case = Case("matmul_epilogue_jet_bwd", args, kwargs, truth, d, False, True, names=names)
    case.constants = (p.moved.weights,)
    case.told["keep"] = ("matmul_epilogue_jet", (*p.operands, p.moved.ddot), p.moved.options)
    return case


# --- networks -------------------------------------------------------------------------------------
class _Network:
    """A network of few layers, its operands and options."""

    def __init__(self, d: Draw, points: int = 1) -> None:
        self.d = d
        depth = int(d.rng.integers(1, 5))
        work = d.limits.work // (4 * points)
        m, *widths = d.lengths(3, work)
        widest = max(1, *widths)
        widths = [d.length(widest) for _ in range(depth + 1)]
        if d.chance(0.9):
            widths = [max(1, n) for n in widths]
        batch = d.batch(m * widest * widest)
        self.x = d.array((*d.part(batch), m, widths[0]))
        each = [d.part(batch) if d.chance(0.4) else () for _ in range(depth)]
        self.weights = [
            d.array((*each[i], k, n), max(1, k) ** -0.5)
            for i, (k, n) in enumerate(itertools.pairwise(widths))
        ]
        self.biases: Any = None
        few = d.palette
        if few.chance("biases", 0.8):
            self.biases = [
                d.some(f"bias {i}", 0.8, lambda i=i: self._bias(each[i], widths[i + 1]))
                for i in range(depth)
            ]
        acts = [few.one(f"activation {i % 2}", NAMES) for i in range(depth)]
        if few.chance("one activation", 0.5):
            acts[:-1] = [acts[0]] * (depth - 1)
        if few.chance("plain", 0.6):
            acts[-1] = "none"
        self.acts, self.guard = acts, d.guard
        same = len(set(acts[:-1])) <= 1 and depth > 1 and d.chance(0.7)
        self.activation: Any = acts[0] if same else tuple(acts[:-1])
        self.options = {} if acts[-1] == "none" else {"final": acts[-1]}
        self.head = self.x, self.weights, self.biases, self.activation
        self.out = self._shape()
        d.bound.append((self.x, -1))
        d.bound += [(w, -2) for w in self.weights]

    def _bias(self, own: tuple[int, ...], n: int) -> ndarray:
        shape = (*own, 1, n) if own and self.d.chance(0.5) else (n,)
        return self.d.array(shape)

    def _shape(self) -> tuple[int, ...]:
        batch = np.broadcast_shapes(self.x.shape[:-2], *(w.shape[:-2] for w in self.weights))
        return (*batch, self.x.shape[-2], self.weights[-1].shape[-1])

    @property
    def given(self) -> list[Any]:
        return [None] * len(self.weights) if self.biases is None else self.biases

    def truth(self) -> truths.Network:
        n = self.d.number
        weights, biases = [n(w) for w in self.weights], [n(y) for y in self.given]
        return truths.Network(n(self.x), weights, biases, self.acts, self.guard)

    @property
    def free(self) -> tuple[ndarray, ...]:
        return tuple(x for x in (self.x, *self.weights, *self.given) if x is not None)

    def likes(self) -> tuple[Any, Any, Any]:
        """Return arrays of the operands' shapes, or None."""
        d = self.d
        groups: list[Any] = []
        for group in (self.weights, self.given):
            name = f"group {len(groups)}"
            made = [d.like(f"{name} {i}", x) for i, x in enumerate(group)]
            groups.append(d.some(name, 0.85, lambda made=made: made))
        return d.like("x_dot", self.x), *groups

    def numbers(self, given: tuple[Any, Any, Any]) -> tuple[Any, list[Any], list[Any]]:
        n, count = self.d.number, len(self.weights)
        x, *groups = given
        return n(x), *([n(y) for y in (g or [None] * count)] for g in groups)


#: The gradients of a network.
_NEEDS = ("x", "weights", "biases")


def mlp(d: Draw) -> Case:
    p = _Network(d)
    p.guard = True
    return Case("mlp", p.head, p.options, lambda: p.truth().out, d, False, True, free=p.free)


def mlp_backward(d: Draw) -> Case:
    p = _Network(d)
    grad, needs = d.array(p.out), d.needs(_NEEDS)
    kwargs = {"needs": needs, "guard": p.guard, **p.options}

    def truth() -> Any:
        return p.truth().backward(d.number(grad), needs)

    case = Case("mlp_bwd", (grad, *p.head), kwargs, truth, d, names=_NEEDS)
    case.told["keep"] = ("mlp", p.head, p.options)
    return case


def mlp_double(d: Draw) -> Case:
    p = _Network(d, 2)
    names = ("grad", *_NEEDS)
    grad, needs, given = d.array(p.out), d.needs(names), p.likes()
    kwargs = {"needs": needs, "guard": p.guard, **p.options}

    def truth() -> Any:
        x, weights, biases = p.numbers(given)
        return p.truth().twice([x, *weights, *biases], d.number(grad), needs)

    args = (*given, grad, *p.head)
    return Case("mlp_double_bwd", args, kwargs, truth, d, names=names)


def mlp_tangent(d: Draw) -> Case:
    p = _Network(d)
    given = p.likes()
    args = (*p.head[:3], *given, p.activation)
    kwargs = {"guard": p.guard, **p.options}
    return Case("mlp_jvp", args, kwargs, lambda: p.truth().tangent(*p.numbers(given)), d)


class _NetworkJet(_Network):
    def __init__(self, d: Draw) -> None:
        super().__init__(d, 4)
        width = self.x.shape[-1]
        given: dict[str, Any] = {}
        self.directions = np.eye(width)
        if width > 3 or d.palette.chance("given", 0.5):
            count = d.palette.one("directions", COUNTS)
            self.directions = d.rng.integers(-4, 5, (count, width)) / 4
            given["directions"] = self.directions
        count = len(self.directions)
        self.second = np.eye(count)
        if d.palette.chance("weights", 0.5):
            self.second = second(d, count)
            given["second"] = self.second
        self.constants = tuple(given.values())
        self.options = self.options | given

    def jet(self) -> truths.Jet:
        return self.truth().jet(self.directions, self.second)


def mlp_jet(d: Draw) -> Case:
    p = _NetworkJet(d)
    kwargs = {"guard": p.guard, **p.options}
    return Case(
        "mlp_jet", p.head, kwargs, lambda: p.jet().result(), d, False, True, free=p.free,
        constants=p.constants,
    )  # fmt: skip


def mlp_jet_backward(d: Draw) -> Case:
    p = _NetworkJet(d)
    shapes = p.out, (len(p.directions), *p.out), (len(p.second), *p.out)
    grads = [
        d.some(f"grad {i}", 0.8, lambda shape=shape: d.array(shape))
        for i, shape in enumerate(shapes)
    ]
    needs = d.needs(_NEEDS)
    kwargs = {"needs": needs, "guard": p.guard, **p.options}

    def truth() -> Any:
        net = p.truth()
        made = net.jet(p.directions, p.second)
        found = made.backward([d.number(g) for g in grads], net.operands, net.needs(needs))
        return net.grouped(found, needs)

    args = (*grads, *p.head)
    case = Case("mlp_jet_bwd", args, kwargs, truth, d, False, True, names=_NEEDS)
    case.constants = p.constants
    case.told["keep"] = ("mlp_jet", p.head, p.options)
    return case


CALLS = {
    layer_jet: 4, layer_jet_backward: 4, formula_jet: 3, formula_jet_backward: 4, mlp: 4,
    mlp_backward: 4, mlp_double: 3, mlp_tangent: 2, mlp_jet: 4, mlp_jet_backward: 5,
}  # fmt: skip
