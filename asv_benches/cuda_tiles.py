"""Hopper's blocks beside each other and beside cuBLAS: what `tiling.HOPPER_TILES` is chosen by.

    python asv_benches/cuda_tiles.py                       every case
    python asv_benches/cuda_tiles.py --cases forward --shapes 65536x512x512
    python asv_benches/cuda_tiles.py --rates --prepare 14  what a slice of K takes in each tile

Every contestant is a CUDA graph of one call, so that the device alone is timed; turns, flushes and
medians as in `cuda_gpu`. "chosen" is what a call takes by itself. Results are compared with it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from cuda_gpu import (
    BIG,
    SMALL,
    THIN,
    Clock,
    Contestants,
    graph_of,
    operands,
    torch_backward,
    torch_forward,
)

import numfuse as nf
from numfuse.backends.cuda.kernels.hopper.tiling import HOPPER_SPLIT_TILES, HOPPER_TILES, HopperTile

#: By name: tiles of the table, and those that did not make it there.
TILES: dict[str, HopperTile | None] = {
    "chosen": None,
    **{str(tile): tile for tile, _ in HOPPER_TILES + HOPPER_SPLIT_TILES},
    "64x256x64 ping-pong": HopperTile(64, 256, 2, True),
}
LARGE = ("chosen", "128x256x64 cooperative", "128x128x64 ping-pong")


def forced(tile: HopperTile | None) -> Any:
    """A context in which every product takes this tile."""
    from numfuse.backends.cuda.kernels.hopper import tier

    if tile is None:
        return mock.patch.object(tier, "hopper_tile", tier.hopper_tile)
    return mock.patch.object(tier, "hopper_tile", lambda *sizes, **features: (tile, 1))


def calls(case: str, shape: tuple[int, int, int], dtype: str) -> tuple[Any, Contestants]:
    """Ours, and the peers."""
    a, b, bias, grad = operands(dtype, shape)
    if case == "forward":
        return lambda: nf.matmul_bias_activation(a, b, bias, "gelu"), {
            "fused cuBLAS": lambda: torch._addmm_activation(bias, a, b, use_gelu=True),
            "addmm, gelu": lambda: torch_forward(a, b, bias),
        }
    if case == "bare":
        return lambda: nf.matmul_bias_activation(a, b), {"mm": lambda: torch.mm(a, b)}
    if case == "d_a":
        return lambda: nf.matmul_bias_activation(grad, b.t()), {"mm": lambda: torch.mm(grad, b.t())}
    if case == "d_b":
        return lambda: nf.matmul_bias_activation_bwd(grad, a, b, needs=("b",)), {
            "mm": lambda: torch.mm(a.t(), grad)
        }
    return lambda: nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"), {
        "torch": lambda: torch_backward(grad, a, b, bias)
    }


def forget() -> None:
    """Every choice that was made for a call."""
    from numfuse.backends.cuda.call import entry
    from numfuse.backends.cuda.driver.devices import device

    entry.forget(device())


#: A case, its sizes and dtype, and what else tells a contestant.
Work = tuple[Any, ...]


def prepare(work: list[Work], make: Callable[[Work], None], processes: int) -> None:
    """Let `make` compile all work into the disk cache, and print what went wrong."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for one, done in [(one, pool.submit(make, one)) for one in work]:
            if error := done.exception():
                print(f"{one}: {type(error).__name__}: {str(error)[:300]}")


def recorded(name: str, forcing: AbstractContextManager[Any], call: Any) -> Any:
    """A call that is forced to something as a graph, and its results; None, and why is printed."""
    forget()
    try:
        with forcing:
            replay, results = graph_of(call)
        replay()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
        return None
    return replay, results


def compiled(work: Work) -> None:
    """Compile a contestant."""
    case, shape, dtype, precision, tile = work
    with forced(TILES[tile]), nf.use_backend("cuda", precision=precision):
        calls(case, shape, dtype)[0]()
    torch.cuda.synchronize()


#: Blocks along M and N of a product of one block for each multiprocessor, and lengths of K.
ROUND, DEPTHS = (12, 11), (2048, 6144)


def rate(dtype: str, tile: HopperTile, turned: bool, k: int) -> tuple[Any, Any]:
    """Return the forward with gelu of one round of a tile's blocks, and cuBLAS's product."""
    m, n = ROUND[0] * tile.block_m, ROUND[1] * tile.block_n
    a, b, bias, _ = operands(dtype, (m, k, n))
    if not turned:
        b = b.t().contiguous().t()
    return lambda: nf.matmul_bias_activation(a, b, bias, "gelu"), lambda: torch.mm(a, b)


