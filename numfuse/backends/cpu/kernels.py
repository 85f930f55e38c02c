"""The elementwise cell and the row functions of the CPU backend, as templates.

A *cell* is a rectangle of the output; any thread may compute any cell, and a cell's result does
not depend on who does.  A *row function* is an epilogue: accumulator row in, results out.  The
cells call row functions by address, so that one compiled GEMM per accumulator dtype
serves every storage dtype, layout and activation, and a new activation costs one small function.

Kernels trust the descriptor: every check has been made in `numfuse.problem`.  Free names in UPPER
case are bound by `numfuse.specialise`.
"""

from __future__ import annotations

from typing import Any

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
    total = TOTALS(c[C_SCRATCH])
    lost = TOTALS(c[C_SCRATCH] + c[C_SCRATCH_STRIDE])
    sums, out, earlier, later = 3 * S_SUMS, 3 * S_OUT, 3 * S_EXTRA, 3 * S_PRE
    for jc in range(j0, j1, d[D_NC]):
        columns = min(d[D_NC], j1 - jc)
        if c[earlier] != 0:
            known = TOTALS(c[earlier] + jc * 8)
            known_lost = TOTALS(c[earlier] + c[earlier + 1] + jc * 8)
            for q in range(columns):
                total[q] = known[q]
                lost[q] = known_lost[q]
        else:
            for q in range(columns):
                total[q] = ZERO
                lost[q] = ZERO
        for i in range(d[D_K]):
            partial = SUMS(c[sums] + i * c[sums + 1] + jc * SIZE)
            for q in range(columns):
                # Knuth's exact sum of two numbers, in any order of size
                before, value = total[q], WIDEN(partial[q])
                after = before + value
                added = after - before
                total[q] = after
                lost[q] = lost[q] + ((before - (after - added)) + (value - added))
        if c[later] != 0:
            kept = TOTALS(c[later] + jc * 8)
            kept_lost = TOTALS(c[later] + c[later + 1] + jc * 8)
            for q in range(columns):
                kept[q] = total[q]
                kept_lost[q] = lost[q]
        else:
            for q in range(columns):
                # Beside an infinity there is no error to speak of, and inf - inf would be NaN.
                value = total[q] + (lost[q] if IS_FINITE(lost[q]) else ZERO)
                STORED(c[out] + (jc + q) * c[out + 2])[0] = NARROW(ROUND(value))


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


def copy_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = extra``, which may be stored in another format of the same accumulator."""
    WIDE_VECTORS()
    x = SOURCE(SOURCE_ROW(context, S_EXTRA, i, j, n, SOURCE_SIZE))
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    for q in range(n):
        out[q] = NARROW(WIDEN_SOURCE(x[q]))
    FINISH_ROW(context, S_OUT, i, j, n, ITEM)


def add_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out += acc``, `out` in the accumulator's dtype: a product summed over blocks of rows."""
    WIDE_VECTORS()
    x = SUMS(acc)
    out = SUMS(SOURCE_ROW(context, S_OUT, i, j, n, SIZE))
    for q in range(n):
        out[q] = out[q] + x[q]
    FINISH_ROW(context, S_OUT, i, j, n, SIZE)


