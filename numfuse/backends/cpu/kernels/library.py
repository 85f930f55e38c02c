"""The kernels of the CPU backend, specialised on demand: templates meet what they are bound to."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numfuse.backends.cpu import host, tiling
from numfuse.backends.cpu.kernels import (
    ahead,
    elementwise,
    gemm,
    packing,
    parts,
    protocol,
    residues,
    thin,
)
from numfuse.backends.cpu.llvm import (
    amx,
    conversions,
    intrinsics,
    microkernel,
    moves,
    pairs,
    partition,
    residue_sums,
    splits,
    vectors,
)
from numfuse.backends.cpu.llvm import residues as integers
from numfuse.backends.cpu.llvm.thin import make_chains, make_streamed, make_thin
from numfuse.moduli import HUGE, TINY, Residues
from numfuse.runtime import lifetimes, replay, specialise

FORMATS = ("float64", "float32", "float16", "bfloat16")


@functools.cache
def accumulator(fmt: str) -> str:
    """The accumulator's format of a storage format."""
    return "float64" if fmt == "float64" else "float32"


def zero(acc: str) -> np.generic:
    """Zero in the accumulator's dtype: a bare ``0.0`` in Numba code is a float64."""
    return np.dtype(acc).type(0)


@functools.cache
def kind(left: str, right: str, precision: str = "ieee") -> str:
    """How factors of these formats are multiplied: as stored, where both are the same half.

    Two of float32 are split into parts, where a precision says so.
    """
    if precision != "ieee" and left == right == "float32":
        return precision
    return host.product(left) if left == right else "fma"


@functools.cache
def registers(acc: str, kind: str = "fma") -> tiling.Registers:
    if kind in tiling.PARTS:  # written in 512 bits, which the tests' emulation cuts up
        return tiling.registers(64, vectors.itemsize(acc), False, kind)
    lanes = kind == "fma" and host.multiplies_by_lanes()
    return tiling.registers(host.vector_bytes(), vectors.itemsize(acc), lanes, kind)


@functools.cache
def registers_of(fmt: str) -> tiling.Registers:
    """Return the register tile of products of factors in one storage format."""
    return registers(accumulator(fmt), kind(fmt, fmt))


@functools.cache
def chunk(fmt: str) -> int:
    """Rows of a chunk of the column sums of a storage format."""
    return registers_of(fmt).chunk


@functools.cache
def group(fmt: str) -> int:
    """Columns of a group of the row sums of a storage format."""
    return registers_of(fmt).nr


@functools.cache
def grad_pre_format(fmt: str) -> str:
    """Return the format that grad_pre is stored in.

    The format is the accumulator's, or the operands' own where products take halves as they are.
    """
    return accumulator(fmt) if kind(fmt, fmt) == "fma" else fmt


def _words() -> dict[str, Any]:
    """Return the names that every reader of a descriptor or a context binds."""
    words = protocol.SCRATCH | protocol.DESCRIPTOR | {"D_SLOTS": protocol.D_SLOTS}
    return words | {"WORDS": intrinsics.make_elements("int64")}


def _cell_names() -> dict[str, Any]:
    """Return the names that both kinds of cell bind."""
    words = _words()
    return {
        **words,
        "CELL": specialise.device(elementwise.cell_of, **words),
        "OPEN_CONTEXT": specialise.device(elementwise.open_context, **words),
        "CALL_ROW": intrinsics.make_call(5),
    }


def gemm_cell(
    acc: str, kind: str = "fma", fmt: str = "", turned: bool = False
) -> specialise.Kernel:
    """The cell of one kind of product; `fmt`, the factors' format, matters to tiles only.

    That of a transpose is another one where a sum has products of parts in an order.
    """
    return _gemm_cell(acc, kind, fmt if kind == "amx" else "", turned and kind in tiling.PARTS)


