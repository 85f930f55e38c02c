"""A process that was forked after its parent began with WebGPU.

The drivers have threads, which do not survive a fork, and files that both processes share. So the
child uses WebGPU no more: a call is an error that says so, and nothing that the parent made is
given back, neither by the garbage collector nor at the child's end. Everything else works there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from numfuse.backends import end
from numfuse.errors import BackendUnavailable

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device

_REASON = (
    "this process was forked after WebGPU had begun, which drivers do not survive: start it with "
    "'spawn' (multiprocessing.get_context('spawn'))"
)
_API = "wgpu.backends.wgpu_native._api"

_began = _forked = False
#: Every device of this process: to a child they are lost.
DEVICES: weakref.WeakSet[Device] = weakref.WeakSet()


def begin() -> None:
    """Say that drivers are about to be loaded; BackendUnavailable where a fork forbids it."""
    global _began
    refuse()
    _began = True


def forked() -> bool:
    """Whether WebGPU began in another process, of which this one is a fork."""
    return _forked


def refuse() -> None:
    """Raise BackendUnavailable in a process that was forked after WebGPU began."""
    if _forked:
        raise BackendUnavailable("webgpu", _REASON)


def _kept(_: Any) -> None:
    """Take the place of `_release`: the object is the parent's."""


#: What `_leave` calls of the C library; None if that is not GNU's. Looked up here: between a fork
#: and its hook no more is done than has to be.
_C: tuple[Any, ...] | None = None
if sys.platform == "linux":
    with contextlib.suppress(AttributeError, OSError, TypeError):
        _LIBC = ctypes.CDLL(None)
        _C = _LIBC.on_exit, _LIBC._exit, _LIBC.__cxa_atexit, _LIBC.fflush


def _leave() -> None:
    """Let the process end where the parent's functions for its end would begin.

    Drivers register some that join their threads (Mesa's do), which are not there: the child would
    crash or hang. Functions are called in the reverse order, so those that are registered in the
    child still are. Python's own (`atexit`) come before all.
    """
    if _C is not None:
        on_exit, leave, at_exit, flush = _C
        on_exit(leave, None)  # it gets the exit status
        at_exit(flush, None, None)  # and before it, the streams of C are written out


def _after_fork_in_child() -> None:
    global _forked
    if not _began or _forked:  # (a child's child has it all)
        return
    _forked = True
    end("webgpu", _REASON)
    for device in list(DEVICES):
        device.lost = True
    for kind in list(vars(sys.modules[_API]).values()) if _API in sys.modules else ():
        if isinstance(kind, type) and "_release" in vars(kind):
            with contextlib.suppress(TypeError):
                kind._release = _kept  # type: ignore[attr-defined]
    _leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
