"""The moduli of an exact product of integers, and the numbers that go with them.

With T moduli of product P, an integer C with |C| < P / 2 is known by its residues. A row x of X is
scaled by a power of two to a norm of at most sqrt(P / 2) (a thousandth less), and so is a column of
Y; by Cauchy and Schwarz |C| then stays in that range, whatever the signs are.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

#: Pairwise coprime numbers of at most 8 bits, the largest first: 256, and each next lower number
#: that has no factor with one before in common.
MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227,
          223, 217, 211, 199, 197, 193, 191, 181, 179, 173)  # fmt: skip
#: Of a call that names no number. For normal entries the errors are then a twentieth of those of a
#: chain of fused multiply-adds in float64, with 14 moduli two thirds (docs/numerics.md).
DEFAULT = 15
#: With 8 the errors are those of float32; beyond 20 the sums of `finish` would not be exact.
FEWEST, MOST = 8, len(MODULI)
#: Of sqrt(P / 2), what a norm may be: room for the rounding of its sum of squares, for that of its
#: elements to integers (2^-18 with 8 moduli and K = 2^27), and for the quotient in `finish`.
MARGIN = Fraction(1023, 1024)
#: Bits of the weights whose sum by residues is exact in a float64: 20 x 255 of them are below 2^53.
EXACT = 40
#: Sums of squares between these are good for their norm: none of their terms of any size is lost.
TINY, HUGE = 2.0**-900, 2.0**900
NAME = "int8"


def precisions() -> tuple[str, ...]:
    """Return the names of this precision: "int8", and "int8:T" with T moduli."""
    return NAME, *(f"{NAME}:{count}" for count in range(FEWEST, MOST + 1))


def count_of(precision: str) -> int:
    """Return the number of moduli of a precision, 0 of one that has none."""
    name, _, count = precision.partition(":")
    if name != NAME:
        return 0
    return int(count) if count else DEFAULT


@dataclass(frozen=True)
class Residues:
    """The first so many moduli."""

    count: int

    @property
    def moduli(self) -> tuple[int, ...]:
        return MODULI[: self.count]

    @property
    def whole(self) -> int:
        """The product of all of them, P."""
        return math.prod(self.moduli)

    @property
    def words(self) -> int:
        """Words of 32 bits that hold an element, at most sqrt(P / 2), and its sign."""
        return 2 if self.whole // 2 < 1 << 126 else 3

    @property
    def square(self) -> Fraction:
        """The square of what a norm may be: 2^n m, as (n, m) with m from 1 to 2."""
        return MARGIN * self.whole / 2

    @property
    def limit(self) -> tuple[int, float]:
        """(n, m) of that square, 2^n m with m from 1 to 2, rounded down."""
        n = _exponent(self.square)
        m = self.square / Fraction(2) ** n
        return n, math.floor(m * 2**52) / 2**52

    def spread(self, k: int) -> int:
        """Return the power of two by which a row of `k` elements below 1 may be scaled."""
        # floor(log2(sqrt(square / k)))
        return _exponent(self.square / max(1, k)) // 2

    @property
    def weights(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The sum of residues by these, modulo 1, is C / P: high words, exact sums, and low ones.

        That of modulus p is the inverse of P / p modulo p, over p.
        """
        high, low = [], []
        for p in self.moduli:
            weight = Fraction(pow(self.whole // p, -1, p), p)
            first = Fraction(math.floor(weight * 2**EXACT), 2**EXACT)
            high.append(float(first))
            low.append(float(weight - first))
        return tuple(high), tuple(low)

    @property
    def scale(self) -> tuple[int, float, float]:
        """(n, h, l) of P = 2^n (h + l), h from 1 to 2."""
        n = _exponent(Fraction(self.whole))
        whole = Fraction(self.whole, 2**n)
        return n, float(whole), float(whole - Fraction(float(whole)))


@functools.cache
def residues(count: int) -> Residues:
    return Residues(count)


def _exponent(x: Fraction) -> int:
    """Return floor(log2(x)) of a positive number."""
    found = x.numerator.bit_length() - x.denominator.bit_length()
    return found if Fraction(2) ** found <= x else found - 1
