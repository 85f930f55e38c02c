"""The micro-kernel: the rank-1 updates of an ``MR x NR`` tile, the loop that multiplies.

LLVM does not turn a register-tiled loop into a tile of vector registers by itself, so this loop is
emitted as explicit vector instructions through `numba.extending.intrinsic`.  Everything above it is
ordinary Numba code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from numfuse.backends.cpu.llvm.vectors import (
    BFLOAT,
    FORMATS,
    I8,
    I32,
    I64,
    address_intrinsic,
    broadcast,
    call,
    hold,
    lane_numbers,
    multiply_add,
    pointer_to,
    prefetch,
    vector_of,
)
from numfuse.backends.cpu.tiling import CHAIN, Registers


def _multiplier(
    builder: ir.IRBuilder, acc: str, r: Registers
) -> tuple[ir.Type, Callable[[ir.Value, ir.Value, ir.Value], ir.Value]]:
    """Return the type that the panels of factors hold, and the function that multiplies them.

    That function is ``multiply(splat of A, row of B, sums) -> sums``.
    """
    element = FORMATS[acc][0]
    vector = vector_of(element, r.vl)
    if r.kind == "dot":
        pairs = vector_of(BFLOAT, 2 * r.vl)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{8 * r.vector_bytes}"

        def dot(a: ir.Value, b: ir.Value, sums: ir.Value) -> ir.Value:
            factors = (builder.bitcast(x, pairs) for x in (a, b))
            return call(builder, name, sums, *factors, result=vector)

        return I32, dot
    return element, functools.partial(multiply_add, builder)


def _steps(
    builder: ir.IRBuilder,
    acc: str,
    rows: int,
    vectors: int,
    r: Registers,
    count: ir.Value,
    unroll: int,
    state: list[ir.Value],
    b_step: ir.Value,
    steps: list[ir.Value],
) -> list[ir.Value]:
    """The loop of `count` times `unroll` rank-1 updates; no pass where count is 0.

    `state` is the address of A's panel and of B's row, an address a stream of requests, and the
    sums; returned as it is afterwards.  Request i of a pass is for stream i: one a rank-1 update.
    """
    size = FORMATS[acc][1]
    vl = r.vl
    element, multiply = _multiplier(builder, acc, r)
    vector = vector_of(element, vl)
    # A by vectors where an FMA takes its factor from a lane; a panel has room for whole ones.
    kind, a_step = (vector, vl) if r.lanes else (element, 1)
    start = builder.block
    loop = builder.append_basic_block("tile.loop")
    done = builder.append_basic_block("tile.done")
    builder.cbranch(builder.icmp_signed(">", count, I64(0)), loop, done)
    builder.position_at_end(loop)
    left = builder.phi(I64)
    phis = [builder.phi(value.type) for value in state]
    a_at, b_at, *rest = phis
    streams, sums = rest[: len(steps)], rest[len(steps) :]
    for u in range(unroll):
        columns = [
            builder.load(pointer_to(builder, b_at, v * vl * size, vector), align=size)
            for v in range(vectors)
        ]
        updated = []
        for i in range(rows):
            if i % a_step == 0:
                offset = (u * r.panel_rows + i) * size
                value = builder.load(pointer_to(builder, a_at, offset, kind), align=size)
            if r.lanes:
                splat = builder.shuffle_vector(value, value, lane_numbers([i % vl] * vl))
            else:
                splat = broadcast(builder, value, vl)
            for v in range(vectors):
                updated.append(multiply(splat, columns[v], sums[i * vectors + v]))
        sums = updated
        b_at = builder.add(b_at, b_step)
        hold(builder, r.vector_bytes, sums)
        if u < len(streams):
            prefetch(builder, streams[u])
    a_at = builder.add(a_at, I64(unroll * r.panel_rows * size))
    streams = [builder.add(x, step) for x, step in zip(streams, steps, strict=True)]
    following = [builder.sub(left, I64(1)), a_at, b_at, *streams, *sums]
    for phi, initial, then in zip([left, *phis], [count, *state], following, strict=True):
        phi.add_incoming(initial, start)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed(">", following[0], I64(0)), loop, done)
    builder.position_at_end(done)
    results = []
    for initial, then in zip(state, following[1:], strict=True):
        result = builder.phi(initial.type)
        result.add_incoming(initial, start)
        result.add_incoming(then, loop)
        results.append(result)
    return results


def _tile(
    builder: ir.IRBuilder,
    acc: str,
    rows: int,
    vectors: int,
    r: Registers,
    unroll: int,
    args: Any,
    spare: ir.Value,
) -> None:
    """One tile: ``c[i, j] (+)= sum_p a[p, i] * b[p, j]`` for ``rows x (vectors * vl)`` values."""
    k, a, b, b_step, before, before_step, c, c_step, first, table = args
    element, size = FORMATS[acc]
    vl = r.vl
    vector = vector_of(element, vl)

    def places(base: ir.Value, step: ir.Value) -> list[ir.Value]:
        found = []
        for i in range(rows):
            row = builder.add(base, builder.mul(step, I64(i)))
            found += [pointer_to(builder, row, v * vl * size, vector) for v in range(vectors)]
        return found

    # Where k is more than CHAIN, the sums of its first half are laid aside, and begin anew.
    halves = builder.icmp_signed(">", k, I64(CHAIN))
    length = builder.select(halves, builder.lshr(builder.add(k, I64(1)), I64(1)), k)
    start = builder.block
    part, aside, join, whole = (
        builder.append_basic_block(f"tile.{name}") for name in ("part", "aside", "join", "whole")
    )
    builder.branch(part)
    builder.position_at_end(part)
    carried = [builder.phi(I64) for _ in range(3)]
    for phi, initial in zip(carried, (k, a, b), strict=True):
        phi.add_incoming(initial, start)
    left, a, b = carried
    k = builder.select(builder.icmp_signed("<", left, length), left, length)
    left = builder.sub(left, k)
    state = [a, b] + [ir.Constant(vector, None)] * (rows * vectors)
    if rows == r.held_rows:
        words = [pointer_to(builder, table, 8 * word, I64) for word in range(2 * unroll)]
        state[2:2] = [builder.load(word) for word in words[0::2]]
        steps = [builder.load(word) for word in words[1::2]]
        passes = builder.udiv(k, I64(unroll))
        state = _steps(builder, acc, rows, vectors, r, passes, unroll, state, b_step, steps)
        for word, value in zip(words[0::2], state[2 : 2 + unroll], strict=True):
            builder.store(value, word)
        del state[2 : 2 + unroll]
        k = builder.sub(k, builder.mul(passes, I64(unroll)))
    state = _steps(builder, acc, rows, vectors, r, k, 1, state, b_step, [])
    sums = state[2:]
    halfway = places(spare, I64(vectors * vl * size))
    builder.cbranch(builder.icmp_signed(">", left, I64(0)), aside, join)
    builder.position_at_end(aside)
    _store(builder, size, halfway, sums)
    for phi, then in zip(carried, (left, state[0], state[1]), strict=True):
        phi.add_incoming(then, aside)
    builder.branch(part)
    builder.position_at_end(join)
    both = builder.append_basic_block("tile.both")
    builder.cbranch(halves, both, whole)
    builder.position_at_end(both)
    added = [
        builder.fadd(builder.load(place, align=size), value)
        for place, value in zip(halfway, sums, strict=True)
    ]
    builder.branch(whole)
    builder.position_at_end(whole)
    for i, value in enumerate(added):
        alone, sums[i] = sums[i], builder.phi(vector)
        sums[i].add_incoming(alone, join)
        sums[i].add_incoming(value, both)
    targets = places(c, c_step)
    with builder.if_else(builder.icmp_signed("!=", first, I64(0))) as (fresh, running):
        with fresh:
            _store(builder, size, targets, sums)
        with running:
            # Each KC block is summed from zero and added once: chains of length CHAIN + K / KC
            # instead of K.
            _store(builder, size, targets, sums, places(before, before_step))


def _store(
    builder: ir.IRBuilder,
    size: int,
    targets: list[ir.Value],
    values: list[ir.Value],
    added: list[ir.Value] | None = None,
) -> None:
    """Store vectors, each with the one at `added` added to it."""
    for i, (target, value) in enumerate(zip(targets, values, strict=True)):
        if added is not None:
            value = builder.fadd(builder.load(added[i], align=size), value)
        builder.store(value, target, align=size)


@functools.cache
def make_microkernel(acc: str, r: Registers, streams: int) -> Any:
    """``run(rows, columns, k, *factors, before, before_step, c, c_step, first, table)``.

    The factors are ``a, a_next, b, b_step, b_next``. One output tile, 1 <= k <= 2 CHAIN:

    ``c[i, j] = sum_p a[p * PANEL_ROWS + i] * (b + p * b_step)[j]`` (`first` != 0), else this plus
    ``before[i, j]``, for ``1 <= rows <= MR`` rows and ``NR = vectors * vl`` columns; of a register
    tile that begins within vl columns of the last of `columns` only the first vl, and of one that
    begins behind it nothing. `a` is a packed panel, `b` a packed panel or rows of a matrix, both of
    the first register tile; those of the tile below and of the tile beside begin `a_next` and
    `b_next` further on. Steps are in bytes.  `table` holds an address and a step for each of
    `streams` streams of requests to the caches, and takes the addresses where they ended: every
    S-th update asks for the next address of stream i.  The order of summation of an element is the
    same in every variant: an edge has an interior tile's bits.
    """
    height, width = r.held_rows, r.held_vectors

    def one(
        builder: ir.IRBuilder, spare: ir.Value, rows: ir.Value, wide: ir.Value, args: Any
    ) -> None:
        """Emit a register tile of so many rows, up to `height`; of one vector where not `wide`."""
        end = builder.append_basic_block("microkernel.tile_end")
        variants = [(i, v) for v in sorted({width, 1}, reverse=True) for i in range(height, 0, -1)]
        selector = builder.add(builder.mul(builder.select(wide, I64(width), I64(1)), I64(64)), rows)
        switch = builder.switch(selector, end)
        for i, v in variants:
            block = builder.append_basic_block(f"microkernel.{i}x{v * r.vl}")
            switch.add_case(I64(v * 64 + i), block)
            builder.position_at_end(block)
            _tile(builder, acc, i, v, r, streams, args, spare)
            builder.branch(end)
        builder.position_at_end(end)

    def body(builder: ir.IRBuilder, rows: ir.Value, columns: ir.Value, *args: ir.Value) -> None:
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(I8, height * width * r.vl * r.itemsize))
            room.align = r.vector_bytes
        spare = builder.ptrtoint(room, I64)
        # Down first: a tile below takes the same columns of B, which may still be in level 1.
        k, a, a_next, b, b_step, b_next, before, before_step, c, c_step, first, table = args
        with _counted(builder, columns, width * r.vl, r.nr) as (j, across):
            wide = builder.icmp_signed(">", across, I64(r.vl))
            beside = builder.mul(j, I64(r.itemsize))
            row = builder.add(b, builder.mul(builder.udiv(j, I64(width * r.vl)), b_next))
            with _counted(builder, rows, height, r.mr) as (i, down):
                low = builder.icmp_signed("<", down, I64(height))
                places = [
                    builder.add(builder.add(place, beside), builder.mul(i, step))
                    for place, step in ((before, before_step), (c, c_step))
                ]
                panel = builder.add(a, builder.mul(builder.udiv(i, I64(height)), a_next))
                given = (k, panel, row, b_step, places[0], before_step)
                one(
                    builder,
                    spare,
                    builder.select(low, down, I64(height)),
                    wide,
                    (*given, places[1], c_step, first, table),
                )

    if r.lanes and r.panel_rows % r.vl:
        raise ValueError(f"panel_rows must be a multiple of vl = {r.vl}, got {r.panel_rows}")
    form = f"{r.mr},{r.panel_rows},{r.vectors},{r.vl},{r.lanes},{r.tiles}"
    return address_intrinsic("microkernel", f"{acc},{r.kind},{form},{streams},{CHAIN}", 14, body)


@contextlib.contextmanager
def _counted(
    builder: ir.IRBuilder, count: ir.Value, step: int, limit: int
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Loop over multiples of `step` below `count` and `limit`; yield each, and what is left."""
    if limit == step:
        yield I64(0), count
        return
    start = builder.block
    loop = builder.append_basic_block("microkernel.next")
    done = builder.append_basic_block("microkernel.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(I64)
    at.add_incoming(I64(0), start)
    yield at, builder.sub(count, at)
    following = builder.add(at, I64(step))
    at.add_incoming(following, builder.block)
    more = builder.and_(
        builder.icmp_signed("<", following, count), builder.icmp_signed("<", following, I64(limit))
    )
    builder.cbranch(more, loop, done)
    builder.position_at_end(done)
