"""What the ends of chains of sums cost: tiles of long sums beside those without an end.

    python asv_benches/cuda_chains.py --prepare 12

What `tiling.CHAIN`, `ONE_CHAIN` and `CudaBlock.kept` are chosen by: forwards with gelu
and a bias as CUDA graphs, by turns, as in `cuda_blocks`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from cuda_blocks import calls
from cuda_gpu import Clock, Contestants, graph_of
from cuda_tiles import Work, forget, prepare, recorded

import numfuse as nf
from numfuse.backends.cuda import block_tiling, tiling
from numfuse.backends.cuda.block_tiling import CudaBlock

ENDLESS = 1 << 29
SINGLE, DOUBLE = CudaBlock(64, 128, 16, 8, 8, 3, 3), CudaBlock(64, 64, 16, 32, 32, 3, 3, 8)
#: {name: (tile, chain)}
TILES: dict[str, dict[str, tuple[CudaBlock, int]]] = {
    "f32": {
        "one chain": (replace(SINGLE, kept=""), ENDLESS),
        **{f"shared, {c}": (replace(SINGLE, kept="shared"), c) for c in (256, 384, 512)},
        "one chain, 2 blocks": (replace(SINGLE, resident=2, kept=""), ENDLESS),
        "registers, 2 blocks, 256": (replace(SINGLE, resident=2), 256),
        "registers, 2 blocks, 4 stages, 256": (replace(SINGLE, resident=2, stages=4), 256),
        "registers, 128 x 128, 256": (CudaBlock(128, 128, 16, 8, 8, 3, 1), 256),
    },
    "f64": {
        "one chain": (replace(DOUBLE, kept=""), ENDLESS),
        "one chain, 2 blocks": (replace(DOUBLE, resident=2, kept=""), ENDLESS),
        "one chain, 2 blocks, 4 stages": (replace(DOUBLE, resident=2, stages=4, kept=""), ENDLESS),
        **{
            f"registers, 2 blocks, {s} stages, {c}": (replace(DOUBLE, resident=2, stages=s), c)
            for s in (3, 4)
            for c in (256, 512)
        },
        "registers, slices of 32, 256": (replace(DOUBLE, block_k=32, resident=2), 256),
        "registers, 64 x 128, 256": (CudaBlock(64, 128, 16, 32, 32, 4, 1, 8), 256),
        "registers, 128 x 64, 256": (CudaBlock(128, 64, 16, 32, 32, 4, 1, 8), 256),
        "shared, 2 blocks, 4 stages, 256": (
            replace(DOUBLE, resident=2, stages=4, kept="shared"), 256
        ),
    },
}  # fmt: skip
SHAPES = ((4096, 4096, 4096), (4096, 1024, 4096), (65536, 512, 512), (1024, 1024, 1024))


@contextmanager
def forced(choice: tuple[CudaBlock, int] | None) -> Iterator[None]:
    """Every product takes this tile, with chains so long."""
    if choice is None:
        yield
        return
    tile, chain = choice

    def block(tiles: Any, m: int, n: int, k: int, *rest: Any) -> tuple[CudaBlock, int, int, float]:
        return tile, k, 1, 0.0

    with (
        mock.patch.object(block_tiling, "block", block),
        mock.patch.object(tiling, "CHAIN", chain),
        mock.patch.object(tiling, "ONE_CHAIN", dict.fromkeys(tiling.ONE_CHAIN, chain)),
    ):
        yield


def compiled(work: Work) -> None:
    """Compile a contestant."""
    case, shape, dtype, name = work
    with forced(TILES[dtype][name]):
        calls(case, shape, dtype)[0]()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="*", default=["f32", "f64"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prepare", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.prepare:
        work = [("forward", SHAPES[1], d, name) for d in arguments.dtypes for name in TILES[d]]
        prepare(work, compiled, arguments.prepare)
    clock = Clock(arguments.rounds)
    print(torch.cuda.get_device_name(), "microseconds, and the error's norm in u")
    for dtype in arguments.dtypes:
        u = 2.0**-24 if dtype == "f32" else 2.0**-53
        for shape in SHAPES:
            ours, exact, peers = calls("forward", shape, dtype)
            contestants: Contestants = {}
            off: dict[str, float] = {}
            for name, choice in {"chosen": None, **TILES[dtype]}.items():
                made = recorded(name, forced(choice), ours)
                if made is None:
                    continue
                contestants[name], result = made
                if choice is None:
                    print(f"  chosen: {nf.last_call().tier}, {nf.last_call().tiling}")
                off[name] = float((result.double() - exact).norm() / exact.norm()) / u
            for name, call in peers.items():
                contestants[name] = graph_of(call)[0]
            forget()
            times = clock.device(contestants)
            base = times["one chain"]
            print(f"{dtype} {'x'.join(map(str, shape))}")
            for name, t in sorted(times.items(), key=lambda x: x[1]):
                print(f"    {t * 1e6:8.1f} {t / base:.3f} {off.get(name, 0):6.2f} u  {name}")
            del exact, contestants
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
