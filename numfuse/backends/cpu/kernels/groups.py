"""Row functions of groups: the rows of a point (value, directions, second derivatives) at once.

A product makes the rows of a point one behind the other. All but the last are held in scratch rows,
in the cache next to the core, and with the last one the formulas run. Where sums were saved, a pass
over points reads them instead. Small groups are printed as one loop over a row's elements, with all
that belongs to an element in registers; larger ones as loops over directions and second
derivatives, whose numbers then are run-time values, with a loop over elements in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numfuse.backends.cpu.kernels import elementwise, library, printer, protocol
from numfuse.backends.cpu.llvm import conversions, intrinsics, primitives, vectors
from numfuse.epilogues import Epilogue, Jet
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: The slots of a group's operands. Where an operand has a matrix for each of several members, the
#: slot is the first's, and the next slot has the bytes from member to member as its row stride.
#: `sizes` has the numbers of directions and of second derivatives in the place of its strides.
SLOTS = {
    "bias": 0, "weights": 1, "grad": 2, "out": 3, "pre": 4, "sums": 5, "sizes": 6, "first": 8,
    "second": 10, "pre_dot": 12, "pre_ddot": 14, "grad_dot": 16, "grad_ddot": 18,
}  # fmt: skip
#: How many there are. Behind them are the operands of a formula, and where their gradients go; the
#: scratch rows behind those hold a point's rows.
COUNT = 20
#: Groups of at most so many directions, and of so many second derivatives, are printed as one loop.
UNROLLED = 4


class Group(NamedTuple):
    """The formulas and options that a row function of a group is printed from: its key."""

    #: The formulas (:class:`Jet`), with what is shared hoisted.
    value: Epilogue
    direction: Epilogue
    second: Epilogue
    fmt: str
    #: The format of the results.
    held: str
    backward: bool
    #: Whether the rows come from a product; else they were saved.
    product: bool
    #: Whether second derivatives have rows of their own.
    moved: bool
    #: Whether results, cotangents and saved sums are stacks, each in one array.
    stacked: bool
    #: Whether the elements of every row lie one behind the other.
    contiguous: bool
    #: Whether a forward stores the sums, and whether a backward adds up columns.
    kept: bool = False
    sums: bool = False
    #: Whether there is an array of weights; else they are the identity.
    weights: bool = False
    #: Directions, second derivatives and the pattern of weights of a group that is unrolled.
    counts: tuple[int, int] | None = None
    pattern: bytes = b""
    #: The operands of a formula: their names, and whether one element serves a row.
    operands: tuple[tuple[str, bool], ...] = ()
    #: The gradients of operands that are stored, of each point.
    slopes: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """Return how many slots there are."""
        return COUNT + len(self.operands) + len(self.slopes)

    @property
    def room(self) -> int:
        """Return the scratch rows of a group of loops before those of second derivatives."""
        shared = sum(name.startswith("shared_") for name in _names(self.value))
        return ROOM + shared + len(self.operands) + len(self.slopes)

    def slot(self, name: str) -> int:
        """Return the slot of an operand, or of the gradient of one."""
        return COUNT + [*(x for x, _ in self.operands), *self.slopes].index(name)

    def terms(self, d: int) -> list[int]:
        """Return the second derivatives of an unrolled group that a direction adds to."""
        assert self.counts is not None
        directions, seconds = self.counts
        return [s for s in range(seconds) if self.pattern[s * directions + d]]


def group(
    jet: Jet, fmt: str, held: str, counts: tuple[int, int], pattern: bytes, **how: Any
) -> Group:
    """Return a group, unrolled where it is small."""
    parts = jet.hoisted()
    names = [x for x in _names(parts.value) if x != "pre" or how.get("kept")]
    parts = parts._replace(value=parts.value.select(*names))
    if max(counts) > UNROLLED:
        return Group(*parts, fmt, held, **how)
    return Group(*parts, fmt, held, **how, counts=counts, pattern=pattern)


def scratch_rows(g: Group, directions: int, seconds: int) -> int:
    """Return the scratch rows that a group needs behind its slots, at the most."""
    held = 1 + directions + seconds
    if max(directions, seconds) <= UNROLLED:
        return held + 4 + 4 * held + len(g.operands)
    return held + g.room + seconds


# --- templates ----------------------------------------------------------------------------------
def scratch_row(context: int, row: int) -> int:
    """Address of a scratch row."""
    c = WORDS(context)
    return c[C_SCRATCH] + row * c[C_SCRATCH_STRIDE]


def hold(context: int, acc: int, member: int, n: int) -> None:
    """Keep a row of sums until its point is complete."""
    held, sums = SUMS(SCRATCH_ROW(context, COUNT + member)), SUMS(acc)
    for q in range(n):
        held[q] = sums[q]


def member_source(
    context: int, slot: int, member: int, i: int, j: int, n: int, item: int, row: int
) -> int:
    """Address of ``operand[member, i, j:j + n]`` as contiguous elements; `row` is a free row."""
    c = WORDS(context)
    step = c[3 * slot + 2]
    at = c[3 * slot] + i * c[3 * slot + 1] + j * step
    if member != 0:
        at += member * c[3 * slot + 4]
    if step == item:
        return at
    scratch = SCRATCH_ROW(context, row)
    MOVE(at, step, scratch, item, n, item)
    return scratch


def member_row(context: int, slot: int, member: int, i: int, j: int, item: int) -> int:
    """Address of ``operand[member, i, j:]``, whose elements lie one behind the other."""
    c = WORDS(context)
    return c[3 * slot] + member * c[3 * slot + 4] + i * c[3 * slot + 1] + j * item


def member_target(context: int, slot: int, member: int, i: int, j: int, item: int, row: int) -> int:
    """Where to write ``operand[member, i, j:]`` as contiguous elements."""
    c = WORDS(context)
    step = c[3 * slot + 2]
    if step != item:
        return SCRATCH_ROW(context, row)
    at = c[3 * slot] + i * c[3 * slot + 1] + j * step
    if member != 0:
        at += member * c[3 * slot + 4]
    return at


def finish_member(
    context: int, slot: int, member: int, i: int, j: int, n: int, item: int, row: int
) -> None:
    """Scatter a written scratch row to its place; nothing for a contiguous operand."""
    c = WORDS(context)
    step = c[3 * slot + 2]
    if step != item:
        at = c[3 * slot] + i * c[3 * slot + 1] + j * step
        if member != 0:
            at += member * c[3 * slot + 4]
        MOVE(SCRATCH_ROW(context, row), item, at, step, n, item)


# --- text ---------------------------------------------------------------------------------------
def _head(name: str) -> list[str]:
    head = f"def {name}(context, acc, i, j, n):"
    return [head, "    WIDE_VECTORS()", "    c = WORDS(context)"]


#: The slots of an array's value, directions and second derivatives, and of a stack of them.
_PLACES = {
    "out": ("out", "first", "second", "first"),
    "pre": ("pre", "pre_dot", "pre_ddot", "pre_dot"),
    "grad": ("grad", "grad_dot", "grad_ddot", "grad_dot"),
}
_VALUE, _DIRECTION, _SECOND = range(3)


def _member(order: int, index: Any) -> str:
    """Return the number of a member of a stack."""
    return ("0", f"1 + {index}", f"1 + directions + {index}")[order]


class _Text:
    """The lines of a row function; operands are opened where they are first needed."""

    def __init__(self, g: Group, name: str) -> None:
        self.g, self.acc = g, library.accumulator(g.fmt)
        self.lines = _head(name)
        self.ends: list[str] = []
        self.row = 0  # of the scratch rows behind those that are held

    def add(self, text: str, depth: int = 1) -> None:
        self.lines.append("    " * depth + text)

    def scratch(self) -> str:
        """Return the number of a scratch row of its own."""
        self.row += 1
        return f"free + {self.row - 1}"

    def _place(self, of: str, order: int, index: Any) -> str:
        """Return the slot of a member of an array, and its number there."""
        if of == "q" or self.g.stacked:
            slot = "first" if of == "q" else _PLACES[of][3]
            return f"{SLOTS[slot]}, {_member(order, index)}"
        return f"{SLOTS[_PLACES[of][order]]}, {index}"

    def read(self, name: str, place: str, fmt: str, depth: int = 1) -> str:
        """Open a row of an operand; return what reads an element."""
        item = vectors.itemsize(fmt)
        at = f"MEMBER_ROW(context, {place}, point, j, {item})"
        if not self.g.contiguous:
            how = f"{place}, point, j, n, {item}, {self.scratch()}"
            at = f"MEMBER_SOURCE(context, {how})"
        self.add(f"from_{name} = AT_{fmt}({at})", depth)
        return f"WIDEN_{fmt}(from_{name}[q])"

    def operand(self, name: str) -> str:
        """Open a row of an operand of a formula; return what reads an element."""
        slot, fmt = self.g.slot(name), self.g.fmt
        if not dict(self.g.operands)[name]:
            return self.read(name, f"{slot}, 0", fmt)
        self.add(f"from_{name} = AT_{fmt}(PLACE_OF(context, {slot}, point, 0))")
        self.add(f"one_{name} = WIDEN_{fmt}(from_{name}[0])")
        return f"one_{name}"

    def slope(self, name: str) -> str:
        """Open a row of an operand's gradient; return what stores an element, less its value."""
        item = vectors.itemsize(self.acc)
        at = f"MEMBER_ROW(context, {self.g.slot(name)}, 0, point, j, {item})"
        self.add(f"to_{name} = AT_{self.acc}({at})")
        return f"to_{name}[q] = "

    def totals(self) -> tuple[str, ...]:
        """Return what all parts of a backward add to."""
        return ("d_z", *self.g.slopes) if self.g.backward else ()

    def point(self) -> dict[str, str]:
        """Open what belongs to a point's value; return what reads an element, by name."""
        inputs = {"z": self.sum_of("z", _VALUE)}
        if "bias" in self.g.value.inputs:
            inputs["bias"] = self.read("bias", f"{SLOTS['bias']}, 0", self.g.fmt)
        inputs |= {name: self.operand(name) for name, _ in self.g.operands}
        if "grad" in self.g.value.inputs:
            inputs["grad"] = self.grad("grad", _VALUE)
        return inputs

    def grad(self, name: str, order: int, index: Any = 0, depth: int = 1) -> str:
        """Open a cotangent."""
        return self.read(name, self._place("grad", order, index), self.g.fmt, depth)

    def write(self, name: str, of: str, order: int, index: Any = 0, depth: int = 1) -> str:
        """Open a member of a result; return what stores an element, less its value."""
        fmt = self.acc if of == "pre" else self.g.held
        item, place = vectors.itemsize(fmt), self._place(of, order, index)
        if self.g.contiguous:
            at = f"MEMBER_ROW(context, {place}, point, j, {item})"
            self.add(f"to_{name} = AT_{fmt}({at})", depth)
            return f"to_{name}[q] = NARROW_{fmt}"
        row = self.scratch()
        how = f"{place}, point, j, {item}, {row}"
        self.add(f"to_{name} = AT_{fmt}(MEMBER_TARGET(context, {how}))", depth)
        self.ends.append(f"FINISH_MEMBER(context, {place}, point, j, n, {item}, {row})")
        return f"to_{name}[q] = NARROW_{fmt}"

    def finish(self, depth: int = 1) -> None:
        """Bring what was written to its place."""
        for line in self.ends:
            self.add(line, depth)
        self.ends = []

    def sum_of(self, name: str, order: int, index: Any = 0, depth: int = 1) -> str:
        """Open a row of sums, held or saved; return what reads an element."""
        if self.g.product:
            row = f"COUNT + {_member(order, index)}"
            self.add(f"from_{name} = AT_{self.acc}(SCRATCH_ROW(context, {row}))", depth)
            return f"from_{name}[q]"
        return self.read(name, self._place("pre", order, index), self.acc, depth)

    def opened(self) -> None:
        """Begin: say which point and member the row is, and hold it until its point is complete."""
        g = self.g
        if g.counts is not None:
            self.add(f"directions, seconds = {g.counts[0]}, {g.counts[1]}")
        else:
            size = 3 * SLOTS["sizes"]
            self.add(f"directions, seconds = c[{size + 1}], c[{size + 2}]")
        self.add(f"members = 1 + directions{' + seconds' if g.moved else ''}")
        self.add("free = COUNT + members")
        if not g.product:
            self.add("point = i")
            return
        self.add("point = i // members")
        self.add("member = i - point * members")
        self.add("HOLD(context, acc, member, n)")
        self.add("if member + 1 < members:")
        self.add("return", 2)


