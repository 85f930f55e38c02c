"""The cells of a network's tangent and of its double backward, as templates.

A block's stack has its points, and behind them their tangents where there are some: one member
each. The double backward is the backward of the tangent: the block is made again with its tangents,
and pairs of cotangents (by values, by tangents) go back through the layers.

Kernels trust the descriptor. Free names in UPPER case are bound by `numfuse.runtime.specialise`.
"""

from __future__ import annotations

import functools

from numfuse.backends.cpu.kernels import network
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"


def along_layer(descriptor: int, layer: int, stacks: int, points: int) -> None:
    """Make a layer's sums of a block: those of values, and of tangents where they move."""
    w, packed = WORDS(layer), WORDS(descriptor)[SLOT_PACKED]
    table = WORDS(packed + w[L_TABLE])
    stack, z, step, out_step = stacks + w[L_INPUT], stacks + w[L_Z], w[L_IN_STEP], w[L_STEP]
    vectors = out_step // VECTOR
    if w[L_SUMS] != 0:
        bias = table[2] if w[L_BIAS] != 0 else 0
        CALL_PRODUCT(
            w[L_ALONG], stack, step, points, w[L_K], table[0], w[L_W_STEP], vectors,
            z, out_step, bias, 0,
        )  # fmt: skip
    if w[L_MOVED] == 0:
        return
    dots, bias = z + points * out_step, packed + w[L_BIAS_DOT] if w[L_BIAS_DOT] >= 0 else 0
    moved = w[L_MEMBERS] > 1
    if moved or w[L_W_DOT] < 0:
        # (of inputs that stay there is no term: the tangent of the bias alone)
        CALL_PRODUCT(
            w[L_ALONG], stack + points * step, step, points, w[L_K] if moved else 0,
            table[0], w[L_W_STEP], vectors, dots, out_step, bias, 0,
        )  # fmt: skip
    if w[L_W_DOT] >= 0:
        CALL_PRODUCT(
            w[L_ALONG], stack, step, points, w[L_K], packed + w[L_W_DOT], out_step, vectors,
            dots, out_step, bias, 1 if moved else 0,
        )  # fmt: skip


def tangent_block(
    descriptor: int, workspace: int, stacks: int, first: int, points: int, layers: int, fresh: bool
) -> None:
    """Pass a block and its tangents through the first `layers` layers; store the results' tangents.

    Each layer's sums and results have a place. Tangents are those of the points: every block is as
    a `fresh` one.
    """
    layer = descriptor + 8 * N_LAYER
    w = WORDS(layer)
    stack = stacks + w[L_INPUT]
    TAKE_ROWS(descriptor, SLOT_X, first, points, w[L_K], stack, w[L_IN_STEP])
    if w[L_MEMBERS] > 1:
        stack += points * w[L_IN_STEP]
        TAKE_ROWS(descriptor, SLOT_X_DOT, first, points, w[L_K], stack, w[L_IN_STEP])
    for _ in range(layers):
        w = WORDS(layer)
        ALONG_LAYER(descriptor, layer, stacks, points)
        if w[L_ROW] != 0:
            elements = points * w[L_STEP] // SIZE
            OPEN_ROWS(descriptor, workspace, elements)
            z, out = stacks + w[L_Z], stacks + w[L_OUT]
            CALL_ROWS(w[L_ROW], workspace, 0, z, 0, out, elements)
        layer += 8 * LAYER_WORDS
    dots = stacks + w[L_OUT] + points * w[L_STEP]
    GIVE_ROWS(descriptor, SLOT_DIRECTION, first, points, w[L_N], dots, w[L_STEP])


