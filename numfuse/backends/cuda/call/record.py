"""A call on arrays of a device as a program: the problem, with every check, is made of ghosts."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse import epilogues
from numfuse.backends import Call
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.call.arrays import ghost
from numfuse.backends.cuda.driver.device import Device
from numfuse.backends.cuda.driver.devices import made
from numfuse.backends.cuda.plan import fused, jets, lower, networks, second_order
from numfuse.backends.cuda.plan.product import NUMBER
from numfuse.backends.cuda.plan.program import Program, Recorder, View, strides_of
from numfuse.problem import gates, product
from numfuse.problem.fields import FIELDS
from numfuse.problem.operands import format_of
from numfuse.runtime.replay import Replay
from numfuse.runtime.views import address, bounds, dtype_of

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.expr import Expr

#: The recorded calls of this process, of all devices; who launches one holds it.
REPLAY: Replay[Any] = Replay(tiling.KEPT_PLANS, 0)
#: What drops the calls that kinds of arrays recall by themselves (`foreign.Kind.recall`).
RECALLS: list[Callable[[], None]] = []
#: Of the function that is noted, if one is (`series.Notes`); `entry.run` adds to it.
NOTES: ContextVar[Any] = ContextVar("notes", default=None)
#: What runs a kind of problem.
_OPERATIONS: dict[str, Callable[[Recorder, Any, lower.Bind], None]] = {
    "forward": lower.forward,
    "backward": lower.backward,
    "double_backward": second_order.double_backward,
    "tangent": second_order.tangent,
    **dict.fromkeys(("fused", *epilogues.GATES), fused.fused),
    "jet": jets.jet,
    "network": networks.network,
}


def forget(owner: Device | None = None) -> None:
    """Let every choice that was made for a call be made again; None: on all devices."""
    for one in made() if owner is None else (owner,):
        one.kept_products.clear()
    REPLAY.clear()
    # (a graph may keep a program alive, which would be found again)
    for dropped in RECALLS:
        dropped()


class Argument(NamedTuple):
    """An array of a call."""

    address: int
    shape: tuple[int, ...]
    #: In elements.
    strides: tuple[int, ...]
    dtype: str
    writable: bool = True


class Recorded(NamedTuple):
    """The program of a call, and what its results are."""

    program: Program
    #: Of each result: what makes it, or its place in the caller's `out`, or None.
    results: tuple[Callable[[], Any] | int | None, ...]
    #: What makes one result of them; None: there is one.
    pack: Callable[[Sequence[Any]], Any] | None
    told: Call
    #: Of each array, the distances from its address to its first byte and past its last one.
    spans: tuple[tuple[int, int], ...]
    #: The arrays that are outputs of the caller's.
    outs: tuple[int, ...]
    #: Outputs and the arrays that they may be: these were one when the call was recorded.
    same: frozenset[tuple[int, int]]
    #: That of the arrays, in which numbers are given.
    dtype: np.dtype[Any]

    def overlaps(self, addresses: Sequence[int]) -> bool:
        """Return whether an output may share memory with anything that it may not be."""
        ranges = []
        for at, (low, high) in zip(addresses, self.spans, strict=True):
            ranges.append((at + low, at + high))
        for i in self.outs:
            low, high = ranges[i]
            for j, (first, last) in enumerate(ranges):
                if j != i and first < high and low < last:
                    if ranges[j] != ranges[i] or (i, j) not in self.same:
                        return True
        return False


def alignment_of(at: int) -> int:
    """Return the power of two, at most 16, that divides an address."""
    return at & -at & 15 or 16


def beside(addresses: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return which arrays begin less than 16 bytes behind another one: theirs, its place, bytes.

    Alternate columns of one array are such a pair. Of several others the first in memory counts.
    """
    if not reduce(or_, addresses, 0) & 15:
        return ()  # one of such two begins at no multiple of 16
    found = []
    for j, later in enumerate(addresses):
        first = min(at for at in addresses if later - 16 < at <= later)
        if first < later:
            found.append((j, addresses.index(first), later - first))
    return tuple(found)


def _behind(arrays: Mapping[str, Argument]) -> dict[str, tuple[str, int]]:
    """Return which arrays have the form of another one that begins some elements before them."""
    names, found = list(arrays), {}
    for j, i, distance in beside([a.address for a in arrays.values()]):
        later, first = arrays[names[j]], arrays[names[i]]
        elements, rest = divmod(distance, dtype_of(later.dtype).itemsize)
        if later[1:4] == first[1:4] and not rest:
            found[names[j]] = names[i], elements
    return found


def word(number: float, dtype: np.dtype[Any]) -> int:
    """Return a number, rounded to a dtype, as the bits of a float64: what a kernel is given."""
    (bits,) = struct.unpack("q", struct.pack("d", dtype.type(number)))
    return int(bits)


