"""The cell of a product with few rows, as a template: B is read once, where it is.

`numfuse.backends.cpu.kernels.gemm` packs what many rows use again.  Here the columns of a cell pass
by in blocks, and the sums of a block's rows stay in strips, to which every block of K is added.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def thin_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One cell of ``row(sum_s sum_p A[i, p] B[p, j])`` for few i.

    K is blocked by KC, and a block of more than CHAIN values is summed by halves, as in the
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
    part, more = sums + rows * stride, sums + 2 * rows * stride
    if rows * (j1 - j0) <= (DOTS if k < DOT_DEEP else DEEP_DOTS):
        for i in range(rows):
            own = SUMS(sums)
            for j in range(j0, j1):
                own[j - j0] = DOT(descriptor, a_base + i * a_row, b_base + j * b_column, part)
            CALL_ROW(d[D_ROW], workspace, sums, i, j0, j1 - j0)
        return
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
                add, done = not first and half == depth, 0
                while done < depth:  # (one call: its code is long, and each is inlined)
                    count = min(half, depth - done)
                    PASS(rows, columns, count, a + done * a_k, a_row, a_k, b + done * b_k, b_step,
                         target, more, stride, add or done > 0)  # fmt: skip
                    done += count
                if half < depth and not first:
                    ADD_ROWS(sums, part, rows, columns, stride)
        for i in range(rows):
            CALL_ROW(d[D_ROW], workspace, sums + i * stride, i, jc, columns)


def dot(descriptor: int, a: int, b: int, found: int) -> float:
    """Return one sum: that of the kernels of many columns, of which all lanes but one were idle.

    Its chains do not depend on each other, and run side by side; `found` has room for them.
    """
    d = WORDS(descriptor)
    k, kc, a_k, b_k = d[D_K], d[D_KC], d[D_A_K], d[D_B_K]
    chains = SUMS(found)
    total, begun = ZERO, False
    for s in range(d[D_SUM_SIZE]):
        a_at, b_at = SUM_OFFSETS(descriptor, s, a, b)
        pc = 0
        while pc < k:
            depth = min(kc, k - pc)
            half = (depth + 1) // 2 if depth > CHAIN else depth
            each = 2 if half < depth else 1
            if each * half == depth:
                blocks = min(BLOCKS, (k - pc) // depth)
                CHAINS(each * blocks, half, a_at + pc * a_k, a_k, b_at + pc * b_k, b_k, found)
            else:
                blocks = 1
                for q in range(2):
                    at = pc + q * half
                    length = half if q == 0 else depth - half
                    CHAINS(1, length, a_at + at * a_k, a_k, b_at + at * b_k, b_k, found + q * SIZE)
            for q in range(blocks):
                value = chains[each * q]
                if each == 2:
                    value = value + chains[2 * q + 1]
                total = total + value if begun else value
                begun = True
            pc += blocks * depth
    return total


def pass_panels(
    rows: int, columns: int, depth: int, a: int, a_row: int, a_k: int, b: int, b_step: int,
    target: int, more: int, stride: int, add: bool,
) -> None:  # fmt: skip
    """Write, or add, the sums of a block: in narrow panels of columns, whose sums are in registers.

    The rows pass B by groups of GROUP, all but the first of which find it in level 2.
    """
    for i in range(0, rows, GROUP):
        at, to, count = a + i * a_row, target + i * stride, min(GROUP, rows - i)
        THIN(count, columns, depth, at, a_row, a_k, b, b_step, to, stride, add)


def pass_pieces(
    rows: int, columns: int, depth: int, a: int, a_row: int, a_k: int, b: int, b_step: int,
    target: int, more: int, stride: int, add: bool,
) -> None:  # fmt: skip
    """Write, or add, the sums of a block: all rows pass long pieces of B's, and `more` has room.

    Of a B beyond level 2 narrow panels would ask for few lines of each row at a time.
    """
    own = more if add else target
    for i in range(rows):
        sums = SUMS(own + i * stride)
        for q in range((columns + VL - 1) // VL * VL):
            sums[q] = ZERO
    STREAMED(rows, columns, depth, a, a_row, a_k, b, b_step, own, stride)
    if add:
        ADD_ROWS(target, own, rows, columns, stride)


def add_rows(target: int, source: int, rows: int, columns: int, stride: int) -> None:
    """Add rows of sums to others."""
    for i in range(rows):
        total, more = SUMS(target + i * stride), SUMS(source + i * stride)
        for q in range(columns):
            total[q] = total[q] + more[q]