def _called(part: str, of: Epilogue, inputs: dict[str, str], end: str = "") -> str:
    """Return the line that calls a part's formulas."""
    names = ", ".join(f"new_{name}{end}" for name, _ in of.results)
    return f"{names} = {part}({', '.join(inputs[name] for name in of.inputs)})"


def _names(of: Epilogue) -> list[str]:
    return [name for name, _ in of.results]


def _without_bent(of: Epilogue) -> Epilogue:
    """Return a direction's formulas where no weight is its: all but those of the second order."""
    kept = of.without("grad_bent")
    return kept.select(*[name for name in _names(kept) if name != "bent"])


def unrolled(g: Group, name: str) -> str:
    """Return the row function of a small group: one loop."""
    assert g.counts is not None
    t = _Text(g, name)
    t.opened()
    directions, seconds = g.counts
    inputs = t.point()
    inputs |= {x: f"new_{x}" for x in _names(g.value) if x.startswith("shared_")}
    body = [_called("VALUE", g.value, inputs)] if g.value.results else []
    bent = "bent" in _names(g.direction) or "grad_bent" in g.direction.inputs
    if g.weights and bent:
        for d in range(directions):
            for s in g.terms(d):
                t.add(f"w_{s}_{d} = AT_{t.acc}(PLACE_OF(context, {SLOTS['weights']}, {s}, {d}))[0]")
    totals = {x: [f"new_{x}"] if x in _names(g.value) else [] for x in t.totals()}
    sums: list[list[str]] = [[] for _ in range(seconds)]
    grads = "grad_ddot" in g.second.inputs or "grad_bent" in g.direction.inputs
    ddots = []
    for s in range(seconds if grads else 0):
        ddots.append(t.grad(f"grad_ddot_{s}", _SECOND, s))
    if not g.backward:
        body.append(f"{t.write('out', 'out', _VALUE)}(new_out)")
        if g.kept:
            body.append(f"{t.write('pre', 'pre', _VALUE)}(new_pre)")
    for d in range(directions):
        terms = [(f"w_{s}_{d} * " if g.weights else "", s) for s in g.terms(d)] if bent else []
        part, of = ("BENT", g.direction) if terms else ("FLAT", _without_bent(g.direction))
        own = {"z_dot": t.sum_of(f"z_dot_{d}", _DIRECTION, d)}
        if "grad_dot" in of.inputs:
            own["grad_dot"] = t.grad(f"grad_dot_{d}", _DIRECTION, d)
        if g.backward and terms:
            own["grad_bent"] = " + ".join(f"{w}{ddots[s]}" for w, s in terms)
        if of.results:
            body.append(_called(part, of, inputs | own, f"_{d}"))
        result, of_result = ("d_z_dot", "q") if g.backward else ("out_dot", "out")
        made = f"new_{result}_{d}" if result in _names(of) else "ZERO"
        body.append(f"{t.write(f'{result}_{d}', of_result, _DIRECTION, d)}({made})")
        for x, added in totals.items():
            added += [f"new_{x}_{d}"] * (x in _names(of))
        for w, s in terms if not g.backward else ():
            sums[s].append(f"{w}new_bent_{d}")
        if g.kept:
            body.append(f"{t.write(f'pre_dot_{d}', 'pre', _DIRECTION, d)}({own['z_dot']})")
    for s in range(seconds):
        own, at = {}, f"_{directions + 1 + s}"
        if g.moved:
            own["z_ddot"] = t.sum_of(f"z_ddot_{s}", _SECOND, s)
        if "grad_ddot" in g.second.inputs:
            own["grad_ddot"] = ddots[s]
        if g.second.results:
            body.append(_called("SECOND", g.second, inputs | own, at))
        for x, added in totals.items():
            added += [f"new_{x}{at}"] * (x in _names(g.second))
        if not g.backward:
            every = [f"new_straight{at}"] * ("straight" in _names(g.second)) + sums[s]
            made = " + ".join(every) or "ZERO"
            body.append(f"{t.write(f'out_ddot_{s}', 'out', _SECOND, s)}({made})")
            if g.kept and g.moved:
                body.append(f"{t.write(f'pre_ddot_{s}', 'pre', _SECOND, s)}({own['z_ddot']})")
        elif g.moved:
            made = f"new_d_z_ddot{at}" if "d_z_ddot" in _names(g.second) else "ZERO"
            body.append(f"{t.write(f'd_z_ddot_{s}', 'q', _SECOND, s)}({made})")
    if g.backward:
        body.append(f"total = {' + '.join(totals['d_z']) or 'ZERO'}")
        body.append(f"{t.write('d_z', 'q', _VALUE)}(total)")
        for x in g.slopes:
            body.append(f"{t.slope(x)}{' + '.join(totals[x]) or 'ZERO'}")
    if g.sums:
        t.add(f"sums = AT_{t.acc}(OPEN_SUMS(context, {SLOTS['sums']}, point, j, n))")
        body.append("sums[q] = sums[q] + total")
    t.add("for q in range(n):")
    for line in body:
        t.add(line, 2)
    t.finish()
    return "\n".join([*t.lines, ""])


