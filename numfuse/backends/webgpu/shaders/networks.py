"""The shaders of whole networks: weights in rows of one length, and all layers in one dispatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.jets import functions, point
from numfuse.backends.webgpu.shaders.shader import TYPES, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.backends.webgpu.tiling import NetworkTile
from numfuse.expr import Expr

#: The words of a layer in `table`: its lengths, the number of its activation (0: none), where its
#: weights, these transposed and its bias are in `packed`, where the gradients are in a plane, and
#: its inputs and sums in what a backward keeps; the last eight in fours of numbers.
LAYER = Uniform(("k", "n", "f", "w", "turned", "bias", "d_w", "d_bias", "inputs", "sums"))
#: What is not there, as a place in `packed`.
NONE = 0xFFFFFFFF
#: The results of a jet or their cotangents, as the shader names them.
MEMBERS = "value", "dot", "ddot"
#: The fields of an array of `Pack`: its lengths and strides, the rows to write of it and, of it
#: transposed, and where they go.
ARRAY = Uniform(
    ("first", "row", "column", "rows", "columns", "to", "height", "turned", "turned_height")
)


@dataclass(frozen=True)
class Pack(Shader):
    """Weights and biases, up to `slots` of them, in rows of `width` padded with zeros."""

    dtype: str
    slots: int
    width: int

    label = "pack of a network"
    uniform = Uniform(("count",))

    @cached_property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        found = [Storage(f"from_{i}", TYPES[self.dtype], "read") for i in range(self.slots)]
        arrays = Storage("arrays", "Array", "read")
        return *found, arrays, Storage("packed", "vec4<f32>", "read_write")

    def text(self) -> str:
        header = self.header(ARRAY.struct("Array"))
        return expand("pack.wgsl", {"HEADER": header, "SLOTS": self.slots, "WIDTH": self.width})


class _Member(NamedTuple):
    """Arrays of a point as the template sees them: how many, the first one's number, their bit."""

    name: str
    number: int
    first: int
    bit: int


#: The formulas of an activation: those of its forward and of its backward, by part.
Parts = tuple[tuple[str, Formula], ...]


