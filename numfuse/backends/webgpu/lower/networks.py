"""A whole network's jet as one dispatch, and its gradients as one and the joins of partial sums.

A dispatch before it packs weights and biases, of any strides, to one buffer, as a device binds few
arrays. A workgroup takes its tiles of points through all layers (`network.wgsl`). That of a
backward has a plane of the gradients of all weights and biases, to which it adds tile by tile; the
planes are joined in their order. What a workgroup does, and how many there are, depends on shapes
and on the device's limits alone, and so do the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.lower.places import BINDINGS
from numfuse.backends.webgpu.lower.sums import join
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.shaders.networks import (
    ARRAY,
    LAYER,
    MEMBERS,
    NONE,
    NetworkPass,
    Pack,
    Parts,
)
from numfuse.backends.webgpu.stores import Region, Store, copy, fresh
from numfuse.problem.jets import formulas_of
from numfuse.problem.operands import format_of
from numfuse.runtime.strided import contiguous

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device
    from numfuse.epilogues import Epilogue
    from numfuse.problem.networks import NetworkProblem

_F32 = np.dtype(np.float32)
_RESULTS = "u", "u_dot", "u_ddot"
_GRADS = "grad", "grad_dot", "grad_ddot"
#: Arrays that one dispatch packs, at the most: the weights and biases of seven layers.
_PACKED = 14


def _fours(n: int) -> int:
    return -(-n // 4)


class Gradient(NamedTuple):
    """Where `flat` has the gradient of one operand: rows of so many columns, padded to fours."""

    name: str
    at: int
    rows: int
    columns: int

    @property
    def pitch(self) -> int:
        return 4 * _fours(self.columns)

    @property
    def compact(self) -> bool:
        """Whether its rows have no padding, or are one."""
        return self.rows == 1 or self.columns == self.pitch


def gradients(widths: Sequence[int]) -> tuple[list[Gradient], int]:
    """Return where the gradients of a network's weights and biases are, and the length of all."""
    found, end = [], 0
    for i, (k, n) in enumerate(pairwise(widths)):
        for name, rows in (("weights", k), ("biases", 1)):
            found.append(Gradient(f"{name}_{i}", end, rows, n))
            end += rows * 4 * _fours(n)
    return found, end


class Sizes(NamedTuple):
    """How the points of a network are divided among workgroups; lengths are in fours of numbers."""

    tile: tiling.NetworkTile
    #: Points of a tile, tiles of a workgroup, and how many there are of both.
    points: int
    chunk: int
    tiles: int
    groups: int
    #: What a workgroup keeps of its points, and the gradients that it adds up.
    keeps: int
    plane: int


