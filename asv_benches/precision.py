"""Precision as a dial on an NVIDIA GPU: times and errors of every mode beside cuBLAS in one run.

    python asv_benches/precision.py --json docs/history/precision.json      everything
    python asv_benches/precision.py --sizes 4096 --kinds normal

float64: numfuse's own products, cuBLAS's (through PyTorch) and those of integers (`int8:T`), bare
forwards and backwards (d_a and d_b). float32: IEEE and the modes that this numfuse has, beside
cuBLAS's strict products and those of TF32 that PyTorch makes where it is allowed to. Operands
are normal numbers; numbers over 12 decades; rows of A and columns of B over 12 decades; and columns
of A over 12 decades with the rows of B over as many the other way, which no scale of a row knows.

Device times are medians of turns with the second-level cache flushed between them (`cuda_gpu`). The
truth of some rows is made of products in double words, added up in a tree of double words: right to
2^-100 of the magnitudes. An error is the largest over these rows, in units of 2^-53 (float32:
2^-24): beside the norms of its row and column, and beside |A| |B|, the sum of the magnitudes. A row
ends in "<--" where a product of integers is off by more than cuBLAS's. Integers are taken at every
size (but with --rule), so that the rule which is faster can be held against the times.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from cuda_gpu import Clock
from precision_records import STRICT, with_shares, write

import numfuse as nf

#: {kind: the moduli that are tried}: what an error of cuBLAS's size needs, and a step beside it.
KINDS = {
    "normal": (14, 15),
    "twelve decades": (14, 15),
    "ill-scaled rows": (14, 15),
    "inner scales": (15, 20),
}
SAMPLE = 4


def operands(kind: str, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """a, b and grad of a square product."""
    generator = torch.Generator("cuda").manual_seed(size)

    def normal() -> torch.Tensor:
        return torch.randn(size, size, device="cuda", dtype=torch.float64, generator=generator)

    def decades(*shape: int) -> torch.Tensor:
        x = torch.rand(*shape, device="cuda", dtype=torch.float64, generator=generator)
        return torch.pow(10.0, 12 * x - 6)

    a, b, grad = normal(), normal(), normal()
    if kind == "twelve decades":
        a, b, grad = (x * decades(size, size) for x in (a, b, grad))
    elif kind == "ill-scaled rows":
        a, b, grad = a * decades(size, 1), b * decades(1, size), grad * decades(size, 1)
    elif kind == "inner scales":
        inner = decades(size)
        a, b = a * inner, b / inner[:, None]
    return a.to(dtype), b.to(dtype), grad.to(dtype)


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def halves(x: Any) -> tuple[Any, Any]:
    """x as two numbers of 26 bits (Veltkamp)."""
    part = 134217729.0 * x
    high = part - (part - x)
    return high, x - high


def truth(a: torch.Tensor, b: torch.Tensor, rows: Any) -> tuple[Any, Any]:
    """Some rows of a @ b as double words."""
    x, found = a[rows].double(), []
    x_high, x_low = halves(x)
    for first in range(0, b.shape[1], 256):
        y = b[:, first : first + 256].double()
        y_high, y_low = halves(y)
        high = x[:, :, None] * y[None]
        low = x_high[:, :, None] * y_high - high
        low = ((low + x_high[:, :, None] * y_low) + x_low[:, :, None] * y_high) + (
            x_low[:, :, None] * y_low
        )
        while high.shape[1] > 1:
            if high.shape[1] % 2:
                pad = torch.zeros_like(high[:, :1])
                high, low = torch.cat([high, pad], 1), torch.cat([low, pad], 1)
            total, rest = two_sum(high[:, ::2], high[:, 1::2])
            high, low = two_sum(total, rest + (low[:, ::2] + low[:, 1::2]))
        found.append((high[:, 0], low[:, 0]))
    return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))  # type: ignore[return-value]


class Truth:
    """Some rows of a product, and the units of its errors."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.rows = torch.linspace(0, a.shape[0] - 1, SAMPLE, device="cuda").long()
        self.high, self.low = truth(a, b, self.rows)
        x, y = a[self.rows].double(), b.double()
        self.norms = x.norm(dim=1)[:, None] * y.norm(dim=0)
        self.sizes = x.abs() @ y.abs()
        self.unit = 2.0**-53 if a.dtype == torch.float64 else 2.0**-24

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        off = ((out[self.rows].double() - self.high) - self.low).abs() / self.unit
        return float((off / self.norms).max()), float((off / self.sizes).max())


