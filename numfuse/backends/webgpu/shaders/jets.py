"""The pass of a jet over points: every member of a point at once, by its three formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.shader import TYPES, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.expr import Expr
from numfuse.language import wgsl

#: The loop variable of the members of an array, by the end of its name; none of a value's.
_LOOPS = {"_ddot": "s", "_dot": "d"}


def loop_of(name: str) -> str:
    """Return the loop over the members of an array, "d" or "s"; "" where there is one member."""
    return next((x for end, x in _LOOPS.items() if name.endswith(end)), "")


class Member(NamedTuple):
    """An array of a jet: one of its members, or those of all directions or second derivatives."""

    name: str
    dtype: str
    #: The binding in which it lies.
    buffer: str


@dataclass(frozen=True)
class JetPass(Shader):
    """A jet's results from its sums, or the gradients by these and their column sums.

    `parts` has the formulas by what they are of: the value, a direction, what a direction adds to
    second derivatives (bend), a second derivative. One that has no results is not there.
    """

    accumulator: str
    name: str
    parts: tuple[tuple[str, Formula], ...]
    arrays: tuple[Member, ...]
    #: The bindings, and whether each is written.
    bound: tuple[tuple[str, str, bool], ...]
    backward: bool
    #: The gradients to which all parts of a backward add.
    totals: tuple[str, ...]
    #: Whether there are directions, and second derivatives.
    directions: bool
    seconds: bool
    #: Whether second derivatives are sums with weights; else each is of the direction of its place.
    weighted: bool
    sums: bool
    #: Directions whose gradients are added up by columns too, each in a variable of its own.
    apart: int = 0
    #: Whether the device's fma rounds once.
    one_rounding: bool = field(default=False, kw_only=True)

    def formulas(self) -> list[Expr]:
        return [e for _, formula in self.parts for e in formula.formulas()]

    @cached_property
    def label(self) -> str:  # type: ignore[override]
        return f"jet of {self.name}{' backward' if self.backward else ''}"

    @cached_property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        acc = TYPES[self.accumulator]
        found = [
            Storage(name, TYPES[dtype], "read_write" if written else "read")
            for name, dtype, written in self.bound
        ]
        found += [Storage("weights", acc, "read")] if self.weighted else []
        found += [Storage("column_sums", acc, "read_write")] if self.sums else []
        return tuple(found)

    @cached_property
    def uniform(self) -> Uniform:  # type: ignore[override]
        fields = ["m", "n", "chunks", "points", "total", "directions", "seconds", "column_sums"]
        fields += ["plane"] if self.apart else []
        for x in self.arrays:
            fields += [x.name, *(f"{x.name}_{axis}" for axis in ("place", "row", "column"))]
            fields += [f"{x.name}_member"] if loop_of(x.name) else []
        return Uniform(tuple(fields))

    def text(self) -> str:
        acc = TYPES[self.accumulator]
        at = {}
        for x in self.arrays:
            loop = loop_of(x.name)
            step = f" + {loop} * p.{x.name}_member" if loop else ""
            at[x.name] = f"{x.buffer}[at_{x.name}{step}]"
        words: dict[str, Any] = {
            "LOAD": {x.name: f"{acc}({at[x.name]})" for x in self.arrays},
            "STORE": {x.name: f"{at[x.name]} = {TYPES[x.dtype]}" for x in self.arrays},
            "BACKWARD": self.backward,
            "TOTALS": self.totals,
            "APART": list(range(self.apart)),
            "DIRECTIONS": "p.directions" if self.directions else "",
            "SECONDS": "p.seconds" if self.seconds else "",
            "STRAIGHT": "p.seconds",
            "WEIGHT": "weights[s * p.directions + d]" if self.weighted else "",
        }
        printed, lines = point(self.parts, self.accumulator, words)
        words |= {
            "HEADER": self.header(),
            "FORMULAS": functions(printed, self.accumulator, self.one_rounding),
            "ACC": acc,
            "ARRAYS": self.arrays,
            "SUMS": self.sums,
            "POINT": lines,
        }
        return expand("jet.wgsl", words)


def point(
    parts: Sequence[tuple[str, Formula]], accumulator: str, words: Mapping[str, Any], end: str = ""
) -> tuple[dict[str, Any], str]:
    """Return the formulas of a jet's parts by their functions' names, and the lines of a point.

    `words` say where the members are found (``LOAD``), and which results go where (``STORE``). The
    names of the functions have this `end`.
    """
    read: dict[str, list[str]] = {x: [] for x in ("value", "direction", "bend", "second")}
    call, made = dict.fromkeys(read, ""), {x: dict[str, str]() for x in read}
    printed = dict[str, Any]()
    for name, formula in parts:
        results, names = printed[f"{name}_of{end}"] = formula.part()
        shared = {x for x in names if x.startswith("shared_")}
        read[name] = [x for x in names if x not in shared]
        given = ", ".join(f"made.{x}" if x in shared else f"in_{x}" for x in names)
        call[name] = f"{name}_of{end}({given})"
        of = "made" if name == "value" else "moved"
        made[name] = {result: f"{of}.{result}" for result, _ in results}
    own = {"READ": read, "CALL": call, "MADE": made, "ZERO": f"{TYPES[accumulator]}(0)"}
    return printed, expand("jet_point.wgsl", {**words, **own})


def functions(printed: Mapping[str, Any], accumulator: str, one_rounding: bool) -> str:
    """Return the text of functions that :func:`point` gave the formulas of."""
    text = wgsl.epilogues(printed, accumulator)
    return f"{wgsl.prelude(text, accumulator, one_rounding)}\n\n{text}\n"
