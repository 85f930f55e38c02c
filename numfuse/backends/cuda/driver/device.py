"""CUDA devices: memory, modules, launches, errors.

Contexts are the primary ones, which the CUDA runtime (and so PyTorch, CuPy, JAX and Numba) uses
too. A launch is one C call with arguments that were packed before.

Errors. What a call itself gets wrong is a `DeviceError` (MemoryError for memory). A kernel that
fails is found at a later call: the message names the launches since the last synchronise. Some
failures end the context (an illegal address, a failed assertion): then the device is lost for this
process, and every later call raises `DeviceLost`.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_void_p
from functools import cached_property
from typing import Any

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile.toolchain import Kernel
from numfuse.backends.cuda.driver.libcuda import answer, count, library
from numfuse.backends.cuda.driver.modules import Module, Retired
from numfuse.backends.cuda.driver.prepared import Prepared
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch
from numfuse.errors import DeviceError, DeviceLost
from numfuse.runtime.replay import Replay

#: Launches named by the message of an asynchronous error.
REMEMBERED = 32
# Errors after which the context can do nothing any more (CUDA driver API, CUresult): of memory and
# NVLink, of addresses, assertions, instructions, launches and tensor maps, and the unknown one.
_FATAL = frozenset({214, 219, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})
_OUT_OF_MEMORY = 2
# CUdevice_attribute
_ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "multiprocessors": 16,
    "shared_per_block": 97,
    "shared_per_multiprocessor": 81,
    "l2_bytes": 38,
}
_THREAD_LOCAL, _RELAXED = 1, 2  # CUstreamCaptureMode
_NO_TIMING = 2  # CUevent_flags
_NOT_READY = 600
#: A driver without a compiler, one that may not compile, text that is too new for it.
_NOT_ASSEMBLED = (218, 221, 222, 223)


class Device:
    """A CUDA device and its primary context."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.cuda = cuda = library()
        status, self._handle = answer(cuda.cuDeviceGet, ordinal)
        if status:
            raise ValueError(f"device must be below {count()}, got {ordinal}")
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, 256, self._handle)
        ask = cuda.cuDeviceGetAttribute
        values = {key: answer(ask, number, self._handle)[1] for key, number in _ATTRIBUTES.items()}
        capability = values.pop("major"), values.pop("minor")
        self.info = DeviceInfo(name.value.decode(), capability, **values)
        self._begin()

    def _begin(self) -> None:
        #: Why the device is lost; None as long as it is not.
        self.lost: str | None = None
        #: How products are run, by what that depends on.
        self.kept_products: Replay[Any] = Replay(4 * tiling.KEPT_PLANS, 0)
        self._launched: deque[str] = deque(maxlen=REMEMBERED + 1)
        #: Note a launch, for the message of a later error.
        self.note: Callable[[str], None] = self._launched.append
        #: Of every kernel that was loaded and still is kept.
        self._modules: weakref.WeakKeyDictionary[Kernel, Module] = weakref.WeakKeyDictionary()
        self.retired = Retired()
        self._lock = threading.RLock()
        #: The event of the latest `pace`; 0: none.
        self._piece = 0

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.info.name})"

    @property
    def capability(self) -> tuple[int, int]:
        return self.info.capability

    @cached_property
    def context(self) -> int:
        """The primary context, kept to the end of the process."""
        return self._made("its context", self.cuda.cuDevicePrimaryCtxRetain, self._handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make its context the current one of this thread, and the one before again after it."""
        if self.lost is not None:
            raise DeviceLost(self.lost)
        _, before = answer(self.cuda.cuCtxGetCurrent)
        if before == self.context:
            yield
            return
        self.check(self.cuda.cuCtxSetCurrent(self.context), "its context")
        try:
            yield
        finally:
            if before:
                self.cuda.cuCtxSetCurrent(before)

    # --- errors -----------------------------------------------------------------------------
    def check(self, status: int, what: str) -> None:
        """Raise what a status of the driver says."""
        if not status:
            return
        text = self.cuda.text(status)
        if status in _FATAL:
            self.lost = (
                f"{self} is lost for this process after {text}, found at "
                f"{what}; launched since the last synchronise: {self._names()}"
            )
            raise DeviceLost(self.lost)
        if status == _OUT_OF_MEMORY:
            free, total = self.memory()
            raise MemoryError(f"{self}: no memory for {what}: {free} of {total} bytes are free")
        raise DeviceError(f"{self}: {what} failed: {text}; launched before: {self._names()}")

    def _made(self, what: str, function: Any, *arguments: Any) -> int:
        """Return what a function of the driver wrote to its first argument, or raise its error."""
        status, found = answer(function, *arguments)
        self.check(status, what)
        return found

    def _names(self) -> str:
        names = list(self._launched)
        if len(names) > REMEMBERED:
            names[0] = "(earlier ones)"
        return ", ".join(names) or "nothing"

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = c_size_t(), c_size_t()
        self.cuda.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value, total.value

    # --- work -------------------------------------------------------------------------------
    def synchronize(self, stream: int | None = None) -> None:
        """Wait for all work, or for that of one stream; errors of kernels are raised here."""
        if stream is None:
            self.retired.synchronize(self)
        else:
            with self.current():
                self.check(self.cuda.cuStreamSynchronize(stream), "synchronize")

    def wait_for_all(self) -> None:
        """Wait for all work; its context is current."""
        self.check(self.cuda.cuCtxSynchronize(), "synchronize")
        self._launched.clear()

    def capture(self, stream: int) -> int:
        """The number of the CUDA graph that is being captured from this stream; 0: none is."""
        if not stream:  # the legacy stream never is
            return 0
        status, number = c_int(), c_size_t()
        self.cuda.cuStreamGetCaptureInfo_v2(stream, byref(status), byref(number), None, None, None)
        return number.value if status.value else 0

    def capturing(self, stream: int) -> bool:
        """Whether a stream is captured, or is the legacy one and any capture forbids its use."""
        status = c_int()
        return bool(self.cuda.cuStreamIsCapturing(stream, byref(status)) or status.value)

    def event(self, stream: int, timing: bool = False) -> int:
        """An event recorded on a stream, with its time or without; `forget` it."""
        with self.current():
            event = self._made("an event", self.cuda.cuEventCreate, 0 if timing else _NO_TIMING)
            self.check(self.cuda.cuEventRecord(event, stream), "an event")
        return event

    def seconds(self, first: int, last: int) -> float:
        """Return the time between two events that have passed and were made with their times."""
        status, bits = answer(self.cuda.cuEventElapsedTime, first, last)
        self.check(status, "the time between two events")
        (milliseconds,) = struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))
        return float(milliseconds) / 1e3

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        """Write zeros to memory of the device."""
        with self.current():
            self.check(self.cuda.cuMemsetD8Async(address, 0, nbytes, stream), "clear memory")

    def passed(self, event: int) -> bool:
        """Whether the work before an event is done."""
        status = self.cuda.cuEventQuery(event)
        if status == _NOT_READY:
            return False
        self.check(status, "an event")
        return True

    def pace(self, stream: int) -> None:
        """The end of a piece of work on a stream: wait until the piece before it is done.

        So one piece is queued behind the one that runs: the device never idles between them, and
        nothing else (a copy to the host, another's memory) waits for more than these two.
        """
        if self.capture(stream):
            return
        event = self.event(stream)
        with self._lock:
            event, self._piece = self._piece, event
        if event:
            with self.current():
                self.check(self.cuda.cuEventSynchronize(event), "the end of a piece of work")
            self.forget(event)

    def forget(self, event: int) -> None:
        """The end of an event."""
        self.cuda.cuEventDestroy_v2(event)

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """The first words of a plan of `launcher.launch_loop`."""
        cuda = self.cuda
        functions = cuda.cuLaunchKernelEx, cuda.cuCtxGetCurrent, cuda.cuCtxSetCurrent
        more = cuda.cuGraphLaunch, cuda.cuTensorMapReplaceAddress, cuda.cuStreamIsCapturing
        addresses = [ctypes.cast(function, c_void_p).value or 0 for function in functions + more]
        return self.context, *addresses

    @cached_property
    def recording_stream(self) -> int:
        """A stream of its own, on which nothing runs: launches are recorded as graphs with it."""
        with self.current():
            return self._made("a stream", self.cuda.cuStreamCreate, 1)

    def record(self, launch: Callable[[int], object]) -> int | None:
        """Return as a graph what `launch` launches on the stream it gets; None if that fails."""
        graph = c_void_p()
        with self._lock, self.current():
            stream = self.recording_stream
            # thread-local: other threads, and captures of theirs, are not concerned
            if self.cuda.cuStreamBeginCapture_v2(stream, _THREAD_LOCAL):
                return None
            try:
                launch(stream)
            finally:
                status = self.cuda.cuStreamEndCapture(stream, byref(graph))
            if status or not graph.value:
                return None
            status, made = answer(self.cuda.cuGraphInstantiateWithFlags, graph, 0)
            self.cuda.cuGraphDestroy(graph)
            return None if status else made

    def drop(self, graph: int) -> None:
        """The end of a recorded graph (which may still be running)."""
        self.cuda.cuGraphExecDestroy(graph)

    def follow(self, stream: int, other: int) -> None:
        """Let a stream wait for the work of another one so far."""
        event = self.event(other)
        with self.current():
            self.check(self.cuda.cuStreamWaitEvent(stream, event, 0), "wait for an event")
        self.forget(event)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Allow what a capture of this thread's streams forbids, and does not record: memory."""
        mode = c_int(_RELAXED)
        self.cuda.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            yield
        finally:
            self.cuda.cuThreadExchangeStreamCaptureMode(byref(mode))

    def allocate(self, nbytes: int, what: str) -> int:
        """The address of new memory of the device."""
        with self.current(), self.uncaptured():
            status, found = answer(self.cuda.cuMemAlloc_v2, nbytes)
            self.check(status, f"{what} ({nbytes} bytes)" if status == _OUT_OF_MEMORY else what)
        return found

    def free(self, address: int) -> None:
        """Give memory back; waits for all work of the device."""
        if self.lost is None:
            with self.current(), self.uncaptured():
                self.cuda.cuMemFree_v2(address)

    def upload(self, source: int, address: int, nbytes: int, stream: int) -> None:
        """From host memory, which may change at once after it."""
        with self.current():
            self.check(self.cuda.cuMemcpyHtoDAsync_v2(address, source, nbytes, stream), "upload")
            self.check(self.cuda.cuStreamSynchronize(stream), "upload")

    def download(self, address: int, target: int, nbytes: int, stream: int) -> None:
        """To host memory, after all earlier work of the stream."""
        with self.current():
            self.check(self.cuda.cuMemcpyDtoHAsync_v2(target, address, nbytes, stream), "download")
            self.check(self.cuda.cuStreamSynchronize(stream), "download")

    def module(self, kernel: Kernel) -> Module:
        """A kernel, compiled and loaded at its first use."""
        found = self._modules.get(kernel)
        if found is not None:
            return found
        binary, entry = kernel.binary(self.capability)
        with self._lock, self.current(), self.uncaptured():
            found = self._modules.get(kernel)  # (another thread may have loaded it)
            if found is None:
                status, module = answer(self.cuda.cuModuleLoadData, binary)
                if status in _NOT_ASSEMBLED and not binary.startswith(b"\x7fELF"):
                    linked = kernel.linked(self.capability)
                    status, module = answer(self.cuda.cuModuleLoadData, linked)
                self.check(status, kernel.name)
                find = self.cuda.cuModuleGetFunction
                handle = self._made(kernel.name, find, module, entry.encode())
                found = Module(module, handle, self.retired if kernel.formulas else None)
                self._modules[kernel] = found
        return found

    def unload(self, module: int) -> bool:
        """Whether a module could be unloaded, which no launch needs; its context is current."""
        return not self.cuda.cuModuleUnload(module)

    def release(self, stream: int) -> None:
        """Give up what belonged to formulas that are gone; called by one that works on `stream`."""
        self.retired.release(self, stream)

    def prepare(self, launch: Launch) -> Prepared:
        """A launch of this device, ready to be started with addresses."""
        return Prepared(self, launch)
