"""The pieces of the CPU backend: packing, micro-kernel, conversions, row functions and tilings.

All tests here take the host's vectors; the last one runs this file again as if the host had
narrower ones.

Guards: any strides and sizes, half types rounded once to nearest even, nothing written beside a
result, bounded memory (docs/numerics.md, docs/design.md).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import once
import pytest
from arrays import address
from hypothesis import example, given
from hypothesis import strategies as st
from numba import types
from tolerance import DTYPES

from numfuse.backends.cpu import descriptors, host, tiling
from numfuse.backends.cpu.kernels import elementwise as kernels
from numfuse.backends.cpu.kernels import library, protocol
from numfuse.backends.cpu.llvm import conversions, intrinsics, microkernel
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a template are bound at specialisation)
# mypy: disable-error-code="name-defined"

FORMATS = tuple(DTYPES)
FENCE = 64  # elements on either side of a target


def called(kernel: specialise.Kernel, arguments: int) -> Callable[..., None]:
    """A kernel as a function of integers."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(kernel.address)


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Values whose sums of products are exact in every dtype and any order."""
    return rng.integers(-8, 9, shape).astype(dtype)


def laid_out(x: np.ndarray, kind: str) -> np.ndarray:
    """The values of `x` (rows, k) with one of the three kinds of strides, or reversed ones."""
    base = np.full((2 * x.shape[0] + 3, 2 * x.shape[1] + 5), 99, x.dtype)
    if kind == "rows":
        view = base[1 : 1 + x.shape[0], 2 : 2 + x.shape[1]]
    elif kind == "columns":
        base = np.full((2 * x.shape[1] + 3, 2 * x.shape[0] + 5), 99, x.dtype)
        view = base[1 : 1 + x.shape[1], 2 : 2 + x.shape[0]].T
    elif kind == "neither":
        view = base[1 : 1 + 2 * x.shape[0] : 2, 2 : 2 + 2 * x.shape[1] : 2]
    else:
        view = base[: x.shape[0], : x.shape[1]][::-1, ::-1]
    view[...] = x
    return view


def depths(vl: int) -> tuple[int, ...]:
    return 1, vl - 1, vl, vl + 1, 2 * vl + 3


KINDS = ("rows", "columns", "neither", "reversed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_a_is_a(fmt, kind):
    acc = library.accumulator(fmt)
    r = library.registers(acc)
    pack = called(library.pack_a(fmt, acc), 7)
    rng = np.random.default_rng(0)
    for rows in (*range(1, r.mr + 2), 3 * r.mr + r.mr // 2, 4 * r.mr):
        for k in depths(r.vl):
            x = small_integers(rng, (rows, k), DTYPES[fmt])
            view = laid_out(x, kind)
            panels = -(-rows // r.held_rows)
            size = k * r.panel_rows + r.vl  # the overhang that the docstring allows
            panel = size + 16
            target = np.full(FENCE + panels * panel + FENCE, -77.0, acc)
            pack(
                address(view), *view.strides, rows, k,
                address(target) + FENCE * r.itemsize, panel * r.itemsize,
            )  # fmt: skip
            for i in range(panels):
                at = FENCE + i * panel
                first = i * r.held_rows
                live = min(r.held_rows, rows - first)
                got = target[at : at + k * r.panel_rows].reshape(k, r.panel_rows)[:, :live]
                np.testing.assert_array_equal(got, x[first : first + live].T)
                assert (target[at + size : at + panel] == -77).all(), (rows, k)
            assert (target[:FENCE] == -77).all() and (target[-FENCE:] == -77).all(), (rows, k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_b_is_b(fmt, kind):
    acc = library.accumulator(fmt)
    r = library.registers(acc)
    pack = called(library.pack_b(fmt, acc), 7)
    rng = np.random.default_rng(1)
    for columns in (*range(1, r.vl + 2), r.nr - 1, r.nr, r.nr + 1, 3 * r.nr - 1, 4 * r.nr):
        for k in depths(r.vl):
            x = small_integers(rng, (k, columns), DTYPES[fmt])
            view = laid_out(x, kind)
            width = r.panel_columns
            panels = -(-columns // width)
            panel = k * width + tiling.LINE // r.itemsize
            target = np.full(FENCE + panels * panel + FENCE, -77.0, acc)
            pack(
                address(view), *view.strides, columns, k,
                address(target) + FENCE * r.itemsize, panel * r.itemsize,
            )  # fmt: skip
            for j in range(panels):
                at = FENCE + j * panel
                live = min(width, columns - j * width)
                got = target[at : at + k * width].reshape(k, width)[:, :live]
                np.testing.assert_array_equal(got, x[:, j * width : j * width + live])
                assert (target[at + k * width : at + panel] == -77).all(), (columns, k)
            assert (target[:FENCE] == -77).all() and (target[-FENCE:] == -77).all(), (columns, k)


def one_tile(
    rows, columns, k, a, a_next, b, b_step, b_next, before, before_step, c, c_step, first, table
):  # fmt: skip
    MICROKERNEL(
        rows, columns, k, a, a_next, b, b_step, b_next, before, before_step, c, c_step, first, table
    )  # fmt: skip


@functools.cache
def tile(acc: str) -> Callable[..., None]:
    r = library.registers(acc)
    made = microkernel.make_microkernel(acc, r, protocol.STREAM_COUNT)
    run = specialise.entry(one_tile, types.void(*[types.int64] * 14), MICROKERNEL=made)

    def call(rows, columns, a, b, before, before_step, c, c_step, first):
        """Call the micro-kernel on panels of A (count, k, rows), and of B (count, k, columns)."""
        table = np.zeros(2 * protocol.STREAM_COUNT, np.int64)
        table[::2] = address(a)  # requests that rest where they are
        run(
            rows, columns, a.shape[1], address(a), a.strides[0],
            address(b), b.strides[1], b.strides[0],
            before, before_step, c, c_step, first, address(table),
        )  # fmt: skip
        assert (table[::2] == address(a)).all() and (table[1::2] == 0).all()

    return call


def unpacked(panels: np.ndarray) -> np.ndarray:
    """Return panels (count, k, lines) as (k, all lines)."""
    return np.concatenate(list(panels), axis=1)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("acc", ["float32", "float64"])
def test_a_tile_is_the_product_and_nothing_else_is_written(acc, in_place):
    r = library.registers(acc)
    rng = np.random.default_rng(2)
    for k in (1, 2, r.vl + 1):
        down, across = r.tiles
        a = small_integers(rng, (down, k, r.panel_rows), np.dtype(acc))
        if in_place:
            matrix = small_integers(rng, (k, r.nr + 5), np.dtype(acc))
            b = matrix[:, : r.nr].reshape(k, across, r.panel_columns).swapaxes(0, 1)
            assert np.shares_memory(b, matrix)
        else:
            b = small_integers(rng, (across, k, r.panel_columns), np.dtype(acc))
        left, right = unpacked(a[:, :, : r.held_rows]), unpacked(b)
        for rows in range(1, r.mr + 1):
            for columns in (r.vl, r.nr):
                c = np.full((r.mr + 4, r.nr + 2 * r.vl), 99, acc)
                inside = c[2 : 2 + rows, r.vl : r.vl + columns]
                product = left[:, :rows].T @ right[:, :columns]
                for times in (1, 2):  # written, then added to
                    place = address(inside), c.strides[0]
                    tile(acc)(rows, columns, a, b, *place, *place, times == 1)
                    np.testing.assert_array_equal(inside, times * product)
                inside[...] = 99
                assert (c == 99).all(), (k, rows, columns)


@pytest.mark.parametrize("acc", ["float32", "float64"])
def test_an_edge_has_the_bits_of_an_interior_tile(acc):
    r = library.registers(acc)
    rng = np.random.default_rng(3)
    k = 77
    panels = zip(r.tiles, (r.panel_rows, r.panel_columns), strict=True)
    a, b = (rng.standard_normal((count, k, size)).astype(acc) for count, size in panels)

    def product(rows: int, columns: int) -> np.ndarray:
        before = np.ones((rows, 2 * columns), acc)
        c = np.ones((rows, columns), acc)
        for first, target in ((1, before), (0, c)):  # the sum goes elsewhere than it comes from
            places = address(before), before.strides[0], address(target), target.strides[0]
            tile(acc)(rows, columns, a, b, *places, first)
        return c

    whole = product(r.mr, r.nr)
    for rows in range(1, r.mr + 1):
        for columns in (r.vl, r.nr):
            assert product(rows, columns).tobytes() == whole[:rows, :columns].tobytes()


def moved(source, source_step, target, target_step, n, item):
    MOVE(source, source_step, target, target_step, n, item)


def test_move_copies_bits_between_any_strides():
    bits = {f"BITS{n}": intrinsics.make_elements(f"uint{n}") for n in (16, 32, 64)}
    move = specialise.entry(
        moved, types.void(*[types.int64] * 6), MOVE=specialise.device(kernels.move, **bits)
    )
    rng = np.random.default_rng(4)
    for item in (2, 4, 8):
        for n in (0, 1, 2, 31, 64, 65):
            for source_step in (1, 3, -1, 0):
                for target_step in (1, 2, -5):
                    source = rng.integers(0, 2**16, 400).astype(f"u{item}")
                    source *= source  # every byte takes part, signalling NaNs among them
                    target = np.full(800, 7, f"u{item}")
                    wanted = target.copy()
                    index = np.arange(n)
                    wanted[400 + index * target_step] = source[200 + index * source_step]
                    move(
                        address(source[200:]), source_step * item,
                        address(target[400:]), target_step * item, n, item,
                    )  # fmt: skip
                    np.testing.assert_array_equal(target, wanted)


def widened_all(source, target, n):
    x = STORED(source)
    y = SUMS(target)
    for q in range(n):
        y[q] = WIDEN(x[q])


def narrowed_all(source, target, n):
    x = SUMS(source)
    y = STORED(target)
    for q in range(n):
        y[q] = NARROW(x[q])


@functools.cache
def conversion(template: Callable[..., None], fmt: str) -> Callable[..., None]:
    return specialise.entry(
        template,
        types.void(*[types.int64] * 3),
        STORED=intrinsics.make_elements(fmt),
        SUMS=intrinsics.make_elements("float32"),
        WIDEN=conversions.make_widen(fmt, "float32"),
        NARROW=conversions.make_narrow(fmt, "float32"),
    )


def assert_same_numbers(got: np.ndarray, wanted: np.ndarray) -> None:
    """The same bits, signs of zeros included; a NaN for a NaN, whatever its payload."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    kind = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(kind)[~nan], wanted.view(kind)[~nan])


