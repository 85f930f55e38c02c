"""The elementwise cell, and what row functions share, as templates.

A *cell* is a rectangle of the output; any thread may compute any cell, and a cell's result does
not depend on who does.  A *row function* (`rows`) is an epilogue: accumulator row in, results out.

Kernels trust the descriptor: every check has been made in `numfuse.problem.product`.  Free names in
UPPER case are bound by `numfuse.runtime.specialise`.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def cell_of(descriptor: int, cell: int) -> tuple[int, int, int, int, int]:
    """Cell number `cell`: its batch element, first and end row, first and end column."""
    d = WORDS(descriptor)
    cells_n = d[D_CELLS_N]
    per_batch = d[D_CELLS_M] * cells_n
    batch = cell // per_batch
    place = cell - batch * per_batch
    i0 = (place // cells_n) * d[D_CELL_M]
    j0 = (place % cells_n) * d[D_CELL_N]
    return batch, i0, min(d[D_M], i0 + d[D_CELL_M]), j0, min(d[D_N], j0 + d[D_CELL_N])


def elementwise_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One cell of an operation without a product: its row function over the cell's rows."""
    d = WORDS(descriptor)
    batch, i0, i1, j0, j1 = CELL(descriptor, cell)
    OPEN_CONTEXT(descriptor, batch, workspace)
    stream = d[D_STREAM]
    jc = j0
    while jc < j1:
        columns = min(d[D_NC], j1 - jc)
        if stream == 0:
            for i in range(i0, i1):
                CALL_ROW(d[D_ROW], workspace, 0, i, jc, columns)
        else:
            if jc + columns < j1:
                # Blocks of the first row end where a line of the result ends.
                columns -= BEFORE_LINE(descriptor, workspace, i0, jc + columns) % columns
            for i in range(i0, i1):
                STREAM_ROW(descriptor, workspace, i, jc, columns)
        jc += columns
    if stream != 0:
        FENCE()


def before_line(descriptor: int, context: int, i: int, j: int) -> int:
    """Elements from the last line boundary of the result's row `i` to its column `j`."""
    d = WORDS(descriptor)
    c = WORDS(context)
    address = c[3 * S_OUT] + i * c[3 * S_OUT + 1] + j * c[3 * S_OUT + 2]
    return (address & (LINE - 1)) // d[D_STREAM_ITEM]


