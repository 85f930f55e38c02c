"""How many threads a call may use: the share that a scheduler of tasks gives to each of its own.

Numba's setting belongs to a thread, and a new thread starts at the full count: a scheduler that
runs several tasks at once, each in a thread of its pool, would run each on every core.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Share(threading.local):
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