def recorded(
    device: Device,
    precision: str,
    kind: str,
    p: Any,
    bind: Callable[[Recorder, str, ndarray], View],
    names: tuple[str, ...],
) -> tuple[Program, Call]:
    """Return the program of a problem over the arrays `names`, and what `last_call` tells of it."""
    rec = Recorder(device, precision)

    @functools.cache
    def once(name: str) -> View | None:
        x = getattr(p, name, None)
        return None if x is None else bind(rec, name, x)

    _OPERATIONS[kind](rec, p, once)
    program = rec.program(names)
    _, kernel, tile = program.chief or (0, "nothing", None)
    told = Call("cuda", str(device), program.tiers, f"{kind}/{p.activation.name} {kernel}", tile)
    return program, told


def record(
    device: Device,
    precision: str,
    kind: str,
    arrays: dict[str, Argument],
    outs: Sequence[str],
    make_problem: Callable[[dict[str, ndarray]], Any],
    result_names: tuple[str, ...],
    maker: Callable[[tuple[int, ...], str], Callable[[], Any]],
    turned: tuple[str, ...] = (),
    numbers: Mapping[str, float] | None = None,
) -> tuple[Recorded, list[Expr]]:
    """Return a call that is recorded, and the formulas with which it goes.

    `arrays` are the operands and outputs by their names in the problem, in the order of the
    addresses; `outs` names the caller's outputs, `turned` the gradients of matrices that are
    returned transposed. `make_problem` makes the problem from ghosts by name, whose results are
    `result_names`; `maker` takes a shape and a dtype and returns what makes a new array. `numbers`
    are operands whose bits (`word`) come as addresses, behind those of the results.
    """
    first = dtype_of(next(iter(arrays.values())).dtype)
    words = {name: np.array(x, first) for name, x in (numbers or {}).items()}
    ghosts: dict[str, ndarray] = {}
    spans = []
    for name, a in arrays.items():
        dtype = dtype_of(a.dtype)
        strides = [s * dtype.itemsize for s in a.strides]
        ghosts[name] = ghost(a.address, a.shape, strides, dtype, a.writable)
        spans.append(bounds(0, a.shape, strides, dtype.itemsize))
    order = list(arrays)
    for name in turned:
        like = ghosts[name.removeprefix("d_")]
        ghosts[name] = np.empty(like.shape, like.dtype, "F")
    p = make_problem(ghosts | words)
    for name in turned:  # it takes its place among the results
        del ghosts[name]
    same = frozenset(
        (order.index(out), i)
        for out in outs
        for i, a in enumerate(arrays.values())
        if a[:4] == arrays[out][:4]
    )
    parts = p.result if isinstance(p.result, tuple) else (p.result,)
    results: list[Callable[[], Any] | int | None] = []
    alignments = {name: alignment_of(a.address) for name, a in arrays.items()}
    for i, (name, x) in enumerate(zip(result_names, parts, strict=True)):
        if x is None:
            results.append(None)
        elif name in arrays:
            results.append(i)
        else:
            ghosts[name], alignments[name] = x, 16
            shape = x.shape[::-1] if name in turned else x.shape
            results.append(maker(shape, format_of(x.dtype)))
    ghosts |= words

    # one of two arrays that are parts of another one is told of by the other one's address
    odd = min(alignments.values(), default=16) < 16
    behind = _behind(arrays) if odd else {}

    def bind(rec: Recorder, name: str, x: ndarray) -> View:
        if name in words:
            return View(rec.number(name), 0, x.shape, (0,) * x.ndim, NUMBER, 8, 8)
        offset = (address(x) - address(ghosts[name])) // x.itemsize if x.size else 0
        if name in behind and x.size:
            name, distance = behind[name]
            offset += distance
        return View(
            rec.number(name),
            offset,
            x.shape,
            strides_of(x),
            format_of(x.dtype),
            x.itemsize,
            alignments[name],
        )

    program, told = recorded(device, precision, kind, p, bind, tuple(ghosts))
    pack = getattr(type(p.result), "_make", tuple) if isinstance(p.result, tuple) else None
    written = tuple(map(order.index, outs))
    made = Recorded(program, tuple(results), pack, told, tuple(spans), written, same, first)
    return made, p.activation.formulas()


def foresee(
    device: Device, precision: str, dtype: str, act: Activation, m: int, k: int, n: int
) -> None:
    """Record the calls on contiguous arrays of these sizes, which compiles and loads kernels."""
    shapes = (m, k), (k, n), (n,), (m, n)
    a, b, bias, grad = (np.empty(shape, dtype_of(dtype)) for shape in shapes)

    def bind(rec: Recorder, name: str, x: ndarray) -> View:
        return View(rec.number(name), 0, x.shape, strides_of(x), dtype, x.itemsize, 16)

    problems: tuple[tuple[str, Any], ...] = (
        ("forward", product.gemm(a, b, bias, act)),
        ("forward", product.gemm(a, b, bias, act, True)),
        ("backward", product.gemm_backward(grad, a, b, bias, act)),
        ("gated", gates.gated(a, a, act)),
        ("gated_backward", gates.gated_backward(a, a, a, act)),
    )
    for kind, p in problems:
        recorded(device, precision, kind, p, bind, (*FIELDS[kind][0], *FIELDS[kind][1]))
