"""Whole networks on a WebGPU device: the device's time of each dispatch, and wall time of a call.

    python asv_benches/webgpu_networks.py                  at once and layer by layer
    python asv_benches/webgpu_networks.py --tiles          every tile of TILES, and the best of them
                                                           with other numbers of workgroups
    python asv_benches/webgpu_networks.py --shapes 20000x4x64 --activations none relu tanh

A shape is points x hidden layers x columns; inputs are x and t, and the jet is u, u_x, u_t, u_xx.
Device time is that of timestamps around a pass of one dispatch five times; where the device has
none, it is left out. Wall time is a call with a wait behind it ("alone"), and a call of fifty with
one wait ("in a row"). Points and weights are random and new in each case, ways take turns, figures
are medians, and every way's results are compared with those of the reference in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
from jets import layered_calls, operands
from webgpu import Stopwatch

import numfuse as nf
from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.shaders.networks import NetworkPass

SHAPES = "200x4x32", "2000x4x32", "2000x4x64", "20000x4x32", "20000x4x64"
TILED = "20000x4x64", "2000x4x32"
#: By width, as those of `tiling.NETWORK_TILES`.
TILES = {
    64: (
        (64, 64, 8, 8, 8, 8), (128, 64, 8, 8, 8, 8), (64, 64, 4, 8, 8, 8), (64, 64, 8, 4, 8, 4),
        (128, 64, 8, 4, 8, 4), (64, 64, 4, 4, 8, 4), (32, 64, 4, 8, 8, 8), (32, 64, 2, 8, 8, 8),
    ),
    32: (
        (64, 64, 8, 4, 4, 4), (128, 64, 8, 4, 4, 4), (64, 64, 4, 4, 4, 4), (128, 128, 8, 8, 4, 4),
        (64, 64, 8, 4, 8, 4), (128, 128, 8, 8, 8, 4), (32, 32, 4, 4, 4, 4), (32, 32, 2, 4, 4, 4),
        (16, 32, 2, 4, 4, 4),
    ),
}  # fmt: skip
#: Further words of a tile: 32 neighbours in eight rows; weights in memory of their own; both.
OTHERS = (True,), (False, True), (True, True)
#: Tiles that are timed with these too.
FIRST = 3
GROUPS = 132, 264, 396, 528, 792, 1056
REPEATS = 5


@contextlib.contextmanager
def chosen(
    device: Any, width: int, tile: Any = None, groups: int = 0, trusted: bool = True
) -> Iterator[None]:
    """Have networks run at once: by this tile, so many workgroups, with wgpu's checks or not."""
    before = tiling.NETWORK_TILES[width], 0, True
    most = tiling.NETWORK_GROUPS, tiling.NETWORK_FORWARD_GROUPS
    cpu, rows = tiling.NETWORK_CPU_TILES[width], tiling.NETWORK_ROWS[width]

    def use(tiles: Any, cpu_tiles: Any, own: int, free: bool) -> None:
        device.submit()
        kept = device.programs, device.hosted
        for one in kept if free == NetworkPass.trusted else (*kept, device.pipelines):
            one.clear()
        tiling.NETWORK_TILES[width], tiling.NETWORK_CPU_TILES[width] = tiles, cpu_tiles
        tiling.NETWORK_GROUPS, tiling.NETWORK_FORWARD_GROUPS = (own, own) if own else most
        NetworkPass.trusted = free

    own = (tile,) if tile else before[0]
    use(own, (tile,) if tile else cpu, groups, trusted)
    tiling.NETWORK_ROWS[width] = None
    try:
        yield
    finally:
        tiling.NETWORK_ROWS[width] = rows
        use(before[0], cpu, *before[1:])


def dispatches(device: Any, run: Callable[[], Any]) -> tuple[list[Any], Any]:
    """Return what a repeated call dispatches, and its results, whose buffers these use."""
    for _ in range(100):
        run()
        device.submit()
        submits = device.submits
        made = run()
        found = [one for _, call in device.waiting[:] for one in call]
        if found and device.submits == submits:
            return found, made
    return [], None


