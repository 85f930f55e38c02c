"""The gates, element by element: out = act(a) * b, and its gradients."""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda import elementwise, scalars
from numfuse.backends.cuda.elementwise import Scalar
from numfuse.backends.cuda.passes import grid_of, threads_of
from numfuse.backends.cuda.product import DeviceInfo, Launch, Slot
from numfuse.backends.cuda.toolchain import cuda, kernel
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


def forward(
    info: DeviceInfo, dtype: str, accumulator: str, value: Expr | None, size: int, alignment: int
) -> Launch:
    """Contiguous arrays aligned to so many bytes; slots a, b and out."""
    made = kernel(
        gate, "u64 u64 u64 i64", threads=threads_of(info), name="gated",
        LOAD=scalars.loads(dtype), STORE=scalars.stores(dtype),
        VALUE=elementwise.scalar(value, accumulator, dtype),
    )  # fmt: skip
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
    made = kernel(
        gate_backward, "u64 u64 u64 u64 u64 i64", threads=threads_of(info), name="gated backward",
        LOAD=scalars.loads(dtype), STORE=scalars.stores(dtype), D_A=d_a, D_B=d_b,
        VALUE=elementwise.scalar(value, accumulator, dtype) if d_b else Scalar(None, accumulator),
        SLOPE=elementwise.scalar(slope, accumulator, dtype, guard=guard, constant=slope is None),
    )  # fmt: skip
    arguments = (
        Slot("grad"), Slot("a"), Slot("b") if d_a else 0, Slot("d_a") if d_a else 0,
        Slot("d_b") if d_b else 0, size,
    )  # fmt: skip
    return Launch(made, grid_of(size, info), arguments)
