"""Matrices of a network in 16 bits as Hopper's tensor cores read them: panels in shared memory.

A panel has rows of `box_of` columns, whose pieces of 16 bytes are swizzled: neighbouring rows have
theirs in other banks, so that a warp reads and writes eight rows at a time. wgmma reads a panel
along its rows or across them (PTX ISA 9.7.15.5.1). What a thread has of wgmma's sums, and of a left
factor in registers, are the fragments of mma.m16n8k16 (9.7.15.5.1.1): warp w of a group has rows
16 w to 16 w + 15, as in `network_fragments`.

Addresses of shared memory are bytes, and panels begin at multiples of ALIGNED.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from typing import Any

from numfuse.backends.cuda.compile.engines import (
    Factor,
    GroupProduct,
    group_product,
    group_products,
    load_matrix,
    store_matrix,
)
from numfuse.backends.cuda.compile.intrinsics import (
    emit,
    intrinsic_of,
    read_registers,
    write_registers,
)

#: Rows of a warp group, and values of K of one instruction.
GROUP_ROWS, CHUNK = 64, 16
#: Bytes after which the widest swizzle repeats: 8 rows of 128.
ALIGNED = 1024
#: {format: its name in PTX}
KINDS = {"bfloat16": "bf16", "float16": "f16"}


def box_of(width):
    """Return the columns of a panel of a matrix whose width is a multiple of 16."""
    if width % 64 == 0:
        return 64
    if width % 32 == 0:
        return 32
    return 16


def panel_place(p, q, down, across):
    """Return where row p, column q of a matrix of `down` x `across` lies, in bytes."""
    box = box_of(across)
    at = p * (2 * box) + (q & (box - 1)) * 2
    panels = q >> (6 if box == 64 else 5 if box == 32 else 4)
    return (at ^ ((at >> 3) & (2 * box - 16))) + panels * (down * 2 * box)


# --- factors of wgmma -----------------------------------------------------------------------------
def _high(box: int) -> int:
    """Return a descriptor's upper word (9.7.15.5.1.2.2).

    Its kind of swizzle (1 for rows of 128 bytes, 2 of 64, 3 of 32), and from 8 rows to the next 8.
    """
    return {64: 1, 32: 2, 16: 3}[box] << 30 | (8 * 2 * box) >> 4


def along(down: int, across: int) -> tuple[Factor, int]:
    """Return a factor whose K goes along the rows of a matrix, and the rest of its lower word.

    The rest is what the address is added to.
    """
    box = box_of(across)
    each = box // CHUNK
    steps = tuple(k // each * (down * 2 * box) + k % each * 32 for k in range(across // CHUNK))
    return Factor(False, steps, _high(box)), 1 << 16


def across(down: int, width: int, rows: int) -> tuple[Factor, int]:
    """Return a factor whose K is `rows` rows of a matrix of `down` x `width`.

    The rest of its lower word says how far a panel is from the next.
    """
    box = box_of(width)
    steps = tuple(k * CHUNK * 2 * box for k in range(rows // CHUNK))
    return Factor(True, steps, _high(box)), (down * 2 * box >> 4) << 16


def repeated(width: int, rows: int) -> Factor:
    """Return a factor whose K is always the same rows of a matrix, of one panel."""
    return Factor(True, (0,) * (rows // CHUNK), _high(box_of(width)))


def descriptor(at, rest):
    """Return the lower word of the descriptor of a matrix."""
    return rest | ((at & 0x3FFFF) >> 4)


@functools.cache
def product_of(dtype: str, p: GroupProduct) -> Any:
    """Return `group_product` of a format."""
    return group_product(KINDS[dtype], p)


@functools.cache
def products_of(
    dtype: str,
    products: tuple[tuple[GroupProduct, int], ...],
    others: tuple[tuple[GroupProduct, int], ...],
) -> Any:
    """Return `group_products` of a format."""
    return group_products(KINDS[dtype], products, others)


# --- fragments ------------------------------------------------------------------------------------
def place_of_fragment(lane, row, box):
    """Return where a lane's row of ldmatrix and stmatrix begins: 16 rows from `row`, 16 columns."""
    at = (row + (lane & 15)) * (2 * box) + (lane >> 4) * 16
    return at ^ ((at >> 3) & (2 * box - 16))


