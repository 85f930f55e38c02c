"""A formula as the text of a Python function, over the primitives of `numfuse.language.scalar`.

A product is merged with a sum here, as a node (`fma`), and never by a compiler; see `arithmetic`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from numfuse.language.coefficients import GROWTH_FACTOR
from numfuse.language.curves import expand, merged
from numfuse.language.graph import Expr, bottom_up, constant, node, rounded, topological
from numfuse.language.lines import INFIX, assignments
from numfuse.language.operations import ANY, OPERATIONS, Range, absolute, hull


def ranges(exprs: Iterable[Expr]) -> dict[Expr, Range]:
    """The range of every node over every finite x, by interval arithmetic.

    It is wider than the truth where operands depend on each other. A target may drop what a bound
    makes needless: a sign that is known, a factor that cannot overflow.
    """
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


def _lowered(op: str, args: list[Expr]) -> Expr:
    """A node as the primitives have it."""
    if op == "sub" and args[1].op == "unscaled":
        return node("less_unscaled", args[0], args[1].args[0])
    # a * b + c is one fma wherever it occurs, whatever else uses the product.
    if (sum_of_product := merged(op, args)) is not None:
        return sum_of_product
    if op not in ("scaled_exp", "scaled_sigmoid", "scaled_bell"):
        return node(op, *args)
    factor, hi, lo = args
    kind = op.removeprefix("scaled")
    plain = lo is constant(0)
    if kind == "_sigmoid" and hi.op == "neg" and (plain or lo.op == "neg"):
        kind, hi, lo = "_complement", hi.args[0], lo if plain else lo.args[0]
    if plain:
        return node(f"plain{kind}", factor, hi)
    return node(f"scaled{kind}", factor, hi, lo)


def _shared(op: str, args: list[Expr], high: Range) -> Expr:
    """A sigmoid or bell with a small factor, made of nodes that all of one argument share."""
    factor, hi, lo = args
    plain = lo is constant(0)
    if high[1] <= 0 and hi.op == "neg":
        size, low = hi.args[0], lo.args[0] if lo.op == "neg" else node("neg", lo)
    elif high[0] >= 0:
        size, low = hi, lo
    else:
        size, low = node("abs", hi), node("toward", lo, hi)
    g = node("plain_growth", size) if plain else node("growth", size, low)
    inverse = node("inverse", g)
    if op == "scaled_bell":
        return _scaled(factor, node("mul", node("less_unscaled", 1, inverse), inverse))
    q = inverse if factor is constant(1) else node("quotient", factor, inverse, g)
    below, above = node("unscaled", q), node("less_unscaled", factor, q)
    if high[0] >= 0:
        return above
    return below if high[1] <= 0 else node("where", node("lt", hi, 0), below, above)


def _power_apart(factor: Expr) -> tuple[Expr, Expr]:
    """Return a factor as another one times a constant power of two, which may be 1.

    It is within 2^32 and 2^-32: times sigma it is a normal number.
    """
    for i, e in enumerate(factor.args if factor.op == "mul" else (factor,)):
        if e.op == "const":
            part, exponent = math.frexp(float(rounded(e, "float64")))
            if abs(part) == 0.5 and abs(exponent - 1) <= 32:
                return (factor.args[1 - i] if factor.op == "mul" else constant(1)), e
    return factor, constant(1)


def _tanh(x: Expr) -> Expr:
    """tanh(x) beside its slope; alone it is a primitive (`_divided`)."""
    size = node("abs", node("mul", x, 2))
    return node("tanh_beside", x, size, node("decay_sum", size))


def _slope_of_tanh(factor: Expr, twice: Expr) -> Expr:
    """A factor times a bell at 2 x, which has the exponential of tanh(x)."""
    size = node("abs", twice)
    d = node("decay_sum", size)
    return _scaled(factor, node("decay_bell", size, d, node("inverse", d)))


def _scaled(factor: Expr, bell: Expr) -> Expr:
    """A factor times sigma times a bell; one product has what is a power of two of the factor."""
    rest, power = _power_apart(factor)
    bell = bell if rest is constant(1) else node("mul", rest, bell)
    return node("unscaled", bell) if power is constant(1) else node("unscaled_by", bell, power)


def _is_twice(hi: Expr, lo: Expr) -> bool:
    two = constant(2)
    return lo is constant(0) and hi.op == "mul" and any(a is two for a in hi.args)


def _divided(exprs: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The graphs with a ratio for each quotient that is the only use of its inverse.

    So too a tanh. The bits are the same (see `quotient`); a lone division has three instructions
    less.
    """
    uses = Counter(a for e in topological(exprs) for a in e.args)

    def rule(e: Expr, args: list[Expr]) -> Expr:
        if e.op == "quotient" and uses[e.args[1]] == 1:
            return node("ratio", args[0], args[2])
        if e.op == "tanh_beside" and uses[e.args[2]] == 1:
            return node("tanh", args[0])
        return node(e.op, *args) if args else e

    return bottom_up(exprs, rule)


def _primitive_graphs(exprs: tuple[Expr, ...], growth: bool = True) -> tuple[Expr, ...]:
    """Return the graphs with every node as the primitives have it."""
    known = ranges(exprs)

    def rule(e: Expr, args: list[Expr]) -> Expr:
        op, old = e.op, e.args
        if op == "sigmoid":
            one, zero = constant(1), constant(0)
            op, args, old = "scaled_sigmoid", [one, *args, zero], (one, *old, zero)
        small = growth and op in ("scaled_sigmoid", "scaled_bell")
        if small and max(map(abs, known.get(old[0], (1.0, 1.0)))) <= GROWTH_FACTOR:
            if op == "scaled_bell" and _is_twice(*args[1:]):
                return _slope_of_tanh(args[0], args[1])
            return _shared(op, args, known[old[1]])
        if growth and op == "tanh":
            return _tanh(args[0])
        return _lowered(op, args) if args else e

    return _divided(bottom_up(exprs, rule))


def _operation(e: Expr, args: Sequence[str]) -> str:
    """Return the text of a node over the texts of its operands."""
    if e.op in INFIX:
        return f"{args[0]} {INFIX[e.op]} {args[1]}"
    return f"-{args[0]}" if e.op == "neg" else f"{e.op}({', '.join(args)})"


def render(
    exprs: tuple[Expr, ...],
    dtype: str,
    name: str = "formula",
    growth: bool = True,
    arguments: tuple[str, ...] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the graphs as the text of one Python function, and the constants that it names.

    It returns a scalar for one graph, else a tuple of results that share what they can. Without
    `growth` no sigmoid is made of a growing exponential, for targets whose own is short.
    `arguments` names the inputs in the function's order; by default it has one, the symbol.
    """
    constants: dict[str, Any] = {}

    def constant_of(e: Expr) -> str:
        name = f"c{len(constants)}"
        constants[name] = rounded(e, dtype)
        return name

    exprs = _primitive_graphs(expand(exprs), growth)
    names, lines = assignments(exprs, "    {} = {}", constant_of, _operation)
    result = ", ".join(names[e] for e in exprs)
    given = "x" if arguments is None else ", ".join(f"in_{name}" for name in arguments)
    return "\n".join([f"def {name}({given}):", *lines, f"    return {result}", ""]), constants
