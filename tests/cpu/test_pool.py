"""Free memory: what is kept, what is found again, and what goes first.

Guards: what numfuse keeps of memory is bounded (docs/design.md, "Memory is bounded").
"""

from __future__ import annotations

import threading

import pytest

from numfuse.runtime.pool import FreeBlocks


def pool(limit=None):
    gone = []
    return FreeBlocks(gone.append, limit), gone


def test_the_latest_block_of_the_smallest_size_that_serves():
    free, gone = pool()
    for name, size in (("a", 8), ("b", 16), ("c", 8), ("d", 32)):
        free.keep("me", size, name)
    assert free.nbytes == 64 and len(free) == 4
    assert free.take("you", 8, 64) is None
    assert free.take("me", 9, 15) is None
    assert [free.take("me", 5, 10), free.take("me", 5, 10), free.take("me", 5, 10)] == [
        "c", "a", None,
    ]  # fmt: skip
    assert free.take("me", 5, 40) == "b"
    assert free.nbytes == 32 and not gone


def test_the_oldest_makes_room_for_what_is_in_use():
    free, gone = pool(limit=100)
    for i in range(10):
        free.keep(None, 10, i)
    for _ in range(50):  # of a new size, asked for again and again
        assert free.take(None, 30, 30) in (None, "new")
        free.keep(None, 30, "new")
    assert gone == [0, 1, 2]
    assert free.nbytes == 100
    assert [free.take(None, 10, 10) for _ in range(8)] == [9, 8, 7, 6, 5, 4, 3, None]


def test_a_block_beyond_the_limit_is_not_kept():
    free, gone = pool(limit=100)
    free.keep(None, 60, "small")
    free.keep(None, 101, "large")
    assert gone == ["large"] and free.nbytes == 60
    free.clear()
    assert gone == ["large", "small"] and free.nbytes == len(free) == 0


def test_a_block_may_come_back_in_the_middle_of_anything():
    """As from the garbage collector, which ends arrays in any line."""
    found = []

    def drop(block):
        found.append(block)
        if block < 5:
            free.keep("late", 10, block + 5)

    free = FreeBlocks(drop, limit=20)
    for block in range(7):
        free.keep("me", 10, block)
    free.keep("me", 20, 100)
    free.clear()
    assert sorted(found) == sorted([*range(7), *range(5, 10), 100])
    assert free.nbytes == len(free) == 0


@pytest.mark.parametrize("limit", [None, 640])
def test_threads_share_the_blocks(limit):
    dropped = []
    free = FreeBlocks(dropped.append, limit)
    every = [object() for _ in range(64)]
    held = set(every)
    errors = []

    def work(mine):
        try:
            for _ in range(300):
                for block in mine:
                    free.keep(None, 16, block)
                mine[:] = [b for b in (free.take(None, 16, 16) for _ in range(16)) if b is not None]
        except BaseException as error:
            errors.append(error)

    shares = [every[i::4] for i in range(4)]
    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    left = [block for share in shares for block in share]
    free.clear()
    assert len(left) + len(dropped) == 64 and set(left) | set(dropped) == held
