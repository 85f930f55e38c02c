"""The gated layer and epilogues of one's own beside PyTorch, in one process.

    python asv_benches/gated.py                        the processor, float32 and float64
    python asv_benches/gated.py --threads 1            on one thread
    python asv_benches/gated.py --device cuda          a GPU: bfloat16, float32, float64
    python asv_benches/gated.py --compile --autotune   torch.compile too, and its max-autotune
    python asv_benches/gated.py --draw 7 10            10 shapes that seed 7 draws
    python asv_benches/gated.py --alternate            weights that are alternate columns

On a GPU device times, with the second-level cache flushed before every call; on the processor wall
times, after a rest and a call that wakes the threads. Contestants take turns in random order,
figures are medians. PyTorch's ways: two products and the gate, and one product of both weights side
by side. The bare product has that width, 2 N. With `--alternate` the weights are every other column
of one array, for PyTorch too; the rows "halves" are numfuse's with the same numbers side by side.
Results are compared with float64. A ratio is the fastest peer's time by ours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from cuda_gpu import error
from torch.nn.functional import silu

import numfuse as nf
from numfuse import expr as ex

GPU_SHAPES = ((8192, 2048, 5632), (4096, 4096, 14336), (16384, 1024, 2816), (333, 1000, 777))
CPU_SHAPES = ((512, 512, 1408), (4096, 256, 704), (64, 1024, 2816))
Contestants = dict[str, Callable[[], Any]]


# --- PyTorch's ways ------------------------------------------------------------------------------
def two_forward(a: Any, gate: Any, up: Any) -> Any:
    return silu(a @ gate) * (a @ up)


def wide_forward(a: Any, both: Any) -> Any:
    p, u = (a @ both).chunk(2, -1)
    return silu(p) * u


def slopes(grad: Any, p: Any, u: Any) -> tuple[Any, Any]:
    return torch.ops.aten.silu_backward(grad * u, p), grad * silu(p)


def two_backward(grad: Any, a: Any, gate: Any, up: Any, p: Any, u: Any) -> Any:
    d_p, d_u = slopes(grad, p, u)
    return torch.addmm(d_p @ gate.t(), d_u, up.t()), a.t() @ d_p, a.t() @ d_u


def two_again(grad: Any, a: Any, gate: Any, up: Any) -> Any:
    return two_backward(grad, a, gate, up, a @ gate, a @ up)


def wide_backward(grad: Any, a: Any, both: Any, pre: Any) -> Any:
    d_pre = torch.cat(slopes(grad, *pre.chunk(2, -1)), -1)
    return d_pre @ both.t(), *(a.t() @ d_pre).chunk(2, -1)


def wide_again(grad: Any, a: Any, both: Any) -> Any:
    return wide_backward(grad, a, both, a @ both)


def alternate_forward(a: Any, both: Any) -> Any:
    pre = a @ both
    return silu(pre[..., ::2]) * pre[..., 1::2]


def alternate_backward(grad: Any, a: Any, both: Any, pre: Any) -> Any:
    d_pre = torch.stack(slopes(grad, pre[..., ::2], pre[..., 1::2]), -1).flatten(-2)
    d_both = a.t() @ d_pre
    return d_pre @ both.t(), d_both[:, ::2], d_both[:, 1::2]


def alternate_again(grad: Any, a: Any, both: Any) -> Any:
    return alternate_backward(grad, a, both, a @ both)


# --- times ---------------------------------------------------------------------------------------
def on_the_gpu(contestants: Contestants, rounds: int) -> dict[str, float]:
    from cuda_gpu import Clock

    return Clock(rounds).device(contestants)


def on_the_cpu(contestants: Contestants, rounds: int) -> dict[str, float]:
    """Medians in seconds, each after a rest, in which others' threads end to spin, and a call."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            time.sleep(0.006)
            contestants[name]()
            start = time.perf_counter()
            contestants[name]()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def memory(call: Callable[[], Any]) -> float:
    """The most MiB of a GPU that a call takes beside what is there before."""
    torch.cuda.synchronize()
    nf.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# --- rows ----------------------------------------------------------------------------------------
