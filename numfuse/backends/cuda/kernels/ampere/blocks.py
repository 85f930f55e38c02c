"""The kernel of tier (b): one block of threads makes one block of the product, by an `Engine`.

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

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, kernel
from numfuse.backends.cuda.compile.unroll import expanded, names_of
from numfuse.backends.cuda.kernels import joins, passes
from numfuse.backends.cuda.kernels.ampere.block_product import block_product
from numfuse.backends.cuda.kernels.ampere.registers import Arithmetic, add, add_kept, clear, keep
from numfuse.backends.cuda.kernels.ampere.slices import Fetch, mover, runs_wide
from numfuse.backends.cuda.kernels.epilogue import Finish, addresses, steps
from numfuse.backends.cuda.plan.product import (
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
    strides,
)
from numfuse.backends.cuda.tiling import CudaBlock


# --- what is bound --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Engine:
    """How the threads of a block multiply a slice; made by `simt` and `tensor_core`."""

    accumulator: str
    #: Numba type of a register of factors.
    factor: Any
    arithmetic: Arithmetic
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
    """Everything that is bound in one kernel but its engine."""

    block_m: int
    block_n: int
    block_k: int
    threads: int
    stages: int
    #: Rows of blocks that are worked on together.
    group: int
    x: Fetch
    y: Fetch
    finish: Finish
    #: Whether out, extra and pre are read and written by 16 bytes (of accumulators).
    wide: bool = False
    #: Blocks that shall fit on a multiprocessor.
    blocks: int = 1
    #: Rows of the epilogue whose loads are on their way together.
    rows: int = 2
    #: Blocks that have a part of K each, of one block of the result.
    cluster: int = 1
    #: Where the sum of the chains of K that have ended waits: "registers" or "shared" memory; "" in
    #: sums of one chain.
    kept: str = ""

    @property
    def values(self) -> int:
        """Columns of a thread in the epilogue."""
        return 16 // intrinsics.itemsize(self.finish.accumulator)

    @property
    def stage(self) -> int:
        """Bytes of the slices of X and Y."""
        return self.x.bytes + self.y.bytes

    def shared_bytes(self, engine: Engine) -> int:
        """Return the bytes of shared memory of the slices, or of what the epilogue keeps there."""
        sums = self.threads * 16 if self.finish.sums else 0
        kept = 0
        if self.kept == "shared":
            size = intrinsics.itemsize(engine.accumulator)
            kept = self.threads * engine.arithmetic.totals * size
        return max(self.stages * self.stage + kept, engine.pass_rows * engine.put_pitch, sums)


#: Shared memory that the system takes of each block.
RESERVED_BYTES = 1024
#: Strides are in bytes.
ARGUMENTS = Schema(block_product, i32="m n k part parts chain")


def build(block: Block, engine: Engine, name: str) -> Kernel:
    """The kernel."""
    one, made = intrinsics, engine.arithmetic
    acc, values = block.finish.accumulator, block.values
    columns = block.block_n // values
    row_step = block.threads // columns
    rows = max(1, min(block.rows, engine.pass_rows // (row_step * block.cluster)))
    assert block.threads % columns == 0 and engine.pass_rows % (rows * row_step) == 0, block
    count = values if block.wide else 1
    bindings: dict[str, Any] = {
        "BLOCK_M": block.block_m,
        "BLOCK_N": block.block_n,
        "BLOCK_K": block.block_k,
        "THREADS": block.threads,
        "STAGES": block.stages,
        "GROUP": block.group,
        "STAGE": block.stage,
        "X_BYTES": block.x.bytes,
        "TOTALS": made.totals,
        "FACTORS": made.factors,
        "FACTOR": engine.factor,
        "ACC_BYTES": one.itemsize(acc),
        "CLEAR": clear(made.totals),
        "KEPT": block.kept,
        "KEPT_AT": block.stages * block.stage,
        "ADD": add(made.totals),
        "KEEP": keep(made.totals, block.threads),
        "ADD_KEPT": add_kept(made.totals, block.threads),
        "FIRST_FACTORS": made.first_factors,
        "MULTIPLY_SLICE": made.multiply_slice,
        "MULTIPLY_PART": made.multiply_part,
        "PARTS": made.parts,
        "X_FROM": engine.x_from,
        "Y_FROM": engine.y_from,
        "WAIT_FIRST": accesses.fetch_wait(block.stages - 1),
        "WAIT_NEXT": accesses.fetch_wait(block.stages - 2),
        "WAIT_ALL": accesses.fetch_wait0,
        "PUT_TOTALS": made.put_totals,
        "PUT_TO": engine.put_to,
        "PUT_PITCH": engine.put_pitch,
        "PASSES": engine.passes,
        "PASS_ROWS": engine.pass_rows,
        "PASS_ROW": engine.pass_row,
        "VALUES": values,
        "ROWS": rows,
        "ROW_STEP": row_step,
        "WIDE": block.wide,
        "COLUMN_THREADS": columns,
        "COLUMN_BITS": columns.bit_length() - 1,
        "COLUMN_FIRST": values if block.wide else 1,
        "COLUMN_STEP": 1 if block.wide else columns,
        "CLUSTER": block.cluster,
        "BARRIER": one.block_barrier if block.cluster == 1 else one.cluster_barrier,
    }
    bindings |= block.finish.bindings(count) | mover("X", block.x) | mover("Y", block.y)
    if block.cluster == 1:
        bindings["TAKE"] = accesses.load(acc, count, acc, one.SHARED)
    else:
        bindings["TAKE"] = accesses.load_cluster(count, acc, block.cluster)
        bindings["TAKE_ONE"] = accesses.load_cluster(1, acc, block.cluster)
    template = expanded(block_product, bindings)
    return kernel(
        template,
        ARGUMENTS.signature,
        threads=block.threads,
        blocks=block.blocks,
        name=name,
        **names_of(template, bindings),
    )


# --- plans ----------------------------------------------------------------------------------------
def takes(product: Product, device: DeviceInfo) -> bool:
    """Return whether cp.async and lengths of 32 bits, which every tier here needs, are there."""
    return device.capability >= (8, 0) and max(product.m, product.n, product.k) < 1 << 30


def plan(
    product: Product,
    device: DeviceInfo,
    tile: CudaBlock,
    part: int,
    parts: int,
    x: Fetch,
    y: Fetch,
    engine: Engine,
    name: str,
    before: tuple[Launch, ...] = (),
    slots: tuple[Slot, Slot] = (Slot("x"), Slot("y")),
    workspace: int = 0,
) -> Plan:
    """The launches: what comes before, the product, and the join of the parts of its sum.

    The parts are planes in memory where `product.free`, else those of the blocks of a cluster.
    `before` uses so many bytes of the workspace, where x and y may be (`slots`).
    """
    p = product
    size = intrinsics.itemsize(p.accumulator)
    values = 16 // size
    chain = tiling.chain(min(part, p.k), p.accumulator)
    out = p.out
    target = Slot("out")
    cluster = 1 if p.free else parts
    parts //= cluster
    if parts > 1:
        out = Operand(p.accumulator, (p.m * p.n, p.n, 1), 16)
        target = Slot("work", workspace)
        workspace += -(-p.places * parts * p.m * p.n * size // 256) * 256
    rows = [o for o in (out, p.extra, p.pre) if o is not None]
    block = Block(
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.threads,
        tile.stages,
        tile.group,
        x,
        y,
        Finish.of(p, out.dtype),
        wide=p.n % values == 0 and all(runs_wide(o, 2, values) for o in rows),
        blocks=tile.resident,
        cluster=cluster,
        kept=tile.kept if chain < min(part, p.k) else "",
    )
    taken = block.shared_bytes(engine) + RESERVED_BYTES
    if block.kept == "shared" and taken * tile.resident > device.shared_per_multiprocessor:
        # fewer blocks have registers for it
        block = replace(block, kept="registers", blocks=2)
    made = build(block, engine, f"{name} {p.epilogue.name}")
    arguments = ARGUMENTS(
        x=slots[0],
        y=slots[1],
        m=p.m,
        n=p.n,
        k=p.k,
        part=part,
        parts=parts,
        chain=chain,
        **strides("bytes", x=p.x, y=p.y),
        **addresses(p, target),
        **steps("bytes", p, out),
    )
    blocks = -(-p.m // tile.block_m) * -(-p.n // tile.block_n)
    launches: tuple[Launch, ...] = (
        *before,
        Launch(
            made,
            (blocks * p.places * parts * cluster, 1, 1),
            arguments,
            block.shared_bytes(engine),
            cluster,
        ),
    )
    if parts > 1:
        if p.n % values == 0 and runs_wide(p.out, 2, values) and p.places < 1 << 16:
            join = joins.rows(p.accumulator, target, p.out, (p.places, parts, p.m, p.n))
            return Plan((*launches, join), tile, workspace, tile.block_m)
        more, staged = passes.joins(
            device,
            p.accumulator,
            target,
            Slot("out"),
            p.out.dtype,
            p.places,
            parts,
            p.m,
            p.n,
            p.out.strides,
            Slot("work", workspace),
        )
        launches, workspace = launches + more, workspace + staged
    shown = tile if cluster == 1 else f"{tile}, K in clusters of {cluster}"
    return Plan(launches, shown, workspace, tile.block_m)