def add_and_store_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = extra + acc``: the last block of such a sum, rounded to a half type."""
    WIDE_VECTORS()
    x = SUMS(acc)
    total = SUMS(SOURCE_ROW(context, S_EXTRA, i, j, n, SIZE))
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    for q in range(n):
        out[q] = NARROW(total[q] + x[q])
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


def open_sums(context: int, i: int, j: int, n: int) -> int:
    """Address of the column sums to which row i belongs, ready to be added to.

    A chunk of CHUNK rows has two rows of partials: the sums of the latest RUN rows, and those of
    the runs before them.  So no chain of additions is longer than a run, or than a chunk has runs.
    """
    place = i % CHUNK
    sums = TARGET_ROW(context, S_SUMS, i // CHUNK * 2, j, SIZE)
    if place % RUN == 0:
        before = SUMS(TARGET_ROW(context, S_SUMS, i // CHUNK * 2 + 1, j, SIZE))
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


def grad_pre_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``grad_pre = grad * act'(pre)``, pre = acc + bias or saved; d_bias partials by chunk.

    Rows of a chunk are always visited in order by one thread, so its column sums do not depend on
    the number of threads.
    """
    WIDE_VECTORS()
    x = SUMS(SOURCE_ROW(context, S_EXTRA, i, j, n, SIZE) if HAS_SAVED else acc)
    bias = STORED(SOURCE_ROW(context, S_BIAS, i, j, n, ITEM) if HAS_BIAS else acc)
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    out = OUT(TARGET_ROW(context, S_OUT, i, j, OUT_SIZE) if HAS_OUT else acc)
    if HAS_SUMS:
        sums = SUMS(OPEN_SUMS(context, i, j, n))
        for q in range(n):
            value = x[q]
            if HAS_BIAS:
                value = value + WIDEN(bias[q])
            # Rounded before it is summed, with grad_pre stored or not: the same bits either way.
            value = ROUNDED_PRODUCT(WIDEN(grad[q]), SLOPE(value))
            if HAS_OUT:
                out[q] = STORE(value)
            sums[q] = sums[q] + value
    else:
        for q in range(n):
            value = x[q]
            if HAS_BIAS:
                value = value + WIDEN(bias[q])
            out[q] = STORE(WIDEN(grad[q]) * SLOPE(value))


def column_sums_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """The partials of d_bias alone, where grad_pre is grad itself."""
    WIDE_VECTORS()
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    sums = SUMS(OPEN_SUMS(context, i, j, n))
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


def gated_value(a: Any, b: Any) -> Any:
    """``act(a) * b``, of stored elements."""
    return NARROW(ACT(WIDEN(a)) * WIDEN(b))


def gated_gradients(grad: Any, a: Any, b: Any) -> Any:
    """``grad * b * act'(a)`` and ``grad * act(a)``, of stored elements."""
    g = WIDEN(grad)
    value, slope = BOTH(WIDEN(a))
    return NARROW(g * WIDEN(b) * slope), NARROW(g * value)


def gated_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = act(a) * b``"""
    WIDE_VECTORS()
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    out = STORED(TARGET_ROW(context, S_OUT, i, j, ITEM))
    for q in range(n):
        out[q] = GATED_VALUE(a[q], b[q])
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
        d_a[q], d_b[q] = GATED_GRADIENTS(grad[q], a[q], b[q])
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


# The same past the caches: results begin on a line, and n is a multiple of STEP.  A step goes to a
# few registers first: LLVM makes vectors of the loop over them, and non-temporal stores need whole
# ones.  Spread between the arithmetic, the stores wait for memory while it goes on; copied from a
# finished row they would not.


def gated_stream_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``out = act(a) * b``"""
    WIDE_VECTORS()
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    out = TARGET_ROW(context, S_OUT, i, j, ITEM)
    results = RESULTS()
    for at in range(0, n, STEP):
        for q in range(STEP):
            results[q] = GATED_VALUE(a[at + q], b[at + q])
        STREAM(results, out + at * ITEM)


def gated_backward_stream_row(context: int, acc: int, i: int, j: int, n: int) -> None:
    """``d_a = grad * b * act'(a)``, ``d_b = grad * act(a)``"""
    WIDE_VECTORS()
    grad = STORED(SOURCE_ROW(context, S_GRAD, i, j, n, ITEM))
    a = STORED(SOURCE_ROW(context, S_A, i, j, n, ITEM))
    b = STORED(SOURCE_ROW(context, S_B, i, j, n, ITEM))
    d_a = TARGET_ROW(context, S_OUT, i, j, ITEM)
    d_b = TARGET_ROW(context, S_EXTRA, i, j, ITEM)
    first, second = RESULTS(), RESULTS()
    for at in range(0, n, STEP):
        for q in range(STEP):
            first[q], second[q] = GATED_GRADIENTS(grad[at + q], a[at + q], b[at + q])
        STREAM(first, d_a + at * ITEM)
        STREAM(second, d_b + at * ITEM)
