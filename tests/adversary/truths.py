"""What every public function returns: its mathematics over numbers with bounds.

A forward is written out; gradients are reverse mode on the tape, those of gradients reverse mode
twice, tangents and jets the chain rule in one variable. Each function takes its operands as numbers
in the order of the public one and returns its result's nest, with None where there is no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .bounded import Number, at_once, gradients, in_any_order, stack, sum_to
from .curves import Math, activation, curve, slope

Some = Number | None
#: A right factor, and of every member of a jet the left one and their product.
Group = tuple[Number, list[Number], list[Number]]
#: A formula: from functions, sums and operands to a result or a tuple of results.
Formula = Callable[..., Any]


def matmul(a: Number, b: Number, bias: Some = None) -> Number:
    """Return a @ b + bias, 1-D factors as in NumPy's."""
    shape = list(_result(a.shape, b.shape))
    x = a.reshape((1, *a.shape)) if len(a.shape) == 1 else a
    y = b.reshape((*b.shape, 1)) if len(b.shape) == 1 else b
    z = x @ y
    if bias is not None:
        batch = np.broadcast_shapes(z.shape[:-2], bias.shape[:-2])
        shape = [*batch, *shape[len(z.shape[:-2]) :]]
        z = z.broadcast((*batch, *z.shape[-2:])) + bias
    return z.reshape(tuple(shape)) if z.shape != tuple(shape) else z


