"""A whole network's jet, or its backward, as one launch: a block takes points through all layers.

A block has tiles of POINTS points, a row of WIDTH values for each of their MEMBERS (the value, D
directions, S second derivatives). A layer is a product of the tile's rows, in register tiles, and a
pass over points, in which a thread has a column: what makes sums over points needs no other thread.
A backward makes the forward again; the sums of a tile wait in its block's part of the workspace. In
that order of steps two tiles in shared memory are enough: Q of a layer, and what went into it.

Weight gradients are added to planes, one for each group of threads that has a part of the rows, and
joined by the launch that follows, in a fixed order.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile.engines import grid_wait
from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_layers import (
    MOST_LAYERS,
    Layers,
    Rows,
    Steps,
    await_weights,
    fetch_weights,
    own_layer,
)
from numfuse.backends.cuda.kernels.network_passes import first_pass, inner_pass, width_of

i32, i64 = np.int32, np.int64


@dataclass
class Member:
    """A result or a cotangent: its address, 0 for none, and its strides in elements."""

    address: Any
    network: Any
    member: Any
    row: Any
    column: Any


@dataclass
class Members:
    """The value, the directions and the second derivatives."""

    value: Member
    dot: Member
    ddot: Member


@dataclass
class Points:
    """The inputs: an address, strides in elements; how many there are, and a block has."""

    address: Any
    row: Any
    column: Any
    count: Any
    share: Any


# --- what a block keeps in shared memory ----------------------------------------------------------
def prepare(memory, t, layers: Layers, steps: Steps, network, table):
    """Write the biases, the first layer's weights and tangents, and the last layer's weights.

    What is no column of a layer is 0; a bias that is not there is -0, which changes no sum.
    """
    for i in range(t, (COUNT - 1) * WIDTH, THREADS):
        layer = i // WIDTH
        n = i - layer * WIDTH
        weights, row, column, bias, step = own_layer(layers, steps, layer, network)
        value = NOTHING
        if bias != 0 and n < width_of(layer):
            value = LOAD(bias, n * step)
        POKE(memory, BIAS_AT + i, value)
    first, first_row, first_column, _bias, _step = own_layer(layers, steps, 0, network)
    for n in range(t, WIDTH, THREADS):
        for d in range(DIRECTIONS):
            moved = ZERO
            if n < WIDTHS[1]:
                for i in range(INPUTS):
                    w = LOAD(first, i * first_row + n * first_column)
                    moved = fused(LOAD(table, UNITS_AT + d * INPUTS + i), w, moved)
            POKE(memory, MOVED_AT + d * WIDTH + n, moved)
        for i in range(INPUTS):
            value = ZERO
            if n < WIDTHS[1]:
                value = LOAD(first, i * first_row + n * first_column)
            POKE(memory, FIRST_AT + i * WIDTH + n, value)
        weights, row, column, bias, step = own_layer(layers, steps, COUNT - 1, network)
        for o in range(OUTPUTS):
            value = ZERO
            if n < WIDTHS[COUNT - 1]:
                value = LOAD(weights, n * row + o * column)
            POKE(memory, LAST_AT + o * WIDTH + n, value)


def fetch_rows(memory, t, to, address, row, column, first, count):
    """Bring rows of the width of the inputs to shared memory."""
    for i in range(t, count * INPUTS, THREADS):
        p = i // INPUTS
        POKE(memory, to + i, LOAD(address, (first + p) * row + (i - p * INPUTS) * column))


def fetch_points(memory, t, x: Points, x_dot: Rows, steps: Steps, network, first, count):
    """Bring the inputs of a tile to shared memory, and their own directions where they have any."""
    address, moved = x.address, x_dot.address
    if SEVERAL:
        address = address + network * SIZE * steps.x
        moved = moved + network * SIZE * steps.x_dot
    fetch_rows(memory, t, INPUTS_AT, address, x.row, x.column, first, count)
    if POINT_DIRECTIONS:
        to = INPUTS_AT + POINTS * INPUTS
        fetch_rows(memory, t, to, moved, x_dot.row, x_dot.column, first, count)


def place_of(ends: Members, network, m, point, o):
    """Return where a member of a result, or of a cotangent, is: an address and an index."""
    if m == 0:
        at = point * ends.value.row + o * ends.value.column
        if SEVERAL:
            at = at + network * ends.value.network
        return ends.value.address, at
    if m <= DIRECTIONS:
        at = (m - 1) * ends.dot.member + point * ends.dot.row + o * ends.dot.column
        if SEVERAL:
            at = at + network * ends.dot.network
        return ends.dot.address, at
    at = (m - 1 - DIRECTIONS) * ends.ddot.member + point * ends.ddot.row + o * ends.ddot.column
    if SEVERAL:
        at = at + network * ends.ddot.network
    return ends.ddot.address, at


def fetch_cotangents(memory, t, ends: Members, network, first, count):
    """Bring the cotangents of a tile to shared memory; those that are not there are 0."""
    for i in range(t, count * (MEMBERS * OUTPUTS), THREADS):
        row = i // OUTPUTS
        p = row // MEMBERS
        address, at = place_of(ends, network, row - p * MEMBERS, first + p, i - row * OUTPUTS)
        value = ZERO
        if address != 0:
            value = LOAD(address, at)
        POKE(memory, GRADS_AT + i, value)


# --- the kernel -----------------------------------------------------------------------------------
# Where a thread's part begins. On tensor cores a warp has WARP_ROWS rows and SPAN columns. Lane
# 4 g + s has rows of its warp from DEALT g on, columns of the other factor from there on, k from
# DEALT s on, and sums of columns from NEAR s on.
def own_row(t):
    """Return the first row of a thread's sums, and the first of its warp's."""
    if TENSOR:
        warp = (t >> 5) // (WIDTH // SPAN) * WARP_ROWS
        return warp + ((t & 31) >> 2) * DEALT, warp
    if LANES:
        warp = (t >> 5) // (ACROSS // 4) * (8 * MR)
        return warp + ((t >> 1) & 7), warp
    return t // ACROSS, 0


def own_column(t):
    """Return a thread's number along the columns; on tensor cores its warp's first column."""
    if TENSOR:
        return (t >> 5) % (WIDTH // SPAN) * SPAN
    if LANES:
        return (t >> 5) % (ACROSS // 4) * 4 + ((t & 1) | ((t >> 3) & 2))
    return t % ACROSS


def left_at(t):
    """Return where a thread's values of the tile's rows begin."""
    row, _warp = own_row(t)
    if TENSOR:
        return row * PITCH + (t & 3) * DEALT
    return row * PITCH


def right_at(t):
    """Return where its columns of the weights begin, or of a slice of their rows."""
    if TENSOR:
        column = own_column(t) + ((t & 31) >> 2) * DEALT
        return WEIGHTS_AT + (t & 3) * (DEALT * PITCH) + column
    return WEIGHTS_AT + own_column(t) * FEW


def right_back_at(t):
    """Return where its rows of the weights begin, or of a slice of their columns."""
    if TENSOR:
        row = own_column(t) + ((t & 31) >> 2) * DEALT
        return WEIGHTS_AT + row * BACK_PITCH + (t & 3) * DEALT
    return WEIGHTS_AT + own_column(t) * BACK_PITCH


def sums_at(t, step):
    """Return where its sums begin in the tile; `step` is from a thread's columns to the next."""
    row, _warp = own_row(t)
    if GROUPED and step == 1:  # (rows as in fragments: Q comes from shared memory)
        row = row - ((t & 31) >> 2) * (DEALT - 1)
    if TENSOR:
        return row * PITCH + own_column(t) + (t & 3) * NEAR
    return row * PITCH + own_column(t) * step


