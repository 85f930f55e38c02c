"""Compilations: one at a time, out of the reach of interrupts, and none in the middle at a fork.

Numba has one lock for all its compilations, in which a user's own and those of numba-cuda take
place too, and llvmlite one for each call of LLVM.  A forked child has the locks of its parent, but
not the threads that hold them, and LLVM has locks of its own in which nobody can look: so a fork
waits until no thread compiles.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from operator import methodcaller
from types import FrameType
from typing import Any, TypeVar

import numpy as np
from llvmlite.binding import ffi
from numba.core.compiler_lock import global_compiler_lock

from numfuse.runtime import binaries
from numfuse.runtime.call_types import remembered
from numfuse.runtime.interrupts import deferred

_T = TypeVar("_T")

#: Seconds that a fork waits for the compilations of other threads.  A kernel of numfuse takes up to
#: three, some times as long where cores are short; a function of the user's may take minutes.
FORK_PATIENCE = 30.0

#: Passed before each compilation.  A fork keeps it while it waits, or threads that compile one
#: kernel after another would overtake it (measured: for more than ten seconds).
_TURNSTILE = threading.RLock()
_NUMBA: Any = global_compiler_lock._lock
_LLVM: Any = ffi.lib._lock._lock
#: In the order in which a compilation takes them.
_LOCKS: tuple[Any, ...] = _TURNSTILE, _NUMBA, _LLVM
#: Whether a compilation has stopped Python's search for garbage.
_put_off = False
#: Why this process cannot compile, if it cannot.
_refusal: str | None = None


def compiled(work: Callable[[], _T]) -> _T:
    """Return what ``work()`` returns, which no other compilation and no interrupt disturbs.

    A thread that is compiling already (a function of the user's in which numfuse is called) does it
    itself, as Numba does what such a function needs.

    Raises
    ------
    RuntimeError
        The calling thread is inside LLVM (it was interrupted there, and the handler of the signal
        calls numfuse), or this process was forked while another thread compiled.
    """
    if _refusal is not None:
        raise RuntimeError(_refusal)
    if _inside_llvm():
        raise RuntimeError(
            "a kernel must be compiled when no compilation of this thread is interrupted in its "
            "middle, got a call from a signal's handler that came within one: call numfuse after "
            "it, or compile beforehand (numfuse.warmup)"
        )

    def alone() -> _T:
        if not _NUMBA._is_owned():  # else a fork waits for this thread
            with _TURNSTILE:
                pass
        # (what NumPy is to do with an overflow is the caller's, not that of the constants here)
        with global_compiler_lock, _ungathered(), remembered(), np.errstate(all="ignore"):
            return work()

    result = alone() if _NUMBA._is_owned() else deferred(alone)
    for text in binaries.unsaid():
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return result


@contextlib.contextmanager
def _ungathered() -> Iterator[None]:
    """Let no garbage be looked for, which takes a twentieth of a compilation.

    It makes millions of objects, hardly any of them garbage in cycles.
    """
    global _put_off
    if not gc.isenabled():
        yield
        return
    try:
        _put_off = True
        gc.disable()
        yield
    finally:
        gc.enable()
        _put_off = False


def _inside_llvm() -> bool:
    """Whether a call of LLVM is under way in this thread.

    Its lock is not enough to tell: llvmlite takes it in Python, and an interrupt in the right place
    has left it taken. Then it is given back here.
    """
    if not _LLVM._is_owned():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == ffi.__file__:
            return True
        frame = frame.f_back
    while _LLVM._is_owned():
        _LLVM.release()
    return False


# --- forks --------------------------------------------------------------------------------------
class _Fork(threading.local):
    """The record of what a forking thread has to undo: locks held, and an interrupt put off."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.interrupted = False


_fork = _Fork()


def _before_fork() -> None:
    """Wait until no other thread compiles, up to `FORK_PATIENCE`; an interrupt ends the waiting."""
    deadline = time.monotonic() + (FORK_PATIENCE if _refusal is None else 0.0)
    try:
        for lock in _LOCKS:
            left = max(0.0, deadline - time.monotonic())
            # One step of the interpreter, so that no interrupt comes between a success and its
            # note.
            _fork.held.extend(filter(methodcaller("acquire", True, left), (lock,)))
    except KeyboardInterrupt:
        _fork.interrupted = True  # raised here, Python would print and drop it


def _release() -> None:
    """Give back what `_before_fork` has taken, in one step too."""
    _fork.held.insert(0, None)
    any(map(methodcaller("release"), iter(_fork.held.pop, None)))


def _interrupt_again() -> None:
    """Send the signal of Ctrl-C to the thread that handles signals, when the fork is over."""
    time.sleep(0.05)  # for what is called after a fork, in which Python would drop it
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _after_fork_in_parent() -> None:
    _release()
    if _fork.interrupted:
        _fork.interrupted = False
        _thread.start_new_thread(_interrupt_again, ())


def _after_fork_in_child() -> None:
    global _refusal
    _fork.interrupted = False
    _release()
    for lock in _LOCKS:
        # Free, or this thread's own (it forked in the middle of its compilation).
        if lock.acquire(False):
            lock.release()
        else:
            _refusal = (
                "a forked process can compile if no thread of its parent was compiling at the "
                f"fork, got one that went on for more than {FORK_PATIENCE:g} seconds (or the fork "
                "was interrupted): fork after it, start the process with 'spawn', or compile "
                "beforehand (numfuse.warmup)"
            )
            if _put_off:  # by a thread that is not here
                gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
    # An interrupt that comes during the fork is raised at the beginning of the first function after
    # it, which then does nothing.
    os.register_at_fork(after_in_parent=_after_fork_in_parent)
