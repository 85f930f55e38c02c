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

import mmap
import os
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from numba import prange, types

from numfuse import specialise
from numfuse.backends.cpu import microkernel

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Workspaces are cut on pages, so that two threads never share a line or a page.
PAGE = 4096
HUGE_PAGE = 2 << 20
#: Workspaces kept for the next call: as many as calls have run at once, up to this number.
KEPT_WORKSPACES = 4


def run_here(cell_function, descriptor, cells, workspace):
    """All cells in the calling thread."""
    for cell in range(cells):
        CALL(cell_function, descriptor, cell, workspace)


def run_shared(cell_function, descriptor, cells, workspace, counter):
    """Cells from a counter that several threads share, until there are none left."""
    cell = FETCH_ADD(counter)
    while cell < cells:
        CALL(cell_function, descriptor, cell, workspace)
        cell = FETCH_ADD(counter)


def run_parallel(cell_function, descriptor, cells, workspace, stride, counter, threads):
    """All cells on Numba's threads; thread t works at ``workspace + t * stride``."""
    for t in prange(threads):
        RUN_SHARED(cell_function, descriptor, cells, workspace + t * stride, counter)


_I = types.int64
_entries: dict[str, Any] = {}


def _entry(name: str) -> Any:
    known = _entries.get(name)
    if known is None:
        call, fetch_add = microkernel.make_call(3), microkernel.make_fetch_add()
        if name == "here":
            known = specialise.entry(run_here, types.void(_I, _I, _I, _I), CALL=call)
        elif name == "shared":
            known = specialise.entry(
                run_shared, types.void(*[_I] * 5), CALL=call, FETCH_ADD=fetch_add
            )
        else:
            shared = specialise.device(run_shared, CALL=call, FETCH_ADD=fetch_add)
            known = specialise.entry(
                run_parallel, types.void(*[_I] * 7), parallel=True, RUN_SHARED=shared, prange=prange
            )
        _entries[name] = known
    return known


class Workspace:
    """Page-aligned memory for the cells of one launch, on huge pages where the system has them."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        self._map = mmap.mmap(-1, self.size + HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        address = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]
        self.address = -(-address // HUGE_PAGE) * HUGE_PAGE


# list.append and list.pop are atomic, so the pool needs no lock (and survives a fork).
_pool: list[Workspace] = []


def _borrow(size: int) -> Workspace:
    try:
        workspace = _pool.pop()
    except IndexError:
        return Workspace(size)
    return workspace if workspace.size >= size else Workspace(size)


def _give_back(workspace: Workspace) -> None:
    if len(_pool) < KEPT_WORKSPACES:
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
    """Threads that the next launch of this Python thread may use: Numba's setting, 1 after a fork."""
    return 1 if _forked else int(numba.get_num_threads())


def threading_layer() -> str:
    """Numba's layer: "tbb", "omp" or "workqueue" (under which numfuse uses its own threads)."""
    numba.get_num_threads()  # starts the layer; its name is unknown before
    return str(numba.threading_layer())


def _own_threads() -> ThreadPoolExecutor:
    global _executor
    with _executor_lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(
                max(1, int(numba.config.NUMBA_NUM_THREADS) - 1), thread_name_prefix="numfuse"
            )
        return _executor


def launch(cell_function: int, descriptor: int, cells: int, stride: int, count: int) -> None:
    """Run `cells` cells on at most `count` threads with `stride` bytes of workspace each.

    Trusts that `descriptor` and all it points to stay valid until the return, and that no kernel
    raises.
    """
    count = min(count, cells)
    workspace = _borrow(max(count, 1) * stride)
    if count <= 1:
        _entry("here")(cell_function, descriptor, cells, workspace.address)
    elif threading_layer() != "workqueue":
        counter = array("q", [0])
        _entry("parallel")(
            cell_function, descriptor, cells, workspace.address, stride,
            counter.buffer_info()[0], count,
        )
    else:
        _launch_on_own_threads(cell_function, descriptor, cells, workspace, stride, count)
    _give_back(workspace)


def _launch_on_own_threads(
    cell_function: int, descriptor: int, cells: int, workspace: Workspace, stride: int, count: int
) -> None:
    run = _entry("shared")
    counter = array("q", [0])
    shared = counter.buffer_info()[0]
    futures = [
        _own_threads().submit(
            run, cell_function, descriptor, cells, workspace.address + t * stride, shared
        )
        for t in range(1, count)
    ]
    try:
        run(cell_function, descriptor, cells, workspace.address, shared)
    finally:
        # Whatever interrupts the caller: operands and workspace stay alive until all are done.
        for future in futures:
            future.result()


def warmup() -> None:
    """Compile the entries that a launch can take on this host."""
    _entry("here")
    if not _forked:
        _entry("shared" if threading_layer() == "workqueue" else "parallel")
