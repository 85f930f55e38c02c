"""Micro-kernels of products whose factors are read where they are: nothing is packed.

A network's stacks and weights stay in the caches while a block of points passes its layers, so a
tile of the result reads rows of B by vectors, and values of A one by one.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from numfuse.backends.cpu.llvm.vectors import (
    FORMATS,
    I64,
    address_intrinsic,
    broadcast,
    multiply_add,
    pointer_to,
    vector_of,
)

#: Values of K in a pass of the loop.
UNROLL = 4
#: Rows of A whose addresses are one register's, plus so many times the distance of rows: x86 adds
#: an index once or twice.
GROUP = 3

Values = list[ir.Value]


class _Tile:
    """A tile of ``rows x (vectors * vl)`` sums."""

    def __init__(
        self, builder: ir.IRBuilder, acc: str, vl: int, form: tuple[int, int, bool], args: Values
    ) -> None:
        self.builder, self.vl = builder, vl
        self.rows, self.vectors, self.down = form
        self.k, self.a, self.a_step, self.b, self.b_step, self.c, self.c_step = args[:7]
        self.bias, self.add = args[7:]
        self.element, self.size = FORMATS[acc]
        self.vector = vector_of(self.element, vl)

    def bases(self) -> Values:
        """Return the addresses of A from which its rows are counted."""
        if self.down:
            return [self.a]
        b = self.builder
        return [b.add(self.a, b.mul(self.a_step, I64(i))) for i in range(0, self.rows, GROUP)]

    def updated(
        self, u: int, bases: Values, step: ir.Value, b_at: ir.Value, sums: Values
    ) -> Values:
        """``sums[i, j] += a[i, p + u] * b[p + u, j]``, the row of B being at `b_at`."""
        b, vl, size = self.builder, self.vl, self.size
        columns = [
            b.load(pointer_to(b, b_at, v * vl * size, self.vector), align=size)
            for v in range(self.vectors)
        ]
        found = []
        for i in range(self.rows):
            if self.down:
                place = pointer_to(b, bases[0], i * size, self.element)
            else:
                at = b.add(bases[i // GROUP], b.mul(step, I64(i % GROUP)))
                place = pointer_to(b, at, u * size, self.element)
            factor = broadcast(b, b.load(place, align=size), vl)
            for v, column in enumerate(columns):
                found.append(multiply_add(b, factor, column, sums[i * self.vectors + v]))
        return found

    def steps(self, count: ir.Value, unroll: int, state: Values) -> Values:
        """Add `count` times `unroll` values of K; `state` is addresses of A and B, and the sums."""
        b = self.builder
        start = b.block
        loop, done = b.append_basic_block("rows.loop"), b.append_basic_block("rows.done")
        b.cbranch(b.icmp_signed(">", count, I64(0)), loop, done)
        b.position_at_end(loop)
        left = b.phi(I64)
        phis = [b.phi(value.type) for value in state]
        n = 1 if self.down else -(-self.rows // GROUP)
        bases, b_at, sums = phis[:n], phis[n], phis[n + 1 :]
        # LLVM may not know that the distance stays: it would keep an address for each row.
        same = ir.FunctionType(I64, [I64])
        step = b.asm(same, "", "=r,0", [self.a_step], True)
        for u in range(unroll):
            sums = self.updated(u, bases, step, b_at, sums)
            b_at = b.add(b_at, self.b_step)
            if self.down:
                bases = [b.add(bases[0], step)]
        if not self.down:
            bases = [b.add(x, I64(unroll * self.size)) for x in bases]
        following = [b.sub(left, I64(1)), *bases, b_at, *sums]
        for phi, initial, then in zip([left, *phis], [count, *state], following, strict=True):
            phi.add_incoming(initial, start)
            phi.add_incoming(then, loop)
        b.cbranch(b.icmp_signed(">", following[0], I64(0)), loop, done)
        b.position_at_end(done)
        results = []
        for initial, then in zip(state, following[1:], strict=True):
            result = b.phi(initial.type)
            result.add_incoming(initial, start)
            result.add_incoming(then, loop)
            results.append(result)
        return results

    def emit(self) -> None:
        """Emit the whole tile."""
        b, vl, size = self.builder, self.vl, self.size
        zeros = [ir.Constant(self.vector, None)] * (self.rows * self.vectors)
        bases = self.bases()
        state = [*bases, self.b, *zeros]
        passes = b.udiv(self.k, I64(UNROLL))
        state = self.steps(passes, UNROLL, state)
        state = self.steps(b.sub(self.k, b.mul(passes, I64(UNROLL))), 1, state)
        sums = state[len(bases) + 1 :]

        def places(base: ir.Value, step: ir.Value | None) -> Values:
            found = []
            for i in range(self.rows):
                row = base if step is None else b.add(base, b.mul(step, I64(i)))
                found += [
                    pointer_to(b, row, v * vl * size, self.vector) for v in range(self.vectors)
                ]
            return found

        targets = places(self.c, self.c_step)

        def stored(more: Values | None) -> None:
            for place, value, x in zip(targets, sums, more or sums, strict=True):
                if more is not None:
                    value = b.fadd(b.load(x, align=size), value)
                b.store(value, place, align=size)

        with b.if_else(b.icmp_signed("!=", self.add, I64(0))) as (running, fresh):
            with running:
                stored(targets)
            with fresh, b.if_else(b.icmp_signed("!=", self.bias, I64(0))) as (biased, plain):
                with biased:
                    stored(places(self.bias, None))
                with plain:
                    stored(None)


@functools.cache
def make_tile(acc: str, vector_bytes: int, rows: int, vectors: int, down: bool) -> Any:
    """``tile(rows, vectors, k, a, a_step, b, b_step, c, c_step, bias, add)``.

    ``c[i, j] = sum_p a[i, p] * b[p, j]`` for as many rows and vectors of columns as are said here
    at most, summed over p in its order; plus ``bias[j]`` where `bias` is not 0; or, where `add` is
    not 0, plus what is there. `a_step` is the distance of rows of `a`, whose values of K are
    contiguous; or, `down`, that of its values of K, whose rows are. All steps are in bytes.
    """
    vl = vector_bytes // FORMATS[acc][1]

    def body(builder: ir.IRBuilder, height: ir.Value, width: ir.Value, *args: ir.Value) -> None:
        end = builder.append_basic_block("rows.end")
        form = builder.add(builder.mul(height, I64(vectors)), width)
        switch = builder.switch(form, end)
        for i in range(1, rows + 1):
            for v in range(1, vectors + 1):
                block = builder.append_basic_block(f"rows.{i}.{v}")
                switch.add_case(I64(i * vectors + v), block)
                builder.position_at_end(block)
                _Tile(builder, acc, vl, (i, v, down), list(args)).emit()
                builder.branch(end)
        builder.position_at_end(end)

    key = f"{acc},{vector_bytes},{rows},{vectors},{down},{UNROLL},{GROUP}"
    return address_intrinsic("tile", key, 11, body)
