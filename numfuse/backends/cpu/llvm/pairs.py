"""Packing of half-precision factors as they are, for products of pairs along K.

Dot products and tiles multiply two neighbours of K at a time, so a panel holds *pairs*: 32 bits
with the values of p and p + 1.  Turning a matrix round is then a transpose of 32-bit elements, and
rows are interleaved two by two.  All of this is for AVX-512: dot products and tiles come with it.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from numfuse.backends.cpu.llvm.vectors import (
    I1,
    I16,
    I32,
    I64,
    address_intrinsic,
    broadcast,
    insert_part,
    lane_numbers,
    masked_load,
    pointer_to,
    transpose_lanes,
    vector_of,
)

#: Lanes of 32 bits, and halves, in 512 bits.
_PAIRS, _HALVES = 16, 32


@functools.cache
def make_pair_row(live: int) -> Any:
    """``pair_row(source, step, both, target)``: ``(source[q], (source + step)[q])`` for q < live.

    Where `both` is 0 there is no second row: its values are zeros.  Writes whole vectors of 16
    pairs; lanes from `live` on are zeros.
    """

    def body(
        builder: ir.IRBuilder, source: ir.Value, step: ir.Value, both: ir.Value, target: ir.Value
    ) -> None:
        _interleaved(builder, source, step, both, I64(live), target, -(-live // _PAIRS), live)

    return address_intrinsic("pair_row", str(live), 4, body)


@functools.cache
def make_pair_lanes() -> Any:
    """``pair_lanes(source, step, both, live, target)``: the same for a `live` <= 16 of run time."""

    def body(builder: ir.IRBuilder, *args: ir.Value) -> None:
        source, step, both, live, target = args
        _interleaved(builder, source, step, both, live, target, 1, 0)

    return address_intrinsic("pair_lanes", "", 5, body)


def _interleaved(
    builder: ir.IRBuilder,
    source: ir.Value,
    step: ir.Value,
    both: ir.Value,
    live: ir.Value,
    target: ir.Value,
    vectors: int,
    known: int,
) -> None:
    there = builder.icmp_signed("!=", both, I64(0))
    second = builder.add(source, builder.select(there, step, I64(0)))
    halves = vector_of(I16, _PAIRS)
    for v in range(vectors):
        rows = []
        for address in (source, second):
            pointer = pointer_to(builder, address, 2 * _PAIRS * v, halves)
            if known >= _PAIRS * (v + 1):
                rows.append(builder.load(pointer, align=2))
            else:
                rest = builder.sub(live, I64(_PAIRS * v))
                rows.append(masked_load(builder, pointer, rest, 2))
        mask = broadcast(builder, builder.sext(there, I16), _PAIRS)
        rows[1] = builder.and_(rows[1], mask)
        pattern = lane_numbers([x for q in range(_PAIRS) for x in (q, q + _PAIRS)])
        pairs = builder.shuffle_vector(rows[0], rows[1], pattern)
        builder.store(pairs, pointer_to(builder, target, 4 * _PAIRS * v, pairs.type), align=4)


@functools.cache
def make_copy_halves() -> Any:
    """``copy_halves(source, live, target)``: `live` values and zeros, 32 in all."""

    def body(builder: ir.IRBuilder, source: ir.Value, live: ir.Value, target: ir.Value) -> None:
        halves = vector_of(I16, _HALVES)
        pointer = pointer_to(builder, source, 0, halves)
        place = pointer_to(builder, target, 0, halves)
        with builder.if_else(builder.icmp_signed(">=", live, I64(_HALVES))) as (full, part):
            with full:
                builder.store(builder.load(pointer, align=2), place, align=4)
            with part:
                builder.store(masked_load(builder, pointer, live, 2), place, align=4)

    return address_intrinsic("copy_halves", "", 3, body)


@functools.cache
def make_turned_halves() -> Any:
    """``turned_halves(source, step, rows, k, target)``: 8 rows of a tile of A from columns of A.

    ``target[r * 64 + p * 2] = source[p * step + r * 2]`` for ``r < rows <= 8`` and ``p < k <= 32``;
    zeros for other p, and no meaning in other rows, of which there are 8.

    A 128-bit lane l gathers 8 rows of columns 8 l to 8 l + 7: interleaved to pairs, and 4 x 4
    pairs turned round in their lane, they are what lane l of 8 results holds.
    """

    def body(builder: ir.IRBuilder, *args: ir.Value) -> None:
        source, step, rows, k, target = args
        piece, whole, pairs = vector_of(I16, 8), vector_of(I16, _HALVES), vector_of(I32, _PAIRS)

        def turned(load: Any) -> None:
            gathered = []
            for t in range(8):
                vector = ir.Constant(whole, ir.Undefined)
                for lane in range(4):
                    vector = insert_part(builder, vector, load(8 * lane + t), 8 * lane)
                gathered.append(vector)
            for half in range(2):
                starts = [8 * lane + 4 * half for lane in range(4)]
                pattern = lane_numbers(
                    [x for s in starts for q in range(s, s + 4) for x in (q, q + 32)]
                )
                four = [
                    builder.bitcast(
                        builder.shuffle_vector(gathered[t], gathered[t + 1], pattern), pairs
                    )
                    for t in range(0, 8, 2)
                ]
                for r, row in enumerate(transpose_lanes(builder, four), 4 * half):
                    builder.store(row, pointer_to(builder, target, 64 * r, pairs), align=4)

        def address(p: int) -> ir.Value:
            return pointer_to(builder, source, builder.mul(step, I64(p)), piece)

        def masked(p: int) -> ir.Value:
            live = builder.select(builder.icmp_signed("<", I64(p), k), rows, I64(0))
            return masked_load(builder, address(p), live, 2)

        full: ir.Value = builder.and_(
            builder.icmp_signed(">=", rows, I64(8)), builder.icmp_signed(">=", k, I64(_HALVES))
        )
        assert full.type == I1
        with builder.if_else(full) as (inside, edge):
            with inside:
                turned(lambda p: builder.load(address(p), align=2))
            with edge:
                turned(masked)

    return address_intrinsic("turned_halves", "", 5, body)
