"""The limits of the machine: products of registers, and numbers through memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    from numfuse.backends.cpu import host

    return host.name()


def cores() -> list[int]:
    """One logical processor of each core that this process may use; empty if unknown.

    Two threads on one core share its arithmetic: a peak per thread would be half the core's.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        chosen.setdefault(path.read_text() if path.exists() else str(cpu), cpu)
    return sorted(chosen.values())


def last_level_cache() -> int:
    """Bytes of the largest cache, 32 MiB if the system does not tell."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [path.read_text().strip() for path in files]  # such as "2048K"
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=32 << 20)


def fma_peak(dtype: str, threads: int, seconds: float = 0.05) -> float:
    """GFLOP/s of fused multiply-adds on registers alone."""
    from numfuse.backends.cpu import peak

    return peak.fma_peak(dtype, threads, seconds)


def triad(threads: int, repeats: int = 5) -> tuple[float, int]:
    """GB/s of ``a = b + s c`` from memory, counting three arrays, and the bytes of one of them.

    The arrays are twice the last-level cache each where 256 MiB allow it; a virtual machine may
    tell of a cache that it has only a slice of. The best of two forms: usual stores, which read the
    line that they write (that is not counted: STREAM's convention), and non-temporal ones, which do
    not.
    """
    import numba

    size = int(min(max(2 * last_level_cache(), 64 << 20), 256 << 20))
    a, b, c = (np.full(size // 8, value) for value in (0.0, 1.0, 2.0))
    numba.set_num_threads(threads)
    best = 0.0
    for kernel in _triads(threads):
        kernel(a, b, c, 3.0)
        for _ in range(repeats):
            start = time.perf_counter()
            kernel(a, b, c, 3.0)
            best = max(best, 3 * size / (time.perf_counter() - start) / 1e9)
    return best, size


def _triads(threads: int) -> list[Any]:
    """The triad with usual stores, and with non-temporal ones."""
    import numba

    from numfuse.backends.cpu import host
    from numfuse.backends.cpu.llvm import intrinsics, moves

    @numba.njit(parallel=threads > 1)
    def usual(a: Any, b: Any, c: Any, s: float) -> None:
        for i in numba.prange(a.shape[0]):
            a[i] = b[i] + s * c[i]

    step = 32
    room = moves.make_room("float64", step)
    stream = moves.make_stream("float64", step, host.vector_bytes(), host.is_x86())
    wide_vectors = intrinsics.make_wide_vectors(8 * host.vector_bytes())

    @numba.njit
    def part(a: Any, b: Any, c: Any, s: float, start: int, end: int) -> None:
        wide_vectors()
        values = room()
        for at in range(start, end, step):
            for i in range(step):
                values[i] = b[at + i] + s * c[at + i]
            stream(values, a.ctypes.data + 8 * at)

    @numba.njit(parallel=threads > 1)
    def past_the_caches(a: Any, b: Any, c: Any, s: float) -> None:
        # From the first line on: the few elements around are not worth a loop of their own.
        first = -(a.ctypes.data // 8) % 8
        size = (a.shape[0] - first) // step // threads * step
        for t in numba.prange(threads):
            part(a, b, c, s, first + t * size, first + (t + 1) * size)

    return [usual, past_the_caches]