def stream_row(descriptor: int, context: int, i: int, j: int, n: int) -> None:
    """Part of a row: whole lines of the results past the caches, the elements around them not.

    A second result (`S_EXTRA`) whose lines begin elsewhere makes all of it go the usual way.
    """
    d = WORDS(descriptor)
    c = WORDS(context)
    whole = 0
    head = -BEFORE_LINE(descriptor, context, i, j) & (LINE // d[D_STREAM_ITEM] - 1)
    second = c[3 * S_EXTRA] + i * c[3 * S_EXTRA + 1] + (j + head) * c[3 * S_EXTRA + 2]
    if head < n and (c[3 * S_EXTRA + 2] == 0 or second & (LINE - 1) == 0):
        whole = (n - head) // d[D_STREAM_STEP] * d[D_STREAM_STEP]
    if whole == 0:
        head = n
    if head > 0:
        CALL_ROW(d[D_ROW], context, 0, i, j, head)
    if whole > 0:
        CALL_ROW(d[D_STREAM], context, 0, i, j + head, whole)
    if head + whole < n:
        CALL_ROW(d[D_ROW], context, 0, i, j + head + whole, n - head - whole)


def narrow_sums_cell(descriptor: int, cell: int, workspace: int) -> None:
    """Write the partials of d_bias of chunks of few columns, as `open_sums` has them made by rows.

    A row function would take less time than its call.
    """
    c = WORDS(workspace)
    batch, i0, i1, j0, j1 = CELL(descriptor, cell)
    OPEN_CONTEXT(descriptor, batch, workspace)
    grad, sums = 3 * S_GRAD, 3 * S_SUMS
    for q in range(j0, j1):
        for first in range(i0, i1, CHUNK):
            end = min(first + CHUNK, i1)
            before, run = ZERO, ZERO
            for i in range(first, end, RUN):
                before, run = before + run, ZERO
                at = c[grad] + i * c[grad + 1] + q * c[grad + 2]
                for _ in range(i, min(i + RUN, end)):
                    run = run + SUMS(at)[0]
                    at += c[grad + 1]
            at = c[sums] + first // CHUNK * 2 * c[sums + 1] + q * c[sums + 2]
            SUMS(at)[0] = run
            SUMS(at + c[sums + 1])[0] = before


def join_cell(descriptor: int, cell: int, workspace: int) -> None:
    """Some columns of ``out = total + (sums[0] + sums[1] + ...)``: the partials of d_bias.

    Summed in float64 and in their order, whatever ran on how many threads, and the rounding error
    of every sum is summed as well: however many partials there are (D_K), as if there were two.
    `total` is the sum of blocks of rows before this one, if there are any, and its errors; where
    others follow there is no `out`, and both are written behind each other in place of it.
    """
    d = WORDS(descriptor)
    c = WORDS(workspace)
    batch, _, _, j0, j1 = CELL(descriptor, cell)
    OPEN_CONTEXT(descriptor, batch, workspace)
    sums = 3 * S_SUMS
    for jc in range(j0, j1, d[D_NC]):
        columns = min(d[D_NC], j1 - jc)
        OPEN_TOTALS(workspace, jc, columns)
        for i in range(d[D_K]):
            ADD_TO_TOTALS(workspace, c[sums] + i * c[sums + 1] + jc * SIZE, columns)
        CLOSE_TOTALS(workspace, jc, columns)


def total_cell(descriptor: int, cell: int, workspace: int) -> None:
    """``out = total + sums[0] + sums[1] + ...`` of one column, as `join_cell` has it.

    The partials, contiguous, are added to LANES sums by turns; these are added up in their order.
    """
    d = WORDS(descriptor)
    c = WORDS(workspace)
    batch, _, _, _, _ = CELL(descriptor, cell)
    OPEN_CONTEXT(descriptor, batch, workspace)
    OPEN_TOTALS(workspace, 0, 1)
    total = TOTALS(c[C_SCRATCH])
    lost = TOTALS(c[C_SCRATCH] + c[C_SCRATCH_STRIDE])
    for q in range(1, LANES):
        total[q] = ZERO
        lost[q] = ZERO
    for i in range(0, d[D_K], LANES):
        ADD_TO_TOTALS(workspace, c[3 * S_SUMS] + i * SIZE, min(LANES, d[D_K] - i))
    for q in range(1, LANES):
        lost[0] = lost[0] + lost[q] + LOST(total[0], total[q])
        total[0] = total[0] + total[q]
    CLOSE_TOTALS(workspace, 0, 1)


def lost_in(x: float, y: float) -> float:
    """Return what ``x + y`` loses: Knuth's exact sum of two numbers, in any order of size."""
    after = x + y
    added = after - x
    return (x - (after - added)) + (y - added)


def open_totals(context: int, j: int, n: int) -> None:
    """Begin n sums in float64 and what was lost in them: those before, or zero."""
    c = WORDS(context)
    earlier = 3 * S_EXTRA
    total = TOTALS(c[C_SCRATCH])
    lost = TOTALS(c[C_SCRATCH] + c[C_SCRATCH_STRIDE])
    if c[earlier] != 0:
        known = TOTALS(c[earlier] + j * 8)
        known_lost = TOTALS(c[earlier] + c[earlier + 1] + j * 8)
        for q in range(n):
            total[q] = known[q]
            lost[q] = known_lost[q]
    else:
        for q in range(n):
            total[q] = ZERO
            lost[q] = ZERO


def add_to_totals(context: int, row: int, n: int) -> None:
    """Add a row to the sums, and to what was lost what that loses."""
    c = WORDS(context)
    total = TOTALS(c[C_SCRATCH])
    lost = TOTALS(c[C_SCRATCH] + c[C_SCRATCH_STRIDE])
    partial = SUMS(row)
    for q in range(n):
        value = WIDEN(partial[q])
        lost[q] = lost[q] + LOST(total[q], value)
        total[q] = total[q] + value


def close_totals(context: int, j: int, n: int) -> None:
    """Write the sums: rounded, or with what was lost in them, for those that follow."""
    c = WORDS(context)
    out, later = 3 * S_OUT, 3 * S_PRE
    total = TOTALS(c[C_SCRATCH])
    lost = TOTALS(c[C_SCRATCH] + c[C_SCRATCH_STRIDE])
    if c[later] != 0:
        kept = TOTALS(c[later] + j * 8)
        kept_lost = TOTALS(c[later] + c[later + 1] + j * 8)
        for q in range(n):
            kept[q] = total[q]
            kept_lost[q] = lost[q]
    else:
        for q in range(n):
            # Beside an infinity there is no error to speak of, and inf - inf would be NaN.
            value = total[q] + (lost[q] if IS_FINITE(lost[q]) else ZERO)
            STORED(c[out] + (j + q) * c[out + 2])[0] = NARROW(ROUND(value))


def open_context(descriptor: int, batch: int, context: int) -> tuple[int, int]:
    """Write the context of one batch element; return its addresses of A and B."""
    d = WORDS(descriptor)
    c = WORDS(context)
    slots = d[D_SLOT_COUNT]
    for word in range(3 * slots):
        c[word] = d[D_SLOTS + word]
    c[C_SCRATCH] = context + d[D_SCRATCH]
    c[C_SCRATCH_STRIDE] = d[D_SCRATCH_STRIDE]
    a, b = d[D_A], d[D_B]
    rest = batch
    for axis in range(d[D_BATCH_AXES] - 1, -1, -1):
        word = D_SLOTS + 3 * slots + axis * (3 + slots)
        index = rest % d[word]
        rest = rest // d[word]
        a += index * d[word + 1]
        b += index * d[word + 2]
        for slot in range(slots):
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


def place_of(context: int, slot: int, i: int, j: int) -> int:
    """Address of ``operand[i, j]``."""
    c = WORDS(context)
    return c[3 * slot] + i * c[3 * slot + 1] + j * c[3 * slot + 2]


def open_sums(context: int, slot: int, i: int, j: int, n: int) -> int:
    """Address of the column sums to which row i belongs, ready to be added to.

    A chunk of CHUNK rows has two rows of partials: the sums of the latest RUN rows, and those of
    the runs before them.  So no chain of additions is longer than a run, or than a chunk has runs.
    """
    place = i % CHUNK
    sums = TARGET_ROW(context, slot, i // CHUNK * 2, j, SIZE)
    if place % RUN == 0:
        before = SUMS(TARGET_ROW(context, slot, i // CHUNK * 2 + 1, j, SIZE))
        run = SUMS(sums)
        if place == 0:
            for q in range(n):
                before[q] = ZERO
        else:
            for q in range(n):
                before[q] = before[q] + run[q]
        for q in range(n):
            run[q] = ZERO
    return sums


def scratch_row(context: int, slot: int) -> int:
    """Address of a slot's own contiguous row."""
    c = WORDS(context)
    return c[C_SCRATCH] + slot * c[C_SCRATCH_STRIDE]


def close_groups(context: int, slot: int, i: int, j: int, n: int) -> None:
    """Add up a written scratch row by groups of GROUP columns, one partial of row i for each.

    Blocks of columns begin with a group, so no sum depends on where they are cut.
    """
    c = WORDS(context)
    row = SCRATCH_ROW(context, slot)
    values = SUMS(row)
    for q in range(n, (n + GROUP - 1) // GROUP * GROUP):
        values[q] = ZERO
    target = c[3 * slot] + i * c[3 * slot + 1] + j // GROUP * c[3 * slot + 2]
    for q in range(0, n, GROUP):
        SUMS(target)[0] = GROUP_SUM(row + q * SIZE)
        target += c[3 * slot + 2]