def device_times(device: Any, watch: Any, run: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of a call's dispatches, by what they are."""
    found: dict[str, float] = {}
    if watch is None:
        return found
    steps, _made = dispatches(device, run)
    for pipeline, group, grid in steps:
        step = [(pipeline.handle, group, grid)] * REPEATS
        watch.seconds(step)
        took = 1e3 * median([watch.seconds(step) for _ in range(5)]) / REPEATS
        word = pipeline.label.split()[0]
        name = word if word in ("network", "pack", "join", "copy") else "layers"
        found[name] = found.get(name, 0) + took
    return found


def walls(runs: Sequence[Callable[[], Any]], wait: Callable[[], Any], seconds: float) -> list[Any]:
    """Return the milliseconds of each way's calls: alone, and in a row."""
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    for run in runs:
        run()
    wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[-1][0]) < 3:
        for run, found in zip(runs, times, strict=True):
            for count, into in zip((1, 50), found, strict=True):
                start = time.perf_counter()
                for _ in range(count):
                    run()
                wait()
                into.append(1e3 * (time.perf_counter() - start) / count)
    return [tuple(map(median, x)) for x in times]


def arrays(x: Any) -> list[np.ndarray]:
    """Return all arrays of a result, on the host."""
    if x is None:
        return []
    if isinstance(x, (tuple, list)):
        return [y for one in x for y in arrays(one)]
    return [nf.to_numpy(x)]


def errors(ways: dict[str, tuple[Any, Any]], call: Any, grads: Any) -> dict[str, Callable]:
    """Return what finds a result's largest error, by the largest entry of its array, by name."""
    x, *others = call
    wide = [
        np.float64(nf.to_numpy(x)),
        *([np.float64(nf.to_numpy(y)) for y in ys] for ys in others),
    ]
    cotangents = [np.float64(nf.to_numpy(y)) for y in grads]
    how: Any = {"backend": "reference"}
    jet = {"second": np.array([[1.0, 0.0]]), **how}
    exact = {
        "value": nf.mlp(*wide, **how),
        "its gradients": nf.mlp_bwd(cotangents[0], *wide, **how),
        "jet": nf.mlp_jet(*wide, **jet),
        "the jet's gradients": nf.mlp_jet_bwd(*cotangents, *wide, **jet),
    }

    def error(name: str) -> Callable[[Any], float]:
        wanted = arrays_of(exact[name])

        def largest(found: Any) -> float:
            pairs = zip(arrays(found), wanted, strict=True)
            return max(float(np.abs(x - y).max() / max(1e-30, np.abs(y).max())) for x, y in pairs)

        return largest

    return {name: error(name) for name in ways}


def arrays_of(x: Any) -> list[np.ndarray]:
    """Return all arrays of a result of NumPy's."""
    if x is None:
        return []
    if isinstance(x, (tuple, list)):
        return [y for one in x for y in arrays_of(one)]
    return [x]


def told(times: dict[str, float]) -> str:
    """Return a call's times on the device: the network's own, and all."""
    if not times:
        return f"{'':>18}"
    own = times.get("network", 0)
    rest = ", ".join(f"{name} {1e3 * t:.0f}" for name, t in times.items() if name != "network")
    return f"network {own:7.3f}  all {sum(times.values()):7.3f} ms  ({rest} us)"


def width_of(shape: str) -> int:
    """Return the columns to which a shape's layers are padded."""
    return 32 if int(shape.split("x")[2]) <= 32 else 64


