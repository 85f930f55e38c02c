"""Two sums of one left factor in one launch, in float32 and float64, run by `cuda_machine`.

Guards: both sums have the bits that each has alone, in any layout, alignment and size; results are
where they belong and nothing is written beside them; and a gated layer has them from one launch.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

try:
    from cuda_devices import AMPERE, HOPPER
    from cuda_machine import Machine

    from numfuse.backends.cuda.block_tiling import CudaBlock
    from numfuse.backends.cuda.kernels.ampere import outer, simt, tensor_core
    from numfuse.backends.cuda.plan.product import Product
    from numfuse.backends.cuda.plan.tiers import choose, stay_whole
    from numfuse.backends.cuda.tiling import round_up
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.epilogues import Epilogue, sum_of_terms
from numfuse.language.curves import leaf

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

from test_cuda_blocks import HALF_WARPS, THREADS, UNITS, WARPS, Array

#: Minutes of kernels that run in Python.
pytestmark = pytest.mark.long

Z, Z1 = leaf("z") + leaf("bias"), leaf("z1") + leaf("bias1")
#: Three results of both sums, two biases and another operand.
GATE = Epilogue(
    "gate",
    ("z", "z1"),
    ("bias", "bias1", "grad"),
    (("out", Z * Z1 + leaf("grad")), ("pre", Z), ("pre1", Z1)),
)


def run(plan, arrays):
    """Run launches over arrays by the names of their slots."""
    work = np.full(plan.workspace + 16, 0xFF, np.uint8)
    machine = Machine([*(x.memory for x in arrays.values()), work])
    addresses = {name: x.address for name, x in arrays.items()}
    for launch in plan.launches:
        machine.run(launch, **addresses, work=work.ctypes.data + -work.ctypes.data % 16)


def alternate(both):
    """The even and the odd columns of an array, as arrays."""
    place, row, column = both.operand.strides
    size = both.operand.itemsize
    found = []
    for first, alignment in ((0, both.operand.alignment), (1, size)):
        of = replace(both.operand, strides=(place, row, 2 * column), alignment=alignment)
        found.append(
            SimpleNamespace(
                operand=of, address=both.address + first * size, memory=both.memory,
                view=both.view[..., first::2],
            )
        )  # fmt: skip
    return found


def planned(product, info, tile, parts):
    """The plan of a product with a tile and parts of K, or of those with a short K."""
    if tile is None:
        return outer.take(product, info)
    module = simt if product.x.dtype == "float32" else tensor_core
    part = product.k if parts == 1 else round_up(-(-product.k // parts), tile.block_k)
    return module.plan(product, info, tile, part, -(-product.k // part))


def check(
    dtype, tile, m, n, k, *, x="rows", y="rows", offset=0, pad=0, places=1, info=HOPPER,
    woven=False, parts=1,
):  # fmt: skip
    rng = np.random.default_rng(m * n + k)
    acc = "float64" if dtype == "float64" else "float32"

    def made(shape, layout="rows", nan=False):
        values = np.full(shape, np.nan) if nan else rng.standard_normal(shape)
        return Array(values, dtype, layout, offset, pad)

    sides = {"x": made((places, m, k), x), "y": made((places, k, n), y)}
    sides |= {"y1": made((places, k, n), y), "extra": made((places, m, n))}
    if woven:
        sides["y"], sides["y1"] = alternate(made((places, k, 2 * n), y))
    sides |= {name: made((places, 1, n)) for name in ("bias", "bias1")}
    ends = {name: made((places, m, n), nan=True) for name in ("out", "pre", "pre1")}
    operands = {name: array.operand for name, array in (sides | ends).items()}
    how = {"epilogue": GATE, "whole": True, "alternate": "y" * woven}
    product = Product(m, n, k, places, accumulator=acc, **how, **operands)
    plan = planned(product, info, tile, parts)
    assert plan is not None and (plan.parts > 1) == (parts > 1)
    run(plan, sides | ends)
    exact = {name: array.view.astype(np.float64) for name, array in sides.items()}
    bound, sums = UNITS[acc] * (k + 4), {}
    for result, right, bias in (("pre", "y", "bias"), ("pre1", "y1", "bias1")):
        sums[result] = exact["x"] @ exact[right] + exact[bias]
        largest = abs(exact["x"]) @ abs(exact[right]) + 4
        error = abs(ends[result].view.astype(np.float64) - sums[result])
        assert (error <= bound * largest + UNITS[dtype] * abs(sums[result])).all()
        # the bits of the sum alone
        alone = made((places, m, n), nan=True)
        single = replace(
            product, epilogue=Epilogue("alone", ("z",), ("bias",), (("out", Z),)),
            y=sides[right].operand, bias=sides[bias].operand, out=alone.operand,
            **dict.fromkeys(("y1", "bias1", "extra", "pre", "pre1")), alternate="",
        )  # fmt: skip
        how = {"x": sides["x"], "y": sides[right], "bias": sides[bias], "out": alone}
        run(planned(single, info, tile, parts), how)
        assert np.array_equal(alone.view, ends[result].view)
    whole = sums["pre"] * sums["pre1"] + exact["extra"]
    made_of = ends["pre"].view.astype(np.float64) * ends["pre1"].view.astype(np.float64)
    near = abs(made_of + exact["extra"]) + abs(made_of)
    unit = max(UNITS[dtype], UNITS[acc]) * (8 if dtype == acc else 4)
    assert (
        abs(ends["out"].view.astype(np.float64) - made_of - exact["extra"]) <= unit * near
    ).all()
    assert np.isfinite(whole).all()


@pytest.mark.parametrize(
    "dtype, tile, sizes, how",
    [
        ("float64", WARPS, (32, 32, 40), {}),
        ("float64", WARPS, (37, 29, 19), {"pad": 3}),
        ("float64", WARPS, (33, 18, 21), {"y": "columns", "x": "columns", "pad": 1}),
        ("float64", WARPS, (9, 40, 33), {"y": "strided", "places": 2}),
        ("float64", WARPS, (20, 17, 50), {"y": "reversed", "info": AMPERE}),
        ("float32", THREADS, (64, 64, 32), {}),
        ("float32", THREADS, (70, 41, 19), {"pad": 3}),
        ("float32", THREADS, (65, 37, 24), {"y": "columns"}),
        ("float32", THREADS, (30, 70, 21), {"y": "strided", "places": 2, "offset": 1}),
        ("bfloat16", HALF_WARPS, (32, 32, 64), {"info": AMPERE}),
        ("float16", HALF_WARPS, (33, 21, 40), {"y": "columns", "pad": 8, "info": AMPERE}),
    ],
)  # fmt: skip
def test_two_sums_are_those_of_two_products(dtype, tile, sizes, how):
    check(dtype, tile, *sizes, **how)


@pytest.mark.parametrize(
    "dtype, tile, sizes, how",
    [
        ("float64", WARPS, (32, 32, 70), {"parts": 2}),
        ("float64", WARPS, (9, 39, 90), {"y": "strided", "places": 2, "parts": 3}),
        ("float32", THREADS, (64, 64, 64), {"parts": 3}),
        ("float32", THREADS, (33, 37, 50), {"places": 2, "offset": 1, "parts": 2}),
        ("float32", THREADS, (30, 44, 40), {"woven": True, "pad": 4, "parts": 2}),
        ("bfloat16", HALF_WARPS, (32, 32, 130), {"info": AMPERE, "parts": 2}),
    ],
)  # fmt: skip
def test_two_sums_in_parts_are_those_of_two_products_in_parts(dtype, tile, sizes, how):
    """Guards: planes of both sums, and what finishes them."""
    check(dtype, tile, *sizes, **how)


@pytest.mark.parametrize(
    "dtype, sizes, how",
    [
        ("float64", (37, 29, 19), {"pad": 3}),
        ("float64", (20, 40, 6), {"y": "columns", "places": 2}),
        ("float32", (70, 41, 33), {"x": "columns"}),
        ("float32", (30, 20, 8), {"woven": True}),
        ("bfloat16", (33, 21, 1), {"y": "strided", "info": AMPERE}),
        ("float16", (9, 150, 25), {"woven": True, "offset": 1}),
    ],
)
def test_two_sums_of_a_short_k_are_those_of_two_products(dtype, sizes, how, monkeypatch):
    monkeypatch.setattr(outer, "ODD", dict.fromkeys(outer.ODD, 40))
    monkeypatch.setattr(outer, "LEAST", 1)
    check(dtype, None, *sizes, **how)


@pytest.mark.parametrize(
    "dtype, tile, sizes, how",
    [
        ("float64", WARPS, (32, 32, 40), {}),
        ("float64", WARPS, (37, 29, 19), {"pad": 3}),
        ("float64", WARPS, (9, 40, 33), {"places": 2, "offset": 1}),
        ("float32", THREADS, (64, 64, 32), {}),
        ("float32", THREADS, (70, 42, 19), {"pad": 4}),
        ("float32", THREADS, (30, 37, 21), {"places": 2, "offset": 1}),
        ("bfloat16", HALF_WARPS, (32, 32, 64), {"info": AMPERE}),
        ("float16", HALF_WARPS, (33, 21, 40), {"pad": 6, "info": AMPERE}),
        ("float16", HALF_WARPS, (20, 21, 40), {"pad": 1, "info": AMPERE}),
    ],
)  # fmt: skip
def test_sums_of_alternate_columns_are_those_of_two_products(dtype, tile, sizes, how):
    """Guards: docs/cuda.md, alternate columns of one array are read as that array."""
    check(dtype, tile, *sizes, woven=True, **how)


def pair(dtype, m, n, k, **other):
    """A product of two sums of matrices that lie by rows."""

    def operand(rows, columns):
        values = np.zeros((1, rows, columns))
        return replace(Array(values, dtype).operand, strides=(rows * columns, columns, 1))

    both = Epilogue("both", ("z", "z1"), (), (("out", leaf("z")), ("pre", leaf("z1"))))
    right = operand(k, n)
    how = {"epilogue": both, "y1": right, "pre": operand(m, n)} | other
    return Product(m, n, k, 1, operand(m, k), right, operand(m, n), dtype, **how)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_pair_is_cut_as_each_sum_alone_is(dtype):
    sizes = {
        "large": (4096, 704, 256), "small": (700, 900, 500), "few rows": (64, 1024, 1024),
        "few blocks": (128, 96, 4096), "short": (4096, 704, 4),
    }  # fmt: skip
    stays = {x: stay_whole(dtype, HOPPER, "ieee", m, n, k, 1) for x, (m, n, k) in sizes.items()}
    assert stays == {"large": True, "small": True, "few rows": False, "few blocks": False,
                     "short": False}  # fmt: skip
    for name, whole in stays.items():
        m, n, k = (min(size, 512) if name == "few rows" else size for size in sizes[name])
        found = choose(pair(dtype, m, n, k, whole=whole), HOPPER)
        single = replace(pair(dtype, m, n, k), y1=None, pre=None, epilogue=sum_of_terms(0))
        alone = choose(single, HOPPER)[1]
        if whole:
            assert found is not None and len(found[1].launches) == 1
        elif found is not None or name == "few blocks":
            assert name != "few blocks" or alone.parts > 1
            assert (found[1].parts, found[1].part) == (alone.parts, alone.part)
    assert not stay_whole("float32", HOPPER, "bf16x6", 4096, 704, 256, 1)


def test_tiles_of_any_shape_give_each_factor_half_of_a_threads_step():
    tile = CudaBlock(32, 64, 16, 16, 32, 3, 1, 8)
    check("float64", tile, 40, 50, 35, y="columns")
    check("float64", tile, 40, 50, 35)
