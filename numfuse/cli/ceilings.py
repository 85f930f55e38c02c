"""What the machine can do at most: products of registers, and numbers through memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> list[int]:
    """One logical processor of each core that this process may use; empty if unknown.

    Two threads on one core share its arithmetic: a peak per thread would be half the core's.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings = path.read_text().strip()
        except OSError:
            siblings = str(cpu)
        chosen.setdefault(siblings, cpu)
    return sorted(chosen.values())


def last_level_cache() -> int:
    """Bytes of the largest cache, 32 MiB if the system does not tell."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * factor[text[-1]] if text[-1] in factor else int(text))
    return max(sizes, default=32 << 20)


def fma_peak(dtype: str, threads: int, seconds: float = 0.05) -> float | None:
    """GFLOP/s of fused multiply-adds on registers alone; None if it cannot be measured."""
    try:
        from numfuse.backends.cpu import fma_peak
    except ImportError:
        return None
    return float(fma_peak(dtype, threads, seconds))


def triad(threads: int, repeats: int = 5) -> tuple[float, int]:
    """GB/s of ``a = b + s c`` from memory, counting three arrays, and the bytes of one of them.

    The arrays are twice the last-level cache each where 256 MiB allow it; a virtual machine may
    tell of a cache that it has only a slice of. Stores read the line they write, which is not
    counted: STREAM's convention.
    """
    import numba

    size = int(min(max(2 * last_level_cache(), 64 << 20), 256 << 20))
    a, b, c = (np.full(size // 8, value) for value in (0.0, 1.0, 2.0))

    @numba.njit(parallel=threads > 1)
    def kernel(a: Any, b: Any, c: Any, s: float) -> None:
        for i in numba.prange(a.shape[0]):
            a[i] = b[i] + s * c[i]

    numba.set_num_threads(threads)
    kernel(a, b, c, 3.0)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        kernel(a, b, c, 3.0)
        best = max(best, 3 * size / (time.perf_counter() - start) / 1e9)
    return best, size
