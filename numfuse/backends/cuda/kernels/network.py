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

from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_passes import first_pass, inner_pass, width_of

i32, i64 = np.int32, np.int64

#: Layers that a kernel has arguments for.
MOST_LAYERS = 8


@dataclass
class Layer:
    """Weights and bias of a layer; strides in elements. An address of 0: there is no bias."""

    weights: Any
    row: Any
    column: Any
    bias: Any
    step: Any


@dataclass
class Layers:
    """All layers; those behind the last are not used."""

    l0: Layer
    l1: Layer
    l2: Layer
    l3: Layer
    l4: Layer
    l5: Layer
    l6: Layer
    l7: Layer


@dataclass
class Member:
    """A result or a cotangent: its address, 0 for none, and its strides in elements."""

    address: Any
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


def layer_of(layers: Layers, number):
    """Return a layer: its weights, their strides, its bias and the step of that."""
    if COUNT > 1 and number == 1:
        return layers.l1.weights, layers.l1.row, layers.l1.column, layers.l1.bias, layers.l1.step
    if COUNT > 2 and number == 2:
        return layers.l2.weights, layers.l2.row, layers.l2.column, layers.l2.bias, layers.l2.step
    if COUNT > 3 and number == 3:
        return layers.l3.weights, layers.l3.row, layers.l3.column, layers.l3.bias, layers.l3.step
    if COUNT > 4 and number == 4:
        return layers.l4.weights, layers.l4.row, layers.l4.column, layers.l4.bias, layers.l4.step
    if COUNT > 5 and number == 5:
        return layers.l5.weights, layers.l5.row, layers.l5.column, layers.l5.bias, layers.l5.step
    if COUNT > 6 and number == 6:
        return layers.l6.weights, layers.l6.row, layers.l6.column, layers.l6.bias, layers.l6.step
    if COUNT > 7 and number == 7:
        return layers.l7.weights, layers.l7.row, layers.l7.column, layers.l7.bias, layers.l7.step
    return layers.l0.weights, layers.l0.row, layers.l0.column, layers.l0.bias, layers.l0.step


# --- what a block keeps in shared memory ----------------------------------------------------------
def prepare(memory, t, layers: Layers, table):
    """Write the biases, the first layer's weights and tangents, and the last layer's weights.

    What is no column of a layer is 0; a bias that is not there is -0, which changes no sum.
    """
    for i in range(t, (COUNT - 1) * WIDTH, THREADS):
        layer = i // WIDTH
        n = i - layer * WIDTH
        weights, row, column, bias, step = layer_of(layers, layer)
        value = NOTHING
        if bias != 0 and n < width_of(layer):
            value = LOAD(bias, n * step)
        POKE(memory, BIAS_AT + i, value)
    for n in range(t, WIDTH, THREADS):
        for d in range(DIRECTIONS):
            moved = ZERO
            if n < WIDTHS[1]:
                for i in range(INPUTS):
                    w = LOAD(layers.l0.weights, i * layers.l0.row + n * layers.l0.column)
                    moved = fused(LOAD(table, UNITS_AT + d * INPUTS + i), w, moved)
            POKE(memory, MOVED_AT + d * WIDTH + n, moved)
        for i in range(INPUTS):
            value = ZERO
            if n < WIDTHS[1]:
                value = LOAD(layers.l0.weights, i * layers.l0.row + n * layers.l0.column)
            POKE(memory, FIRST_AT + i * WIDTH + n, value)
        weights, row, column, bias, step = layer_of(layers, COUNT - 1)
        for o in range(OUTPUTS):
            value = ZERO
            if n < WIDTHS[COUNT - 1]:
                value = LOAD(weights, n * row + o * column)
            POKE(memory, LAST_AT + o * WIDTH + n, value)


