"""The micro-kernel: the only place where LLVM vectors are written by hand.

LLVM does not turn a register-tiled loop into a tile of vector registers by itself, so the few
innermost loops (the rank-1 updates of an ``MR x NR`` tile, the transposes of packing) are
emitted as explicit vector instructions through `numba.extending.intrinsic`.  Everything above
them is ordinary Numba code.

All functions here build an intrinsic whose arguments are ``int64``: addresses, byte strides and
counts.  They trust their caller: every address is valid for the extent that its docstring names.
The results carry ``numfuse_key``, the identity that `numfuse.runtime.specialise` hashes.
"""

from __future__ import annotations

import functools
import inspect
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numfuse.backends.cpu import host
from numfuse.backends.cpu.tiling import CHAIN, Registers

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))

#: LLVM type and bytes of an element, by storage format.  bfloat16 travels as its 16 bits: a
#: shift widens it exactly, and no instruction set before AVX512-BF16 knows the type.
FORMATS: dict[str, tuple[ir.Type, int]] = {
    "float64": (ir.DoubleType(), 8),
    "float32": (ir.FloatType(), 4),
    "float16": (ir.HalfType(), 2),
    "bfloat16": (I16, 2),
}


#: Two neighbours of K as one element, as packing for dot products and tiles moves them.
FORMATS["pair"] = (I32, 4)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks; only on hosts whose processor has it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()


def itemsize(fmt: str) -> int:
    return FORMATS[fmt][1]


def _vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


def _lanes(values: list[int]) -> ir.Constant:
    return ir.Constant(_vector(I32, len(values)), values)


def _pointer(builder: ir.IRBuilder, address: ir.Value, offset: Any, ty: ir.Type) -> ir.Value:
    """``address + offset`` (bytes) as a pointer to `ty`."""
    if not isinstance(offset, ir.Value):
        offset = I64(offset)
    return builder.inttoptr(builder.add(address, offset), ty.as_pointer())


