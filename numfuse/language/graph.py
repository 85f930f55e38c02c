"""The graph that a formula is recorded as: nodes, constants, text.

The leaves are constants, the symbol `x` of a formula of one argument and the named inputs of an
epilogue. A `call` is a function of one argument with derivatives of its own (a :class:`Curve`: an
activation), kept whole while a formula is differentiated, so that its hand-written derivatives are
used, and expanded before a target prints it (:func:`expand`).

Nodes are hash-consed, so equal expressions are one object (common subexpressions are shared by
construction), and constants are exact rationals, rounded once, to the target's dtype. What a symbol
cannot do fails with a sentence that says what to write instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import reprlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias

import numpy as np

__all__ = [
    "ARITY",
    "SYMBOL",
    "TRUTH",
    "Curve",
    "Expr",
    "Keyed",
    "call",
    "constant",
    "dumps",
    "expand",
    "formulas_of",
    "inputs",
    "loads",
    "named",
    "node",
    "rebuilt",
    "replace_leaves",
    "rounded",
    "substitute",
    "topological",
]

Payload: TypeAlias = "Fraction | float | str | Curve | None"

#: Number of operands of every operation but the leaves `x`, `input` and `const`, and of `call`.
ARITY = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "abs": 1, "sqrt": 1,
    "lt": 2, "le": 2, "eq": 2, "ne": 2, "both": 2, "either": 2, "negation": 1,
    "where": 3, "maximum": 2, "minimum": 2, "copysign": 2,
    "fma": 3, "product": 2, "product_low": 2,
    "exp": 1, "log": 1, "log1p": 1, "tanh": 1, "sigmoid": 1, "erf": 1, "scaled_normal_cdf": 2,
    "scaled_exp": 3, "scaled_sigmoid": 3, "scaled_bell": 3, "finite": 1,
}  # fmt: skip
#: Operations whose result is a truth value.
TRUTH = frozenset({"lt", "le", "eq", "ne", "both", "either", "negation"})

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


class Expr:
    """One node of a recorded formula; made by arithmetic on the symbol, never directly.

    Attributes
    ----------
    op : str
        A key of `ARITY`, or "x" (the symbol), "input", "const" or "call".
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
    def __add__(self, other: Any) -> Expr:
        return _binary("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return _binary("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return _binary("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return _binary("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return _binary("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return _binary("mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return _binary("div", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return _binary("div", other, self)

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

    def __rpow__(self, base: Any) -> NoReturn:
        _refuse("be an exponent", "write numfuse.expr.exp(x * log_of_the_base)")

    def _whole(self, *_: Any) -> NoReturn:
        _refuse("be rounded or divided with a remainder", "an activation is made of smooth pieces")

    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _whole
    __round__ = __floor__ = __ceil__ = __trunc__ = _whole

    # --- comparisons ------------------------------------------------------------------------
    def __lt__(self, other: Any) -> Expr:
        return node("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return node("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return node("lt", other, self)

    def __ge__(self, other: Any) -> Expr:
        return node("le", other, self)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return node("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return node("ne", self, other)

    # Equal nodes are one object, so identity is the right hash (and dict looks at it first).
    __hash__ = object.__hash__

    def __and__(self, other: Any) -> Expr:
        return node("both", self, other)

    def __rand__(self, other: Any) -> Expr:
        return node("both", other, self)

    def __or__(self, other: Any) -> Expr:
        return node("either", self, other)

    def __ror__(self, other: Any) -> Expr:
        return node("either", other, self)

    def __invert__(self) -> Expr:
        return node("negation", self)

    # --- what a symbol cannot do ------------------------------------------------------------
    def __bool__(self) -> bool:
        _refuse(
            "decide a branch (if, while, and, or, not, a chain like 0 < x < 1, min, max)",
            "write numfuse.expr.where(condition, a, b), conditions joined with & | ~ in "
            "parentheses, or numfuse.expr.maximum and minimum",
        )

    def _number(self, *_: Any) -> NoReturn:
        _refuse(
            "become a Python number (float(x), int(x), math.exp(x))",
            "write numfuse.expr.exp(x) for math.exp(x), likewise sqrt, tanh, erf, log, log1p; "
            "no float() is needed",
        )

    __float__ = __int__ = __complex__ = __index__ = _number

    def _sequence(self, *_: Any) -> NoReturn:
        _refuse(
            "be iterated, indexed or measured",
            "a formula maps one scalar to one scalar; it is applied to every element by the kernel",
        )

    __iter__ = __len__ = __getitem__ = __contains__ = _sequence

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("become an array", "use the functions of numfuse.expr, which take symbols")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        same, other = _SAME_UFUNC.get(ufunc.__name__), _OTHER_UFUNC.get(ufunc.__name__)
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
            name = str(e.payload) if isinstance(e.payload, Curve) else e.op
            if e.op == "const":
                texts[e] = repr(float(rounded(e, "float64")))
            elif not e.args:
                texts[e] = str(e.payload or e.op)
            else:
                texts[e] = f"{name}({', '.join(texts[a] for a in e.args)})"
            if len(texts[e]) > _SHOWN:
                texts[e] = f"{name}(...)"
        return texts[self]

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_one, (dumps((self,)),)

    @property
    def digest(self) -> str:
        """SHA-256 of the graph's text: equal for equal graphs, in any process."""
        return hashlib.sha256(dumps((self,)).encode()).hexdigest()

    def split(self, bits: int) -> tuple[Expr, Expr]:
        """A constant as ``head + tail``, the head of at most `bits` significant bits.

        The head is exact in every dtype of at least `bits` bits, so its products with short
        numbers are exact too; the tail is what is left, exactly.
        """
        if not isinstance(self.payload, Fraction):
            raise TypeError(f"only a finite constant can be split, got {self!r}")
        value = self.payload
        if not value:
            return self, self
        exponent = 0
        while abs(value) >= Fraction(2) ** (exponent + 1):
            exponent += 1
        while abs(value) < Fraction(2) ** exponent:
            exponent -= 1
        grid = Fraction(2) ** (exponent + 1 - bits)
        head = round(value / grid) * grid
        return constant(head), constant(value - head)


# NumPy's functions that mean the same; SciPy's, by the names of their ufuncs, too.
_SAME_UFUNC = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "negative": "neg",
    "less": "lt", "less_equal": "le", "equal": "eq", "not_equal": "ne", "logical_and": "both",
    "logical_or": "either", "logical_not": "negation", "absolute": "abs", "fabs": "abs",
    "sqrt": "sqrt", "exp": "exp", "log": "log", "log1p": "log1p", "tanh": "tanh",
    "maximum": "maximum", "minimum": "minimum", "copysign": "copysign", "erf": "erf",
    "expit": "sigmoid",
}  # fmt: skip
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


def _intern(op: str, args: tuple[Expr, ...], payload: Payload) -> Expr:
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
    if isinstance(value, (int, float, np.integer, np.floating)):
        number = float(value) if not isinstance(value, (int, np.integer)) else int(value)
        if isinstance(number, float) and (
            not math.isfinite(number) or (number == 0 and math.copysign(1.0, number) < 0)
        ):
            return _intern("const", (), number)
        return _exact(Fraction(number))
    if isinstance(value, str):
        return _exact(_read(value))
    if isinstance(value, Fraction):
        return _exact(value)
    raise TypeError(f"expected a symbol or a real number in a formula, got {type(value).__name__}")


#: Bits of the numerator and the denominator of a constant: the smallest float64 is 2^-1074, its 53
#: bits in decimals have 767 digits (2548 bits), and products of two such are still exact.  A text
#: of more than 4300 digits is one that Python does not read back.
_CONSTANT_BITS = 1 << 13
#: Characters of a constant's text that are read, and the largest exponent there, for as many bits.
_CONSTANT_DIGITS = 2400


def _fits(value: Fraction) -> bool:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) <= _CONSTANT_BITS


def _exact(value: Fraction) -> Expr:
    if not _fits(value):
        raise ValueError(
            f"a constant in a formula must be a fraction of numbers of up to {_CONSTANT_BITS} "
            f"bits, got one of {value.numerator.bit_length()} over "
            f"{value.denominator.bit_length()} bits"
        )
    return _intern("const", (), value)


def _read(text: str) -> Fraction:
    """The number that a text is, before anything is computed of one that is too long."""
    exponent = re.search(r"[eE][+-]?([0-9_]+)", text)
    far = exponent is not None and (
        len(exponent[1]) > 8 or int(exponent[1].replace("_", "") or 0) > _CONSTANT_DIGITS
    )
    try:
        if far or len(text) > _CONSTANT_DIGITS:
            raise ValueError
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"a constant in a formula must be a number of up to {_CONSTANT_DIGITS} digits, such "
            f"as '0.044715', got {reprlib.repr(text)}"
        ) from None


def rounded(e: Expr, dtype: str) -> Any:
    """The value of a constant as a NumPy scalar of "float32" or "float64", rounded once, to even.

    Through float64 a float32 could be rounded twice. A number beyond the dtype is infinite.
    """
    value = e.payload
    if not isinstance(value, Fraction):
        with np.errstate(all="ignore"):
            return np.dtype(dtype).type(value)
    try:
        wide = float(value)
    except OverflowError:
        wide = math.inf if value > 0 else -math.inf
    if dtype == "float64":
        return np.float64(wide)
    with np.errstate(all="ignore"):
        near = np.float32(wide)
        if not np.isfinite(near):
            return near
        infinity = np.float32(np.inf)
        around = (np.nextafter(near, -infinity), near, np.nextafter(near, infinity))
    return min(
        (c for c in around if np.isfinite(c)),
        key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.int32)) & 1),
    )


