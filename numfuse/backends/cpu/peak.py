"""The measured ceiling: what the micro-kernel reaches on panels that never leave level 1."""

from __future__ import annotations

import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import types

from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import library, protocol
from numfuse.backends.cpu.llvm import microkernel
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: K of the timed panels: 14 x 256 and 256 x 32 values of float32 are 46 KiB, of which the level-1
#: cache serves the stream.
_DEPTH = 256


def peak_loop(repeats: int, k: int, a: int, b: int, c: int, ldc: int, streams: int) -> None:
    """The micro-kernel over and over on panels in level 1: the FMA peak that can be had."""
    a_next, b_next = k * PANEL_ROWS * SIZE + LINE, k * WIDTH * SIZE + LINE
    for _ in range(repeats):
        MICROKERNEL(MR, NR, k, a, a_next, b, WIDTH * SIZE, b_next, c, ldc, c, ldc, 1, streams)


@functools.cache
def _loop(acc: str) -> Any:
    r = library.registers(acc)
    return specialise.entry(
        peak_loop,
        types.void(*[types.int64] * 7),
        MICROKERNEL=microkernel.make_microkernel(acc, r, protocol.STREAM_COUNT),
        MR=r.mr,
        NR=r.nr,
        PANEL_ROWS=r.panel_rows,
        WIDTH=r.panel_columns,
        LINE=tiling.LINE,
        SIZE=r.itemsize,
    )


def fma_peak(dtype: str = "float32", threads: int = 1, seconds: float = 0.05) -> float:
    """The fused-multiply-add peak of `threads` cores, measured now.

    Parameters
    ----------
    dtype : str
        "float32" or "float64".
    threads : int
        Threads that run at the same time, each on data of its own.
    seconds : float
        About how long to measure.

    Returns
    -------
    float
        GFLOP/s (a multiplication and an addition count as two), the median of five rounds.
    """
    r = library.registers(dtype)
    run = _loop(dtype)
    flops = 2 * r.mr * r.nr * _DEPTH
    panels = np.zeros((threads, (1 << 18) // r.itemsize), dtype)
    base = panels.__array_interface__["data"][0]
    row = 128 * 1024

    def work(thread: int, repeats: int) -> None:
        at = base + thread * panels.strides[0]
        c = at + row
        run(repeats, _DEPTH, at, at + row // 4, c, r.nr * r.itemsize, c + row // 2)

    work(0, 1000)
    start = time.perf_counter()
    work(0, 1000)
    repeats = max(1000, int(1000 * seconds / 5 / (time.perf_counter() - start)))
    with ThreadPoolExecutor(threads) as pool:
        rounds = []
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(work, range(threads), [repeats] * threads))
            rounds.append(time.perf_counter() - start)
    return threads * repeats * flops / statistics.median(rounds) / 1e9