def contestants(kind: str, dtype: torch.dtype) -> dict[str, tuple[str, str]]:
    """{name: (library, mode)}; the first is the peer."""
    modes = ["ieee"]
    if dtype == torch.float64:
        modes += [f"int8:{count}" for count in KINDS[kind]]
        theirs = {"cuBLAS": STRICT}
    else:
        modes += ["bf16x6", "bf16x3", "tf32"]
        theirs = {"cuBLAS": STRICT, "cuBLAS TF32": "tf32"}
    found = {name: ("PyTorch", mode) for name, mode in theirs.items()}
    return found | {"numfuse" if m == "ieee" else m: ("numfuse", m) for m in modes}


def measured(
    clock: Clock, kind: str, size: int, dtype: torch.dtype, operation: str
) -> list[dict[str, Any]]:
    """The rows of one case."""
    a, b, grad = operands(kind, size, dtype)
    forward = operation == "forward"
    exact = [Truth(a, b)] if forward else [Truth(grad, b.t()), Truth(a.t(), grad)]

    def ours(precision: str) -> Any:
        with nf.use_backend("cuda", precision=precision):
            if forward:
                return (nf.matmul_bias_activation(a, b),)
            return nf.matmul_bias_activation_bwd(grad, a, b, needs=("a", "b"))[:2]

    def peer(mode: str) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
        results = (a @ b,) if forward else (grad @ b.t(), a.t() @ grad)
        torch.backends.cuda.matmul.allow_tf32 = False
        return results

    calls: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, (library, mode) in contestants(kind, dtype).items():
        run = ours if library == "numfuse" else peer
        call = functools.partial(run, mode)
        try:
            for _ in range(2):
                results = call()
            torch.cuda.synchronize()
        except Exception as reason:
            print(f"  {name}: {type(reason).__name__}: {str(reason)[:300]}", flush=True)
            continue
        told = nf.last_call()
        norm, sizes = (
            max(pair)
            for pair in zip(
                *(t.errors(x) for t, x in zip(exact, results, strict=True)), strict=True
            )
        )
        tier = f"{told.tier}, {told.tiling}" if run is ours and told is not None else ""
        row: dict[str, Any] = {"name": name, "library": library, "mode": mode, "tier": tier}
        rows.append(row | {"norm": norm, "sizes": sizes, "error": norm * exact[0].unit})
        calls[name] = call
        del results
    times = clock.device(calls)
    work = 2 * size**3 * (1 if forward else 2)
    for row in rows:
        seconds = times[row["name"]]
        row |= {"kind": kind, "size": size, "operation": operation, "seconds": seconds}
        row |= {"dtype": str(dtype).removeprefix("torch."), "tflops": work / seconds / 1e12}
        row |= {"device": torch.cuda.get_device_name(), "shape": (size,) * 3, "epilogue": "none"}
        row["ratio"] = times["cuBLAS"] / seconds if "cuBLAS" in times else None
    return with_shares(rows)