def tangent_cell(descriptor: int, cell: int, workspace: int) -> None:
    """Write the results of a cell's points, and their tangents."""
    cells = WORDS(descriptor)[N_CELLS]
    descriptor = OWN_WORDS(descriptor, cell // cells, workspace)
    d = WORDS(descriptor)
    start = cell % cells * d[N_CELL]
    last = WORDS(descriptor + 8 * (N_LAYER + (d[N_LAYERS] - 1) * LAYER_WORDS))
    end = min(d[N_POINTS], start + d[N_CELL])
    for first in range(start, end, d[N_BLOCK]):
        points = min(d[N_BLOCK], end - first)
        TANGENT_BLOCK(descriptor, workspace, workspace, first, points, d[N_LAYERS], True)
        out = workspace + last[L_OUT]
        GIVE_ROWS(descriptor, SLOT_VALUE, first, points, last[L_N], out, last[L_STEP])


def second_block(
    descriptor: int, workspace: int, stacks: int, first: int, points: int, partial: int, add: bool
) -> None:
    """Add what a block gives to the gradients at `partial`; write its rows of d_x."""
    d = WORDS(descriptor)
    layers, packed = d[N_LAYERS], d[SLOT_PACKED]
    grad, q = workspace + d[N_GRAD], workspace + d[N_Q]
    w = WORDS(descriptor + 8 * (N_LAYER + (layers - 1) * LAYER_WORDS))
    target = grad + points * w[L_STEP]
    TAKE_ROWS(descriptor, SLOT_GRAD, first, points, w[L_N], target, w[L_STEP])
    for i in range(layers):
        w = WORDS(descriptor + 8 * (N_LAYER + (layers - 1 - i) * LAYER_WORDS))
        step, in_step, members = w[L_STEP], w[L_IN_STEP], w[L_MEMBERS]
        slopes, stack = grad, stacks + w[L_INPUT]
        table = WORDS(packed + w[L_TABLE])
        if w[L_BACK] != 0:
            slopes, elements = q, points * step // SIZE
            OPEN_ROWS(descriptor, workspace, elements)
            CALL_ROWS(w[L_BACK], workspace, 0, stacks + w[L_Z], grad, q, elements)
        # A product at the end has a cotangent of its tangents alone.
        values = 0 if w[L_BACK] == 0 else points
        dots, skipped = slopes + points * step, points - values
        if w[L_D_BIAS] >= 0:
            # the product of a row of ones, which is one 1
            CALL_PRODUCT(
                w[L_DOWN], workspace + d[N_ONE], 0, 1, values, slopes, step, step // VECTOR,
                table[4] if table[4] != 0 else partial + w[L_D_BIAS], step, 0, add,
            )  # fmt: skip
        if w[L_D_W] >= 0:
            CALL_PRODUCT(
                w[L_DOWN], stack + skipped * in_step, in_step, w[L_K],
                values + points * (members - 1), slopes + skipped * step, step, step // VECTOR,
                table[3] if table[3] != 0 else partial + w[L_D_W], step, 0, add,
            )  # fmt: skip
        if w[L_TURNED_STEP] != 0:
            target = grad if slopes == q else q
            # (values of which there is no cotangent have 0: a product without a term)
            CALL_PRODUCT(
                w[L_ALONG], slopes, step, points, w[L_N] if values > 0 else 0,
                table[1], w[L_TURNED_STEP], in_step // VECTOR, target, in_step, 0, 0,
            )  # fmt: skip
            if w[L_TURNED_DOT] >= 0:
                CALL_PRODUCT(
                    w[L_ALONG], dots, step, points, w[L_N], packed + w[L_TURNED_DOT], in_step,
                    in_step // VECTOR, target, in_step, 0, 1,
                )  # fmt: skip
            if members > 1 and i < layers - 1:
                CALL_PRODUCT(
                    w[L_ALONG], dots, step, points, w[L_N], table[1], w[L_TURNED_STEP],
                    in_step // VECTOR, target + points * in_step, in_step, 0, 0,
                )  # fmt: skip
            if target == q:
                grad, q = q, grad
    w = WORDS(descriptor + 8 * N_LAYER)
    GIVE_ROWS(descriptor, SLOT_D_X, first, points, w[L_K], grad, w[L_IN_STEP])


@functools.cache
def cell(acc: str, backward: bool) -> specialise.Kernel:
    """Return the cell of a tangent; or of a double backward, that of a backward of these blocks."""
    words = dict(network.names(acc))
    for template in (along_layer, tangent_block, second_block):  # each may call those before it
        words[template.__name__.upper()] = specialise.device(template, **words)
    if not backward:
        return specialise.kernel(tangent_cell, **words)
    words["FORWARD_BLOCK"], words["BACKWARD_BLOCK"] = words["TANGENT_BLOCK"], words["SECOND_BLOCK"]
    return specialise.kernel(network.backward_cell, **words)
