"""Elementwise passes over short rows, which are done as long ones, have the bits of any other way.

Guards: an element does not depend on the shapes of the operands (docs/numerics.md, "The same
bits").
"""

from __future__ import annotations

import numpy as np
import pytest
from arrays import bits, normal
from tolerance import DTYPES

import numfuse as nf
from numfuse import expr as ex
from numfuse.backends.cpu import tiling


def bell(x, y, z):
    return ex.exp(-(x * x)) * y + z


def both(x, y, z):
    return x * y, ex.tanh(x) + z


ROWS, ONE, ELEMENT, NUMBER = "rows", "one row", "one element", "number"


def operand(rng, kind, m, n, dtype):
    """An operand of a kind, and it with a value for each element of the result."""
    if kind == NUMBER:
        return 2.5, np.full((m, n), 2.5, dtype)
    shape = {ROWS: (m, n), ONE: (n,), ELEMENT: (1, 1)}[kind]
    x = normal(rng, shape, dtype)
    return x, np.array(np.broadcast_to(x, (m, n)))


@pytest.mark.parametrize("kinds", [(ONE, ONE), (ONE, ROWS), (ELEMENT, ONE), (NUMBER, ONE)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_for_all_gives_what_its_copies_give(dtype, kinds):
    rng = np.random.default_rng(7)
    least = tiling.LEAST_JOINED
    for n in (2, 5, 33, tiling.SHORT_ROW, tiling.SHORT_ROW + 1):
        for m in (least // n, least // n + 3, 5003):
            x = normal(rng, (m, n), DTYPES[dtype])
            pairs = [operand(rng, kind, m, n, DTYPES[dtype]) for kind in kinds]
            given, whole = zip(*pairs, strict=True)
            for formula in (bell, both):
                got = nf.elementwise(formula, x, *given)
                wanted = nf.elementwise(formula, x, *whole)
                for y, z in zip(np.atleast_3d(got), np.atleast_3d(wanted), strict=True):
                    assert (bits(y) == bits(z)).all(), (m, n, formula.__name__)
            wanted = nf.elementwise(bell, x, *whole)
            nf.elementwise(bell, x, *given, out=x)
            assert (bits(x) == bits(wanted)).all(), (m, n)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_columns_and_views_go_row_by_row(dtype):
    rng = np.random.default_rng(8)
    m, n = 3000, 6
    wide, row = normal(rng, (m, 2 * n), DTYPES[dtype]), normal(rng, (n,), DTYPES[dtype])
    column = normal(rng, (m, 1), DTYPES[dtype])
    for x, y in ((wide[:, ::2], row), (wide[:, :n], row), (wide[:, :n].copy(), column)):
        copies = [np.array(np.broadcast_to(z, (m, n))) for z in (x, y)]
        got, wanted = nf.elementwise(bell, x, y, row), nf.elementwise(bell, *copies, row)
        assert (bits(got) == bits(wanted)).all()
