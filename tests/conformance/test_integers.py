"""float64 products by integers of 8 bits, as users see them: exactness, errors, special values.

Run by the AMX tiles of a processor and on a GPU where there are such, emulated by
`test_cpu_precision` and simulated by `test_cuda_simulator`. Guards: docs/numerics.md, "float64 by
integers".
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import weekly
from conftest import SIMULATED, unavailable
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import poisoned

import numfuse as nf
from numfuse.moduli import Residues, count_of, precisions

#: The unit roundoff, and the sizes of the tests: in the simulator a product takes seconds.
U = 2.0**-53
M, K, N = (5, 33, 7) if SIMULATED else (70, 515, 72)
INF = float("inf")
#: Numbers of moduli, each with kernels of its own: what is usual and the most, and every week more.
COUNTS = (8, 15, 17, 20) if weekly.ALL else (15, 20)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def backend(request):
    """Each backend that has integers; small products run by them too, and memory holds NaN."""
    name, monkeypatch = request.param, pytest.MonkeyPatch()
    status = nf.backends()[name]
    if not status:
        unavailable(name, str(status))
    if name == "cpu":
        from numfuse.backends.cpu import face, host, residues

        if host.tiles_of_residues() is None:
            pytest.skip(f"no AMX tiles here: {host.tiles_refused('int8')}")
        monkeypatch.setattr(residues, "takes", lambda *_: True)
        for precision in precisions():
            face.BACKEND.configure(precision=precision).replay.clear()
        yield name
        monkeypatch.undo()
        return
    from numfuse.backends.cuda.call import entry
    from numfuse.backends.cuda.driver.devices import device
    from numfuse.backends.cuda.kernels.residues import tier

    if not SIMULATED and device(0).capability not in tier.RATES:
        pytest.skip("no product runs by integers on this GPU")
    poisoned(monkeypatch, name)
    monkeypatch.setattr(tier, "seconds", lambda *_: tier.Seconds(1.0, 0.0))
    entry.forget(device(0))
    yield name
    monkeypatch.undo()
    entry.forget(device(0))


@pytest.fixture(scope="module")
def product(backend):
    """``product(a, b, precision)``: a @ b by integers."""

    def made(a, b, precision="int8"):
        with nf.use_backend(backend, precision=precision):
            out = nf.matmul_bias_activation(a, b)
        assert nf.last_call().tier.startswith("int8")
        return out

    return made


def exact(a, b):
    """The product as fractions, whose sums are made of integers."""

    def whole(x):
        fraction, exponent = np.frexp(x)
        least = exponent[fraction != 0].min(initial=1 << 20)
        integers = np.ldexp(fraction, 53).astype(np.int64).astype(object)
        return integers << np.maximum(exponent - least, 0).astype(object), int(least) - 53

    (x, n), (y, p) = whole(a), whole(b)
    return (x @ y) * (Fraction(2) ** (n + p))


def norms(a, b):
    return np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)


def limit(precision):
    return float(np.sqrt(float(Residues(count_of(precision)).square)))


def bound(a, b, precision="int8"):
    """docs/numerics.md: what an error of a product may be, beside the rounding of the result."""
    return (4 * np.sqrt(a.shape[1]) / limit(precision) + 2.0**-75) * norms(a, b)


def within(out, a, b, precision="int8", factor=1.0):
    wanted = exact(a, b)
    error = np.array([[float(abs(Fraction(float(x)) - y)) for x, y in zip(*rows, strict=True)]
                      for rows in zip(out, wanted, strict=True)])  # fmt: skip
    most = factor * bound(a, b, precision) + U * abs(wanted.astype(float)) + 2.0**-1074
    assert (error <= most).all(), (error / most).max()
    return error


def numbers(kind, rng=None):
    rng = rng or np.random.default_rng(5)
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    if kind == "twelve decades":
        a *= 10 ** rng.uniform(-6, 6, a.shape)
        b *= 10 ** rng.uniform(-6, 6, b.shape)
    if kind == "ill-scaled rows":
        a *= 10 ** rng.uniform(-100, 100, (M, 1))
        b *= 10 ** rng.uniform(-100, 100, (1, N))
    return a, b


KINDS = ["normal", "twelve decades", "ill-scaled rows"]


@pytest.mark.parametrize("precision", ["int8", "int8:8", "int8:14", "int8:18", "int8:20"])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_within_their_bound(product, kind, precision):
    a, b = numbers(kind)
    within(product(a, b, precision), a, b, precision)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_below_those_of_native_float64(product, kind):
    a, b = numbers(kind)
    wanted = exact(a, b)

    def worst(out):
        off = [[float(abs(Fraction(float(x)) - y)) for x, y in zip(*rows, strict=True)]
               for rows in zip(out, wanted, strict=True)]  # fmt: skip
        return (np.array(off) / norms(a, b)).max()

    assert worst(product(a, b)) <= worst(a @ b)


@settings(max_examples=4 if SIMULATED else 20)
@given(data=st.data(), bits=st.integers(1, 24), depth=st.integers(1, 24))
def test_products_of_integers_are_exact(product, data, bits, depth):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    a, b = (rng.integers(-(2**bits), 2**bits, s, endpoint=True) for s in ((3, depth), (depth, 5)))
    wanted = a.astype(object) @ b.astype(object)  # below 2^53
    assert (product(a.astype(float), b.astype(float)) == wanted).all()


@settings(max_examples=4 if SIMULATED else 20)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.integers(0, 60),
    count=st.sampled_from(COUNTS),
)
def test_results_are_those_of_the_rounded_integers(product, seed, spread, count):
    """The sum is exact, whatever its size is, and is rounded once."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(s) * 2.0 ** rng.integers(-spread, spread, s, endpoint=True)
            for s in ((3, 11), (11, 4)))  # fmt: skip
    of = Residues(count)

    def scaled(x):
        square = sum(Fraction(float(v)) ** 2 for v in x)
        n = 0
        while square * Fraction(4) ** n <= of.square:
            n += 1
        while square * Fraction(4) ** n > of.square:
            n -= 1
        return n, [round(Fraction(float(v)) * Fraction(2) ** n) for v in x]

    out = product(a, b, f"int8:{count}")
    for i, x in enumerate(map(scaled, a)):
        for j, y in enumerate(map(scaled, b.T)):
            whole = sum(p * q for p, q in zip(x[1], y[1], strict=True))
            scale = Fraction(2) ** (x[0] + y[0])
            error = abs(Fraction(float(out[i, j])) * scale - whole)
            assert error <= abs(whole) * Fraction(U) * (1 + Fraction(2) ** -20) + of.whole / 2**76