def here(t):
    """Return the thread's number; what a phase computes of it is computed there, not kept."""
    if TIGHT:
        return FRESH(i32(t))
    return t


def write_results(memory, t, layers: Layers, steps: Steps, ends: Members, network, first, count):
    """Write the results of a tile: the last layer is a product alone."""
    _weights, _row, _column, bias, step = own_layer(layers, steps, COUNT - 1, network)
    for i in range(t, count * (MEMBERS * OUTPUTS), THREADS):
        row = i // OUTPUTS
        o = i - row * OUTPUTS
        value = ZERO
        for k in range(0, WIDTH, FEW):
            value = DOT(value, memory, row * PITCH + k, LAST_AT + o * WIDTH + k)
        p = row // MEMBERS
        m = row - p * MEMBERS
        if m == 0 and bias != 0:
            value = value + LOAD(bias, o * step)
        address, at = place_of(ends, network, m, first + p, o)
        STORE(address, at, value)


def begin_forward(memory, t, layers: Layers, steps: Steps, network, layer, held):
    """Bring the weights of a hidden layer to shared memory, or begin to, for a forward."""
    if STREAMED:
        weights, row, column, _bias, _step = own_layer(layers, steps, layer, network)
        OPEN(memory, t, weights, row, column, width_of(layer - 1), width_of(layer))
    else:
        fetch_weights(memory, t, layers, steps, network, layer, held)


