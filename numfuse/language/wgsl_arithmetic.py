"""The primitives of WGSL: the functions that the text of a formula calls.

WGSL truths, in one place:

- a compiler may assume that no NaN and no infinity exists, so a comparison cannot find a NaN:
  only a test on the bits holds. Every function that depends on x ends in such a test;
- tanh of WGSL is NaN beyond |x| > 44 on some drivers, and exp of WGSL is allowed an error of
  3 + 2 |x| units in the last place: both are written out here;
- an infinity cannot be written, and a constant expression that makes one is an error;
- fma may be two roundings (it is on llvmpipe), and a product may be contracted with a sum. So what
  a low word is for comes from fma where it is one rounding, and else from split products;
- sums may be reassociated, a n + b n made (a + b) n: those that must stay apart have a `min`
  between them;
- a division may be off by 2.5 units in the last place, and Vulkan promises a float64 operation no
  more than a float32 one (every known driver gives all of it);
- subnormal numbers may be flushed to zero.

float64 is no part of WGSL: ``f64``, ``u64`` and their literals are wgpu's.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from numfuse.language.coefficients import POLYNOMIALS, horner, numbers


def literal(value: float, dtype: str) -> str:
    """Return the shortest decimal that reads back as this number of the dtype."""
    info = np.finfo(dtype)
    with np.errstate(over="ignore"):
        number = np.dtype(dtype).type(value)
    if np.isnan(number):
        raise ValueError("a formula with a NaN constant cannot be written in WGSL")
    if np.isinf(number):
        number = np.copysign(info.max, number)
    # (from str(number) the text would depend on the release of NumPy)
    if number == 0 or 1e-4 <= abs(number) < _LONG[dtype]:
        text = np.format_float_positional(number, trim="0")
    else:
        text = np.format_float_scientific(number, trim="-")
    return f"{text}{_SUFFIX[dtype]}"


_SUFFIX = {"float32": "f", "float64": "lf"}
#: From here on a number has an exponent: its last digits as a whole number would say nothing.
_LONG = {"float32": 2.0**24, "float64": 1e16}


@functools.cache
def _words(dtype: str) -> dict[str, str]:
    """Return the text of each UPPER-case word of the templates in this dtype."""
    if dtype not in _SUFFIX:
        raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
    info = np.finfo(dtype)
    bits, mantissa = info.bits, int(info.nmant)
    unsigned = "u" if bits == 32 else "lu"
    infinity = ((1 << (bits - 1 - mantissa)) - 1) << mantissa
    sign = 1 << (bits - 1)
    low_bits = (mantissa + 2) // 2  # half of the significand
    whole = {
        "MAGNITUDE_BITS": sign - 1,
        "INFINITY_BITS": infinity,
        "MINUS_INFINITY_BITS": sign | infinity,
        "NAN_BITS": infinity | 1 << (mantissa - 1),
        "SIGN_BIT": sign,
        "HIGH_BITS": (1 << bits) - (1 << low_bits),
    }
    constants = {
        **{name.upper(): value for name, value in numbers(dtype).items()},
        # More than the first difference of nf_product_low, and not the largest number: a compiler
        # that knows of no infinity would see through that.
        "BEYOND_LOW": {"float32": 1e37, "float64": 1e305}[dtype],
        # log1p(x) is x to a tenth of its last place.
        "LOG1P_LINEAR": {"float32": 1e-8, "float64": 1e-17}[dtype],
    }
    root_half = np.array(math.sqrt(0.5), dtype).view(f"u{bits // 8}")
    polynomials: dict[str, str] = {}
    variables = {"exp": "r", "log": "z", "erf": "z", "mills": "w"}
    for name, table in POLYNOMIALS.items():
        text = horner([literal(c, dtype) for c in table[dtype]], variables[name])
        polynomials[f"{name.upper()}_POLYNOMIAL"] = text
    return {
        "REAL": f"f{bits}",
        "UINT": f"u{bits}",
        "INT": f"i{bits}",
        "MANTISSA": f"{mantissa}u",  # shifts count in u32 for 64 bits too
        "BIAS": str(info.maxexp - 1),
        "ROOT_HALF_BITS": f"{int(root_half):#x}",
        "NO_BITS": f"0{unsigned}",
        "ONE_BIT": f"1{unsigned}",
        **{word: f"{value:#x}{unsigned}" for word, value in whole.items()},
        **{word: literal(value, dtype) for word, value in constants.items()},
        **polynomials,
    }


#: The primitives by name, for every dtype: UPPER-case words are bound by `_words`, and a number
#: with a point becomes a literal of the dtype. What one calls is found in its text. A `min` that
#: never holds keeps a compiler from taking two sums for one: Mesa makes x - n (head + tail) of
#: x - n head - n tail where fma is two roundings (67 units in the last place of exp, by OpenGL).
TEMPLATES = {
    "nf_is_nan": """\
