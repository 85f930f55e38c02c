"""The adapters of this machine, and which one is meant."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import wgpu

from numfuse.backends.webgpu.device import forks
from numfuse.errors import BackendUnavailable

#: Better first. A CPU adapter is last: numfuse's own CPU backend is far faster.
_KINDS = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")
_VARIABLE = "NUMFUSE_WEBGPU_ADAPTER"
_INTERFACES = ("Vulkan", "Metal", "D3D12", "OpenGL", "OpenGLES")


class Adapter(NamedTuple):
    """One way to one device of this machine."""

    number: int
    name: str
    kind: str
    interface: str
    handle: Any

    def __str__(self) -> str:
        return f"{self.number}: {self.name} ({self.kind}, {self.interface})"


#: The adapters that were found are kept, and not looked for again: all of wgpu's OpenGL uses one
#: context of EGL, and each list of adapters guards it by a lock of its own (wgpu 29). Where one is
#: made or dropped while a device of another computes in its thread, both take the context, and the
#: process ends (`BadAccess`).
_FOUND: list[Adapter] = []
_LOOKING = threading.Lock()


def adapters() -> list[Adapter]:
    """Every adapter that wgpu finds, in its order; looked for once a process, if one is found.

    BackendUnavailable where wgpu cannot look for adapters: its library does not load, or this
    process was forked from one that had looked.
    """
    forks.begin()
    with _LOOKING:
        if not _FOUND:
            _FOUND.extend(_enumerated())
    return list(_FOUND)


def _enumerated() -> list[Adapter]:
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
    """The adapter of an index or of a name; None: the one of `NUMFUSE_WEBGPU_ADAPTER`, or the best.

    A name is any part of "<device> <interface>", such as "llvmpipe" or "OpenGL". ValueError where
    no adapter has this name or index; BackendUnavailable where there is none at all, or none that
    `NUMFUSE_WEBGPU_ADAPTER` means.
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
