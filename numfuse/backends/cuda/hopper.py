"""Hopper: products of float16 and bfloat16 by the copy engine (TMA) and wgmma.

And of float32 where the caller allowed it: as six products of bfloat16 parts ("bf16x6"), or
rounded to tf32.  `Gemm` describes a kernel and binds the templates of `hopper_gemm`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda import hopper_gemm
from numfuse.backends.cuda.elementwise import Scalar
from numfuse.backends.cuda.hopper_intrinsics import HALVES, multiply, multiply_wait
from numfuse.backends.cuda.scalars import is_finite, select
from numfuse.backends.cuda.toolchain import Kernel, kernel
from numfuse.backends.cuda.unroll import Inlined, expanded, names_of
from numfuse.tiling import HopperTile

#: Planes of X and of Y in each of the passes of a split product, the smallest products first: of
#: x = x0 + x1 + x2 and y alike those that are below 2^-24 of x y are left out (x1 y2, x2 y1, x2 y2).
X_PARTS, Y_PARTS = (0, 2, 1, 0, 1, 0), (2, 0, 1, 1, 0, 0)
#: Slices of K (64 each) that the tensor cores add up before float32 addition takes over.
PROMOTE = 4
#: Bytes behind the stages: mbarriers, and the way to an address that 1024 divides.
EXTRA_BYTES = 256 + 1024


@dataclass(frozen=True)
class Gemm:
    """A kernel of the product."""

    #: "bfloat16", "float16", "tf32" or "bf16x6".
    operands: str
    #: Whether an operand's contiguous axis is not K.
    x_turned: bool
    y_turned: bool
    tile: HopperTile
    #: "map" or "rows" (16-bit values), "float32".
    out: str
    #: The residual or grad: "", "map", "rows" or "float32".
    extra: str = ""
    #: "", "pairs" or "single" (16-bit values), "float32".
    bias: str = ""
    slope: bool = False
    sums: bool = False
    #: Which float32 arrays are read or written two neighbours at a time.
    out_pairs: bool = False
    extra_pairs: bool = False
    pre: str = ""
    function: Scalar | None = None

    def __str__(self) -> str:
        layout = f"{'t' if self.x_turned else 'n'}{'t' if self.y_turned else 'n'}"
        return f"wgmma {self.operands} {layout} {self.tile} -> {self.out}"

    @property
    def stage_bytes(self) -> int:
        return (self.tile.block_m + self.tile.block_n) * 128

    @property
    def staged(self) -> bool:
        return self.out in ("map", "rows")

    @property
    def width(self) -> int:
        """Columns of the pieces in which the epilogue takes a block."""
        return min(64, self.tile.block_n)

    @property
    def chunks(self) -> int:
        return self.tile.halves * self.tile.block_n // self.width

    @property
    def buffers(self) -> int:
        return min(2, self.chunks)

    @property
    def staging_bytes(self) -> int:
        needed = self.buffers * 128 * self.width if self.staged else 0
        if self.sums:
            needed = max(needed, 16 * self.tile.block_n)
        return -(-needed // 1024) * 1024 * self.tile.consumers

    @property
    def stages(self) -> int:
        room = SHARED_BYTES - EXTRA_BYTES - self.staging_bytes
        return min(MOST_STAGES, room // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.staging_bytes + EXTRA_BYTES

    def bindings(self) -> dict[str, Any]:
        """All UPPER-case names of the templates."""
        t = self.tile
        split = self.operands == "bf16x6"
        half = "bfloat16" if split else self.operands
        kind = {"bfloat16": "bf16", "float16": "f16", "tf32": "tf32"}[half]
        values = t.halves * t.block_n // 2
        y_box = min(64, t.block_n)
        # bytes of K (or of 16 rows of K) from one instruction to the next
        steps = (2048 if self.x_turned else 32, 32 * y_box if self.y_turned else 32)
        wait = multiply_wait(values)
        step = multiply(
            t.block_n, t.halves, kind, (int(self.x_turned), int(self.y_turned)), steps, 8192
        )
        b: dict[str, Any] = {
            "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "DEPTH": 32 if kind == "tf32" else 64,
            "GROUP": t.group, "HALVES": t.halves, "PING_PONG": t.ping_pong,
            "READERS": 1 if t.ping_pong else t.consumers, "CONSUMERS": t.consumers,
            "VALUES": values, "STAGES": self.stages, "STAGE_BYTES": self.stage_bytes,
            "X_BYTES": t.block_m * 128, "X_TURNED": self.x_turned, "Y_TURNED": self.y_turned,
            "Y_BOX": y_box,
            "X_DESCRIPTOR": _descriptor(self.x_turned, 64),
            "Y_DESCRIPTOR": _descriptor(self.y_turned, y_box),
            "PASSES": 6 if split else 1, "PROMOTE": PROMOTE if split else 0,
            "X_PLANES": sum(p << 2 * i for i, p in enumerate(X_PARTS)) if split else 0,
            "Y_PLANES": sum(p << 2 * i for i, p in enumerate(Y_PARTS)) if split else 0,
            "STAGING_AT": self.stages * self.stage_bytes,
            "FULL_AT": self.stages * self.stage_bytes + self.staging_bytes,
            "BUFFERS": self.buffers, "BUFFER_BYTES": self.staging_bytes // t.consumers // self.buffers,
            "WIDTH": self.width, "CHUNKS": self.chunks, "ROW_CHUNKS": t.block_n // self.width,
            "STAGED": self.staged, "OUT": self.out, "OUT_SIZE": 2 if self.staged else 4,
            "EXTRA": self.extra, "EXTRA_SIZE": 4 if self.extra == "float32" else 2,
            "BIAS": self.bias, "BIAS_SIZE": 4 if self.bias == "float32" else 2,
            "PRE": self.pre != "", "SLOPE": self.slope, "SUMS": self.sums,
            "HAS_FUNCTION": self.function is not None, "FUNCTION": self.function,
            "ZERO": np.float32(0), "MULTIPLY": step, "MULTIPLY_WAIT": wait,
        }  # fmt: skip
        if half in HALVES:
            b["PACK"], b["LOW"], b["HIGH"] = HALVES[half]
        part = hopper_gemm
        b["FINITE"] = Inlined(part.finite, {"IS_FINITE": is_finite, "SELECT": select, **b})
        b["LOAD_BIAS"] = Inlined(part.load_bias, b)
        b["LOAD_EXTRA"] = Inlined(part.load_two, {"PAIRS": self.extra_pairs})
        b["STORE_PRE"] = Inlined(part.store_two, {"PAIRS": self.pre == "pairs"})
        b["STORE_OUT"] = Inlined(part.store_two, {"PAIRS": self.out_pairs})
        b["FETCH_ROWS"] = Inlined(part.fetch_rows, b)
        b["STORE_ROWS"] = Inlined(part.store_rows, b)
        b["UNIT_AT"] = Inlined(part.unit_at, b)
        b["PAST"] = Inlined(part.past, b)
        b["PRODUCE"] = Inlined(part.produce, b)
        b["MULTIPLY_SLICES"] = Inlined(part.multiply_slices, b)
        b["MULTIPLY_ALL"] = Inlined(part.multiply_slices, {**b, "PROMOTE": 0})
        b["SUM_COLUMNS"] = Inlined(part.sum_columns, b)
        b["FINISH"] = Inlined(part.finish, b)
        b["CONSUME"] = Inlined(part.consume, b)
        return b

    def kernel(self) -> Kernel:
        return _kernel(self)


#: Shared memory of a block on Hopper, and more stages than ever helped.
SHARED_BYTES = 232448
MOST_STAGES = 12


def _descriptor(turned: bool, box: int) -> int:
    """The constant part of a wgmma matrix descriptor (PTX ISA 9.7.15.5.1.2.2), as an int64.

    Bits 62-63: 1 for rows of 128 bytes that are swizzled, 2 of 64.  Bits 32-45: from 8 rows to the
    next 8; bits 16-29: from one box along the contiguous axis to the next, which only operands
    that are turned have more than one of.  Both in 16 bytes.
    """
    row = 2 * box
    swizzle = 1 if row == 128 else 2
    if not turned:
        row, swizzle = 128, 1
    word = swizzle << 62 | (8 * row >> 4) << 32 | ((64 * row >> 4) if turned else 1) << 16
    return word - (1 << 64) if word >> 63 else word


@functools.lru_cache(maxsize=1024)
def _kernel(g: Gemm) -> Kernel:
    b = g.bindings()
    template = expanded(hopper_gemm.gemm, b)
    maps = ["map", "map", "map" if g.out == "map" else "i64", "map" if g.extra == "map" else "i64"]
    signature = " ".join(maps + ["i64"] * 27)
    return kernel(
        template, signature, threads=128 * (1 + g.tile.consumers), blocks=1, feature="a",
        name=str(g), **names_of(template, b),
    )  # fmt: skip
