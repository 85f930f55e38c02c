"""Hop 5's ground: a device with its pipelines, bind groups and programs.

Everything that speaks to wgpu is in this folder. wgpu's own objects are safe to use from several
threads; what is kept beside them (pools and caches) is guarded by a lock.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.device import forks
from numfuse.backends.webgpu.device.commands import Commands, Labels, Pipeline
from numfuse.backends.webgpu.device.memory import Binding, Memory
from numfuse.backends.webgpu.device.trials import flushed_subnormals, one_rounding
from numfuse.errors import BackendUnavailable, DeviceError, DeviceLost
from numfuse.runtime.lifetimes import Ties

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.adapters import Adapter
    from numfuse.backends.webgpu.shaders.shader import Shader
    from numfuse.expr import Expr

__all__ = ["FEATURES", "Device"]

#: {storage dtype: the features that it takes}.
FEATURES = {
    "float32": (),
    "float16": ("shader-f16",),
    # primitives work on the bits, in 64-bit integers
    "float64": ("shader-f64", "shader-int64"),
}
_WANTED = ("shader-f16", "shader-f64", "shader-int64", "timestamp-query")


def _direct() -> tuple[Any, Any, Any, Any] | None:
    """The three calls of a dispatch in the C library of wgpu, as wgpu makes them itself.

    Its Python methods take 2 to 4 us each, a third of a small call's time. (An error in one is told
    by the end of the pass, which is wgpu's own method.) None where this wgpu is built otherwise.
    """
    try:
        from wgpu.backends.wgpu_native import ffi, lib

        return (
            lib.wgpuComputePassEncoderSetPipeline,
            lib.wgpuComputePassEncoderSetBindGroup,
            lib.wgpuComputePassEncoderDispatchWorkgroups,
            ffi.NULL,
        )
    except (ImportError, AttributeError):
        return None


_DIRECT = _direct()


class _Cache:
    """A bounded table, the least recently used entry goes first."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._entries: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = make()
            if len(self._entries) > self._length:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return found

    def clear(self) -> None:
        self._entries.clear()


