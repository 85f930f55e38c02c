"""Sums over K that are cut into parts, in every operation on a CUDA device.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from arrays import bits
from conftest import SIMULATED, unavailable
from on_device import poisoned

import numfuse as nf
from numfuse import expr as ex

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))

M, N, K = (5, 9, 70) if SIMULATED else (19, 21, 3000)  # (fewer have kernels of their own)
DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.fixture(autouse=True)
def memory_holds_nan(monkeypatch):
    poisoned(monkeypatch, "cuda")


def draw(dtype, *shapes):
    rng = np.random.default_rng(3)
    return [(rng.standard_normal(s) * s[0] ** -0.5).astype(dtype) for s in shapes]


def parts(x):
    return [z for y in x for z in parts(y)] if isinstance(x, (tuple, list)) else [x]


def check(function, *arguments, **options):
    """Compare with the reference, and a repeated call with the first; return the results.

    A sum of K terms of size K^-1/2 is off by sqrt(K) u of them, and what is made of it by some u.
    """
    found = parts(function(*arguments, **options, backend="cuda"))
    assert "K in" in str(nf.last_call().tiling)
    again = parts(function(*arguments, **options, backend="cuda"))
    wanted = parts(function(*arguments, **options, backend="reference"))
    for x, y, wide in zip(found, again, wanted, strict=True):
        assert (x is None) == (wide is None)
        if x is not None:
            assert (bits(x) == bits(y)).all()
            unit, size = float(ml_dtypes.finfo(wide.dtype).eps), max(1, abs(wide).max())
            error = abs(x.astype(np.float64) - wide.astype(np.float64)).max()
            assert error <= 8 * unit * size * max(4, K**0.5 if unit < 1e-3 else 4)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_forwards_and_what_they_keep(dtype):
    a, b, bias, residual = draw(dtype, (M, K), (K, N), (N,), (M, N))
    out, pre = check(nf.matmul_bias_activation, a, b, bias, "gelu", return_pre_activation=True)
    alone = nf.matmul_bias_activation(a, b, bias, "gelu", backend="cuda")
    bare = nf.matmul_bias_activation(a, b, bias, backend="cuda")
    # a sum has the same bits whatever is made of it
    assert (bits(alone) == bits(out)).all() and (bits(bare) == bits(pre.astype(dtype))).all()
    check(nf.matmul_bias_residual, a, b, bias, residual)
    check(nf.matmul_bias_activation, a, b.T.copy().T, None, "tanh")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradients_are_the_same_alone_and_together(dtype):
    grad, a, b, bias = draw(dtype, (M, N), (M, K), (K, N), (N,))
    whole = check(nf.matmul_bias_activation_bwd, grad, a, b, bias, "silu")
    for i, name in enumerate(("a", "b", "bias")):
        one = nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "silu", needs=(name,), backend="cuda"
        )  # fmt: skip
        assert (bits(one[i]) == bits(whole[i])).all(), name


def test_batches_formulas_gated_layers_jets_and_second_order():
    a, b, c, bias, column = draw(np.float32, (2, M, K), (K, N), (K, N), (N,), (M, 1))
    check(nf.matmul_bias_activation, a, b, bias, "relu", return_pre_activation=True)
    one = a[0]
    check(nf.matmul_epilogue, one, b, lambda z, x, y: ex.tanh(z + x) * y, bias, column)
    grad, u, v = draw(np.float32, (M, N), (M, K), (K, N))
    check(nf.matmul_epilogue_bwd, grad, one, b, lambda z, x, y: ex.tanh(z + x) * y, bias, column)
    check(nf.matmul_activation_mul, one, b, c, bias, bias, "silu", return_pre_activation=True)
    check(nf.matmul_activation_mul_bwd, grad, one, b, c, bias, bias, "silu")
    check(nf.matmul_bias_activation_jet, one, b, bias, "tanh", a)
    check(nf.matmul_bias_activation_double_bwd, u, v, bias, grad, one, b, bias, "tanh")
