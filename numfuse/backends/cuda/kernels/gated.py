"""The gates, element by element: out = act(a) * b, and its gradients."""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from typing import Any

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import intrinsics, scalars
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, kernel, types
from numfuse.backends.cuda.compile.unroll import expanded, names_of, unrolled
from numfuse.backends.cuda.kernels import elementwise
from numfuse.backends.cuda.kernels.ampere import registers
from numfuse.backends.cuda.kernels.elementwise import Scalar
from numfuse.backends.cuda.kernels.passes import grid_of, threads_of
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Slot
from numfuse.expr import Expr

__all__ = ["backward", "forward"]


def gate(a, b, out, size):
    """out = act(a) * b."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        STORE(out, i, VALUE(LOAD(a, i)) * LOAD(b, i))


def gate_backward(grad, a, b, d_a, d_b, size):
    """d_a = grad * b * act'(a), d_b = grad * act(a)."""
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        above = LOAD(grad, i)
        x = LOAD(a, i)
        if D_A:
            STORE(d_a, i, above * LOAD(b, i) * SLOPE(x))
        if D_B:
            STORE(d_b, i, above * VALUE(x))


def gates_wide(grad, a, b, out, d_b, size):
    """Compute `gate` or `gate_backward` by 16 bytes; a thread has VECTORS times 16 bytes in flight.

    `out` is d_a in the backward.

    Nothing is read twice, yet the caches are asked for nothing (``.cs`` cost 5 to 7%): what was
    stored last stays there for whoever reads it next.
    """
    first = cuda.blockIdx.x * (THREADS * VECTORS) + cuda.threadIdx.x
    vectors = size // PER_VECTOR
    x_words = cuda.local.array(4 * VECTORS, types.int32)
    y_words = cuda.local.array(4 * VECTORS, types.int32)
    g_words = cuda.local.array(4 * VECTORS, types.int32)
    made = cuda.local.array(PER_VECTOR, REAL)
    also = cuda.local.array(PER_VECTOR, REAL)
    for u in unrolled(VECTORS):
        at = (first + u * THREADS) * 16
        if first + u * THREADS < vectors:
            words = LOAD_WORDS(a + at)
            for w in unrolled(4):
                x_words[4 * u + w] = words[w]
            if READS_B:
                words = LOAD_WORDS(b + at)
                for w in unrolled(4):
                    y_words[4 * u + w] = words[w]
            if BACKWARD:
                words = LOAD_WORDS(grad + at)
                for w in unrolled(4):
                    g_words[4 * u + w] = words[w]
    for u in unrolled(VECTORS):
        at = (first + u * THREADS) * 16
        if first + u * THREADS < vectors:
            x = AS_VALUES(
                x_words[4 * u], x_words[4 * u + 1], x_words[4 * u + 2], x_words[4 * u + 3]
            )
            if READS_B:
                y = AS_VALUES(
                    y_words[4 * u], y_words[4 * u + 1], y_words[4 * u + 2], y_words[4 * u + 3]
                )
            if BACKWARD:
                g = AS_VALUES(
                    g_words[4 * u], g_words[4 * u + 1], g_words[4 * u + 2], g_words[4 * u + 3]
                )
            for v in unrolled(PER_VECTOR):
                if BACKWARD:
                    if D_A:
                        made[v] = g[v] * y[v] * SLOPE(x[v])
                    if D_B:
                        also[v] = g[v] * VALUE(x[v])
                else:
                    made[v] = VALUE(x[v]) * y[v]
            if D_A:
                words = AS_WORDS(made)
                STORE_WORDS(out + at, words[0], words[1], words[2], words[3])
            if D_B:
                words = AS_WORDS(also)
                STORE_WORDS(d_b + at, words[0], words[1], words[2], words[3])
    # what is left of a vector
    if cuda.blockIdx.x == 0:
        i = vectors * PER_VECTOR + cuda.threadIdx.x
        if i < size:
            x_one = LOAD(a + i * ITEMSIZE)
            if BACKWARD:
                g_one = LOAD(grad + i * ITEMSIZE)
                if D_A:
                    STORE(out + i * ITEMSIZE, g_one * LOAD(b + i * ITEMSIZE) * SLOPE(x_one))
                if D_B:
                    STORE(d_b + i * ITEMSIZE, g_one * VALUE(x_one))
            else:
                STORE(out + i * ITEMSIZE, VALUE(x_one) * LOAD(b + i * ITEMSIZE))


