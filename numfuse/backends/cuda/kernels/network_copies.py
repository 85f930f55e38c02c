"""Copies of a network's weights to shared memory that a thread need not wait for."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.accesses import fetch_all, fetch_commit, fetch_wait
from numfuse.backends.cuda.compile.elements import shared_place
from numfuse.backends.cuda.compile.intrinsics import FORMATS, emit
from numfuse.backends.cuda.compile.toolchain import SIMULATED
from numfuse.backends.cuda.kernels.network_tiles import Tile, function_of


@functools.cache
def copy(tile: Tile, count: int) -> Any:
    """``copy(memory, at, address)``: `count` neighbours to shared memory.

    cp.async (PTX ISA 9.7.9.25.3.1), without a register between, and 16 bytes past level 1.
    """

    def body(builder, memory, at, address):
        there = shared_place(builder, memory, at, tile.real)
        emit(builder, f"{_text(tile, count)};", "", "rl", [there, address], "memory")

    def simulated(memory, at, address):
        for i in range(count):
            memory[at + i] = elements.loads(tile.real)(address, i)

    return function_of(f"copy_{count}", tile, "rrl", body, simulated)


@functools.cache
def copy_part(tile: Tile, count: int) -> Any:
    """``copy(memory, at, address, bytes)``: `copy` of the first bytes, with 0 behind them."""
    size = FORMATS[tile.real][1]

    def body(builder, memory, at, address, most):
        there = shared_place(builder, memory, at, tile.real)
        emit(builder, f"{_text(tile, count)}, $2;", "", "rlr", [there, address, most], "memory")

    def simulated(memory, at, address, most):
        for i in range(count):
            memory[at + i] = elements.loads(tile.real)(address, i) if i * size < most else 0

    return function_of(f"copy_part_{count}", tile, "rrlr", body, simulated)


def _text(tile: Tile, count: int) -> str:
    length = count * FORMATS[tile.real][1]
    return f"cp.async.{'cg' if length == 16 else 'ca'}.shared.global [$0], [$1], {length}"


def _arrived() -> None:
    """Wait for nothing: the simulator's copies are there when they are made."""


def bindings(tile: Tile) -> dict[str, Any]:
    """Return the copies of a ring of slices, by the names that its text has for them."""
    return {
        "COPY_FEW": copy(tile, tile.few),
        "COPY_SOME": copy_part(tile, tile.few),
        "COPY_ONE": copy_part(tile, 1),
        "COMMIT": _arrived if SIMULATED else fetch_commit,
        "ARRIVED": _arrived if SIMULATED else fetch_wait(tile.stages - 2),
    }


def whole(tile: Tile, copied: bool) -> dict[str, Any]:
    """Return the copies of a layer's weights that lie in shared memory whole; `copied`: by these.

    They are on their way beside a pass, whose threads would wait for what they load to registers.
    """
    if not copied:
        return {"COPIED": False}
    found = {"COPIED": True, "ALL_FETCHED": fetch_all}
    return found | {"COPY_FEW": copy(tile, tile.few), "COPY_ONE": copy_part(tile, 1)}