#: The argument of every formula.
SYMBOL: Expr = _intern("x", (), None)


class Curve:
    """A function of one variable that a formula calls, with the derivatives that it brings.

    Parameters
    ----------
    name : str
    trace : callable
        From an order to the graph, in the symbol, of that derivative; ValueError where there is
        none. It is asked for what a formula needs, and for no more.
    order : int, default 0
        Which derivative this curve is the value of.

    Attributes
    ----------
    serial : int
        A number that no other curve of this process ever has.
    """

    __slots__ = ("__weakref__", "_made", "_trace", "name", "order", "serial")

    def __init__(
        self,
        name: str,
        trace: Callable[[int], Expr],
        order: int = 0,
        made: dict[int, Curve] | None = None,
    ) -> None:
        self.name, self.order, self.serial = name, order, next(_SERIALS)
        self._trace = trace
        self._made = {} if made is None else made
        self._made[order] = self

    @property
    def trace(self) -> Expr:
        """The graph of the value, in the symbol."""
        return self._trace(self.order)

    def derivative(self) -> Curve:
        """Return the derivative."""
        known = self._made.get(self.order + 1)
        return known or Curve(self.name, self._trace, self.order + 1, self._made)

    def formulas(self) -> list[Expr]:
        """Return the graphs of the curve and of its derivatives, as far as they were asked for."""
        found = []
        for order, curve in list(self._made.items()):
            with contextlib.suppress(ValueError):  # (one that was asked for, and does not exist)
                if order >= self.order:
                    found.append(curve.trace)
        return found

    def __repr__(self) -> str:
        return f"curve {self.serial}"  # what a node is interned by

    def __str__(self) -> str:
        return self.name + "'" * self.order


