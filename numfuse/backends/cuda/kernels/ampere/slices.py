"""How a factor's slices come to shared memory, in the kernel of `blocks`.

By cp.async as they lie in memory, or through registers what it cannot copy or turn. Lengths are
masked here: what lies beyond the end of K arrives as zeros. Of a slice that K fills, lines beyond
the end of the factor's own axis are not fetched at all, and shared memory has there what it had:
these reach no sum that is stored.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.intrinsics import advance, least, most
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import bound, inlined, unrolled

i32 = np.int32

#: Values of k of a float32 factor along K that threads side by side fetch: one by one, and by
#: several. (By fours with 8 an H200 took 521 us for 2048 cubed with both factors turned in blocks
#: of 64 x 128, with 16 413; 422 and 403 in 64 x 64. One by one, where no line begins at a row's
#: first value, 293 and 316 us for 550 x 1031 x 7637.)
SIDE = 8, 16
#: Values of K whose rows are interleaved (`Fetch.row`).
INTERLEAVED = 16


@dataclass(frozen=True)
class Fetch:
    """How the threads of a block copy their slice of one factor to shared memory.

    A slice is `block` values of the factor's own axis (rows of X, columns of Y) by `depth` of K.
    """

    block: int
    depth: int
    threads: int
    itemsize: int
    #: Neighbouring threads, and the values of one copy, lie along K.
    along_k: bool
    #: Values of one copy: 16 bytes, or one value where the strides are any.
    values: int
    #: K is the contiguous axis in shared memory too.
    k_inner: bool
    #: Through registers, a slice ahead: what cp.async cannot copy or turn.
    held: bool = False
    #: Threads side by side; 0: all that fit.
    side_by_side: int = 0
    #: Two factors, of which each has one half of every step along the own axis: all copies of a
    #: thread are of one of them.
    paired: bool = False

    @property
    def fast(self) -> int:
        """Threads along the axis of the copies; all threads are within the slice."""
        lengths = self.depth, self.block
        length, other = lengths if self.along_k else lengths[::-1]
        length //= self.values
        return min(max(self.side_by_side or length, self.threads // other), length, self.threads)

    @property
    def steps(self) -> tuple[int, int]:
        """Distance of a thread's copies along (own axis, K)."""
        slow, fast = self.threads // self.fast, self.fast * self.values
        return (slow, fast) if self.along_k else (fast, slow)

    @property
    def gap(self) -> int:
        """Distance of a thread's copies along the own axis in memory."""
        return self.steps[0] // (2 if self.paired else 1)

    @property
    def abreast(self) -> int:
        """Values of one copy along the own axis."""
        return 1 if self.along_k else self.values

    @property
    def repeats(self) -> tuple[int, int]:
        own, k = self.steps
        return self.block // own, self.depth // k

    @property
    def copies(self) -> tuple[int, ...]:
        """Bytes in shared memory from a thread's first copy to each of them, the own axis first."""
        (own, k), (own_step, k_step) = self.repeats, self.steps
        own_bytes, k_bytes = own_step * self.offsets[0], k_step * self.offsets[1]
        return tuple(a * k_bytes + b * own_bytes for a in range(k) for b in range(own))

    @property
    def interleaved(self) -> bool:
        """Whether the rows of 16 values of K lie in another order (`row`).

        Where threads side by side have all of them, the rows of a warp's writes are `values` apart,
        and every second one of these would begin in the same bank.
        """
        return self.held and not self.k_inner and self.fast * self.values == INTERLEAVED

    def row(self, k: int) -> int:
        """Return the place in shared memory of the row for `k`, where K is the outer axis."""
        if not self.interleaved:
            return k
        half = self.values // 2
        first, value = divmod(k % INTERLEAVED, self.values)
        within = first * half + value % half + value // half * (INTERLEAVED // 2)
        return k // INTERLEAVED * INTERLEAVED + within

    @property
    def pitch(self) -> int:
        """Values from one row in shared memory to the next.

        16 bytes or four values are added, so that the rows that a warp reads or writes together lie
        in different banks.
        """
        return (self.depth if self.k_inner else self.block) + max(4, 16 // self.itemsize)

    @property
    def bytes(self) -> int:
        rows = self.block if self.k_inner else self.depth
        return self.pitch * rows * self.itemsize

    @property
    def offsets(self) -> tuple[int, int]:
        """Bytes in shared memory of one value along (own axis, K)."""
        long, short = self.pitch * self.itemsize, self.itemsize
        return (long, short) if self.k_inner else (short, long)

    @property
    def k_start(self) -> int:
        """Bytes in shared memory from a thread's first value to one further along K, for each."""
        return self.offsets[1] // 2 if self.interleaved else self.offsets[1]

    def bindings(self) -> dict[str, Any]:
        (own, k), (repeats_own, repeats_k) = self.steps, self.repeats
        assert self.block % own == 0 and self.depth % k == 0, self
        assert self.fast & (self.fast - 1) == 0, self
        assert not self.paired or self.gap % (1 if self.along_k else self.values) == 0, self
        offset_own, offset_k = self.offsets
        return bound(self, "along_k values itemsize") | {
            "FAST_BITS": self.fast.bit_length() - 1,
            "OWN_STEP": own,
            "OWN_GAP": self.gap,
            "K_STEP": k,
            "OWN_REPEATS": repeats_own,
            "K_REPEATS": repeats_k,
            "OWN_OFFSET": offset_own,
            "K_OFFSET": offset_k,
            "K_START": self.k_start,
            "ROWS": tuple(self.row(v) for v in range(self.values)),
            "BLOCK_K": self.depth,
        }


def _first(t):
    """A thread's first value along (the factor's own axis, K)."""
    fast, slow = i32((t & ((1 << FAST_BITS) - 1)) * VALUES), i32(t >> FAST_BITS)
    if ALONG_K:
        return slow, fast
    return fast, slow


def _masked_copies(shared, at, own_left, k_left, along, own_step, k_step):
    """A thread's copies of a slice, from `at`; beyond the factor's end they write zeros."""
    here = i32(k_left - along)
    for a in unrolled(K_REPEATS):
        for b in unrolled(OWN_REPEATS):
            if ALONG_K:
                count = i32(least(i32(here - a * K_STEP), VALUES))
                other = i32(own_left - b * OWN_GAP)
            else:
                count = i32(least(i32(own_left - b * OWN_GAP), VALUES))
                other = i32(here - a * K_STEP)
            # Under the condition: outside, what does not depend on the slice would be computed
            # before the loop, and kept in registers that spill (float64: five times as long).
            count = i32(most(count, 0)) if other > 0 else i32(0)
            COPY_PART(
                shared + (a * K_STEP * K_OFFSET + b * OWN_STEP * OWN_OFFSET),
                at,
                i32(count * ITEMSIZE),
            )
            at = advance(at, own_step if b + 1 < OWN_REPEATS else k_step)


def _load_ahead(registers, at, own_left, k_left, along, whole, own_step, k_step):
    """A thread's values of a slice, from `at`, to registers; beyond the end of K zeros.

    Of a slice that begins there nothing is loaded: it is never multiplied.
    """
    if whole and k_left >= BLOCK_K:
        for a in unrolled(K_REPEATS):
            for b in unrolled(OWN_REPEATS):
                if own_left > b * OWN_GAP:
                    if VALUES == 1:
                        registers[a * OWN_REPEATS + b] = LOAD_ONE(at)
                    else:
                        loaded = LOAD(at)
                        for v in unrolled(VALUES):
                            registers[(a * OWN_REPEATS + b) * VALUES + v] = loaded[v]
                at = advance(at, own_step if b + 1 < OWN_REPEATS else k_step)
    elif k_left > 0:
        here = i32(k_left - along)
        for a in unrolled(K_REPEATS):
            for b in unrolled(OWN_REPEATS):
                for v in unrolled(VALUES):
                    registers[(a * OWN_REPEATS + b) * VALUES + v] = REGISTER(0)
                    if own_left > b * OWN_GAP and here > a * K_STEP + v:
                        registers[(a * OWN_REPEATS + b) * VALUES + v] = LOAD_ONE(at + v * ITEMSIZE)
                at = advance(at, own_step if b + 1 < OWN_REPEATS else k_step)


def _put_held(shared, registers):
    """Put the values that were loaded ahead into shared memory."""
    for a in unrolled(K_REPEATS):
        for b in unrolled(OWN_REPEATS):
            for v in unrolled(VALUES):
                PUT(
                    i32(shared + ((a * K_STEP + ROWS[v]) * K_OFFSET + b * OWN_STEP * OWN_OFFSET)),
                    registers[(a * OWN_REPEATS + b) * VALUES + v],
                )


def mover(axis: str, fetch: Fetch) -> dict[str, Any]:
    """The functions by which a factor comes to shared memory."""
    f = fetch.bindings()
    names = ("OWN_STEP", "OWN_GAP", "K_STEP", "OWN_OFFSET", "K_START", "OWN_REPEATS")
    found: dict[str, Any] = {name: f[name] for name in names} | {
        "FIRST": inlined(_first, **f),
        "BACK": (f["OWN_REPEATS"] - 1) * f["OWN_GAP"],
        "ABREAST": fetch.abreast,
        "OFFSETS": fetch.copies,
        "HELD": 0,
        "COPIES": 0,
    }
    count, bytes_ = len(fetch.copies), fetch.values * fetch.itemsize
    if fetch.held:
        kind, acc = {2: ("bits", "int32"), 4: ("float32",) * 2, 8: ("float64",) * 2}[fetch.itemsize]
        register = getattr(types, acc)
        put = accesses.store(kind, 1, acc, intrinsics.SHARED)
        load, one = (accesses.load(kind, values, acc) for values in (fetch.values, 1))
        found |= {
            "HELD": count * fetch.values,
            "REGISTER": register,
            "PUT": inlined(_put_held, PUT=put, **f),
            "AHEAD": inlined(_load_ahead, LOAD=load, LOAD_ONE=one, REGISTER=register, **f),
        }
    else:
        part = accesses.fetch(bytes_, partial=True)
        found |= {
            "COPIES": count,
            "COPY": accesses.fetch_where(bytes_),
            "MASKED": inlined(_masked_copies, COPY_PART=part, **f),
        }
    return {f"{axis}_{name}": value for name, value in found.items()}
