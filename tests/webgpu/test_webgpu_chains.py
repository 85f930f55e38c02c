"""Products of few blocks: each chain of a sum is a plane, and planes have the bits of the sum."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import bits, normal
from conftest import served
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.tiling import CHAIN, CHAINS, TILES

#: Below the least, at it, and with a chain that is not full.
DEPTHS = CHAIN * CHAINS, CHAIN * CHAINS + 37


@pytest.fixture
def dispatched(webgpu_device, monkeypatch):
    """The labels of what new calls dispatch; none is known."""
    from numfuse.backends.webgpu.device.commands import Commands

    labels, dispatch = [], Commands.dispatch

    def told(self, shader, *how):
        labels.append(shader.label)
        dispatch(self, shader, *how)

    def forget():
        webgpu_device.programs.clear()
        webgpu_device.hosted.clear()
        labels.clear()

    monkeypatch.setattr(Commands, "dispatch", told)
    forget()
    yield labels, forget
    forget()


def whole_and_cut(call, dispatched, monkeypatch):
    """Return the results of a call without and with planes of chains, and what was dispatched."""
    labels, forget = dispatched
    found = []
    for cut in (False, True):
        forget()
        with monkeypatch.context() as patch:
            if cut:
                patch.setattr(
                    tiling, "chained",
                    lambda m, n, k, *_: tiling.CPU_TILE if k >= CHAIN * CHAINS else None,
                )  # fmt: skip
            else:  # (a device of many units may cut K by itself)
                patch.setattr(tiling, "chained", lambda *_: None)
            made = call()
        found.append((made if isinstance(made, tuple) else (made,), list(labels)))
    return found


@pytest.mark.parametrize(
    "dtype, k, batch",
    [("float32", DEPTHS[1], ()), ("float16", DEPTHS[0], (3,)), ("float64", DEPTHS[1], (2, 1))],
)
def test_planes_of_chains_have_the_bits_of_whole_sums(dispatched, monkeypatch, dtype, k, batch):
    if dtype not in served("webgpu"):
        pytest.skip(f"the device has no {dtype}")
    rng, dtype = np.random.default_rng(1), DTYPES[dtype]
    m, n = 5, 36
    a, b = normal(rng, (*batch, m, k), dtype), normal(rng, (k, n), dtype, k**-0.5)
    if batch:
        b = np.broadcast_to(b, (*batch, k, n)).copy()
    bias, residual = normal(rng, (n,), dtype), normal(rng, (*batch, m, n), dtype)

    def forward():
        return nf.matmul_bias_activation(
            a, b, bias, "silu", return_pre_activation=True, backend="webgpu"
        )

    def sums():
        return nf.matmul_bias_activation(a, b, None, "none", backend="webgpu")

    def added():
        return nf.matmul_bias_residual(a, b, bias, residual, backend="webgpu")

    calls = {"float32": (forward, sums), "float16": (forward,), "float64": (added,)}
    for call in calls[dtype.name]:
        (whole, one), (cut, several) = whole_and_cut(call, dispatched, monkeypatch)
        assert not any("join plain" in label for label in one)
        assert sum("join plain" in label for label in several) == 1
        for x, y in zip(whole, cut, strict=True):
            assert (bits(x) == bits(y)).all()


def test_a_backward_of_few_rows_has_the_bits_of_whole_sums(dispatched, monkeypatch):
    """Its pre-activation is a sum over K, and d_a one over N."""
    rng, dtype = np.random.default_rng(2), np.dtype(np.float32)
    m, k, n = 6, *DEPTHS
    a, grad = normal(rng, (m, k), dtype), normal(rng, (m, n), dtype)
    b, bias = np.asfortranarray(normal(rng, (k, n), dtype, k**-0.5)), normal(rng, (n,), dtype)

    def backward():
        return nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend="webgpu")

    (whole, _), (cut, labels) = whole_and_cut(backward, dispatched, monkeypatch)
    assert sum("join plain" in label for label in labels) == 2
    for x, y in zip(whole, cut, strict=True):
        assert (bits(x) == bits(y)).all()


@pytest.mark.parametrize("itemsize", [4, 8])
def test_products_with_blocks_enough_are_not_cut(itemsize):
    """Guards: cuts where they keep a device busy, and none for the sake of a plane's traffic."""

    def chained(m, n, k, count=1, cpu=False):
        return tiling.chained(m, n, k, count, itemsize, 48 << 10, 1024, cpu)

    middle, flat, small = TILES[1:]
    assert chained(64, 4096, 4096).block_m == middle.block_m
    assert chained(32, 4096, 4096).block_m == flat.block_m
    assert chained(1, 4096, 4096).block_n == flat.block_n
    assert chained(1, 1, 1 << 16).block_n == small.block_n
    assert chained(300, 100, 7000).block_m >= middle.block_m
    assert chained(64, 4096, CHAIN * (CHAINS - 1)) is None  # short sums
    assert chained(64, 4096, 4096, cpu=True) is None
    assert chained(64, 4096, 4096, count=4) is None  # a batch has blocks enough
    assert chained(64, 4096, 1 << 20) is None  # planes of 1 GiB
    for size in (1000, 2048, 4096):
        assert chained(size, size, size) is None
    # a device that holds less takes smaller tiles
    least = tiling.chained(64, 4096, 4096, 1, itemsize, 16384, 256, False)
    assert tiling._workgroup_bytes(least, least.block_k, itemsize) <= 16384


def test_no_tile_is_mostly_empty():
    """Guards: a block of few rows costs what a full one does."""

    def tile(m, n):
        found = tiling.tile(m, n, 4, 48 << 10, 1024, False)
        return found.block_m, found.block_n

    large, middle, flat, small = ((x.block_m, x.block_n) for x in TILES)
    assert tile(4096, 4096) == tile(65, 40000) == large
    assert tile(65536, 40) == tile(40, 65536) == tile(64, 40000) == middle
    assert tile(32, 20000) == tile(1, 20000) == flat
    assert tile(65536, 1) == tile(65536, 15) == tile(1, 1) == small
