"""The operations without a product: one pass each, over elements in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cpu import descriptors, tiling
from numfuse.backends.cpu.descriptors import Slots
from numfuse.backends.cpu.kernels import rows
from numfuse.backends.cpu.launch.sequence import Program, nothing, operand, program
from numfuse.backends.cpu.schedule import merged
from numfuse.problem.operands import format_of
from numfuse.runtime.specialise import Kernel

if TYPE_CHECKING:
    from numfuse.problem.product import GatedBackwardProblem, GatedProblem
    from numfuse.problem.second_order import GatedDoubleBackwardProblem, GatedTangentProblem

#: The slot of each array.
GATE = {"a": "a", "b": "b", "out": "out"}
BACKWARD = {"a": "a", "b": "b", "grad": "grad", "d_a": "out", "d_b": "extra"}
DOUBLE_BACKWARD = {"a": "a", "b": "b", "grad": "grad", "u": "extra", "v": "pre"}
DOUBLE_BACKWARD |= {"d_grad": "out", "d_a": "bias", "d_b": "sums"}
TANGENT = {"a": "a", "b": "b", "u": "grad", "v": "pre", "out": "out", "out_dot": "extra"}

#: A row function, which stores past the caches or not.
Row = Callable[[bool], Kernel]


def gate(p: GatedProblem, names: Sequence[str], threads: int) -> Program:
    """Return the program of ``out = act(a) * b``."""
    row = partial(rows.gate, p.activation.curve, format_of(p.dtype))
    return _pass(p, names, GATE, ("out",), row, threads)


def backward(p: GatedBackwardProblem, names: Sequence[str], threads: int) -> Program:
    """Return the program of ``d_a = grad * b * act'(a)``, ``d_b = grad * act(a)``."""
    curve, fmt = p.activation.curve, format_of(p.dtype)
    if p.d_a is None:  # a forward with another factor
        slots = {"a": "a", "grad": "b", "d_b": "out"}
        return _pass(p, names, slots, ("d_b",), partial(rows.gate, curve, fmt), threads)
    if p.d_b is None:
        row = rows.gate_backward(curve, fmt, p.guard, False)
        return _pass(p, names, BACKWARD, ("d_a",), lambda streams: row, threads, streams=False)
    row_of = partial(rows.gate_backward, curve, fmt, p.guard, True)
    return _pass(p, names, BACKWARD, ("d_a", "d_b"), row_of, threads)


def double_backward(p: GatedDoubleBackwardProblem, names: Sequence[str], threads: int) -> Program:
    """Return the program of a gate's double backward; what nothing contributes to is zeroed."""
    u, v = p.u is not None, p.v is not None
    bent = u and not p.activation.second_derivative_is_zero()
    there = {"d_grad": u or v, "d_a": bent or v, "d_b": u}
    wanted = {name: given for name, given in there.items() if getattr(p, name) is not None}
    results = tuple(name for name, contributes in wanted.items() if contributes)
    zeroed = [names.index(name) for name, contributes in wanted.items() if not contributes]
    if not results:
        return nothing(zeroed)
    curve, fmt = p.activation.curve, format_of(p.dtype)
    row = rows.gate_double_backward(curve, fmt, p.guard, u, v, results)
    slots = {name: "" if there.get(name) is False else x for name, x in DOUBLE_BACKWARD.items()}
    return _pass(p, names, slots, results, lambda streams: row, threads, False, zeroed)


def tangent(p: GatedTangentProblem, names: Sequence[str], threads: int) -> Program:
    """Return the program of a gate and of its derivative along tangents."""
    curve, fmt = p.activation.curve, format_of(p.dtype)
    if p.u is None and p.v is None:
        slots = {**TANGENT, "out_dot": ""}
        row, zeroed = partial(rows.gate, curve, fmt), [names.index("out_dot")]
        return _pass(p, names, slots, ("out",), row, threads, zeroed=zeroed)
    there = p.u is not None, p.v is not None
    row = partial(rows.gate_tangent, curve, fmt, p.guard, *there)
    return _pass(p, names, TANGENT, ("out", "out_dot"), row, threads)


def _pass(
    p: Any,
    names: Sequence[str],
    slots: Mapping[str, str],
    results: tuple[str, ...],
    row: Row,
    threads: int,
    streams: bool = True,
    zeroed: Sequence[int] = (),
) -> Program:
    """Return a row function over every row of the arrays, large results past the caches.

    Arrays without a slot are not touched.
    """
    arrays: dict[str, np.ndarray] = {}
    for name in (*results, *slots):  # (the first result is the first of them)
        x = getattr(p, name) if slots[name] else None
        if x is not None:
            arrays[name] = x
    # The last axis is the one along which the first result is densest. The views number the same
    # elements in another way: the addresses are those of the arrays.
    places: dict[str, Any] = {}
    written = []
    for name, x in zip(arrays, merged(list(arrays.values())), strict=True):
        places[slots[name]] = operand(name, x)
        if name in results:
            written.append(x)
    *batch, m, n = written[0].shape
    stream = row(True) if streams and past_the_caches(written) else None
    at = Slots()._replace(**places)
    plan = descriptors.rows(m, n, row(False), at, threads, tuple(batch), stream=stream)
    return program(names, [[[(plan, {})]]] if plan is not None else [], zeroed=zeroed)


def past_the_caches(results: list[np.ndarray]) -> bool:
    """Whether results (..., rows, columns) are large, and rows of theirs contiguous."""
    nbytes = 0
    for x in results:
        nbytes += x.nbytes
        if x.strides[-1] != x.itemsize or x.shape[-1] < tiling.STREAM_STEP:
            return False
    return nbytes >= tiling.STREAM_BYTES
