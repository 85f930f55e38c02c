"""Formulas over JAX's arrays, with derivatives of every order: what XLA fuses itself.

The derivatives are those of the recorded graphs (`numfuse.language.derivatives`), so activations
have their own here too, and end where the table ends.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from numfuse.language.curves import Curve, leaf
from numfuse.language.derivatives import forward
from numfuse.language.graph import SYMBOL, Expr, bottom_up, constant, rounded


def _finite(x: Any) -> Any:
    return jnp.where(jnp.isfinite(x), x, 0)


def _product_low(a: Any, b: Any) -> Any:
    """The rounding error of a product, of halves whose products are exact."""
    splitter = 2.0 ** ((jnp.finfo(a.dtype).nmant + 2) // 2) + 1.0

    def halves(x: Any) -> tuple[Any, Any]:
        big = x * splitter
        high = big - (big - x)
        return high, x - high

    (ah, al), (bh, bl) = halves(a), halves(b)
    return _finite(((ah * bh - a * b) + ah * bl + al * bh) + al * bl)


def _scaled_bell(factor: Any, high: Any, low: Any) -> Any:
    e = jnp.exp(-jnp.abs(high + low))
    return factor * e / ((1 + e) * (1 + e))


#: As `numfuse.language.operations` has them, in the arrays' dtype.
MEANINGS: dict[str, Any] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sqrt": jnp.sqrt,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "both": jnp.logical_and,
    "either": jnp.logical_or,
    "negation": jnp.logical_not,
    "where": jnp.where,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "copysign": jnp.copysign,
    "fma": lambda a, b, c: a * b + c,
    "product": jnp.multiply,
    "product_low": _product_low,
    "finite": _finite,
    "exp": jnp.exp,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "erf": jax.scipy.special.erf,
    "scaled_normal_cdf": lambda f, x: f * (0.5 * jax.scipy.special.erfc(x * -(0.5**0.5))),
    "scaled_exp": lambda f, high, low: f * (jnp.exp(high) * jnp.exp(low)),
    "scaled_sigmoid": lambda f, high, low: f * jax.nn.sigmoid(high + low),
    "scaled_bell": _scaled_bell,
}


def _over(exprs: Sequence[Expr], leaves: Mapping[Expr, Any], dtype: Any, guard: bool) -> Any:
    """Return the graphs at arrays; with `guard` a derivative that is not finite counts as 0."""

    def value(e: Expr, args: list[Any]) -> Any:
        if e.op == "const":
            return jnp.asarray(rounded(e, dtype.name))
        if not args:
            return leaves[e]
        if not isinstance(e.payload, Curve):
            return MEANINGS[e.op](*args)
        (found,) = _over((e.payload.trace,), {SYMBOL: args[0]}, dtype, False)
        return _finite(found) if guard and e.payload.order else found

    return bottom_up(exprs, value)


class Graphs:
    """Graphs over inputs, as an argument of a function that JAX differentiates."""

    def __init__(self, exprs: Sequence[Expr], names: Sequence[str], guard: bool) -> None:
        self.exprs, self.names, self.guard = tuple(exprs), tuple(names), guard

    def slopes(self, moving: Sequence[str]) -> tuple[Graphs, list[tuple[int, int]]]:
        """Return the derivatives that are not zero everywhere, and the places of each one's graph
        and of its input in `moving`."""
        found, places = [], []
        for j, name in enumerate(moving):
            slopes = forward(self.exprs, {leaf(name): constant(1)})
            for i, slope in enumerate(slopes):
                if slope is not None:
                    found.append(slope)
                    places.append((i, j))
        return Graphs(found, self.names, self.guard), places


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def values(graphs: Graphs, *arrays: Any) -> tuple[Any, ...]:
    """Return the graphs at arrays, one for each name, that broadcast: in their dtype and shape."""
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    leaves = {leaf(name): x for name, x in zip(graphs.names, arrays, strict=True)}
    found = _over(graphs.exprs, leaves, arrays[0].dtype, graphs.guard)
    return tuple([jnp.broadcast_to(x, shape) for x in found])


def _moved(graphs: Graphs, arrays: Sequence[Any], tangents: Sequence[Any]) -> Any:
    zero = jax.custom_derivatives.SymbolicZero
    pairs = zip(graphs.names, tangents, strict=True)
    moving = {name: dot for name, dot in pairs if type(dot) is not zero}
    found = values(graphs, *arrays)
    slopes, places = graphs.slopes(tuple(moving))
    dots, made = list(moving.values()), [jnp.zeros_like(x) for x in found]
    for (i, j), slope in zip(places, values(slopes, *arrays), strict=True):
        made[i] = made[i] + slope * dots[j]
    return found, tuple(made)


values.defjvp(_moved, symbolic_zeros=True)
