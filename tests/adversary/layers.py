"""Calls of layers and gates: ways to draw one for each function."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from . import truths
from .cases import Case, Want
from .curves import ACTIVATIONS
from .draws import Draw

NAMES = tuple(ACTIVATIONS)
#: Gates with names of their own.
GATES = ("silu", "gelu", "relu", "sigmoid")


class Operands:
    """The operands of a layer, and what its calls have in common."""

    def __init__(self, d: Draw, residual: bool = False) -> None:
        self.d = d
        self.a, (self.b,) = d.factors()
        self.out = result(self.a, self.b)
        self.bias = d.some("bias", 0.6, lambda: d.bias(self.out, self.a, self.b))
        self.residual: ndarray | None = None
        if residual:
            kept = tuple(n if d.chance(0.7) else 1 for n in self.out)
            self.residual = d.array(kept[int(d.rng.integers(0, 1 + len(kept) // 2)) :])
        self.act: str = "none" if residual else d.palette.one("activation", NAMES)
        self.given = [self.a, self.b, self.bias, *([self.residual] if residual else [])]

    def grad(self) -> ndarray:
        grad = self.d.array(self.out)
        if grad.ndim:
            self.d.bound.append((grad, -1))
        return grad

    def truth(self, guard: bool = True, saved: ndarray | None = None) -> truths.Layer:
        n = self.d.number
        return truths.Layer(
            n(self.a), n(self.b), n(self.bias), self.act, guard, n(self.residual),
            None if saved is None else n(saved),
        )  # fmt: skip

    def saved(self) -> ndarray | None:
        """Return a pre-activation as a forward would return it, or None."""
        d = self.d
        if not d.palette.chance("saved", 0.35):
            return None
        n = d.number
        z = truths.matmul(n(self.a), n(self.b), n(self.bias))
        if self.residual is not None:
            z = z + n(self.residual)
        acc = d.rules.acc if d.palette.chance("acc", 0.7) else d.dtype
        with np.errstate(all="ignore"):
            made = z.v.astype(acc)
        d.memory.append((made, made))
        return made


def result(a: ndarray, b: ndarray) -> tuple[int, ...]:
    """Return the shape of NumPy's matmul."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))


# --- layers -------------------------------------------------------------------------------------
def forward(d: Draw) -> Case:
    p = Operands(d)
    keep = d.palette.chance("keep", 0.4)

    def truth() -> Any:
        made = p.truth()
        return (made.out, Want(made.pre, d.rules.acc)) if keep else made.out

    kwargs = {"return_pre_activation": True} if keep else {}
    free = tuple(x for x in p.given if x is not None)
    return Case(
        "matmul_bias_activation", (*p.given, p.act), kwargs, truth, d, True,
        "first" if keep else True, free=free,
    )  # fmt: skip


def residual(d: Draw) -> Case:
    p = Operands(d, True)
    free = tuple(x for x in p.given if x is not None)
    return Case(
        "matmul_bias_residual", tuple(p.given), {}, lambda: p.truth().out, d, True, True, free=free
    )


def _backward(d: Draw, with_residual: bool) -> Case:
    p = Operands(d, with_residual)
    names = ("a", "b", "bias", *(("residual",) if with_residual else ()))
    needs, guard, grad = d.needs(names), d.guard, p.grad()
    saved, sum_batch = p.saved(), d.chance(0.3)
    kwargs: dict[str, Any] = {"needs": needs, "guard": guard, "sum_batch": sum_batch}
    if saved is not None:
        kwargs["pre_activation"] = saved

    def truth() -> Any:
        made = p.truth(guard, saved)
        return tuple(made.backward(d.number(grad), [x in needs for x in names], sum_batch))

    head: tuple[Any, ...] = (grad, *p.given) if with_residual else (grad, *p.given, p.act)
    name = "matmul_bias_residual_bwd" if with_residual else "matmul_bias_activation_bwd"
    return Case(name, head, kwargs, truth, d, False, True, names=names)


def backward(d: Draw) -> Case:
    return _backward(d, False)


def residual_backward(d: Draw) -> Case:
    return _backward(d, True)


