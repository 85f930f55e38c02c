"""Bounds of the nodes of a recorded formula, by interval arithmetic over every finite x.

A target may drop what a bound makes needless: a sign that is known, a factor that cannot overflow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

from numfuse.language.graph import Expr, rounded, topological

__all__ = ["ANY", "Range", "ranges"]

#: The least and the greatest value of a node, NaN aside.
Range: TypeAlias = tuple[float, float]
ANY: Range = (-math.inf, math.inf)


def _hull(values: Iterable[float]) -> Range:
    found = list(values)
    return ANY if any(map(math.isnan, found)) else (min(found), max(found))


def _product(a: Range, b: Range) -> Range:
    return _hull(p * q for p, q in itertools.product(a, b))


def _sum(a: Range, b: Range) -> Range:
    return _hull((a[0] + b[0], a[1] + b[1]))


def _negated(a: Range) -> Range:
    return -a[1], -a[0]


def _absolute(a: Range) -> Range:
    return max(a[0], -a[1], 0.0), max(-a[0], a[1])


_RULES: dict[str, Callable[..., Range]] = {
    "add": _sum,
    "sub": lambda a, b: _sum(a, _negated(b)),
    "mul": _product,
    "product": _product,
    # A rounding error is smaller than what was rounded, and has either sign.
    "product_low": lambda a, b: _hull(s * v for s in (-1, 1) for v in _product(a, b)),
    "fma": lambda a, b, c: _sum(_product(a, b), c),
    "neg": _negated,
    "abs": _absolute,
    "copysign": lambda a, b: (
        _absolute(a) if b[0] > 0 else _hull(s * v for s in (-1, 1) for v in _absolute(a))
    ),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "finite": lambda a: (min(a[0], 0.0), max(a[1], 0.0)),
    "where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "tanh": lambda a: (-1.0, 1.0),
    "erf": lambda a: (-1.0, 1.0),
    "sigmoid": lambda a: (0.0, 1.0),
    "scaled_sigmoid": lambda factor, hi, lo: _product(factor, (0.0, 1.0)),
    "scaled_bell": lambda factor, hi, lo: _product(factor, (0.0, 0.25)),
}


def ranges(exprs: Iterable[Expr]) -> dict[Expr, Range]:
    """The range of every node: wider than the truth where operands depend on each other."""
    found: dict[Expr, Range] = {}
    for e in topological(exprs):
        rule = _RULES.get(e.op)
        if e.op == "const":
            value = float(rounded(e, "float64"))
            found[e] = _hull((value, value))
        elif rule is None:
            found[e] = ANY
        elif e.op in ("mul", "product") and e.args[0] is e.args[1]:
            least, greatest = _absolute(found[e.args[0]])
            found[e] = least * least, greatest * greatest
        else:
            found[e] = rule(*(found[a] for a in e.args))
    return found
