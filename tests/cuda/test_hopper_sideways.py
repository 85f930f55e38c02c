"""Blocks of Hopper's kernel that lie on their side, with their arithmetic, run in Python.

Guards: docs/cuda.md, "Blocks on their side": such a block has the rows that the result has, and an
element the bits that an upright block gives it.
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

    from numfuse.backends.cuda.kernels.hopper.tiling import (
        HopperTile,
        Lies,
        hopper_tile,
        sideways_tiles,
    )
    from numfuse.backends.cuda.kernels.hopper.tiling import ways as hopper_ways
    from numfuse.backends.cuda.plan.product import Operand, Product

    tier = importlib.import_module("numfuse.backends.cuda.kernels.hopper.tier")
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

from numfuse.epilogues import Epilogue, sum_of_terms
from numfuse.language.curves import leaf

if SIMULATED:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

SMALL = replace(HOPPER, multiprocessors=2)
UPRIGHT = HopperTile(64, 64, 1, False)
#: One piece with a lone eight and without, and two of each.
TILES = [
    HopperTile(128, 24, 2, False, True), HopperTile(64, 40, 1, False, True),
    HopperTile(128, 8, 2, False, True),
    pytest.param(HopperTile(64, 144, 1, False, True), marks=pytest.mark.long),
    pytest.param(HopperTile(128, 160, 2, False, True), marks=pytest.mark.long),
]  # fmt: skip
Z = leaf("z")


def matrix(rng, *lengths, pitch=0, dtype=ml_dtypes.bfloat16):
    """Matrices, the rest of their rows NaN; all of it without `rng`."""
    *lead, rows, columns = lengths
    whole = np.full((*lead, rows, max(columns, pitch)), np.nan, dtype)
    if rng is not None:
        whole[..., :columns] = rng.standard_normal(lengths)
    return whole


def operand(x, turned=False, name="bfloat16"):
    place = x.shape[-2] * x.shape[-1] if x.ndim > 2 else 0
    strides = (place, 1, x.shape[-1]) if turned else (place, x.shape[-1], 1)
    return Operand(name, strides, 16)


def run(product, tile, arrays, parts=1, workspace=None):
    plan = tier.plan_with(product, "bfloat16", SMALL, tile, parts)
    if workspace is not None:
        arrays = {**arrays, "work": workspace}
    machine = Hopper([*arrays.values()])
    machine.run(plan.launches[0], **{name: x.ctypes.data for name, x in arrays.items()})
    return plan


def sizes_of(tile):
    """M, K and N of two rows of blocks and two columns, the last ones with less than a block."""
    return tile.block_n + 13, 72, tile.block_m + 40


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_has_the_bits_of_an_upright_block(tile, turned):
    m, k, n = sizes_of(tile)
    rng = np.random.default_rng(m)
    a, bias = matrix(rng, 2, m, k), matrix(rng, 1, n)
    w = matrix(rng, n, k, pitch=k + 8) if turned else matrix(rng, k, n, pitch=n + 8)
    epilogue = Epilogue("layer", ("z",), ("bias",), (("out", 2 * (Z + leaf("bias"))), ("pre", Z)))
    found = []
    for own in (tile, UPRIGHT):
        results = {name: matrix(None, 2, m, n, pitch=n + 8) for name in ("out", "pre")}
        product = Product(
            m, n, k, 2, operand(a), operand(w, turned), operand(results["out"]), "float32",
            epilogue=epilogue, bias=Operand("bfloat16", (0, 0, 1), 16),
            pre=operand(results["pre"]),
        )  # fmt: skip
        run(product, own, {"x": a, "y": w, "bias": bias, **results})
        found.append(results)
    for name, made in found[0].items():
        assert np.array_equal(made[..., :n], found[1][name][..., :n])
        assert np.isnan(made[..., n:].astype(float)).all()
    y = (w[:, :k].T if turned else w[:, :n]).astype(float)
    exact = a.astype(float) @ y
    most = abs(a.astype(float)) @ abs(y)
    error = abs(found[0]["pre"][..., :n].astype(float) - exact)
    assert (error <= 2.0**-8 * abs(exact) + (k + 4) * 2.0**-24 * most).all()


@pytest.mark.parametrize("tile", TILES[:3], ids=str)
def test_pre_activations_in_float32_are_stored_by_threads(tile):
    m, k, n = sizes_of(tile)
    rng = np.random.default_rng(m)
    a, w = matrix(rng, 2, m, k), matrix(rng, k, n)
    out = matrix(None, 2, m, n)
    pre = np.full((2, m, n + 3), np.nan, np.float32)
    layer = Epilogue("layer", ("z",), (), (("out", 2 * Z), ("pre", Z)))
    product = Product(
        m, n, k, 2, operand(a), operand(w), operand(out), "float32", epilogue=layer,
        pre=operand(pre, name="float32"),
    )  # fmt: skip
    run(product, tile, {"x": a, "y": w, "out": out, "pre": pre})
    assert np.isnan(pre[..., n:]).all()
    assert np.array_equal(
        out.astype(np.float32), (2 * pre[..., :n]).astype(out.dtype).astype(np.float32)
    )
    x, y = a.astype(float), w.astype(float)
    assert (abs(pre[..., :n] - x @ y) <= (k + 4) * 2.0**-24 * (abs(x) @ abs(y))).all()


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_slope_has_its_operand_and_the_sums_of_its_columns(tile):
    m, k, n = sizes_of(tile)
    rng = np.random.default_rng(n)
    a, w = matrix(rng, m, k), matrix(rng, k, n)
    grad, out = matrix(rng, m, n), matrix(None, m, n)
    rows = -(-m // tile.block_n)
    sums = np.full((rows, n + 1), np.nan, np.float32)
    product = Product(
        m, n, k, 1, operand(a), operand(w), operand(out), "float32", sums=True,
        epilogue=Epilogue("slope", ("z",), ("extra",), (("out", Z * leaf("extra")),)),
        extra=operand(grad),
    )  # fmt: skip
    whole = np.full(rows * n + n, np.nan, np.float32)
    plan = run(product, tile, {"x": a, "y": w, "out": out, "extra": grad, "sums": whole})
    assert plan.block_m == tile.block_n
    sums = whole[: rows * n].reshape(rows, n)
    assert np.isnan(whole[rows * n :]).all()
    exact = (a.astype(float) @ w.astype(float)) * grad.astype(float)
    most = (abs(a.astype(float)) @ abs(w.astype(float))) * abs(grad.astype(float))
    bound = (k + 4) * 2.0**-24 * most
    assert (abs(out.astype(float) - exact) <= 2.0**-8 * abs(exact) + bound).all()
    for i in range(rows):
        own = slice(i * tile.block_n, (i + 1) * tile.block_n)
        error = abs(sums[i] - exact[own].sum(0))
        limit = bound[own].sum(0) + tile.block_n * 2.0**-24 * abs(exact[own]).sum(0)
        assert (error <= limit).all()


@pytest.mark.parametrize("tile", TILES[:3], ids=str)
def test_the_second_term_of_a_sum_follows_the_first(tile):
    m, k, n = sizes_of(tile)
    rng = np.random.default_rng(k)
    a, a1 = matrix(rng, m, k), matrix(rng, m, k)
    w, w1 = matrix(rng, n, k), matrix(rng, n, k)
    out = matrix(None, m, n)
    product = Product(
        m, n, k, 1, operand(a), operand(w, True), operand(out), "float32",
        epilogue=sum_of_terms(0), x1=operand(a1), y1=operand(w1, True),
    )  # fmt: skip
    run(product, tile, {"x": a, "y": w, "x1": a1, "y1": w1, "out": out})
    pairs = [(a.astype(float), w.T.astype(float)), (a1.astype(float), w1.T.astype(float))]
    exact = sum(x @ y for x, y in pairs)
    most = sum(abs(x) @ abs(y) for x, y in pairs)
    error = abs(out.astype(float) - exact)
    assert (error <= 2.0**-8 * abs(exact) + (2 * k + 4) * 2.0**-24 * most).all()


@pytest.mark.parametrize("tile", TILES[:3], ids=str)
def test_parts_of_a_sum_are_stored_as_planes(tile):
    m, k, n = tile.block_n + 13, 256, tile.block_m + 37
    rng = np.random.default_rng(k)
    a, w = matrix(rng, m, k), matrix(rng, k, n, pitch=-(-n // 8) * 8)
    out = matrix(None, m, n)
    pitch = -(-n // 4) * 4
    planes = np.full(2 * m * pitch, np.nan, np.float32)
    product = Product(m, n, k, 1, operand(a), operand(w), operand(out), "float32",
                      epilogue=sum_of_terms(0))  # fmt: skip
    run(product, tile, {"x": a, "y": w, "out": out}, 2, planes)
    made = planes.reshape(2, m, pitch)[..., :n]
    for i in range(2):
        own = slice(128 * i, 128 * i + 128)
        x, y = a[:, own].astype(float), w[own, :n].astype(float)
        assert (abs(made[i] - x @ y) <= 132 * 2.0**-24 * (abs(x) @ abs(y))).all()


@pytest.mark.parametrize(
    "tile",
    [HopperTile(128, 32, 2, False, True), HopperTile(64, 96, 1, False, True),
     pytest.param(HopperTile(128, 192, 2, False, True), marks=pytest.mark.long),
     pytest.param(HopperTile(64, 160, 1, False, True), marks=pytest.mark.long)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("parts", [1, 2])
def test_the_left_factor_of_a_weight_gradient_lies_along_its_rows(tile, parts):
    m, k, n = tile.block_n + 8, 200, tile.block_m + 40
    rng = np.random.default_rng(m)
    a, w = matrix(rng, k, m), matrix(rng, k, n)
    out = matrix(None, m, n, pitch=n + 8)
    planes = np.full(parts * m * n, np.nan, np.float32)
    product = Product(m, n, k, 1, operand(a, True), operand(w), operand(out), "float32", free=True)
    run(product, tile, {"x": a, "y": w, "out": out}, parts, planes)
    x, y = a.T.astype(float), w.astype(float)
    if parts == 1:
        exact, bound = x @ y, (k + 4) * 2.0**-24 * (abs(x) @ abs(y))
        error = abs(out[:, :n].astype(float) - exact)
        assert (error <= 2.0**-8 * abs(exact) + bound).all()
        assert np.isnan(out[:, n:].astype(float)).all()
    for i in range(parts if parts > 1 else 0):
        own = slice(128 * i, 128 * i + 128)
        made = planes.reshape(parts, m, n)[i]
        bound = 132 * 2.0**-24 * (abs(x[:, own]) @ abs(y[own]))
        assert (abs(made - x[:, own] @ y[own]) <= bound).all()


def test_what_does_not_go_by_boxes_is_not_made_on_its_side():
    def lies(m=257, n=640, k=512, kind="bfloat16", **others):
        lengths = {"x": k, "y": n, "out": n}
        arrays = {name: Operand(kind, (0, c, 1), 16) for name, c in lengths.items()} | others
        made = Product(m, n, k, 1, accumulator="float32", **arrays)
        return tier._lies(made, "bfloat16").sideways

    line = Operand("bfloat16", (0, 1, 0), 16)
    assert lies() == lies(m=65) == lies(y=Operand("bfloat16", (0, 1, 512), 16)) == "all"
    assert lies(m=64) == lies(m=1025) == lies(m=256) == ""  # the last fills upright blocks
    along_m = Operand("bfloat16", (0, 1, 264), 16)
    assert lies(x=along_m) == "all" and lies(m=100, x=along_m) == ""  # in whole boxes of rows
    assert lies(y=Operand("bfloat16", (0, 641, 1), 16)) == ""  # would be copied
    assert lies(out=Operand("bfloat16", (0, 641, 1), 16)) == "parts"
    extra = Epilogue("slope", ("z",), ("extra",), (("out", Z * leaf("extra")),))
    assert lies(epilogue=extra, extra=line) == "parts"
    found = [t for _, t, p in hopper_ways(257, 640, 8, 1, 132, 0, False, False, True,
                                          Lies(sideways="parts"), 1) if t.sideways]  # fmt: skip
    assert found == []  # of so few slices there are no parts
    assert sideways_tiles(64) == sideways_tiles(1025) == sideways_tiles(128) == []
    assert {t.block_n for t in sideways_tiles(576, 32)} == {96, 192}


def test_few_rows_of_a_short_k_are_made_on_their_side():
    """Guards: docs/cuda.md, all threads of a block have some of its epilogue."""

    def chosen(m, k, n, places, pitch):
        x, y = (Operand("bfloat16", (r * c, c, 1), 16) for r, c in ((m, k), (k, n)))
        out = Operand("bfloat16", (m * pitch, pitch, 1), 16 if pitch % 8 == 0 else 2)
        plan = tier.take(Product(m, n, k, places, x, y, out, "float32"), HOPPER)
        return None if plan is None else plan.tiling

    assert chosen(8, 96, 14336, 16, 14336).startswith("8x128x64 sideways")
    assert chosen(13, 128, 14336, 16, 14336).startswith("16x128x64 sideways")
    assert "sideways" not in chosen(8, 192, 14336, 16, 14336)
    assert "sideways" not in chosen(8, 96, 14336, 2, 14336)
    # where a result is stored value by value by the same instruction
    assert "sideways" not in chosen(8, 96, 14336, 16, 14337)


@pytest.mark.parametrize("n", [640, 1152, 2304, 5632])
def test_a_sum_is_cut_to_the_same_parts_whatever_is_made_of_it(n):
    """Guards: docs/cuda.md, sums in parts: also where what is made of it goes by no boxes."""
    m, k = 257, 6144
    x, y, out = (Operand("bfloat16", (0, c, 1), 16) for c in (k, n, n))
    layer = Epilogue("layer", ("z",), (), (("out", 2 * Z), ("pre", Z)))
    slope = Epilogue("slope", ("z",), ("extra",), (("out", Z * leaf("extra")),))
    made = [
        Product(m, n, k, 1, x, y, out, "float32", epilogue=sum_of_terms(0)),
        Product(m, n, k, 1, x, y, Operand("bfloat16", (0, n + 1, 1), 2), "float32"),
        Product(m, n, k, 1, x, y, out, "float32", epilogue=layer,
                pre=Operand("bfloat16", (0, n + 1, 1), 2)),
        Product(m, n, k, 1, x, y, out, "float32", epilogue=slope,
                extra=Operand("bfloat16", (0, 1, 0), 16)),
    ]  # fmt: skip
    found = {(plan.part, plan.parts) for plan in (tier.take(p, HOPPER) for p in made)}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("m", "n", "slices", "rows"),
    [(77, 5120, 32, 80), (197, 4608, 48, 72), (257, 5632, 96, 88), (576, 3528, 37, 144)],
)
def test_few_rows_are_made_by_blocks_that_they_fill(m, n, slices, rows):
    """Guards: docs/cuda.md: 257 rows are no 320."""
    kinds = {t.block_n for t in sideways_tiles(m)}
    assert all(-(-m // r) * r <= -(-m // 64) * 64 for r in kinds)
    tile, _ = hopper_tile(m, n, slices, 1, 132, lies=Lies(True, sideways="all"))
    upright, _ = hopper_tile(m, n, slices, 1, 132, lies=Lies(True))
    assert tile.sideways and tile.block_n == rows and not upright.sideways
