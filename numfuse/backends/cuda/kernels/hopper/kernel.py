"""The kernel of a product on Hopper: what is bound in the templates of `gemm` and `finish`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile.engines import multiply, multiply_wait
from numfuse.backends.cuda.compile.intrinsics import HALVES
from numfuse.backends.cuda.compile.scalars import is_finite, select
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, kernel
from numfuse.backends.cuda.compile.unroll import Inlined, Template
from numfuse.backends.cuda.kernels.ampere.registers import add, clear
from numfuse.backends.cuda.kernels.elementwise import Formula
from numfuse.backends.cuda.kernels.hopper import finish, gemm
from numfuse.backends.cuda.kernels.hopper.tiling import (
    HopperTile,
)
from numfuse.expr import Expr, dumps
from numfuse.language.curves import leaf
from numfuse.runtime import lifetimes

#: Slices of K (64 each) that the tensor cores add up before float32 addition takes over.
PROMOTE = 4
#: Bytes behind the stages: mbarriers.
EXTRA_BYTES = 256


#: The formula of a product whose result is the sum itself.
SUM = Formula(dumps((leaf("z"),)), "float32", ("z", "bias", "extra"))


@dataclass(frozen=True)
class Gemm:
    """A kernel of the product."""

    #: "bfloat16", "float16", "tf32" or "bf16x6".
    operands: str
    #: Whether an operand's contiguous axis is not K.
    x_turned: bool
    y_turned: bool
    tile: HopperTile
    #: "vectors", "rows" or "map" (16-bit values), "float32".
    out: str
    #: The residual or grad: "", "vectors", "rows", "map" or "float32".
    extra: str = ""
    #: "", "half" (16-bit values) or "float32".
    bias: str = ""
    sums: bool = False
    #: Which float32 arrays are read or written two neighbours at a time.
    out_pairs: bool = False
    extra_pairs: bool = False
    pre: str = ""
    formula: Formula = SUM

    def formulas(self) -> list[Expr]:
        """Return the formulas with which its kernel goes."""
        return self.formula.formulas()

    def __str__(self) -> str:
        layout = f"{'t' if self.x_turned else 'n'}{'t' if self.y_turned else 'n'}"
        return f"wgmma {self.operands} {layout} {self.tile} -> {self.out}"

    @property
    def planes(self) -> int:
        """Parts of an operand."""
        return planes_of(self.operands)

    @property
    def plane_bytes(self) -> int:
        """Bytes of a slice of K in both operands."""
        return (self.tile.block_m + self.tile.block_n) * 128

    @property
    def stage_bytes(self) -> int:
        return self.planes * self.plane_bytes

    @property
    def staged(self) -> bool:
        return self.out != "float32"

    @property
    def width(self) -> int:
        """Columns of the pieces in which the epilogue takes a block."""
        return min(64, self.tile.block_n)

    @property
    def chunks(self) -> int:
        return self.tile.halves * self.tile.block_n // self.width

    @property
    def buffers(self) -> int:
        """Pieces that wait in shared memory to be stored, or arrive there.

        Four in "ping-pong" would cost a stage of the ring: 0-2% slower at K = 4096.
        """
        return min(2, self.chunks)

    @property
    def alone(self) -> bool:
        """Whether a warp has the copy engine store its rows without waiting for the others."""
        return self.out == "map" and self.extra != "map"

    @property
    def bias_bytes(self) -> int:
        """Bytes of a block's bias as float32; of each block at work two are kept by turns."""
        return 4 * max(128, self.tile.block_n) if self.bias else 0

    @property
    def staging_bytes(self) -> int:
        needed = self.buffers * 128 * self.width if self.staged else 0
        if self.sums:
            needed = max(needed, 16 * self.tile.block_n)
        return -(-needed // 1024) * 1024 * self.tile.consumers

    @property
    def stages(self) -> int:
        room = SHARED_BYTES - EXTRA_BYTES - self.staging_bytes - self._biases
        return min(MOST_STAGES, room // self.stage_bytes)

    @property
    def _biases(self) -> int:
        return 2 * self.bias_bytes * (2 if self.tile.ping_pong else 1)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.staging_bytes + self._biases + EXTRA_BYTES

    def bindings(self) -> dict[str, Any]:
        """All UPPER-case names of the templates."""
        t = self.tile
        half = "bfloat16" if self.planes > 1 else self.operands
        kind = {"bfloat16": "bf16", "float16": "f16", "tf32": "tf32"}[half]
        values = t.halves * t.block_n // 2
        y_box = min(64, t.block_n)
        # bytes of K (or of 16 rows of K) from one instruction to the next
        steps = (2048 if self.x_turned else 32, 32 * y_box if self.y_turned else 32)
        wait = multiply_wait(values)
        (x_low, x_high), (y_low, y_high) = (
            divmod(_descriptor(turned, box), 1 << 32)[::-1]
            for turned, box in ((self.x_turned, 64), (self.y_turned, y_box))
        )
        step = multiply(
            t.block_n,
            t.halves,
            kind,
            (int(self.x_turned), int(self.y_turned)),
            steps,
            8192,
            (x_high, y_high),
        )
        b: dict[str, Any] = {
            "BLOCK_M": t.block_m,
            "BLOCK_N": t.block_n,
            "DEPTH": 32 if kind == "tf32" else 64,
            "GROUP": t.group,
            "HALVES": t.halves,
            "PING_PONG": t.ping_pong,
            "READERS": 1 if t.ping_pong else t.consumers,
            "CONSUMERS": t.consumers,
            "VALUES": values,
            "STAGES": self.stages,
            # 2^32 / STAGES: exact quotients up to 2^28
            "PER_STAGE": -(-(1 << 32) // self.stages),
            "STAGE_BYTES": self.stage_bytes,
            "X_BYTES": t.block_m * 128,
            "X_TURNED": self.x_turned,
            "Y_TURNED": self.y_turned,
            "Y_BOX": y_box,
            "X_DESCRIPTOR": x_low,
            "Y_DESCRIPTOR": y_low,
            "PLANES": self.planes,
            "PLANE_BYTES": self.plane_bytes,
            "PROMOTE": PROMOTE,
            "STAGING_AT": self.stages * self.stage_bytes,
            "BIAS_AT": self.stages * self.stage_bytes + self.staging_bytes,
            "FULL_AT": self.stages * self.stage_bytes + self.staging_bytes + self._biases,
            "BIAS_BYTES": self.bias_bytes,
            "BIASES": max(1, t.block_n // 128),
            "ALONE": self.alone,
            "BUFFERS": self.buffers,
            "BUFFER_BYTES": self.staging_bytes // t.consumers // self.buffers,
            "WIDTH": self.width,
            "CHUNKS": self.chunks,
            "ROW_CHUNKS": t.block_n // self.width,
            "PIECES": self.width // 8,
            "SHIFT": 3 if self.width == 64 else 2,
            "STAGED": self.staged,
            "OUT": self.out,
            "OUT_SIZE": 2 if self.staged else 4,
            "EXTRA": self.extra,
            "EXTRA_SIZE": 4 if self.extra == "float32" else 2,
            "BIAS": self.bias,
            "BIAS_SIZE": 4 if self.bias == "float32" else 2,
            "PRE": self.pre != "",
            "SUMS": self.sums,
            "EPILOGUE": self.formula,
            "ZERO": np.float32(0),
            "MULTIPLY": step,
            "MULTIPLY_WAIT": wait,
            "CLEAR": clear(values),
            "ADD": add(values),
        }
        if half in HALVES:
            b["PACK"], b["LOW"], b["HIGH"] = HALVES[half]
        b["FINITE"] = Inlined(gemm.finite, {"IS_FINITE": is_finite, "SELECT": select, **b})
        b["LOAD_BIAS"] = Inlined(finish.load_bias, b)
        b["LOAD_EXTRA"] = Inlined(finish.load_two, {"PAIRS": self.extra_pairs})
        b["STORE_PRE"] = Inlined(finish.store_two, {"PAIRS": self.pre == "pairs"})
        b["STORE_OUT"] = Inlined(finish.store_two, {"PAIRS": self.out_pairs})
        b["FETCH_ROWS"] = Inlined(finish.fetch_rows, b)
        b["FETCH_VECTORS"] = Inlined(finish.fetch_vectors, b)
        b["STORE_VECTORS"] = Inlined(finish.store_vectors, b)
        b["STORE_ROWS"] = Inlined(finish.store_rows, b)
        b["PIECE"] = Inlined(finish.piece, b)
        b["UNIT_AT"] = Inlined(gemm.unit_at, b)
        b["COUNT"] = Inlined(gemm.slices_of, b)
        b["PAST"] = Inlined(gemm.past, b)
        b["NEXT"] = Inlined(gemm.next_stage, b)
        b["PRODUCE"] = Inlined(gemm.produce, b)
        b["MULTIPLY_SLICES"] = Inlined(gemm.multiply_slices, b)
        b["MULTIPLY_SPLIT"] = Inlined(gemm.multiply_split, b)
        b["SUM_COLUMNS"] = Inlined(finish.sum_columns, b)
        b["FINISH"] = Inlined(finish.finish, b)
        b["CONSUME"] = Inlined(gemm.consume, b)
        return b

    @property
    def schema(self) -> Schema:
        """The arguments: strides are in elements."""
        there = {"out_map": self.out == "map", "extra_map": self.extra == "map"}
        maps = ["x_map", "y_map", *(name for name, is_map in there.items() if is_map)]
        return Schema(gemm.gemm, map=" ".join(maps))

    def kernel(self) -> Kernel:
        return kernel_of(self)


#: Shared memory of a block on Hopper, and more stages than ever helped.
SHARED_BYTES = 232448
MOST_STAGES = 12


def planes_of(kind: str) -> int:
    """Parts of an operand of the kind `Gemm.operands`."""
    return 3 if kind == "bf16x6" else 1


def _descriptor(turned: bool, box: int) -> int:
    """The constant part of a wgmma matrix descriptor (PTX ISA 9.7.15.5.1.2.2).

    Bits 62-63: 1 for rows of 128 bytes that are swizzled, 2 of 64.  Bits 32-45: from 8 rows to the
    next 8; bits 16-29: from one box along the contiguous axis to the next, which only operands
    that are turned have more than one of.  Both in 16 bytes.
    """
    row = 2 * box
    swizzle = 1 if row == 128 else 2
    if not turned:
        row, swizzle = 128, 1
    return swizzle << 62 | (8 * row >> 4) << 32 | ((64 * row >> 4) if turned else 1) << 16


@lifetimes.kept(1024)
def kernel_of(g: Gemm) -> Kernel:
    template = Template(gemm.gemm, g.bindings())
    return kernel(
        template,
        g.schema.signature,
        threads=128 * (1 + g.tile.consumers),
        blocks=1,
        feature="a",
        name=str(g),
        **template.others,
    )
