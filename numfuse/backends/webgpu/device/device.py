"""Hop 5's ground: a device with its pipelines, bind groups and programs.

Everything that speaks to wgpu is in this folder. wgpu's own objects are safe to use from several
threads; what is kept beside them (pools and caches) is guarded by a lock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.device import forks, modules, trials, waits
from numfuse.backends.webgpu.device.commands import Commands, Pipeline
from numfuse.backends.webgpu.device.memory import Binding
from numfuse.backends.webgpu.device.submits import Submits
from numfuse.errors import BackendUnavailable
from numfuse.runtime.replay import Replay

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.adapters import Adapter
    from numfuse.backends.webgpu.shaders.shader import Shader

#: {storage dtype: the features that it takes}.
FEATURES = {
    "float32": (),
    "float16": ("shader-f16",),
    # primitives work on the bits, in 64-bit integers
    "float64": ("shader-f64", "shader-int64"),
}
#: {access of a binding: its type in a layout}
_BINDINGS = {"uniform": "uniform", "read": "read-only-storage", "read_write": "storage"}
_WANTED = ("shader-f16", "shader-f64", "shader-int64", "timestamp-query")


class Device(Submits):
    """A wgpu device and what is kept for it.

    `limits` are limits of WebGPU to ask for in place of the adapter's own: how a test, or a user,
    sees what a smaller device would do.
    """

    def __init__(self, adapter: Adapter, limits: dict[str, int] | None = None) -> None:
        forks.refuse()
        super().__init__()
        self.adapter = adapter
        self.name = adapter.name
        handle = adapter.handle
        offered = set(handle.features)
        wanted = [name for name in _WANTED if name in offered]
        asked = {**dict(handle.limits), **(limits or {})}
        try:
            self.handle = handle.request_device_sync(
                label="numfuse", required_features=wanted, required_limits=asked
            )
        except (wgpu.GPUError, RuntimeError) as error:
            # some adapters are listed and give no device, as NVIDIA's OpenGL without a display
            raise BackendUnavailable("webgpu", f"{adapter} gives no device: {error}") from error
        self.queue = self.handle.queue
        self.features = frozenset(wanted)
        self.limits: dict[str, int] = {**dict(self.handle.limits), **(limits or {})}
        self.buffer_limit = self.limits["max-buffer-size"] // 16 * 16
        binding = self.limits["max-storage-buffer-binding-size"] // 16 * 16
        self.binding_limit = min(binding, self.buffer_limit)
        self.alignment = max(16, self.limits["min-storage-buffer-offset-alignment"])
        #: Bytes of an array that can be bound wherever it begins.
        self.room = self.binding_limit - 2 * self.alignment
        self.grid_limit = self.limits["max-compute-workgroups-per-dimension"]
        self.dtypes = frozenset(
            name for name, needs in FEATURES.items() if self.features.issuperset(needs)
        )
        #: Seconds for which it is asked whether it is done.
        self.asks = waits.seconds(adapter.kind)
        self.lost = False
        #: By shader; one with a formula goes with the formula.
        self.pipelines: Replay[Pipeline] = Replay(1 << 30, 1 << 30)
        self._layouts: dict[Any, tuple[Any, Any]] = {}
        self.constants: Replay[Any] = Replay(*tiling.KEPT_CONSTANTS)
        #: With each bind group the parts of buffers whose identities are in its key.
        self.groups: Replay[tuple[Any, list[Any]]] = Replay(*tiling.KEPT_GROUPS)
        #: The recorded calls on arrays of the device (see `program`), and on NumPy's (`host`).
        self.programs: Replay[Any] = Replay(*tiling.KEPT_PROGRAMS)
        self.hosted: Replay[Any] = Replay(*tiling.KEPT_PROGRAMS)
        #: Arrays of the numbers that calls had among their operands.
        self.numbers: Replay[Any] = Replay(*tiling.KEPT_NUMBERS)
        forks.DEVICES.add(self)

    def __str__(self) -> str:
        return self.name

    #: {accumulator: whether fma rounds once here}, and the dtypes whose subnormal numbers count as
    #: zero here, both found by trying.
    one_rounding = functools.cached_property(trials.one_rounding)
    flushes_subnormals = functools.cached_property(trials.flushed_subnormals)

    # --- memory ---------------------------------------------------------------------------------

    def trim(self) -> None:
        """Give the memory of the pool, and what refers to it, back to the driver."""
        self.groups.clear()
        super().trim()

    def constant(self, content: bytes, uniform: bool = True) -> Any:
        """A small buffer with this content, made once."""
        found = self.constants.find((content, uniform))
        if found is None:
            usage = wgpu.BufferUsage.UNIFORM if uniform else wgpu.BufferUsage.STORAGE
            padded = content + bytes(-len(content) % 16)
            with self.reported("constants"):
                made = self.handle.create_buffer_with_data(data=padded, usage=usage)
            found = self.constants.keep((content, uniform), made, nbytes=len(padded))
        return found

    # --- shaders --------------------------------------------------------------------------------

    def layout(self, kinds: tuple[tuple[str, int], ...]) -> tuple[Any, Any]:
        """Return the layouts of a bind group and of a pipeline.

        `kinds` are the access of each binding ("uniform", "read" or "read_write"), and the bytes
        that it has at the least.
        """
        found = self._layouts.get(kinds)
        if found is None:
            entries = [
                {
                    "binding": i,
                    "visibility": wgpu.ShaderStage.COMPUTE,
                    "buffer": {"type": _BINDINGS[kind], "min_binding_size": least},
                }
                for i, (kind, least) in enumerate(kinds)
            ]
            group = self.handle.create_bind_group_layout(entries=entries)
            pipeline = self.handle.create_pipeline_layout(bind_group_layouts=[group])
            found = self._layouts.setdefault(kinds, (group, pipeline))
        return found

    def compiled(
        self, label: str, module: Any, kinds: tuple[tuple[str, int], ...], entry_point: str = "main"
    ) -> Pipeline:
        """Return the pipeline of a module's entry point, with a layout of these kinds."""
        group, layout = self.layout(kinds)
        made = self.handle.create_compute_pipeline(
            label=label, layout=layout, compute={"module": module, "entry_point": entry_point}
        )
        return Pipeline(label, made, group)

    def pipeline(self, shader: Shader) -> Pipeline:
        """The shader, compiled at its first use on this device."""
        found = self.pipelines.find(shader)
        if found is None:
            with self.reported(shader.label):
                how = shader.label, shader.text(), shader.trusted
                module = modules.module(self.handle, *how)
                kinds = ("uniform", 0), *((buffer.access, 0) for buffer in shader.buffers)
                made = self.compiled(shader.label, module, kinds)
            found = self.pipelines.keep(shader, made, shader.formulas())
        return found

    def group(self, layout: Any, bindings: Sequence[Binding | Any]) -> Any:
        """Return the bind group of these parts of buffers and `constant`s, made once."""
        parts = [
            (b.buffer.handle, b.offset, b.size) if isinstance(b, Binding) else (b, 0, b.size)
            for b in bindings
        ]
        key = id(layout), *((id(handle), offset, size) for handle, offset, size in parts)
        found = self.groups.find(key)
        if found is None:
            entries = [
                {"binding": i, "resource": {"buffer": handle, "offset": offset, "size": size}}
                for i, (handle, offset, size) in enumerate(parts)
            ]
            group = self.handle.create_bind_group(layout=layout, entries=entries)
            # with what keeps the key's identities its own
            found = self.groups.keep(key, (group, [layout, *parts]), nbytes=len(parts))
        return found[0]

    def grid(self, count: int) -> tuple[int, int]:
        """Workgroups in one row, or in rows where the device takes no row so long."""
        if count <= self.grid_limit:
            return count, 1
        rows = -(-count // self.grid_limit)
        return -(-count // rows), rows

    def wait(self) -> None:
        """Until all that was submitted is done."""
        if self.asks:
            self.submit()
            if waits.idle(self):
                return
        # A read comes after all that is in the queue. (The promise of the queue itself has a
        # callback of the wrong type in wgpu 0.32.)
        Commands(self).submit([(Binding(self.buffer(16), 0, 16), np.empty(16, np.uint8))])

    def describe(self) -> dict[str, Any]:
        """Return what `info` shows, by name."""
        limits = (
            "max-storage-buffer-binding-size",
            "max-buffer-size",
            "max-compute-workgroup-storage-size",
            "max-compute-invocations-per-workgroup",
            "max-compute-workgroups-per-dimension",
        )
        return {
            "device": f"{self.name} ({self.adapter.kind}, {self.adapter.interface})",
            "dtypes": sorted(self.dtypes),
            "features": sorted(self.features),
            "flushes subnormals": sorted(self.flushes_subnormals),
            "limits": {name: self.limits[name] for name in limits},
        }
