"""How many threads a call may use: the share that a scheduler of tasks gives to each of its own.

Numba's setting belongs to a thread, and a new thread starts at the full count: a scheduler that
runs several tasks at once, each in a thread of its pool, would run each on every core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Team(NamedTuple):
    """Threads of OpenMP that another library keeps for those who call it."""

    #: The addresses of ``GOMP_parallel`` and ``omp_get_num_threads`` in the library that has them.
    parallel: int
    count_members: int
    #: Returns how many there are for this thread.
    size: Callable[[], int]


class _Share(threading.local):
    #: The threads that are to run this thread's call beside it: None are the backend's own.
    team: Team | None = None
    #: None: as many as the backend's own setting.
    threads: int | None = None


share = _Share()


@contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Inside, the calls of this thread use no more threads than that."""
    before = share.threads
    share.threads = threads
    try:
        yield
    finally:
        share.threads = before
