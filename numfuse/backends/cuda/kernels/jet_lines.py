"""The text of a jet's pass over points, printed from its formulas.

A thread has a column of some points. Few members have lines of their own; loops over many take some
at a time. What depends on a point's value alone, the slopes of the curve, is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from numfuse.epilogues import Epilogue, Jet

#: The loop variable of the members of an array, by the end of its name.
_LOOPS = {"_ddot": "s", "_dot": "d"}


def loop_of(name: str) -> str:
    """Return the loop over the members of an array, "d" or "s"; "" where there is one member."""
    return next((x for end, x in _LOOPS.items() if name.endswith(end)), "")


#: Members of a kind up to which a pass is written out for each of them.
WRITTEN_OUT = 4
#: Members that a loop over more of them takes at a time: their loads are on their way together.
AT_A_TIME = 4
#: Arrays and members of a point up to which a pass that sums columns takes two points at a time, in
#: float32: float64 would fill the registers.
TWO_POINTS = 14


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
    #: The gradients to which all parts of a backward add.
    totals: tuple[str, ...] = ("d_z",)
    #: Whether the gradients by directions' sums are added up by columns too, and are not stored.
    #: (There are few directions then: each has registers of its own.)
    apart: bool = False
    #: The array that is no array of points but a table, which `TABLE` adds up to one's value.
    table: str = ""

    @property
    def added(self) -> range:
        """Return the directions whose columns are added up."""
        return range(self.directions if self.apart else 0)

    @property
    def read(self) -> set[str]:
        """Return the arrays that are read."""
        used = {name for part in self.parts.values() for name in part.inputs}
        used |= {"grad_ddot"} if "grad_bent" in used else set()
        return {name for name in used if not name.startswith("shared_") and name != "grad_bent"}

    @property
    def written_out(self) -> bool:
        """Whether all members have lines of their own."""
        return max(self.directions, self.seconds) <= WRITTEN_OUT

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
    apart: bool = False,
) -> Pass:
    """Return the pass of a jet's formulas that writes these arrays."""
    parts = jet.parts({*written, *(["d_z_dot"] if apart else ())}, backward, *counts)
    totals = "d_z", *sorted(x for x in written if x.startswith("d_x_"))
    made = Pass(parts, written, backward, *counts, weighted, sums, totals, apart)
    return made._replace(weighted=weighted and made.bends)


class _Lines(NamedTuple):
    """The lines of some members: what they load, what they compute, what they store.

    Loads stand first. For all that the compiler knows a store may be to their memory, so a load
    behind it would wait, and a thread's loads are what keeps the memory busy.
    """

    loads: list[str]
    work: list[str]
    stores: list[str]

    def and_then(self, *others: _Lines) -> _Lines:
        """Return these lines and others, all loads first."""
        whole = (self, *others)
        return _Lines(*([line for x in whole for line in x[i]] for i in range(3)))

    @property
    def whole(self) -> list[str]:
        return [*self.loads, *self.work, *self.stores]


#: A member in the text: the end of its variables' names, and its place as an expression.
Member = tuple[str, str]


