"""Packing: any strided matrix to the panels that the micro-kernel reads, widened on the way.

A panel of A holds ``MR`` rows as ``[k][PANEL_ROWS]``, a panel of B ``NR`` columns as ``[k][NR]``:
one contiguous stream each, whatever the strides of the source were.  With both operands in this
form and resident in cache the micro-kernel was measured at 99-100% of the FMA peak (Zen 4, Granite
Rapids); a row-major panel of A (fourteen streams) at 80-87% on the latter.

Three cases an operand: one of its two strides is one element (vector copies or register
transposes), or neither (element by element).  Free names in UPPER case are bound by
`numfuse.specialise`: ITEM, SIZE bytes of a stored and of an accumulator element, VL lanes of a
vector, MR, NR the panel heights, PANEL_ROWS what MR rows take.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def pack_a(
    source: int, row_stride: int, k_stride: int, rows: int, k: int, target: int, panel: int
) -> None:
    """``target[(r // MR) * panel + (p * PANEL_ROWS + r % MR) * SIZE] = source[r, p]``, all r and p.

    `panel` is the stride of panels in bytes.  Rows of the last panel beyond `rows` hold no meaning.
    Writes up to VL elements past a panel's ``k * PANEL_ROWS``.
    """
    if row_stride == ITEM:
        # Columns of A in memory: one line of it serves more than one panel, so all panels advance
        # together.  A vector that overhangs its panel's MR rows spills into the next p, which is
        # written after it.
        for p in range(k):
            at = source + p * k_stride
            place = target + p * PANEL_ROWS * SIZE
            for i in range(0, rows - MR + 1, MR):
                COPY_ROWS(at + i * ITEM, place + i // MR * panel)
            rest = rows // MR * MR
            for r in range(rest, rows, VL):
                COPY_LANES(at + r * ITEM, place + rest // MR * panel + (r - rest) * SIZE, rows - r)
        return
    for i in range(0, rows, MR):
        live = min(MR, rows - i)
        at = source + i * row_stride
        place = target + i // MR * panel
        if k_stride == ITEM:
            for p in range(0, k, VL):
                # Highest rows first: a block of VL lanes that overhangs MR spills into the next
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
    """``target[(j // NR) * panel + (p * NR + j % NR) * SIZE] = source[p, j]``, ``p < k``.

    `panel` is the stride of panels in bytes: one line more than their size, so that the panels that
    one row of B is dealt out to do not all fall into the same cache sets.  Lanes of the last panel
    beyond `columns` hold no meaning (but are written where a full micro-kernel reads them).
    """
    full = columns // NR
    if column_stride == ITEM:
        rest = columns - full * NR
        for p in range(k):
            row = source + p * k_stride
            place = target + p * NR * SIZE
            for j in range(full):
                COPY_PANEL_ROW(row + j * NR * ITEM, place + j * panel)
            for j in range(0, rest, VL):
                COPY_LANES(row + (full * NR + j) * ITEM, place + full * panel + j * SIZE, rest - j)
    elif k_stride == ITEM:
        for j in range(0, columns, VL):
            place = target + (j // NR) * panel + (j % NR) * SIZE
            for p in range(0, k, VL):
                TRANSPOSE_B(
                    source + j * column_stride + p * ITEM,
                    column_stride,
                    columns - j,
                    k - p,
                    place + p * NR * SIZE,
                    NR * SIZE,
                )
    else:
        for j in range(columns):
            place = target + (j // NR) * panel + (j % NR) * SIZE
            for p in range(k):
                COPY_ONE(source + j * column_stride + p * k_stride, place + p * NR * SIZE)
