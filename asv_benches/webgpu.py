"""Products and gates of the WebGPU backend on a GPU: their time, beside PyTorch's in one process.

    python asv_benches/webgpu.py --tiles              which tile is the fastest here
    python asv_benches/webgpu.py                      the tables of docs/webgpu.md

Every figure is the time of work that follows work: a submit of many dispatches, less one of a few,
so that neither Python nor the wait for the result counts. Operands are random and new in every
case, results are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

import numfuse as nf
from numfuse import problem, tiling
from numfuse.backends import load
from numfuse.backends.webgpu import run
from numfuse.backends.webgpu.device import Commands
from numfuse.backends.webgpu.stores import DeviceStore
from numfuse.tiling import WebGpuTile


def per_call(device, record, repeats: int) -> float:
    """Seconds of one recorded call: (time of 1 + repeats) - (time of 1), the median of five."""
    found = []
    for _ in range(5):
        spent = []
        for count in (1, 1 + repeats):
            commands = Commands(device)
            for _ in range(count):
                record(commands)
            device.wait()
            start = time.perf_counter()
            commands.submit()
            device.wait()
            spent.append(time.perf_counter() - start)
        found.append((spent[1] - spent[0]) / repeats)
    return statistics.median(found)


def recorded(p, operation, operands):
    """A function that records the dispatches of a problem of ghosts."""

    def record(commands):
        store = DeviceStore(commands.device, operands, ())
        store.commands = commands
        operation(store, p)

    return record


def operands(rng, m, n, k, dtype):
    a = rng.standard_normal((m, k), dtype=np.float32).astype(dtype)
    b = (rng.standard_normal((k, n), dtype=np.float32) / np.sqrt(k)).astype(dtype)
    bias = rng.standard_normal(n, dtype=np.float32).astype(dtype)
    grad = rng.standard_normal((m, n), dtype=np.float32).astype(dtype)
    return a, b, bias, grad


def work(a, b, bias, grad, activation="gelu"):
    """{operation: (record, flops, results)} on device arrays."""
    m, k = a.shape
    n = b.shape[1]
    flops = 2 * m * n * k
    product = problem.gemm(a.ghost, b.ghost, None, "none")
    forward = problem.gemm(a.ghost, b.ghost, bias.ghost, activation)
    backward = problem.gemm_backward(grad.ghost, a.ghost, b.ghost, bias.ghost, activation)
    arrays = (a, b, bias, grad)
    return {
        "product": (recorded(product, run.forward, arrays), flops),
        "forward": (recorded(forward, run.forward, arrays), flops),
        "backward": (recorded(backward, run.backward, arrays), 3 * flops),
    }


def tiles(device, sizes, names):
    """Every tile's speed, and the time that its compilation takes."""
    rng = np.random.default_rng()
    candidates = [
        WebGpuTile(128, 128, 16, 8, 16),
        WebGpuTile(128, 128, 16, 8, 16, k_first=True),
        WebGpuTile(128, 128, 16, 8, 16, group=4, k_first=True),
        WebGpuTile(128, 128, 16, 8, 16, group=16, k_first=True),
        WebGpuTile(128, 128, 16, 16, 8, k_first=True),
        WebGpuTile(128, 128, 12, 8, 16, k_first=True),
        WebGpuTile(128, 128, 20, 8, 16, k_first=True),
        WebGpuTile(128, 256, 16, 8, 16, k_first=True),
        WebGpuTile(128, 64, 16, 8, 16, k_first=True),
        WebGpuTile(64, 128, 16, 8, 16, k_first=True),
        WebGpuTile(64, 64, 16, 8, 8),
        WebGpuTile(64, 64, 16, 8, 8, k_first=True),
        WebGpuTile(64, 64, 16, 8, 8, stages=2, k_first=True),
        WebGpuTile(32, 64, 16, 8, 8, k_first=True),
        WebGpuTile(32, 32, 16, 4, 4),
        WebGpuTile(32, 32, 16, 4, 4, k_first=True),
    ]
    chosen = tiling.webgpu_tile
    for size in sizes:
        host = operands(rng, size, size, size, np.float32)
        arrays = [nf.to_device(x, "webgpu") for x in host]
        for tile in candidates:
            tiling.webgpu_tile = lambda *_, tile=tile: tile
            row = []
            for name, (record, flops) in work(*arrays).items():
                if name not in names:
                    continue
                start = time.perf_counter()
                try:
                    record(Commands(device))
                    Commands(device).submit()
                    commands = Commands(device)
                    record(commands)
                    commands.submit()
                    device.wait()
                except Exception as error:
                    row.append(f"{name}: {str(error)[:200]}")
                    continue
                first = time.perf_counter() - start
                seconds = per_call(device, record, min(50, max(2, int(1e12 / flops))))
                row.append(f"{name} {flops / seconds / 1e12:.1f} TFLOP/s (first {first:.1f} s)")
            print(size, tile, "; ".join(row), flush=True)
    tiling.webgpu_tile = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--operations", nargs="+", default=["product", "forward", "backward"])
    arguments = parser.parse_args()
    device = load("webgpu").device
    print(json.dumps(device.describe(), indent=1), flush=True)
    if arguments.tiles:
        tiles(device, arguments.sizes, arguments.operations)


if __name__ == "__main__":
    main()
