"""WGSL text of recorded formulas; `numfuse.language.wgsl_arithmetic` says what WGSL leaves open."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from numfuse.language.curves import Curve, merged, rebuilt
from numfuse.language.elementary import evaluate
from numfuse.language.graph import SYMBOL, Expr, bottom_up, rounded, topological
from numfuse.language.lines import INFIX, assignments
from numfuse.language.wgsl_arithmetic import literal, primitives, real

_INFIX = {**INFIX, "product": "*", "both": "&", "either": "|"}
_LINE = "    let {} = {};"
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


def _operation(e: Expr, args: Sequence[str]) -> str:
    """Return the text of a node over the texts of its operands."""
    sign = _INFIX.get(e.op)
    if sign is not None:
        return f"{args[0]} {sign} {args[1]}"
    if e.op in ("neg", "negation"):
        return f"{'-' if e.op == 'neg' else '!'}{args[0]}"
    if e.op == "where":
        return f"select({args[2]}, {args[1]}, {args[0]})"
    if e.op in ("minimum", "maximum") and _held(e) and _is_nonzero(e.args[1]):
        # x = NaN has a select of its own; of -0 and 0 WGSL may choose either
        return f"{e.op[:3]}({', '.join(args)})"
    return f"{e.op if e.op in _BUILTIN else 'nf_' + e.op}({', '.join(args)})"


def function(expr: Expr, name: str, dtype: str = "float32") -> str:
    """The graph as ``fn name(x: f32) -> f32``, or of f64; its primitives: :func:`prelude`."""
    if name in _CALLED or name.startswith("nf_"):
        raise ValueError(f"a function of WGSL cannot be called {name!r}: the primitives use it")
    kind = real(dtype)
    names, lines = assignments(
        (expr,), _LINE, lambda e: literal(rounded(e, dtype), dtype), _operation
    )
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


def _contracted(exprs: Sequence[Expr]) -> tuple[tuple[Expr, ...], set[Expr]]:
    """Return the graphs with an fma for every sum that has a product, and the fmas that are new.

    A compiler makes one operation of the two or does not, by what else needs the product.
    """
    new: set[Expr] = set()

    def rule(e: Expr, args: list[Expr]) -> Expr:
        sum_of_product = merged(e.op, args)
        if sum_of_product is None:
            return rebuilt(e, args)
        new.add(sum_of_product)
        return sum_of_product

    return bottom_up(exprs, rule), new.difference(topological(exprs))


def epilogue(
    results: Sequence[tuple[str, Expr]], arguments: Sequence[str], dtype: str = "float32"
) -> str:
    """Return formulas of named inputs as one function of scalars, and the curves that it calls.

    The text is ``struct Results``, whose members are the results, and ``fn epilogue(...)`` of the
    inputs that `arguments` names; its primitives: :func:`prelude`.
    """
    return epilogues({"epilogue": (results, arguments)}, dtype)


def epilogues(
    parts: Mapping[str, tuple[Sequence[tuple[str, Expr]], Sequence[str]]], dtype: str = "float32"
) -> str:
    """Return several functions as :func:`epilogue`, by name, and the curves that they call.

    The results of another one than ``epilogue`` are ``struct Results_`` and its name.
    """
    curves: dict[Curve, str] = {}
    made = [_epilogue(name, *part, dtype, curves) for name, part in parts.items()]
    functions = [function(curve.trace, name, dtype) for curve, name in curves.items()]
    return "\n\n".join([*functions, *made])


def _epilogue(
    name: str,
    results: Sequence[tuple[str, Expr]],
    arguments: Sequence[str],
    dtype: str,
    curves: dict[Curve, str],
) -> str:
    """Return the text of one function; new curves that it calls are added."""
    kind, struct = real(dtype), "Results" if name == "epilogue" else f"Results_{name}"
    exprs, contracted = _contracted([expr for _, expr in results])

    def operation(e: Expr, args: Sequence[str]) -> str:
        if isinstance(e.payload, Curve):
            return f"{curves.setdefault(e.payload, f'curve_{len(curves)}')}({args[0]})"
        return f"fma({', '.join(args)})" if e in contracted else _operation(e, args)

    names, lines = assignments(exprs, _LINE, lambda e: literal(rounded(e, dtype), dtype), operation)
    members = ", ".join(f"{result}: {kind}" for result, _ in results)
    given = ", ".join(f"in_{argument}: {kind}" for argument in arguments)
    made = ", ".join(names[e] for e in exprs)
    main = [
        f"struct {struct} {{ {members} }}\n",
        f"fn {name}({given}) -> {struct} {{",
        *lines,
        f"    return {struct}({made});",
        "}",
    ]
    return "\n".join(main)


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
