"""The product on Hopper's tensor cores, as templates: out[p] = epilogue(X[p] @ Y[p]).

A sum may have a second term, X1[p] @ Y1[p], whose slices follow those of the first; or there are
two sums, X[p] @ Y[p] and X[p] @ Y1[p]: a block's first half of columns is of Y, the other of Y1.
"Woven", Y and Y1 are the even and the odd columns of one array, and so are they in a block.

One block per multiprocessor stays for the whole launch and takes one unit of work (a block of the
result, or a part of its K) after the other.  Its threads have two roles:

- warp group 0, of which one thread acts, is the producer: it asks the copy engine (TMA) for slices
  of X and Y, 128 bytes of K at a time, into a ring of stages in shared memory (of operands in three
  parts, a stage has 64 numbers of K: of X as float32, of Y a slice of each part);
- one or two consumer warp groups of 128 threads multiply slices as they arrive (`mainloop`: wgmma,
  accumulators in registers; of operands in parts they make those of X) and finish the block
  (`epilogue`: the formula, column sums, store; of integers `residues.store`).

Two mbarriers a stage connect them: `full` (the copy engine has written it) and `empty` (every
consumer has read it).  In the "cooperative" schedule each consumer has 64 rows of one block; in
"ping-pong" each has a block of its own, and while one finishes its block, the other multiplies:
`turn` keeps them from multiplying at the same time.

A block may lie on its side (`sideways`): the instruction's rows are columns of the result then. X
and Y change places for all but the end of a block, and so do m and n in `Work` and the first row
and column of a `Unit`.

Templates trust `tier`.  UPPER-case names are bound in `kernel`; `unroll` writes loops over
accumulators out.
"""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import shared_store_f32
from numfuse.backends.cuda.compile.engines import (
    grid_release,
    grid_wait,
    map_prefetch,
    registers_few,
    registers_many,
    store_wait_read0,
    tensor_load,
    tensor_prefetch,
)
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_expect,
    barrier_fence,
    barrier_init,
    barrier_wait,
    block_barrier,
    block_count,
    block_index,
    dynamic_shared,
    group_barrier,
    product_high,
    quotient,
    same,
    thread_index,
)
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.hopper.epilogue import (
    finish,
    load_bias,
    stores_read,
    sum_columns,
)
from numfuse.backends.cuda.kernels.hopper.mainloop import (
    multiply_parts,
    multiply_slices,
    place_of,
    row_of,
)
from numfuse.backends.cuda.kernels.hopper.producer import produce, unit_at
from numfuse.backends.cuda.kernels.hopper.records import Fetched, Maps, Second, Unit, Work
from numfuse.backends.cuda.kernels.hopper.sideways import finish_sideways
from numfuse.backends.cuda.kernels.residues.store import store_residues


def gemm(
    x: Fetched,
    y: Fetched,
    maps: Maps,
    ends: Ends,
    sums,
    second: Second,
    work: Work,
    slice_bytes,
):
    """The kernel: barriers, then each group its role.

    Addresses are in bytes, strides in elements.  `slice_bytes`: what the copy engine brings to a
    stage; fewer than it has where X has fewer rows than a block.
    """
    # at a multiple of 1024, the bytes after which the copy engine's swizzle repeats
    shared = dynamic_shared() + 0
    thread = thread_index() + 0
    if thread == 0:
        map_prefetch(x.map)
        map_prefetch(y.map)
        if TWO_TERMS:
            map_prefetch(second.x.map)
        if TWO_TERMS or TWO_RIGHTS:
            map_prefetch(second.y.map)
        if OUT == "map":
            map_prefetch(maps.out)
        if EXTRA == "map":
            map_prefetch(maps.extra)
        if PRE == "map" and not WOVEN_OUT:
            map_prefetch(maps.pre)
        if PRE1 == "map":
            map_prefetch(second.pre_map)
        full = shared + FULL_AT
        for s in range(STAGES):
            barrier_init(full + 8 * s, 1)
            barrier_init(full + 8 * STAGES + 8 * s, READERS)
        for s in range(2 * BUFFERS + 2):
            barrier_init(full + 16 * STAGES + 8 * s, 1)
        barrier_fence()
    block_barrier()
    # what the launch before computed is read from here on
    grid_wait()
    grid_release()
    if thread < 128:
        if CONSUMERS == 2:
            registers_few()
        if thread == 0:
            produce(x, y, second, shared, work, slice_bytes)
    else:
        if CONSUMERS == 2:
            registers_many()
        consume(maps, ends, second, sums, shared, work)


# --- the consumers --------------------------------------------------------------------------------
def slices_of(unit, work: Work):
    """How many slices a unit has."""
    count = work.part_slices
    if work.part_slices < work.slices:
        part = quotient(unit, work.row_blocks * work.column_blocks * work.places)
        count = min(work.slices - part * work.part_slices, work.part_slices)
    return count


def past(stage, parity, count):
    """The stage and parity behind `count` slices that another consumer takes."""
    end = stage + count
    turns = product_high(end, PER_STAGE)
    return end - turns * STAGES, parity ^ (turns & 1)


def first_boxes(extra_map, staging, arrived, here: Unit):
    """The first pieces of the residual or grad arrive while a block is multiplied.

    The others come closer.
    """
    store_wait_read0()
    for c in unrolled(CHUNKS):
        row, column = here.row0 + c // ROW_CHUNKS * 64, here.column0 + c % ROW_CHUNKS * WIDTH
        if SIDEWAYS:
            row, column = here.column0 + c * PIECE_ROWS, here.row0
        if c < BUFFERS:
            barrier, buffer = arrived + 8 * c, staging + BUFFER_BYTES * c
            barrier_expect(barrier, BUFFER_BYTES)
            tensor_load(buffer, extra_map, column, row, here.place, barrier)
        else:
            tensor_prefetch(extra_map, column, row, here.place)


