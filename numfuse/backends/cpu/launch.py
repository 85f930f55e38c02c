"""Launching cells on threads: one choke point for every kernel of the CPU backend.

What is launched is a sequence of steps, each so many cells, in phases: a cell begins when the
phases before its own are finished.  So a whole backward is one launch, and the products of one
phase share its threads.

Three ways to run the cells of a launch, with the same result bit by bit:

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
import functools
import mmap
import os
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import prange, types

from numfuse.backends import Call
from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.llvm import microkernel
from numfuse.errors import BackendUnavailable
from numfuse.runtime import specialise
from numfuse.runtime.threads import share

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Workspaces are cut on pages, so that two threads never share a line or a page.
PAGE = 4096
HUGE_PAGE = 2 << 20
#: Workspaces kept for the next call: as many as calls have run at once, up to this number and to
#: `tiling.KEPT_BYTES` in all.
KEPT_WORKSPACES = 4
#: Looks at the counter before a waiting thread lets others run: some microseconds.
SPINS = 100
#: Looks at the gate of a launch that has not begun before a helper leaves: about a millisecond.
#: (The launch never begins if its caller was interrupted.)
PATIENCE = 200 * SPINS
#: What the gate of a launch gains when it is opened, and when it is closed.
GATE = 1 << 32
#: Seconds: a launch that takes no longer has no late threads; and how long Numba's pool is left
#: alone at first when there were some: the fourth time it is eight times as long, more than
#: OpenBLAS spins for (0.13 s at 2 GHz).  Threads of our own may be woken on the core of the thread
#: that calls and do nothing for it (measured: half the speed of two): no longer than it must be.
LATE = 2e-3
CROWDED = 0.02


def resolve(descriptor: int, arrays: int, temporaries: int) -> None:
    """Replace the names of operands in a descriptor by the addresses of their data.

    Bit i of word D_NAMED says that operand i (A, B, then the slots) is named: by the number of its
    array in its lowest NUMBER_BITS bits, and above them how many bytes behind that array's first
    element it begins.  The last number stands for the memory at `temporaries`.
    """
    d = WORDS(descriptor)
    named = d[D_NAMED]
    word = D_A
    operand = 0
    while named != 0:
        if named & 1:
            number = d[word] & NUMBERS
            base = temporaries if number == NUMBERS else DATA(arrays, number)
            d[word] = base + (d[word] >> NUMBER_BITS)
        named = named >> 1
        operand += 1
        word = D_B if operand == 1 else D_SLOTS + 3 * (operand - 2)


def data_of_array(arrays: int, number: int) -> int:
    """Where the elements of array `number` of the tuple at `arrays` begin.

    That is the word right behind the object header.  Reading it here takes a nanosecond,
    ``__array_interface__`` a microsecond an operand.
    """
    return WORDS(WORDS(arrays + TUPLE_HEADER)[number] + HEADER)[0]


def data_of_address(arrays: int, number: int) -> int:
    """Return where the elements of array `number` begin; at `arrays` lie the data's addresses."""
    return WORDS(arrays)[number]


def open_sequence(steps: int, count: int, arrays: int, workspace: int, table: int) -> None:
    """Complete the descriptors of `count` steps for the arrays of a call, in the memory at `table`.

    A step is its cell function, the numbers of cells up to its end and before its phase, the number
    of words of its descriptor, and the descriptor, which names its operands (`resolve`).  The steps
    serve every call, so all this is done in a copy.

    Before the steps stand the number of an array that a temporary is to lie beside (-1: none), and
    where that temporary is planned: all are moved, within a page, so that it begins a line further
    into its page than the array.  The pass that writes grad_pre reads grad, and mostly a saved
    pre-activation, in the same places of other pages.  Reads that a processor takes ahead of a
    write wait where both agree in the address within a page: with grad_pre one or two KiB further,
    the pass was measured to take 1.6 times as long.
    """
    head = WORDS(steps)
    temporaries = workspace
    if head[0] >= 0:
        distance = DATA(arrays, head[0]) + LINE - workspace - head[1]
        temporaries += distance % PAGE // LINE * LINE
    t = WORDS(table)
    t[T_NEXT] = 0
    t[T_FINISHED] = 0
    t[T_LATE] = 0
    entry = table + 8 * T_ENTRIES
    descriptor = entry + 8 * ENTRY_WORDS * count
    at = steps + 16
    for _ in range(count):
        step, e, d = WORDS(at), WORDS(entry), WORDS(descriptor)
        e[0] = step[0]
        e[1] = step[1]
        e[2] = step[2]
        e[3] = descriptor
        t[T_CELLS] = step[1]
        words = step[3]
        for i in range(words):
            d[i] = step[4 + i]
        RESOLVE(descriptor, arrays, temporaries)
        at += 8 * (4 + words)
        entry += 8 * ENTRY_WORDS
        descriptor += 8 * words