class Bench:
    """Rows of tables, printed as they come."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.rounds = arguments.device, arguments.rounds
        modes = [None, "max-autotune-no-cudagraphs"][: arguments.compile + arguments.autotune]
        self.modes = {"compile" + (" autotune" if mode else ""): mode for mode in modes}
        self.times = on_the_gpu if self.device == "cuda" else on_the_cpu
        self.found: list[dict[str, Any]] = []

    def compiled(self, function: Any, *given: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
        """PyTorch's compiled forms of a function, as calls."""
        for name, mode in self.modes.items():
            torch._dynamo.reset()
            made = torch.compile(function, mode=mode, dynamic=False)
            yield f"{name} {function.__name__.split('_')[0]}", lambda made=made: made(*given)

    def row(
        self, what: str, ours: Contestants, peers: Contestants, exact: tuple[Any, ...],
        floors: Contestants,
    ) -> None:  # fmt: skip
        """Measure all; a line for each of ours: times in microseconds, ratios and errors."""
        everyone = ours | peers | floors
        errors = {}
        for name, call in everyone.items():
            result = call()
            errors[name] = 0.0 if name in floors else error(result, exact)
            del result
            call()
        spent = self.times(everyone, self.rounds)
        best = min(peers, key=lambda name: spent[name])
        for name in ours:
            line = {
                "what": what, "ours": name, "us": spent[name] * 1e6, "best": best,
                "best us": spent[best] * 1e6, "ratio": spent[best] / spent[name],
                "errors": [errors[name], errors[best]],
                "floors": {x: spent[name] / spent[x] for x in floors},
            }  # fmt: skip
            if self.device == "cuda":
                line["MiB"] = [memory(ours[name]), memory(peers[best])]
            self.found.append(line)
            beside = ", ".join(f"{r:.3f} of {x}" for x, r in line["floors"].items())
            kept = " / ".join(f"{x:.0f}" for x in line.get("MiB", ()))
            print(
                f"| {what} | {name} | {line['us']:.0f} | {best} {line['best us']:.0f} | "
                f"{line['ratio']:.3f} | {beside} | {errors[name]:.1e} / {errors[best]:.1e} | "
                f"{kept} |",
                flush=True,
            )


def layer(bench: Bench, dtype: str, m: int, k: int, n: int) -> None:
    """The rows of a gated layer, forward and backward."""
    kind = getattr(torch, dtype)

    def normal(*lengths: int, scale: float = 1.0) -> Any:
        return (torch.randn(*lengths, device=bench.device) * scale).to(kind)

    a, grad, both = normal(m, k), normal(m, n), normal(k, 2 * n, scale=k**-0.5)
    gate, up = both[:, :n].contiguous(), both[:, n:].contiguous()
    p, u = a @ gate, a @ up
    pre = torch.cat([p, u], 1)
    wide = [x.double() for x in (grad, a, gate, up)]
    given = (grad, a, gate, up) if bench.device == "cuda" else tensors_of(grad, a, gate, up)
    name = f"{dtype} {m} x {k} -> {n}"
    with torch.no_grad():
        _, saved = nf.matmul_activation_mul(*given[1:], return_pre_activation=True)
        bench.row(
            f"{name} forward",
            {
                "forward": lambda: nf.matmul_activation_mul(*given[1:]),
            },
            {
                "eager, two": lambda: two_forward(a, gate, up),
                "eager, wide": lambda: wide_forward(a, both),
                **dict(bench.compiled(two_forward, a, gate, up)),
                **dict(bench.compiled(wide_forward, a, both)),
            },
            (two_forward(*wide[1:]),),
            {
                "the bare product": lambda: a @ both,
                "numfuse's bare product": bare(bench, a, both),
                "it saved": lambda: nf.matmul_activation_mul(
                    *given[1:], return_pre_activation=True
                ),
            },
        )
        exact = two_again(*wide)
        bench.row(
            f"{name} backward",
            {"saved": lambda: nf.matmul_activation_mul_bwd(*given, pre_activation=saved)[:3]},
            {
                "eager, two": lambda: two_backward(grad, a, gate, up, p, u),
                "eager, wide": lambda: wide_backward(grad, a, both, pre),
                **dict(bench.compiled(two_backward, grad, a, gate, up, p, u)),
                **dict(bench.compiled(wide_backward, grad, a, both, pre)),
            },
            exact,
            {},
        )
        bench.row(
            f"{name} backward",
            {"recomputed": lambda: nf.matmul_activation_mul_bwd(*given)[:3]},
            {
                "eager, two": lambda: two_again(grad, a, gate, up),
                "eager, wide": lambda: wide_again(grad, a, both),
                **dict(bench.compiled(two_again, grad, a, gate, up)),
                **dict(bench.compiled(wide_again, grad, a, both)),
            },
            exact,
            {},
        )


