"""The product on Hopper's tensor cores, as templates: out[p] = epilogue(X[p] @ Y[p]).

One block per multiprocessor stays for the whole launch and takes one unit of work (a block of the
result, or a part of its K) after the other.  Its threads have two roles:

- group 0, of which one thread acts, is the producer: it asks the copy engine (TMA) for slices of X
  and Y, 128 bytes of K at a time, into a ring of stages in shared memory (of operands in three
  parts, a stage has a slice of each);
- one or two consumer groups of 128 threads multiply slices as they arrive (wgmma, accumulators in
  registers) and finish the block: the epilogue, column sums, store.

Two mbarriers a stage connect them: `full` (the copy engine has written it) and `empty` (every
consumer has read it).  In the "cooperative" schedule each consumer has 64 rows of one block; in
"ping-pong" each has a block of its own, and while one finishes its block, the other multiplies:
`turn` keeps them from multiplying at the same time.

Templates trust `hopper.take`.  UPPER-case names are bound there; `unroll` writes loops over
accumulators out.  What a consumer does with its block is in `finish`.
"""

from __future__ import annotations

from typing import Any

from numfuse.backends.cuda.compile.accesses import (
    prefetch,
    shared_store_f32,
)
from numfuse.backends.cuda.compile.engines import (
    grid_release,
    grid_wait,
    map_prefetch,
    multiply_wait1,
    registers_few,
    registers_many,
    store_wait_read0,
    tensor_load,
    tensor_prefetch,
)
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_arrive,
    barrier_expect,
    barrier_fence,
    barrier_init,
    barrier_wait,
    block_barrier,
    block_count,
    block_index,
    dynamic_shared,
    fresh,
    group_barrier,
    product_high,
    quotient,
    same,
    thread_index,
)
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def unit_at(unit: int, row_blocks: int, column_blocks: int, places: int) -> tuple[int, ...]:
    """(part of K, place, first row, first column) of a unit of work.

    GROUP rows of blocks are worked on together, column by column: the slices of X and Y that blocks
    at work share are then found in the second-level cache.
    """
    blocks = row_blocks * column_blocks
    part, place, block = 0, 0, unit
    if unit >= blocks:  # a division takes as long as the addresses of 16 sums
        outer = quotient(unit, blocks)
        block = unit - outer * blocks
        part = quotient(outer, places)
        place = outer - part * places
    strip = quotient(block, GROUP * fresh(column_blocks))  # computed here: no register keeps it
    first = strip * GROUP
    height = min(GROUP, row_blocks - first)
    rest = block - first * column_blocks
    column = quotient(rest, height)
    row = first + rest - column * height
    return part, place, row * BLOCK_M, column * BLOCK_N


def next_stage(stage: int, parity: int) -> tuple[int, int]:
    """The stage behind one, and the parity of its barriers."""
    stage += 1
    if stage == STAGES:
        stage = 0
        parity ^= 1
    return stage, parity


