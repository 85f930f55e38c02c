"""The kernels of the CPU backend, specialised on demand: templates meet what they are bound to."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from numfuse.backends.cpu import host, tiling
from numfuse.backends.cpu.kernels import elementwise, gemm, packing, pairs, protocol
from numfuse.backends.cpu.llvm import amx, microkernel
from numfuse.runtime import lifetimes, specialise

FORMATS = ("float64", "float32", "float16", "bfloat16")


def accumulator(fmt: str) -> str:
    """The accumulator's format of a storage format."""
    return "float64" if fmt == "float64" else "float32"


def _zero(acc: str) -> np.generic:
    """Zero in the accumulator's dtype: a bare ``0.0`` in Numba code is a float64."""
    return np.dtype(acc).type(0)


def kind(left: str, right: str) -> str:
    """How factors of these formats are multiplied: as stored, where both are the same half."""
    return host.product(left) if left == right else "fma"


@functools.cache
def registers(acc: str, kind: str = "fma") -> tiling.Registers:
    lanes = kind == "fma" and host.multiplies_by_lanes()
    return tiling.registers(host.vector_bytes(), microkernel.itemsize(acc), lanes, kind)


def chunk(fmt: str) -> int:
    """Rows of a chunk of the column sums of a storage format."""
    return registers(accumulator(fmt), kind(fmt, fmt)).chunk


def grad_pre_format(fmt: str) -> str:
    """Return the format that grad_pre is stored in.

    The format is the accumulator's, or the operands' own where products take halves as they are.
    """
    return accumulator(fmt) if kind(fmt, fmt) == "fma" else fmt


def _words() -> dict[str, Any]:
    """Return the names that every reader of a descriptor or a context binds."""
    return {
        **{
            name: getattr(protocol, name)
            for name in (
                "D_SLOTS",
                "D_AXES",
                "AXIS_WORDS",
                "SLOT_COUNT",
                "C_SCRATCH",
                "C_SCRATCH_STRIDE",
            )
        },
        **protocol.DESCRIPTOR,
        "WORDS": microkernel.make_elements("int64"),
    }


def _cell_names() -> dict[str, Any]:
    """Return the names that both kinds of cell bind."""
    words = _words()
    return {
        **words,
        "CELL": specialise.device(elementwise.cell_of, **words),
        "OPEN_CONTEXT": specialise.device(elementwise.open_context, **words),
        "CALL_ROW": microkernel.make_call(5),
    }


def gemm_cell(acc: str, kind: str = "fma", fmt: str = "") -> specialise.Kernel:
    """The cell of one kind of product; `fmt`, the factors' format, matters to tiles only."""
    return _gemm_cell(acc, kind, fmt if kind == "amx" else "")


@functools.cache
def _gemm_cell(acc: str, kind: str, fmt: str) -> specialise.Kernel:
    r = registers(acc, kind)
    tiles = kind == "amx"
    words = {
        **_words(),
        **protocol.AHEAD,
        **protocol.STREAMS,
        "STREAM_TABLE": protocol.STREAM_TABLE,
        "ROW_STREAMS": protocol.ROW_STREAMS,
        "STREAM_COUNT": protocol.STREAM_COUNT,
        "LINE": tiling.LINE,
        "NR": r.nr,
        "SIZE": r.itemsize,
        "CALL_PACK_A": microkernel.make_call(7),
        "CALL_PACK_B": microkernel.make_call(7),
        "PANEL_ROWS": r.panel_rows,
        "SLICE": max(gemm.SLICE, r.k_step),
        "K_STEP": r.k_step,
        "FACTOR": r.factor,
        "REQUESTS": r.requests,
    }
    # Each may call those before it.
    for name, template in (
        ("PLACE", gemm.place),
        ("SUM_OFFSETS", gemm.sum_offsets),
        ("ASK", gemm.ask),
        ("PLAN_AHEAD", gemm.plan_ahead),
        ("PACK_AHEAD", gemm.pack_ahead),
        ("ASK_A", gemm.ask_a),
        ("ASK_B", gemm.ask_b),
        ("ASK_ROW", gemm.ask_row),
        ("REST", gemm.rest),
        ("ASK_PANEL", gemm.ask_panel),
        ("PLAN_GROUP", gemm.plan_group),
        ("ASK_GROUP", gemm.ask_group),
        ("PACK_GROUP", gemm.pack_group),
        ("PACK_SLICE", gemm.pack_slice),
    ):
        words[name] = specialise.device(template, **words)
    return specialise.kernel(
        gemm.gemm_cell,
        **{**words, **_cell_names()},
        MICROKERNEL=amx.make_tile_kernel(fmt, r, protocol.STREAM_COUNT)
        if tiles
        else microkernel.make_microkernel(acc, r, protocol.STREAM_COUNT),
        OPEN_UNIT=amx.make_open_tiles() if tiles else microkernel.make_nothing(),
        CLOSE_UNIT=amx.make_close_tiles() if tiles else microkernel.make_nothing(),
        SUMS=microkernel.make_elements(acc),
        ZERO=_zero(acc),
        MR=r.mr,
        TILE=r.mr * r.nr * r.itemsize,
        VL=r.vl,
    )


@functools.cache
def elementwise_cell() -> specialise.Kernel:
    words = {**_cell_names(), **protocol.SLOTS, "LINE": tiling.LINE}
    words["BEFORE_LINE"] = specialise.device(elementwise.before_line, **words)
    return specialise.kernel(
        elementwise.elementwise_cell,
        **words,
        STREAM_ROW=specialise.device(elementwise.stream_row, **words),
        FENCE=microkernel.make_fence(),
    )