@functools.cache
def _gemm_cell(acc: str, kind: str, fmt: str, turned: bool) -> specialise.Kernel:
    r = registers(acc, kind)
    words = {
        **_cell_names(),
        **protocol.AHEAD,
        **protocol.STREAMS,
        "STREAM_TABLE": protocol.STREAM_TABLE,
        "ROW_STREAMS": protocol.ROW_STREAMS,
        "STREAM_COUNT": protocol.STREAM_COUNT,
        "LINE": tiling.LINE,
        "NR": r.nr,
        "HEIGHT": r.held_rows,
        "WIDTH": r.panel_columns,
        "DOWN": r.tiles[0],
        "ACROSS": r.tiles[1],
        "SIZE": r.itemsize,
        "CALL_PACK_A": intrinsics.make_call(7),
        "CALL_PACK_B": intrinsics.make_call(7),
        "PANEL_ROWS": r.panel_rows,
        "SLICE": max(ahead.SLICE, r.k_step),
        "K_STEP": r.k_step,
        "FACTOR": r.factor,
        "REQUESTS": r.requests,
        "MR": r.mr,
        "TILE": r.mr * r.nr * r.itemsize,
    }
    steps = "ask plan_ahead pack_ahead ask_a ask_b ask_row rest ask_panel plan_group ask_group"
    # Each may call those before it.
    for module, names in (
        (gemm, "place sum_offsets"),
        (ahead, f"{steps} pack_group pack_slice"),
        (gemm, "panel ask_panels"),
    ):
        for name in names.split():
            words[name.upper()] = specialise.device(getattr(module, name), **words)
    return specialise.kernel(
        gemm.gemm_cell,
        **words,
        **_unit(acc, kind, fmt, r, turned),
        SUMS=intrinsics.make_elements(acc),
        ZERO=zero(acc),
    )


def _unit(acc: str, kind: str, fmt: str, r: tiling.Registers, turned: bool) -> dict[str, Any]:
    """Return the micro-kernel of a kind, and what a thread does before and after its use."""
    streams = protocol.STREAM_COUNT
    emulated = kind in tiling.PARTS and host.tiles_of_parts() == "emulated"
    if kind in tiling.PARTS:
        kernel = splits.make_split_kernel(r, streams, emulated, turned)
    elif kind == "amx":
        kernel = amx.make_tile_kernel(fmt, r, streams)
    else:
        kernel = microkernel.make_microkernel(acc, r, streams)
    tiles = not emulated and (kind == "amx" or kind in tiling.PARTS)
    return {"MICROKERNEL": kernel, **_open_and_close(tiles)}


def _open_and_close(tiles: bool) -> dict[str, Any]:
    """Return what a thread does before and after its use of tiles, if it has any."""
    return {
        "OPEN_UNIT": amx.make_open_tiles() if tiles else intrinsics.make_nothing(),
        "CLOSE_UNIT": amx.make_close_tiles() if tiles else intrinsics.make_nothing(),
    }


@functools.cache
def thin_cell(acc: str, by_rows: bool, streamed: bool) -> specialise.Kernel:
    """The cell of a product with few rows; `by_rows` says which of B's strides is one element.

    `streamed`: of a B of contiguous rows that is beyond level 2.
    """
    words, vector_bytes = _cell_names(), host.vector_bytes()
    sums = {
        "SUMS": intrinsics.make_elements(acc),
        "VL": vector_bytes // vectors.itemsize(acc),
        "ZERO": zero(acc),
    }
    add = specialise.device(thin.add_rows, **sums)
    terms = specialise.device(gemm.sum_offsets, **words)
    size = vectors.itemsize(acc)
    dot = specialise.device(
        thin.dot,
        **words,
        **sums,
        SUM_OFFSETS=terms,
        CHAINS=make_chains(acc),
        CHAIN=tiling.CHAIN,
        BLOCKS=tiling.DOT_BLOCKS,
        SIZE=size,
    )
    if streamed:
        kernel = make_streamed(acc, vector_bytes)
        passed = specialise.device(thin.pass_pieces, **sums, ADD_ROWS=add, STREAMED=kernel)
    else:
        group = tiling.THIN_GROUPS[by_rows]
        kernel = make_thin(acc, vector_bytes, group, by_rows)
        passed = specialise.device(thin.pass_panels, GROUP=group, THIN=kernel)
    return specialise.kernel(
        thin.thin_cell,
        **words,
        **sums,
        SUM_OFFSETS=terms,
        ADD_ROWS=add,
        PASS=passed,
        DOT=dot,
        DOTS=tiling.DOTS,
        DEEP_DOTS=tiling.DEEP_DOTS,
        DOT_DEEP=tiling.DOT_DEEP,
        BY_ROWS=by_rows,
        CHAIN=tiling.CHAIN,
        SIZE=size,
    )


