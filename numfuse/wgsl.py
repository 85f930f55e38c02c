"""WGSL text of recorded formulas: scalar f32 functions and the primitives that they call.

WGSL truths, in one place:

- a compiler may assume that no NaN and no infinity exists, so a comparison cannot find a NaN:
  only a test on the bits holds. Every function whose formula is NaN at NaN ends in such a test;
- tanh of WGSL is NaN beyond |x| > 44 on some drivers, and exp of WGSL is allowed an error of
  3 + 2 |x| units in the last place: both are written out here;
- an infinity cannot be written, and a constant expression that makes one is an error;
- fma may be two roundings, and a product may be contracted or reassociated: the low words then lose
  their gain, never the result;
- subnormal numbers may be flushed to zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from numfuse.coefficients import ERF, EXP, EXP_RANGE, LN2, LOG, MILLS, MILLS_END, TANH_END
from numfuse.elementary import evaluate
from numfuse.expr import Expr, rounded, topological

if TYPE_CHECKING:
    from numfuse.activations import Activation

__all__ = ["function", "prelude", "table"]


def _literal(value: float) -> str:
    # the shortest decimal that reads back as this float32
    single = np.float32(value)
    if np.isnan(single):
        raise ValueError("a formula with a NaN constant cannot be written in WGSL")
    if np.isinf(single):
        single = np.copysign(np.finfo(np.float32).max, single)
    return f"{single!s}f"


def _horner(coefficients: Iterable[float], variable: str) -> str:
    text = ""
    for c in coefficients:
        text = f"fma({text}, {variable}, {_literal(c)})" if text else _literal(c)
    return text


_HEAD, _TAIL = (_literal(word) for word in LN2["float32"])
_LOW, _HIGH = (_literal(v) for v in EXP_RANGE["float32"])

#: The primitives by name; what one calls is found in its text.
PRIMITIVES = {
    "nf_is_nan": """\
fn nf_is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}""",
    "nf_maximum": """\
fn nf_maximum(a: f32, b: f32) -> f32 {
    let larger = select(a, b, a <= b);
    return select(select(larger, b, nf_is_nan(b)), a, nf_is_nan(a));
}""",
    "nf_minimum": """\
fn nf_minimum(a: f32, b: f32) -> f32 {
    let smaller = select(a, b, b <= a);
    return select(select(smaller, b, nf_is_nan(b)), a, nf_is_nan(a));
}""",
    "nf_copysign": """\
fn nf_copysign(magnitude: f32, sign_of: f32) -> f32 {
    let bits = bitcast<u32>(magnitude) & 0x7fffffffu;
    return bitcast<f32>(bits | (bitcast<u32>(sign_of) & 0x80000000u));
}""",
    # Splits by bits, as no compiler can see through: the products of 12-bit halves are exact.
    "nf_product_low": """\
fn nf_product_low(a: f32, b: f32) -> f32 {
    let a_high = bitcast<f32>(bitcast<u32>(a) & 0xfffff000u);
    let b_high = bitcast<f32>(bitcast<u32>(b) & 0xfffff000u);
    let a_low = a - a_high;
    let b_low = b - b_high;
    let mixed = (a_high * b_high - a * b) + a_high * b_low + a_low * b_high;
    return mixed + a_low * b_low;
}""",
    "nf_power_of_two": """\
fn nf_power_of_two(n: i32) -> f32 {
    return bitcast<f32>((n + 127) << 23u);
}""",
    # e^r - 1 for x = n ln2 + r
    "nf_reduced": f"""\
fn nf_reduced(hi: f32, lo: f32, n: f32) -> f32 {{
    let r = fma(-n, {_TAIL}, fma(-n, {_HEAD}, hi)) + lo;
    let p = {_horner(EXP["float32"], "r")};
    return fma(r * r, p, r);
}}""",
    "nf_scaled_exp": f"""\
fn nf_scaled_exp(factor: f32, hi: f32, lo: f32) -> f32 {{
    let x = select(select(hi, {_HIGH}, hi > {_HIGH}), -{_LOW}, hi < -{_LOW});
    let n = round(x * {_literal(math.log2(math.e))});
    let p = nf_reduced(x, lo, n);
    let k = i32(n);
    let half = k >> 1u;
    return ((factor + factor * p) * nf_power_of_two(half)) * nf_power_of_two(k - half);
}}""",
    "nf_exp": """\
fn nf_exp(x: f32) -> f32 {
    return nf_scaled_exp(1.0f, x, 0.0f);
}""",
    "nf_scaled_sigmoid": """\
fn nf_scaled_sigmoid(factor: f32, hi: f32, lo: f32) -> f32 {
    let toward = select(-lo, lo, hi < 0.0f);
    let d = 1.0f + nf_scaled_exp(1.0f, -abs(hi), toward);
    return select(factor / d, nf_scaled_exp(factor / d, -abs(hi), toward), hi < 0.0f);
}""",
    "nf_sigmoid": """\
fn nf_sigmoid(x: f32) -> f32 {
    return nf_scaled_sigmoid(1.0f, x, 0.0f);
}""",
    "nf_scaled_bell": """\
fn nf_scaled_bell(factor: f32, hi: f32, lo: f32) -> f32 {
    let toward = select(-lo, lo, hi < 0.0f);
    let d = 1.0f + nf_scaled_exp(1.0f, -abs(hi), toward);
    return nf_scaled_exp(factor / (d * d), -abs(hi), toward);
}""",
    "nf_tanh": f"""\
fn nf_tanh(x: f32) -> f32 {{
    let y = min(abs(x), {_literal(TANH_END["float32"])});
    let n = round(-2.0f * y * {_literal(math.log2(math.e))});
    let p = nf_reduced(-2.0f * y, 0.0f, n);
    let s = nf_power_of_two(i32(n));
    let em = fma(s, p, s - 1.0f);
    return nf_copysign(em / (2.0f + em), x);
}}""",
    "nf_log_exponent": """\
