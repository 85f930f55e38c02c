"""Precision as a dial on a processor with AMX: times and errors beside oneDNN and OpenBLAS.

    python asv_benches/cpu_precision.py                      16 cores: some 120 s
    python asv_benches/cpu_precision.py --threads 1 2 --sizes 1024 2048
    python asv_benches/cpu_precision.py --dtype float64 --sizes 2048 4096
    python asv_benches/cpu_precision.py --json docs/history/precision.json

float32: IEEE products, "bf16x6" and "bf16x3"; float64: IEEE and integers with 14 and 15 moduli,
where these are taken. PyTorch's float32 at the precision "highest", which is oneDNN's (sgemm of MKL
where PyTorch was built so), its float64, and NumPy's product alone. A forward has a
bias and gelu (PyTorch's in a buffer of its own, and in place). A backward makes the pre-activation
again, then d_a, d_b and d_bias: three products for everybody.

Bare products of one size, float64 too, are the figures that `--json` keeps (precision_records.py):
beside numfuse's modes those of NumPy (OpenBLAS) and of PyTorch, strict and at the precision
"medium", where oneDNN rounds the factors to bfloat16.

Turns are interleaved, figures are medians. Every result is held against float64 first: 64 rows of
the forward and of d_a, 64 columns of d_b; errors are Frobenius norms, relative, in units of 2^-24.
Ratios are PyTorch's time over numfuse's: 2 is twice as fast.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from precision_records import STRICT, with_shares, write
from threadpoolctl import threadpool_limits

import numfuse as nf

MODES = {"float32": ("ieee", "bf16x6", "bf16x3"), "float64": ("ieee", "int8:14", "int8:15")}
UNITS = {"float32": 2.0**-24, "float64": 2.0**-53}
#: How far a result may be off, in units, if not 64: what a mode promises and its activation adds.
ALLOWED = {"bf16x3": 512}
SAMPLE = 64
#: Seconds between contestants with threads of their own.
REST = 0.2
Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def operands(m: int, n: int, k: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(m + n + k)
    made = {"grad": (m, n), "a": (m, k), "b": (k, n), "bias": (n,)}
    x = {name: rng.standard_normal(shape).astype(dtype) for name, shape in made.items()}
    # Pre-activations of size 1: far out, gelu' is subnormal and slows down who computes it.
    x["a"] *= x["a"].dtype.type(k**-0.5)
    return x


def warm(mode: str, dtype: str) -> None:
    """Compile the kernels of a mode to the cache on disk."""
    x = operands(*(3 * [2048 if mode.startswith("int8") else 128]), dtype)
    for forward, backward in ours(x, (mode,)).values():
        forward()
        backward()


def ours(x: dict[str, np.ndarray], modes: tuple[str, ...]) -> Calls:
    a, b, bias, grad = x["a"], x["b"], x["bias"], x["grad"]
    out = np.empty_like(grad)
    results = np.empty_like(a), np.empty_like(b), np.empty_like(bias)
    calls: Calls = {}
    for mode in modes:
        backend = nf.use_backend("cpu", precision=mode).backend

        def forward(backend: Any = backend) -> np.ndarray:
            nf.matmul_bias_activation(a, b, bias, "gelu", out=out, backend=backend)
            return out

        def backward(backend: Any = backend) -> Any:
            nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", out=results, backend=backend)
            return results

        calls[mode] = forward, backward
    return calls


def theirs(x: dict[str, np.ndarray]) -> Calls:
    a, b, bias, grad = (torch.from_numpy(x[name]) for name in ("a", "b", "bias", "grad"))
    out, pre = torch.empty_like(grad), torch.empty_like(grad)
    d_a, d_b = torch.empty_like(a), torch.empty_like(b)

    def forward() -> Any:
        torch.addmm(bias, a, b, out=out)
        return torch.ops.aten.gelu_(out, approximate="tanh").numpy()

    def backward() -> Any:
        torch.addmm(bias, a, b, out=pre)
        g = torch.ops.aten.gelu_backward(grad, pre, approximate="tanh")
        torch.mm(g, b.t(), out=d_a)
        torch.mm(a.t(), g, out=d_b)
        return d_a.numpy(), d_b.numpy(), g.sum(0).numpy()

    return {"torch": (forward, backward)}


def errors(x: dict[str, np.ndarray], calls: Calls) -> dict[str, list[float]]:
    """Relative errors of out, d_a and d_b of each, in units; more than allowed is an error."""
    wide = {name: value.astype(float) for name, value in x.items()}
    a, b, bias, grad = (wide[name] for name in ("a", "b", "bias", "grad"))
    few, unit = slice(0, SAMPLE), UNITS[x["a"].dtype.name]
    out = nf.matmul_bias_activation(a[few], b, bias, "gelu", backend="reference")
    d_a = nf.matmul_bias_activation_bwd(
        grad[few], a[few], b, bias, "gelu", needs=("a",), backend="reference"
    ).d_a
    d_b = nf.matmul_bias_activation_bwd(
        grad[:, few], a, b[:, few], bias[few], "gelu", needs=("b",), backend="reference"
    ).d_b
    found = {}
    for name, (forward, backward) in calls.items():
        got = forward()[few].copy()
        back = backward()
        pairs = (got, out), (back[0][few], d_a), (back[1][:, few], d_b)
        found[name] = [
            float(np.linalg.norm(one - two) / np.linalg.norm(two)) / unit for one, two in pairs
        ]
        if not max(found[name]) <= (most := ALLOWED.get(name, 64)):
            raise SystemExit(f"{name} is off by {found[name]} units, at most {most}")
    return found


def turns(calls: dict[Any, Callable[[], Any]], seconds: float, threads: int) -> dict[Any, float]:
    """Median seconds of each call, by turns, for about so many seconds in all.

    With several threads each turn comes after a rest and a call that is not timed: idle threads of
    another library look for work for 0.13 s, on the same cores (docs/performance/processor.md).
    """
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, call in calls.items():
            if threads > 1:
                time.sleep(REST)
                call()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) for name, own in times.items()}


def measured(m: int, n: int, k: int, dtype: str, threads: int, seconds: float) -> dict[str, Any]:
    x = operands(m, n, k, dtype)
    calls = theirs(x) | ours(x, MODES[dtype])
    off = errors(x, calls)
    product = np.empty((m, n), dtype)
    forward = {name: pair[0] for name, pair in calls.items()}
    forward["numpy product"] = lambda: np.matmul(x["a"], x["b"], out=product)
    backward = {name: pair[1] for name, pair in calls.items()}
    return {
        "shape": (m, n, k),
        "dtype": dtype,
        "threads": threads,
        "errors": off,
        "forward": turns(forward, seconds, threads),
        "backward": turns(backward, seconds, threads),
    }


def product_of(library: str, mode: str, x: np.ndarray, y: np.ndarray) -> Callable[[], Any]:
    """Return a call that makes x @ y and returns it as an array of NumPy."""
    out = np.empty((len(x), y.shape[1]), x.dtype)
    if library == "NumPy":
        return lambda: np.matmul(x, y, out=out)
    if library == "numfuse":
        backend = nf.use_backend("cpu", precision=mode).backend
        return lambda: nf.matmul_bias_activation(x, y, out=out, backend=backend)
    a, b, c = (torch.from_numpy(z) for z in (x, y, out))

    def run() -> Any:
        torch.set_float32_matmul_precision("highest" if mode == STRICT else mode)
        torch.mm(a, b, out=c)
        torch.set_float32_matmul_precision("highest")
        return out

    return run


def dial(size: int, threads: int, seconds: float) -> list[dict[str, Any]]:
    """Return a record of each mode's bare product of normal operands of this size."""
    rng = np.random.default_rng(size)
    wide = rng.standard_normal((2, size, size))
    rows = np.linspace(0, size - 1, 4).astype(int)
    calls, found = {}, {}
    for dtype, modes in MODES.items():
        x, y = wide.astype(dtype)
        exact = x[rows].astype(np.longdouble) @ y.astype(np.longdouble)
        norms = np.linalg.norm(x[rows].astype(float), axis=1)[:, None] * np.linalg.norm(
            y.astype(float), axis=0
        )
        ways = [("PyTorch", STRICT), ("NumPy", STRICT), *(("numfuse", mode) for mode in modes)]
        if dtype == "float32":
            ways.append(("PyTorch", "medium"))
        for way in ways:
            call = product_of(*way, x, y)
            off = float((np.abs(call()[rows] - exact) / norms).max())
            if not off <= ALLOWED.get(way[1], 64) * UNITS[dtype] and way[1] != "medium":
                raise SystemExit(f"{way} is off by {off}")
            calls[(dtype, *way)] = call
            found[(dtype, *way)] = off
    times = turns(calls, seconds, threads)
    device = nf.use_backend("cpu").backend.describe()["device"]
    device = f"{device}, {threads} thread{'s' * (threads > 1)}"
    records: dict[str, list[dict[str, Any]]] = {}
    for (dtype, library, mode), off in found.items():
        spent = times[dtype, library, mode]
        records.setdefault(dtype, []).append(
            {
                "device": device, "library": library, "mode": mode,
                "dtype": dtype, "operation": "forward", "epilogue": "none", "kind": "normal",
                "shape": (size,) * 3, "threads": threads, "error": off, "seconds": spent,
                "tflops": 2 * size**3 / spent / 1e12, "source": "cpu_precision.py",
            }
        )  # fmt: skip
    return [row for some in records.values() for row in with_shares(some)]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page's table: milliseconds, and in brackets PyTorch's time over each."""
    modes = MODES[rows[0]["dtype"]]
    names = ("torch", "numpy product", *modes)
    lines = [
        f"| M x N x K | threads | pass | {' | '.join(names)} | errors of out, d_a, d_b: torch | "
        f"{' | '.join(modes)} |",
        "|" + "---|" * (3 + len(names) + 1 + len(modes)),
    ]
    for row in rows:
        for which in ("forward", "backward"):
            times = row[which]
            cells = [
                f"{1e3 * times[x]:.2f} ({times['torch'] / times[x]:.2f})" if x in times else ""
                for x in names
            ]
            off = [" ".join(f"{e:.1f}" for e in row["errors"][x]) for x in ("torch", *modes)]
            size = " x ".join(map(str, row["shape"]))
            lines.append(f"| {size} | {row['threads']} | {which} | {' | '.join([*cells, *off])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--dtype", choices=MODES, default="float32")
    parser.add_argument("--threads", type=int, nargs="*", default=[numba.get_num_threads()])
    parser.add_argument("--seconds", type=float, default=3, help="of each pass of a shape")
    parser.add_argument("--dial", type=int, default=2048, help="size of the bare products; 0: none")
    parser.add_argument("--json", help="where to write the bare products' figures")
    chosen = parser.parse_args()
    start = time.perf_counter()
    with ProcessPoolExecutor(
        min(3, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    ) as pool:
        for dtype, modes in MODES.items():
            list(pool.map(warm, modes, [dtype] * len(modes)))
    print(f"kernels after {time.perf_counter() - start:.0f} s", flush=True)
    torch.set_float32_matmul_precision("highest")
    shapes = [(size,) * 3 for size in chosen.sizes]
    if 2048 in chosen.sizes:
        shapes += [(8192, 2048, 512), (16384, 512, 512)]
    rows, products = [], []
    for threads in chosen.threads:
        numba.set_num_threads(threads)
        torch.set_num_threads(threads)
        with threadpool_limits(threads, user_api="blas"):
            if chosen.dial:
                products += dial(chosen.dial, threads, 2 * chosen.seconds)
            for shape in shapes:
                rows.append(measured(*shape, chosen.dtype, threads, chosen.seconds))
                print(table(rows[-1:]).splitlines()[-2:], flush=True)
    print(nf.use_backend("cpu").backend.describe()["device"], torch.__version__)
    if rows:
        print(table(rows))
    print(f"{time.perf_counter() - start:.0f} s in all")
    for r in products:
        print(
            f"{r['device']}, {r['dtype']} {chosen.dial} cubed, {r['library']} {r['mode']}: "
            f"{r['tflops']:.3f} TFLOP/s, {r['share']:.2f} of the best strict peer's, "
            f"off by {r['error']:.2g} of the norms"
        )
    if chosen.json:
        write(chosen.json, "cpu", products)


if __name__ == "__main__":
    main()
