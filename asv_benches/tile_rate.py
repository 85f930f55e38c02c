"""How fast AMX tiles are on one core and on several at once, beside products that are made on them.

    python asv_benches/tile_rate.py                    every power of two of the cores, some 60 s
    python asv_benches/tile_rate.py --threads 1 16 --sizes 2048

The first lines are loops of four loads and four products of tiles, of random numbers in level 1,
on each of some threads: nanoseconds a load and a product. On a host whose tiles are held back by
power, or which several guests share, that rate falls with the threads, and is the floor of what
follows: milliseconds of bare float32 products in IEEE arithmetic, by six and by three bfloat16
ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numba
import numpy as np
from numba.core import cgutils

import numfuse as nf
from numfuse.backends.cpu import host
from numfuse.backends.cpu.llvm import amx
from numfuse.backends.cpu.llvm.vectors import I8, I64, address_intrinsic, call, pointer_to

OPEN, CLOSE = amx.make_open_tiles(), amx.make_close_tiles()
#: Loads and products in a turn of the loop; turns; bytes of a thread's numbers.
FOUR, TURNS, BYTES = 4, 200_000, 1 << 17


def loop(instruction: str) -> Any:
    """Return a function of (turns, threads, addresses of numbers and of scratch, their steps)."""

    def body(builder: Any, turns: Any, at: Any) -> None:
        with cgutils.for_range(builder, turns) as made:
            place = builder.mul(builder.and_(made.index, I64(7)), I64(4096))
            base = builder.add(at, place)
            for j in range(FOUR):
                where = pointer_to(builder, base, 1024 * j, I8)
                call(builder, "llvm.x86.tileloadd64", I8(4 + j), where, I64(64))
            for j in range(FOUR):
                call(builder, instruction, I8(j), I8(4 + j // 2), I8(6 + j % 2))

    run = address_intrinsic("rate", f"{instruction} rate", 2, body)

    def threads(turns, count, numbers, scratch):  # type: ignore[no-untyped-def]
        for i in numba.prange(count):
            OPEN(scratch + i * 1024)
            run(turns, numbers + i * BYTES)
            CLOSE(scratch + i * 1024)

    return numba.njit(parallel=True)(threads)


def rates(counts: list[int]) -> None:
    values = np.random.default_rng(0).standard_normal((max(counts) + 1) * BYTES // 2)
    numbers = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    scratch = np.zeros((max(counts) + 1) * 1024, np.uint8)
    places = (numbers.ctypes.data + 4095) // 4096 * 4096, (scratch.ctypes.data + 63) // 64 * 64
    for name, instruction in (("bfloat16", "tdpbf16ps"), ("int8", "tdpbssd")):
        run = loop(f"llvm.x86.{instruction}")
        for count in counts:
            numba.set_num_threads(count)
            run(10, count, *places)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                run(TURNS, count, *places)
                times.append(time.perf_counter() - start)
            each = statistics.median(times) / TURNS / FOUR * 1e9
            print(f"{name}, {count} threads: {each:.1f} ns a load and a product", flush=True)


def products(counts: list[int], sizes: list[int]) -> None:
    generator = np.random.default_rng(1)
    for n in sizes:
        a, b = (generator.standard_normal((n, n)).astype(np.float32) for _ in range(2))
        out = np.empty_like(a)
        for count in counts:
            numba.set_num_threads(count)
            told = []
            for mode in ("ieee", "bf16x6", "bf16x3"):
                backend = nf.use_backend("cpu", precision=mode).backend
                times = []
                for _ in range(6):
                    start = time.perf_counter()
                    nf.matmul_bias_activation(a, b, out=out, backend=backend)
                    times.append(time.perf_counter() - start)
                told.append(f"{mode} {statistics.median(times[1:]) * 1e3:.1f}")
            print(f"{n} cubed, {count} threads, ms: {', '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cores = os.cpu_count() or 1
    powers = [1 << i for i in range(cores.bit_length())]
    parser.add_argument("--threads", nargs="*", type=int, default=powers)
    parser.add_argument("--sizes", nargs="*", type=int, default=[2048, 4096])
    arguments = parser.parse_args()
    host.tiles_permitted()
    rates(arguments.threads)
    products(arguments.threads, arguments.sizes)


if __name__ == "__main__":
    main()
