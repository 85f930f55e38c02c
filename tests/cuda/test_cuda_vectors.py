"""Products of few rows and few columns, run by `cuda_machine`.

Guards: whatever the layout, alignment, length of K and number of vectors is, each sum has every
term once and is finished at its place; a sum has the same bits by accesses of 16 bytes and of less.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse import epilogues

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

try:
    from cuda_devices import ADA, HOPPER, TURING
    from cuda_machine import Machine
    from test_cuda_blocks import DTYPES, check

    from numfuse.backends.cuda import few_tiling, tiling
    from numfuse.backends.cuda.kernels.ampere import vectors, vectors_tiling
    from numfuse.backends.cuda.plan import tiers
    from numfuse.backends.cuda.plan.product import Operand, Product
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

LAYOUTS = ["rows", "columns", "strided", "reversed"]


@pytest.fixture
def few_threads(monkeypatch):
    """Blocks of two warps, as each thread is one of Python's; sums of as few sharers are joined."""
    monkeypatch.setattr(vectors_tiling, "THREADS", 64)
    monkeypatch.setattr(vectors, "JOINED", 4)
    monkeypatch.setattr(vectors_tiling, "SLICE", 64)
    monkeypatch.setattr(vectors_tiling, "ACROSS_LEAST", 8)


@pytest.mark.long
@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [
        (1, 40, 100, {"y": "", "epilogue": "residual", "pre": True}),
        (3, 21, 37, {"y": "", "offset": 1, "epilogue": "slope"}),
        (70, 1, 24, {"x": "", "epilogue": "slope"}),
        (45, 7, 33, {"x": "", "offset": 1, "places": 2, "epilogue": "summed", "bias": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("early", [0, vectors.EARLY])
def test_few_vectors_in_every_layout(dtype, layout, early, m, n, k, options, monkeypatch):
    """Guards: also where blocks are many, which ask for their lines after the vectors."""
    monkeypatch.setattr(vectors, "EARLY", early)
    options = {name: value or layout for name, value in options.items() if value is not False}
    options.setdefault("bias", m != 45)
    check(dtype, vectors.plan, m, n, k, **options)


@pytest.mark.long
@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize(
    ("dtype", "m", "n", "k", "options"),
    [
        ("float32", 2, 4, 300, {"parts": 3, "y": "columns", "epilogue": "summed"}),
        ("float64", 30, 3, 200, {"parts": 2, "x": "columns", "pre": True}),
        ("bfloat16", 5, 9, 130, {"parts": 2, "places": 2, "epilogue": "residual"}),
    ],
)
def test_few_vectors_whose_sum_is_cut(dtype, m, n, k, options):
    check(dtype, vectors.plan, m, n, k, **options)


@pytest.mark.long
@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_the_accesses_do_not_decide_on_the_order_of_a_sum(dtype, layout, monkeypatch):
    """To the bit: the same values at an address of 16 bytes, and at one of a value's size."""
    monkeypatch.setattr(tiling, "CHAIN", 4)
    found = [check(dtype, vectors.plan, 24, 2, 80, x=layout, offset=offset)[2] for offset in (0, 1)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("side", range(1, vectors_tiling.SIDE + 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_all_sizes(dtype, side):
    """Guards: what is bound to a kernel fits: whole slices, shared memory of any GPU, the lines."""
    acc = "float64" if dtype == "float64" else "float32"
    for lines, k in ((1, 1), (5, 53026), (160, 1536), (1670, 17574), (17574, 1670), (1 << 20, 3)):
        for turned in (False, True):
            steps = (1, lines) if turned else (k, 1)
            x = Operand(dtype, (0, *steps), 16)
            y, out = Operand(dtype, (0, side, 1), 16), Operand(dtype, (0, side, 1), 16)
            p = Product(lines, side, k, 1, x, y, out, acc)
            block = vectors_tiling.block_of(p, vectors_tiling.Long.of(p), 132)
            assert (
                block.depth % block.unit == 0 and block.unit % block.width == 0
            ) or not block.along
            assert block.shared_bytes(False) <= 40 << 10
            assert block.shared_bytes(True) <= 99 << 10
            assert block.groups * block.sharers == vectors_tiling.THREADS
            assert block.own * block.side <= 32


def products(dtype, m, k, n, x=None, y=None, **features):
    acc = "float64" if dtype == "float64" else "float32"
    x, y = x or (k, 1), y or (n, 1)
    lay = [Operand(dtype, (0, *steps), 16) for steps in (x, y, (n, 1))]
    return Product(m, n, k, 1, *lay, acc, **features)


def tier_of(*given, info=HOPPER, **features):
    return tiers.choose(products(*given, **features), info)[0].name


def test_few_rows_and_columns_are_taken_where_no_better_kernel_is():
    """Guards: no product of a matrix and few vectors goes by tiles (issue of the sweep)."""
    assert tier_of("float32", 17574, 1670, 1) == "vectors along K"
    assert tier_of("float32", 1, 2606, 12466, y=(1, 2606)) == "vectors along K"
    assert tier_of("float32", 1370, 12051, 7) == "vectors along K"
    assert tier_of("float32", 4, 1536, 160, y=(1, 1536)) == "vectors along K"
    assert tier_of("float16", 3385, 28, 1) == "vectors along K"
    assert tier_of("bfloat16", 3, 69, 18538) == "vectors across K"
    # d_b of one column, a sum over the rows of a
    assert tier_of("float32", 1670, 17574, 1, x=(1, 1670), free=True) == "vectors across K"
    # a ring of slices; wgmma; tiles
    assert tier_of("float32", 1, 4096, 4096) == "cores"
    assert tier_of("bfloat16", 8, 4096, 4096) == "wgmma"
    assert tier_of("bfloat16", 8, 4096, 4096, info=ADA) == "vectors across K"
    assert tier_of("float32", 9, 100, 9) == "cores"
    assert tier_of("float32", 17574, 1670, 1, info=TURING) == "mirror"


def test_a_long_factor_of_many_vectors_goes_by_tiles():
    """Guards: docs/cuda.md, tensor cores take it in less time, and a gate in one launch."""

    def tier_of(m, k, n, dtype, places=1):
        acc = "float64" if dtype == "float64" else "float32"
        x, y = Operand(dtype, (m * k, k, 1), 16), Operand(dtype, (0, 1, k), 16)
        out = Operand(dtype, (m * n, n, 1), 16)
        return tiers.choose(Product(m, n, k, places, x, y, out, acc), HOPPER)[0].name

    assert tier_of(3862, 2586, 5, "float64") == "tensor cores"
    assert (
        tier_of(3862, 2586, 4, "float64") == tier_of(300, 2586, 5, "float64") == "vectors along K"
    )
    assert tier_of(7729, 781, 4, "bfloat16") == "wgmma"
    assert tier_of(7729, 781, 2, "bfloat16") == tier_of(7729, 782, 4, "bfloat16")
    # (the sizes of one place decide)
    assert tier_of(300, 2586, 5, "float64", 40) == tier_of(7729, 782, 4, "bfloat16")


def test_k_is_cut_where_lines_are_few():
    parts = few_tiling.vector_parts
    assert parts(200, 1 << 26, 16, 100, 132) == 1
    assert parts(1, 1 << 26, 16, 100, 132) == 100 and parts(4, 1 << 28, 16, 1000, 132) == 66
    # not for what takes less than a launch, which is more by accesses of two bytes
    assert parts(20, 1 << 20, 16, 100, 132) == 1 and parts(3, 1 << 19, 2, 100, 132) == 100
    whole = products("float32", 1670, 1 << 20, 1, whole=True)
    assert tiers.choose(whole, HOPPER)[1].parts == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_one_term_is_written_as_fast_as_memory_takes_it(dtype):
    """Guards: d_a of one column, whose epilogue is none, goes by whole accesses of its rows."""
    acc = "float64" if dtype == "float64" else "float32"
    values = 16 // DTYPES[acc].itemsize
    assert tier_of(dtype, 4096, 1, 1024) == "cores"
    shown = str(tiers.choose(products(dtype, 4096, 1, 1024), HOPPER)[1].tiling)
    assert f"rows of {values} columns a thread, K up to 1" in shown
    # (of few rows or columns a sum of several terms has its bits in one kernel alone)
    for m, taken in ((4096, True), (8, dtype == "float32")):
        several = str(tiers.choose(products(dtype, m, 5, 16384), HOPPER)[1].tiling)
        assert ("K up to 5" in several) == taken


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize(("m", "n"), [(100, 3), (3, 100)])
def test_a_bias_is_asked_for_once_by_a_block(m, n):
    """Guards: all elements of all blocks asked one slice of a cache, four times as long."""
    a, b, c = (np.ones(s, np.float32) for s in ((m, 20), (20, n), (1, n)))
    out = np.full((m, n), np.nan, np.float32)
    lies = [Operand("float32", (0, x.shape[1], 1), 16) for x in (a, b, out)]
    bias, end = Operand("float32", (0, 0, 1), 16), epilogues.layer(nf.activations()["relu"].curve)
    given = Product(m, n, 20, 1, *lies, "float32", epilogue=end.select("out"), bias=bias)
    (launch,) = vectors.plan(given, HOPPER).launches
    machine = Machine([a, b, c, out])
    slots = zip(("x", "y", "bias", "out"), (a, b, c, out), strict=True)
    machine.run(launch, **{name: array.ctypes.data for name, array in slots})
    np.testing.assert_array_equal(out, 21)
    asked = [x for x in machine.asked if c.ctypes.data <= x < c.ctypes.data + c.nbytes]
    blocks = launch.grid[0]
    assert blocks > 1 and len(asked) == (n * blocks if m > n else n)


def test_lines_that_fill_a_device_are_shared_by_few():
    """Guards: docs/cuda.md, a short line's threads do more beside its loads than these take."""

    def block(dtype, lines, k, n, places=1):
        x = Operand(dtype, (lines * k, k, 1), 4)
        y, out = Operand(dtype, (0, 1, k), 4), Operand(dtype, (lines * n, n, 1), 2)
        p = Product(lines, n, k, places, x, y, out, "float32")
        return vectors_tiling.block_of(p, vectors_tiling.Long.of(p), 132)

    assert block("bfloat16", 18345, 26, 3, 20).sharers == vectors_tiling.SHARERS
    assert block("bfloat16", 1834, 26, 3).sharers == 4  # of which no device is full


def test_few_lines_across_k_are_spread_over_more_blocks():
    """Guards: docs/cuda.md, 4 x 5 x 2745 in bfloat16 waits for its own end."""

    def block(m, k, n):
        p = products("bfloat16", m, k, n)
        return vectors_tiling.block_of(p, vectors_tiling.Long.of(p), 132)

    small, long = block(4, 5, 2745), block(3, 3285, 4441)
    assert (small.sharers, small.own) == (8, 1) and long.own == 8
    assert (block(3, 82, 54).sharers, block(3, 82, 54).own) == (32, 1)
