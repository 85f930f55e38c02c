"""The kernels of Ampere, run by `cuda_machine`: ways to fetch, multiply and finish a block.

Guards: on CUDA any strides, sizes and alignments are right, nothing beside a result is written, and
the errors of long sums stay in their bound (docs/numerics.md), without a GPU to see it.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import SIMULATED, unavailable

try:
    from cuda_devices import AMPERE, HOPPER
    from cuda_machine import Machine

    from numfuse.backends.cuda.compile.schema import arguments
    from numfuse.backends.cuda.kernels import joins, layouts, passes, pointwise
    from numfuse.backends.cuda.kernels.ampere import blocks, copies, outer, simt, tensor_core, thin
    from numfuse.backends.cuda.plan.product import Operand, Product, Slot
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse import epilogues
from numfuse.backends.cuda import block_tiling, few_tiling, tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.epilogues import Epilogue
from numfuse.language.curves import Curve, leaf
from numfuse.language.graph import SYMBOL, constant

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

#: Minutes of kernels that run in Python.
pytestmark = pytest.mark.long

DTYPES = {
    "float64": np.dtype("float64"), "float32": np.dtype("float32"),
    "float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
#: Half a unit in the last place.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
THREADS = CudaBlock(64, 64, 8, 8, 16, 3, 1)
WARPS = CudaBlock(32, 32, 16, 32, 16, 3, 1, 8)
HALF_WARPS = CudaBlock(32, 32, 32, 32, 16, 3, 1, 16, kept="")


class Array:
    """Values in a given layout, inside memory that ends with them."""

    def __init__(self, values, dtype, layout="rows", offset=0, pad=0):
        places, rows, columns = values.shape
        shape = {
            "rows": (places, rows, columns + pad), "columns": (places, columns, rows + pad),
            "strided": (places, 2 * rows, 3 * columns), "reversed": (places, rows, columns),
        }[layout]  # fmt: skip
        size = int(np.prod(shape))
        memory = np.zeros(size + 64, DTYPES[dtype])
        start = -(memory.ctypes.data // memory.itemsize) % (64 // memory.itemsize) + offset
        self.memory = memory[start : start + size]
        base = self.memory.reshape(shape)
        self.view = {
            "rows": lambda: base[:, :, :columns],
            "columns": lambda: base[:, :, :rows].swapaxes(1, 2),
            "strided": lambda: base[:, ::2, ::3],
            "reversed": lambda: base[:, ::-1, ::-1],
        }[layout]()
        self.view[...] = values
        self.address = self.view.ctypes.data
        alignment = min(16, self.address & -self.address)
        steps = tuple(s // memory.itemsize for s in self.view.strides)
        self.operand = Operand(dtype, steps, alignment)


def epilogue_of(what, pre):
    """The epilogue of a bare sum with its bias, of a residual (with column sums if it is "summed"),
    or of the identity's slope."""
    residual = epilogues.residual_layer()
    layer = epilogues.layer(importlib.import_module("numfuse.activations").get("none").curve)
    result = {
        "activation": layer["out"], "residual": residual["out"], "summed": residual["out"],
        "slope": leaf("grad"),
    }[what]  # fmt: skip
    results = (("out", result), ("pre", layer["pre"])) if pre else (("out", result),)
    extra = {"activation": (), "slope": ("grad",)}.get(what, ("residual",))
    return Epilogue(what, ("z",), ("bias", *extra), results)


