"""Products of a network in 16 bits on tensor cores: a warp's rows stay in its registers.

Lane 4 g + s has, of a 16 x 8 result of mma.m16n8k16, columns 2 s and 2 s + 1 of rows g and g + 8,
and of a left factor's 16 x 16 piece the same columns of both halves (PTX ISA 9.7.14.5.8). So two
neighbouring results, rounded to 16 bits, are the next layer's left factor: no lane gives anything
to another. Right factors lie in shared memory as rows, whose pitch is 16 bytes beyond a multiple of
32: the eight rows that ldmatrix reads together begin in different banks.

Addresses of shared memory are bytes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

from numfuse.backends.cuda.compile.accesses import narrowed, read_vector, write_vector
from numfuse.backends.cuda.compile.engines import load_matrix, mma_half
from numfuse.backends.cuda.compile.intrinsics import (
    F32,
    GLOBAL,
    HALF,
    I16,
    I32,
    I64,
    emit,
    instruction,
    intrinsic_of,
    read_registers,
    write_registers,
)

#: Values of K of one instruction, and bytes of a value.
CHUNK, SIZE = 16, 2


@functools.cache
def product(dtype: str, pieces: int, chunks: int, pitch: int, turned: bool) -> Any:
    """``multiply(sums, left, at)``: 16 columns of a product are added to the sums of a lane.

    The left factor has `pieces` pieces of 16 rows, of `chunks` times 16 columns each. The right
    factor's rows, or columns where it is `turned`, lie in shared memory; `at` is where the lane
    reads (`place_of_rows`, `place_of_columns`).
    """

    def body(builder, sums, left, at):
        total = read_registers(builder, sums, 0, pieces * 8)
        for k in range(chunks):
            step = CHUNK * SIZE * (1 if turned else pitch)
            b = load_matrix(builder, builder.add(at, I32(k * step)), not turned)
            for i in range(pieces):
                a = read_registers(builder, left, (i * chunks + k) * 4, 4)
                for h in range(2):
                    p = (i * 2 + h) * 4
                    half = b[2 * h : 2 * h + 2]
                    total[p : p + 4] = mma_half(builder, dtype, a, half, total[p : p + 4])
        write_registers(builder, sums, 0, total)

    return intrinsic_of("product", f"{dtype} {pieces} {chunks} {pitch} {turned}", "aar", body)


@functools.cache
def outer(dtype: str, down: int, across: int, added: bool) -> Any:
    """``outer(sums, columns, x, y)``: sums += X' Y for 16 rows of both.

    X has `down` times 16 columns, Y `across` times 8. Where it is `added`, what a lane reads of Y
    is added to `columns`: column g of each piece.
    """

    def body(builder, sums, columns, x, y):
        total = read_registers(builder, sums, 0, down * across * 4)
        a = [load_matrix(builder, builder.add(x, I32(i * CHUNK * SIZE)), True) for i in range(down)]
        for j in range(0, across, 2):
            b = load_matrix(builder, builder.add(y, I32(j * 8 * SIZE)), True)
            if added:
                run = read_registers(builder, columns, j, 2)
                for r in range(4):
                    for high in (False, True):
                        value = _half_of(builder, b[r], dtype, high)
                        run[r // 2] = builder.fadd(run[r // 2], value)
                write_registers(builder, columns, j, run)
            for i in range(down):
                for h in range(2):
                    p = (i * across + j + h) * 4
                    half = b[2 * h : 2 * h + 2]
                    total[p : p + 4] = mma_half(builder, dtype, a[i], half, total[p : p + 4])
        write_registers(builder, sums, 0, total)

    return intrinsic_of("outer", f"{dtype} {down} {across} {added}", "aarr", body)


# --- where a lane reads ---------------------------------------------------------------------------
# Lane 8 i + r gives ldmatrix the address of row r of matrix i.
def place_of_rows(lane, pitch):
    """Return where a lane reads a right factor whose rows lie in memory, from its first one."""
    return (((((lane >> 3) & 1) * 8 + (lane & 7)) * pitch) + (lane >> 4) * 8) * 2


def place_of_columns(lane, pitch):
    """Return where a lane reads a right factor whose columns lie in memory.

    So it reads a left factor whose columns lie there, too.
    """
    return (((lane >> 4) * 8 + (lane & 7)) * pitch + ((lane >> 3) & 1) * 8) * 2


def padded_place(p, q, down, across):
    """Return where a value of a right factor lies in memory, in bytes."""
    return (p * (across + 8) + q) * 2


# --- words of two values --------------------------------------------------------------------------
def _half_of(builder, word, dtype, high):
    """Return the lower or the higher value of a word as a float32."""
    if dtype == "bfloat16":
        bits = builder.and_(word, I32(-65536)) if high else builder.shl(word, I32(16))
        return builder.bitcast(bits, F32)
    bits = builder.lshr(word, I32(16)) if high else word
    return builder.fpext(builder.bitcast(builder.trunc(bits, I16), HALF), F32)


@functools.cache
def half_of(dtype: str, high: bool) -> Any:
    """``half(word)``: one of the two values of a word."""

    def body(builder, word):
        return _half_of(builder, word, dtype, high)

    return intrinsic_of("half_of", f"{dtype} {high}", "r", body, "f")


def _peek_word(builder, at):
    return read_vector(builder, at, 0, I32, 1)[0]


def _poke_word(builder, at, value):
    write_vector(builder, at, 0, [value])


def _poke_real(builder, at, value):
    write_vector(builder, at, 0, [value])


def _poke_zeros(builder, at):
    write_vector(builder, at, 0, [I32(0)] * 4)


def _peek_reals(builder, at):
    return read_vector(builder, at, 0, F32, 2)


def _peek_bias(builder, at, place):
    # (as text: no register is made of the place)
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{32 * place}];"
    return emit(builder, text, "ff", "r", [at], "memory")


#: Two neighbours among float32, so many times 8 of them further.
peek_bias = intrinsic_of("peek_bias", "", "rn", _peek_bias, "ff")
#: A word of shared memory; write one; write four of 0; write a float32; read two neighbours of
#: these.
peek_word = intrinsic_of("peek_word", "", "r", _peek_word, "r")
poke_word = intrinsic_of("poke_word", "", "rr", _poke_word)
poke_zeros = intrinsic_of("poke_zeros", "", "r", _poke_zeros)
poke_real = intrinsic_of("poke_real", "", "rf", _poke_real)
peek_reals = intrinsic_of("peek_reals", "", "r", _peek_reals, "ff")


@functools.cache
def poke_half(dtype: str) -> Any:
    """``poke(at, value)``: write a float32, rounded to 16 bits, to shared memory."""

    def body(builder, at, value):
        write_vector(builder, at, 0, [narrowed(builder, value, dtype)])

    return intrinsic_of("poke_half", dtype, "rf", body)


@functools.cache
def load_words(count: int) -> Any:
    """``load(address)``: so many neighbouring words of memory, as a tuple."""

    def body(builder, address):
        return read_vector(builder, address, 0, I32, count, GLOBAL)

    return intrinsic_of("load_words", str(count), "l", body, "r" * count)


@functools.cache
def store_words(count: int) -> Any:
    """``store(address, words, first)``: so many words of an array to memory."""

    def body(builder, address, words, first):
        write_vector(builder, address, 0, read_registers(builder, words, first, count), GLOBAL)

    return intrinsic_of("store_words", str(count), "lan", body)


def _load_bits(builder, address):
    return builder.zext(read_vector(builder, address, 0, I16, 1, GLOBAL)[0], I32)


def _word_of(builder, low, high):
    return builder.add(low, builder.shl(high, I32(16)))


def _poke_bits(builder, at, value):
    write_vector(builder, at, 0, [builder.trunc(value, I16)])


#: The 16 bits at an address; these to shared memory; a word of two of them.
load_bits = intrinsic_of("load_bits", "", "l", _load_bits, "r")
poke_bits = intrinsic_of("poke_bits", "", "rr", _poke_bits)
word_of = intrinsic_of("word_of", "", "rr", _word_of, "r")


# --- accesses without a branch --------------------------------------------------------------------
def _word_if(builder, condition, word):
    return builder.select(condition, word, I32(0))


#: A word where the condition holds, else 0.
word_if = intrinsic_of("word_if", "", "pr", _word_if, "r")
# 9.7.9.11, st: to memory where a predicate holds
_STORE_IF = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global."


@functools.cache
def store_half_if(high: bool) -> Any:
    """``store(address, word, condition)``: one of a word's values where the condition holds."""

    def body(builder, address, word, condition):
        value = builder.trunc(builder.lshr(word, I32(16)) if high else word, I16)
        text = f"{_STORE_IF}b16 [$0], $1; }}"
        emit(builder, text, "", "lhp", [address, value, condition], "memory")

    return intrinsic_of("store_half_if", str(high), "lrp", body)