HALVES = ("float16", "bfloat16")


@pytest.mark.parametrize("fmt", HALVES)
def test_every_half_is_widened_exactly(fmt):
    halves = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[fmt])
    wanted = halves.astype(np.float32)
    got = np.empty(halves.size, np.float32)
    conversion(widened_all, fmt)(address(halves), address(got), halves.size)
    assert_same_numbers(got, wanted)
    # Packing widens whole vectors, and masked ones at the edges.
    width = library.registers("float32").panel_columns
    for columns in (width, width - 1):
        k = halves.size // columns
        x = halves[: k * columns].reshape(k, columns)
        packed = np.empty((k * width + 2 * width,), np.float32)
        called(library.pack_b(fmt, "float32"), 7)(
            address(x), *x.strides, columns, k, address(packed), 0
        )
        got = np.ascontiguousarray(packed[: k * width].reshape(k, width)[:, :columns])
        assert_same_numbers(got, x.astype(np.float32))


@pytest.mark.parametrize("fmt", HALVES)
@np.errstate(all="ignore")  # NumPy's conversions, the truth here, warn of NaN and overflow
def test_narrowing_is_to_nearest_even(fmt):
    dtype = DTYPES[fmt]
    halves = np.arange(1 << 15, dtype=np.uint16).view(dtype)
    wide = halves.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    # Halfway between neighbours, beyond the largest too (there IEEE rounds to infinity), and one
    # float32 to either side of it. The subnormals of a half are among them.
    ends = np.append(finite, 2 * finite[-1] - finite[-2])
    halfway = ((ends[1:] + ends[:-1]) / 2).astype(np.float32)
    assert (halfway.astype(np.float64) == (ends[1:] + ends[:-1]) / 2).all()
    rng = np.random.default_rng(5)
    values = np.concatenate([
        halfway,
        np.nextafter(halfway, np.float32(0)),
        np.nextafter(halfway, np.float32(np.inf)),
        wide.astype(np.float32),
        rng.integers(0, 1 << 31, 1 << 18, dtype=np.uint32).view(np.float32),
        np.array([0, np.inf, np.nan, 1e-45, 3.4028235e38, 65504, 65519.996, 65520], np.float32),
        # NaNs whose payload is all in the bits that are cut off, or carries into the exponent
        np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7FBFFFFF], np.uint32).view(np.float32),
    ])  # fmt: skip
    values = np.concatenate([values, -values])
    wanted = values.astype(dtype)
    got = np.empty(values.size, dtype)
    conversion(narrowed_all, fmt)(address(values), address(got), values.size)
    assert_same_numbers(got, wanted)