@functools.cache
def join_cell(fmt: str) -> specialise.Kernel:
    acc = accumulator(fmt)
    return specialise.kernel(
        elementwise.join_cell,
        **{**_cell_names(), **protocol.SLOTS},
        IS_FINITE=microkernel.make_is_finite(),
        SIZE=microkernel.itemsize(acc),
        TOTALS=microkernel.make_elements("float64"),
        SUMS=microkernel.make_elements(acc),
        STORED=microkernel.make_elements(fmt),
        ZERO=_zero("float64"),
        WIDEN=microkernel.make_widen(acc, "float64"),
        ROUND=microkernel.make_narrow(acc, "float64"),
        NARROW=microkernel.make_narrow(fmt, acc),
    )


def _pairs_names(r: tiling.Registers, width: int, height: int) -> dict[str, Any]:
    """Return the names bound to pack pairs to panels of `height` lines that take `width`."""
    return {
        "ITEM": 2,
        "VL": r.vl,
        "HEIGHT": height,
        "WIDTH": width,
        "K_STEP": r.k_step,
        "HALVES": microkernel.make_elements("uint16"),
        "HALF_ZERO": np.uint16(0),
        "PAIR_ROW": pairs.make_pair_row(height),
        "PAIR_LANES": pairs.make_pair_lanes(),
        "TRANSPOSE": microkernel.make_transpose("pair", "pair", r.vl, min(r.vl, height)),
    }


@functools.cache
def pack_a(fmt: str, acc: str, kind: str = "fma") -> specialise.Kernel:
    r = registers(acc, kind)
    if kind == "dot":
        names = _pairs_names(r, r.panel_rows, r.mr)
        packed = specialise.device(packing.pack_pairs, **names)
        return specialise.kernel(packing.pack_pairs_a, PACK_PAIRS=packed)
    if kind == "amx":
        return specialise.kernel(
            packing.pack_tiles,
            ITEM=2,
            MR=r.mr,
            HALVES=microkernel.make_elements("uint16"),
            HALF_ZERO=np.uint16(0),
            COPY_HALVES=pairs.make_copy_halves(),
            TURNED_HALVES=pairs.make_turned_halves(),
        )
    return specialise.kernel(
        packing.pack_a,
        ITEM=microkernel.itemsize(fmt),
        SIZE=r.itemsize,
        VL=r.vl,
        MR=r.mr,
        PANEL_ROWS=r.panel_rows,
        HIGH_ROWS=(r.mr - 1) // r.vl * r.vl,
        COPY_ROWS=microkernel.make_copy_rows(fmt, acc, r.vl, r.mr),
        COPY_LANES=microkernel.make_copy_lanes(fmt, acc, r.vl),
        COPY_ONE=microkernel.make_copy_one(fmt, acc),
        TRANSPOSE=microkernel.make_transpose(fmt, acc, r.vl, min(r.vl, r.mr)),
    )


@functools.cache
def pack_b(fmt: str, acc: str, kind: str = "fma") -> specialise.Kernel:
    r = registers(acc, kind)
    if kind != "fma":
        return specialise.kernel(packing.pack_pairs, **_pairs_names(r, r.nr, r.nr))
    return specialise.kernel(
        packing.pack_b,
        ITEM=microkernel.itemsize(fmt),
        SIZE=r.itemsize,
        VL=r.vl,
        NR=r.nr,
        COPY_LANES=microkernel.make_copy_lanes(fmt, acc, r.vl),
        COPY_ONE=microkernel.make_copy_one(fmt, acc),
        COPY_PANEL_ROW=microkernel.make_copy_vectors(fmt, acc, r.vl, r.vectors),
        TRANSPOSE_B=microkernel.make_transpose(fmt, acc, r.vl, r.vl),
    )


@functools.cache
def row_names(fmt: str, acc: str) -> dict[str, Any]:
    """Return the names that every row function of a storage format binds."""
    context = {
        "WORDS": microkernel.make_elements("int64"),
        "C_SCRATCH": protocol.C_SCRATCH,
        "C_SCRATCH_STRIDE": protocol.C_SCRATCH_STRIDE,
    }
    bits = {f"BITS{n}": microkernel.make_elements(f"uint{n}") for n in (16, 32, 64)}
    move = specialise.device(elementwise.move, **bits)
    target_row = specialise.device(elementwise.target_row, **context)
    sums = {
        "S_SUMS": protocol.SLOTS["S_SUMS"],
        "SIZE": microkernel.itemsize(acc),
        "ZERO": _zero(acc),
        "SUMS": microkernel.make_elements(acc),
        "TARGET_ROW": target_row,
        "CHUNK": chunk(fmt),
        "RUN": tiling.RUN,
    }
    return {
        **protocol.SLOTS,
        "SUMS": microkernel.make_elements(acc),
        "WIDE_VECTORS": microkernel.make_wide_vectors(8 * host.vector_bytes()),
        "SOURCE_ROW": specialise.device(elementwise.source_row, **context, MOVE=move),
        "TARGET_ROW": target_row,
        "OPEN_SUMS": specialise.device(elementwise.open_sums, **sums),
        "FINISH_ROW": specialise.device(elementwise.finish_row, **context, MOVE=move),
    }


def by_formula(make: Callable[..., specialise.Kernel]) -> Callable[..., specialise.Kernel]:
    """Keep what a function of formulas compiles, as long as they live.

    A redefined activation is another formula, and the kernels of the one before go.
    """

    @lifetimes.kept(1024)
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
        f"ROOM_{result}": microkernel.make_room(fmt, step),
        f"STREAM_{result}": microkernel.make_stream(fmt, step, host.vector_bytes(), host.is_x86()),
    }
