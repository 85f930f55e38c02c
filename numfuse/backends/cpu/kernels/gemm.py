"""The GEMM cell, as a template: blocks, panels and tiles, and what is fetched behind them.

The arithmetic of a cell is its micro-kernel's; everything else has to happen between two tiles
without keeping the core waiting for memory.  So the next block of B is packed in slices between the
tiles of this one, the epilogue's rows are spread over the tiles of the next strip, and all that
these will touch is asked for ahead of time by the micro-kernel: nine streams of requests, one
request a rank-1 update, which fit beside the stream of B from level 2 (a burst of them does not).

Kernels trust the descriptor: every check has been made in `numfuse.problem.product`.  Free names in
UPPER case are bound by `numfuse.runtime.specialise`.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def gemm_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One cell of ``row(sum_s sum_p A[i, p] B[p, j])``.

    The K loop is blocked by KC, inside the loop over summed batch axes.  A packed block of B
    (KC x NC; a B with few rows of A to serve is read in place) stays in the level-2 cache while all
    rows of the cell pass it, one packed panel of A (MR x KC) at a time; the panels are kept for the
    cell's further blocks of columns.  The tiles of the last K block go to a strip of MR rows (two
    by turns), whose epilogue runs row by row between the tiles of the next strip; those of the
    blocks before it to a plane of tiles.
    """
    d = WORDS(descriptor)
    batch, i0, i1, j0, j1 = CELL(descriptor, cell)
    context = workspace
    OPEN_UNIT(context + 8 * STREAM_TABLE)
    a_base, b_base = OPEN_CONTEXT(descriptor, batch, context)
    k, kc, nc = d[D_K], d[D_KC], d[D_NC]
    strips, strip_stride = workspace + d[D_STRIP], d[D_STRIP_STRIDE]
    plane_row = (j1 - j0 + NR - 1) // NR * TILE
    b_k, b_column = d[D_B_K], d[D_B_COLUMN]
    direct = d[D_B_DIRECT] != 0
    blocks = d[D_SUM_SIZE] * ((k + kc - 1) // kc) * ((j1 - j0 + nc - 1) // nc)
    if blocks == 0:
        # An empty sum is zero, and its epilogue still runs.
        zeros = SUMS(strips)
        for q in range(min(nc, j1 - j0)):
            zeros[q] = ZERO
        for jc in range(j0, j1, nc):
            for i in range(i0, i1):
                CALL_ROW(d[D_ROW], context, strips, i, jc, min(nc, j1 - jc))
    for t in range(blocks):
        REST(context)
        s, pc, jc = PLACE(descriptor, t, j0, j1)
        depth, columns = min(kc, k - pc), min(nc, j1 - jc)
        tiles = (columns + NR - 1) // NR
        steps = (depth + K_STEP - 1) // K_STEP
        requests = max(1, steps * REQUESTS // STREAM_COUNT)  # of a stream in a tile
        a_at, b_at = SUM_OFFSETS(
            descriptor, s, a_base + pc * d[D_A_K], b_base + pc * b_k + jc * b_column
        )
        packed_b = workspace + d[D_BLOCK] + t % 2 * d[D_BLOCK_STRIDE]
        b_panel = steps * K_STEP * WIDTH * FACTOR + LINE
        first = s == 0 and pc == 0
        last = s == d[D_SUM_SIZE] - 1 and pc + depth == k
        packed = jc > j0 and d[D_PANELS] * HEIGHT >= i1 - i0
        # Where B is read in place, only a last narrow panel is packed: a micro-kernel reads whole
        # vectors.
        in_place = columns // NR if direct else 0
        if (direct or t == 0) and in_place < tiles:
            at, narrow = b_at + in_place * NR * b_column, columns - in_place * NR
            CALL_PACK_B(d[D_PACK_B], at, b_k, b_column, narrow, depth, packed_b, b_panel)
        count = (i1 - i0 + MR - 1) // MR * tiles
        PLAN_AHEAD(descriptor, workspace, b_base, t + 1, blocks, j0, j1, count, requests)
        row_requests = max(1, requests * tiles // MR)
        before, waiting, row, credit = strips, 0, 0, 0  # rows whose epilogue has not run yet
        for i in range(i0, i1, MR):
            index = (i - i0) // MR
            panel = PANEL(descriptor, context, a_at, i, i0, i1, depth, packed, tiles, requests)
            tile_at = workspace + d[D_PLANE] + index * plane_row + (jc - j0) // NR * TILE
            if not first:
                share = TILE // requests
                ASK(context, FOR_PLANE, tile_at + TILE, share)
                ASK(context, FOR_PLANE + 1, tile_at + TILE + share // 2, share)
            strip = strips + index % 2 * MR * strip_stride
            for tile in range(tiles):
                j = tile * NR
                if tile < in_place:
                    b_tile, b_step, b_next = b_at + j * SIZE, b_k, WIDTH * SIZE
                else:
                    b_tile = packed_b + (tile - in_place) * ACROSS * b_panel
                    b_step, b_next = WIDTH * SIZE, b_panel
                if not packed:
                    ASK_PANELS(descriptor, context, a_at, i + MR, i1, depth, tile, requests)
                ASK_B(context)
                if direct and i == i0:
                    ASK_PANEL(context, b_at + (j + NR) * b_column, b_k, requests)
                MICROKERNEL(
                    min(MR, i1 - i),
                    columns - j,
                    steps,
                    panel,
                    d[D_PANEL_STRIDE],
                    b_tile,
                    b_step,
                    b_next,
                    tile_at,
                    NR * SIZE,
                    strip + j * SIZE if last else tile_at,
                    strip_stride if last else NR * SIZE,
                    first,
                    context + 8 * STREAM_TABLE,
                )
                tile_at += TILE
                credit += waiting
                while credit >= tiles:
                    credit -= tiles
                    at = i - waiting + row
                    CALL_ROW(d[D_ROW], context, before + row * strip_stride, at, jc, columns)
                    row += 1
                    ASK_ROW(descriptor, context, at + 1, jc, columns, row_requests)
                PACK_AHEAD(descriptor, context)
                if d[D_GROUP] > 1 and not packed:
                    PACK_SLICE(descriptor, context)
            if direct and i == i0:
                REST(context)
            before, waiting, row, credit = strip, min(MR, i1 - i) if last else 0, 0, 0
            if last:
                ASK_ROW(descriptor, context, i, jc, columns, row_requests)
        for r in range(waiting):
            CALL_ROW(d[D_ROW], context, before + r * strip_stride, i1 - waiting + r, jc, columns)
    CLOSE_UNIT(context)


def panel(
    descriptor: int,
    context: int,
    a_at: int,
    i: int,
    i0: int,
    i1: int,
    depth: int,
    packed: bool,
    tiles: int,
    requests: int,
) -> int:
    """Address of the panel of A from row i on, packed; the next ones are asked for.

    By columns, panels are packed by groups, all but the first behind the tiles of the group before;
    by rows, a panel's source is at hand when its turn comes.
    """
    d = WORDS(descriptor)
    panels, stride, group = context + d[D_PANEL], d[D_PANEL_STRIDE], d[D_GROUP]
    index = (i - i0) // MR
    found = panels + index * DOWN % d[D_PANELS] * stride
    if packed:
        half = (depth + K_STEP - 1) // K_STEP * K_STEP * PANEL_ROWS * FACTOR * DOWN // 2
        share = half // (tiles * requests) + 1
        ASK(context, FOR_A, found + DOWN * stride, share)
        ASK(context, FOR_A + 1, found + DOWN * stride + half, share)
    elif index % group == 0:
        a_row, rows = d[D_A_ROW], group * MR
        if group > 1 and i > i0:
            PACK_GROUP(descriptor, context, depth)
        else:
            at, count = a_at + i * a_row, min(rows, i1 - i)
            CALL_PACK_A(d[D_PACK_A], at, a_row, d[D_A_K], count, depth, found, stride)
        target = panels + (index + group) * DOWN % d[D_PANELS] * stride
        ASK(context, FOR_PANELS, target, DOWN * stride // (tiles * requests) + 1)
        if group > 1:
            source, count = a_at + (i + rows) * a_row, min(rows, i1 - i - rows)
            PLAN_GROUP(context, source, target, count, depth, group * tiles)
    return found


def ask_panels(
    descriptor: int, context: int, a_at: int, i: int, i1: int, depth: int, tile: int, requests: int
) -> None:
    """Ask for what is packed next of A: columns of the next group, or rows from i on."""
    d = WORDS(descriptor)
    a_row, a_k = d[D_A_ROW], d[D_A_K]
    if d[D_GROUP] > 1:
        ASK_GROUP(context, a_row, a_k, requests)
    else:
        ASK_A(context, a_at + i * a_row, a_row, a_k, min(MR, i1 - i), depth, tile, requests)


def place(descriptor: int, t: int, j0: int, j1: int) -> tuple[int, int, int]:
    """Block t of a cell's B: the number of its summed product, its first k, its first column."""
    d = WORDS(descriptor)
    kc, nc = d[D_KC], d[D_NC]
    k_blocks, column_blocks = (d[D_K] + kc - 1) // kc, (j1 - j0 + nc - 1) // nc
    step = t // column_blocks
    return step // k_blocks, step % k_blocks * kc, j0 + t % column_blocks * nc


def sum_offsets(descriptor: int, s: int, a: int, b: int) -> tuple[int, int]:
    """Addresses of A and B advanced to product s of the summed batch axes."""
    d = WORDS(descriptor)
    slots = d[D_SLOT_COUNT]
    axes = D_SLOTS + 3 * slots + d[D_BATCH_AXES] * (3 + slots)
    for axis in range(d[D_SUM_AXES] - 1, -1, -1):
        word = axes + 3 * axis
        index = s % d[word]
        s = s // d[word]
        a += index * d[word + 1]
        b += index * d[word + 2]
    return a, b
