"""The groups of a call by the shader contract: their uploads, passes and downloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.contract.entry_points import ENTRY_POINTS
from numfuse.backends.webgpu.device.commands import Commands
from numfuse.backends.webgpu.device.memory import Binding, Buffer

if TYPE_CHECKING:
    from numfuse.backends.webgpu.contract.backend import ContractBackend

_F32 = np.dtype(np.float32)


class Array(NamedTuple):
    """An array of the contract, in pieces of `length` elements."""

    length: int
    #: What has a piece of its own: every unit, every group (a sum over its units), or the call.
    per: Literal["unit", "group", "call"] = "unit"
    #: To be uploaded; None of a result.
    content: ndarray | None = None


class Step(NamedTuple):
    """A compute pass of every group."""

    entry_point: str
    #: The fields of its uniform by name, for a group of so many units.
    fields: Callable[[int], dict[str, int]]
    #: {name of an array in the contract: name in the call}, where they differ.
    names: Mapping[str, str] = {}


class Grouping:
    """The groups of a call, and where each one's piece of every array lies.

    `most` is how many units one dispatch may have, for its grid and its meaning.
    """

    def __init__(
        self, backend: ContractBackend, units: int, most: int, arrays: dict[str, Array]
    ) -> None:
        self.backend, self.units, self.arrays = backend, units, arrays
        self.device, self._pipelines = backend.pipelines()
        limit = self.device.binding_limit
        self.per_group = min(units, most)
        for name, array in arrays.items():
            if 4 * array.length > limit:
                raise ValueError(
                    f"a binding ({name}) must have at most max-storage-buffer-binding-size = "
                    f"{limit} bytes on {self.device.name}, got {4 * array.length}: the shader "
                    f"contract cannot split it"
                )
            if array.per == "unit":
                self.per_group = min(self.per_group, limit // (4 * array.length))
        if self.per_group < units and self.per_group > 64:
            self.per_group = self.per_group // 64 * 64  # so that most pieces need no padding

    @property
    def sizes(self) -> list[int]:
        """Units of each group."""
        full, rest = divmod(self.units, self.per_group)
        return [self.per_group] * full + [rest] * (rest > 0)

    def _piece(self, array: Array) -> int:
        """Return the elements of a full group's piece of an array."""
        return array.length * (self.per_group if array.per == "unit" else 1)

    def _stride(self, array: Array) -> int:
        """Return the elements from one group's piece to the next one's, as bindings are aligned."""
        unit = self.device.alignment // 4
        return 0 if array.per == "call" else -(-self._piece(array) // unit) * unit

    def _total(self, array: Array) -> int:
        return max(4, self._stride(array) * len(self.sizes), self._piece(array))

    def _upload(self, name: str, array: Array) -> Buffer:
        buffer = self.device.buffer(4 * self._total(array), name)
        if array.content is not None:
            content: ndarray = np.ascontiguousarray(array.content, _F32).reshape(-1)
            piece, stride = self._piece(array), self._stride(array)
            if len(self.sizes) > 1 and stride and stride != piece:
                padded = np.zeros((len(self.sizes), stride), _F32)
                for i, row in enumerate(padded):
                    part = content[i * piece : (i + 1) * piece]
                    row[: len(part)] = part
                content = padded
            self.device.upload(content, buffer)
        return buffer

    def _without_padding(self, array: Array, block: ndarray) -> ndarray:
        """Return the pieces of a result: (units, length) or (groups, length)."""
        groups = len(self.sizes)
        block = block.reshape(groups, -1)[:, : self._piece(array)].reshape(-1)
        count = self.units if array.per == "unit" else groups
        return block[: count * array.length].reshape(count, array.length)

    def run(self, steps: Sequence[Step], results: Sequence[str]) -> dict[str, ndarray]:
        """Run the steps for every group, in one submit, and download results."""
        device = self.device
        commands = Commands(device)
        grids = [[self._grid(step, units) for step in steps] for units in self.sizes]
        buffers = {name: self._upload(name, array) for name, array in self.arrays.items()}
        for i, units in enumerate(self.sizes):
            for step, grid in zip(steps, grids[i], strict=True):
                interface = ENTRY_POINTS[step.entry_point].interface
                bindings: list[Any] = []
                for name in interface.arrays:
                    name = step.names.get(name, name)
                    array = self.arrays[name]
                    size = array.length * (units if array.per == "unit" else 1)
                    bindings.append(Binding(buffers[name], 4 * i * self._stride(array), 4 * size))
                bindings.append(device.constant(interface.uniform.pack(step.fields(units))))
                commands.steps.append((self._pipelines[step.entry_point], bindings, grid))
        self.backend.count(len(commands.steps))
        sizes = {name: self._total(self.arrays[name]) for name in results}
        parts = [
            (Binding(buffers[name], 0, 4 * size), np.empty(size, _F32))
            for name, size in sizes.items()
        ]
        return {
            name: self._without_padding(self.arrays[name], block)
            for name, block in zip(sizes, commands.submit(parts), strict=True)
        }

    def _grid(self, step: Step, units: int) -> tuple[int, ...]:
        entry, axes = ENTRY_POINTS[step.entry_point], {"1": 1, **step.fields(units)}
        found = tuple(
            -(-axes[axis] // size) for axis, size in zip(entry.covers, entry.workgroup, strict=True)
        )
        limit = self.device.grid_limit
        if max(found) > limit:
            raise ValueError(
                f"{step.entry_point} needs {max(found)} workgroups in a dimension, and "
                f"max-compute-workgroups-per-dimension is {limit} on {self.device.name}: the "
                f"shader contract cannot split it"
            )
        return found