def test_ml_dtypes_rounds_to_nearest_even_itself():
    """What the test above takes as the truth, on values that are easily checked by hand."""
    one = 0x3F800000
    values = np.array([one + 0x8000, one + 0x18000, one + 0x8001], np.uint32).view(np.float32)
    assert values.astype(ml_dtypes.bfloat16).view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81]


# Rows whose loop LLVM may leave scalar, or that call libm, are an order of magnitude slower.
ASSEMBLY = """
from numfuse import epilogues
from numfuse.activations import get
from numfuse.backends.cpu.kernels import library, rows
from numfuse.backends.cpu.kernels.printer import Result, Source
def gate(f, fmt, streams=False):
    sources = tuple(Source(x, x, fmt) for x in "ab")
    return rows.fused(epilogues.gate(f), fmt, sources, (Result("out", "out", fmt),), (), streams)
def gate_backward(f, fmt, guard, streams=False):
    made = epilogues.gate(f).backward()
    sources = tuple(Source(x, x, fmt) for x in ("a", "b", "grad"))
    results = Result("d_a", "out", fmt), Result("d_b", "extra", fmt)
    return rows.fused(made.guarded() if guard else made, fmt, sources, results, (), streams)
for fmt in library.FORMATS:
    for name in ("gelu", "tanh", "gelu_erf"):
        f = get(name).curve
        made = [rows.forward(f, fmt, True, False, None)]
        if name == "gelu":
            made += [
                rows.grad_pre(f, fmt, True, None, True, True, True),
                gate_backward(f, fmt, True),
                gate(f, fmt, True),
                gate_backward(f, fmt, True, True),
            ]
        for row in made:
            assert row.cache_hits == 0
            print(f"==== {fmt} {name} {row.name}")
            print(row.assembly())
"""


