"""A layer's jet, and its backward, as passes over groups of rows.

The members of a point are rows one behind the other of a *stack*: the caller's own where its arrays
lie so, else gathered for a block of points. Forward: the tall product of the stack and B, whose row
function has the sums of a point in scratch rows and writes the results. Backward: the same (or a
pass over saved sums) writes a stack of gradients by the sums, Q, for a block of points; d_a and its
likes are the rows of the tall product of Q and B', d_b is one of the two stacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from numfuse.backends.cpu import fused, tiling
from numfuse.backends.cpu.descriptors import Group, Slots
from numfuse.backends.cpu.kernels import groups, library, protocol, rows
from numfuse.backends.cpu.launch.sequence import Operand, Program, temporary
from numfuse.backends.cpu.llvm import vectors
from numfuse.backends.cpu.schedule import Factors, Part, Pass, Work, record
from numfuse.backends.cpu.sums import Partials, partial_sums, summed_axes
from numfuse.problem.jets import MEMBERS, SHARED
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.problem.jets import JetProblem

Operands = Mapping[str, Operand]


def jet(p: JetProblem, names: Sequence[str], threads: int, precision: str = "ieee") -> Program:
    """Return the program of a jet's problem."""
    arrays: dict[str, Operand] = {}
    for name in names:
        x = p.arrays.get(name)
        if x is None or (not x.size and name in MEMBERS):
            continue
        lead = name in MEMBERS
        form = x.shape[lead:], x.strides[lead:], format_of(x.dtype), x.itemsize
        arrays[name] = Operand(name, *form)
    used = _used(p, arrays)
    d_b = used.get("d_b")
    if d_b is not None and _joins(p) and _is_plain(p, d_b):
        used["d_b"] = _one_row(p, d_b)
    most = protocol.MOST_SLOTS - groups.COUNT
    if len(p.operands) + len(p.slopes) > most:
        raise ValueError(
            f"the jet of an epilogue on the CPU must have at most {most} operands and gradients of "
            f"operands, got {len(p.operands) + len(p.slopes)}"
        )
    fmt = format_of(p.dtype)
    rows_, members = max(1, p.m), max(1, math.prod(p.batch))
    if p.backward or not _in_place(p):
        size = vectors.itemsize(library.grad_pre_format(fmt)) * p.members
        width = p.n * p.backward * (1 + len(p.operands)) + p.k * (not _in_place(p))
        rows_, together = _block(p, size * max(1, width), library.chunk(fmt))
        members = members if _sums_left(p) else together
    work = partial(_backward if p.backward else _forward, p)
    one_row = {x for y in p.operands for x in (y, f"d_{y}") if x in used and _is_row(p, used[x])}
    by_rows = frozenset(name for name in used if name not in SHARED and name not in one_row)
    part = Part(used, rows_, members, work, by_rows, ("d_b", "d_bias", *p.slopes))
    return record(p, names, [part], threads, precision=precision)


#: Bytes of a block's own stacks, which its passes read again from the caches of the cores.
BLOCK_BYTES = 4 << 20


