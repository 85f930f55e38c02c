"""The kernels of the CPU backend, as templates: one GEMM cell, one elementwise cell, row functions.

A *cell* is a rectangle of the output; any thread may compute any cell, and a cell's result does
not depend on who does.  A *row function* is an epilogue: accumulator row in, results out.  The
cell calls packing and row functions by address, so that one compiled GEMM per accumulator dtype
serves every storage dtype, layout and activation, and a new activation costs one small function.

A launch is described by int64 words (`DESCRIPTOR`); a cell turns the part of it that depends on
the batch element into a *context* for its row functions.  Kernels trust the descriptor: every
check has been made in `numfuse.problem`.

Free names in UPPER case are bound by `numfuse.specialise`.
"""

from __future__ import annotations

from typing import Any

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Word numbers of the descriptor.  Strides are bytes.
DESCRIPTOR = {
    name: index
    for index, name in enumerate(
        [
            "D_M",
            "D_N",
            "D_K",
            "D_KC",
            "D_NC",
            "D_CELL_M",
            "D_CELL_N",
            "D_CELLS_M",
            "D_CELLS_N",
            "D_PACK_A",
            "D_PACK_B",
            "D_ROW",
            "D_BATCH_AXES",
            "D_SUM_AXES",
            "D_SUM_SIZE",
            "D_A",
            "D_A_ROW",
            "D_A_K",
            "D_B",
            "D_B_K",
            "D_B_COLUMN",
            "D_OBJECTS",
            "D_B_DIRECT",
            "D_PANEL",
            "D_PANEL_STRIDE",
            "D_PANELS",
            "D_GROUP",
            "D_BLOCK",
            "D_PLANE",
            "D_PLANE_STRIDE",
            "D_SCRATCH",
            "D_SCRATCH_STRIDE",
        ]
    )
}
#: Operands of a row function: three words each (address, row stride, column stride).
SLOTS = {
    name: index
    for index, name in enumerate(
        ["S_BIAS", "S_EXTRA", "S_GRAD", "S_OUT", "S_PRE", "S_SUMS", "S_A", "S_B"]
    )
}
SLOT_COUNT = len(SLOTS)
D_SLOTS = len(DESCRIPTOR)
#: After the slots: per batch axis its size and the strides of A, B and every slot, then per
#: summed axis its size and the strides of A and B.
D_AXES = D_SLOTS + 3 * SLOT_COUNT
AXIS_WORDS = 3 + SLOT_COUNT
#: Context words: the slots, then the address and stride of the scratch rows.
C_SCRATCH = 3 * SLOT_COUNT
C_SCRATCH_STRIDE = C_SCRATCH + 1
CONTEXT_BYTES = 512


