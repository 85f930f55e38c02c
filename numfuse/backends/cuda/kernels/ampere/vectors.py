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
from dataclasses import replace
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
from numfuse.backends.cuda.kernels.ampere import registers, vectors_tiling
from numfuse.backends.cuda.kernels.ampere.vectors_gemm import Vectors, vector_product
from numfuse.backends.cuda.kernels.ampere.vectors_tiling import (
    SIDE,
    Block,
    Long,
    bits,
    block_of,
    least_part,
)
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

#: Sharers of a sum that are joined behind one another, their reads on their way together.
JOINED = 16
#: Blocks of a multiprocessor at the most that ask for their lines before the few vectors are there.
EARLY = 2
#: Parts of a sum that are few, and values of K of each where they are more: a thread of the launch
#: behind adds up those of an element one after the other. (83 parts of 1 x 63120 x 6 in bfloat16
#: took an H200 11.2 us, cuBLAS 9.1.)
FEW_PARTS, LONG_PART = 16, 2048
#: Values of the few vectors that a thread loads together.
BROUGHT = 8
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


def _kernel(
    block: Block,
    product: Product,
    side: Operand,
    columns: bool,
    contiguous: bool,
    cut: bool,
    early: bool,
    releases: bool,
) -> Kernel:
    p, b, acc = product, block, product.accumulator
    loads = b.spots * b.pieces
    held = b.ahead * loads * b.width
    # what a thread holds, and what factors and the rest took where nothing was spilled
    wanted = (held + b.total * (1 + b.chains)) * b.size // 4 + 2 * b.spots + 40 + 4 * b.side
    own = 1 if columns else 2
    bindings = bound(b, "along side sharers own depth unit width size groups lines spots pieces")
    bindings |= bound(b, "ahead total pitch chains") | {
        "THREADS": vectors_tiling.THREADS,
        "BROUGHT": max(1, min(BROUGHT, b.side * b.depth // vectors_tiling.THREADS)),
        "LOADS": loads,
        # values of K of an access, and the bytes from one to the next in shared memory
        "REACH": b.width if b.along else 1,
        "FACTOR_BYTES": b.size if b.along else b.side * b.size,
        "HELD": held,
        "SIDE_BITS": bits(b.side),
        "DEPTH_BITS": bits(b.depth),
        "SHARE_BITS": bits(b.sharers),
        "GROUP_BITS": bits(b.groups),
        "OWN_BITS": bits(b.own),
        "LINE_BITS": bits(b.lines),
        "JOINED": JOINED,
        "JOIN_BITS": bits(max(1, b.sharers // JOINED)),
        "STEP": JOINED if b.sharers > JOINED else 1,
        "COLUMNS": columns,
        "CONTIGUOUS": contiguous,
        "ITEM": intrinsics.itemsize(b.dtype),
        "SIDE_ALONG": abs(side.strides[own]) <= abs(side.strides[3 - own]),
        "CUT": cut,
        # values of lines are on their way, in registers, while the few vectors are brought
        "EARLY": early,
        "RELEASES": releases,
        "RUN": min(tiling.RUN, b.lines),
        "LOAD_SIDE": accesses.load(side.dtype, 1, acc),
        "LOAD_LONG": passes.loads(b.dtype, b.width, acc),
        "CLEAR": registers.clear(b.total),
        "ADD": registers.add(b.total),
        "MULTIPLY": _multiply(b),
        **finish_of(p, p.out.dtype),
    }
    name = f"vectors {p.epilogue.name}"
    blocks = max(2, min(4, 65536 // (vectors_tiling.THREADS * wanted)))
    options: Any = {"threads": vectors_tiling.THREADS, "blocks": blocks, "name": name}
    return kernel_of(vector_product, ARGUMENTS, bindings, **options)


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
    how = parts > 1, early, planes.release(device)
    kernel = _kernel(block, p, side, columns, contiguous, *how)
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
    access = size if long.lines < vectors_tiling.ACROSS_LEAST else access
    # each block reads the vectors, too
    return blocks, (long.lines * places + blocks * long.few) * p.k * size, access


def _parts(product: Product, device: DeviceInfo) -> int:
    """Return the parts of K that a model of bytes expects the least time of."""
    p, busy = product, device.multiprocessors
    if p.whole:
        return 1
    most = min(p.k // least_part(p), max(FEW_PARTS, p.k // LONG_PART))
    return few_tiling.vector_parts(*_cost_of(p, busy), most, busy)


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
