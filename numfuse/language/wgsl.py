"""WGSL text of recorded formulas; `numfuse.language.wgsl_arithmetic` says what WGSL leaves open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from numfuse.language.elementary import evaluate
from numfuse.language.graph import SYMBOL, Expr, rounded, topological
from numfuse.language.wgsl_arithmetic import FEATURES, literal, primitives, real

if TYPE_CHECKING:
    from numfuse.activations import Activation

__all__ = ["FEATURES", "function", "prelude", "table"]

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "product": "*", "div": "/", "lt": "<", "le": "<=",
    "eq": "==", "ne": "!=", "both": "&", "either": "|",
}  # fmt: skip
_BUILTIN = {"abs", "sqrt"}
#: Functions of WGSL that the texts call: one of these names would hide them.
_CALLED = {"abs", "fma", "max", "min", "round", "select", "sqrt"}


def _held(e: Expr) -> bool:
    """Whether a number is never NaN but at x = NaN: x itself, its size, what is held by numbers."""
    if e.op in ("minimum", "maximum", "abs", "copysign", "neg"):
        return all(_held(a) for a in e.args)
    return e.op in ("x", "const")


def _is_nonzero(e: Expr) -> bool:
    return e.op == "const" and rounded(e, "float64") != 0


def function(expr: Expr, name: str, dtype: str = "float32") -> str:
    """The graph as ``fn name(x: f32) -> f32``, or of f64; its primitives: :func:`prelude`."""
    if name in _CALLED or name.startswith("nf_"):
        raise ValueError(f"a function of WGSL cannot be called {name!r}: the primitives use it")
    kind = real(dtype)
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for e in topological((expr,)):
        if e.op == "x":
            names[e] = "x"
            continue
        if e.op == "const":
            names[e] = literal(rounded(e, dtype), dtype)
            continue
        args = [names[a] for a in e.args]
        sign = _INFIX.get(e.op)
        if sign is not None:
            text = f"{args[0]} {sign} {args[1]}"
        elif e.op in ("neg", "negation"):
            text = f"{'-' if e.op == 'neg' else '!'}{args[0]}"
        elif e.op == "where":
            text = f"select({args[2]}, {args[1]}, {args[0]})"
        elif e.op in ("minimum", "maximum") and _held(e) and _is_nonzero(e.args[1]):
            # x = NaN has a select of its own, below; of -0 and 0 WGSL may choose either
            text = f"{e.op[:3]}({', '.join(args)})"
        else:
            text = f"{e.op if e.op in _BUILTIN else 'nf_' + e.op}({', '.join(args)})"
        names[e] = f"t{len(lines)}"
        lines.append(f"    let {names[e]} = {text};")
    result = names[expr]
    if SYMBOL in names:
        at_nan = evaluate(expr, np.nan)
        limit = "x" if np.isnan(at_nan) else literal(at_nan, dtype)
        # WGSL may drop the sign of a zero: where the formula keeps that of x, its bits do
        zeros = np.array([-0.0, 0.0])
        kept = limit == "x" and np.copysign(1, evaluate(expr, zeros)).tolist() == [-1, 1]
        kept = kept and not evaluate(expr, zeros).any()
        result = f"select({result}, {limit}, nf_is_{'zero_or_' if kept else ''}nan(x))"
    return "\n".join([f"fn {name}(x: {kind}) -> {kind} {{", *lines, f"    return {result};", "}"])


def prelude(text: str, dtype: str = "float32", one_rounding: bool = False) -> str:
    """The primitives that `text` calls, and those that they call, each before its first use.

    `one_rounding` says that fma of the device rounds once, which WGSL leaves open.
    """
    texts, order = primitives(dtype, one_rounding), dict[str, None]()

    def need(body: str) -> None:
        for name in re.findall(r"\bnf_\w+", body):
            if name not in order and f"fn {name}(" not in body:
                need(texts[name])
                order[name] = None

    need(text)
    return "\n\n".join(texts[name] for name in order)


def table(activations: Mapping[str, Activation], dtype: str = "float32") -> str:
    """One module with every activation: ``name``, ``name_prime``, ``name_second``, ``name_third``.

    ``tests/golden/regenerate.py`` renews the golden texts of the tests.
    """
    endings = ("", "_prime", "_second", "_third")
    functions = [
        function(act.trace(order), name + ending, dtype)
        for name, act in activations.items()
        for order, ending in enumerate(endings)
    ]
    text = "\n\n".join(functions)
    return f"{prelude(text, dtype)}\n\n{text}\n"
