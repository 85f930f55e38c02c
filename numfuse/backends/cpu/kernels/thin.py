"""The cell of a product with few rows, as a template: B is read once, where it is.

`numfuse.backends.cpu.kernels.gemm` packs what many rows use again.  Here the columns of a cell pass
by in blocks, and the sums of a block's rows stay in strips, to which every block of K is added.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def thin_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One cell of ``row(sum_s sum_p A[i, p] B[p, j])`` for few i.

    The rows pass a block of B by groups of GROUP, all but the first of which find it in level 2. K
    is blocked by KC, and a block of more than CHAIN values is summed by halves, as in the
    micro-kernel of many rows: every element has the same sum.
    """
    d = WORDS(descriptor)
    batch, i0, i1, j0, j1 = CELL(descriptor, cell)
    a_base, b_base = OPEN_CONTEXT(descriptor, batch, workspace)
    k, kc, rows = d[D_K], d[D_KC], i1 - i0
    a_row, a_k, b_k, b_column = d[D_A_ROW], d[D_A_K], d[D_B_K], d[D_B_COLUMN]
    b_step = b_k if BY_ROWS else b_column
    stride = (d[D_NC] + 8 * VL) * SIZE
    sums = workspace + d[D_STRIP]
    part = sums + rows * stride
    for jc in range(j0, j1, d[D_NC]):
        columns = min(d[D_NC], j1 - jc)
        for s in range(d[D_SUM_SIZE]):
            for pc in range(0, k, kc):
                depth = min(kc, k - pc)
                a, b = SUM_OFFSETS(
                    descriptor, s, a_base + pc * a_k, b_base + pc * b_k + jc * b_column
                )
                first = s == 0 and pc == 0
                half = (depth + 1) // 2 if depth > CHAIN else depth
                target = sums if first or half == depth else part
                add = not first and half == depth
                for i in range(0, rows, GROUP):
                    at, to, count = a + i * a_row, target + i * stride, min(GROUP, rows - i)
                    THIN(count, columns, half, at, a_row, a_k, b, b_step, to, stride, add)
                if half < depth:
                    a, b, rest = a + half * a_k, b + half * b_k, depth - half
                    for i in range(0, rows, GROUP):
                        at, to, count = a + i * a_row, target + i * stride, min(GROUP, rows - i)
                        THIN(count, columns, rest, at, a_row, a_k, b, b_step, to, stride, True)
                    if not first:
                        for i in range(rows):
                            total, more = SUMS(sums + i * stride), SUMS(part + i * stride)
                            for q in range(columns):
                                total[q] = total[q] + more[q]
        for i in range(rows):
            CALL_ROW(d[D_ROW], workspace, sums + i * stride, i, jc, columns)
