"""The work that a call gives a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.device.memory import Binding

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device
    from numfuse.backends.webgpu.shaders.shader import Shader

__all__ = ["Commands", "Labels", "Pipeline"]


class Pipeline(NamedTuple):
    """A compiled shader."""

    label: str
    handle: Any
    layout: Any


class Labels:
    """The labels of steps, put together only where an error needs them."""

    def __init__(self, steps: Sequence[tuple[Any, ...]]) -> None:
        self._steps = steps

    def __repr__(self) -> str:
        return repr(", ".join(dict.fromkeys(step[0].label for step in self._steps)) or "copy")


class Commands:
    """The work that a call gives a device to do, in one submit."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: What is to be dispatched: pipeline, bindings, grid.
        self.steps: list[tuple[Pipeline, Sequence[Binding | Any], tuple[int, ...]]] = []

    def dispatch(
        self,
        shader: Shader,
        bindings: Mapping[str, Binding | Any],
        values: Mapping[str, int | Sequence[int]],
        grid: tuple[int, int, int],
    ) -> None:
        """Run a shader with its buffers and the fields of its uniform, by name."""
        device = self.device
        pipeline = device.pipeline(shader)
        uniform = device.constant(shader.uniform.pack(values))
        bound = [uniform, *(bindings[buffer.name] for buffer in shader.buffers)]
        self.steps.append((pipeline, bound, grid))

    def submit(self, downloads: Sequence[tuple[Binding, ndarray]] = ()) -> list[ndarray]:
        """Give the device its work; wait for what is to be downloaded.

        Parameters
        ----------
        downloads : sequence of (Binding, ndarray)
            Parts of buffers, and arrays of their shape and dtype (of which nothing is used but
            these).

        Returns
        -------
        list of ndarray
            New arrays with the contents.
        """
        device = self.device
        steps, self.steps = self.steps, []
        if not steps and not downloads:
            return []
        sizes = [-(-binding.size // 16) * 16 for binding, _ in downloads]
        dispatches = [
            (pipeline, device.group(pipeline.layout, bindings), grid)
            for pipeline, bindings, grid in steps
        ]
        if not downloads:
            device.submit(dispatches)
            return []
        with device.reported(Labels(steps)):
            staging = device.staging(sum(sizes))
            ends = list(accumulate(sizes))
            device.submit(
                dispatches,
                [
                    (binding.buffer.handle, binding.offset, staging, end - size, size)
                    for (binding, _), size, end in zip(downloads, sizes, ends, strict=True)
                ],
            )
            try:
                staging.map_async("READ_NOSYNC", 0, sum(sizes)).sync_wait()
                mapped = np.frombuffer(staging.read_mapped(0, sum(sizes), copy=False), np.uint8)
                found = []
                for (_, like), size, end in zip(downloads, sizes, ends, strict=True):
                    part = mapped[end - size :][: like.nbytes].view(like.dtype)
                    found.append(part.reshape(like.shape).copy())
                del mapped, part
                staging.unmap()
            except BaseException:
                staging.destroy()
                raise
            device.keep_staging(staging)
        return found
