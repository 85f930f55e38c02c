"""Calls of formulas and of gated layers, and their jets: ways to draw one for each function.

A formula is written once, over a namespace of functions: numfuse's records it, the truth's computes
it with its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

import numfuse as nf
from numfuse import expr as ex

from . import truths
from .cases import Case, Want
from .draws import Draw
from .layers import NAMES, result


class Ours:
    """The functions of formulas as numfuse has them."""

    tanh, sigmoid, exp, sqrt, log1p = ex.tanh, ex.sigmoid, ex.exp, ex.sqrt, ex.log1p
    maximum = ex.maximum

    @staticmethod
    def act(name: str, x: Any) -> Any:
        return nf.activations()[name](x)

    @staticmethod
    def where_positive(x: Any, y: Any, z: Any) -> Any:
        return ex.where(x > 0.0, y, z)


class Formula(NamedTuple):
    """A formula of sums of products and of operands."""

    sums: int
    operands: int
    write: Callable[..., Any]


#: Of one product, smooth enough for jets.
FORMULAS = {
    "scaled": Formula(1, 2, lambda m, z, x, y: m.tanh(z + x) * y),
    "masked": Formula(1, 2, lambda m, z, x, y: m.where_positive(x, z * y, 0.25 * z + y)),
    "gated": Formula(1, 2, lambda m, z, x, y: m.act("gelu", z + x) * y + x),
    "quadratic": Formula(1, 1, lambda m, z, x: z * z * x - 0.5 * z),
    "bare": Formula(1, 0, lambda m, z: m.act("silu", z)),
    "damped": Formula(1, 1, lambda m, z, x: z / (1.5 + x * x) + m.sigmoid(x)),
    "leaky": Formula(1, 1, lambda m, z, x: m.maximum(z + x, 0.125 * z)),
}
#: Of several products.
SEVERAL = {
    "two": Formula(2, 1, lambda m, z, w, x: m.act("sigmoid", z + x) * w),
    "two without": Formula(2, 0, lambda m, z, w: m.tanh(z) * w + z),
    "three": Formula(3, 1, lambda m, z, w, y: z * w + m.act("relu", y)),
    "three and x": Formula(3, 1, lambda m, z, w, y, x: (z + w * x) * m.sigmoid(y)),
}
SEVERAL["three"] = Formula(3, 0, SEVERAL["three"].write)
#: Of operands alone.
ELEMENTWISE = {
    "mixed": Formula(0, 3, lambda m, x, y, z: m.tanh(x) * y + z),
    "pair": Formula(0, 2, lambda m, x, y: (x * m.sigmoid(y), x + 0.5 * y)),
    "root": Formula(0, 2, lambda m, x, y: m.sqrt(1.0 + x * x) * y),
    "log": Formula(0, 1, lambda m, x: m.log1p(x * x)),
    "single": Formula(0, 1, lambda m, x: (m.act("silu", x),)),
    "largest": Formula(0, 2, lambda m, x, y: m.maximum(x, y) * x),
    "bell": Formula(0, 2, lambda m, x, y: m.exp(-(x * x)) * y),
    "quotient": Formula(0, 3, lambda m, x, y, z: (x - y) / (0.5 + z * z)),
}
#: What numfuse has recorded, by the name of a formula.
_RECORDED: dict[str, Any] = {}


def recorded(name: str, f: Formula) -> Any:
    """Return a formula as numfuse takes it, recorded once."""
    if name not in _RECORDED:
        words = [f"z{i}" for i in range(f.sums)] + [f"x{i}" for i in range(f.operands)]
        given: dict[str, Any] = {"write": f.write, "ours": Ours}
        exec(f"def formula({', '.join(words)}): return write(ours, {', '.join(words)})", given)
        _RECORDED[name] = nf.epilogue(given["formula"], name=f"adversary {name}")
    return _RECORDED[name]


class Operands:
    """Factors, a formula and its operands."""

    def __init__(
        self, d: Draw, table: dict[str, Formula], vectors: bool = True, work: int | None = None
    ) -> None:
        self.d = d
        self.name = d.palette.one("formula", tuple(table))
        self.formula = table[self.name]
        self.a, self.factors = d.factors(self.formula.sums, vectors, work)
        self.several = self.formula.sums > 1 or (vectors and d.palette.chance("tuple", 0.2))
        self.out = result(self.a, self.factors[0])
        self.operands = tuple(
            drawn(d, f"operand {i}", self.out) for i in range(self.formula.operands)
        )
        self.b = tuple(self.factors) if self.several else self.factors[0]
        self.f = recorded(self.name, self.formula)
        every = self.a, *self.factors, *self.operands
        self.free = tuple(x for x in every if isinstance(x, ndarray))

    def truth(self, guard: bool = True, saved: Any = None) -> truths.Fused:
        n = self.d.number
        held = () if saved is None else [n(x) for x in saved]
        factors, operands = [n(b) for b in self.factors], [n(x) for x in self.operands]
        return truths.Fused(self.formula.write, n(self.a), factors, operands, guard, held)

    def grad(self) -> ndarray:
        grad = self.d.array(self.out)
        if grad.ndim:
            self.d.bound.append((grad, -1))
        return grad

    def wanted(self, found: Any, x: Any) -> Any:
        """Return a gradient in the dtype that an operand's has."""
        number = found is not None and not isinstance(x, ndarray)
        return Want(found, self.d.rules.acc) if number else found

    def gradients(self, found: Any) -> tuple[Any, Any, Any]:
        """Return d_a, d_b, d_operands."""
        d_a, *rest = found
        d_b = tuple(rest[: len(self.factors)])
        others = zip(rest[len(self.factors) :], self.operands, strict=True)
        d_operands = tuple(self.wanted(y, x) for y, x in others)
        return d_a, d_b if self.several else d_b[0], d_operands

    @property
    def names(self) -> tuple[Any, ...]:
        return ("a", "b", *range(len(self.operands)))

    def flags(self, needs: Any) -> list[bool]:
        """Return which gradients are wanted, factor by factor."""
        others = [i in needs for i in range(len(self.operands))]
        return ["a" in needs, *["b" in needs] * len(self.factors), *others]


