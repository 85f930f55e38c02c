"""The tiny scalar language in which an activation is written once.

A formula is an ordinary Python function of one argument. Called with the symbol `x` it records a
graph of :class:`Expr` nodes (`numfuse.language.graph`), which is printed as Numba Python
(`numfuse.backends.cpu.llvm.primitives`) or as WGSL (`numfuse.language.wgsl`), differentiated
(:func:`differentiate`) or evaluated over NumPy arrays (`numfuse.language.elementary`), which is the
reference. Why record, and not compile the function as it stands: a bare ``1.0`` turns float32
arithmetic into float64 in Numba, one text serves every target, and the recorded text has a digest
that names a compiled kernel in the disk cache.

Double words. A sum ``hi + lo`` of two floats carries an argument beyond the dtype's precision:
``hi = product(a, b)`` and ``lo = product_low(a, b)`` are the rounded product and its rounding error
(Dekker 1971, doi:10.1007/BF01397083), and the functions with a tail (`scaled_exp`,
`scaled_sigmoid`, `scaled_bell`) take such a pair. They also take a factor, which is multiplied in
before the result is scaled by its power of two: ``x * sigmoid(x)`` would meet a subnormal sigmoid
while the product is still a normal number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numfuse.language import elementary
from numfuse.language.curves import substitute
from numfuse.language.derivatives import forward
from numfuse.language.graph import SYMBOL, Expr, constant, node, rounded, topological
from numfuse.language.keys import Keyed
from numfuse.language.operations import TRUTH
from numfuse.language.text import dumps, loads

__all__ = [
    "FASTMATH",
    "SYMBOL",
    "Expr",
    "Keyed",
    "abs",
    "clamp",
    "constant",
    "copysign",
    "differentiate",
    "dumps",
    "erf",
    "exp",
    "fma",
    "loads",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "normal_cdf",
    "product",
    "product_low",
    "rounded",
    "scaled_bell",
    "scaled_exp",
    "scaled_normal_cdf",
    "scaled_sigmoid",
    "sigmoid",
    "sqrt",
    "substitute",
    "tanh",
    "topological",
    "trace",
    "where",
]

#: The fast-math flags of every kernel: a product may be contracted with a sum to one fma. Never
#: `nnan` or `ninf`: NaN and infinity in an operand are the user's data.
FASTMATH = {"contract"}
#: Operations that a formula may have. The largest of numfuse's own, with its derivatives, has 55.
#: Compilers take 10 to 40 ms for one, and their time grows faster than the formula: a thousand are
#: half a minute for a value and minutes for its derivatives, and 20,000 do not end.
MOST = 1000


def _apply(op: str, *args: Any) -> Any:
    """A node if any argument is a symbol, else the value over arrays."""
    if any(isinstance(a, Expr) for a in args):
        return node(op, *args)
    return elementary.apply(op, *args)


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``; both are always computed (no branch)."""
    return _apply("where", condition, a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of both; NaN if either is NaN, as in :func:`numpy.maximum`."""
    return _apply("maximum", a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of both; NaN if either is NaN."""
    return _apply("minimum", a, b)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """`x` held between `low` and `high`; NaN stays NaN."""
    return minimum(maximum(x, low), high)


def copysign(magnitude: Any, sign: Any) -> Any:
    """`magnitude` with the sign bit of `sign` (that of -0.0 too)."""
    return _apply("copysign", magnitude, sign)


def _function(op: str, doc: str) -> Callable[[Any], Any]:
    """Return the function that writes an operation of one operand."""

    def function(x: Any) -> Any:
        return _apply(op, x)

    function.__name__ = function.__qualname__ = op
    function.__doc__ = doc
    return function


abs = _function("abs", "Absolute value.")
sqrt = _function("sqrt", "Square root, correctly rounded; NaN below zero.")
exp = _function("exp", "e**x.")
log = _function("log", "Natural logarithm; -inf at 0, NaN below.")
log1p = _function("log1p", "log(1 + x), accurate near 0; -inf at -1, NaN below.")
tanh = _function("tanh", "Hyperbolic tangent; keeps the sign of zero.")
sigmoid = _function("sigmoid", "1 / (1 + e**-x), with full relative accuracy in the negative tail.")
erf = _function("erf", "Error function.")


def normal_cdf(x: Any) -> Any:
    """Standard normal distribution function, with full relative accuracy in the negative tail."""
    return _apply("scaled_normal_cdf", 1.0, x)


def scaled_normal_cdf(factor: Any, x: Any) -> Any:
    """``factor * normal_cdf(x)``."""
    return _apply("scaled_normal_cdf", factor, x)


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding."""
    return _apply("fma", a, b, c)


def product(a: Any, b: Any) -> Any:
    """``a * b``, rounded on its own: never contracted with a sum it enters."""
    return _apply("product", a, b)


def product_low(a: Any, b: Any) -> Any:
    """The rounding error of ``product(a, b)``: their sum is the exact product."""
    return _apply("product_low", a, b)


def scaled_exp(factor: Any, hi: Any, lo: Any = 0.0) -> Any:
    """``factor * exp(hi + lo)``, `lo` a low word (`|lo|` below 0.01)."""
    return _apply("scaled_exp", factor, hi, lo)


def scaled_sigmoid(factor: Any, hi: Any, lo: Any = 0.0) -> Any:
    """``factor * sigmoid(hi + lo)``, `lo` a low word."""
    return _apply("scaled_sigmoid", factor, hi, lo)


def scaled_bell(factor: Any, hi: Any, lo: Any = 0.0) -> Any:
    """``factor * s * (1 - s)`` with ``s = sigmoid(hi + lo)``: the derivative of the sigmoid."""
    return _apply("scaled_bell", factor, hi, lo)


def trace(formula: Callable[[Any], Any]) -> Expr:
    """Call `formula` once with the symbol and return the recorded graph.

    Raises
    ------
    TypeError
        If the formula branches on the symbol, turns it into a number, or returns no number.
    ValueError
        If it has more than 1000 operations (one that is used twice counts once).
    """
    made = constant(formula(SYMBOL))
    count = sum(bool(e.args) for e in topological((made,)))
    if count > MOST:
        raise ValueError(
            f"a formula must have at most {MOST} operations, got {count}: every one of them would "
            f"be compiled into each kernel"
        )
    if made.op in TRUTH:
        raise TypeError(
            f"the formula returned a condition, {made!r}: write numfuse.expr.where(condition, 1, 0)"
        )
    return made


def differentiate(expr: Expr) -> Expr:
    """The derivative of a graph by `x`, as a graph.

    A kink takes the value of its right-hand operand: ``maximum(x, 0)`` has derivative 0 at 0. Low
    words (`product_low`) are rounding errors and count as constant.
    """
    (result,) = forward((expr,), {SYMBOL: constant(1)})
    return constant(0) if result is None else result
