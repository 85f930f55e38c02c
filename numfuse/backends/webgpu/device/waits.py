"""Waiting for a device: it is asked for a while, then the process sleeps until it answers.

wgpu waits in a thread of its own, which the system has to wake, and which has to wake the caller's:
tenths of a millisecond, as long as many a call takes. So the caller asks by itself for as long as a
call may take, and sleeps only behind that. Between two questions an interrupt can come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from numfuse.backends.webgpu import tiling

#: wgpu's question whether a device has done all; it runs the handlers of what is done. None where
#: this wgpu is built otherwise.
_ASK: Callable[..., Any] | None = None
with contextlib.suppress(ImportError, AttributeError):
    from wgpu.backends.wgpu_native import ffi, lib

    _ASK = lib.wgpuDevicePoll
    _NOTHING = ffi.NULL


def _asked(device: Any, answered: Callable[[bool], bool]) -> bool:
    """Ask a device until `answered`, of whether it has done all, is true; return whether it was."""
    if _ASK is None or not device.asks:
        return False
    handle, end = device.handle._internal, time.perf_counter() + device.asks
    # (Rust's bool is one byte of the 32 bits that the header promises.)
    while not answered(bool(_ASK(handle, False, _NOTHING) & 0xFF)):
        if time.perf_counter() > end:
            return False
    return True


def idle(device: Any) -> bool:
    """Wait until a device has done all that was submitted; return False if that takes longer."""
    return _asked(device, bool)


def settle(device: Any, promise: Any) -> None:
    """Wait for a promise of a device, and raise its error."""
    _asked(device, lambda _: getattr(promise, "_state", "") != "pending")
    promise.sync_wait()


def seconds(kind: str) -> float:
    """Return how long a device of a kind is asked: a CPU needs its cores for the work itself."""
    return 0.0 if kind == "CPU" else tiling.ASKING_SECONDS
