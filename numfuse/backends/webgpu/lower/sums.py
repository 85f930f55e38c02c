"""Sums in a fixed order: of planes, of the rows of a result, of axes that were broadcast."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.shaders import plain
from numfuse.backends.webgpu.shaders.shader import Access
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.problem.shapes import equal

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device


def join(
    store: Store,
    planes: Region,
    count: int,
    depth: int,
    out: Region,
    add: bool = False,
    plain: bool = False,
) -> None:
    """Record out[o] = sum of planes[o, q] over q, in stages where there are many.

    With `plain` it is a sum as a chain is, of any length: what the additions lose is lost.
    """
    device = store.device
    size = prod(out.shape) // count if count else 0
    if not size:
        return
    equal("planes and their sums", prod(planes.shape), depth * prod(out.shape))
    while depth > tiling.JOINED and not plain:
        stages = -(-depth // tiling.JOINED)
        stage = fresh(device, (count, stages, size), np.dtype(planes.dtype), "joined planes")
        _sum(store, planes, stage, (count, depth, size), tiling.JOINED, False)
        planes, depth = stage, stages
    target = out
    if not out.contiguous:
        target = fresh(device, out.shape, np.dtype(out.dtype), "a joined result")
        if add:
            copy(store.commands, out, target)
    _sum(store, planes, target, (count, depth, size), depth, add, plain)
    if target is not out:
        copy(store.commands, target, out)


def _sum(
    store: Store,
    planes: Region,
    out: Region,
    sizes: tuple[int, int, int],
    width: int,
    add: bool,
    plain_sum: bool = False,
) -> None:
    """Record out[o, g] = the sum of the planes [o, q] with q in the group g of `width`.

    `sizes` are how many o and q there are, and elements of a plane.
    """
    count, depth, size = sizes
    device = store.device
    (source, source_at), (target, target_at) = planes.bound(device), out.bound(device)
    wide = size % 4 == source_at % 4 == target_at % 4 == 0
    unit = 4 if wide else 1
    groups = -(-depth // width) if depth else 1
    total = count * groups * size // unit
    store.commands.dispatch(
        plain.join(
            planes.dtype, Access(planes.dtype, wide), Access(out.dtype, wide), add, plain_sum
        ),
        {"planes": source, "out": target},
        {
            "size": size // unit,
            "depth": depth,
            "width": width,
            "groups": groups,
            "planes": source_at // unit,
            "out": target_at // unit,
            "total": total,
        },
        (*device.grid(-(-total // 256)), 1),
    )


def sum_to(store: Store, x: ndarray, out: ndarray, accumulator: np.dtype[Any]) -> None:
    """Record out = x summed over the axes along which out was broadcast to the shape of x."""
    source = store.source(x)
    _, target, _ = source.summed_to(store.target(out))
    if source.shape == target.shape:
        copy(store.commands, source, target)
        return
    total = target
    if target.dtype != accumulator.name and _beyond(store.device, source.shape, accumulator):
        total = fresh(store.device, target.shape, accumulator, "the sum of a residual")
    add_up(store, source, total, accumulator, False)
    if total is not target:
        copy(store.commands, total, target)


def _beyond(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether the device cannot bind an array of this shape at once."""
    return prod(shape) * dtype.itemsize > device.room


def planes_of(
    store: Store, shape: tuple[int, ...], target: Region, accumulator: np.dtype[Any]
) -> tuple[Region, Region]:
    """Return new planes that are to be joined to a target, and these as an array of `shape`."""
    own = (1,) * (len(shape) - len(target.shape)) + target.shape
    summed = [i for i, length in enumerate(shape) if length != own[i]]
    order = [*summed, *(i for i in range(len(shape)) if i not in summed)]
    planes = fresh(store.device, tuple(shape[i] for i in order), accumulator, "planes of a sum")
    return planes, planes.axes([order.index(i) for i in range(len(shape))])


def add_up(
    store: Store, source: Region, target: Region, accumulator: np.dtype[Any], add: bool
) -> None:
    """Record target = source, or target += source, summed over the axes of which target has 1.

    What is beyond the device's limit is summed in halves; where they are of one sum, the target is
    in the accumulator's dtype.
    """
    if _beyond(store.device, source.shape, accumulator):
        axis = max(range(len(source.shape)), key=lambda i: source.shape[i])
        middle = source.shape[axis] // 2
        for first, last in ((0, middle), (middle, source.shape[axis])):
            apart = target.shape[axis] == source.shape[axis]
            goal = target.part(axis, first, last) if apart else target
            more = add or (first > 0 and not apart)
            add_up(store, source.part(axis, first, last), goal, accumulator, more)
        return
    turned, over, depth = source.summed_to(target)
    axes = [i for i, n in enumerate(source.shape) if n != 1]
    summed = [over.shape[i] == 1 for i in axes]
    lead = summed.index(True) if depth != 1 else 0
    apart = any(summed[lead + sum(summed) :])
    if source.dtype == accumulator.name and source.contiguous and not apart:
        join(store, source, prod(source.shape[i] for i in axes[:lead]), depth, target, add)
        return
    planes = fresh(store.device, turned.shape, accumulator, "the summands of a residual")
    copy(store.commands, turned, planes)
    join(store, planes, 1, depth, target, add)