def looped(g: Group, name: str) -> str:
    """Return the row function of a large group: loops over directions and second derivatives."""
    t = _Text(g, name)
    t.opened()
    inputs = t.point()
    body = [_called("VALUE", g.value, inputs)] if g.value.results else []
    if not g.backward:
        body.append(f"{t.write('out', 'out', _VALUE)}(new_out)")
        if g.kept:
            body.append(f"{t.write('pre', 'pre', _VALUE)}(new_pre)")
    rows = [x for x in _names(g.value) if x.startswith("shared_")]
    totals = {x: f"total_{x}[q]" for x in t.totals()}
    for x in (*rows, *(f"total_{x}" for x in totals), "term"):
        t.add(f"{x} = AT_{t.acc}(SCRATCH_ROW(context, {t.scratch()}))")
    body += [f"{x}[q] = new_{x}" for x in rows]
    for x, total in totals.items():
        body.append(f"{total} = {f'new_{x}' if x in _names(g.value) else 'ZERO'}")
    inputs |= {x: f"{x}[q]" for x in rows}

    def loop(lines: Sequence[str], depth: int) -> None:
        t.add("for q in range(n):", depth)
        for line in lines:
            t.add(line, depth + 1)

    loop(body, 1)
    t.finish()
    bent = "bent" in _names(g.direction) or "grad_bent" in g.direction.inputs

    def weighted(line: Callable[[str], Sequence[str]], before: Callable[[], None]) -> None:
        """Add a loop over the second derivatives that direction d adds to."""
        if not g.weights:
            t.add("s = d", 2)
            before_depth.append(2)
            before()
            loop(line("one[q]" if g.backward else "term[q]"), 2)
        else:
            t.add("for s in range(seconds):", 2)
            t.add(f"w = AT_{t.acc}(PLACE_OF(context, {SLOTS['weights']}, s, d))[0]", 3)
            t.add("if w != ZERO:", 3)
            before_depth.append(4)
            before()
            loop(line("w * one[q]" if g.backward else "w * term[q]"), 4)

    before_depth: list[int] = []
    sums_from = t.row  # the rows of sums of second derivatives, the last
    _second_sums(g, t, inputs, loop)
    # --- directions
    t.add("for d in range(directions):")
    own = {"z_dot": t.sum_of("z_dot", _DIRECTION, "d", 2)}
    if "grad_dot" in g.direction.inputs:
        own["grad_dot"] = t.grad("grad_dot", _DIRECTION, "d", 2)
    if "grad_bent" in g.direction.inputs:
        loop(["term[q] = ZERO"], 2)
        reads: list[str] = []

        def opened() -> None:
            reads.append(t.grad("one", _SECOND, "s", before_depth[-1]))

        weighted(lambda w: [f"term[q] = term[q] + {w.replace('one[q]', reads[0])}"], opened)
        own["grad_bent"] = "term[q]"
    body = [_called("BENT", g.direction, inputs | own)] if g.direction.results else []
    result, of_result = ("d_z_dot", "q") if g.backward else ("out_dot", "out")
    made = f"new_{result}" if result in _names(g.direction) else "ZERO"
    body.append(f"{t.write(result, of_result, _DIRECTION, 'd', 2)}({made})")
    if g.kept:
        body.append(f"{t.write('pre_dot', 'pre', _DIRECTION, 'd', 2)}({own['z_dot']})")
    body += [f"{y} = {y} + new_{x}" for x, y in totals.items() if x in _names(g.direction)]
    if "bent" in _names(g.direction):
        body.append("term[q] = new_bent")
    loop(body, 2)
    t.finish(2)
    if not g.backward and bent:

        def opened_sum() -> None:
            t.add(
                f"sum_s = AT_{t.acc}(SCRATCH_ROW(context, free + {g.room} + s))", before_depth[-1]
            )

        weighted(lambda w: [f"sum_s[q] = sum_s[q] + {w}"], opened_sum)
    # --- second derivatives
    if not g.backward or g.moved or any(x in _names(g.second) for x in totals):
        _second_results(g, t, inputs, loop)
    if g.backward:
        body = [f"{t.write('d_z', 'q', _VALUE)}(total_d_z[q])"]
        body += [f"{t.slope(x)}{totals[x]}" for x in g.slopes]
        if g.sums:
            t.add(f"sums = AT_{t.acc}(OPEN_SUMS(context, {SLOTS['sums']}, point, j, n))")
            body.append("sums[q] = sums[q] + total_d_z[q]")
        loop(body, 1)
        t.finish()
    assert t.row <= g.room and sums_from <= g.room
    return "\n".join([*t.lines, ""])


