"""How far long sums are off on an NVIDIA GPU: numfuse beside PyTorch and numfuse's CPU backend.

    python asv_benches/cuda_errors.py              every kernel's own shapes
    python asv_benches/cuda_errors.py f32 wgmma    rows whose name holds one of these

Errors are relative, in the Frobenius norm, against sums in extended precision (float64 operands) or
in float64, in units of the accumulator's roundoff u (2^-24 or 2^-53). Of 16-bit operands the saved
pre-activation is looked at, which is the float32 sum itself, and PyTorch's is `torch.mm` with
float32 for a result. A row ends in "<--" where the error of float32 or float64 is more than twice
that of the CPU backend, or a 16-bit product beyond the bound in docs/numerics.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import numfuse as nf
from numfuse.backends.cuda.kernels.mirror import MIRROR
from numfuse.backends.cuda.plan import tiers

U = {"f32": 2.0**-24, "f64": 2.0**-53, "bf16": 2.0**-24, "f16": 2.0**-24}
KINDS = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
}  # fmt: skip
#: (name, dtype, precision, (M, K, N)): K is the length of the sum.
FORWARD = (
    *(("cores", "f32", "ieee", (300, k, 100)) for k in (256, 512, 2048, 7000, 100_000)),
    ("cores, many blocks", "f32", "ieee", (2048, 7000, 2048)),
    ("cores, value by value", "f32", "ieee", (101, 7001, 99)),
    *(("few rows", "f32", "ieee", (m, k, 512)) for m in (1, 16, 64) for k in (7000, 100_000)),
    *(("tensor cores", "f64", "ieee", (128, k, 64)) for k in (2048, 7000, 100_000)),
    ("tensor cores, clusters", "f64", "ieee", (32, 16_384, 1024)),
    ("few rows", "f64", "ieee", (4, 20_000, 512)),
    *(("wgmma bf16x6", "f32", "bf16x6", (2048, k, 2048)) for k in (2048, 7000, 65_536)),
    *(("wgmma tf32", "f32", "tf32", (2048, k, 2048)) for k in (2048, 65_536)),
    *(("wgmma", d, "ieee", (512, k, 256)) for d in ("bf16", "f16") for k in (2048, 7000, 100_000)),
    *(("mma.sync", d, "ieee", (101, k, 99)) for d in ("bf16", "f16") for k in (2049, 7001)),
)
MIRRORED = (
    ("mirror", "f32", "ieee", (300, 7000, 96)), ("mirror", "f32", "ieee", (64, 100_000, 48)),
    ("mirror", "f64", "ieee", (64, 7000, 48)),
)  # fmt: skip
#: (dtype, (M, K, N)) of backwards: d_b and d_bias sum over M.
BACKWARD = (
    ("f32", (100_000, 64, 48)), ("f32", (1_000_000, 16, 32)), ("f32", (7000, 300, 100)),
    ("f64", (100_000, 64, 48)), ("bf16", (100_000, 64, 64)),
)  # fmt: skip


def drawn(kind: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return rng.standard_normal(shape) if kind == "normal" else rng.uniform(0, 1, shape)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> Any:
    """A @ B: in float64 on the device, or in extended precision on the host."""
    if a.dtype != torch.float64:
        return (a.double() @ b.double()).cpu().numpy()
    return a.cpu().numpy().astype(np.longdouble) @ b.cpu().numpy().astype(np.longdouble)


def off(got: Any, exact: Any, u: float) -> float:
    """The relative error in the Frobenius norm, in u."""
    if isinstance(got, torch.Tensor):
        got = got.double().cpu().numpy()
    wide = np.asarray(got).astype(exact.dtype)
    return float(np.linalg.norm(wide - exact) / np.linalg.norm(exact)) / u


def row(
    what: str, ours: float, peer: float | None, cpu: float | None, limit: float | None = None
) -> None:
    """A line of the table; `limit` in place of twice the CPU's error."""
    if limit is None and cpu is not None:
        limit = 2 * cpu
    flag = " <--" if limit is not None and ours > limit else ""
    cells = " | ".join("-" if x is None else f"{x:.2f}" for x in (ours, peer, cpu))
    print(f"| {what} | {cells} |{flag}", flush=True)


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns; None where this PyTorch has none of it."""
    try:
        return call()
    except (RuntimeError, TypeError) as reason:
        print(f"  ({type(reason).__name__}: {str(reason)[:80]})")
        return None


def forward(name: str, dtype: str, precision: str, shape: tuple[int, int, int], kind: str) -> None:
    """The sum over K of a forward, of which PyTorch has the product alone."""
    m, k, n = shape
    half = dtype in ("bf16", "f16")
    a, b = (torch.from_numpy(drawn(kind, *x)).to("cuda", KINDS[dtype]) for x in ((m, k), (k, n)))
    u, exact = U[dtype], exact_product(a, b)
    with nf.use_backend("cuda", precision=precision):
        _, pre = nf.matmul_bias_activation(a, b, None, "none", return_pre_activation=True)
    tier = nf.last_call()
    if half:
        peer = attempt(lambda: torch.mm(a, b, out_dtype=torch.float32))
        host = [x.float().cpu().numpy() for x in (a, b)]
    else:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        peer = attempt(lambda: torch.mm(a, b))
        host = [x.cpu().numpy() for x in (a, b)]
    cpu = nf.matmul_bias_activation(*host, backend="cpu") if m * k * n < 1e10 else None
    limit = None
    if half or precision == "tf32":
        # 16 (tf32: 8) products at a time, cut off at 2^-22 of the magnitudes
        size = float(torch.linalg.norm(a.double().abs() @ b.double().abs()))
        limit = (k / (16 if half else 8) + 4) * 4 * size / float(np.linalg.norm(exact))
        if precision == "tf32":
            limit += 2.0**13 * size / float(np.linalg.norm(exact))
    row(
        f"{dtype} {name} | {m}x{k}x{n} {kind} | {tier.tier}",
        off(pre, exact, u),
        None if peer is None else off(peer, exact, u),
        None if cpu is None else off(cpu, exact, u),
        limit,
    )


def backward(dtype: str, shape: tuple[int, int, int], kind: str) -> None:
    """The sums over M of a backward, and that over N."""
    m, k, n = shape
    grad, a, b = (
        torch.from_numpy(drawn(kind, *x)).to("cuda", KINDS[dtype]) for x in ((m, n), (m, k), (k, n))
    )
    bias = torch.zeros(n, device="cuda", dtype=KINDS[dtype])
    found = nf.matmul_bias_activation_bwd(grad, a, b, bias, "none")
    tier = nf.last_call()
    host = [x.double() if dtype == "f64" else x.float() for x in (grad, a, b)]
    host = [x.cpu().numpy() for x in host]
    cpu = nf.matmul_bias_activation_bwd(*host, np.zeros(n, host[0].dtype), "none", backend="cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    peers = grad @ b.t(), a.t() @ grad, grad.sum(0)
    wide = grad.cpu().double().numpy().astype(np.longdouble)
    exact = exact_product(grad, b.t()), exact_product(a.t(), grad), wide.sum(0)
    # a 16-bit gradient is rounded at the store: in units of its own, of which it may have one
    u = {"bf16": 2.0**-9}.get(dtype, U[dtype])
    limit = 1.0 if dtype == "bf16" else None
    for name, x, peer, y, z in zip(("d_a", "d_b", "d_bias"), found, peers, cpu, exact, strict=True):
        what = f"{dtype} {name} | {m}x{k}x{n} {kind} | {tier.tier}"
        row(what, off(x, z, u), off(peer, z, u), off(y, z, u), limit)


def main() -> None:
    words = sys.argv[1:]

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    print("| kernel | sizes | tier | ours / u | PyTorch | CPU |\n|---|---|---|---|---|---|")
    for kind in ("normal", "positive"):
        for name, dtype, precision, shape in FORWARD:
            if wanted(f"{dtype} {name}"):
                forward(name, dtype, precision, shape, kind)
        for dtype, shape in BACKWARD:
            if wanted(f"{dtype} backward"):
                backward(dtype, shape, kind)
    known, tiers.TIERS = tiers.TIERS, (MIRROR,)
    for kind in ("normal", "positive"):
        for name, dtype, precision, shape in MIRRORED:
            if wanted(f"{dtype} {name}"):
                forward(name, dtype, precision, shape, kind)
    tiers.TIERS = known


if __name__ == "__main__":
    main()
