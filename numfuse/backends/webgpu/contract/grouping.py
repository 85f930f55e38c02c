"""The groups of a call by the shader contract: their uploads, passes and downloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.contract.entry_points import ENTRY_POINTS
from numfuse.backends.webgpu.device.commands import Commands
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.device.memory import Binding, Buffer

if TYPE_CHECKING:
    from numfuse.backends.webgpu.contract.backend import ContractBackend

__all__ = ["Array", "Grouping", "Step"]

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
    #: The fields of its uniform and the sizes of its axes, for a group of so many units.
    values: Any
    axes: Any
    #: {name of an array in the contract: name in the call}, where they differ.
    names: Mapping[str, str] = {}


@dataclass
class Grouping:
    """The groups of a call, and where each one's piece of every array lies."""

    backend: ContractBackend
    units: int
    #: Units that one dispatch may have, for its grid and its meaning.
    most: int
    arrays: dict[str, Array]
    device: Device = field(init=False)
    per_group: int = field(init=False)

    def __post_init__(self) -> None:
        self.device, self._pipelines = self.backend.pipelines()
        limit = self.device.binding_limit
        self.per_group = min(self.units, self.most)
        for name, array in self.arrays.items():
            if 4 * array.length > limit:
                raise ValueError(
                    f"a binding ({name}) must have at most max-storage-buffer-binding-size = "
                    f"{limit} bytes on {self.device.name}, got {4 * array.length}: the shader "
                    f"contract cannot split it"
                )
            if array.per == "unit":
                self.per_group = min(self.per_group, limit // (4 * array.length))
        if self.per_group < self.units and self.per_group > 64:
            self.per_group = self.per_group // 64 * 64  # so that most pieces need no padding

    @property
    def sizes(self) -> list[int]:
        """Units of each group."""
        full, rest = divmod(self.units, self.per_group)
        return [self.per_group] * full + [rest] * (rest > 0)

    def _stride(self, array: Array) -> int:
        """Bytes from one group's piece to the next one's, aligned as a binding has to be."""
        if array.per == "call":
            return 0
        alignment = self.device.alignment
        return -(-self._nbytes(array, self.per_group) // alignment) * alignment

    def _nbytes(self, array: Array, units: int) -> int:
        """Return the bytes of a group's piece of an array."""
        return 4 * array.length * (units if array.per == "unit" else 1)

    def _total(self, array: Array) -> int:
        full = self._nbytes(array, self.per_group)
        return self._stride(array) * (len(self.sizes) - 1) + full

    def _upload(self, name: str, array: Array) -> Buffer:
        buffer = self.device.buffer(max(16, self._total(array)), name)
        if array.content is not None:
            stride, piece = self._stride(array), self._nbytes(array, self.per_group)
            content = np.ascontiguousarray(array.content, _F32)
            if array.per == "unit" and len(self.sizes) > 1 and stride != piece:
                flat = content.reshape(-1)
                content = np.zeros((len(self.sizes), stride // 4), _F32)
                for i, row in enumerate(content):
                    part = flat[i * piece // 4 : (i + 1) * piece // 4]
                    row[: len(part)] = part
            self.device.upload(content, buffer)
        return buffer

    def _without_padding(self, array: Array, block: ndarray) -> ndarray:
        """The pieces of a result: (units, length) or (groups, length)."""
        groups, stride = len(self.sizes), self._stride(array) // 4
        piece = self._nbytes(array, self.per_group) // 4
        if groups > 1 and stride != piece:
            padded = np.zeros((groups, stride), _F32)
            padded.reshape(-1)[: len(block)] = block
            block = np.ascontiguousarray(padded[:, :piece]).reshape(-1)
        count = self.units if array.per == "unit" else groups
        return block[: count * array.length].reshape(count, array.length)

    def run(self, steps: Sequence[Step], results: Sequence[str]) -> dict[str, ndarray]:
        """Run the steps for every group, in one submit, and download results."""
        device = self.device
        grids = {}
        for step in steps:
            entry = ENTRY_POINTS[step.entry_point]
            for units in set(self.sizes):
                axes = {"1": 1, **step.axes(units)}
                grid = tuple(
                    -(-axes[axis] // size)
                    for axis, size in zip(entry.covers, entry.workgroup, strict=True)
                )
                if max(grid) > device.grid_limit:
                    raise ValueError(
                        f"{step.entry_point} needs {max(grid)} workgroups in a dimension, and "
                        f"max-compute-workgroups-per-dimension is {device.grid_limit} on "
                        f"{device.name}: the shader contract cannot split it"
                    )
                grids[step.entry_point, units] = grid
        buffers = {name: self._upload(name, array) for name, array in self.arrays.items()}
        label = ", ".join(dict.fromkeys(self._pipelines[step.entry_point].label for step in steps))
        passes = 0
        with device.reported(label):
            encoder = device.handle.create_command_encoder(label=label)
            for i, units in enumerate(self.sizes):
                groups: dict[Any, Any] = {}  # passes with the same bindings have one bind group
                for step in steps:
                    pipeline = self._pipelines[step.entry_point]
                    interface = ENTRY_POINTS[step.entry_point].interface
                    content = interface.uniform.pack(step.values(units))
                    key = id(pipeline.layout), content, tuple(step.names.items())
                    if key not in groups:
                        names = [step.names.get(name, name) for name in interface.arrays]
                        groups[key] = self._group(
                            pipeline.layout, names, buffers, i, units, content
                        )
                    run = encoder.begin_compute_pass(label=pipeline.label)
                    run.set_pipeline(pipeline.handle)
                    run.set_bind_group(0, groups[key])
                    run.dispatch_workgroups(*grids[step.entry_point, units])
                    run.end()
                    passes += 1
            device.queue.submit([encoder.finish()])
            device.submits += 1
        self.backend.count(passes)
        downloads = []
        for name in results:
            size = self._total(self.arrays[name])
            downloads.append((Binding(buffers[name], 0, size), np.empty(size // 4, _F32)))
        blocks = Commands(device).submit(downloads)
        return {
            name: self._without_padding(self.arrays[name], block)
            for name, block in zip(results, blocks, strict=True)
        }

    def _group(
        self,
        layout: Any,
        names: Sequence[str],
        buffers: Mapping[str, Buffer],
        group: int,
        units: int,
        content: bytes,
    ) -> Any:
        resources = []
        for name in names:
            array = self.arrays[name]
            resources.append(
                {
                    "buffer": buffers[name].handle,
                    "offset": group * self._stride(array),
                    "size": self._nbytes(array, units),
                }
            )
        uniform = self.device.constant(content)
        resources.append({"buffer": uniform, "offset": 0, "size": uniform.size})
        return self.device.handle.create_bind_group(
            layout=layout,
            entries=[{"binding": i, "resource": r} for i, r in enumerate(resources)],
        )