def fetch_weights(memory, t, layers: Layers, layer, held):
    """Bring the weights of a hidden layer to shared memory, with 0 around them."""
    weights, row, column, _bias, _step = layer_of(layers, layer)
    if WIDE_WEIGHTS == "columns":  # runs of memory along K: neighbouring threads have other columns
        for v in unrolled(WIDTH * WIDTH // (FEW * THREADS)):
            i = v * THREADS + t
            n, k = i % WIDTH, i // WIDTH * FEW
            LOAD_FEW(held, v * FEW, weights + (k + n * column) * SIZE)
        for v in unrolled(WIDTH * WIDTH // (FEW * THREADS)):
            i = v * THREADS + t
            at = WEIGHTS_AT + i // WIDTH * (FEW * PITCH) + i % WIDTH
            for j in unrolled(FEW):
                POKE(memory, at + j * PITCH, held[v * FEW + j])
        return
    if WIDE_WEIGHTS == "rows":
        for v in unrolled(WIDTH * WIDTH // (FEW * THREADS)):
            i = (v * THREADS + t) * FEW
            k, n = i // WIDTH, i % WIDTH
            LOAD_FEW(held, v * FEW, weights + (k * row + n) * SIZE)
        for v in unrolled(WIDTH * WIDTH // (FEW * THREADS)):
            i = (v * THREADS + t) * FEW
            STORE_FEW(held, v * FEW, memory, WEIGHTS_AT + i // WIDTH * PITCH + i % WIDTH)
        return
    rows, columns = width_of(layer - 1), width_of(layer)
    along, across = (WIDTH, 1) if column == 1 else (1, WIDTH)
    for first in range(t, WIDTH * WIDTH, THREADS * HELD):
        for v in unrolled(HELD):
            i = first + v * THREADS
            k, n = i // along % WIDTH, i // across % WIDTH
            held[v] = ZERO
            if i < WIDTH * WIDTH and k < rows and n < columns:
                held[v] = LOAD(weights, k * row + n * column)
        for v in unrolled(HELD):
            i = first + v * THREADS
            k, n = i // along % WIDTH, i // across % WIDTH
            if i < WIDTH * WIDTH:
                POKE(memory, WEIGHTS_AT + k * PITCH + n, held[v])


def fetch_points(memory, t, x: Points, first, count):
    """Bring the inputs of a tile to shared memory."""
    for i in range(t, count * INPUTS, THREADS):
        p = i // INPUTS
        value = LOAD(x.address, (first + p) * x.row + (i - p * INPUTS) * x.column)
        POKE(memory, INPUTS_AT + i, value)


def place_of(ends: Members, m, point, o):
    """Return where a member of a result, or of a cotangent, is: an address and an index."""
    if m == 0:
        return ends.value.address, point * ends.value.row + o * ends.value.column
    if m <= DIRECTIONS:
        at = (m - 1) * ends.dot.member + point * ends.dot.row + o * ends.dot.column
        return ends.dot.address, at
    at = (m - 1 - DIRECTIONS) * ends.ddot.member + point * ends.ddot.row + o * ends.ddot.column
    return ends.ddot.address, at


def fetch_cotangents(memory, t, ends: Members, first, count):
    """Bring the cotangents of a tile to shared memory; those that are not there are 0."""
    for i in range(t, count * (MEMBERS * OUTPUTS), THREADS):
        row = i // OUTPUTS
        p = row // MEMBERS
        address, at = place_of(ends, row - p * MEMBERS, first + p, i - row * OUTPUTS)
        value = ZERO
        if address != 0:
            value = LOAD(address, at)
        POKE(memory, GRADS_AT + i, value)


# --- the kernel -----------------------------------------------------------------------------------
# Where a thread's part begins. On tensor cores a warp has 32 x 32 sums, and lane 4 g + s row g of
# its rows, column g of the other factor's columns, and k = s.
def own_row(t):
    """Return the first row of a thread's sums, and the first of its warp's."""
    if TENSOR:
        warp = (t >> 5) // (WIDTH // 32) * 32
        return warp + ((t & 31) >> 2), warp
    if LANES:
        warp = (t >> 5) // (ACROSS // 4) * (8 * MR)
        return warp + ((t >> 1) & 7), warp
    return t // ACROSS, 0


def own_column(t):
    """Return a thread's number along the columns; on tensor cores its first column."""
    if TENSOR:
        return (t >> 5) % (WIDTH // 32) * 32 + ((t & 31) >> 2)
    if LANES:
        return (t >> 5) % (ACROSS // 4) * 4 + ((t & 1) | ((t >> 3) & 2))
    return t % ACROSS


def left_at(t):
    """Return where a thread's values of the tile's rows begin."""
    row, _warp = own_row(t)
    if TENSOR:
        return row * PITCH + (t & 3)
    return row * PITCH


def right_at(t):
    """Return where its columns of the weights begin, or of a slice of their rows."""
    if TENSOR:
        return WEIGHTS_AT + (t & 3) * PITCH + own_column(t)
    return WEIGHTS_AT + own_column(t) * FEW


def right_back_at(t):
    """Return where its rows of the weights begin, or of a slice of their columns."""
    if TENSOR:
        return WEIGHTS_AT + own_column(t) * BACK_PITCH + (t & 3)
    return WEIGHTS_AT + own_column(t) * BACK_PITCH


def sums_at(t, step):
    """Return where its sums begin in the tile; `step` is from a thread's columns to the next."""
    row, _warp = own_row(t)
    if TENSOR:
        return row * PITCH + (own_column(t) - ((t & 31) >> 2) + 2 * (t & 3))
    return row * PITCH + own_column(t) * step


def write_results(memory, t, layers: Layers, ends: Members, first, count):
    """Write the results of a tile: the last layer is a product alone."""
    _weights, _row, _column, bias, step = layer_of(layers, COUNT - 1)
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
        address, at = place_of(ends, m, first + p, o)
        STORE(address, at, value)


def begin_forward(memory, t, layers: Layers, layer, held):
    """Bring the weights of a hidden layer to shared memory, or begin to, for a forward."""
    if STREAMED:
        weights, row, column, _bias, _step = layer_of(layers, layer)
        OPEN(memory, t, weights, row, column, width_of(layer - 1), width_of(layer))
    else:
        fetch_weights(memory, t, layers, layer, held)


def multiply_forward(total, memory, t, layers: Layers, layer, rows):
    """Make a thread's sums of a hidden layer, and put them in the place of its inputs."""
    CLEAR(total)
    if STREAMED:
        weights, row, column, _bias, _step = layer_of(layers, layer)
        columns = width_of(layer)
        STREAM(total, memory, t, weights, row, column, width_of(layer - 1), columns, rows)
    else:
        _row, warp_row = own_row(t)
        left, right = left_at(t), right_at(t)
        if warp_row < rows:
            for k in range(0, WIDTH, CHUNK):
                MULTIPLY(total, memory, left + k, right + k * PITCH)
    BARRIER()
    if TURNED:
        PUT_BACK(total, memory, sums_at(t, 1))
    else:
        PUT(total, memory, sums_at(t, FEW))


def hidden_layers(memory, t, layers: Layers, total, given, made, weights, count, kept, layer_step):
    """Make a tile of what the last hidden layer gives, of inputs that are in shared memory.

    `kept` is where the sums of the tile are kept, of the second layer on, `layer_step` bytes apart.
    """
    if COUNT > 2:
        begin_forward(memory, t, layers, 1, total)
    first_pass(memory, t, given, made, weights, 0, count)
    BARRIER()
    for layer in range(1, COUNT - 1):
        multiply_forward(total, memory, t, layers, layer, count * MEMBERS)
        BARRIER()
        if layer < COUNT - 2:
            begin_forward(memory, t, layers, layer + 1, total)
        sums = kept + (layer - 1) * layer_step
        inner_pass(memory, t, given, made, weights, 0, count, layer, sums, False)
        BARRIER()


def forward(x: Points, layers: Layers, table, ends: Members, kept, layer_step):
    """Write the results of a network for a part of the points."""
    memory = WINDOW(cuda.shared.array(0, dtype=REAL))
    total = cuda.local.array(TOTALS, REAL)
    given = cuda.local.array(AT_ONCE * GIVEN, REAL)
    made = cuda.local.array(AT_ONCE * MEMBERS, REAL)
    weights = cuda.local.array(WEIGHTS, REAL)
    for i in unrolled(WEIGHTS):
        weights[i] = LOAD(table, i)
    t = cuda.threadIdx.x
    prepare(memory, t, layers, table)
    first = cuda.blockIdx.x * x.share
    last = min(first + x.share, x.count)
    while first < last:
        count = min(last - first, POINTS)
        fetch_points(memory, t, x, first, count)
        BARRIER()
        tile = kept + first * POINT_KEPT
        hidden_layers(memory, t, layers, total, given, made, weights, count, tile, layer_step)
        write_results(memory, t, layers, ends, first, count)
        BARRIER()
        first += POINTS


#: Sizes and strides are in elements.
ADDRESSES = "x_address table " + " ".join(
    f"layers_l{i}_{name}" for i in range(MOST_LAYERS) for name in ("weights", "bias")
)
ENDS = " ".join(f"ends_{name}_address" for name in ("value", "dot", "ddot"))
FORWARD = Schema(forward, u64=f"{ADDRESSES} {ENDS}", i64="kept")
