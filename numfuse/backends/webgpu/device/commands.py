"""The work that a call gives a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.device import waits
from numfuse.backends.webgpu.device.memory import Binding

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device
    from numfuse.backends.webgpu.shaders.shader import Shader


class Pipeline(NamedTuple):
    """A compiled shader."""

    label: str
    handle: Any
    layout: Any


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
        values: Mapping[str, int],
        grid: tuple[int, int, int],
    ) -> None:
        """Run a shader with its buffers and the fields of its uniform, by name."""
        device = self.device
        pipeline = device.pipeline(shader)
        uniform = device.constant(shader.uniform.pack(values))
        bound = [uniform, *(bindings[buffer.name] for buffer in shader.buffers)]
        self.steps.append((pipeline, bound, grid))

    def submit(self, downloads: Sequence[tuple[Binding, ndarray]] = ()) -> list[ndarray]:
        """Give the device its work; wait for what is to be downloaded, and return it in new arrays.

        A download is a part of a buffer, and an array of which nothing is used but shape and dtype.
        """
        steps, self.steps = self.steps, []
        device = self.device
        dispatches = [(how, device.group(how.layout, bound), grid) for how, bound, grid in steps]
        if downloads:
            return fetch(device, dispatches, downloads)
        if dispatches:
            device.submit(dispatches)
        return []


def fetch(
    device: Device, dispatches: Sequence[Any], downloads: Sequence[tuple[Binding, ndarray]]
) -> list[ndarray]:
    """Submit dispatches, wait, and return parts of buffers as `Commands.submit` does."""
    sizes = [-(-binding.size // 16) * 16 for binding, _ in downloads]
    total, ends = sum(sizes), list(accumulate(sizes))
    parts = list(zip(downloads, sizes, ends, strict=True))
    with device.reported(dispatches):
        staging = device.staging(total)
        copies = [
            (binding.buffer.handle, binding.offset, staging, end - size, size)
            for (binding, _), size, end in parts
        ]
        device.submit(dispatches, copies)
        try:
            waits.settle(device, staging.map_async("READ_NOSYNC", 0, total))
            mapped = np.frombuffer(staging.read_mapped(0, total, copy=False), np.uint8)
            found = []
            for (_, like), size, end in parts:
                part = mapped[end - size :][: like.nbytes].view(like.dtype)
                found.append(part.reshape(like.shape).copy())
            del mapped, part
            staging.unmap()
        except BaseException:
            staging.destroy()
            raise
        device.keep_staging(staging)
    return found
