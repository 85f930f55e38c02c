"""A jet's formulas as a function of all members of a point: for passes over registers.

The lines are those of a pass (`jet_lines.Text`) with registers in place of memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numfuse.activations import Activation
from numfuse.backends.cuda.compile.toolchain import device_function
from numfuse.backends.cuda.kernels import jet_lines
from numfuse.backends.cuda.kernels.elementwise import Formula, formula
from numfuse.expr import Expr
from numfuse.problem.jets import formulas_of

_SUMS = ("z", "z_dot", "z_ddot")
_GRADS = ("grad", "grad_dot", "grad_ddot")
_OUTS = ("out", "out_dot", "out_ddot")
_Q = ("d_z", "d_z_dot", "d_z_ddot")


class _Text(jet_lines.Text):
    """The lines of a pass on registers; weights that are zero have none."""

    def __init__(self, made: jet_lines.Pass, pattern: tuple[bool, ...]) -> None:
        super().__init__(made)
        self.unrolled, self.pattern = True, pattern

    def load(self, name: str, member: jet_lines.Member = ("", "")) -> str:
        end, index = member
        return f"in_{name}{end} = {name}_{index}" if end else f"in_{name} = {name}"

    def store(self, name: str, value: str, index: str = "") -> list[str]:
        there = name in self.made.written
        return [f"{name}_{index} = {value}" if index else f"{name} = {value}"] if there else []

    def weighted(self, total: str, s: str, d: str, index: str, term: str) -> list[str]:
        at = int(s) * self.made.directions + int(d)
        return [f"{total} = {total} + weights[{at}] * {term}"] if self.pattern[at] else []


@dataclass(frozen=True)
class Row:
    """``row(given, i, weights, made, j)``: the results of a point from j on of the members from i.

    `given` has the sums and, of a backward, the cotangents; all are local arrays.
    """

    text: str
    parts: tuple[tuple[str, Formula], ...]
    real: str
    numfuse_key: str = field(compare=False)

    def formulas(self) -> list[Expr]:
        """Return the formulas in it that still live."""
        return [x for _, part in self.parts for x in part.formulas()]

    def build(self) -> Any:
        """Return the device function."""
        scope: dict[str, Any] = {"ZERO": np.dtype(self.real).type(0)}
        scope |= {name.upper(): part.build() for name, part in self.parts}
        exec(compile(self.text, "<numfuse network>", "exec"), scope)
        return device_function(scope["row"])


def row(
    activation: Activation, real: str, counts: tuple[int, int], pattern: bytes, weighted: bool,
    guard: bool, backward: bool, moved: bool,
) -> Row:  # fmt: skip
    """Return the function of a layer; `moved`: its inputs have second derivatives."""
    directions, seconds = counts
    jet = formulas_of(activation, None, backward, {}, pattern, guard, moved, True)
    results = (_Q if moved else _Q[:2]) if backward else _OUTS
    made = jet_lines.of(jet, frozenset(results), backward, counts, weighted, False)
    lines = _Text(made, tuple(map(bool, pattern))).point().whole

    def members(names: tuple[str, ...]) -> list[str]:
        value, dot, *rest = names
        found = [value, *(f"{dot}_{d}" for d in range(directions))]
        return found + [f"{x}_{s}" for x in rest for s in range(seconds)]

    inputs = members(_SUMS if moved else _SUMS[:2]) + (members(_GRADS) if backward else [])
    body = [f"{name} = given[i + {k}]" for k, name in enumerate(inputs)]
    body += lines + [f"made[j + {k}] = {name}" for k, name in enumerate(members(results))]
    text = "\n".join(["def row(given, i, weights, made, j):", *(f"    {x}" for x in body), ""])
    parts = tuple(
        (name, formula(part, part.inputs, real, short=False, straight=True))
        for name, part in made.parts.items()
    )
    told = text + real + " ".join(part.numfuse_key for _, part in parts)
    return Row(text, parts, real, f"row {hashlib.sha256(told.encode()).hexdigest()}")
