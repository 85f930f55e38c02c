"""float64 products by AMX tiles of 8 bits: residues, cells, which products are made so, bits.

What users are promised is in tests/conformance/test_integers.py. Both files run on the tiles of the
host where it has them, and emulated in a process of `test_cpu_precision`. Guards: "float64 by
integers" in docs/numerics.md.
"""

from __future__ import annotations

import itertools

import numba
import numpy as np
import pytest
from arrays import address, bits, in_layout
from hypothesis import given, settings
from hypothesis import strategies as st

import numfuse as nf
from numfuse import moduli
from numfuse.backends.cpu import host, residues, tiling
from numfuse.backends.cpu.kernels import library
from numfuse.backends.cpu.launch import sequence
from numfuse.backends.cpu.llvm import residue_sums
from numfuse.backends.cpu.llvm import residues as integers
from numfuse.moduli import Residues

pytestmark = pytest.mark.skipif(
    host.tiles_of_residues() is None, reason=f"no AMX tiles here: {host.tiles_refused('int8')}"
)
LAYOUTS = "c", "transposed", "sliced", "inner_sliced", "reversed", "offset"
OF = Residues(15)
#: The largest sum of 32 bits that K allows.
MOST = residues.MOST_K * 128 * 128
TAKES = residues.takes


@pytest.fixture(autouse=True, scope="module")
def every_product_goes_by_integers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residues, "takes", lambda *_: True)
        yield


def by_integers(a, b, *rest, count=15, **options):
    with nf.use_backend("cpu", precision=f"int8:{count}"):
        out = nf.matmul_bias_activation(a, b, *rest, **options)
    call = nf.last_call()
    tiles = "emulated" if host.tiles_of_residues() == "emulated" else "AMX"
    assert call is not None and call.tier == f"int8 by {tiles} tiles"
    return out