def gemm_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One cell of ``row(sum_s sum_p A[i, p] B[p, j])``.

    The K loop is blocked by KC, inside the loop over summed batch axes.  A packed block of B
    (KC x NC; a B with few rows of A to serve is read in place) stays in the level-2 cache while all
    rows of the cell pass it, one packed panel of A (MR x KC, level 1) at a time; the panels are
    kept for the cell's further blocks of columns.
    With a single K block the accumulator is a strip of MR rows (two by turns); otherwise it is a
    plane of the whole cell.  Either way a row's epilogue runs soon after its last K block, while
    the row is in cache: one row between two tiles of the next strip, so that its stores, which wait
    for memory, drain behind arithmetic.
    """
    d = WORDS(descriptor)
    m, n, k = d[D_M], d[D_N], d[D_K]
    kc, nc = d[D_KC], d[D_NC]
    cells_n = d[D_CELLS_N]
    per_batch = d[D_CELLS_M] * cells_n
    batch = cell // per_batch
    place = cell - batch * per_batch
    i0 = (place // cells_n) * d[D_CELL_M]
    j0 = (place % cells_n) * d[D_CELL_N]
    i1 = min(m, i0 + d[D_CELL_M])
    j1 = min(n, j0 + d[D_CELL_N])

    context = workspace
    a_base, b_base = OPEN_CONTEXT(descriptor, batch, context)
    panels = workspace + d[D_PANEL]
    panel_stride, panel_count, group = d[D_PANEL_STRIDE], d[D_PANELS], d[D_GROUP]
    kept = panel_count * MR >= i1 - i0
    block = workspace + d[D_BLOCK]
    plane = workspace + d[D_PLANE]
    plane_stride = d[D_PLANE_STRIDE]
    a_row, a_k = d[D_A_ROW], d[D_A_K]
    b_k, b_column = d[D_B_K], d[D_B_COLUMN]
    direct = d[D_B_DIRECT] != 0
    sum_size = d[D_SUM_SIZE]
    single = sum_size == 1 and k <= kc
    rows_in_memory = a_k <= LINE and a_k >= -LINE
    axes = D_AXES + d[D_BATCH_AXES] * AXIS_WORDS
    before = plane

    if k * sum_size == 0:
        # An empty sum is zero, and its epilogue still runs.
        zeros = SUMS(plane)
        for q in range(min(nc, j1 - j0)):
            zeros[q] = ZERO
        for jc in range(j0, j1, nc):
            for i in range(i0, i1):
                CALL_ROW(d[D_ROW], context, plane, i, jc, min(nc, j1 - jc))
        return

    for s in range(sum_size):
        a_at, b_at = a_base, b_base
        rest = s
        for axis in range(d[D_SUM_AXES] - 1, -1, -1):
            word = axes + 3 * axis
            index = rest % d[word]
            rest = rest // d[word]
            a_at += index * d[word + 1]
            b_at += index * d[word + 2]
        for pc in range(0, k, kc):
            depth = min(kc, k - pc)
            first = s == 0 and pc == 0
            b_panel = depth * NR * SIZE + LINE
            last = s == sum_size - 1 and pc + depth == k
            for jc in range(j0, j1, nc):
                columns = min(nc, j1 - jc)
                tiles = (columns + NR - 1) // NR
                packed = jc > j0 and kept
                b_here = b_at + pc * b_k + jc * b_column
                # Where B is read in place, only a last narrow panel is packed: a micro-kernel
                # reads whole vectors.
                in_place = columns // NR if direct else 0
                if in_place < tiles:
                    CALL_PACK_B(
                        d[D_PACK_B],
                        b_here + in_place * NR * b_column,
                        b_k,
                        b_column,
                        columns - in_place * NR,
                        depth,
                        block,
                        b_panel,
                    )
                waiting = 0  # rows of the strip before, whose epilogue has not run yet
                for i in range(i0, i1, MR):
                    rows = min(MR, i1 - i)
                    index = (i - i0) // MR
                    panel = panels + index % panel_count * panel_stride
                    # What comes next is asked for while tiles keep the core busy with data in
                    # cache: tile t brings its share of the next panel of A, if it is packed
                    # already, or row t of its source.
                    if packed or (index + 1) % group != 0:
                        share = depth * MR * SIZE // tiles
                        ahead, ahead_step, shares = panel + panel_stride, share // depth, tiles
                    else:
                        share = a_row
                        ahead, ahead_step = a_at + (i + MR) * a_row + pc * a_k, a_k
                        shares = min(MR, i1 - i - MR) if rows_in_memory else 0
                    if not packed and index % group == 0:
                        CALL_PACK_A(
                            d[D_PACK_A],
                            a_at + i * a_row + pc * a_k,
                            a_row,
                            a_k,
                            min(group * MR, i1 - i),
                            depth,
                            panel,
                            panel_stride,
                        )
                    if single:
                        strip = plane + (i - i0) // MR % 2 * MR * plane_stride
                    else:
                        strip = plane + (i - i0) * plane_stride + (jc - j0) * SIZE
                    for tile in range(tiles):
                        j = tile * NR
                        more = tile < shares
                        if tile < in_place:
                            b_tile, b_step = b_here + j * SIZE, b_k
                        else:
                            b_tile, b_step = block + (tile - in_place) * b_panel, NR * SIZE
                        MICROKERNEL(
                            rows,
                            columns - j > VL,
                            depth,
                            panel,
                            b_tile,
                            b_step,
                            strip + j * SIZE,
                            plane_stride,
                            first,
                            ahead + tile * share if more else panel,
                            ahead_step if more else 0,
                        )
                        # One row of the strip before: its stores drain during the next tile.
                        if tile < waiting:
                            CALL_ROW(
                                d[D_ROW],
                                context,
                                before + tile * plane_stride,
                                i - waiting + tile,
                                jc,
                                columns,
                            )
                    for r in range(tiles, waiting):
                        CALL_ROW(
                            d[D_ROW],
                            context,
                            before + r * plane_stride,
                            i - waiting + r,
                            jc,
                            columns,
                        )
                    before = strip
                    waiting = rows if last else 0
                for r in range(waiting):
                    CALL_ROW(
                        d[D_ROW], context, before + r * plane_stride, i1 - waiting + r, jc, columns
                    )


def elementwise_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One cell of an operation without a product: its row function over the cell's rows."""
    d = WORDS(descriptor)
    cells_n = d[D_CELLS_N]
    per_batch = d[D_CELLS_M] * cells_n
    batch = cell // per_batch
    place = cell - batch * per_batch
    i0 = (place // cells_n) * d[D_CELL_M]
    j0 = (place % cells_n) * d[D_CELL_N]
    i1 = min(d[D_M], i0 + d[D_CELL_M])
    j1 = min(d[D_N], j0 + d[D_CELL_N])
    OPEN_CONTEXT(descriptor, batch, workspace)
    for jc in range(j0, j1, d[D_NC]):
        columns = min(d[D_NC], j1 - jc)
        for i in range(i0, i1):
            CALL_ROW(d[D_ROW], workspace, 0, i, jc, columns)


def open_context(descriptor: int, batch: int, context: int) -> tuple[int, int]:
    """Write the context of one batch element; return its addresses of A and B."""
    d = WORDS(descriptor)
    c = WORDS(context)
    for word in range(3 * SLOT_COUNT):
        c[word] = d[D_SLOTS + word]
    c[C_SCRATCH] = context + d[D_SCRATCH]
    c[C_SCRATCH_STRIDE] = d[D_SCRATCH_STRIDE]
    a, b = d[D_A], d[D_B]
    rest = batch
    for axis in range(d[D_BATCH_AXES] - 1, -1, -1):
        word = D_AXES + axis * AXIS_WORDS
        index = rest % d[word]
        rest = rest // d[word]
        a += index * d[word + 1]
        b += index * d[word + 2]
        for slot in range(SLOT_COUNT):
            c[3 * slot] += index * d[word + 3 + slot]
    return a, b


# Rows of operands.  A row function sees contiguous rows only: a row of any other stride goes
# through a scratch row, so that the loops with the arithmetic in them always vectorise.


def source_row(context: int, slot: int, i: int, j: int, n: int, item: int) -> int:
    """Address of ``operand[i, j:j + n]`` as contiguous elements of `item` bytes."""
    c = WORDS(context)
    step = c[3 * slot + 2]
    address = c[3 * slot] + i * c[3 * slot + 1] + j * step
    if step == item:
        return address
    scratch = c[C_SCRATCH] + slot * c[C_SCRATCH_STRIDE]
    MOVE(address, step, scratch, item, n, item)
    return scratch


def target_row(context: int, slot: int, i: int, j: int, item: int) -> int:
    """Where to write ``operand[i, j:]`` as contiguous elements of `item` bytes."""
    c = WORDS(context)
    step = c[3 * slot + 2]
    if step == item:
        return c[3 * slot] + i * c[3 * slot + 1] + j * step
    return c[C_SCRATCH] + slot * c[C_SCRATCH_STRIDE]


def finish_row(context: int, slot: int, i: int, j: int, n: int, item: int) -> None:
    """Scatter a written scratch row to its place; nothing for a contiguous operand."""
    c = WORDS(context)
    step = c[3 * slot + 2]
    if step != item:
        address = c[3 * slot] + i * c[3 * slot + 1] + j * step
        MOVE(c[C_SCRATCH] + slot * c[C_SCRATCH_STRIDE], item, address, step, n, item)


def move(source: int, source_step: int, target: int, target_step: int, n: int, item: int) -> None:
    """Copy `n` elements of 2, 4 or 8 bytes between any two strides, bit by bit."""
    if item == 4:
        for q in range(n):
            BITS32(target + q * target_step)[0] = BITS32(source + q * source_step)[0]
    elif item == 8:
        for q in range(n):
            BITS64(target + q * target_step)[0] = BITS64(source + q * source_step)[0]
    else:
        for q in range(n):
            BITS16(target + q * target_step)[0] = BITS16(source + q * source_step)[0]


# Row functions: (context, accumulator row, row i, first column j, columns n).


def store_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = acc``"""
    WIDE_VECTORS()
    x = SUMS(acc)
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    for q in range(n):
        out[q] = NARROW(x[q])
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)


def forward_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``pre = acc + bias + residual; out = act(pre)``"""
    WIDE_VECTORS()
    x = SUMS(acc)
    # An operand that is absent is never read: its slot stands for any valid address.
    bias = STORED(SOURCE_ROW(context, S_BIAS, i, j, n, ITEM) if HAS_BIAS else acc)
    residual = STORED(SOURCE_ROW(context, S_EXTRA, i, j, n, ITEM) if HAS_RESIDUAL else acc)
    pre = SUMS(TARGET_ROW(context, S_PRE, i, j, SIZE) if HAS_PRE else acc)
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    for q in range(n):
        value = x[q]
        if HAS_BIAS:
            value = value + WIDEN(bias[q])
        if HAS_RESIDUAL:
            value = value + WIDEN(residual[q])
        if HAS_PRE:
            pre[q] = value
        out[q] = NARROW(ACT(value))
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)
    if HAS_PRE:
        FINISH_ROW(context, S_PRE, i, j, n, SIZE)


