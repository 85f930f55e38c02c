"""Products of halves as they are: dot products of pairs, AMX tiles, and what packs for them.

The tests take the kind of product that the host has for each half type; the last one runs this file
and a part of the conformance suite again for each kind that it could take.

Guards: each kind of product of half types keeps the bound and the bits that docs/numerics.md names.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import once
import pytest
import tolerance
from arrays import address, bits, in_layout, normal
from numba import types
from test_cpu_kernels import KINDS, called, laid_out
from tolerance import BF16, DTYPES, assert_within

import numfuse as nf
from numfuse.backends.cpu import host, tiling
from numfuse.backends.cpu.kernels import library, protocol
from numfuse.backends.cpu.llvm import amx
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a template are bound at specialisation)
# mypy: disable-error-code="name-defined"

HALVES = ("float16", "bfloat16")
INNER = os.environ.get("NUMFUSE_TEST_PRODUCT")
#: The kinds that this processor has, whatever `host.product` has been replaced by.
HAS = {
    "fma": True,
    "dot": "avx512bf16" in host.features(),
    "amx": {"amx-tile", "amx-bf16"} <= host.features() and host.tiles_permitted(),
}


def native(kind: str) -> tiling.Registers:
    """The register tile of a kind of product, where the host has it."""
    if not HAS[kind]:
        pytest.skip(f"this processor, or its system, has no products of the kind {kind!r}")
    return library.registers("float32", kind)


def halves(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All bits that a half may have."""
    return rng.integers(1, 1 << 16, shape, dtype=np.uint16)


def depths(step: int) -> tuple[int, ...]:
    return 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 2 * step + 1


