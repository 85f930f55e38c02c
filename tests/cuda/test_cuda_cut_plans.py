"""Into how many parts a sum over K is cut: a function of sizes, dtypes and the device alone.

Guards: "The same bits" of docs/numerics.md on CUDA, and that few blocks do not leave a device idle.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse import epilogues
from numfuse.language.curves import leaf

try:
    from cuda_devices import AMPERE, HOPPER, TURING

    from numfuse.backends.cuda import block_tiling, few_tiling, tiling
    from numfuse.backends.cuda.kernels.hopper import tiling as hopper
    from numfuse.backends.cuda.plan import tiers
    from numfuse.backends.cuda.plan.product import Operand, Product
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

LAYER = epilogues.layer(nf.activations()["gelu"].curve)
#: M, K, N, dtype, device, tier: few blocks of a long sum.
CUT = [
    (300, 7000, 100, "float32", HOPPER, "cores"),
    (300, 7000, 100, "float64", HOPPER, "tensor cores"),
    (100, 2000, 1000, "float64", HOPPER, "tensor cores"),
    (304, 7000, 104, "bfloat16", HOPPER, "wgmma"),
    (304, 7000, 104, "float16", AMPERE, "tensor cores"),
    (16, 65536, 512, "float32", HOPPER, "cores"),
    (4, 65536, 512, "float64", AMPERE, "cores"),
    (300, 7000, 100, "float32", TURING, "mirror"),
    (300, 7000, 100, "bfloat16", TURING, "mirror"),
]


def product(m, k, n, dtype, places=1, **features):
    acc = "float64" if dtype == "float64" else "float32"
    lines = ((m, k), (k, n), (m, n))
    x, y, out = (Operand(dtype, (r * c, c, 1), 16) for r, c in lines)
    return Product(m, n, k, places, x, y, out, acc, **features)


def plan(made, info):
    tier, found = tiers.choose(made, info)
    return tier.name, found


def layer(made, *results, slope=False):
    """A product that ends in a layer, or in its slope with column sums."""
    bias = Operand(made.x.dtype, (0, 0, 1), 16)
    pre = replace(made.out, dtype=made.accumulator) if "pre" in results else None
    whole = LAYER.select("out", *results)
    if slope:
        made = replace(made, extra=made.out, sums=True)
        whole = whole.backward().guarded().select("d_z")
    return replace(made, epilogue=whole, bias=bias, pre=pre)


@pytest.mark.parametrize("case", CUT, ids=str)
def test_a_long_sum_of_few_blocks_is_cut_whatever_it_ends_in(case):
    *sizes, dtype, info, tier = case
    bare = product(*sizes, dtype)
    name, found = plan(bare, info)
    assert name == tier and found.parts > 1 and f"K in {found.parts} parts" in str(found.tiling)
    for made in (layer(bare), layer(bare, "pre"), layer(bare, slope=True)):
        name, other = plan(made, info)
        # a sum has the same bits whatever is made of it
        assert (name, other.parts) == (tier, found.parts)
        *before, finish = other.launches
        assert finish.kernel.name.startswith("finish") and before
        assert other.block_m == tiling.RUN or not made.sums
        m, _, n = sizes
        assert other.workspace >= found.parts * m * n * (8 if dtype == "float64" else 4)
        # the parts alone, before any epilogue
        assert all("sums" not in x.table and "bias" not in x.table for x in before)
    assert plan(replace(bare, whole=True), info)[1].parts == 1


@pytest.mark.parametrize("case", CUT, ids=str)
def test_many_blocks_and_short_sums_are_in_one_piece(case):
    m, k, n, dtype, info, _ = case
    assert plan(product(m, k, n, dtype, places=4096), info)[1].parts == 1
    assert plan(product(4096, k, 4096, dtype), info)[1].parts == 1
    assert plan(product(m, 200, n, dtype), info)[1].parts == 1


@pytest.mark.parametrize("name", ["CORE_BLOCKS", "DOUBLE_LONG", "HALF_BLOCKS"])
def test_parts_cover_the_sum_once_in_whole_slices(name):
    tiles = getattr(block_tiling, name)
    for multiprocessors in (1, 20, 132, 1000):
        for m, n, k in ((1, 1, 600), (300, 100, 7000), (33, 65, 1025), (64, 4096, 4097)):
            tile, part, parts, work = block_tiling.block(tiles, m, n, k, 1, False, multiprocessors)
            assert part * (parts - 1) < k <= part * parts and work > 0
            assert parts == 1 or (part % tile.block_k == 0 and part >= block_tiling.CUT_PART - 32)
            again = block_tiling.block(tiles, m, n, k, 1, False, multiprocessors)
            assert again == (tile, part, parts, work)
    assert block_tiling.block(tiles, 300, 100, 7000, 1, False, 1)[2] == 1
    assert block_tiling.block(tiles, 300, 100, 7000, 1, False, 132)[2] > 4


def test_a_batch_of_sums_over_rows_has_the_parts_of_one_and_a_tile_of_all():
    """Guards: an element of a batch gives what it gives alone, and 16 fill larger tiles."""
    for sizes in ((257, 130, 777), (512, 512, 9000), (64, 64, 100_000)):
        how = block_tiling.CORE_BLOCKS, *sizes
        one, many = (block_tiling.block(*how, places, True, 132) for places in (1, 16))
        assert many[1:3] == one[1:3] and (many[2] == 1 or many[1] % many[0].block_k == 0)
        area = [t.block_m * t.block_n for t in (one[0], many[0])]
        assert area[1] >= area[0]
    assert (
        block_tiling.block(*how[:1], 257, 130, 777, 16, True, 132)[0] != block_tiling.CORE_BLOCKS[4]
    )


def test_what_memory_limits_is_not_cut():
    """Guards: rows through a weight take the time of reading that, and of no launch more."""
    for m in (1, 8, 16, 64):
        assert plan(product(m, 4096, 4096, "bfloat16"), HOPPER)[1].parts == 1
        # (64 rows of float32 are limited by arithmetic)
        assert m == 64 or plan(product(m, 4096, 4096, "float32"), HOPPER)[1].parts == 1
    assert (
        few_tiling.thin_parts(128, 1, 65536, 4, 132)
        == 1
        == few_tiling.thin_parts(96, 1, 65536, 4, 132)
    )
    assert few_tiling.thin_parts(16, 64, 7000, 4, 132) > 2
    nbytes = 2 * (16 * 4096 + 4096 * 4096 + 16 * 4096)
    assert hopper.hopper_cut(16, 4096, 64, 1, 132, 0, hopper.Lies(), nbytes) is None
    assert hopper.hopper_cut(16, 4096, 64, 1, 132, 0, hopper.Lies(), 0) is not None


def test_a_sum_that_is_cut_alone_is_not_made_beside_another_one():
    single = product(304, 7000, 104, "bfloat16")
    both = epilogues.Epilogue(
        "sums", ("z", "z1"), (), (("out", leaf("z")), ("pre", leaf("z1")))
    )  # fmt: skip
    pair = replace(single, y1=single.y, pre=single.out, epilogue=both)
    assert tiers.choose(single, HOPPER)[1].parts > 1
    assert tiers.choose(pair, HOPPER) is None
    assert tiers.choose(replace(pair, whole=True), HOPPER)[1].parts == 1
    sizes = {"few blocks": (304, 104, 7000, 1), "both fill it": (64, 4096, 8192, 1)}
    stay = {x: tiers.stay_whole("bfloat16", HOPPER, "ieee", *size) for x, size in sizes.items()}
    assert stay == {"few blocks": False, "both fill it": True}
    assert not tiers.stay_whole("float32", HOPPER, "ieee", 304, 104, 7000, 1)


@pytest.mark.parametrize("precision", ["tf32", "bf16x3", "bf16x6"])
def test_what_tensor_cores_would_not_speed_up_goes_as_ieee_does(precision):
    """Guards: a float32 product too small or thin to be split goes the way of an exact one."""
    sizes = [(300, 700, 100), (2048, 50, 768), (106496, 512, 1), (1, 4096, 4096), (64, 8, 64)]
    for made in (product(*x, "float32") for x in sizes):
        exact, asked = made, replace(made, precision=precision)
        for info in (HOPPER, AMPERE, TURING):
            (tier, found), (own, wanted) = (tiers.choose(x, info) for x in (asked, exact))
            assert tier is own and found.launches == wanted.launches
            assert tiers.name_of(asked, info) == tiers.name_of(exact, info)
            names = [[name for name, *_ in tiers.ways(x, info)] for x in (asked, exact)]
            assert names[0] == names[1]
    large = product(4096, 4096, 4096, "float32", precision=precision)
    assert plan(large, HOPPER)[0] == "wgmma" and plan(large, AMPERE)[0] == "cores"


def test_clusters_of_few_rows_fill_the_device_once():
    """Guards: docs/cuda.md, of more than two blocks they leave multiprocessors idle."""

    def parts(m, n, k):
        found = few_tiling.few(few_tiling.DOUBLE_FEW, m, n, k, HOPPER.multiprocessors)
        return None if found is None else found[2]

    assert (parts(64, 4096, 4096), parts(16, 8192, 2048)) == (2, 1)
    assert parts(64, 1664, 9216) is parts(32, 2048, 8192) is parts(64, 9216, 1664) is None
    assert parts(16, 4096, 512) is parts(65, 4096, 4096) is None


def few_rows(m, k, n, dtype="float32"):
    name, found = plan(product(m, k, n, dtype), HOPPER)
    return name, str(found.tiling), found.launches


def test_blocks_of_few_rows_share_a_multiprocessor_where_they_are_many():
    """Guards: docs/cuda.md, what one waits for as it begins and ends is another's time."""
    for sizes, together in {
        (16, 4096, 4096): 1, (16, 1024, 16000): 2, (8, 1679, 46008): 3, (2, 512, 13824): 3,
    }.items():  # fmt: skip
        _, shown, (launch,) = few_rows(*sizes)
        assert (f"{together} on a multiprocessor" in shown) == (together > 1), shown
        room = HOPPER.shared_per_multiprocessor // together
        assert 2 * launch.shared_bytes > room - 1024 >= launch.shared_bytes or together == 1
    # a second round is no more than two on some multiprocessors
    _, shown, (launch, _) = few_rows(16, 28672, 2304)
    assert "2 on a multiprocessor" in shown and launch.grid[:2] == (72, 3)