def _block(p: JetProblem, nbytes: int, chunk: int) -> tuple[int, int]:
    """Return the points of a block, in whole chunks, and how many batch elements it is of."""
    points = max(chunk, BLOCK_BYTES // nbytes)
    if p.m <= points:
        return max(1, p.m), max(1, points // max(1, p.m))
    return tiling.round_up(-(-p.m // -(-p.m // points)), chunk), 1


def _is_row(p: JetProblem, x: Operand) -> bool:
    """Whether an operand of a formula, or its gradient, has one row for all points."""
    return x.shape[-2] == 1 != p.m


def _used(p: JetProblem, arrays: Operands) -> dict[str, Operand]:
    """Return the operands that the passes of a call read or write."""
    left = not p.backward or "pre" not in arrays or "d_b" in arrays
    unused = set() if left else {"a", "a_dot", "a_ddot"}
    return {name: x for name, x in arrays.items() if name not in unused}


def _in_place(p: JetProblem) -> bool:
    """Whether the caller's operands are a stack."""
    unused = p.backward and p.d_b is None and p.pre is not None
    return p.members == 1 or unused or p.stacked


def _sums_left(p: JetProblem) -> bool:
    """Whether a gradient of the left operand is summed over batch axes."""
    return any(
        name in p.arrays and p.arrays[name].shape[lead:-2] != p.batch
        for name, lead in (("d_a", 0), ("d_a_dot", 1), ("d_a_ddot", 1))
    )


def _tall(p: JetProblem, x: Operand) -> Operand:
    """Return a stack as a matrix with a row for each member of each point."""
    if not p.stacked:
        return x
    *batch, m, n = x.shape
    *steps, row, column = x.strides
    shape = *batch, m * p.members, n // p.members
    return x._replace(shape=shape, strides=(*steps, row // p.members, column))


def _value(p: JetProblem, x: Operand) -> Operand:
    """Return the first member's matrix of a stack."""
    return x._replace(shape=(*x.shape[:-1], p.n))


def _slots(
    p: JetProblem, given: Mapping[str, Operand | None], seconds: int, over: Operand,
    more: Sequence[Operand] = (),
) -> Slots:  # fmt: skip
    """Return operands in the slots of a group: each member's step is behind the first one's."""
    every: list[Operand | None] = [None] * groups.COUNT
    for name, x in given.items():
        if x is None:
            continue
        slot = groups.SLOTS[name]
        every[slot] = x
        if slot >= groups.SLOTS["first"]:
            step = x.shape[-1] * x.itemsize  # in a stack
            if x.name in MEMBERS:
                step = p.arrays[x.name].strides[0]
            every[slot + 1] = x._replace(shape=(2, 2), strides=(step, 0))
    every[groups.SLOTS["sizes"]] = over._replace(shape=(2, 2), strides=(p.directions, seconds))
    return Slots.of([*every, *more])


def _group(p: JetProblem, g: groups.Group) -> Group:
    return Group(p.members, groups.scratch_rows(g, p.directions, p.seconds))


def _operands(p: JetProblem, x: Operands) -> tuple[tuple[str, bool], ...]:
    """Return the operands of a formula, and whether one element of each serves a row."""
    return tuple([(name, x[name].shape[-1] == 1 != p.n) for name in p.operands])


def _contiguous(p: JetProblem, x: Operands) -> bool:
    """Whether what a row function of a group reads and writes lies by rows."""
    others = {"a", "b", "d_a", "d_b", "a_dot", "a_ddot", "d_a_dot", "d_a_ddot", "weights"}
    others |= {*p.slopes, *(name for name, once in _operands(p, x) if once)}
    return all(y.strides[-1] == y.itemsize for name, y in x.items() if name not in others)


def _stack(p: JetProblem, x: Operands, own: list[Operand], passes: list[Pass]) -> Operand:
    """Return the stack of the left operands, tall; where it is gathered, that is the first pass."""
    a = x["a"]
    if _in_place(p):
        return _tall(p, a)
    *batch, m, k = a.shape
    made = temporary("stack", (*batch, m * p.members, k), a.fmt)
    own.append(made)
    slots = {"out": made, "grad": a, "first": x.get("a_dot"), "second": x.get("a_ddot")}
    row = groups.gather(format_of(p.dtype))
    group = Group(p.members, 1)
    passes.append(Pass(row, _slots(p, slots, p.seconds * p.moved, made), group=group))
    return made


def _forward(p: JetProblem, x: Operands, batch: tuple[int, ...]) -> Work:
    own: list[Operand] = []
    passes: list[Pass] = []
    stack = _stack(p, x, own, passes)
    fmt = format_of(p.dtype)
    kept = "pre" in x
    g = groups.group(
        p.jet, fmt, fmt, (p.directions, p.seconds), p.pattern, backward=False, product=True,
        moved=p.moved, stacked=p.stacked, contiguous=_contiguous(p, x), kept=kept,
        weights="weights" in x, operands=_operands(p, x),
    )  # fmt: skip
    given = {"bias": x.get("bias"), "weights": x.get("weights"), "out": x["out"]}
    if p.stacked:
        given |= {"first": _value(p, x["out"])}
        given |= {"pre_dot": _value(p, x["pre"])} if kept else {}
    else:
        given |= {"first": x.get("out_dot"), "second": x.get("out_ddot")}
        given |= {name: x.get(name) for name in ("pre", "pre_dot", "pre_ddot")}
    slots = _slots(p, given, p.seconds, x["out"], [x[name] for name in p.operands])
    passes.append(Pass(groups.row(g), slots, (stack, x["b"]), group=_group(p, g)))
    return Work(passes, own=own)


def _backward(p: JetProblem, x: Operands, batch: tuple[int, ...]) -> Work:
    fmt, saved = format_of(p.dtype), "pre" in x
    held = library.grad_pre_format(fmt)
    own: list[Operand] = []
    passes: list[Pass] = []
    m, n = _points(p, x), p.n
    stack = None
    if not saved or "d_b" in x:
        stack = _stack(p, x, own, passes)
    q = temporary("stack of q", (*batch, m * p.members, n), held)
    own.append(q)
    sums = None
    if "d_bias" in x:
        sums = partial_sums(p, "sums", x["d_bias"], (m, n), batch)
        own.append(sums)
    g = groups.group(
        p.jet, fmt, held, (p.directions, p.seconds), p.pattern, backward=True, product=not saved,
        moved=p.moved, stacked=p.stacked, contiguous=_contiguous(p, x), sums=sums is not None,
        weights="weights" in x, operands=_operands(p, x), slopes=p.slopes,
    )  # fmt: skip
    first = q._replace(
        shape=(*batch, m, n), strides=(*q.strides[:-2], q.strides[-2] * p.members, q.strides[-1])
    )
    given: dict[str, Operand | None] = {"out": first, "first": first, "sums": sums}
    given["weights"] = x.get("weights")
    if p.stacked:
        given |= {"grad_dot": _value(p, x["grad"])}
        given |= {"pre_dot": _value(p, x["pre"])} if saved else {}
    else:
        given |= {name: x.get(name) for name in ("grad", "grad_dot", "grad_ddot")}
        given |= {name: x.get(name) for name in ("pre", "pre_dot", "pre_ddot")}
    if not saved:
        given["bias"] = x.get("bias")
    acc = format_of(p.acc_dtype)
    wholes = [temporary(f"whole_{name}", (*batch, m, n), acc) for name in p.slopes]
    own += wholes
    slots = _slots(p, given, p.seconds, q, [*(x[name] for name in p.operands), *wholes])
    factors = None if saved or stack is None else (stack, x["b"])
    passes.append(Pass(groups.row(g), slots, factors, group=_group(p, g)))
    passes += _left(p, x, q, batch)
    gradients: dict[str, Sequence[Factors]] = {}
    partials = {} if sums is None else {"d_bias": Partials(sums)}
    summed = frozenset[str]()
    if wholes:
        there = {name: x[name] for name in p.slopes} | {y.name: y for y in wholes}
        added = fused.work(p.operand_sums(), there, batch)
        passes += added.passes
        gradients |= added.gradients
        partials |= added.partials
        own += added.own
        summed = added.sums
    if "d_b" in x and stack is not None:
        if not _joins(p):
            gradients["d_b"] = [(stack.turned(), q)]
        else:
            made = None
            if not _is_plain(p, p.arrays["d_b"]):
                made = _one_row(p, temporary("joined d_b", (p.k, p.n), fmt))
                own.append(made)
            partials["d_b"] = Partials(_pieces_of_d_b(p, stack, q, own, passes), made=made)
    return Work(passes, gradients, partials, own, summed)


#: Pieces of the sum over rows in d_b, at the most, and the fewest rows of one: where K and N are a
#: few tiles, cells of the result alone would leave threads without work.
PIECES, PIECE = 16, 512


def _joins(p: JetProblem) -> bool:
    """Whether d_b is joined from pieces of the sum over rows."""
    return not p.batch and 1 < p.k * p.n <= p.m * p.members * PIECE // PIECES


def _is_plain(p: JetProblem, d_b: Any) -> bool:
    """Whether d_b is contiguous by rows; else its sum is made in an array of the call's own."""
    return bool(d_b.strides == (p.n * d_b.itemsize, d_b.itemsize))


def _one_row(p: JetProblem, d_b: Operand) -> Operand:
    """Return d_b, which is contiguous, as one row."""
    size = p.k * p.n
    return d_b._replace(shape=(1, size), strides=(size * d_b.itemsize, d_b.itemsize))


def _pieces_of_d_b(
    p: JetProblem, stack: Operand, q: Operand, own: list[Operand], passes: list[Pass]
) -> Operand:
    """Add the products of pieces of the rows to the passes; return where they are."""
    points, rows_ = q.shape[-2] // p.members, q.shape[-2]
    count = PIECES
    while count > 1 and (points % count or rows_ < count * PIECE):
        count //= 2
    acc, length = format_of(p.acc_dtype), rows_ // count

    def cut(y: Operand) -> Operand:
        row, column = y.strides
        return y._replace(shape=(count, length, y.shape[-1]), strides=(length * row, row, column))

    made = temporary("pieces of d_b", (count, p.k, p.n), acc)
    own.append(made)
    factors = cut(stack).turned(), cut(q)
    passes.append(Pass(rows.store(acc), Slots(out=made), factors, batch=(count,)))
    return temporary(made.name, (count, p.k * p.n), acc)


def _left(p: JetProblem, x: Operands, q: Operand, batch: tuple[int, ...]) -> list[Pass]:
    """Return the product for the gradients of the left operands, of those that are wanted."""
    names = "d_a", "d_a_dot", "d_a_ddot"
    there = [x.get(name) for name in names]
    some = next((y for y in there if y is not None), None)
    if some is None:
        return []
    factors = q, x["b"].turned()
    summed = summed_axes(some, batch)
    fmt = format_of(p.dtype)
    d_a = x.get("d_a")
    if d_a is not None and (p.stacked or p.members == 1):
        return [Pass(rows.store(fmt), Slots(out=_tall(p, d_a)), factors, summed=summed)]
    row = groups.scatter(fmt, tuple([y is not None for y in there]))
    slots = {"out": there[0], "first": there[1], "second": there[2]}
    made = _slots(p, slots, p.seconds * p.moved, some)
    return [Pass(row, made, factors, group=Group(p.members, 1), summed=summed)]


def _points(p: JetProblem, x: Operands) -> int:
    """Return the points of a block."""
    apart = {*SHARED, *p.operands, *p.slopes}
    return max(y.shape[-2] for name, y in x.items() if name not in apart)