def drawn(d: Draw, what: str, shape: tuple[int, ...]) -> Any:
    """Return an operand: an array, or a number that every dtype has."""
    if d.palette.chance(f"{what} is a number", 0.2):
        return d.one((0.5, -1.25, 2.0, 3, 0.0))
    return d.operand(what, shape)


# --- products -------------------------------------------------------------------------------------
def epilogue(d: Draw) -> Case:
    p = Operands(d, FORMULAS if d.palette.chance("single", 0.6) else SEVERAL)
    keep = d.palette.chance("keep", 0.3)

    def truth() -> Any:
        made = p.truth()
        sums = tuple(Want(z, d.rules.acc) for z in made.sums)
        return (made.outs[0], sums) if keep else made.outs[0]

    kwargs = {"return_pre_activation": True} if keep else {}
    args = (p.a, p.b, p.f, *p.operands)
    out = "first" if keep else True
    return Case("matmul_epilogue", args, kwargs, truth, d, False, out, free=p.free)


def epilogue_backward(d: Draw) -> Case:
    p = Operands(d, FORMULAS if d.palette.chance("single", 0.6) else SEVERAL)
    grad, guard, needs = p.grad(), d.guard, d.needs(p.names)
    kwargs: dict[str, Any] = {"needs": needs, "guard": guard}
    saved = None
    if d.palette.chance("saved", 0.3):
        with np.errstate(all="ignore"):
            saved = tuple(z.v.astype(d.rules.acc) for z in p.truth().sums)
        d.memory += [(z, z) for z in saved]
        kwargs["pre_activation"] = saved

    def truth() -> Any:
        made = p.truth(guard, saved)
        return p.gradients(made.backward([d.number(grad)], p.flags(needs)))

    args = (grad, p.a, p.b, p.f, *p.operands)
    return Case("matmul_epilogue_bwd", args, kwargs, truth, d, False, True, names=p.names)


def epilogue_tangent(d: Draw) -> Case:
    p = Operands(d, FORMULAS if d.palette.chance("single", 0.6) else SEVERAL)
    guard, a_dot = d.guard, d.like("a_dot", p.a)
    b_dots = tuple(d.like(f"b_dot {i}", b) for i, b in enumerate(p.factors))
    dots = tuple(
        d.like(f"dot {i}", x) if isinstance(x, ndarray) else d.some(f"dot {i}", 0.5, lambda: 0.75)
        for i, x in enumerate(p.operands)
    )

    def truth() -> Any:
        n = d.number
        made = p.truth(guard)
        return made.tangent(n(a_dot), [n(x) for x in b_dots], [n(x) for x in dots])

    b_dot = b_dots if p.several else b_dots[0]
    args = (p.a, p.b, p.f, p.operands, a_dot, b_dot, dots)
    return Case("matmul_epilogue_jvp", args, {"guard": guard}, truth, d)


