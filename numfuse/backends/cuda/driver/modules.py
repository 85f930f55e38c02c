"""Kernels that a device has loaded, and how they go.

A module goes when nothing can launch it any more and its launches are done. Nobody may wait for
the whole device to know that: it would break a graph that some thread captures, and no one can ask
whether any does. So each launch notes its stream in the module (in `launcher.launch_loop`), and of
each of these streams an event is recorded after the end of the module, at a call that works on that
stream and so has it alive.

What a stream launched while a graph was captured from it stays loaded: nobody knows when the graph
is launched again, or that it is gone.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numfuse.backends.cuda.driver.device import Device

#: Streams that a module notes. One that was launched on more goes at a `Device.synchronize`.
STREAMS = 8
#: Stands among them for all others.
_MORE = -1


class Module:
    """A loaded kernel (the driver's module, and its function); what launches it holds it.

    Its words: whether it was launched while a graph was captured, whether on more streams than it
    notes, and the streams, each plus 1 (0 is a stream). It goes to `retired`; None: it never does.
    """

    __slots__ = ("_retired", "_words", "function", "handle", "shared_bytes", "uses")

    def __init__(self, handle: int, function: int, retired: Retired | None) -> None:
        self.handle, self.function = handle, function
        #: The most that a launch may have; more than 48 KiB must be asked for.
        self.shared_bytes = 48 << 10
        self._retired = retired
        self._words = (ctypes.c_int64 * (2 + STREAMS))()
        #: The address of its words; 0 where nobody will read them.
        self.uses = 0 if retired is None else ctypes.addressof(self._words)

    def __del__(self) -> None:
        # Anywhere, also in the midst of a call of the driver: so nothing is asked of that here. At
        # the end of the process the names of this module are gone, and the modules go with it.
        if self._retired is not None and _Waiting is not None:
            captured, more, *noted = self._words
            if not captured:
                streams = {stream - 1 for stream in noted if stream} | ({_MORE} if more else set())
                self._retired.modules.append(_Waiting(self.handle, streams))


@dataclass(eq=False)
class _Waiting:
    """A module that nothing launches any more."""

    module: int
    #: Those it was launched on, of which no event was recorded since.
    streams: set[int]
    events: list[int] = field(default_factory=list)


class Retired:
    """A device's queue of what has to go as soon as its work is done."""

    def __init__(self) -> None:
        # Finalizers append to these two, and do no more.
        self.modules: deque[_Waiting] = deque()
        self.graphs: deque[int] = deque()
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.modules) + len(self._waiting)

    def release(self, device: Device, stream: int) -> None:
        """Unload what is done; called between other calls of the driver, by one on this stream.

        While a graph is captured from that, nothing is.
        """
        if not (self.modules or self.graphs or self._waiting) or not self._lock.acquire(False):
            return  # another thread is here
        try:
            with device.current(), device.uncaptured():
                if device.capturing(stream):
                    return
                self._arrived(device)
                for waiting in self._waiting:
                    if stream in waiting.streams:
                        waiting.events.append(device.event(stream))
                        waiting.streams.discard(stream)
                self._unload(device)
        finally:
            self._lock.release()

    def synchronize(self, device: Device) -> None:
        """Wait for all work of the device, and unload all that was there before."""
        mine = self._lock.acquire(False)  # (another thread, or a signal's handler, may be here)
        try:
            with device.current():
                if mine:
                    self._arrived(device)
                device.wait_for_all()
                if mine:
                    for waiting in self._waiting:
                        waiting.streams.clear()
                    self._unload(device)
        finally:
            if mine:
                self._lock.release()

    def _arrived(self, device: Device) -> None:
        while self.graphs:
            device.drop(self.graphs.popleft())
        while self.modules:
            self._waiting.append(self.modules.popleft())

    def _unload(self, device: Device) -> None:
        # taken out first: an interrupt may leave one loaded, and never has one unloaded twice
        waiting_all, self._waiting = self._waiting, []
        for waiting in waiting_all:
            while waiting.events and device.passed(waiting.events[-1]):
                device.forget(waiting.events.pop())
            if waiting.streams or waiting.events or not device.unload(waiting.module):
                self._waiting.append(waiting)