def alternate(bench: Bench, dtype: str, m: int, k: int, n: int) -> None:
    """The rows of a gated layer whose weights are alternate columns of one array, and halves."""
    kind = getattr(torch, dtype)
    a, grad = (torch.randn(m, x, device=bench.device).to(kind) for x in (k, n))
    both = (torch.randn(k, 2 * n, device=bench.device) * k**-0.5).to(kind)
    gate, up = both[:, ::2], both[:, 1::2]
    beside = torch.cat([gate, up], 1)
    p, u, pre = a @ gate, a @ up, a @ both
    wide = [x.double() for x in (grad, a, gate, up)]
    views = {"alternate": (grad, a, gate, up), "halves": (grad, a, *beside.chunk(2, 1))}
    if bench.device != "cuda":
        views = {name: tensors_of(*x) for name, x in views.items()}
    name = f"{dtype} {m} x {k} -> {n}"
    with torch.no_grad():
        _, saved = nf.matmul_activation_mul(*views["halves"][1:], return_pre_activation=True)
        layer, slopes_of = nf.matmul_activation_mul, nf.matmul_activation_mul_bwd
        bench.row(
            f"{name} forward",
            {way: lambda x=x: layer(*x[1:]) for way, x in views.items()},
            {
                "eager, two": lambda: two_forward(a, gate, up),
                "eager, wide": lambda: alternate_forward(a, both),
                **dict(bench.compiled(two_forward, a, gate, up)),
                **dict(bench.compiled(alternate_forward, a, both)),
            },
            (two_forward(*wide[1:]),),
            {"the bare product": lambda: a @ both},
        )
        exact = two_again(*wide)
        bench.row(
            f"{name} backward, saved",
            {way: lambda x=x: slopes_of(*x, pre_activation=saved)[:3] for way, x in views.items()},
            {
                "eager, two": lambda: two_backward(grad, a, gate, up, p, u),
                "eager, wide": lambda: alternate_backward(grad, a, both, pre),
                **dict(bench.compiled(two_backward, grad, a, gate, up, p, u)),
                **dict(bench.compiled(alternate_backward, grad, a, both, pre)),
            },
            exact,
            {},
        )
        bench.row(
            f"{name} backward, recomputed",
            {way: lambda x=x: slopes_of(*x)[:3] for way, x in views.items()},
            {
                "eager, two": lambda: two_again(grad, a, gate, up),
                "eager, wide": lambda: alternate_again(grad, a, both),
                **dict(bench.compiled(two_again, grad, a, gate, up)),
                **dict(bench.compiled(alternate_again, grad, a, both)),
            },
            exact,
            {},
        )


