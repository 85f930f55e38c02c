"""An epilogue of arrays alone, element by element; the gates, which are nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from numfuse import epilogues
from numfuse.backends.webgpu.shaders.epilogues import Array, Elementwise
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.shader import Access
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.epilogues import Epilogue
from numfuse.problem.fields import FIELDS
from numfuse.problem.operands import format_of
from numfuse.problem.shapes import equal


@cache
def nothing() -> Epilogue:
    """Return the epilogue all of whose results are zero."""
    return Epilogue("nothing", (), (), ())


_ZERO = Formula.of(nothing, None).choose("out")


def zero(store: Store, out: Region, accumulator: np.dtype[Any]) -> None:
    """Record out = 0."""
    elementwise(store, _ZERO, {}, {"out": out}, accumulator)


def elementwise(
    store: Store,
    formula: Formula,
    arrays: Mapping[str, Region],
    outs: Mapping[str, Region],
    accumulator: np.dtype[Any],
) -> None:
    """Record a formula of arrays of one shape; what is not one run in memory is copied to one.

    `arrays` are the inputs of the formula, by name, and `outs` is where each of its results goes.
    """
    given = {f"from_{name}": arrays[name] for name in formula.inputs}
    given |= {f"to_{name}": region for name, region in outs.items()}
    shape = next(iter(outs.values())).shape
    equal("the arrays of an epilogue", shape, *(x.shape for x in given.values()))
    size = prod(shape)
    if not size:
        return
    device = store.device
    orders = {region.order for region in given.values()}
    as_one = len(orders) == 1 and None not in orders
    found: dict[str, Region] = {}
    late: list[tuple[Region, Region]] = []
    for name, region in given.items():
        found[name] = region
        if not (as_one or region.contiguous):
            found[name] = fresh(device, shape, np.dtype(region.dtype), "a contiguous copy")
            if name.startswith("from_"):
                copy(store.commands, region, found[name])
            else:
                late.append((found[name], region))
    # A device binds a part of a large array at a time.
    step = device.room // max(region.itemsize for region in found.values()) // 4 * 4
    for start in range(0, size, step):
        length = min(step, size - start)
        bindings: dict[str, Any] = {}
        offsets: dict[str, int] = {}
        for name, region in found.items():
            part = replace(region, shape=(length,), strides=(1,), offset=region.offset + start)
            bindings[name], offsets[name] = part.bound(device)
        # By fours where all arrays lie so, and the rest alone.
        fours = length // 4 if all(offset % 4 == 0 for offset in offsets.values()) else 0
        for unit, first, last in ((4, 0, fours), (1, 4 * fours, length)):
            if first == last:
                continue
            accesses = ((name, Access(region.dtype, unit == 4)) for name, region in found.items())
            shader = Elementwise(
                format_of(accumulator),
                formula,
                tuple(Array(n.partition("_")[2], x, n.startswith("to_")) for n, x in accesses),
                one_rounding=device.one_rounding[format_of(accumulator)],
            )
            values = {name: offset // unit for name, offset in offsets.items()}
            grid = (*device.grid(-(-(last - first) // 256)), 1)
            values |= {"first": first, "last": last}
            store.commands.dispatch(shader, bindings, values, grid)
    for source, out in late:
        copy(store.commands, source, out)


def _gate(
    kind: str,
    store: Store,
    p: Any,
    outs: Mapping[str, tuple[Region, bool]],
    **inputs: str,
) -> None:
    """Record an operation's formulas; an array that is None is zero.

    `inputs` are the formula's names of arrays where the problem has others.
    """
    if not outs:
        return
    arrays = {inputs.get(name, name): getattr(p, name) for name in FIELDS[kind][0]}
    absent = tuple(name for name, x in arrays.items() if x is None)
    guard = getattr(p, "guard", False)
    formula = Formula.of(epilogues.GATES[kind], p.activation.curve, absent, guard).choose(*outs)
    used = {name: store.source(arrays[name]) for name in formula.inputs}
    regions = {name: region for name, (region, _) in outs.items()}
    elementwise(store, formula, used, regions, p.acc_dtype)


#: By the method of a backend, what records its problem.
GATES = {kind: partial(_gate, kind) for kind in epilogues.GATES}
GATES["gated_tangent"] = partial(_gate, "gated_tangent", u="a_dot", v="b_dot")