def multiply_forward(total, ahead, memory, t, layers: Layers, steps: Steps, network, layer, rows):
    """Make a thread's sums of a hidden layer, and put them in the place of its inputs."""
    CLEAR(total)
    if STREAMED:
        weights, row, column, _bias, _step = own_layer(layers, steps, layer, network)
        columns = width_of(layer)
        STREAM(total, memory, t, weights, row, column, width_of(layer - 1), columns, rows)
    else:
        _row, warp_row = own_row(t)
        left, right = left_at(t), right_at(t)
        if warp_row < rows:
            if FETCHED and not TENSOR:
                FETCH(ahead, memory, left, right)
                for k in range(0, WIDTH, 2 * CHUNK):
                    after = min(k + 2 * CHUNK, WIDTH - CHUNK)
                    y, next_y = right + k * PITCH, right + after * PITCH
                    MULTIPLY_FETCHED(total, ahead, memory, left + k, y, left + after, next_y)
            else:
                for k in range(0, WIDTH, CHUNK):
                    MULTIPLY(total, memory, left + k, right + k * PITCH)
    if TWICE:
        SETTLE(total)
    BARRIER()
    if TURNED:
        PUT_BACK(total, memory, sums_at(here(t), 1))
    else:
        PUT(total, memory, sums_at(here(t), FEW))


def hidden_layers(
    memory,
    t,
    layers: Layers,
    steps: Steps,
    network,
    total,
    ahead,
    given,
    made,
    weights,
    count,
    kept,
    layer_step,
):
    """Make a tile of what the last hidden layer gives, of inputs that are in shared memory.

    `kept` is where the sums of the tile are kept, of the second layer on, `layer_step` bytes apart.
    """
    if COUNT > 2:
        begin_forward(memory, here(t), layers, steps, network, 1, total)
    first_pass(memory, here(t), given, made, weights, 0, count)
    await_weights()
    BARRIER()
    for layer in range(1, COUNT - 1):
        rows = count * MEMBERS
        multiply_forward(total, ahead, memory, here(t), layers, steps, network, layer, rows)
        BARRIER()
        if layer < COUNT - 2:
            begin_forward(memory, here(t), layers, steps, network, layer + 1, total)
        sums = kept + (layer - 1) * layer_step
        inner_pass(memory, here(t), ahead, given, made, weights, 0, count, layer, sums, False)
        await_weights()
        BARRIER()


def forward(
    x: Points, x_dot: Rows, layers: Layers, steps: Steps, table, ends: Members, kept, layer_step
):
    """Write the results of a network for a part of the points."""
    memory = WINDOW(cuda.shared.array(0, dtype=REAL))
    total = cuda.local.array(TOTALS, REAL)
    ahead = cuda.local.array(FETCHES, REAL)
    given = cuda.local.array(AT_ONCE * GIVEN, REAL)
    made = cuda.local.array(AT_ONCE * MEMBERS, REAL)
    weights = cuda.local.array(WEIGHTS, REAL)
    for i in unrolled(WEIGHTS):
        weights[i] = LOAD(table, i)
    t = cuda.threadIdx.x
    network = cuda.blockIdx.y if SEVERAL else 0
    prepare(memory, t, layers, steps, network, table)
    if GROUPED:  # (what the launch before makes is the weights' images)
        grid_wait()
    first = cuda.blockIdx.x * x.share
    last = min(first + x.share, x.count)
    while first < last:
        count = min(last - first, POINTS)
        fetch_points(memory, here(t), x, x_dot, steps, network, first, count)
        BARRIER()
        tile = kept + (network * x.count + first) * POINT_KEPT
        hidden_layers(
            memory,
            t,
            layers,
            steps,
            network,
            total,
            ahead,
            given,
            made,
            weights,
            count,
            tile,
            layer_step,
        )
        write_results(memory, here(t), layers, steps, ends, network, first, count)
        BARRIER()
        first += POINTS


#: Sizes and strides are in elements.
ADDRESSES = "x_address x_dot_address table " + " ".join(
    f"layers_l{i}_{name}" for i in range(MOST_LAYERS) for name in ("weights", "bias")
)
ENDS = " ".join(f"ends_{name}_address" for name in ("value", "dot", "ddot"))
FORWARD = Schema(forward, u64=f"{ADDRESSES} {ENDS}", i64="kept")