#: ``store(address, word, condition)``: a word.
store_word_if = instruction(f"{_STORE_IF}b32 [$0], $1; }}", "", "lrp")
#: ``store(address, value, condition)``: a float32.
store_real_if = instruction(f"{_STORE_IF}f32 [$0], $1; }}", "", "lfp")


@functools.cache
def store_row(across: int, pairs: int) -> Any:
    """``store(sums, i, address, column, limit, condition)``: a lane's row of an `outer` to memory.

    These are registers i, i + 1, i + 4, i + 5 and so on, of `across` pieces of 8 columns; `address`
    is that of the lane's first one, `column`, and those from `limit` on are left out. With `pairs`
    see `network_half.column_of`.
    """

    def body(builder, sums, first, address, column, limit, condition):
        for j in range(across):
            for b, value in enumerate(read_registers(builder, sums, first + 4 * j, 2)):
                n = j // pairs * 8 * pairs + 2 * (j % pairs) + b
                inside = builder.icmp_signed("<", builder.add(column, I32(n)), limit)
                there = builder.and_(condition, inside)
                at = builder.add(address, I64(4 * n))
                emit(
                    builder, f"{_STORE_IF}f32 [$0], $1; }}", "", "lfp", [at, value, there], "memory"
                )

    return intrinsic_of("store_row", f"{across} {pairs}", "anlrrp", body)
