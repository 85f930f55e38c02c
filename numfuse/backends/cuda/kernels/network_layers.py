"""A network's layers as arguments of its kernels: records, the layer of a number, its weights."""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_passes import width_of

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
class Steps:
    """How far the arrays of a network are from those of the next, in elements."""

    x: Any
    #: The result, or its cotangent, of networks in 16 bits.
    out: Any
    d_x: Any
    x_dot: Any
    weights_0: Any
    weights_1: Any
    weights_2: Any
    weights_3: Any
    weights_4: Any
    weights_5: Any
    weights_6: Any
    weights_7: Any
    bias_0: Any
    bias_1: Any
    bias_2: Any
    bias_3: Any
    bias_4: Any
    bias_5: Any
    bias_6: Any
    bias_7: Any


@dataclass
class Rows:
    """Rows of points, or of their gradients: an address and strides in elements."""

    address: Any
    row: Any
    column: Any


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


def step_of(steps: Steps, number):
    """Return how far a layer's weights, and its bias, are from a network to the next."""
    if COUNT > 1 and number == 1:
        return steps.weights_1, steps.bias_1
    if COUNT > 2 and number == 2:
        return steps.weights_2, steps.bias_2
    if COUNT > 3 and number == 3:
        return steps.weights_3, steps.bias_3
    if COUNT > 4 and number == 4:
        return steps.weights_4, steps.bias_4
    if COUNT > 5 and number == 5:
        return steps.weights_5, steps.bias_5
    if COUNT > 6 and number == 6:
        return steps.weights_6, steps.bias_6
    if COUNT > 7 and number == 7:
        return steps.weights_7, steps.bias_7
    return steps.weights_0, steps.bias_0


def own_layer(layers: Layers, steps: Steps, number, network):
    """Return a layer of a network, of which there are several one behind the other."""
    weights, row, column, bias, step = layer_of(layers, number)
    if SEVERAL:
        further, bias_further = step_of(steps, number)
        weights, bias = weights + network * SIZE * further, bias + network * SIZE * bias_further
    return weights, row, column, bias, step


def own_rows(rows: Rows, step):
    """Return the rows of a block's network, in 16 bits: of the next one they are `step` further."""
    return Rows(rows.address + cuda.blockIdx.y * 2 * step, rows.row, rows.column)


def fetch_weights(memory, t, layers: Layers, steps: Steps, network, layer, held):
    """Bring the weights of a hidden layer to shared memory, with 0 around them.

    COPIED: they are on their way, until `await_weights`.
    """
    weights, row, column, _bias, _step = own_layer(layers, steps, layer, network)
    rows, columns = width_of(layer - 1), width_of(layer)
    if COPIED and WIDE_WEIGHTS:
        for v in unrolled(WIDTH * WIDTH // (FEW * THREADS)):
            i = (v * THREADS + t) * FEW
            k, n = i // WIDTH, i % WIDTH
            COPY_FEW(memory, WEIGHTS_AT + k * PITCH + n, weights + (k * row + n) * SIZE)
        return
    if COPIED:  # neighbouring threads have neighbours of a run of memory, which a thread crosses
        near, far = t % WIDTH, t // WIDTH
        near_step, far_step = (column, row) if column == 1 else (row, column)
        near_end, far_end = (columns, rows) if column == 1 else (rows, columns)
        near_pitch, far_pitch = (1, PITCH) if column == 1 else (PITCH, 1)
        at = WEIGHTS_AT + near * near_pitch + far * far_pitch
        address = weights + (near * near_step + far * far_step) * SIZE
        for _ in range(WIDTH * WIDTH // THREADS):
            most = SIZE
            if not FULL:
                most = SIZE if near < near_end and far < far_end else 0
            COPY_ONE(memory, at, address, most)
            far += THREADS // WIDTH
            at += THREADS // WIDTH * far_pitch
            address += THREADS // WIDTH * SIZE * far_step
        return
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


def await_weights():
    """Wait for the weights that this thread copies; those of all are there behind a barrier."""
    if COPIED:
        ALL_FETCHED()
