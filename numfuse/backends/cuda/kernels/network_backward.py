"""The kernel of a network's backward: see `network`, whose parts it is made of."""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.engines import copy_fence, grid_release, grid_wait
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network import (
    ADDRESSES,
    ENDS,
    Members,
    Points,
    fetch_cotangents,
    fetch_points,
    here,
    hidden_layers,
    left_at,
    own_row,
    prepare,
    right_back_at,
    sums_at,
)
from numfuse.backends.cuda.kernels.network_layers import (
    Layers,
    Rows,
    Steps,
    await_weights,
    fetch_weights,
    own_layer,
)
from numfuse.backends.cuda.kernels.network_passes import (
    back_pass,
    first_back_pass,
    first_pass,
    inner_pass,
    last_gradients,
    width_of,
)


def own_square(t):
    """Return where a part of a weight gradient begins: in the tile's rows, and columns.

    Part t is the one of thread t, or of one of its rounds.
    """
    u = t % TEAM
    if TENSOR:
        warp = u >> 5
        return warp // (WIDTH // SPAN) * WARP_ROWS, warp % (WIDTH // SPAN) * SPAN
    if SQUARE_LANES:
        warp = u >> 5
        down = warp // (SQUARE_ACROSS // 4) * 8 + ((u >> 1) & 7)
        across = warp % (SQUARE_ACROSS // 4) * 4 + ((u & 1) | ((u >> 3) & 2))
        return down * FEW, across * FEW
    return u // SQUARE_ACROSS * FEW, u % SQUARE_ACROSS * FEW


def square_at(t):
    """Return where its sums begin in a matrix in memory."""
    down, across = own_square(t)
    if TENSOR:
        row = down + ((t & 31) >> 2) * DEALT
        return row * WIDTH + across + (t & 3) * (2 * DEALT)
    return down * WIDTH + across


def clear_rows(memory, t, rows):
    """Write 0 behind the rows of the tiles, up to whole instructions of tensor cores."""
    for i in range(t, (-rows % CHUNK) * WIDTH, THREADS):
        at = (rows + i // WIDTH) * PITCH + i % WIDTH
        POKE(memory, at, ZERO)
        if not GROUPED:
            POKE(memory, OTHER_AT + at, ZERO)


def add_weights(memory, t, total, before, plane, rows, fresh):
    """Add the gradient of a layer's weights to a plane: in rounds, where threads are too few.

    Threads beyond the last whole team have no part (SPARE: there are such).
    """
    for part in range(ROUNDS):
        u = t + part * THREADS
        if not SPARE or u < TEAMS * TEAM:
            add_square(memory, u, total, before, plane, rows, fresh)


def add_square(memory, t, total, before, plane, rows, fresh):
    """Add a part of the gradient of a layer's weights, of the rows of its team, to their plane.

    LATE: both addends are left in `total` and `before`, and what the plane has is on its way.
    """
    down, across = own_square(t)
    at = plane + square_at(t) * SIZE
    if EARLY:  # registers for it while the products are made
        if fresh:
            CLEAR(before)
        else:
            LOAD_SQUARE(before, at)
    team = t // TEAM
    part = (rows + (TEAMS - 1)) // TEAMS
    CLEAR(total)
    if TENSOR:
        part = (part + (CHUNK - 1)) // CHUNK * CHUNK
        if GROUPED:
            ADD_ROWS(total, memory, t, down, team * part, min(rows, team * part + part))
        else:
            lane = (t & 3) * (DEALT * PITCH) + ((t & 31) >> 2) * DEALT
            for row in range(team * part, min(rows, team * part + part), CHUNK):
                here = row * PITCH + lane
                MULTIPLY_OUTER(total, memory, here + OTHER_AT + down, here + across)
        if TWICE:
            SETTLE(total)
    else:
        row, end = team * part, min(rows, team * part + part)
        while row + AHEAD <= end:
            here = row * PITCH
            MULTIPLY_OUTER_AHEAD(total, memory, here + OTHER_AT + down, here + across)
            row += AHEAD
        while row < end:
            MULTIPLY_OUTER(total, memory, row * PITCH + OTHER_AT + down, row * PITCH + across)
            row += 1
    if not EARLY:
        if fresh:
            CLEAR(before)
        else:
            LOAD_SQUARE(before, at)
    if not LATE:
        ADD_SQUARE(total, before, at)


def begin_backward(memory, t, layers: Layers, steps: Steps, network, layer, held):
    """Bring the weights of a hidden layer to shared memory, or begin to, for a backward."""
    if STREAMED:
        weights, row, column, _bias, _step = own_layer(layers, steps, layer, network)
        OPEN_BACK(memory, t, weights, row, column, width_of(layer - 1), width_of(layer))
    else:
        fetch_weights(memory, t, layers, steps, network, layer, held)


def multiply_backward(total, memory, t, layers: Layers, steps: Steps, network, layer, rows):
    """Make the gradients by a layer's inputs, and put them in the place of those by its sums."""
    CLEAR(total)
    if STREAMED:
        weights, row, column, _bias, _step = own_layer(layers, steps, layer, network)
        columns = width_of(layer)
        STREAM_BACK(total, memory, t, weights, row, column, width_of(layer - 1), columns, rows)
    else:
        _row, warp_row = own_row(t)
        left, right = left_at(t), right_back_at(t)
        if warp_row < rows:
            for k in range(0, WIDTH, CHUNK):
                MULTIPLY_BACK(total, memory, left + k, right + k)
    if TWICE:
        SETTLE(total)
    BARRIER()
    if TURNED:
        PUT(total, memory, sums_at(here(t), FEW))
    else:
        PUT_BACK(total, memory, sums_at(here(t), 1))


def write_slots(memory, t, table, slots):
    """Write the block's sums over points: those of the threads of a column, in their order."""
    column = t
    while column < WIDTH:
        for slot in range(SLOTS):
            total = ZERO
            for part in range(PARTS):
                total = total + PEEK(memory, SLOTS_AT + slot * THREADS + part * WIDTH + column)
            POKE(memory, SLOTS_AT + slot * THREADS + column, total)
        # the tangents of the inputs are the directions
        for i in range(INPUTS):
            at = SLOTS_AT + (FIRST_SLOT + i) * THREADS + column
            value = PEEK(memory, at)
            if not POINT_DIRECTIONS:
                for d in range(DIRECTIONS):
                    q = PEEK(memory, SLOTS_AT + (FIRST_SLOT + INPUTS + d) * THREADS + column)
                    value = value + LOAD(table, UNITS_AT + d * INPUTS + i) * q
            POKE(memory, at, value)
        for slot in range(SLOTS):
            value = PEEK(memory, SLOTS_AT + slot * THREADS + column)
            to = slot * WIDTH + column
            if LAST_SLOT <= slot and slot < LAST_SLOT + OUTPUTS:  # a row of weights together
                to = LAST_SLOT * WIDTH + column * OUTPUTS + (slot - LAST_SLOT)
            STORE(slots, to, value)
        column += THREADS


def write_points_gradient(memory, t, d_x: Rows, steps: Steps, network, first, count):
    """Write the gradients by the inputs of a tile, which has those by the first layer's sums."""
    address = d_x.address
    if SEVERAL:
        address = address + network * SIZE * steps.d_x
    for i in range(t, count * INPUTS, THREADS):
        p = i // INPUTS
        column = i - p * INPUTS
        value = ZERO
        for k in range(0, WIDTH, FEW):
            value = DOT(value, memory, p * (MEMBERS * PITCH) + k, FIRST_AT + column * WIDTH + k)
        STORE(address, (first + p) * d_x.row + column * d_x.column, value)


def backward(
    x: Points,
    x_dot: Rows,
    layers: Layers,
    steps: Steps,
    table,
    ends: Members,
    kept,
    layer_step,
    planes,
    d_x: Rows,
):
    """Add up a network's gradients by weights and biases for a part of the points."""
    memory = WINDOW(cuda.shared.array(0, dtype=REAL))
    total = cuda.local.array(TOTALS, REAL)
    ahead = cuda.local.array(FETCHES, REAL)
    before = cuda.local.array(TOTALS, REAL)
    other = cuda.local.array(TOTALS, REAL)
    given = cuda.local.array(AT_ONCE * GIVEN, REAL)
    made = cuda.local.array(AT_ONCE * MEMBERS, REAL)
    run = cuda.local.array(1 + INPUTS + DIRECTIONS, REAL)
    weights = cuda.local.array(WEIGHTS, REAL)
    for i in unrolled(WEIGHTS):
        weights[i] = LOAD(table, i)
    t = cuda.threadIdx.x
    network = cuda.blockIdx.y if SEVERAL else 0
    block = network * cuda.gridDim.x + cuda.blockIdx.x
    plane = planes + (block * TEAMS + t // TEAM) * PLANE
    prepare(memory, t, layers, steps, network, table)
    if GROUPED:  # (what the launch before makes is the weights' images)
        grid_wait()
    for slot in range(SLOTS):
        POKE(memory, SLOTS_AT + slot * THREADS + t, ZERO)
    first = cuda.blockIdx.x * x.share
    last = min(first + x.share, x.count)
    fresh = True
    while first < last:
        count = min(last - first, POINTS)
        rows = count * MEMBERS
        fetch_points(memory, here(t), x, x_dot, steps, network, first, count)
        fetch_cotangents(memory, here(t), ends, network, first, count)
        BARRIER()
        point = network * x.count + first
        tile = kept + (point * POINT_KEPT if SAVED else block * BLOCK_KEPT)
        if SAVED:
            begin_backward(memory, here(t), layers, steps, network, COUNT - 2, total)
            sums = tile + (COUNT - 3) * layer_step
            inner_pass(
                memory, here(t), ahead, given, made, weights, 0, count, COUNT - 2, sums, True
            )
            await_weights()
            BARRIER()
        else:
            # the forward again; the last hidden layer's weights stay where they are
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
            if STREAMED and COUNT > 2:
                begin_backward(memory, here(t), layers, steps, network, COUNT - 2, total)
        last_gradients(memory, here(t), count)
        layer = COUNT - 2
        while layer > 0:
            # Q of this layer, in place, and what went into the layer, beside it
            sums = tile + (layer - 1) * layer_step
            back_pass(memory, here(t), ahead, given, made, weights, count, layer, sums)
            before_that = tile + (layer - 2) * layer_step
            square = plane + (layer - 1) * SQUARE
            if GROUPED:
                CLEAR_PARTS(memory, here(t), rows)
                copy_fence()  # (wgmma reads what was written here)
                BARRIER()
                image, _row, _column, _bias, _step = own_layer(layers, steps, layer, network)
                CLEAR(total)
                MULTIPLY_BESIDE(
                    total,
                    memory,
                    here(t),
                    image,
                    width_of(layer),
                    ahead,
                    given,
                    made,
                    weights,
                    count,
                    layer - 1,
                    before_that,
                )
                SETTLE(total)
                clear_rows(memory, here(t), rows)
                BARRIER()
                add_weights(memory, here(t), other, before, square, rows, fresh)
                BARRIER()
                PUT_BACK(total, memory, sums_at(here(t), 1))
            else:
                if layer > 1:
                    inner_pass(
                        memory,
                        here(t),
                        ahead,
                        given,
                        made,
                        weights,
                        OTHER_AT,
                        count,
                        layer - 1,
                        before_that,
                        True,
                    )
                else:
                    first_pass(memory, here(t), given, made, weights, OTHER_AT, count)
                if TENSOR:
                    clear_rows(memory, here(t), rows)
                await_weights()
                BARRIER()
                add_weights(memory, here(t), total, before, square, rows, fresh)
                multiply_backward(total, memory, here(t), layers, steps, network, layer, rows)
            if layer > 1:
                begin_backward(memory, here(t), layers, steps, network, layer - 1, total)
            if LATE:
                ADD_SQUARE(other, before, square + square_at(here(t)) * SIZE)
            BARRIER()
            layer -= 1
        first_back_pass(memory, here(t), given, made, weights, count, run)
        BARRIER()
        if MOVES:
            write_points_gradient(memory, here(t), d_x, steps, network, first, count)
            BARRIER()
        fresh = False
        first += POINTS
    if fresh:  # a block without points adds nothing
        CLEAR(total)
        CLEAR(before)
        for layer in range(1, COUNT - 1):
            for part in range(ROUNDS):
                u = t + part * THREADS
                if not SPARE or u < TEAMS * TEAM:
                    at = plane + (layer - 1) * SQUARE + square_at(u) * SIZE
                    ADD_SQUARE(total, before, at)
    BARRIER()
    if RELEASES:  # (the join may begin, and waits for all of this)
        grid_release()
    # (sums over points lie behind the weights' gradients of the block's first plane)
    slots = planes + block * (TEAMS * PLANE) + (COUNT - 2) * SQUARE
    write_slots(memory, t, table, slots)
    for team in range(1, TEAMS):
        for i in range(t, SLOTS * WIDTH, THREADS):
            STORE(slots + team * PLANE, i, ZERO)


#: Sizes and strides are in elements, `kept` and `planes` are addresses.
BACKWARD = Schema(backward, u64=f"{ADDRESSES} {ENDS} d_x_address")