#: Scratch rows of a group of loops before those of its sums of second derivatives, and before what
#: a formula asks for.
ROOM = 16


def _second_sums(g: Group, t: _Text, inputs: dict[str, str], loop: Any) -> None:
    """Begin the sums of a forward's second derivatives, to which directions add."""
    if g.backward:
        return
    t.add("for s in range(seconds):")
    t.add(f"sum_s = AT_{t.acc}(SCRATCH_ROW(context, free + {g.room} + s))", 2)
    if not g.second.results:
        loop(["sum_s[q] = ZERO"], 2)
        return
    own = {"z_ddot": t.sum_of("z_ddot", _SECOND, "s", 2)}
    loop([_called("SECOND", g.second, inputs | own), "sum_s[q] = new_straight"], 2)


def _second_results(g: Group, t: _Text, inputs: dict[str, str], loop: Any) -> None:
    """Store what belongs to each second derivative."""
    t.add("for s in range(seconds):")
    body = []
    if not g.backward:
        t.add(f"sum_s = AT_{t.acc}(SCRATCH_ROW(context, free + {g.room} + s))", 2)
        body.append(f"{t.write('out_ddot', 'out', _SECOND, 's', 2)}(sum_s[q])")
        if g.kept and g.moved:
            z = t.sum_of("z_ddot", _SECOND, "s", 2)
            body.append(f"{t.write('pre_ddot', 'pre', _SECOND, 's', 2)}({z})")
    else:
        own = {}
        if g.moved:
            own["z_ddot"] = t.sum_of("z_ddot", _SECOND, "s", 2)
        if "grad_ddot" in g.second.inputs:
            own["grad_ddot"] = t.grad("grad_ddot", _SECOND, "s", 2)
        if g.second.results:
            body.append(_called("SECOND", g.second, inputs | own))
        totals = {x: f"total_{x}[q]" for x in t.totals()}
        body += [f"{y} = {y} + new_{x}" for x, y in totals.items() if x in _names(g.second)]
        if g.moved:
            made = "new_d_z_ddot" if "d_z_ddot" in _names(g.second) else "ZERO"
            body.append(f"{t.write('d_z_ddot', 'q', _SECOND, 's', 2)}({made})")
    loop(body, 2)
    t.finish(2)