def look_again(looks: int, pause: int) -> int:
    """Between two looks at a counter: how many there have been; now and then it lets others run."""
    PAUSE()
    looks += 1
    if looks % SPINS == 0 and pause != 0:
        CALL_PAUSE(pause)
    return looks


def work(table: int, workspace: int, pause: int) -> None:
    """Cells of an open sequence, until none are left: what each of its threads does.

    Cells are numbered through all steps and taken in that order.  A cell waits until those of the
    phases before its own are finished.  Each of these is in the hands of a thread that waits for
    earlier ones only: so there is always one that need not wait, however few threads there are and
    however late they come.  `pause` is the address of a function that lets others run, or 0.
    """
    t = WORDS(table)
    cells = t[T_CELLS]
    entry = table + 8 * T_ENTRIES
    begin = 0
    cell = FETCH_ADD(table + 8 * T_NEXT, 1)
    if cell >= cells:
        FETCH_ADD(table + 8 * T_LATE, 1)
    while cell < cells:
        e = WORDS(entry)
        while cell >= e[1]:
            begin = e[1]
            entry += 8 * ENTRY_WORDS
            e = WORDS(entry)
        looks = 0
        while LOAD(table + 8 * T_FINISHED) < e[2]:
            looks = LOOK_AGAIN(looks, pause)
        CALL(e[0], e[3], cell - begin, workspace)
        FETCH_ADD(table + 8 * T_FINISHED, 1)
        cell = FETCH_ADD(table + 8 * T_NEXT, 1)


def run_here(steps: int, count: int, arrays: int, workspace: int, table: int) -> None:
    """A sequence in the calling thread."""
    OPEN(steps, count, arrays, workspace, workspace + table)
    WORK(workspace + table, workspace, 0)


def run_parallel(
    steps: int,
    count: int,
    arrays: int,
    workspace: int,
    table: int,
    stride: int,
    threads: int,
    pause: int,
) -> None:
    """A sequence on Numba's threads; thread t works at ``workspace + t * stride``."""
    OPEN(steps, count, arrays, workspace, workspace + table)
    for t in prange(threads):
        WORK(workspace + table, workspace + t * stride, pause)


def run_with_helpers(
    steps: int, count: int, arrays: int, workspace: int, table: int, gate: int, pause: int
) -> None:
    """A sequence in the calling thread and in those that `help_with` brings.

    The word at `gate` counts who is inside, above that it says whether the launch has begun (GATE)
    and is over (2 * GATE).  Operands and workspace may be gone after the return, so the gate is
    closed before, and who is inside is waited for: here, where nothing interrupts.
    """
    table += workspace
    OPEN(steps, count, arrays, workspace, table)
    FETCH_ADD(gate, GATE)
    WORK(table, workspace, pause)
    FETCH_ADD(gate, GATE)
    looks = 0
    while LOAD(gate) != 2 * GATE:
        looks = LOOK_AGAIN(looks, pause)


def help_with(gate: int, table: int, workspace: int, pause: int) -> None:
    """Take part in a launch of `run_with_helpers`, unless it is over."""
    begun = FETCH_ADD(gate, 1) // GATE
    looks = 0
    while begun == 0 and looks < PATIENCE:
        looks = LOOK_AGAIN(looks, pause)
        begun = LOAD(gate) // GATE
    if begun == 1:
        WORK(table, workspace, pause)
    FETCH_ADD(gate, -1)


_I = types.int64
#: Bytes of an object's header, behind which NumPy's C API has an array's data pointer.
HEADER = object.__basicsize__
#: Bytes of a tuple before its items.
TUPLE_HEADER = tuple.__basicsize__