# --- residues -------------------------------------------------------------------------------------
def panels_of(x: np.ndarray, by_rows: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the residues of the rows of x, (moduli, rows, K), and the exponents."""
    count, k = x.shape
    lines = sequence.operand("x", x)
    factor = residues._Factor("own", lines, OF, by_rows, (), ())
    panels, steps = -(-count // integers.PANEL), -(-k // integers.STEP)
    planes = np.full((panels, OF.count, steps * 2048 + integers.GAP), 7, np.int8)
    exponents = np.full(panels * 32 + 4, -7.0)
    program = sequence.program(("x", "own residues", "own exponents"), [[[(factor.plan(1), {})]]])
    assert planes.nbytes == factor.planes.shape[0] * factor.planes.shape[1] * 8
    sequence.run(program, (x, planes, exponents))
    assert (exponents[panels * 32 :] == -7).all() and (planes[..., steps * 2048 :] == 7).all()
    planes = planes[..., : steps * 2048].reshape(panels, OF.count, steps, 32, 64)
    if by_rows:
        found = planes.transpose(1, 0, 3, 2, 4)
    else:  # four values of K of 32 columns, side by side
        found = planes.reshape(panels, OF.count, steps, 16, 32, 4).transpose(1, 0, 4, 2, 3, 5)
    return found.reshape(OF.count, panels * 32, steps * 64), exponents[: panels * 32]


@pytest.mark.parametrize("by_rows", [True, False], ids=["a", "b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_factor_becomes_its_residues_in_any_layout(layout, by_rows):
    rng = np.random.default_rng(0)
    for count, k in ((1, 1), (7, 63), (32, 64), (33, 65), (65, 200)):
        x = rng.standard_normal((count, k)) * 2.0 ** rng.integers(-300, 300, (count, 1))
        x *= 2.0 ** rng.integers(-40, 1, x.shape)
        found, exponents = panels_of(in_layout(x, layout), by_rows)
        assert (exponents[count:] == 0).all()
        for i, n in enumerate(exponents[:count]):
            whole = [round(v) for v in np.ldexp(x[i].astype(np.longdouble), int(n))]
            square = sum(v * v for v in whole)
            assert OF.square / 4 * (1 - 2.0**-10) < square <= OF.square * (1 + 2.0**-10)
            for own, p in zip(found[:, i], OF.moduli, strict=True):
                assert all((int(r) - v) % p == 0 for r, v in zip(own, whole, strict=False))
        assert not found[:, :count, k:].any()


def _called(made: object, *arguments: int) -> None:
    """Call an intrinsic."""
    names = ", ".join(f"a{i}" for i in range(len(arguments)))
    scope: dict[str, object] = {"made": made}
    exec(f"def call({names}):\n    made({names})", scope)
    numba.njit(scope["call"])(*arguments)


@pytest.mark.parametrize("count", [8, 20])
def test_sums_become_bytes(count):
    """Every size of sum, multiples of the modulus and what is next to the middle of two of them."""
    of, rng = Residues(count), np.random.default_rng(1)
    sums = np.zeros((32, 32), np.int32)
    out = np.zeros(1024 + 64, np.uint8)
    for t, p in enumerate(of.moduli):
        flat = sums.reshape(-1)
        flat[:] = rng.integers(-MOST, MOST, flat.size, endpoint=True)
        flat[:512] >>= rng.integers(0, 31, 512)
        near = flat[512:768] // p * p
        flat[512:768] = near + rng.integers(0, p, 256)
        flat[768:832] = near[:64] // 2 * 2 + p // 2
        flat[832:840] = -MOST, MOST, 0, -1, 1, p, -p, 2**15
        out[:] = 9
        _called(residue_sums.make_reduce(of), address(sums), t, address(out))
        assert (out[:1024] == (flat.astype(np.int64) % p)).all()
        assert (out[1024:] == 9).all()


# --- products -------------------------------------------------------------------------------------
SHAPES = ((1, 1, 1), (31, 33, 64), (97, 65, 129), (40, 450, 70), (450, 40, 65), (33, 35, 2100))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_same_bits_in_any_layout_and_are_right(shape):
    m, n, k = shape
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    wanted = (a.astype(np.longdouble) @ b.astype(np.longdouble)).astype(float)
    norms = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)
    seen = set()
    for one, two in itertools.product(LAYOUTS, LAYOUTS[:4]):
        out = np.full((m, n), np.nan)
        by_integers(in_layout(a, one), in_layout(b, two), out=out)
        most = 4 * k**0.5 / float(OF.square) ** 0.5 * norms
        assert (np.abs(out - wanted) <= most + 2.0**-52 * np.abs(wanted)).all()
        seen.add(bits(out).tobytes())
    assert len(seen) == 1


def test_bits_depend_on_no_thread_cell_or_saved_pre_activation(monkeypatch):
    rng = np.random.default_rng(3)
    m, n, k = 700, 200, 300
    a, b, bias, grad = (rng.standard_normal(s) for s in ((m, k), (k, n), (n,), (m, n)))

    def everything():
        how = {"activation": "silu"}
        out, pre = by_integers(a, b, bias, "silu", return_pre_activation=True)
        with nf.use_backend("cpu", precision="int8"):
            again = nf.matmul_bias_activation_bwd(grad, a, b, bias, **how)
            saved = nf.matmul_bias_activation_bwd(grad, a, b, bias, pre_activation=pre, **how)
        for one, two in zip(again, saved, strict=True):
            assert (one == two).all()
        return [bits(x) for x in (out, *again)]

    before, results = numba.get_num_threads(), []
    try:
        for threads in sorted({1, 2, before}):
            if threads <= before:
                numba.set_num_threads(threads)
                results.append(everything())
    finally:
        numba.set_num_threads(before)
    monkeypatch.setattr(tiling, "RESIDUE_CELL", 64)
    with nf.use_backend("cpu", precision="int8") as chosen:
        chosen.replay.clear()
    results.append(everything())
    for other in results[1:]:
        assert all((x == y).all() for x, y in zip(results[0], other, strict=True))


@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 30), shape=st.sampled_from([(2, 3), (3, 1), (1, 2)]))
def test_batches_and_their_sums(seed, shape):
    """Factors that lack axes of the batch, in any order of memory; gradients summed over axes."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((*shape[::-1], 40, 50)).transpose(1, 0, 2, 3)
    b = rng.standard_normal((shape[1], 50, 33))
    grad = rng.standard_normal((*shape, 40, 33))
    out = by_integers(a, b)
    for i, j in np.ndindex(shape):
        assert (out[i, j] == by_integers(a[i, j], b[j])).all()
    with nf.use_backend("cpu", precision="int8"):
        got = nf.matmul_bias_activation_bwd(grad, a, b, None, "tanh")
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, None, "tanh", backend="reference")
    for x, y in zip(got, wanted, strict=True):
        if y is not None:
            assert np.abs(x - y).max() <= 2.0**-44 * np.abs(y).max()