# --- kernels ------------------------------------------------------------------------------------
def _bound(fmt: str, count: int = COUNT) -> dict[str, Any]:
    """Return the names that the row functions of groups of so many slots bind."""
    acc = library.accumulator(fmt)
    names: dict[str, Any] = dict(library.row_names(fmt, acc))
    context = {"WORDS": intrinsics.make_elements("int64"), **protocol.SCRATCH}
    bits = {f"BITS{n}": intrinsics.make_elements(f"uint{n}") for n in (16, 32, 64)}
    context["MOVE"] = specialise.device(elementwise.move, **bits)
    context["SCRATCH_ROW"] = specialise.device(scratch_row, **context)
    context |= {"COUNT": count, "SUMS": names["SUMS"]}
    names |= context
    for template in (hold, member_row, member_source, member_target, finish_member):
        names[template.__name__.upper()] = specialise.device(template, **context)
    for stored in dict.fromkeys((fmt, acc, library.grad_pre_format(fmt))):
        names[f"AT_{stored}"] = intrinsics.make_elements(stored)
        names[f"WIDEN_{stored}"] = conversions.make_widen(stored, acc)
        names[f"NARROW_{stored}"] = conversions.make_narrow(stored, acc)
    names["ZERO"] = library.zero(acc)
    return names


