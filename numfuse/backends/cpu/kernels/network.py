"""The cells of a network, as templates: a block of points passes all layers while it is in level 2.

A block's *stack* has the members of its points (value, directions, second derivatives) one matrix
behind the other, each of a row a point, whose columns are padded to whole vectors. What is in the
padding is never multiplied. A cell is some blocks, one after another; what they add to the
gradients of weights and biases is summed up in the cell's own place.

Kernels trust the descriptor. Free names in UPPER case are bound by `numfuse.runtime.specialise`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from numfuse.backends.cpu.kernels import groups, library, protocol
from numfuse.backends.cpu.llvm import inplace, intrinsics, moves
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Rows that are few.
FEW = 2
#: Rows of a gradient that a cell sums up, and columns that are copied at once.
TILE_ROWS, STRIP = 64, 16


def product(
    a: int, a_step: int, rows: int, k: int, b: int, b_step: int, n: int,
    c: int, c_step: int, bias: int, add: int,
) -> None:  # fmt: skip
    """``c = a b`` of so many rows, and `n` vectors of columns; see `llvm.inplace.make_tile`."""
    if rows <= FEW:  # of wide tiles, as few sums do not hide their latency
        for j in range(0, n, WIDE):
            at = j * VECTOR
            plus = bias + at if bias != 0 else 0
            FEW_ROWS(
                rows, min(WIDE, n - j), k, a, a_step, b + at, b_step, c + at, c_step, plus, add
            )
        return
    # Tiles of one height: a last one of few rows would have too few sums, too.
    tiles = (rows + MR - 1) // MR
    height = (rows + tiles - 1) // max(1, tiles)
    row = SIZE if DOWN else a_step
    for i in range(0, rows, max(1, height)):
        for j in range(0, n, VECTORS):
            at = j * VECTOR
            plus = bias + at if bias != 0 else 0
            TILE(
                min(height, rows - i),
                min(VECTORS, n - j),
                k,
                a + i * row,
                a_step,
                b + at,
                b_step,
                c + i * c_step + at,
                c_step,
                plus,
                add,
            )


def own_words(descriptor: int, network: int, workspace: int) -> int:
    """Return the descriptor of a network of a batch, which has the addresses of its operands."""
    if network == 0:
        return descriptor
    d, own = WORDS(descriptor), WORDS(workspace + WORDS(descriptor)[N_OWN])
    for i in range(d[N_WORDS]):
        own[i] = d[i]
    for i in range(SLOTS):
        own[FIRST_SLOT + 3 * i] += network * d[N_BATCH + i]
    return workspace + d[N_OWN]


def part_of(part: int, parts: int, rows: int) -> tuple[int, int]:
    """Return the first row of a part of so many rows, and how many it has: wholes of a vector's."""
    each = ((rows + parts - 1) // parts + LANES - 1) // LANES * LANES
    first = min(part * each, rows)
    return first, min(each, rows - first)


def pack_cell(descriptor: int, cell: int, workspace: int) -> None:
    """Tell where a layer's weights, their transpose and its bias lie, and its gradients go.

    Operands that are no rows of whole vectors are copied to the call's memory, padded with zeros,
    some rows of each by every cell of a network; gradients that are joined from several cells' have
    no address.
    """
    cells = WORDS(descriptor)[N_CELLS]
    d = WORDS(OWN_WORDS(descriptor, cell // cells, workspace))
    part = cell % cells
    k, n, packed = d[D_K], d[D_N], d[SLOT_PACKED]
    w, row, column = d[SLOT_W], d[SLOT_W + 1], d[SLOT_W + 2]
    table = WORDS(packed + d[P_TABLE])
    table[0], table[1], table[2] = w, d[SLOT_TURNED], d[SLOT_BIAS]
    table[3], table[4] = d[SLOT_D_W], d[SLOT_D_BIAS]
    if d[P_W] >= 0:
        table[0] = packed + d[P_W]
        first, rows = PART_OF(part, cells, k)
        to = table[0] + first * d[P_STEP]
        PAD(w + first * row, row, column, rows, n, to, d[P_STEP])
    if d[P_TURNED] >= 0:
        table[1] = packed + d[P_TURNED]
        first, rows = PART_OF(part, cells, n)
        to = table[1] + first * d[P_TURNED_STEP]
        PAD(w + first * column, column, row, rows, k, to, d[P_TURNED_STEP])
    if d[P_BIAS] >= 0:
        table[2] = packed + d[P_BIAS]
        if part == 0:
            PAD(d[SLOT_BIAS], 0, d[SLOT_BIAS + 2], 1, n, table[2], d[P_STEP])


def take(source: int, row: int, column: int, rows: int, n: int, target: int, step: int) -> None:
    """Copy a matrix of any strides to padded rows; of no source, zeros."""
    if source != 0 and row == SIZE and column != SIZE:  # its columns are rows in memory
        for j in range(0, n, LANES):
            for i in range(0, rows, LANES):
                at, place = source + j * column + i * SIZE, target + i * step + j * SIZE
                TRANSPOSE(at, column, n - j, rows - i, place, step)
        return
    for i in range(rows):
        to = SUMS(target + i * step)
        if source == 0:
            for j in range(n):
                to[j] = ZERO
        elif column == SIZE:
            from_ = SUMS(source + i * row)
            for j in range(n):
                to[j] = from_[j]
        else:
            at = source + i * row
            for j in range(n):
                to[j] = SUMS(at + j * column)[0]


def pad(source: int, row: int, column: int, rows: int, n: int, target: int, step: int) -> None:
    """Copy a matrix of any strides to rows padded with zeros."""
    # By strips of columns where they lie in lines of their own: level 1 has a strip's.
    strip = max(n, STRIP) if column == SIZE else STRIP
    for j in range(0, n, strip):
        at = source + j * column
        TAKE(at, row, column, rows, min(strip, n - j), target + j * SIZE, step)
    for i in range(rows):
        to = SUMS(target + i * step)
        for j in range(n, step // SIZE):
            to[j] = ZERO


def give(source: int, step: int, rows: int, n: int, target: int, row: int, column: int) -> None:
    """Copy padded rows to a matrix of any strides; of no source, zeros."""
    for i in range(rows):
        at = target + i * row
        if source == 0:
            for j in range(n):
                SUMS(at + j * column)[0] = ZERO
        else:
            from_ = SUMS(source + i * step)
            for j in range(n):
                SUMS(at + j * column)[0] = from_[j]


def take_rows(
    descriptor: int, slot: int, first: int, points: int, n: int, target: int, step: int
) -> None:
    """Copy an operand's rows of a block to padded rows."""
    d = WORDS(descriptor)
    TAKE(d[slot] + first * d[slot + 1], d[slot + 1], d[slot + 2], points, n, target, step)


def give_rows(
    descriptor: int, slot: int, first: int, points: int, n: int, source: int, step: int
) -> None:
    """Copy padded rows to a result's rows of a block, where it is wanted."""
    d = WORDS(descriptor)
    if d[slot] != 0:
        to = d[slot] + first * d[slot + 1]
        GIVE(source, step, points, n, to, d[slot + 1], d[slot + 2])


def results_of(descriptor: int, member: int, point: int) -> int:
    """Address of a point's row in a member of the results, or of their cotangents; 0: none."""
    d = WORDS(descriptor)
    slot, index = SLOT_VALUE, 0
    if member > d[N_DIRECTIONS]:
        slot, index = SLOT_SECOND, member - 1 - d[N_DIRECTIONS]
    elif member > 0:
        slot, index = SLOT_DIRECTION, member - 1
    if d[slot] == 0:
        return 0
    step = d[N_DIRECTION_STEP] if slot == SLOT_DIRECTION else d[N_SECOND_STEP]
    return d[slot] + index * step + point * d[slot + 1]


def results_step(descriptor: int, member: int, axis: int) -> int:
    """Return the distance of points (axis 1) or columns (2) in a member of the results."""
    d = WORDS(descriptor)
    if member > d[N_DIRECTIONS]:
        return d[SLOT_SECOND + axis]
    return d[SLOT_DIRECTION + axis] if member > 0 else d[SLOT_VALUE + axis]


def open_rows(descriptor: int, workspace: int, elements: int) -> None:
    """Prepare the context of row functions, which take a block's members at once."""
    d, c = WORDS(descriptor), WORDS(workspace)
    c[3 * G_WEIGHTS], c[3 * G_WEIGHTS + 1] = d[SLOT_TABLE], d[SLOT_TABLE + 1]
    c[3 * G_WEIGHTS + 2] = SIZE
    c[3 * G_SIZES + 1], c[3 * G_SIZES + 2] = d[N_DIRECTIONS], d[N_SECONDS]
    c[C_SCRATCH_STRIDE] = elements * SIZE
    for slot in (G_Z, G_OUT, G_GRAD):
        c[3 * slot + 1], c[3 * slot + 2], c[3 * slot + 4] = 0, SIZE, elements * SIZE


def call_rows(
    row: int, workspace: int, scratch: int, z: int, grad: int, out: int, elements: int
) -> None:
    """Call a row function on a block's members, of so many elements each."""
    c = WORDS(workspace)
    c[3 * G_Z], c[3 * G_GRAD], c[3 * G_OUT] = z, grad, out
    c[C_SCRATCH] = scratch
    CALL_ROW(row, workspace, 0, 0, 0, elements)


def stacks_of(descriptor: int, block: int, workspace: int) -> int:
    """Return where a block has its stacks: in the memory of the call, or in the workspace."""
    d = WORDS(descriptor)
    return d[SLOT_STACKS] + block * d[N_STACKS] if d[N_STACKS] != 0 else workspace


def forward_block(
    descriptor: int, workspace: int, stacks: int, first: int, points: int, layers: int, fresh: bool
) -> None:
    """Pass a block through the first `layers` layers; each one's sums and results have a place.

    Directions are constants: only a `fresh` block, the first of so many points, needs their rows.
    """
    d = WORDS(descriptor)
    layer = descriptor + 8 * N_LAYER
    w = WORDS(layer)
    stack = stacks + w[L_INPUT]
    TAKE_ROWS(descriptor, SLOT_X, first, points, w[L_K], stack, w[L_IN_STEP])
    for i in range(d[N_DIRECTIONS] if fresh else 0):
        stack += points * w[L_IN_STEP]
        TAKE(
            d[SLOT_UNITS] + i * d[SLOT_UNITS + 1], 0, d[SLOT_UNITS + 2], points, w[L_K],
            stack, w[L_IN_STEP],
        )  # fmt: skip
    for i in range(layers):
        w = WORDS(layer)
        table = WORDS(d[SLOT_PACKED] + w[L_TABLE])
        stack, z = stacks + w[L_INPUT], stacks + w[L_Z]
        step, out_step = w[L_IN_STEP], w[L_STEP]
        vectors = out_step // VECTOR
        bias = table[2] if w[L_BIAS] != 0 else 0
        moved = points * (w[L_MEMBERS] - 1)
        CALL_PRODUCT(
            w[L_ALONG], stack, step, points, w[L_K], table[0], w[L_W_STEP], vectors,
            z, out_step, bias, 0,
        )  # fmt: skip
        if moved > 0 and (i > 0 or fresh):
            CALL_PRODUCT(
                w[L_ALONG], stack + points * step, step, moved, w[L_K], table[0],
                w[L_W_STEP], vectors, z + points * out_step, out_step, 0, 0,
            )  # fmt: skip
        if w[L_ROW] != 0:
            elements = points * out_step // SIZE
            OPEN_ROWS(descriptor, workspace, elements)
            scratch = workspace + d[N_SCRATCH] - (HELD + w[L_MEMBERS]) * elements * SIZE
            CALL_ROWS(w[L_ROW], workspace, scratch, z, 0, stacks + w[L_OUT], elements)
        layer += 8 * LAYER_WORDS


def forward_cell(descriptor: int, cell: int, workspace: int) -> None:
    """Write the results of a cell's points."""
    cells = WORDS(descriptor)[N_CELLS]
    descriptor = OWN_WORDS(descriptor, cell // cells, workspace)
    d = WORDS(descriptor)
    block, layers = d[N_BLOCK], d[N_LAYERS]
    start = cell % cells * d[N_CELL]
    last = WORDS(descriptor + 8 * (N_LAYER + (layers - 1) * LAYER_WORDS))
    end = min(d[N_POINTS], start + d[N_CELL])
    for first in range(start, end, block):
        points = min(block, end - first)
        fresh = first == start or points < block or d[N_STACKS] != 0
        stacks = STACKS_OF(descriptor, first // block, workspace)
        FORWARD_BLOCK(descriptor, workspace, stacks, first, points, layers, fresh)
        at, step, n = stacks + last[L_OUT], last[L_STEP], last[L_N]
        there = last[L_MEMBERS] if last[L_ROW] == 0 else 1 + d[N_DIRECTIONS] + d[N_SECONDS]
        for member in range(1 + d[N_DIRECTIONS] + d[N_SECONDS]):
            to = RESULTS_OF(descriptor, member, first)
            row, column = RESULTS_STEP(descriptor, member, 1), RESULTS_STEP(descriptor, member, 2)
            source = at + member * points * step if member < there else 0
            GIVE(source, step, points, n, to, row, column)


def backward_block(
    descriptor: int, workspace: int, stacks: int, first: int, points: int, partial: int, add: bool
) -> None:
    """Add what a block gives to the gradients at `partial`; write its rows of d_x.

    Where blocks have slopes in the call's memory, these stay there instead.
    """
    d = WORDS(descriptor)
    layers = d[N_LAYERS]
    grad, q = workspace + d[N_GRAD], workspace + d[N_Q]
    w = WORDS(descriptor + 8 * (N_LAYER + (layers - 1) * LAYER_WORDS))
    step, n = w[L_STEP], w[L_N]
    left = d[SLOT_SLOPES] + first // d[N_BLOCK] * d[N_SLOPES]
    if d[N_SLOPES] != 0 and w[L_BACK] == 0:
        grad = left + w[L_SLOPES]
    members = w[L_MEMBERS] if w[L_BACK] == 0 else 1 + d[N_DIRECTIONS] + d[N_SECONDS]
    for member in range(members):
        source, target = RESULTS_OF(descriptor, member, first), grad + member * points * step
        row, column = RESULTS_STEP(descriptor, member, 1), RESULTS_STEP(descriptor, member, 2)
        TAKE(source, row, column, points, n, target, step)
    for i in range(layers):
        w = WORDS(descriptor + 8 * (N_LAYER + (layers - 1 - i) * LAYER_WORDS))
        step, in_step, stack = w[L_STEP], w[L_IN_STEP], stacks + w[L_INPUT]
        slopes = grad
        table = WORDS(d[SLOT_PACKED] + w[L_TABLE])
        if w[L_BACK] != 0:
            slopes, elements = q, points * step // SIZE
            if d[N_SLOPES] != 0:
                slopes = left + w[L_SLOPES]
            OPEN_ROWS(descriptor, workspace, elements)
            scratch = workspace + d[N_SCRATCH] - (HELD + w[L_MEMBERS]) * elements * SIZE
            CALL_ROWS(w[L_BACK], workspace, scratch, stacks + w[L_Z], grad, slopes, elements)
        if w[L_D_BIAS] >= 0:
            # the product of a row of ones, which is one 1
            CALL_PRODUCT(
                w[L_DOWN], workspace + d[N_ONE], 0, 1, points, slopes, step, step // VECTOR,
                table[4] if table[4] != 0 else partial + w[L_D_BIAS], step, 0, add,
            )  # fmt: skip
        if w[L_D_W] >= 0:
            CALL_PRODUCT(
                w[L_DOWN], stack, in_step, w[L_K], points * w[L_MEMBERS], slopes, step,
                step // VECTOR, table[3] if table[3] != 0 else partial + w[L_D_W], step, 0, add,
            )  # fmt: skip
        if w[L_TURNED_STEP] != 0:
            # (of the first layer's inputs the points alone are no constants)
            rows = points if i == layers - 1 else points * w[L_MEMBERS]
            target = q if slopes == grad else grad
            CALL_PRODUCT(
                w[L_ALONG], slopes, step, rows, w[L_N], table[1], w[L_TURNED_STEP],
                in_step // VECTOR, target, in_step, 0, 0,
            )  # fmt: skip
            if target == q:
                grad, q = q, grad
    w = WORDS(descriptor + 8 * N_LAYER)
    GIVE_ROWS(descriptor, SLOT_D_X, first, points, w[L_K], grad, w[L_IN_STEP])


def backward_cell(descriptor: int, cell: int, workspace: int) -> None:
    """Make the blocks of a cell again if they were not kept, and what they add to the gradients."""
    cells = WORDS(descriptor)[N_CELLS]
    descriptor = OWN_WORDS(descriptor, cell // cells, workspace)
    d = WORDS(descriptor)
    start = cell % cells * d[N_CELL]
    end = min(d[N_POINTS], start + d[N_CELL])
    partial = d[SLOT_PARTIAL] + cell % cells * d[N_PARTIAL]
    SUMS(workspace + d[N_ONE])[0] = ONE
    for first in range(start, end, d[N_BLOCK]):
        points = min(d[N_BLOCK], end - first)
        fresh = first == start or points < d[N_BLOCK] or d[N_STACKS] != 0
        stacks = STACKS_OF(descriptor, first // d[N_BLOCK], workspace)
        if d[N_KEPT] == 0:
            FORWARD_BLOCK(descriptor, workspace, stacks, first, points, d[N_MADE], fresh)
        BACKWARD_BLOCK(descriptor, workspace, stacks, first, points, partial, first > start)


def gradient_cell(descriptor: int, cell: int, workspace: int) -> None:
    """Sum up what all blocks give to some rows of a layer's gradient; the first with the bias's.

    The blocks have left their inputs and slopes in the call's memory.
    """
    tiles = WORDS(descriptor)[N_CELLS]
    descriptor = OWN_WORDS(descriptor, cell // tiles, workspace)
    d, w = WORDS(descriptor), WORDS(descriptor + 8 * N_LAYER)
    table = WORDS(d[SLOT_PACKED] + w[L_TABLE])
    top, step = cell % tiles * TILE_ROWS, w[L_STEP]
    d_w = table[3] if table[3] != 0 else d[SLOT_PARTIAL] + w[L_D_W]
    d_bias = table[4] if table[4] != 0 else d[SLOT_PARTIAL] + w[L_D_BIAS]
    SUMS(workspace + d[N_ONE])[0] = ONE
    stacks, slopes = d[SLOT_STACKS] + w[L_INPUT], d[SLOT_SLOPES] + w[L_SLOPES]
    for first in range(0, d[N_POINTS], d[N_BLOCK]):
        points = min(d[N_BLOCK], d[N_POINTS] - first)
        if top == 0 and w[L_D_BIAS] >= 0:
            CALL_PRODUCT(
                w[L_DOWN], workspace + d[N_ONE], 0, 1, points, slopes, step, step // VECTOR,
                d_bias, step, 0, first > 0,
            )  # fmt: skip
        if w[L_D_W] >= 0:
            CALL_PRODUCT(
                w[L_DOWN], stacks + top * SIZE, w[L_IN_STEP],
                min(TILE_ROWS, w[L_K] - top), points * w[L_MEMBERS], slopes, step, step // VECTOR,
                d_w + top * step, step, 0, first > 0,
            )  # fmt: skip
        stacks += d[N_STACKS]
        slopes += d[N_SLOPES]


# --- kernels ------------------------------------------------------------------------------------
@functools.cache
def products(acc: str, down: bool) -> specialise.Kernel:
    """Return the product of small matrices; `down`: of the transpose of its left factor."""
    r = library.registers(acc)
    # LLVM spills a register where all are taken: with 14 rows of 64 bytes the speed is half of that
    # with 13. Of 32 bytes it has a place for all six rows; five take 1.1 to 1.4 times as long where
    # rows of A or B meet in few sets of level 1.
    rows = r.held_rows - (r.vector_bytes != 32)
    # (beside the sums, registers hold the vectors of a row of B and a value of A)
    registers = 32 if r.vector_bytes == 64 or r.lanes else 16
    wide = min(8, rows * r.held_vectors // FEW, (registers - 1) // (FEW + 1))
    return specialise.kernel(
        product,
        FEW_ROWS=inplace.make_tile(acc, r.vector_bytes, FEW, wide, down),
        FEW=FEW,
        WIDE=wide,
        TILE=inplace.make_tile(acc, r.vector_bytes, rows, r.held_vectors, down),
        DOWN=down,
        MR=rows,
        VECTORS=r.held_vectors,
        VECTOR=r.vector_bytes,
        SIZE=r.itemsize,
    )


@functools.cache
def names(acc: str) -> dict[str, Any]:
    """Return the names that cells bind: words, and what they call."""
    r = library.registers(acc)
    words: dict[str, Any] = {
        "D_K": protocol.DESCRIPTOR["D_K"],
        "D_N": protocol.DESCRIPTOR["D_N"],
        **{f"SLOT_{x}": protocol.D_SLOTS + 3 * i for x, i in protocol.NETWORK_SLOTS.items()},
        **{f"G_{x.upper()}": groups.SLOTS[x] for x in ("weights", "sizes")},
        "G_Z": groups.SLOTS["pre_dot"],
        "G_OUT": groups.SLOTS["first"],
        "G_GRAD": groups.SLOTS["grad_dot"],
        **protocol.NETWORK,
        **protocol.LAYER,
        **protocol.SCRATCH,
        "N_LAYER": protocol.N_LAYER,
        "FIRST_SLOT": protocol.D_SLOTS,
        "SLOTS": len(protocol.NETWORK_SLOTS),
        "LAYER_WORDS": len(protocol.LAYER),
        "TILE_ROWS": TILE_ROWS,
        "STRIP": STRIP,
        "HELD": groups.COUNT,
        "VECTOR": r.vector_bytes,
        "LANES": r.vl,
        "SIZE": r.itemsize,
        "TRANSPOSE": moves.make_transpose(acc, acc, r.vl, r.vl),
        "ZERO": library.zero(acc),
        "ONE": np.dtype(acc).type(1),
        "WORDS": intrinsics.make_elements("int64"),
        "SUMS": intrinsics.make_elements(acc),
        "CALL_ROW": intrinsics.make_call(5),
        "CALL_PRODUCT": intrinsics.make_call(11),
    }
    rows = take, pad, give, take_rows, give_rows
    steps = own_words, part_of, *rows, results_of, results_step, stacks_of, open_rows, call_rows
    for template in (*steps, forward_block, backward_block):  # each may call those before it
        words[template.__name__.upper()] = specialise.device(template, **words)
    return words


@functools.cache
def cell(acc: str, name: str) -> specialise.Kernel:
    """Return a cell: "pack", "forward", "backward" or "gradient"."""
    templates = {
        "pack": pack_cell,
        "forward": forward_cell,
        "backward": backward_cell,
        "gradient": gradient_cell,
    }
    return specialise.kernel(templates[name], **names(acc))