def _residue_names() -> dict[str, Any]:
    """Return the names that both cells of residues bind."""
    words = _cell_names() | protocol.SLOTS
    return {
        **words,
        "SUM_OFFSETS": specialise.device(gemm.sum_offsets, **words),
        "NUMBERS": intrinsics.make_elements("float64"),
        "PANEL": integers.PANEL,
        "STEP": integers.STEP,
        "PANEL_BYTES": integers.PANEL_BYTES,
        "GAP": integers.GAP,
        "ASKED": residue_sums.ASKED,
    }


@functools.cache
def registers_of_residues() -> tiling.Registers:
    """Return what the layout of a workspace asks for: 32 x 32 numbers, written in 512 bits."""
    return tiling.Registers(64, 8, integers.PANEL, 4)


@functools.cache
def panel_cell(of: Residues, by_rows: bool) -> specialise.Kernel:
    """Return the cell that makes residues, of A (`by_rows`) or of B."""
    limit_n, limit_m = of.limit
    words = {
        **_residue_names(),
        "BY_ROWS": by_rows,
        "MODULI": of.count,
        "CHAINS": integers.CHAINS,
        "CHAIN_BYTES": integers.CHAIN_BYTES,
        "LIMIT_N": limit_n,
        "LIMIT_M": limit_m,
        "TINY": TINY,
        "HUGE": HUGE,
        "HUGE_N": int(math.log2(HUGE)),
        "INFINITY": math.inf,
        "NAN": math.nan,
        "TRANSPOSE": moves.make_transpose("float64", "float64", 8, 8),
        "TRANSPOSE_WORDS": moves.make_transpose("float32", "float32", 16, 16),
        "ADD_SQUARES": integers.make_add_squares(),
        "ADD_SQUARES_ACROSS": integers.make_add_squares_across(),
        "NORM": integers.make_norm(),
        "SPLIT": integers.make_split(of),
        "SPLIT_ACROSS": integers.make_split_across(of),
    }
    for name in ("at_hand", "uncross", "clear", "floor_log2", "exponent", "powers"):
        words[name.upper()] = specialise.device(getattr(residues, name), **words)
    return specialise.kernel(residues.panel_cell, **words)


@functools.cache
def residue_cell(of: Residues) -> specialise.Kernel:
    """Return the cell of a product from the residues of its factors."""
    emulated = host.tiles_of_residues() == "emulated"
    words = {
        **_residue_names(),
        "RESIDUE_SLOTS": protocol.RESIDUE_SLOTS,
        "STREAM_TABLE": protocol.STREAM_TABLE,
        "BLOCK_STEPS": tiling.RESIDUE_STEPS,
        "MODULI": of.count,
        "KERNEL": residue_sums.make_residue_kernel(emulated),
        "REDUCE": residue_sums.make_reduce(of),
        "MAKE_NUMBERS": residue_sums.make_numbers(of),
        "ADD_PRODUCTS": residue_sums.make_add_products(),
        **_open_and_close(not emulated),
    }
    words["CLEAR"] = specialise.device(residues.clear, **words)
    words["PLAIN"] = specialise.device(residues.plain, **words)
    return specialise.kernel(residues.residue_cell, **words)


@functools.cache
def elementwise_cell() -> specialise.Kernel:
    words = {**_cell_names(), **protocol.SLOTS, "LINE": tiling.LINE}
    words["BEFORE_LINE"] = specialise.device(elementwise.before_line, **words)
    return specialise.kernel(
        elementwise.elementwise_cell,
        **words,
        STREAM_ROW=specialise.device(elementwise.stream_row, **words),
        FENCE=intrinsics.make_fence(),
    )


@functools.cache
def narrow_sums_cell(acc: str) -> specialise.Kernel:
    return specialise.kernel(
        elementwise.narrow_sums_cell,
        **{**_cell_names(), **protocol.SLOTS},
        CHUNK=chunk(acc),
        RUN=tiling.RUN,
        SUMS=intrinsics.make_elements(acc),
        ZERO=zero(acc),
    )


