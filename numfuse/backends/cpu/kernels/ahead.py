"""Packing ahead and requests to the caches, between two tiles of a GEMM cell, as templates.

The next block of B and the next group of panels of A are packed slice by slice, and what a cell
will touch next is asked for by nine streams of requests (`protocol.STREAMS`), whose addresses and
steps stand in the context.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Columns of A that are packed at a time behind tiles: enough to be worth the call.
SLICE = 16


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
    c[N_PANEL] = steps * K_STEP * WIDTH * FACTOR + LINE
    # By rows where they are contiguous in memory, else by panels of columns.
    if d[D_B_BY_ROWS] != 0:
        c[N_SLICES] = steps
        c[N_LINES] = c[N_DEPTH]
        c[N_AHEAD] = K_STEP
        c[N_LINE_STEP] = d[D_B_K]
        c[N_SHARE] = c[N_COLUMNS] * d[D_B_COLUMN] // requests + 1
    else:
        c[N_SLICES] = (c[N_COLUMNS] + WIDTH - 1) // WIDTH
        c[N_LINES] = c[N_COLUMNS]
        c[N_AHEAD] = WIDTH
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
        target = c[N_TARGET] + packed * WIDTH * FACTOR
    else:
        at = c[N_SOURCE] + packed * WIDTH * d[D_B_COLUMN]
        columns = min(slices * WIDTH, c[N_COLUMNS] - packed * WIDTH)
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
