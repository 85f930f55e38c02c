"""Packing: any strided matrix to the panels that the micro-kernel reads, widened on the way.

A panel of A holds the ``HEIGHT`` rows of a register tile as ``[k][PANEL_ROWS]``, a panel of B its
``WIDTH`` columns as ``[k][WIDTH]``: one contiguous stream each, whatever the strides of the source
were.  With both operands in this
form and resident in cache the micro-kernel was measured at 99-100% of the FMA peak (Zen 4, Granite
Rapids); a row-major panel of A (fourteen streams) at 80-87% on the latter.

Three cases an operand: one of its two strides is one element (vector copies or register
transposes), or neither (element by element).  Free names in UPPER case are bound by
`numfuse.runtime.specialise`: ITEM, SIZE bytes of a stored and of an accumulator element, VL lanes
of a vector, HEIGHT, WIDTH the lines of a panel, PANEL_ROWS what HEIGHT rows take; PREFETCH, which
may do nothing, asks for what is read AHEAD rows or columns later.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def pack_a(
    source: int, row_stride: int, k_stride: int, rows: int, k: int, target: int, panel: int
) -> None:
    """``target[(r // HEIGHT) * panel + (p * PANEL_ROWS + r % HEIGHT) * SIZE] = source[r, p]``.

    For all r and p. `panel` is the stride of panels in bytes.  Rows of the last panel beyond `rows`
    hold no meaning. Writes up to VL elements past a panel's ``k * PANEL_ROWS``.
    """
    if row_stride == ITEM:
        # Columns of A in memory: one line of it serves more than one panel, so all panels advance
        # together.  A vector that overhangs its panel's rows spills into the next p, which is
        # written after it.
        for p in range(k):
            at = source + p * k_stride
            place = target + p * PANEL_ROWS * SIZE
            for line in range(0, rows * ITEM, LINE):
                PREFETCH(at + line + AHEAD * k_stride)
            for i in range(0, rows - HEIGHT + 1, HEIGHT):
                COPY_ROWS(at + i * ITEM, place + i // HEIGHT * panel)
            rest = rows // HEIGHT * HEIGHT
            for r in range(rest, rows, VL):
                to = place + rest // HEIGHT * panel + (r - rest) * SIZE
                COPY_LANES(at + r * ITEM, to, rows - r)
        return
    for i in range(0, rows, HEIGHT):
        live = min(HEIGHT, rows - i)
        at = source + i * row_stride
        place = target + i // HEIGHT * panel
        if k_stride == ITEM:
            for p in range(0, k, VL):
                # Highest rows first: a block of VL lanes that overhangs HEIGHT spills into the next
                # p, whose own lowest rows are written after it.
                for r in range(HIGH_ROWS, -1, -VL):
                    if r < live:
                        TRANSPOSE(
                            at + r * row_stride + p * ITEM,
                            row_stride,
                            live - r,
                            k - p,
                            place + (p * PANEL_ROWS + r) * SIZE,
                            PANEL_ROWS * SIZE,
                        )
        else:
            for p in range(k):
                for r in range(live):
                    COPY_ONE(
                        at + p * k_stride + r * row_stride, place + (p * PANEL_ROWS + r) * SIZE
                    )


def pack_b(
    source: int, k_stride: int, column_stride: int, columns: int, k: int, target: int, panel: int
) -> None:
    """``target[(j // WIDTH) * panel + (p * WIDTH + j % WIDTH) * SIZE] = source[p, j]``, ``p < k``.

    `panel` is the stride of panels in bytes: one line more than their size, so that the panels that
    one row of B is dealt out to do not all fall into the same cache sets.  Lanes of the last panel
    beyond `columns` hold no meaning (but are written where a full micro-kernel reads them).
    """
    full = columns // WIDTH
    if column_stride == ITEM:
        rest = columns - full * WIDTH
        for p in range(k):
            row = source + p * k_stride
            place = target + p * WIDTH * SIZE
            for j in range(full):
                COPY_PANEL_ROW(row + j * WIDTH * ITEM, place + j * panel)
                PREFETCH(row + j * WIDTH * ITEM + AHEAD * k_stride)
            for j in range(0, rest, VL):
                at = row + (full * WIDTH + j) * ITEM
                COPY_LANES(at, place + full * panel + j * SIZE, rest - j)
    elif k_stride == ITEM:
        for j in range(0, columns, VL):
            place = target + (j // WIDTH) * panel + (j % WIDTH) * SIZE
            for p in range(0, k, VL):
                TRANSPOSE_B(
                    source + j * column_stride + p * ITEM,
                    column_stride,
                    columns - j,
                    k - p,
                    place + p * WIDTH * SIZE,
                    WIDTH * SIZE,
                )
    else:
        for j in range(columns):
            place = target + (j // WIDTH) * panel + (j % WIDTH) * SIZE
            for p in range(k):
                COPY_ONE(source + j * column_stride + p * k_stride, place + p * WIDTH * SIZE)


def pack_pairs(
    source: int, k_stride: int, line_stride: int, lines: int, k: int, target: int, panel: int
) -> None:
    """Columns of B as panels of pairs along K, not widened.

    ``target[(j // HEIGHT) * panel + (p // 2 * WIDTH + j % HEIGHT) * 4 + p % 2 * 2] = source[p, j]``
    and zeros for ``k <= p < round_up(k, K_STEP)``: of both factors, so that nothing is added, were
    there infinities beside.  Lanes of the last panel beyond `lines` hold no meaning.
    """
    full = lines // HEIGHT
    if line_stride == ITEM:
        rest = full * HEIGHT
        for p in range(0, k, 2):
            row = source + p * k_stride
            place = target + p // 2 * WIDTH * 4
            for j in range(full):
                PAIR_ROW(row + j * HEIGHT * ITEM, k_stride, p + 1 < k, place + j * panel)
            for j in range(rest, lines, VL):
                at = place + full * panel + (j - rest) * 4
                PAIR_LANES(row + j * ITEM, k_stride, p + 1 < k, lines - j, at)
    else:
        for i in range(0, lines, HEIGHT):
            live = min(HEIGHT, lines - i)
            at = source + i * line_stride
            place = target + i // HEIGHT * panel
            if k_stride == ITEM:
                for r in range(0, live, VL):
                    for p in range(0, k - 1, 2 * VL):
                        TRANSPOSE(
                            at + r * line_stride + p * ITEM,
                            line_stride,
                            live - r,
                            k // 2 - p // 2,
                            place + (p // 2 * WIDTH + r) * 4,
                            WIDTH * 4,
                        )
                done = k // 2 * 2
            else:
                done = 0
            for r in range(live):
                for p in range(done, k):
                    here = place + (p // 2 * WIDTH + r) * 4 + p % 2 * ITEM
                    HALVES(here)[0] = HALVES(at + r * line_stride + p * k_stride)[0]
                if k % 2 != 0:
                    HALVES(place + (k // 2 * WIDTH + r) * 4 + ITEM)[0] = HALF_ZERO
    for i in range(0, lines, HEIGHT):
        for p in range((k + 1) // 2, (k + K_STEP - 1) // K_STEP * K_STEP // 2):
            zeros = HALVES(target + i // HEIGHT * panel + p * WIDTH * 4)
            for q in range(2 * WIDTH):
                zeros[q] = HALF_ZERO


def pack_pairs_a(
    source: int, row_stride: int, k_stride: int, rows: int, k: int, target: int, panel: int
) -> None:
    """Rows of A as panels of pairs along K."""
    PACK_PAIRS(source, k_stride, row_stride, rows, k, target, panel)


def pack_tiles(
    source: int, row_stride: int, k_stride: int, rows: int, k: int, target: int, panel: int
) -> None:
    """Rows of A as panels of tiles: 32 values of K of one row are contiguous.

    ``target[(r // MR) * panel + p // 32 * MR * 64 + r % MR * 64 + p % 32 * 2] = source[r, p]`` and
    zeros for ``k <= p < round_up(k, 32)``.  Rows of the last panel beyond `rows` hold no meaning.
    """
    if row_stride == ITEM != k_stride:
        for p in range(0, k, 32):
            for r in range(0, rows, 8):
                place = target + r // MR * panel + (p // 32 * MR + r % MR) * 64
                at = source + p * k_stride + r * ITEM
                TURNED_HALVES(at, k_stride, min(8, rows - r), min(32, k - p), place)
        return
    for r in range(rows):
        at = source + r * row_stride
        place = target + r // MR * panel + r % MR * 64
        if k_stride == ITEM:
            for p in range(0, k, 32):
                COPY_HALVES(at + p * ITEM, k - p, place + p // 32 * MR * 64)
        else:
            for p in range((k + 31) // 32 * 32):
                value = HALVES(at + p * k_stride)[0] if p < k else HALF_ZERO
                HALVES(place + p // 32 * MR * 64 + p % 32 * ITEM)[0] = value
