"""Products of float64 by residues: the cell that makes those of a factor, and that of a product.

A *line* is a row of A or a column of B: what K runs along. A factor's residues lie in panels of 32
lines: for each modulus, steps of 64 values of K of all of them (`llvm.residues`). Products that are
summed over batch axes follow one another along K.

Free names in UPPER case are bound by `numfuse.runtime.specialise`.
"""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def panel_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One panel of a factor: the exponents of its lines, and their residues by all moduli."""
    d = WORDS(descriptor)
    batch, i0, i1, _, _ = CELL(descriptor, cell)
    base, _ = OPEN_CONTEXT(descriptor, batch, workspace)
    c = WORDS(workspace)
    lines, k, sums = i1 - i0, d[D_K], d[D_SUM_SIZE]
    line, inner = d[D_A_ROW], d[D_A_K]
    steps = (k + STEP - 1) // STEP
    plane = sums * steps * PANEL_BYTES + GAP
    target = c[3 * S_OUT] + i0 // PANEL * c[3 * S_OUT + 1]
    exponents = NUMBERS(c[3 * S_PRE] + 8 * i0)
    chains = workspace + d[D_STRIP]
    crossed = chains + PANEL * CHAIN_BYTES
    powers = crossed + PANEL * CHAIN_BYTES
    held = powers + PANEL * 16
    staged = held + PANEL * STEP * 8
    CLEAR(chains, 2 * PANEL * CHAIN_BYTES // 8)
    # Where columns of B are neighbours in memory, whole steps of a panel are taken across them.
    across = not BY_ROWS and line == 8 and inner != 8 and lines == PANEL and sums == 1
    whole = k // STEP * STEP if across else 0
    if across:
        at = base + i0 * line
        for p in range(whole):
            place = crossed + p % CHAINS * PANEL * 8
            ADD_SQUARES_ACROSS(at + p * inner, place, place + PANEL * CHAIN_BYTES // 2)
        UNCROSS(crossed, chains)
    for s in range(sums):
        at, _ = SUM_OFFSETS(descriptor, s, base, 0)
        at += i0 * line
        for p in range(whole, k, STEP):
            source, step = AT_HAND(at + p * inner, line, inner, lines, min(STEP, k - p), held)
            for r in range(lines):
                ADD_SQUARES(source + r * step, chains + r * CHAIN_BYTES)
    for r in range(PANEL):
        exponents[r] = 0.0
        if r < lines:
            exponents[r] = EXPONENT(chains + r * CHAIN_BYTES, d[D_SPREAD])
        POWERS(exponents[r], powers + 8 * r)
    for p in range(0, whole, STEP):
        at, to = base + i0 * line + p * inner, target + p // STEP * PANEL_BYTES
        for half in range(2):
            own = powers + 8 * 16 * half
            for q in range(STEP // 4):
                source = at + 4 * q * inner + 16 * line * half
                SPLIT_ACROSS(source, inner, own, to + q * 2 * STEP + half * STEP, plane)
    for s in range(sums):
        at, _ = SUM_OFFSETS(descriptor, s, base, 0)
        at += i0 * line
        for p in range(whole, k, STEP):
            source, step = AT_HAND(at + p * inner, line, inner, lines, min(STEP, k - p), held)
            to = target + (s * steps + p // STEP) * PANEL_BYTES
            if BY_ROWS:
                for r in range(PANEL):
                    own = source + min(r, lines - 1) * step
                    SPLIT(own, powers + 8 * r, to + r * STEP, plane)
            else:
                for r in range(PANEL):
                    own = source + min(r, lines - 1) * step
                    SPLIT(own, powers + 8 * r, staged + r * STEP, PANEL_BYTES + GAP)
                for t in range(MODULI):
                    for half in range(2):
                        place = staged + t * (PANEL_BYTES + GAP) + half * PANEL_BYTES // 2
                        TRANSPOSE_WORDS(place, STEP, 16, 16, to + t * plane + 64 * half, 128)


def at_hand(at: int, line: int, inner: int, lines: int, live: int, held: int) -> tuple[int, int]:
    """Where 64 contiguous values of each line are, and their distance: in place, or a copy.

    Behind the last value of a line a copy has zeros.
    """
    if inner == 8 and live == STEP:
        return at, line
    step = 8 * STEP
    if line == 8 and live == STEP:
        for p in range(0, STEP, 8):
            for r in range(0, lines, 8):
                place = at + p * inner + r * line
                TRANSPOSE(place, inner, 8, lines - r, held + r * step + 8 * p, step)
        return held, step
    for r in range(lines):
        copied = NUMBERS(held + r * step)
        for p in range(live):
            copied[p] = NUMBERS(at + r * line + p * inner)[0]
        for p in range(live, STEP):
            copied[p] = 0.0
    return held, step


def uncross(crossed: int, chains: int) -> None:
    """Put the chains of all lines, a row of 32 lines for each, where each line has its own."""
    found = NUMBERS(crossed)
    for r in range(PANEL):
        own = NUMBERS(chains + r * CHAIN_BYTES)
        for i in range(2 * CHAINS):
            own[i] = found[i * PANEL + r]


def clear(address: int, count: int) -> None:
    """Set so many words to zero."""
    words = WORDS(address)
    for i in range(count):
        words[i] = 0


def exponent(chains: int, spread: int) -> float:
    """n for which 2^n times a line has the norm that the moduli allow, or less.

    NaN of a line with an infinity or NaN, 0 of one of zeros. A sum of squares that lost terms, or
    overflowed, gives way to the largest element (`Residues.spread`). `chains` is written over.
    """
    NORM(chains, chains)
    found = NUMBERS(chains)
    total, top = found[0], found[1]
    if total != total or top == INFINITY:
        return NAN
    if total > TINY and total < HUGE:
        n = FLOOR_LOG2(chains)
        above = 1 if found[0] > LIMIT_M else 0
        return float((LIMIT_N - n - above) >> 1)
    if top > 0.0:
        found[0] = top
        lifted = 0
        if top < TINY:
            found[0], lifted = top * HUGE, HUGE_N
        return float(spread - 1 - (FLOOR_LOG2(chains) - lifted))
    return 0.0


def floor_log2(address: int) -> int:
    """n of the number 2^n m there, m from 1 to 2, which takes its place; it is normal."""
    bits = WORDS(address)
    n = (bits[0] >> 52) - 1023
    bits[0] = (bits[0] & ((1 << 52) - 1)) | (1023 << 52)
    return n


def powers(n: float, address: int) -> None:
    """Write two normal numbers whose product is 2^n, a panel apart; of NaN, of 1."""
    bits = WORDS(address)
    whole = 0 if n != n else int(n)
    half = whole >> 1
    bits[0] = (half + 1023) << 52
    bits[PANEL] = (whole - half + 1023) << 52


def residue_cell(descriptor: int, cell: int, workspace: int) -> None:
    """One cell of ``row(A B)`` from the residues of both, behind the row function's slots.

    For each modulus the cell's sums go through all of K, and become bytes; then these become
    numbers, row by row.
    """
    d = WORDS(descriptor)
    batch, i0, i1, j0, j1 = CELL(descriptor, cell)
    context = workspace
    OPEN_UNIT(context + 8 * STREAM_TABLE)
    a_base, b_base = OPEN_CONTEXT(descriptor, batch, context)
    c = WORDS(context)
    own = 3 * (d[D_SLOT_COUNT] - RESIDUE_SLOTS)
    left = c[own] + i0 // PANEL * c[own + 1]
    right = c[own + 3] + j0 // PANEL * c[own + 4]
    rows_at, columns_at = c[own + 6], c[own + 9]
    steps = d[D_SUM_SIZE] * ((d[D_K] + STEP - 1) // STEP)
    plane = steps * PANEL_BYTES + GAP
    down, across = (i1 - i0 + PANEL - 1) // PANEL, (j1 - j0 + PANEL - 1) // PANEL
    sums, strip = workspace + d[D_PLANE], workspace + d[D_STRIP]
    found = sums + down * across * PANEL * PANEL * 4
    found_plane = down * across * PANEL * PANEL
    if steps == 0:
        CLEAR(found, MODULI * found_plane // 8)  # an empty sum is zero
    for t in range(MODULI):
        for first in range(0, steps, BLOCK_STEPS):
            count = min(BLOCK_STEPS, steps - first)
            offset = t * plane + first * PANEL_BYTES
            # What comes next of both factors is asked for meanwhile: a share by each tile.
            following = offset + count * PANEL_BYTES
            if first + count == steps:
                following = (t + 1) * plane if t + 1 < MODULI else offset
            share_a, share_b = count * PANEL_BYTES // across, count * PANEL_BYTES // down
            pace_a, pace_b = share_a // (count * ASKED) + 1, share_b // (count * ASKED) + 1
            for j in range(across):
                y = right + j * c[own + 4] + offset
                next_y = right + following
                if j + 1 < across:
                    next_y = y + c[own + 4]
                for i in range(down):
                    index = i * across + j
                    at, x = sums + index * PANEL * PANEL * 4, left + i * c[own + 1]
                    KERNEL(
                        count,
                        x + offset,
                        y,
                        at,
                        first == 0,
                        x + following + j * share_a,
                        pace_a,
                        next_y + i * share_b,
                        pace_b,
                    )
                    if first + count == steps:
                        REDUCE(at, t, found + t * found_plane + index * PANEL * PANEL)
    CLOSE_UNIT(context)
    odd = False
    for j in range(j0, j1):
        x = NUMBERS(columns_at + 8 * j)[0]
        odd = odd or x != x
    for i in range(i0, i1):
        for j in range(across):
            index = (i - i0) // PANEL * across + j
            source = found + index * PANEL * PANEL + (i - i0) % PANEL * PANEL
            column = columns_at + 8 * (j0 + j * PANEL)
            MAKE_NUMBERS(source, found_plane, rows_at + 8 * i, column, strip + j * PANEL * 8)
        x = NUMBERS(rows_at + 8 * i)[0]
        if odd or x != x:
            for j in range(j0, j1):
                y = NUMBERS(columns_at + 8 * j)[0]
                if x != x or y != y:
                    PLAIN(descriptor, a_base, b_base, i, j, strip + 8 * (j - j0))
        CALL_ROW(d[D_ROW], context, strip, i, j0, j1 - j0)


def plain(descriptor: int, a: int, b: int, i: int, j: int, target: int) -> None:
    """Write a sum that has an infinity or NaN in the order of K: what IEEE says."""
    d = WORDS(descriptor)
    NUMBERS(target)[0] = 0.0
    for s in range(d[D_SUM_SIZE]):
        a_at, b_at = SUM_OFFSETS(descriptor, s, a + i * d[D_A_ROW], b + j * d[D_B_COLUMN])
        ADD_PRODUCTS(a_at, d[D_A_K], b_at, d[D_B_K], d[D_K], target)
