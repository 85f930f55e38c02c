"""numfuse's functions on arrays that live on a CUDA device: nothing moves.

Numba device arrays, CuPy, PyTorch and JAX arrays, numfuse's own (`numfuse.to_device`), and whatever
has DLPack or ``__cuda_array_interface__``. Results are of the caller's kind (numfuse's own for the
last two), on the caller's device and current stream.

CUDA graphs. A call that was made before (with these shapes, dtypes and alignments) can be captured:
it launches, and takes memory from the pool of the capture. The first one compiles and loads, which
a capture may forbid.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.activations import get as get_activation
from numfuse.backends import load
from numfuse.problem import product, second_order
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
    RESIDUAL_SECOND_NEEDS,
    check_needs,
    check_outputs,
)

# numba-cuda may be missing, or have no GPU: the reason is a BackendUnavailable, not this import's.
load("cuda")

import numfuse.adapters.cuda_arrays  # noqa: E402, F401  (adds its libraries)
from numfuse.backends.cuda.call.arrays import DeviceArray, download, dtype_of, ghost  # noqa: E402
from numfuse.backends.cuda.call.entry import DeviceCall, again, remembered  # noqa: E402
from numfuse.backends.cuda.call.foreign import kind_of  # noqa: E402
from numfuse.backends.cuda.driver.device import device  # noqa: E402
from numfuse.backends.cuda.plan import batches  # noqa: E402
from numfuse.backends.cuda.plan import second_order as run_higher  # noqa: E402
from numfuse.backends.cuda.plan.program import Recorder  # noqa: E402

__all__ = [
    "activation_mul",
    "activation_mul_bwd",
    "activation_mul_double_bwd",
    "activation_mul_jvp",
    "again",
    "matmul_bias_activation",
    "matmul_bias_activation_bwd",
    "matmul_bias_activation_double_bwd",
    "matmul_bias_activation_jvp",
    "matmul_bias_residual",
    "matmul_bias_residual_bwd",
    "matmul_bias_residual_double_bwd",
    "matmul_bias_residual_jvp",
    "synchronize",
    "to_numpy",
]


@remembered
def matmul_bias_activation(
    a: Any,
    b: Any,
    bias: Any = None,
    activation: Any = "none",
    *,
    return_pre_activation: bool = False,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation`."""
    act = get_activation(activation)
    save = bool(return_pre_activation)
    options = act.name, act.digest, save
    made = DeviceCall(backend, a=a, b=b, bias=bias)
    made.out("out", out)

    def make(g: dict[str, ndarray]) -> Any:
        p = product.gemm(g["a"], g["b"], g.get("bias"), act, save, g.get("out"))
        return p, (("out", "pre") if save else ("out",)), None

    return made.run("forward", options, make)


@remembered
def matmul_bias_residual(
    a: Any, b: Any, bias: Any, residual: Any, *, out: Any = None, backend: Any = None
) -> Any:
    """As :func:`numfuse.matmul_bias_residual`."""
    made = DeviceCall(backend, a=a, b=b, bias=bias, residual=residual)
    made.out("out", out)

    def make(g: dict[str, ndarray]) -> Any:
        p = product.gemm_residual(g["a"], g["b"], g.get("bias"), g["residual"], g.get("out"))
        return p, ("out",), None

    return made.run("forward", ("residual",), make)