def test_17_rows_and_more_go_by_tiles_where_these_fill_the_device():
    """Guards: 32 x 12288 x 2560 in float32 took 106 us by blocks of all rows, 78 by tiles."""
    assert "a thread" in few_rows(32, 12288, 2560)[1]
    assert "a thread" in few_rows(24, 2048, 11008)[1]
    assert "a thread" not in few_rows(32, 4096, 4096)[1]


def test_two_sums_are_cut_where_one_piece_leaves_a_device_idle():
    """Guards: a gate of 268 x 14668 x 1919 in float32, 270 blocks of two warps for one sum."""
    given = "float32", HOPPER, "ieee"
    assert not tiers.stay_whole(*given, 268, 1919, 14668, 1)
    assert tiers.stay_whole(*given, 2048, 1600, 960, 1)
    assert tiers.stay_whole(*given, 8192, 5632, 2048, 1)


@pytest.mark.parametrize(
    ("m", "k", "n", "tier"),
    [
        (34, 23678, 3248, "tensor cores"),  # 4 bytes divide its rows, and few rows read it
        (34, 23679, 3248, "wgmma"),
        (34, 23680, 3248, "wgmma"),
        (128, 3002, 5002, "wgmma"),
        (3290, 5614, 102, "tensor cores"),
        (3290, 5614, 202, "wgmma"),
        (34, 1002, 202, "wgmma"),
    ],
)
def test_a_large_factor_of_few_rows_is_read_as_it_lies(m, k, n, tier):
    """Guards: a copy for the copy engine took longer than the product (docs/cuda.md)."""
    made = product(m, k, n, "bfloat16")
    right = Operand("bfloat16", (0, 1, k), 16)
    left = Operand("bfloat16", (0, k, 1), 16)
    assert plan(replace(made, x=left, y=right), HOPPER)[0] == tier
    assert plan(replace(made, x=left, y=right), AMPERE)[0] == "tensor cores"


