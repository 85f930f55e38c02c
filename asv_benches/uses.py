"""What a person runs, beside the best peer: wall time of a whole step, the host's part included.

    python asv_benches/uses.py                          every row
    python asv_benches/uses.py --quick                  the bulk: below 8 minutes on two cores
    python asv_benches/uses.py --only PINN autograd     those whose names hold all of these
    python asv_benches/uses.py --device cuda            torch modules and PINNs on a GPU
    python asv_benches/uses.py --draw 7 20              20 rows that seed 7 draws
    python asv_benches/uses.py --compile                torch.compile too, of the peer and of ours

In one process the contestants take turns in random order; figures are medians of the rounds.
Inputs are drawn anew each time; results are compared with float64. `numfuse.cli.uses` has what is
measured and the rows that ``python -m numfuse bench`` has, too. A ratio is the fastest peer's time
by ours: above 1 numfuse is faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pinns import PINNS, SHORT, pinn

import numfuse as nf
from numfuse.cli import report, uses
from numfuse.cli.ceilings import processor
from numfuse.cli.steps import Maker, Work, inference, jax_layer, layers, torch_step
from numfuse.cli.timing import Runs
from numfuse.cli.uses import Use


# --- NumPy ---------------------------------------------------------------------------------------
def regressor(rows: int, sizes: Sequence[int], dtype: str = "float32") -> Maker:
    """Return what makes a step of gradient descent of a tanh network, written by hand from NumPy.

    At a rate of 0 every step does the whole arithmetic, on the same numbers.
    """

    def make(generator: np.random.Generator) -> Work:
        x, y = (generator.standard_normal((rows, n)).astype(dtype) for n in (sizes[0], sizes[-1]))
        start = layers(generator, dtype, sizes)

        def descended(weights: Any, gradients: list[Any]) -> list[Any]:
            for layer, found in zip(weights, reversed(gradients), strict=True):
                for parameter, gradient in zip(layer, found, strict=True):
                    parameter -= 0.0 * gradient
            return gradients

        def fused() -> list[Any]:
            kept, h = [], x
            for w, b in start[:-1]:
                out, pre = nf.matmul_bias_activation(h, w, b, "tanh", return_pre_activation=True)
                kept.append((h, pre))
                h = out
            grad = (nf.matmul_bias_activation(h, *start[-1]) - y) * (2 / y.size)
            d, *found = nf.matmul_bias_activation_bwd(grad, h, *start[-1])
            gradients = [found]
            for place in reversed(range(len(kept))):
                h, pre = kept[place]
                needs = ("a", "b", "bias") if place else ("b", "bias")
                d, *found = nf.matmul_bias_activation_bwd(
                    d, h, *start[place], "tanh", needs=needs, pre_activation=pre
                )
                gradients.append(found)
            return descended(start, gradients)

        def plain(x: Any, y: Any, weights: Any) -> list[Any]:
            kept = [x]
            for w, b in weights[:-1]:
                kept.append(np.tanh(kept[-1] @ w + b))
            w, b = weights[-1]
            d = (kept[-1] @ w + b - y) * (2 / y.size)
            gradients = []
            for place in reversed(range(len(weights))):
                h = kept[place]
                gradients.append([h.T @ d, d.sum(0)])
                if place:
                    d = (d @ weights[place][0].T) * (1 - h * h)
            return descended(weights, gradients)

        wide = [tuple(z.astype(np.float64) for z in layer) for layer in start]
        runs = {"numfuse": fused, "NumPy": lambda: plain(x, y, start)}
        return Work(runs, lambda: plain(x.astype(float), y.astype(float), wide), dtype)

    return make


# --- torch modules -------------------------------------------------------------------------------
def modules(
    kind: str, dtype: str, rows: int, sizes: Sequence[int], train: bool = True, **options: Any
) -> Use:
    """A network of two layers, as a row."""
    activation = options.pop("activation", "silu" if kind == "gated" else "gelu")
    device = options.get("device", "cpu")
    if options.pop("compiled", False):
        options["also"] = both_compiled
    made = torch_step(kind, rows, sizes, dtype=dtype, train=train, activation=activation, **options)
    what = "training step" if train else "inference"
    shape = "-".join(map(str, sizes))
    name = f"torch {device}, {SHORT[dtype]} {kind} {activation}, {rows} rows, {shape}, {what}"
    return Use(name, ("torch",), made)


def both_compiled(plain: Any, fused: Any) -> dict[str, Any]:
    """Return torch.compile of the peer's module and of ours."""
    import torch

    torch._dynamo.reset()
    made = {"numfuse compiled": fused, "compiled": plain}
    return {name: torch.compile(module, dynamic=False) for name, module in made.items()}


