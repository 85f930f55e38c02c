"""The kernel of a product on Hopper: what is bound in the templates of `gemm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile.engines import multiply, multiply_registers, multiply_wait
from numfuse.backends.cuda.compile.intrinsics import HALVES
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, types
from numfuse.backends.cuda.compile.unroll import bound, inlined, kernel_of
from numfuse.backends.cuda.kernels.ampere.registers import add, clear
from numfuse.backends.cuda.kernels.elementwise import Formula
from numfuse.backends.cuda.kernels.hopper import epilogue, gemm, parts
from numfuse.backends.cuda.kernels.hopper.tiling import HopperTile, box_width
from numfuse.backends.cuda.kernels.residues.store import store_bindings
from numfuse.expr import Expr, dumps
from numfuse.language.curves import leaf
from numfuse.runtime.replay import kept

#: Names of operands in wgmma, and values of K in 128 bytes of one where these are not 64.
KINDS = {"bfloat16": "bf16", "float16": "f16", "tf32": "tf32", "int8": "s8"}
DEPTHS = {"tf32": 32, "int8": 128}
#: Parts of bfloat16 of a float32, and the products of these that are summed: all of the same or a
#: larger size than those that are left out.
PARTS, PRODUCTS = {"bf16x6": 3, "bf16x3": 2}, {"bf16x6": 6, "bf16x3": 3}
#: Bytes behind the stages: mbarriers.
EXTRA_BYTES = 256


#: What every formula takes: two sums and two biases, and behind them the residual or grad.
ARGUMENTS = "z", "z1", "bias", "bias1"
#: The formula of a product whose result is the sum itself.
SUM = Formula(dumps((leaf("z"),)), "float32", (*ARGUMENTS, "extra"))


@dataclass(frozen=True)
class Gemm:
    """A kernel of the product."""

    #: "bfloat16", "float16", "tf32", "bf16x6", "bf16x3" or "int8".
    operands: str
    #: Whether an operand's contiguous axis is not K.
    x_turned: bool
    y_turned: bool
    tile: HopperTile
    #: "rows" or "map" (16-bit values), "float32", or "residues" (8-bit ones).
    out: str
    #: The residual or grad: "", "rows", "map", "float32" or, if it repeats in a row, "line".
    extra: str = ""
    #: "", "half" (16-bit values) or "float32".
    bias: str = ""
    sums: bool = False
    #: Which float32 arrays are read or written two neighbours at a time.
    out_pairs: bool = False
    extra_pairs: bool = False
    #: The pre-activation: "", "single" values, "pairs" or "map" (16-bit values).
    pre: str = ""
    #: Whether the pre-activation is stored in 16 bits.
    pre_half: bool = False
    #: Whether the sum has a second term, and whether there are two sums.
    two_terms: bool = False
    two_sums: bool = False
    #: Whether there is another bias, and how a third result is stored.
    bias1: bool = False
    pre1: str = ""
    #: Whether the two sums are of the even and of the odd columns of one array Y, and whether the
    #: first two results are those of another one.
    woven: bool = False
    woven_out: bool = False
    formula: Formula = SUM
    #: Of "residues": a place's number modulo their count chooses one.
    moduli: tuple[int, ...] = ()

    def formulas(self) -> list[Expr]:
        """Return the formulas with which its kernel goes."""
        return self.formula.formulas()

    def __str__(self) -> str:
        layout = f"{'t' if self.x_turned else 'n'}{'t' if self.y_turned else 'n'}"
        woven = " woven" * self.woven
        return f"wgmma {self.operands} {layout} {self.tile}{woven} -> {self.out}"

    @property
    def columns(self) -> int:
        """Columns of the result in a block."""
        return self.tile.block_n // (1 + self.two_sums)

    @property
    def y_columns(self) -> int:
        """Columns of a slice of a factor Y."""
        return self.tile.block_n if self.woven else self.columns

    @property
    def two_rights(self) -> bool:
        """Whether the two sums have a factor Y each."""
        return self.two_sums and not self.woven

    @property
    def y_box(self) -> int:
        """Columns of a box of a Y that is turned."""
        return box_width(self.y_columns)

    @property
    def planes(self) -> int:
        """Parts of an operand; of several, only Y's are in shared memory."""
        return planes_of(self.operands)

    @property
    def values(self) -> int:
        """Sums of a thread."""
        return self.tile.halves * self.tile.block_n // 2

    @property
    def x_bytes(self) -> int:
        """Bytes of a slice of X: lines of 128, or 64 float32 of each row."""
        return self.tile.block_m * (256 if self.planes > 1 else 128)

    @property
    def plane_bytes(self) -> int:
        """Bytes of a slice of Y, or of a part of it."""
        return self.tile.block_n * 128

    @property
    def stage_bytes(self) -> int:
        return self.x_bytes + self.planes * self.plane_bytes

    @property
    def staged(self) -> bool:
        return self.out not in ("float32", "residues")

    @property
    def width(self) -> int:
        """Columns of the pieces in which the epilogue takes a block."""
        if self.tile.sideways:
            return 64
        return 32 if self.pre1 == "map" else box_width(self.columns)

    @property
    def chunks(self) -> int:
        if self.tile.sideways:
            return self.columns // self.tile.piece_rows
        return self.tile.halves * self.columns // self.width

    @property
    def buffers(self) -> int:
        """Pieces that wait in shared memory to be stored, or arrive there.

        Four in "ping-pong" would cost a stage of the ring: 0-2% slower at K = 4096.
        """
        if self.tile.sideways or (self.alone and self.pre == "map"):
            return 1
        return min(2, self.chunks)

    @property
    def _staged_pieces(self) -> int:
        """The buffers, and those of the pre-activations."""
        return self.buffers + [self.pre, self.pre1].count("map")

    @property
    def alone(self) -> bool:
        """Whether a warp has the copy engine store its rows without waiting for the others."""
        return self.out == "map" and self.extra != "map" and not self.tile.sideways

    @property
    def two_biases(self) -> bool:
        """Whether the formula has two."""
        return self.two_sums or self.bias1

    @property
    def _lines(self) -> int:
        """Values of a block's biases."""
        return self.columns * (1 + self.two_biases)

    @property
    def _bias_rounds(self) -> int:
        """How often a group's 128 threads store a bias each until all are there."""
        return -(-self._lines // 128)

    @property
    def bias_bytes(self) -> int:
        """Bytes of a block's biases as float32; of a block on its side registers have them."""
        return 512 * self._bias_rounds if self.bias and not self.tile.sideways else 0

    @property
    def bias_places(self) -> int:
        """Places of a block's biases: two by turns, or one where the second costs a stage.

        Before one is written again, the groups wait for each other.
        """
        return 2 if self._stages(2) == self._stages(1) else 1

    @property
    def staging_bytes(self) -> int:
        needed = self._staged_pieces * 2 * self.width * self.tile.piece_rows if self.staged else 0
        if self.sums and not self.tile.sideways:
            needed = max(needed, 16 * self.tile.block_n)
        return -(-needed // 1024) * 1024 * self.tile.consumers

    def _biases(self, places: int) -> int:
        return places * self.bias_bytes * (2 if self.tile.ping_pong else 1)

    def _stages(self, bias_places: int) -> int:
        others = self.staging_bytes + self._biases(bias_places)
        return min(MOST_STAGES, (SHARED_BYTES - EXTRA_BYTES - others) // self.stage_bytes)

    @property
    def stages(self) -> int:
        return self._stages(self.bias_places)

    # where in shared memory staging, biases and mbarriers begin, behind the stages
    @property
    def staging_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def bias_at(self) -> int:
        return self.staging_at + self.staging_bytes

    @property
    def full_at(self) -> int:
        return self.bias_at + self._biases(self.bias_places)

    @property
    def shared_bytes(self) -> int:
        return self.full_at + EXTRA_BYTES

    def bindings(self) -> dict[str, Any]:
        """All UPPER-case names of the templates."""
        t = self.tile
        b = bound(t, "block_m block_n group ping_pong consumers halves sideways piece_rows")
        b |= bound(
            self,
            "values stages stage_bytes planes plane_bytes x_turned y_turned staging_at"
            " bias_at full_at bias_bytes bias_places alone buffers width chunks staged out extra"
            " bias sums columns two_terms two_sums two_rights two_biases bias1 pre pre1 woven"
            " woven_out y_columns y_box x_bytes",
        )
        b |= {
            "DEPTH": DEPTHS.get(self.operands, 64),
            "READERS": 1 if t.ping_pong else t.consumers,
            # 2^32 / STAGES: exact quotients up to 2^28
            "PER_STAGE": -(-(1 << 32) // self.stages),
            # sums of a thread for 8 columns of the result; from one of an element to the other
            "EACH": 8 if self.woven else 4,
            "PARTNER": 1 if self.woven else t.block_n // 4,
            "BIASES": 2 if t.sideways else self._bias_rounds,
            "OWN_STAGING": self.staging_bytes // t.consumers,
            "BUFFER_BYTES": self.staging_bytes // t.consumers // self._staged_pieces,
            "ROW_CHUNKS": max(1, self.columns // self.width),
            # a bit of each buffer that an odd number of pieces of a block arrives in
            "TURNS": sum(
                1 << i for i in range(self.buffers) if len(range(i, self.chunks, self.buffers)) % 2
            ),
            "OUT_SIZE": 2 if self.staged else 4,
            "EXTRA_SIZE": 2 if self.operands in HALVES else 4,
            "BIAS_SIZE": 4 if self.bias == "float32" else 2,
            "EPILOGUE": self.formula,
            "ZERO": np.float32(0),
            "SKIPS": self.alone and not self.sums,
            "SUM": types.int32 if self.moduli else types.float32,
            "CLEAR": clear(self.values),
            "ADD": add(self.values),
            "LOAD_EXTRA": inlined(epilogue.load_two, PAIRS=self.extra_pairs),
            "PRE_SIZE": 2 if self.pre_half else 4,
            "STORE_PRE": self._stores(epilogue.store_two, self.pre == "pairs"),
            "STORE_OUT": self._stores(epilogue.store_two, self.out_pairs),
        }
        b |= store_bindings(self.moduli, 64, t.block_n)
        half = "bfloat16" if self.planes > 1 else self.operands
        if self.planes > 1:
            b |= parts.bindings()
        if half in HALVES:
            b["PACK"], b["LOW"], b["HIGH"] = HALVES[half]
        if self.pre_half:
            pairs, pack = self.pre == "pairs", b["PACK"]
            b["STORE_PRE"] = self._stores(epilogue.store_halves, pairs, PACK=pack)
        return b | self._wgmma(KINDS[half])

    def _stores(self, store: Any, pairs: bool, **more: Any) -> Any:
        """Return what stores a thread's two values of 8 columns of a row, `pairs` as neighbours."""
        apart = 4 if self.woven else 1
        return inlined(store, PAIRS=pairs and not self.woven, APART=apart, **more)

    def _wgmma(self, kind: str) -> dict[str, Any]:
        """Return the names of the instruction and of its operands' descriptors."""
        t = self.tile
        box = self.y_box
        x_high, x_low = divmod(_descriptor(self.x_turned, 64), 1 << 32)
        y_high, y_low = divmod(_descriptor(self.y_turned, box), 1 << 32)
        # bytes of K (or of 16 rows of K) from one instruction to the next
        steps = (2048 if self.x_turned else 32, 32 * box if self.y_turned else 32)
        turned, high = (int(self.x_turned), int(self.y_turned)), (x_high, y_high)
        found = {
            "X_DESCRIPTOR": x_low,
            "Y_DESCRIPTOR": y_low,
            "Y_STEP": steps[1] >> 4,
            "MULTIPLY_WAIT": multiply_wait(self.values, kind),
        }
        if self.planes == 1:
            made = multiply(t.block_n, t.halves, kind, turned, steps, 8192, high)
            return found | {"MULTIPLY": made}
        # words of X's parts, and which of Y's they are multiplied by: the smallest products first
        pairs = [(i, j) for i in range(self.planes) for j in range(self.planes - i)]
        low = [(4 * i, j * self.plane_bytes) for i, j in sorted(pairs[1:], key=sum, reverse=True)]
        every = [(4 * s, s * steps[1]) for s in range(4)]
        for name, products in (
            ("MULTIPLY_LOW", low), ("MULTIPLY_HIGH", every), ("MULTIPLY_TOP", every[:1]),
        ):  # fmt: skip
            found[name] = multiply_registers(t.block_n, products, self.y_turned, y_high)
        return found

    @property
    def schema(self) -> Schema:
        """The arguments: strides are in elements."""
        there = {f"maps_{x}": getattr(self, x) == "map" for x in ("out", "extra", "pre")}
        there["maps_pre"] &= not self.woven_out
        there |= {"second_x_map": self.two_terms, "second_pre_map": self.pre1 == "map"}
        there["second_y_map"] = self.two_terms or self.two_rights
        maps = ["x_map", "y_map", *(name for name, is_map in there.items() if is_map)]
        return Schema(gemm.gemm, map=" ".join(maps))

    def kernel(self) -> Kernel:
        return _kernel(self)


#: Shared memory of a block on Hopper, and more stages than ever helped.
SHARED_BYTES = 232448
MOST_STAGES = 12


def planes_of(kind: str) -> int:
    """Parts of an operand of the kind `Gemm.operands`."""
    return PARTS.get(kind, 1)


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


@kept(1024)
def _kernel(g: Gemm) -> Kernel:
    return kernel_of(
        gemm.gemm,
        g.schema,
        g.bindings(),
        threads=128 * (1 + g.tile.consumers),
        blocks=1,
        feature="a",
        name=str(g),
    )
