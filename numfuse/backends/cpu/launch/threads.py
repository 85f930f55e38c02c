"""On which threads the cells of a sequence run.

Three ways, with the same result bit by bit:

- in the calling thread (small launches, one thread asked for, a forked child);
- in Numba's thread pool (`prange`), where the threading layer is tbb or omp, unless another
  library's threads keep its threads waiting (`_note_late_threads`);
- in threads of our own, where the layer is workqueue: it aborts the process when two threads
  enter it at once, be it only by a user's own `prange`, so numfuse never enters it.

A forked child runs everything in the calling thread: GNU OpenMP ends a child that enters it, and
processes made by fork are usually one worker among many.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import time
from array import array
from queue import SimpleQueue
from typing import Any

import numba

from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.launch.entries import entry
from numfuse.errors import BackendUnavailable
from numfuse.runtime.threads import share

#: Seconds: a launch that takes no longer has no late threads; and how long Numba's pool is left
#: alone at first when there were some: the fourth time it is eight times as long, more than
#: OpenBLAS spins for (0.13 s at 2 GHz).  Threads of our own may be woken on the core of the thread
#: that calls and do nothing for it (measured: half the speed of two): no longer than it must be.
LATE = 2e-3
CROWDED = 0.02


def _yield_address() -> int:
    """The C library's sched_yield; 0 where there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


YIELD = _yield_address()

_forked = False
#: Threads of our own, and what they are asked for: the entry "help", its arguments, and the gate
#: among them, which this keeps alive.
_helpers: list[int] = []
_wanted: SimpleQueue[tuple[Any, tuple[int, ...], array[int]]] = SimpleQueue()


def _after_fork_in_child() -> None:
    global _forked, _wanted
    _forked = True
    _helpers.clear()  # they did not survive the fork
    _wanted = SimpleQueue()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def number() -> int:
    """Return how many threads this Python thread's next launch may use.

    Numba's setting, or the share that the thread was given where that is less; 1 after a fork.
    """
    most = share.threads
    if _forked or most == 1:
        return 1  # without asking Numba, which would start a pool that is not used
    own = _numbas()
    return own if most is None else min(own, most)


def _numbas() -> int:
    """Return how many threads Numba is set to use; this starts its layer."""
    try:
        return int(numba.get_num_threads())
    except ValueError as error:  # it cannot, as with a layer that is not installed
        layer: Any = numba.config.THREADING_LAYER  # type: ignore[attr-defined]
        reason = " ".join(str(error).split())
        raise BackendUnavailable(
            "cpu", f"Numba has no threads, NUMBA_THREADING_LAYER is {layer!r}: {reason}"
        ) from error


def layer() -> str:
    """Return Numba's threading layer: "tbb", "omp" or "workqueue".

    Under the last numfuse uses its own threads.
    """
    _numbas()  # the layer's name is unknown before
    return str(numba.threading_layer())  # type: ignore[attr-defined]


def _help() -> None:
    """Run what is handed to a thread of our own, to the end of the process."""
    wanted = _wanted
    while True:
        run, arguments, _gate = wanted.get()
        run(*arguments)


def run(how: tuple[int, ...], stride: int, threads: int) -> None:
    """Run a sequence on so many threads.

    `how` is the address of its steps, how many they are, the address of the arrays, that of the
    memory, and where in that the table lies; `stride` the bytes of a thread's workspace.
    """
    if threads == 1:
        entry("here")(*how)
    elif layer() != "workqueue" and time.monotonic() >= _crowded_until:
        *_, memory, table = how
        parallel = entry("parallel")
        start = time.monotonic()
        parallel(*how, stride, threads, YIELD)
        _note_late_threads(memory + table, time.monotonic() - start)
    else:
        _run_on_own_threads(how, stride, threads)


#: Until when (time.monotonic) Numba's pool is left alone; how many of its launches in a row had
#: late threads.  Races between threads that launch at once only make them try again.
_crowded_until = 0.0
_late_launches = 0


def _note_late_threads(table: int, seconds: float) -> None:
    """After a launch on Numba's pool: if it took long and one of its threads came when no cell was
    left, for the second time in a row, leave that pool alone for a while; each time for longer.

    The pool's barrier waits for every thread, also for one that cannot begin because another
    library's pool holds its core: after a product, the idle threads of OpenBLAS look for work for
    2**28 cycles (130 ms), and each launch meanwhile takes 4-12 ms longer.  Threads of our own are
    waited for only if they have begun.
    """
    global _crowded_until, _late_launches
    late = (
        seconds > LATE
        and ctypes.c_int64.from_address(table + 8 * protocol.TABLE["T_LATE"]).value > 0
    )
    if not late:
        _late_launches = 0
        return
    _late_launches = min(_late_launches + 1, 5)
    if _late_launches > 1:
        _crowded_until = time.monotonic() + CROWDED * 2 ** (_late_launches - 2)


def _run_on_own_threads(how: tuple[int, ...], stride: int, threads: int) -> None:
    """A launch with the help of threads of our own.

    An interrupt (Ctrl-C) can come between any two of these steps, also inside what the standard
    library writes in Python: an executor or a condition would then be left locked, and the next
    call, or the end of the process, wait for ever.  So there is nothing here that has to be undone:
    what has to be is inside one native call, and the queue is a single step of the interpreter.
    """
    *_, workspace, table = how
    gate = array("q", [0])
    address = gate.buffer_info()[0]
    run, run_helped = entry("help"), entry("helped")
    try:
        while len(_helpers) < threads - 1:  # (calls at the same time may start one too many)
            _helpers.append(_thread.start_new_thread(_help, ()))
    except RuntimeError:
        pass  # no thread can be started (the interpreter ends): the caller does every cell
    for t in range(1, threads):
        _wanted.put((run, (address, workspace + table, workspace + t * stride, YIELD), gate))
    run_helped(*how, address, YIELD)


def warmup() -> None:
    """Compile the entries that a launch can take on this host."""
    entry("here")
    if _forked:
        return
    if layer() != "workqueue":
        entry("parallel")
    for name in ("helped", "help"):
        entry(name)