def torch_memory(runs: Runs) -> dict[str, int]:
    """Return the bytes of a GPU that a step allocates at its peak, beyond what was there before."""
    import torch

    found = {}
    for name, run in runs.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


def with_memory(table: report.Table, found: list[dict[str, Any]]) -> report.Table:
    """Return the table with the peak of a step in MiB, and the least of a peer's in brackets."""
    for (cells, _), row in zip(table.rows, found, strict=True):
        peaks = {name: nbytes / 2**20 for name, nbytes in row["memory"].items()}
        peers = [peak for name, peak in peaks.items() if not report.ours(name)]
        text = f"{peaks['numfuse']:.0f} ({min(peers):.0f})" if "numfuse" in peaks and peers else ""
        cells.append(text)
    return table._replace(head=[*table.head, "peak, MiB"])


def small_layers(rows: int = 8, width: int = 8) -> Iterator[Use]:
    """One layer on the CPU, where the host's time is all there is."""

    def made(mode: str) -> Maker:
        def make(generator: np.random.Generator) -> Work:
            import torch

            from numfuse.adapters.torch import Linear

            x = torch.from_numpy(generator.standard_normal((rows, width), np.float32))
            plain = torch.nn.Linear(width, width)
            fused = Linear.from_torch(torch.nn.Linear(width, width))
            fused.load_state_dict(plain.state_dict())
            one = torch.ones(rows, width)

            def run(layer: Any, x: Any = x, one: Any = one) -> Callable[[], Any]:
                def forward() -> Any:
                    return layer(x)

                def without() -> Any:
                    with torch.no_grad():
                        return layer(x)

                def both() -> Any:
                    layer.weight.grad = layer.bias.grad = None
                    layer(x).backward(one)
                    return layer.weight.grad, layer.bias.grad

                return {"no_grad": without, "forward": forward, "forward, backward": both}[mode]

            def exact() -> Any:
                wide = torch.nn.Linear(width, width).double()
                wide.load_state_dict(plain.state_dict())
                return run(wide, x.double(), one.double())()

            return Work({"numfuse": run(fused), "eager": run(plain)}, exact, "float32")

        return make

    for mode in ("no_grad", "forward", "forward, backward"):
        yield Use(
            f"torch cpu, f32 {width} x {width} Linear, {rows} rows, {mode}", ("torch",), made(mode)
        )


# --- WebGPU --------------------------------------------------------------------------------------
def real_webgpu() -> bool:
    """Return whether there is an adapter for WebGPU that is no program for the CPU."""
    try:
        return any("CPU" not in line and "llvmpipe" not in line for line in nf.webgpu.adapters())
    except nf.BackendUnavailable:
        return False


def webgpu_step(rows: int, sizes: Sequence[int]) -> Maker:
    """A step of a gelu network on arrays of a WebGPU device, beside NumPy's on the CPU."""

    def make(generator: np.random.Generator) -> Work:
        x = generator.standard_normal((rows, sizes[0])).astype(np.float32)
        (w, b), (v, c) = layers(generator, "float32", sizes)
        grad = generator.standard_normal((rows, sizes[-1])).astype(np.float32)

        def step(x: Any, w: Any, b: Any, v: Any, c: Any, grad: Any) -> Any:
            h, pre = nf.matmul_bias_activation(x, w, b, "tanh", return_pre_activation=True)
            d, *second = nf.matmul_bias_activation_bwd(grad, h, v, c)
            first = nf.matmul_bias_activation_bwd(
                d, x, w, b, "tanh", needs=("b", "bias"), pre_activation=pre
            )
            return nf.matmul_bias_activation(h, v, c), *second, *first[1:]

        def plain(x: Any, w: Any, b: Any, v: Any, c: Any, grad: Any) -> Any:
            h = np.tanh(x @ w + b)
            d = (grad @ v.T) * (1 - h * h)
            return h @ v + c, h.T @ grad, grad.sum(0), x.T @ d, d.sum(0)

        given = (x, w, b, v, c, grad)
        there = [nf.to_device(z, "webgpu") for z in given]
        return Work(
            {"numfuse": lambda: step(*there), "NumPy on the CPU": lambda: plain(*given)},
            lambda: plain(*(z.astype(np.float64) for z in given)),
            "float32",
            settle=lambda: nf.synchronize(there[0]),
        )

    return make


