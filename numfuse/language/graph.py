"""The graph that a formula is recorded as: nodes, constants, text.

The leaves are constants, the symbol `x` of a formula of one argument and the named inputs of an
epilogue. A `call` is a function of one argument with derivatives of its own (a curve: an
activation), kept whole while a formula is differentiated, so that its hand-written derivatives are
used, and expanded before a target prints it (`numfuse.language.curves`).

Nodes are hash-consed, so equal expressions are one object, and constants are exact rationals,
rounded once, to the target's dtype.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from numfuse.language.constants import exact, fits, rounded_value, split
from numfuse.language.operations import TRUTH, UFUNCS

if TYPE_CHECKING:
    from numfuse.language.curves import Curve

Payload: TypeAlias = "Fraction | float | str | Curve | None"

_Operator: TypeAlias = "Callable[[Expr, Any], Expr]"
_Made = TypeVar("_Made")

#: Characters of a graph's text. What is used twice stands there twice, so that the text of a small
#: graph can be longer than any memory.
_SHOWN = 2000

_NODES: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_SERIALS = itertools.count()
# Reentrant: a garbage collection inside may run code that makes nodes.
_LOCK = threading.RLock()


def _after_fork_in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # a thread that held it did not survive the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _refuse(done: str, remedy: str) -> NoReturn:
    raise TypeError(
        f"a formula is recorded once with a symbol, which has no value, so it cannot {done}: "
        f"{remedy}"
    )


def _refused(done: str, remedy: str) -> Callable[..., NoReturn]:
    """Return a method that a symbol cannot have."""
    return lambda self, *args, **options: _refuse(done, remedy)


def _operator(op: str) -> tuple[_Operator, _Operator]:
    """Return the operator of an operation on a node, and that with the operands turned round."""

    def apply(a: Any, b: Any) -> Any:
        return node(op, a, b) if op in TRUTH else _binary(op, a, b)

    return apply, lambda a, b: apply(b, a)


class Expr:
    """One node of a recorded formula; made by arithmetic on the symbol, never directly.

    Attributes
    ----------
    op : str
        A key of `operations.OPERATIONS`, or "x" (the symbol), "input", "const" or "call".
    args : tuple of Expr
        The operands.
    payload : Fraction or float or str or Curve or None
        The exact value of a constant (a float only for infinities, NaN and -0.0), the name of an
        input, the function of a call.
    serial : int
        A number that no other node of this process ever has.
    """

    __slots__ = ("__weakref__", "args", "op", "payload", "serial")
    op: str
    args: tuple[Expr, ...]
    payload: Payload
    serial: int

    def __init__(self) -> None:
        _refuse("be made by hand", "call the formula through numfuse.expr.trace")

    # --- arithmetic -------------------------------------------------------------------------
    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")

    def __neg__(self) -> Expr:
        return node("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return node("abs", self)

    def __pow__(self, power: Any) -> Expr:
        value = power.payload if isinstance(power, Expr) else power
        if value == 0.5:
            return node("sqrt", self)
        if isinstance(value, (int, float, Fraction)) and -64 <= value <= 64 and value == int(value):
            raised = _power(self, abs(int(value)))
            return raised if value >= 0 else 1 / raised
        _refuse(
            f"be raised to the power {power!r}",
            "write x**n with a whole number n, numfuse.expr.sqrt(x), or "
            "numfuse.expr.exp(p * numfuse.expr.log(x))",
        )

    __rpow__ = _refused("be an exponent", "write numfuse.expr.exp(x * log_of_the_base)")
    _whole = _refused(
        "be rounded or divided with a remainder", "an activation is made of smooth pieces"
    )
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _whole
    __round__ = __floor__ = __ceil__ = __trunc__ = _whole

    # --- comparisons ------------------------------------------------------------------------
    __lt__, __gt__ = _operator("lt")
    __le__, __ge__ = _operator("le")
    __and__, __rand__ = _operator("both")
    __or__, __ror__ = _operator("either")

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return node("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return node("ne", self, other)

    # Equal nodes are one object, so identity is the right hash (and dict looks at it first).
    __hash__ = object.__hash__

    def __invert__(self) -> Expr:
        return node("negation", self)

    # --- what a symbol cannot do ------------------------------------------------------------
    __bool__ = _refused(
        "decide a branch (if, while, and, or, not, a chain like 0 < x < 1, min, max)",
        "write numfuse.expr.where(condition, a, b), conditions joined with & | ~ in "
        "parentheses, or numfuse.expr.maximum and minimum",
    )
    __float__ = __int__ = __complex__ = __index__ = _refused(
        "become a Python number (float(x), int(x), math.exp(x))",
        "write numfuse.expr.exp(x) for math.exp(x), likewise sqrt, tanh, erf, log, log1p; "
        "no float() is needed",
    )
    __iter__ = __len__ = __getitem__ = __contains__ = _refused(
        "be iterated, indexed or measured",
        "a formula maps one scalar to one scalar; it is applied to every element by the kernel",
    )
    __array__ = _refused("become an array", "use the functions of numfuse.expr, which take symbols")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        same, other = UFUNCS.get(ufunc.__name__), _OTHER_UFUNC.get(ufunc.__name__)
        if method != "__call__" or kwargs or (same is None and other is None):
            name = f"numpy.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
            _refuse(f"be given to {name}", "use arithmetic and the functions of numfuse.expr")
        if any(isinstance(i, np.ndarray) and i.ndim for i in inputs):
            _refuse("be mixed with arrays", "a formula holds only its symbol and scalar constants")
        return other(*inputs) if other is not None else node(str(same), *inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if kwargs or func.__name__ not in ("where", "clip") or len(args) != 3:
            _refuse(f"be given to numpy.{func.__name__}", "use the functions of numfuse.expr")
        return node("where", *args) if func.__name__ == "where" else _OTHER_UFUNC["clip"](*args)

    # --- identity ---------------------------------------------------------------------------
    def __repr__(self) -> str:
        texts: dict[Expr, str] = {}
        for e in topological((self,)):
            name = str(e.payload) if e.op == "call" else e.op
            if e.op == "const":
                texts[e] = repr(float(rounded(e, "float64")))
            elif not e.args:
                texts[e] = str(e.payload or e.op)
            else:
                texts[e] = f"{name}({', '.join(texts[a] for a in e.args)})"
            if len(texts[e]) > _SHOWN:
                texts[e] = f"{name}(...)"
        return texts[self]

    def split(self, bits: int) -> tuple[Expr, Expr]:
        """Return a constant as ``head + tail``; see :func:`numfuse.language.constants.split`."""
        if not isinstance(self.payload, Fraction):
            raise TypeError(f"only a finite constant can be split, got {self!r}")
        head, tail = split(self.payload, bits)
        return constant(head), constant(tail)


_OTHER_UFUNC: dict[str, Callable[..., Any]] = {
    "greater": lambda a, b: node("lt", b, a),
    "greater_equal": lambda a, b: node("le", b, a),
    "positive": lambda a: a,
    "power": lambda a, b: a**b,
    "square": lambda a: node("mul", a, a),
    "reciprocal": lambda a: node("div", 1, a),
    "ndtr": lambda a: node("scaled_normal_cdf", 1, a),
    "clip": lambda a, low, high: node("minimum", node("maximum", a, low), high),
}


def intern(op: str, args: tuple[Expr, ...], payload: Payload) -> Expr:
    """Return the one node of these operands, folded no further (:func:`node` folds)."""
    # repr tells -0.0 from 0.0 and makes NaN equal to itself
    key = (op, repr(payload), *map(id, args))
    with _LOCK:
        known = _NODES.get(key)
        if known is None:
            known = object.__new__(Expr)
            known.op, known.args, known.payload = op, args, payload
            known.serial = next(_SERIALS)
            _NODES[key] = known
        return known


def constant(value: Any) -> Expr:
    """A constant, exact until a target rounds it to its dtype.

    Parameters
    ----------
    value : int, float, Fraction or str
        A string is read as a decimal number of any length, "0.044715" is not a binary fraction.

    Raises
    ------
    TypeError
        No real number.
    ValueError
        A string that is no number, or a number of more digits than any dtype could tell apart.
    """
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, np.bool_)):
        _refuse("be mixed with True or False", "write a comparison of x, or a number")
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, np.integer):
        value = int(value)
    elif isinstance(value, np.floating):
        value = float(value)
    if isinstance(value, (int, float, str, Fraction)):
        return intern("const", (), exact(value))
    raise TypeError(f"expected a symbol or a real number in a formula, got {type(value).__name__}")


def rounded(e: Expr, dtype: str) -> Any:
    """Return the value of a constant as a NumPy scalar of "float32" or "float64", rounded once."""
    value: Any = e.payload
    return rounded_value(value, dtype)


#: The argument of every formula.
SYMBOL: Expr = intern("x", (), None)


def _value(e: Expr) -> Fraction | None:
    return e.payload if isinstance(e.payload, Fraction) else None


def node(op: str, *operands: Any) -> Expr:
    """The node `op` of its operands; constants are folded where that is exact."""
    args = tuple(constant(a) for a in operands)
    truths = [a.op in TRUTH for a in args]
    wanted = [
        op in ("both", "either", "negation") or (op == "where" and i == 0) for i in range(len(args))
    ]
    if truths != wanted:
        raise TypeError(
            f"{op} expects {'a condition such as x > 0' if True in wanted else 'numbers'}, "
            f"got {', '.join(map(repr, args))}: turn a condition into a number with "
            "numfuse.expr.where(condition, 1, 0)"
        )
    v = [_value(a) for a in args]
    if op == "neg":
        if v[0]:
            return constant(-v[0])
        if args[0].op == "neg":
            return args[0].args[0]
    elif op in ("add", "sub", "mul", "div"):
        a, b = v
        if a is not None and b is not None and not (op == "div" and b == 0):
            exact = {"add": a + b, "sub": a - b, "mul": a * b}[op] if op != "div" else a / b
            if fits(exact):  # else it is computed in the dtype
                return constant(exact)
        # Only what holds for every float, signed zeros, infinities and NaN included.
        if (op == "mul" and b == 1) or (op == "div" and b == 1) or (op == "sub" and b == 0):
            return args[0]
        if op == "mul" and a == 1:
            return args[1]
    elif op == "where" and args[1] is args[2]:
        return args[1]
    if op in ("add", "mul", "maximum", "minimum", "product", "product_low"):
        # One order for commutative operations: a constant goes last (equal graphs become one).
        if args[0].op == "const" and args[1].op != "const":
            args = args[::-1]
    return intern(op, args, None)


def _binary(op: str, a: Any, b: Any) -> Any:
    other = b if isinstance(a, Expr) else a
    if isinstance(other, np.ndarray) and other.ndim:
        _refuse("be mixed with arrays", "a formula holds only its symbol and scalar constants")
    numbers = int, float, Fraction, np.integer, np.floating, np.ndarray
    return node(op, a, b) if isinstance(other, (Expr, *numbers)) else NotImplemented


def _power(x: Expr, n: int) -> Expr:
    if n == 0:
        return constant(1)
    if n == 1:
        return x
    half = _power(x, n // 2)
    square = half * half
    return square * x if n % 2 else square


def topological(exprs: Iterable[Expr]) -> list[Expr]:
    """Every node once, operands before the nodes that use them."""
    order: dict[Expr, None] = {}
    stack = [(e, False) for e in reversed(list(exprs))]
    while stack:
        e, ready = stack.pop()
        if e in order:
            continue
        if ready:
            order[e] = None
        else:
            stack.append((e, True))
            stack.extend((a, False) for a in reversed(e.args))
    return list(order)


def bottom_up(
    exprs: Iterable[Expr], rule: Callable[[Expr, list[_Made]], _Made]
) -> tuple[_Made, ...]:
    """Return what a rule makes of each graph: of a node, and of what it made of the operands."""
    exprs = tuple(exprs)
    made: dict[Expr, _Made] = {}
    for e in topological(exprs):
        made[e] = rule(e, [made[a] for a in e.args])
    return tuple(made[e] for e in exprs)
