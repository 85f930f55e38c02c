"""A call of every tier and every pass, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_cuda.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize_cuda.py

Arrays are NumPy's, so each operand is a block of the pool, and results are compared with the CPU's.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

import numfuse as nf

#: (dtype, M, K, N): aligned for the fast tiers, odd for their masks, deep for sums in parts.
CASES = (
    ("float32", 136, 72, 264), ("float32", 37, 29, 41), ("float32", 2048, 16, 24),
    ("float64", 136, 72, 72), ("float64", 37, 29, 41), ("bfloat16", 264, 136, 264),
    ("bfloat16", 37, 29, 41), ("bfloat16", 4096, 64, 64), ("float16", 136, 72, 136),
)  # fmt: skip


def main() -> None:
    """Run them all; an AssertionError where a result is off."""
    rng = np.random.default_rng(0)
    tiers = set()
    for name, m, k, n in CASES:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        shapes = (m, k), (k, n), (n,), (m, n)
        a, b, bias, grad = ((rng.standard_normal(s) * s[0] ** -0.5).astype(dtype) for s in shapes)
        found = []
        for backend in ("cuda", "cpu"):
            out = nf.matmul_bias_activation(a, b, bias, "gelu", backend=backend)
            tiers.add(nf.last_call().tier)
            first = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", backend=backend)
            tiers.add(nf.last_call().tier)
            gated = nf.silu_mul_bwd(grad, grad, grad, backend=backend)
            found.append((out, *first, nf.silu_mul(grad, grad, backend=backend), *gated))
        tolerance = {"float64": 1e-12, "float32": 1e-4}.get(name, 3e-2)
        for x, y in zip(*found, strict=True):
            x, y = x.astype(np.float64), y.astype(np.float64)
            assert np.abs(x - y).max() <= tolerance * max(1.0, np.abs(y).max()), (name, m, k, n)
        print(name, m, k, n, "done", flush=True)
    print("tiers:", ", ".join(sorted(tiers)))


if __name__ == "__main__":
    main()