def second_bias(bias: Array, here: Unit, column, n):
    """The other bias of a column; 0 behind the last, and where there is none."""
    if BIAS1:
        at = bias.address + here.place * bias.place * BIAS_SIZE
        return load_bias(at, column, n, bias.column)
    else:
        return ZERO


def all_of_a_block(consumer):
    """Wait for all threads that multiply the same block, and so have the same biases."""
    if PING_PONG:
        group_barrier(1 + consumer, 128)
    else:
        group_barrier(3, 128 * CONSUMERS)


def consume(maps: Maps, ends: Ends, second: Second, sums, shared, work: Work):
    """A consumer's thread: its blocks, or its 64 rows of every block."""
    thread = thread_index() - 128
    consumer = same(thread >> 7)
    thread = thread & 127
    leader = thread == 0
    acc = cuda.local.array(VALUES, SUM)
    CLEAR(acc)
    total = acc
    if PLANES > 1:
        total = cuda.local.array(VALUES, types.float32)
        first = 0 if PING_PONG else 64 * consumer
        place = place_of(thread, first + row_of(thread))
    staging = shared + STAGING_AT + consumer * OWN_STAGING
    biases = shared + BIAS_AT
    if PING_PONG:
        biases += BIAS_PLACES * BIAS_BYTES * consumer
    ahead = cuda.local.array(BIASES, types.float32)
    arrived = shared + FULL_AT + 16 * STAGES + 8 * BUFFERS * consumer
    turn = shared + FULL_AT + 16 * STAGES + 16 * BUFFERS
    stage, parity, extra_parity, turned = 0, 0, 0, 0
    unit = block_index() + 0
    if PING_PONG:
        turn_parity = 1 - consumer
        if consumer == 1 and unit < work.units:
            stage, parity = past(stage, parity, slices_of(unit, work))
        unit += consumer * block_count()
    while unit < work.units:
        here: Unit = unit_at(unit, work)
        count = min(work.slices - here.part * work.part_slices, work.part_slices)
        if not PING_PONG:
            here.row0 += 64 * consumer
        if EXTRA == "map":
            if leader:
                first_boxes(maps.extra, staging, arrived, here)
        if BIAS != "":
            biases_at = ends.bias.address + here.place * ends.bias.place * BIAS_SIZE
        if BIAS != "" and SIDEWAYS:
            for i in unrolled(2):
                column = here.row0 + row_of(thread) + 8 * i
                ahead[i] = load_bias(biases_at, column, work.m, ends.bias.column)
        elif BIAS != "":
            # a thread's columns wait in registers until the block's products are there
            for i in unrolled(BIASES):
                column = here.column0 + thread + 128 * i
                if 128 * i >= COLUMNS and TWO_BIASES:
                    ahead[i] = second_bias(second.bias, here, column - COLUMNS, work.n)
                elif 128 * i + 128 > COLUMNS and TWO_BIASES:
                    if thread + 128 * i >= COLUMNS:
                        ahead[i] = second_bias(second.bias, here, column - COLUMNS, work.n)
                    else:
                        ahead[i] = load_bias(biases_at, column, work.n, ends.bias.column)
                else:
                    ahead[i] = load_bias(biases_at, column, work.n, ends.bias.column)
        if PLANES > 1:
            # nothing of the block before, so its epilogue has these registers; the wait, for
            # nothing, keeps the compiler from setting them among the products
            CLEAR(acc)
            MULTIPLY_WAIT(acc)
        if PING_PONG:
            barrier_wait(turn + 8 * consumer, turn_parity)
            turn_parity ^= 1
        next_turn = turn + 8 - 8 * consumer
        if PLANES > 1:
            stage, parity = multiply_parts(
                acc, total, shared, place, stage, parity, count, next_turn, leader, consumer
            )
        else:
            x_offset = 0 if PING_PONG else 8192 * consumer
            stage, parity = multiply_slices(
                acc, shared, x_offset, stage, parity, count, next_turn, leader
            )
        if BIAS != "" and not SIDEWAYS:
            # two places by turns: no warp is still reading the block's before the last
            if BIAS_PLACES == 1:
                all_of_a_block(consumer)
            for i in unrolled(BIASES):
                shared_store_f32(biases + turned + (thread + 128 * i) * 4, ahead[i])
            all_of_a_block(consumer)
        if OUT == "residues":
            at = ends.out.address + here.part * work.part_step + here.place * ends.out.place
            row = here.row0 + 16 * (thread >> 5) + ((thread & 31) >> 2)
            column = here.column0 + 16 * (thread & 3)
            store_residues(acc, at, here.place, row, column, work.m, work.n)
        elif SIDEWAYS:
            finish_sideways(
                total,
                maps,
                ahead,
                ends,
                sums,
                staging,
                arrived,
                extra_parity,
                consumer,
                thread,
                here,
                work,
            )
        else:
            finish(
                total,
                maps,
                biases + turned,
                ends,
                second,
                staging,
                arrived,
                extra_parity,
                consumer,
                thread,
                here,
                work,
            )
        if BIAS_PLACES == 2:
            turned ^= BIAS_BYTES
        if EXTRA == "map":
            extra_parity ^= TURNS
        if SUMS and not SIDEWAYS:
            sum_columns(total, sums, staging, consumer, thread, here, work.m, work.n)
        unit += block_count()
        if PING_PONG:
            if unit < work.units:
                stage, parity = past(stage, parity, slices_of(unit, work))
            unit += block_count()
    stores_read(thread)  # (written they are when the launch is over)
