"""The batch of a product, how its sums are cut, and how a shader may read its arrays.

A product is one dispatch over *places*, the elements of the batch of its result. A place may add up
several *segments*, the elements of a batch that its result is summed over, in groups, and its K may
be cut in *parts*; each part of each group is then a plane of its own, and the planes are joined in
their order. Which parts and groups there are depends on the problem alone, and so do the bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.shaders.shader import Access

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device
    from numfuse.backends.webgpu.device.memory import Binding
    from numfuse.backends.webgpu.shaders.epilogues import Array
    from numfuse.backends.webgpu.stores import Region
    from numfuse.backends.webgpu.tiling import WebGpuTile


def tile_of(
    device: Device, m: int, n: int, accumulator: np.dtype[Any], depth: int = 0, factors: int = 1,
    bare: bool = False,
) -> WebGpuTile:  # fmt: skip
    """Return the tile of an M x N result on this device, of which sums over `depth` may be cut.

    It is that of each product of a group with so many right `factors`; `bare`: K is short, and
    no sums over its rows or columns are made.
    """
    return tiling.tile(m, n, accumulator.itemsize, *_held(device), depth, factors, bare)


def _held(device: Device) -> tuple[int, int, bool]:
    """Return the workgroup memory and the invocations of a device, and whether it is a CPU."""
    limits = device.limits
    invocations = min(
        limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]
    )
    storage = limits["max-compute-workgroup-storage-size"]
    return storage, invocations, device.adapter.kind == "CPU"


def factor_access(region: Region, outputs: int, depth: int) -> Access:
    """Return how a shader may read a factor, the axes of which are the result's and the sum's."""
    strides = region.strides
    if strides[depth] == 1 or strides[outputs] == 1:
        turned = strides[depth] == 1
    else:
        turned = abs(strides[depth]) < abs(strides[outputs])
    along, across = (depth, outputs) if turned else (outputs, depth)
    steps = strides[across], *strides[:-2]
    return Access(region.dtype, _by_fours(region, along, steps), turned)


def row_access(region: Region) -> Access:
    """Return how a shader may read or write an array along its rows."""
    steps = repeated(region.shape, region.strides)[:-1]
    return Access(region.dtype, _by_fours(region, -1, steps))


def _by_fours(region: Region, axis: int, steps: Sequence[int]) -> bool:
    """Return whether four neighbours along an axis may be read at once, steps being of others."""
    together = gcd(4, region.shape[axis], region.offset, *steps)
    return region.strides[axis] == 1 and together == 4


def repeated(lengths: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides with 0 for axes of length 1: those are read again and again."""
    return tuple([0 if n == 1 else s for n, s in zip(lengths, strides, strict=True)])


#: The limit of WebGPU on the arrays of a shader.
BINDINGS = "max-storage-buffers-per-shader-stage"


def within(
    arrays: Sequence[Array], regions: Mapping[str, Region], bindings: Mapping[str, Binding]
) -> tuple[Array, ...]:
    """Return the arrays of a shader, those that lie in one binding with that of the first.

    They are inputs of one element, as numbers are, results (a device binds what it writes once),
    and an input that is a result.
    """
    first: dict[Any, str] = {}
    found = []
    for array in sorted(arrays, key=lambda x: not x.stored):
        binding = bindings[array.array]
        key = id(binding.buffer), binding.offset, binding.size, array.access
        owner = first.get(key, "")
        if array.stored or prod(regions[array.array].shape) == 1:
            owner = first.setdefault(key, array.array)
        found.append(replace(array, within=owner if owner != array.array else ""))
    return tuple(sorted(found, key=lambda x: x.stored))


@dataclass(frozen=True)
class Places:
    """The batch of a product: axes that its result has, and axes that it is summed over."""

    batch: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]

    @classmethod
    def of(cls, batch: tuple[int, ...], result: tuple[int, ...]) -> Places:
        """Return the places of a result with these batch axes of its own."""
        if not batch:
            return _ONE
        own = (1,) * (len(batch) - len(result)) + result
        axes = [i for i, length in enumerate(batch) if length != 1]
        return cls(
            batch, tuple(i for i in axes if own[i] != 1), tuple(i for i in axes if own[i] == 1)
        )

    @cached_property
    def count(self) -> int:
        return prod(map(self.batch.__getitem__, self.outer))

    @cached_property
    def segments(self) -> int:
        return prod(map(self.batch.__getitem__, self.inner))

    def table(self, regions: Sequence[Region | None]) -> bytes:
        """Return where each of these begins, place by place and segment by segment; None at 0."""
        order = self.outer + self.inner
        columns = []
        for region in regions:
            at = np.full((), 0 if region is None else region.offset, np.int64)
            axes = len(self.batch)
            steps = (0,) * axes if region is None else region.batch_steps(axes)
            for axis in order:
                at = np.add.outer(at, np.arange(self.batch[axis]) * steps[axis])
            columns.append(at.reshape(-1))
        return np.stack(columns, axis=1).astype(np.uint32).tobytes()


_ONE = Places((), (), ())


@dataclass(frozen=True)
class Cut:
    """How the sum of a place is cut into planes."""

    part: int
    parts: int = 1
    per_group: int = 1
    groups: int = 1

    @property
    def planes(self) -> int:
        return self.parts * self.groups


def cut_of(
    device: Device,
    m: int,
    n: int,
    k: int,
    places: Places,
    tile: WebGpuTile,
    accumulator: np.dtype[Any],
) -> Cut:
    """Return how a sum over K and segments, the order of which is free, is cut."""
    blocks = -(-m // tile.block_m) * -(-n // tile.block_n)
    # planes that one binding can hold
    room = max(1, device.binding_limit // max(1, m * n * accumulator.itemsize * places.count))
    # Where memory is not short, not of the number of places: an element of a batch gives what it
    # gives alone.
    part, parts = tiling.parts(blocks, k, room)
    segments = places.segments
    if segments <= 1:
        return Cut(part, parts, segments, 1)
    groups = tiling.groups(blocks * parts * places.count, segments, room // parts)
    per_group = -(-segments // groups)
    return Cut(part, parts, per_group, -(-segments // per_group))


def chains_of(
    device: Device, m: int, n: int, k: int, places: Places, accumulator: np.dtype[Any]
) -> tuple[WebGpuTile, Cut] | None:
    """Return the tile and the cut of products of few blocks, each chain of a sum a plane.

    The planes, added up in their order, have the bits of the sums. None: sums are not cut.
    """
    if places.segments > 1:
        return None
    tile = tiling.chained(m, n, k, places.count, accumulator.itemsize, *_held(device))
    chains = -(-k // tile.chain) if tile is not None and tile.chain else 1
    if tile is None or places.count * chains * m * n * accumulator.itemsize > device.room:
        return None
    return tile, Cut(tile.chain, chains)