def _poke_fragment(builder, at, words, first, more=0):
    store_matrix(builder, at, read_registers(builder, words, first, 4), more=1024 * more)


def _peek_fragment(builder, at, words, first, more=0):
    write_registers(builder, words, first, load_matrix(builder, at, False, 1024 * more))


#: ``poke(at, words, first)``: four words of an array to shared memory; ``peek`` reads them back.
#: ``poke_beyond(at, words, first, more)``: so many KiB further, of which no register is made.
poke_fragment = intrinsic_of("poke_fragment", "", "ran", _poke_fragment)
peek_fragment = intrinsic_of("peek_fragment", "", "ran", _peek_fragment)
poke_beyond = intrinsic_of("poke_beyond", "", "rann", _poke_fragment)
peek_beyond = intrinsic_of("peek_beyond", "", "rann", _peek_fragment)


# --- an activation by words -----------------------------------------------------------------------
@functools.cache
def rectified(dtype: str) -> Any:
    """``pack(low, high)``: two float32, rounded to 16 bits, as a word; 0 where they are negative.

    cvt.rn.relu (9.7.9.21): NaN stays NaN.
    """
    text = f"cvt.rn.relu.{KINDS[dtype]}x2.f32 $0, $2, $1;"

    def body(builder, low, high):
        return emit(builder, text, "r", "ff", [low, high])

    return intrinsic_of("rectified", text, "ff", body, "r")


@functools.cache
def ones_above(dtype: str) -> Any:
    """``ones(word)``: 1 for each value of a word that is greater than 0, else 0.

    set (9.7.7.2, 9.7.4.1).
    """
    kind = KINDS[dtype]
    text = f"{{ .reg .b32 z; mov.b32 z, 0; set.gt.{kind}x2.{kind}x2 $0, $1, z; }}"

    def body(builder, word):
        return emit(builder, text, "r", "r", [word])

    return intrinsic_of("ones_above", text, "r", body, "r")


@functools.cache
def keep_bits(dtype: str) -> Any:
    """``bits(found, word, place)``: of both values of a word, whether it is greater than 0.

    These are bits `place` and `place` + 16 beside those that were found: set (9.7.7.2, 9.7.4.1).
    """
    kind = KINDS[dtype]

    def body(builder, found, word, place):
        text = (
            f"{{ .reg .b32 z; mov.b32 z, 0; set.gt.u32.{kind}x2 z, $2, z;"
            f" and.b32 z, z, {65537 << place}; or.b32 $0, $1, z; }}"
        )
        return emit(builder, text, "r", "rr", [found, word])

    return intrinsic_of("keep_bits", kind, "rrn", body, "r")


def _where_bits(builder, found, word, place):
    text = (
        f"{{ .reg .b32 s; shl.b32 s, $1, {15 - place}; prmt.b32 s, s, 0, {0xBB99};"
        " and.b32 $0, $2, s; }"
    )
    return emit(builder, text, "r", "rr", [found, word])


#: ``word(found, word, place)``: the values of a word whose bits of `keep_bits` are set, 0 for the
#: others: a byte's sign is repeated (prmt, 9.7.9.7)
where_bits = intrinsic_of("where_bits", "", "rrn", _where_bits, "r")


def _times(builder, x, y):
    return emit(builder, "mul.rn.bf16x2 $0, $1, $2;", "r", "rr", [x, y])


#: ``product(x, y)``: of the values of two words of bfloat16, by pairs (9.7.4.4)
times = intrinsic_of("times_bfloat16", "", "rr", _times, "r")
