"""Integers of 8 bits in words of four: what residues are made with, and made numbers of again.

Each is PTX (`intrinsics`), with its section of the PTX ISA 9.0, and has a Python text for Numba's
simulator. Moduli are at most 256. Residues of factors are from -128 to 127, those of sums from 0 to
255; a remainder may be the modulus itself in place of 0.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile.accesses import read_vector
from numfuse.backends.cuda.compile.intrinsics import (
    GLOBAL,
    I8,
    I16,
    I32,
    emit,
    instruction,
    intrinsic_of,
    read_registers,
)
from numfuse.backends.cuda.compile.toolchain import SIMULATED

_WORD = 1 << 32


def _either(simulated: Any, made: Any) -> Any:
    """Return an intrinsic, or in the simulator the function that stands for it."""
    if not SIMULATED:
        return made
    simulated.numfuse_key = made.numfuse_key
    return simulated


# --- a number as words ----------------------------------------------------------------------------
#: Added to a number before it is cut to digits, and left out of its residues again by `TURN`.
ABOVE = 128
#: Of each byte: what makes a digit from -128 to 127 of one from 0 to 255, and the other way round.
TURN = 0x80808080
#: 9.7.9.21, cvt: a float64, rounded to the nearest integer, plus `ABOVE`, in two or three words of
#: digits: the bytes of a sum with 128 of each digit, turned. (Its top digit holds the sign.)
_SPLIT = {
    2: "{ .reg .b64 t; cvt.rni.s64.f64 t, $2; add.s64 t, t, 0x8080808080808100;"
    " mov.b64 {$0, $1}, t; xor.b32 $0, $0, 0x80808080; xor.b32 $1, $1, 0x80808080; }",
    # t = h 2^32 + l, both exact: h is below 2^63, and l from 0 to 2^32 (-2^32 is 0dC1F0...)
    3: "{ .reg .b64 h, l; .reg .f64 t, s; .reg .b32 x; cvt.rni.f64.f64 t, $3;"
    " mul.f64 s, t, 0d3DF0000000000000; cvt.rmi.s64.f64 h, s; cvt.rn.f64.s64 s, h;"
    " fma.rn.f64 t, s, 0dC1F0000000000000, t; cvt.rzi.s64.f64 l, t; add.s64 l, l, 0x80808100;"
    " mov.b64 {$0, x}, l; shr.s64 l, l, 32; add.s64 h, h, l; add.s64 h, h, 0x8080808080808080;"
    " mov.b64 {$1, $2}, h; xor.b32 $0, $0, 0x80808080; xor.b32 $1, $1, 0x80808080;"
    " xor.b32 $2, $2, 0x80808080; }",
}


@functools.cache
def words_of(words: int) -> Any:
    """``words_of(x)``: the nearest integer to x plus `ABOVE`, as so many words of digits."""

    def simulated(x: Any) -> tuple[int, ...]:
        whole = (int(np.rint(x)) if np.isfinite(x) else 0) + ABOVE
        found = []
        for _ in range(words):
            word = 0
            for i in range(4):
                digit = symmetric(whole, 256)
                whole = (whole - digit) >> 8
                word |= (digit & 255) << 8 * i
            found.append(symmetric(word, _WORD))  # (an int32, as a local array has it)
        return tuple(found)

    return _either(simulated, instruction(_SPLIT[words], "r" * words, "d", "pure"))


# --- residues of a factor -------------------------------------------------------------------------
def symmetric(x: int, modulus: int) -> int:
    """Return the residue of x from -modulus // 2 to (modulus - 1) // 2."""
    return (x + modulus // 2) % modulus - modulus // 2


def _packed(values: Sequence[str], to: str) -> str:
    """9.7.9.7, prmt: the low bytes of four words as one word."""
    a, b, c, d = values
    return (
        f"prmt.b32 {a}, {a}, {b}, 0x0040; prmt.b32 {c}, {c}, {d}, 0x0040;"
        f" prmt.b32 {to}, {a}, {c}, 0x5410;"
    )


def _bytes(modulus: int, first: int) -> int:
    """Return the residues of 256^first and the next three, one a byte."""
    found = (symmetric(256**i, modulus) & 255 for i in range(first, first + 4))
    return sum(byte << 8 * i for i, byte in enumerate(found))


def residue_text(modulus: int, words: int) -> str:
    """Return PTX: four numbers of so many words ($1 ...) become their residues, one a byte of $0.

    9.7.1.23, dp4a: the digits by the residues of their weights, a sum below 2^18. 9.7.1.3, mul.hi:
    its quotient, rounded down, is exact to 2^-14, and so right; of a multiple below 0 it is one
    less, and the remainder is then the modulus, which 256 never is (its inverse is exact). Less
    `ABOVE` it is a residue of the number that was rounded, from -128 to 127.
    """
    lines = ["{ .reg .b32 t0, t1, t2, t3, x, q;"]
    for i in range(4):
        before: Any = 0
        for w in range(words):
            lines.append(f"mov.b32 x, {_bytes(modulus, 4 * w):#010x};")
            lines.append(f"dp4a.s32.s32 t{i}, ${1 + i * words + w}, x, {before};")
            before = f"t{i}"
        lines.append(f"mul.hi.s32 q, t{i}, {-(-_WORD // modulus)};")
        lines.append(f"mad.lo.s32 t{i}, q, {-modulus}, t{i};")
    lines.append(_packed(["t0", "t1", "t2", "t3"], "$0"))
    return "\n".join([*lines, f"xor.b32 $0, $0, {TURN:#x}; }}"])


@functools.cache
def packed_residues(moduli: tuple[int, ...], words: int) -> Any:
    """``residues(number, registers, group)``: of four integers, modulo that modulus.

    These are a group of a local array that holds the words of many (`words_of`), one after the
    other. The first is the lowest byte. They are from -128 to 127.
    """
    length = 4 * words

    def simulated(number: int, registers: Any, group: int) -> int:
        found, given = 0, registers[length * group :]
        for i in range(4):
            whole = 0
            for j, word in enumerate(given[i * words : (i + 1) * words]):
                digits = (symmetric(int(word) >> 8 * b, 256) for b in range(4))
                whole += sum(d << 8 * (4 * j + b) for b, d in enumerate(digits))
            found |= (whole % moduli[number] ^ ABOVE) << 8 * i
        return found

    def body(builder: Any, number: int, registers: Any, group: int) -> Any:
        given = read_registers(builder, registers, length * group, length)
        return emit(builder, residue_text(moduli[number], words), "r", "r" * length, given)

    made = intrinsic_of("packed_residues", f"{moduli} {words}", "nan", body, "r")
    return _either(simulated, made)


# --- residues of a sum ----------------------------------------------------------------------------
#: Bits behind which `inverse_of` has the quotient of a sum.
_QUOTIENT = 38


def inverse_of(modulus: int) -> int:
    """Return 2^38 over a modulus above 128, rounded: 31 bits."""
    return ((1 << _QUOTIENT) + modulus // 2) // modulus


def _remainders() -> str:
    lines = ["{ .reg .b32 t0, t1, t2, t3, q;"]
    for i in range(4):
        lines.append(f"mul.hi.s32 q, ${1 + i}, $5; shr.s32 q, q, {_QUOTIENT - 32};")
        lines.append(f"mad.lo.s32 t{i}, q, $6, ${1 + i};")
    return "\n".join([*lines, _packed(["t0", "t1", "t2", "t3"], "$0"), "}"])


def _simulated_remainders(*given: Any) -> int:
    *sums, _, negative = map(int, given)
    return sum(s % -negative << 8 * i for i, s in enumerate(sums))


#: ``remainders(four sums, inverse_of(p), -p)``: a number from 0 to p for each, one a byte, equal to
#: the sum modulo p. The quotient is exact to 2^-8, so that it is right or, of a multiple of p, one
#: less: then the byte is p, which 256 never is (9.7.1.3, mul.hi; 9.7.1.4, mad).
packed_remainders = _either(
    _simulated_remainders, instruction(_remainders(), "r", "rrrrrr", "pure")
)


def _byte_text(i: int) -> str:
    return (
        f"{{ .reg .b32 l, h; prmt.b32 l, $1, 0, 0x444{i}; mov.b32 h, 0x43300000;"
        " mov.b64 $0, {l, h}; }"
    )


@functools.cache
def byte_above(i: int) -> Any:
    """``byte(word)``: 2^52 plus byte `i` of a word, as a float64: its bits (9.7.9.7, prmt).

    A conversion takes four times as long as the subtraction of 2^52.
    """
    return _either(
        lambda word: np.float64(2.0**52 + (int(word) >> 8 * i & 255)),
        instruction(_byte_text(i), "d", "r", "pure"),
    )


# --- memory ---------------------------------------------------------------------------------------
@functools.cache
def load_bytes(count: int) -> Any:
    """``load(address)``: one or two bytes as the low ones of a word."""
    held = {1: ctypes.c_uint8, 2: ctypes.c_uint16}[count]

    def body(builder: Any, address: Any) -> Any:
        (found,) = read_vector(builder, address, 0, {1: I8, 2: I16}[count], 1, GLOBAL)
        return builder.zext(found, I32)

    return _either(
        lambda address: held.from_address(int(address)).value,
        intrinsic_of("load_bytes", str(count), "l", body, "r"),
    )


def _simulated_store(address: Any, *words: Any) -> None:
    for i, word in enumerate(words):
        ctypes.c_uint32.from_address(int(address) + 4 * i).value = int(word) & (_WORD - 1)


#: 9.7.9.11, st: 16 bytes of residues
store_residues = _either(
    _simulated_store,
    instruction("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", "lrrrr"),
)


def load_signed(address: Any) -> int:
    """Return a byte as a signed number; in the simulator."""
    return ctypes.c_int8.from_address(int(address)).value


def store_byte(address: Any, value: Any) -> None:
    """Store the low byte of a number; in the simulator."""
    ctypes.c_uint8.from_address(int(address)).value = int(value) & 255
