"""The table of recorded calls: what it keeps, for how long, and what it says of itself.

Guards: a repeated call gives what its first gave, in bounded memory, after any redefinition.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arrays import bits

import numfuse as nf
from numfuse import expr as ex
from numfuse.backends.cpu.face import BACKEND
from numfuse.runtime.replay import Replay


def test_a_program_is_found_by_its_fingerprint_alone():
    table: Replay[str] = Replay(10, 1000)
    assert table.find(("gelu", 3)) is None
    assert table.keep(("gelu", 3), "first", nbytes=5) == "first"
    assert table.find(("gelu", 3)) == "first" and table.find(("gelu", 4)) is None
    assert table.keep(("gelu", 3), "second", nbytes=7) == "second"
    assert table.find(("gelu", 3)) == "second"
    assert table.statistics() == (2, 2, 1, 7)  # hits, misses, entries, bytes


def test_the_oldest_goes_beyond_the_entries_and_beyond_the_bytes():
    table: Replay[int] = Replay(3, 100)
    for i in range(10):
        table.keep(i, i)
        assert table.programs() == list(range(max(0, i - 2), i + 1))
    table.keep("large", 10, nbytes=100)
    assert table.statistics().entries == 3
    table.keep("larger", 11, nbytes=99)
    assert table.programs() == [11]
    table.keep("too large", 12, nbytes=101)
    assert table.find("too large") is None and table.programs() == [11]


@pytest.mark.parametrize("limits", [(0, 0), (0, 10), (1, 0)])
def test_a_table_without_room_keeps_nothing_that_takes_room(limits):
    table: Replay[int] = Replay(*limits)
    assert table.keep("x", 1, nbytes=1) == 1
    assert not table.programs() and table.statistics().nbytes == 0


def test_a_program_goes_with_the_first_of_its_formulas():
    table: Replay[int] = Replay(10, 100)
    one, two = ex.exp(ex.SYMBOL * 1.125), ex.exp(ex.SYMBOL * 1.375)
    table.keep("one", 1, (one,), 4)
    table.keep("both", 2, (one, two), 8)
    table.keep("none", 3, (), 16)
    del two
    gc.collect()
    assert table.programs() == [1, 3] and table.statistics().nbytes == 20
    del one
    gc.collect()
    assert table.programs() == [3] and table.statistics().nbytes == 16
    table.clear()
    assert not table.programs() and table.statistics().nbytes == 0


def test_threads_that_keep_and_find_at_once_leave_the_table_within_its_limits():
    table: Replay[int] = Replay(20, 200)

    def work(t):
        for i in range(2000):
            key = (t * i) % 50
            found = table.find(key)
            assert found in (None, key)
            if found is None:
                table.keep(key, key, nbytes=key % 20)
            if i % 500 == 499:
                table.clear()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    table.keep("last", 0)
    kept = table.programs()
    assert 0 < len(kept) <= 20 and table.statistics().nbytes == sum(x % 20 for x in kept)


def test_a_cleared_backend_records_its_calls_again():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((6, 6), np.float32) for _ in range(2))
    wanted = bits(nf.matmul_bias_activation(a, b, None, "gelu"))
    before = BACKEND.replay.statistics()
    nf.matmul_bias_activation(a, b, None, "gelu")
    again = BACKEND.replay.statistics()
    assert (again.hits, again.misses) == (before.hits + 1, before.misses)
    BACKEND.replay.clear()
    assert BACKEND.replay.statistics().entries == 0
    assert (bits(nf.matmul_bias_activation(a, b, None, "gelu")) == wanted).all()
    assert BACKEND.replay.statistics().entries == 1