@library.by_formula
def row(g: Group) -> specialise.Kernel:
    """Compile (or find) the row function of a group."""
    acc = library.accumulator(g.fmt)
    parts = {"VALUE": g.value, "BENT": g.direction, "SECOND": g.second}
    parts["FLAT"] = _without_bent(g.direction)
    names = _bound(g.fmt, g.slots)
    for name, of in parts.items():
        if of.results:
            names[name] = primitives.scalar_function(of.graphs, acc, of.inputs)
    called = "jet_backward_row" if g.backward else "jet_row"
    printed = (looped if g.counts is None else unrolled)(g, called)
    return specialise.kernel(printer.template(called, printed), **names, PRINTED=printed)


def _moved(backward: bool, fmts: tuple[str, str], there: tuple[bool, bool, bool]) -> str:
    """Return a row function that moves rows of members: to a stack, or from a product of one."""
    source, target = fmts
    called = "jet_scatter_row" if backward else "jet_gather_row"
    lines = _head(called)
    size = 3 * SLOTS["sizes"]
    lines += [f"    directions, members = c[{size + 1}], 1 + c[{size + 1}] + c[{size + 2}]"]
    lines += ["    point = i // members", "    member = i - point * members"]
    wide = vectors.itemsize(target)
    one, two = f"{SLOTS['first']}, member - 1", f"{SLOTS['second']}, member - 1 - directions"
    slots = f"{SLOTS['grad']}, 0", one, two
    tests = "if member == 0:", "elif member <= directions:", "else:"
    if backward:
        slots = f"{SLOTS['out']}, 0", *slots[1:]
        lines.append(f"    source = AT_{source}(acc)")
    else:
        place = f"S_OUT, i, j, {wide}"
        lines.append(f"    target = AT_{target}(TARGET_ROW(context, {place}))")
    for test, slot, is_there in zip(tests, slots, there, strict=True):
        lines.append(f"    {test}")
        if not is_there:
            lines.append("        return")
        elif backward:
            lines.append(f"        at = MEMBER_TARGET(context, {slot}, point, j, {wide}, COUNT)")
        else:
            lines.append(f"        at = MEMBER_SOURCE(context, {slot}, point, j, n, {wide}, COUNT)")
    if backward:
        lines.append(f"    target = AT_{target}(at)")
    else:
        lines.append(f"    source = AT_{source}(at)")
    value = "source[q]" if source == target else f"NARROW_{target}(source[q])"
    lines += ["    for q in range(n):", f"        target[q] = {value}"]
    for test, slot, is_there in zip(tests, slots, there, strict=True):
        if backward:
            lines.append(f"    {test}")
            end = f"FINISH_MEMBER(context, {slot}, point, j, n, {wide}, COUNT)"
            lines.append(f"        {end}" if is_there else "        return")
    return "\n".join([*lines, ""])


@library.by_formula
def gather(fmt: str) -> specialise.Kernel:
    """``stack[i] = a, a_dot or a_ddot``: members of a point, one behind the other."""
    printed = _moved(False, (fmt, fmt), (True, True, True))
    names = _bound(fmt)
    return specialise.kernel(printer.template("jet_gather_row", printed), **names, PRINTED=printed)


@library.by_formula
def scatter(fmt: str, there: tuple[bool, bool, bool]) -> specialise.Kernel:
    """``d_a, d_a_dot or d_a_ddot = acc``, of those that are there."""
    printed = _moved(True, (library.accumulator(fmt), fmt), there)
    names = _bound(fmt)
    return specialise.kernel(printer.template("jet_scatter_row", printed), **names, PRINTED=printed)
