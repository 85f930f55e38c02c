"""Few vectors: how the threads of a block share the lines of the long factor, and K."""

from __future__ import annotations

from dataclasses import dataclass

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import intrinsics
from numfuse.backends.cuda.plan.product import Operand, Product

#: Rows or columns, at most: of 16-bit values a multiprocessor of Hopper then multiplies in half of
#: the time that memory takes.
SIDE = 8
THREADS = 256
#: Loads of a thread on their way; with 1024 threads on a multiprocessor these are 64 KiB, three
#: times what memory's latency asks for.
AHEAD = 4
#: Threads that share a line along K at the least, as they read it by 16 bytes each, and blocks of a
#: multiprocessor that keep it busy.
SHARERS, FULL = 2, 4
#: Values of K up to which lines across K are spread over more blocks, by narrower accesses.
SMALL = 128
#: Bytes of a slice of the few vectors, and values of K.
SLICE_BYTES, SLICE = 32 << 10, 4096
#: Values of K of a part at the least where a block is chosen for all of them: it has fewer lines
#: then, and shorter parts come where these still leave a device idle.
BLOCK_PART = 1024
#: Lines from which on neighbouring threads may have neighbouring lines.
ACROSS_LEAST = 32


@dataclass(frozen=True)
class Long:
    """How a product is one of a long factor and few vectors."""

    #: "x" or "y", and the steps from a vector and a value of K to the next, in elements.
    name: str
    line: int
    depth: int
    lines: int
    few: int
    #: Whether threads that share a sum are neighbours along K.
    along: bool

    @classmethod
    def of(cls, p: Product) -> Long:
        if p.m <= p.n:
            name, line, depth, lines = "y", p.y.strides[2], p.y.strides[1], p.n
        else:
            name, line, depth, lines = "x", p.x.strides[1], p.x.strides[2], p.m
        beside = abs(line) < abs(depth) or (line == depth == 1)
        along = lines < ACROSS_LEAST or depth in (0, 1) or not beside
        return cls(name, line, depth, lines, min(p.m, p.n), along)

    def width(self, p: Product, unit: int) -> int:
        """Return the values of an access: the most that divide a unit, the strides and lengths."""
        operand: Operand = getattr(p, self.name)
        near, far, length = self.line, self.depth, self.lines
        if self.along:
            near, far, length = far, near, p.k
        width = unit
        while width > 1 and not (
            near == 1
            and operand.alignment >= width * operand.itemsize
            and all(x % width == 0 for x in (far, operand.strides[0], length))
        ):
            width //= 2
        return width


@dataclass(frozen=True)
class Block:
    """The part of a product that a block and a thread have; all numbers are powers of two."""

    dtype: str
    accumulator: str
    along: bool
    #: The few vectors, rounded up, and threads that share a sum.
    side: int
    sharers: int
    #: Lines of a thread, values of K of a slice, and of a thread's step along K.
    own: int
    depth: int
    unit: int
    #: Values of an access.
    width: int
    #: Whether a thread's sum is made of several chains, one for each slice.
    chains: bool

    @property
    def size(self) -> int:
        return intrinsics.itemsize(self.accumulator)

    @property
    def groups(self) -> int:
        """Threads of a block that share no sum."""
        return THREADS // self.sharers

    @property
    def lines(self) -> int:
        return self.groups * self.own

    @property
    def spots(self) -> int:
        """Addresses of a thread: those of its lines, or of the accesses to them."""
        return self.own if self.along else self.own // self.width

    @property
    def pieces(self) -> int:
        """Accesses of a unit along K."""
        return self.unit // self.width if self.along else 1

    @property
    def ahead(self) -> int:
        """Units of a line that are on their way together: no more than a slice has."""
        own = self.own if self.along else 1
        return max(1, min(AHEAD // own, self.depth // (self.sharers * self.unit)))

    @property
    def total(self) -> int:
        return self.own * self.side

    @property
    def pitch(self) -> int:
        """Values from a sum of all threads to the next: lines lie in different banks."""
        return THREADS + THREADS // 32

    def shared_bytes(self, sums: bool) -> int:
        """Return those of a slice, or of a block's sums, and with column sums its results."""
        joined = self.total * self.pitch + 2 * sums * self.lines * self.side
        return max(self.side * self.depth, joined) * self.size

    @property
    def key(self) -> str:
        return ",".join(map(str, (self.accumulator, self.along, self.side, self.own, self.depth,
                                  self.unit)))  # fmt: skip

    def __str__(self) -> str:
        way = "along" if self.along else "across"
        return f"{self.lines} lines {way} K by {self.sharers} threads, {self.own} a thread"


def bits(x: int) -> int:
    """Return the logarithm of a power of two."""
    return x.bit_length() - 1


def least_part(product: Product) -> int:
    """Return the values of K of the shortest part of a sum: all of them where it is not cut."""
    if product.whole:
        return product.k
    return tiling.PART


def block_of(product: Product, long: Long, multiprocessors: int) -> Block:
    """Return the block of a product: as many threads as fill the device, each with some loads.

    A `free` sum has that of one place alone. All but the width of an access, which decides on no
    order, depends on the sizes, dtype and layout.
    """
    p, dtype, acc = product, product.y.dtype, product.accumulator
    places = 1 if p.free else p.places
    side = 1 << (long.few - 1).bit_length()
    unit = 16 // intrinsics.itemsize(dtype)

    # Each block reads the vectors: of many of them, or of long ones, few lines cost as much again,
    # and K is cut instead where blocks are few.
    least = least_part(p) if p.whole or p.free else BLOCK_PART
    cuts = max(1, p.k // least // (1 if side == SIDE else 4))

    def blocks(lines: int) -> int:
        return -(-long.lines // lines) * places * cuts

    def is_too_large(lines: int, wanted: int) -> bool:
        return lines >= 2 * long.lines or blocks(lines) < wanted

    if long.along:
        units = -(-p.k // unit)
        # (the sums of several vectors leave few registers for others)
        own = 2 if side == 4 and unit == 8 else 4
        if side == SIDE and unit != 4:
            own = (2 if unit == 2 else 4) // (1 + (p.k > tiling.CHAIN * 32))
        sharers = min(32, 1 << bits(units))
        while own > 1 and is_too_large(THREADS // sharers * own, 4 * multiprocessors):
            own //= 2
        while (
            sharers < THREADS
            and units >= 4 * sharers
            and is_too_large(THREADS // sharers * own, 2 * multiprocessors)
        ):
            sharers *= 2
        # lines that fill the device anyhow have fewer, each with all that may be on its way: what
        # a thread does beside its loads takes more time than those
        while (
            sharers > SHARERS
            and 2 * units <= AHEAD // own * sharers
            and blocks(2 * THREADS // sharers * own) >= FULL * multiprocessors
        ):
            sharers //= 2
    else:
        own, unit = min(unit, 32 // side), 1
        sharers = THREADS // 32
        while sharers < min(32, p.k) and blocks(THREADS // sharers * own) < 2 * multiprocessors:
            sharers *= 2
        # (a small product waits for what comes behind another, and not for bytes)
        small = p.k <= SMALL
        while small and own > 1 and blocks(THREADS // sharers * own) < multiprocessors // 2:
            own //= 2
    most = min(SLICE, SLICE_BYTES // (side * intrinsics.itemsize(acc)), tiling.CHAIN * sharers)
    depth = min(most, 1 << (p.k - 1).bit_length())
    depth = max(depth, unit)
    chains = p.k > tiling.CHAIN * sharers
    width = long.width(p, unit if long.along else own)
    return Block(dtype, acc, long.along, side, sharers, own, depth, unit, width, chains)
