"""Hop 5's ground: adapters, and a device with its pipelines, buffers and commands.

Everything that speaks to wgpu is here. wgpu's own objects are safe to use from several threads;
what this module keeps beside them (pools and caches) is guarded by a lock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import wgpu
from numpy import ndarray

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.device import forks
from numfuse.backends.webgpu.shaders.kernels import Kernel, Operand, Rounding, Subnormals
from numfuse.errors import BackendUnavailable, DeviceError, DeviceLost
from numfuse.expr import Expr, Keyed
from numfuse.runtime.lifetimes import Ties
from numfuse.runtime.pool import FreeBlocks

__all__ = ["Adapter", "Binding", "Buffer", "Commands", "Device", "adapters", "again", "choose"]

#: {storage dtype: the features that it takes}.
FEATURES = {
    "float32": (),
    "float16": ("shader-f16",),
    # primitives work on the bits, in 64-bit integers
    "float64": ("shader-f64", "shader-int64"),
}
_WANTED = ("shader-f16", "shader-f64", "shader-int64", "timestamp-query")
_USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
#: Better first. A CPU adapter is last: numfuse's own CPU backend is far faster.
_KINDS = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")
_VARIABLE = "NUMFUSE_WEBGPU_ADAPTER"
_INTERFACES = ("Vulkan", "Metal", "D3D12", "OpenGL", "OpenGLES")


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


class Adapter(NamedTuple):
    """One way to one device of this machine."""

    number: int
    name: str
    kind: str
    interface: str
    handle: Any

    def __str__(self) -> str:
        return f"{self.number}: {self.name} ({self.kind}, {self.interface})"


def adapters() -> list[Adapter]:
    """Every adapter that wgpu finds, in its order.

    Raises
    ------
    BackendUnavailable
        wgpu cannot look for adapters here: its library does not load, or this process was forked
        from one that had looked.
    """
    forks.begin()
    try:
        found = wgpu.gpu.enumerate_adapters_sync()
    except Exception as error:
        # Whatever wgpu fails with here, an ImportError of its library or an error of a driver, the
        # backend is not available, and the reason is passed on.
        raise BackendUnavailable("webgpu", f"wgpu found no adapters: {error!r}") from error
    return [
        Adapter(i, a.info["device"], a.info["adapter_type"], a.info["backend_type"], a)
        for i, a in enumerate(found)
    ]


def choose(which: str | int | None = None) -> Adapter:
    """The adapter of an index or of a name; None: the best there is.

    A name is any part of "<device> <interface>", such as "llvmpipe" or "OpenGL".

    `NUMFUSE_WEBGPU_ADAPTER` names the one that None takes.

    Raises
    ------
    ValueError
        No adapter has this name or index.
    BackendUnavailable
        There is no adapter at all, or none that `NUMFUSE_WEBGPU_ADAPTER` means.
    """
    found = adapters()
    if not found:
        raise BackendUnavailable("webgpu", "no adapter was found: no driver of a GPU is installed")
    ranked = sorted(
        found,
        key=lambda a: (
            _KINDS.index(a.kind) if a.kind in _KINDS else len(_KINDS) - 1.5,
            _INTERFACES.index(a.interface) if a.interface in _INTERFACES else len(_INTERFACES),
        ),
    )
    known = "; ".join(map(str, found))
    if which is None:
        wanted = os.environ.get(_VARIABLE)
        if not wanted:
            return ranked[0]
        try:
            return choose(wanted)
        except ValueError:
            # Not the caller's mistake: the backend as a whole is set to a device that is not here.
            reason = f"{_VARIABLE} is {wanted!r}, which no adapter is called ({known})"
            raise BackendUnavailable("webgpu", reason) from None
    if isinstance(which, str) and which.isdecimal():
        which = int(which)
    if isinstance(which, int) and not isinstance(which, bool):
        if not 0 <= which < len(found):
            raise ValueError(f"device must be the index of an adapter ({known}), got {which}")
        return found[which]
    if not isinstance(which, str):
        raise TypeError(f"device must be a name or an index, got {type(which).__name__}")
    for adapter in ranked:
        if which.casefold() in f"{adapter.name} {adapter.interface}".casefold():
            return adapter
    raise ValueError(f"device must be a part of an adapter's name ({known}), got {which!r}")


def again(adapter: Adapter) -> Adapter:
    """Return the same adapter, found anew, or one of its name if its interface is gone."""
    for found in adapters():
        if (found.name, found.interface) == (adapter.name, adapter.interface):
            return found
    return choose(adapter.name)


class Buffer:
    """Memory of a device; goes back to the device's pool when nothing refers to it."""

    __slots__ = ("__weakref__", "device", "handle", "size")

    def __init__(self, device: Device, handle: Any, size: int) -> None:
        self.device, self.handle, self.size = device, handle, size

    def __del__(self) -> None:
        # At the end of the process the device's own fields may be gone already.
        with contextlib.suppress(Exception):
            self.device.reclaim(self.handle, self.size)