def _double(d: Draw, with_residual: bool) -> Case:
    p = Operands(d, with_residual)
    names = ("grad", "a", "b", "bias", *(("residual",) if with_residual else ()))
    needs, guard, grad = d.needs(names), d.guard, p.grad()
    cotangents = [d.like(f"dot {i}", x) for i, x in enumerate(p.given)]
    kwargs: dict[str, Any] = {"needs": needs, "guard": guard}
    saved = None if with_residual else p.saved()
    if saved is not None:
        kwargs["pre_activation"] = saved

    def truth() -> Any:
        made = p.truth(guard, saved)
        given = [d.number(x) for x in cotangents]
        return tuple(made.twice(given, d.number(grad), [x in needs for x in names]))

    tail = () if with_residual else (p.act,)
    name = f"matmul_bias_{'residual' if with_residual else 'activation'}_double_bwd"
    return Case(name, (*cotangents, grad, *p.given, *tail), kwargs, truth, d, names=names)


def double_backward(d: Draw) -> Case:
    return _double(d, False)


def residual_double_backward(d: Draw) -> Case:
    return _double(d, True)


def _tangent(d: Draw, with_residual: bool) -> Case:
    p = Operands(d, with_residual)
    dots, guard = [d.like(f"dot {i}", x) for i, x in enumerate(p.given)], d.guard
    kwargs = {} if with_residual else {"guard": guard}

    def truth() -> Any:
        return p.truth(guard).tangent([d.number(x) for x in dots])

    tail = () if with_residual else (p.act,)
    name = "matmul_bias_residual_jvp" if with_residual else "matmul_bias_activation_jvp"
    return Case(name, (*p.given, *dots, *tail), kwargs, truth, d)


def tangent(d: Draw) -> Case:
    return _tangent(d, False)


def residual_tangent(d: Draw) -> Case:
    return _tangent(d, True)


# --- gates ----------------------------------------------------------------------------------------
def _pair(d: Draw) -> tuple[ndarray, ndarray, str, tuple[int, ...]]:
    m, n = d.lengths(2, d.limits.elements)
    shape: tuple[int, ...] = (*d.batch(m * n), m, n)
    if d.chance(0.2):
        shape = shape[-1:]
    elif d.chance(0.04):
        shape = ()
    a, b = d.array(shape), d.array(shape)
    if shape:
        d.bound += [(b, -1)]
    return a, b, d.palette.one("activation", NAMES), shape


def gate(d: Draw) -> Case:
    a, b, act, _ = _pair(d)
    named = act in GATES and d.chance(0.5)

    def truth() -> Any:
        return truths.Gate(d.number(a), d.number(b), act).out

    name, tail = (f"{act}_mul", ()) if named else ("activation_mul", (act,))
    return Case(name, (a, b, *tail), {}, truth, d, True, True, (a, b), free=(a, b))


def gate_backward(d: Draw) -> Case:
    a, b, act, shape = _pair(d)
    grad, guard, names = d.array(shape), d.guard, ("a", "b")
    needs, named = d.needs(names), act in GATES and d.chance(0.5)

    def truth() -> Any:
        made = truths.Gate(d.number(a), d.number(b), act, guard)
        return tuple(made.backward(d.number(grad), [x in needs for x in names]))

    name, tail = (f"{act}_mul_bwd", ()) if named else ("activation_mul_bwd", (act,))
    kwargs = {"needs": needs, "guard": guard}
    return Case(name, (grad, a, b, *tail), kwargs, truth, d, False, True, names=names)


def gate_double_backward(d: Draw) -> Case:
    a, b, act, shape = _pair(d)
    grad, guard, names = d.array(shape), d.guard, ("grad", "a", "b")
    u, v, needs = d.like("u", a), d.like("v", b), d.needs(names)

    def truth() -> Any:
        made = truths.Gate(d.number(a), d.number(b), act, guard)
        given = [d.number(x) for x in (u, v)]
        return tuple(made.twice(given, d.number(grad), [x in needs for x in names]))

    kwargs = {"needs": needs, "guard": guard}
    args = (u, v, grad, a, b, act)
    return Case("activation_mul_double_bwd", args, kwargs, truth, d, names=names)


def gate_tangent(d: Draw) -> Case:
    a, b, act, _ = _pair(d)
    dots, guard = [d.like("a_dot", a), d.like("b_dot", b)], d.guard

    def truth() -> Any:
        made = truths.Gate(d.number(a), d.number(b), act, guard)
        return made.tangent([d.number(x) for x in dots])

    return Case("activation_mul_jvp", (a, b, *dots, act), {"guard": guard}, truth, d)


#: Ways to draw a call, and how often each is taken.
CALLS = {
    forward: 6, residual: 3, backward: 6, residual_backward: 3, double_backward: 4,
    residual_double_backward: 2, tangent: 3, residual_tangent: 2, gate: 4, gate_backward: 4,
    gate_double_backward: 3, gate_tangent: 2,
}  # fmt: skip
