"""The passes over points of a network's kernels: what is done with the sums of a layer.

A thread has a column of every PARTS-th point, AT_ONCE of them together. The members of these are a
constant number of rows apart: STRIDE from a thread's point to its next.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled


def width_of(layer):
    """Return the columns of a layer's results; those of layer -1 are the inputs."""
    found = WIDTHS[0]
    for i in unrolled(1, COUNT + 1):
        if layer == i - 1:
            found = WIDTHS[i]
    return found


def first_sums(memory, given, at, point, column):
    """Write the sums of the first layer.

    Those of its directions are the same for all points, unless these have a direction each.
    """
    value = ZERO
    for i in unrolled(INPUTS):
        x = PEEK(memory, INPUTS_AT + point * INPUTS + i)
        value = fused(x, PEEK(memory, FIRST_AT + i * WIDTH + column), value)
    given[at] = value + PEEK(memory, BIAS_AT + column)
    if POINT_DIRECTIONS:
        moved = ZERO
        for i in unrolled(INPUTS):
            x = PEEK(memory, INPUTS_AT + (POINTS + point) * INPUTS + i)
            moved = fused(x, PEEK(memory, FIRST_AT + i * WIDTH + column), moved)
        given[at + 1] = moved
    else:
        for d in unrolled(DIRECTIONS):
            given[at + 1 + d] = PEEK(memory, MOVED_AT + d * WIDTH + column)


def write(memory, made, u, at, inside):
    """Write the members of a point from registers to a tile; 0 where there is no column."""
    for m in unrolled(MEMBERS):
        value = made[u * MEMBERS + m]
        if not FULL:
            if not inside:
                value = ZERO
        POKE(memory, at + (u * STRIDE + m) * PITCH, value)


def first_pass(memory, t, given, made, weights, to, count):
    """Write a tile of what the first layer gives."""
    column, point = t % WIDTH, t // WIDTH
    at = to + point * (MEMBERS * PITCH) + column
    while point < count:
        first_step(memory, given, made, weights, count, column, point, at)
        point += AT_ONCE * PARTS
        at += AT_ONCE * STRIDE * PITCH


def first_step(memory, given, made, weights, count, column, point, at):
    """Write what the first layer gives for the points that a thread takes together."""
    for u in unrolled(AT_ONCE):
        first_sums(memory, given, u * GIVEN, point + u * PARTS, column)
    for u in unrolled(AT_ONCE):
        FIRST_ROW(given, u * GIVEN, weights, made, u * MEMBERS)
    for u in unrolled(AT_ONCE):
        if point + u * PARTS < count:
            write(memory, made, u, at, column < WIDTHS[1])


def load_sums(ahead, sums, kept, point, count):
    """Load the kept sums of the points that a thread takes together; zeros behind the last."""
    for u in unrolled(AT_ONCE):
        for m in unrolled(MEMBERS):
            value = ZERO
            if point + u * PARTS < count:
                value = LOAD(sums, kept + (u * STRIDE + m) * WIDTH)
            ahead[u * MEMBERS + m] = value


def take_sums(ahead, given, sums, kept, point, count):
    """Take the kept sums of some points, and ask for the next ones' where registers are free."""
    if not FETCHED:
        load_sums(ahead, sums, kept, point, count)
    for u in unrolled(AT_ONCE):
        for m in unrolled(MEMBERS):
            given[u * GIVEN + m] = ahead[u * MEMBERS + m]
    if FETCHED:
        load_sums(ahead, sums, kept + AT_ONCE * STRIDE * WIDTH, point + AT_ONCE * PARTS, count)


def inner_pass(memory, t, ahead, given, made, weights, to, count, layer, sums, again):
    """Write a tile of what a layer gives; its sums come from the tile and are kept, or from there.

    `sums` is where they are kept: the address of the tile's first of this layer.
    """
    column, point = t % WIDTH, t // WIDTH
    inside = column < width_of(layer)
    bias = PEEK(memory, BIAS_AT + layer * WIDTH + column)
    at = to + point * (MEMBERS * PITCH) + column
    kept = point * (MEMBERS * WIDTH) + column
    if again and FETCHED:
        load_sums(ahead, sums, kept, point, count)
    while point < count:
        if again:
            again_step(memory, ahead, given, made, weights, count, sums, inside, point, at, kept)
        else:
            for u in unrolled(AT_ONCE):
                for m in unrolled(MEMBERS):
                    value = PEEK(memory, at + (u * STRIDE + m) * PITCH)
                    if m == 0:
                        value = value + bias
                    given[u * GIVEN + m] = value
            for u in unrolled(AT_ONCE):
                ROW(given, u * GIVEN, weights, made, u * MEMBERS)
            for u in unrolled(AT_ONCE):
                if point + u * PARTS < count:
                    if KEEPS:
                        for m in unrolled(MEMBERS):
                            value = given[u * GIVEN + m]
                            STORE(sums, kept + (u * STRIDE + m) * WIDTH, value)
                    write(memory, made, u, at, inside)
        point += AT_ONCE * PARTS
        at += AT_ONCE * STRIDE * PITCH
        kept += AT_ONCE * STRIDE * WIDTH


def again_step(memory, ahead, given, made, weights, count, sums, inside, point, at, kept):
    """Write what a layer gives, of its kept sums, for the points that a thread takes together."""
    take_sums(ahead, given, sums, kept, point, count)
    for u in unrolled(AT_ONCE):
        ROW(given, u * GIVEN, weights, made, u * MEMBERS)
    for u in unrolled(AT_ONCE):
        if point + u * PARTS < count:
            write(memory, made, u, at, inside)