@dataclass(frozen=True)
class NetworkPass(Shader):
    """All layers of a network in one dispatch; see `network.wgsl`."""

    tile: NetworkTile
    #: The dtype of all arrays but what is packed, and of the gradients of x.
    dtype: str
    #: By the number of an activation, from 1 on.
    activations: tuple[tuple[Parts, Parts], ...]
    directions: int
    seconds: int
    #: Whether second derivatives are sums with weights; else each is of the direction of its place.
    weighted: bool
    backward: bool
    #: Whether the device's fma rounds once.
    one_rounding: bool = field(default=False, kw_only=True)

    def formulas(self) -> list[Expr]:
        return [
            e
            for ways in self.activations
            for way in ways
            for _, formula in way
            for e in formula.formulas()
        ]

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"network{' backward' if self.backward else ''} {self.tile.width}"

    @cached_property
    def members(self) -> tuple[_Member, ...]:
        """The results, or their cotangents, that there are."""
        counts, first = (1, self.directions, self.seconds), 0
        found = []
        for i, (name, count) in enumerate(zip(MEMBERS, counts, strict=True)):
            if count:
                found.append(_Member(name, count, first, 1 << i))
            first += count
        return tuple(found)

    @cached_property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        real, way = TYPES[self.dtype], "read" if self.backward else "read_write"
        found = [Storage("packed", "vec4<f32>", "read"), Storage("table", "u32", "read")]
        found += [Storage("x", real, "read")]
        found += [Storage(x.name, real, way) for x in self.members]
        if self.backward:
            found += [Storage("d_x", real, "read_write")]
            found += [Storage("work", "vec4<f32>", "read_write")]
        return tuple(found)

    @cached_property
    def uniform(self) -> Uniform:  # type: ignore[override]
        fields = ["count", "points", "tiles", "chunk", "layers", "steps", "outputs"]
        fields += ["units", "weights", "x", "x_row", "x_column"]
        for x in self.members:
            fields += [x.name, *(f"{x.name}_{axis}" for axis in ("member", "row", "column"))]
        if self.backward:
            fields += ["made", "given", "by_x", "by_weights", "kept", "keeps", "planes", "plane"]
            fields += ["d_x", "d_x_row", "d_x_column"]
        return Uniform(tuple(fields))

    def _places(self, names: tuple[str, str, str], at: str, step: str) -> dict[str, str]:
        """Return where the members of a point are, by their names."""
        second = 1 + self.directions
        indices = at, f"{at} + (1u + d) * {step}", f"{at} + ({second}u + s) * {step}"
        memory = "work" if at == "from_" else "tile"
        return {x: f"{memory}[{i}][lane]" for x, i in zip(names, indices, strict=True)}

    def _points(self) -> tuple[dict[str, Any], list[tuple[int, str, str]]]:
        """Return the formulas of all activations, and each one's lines of a point, both ways."""
        weight = f"bitcast<f32>(table[p.weights + s * {self.directions}u + d])"
        sums = "z", "z_dot", "z_ddot"
        grads = self._places(("grad", "grad_dot", "grad_ddot"), "at", "step")
        ways = (
            (self._places(sums, "at", "step"), ("out", "out_dot", "out_ddot")),
            (self._places(sums, "from_", "from_step") | grads, ("d_z", "d_z_dot", "d_z_ddot")),
        )
        printed, found = dict[str, Any](), list[tuple[int, str, str]]()
        for i, activation in enumerate(self.activations, 1):
            lines = ["", ""]
            for back, (load, results) in enumerate(ways[: 1 + self.backward]):
                stores = self._places(results, "at", "step")
                words = {
                    "LOAD": load,
                    "STORE": {name: f"{at} = f32" for name, at in stores.items()},
                    "BACKWARD": bool(back),
                    "TOTALS": ("d_z",),
                    "APART": [],
                    "DIRECTIONS": f"{self.directions}u" if self.directions else "",
                    "SECONDS": f"{self.seconds}u" if self.seconds else "",
                    "STRAIGHT": "straight",
                    "WEIGHT": weight if self.weighted else "",
                }
                end = f"_{i}_back" if back else f"_{i}"
                made, lines[back] = point(activation[back], "float32", words, end)
                printed |= made
            found.append((i, lines[0], lines[1]))
        return printed, found

    def text(self) -> str:
        t = self.tile
        printed, points = self._points()
        runs, down = t.nr // 4, t.rows // t.mr
        d_down, d_across = t.width // t.dm, t.width // t.dn
        thin = -(-t.rows // t.invocations)
        idle = thin * t.invocations > t.rows
        words: dict[str, Any] = {
            "HEADER": self.header(),
            "FORMULAS": functions(printed, "float32", self.one_rounding) if printed else "",
            "POINTS": points,
            "READS": [_Member("x", 1, 0, 0), *(self.members if self.backward else ())],
            "GRADS": self.members,
            "OUTS": self.members,
            "BACKWARD": self.backward,
            "D": self.directions,
            "S": self.seconds,
            "LAYER": len(LAYER.names),
            "WIDTH": t.width,
            "PITCH": t.pitch,
            "TILE_SIZE": t.rows * t.pitch,
            "OTHER_SIZE": (t.rows if self.backward else t.slice) * t.pitch,
            "SLICE": t.slice,
            "INVOCATIONS": t.invocations,
            "MR": t.mr,
            "RUNS": runs,
            "PRODUCTS": [(i, j) for i in range(t.mr) for j in range(runs)],
            "ACROSS": t.width // t.nr,
            "DOWN": down,
            "THIN": thin,
            "IF_ROW": f"if (t < {t.rows}u) {{" if idle else "",
            "END_ROW": "}" if idle else "",
            "D_DOWN": d_down,
            "D_ACROSS": d_across,
            "D_HIGH": t.dm // 4,
            "D_WIDE": t.dn // 4,
            "D_SUMS": [(i, j) for i in range(t.dm) for j in range(t.dn // 4)],
            "D_IDLE": d_down * d_across < t.invocations,
            "GIVE": TYPES[self.dtype],
        }
        words |= {name.upper(): i for i, name in enumerate(LAYER.names)}
        return expand("network.wgsl", words)