# --- the rows ------------------------------------------------------------------------------------
def on_the_cpu(quick: bool, compiled: bool) -> Iterator[Use]:
    yield from (use for use in uses.USES if use.modules == ("numpy",))
    name = "NumPy, a step of gradient descent, 256 rows, 16-64-64-1 tanh"
    yield Use(name, ("numpy",), regressor(256, (16, 64, 64, 1)))
    yield Use("NumPy, a head, 2000 x 64 -> 1", ("numpy",), inference(2000, (64, 1)))
    yield Use("NumPy, 16 rows through 64-64-64-1 relu", ("numpy",), inference(16, (64, 64, 64, 1)))
    yield Use(
        "NumPy, a step, 2000 rows, 8-32-1 tanh, f64",
        ("numpy",),
        regressor(2000, (8, 32, 1), "float64"),
    )
    yield from small_layers()
    for rows, gradient in ((8, False), (8, True)):
        what = ", its gradients" if gradient else ""
        yield Use(
            f"jax.jit, one 8 x 8 layer{what}", ("jax",), jax_layer(rows, 8, gradient=gradient)
        )
    network = [
        ("MLP", "float32", 48, (300, 700, 300)),
        ("MLP", "float32", 1500, (384, 1000, 384)),
        ("gated", "float32", 700, (256, 720, 256)),
        ("MLP", "float32", 32, (512, 2048, 512)),
        ("MLP", "float32", 256, (256, 1024, 256)),
        ("MLP", "bfloat16", 256, (512, 2048, 512)),
        ("MLP", "float32", 16384, (128, 512, 128)),
        ("gated", "float32", 32, (512, 1376, 512)),
        ("gated", "bfloat16", 4096, (256, 688, 256)),
    ]
    if not quick:
        network += [
            (kind, dtype, rows, (512, 2048 if kind == "MLP" else 1376, 512))
            for kind in ("MLP", "gated")
            for dtype in ("float32", "bfloat16")
            for rows in (32, 256, 1024, 4096)
        ]
    for kind, dtype, rows, sizes in dict.fromkeys(network):
        block = kind == "gated"
        yield modules(kind, dtype, rows, sizes, block=block, compiled=compiled)
        yield modules(kind, dtype, rows, sizes, train=False, compiled=compiled)
    ways = [way for way in PINNS if not way.endswith("cuda")]
    shapes = [("float64", (32,) * 4), ("float64", (64,) * 4)]
    if not quick:
        shapes += [("float32", (32,) * 4), ("float32", (64,) * 4)]
        shapes += [("float64", (128,) * 5), ("float32", (128,) * 5)]
    for way, (dtype, hidden) in itertools.product(ways, shapes):
        yield pinn(way, dtype, hidden, 2000)
    if not quick:
        yield pinn("autograd", "float64", (32,) * 4, 1000)
        yield pinn("autograd", "float64", (64,) * 4, 4000)
    if real_webgpu():
        made = webgpu_step(8192, (512, 2048, 512))
        yield Use("WebGPU arrays, a step, 8192 rows, 512-2048-512", ("wgpu",), made)


def on_a_gpu(quick: bool, compiled: bool) -> Iterator[Use]:
    network = [
        ("MLP", "bfloat16", 8192, (1024, 4096, 1024)),
        ("MLP", "bfloat16", 512, (512, 2048, 512)),
        ("MLP", "float32", 4096, (784, 1024, 784)),
        ("gated", "bfloat16", 4096, (4096, 14336, 4096)),
        ("gated", "bfloat16", 8192, (2048, 5632, 2048)),
        ("MLP", "bfloat16", 32, (1024, 4096, 1024)),
        ("MLP", "bfloat16", 16384, (1024, 4096, 1024)),
        ("gated", "bfloat16", 32, (1024, 2816, 1024)),
    ]
    if not quick:
        network += [
            (kind, dtype, rows, (1024, hidden, 1024))
            for kind, hidden in (("MLP", 4096), ("gated", 2816))
            for dtype in ("bfloat16", "float16", "float32")
            for rows in (128, 2048)
        ]
    for kind, dtype, rows, sizes in network:
        block = dtype != "float32"
        options: dict[str, Any] = {"device": "cuda", "compiled": compiled}
        yield modules(kind, dtype, rows, sizes, block=block, **options)
        yield modules(kind, dtype, rows, sizes, train=False, **options)
    for dtype, hidden in itertools.product(("float32", "float64"), ((64,) * 4, (128,) * 5)):
        yield pinn("torch nested on cuda", dtype, hidden, 10000)


