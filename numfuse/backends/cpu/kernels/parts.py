"""Packing of float32 as parts of bfloat16, any strided matrix to panels of tiles.

A panel has, for every 32 values of K, one plane behind the other: tiles of the first part, of the
second, and so on.  What does not lie as tiles want it goes through a square of 16 or 32 rows on the
stack.  Places beside the matrix, which tiles multiply with the others, are zeros: both for K, so
that nothing is added, and for rows and columns, so that no sum that nobody reads is infinite.

Free names in UPPER case are bound by `numfuse.runtime.specialise`.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def pack_parts_a(
    source: int, row_stride: int, k_stride: int, rows: int, k: int, target: int, panel: int
) -> None:
    """Rows of A as panels of tiles of parts: 32 values of K of one row are contiguous.

    Part q of ``source[r, p]`` is at ``target + (r // MR) * panel + (p // 32 * PARTS + q) * MR * 64
    + r % MR * 64 + p % 32 * 2``; zeros for ``k <= p < round_up(k, 32)`` and for rows up to a
    multiple of 16.
    """
    plane = MR * 64
    scratch = SCRATCH()
    for p in range(0, k, 32):
        step = p // 32 * PARTS * plane
        live = min(32, k - p)
        for i in range(0, rows, 16):
            count = min(16, rows - i)
            at, stride = source + i * row_stride + p * k_stride, row_stride
            place = target + i // MR * panel + step + i % MR * 64
            if k_stride != ITEM:
                if row_stride == ITEM:
                    for q in range(0, live, 16):
                        TRANSPOSE(
                            at + q * k_stride, k_stride, live - q, count, scratch + 4 * q, 128
                        )
                else:
                    for r in range(count):
                        for q in range(live):
                            COPY_ONE(at + r * row_stride + q * k_stride, scratch + 128 * r + 4 * q)
                at, stride = scratch, 128
            for r in range(count):
                SPLIT_TILE(at + r * stride, live, place + r * 64, plane)
            for r in range(count, 16):
                SPLIT_TILE(at, 0, place + r * 64, plane)


def pack_parts_b(
    source: int, k_stride: int, column_stride: int, columns: int, k: int, target: int, panel: int
) -> None:
    """Columns of B as panels of pairs of parts.

    Part q of ``source[p, j]`` is at ``target + (j // NR) * panel + (p // 32 * PARTS + q) * NR * 64
    + (p % 32 // 2 * NR + j % NR) * 4 + p % 2 * 2``; zeros for ``k <= p < round_up(k, 32)`` and for
    columns up to a multiple of 16.
    """
    plane = NR * 64
    if column_stride == ITEM:
        for p in range(0, (k + 31) // 32 * 32, 2):
            at = source + p * k_stride
            place = target + (p // 32 * PARTS * plane + p % 32 // 2 * NR * 4)
            for j in range(0, columns, 16):
                live = columns - j
                SPLIT_PAIR(
                    at + 4 * j,
                    at + k_stride + 4 * j,
                    live if p < k else 0,
                    live if p + 1 < k else 0,
                    place + j // NR * panel + j % NR * 4,
                    plane,
                )
        return
    scratch = SCRATCH()
    for j in range(0, columns, 16):
        count = min(16, columns - j)
        for p in range(0, k, 32):
            at = source + j * column_stride + p * k_stride
            live = min(32, k - p)
            if k_stride == ITEM:
                for q in range(0, live, 16):
                    TRANSPOSE(at + q * ITEM, column_stride, count, live - q, scratch + 64 * q, 64)
            else:
                for q in range(live):
                    for c in range(count):
                        COPY_ONE(at + q * k_stride + c * column_stride, scratch + 64 * q + 4 * c)
            place = target + j // NR * panel + p // 32 * PARTS * plane + j % NR * 4
            for q in range(0, 32, 2):
                SPLIT_PAIR(
                    scratch + 64 * q,
                    scratch + 64 * q + 64,
                    count if q < live else 0,
                    count if q + 1 < live else 0,
                    place + q // 2 * NR * 4,
                    plane,
                )
