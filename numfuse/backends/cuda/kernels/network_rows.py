"""A jet's formulas as a function of all members of a point: for passes over registers.

The lines are those of a pass (`jets.Text`), with its loops over directions and second derivatives
written out and registers in place of memory.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numfuse.activations import Activation
from numfuse.backends.cuda.compile.toolchain import device_function
from numfuse.backends.cuda.kernels import jets
from numfuse.backends.cuda.kernels.elementwise import Formula, formula
from numfuse.expr import Expr
from numfuse.problem.jets import formulas_of

_SUMS = ("z", "z_dot", "z_ddot")
_GRADS = ("grad", "grad_dot", "grad_ddot")
_OUTS = ("out", "out_dot", "out_ddot")
_Q = ("d_z", "d_z_dot", "d_z_ddot")
#: The start of a line that is there where this weight is.
_IF_WEIGHT = re.compile(r"^@(\d+),(\d+)@")


class _Text(jets.Text):
    """The lines of a pass on registers."""

    def __init__(self, made: jets.Pass, pattern: tuple[bool, ...]) -> None:
        super().__init__(made)
        self.pattern = pattern

    def load(self, name: str) -> str:
        loop = jets.loop_of(name)
        return f"{name}[{loop}]" if loop else name

    def store(self, name: str, value: str) -> list[str]:
        return [f"{self.load(name)} = {value}"] if name in self.made.written else []

    def loop(self, variable: str, count: str, body: list[str]) -> list[str]:
        number = self.made.directions if variable == "d" else self.made.seconds
        return [re.sub(rf"\b{variable}\b", str(i), x) for i in range(number) for x in body]

    def weighted(self, loop: str, total: str, count: str, lines: list[str], term: str) -> list[str]:
        if not self.made.weighted:
            same = "s" if loop == "d" else "d"
            return [re.sub(rf"\b{loop}\b", same, x) for x in (*lines, f"{total} = {term}")]
        body = [*lines, f"{total} = {total} + weights[s * {self.made.directions} + d] * {term}"]
        return [f"{total} = ZERO", *self.loop(loop, count, [f"@s,d@{x}" for x in body])]

    def written_out(self, lines: list[str]) -> list[str]:
        """Return lines with constant indices as those of names, without weights that are zero."""
        made = []
        for x in jets.without_sums(lines):
            found = _IF_WEIGHT.match(x)
            if found is None or self.pattern[int(found[1]) * self.made.directions + int(found[2])]:
                line = _IF_WEIGHT.sub("", x)
                made.append(re.sub(r"\b(?!weights\b)(\w+)\[(\d+)\]", r"\1_\2", line))
        return made


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
    jet = formulas_of(activation, backward, {}, pattern, guard, moved, True)
    results = (_Q if moved else _Q[:2]) if backward else _OUTS
    made = jets.of(jet, frozenset(results), backward, counts, weighted, False)
    words = _Text(made, tuple(map(bool, pattern)))
    lines = words.written_out(words.backward() if backward else words.forward())

    def members(names: tuple[str, ...]) -> list[str]:
        value, dot, *rest = names
        found = [value, *(f"{dot}_{d}" for d in range(directions))]
        return found + [f"{x}_{s}" for x in rest for s in range(seconds)]

    inputs = members(_SUMS if moved else _SUMS[:2]) + (members(_GRADS) if backward else [])
    body = [f"{name} = given[i + {k}]" for k, name in enumerate(inputs)]
    body += lines + [f"made[j + {k}] = {name}" for k, name in enumerate(members(results))]
    text = "\n".join(["def row(given, i, weights, made, j):", *(f"    {x}" for x in body), ""])
    parts = tuple(
        (name, formula(part, part.inputs, real, short=False)) for name, part in made.parts.items()
    )
    told = text + real + " ".join(part.numfuse_key for _, part in parts)
    return Row(text, parts, real, f"row {hashlib.sha256(told.encode()).hexdigest()}")