def wide_kernel(
    dtype: str,
    accumulator: str,
    value: Any,
    slope: Any = None,
    needs: tuple[bool, bool] = (True, False),
    backward: bool = False,
) -> Kernel:
    """The kernel of `gates_wide`; `needs`: whether it makes its first and its second result."""
    per_vector = 16 // intrinsics.itemsize(dtype)
    d_a, d_b = needs
    bindings: dict[str, Any] = {
        "THREADS": tiling.PASS_THREADS,
        "VECTORS": vectors_of(dtype, backward),
        "PER_VECTOR": per_vector,
        "ITEMSIZE": intrinsics.itemsize(dtype),
        "REAL": getattr(types, accumulator),
        "BACKWARD": backward,
        "READS_B": d_a,
        "D_A": d_a,
        "D_B": d_b,
        "VALUE": value,
        "SLOPE": slope,
        "LOAD_WORDS": intrinsics.load_words,
        "STORE_WORDS": intrinsics.store_words,
        "AS_VALUES": registers.words_as(dtype, accumulator),
        "AS_WORDS": registers.as_words(dtype, accumulator),
        "LOAD": intrinsics.load(dtype, 1, accumulator),
        "STORE": intrinsics.store(dtype, 1, accumulator),
    }
    template = expanded(gates_wide, bindings)
    return kernel(
        template,
        "i64 i64 i64 i64 i64 i64",
        threads=tiling.PASS_THREADS,
        name="gated backward" if backward else "gated",
        **names_of(template, bindings),
    )


def vectors_of(dtype: str, backward: bool) -> int:
    """Loads of 16 bytes of each array that a thread has in flight."""
    return tiling.GATE_VECTORS[intrinsics.itemsize(dtype)][backward]


def _wide_grid(dtype: str, size: int, backward: bool = False) -> tuple[int, int, int]:
    itemsize = intrinsics.itemsize(dtype)
    block = tiling.PASS_THREADS * vectors_of(dtype, backward) * 16 // itemsize
    return -(-size // block), 1, 1


def forward(
    info: DeviceInfo, dtype: str, accumulator: str, value: Expr | None, size: int, alignment: int
) -> Launch:
    """Contiguous arrays aligned to so many bytes; slots a, b and out."""
    function = elementwise.scalar(value, accumulator, dtype)
    if info.capability[0] and alignment >= 16:
        wide = wide_kernel(dtype, accumulator, function)
        arguments = (0, Slot("a"), Slot("b"), Slot("out"), 0, size)
        return Launch(wide, _wide_grid(dtype, size), arguments)
    made = kernel(
        gate,
        "u64 u64 u64 i64",
        threads=threads_of(info),
        name="gated",
        LOAD=scalars.loads(dtype),
        STORE=scalars.stores(dtype),
        VALUE=function,
    )
    return Launch(made, grid_of(size, info), (Slot("a"), Slot("b"), Slot("out"), size))


def backward(
    info: DeviceInfo,
    dtype: str,
    accumulator: str,
    value: Expr | None,
    slope: Expr | None,
    guard: bool,
    needs: tuple[bool, bool],
    size: int,
    alignment: int,
) -> Launch:
    """Contiguous arrays; slots grad, a, b, d_a and d_b, the last two as `needs` says.

    `slope` None is a derivative of 1.
    """
    d_a, d_b = needs
    function = elementwise.scalar(value, accumulator, dtype)
    derivative = elementwise.scalar(slope, accumulator, dtype, guard=guard, constant=slope is None)
    arguments = (
        Slot("grad"),
        Slot("a"),
        Slot("b") if d_a else 0,
        Slot("d_a") if d_a else 0,
        Slot("d_b") if d_b else 0,
        size,
    )
    if info.capability[0] and alignment >= 16:
        wide = wide_kernel(dtype, accumulator, function, derivative, needs, backward=True)
        return Launch(wide, _wide_grid(dtype, size, backward=True), arguments)
    made = kernel(
        gate_backward,
        "u64 u64 u64 u64 u64 i64",
        threads=threads_of(info),
        name="gated backward",
        LOAD=scalars.loads(dtype),
        STORE=scalars.stores(dtype),
        D_A=d_a,
        D_B=d_b,
        VALUE=function if d_b else Scalar(None, accumulator),
        SLOPE=derivative,
    )
    return Launch(made, grid_of(size, info), arguments)
