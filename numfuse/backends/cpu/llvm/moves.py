"""Copies, transposes and streaming stores of vectors, for packing and large results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

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
    vector_of,
)


@functools.cache
def make_copy_lanes(fmt: str, acc: str, vl: int) -> Any:
    """``copy_lanes(source, target, live)``: widen ``live <= vl`` elements, zero the rest of vl.

    Reads exactly `live` elements and writes exactly ``vl``.
    """
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value, live: ir.Value) -> None:
        pointer = pointer_to(builder, source, 0, vector_of(element, vl))
        value = widen_vector(builder, masked_load(builder, pointer, live, size), fmt, acc)
        builder.store(value, pointer_to(builder, target, 0, value.type), align=itemsize(acc))

    return address_intrinsic("copy_lanes", f"{fmt},{acc},{vl}", 3, body)


@functools.cache
def make_copy_vectors(fmt: str, acc: str, vl: int, vectors: int) -> Any:
    """``copy_vectors(source, target)``: widen ``vectors * vl`` contiguous elements."""
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        for v in range(vectors):
            pointer = pointer_to(builder, source, v * vl * size, vector_of(element, vl))
            value = widen_vector(builder, builder.load(pointer, align=size), fmt, acc)
            offset = v * vl * itemsize(acc)
            builder.store(
                value, pointer_to(builder, target, offset, value.type), align=itemsize(acc)
            )

    return address_intrinsic("copy_vectors", f"{fmt},{acc},{vl},{vectors}", 2, body)


@functools.cache
def make_copy_rows(fmt: str, acc: str, vl: int, rows: int) -> Any:
    """``copy_rows(source, target)``: widen exactly `rows` contiguous elements.

    Writes whole vectors, so up to ``vl - 1`` elements more.
    """
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        for r in range(0, rows, vl):
            pointer = pointer_to(builder, source, r * size, vector_of(element, vl))
            if r + vl <= rows:
                value = builder.load(pointer, align=size)
            else:
                value = masked_load(builder, pointer, I64(rows - r), size)
            value = widen_vector(builder, value, fmt, acc)
            where = pointer_to(builder, target, r * itemsize(acc), value.type)
            builder.store(value, where, align=itemsize(acc))

    return address_intrinsic("copy_rows", f"{fmt},{acc},{vl},{rows}", 2, body)


@functools.cache
def make_copy_one(fmt: str, acc: str) -> Any:
    """``copy_one(source, target)``: widen one element."""
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        one = vector_of(element, 1)
        value = widen_vector(
            builder, builder.load(pointer_to(builder, source, 0, one), align=size), fmt, acc
        )
        builder.store(value, pointer_to(builder, target, 0, value.type), align=itemsize(acc))

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

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        element = context.get_value_type(CARRIERS[fmt])
        place = cgutils.alloca_once(builder, ir.ArrayType(element, count))
        place.align = 64  # the widest vector's, so that it may be written in one piece
        return builder.bitcast(place, context.get_value_type(pointer))

    def room(typingctx: Any) -> Any:
        return pointer(), codegen

    made: Any = intrinsic(room)
    made.numfuse_key = f"room({fmt},{count})"
    return made


@functools.cache
def make_stream(fmt: str, count: int, vector_bytes: int, opaque: bool) -> Any:
    """``stream(source, target)``: `count` elements, whole vectors, go past the caches.

    A usual store first reads the line that it writes to; a non-temporal store of a whole line does
    not.  `source` is a pointer of `make_room`, `target` the address of a vector's boundary.
    `opaque` says that there is x86's way to hide from LLVM where a vector comes from.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        source, target = args
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
        return context.get_dummy_value()

    def stream(typingctx: Any, source: Any, target: Any) -> Any:
        return types.void(types.CPointer(CARRIERS[fmt]), types.int64), codegen

    made: Any = intrinsic(stream)
    made.numfuse_key = f"stream({fmt},{count},{vector_bytes},{opaque})"
    return made