@pytest.mark.long
def test_row_functions_are_vector_code_without_calls(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ASSEMBLY],
        capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    _, *listings = done.stdout.split("==== ")
    assert len(listings) == 4 * 7
    wide = {64: "zmm", 32: "ymm"}.get(host.vector_bytes())
    for listing in listings:
        title = listing.partition("\n")[0]
        calls = re.findall(r"^\s+(?:call\w*|bl|blr)\s+(.*)$", listing, re.MULTILINE)
        functions = [call for call in calls if re.search(r"exp|tanh|erf|log|fma|hf2|2hf|bf2", call)]
        assert not functions, f"{title}: calls {functions}"
        if wide is not None:
            assert re.search(rf"^\s+vfn?m(add|sub)\w+p[sd]\s.*%{wide}", listing, re.M), title
            # The quotient in a sigmoid is of vectors too.
            assert re.search(rf"^\s+vdivp[sd]\s.*%{wide}", listing, re.M), title
        if "stream" in title and host.is_x86():
            assert re.search(rf"^\s+v?movnt\w+\s.*%{wide or 'xmm'}", listing, re.M), title


REGISTERS = [
    tiling.registers(width, size, lanes)
    for width, lanes in ((16, False), (16, True), (32, False), (64, False))
    for size in (4, 8)
]
REGISTERS += [tiling.registers(64, 4, kind=kind) for kind in ("dot", "amx")]
sizes = st.one_of(st.integers(1, 300), st.integers(1, 1 << 20))