def _objects_can_be_read() -> bool:
    """Whether an ndarray's data pointer and a tuple's items stand where the C APIs of NumPy and
    CPython have them (CPython: yes)."""
    probe = np.zeros(3)[1:]
    if sys.implementation.name != "cpython":
        return False
    pair = None, probe
    item = ctypes.c_void_p.from_address(id(pair) + TUPLE_HEADER + ctypes.sizeof(ctypes.c_void_p))
    return (
        item.value == id(probe)
        and ctypes.c_void_p.from_address(id(probe) + HEADER).value == probe.ctypes.data
    )


OBJECTS_CAN_BE_READ = _objects_can_be_read()


def _yield_address() -> int:
    """The C library's sched_yield; 0 where there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0


YIELD = _yield_address()


@functools.cache
def _entry(name: str) -> Any:
    names: dict[str, Any] = {name: protocol.DESCRIPTOR[name] for name in ("D_A", "D_B", "D_NAMED")}
    names |= protocol.TABLE | {
        "D_SLOTS": protocol.D_SLOTS,
        "WORDS": microkernel.make_elements("int64"),
        "NUMBER_BITS": protocol.NUMBER_BITS,
        "NUMBERS": protocol.NUMBERS,
        "ENTRY_WORDS": protocol.ENTRY_WORDS,
        "LINE": tiling.LINE,
        "PAGE": PAGE,
    }
    data = data_of_array if OBJECTS_CAN_BE_READ else data_of_address
    names["DATA"] = specialise.device(data, HEADER=HEADER, TUPLE_HEADER=TUPLE_HEADER, **names)
    names["RESOLVE"] = specialise.device(resolve, **names)
    waiting = {
        "FETCH_ADD": microkernel.make_fetch_add(),
        "LOAD": microkernel.make_atomic_load(),
        "LOOK_AGAIN": specialise.device(
            look_again,
            PAUSE=microkernel.make_pause(),
            CALL_PAUSE=microkernel.make_call(0),
            SPINS=SPINS,
        ),
    }
    parts = {
        "OPEN": specialise.device(open_sequence, **names),
        "WORK": specialise.device(work, CALL=microkernel.make_call(3), **names, **waiting),
    }
    if name == "helped":
        return specialise.entry(
            run_with_helpers, types.void(*[_I] * 7), GATE=GATE, **parts, **waiting
        )
    if name == "help":
        return specialise.entry(
            help_with,
            types.void(*[_I] * 4),
            GATE=GATE,
            PATIENCE=PATIENCE,
            WORK=parts["WORK"],
            **waiting,
        )
    if name == "here":
        return specialise.entry(run_here, types.void(*[_I] * 5), **parts)
    return specialise.entry(
        run_parallel, types.void(*[_I] * 8), parallel=True, prange=prange, **parts
    )


class Workspace:
    """Page-aligned memory for the cells of one launch, on huge pages where the system has them."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        how = {}
        if hasattr(mmap, "MAP_PRIVATE"):
            # Python's default is a map that a forked child shares: both would work in one place.
            how["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.size + HUGE_PAGE, **how)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"the workspace of a call takes {self.size + HUGE_PAGE} bytes, and the system "
                f"gives none: {error}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        address = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]
        self.address = -(-address // HUGE_PAGE) * HUGE_PAGE
        self._start = self.address - address

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Part of it as a contiguous array, which keeps the memory alive."""
        return np.ndarray(shape, dtype, self._map, self._start + offset)


# list.append and list.pop are atomic, so the pool needs no lock (and survives a fork).
_pool: list[Workspace] = []


def _borrow(size: int) -> Workspace:
    try:
        workspace = _pool.pop()
    except IndexError:
        return Workspace(size)
    if workspace.size >= size:
        return workspace
    del workspace  # its memory may be what the larger one lacks
    try:
        return Workspace(size)
    except MemoryError:
        _pool.clear()
    return Workspace(size)


def _give_back(workspace: Workspace) -> None:
    if not _pool and workspace.size <= tiling.KEPT_BYTES // KEPT_WORKSPACES:
        _pool.append(workspace)  # the usual case, which is every small call's
        return
    kept = _pool[:]  # another thread may change the list itself
    if len(kept) < KEPT_WORKSPACES:
        if workspace.size + sum(x.size for x in kept) <= tiling.KEPT_BYTES:
            _pool.append(workspace)


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


def threads() -> int:
    """Threads that this Python thread's next launch may use: Numba's setting, or the share that it
    was given where that is less; 1 after a fork."""
    most = share.threads
    if _forked or most == 1:
        return 1  # without asking Numba, which would start a pool that is not used
    try:
        own = int(numba.get_num_threads())
    except ValueError as error:
        raise _no_threads(error) from error
    return own if most is None else min(own, most)


def _no_threads(error: ValueError) -> BackendUnavailable:
    """Return the error to raise if Numba cannot start threads, as with a layer not installed."""
    layer: Any = numba.config.THREADING_LAYER  # type: ignore[attr-defined]
    reason = " ".join(str(error).split())
    return BackendUnavailable(
        "cpu", f"Numba has no threads, NUMBA_THREADING_LAYER is {layer!r}: {reason}"
    )


def threading_layer() -> str:
    """Numba's layer: "tbb", "omp" or "workqueue" (under which numfuse uses its own threads)."""
    try:
        numba.get_num_threads()  # starts the layer; its name is unknown before
    except ValueError as error:
        raise _no_threads(error) from error
    return str(numba.threading_layer())  # type: ignore[attr-defined]


def _help() -> None:
    """Run what is handed to a thread of our own, to the end of the process."""
    wanted = _wanted
    while True:
        run, arguments, _gate = wanted.get()
        run(*arguments)


_here: Any = None


def _load_here() -> Any:
    global _here
    _here = _entry("here")
    return _here


class Sequence(NamedTuple):
    """Steps that are run in one native call; `driver.sequence` makes them."""

    #: The steps that `open_sequence` reads, their address, and how many they are.
    words: array[int]
    address: int
    steps: int
    #: Threads, and the bytes of workspace of each.
    threads: int
    stride: int
    #: Where in the memory of a launch its table lies, and how much it needs in all.
    table: int
    size: int
    #: What `last_call` tells of it.
    call: Call
    #: Those whose addresses are in the steps.
    kernels: tuple[specialise.Kernel, ...]


def launch(sequence: Sequence, arrays: tuple[np.ndarray | None, ...]) -> None:
    """Run a sequence on the arrays of a call.

    Trusts that the steps and the arrays stay alive until the return, and that no kernel raises.
    """
    workspace = _borrow(sequence.size)
    if sequence.threads == 1 and OBJECTS_CAN_BE_READ:  # as below, without another call
        (_here or _load_here())(
            sequence.address, sequence.steps, id(arrays), workspace.address, sequence.table
        )
    else:
        launch_in(workspace.address, sequence, arrays)
    _give_back(workspace)


def launch_in(workspace: int, sequence: Sequence, arrays: tuple[np.ndarray | None, ...]) -> None:
    """Do as `launch` does, with `sequence.size` bytes of memory at the address `workspace`."""
    if OBJECTS_CAN_BE_READ:
        operands = id(arrays)
    else:
        data = [0 if x is None else x.__array_interface__["data"][0] for x in arrays]
        addresses = array("q", data)
        operands = addresses.buffer_info()[0]
    how = sequence.address, sequence.steps, operands, workspace, sequence.table
    threads = sequence.threads
    if threads == 1:
        (_here or _load_here())(*how)
    elif threading_layer() != "workqueue" and time.monotonic() >= _crowded_until:
        run = _entry("parallel")
        start = time.monotonic()
        run(*how, sequence.stride, threads, YIELD)
        _note_late_threads(workspace + sequence.table, time.monotonic() - start)
    else:
        _launch_on_own_threads(how, sequence.stride, threads)


@contextmanager
def room(size: int) -> Iterator[Workspace]:
    """Memory for the launches of one call and what they hand on; after an error it is not kept."""
    workspace = _borrow(size)
    yield workspace
    _give_back(workspace)


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


def _launch_on_own_threads(how: tuple[int, ...], stride: int, threads: int) -> None:
    """A launch with the help of threads of our own.

    An interrupt (Ctrl-C) can come between any two of these steps, also inside what the standard
    library writes in Python: an executor or a condition would then be left locked, and the next
    call, or the end of the process, wait for ever.  So there is nothing here that has to be undone:
    what has to be is inside one native call, and the queue is a single step of the interpreter.
    """
    *_, workspace, table = how
    gate = array("q", [0])
    address = gate.buffer_info()[0]
    run, run_helped = _entry("help"), _entry("helped")
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
    _entry("here")
    if _forked:
        return
    if threading_layer() != "workqueue":
        _entry("parallel")
    for name in ("helped", "help"):
        _entry(name)
