"""The figures of the guide and of numerics.md that no other script measures.

    python asv_benches/guide.py                    all of them: two minutes
    python asv_benches/guide.py recompute pack     those whose names are given

- recompute: three gelu layers of `numfuse.adapters.torch`, rows x width: MiB that the graph holds
  between forward and backward beside the parameters, and the time of both, recomputed to kept;
- pack: the gradients of a network of few rows with packed weights, to those with plain ones;
- definition: MiB that an activation leaves behind which is defined again and again;
- sums: the error of a sum of K products beside that of NumPy's BLAS, in the Frobenius norm and in
  u: the largest of three draws, and of the same sums as a forward, as d_a and as d_b;
  then a very long sum beside NumPy's pairwise one (OPENBLAS_CORETYPE chooses OpenBLAS's kernels);
- apart: a backward of a batch over one `b` whose rows lie apart, beside contiguous operands, and
  beside copies that the caller makes.

Contestants take turns in one process; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

import numfuse as nf
from numfuse import expr as ex


def medians(*calls: Callable[[], object], seconds: float = 2.0) -> list[float]:
    """Return the median time of each call; all of them by turns."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, spent in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            spent.append(time.perf_counter() - began)
    return [statistics.median(spent) for spent in times]


def recompute() -> None:
    import torch

    from numfuse.adapters.torch import Linear
    from numfuse.adapters.torch import recompute as recomputing

    print("| | kept | recomputed | time, recomputed to kept |\n|---|---:|---:|---:|")
    for dtype, size in ((d, n) for d in (torch.float32, torch.bfloat16) for n in (256, 1024)):
        layers = [Linear(size, size, activation="gelu", dtype=dtype) for _ in range(3)]
        net = torch.nn.Sequential(*layers)
        x, grad = (torch.randn(size, size, dtype=dtype) for _ in range(2))

        def step(on: bool, net=net, x=x, grad=grad) -> None:
            with recomputing(on):
                out = net(x)
            out.backward(grad)

        def held(on: bool, net=net, x=x) -> float:
            found: dict[int, int] = {}

            def note(y: torch.Tensor) -> torch.Tensor:
                found[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
                return y

            with torch.autograd.graph.saved_tensors_hooks(note, lambda y: y), recomputing(on):
                out = net(x)
            for y in net.parameters():
                found.pop(y.untyped_storage().data_ptr(), None)
            del out
            return sum(found.values()) / 2**20

        kept, again = medians(lambda: step(False), lambda: step(True))
        name = str(dtype).removeprefix("torch.")
        print(
            f"| {name}, {size} rows, width {size} | {held(False):.3g} MiB | "
            f"{held(True):.3g} MiB | {again / kept:.2f} |"
        )


def pack() -> None:
    rng = np.random.default_rng(0)
    for rows, width in ((8, 256), (8, 100), (200, 256)):
        x, grad = rng.standard_normal((2, rows, width)).astype(np.float32)
        weights = [(rng.standard_normal((width, width)) / 16).astype(np.float32) for _ in range(3)]
        biases = [np.zeros(width, np.float32) for _ in range(3)]
        packed = nf.pack(weights)
        plain, once = medians(
            lambda x=x, g=grad, w=weights, b=biases: nf.mlp_bwd(g, x, w, b, "tanh"),
            lambda x=x, g=grad, w=packed, b=biases: nf.mlp_bwd(g, x, w, b, "tanh"),
            seconds=1.0,
        )
        print(f"{rows} rows, three layers of {width}: gradients {once / plain:.2f} of the time")


def definition(count: int = 100) -> None:
    x = np.ones((8, 8))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def define(number: int) -> None:
        nf.activation(source="none", name="again")(lambda x: ex.tanh(x) * (2.0 + number / 64))
        nf.matmul_bias_activation(x, x, None, "again")
        nf.matmul_bias_activation_bwd(x, x, x, None, "again")

    for number in range(10):
        define(number)
    before = resident()
    for number in range(10, 10 + count):
        define(number)
    left = (resident() - before) / count / 2**20
    print(f"a definition, forward and backward, leaves {left:.2f} MiB")


def sums(draws: int = 3) -> None:
    print("| dtype | K | normal | (0, 1) | BLAS, normal | (0, 1) |\n|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    run = nf.matmul_bias_activation_bwd
    for dtype, wide, u in ((np.float32, np.float64, 2**-24), (np.float64, np.longdouble, 2**-53)):
        for k in (256, 300, 512, 1024, 8192, 100_000):
            m, n = (64, 48) if k < 100_000 else (16, 24)
            ours, blas = [0.0, 0.0], [0.0, 0.0]
            for kind, draw in enumerate((rng.standard_normal, rng.random)):
                for _ in range(draws):
                    a, b = draw((m, k)).astype(dtype), draw((k, n)).astype(dtype)
                    exact = a.astype(wide) @ b.astype(wide)

                    def off(x: np.ndarray, exact=exact, u=u) -> float:
                        return float(np.linalg.norm(x - exact) / np.linalg.norm(exact)) / u

                    a_t, b_t = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
                    unread = np.zeros((m, n), dtype)
                    same = (
                        nf.matmul_bias_activation(a, b),
                        run(a, unread, b_t, needs=("a",)).d_a,
                        run(b, a_t, unread, needs=("b",)).d_b,
                    )
                    ours[kind] = max(ours[kind], *map(off, same))
                    blas[kind] = max(blas[kind], off(a @ b))
            cells = " | ".join(f"{x:.1f}" for x in ours + blas)
            print(f"| {np.dtype(dtype)} | {k} | {cells} |", flush=True)
    print("\nThe error of a sum of 1,000,000 products by that of NumPy's pairwise sum of them:")
    for draw in (rng.standard_normal, rng.random):
        a, b = draw((4, 1_000_000)).astype(np.float32), draw((1_000_000, 6)).astype(np.float32)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        pairs = np.array([[np.add.reduce(x * y) for y in np.ascontiguousarray(b.T)] for x in a])
        ours = nf.matmul_bias_activation(a, b)
        print(
            f"{draw.__name__}: {np.linalg.norm(ours - exact) / np.linalg.norm(pairs - exact):.1f}"
        )


def apart() -> None:
    print("| batch x M x K x N | dtype | threads | apart | copied first |\n|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    shapes = (16, 512, 64, 512), (16, 512, 512, 64), (16, 512, 512, 512), (300, 32, 256, 256)
    run = nf.matmul_bias_activation_bwd
    before = numba.get_num_threads()
    for threads in dict.fromkeys((1, before)):
        numba.set_num_threads(threads)
        for batch, m, k, n in shapes:
            for dtype in (np.float32, np.float64):
                # The first row of each member is left out: no stride walks the rows of all members.
                a = rng.standard_normal((batch, m + 1, k)).astype(dtype)[:, 1:]
                grad = rng.standard_normal((batch, m + 1, n)).astype(dtype)[:, 1:]
                whole = grad.copy(), a.copy()
                b, bias = rng.standard_normal((k, n)).astype(dtype), np.zeros(n, dtype)
                one, view, copied = medians(
                    lambda x=whole, b=b, c=bias: run(*x, b, c, "gelu"),
                    lambda x=(grad, a), b=b, c=bias: run(*x, b, c, "gelu"),
                    lambda x=(grad, a), b=b, c=bias: run(*(y.copy() for y in x), b, c, "gelu"),
                )
                print(
                    f"| {batch} x {m} x {k} x {n} | {np.dtype(dtype)} | {threads} | "
                    f"{view / one:.2f} | {copied / one:.2f} |",
                    flush=True,
                )
    numba.set_num_threads(before)


ALL = {
    "recompute": recompute, "pack": pack, "definition": definition, "sums": sums, "apart": apart,
}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *ALL], metavar="NAME", help=", ".join(ALL))
    for chosen in parser.parse_args().names or ALL:
        ALL[chosen]()