fn nf_is_nan(x: REAL) -> bool {
    return (bitcast<UINT>(x) & MAGNITUDE_BITS) > INFINITY_BITS;
}""",
    "nf_is_zero_or_nan": """\
fn nf_is_zero_or_nan(x: REAL) -> bool {
    return (bitcast<UINT>(x) & MAGNITUDE_BITS) - ONE_BIT >= INFINITY_BITS;
}""",
    # An infinity and a NaN have all bits of the exponent.
    "nf_finite": """\
fn nf_finite(x: REAL) -> REAL {
    return select(x, 0.0, (bitcast<UINT>(x) & INFINITY_BITS) == INFINITY_BITS);
}""",
    "nf_maximum": """\
fn nf_maximum(a: REAL, b: REAL) -> REAL {
    let larger = select(a, b, a <= b);
    return select(select(larger, b, nf_is_nan(b)), a, nf_is_nan(a));
}""",
    "nf_minimum": """\
fn nf_minimum(a: REAL, b: REAL) -> REAL {
    let smaller = select(a, b, b <= a);
    return select(select(smaller, b, nf_is_nan(b)), a, nf_is_nan(a));
}""",
    # (A choice, and not one mask or another: of a masked sum of bits that is chosen against x,
    # llvmpipe of Mesa 26.2 makes one with its operands exchanged.)
    "nf_copysign": """\
fn nf_copysign(magnitude: REAL, sign_of: REAL) -> REAL {
    let bits = bitcast<UINT>(magnitude) & MAGNITUDE_BITS;
    return bitcast<REAL>(select(bits, bits | SIGN_BIT, bitcast<UINT>(sign_of) >= SIGN_BIT));
}""",
    # By fma where it is one rounding. Where it is two, it finds 0, and halves that are split by
    # bits, as no compiler can see through, have exact products: of 12 bits each, or 26 and 27. A
    # compiler that contracts one of those has a fused fma.
    "nf_product_low": """\
fn nf_product_low(a: REAL, b: REAL) -> REAL {
    let product = a * b;
    let fused = fma(a, b, -product);
    let a_high = bitcast<REAL>(bitcast<UINT>(a) & HIGH_BITS);
    let b_high = bitcast<REAL>(bitcast<UINT>(b) & HIGH_BITS);
    let a_low = a - a_high;
    let b_low = b - b_high;
    let rest = min(a_high * b_high - product, BEYOND_LOW);
    let mixed = rest + a_high * b_low + a_low * b_high;
    return select(mixed + a_low * b_low, fused, fused != 0.0);
}""",
    # The fma of a formula: where it is two roundings, what the first one lost is added.
    "nf_fma": """\
fn nf_fma(a: REAL, b: REAL, c: REAL) -> REAL {
    let sum = fma(a, b, c);
    return select(sum + nf_product_low(a, b), sum, fma(a, b, -(a * b)) != 0.0);
}""",
    "nf_power_of_two": """\
fn nf_power_of_two(n: INT) -> REAL {
    return bitcast<REAL>((n + BIAS) << MANTISSA);
}""",
    # e^r - 1 for x = n ln2 + r
    "nf_reduced": """\
fn nf_reduced(hi: REAL, lo: REAL, n: REAL) -> REAL {
    let rest = min(fma(-n, LN2_HEAD, hi), 1.0);
    let r = fma(-n, LN2_TAIL, rest) + lo;
    let p = EXP_POLYNOMIAL;
    return fma(r * r, p, r);
}""",
    "nf_scaled_exp": """\
fn nf_scaled_exp(factor: REAL, hi: REAL, lo: REAL) -> REAL {
    let x = select(select(hi, EXP_HIGH, hi > EXP_HIGH), EXP_LOW, hi < EXP_LOW);
    let n = round(x * LOG2E);
    let p = nf_reduced(x, lo, n);
    let k = INT(n);
    let half = k >> 1u;
    return ((factor + factor * p) * nf_power_of_two(half)) * nf_power_of_two(k - half);
}""",
    "nf_exp": """\
fn nf_exp(x: REAL) -> REAL {
    return nf_scaled_exp(1.0, x, 0.0);
}""",
    "nf_scaled_sigmoid": """\
fn nf_scaled_sigmoid(factor: REAL, hi: REAL, lo: REAL) -> REAL {
    let toward = select(-lo, lo, hi < 0.0);
    let d = 1.0 + nf_scaled_exp(1.0, -abs(hi), toward);
    return select(factor / d, nf_scaled_exp(factor / d, -abs(hi), toward), hi < 0.0);
}""",
    "nf_sigmoid": """\
fn nf_sigmoid(x: REAL) -> REAL {
    return nf_scaled_sigmoid(1.0, x, 0.0);
}""",
    "nf_scaled_bell": """\
fn nf_scaled_bell(factor: REAL, hi: REAL, lo: REAL) -> REAL {
    let toward = select(-lo, lo, hi < 0.0);
    let d = 1.0 + nf_scaled_exp(1.0, -abs(hi), toward);
    return nf_scaled_exp(factor / (d * d), -abs(hi), toward);
}""",
    "nf_tanh": """\
