"""Functions that a formula calls, its named inputs, and putting one graph into another."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from numfuse.language.graph import SYMBOL, Expr, bottom_up, constant, intern, node, topological

_SERIALS = itertools.count()


class Curve:
    """A function of one variable that a formula calls, with the derivatives that it brings.

    `trace` maps an order to the graph, in the symbol, of that derivative; ValueError where there is
    none. It is asked for what a formula needs, and for no more. `order` is which derivative this
    curve is the value of, and `serial` a number that no other curve of this process ever has.
    """

    __slots__ = ("__weakref__", "_made", "derived", "name", "order", "serial", "trace_of")

    def __init__(
        self,
        name: str,
        trace: Callable[[int], Expr],
        order: int = 0,
        made: dict[int, Curve] | None = None,
    ) -> None:
        self.name, self.order, self.serial = name, order, next(_SERIALS)
        self.trace_of = trace
        #: What was derived from formulas that call it, by who derived it: it goes with the curve.
        self.derived: dict[Any, Any] = {}
        self._made = {} if made is None else made
        self._made[order] = self

    @property
    def trace(self) -> Expr:
        """The graph of the value, in the symbol."""
        return self.trace_of(self.order)

    def derivative(self) -> Curve:
        """Return the derivative."""
        known = self._made.get(self.order + 1)
        return known or Curve(self.name, self.trace_of, self.order + 1, self._made)

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


class _Recording(threading.local):
    depth = 0


_RECORDING = _Recording()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """While a formula of several variables is recorded: it keeps the activations that it calls."""
    _RECORDING.depth += 1
    try:
        yield
    finally:
        _RECORDING.depth -= 1


def is_recording() -> bool:
    """Return whether this thread records a formula of several variables."""
    return _RECORDING.depth > 0


def leaf(name: str) -> Expr:
    """Return the input of an epilogue that has this name."""
    return intern("input", (), name)


def call(curve: Curve, argument: Any) -> Expr:
    """Return a curve at `argument`; folded where it is the identity or constant."""
    if curve.trace is SYMBOL:
        return constant(argument)
    if curve.trace.op == "const":
        return curve.trace
    return intern("call", (constant(argument),), curve)


def rebuilt(e: Expr, args: Sequence[Expr]) -> Expr:
    """Return the node over other operands; a leaf is returned as it is."""
    if isinstance(e.payload, Curve):
        return call(e.payload, args[0])
    return node(e.op, *args) if args else e


def merged(op: str, args: Sequence[Expr]) -> Expr | None:
    """Return the fma that a sum or difference with a product is; None where there is no product."""
    at = next((i for i, a in enumerate(args) if a.op == "mul"), None)
    if op not in ("add", "sub") or at is None:
        return None
    (a, b), c = args[at].args, args[1 - at]
    if op == "sub":
        a, c = (a, -c) if at == 0 else (-a, c)
    return node("fma", a, b, c)


def present(e: Expr, args: Sequence[Expr | None]) -> Expr | None:
    """Return the node over operands of which some are absent (zero); None where it is zero too."""
    if not args or all(a is not None for a in args):
        return rebuilt(e, [a for a in args if a is not None])
    match e.op:
        case "add":
            return args[0] if args[1] is None else args[1]
        case "sub":
            return args[0] if args[1] is None else -args[1]
        case "neg" | "mul" | "product" | "product_low":
            return None
        case "div" if args[0] is None:
            return None
        case "fma":
            if args[0] is not None and args[1] is not None:
                return args[0] * args[1]
            return args[2]
    return rebuilt(e, [constant(0) if a is None else a for a in args])


def expand(exprs: Iterable[Expr], trace: Callable[[Curve], Expr] | None = None) -> tuple[Expr, ...]:
    """Return the graphs with every call replaced by what it calls.

    `trace` gives the graph of a curve where that is not its own.
    """

    def rule(e: Expr, args: list[Expr]) -> Expr:
        if not isinstance(e.payload, Curve):
            return rebuilt(e, args)
        return substitute(trace(e.payload) if trace else e.payload.trace, args[0])

    return bottom_up(exprs, rule)


def inputs(exprs: Iterable[Expr]) -> tuple[str, ...]:
    """Return the names of the inputs that the graphs depend on, sorted."""
    return tuple(sorted(str(e.payload) for e in topological(exprs) if e.op == "input"))


def substitute(expr: Expr, argument: Expr) -> Expr:
    """The graph with `argument` in the place of the symbol."""
    return replace_leaves((expr,), {SYMBOL: argument})[0]


def replace_leaves(exprs: Iterable[Expr], leaves: Mapping[Expr, Expr]) -> tuple[Expr, ...]:
    """Return the graphs with other expressions in the place of some leaves."""
    return bottom_up(exprs, lambda e, args: rebuilt(e, args) if args else leaves.get(e, e))
