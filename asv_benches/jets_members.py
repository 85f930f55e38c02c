"""Jets of many directions on a GPU: passes in the epilogues of products, and passes beside them.

    python asv_benches/jets_members.py
    python asv_benches/jets_members.py --only float64 --seconds 2
    python asv_benches/jets_members.py --only float32 --precision bf16x6

The Laplacian of a network of 50 inputs, 2048 points, as in `jets_gpu.py`: its forward, and the
gradient of its mean square by all weights, as CUDA graphs that take turns in one process. Every way
is compared with the passes' results first; an error beyond 1e-10 (float64) or 1e-4 of the largest
value fails. Then the device's time of each kernel, by PyTorch's profiler, of the products' way.
With `--precision` the float32 rows are of that precision, beside the passes of exact products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jets import operands
from jets_gpu import LAPLACE, flat, graphed, laplace_grads, ours, timed

import numfuse as nf
from numfuse.adapters import stacks
from numfuse.backends.cuda import block_tiling, tiling
from numfuse.backends.cuda.call.entry import forget
from numfuse.backends.cuda.call.record import REPLAY
from numfuse.backends.cuda.driver.devices import device

#: {way: what is set while it is recorded}
WAYS: dict[str, dict[Any, dict[str, Any]]] = {
    "passes": {tiling: {"MEMBERS_LEAST": 1 << 30}},
    "products": {},
    "products, own tangents": {stacks: {"SHARED_BYTES": 1 << 40}},
    "products, wide blocks": {block_tiling: {"DOUBLE_MEMBERS": block_tiling.DOUBLE_LONG}},
}
#: The programs of graphs, whose kernels and constants live as long as they do.
HELD: list[Any] = []
#: The largest error of a dtype, or of a precision that is no IEEE 754.
BOUNDS = {"float64": 1e-10, "float32": 1e-4, "bf16x6": 1e-4, "bf16x3": 1e-3, "tf32": 1e-1}


def recorded(way: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call as a graph that was recorded in this way, and forget how."""
    before = [(owner, name, getattr(owner, name)) for owner, x in WAYS[way].items() for name in x]
    for owner, values in WAYS[way].items():
        for name, value in values.items():
            setattr(owner, name, value)
    HELD.extend((REPLAY.programs(), device(0).kept_products.programs()))
    forget(device(0))
    try:
        run()
        return graphed(run)
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def with_precision(run: Callable[[], Any], precision: str) -> Callable[[], Any]:
    """Return a call whose products have a precision."""

    def precise() -> Any:
        with nf.use_backend("cuda", precision=precision):
            return run()

    return precise


def compare(name: str, bound: float, calls: dict[str, Callable[[], Any]], found: Any) -> None:
    """Raise if a way's results are not those of the passes; print how far they are."""
    exact = found(calls["passes"]())
    for way, call in calls.items():
        error = np.abs(found(call()) - exact).max() / np.abs(exact).max()
        print(f"  {name}, {way}: {error:.0e} from the passes", flush=True)
        if not error <= bound:
            raise AssertionError(f"{name}, {way}: {error}")


def kernels(run: Callable[[], Any]) -> None:
    """Print the device's time of each kernel of a graph, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
    for e in events[:24]:
        print(f"    {e.device_time_total / 3e3:8.3f} ms in {e.count // 3:3d}  {e.key[:90]}")


def row(
    name: str, points: int, sizes: tuple[int, ...], dtype: str, seconds: float, precision: str
) -> None:
    """Print a network's forward and gradient in every way."""
    rng = np.random.default_rng(0)
    x, layers = operands(rng, points, (2, *sizes[1:]), dtype)
    x = rng.standard_normal((points, sizes[0])).astype(dtype)
    first = rng.standard_normal((sizes[0], sizes[1])) / np.sqrt(sizes[0])
    layers[0] = first.astype(dtype), layers[0][1]
    ws, bs = ([torch.from_numpy(pair[i]).cuda() for pair in layers] for i in range(2))
    on, second = torch.from_numpy(x).cuda(), np.ones((1, sizes[0]))

    def forward() -> Any:
        return nf.mlp_jet(on, ws, bs, "tanh", second=second)

    def value(found: Any) -> np.ndarray:
        return np.concatenate([y.cpu().numpy().ravel() / max(1, y.shape[0]) for y in found])

    exact = precision == "ieee"
    label, bound = ("", BOUNDS[dtype]) if exact else (f" {precision}", BOUNDS[precision])
    gradient = ours(on, ws, bs, second, laplace_grads)
    for what, run, found in (("forward", forward, value), ("gradient", gradient, flat)):
        ways = [way for way in WAYS if dtype == "float64" or "blocks" not in way]
        chosen = with_precision(run, precision)
        # those of exact products come first: all others are compared with them
        calls = {"passes": recorded("passes", run)}
        calls |= {
            f"{way}{label}": recorded(way, chosen) for way in ways if label or way != "passes"
        }
        compare(f"{name}, {what}", bound, calls, found)
        told = ", ".join(f"{way} {1e3 * t:.3f} ms" for way, t in timed(calls, seconds).items())
        print(f"{name}, {what}: {told}", flush=True)
        kernels(calls[f"products{label}"])
        del calls
        torch.cuda.empty_cache()


def main() -> None:
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--precision", choices=("ieee", "bf16x6", "bf16x3", "tf32"), default="ieee")
    args = parser.parse_args()
    print(torch.cuda.get_device_name())
    for name, (points, sizes, dtype) in LAPLACE.items():
        if all(word in name for word in args.only):
            precision = args.precision if dtype == "float32" else "ieee"
            row(name, points, sizes, dtype, args.seconds, precision)


if __name__ == "__main__":
    main()