def _result(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of NumPy's matmul."""
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    return (*batch, *(a[-2:-1]), *(b[-1:] if len(b) > 1 else ()))


def zeros(like: Number) -> Number:
    return like.rules.number(np.zeros(like.shape))


def ones(like: Number) -> Number:
    return like.rules.number(np.ones(like.shape))


def add(x: Some, y: Some) -> Some:
    """Return a sum; None is zero."""
    return y if x is None else x if y is None else x + y


def mul(x: Some, y: Some) -> Some:
    return None if x is None or y is None else x * y


def chosen(
    results: Sequence[Number], cotangents: Sequence[Some], inputs: Sequence[Some],
    needs: Sequence[bool],
) -> list[Some]:  # fmt: skip
    """Return the gradients that are wanted, zeros of those that nothing depends on."""
    there = [x for x in inputs if x is not None]
    found = dict(zip([x.turn for x in there], gradients(results, cotangents, there), strict=True))
    made: list[Some] = []
    for x, wanted in zip(inputs, needs, strict=True):
        if x is None or not wanted:
            made.append(None)
        else:
            g = found[x.turn]
            made.append(zeros(x) if g is None else g)
    return made


def every(x: Sequence[Any]) -> list[bool]:
    return [True] * len(x)


# --- a layer --------------------------------------------------------------------------------------
class Layer:
    """act(a @ b + bias) + residual, at a saved pre-activation where there is one."""

    def __init__(
        self, a: Number, b: Number, bias: Some, act: str, guard: bool = True,
        residual: Some = None, saved: Some = None,
    ) -> None:  # fmt: skip
        self.operands: list[Some] = [a, b, bias, *([] if residual is None else [residual])]
        self.act, self.guard = act, guard
        z = matmul(a, b, bias)
        self.pre = z if saved is None else z.held(saved)
        self.out = activation(act, self.pre, guard)
        if residual is not None:
            self.out = self.out + residual

    def backward(self, grad: Number, needs: Sequence[bool], sum_batch: bool = False) -> list[Some]:
        made = chosen([self.out], [grad], self.operands, needs)
        if sum_batch and made[1] is not None and len(made[1].shape) > 2:
            made[1] = sum_to(made[1], made[1].shape[-2:])
        return made

    def twice(self, cotangents: Sequence[Some], grad: Number, needs: Sequence[bool]) -> list[Some]:
        first = self.backward(grad, every(self.operands))
        given = [(x, c) for x, c in zip(first, cotangents, strict=True) if x is not None]
        results = [x for x, _ in given]
        return chosen(results, [c for _, c in given], [grad, *self.operands], needs)

    def tangent(self, dots: Sequence[Some]) -> tuple[Number, Number]:
        a, b, bias, *_ = self.operands
        assert a is not None and b is not None
        a_dot, b_dot, bias_dot, *rest = dots
        t = None if a_dot is None else matmul(a_dot, b)
        t = add(t, None if b_dot is None else matmul(a, b_dot))
        if bias_dot is not None:
            assert bias is not None
            t = add(t, matmul(zeros(a), zeros(b), bias_dot))
        t = mul(t, slope(self.act, self.pre, self.guard))
        t = add(t, rest[0]) if rest else t
        return self.out, zeros(self.out) if t is None else t.broadcast(self.out.shape)


# --- gates ----------------------------------------------------------------------------------------
class Gate:
    """act(a) * b, element by element."""

    def __init__(self, a: Number, b: Number, act: str, guard: bool = True) -> None:
        self.a, self.b, self.act, self.guard = a, b, act, guard
        self.out = activation(act, a, guard) * b

    def backward(self, grad: Number, needs: Sequence[bool]) -> list[Some]:
        return chosen([self.out], [grad], [self.a, self.b], needs)

    def twice(self, cotangents: Sequence[Some], grad: Number, needs: Sequence[bool]) -> list[Some]:
        first = self.backward(grad, (True, True))
        results = [x for x in first if x is not None]
        return chosen(results, cotangents, [grad, self.a, self.b], needs)

    def tangent(self, dots: Sequence[Some]) -> tuple[Number, Number]:
        a_dot, b_dot = dots
        f1 = slope(self.act, self.a, self.guard)
        t = add(mul(mul(a_dot, self.b), f1), mul(b_dot, activation(self.act, self.a, self.guard)))
        return self.out, zeros(self.out) if t is None else t


# --- formulas -------------------------------------------------------------------------------------
class Fused:
    """A formula of products of one left factor, and of operands; without a factor of operands."""

    def __init__(
        self, formula: Formula, a: Some, factors: Sequence[Number], operands: Sequence[Number],
        guard: bool = True, saved: Sequence[Some] = (), biases: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.a, self.factors, self.given = a, factors, list(operands)
        sums = [matmul(a, b) for b in factors] if a is not None else []
        self.sums = sums
        self.shape = np.broadcast_shapes(*(z.shape for z in sums), *(x.shape for x in operands))
        self.wide = [x.broadcast(self.shape) for x in operands]
        # a saved pre-activation of a gated layer has its bias
        self.args = list(sums)
        for i, at in enumerate(biases):
            if at >= 0:
                self.args[i] = sums[i] + self.wide[at]
        self.pre = list(self.args)
        if saved and saved[0] is not None:
            self.args = [z.held(s) for z, s in zip(self.args, saved, strict=True)]
        rest = [] if biases else self.wide
        made = formula(Math(guard), *self.args, *rest)
        self.several = isinstance(made, tuple)
        outs = made if isinstance(made, tuple) else (made,)
        self.outs = [y.broadcast(self.shape) for y in outs]

    @property
    def operands(self) -> list[Some]:
        return [*([] if self.a is None else [self.a, *self.factors]), *self.given]

    def backward(self, grads: Sequence[Some], needs: Sequence[bool]) -> list[Some]:
        return chosen(self.outs, grads, self.operands, needs)

    def twice(self, cotangents: Sequence[Some], grad: Number, needs: Sequence[bool]) -> list[Some]:
        first = self.backward([grad], every(self.operands))
        results = [x for x in first if x is not None]
        return chosen(results, cotangents, [grad, *self.operands], needs)

    def tangent(
        self, a_dot: Some, b_dots: Sequence[Some], dots: Sequence[Some]
    ) -> tuple[Number, Number]:
        (out,) = self.outs
        moved: list[Some] = []
        for b, b_dot in zip(self.factors, b_dots, strict=True):
            t = None if a_dot is None else matmul(a_dot, b)
            assert self.a is not None
            moved.append(add(t, None if b_dot is None else matmul(self.a, b_dot)))
        inputs = [*self.sums, *self.wide]
        partials = gradients([out], [ones(out)], inputs)
        total = None
        for partial, dot in zip(partials, [*moved, *dots], strict=True):
            total = add(total, mul(partial, dot))
        return out, zeros(out) if total is None else total.broadcast(self.shape)


# --- jets -----------------------------------------------------------------------------------------
class Jet:
    """A value, its directions and its second derivatives, as a layer or a formula moves them.

    `weights` is (S, D); a weight of 0 leaves its direction out. `groups` are what its products are
    made of: right factors, each with the left ones and the products of all members.
    """

    def __init__(
        self, out: Number, first: Some, second: Some, dots: Sequence[Number],
        ddots: Sequence[Some], weights: Any, groups: Sequence[Group] = (),
    ) -> None:  # fmt: skip
        nothing = zeros(out)
        self.out, self.groups = out, groups
        self.dots = [nothing if first is None else (first * t) for t in dots]
        self.ddots: list[Number] = []
        for row, t in zip(weights, ddots, strict=True):
            bent = None
            for weight, dot in zip(row, dots, strict=True):
                if weight:
                    bent = add(bent, dot * dot * float(weight))
            made = add(mul(first, t), mul(second, bent))
            self.ddots.append(nothing if made is None else made)
        self.dots = [y.broadcast(out.shape) for y in self.dots]
        self.ddots = [y.broadcast(out.shape) for y in self.ddots]

    def result(self) -> tuple[Number, Number, Number]:
        r, shape = self.out.rules, self.out.shape
        return self.out, stack(self.dots, shape, r), stack(self.ddots, shape, r)

    def backward(
        self, grads: Sequence[Some], inputs: Sequence[Some], needs: Sequence[bool]
    ) -> list[Some]:
        grad, dot, ddot = grads
        results, cotangents = [self.out], [grad]
        for made, g in ((self.dots, dot), (self.ddots, ddot)):
            results += made
            cotangents += [None if g is None else g[i] for i in range(len(made))]
        # (the results are the members, and each has a term in every gradient)
        found = chosen(results, cotangents, inputs, needs)
        found = [None if x is None else in_any_order(x, len(results)) for x in found]
        for b, lefts, products in self.groups:
            slopes = gradients(results, cotangents, products)
            pairs = zip(products, slopes, strict=True)
            there = [zeros(x) if slope is None else slope for x, slope in pairs]
            for i, x in enumerate(inputs):
                made = found[i]
                if x is b and made is not None:
                    found[i] = at_once(made, lefts, there)
        return found


def _group(b: Number, lefts: Sequence[Some], products: Sequence[Some]) -> Group:
    """Return a group of the members that are there."""
    return b, [x for x in lefts if x is not None], [x for x in products if x is not None]


def members(x: Some, count: int) -> list[Some]:
    """Return the members of a first axis; None of each where there is none."""
    return [None if x is None else x[i] for i in range(count)]


def layer_jet(
    a: Number, b: Number, bias: Some, act: str, a_dot: Sequence[Number], a_ddot: Sequence[Some],
    weights: Any, guard: bool,
) -> Jet:  # fmt: skip
    z = matmul(a, b, bias)
    out = activation(act, z, guard)
    dots = [matmul(t, b) for t in a_dot]
    ddots = [None if t is None else matmul(t, b) for t in a_ddot]
    group = _group(b, [a, *a_dot, *a_ddot], [z, *dots, *ddots])
    return Jet(out, slope(act, z, guard), slope(act, z, guard, 2), dots, ddots, weights, [group])


def fused_jet(f: Fused, a_dot: Sequence[Number], a_ddot: Sequence[Some], weights: Any) -> Jet:
    (out,), (z,), (b,) = f.outs, f.sums, f.factors
    (first,) = gradients([out], [ones(out)], [z])
    second = None
    if first is not None:
        (second,) = gradients([first], [ones(first)], [z])
    dots = [matmul(t, b) for t in a_dot]
    ddots = [None if t is None else matmul(t, b) for t in a_ddot]
    group = _group(b, [f.a, *a_dot, *a_ddot], [z, *dots, *ddots])
    return Jet(out, first, second, dots, ddots, weights, [group])


# --- networks -------------------------------------------------------------------------------------
class Network:
    """Layers one after another."""

    def __init__(
        self, x: Number, weights: Sequence[Number], biases: Sequence[Some],
        acts: Sequence[str], guard: bool = True,
    ) -> None:  # fmt: skip
        self.x, self.weights, self.biases = x, list(weights), list(biases)
        self.acts, self.guard = acts, guard
        self.inputs, self.sums = [x], []
        for w, bias, act in zip(weights, biases, acts, strict=True):
            z = matmul(self.inputs[-1], w, bias)
            self.sums.append(z)
            self.out = activation(act, z, guard)
            self.inputs.append(self.out.stored())  # (a device's layers are calls of their own)

    @property
    def operands(self) -> list[Some]:
        return [self.x, *self.weights, *self.biases]

    def needs(self, names: Sequence[str]) -> list[bool]:
        count = len(self.weights)
        return ["x" in names, *["weights" in names] * count, *["biases" in names] * count]

    def grouped(self, found: Sequence[Some], names: Sequence[str]) -> tuple[Any, ...]:
        """Return d_x, d_weights, d_biases."""
        count = len(self.weights)
        groups = tuple(found[1 : 1 + count]), tuple(found[1 + count :])
        return found[0], *[
            g if n in names else None for g, n in zip(groups, ("weights", "biases"), strict=True)
        ]

    def backward(self, grad: Number, names: Sequence[str]) -> tuple[Any, ...]:
        found = chosen([self.out], [grad], self.operands, self.needs(names))
        return self.grouped(found, names)

    def twice(
        self, cotangents: Sequence[Some], grad: Number, names: Sequence[str]
    ) -> tuple[Any, ...]:
        first = chosen([self.out], [grad], self.operands, every(self.operands))
        given = [(x, c) for x, c in zip(first, cotangents, strict=True) if x is not None]
        needs = ["grad" in names, *self.needs(names)]
        inputs = [grad, *self.operands]
        found = chosen([x for x, _ in given], [c for _, c in given], inputs, needs)
        return found[0], *self.grouped(found[1:], names)

    def tangent(
        self, x_dot: Some, w_dots: Sequence[Some], b_dots: Sequence[Some]
    ) -> tuple[Number, Number]:
        t = x_dot
        for i, (w, act) in enumerate(zip(self.weights, self.acts, strict=True)):
            moved = None if t is None else matmul(t, w)
            if w_dots[i] is not None:
                moved = add(moved, matmul(self.inputs[i], w_dots[i]))
            if b_dots[i] is not None:
                moved = add(moved, matmul(zeros(self.inputs[i]), zeros(w), b_dots[i]))
            t = mul(moved, slope(act, self.sums[i], self.guard))
        return self.out, zeros(self.out) if t is None else t.broadcast(self.out.shape)

    def jet(self, directions: Any, second: Any) -> Jet:
        r = self.x.rules
        dots = [r.number(row[None, :]) for row in directions]
        ddots: list[Some] = [None] * len(second)
        made, groups = None, list[Group]()
        for i, (w, act) in enumerate(zip(self.weights, self.acts, strict=True)):
            z = self.sums[i]
            moved = [matmul(t, w) for t in dots]
            bent = [None if t is None else matmul(t, w) for t in ddots]
            f1, f2 = slope(act, z, self.guard), slope(act, z, self.guard, 2)
            groups.append(_group(w, [self.inputs[i], *dots, *ddots], [z, *moved, *bent]))
            made = Jet(self.inputs[i + 1], f1, f2, moved, bent, second, groups)
            dots, ddots = list(made.dots), list(made.ddots)
        assert made is not None
        return made


__all__ = ["Fused", "Gate", "Jet", "Layer", "Network", "curve", "fused_jet", "layer_jet", "members"]
