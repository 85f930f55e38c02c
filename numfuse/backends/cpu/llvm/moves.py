"""Copies, transposes and streaming stores of vectors, for packing and large results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from numfuse.backends.cpu.llvm.conversions import widen_vector
from numfuse.backends.cpu.llvm.intrinsics import CARRIERS
from numfuse.backends.cpu.llvm.vectors import (
    FORMATS,
    I32,
    I64,
    address_intrinsic,
    insert_part,
    itemsize,
    lane_numbers,
    masked_load,
    pointer_to,
    transpose_lanes,
    typed_intrinsic,
    vector_of,
)


def _copy(
    builder: ir.IRBuilder,
    fmt: str,
    acc: str,
    source: ir.Value,
    target: ir.Value,
    first: int,
    count: int,
    live: ir.Value | None = None,
) -> None:
    """Widen `count` elements from the first on; with `live`, so many of them, and zeros."""
    element, size = FORMATS[fmt]
    pointer = pointer_to(builder, source, first * size, vector_of(element, count))
    if live is None:
        value = builder.load(pointer, align=size)
    else:
        value = masked_load(builder, pointer, live, size)
    value = widen_vector(builder, value, fmt, acc)
    where = pointer_to(builder, target, first * itemsize(acc), value.type)
    builder.store(value, where, align=itemsize(acc))


@functools.cache
def make_copy_lanes(fmt: str, acc: str, vl: int) -> Any:
    """``copy_lanes(source, target, live)``: widen ``live <= vl`` elements, zero the rest of vl.

    Reads exactly `live` elements and writes exactly ``vl``.
    """

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value, live: ir.Value) -> None:
        _copy(builder, fmt, acc, source, target, 0, vl, live)

    return address_intrinsic("copy_lanes", f"{fmt},{acc},{vl}", 3, body)


@functools.cache
def make_copy_rows(fmt: str, acc: str, vl: int, rows: int) -> Any:
    """``copy_rows(source, target)``: widen exactly `rows` contiguous elements.

    Writes whole vectors, so up to ``vl - 1`` elements more.
    """

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        for r in range(0, rows, vl):
            live = None if r + vl <= rows else I64(rows - r)
            _copy(builder, fmt, acc, source, target, r, vl, live)

    return address_intrinsic("copy_rows", f"{fmt},{acc},{vl},{rows}", 2, body)


@functools.cache
def make_copy_one(fmt: str, acc: str) -> Any:
    """``copy_one(source, target)``: widen one element."""

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        _copy(builder, fmt, acc, source, target, 0, 1)

    return address_intrinsic("copy_one", f"{fmt},{acc}", 2, body)


@functools.cache
def make_transpose(fmt: str, acc: str, vl: int, rows: int) -> Any:
    """``transpose(source, stride, live_rows, live, target, step)``: a block turned round.

    ``target[q * step + r] = source[r * stride + q]`` for ``r < live_rows <= rows <= vl`` and
    ``q < live <= vl`` (strides in bytes).  Writes ``live`` vectors of vl lanes; lanes from
    `live_rows` on hold copies of row 0 (no reader looks at them), so that nothing outside the
    source is read.

    Pieces of a 128-bit lane are loaded straight to the lane that they belong in, which leaves a
    transpose inside each lane: half the shuffles of transposing whole vectors.
    """
    element, size = FORMATS[fmt]
    e = 16 // itemsize(acc)  # values of a lane

    def body(
        builder: ir.IRBuilder,
        source: ir.Value,
        stride: ir.Value,
        live_rows: ir.Value,
        live: ir.Value,
        target: ir.Value,
        step: ir.Value,
    ) -> None:
        at = []
        for r in range(rows):
            index = builder.select(builder.icmp_signed("<", I64(r), live_rows), I64(r), I64(0))
            at.append(builder.add(source, builder.mul(stride, index)))

        def columns(piece: Callable[[int, int], ir.Value]) -> Any:
            """The vectors to store, in order; `piece(r, q)` is values q to q + e of row r."""
            for q in range(0, vl, e):
                gathered = []
                for r in range(e):
                    vector = ir.Constant(vector_of(element, vl), ir.Undefined)
                    for lane in range(0, vl, e):
                        if lane + r < rows:
                            vector = insert_part(builder, vector, piece(lane + r, q), lane)
                    gathered.append(widen_vector(builder, vector, fmt, acc))
                yield from enumerate(transpose_lanes(builder, gathered), q)

        def stored(column: ir.Value, q: int) -> None:
            where = pointer_to(builder, target, builder.mul(step, I64(q)), column.type)
            builder.store(column, where, align=itemsize(acc))

        def loaded(r: int, q: int) -> ir.Value:
            pointer = pointer_to(builder, at[r], q * size, vector_of(element, e))
            return builder.load(pointer, align=size)

        with builder.if_else(builder.icmp_signed(">=", live, I64(vl))) as (full, part):
            with full:
                for q, column in columns(loaded):
                    stored(column, q)
            with part:
                whole = vector_of(element, vl)
                masked = [
                    masked_load(builder, pointer_to(builder, x, 0, whole), live, size) for x in at
                ]

                def cut(r: int, q: int) -> ir.Value:
                    return builder.shuffle_vector(
                        masked[r], masked[r], lane_numbers(list(range(q, q + e)))
                    )

                turned = list(columns(cut))
                for q, column in turned[:-1]:
                    with builder.if_then(builder.icmp_signed("<", I64(q), live)):
                        stored(column, q)

    return address_intrinsic("transpose", f"{fmt},{acc},{vl},{rows}", 6, body)


@functools.cache
def make_room(fmt: str, count: int) -> Any:
    """``room()``: a pointer to room for `count` elements, like one of `make_elements`.

    It is on the stack, and no address that a kernel is given points there.  LLVM knows that, and
    keeps what it can in registers.
    """
    pointer = types.CPointer(CARRIERS[fmt])

    def emit(context: Any, builder: ir.IRBuilder) -> ir.Value:
        element = context.get_value_type(CARRIERS[fmt])
        place = cgutils.alloca_once(builder, ir.ArrayType(element, count))
        place.align = 64  # the widest vector's, so that it may be written in one piece
        return builder.bitcast(place, context.get_value_type(pointer))

    return typed_intrinsic(f"room({fmt},{count})", pointer, [], emit)


@functools.cache
def make_stream(fmt: str, count: int, vector_bytes: int, opaque: bool) -> Any:
    """``stream(source, target)``: `count` elements, whole vectors, go past the caches.

    A usual store first reads the line that it writes to; a non-temporal store of a whole line does
    not.  `source` is a pointer of `make_room`, `target` the address of a vector's boundary.
    `opaque` says that there is x86's way to hide from LLVM where a vector comes from.
    """

    def emit(context: Any, builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        vector = vector_of(I64, vector_bytes // 8)
        kind = ir.FunctionType(vector, [vector])
        for start in range(0, count * itemsize(fmt), vector_bytes):
            place = builder.gep(source, [I64(start // itemsize(fmt))])
            value = builder.load(builder.bitcast(place, vector.as_pointer()), align=itemsize(fmt))
            if fmt == "float16" and opaque:
                # LLVM sees through to a vector of halves, of which it has no non-temporal store.
                value = builder.asm(kind, "", "=x,0", [value], False)
            stored = builder.store(value, pointer_to(builder, target, start, vector))
            stored.align = vector_bytes
            stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))

    key = f"stream({fmt},{count},{vector_bytes},{opaque})"
    return typed_intrinsic(key, types.void, [types.CPointer(CARRIERS[fmt]), types.int64], emit)