class Text:
    """The lines of a pass for one point; `tag` ends its variables' names."""

    def __init__(self, made: Pass, tag: str = "") -> None:
        self.made, self.tag = made, tag
        #: Whether each member, and each weight, has lines of its own.
        self.unrolled = made.written_out

    # --- variables ------------------------------------------------------------------------------
    def own(self, *parts: str) -> list[str]:
        """Return the arrays that parts read."""
        there = [self.made.parts[part] for part in parts if part in self.made.parts]
        names = dict.fromkeys(name for part in there for name in part.inputs)
        return [x for x in names if not x.startswith("shared_") and x != "grad_bent"]

    def at(self, name: str, index: str) -> str:
        more = f" + {index} * member_{name}" if loop_of(name) else ""
        return f"at_{name} + row{self.tag} * row_{name}{more}"

    def load(self, name: str, member: Member = ("", "")) -> str:
        end, index = member
        if name == self.made.table:
            return f"in_{name}{end}{self.tag} = TABLE(from_{name}, row{self.tag}, column, n)"
        return f"in_{name}{end}{self.tag} = LOAD_{name}({self.at(name, index)}, 0)"

    def store(self, name: str, value: str, index: str = "") -> list[str]:
        there = name in self.made.written
        return [f"STORE_{name}({self.at(name, index)}, 0, {value})"] if there else []

    def result(self, part: str, name: str, end: str = "") -> str:
        """Return the variable of a part's result, or 0."""
        if part not in self.made.parts or name not in dict(self.made.parts[part].results):
            return "ZERO"
        return (name if name.startswith("shared_") else f"{part}_{name}{end}") + self.tag

    def call(self, part: str, end: str = "") -> list[str]:
        """Return the line that computes the results of a part."""
        epilogue = self.made.parts.get(part)
        if epilogue is None:
            return []
        given = []
        for name in epilogue.inputs:
            if name.startswith("shared_"):
                given.append(name + self.tag)
            elif name == "grad_bent":
                given.append(f"bent{end}{self.tag}")
            else:
                given.append(f"in_{name}{end if loop_of(name) else ''}{self.tag}")
        to = ", ".join(self.result(part, name, end) for name, _ in epilogue.results)
        return [f"{to} = {part.upper()}({', '.join(given)})"]

    def weighted(self, total: str, s: str, d: str, index: str, term: str) -> list[str]:
        """Return the lines that add a weighted term; a weight of 0 leaves it out."""
        weight = f"weight_{s}_{d}"
        lines = [f"{total} = {total} + {weight} * {term}"]
        there = [] if self.unrolled else [f"{weight} = LOAD_WEIGHT(weights, {index})"]
        return [*there, f"if {weight} != ZERO:", *_inside(lines)]

    # --- members --------------------------------------------------------------------------------
    def value(self) -> _Lines:
        """Return the lines of what a point has once."""
        loads = [self.load(x) for x in self.own(*self.made.parts) if not loop_of(x)]
        if self.made.backward:
            begun = [f"{x}{self.tag} = {self.result('value', x)}" for x in self.made.totals]
            return _Lines(loads, [*self.call("value"), *begun], [])
        slopes = [x for x in sorted(self.made.written) if x.startswith("shared_")]
        names = "out", "pre", *slopes
        stores = [line for x in names for line in self.store(x, self.result("value", x))]
        return _Lines(loads, self.call("value"), stores)

    def direction(self, member: Member) -> _Lines:
        """Return the lines of a direction; those of its bend too."""
        end, index = member
        loads = [self.load(x, member) for x in self.own("direction", "bend") if loop_of(x)]
        work = [*self.bent(member), *self.call("direction", end), *self.call("bend", end)]
        name = "d_z_dot" if self.made.backward else "out_dot"
        work += self.added("direction", end)
        if self.made.apart:
            work.append(f"run_{index} = run_{index} + {self.result('direction', name, end)}")
        return _Lines(loads, work, self.store(name, self.result("direction", name, end), index))

    def bent(self, member: Member) -> list[str]:
        """Return the lines of what the bend of a direction is weighted with, of all seconds."""
        part = self.made.parts.get("direction")
        if part is None or "grad_bent" not in part.inputs:
            return []
        (end, index), bent = member, f"bent{member[0]}{self.tag}"
        if not self.made.weighted:
            return [f"{bent} = in_grad_ddot{end}{self.tag}"]
        lines = [f"{bent} = ZERO"]
        if self.unrolled or self.made.seconds <= WRITTEN_OUT:
            for s in range(self.made.seconds):
                term = f"in_grad_ddot_{s}{self.tag}"
                lines += self.weighted(bent, str(s), end[1:], f"{s} * directions + {index}", term)
            return lines
        term = f"LOAD_grad_ddot({self.at('grad_ddot', 's')}, 0)"
        inner = self.weighted(bent, "s", "d", f"s * directions + {index}", term)
        return [*lines, "for s in range(seconds):", *_inside(inner)]

    def added(self, part: str, end: str) -> list[str]:
        """Return the lines that add what a part of a backward makes to the totals."""
        if not self.made.backward or part not in self.made.parts:
            return []
        names = [x for x in self.made.totals if x in dict(self.made.parts[part].results)]
        tag = self.tag
        return [f"{x}{tag} = {x}{tag} + {self.result(part, x, end)}" for x in names]

    def total(self, end: str) -> str:
        """Return the variable of what directions add to a second derivative."""
        return f"total{end}{self.tag}"

    def second(self, member: Member, begun: str = "") -> _Lines:
        """Return the lines of a second derivative, whose total was `begun` with a value."""
        end, index = member
        loads = [self.load(x, member) for x in self.own("second") if loop_of(x)]
        if self.made.backward:
            work = [*self.call("second", end), *self.added("second", end)]
            value = self.result("second", "d_z_ddot", end)
            return _Lines(loads, work, self.store("d_z_ddot", value, index))
        work = [f"{self.total(end)} = {begun}"] if begun else []
        work += self.call("second", end)
        if "second" in self.made.parts:
            straight = self.result("second", "straight", end)
            work.append(f"{self.total(end)} = {self.total(end)} + {straight}")
        return _Lines(loads, work, self.store("out_ddot", self.total(end), index))

    def both(self, member: Member) -> _Lines:
        """Return the lines of a direction and of the second derivative along it."""
        begun = "" if self.made.backward else self.result("bend", "bent", member[0])
        first, then = self.direction(member), self.second(member, begun)
        bends = self.made.backward and self.bent(member)
        more = [self.load("grad_ddot", member)] if bends else []
        loads = list(dict.fromkeys([*first.loads, *more, *then.loads]))
        return _Lines(loads, [*first.work, *then.work], [*first.stores, *then.stores])

    def totals(self, member: Member) -> _Lines:
        """Return the lines of a direction, and of what it adds to few second derivatives."""
        lines = self.direction(member)
        if self.made.backward or "bend" not in self.made.parts:
            return lines
        end, index = member
        bent = self.result("bend", "bent", end)
        work = list(lines.work)
        for s in range(self.made.seconds):
            at = f"{s} * directions + {index}"
            work += self.weighted(self.total(f"_{s}"), str(s), end[1:], at, bent)
        return lines._replace(work=work)

    # --- points ---------------------------------------------------------------------------------
    def point(self) -> _Lines:
        """Return the lines of a point whose members are few: all are written out."""
        stores = [line for x in self.made.totals for line in self.store(x, x + self.tag)]
        return self._members().and_then(_Lines([], [], stores if self.made.backward else []))

    def _members(self) -> _Lines:
        made = self.made
        directions = [(f"_{i}", str(i)) for i in range(made.directions)]
        seconds = [(f"_{i}", str(i)) for i in range(made.seconds)]
        if made.bends and not made.weighted:
            return self.value().and_then(*map(self.both, directions))
        every = self.value().and_then(self.few_seconds(True), *map(self.totals, directions))
        if made.backward:
            return every.and_then(*map(self.second, seconds))
        bare = [self.second(member, "" if made.bends else "ZERO") for member in seconds]
        return every.and_then(*bare)

    def few_seconds(self, again: bool) -> _Lines:
        """Return the lines with which few second derivatives begin before the directions.

        `again`: their own lines follow, and so load the cotangents that they read themselves.
        """
        made, first = self.made, _Lines([], [], [])
        for s in range(made.seconds if made.bends and made.weighted else 0):
            if not made.backward:
                first.work.append(f"{self.total(f'_{s}')} = ZERO")
            elif not (again and "grad_ddot" in self.own("second")):
                first.loads.append(self.load("grad_ddot", (f"_{s}", str(s))))
        return first

    def lines(self) -> list[str]:
        """Return the lines of a point, with loops over members where they are many."""
        if self.made.written_out:
            return self.point().whole
        totals = self.made.totals if self.made.backward else ()
        return [*self._loops(), *(line for x in totals for line in self.store(x, x))]

    def _loops(self) -> list[str]:
        made = self.made
        first, bends = self.value(), made.bends
        if bends and not made.weighted:
            return [*first.whole, *_loop("d", made.directions, "directions", self.both)]
        if bends and made.seconds > WRITTEN_OUT and not made.backward:
            return [
                *first.whole,
                *_loop("d", made.directions, "directions", self.direction),
                "for s in range(seconds):",
                *_inside([f"{self.total('')} = ZERO", *self.summed()]),
                *_inside(self.second(("", "s")).whole),
            ]
        few = self.few_seconds(False) if made.seconds <= WRITTEN_OUT else _Lines([], [], [])
        begun = "ZERO" if not (bends or made.backward) else ""
        return [
            *first.and_then(few).whole,
            *_loop("d", made.directions, "directions", self.totals),
            *_loop("s", made.seconds, "seconds", lambda member: self.second(member, begun)),
        ]

    def summed(self) -> list[str]:
        """Return the lines of one second derivative's sum over the directions."""
        loads = [self.load(x, ("", "d")) for x in self.own("bend") if loop_of(x)]
        bent, at = self.result("bend", "bent"), "s * directions + d"
        weight = [f"weight = LOAD_WEIGHT(weights, {at})", "if weight != ZERO:"]
        line = f"{self.total('')} = {self.total('')} + weight * {bent}"
        body = [*weight, *_inside([*loads, *self.call("bend"), line])]
        return ["for d in range(directions):", *_inside(body)]