def grad_pre_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``grad_pre = grad * act'(pre)``, pre = acc + bias or saved; d_bias partials by chunk.

    The column sums of a chunk of CHUNK rows are one row of partials: rows of a chunk are always
    visited in order by one thread, so the sum does not depend on the number of threads.
    """
    WIDE_VECTORS()
    x = SUMS(SOURCE_ROW(context, S_EXTRA, i, j, n, SIZE) if HAS_SAVED else acc)
    bias = STORED(SOURCE_ROW(context, S_BIAS, i, j, n, ITEM) if HAS_BIAS else acc)
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    out = SUMS(TARGET_ROW(context, S_OUT, i, j, SIZE) if HAS_OUT else acc)
    if HAS_SUMS:
        sums = SUMS(TARGET_ROW(context, S_SUMS, i // CHUNK, j, SIZE))
        if i % CHUNK == 0:
            for q in range(n):
                sums[q] = ZERO
        for q in range(n):
            value = x[q]
            if HAS_BIAS:
                value = value + WIDEN(bias[q])
            # Rounded before it is summed, with grad_pre stored or not: the same bits either way.
            value = ROUNDED_PRODUCT(WIDEN(grad[q]), SLOPE(value))
            if HAS_OUT:
                out[q] = value
            sums[q] = sums[q] + value
    else:
        for q in range(n):
            value = x[q]
            if HAS_BIAS:
                value = value + WIDEN(bias[q])
            out[q] = WIDEN(grad[q]) * SLOPE(value)


def column_sums_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """The partials of d_bias alone, where grad_pre is grad itself."""
    WIDE_VECTORS()
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    sums = SUMS(TARGET_ROW(context, S_SUMS, i // CHUNK, j, SIZE))
    if i % CHUNK == 0:
        for q in range(n):
            sums[q] = ZERO
    for q in range(n):
        sums[q] = sums[q] + WIDEN(grad[q])


def guarded_slope(x: Any) -> Any:
    """``act'(x)``; a non-finite one counts as zero where GUARD is bound to True."""
    slope = DERIVATIVE(x)
    if GUARD:
        return slope if IS_FINITE(slope) else ZERO
    return slope