def unpacked_pairs(panel: np.ndarray, k: int, width: int) -> np.ndarray:
    """A panel of pairs as (k, width)."""
    return panel[: k * width].reshape(k // 2, width, 2).swapaxes(1, 2).reshape(k, width)


def unpacked_tiles(panel: np.ndarray, k: int, rows: int) -> np.ndarray:
    """A panel of tiles as (k, rows)."""
    return panel[: k * rows].reshape(k // 32, rows, 32).swapaxes(1, 2).reshape(k, rows)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("factor", ["a", "b"])
@pytest.mark.parametrize("kind", ["dot", "amx"])
def test_packed_halves_are_the_matrix_and_zeros(kind, factor, layout):
    r = native(kind)
    rng = np.random.default_rng(0)
    if factor == "a":
        pack, height, width = library.pack_a("bfloat16", "float32", kind), r.mr, r.panel_rows
    else:
        pack, height, width = library.pack_b("bfloat16", "float32", kind), r.nr, r.nr
    unpacked = unpacked_tiles if (kind, factor) == ("amx", "a") else unpacked_pairs
    fence = 64
    for lines in (1, 2, 7, 8, 9, height - 1, height, height + 1, 2 * height + 17, 4 * height):
        for k in depths(r.k_step):
            x = halves(rng, (lines, k))
            view = laid_out(x, layout)
            steps = tiling.round_up(k, r.k_step)
            panels = -(-lines // height)
            panel = steps * width + 32
            target = np.full(fence + panels * panel + fence, 7, np.uint16)
            strides = view.strides if factor == "a" else view.strides[::-1]
            called(pack, 7)(
                address(view), *strides, lines, k, address(target) + 2 * fence, 2 * panel
            )
            for i in range(panels):
                at = fence + i * panel
                live = min(height, lines - i * height)
                got = unpacked(target[at:], steps, width)[:, :live]
                np.testing.assert_array_equal(got[:k], x[i * height : i * height + live].T)
                assert (got[k:] == 0).all(), (lines, k)
                assert (target[at + steps * width : at + panel] == 7).all(), (lines, k)
            assert (target[:fence] == 7).all() and (target[-fence:] == 7).all(), (lines, k)


def one_tile(rows, columns, k, a, b, b_step, before, before_step, c, c_step, first, table, scratch):
    OPEN_UNIT(scratch)
    MICROKERNEL(rows, columns, k, a, 0, b, b_step, 0, before, before_step, c, c_step, first, table)
    CLOSE_UNIT(scratch)


@functools.cache
def tile(fmt: str) -> Callable[..., None]:
    r = native("amx")
    run = specialise.entry(
        one_tile,
        types.void(*[types.int64] * 13),
        OPEN_UNIT=amx.make_open_tiles(),
        CLOSE_UNIT=amx.make_close_tiles(),
        MICROKERNEL=amx.make_tile_kernel(fmt, r, protocol.STREAM_COUNT),
    )

    def call(rows, columns, k, a, b, b_step, before, before_step, c, c_step, first):
        table = np.zeros(2 * protocol.STREAM_COUNT, np.int64)
        table[::2] = a
        table[1::2] = np.arange(protocol.STREAM_COUNT)
        scratch = np.zeros(8, np.int64)
        run(
            rows, columns, k, a, b, b_step, before, before_step, c, c_step, first,
            address(table), address(scratch),
        )  # fmt: skip
        # Each stream has walked on by two steps of its own in each step of the product.
        assert (table[::2] == a + 2 * k * np.arange(protocol.STREAM_COUNT)).all()

    return call


@pytest.mark.parametrize("fmt", HALVES)
def test_a_product_of_tiles_is_exact_and_its_edges_have_the_same_bits(fmt):
    if fmt == "float16" and "amx-fp16" not in host.features():
        pytest.skip("this processor has no tiles of float16")
    native("amx")
    rng = np.random.default_rng(1)
    for steps in (1, 2, 5):
        k = 32 * steps
        a, b = (rng.integers(-8, 9, shape).astype(DTYPES[fmt]) for shape in ((k, 32), (k, 32)))
        panel_a = np.ascontiguousarray(a.reshape(steps, 32, 32).swapaxes(1, 2))
        panel_b = np.ascontiguousarray(b.reshape(k // 2, 2, 32).swapaxes(1, 2))
        product = a.astype(np.float32).T @ b.astype(np.float32)
        for rows in (1, 15, 16, 17, 31, 32):
            for wide in (0, 1):
                written = (16 if rows <= 16 else 32), 16 + 16 * wide
                c = np.full((36, 48), 99, np.float32)
                inside = c[2 : 2 + written[0], 4 : 4 + written[1]]
                for times in (1, 2):  # written, then added to
                    tile(fmt)(
                        rows, written[1], steps, address(panel_a), address(panel_b), 128,
                        address(inside), c.strides[0], address(inside), c.strides[0], times == 1,
                    )  # fmt: skip
                    wanted = times * product[: written[0], : written[1]]
                    np.testing.assert_array_equal(inside, wanted)
                inside[...] = 99
                assert (c == 99).all(), (steps, rows, wide)


SHAPES = (
    (1, 1, 1), (2, 3, 1), (1, 40, 65), (40, 1, 33), (15, 17, 2), (33, 31, 95), (64, 65, 1025),
    (131, 67, 64), (3, 2051, 7), (290, 33, 2049),
)  # fmt: skip
LAYOUTS = "c", "transposed", "sliced", "inner_sliced", "reversed", "offset"


@pytest.mark.parametrize("fmt", HALVES)
def test_products_of_small_integers_are_exact(fmt):
    dtype, rng = DTYPES[fmt], np.random.default_rng(2)
    for m, n, k in SHAPES:
        for layout_a in LAYOUTS:
            for layout_b in LAYOUTS:
                a = in_layout(rng.integers(-4, 5, (m, k)).astype(dtype), layout_a)
                b = in_layout(rng.integers(-4, 5, (k, n)).astype(dtype), layout_b)
                _, pre = nf.matmul_bias_activation(a, b, return_pre_activation=True, backend="cpu")
                wanted = a.astype(np.float32) @ b.astype(np.float32)
                assert (pre == wanted).all(), (m, n, k, layout_a, layout_b)


@pytest.mark.parametrize("fmt", HALVES)
def test_gradients_of_small_integers_are_exact(fmt):
    dtype, rng = DTYPES[fmt], np.random.default_rng(3)
    for m, n, k in SHAPES[:-2]:
        for layout in LAYOUTS:
            a, b, grad = (
                in_layout(rng.integers(-1, 2, shape).astype(dtype), layout)
                for shape in ((m, k), (k, n), (m, n))
            )
            bias = np.ones(n, dtype)
            got = nf.matmul_bias_activation_bwd(grad, a, b, bias, "relu", backend="cpu")
            wide_a, wide_b, wide = (x.astype(np.float32) for x in (a, b, grad))
            g = wide * (wide_a @ wide_b + 1 > 0)
            for value, wanted in zip(got, (g @ wide_b.T, wide_a.T @ g, g.sum(axis=0)), strict=True):
                assert (value == wanted.astype(dtype)).all(), (m, n, k, layout)


@pytest.mark.parametrize("fmt", HALVES)
def test_a_row_has_the_same_bits_in_any_slice_and_on_any_number_of_threads(fmt):
    dtype, rng = DTYPES[fmt], np.random.default_rng(4)
    # Several blocks of K and of columns, and enough work for several threads.
    m, n, k = 715, 141, 2085
    kind = library.kind(fmt, fmt)
    assert m * n * k > tiling.parallel_fmas(library.registers("float32", kind))
    assert k > tiling.k_block(k, 4, kind)
    a, b = normal(rng, (m, k), dtype, k**-0.5), normal(rng, (k, n), dtype)
    bias, grad = normal(rng, (n,), dtype), normal(rng, (m, n), dtype)

    def everything():
        out = nf.matmul_bias_activation(a, b, bias, "silu", backend="cpu")
        return out, *nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend="cpu")

    before = numba.get_num_threads()
    results = []
    try:
        for threads in {1, 2, before}:
            if threads <= before:
                numba.set_num_threads(threads)
                results.append([bits(x) for x in everything()])
    finally:
        numba.set_num_threads(before)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert (one == two).all()
    out, d_a, _, _ = results[0]
    for rows in (slice(0, 1), slice(13, 14), slice(5, 22), slice(40, 73), slice(-1, None)):
        part = nf.matmul_bias_activation(a[rows], b, bias, "silu", backend="cpu")
        assert (bits(part) == out[rows]).all()
        part = nf.matmul_bias_activation_bwd(
            grad[rows], a[rows], b, bias, "silu", backend="cpu"
        ).d_a
        assert (bits(part) == d_a[rows]).all()
    batch = np.stack([a[:40], a[40:80], a[80:120]])
    part = nf.matmul_bias_activation(batch, b[None], bias, "silu", backend="cpu")
    assert (bits(part).reshape(120, n) == out[:120]).all()


@pytest.mark.parametrize("fmt", HALVES)
@pytest.mark.parametrize("k", [1, 31, 33, 100])
def test_nan_and_infinity_follow_ieee_and_stay_in_their_row(fmt, k):
    dtype, rng = DTYPES[fmt], np.random.default_rng(5)
    a, b = rng.integers(1, 5, (37, k)).astype(dtype), rng.integers(1, 5, (k, 35)).astype(dtype)
    at = k // 2
    a[3, at], a[5, at], a[7, at], a[20, at] = np.inf, np.nan, -np.inf, 0
    b[at, 1], b[at, 2], b[at, 34] = 0, -1, np.inf
    with np.errstate(invalid="ignore"):
        wanted = a.astype(np.float32) @ b.astype(np.float32)
    # NaN from inf * 0, in the row of the infinity and in the row of the zero.
    assert np.isnan(wanted[3, 1]) and np.isnan(wanted[20, 34]) and wanted[3, 2] == -np.inf
    out, pre = nf.matmul_bias_activation(a, b, return_pre_activation=True, backend="cpu")
    np.testing.assert_array_equal(pre, wanted)
    np.testing.assert_array_equal(out.astype(np.float32), wanted.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("fmt", HALVES)
def test_subnormal_factors_and_products_are_within_the_bound(fmt):
    dtype, rng = DTYPES[fmt], np.random.default_rng(6)
    tiny = float(np.finfo(np.float32).smallest_normal)
    scales = (tiny / 64, 1) if fmt == "bfloat16" else (2.0**-23, 2.0**-20)
    for scale_a, scale_b in (scales, scales[::-1], (tiny**0.5 / 4,) * 2):
        a, b = normal(rng, (33, 70), dtype, scale_a), normal(rng, (70, 34), dtype, scale_b)
        out, pre = nf.matmul_bias_activation(a, b, return_pre_activation=True, backend="cpu")
        wanted = tolerance.forward(a, b, None, "none", dtype)
        assert_within("pre", pre, wanted.pre, wanted.pre_error)
        assert_within("out", out, wanted.out, wanted.out_error)
        if fmt == "float16":  # float32 holds products of all its numbers: nothing is lost
            error = tolerance.gamma(71, dtype) * np.abs(a.astype(float)) @ np.abs(b.astype(float))
            assert_within("pre", pre, wanted.pre, error)


def test_a_result_below_the_normal_numbers_is_not_lost_at_the_store():
    a, b = np.array([[1]], BF16), np.array([[0]], BF16)
    bias = np.array([1e-39], BF16)
    assert bias[0] != 0
    assert nf.matmul_bias_activation(a, b, bias, backend="cpu")[0, 0] == bias[0]


def test_column_sums_are_of_grad_pre_before_it_is_rounded():
    m, rng = 4096, np.random.default_rng(7)
    a, b = np.ones((m, 1), BF16), np.zeros((1, 3), BF16)
    bias, grad = normal(rng, (3,), BF16), np.abs(normal(rng, (m, 3), BF16))
    got = nf.matmul_bias_activation_bwd(grad, a, b, bias, "sigmoid", backend="cpu")
    wanted = tolerance.backward(grad, a, b, bias, "sigmoid", BF16)
    assert_within("d_bias", got.d_bias, wanted.d_bias, wanted.d_bias_error)


def test_the_latest_call_names_its_kind_of_product():
    for fmt in HALVES:
        x = np.ones((3, 3), DTYPES[fmt])
        nf.matmul_bias_activation(x, x, backend="cpu")
        call = nf.last_call()
        assert call is not None
        assert call.tier == host.product_name(host.product(fmt), fmt)
        assert {"amx": "AMX", "dot": "BF16", "fma": "widened"}[host.product(fmt)] in call.tier


def test_the_permission_for_tiles_may_be_asked_for_twice():
    granted = host.tiles_permitted()
    assert host.tiles_permitted.__wrapped__() == granted


@functools.cache
def whole(kind: str) -> once.Process | None:
    """All of this file, and whole products, with this kind; None of one that is not there or is
    what the other tests run.
    """
    if not HAS[kind] or kind == host.product("bfloat16"):
        return None
    here = Path(__file__)
    code = f"""
import sys
from numfuse.backends.cpu import host
host.product = lambda fmt: {kind!r} if fmt == "bfloat16" else "fma"
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
    suite = here.parents[1] / "conformance" / "test_conformance.py"
    names = (
        "thin_deep_and_shallow", "output_fence_is_untouched", "every_activation_in_every_dtype",
        "a_batch_gives_what_a_loop_gives", "axes_may_have_length_zero", "nan_stays_in_its_row",
        "half_types_are_accumulated_in_float32_and_rounded_once",
    )  # fmt: skip
    tests = [str(here), *(f"{suite}::test_{name}" for name in names)]
    chosen = "(cpu and bfloat16) or (test_half_products and not packed_halves)"
    words = [sys.executable, "-c", code, *tests, "-k", chosen]
    return once.Process(lambda _: words, {"NUMFUSE_TEST_PRODUCT": kind})


@pytest.mark.skipif(INNER is not None, reason="this is the inner run")
@pytest.mark.long
@pytest.mark.parametrize("kind", ["amx", "dot", "fma"])
def test_all_of_this_and_whole_products_with_each_kind(kind):
    native(kind)
    process = whole(kind)
    if process is None:
        pytest.skip("this is what the other tests run")
    done = process.result()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d\d+ passed", done.stdout, re.MULTILINE), done.stdout[-500:]
