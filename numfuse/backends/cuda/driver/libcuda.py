"""libcuda through ctypes: its functions, and what can be asked without a device.

The one place that loads the CUDA driver's library.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_void_p,
)
from typing import Any

from numfuse.backends.cuda.compile.toolchain import SIMULATED

__all__ = [
    "FORKED",
    "Attribute",
    "Config",
    "Unusable",
    "count",
    "driver_version",
    "forked",
    "library",
    "ordinal_of",
]

_ORDINAL_OF_POINTER = 9  # CUpointer_attribute


class Unusable(Exception):
    """There is no driver, or no device; the text is the reason."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(Attribute)),
        ("count", c_uint),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamGetCaptureInfo_v2": (
        c_void_p,
        POINTER(c_int),
        POINTER(c_uint64),
        c_void_p,
        c_void_p,
        c_void_p,
    ),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuTensorMapReplaceAddress": (c_void_p, c_void_p),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class _Library:
    """libcuda, initialised."""

    def __init__(self) -> None:
        names = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
        for name in names:
            try:
                self._handle = ctypes.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise Unusable("the NVIDIA driver is not installed (no libcuda)")
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._handle, name, None)
            if function is None:
                raise Unusable(f"the NVIDIA driver is too old: it has no {name} (CUDA 12 has)")
            function.argtypes, function.restype = arguments, c_int
            setattr(self, name, function)
        status = self.cuInit(0)
        if status:
            raise Unusable(f"the NVIDIA driver says {self.text(status)}")

    def __getattr__(self, name: str) -> Any:
        # A function without a signature above, for a tier of its own (cuTensorMapEncodeTiled).
        if name.startswith("cu"):
            return getattr(self._handle, name)
        raise AttributeError(name)

    def text(self, status: int) -> str:
        """The name and meaning of an error."""
        name, meaning = c_char_p(), c_char_p()
        self.cuGetErrorName(status, byref(name))
        self.cuGetErrorString(status, byref(meaning))
        both = (name.value or b"error").decode(), (meaning.value or b"").decode()
        return f"{both[0]} ({status}): {both[1]}"


_lock = threading.RLock()
_library: _Library | None = None
#: What a process is told that was forked from one in which CUDA had begun: contexts do not survive.
FORKED = "this process was forked after CUDA had begun: start it with 'spawn'"
_forked = False


def library() -> Any:
    """The driver's functions; `Unusable` where there is none."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _Library()
    if _forked:
        raise Unusable(FORKED)
    return _library


def forked() -> bool:
    """Whether CUDA began in another process, of which this one is a fork."""
    return _forked


def _after_fork_in_child() -> None:
    global _forked, _lock
    _lock = threading.RLock()  # a thread that held it may not have survived the fork
    _forked = _forked or _library is not None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def driver_version() -> str:
    """The newest CUDA that the driver runs, "13.0"."""
    if SIMULATED:
        return "simulator"
    found = c_int()
    library().cuDriverGetVersion(byref(found))
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


def count() -> int:
    """How many devices there are; `Unusable` where none can be used."""
    if SIMULATED:
        return 1
    found = c_int()
    status = library().cuDeviceGetCount(byref(found))
    if status:
        raise Unusable(f"the NVIDIA driver says {library().text(status)}")
    if not found.value:
        raise Unusable("no CUDA device was found")
    return found.value


def ordinal_of(address: int) -> int:
    """The device on which an address lies."""
    if SIMULATED:
        return 0
    found = c_int()
    cuda = library()
    status = cuda.cuPointerGetAttribute(byref(found), _ORDINAL_OF_POINTER, address)
    if status:
        raise TypeError(f"an array must be on a CUDA device, got one at {address:#x}")
    return found.value
