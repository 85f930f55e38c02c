"""Whole networks in 16 bits on a GPU: inference and a step of training, beside their peers.

    python asv_benches/networks_gpu.py                            every row
    python asv_benches/networks_gpu.py --only bfloat16 relu       rows whose names have all of it
    python asv_benches/networks_gpu.py --no-compile               without torch.compile
    python asv_benches/networks_gpu.py --kernels                  numfuse's kernels alone: both of a
                                                                  network in 16 bits, as graphs
    python asv_benches/networks_gpu.py --kernels --ways           also other ways of a backward
                                                                  by wgmma (also with --check)
    python asv_benches/networks_gpu.py --check                    results beside float64's, at few
                                                                  and many rows
    python asv_benches/networks_gpu.py --dry                      without a GPU: the rows, what they
                                                                  must move and compute, the sizes
                                                                  of numfuse's blocks

Times of the device by CUDA events, with operands there; contestants take turns in one process, and
figures are medians. A step of training is a forward and a backward with a given cotangent: the
gradients of all weights and biases and, in the rows that say so, of x. Results are compared with
float64. A share is the time that the limit alone takes, of a contestant's: the bytes of x, the
result, the cotangent and d_x at the memory's bandwidth, or the products' multiplications on tensor
cores (three times the forward's in a step: what numfuse makes again does not count), whichever
takes longer. Bandwidth and arithmetic are those of the data sheet, or `--bandwidth` (GB/s) and
`--arithmetic` (TFLOP/s).

- numfuse: :func:`numfuse.mlp` and `mlp_bwd` on PyTorch's tensors; as a step of autograd; replayed
  as a CUDA graph; and by layers. On Hopper also as a graph of the kernels by mma.sync, which are
  those of older GPUs, beside those by wgmma.
- torch: `linear` and activations, eager and compiled, and compiled and replayed as a CUDA graph.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Run = Callable[[], Any]
DEVICE = "cuda"


class Row(NamedTuple):
    """A network, and what is asked of it."""

    widths: tuple[int, ...]
    rows: int
    dtype: str
    activation: str
    #: "inference", "training" or "training, d_x".
    what: str

    def __str__(self) -> str:
        widths = "-".join(map(str, self.widths))
        return f"{self.what}, {widths}, {self.rows} rows, {self.dtype}, {self.activation}"

    @property
    def products(self) -> int:
        """Floating-point operations of the forward's products."""
        return 2 * self.rows * sum(k * n for k, n in itertools.pairwise(self.widths))

    def floor(self, bandwidth: float, arithmetic: float) -> tuple[float, str]:
        """Return the seconds that the machine's limit takes, and which limit it is."""
        ends = self.widths[0] + self.widths[-1]
        moved = {"inference": ends, "training": 2 * ends}.get(self.what, 2 * ends + self.widths[0])
        work = self.products * (1 if self.what == "inference" else 3)
        times = 2 * self.rows * moved / bandwidth, work / arithmetic
        return max(times), "memory" if times[0] > times[1] else "tensor cores"


def every_row(rows: int) -> list[Row]:
    """Return the rows of the benchmark."""
    networks = ((64,) * 4, (64,) * 5, (64,) * 6, (3, 64, 64, 64, 1), (32,) * 5, (64, 128, 128, 64))
    asks = "inference", "training", "training, d_x"
    return [
        Row(widths, rows, dtype, activation, what)
        for what in asks
        for widths in networks
        for dtype in ("bfloat16", "float16")
        for activation in ("relu", "tanh", "silu")
        if dtype == "bfloat16" or (widths == (64,) * 5 and activation == "relu")
    ]


#: Bytes a second, and dense floating-point operations a second in 16 bits, of the data sheets.
LIMITS = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.0e12, 312e12),
    "RTX 4090": (1.008e12, 165e12),
}