@given(k=st.integers(0, 1 << 24), itemsize=st.sampled_from((4, 8)))
def test_blocks_of_k_are_even_and_as_few_as_fit(k, itemsize):
    kc = tiling.k_block(k, itemsize)
    limit = tiling.KC[itemsize]
    assert 1 <= kc <= limit
    blocks = -(-k // kc)
    assert blocks == -(-k // limit)
    assert k <= blocks * kc < k + max(1, blocks)


@given(k=st.integers(0, 1 << 24), kind=st.sampled_from(("dot", "amx")))
def test_blocks_of_k_are_whole_steps_and_as_few_as_fit(k, kind):
    kc, limit, step = tiling.k_block(k, 4, kind), tiling.KC_HALVES[kind], tiling.K_STEPS[kind]
    assert limit % step == 0
    assert step <= kc <= limit and kc % step == 0
    blocks = -(-k // limit)
    assert -(-k // kc) <= max(1, blocks) and kc * blocks < k + blocks * step + 1


@given(
    m=sizes, n=sizes, k=sizes, batch=st.integers(1, 50), sums=st.integers(1, 5),
    threads=st.integers(1, 64), r=st.sampled_from(REGISTERS), by_columns=st.booleans(),
    column_sums=st.booleans(),
)  # fmt: skip
@example(  # tiles that do not divide the widest plane
    m=1, n=8161, k=1, batch=1, sums=2, threads=1, by_columns=False, column_sums=False,
    r=next(r for r in REGISTERS if r.nr == 12),
)  # fmt: skip
def test_cells_tile_the_output_within_bounded_workspaces(
    m, n, k, batch, sums, threads, r, by_columns, column_sums
):
    unit = r.chunk if column_sums else r.mr
    t = tiling.gemm(m, n, k, batch, sums, threads, r, unit)
    # The order of summation depends on K and the dtype alone.
    assert t.kc == tiling.k_block(k, r.itemsize, r.kind)
    # Every cell has a part of the output, the last one too.
    assert (t.cells_m - 1) * t.cell_m < m <= t.cells_m * t.cell_m
    assert (t.cells_n - 1) * t.cell_n < n <= t.cells_n * t.cell_n
    # A chunk of the column sums belongs to one cell, and a register tile to one block.
    assert t.cell_m % unit == 0
    assert t.cell_n % r.nr == 0 and t.nc % r.nr == 0
    rows = min(t.cell_m, tiling.round_up(m, r.mr))
    if t.cell_n > t.nc:
        assert t.panels * r.mr >= rows  # kept for the next block of columns
    if sums > 1 or k > t.kc:
        assert t.plane_rows >= rows and t.plane_columns >= min(t.cell_n, tiling.round_up(n, r.nr))
    words, stride = descriptors.layout(t, r, r.column_group if by_columns else 1)
    # The workspace does not grow with the problem: plane, panels, and where K is one block, which
    # may be of one value, a block of B with rows of its width (two strips, and 8 bytes a slot).
    block = 2 * tiling.level2_bytes() * tiling.BLOCK_SHARE
    per_block = 1 + (2 * r.mr * r.itemsize + 8 * protocol.SLOT_COUNT) / r.factor
    bound = tiling.PLANE_BYTES + tiling.PANELS_BYTES + per_block * block + (2 << 20)
    assert stride <= bound
    # Its regions follow each other without overlap.
    panels_end = words["D_PANEL"] + words["D_PANELS"] * words["D_PANEL_STRIDE"]
    scratch_end = words["D_SCRATCH"] + protocol.SLOT_COUNT * words["D_SCRATCH_STRIDE"]
    block_bytes = t.nc // r.nr * (t.kc * r.nr * r.factor + tiling.LINE)
    block_end = words["D_BLOCK"] + words["D_BLOCK_STRIDE"] + block_bytes
    strip_end = words["D_STRIP"] + 2 * r.mr * words["D_STRIP_STRIDE"]
    plane_end = words["D_PLANE"] + t.plane_rows * t.plane_columns * r.itemsize
    assert protocol.CONTEXT_BYTES <= words["D_SCRATCH"] and scratch_end <= words["D_PANEL"]
    assert panels_end <= words["D_BLOCK"] and block_bytes <= words["D_BLOCK_STRIDE"]
    assert block_end <= words["D_STRIP"] and strip_end <= words["D_PLANE"] and plane_end <= stride
    assert words["D_SCRATCH_STRIDE"] >= 8 * t.nc
    assert words["D_PANEL_STRIDE"] >= t.kc * r.panel_rows * r.factor + r.vector_bytes
    assert words["D_STRIP_STRIDE"] >= t.nc * r.itemsize
    assert t.plane_columns % r.nr == 0 and t.plane_rows % r.mr == 0  # whole tiles


@given(m=sizes, n=sizes, r=st.sampled_from(REGISTERS))
def test_elementwise_cells_tile_the_output(m, n, r):
    t = tiling.elementwise(m, n, r.chunk)
    assert (t.cells_m - 1) * t.cell_m < m <= t.cells_m * t.cell_m
    assert (t.cells_n - 1) * t.cell_n < n <= t.cells_n * t.cell_n
    assert t.cell_m % r.chunk == 0
    assert t.nc <= tiling.ROW_BLOCK
    assert t.cell_m * t.cell_n <= 2 * tiling.ELEMENTWISE_CELL + r.chunk * t.cell_n


def test_the_context_has_room_for_what_is_in_it():
    assert 8 * (protocol.STREAM_TABLE + 2 * protocol.STREAM_COUNT) <= protocol.CONTEXT_BYTES


@functools.cache
def narrower(width: int, lanes: bool) -> once.Process | None:
    """All of this file, and whole products, as on a host with such vectors; None for our own."""
    if width >= host.vector_bytes():
        return None
    here = Path(__file__)
    code = f"""
import sys
from numfuse.backends.cpu import host
host.vector_bytes = lambda: {width}
host.multiplies_by_lanes = lambda: {lanes}
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
    # Forward and backward in every dtype, with edges in every direction.
    suite = here.parents[1] / "conformance" / "test_conformance.py"
    names = "thin_deep_and_shallow", "output_fence_is_untouched", "gated_output_fence_is_untouched"
    tests = [str(here), *(f"{suite}::test_{name}" for name in names)]
    chosen = " and not ".join(
        ("cpu", "reference", "cuda", "webgpu", "tile_the_output", "vector_code")
    )
    words = [sys.executable, "-c", code, *tests, "-k", chosen]
    return once.Process(lambda _: words, {"NUMFUSE_TEST_VECTORS": str(width)})


@pytest.mark.skipif("NUMFUSE_TEST_VECTORS" in os.environ, reason="this is the inner run")
@pytest.mark.long
@pytest.mark.parametrize(("width", "lanes"), [(32, False), (16, False), (16, True)])
def test_all_of_this_and_whole_products_on_hosts_with_narrower_vectors(width, lanes):
    process = narrower(width, lanes)
    if process is None:
        pytest.skip(f"the host's own vectors have {host.vector_bytes()} bytes")
    done = process.result()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d\d+ passed", done.stdout, re.MULTILINE), done.stdout[-500:]