def show(rows: list[dict[str, Any]]) -> None:
    peer = next((row for row in rows if row["name"] == "cuBLAS"), None)
    for row in rows:
        worse = peer is not None and row["name"].startswith("int8") and row["sizes"] > peer["sizes"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        print(
            f"| {row['dtype']} {row['operation']} {row['size']} {row['kind']} | {row['name']} | "
            f"{row['seconds'] * 1e3:.3f} | {row['tflops']:.1f} | {ratio} | {row['norm']:.3g} | "
            f"{row['sizes']:.3g} | {row['tier']} |{' <--' if worse else ''}",
            flush=True,
        )


def by_integers_always() -> None:
    """Let every product that may be made of integers be made so, whatever its size is."""
    from numfuse.backends.cuda.kernels.residues import tier

    tier.seconds = lambda *_: tier.Seconds(1.0, 0.0)  # type: ignore[misc]


def compiled(work: tuple[str, str, int, bool]) -> str:
    """Compile the kernels of one mode's products into the disk cache; what went wrong."""
    from numfuse.backends.cuda.call.record import recorded
    from numfuse.backends.cuda.driver.devices import device
    from numfuse.backends.cuda.plan.program import View, strides_of
    from numfuse.problem import product
    from numfuse.problem.fields import FIELDS

    dtype, precision, size, rule = work
    if not rule:
        by_integers_always()
    x = np.empty((size, size), dtype)

    def bind(rec: Any, name: str, x: Any) -> Any:
        return View(rec.number(name), 0, x.shape, strides_of(x), dtype, x.itemsize, 16)

    problems: list[Any] = [("forward", product.gemm(x, x, None))]
    if dtype == "float64":
        problems.append(("backward", product.gemm_backward(x, x, x, None, needs=("a", "b"))))
    try:
        for kind, p in problems:
            recorded(device(), precision, kind, p, bind, tuple(itertools.chain(*FIELDS[kind])))
    except Exception as error:
        return f"{work}: {type(error).__name__}: {error}"
    return ""


def prepare(sizes: list[int], processes: int, rule: bool) -> None:
    """Compile in many processes, first of the largest size: the others share most kernels."""
    dials = {"float64": ("ieee", "int8:14", "int8:15", "int8:20"),
             "float32": ("ieee", "bf16x6", "bf16x3", "tf32")}  # fmt: skip
    modes = [(dtype, name) for dtype, names in dials.items() for name in names]
    ordered = sorted(sizes, reverse=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for some in (ordered[:1], ordered[1:]):
            work = [(*mode, size, rule) for mode in modes for size in some]
            print("".join(f"{failed}\n" for failed in pool.map(compiled, work) if failed), end="")


def stages(size: int) -> None:
    """What each kernel of a product of integers takes."""
    from torch.profiler import ProfilerActivity, profile

    a, b, _ = operands("normal", size, torch.float64)
    with nf.use_backend("cuda", precision="int8"):
        for _ in range(2):
            nf.matmul_bias_activation(a, b)
        with profile(activities=[ProfilerActivity.CUDA]) as made:
            nf.matmul_bias_activation(a, b)
            torch.cuda.synchronize()
    for event in sorted(made.events(), key=lambda e: e.time_range.start):
        print(f"  {size}: {event.name[:40]} {event.time_range.elapsed_us():.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="*", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prepare", type=int, default=12, metavar="N",
                        help="compile first, in N processes; 0: as it goes")  # fmt: skip
    parser.add_argument("--rule", action="store_true",
                        help="float64 where numfuse thinks that it is faster")  # fmt: skip
    parser.add_argument("--json", help="write all figures here (precision_records.py)")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if not arguments.rule:
        by_integers_always()
    start = time.perf_counter()
    if arguments.prepare:
        prepare(arguments.sizes, arguments.prepare, arguments.rule)
        print(f"compiled in {time.perf_counter() - start:.0f} s")
    clock = Clock(arguments.rounds)
    everything: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, numfuse {nf.__version__}")
    print("| case | mode | ms | TFLOP/s | cuBLAS / it | error, norms | error, sizes | tier |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in arguments.sizes:
        cases = [(kind, torch.float64, "forward") for kind in arguments.kinds]
        cases += [("normal", torch.float64, "backward"), ("normal", torch.float32, "forward")]
        for kind, dtype, operation in cases:
            rows = measured(clock, kind, size, dtype, operation)
            show(rows)
            everything += rows
            torch.cuda.empty_cache()
    for size in arguments.sizes:
        try:
            stages(size)
        except Exception as reason:
            print(f"  no stages: {type(reason).__name__}: {reason}")
    print(f"{time.perf_counter() - start:.0f} s")
    if arguments.json:
        write(arguments.json, "cuda", [r | {"source": "precision.py"} for r in everything])


if __name__ == "__main__":
    main()
