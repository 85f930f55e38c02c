"""The numbers of a formula: exact rationals, rounded once, to a target's dtype."""

from __future__ import annotations

import math
import re
import reprlib
from fractions import Fraction
from typing import Any

import numpy as np

#: Bits of the numerator and the denominator of a constant: the smallest float64 is 2^-1074, its 53
#: bits in decimals have 767 digits (2548 bits), and products of two such are still exact.  A text
#: of more than 4300 digits is one that Python does not read back.
_BITS = 1 << 13
#: Characters of a constant's text that are read, and the largest exponent there, for as many bits.
_DIGITS = 2400


def fits(value: Fraction) -> bool:
    """Whether a rational has no more digits than a constant may have."""
    return max(value.numerator.bit_length(), value.denominator.bit_length()) <= _BITS


def exact(value: int | float | str | Fraction) -> Fraction | float:
    """Return a number as a rational; as a float if it is an infinity, NaN or -0.0.

    Raises
    ------
    ValueError
        A string that is no number, or a number of more digits than any dtype could tell apart.
    """
    if isinstance(value, float) and (
        not math.isfinite(value) or (value == 0 and math.copysign(1.0, value) < 0)
    ):
        return value
    number = _read(value) if isinstance(value, str) else Fraction(value)
    if not fits(number):
        raise ValueError(
            f"a constant in a formula must be a fraction of numbers of up to {_BITS} bits, got one "
            f"of {number.numerator.bit_length()} over {number.denominator.bit_length()} bits"
        )
    return number


def _read(text: str) -> Fraction:
    """Return the number that a text is; refuse one that is too long before computing anything."""
    exponent = re.search(r"[eE][+-]?([0-9_]+)", text)
    far = exponent is not None and (
        len(exponent[1]) > 8 or int(exponent[1].replace("_", "") or 0) > _DIGITS
    )
    try:
        if far or len(text) > _DIGITS:
            raise ValueError
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"a constant in a formula must be a number of up to {_DIGITS} digits, such "
            f"as '0.044715', got {reprlib.repr(text)}"
        ) from None


def rounded_value(value: Fraction | float, dtype: str) -> Any:
    """Return the number as a NumPy scalar of "float32" or "float64", rounded once, to even.

    Through float64 a float32 could be rounded twice. A number beyond the dtype is infinite.
    """
    if isinstance(value, Fraction):
        if dtype == "float32":
            value = _nearest(value, 24, -149)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    with np.errstate(all="ignore"):
        return np.dtype(dtype).type(value)


def _nearest(value: Fraction, bits: int, least: int = -2 * _BITS) -> Fraction:
    """Return the nearest number of `bits` significant bits, a multiple of 2^`least`; to even."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    grid = Fraction(2) ** max(exponent + 1 - bits, least)
    return round(value / grid) * grid


def split(value: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Return ``head + tail``, the head of at most `bits` significant bits.

    The head is exact in every dtype of at least `bits` bits, so its products with short numbers are
    exact too; the tail is what is left, exactly.
    """
    head = _nearest(value, bits)
    return head, value - head