def test_a_line_is_scaled_by_the_norm_over_all_that_is_summed():
    """Products that are summed over a batch share a scale, so that their sum fits the moduli."""
    rng = np.random.default_rng(4)
    a, grad = rng.standard_normal((3, 2, 40, 50)), rng.standard_normal((3, 2, 40, 33))
    a, grad = a.transpose(1, 0, 2, 3) * 2.0 ** np.arange(0, -60, -20)[:, None, None], grad
    grad = grad.transpose(1, 0, 2, 3)
    b = rng.standard_normal((50, 33))
    with nf.use_backend("cpu", precision="int8"):
        got = nf.matmul_bias_activation_bwd(grad, a, b).d_b
    wanted = np.einsum("xyik,xyij->kj", a, grad)
    assert np.abs(got - wanted).max() <= 2.0**-48 * np.abs(wanted).max()


@pytest.mark.parametrize("members", [1, 3])
def test_gradients_of_a_jet(members):
    """Rows of a point stay together in a cell, and column sums have whole chunks of points."""
    rng = np.random.default_rng(7)
    m, k, n = 260, 40, 33
    a, b, bias = (rng.standard_normal(s) for s in ((m, k), (k, n), (n,)))
    moved, twice = rng.standard_normal((members, m, k)), rng.standard_normal((1, m, k))
    grad, grad_dot, grad_ddot = (rng.standard_normal((*s, m, n)) for s in ((), (members,), (1,)))
    weights = np.ones((1, members))
    call = (grad, grad_dot, grad_ddot, a, b / k**0.5, bias, "tanh", moved, twice)
    with nf.use_backend("cpu", precision="int8"):
        got = nf.matmul_bias_activation_jet_bwd(*call, weights=weights)
    native = nf.matmul_bias_activation_jet_bwd(*call, weights=weights, backend="cpu")
    assert (got.d_b != native.d_b).any()  # (made of integers, then)
    wanted = nf.matmul_bias_activation_jet_bwd(*call, weights=weights, backend="reference")
    for x, y in zip(got, wanted, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert np.abs(x - y).max() <= 2.0**-40 * np.abs(y).max()


def test_operands_and_results_are_fenced():
    """Nothing beside a result is written, whatever cells and panels overhang."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((45, 70)), rng.standard_normal((70, 37))
    room = np.full((49, 41), 7.0)
    by_integers(a, b, out=room[2:47, 2:39])
    fenced = np.ones(room.shape, bool)
    fenced[2:47, 2:39] = False
    assert (room[fenced] == 7).all() and (room[2:47, 2:39] == by_integers(a, b)).all()


# --- which products -------------------------------------------------------------------------------
def test_small_thin_and_long_products_are_native(monkeypatch):
    monkeypatch.setattr(residues, "takes", TAKES)
    rng = np.random.default_rng(6)
    for m, k, n in ((700, 700, 700), (8, 4096, 4096), (4096, 16, 512)):
        a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
        with nf.use_backend("cpu", precision="int8:16"):
            out = nf.matmul_bias_activation(a, b)
        assert "int8" not in nf.last_call().tier
        assert (out == nf.matmul_bias_activation(a, b, backend="cpu")).all()


def test_large_products_are_taken_and_more_moduli_later():
    least = {}
    for count in (8, 15, 20):
        sizes = [n for n in range(64, 16384, 64) if TAKES(n, n, n, f"int8:{count}")]
        assert sizes == list(range(sizes[0], 16384, 64))
        least[count] = sizes[0]
    assert 64 < least[8] < least[15] < least[20] < 4096
    assert not TAKES(4096, 4096, residues.MOST_K + 1, "int8")
    assert residues.MOST_K * 128 * 128 < 2**31


def test_the_constants_of_a_quotient_leave_room():
    """What `reduce` says of float32: sums of a half word and a product stay below 2^22.1."""
    for p in moduli.MODULI:
        power = abs(integers.balanced(1 << 16, p))
        most = 2**15 * power + 2**15 + p
        assert most < 2**22.1
        assert most / p * 2.0**-24 < 1 / (2 * p)


def test_kernels_of_one_number_of_moduli_are_made_once():
    assert library.panel_cell(OF, True) is library.panel_cell(Residues(15), True)
    assert library.residue_cell(OF) is library.residue_cell(Residues(15))
