"""How a consumer of `gemm` finishes its block, as templates: formula, loads and stores.

A result of 16-bit values goes through `staging` in shared memory, where stmatrix puts it in rows
with their 16-byte pieces permuted as the copy engine's swizzle has them (no bank conflicts). It
leaves by the copy engine ("map"), which keeps such pieces waiting behind the slices that it
fetches, or where rows are not aligned to 16 bytes by single values ("rows"). The residual and grad
come the same two ways, or, of an operand by rows, as the two values of a thread's rows ("line").
Pre-activations in 16 bits leave by "map" beside the result, from buffers of their own. A warp deals
with its own 16 rows and waits for no other, but where the residual or grad comes by "map". The bias
waits in shared memory, as float32.

Of two sums a thread has the same elements, the second's half a block of accumulators further. Of
"woven" ones, whose columns alternate, it has both sums of an element side by side: of each 8
columns of the result two that are 4 apart. 16-bit values go to `staging` one by one then, and two
results whose columns alternate, too, by stmatrix as the words that they are.
"""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import (
    global_load2_f32,
    global_load16,
    global_load_f32,
    global_store2_f32,
    global_store16,
    global_store32,
    global_store_f32,
    shared_load2_f32,
    shared_load16,
    shared_load_f32,
    shared_store16,
    shared_store32,
    shared_store_f32,
)
from numfuse.backends.cuda.compile.engines import (
    copy_fence,
    matrix_load,
    matrix_store,
    store_commit,
    store_wait_read0,
    store_wait_read1,
    tensor_load,
    tensor_store,
)
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_expect,
    barrier_wait,
    fresh,
    group_barrier,
    select,
    shuffle_xor,
    warp_barrier,
)
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.hopper.mainloop import row_of
from numfuse.backends.cuda.kernels.hopper.records import Maps, Second, Unit, Work


