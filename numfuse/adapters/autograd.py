"""numfuse's functions for HIPS autograd: reverse mode of any order the table has, and forward mode.

Each operation is a primitive with a fused backward, which is a primitive with a fused double
backward, which is differentiated through its pieces (`numfuse.adapters.pieces`). Primitives return
plain tuples: autograd cannot differentiate through a named one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.builtins import tuple as traced_tuple
from autograd.core import make_jvp, make_vjp
from autograd.extend import defjvp_argnums, defvjp_argnums
from autograd.extend import primitive as autograd_primitive
from autograd.tracer import getval, isbox

from numfuse import differentials, functional
from numfuse.adapters import pieces
from numfuse.adapters.surface import NAMES, Functions, How, chosen, made, spread
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
)

__all__ = [*NAMES, "activation", "synchronize", "to_numpy"]


def _like(g: Any, x: Any) -> Any:
    """A cotangent in the operands' dtype: autograd makes float64 of what it meets."""
    return g if g.dtype == x.dtype else g.astype(x.dtype)


# --- primitives ---------------------------------------------------------------------------------
def primitive(function: Callable[..., Any]) -> Any:
    """autograd's, of a function of arrays: NumPy's arithmetic makes scalars of 0-d arrays."""

    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        return function(*(np.asarray(x) if isinstance(x, np.generic) else x for x in operands))

    return autograd_primitive(call)


@primitive
def _product(a: Any, b: Any, bias: Any, how: How) -> Any:
    return functional.matmul_bias_activation(a, b, bias, how.activation, backend=how.backend)


@primitive
def _product_bwd(grad: Any, a: Any, b: Any, bias: Any, how: How) -> Any:
    found = functional.matmul_bias_activation_bwd(
        grad, a, b, bias, how.activation, needs=how.needs, guard=how.guard, backend=how.backend
    )
    return made(found, GEMM_NEEDS, how.needs)


@primitive
def _product_double(u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, how: How) -> Any:
    found = differentials.matmul_bias_activation_double_bwd(
        u,
        v,
        w,
        grad,
        a,
        b,
        bias,
        how.activation,
        needs=how.needs,
        guard=how.guard,
        backend=how.backend,
    )
    return made(found, GEMM_SECOND_NEEDS, how.needs)


@primitive
def _product_tangent(a: Any, b: Any, bias: Any, u: Any, v: Any, w: Any, how: How) -> Any:
    return differentials.matmul_bias_activation_jvp(
        a, b, bias, u, v, w, how.activation, guard=how.guard, backend=how.backend
    ).out_dot


@primitive
def _gate(a: Any, b: Any, how: How) -> Any:
    return functional.activation_mul(a, b, how.activation, backend=how.backend)


@primitive
def _gate_bwd(grad: Any, a: Any, b: Any, how: How) -> Any:
    found = functional.activation_mul_bwd(
        grad, a, b, how.activation, needs=how.needs, guard=how.guard, backend=how.backend
    )
    return made(found, GATED_NEEDS, how.needs)


@primitive
def _gate_double(u: Any, v: Any, grad: Any, a: Any, b: Any, how: How) -> Any:
    found = differentials.activation_mul_double_bwd(
        u, v, grad, a, b, how.activation, needs=how.needs, guard=how.guard, backend=how.backend
    )
    return made(found, GATED_SECOND_NEEDS, how.needs)


@primitive
def _gate_tangent(a: Any, b: Any, u: Any, v: Any, how: How) -> Any:
    return differentials.activation_mul_jvp(
        a, b, u, v, how.activation, guard=how.guard, backend=how.backend
    ).out_dot


@primitive
def _residual(a: Any, b: Any, bias: Any, residual: Any, how: How) -> Any:
    return functional.matmul_bias_residual(a, b, bias, residual, backend=how.backend)


class _Autograd(Functions):
    """The public functions over the primitives above."""

    arrays = anp
    moves = staticmethod(isbox)

    product = staticmethod(_product)
    product_bwd = staticmethod(_product_bwd)
    product_double = staticmethod(_product_double)
    product_tangent = staticmethod(_product_tangent)
    gate = staticmethod(_gate)
    gate_bwd = staticmethod(_gate_bwd)
    gate_double = staticmethod(_gate_double)
    gate_tangent = staticmethod(_gate_tangent)
    residual = staticmethod(_residual)

    def sum_to(self, x: Any, shape: Sequence[int]) -> Any:
        lead = x.ndim - len(shape)
        axes = tuple(range(lead)) + tuple(
            lead + i for i, length in enumerate(shape) if length == 1 and x.shape[lead + i] != 1
        )
        return anp.reshape(anp.sum(x, axis=axes, keepdims=True) if axes else x, shape)

    def widened(self, x: Any) -> Any:
        return x if x.dtype == np.float64 else x.astype(np.float32)


FUNCTIONS = _Autograd()
globals().update({name: getattr(FUNCTIONS, name) for name in NAMES})
activation = FUNCTIONS.activation


