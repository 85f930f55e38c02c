"""numfuse's functions on arrays that live on a WebGPU device: nothing moves.

The problem is made, and every check applied, with the arrays' ghosts (see
`numfuse.backends.webgpu.arrays`); the results are arrays of the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from numpy import ndarray

from numfuse.backends import Backend, latest, load
from numfuse.backends.webgpu import split
from numfuse.backends.webgpu.arrays import DeviceArray, address
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.face import WebGpuBackend
from numfuse.backends.webgpu.lower.elementwise import zero
from numfuse.backends.webgpu.lower.sums import sum_to
from numfuse.backends.webgpu.program import Program, key_of
from numfuse.backends.webgpu.stores import DeviceStore
from numfuse.problem import product, second_order
from numfuse.problem.operands import required
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
    RESIDUAL_SECOND_NEEDS,
)
from numfuse.runtime.lifetimes import formulas_of

__all__ = [
    "activation_mul",
    "activation_mul_bwd",
    "activation_mul_double_bwd",
    "activation_mul_jvp",
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


class _Call:
    """The operands and outputs of a call: their device, their ghosts, its results."""

    def __init__(self, backend: str | Backend | None, **operands: Any) -> None:
        self.device = device = self._place(operands)
        self.backend = _backend(backend, device)
        self._operands: list[DeviceArray] = []
        self._outs: list[DeviceArray] = []
        for name, x in operands.items():
            if x is not None:
                if type(x) is not DeviceArray or x.device is not device or device.lost:
                    self._own(name, x)
                self._operands.append(x)
            else:
                required({name: x})

    @staticmethod
    def _place(operands: dict[str, Any]) -> Device:
        for x in operands.values():
            if isinstance(x, DeviceArray):
                return x.device
        raise AssertionError("an array of a device brought the call here")

    def _own(self, name: str, x: Any) -> None:
        if not isinstance(x, DeviceArray):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"{name} must be on {self.device.name} as the other operands, got {kind}: "
                f"numfuse.to_device({name}, 'webgpu') copies it there"
            )
        if x.device is not self.device:
            raise TypeError(
                f"{name} must be on {self.device.name}, got an array on {x.device.name}"
            )
        x.alive()

    def out(self, name: str, x: Any) -> ndarray | None:
        """The ghost of an output; None where it is to be allocated."""
        if x is None:
            return None
        self._own(name, x)
        self._outs.append(x)
        ghost: ndarray = x.ghost
        return ghost

    def outs(self, out: Any, names: tuple[str, ...]) -> Any:
        """The ghosts of a tuple of outputs; what is no such tuple is left to the problem."""
        if not isinstance(out, tuple | list) or len(out) != len(names):
            return out
        return tuple(self.out(f"d_{name}", x) for name, x in zip(names, out, strict=True))

    def run(
        self, kind: str, p: Any, operation: Callable[[DeviceStore, Any], None], plain: Any = True
    ) -> Any:
        """Run a problem of ghosts, and return its result as arrays of the device.

        `plain` is None where the operation does more than the problem says.
        """
        device = self.device
        arrays = self._operands + self._outs
        key = None if plain is None else key_of(kind, p, arrays, len(self._outs))
        program = device.programs.get(key)
        result = p.result
        results = result if isinstance(result, tuple) else (result,)
        known: dict[int, DeviceArray] = {id(x.ghost): x for x in self._outs}
        new = [ghost for ghost in results if ghost is not None and id(ghost) not in known]
        if program is not None:
            buffers = program.run(device, arrays)
            for ghost, number in zip(new, program.results, strict=True):
                known[id(ghost)] = DeviceArray(device, buffers[number], ghost, address(ghost))
            latest.call = program.call
        else:
            self.backend.check(device, p.dtype, kind)
            store = DeviceStore(device, self._operands, self._outs)
            operation(store, p)
            store.finish()
            self.backend.record(device, kind, p)
            for ghost in new:
                known[id(ghost)] = store.result(ghost)
            steps = store.steps
            if key is not None and steps is not None and all(ghost.size for ghost in new):
                made = [known[id(ghost)].buffer for ghost in new]
                program = Program.of(steps, arrays, made, latest.call)
                device.keep_program(key, program, formulas_of(p.activation.curve))
        if result is results:
            found = [None if ghost is None else known[id(ghost)] for ghost in results]
            return getattr(result, "_make", tuple)(found)
        return known[id(result)]


def _ghost(x: Any) -> Any:
    return x.ghost if isinstance(x, DeviceArray) else x


def _backend(backend: str | Backend | None, device: Device) -> WebGpuBackend:
    """The backend of these arrays; another one asked for is an error, as nothing moves unasked."""
    own = load("webgpu")
    assert isinstance(own, WebGpuBackend)
    if backend is None or backend == "webgpu":
        return own
    if isinstance(backend, WebGpuBackend) and backend.device is device:
        return backend
    raise ValueError(
        f"backend must be 'webgpu' (or None) for arrays on {device.name}, got {backend!r}: "
        f"numfuse.to_numpy moves an array"
    )


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
    call = _Call(backend, a=a, b=b, bias=bias)
    p = product.gemm(
        a.ghost, b.ghost, _ghost(bias), activation, return_pre_activation, call.out("out", out)
    )
    return call.run("forward", p, split.forward)


def matmul_bias_residual(
    a: Any, b: Any, bias: Any, residual: Any, *, out: Any = None, backend: Any = None
) -> Any:
    """As :func:`numfuse.matmul_bias_residual`."""
    call = _Call(backend, a=a, b=b, bias=bias, residual=residual)
    p = product.gemm_residual(a.ghost, b.ghost, _ghost(bias), residual.ghost, call.out("out", out))
    return call.run("forward", p, split.forward)


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
    call = _Call(backend, grad=grad, a=a, b=b, bias=bias, pre_activation=pre_activation)
    p = product.gemm_backward(
        grad.ghost,
        a.ghost,
        b.ghost,
        _ghost(bias),
        activation,
        _ghost(pre_activation),
        needs,
        sum_batch,
        guard,
        call.outs(out, GEMM_NEEDS),
    )
    return call.run("backward", p, split.backward)


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
    call = _Call(
        backend, grad=grad, a=a, b=b, bias=bias, residual=residual, pre_activation=pre_activation
    )
    p, residual_grad = product.gemm_residual_backward(
        grad.ghost,
        a.ghost,
        b.ghost,
        _ghost(bias),
        residual.ghost,
        _ghost(pre_activation),
        needs,
        sum_batch,
        guard,
        call.outs(out, RESIDUAL_NEEDS),
    )

    def both(store: DeviceStore, p: Any) -> None:
        split.backward(store, p)
        if residual_grad is not None:
            sum_to(store, residual_grad.grad, residual_grad.d_residual, p.acc_dtype)

    return call.run("backward", p, both, None if residual_grad is not None else True)


def activation_mul(a: Any, b: Any, activation: Any, *, out: Any = None, backend: Any = None) -> Any:
    """As :func:`numfuse.activation_mul`."""
    call = _Call(backend, a=a, b=b)
    p = product.gated(a.ghost, b.ghost, activation, call.out("out", out))
    return call.run("gated", p, split.gated)


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
    call = _Call(backend, grad=grad, a=a, b=b)
    p = product.gated_backward(
        grad.ghost, a.ghost, b.ghost, activation, needs, guard, call.outs(out, GATED_NEEDS)
    )
    return call.run("gated_backward", p, split.gated_backward)


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
    operands = (u, v, w, grad, a, b, bias)
    names = ("u", "v", "w", "grad", "a", "b", "bias")
    call = _Call(backend, **dict(zip(names, operands, strict=True)), pre_activation=pre_activation)
    u, v, w, grad, a, b, bias = map(_ghost, operands)
    pre = _ghost(pre_activation)
    p = second_order.gemm_double_backward(u, v, w, grad, a, b, bias, activation, pre, needs, guard)
    return call.run("double_backward", p, split.double_backward)


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
    call = _Call(backend, u=u, v=v, w=w, z=z, grad=grad, a=a, b=b, bias=bias, residual=residual)
    operands = (u, v, w, z, grad, a, b, bias, residual)
    u, v, w, z, grad, a, b, bias, residual = map(_ghost, operands)
    p = second_order.gemm_residual_double_backward(
        u, v, w, z, grad, a, b, bias, residual, needs, guard
    )

    def both(store: DeviceStore, p: Any) -> None:
        split.double_backward(store, p)
        if p.result.d_residual is not None:
            zero(store, p.result.d_residual, p.acc_dtype)

    return call.run("double_backward", p, both, None)


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
    call = _Call(backend, a=a, b=b, bias=bias, a_dot=a_dot, b_dot=b_dot, bias_dot=bias_dot)
    operands = (a, b, bias, a_dot, b_dot, bias_dot)
    a, b, bias, a_dot, b_dot, bias_dot = map(_ghost, operands)
    p = second_order.gemm_tangent(a, b, bias, a_dot, b_dot, bias_dot, activation, guard)
    return call.run("tangent", p, split.tangent)


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
    call = _Call(
        backend,
        a=a,
        b=b,
        bias=bias,
        residual=residual,
        a_dot=a_dot,
        b_dot=b_dot,
        bias_dot=bias_dot,
        residual_dot=residual_dot,
    )
    operands = (a, b, bias, residual, a_dot, b_dot, bias_dot, residual_dot)
    p = second_order.gemm_residual_tangent(*map(_ghost, operands))
    return call.run("tangent", p, split.tangent)


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
    call = _Call(backend, u=u, v=v, grad=grad, a=a, b=b)
    u, v, grad, a, b = map(_ghost, (u, v, grad, a, b))
    p = second_order.gated_double_backward(u, v, grad, a, b, activation, needs, guard)
    return call.run("gated_double_backward", p, split.gated_double_backward)


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
    call = _Call(backend, a=a, b=b, a_dot=a_dot, b_dot=b_dot)
    a, b, a_dot, b_dot = map(_ghost, (a, b, a_dot, b_dot))
    p = second_order.gated_tangent(a, b, a_dot, b_dot, activation, guard)
    return call.run("gated_tangent", p, split.gated_tangent)


def to_numpy(x: DeviceArray) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    return x.to_numpy()


def synchronize(x: DeviceArray) -> None:
    """As :func:`numfuse.synchronize`."""
    x.alive()
    x.device.wait()