def check(dtype, tile, m, n, k, *, x="rows", y="rows", epilogue="activation", places=1, parts=1,
          offset=0, pad=0, info=HOPPER, bias=True, pre=False, cluster=1, rest=()):  # fmt: skip
    """A plan of one product against float64.

    In place of a tile: what makes the plan of a product for a device, in so many parts.
    """
    rng = np.random.default_rng(m * n + k)
    acc = "float64" if dtype == "float64" else "float32"

    def made(shape, layout="rows", kind=dtype, nan=False):
        values = rng.standard_normal(shape)
        return Array(values * np.nan if nan else values, kind, layout, offset, pad)

    a, b = made((places, m, k), x), made((places, k, n), y)
    c, extra = made((places, 1, n)), made((places, m, n))
    out, kept = made((places, m, n), nan=True), made((places, m, n), kind=acc, nan=True)
    slope, summed = epilogue == "slope", epilogue in ("slope", "summed")
    made_of = epilogue_of(epilogue, pre)
    product = Product(
        m, n, k, places, a.operand, b.operand, out.operand, acc,
        epilogue=made_of if bias else made_of.without("bias"),
        bias=c.operand if bias else None, extra=extra.operand if epilogue != "activation" else None,
        pre=kept.operand if pre else None, sums=summed,
    )  # fmt: skip
    part = k
    if parts * cluster > 1 and isinstance(tile, CudaBlock):
        part = tiling.round_up(-(-k // (parts * cluster)), tile.block_k)
    module = simt if dtype == "float32" else tensor_core
    if not isinstance(tile, CudaBlock):
        plan = (tile or thin.plan)(product, info, parts)
    else:
        count = -(-k // part)
        plan = module.plan(product, info, tile, part, count, *rest, clustered=cluster > 1)
    assert plan.parts == parts
    first = m if plan.tail is None else plan.tail[0]
    firsts = [*range(0, first, plan.block_m), *range(first, m, tiling.RUN)]
    assert len(firsts) == (plan.sum_rows or -(-m // plan.block_m))
    sums = np.full((places, len(firsts), n), np.nan, DTYPES[acc])
    work = np.full(plan.workspace + 16, 0xFF, np.uint8)
    memory = [v.memory for v in (a, b, c, extra, out, kept)]
    waits = {"grid_wait": lambda: None, "grid_release": lambda: None}
    machine = Machine([*memory, sums, work], **waits)
    for launch in plan.launches:
        machine.run(
            launch, x=a.address, y=b.address, bias=c.address, extra=extra.address,
            out=out.address, pre=kept.address, sums=sums.ctypes.data,
            work=work.ctypes.data + -work.ctypes.data % 16,
        )  # fmt: skip
    left, right = (v.view.astype(np.float64) for v in (a, b))
    exact = left @ right + (c.view.astype(np.float64) if bias else 0)
    unit, stored = UNITS[acc], UNITS[dtype]
    bound = unit * (k + 4) * (abs(left) @ abs(right) + 4)
    other = extra.view.astype(np.float64)
    if pre:
        assert (abs(kept.view - exact) <= bound).all()
    if epilogue in ("residual", "summed"):
        exact, bound = exact + other, bound + unit * abs(other)
    elif slope:
        exact, bound = other, bound * 0  # f' of the identity
    rounded = bound + stored * 2 * abs(exact) + 2e-8 * (dtype == "float16")
    assert (abs(out.view.astype(np.float64) - exact) <= rounded).all()
    if summed:
        for r, ends in enumerate(itertools.pairwise([*firsts, m])):
            rows = slice(*ends)
            size = abs(exact[:, rows]).sum(1)
            error = abs(sums[:, r] - exact[:, rows].sum(1))
            assert (error <= (bound[:, rows].sum(1) + unit * (ends[1] - ends[0]) * size)).all()
    return a.view, b.view, out.view


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_two_products_is_one_launch(dtype, places, parts):
    """Guards: both terms are planes of it, each cut to the same parts; d_a of a gated layer."""
    acc = "float64" if dtype == "float64" else "float32"
    rng, (m, k, n) = np.random.default_rng(5), (37, 70, 21)
    factors = [
        Array(rng.standard_normal((places, *size)), dtype, lies)
        for size, lies in (((m, k), "rows"), ((k, n), "columns")) * 2
    ]
    a, b, a1, b1 = factors
    out = Array(np.full((places, m, n), np.nan), dtype)
    terms = {"x": a.operand, "y": b.operand, "x1": a1.operand, "y1": b1.operand}
    made = Product(m, n, k, places, out=out.operand, accumulator=acc, **terms)
    module = simt if dtype == "float32" else tensor_core
    tile = {"float64": WARPS, "float32": THREADS}.get(dtype, HALF_WARPS)
    part = tiling.round_up(-(-k // parts), tile.block_k)
    plan = module.plan(made, AMPERE, tile, part, parts)
    assert plan.parts == 2 * parts and len(plan.launches) == 2
    work = np.full(plan.workspace + 16, 0xFF, np.uint8)
    waits = {"grid_wait": lambda: None, "grid_release": lambda: None}
    machine = Machine([*(v.memory for v in (*factors, out)), work], **waits)
    at = {name: v.address for name, v in zip(terms, factors, strict=True)}
    for launch in plan.launches:
        machine.run(launch, **at, out=out.address, work=work.ctypes.data + -work.ctypes.data % 16)
    x, y, x1, y1 = (v.view.astype(np.float64) for v in factors)
    exact, size = x @ y + x1 @ y1, abs(x) @ abs(y) + abs(x1) @ abs(y1)
    bound = (
        UNITS[acc] * (k + 4) * size + 2 * UNITS[dtype] * abs(exact) + 3e-8 * (dtype == "float16")
    )
    assert (abs(out.view.astype(np.float64) - exact) <= bound).all()


LAYOUTS = [("rows", "rows"), ("rows", "columns"), ("columns", "rows"), ("columns", "columns")]


@pytest.mark.parametrize(("x", "y"), LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_every_layout_by_16_bytes(dtype, x, y):
    tile = {"float64": WARPS, "float32": THREADS}.get(dtype, HALF_WARPS)
    check(dtype, tile, 40, 48, 24, x=x, y=y, pre=x == "rows")


@pytest.mark.parametrize(("x", "y"), LAYOUTS)
def test_a_float32_product_in_every_layout_by_8_bytes(x, y):
    operand = Operand("float32", (0, 42, 1), 8)
    assert [simt.fetch(operand, own, 64, THREADS).values for own in (1, 2)] == [2, 2]
    check("float32", THREADS, 38, 42, 22, x=x, y=y, epilogue="summed")


@pytest.mark.parametrize(("x", "y"), [*LAYOUTS, ("strided", "reversed")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_lengths_and_alignments_are_masked(dtype, x, y):
    tile = {"float64": WARPS, "float32": THREADS}.get(dtype, HALF_WARPS)
    check(dtype, tile, 37, 35, 21, x=x, y=y, offset=1, epilogue="slope")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_fetches_every_layout(dtype):
    """Any product may be given to any of its tiles, by its sizes alone."""
    tables = {
        "float32": block_tiling.CORE_BLOCKS,
        "float64": block_tiling.DOUBLE_BLOCKS + block_tiling.DOUBLE_LONG + few_tiling.DOUBLE_FEW,
    }
    halves = block_tiling.HALF_BLOCKS + block_tiling.HALF_BLOCKS_HELD
    module = simt if dtype == "float32" else tensor_core
    acc = "float64" if dtype == "float64" else "float32"
    for tile in tables.get(dtype, halves):
        for x, y in itertools.product([(64, 1), (1, 128)], repeat=2):
            for alignment in (16, 8, DTYPES[dtype].itemsize):
                a, b = (Operand(dtype, (0, *steps), alignment) for steps in (x, y))
                held = alignment < 4
                if dtype in tables or held == (tile in block_tiling.HALF_BLOCKS_HELD):
                    out = Operand(dtype, (0, 64, 1), alignment)
                    made = Product(128, 64, 64, 1, a, b, out, acc)
                    module.plan(made, HOPPER, tile, 64, 1)


@pytest.mark.parametrize(
    ("dtype", "cluster", "sizes", "options"),
    [
        ("float64", 3, (18, 34, 40), {"epilogue": "slope", "x": "columns"}),
        ("float64", 2, (21, 35, 18), {"y": "columns", "offset": 1, "pre": True, "places": 2}),
        ("float32", 3, (40, 20, 19), {"epilogue": "residual"}),
        ("float32", 2, (21, 35, 10), {"epilogue": "slope", "offset": 1}),
        ("bfloat16", 2, (18, 40, 40), {"epilogue": "residual", "pre": True}),
    ],
)
def test_the_blocks_of_a_cluster_share_a_sum_over_k(dtype, cluster, sizes, options):
    tile = {"float64": WARPS, "float32": THREADS}.get(dtype, HALF_WARPS)
    check(dtype, tile, *sizes, cluster=cluster, **options)


def test_few_rows_of_float64_are_shared_by_clusters_where_these_fit():
    def launches(m, info, **features):
        made = Product(
            m, 4096, 4096, 1, Operand("float64", (0, 4096, 1), 16),
            Operand("float64", (0, 4096, 1), 16), Operand("float64", (0, 4096, 1), 16), "float64",
            **features,
        )  # fmt: skip
        return tensor_core.TENSOR_CORES.take(made, info).launches[0]

    for m in (9, 32, 64):
        launch = launches(m, HOPPER)
        assert (launch.cluster, launch.grid) == (2, (128, 1, 1))  # one for each multiprocessor
    assert launches(65, HOPPER).cluster == launches(64, AMPERE).cluster == 1
    small = replace(HOPPER, capability=(12, 0), shared_per_block=99 << 10)
    assert launches(64, small).cluster == 1 and launches(64, small).shared_bytes <= 99 << 10
    assert launches(16, small).cluster == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_copied_in_pairs_where_strides_are_even(dtype):
    check(dtype, HALF_WARPS, 34, 38, 42, y="columns", epilogue="residual")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_parts_of_a_long_sum_are_joined(dtype):
    tile = {"float64": WARPS, "float32": THREADS}.get(dtype, HALF_WARPS)
    check(dtype, tile, 20, 24, 150, x="columns", parts=3, places=2, bias=False)


@pytest.mark.parametrize(
    ("dtype", "sizes", "options"),
    [
        # by 16 bytes, and value by value; of one place, and of several
        ("float32", (20, 24, 150), {"epilogue": "summed", "pre": True}),
        ("float64", (9, 33, 70), {"epilogue": "slope", "bias": False, "places": 2}),
        ("float16", (13, 35, 70), {"epilogue": "summed", "places": 2, "pre": True}),
    ],
)
def test_a_sum_over_k_that_is_cut_ends_in_its_epilogue(dtype, sizes, options):
    """Guards: what a product ends in comes behind the join of its parts (docs/numerics.md)."""
    tile = {"float64": WARPS, "float32": THREADS}.get(dtype, HALF_WARPS)
    check(dtype, tile, *sizes, parts=3, **options)


def test_few_rows_are_cut_along_k_where_columns_are_few(monkeypatch):
    monkeypatch.setattr(few_tiling, "THIN_SLICE", 8192)
    monkeypatch.setattr(few_tiling, "THIN_STAGES", 3)
    check("float32", None, 3, 36, 150, parts=3, places=2, epilogue="summed", pre=True)


@pytest.fixture
def short_chains(monkeypatch):
    """Chains of sums of 64 values of K, for sums of a few hundred."""
    monkeypatch.setattr(tiling, "CHAIN", 64)
    for name in ("ONE_CHAIN", "SHORT_CHAIN"):
        monkeypatch.setattr(tiling, name, {"float32": 64, "float64": 64})


@pytest.mark.parametrize("k", [64, 65, 201])
def test_a_sum_is_made_of_chains_that_are_the_same_in_every_tile(k, short_chains):
    """To the bit, wherever the sum of chains waits."""
    results = []
    for depth, kept in ((16, "registers"), (32, "shared")):
        tile = CudaBlock(32, 16, depth, 4, 4, 3, 1, kept=kept)
        a, b, out = check("float32", tile, 3, 4, k, bias=False)
        results.append(out[0])
    length = {64: 64, 65: 64, 201: 64}[k]
    total = np.zeros((3, 4), np.float32)
    for first in range(0, k, length):
        chain = np.zeros((3, 4), np.float32)
        for i in range(first, min(first + length, k)):
            product = a[0, :, i : i + 1].astype(np.float64) * b[0, i : i + 1]
            chain = (product + chain).astype(np.float32)  # as a fused multiply-add
        total += chain
    for result in results:
        np.testing.assert_array_equal(result, total)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_chains_of_a_sum_are_whole_slices_of_equal_lengths(dtype):
    for k in (1, 31, 255, 256, 257, 500, 512, 513, 768, 769, 1000, 7000, 100_000):
        for most in {tiling.ONE_CHAIN[dtype], tiling.SHORT_CHAIN[dtype]}:
            length, one = tiling.chain(k, most), k <= most
            ends = min(most, tiling.CHAIN)
            assert length % 32 == 0 and length <= (most if one else ends)
            count = -(-k // length)
            assert count == (1 if one else -(-k // ends)), k


def test_a_result_of_few_blocks_has_short_chains_in_float32():
    """Guards: an error of more than twice cuBLAS's, which cuts such sums into parts."""
    assert tiling.one_chain("float32", 12, 216, False) == tiling.SHORT_CHAIN["float32"]
    assert tiling.one_chain("float32", 640, 448, False) == tiling.ONE_CHAIN["float32"]
    x, y, out = (Operand("float32", (0, c, 1), 16) for c in (247, 216, 216))
    made = Product(12, 216, 247, 1, x, y, out, "float32", whole=True)
    launch = simt.CORES.take(made, HOPPER).launches[-1]
    at = arguments(blocks.block_product).index("chain")
    assert launch.arguments[at] == 128


def test_a_d_b_of_few_blocks_has_short_chains_in_float64():
    """Guards: an error of twice cuBLAS's, which cuts such sums into parts (docs/cuda.md)."""
    assert tiling.one_chain("float64", 60, 223, True) == tiling.CHAIN
    assert tiling.one_chain("float64", 60, 223, False) == tiling.ONE_CHAIN["float64"]
    assert tiling.one_chain("float64", 640, 448, True) == tiling.ONE_CHAIN["float64"]

    def chains(rows):
        steps = [Operand("float64", (0, columns, 1), 16) for columns in (1, 223, 223)]
        x = Operand("float64", (0, 1, 60), 16)
        made = Product(60, 223, rows, 1, x, *steps[1:], "float64", free=True)
        (launch,) = tensor_core.TENSOR_CORES.take(made, HOPPER).launches
        at = arguments(blocks.block_product).index("chain")
        return -(-rows // launch.arguments[at])

    assert [chains(rows) for rows in (256, 353)] == [1, 2]


def test_a_block_that_is_alone_has_more_slices_on_their_way():
    """Guards: one round of float64 blocks does not wait for memory (docs/cuda.md)."""

    def taken(m, k, n, info=HOPPER):
        x, y, out = (Operand("float64", (0, c, 1), 16) for c in (k, n, n))
        made = Product(m, n, k, 1, x, y, out, "float64", whole=True)
        plan = tensor_core.TENSOR_CORES.take(made, info)
        assert plan.launches[0].shared_bytes <= info.shared_per_block
        return plan.tiling

    assert taken(256, 768, 1600).stages == 6
    assert taken(128, 1000, 1600).stages == 8
    assert taken(512, 512, 512).stages == 8
    # not where blocks share a multiprocessor, nor where it has no room for them
    assert taken(784, 1664, 2816).resident > 1
    small = replace(HOPPER, shared_per_block=99 << 10, shared_per_multiprocessor=100 << 10)
    assert taken(256, 768, 1600, small).stages < 6


@pytest.mark.parametrize(
    ("dtype", "kept", "k", "options"),
    [
        ("float64", "shared", 131, {}), ("float64", "registers", 131, {"x": "columns"}),
        ("float32", "shared", 300, {"cluster": 2}),
        ("float32", "shared", 230, {"parts": 2, "x": "columns", "bias": False}),
    ],
)  # fmt: skip
def test_long_sums_of_chains(dtype, kept, k, options, short_chains):
    tile = CudaBlock(32, 16, 32, 4, 4, 3, 1) if dtype == "float32" else WARPS
    check(dtype, replace(tile, kept=kept), 5, 8, k, **options)


@pytest.mark.parametrize(("dtype", "m"), [("float64", 2), ("float32", 18)])
def test_few_rows_of_long_sums(dtype, m, short_chains, monkeypatch):
    monkeypatch.setattr(few_tiling, "THIN_SLICE", 8192 if m == 2 else 4096)
    monkeypatch.setattr(few_tiling, "THIN_STAGES", 3 if m == 2 else 6)
    monkeypatch.setattr(few_tiling, "THIN_CHAIN", 16)  # of each warp's share
    check(dtype, None, m, 20, 400, epilogue="residual")


@pytest.mark.parametrize(("y", "offset"), [("rows", 0), ("columns", 0), ("rows", 1)])
def test_columns_by_a_launch_of_their_own_have_the_same_bits(y, offset):
    options = {"y": y, "offset": offset, "places": 2, "pre": True, "epilogue": "residual"}
    rest = ((CudaBlock(32, 32, 16, 4, 4, 3, 1), 64),)
    *_, apart = check("float32", THREADS, 35, 84, 24, rest=rest, **options)
    *_, whole = check("float32", THREADS, 35, 84, 24, **options)
    np.testing.assert_array_equal(apart, whole)
    # with column sums, of which both launches have the same rows of blocks
    options |= {"pre": False, "epilogue": "summed", "info": AMPERE if offset else HOPPER}
    rest = ((CudaBlock(64, 32, 32, 4, 4, 3, 1), 64),)
    *_, apart = check("float32", THREADS, 70, 84, 24, rest=rest, **options)
    *_, whole = check("float32", THREADS, 70, 84, 24, **options)
    np.testing.assert_array_equal(apart, whole)


def test_a_few_columns_beyond_whole_blocks_are_a_launch_of_their_own():
    """Guards: blocks of which most lies outside of the result cost no round (docs/cuda.md)."""

    def grids(m, n, k, info=HOPPER, **features):
        steps = [Operand("float32", (0, columns, 1), 16) for columns in (k, n, n)]
        made = Product(m, n, k, 1, *steps, "float32", **features)
        launches = simt.CORES.take(made, info).launches
        return [x.grid[0] for x in launches if x.kernel.name.startswith("cores")]

    assert grids(4096, 784, 1024) == [64 * 6, 64]
    assert grids(4096, 768, 1024) == [64 * 6]
    # with column sums by blocks of as many rows
    assert grids(4096, 784, 1024, sums=True) == [64 * 6, 64]
    assert len(grids(784, 784, 4096, free=True)) == 1
    # one round of 128 x 128 where shared memory holds their sums
    assert grids(4096, 1024, 784) == [32 * 8]
    assert grids(4096, 1024, 784, AMPERE) != [32 * 8]


def test_few_blocks_behind_a_copy_are_spread_over_the_device():
    """Guards: of a launch that begins beside a copy no multiprocessor has three blocks and others
    none (docs/cuda.md)."""

    def shared(m, k, n):
        x, y = Operand("float32", (0, k, 1), 16), Operand("float32", (0, 1, k), 16)
        made = Product(m, n, k, 1, x, y, Operand("float32", (0, n, 1), 16), "float32", whole=True)
        tile = block_tiling.CORE_BLOCKS[0]
        copy, launch = simt.plan(made, HOPPER, tile, k, 1, copy=(False, True)).launches
        alone = simt.plan(made, HOPPER, tile, k, 1, copy=(False, False)).launches[0]
        assert copy.overlaps and launch.overlaps and not alone.overlaps
        return launch.shared_bytes, -(-launch.grid[0] // HOPPER.multiprocessors), tile.resident

    for n, most in ((1600, 1), (3200, 2), (4992, 3)):
        taken, together, _ = shared(577, 1664, n)
        assert together == most and taken <= HOPPER.shared_per_block
        room = HOPPER.shared_per_multiprocessor
        assert together * (taken + 1024) <= room < (together + 1) * (taken + 1024)
    taken, together, resident = shared(577, 1664, 6400)
    assert together > resident and resident * (taken + 1024) <= HOPPER.shared_per_multiprocessor


def test_parts_of_a_long_sum_fill_rounds():
    """Guards: d_b of (784, 1024) from 4096 rows takes two rounds on 132 multiprocessors."""
    tile, part, parts, _ = block_tiling.block(
        block_tiling.CORE_BLOCKS, 784, 1024, 4096, 1, True, 132
    )
    blocks = -(-784 // tile.block_m) * -(-1024 // tile.block_n) * parts
    assert part * parts >= 4096 > part * (parts - 1)
    assert 0.9 < blocks / (132 * tile.resident) % 1 or blocks % (132 * tile.resident) == 0


def test_places_and_padded_rows():
    check("float32", THREADS, 20, 68, 12, places=3, pad=4, epilogue="residual")
    check("float64", WARPS, 20, 36, 12, places=2, pad=2, epilogue="slope")


@pytest.mark.parametrize("chunk", [4, 16])
def test_float64_in_chunks_of_any_length(chunk):
    tile = CudaBlock(32, 32, 16, 32, 16, 3, 1, chunk)
    check("float64", tile, 24, 20, 20)
    check("float64", tile, 24, 20, 20, info=AMPERE)


@pytest.mark.parametrize(
    "tile", [CudaBlock(32, 64, 16, 4, 8, 2, 1), CudaBlock(64, 64, 16, 8, 8, 2, 1)]
)
def test_other_tiles_of_threads(tile):
    check("float32", tile, 40, 68, 28, epilogue="slope")


@pytest.mark.parametrize("values", [2, 4])
@pytest.mark.parametrize("tile", block_tiling.CORE_BLOCKS, ids=str)
def test_a_warp_turns_a_factor_in_one_turn_of_shared_memory(tile, values):
    """Guards: no two values that a warp writes together lie in one bank (docs/cuda.md)."""
    factor = Operand("float32", (0, 1 << 10, 1), 4 * values)
    found = simt.fetch(factor, 1, tile.block_m, tile)
    assert found.held and found.values == values
    places = [found.row(k) for k in range(found.depth)]
    assert sorted(places) == list(range(found.depth))
    for v in range(values):
        banks = set()
        for lane in range(32):
            along, own = lane % found.fast * values, lane // found.fast
            row = found.row(along + v)
            # where the kernel writes, and where it reads
            assert along * found.k_start + found.row(v) * found.offsets[1] == row * found.pitch * 4
            banks.add((row * found.pitch + own) % 32)
        assert len(banks) == 32


def test_a_factor_of_few_columns_is_turned_by_all_threads():
    check("float32", CudaBlock(64, 32, 32, 4, 4, 2, 1), 40, 32, 36, y="columns")


@pytest.mark.parametrize("y", ["rows", "columns"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m", [1, 9])
def test_few_rows(dtype, y, m, monkeypatch):
    monkeypatch.setattr(few_tiling, "THIN_SLICE", 8192)
    monkeypatch.setattr(few_tiling, "THIN_STAGES", 3)
    if m == 1:
        check(dtype, None, 1, 36, 200, y=y, places=2, epilogue="residual", bias=False)
    else:
        check(dtype, None, 9, 20, 40, y=y, x="strided", epilogue="slope", pre=True)


@pytest.mark.parametrize("y", ["rows", "columns"])
@pytest.mark.parametrize("m", [5, 16, 18, 32, 33, 64])
def test_more_rows_are_parts_of_several_columns(y, m, monkeypatch):
    monkeypatch.setattr(few_tiling, "THIN_SLICE", 4096)
    monkeypatch.setattr(few_tiling, "THIN_STAGES", 6)
    if m % 16:
        check("float32", None, m, 20, 40, y=y, x="strided", epilogue="slope", pre=True)
    else:
        check("float32", None, m, 36, 68, y=y, epilogue="residual")


@pytest.mark.parametrize("x", ["rows", "columns", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_sum_is_written_by_16_bytes_or_less(dtype, x, monkeypatch):
    monkeypatch.setattr(outer, "LEAST", 1)
    acc = "float64" if dtype == "float64" else "float32"
    rng = np.random.default_rng(3)
    for m, k, n in ((37, 3, 40), (5, 1, 516), (4, 2, 518), (3, 1, 517)):
        a = Array(rng.standard_normal((2, m, k)), dtype, x, offset=x == "strided")
        b = Array(rng.standard_normal((2, k, n)), dtype, "columns" if k == 2 else "rows", k == 1)
        out = Array(np.full((2, m, n), np.nan), dtype)
        made = Product(m, n, k, 2, a.operand, b.operand, out.operand, acc, free=True)
        (launch,) = outer.SHORT_K.take(made, AMPERE).launches
        Machine([v.memory for v in (a, b, out)]).run(
            launch, x=a.address, y=b.address, out=out.address
        )
        left, right = (v.view.astype(np.float64) for v in (a, b))
        bound = UNITS[acc] * k * (abs(left) @ abs(right)) + UNITS[dtype] * abs(left @ right)
        assert (abs(out.view.astype(np.float64) - left @ right) <= bound + 3e-8).all()
    # one row: where sums of other kernels have the same bits
    alone = [outer.SHORT_K.take(replace(made, free=False, m=1, k=k), AMPERE) for k in (1, 5)]
    assert [x is not None for x in alone] == [True, dtype == "float32"]
    layer = epilogue_of("activation", False)
    assert outer.SHORT_K.take(replace(made, m=1, free=False, epilogue=layer), AMPERE) is None


@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [
        (37, 35, 17, {"x": "columns", "offset": 1, "epilogue": "slope"}),
        (20, 21, 5, {"places": 2, "epilogue": "summed", "y": "columns"}),
        (140, 40, 8, {"epilogue": "summed", "bias": False}),
        (19, 131, 33, {"epilogue": "residual", "pre": True, "x": "strided"}),
        (300, 10, 3, {"pre": True, "y": "reversed"}),
        (70, 45, 12, {"pre": True, "y": "columns", "epilogue": "summed"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("busy", [1, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_sum_ends_in_any_epilogue(dtype, busy, m, n, k, options, monkeypatch):
    """Guards: by columns of a thread that are neighbours, or far apart where blocks are enough."""
    monkeypatch.setattr(outer, "ODD", dict.fromkeys(outer.ODD, 40))
    monkeypatch.setattr(outer, "LEAST", 1)
    for name in ("BUSY", "BUSY_APART"):
        monkeypatch.setattr(outer, name, busy / 1000)
    seen = []

    def taken(product, info, parts):
        plan = outer.take(product, info)
        seen.append(plan.tiling.apart)
        return plan

    check(dtype, taken, m, n, k, **options)
    factors = 2 * next(d for d in outer.DEPTHS if d >= k) * (8 if dtype == "float64" else 4)
    enough = busy == 1 and k > outer.SHORT and factors <= outer.FACTORS
    assert seen == [enough and n % 2 == 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_k_and_its_kernel(dtype, monkeypatch):
    """Guards: a sum goes by one kernel, whatever is made of it; a new K is no new kernel."""
    acc = "float64" if dtype == "float64" else "float32"
    unit = 16 // DTYPES[dtype].itemsize

    def taken(m, n, k):
        lay = [Operand(dtype, (0, steps, 1), 16) for steps in (k, n, n)]
        plan = outer.take(Product(m, n, k, 1, *lay, acc), HOPPER)
        return plan and plan.launches[0].kernel

    assert taken(4096, 256, 8) and taken(4096, 257, outer.ODD[dtype])
    assert not taken(4096, 16 * unit, 9)  # tiles write whole accesses as fast
    assert not taken(4096, 257, outer.ODD[dtype] + 1)
    assert not taken(40, 30, 8) and not taken(outer.FEW, (1 << 20) + 1, 9)
    if outer.ODD[dtype] > outer.SHORT:
        assert taken(4096, 257, 17) is taken(4096, 257, 19)


@pytest.mark.parametrize("shape", [(70, 37), (72, 68)])
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("tf32", [False, True])
def test_a_factor_is_laid_out_for_access_by_16_bytes(layout, inner, shape, tf32):
    rng = np.random.default_rng(0)
    source = Array(rng.standard_normal((2, *shape)), "float32", layout, offset=shape[1] % 2)
    slots = Slot("x"), Slot("work")
    launch, made, size = layouts.laid_out(source.operand, shape, 2, inner, *slots, tf32)
    work = np.full(size // 4, np.nan, np.float32)

    def rounded(x):  # cvt.rna: to 10 bits of fraction, halves away from zero
        return ((np.float32(x).view(np.uint32) + 0x1000) & 0xFFFFE000).astype("u4").view("f4")

    waits = {"grid_wait": lambda: None, "grid_release": lambda: None}
    machine = Machine([source.memory, work], round_tf32=rounded, **waits)
    machine.run(launch, x=source.address, work=work.ctypes.data)
    steps = tuple(4 * step for step in made.strides)
    expected = np.vectorize(rounded, otypes="f")(source.view) if tf32 else source.view
    assert (np.ndarray((2, *shape), np.float32, work, 0, steps) == expected).all()
    assert made.strides[inner] == 1 and all(s % 4 == 0 for s in made.strides if s != 1)


def test_a_copy_beside_another_one_waits_at_its_end():
    """Guards: it begins with the copy before it, and who reads both waits for the last alone."""
    source = Array(np.arange(2.0 * 70 * 37).reshape(2, 70, 37), "float32", offset=1)
    slots = Slot("x"), Slot("work")
    launch, made, size = layouts.laid_out(source.operand, (70, 37), 2, 2, *slots, overlaps=True)
    steps = tuple(4 * step for step in made.strides)
    for first, last, own in (
        ("wait", "release", launch), ("release", "wait", replace(launch, kernel=launch.beside())),
    ):  # fmt: skip
        work, calls = np.full(size // 4, np.nan, np.float32), []
        waits = {f"grid_{x}": lambda x=x, to=calls: to.append(x) for x in ("wait", "release")}
        Machine([source.memory, work], **waits).run(own, x=source.address, work=work.ctypes.data)
        assert (np.ndarray((2, 70, 37), np.float32, work, 0, steps) == source.view).all()
        assert calls[0] == first and calls[-1] == last
        assert calls.count("wait") == calls.count("release")


def test_a_float32_factor_is_copied_first_where_that_pays(monkeypatch):
    monkeypatch.setattr(copies, "pays", lambda *sizes: True)
    check("float32", THREADS, 37, 35, 21, offset=1, places=2, bias=False)
    check("float32", THREADS, 36, 40, 24, y="columns")


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_by_16_bytes(dtype, needs):
    size = 2 * 256 * 16 // DTYPES[dtype].itemsize + 13  # whole blocks, a part of one, single values
    acc = "float64" if dtype == "float64" else "float32"
    square = epilogues.gate(Curve("square", lambda n: (SYMBOL * SYMBOL, 2 * SYMBOL)[n]))
    rng = np.random.default_rng(size)
    a, b, grad = (rng.standard_normal(size + 8).astype(DTYPES[dtype])[:size] for _ in range(3))
    out, d_a, d_b = (np.full(size + 8, np.nan, DTYPES[dtype])[:size] for _ in range(3))
    machine = Machine([a, b, grad, out, d_a, d_b])
    at = {
        name: x.ctypes.data
        for name, x in dict(a=a, b=b, grad=grad, out=out, d_a=d_a, d_b=d_b).items()
    }
    names = [name for name, needed in zip(("d_a", "d_b"), needs, strict=True) if needed]
    for made, results in ((square, ["out"]), (square.backward(), names)):
        launch = pointwise.launch(
            HOPPER, made, acc, [pointwise.Source(x, x, dtype) for x in made.inputs],
            [pointwise.Result(x, x, dtype) for x in results], size, 16, False,
        )  # fmt: skip
        machine.run(launch, **at)
    x, y, g = (v.astype(np.float64) for v in (a, b, grad))
    results = ((True, out, x * x * y), (needs[0], d_a, g * y * 2 * x), (needs[1], d_b, g * x * x))
    for wanted, found, exact in results:
        if wanted:
            error = abs(found.astype(np.float64) - exact)
            assert (error <= 4 * UNITS[dtype] * abs(exact) + 6e-8 * (dtype == "float16")).all()
        else:
            assert np.isnan(found.astype(np.float64)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sums", [2, 1], ids=["float32 sums", "one of the result's dtype"])
def test_sums_of_two_dtypes_by_16_bytes(dtype, sums):
    """Guards: docs/cuda.md, a pass over arrays of two dtypes takes 16 bytes of each at a time."""
    size = 256 * 8 + 8 * 37 + 5  # a whole block, a part of one, single values
    rng = np.random.default_rng(size)
    a, b = (rng.standard_normal(size + 8).astype(np.float32)[:size] for _ in range(2))
    b = b if sums == 2 else b.astype(DTYPES[dtype])
    out = np.full(size + 8, np.nan, DTYPES[dtype])
    kinds = {"a": "float32", "b": "float32" if sums == 2 else dtype}
    names = ("a", "b")
    made = epilogues.Epilogue("sum", names, (), (("out", leaf("a") + leaf("b")),))
    launch = pointwise.launch(
        HOPPER, made, "float32", [pointwise.Source(x, x, kinds[x]) for x in names],
        [pointwise.Result("out", "out", dtype)], size, 16, False,
    )  # fmt: skip
    assert launch.grid[0] == -(-size // (256 * 8)), "eight values of a thread"
    machine = Machine([a, b, out])
    machine.run(launch, a=a.ctypes.data, b=b.ctypes.data, out=out.ctypes.data)
    assert (out[:size] == (a + b.astype(np.float32)).astype(DTYPES[dtype])).all()
    assert np.isnan(out[size:].astype(np.float64)).all()


@pytest.mark.parametrize("n", [48, 37], ids=["16 bytes", "values"])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_and_the_sums_of_their_columns(monkeypatch, dtype, summed, n):
    """Guards: a pass that ends within a chunk of rows, in every way that a thread goes down one."""
    monkeypatch.setattr(tiling, "PASS_FEW", 0)  # (of so few elements it goes value by value)
    m, acc = 21, "float64" if dtype == "float64" else "float32"
    rng = np.random.default_rng(n)
    grad = rng.standard_normal((m, n)).astype(DTYPES[dtype])
    pre = rng.standard_normal((m, n)).astype(acc)
    out = np.full((m + 1, n), np.nan, DTYPES[dtype])
    length = passes.chunk_of(m, n)
    sums = np.full((-(-m // length) + 1, n), np.nan, acc)
    square = Curve("square", lambda n: (SYMBOL * SYMBOL, 2 * SYMBOL)[n])
    made = epilogues.layer(square).select("out").backward().without("bias").select("d_z")
    operands = [
        Operand(kind, (0, n, 1), 16 if n == 48 else DTYPES[kind].itemsize) for kind in (acc, dtype)
    ]
    launch, rows = passes.slopes(
        HOPPER, made, acc, operands[0], operands[1], operands[1], m, n, 1, summed
    )
    machine = Machine([pre, grad, out, sums])
    at = {"pre": pre, "extra": grad, "out": out, "sums": sums}
    machine.run(launch, **{name: x.ctypes.data for name, x in at.items()})
    exact = grad.astype(acc) * (2 * pre)
    assert (out[:m] == exact.astype(DTYPES[dtype])).all()
    assert np.isnan(out[m:].astype(np.float64)).all()
    if not summed:
        assert np.isnan(sums).all()
        return
    assert rows == len(sums) - 1
    assert np.isnan(sums[rows:]).all()
    wanted = exact.astype(np.float64)
    for i in range(rows):
        part = wanted[i * length : (i + 1) * length]
        error = abs(sums[i] - part.sum(0))
        assert (error <= length * UNITS[acc] * abs(part).sum(0)).all()


def test_a_formula_without_operands_fills_a_result_by_16_bytes():
    size = 2 * 256 * 4 + 3
    out = np.full(size + 8, np.nan, np.float32)
    fill = epilogues.Epilogue("fill", (), (), (("out", constant(2)),))
    results = [pointwise.Result("out", "out", "float32")]
    launch = pointwise.launch(HOPPER, fill, "float32", [], results, size, 16, False)
    Machine([out]).run(launch, out=out.ctypes.data)
    assert (out[:size] == 2).all() and np.isnan(out[size:]).all()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # NumPy's, of a scalar
@pytest.mark.parametrize("way", ["columns", "rows", "values"])
@pytest.mark.parametrize("depth", [5, 600])
def test_a_join_is_rounded_once(depth, way):
    """Columns by many threads each, rows by 16 bytes, or value by value, in stages."""
    planes = np.random.default_rng(0).uniform(0, 1, (2, depth, 36)).astype(np.float32)
    planes[0, depth // 2, 3], planes[1, 3, 5] = np.inf, np.nan
    planes[1, :2, 7] = 3e38
    out = np.full((2, 36), np.nan, np.float32)
    stage = np.full(2000, np.nan, np.float32)
    target = Operand("float32", (36, 12, 1), 16)
    if way == "rows":
        launches = (joins.rows(HOPPER, "float32", Slot("work"), target, (2, depth, 3, 12)),)
    elif way == "columns":
        launches = (joins.columns("float32", Slot("work"), target, (2, depth, 1, 36)),)
    else:
        lengths = 2, depth, 3, 12
        made = joins.joins(HOPPER, "float32", Slot("work"), target, lengths, Slot("stage"))
        launches, staged = made
        assert len(launches) == (1 if depth == 5 else 2) and staged <= stage.nbytes
    machine = Machine([planes, out, stage])
    for launch in launches:
        machine.run(launch, work=planes.ctypes.data, out=out.ctypes.data, stage=stage.ctypes.data)
    exact = planes.astype(np.float64).sum(1)
    known = abs(exact) < 3e38
    most = len(launches) * 2.0**-24 * (1 + 1e-6)  # each stage rounds once
    assert (abs(out - exact)[known] <= most * exact[known]).all()
    assert out[0, 3] == np.inf and out[1, 7] == np.inf and np.isnan(out[1, 5])
    assert known.sum() == 72 - 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "layout"), [(7, "rows"), (8, "rows"), (8, "columns"), (1, "strided")]
)
def test_padded_planes_are_joined_to_a_result_of_any_strides(dtype, n, layout):
    pitch = tiling.round_up(n, 4)
    planes = np.random.default_rng(n).standard_normal((3, 2, 5, pitch)).astype(np.float32)
    planes[..., n:] = np.nan  # behind a row there may be anything
    out = Array(np.full((2, 5, n), np.nan), dtype, layout)
    steps = 5 * pitch, 10 * pitch, pitch
    lengths = 2, 3, 5, n
    launch = joins.rows(HOPPER, "float32", Slot("work"), out.operand, lengths, steps, overlaps=True)
    machine = Machine([planes, out.memory], grid_wait=lambda: None, grid_release=lambda: None)
    machine.run(launch, work=planes.ctypes.data, out=out.address)
    exact = planes.astype(np.float64).sum(0)[..., :n]
    assert (abs(out.view.astype(np.float64) - exact) <= UNITS[dtype] * 1.001 * abs(exact)).all()
