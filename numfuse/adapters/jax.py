"""numfuse's functions for JAX arrays and tracers on the CPU: jit, grad of grad, vmap.

Each operation is a host callback over NumPy arrays with a vmap rule (its own batch axes), inside a
``custom_vjp`` whose backward is the fused one, inside another whose backward is the fused double
backward, which is differentiated through its pieces (`numfuse.adapters.pieces`). Forward mode has
no rule in a ``custom_vjp``: JAX raises and says so. `matmul_bias_activation_jvp` and the others
give tangents as functions of their own, which reverse mode goes through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from numpy import ndarray

from numfuse import differentials, functional
from numfuse.adapters.surface import NAMES, Functions, How, made, served
from numfuse.gradients import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
)
from numfuse.layout import gemm_shape, residual_view
from numfuse.operands import accumulator

__all__ = [*NAMES, "synchronize", "to_numpy"]


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    return np.asarray(x)


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    x.block_until_ready()


# --- host callbacks -----------------------------------------------------------------------------
class _Operation(NamedTuple):
    """A function of the core as a callback; the kinds are those of its operands and results.

    a, b, c (bias), r (residual) and o (result) of a product, e of a gate.
    """

    name: str
    run: Callable[..., Any]
    operands: str
    results: str
    names: tuple[str, ...] | None = None


def _checked(operation: _Operation, operands: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each kind, after every check that needs no values."""
    dtypes: dict[str, Any] = {}
    at: dict[str, ndarray] = {}
    for kind, x in zip(operation.operands, operands, strict=True):
        if x is None:
            continue
        if not isinstance(x, (jax.Array, ndarray, np.generic)):
            found = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"operands must be JAX arrays, got {found}")
        accumulator("an operand", np.dtype(x.dtype))
        dtypes[str(x.dtype)] = None
        ghost = np.broadcast_to(np.empty((), np.dtype(x.dtype)), x.shape)
        if at.setdefault(kind, ghost).shape != ghost.shape:
            raise ValueError(
                f"{operation.name}: operands that belong together must have one shape, "
                f"got {at[kind].shape} and {ghost.shape}"
            )
    if len(dtypes) > 1:
        raise TypeError(f"all operands must have the same dtype, got {', '.join(dtypes)}")
    shapes = {kind: x.shape for kind, x in at.items()}
    if "a" in at:
        shape, *_ = gemm_shape(at["a"], at["b"], at.get("c"))
        if "r" in at:
            residual_view(shape, at["r"])
        if shapes.setdefault("o", shape.visible) != shape.visible:
            raise ValueError(
                f"grad must have the result's shape {shape.visible}, got {shapes['o']}"
            )
    return shapes


