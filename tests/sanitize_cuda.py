"""A call of every tier and every pass, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_cuda.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize_cuda.py

Arrays are NumPy's, so each operand is a block of the pool, and results are compared with those of
the reference backend. Numbers behind it are those of the cases to run, the blocks that are forced
after the others; without the sanitizer, a run compiles what they need into the disk cache.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import numfuse as nf
from numfuse.backends.cuda import tiling

#: (dtype, M, K, N): aligned for the fast tiers, odd for their masks, deep for sums in parts, few
#: rows of the kernels for these.
CASES = (
    ("float32", 136, 72, 264), ("float32", 37, 29, 41), ("float32", 2048, 16, 24),
    ("float64", 136, 72, 72), ("float64", 37, 29, 41), ("bfloat16", 264, 136, 264),
    ("bfloat16", 37, 29, 41), ("bfloat16", 4096, 64, 64), ("float16", 136, 72, 136),
    ("float32", 3, 516, 520), ("float32", 19, 512, 516), ("float32", 40, 520, 544),
    ("float64", 5, 512, 520), ("float64", 13, 1030, 1031), ("float64", 50, 1024, 1032),
    ("bfloat16", 65, 71, 69), ("float32", 65, 67, 129),
)  # fmt: skip
#: The same for float32 on tensor cores: (precision, tolerance).
PRECISIONS = (("bf16x6", 2e-5), ("tf32", 1e-2))
#: Blocks of Hopper's that only larger sizes choose: each is made to take a forward and a backward.
FORCED = (
    *((tile, "ieee", "bfloat16", 392, 200, 520) for tile, _ in tiling.HOPPER_TILES),
    *((tile, "bf16x6", "float32", 392, 200, 264) for tile, _ in tiling.HOPPER_SPLIT_TILES),
)  # fmt: skip


def main() -> None:
    """Run them all; an AssertionError where a result is off."""
    from numfuse.backends.cuda.kernels.hopper import factors
    from numfuse.backends.cuda.kernels.hopper import tier as hopper

    # what large products do, for small ones: tensor cores for float32, copies of factors whose
    # rows are not aligned, or lie the other way
    hopper.hopper_splits = lambda *_: True
    factors.HOPPER_COPY = 1
    tiling.TURN_USES, tiling.COPY_USES = (64, 64), 64
    rng = np.random.default_rng(0)
    tolerances = {"float64": 1e-12, "float32": 1e-4}
    tiers: set[str] = set()
    chosen = [int(word) for word in sys.argv[1:]] or range(len(CASES) + len(FORCED))
    for number in chosen:
        if number >= len(CASES):
            forced(*FORCED[number - len(CASES)], rng)
            continue
        name, m, k, n = CASES[number]
        operands = random_operands(rng, name, m, k, n)
        wanted = results("reference", *operands, set())
        compare(results("cuda", *operands, tiers), wanted, tolerances.get(name, 3e-2))
        if name == "float32":
            for precision, tolerance in PRECISIONS:
                with nf.use_backend("cuda", precision=precision):
                    compare(results(None, *operands, tiers), wanted, tolerance)
        print(name, m, k, n, "done", flush=True)
    print("tiers:", ", ".join(sorted(tiers)))


def random_operands(rng: Any, name: str, m: int, k: int, n: int) -> list[np.ndarray]:
    """a, b, bias and grad."""
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    shapes = (m, k), (k, n), (n,), (m, n)
    return [(rng.standard_normal(s) * s[0] ** -0.5).astype(dtype) for s in shapes]


def forced(
    tile: tiling.HopperTile, precision: Any, name: str, m: int, k: int, n: int, rng: Any
) -> None:
    """A forward and a backward with every product in blocks of one tile."""
    from numfuse.backends.cuda.call import entry
    from numfuse.backends.cuda.driver.devices import device
    from numfuse.backends.cuda.kernels.hopper import tier as hopper

    a, b, bias, grad = random_operands(rng, name, m, k, n)
    found = []
    entry.forget(device())
    with mock.patch.object(hopper, "hopper_tile", lambda *sizes, **features: (tile, 1)):
        for backend in ("reference", "cuda"):
            asked = {} if backend == "reference" else {"precision": precision}
            with nf.use_backend(backend, **asked):
                results = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
                found.append([nf.matmul_bias_activation(a, b, bias, "gelu"), *results])
        assert str(tile) in str(nf.last_call().tiling), nf.last_call()
    entry.forget(device())
    compare(found[1], found[0], 3e-2 if name == "bfloat16" else 2e-5)
    print(tile, precision, name, m, k, n, "done", flush=True)


def results(
    backend: str | None, a: Any, b: Any, bias: Any, grad: Any, tiers: set[str]
) -> list[np.ndarray]:
    """Of the functions of every order; which tiers took them is added to `tiers`."""
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
        assert np.abs(x - y).max() <= tolerance * max(1.0, np.abs(y).max()), i


if __name__ == "__main__":
    main()
