"""Results whose last rows are made in parts of K, run by `cuda_machine`.

Guards: blocks that would be alone in a round of their own cost none, a sum has the same order
whatever is made of it, and nothing is written beside the rows that a launch has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse import epilogues

try:
    from cuda_devices import AMPERE, HOPPER
    from test_cuda_blocks import HALF_WARPS, THREADS, WARPS, check

    from numfuse.backends.cuda import block_tiling, tiling
    from numfuse.backends.cuda.kernels.ampere import simt, tails, tensor_core
    from numfuse.backends.cuda.plan import tiers
    from numfuse.backends.cuda.plan.product import Operand, Product
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

LAYER = epilogues.layer(nf.activations()["gelu"].curve)
TILES = {"float64": WARPS, "float32": THREADS}


@pytest.mark.long
@pytest.mark.parametrize("epilogue", ["activation", "summed"])
@pytest.mark.parametrize(("x", "y"), [("rows", "columns"), ("columns", "rows"), ("rows", "rows")])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_last_rows_are_made_in_parts(monkeypatch, dtype, x, y, epilogue):
    tile = TILES.get(dtype, HALF_WARPS)
    module = simt if dtype == "float32" else tensor_core
    monkeypatch.setattr(block_tiling, "CUT_PART", 32)
    for name in ("LAUNCH_COST", "DOUBLE_LAUNCH", "CORE_LAUNCH", "BESIDE_COST", "FILL"):
        monkeypatch.setattr(block_tiling, name, 0)
    small = replace(HOPPER if x == y else AMPERE, multiprocessors=2)
    found = []

    def planned(product, info, parts):
        found.append(tails.plan(product, info, (tile,), (), 1e30, module.plan))
        return found[0]

    m, n = 2 * tile.block_m + 5, tile.block_n - 3
    options = {"x": x, "y": y, "epilogue": epilogue, "info": small, "offset": int(x == y)}
    *_, made = check(dtype, planned, m, n, 100, pre=epilogue == "activation", **options)
    (plan,) = found
    assert plan.tail is not None and plan.tail[0] == 2 * tile.block_m
    assert plan.sum_rows == 3 and plan.tail[1] < 100
    # the rows before the last have what they have in a result of their own
    *_, alone = check(dtype, tile, m, n, 100, pre=epilogue == "activation", **options)
    np.testing.assert_array_equal(made[:, : m - 5], alone[:, : m - 5])


def product(m, k, n, dtype="float64", **features):
    x, y, out = (Operand(dtype, (0, columns, 1), 16) for columns in (k, n, n))
    return Product(m, n, k, 1, x, y, out, dtype, **features)


def test_blocks_beyond_whole_rounds_take_none_of_their_own():
    made = product(784, 1664, 2816)
    tier, plan = tiers.choose(made, HOPPER)
    rows, part = plan.tail
    assert tier.name == "tensor cores" and rows == 768 and 0 < part < 1664
    first, last, _ = plan.launches
    assert first.grid[0] % HOPPER.multiprocessors == 0 and f"last {784 - rows} rows" in plan.tiling
    assert not first.overlaps and last.overlaps  # both run together
    assert plan.workspace >= 16 * 2816 * 8 * (-(-1664 // part))
    assert tiers.choose(product(768, 1664, 2816), HOPPER)[1].tail is None
    # a sum has the same order whatever is made of it
    bias = Operand("float64", (0, 0, 1), 16)
    layer = replace(made, epilogue=LAYER.select("out", "pre"), bias=bias, pre=made.out)
    slope = LAYER.select("out").backward().guarded().select("d_z")
    slope = replace(made, epilogue=slope, bias=bias, extra=made.out, sums=True)
    for other in (layer, slope):
        _, found = tiers.choose(other, HOPPER)
        assert found.order == plan.order
    assert found.sum_rows == -(-rows // found.block_m) + -(-(784 - rows) // tiling.RUN)


@pytest.mark.parametrize(
    "features", [{"free": True}, {"whole": True}, {"places": 2}], ids=lambda x: next(iter(x))
)
def test_sums_with_an_order_of_their_own_have_no_such_rows(features):
    _, plan = tiers.choose(replace(product(784, 1664, 2816), **features), HOPPER)
    assert plan.tail is None


def test_a_product_of_two_sums_is_two_launches_where_each_alone_has_such_rows():
    made = product(784, 1664, 2816)
    both = epilogues.sum_of_terms(0)
    rich = replace(made, y1=made.y, epilogue=both)
    assert tiers.choose(rich, HOPPER) is None