def cotangents(memory, given, to, point, at, column, last):
    """Write the gradients of a point's results: of the last layer's by the outputs' cotangents."""
    for m in unrolled(MEMBERS):
        value = ZERO
        if last:
            for o in range(OUTPUTS):
                w = PEEK(memory, LAST_AT + o * WIDTH + column)
                g = PEEK(memory, GRADS_AT + (point * MEMBERS + m) * OUTPUTS + o)
                value = fused(g, w, value)
        else:
            value = PEEK(memory, at + m * PITCH)
        given[to + m] = value


def add_slot(memory, t, slot, value):
    """Add to a sum that is this thread's own."""
    at = SLOTS_AT + slot * THREADS + t
    POKE(memory, at, PEEK(memory, at) + value)


def last_gradients(memory, t, count):
    """Add to the sums of the last layer: its weights' gradient and its bias's."""
    column, first = t % WIDTH, t // WIDTH
    for o in range(OUTPUTS):
        total = ZERO
        for point in range(first, count, PARTS):
            for m in unrolled(MEMBERS):
                row = point * MEMBERS + m
                g = PEEK(memory, GRADS_AT + row * OUTPUTS + o)
                total = fused(PEEK(memory, row * PITCH + column), g, total)
        add_slot(memory, t, LAST_SLOT + o, total)
    if column < OUTPUTS:
        total = ZERO
        for point in range(first, count, PARTS):
            total = total + PEEK(memory, GRADS_AT + point * (MEMBERS * OUTPUTS) + column)
        add_slot(memory, t, LAST_SLOT + OUTPUTS, total)


def back_pass(memory, t, ahead, given, made, weights, count, layer, sums):
    """Make the gradients by a layer's sums of those by its results, in their place in the tile.

    GROUPED: as parts, in a place of their own.
    """
    column, point = t % WIDTH, t // WIDTH
    inside, total = column < width_of(layer), ZERO
    at = point * (MEMBERS * PITCH) + column
    kept = point * (MEMBERS * WIDTH) + column
    if GROUPED:
        places = cuda.local.array(MEMBERS, PLACE)
        for m in unrolled(MEMBERS):
            places[m] = memory + PART_PLACE(point * MEMBERS + m, column)
    if FETCHED:
        load_sums(ahead, sums, kept, point, count)
    while point < count:
        take_sums(ahead, given, sums, kept, point, count)
        for u in unrolled(AT_ONCE):
            here = at + u * STRIDE * PITCH
            last = layer == COUNT - 2
            cotangents(memory, given, u * GIVEN + MEMBERS, point + u * PARTS, here, column, last)
        for u in unrolled(AT_ONCE):
            ROW_BACK(given, u * GIVEN, weights, made, u * MEMBERS)
        for u in unrolled(AT_ONCE):
            p = point + u * PARTS
            if p < count:
                if GROUPED:
                    WRITE_PARTS(memory, made, u, p, places, column, inside)
                else:
                    write(memory, made, u, at, inside)
                total = total + made[u * MEMBERS]
        if GROUPED:
            for m in unrolled(MEMBERS):
                places[m] += AT_ONCE * STRIDE * 128
        point += AT_ONCE * PARTS
        at += AT_ONCE * STRIDE * PITCH
        kept += AT_ONCE * STRIDE * WIDTH
    add_slot(memory, t, layer, total)


def first_back_pass(memory, t, given, made, weights, count, run):
    """Add what the first layer has to the sums.

    Its inputs' members but the value are constant, or a direction of the point's own.
    Where the gradient by the points is made too, the tile gets that by the value's sums.
    """
    column, point = t % WIDTH, t // WIDTH
    at = point * (MEMBERS * PITCH) + column
    for i in unrolled(1 + INPUTS + DIRECTIONS):
        run[i] = ZERO
    while point < count:
        for u in unrolled(AT_ONCE):
            p, here = point + u * PARTS, at + u * STRIDE * PITCH
            first_sums(memory, given, u * GIVEN, p, column)
            to = u * GIVEN + 1 + DIRECTIONS
            cotangents(memory, given, to, p, here, column, COUNT == 2)
        for u in unrolled(AT_ONCE):
            FIRST_ROW_BACK(given, u * GIVEN, weights, made, u * MEMBERS)
        for u in unrolled(AT_ONCE):
            p = point + u * PARTS
            if p < count:
                q = made[u * MEMBERS]
                run[0] = run[0] + q
                for i in unrolled(INPUTS):
                    run[1 + i] = fused(PEEK(memory, INPUTS_AT + p * INPUTS + i), q, run[1 + i])
                if POINT_DIRECTIONS:
                    q_dot = made[u * MEMBERS + 1]
                    for i in unrolled(INPUTS):
                        x = PEEK(memory, INPUTS_AT + (POINTS + p) * INPUTS + i)
                        run[1 + i] = fused(x, q_dot, run[1 + i])
                else:
                    for d in unrolled(DIRECTIONS):
                        run[1 + INPUTS + d] = run[1 + INPUTS + d] + made[u * MEMBERS + (1 + d)]
                if MOVES:
                    if not FULL:
                        if column >= WIDTHS[1]:
                            q = ZERO
                    POKE(memory, at + u * STRIDE * PITCH, q)
        point += AT_ONCE * PARTS
        at += AT_ONCE * STRIDE * PITCH
    add_slot(memory, t, 0, run[0])
    for i in unrolled(INPUTS + DIRECTIONS):
        add_slot(memory, t, FIRST_SLOT + i, run[1 + i])
