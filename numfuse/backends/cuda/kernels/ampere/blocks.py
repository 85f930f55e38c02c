"""Products by blocks: a thread block makes one block of the result, by an `Engine`.

X and Y come in slices of BLOCK_K through STAGES copies in shared memory: while a slice is
multiplied, the copies of later ones are on their way (cp.async), and the registers that the next
step multiplies are loaded before this step's arithmetic, across the one barrier of a slice too.
How a slice gets there is in `slices`; how threads multiply is an `Engine`: fused multiply-adds of a
register tile (`simt`), or matrix instructions of a warp (`tensor_core`). The sums then go through
shared memory, in PASSES, to whole rows of the result, where the epilogue runs on neighbouring
columns.

Every size and stride may be anything: lengths are masked where a slice is fetched and where results
are stored, never between.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from numfuse.backends.cuda import block_tiling, tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel
from numfuse.backends.cuda.compile.unroll import bound, kernel_of
from numfuse.backends.cuda.kernels.ampere import members
from numfuse.backends.cuda.kernels.ampere.epilogue import Second
from numfuse.backends.cuda.kernels.ampere.gemm import block_product
from numfuse.backends.cuda.kernels.ampere.registers import add, add_kept, clear, keep
from numfuse.backends.cuda.kernels.ampere.slices import Fetch, mover
from numfuse.backends.cuda.kernels.epilogue import finish_of, finishing, in_bytes
from numfuse.backends.cuda.kernels.members import ends_of
from numfuse.backends.cuda.kernels.planes import Planes
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Plan, Product, Slot


# --- what is bound --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Engine:
    """How the threads of a block multiply a slice; made by `simt` and `tensor_core`."""

    tile: CudaBlock
    x: Fetch
    y: Fetch
    #: Numba type of a register of factors.
    factor: Any
    #: `registers.arithmetic`
    arithmetic: dict[str, Any]
    #: (t, memory) -> address of a thread's first factor in a slice.
    x_from: Any
    y_from: Any
    #: Sums to shared memory in `passes` of `pass_rows` rows; `pass_row(r, turn)` is a row's place.
    put_to: Any
    put_pitch: int
    passes: int
    pass_rows: int
    pass_row: Any


@dataclass(frozen=True)
class Block:
    """An engine, and how the kernel of a product around it stores and keeps sums."""

    engine: Engine
    #: The storage dtype of the result, or of its planes.
    out: str
    #: Whether out, extra and pre are read and written by 16 bytes (of accumulators).
    wide: bool
    #: Blocks that have a part of K each, of one block of the result.
    cluster: int
    #: Where the sum of the chains of K that have ended waits: "registers" or "shared" memory; "" in
    #: sums of one chain.
    kept: str
    #: Blocks that shall fit on a multiprocessor.
    resident: int
    #: When it waits for the launch before it, before whose end it may begin: "first", to read what
    #: that writes; "last", as what comes behind waits for both; "": it begins behind that.
    waits: str = ""
    #: Whether the launch behind it may begin when all of its blocks have.
    releases: bool = False

    @property
    def stage(self) -> int:
        """Bytes of the slices of X and Y."""
        return self.engine.x.bytes + self.engine.y.bytes

    @property
    def kept_at(self) -> int:
        """Where in shared memory chains wait: behind the slices."""
        return self.engine.tile.stages * self.stage

    def shared_bytes(self, accumulator: str) -> int:
        """Return the bytes of shared memory of the slices, or of what the epilogue keeps there."""
        engine, threads, kept = self.engine, self.engine.tile.threads, 0
        if self.kept == "shared":
            kept = threads * engine.arithmetic["TOTALS"] * intrinsics.itemsize(accumulator)
        return max(self.kept_at + kept, engine.pass_rows * engine.put_pitch, threads * 16)


#: Shared memory that the system takes of each block.
RESERVED_BYTES = 1024
#: Strides are in bytes.
ARGUMENTS = Schema(block_product, i32="m n k part parts chain first last")


def build(product: Product, block: Block, name: str) -> Kernel:
    """The kernel."""
    engine, acc = block.engine, product.accumulator
    totals = engine.arithmetic["TOTALS"]
    # columns of a thread in the epilogue
    values = 16 // intrinsics.itemsize(acc)
    tile, threads = engine.tile, engine.tile.threads
    width = tile.block_n // (1 + product.has_two_sums)
    columns = width // values
    row_step = threads // columns
    # rows of the epilogue whose loads are on their way together
    rows = max(1, min(2, engine.pass_rows // (row_step * block.cluster)))
    assert threads % columns == 0 and engine.pass_rows % (rows * row_step) == 0, block
    bindings = bound(tile, "block_m block_n block_k threads stages group")
    bindings |= bound(block, "stage kept kept_at wide cluster waits releases")
    bindings |= bound(engine, "factor x_from y_from put_to put_pitch passes pass_rows pass_row")
    bindings |= engine.arithmetic | {
        "X_BYTES": engine.x.bytes,
        "VALUES": values,
        "ACC_BYTES": intrinsics.itemsize(acc),
        "CLEAR": clear(totals),
        "ADD": add(totals),
        "KEEP": keep(totals, threads),
        "ADD_KEPT": add_kept(totals, threads),
        "WAIT_FIRST": accesses.fetch_wait(tile.stages - 1),
        "WAIT_NEXT": accesses.fetch_wait(tile.stages - 2),
        "WAIT_ALL": accesses.fetch_wait(0),
        "ROWS": rows,
        "ROW_STEP": row_step,
        "COLUMNS": width,
        "TWO_SUMS": product.has_two_sums,
        "TWO_TERMS": product.x1 is not None,
        "WOVEN": product.woven,
        "GAP_BITS": engine.y.gap.bit_length() - 1,
        "COLUMN_THREADS": columns,
        "COLUMN_BITS": columns.bit_length() - 1,
        "COLUMN_FIRST": values if block.wide else 1,
        "COLUMN_STEP": 1 if block.wide else columns,
    }
    count = values if block.wide else 1
    template, schema = block_product, ARGUMENTS
    if product.members is None:
        operand = intrinsics.itemsize((product.extra or product.out).dtype)
        bindings |= finish_of(product, block.out, count) | {
            "READS": product.bias is not None or product.extra is not None,
            "LINES": max(1, width * operand // tiling.LINE),
            "LINE_VALUES": tiling.LINE // operand,
        }
    else:
        template, schema = members.PRODUCT, members.ARGUMENTS
        bindings |= members.bindings_of(product, engine, rows)
    bindings |= mover("X", engine.x) | mover("Y", engine.y)
    if block.cluster == 1:
        bindings["BARRIER"] = intrinsics.block_barrier
        bindings["TAKE"] = accesses.load(acc, count, acc, intrinsics.SHARED)
    else:
        bindings["BARRIER"] = intrinsics.cluster_barrier
        bindings["TAKE"] = accesses.load_cluster(count, acc, block.cluster)
        bindings["TAKE_ONE"] = accesses.load_cluster(1, acc, block.cluster)
    return kernel_of(template, schema, bindings, threads=threads, blocks=block.resident, name=name)


# --- plans ----------------------------------------------------------------------------------------
def takes(product: Product, device: DeviceInfo) -> bool:
    """Return whether cp.async and lengths of 32 bits, which every tier here needs, are there.

    Of rich products only those of two sums are taken, and bare sums of two terms.
    """
    p = product
    if p.x1 is not None and not _are_alike(p):
        return False
    if p.is_rich and (p.free or p.sums or not (p.has_two_sums or p.x1 is not None)):
        return False
    return device.capability >= (8, 0) and max(p.m, p.n, p.k) < 1 << 30


def _are_alike(product: Product) -> bool:
    """Return whether a bare sum has two terms whose factors have the same steps."""
    p = product
    for one, other in (p.x, p.x1), (p.y, p.y1):
        if other is None or (one.dtype, one.strides) != (other.dtype, other.strides):
            return False
    return p.bias is p.bias1 is p.extra is p.pre is p.pre1 is None


def ways_of(
    product: Product, tiles: tuple[CudaBlock, ...], multiprocessors: int,
    beside: tuple[float, ...] = (),
) -> list[tuple[float, CudaBlock, int, int]]:  # fmt: skip
    """Return what a model expects of a product, a tile, and (length, number) of its sum's parts.

    `beside` is what each tile costs beside its work. Two terms have no other way than that of
    `block_tiling.two_terms`.
    """
    p, n = product, product.n * (1 + product.has_two_sums)  # as many columns of sums
    if p.x1 is not None:
        return []
    if p.part:
        return block_tiling.in_parts(tiles, p.m, n, p.k, p.places, p.part, multiprocessors, beside)
    least = 0 if not p.free and (p.whole or p.is_rich) else block_tiling.CUT_PART
    places = 1 if p.free else p.places
    return block_tiling.ways(tiles, p.m, n, p.k, places, least, multiprocessors, beside)


def paired(product: Product, fetch: Fetch) -> Fetch | None:
    """Return how a right factor comes to a block: as one of two where two sums have one each.

    Return None where both cannot come in the same way.
    """
    if not product.has_two_sums or product.woven:
        return fetch
    found = replace(fetch, paired=True)
    whole = found.gap % (1 if fetch.along_k else fetch.values) == 0
    return found if whole and found.gap * intrinsics.itemsize(product.accumulator) >= 16 else None


def plan(
    product: Product,
    device: DeviceInfo,
    part: int,
    parts: int,
    engine: Engine,
    name: str,
    before: tuple[Launch, ...] = (),
    slots: tuple[Slot, ...] = (Slot("x"), Slot("y"), Slot("y1")),
    workspace: int = 0,
    columns: tuple[int, int] | None = None,
    clustered: bool = False,
    waits: str = "",
    releases: bool = False,
) -> Plan:
    """The launches: what comes before, the product, and what makes a result of its sum's parts.

    The parts are planes in memory, of two terms those of each, or those of the blocks of a cluster
    (`clustered`). `before` uses so many bytes of the workspace, where x, y and y1 may be (`slots`).
    `columns` are the first of the result that is made and the one behind the last; all of them
    where that is None. `waits` and `releases` are those of `Block`.
    """
    tile = engine.tile
    first, last = columns or (0, product.n)
    one = tiling.one_chain(product.accumulator, product.m, product.n, product.free)
    chain = tiling.chain(min(part, product.k), one)
    cluster = parts if clustered else 1
    parts = parts // cluster * (1 + (product.x1 is not None))
    planes = Planes.of(product, parts, workspace)
    p = planes.stored
    long = chain < min(part, p.k)
    block = _block(p, device, engine, p.out, cluster, long)
    block = replace(block, waits=waits, releases=releases or planes.release(device))
    schema = ARGUMENTS if p.members is None else members.ARGUMENTS
    if p.members is None:
        ends = finishing(p, p.out, planes.slot, in_bytes, planes.second)
    else:
        ends = {"ends": ends_of(p, in_bytes, tile.block_m), "sums": 0}
    arguments = schema(
        x=in_bytes(slots[0], p.x),
        y=in_bytes(slots[1], p.rights[0]),
        second=Second.of(p, in_bytes(slots[-1], None if p.woven else p.y1)),
        m=p.m,
        n=p.n,
        k=p.k,
        part=part,
        parts=parts,
        chain=chain,
        first=first,
        last=last,
        **ends,
    )
    columns_of_block = tile.block_n // (1 + p.has_two_sums)
    blocks = -(-p.m // tile.block_m) * -(-(last - first) // columns_of_block)
    count = blocks * p.places * parts * cluster
    shared = max(block.shared_bytes(p.accumulator), members.table_bytes(p, engine))
    if waits == "first":
        shared = max(shared, spread_bytes(count, block.resident, device))
    launch = Launch(
        build(p, block, f"{name} {p.epilogue.name}"),
        (count, 1, 1),
        arguments,
        shared,
        cluster,
        bool(waits),
    )
    shown = tile if cluster == 1 else f"{tile}, K in clusters of {cluster}"
    found = planes.plan((*before, launch), device, shown, tile.block_m, workspace)
    return replace(found, part=part if cluster * parts > 1 else 0)


def spread_bytes(count: int, resident: int, device: DeviceInfo) -> int:
    """Return the shared memory with which so many blocks are spread over all multiprocessors.

    A launch that begins while the one before it ends finds room on some multiprocessors first, and
    fills these: 130 blocks, three by three, then take three times as long as one by one. (On an
    H200 577 x 1664 x 1600 in float32 took 241 us behind a copy, and 99 without one.)
    """
    together = -(-count // device.multiprocessors)
    if together > resident:
        return 0
    # one more would have no room
    room = device.shared_per_multiprocessor // (together + 1) - RESERVED_BYTES
    return min(room // 128 * 128 + 128, device.shared_per_block)


def _block(
    product: Product, device: DeviceInfo, engine: Engine, out: Operand, cluster: int, long: bool
) -> Block:
    """Return what is bound for a product; `long`: of a sum of several chains."""
    p, tile = product, engine.tile
    values = 16 // intrinsics.itemsize(p.accumulator)
    # (an extra operand that repeats along a row is read once for all of them)
    extra = p.extra if p.extra is None or p.extra.strides[2] or p.n % values else None
    wide = all(o is None or o.in_wholes(p.n, values) for o in (out, extra, p.pre, p.pre1))
    kept = tile.kept if long else ""
    block = Block(engine, out.dtype, wide, cluster, kept, tile.resident)
    taken = block.shared_bytes(p.accumulator) + RESERVED_BYTES
    if kept == "shared" and taken * tile.resident > device.shared_per_multiprocessor:
        # fewer blocks have registers for it
        return replace(block, kept="registers", resident=2)
    return block