def _inside(lines: list[str]) -> list[str]:
    return [f"    {x}" for x in lines]


def _loop(variable: str, count: int, name: str, make: Callable[[Member], _Lines]) -> list[str]:
    """Return the lines of all members: few at once, many in a loop that takes some at a time."""
    if count <= WRITTEN_OUT:
        members = [make((f"_{i}", str(i))) for i in range(count)]
        return members[0].and_then(*members[1:]).whole if members else []
    step, at = AT_A_TIME, f"{variable}_at"
    one = make(("_0", variable)).whole
    if not one:
        return []
    first, *rest = (make((f"_{i}", f"({at} + {i})")) for i in range(step))
    return [
        f"for {at} in range(0, {name} - {step - 1}, {step}):",
        *_inside(first.and_then(*rest).whole),
        f"for {variable} in range({name} // {step} * {step}, {name}):",
        *_inside(one),
    ]


def text(made: Pass, arrays: list[str], narrow: bool) -> str:
    """Return the kernel of a pass over these arrays; `narrow`: it computes in float32."""
    body = Text(made).lines()
    arguments = []
    starts = []
    for name in arrays:
        steps = ["place", "row", "column", *(["member"] if loop_of(name) else [])]
        arguments += [f"from_{name}", *(f"{step}_{name}" for step in steps)]
        starts.append(f"at_{name} = from_{name} + place * place_{name} + column * column_{name}")
    arguments += ["weights"] if made.weighted else []
    arguments += ["sums"] if made.sums else []
    arguments += ["plane"] if made.apart else []
    arguments += "m n places chunks length directions seconds".split()
    pairs = [
        f"weight_{s}_{d} = LOAD_WEIGHT(weights, {s * made.directions + d})"
        for s in range(made.seconds)
        for d in range(made.directions)
    ]
    lines = [
        f"def pointwise({', '.join(arguments)}):",
        *_inside(pairs if made.weighted and made.written_out else []),
        "    left = cuda.blockIdx.x * COLUMNS + (cuda.threadIdx.x & (COLUMNS - 1))",
        "    top = cuda.blockIdx.y * (THREADS >> COLUMN_BITS) + (cuda.threadIdx.x >> COLUMN_BITS)",
        "    down = cuda.gridDim.y * (THREADS >> COLUMN_BITS)",
        "    for column in range(left, n, cuda.gridDim.x * COLUMNS):",
        "        for place in range(cuda.blockIdx.z, places, cuda.gridDim.z):",
        *(f"            {x}" for x in starts),
        "            for number in range(top, chunks, down):",
        *(f"                {x}" for x in (_summed(made, body, narrow) if made.sums else body)),
    ]
    if not made.sums:
        lines.insert(-len(body), "                row = number")
    return "\n".join([*lines, ""])


