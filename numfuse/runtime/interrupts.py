"""Work that an interrupt does not reach: it comes to its end, and then the interrupt is raised.

Python runs the handlers of signals (Ctrl-C) in the main thread, between any two of its steps.  LLVM
calls Python back in the middle of its work, and an import has half a package to undo: neither can
be left there.  So the main thread hands such work to another thread and waits.  Handlers run while
it waits; what they raise, it raises after the work.

While it waits it holds nothing: a handler may itself call what needs such work.
"""

from __future__ import annotations

import _thread
import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
#: Seconds after which work that no thread has begun is begun by the one that waits for it: a thread
#: that finds no memory for its first step ends without a word.
BEGINS = 1.0


class _Job(Generic[_T]):
    """Work in the hands of another thread."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self.work = work
        self.result: list[_T] = []
        self.error: BaseException | None = None
        #: Taken by the one thread that does the work.
        self.begun = _thread.allocate_lock()
        #: The thread is done, or does not exist: it does not survive a fork. Until then the lock is
        #: taken.
        self.over = False
        self.unfinished = _thread.allocate_lock()
        self.unfinished.acquire()

    def run(self) -> None:
        if not self.begun.acquire(blocking=False):
            return
        try:
            self.result.append(self.work())
        except BaseException as error:
            self.error = error
        finally:
            self.leave()

    def leave(self) -> None:
        self.over = True
        _JOBS.discard(self)
        self.unfinished.release()


_JOBS: set[_Job[Any]] = set()


def _wait(job: _Job[Any]) -> BaseException | None:
    """Wait until a thread is done; return what the handlers of signals raised meanwhile."""
    interrupt = None
    while True:
        try:
            while not job.over:  # (an interrupt may come just when the lock has been taken)
                if job.begun.locked():
                    job.unfinished.acquire()
                elif not job.unfinished.acquire(timeout=BEGINS):
                    job.run()
            return interrupt
        except BaseException as error:
            interrupt = error


def _at_exit() -> None:
    """Wait for work whose caller has left: one whose interrupt came when it had just begun."""
    for job in tuple(_JOBS):
        _wait(job)


atexit.register(_at_exit)


def _after_fork_in_child() -> None:
    """Wake the main thread where it was waiting (a handler of a signal has forked)."""
    for job in tuple(_JOBS):
        job.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def deferred(work: Callable[[], _T]) -> _T:
    """Return what ``work()`` returns; raise after it what the handler of a signal raises meanwhile.

    The work runs in the calling thread where that is not the main one, and where no other can be
    started (the interpreter ends, or there is no memory for its stack or its first step).
    """
    if threading.get_ident() != threading.main_thread().ident:
        return work()
    interrupt: BaseException | None = None
    while True:
        job = _Job(work)
        _JOBS.add(job)
        try:
            # (not threading.Thread: an interrupt inside its `start` leaves it half started)
            _thread.start_new_thread(job.run, ())
        except (RuntimeError, MemoryError):
            job.run()
        interrupt = _wait(job) or interrupt
        if job.result or job.error is not None:
            break  # else the thread is in the parent of this process
    if interrupt is None:
        interrupt = job.error
    try:
        if interrupt is not None:
            raise interrupt
        return job.result[0]
    finally:
        del interrupt, job  # an exception holds its frames, which would hold it


def import_module(name: str) -> ModuleType:
    """Return the module `name`, imported where no interrupt reaches it: a package of which an
    interrupt has left half is not always imported by the next try.

    But in the calling thread where that is importing already: what it has begun, another thread
    would wait for.
    """
    found = sys.modules.get(name)
    if found is not None and not getattr(found.__spec__, "_initializing", False):
        return found
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return importlib.import_module(name)
        frame = frame.f_back
    return deferred(lambda: importlib.import_module(name))