def produce(
    x_map: int,
    y_map: int,
    shared: int,
    slices: int,
    units: int,
    row_blocks: int,
    column_blocks: int,
    places: int,
    x_places: int,
    y_places: int,
    x_plane: int,
    y_plane: int,
    part_slices: int,
    slice_bytes: int,
) -> None:
    """The producer's thread: every slice of every unit of this block, in order."""
    full = shared + FULL_AT
    stage, parity, unit = 0, 1, block_index() + 0
    while unit < units:
        part, place, row0, column0 = UNIT_AT(unit, row_blocks, column_blocks, places)
        first = part * part_slices
        end = min(slices, first + part_slices)
        at = first
        while at < end:
            barrier = full + 8 * stage
            barrier_wait(barrier + 8 * STAGES, parity)
            barrier_expect(barrier, slice_bytes)
            x_at = shared + stage * STAGE_BYTES
            x_place, y_place = place * x_places, place * y_places
            for _plane in unrolled(PLANES):
                y_at = x_at + X_BYTES
                if X_TURNED:
                    for i in unrolled(BLOCK_M // 64):
                        tensor_load(
                            x_at + 8192 * i, x_map, row0 + 64 * i, at * DEPTH, x_place, barrier
                        )
                else:
                    tensor_load(x_at, x_map, at * DEPTH, row0, x_place, barrier)
                if Y_TURNED:
                    for i in unrolled(BLOCK_N // Y_BOX):
                        tensor_load(
                            y_at + 128 * Y_BOX * i,
                            y_map,
                            column0 + Y_BOX * i,
                            at * DEPTH,
                            y_place,
                            barrier,
                        )
                else:
                    tensor_load(y_at, y_map, at * DEPTH, column0, y_place, barrier)
                x_at += PLANE_BYTES
                x_place += x_plane
                y_place += y_plane
            stage, parity = NEXT(stage, parity)
            at += 1
        unit += block_count()


def multiply_slices(
    acc: Any,
    shared: int,
    x_offset: int,
    stage: int,
    parity: int,
    count: int,
    next_turn: int,
    leader: bool,
) -> tuple[int, int]:
    """acc = the sum of `count` slices' products, from `stage` on; the stage behind them.

    In "ping-pong" the other group's turn begins (at the barrier `next_turn`) when this one's last
    products are on their way: the tensor cores never wait.  One slice's products are in flight
    while the next one's are issued.
    """
    full = shared + FULL_AT
    empty = full + 8 * STAGES
    before = stage
    done = 0
    while done < count:
        barrier_wait(full + 8 * stage, parity)
        x_at = shared + stage * STAGE_BYTES
        x = X_DESCRIPTOR | (((x_at + x_offset) & 0x3FFFF) >> 4)
        y = Y_DESCRIPTOR | (((x_at + X_BYTES) & 0x3FFFF) >> 4)
        MULTIPLY(acc, x, y, done != 0)
        if done > 0:
            multiply_wait1()
            barrier_arrive(empty + 8 * before, leader)
        before = stage
        done += 1
        stage, parity = NEXT(stage, parity)
    if PING_PONG:
        barrier_arrive(next_turn, leader)
    MULTIPLY_WAIT(acc)
    barrier_arrive(empty + 8 * before, leader)
    return stage, parity


def multiply_split(
    low: Any,
    high: Any,
    total: Any,
    shared: int,
    x_offset: int,
    stage: int,
    parity: int,
    count: int,
    next_turn: int,
    leader: bool,
) -> tuple[int, int]:
    """total = the sum of the six products of each of `count` slices, of which a stage has all
    planes, from `stage` on; the stage behind them.  Turns as in `multiply_slices`.

    A plane that is in shared memory is used two or three times: one product after the other, each
    over all of K, would take twice as much from the second-level cache, which is then the limit.
    The five products with a low part have sums of their own, which are small and go on to the end.
    That of the high parts holds no more than PROMOTE slices at a time and is added to `total`: the
    tensor cores add with fewer bits than float32 has, a float32 addition does not.
    """
    full = shared + FULL_AT
    empty = full + 8 * STAGES
    before = stage
    NEXT_PLANE = PLANE_BYTES >> 4
    CLEAR(total)
    done = 0
    while done < count:
        barrier_wait(full + 8 * stage, parity)
        x_at = shared + stage * STAGE_BYTES
        x = X_DESCRIPTOR | (((x_at + x_offset) & 0x3FFFF) >> 4)
        y = Y_DESCRIPTOR | (((x_at + X_BYTES) & 0x3FFFF) >> 4)
        MULTIPLY(low, x, y + 2 * NEXT_PLANE, True)
        if done > 0:
            # with that one on its way, those of the slice before are done
            multiply_wait1()
            barrier_arrive(empty + 8 * before, leader)
        MULTIPLY(low, x + 2 * NEXT_PLANE, y, True)
        MULTIPLY(low, x + NEXT_PLANE, y + NEXT_PLANE, True)
        MULTIPLY(low, x, y + NEXT_PLANE, True)
        MULTIPLY(low, x + NEXT_PLANE, y, True)
        MULTIPLY(high, x, y, (done & (PROMOTE - 1)) != 0)
        before = stage
        done += 1
        stage, parity = NEXT(stage, parity)
        if (done & (PROMOTE - 1)) == 0 and done < count:
            # (the compiler lets nothing read a sum while another one is on its way)
            MULTIPLY_WAIT(low)
            MULTIPLY_WAIT(high)
            ADD(total, high)
    if PING_PONG:
        barrier_arrive(next_turn, leader)
    MULTIPLY_WAIT(low)
    MULTIPLY_WAIT(high)
    barrier_arrive(empty + 8 * before, leader)
    ADD(total, high)
    # where a low part is no number (of an infinity) or its product overflows, the high parts'
    # product alone has IEEE's infinity or NaN
    for i in unrolled(VALUES):
        total[i] = total[i] + FINITE(low[i])
    return stage, parity


def finite(x: Any) -> Any:
    """x, or 0 where it is an infinity or no number."""
    return SELECT(IS_FINITE(x), x, ZERO)


def slices_of(unit: int, units: int, slices: int, part_slices: int) -> int:
    """How many slices a unit has; `units`: of one part of K."""
    count = part_slices
    if part_slices < slices:
        part = quotient(unit, units)
        count = min(slices - part * part_slices, part_slices)
    return count


def past(stage: int, parity: int, count: int) -> tuple[int, int]:
    """The stage and parity behind `count` slices that another consumer takes."""
    end = stage + count
    turns = product_high(end, PER_STAGE)
    return end - turns * STAGES, parity ^ (turns & 1)


def consume(
    out_map: int,
    extra_map: int,
    bias: int,
    extra: int,
    pre: int,
    out: int,
    sums: int,
    shared: int,
    m: int,
    n: int,
    slices: int,
    units: int,
    row_blocks: int,
    column_blocks: int,
    places: int,
    part_slices: int,
    bias_place: int,
    bias_column: int,
    extra_place: int,
    extra_row: int,
    extra_column: int,
    pre_place: int,
    pre_row: int,
    pre_column: int,
    out_part: int,
    out_place: int,
    out_row: int,
    out_column: int,
) -> None:
    """A consumer's thread: its blocks, or its 64 rows of every block."""
    thread = thread_index() - 128
    consumer = same(thread >> 7)
    thread = thread & 127
    leader = thread == 0
    acc = cuda.local.array(VALUES, types.float32)
    CLEAR(acc)
    total = acc
    if PLANES > 1:
        total = cuda.local.array(VALUES, types.float32)
        low = cuda.local.array(VALUES, types.float32)
    staging = shared + STAGING_AT + consumer * BUFFERS * BUFFER_BYTES
    biases = shared + BIAS_AT
    if PING_PONG:
        biases += 2 * BIAS_BYTES * consumer
    ahead = cuda.local.array(BIASES, types.float32)
    arrived = shared + FULL_AT + 16 * STAGES + 8 * BUFFERS * consumer
    turn = shared + FULL_AT + 16 * STAGES + 16 * BUFFERS
    stage, parity, extra_parity, turned = 0, 0, 0, 0
    unit = block_index() + 0
    if PING_PONG:
        turn_parity = 1 - consumer
        if consumer == 1 and unit < units:
            count = COUNT(unit, row_blocks * column_blocks * places, slices, part_slices)
            stage, parity = PAST(stage, parity, count)
        unit += consumer * block_count()
    while unit < units:
        part, place, row0, column0 = UNIT_AT(unit, row_blocks, column_blocks, places)
        count = min(slices - part * part_slices, part_slices)
        if not PING_PONG:
            row0 += 64 * consumer
        if EXTRA == "map":
            # its first pieces arrive while the block is multiplied, the others come closer
            if leader:
                store_wait_read0()
                for c in unrolled(BUFFERS):
                    barrier_expect(arrived + 8 * c, BUFFER_BYTES)
                    tensor_load(
                        staging + BUFFER_BYTES * c,
                        extra_map,
                        column0 + c % ROW_CHUNKS * WIDTH,
                        row0 + c // ROW_CHUNKS * 64,
                        place,
                        arrived + 8 * c,
                    )
                for c in unrolled(BUFFERS, CHUNKS):
                    tensor_prefetch(
                        extra_map,
                        column0 + c % ROW_CHUNKS * WIDTH,
                        row0 + c // ROW_CHUNKS * 64,
                        place,
                    )
        if BIAS != "":
            # a thread's columns wait in registers until the block's products are there
            for i in unrolled(BIASES):
                ahead[i] = LOAD_BIAS(
                    bias + (place * bias_place) * BIAS_SIZE,
                    column0 + thread + 128 * i,
                    n,
                    bias_column,
                )
        if EXTRA == "vectors":
            grad = extra + place * extra_place * 2
            for c in unrolled(BUFFERS):
                FETCH_VECTORS(
                    grad,
                    staging + BUFFER_BYTES * c,
                    row0 + c // ROW_CHUNKS * 64,
                    column0 + c % ROW_CHUNKS * WIDTH,
                    thread,
                    m,
                    n,
                    extra_row,
                )
            for c in unrolled(BUFFERS, CHUNKS):
                row = row0 + c // ROW_CHUNKS * 64 + thread
                at = grad + (row * extra_row + column0 + c % ROW_CHUNKS * WIDTH) * 2
                prefetch(at, (thread < 64) & (row < m) & (column0 + c % ROW_CHUNKS * WIDTH < n))
        if PLANES > 1:
            # nothing of the block before, so its epilogue has these registers; the waits, for
            # nothing, keep the compiler from setting them among the products
            CLEAR(low)
            CLEAR(acc)
            MULTIPLY_WAIT(low)
            MULTIPLY_WAIT(acc)
        if PING_PONG:
            barrier_wait(turn + 8 * consumer, turn_parity)
            turn_parity ^= 1
        x_offset = 0
        if not PING_PONG:
            x_offset = 8192 * consumer
        next_turn = turn + 8 - 8 * consumer
        if PLANES > 1:
            stage, parity = MULTIPLY_SPLIT(
                low, acc, total, shared, x_offset, stage, parity, count, next_turn, leader
            )
        else:
            stage, parity = MULTIPLY_SLICES(
                acc, shared, x_offset, stage, parity, count, next_turn, leader
            )
        if BIAS != "":
            # two places by turns: no warp is still reading the block's before the last
            for i in unrolled(BIASES):
                shared_store_f32(biases + turned + (thread + 128 * i) * 4, ahead[i])
            if PING_PONG:
                group_barrier(1 + consumer, 128)
            else:
                group_barrier(3, 128 * CONSUMERS)  # one block, and so one bias
        FINISH(
            total,
            out_map,
            extra_map,
            biases + turned,
            extra,
            pre,
            out,
            staging,
            arrived,
            extra_parity,
            consumer,
            thread,
            part,
            place,
            row0,
            column0,
            m,
            n,
            extra_place,
            extra_row,
            extra_column,
            pre_place,
            pre_row,
            pre_column,
            out_part,
            out_place,
            out_row,
            out_column,
        )
        turned ^= BIAS_BYTES
        if EXTRA == "map" and CHUNKS // BUFFERS % 2:
            extra_parity ^= 1
        if SUMS:
            SUM_COLUMNS(total, sums, staging, consumer, thread, place, row0, column0, m, n)
        unit += block_count()
        if PING_PONG:
            if unit < units:
                count = COUNT(unit, row_blocks * column_blocks * places, slices, part_slices)
                stage, parity = PAST(stage, parity, count)
            unit += block_count()
    if OUT == "map":
        if ALONE:
            if (thread & 31) == 0:
                store_wait_read0()  # written they are when the launch is over
        else:
            if leader:
                store_wait_read0()


def gemm(
    x_map: int,
    y_map: int,
    out_map: int,
    extra_map: int,
    bias: int,
    extra: int,
    pre: int,
    out: int,
    sums: int,
    m: int,
    n: int,
    slices: int,
    row_blocks: int,
    column_blocks: int,
    places: int,
    units: int,
    part_slices: int,
    slice_bytes: int,
    x_places: int,
    y_places: int,
    x_plane: int,
    y_plane: int,
    bias_place: int,
    bias_column: int,
    extra_place: int,
    extra_row: int,
    extra_column: int,
    pre_place: int,
    pre_row: int,
    pre_column: int,
    out_part: int,
    out_place: int,
    out_row: int,
    out_column: int,
) -> None:
    """The kernel: barriers, then each group its role.

    Addresses are in bytes, strides in elements.  `slices`: of K, 128 bytes each; a unit has no
    more than `part_slices` of them, of `slice_bytes` (X and Y; fewer than a stage has where X has
    fewer rows than a block).  `x_places`, `y_places`: 0 where an operand is the
    same at every place.  `x_plane`, `y_plane`: places of one plane of a split operand.
    """
    # at a multiple of 1024, the bytes after which the copy engine's swizzle repeats
    shared = dynamic_shared() + 0
    thread = thread_index() + 0
    if thread == 0:
        map_prefetch(x_map)
        map_prefetch(y_map)
        if OUT == "map":
            map_prefetch(out_map)
        if EXTRA == "map":
            map_prefetch(extra_map)
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
            PRODUCE(
                x_map,
                y_map,
                shared,
                slices,
                units,
                row_blocks,
                column_blocks,
                places,
                x_places,
                y_places,
                x_plane,
                y_plane,
                part_slices,
                slice_bytes,
            )
    else:
        if CONSUMERS == 2:
            registers_many()
        CONSUME(
            out_map,
            extra_map,
            bias,
            extra,
            pre,
            out,
            sums,
            shared,
            m,
            n,
            slices,
            units,
            row_blocks,
            column_blocks,
            places,
            part_slices,
            bias_place,
            bias_column,
            extra_place,
            extra_row,
            extra_column,
            pre_place,
            pre_row,
            pre_column,
            out_part,
            out_place,
            out_row,
            out_column,
        )
