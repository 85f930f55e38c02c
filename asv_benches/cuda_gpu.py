"""numfuse on an NVIDIA GPU beside PyTorch and CuPy in one process: the tables of docs/cuda.md.

    python asv_benches/cuda_gpu.py                        every table
    python asv_benches/cuda_gpu.py --only bf16 small      those whose name holds one of these
    python asv_benches/cuda_gpu.py --compile              torch.compile too (minutes of compiling)

Device times: the second-level cache is flushed by a write of 256 MB before every call, which also
gives the host the time to enqueue the call, so that the events around it see the device alone.
Wall times: of a loop of calls that ends in one wait. Contestants take turns in random order, and
figures are medians of the turns. Results are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

import numfuse as nf

DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
BIG = ((8192, 4096, 4096), (4096, 1024, 4096), (65536, 512, 512), (4096, 4096, 4096))
SMALL = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024))
THIN = tuple((m, 4096, 4096) for m in (1, 8, 16, 64))
ODD = ((4095, 4097, 4099),)
#: {table: (dtype, shapes (M, K, N), precision)}
TABLES: dict[str, tuple[str, tuple[tuple[int, int, int], ...], str]] = {
    "bf16": ("bf16", BIG, "ieee"),
    "bf16 odd": ("bf16", ODD, "ieee"),
    "bf16 small": ("bf16", SMALL + THIN, "ieee"),
    "f16": ("f16", BIG, "ieee"),
    "f64": ("f64", BIG, "ieee"),
    "f64 small": ("f64", SMALL + THIN, "ieee"),
    "f32 bf16x6": ("f32", BIG, "bf16x6"),
    "f32 tf32": ("f32", BIG[:1], "tf32"),
    "f32": ("f32", BIG + ODD, "ieee"),
    "f32 small": ("f32", SMALL + THIN, "ieee"),
}
Contestants = dict[str, Callable[[], Any]]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def torch_forward(a: Any, b: Any, bias: Any) -> Any:
    return gelu(torch.addmm(bias, a, b))


def torch_add_forward(a: Any, b: Any, bias: Any) -> Any:
    return gelu(torch.mm(a, b) + bias)


def torch_backward(grad: Any, a: Any, b: Any, bias: Any) -> Any:
    pre = torch.addmm(bias, a, b)
    grad_pre = torch.ops.aten.gelu_backward(grad, pre, approximate="tanh")
    return grad_pre @ b.t(), a.t() @ grad_pre, grad_pre.sum(0)


def torch_add_backward(grad: Any, a: Any, b: Any, bias: Any) -> Any:
    pre = torch.mm(a, b) + bias
    grad_pre = torch.ops.aten.gelu_backward(grad, pre, approximate="tanh")
    return grad_pre @ b.t(), a.t() @ grad_pre, grad_pre.sum(0)


def operands(dtype: str, shape: tuple[int, int, int]) -> tuple[Any, Any, Any, Any]:
    """a, b, bias and grad of a product (M, K, N); the same numbers in every process."""
    m, k, n = shape
    kind = DTYPES[dtype]
    generator = torch.Generator("cuda").manual_seed(m + 3 * k + 7 * n)

    def normal(*lengths: int, scale: float = 1.0) -> Any:
        x = torch.randn(*lengths, device="cuda", dtype=torch.float32, generator=generator)
        return (x * scale).to(kind)

    return normal(m, k), normal(k, n, scale=k**-0.5), normal(n), normal(m, n)


def graph_of(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """The same work as a CUDA graph, without its own cost per operation; and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph.replay, results


def products(
    arguments: argparse.Namespace, dtype: str, shape: tuple[int, int, int]
) -> tuple[dict[str, Contestants], dict[str, Any]]:
    """The contestants of the forward and of the backward, and their exact results."""
    a, b, bias, grad = operands(dtype, shape)
    wide = [x.double() for x in (grad, a, b, bias)]
    exact = {"forward": (torch_forward(*wide[1:]),), "backward": torch_backward(*wide)}
    forward: Contestants = {
        "numfuse": lambda: nf.matmul_bias_activation(a, b, bias, "gelu"),
        "torch": lambda: torch_forward(a, b, bias),
    }
    backward: Contestants = {
        "numfuse": lambda: nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"),
        "torch": lambda: torch_backward(grad, a, b, bias),
    }
    if dtype in ("bf16", "f16"):
        forward["torch._addmm_activation"] = lambda: torch._addmm_activation(
            bias, a, b, use_gelu=True
        )
    if dtype in ("f32", "f64"):
        forward["torch mm + add"] = lambda: torch_add_forward(a, b, bias)
        backward["torch mm + add"] = lambda: torch_add_backward(grad, a, b, bias)
    if arguments.cupy and dtype in ("f32", "f64"):
        import cupy

        x, y, z = (cupy.from_dlpack(t) for t in (a, b, bias))

        def shape_of(t: Any) -> Any:
            return 0.5 * t * (1 + cupy.tanh(0.7978845608028654 * (t + 0.044715 * t * t * t)))

        fused = cupy.fuse(shape_of)
        forward["CuPy"] = lambda: fused(x @ y + z)
    if arguments.compile:
        for mode in (None, "max-autotune-no-cudagraphs") if arguments.autotune else (None,):
            name = "torch.compile" + (" autotune" if mode else "")
            torch._dynamo.reset()
            f = torch.compile(torch_forward, mode=mode, dynamic=False)
            g = torch.compile(torch_backward, mode=mode, dynamic=False)
            forward[name] = lambda f=f: f(a, b, bias)
            backward[name] = lambda g=g: g(grad, a, b, bias)
    return {"forward": forward, "backward": backward}, exact


