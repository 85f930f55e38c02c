"""An epilogue of arrays alone, element by element, with operands that broadcast."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from numfuse.backends.webgpu.lower.places import BINDINGS, repeated, within
from numfuse.backends.webgpu.shaders import plain
from numfuse.backends.webgpu.shaders.epilogues import Array, Elementwise
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.shader import Access
from numfuse.backends.webgpu.stores import Region, Store
from numfuse.epilogues import Epilogue
from numfuse.problem.arrays import ArraysByName
from numfuse.problem.operands import format_of
from numfuse.problem.results import without_terms
from numfuse.problem.shapes import equal, merge_axes
from numfuse.runtime.strided import walk


@cache
def nothing() -> Epilogue:
    """Return the epilogue all of whose results are zero."""
    return Epilogue("nothing", (), (), ())


_ZERO = Formula.of(nothing, None).choose("out")


def zero(store: Store, out: Region, accumulator: np.dtype[Any]) -> None:
    """Record out = 0."""
    elementwise(store, _ZERO, {}, {"out": out}, accumulator)


def zeroed(store: Store, p: ArraysByName, outs: Mapping[str, tuple[Region, bool]]) -> bool:
    """Record the zeros of a problem that has nothing else to compute; return whether it has not."""
    empty = without_terms(p)
    if empty is None:
        return False
    for name, (region, add) in outs.items():
        if name in empty and not add:
            zero(store, region, p.acc_dtype)
    return True


def elementwise(
    store: Store,
    formula: Formula,
    arrays: Mapping[str, Region],
    outs: Mapping[str, Region],
    accumulator: np.dtype[Any],
) -> bool:
    """Record a formula of arrays that broadcast to one shape, that of its results.

    `arrays` has the inputs of the formula, by name, and `outs` is where each of its results goes.
    Nothing is recorded, and False returned, where the device binds fewer arrays.
    """
    given = {f"from_{name}": arrays[name] for name in formula.inputs}
    given |= {f"to_{name}": region for name, region in outs.items()}
    shape = next(iter(outs.values())).shape
    equal("the results of an epilogue", shape, *(x.shape for x in outs.values()))
    size = prod(shape)
    if not size:
        return True
    # An operand of one element is read at the same place by all.
    single = {name for name, x in given.items() if prod(x.shape) == 1 != size}
    orders = {x.order if x.shape == shape else None for n, x in given.items() if n not in single}
    if len(orders) > 1 or None in orders:
        return _strided(store, formula, given, accumulator)
    device = store.device
    found = {name: x for name, x in given.items() if name not in single}
    # A device binds a part of a large array at a time.
    step = device.room // max(x.itemsize for x in found.values()) // 4 * 4
    for start in range(0, size, step):
        length = min(step, size - start)
        bindings: dict[str, Any] = {}
        offsets: dict[str, int] = {}
        for name, x in given.items():
            if name not in single:
                x = replace(x, shape=(length,), strides=(1,), offset=x.offset + start)
            bindings[name], offsets[name] = x.bound(device)
        # By fours where all arrays lie so, and the rest alone.
        fours = length // 4 if all(offsets[name] % 4 == 0 for name in found) else 0
        for unit, first, last in ((4, 0, fours), (1, 4 * fours, length)):
            if first == last:
                continue
            described = [_array(name, x, unit == 4, single) for name, x in given.items()]
            values = {n: at // (1 if n in single else unit) for n, at in offsets.items()}
            values |= {"first": first, "last": last}
            if not _dispatch(store, formula, described, given, bindings, values, accumulator):
                return False
    return True


def _strided(
    store: Store, formula: Formula, given: Mapping[str, Region], accumulator: np.dtype[Any]
) -> bool:
    """Record a formula of arrays in strides of their own, which are 0 where one is broadcast."""
    *_, out = given.values()
    axes = sorted(range(len(out.shape)), key=lambda i: -abs(out.strides[i]))
    steps = []
    for x in given.values():
        lead = len(out.shape) - len(x.shape)
        own = (0,) * lead + repeated(x.shape, x.strides)
        steps.append([own[i] for i in axes])
    shape, strides = merge_axes([out.shape[i] for i in axes], *steps)
    lead, missing = max(len(shape) - plain.COPY_AXES, 0), max(plain.COPY_AXES - len(shape), 0)
    bound = {name: x.bound(store.device) for name, x in given.items()}
    described = [_array(name, x, False, ()) for name, x in given.items()]
    values = {"first": 0, "last": prod(shape[lead:])}
    for name, own in zip(("shape", *given), (shape, *strides), strict=True):
        four = (int(name == "shape"),) * missing + own[lead:]
        values |= {f"{name}_{axis}": length for axis, length in enumerate(four)}
    bindings = {name: binding for name, (binding, _) in bound.items()}
    for at in walk(shape[:lead], *strides):
        values |= {n: x[1] + more for (n, x), more in zip(bound.items(), at, strict=True)}
        how = described, given, bindings, values, accumulator
        if not _dispatch(store, formula, *how, strided=True):
            return False
    return True


def _array(name: str, x: Region, wide: bool, single: Collection[str]) -> Array:
    """Return an array as a shader has it."""
    way, _, plain_name = name.partition("_")
    access = Access(x.dtype, wide and name not in single)
    return Array(plain_name, access, way == "to", name in single)


def _dispatch(
    store: Store,
    formula: Formula,
    described: Sequence[Array],
    given: Mapping[str, Region],
    bindings: Mapping[str, Any],
    values: Mapping[str, int],
    accumulator: np.dtype[Any],
    strided: bool = False,
) -> bool:
    """Record a pass over a range of elements; False where the device binds fewer arrays."""
    device, acc = store.device, format_of(accumulator)
    shader = Elementwise(
        acc,
        formula,
        within(described, given, bindings),
        strided,
        one_rounding=device.one_rounding[acc],
    )
    if len(shader.buffers) > device.limits[BINDINGS]:
        return False
    grid = (*device.grid(-(-(values["last"] - values["first"]) // 256)), 1)
    store.commands.dispatch(shader, bindings, values, grid)
    return True