fn nf_log_exponent(u: f32) -> i32 {
    return (bitcast<i32>(u) - 0x3f3504f3) >> 23u;
}""",
    "nf_log_of": f"""\
fn nf_log_of(f: f32, k: f32) -> f32 {{
    let s = f / (2.0f + f);
    let z = s * s;
    let square = 0.5f * f * f;
    let r = {_horner(LOG["float32"], "z")};
    let inner = fma(s, square + z * r, k * {_TAIL});
    return fma(k, {_HEAD}, f - (square - inner));
}}""",
    "nf_outside_log": """\
fn nf_outside_log(u: f32, value: f32) -> f32 {
    let bits = bitcast<u32>(u);
    let edge = select(bits, 0xff800000u, (bits & 0x7fffffffu) == 0u);
    let negative = bits > 0x80000000u;
    let outside = select(edge, 0x7fc00000u, negative && bits <= 0xff800000u);
    let inside = bits < 0x7f800000u && bits != 0u;
    return bitcast<f32>(select(outside, bitcast<u32>(value), inside));
}""",
    "nf_log": """\
fn nf_log(x: f32) -> f32 {
    let small = x < 1.1754944e-38f;
    let u = select(x, x * 33554432.0f, small);
    let k = nf_log_exponent(u);
    let f = bitcast<f32>(bitcast<i32>(u) - (k << 23u)) - 1.0f;
    return nf_outside_log(x, nf_log_of(f, f32(k) - select(0.0f, 25.0f, small)));
}""",
    "nf_log1p": """\
fn nf_log1p(x: f32) -> f32 {
    let u = 1.0f + x;
    let k = nf_log_exponent(u);
    let scale = nf_power_of_two(2 - k);
    let f = fma(0.25f * x, scale, 0.25f * scale - 1.0f);
    return nf_outside_log(u, select(nf_log_of(f, f32(k)), x, abs(x) < 1e-08f));
}""",
    "nf_normal_tail": f"""\
fn nf_normal_tail(factor: f32, distance: f32) -> f32 {{
    let end = {_literal(MILLS_END["float32"])};
    let y = select(distance, end, distance > end);
    let w = (y - 5.0f) / (y + 5.0f);
    let mills = {_horner(MILLS["float32"], "w")} / (1.0f + y);
    return nf_scaled_exp(factor * mills, -0.5f * (y * y), -0.5f * nf_product_low(y, y));
}}""",
    "nf_scaled_normal_cdf": """\
fn nf_scaled_normal_cdf(factor: f32, x: f32) -> f32 {
    let tail = nf_normal_tail(select(factor, 1.0f, x > 0.0f), abs(x));
    return select(tail, factor * (1.0f - tail), x > 0.0f);
}""",
    "nf_erf": f"""\
fn nf_erf(x: f32) -> f32 {{
    let z = x * x;
    let near = fma(x, {_horner(ERF["float32"], "z")}, x);
    let far = nf_copysign(1.0f - 2.0f * nf_normal_tail(1.0f, abs(x) * {_literal(math.sqrt(2))}), x);
    return select(far, near, abs(x) < 1.0f);
}}""",
}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "product": "*", "div": "/", "lt": "<", "le": "<=",
    "eq": "==", "ne": "!=", "both": "&", "either": "|",
}  # fmt: skip
_BUILTIN = {"abs", "sqrt", "fma"}


def function(expr: Expr, name: str) -> str:
    """The graph as ``fn name(x: f32) -> f32``; its primitives come from :func:`prelude`."""
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for e in topological((expr,)):
        if e.op == "x":
            names[e] = "x"
            continue
        if e.op == "const":
            names[e] = _literal(rounded(e, "float32"))
            continue
        args = [names[a] for a in e.args]
        sign = _INFIX.get(e.op)
        if sign is not None:
            text = f"{args[0]} {sign} {args[1]}"
        elif e.op in ("neg", "negation"):
            text = f"{'-' if e.op == 'neg' else '!'}{args[0]}"
        elif e.op == "where":
            text = f"select({args[2]}, {args[1]}, {args[0]})"
        else:
            text = f"{e.op if e.op in _BUILTIN else 'nf_' + e.op}({', '.join(args)})"
        names[e] = f"t{len(lines)}"
        lines.append(f"    let {names[e]} = {text};")
    result = names[expr]
    if np.isnan(evaluate(expr, np.nan)):
        result = f"select({result}, x, nf_is_nan(x))"
    return "\n".join([f"fn {name}(x: f32) -> f32 {{", *lines, f"    return {result};", "}"])


def prelude(text: str) -> str:
    """The primitives that `text` calls, and those that they call, each before its first use."""
    order: dict[str, None] = {}

    def need(body: str) -> None:
        for name in re.findall(r"\bnf_\w+", body):
            if name not in order and f"fn {name}(" not in body:
                need(PRIMITIVES[name])
                order[name] = None

    need(text)
    return "\n\n".join(PRIMITIVES[name] for name in order)


def table(activations: Mapping[str, Activation]) -> str:
    """One module with every activation: ``name``, ``name_prime``, ``name_second``, ``name_third``.

    Regenerate the golden text of the tests with
    ``python -m tests.golden > tests/golden/activations.wgsl``.
    """
    endings = ("", "_prime", "_second", "_third")
    functions = [
        function(act.trace(order), name + ending)
        for name, act in activations.items()
        for order, ending in enumerate(endings)
    ]
    text = "\n\n".join(functions)
    return f"{prelude(text)}\n\n{text}\n"
