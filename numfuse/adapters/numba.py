"""numfuse's functions inside a user's own ``@njit`` functions.

Numba finds this module by its entry point, so that

    @numba.njit
    def network(x, w, b):
        return numfuse.matmul_bias_activation(x, w, b, "gelu")

compiles: float32 and float64, two axes (gates: any), an activation that is a literal. Each call
runs in the thread that makes it, as a user's ``prange`` may be around it, on the same kernels as a
call from Python, with the same bits. Their addresses belong to the process: Numba does not cache a
function that holds them on disk.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import overload, register_jitable

from numfuse import epilogues, functional

__all__ = ["init"]

# An option that is left out would be the caller's: with fast-math flags a NaN counts as impossible,
# and the guard that looks for it as needless.
_OPTIONS: Any = {"fastmath": False}
_jitable = register_jitable(**_OPTIONS)
_overload = functools.partial(overload, jit_options=_OPTIONS)


def init() -> None:
    """Do nothing: Numba calls this once, before it compiles anything, and the import is enough."""


# --- types --------------------------------------------------------------------------------------
def _format(what: str, axes: int | None, **operands: Any) -> str:
    """The one dtype of the operands, or TypingError."""
    for name, x in operands.items():
        if not isinstance(x, types.Array):
            raise TypingError(f"{what}: {name} must be an array, got {x}")
        if axes is not None and x.ndim != (1 if name == "bias" else axes):
            raise TypingError(
                f"{what} in an njit function: {name} must have {1 if name == 'bias' else axes} "
                f"axes, got {x.ndim}"
            )
    dtypes = {str(x.dtype) for x in operands.values()}
    if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
        raise TypingError(
            f"{what} in an njit function: {', '.join(operands)} must be of one dtype, float32 or "
            f"float64, got {', '.join(str(x.dtype) for x in operands.values())}"
        )
    return dtypes.pop()


def _activation(given: Any) -> Any:
    """Return the activation that a literal names."""
    from numfuse.activations import get

    given = given.value if isinstance(given, types.Omitted) else given
    if not isinstance(given, str | types.StringLiteral):
        raise TypingError(
            f'activation must be a literal, such as "gelu", in an njit function, got {given}'
        )
    return get(str(getattr(given, "literal_value", given)))


def _given(bias: Any) -> dict[str, Any]:
    """Return the bias by its name, where it is there."""
    given = bias.value if isinstance(bias, types.Omitted) else bias
    return {} if given is None or isinstance(given, types.NoneType) else {"bias": bias}


def _formula(made: Any, fmt: str, *arguments: str) -> Any:
    """Return an epilogue as a function of scalars, with 0 for derivatives that are not finite."""
    from numfuse.backends.cpu.llvm.primitives import scalar_function

    return scalar_function(made.guarded().graphs, fmt, arguments)


#: Kernels whose addresses are in compiled functions of the user's, which Numba keeps for good.
_HELD: list[Any] = []


# --- products -----------------------------------------------------------------------------------
@functools.cache
def _product(fmt: str, act: Any, bias: bool) -> Any:
    """``product(a, b, bias, out)``: out = act(a @ b + bias) in the calling thread."""
    from numfuse.backends.cpu import descriptors, tiling
    from numfuse.backends.cpu.kernels import library, protocol, rows
    from numfuse.backends.cpu.launch import workspace

    r = library.registers(fmt)
    side = tiling.NJIT_CELL
    # Of a deep product of that size; K and what depends on it are known when it is called.
    t = tiling.gemm(side, side, 2 * tiling.KC[r.itemsize], 1, 1, 1, r, r.mr)
    layout, size = descriptors.layout(t, r, 1)
    row = rows.forward(act.curve, fmt, bias, False, False)
    _HELD.append(row)
    words = {
        **layout,
        "D_NC": t.nc,
        "D_CELL_M": t.cell_m,
        "D_CELL_N": t.cell_n,
        "D_SUM_SIZE": 1,
        "D_SLOT_COUNT": protocol.SLOT_COUNT,
        "D_PACK_A": library.pack_a(fmt, fmt).address,
        "D_PACK_B": library.pack_b(fmt, fmt).address,
        "D_ROW": row.address,
        "D_ASK": -1,
        "D_ASK_2": -1,
        "D_ASK_3": -1,
    }
    slots = [0] * (3 * protocol.SLOT_COUNT)
    template = np.array([*protocol.DESCRIPTOR.words(words), *slots], np.int64)
    # A pointer of ctypes, so that Numba knows that this is of this process alone.
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    cell = kind(library.gemm_cell(fmt).address)
    d = protocol.DESCRIPTOR
    at_m, at_n, at_k, at_kc = d["D_M"], d["D_N"], d["D_K"], d["D_KC"]
    at_cells_m, at_cells_n, at_by_rows = d["D_CELLS_M"], d["D_CELLS_N"], d["D_B_BY_ROWS"]
    at_a, at_b = d["D_A"], d["D_B"]
    at_bias = protocol.D_SLOTS + 3 * protocol.SLOTS["S_BIAS"]
    at_out = protocol.D_SLOTS + 3 * protocol.SLOTS["S_OUT"]
    cell_m, cell_n, item, page = t.cell_m, t.cell_n, r.itemsize, workspace.PAGE
    limit = tiling.KC[r.itemsize]

    @_jitable
    def product(a, b, bias, out):  # type: ignore[no-untyped-def]
        m, k = a.shape
        n = b.shape[1]
        words = template.copy()
        words[at_m], words[at_n], words[at_k] = m, n, k
        blocks = max(1, -(-k // limit))
        words[at_kc] = max(1, -(-k // blocks))  # as tiling.k_block
        cells_m, cells_n = -(-m // cell_m), -(-n // cell_n)
        words[at_cells_m], words[at_cells_n] = cells_m, cells_n
        words[at_a], words[at_a + 1], words[at_a + 2] = a.ctypes.data, a.strides[0], a.strides[1]
        words[at_b], words[at_b + 1], words[at_b + 2] = b.ctypes.data, b.strides[0], b.strides[1]
        words[at_by_rows] = 1 if b.strides[1] == item else 0
        words[at_bias], words[at_bias + 2] = bias.ctypes.data, bias.strides[0]
        words[at_out] = out.ctypes.data
        words[at_out + 1], words[at_out + 2] = out.strides[0], out.strides[1]
        memory = np.empty(size + page, np.uint8)
        start = memory.ctypes.data
        start = start + (-start) % page
        if m > 0 and n > 0:
            for i in range(cells_m * cells_n):
                cell(words.ctypes.data, i, start)
        # The kernel has addresses only: every array is used once more, so that it lives till here.
        return memory.size + words[0] + a.size + b.size + bias.size + out.size

    return product


# Numba leaves out the branch of a bias that is None, or not None: each has types of its own.


@_overload(functional.matmul_bias_activation, prefer_literal=True)
def _matmul_bias_activation(a, b, bias=None, activation="none"):  # type: ignore[no-untyped-def]
    act, operands = _activation(activation), {"a": a, "b": b} | _given(bias)
    fmt = _format("matmul_bias_activation", 2, **operands)
    product, dtype = _product(fmt, act, "bias" in operands), np.dtype(fmt)

    def layer(a, b, bias=None, activation="none"):  # type: ignore[no-untyped-def]
        if a.shape[1] != b.shape[0]:
            raise ValueError("b must have shape (K, N) with K the last axis of a")
        out = np.empty((a.shape[0], b.shape[1]), dtype)
        if bias is None:
            product(a, b, np.empty(0, dtype), out)
        else:
            if bias.shape[0] != b.shape[1]:
                raise ValueError("bias must have shape (N,)")
            product(a, b, bias, out)
        return out

    return layer


@_overload(functional.matmul_bias_activation_bwd, prefer_literal=True)
def _matmul_bias_activation_bwd(grad, a, b, bias=None, activation="none"):  # type: ignore[no-untyped-def]
    """(d_a, d_b, d_bias), or (d_a, d_b, None) without a bias."""
    act, operands = _activation(activation), {"grad": grad, "a": a, "b": b} | _given(bias)
    fmt = _format("matmul_bias_activation_bwd", 2, **operands)
    dtype, none = np.dtype(fmt), _activation("none")
    backward = epilogues.layer(act.curve).select("out").backward()
    grad_pre_of = _formula(backward.without("bias").select("d_z"), fmt, "z", "grad")
    recompute, plain = _product(fmt, none, "bias" in operands), _product(fmt, none, False)

    @_jitable
    def gradients(grad, a, b, bias):  # type: ignore[no-untyped-def]
        m, n = grad.shape
        if a.shape[1] != b.shape[0] or a.shape[0] != m or b.shape[1] != n:
            raise ValueError("grad must have the result's shape (M, N), and b the shape (K, N)")
        grad_pre = np.empty((m, n), dtype)
        recompute(a, b, bias, grad_pre)
        for i in range(m):
            for j in range(n):
                grad_pre[i, j] = grad_pre_of(grad_pre[i, j], grad[i, j])
        d_a, d_b = np.empty(a.shape, dtype), np.empty(b.shape, dtype)
        nothing = np.empty(0, dtype)
        plain(grad_pre, b.T, nothing, d_a)
        plain(a.T, grad_pre, nothing, d_b)
        return d_a, d_b, grad_pre

    def layer_bwd(grad, a, b, bias=None, activation="none"):  # type: ignore[no-untyped-def]
        if bias is None:
            d_a, d_b, _ = gradients(grad, a, b, np.empty(0, dtype))
            return d_a, d_b, None
        else:
            if bias.shape[0] != b.shape[1]:
                raise ValueError("bias must have shape (N,)")
            d_a, d_b, grad_pre = gradients(grad, a, b, bias)
            sums = np.zeros(bias.shape[0], np.float64)
            for i in range(grad_pre.shape[0]):
                for j in range(grad_pre.shape[1]):
                    sums[j] += grad_pre[i, j]
            return d_a, d_b, sums.astype(dtype)

    return layer_bwd


# --- gates --------------------------------------------------------------------------------------
def _gate(what: str, activation: Any, **operands: Any) -> Any:
    """Return the function of a gate's operands, or of its backward's where grad is among them."""
    fmt = _format(what, None, **operands)
    if len({x.ndim for x in operands.values()}) > 1:
        raise TypingError(f"{what}: {', '.join(operands)} must have one shape")
    made, dtype = epilogues.gate(_activation(activation).curve), np.dtype(fmt)
    if "grad" in operands:
        made = made.backward().select("d_a", "d_b")
    formula = _formula(made, fmt, *operands)

    @_jitable
    def gate(a, b):  # type: ignore[no-untyped-def]
        if a.shape != b.shape:
            raise ValueError("b must have the shape of a")
        out = np.empty(a.shape, dtype)
        x, y = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        flat = out.reshape(-1)
        for i in range(flat.size):
            flat[i] = formula(x[i], y[i])
        return out

    @_jitable
    def gate_bwd(grad, a, b):  # type: ignore[no-untyped-def]
        if a.shape != b.shape or a.shape != grad.shape:
            raise ValueError("grad and b must have the shape of a")
        d_a, d_b = np.empty(a.shape, dtype), np.empty(a.shape, dtype)
        x, y = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        g = np.ascontiguousarray(grad).reshape(-1)
        first, second = d_a.reshape(-1), d_b.reshape(-1)
        for i in range(first.size):
            first[i], second[i] = formula(g[i], x[i], y[i])
        return d_a, d_b

    return gate_bwd if "grad" in operands else gate


@_overload(functional.activation_mul, prefer_literal=True)
def _activation_mul(a, b, activation):  # type: ignore[no-untyped-def]
    gate = _gate("activation_mul", activation, a=a, b=b)
    return lambda a, b, activation: gate(a, b)


@_overload(functional.activation_mul_bwd, prefer_literal=True)
def _activation_mul_bwd(grad, a, b, activation):  # type: ignore[no-untyped-def]
    gate_bwd = _gate("activation_mul_bwd", activation, grad=grad, a=a, b=b)
    return lambda grad, a, b, activation: gate_bwd(grad, a, b)


def _overload_named(name: str) -> None:
    """silu_mul and the others, and their backwards."""

    def forward(a, b):  # type: ignore[no-untyped-def]
        gate = _gate(f"{name}_mul", name, a=a, b=b)
        return lambda a, b: gate(a, b)

    def backward(grad, a, b):  # type: ignore[no-untyped-def]
        gate_bwd = _gate(f"{name}_mul_bwd", name, grad=grad, a=a, b=b)
        return lambda grad, a, b: gate_bwd(grad, a, b)

    _overload(getattr(functional, f"{name}_mul"))(forward)
    _overload(getattr(functional, f"{name}_mul_bwd"))(backward)


for _name in functional.GATES:
    _overload_named(_name)