def test_infinities_and_nan_are_what_ieee_gives(product):
    a, b = numbers("normal")
    a[1, 3], a[2, 4], a[4, 0] = INF, np.nan, -INF
    b[3, 2], b[5, 1] = 0, -INF
    out = product(a, b)
    with np.errstate(invalid="ignore"):
        wanted = a @ b
    assert (np.isnan(out) == np.isnan(wanted)).all()
    infinite = np.isinf(wanted)
    assert infinite.any() and (out[infinite] == wanted[infinite]).all()
    finite = np.isfinite(wanted)
    # an infinity in one row is nothing to another
    without = product(*(np.where(np.isfinite(x), x, 0) for x in (a, b)))
    assert (out[finite] == without[finite]).all()


def test_zero_rows_and_extremes_of_the_range(product):
    a, b = numbers("normal")
    a[0], b[:, 1] = 0, 0
    a[1] *= 2.0**-1060  # subnormal numbers
    a[2] *= 2.0**1018 / abs(a[2]).max()
    a[3] *= 2.0**-600
    a[4, ::2] *= 2.0**-1000
    b[:, 2] *= 2.0**-20
    out = product(a, b)
    assert (out[0] == 0).all() and (out[:, 1] == 0).all()
    # beyond the range of squares a row's norm is known to a factor of 2 sqrt(K) only
    for row, power in ((0, 0), (4, 0), (2, -1018), (3, 600)):
        given, found = (np.ldexp(x[[row]], power) for x in (a, out))
        within(found, given, b, factor=2 * np.sqrt(K) if power else 1)
    tiny = np.abs(out[1] - exact(a[[1]], b)[0].astype(float))
    assert (tiny <= 2.0**-1074).all()


def test_results_beyond_the_range_are_infinite(product):
    a, b = np.full((2, 4), 2.0**600), np.full((4, 3), -(2.0**600))
    assert (product(a, b) == -INF).all()
    a[0, 0] = 0.0
    assert (product(a, b / 2.0**600) == np.array([[-3 * 2.0**600], [-4 * 2.0**600]])).all()


def test_bits_are_those_of_any_layout_of_any_batch_and_of_any_call(backend):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, M, K)), rng.standard_normal((K, N))
    with nf.use_backend(backend, precision="int8"):
        out = nf.matmul_bias_activation(a, b)
        for i in range(2):
            for x in (a[i], np.asfortranarray(a[i])):
                for y in (b, np.asfortranarray(b)):
                    assert (nf.matmul_bias_activation(x, y) == out[i]).all()
            # a row is nothing to another, nor is a column
            assert (nf.matmul_bias_activation(a[i, 1:3], b[:, 2:]) == out[i, 1:3, 2:]).all()


def test_forwards_residuals_gradients_and_jets_run_by_integers(backend):
    rng = np.random.default_rng(4)
    a, b = numbers("normal")
    bias, grad, residual = (rng.standard_normal(s) for s in (N, (M, N), (M, N)))
    u, v, w = (rng.standard_normal(x.shape) for x in (a, b, bias))
    moved = rng.standard_normal((2, M, K))
    calls = [
        lambda how: [nf.matmul_bias_activation(a, b, bias, "gelu", **how)],
        lambda how: [nf.matmul_bias_residual(a, b, bias, residual, **how)],
        lambda how: nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh", **how),
        lambda how: nf.matmul_bias_activation_double_bwd(
            u, v, w, grad, a, b, bias, "tanh", **how
        ),
        lambda how: nf.matmul_bias_activation_jet(a, b, bias, "tanh", moved, **how),
    ]  # fmt: skip
    for call in calls:
        with nf.use_backend(backend, precision="int8"):
            given = call({})
        assert "int8" in nf.last_call().tier
        for x, y in zip(given, call({"backend": "reference"}), strict=True):
            if y is not None:
                assert abs(x - y).max() <= 32 * (K + M + N) * U * max(abs(y).max(), 1.0)


def test_float32_is_as_it_was(backend):
    a, b = (x.astype(np.float32) for x in numbers("normal"))
    with nf.use_backend(backend, precision="int8"):
        out = nf.matmul_bias_activation(a, b)
        assert "int8" not in nf.last_call().tier
    assert (out == nf.matmul_bias_activation(a, b, backend=backend)).all()


@pytest.mark.parametrize("precision", ["int8:7", "int8:21", "int8:", "int8:x", "int9"])
def test_a_number_of_moduli_that_is_none_is_refused(backend, precision):
    told = r"'int8', 'int8:8' to 'int8:20' or None( for the backend 'cpu')?, got 'int"
    with pytest.raises(ValueError, match=told):
        nf.use_backend(backend, precision=precision)