def _summed(made: Pass, body: list[str], narrow: bool) -> list[str]:
    """Return the lines of a chunk of points, of which a column is summed: in runs of RUN."""
    one = [*body, "run = run + d_z", "row += 1"]
    two = []
    few = 0 < made.directions and len(made.read) + made.directions + made.seconds <= TWO_POINTS
    if made.written_out and few and narrow:
        both = Text(made).point().and_then(Text(made, "_b").point()).whole
        both = ["row_b = row + 1", *both, "run = run + d_z", "run = run + d_z_b", "row += 2"]
        two = ["while row + 1 < end:", *_inside(both)]
    ends = ["", *(f"_{i}" for i in made.added)]
    turn = ["end = min(row + RUN, last)", *(f"run{x} = ZERO" for x in ends)]
    turn += [*two, "while row < end:", *_inside(one)]
    at = "(place * chunks + number) * n + column"
    return [
        "row = number * length",
        "last = min(row + length, m)",
        *(f"value{x} = ZERO" for x in ends),
        "while row < last:",
        *_inside([*turn, *(f"value{x} = value{x} + run{x}" for x in ends)]),
        f"STORE_SUM(sums, {at}, value)",
        *(f"STORE_SUM(sums, {i + 1} * plane + {at}, value_{i})" for i in made.added),
    ]