@functools.cache
def join_cell(fmt: str, whole: bool = False) -> specialise.Kernel:
    """Return the cell that joins partials to a row; or, `whole`, to one number."""
    acc = accumulator(fmt)
    words = {
        **_cell_names(),
        **protocol.SLOTS,
        "IS_FINITE": conversions.make_is_finite(),
        "SIZE": vectors.itemsize(acc),
        "TOTALS": intrinsics.make_elements("float64"),
        "SUMS": intrinsics.make_elements(acc),
        "STORED": intrinsics.make_elements(fmt),
        "ZERO": zero("float64"),
        "WIDEN": conversions.make_widen(acc, "float64"),
        "ROUND": conversions.make_narrow(acc, "float64"),
        "NARROW": conversions.make_narrow(fmt, acc),
        "LOST": specialise.device(elementwise.lost_in),
        "LANES": tiling.TOTAL_LANES,
    }
    for name in ("open_totals", "add_to_totals", "close_totals"):
        words[name.upper()] = specialise.device(getattr(elementwise, name), **words)
    return specialise.kernel(elementwise.total_cell if whole else elementwise.join_cell, **words)


def _pairs_names(r: tiling.Registers, width: int, height: int) -> dict[str, Any]:
    """Return the names bound to pack pairs to panels of `height` lines that take `width`."""
    return {
        "ITEM": 2,
        "VL": r.vl,
        "HEIGHT": height,
        "WIDTH": width,
        "K_STEP": r.k_step,
        "HALVES": intrinsics.make_elements("uint16"),
        "HALF_ZERO": np.uint16(0),
        "PAIR_ROW": pairs.make_pair_row(height),
        "PAIR_LANES": pairs.make_pair_lanes(),
        "TRANSPOSE": moves.make_transpose("pair", "pair", r.vl, min(r.vl, height)),
    }


def _split_names(r: tiling.Registers) -> dict[str, Any]:
    """Return the names bound to pack the bfloat16 parts of float32."""
    return {
        "ITEM": 4,
        "MR": r.mr,
        "NR": r.nr,
        "PARTS": tiling.PARTS[r.kind],
        "SPLIT_TILE": partition.make_split_tile(tiling.PARTS[r.kind]),
        "SPLIT_PAIR": partition.make_split_pair(tiling.PARTS[r.kind]),
        "SCRATCH": intrinsics.make_scratch(32 * 16 * 4),
        "TRANSPOSE": moves.make_transpose("float32", "float32", r.vl, r.vl),
        "COPY_ONE": moves.make_copy_one("float32", "float32"),
    }


def _prefetch(r: tiling.Registers) -> Any:
    """Return how packing asks for rows ahead of time, if it does."""
    ahead = r.vector_bytes in tiling.PACKED_WITH_REQUESTS
    return intrinsics.make_prefetch() if ahead else intrinsics.make_nothing()


@functools.cache
def pack_a(fmt: str, acc: str, kind: str = "fma") -> specialise.Kernel:
    r = registers(acc, kind)
    if kind in tiling.PARTS:
        return specialise.kernel(parts.pack_parts_a, **_split_names(r))
    if kind == "dot":
        names = _pairs_names(r, r.panel_rows, r.held_rows)
        packed = specialise.device(packing.pack_pairs, **names)
        return specialise.kernel(packing.pack_pairs_a, PACK_PAIRS=packed)
    if kind == "amx":
        return specialise.kernel(
            packing.pack_tiles,
            ITEM=2,
            MR=r.mr,
            HALVES=intrinsics.make_elements("uint16"),
            HALF_ZERO=np.uint16(0),
            COPY_HALVES=pairs.make_copy_halves(),
            TURNED_HALVES=pairs.make_turned_halves(),
        )
    return specialise.kernel(
        packing.pack_a,
        ITEM=vectors.itemsize(fmt),
        SIZE=r.itemsize,
        VL=r.vl,
        HEIGHT=r.held_rows,
        PANEL_ROWS=r.panel_rows,
        LINE=tiling.LINE,
        AHEAD=tiling.PACKED_AHEAD,
        PREFETCH=_prefetch(r),
        HIGH_ROWS=(r.held_rows - 1) // r.vl * r.vl,
        COPY_ROWS=moves.make_copy_rows(fmt, acc, r.vl, r.held_rows),
        COPY_LANES=moves.make_copy_lanes(fmt, acc, r.vl),
        COPY_ONE=moves.make_copy_one(fmt, acc),
        TRANSPOSE=moves.make_transpose(fmt, acc, r.vl, min(r.vl, r.held_rows)),
    )


