"""Micro-kernels of products with few rows: nothing is packed, as nothing is read twice.

Both read rows of A where they are, and columns of B in vectors whose lanes are columns, so that an
element is summed in the order of every other kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from numfuse.backends.cpu.llvm.vectors import (
    FORMATS,
    I32,
    I64,
    address_intrinsic,
    broadcast,
    hold,
    insert_part,
    masked_load,
    multiply_add,
    pointer_to,
    prefetch,
    transpose_lanes,
    vector_of,
)

#: Rows of B that are asked for ahead of those in use: some hundred cycles.
AHEAD = 12
#: Bytes of K up to which 32 rows and the next 32 stay in level 1. Of more there are 16 at a time or
#: 8: rows whose distance is a power of two meet in few cache sets (elements of float32 a cycle of
#: Zen 4: K = 512 with 32 rows 1.0, with 16 3.0; K = 1024 with 32 0.5, with 16 1.0, with 8 2.0).
SHORT = 640

#: Rows of B that are passed side by side, and rows of A that pass together: with two vectors of
#: columns they have 12 sums, as a tile of 16 registers.
BESIDE, SIDE = 8, 6

Values = list[ir.Value]


def _loop(
    builder: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    state: Values,
    body: Callable[[ir.Value, Values], Values],
) -> Values:
    """``for i in range(start, stop, step): state = body(i, state)``; return the state after it."""
    before = builder.block
    loop, done = builder.append_basic_block("thin.loop"), builder.append_basic_block("thin.done")
    builder.cbranch(builder.icmp_signed("<", start, stop), loop, done)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    phis = [builder.phi(value.type) for value in state]
    new = [builder.add(index, I64(step)), *body(index, phis)]
    end = builder.block
    for phi, initial, then in zip([index, *phis], [start, *state], new, strict=True):
        phi.add_incoming(initial, before)
        phi.add_incoming(then, end)
    builder.cbranch(builder.icmp_signed("<", new[0], stop), loop, done)
    builder.position_at_end(done)
    results = []
    for initial, then in zip(state, new[1:], strict=True):
        results.append(builder.phi(initial.type))
        results[-1].add_incoming(initial, before)
        results[-1].add_incoming(then, end)
    return results


def _by_height(
    builder: ir.IRBuilder, count: ir.Value, most: int, name: str, emit: Callable[[int], None]
) -> None:
    """``emit(min(count, most))``, with code of its own for each number of rows."""
    end = builder.append_basic_block(f"{name}.end")
    height = builder.select(builder.icmp_signed("<", count, I64(most)), count, I64(most))
    switch = builder.switch(height, end)
    for rows in range(1, most + 1):
        block = builder.append_basic_block(f"{name}.{rows}")
        switch.add_case(I64(rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(end)
    builder.position_at_end(end)


class _Kernel:
    """A call of either micro-kernel, for a number of rows."""

    def __init__(self, builder: ir.IRBuilder, acc: str, vl: int, rows: int, args: Values) -> None:
        self.builder, self.vl, self.rows = builder, vl, rows
        self.columns, self.k, self.a, self.a_row, self.a_k, self.b, self.step = args[:7]
        self.c, self.c_step, self.add = args[7:]
        self.element, self.size = FORMATS[acc]
        self.vector = vector_of(self.element, vl)
        self.zeros = [ir.Constant(self.vector, None)]

    def offset(self, base: ir.Value, count: Any, step: ir.Value) -> ir.Value:
        count = count if isinstance(count, ir.Value) else I64(count)
        return self.builder.add(base, self.builder.mul(count, step))

    def updated(self, p: ir.Value, sums: Values, columns: Values) -> Values:
        """``sums[r][v] += a[r, p] * columns[v]``"""
        at = self.offset(self.a, p, self.a_k)
        found = []
        for r in range(self.rows):
            factor = self.factor(at, r)
            for v, column in enumerate(columns):
                sums_r = sums[r * len(columns) + v]
                found.append(multiply_add(self.builder, factor, column, sums_r))
        return found

    def stored(self, j: ir.Value, sums: Values, vectors: int) -> None:
        """Store the sums of columns from j on, or add them to what is there."""
        b = self.builder
        places = [
            pointer_to(
                b,
                b.add(self.offset(self.c, r, self.c_step), b.mul(j, I64(self.size))),
                v * self.vl * self.size,
                self.vector,
            )
            for r in range(self.rows)
            for v in range(vectors)
        ]
        with b.if_else(b.icmp_signed("==", self.add, I64(0))) as (fresh, running):
            with fresh:
                for place, value in zip(places, sums, strict=True):
                    b.store(value, place, align=self.size)
            with running:
                for place, value in zip(places, sums, strict=True):
                    b.store(b.fadd(b.load(place, align=self.size), value), place, align=self.size)

    def by_rows(self, vectors: int) -> None:
        """Columns of B are contiguous."""
        b = self.builder
        width = vectors * self.vl

        def tile(count: int, live: bool) -> Callable[[ir.Value, Values], Values]:
            def body(j: ir.Value, _: Values) -> Values:
                base = b.add(self.b, b.mul(j, I64(self.size)))

                def update(p: ir.Value, sums: Values) -> Values:
                    row, columns = self.offset(base, p, self.step), []
                    for v in range(count):
                        at = v * self.vl * self.size
                        pointer = pointer_to(b, row, at, self.vector)
                        if live:
                            left = b.sub(self.columns, b.add(j, I64(v * self.vl)))
                            columns.append(masked_load(b, pointer, left, self.size))
                        else:
                            columns.append(b.load(pointer, align=self.size))
                        prefetch(b, b.add(self.offset(row, AHEAD, self.step), I64(at)))
                    return self.updated(p, sums, columns)

                sums = _loop(b, I64(0), self.k, 1, self.zeros * (self.rows * count), update)
                self.stored(j, sums, count)
                return []

            return body

        whole = b.mul(b.sdiv(self.columns, I64(width)), I64(width))
        _loop(b, I64(0), whole, width, [], tile(vectors, False))
        few = min(vectors, 4)
        _loop(b, whole, self.columns, few * self.vl, [], tile(few, True))

    def streamed(self, count: ir.Value) -> None:
        """Columns of B are contiguous, and its rows are passed in full, a few side by side.

        The sums stay in a row of c meanwhile, where each goes on in its order of K. Of the `count`
        rows of A up to `self.rows` pass together.
        """
        b = self.builder

        def passed(beside: int) -> Callable[[ir.Value, Values], Values]:
            def body(p: ir.Value, _: Values) -> Values:
                rows = [self.offset(self.b, b.add(p, I64(i)), self.step) for i in range(beside)]
                at = [self.offset(self.a, b.add(p, I64(i)), self.a_k) for i in range(beside)]

                # (the next group of rows of A finds those of B in level 1)
                def group(r: ir.Value, _: Values) -> Values:
                    own = [self.offset(x, r, self.a_row) for x in at]
                    sums = self.offset(self.c, r, self.c_step)
                    _by_height(
                        b, b.sub(count, r), self.rows, "group",
                        lambda height: self.beside(rows, own, sums, height),
                    )  # fmt: skip
                    return []

                _loop(b, I64(0), count, self.rows, [], group)
                return []

            return body

        whole = b.and_(self.k, I64(-BESIDE))
        _loop(b, I64(0), whole, BESIDE, [], passed(BESIDE))
        _loop(b, whole, self.k, 1, [], passed(1))

    def beside(self, rows: Values, at: Values, c: ir.Value, height: int) -> None:
        """Add the products of some rows of B to the sums of so many rows of A, of all columns.

        `rows` are their addresses, `at` those of the values of the first row of A that they are
        for, whose sums are at `c`.
        """
        b, width = self.builder, self.vl * self.size
        alone = [self.factor(x, 0) for x in at] if height == 1 else []

        def tile(vectors: int, live: bool) -> Callable[[ir.Value, Values], Values]:
            def columns(j: ir.Value, _: Values) -> Values:
                start = b.mul(j, I64(self.size))
                begun = [b.add(self.offset(c, r, self.c_step), start) for r in range(height)]
                places = [
                    pointer_to(b, x, v * width, self.vector) for x in begun for v in range(vectors)
                ]
                sums = [b.load(place, align=self.size) for place in places]
                for i, row in enumerate(rows):
                    found = []
                    for v in range(vectors):
                        pointer = pointer_to(b, b.add(row, start), v * width, self.vector)
                        if live:
                            found.append(masked_load(b, pointer, b.sub(self.columns, j), self.size))
                        else:
                            found.append(b.load(pointer, align=self.size))
                    for r in range(height):
                        factor = alone[i] if alone else self.factor(at[i], r)
                        for v, column in enumerate(found):
                            r_v = r * vectors + v
                            sums[r_v] = multiply_add(b, factor, column, sums[r_v])
                    hold(b, width, sums)
                for place, value in zip(places, sums, strict=True):
                    b.store(value, place, align=self.size)
                return []

            return columns

        whole = b.and_(self.columns, I64(-2 * self.vl))
        _loop(b, I64(0), whole, 2 * self.vl, [], tile(2, False))
        _loop(b, whole, self.columns, self.vl, [], tile(1, True))

    def factor(self, at: ir.Value, row: int) -> ir.Value:
        """Return a value of a row of A, whose first row's is at `at`, in all lanes."""
        place = pointer_to(self.builder, self.offset(at, row, self.a_row), 0, self.element)
        return broadcast(self.builder, self.builder.load(place, align=self.size), self.vl)

    def rows_of_b(self, start: ir.Value, count: int) -> Values:
        """Return the addresses of so many rows of B from this one on.

        LLVM may not know their distance: it would take its multiples out of the loop, into memory.
        """
        b = self.builder
        same = ir.FunctionType(I64, [I64])
        step = b.asm(same, "", "=r,0", [self.step], True)
        found: Values = []
        for _ in range(0, count, 4):
            found += [b.add(start, b.mul(step, I64(i))) for i in range(4)]
            start = b.asm(same, "", "=r,0", [b.add(start, b.mul(step, I64(4)))], True)
        return found[:count]

    def by_columns(self) -> None:
        """Rows of B are contiguous, that is values of K: blocks are transposed in registers."""
        b = self.builder
        e = 16 // self.size  # values of a 128-bit lane
        piece = vector_of(self.element, e)

        def tile(count: int, live: bool, level: int = 2) -> Callable[[ir.Value, Values], Values]:
            width = count * self.vl

            def body(j: ir.Value, _: Values) -> Values:
                base = self.offset(self.b, j, self.step)
                last = b.sub(b.sub(self.columns, j), I64(1))
                steps = [
                    b.mul(b.select(b.icmp_signed("<", last, I64(i)), last, I64(i)), self.step)
                    for i in range(width if live else 0)
                ]

                def rows(p: ir.Value) -> Values:
                    at = b.add(base, b.mul(p, I64(self.size)))
                    return [b.add(at, x) for x in steps] if live else self.rows_of_b(at, width)

                def block(p: ir.Value, sums: Values) -> Values:
                    places = rows(p)
                    if not live:  # a line of a fourth of the next tile's rows
                        fourth = width // 4
                        first = b.mul(b.and_(b.udiv(p, I64(e)), I64(3)), I64(fourth))
                        first = self.offset(places[0], b.add(I64(width), first), self.step)
                        for place in self.rows_of_b(first, fourth):
                            prefetch(b, place, level)
                    columns: list[Values] = []
                    for g in range(0, width, self.vl):
                        four = []
                        for r in range(g, g + e):
                            vector = ir.Constant(self.vector, ir.Undefined)
                            for lane in range(0, self.vl, e):
                                place = pointer_to(b, places[r + lane], 0, piece)
                                part = b.load(place, align=self.size)
                                vector = insert_part(b, vector, part, lane)
                            four.append(vector)
                        columns.append(transpose_lanes(b, four))
                    for i in range(e):
                        sums = self.updated(b.add(p, I64(i)), sums, [x[i] for x in columns])
                    return sums

                def one(p: ir.Value, sums: Values) -> Values:
                    places, columns = rows(p), []
                    for g in range(0, width, self.vl):
                        vector = ir.Constant(self.vector, ir.Undefined)
                        for lane in range(self.vl):
                            place = pointer_to(b, places[g + lane], 0, self.element)
                            value = b.load(place, align=self.size)
                            vector = b.insert_element(vector, value, I32(lane))
                        columns.append(vector)
                    return self.updated(p, sums, columns)

                whole = b.and_(self.k, I64(-e))
                sums = _loop(b, I64(0), whole, e, self.zeros * (self.rows * count), block)
                sums = _loop(b, whole, self.k, 1, sums, one)
                self.stored(j, sums, count)
                return []

            return body

        def whole(width: ir.Value) -> ir.Value:
            return b.mul(b.sdiv(self.columns, width), width)

        def tiles(groups: int, level: int = 2) -> None:
            width = groups * self.vl
            _loop(b, I64(0), whole(I64(width)), width, [], tile(groups, False, level))

        groups: ir.Value = I64(max(1, 4 // self.rows))
        if self.rows > 1:
            tiles(groups.constant)
        else:
            short = b.icmp_signed("<=", self.k, I64(SHORT // self.size))
            clash = b.icmp_signed("==", b.and_(self.step, I64(4095)), I64(0))
            groups = b.select(short, groups, b.select(clash, I64(1), I64(2)))
            with b.if_else(short) as (near, far):
                with near:
                    tiles(4, 1)
                with far, b.if_else(clash) as (eight, sixteen):
                    with eight:
                        tiles(1)
                    with sixteen:
                        tiles(2)
        done = whole(b.mul(groups, I64(self.vl)))
        _loop(b, done, self.columns, self.vl, [], tile(1, True))


@functools.cache
def make_streamed(acc: str, vector_bytes: int) -> Any:
    """``streamed(rows, columns, k, a, a_row, a_k, b, b_step, c, c_step)``.

    ``c[i, j] += sum_p a[i, p] * b[p, j]``, each product added to the sum before it: where c is
    zeros, what `make_thin` gives. Rows of b are contiguous and `b_step` bytes apart. Writes up to a
    vector past the columns of a row of c.
    """
    vl = vector_bytes // FORMATS[acc][1]

    def body(builder: ir.IRBuilder, count: ir.Value, *args: ir.Value) -> None:
        _Kernel(builder, acc, vl, SIDE, [*args, I64(0)]).streamed(count)

    return address_intrinsic("streamed", f"{acc},{vector_bytes},{BESIDE},{SIDE}", 10, body)


@functools.cache
def make_thin(acc: str, vector_bytes: int, rows: int, by_rows: bool) -> Any:
    """``thin(rows, columns, k, a, a_row, a_k, b, b_step, c, c_step, add)``.

    ``c[i, j] = sum_p a[i, p] * b[p, j]`` or, where `add` is not 0, this added to what is there, for
    as many rows as are said here at most.  `b_step` is the distance of rows of b whose columns are
    contiguous (`by_rows`), or of columns whose rows are; all steps are in bytes.  Writes up to 8
    vectors past the columns of a row of c.
    """
    size = FORMATS[acc][1]
    if not by_rows:  # shuffles of 512 bits take twice the time
        vector_bytes = min(vector_bytes, 32)
    registers = 32 if vector_bytes == 64 else 16
    vl = vector_bytes // size

    def body(builder: ir.IRBuilder, count: ir.Value, *args: ir.Value) -> None:
        def emit(height: int) -> None:
            kernel = _Kernel(builder, acc, vl, height, list(args))
            if by_rows:
                kernel.by_rows(min(8, (registers - 1) // (height + 1)))
            else:
                kernel.by_columns()

        _by_height(builder, count, rows, "thin", emit)

    key = f"{acc},{vector_bytes},{rows},{by_rows},{AHEAD},{SHORT},1"
    return address_intrinsic("thin", key, 11, body)


@functools.cache
def make_chains(acc: str) -> Any:
    """``chains(count, k, a, a_k, b, b_k, c)``.

    ``c[q] = sum_p a[q * k + p] * b[q * k + p]``, each product added to the sum before it, steps in
    bytes. So many chains of one element run side by side as hide a multiply-add's latency.
    """
    element, size = FORMATS[acc]

    def body(builder: ir.IRBuilder, count: ir.Value, *args: ir.Value) -> None:
        k, a, a_k, b, b_k, c = args

        def group(width: int) -> Callable[[ir.Value, Values], Values]:
            def chains(q: ir.Value, _: Values) -> Values:
                def places(base: ir.Value, step: ir.Value) -> Values:
                    apart = builder.mul(k, step)
                    first = builder.add(base, builder.mul(q, apart))
                    return [builder.add(first, builder.mul(I64(i), apart)) for i in range(width)]

                def loaded(row: ir.Value, at: ir.Value) -> ir.Value:
                    place = pointer_to(builder, builder.add(row, at), 0, element)
                    return builder.load(place, align=size)

                def product(p: ir.Value, sums: Values) -> Values:
                    at_a, at_b = builder.mul(p, a_k), builder.mul(p, b_k)
                    return [
                        multiply_add(builder, loaded(x, at_a), loaded(y, at_b), value)
                        for x, y, value in zip(rows_a, rows_b, sums, strict=True)
                    ]

                rows_a, rows_b = places(a, a_k), places(b, b_k)
                zeros = [ir.Constant(element, 0.0)] * width
                sums = _loop(builder, I64(0), k, 1, zeros, product)
                for i, value in enumerate(sums):
                    to = builder.add(c, builder.mul(builder.add(q, I64(i)), I64(size)))
                    builder.store(value, pointer_to(builder, to, 0, element), align=size)
                return []

            return chains

        whole = builder.mul(builder.sdiv(count, I64(BESIDE)), I64(BESIDE))
        _loop(builder, I64(0), whole, BESIDE, [], group(BESIDE))
        _loop(builder, whole, count, 1, [], group(1))

    return address_intrinsic("chains", f"{acc},{BESIDE},1", 7, body)