def beside_jax(bench: Bench, dtype: str, m: int, k: int, n: int) -> None:
    """The row of a gated layer's wall times beside jax.jit, host included, on this device."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    kind = getattr(torch, dtype)
    a, grad = (torch.randn(m, x, device=bench.device).to(kind) for x in (k, n))
    gate, up = ((torch.randn(k, n, device=bench.device) * k**-0.5).to(kind) for _ in "gu")
    there = [jnp.from_dlpack(x) for x in (grad, a, gate, up)]

    def layer(a: Any, gate: Any, up: Any) -> Any:
        return jax.nn.silu(a @ gate) * (a @ up)

    pulled = jax.jit(lambda grad, *x: jax.vjp(layer, *x)[1](grad))
    forward = jax.jit(layer)
    given = (grad, a, gate, up) if bench.device == "cuda" else tensors_of(grad, a, gate, up)
    wait = torch.cuda.synchronize if bench.device == "cuda" else lambda: None

    def waited(call: Callable[..., Any], x: Any) -> Callable[[], Any]:
        def run() -> Any:
            found = call(*x)
            wait()
            return found

        return run

    ways = {
        "forward": (nf.matmul_activation_mul, forward, 1),
        "backward": (lambda *x: nf.matmul_activation_mul_bwd(*x)[:3], pulled, 0),
    }
    for name, (own, theirs, first) in ways.items():
        calls = {
            "numfuse": waited(own, given[first:]),
            "jax.jit": lambda f=theirs, x=there[first:]: jax.block_until_ready(f(*x)),
        }
        found = {way: call() for way, call in calls.items()}
        wide = [x.double() for x in (grad, a, gate, up)]
        if name == "backward":
            exact = two_again(*wide)
        else:
            exact = (two_forward(*wide[1:]),)
            found = {way: (y,) for way, y in found.items()}
        theirs_there = tuple(torch.from_dlpack(y) for y in found["jax.jit"])
        errors = error(found["numfuse"], exact), error(theirs_there, exact)
        spent = on_the_cpu(calls, bench.rounds)
        ratio = spent["jax.jit"] / spent["numfuse"]
        print(
            f"| {dtype} {m} x {k} -> {n} {name}, wall | numfuse {spent['numfuse'] * 1e6:.0f} | "
            f"jax.jit {spent['jax.jit'] * 1e6:.0f} | {ratio:.3f} | "
            f"{errors[0]:.1e} / {errors[1]:.1e} |",
            flush=True,
        )
        bench.found.append({"what": f"{dtype} {m} x {k} -> {n} {name}, jax", "ratio": ratio})


def tensors_of(*given: Any) -> tuple[Any, ...]:
    """NumPy's arrays over the memory of tensors."""
    return tuple(x.numpy() for x in given)


def bare(bench: Bench, a: Any, both: Any) -> Callable[[], Any]:
    x, y = (a, both) if bench.device == "cuda" else tensors_of(a, both)
    return lambda: nf.matmul_bias_activation(x, y)


@nf.epilogue
def masked(z: Any, bias: Any, scale: Any, mask: Any) -> Any:
    """Ten operations, with operands by column and by row."""
    shifted = (z + bias) * scale
    bent = ex.tanh(shifted) * mask + 0.1 * shifted
    return bent * scale - 0.5 * (bent + bias)


def torch_masked(a: Any, b: Any, bias: Any, scale: Any, mask: Any) -> Any:
    shifted = (a @ b + bias) * scale
    bent = torch.tanh(shifted) * mask + 0.1 * shifted
    return bent * scale - 0.5 * (bent + bias)


def own_epilogue(bench: Bench, dtype: str, size: int) -> None:
    """The row of a formula of ten operations beside numfuse's own forward with gelu."""
    kind = getattr(torch, dtype)
    a, b = ((torch.randn(size, size, device=bench.device) * size**-0.25).to(kind) for _ in "ab")
    bias, scale, mask = (
        torch.randn(*shape, device=bench.device).to(kind) for shape in ((size,), (size, 1), (size,))
    )
    given = (a, b, bias, scale, mask)
    x, y, *others = given if bench.device == "cuda" else tensors_of(*given)
    with torch.no_grad():
        bench.row(
            f"{dtype} epilogue {size}",
            {"ten operations": lambda: nf.matmul_epilogue(x, y, masked, *others)},
            {
                "eager": lambda: torch_masked(*given),
                **dict(bench.compiled(torch_masked, *given)),
            },
            (torch_masked(*(z.double() for z in given)),),
            {"gelu": lambda: nf.matmul_bias_activation(x, y, others[0], "gelu")},
        )