# --- elements -------------------------------------------------------------------------------------
def _elements(d: Draw) -> tuple[str, Formula, tuple[Any, ...], tuple[int, ...]]:
    name = d.palette.one("formula", tuple(ELEMENTWISE))
    f = ELEMENTWISE[name]
    m, n = d.lengths(2, d.limits.elements)
    shape: tuple[int, ...] = (*d.batch(m * n), m, n)[int(d.rng.integers(0, 2)) :]
    operands = [d.array(shape), *(drawn(d, f"operand {i}", shape) for i in range(1, f.operands))]
    if shape and shape[-1] > 1 and len(operands) > 1:
        other = operands[1]
        if isinstance(other, ndarray) and other.ndim and other.shape[-1] > 1:
            d.bound.append((other, -1))
    order = d.palette.generator("order").permutation(len(operands))
    return name, f, tuple(operands[int(i)] for i in order), shape


def elementwise(d: Draw) -> Case:
    name, f, operands, shape = _elements(d)

    def truth() -> Any:
        made = truths.Fused(f.write, None, (), [d.number(x) for x in operands])
        return tuple(made.outs) if made.several else made.outs[0]

    whole = tuple(x for x in operands if isinstance(x, ndarray) and x.shape == shape)
    free = tuple(x for x in operands if isinstance(x, ndarray))
    args = (recorded(name, f), *operands)
    return Case("elementwise", args, {}, truth, d, False, True, whole, free=free)


def elementwise_backward(d: Draw) -> Case:
    name, f, operands, shape = _elements(d)
    names, guard = tuple(range(len(operands))), d.guard
    needs = d.needs(names)
    several = name in ("pair", "single")
    count = {"pair": 2}.get(name, 1)
    there = [i == 0 or d.palette.chance("second", 0.7) for i in range(count)]
    grads: Any = tuple(d.array(shape) if x else None for x in there)
    if count > 1 and d.palette.chance("second alone", 0.2):
        grads = (None, d.array(shape))

    def truth() -> Any:
        made = truths.Fused(f.write, None, (), [d.number(x) for x in operands], guard)
        found = made.backward([d.number(g) for g in grads], [i in needs for i in names])
        acc = d.rules.acc
        return tuple(
            Want(y, acc) if y is not None and not isinstance(x, ndarray) else y
            for y, x in zip(found, operands, strict=True)
        )

    args = (grads if several else grads[0], recorded(name, f), *operands)
    kwargs = {"needs": needs, "guard": guard}
    return Case("elementwise_bwd", args, kwargs, truth, d, False, True, names=names)


# --- gated layers ---------------------------------------------------------------------------------
class Gated:
    """The operands of a gated layer."""

    NAMES = ("a", "b_gate", "b_up", "bias_gate", "bias_up")

    def __init__(self, d: Draw) -> None:
        self.d, self.act = d, d.palette.one("activation", NAMES)
        self.a, factors = d.factors(2)
        self.out = result(self.a, factors[0])
        biases = [
            d.some(f"bias {i}", 0.5, lambda i=i: d.operand(f"operand {i}", self.out))
            for i in range(2)
        ]
        self.given = [self.a, *factors, *biases]

    def truth(self, guard: bool = True, saved: Any = None) -> truths.Fused:
        n = self.d.number
        biases, at = [], []
        for x in self.given[3:]:
            at.append(-1 if x is None else len(biases))
            biases += [] if x is None else [x]
        held = () if saved is None else [n(x) for x in saved]

        def formula(m: Any, p: Any, u: Any) -> Any:
            return m.act(self.act, p) * u

        operands = [n(x) for x in biases]
        factors = [n(x) for x in self.given[1:3]]
        return truths.Fused(formula, n(self.a), factors, operands, guard, held, at)

    def every(self, found: Any) -> list[Any]:
        """Return a gradient for each operand, None for a bias that is None."""
        left = list(found)
        return [None if x is None else left.pop(0) for x in self.given]

    def flags(self, needs: Any) -> list[bool]:
        pairs = zip(self.NAMES, self.given, strict=True)
        return [name in needs for name, x in pairs if x is not None]

    def saved(self) -> tuple[ndarray, ndarray] | None:
        d = self.d
        if not d.palette.chance("saved", 0.3):
            return None
        with np.errstate(all="ignore"):
            gate, up = (z.v.astype(d.dtype) for z in self.truth().pre)
        d.memory += [(gate, gate), (up, up)]
        return gate, up