def drawn(seed: int, count: int, device: str, compiled: bool) -> Iterator[Use]:
    """Rows that nobody chose: shapes, odd widths, activation and dtype by chance."""
    generator = np.random.default_rng(seed)
    gpu = device == "cuda"
    most = 2e12 if gpu else 8e9  # multiply-adds of a forward

    def log_uniform(low: int, high: int) -> int:
        return round(float(np.exp(generator.uniform(np.log(low), np.log(high)))))

    def width() -> int:
        n = log_uniform(64, 8192 if gpu else 2048)
        return n if generator.random() < 0.4 else max(n - n % 8, 8)

    found = 0
    while found < count:
        kind = ("MLP", "gated", "PINN")[generator.choice(3, p=(0.45, 0.3, 0.25))]
        dtypes = ("bfloat16", "float16", "float32") if gpu else ("float32", "bfloat16", "float64")
        if kind == "PINN":
            ways = (
                ["torch nested on cuda"] if gpu else ["autograd", "torch nested", "jax.jit nested"]
            )
            hidden = (log_uniform(16, 128),) * int(generator.integers(2, 6))
            dtype = ("float32", "float64")[generator.integers(2)]
            points = log_uniform(500, 8000)
            yield pinn(ways[generator.integers(len(ways))], dtype, hidden, points)
        else:
            rows, sizes = log_uniform(32, 16384), (width(), width(), width())
            if rows * sizes[1] * (sizes[0] + sizes[2]) > most:
                continue
            activation = ("gelu", "silu", "relu", "tanh", "sigmoid")[generator.integers(5)]
            options: dict[str, Any] = {"train": bool(generator.random() < 0.6)}
            options |= {"block": bool(generator.integers(2)), "activation": activation}
            dtype = dtypes[generator.integers(3)]
            yield modules(kind, dtype, rows, sizes, **options, device=device, compiled=compiled)
        found += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--only", nargs="+", default=[], metavar="SUBSTRING")
    add("--quick", action="store_true", help="fewer rows")
    add("--compile", action="store_true", help="torch.compile too, some ten seconds a row")
    add("--draw", nargs=2, type=int, metavar=("SEED", "N"), help="other rows: N that SEED draws")
    add("--rounds", type=int, default=15, help="at most (default: %(default)s)")
    add("--seconds", type=float, default=3.0, help="of one row, about (default: %(default)s)")
    add("--seed", type=int, help="of the inputs; default: a new one each time")
    add("--json", type=Path, metavar="FILE")
    add("--list", action="store_true", help="name the rows and end")
    arguments = parser.parse_args()
    gpu = arguments.device == "cuda"
    if arguments.draw:
        rows = list(drawn(*arguments.draw, arguments.device, arguments.compile))
    else:
        chosen = on_a_gpu if gpu else on_the_cpu
        rows = list(chosen(arguments.quick, arguments.compile))
    rows = [use for use in rows if use.installed() and all(x in use.name for x in arguments.only)]
    if arguments.list:
        print("\n".join(use.name for use in rows))
        return 0
    seed = arguments.seed if arguments.seed is not None else secrets.randbits(32)
    generator = np.random.default_rng(seed)
    found: list[dict[str, Any]] = []
    began = time.monotonic()
    for use in rows:
        memory = torch_memory if gpu else None
        found.append(uses.measure(use, generator, arguments.seconds, arguments.rounds, memory))
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        table = report.uses_table(found)
        lines = report.markdown_table(with_memory(table, found) if gpu else table)
        print("\n".join(lines if len(found) == 1 else lines[-1:]), flush=True)
    device = processor()
    if gpu:
        import torch

        device = torch.cuda.get_device_name()
    print(
        f"\n{device}; Python {platform.python_version()}, numfuse {nf.__version__}; seed {seed}; "
        f"{time.monotonic() - began:.0f} s"
    )
    wrong = report.wrong_uses(found)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
