"""The gradients of a whole network of 128 columns in 16 bits as one launch on Hopper.

It is `network_groups_backward` for sums that do not fit a thread's registers beside rows: these go
from layer to layer through shared memory, and a layer is made in halves of 64 columns. Both groups
of a block share a tile of 128 rows, of which each takes 64 forward and back; then each has half of
every layer's gradients for all rows. The biases' gradients are a product of Q' with a panel of
ones.

WIDTH is that of a half here, and HIDDEN that of the layers.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.accesses import fetch_commit
from numfuse.backends.cuda.compile.engines import copy_fence, line_prefetch
from numfuse.backends.cuda.compile.intrinsics import (
    fresh,
    group_barrier,
    least,
    same,
    warp_barrier,
)
from numfuse.backends.cuda.compile.scalars import both
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_fragments import poke_word, store_real_if
from numfuse.backends.cuda.kernels.network_groups import begin
from numfuse.backends.cuda.kernels.network_groups_backward import (
    ahead,
    back,
    write_points_gradient,
)
from numfuse.backends.cuda.kernels.network_half import prepare
from numfuse.backends.cuda.kernels.network_layers import Layers, Rows, Steps, own_rows
from numfuse.backends.cuda.kernels.network_panels import descriptor, place_of_fragment
from numfuse.backends.cuda.kernels.network_passes import width_of


def fill(memory, t):
    """Write the panel of ones, and zeros around the rows of x and of the cotangents."""
    for i in range(t, ONES_BYTES // 4, THREADS):
        poke_word(memory + ONES_AT + i * 4, ONES_WORD)
    if PADDED:
        for i in range(t, GROUPS * GROUP_BYTES // 4, THREADS):
            poke_word(memory + GROUPS_AT + i * 4, 0)


def clear_rows(base, lane, row, end):
    """Write 0 to a warp's rows of which there is no point: nothing of them is added."""
    warp_barrier()
    while row < end:
        for panel in unrolled((COUNT - 1) * (HIDDEN // 64)):
            at = base + row * 128 + lane * 4
            poke_word(at + (LEFT_AT + panel * PANEL_BYTES), 0)
            poke_word(at + (RIGHT_AT + panel * PANEL_BYTES), 0)
        row += 1


def share(group):
    """Let the tensor cores see what a group's warps wrote."""
    copy_fence()
    group_barrier(1 + group, 128)


def expect(u, x: Rows, grad: Rows, first, count):
    """Bring the rows of a tile to come to the second-level cache, a line of each."""
    row = least(first + (u & 63), count - 1)
    if u < 64:
        line_prefetch(x.address + row * (x.row * 2))
    else:
        line_prefetch(grad.address + row * (grad.row * 2))


def add_gradients(total, ones, words, memory, group):
    """Add a group's parts of Q' X and Q' 1 up, for the rows of all groups.

    These are 64 columns of Q and, where the last layer's Q has no more, 64 columns of X. So one
    text serves both groups: with a text for each, ptxas has too few registers and puts all of the
    kernel's wgmma in a row. A part is waited for before the next begins.
    """
    own = group * PANEL_BYTES
    for layer in unrolled(COUNT):
        for r in unrolled(GROUPS):
            base = memory + (GROUPS_AT + r * GROUP_BYTES)
            rows = base + (LEFT_AT + (layer - 1) * TILE_BYTES)
            gradients = base + (RIGHT_AT + layer * TILE_BYTES) + own
            rest = HIDDEN_ACROSS
            if layer == 0:
                rows, rest = base, POINTS_ACROSS
            if layer == COUNT - 1:
                rows, gradients, rest = rows + own, base + TAIL_AT, 0
            words[2 * r] = descriptor(gradients, 0)
            words[2 * r + 1] = descriptor(rows, rest)
            words[2 * (GROUPS + r)] = descriptor(gradients, 0)
            words[2 * (GROUPS + r) + 1] = descriptor(memory + ONES_AT, 0)
        if layer == 0:
            ADD_FIRST(total, TOTAL_AT[layer], ones, 4 * layer, words)
        elif layer == COUNT - 1:
            ADD_LAST(total, TOTAL_AT[layer], ones, 4 * layer, words)
        else:
            ADD(total, TOTAL_AT[layer], ones, 4 * layer, words)


def write_gradients(total, ones, lane, row, group, plane):
    """Write a group's sums to its block's plane, without the rows and columns that pad them."""
    for layer in unrolled(COUNT):
        LAST = layer == COUNT - 1
        for h in unrolled(2):
            n = row + (lane >> 2) + 8 * h
            before = 0
            if LAST:
                before = group * 64
            else:
                n = n + group * 64
            there = n < WIDTHS[layer + 1]
            for j in unrolled(TOTAL_COLUMNS[layer] // 8):
                for b in unrolled(2):
                    k = before + 8 * j + (lane & 3) * 2 + b
                    at = plane + (WEIGHTS_TO[layer] + k * WIDTHS[layer + 1] + n) * 4
                    value = total[TOTAL_AT[layer] + 4 * j + 2 * h + b]
                    store_real_if(at, value, both(there, k < WIDTHS[layer]))
            at = plane + (BIASES_TO[layer] + n) * 4
            once = both(there, (lane & 3) == 0)
            if LAST:
                once = both(once, group == 0)
            store_real_if(at, ones[4 * layer + 2 * h], once)


def backward(x: Rows, layers: Layers, steps: Steps, grad: Rows, count, planes, d_x: Rows):
    """Add up a network's gradients over a block's tiles, and write those by the points.

    There is a network a row of the grid.
    """
    memory = MEMORY() + 0
    held = cuda.local.array(HELD, REAL)
    sums = cuda.local.array(SUMS, REAL)
    left = cuda.local.array(WIDTH // 4, WORD)
    bent = cuda.local.array(4, WORD)
    raw = cuda.local.array(POINTS_PER_THREAD, WORD)
    raw_tail = cuda.local.array(COTANGENTS_PER_THREAD, WORD)
    words = cuda.local.array(WORDS, WORD)
    total = cuda.local.array(TOTALS, REAL)
    ones = cuda.local.array(ONES_TOTALS, REAL)
    for i in unrolled(TOTALS):
        total[i] = ZERO
    for i in unrolled(ONES_TOTALS):
        ones[i] = ZERO
    t = cuda.threadIdx.x
    prepare(memory, t, layers, steps, held)
    fill(memory, t)
    copy_fence()
    BARRIER()
    points: Rows = own_rows(x, steps.x)
    cotangents: Rows = own_rows(grad, steps.out)
    moved: Rows = own_rows(d_x, steps.d_x)
    group = same(t >> 7)
    head = descriptor(memory + WEIGHTS_AT[0], 0)
    inner = descriptor(memory + WEIGHTS_AT[1], 0)
    inner_back = descriptor(memory + WEIGHTS_AT[1], ALONG)
    tail_back = descriptor(memory + WEIGHTS_AT[COUNT - 1], ALONG)
    head_back = descriptor(memory + WEIGHTS_AT[0], ALONG)
    blocks = cuda.gridsize(1) // THREADS
    block_first = cuda.blockIdx.x * (GROUPS * 64)
    step = blocks * (GROUPS * 64)
    while block_first < count:
        # no register keeps what is made of the thread's number here
        v = fresh(t)
        u, lane = v & 127, v & 31
        row = (u >> 5) * 16
        near = (lane & 3) * 2
        at = place_of_fragment(lane, row, 64)
        bias = memory + BIAS_AT[0] + near * 4
        base = memory + GROUPS_AT + group * GROUP_BYTES
        keep, slopes, tail_at = base + LEFT_AT, base + RIGHT_AT, base + TAIL_AT
        kept = keep if RECTIFIED else slopes
        first = block_first + group * 64
        FETCH_POINTS(raw, base, u, points, first, count)
        FETCH_COTANGENTS(raw_tail, tail_at, u, cotangents, first, count)
        fetch_commit()
        expect(u, points, cotangents, first + step, count)
        FETCH_WAIT()
        SETTLE_POINTS(raw, base, u, first, count)
        SETTLE_COTANGENTS(raw_tail, tail_at, u, first, count)
        share(group)
        for h in unrolled(HIDDEN // 64):
            begin(sums, bias + h * 256)
            MULTIPLY_FIRST(sums, descriptor(base, ALONG), head + h * HEAD_STEP)
            to, down = keep + h * PANEL_BYTES, slopes + h * PANEL_BYTES
            ahead(sums, left, bent, at, to, down, near + 64 * h, width_of(0))
        share(group)
        for layer in range(1, COUNT - 1):
            weights = inner + (layer - 1) * (HIDDEN * HIDDEN * 2 // 16)
            rows = descriptor(keep + (layer - 1) * TILE_BYTES, ALONG)
            for h in unrolled(HIDDEN // 64):
                begin(sums, bias + layer * (HIDDEN * 4) + h * 256)
                MULTIPLY(sums, rows, weights + h * INNER_STEP)
                more = layer * TILE_BYTES + h * PANEL_BYTES
                own = near + 64 * h
                ahead(sums, left, bent, at, keep + more, slopes + more, own, width_of(layer))
            share(group)
        for h in unrolled(HIDDEN // 64):
            MULTIPLY_LAST_BACK(sums, descriptor(tail_at, ALONG), tail_back + h * TAIL_STEP)
            more = (COUNT - 2) * TILE_BYTES + h * PANEL_BYTES
            back(sums, left, bent, at, kept + more, slopes + more)
        share(group)
        for layer in range(COUNT - 2, 0, -1):
            weights = inner_back + (layer - 1) * (HIDDEN * HIDDEN * 2 // 16)
            rows = descriptor(slopes + layer * TILE_BYTES, ALONG)
            for h in unrolled(HIDDEN // 64):
                MULTIPLY_BACK(sums, rows, weights + h * BACK_STEP)
                more = (layer - 1) * TILE_BYTES + h * PANEL_BYTES
                back(sums, left, bent, at, kept + more, slopes + more)
            share(group)
        if MOVES:
            MULTIPLY_MOVED(sums, descriptor(slopes, ALONG), head_back)
            write_points_gradient(sums, lane, moved, first + row, count)
        if first + 64 > count:
            clear_rows(base, lane, max(row, count - first), row + 16)
        copy_fence()
        BARRIER()
        add_gradients(total, ones, words, memory, group)
        BARRIER()
        block_first += step
    part = cuda.blockIdx.y * blocks + cuda.blockIdx.x
    row = ((t >> 5) & 3) * 16
    write_gradients(total, ones, t & 31, row, group, planes + part * (LENGTH * 4))


#: Strides are in elements, `planes` is an address.
WIDE_BACKWARD = Schema(backward)
