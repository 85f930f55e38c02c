"""Launching cells on threads: one choke point for every kernel of the CPU backend.

Three ways to run the cells of a launch, with the same result bit by bit:

- in the calling thread (small launches, one thread asked for, a forked child);
- in Numba's thread pool (`prange`), where the threading layer is tbb or omp;
- in threads of our own, where the layer is workqueue: it aborts the process when two threads
  enter it at once, be it only by a user's own `prange`, so numfuse never enters it.

A forked child runs everything in the calling thread: GNU OpenMP ends a child that enters it, and
processes made by fork are usually one worker among many.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from numba import prange, types

from numfuse import specialise, tiling
from numfuse.backends.cpu import microkernel, protocol

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Workspaces are cut on pages, so that two threads never share a line or a page.
PAGE = 4096
HUGE_PAGE = 2 << 20
#: Workspaces kept for the next call: as many as calls have run at once, up to this number and to
#: `tiling.KEPT_BYTES` in all.
KEPT_WORKSPACES = 4


def resolve(descriptor: int, arrays: int, workspace: int) -> None:
    """Replace what the descriptor names operands by with the addresses of their data.

    Bit i of word D_OBJECTS says that operand i (A, B, then the slots) is named: in most launches by
    the address of its ndarray object, in a sequence by a number (`data_of_number`).
    """
    d = WORDS(descriptor)
    objects = d[D_OBJECTS]
    word = D_A
    operand = 0
    while objects != 0:
        if objects & 1:
            d[word] = DATA(d[word], arrays, workspace)
        objects = objects >> 1
        operand += 1
        word = D_B if operand == 1 else D_SLOTS + 3 * (operand - 2)
    d[D_OBJECTS] = 0


def data_of_object(array: int, arrays: int, workspace: int) -> int:
    """Where the elements of an ndarray object begin: the word right behind the object header.

    Reading it here takes a nanosecond, ``__array_interface__`` a microsecond an operand.
    """
    return WORDS(array + HEADER)[0]


def data_of_number(number: int, arrays: int, workspace: int) -> int:
    """The same of array `number` of the tuple at `arrays`; a negative one is a temporary, that many
    bytes behind `workspace`."""
    if number < 0:
        return workspace - number
    return WORDS(WORDS(arrays + TUPLE_HEADER)[number] + HEADER)[0]


def run_sequence(steps: int, count: int, arrays: int, workspace: int, scratch: int) -> None:
    """`count` steps one after another in the calling thread, on the arrays of a tuple.

    A step is its cell function, its number of cells, the number of words of its descriptor, and the
    descriptor, which names operands by number (`data_of_number`).  The steps serve every call, so a
    descriptor is resolved in a copy, `scratch` bytes behind `workspace`.
    """
    descriptor = workspace + scratch
    d = WORDS(descriptor)
    at = steps
    for _ in range(count):
        step = WORDS(at)
        words = step[2]
        for i in range(words):
            d[i] = step[3 + i]
        RESOLVE(descriptor, arrays, workspace)
        for cell in range(step[1]):
            CALL(step[0], descriptor, cell, workspace)
        at += 8 * (3 + words)


def run_here(cell_function: int, descriptor: int, cells: int, workspace: int) -> None:
    """All cells in the calling thread."""
    RESOLVE(descriptor, 0, 0)
    for cell in range(cells):
        CALL(cell_function, descriptor, cell, workspace)


def run_shared(
    cell_function: int, descriptor: int, cells: int, workspace: int, counter: int
) -> None:
    """Cells from a counter that several threads share, until there are none left."""
    cell = FETCH_ADD(counter)
    while cell < cells:
        CALL(cell_function, descriptor, cell, workspace)
        cell = FETCH_ADD(counter)


def run_parallel(
    cell_function: int,
    descriptor: int,
    cells: int,
    workspace: int,
    stride: int,
    counter: int,
    threads: int,
) -> None:
    """All cells on Numba's threads; thread t works at ``workspace + t * stride``."""
    RESOLVE(descriptor, 0, 0)
    for t in prange(threads):
        RUN_SHARED(cell_function, descriptor, cells, workspace + t * stride, counter)


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


@functools.cache
def _entry(name: str) -> Any:
    call, fetch_add = microkernel.make_call(3), microkernel.make_fetch_add()
    names: dict[str, Any] = {
        name: protocol.DESCRIPTOR[name] for name in ("D_A", "D_B", "D_OBJECTS")
    }
    names |= {"D_SLOTS": protocol.D_SLOTS, "WORDS": microkernel.make_elements("int64")}
    template = data_of_number if name == "sequence" else data_of_object
    names["DATA"] = specialise.device(template, HEADER=HEADER, TUPLE_HEADER=TUPLE_HEADER, **names)
    if name == "resolve":
        return specialise.entry(resolve, types.void(*[_I] * 3), **names)
    resolved = specialise.device(resolve, **names)
    if name == "sequence":
        return specialise.entry(
            run_sequence, types.void(*[_I] * 5), CALL=call, RESOLVE=resolved, WORDS=names["WORDS"]
        )
    if name == "here":
        return specialise.entry(run_here, types.void(*[_I] * 4), CALL=call, RESOLVE=resolved)
    if name == "shared":
        return specialise.entry(run_shared, types.void(*[_I] * 5), CALL=call, FETCH_ADD=fetch_add)
    shared = specialise.device(run_shared, CALL=call, FETCH_ADD=fetch_add)
    return specialise.entry(
        run_parallel, types.void(*[_I] * 7), parallel=True, RUN_SHARED=shared, prange=prange,
        RESOLVE=resolved,
    )  # fmt: skip


