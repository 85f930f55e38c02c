"""The shaders of whole networks: weights in rows of one length, and all layers in one dispatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.jets import functions
from numfuse.backends.webgpu.shaders.shader import TYPES, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.backends.webgpu.tiling import NetworkTile
from numfuse.expr import Expr

#: The words of a layer in `table`: its lengths, the number of its activation (0: none), where its
#: weights, these transposed and its bias are in `packed`, and where the gradients are in a plane;
#: places are in fours of numbers.
LAYER = Uniform(("k", "n", "f", "w", "turned", "bias", "d_w", "d_bias"))
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
    trusted: ClassVar[bool] = True

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

    trusted: ClassVar[bool] = True
    tile: NetworkTile
    #: The dtype of all arrays but what is packed, and of the gradients of x.
    dtype: str
    #: By the number of an activation, from 1 on.
    activations: tuple[tuple[Parts, Parts], ...]
    directions: int
    seconds: int
    #: Whether second derivatives are sums with weights; else each is of the direction of its place.
    weighted: bool
    #: Which weights are not zero, one byte each.
    pattern: bytes
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
        found = [Storage("packed", "vec4<f32>", "read"), Storage("table", "vec4<u32>", "read")]
        found += [Storage("x", real, "read")]
        found += [Storage(x.name, real, way) for x in self.members]
        if self.backward:
            found += [Storage("d_x", real, "read_write")]
            found += [Storage("work", "vec4<f32>", "read_write")]
        return tuple(found)

    @cached_property
    def uniform(self) -> Uniform:  # type: ignore[override]
        fields = ["count", "tiles", "chunk", "layers", "made", "outputs"]
        fields += ["units", "weights", "x", "x_row", "x_column"]
        for x in self.members:
            fields += [x.name, *(f"{x.name}_{axis}" for axis in ("member", "row", "column"))]
        if self.backward:
            fields += ["given", "by_x", "by_weights", "kept", "keeps", "planes", "plane"]
            fields += ["d_x", "d_x_row", "d_x_column"]
        return Uniform(tuple(fields))

    # --- a pass over points ---------------------------------------------------------------------
    def _pass(self, number: int, parts: Parts, back: bool) -> tuple[dict[str, Any], str]:
        """Return the formulas of an activation's pass, and its function in WGSL.

        Every member and each of four columns is written out: a run-time index would take what is
        indexed to memory on most GPUs.
        """
        t, made = self.tile, _Pass(self, number, parts, back)
        keep, points = self.backward and not back, self.points
        places = ", sums: u32" if self.backward else ""
        words: dict[str, Any] = {
            "NAME": f"{'backward' if back else 'forward'}_{number}",
            "BACK": back,
            "KEEP": keep,
            "PLACES": places + ", inputs: u32" * keep,
            "LIMIT": f"{points}u" if keep else "points",
            "FOURS": t.width // 4,
            "STEP": t.invocations // (t.width // 4),
            "POINTS": points,
            "MEMBERS": self.count,
            "AT": [self._row(m) for m in range(self.count)],
            "WEIGHTS": made.weights,
            "LINES": made.lines,
            "RESULTS": list(enumerate(made.results)),
        }
        return made.printed, expand("network_pass.wgsl", words)

    def _row(self, member: int) -> str:
        """Return where the tile has four columns of a member of a point, whose value is at `at`."""
        first = member * self.points
        if self.points % 8:
            return f"place({first}u + point, four)"
        return f"at + {first * (self.tile.width // 4)}u"

    @property
    def count(self) -> int:
        """Members of a point."""
        return 1 + self.directions + self.seconds

    @property
    def points(self) -> int:
        """Points of a tile."""
        return self.tile.rows // self.count

    def _gradients(self, words: dict[str, Any]) -> str:
        """Return the functions that make gradients of weights."""
        t, points = self.tile, self.points
        counts = points, (1 + self.directions) * points, self.count * points, t.slice
        pace = 2 * t.teams
        loops = [("b", "row0", "values"), ("", "values", "end")]
        own: dict[str, Any] = {
            "BRINGS": min(t.slice, t.rows) * t.width // 4 // t.invocations,
            "BROUGHT": min(t.slice, t.rows),
            "PARTS": -(-t.rows // t.slice),
            "TEAM": t.team,
            "TEAMS": t.teams,
            "PLACE": _lanes(f"(t % {t.team}u)", t.width // t.dm, t.width // t.dn, t.lanes),
            "UNROLLED": 1 if any(x % pace for x in counts) else 2,
            "LOOPS": loops[: min(self.count, 2)],
            "D_DOWN": t.width // t.dm,
            "D_ACROSS": t.width // t.dn,
            "D_HIGH": t.dm // 4,
            "D_WIDE": t.dn // 4,
            "D_SUMS": [(i, j) for i in range(t.dm) for j in range(t.dn // 4)],
            "THIN_PARTS": min(t.invocations // (t.width // 4), t.slice // 5),
        }
        return expand("network_gradients.wgsl", words | own)

    def text(self) -> str:
        t = self.tile
        fours, printed, passes = t.width // 4, dict[str, Any](), []
        for number, activation in enumerate(self.activations, 1):
            for back in range(1 + self.backward):
                made, text = self._pass(number, activation[back], bool(back))
                printed |= made
                passes.append(text)
        thin = -(-t.rows // t.invocations)
        idle = thin * t.invocations > t.rows
        slice_ = min(t.slice, t.width)
        area = t.rows * fours
        members = [(x.first + i, x, i) for x in self.members for i in range(x.number)]
        words: dict[str, Any] = {
            "HEADER": self.header(),
            "FORMULAS": functions(printed, "float32", self.one_rounding) if printed else "",
            "PASSES": "\n".join(passes),
            "ACTIVATIONS": range(1, 1 + len(self.activations)),
            "READS": [_Member("x", 1, 0, 0), *(self.members if self.backward else ())],
            "ENDS": members,
            "BACKWARD": self.backward,
            "SUMS": f", sums, sums + {area}u" if self.backward else "",
            "D": self.directions,
            "MEMBERS": self.count,
            "POINTS": self.points,
            "LAYER": len(LAYER.names) // 4,
            "WIDTH": t.width,
            "FOURS": fours,
            "ROWS": t.rows,
            "OTHER_ROWS": t.slice if self.backward else 0 if t.apart else slice_,
            "APART": t.apart,
            "MATRIX": "matrix" if t.apart else "other",
            "AREA": area,
            "SLICE": slice_,
            "SLICED": slice_ < t.width,
            "FETCHES": slice_ * fours // t.invocations,
            "INVOCATIONS": t.invocations,
            "MR": t.mr,
            "RUNS": t.nr // 4,
            "PRODUCTS": [(i, j) for i in range(t.mr) for j in range(t.nr // 4)],
            "ACROSS": t.width // t.nr,
            "DOWN": t.rows // t.mr,
            "PLACE": _lanes("t", t.rows // t.mr, t.width // t.nr, t.lanes),
            "THIN": thin,
            "IF_ROW": f"if (t < {t.rows}u) {{" if idle else "",
            "END_ROW": "}" if idle else "",
            "GIVE": TYPES[self.dtype],
        }
        words["GRADIENTS"] = self._gradients(words) if self.backward else ""
        return expand("network.wgsl", words)


def _lanes(t: str, down: int, across: int, blocked: bool) -> tuple[str, str]:
    """Return the place of an invocation `t` among those down a product's rows, and across.

    Blocked, 32 neighbours, which a GPU runs together, read eight fours of one factor and four of
    the other; a block of eight neighbours reads four and two.
    """
    if not blocked or down % 8 or across % 4:
        return f"{t} / {across}u", f"{t} % {across}u"
    warp, wide = f"({t} / 32u)", across // 4
    row = f"{warp} / {wide}u * 8u + (({t} >> 1u) & 7u)"
    return row, f"{warp} % {wide}u * 4u + (({t} & 1u) | (({t} >> 3u) & 2u))"


class _Pass:
    """The expressions of an activation's pass: lines, by their names, and a result by member."""

    def __init__(self, of: NetworkPass, number: int, parts: Parts, back: bool) -> None:
        self._counts, self._end = (of.directions, of.seconds), f"_{number}{'_back' * back}"
        self._weighted, self._pattern = of.weighted, of.pattern
        self.printed: dict[str, Any] = {}
        self._made: dict[str, set[str]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        for name, formula in parts:
            results, names = self.printed[f"{name}_of{self._end}"] = formula.part()
            self._made[name] = {result for result, _ in results}
            self._names[name] = tuple(names)
        self.lines: list[tuple[str, str]] = []
        pairs = [(s, d) for s in range(of.seconds) for d in range(of.directions)]
        self._pairs = [(s, d) for s, d in pairs if of.pattern[s * of.directions + d]]
        self.weights = [(f"weight_{s}_{d}", s * of.directions + d) for s, d in self._pairs]
        if not of.weighted:
            self.weights = []
        self.results = self._backward() if back else self._forward()

    def _call(self, part: str, lane: int, i: int = 0) -> str:
        """Return the call of a part's formula in a column."""
        directions = self._counts[0]
        firsts = {"": 0, "_dot": 1 + i, "_ddot": 1 + directions + i}
        arguments = []
        for name in self._names[part]:
            if name.startswith("shared_"):
                arguments.append(f"value_{lane}.{name}")
            elif name == "grad_bent":
                arguments.append(f"bent_{i}[{lane}]")
            else:
                of, _, end = name.partition("_")
                letter = {"z": "z", "grad": "g"}[of]
                arguments.append(f"{letter}_{firsts[f'_{end}' if end else '']}[{lane}]")
        return f"{part}_of{self._end}({', '.join(arguments)})"

    def _lines(self, part: str, name: str, i: int = 0) -> None:
        """Call a part's formula in four columns."""
        if part in self._names:
            self.lines += [(f"{name}_{lane}", self._call(part, lane, i)) for lane in range(4)]

    def _result(self, part: str, name: str, result: str) -> list[str]:
        """Return a part's result in four columns, if it has that."""
        if result not in self._made.get(part, ()):
            return []
        return [f"vec4<f32>({', '.join(f'{name}_{lane}.{result}' for lane in range(4))})"]

    def _times(self, s: int, d: int, value: str) -> str:
        return f"weight_{s}_{d} * {value}" if self._weighted else value

    def _forward(self) -> list[str]:
        directions, seconds = self._counts
        self._lines("value", "value")
        results = [self._result("value", "value", "out")]
        for d in range(directions):
            self._lines("direction", f"moved_{d}", d)
            self._lines("bend", f"bend_{d}", d)
            results.append(self._result("direction", f"moved_{d}", "out_dot"))
        for s in range(seconds):
            self._lines("second", f"second_{s}", s)
            straight = self._result("second", f"second_{s}", "straight")
            total = [f"select(NO, {x}, inner)" for x in straight]
            for d in [d for other, d in self._pairs if other == s]:
                bent = self._result("bend", f"bend_{d}", "bent")
                total += [self._times(s, d, x) for x in bent]
            results.append(total)
        return [" + ".join(x) or "NO" for x in results]

    def _backward(self) -> list[str]:
        directions, seconds = self._counts
        self._lines("value", "value")
        totals, results = self._result("value", "value", "d_z"), []
        for d in range(directions):
            if "grad_bent" in self._names.get("direction", ()):
                bent = [
                    self._times(s, d, f"g_{1 + directions + s}")
                    for s, other in self._pairs
                    if other == d
                ]
                self.lines.append((f"bent_{d}", " + ".join(bent) or "NO"))
            self._lines("direction", f"moved_{d}", d)
            totals += self._result("direction", f"moved_{d}", "d_z")
            results.append(self._result("direction", f"moved_{d}", "d_z_dot"))
        for s in range(seconds):
            self._lines("second", f"second_{s}", s)
            for x in self._result("second", f"second_{s}", "d_z"):
                totals.append(f"select(NO, {x}, inner)")
            made = self._result("second", f"second_{s}", "d_z_ddot")
            results.append([f"select(NO, {x}, inner)" for x in made])
        return [" + ".join(x) or "NO" for x in (totals, *results)]
