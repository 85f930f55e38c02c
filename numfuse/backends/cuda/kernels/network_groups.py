"""A whole network in 16 bits as one launch on Hopper: warp groups take 64 rows through all layers.

It is `network_half` with wgmma in place of mma.sync: the weights in shared memory are read once for
64 rows and not for 32, by the tensor cores themselves (`network_panels`), and a product of a layer
is one group of instructions. What goes from a layer to the next stays in registers as there. The
next rows are on their way while these go through the layers.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.engines import copy_fence
from numfuse.backends.cuda.compile.intrinsics import same
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network_fragments import peek_reals
from numfuse.backends.cuda.kernels.network_half import inside, prepare
from numfuse.backends.cuda.kernels.network_layers import Layers, Rows, Steps, own_rows
from numfuse.backends.cuda.kernels.network_panels import descriptor
from numfuse.backends.cuda.kernels.network_passes import width_of


def begin(sums, at):
    """Let the sums of a hidden layer begin with their biases, of which a lane's first is `at`."""
    for j in unrolled(WIDTH // 8):
        bias = peek_reals(at + j * 32)
        for r in unrolled(2):
            for b in unrolled(2):
                sums[4 * j + 2 * r + b] = bias[b]


def activate(words, sums, near, width):
    """Make what a hidden layer gives of its sums."""
    for j in unrolled(WIDTH // 8):
        for r in unrolled(2):
            AT = 4 * j + 2 * r
            if RECTIFIED:
                low = inside(sums[AT], near, width, 8 * j)
                high = inside(sums[AT + 1], near, width, 8 * j + 1)
                words[2 * j + r] = RECTIFY(low, high)
            else:
                low = inside(ACTIVATE(sums[AT]), near, width, 8 * j)
                high = inside(ACTIVATE(sums[AT + 1]), near, width, 8 * j + 1)
                words[2 * j + r] = PACK(low, high)


def begin_results(sums, at):
    """Let the sums of the last layer begin with their biases."""
    for j in unrolled(OUT_WIDTH // 8):
        bias = peek_reals(at + j * 32)
        for r in unrolled(2):
            for b in unrolled(2):
                sums[4 * j + 2 * r + b] = bias[b]


def write_results(sums, words, lane, out: Rows, first, count):
    """Write the results of a warp's rows."""
    for group in unrolled(OUT_WIDTH // (8 * OUT_PAIRS)):
        for pair in unrolled(OUT_PAIRS):
            for r in unrolled(2):
                AT = (group * OUT_PAIRS + pair) * 4 + 2 * r
                words[r * OUT_PAIRS + pair] = PACK(sums[AT], sums[AT + 1])
        column = group * (8 * OUT_PAIRS) + (lane & 3) * (2 * OUT_PAIRS)
        PUT_RESULTS(words, lane, out, first, count, column)


def forward(x: Rows, layers: Layers, steps: Steps, out: Rows, count):
    """Write the results of a network, of which there is one a row of the grid.

    A warp group takes every so many rows of x.
    """
    memory = MEMORY() + 0
    held = cuda.local.array(HELD, REAL)
    sums = cuda.local.array(WIDTH // 2, REAL)
    ends = cuda.local.array(OUT_WIDTH // 2, REAL)
    raw = cuda.local.array(RAW_POINTS, WORD)
    given = cuda.local.array(IN_WIDTH // 4, WORD)
    left = cuda.local.array(WIDTH // 4, WORD)
    words = cuda.local.array(2 * OUT_PAIRS, WORD)
    t = cuda.threadIdx.x
    lane = t & 31
    prepare(memory, t, layers, steps, held)
    copy_fence()
    BARRIER()
    own: Rows = own_rows(x, steps.x)
    to: Rows = own_rows(out, steps.out)
    group = same(t >> 7)
    row = ((t >> 5) & 3) * 16
    near = (lane & 3) * 2
    bias = memory + BIAS_AT[0] + near * 4
    head = descriptor(memory + WEIGHTS_AT[0], HEAD)
    inner = descriptor(memory + WEIGHTS_AT[1], INNER)
    tail = descriptor(memory + WEIGHTS_AT[COUNT - 1], TAIL)
    first = (cuda.blockIdx.x * GROUPS + group) * 64
    step = cuda.gridsize(1) // THREADS * (GROUPS * 64)
    LOAD_POINTS(raw, lane, own, first + row, count)
    while first < count:
        PLACE_POINTS(given, raw, lane, first + row, count)
        begin(sums, bias)
        MULTIPLY_FIRST(sums, given, head)
        LOAD_POINTS(raw, lane, own, first + step + row, count)
        activate(left, sums, near, width_of(0))
        for layer in range(1, COUNT - 1):
            begin(sums, bias + layer * (WIDTH * 4))
            MULTIPLY(sums, left, inner + (layer - 1) * (WIDTH * WIDTH * 2 // 16))
            activate(left, sums, near, width_of(layer))
        begin_results(ends, bias + (COUNT - 1) * (WIDTH * 4))
        MULTIPLY_LAST(ends, left, tail)
        write_results(ends, words, lane, to, first + row, count)
        first += step


#: Strides are in elements.
GROUP_FORWARD = Schema(forward)
