"""A graph as text, which another process reads back: for digests, pickles and disk caches."""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
import json
import weakref
from collections.abc import Iterable, Sequence
from fractions import Fraction

from numfuse.language.curves import Curve, leaf
from numfuse.language.graph import SYMBOL, Expr, Payload, constant, intern, topological
from numfuse.language.operations import OPERATIONS

#: Curves by their text: what is read again is the same curve, as long as that lives.
_CURVES: weakref.WeakValueDictionary[str, Curve] = weakref.WeakValueDictionary()


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
            traces.append(payload.trace_of(order))
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
            made.append(intern(op, (), float(rest[0]) if special else Fraction(rest[0])))
        elif op == "x":
            made.append(SYMBOL)
        elif op == "input":
            made.append(leaf(rest[0]))
        elif op == "call":
            made.append(intern(op, (made[int(rest[0])],), _curve(rest[1])))
        elif op in OPERATIONS and OPERATIONS[op].arity == len(rest):
            # not `node`: the text was folded when it was recorded
            made.append(intern(op, tuple(made[int(i)] for i in rest), None))
        else:
            break
    raise ValueError("expected the text of numfuse.expr.dumps, got something else")


def digest(exprs: Iterable[Expr]) -> str:
    """Return the SHA-256 of the graphs' text: equal for equal graphs, in any process."""
    return hashlib.sha256(dumps(tuple(exprs)).encode()).hexdigest()


def _load_one(text: str) -> Expr:
    return loads(text)[0]


copyreg.pickle(Expr, lambda expr: (_load_one, (dumps((expr,)),)))