def value_and_slope(x: Any) -> Any:
    """``act(x)`` and the guarded ``act'(x)``, which share what they have in common."""
    value, slope = DERIVATIVE(x)
    if GUARD:
        return value, (slope if IS_FINITE(slope) else ZERO)
    return value, slope


def gated_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = act(a) * b``"""
    WIDE_VECTORS()
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    for q in range(n):
        out[q] = NARROW(ACT(WIDEN(a[q])) * WIDEN(b[q]))
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)


def gated_backward_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``d_a = grad * b * act'(a)``, ``d_b = grad * act(a)``"""
    WIDE_VECTORS()
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    d_a = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    d_b = STORED(TARGET_ROW(context, S_EXTRA, i, j, ITEM))
    for q in range(n):
        g = WIDEN(grad[q])
        value, slope = BOTH(WIDEN(a[q]))
        d_a[q] = NARROW(g * WIDEN(b[q]) * slope)
        d_b[q] = NARROW(g * value)
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)
    FINISH_ROW(context, S_EXTRA, i, j, n, ITEM)


def gated_d_a_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``d_a = grad * b * act'(a)``"""
    WIDE_VECTORS()
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    d_a = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    for q in range(n):
        d_a[q] = NARROW(WIDEN(grad[q]) * WIDEN(b[q]) * SLOPE(WIDEN(a[q])))
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)


def gated_d_b_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``d_b = grad * act(a)``"""
    WIDE_VECTORS()
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    d_b = STORED(TARGET_ROW(context, S_EXTRA, i, j, ITEM))
    for q in range(n):
        d_b[q] = NARROW(WIDEN(grad[q]) * ACT(WIDEN(a[q])))
    FINISH_ROW(context, S_EXTRA, i, j, n, ITEM)


def peak_loop(repeats: int, k: int, a: int, b: int, c: int, ldc: int) -> None:
    """The micro-kernel over and over on panels in level 1: the FMA peak that can be had."""
    for _ in range(repeats):
        MICROKERNEL(MR, 1, k, a, b, NR * SIZE, c, ldc, 1, a, 0)
