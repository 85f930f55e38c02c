"""How a product of the rows of all members of points ends: the pass over points in its epilogue.

A point has COUNT rows, one behind the other: its value, its directions and, maybe, a second
derivative (`numfuse.problem.jets`). What a direction becomes depends on its own sum, on what its
point has alone (the slopes of the curve, `planes`) and, in a backward, on the direction's sum in
the forward. So a row needs no other row, but for one sum over the directions of each point: a block
makes that of the rows that it has, to a table of (row blocks, points of a block, N), and `join`
adds up those of a point in the order of its rows.

One row of a point *rides*: its sum is stored as it is, for the pass that ends a point. The row that
the slopes come of was made before by a product of its own; its sum here is not used.

The formulas are parts of `epilogues.Jet`. This file has what every tier needs, and the end of a
block of the mirror; that of the others is `ampere.members`.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.schema import Array
from numfuse.backends.cuda.compile.unroll import Template, inlined
from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.plan.product import MOST_SLOPES, Operand, Product, Slot


@dataclass
class MemberEnds:
    """The arrays with which such a product ends; steps lead to the next point, member, column."""

    #: What a point has alone: planes, of which a step leads from one to the next.
    planes: Array
    #: The stack of the directions' sums: a forward may store it, a backward reads it.
    kept: Array
    out: Array
    #: The addresses of a weight for each direction, and of the table of sums.
    weights: Any
    table: Any
    #: Rows of a point, its directions, and the points of a block at most.
    members: Any
    directions: Any
    slots: Any


def slots_of(block_m: int, members: int) -> int:
    """Return the points of which a block of rows has some, at most."""
    return max(0, block_m - 2) // members + 2


def ending(moving, kept, weight, turned, slope_0, slope_1, slope_2):
    """Return what a direction becomes, and what it adds to the sum of its point."""
    bent = ZERO
    if BENT:
        if weight != ZERO:
            bent = weight * turned
    if SUMMED:
        stored, added = DIRECTION(moving, kept, bent, slope_0, slope_1, slope_2)
        if WEIGHTS_SUM:
            added = weight * added if weight != ZERO else ZERO
        return stored, added
    return DIRECTION(moving, kept, bent, slope_0, slope_1, slope_2), ZERO


def bindings_of(product: Product) -> dict[str, Any]:
    """Return the UPPER-case names of every tier: which parts there are, and the formula."""
    m, acc = product.members, product.accumulator
    assert m is not None
    slopes = tuple(f"shared_{i}" for i in range(MOST_SLOPES))
    direction = formula(product.epilogue, (*m.names, *slopes), acc, short=False)
    parts: dict[str, Any] = {
        "DIRECTION": direction,
        "SUMMED": product.sums,
        "BENT": m.bent,
        "WEIGHTS_SUM": not m.backward,
        "ZERO": np.dtype(acc).type(0),
    }
    return parts | {
        "SLOPES": m.slopes,
        "WEIGHTED": m.bent or (product.sums and not m.backward),
        "READS": m.backward and product.extra is not None,
        "KEEPS": product.pre is not None,
        # the first row of a backward's point rides, the last of a forward's
        "RIDES": m.backward,
        "ENDING": inlined(ending, **parts),
    }


def ends_of(product: Product, given: Callable[[Slot, Operand | None], Array], block_m: int) -> Any:
    """Return the arguments with which such a product ends; `given` as for `epilogue.finishing`."""
    m = product.members
    assert m is not None
    kept = given(Slot("extra"), product.extra) if m.backward else given(Slot("pre"), product.pre)
    return MemberEnds(
        planes=given(Slot("bias"), product.bias),
        kept=kept,
        out=given(Slot("out"), product.out),
        weights=Slot("weights") if bindings_of(product)["WEIGHTED"] else 0,
        table=Slot("sums") if product.sums else 0,
        members=m.count,
        directions=m.directions,
        slots=slots_of(block_m, m.count),
    )


# --- the mirror -----------------------------------------------------------------------------------
def finish(shared, t, ends: MemberEnds, place, plane, row0, column0, m, n):
    """The end of a block of the mirror: its sums are in shared memory; steps are in elements."""
    for i in range(t, BLOCK_M * BLOCK_N, THREADS):
        row, column = row0 + i // BLOCK_N, column0 + i % BLOCK_N
        added = ZERO
        if row < m and column < n:
            point = row // ends.members
            member = row - point * ends.members
            moving, before, turned, weight = shared[i], ZERO, ZERO, ZERO
            slope_0, slope_1, slope_2 = ZERO, ZERO, ZERO
            plane_at = point * ends.planes.row + column * ends.planes.column
            kept_at = point * ends.kept.place + member * ends.kept.row + column * ends.kept.column
            out_at = point * ends.out.place + member * ends.out.row + column * ends.out.column
            if 0 < member <= ends.directions:
                if SLOPES > 0:
                    slope_0 = LOAD_PLANE(ends.planes.address, plane_at)
                if SLOPES > 1:
                    slope_1 = LOAD_PLANE(ends.planes.address, plane_at + ends.planes.place)
                if SLOPES > 2:
                    slope_2 = LOAD_PLANE(ends.planes.address, plane_at + 2 * ends.planes.place)
                if BENT:
                    turned = LOAD_PLANE(ends.planes.address, plane_at + SLOPES * ends.planes.place)
                if WEIGHTED:
                    weight = LOAD_WEIGHT(ends.weights, member - 1)
                if READS:
                    before = LOAD_KEPT(ends.kept.address, kept_at)
                made, added = ENDING(moving, before, weight, turned, slope_0, slope_1, slope_2)
                STORE_OUT(ends.out.address, out_at, made)
                if KEEPS:
                    STORE_KEPT(ends.kept.address, kept_at, moving)
            elif (member == 0) == RIDES:
                if KEEPS:
                    STORE_KEPT(ends.kept.address, kept_at, moving)
                else:
                    STORE_OUT(ends.out.address, out_at, moving)
        if SUMMED:
            shared[i] = added


def sum_points(shared, t, ends: MemberEnds, sums, number, row0, column0, m, n):
    """The sums over a block's rows of each point, to row `number` of the table."""
    for i in range(t, ends.slots * BLOCK_N, THREADS):
        slot, column = i // BLOCK_N, i % BLOCK_N
        if column0 + column < n:
            first = (row0 // ends.members + slot) * ends.members - row0
            last = min(first + ends.members, min(BLOCK_M, m - row0))
            total = ZERO
            for row in range(max(first, 0), last):
                total = total + shared[row * BLOCK_N + column]
            STORE_SUM(ends.table, (number * ends.slots + slot) * n + column0 + column, total)


def plain_bindings(product: Product) -> dict[str, Any]:
    """Return the UPPER-case names of the mirror's end."""
    acc = product.accumulator
    kept = product.extra or product.pre
    return bindings_of(product) | {
        "SUMS": product.sums,
        "LOAD_PLANE": elements.loads(acc),
        "LOAD_WEIGHT": elements.loads(acc),
        "LOAD_KEPT": elements.loads(kept.dtype if kept else acc),
        "STORE_KEPT": elements.stores(kept.dtype if kept else acc),
        "STORE_OUT": elements.stores(product.out.dtype),
        "STORE_SUM": elements.stores(acc),
    }


# --- the sums of points ---------------------------------------------------------------------------
def point_sum(table, point, column, n):
    """Return what the blocks that have some rows of a point have added up, in their order."""
    first = point * MEMBERS
    total = ZERO
    for block in range(first // ROWS, (first + MEMBERS - 1) // ROWS + 1):
        slot = point - block * ROWS // MEMBERS
        total = total + LOAD(table, (block * SLOTS + slot) * n + column)
    return total


def point_sums(accumulator: str, members: int, rows: int) -> Template:
    """Return `point_sum` for the table of blocks of `rows` rows."""
    return inlined(
        point_sum,
        MEMBERS=members,
        ROWS=rows,
        SLOTS=slots_of(rows, members),
        ZERO=np.dtype(accumulator).type(0),
        LOAD=elements.loads(accumulator),
    )
