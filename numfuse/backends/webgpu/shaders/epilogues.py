"""The shaders that end in an epilogue: a product's, and that of arrays alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.plain import COPY_AXES
from numfuse.backends.webgpu.shaders.shader import TYPES, Access, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.backends.webgpu.tiling import WebGpuTile
from numfuse.expr import Expr


@dataclass(frozen=True)
class Array:
    """An input of a formula that a shader reads, or a result that it stores."""

    name: str
    access: Access
    stored: bool = False
    #: Whether one row is read for all rows; of an elementwise pass, whether it is one element.
    by_column: bool = False
    #: The array in whose binding it lies; "": its own.
    within: str = ""

    @property
    def array(self) -> str:
        """The name of its offset and strides."""
        return f"{'to' if self.stored else 'from'}_{self.name}"

    @property
    def buffer(self) -> str:
        """The name of its binding."""
        return self.within or self.array

    @property
    def storage(self) -> Storage:
        return Storage(self.array, self.access.element, "read_write" if self.stored else "read")


#: The names of the factors of a group of products over one X, and of the sums of each.
FACTORS = "x", "y", "u", "v"
_SUMS = "c", "d", "e"


class _Sum(NamedTuple):
    """A product of a group as the template sees it: its right factor, its name in the formula, its
    sums in registers, and those of the chains that have ended."""

    Y: str
    Z: str
    C: str
    KEPT: str


class _Factor:
    """A factor of a product as the template sees it."""

    def __init__(self, name: str, access: Access, block: int, tile: WebGpuTile) -> None:
        row = name == FACTORS[0]
        self.NAME, self.WIDE, self.TURNED, self.BLOCK = name, access.wide, access.turned, block
        self.ORIGIN, length = ("row0", "m") if row else ("column0", "n")
        self.STRIDE_O = f"{name}_{'row' if row else 'column'}"
        self.STRIDE_K = f"{name}_{'column' if row else 'row'}"
        # (index, end, stride): along the four neighbours, and from a line of them to the next
        output, depth = ("o", f"p.{length}", self.STRIDE_O), ("k", "k_end", self.STRIDE_K)
        along, line = (depth, output) if access.turned else (output, depth)
        self.ALONG, self.ALONG_END, self.ALONG_STRIDE = along
        self.LINE, self.LINE_END, self.LINE_STRIDE = line
        self.LINES = 4 if access.turned else 1
        self.PITCH = block // 4 + access.turned
        # pieces to fetch: squares of 4 x 4 where turned, else runs of four outputs
        pieces = block // 4 * (tile.block_k // self.LINES)
        self.LOADS = -(-pieces // tile.invocations)
        self.IF_IN_TILE, self.END_IN_TILE = [], []
        for i in range(self.LOADS):
            partial = (i + 1) * tile.invocations > pieces
            inside = f"{name}_k{i} < {tile.block_k}u && {name}_o{i} < {block // 4}u"
            self.IF_IN_TILE.append(f"if ({inside}) {{" if partial else "")
            self.END_IN_TILE.append("}" if partial else "")


@dataclass(frozen=True)
class _Epilogue(Shader):
    """The base of shaders that end in an epilogue."""

    accumulator: str
    formula: Formula
    arrays: tuple[Array, ...]
    #: Whether the device's fma rounds once.
    one_rounding: bool = field(default=False, kw_only=True)

    def formulas(self) -> list[Expr]:
        return self.formula.formulas()

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(array.array for array in self.arrays)

    @property
    def _storages(self) -> list[Storage]:
        return [array.storage for array in self.arrays if not array.within]

    def _bindings(self, lanes: int) -> dict[str, Any]:
        """Return what the templates know of the epilogue, which is called once for each lane."""
        acc = TYPES[self.accumulator]
        names = [f"{name}_here" for name in self.formula.inputs]
        names += self.formula.totals
        lane = "" if lanes == 1 else "[{}]"
        arguments = [", ".join(name + lane.format(d) for name in names) for d in range(lanes)]
        read = acc if lanes == 1 else f"vec4<{acc}>"
        made = {}
        for a in self.arrays:
            lane_by_lane = ", ".join(f"made_{d}.{a.name}" for d in range(lanes))
            made[a.name] = lane_by_lane if lanes == 1 else f"{read}({lane_by_lane})"
        return {
            "EPILOGUE": self.formula.text(self.accumulator, self.one_rounding),
            "ARGUMENTS": list(enumerate(arguments)),
            "ACC": acc,
            "READ": read,
            "MADE": made,
            "INPUTS": [a for a in self.arrays if not a.stored],
            "OUTPUTS": [a for a in self.arrays if a.stored],
        }


@dataclass(frozen=True)
class Gemm(_Epilogue):
    """An epilogue of a product, or of operands in its place."""

    tile: WebGpuTile
    #: X, and a Y for each accumulator; None where the formula has none.
    factors: tuple[Access, ...] | None
    places: bool = False
    segments: bool = False
    #: Whether the result is a stack of planes to be joined.
    planes: bool = False
    #: The accumulators, in the order of their factors.
    accumulators: tuple[str, ...] = ("z",)

    @cached_property
    def label(self) -> str:  # type: ignore[override]
        x, *right = self.factors or ("-", "-")
        t, factors = self.tile, f"{x}.{'+'.join(map(str, right))}"
        return f"gemm {self.formula.name} {factors} {t.block_m}x{t.block_n}x{t.block_k}"

    @cached_property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        factors = zip(FACTORS, self.factors or (), strict=False)
        found = [Storage(name, a.element, "read") for name, a in factors] + self._storages
        for name, there in ("column_sums", self.formula.summed), ("row_sums", self.formula.across):
            if there:
                found.append(Storage(name, TYPES[self.accumulator], "read_write"))
        if self.places:
            found.append(Storage("places", "Place", "read"))
        return tuple(found)

    @cached_property
    def place(self) -> Uniform:
        """Where the arrays of a place begin."""
        return Uniform((*self._factors, *self._names))

    @property
    def _factors(self) -> tuple[str, ...]:
        return FACTORS[: len(self.factors or ())]

    @cached_property
    def uniform(self) -> Uniform:  # type: ignore[override]
        fields = ["m", "n", "k"]
        for name in (*self._factors, *self._names):
            fields += [f"{name}_row", f"{name}_column"]
        # Planes: number z is part z % parts of K, of the segments of place z / parts. A place adds
        # up `summed` segments in all, in `groups` of `segments` each.
        fields += ["first_plane", "part", "parts", "segments", "summed", "groups"]
        several = max(len(self.formula.summed), len(self.formula.across)) > 1
        fields += ["planes"] if several else []
        return Uniform((*fields, *self.place.names))

    def text(self) -> str:
        t = self.tile
        columns, rows = t.block_n // t.nr, t.block_m // t.mr
        if columns % 8 == 0 and rows % 4 == 0:
            # 32 invocations, which many devices run together, as 8 x 4: fewer distinct addresses
            tx = f"(t >> 5u) % {columns // 8}u * 8u + (t & 7u)"
            ty = f"(t >> 5u) / {columns // 8}u * 4u + ((t >> 3u) & 3u)"
        else:
            tx, ty = f"t % {columns}u", f"t / {columns}u"
        factors = [
            _Factor(name, access, t.block_n if i else t.block_m, t)
            for i, (name, access) in enumerate(zip(self._factors, self.factors or (), strict=True))
        ]
        right = [
            _Sum(y, z, c, "kept" if c == _SUMS[0] else f"kept_{c}")
            for y, z, c in zip(self._factors[1:], self.accumulators, _SUMS, strict=False)
        ]
        runs = t.nr // 4
        taken = [
            " ".join(f"{s.Z}_here = {s.C}{e % t.mr}_{e // t.mr};" for s in right)
            for e in range(t.mr * runs)
        ]
        return expand(
            "gemm.wgsl",
            {
                **self._bindings(4),
                "HEADER": self.header(self.place.struct("Place")),
                "PRODUCT": bool(factors),
                "LOADS": [(factor, i) for factor in factors for i in range(factor.LOADS)],
                "FACTORS": factors,
                "RIGHT": right,
                "SUMS": [(s, i, j) for s in right for i in range(t.mr) for j in range(runs)],
                "TAKEN": taken,
                **{name.upper(): value for name, value in vars(t).items()},
                "SLICES": t.chain // t.block_k,
                "INVOCATIONS": t.invocations,
                "TX": tx,
                "TY": ty,
                "COLUMN_SUMS": list(enumerate(self.formula.totals)),
                "ROW_SUMS": list(enumerate(self.formula.summands)),
                "PLACES": self.places,
                "SEGMENTS": self.segments,
                "PLACE": ", ".join(f"p.{name}" for name in self.place.names),
                "ROW": "(plane * p.m + row)" if self.planes else "row",
            },
        )


@dataclass(frozen=True)
class Elementwise(_Epilogue):
    """An epilogue without a product, element by element; all arrays go by fours, or none.

    Where it is `strided`, each has strides of its own.
    """

    strided: bool = False

    @cached_property
    def label(self) -> str:  # type: ignore[override]
        return f"elementwise {self.formula.name} {self.arrays[-1].access}"

    @cached_property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        return tuple(self._storages)

    @cached_property
    def uniform(self) -> Uniform:  # type: ignore[override]
        fields = ["first", "last", *self._names]
        for name in ("shape", *self._names) if self.strided else ():
            fields += [f"{name}_{axis}" for axis in range(COPY_AXES)]
        return Uniform(tuple(fields))

    def text(self) -> str:
        lanes = 4 if self.arrays[-1].access.wide else 1
        words = {"HEADER": self.header(), "STRIDED": self.strided}
        return expand("elementwise.wgsl", {**self._bindings(lanes), **words})
