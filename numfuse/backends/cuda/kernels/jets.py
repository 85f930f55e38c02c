"""A jet's pass over points, printed from its formulas: all members of a point at once.

A thread has a column of some points. The loops over directions and second derivatives are of
run-time lengths; what depends on a point's value alone, the slopes of the curve, is computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda, kernel, types
from numfuse.backends.cuda.kernels.elementwise import formula
from numfuse.backends.cuda.kernels.passes import chunk_of, grid_of, threads_of
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Slot
from numfuse.epilogues import Epilogue, Jet

#: The loop variable of the members of an array, by the end of its name.
_LOOPS = {"_ddot": "s", "_dot": "d"}


def loop_of(name: str) -> str:
    """Return the loop over the members of an array, "d" or "s"; "" where there is one member."""
    return next((x for end, x in _LOOPS.items() if name.endswith(end)), "")


#: Threads of a block: for 256 the assembler aims at 80 registers, and a backward spills.
_THREADS = 128


class Pass(NamedTuple):
    """The computation of a pass; it is printed from this.

    `parts` has the formulas of the results that are used, by what they are of: the value, a
    direction, what a direction adds to second derivatives (bend), a second derivative.
    """

    parts: Mapping[str, Epilogue]
    written: frozenset[str]
    backward: bool
    directions: int
    seconds: int
    #: Whether second derivatives are sums with weights; else each is of the direction of its place.
    weighted: bool
    sums: bool

    @property
    def read(self) -> set[str]:
        """Return the arrays that are read."""
        used = {name for part in self.parts.values() for name in part.inputs}
        used |= {"grad_ddot"} if "grad_bent" in used else set()
        return {name for name in used if not name.startswith("shared_") and name != "grad_bent"}

    @property
    def bends(self) -> bool:
        """Whether directions add to second derivatives."""
        return "bend" in self.parts or any("grad_bent" in x.inputs for x in self.parts.values())


def of(
    jet: Jet,
    written: frozenset[str],
    backward: bool,
    counts: tuple[int, int],
    weighted: bool,
    sums: bool,
) -> Pass:
    """Return the pass of a jet's formulas that writes these arrays."""
    parts = jet.parts(written, backward, *counts)
    made = Pass(parts, written, backward, *counts, weighted, sums)
    return made._replace(weighted=weighted and made.bends)


class Text:
    """The lines of a pass."""

    def __init__(self, made: Pass) -> None:
        self.made = made

    def at(self, name: str) -> str:
        loop = loop_of(name)
        return f"at_{name} + row * row_{name}" + (f" + {loop} * member_{name}" if loop else "")

    def load(self, name: str) -> str:
        return f"LOAD_{name}({self.at(name)}, 0)"

    def store(self, name: str, value: str) -> list[str]:
        if name not in self.made.written:
            return []
        return [f"STORE_{name}({self.at(name)}, 0, {value})"]

    def call(self, part: str) -> list[str]:
        """Return the lines that read the inputs of a part and compute its results."""
        epilogue = self.made.parts.get(part)
        if epilogue is None:
            return []
        names = epilogue.inputs
        own = [x for x in names if not x.startswith("shared_") and x != "grad_bent"]
        lines = [f"in_{name} = {self.load(name)}" for name in own]
        given = ", ".join(name if name.startswith("shared_") else f"in_{name}" for name in names)
        to = ", ".join(self._result(part, name) for name, _ in epilogue.results)
        return [*lines, f"{to} = {part.upper()}({given})"]

    def _result(self, part: str, name: str) -> str:
        return name if name.startswith("shared_") else f"{part}_{name}"

    def made_by(self, part: str, name: str) -> str:
        """Return the result of a part, or 0."""
        epilogue = self.made.parts.get(part)
        there = epilogue is not None and name in dict(epilogue.results)
        return self._result(part, name) if there else "ZERO"

    def weighted(self, loop: str, total: str, count: str, lines: list[str], term: str) -> list[str]:
        """Return the lines of a sum over the other loop; a weight of 0 leaves a term out."""
        if not self.made.weighted:
            return [f"{loop} = {'s' if loop == 'd' else 'd'}", *lines, f"{total} = {term}"]
        inner = ["if weight != ZERO:", *(f"    {x}" for x in lines)]
        return [
            f"{total} = ZERO",
            f"for {loop} in range({count}):",
            "    weight = LOAD_WEIGHT(weights, s * directions + d)",
            *(f"    {x}" for x in inner),
            f"        {total} = {total} + weight * {term}",
        ]

    def loop(self, variable: str, count: str, body: list[str]) -> list[str]:
        """Return a loop over the members of a kind."""
        return [f"for {variable} in range({count}):", *(f"    {x}" for x in body)]

    def forward(self) -> list[str]:
        """Return the lines of a point of a forward."""
        made = self.made
        lines = [*self.call("value"), *self.store("out", self.made_by("value", "out"))]
        lines += self.store("pre", self.made_by("value", "pre"))
        body = [
            *self.call("direction"),
            *self.store("out_dot", self.made_by("direction", "out_dot")),
        ]
        lines += self.loop("d", "directions", body) if made.directions else []
        body = ["total = ZERO"]
        if "bend" in made.parts:
            body = self.weighted("d", "total", "directions", self.call("bend"), "bend_bent")
        if "second" in made.parts:
            body += [*self.call("second"), "total = total + second_straight"]
        body += self.store("out_ddot", "total")
        return lines + (self.loop("s", "seconds", body) if made.seconds else [])

    def backward(self) -> list[str]:
        """Return the lines of a point of a backward."""
        made = self.made
        lines = [*self.call("value"), f"d_z = {self.made_by('value', 'd_z')}"]
        if made.directions:
            body: list[str] = []
            if "direction" in made.parts and "grad_bent" in made.parts["direction"].inputs:
                term = self.load("grad_ddot")
                body = self.weighted("s", "in_grad_bent", "seconds", [], term)
            body += [*self.call("direction"), f"d_z = d_z + {self.made_by('direction', 'd_z')}"]
            body += self.store("d_z_dot", self.made_by("direction", "d_z_dot"))
            lines += self.loop("d", "directions", body)
        if made.seconds:
            body = [*self.call("second"), f"d_z = d_z + {self.made_by('second', 'd_z')}"]
            body += self.store("d_z_ddot", self.made_by("second", "d_z_ddot"))
            lines += self.loop("s", "seconds", body)
        return [*lines, *self.store("d_z", "d_z"), "run = run + d_z"]


