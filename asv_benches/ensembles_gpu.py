"""Ensembles on a GPU: a step of training of many networks in one launch, beside its peers.

    python asv_benches/ensembles_gpu.py                    every row
    python asv_benches/ensembles_gpu.py --only "16 x"
    python asv_benches/ensembles_gpu.py --no-compile       without torch.compile

A step is the value of every network and the gradients by all weights and biases, of points that
all networks share. Times are wall times, contestants take turns in one process, figures are
medians. Every result is compared with float64 first; the error is relative, in the norm.

- numfuse: :func:`numfuse.mlp` and `mlp_bwd` on PyTorch's tensors, replayed as a CUDA graph, with
  products of bfloat16 parts, and layer by layer.
- torch: `baddbmm` and tanh, eager, compiled, and compiled and replayed as a CUDA graph; and
  `torch.func.vmap` of one network's gradient, compiled.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jets_gpu import graphed, in_parts, timed
from networks_gpu import error_of, flat, layered

import numfuse as nf

Run = Callable[[], Any]
#: Networks, points, widths, dtype.
ROWS = (
    (16, 2000, (3, 64, 64, 64, 64, 1), "float32"),
    (16, 2000, (3, 64, 64, 64, 64, 1), "float64"),
    (256, 500, (3, 32, 32, 1), "float32"),
    (8, 4000, (2, 128, 128, 128, 1), "float32"),
)


class Ensemble:
    """Networks' tensors, (E, d_i, d_i+1) and (E, 1, d_i+1), and the cotangents of their values."""

    def __init__(self, count: int, points: int, widths: tuple[int, ...], dtype: Any) -> None:
        made = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Any:
            x = scale * torch.randn(*shape, generator=made, device="cuda", dtype=torch.float64)
            return x.float().to(dtype)

        pairs = list(itertools.pairwise(widths))
        self.x = normal(points, widths[0])
        self.weights = [normal(count, k, n, scale=k**-0.5) for k, n in pairs]
        self.biases = [normal(count, 1, n, scale=0.1) for _, n in pairs]
        self.grad = normal(count, points, widths[-1])

    def ours(self) -> Any:
        """A step by numfuse's two functions."""
        given = self.x, self.weights, self.biases, "tanh"
        nf.mlp(*given)
        made = nf.mlp_bwd(self.grad, *given, needs=("weights", "biases"))
        return [*made.d_weights, *made.d_biases]

    @staticmethod
    def value(x: Any, weights: Any, biases: Any) -> Any:
        """The values by products of batches."""
        h = x.expand(weights[0].shape[0], *x.shape)
        for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
            h = torch.baddbmm(bias, h, w)
            h = torch.tanh(h) if i < len(weights) - 1 else h
        return h

    def autograd(self, value: Callable[..., Any]) -> Run:
        """A step by autograd."""
        own = [y.clone().requires_grad_() for y in (*self.weights, *self.biases)]
        count = len(self.weights)

        def run() -> Any:
            found = value(self.x, own[:count], own[count:])
            return torch.autograd.grad(found, own, self.grad)

        return run

    def mapped(self) -> Run:
        """A step by `vmap` of a network's gradient."""

        def loss(weights: Any, biases: Any, grad: Any) -> Any:
            h = self.x
            for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
                h = h @ w + bias
                h = torch.tanh(h) if i < len(weights) - 1 else h
            return (h * grad).sum()

        step = torch.compile(torch.func.vmap(torch.func.grad(loss, (0, 1))), dynamic=False)

        def run() -> Any:
            d_weights, d_biases = step(tuple(self.weights), tuple(self.biases), self.grad)
            return [*d_weights, *d_biases]

        return run


def contestants(net: Ensemble, dtype: str, compiles: bool) -> dict[str, Callable[[], Run]]:
    """Return what makes each contestant, by its name."""
    found: dict[str, Callable[[], Run]] = {
        "numfuse": lambda: net.ours,
        "numfuse graphed": lambda: graphed(net.ours),
        "numfuse by layers": lambda: layered(net.ours),
        "numfuse by layers, graphed": lambda: graphed(layered(net.ours)),
        "torch eager": lambda: net.autograd(net.value),
    }
    if dtype == "float32":
        found["numfuse bf16x6 graphed"] = lambda: graphed(in_parts(net.ours))
    if compiles:
        compiled = net.autograd(torch.compile(net.value, dynamic=False))
        found["torch compiled"] = lambda: compiled
        found["torch compiled, graphed"] = lambda: graphed(compiled)
        found["torch vmap compiled"] = net.mapped
    return found


def measure(row: tuple[Any, ...], args: argparse.Namespace) -> None:
    """Check a row's contestants, time them in turns, and print it."""
    count, points, widths, dtype = row
    name = f"{count} x {'-'.join(map(str, widths))}, {points} points, {dtype}"
    if not all(part in name for part in args.only):
        return
    exact = flat(Ensemble(count, points, widths, torch.float64).autograd(Ensemble.value)())
    net = Ensemble(count, points, widths, getattr(torch, dtype))
    runs: dict[str, Run] = {}
    told: dict[str, tuple[float, str]] = {}
    for way, make in contestants(net, dtype, args.compile).items():
        try:
            run = make()
            run()
            error = error_of(run(), exact)
        except Exception as reason:
            print(f"  {name}, {way}: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
            continue
        kernel = getattr(nf.last_call(), "kernel", "") if way == "numfuse" else ""
        runs[way], told[way] = run, (error, kernel)
    print(name, flush=True)
    for way, t in sorted(timed(runs, args.seconds).items(), key=lambda item: item[1]):
        error, kernel = told[way]
        print(f"    {way:28} {1e3 * t:8.3f} ms, error {error:.1e} {kernel}", flush=True)


def main() -> None:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NumPy {np.__version__}")
    for row in ROWS:
        measure(row, args)


if __name__ == "__main__":
    main()