def gates(dtype: str, size: int) -> tuple[dict[str, Contestants], dict[str, Any], float]:
    """The contestants of a gate, and the bytes of a copy of as many elements."""
    kind = DTYPES[dtype]
    shape = size // 4096, 4096
    a, b, grad = (torch.randn(shape, device="cuda", dtype=torch.float32).to(kind) for _ in range(3))
    silu = torch.nn.functional.silu

    def forward(a: Any, b: Any) -> Any:
        return silu(a) * b

    def backward(grad: Any, a: Any, b: Any) -> Any:
        s = torch.sigmoid(a)
        return grad * b * (s * (1 + a * (1 - s))), grad * (a * s)

    torch._dynamo.reset()
    f, g = torch.compile(forward, dynamic=False), torch.compile(backward, dynamic=False)
    few = [x[:512].double() for x in (grad, a, b)]
    exact = {"forward": (forward(*few[1:]),), "backward": backward(*few)}
    found: dict[str, Contestants] = {
        "forward": {
            "numfuse": lambda: nf.silu_mul(a, b),
            "torch": lambda: forward(a, b),
            "torch.compile": lambda: f(a, b),
            "copy": lambda: a.clone(),
        },
        "backward": {
            "numfuse": lambda: nf.silu_mul_bwd(grad, a, b),
            "torch": lambda: backward(grad, a, b),
            "torch.compile": lambda: g(grad, a, b),
        },
    }
    return found, exact, a.numel() * a.element_size()


def prepare(work: list[tuple[str, tuple[int, int, int], str]], processes: int) -> None:
    """Compile what these products need, in many processes: a kernel takes seconds."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for failed in pool.map(compiled, work):
            if failed:
                print(failed)


def compiled(work: tuple[str, tuple[int, int, int], str]) -> str:
    """Compile the kernels of one product into the disk cache; what went wrong."""
    from numfuse.backends.cuda.call.record import foresee
    from numfuse.backends.cuda.driver.devices import device

    dtype, (m, k, n), precision = work
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
    try:
        for act in ("gelu", "silu"):
            if act == "gelu" or m == 4096:  # the gates are silu's
                foresee(device(), precision, names[dtype], nf.activations()[act], m, k, n)
    except Exception as error:
        return f"{work}: {type(error).__name__}: {error}"
    return ""


#: Cycles for which the device waits, so that the host has launched all of a call before its time
#: begins: some 100 us.
_AHEAD = 200_000


class Clock:
    """Device and wall times of contestants that take turns."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def device(self, contestants: Contestants) -> dict[str, float]:
        """Medians in seconds."""
        events: dict[str, list[Any]] = {name: [] for name in contestants}
        names = list(contestants)
        for _ in range(self.rounds):
            random.shuffle(names)
            for name in names:
                self._flush.zero_()
                torch.cuda._sleep(_AHEAD)
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                contestants[name]()
                last.record()
                events[name].append((first, last))
        torch.cuda.synchronize()
        return {
            name: statistics.median(x.elapsed_time(y) for x, y in pairs) / 1e3
            for name, pairs in events.items()
        }

    def wall(self, contestants: Contestants, calls: int = 50) -> dict[str, float]:
        """Medians in seconds, of one call in a loop of so many."""
        found: dict[str, list[float]] = {name: [] for name in contestants}
        names = list(contestants)
        for _ in range(7):
            random.shuffle(names)
            for name in names:
                call = contestants[name]
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                torch.cuda.synchronize()
                found[name].append((time.perf_counter() - start) / calls)
        return {name: statistics.median(times) for name, times in found.items()}


def error(given: Any, exact: tuple[Any, ...]) -> float:
    """The largest error beside the largest value, over all results."""
    parts = given if isinstance(given, tuple) else (given,)
    worst = 0.0
    for x, wanted in zip(parts, exact, strict=True):
        x = torch.from_dlpack(x) if not isinstance(x, torch.Tensor) else x
        x = x[: wanted.shape[0]].double()
        worst = max(worst, float((x - wanted).abs().max() / wanted.abs().max()))
    return worst