def case(shape: str, activation: str) -> tuple[Any, Any, Any]:
    """Return a case's ways by what they make, a function to wait, and functions that check."""
    points, depth, width = map(int, shape.split("x"))
    sizes = (2, *[width] * depth, 1)
    x, layers = operands(np.random.default_rng(), points, sizes, "float32")
    ways, call, grads = layered_calls(x, layers, activation, parts=True)
    for name in ("its gradients", "the jet's gradients"):
        flops = points * (1 if name == "its gradients" else 4) * sum(
            2 * k * n for k, n in itertools.pairwise(sizes)
        )  # fmt: skip
        print(f"{shape} {activation}: {name} are {3 * flops / 1e9:.2f} GFLOP", flush=True)
    check = errors(ways, call, grads) if activation == "tanh" else {}
    waiting = call[0][:1]
    return ways, lambda: nf.synchronize(waiting), check


def compare(device: Any, watch: Any, shape: str, activation: str, seconds: float) -> None:
    """Print a shape's calls at once and layer by layer."""
    ways, wait, check = case(shape, activation)
    for name, runs in ways.items():
        found = walls(runs, wait, seconds)
        for way, run, (alone, row) in zip(("at once", "layers"), runs, found, strict=True):
            checked = check and way == "at once"
            wrong = f"  error {check[name](run()):.0e}" if checked else ""
            on_device = told(device_times(device, watch, run))
            print(f"  {name:20} {way:8} alone {alone:6.3f}  row {row:6.3f} ms  {on_device}{wrong}")
        print(f"  {name:20} layers / at once: {found[1][0] / found[0][0]:.2f} alone, "
              f"{found[1][1] / found[0][1]:.2f} in a row", flush=True)  # fmt: skip


def by_tiles(device: Any, watch: Any, shape: str, only: str, seconds: float) -> None:
    """Print a shape's calls with every tile, then the best one's with other workgroups."""
    width = width_of(shape)
    ways, wait, check = case(shape, "tanh")
    best: dict[str, tuple[float, Any]] = {}

    def line(name: str, tile: Any, groups: int = 0, trusted: bool = True) -> None:
        with chosen(device, width, tile, groups, trusted):
            run = ways[name][0]
            start = time.perf_counter()
            made = run()
            wait()
            first = time.perf_counter() - start
            if nf.last_call().kernel.split("/")[0] not in ("network", "network backward"):
                print(f"  {name:20} {tile}: it does not fit", flush=True)
                return
            wrong = check[name](made)
            ((alone, row),) = walls([run], wait, seconds)
            times = device_times(device, watch, run)
            cost = sum(times.values()) or row
            if trusted and cost < best.get(name, (np.inf,))[0]:
                best[name] = cost, tile
            how = f"{tile} {groups or '':5}{'' if trusted else ' checked'}"
            print(f"  {name:20} {how:38} {told(times)}  alone {alone:6.3f} row {row:6.3f} "
                  f"first {first:.1f} s  error {wrong:.0e}", flush=True)  # fmt: skip

    for name in [x for x in reversed(ways) if only in x]:
        for i, tile in enumerate(TILES[width]):
            line(name, tile)
            for more in OTHERS[: 3 if i < FIRST else 0]:
                line(name, (*tile, *more))
            if not i:
                line(name, tile, trusted=False)
        if name in best:
            for groups in GROUPS:
                line(name, best[name][1], groups)
    for name, (cost, tile) in best.items():
        print(f"{shape}: best of {name}: {tile}, {cost:.3f} ms", flush=True)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="every tile")
    parser.add_argument("--shapes", nargs="+", help=f"by default {' '.join(SHAPES)}")
    parser.add_argument("--only", default="", help="ways with this word, of --tiles")
    parser.add_argument("--activations", nargs="+", default=["tanh"])
    parser.add_argument("--seconds", type=float, default=0.4, help="of each way's wall time")
    args = parser.parse_args()
    device = nf.to_device(np.zeros(4, np.float32), "webgpu").device
    watch = Stopwatch(device) if "timestamp-query" in device.features else None
    print(device, flush=True)
    for shape in args.shapes or (TILED if args.tiles else SHAPES):
        if args.tiles:
            by_tiles(device, watch, shape, args.only, args.seconds)
            continue
        for activation in args.activations:
            with chosen(device, width_of(shape)):
                compare(device, watch, shape, activation, args.seconds)


if __name__ == "__main__":
    main()