class Device(Memory):
    """A wgpu device and what is kept for it.

    Parameters
    ----------
    adapter : Adapter
    limits : dict, optional
        {name of a limit of WebGPU: value} to ask for in place of the adapter's own: how a test, or
        a user, sees what a smaller device would do.
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
        self.binding_limit = (
            min(self.limits["max-storage-buffer-binding-size"], self.limits["max-buffer-size"])
            // 16
            * 16
        )
        self.buffer_limit = self.limits["max-buffer-size"] // 16 * 16
        self.alignment = max(16, self.limits["min-storage-buffer-offset-alignment"])
        #: Bytes of an array that can be bound wherever it begins.
        self.room = self.binding_limit - 2 * self.alignment
        self.grid_limit = self.limits["max-compute-workgroups-per-dimension"]
        self.dtypes = frozenset(
            name for name, needs in FEATURES.items() if self.features.issuperset(needs)
        )
        self.lost = False
        #: Submits so far, of all threads.
        self.submits = 0
        #: By shader; one with a formula goes with the formula.
        self._pipelines: dict[Shader, Pipeline] = {}
        self._ties = Ties(lambda key: self._pipelines.pop(key, None))
        self._layouts: dict[tuple[str, ...], Any] = {}
        self._constants = _Cache(tiling.KEPT_CONSTANTS)
        self._groups = _Cache(tiling.KEPT_GROUPS)
        #: Of calls on arrays of the device, by what they depend on (see `program`).
        self.programs: OrderedDict[Any, Any] = OrderedDict()
        self._program_ties = Ties(lambda key: self.programs.pop(key, None))
        forks.remember(self)

    @functools.cached_property
    def one_rounding(self) -> dict[str, bool]:
        """{accumulator: whether fma rounds once here}, found by trying it."""
        return one_rounding(self)

    @functools.cached_property
    def flushes_subnormals(self) -> frozenset[str]:
        """The dtypes of which subnormal numbers count as zero here, found by trying."""
        return flushed_subnormals(self)

    # --- errors ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reported(self, label: Any) -> Iterator[None]:
        """wgpu's errors as Python's and numfuse's, with what was being done."""
        try:
            yield
        except wgpu.GPUOutOfMemoryError as error:
            raise MemoryError(f"{self.name} is out of memory in {label!r}: {error}") from error
        except (wgpu.GPUError, RuntimeError) as error:
            if isinstance(error, DeviceError):
                raise
            text = str(error)
            if getattr(self, "lost", False) or "lost" in text.casefold() or "destroyed" in text:
                self.lost = True
                raise DeviceLost(f"{self.name} is lost, in {label!r}: {text}") from error
            if "not enough memory" in text.casefold() or "out of memory" in text.casefold():
                raise MemoryError(f"{self.name} is out of memory in {label!r}: {text}") from error
            raise DeviceError(f"{self.name} refused {label!r}: {text}") from error

    # --- memory ---------------------------------------------------------------------------------

    def trim(self) -> None:
        """Give the memory of the pool, and what refers to it, back to the driver."""
        with self._lock:
            self._groups.clear()
        super().trim()

    def constant(self, content: bytes, uniform: bool = True) -> Any:
        """A small buffer with this content, made once."""
        usage = wgpu.BufferUsage.UNIFORM if uniform else wgpu.BufferUsage.STORAGE

        def make() -> Any:
            padded = content + bytes(-len(content) % 16)
            with self.reported("constants"):
                return self.handle.create_buffer_with_data(data=padded, usage=usage)

        with self._lock:
            return self._constants.get((content, uniform), make)

    # --- shaders --------------------------------------------------------------------------------

    def layout(self, accesses: tuple[str, ...]) -> tuple[Any, Any]:
        """The layouts of a bind group and of a pipeline: a uniform, then these storage buffers."""
        with self._lock:
            found = self._layouts.get(accesses)
            if found is None:
                kinds = ["uniform"]
                kinds += [
                    {"read": "read-only-storage", "read_write": "storage"}[a] for a in accesses
                ]
                group = self.handle.create_bind_group_layout(
                    entries=[
                        {
                            "binding": i,
                            "visibility": wgpu.ShaderStage.COMPUTE,
                            "buffer": {"type": kind},
                        }
                        for i, kind in enumerate(kinds)
                    ]
                )
                pipeline = self.handle.create_pipeline_layout(bind_group_layouts=[group])
                found = self._layouts[accesses] = group, pipeline
        return found

    def pipeline(self, shader: Shader) -> Pipeline:
        """The shader, compiled at its first use on this device."""
        found = self._pipelines.get(shader)
        if found is not None:
            return found
        with self.reported(shader.label):
            group, layout = self.layout(tuple(buffer.access for buffer in shader.buffers))
            module = self.handle.create_shader_module(label=shader.label, code=shader.text())
            made = self.handle.create_compute_pipeline(
                label=shader.label, layout=layout, compute={"module": module, "entry_point": "main"}
            )
        found = self._pipelines.setdefault(shader, Pipeline(shader.label, made, group))
        self._ties.tie(shader, shader.formulas())
        return found

    def keep_program(self, key: Any, program: Any, formulas: Iterable[Expr]) -> None:
        """Keep the program of a call as long as its formulas live, in place of the oldest where
        there are many."""
        if program is None:
            return
        formulas = tuple(formulas)
        with self._lock:
            self.programs[key] = program
            self._program_ties.tie(key, formulas)
            if len(self.programs) > tiling.KEPT_PROGRAMS:
                oldest, _ = self.programs.popitem(last=False)
                self._program_ties.untie(oldest)

    @property
    def pipelines(self) -> int:
        """How many shaders have been compiled."""
        return len(self._pipelines)

    def group(self, layout: Any, uniform: Any, bindings: Sequence[Binding | Any]) -> Any:
        """The bind group of a uniform and these parts of buffers, made once."""
        parts = []
        key: list[Any] = [id(layout), id(uniform)]
        for b in bindings:
            if isinstance(b, Binding):
                parts.append((b.buffer.handle, b.offset, b.size))
                key += (id(b.buffer.handle), b.offset, b.size)
            else:
                parts.append((b, 0, b.size))
                key += (id(b), 0, b.size)

        def make() -> Any:
            resources = [(uniform, 0, uniform.size), *parts]
            group = self.handle.create_bind_group(
                layout=layout,
                entries=[
                    {"binding": i, "resource": {"buffer": h, "offset": o, "size": s}}
                    for i, (h, o, s) in enumerate(resources)
                ],
            )
            return group, resources  # the key's identities stay theirs for as long as it is kept

        with self._lock:
            return self._groups.get(tuple(key), make)[0]

    def encoded(self, dispatches: Sequence[tuple[Pipeline, Any, tuple[int, int, int]]]) -> Any:
        """A command encoder with these (pipeline, bind group, grid) in one pass."""
        encoder = self.handle.create_command_encoder()
        if dispatches:
            run = encoder.begin_compute_pass()
            if _DIRECT is None:
                for pipeline, group, grid in dispatches:
                    run.set_pipeline(pipeline.handle)
                    run.set_bind_group(0, group)
                    run.dispatch_workgroups(*grid)
            else:
                set_pipeline, set_bind_group, dispatch, null = _DIRECT
                number = run._internal
                for pipeline, group, grid in dispatches:
                    set_pipeline(number, pipeline.handle._internal)
                    set_bind_group(number, 0, group._internal, 0, null)
                    dispatch(number, *grid)
            run.end()
        return encoder

    def submit(self, dispatches: Sequence[tuple[Pipeline, Any, tuple[int, int, int]]]) -> None:
        """Give the device these dispatches, and do not wait for them."""
        # A try, and not a context: this is the way of every call on arrays of the device.
        try:
            self.queue.submit([self.encoded(dispatches).finish()])
        except Exception as error:
            with self.reported(Labels(dispatches)):
                raise error
        self.submits += 1

    def grid(self, count: int) -> tuple[int, int]:
        """Workgroups in one row, or in rows where the device takes no row so long."""
        if count <= self.grid_limit:
            return count, 1
        rows = -(-count // self.grid_limit)
        return -(-count // rows), rows

    def wait(self) -> None:
        """Until all that was submitted is done."""
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
