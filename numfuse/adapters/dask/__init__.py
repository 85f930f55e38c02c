"""numfuse's functions on Dask arrays: lazy Dask arrays, whose blocks are computed by the same
functions wherever Dask runs them.

A block may be any kind of array that numfuse serves. What follows from the chunks, and how sums
over them are made, is said in docs/distributed.md.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from typing import Any

import dask
from numpy import ndarray

from numfuse import devices
from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.adapters.dask.blocks import NONE, Task, is_identity
from numfuse.adapters.dask.blocks import gated as gated_block
from numfuse.adapters.dask.blocks import gated_backward as gated_backward_block
from numfuse.adapters.dask.blocks import gated_double_backward as gated_double_backward_block
from numfuse.adapters.dask.blocks import gated_tangent as gated_tangent_block
from numfuse.adapters.dask.graph import Product
from numfuse.adapters.dask.operands import Gate
from numfuse.backends import Backend, active, load
from numfuse.errors import BackendUnavailable
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
    RESIDUAL_SECOND_NEEDS,
    GatedGradients,
    GatedSecondGradients,
    GemmGradients,
    GemmResidualGradients,
    GemmResidualSecondGradients,
    GemmSecondGradients,
    Tangent,
    check_needs,
)

__all__ = [
    "activation",
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


def _task(operation: str, activation: Any, backend: Any, out: Any, **options: bool) -> Task:
    """Return the Task of an operation, after the checks that need no operands."""
    if out is not None:
        raise ValueError(
            f"out must be None for Dask arrays, whose results are lazy, got {type(out).__name__}"
        )
    threads = dask.config.get("numfuse.threads", 1)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(
            f"numfuse.threads in Dask's configuration must be a whole number of threads for a "
            f"task, 1 or more, got {threads!r}"
        )
    text = NONE if activation is None else pickle.dumps(activation)
    # What `use_backend` says is for NumPy blocks: those of a device stay there.
    return Task(operation, text, _backend(backend), threads, implied=backend is None, **options)


def _backend(backend: str | Backend | None) -> str | Backend | None:
    """Return what names the backend in another process: a name where there is one.

    The default is the backend of the `use_backend` around the call that makes the graph, because
    the graph runs outside of it. A backend that this machine lacks may be there on the workers.
    """
    chosen = active() if backend is None else backend
    if chosen is None:
        return None
    name = chosen if isinstance(chosen, str) else getattr(chosen, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"backend must be a name or a backend object, got {type(chosen).__qualname__}"
        )
    try:
        found = load(name)
    except BackendUnavailable:
        return name if isinstance(chosen, str) else chosen
    except ValueError:
        if isinstance(chosen, str):
            raise
        return chosen  # a backend of the user's own
    return name if isinstance(chosen, str) or found is chosen else chosen


def activation(x: Any, activation: Activation) -> Any:
    """The values of an activation at a Dask array, block by block."""
    return x.map_blocks(activation, dtype=x.dtype, meta=x._meta)


def matmul_bias_activation(
    a: Any,
    b: Any,
    bias: Any = None,
    activation: str | Activation = "none",
    *,
    return_pre_activation: bool = False,
    out: Any = None,
    backend: str | Backend | None = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation`."""
    task = _task("matmul_bias_activation", get_activation(activation), backend, out)
    return Product(task, {"a": a, "b": b, "bias": bias}).forward(return_pre_activation)