def text(made: Pass, arrays: list[str]) -> str:
    """Return the kernel of a pass over these arrays."""
    words = Text(made)
    body = words.backward() if made.backward else words.forward()
    arguments = []
    starts = []
    for name in arrays:
        steps = ["place", "row", "column", *(["member"] if loop_of(name) else [])]
        arguments += [f"from_{name}", *(f"{step}_{name}" for step in steps)]
        starts.append(f"at_{name} = from_{name} + place * place_{name} + column * column_{name}")
    arguments += ["weights"] if made.weighted else []
    arguments += ["sums"] if made.sums else []
    arguments += "m n chunks length total directions seconds".split()
    turn = [
        "while row < last:",
        "    end = min(row + RUN, last)",
        "    run = ZERO",
        "    while row < end:",
        *(f"        {x}" for x in body),
        "        row += 1",
        "    value = value + run",
    ]
    lines = [
        f"def pointwise({', '.join(arguments)}):",
        "    for i in range(cuda.grid(1), total, cuda.gridsize(1)):",
        "        number = i // n",
        "        column = i - number * n",
        "        place = number // chunks",
        "        row = (number - place * chunks) * length",
        "        last = min(row + length, m)",
        *(f"        {x}" for x in starts),
        *(["        value = ZERO", *(f"        {x}" for x in turn)] if made.sums else ()),
        *([] if made.sums else (f"        {x}" for x in without_sums(body))),
        *(["        STORE_SUM(sums, number * n + column, value)"] if made.sums else ()),
    ]
    return "\n".join([*lines, ""])


def without_sums(body: list[str]) -> list[str]:
    """Return the lines of one point."""
    return [x for x in body if x != "run = run + d_z"]


def _template(printed: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"cuda": cuda, "types": types, "__name__": __name__}
    exec(compile(printed, "<numfuse jet>", "exec"), scope)
    template: Any = scope["pointwise"]
    template.numfuse_key = f"jet {hashlib.sha256(printed.encode()).hexdigest()}"
    return template


def launch(
    info: DeviceInfo,
    made: Pass,
    accumulator: str,
    operands: Mapping[str, Operand],
    steps: Mapping[str, int],
    weights: int,
    sizes: tuple[int, int, int],
    short: bool,
) -> tuple[Launch, int]:
    """Return the launch of a pass, and the chunks of points of its column sums.

    `operands` has the arrays by their slots, `steps` the bytes from a member to the next one of
    those that have several, `weights` is an address, `sizes` are M, N and the places. Column sums
    go to the slot "sums": (places, chunks, N) in the accumulator's dtype.
    """
    m, n, places = sizes
    template = _template(text(made, list(operands)))
    bindings: dict[str, Any] = {
        part.upper(): formula(epilogue, epilogue.inputs, accumulator, short=short)
        for part, epilogue in made.parts.items()
    }
    for name, x in operands.items():
        bindings[f"LOAD_{name}"] = elements.loads(x.dtype)
        bindings[f"STORE_{name}"] = elements.stores(x.dtype)
    bindings |= {
        "ZERO": np.dtype(accumulator).type(0),
        "RUN": tiling.RUN,
        "LOAD_WEIGHT": elements.loads(accumulator),
        "STORE_SUM": elements.stores(accumulator),
    }
    used = template.__code__.co_names
    bindings = {name: value for name, value in bindings.items() if name in used}
    words = (["weights"] if made.weighted else []) + (["sums"] if made.sums else [])
    schema = Schema(template, u64=" ".join(words))
    threads = min(threads_of(info), _THREADS)
    name = f"layer jet{' backward' if made.backward else ''}"
    built = kernel(template, schema.signature, threads=threads, name=name, **bindings)
    length = chunk_of(m, n) if made.sums else 1
    given: dict[str, Any] = {}
    for name, x in operands.items():
        given[f"from_{name}"] = Slot(name)
        given |= zip((f"place_{name}", f"row_{name}", f"column_{name}"), x.steps, strict=True)
        given |= {f"member_{name}": steps[name]} if loop_of(name) else {}
    given |= {"weights": weights} if made.weighted else {}
    given |= {"sums": Slot("sums")} if made.sums else {}
    chunks = -(-m // length)
    total = places * chunks * n
    given |= {"m": m, "n": n, "chunks": chunks, "length": length, "total": total}
    given |= {"directions": made.directions, "seconds": made.seconds}
    grid = grid_of(total * tiling.PASS_THREADS // _THREADS, info)
    return Launch(built, grid, schema(**given)), chunks
