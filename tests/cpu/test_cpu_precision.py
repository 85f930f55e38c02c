"""Products of float32 by parts of bfloat16: packing, bounds, special values, bits, derivatives.

The tests run on the AMX tiles of the host where it has them. The last one runs this file again with
the tiles' instructions emulated, wherever AVX2 is; `test_tiles_are_what_was_asked_for` says which
of them a run had, so that none passes for the other.

Guards: "float32 by AMX tiles" in docs/numerics.md.
"""

from __future__ import annotations

import itertools
import os
import re
import sys

import numba
import numpy as np
import once
import pytest
import weekly
from arrays import address, bits, in_layout
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import KINDS, called, laid_out

import numfuse as nf
from numfuse.backends.cpu import face, host, residues, tiling
from numfuse.backends.cpu.kernels import library
from numfuse.errors import BackendUnavailable

INNER = os.environ.get(host.TILES_VARIABLE)
here = pytest.mark.skipif(
    host.tiles_of_parts() is None, reason=f"no AMX tiles here: {host.tiles_refused('bf16x6')}"
)
MODES = tuple(tiling.PARTS)
#: What the products that are left out may be, of |x| |y|.
LEFT_OUT = {"bf16x6": 2.0**-23, "bf16x3": 2.0**-15}
LAYOUTS = "c", "transposed", "sliced", "inner_sliced", "reversed", "offset"
#: Of both factors' layouts, those that are equal and neighbours: a factor is packed by itself.
PAIRS = [
    (i, j) for i, j in itertools.product(range(6), repeat=2) if weekly.ALL or (j - i) % 6 in (0, 1)
]
SHAPES = (
    (32, 32, 32), (33, 47, 65), (64, 48, 31 + 33), (49, 290, 257), (131, 67, 513), (40, 33, 1100),
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def small_products_go_by_parts_too():
    """Let the shapes of these tests be those of tiles, not those from which on parts are faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "LEAST_SPLIT", dict.fromkeys(MODES, 32))
        yield


def precisely(mode: str) -> face.CpuBackend:
    return nf.use_backend("cpu", precision=mode).backend  # type: ignore[return-value]


def numbers(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def bound(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """The largest error of a product, element by element.

    A step of 32 makes chains of 16 and joins two; 8 steps of six products (16 of three) follow one
    another in a block of K, then the blocks. The magnitudes of the parts are 2^-7 larger at most.
    """
    roundings = 18 + 48 + -(-a.shape[-1] // tiling.KC_HALVES[mode])
    share = LEFT_OUT[mode] + roundings * 2.0**-24 * (1 + 2.0**-6)
    return share * (np.abs(a.astype(float)) @ np.abs(b.astype(float)))


@here
def test_tiles_are_what_was_asked_for():
    a = np.ones((32, 32), np.float32)
    for mode in MODES:
        nf.matmul_bias_activation(a, a, backend=precisely(mode))
        call = nf.last_call()
        assert call is not None
        tiles = "emulated" if INNER == "emulated" else "AMX"
        assert call.tier == f"{mode} by {tiles} tiles"


@here
@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("factor", ["a", "b"])
@pytest.mark.parametrize("mode", MODES)
def test_packed_parts_add_up_to_the_matrix_and_have_zeros_beside_it(mode, factor, layout):
    r, parts = library.registers("float32", mode), tiling.PARTS[mode]
    pack = (library.pack_a if factor == "a" else library.pack_b)("float32", "float32", mode)
    rng, fence = np.random.default_rng(0), 64
    for lines in (1, 2, 15, 16, 17, 31, 32, 33, 81):
        for k in (1, 2, 15, 17, 31, 32, 33, 64, 65):
            x = numbers(rng, (lines, k)) * np.float32(2) ** rng.integers(-90, 90, (lines, k))
            x = x.astype(np.float32)
            view = laid_out(x, layout)
            steps, panels = -(-k // 32), -(-lines // 32)
            panel = steps * 32 * 32 * parts + 32
            target = np.full(fence + panels * panel + fence, 7, np.uint16)
            strides = view.strides if factor == "a" else view.strides[::-1]
            called(pack, 7)(
                address(view), *strides, lines, k, address(target) + 2 * fence, 2 * panel
            )
            for i in range(panels):
                at = fence + i * panel
                own = target[at : at + steps * 32 * 32 * parts]
                assert (target[at + own.size : at + panel] == 7).all()
                live = min(32, lines - 32 * i)
                if factor == "a":
                    planes = own.reshape(steps, parts, 32, 32).transpose(1, 2, 0, 3)
                else:
                    planes = own.reshape(steps, parts, 16, 32, 2).transpose(1, 3, 0, 2, 4)
                planes = planes.reshape(parts, 32, 32 * steps)[:, : tiling.round_up(live, r.vl)]
                wide = (planes.astype(np.uint32) << 16).view(np.float32).astype(float)
                assert (wide[:, live:] == 0).all() and (wide[:, :, k:] == 0).all()
                wanted = x[32 * i : 32 * i + live].astype(float)
                left = np.abs(wide[:, :live, :k].sum(axis=0) - wanted)
                allowed = 0 if parts == 3 else 2.0**-17
                assert (left <= allowed * np.abs(wanted)).all(), (lines, k)
            assert (target[:fence] == 7).all() and (target[-fence:] == 7).all()
            assert r.factor == 2 * parts


@here
@pytest.mark.parametrize("mode", MODES)
def test_products_of_any_layout_are_within_the_bound(mode):
    rng = np.random.default_rng(1)
    for m, n, k in SHAPES:
        a, b = numbers(rng, (m, k)), numbers(rng, (k, n))
        wanted, most = a.astype(float) @ b.astype(float), bound(a, b, mode)
        seen = set()
        for i, j in PAIRS:
            # (one that lies by columns is made as the transpose)
            out = np.full((m, n), np.nan, np.float32, "CF"[j % 2])
            one, two = in_layout(a, LAYOUTS[i]), in_layout(b, LAYOUTS[j])
            nf.matmul_bias_activation(one, two, out=out, backend=precisely(mode))
            assert (np.abs(out - wanted) <= most + 2.0**-24 * np.abs(wanted)).all()
            seen.add(np.ascontiguousarray(out).tobytes())
        assert len(seen) == 1, (m, n, k)


@here
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), low=st.integers(-100, 0), high=st.integers(0, 60))
def test_rows_and_columns_of_any_scale_keep_the_relative_bound(seed, low, high):
    rng = np.random.default_rng(seed)
    a = numbers(rng, (40, 70)) * np.float32(2) ** rng.integers(low, high + 1, (40, 1))
    b = numbers(rng, (70, 33)) * np.float32(2) ** rng.integers(0, 20, (1, 33))
    a, b = a.astype(np.float32), b.astype(np.float32)
    # Parts and products below the normal numbers count as 0.
    tiny = 70 * 2.0**-126 * (1.01 * (np.abs(a).max(1)[:, None] + np.abs(b).max(0)) + 14)
    for mode in MODES:
        out = nf.matmul_bias_activation(a, b, backend=precisely(mode))
        error = np.abs(out - a.astype(float) @ b.astype(float))
        assert (error <= bound(a, b, mode) * (1 + 2.0**-20) + tiny).all()


@here
def test_six_products_err_no_more_than_fused_multiply_adds():
    rng = np.random.default_rng(2)
    for k in (256, 300, 2048):
        for shift in (0, 0.5):
            a = (rng.random((64, k)) - 0.5 + shift).astype(np.float32)
            b = (rng.random((k, 48)) - 0.5 + shift).astype(np.float32)
            wanted = a.astype(float) @ b.astype(float)
            six, ieee = (
                np.linalg.norm(nf.matmul_bias_activation(a, b, backend=backend) - wanted)
                for backend in (precisely("bf16x6"), "cpu")
            )
            assert six <= ieee, (k, shift)


@here
@pytest.mark.parametrize("mode", MODES)
def test_infinities_and_nan_follow_ieee_and_touch_no_other_sum(mode):
    rng = np.random.default_rng(3)
    for k in (40, 600):  # one block of K, and several
        a = rng.integers(1, 5, (37, k)).astype(np.float32)
        b = rng.integers(1, 5, (k, 35)).astype(np.float32)
        clean = nf.matmul_bias_activation(a, b, backend=precisely(mode))
        at = k - 3
        a[3, at], a[5, at], a[7, at], a[20, at] = np.inf, np.nan, -np.inf, 0
        a.view(np.uint32)[9, 2] = 0x7F800001  # a NaN, all of whose bits are in the lower half
        b[at, 1], b[at, 2], b[at, 34] = 0, -1, np.inf
        with np.errstate(invalid="ignore"):
            wanted = a @ b
        assert np.isnan(wanted[3, 1]) and wanted[3, 2] == -np.inf and np.isnan(wanted[20, 34])
        got = nf.matmul_bias_activation(a, b, backend=precisely(mode))
        np.testing.assert_array_equal(got, wanted)
        apart = np.ones(37, bool)
        apart[[3, 5, 7, 9, 20]] = False
        columns = np.ones(35, bool)
        columns[[1, 2, 34]] = False
        assert (got[apart][:, columns] == clean[apart][:, columns]).all()


@here
@pytest.mark.parametrize("mode", MODES)
def test_the_largest_numbers_stay_finite_and_overflow_has_its_sign(mode):
    most = np.finfo(np.float32).max
    a, b = np.zeros((32, 32), np.float32), np.zeros((32, 32), np.float32)
    a[0, 0], a[1, 0], a[2, 0] = most, -most, 2.0**100
    b[0, 0], b[0, 1] = 0.5, 2.0**100 * (1 - 2.0**-10)
    got = nf.matmul_bias_activation(a, b, backend=precisely(mode))
    assert abs(got[0, 0] / (most / 2) - 1) <= LEFT_OUT[mode] and got[1, 0] == -got[0, 0]
    # Low parts have the other sign, and overflow too.
    assert got[0, 1] == np.inf and got[1, 1] == -np.inf and got[2, 1] == np.inf


@here
@pytest.mark.parametrize("mode", MODES)
def test_bits_depend_on_no_thread_row_batch_or_saved_pre_activation(mode):
    rng, backend = np.random.default_rng(4), precisely(mode)
    m, n, k = 715, 141, 1085
    r = library.registers("float32", mode)
    assert m * n * k > tiling.parallel_fmas(r) and k > tiling.k_block(k, 4, mode)
    a, b, bias, grad = (numbers(rng, s) for s in ((m, k), (k, n), (n,), (m, n)))
    a *= np.float32(k**-0.5)

    def everything():
        out, pre = nf.matmul_bias_activation(
            a, b, bias, "silu", return_pre_activation=True, backend=backend
        )
        again = nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend=backend)
        saved = nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "silu", pre_activation=pre, backend=backend
        )
        for one, two in zip(again, saved, strict=True):
            assert (one == two).all()
        return out, *again

    before, results = numba.get_num_threads(), []
    try:
        for threads in sorted({1, 2, before}):
            if threads <= before:
                numba.set_num_threads(threads)
                results.append([bits(x) for x in everything()])
    finally:
        numba.set_num_threads(before)
    for other in results[1:]:
        assert all((x == y).all() for x, y in zip(results[0], other, strict=True))
    out, d_a = results[0][:2]
    for rows in (slice(5, 40), slice(100, 201), slice(-33, None)):
        part = nf.matmul_bias_activation(a[rows], b, bias, "silu", backend=backend)
        assert (bits(part) == out[rows]).all()
        part = nf.matmul_bias_activation_bwd(
            grad[rows], a[rows], b, bias, "silu", backend=backend
        ).d_a
        assert (bits(part) == d_a[rows]).all()
    batch = np.stack([a[:40], a[40:80], a[80:120]])
    part = nf.matmul_bias_activation(batch, b[None], bias, "silu", backend=backend)
    assert (bits(part).reshape(120, n) == out[:120]).all()


def _derivatives(backend, dtype):
    """Results of every kind of call that has products, in this dtype."""
    rng = np.random.default_rng(5)
    m, n, k = 70, 45, 65

    def of(*shape):
        return (rng.standard_normal(shape) / 8).astype(np.float32).astype(dtype)

    a, b, bias, grad = of(m, k), of(k, n), of(n), of(m, n)
    u, v, w = of(m, k), of(k, n), of(n)
    b_up, residual = of(k, n), of(m, n)
    act = "gelu"
    yield "forward", nf.matmul_bias_activation(a, b, bias, act, backend=backend)
    yield "residual", nf.matmul_bias_residual(a, b, bias, residual, backend=backend)
    made = nf.matmul_bias_activation_bwd(grad, a, b, bias, act, backend=backend)
    yield from zip(("d_a", "d_b", "d_bias"), made, strict=True)
    made = nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, act, backend=backend)
    yield from ((f"double {i}", x) for i, x in enumerate(made))
    made = nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, act, backend=backend)
    yield from ((f"jvp {i}", x) for i, x in enumerate(made))
    yield "gated", nf.matmul_activation_mul(a, b, b_up, activation="silu", backend=backend)
    made = nf.matmul_activation_mul_bwd(grad, a, b, b_up, activation="silu", backend=backend)
    yield from ((f"gated {i}", x) for i, x in enumerate(made) if x is not None)
    directions = np.stack([of(m, k), of(m, k)])
    made = nf.matmul_bias_activation_jet(a, b, bias, "tanh", directions, backend=backend)
    yield from ((f"jet {i}", x) for i, x in enumerate(made) if isinstance(x, np.ndarray))
    made = nf.matmul_epilogue(a, b, lambda z, x: z * x, residual, backend=backend)
    yield "formula", made
    batch = np.stack([a, 2 * a])
    yield "batch", nf.matmul_bias_activation(batch, b, bias, act, backend=backend)
    turned = nf.matmul_bias_activation(a[::-1], b[:, ::-1], bias, act, backend=backend)
    yield "strides", turned


@here
@pytest.mark.parametrize("mode", MODES)
def test_derivatives_layers_batches_and_strides_go_by_parts_and_are_right(mode):
    truth = dict(_derivatives("reference", np.float64))
    ieee = dict(_derivatives("cpu", np.float32))
    got = dict(_derivatives(precisely(mode), np.float32))
    assert got.keys() == truth.keys()
    for name, wanted in truth.items():
        size = np.linalg.norm(wanted)
        error = np.linalg.norm(got[name] - wanted) / size
        # Parts leave out so much of a factor in each of two products that follow one another.
        assert error <= (2.0**-20 if mode == "bf16x6" else 2.0**-13), name
        assert not (bits(got[name]) == bits(ieee[name])).all(), f"{name} was not made of parts"


@here
@pytest.mark.parametrize("scale", [1, 2.0**-119])
@pytest.mark.parametrize("mode", [*MODES, "int8"])
def test_sums_over_a_batch_are_those_of_ieee(mode, scale, monkeypatch):
    """They are products with ones: parts would round what they add, and flush small numbers."""
    rng, m, n, k = np.random.default_rng(10), 37, 35, 40
    monkeypatch.setattr(residues, "takes", lambda *_: True)
    dtype = np.float64 if mode == "int8" else np.float32
    a, grad, x = (numbers(rng, (*s, m)).swapaxes(-1, -2) for s in ((3, k), (3, n), (n,)))
    a, grad, x, b = (y.astype(dtype) for y in (a, grad * scale, x, numbers(rng, (k, n))))
    moved, moved_grad = np.stack([a, a]), np.stack([grad, -grad])

    def f(z, x, y):
        return z * z + x * y

    def everything(backend):
        made = nf.matmul_epilogue_bwd(grad, a, b, f, x, x, backend=backend)
        assert ("tiles" in nf.last_call().tier) == (backend != "cpu")
        yield True, made.d_b
        yield from ((False, y) for y in made.d_operands)
        (d_x,) = nf.matmul_epilogue_bwd(
            grad, a, b, lambda z, x: z + x, x, needs=(0,), backend=backend
        ).d_operands
        yield False, d_x
        made = nf.matmul_epilogue_jet_bwd(
            grad, moved_grad, None, a, b, f, (x, x), moved, None, backend=backend
        )
        yield True, made.d_b
        yield from ((False, y) for y in made.d_operands)

    both = zip(everything(precisely(mode)), everything("cpu"), strict=True)
    for (differs, got), (_, wanted) in both:
        assert (bits(got) != bits(wanted)).any() == differs


@here
@pytest.mark.parametrize("mode", [*MODES, "int8"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_rows_that_lie_apart_give_the_bits_of_copies(mode, activation, monkeypatch):
    """They are gathered in blocks, which are those of the precision's K, not of IEEE's (381)."""
    rng, n, k = np.random.default_rng(11), 35, 40
    monkeypatch.setattr(residues, "takes", lambda *_: True)
    dtype = np.float64 if mode == "int8" else np.float32
    a, u, grad = (numbers(rng, (3, 2, 127, x)).swapaxes(0, 1).astype(dtype) for x in (k, k, n))
    b, v = (numbers(rng, (k, n)).astype(dtype) for _ in range(2))

    def everything(grad, a, u):
        backend = precisely(mode)
        yield from nf.matmul_bias_activation_bwd(grad, a, b, None, activation, backend=backend)
        assert "tiles" in nf.last_call().tier
        yield from nf.matmul_bias_activation_double_bwd(
            u, v, None, grad, a, b, None, activation, backend=backend
        )

    apart = (x.copy(order="K") for x in (grad, a, u))
    copies = (np.ascontiguousarray(x) for x in (grad, a, u))
    for got, wanted in zip(everything(*apart), everything(*copies), strict=True):
        assert got is wanted or (bits(got) == bits(wanted)).all()


@here
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("short", [0, 1, 2, None])
def test_small_and_thin_products_and_other_dtypes_are_those_of_ieee(mode, short, monkeypatch):
    rng = np.random.default_rng(6)
    least = {"bf16x6": 96, "bf16x3": 48}
    monkeypatch.setattr(tiling, "LEAST_SPLIT", least)
    m, n, k = (least[mode] - (i == short) for i in range(3))
    if short is None:
        x = numbers(rng, (least[mode],) * 2)
        nf.matmul_bias_activation(x, x, None, "silu", backend=precisely(mode))
        assert nf.last_call().tier.startswith(f"{mode} by ")
        m = 1
    for dtype in (np.float32, np.float64):
        a, b = numbers(rng, (m, k)).astype(dtype), numbers(rng, (k, n)).astype(dtype)
        got = nf.matmul_bias_activation(a, b, None, "gelu", backend=precisely(mode))
        assert "tiles" not in nf.last_call().tier
        wanted = nf.matmul_bias_activation(a, b, None, "gelu", backend="cpu")
        assert (bits(got) == bits(wanted)).all()
    x = np.ones((64, 64))
    nf.matmul_bias_activation(x, x, backend=precisely(mode))
    assert "tiles" not in nf.last_call().tier


@here
def test_a_repeated_call_keeps_the_precision_that_it_was_made_with():
    rng = np.random.default_rng(7)
    a, b = numbers(rng, (64, 100)), numbers(rng, (100, 64))
    seen = {}
    for _ in range(3):
        for mode in ("ieee", *MODES):
            with nf.use_backend("cpu", precision=mode):
                out = nf.matmul_bias_activation(a, b)
            assert (seen.setdefault(mode, out) == out).all()
    assert len({x.tobytes() for x in seen.values()}) == 3
    assert precisely("bf16x6") is precisely("bf16x6")


def test_what_a_processor_lacks_is_said(monkeypatch):
    for name in ("tf32", "int8:7", 3):
        with pytest.raises(
            ValueError, match=r"^precision must be one of 'ieee', 'bf16x6', 'bf16x3', 'int8', "
        ):
            nf.use_backend("cpu", precision=name)
    with pytest.raises(ValueError, match=r"^device must be None for the backend 'cpu', got 1"):
        nf.use_backend("cpu", device=1)
    assert nf.use_backend("cpu", precision="ieee").backend is face.BACKEND
    monkeypatch.setattr(host, "tiles_of_parts", lambda: None)
    monkeypatch.setattr(host, "features", lambda: frozenset({"amx-tile"}))
    told = r"precision 'bf16x6' needs AMX tiles of bfloat16, and .* lacks amx-bf16, avx512bw"
    with pytest.raises(BackendUnavailable, match=told):
        nf.use_backend("cpu", precision="bf16x6")
    monkeypatch.setattr(host, "tiles_of_residues", lambda: None)
    told = r"precision 'int8:14' needs AMX tiles of 8 bits, and .* lacks amx-int8, avx512bw"
    with pytest.raises(BackendUnavailable, match=told):
        nf.use_backend("cpu", precision="int8:14")
    assert face.BACKEND.describe()["precisions"] == "ieee"


_CODE = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
_OTHERS = "test_cpu_residues.py", "../conformance/test_integers.py"
_FILES = [__file__, *(os.path.join(os.path.dirname(__file__), name) for name in _OTHERS)]
_WORDS = [sys.executable, "-c", _CODE, "-q", "-x", "-p", "no:cacheprovider", *_FILES]
_WORDS += ["-k", "not cuda and not errors and not forwards"]  # (these compile much)
EMULATED = once.Process(lambda _: _WORDS, {host.TILES_VARIABLE: "emulated"})


@pytest.mark.skipif(INNER is not None, reason="this is the inner run")
@pytest.mark.skipif(host.vector_bytes() < 32, reason="vectors of 16 bytes take too long")
@pytest.mark.long
def test_all_of_this_with_emulated_tiles():
    done = EMULATED.result()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d\d+ passed, 1 skipped", done.stdout, re.MULTILINE), done.stdout[-500:]