@functools.cache
def pack_b(fmt: str, acc: str, kind: str = "fma") -> specialise.Kernel:
    r = registers(acc, kind)
    if kind in tiling.PARTS:
        return specialise.kernel(parts.pack_parts_b, **_split_names(r))
    if kind != "fma":
        names = _pairs_names(r, r.panel_columns, r.panel_columns)
        return specialise.kernel(packing.pack_pairs, **names)
    return specialise.kernel(
        packing.pack_b,
        ITEM=vectors.itemsize(fmt),
        SIZE=r.itemsize,
        VL=r.vl,
        WIDTH=r.panel_columns,
        AHEAD=tiling.PACKED_AHEAD,
        PREFETCH=_prefetch(r),
        COPY_LANES=moves.make_copy_lanes(fmt, acc, r.vl),
        COPY_ONE=moves.make_copy_one(fmt, acc),
        COPY_PANEL_ROW=moves.make_copy_rows(fmt, acc, r.vl, r.panel_columns),
        TRANSPOSE_B=moves.make_transpose(fmt, acc, r.vl, r.vl),
    )


class Product(NamedTuple):
    """The kernels of products of factors in two formats."""

    registers: tiling.Registers
    cell: specialise.Kernel
    pack_a: specialise.Kernel
    pack_b: specialise.Kernel
    #: What `last_call` names.
    tier: str


@functools.cache
def product(left: str, right: str, precision: str = "ieee", turned: bool = False) -> Product:
    """Return the kernels that multiply factors of these formats, or make such a transpose."""
    acc, how = accumulator(left), kind(left, right, precision)
    packing = pack_a(left, acc, how), pack_b(right, acc, how)
    cell = gemm_cell(acc, how, left, turned)
    return Product(registers(acc, how), cell, *packing, host.product_name(how, left))


@functools.cache
def row_names(fmt: str, acc: str) -> dict[str, Any]:
    """Return the names that every row function of a storage format binds."""
    context = {"WORDS": intrinsics.make_elements("int64"), **protocol.SCRATCH}
    bits = {f"BITS{n}": intrinsics.make_elements(f"uint{n}") for n in (16, 32, 64)}
    move = specialise.device(elementwise.move, **bits)
    target_row = specialise.device(elementwise.target_row, **context)
    scratch_row = specialise.device(elementwise.scratch_row, **context)
    sums = {
        **context,
        "SIZE": vectors.itemsize(acc),
        "ZERO": zero(acc),
        "SUMS": intrinsics.make_elements(acc),
        "TARGET_ROW": target_row,
        "SCRATCH_ROW": scratch_row,
        "CHUNK": chunk(fmt),
        "RUN": tiling.RUN,
        "GROUP": group(fmt),
        "GROUP_SUM": vectors.make_group_sum(acc, host.vector_bytes(), group(fmt)),
    }
    return {
        **protocol.SLOTS,
        "SUMS": intrinsics.make_elements(acc),
        "WIDE_VECTORS": intrinsics.make_wide_vectors(8 * host.vector_bytes()),
        "SOURCE_ROW": specialise.device(elementwise.source_row, **context, MOVE=move),
        "TARGET_ROW": target_row,
        "PLACE_OF": specialise.device(elementwise.place_of, **context),
        "OPEN_SUMS": specialise.device(elementwise.open_sums, **sums),
        "SCRATCH_ROW": scratch_row,
        "CLOSE_GROUPS": specialise.device(elementwise.close_groups, **sums),
        "FINISH_ROW": specialise.device(elementwise.finish_row, **context, MOVE=move),
    }


def by_formula(make: Callable[..., specialise.Kernel]) -> Callable[..., specialise.Kernel]:
    """Keep what a function of formulas compiles, as long as they live.

    A redefined activation is another formula, and the kernels of the one before go.
    """

    @replay.kept(1024)
    @functools.wraps(make)
    def found(*args: Any, **options: Any) -> specialise.Kernel:
        kernel = make(*args, **options)
        kernel.formulas = tuple(map(weakref.ref, lifetimes.formulas_of(args)))
        return kernel

    return found


def stream_names(result: str, fmt: str) -> dict[str, Any]:
    """Return the names bound to store a result of a row function past the caches."""
    step = tiling.STREAM_STEP
    return {
        "STEP": step,
        f"ROOM_{result}": moves.make_room(fmt, step),
        f"STREAM_{result}": moves.make_stream(fmt, step, host.vector_bytes(), host.is_x86()),
    }
