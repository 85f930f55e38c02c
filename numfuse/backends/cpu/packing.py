"""Packing: any strided matrix to the panels that the micro-kernel reads, widened on the way.

A panel of A holds ``MR`` rows as ``[k][MR]``, a panel of B ``NR`` columns as ``[k][NR]``: one
contiguous stream each, whatever the strides of the source were.  With both operands in this form
and resident in cache the micro-kernel was measured at 99-100% of the FMA peak (Zen 4, Granite
Rapids); a row-major panel of A (fourteen streams) at 80-87% on the latter.

Three cases an operand: one of its two strides is one element (vector copies or register
transposes), or neither (element by element).  Free names in UPPER case are bound by
`numfuse.specialise`: ITEM, SIZE bytes of a stored and of an accumulator element, VL lanes of a
vector, MR, NR the panel heights.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def pack_a(source, row_stride, k_stride, rows, k, target):
    """``target[p * MR + r] = source[r, p]`` for ``r < rows <= MR``, ``p < k``.

    Rows beyond `rows` hold no meaning.  Writes up to VL elements past ``k * MR``.
    """
    if k_stride == ITEM:
        for p in range(0, k, VL):
            # Highest rows first: a block of VL lanes that overhangs MR spills into the next p,
            # whose own lowest rows are written after it.
            for r in range(HIGH_ROWS, -1, -VL):
                if r < rows:
                    TRANSPOSE(source + r * row_stride + p * ITEM, row_stride, rows - r, k - p,
                              target + (p * MR + r) * SIZE, MR * SIZE)
    elif row_stride == ITEM:
        for p in range(k):
            for r in range(0, rows, VL):
                COPY_LANES(source + p * k_stride + r * ITEM, target + (p * MR + r) * SIZE, rows - r)
    else:
        for p in range(k):
            for r in range(rows):
                COPY_ONE(source + p * k_stride + r * row_stride, target + (p * MR + r) * SIZE)


def pack_b(source, k_stride, column_stride, columns, k, target, panel):
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
                TRANSPOSE_B(source + j * column_stride + p * ITEM, column_stride, columns - j, k - p,
                            place + p * NR * SIZE, NR * SIZE)
    else:
        for j in range(columns):
            place = target + (j // NR) * panel + (j % NR) * SIZE
            for p in range(k):
                COPY_ONE(source + j * column_stride + p * k_stride, place + p * NR * SIZE)