def _splat(builder: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    """Broadcast a scalar to all lanes (one broadcasting load, once LLVM has folded it)."""
    ty = _vector(scalar.type, count)
    one = builder.insert_element(ir.Constant(ty, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, _lanes([0] * count))


def address_intrinsic(name: str, key: str, nargs: int, body: Callable[..., None]) -> Any:
    """An intrinsic of `nargs` int64 and no result; `body(builder, *args)` emits it."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        body(builder, *args)
        return context.get_dummy_value()

    def typing(typingctx: Any, *args: Any) -> Any:
        return types.void(*[types.int64] * len(args)), codegen

    typing.__name__ = name
    # Numba folds the arguments of a call by the signature, and cannot fold into *args.
    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["typingctx", *(f"arg{i}" for i in range(nargs))]
    typing.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind) for n in names]
    )
    made: Any = intrinsic(typing)
    made.numfuse_key = f"{name}({key})"
    return made


def _widened(builder: ir.IRBuilder, value: ir.Value, fmt: str, acc: str) -> ir.Value:
    """A vector of storage format `fmt` in the accumulator's format; exact in every case."""
    if fmt == acc:
        return value
    count = value.type.count
    wide = _vector(FORMATS[acc][0], count)
    if fmt == "bfloat16":
        bits = builder.zext(value, _vector(I32, count))
        return builder.bitcast(builder.shl(bits, _lanes([16] * count)), wide)
    if _by_integers(fmt):
        return _widened_by_integers(builder, builder.bitcast(value, _vector(I16, count)))
    return builder.fpext(value, wide)


def _by_integers(fmt: str) -> bool:
    """Whether this format is converted by operations on its bits."""
    return fmt == "float16" and not host.converts_halves()


def _same(ty: ir.Type, number: int) -> ir.Constant:
    """The number as an integer of this type, in every lane of a vector."""
    return ir.Constant(ty, [number] * ty.count if isinstance(ty, ir.VectorType) else number)


def _like(ty: ir.Type, element: ir.Type) -> ir.Type:
    return _vector(element, ty.count) if isinstance(ty, ir.VectorType) else element


def _widened_by_integers(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """float16, a scalar or a vector of I16, in float32; NaN as an instruction of F16C has it."""
    whole, real = _like(half.type, I32), _like(half.type, ir.FloatType())

    def of(number: int) -> ir.Constant:
        return _same(whole, number)

    bits = builder.zext(half, whole)
    # The exponent and the mantissa at their places; the exponent's bias grows by 127 - 15 = 112.
    placed = builder.shl(builder.and_(bits, of(0x7FFF)), of(13))
    normal = builder.add(placed, of(112 << 23))
    # Subnormal: as the mantissa of 2^-14, which is then taken away (exactly, in normal numbers).
    first = of(113 << 23)
    raised = builder.bitcast(builder.add(placed, first), real)
    exact = builder.fsub(raised, builder.bitcast(first, real), flags=("arcp",))
    subnormal = builder.bitcast(exact, whole)
    infinite = builder.or_(placed, of(0x7F800000))
    quiet = builder.or_(infinite, of(0x400000))
    is_small = builder.icmp_unsigned("<", placed, of(1 << 23))
    is_special = builder.icmp_unsigned(">=", placed, of(31 << 23))
    is_nan = builder.icmp_unsigned(">", placed, of(31 << 23))
    found = builder.select(is_small, subnormal, normal)
    found = builder.select(is_special, builder.select(is_nan, quiet, infinite), found)
    sign = builder.shl(builder.and_(bits, of(0x8000)), of(16))
    return builder.bitcast(builder.or_(found, sign), real)


def _narrowed_by_integers(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A float32 as the bits of a float16, rounded to nearest even; NaN as F16C has it."""
    bits = builder.bitcast(value, I32)
    size = builder.and_(bits, I32(0x7FFFFFFF))
    # Below 2^-14, 0.5 + size has as many bits behind the point as a subnormal half: 24.
    sum_ = builder.fadd(builder.bitcast(size, ir.FloatType()), ir.FloatType()(0.5), flags=("arcp",))
    subnormal = builder.sub(builder.bitcast(sum_, I32), I32(0x3F000000))
    odd = builder.and_(builder.lshr(size, I32(13)), I32(1))
    lowered = builder.sub(builder.add(size, odd), I32((112 << 23) - 0xFFF))
    normal = builder.lshr(lowered, I32(13))
    payload = builder.and_(builder.lshr(size, I32(13)), I32(0x3FF))
    found = builder.select(builder.icmp_unsigned("<", size, I32(113 << 23)), subnormal, normal)
    # From 65520 on, halfway to what would come after the largest finite number.
    found = builder.select(builder.icmp_unsigned(">=", size, I32(0x477FF000)), I32(0x7C00), found)
    is_nan = builder.icmp_unsigned(">", size, I32(0x7F800000))
    found = builder.select(is_nan, builder.or_(payload, I32(0x7E00)), found)
    sign = builder.and_(builder.lshr(bits, I32(16)), I32(0x8000))
    return builder.trunc(builder.or_(found, sign), I16)


def _masked_load(builder: ir.IRBuilder, pointer: ir.Value, live: ir.Value, bytes_: int) -> ir.Value:
    """Lanes ``< live`` (an int64) from memory, zero elsewhere; other lanes are not touched."""
    ty = pointer.type.pointee
    lane = ir.Constant(_vector(I64, ty.count), list(range(ty.count)))
    mask = builder.icmp_signed("<", lane, _splat(builder, live, ty.count))
    element = (
        str(ty.element).replace("float", "f32").replace("double", "f64").replace("half", "f16")
    )
    fn = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ty, [pointer.type, I32, mask.type, ty]),
        f"llvm.masked.load.v{ty.count}{element}.p0",
    )
    return builder.call(fn, [pointer, I32(bytes_), mask, ir.Constant(ty, None)])


def _prefetched(builder: ir.IRBuilder, address: ir.Value) -> None:
    p8 = I8.as_pointer()
    fn = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [p8, I32, I32, I32]), "llvm.prefetch.p0"
    )
    # For reading, into level 2: level 1 has no room beside the panel of A and the stream of B.
    builder.call(fn, [builder.inttoptr(address, p8), I32(0), I32(2), I32(1)])


def _multiplier(
    builder: ir.IRBuilder, acc: str, r: Registers
) -> tuple[ir.Type, Callable[[ir.Value, ir.Value, ir.Value], ir.Value]]:
    """Return the type that the panels of factors hold, and the function that multiplies them.

    That function is ``multiply(splat of A, row of B, sums) -> sums``.
    """
    element, size = FORMATS[acc]
    vector = _vector(element, r.vl)
    if r.kind == "dot":
        pairs = _vector(BFLOAT, 2 * r.vl)
        dot = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [vector, pairs, pairs]),
            f"llvm.x86.avx512bf16.dpbf16ps.{8 * r.vector_bytes}",
        )
        return I32, lambda a, b, sums: builder.call(
            dot, [sums, builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
        )
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{r.vl}f{size * 8}"
    )
    return element, lambda a, b, sums: builder.call(fma, [a, b, sums])


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
    vector = _vector(element, vl)
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
            builder.load(_pointer(builder, b_at, v * vl * size, vector), align=size)
            for v in range(vectors)
        ]
        updated = []
        for i in range(rows):
            if i % a_step == 0:
                offset = (u * r.panel_rows + i) * size
                value = builder.load(_pointer(builder, a_at, offset, kind), align=size)
            if r.lanes:
                splat = builder.shuffle_vector(value, value, _lanes([i % vl] * vl))
            else:
                splat = _splat(builder, value, vl)
            for v in range(vectors):
                updated.append(multiply(splat, columns[v], sums[i * vectors + v]))
        sums = updated
        b_at = builder.add(b_at, b_step)
        if u < len(streams):
            _prefetched(builder, streams[u])
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
    vector = _vector(element, vl)

    def places(base: ir.Value, step: ir.Value) -> list[ir.Value]:
        found = []
        for i in range(rows):
            row = builder.add(base, builder.mul(step, I64(i)))
            found += [_pointer(builder, row, v * vl * size, vector) for v in range(vectors)]
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
    if rows == r.mr:
        words = [_pointer(builder, table, 8 * word, I64) for word in range(2 * unroll)]
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
    for place, value in zip(halfway, sums, strict=True):
        builder.store(value, place, align=size)
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
    merged = []
    for alone, value in zip(sums, added, strict=True):
        merged.append(builder.phi(vector))
        merged[-1].add_incoming(alone, join)
        merged[-1].add_incoming(value, both)
    sums = merged
    targets = places(c, c_step)
    with builder.if_else(builder.icmp_signed("!=", first, I64(0))) as (fresh, running):
        with fresh:
            for target, value in zip(targets, sums, strict=True):
                builder.store(value, target, align=size)
        with running:
            # Each KC block is summed from zero and added once: chains of length CHAIN + K / KC
            # instead of K.
            for source, target, value in zip(
                places(before, before_step), targets, sums, strict=True
            ):
                builder.store(
                    builder.fadd(builder.load(source, align=size), value), target, align=size
                )


@functools.cache
def make_microkernel(acc: str, r: Registers, streams: int) -> Any:
    """``microkernel(rows, wide, k, a, b, b_step, before, before_step, c, c_step, first, table)``.

    One output tile, 1 <= k <= 2 CHAIN:

    ``c[i, j] = sum_p a[p * PANEL_ROWS + i] * (b + p * b_step)[j]`` (`first` != 0), else this plus
    ``before[i, j]``, for ``1 <= rows <= MR`` rows and ``NR = vectors * vl`` columns, or only the
    first ``vl`` of them where `wide` is 0.  `a` is a packed panel, `b` a packed panel or rows of a
    matrix; steps are in bytes.  `table` holds an address and a step for each of `streams` streams
    of requests to the caches, and takes the addresses where they ended: every S-th update asks for
    the next address of stream i.  The order
    of summation of an element is the same in every variant: an edge has an interior tile's bits.
    """

    def body(builder: ir.IRBuilder, rows: ir.Value, wide: ir.Value, *args: ir.Value) -> None:
        end = builder.append_basic_block("microkernel.end")
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(I8, r.mr * r.nr * r.itemsize))
            room.align = r.vector_bytes
        spare = builder.ptrtoint(room, I64)
        widths = sorted({r.vectors, 1}, reverse=True)
        variants = [(height, v) for v in widths for height in range(r.mr, 0, -1)]
        selector = builder.add(
            builder.mul(
                builder.select(builder.icmp_signed("!=", wide, I64(0)), I64(r.vectors), I64(1)),
                I64(64),
            ),
            rows,
        )
        switch = builder.switch(selector, end)
        for height, v in variants:
            block = builder.append_basic_block(f"microkernel.{height}x{v * r.vl}")
            switch.add_case(I64(v * 64 + height), block)
            builder.position_at_end(block)
            _tile(builder, acc, height, v, r, streams, args, spare)
            builder.branch(end)
        builder.position_at_end(end)

    if r.lanes and r.panel_rows % r.vl:
        raise ValueError(f"panel_rows must be a multiple of vl = {r.vl}, got {r.panel_rows}")
    key = f"{acc},{r.kind},{r.mr},{r.panel_rows},{r.vectors},{r.vl},{r.lanes},{streams},{CHAIN}"
    return address_intrinsic("microkernel", key, 12, body)


@functools.cache
def make_copy_lanes(fmt: str, acc: str, vl: int) -> Any:
    """``copy_lanes(source, target, live)``: widen ``live <= vl`` elements, zero the rest of vl.

    Reads exactly `live` elements and writes exactly ``vl``.
    """
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value, live: ir.Value) -> None:
        pointer = _pointer(builder, source, 0, _vector(element, vl))
        value = _widened(builder, _masked_load(builder, pointer, live, size), fmt, acc)
        builder.store(value, _pointer(builder, target, 0, value.type), align=itemsize(acc))

    return address_intrinsic("copy_lanes", f"{fmt},{acc},{vl}", 3, body)


@functools.cache
def make_copy_vectors(fmt: str, acc: str, vl: int, vectors: int) -> Any:
    """``copy_vectors(source, target)``: widen ``vectors * vl`` contiguous elements."""
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        for v in range(vectors):
            pointer = _pointer(builder, source, v * vl * size, _vector(element, vl))
            value = _widened(builder, builder.load(pointer, align=size), fmt, acc)
            offset = v * vl * itemsize(acc)
            builder.store(value, _pointer(builder, target, offset, value.type), align=itemsize(acc))

    return address_intrinsic("copy_vectors", f"{fmt},{acc},{vl},{vectors}", 2, body)


@functools.cache
def make_copy_rows(fmt: str, acc: str, vl: int, rows: int) -> Any:
    """``copy_rows(source, target)``: widen exactly `rows` contiguous elements.

    Writes whole vectors, so up to ``vl - 1`` elements more.
    """
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        for r in range(0, rows, vl):
            pointer = _pointer(builder, source, r * size, _vector(element, vl))
            if r + vl <= rows:
                value = builder.load(pointer, align=size)
            else:
                value = _masked_load(builder, pointer, I64(rows - r), size)
            value = _widened(builder, value, fmt, acc)
            where = _pointer(builder, target, r * itemsize(acc), value.type)
            builder.store(value, where, align=itemsize(acc))

    return address_intrinsic("copy_rows", f"{fmt},{acc},{vl},{rows}", 2, body)


@functools.cache
def make_copy_one(fmt: str, acc: str) -> Any:
    """``copy_one(source, target)``: widen one element."""
    element, size = FORMATS[fmt]

    def body(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
        one = _vector(element, 1)
        value = _widened(
            builder, builder.load(_pointer(builder, source, 0, one), align=size), fmt, acc
        )
        builder.store(value, _pointer(builder, target, 0, value.type), align=itemsize(acc))

    return address_intrinsic("copy_one", f"{fmt},{acc}", 2, body)


def _inserted(builder: ir.IRBuilder, whole: ir.Value, part: ir.Value, at: int) -> ir.Value:
    """`whole` with its lanes from `at` on replaced by `part`: one insertion, from memory too."""
    names = {
        ir.DoubleType(): "f64",
        ir.FloatType(): "f32",
        ir.HalfType(): "f16",
        I16: "i16",
        I32: "i32",
    }
    name = names[part.type.element]
    fn = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(whole.type, [whole.type, part.type, I64]),
        f"llvm.vector.insert.v{whole.type.count}{name}.v{part.type.count}{name}",
    )
    return builder.call(fn, [whole, part, I64(at)])


def _transposed_lanes(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Columns of the square block in each 128-bit lane of `rows` (as many as a lane has values)."""
    e, vl = len(rows), rows[0].type.count

    def lanes(pattern: list[int]) -> ir.Constant:
        # pattern: of e + e values of two lanes, as for a vector of one lane.
        return _lanes(
            [lane + (x if x < e else x - e + vl) for lane in range(0, vl, e) for x in pattern]
        )

    if e == 2:
        one, two = rows
        return [builder.shuffle_vector(one, two, lanes(p)) for p in ([0, 2], [1, 3])]
    low, high = lanes([0, 4, 1, 5]), lanes([2, 6, 3, 7])
    pairs = [
        builder.shuffle_vector(rows[x], rows[x + 1], pattern)
        for pattern in (low, high)
        for x in (0, 2)
    ]
    return [
        builder.shuffle_vector(pairs[x], pairs[x + 1], lanes(pattern))
        for x in (0, 2)
        for pattern in ([0, 1, 4, 5], [2, 3, 6, 7])
    ]


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
                    vector = ir.Constant(_vector(element, vl), ir.Undefined)
                    for lane in range(0, vl, e):
                        if lane + r < rows:
                            vector = _inserted(builder, vector, piece(lane + r, q), lane)
                    gathered.append(_widened(builder, vector, fmt, acc))
                yield from enumerate(_transposed_lanes(builder, gathered), q)

        def stored(column: ir.Value, q: int) -> None:
            where = _pointer(builder, target, builder.mul(step, I64(q)), column.type)
            builder.store(column, where, align=itemsize(acc))

        def loaded(r: int, q: int) -> ir.Value:
            pointer = _pointer(builder, at[r], q * size, _vector(element, e))
            return builder.load(pointer, align=size)

        with builder.if_else(builder.icmp_signed(">=", live, I64(vl))) as (full, part):
            with full:
                for q, column in columns(loaded):
                    stored(column, q)
            with part:
                whole = _vector(element, vl)
                masked = [
                    _masked_load(builder, _pointer(builder, x, 0, whole), live, size) for x in at
                ]

                def cut(r: int, q: int) -> ir.Value:
                    return builder.shuffle_vector(
                        masked[r], masked[r], _lanes(list(range(q, q + e)))
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
        vector = _vector(I64, vector_bytes // 8)
        kind = ir.FunctionType(vector, [vector])
        for start in range(0, count * itemsize(fmt), vector_bytes):
            place = builder.gep(source, [I64(start // itemsize(fmt))])
            value = builder.load(builder.bitcast(place, vector.as_pointer()), align=itemsize(fmt))
            if fmt == "float16" and opaque:
                # LLVM sees through to a vector of halves, of which it has no non-temporal store.
                value = builder.asm(kind, "", "=x,0", [value], False)
            stored = builder.store(value, _pointer(builder, target, start, vector))
            stored.align = vector_bytes
            stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    def stream(typingctx: Any, source: Any, target: Any) -> Any:
        return types.void(types.CPointer(CARRIERS[fmt]), types.int64), codegen

    made: Any = intrinsic(stream)
    made.numfuse_key = f"stream({fmt},{count},{vector_bytes},{opaque})"
    return made


@functools.cache
def make_fence() -> Any:
    """``fence()``: stores before it, non-temporal ones included, are seen before any after it."""

    def body(builder: ir.IRBuilder) -> None:
        builder.fence("seq_cst")

    return address_intrinsic("fence", "", 0, body)


@functools.cache
def make_call(nargs: int) -> Any:
    """``call(function, *args)``: call ``void function(int64, ...)`` by its address."""

    def body(builder: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> None:
        ty = ir.FunctionType(ir.VoidType(), [I64] * nargs)
        builder.call(builder.inttoptr(function, ty.as_pointer()), args)

    return address_intrinsic("call", str(nargs), nargs + 1, body)


@functools.cache
def make_nothing() -> Any:
    """``nothing(address)``: for a name that only other kinds of kernel need."""
    return address_intrinsic("nothing", "", 1, lambda builder, address: None)


@functools.cache
def make_fetch_add() -> Any:
    """``fetch_add(address, number) -> int64``: adds atomically, and tells the value before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        # What was written before is seen by whoever sees the new value.
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    def fetch_add(typingctx: Any, address: Any, number: Any) -> Any:
        return types.int64(types.int64, types.int64), codegen

    made: Any = intrinsic(fetch_add)
    made.numfuse_key = "fetch_add 2"
    return made


@functools.cache
def make_atomic_load() -> Any:
    """``atomic_load(address) -> int64``: a counter's value, and all that was written before it."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    def atomic_load(typingctx: Any, address: Any) -> Any:
        return types.int64(types.int64), codegen

    made: Any = intrinsic(atomic_load)
    made.numfuse_key = "atomic_load"
    return made


@functools.cache
def make_pause() -> Any:
    """``pause()``: tells the processor that this thread waits in a loop."""
    machine = platform.machine().lower()

    def body(builder: ir.IRBuilder) -> None:
        if machine in ("x86_64", "amd64"):
            ty = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(builder.module, ty, "llvm.x86.sse2.pause"), []
            )
        elif machine in ("aarch64", "arm64"):
            ty = ir.FunctionType(ir.VoidType(), [I32])
            hint = cgutils.get_or_insert_function(builder.module, ty, "llvm.aarch64.hint")
            builder.call(hint, [I32(1)])

    return address_intrinsic("pause", machine, 0, body)


@functools.cache
def _typed_pointer(name: str, element: Any) -> Any:
    pointer = types.CPointer(element)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    def typing(typingctx: Any, address: Any) -> Any:
        return pointer(types.int64), codegen

    typing.__name__ = name
    made: Any = intrinsic(typing)
    made.numfuse_key = f"{name}({element})"
    return made


#: How a storage format looks to Numba: half types travel as their 16 bits.
CARRIERS: dict[str, Any] = {
    "float64": types.float64,
    "float32": types.float32,
    "float16": types.uint16,
    "bfloat16": types.uint16,
    "int64": types.int64,
    "uint16": types.uint16,
    "uint32": types.uint32,
    "uint64": types.uint64,
}


@functools.cache
def make_elements(fmt: str) -> Any:
    """``elements(address)``: the address as a pointer ``p`` for ``p[i]`` in Numba code."""
    return _typed_pointer("elements", CARRIERS[fmt])


@functools.cache
def make_widen(fmt: str, acc: str) -> Any:
    """``widen(element) -> accumulator`` for one storage element; exact."""
    result = CARRIERS[acc]
    by_integers = _by_integers(fmt)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = args[0]
        if fmt == acc:
            return value
        if fmt == "bfloat16":
            return builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), ir.FloatType())
        if fmt == "float16":
            if by_integers:
                return _widened_by_integers(builder, value)
            value = builder.bitcast(value, FORMATS[fmt][0])
        return builder.fpext(value, FORMATS[acc][0])

    def widen(typingctx: Any, element: Any) -> Any:
        return result(CARRIERS[fmt]), codegen

    made: Any = intrinsic(widen)
    made.numfuse_key = f"widen({fmt},{acc},{by_integers})"
    return made


@functools.cache
def make_narrow(fmt: str, acc: str) -> Any:
    """``narrow(accumulator) -> element``: the one rounding at the store, to nearest even.

    NaN stays NaN; beyond the largest finite number the result is infinite, as IEEE 754 has it.
    """
    result = CARRIERS[fmt]
    by_integers = _by_integers(fmt)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = args[0]
        if fmt == acc:
            return value
        if fmt == "bfloat16":
            bits = builder.bitcast(value, I32)
            odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
            rounded = builder.lshr(builder.add(builder.add(bits, I32(0x7FFF)), odd), I32(16))
            # Rounding the payload of a NaN could carry into the exponent: one NaN for all.
            is_nan = builder.fcmp_unordered("uno", value, value)
            return builder.trunc(builder.select(is_nan, I32(0x7FC0), rounded), I16)
        if by_integers:
            return _narrowed_by_integers(builder, value)
        narrowed = builder.fptrunc(value, FORMATS[fmt][0])
        return builder.bitcast(narrowed, I16) if fmt == "float16" else narrowed

    def narrow(typingctx: Any, value: Any) -> Any:
        return result(CARRIERS[acc]), codegen

    made: Any = intrinsic(narrow)
    made.numfuse_key = f"narrow({fmt},{acc},{by_integers})"
    return made


@functools.cache
def make_is_finite() -> Any:
    """``is_finite(x)`` on the bits of a float32 or float64: no compiler may assume it away."""

    def is_finite(typingctx: Any, x: Any) -> Any:
        bits = x.bitwidth
        exponent = 0x7F800000 if bits == 32 else 0x7FF0000000000000

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            integer = ir.IntType(bits)
            masked = builder.and_(builder.bitcast(args[0], integer), integer(exponent))
            return builder.icmp_unsigned("!=", masked, integer(exponent))

        return types.boolean(x), codegen

    made: Any = intrinsic(is_finite)
    made.numfuse_key = "is_finite"
    return made


@functools.cache
def make_wide_vectors(bits: int) -> Any:
    """``wide_vectors()``: let LLVM use vectors of `bits` bits in the loops of this function.

    For many processors with AVX-512 LLVM prefers 256 bits, for fear of lower clocks.  Between two
    tiles of the micro-kernel, which is written in 512 bits, the clock is what it is, and the wider
    loops of an epilogue take half the time.  The function is kept out of line, because inlined into
    its C wrapper it would lose the attribute.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        attributes = builder.function.attributes
        attributes.add("noinline")
        # llvmlite lists the attributes that it knows; one with a value goes past that list.
        set.add(attributes, f'"prefer-vector-width"="{bits}"')
        return context.get_dummy_value()

    def wide_vectors(typingctx: Any) -> Any:
        return types.void(), codegen

    made: Any = intrinsic(wide_vectors)
    made.numfuse_key = f"wide_vectors({bits})"
    return made
