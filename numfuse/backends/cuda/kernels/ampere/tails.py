"""Results whose last rows are made apart, in parts of K: all other blocks fill whole rounds.

572 blocks are two rounds of 264, and 44 that would take a third one nearly alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numfuse.backends.cuda import block_tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.backends.cuda.compile.intrinsics import itemsize
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Plan, Product, Slot


def plan(
    product: Product,
    device: DeviceInfo,
    tiles: tuple[CudaBlock, ...],
    beside: tuple[float, ...],
    work: float,
    planned: Callable[..., Plan | None],
) -> Plan | None:
    """Return a plan with launches of their own for the last rows, if that is much less work.

    `beside` is what each tile costs beside its work, `planned` the `plan` of an engine, whose
    `turn` says that its launch lets the one behind it begin beside it ("first"), or begins so and
    waits for the one before it ("last"). Of a batch, and where the order of the sum is that of
    another product, there is none.
    """
    p = product
    if p.free or p.whole or p.places > 1 or p.is_rich or p.members is not None:
        return None
    found = block_tiling.tail(tiles, p.m, p.n, p.k, device.multiprocessors, beside)
    if found is None or found[0] > block_tiling.CUT_GAIN * work:
        return None
    _, tile, rows, other, part, parts = found
    first = planned(replace(p, m=rows), device, tile, p.k, 1, turn="first")
    last = planned(replace(p, m=p.m - rows), device, other, part, parts, turn="last")
    if first is None or last is None:
        return None
    sums = -(-rows // first.block_m)
    starts = _starts(p, rows) | {"sums": sums * p.n * itemsize(p.accumulator)}
    starts["work"] = first.workspace
    moved = tuple(_moved(launch, starts) for launch in last.launches)
    return replace(
        first,
        launches=first.launches + moved,
        tiling=f"{first.tiling}; last {p.m - rows} rows {last.tiling}",
        workspace=first.workspace + last.workspace,
        sum_rows=sums + -(-(p.m - rows) // last.block_m),
        tail=(rows, part),
    )


def _starts(product: Product, rows: int) -> dict[str, int]:
    """Return how many bytes behind its first row the arrays of the rows from `rows` on begin."""
    p = product
    arrays = {"x": p.x, "extra": p.extra, "pre": p.pre, "out": p.out}
    return {name: rows * x.steps[1] for name, x in arrays.items() if x is not None}


def _moved(launch: Launch, starts: dict[str, int]) -> Launch:
    """Return a launch whose arrays begin so many bytes behind."""

    def moved(argument: Any) -> Any:
        if not isinstance(argument, Slot):
            return argument
        return replace(argument, offset=argument.offset + starts.get(argument.name, 0))

    return replace(launch, arguments=tuple(map(moved, launch.arguments)))