@remembered
def matmul_bias_activation_bwd(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any = None,
    activation: Any = "none",
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = GEMM_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation_bwd`."""
    act = get_activation(activation)
    needs = check_needs(needs, GEMM_NEEDS)
    options = act.name, act.digest, needs, bool(sum_batch), bool(guard)
    made = DeviceCall(backend, grad=grad, a=a, b=b, bias=bias, pre=pre_activation)
    outs = check_outputs(out, GEMM_NEEDS)
    names = tuple(f"d_{name}" for name in GEMM_NEEDS)
    for name, x in zip(names, outs, strict=True):
        made.out(name, x)

    def make(g: dict[str, ndarray]) -> Any:
        p = product.gemm_backward(
            g["grad"],
            g["a"],
            g["b"],
            g.get("bias"),
            act,
            g.get("pre"),
            needs,
            sum_batch,
            guard,
            tuple(g.get(name) for name in names),
        )
        return p, names, None

    return made.run("backward", options, make)


@remembered
def matmul_bias_residual_bwd(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = RESIDUAL_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_residual_bwd`."""
    made = DeviceCall(
        backend, grad=grad, a=a, b=b, bias=bias, residual=residual, pre=pre_activation
    )
    needs, outs = check_needs(needs, RESIDUAL_NEEDS), check_outputs(out, RESIDUAL_NEEDS)
    names = tuple(f"d_{name}" for name in RESIDUAL_NEEDS)
    for name, x in zip(names, outs, strict=True):
        made.out(name, x)

    def make(g: dict[str, ndarray]) -> Any:
        p, residual_grad = product.gemm_residual_backward(
            g["grad"],
            g["a"],
            g["b"],
            g.get("bias"),
            g["residual"],
            g.get("pre"),
            needs,
            sum_batch,
            guard,
            tuple(g.get(name) for name in names),
        )
        if residual_grad is None:
            return p, names, None
        source, target = residual_grad.grad, residual_grad.d_residual

        def after(rec: Recorder, bind: Any) -> None:
            batches.sum_to(rec, bind("grad", source), bind("d_residual", target), p.acc_dtype.name)

        return p, names, after

    return made.run("backward", ("residual", needs, bool(sum_batch), bool(guard)), make)


@remembered
def activation_mul(a: Any, b: Any, activation: Any, *, out: Any = None, backend: Any = None) -> Any:
    """As :func:`numfuse.activation_mul`."""
    act = get_activation(activation)
    options = act.name, act.digest
    made = DeviceCall(backend, a=a, b=b)
    made.out("out", out)

    def make(g: dict[str, ndarray]) -> Any:
        return product.gated(g["a"], g["b"], act, g.get("out")), ("out",), None

    return made.run("gated", options, make)


@remembered
def activation_mul_bwd(
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    *,
    needs: Iterable[str] = GATED_NEEDS,
    guard: bool = True,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.activation_mul_bwd`."""
    act = get_activation(activation)
    needs = check_needs(needs, GATED_NEEDS)
    options = act.name, act.digest, needs, bool(guard)
    made = DeviceCall(backend, grad=grad, a=a, b=b)
    outs = check_outputs(out, GATED_NEEDS)
    for name, x in zip(("d_a", "d_b"), outs, strict=True):
        made.out(name, x)

    def make(g: dict[str, ndarray]) -> Any:
        p = product.gated_backward(
            g["grad"], g["a"], g["b"], act, needs, guard, (g.get("d_a"), g.get("d_b"))
        )
        return p, ("d_a", "d_b"), None

    return made.run("gated_backward", options, make)


@remembered
def matmul_bias_activation_double_bwd(
    u: Any,
    v: Any,
    w: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any = None,
    activation: Any = "none",
    *,
    needs: Iterable[str] = GEMM_SECOND_NEEDS,
    pre_activation: Any = None,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation_double_bwd`."""
    act, needs = get_activation(activation), check_needs(needs, GEMM_SECOND_NEEDS)
    made = DeviceCall(backend, u=u, v=v, w=w, grad=grad, a=a, b=b, bias=bias, pre=pre_activation)

    def make(g: dict[str, ndarray]) -> Any:
        p = second_order.gemm_double_backward(
            g.get("u"),
            g.get("v"),
            g.get("w"),
            g["grad"],
            g["a"],
            g["b"],
            g.get("bias"),
            act,
            g.get("pre"),
            needs,
            guard,
        )
        return p, ("d_grad", "d_a", "d_b", "d_bias"), None

    return made.run("double_backward", (act.name, act.digest, needs, bool(guard)), make)


@remembered
def matmul_bias_residual_double_bwd(
    u: Any,
    v: Any,
    w: Any,
    z: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    *,
    needs: Iterable[str] = RESIDUAL_SECOND_NEEDS,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_residual_double_bwd`."""
    needs = check_needs(needs, RESIDUAL_SECOND_NEEDS)
    made = DeviceCall(
        backend, u=u, v=v, w=w, z=z, grad=grad, a=a, b=b, bias=bias, residual=residual
    )

    def make(g: dict[str, ndarray]) -> Any:
        p = second_order.gemm_residual_double_backward(
            g.get("u"),
            g.get("v"),
            g.get("w"),
            g.get("z"),
            g["grad"],
            g["a"],
            g["b"],
            g.get("bias"),
            g["residual"],
            needs,
            guard,
        )
        d_residual = p.result.d_residual

        def after(rec: Recorder, bind: Any) -> None:
            if d_residual is not None:
                run_higher.zero(rec, bind("d_residual", d_residual))

        return p, ("d_grad", "d_a", "d_b", "d_bias", "d_residual"), after

    return made.run("double_backward", ("residual", needs, bool(guard)), make)


@remembered
def matmul_bias_activation_jvp(
    a: Any,
    b: Any,
    bias: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    activation: Any = "none",
    *,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation_jvp`."""
    act = get_activation(activation)
    made = DeviceCall(backend, a=a, b=b, bias=bias, u=a_dot, v=b_dot, w=bias_dot)

    def make(g: dict[str, ndarray]) -> Any:
        p = second_order.gemm_tangent(
            g["a"], g["b"], g.get("bias"), g.get("u"), g.get("v"), g.get("w"), act, guard
        )
        return p, ("out", "out_dot"), None

    return made.run("tangent", (act.name, act.digest, bool(guard)), make)


@remembered
def matmul_bias_residual_jvp(
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    residual_dot: Any,
    *,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_residual_jvp`."""
    made = DeviceCall(
        backend,
        a=a,
        b=b,
        bias=bias,
        residual=residual,
        u=a_dot,
        v=b_dot,
        w=bias_dot,
        z=residual_dot,
    )

    def make(g: dict[str, ndarray]) -> Any:
        p = second_order.gemm_residual_tangent(
            g["a"],
            g["b"],
            g.get("bias"),
            g["residual"],
            g.get("u"),
            g.get("v"),
            g.get("w"),
            g.get("z"),
        )
        return p, ("out", "out_dot"), None

    return made.run("tangent", ("residual",), make)


@remembered
def activation_mul_double_bwd(
    u: Any,
    v: Any,
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    *,
    needs: Iterable[str] = GATED_SECOND_NEEDS,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.activation_mul_double_bwd`."""
    act, needs = get_activation(activation), check_needs(needs, GATED_SECOND_NEEDS)
    made = DeviceCall(backend, u=u, v=v, grad=grad, a=a, b=b)

    def make(g: dict[str, ndarray]) -> Any:
        p = second_order.gated_double_backward(
            g.get("u"), g.get("v"), g["grad"], g["a"], g["b"], act, needs, guard
        )
        return p, ("d_grad", "d_a", "d_b"), None

    return made.run("gated_double_backward", (act.name, act.digest, needs, bool(guard)), make)


@remembered
def activation_mul_jvp(
    a: Any,
    b: Any,
    a_dot: Any,
    b_dot: Any,
    activation: Any,
    *,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.activation_mul_jvp`."""
    act = get_activation(activation)
    made = DeviceCall(backend, a=a, b=b, u=a_dot, v=b_dot)

    def make(g: dict[str, ndarray]) -> Any:
        p = second_order.gated_tangent(g["a"], g["b"], g.get("u"), g.get("v"), act, guard)
        return p, ("out", "out_dot"), None

    return made.run("gated_tangent", (act.name, act.digest, bool(guard)), make)


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    kind = kind_of(x)
    if kind is None:
        raise TypeError(f"x must be an array on a CUDA device, got {type(x).__qualname__}")
    argument, ordinal, _ = kind.read("x", x)
    dtype = dtype_of(argument.dtype)
    strides = [s * dtype.itemsize for s in argument.strides]
    out = np.empty(argument.shape, dtype)
    stream = x.stream if isinstance(x, DeviceArray) else kind.stream(ordinal)
    source = ghost(argument.address, argument.shape, strides, dtype, False)
    download(device(ordinal), source, out, stream)
    return out


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    kind = kind_of(x)
    if kind is None:
        raise TypeError(f"x must be an array on a CUDA device, got {type(x).__qualname__}")
    device(kind.read("x", x)[1]).synchronize()


def pace(x: Any) -> None:
    """The end of a task that made something of `x`: one task runs ahead of the device, not all."""
    kind = kind_of(x)
    if kind is not None:
        ordinal = kind.read("x", x)[1]
        device(ordinal).pace(x.stream if isinstance(x, DeviceArray) else kind.stream(ordinal))
