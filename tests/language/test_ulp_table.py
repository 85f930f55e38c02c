"""The errors that docs/numerics.md states: measured again, on a sample, by the script behind them.

The page's figures come from all 2^32 float32 numbers and 2^27 float64; a sample finds less, so the
bounds here are the page's.
"""

import importlib.util
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"

#: Most ULP by order of differentiation (of derivatives: away from their zeros), and the multiple of
#: eps / 2 that comes to 4 ULP near them.
ULP = {
    "gelu": (2, 6.5, 13), "silu": (2, 4, 11), "sigmoid": (2, 3, 4.5), "tanh": (2.01, 3, 4.5),
}  # fmt: skip
NEAR_ZERO = 2.0


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("ulp_table", DOCS / "ulp_table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    sys.modules["numfuse.activations.table"].TABLE = {
        name: act
        for name, act in sys.modules["numfuse.activations.table"].TABLE.items()
        if act.source != "docs/ulp_table.py"
    }


@pytest.mark.long
def test_the_reference_is_right(tables):
    """Seven bits and more beyond float64, so that it adds nothing to a figure of two digits."""
    for found in tables.check(1500).values():
        assert found < -20


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_errors_are_within_the_stated_bounds(tables, dtype):
    table = {}
    blocks = tables.floats32(0, 1 << 32, 32771) if dtype == "float32" else tables.floats64(1 << 17)
    tables.Sweep(dtype).run(blocks, 1, table)
    for (name, order), row in table.items():
        assert row.wrong == 0, (name, order)
        assert row.worst <= ULP[name][order], (name, order, row.at)
        assert row.absolute <= NEAR_ZERO, (name, order)
        # It is a measurement: a sample of this size meets errors beyond rounding.
        assert row.worst > 0.6 and row.count > 100_000


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_half_is_rounded_once_from_float32(tables, dtype):
    table = {}
    tables.Sweep(dtype).run(tables.halves(dtype), 1, table)
    for (name, order), row in table.items():
        assert row.wrong == 0 and row.count > 60_000
        # half a unit, and the float32 error: ULP of float32 are 2^-13 or 2^-16 of a unit
        assert row.worst <= 0.5 + 2.0**-9, (name, order, row.at)
