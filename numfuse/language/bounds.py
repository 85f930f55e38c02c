"""Bounds of the nodes of a recorded formula, by interval arithmetic over every finite x.

A target may drop what a bound makes needless: a sign that is known, a factor that cannot overflow.
"""

from __future__ import annotations

from collections.abc import Iterable

from numfuse.language.graph import Expr, rounded, topological
from numfuse.language.operations import ANY, OPERATIONS, Range, absolute, hull

__all__ = ["Range", "ranges"]


def ranges(exprs: Iterable[Expr]) -> dict[Expr, Range]:
    """The range of every node: wider than the truth where operands depend on each other."""
    found: dict[Expr, Range] = {}
    for e in topological(exprs):
        row = OPERATIONS.get(e.op)
        if e.op == "const":
            value = float(rounded(e, "float64"))
            found[e] = hull((value, value))
        elif row is None or row.bounds is None:
            found[e] = ANY
        elif e.op in ("mul", "product") and e.args[0] is e.args[1]:
            least, greatest = absolute(found[e.args[0]])
            found[e] = least * least, greatest * greatest
        else:
            found[e] = row.bounds(*(found[a] for a in e.args))
    return found