def test_two_products_are_one_launch_where_one_leaves_a_device_idle():
    """Guards: d_a of a gated layer (333, 1000 -> 777): 176 blocks of two warps for each weight."""

    def chosen(m, k, n, dtype="float32", **options):
        made = product(m, k, n, dtype, **options)
        right = Operand(dtype, (0, 1, k), 16)
        made = replace(made, y=right, x1=options.get("x1", made.x), y1=right)
        return tiers.choose(made, HOPPER)

    for dtype in ("float32", "float64"):
        _, found = chosen(333, 777, 1000, dtype)
        product_launch, joined = found.launches
        assert found.parts % 2 == 0 and joined.grid != product_launch.grid
        # two that fill the device take less time by themselves, and no planes
        assert chosen(4096, 14336, 4096, dtype) is None
        assert chosen(65536, 80, 896, dtype) is None
        # (d_b has the order of its own sum; factors that lie apart would come in another way)
        assert chosen(333, 777, 1000, dtype, free=True) is None
        other = Operand(dtype, (0, 1, 333), 16)
        assert chosen(333, 777, 1000, dtype, x1=other) is None


def test_few_columns_of_float64_go_by_narrow_tiles():
    """Guards: a tile of 64 columns takes the time of all of them for 14."""
    for n, width in ((14, 16), (30, 32), (71, 64)):
        found = plan(product(128991, 87, n, "float64"), HOPPER)[1]
        assert found.tiling.block_n == width, found.tiling
