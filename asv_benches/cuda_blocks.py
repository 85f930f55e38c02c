"""Blocks of the tiers "cores" and "tensor cores" beside each other: few rows, and many.

    python asv_benches/cuda_blocks.py --prepare 12
    python asv_benches/cuda_blocks.py --dtypes f64 --rows 16 64 4096

What `few_tiling.DOUBLE_FEW`, `DOUBLE_BLOCKS` and `THIN_ROWS` are chosen by. Every
contestant is a CUDA graph of one forward with gelu and a bias (or of its d_a), so that the device
alone is timed; turns, flushes and medians as in `cuda_gpu`, results compared with float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from cuda_gpu import Clock, Contestants, gelu, graph_of, operands, torch_add_forward, torch_forward
from cuda_tiles import Work, forget, prepare, recorded

import numfuse as nf
from numfuse.backends.cuda import block_tiling, few_tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.backends.cuda.tiling import round_up

Choice = tuple[CudaBlock, int] | str

#: (block, sizes of clusters) for few rows, and blocks for many.
BLOCKS = {
    "f64": [
        (CudaBlock(64, 64, 16, 32, 32, 3, 3, 8), (1, 2, 4, 6)),
        (CudaBlock(64, 64, 16, 32, 32, 6, 2, 8), (2, 4)),
        (CudaBlock(64, 64, 16, 32, 16, 6, 1, 8), (1, 2, 4, 8)),
        (CudaBlock(64, 128, 16, 32, 32, 6, 1, 8), (4,)),
        (CudaBlock(32, 64, 16, 32, 16, 4, 3, 8), (1, 3, 4, 6)),
        (CudaBlock(32, 64, 16, 32, 16, 8, 1, 8), (2, 4, 8)),
        (CudaBlock(16, 64, 32, 16, 16, 4, 1, 8), (2, 4, 8)),
    ],
    "f32": [
        (CudaBlock(64, 64, 16, 8, 8, 3, 4), (1, 8)),
        (CudaBlock(64, 64, 16, 8, 8, 8, 1), (2,)),
        (CudaBlock(64, 64, 16, 4, 8, 8, 1), (2,)),
        (CudaBlock(64, 64, 16, 4, 8, 8, 2), (4,)),
        (CudaBlock(64, 64, 16, 4, 4, 8, 1), (2,)),
        (CudaBlock(64, 128, 16, 8, 8, 8, 1), (4,)),
        (CudaBlock(64, 128, 16, 4, 8, 8, 1), (4,)),
        (CudaBlock(32, 64, 16, 4, 8, 4, 6), (8,)),
    ],
}
MANY = {
    "f64": [
        CudaBlock(64, 64, 16, 32, 32, 3, 3, 8),
        CudaBlock(64, 64, 16, 32, 32, 4, 3, 8),
        CudaBlock(64, 64, 32, 32, 32, 2, 3, 8),
        CudaBlock(64, 64, 16, 32, 16, 4, 2, 8),
        CudaBlock(128, 64, 16, 32, 32, 4, 1, 8),
        CudaBlock(64, 128, 16, 32, 32, 4, 1, 8),
        CudaBlock(128, 128, 16, 64, 32, 4, 1, 8),
        CudaBlock(64, 64, 16, 32, 32, 3, 3, 8, group=16),
        CudaBlock(64, 64, 16, 32, 32, 3, 3, 8, group=4),
    ],
    "f32": [
        *block_tiling.CORE_BLOCKS,
        CudaBlock(64, 128, 8, 8, 8, 3, 4, kept="shared"),
        CudaBlock(128, 128, 8, 8, 8, 3, 2, kept="shared"),
        CudaBlock(128, 256, 16, 8, 16, 3, 1, kept="shared"),
        CudaBlock(256, 128, 16, 8, 16, 3, 1, kept="shared"),
    ],
}


def choices(dtype: str, rows: int) -> dict[str, Choice]:
    """By name: what takes the product."""
    found: dict[str, Choice] = {"chosen": "chosen"}
    if rows > 64:
        return found | {f"{tile}, groups of {tile.group}": (tile, 1) for tile in MANY[dtype]}
    if dtype == "f32" or rows <= 32:
        found["thin"] = "thin"
    for tile, clusters in BLOCKS[dtype]:
        if rows <= tile.block_m < max(64, 2 * rows) or tile.block_m == 32 >= rows:
            found |= {f"{tile}, cluster {c}": (tile, c) for c in clusters}
    return found


@contextmanager
def forced(choice: Choice) -> Iterator[None]:
    """Every product takes this."""
    if choice == "chosen":
        yield
        return
    thin = {"float32": 64, "float64": 32} if choice == "thin" else {}

    def block(tiles: Any, m: int, n: int, k: int, *rest: Any) -> tuple[CudaBlock, int, int, float]:
        assert not isinstance(choice, str)
        tile, cluster = choice
        part = round_up(-(-k // cluster), tile.block_k)
        return tile, part, -(-k // part), 0.0  # (no work: all columns by one launch)

    with mock.patch.object(few_tiling, "THIN_ROWS", thin):
        if choice == "thin":
            yield
        else:
            few = mock.patch.object(few_tiling, "few", lambda tiles, *sizes: None)
            with few, mock.patch.object(block_tiling, "block", block):
                yield


def calls(case: str, shape: tuple[int, int, int], dtype: str) -> tuple[Any, Any, Contestants]:
    """Ours, the result in float64, and the peers."""
    a, b, bias, grad = operands(dtype, shape)
    if case == "forward":
        exact = gelu(a.double() @ b.double() + bias.double())
        return lambda: nf.matmul_bias_activation(a, b, bias, "gelu"), exact, {
            "mm, add, gelu": lambda: torch_add_forward(a, b, bias),
            "addmm, gelu": lambda: torch_forward(a, b, bias),
        }  # fmt: skip
    exact = grad.double() @ b.double().t()
    peers = {"mm": lambda: torch.mm(grad, b.t())}
    return lambda: nf.matmul_bias_activation_bwd(grad, a, b, needs=("a",)).d_a, exact, peers


def compiled(work: Work) -> None:
    """Compile a contestant."""
    case, shape, dtype, name = work
    with forced(choices(dtype, shape[0])[name]):
        calls(case, shape, dtype)[0]()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="*", default=["f64", "f32"])
    parser.add_argument("--rows", nargs="*", type=int, default=[16, 32, 48, 64])
    parser.add_argument("--cases", nargs="*", default=["forward", "d_a"])
    parser.add_argument("-k", type=int, default=4096)
    parser.add_argument("-n", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--prepare", type=int, default=0, metavar="N", help="compile in N processes"
    )
    parser.add_argument("--json", help="write all figures here")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = [(rows, arguments.k, arguments.n) for rows in arguments.rows]
    table = [(case, s, d) for d in arguments.dtypes for case in arguments.cases for s in shapes]
    if arguments.prepare:
        work = [(*row, name) for row in table for name in choices(row[2], row[1][0])]
        prepare(work, compiled, arguments.prepare)
    clock, everything = Clock(arguments.rounds), []
    print(torch.cuda.get_device_name(), "microseconds")
    for case, shape, dtype in table:
        ours, exact, peers = calls(case, shape, dtype)
        contestants: Contestants = {}
        for name, choice in choices(dtype, shape[0]).items():
            made = recorded(name, forced(choice), ours)
            if made is None:
                continue
            replay, result = made
            off = float((result.double() - exact).abs().max() / exact.abs().max())
            if not off < {"f64": 1e-14, "f32": 3e-6}[dtype]:
                print(f"  {name} is wrong by {off:.1e}")
                continue
            contestants[name] = replay
            if choice == "chosen":
                print(f"  chosen: {nf.last_call().tier}, {nf.last_call().tiling}")
        for name, call in peers.items():
            contestants[name] = graph_of(call)[0]
        forget()
        times = clock.device(contestants)
        everything.append({"dtype": dtype, "shape": shape, "case": case, "seconds": times})
        best = min(times[name] for name in peers)
        listed = "".join(
            f"\n    {t * 1e6:7.1f} {name}" for name, t in sorted(times.items(), key=lambda x: x[1])
        )
        print(
            f"{dtype} {'x'.join(map(str, shape))} {case} {best / times['chosen']:.3f}{listed}",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