def _called(operation: _Operation, how: How, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The results of an operation, by a callback on the host."""
    platform = jax.default_backend()
    if platform != "cpu":
        raise TypeError(
            f"JAX must run on the CPU for numfuse, got the platform {platform!r}: nothing moves "
            f"between devices unasked"
        )
    shapes = _checked(operation, operands)
    how.activation.trace(_order(operation, how, operands))  # past the table it raises here
    kinds = operation.results
    if operation.names is not None:
        kinds = "".join(
            kind for kind, name in zip(kinds, operation.names, strict=True) if name in how.needs
        )
    dtype = next(x.dtype for x in operands if x is not None)
    there = tuple(x is not None for x in operands)
    run: Any = _OnHost(operation, how, there, tuple(shapes.items()), kinds)
    wanted = tuple(jax.ShapeDtypeStruct(shapes[kind], dtype) for kind in kinds)
    given = [x for x in operands if x is not None]
    found: tuple[Any, ...] = jax.pure_callback(run, wanted, *given, vmap_method="expand_dims")
    return found


def _order(operation: _Operation, how: How, operands: Sequence[Any]) -> int:
    """The highest derivative of the activation that an operation evaluates."""
    if operation.name in ("product_double", "gate_double"):
        bent = "a" in how.needs or (operation is _PRODUCT_DOUBLE and how.needs != ("grad",))
        moved = operands[: 3 if operation is _PRODUCT_DOUBLE else 1]
        return 2 if bent and any(x is not None for x in moved) else 1
    if operation is _GATE_BWD:
        return 1 if "a" in how.needs else 0
    return 0 if operation.name in ("product", "gate", "residual") else 1


class _OnHost(NamedTuple):
    """The callback: equal ones are one, so that JAX compiles each once.

    Under vmap each operand has more axes in front, of length 1 where it has no batch; they become
    batch axes of the operation's own.
    """

    operation: _Operation
    how: How
    there: tuple[bool, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    results: str

    def __call__(self, *given: Any) -> tuple[ndarray, ...]:
        operation, how, shapes, rest = self.operation, self.how, dict(self.shapes), iter(given)
        operands = [np.asarray(next(rest)) if there else None for there in self.there]
        own = [len(shapes.get(kind, ())) for kind in operation.operands]
        batch = np.broadcast_shapes(
            *(x.shape[: x.ndim - n] for x, n in zip(operands, own, strict=True) if x is not None)
        )
        row = "a" in shapes and len(shapes["a"]) == 1
        column = "b" in shapes and len(shapes["b"]) == 1
        rank = max(2, *(len(shapes.get(kind, ())) for kind in "abc"))
        full: list[ndarray | None] = []
        for x, kind, n in zip(operands, operation.operands, own, strict=True):
            if x is not None and batch:
                x = np.broadcast_to(x, batch + x.shape[x.ndim - n :])
                x = x if kind == "e" else _matrices(x, kind, n, rank, row, column)
            full.append(x)
        arguments: dict[str, Any] = {"backend": how.backend, "guard": how.guard}
        if operation.names is not None:
            arguments["needs"] = how.needs
        found = operation.run(*full, how.activation, **arguments)
        found = (found,) if operation.names is None else made(found, operation.names, how.needs)
        # Without the axes that were put in, and those that 1-D operands leave out.
        return tuple(
            x.reshape(batch + shapes[kind]) if batch else x
            for x, kind in zip(found, self.results, strict=True)
        )


def _matrices(x: ndarray, kind: str, own: int, rank: int, row: bool, column: bool) -> ndarray:
    """A batch of operands as matrices, with as many batch axes as that which has the most."""
    lead = x.shape[: x.ndim - own]
    shape = x.shape[x.ndim - own :]
    if kind in "or":
        visible = rank - row - column
        shape = (1,) * (visible - len(shape)) + shape
        if column:
            shape = (*shape, 1)
        if row:
            shape = (*shape[:-1], 1, shape[-1])
    elif (kind == "a" and row) or (kind == "c" and own == 1):
        shape = (*shape[:-1], 1, shape[-1])
    elif kind == "b" and column:
        shape = (*shape, 1)
    return x.reshape(lead + (1,) * (rank - len(shape)) + shape)


def _core(function: Callable[..., Any], guarded: bool = False, dot: bool = False) -> Any:
    """A function of the core with the callback's arguments."""

    def run(*args: Any, guard: bool, **how: Any) -> Any:
        if function is functional.matmul_bias_residual:
            args = args[:-1]
        found = function(*args, guard=guard, **how) if guarded else function(*args, **how)
        return found.out_dot if dot else found

    return run


_PRODUCT = _Operation("product", _core(functional.matmul_bias_activation), "abc", "o")
_PRODUCT_BWD = _Operation(
    "product_bwd", _core(functional.matmul_bias_activation_bwd, True), "oabc", "abc", GEMM_NEEDS
)
_PRODUCT_DOUBLE = _Operation(
    "product_double", _core(differentials.matmul_bias_activation_double_bwd, True), "abcoabc",
    "oabc", GEMM_SECOND_NEEDS,
)  # fmt: skip
_PRODUCT_TANGENT = _Operation(
    "product_tangent", _core(differentials.matmul_bias_activation_jvp, True, True), "abcabc", "o"
)
_RESIDUAL = _Operation("residual", _core(functional.matmul_bias_residual), "abcr", "o")
_GATE = _Operation("gate", _core(functional.activation_mul), "ee", "e")
_GATE_BWD = _Operation(
    "gate_bwd", _core(functional.activation_mul_bwd, True), "eee", "ee", GATED_NEEDS
)
_GATE_DOUBLE = _Operation(
    "gate_double", _core(differentials.activation_mul_double_bwd, True), "eeeee", "eee",
    GATED_SECOND_NEEDS,
)  # fmt: skip
_GATE_TANGENT = _Operation(
    "gate_tangent", _core(differentials.activation_mul_jvp, True, True), "eeee", "e"
)


# --- derivatives --------------------------------------------------------------------------------
@jax.tree_util.register_static
class _Moved(tuple):
    """Which operands have a derivative, as a part of residuals that is no array."""


def _differentiable(
    operation: _Operation,
    backward: Callable[[How, tuple[Any, ...], tuple[bool, ...], tuple[Any, ...]], Sequence[Any]],
) -> Callable[..., tuple[Any, ...]]:
    """The operation as a function (how, operands) whose gradients `backward` gives: for (how,
    operands, which of them are wanted, cotangents) one for each operand, None for no gradient."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(how: How, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        return _called(operation, how, operands)

    def forward(how: How, operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        values = tuple(None if x is None else x.value for x in operands)
        moved = _Moved(x is not None and x.perturbed for x in operands)
        return call(how, values), (values, moved)

    def pull(how: How, kept: Any, gs: tuple[Any, ...]) -> tuple[tuple[Any, ...]]:
        values, moved = kept
        given = tuple(None if isinstance(g, SymbolicZero) else g for g in gs)
        found: Sequence[Any] = [None] * len(values)
        if any(g is not None for g in given):
            found = backward(how, values, tuple(moved), given)
        return (
            tuple(
                None if x is None else jnp.zeros_like(x) if g is None else g
                for x, g in zip(values, found, strict=True)
            ),
        )

    call.defvjp(forward, pull, symbolic_zeros=True)
    return call


def _wanted(names: tuple[str, ...], moved: tuple[bool, ...]) -> tuple[str, ...]:
    return tuple(name for name, one in zip(names, moved, strict=True) if one)


def _placed(found: Any, names: tuple[str, ...], needs: tuple[str, ...]) -> list[Any]:
    parts = iter(found)
    return [next(parts) if name in needs else None for name in names]


def _fused(
    names: tuple[str, ...], own: tuple[str, ...], method: str
) -> Callable[..., Sequence[Any]]:
    """Gradients by one call of a method, for cotangents of `own` gradients (or of the result)."""

    def backward(how: How, x: tuple[Any, ...], moved: tuple[bool, ...], gs: tuple[Any, ...]) -> Any:
        needs = _wanted(names, moved)
        cotangents = _placed(gs, own, how.needs) if own else gs
        found = getattr(FUNCTIONS, method)(*cotangents, *x, how._replace(needs=needs))
        return _placed(found, names, needs)

    return backward


def _through(method: str) -> Callable[..., Sequence[Any]]:
    """Gradients through what an operation is made of."""

    def backward(how: How, x: tuple[Any, ...], moved: tuple[bool, ...], gs: tuple[Any, ...]) -> Any:
        at = [i for i, one in enumerate(moved) if one]

        def call(*values: Any) -> tuple[Any, ...]:
            every = list(x)
            for i, value in zip(at, values, strict=True):
                every[i] = value
            outs = getattr(FUNCTIONS, method)(*every, how)
            return outs if isinstance(outs, tuple) else (outs,)

        outs, back = jax.vjp(call, *(x[i] for i in at))
        full = (jnp.zeros_like(o) if g is None else g for o, g in zip(outs, gs, strict=True))
        found: list[Any] = [None] * len(x)
        for i, gradient in zip(at, back(tuple(full)), strict=True):
            found[i] = gradient
        return found

    return backward


def _residual_backward(
    how: How, x: tuple[Any, ...], moved: tuple[bool, ...], gs: tuple[Any, ...]
) -> Sequence[Any]:
    needs = _wanted(RESIDUAL_NEEDS, moved)
    return tuple(FUNCTIONS.matmul_bias_residual_bwd(gs[0], *x, needs=needs, backend=how.backend))


_product = _differentiable(_PRODUCT, _fused(GEMM_NEEDS, (), "product_bwd"))
_product_bwd = _differentiable(
    _PRODUCT_BWD, _fused(GEMM_SECOND_NEEDS, GEMM_NEEDS, "product_double")
)
_product_double = _differentiable(_PRODUCT_DOUBLE, _through("product_double_pieces"))
_product_tangent = _differentiable(_PRODUCT_TANGENT, _through("product_tangent_pieces"))
_residual = _differentiable(_RESIDUAL, _residual_backward)
_gate = _differentiable(_GATE, _fused(GATED_NEEDS, (), "gate_bwd"))
_gate_bwd = _differentiable(_GATE_BWD, _fused(GATED_SECOND_NEEDS, GATED_NEEDS, "gate_double"))
_gate_double = _differentiable(_GATE_DOUBLE, _through("gate_double_pieces"))
_gate_tangent = _differentiable(_GATE_TANGENT, _through("gate_tangent_pieces"))


# --- the public functions -----------------------------------------------------------------------
class _Jax(Functions):
    """The public functions over the callbacks above."""

    what = "JAX, the arrays of which are never written to"
    arrays = jnp

    def product(self, a: Any, b: Any, bias: Any, how: How) -> Any:
        return _product(how, (a, b, bias))[0]

    def product_bwd(self, grad: Any, a: Any, b: Any, bias: Any, how: How) -> Any:
        return _product_bwd(how, (grad, a, b, bias)) if how.needs else ()

    def product_double(
        self, u: Any, v: Any, w: Any, grad: Any, a: Any, b: Any, bias: Any, how: How
    ) -> Any:
        return _product_double(how, (u, v, w, grad, a, b, bias)) if how.needs else ()

    def product_tangent(self, a: Any, b: Any, bias: Any, u: Any, v: Any, w: Any, how: How) -> Any:
        return _product_tangent(how, (a, b, bias, u, v, w))[0]

    def residual(self, a: Any, b: Any, bias: Any, residual: Any, how: How) -> Any:
        return _residual(how, (a, b, bias, residual))[0]

    def gate(self, a: Any, b: Any, how: How) -> Any:
        return _gate(how, (a, b))[0]

    def gate_bwd(self, grad: Any, a: Any, b: Any, how: How) -> Any:
        return _gate_bwd(how, (grad, a, b)) if how.needs else ()

    def gate_double(self, u: Any, v: Any, grad: Any, a: Any, b: Any, how: How) -> Any:
        return _gate_double(how, (u, v, grad, a, b)) if how.needs else ()

    def gate_tangent(self, a: Any, b: Any, u: Any, v: Any, how: How) -> Any:
        return _gate_tangent(how, (a, b, u, v))[0]

    def sum_to(self, x: Any, shape: Sequence[int]) -> Any:
        lead = x.ndim - len(shape)
        axes = tuple(range(lead)) + tuple(
            lead + i for i, length in enumerate(shape) if length == 1 and x.shape[lead + i] != 1
        )
        return jnp.sum(x, axis=axes, keepdims=True).reshape(shape) if axes else x

    def widened(self, x: Any) -> Any:
        return x if x.dtype == np.float64 else x.astype(np.float32)


FUNCTIONS = _Jax()


def _on_cuda(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and any(
        device.platform in ("gpu", "cuda") for device in x.devices()
    )  # fmt: skip


def _public(name: str) -> Any:
    derived = getattr(FUNCTIONS, name)

    @functools.wraps(derived)
    def call(*args: Any, **options: Any) -> Any:
        # Outside of transformations, arrays of a GPU are served where they are.
        every = (*args, *options.values())
        if jax.default_backend() != "cpu" and any(map(_on_cuda, every)):
            if not any(isinstance(x, jax.core.Tracer) for x in every):
                return served(import_module("numfuse.adapters.cuda"), name)(*args, **options)
        return derived(*args, **options)

    return call


globals().update({name: _public(name) for name in NAMES})