# --- their derivatives --------------------------------------------------------------------------
def _fused(names: tuple[str, ...], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The reverse rule of a primitive whose gradients are one fused call."""

    def make(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        *operands, how = args
        needs = chosen(argnums, names)

        def pull(g: Any) -> Any:
            found = backward(g, operands, how._replace(needs=needs))
            return tuple(spread(found, names, needs)[i] for i in argnums)

        return pull

    return make


def _through(composite: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The reverse and the forward rule of a primitive, through what it is made of.

    `composite` takes the primitive's operands and returns what it returns.
    """

    def replaced(argnums: Any, args: Any) -> Callable[[Any], Any]:
        def call(values: Any) -> Any:
            operands = list(args)
            for place, i in enumerate(argnums):
                operands[i] = values[place]
            found = composite(*operands)
            return traced_tuple(found) if isinstance(found, tuple) else found

        return call

    def reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        def pull(g: Any) -> Any:
            values = traced_tuple(args[i] for i in argnums)
            with _quiet():
                found = make_vjp(replaced(argnums, args), values)[0](g)
            return tuple(found[i] for i in range(len(argnums)))

        return pull

    def forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        values = traced_tuple(args[i] for i in argnums)
        with _quiet():
            return make_jvp(replaced(argnums, args), values)(traced_tuple(gs))[1]

    return reverse, forward


@contextmanager
def _quiet() -> Iterator[None]:
    """A result that does not depend on an operand has the gradient 0, and nobody need be warned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Output seems independent of input")
        yield


def _tangents(argnums: Any, gs: Any, args: Any) -> list[Any]:
    found: list[Any] = [None] * (len(args) - 1)
    for i, g in zip(argnums, gs, strict=True):
        found[i] = _like(g, args[i])
    return found


def _linear_bwd_forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    """Forward mode of the backward: of a product alone it is bilinear."""
    grad, a, b, bias, how = args
    if not pieces.is_linear(how.activation):
        return _through(FUNCTIONS.product_bwd_pieces)[1](argnums, gs, ans, args, kwargs)
    grad_dot, a_dot, b_dot, _ = _tangents(argnums, gs, args)
    return traced_tuple(
        pieces.linear_backward_tangent(FUNCTIONS, grad, a, b, bias, grad_dot, a_dot, b_dot, how)
    )


def _weighted(g: Any, operands: Any, names: tuple[str, ...], how: How) -> list[Any]:
    """Cotangents of the gradients `how.needs`, by operand; None of the others."""
    parts = spread(g, names, how.needs)
    return [
        None if part is None else _like(part, x) for part, x in zip(parts, operands, strict=True)
    ]


defvjp_argnums(
    _product,
    _fused(GEMM_NEEDS, lambda g, x, how: _product_bwd(_like(g, x[0]), *x, how)),
)
defjvp_argnums(
    _product,
    lambda argnums, gs, ans, args, kwargs: _product_tangent(
        *args[:3], *_tangents(argnums, gs, args), args[3]
    ),
)


def _bwd_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *operands, how = args
    names = GEMM_SECOND_NEEDS
    needs = chosen(argnums, names)

    def pull(g: Any) -> Any:
        cotangents = _weighted(g, operands[1:], GEMM_NEEDS, how)
        found = _product_double(*cotangents, *operands, how._replace(needs=needs))
        return tuple(spread(found, names, needs)[i] for i in argnums)

    return pull


def _gate_bwd_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *operands, how = args
    names = GATED_SECOND_NEEDS
    needs = chosen(argnums, names)

    def pull(g: Any) -> Any:
        cotangents = _weighted(g, operands[1:], GATED_NEEDS, how)
        found = _gate_double(*cotangents, *operands, how._replace(needs=needs))
        return tuple(spread(found, names, needs)[i] for i in argnums)

    return pull


defvjp_argnums(_product_bwd, _bwd_reverse)
defjvp_argnums(_product_bwd, _linear_bwd_forward)
defvjp_argnums(_gate, _fused(GATED_NEEDS, lambda g, x, how: _gate_bwd(_like(g, x[0]), *x, how)))
defjvp_argnums(
    _gate,
    lambda argnums, gs, ans, args, kwargs: _gate_tangent(
        *args[:2], *_tangents(argnums, gs, args), args[2]
    ),
)
defvjp_argnums(_gate_bwd, _gate_bwd_reverse)
defjvp_argnums(_gate_bwd, _through(FUNCTIONS.gate_bwd_pieces)[1])
for _made_of, _composite in (
    (_product_double, FUNCTIONS.product_double_pieces),
    (_product_tangent, FUNCTIONS.product_tangent_pieces),
    (_gate_double, FUNCTIONS.gate_double_pieces),
    (_gate_tangent, FUNCTIONS.gate_tangent_pieces),
):
    defvjp_argnums(_made_of, _through(_composite)[0])
    defjvp_argnums(_made_of, _through(_composite)[1])


def _residual_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    a, b, bias, residual, how = args
    needs = chosen(argnums, RESIDUAL_NEEDS)

    def pull(g: Any) -> Any:
        found = FUNCTIONS.matmul_bias_residual_bwd(
            _like(g, a), a, b, bias, residual, needs=needs, backend=how.backend
        )
        return tuple(found[i] for i in argnums)

    return pull


def _residual_forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    a, b, bias, _, how = args
    u, v, w, z = _tangents(argnums, gs, args)
    t = pieces.moved(FUNCTIONS, u, v, w, a, b, bias, how.backend)
    if z is not None:
        t = (anp.zeros_like(ans) if t is None else t) + z
    return t


defvjp_argnums(_residual, _residual_reverse)
defjvp_argnums(_residual, _residual_forward)


def to_numpy(x: Any) -> Any:
    """As :func:`numfuse.to_numpy`: the value; its derivatives are left behind."""
    while isbox(x):
        x = getval(x)
    return x


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`: nothing runs behind a box."""
