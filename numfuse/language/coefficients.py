"""Coefficients of the elementary functions, per dtype: one table for every target.

Method. exp: x = n ln2 + r with ln2 in two words (Cody and Waite 1980), e^r - 1 = r + r^2 P(r), and
the scale 2^n in two halves, the last factors, so that a subnormal result is rounded once. log:
log(1 + f) by the series in s = f / (2 + f) (fdlibm, Sun 1993, e_log.c). Normal tail: Mills' ratio
M(y) = Phi(-y) / e^(-y^2/2) times (1 + y) as a polynomial in w = (y - 5) / (y + 5).

Polynomials are minimax for the error of the final result (its logarithm to base 2 is given for
float32 and float64), by Remez' exchange in 40 digits; the highest power comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def _hex(*words: str) -> tuple[float, ...]:
    return tuple(float.fromhex(word) for word in words)


# e^r = 1 + r + r^2 P(r) for |r| <= ln2 / 2. log2 error -28.3, -57.9.
EXP = {
    "float32": _hex(
        "0x1.6a23de484dbbfp-10", "0x1.123a360ac6b57p-7", "0x1.5558f33f615e9p-5",
        "0x1.555490e6c2e21p-3", "0x1.fffffb96eec9dp-2",
    ),
    "float64": _hex(
        "0x1.ad7b43bc8bd83p-26", "0x1.28ada3de6fab7p-22", "0x1.71df287fce3b9p-19",
        "0x1.a01999dcfe10fp-16", "0x1.a01a0128af3afp-13", "0x1.6c16c18438ddep-10",
        "0x1.1111111128165p-7", "0x1.5555555550849p-5", "0x1.55555555554f8p-3",
        "0x1.000000000000ap-1",
    ),
}  # fmt: skip
# log((1 + s) / (1 - s)) = 2 s + s^3 R(s^2) for |s| <= 3 - 2 sqrt(2). log2 error -36.6, -58.5.
LOG = {
    "float32": _hex(
        "0x1.e3053431cc726p-3", "0x1.24387ad6fe809p-2", "0x1.999a7bde704eep-2",
        "0x1.555554fcf5054p-1",
    ),
    "float64": _hex(
        "0x1.2f15137779cc5p-3", "0x1.39a04423b4465p-3", "0x1.74664c743d31dp-3",
        "0x1.c71c51cc3bfafp-3", "0x1.24924942363a7p-2", "0x1.999999997f946p-2",
        "0x1.5555555555593p-1",
    ),
}  # fmt: skip
# erf(x) = x + x P(x^2) for |x| <= 1. log2 error -29.7, -57.0.
ERF = {
    "float32": _hex(
        "0x1.4ae4c59dcdbf3p-14", "-0x1.a485f7f7ff144p-11", "0x1.5419f962ab742p-8",
        "-0x1.b7fbb56196242p-6", "0x1.ce2d1fae8ac4ep-4", "-0x1.81273ecb64b3ap-2",
        "0x1.06eba7f8bac62p-3",
    ),
    "float64": _hex(
        "-0x1.acdff90b8ebd8p-31", "0x1.d784936618cc2p-27", "-0x1.5c16e30fb0d45p-23",
        "0x1.b9827b1885f9bp-20", "-0x1.f4ca94990cb86p-17", "0x1.f9a2bf73f0c68p-14",
        "-0x1.c02db072f3fe0p-11", "0x1.565bccfa9a825p-8", "-0x1.b82ce312062bcp-6",
        "0x1.ce2f21a041018p-4", "-0x1.812746b0379c2p-2", "0x1.06eba8214db68p-3",
    ),
}  # fmt: skip
# M(y) (1 + y) in w = (y - 5) / (y + 5), y to 14.5 and to 39. log2 error -29.2, -56.6.
MILLS = {
    "float32": _hex(
        "0x1.aac5a482ccfb1p-13", "-0x1.6a531883003c5p-15", "-0x1.c07b50a52d4a9p-10",
        "0x1.ac604483f4ffcp-8", "-0x1.f0aa8d1f43a8bp-7", "0x1.91fd7ee2de973p-6",
        "-0x1.b096133188476p-6", "0x1.47c2249fa8103p-7", "0x1.fc6732a5f9fabp-6",
        "-0x1.76ff8697a8914p-4", "0x1.d8979b0247f25p-2",
    ),
    "float64": _hex(
        "0x1.7f9780200d352p-31", "0x1.0924850ddf0e5p-28", "0x1.00d60529c7d51p-31",
        "-0x1.0edda05e725f2p-25", "-0x1.784f0d917cbc2p-26", "0x1.a9b2b9a8f6908p-23",
        "0x1.0b48ea0a62ed3p-23", "-0x1.5f81d4c1f96e8p-20", "-0x1.2719ae49b86bdp-24",
        "0x1.300907d4d67cap-17", "-0x1.4c131e231d5a4p-17", "-0x1.c1b23abcaab04p-15",
        "0x1.7e61f341aa72cp-13", "0x1.0572006d19714p-17", "-0x1.b75f4fd05aab2p-10",
        "0x1.ab6d03879c2d3p-8", "-0x1.f11aab023b941p-7", "0x1.92037bab5f001p-6",
        "-0x1.b08e0007b930cp-6", "0x1.47c1d03053222p-7", "0x1.fc66cc64a1511p-6",
        "-0x1.76ff86859eb0ep-4", "0x1.d8979b0f2b39dp-2",
    ),
}  # fmt: skip
# ln2 as a head of few bits, whose product with any exponent is exact, and a tail.
LN2 = {
    "float32": _hex("0x1.62e4p-1", "0x1.7f7d1cf79abcap-20"),
    "float64": _hex("0x1.62e42fee00000p-1", "0x1.a39ef35793c76p-33"),
}
# Below the first, factor * exp(x) is 0 for any factor up to 2^90 (2^900); above the second, exp(x)
# is infinite.
EXP_RANGE = {"float32": (-170.0, 89.0), "float64": (-1400.0, 710.0)}
# factor / (1 + e^y) = (factor / g) 2^-shift with g = 2^-shift (1 + e^y), y held at an end where
# factor e^-y is 0 for any factor up to GROWTH_FACTOR: g and 1 / g are then normal numbers.
GROWTH_SHIFT = {"float32": 64, "float64": 512}
GROWTH_END = {"float32": 130.0, "float64": 1060.0}
GROWTH_FACTOR = 2.0**37
# Beyond this, e^(-y^2/2) is 0 (and the polynomial of Mills' ratio leaves its interval).
MILLS_END = {"float32": 14.5, "float64": 39.0}
# Beyond this, tanh is 1 to the last place.
TANH_END = {"float32": 10.0, "float64": 20.0}
POLYNOMIALS = {"exp": EXP, "log": LOG, "erf": ERF, "mills": MILLS}


def numbers(dtype: str) -> dict[str, float]:
    """Return the numbers that the primitives name, on every target."""
    info = np.finfo(dtype)
    named = "ln2_head", "ln2_tail", "exp_low", "exp_high"
    return {
        **dict(zip(named, (*LN2[dtype], *EXP_RANGE[dtype]), strict=True)),
        "log2e": math.log2(math.e),
        "root_two": math.sqrt(2.0),
        "mills_end": MILLS_END[dtype],
        "tanh_end": TANH_END[dtype],
        # Subnormal arguments of log are scaled by a power of two first.
        "tiny": float(info.tiny),
        "lift": 2.0 ** (info.nmant + 2),
        "unlift": info.nmant + 2,
    }


def horner(coefficients: Sequence[str], variable: str) -> str:
    """Return the text of a polynomial, from the texts of its coefficients."""
    text = coefficients[0]
    for coefficient in coefficients[1:]:
        text = f"fma({text}, {variable}, {coefficient})"
    return text
