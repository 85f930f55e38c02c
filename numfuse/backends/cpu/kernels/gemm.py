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


#: Columns of A that are packed at a time behind tiles: enough to be worth the call.
SLICE = 16


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
    k, kc, nc = d[D_K], d[D_KC], d[D_NC]
    batch, i0, i1, j0, j1 = CELL(descriptor, cell)
    context = workspace
    OPEN_UNIT(context + 8 * STREAM_TABLE)
    a_base, b_base = OPEN_CONTEXT(descriptor, batch, context)
    panels, panel_stride = workspace + d[D_PANEL], d[D_PANEL_STRIDE]
    panel_count, group = d[D_PANELS], d[D_GROUP]
    kept = panel_count * MR >= i1 - i0
    strips, strip_stride = workspace + d[D_STRIP], d[D_STRIP_STRIDE]
    plane_row = (j1 - j0 + NR - 1) // NR * TILE
    a_row, a_k, b_k, b_column = d[D_A_ROW], d[D_A_K], d[D_B_K], d[D_B_COLUMN]
    direct = d[D_B_DIRECT] != 0
    row_function = d[D_ROW]

    if k * d[D_SUM_SIZE] == 0:
        # An empty sum is zero, and its epilogue still runs.
        zeros = SUMS(strips)
        for q in range(min(nc, j1 - j0)):
            zeros[q] = ZERO
        for jc in range(j0, j1, nc):
            for i in range(i0, i1):
                CALL_ROW(row_function, context, strips, i, jc, min(nc, j1 - jc))
        CLOSE_UNIT(context)
        return

    i_panels = (i1 - i0 + MR - 1) // MR
    blocks = d[D_SUM_SIZE] * ((k + kc - 1) // kc) * ((j1 - j0 + nc - 1) // nc)
    for t in range(blocks):
        REST(context)
        s, pc, jc = PLACE(descriptor, t, j0, j1)
        depth, columns = min(kc, k - pc), min(nc, j1 - jc)
        tiles = (columns + NR - 1) // NR
        steps = (depth + K_STEP - 1) // K_STEP
        requests = max(1, steps * REQUESTS // STREAM_COUNT)  # of a stream in a tile
        a_at, b_at = SUM_OFFSETS(
            descriptor, s, a_base + pc * a_k, b_base + pc * b_k + jc * b_column
        )
        block = workspace + d[D_BLOCK] + t % 2 * d[D_BLOCK_STRIDE]
        b_panel = steps * K_STEP * NR * FACTOR + LINE
        first = s == 0 and pc == 0
        last = s == d[D_SUM_SIZE] - 1 and pc + depth == k
        packed = jc > j0 and kept
        # Where B is read in place, only a last narrow panel is packed: a micro-kernel reads whole
        # vectors.
        in_place = columns // NR if direct else 0
        if (direct or t == 0) and in_place < tiles:
            CALL_PACK_B(
                d[D_PACK_B],
                b_at + in_place * NR * b_column,
                b_k,
                b_column,
                columns - in_place * NR,
                depth,
                block,
                b_panel,
            )
        PLAN_AHEAD(descriptor, workspace, b_base, t + 1, blocks, j0, j1, i_panels * tiles, requests)
        row_requests = max(1, requests * tiles // MR)
        before, waiting, row, credit = strips, 0, 0, 0  # rows whose epilogue has not run yet
        for i in range(i0, i1, MR):
            index = (i - i0) // MR
            member = index % group
            panel = panels + index % panel_count * panel_stride
            if not packed and member == 0:
                # By columns, panels are packed by groups, all but the first behind the tiles of the
                # group before; by rows, a panel's source is at hand when its turn comes.
                if group > 1 and i > i0:
                    PACK_GROUP(descriptor, context, depth)
                else:
                    CALL_PACK_A(
                        d[D_PACK_A],
                        a_at + i * a_row,
                        a_row,
                        a_k,
                        min(group * MR, i1 - i),
                        depth,
                        panel,
                        panel_stride,
                    )
                at = panels + (index + group) % panel_count * panel_stride
                ASK(context, FOR_PANELS, at, panel_stride // (tiles * requests) + 1)
                if group > 1:
                    ahead = i + group * MR
                    rows = min(group * MR, i1 - ahead)
                    source = a_at + ahead * a_row
                    PLAN_GROUP(context, source, at, rows, depth, group * tiles)
            elif packed:
                half = steps * K_STEP * PANEL_ROWS * FACTOR // 2
                share = half // (tiles * requests) + 1
                ASK(context, FOR_A, panel + panel_stride, share)
                ASK(context, FOR_A + 1, panel + panel_stride + half, share)
            tile_at = workspace + d[D_PLANE] + index * plane_row + (jc - j0) // NR * TILE
            if not first:
                share = TILE // requests
                ASK(context, FOR_PLANE, tile_at + TILE, share)
                ASK(context, FOR_PLANE + 1, tile_at + TILE + share // 2, share)
            strip = strips + index % 2 * MR * strip_stride
            for tile in range(tiles):
                j = tile * NR
                if tile < in_place:
                    b_tile, b_step = b_at + j * SIZE, b_k
                else:
                    b_tile, b_step = block + (tile - in_place) * b_panel, NR * SIZE
                if not packed:
                    if group > 1:
                        ASK_GROUP(context, a_row, a_k, requests)
                    else:
                        ahead = i + MR
                        rows = min(MR, i1 - ahead)
                        at = a_at + ahead * a_row
                        ASK_A(context, at, a_row, a_k, rows, depth, tile, requests)
                ASK_B(context)
                if direct and i == i0:
                    ASK_PANEL(context, b_at + (j + NR) * b_column, b_k, requests)
                MICROKERNEL(
                    min(MR, i1 - i),
                    columns - j > VL,
                    steps,
                    panel,
                    b_tile,
                    b_step,
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
                    CALL_ROW(row_function, context, before + row * strip_stride, at, jc, columns)
                    row += 1
                    ASK_ROW(descriptor, context, at + 1, jc, columns, row_requests)
                PACK_AHEAD(descriptor, context)
                if group > 1 and not packed:
                    PACK_SLICE(descriptor, context)
            if direct and i == i0:
                REST(context)
            before, waiting, row, credit = strip, min(MR, i1 - i) if last else 0, 0, 0
            if last:
                ASK_ROW(descriptor, context, i, jc, columns, row_requests)
        for r in range(waiting):
            at = i1 - waiting + r
            CALL_ROW(row_function, context, before + r * strip_stride, at, jc, columns)
    CLOSE_UNIT(context)


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
    axes = D_AXES + d[D_BATCH_AXES] * AXIS_WORDS
    for axis in range(d[D_SUM_AXES] - 1, -1, -1):
        word = axes + 3 * axis
        index = s % d[word]
        s = s // d[word]
        a += index * d[word + 1]
        b += index * d[word + 2]
    return a, b


def plan_ahead(
    descriptor: int,
    workspace: int,
    b_base: int,
    t: int,
    blocks: int,
    j0: int,
    j1: int,
    tiles: int,
    requests: int,
) -> None:
    """Prepare for packing block t, if there is one, between `tiles` tiles of the block before."""
    d = WORDS(descriptor)
    c = WORDS(workspace)
    c[N_SLICES] = 0
    c[N_LINES] = 0
    c[N_PACKED] = 0
    c[N_ASKED] = 0
    c[N_CREDIT] = 0
    c[N_TILES] = tiles
    if t == blocks or d[D_B_DIRECT] != 0:
        return
    s, pc, jc = PLACE(descriptor, t, j0, j1)
    _, c[N_SOURCE] = SUM_OFFSETS(descriptor, s, 0, b_base + pc * d[D_B_K] + jc * d[D_B_COLUMN])
    c[N_TARGET] = workspace + d[D_BLOCK] + t % 2 * d[D_BLOCK_STRIDE]
    c[N_DEPTH] = min(d[D_KC], d[D_K] - pc)
    c[N_COLUMNS] = min(d[D_NC], j1 - jc)
    steps = (c[N_DEPTH] + K_STEP - 1) // K_STEP
    c[N_PANEL] = steps * K_STEP * NR * FACTOR + LINE
    # By rows where they are contiguous in memory, else by panels of columns.
    if d[D_B_BY_ROWS] != 0:
        c[N_SLICES] = steps
        c[N_LINES] = c[N_DEPTH]
        c[N_AHEAD] = K_STEP
        c[N_LINE_STEP] = d[D_B_K]
        c[N_SHARE] = c[N_COLUMNS] * d[D_B_COLUMN] // requests + 1
    else:
        c[N_SLICES] = (c[N_COLUMNS] + NR - 1) // NR
        c[N_LINES] = c[N_COLUMNS]
        c[N_AHEAD] = NR
        c[N_LINE_STEP] = d[D_B_COLUMN]
        c[N_SHARE] = c[N_DEPTH] * d[D_B_K] // requests + 1


def pack_ahead(descriptor: int, context: int) -> None:
    """Pack what is due of the next block of B after one more tile: all of it after the last."""
    d = WORDS(descriptor)
    c = WORDS(context)
    c[N_CREDIT] += c[N_SLICES]
    if c[N_CREDIT] < c[N_TILES]:
        return
    slices = c[N_CREDIT] // c[N_TILES]
    c[N_CREDIT] -= slices * c[N_TILES]
    packed = c[N_PACKED]
    c[N_PACKED] = packed + slices
    c[N_ASKED] = max(c[N_ASKED], c[N_PACKED] * c[N_AHEAD])
    if d[D_B_BY_ROWS] != 0:
        packed = packed * K_STEP
        at, columns = c[N_SOURCE] + packed * d[D_B_K], c[N_COLUMNS]
        depth = min(slices * K_STEP, c[N_DEPTH] - packed)
        target = c[N_TARGET] + packed * NR * FACTOR
    else:
        at = c[N_SOURCE] + packed * NR * d[D_B_COLUMN]
        columns = min(slices * NR, c[N_COLUMNS] - packed * NR)
        depth, target = c[N_DEPTH], c[N_TARGET] + packed * c[N_PANEL]
    CALL_PACK_B(d[D_PACK_B], at, d[D_B_K], d[D_B_COLUMN], columns, depth, target, c[N_PANEL])


def ask(context: int, number: int, address: int, step: int) -> None:
    """From now on, requests of stream `number` walk from `address`; with step 0 they rest there."""
    c = WORDS(context)
    c[STREAM_TABLE + 2 * number] = address
    c[STREAM_TABLE + 2 * number + 1] = step


def rest(context: int) -> None:
    """No requests until asked again."""
    for number in range(STREAM_COUNT):
        ASK(context, number, context, 0)


def ask_panel(context: int, at: int, k_stride: int, requests: int) -> None:
    """Ask for a panel of a B that is read in place: by all streams, a line of each row.

    It is two lines wide, and processors fetch lines by pairs.
    """
    for number in range(STREAM_COUNT):
        ASK(context, number, at + number * requests * k_stride, k_stride)


def ask_a(
    context: int,
    at: int,
    row_stride: int,
    k_stride: int,
    rows: int,
    depth: int,
    tile: int,
    requests: int,
) -> None:
    """Ask for two of the `rows` rows of A from `at` on, that are to be packed next."""
    for half in range(2):
        row = 2 * tile + half
        if row < rows and k_stride <= LINE and k_stride >= -LINE:
            ASK(context, FOR_A + half, at + row * row_stride, depth * k_stride // requests)
        else:
            ASK(context, FOR_A + half, context, 0)


def plan_group(context: int, at: int, target: int, rows: int, depth: int, tiles: int) -> None:
    """Prepare for packing the next group of panels of A between `tiles` tiles."""
    c = WORDS(context)
    c[G_SOURCE] = at
    c[G_TARGET] = target
    c[G_ROWS] = rows
    c[G_DEPTH] = depth if rows > 0 else 0
    c[G_PACKED] = 0
    # It begins when the first columns have been asked for, a group's lines by two a tile.
    start = min(tiles - 1, 4)
    c[G_TILES] = tiles - start
    c[G_CREDIT] = -start * depth
    c[G_RUNS] = 0


def ask_group(context: int, row_stride: int, k_stride: int, requests: int) -> None:
    """Ask for columns of the next group of panels of A: no more than will soon be packed.

    Columns are often a power of two apart and meet in few cache sets: asked for too early, they
    would drive each other out.
    """
    c = WORDS(context)
    lines = (c[G_ROWS] * row_stride + LINE - 1) // LINE + 1
    for half in range(2):
        run = c[G_RUNS]
        column = run // lines * requests
        if column < c[G_DEPTH] and column < c[G_PACKED] + 2 * requests:
            at = c[G_SOURCE] + run % lines * LINE + column * k_stride
            ASK(context, FOR_A + half, at, k_stride)
            c[G_RUNS] = run + 1
        else:
            ASK(context, FOR_A + half, context, 0)


def pack_slice(descriptor: int, context: int) -> None:
    """Pack what is due of the next group after one more tile."""
    c = WORDS(context)
    c[G_CREDIT] += c[G_DEPTH]
    if c[G_CREDIT] >= SLICE * c[G_TILES]:
        columns = c[G_CREDIT] // c[G_TILES] // K_STEP * K_STEP
        c[G_CREDIT] -= columns * c[G_TILES]
        PACK_GROUP(descriptor, context, columns)


def pack_group(descriptor: int, context: int, columns: int) -> None:
    """Pack up to `columns` more columns of the next group of panels of A."""
    d = WORDS(descriptor)
    c = WORDS(context)
    packed = c[G_PACKED]
    count = min(columns, c[G_DEPTH] - packed)
    if count > 0:
        CALL_PACK_A(
            d[D_PACK_A],
            c[G_SOURCE] + packed * d[D_A_K],
            d[D_A_ROW],
            d[D_A_K],
            c[G_ROWS],
            count,
            c[G_TARGET] + packed * PANEL_ROWS * FACTOR,
            d[D_PANEL_STRIDE],
        )
        c[G_PACKED] = packed + count


def ask_b(context: int) -> None:
    """Ask for the next line of the source of the next block of B, if its turn has come."""
    c = WORDS(context)
    asked = c[N_ASKED]
    if asked < c[N_LINES] and asked < (c[N_PACKED] + 2) * c[N_AHEAD]:
        ASK(context, FOR_B, c[N_SOURCE] + asked * c[N_LINE_STEP], c[N_SHARE])
        c[N_ASKED] = asked + 1
    else:
        ASK(context, FOR_B, context, 0)


def ask_row(descriptor: int, context: int, i: int, j: int, columns: int, requests: int) -> None:
    """Ask for row i of the operands that the row function will touch next."""
    d = WORDS(descriptor)
    c = WORDS(context)
    for number in range(ROW_STREAMS):
        slot = d[D_ASK + number]
        if slot >= 0:
            step = c[3 * slot + 2]
            at = c[3 * slot] + i * c[3 * slot + 1] + j * step
            ASK(context, FOR_ROWS + number, at, columns * step // requests + 1)


def peak_loop(repeats: int, k: int, a: int, b: int, c: int, ldc: int, streams: int) -> None:
    """The micro-kernel over and over on panels in level 1: the FMA peak that can be had."""
    for _ in range(repeats):
        MICROKERNEL(MR, 1, k, a, b, NR * SIZE, c, ldc, c, ldc, 1, streams)