def finish(
    acc,
    maps: Maps,
    biases,
    ends: Ends,
    second: Second,
    staging,
    arrived,
    extra_parity,
    consumer,
    thread,
    here: Unit,
    work: Work,
):
    """The epilogue of a block: 64 rows x WIDTH columns at a time.

    Of each 8 columns a thread holds two neighbours in a row and in the one 8 below (9.7.15.5.1.1.2
    of the PTX ISA); a warp has 16 rows.
    """
    leader = thread == 0
    # computed here, and not kept while the block is multiplied
    thread, part, place = fresh(thread), fresh(here.part), fresh(here.place)
    m, n, row0, column0 = work.m, work.n, here.row0, here.column0
    lane, warp = thread & 31, thread >> 5
    # the row of stmatrix and ldmatrix that this lane names, and its first 16-byte piece; the
    # swizzle exchanges pieces by an exclusive or, and so the q-th is 32 q away by one
    own_row = warp * 16 + (lane & 15)
    own = piece_at(staging, own_row, lane >> 4)
    wide = own
    if WOVEN:
        own = piece_at(staging, warp * 16 + (lane >> 2), 0) + (lane & 3) * 2
    biases = biases + (lane & 3) * (4 if WOVEN else 8)
    b = cuda.local.array(WIDTH // 4, types.float32)
    b1 = b
    if TWO_BIASES:
        b1 = cuda.local.array(WIDTH // 4, types.float32)
    ends.extra.address += place * ends.extra.place * EXTRA_SIZE
    ends.pre.address += place * ends.pre.place * PRE_SIZE
    second.pre.address += place * second.pre.place * PRE_SIZE
    ends.out.address += (part * work.part_step + place * ends.out.place) * OUT_SIZE
    for c in unrolled(CHUNKS):
        ROW = c // ROW_CHUNKS * 64
        COLUMN = c % ROW_CHUNKS * WIDTH
        BASE = c // ROW_CHUNKS * (BLOCK_N // 2) + COLUMN // 8 * EACH
        BUFFER = c % BUFFERS
        buffer = staging + BUFFER * BUFFER_BYTES
        top, left = row0 + ROW, column0 + COLUMN
        if STAGED or EXTRA != "" or PRE != "":
            # of this piece alone: what pieces have in common would fill registers
            top, left = fresh(top), fresh(left)
        row = top + row_of(thread)
        if ALONE:
            # the buffer is free once the store that was so many pieces ago has been read (of an
            # odd number of pieces, the last one of the block before was in the first buffer, too)
            if lane == 0:
                if BUFFERS == 2 and (c > 0 or CHUNKS % 2 == 0):
                    store_wait_read1()
                else:
                    store_wait_read0()
            warp_barrier()
        elif PRE == "map":
            if leader:
                store_wait_read0()
            group_barrier(1 + consumer, 128)
        if EXTRA == "map":
            barrier_wait(arrived + 8 * BUFFER, ((extra_parity >> BUFFER) ^ (c // BUFFERS)) & 1)
        line, below = ZERO, ZERO
        if EXTRA == "line":
            line = line_of(ends.extra, row, m)
            below = line_of(ends.extra, row + 8, m)
        if EXTRA == "rows":
            fetch_rows(ends.extra, buffer, top + warp * 16, warp * 16, left, lane, m, n)
        if BIAS != "":
            for j in unrolled(WIDTH // 8):
                b[2 * j], b[2 * j + 1] = two_biases(biases + (4 * COLUMN + 32 * j))
                if TWO_BIASES:
                    b1_at = biases + (4 * COLUMNS + 4 * COLUMN + 32 * j)
                    b1[2 * j], b1[2 * j + 1] = two_biases(b1_at)
        # a warp of which no row is in the result has nothing to do, but for the order of stores
        has_rows = not SKIPS or top + warp * 16 < m
        if has_rows:
            for q in unrolled(WIDTH // 16):
                at = (own + BUFFER * BUFFER_BYTES) ^ (32 * q)
                pre_at = (own + BUFFERS * BUFFER_BYTES) ^ (32 * q)
                if WOVEN_OUT:
                    # twice the columns fill the buffer of the pre-activations, and then that of the
                    # operand, of which every column is read before it is overwritten
                    WHOLE = BUFFERS if 32 * q < WIDTH else BUFFER
                    pre_at = (wide + WHOLE * BUFFER_BYTES) ^ (64 * q % (2 * WIDTH))
                column = left + 16 * q + (lane & 3) * (1 if WOVEN else 2)
                # an index that is no literal: `piece` is compiled once, the constant inlined
                index, b_index = types.int64(BASE + 2 * EACH * q), types.int64(4 * q)
                piece(
                    acc,
                    index,
                    b,
                    b1,
                    b_index,
                    line,
                    below,
                    at,
                    pre_at,
                    row,
                    column,
                    m,
                    n,
                    ends,
                    second,
                )
        if ALONE:
            copy_fence()
            warp_barrier()
            if lane == 0:
                own_pre = staging + BUFFERS * BUFFER_BYTES + warp * (32 * WIDTH)
                own_out = buffer + warp * (32 * WIDTH)
                if has_rows:
                    store_out(maps, second, left, top + warp * 16, place, own_out, own_pre)
                store_commit()
        elif OUT == "map":
            copy_fence()
            group_barrier(1 + consumer, 128)
            if leader:
                own_pre = staging + BUFFERS * BUFFER_BYTES
                store_out(maps, second, left, top, place, buffer, own_pre)
                store_commit()
                if c + BUFFERS < CHUNKS:
                    NEXT = c + BUFFERS
                    barrier = arrived + 8 * (c % BUFFERS)
                    store_wait_read0()
                    barrier_expect(barrier, BUFFER_BYTES)
                    row, column = (
                        row0 + NEXT // ROW_CHUNKS * 64,
                        column0 + NEXT % ROW_CHUNKS * WIDTH,
                    )
                    tensor_load(buffer, maps.extra, column, row, place, barrier)
        if OUT == "rows":
            warp_barrier()
            store_rows(ends.out, buffer, top + warp * 16, warp * 16, left, lane, m, n)
            warp_barrier()


def store_out(maps: Maps, second: Second, column, row, place, buffer, pre):
    """Have the copy engine store pieces of the result and of the pre-activations."""
    if WOVEN_OUT:
        tensor_store(maps.out, 2 * column, row, place, pre)
        tensor_store(maps.out, 2 * column + WIDTH, row, place, buffer)
    else:
        tensor_store(maps.out, column, row, place, buffer)
        if PRE == "map":
            tensor_store(maps.pre, column, row, place, pre)
        if PRE1 == "map":
            tensor_store(second.pre_map, column, row, place, pre + BUFFER_BYTES)


def two_biases(at):
    """The biases of the two columns that a thread has of 8."""
    if WOVEN:
        return shared_load_f32(at), shared_load_f32(at + 16)
    else:
        return shared_load2_f32(at)


def store_apart(at, top, bottom):
    """Two words of 16-bit values, each of a row's columns 4 apart, to a buffer; 8 rows apart."""
    shared_store16(at, top)
    shared_store16(at + 8, top >> 16)
    shared_store16(at + 16 * WIDTH, bottom)
    shared_store16(at + 16 * WIDTH + 8, bottom >> 16)


def piece_at(buffer, row, number):
    """Where a 16-byte piece of a row of a buffer is, as the copy engine's swizzle has it."""
    turned = (row & 7) if WIDTH == 64 else ((row >> 1) & 3)
    return buffer + row * (2 * WIDTH) + ((number ^ turned) << 4)


def stores_read(thread):
    """The stores of the copy engine must have left the buffers."""
    if OUT == "map":
        if (thread & (31 if ALONE else 127)) == 0:
            store_wait_read0()


def line_of(extra: Array, row, m):
    """An operand by rows; 0 behind the last."""
    at = extra.address + row * extra.row * EXTRA_SIZE
    if EXTRA_SIZE == 4:
        return global_load_f32(at, row < m)
    else:
        return LOW(global_load16(at, row < m))


def piece(
    acc, index, b, b1, b_index, line, below, at, pre_at, row, column, m, n, ends: Ends,
    second: Second,
):  # fmt: skip
    """The epilogue of 16 columns of a warp's rows.

    `at` and `pre_at`: where in `staging` they are, or go, and the pre-activations go (or both
    results, where their columns alternate). `line` and `below`: an operand by rows, of a thread's
    two.
    """
    words = cuda.local.array(4, types.int32)
    half = cuda.local.array(4, types.int32)
    v = cuda.local.array(4, types.float32)
    g = cuda.local.array(4, types.float32)
    kept = cuda.local.array(4, types.float32)
    kept1 = cuda.local.array(4, types.float32)
    other = cuda.local.array(4, types.int32)
    other1 = cuda.local.array(4, types.int32)
    row_in = row < m
    below_in = row + 8 < m
    if (EXTRA == "rows" or EXTRA == "map") and not WOVEN:
        words[0], words[1], words[2], words[3] = matrix_load(at)
    for p in unrolled(2):
        if EXTRA == "float32":
            g[0], g[1] = LOAD_EXTRA(ends.extra, row, column, m, n)
            g[2], g[3] = LOAD_EXTRA(ends.extra, row + 8, column, m, n)
        elif EXTRA == "line":
            g[0], g[1], g[2], g[3] = line, line, below, below
        elif EXTRA != "" and WOVEN:
            own_at = at ^ (16 * p)
            g[0], g[1] = LOW(shared_load16(own_at)), LOW(shared_load16(own_at + 8))
            own_at += 16 * WIDTH
            g[2], g[3] = LOW(shared_load16(own_at)), LOW(shared_load16(own_at + 8))
        elif EXTRA != "":
            g[0], g[1] = LOW(words[2 * p]), HIGH(words[2 * p])
            g[2], g[3] = LOW(words[2 * p + 1]), HIGH(words[2 * p + 1])
        for i in unrolled(4):
            own, bias = index + EACH * p, b_index + 2 * p + i % 2
            own += 4 * (i % 2) + i // 2 * 2 if WOVEN else i
            v[i], kept[i], kept1[i] = element(acc, own, b[bias], b1[bias], g[i])
        if WOVEN_OUT:
            left, right = PACK(v[0], kept[0]), PACK(v[1], kept[1])
            matrix_store(pre_at ^ (32 * p), left, PACK(v[2], kept[2]), right, PACK(v[3], kept[3]))
        elif PRE == "map" and WOVEN:
            store_apart(pre_at ^ (16 * p), PACK(kept[0], kept[1]), PACK(kept[2], kept[3]))
        elif PRE == "map":
            other[2 * p] = PACK(kept[0], kept[1])
            other[2 * p + 1] = PACK(kept[2], kept[3])
        elif PRE != "":
            STORE_PRE(ends.pre, row, column, m, n, kept[0], kept[1])
            STORE_PRE(ends.pre, row + 8, column, m, n, kept[2], kept[3])
        if PRE1 == "map" and WOVEN:
            pre1_at = (pre_at + BUFFER_BYTES) ^ (16 * p)
            store_apart(pre1_at, PACK(kept1[0], kept1[1]), PACK(kept1[2], kept1[3]))
        elif PRE1 == "map":
            other1[2 * p] = PACK(kept1[0], kept1[1])
            other1[2 * p + 1] = PACK(kept1[2], kept1[3])
        elif PRE1 != "":
            STORE_PRE(second.pre, row, column, m, n, kept1[0], kept1[1])
            STORE_PRE(second.pre, row + 8, column, m, n, kept1[2], kept1[3])
        if SUMS:
            # rows below the last are products of zeros and a bias: they do not count
            acc[index + 4 * p] = select(v[0], ZERO, row_in) + select(v[2], ZERO, below_in)
            acc[index + 4 * p + 1] = select(v[1], ZERO, row_in) + select(v[3], ZERO, below_in)
        if STAGED and WOVEN and not WOVEN_OUT:
            store_apart(at ^ (16 * p), PACK(v[0], v[1]), PACK(v[2], v[3]))
        elif STAGED and not WOVEN:
            half[2 * p] = PACK(v[0], v[1])
            half[2 * p + 1] = PACK(v[2], v[3])
        elif not STAGED:
            STORE_OUT(ends.out, row, column, m, n, v[0], v[1])
            STORE_OUT(ends.out, row + 8, column, m, n, v[2], v[3])
        column += 8
    if STAGED and not WOVEN:
        matrix_store(at, half[0], half[1], half[2], half[3])
    if PRE == "map" and not WOVEN:
        matrix_store(pre_at, other[0], other[1], other[2], other[3])
    if PRE1 == "map" and not WOVEN:
        matrix_store(pre_at + BUFFER_BYTES, other1[0], other1[1], other1[2], other1[3])


def element(acc, own, bias, bias1, extra):
    """The results of an element; 0 in the place of those that are not there."""
    value, first, second = ZERO, ZERO, ZERO
    z, z1 = acc[own], ZERO
    if TWO_SUMS:
        z1 = acc[own + PARTNER]
    if PRE1 != "":
        value, first, second = EPILOGUE(z, z1, bias, bias1, extra)
    elif PRE != "":
        value, first = EPILOGUE(z, z1, bias, bias1, extra)
    else:
        value = EPILOGUE(z, z1, bias, bias1, extra)
    return value, first, second


def fetch_rows(extra: Array, buffer, row, in_buffer, column, lane, m, n):
    """16 rows of `extra` into a buffer, in its order; two neighbours a lane."""
    word = cuda.local.array(4, types.int32)
    # of 32 columns, the second half of the lanes does the same again
    lane = fresh(lane) & (WIDTH // 2 - 1)
    column += 2 * lane
    rows = m - row
    at = extra.address + (row * extra.row + column * extra.column) * 2
    low_in, high_in = column < n, column + 1 < n
    i, end = 0, fresh(16)  # a loop that stays one: written out, it would need too many registers
    while i < end:
        for j in unrolled(4):
            low = global_load16(at, low_in & (i + j < rows))
            high = global_load16(at + 2 * extra.column, high_in & (i + j < rows))
            word[j] = low | (high << 16)
            at += 2 * extra.row
        for j in unrolled(4):
            in_row = in_buffer + i + j
            shared_store32(piece_at(buffer, in_row, lane >> 2) + ((lane & 3) << 2), word[j])
        i += 4
    warp_barrier()


def store_rows(out: Array, buffer, row, in_buffer, column, lane, m, n):
    """16 rows of a buffer to `out`: neighbouring lanes store neighbours, any alignment."""
    lane = fresh(lane)
    column += lane
    rows = m - row
    at = out.address + (row * out.row + column * out.column) * 2
    left_in, right_in = column < n, column + 32 < n
    i, end = 0, fresh(16)
    while i < end:
        for j in unrolled(4):
            in_row = in_buffer + i + j
            value = shared_load16(piece_at(buffer, in_row, lane >> 3) + ((lane & 7) << 1))
            global_store16(at, value, left_in & (i + j < rows))
            if WIDTH == 64:
                value = shared_load16(piece_at(buffer, in_row, (lane >> 3) + 4) + ((lane & 7) << 1))
                global_store16(at + 64 * out.column, value, right_in & (i + j < rows))
            at += 2 * out.row
        i += 4


def load_bias(at, column, n, stride):
    """The bias of a column; 0 behind the last."""
    at += column * stride * BIAS_SIZE
    if BIAS == "float32":
        return global_load_f32(at, column < n)
    else:
        return LOW(global_load16(at, column < n))


def load_two(array: Array, row, column, m, n):
    """Two neighbours in a row of float32; 0 outside."""
    if PAIRS:
        return global_load2_f32(
            array.address + (row * array.row + column) * 4, (row < m) & (column < n)
        )
    else:
        at = array.address + (row * array.row + column * array.column) * 4
        low = global_load_f32(at, (row < m) & (column < n))
        return low, global_load_f32(at + 4 * array.column, (row < m) & (column + 1 < n))


def store_two(array: Array, row, column, m, n, low, high):
    """Two float32 of a row that are APART columns apart, where they are inside."""
    if PAIRS:
        at = array.address + (row * array.row + column) * 4
        global_store2_f32(at, low, high, (row < m) & (column < n))
    else:
        at = array.address + (row * array.row + column * array.column) * 4
        global_store_f32(at, low, (row < m) & (column < n))
        inside = (row < m) & (column + APART < n)
        global_store_f32(at + 4 * APART * array.column, high, inside)


def store_halves(array: Array, row, column, m, n, low, high):
    """Two 16-bit values of a row that are APART columns apart, where they are inside."""
    word = PACK(low, high)
    at = array.address + (row * array.row + column * array.column) * 2
    if PAIRS:
        global_store32(at, word, (row < m) & (column < n))
    else:
        global_store16(at, word & 0xFFFF, (row < m) & (column < n))
        inside = (row < m) & (column + APART < n)
        global_store16(at + 2 * APART * array.column, word >> 16, inside)


def sum_columns(acc, sums, shared, consumer, thread, here: Unit, m, n):
    """The sums of the block's columns over a consumer's rows, always in the same order.

    Of each pair of lanes that differ in one bit of their row one keeps the first half of the
    columns and the other the second: seven eighths of the exchanges are saved.  Then four warps.
    """
    thread = fresh(thread)
    lane, warp = thread & 31, thread >> 5
    N = BLOCK_N // 4
    s = cuda.local.array(N, types.float32)
    for i in unrolled(N):
        AT = i // 2 * 4 + i % 2
        if HALVES == 2:
            s[i] = acc[AT] + acc[AT + 2 * N]
        else:
            s[i] = acc[AT]
    for bit in unrolled(3):
        HALF = N >> (bit + 1)
        upper = (lane & (16 >> bit)) != 0
        for i in unrolled(HALF):
            kept = select(s[i + HALF], s[i], upper)
            given = select(s[i], s[i + HALF], upper)
            s[i] = kept + shuffle_xor(given, 16 >> bit)
    first = (lane >> 4) * (N // 2) + ((lane >> 3) & 1) * (N // 4) + ((lane >> 2) & 1) * (N // 8)
    stores_read(thread)
    group_barrier(1 + consumer, 128)
    for i in unrolled(N // 8):
        index = first + i
        column = (index >> 1) * 8 + (lane & 3) * 2 + (index & 1)
        shared_store_f32(shared + (warp * BLOCK_N + column) * 4, s[i])
    group_barrier(1 + consumer, 128)
    rows = (m + 64 * HALVES - 1) >> (5 + HALVES)  # 64 or 128 of them
    out = sums + (here.place * rows + (here.row0 >> (5 + HALVES))) * n * 4
    for i in unrolled((BLOCK_N + 127) // 128):
        column = thread + 128 * i
        at = shared + min(column, BLOCK_N - 1) * 4
        value = shared_load_f32(at)
        for w in unrolled(1, 4):
            value += shared_load_f32(at + w * BLOCK_N * 4)
        inside = (column < BLOCK_N) & (here.column0 + column < n) & (here.row0 < m)
        global_store_f32(out + (here.column0 + column) * 4, value, inside)
    copy_fence()  # the copy engine writes the buffers next
    group_barrier(1 + consumer, 128)