fn nf_tanh(x: REAL) -> REAL {
    let y = min(abs(x), TANH_END);
    let n = round(-2.0 * y * LOG2E);
    let p = nf_reduced(-2.0 * y, 0.0, n);
    let s = nf_power_of_two(INT(n));
    let em = fma(s, p, min(s - 1.0, 1.0));
    return nf_copysign(em / (2.0 + em), x);
}""",
    "nf_log_exponent": """\
fn nf_log_exponent(u: REAL) -> INT {
    return (bitcast<INT>(u) - ROOT_HALF_BITS) >> MANTISSA;
}""",
    "nf_log_of": """\
fn nf_log_of(f: REAL, k: REAL) -> REAL {
    let s = f / (2.0 + f);
    let z = s * s;
    let square = 0.5 * f * f;
    let r = LOG_POLYNOMIAL;
    let inner = fma(s, square + z * r, k * LN2_TAIL);
    return fma(k, LN2_HEAD, f - (square - inner));
}""",
    "nf_outside_log": """\
fn nf_outside_log(u: REAL, value: REAL) -> REAL {
    let bits = bitcast<UINT>(u);
    let edge = select(bits, MINUS_INFINITY_BITS, (bits & MAGNITUDE_BITS) == NO_BITS);
    let negative = bits > SIGN_BIT;
    let outside = select(edge, NAN_BITS, negative && bits <= MINUS_INFINITY_BITS);
    let inside = bits < INFINITY_BITS && bits != NO_BITS;
    return bitcast<REAL>(select(outside, bitcast<UINT>(value), inside));
}""",
    "nf_log": """\
fn nf_log(x: REAL) -> REAL {
    let small = x < TINY;
    let u = select(x, x * LIFT, small);
    let k = nf_log_exponent(u);
    let f = bitcast<REAL>(bitcast<INT>(u) - (k << MANTISSA)) - 1.0;
    return nf_outside_log(x, nf_log_of(f, REAL(k) - select(0.0, UNLIFT, small)));
}""",
    "nf_log1p": """\
fn nf_log1p(x: REAL) -> REAL {
    let u = 1.0 + x;
    let k = nf_log_exponent(u);
    let scale = nf_power_of_two(2 - k);
    let f = fma(0.25 * x, scale, min(0.25 * scale - 1.0, LIFT));
    return nf_outside_log(u, select(nf_log_of(f, REAL(k)), x, abs(x) < LOG1P_LINEAR));
}""",
    "nf_normal_tail": """\
fn nf_normal_tail(factor: REAL, distance: REAL) -> REAL {
    let end = MILLS_END;
    let y = select(distance, end, distance > end);
    let w = (y - 5.0) / (y + 5.0);
    let mills = MILLS_POLYNOMIAL / (1.0 + y);
    return nf_scaled_exp(factor * mills, -0.5 * (y * y), -0.5 * nf_product_low(y, y));
}""",
    "nf_scaled_normal_cdf": """\
fn nf_scaled_normal_cdf(factor: REAL, x: REAL) -> REAL {
    let tail = nf_normal_tail(select(factor, 1.0, x > 0.0), abs(x));
    return select(tail, factor * (1.0 - tail), x > 0.0);
}""",
    "nf_erf": """\
fn nf_erf(x: REAL) -> REAL {
    let z = x * x;
    let near = fma(x, ERF_POLYNOMIAL, x);
    let far = nf_copysign(1.0 - 2.0 * nf_normal_tail(1.0, abs(x) * ROOT_TWO), x);
    return select(far, near, abs(x) < 1.0);
}""",
}

#: The same where a device's fma is one rounding: what it leaves out is found by one operation.
ONE_ROUNDING = {
    "nf_product_low": """\
fn nf_product_low(a: REAL, b: REAL) -> REAL {
    return fma(a, b, -(a * b));
}""",
    "nf_fma": """\
fn nf_fma(a: REAL, b: REAL, c: REAL) -> REAL {
    return fma(a, b, c);
}""",
}


def real(dtype: str) -> str:
    """Return the type of WGSL for a dtype; raise ValueError if there is none."""
    return _words(dtype)["REAL"]


@functools.cache
def primitives(dtype: str = "float32", one_rounding: bool = False) -> dict[str, str]:
    """The text of every primitive in this dtype, by name; see `ONE_ROUNDING`."""
    words = _words(dtype)

    def bound(match: re.Match[str]) -> str:
        word = match[0]
        return literal(float(word), dtype) if word[0].isdigit() else words[word]

    pattern = re.compile(r"\b[A-Z][A-Z0-9_]*\b|(?<![\w.])\d+\.\d+\b")
    texts = TEMPLATES | ONE_ROUNDING if one_rounding else TEMPLATES
    return {name: pattern.sub(bound, text) for name, text in texts.items()}