# --- contestants ----------------------------------------------------------------------------------
class Network:
    """A network's tensors; weights are transposed views, as a layer's of PyTorch."""

    def __init__(self, row: Row, wide: bool = False) -> None:
        import torch

        made = torch.Generator(DEVICE).manual_seed(0)
        dtype = torch.float64 if wide else getattr(torch, row.dtype)

        def normal(*shape: int, scale: float = 1.0) -> Any:
            x = scale * torch.randn(*shape, generator=made, device=DEVICE)
            return x.to(getattr(torch, row.dtype)).to(dtype)

        pairs = list(itertools.pairwise(row.widths))
        self.row, self.torch = row, torch
        self.x, self.grad = normal(row.rows, row.widths[0]), normal(row.rows, row.widths[-1])
        self.weights = [normal(n, k, scale=(2 / k) ** 0.5) for k, n in pairs]
        self.biases = [normal(n, scale=0.1) for _, n in pairs]
        self.moves = row.what.endswith("d_x")

    # numfuse
    def value(self) -> Any:
        """The value, by numfuse."""
        import numfuse as nf

        return nf.mlp(self.x, [w.T for w in self.weights], self.biases, self.row.activation)

    def step(self) -> Any:
        """A step of training by numfuse's two functions."""
        import numfuse as nf

        weights, needs = [w.T for w in self.weights], ("x",) * self.moves + ("weights", "biases")
        nf.mlp(self.x, weights, self.biases, self.row.activation)
        operands = self.grad, self.x, weights, self.biases, self.row.activation
        d_x, d_weights, d_biases = nf.mlp_bwd(*operands, needs=needs)
        return [*([d_x] if self.moves else []), *[d.T for d in d_weights], *d_biases]

    def leaves(self) -> list[Any]:
        """Parameters, and x where its gradient is asked for."""
        own = [*([self.x] if self.moves else []), *self.weights, *self.biases]
        return [y.detach().clone().requires_grad_() for y in own]

    def apart(self, leaves: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return x, the weights and the biases of leaves."""
        rest = list(leaves[self.moves :])
        count = len(self.weights)
        return (leaves[0] if self.moves else self.x), rest[:count], rest[count:]

    def autograd(self, function: Callable[..., Any]) -> Run:
        """A step of training by autograd."""
        leaves = self.leaves()
        x, weights, biases = self.apart(leaves)

        def run() -> Any:
            return self.torch.autograd.grad(function(x, weights, biases), leaves, self.grad)

        return run

    def ours(self, x: Any, weights: Any, biases: Any) -> Any:
        """The value by numfuse, with gradients."""
        import numfuse as nf

        return nf.mlp(x, [w.T for w in weights], biases, self.row.activation)

    # PyTorch
    def plain(self, x: Any, weights: Any, biases: Any) -> Any:
        """The value by PyTorch."""
        functional = self.torch.nn.functional
        apply = {"tanh": self.torch.tanh}.get(self.row.activation)
        apply = apply or getattr(functional, self.row.activation)
        for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
            x = functional.linear(x, w, bias)
            x = apply(x) if i < len(weights) - 1 else x
        return x


def layered(run: Run) -> Run:
    """The same call with numfuse's layers one by one."""
    from numfuse.adapters import cuda_whole

    def call() -> Any:
        cuda_whole.ENABLED = False
        try:
            return run()
        finally:
            cuda_whole.ENABLED = True

    return call


def by_warps(run: Run) -> Run:
    """The same call with the kernels by mma.sync."""
    from numfuse.backends.cuda.plan import half_networks

    def call() -> Any:
        half_networks.GROUPS = False
        try:
            return run()
        finally:
            half_networks.GROUPS = True

    return call


#: Ways of a backward by wgmma, beside the rule's: so many groups with rows to one that has all sums
#: of gradients (0: each group has its own), and whether relu's slopes are bits in registers.
WAYS = {"0": (0, False), "2": (2, False), "3": (3, False), "3 bits": (3, True)}


def by_way(run: Run, way: tuple[int, bool]) -> Run:
    """The same call with a way of the backward by wgmma; where it cannot, the rule's."""
    from numfuse.backends.cuda.plan import half_networks
    from numfuse.backends.cuda.plan.group_sizes import Apart

    def chosen(*_: Any) -> Apart | None:
        return Apart(*way) if way[0] else None

    def call() -> Any:
        rule = half_networks.APART
        half_networks.APART = chosen
        try:
            return run()
        finally:
            half_networks.APART = rule

    return call


def kernels(net: Network, ways: bool = False) -> dict[str, Callable[[], Run]]:
    """Return what makes numfuse's contestants alone."""
    from jets_gpu import graphed

    ours = net.value if net.row.what == "inference" else net.step
    found: dict[str, Callable[[], Run]] = {
        "numfuse": lambda: ours,
        "numfuse graphed": lambda: graphed(ours),
        "numfuse mma.sync, graphed": lambda: graphed(by_warps(ours)),
    }
    if ways and net.row.what == "inference":
        return found
    for name, way in WAYS.items() if ways else ():
        found[f"numfuse apart {name}, graphed"] = lambda way=way: graphed(by_way(ours, way))
    return found


def contestants(net: Network, compiles: bool) -> dict[str, Callable[[], Run]]:
    """Return what makes each contestant, by its name."""
    from jets_gpu import graphed

    torch = net.torch
    if net.row.what == "inference":
        ours: Run = net.value

        def eager() -> Any:
            with torch.no_grad():
                return net.plain(net.x, net.weights, net.biases)

        def compiled() -> Run:
            function = torch.compile(net.plain, dynamic=False)

            def run() -> Any:
                with torch.no_grad():
                    return function(net.x, net.weights, net.biases)

            return run

        found = {"torch eager": lambda: eager}
    else:
        ours = net.step
        found = {"numfuse autograd": lambda: net.autograd(net.ours)}
        found["torch eager"] = lambda: net.autograd(net.plain)

        def compiled() -> Run:
            return net.autograd(torch.compile(net.plain, dynamic=False))

    found = kernels(net) | found
    found["numfuse by layers"] = lambda: layered(ours)
    if compiles:
        found["torch compiled"] = compiled
        found["torch compiled, graphed"] = lambda: graphed(compiled())
    return found


# --- rows -----------------------------------------------------------------------------------------
def flat(found: Any) -> list[Any]:
    """Results as vectors of float64."""
    every = found if isinstance(found, (list, tuple)) else [found]
    return [y.detach().double().flatten() for y in every]


def error_of(found: Any, exact: list[Any]) -> float:
    """Return the largest relative error of a result, by norms."""
    pairs = zip(flat(found), exact, strict=True)
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


def exact_of(row: Row) -> list[Any]:
    """Return the results in float64."""
    net = Network(row, wide=True)
    if row.what == "inference":
        return flat(net.plain(net.x, net.weights, net.biases))
    return flat(net.autograd(net.plain)())


def peak_of(torch: Any, run: Run) -> float:
    """Return the MiB that a call takes at most beside its operands.

    numfuse's own workspace is none of PyTorch's: what the device has less of is counted, too.
    """
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, there = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    reserved = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    outside = there - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    return (torch.cuda.max_memory_allocated() - before + max(0, outside)) / 2**20


#: Rows that were measured: each contestant's seconds, and those of the limit.
TABLE: list[tuple[Row, dict[str, float], float]] = []


def print_table() -> None:
    """Print all rows: microseconds and shares of the limit, of both kernels and the best peer."""
    print("| row | limit, us | wgmma | share | mma.sync | share | best of PyTorch |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row, times, floor in TABLE:
        cells = [str(row), f"{1e6 * floor:.0f}"]
        for name in ("numfuse graphed", "numfuse mma.sync, graphed"):
            seconds = times.get(name)
            cells += (
                ["", ""] if seconds is None else [f"{1e6 * seconds:.0f}", f"{floor / seconds:.0%}"]
            )
        peers = [seconds for name, seconds in times.items() if name.startswith("torch")]
        cells.append(f"{1e6 * min(peers):.0f}" if peers else "")
        print(f"| {' | '.join(cells)} |")


#: Networks that are checked, and of which types and activations: each kernel takes a while to
#: compile, and `--only` shares them out to processes.
CHECKED = (
    ((64,) * 4, (("bfloat16", "relu"), ("bfloat16", "tanh"), ("float16", "relu"))),
    ((64,) * 5, (("bfloat16", "silu"),)),
    ((64,) * 6, (("bfloat16", "relu"),)),
    ((3, 64, 64, 64, 1), (("bfloat16", "relu"),)),
    ((20, 50, 33, 5), (("float16", "tanh"),)),
    ((32,) * 5, (("bfloat16", "relu"),)),
    ((64, 128, 128, 64), (("bfloat16", "relu"),)),
)


def check(only: Sequence[str], ways: bool, rows: int = 1 << 17) -> bool:
    """Compare numfuse's results with float64's, and with its own of a second call."""
    import torch

    asked = [(widths, *how) for widths, every in CHECKED for how in every]
    good = True
    for widths, dtype, activation in asked:
        for points in (1, 63, 64, 1000, rows + 37):
            row = Row(widths, points, dtype, activation, "training, d_x")
            if not all(part in str(row) for part in only):
                continue
            net, wide = Network(row), Network(row, wide=True)
            value, exact = flat(wide.plain(wide.x, wide.weights, wide.biases)), exact_of(row)
            own = error_of(net.value(), value)
            # Some roundings to 2^-9 or 2^-12, and relu's jumps where one moves a sum's sign: as
            # many as PyTorch's layers have, by which the gradients are judged.
            theirs = error_of(net.autograd(net.plain)(), exact)
            bound = 0.04 if dtype == "bfloat16" else 0.006
            steps = {"": net.step}
            if ways:
                steps |= {f", apart {name}": by_way(net.step, way) for name, way in WAYS.items()}
            for name, step in steps.items():
                first, again = flat(step()), flat(step())
                same = all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
                error = error_of(first, exact)
                passed = same and own < bound and error < max(bound, 1.5 * theirs)
                good = good and passed
                word = "right" if passed else "WRONG"
                told = f"{own:.1e}, {error:.1e} (PyTorch {theirs:.1e}), {same=}"
                print(f"{word} {row}{name}: errors {told}", flush=True)
    return good


def measure(row: Row, args: argparse.Namespace, limits: tuple[float, float]) -> None:
    """Time a row's contestants in turns, and print it."""
    import torch

    # (a row's functions are new to the compiler, whose limit of recompilations they would reach)
    torch._dynamo.reset()
    net, exact = Network(row), exact_of(row)
    runs: dict[str, Run] = {}
    told: dict[str, tuple[float, float, str]] = {}
    made = kernels(net, args.ways) if args.kernels else contestants(net, args.compile)
    for name, make in made.items():
        try:
            run = make()
            memory = peak_of(torch, run)
            found = run()
            kernel = ""
            if name == "numfuse":
                import numfuse as nf

                kernel = getattr(nf.last_call(), "kernel", "")
            told[name], runs[name] = (error_of(found, exact), memory, kernel), run
        except Exception as reason:
            print(f"  {row}, {name}: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
    del exact
    if "numfuse" not in runs:
        return
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 10:
        order = list(runs)
        random.shuffle(order)
        for name in order:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            runs[name]()
            torch.cuda.synchronize()
            first.record()
            for _ in range(args.calls):
                runs[name]()
            last.record()
            torch.cuda.synchronize()
            times[name].append(1e-3 * first.elapsed_time(last) / args.calls)
    floor, limit = row.floor(*limits)
    print(f"{row}: {limit} {1e6 * floor:.1f} us; {told['numfuse'][2]}")
    TABLE.append((row, {name: statistics.median(found) for name, found in times.items()}, floor))
    for name, found in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        median, low = statistics.median(found), min(found)
        error, memory, _ = told[name]
        print(
            f"    {name:26} {1e6 * median:9.1f} us (least {1e6 * low:.1f}), {floor / median:5.1%} "
            f"of the limit, error {error:.1e}, {memory:.0f} MiB",
            flush=True,
        )


def dry(row: Row, limits: tuple[float, float]) -> None:
    """Print what a row must do, and how numfuse's blocks run it on an H200."""
    from numfuse.backends.cuda.plan.group_sizes import group_sizes_of, half_sizes_of
    from numfuse.backends.cuda.plan.product import DeviceInfo

    info = DeviceInfo("H200", (9, 0), 132, 227 << 10, 228 << 10, 50 << 20)
    backward = row.what != "inference"
    sizes = half_sizes_of(info, row.dtype, row.widths, backward)
    if sizes is not None:
        sizes = group_sizes_of(info, row.widths, sizes.padded, backward) or sizes
    floor, limit = row.floor(*limits)
    blocks = "by layers"
    if sizes is not None:
        blocks = f"{sizes.resident} x {sizes.warps} warps a multiprocessor"
        if sizes.rows:
            blocks += f", tiles of {sizes.rows} rows"
    print(f"{row}: {limit} {1e6 * floor:.1f} us; {blocks}")


def main() -> None:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows")
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--calls", type=int, default=10, help="between two events")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--kernels", action="store_true", help="numfuse's contestants alone")
    parser.add_argument("--ways", action="store_true", help="with --kernels or --check: all ways")
    parser.add_argument("--check", action="store_true", help="compare results, and time nothing")
    parser.add_argument("--bandwidth", type=float, help="GB/s")
    parser.add_argument("--arithmetic", type=float, help="TFLOP/s")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    name = "H200"
    if not args.dry:
        import torch

        name = torch.cuda.get_device_name()
        print(f"{name}, PyTorch {torch.__version__}, NumPy {np.__version__}")
    if args.check:
        raise SystemExit(0 if check(args.only, args.ways) else 1)
    known = next((y for x, y in LIMITS.items() if x in name), LIMITS["H100"])
    limits = (
        args.bandwidth * 1e9 if args.bandwidth else known[0],
        args.arithmetic * 1e12 if args.arithmetic else known[1],
    )
    for row in every_row(args.rows):
        if all(part in str(row) for part in args.only):
            if args.dry:
                dry(row, limits)
            else:
                measure(row, args, limits)
    if TABLE:
        print_table()


if __name__ == "__main__":
    main()
