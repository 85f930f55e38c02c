"""On which threads the cells of a sequence run.

Three ways, with the same result bit by bit: in the calling thread (small launches, one thread asked
for, a forked child, which is usually one worker among many); in that and in helpers, threads of our
own; or in a team, the threads that a library from which the call comes keeps for itself
(`share.team`): PyTorch's look for work for milliseconds, and a helper that wakes on their core
waits for its time slice. A helper takes cells while there are any, and only one that has begun is
waited for: Numba's pools, which wait for every thread, are not used (docs/design.md, "Threads").
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba

from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.launch.entries import entry, member
from numfuse.errors import BackendUnavailable
from numfuse.runtime.threads import share


def _address(name: str, library: ctypes.CDLL | None = None) -> int:
    """The address of a function, by default of the C library; 0 where there is none."""
    try:
        found = getattr(library or ctypes.CDLL(None), name)
        return ctypes.cast(found, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


YIELD = _address("sched_yield")
#: Tell on which processor a thread runs and on which it may, and set these: all or none.
_PROCESSORS = [_address(f"sched_{name}") for name in ("getcpu", "getaffinity", "setaffinity")]
PROCESSOR = _PROCESSORS[0] if all(_PROCESSORS) else 0

_forked = False
#: Threads of our own.
_helpers: list[int] = []
#: Where launches are offered (see `protocol.BOARD`).
_board = array("q", [0]) * (protocol.BOARD_WORDS + protocol.PLACES * protocol.PLACE_WORDS)
# Python's own locks: a thread waits for one without the interpreter's.
_LOCKS = [_address(f"PyThread_{name}_lock", ctypes.pythonapi) for name in ("acquire", "release")]
_FIRST = protocol.BOARD["B_ACQUIRE"]
_board[_FIRST : _FIRST + 4] = array("q", [*_LOCKS, *_PROCESSORS[1:]])


def _kept(words: array[int]) -> int:
    """Return the address of words that are never freed: a helper may look at them to the end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(words))
    return words.buffer_info()[0]


BOARD = _kept(_board)


def _after_fork_in_child() -> None:
    global _forked
    _forked = True
    _helpers.clear()  # they did not survive the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def number() -> int:
    """Return how many threads this Python thread's next launch may use.

    Numba's setting, or the share that the thread was given where that is less; 1 after a fork.
    """
    most = share.threads
    if _forked or most == 1:
        return 1  # without asking Numba, which would start a pool that is not used
    own = _numbas() if _count is None else _count()
    return own if most is None else min(own, most)


#: What Numba asks itself for the number, 0.06 us; its own function takes locks before, 0.7 us.
_count: Callable[[], int] | None = None


def _numbas() -> int:
    """Return how many threads Numba is set to use; this starts its layer."""
    global _count
    try:
        own = int(numba.get_num_threads())
        where = llvmlite.binding.address_of_symbol("get_num_threads")
        _count = None if where is None else ctypes.PYFUNCTYPE(ctypes.c_int)(where)
        return own
    except ValueError as error:  # it cannot, as with a layer that is not installed
        layer: Any = numba.config.THREADING_LAYER  # type: ignore[attr-defined]
        reason = " ".join(str(error).split())
        raise BackendUnavailable(
            "cpu", f"Numba has no threads, NUMBA_THREADING_LAYER is {layer!r}: {reason}"
        ) from error


def layer() -> str:
    """Return Numba's threading layer: "tbb", "omp" or "workqueue".

    Its setting is respected, and its threads are not used.
    """
    _numbas()  # the layer's name is unknown before
    return str(numba.threading_layer())  # type: ignore[attr-defined]


def _help() -> None:
    """Be a helper, to the end of the process."""
    python = ctypes.pythonapi
    lock = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThread_allocate_lock", python))()
    python.PyThread_acquire_lock(ctypes.c_void_p(lock), 0)
    values = {"H_LOCK": lock, "H_OFF": -1, "H_THREAD": threading.get_native_id()}
    values["H_PROCESS"] = os.getpid()
    words = array("q", protocol.HELPER.words(values)) + array("q", bytes(protocol.SET_BYTES))
    entry("help")(BOARD, _kept(words), YIELD, PROCESSOR)


def run(how: tuple[int, ...], stride: int, threads: int) -> None:
    """Run a sequence on so many threads.

    `how` is the address of its steps, how many they are, the address of the arrays, that of the
    memory, and where in that the table lies; `stride` the bytes of a thread's workspace.

    An interrupt (Ctrl-C) can come between any two of these steps: what would have to be undone then
    (a lock, a place) is inside one native call.
    """
    global _until
    if _until and time.monotonic() >= _until:
        _until = 0.0
    if threads == 1 or _until:
        entry("here")(*how)
        return
    team = share.team
    size = 1 if team is None else team.size()
    if team is not None and size > 1:
        call = team.parallel, team.count_members, member().address, size
        run_in_team = entry("team")
        start = time.monotonic()
        run_in_team(*how, stride, threads, BOARD, YIELD, *call)
    else:
        run_helped = entry("helped")
        if len(_helpers) < threads - 1:
            _start_helpers(threads - 1)
        start = time.monotonic()
        run_helped(*how, stride, threads, BOARD, YIELD, PROCESSOR)
    _note_waiting(_board[WAITED] * LOOK, time.monotonic() - start)


WAITED = protocol.BOARD["B_WAITED"]
#: Seconds of a look at a counter, at least.
LOOK = 20e-9
#: Seconds that a helper may be late: more than waking it takes, less than a time slice of others.
LATE = 2e-4
#: Seconds without helpers after a launch that one held up: at first, and at the most. In time and
#: not in launches, of which one may take as long as what holds up its helper does.
ALONE, MOST_ALONE = 5e-4, 6.4e-2
#: Until when launches take no helpers (0: they do), and for how long the last time that it came to
#: it. Races between threads that launch at once only make them try again.
_until = _pause = 0.0


def _note_waiting(waited: float, seconds: float) -> None:
    """Take no helpers for a while after a launch that waited for a third of its time, each time
    for longer.

    Where other work has the other cores, a helper that is held up keeps its cell, and all wait.
    """
    global _until, _pause
    if waited < max(LATE, seconds / 3):
        _pause = _pause / 2 if _pause > ALONE else 0.0
    else:
        _pause = min(2 * _pause + ALONE, MOST_ALONE)
        _until = time.monotonic() + _pause


def _start_helpers(count: int) -> None:
    entry("help")
    try:
        while len(_helpers) < count:  # (calls at the same time may start one too many)
            _helpers.append(_thread.start_new_thread(_help, ()))
    except RuntimeError:
        pass  # no thread can be started (the interpreter ends): the caller does every cell


def warmup() -> None:
    """Compile the entries that a launch can take on this host."""
    for name in ("here",) if _forked else ("here", "helped", "help", "team"):
        entry(name)
    if not _forked:
        member()