def matmul_bias_residual(
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    *,
    out: Any = None,
    backend: str | Backend | None = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_residual`."""
    task = _task("matmul_bias_residual", None, backend, out)
    return Product(task, {"a": a, "b": b, "bias": bias, "residual": residual}).forward()


def matmul_bias_activation_bwd(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any = None,
    activation: str | Activation = "none",
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = GEMM_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: str | Backend | None = None,
) -> GemmGradients:
    """As :func:`numfuse.matmul_bias_activation_bwd`."""
    wanted = check_needs(needs, GEMM_NEEDS)
    found = _backward(
        "matmul_bias_activation_bwd",
        get_activation(activation),
        wanted,
        backend,
        out,
        sum_batch,
        guard,
        {"grad": grad, "a": a, "b": b, "bias": bias, "pre_activation": pre_activation},
    )
    return GemmGradients(*(found.get(name) for name in GEMM_NEEDS))


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
    backend: str | Backend | None = None,
) -> GemmResidualGradients:
    """As :func:`numfuse.matmul_bias_residual_bwd`."""
    wanted = check_needs(needs, RESIDUAL_NEEDS)
    operands = {"grad": grad, "a": a, "b": b, "bias": bias, "residual": residual}
    found = _backward(
        "matmul_bias_residual_bwd",
        get_activation("none"),
        wanted,
        backend,
        out,
        sum_batch,
        guard,
        operands | {"pre_activation": pre_activation},
    )
    return GemmResidualGradients(*(found.get(name) for name in RESIDUAL_NEEDS))


def _backward(
    operation: str,
    activation: Activation,
    needs: tuple[str, ...],
    backend: str | Backend | None,
    out: Any,
    sum_batch: bool,
    guard: bool,
    operands: dict[str, Any],
) -> dict[str, Any]:
    """The gradients of `needs` whose operands are there."""
    task = _task(operation, activation, backend, out, sum_batch=bool(sum_batch), guard=bool(guard))
    product = Product(task, operands)
    wanted = [name for name in operands if name in needs and operands[name] is not None]
    found = {}
    if "residual" in wanted:
        wanted.remove("residual")
        found["residual"] = product.residual_gradient()
    if wanted:
        found |= product.backward(wanted, is_identity(activation))
    return found


def activation_mul(
    a: Any,
    b: Any,
    activation: str | Activation,
    *,
    out: Any = None,
    backend: str | Backend | None = None,
) -> Any:
    """As :func:`numfuse.activation_mul`."""
    task = _task("activation_mul", get_activation(activation), backend, out)
    gate = Gate(task, {"a": a, "b": b})
    return gate.map(
        gated_block, gate.letters, gate.index(gate.letters), *gate.named("a", "b"), task=gate.task
    )


def activation_mul_bwd(
    grad: Any,
    a: Any,
    b: Any,
    activation: str | Activation,
    *,
    needs: Iterable[str] = GATED_NEEDS,
    guard: bool = True,
    out: Any = None,
    backend: str | Backend | None = None,
) -> GatedGradients:
    """As :func:`numfuse.activation_mul_bwd`."""
    wanted = check_needs(needs, GATED_NEEDS)
    task = _task("activation_mul_bwd", get_activation(activation), backend, out, guard=bool(guard))
    gate = Gate(task, {"grad": grad, "a": a, "b": b})
    if not wanted:
        return GatedGradients(None, None)
    names = tuple(name for name in GATED_NEEDS if name in wanted)
    made = gate.map(
        gated_backward_block,
        gate.letters,
        gate.index(gate.letters),
        *gate.named("grad", "a", "b"),
        needs=names,
        task=gate.task,
    )
    if len(names) == 1:
        return GatedGradients(*(made if name in names else None for name in GATED_NEEDS))
    return GatedGradients(*(gate.item(made, number, gate.dtype) for number in range(2)))


# --- second order and forward mode ----------------------------------------------------------------


def matmul_bias_activation_double_bwd(
    u: Any,
    v: Any,
    w: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any = None,
    activation: str | Activation = "none",
    *,
    needs: Iterable[str] = GEMM_SECOND_NEEDS,
    pre_activation: Any = None,
    guard: bool = True,
    backend: str | Backend | None = None,
) -> GemmSecondGradients:
    """As :func:`numfuse.matmul_bias_activation_double_bwd`."""
    found = _double_backward(
        "matmul_bias_activation_double_bwd",
        get_activation(activation),
        check_needs(needs, GEMM_SECOND_NEEDS),
        backend,
        guard,
        {
            "grad": grad,
            "a": a,
            "b": b,
            "bias": bias,
            "u": u,
            "v": v,
            "w": w,
            "pre_activation": pre_activation,
        },
    )
    return GemmSecondGradients(*(found.get(name) for name in GEMM_SECOND_NEEDS))


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
    backend: str | Backend | None = None,
) -> GemmResidualSecondGradients:
    """As :func:`numfuse.matmul_bias_residual_double_bwd`."""
    found = _double_backward(
        "matmul_bias_residual_double_bwd",
        get_activation("none"),
        check_needs(needs, RESIDUAL_SECOND_NEEDS),
        backend,
        guard,
        {
            "grad": grad,
            "a": a,
            "b": b,
            "bias": bias,
            "residual": residual,
            "u": u,
            "v": v,
            "w": w,
            "z": z,
        },
    )
    return GemmResidualSecondGradients(*(found.get(name) for name in RESIDUAL_SECOND_NEEDS))


def _double_backward(
    operation: str,
    activation: Activation,
    needs: tuple[str, ...],
    backend: str | Backend | None,
    guard: bool,
    operands: dict[str, Any],
) -> dict[str, Any]:
    task = _task(operation, activation, backend, None, guard=bool(guard))
    product = Product(task, operands)
    wanted = [name for name in operands if name in needs and operands[name] is not None]
    return product.double_backward(wanted)


def matmul_bias_activation_jvp(
    a: Any,
    b: Any,
    bias: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    activation: str | Activation = "none",
    *,
    guard: bool = True,
    backend: str | Backend | None = None,
) -> Tangent:
    """As :func:`numfuse.matmul_bias_activation_jvp`."""
    operation, act = "matmul_bias_activation_jvp", get_activation(activation)
    task = _task(operation, act, backend, None, guard=bool(guard))
    operands = {"a": a, "b": b, "bias": bias}
    dots = {"a_dot": a_dot, "b_dot": b_dot, "bias_dot": bias_dot}
    return Tangent(*Product(task, operands | dots).tangent())


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
    backend: str | Backend | None = None,
) -> Tangent:
    """As :func:`numfuse.matmul_bias_residual_jvp`."""
    task = _task("matmul_bias_residual_jvp", None, backend, None)
    operands = {"a": a, "b": b, "bias": bias, "residual": residual}
    dots = {"a_dot": a_dot, "b_dot": b_dot, "bias_dot": bias_dot, "residual_dot": residual_dot}
    return Tangent(*Product(task, operands | dots).tangent())


def activation_mul_double_bwd(
    u: Any,
    v: Any,
    grad: Any,
    a: Any,
    b: Any,
    activation: str | Activation,
    *,
    needs: Iterable[str] = GATED_SECOND_NEEDS,
    guard: bool = True,
    backend: str | Backend | None = None,
) -> GatedSecondGradients:
    """As :func:`numfuse.activation_mul_double_bwd`."""
    wanted = check_needs(needs, GATED_SECOND_NEEDS)
    names = [name for name in GATED_SECOND_NEEDS if name in wanted]
    operation, act = "activation_mul_double_bwd", get_activation(activation)
    task = _task(operation, act, backend, None, guard=bool(guard))
    gate = Gate(task, {"grad": grad, "a": a, "b": b, "u": u, "v": v})
    found: dict[str, Any] = {}
    if names:
        made = gate.map(
            gated_double_backward_block,
            gate.letters,
            gate.index(gate.letters),
            *gate.named(*gate.given),
            names=tuple(gate.given),
            needs=tuple(names),
            task=gate.task,
        )
        for number, name in enumerate(names):
            found[name] = made if len(names) == 1 else gate.item(made, number, gate.dtype)
    return GatedSecondGradients(*(found.get(name) for name in GATED_SECOND_NEEDS))


def activation_mul_jvp(
    a: Any,
    b: Any,
    a_dot: Any,
    b_dot: Any,
    activation: str | Activation,
    *,
    guard: bool = True,
    backend: str | Backend | None = None,
) -> Tangent:
    """As :func:`numfuse.activation_mul_jvp`."""
    operation, act = "activation_mul_jvp", get_activation(activation)
    task = _task(operation, act, backend, None, guard=bool(guard))
    gate = Gate(task, {"a": a, "b": b, "a_dot": a_dot, "b_dot": b_dot})
    made = gate.map(
        gated_tangent_block,
        gate.letters,
        gate.index(gate.letters),
        *gate.named(*gate.given),
        names=tuple(gate.given),
        task=gate.task,
    )
    return Tangent(*(gate.item(made, number, gate.dtype) for number in range(2)))


def to_numpy(x: Any) -> ndarray:
    """The result, computed by the current scheduler."""
    return devices.to_numpy(x.compute())


def synchronize(x: Any) -> None:
    """Wait for the blocks that `persist` has begun to compute; a lazy array has nothing to wait
    for."""
    distributed = sys.modules.get("distributed")
    if distributed is not None and (futures := distributed.futures_of(x)):
        distributed.wait(futures)