def sizes_of(
    device: Device, widths: Sequence[int], count: int, members: int, backward: bool
) -> Sizes | None:
    """Return how a device takes a network of these widths; None: layer by layer.

    Two arrays of a network's dispatch may not lie in one binding as writable, and eight bindings
    are enough.
    """
    limits = device.limits
    invocations = min(
        limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]
    )
    storage, cpu = limits["max-compute-workgroup-storage-size"], device.adapter.kind == "CPU"
    if not count or min(widths) < 1:
        return None
    how = storage, invocations, cpu, count * members, members
    tile = tiling.network_tile(max(widths), *how)
    if tile is None:
        return None
    points = tile.rows // members
    tiles = -(-count // points)
    keeps = plane = 0
    most = tiling.NETWORK_FORWARD_GROUPS
    if backward:
        keeps = 2 * (len(widths) - 1) * tile.rows * (tile.width // 4)
        plane = gradients(widths)[1] // 4
        most = min(tiling.NETWORK_GROUPS, device.room // (16 * (keeps + plane)))
        if most < 1:
            return None
    chunk = -(-tiles // most)
    return Sizes(tile, points, chunk, tiles, -(-tiles // chunk), keeps, plane)


def sizes(device: Device, p: NetworkProblem) -> Sizes:
    """Return how a device takes a problem, of which it was asked whether it does."""
    members = 1 + p.directions + p.seconds
    found = sizes_of(device, p.widths, p.count, members, p.backward)
    assert found is not None
    return found


class _Network:
    """The recording of one network: places of all that is packed, kept and added up."""

    def __init__(self, store: Store, p: NetworkProblem) -> None:
        self.store, self.p, self.device = store, p, store.device
        self.counts = p.directions, p.seconds
        self.sizes = sizes(self.device, p)
        self.tile = self.sizes.tile
        self.layers = list(zip(p.activations, pairwise(p.widths), strict=True))
        curves = [f for f in dict.fromkeys(p.activations) if not f.is_identity]
        self.curves = sorted(curves, key=lambda f: f.serial)
        #: The formulas hold none of these, which live as long as they are asked.
        self.made: list[dict[str, Epilogue]] = []

    # --- what is packed -------------------------------------------------------------------------
    def packed(self) -> tuple[Region, list[dict[str, int]]]:
        """Record the packing of all weights and biases; return the words of each layer."""
        p, wide, end = self.p, self.tile.width // 4, 0
        arrays: list[tuple[Region, dict[str, int]]] = []
        words = []

        def place(rows: int) -> int:
            nonlocal end
            found, end = end, end + rows * wide
            return found

        for i, (f, (k, n)) in enumerate(self.layers):
            own = {"k": k, "n": n, "f": 0 if f.is_identity else 1 + self.curves.index(f)}
            own |= dict.fromkeys(("w", "turned", "bias"), NONE)
            # A workgroup fetches four rows, or whole slices of as many as there may be.
            heights = {"w": self._height(k), "turned": self._height(n) if p.backward else 0}
            own |= {name: place(rows) for name, rows in heights.items() if rows}
            w = self._array(p.arrays[f"weights_{i}"])
            into = {"to": own["w"], "height": heights["w"]}
            into |= {"turned": own["turned"], "turned_height": heights["turned"]}
            arrays.append((w, into))
            bias = p.arrays.get(f"biases_{i}")
            if bias is not None:
                own["bias"] = place(1)
                into = {"to": own["bias"], "height": 1, "turned": 0, "turned_height": 0}
                arrays.append((self._array(bias), into))
            words.append(own)
        made = fresh(self.device, (end, self.tile.width), _F32, "packed weights")
        slots = min(self.device.limits[BINDINGS] - 2, _PACKED)
        for first in range(0, len(arrays), slots):
            self._pack(arrays[first : first + slots], slots, made)
        return made, words

    def _height(self, rows: int) -> int:
        return 4 if rows <= 4 else self.tile.width

    def _array(self, x: Any) -> Region:
        """Return weights, or a bias as one row."""
        region = self.store.source(x)
        if len(region.shape) == 2:
            return region
        return replace(region, shape=(1, region.shape[-1]), strides=(0, region.strides[-1]))

    def _pack(
        self, arrays: Sequence[tuple[Region, dict[str, int]]], slots: int, made: Region
    ) -> None:
        device, words, bindings = self.device, b"", dict[str, Any]()
        for i, (x, into) in enumerate(arrays):
            bindings[f"from_{i}"], first = x.bound(device)
            (row, column), (rows, columns) = x.strides, x.shape
            own = {"first": first, "row": row, "column": column, "rows": rows, "columns": columns}
            words += ARRAY.pack(own | into)
        for i in range(len(arrays), slots):
            bindings[f"from_{i}"] = bindings["from_0"]
        bindings["arrays"] = device.constant(words, uniform=False)
        bindings["packed"], _ = made.bound(device)
        shader = Pack(arrays[0][0].dtype, slots, self.tile.width)
        blocks = -(-self.tile.width * self.tile.width // 4 // 256)
        values = {"count": len(arrays)}
        self.store.commands.dispatch(shader, bindings, values, (blocks, len(arrays), 1))

    # --- formulas -------------------------------------------------------------------------------
    def _parts(self, f: Any, backward: bool) -> Parts:
        """Return the formulas of an activation's pass over points."""
        p = self.p
        jet = formulas_of(f, None, backward, {}, p.pattern, p.guard, p.seconds > 0, True)
        names = ("d_z", "d_z_dot", "d_z_ddot") if backward else ("out", "out_dot", "out_ddot")
        made = jet.parts(names, backward, *self.counts)
        self.made.append(made)
        return tuple(
            (name, Formula.whole(x).choose(*(y for y, _ in x.results))) for name, x in made.items()
        )

    def shader(self) -> NetworkPass:
        """Return the shader of all layers."""
        p = self.p
        ways = (False, True)[: 1 + p.backward]
        found = [tuple(self._parts(f, back) for back in ways) for f in self.curves]
        parts = tuple((one[0], one[1] if p.backward else ()) for one in found)
        weighted = p.weights is not None
        how: Any = {"one_rounding": self.device.one_rounding["float32"]}
        counts = *self.counts, weighted, p.pattern, p.backward
        return NetworkPass(self.tile, format_of(p.dtype), parts, *counts, **how)

    def table(self, words: list[dict[str, int]]) -> tuple[Any, dict[str, int]]:
        """Return the words of all layers, directions and weights, and where the last two begin."""
        p, numbers = self.p, b""
        for own in words:
            numbers += LAYER.pack({"d_w": 0, "d_bias": 0} | own)
        units = np.zeros((len(p.units), 4 * _fours(p.widths[0])), _F32)
        units[:, : p.widths[0]] = p.units
        places = {}
        for name, x in (("units", units), ("weights", p.weights)):
            places[name] = len(numbers) // 16
            numbers += b"" if x is None else np.ascontiguousarray(x, _F32).tobytes()
        return self.device.constant(numbers, uniform=False), places

    # --- dispatches -----------------------------------------------------------------------------
    def ends(self, names: Sequence[str], found: dict[str, Region]) -> tuple[Any, Any]:
        """Return bindings and fields of the results or their cotangents, as the shader has them."""
        bindings, values = dict[str, Any](), dict[str, int]()
        counts = 1, *self.counts
        for name, of, count in zip(names, MEMBERS, counts, strict=True):
            if not count:
                continue
            steps: tuple[int, ...] = (0, 0, 0)
            first = 0
            if name in found:
                bindings[of], first = found[name].bound(self.device)
                steps = (0, *found[name].strides)[-3:]
            fields = of, f"{of}_member", f"{of}_row", f"{of}_column"
            values |= zip(fields, (first, *steps), strict=True)
        return bindings, values

    def record(self) -> None:
        """Record all dispatches."""
        p, store, device, sizes = self.p, self.store, self.device, self.sizes
        x = store.source(p.arrays["points"])
        packed, words = self.packed()
        backward = self.p.backward
        if backward:
            self._keep(words)
        table, values = self.table(words)
        names = _GRADS if backward else _RESULTS
        given = [name for name in names if name in p.arrays and p.arrays[name].size]
        take = store.source if backward else store.target
        bindings, ends = self.ends(names, {name: take(p.arrays[name]) for name in given})
        bindings["x"], at = x.bound(device)
        values |= {"x": at, "x_row": x.strides[0], "x_column": x.strides[1]} | ends
        bindings |= {"packed": packed.bound(device)[0], "table": table}
        values |= {"count": p.count, "tiles": sizes.tiles, "chunk": sizes.chunk}
        values |= {"layers": len(words), "made": len(words)}
        values["outputs"] = p.widths[-1]
        planes = None
        if backward:
            for name in MEMBERS:
                bindings.setdefault(name, bindings["x"])
            planes = self._backward(bindings, values, given)
        shader = self.shader()
        grid = (*device.grid(sizes.groups), 1)
        store.commands.dispatch(shader, bindings, values, grid)
        if planes is not None:
            self._join(planes)

    def _keep(self, words: list[dict[str, int]]) -> None:
        """Enter where a layer's gradients are in a plane."""
        places = {x.name: x.at // 4 for x in gradients(self.p.widths)[0]}
        for i, own in enumerate(words):
            own |= {"d_w": places[f"weights_{i}"], "d_bias": places[f"biases_{i}"]}

    def _backward(
        self, bindings: dict[str, Any], values: dict[str, int], given: Sequence[str]
    ) -> Region | None:
        """Enter what a backward has beside; return the planes of gradients, if there are any."""
        p, store, device, sizes = self.p, self.store, self.device, self.sizes
        layers, by_weights = len(self.layers), "flat" in p.arrays
        made = layers - p.activations[-1].is_identity
        values |= {"made": made, "by_weights": int(by_weights)}
        values["given"] = sum(1 << i for i, name in enumerate(_GRADS) if name in given)
        kept, plane = sizes.groups * sizes.keeps, sizes.plane if by_weights else 0
        work = fresh(device, (kept + sizes.groups * plane, 4), _F32, "the inside of a network")
        bindings["work"], _ = work.bound(device)
        values |= {"kept": 0, "keeps": sizes.keeps, "planes": kept, "plane": plane}
        values["by_x"] = int("d_points" in p.arrays)
        d_x = fresh(device, (1, 4), p.dtype, "no gradient")
        if "d_points" in p.arrays:
            d_x = store.target(p.arrays["d_points"])
        bindings["d_x"], at = d_x.bound(device)
        values |= {"d_x": at, "d_x_row": d_x.strides[0], "d_x_column": d_x.strides[1]}
        if not by_weights:
            return None
        shape = sizes.groups, 4 * plane
        return replace(work, offset=4 * kept, shape=shape, strides=contiguous(shape))

    def _join(self, planes: Region) -> None:
        """Record the sums of planes, and the results that are not parts of them as they are."""
        p, store = self.p, self.store
        flat = store.target(p.arrays["flat"])
        join(store, planes, 1, self.sizes.groups, flat)
        for x in gradients(p.widths)[0]:
            own = p.arrays.get(f"d_{x.name}")
            if own is not None:
                axes = slice(-own.ndim, None)
                how: Any = {"shape": (x.rows, x.columns)[axes], "strides": (x.pitch, 1)[axes]}
                part = replace(flat, offset=flat.offset + x.at, **how)
                copy(store.commands, part, store.target(own))


def network(store: Store, p: NetworkProblem) -> None:
    """Record a network's jet, or the gradients of one."""
    _Network(store, p).record()
