"""Two sums of the even and the odd columns of one array, by Hopper's kernel run in Python.

Guards: docs/cuda.md, alternate columns of one array are read where they lie: both sums have the
bits that each has alone, and what is made of them is where it belongs.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import SIMULATED, unavailable

try:
    from cuda_devices import HOPPER
    from cuda_hopper import Hopper

    from numfuse.backends.cuda.kernels.hopper.tiling import HopperTile
    from numfuse.backends.cuda.plan.product import Operand, Product

    tier = importlib.import_module("numfuse.backends.cuda.kernels.hopper.tier")
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.epilogues import Epilogue, sum_of_terms
from numfuse.language.curves import leaf

if SIMULATED:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

#: Minutes of kernels that run in Python.
pytestmark = pytest.mark.long

SMALL = replace(HOPPER, multiprocessors=2)
TILES = [
    HopperTile(64, 64, 1, False), HopperTile(64, 128, 1, False), HopperTile(128, 128, 2, True),
    HopperTile(128, 256, 2, False),
]  # fmt: skip
Z, Z1 = leaf("z"), leaf("z1")


def memory(rng, rows, columns, pitch=0):
    """A matrix of bfloat16, the rest of its rows and what is behind it NaN."""
    whole = np.full((rows, max(columns, pitch)), np.nan, ml_dtypes.bfloat16)
    whole[:, :columns] = rng.standard_normal((rows, columns)) if rng is not None else np.nan
    return whole


def operand(x, step=1):
    return Operand("bfloat16", (0, x.shape[1], step), 16)


def made(product, tile, arrays):
    """Run a product; `arrays` are the memory of its slots."""
    plan = tier.plan_with(product, "bfloat16", SMALL, tile, 1)
    assert len(plan.launches) == 1, "nothing is copied"
    machine = Hopper([*arrays.values()])
    machine.run(plan.launches[0], **{name: x.ctypes.data for name, x in arrays.items()})


def alone(a, b, m, n, k, tile):
    """A sum of columns that are neighbours."""
    out = memory(None, m, n, -(-n // 8) * 8)
    b = np.pad(np.ascontiguousarray(b), ((0, 0), (0, -n % 8)))
    product = Product(m, n, k, 1, operand(a), operand(b), operand(out), "float32",
                      epilogue=sum_of_terms(0))  # fmt: skip
    made(product, tile, {"x": a, "y": b, "out": out})
    return out[:, :n]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64, 64), (70, 44, 130)])
def test_sums_of_alternate_columns_have_the_bits_of_columns_by_themselves(tile, sizes):
    m, n, k = sizes
    rng = np.random.default_rng(m + n)
    a, w = memory(rng, m, k, -(-k // 8) * 8), memory(rng, k, 2 * n)
    pitch = -(-n // 8) * 8
    results = {name: memory(None, m, n, pitch) for name in ("out", "pre", "pre1")}
    epilogue = Epilogue("sums", ("z", "z1"), (), (("out", Z - Z1), ("pre", Z), ("pre1", Z1)))
    how = {name: operand(x) for name, x in results.items() if name != "out"}
    product = Product(
        m, n, k, 1, operand(a), operand(w, 2), operand(results["out"]), "float32",
        epilogue=epilogue, y1=operand(w, 2), alternate="y", **how,
    )  # fmt: skip
    made(product, tile, {"x": a, "y": w, **results})
    for name, first in ("pre", 0), ("pre1", 1):
        wanted = alone(a, w[:, first::2], m, n, k, TILES[0])
        assert np.array_equal(results[name][:, :n], wanted)
        assert np.isnan(results[name][:, n:].astype(float)).all()
    exact = a[:, :k].astype(float) @ (w[:, ::2].astype(float) - w[:, 1::2])
    most = abs(a[:, :k].astype(float)) @ (abs(w[:, ::2].astype(float)) + abs(w[:, 1::2]))
    error = abs(results["out"][:, :n].astype(float) - exact)
    assert (error <= 2.0**-8 * abs(exact) + (k + 4) * 2.0**-24 * most).all()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("n", [44, 43])
def test_sums_stay_float32_where_a_pass_reads_them(tile, n):
    m, k = 70, 72
    rng = np.random.default_rng(n)
    a, w = memory(rng, m, k), memory(rng, k, 2 * n, 88)
    results = {name: np.full((m, n), np.nan, np.float32) for name in ("out", "pre")}
    epilogue = Epilogue("sums", ("z", "z1"), (), (("out", Z), ("pre", Z1)))
    of = Operand("float32", (0, n, 1), 16)
    product = Product(
        m, n, k, 1, operand(a), operand(w, 2), of, "float32", epilogue=epilogue,
        y1=operand(w, 2), pre=of, alternate="y",
    )  # fmt: skip
    made(product, tile, {"x": a, "y": w, **results})
    for name, first in ("out", 0), ("pre", 1):
        own = w[:, first : 2 * n : 2].astype(float)
        most = abs(a.astype(float)) @ abs(own)
        error = abs(results[name] - a.astype(float) @ own)
        assert (error <= (k + 4) * 2.0**-24 * most).all()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("by", ["map", "rows"])
def test_two_results_alternate_in_one_array(tile, by):
    m, n, k = 70, 44, 72
    rng = np.random.default_rng(n)
    a, w = memory(rng, m, k), memory(rng, k, 2 * n)
    grad, out = memory(rng, m, n, 48 if by == "map" else 45), memory(None, m, 2 * n)
    epilogue = Epilogue(
        "gate", ("z", "z1"), ("extra",), (("out", Z1 * leaf("extra")), ("pre", Z * leaf("extra")))
    )
    product = Product(
        m, n, k, 1, operand(a), operand(w, 2), operand(out, 2), "float32", epilogue=epilogue,
        y1=operand(w, 2), pre=operand(out, 2), extra=operand(grad), alternate="y out",
    )  # fmt: skip
    made(product, tile, {"x": a, "y": w, "out": out, "pre": out, "extra": grad})
    g = grad[:, :n].astype(float)
    for first in (0, 1):
        other = w[:, 1 - first :: 2].astype(float)
        exact, most = (a.astype(float) @ other) * g, (abs(a.astype(float)) @ abs(other)) * abs(g)
        error = abs(out[:, first::2].astype(float) - exact)
        assert (error <= 2.0**-8 * abs(exact) + (k + 4) * 2.0**-23 * most).all()


@pytest.mark.parametrize("tile", TILES[2:], ids=str)
def test_two_operands_by_columns_cost_no_stage_and_meet_their_columns(tile):
    """Guards: in the one place that is left for them none is written before the last is read."""
    m, n, k = 2 * tile.block_m + 5, tile.block_n + 40, 72
    rng = np.random.default_rng(m)
    a, w = memory(rng, m, k), memory(rng, k, n, n + 8)
    lines = {name: memory(rng, 1, n) for name in ("bias", "bias1")}
    out = memory(None, m, n, n + 8)
    product = Product(
        m, n, k, 1, operand(a), operand(w), operand(out), "float32",
        epilogue=Epilogue("lines", ("z",), tuple(lines),
                          (("out", (Z + leaf("bias")) * leaf("bias1")),)),
        **{name: Operand("bfloat16", (0, 0, 1), 16) for name in lines},
    )  # fmt: skip
    bare = replace(product, epilogue=sum_of_terms(0), bias=None, bias1=None)
    shown = [tier.plan_with(p, "bfloat16", SMALL, tile, 1).tiling for p in (product, bare)]
    assert shown[0] == shown[1]  # the stages are in it
    made(product, tile, {"x": a, "y": w, "out": out, **lines})
    bias, scale = (x.astype(float) for x in lines.values())
    factors = a.astype(float), w[:, :n].astype(float)
    exact = (factors[0] @ factors[1] + bias) * scale
    most = (abs(factors[0]) @ abs(factors[1]) + abs(bias)) * abs(scale)
    error = abs(out[:, :n].astype(float) - exact)
    assert (error <= 2.0**-8 * abs(exact) + (k + 6) * 2.0**-23 * most).all()