def gated_layer(d: Draw) -> Case:
    p = Gated(d)
    keep = d.palette.chance("keep", 0.3)

    def truth() -> Any:
        made = p.truth()
        return (made.outs[0], tuple(made.pre)) if keep else made.outs[0]

    kwargs = {"return_pre_activation": True} if keep else {}
    free = tuple(x for x in p.given if x is not None)
    args = (*p.given, p.act)
    out = "first" if keep else True
    return Case("matmul_activation_mul", args, kwargs, truth, d, False, out, free=free)


def gated_layer_backward(d: Draw) -> Case:
    p = Gated(d)
    grad, guard, needs = d.array(p.out), d.guard, d.needs(p.NAMES)
    saved, sum_batch = p.saved(), d.chance(0.25)
    kwargs: dict[str, Any] = {"needs": needs, "guard": guard, "sum_batch": sum_batch}
    if saved is not None:
        kwargs["pre_activation"] = saved

    def truth() -> Any:
        made = p.truth(guard, saved)
        found = p.every(made.backward([d.number(grad)], p.flags(needs)))
        for i in (1, 2):
            if sum_batch and found[i] is not None and len(found[i].shape) > 2:
                found[i] = truths.sum_to(found[i], found[i].shape[-2:])
        return tuple(found)

    args = (grad, *p.given, p.act)
    return Case("matmul_activation_mul_bwd", args, kwargs, truth, d, False, True, names=p.NAMES)


def gated_layer_double(d: Draw) -> Case:
    p = Gated(d)
    names = ("grad", *p.NAMES)
    grad, guard, needs = d.array(p.out), d.guard, d.needs(names)
    cotangents = [d.like(f"dot {i}", x) for i, x in enumerate(p.given)]
    kwargs: dict[str, Any] = {"needs": needs, "guard": guard}
    saved = p.saved()
    if saved is not None:
        kwargs["pre_activation"] = saved

    def truth() -> Any:
        made = p.truth(guard, saved)
        given = [d.number(c) for c, x in zip(cotangents, p.given, strict=True) if x is not None]
        d_grad, *rest = made.twice(given, d.number(grad), ["grad" in needs, *p.flags(needs)])
        return (d_grad, *p.every(rest))

    args = (*cotangents, grad, *p.given, p.act)
    return Case("matmul_activation_mul_double_bwd", args, kwargs, truth, d, names=names)


def gated_layer_tangent(d: Draw) -> Case:
    p = Gated(d)
    dots, guard = [d.like(f"dot {i}", x) for i, x in enumerate(p.given)], d.guard

    def truth() -> Any:
        n = d.number
        made = p.truth(guard)
        gate, up = made.args
        moved: list[Any] = []
        for i in range(2):
            t = None if dots[0] is None else truths.matmul(n(dots[0]), n(p.given[1 + i]))
            b_dot, bias_dot = n(dots[1 + i]), n(dots[3 + i])
            t = truths.add(t, None if b_dot is None else truths.matmul(n(p.a), b_dot))
            moved.append(truths.add(t, bias_dot))
        gate_slope = truths.slope(p.act, gate, guard)
        first = truths.mul(truths.mul(moved[0], gate_slope), up)
        second = truths.mul(moved[1], truths.activation(p.act, gate, guard))
        total = truths.add(first, second)
        out = made.outs[0]
        return out, truths.zeros(out) if total is None else total.broadcast(out.shape)

    args = (*p.given, *dots, p.act)
    return Case("matmul_activation_mul_jvp", args, {"guard": guard}, truth, d)


CALLS = {
    epilogue: 5, epilogue_backward: 5, epilogue_tangent: 3, elementwise: 5,
    elementwise_backward: 5, gated_layer: 4, gated_layer_backward: 4, gated_layer_double: 3,
    gated_layer_tangent: 2,
}  # fmt: skip