def compiled_rate(work: Work) -> None:
    """Compile a tile's kernel."""
    dtype, name, turned = work
    tile = TILES[name]
    assert tile is not None
    with forced(tile), nf.use_backend("cuda"):
        rate(dtype, tile, turned, DEPTHS[0])[0]()
    torch.cuda.synchronize()


def rates(dtype: str, rounds: int, processes: int, names: list[str]) -> None:
    """Print what a slice of 64 of K takes, and what is not in proportion to K."""
    every = [str(tile) for tile, _ in HOPPER_TILES]
    work = [(dtype, name, turned) for name in names or every for turned in (True, False)]
    if processes:
        prepare(work, compiled_rate, processes)
    clock = Clock(rounds)
    for _, name, turned in work:
        tile = TILES[name]
        assert tile is not None
        found: Contestants = {}
        alive = []  # graphs know addresses alone
        for k in DEPTHS:
            ours, mm = rate(dtype, tile, turned, k)
            alive += [ours, mm]
            with nf.use_backend("cuda"):
                made = recorded(name, forced(tile), ours)
            if made is not None:
                found[f"{k}"] = made[0]
                found[f"mm {k}"] = graph_of(mm)[0]
        forget()
        times = clock.device(found)
        short, long = (times[f"{k}"] * 1e9 for k in DEPTHS)
        each = (long - short) / ((DEPTHS[1] - DEPTHS[0]) // 64)
        # cycles of the tensor cores alone
        floor = tile.block_m * tile.block_n / 32
        peer = ", ".join(f"{times['mm ' + str(k)] / times[str(k)]:.2f}" for k in DEPTHS)
        rest = short - each * DEPTHS[0] / 64
        told = f"{each:.0f} ns a slice, {each / floor:.3f} a cycle of the tensor cores"
        print(f"{dtype} {'Y' if turned else 'Y^T'} {name}: {told}, {rest:.0f} ns else; "
              f"of cuBLAS {peer}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="*", default=["forward", "bare", "d_a", "d_b", "backward"])
    parser.add_argument("--shapes", nargs="*", default=[], help="MxKxN")
    parser.add_argument("--tiles", nargs="*", default=[], help="names, as printed")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--precision", default="ieee", help="of f32: bf16x6 or tf32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--prepare", type=int, default=0, metavar="N", help="compile in N processes"
    )
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--rates", action="store_true", help="one round of each tile, and no more")
    arguments = parser.parse_args()
    if arguments.rates:
        rates(arguments.dtype, arguments.rounds, arguments.prepare, arguments.tiles)
        return
    given = tuple(tuple(map(int, s.split("x"))) for s in arguments.shapes)
    shapes: Any = given or (*BIG, (2048, 2048, 2048), *SMALL, *THIN)
    if arguments.prepare:
        work = [
            (case, shape, arguments.dtype, arguments.precision, tile)
            for case in arguments.cases
            for shape in ((512, 512, 512), *(s for s in shapes if s[0] < 8192))
            for tile in (arguments.tiles or (LARGE if case != "backward" else ("chosen",)))
        ]
        prepare(work, compiled, arguments.prepare)
    clock, everything = Clock(arguments.rounds), []
    print(torch.cuda.get_device_name(), "microseconds")
    for shape in shapes:
        for case in arguments.cases:
            ours, peers = calls(case, shape, arguments.dtype)
            contestants: Contestants = {}
            known: Any = None
            tiles = arguments.tiles or (LARGE if case != "backward" else ("chosen",))
            if (
                not arguments.tiles
                and case != "backward"
                and shape[0] * shape[1] * shape[2] < 2**31
            ):
                tiles = ("chosen", "128x64x64 cooperative", "64x128x64 cooperative",
                         "64x64x64 cooperative", "64x32x64 cooperative")  # fmt: skip
            for tile in tiles:
                with nf.use_backend("cuda", precision=arguments.precision):
                    made = recorded(tile, forced(TILES[tile]), ours)
                if made is None:
                    continue
                replay, results = made
                parts = results if isinstance(results, tuple) else (results,)
                if known is None:
                    known = parts
                for x, y in zip(parts, known, strict=True):
                    if x is not None:
                        off = float((x.double() - y.double()).abs().max() / y.double().abs().max())
                        assert off < 0.02, (shape, case, tile, off)
                contestants[tile] = replay
            for name, call in peers.items():
                contestants[name] = graph_of(call)[0]
            forget()
            times = clock.device(contestants)
            everything.append({"shape": shape, "case": case, "seconds": times})
            best = min(times[name] for name in peers)
            ours_best = min(t for name, t in times.items() if name not in peers)
            listed = ", ".join(f"{name} {t * 1e6:.1f}" for name, t in times.items())
            print(f"{'x'.join(map(str, shape))} {case} {best / times['chosen']:.3f} "
                  f"(best tile {best / ours_best:.3f}): {listed}", flush=True)  # fmt: skip
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
