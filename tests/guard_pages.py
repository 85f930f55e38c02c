"""Run every operation on operands that end, or start, at an inaccessible page; by test_conformance.

The kernels use raw addresses, and a read past the end of an array mostly goes unnoticed. Here each
array lies between two pages that may be neither read nor written, right before the one or right
after the other, so that the first stray access kills the process. The case is printed first.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from math import prod

import numpy as np
import weekly
from conftest import served
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends.cpu import tiling

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_maps = []  # a map outlives its arrays: this process is short


def guarded(shape: tuple[int, ...], dtype: np.dtype, at_end: bool) -> np.ndarray:
    """An array of NaN whose last byte lies before an inaccessible page, or its first after one."""
    size = prod(shape) * dtype.itemsize
    pages = max(1, -(-size // PAGE))
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (start, start + (pages + 1) * PAGE):
        if LIBC.mprotect(page, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    _maps.append(region)
    offset = PAGE + (pages * PAGE - size if at_end else 0)
    array = np.frombuffer(region, np.uint8, size, offset).view(dtype).reshape(shape)
    array[...] = np.nan
    return array


def filled(shape, dtype, at_end, transposed=False):
    """A guarded operand with values; transposed: the guard is where its columns end."""
    array = guarded(shape[::-1] if transposed else shape, dtype, at_end)
    array[...] = np.random.default_rng(1).standard_normal(array.shape)
    return array.T if transposed else array


def layer_to_second_order(backend, grad, a, b, bias, pre, at_end, turned):
    """Backward's derivatives, with a pre-activation that was saved and without, and the tangent."""
    u, v, w = (filled(x.shape, x.dtype, at_end, turned) for x in (a, b, bias))
    for saved in (None, pre):
        found = nf.matmul_bias_activation_double_bwd(
            u, v, w, grad, a, b, bias, "gelu", pre_activation=saved, backend=backend
        )
        assert not any(np.isnan(x).any() for x in found)
    found = nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, "gelu", backend=backend)
    assert not any(np.isnan(x).any() for x in found)


def gate_to_second_order(backend, grad, other, at_end, turned):
    moved = [filled(grad.shape, grad.dtype, at_end, turned) for _ in range(2)]
    found = nf.activation_mul_double_bwd(*moved, grad, grad, other, "silu", backend=backend)
    assert not any(np.isnan(x).any() for x in found)
    found = nf.activation_mul_jvp(grad, other, *moved, "silu", backend=backend)
    assert not any(np.isnan(x).any() for x in found)


def run(backend: str) -> None:
    sizes = [(1, 1, 1), (3, 5, 7), (14, 16, 32), (15, 33, 17), (29, 65, 13), (57, 31, 64)]
    sizes += [(175, 17, 9)]  # four chunks of rows
    names = served(backend)
    # Kernels of second order take seconds each: of layers and of gates, those of every other dtype.
    layers, gates = (names, names) if weekly.ALL else (names[::2], names[1::2] or names)
    for name in names:
        dtype = DTYPES[name]
        for m, n, k in sizes:
            for at_end in (True, False):
                for turned in (False, True):
                    print(f"{name} {(m, n, k)} end={at_end} transposed={turned}", flush=True)
                    a = filled((m, k), dtype, at_end, turned)
                    b = filled((k, n), dtype, at_end, turned)
                    bias = filled((n,), dtype, at_end)
                    grad = filled((m, n), dtype, at_end, turned)
                    out = guarded((m, n), dtype, at_end)
                    nf.matmul_bias_activation(a, b, bias, "gelu", out=out, backend=backend)
                    plain = [np.array(x) for x in (a, b, bias)]
                    wanted = nf.matmul_bias_activation(*plain, "gelu", backend=backend)
                    assert (out == wanted).all()
                    outs = tuple(guarded(x.shape, dtype, at_end) for x in (a, b, bias))
                    nf.matmul_bias_activation_bwd(
                        grad, a, b, bias, "gelu", out=outs, backend=backend
                    )
                    assert not any(np.isnan(x).any() for x in outs)
                    pre = filled((m, n), dtype, at_end)
                    nf.matmul_bias_activation_bwd(
                        grad, a, b, bias, "gelu", pre_activation=pre, out=outs, backend=backend
                    )
                    if name in layers:
                        layer_to_second_order(backend, grad, a, b, bias, pre, at_end, turned)
                    nf.matmul_bias_residual(a, b, bias, grad, out=out, backend=backend)
                    assert not np.isnan(out).any()
                    other = filled((m, n), dtype, at_end, turned)
                    nf.silu_mul(grad, other, out=out, backend=backend)
                    if name in gates:
                        gate_to_second_order(backend, grad, other, at_end, turned)
                    outs = tuple(guarded((m, n), dtype, at_end) for _ in range(2))
                    nf.silu_mul_bwd(grad, other, other, out=outs, backend=backend)
                    assert not any(np.isnan(x).any() for x in outs)
    print("all cases passed")


if __name__ == "__main__":
    if "blocks" in sys.argv:
        # The backward of the CPU backend by blocks of one chunk of rows, whatever its size.
        tiling.GRAD_PRE_BYTES, tiling.GRAD_PRE_ROWS, tiling.PARALLEL_FMAS = 0, 1, 0
    run(sys.argv[1])
