"""libcuda through ctypes: its functions, and what can be asked without a device.

The one place that loads the CUDA driver's library.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from typing import Any

from numfuse.backends.cuda.compile.toolchain import SIMULATED

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


#: The driver's functions, by the number of their arguments. Each argument is passed in 64 bits: of
#: one that is an int to the driver it reads the low half.
_FUNCTIONS = {
    0: "cuCtxSynchronize",
    1: "cuInit cuDriverGetVersion cuDeviceGetCount cuCtxGetCurrent cuCtxSetCurrent cuMemFree_v2 "
    "cuModuleUnload cuStreamSynchronize cuGraphDestroy cuGraphExecDestroy cuEventQuery "
    "cuEventSynchronize cuEventDestroy_v2 cuThreadExchangeStreamCaptureMode",
    2: "cuDeviceGet cuDevicePrimaryCtxRetain cuMemAlloc_v2 cuMemGetInfo_v2 cuModuleLoadData "
    "cuStreamCreate cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamIsCapturing cuGraphLaunch "
    "cuEventCreate cuEventRecord cuTensorMapReplaceAddress cuGetErrorName cuGetErrorString",
    3: "cuDeviceGetName cuDeviceGetAttribute cuModuleGetFunction cuFuncSetAttribute "
    "cuGraphInstantiateWithFlags cuStreamWaitEvent cuPointerGetAttribute cuEventElapsedTime",
    4: "cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuLaunchKernelEx cuMemsetD8Async",
    6: "cuStreamGetCaptureInfo_v2",
}


class _Library:
    """libcuda, initialised."""

    def __init__(self) -> None:
        files = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
        for name in files:
            try:
                self._handle = ctypes.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise Unusable("the NVIDIA driver is not installed (no libcuda)")
        for count, names in _FUNCTIONS.items():
            for name in names.split():
                function = getattr(self._handle, name, None)
                if function is None:
                    raise Unusable(f"the NVIDIA driver is too old: it has no {name} (CUDA 12 has)")
                function.argtypes = (c_void_p,) * count
                setattr(self, name, function)
        status = self.cuInit(0)
        if status:
            raise Unusable(f"the NVIDIA driver says {self.text(status)}")

    def __getattr__(self, name: str) -> Any:
        # A function that is not named above, for a tier of its own (cuTensorMapEncodeTiled).
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


def answer(function: Any, *arguments: Any) -> tuple[int, int]:
    """Return the status of a function of the driver, and what it wrote to its first argument."""
    found = c_uint64()
    status: int = function(byref(found), *arguments)
    return status, found.value


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
    _, found = answer(library().cuDriverGetVersion)
    return f"{found // 1000}.{found % 1000 // 10}"


def count() -> int:
    """How many devices there are; `Unusable` where none can be used."""
    if SIMULATED:
        return 1
    status, found = answer(library().cuDeviceGetCount)
    if status:
        raise Unusable(f"the NVIDIA driver says {library().text(status)}")
    if not found:
        raise Unusable("no CUDA device was found")
    return found


def ordinal_of(address: int) -> int:
    """The device on which an address lies."""
    if SIMULATED:
        return 0
    status, found = answer(library().cuPointerGetAttribute, _ORDINAL_OF_POINTER, address)
    if status:
        raise TypeError(f"an array must be on a CUDA device, got one at {address:#x}")
    return found
