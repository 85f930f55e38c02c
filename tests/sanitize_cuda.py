"""A call of every tier and every pass, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_cuda.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize_cuda.py

Arrays are NumPy's, so each operand is a block of the pool, and results are compared with those of
the reference backend. Numbers behind it are those of the cases to run, the blocks that are forced
after the others, then whole networks; without the sanitizer, a run compiles what they need into the
disk cache.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import numfuse as nf
from numfuse.adapters import cuda_whole
from numfuse.backends.cuda.call.entry import forget
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.kernels.ampere import copies
from numfuse.backends.cuda.kernels.hopper import factors
from numfuse.backends.cuda.kernels.hopper import tier as hopper
from numfuse.backends.cuda.kernels.hopper.tiling import (
    HOPPER_SPLIT_TILES,
    HOPPER_TILES,
    HopperTile,
)
from numfuse.backends.cuda.kernels.residues import tier as residues

#: (dtype, M, K, N): aligned for the fast tiers, odd for their masks, deep for sums in parts, few
#: rows of the kernels for these; the members of a batch that share a block; sums without terms.
CASES = (
    ("float32", 136, 72, 264), ("float32", 37, 29, 41), ("float32", 2048, 16, 24),
    ("float64", 136, 72, 72), ("float64", 37, 29, 41), ("bfloat16", 264, 136, 264),
    ("bfloat16", 37, 29, 41), ("bfloat16", 4096, 64, 64), ("float16", 136, 72, 136),
    ("float32", 3, 516, 520), ("float32", 19, 512, 516), ("float32", 40, 520, 544),
    ("float64", 5, 512, 520), ("float64", 13, 1030, 1031), ("float64", 50, 1024, 1032),
    ("bfloat16", 65, 71, 69), ("float32", 65, 67, 129), ("float32", 7, 5, 9, 1100),
    ("float32", 70, 37, 3), ("float64", 5, 301, 70), ("bfloat16", 3, 2050, 77),
    ("float32", 37, 0, 41),
)  # fmt: skip
#: The same for float32 on tensor cores, and for float64 by integers: (precision, tolerance).
PRECISIONS = {
    "float32": (("bf16x6", 2e-5), ("bf16x3", 1e-4), ("tf32", 1e-2)),
    "float64": (("int8", 1e-12), ("int8:18", 1e-12)),
}
#: Blocks of Hopper's that only larger sizes choose: each is made to take a forward and a backward.
FORCED = (
    *((tile, "ieee", "bfloat16", 392, 200, 520) for tile, _ in HOPPER_TILES),
    *((tile, "bf16x6", "float32", 392, 200, 264) for tile, _ in HOPPER_SPLIT_TILES),
    *(
        (tile, "int8", "float64", 392, 200, 264)
        for tile, _ in HOPPER_TILES if tile.block_n % 64 == 0
    ),
)  # fmt: skip
#: Whole networks of device arrays: (dtype, points, widths), with and without accesses of 16 bytes.
NETWORKS = (
    ("bfloat16", 700, (64, 64, 64, 32)), ("float16", 333, (5, 24, 40, 3)),
    ("float32", 333, (3, 24, 40, 3)), ("float64", 333, (3, 24, 40, 3)),
)  # fmt: skip


@contextlib.contextmanager
def as_large_products() -> Iterator[None]:
    """Run small products as large ones.

    Float32 goes to tensor cores, float64 to integers, and factors whose rows are not aligned, or
    lie the other way, are copied before.
    """
    with (
        mock.patch.object(hopper, "hopper_splits", lambda *_: True),
        mock.patch.object(residues, "seconds", lambda *_: residues.Seconds(1.0, 0.0)),
        mock.patch.object(factors, "copy_pays", lambda *sizes: True),
        mock.patch.object(copies, "pays", lambda *sizes: True),
    ):
        yield


@contextlib.contextmanager
def in_blocks_of(tile: HopperTile) -> Iterator[None]:
    """Make every product on Hopper in blocks of one tile."""
    with (
        mock.patch.object(hopper, "hopper_tile", lambda *sizes, **features: (tile, 1)),
        mock.patch.object(hopper, "hopper_cut", lambda *_: None),
        mock.patch.object(residues, "hopper_tile", lambda *sizes, **features: (tile, 1)),
    ):
        yield


def main() -> None:
    """Run them all; an AssertionError where a result is off."""
    rng = np.random.default_rng(0)
    tiers: set[str] = set()
    every = [*CASES, *FORCED, *NETWORKS]
    chosen = [int(word) for word in sys.argv[1:]] or range(len(every))
    with as_large_products():
        for number in chosen:
            if number < len(CASES):
                small(*every[number], rng, tiers)
            elif number < len(CASES) + len(FORCED):
                forced(*every[number], rng)
            else:
                network(*every[number], rng)
    print("tiers:", ", ".join(sorted(tiers)))


def small(name: str, m: int, k: int, n: int, *others: Any) -> None:
    """Check the functions of every order, in every precision; add the tiers that took them.

    `others` are the members of a batch, where there is one, the generator and the tiers.
    """
    *batch, rng, tiers = others
    operands = random_operands(rng, name, m, k, n, *batch)
    wanted = results("reference", *operands, set())
    tolerance = {"float64": 1e-12, "float32": 1e-4}.get(name, 3e-2)
    compare(results("cuda", *operands, tiers), wanted, tolerance)
    for precision, tolerance in PRECISIONS.get(name, ()):
        with nf.use_backend("cuda", precision=precision):
            compare(results(None, *operands, tiers), wanted, tolerance)
    print(name, m, k, n, "done", flush=True)


def random_operands(rng: Any, name: str, m: int, k: int, n: int, *batch: int) -> list[np.ndarray]:
    """Return a, b, bias and grad."""
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    shapes = (*batch, m, k), (*batch, k, n), (n,), (*batch, m, n)
    return [(rng.standard_normal(s) * max(s[len(s) // 3], 1) ** -0.5).astype(dtype) for s in shapes]


def forced(tile: HopperTile, precision: Any, name: str, m: int, k: int, n: int, rng: Any) -> None:
    """Check a forward and a backward with every product in blocks of one tile."""
    a, b, bias, grad = random_operands(rng, name, m, k, n)
    found = []
    forget(device())
    with in_blocks_of(tile):
        for backend in ("reference", "cuda"):
            asked = {} if backend == "reference" else {"precision": precision}
            with nf.use_backend(backend, **asked):
                results = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
                found.append([nf.matmul_bias_activation(a, b, bias, "gelu"), *results])
        assert str(tile) in str(nf.last_call().tiling), nf.last_call()
    forget(device())
    compare(found[1], found[0], 3e-2 if name == "bfloat16" else 2e-5)
    print(tile, precision, name, m, k, n, "done", flush=True)


def network(name: str, points: int, widths: tuple[int, ...], rng: Any) -> None:
    """Check a network's value and gradients, by a kernel each."""
    pairs = list(itertools.pairwise(widths))
    operands = [random_operands(rng, name, points, k, n) for k, n in pairs]
    weights, biases = [w for _, w, _, _ in operands], [bias for _, _, bias, _ in operands]
    x, grad = operands[0][0], operands[-1][-1]
    found = []
    needs = "x", "weights", "biases"
    with mock.patch.multiple(cuda_whole, ENABLED=True, HALF=True):
        for there in (lambda y: y, lambda y: nf.to_device(y, "cuda")):
            given = there(x), list(map(there, weights)), list(map(there, biases)), "tanh"
            value = nf.mlp(*given)
            d_x, d_weights, d_biases = nf.mlp_bwd(there(grad), *given, needs=needs)
            found.append([nf.to_numpy(y) for y in (value, d_x, *d_weights, *d_biases)])
    assert "network backward" in nf.last_call().kernel, nf.last_call()
    compare(found[1], found[0], {"float64": 1e-12, "float32": 1e-4}.get(name, 5e-2))
    print(name, points, widths, "done", flush=True)


def results(
    backend: str | None, a: Any, b: Any, bias: Any, grad: Any, tiers: set[str]
) -> list[np.ndarray]:
    """Return the results of the functions of every order; add the tiers that took them."""
    found = [nf.matmul_bias_activation(a, b, bias, "gelu", backend=backend)]
    tiers.add(str(nf.last_call().tier))
    found += nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", backend=backend)
    tiers.add(str(nf.last_call().tier))
    found += nf.matmul_bias_activation_jvp(a, b, bias, a, b, bias, "gelu", backend=backend)
    found += nf.matmul_bias_activation_double_bwd(
        a, b, bias, grad, a, b, bias, "gelu", backend=backend
    )
    found += [nf.silu_mul(grad, grad, backend=backend)]
    found += nf.silu_mul_bwd(grad, grad, grad, backend=backend)
    found += nf.activation_mul_double_bwd(grad, grad, grad, grad, grad, "silu", backend=backend)
    return found


def compare(found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> None:
    """Raise AssertionError where a result is off."""
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.abs(x - y).max(initial=0.0) <= tolerance * np.abs(y).max(initial=1.0), i


if __name__ == "__main__":
    main()