#: Curves by their text: what is read again is the same curve, as long as that lives.
_CURVES: weakref.WeakValueDictionary[str, Curve] = weakref.WeakValueDictionary()


def named(name: str) -> Expr:
    """Return the input of an epilogue that has this name."""
    return _intern("input", (), name)


def call(curve: Curve, argument: Any) -> Expr:
    """Return a curve at `argument`; folded where it is the identity or constant."""
    if curve.trace is SYMBOL:
        return constant(argument)
    if curve.trace.op == "const":
        return curve.trace
    return _intern("call", (constant(argument),), curve)


def rebuilt(e: Expr, args: Sequence[Expr]) -> Expr:
    """Return the node over other operands; a leaf is returned as it is."""
    if isinstance(e.payload, Curve):
        return call(e.payload, args[0])
    return node(e.op, *args) if args else e


def expand(exprs: Iterable[Expr], trace: Callable[[Curve], Expr] | None = None) -> tuple[Expr, ...]:
    """Return the graphs with every call replaced by what it calls.

    `trace` gives the graph of a curve where that is not its own.
    """
    exprs = tuple(exprs)
    made: dict[Expr, Expr] = {}
    for e in topological(exprs):
        args = [made[a] for a in e.args]
        if isinstance(e.payload, Curve):
            made[e] = substitute(trace(e.payload) if trace else e.payload.trace, args[0])
        else:
            made[e] = rebuilt(e, args)
    return tuple(made[e] for e in exprs)


def inputs(exprs: Iterable[Expr]) -> tuple[str, ...]:
    """Return the names of the inputs that the graphs depend on, sorted."""
    return tuple(sorted(str(e.payload) for e in topological(exprs) if e.op == "input"))


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
            if _fits(exact):  # else it is computed in the dtype
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
    return _intern(op, args, None)


def _binary(op: str, a: Any, b: Any) -> Any:
    if isinstance(a, Expr) and isinstance(b, Expr):
        return node(op, a, b)
    other = b if isinstance(a, Expr) else a
    if isinstance(other, (int, float, Fraction, np.integer, np.floating)) or (
        isinstance(other, np.ndarray) and other.ndim == 0
    ):
        return node(op, a, b)
    if isinstance(other, np.ndarray):
        _refuse("be mixed with arrays", "a formula holds only its symbol and scalar constants")
    return NotImplemented