class Workspace:
    """Page-aligned memory for the cells of one launch, on huge pages where the system has them."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        if hasattr(mmap, "MAP_PRIVATE"):
            # Python's default is a map that a forked child shares: both would work in one place.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, self.size + HUGE_PAGE, flags=flags)
        else:
            self._map = mmap.mmap(-1, self.size + HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
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
    return workspace if workspace.size >= size else Workspace(size)


def _give_back(workspace: Workspace) -> None:
    kept = _pool[:]  # another thread may change the list itself
    if len(kept) < KEPT_WORKSPACES:
        if workspace.size + sum(x.size for x in kept) <= tiling.KEPT_BYTES:
            _pool.append(workspace)


_forked = False
_executor: ThreadPoolExecutor | None = None
_executor_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _forked, _executor, _executor_lock
    _forked = True
    _executor = None  # its threads did not survive the fork
    _executor_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def threads() -> int:
    """Threads that this Python thread's next launch may use: Numba's setting, 1 after a fork."""
    return 1 if _forked else int(numba.get_num_threads())


def threading_layer() -> str:
    """Numba's layer: "tbb", "omp" or "workqueue" (under which numfuse uses its own threads)."""
    numba.get_num_threads()  # starts the layer; its name is unknown before
    return str(numba.threading_layer())  # type: ignore[attr-defined]


def _own_threads() -> ThreadPoolExecutor:
    global _executor
    with _executor_lock:
        if _executor is None:
            most = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
            _executor = ThreadPoolExecutor(max(1, most - 1), thread_name_prefix="numfuse")
        return _executor


_here: Any = None
_sequence: Any = None


def _load_here() -> Any:
    global _here
    _here = _entry("here")
    return _here


def _load_sequence() -> Any:
    global _sequence
    _sequence = _entry("sequence")
    return _sequence


def launch_sequence(steps: int, count: int, arrays: int, scratch: int, size: int) -> None:
    """Run the steps of `run_sequence` in the calling thread with `size` bytes of memory.

    Trusts that the steps and the tuple at `arrays` stay alive until the return, and that no kernel
    raises.
    """
    run = _sequence or _load_sequence()
    workspace = _borrow(size)
    run(steps, count, arrays, workspace.address, scratch)
    _give_back(workspace)


@contextmanager
def room(size: int) -> Iterator[Workspace]:
    """Memory for the launches of one call and what they hand on; after an error it is not kept."""
    workspace = _borrow(size)
    yield workspace
    _give_back(workspace)


def launch(cell_function: int, descriptor: int, cells: int, stride: int, count: int) -> None:
    """Run `cells` cells on at most `count` threads with `stride` bytes of workspace each."""
    workspace = _borrow(max(1, min(count, cells)) * stride)
    launch_in(workspace.address, cell_function, descriptor, cells, stride, count)
    _give_back(workspace)


def launch_in(
    workspace: int, cell_function: int, descriptor: int, cells: int, stride: int, count: int
) -> None:
    """The same with the workspaces of its threads at the address `workspace`.

    Trusts that `descriptor` and all it points to stay valid until the return, and that no kernel
    raises.
    """
    count = min(count, cells)
    if count <= 1:
        (_here or _load_here())(cell_function, descriptor, cells, workspace)
    elif threading_layer() != "workqueue":
        counter = array("q", [0])
        _entry("parallel")(
            cell_function, descriptor, cells, workspace, stride, counter.buffer_info()[0], count
        )
    else:
        _launch_on_own_threads(cell_function, descriptor, cells, workspace, stride, count)


class _Crew:
    """The threads at work on one launch; its end waits for those that have begun only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._inside = 0

    def share(self, run: Callable[..., None], *arguments: int) -> None:
        """Take part in the launch, unless it is over: what the arguments point to is then gone."""
        with self._changed:
            if not self._open:
                return
            self._inside += 1
        try:
            run(*arguments)
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def dismiss(self) -> None:
        """Let nobody in any more, and wait for the others, whatever interrupts the caller:
        operands and workspace have to stay alive until the last one is done."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._open = False
                    while self._inside:
                        self._changed.wait()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _launch_on_own_threads(
    cell_function: int, descriptor: int, cells: int, workspace: int, stride: int, count: int
) -> None:
    _entry("resolve")(descriptor, 0, 0)
    run = _entry("shared")
    counter = array("q", [0])
    shared = counter.buffer_info()[0]
    crew = _Crew()
    try:
        try:
            for t in range(1, count):
                place = workspace + t * stride
                _own_threads().submit(
                    crew.share, run, cell_function, descriptor, cells, place, shared
                )
        except RuntimeError:
            pass  # no thread can be started (the interpreter ends): the caller does every cell
        run(cell_function, descriptor, cells, workspace, shared)
    finally:
        crew.dismiss()


def warmup() -> None:
    """Compile the entries that a launch can take on this host."""
    _entry("here")
    if OBJECTS_CAN_BE_READ:
        _entry("sequence")
    if _forked:
        return
    for name in ("resolve", "shared") if threading_layer() == "workqueue" else ("parallel",):
        _entry(name)