def usable(contestants: Contestants, exact: tuple[Any, ...]) -> tuple[Contestants, dict[str, Any]]:
    """Those that run, and their errors; why the others do not is printed."""
    kept: Contestants = {}
    errors: dict[str, Any] = {}
    for name, call in contestants.items():
        try:
            for _ in range(2):
                result = call()
            torch.cuda.synchronize()
            if name != "copy":
                errors[name] = error(result, exact)
        except Exception as reason:
            print(f"  {name}: {type(reason).__name__}: {str(reason)[:300]}")
            continue
        kept[name] = call
        del result
    return kept, errors


def row(table: str, what: str, times: dict[str, float], errors: dict[str, Any], tier: str) -> None:
    """A line: ours, the best peer's, their ratio, both errors."""
    ours = times.get("numfuse")
    peers = {name: t for name, t in times.items() if name not in ("numfuse", "copy")}
    if ours is None or not peers:
        return
    best = min(peers, key=lambda name: peers[name])
    others = ", ".join(f"{name} {t * 1e3:.4g}" for name, t in peers.items() if name != best)
    print(
        f"| {table} | {what} | {ours * 1e3:.4g} | {best} {peers[best] * 1e3:.4g} | "
        f"{peers[best] / ours:.3f} | {errors.get('numfuse', 0):.1e} / {errors.get(best, 0):.1e} | "
        f"{tier} | {others} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="tables whose name holds one of")
    parser.add_argument("--exact", nargs="*", default=[], help="tables of exactly these names")
    parser.add_argument("--shapes", nargs="*", default=[], help="MxKxN in place of the table's")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="torch.compile as a peer")
    parser.add_argument("--autotune", action="store_true", help="its max-autotune mode too")
    parser.add_argument("--cupy", action="store_true", help="CuPy as a peer")
    parser.add_argument("--wall", action="store_true", help="wall times of the small shapes too")
    parser.add_argument("--prepare", type=int, default=0, metavar="N",
                        help="compile first, in N processes; 0: as it goes")  # fmt: skip
    parser.add_argument("--json", help="write all figures here")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = Clock(arguments.rounds)
    everything: list[dict[str, Any]] = []

    def chosen(name: str) -> bool:
        if arguments.exact:
            return name in arguments.exact
        return not arguments.only or any(word in name for word in arguments.only)

    tables = {
        table: (
            dtype,
            tuple(tuple(map(int, s.split("x"))) for s in arguments.shapes) or shapes,
            precision,
        )
        for table, (dtype, shapes, precision) in TABLES.items()
        if chosen(table)
    }
    if arguments.prepare:
        start = time.perf_counter()
        work = [
            (dtype, shape, precision)
            for dtype, shapes, precision in tables.values()
            for shape in shapes
        ]
        prepare(work, arguments.prepare)  # type: ignore[arg-type]
        print(f"compiled for {len(work)} products in {time.perf_counter() - start:.0f} s")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, numfuse {nf.__version__}")
    print("| table | case | numfuse ms | best peer ms | ratio | errors | tier | other peers ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for table, (dtype, shapes, precision) in tables.items():
        for shape in shapes:
            found, exact = products(arguments, dtype, shape)  # type: ignore[arg-type]
            for operation, contestants in found.items():
                with nf.use_backend("cuda", precision=precision):
                    kept, errors = usable(contestants, exact[operation])
                    call = nf.last_call()
                    times = clock.device(kept)
                    tier = "" if call is None else f"{call.tier} {call.tiling}"
                    what = f"{operation} {'x'.join(map(str, shape))}"
                    row(table, what, times, errors, tier)
                    record = {"table": table, "case": what, "device": times, "errors": errors}
                    if arguments.wall and "small" in table:
                        extra = dict(kept)
                        extra["torch graph"] = graph_of(kept["torch"])[0]
                        record["wall"] = clock.wall(extra)
                        row(table, f"{what} wall", record["wall"], errors, tier)
                everything.append(record)
            del found, exact
            torch.cuda.empty_cache()
    for dtype in DTYPES:
        if not chosen(f"gated {dtype}"):
            continue
        found, exact, nbytes = gates(dtype, 1 << (26 if dtype == "f64" else 27))
        copy = None
        for operation, contestants in found.items():
            kept, errors = usable(contestants, exact[operation])
            times = clock.device(kept)
            copy = times.get("copy", copy)
            arrays = 3 if operation == "forward" else 5
            speed = arrays * nbytes / times["numfuse"] / 1e9
            limit = 2 * nbytes / copy / 1e9 if copy else 0.0
            row("gated", f"{operation} {dtype}", times, errors,
                f"{speed:.0f} GB/s, copy {limit:.0f} GB/s")  # fmt: skip
            everything.append({"table": "gated", "case": f"{operation} {dtype}", "device": times})
        del found, exact
        torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