@nf.epilogue
def adam(p: Any, m: Any, v: Any, g: Any, rate: Any, first: Any, second: Any) -> Any:
    m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
    return p - rate * m / (ex.sqrt(v) + 1e-8), m, v


def step_of_adam(bench: Bench, size: int) -> None:
    """The row of an Adam update in place beside the triad x = y + c z, by bytes."""
    p, m, v, g, q = (torch.rand(size, device=bench.device) for _ in range(5))
    parameters = [p.clone().requires_grad_()]
    parameters[0].grad = g.clone()
    peer = torch.optim.Adam(parameters, lr=1e-3, fused=True)
    x = (p, m, v, g) if bench.device == "cuda" else tensors_of(p, m, v, g)
    calls = {
        "numfuse": lambda: nf.elementwise(adam, *x, 1e-3, 0.9, 0.999, out=x[:3]),
        "torch fused": lambda: peer.step(),
        "triad": lambda: torch.add(p, g, alpha=2.0, out=q),
    }
    for call in calls.values():
        call()
    spent = bench.times(calls, bench.rounds)
    rates = {name: size * (12 if name == "triad" else 28) / t / 1e9 for name, t in spent.items()}
    told = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in rates.items())
    print(
        f"| float32 Adam, {size} | {told} | {rates['numfuse'] / rates['triad']:.2f} of the triad |"
    )
    bench.found.append({"what": f"Adam {size}", "GB/s": rates})


def drawn(seed: int, count: int, most: int) -> Iterator[tuple[int, int, int]]:
    generator = np.random.default_rng(seed)
    for _ in range(count):
        m, k, n = (int(2 ** generator.uniform(5, np.log2(most))) for _ in range(3))
        yield (m, k, n) if generator.random() < 0.5 else (m, -(-k // 64) * 64, -(-n // 64) * 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="*")
    parser.add_argument("--shapes", nargs="*", help="MxKxN in place of the table's")
    parser.add_argument("--threads", type=int, help="of both, on the processor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="torch.compile as a peer")
    parser.add_argument("--autotune", action="store_true", help="and its max-autotune mode")
    parser.add_argument("--jax", action="store_true", help="wall times beside jax.jit, too")
    parser.add_argument("--only-jax", action="store_true", help="these alone")
    parser.add_argument("--alternate", action="store_true", help="weights of alternate columns")
    parser.add_argument("--draw", nargs=2, type=int, metavar=("SEED", "COUNT"))
    parser.add_argument("--json", help="write all figures here")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.threads:
        import numba

        torch.set_num_threads(arguments.threads)
        numba.set_num_threads(arguments.threads)
    bench = Bench(arguments)
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    if arguments.shapes:
        shapes = tuple(tuple(map(int, s.split("x"))) for s in arguments.shapes)
    if arguments.draw:
        shapes = tuple(drawn(*arguments.draw, 8192 if on_gpu else 1024))
    dtypes = arguments.dtypes or (["bfloat16"] if on_gpu else []) + ["float32", "float64"]
    for dtype in dtypes:
        for shape in shapes:
            try:
                if arguments.alternate:
                    alternate(bench, dtype, *shape)
                elif not arguments.only_jax:
                    layer(bench, dtype, *shape)
                if arguments.jax or arguments.only_jax:
                    beside_jax(bench, dtype, *shape)
            except torch.OutOfMemoryError as reason:
                print(f"  {dtype} {shape}: {str(reason)[:100]}")
    if not (arguments.draw or arguments.shapes or arguments.alternate):
        own_epilogue(bench, *(("bfloat16", 4096) if on_gpu else ("float32", 1024)))
        step_of_adam(bench, 1 << (26 if on_gpu else 23))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(bench.found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
