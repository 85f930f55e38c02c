"""Derivatives of recorded formulas: rewrites of the graph.

One table of rules, each linear in the derivatives of a node's operands, serves all of them. Applied
from the inputs on it is forward mode (:func:`forward`); as a linear map of scalars is its own
transpose, the same rule with one operand's slot filled at a time is reverse mode
(:func:`reverse`); and forward mode of forward mode has the second derivatives that a Taylor
expansion needs (:func:`second_order`). The rule of a call is its curve's own derivative, which was
written by hand where stability asks for it.

A derivative that is zero everywhere is None: what it would multiply is left out, NaN or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

from numfuse.language.curves import Curve, call, present
from numfuse.language.graph import Expr, bottom_up, constant, node, topological
from numfuse.language.operations import OPERATIONS, TRUTH


def _is_zero(e: Expr) -> bool:
    return e.op == "const" and e.payload == 0


def _sum(a: Expr | None, b: Expr | None) -> Expr | None:
    return b if a is None else a if b is None else a + b


def _times(slope: Expr, d: Expr | None) -> Expr | None:
    return None if d is None else slope * d


def _scaled(e: Expr, d: list[Expr | None]) -> Expr | None:
    """factor * f(hi + lo): factor' * f + factor * f' * (hi' + lo')."""
    factor, hi, lo = e.args
    first = None if d[0] is None else node(e.op, d[0], hi, lo)
    move = _sum(d[1], d[2])
    if move is None:
        return first
    factor = factor * move
    if e.op == "scaled_bell":
        # s' = s (1 - s), s'' = s' (1 - 2 s) and 1 - 2 s(h) = -tanh(h / 2)
        factor = -factor * node("tanh", 0.5 * (hi + lo))
    slope = "scaled_exp" if e.op == "scaled_exp" else "scaled_bell"
    return _sum(first, node(slope, factor, hi, lo))


def _rule(e: Expr, d: list[Expr | None]) -> Expr | None:
    """The derivative of node `e` whose operands have derivatives `d` (None is zero)."""
    a = e.args
    if all(one is None for one in d):
        return None
    match e.op:
        case "add" | "sub" | "neg":
            return present(e, d)
        case "mul" | "product":
            return _sum(_times(a[1], d[0]), _times(a[0], d[1]))
        case "fma":
            return _sum(_sum(_times(a[1], d[0]), _times(a[0], d[1])), d[2])
        case "product_low":
            return None  # a rounding error
        case "div":
            top = None if d[0] is None else d[0] / a[1]
            bottom = None if d[1] is None else e * (d[1] / a[1])
            return top if bottom is None else -bottom if top is None else top - bottom
        case "where" | "maximum" | "minimum":
            first, second = (constant(0) if one is None else one for one in d[-2:])
            test = a[0] if e.op == "where" else a[0] > a[1] if e.op == "maximum" else a[0] < a[1]
            return node("where", test, first, second)
        case "call":
            assert isinstance(e.payload, Curve)
            slope = call(e.payload.derivative(), a[0])
            return None if _is_zero(slope) else _times(slope, d[0])
        case "scaled_exp" | "scaled_sigmoid" | "scaled_bell":
            return _scaled(e, d)
    out: Expr | None = None
    partials = OPERATIONS[e.op].partials
    assert partials is not None  # (all others have a case)
    for partial, move in zip(partials(node, e, *a), d, strict=True):
        if partial is not None:
            out = _sum(out, _times(partial, move))
    return out


def forward(exprs: Sequence[Expr], tangents: Mapping[Expr, Expr | None]) -> tuple[Expr | None, ...]:
    """Return the derivatives of the graphs along tangents of their leaves.

    A leaf that `tangents` lacks, or whose tangent is None, does not move; the derivative of a graph
    of such leaves is None.
    """

    def rule(e: Expr, d: list[Expr | None]) -> Expr | None:
        if not e.args:
            return tangents.get(e)
        # a condition has no derivative; its slot stays, so that operands keep their places
        return None if e.op in TRUTH else _rule(e, d)

    return bottom_up(exprs, rule)


def reverse(
    exprs: Sequence[Expr], cotangents: Sequence[Expr | None], leaves: Sequence[Expr]
) -> tuple[Expr | None, ...]:
    """Return the gradients by `leaves` of the graphs, each weighted with its cotangent.

    A cotangent that is None is zero; the gradient by a leaf that nothing depends on is None.
    """
    weight: dict[Expr, Expr | None] = {}
    for e, cotangent in zip(exprs, cotangents, strict=True):
        weight[e] = _sum(weight.get(e), cotangent)
    order = topological(exprs)
    moved = set(leaves)
    for e in order:
        if not moved.isdisjoint(e.args):
            moved.add(e)
    for e in reversed(order):
        here = weight.get(e)
        if here is None or not e.args:
            continue
        for at, operand in enumerate(e.args):
            if operand.op in TRUTH or operand not in moved:
                continue  # (an activation may lack a derivative that nobody asks for)
            alone: list[Expr | None] = [None] * len(e.args)
            alone[at] = here
            weight[operand] = _sum(weight.get(operand), _rule(e, alone))
    return tuple(weight.get(leaf) for leaf in leaves)


def second_order(
    expr: Expr, leaves: Sequence[Expr]
) -> tuple[tuple[Expr | None, ...], dict[tuple[int, int], Expr]]:
    """Return the gradient of a graph by `leaves`, and its second derivatives.

    Along a curve whose leaves have the first derivatives d_i and the second s_i, the graph has the
    second derivative ``sum_i gradient[i] s_i + sum_{i <= j} second[i, j] d_i d_j``.

    Returns
    -------
    gradient : tuple of Expr or None
    second : dict
        {(i, j): the coefficient of d_i d_j}, i <= j, where it is not zero: the mixed ones count
        both orders.
    """
    one = constant(1)
    gradient = tuple(forward((expr,), {leaf: one})[0] for leaf in leaves)
    second: dict[tuple[int, int], Expr] = {}
    for i, j in combinations_with_replacement(range(len(leaves)), 2):
        slope = gradient[i]
        if slope is None:
            continue
        bent = forward((slope,), {leaves[j]: one})[0]
        if bent is not None and not _is_zero(bent):
            second[i, j] = bent if i == j else 2 * bent
    return gradient, second
