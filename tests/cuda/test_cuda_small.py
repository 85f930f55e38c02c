"""Batches of small products: which are taken, and that members have their own bits and values.

What runs is run in the simulator by `test_cuda_simulator`, and on a GPU where there is one.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf

try:
    from cuda_devices import AMPERE, HOPPER, TURING

    from numfuse.backends.cuda.kernels import small
    from numfuse.backends.cuda.plan import tiers
    from numfuse.backends.cuda.plan.product import Operand, Product
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

running = pytest.mark.skipif(not nf.backends()["cuda"], reason=str(nf.backends()["cuda"]))
planning = pytest.mark.skipif(SIMULATED, reason="the simulator has no intrinsics")
DTYPES = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip


def product(places, m, k, n, dtype, **features):
    acc = "float64" if dtype == "float64" else "float32"
    lay = [Operand(dtype, (r * c, c, 1), 16) for r, c in ((m, k), (k, n), (m, n))]
    return Product(m, n, k, places, *lay, acc, **features)


def tier_of(*sizes, info=HOPPER, **features):
    return tiers.choose(product(*sizes, **features), info)[0].name


@planning
@pytest.mark.parametrize("info", [HOPPER, AMPERE, TURING], ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_members_that_are_smaller_than_a_tile_are_taken(dtype, info):
    """Guards: a batch of tiny products does not wait for a block of each (docs/cuda.md)."""
    for sizes in ((1000, 20, 16, 16), (5000, 1, 7, 3), (1 << 17, 8, 8, 8), (2000, 32, 16, 32)):
        tier, plan = tiers.choose(product(*sizes, dtype), info)
        assert tier.name == "small", sizes
        (launch,) = plan.launches
        assert launch.shared_bytes <= small.SHARED_BYTES
        # every multiprocessor has blocks, and these together have all members
        group = int(plan.tiling.partition(" ")[0])
        assert launch.grid[0] == -(-sizes[0] // group) >= info.multiprocessors
        assert group * -(-sizes[1] // 4) * -(-sizes[3] // 4) <= small.THREADS
        assert tiers.ways(product(*sizes, dtype), info) is not None
    assert tier_of(1000, 20, 16, 16, dtype=dtype, info=info, free=True) == "small"


@planning
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_members_and_larger_ones_are_not(dtype):
    for sizes in ((16, 777, 257, 130), (100, 20, 16, 16), (9000, 33, 4, 4), (9000, 32, 32, 32),
                  (1, 8, 8, 8), (9000, 8, 0, 8)):  # fmt: skip
        assert tier_of(*sizes, dtype=dtype) != "small", sizes
    if dtype == "float32":  # tensor cores would not speed them up
        assert tier_of(1000, 20, 16, 16, dtype=dtype, precision="tf32") == "small"
        assert tier_of(1000, 200, 160, 160, dtype=dtype, precision="tf32") == "wgmma"


@pytest.fixture
def in_the_simulator(monkeypatch):
    """More threads a block than the simulator takes by itself, for members of several tiles."""
    if SIMULATED:
        monkeypatch.setattr(small, "SIMULATED_THREADS", 16)
        from numfuse.backends.cuda.call import entry

        entry.forget()


def laid(x, layout):
    """The same values, with another order of their axes in memory."""
    if layout == "turned":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "strided":
        whole = np.zeros((*x.shape[:-2], 2 * x.shape[-2], 3 * x.shape[-1]), x.dtype)
        whole[..., ::2, ::3] = x
        return whole[..., ::2, ::3]
    return x


@running
@pytest.mark.parametrize("layout", ["rows", "turned", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_members_have_the_values_and_the_bits_that_they_have_alone(dtype, layout, in_the_simulator):
    count, m, k, n = (33, 7, 5, 6) if SIMULATED else (2000, 20, 16, 15)
    rng = np.random.default_rng(4)
    shapes = ((count, m, n), (count, m, k), (count, k, n), (n,))
    grad, a, b, bias = (rng.standard_normal(s).astype(DTYPES[dtype]) for s in shapes)
    there = [nf.to_device(laid(x, layout) if x.ndim > 1 else x, "cuda") for x in (grad, a, b)]
    there.append(nf.to_device(bias, "cuda"))
    out, pre = nf.matmul_bias_activation(*there[1:], "tanh", return_pre_activation=True)
    assert nf.last_call().tier == "small"
    given = nf.matmul_bias_activation_bwd(*there, "tanh")
    assert "small" in nf.last_call().tier
    wide = np.float64 if dtype == "float64" else np.float32
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}.get(dtype, 2.0**-8)
    x, y, c, g = (z.astype(np.float64) for z in (a, b, bias, grad))
    z = x @ y + c
    eps = np.finfo(wide).eps
    # gamma_(K+1) of the sum, and a store
    bound = 2 * (k + 2) * eps * (abs(x) @ abs(y) + abs(c))
    assert (abs(nf.to_numpy(pre) - z) <= bound).all()
    value = nf.to_numpy(out)
    assert (abs(value.astype(np.float64) - np.tanh(z)) <= bound + 2 * unit).all()
    slope = g * (1 - np.tanh(z) ** 2)
    # What a slope is off: tanh' changes by less than z, and has some roundings. The products read
    # grad_pre of 16-bit operands rounded once more, the sums of columns do not.
    off = abs(g) * (bound + 16 * eps)
    stored = off + unit * abs(slope)
    left, right = x.swapaxes(1, 2), y.swapaxes(1, 2)
    # (NumPy's own sum over two axes adds 40,000 values one by one: in float64 that is off by more)
    columns = np.array([math.fsum(column) for column in slope.reshape(-1, n).T])
    # of each sum: its value, the squares of what its terms are off, its terms' sizes and number
    sums = (
        (slope @ right, stored**2 @ right**2, abs(slope) @ abs(right), n),
        (left @ slope, left**2 @ stored**2, abs(left) @ abs(slope), m),
        # the rows of a member; the join of all members rounds once (docs/numerics.md)
        (columns, (off**2).sum((0, 1)), abs(slope).sum((0, 1)), m),
    )
    for part, (exact, squares, sizes, terms) in zip(given, sums, strict=True):
        # terms are off in any direction: the root of their squares; then gamma of the additions,
        # and a store
        most = 4 * np.sqrt(squares) + (terms + 4) * eps * sizes + 2 * unit * abs(exact)
        assert (abs(nf.to_numpy(part).astype(np.float64) - exact) <= most).all()
    if dtype in ("float32", "float64") and SIMULATED:
        one = [nf.to_device(laid(x, layout)[3], "cuda") for x in (a, b)]
        alone = nf.to_numpy(nf.matmul_bias_activation(*one, there[3], "tanh"))
        assert nf.last_call().tier == "mirror"
        np.testing.assert_array_equal(alone, value[3])


@running
@pytest.mark.parametrize("group", [1, 3, 4])
def test_groups_of_any_size_and_one_weight_of_all_members(group, in_the_simulator, monkeypatch):
    count, m, k, n = (33, 8, 6, 3) if SIMULATED else (3001, 8, 6, 9)
    monkeypatch.setattr(small, "_most", lambda product, threads: group)
    monkeypatch.setattr(small, "_takes", lambda product, info: True)
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((count, m, k)), rng.standard_normal((1, k, n))
    turned = a.swapaxes(0, 1).copy().swapaxes(0, 1)
    there = nf.to_device(turned, "cuda"), nf.to_device(np.repeat(b, count, 0), "cuda")
    got = nf.to_numpy(nf.matmul_bias_activation(*there))
    assert f"{group} members" in nf.last_call().tiling
    assert abs(got - a @ b).max() < 1e-14