def _power(x: Expr, n: int) -> Expr:
    if n == 0:
        return constant(1)
    half = _power(x, n // 2) if n > 1 else None
    square = half * half if half is not None else None
    if square is None:
        return x
    return square * x if n % 2 else square


def substitute(expr: Expr, argument: Expr) -> Expr:
    """The graph with `argument` in the place of the symbol."""
    return replace_leaves((expr,), {SYMBOL: argument})[0]


def replace_leaves(exprs: Iterable[Expr], leaves: Mapping[Expr, Expr]) -> tuple[Expr, ...]:
    """Return the graphs with other expressions in the place of some leaves."""
    exprs = tuple(exprs)
    made: dict[Expr, Expr] = {}
    for e in topological(exprs):
        made[e] = rebuilt(e, [made[a] for a in e.args]) if e.args else leaves.get(e, e)
    return tuple(made[e] for e in exprs)


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


def dumps(exprs: Sequence[Expr]) -> str:
    """The graphs as text, one node a line, then the line numbers of the results."""
    order = topological(exprs)
    at = {e: i for i, e in enumerate(order)}
    lines = [" ".join([e.op, *(str(at[a]) for a in e.args), *_word(e.payload)]) for e in order]
    return "\n".join([*lines, " ".join(["=", *(str(at[e]) for e in exprs)])])


def _word(payload: Payload) -> list[str]:
    """The payload in the text of a graph: one word, or none."""
    if payload is None:
        return []
    if not isinstance(payload, Curve):
        return [str(payload)]
    traces = []
    with contextlib.suppress(ValueError):  # (where they end)
        for order in range(4):
            traces.append(payload._trace(order))
    word = json.dumps([payload.name, payload.order, dumps(traces)], separators=(",", ":"))
    word = word.replace(" ", "\\u0020")  # (spaces are within strings; a word has none)
    _CURVES[word] = payload
    return [word]


def _curve(word: str) -> Curve:
    known = _CURVES.get(word)
    if known is not None:
        return known
    name, order, text = json.loads(word)
    traces = loads(text)

    def trace(order: int) -> Expr:
        if order < len(traces):
            return traces[order]
        if traces[-1].op == "const":
            return constant(0)
        raise ValueError(
            f"the table of activations ends with derivatives of order {len(traces) - 1}, "
            f"got order {order} of {name!r}"
        )

    made = _CURVES[word] = Curve(name, trace, order)
    return made


def loads(text: str) -> tuple[Expr, ...]:
    """The graphs of :func:`dumps`, interned in this process."""
    made: list[Expr] = []
    for line in text.splitlines():
        op, *rest = line.split()
        if op == "=":
            return tuple(made[int(i)] for i in rest)
        if op == "const":
            special = rest[0] in ("inf", "-inf", "nan", "-0.0")
            made.append(_intern(op, (), float(rest[0]) if special else Fraction(rest[0])))
        elif op == "x":
            made.append(SYMBOL)
        elif op == "input":
            made.append(named(rest[0]))
        elif op == "call":
            made.append(_intern(op, (made[int(rest[0])],), _curve(rest[1])))
        elif ARITY.get(op) == len(rest):
            # not `node`: the text was folded when it was recorded
            made.append(_intern(op, tuple(made[int(i)] for i in rest), None))
        else:
            break
    raise ValueError("expected the text of numfuse.expr.dumps, got something else")


def _load_one(text: str) -> Expr:
    return loads(text)[0]


class Keyed:
    """Base of a frozen dataclass (with ``eq=False``) that holds formulas and is a key.

    Equal where the fields are, formulas by identity: their own ``==`` makes a formula, which has no
    truth. The equality that a dataclass makes for itself asks for it from Python 3.13 on.
    """

    def _key(self) -> tuple[Any, ...]:
        fields: dict[str, Any] = self.__dataclass_fields__  # type: ignore[attr-defined]
        return tuple(_plain(getattr(self, name)) for name in fields)

    def named(self) -> tuple[Any, ...]:
        """A key that stands for it and holds no formula."""
        return type(self), *self._key()

    def formulas(self) -> list[Expr]:
        """The formulas in its fields, and in tuples there."""
        fields: dict[str, Any] = self.__dataclass_fields__  # type: ignore[attr-defined]
        return formulas_of(tuple(getattr(self, name) for name in fields))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _plain(value: Any) -> Any:
    if isinstance(value, Expr):
        return value.serial
    if isinstance(value, Keyed):
        return value.named()
    return tuple(map(_plain, value)) if type(value) is tuple else value


def formulas_of(value: Any) -> list[Expr]:
    """The formulas in a key, in tuples there, and of what has ``formulas()``."""
    if isinstance(value, Expr):
        return [value]
    if type(value) is tuple:
        return [e for part in value for e in formulas_of(part)]
    found: Callable[[], list[Expr]] | None = getattr(value, "formulas", None)
    return [] if found is None else found()
