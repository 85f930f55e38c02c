"""The bfloat16 parts of a float32, as templates: x = x0 + x1 (+ x2), each the nearest to a rest."""

# A template has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from typing import Any

import numpy as np

from numfuse.backends.cuda.compile.intrinsics import HALVES, select
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled


def nearest(x):
    """x rounded to bfloat16, as a float32."""
    return LOW(PACK(x, ZERO))


def high_part(x):
    """The first of the bfloat16 parts of x.

    A finite number stays finite (rounding would make an infinity of those above LARGEST), and no
    number but 0 becomes 0: an infinity in the other operand must not meet a zero that is none.
    """
    near = nearest(x)
    near = select(LARGEST, near, (x > LARGEST) & (x <= MAXIMUM))
    near = select(-LARGEST, near, (x < -LARGEST) & (x >= -MAXIMUM))
    near = select(SMALLEST, near, (x > ZERO) & (near == ZERO))
    return select(-SMALLEST, near, (x < ZERO) & (near == ZERO))


def rest(x, part):
    """Return what `part` leaves of x, exactly; 0 if x is an infinity or not a number."""
    return select(x - part, ZERO, (x >= -MAXIMUM) & (x <= MAXIMUM))


def split(v, words):
    """Make the parts of eight numbers, two in a word: all first ones, then all second ones.

    What `high_part` is there for goes wrong here, and makes infinities or NaN in a product.
    """
    for p in unrolled(PLANES):
        take_part(v, words, p)


def split_carefully(v, words):
    """Make the same parts of them, the first ones by `high_part`."""
    part = cuda.local.array(8, types.float32)
    for i in unrolled(8):
        part[i] = high_part(v[i])
        v[i] = rest(v[i], part[i])
    for i in unrolled(4):
        words[i] = PACK(part[2 * i], part[2 * i + 1])
    for p in unrolled(PLANES - 1):
        take_part(v, words, p + 1)


def take_part(v, words, p):
    """Make the p-th parts of what is left of eight numbers, and leave the rest of that."""
    for i in unrolled(4):
        word = PACK(v[2 * i], v[2 * i + 1])
        words[4 * p + i] = word
        v[2 * i] -= LOW(word)
        v[2 * i + 1] -= HIGH(word)


def bindings() -> dict[str, Any]:
    """Return the names of these templates."""
    real = np.float32
    pack, low, high = HALVES["bfloat16"]
    return {
        "PACK": pack,
        "LOW": low,
        "HIGH": high,
        "ZERO": real(0),
        # of bfloat16 the largest number and the smallest subnormal; the largest float32
        "LARGEST": real(2.0**127 * (2 - 2.0**-7)),
        "SMALLEST": real(2.0**-133),
        "MAXIMUM": np.finfo(real).max,
    }
