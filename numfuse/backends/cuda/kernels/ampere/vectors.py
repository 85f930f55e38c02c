"""Products of up to 8 rows or columns: the long factor is read once, at the speed of memory.

Matrix-vector products, and those of a few vectors: out = X Y where X or Y has at most SIDE vectors
and the other one is long. That is all the bytes there are, so a thread has four loads of it on
their way, by 16 bytes where its strides and address allow that, else by 8, 4 or 2. The layout
decides how threads share it (`vectors_gemm`), the sizes how many lines a thread and a block have,
and where lines are few, into how many parts K is cut (`planes`).

The order of a sum depends on the sizes, dtype and the device's multiprocessors, and on whether
lines or K are contiguous, which the tier's name says. It depends neither on alignment nor on the
epilogue: a unit that is read in pieces is added up as one that is read at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from numfuse.backends.cuda import few_tiling, tiling
from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.accesses import read_vector
from numfuse.backends.cuda.compile.intrinsics import (
    FORMATS,
    fused,
    intrinsic_of,
    read_registers,
    write_registers,
)
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel
from numfuse.backends.cuda.compile.unroll import bound, kernel_of
from numfuse.backends.cuda.kernels import passes
from numfuse.backends.cuda.kernels.ampere import registers
from numfuse.backends.cuda.kernels.ampere.vectors_gemm import Vectors, vector_product
from numfuse.backends.cuda.kernels.epilogue import finish_of, finishing, in_bytes
from numfuse.backends.cuda.kernels.hopper.tiling import copies_pay
from numfuse.backends.cuda.kernels.planes import Planes
from numfuse.backends.cuda.plan.product import (
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
    Tier,
    Way,
)

#: Rows or columns, at most: of 16-bit values a multiprocessor of Hopper then multiplies in half of
#: the time that memory takes.
SIDE = 8
THREADS = 256
#: Sharers of a sum that are joined behind one another, their reads on their way together.
JOINED = 16
#: Loads of a thread on their way; with 1024 threads on a multiprocessor these are 64 KiB, three
#: times what memory's latency asks for.
AHEAD = 4
#: Threads that share a line along K at the least, as they read it by 16 bytes each, and blocks of a
#: multiprocessor that keep it busy.
SHARERS, FULL = 2, 4
#: Values of K up to which lines across K are spread over more blocks, by narrower accesses.
SMALL = 128
#: Blocks of a multiprocessor at the most that ask for their lines before the few vectors are there.
EARLY = 2
#: Values of the few vectors that a thread loads together.
BROUGHT = 8
#: Bytes of a slice of the few vectors, and values of K.
SLICE_BYTES, SLICE = 32 << 10, 4096
#: Values of K of a part at the least where a block is chosen for all of them: it has fewer lines
#: then, and shorter parts come where these still leave a device idle.
BLOCK_PART = 1024
#: Bytes of a long factor along K from which on tensor cores take it, of more vectors than these: in
#: float64, and in 16 bits on Hopper where an access has one value (and a copy pays). (An H100,
#: microseconds by tiles and by vectors: float64 3862 x 2586 x 5, (out, in), 50 and 63; bfloat16
#: 7729 x 781 x 4, (out, in), 20 and 28. Two sums are one launch by tiles.)
TILES_BYTES, TILES_DOUBLE, TILES_HALF = 8 << 20, 4, 2
#: Half of them are enough in 16 bits of more than TILES_DOUBLE vectors (a gate of 6 x 97 x 25611 in
#: bfloat16 took an H200 34 us by vectors, PyTorch 27). And of 16-bit values that come by several:
#: bytes, and values of K of a line which is so short that its vectors take more time than it. (An
#: H100, 7992 x 126 x 8 in float16: 8.7 us by tiles, 9.7 by vectors.)
TILES_SHORT = 1 << 20, 256
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


@functools.cache
def _multiply(block: Block) -> Any:
    """``multiply(total, values, step, at)``: a thread's sums go on by one of its units of K.

    The unit's factors of the few vectors are in shared memory at this address.
    """
    kind, size = FORMATS[block.accumulator]
    few = 16 // size

    def factors(builder: Any, at: Any, first: int, count: int) -> list[Any]:
        found: list[Any] = []
        for i in range(0, count, few):
            step = min(few, count - i)
            found += read_vector(builder, at, (first + i) * size, kind, step)
        return found

    def along(builder: Any, total: Any, values: Any, step: int, at: Any) -> None:
        count = block.own * block.unit
        lines = read_registers(builder, values, step * count, count)
        for s in range(block.side):
            vector = factors(builder, at, s * block.depth, block.unit)
            sums = [read_registers(builder, total, u * block.side + s, 1)[0]
                    for u in range(block.own)]  # fmt: skip
            for e, factor in enumerate(vector):
                for u in range(block.own):
                    sums[u] = fused(builder, lines[u * block.unit + e], factor, sums[u])
            for u, value in enumerate(sums):
                write_registers(builder, total, u * block.side + s, [value])

    def across(builder: Any, total: Any, values: Any, step: int, at: Any) -> None:
        lines = read_registers(builder, values, step * block.own, block.own)
        vector = factors(builder, at, 0, block.side)
        sums = read_registers(builder, total, 0, block.total)
        for v, value in enumerate(lines):
            for s, factor in enumerate(vector):
                i = v * block.side + s
                sums[i] = fused(builder, value, factor, sums[i])
        write_registers(builder, total, 0, sums)

    return intrinsic_of("multiply_vectors", block.key, "aanr", along if block.along else across)


#: Strides are in bytes.
ARGUMENTS = Schema(vector_product, i32="m n few lines k part parts")


def _bits(x: int) -> int:
    return x.bit_length() - 1


def _kernel(
    block: Block,
    product: Product,
    side: Operand,
    columns: bool,
    contiguous: bool,
    cut: bool,
    early: bool,
) -> Kernel:
    p, b, acc = product, block, product.accumulator
    loads = b.spots * b.pieces
    held = b.ahead * loads * b.width
    # what a thread holds, and what factors and the rest took where nothing was spilled
    wanted = (held + b.total * (1 + b.chains)) * b.size // 4 + 2 * b.spots + 40 + 4 * b.side
    own = 1 if columns else 2
    bindings = bound(b, "along side sharers own depth unit width size groups lines spots pieces")
    bindings |= bound(b, "ahead total pitch chains") | {
        "THREADS": THREADS,
        "BROUGHT": max(1, min(BROUGHT, b.side * b.depth // THREADS)),
        "LOADS": loads,
        # values of K of an access, and the bytes from one to the next in shared memory
        "REACH": b.width if b.along else 1,
        "FACTOR_BYTES": b.size if b.along else b.side * b.size,
        "HELD": held,
        "SIDE_BITS": _bits(b.side),
        "DEPTH_BITS": _bits(b.depth),
        "SHARE_BITS": _bits(b.sharers),
        "GROUP_BITS": _bits(b.groups),
        "OWN_BITS": _bits(b.own),
        "LINE_BITS": _bits(b.lines),
        "JOINED": JOINED,
        "JOIN_BITS": _bits(max(1, b.sharers // JOINED)),
        "STEP": JOINED if b.sharers > JOINED else 1,
        "COLUMNS": columns,
        "CONTIGUOUS": contiguous,
        "ITEM": intrinsics.itemsize(b.dtype),
        "SIDE_ALONG": abs(side.strides[own]) <= abs(side.strides[3 - own]),
        "CUT": cut,
        # values of lines are on their way, in registers, while the few vectors are brought
        "EARLY": early,
        "RUN": min(tiling.RUN, b.lines),
        "LOAD_SIDE": accesses.load(side.dtype, 1, acc),
        "LOAD_LONG": passes.loads(b.dtype, b.width, acc),
        "CLEAR": registers.clear(b.total),
        "ADD": registers.add(b.total),
        "MULTIPLY": _multiply(b),
        **finish_of(p, p.out.dtype),
    }
    name = f"vectors {p.epilogue.name}"
    blocks = max(2, min(4, 65536 // (THREADS * wanted)))
    options: Any = {"threads": THREADS, "blocks": blocks, "name": name}
    return kernel_of(vector_product, ARGUMENTS, bindings, **options)


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
        sharers = min(32, 1 << _bits(units))
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


def plan(product: Product, device: DeviceInfo, parts: int = 1) -> Plan | None:
    """How to run it with K in so many parts at the most; None for more blocks than a grid has."""
    p, long = product, Long.of(product)
    block = block_of(p, long, device.multiprocessors)
    # whole accesses, and whole units
    part = tiling.round_up(-(-p.k // parts), 64)
    parts = -(-p.k // part)
    if p.places * parts > 65535:
        return None
    planes = Planes.of(product, parts)
    p = planes.stored
    columns = long.name == "x"
    side = p.y if columns else p.x
    own = 2 if columns else 1
    arguments = ARGUMENTS(
        side=_vectors("y" if columns else "x", side, side.strides[own], side.strides[3 - own]),
        long=_vectors(long.name, getattr(p, long.name), long.line, long.depth),
        m=p.m,
        n=p.n,
        few=long.few,
        lines=long.lines,
        k=p.k,
        part=part,
        parts=parts,
        **finishing(p, p.out, planes.slot, in_bytes),
    )
    grid = (-(-long.lines // block.lines), p.places * parts, 1)
    contiguous = block.along and long.depth == 1
    # where blocks are so few that each has registers enough, and waits for memory alone
    early = grid[0] * grid[1] <= EARLY * device.multiprocessors
    kernel = _kernel(block, p, side, columns, contiguous, parts > 1, early)
    launch = Launch(kernel, grid, arguments, block.shared_bytes(p.sums))
    found = planes.plan((launch,), device, block, block.lines if columns else p.m)
    return replace(found, part=part if parts > 1 else 0)


def _vectors(name: str, operand: Operand, line: int, depth: int) -> Vectors:
    size = operand.itemsize
    return Vectors(Slot(name), operand.strides[0] * size, line * size, depth * size)


def _takes(product: Product, device: DeviceInfo, along: bool) -> bool:
    p = product
    if min(p.m, p.n) > SIDE or device.capability < (8, 0) or p.is_rich or not p.k:
        return False
    if p.x.dtype != p.y.dtype or p.members is not None or p.precision != "ieee":
        return False
    wide = "float64" if p.x.dtype == "float64" else "float32"
    if p.accumulator != wide or max(p.m, p.n, p.k) >= 1 << 28:
        return False
    return Long.of(p).along == along


def _cost_of(product: Product, multiprocessors: int) -> tuple[int, int, int]:
    """Return what a model of times asks for: blocks, bytes and those of an access.

    Where lines are few they are taken for columns of rows, whatever they are, and lines along K for
    rows one behind the other: the order of a sum does not depend on strides and alignment.
    """
    p, long = product, Long.of(product)
    places, size = 1 if p.free else p.places, intrinsics.itemsize(p.y.dtype)
    blocks = -(-long.lines // block_of(p, long, multiprocessors).lines) * places
    access = size * math.gcd(p.k, 16 // size) if long.along else 16
    access = size if long.lines < ACROSS_LEAST else access
    # each block reads the vectors, too
    return blocks, (long.lines * places + blocks * long.few) * p.k * size, access


def _parts(product: Product, device: DeviceInfo) -> int:
    """Return the parts of K that a model of bytes expects the least time of."""
    p, busy = product, device.multiprocessors
    if p.whole:
        return 1
    return few_tiling.vector_parts(*_cost_of(p, busy), p.k // least_part(p), busy)


def _take(product: Product, device: DeviceInfo, along: bool) -> Plan | None:
    p = product
    if not _takes(p, device, along):
        return None
    # wgmma reads a long factor as fast, where it need not be copied before
    half = intrinsics.itemsize(p.x.dtype) == 2 and device.capability[0] == 9
    if half and p.n >= SIDE and p.k >= SIDE and p.x.fits_copies() and p.y.fits_copies():
        return None
    if along and _goes_by_tiles(p, half):
        return None
    return plan(p, device, _parts(p, device))


def _goes_by_tiles(product: Product, half: bool) -> bool:
    """Return whether tensor cores take a long factor along K in less time: of many vectors.

    The sizes of one place decide, as on the order of a sum.
    """
    p, long = product, Long.of(product)
    nbytes, many = long.lines * p.k * p.x.itemsize, long.few > TILES_DOUBLE
    if p.x.dtype == "float64":
        return many and nbytes >= TILES_BYTES
    if not half:
        return False
    if long.width(p, 8) > 1:
        least, k = TILES_SHORT
        return many and p.k <= k and nbytes >= least
    enough = nbytes >= TILES_BYTES // (2 if many else 1)
    return enough and (many or (long.few > TILES_HALF and copies_pay(p.m, p.n, p.k)))


def _ways(product: Product, device: DeviceInfo, along: bool) -> Iterator[Way]:
    """Return the ways to run it: in one part, in those of the model, and in half and twice."""
    p = product
    if not _takes(p, device, along):
        return
    found, busy = _parts(p, device), device.multiprocessors
    most = 1 if p.whole else max(1, p.k // 64)
    for parts in sorted({1, *(max(1, min(most, x)) for x in (found // 2, found, 2 * found, 4))}):
        cost = few_tiling.vector_cost(*_cost_of(p, busy), parts, busy)
        name = f"{min(p.m, p.n)} vectors, K in {parts} parts"
        yield Way(name, cost, functools.partial(plan, p, device, parts))


def _tier(name: str, along: bool) -> Tier:
    take: Callable[[Product, DeviceInfo], Plan | None] = functools.partial(_take, along=along)
    ways: Any = functools.partial(_ways, along=along)
    return Tier(name, take, ways)


VECTORS = _tier("vectors along K", True), _tier("vectors across K", False)
"""Few rows or few columns: threads share the lines of the long factor along K, or have them side
by side. They add up in orders of their own, and have a name each."""