class Binding(NamedTuple):
    """A part of a buffer as a kernel sees it."""

    buffer: Buffer
    offset: int
    size: int


class Pipeline(NamedTuple):
    """A compiled kernel."""

    label: str
    handle: Any
    layout: Any


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


class Device:
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
        self.grid_limit = self.limits["max-compute-workgroups-per-dimension"]
        self.dtypes = frozenset(
            name for name, needs in FEATURES.items() if self.features.issuperset(needs)
        )
        self.lost = False
        #: Submits so far, of all threads.
        self.submits = 0
        self._lock = threading.RLock()
        #: By kernels, those with a formula by what names it: they go with the formula.
        self._pipelines: dict[Any, Pipeline] = {}
        self._ties = Ties(lambda key: self._pipelines.pop(key, None))
        self._layouts: dict[tuple[str, ...], Any] = {}
        self._constants = _Cache(tiling.KEPT_CONSTANTS)
        self._groups = _Cache(tiling.KEPT_GROUPS)
        #: Every buffer of the pool and of a Buffer. Python may find both a Buffer and wgpu's object
        #: in one cycle of garbage, and would then end the second before the first gives it back.
        self._live: set[Any] = set()
        #: Of calls on arrays of the device, by what they depend on (see `plans`).
        self.plans: OrderedDict[Any, Any] = OrderedDict()
        self._plan_ties = Ties(lambda key: self.plans.pop(key, None))
        self._free: FreeBlocks[Any] = FreeBlocks(self._destroy, tiling.POOL_BYTES)
        self._staging: list[Any] = []
        forks.remember(self)

    @functools.cached_property
    def one_rounding(self) -> dict[str, bool]:
        """{accumulator: whether fma rounds once here}, found by trying it.

        WGSL allows two roundings; where it is one, low words of products cost one operation.
        """
        found = {}
        for name in self.dtypes & {"float32", "float64"}:
            dtype = np.dtype(name)
            rng = np.random.default_rng(1)
            factors = 1 + rng.random((64, 2)).astype(dtype)
            exact = [Fraction(float(a)) * Fraction(float(b)) for a, b in factors]
            rest = [
                float(e - Fraction(float(a * b))) for e, (a, b) in zip(exact, factors, strict=True)
            ]
            got = self._tried(Rounding(name), factors)
            found[name] = bool((got == np.array(rest, dtype)).all())
        return found

    @functools.cached_property
    def flushes_subnormals(self) -> frozenset[str]:
        """The dtypes of which subnormal numbers count as zero here, found by trying.

        WGSL leaves it open, and has no word to ask for either.
        """
        found = set()
        for name in self.dtypes:
            dtype = np.dtype(name)
            info = np.finfo(dtype)
            # an argument that is subnormal, and a result; 16 of each, for a length in words
            given = [(2 * info.smallest_subnormal, 1), (info.smallest_normal, 0.5)] * 16
            factors = np.array(given, dtype)
            kernel = Subnormals(Operand(name), "float64" if name == "float64" else "float32")
            products = self._tried(kernel, factors)
            if not (products == factors[:, 0] * factors[:, 1]).all():
                found.add(name)
        return frozenset(found)

    def _tried(self, kernel: Kernel, factors: ndarray) -> ndarray:
        """One result a row, of a kernel that takes one workgroup of them."""
        made = np.empty(len(factors), factors.dtype)
        buffers = self.buffer(factors.nbytes), self.buffer(made.nbytes)
        self.upload(factors, buffers[0])
        commands = Commands(self)
        whole = [Binding(buffer, 0, buffer.size) for buffer in buffers]
        commands.dispatch(kernel, whole, (len(factors), 0, 0, 0), (1, 1, 1))
        (got,) = commands.submit([(Binding(buffers[1], 0, made.nbytes), made)])
        return got

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

    def _capacity(self, size: int) -> int:
        """`size` rounded up so that buffers of nearly one size can stand in for each other."""
        if size <= 256:
            return 256
        step = max(256, 1 << (size.bit_length() - 3))
        return min(-(-size // step) * step, self.buffer_limit)

    def buffer(self, size: int, what: str = "array") -> Buffer:
        """A buffer of at least `size` bytes, with any content.

        Raises
        ------
        ValueError
            A buffer of this device cannot be so large.
        """
        if size > self.buffer_limit:
            raise ValueError(
                f"{what} must have at most max-buffer-size = {self.buffer_limit} bytes on "
                f"{self.name}, got {size}"
            )
        size = self._capacity(size)
        free = self._free.take(None, size, size)
        if free is not None:
            return Buffer(self, free, size)
        if self.lost:
            forks.refuse()
            raise DeviceLost(f"{self.name} is lost")
        with self.reported(f"buffer of {size} bytes"):
            handle = self.handle.create_buffer(size=size, usage=_USAGE)
        with self._lock:
            self._live.add(handle)
        return Buffer(self, handle, size)

    def reclaim(self, handle: Any, size: int) -> None:
        """Keep a buffer that nobody refers to any more for the next one of its size."""
        # What reads it has been submitted, and what the next owner does comes later in the queue.
        if forks.forked():
            return
        if self.lost:
            self._destroy(handle)
        else:
            self._free.keep(None, size, handle)

    def _destroy(self, handle: Any) -> None:
        self._live.discard(handle)
        handle.destroy()

    def trim(self) -> None:
        """Give the memory of the pool back to the driver."""
        with self._lock:
            self._groups.clear()
            staging, self._staging = self._staging, []
        self._free.clear()
        for handle, _ in staging:
            handle.destroy()

    def upload(self, x: ndarray, buffer: Buffer, offset: int = 0) -> None:
        """The bytes of a C-contiguous array into a buffer, at a multiple of four bytes."""
        if x.nbytes == 0:
            return
        data = x.reshape(-1).view(np.uint8)
        whole = data.nbytes // 4 * 4
        with self.reported("upload"):
            if whole:
                self.queue.write_buffer(buffer.handle, offset, data[:whole])
            if whole < data.nbytes:  # a copy takes whole words
                tail = np.zeros(4, np.uint8)
                tail[: data.nbytes - whole] = data[whole:]
                self.queue.write_buffer(buffer.handle, offset + whole, tail)

    def staging(self, size: int) -> Any:
        """A buffer to read from, of at least `size` bytes."""
        capacity = self._capacity(size)
        with self._lock:
            for i, (handle, held) in enumerate(self._staging):
                if held == capacity:
                    del self._staging[i]
                    return handle
        return self.handle.create_buffer(size=capacity, usage=_STAGING)

    def keep_staging(self, handle: Any) -> None:
        """Keep a buffer to read from for the next download, the latest few and no large ones."""
        size = handle.size
        with self._lock:
            if size <= tiling.STAGING_BYTES:
                self._staging.append((handle, size))
                if len(self._staging) <= tiling.KEPT_STAGING:
                    return
                handle, _ = self._staging.pop(0)
        handle.destroy()

    def constant(self, content: bytes, uniform: bool = True) -> Any:
        """A small buffer with this content, made once."""
        usage = wgpu.BufferUsage.UNIFORM if uniform else wgpu.BufferUsage.STORAGE

        def make() -> Any:
            padded = content + bytes(-len(content) % 16)
            with self.reported("constants"):
                return self.handle.create_buffer_with_data(data=padded, usage=usage)

        with self._lock:
            return self._constants.get((content, uniform), make)

    # --- kernels --------------------------------------------------------------------------------

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

    def pipeline(self, kernel: Kernel) -> Pipeline:
        """The kernel, compiled at its first use on this device."""
        key = kernel.named() if isinstance(kernel, Keyed) else kernel
        found = self._pipelines.get(key)
        if found is not None:
            return found
        with self.reported(kernel.label):
            group, layout = self.layout(tuple(access for _, _, access in kernel.buffers))
            module = self.handle.create_shader_module(label=kernel.label, code=kernel.text())
            made = self.handle.create_compute_pipeline(
                label=kernel.label, layout=layout, compute={"module": module, "entry_point": "main"}
            )
        found = self._pipelines.setdefault(key, Pipeline(kernel.label, made, group))
        if isinstance(kernel, Keyed):
            self._ties.tie(key, kernel.formulas())
        return found

    def keep_plan(self, key: Any, plan: Any, formulas: Iterable[Expr]) -> None:
        """Keep the plan of a call as long as its formulas live, in place of the oldest where there
        are many."""
        if plan is None:
            return
        formulas = tuple(formulas)
        with self._lock:
            self.plans[key] = plan
            self._plan_ties.tie(key, formulas)
            if len(self.plans) > tiling.KEPT_PLANS:
                oldest, _ = self.plans.popitem(last=False)
                self._plan_ties.untie(oldest)

    @property
    def pipelines(self) -> int:
        """How many kernels have been compiled."""
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
            with self.reported(_Labels(dispatches)):
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


class _Labels:
    """The labels of steps, put together only where an error needs them."""

    def __init__(self, steps: Sequence[tuple[Any, ...]]) -> None:
        self._steps = steps

    def __repr__(self) -> str:
        return repr(", ".join(dict.fromkeys(step[0].label for step in self._steps)) or "copy")


class Commands:
    """The work that a call gives a device to do, in one submit."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: What is to be dispatched: pipeline, uniform, bindings, grid.
        self.steps: list[tuple[Pipeline, Any, Sequence[Binding | Any], tuple[int, int, int]]] = []

    def dispatch(
        self,
        kernel: Kernel,
        bindings: Sequence[Binding | Any],
        parameters: Sequence[int],
        grid: tuple[int, int, int],
    ) -> None:
        """Run a kernel; `parameters` are the words of its uniform, negative ones wrap."""
        device = self.device
        pipeline = device.pipeline(kernel)
        content = struct.pack(f"<{len(parameters)}I", *(v & 0xFFFFFFFF for v in parameters))
        uniform = device.constant(content)
        self.steps.append((pipeline, uniform, bindings, grid))

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
            (pipeline, device.group(pipeline.layout, uniform, bindings), grid)
            for pipeline, uniform, bindings, grid in steps
        ]
        if not downloads:
            device.submit(dispatches)
            return []
        with device.reported(_Labels(steps)):
            encoder = device.encoded(dispatches)
            staging = device.staging(sum(sizes))
            at = 0
            for (binding, _), size in zip(downloads, sizes, strict=True):
                encoder.copy_buffer_to_buffer(
                    binding.buffer.handle, binding.offset, staging, at, size
                )
                at += size
            device.queue.submit([encoder.finish()])
            device.submits += 1
            try:
                staging.map_async("READ_NOSYNC", 0, sum(sizes)).sync_wait()
                mapped = np.frombuffer(staging.read_mapped(0, sum(sizes), copy=False), np.uint8)
                found, at = [], 0
                for (_, like), size in zip(downloads, sizes, strict=True):
                    part = mapped[at : at + like.nbytes].view(like.dtype).reshape(like.shape)
                    found.append(part.copy())
                    at += size
                del mapped, part
                staging.unmap()
            except BaseException:
                staging.destroy()
                raise
            device.keep_staging(staging)
        return found
