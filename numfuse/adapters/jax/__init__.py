"""numfuse's functions for JAX arrays and tracers on the CPU: jit, grad, jvp, vmap, in any order.

The operations and their rules are in `numfuse.adapters.jax.primitives`; here are the public
functions over them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy import ndarray

from numfuse.adapters.jax.primitives import call, through
from numfuse.adapters.surface import NAMES, Functions, How, served

__all__ = [*NAMES, "activation", "synchronize", "to_numpy"]


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    return np.asarray(x)


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    x.block_until_ready()


# --- the public functions -----------------------------------------------------------------------
class _Jax(Functions):
    """The public functions over JAX's primitives."""

    what = "JAX, the arrays of which are never written to"
    arrays = jnp

    def product(self, a: Any, b: Any, bias: Any, how: How) -> Any:
        return call("product", how, (a, b, bias))[0]

    def product_bwd(self, grad: Any, a: Any, b: Any, bias: Any, how: How) -> Any:
        return _needed("product_bwd", how, (a, b, bias, grad))

    def product_double(
        self, u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, how: How
    ) -> Any:
        return _needed("product_double", how, (grad, a, b, bias, u, v, w))

    def product_tangent(self, a: Any, b: Any, bias: Any, u: Any, v: Any, w: Any, how: How) -> Any:
        return call("product_tangent", how, (a, b, bias, u, v, w))[0]

    def residual(self, a: Any, b: Any, bias: Any, residual: Any, how: How) -> Any:
        return call("residual", how, (a, b, bias, residual))[0]

    def gate(self, a: Any, b: Any, how: How) -> Any:
        return call("gate", how, (a, b))[0]

    def gate_bwd(self, grad: Any, a: Any, b: Any, how: How) -> Any:
        return _needed("gate_bwd", how, (a, b, grad))

    def gate_double(self, u: Any, v: Any, grad: Any, a: Any, b: Any, how: How) -> Any:
        return _needed("gate_double", how, (grad, a, b, u, v))

    def gate_tangent(self, a: Any, b: Any, u: Any, v: Any, how: How) -> Any:
        return call("gate_tangent", how, (a, b, u, v))[0]

    def sum_to(self, x: Any, shape: Sequence[int]) -> Any:
        lead = x.ndim - len(shape)
        axes = tuple(range(lead)) + tuple(
            lead + i for i, length in enumerate(shape) if length == 1 and x.shape[lead + i] != 1
        )
        return jnp.sum(x, axis=axes, keepdims=True).reshape(shape) if axes else x

    def moves(self, x: Any) -> bool:
        """Whether a derivative may go through an array: through any that is traced."""
        return isinstance(x, jax.core.Tracer)

    def widened(self, x: Any) -> Any:
        return x if x.dtype == np.float64 else x.astype(np.float32)


def _needed(name: str, how: How, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The results `how.needs` alone."""
    return tuple(x for x in call(name, how, operands) if x is not None) if how.needs else ()


FUNCTIONS = _Jax()
activation = FUNCTIONS.activation


# --- what is differentiated through its pieces --------------------------------------------------
def _bwd_tangent(prefix: str, how: How, x: list[Any]) -> Sequence[Any]:
    """As the host makes it, of operations that can be differentiated."""
    n = len(x) // 2
    (grad, *kept), (grad_dot, *dots) = x[:n], x[n:]
    parts: list[Sequence[Any]] = []
    if grad_dot is not None:
        parts.append(call(f"{prefix}_bwd", how, (*kept, grad_dot)))
    if any(dot is not None for dot in dots):
        parts.append(call(f"{prefix}_double", how, (grad, *kept, *dots))[1:])
    return [
        functools.reduce(operator.add, some)
        for some in zip(*parts, strict=True)
        if some[0] is not None
    ]


def _product_tangent(how: How, x: list[Any]) -> Sequence[Any]:
    a, b, bias, u, v, w = x
    return (FUNCTIONS.product_tangent_pieces(a, b, bias, u, v, w, how),)


def _product_double(how: How, x: list[Any]) -> Sequence[Any]:
    grad, a, b, bias, u, v, w = x
    return FUNCTIONS.product_double_pieces(u, v, w, grad, a, b, bias, how)


def _gate_tangent(how: How, x: list[Any]) -> Sequence[Any]:
    a, b, u, v = x
    return (FUNCTIONS.gate_tangent_pieces(a, b, u, v, how),)


def _gate_double(how: How, x: list[Any]) -> Sequence[Any]:
    grad, a, b, u, v = x
    return FUNCTIONS.gate_double_pieces(u, v, grad, a, b, how)


through("product_tangent", _product_tangent)
through("product_bwd_tangent", functools.partial(_bwd_tangent, "product"))
through("product_double", _product_double)
through("gate_tangent", _gate_tangent)
through("gate_bwd_tangent", functools.partial(_bwd_tangent, "gate"))
through("gate_double", _gate_double)


# --- where they are served ----------------------------------------------------------------------


def _on_cuda(x: Any) -> bool:
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and any(device.platform in ("gpu", "cuda") for device in x.devices())
    )


def _public(name: str) -> Any:
    derived = getattr(FUNCTIONS, name)

    @functools.wraps(derived)
    def serve(*args: Any, **options: Any) -> Any:
        # Outside of transformations, arrays of a GPU are served where they are.
        every = (*args, *options.values())
        if jax.default_backend() != "cpu" and any(map(_on_cuda, every)):
            if not any(isinstance(x, jax.core.Tracer) for x in every):
                return served(import_module("numfuse.adapters.cuda"), name)(*args, **options)
        return derived(*args, **options)

    return serve


globals().update({name: _public(name) for name in NAMES})
