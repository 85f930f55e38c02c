"""numfuse's operations as JAX primitives: on the host at once, or compiled (`ffi`).

Each primitive has the rules that JAX composes: a batch (`vmap`) is one more mapped axis of the same
primitive, forward mode is a primitive that is linear in tangents, and reverse mode is that one's
transpose (`numfuse.adapters.jax.operations`). What is kept moves too: the derivative of a backward
is its tangent, and that of the others goes through what they are made of
(`numfuse.adapters.pieces`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad
from numpy import ndarray

from numfuse.activations import get
from numfuse.adapters.jax.calls import agreed, fitted, in_front, placed, primitive
from numfuse.adapters.jax.operations import (
    Call,
    Form,
    highest_order,
    own_shapes,
    shapes_of,
    transpose,
)
from numfuse.adapters.primitives import PRIMITIVES, How, backward_tangents, made
from numfuse.adapters.primitives import Primitive as Operation
from numfuse.adapters.surface import Functions
from numfuse.problem.operands import accumulator

Operands = Sequence[Any]
_TANH = get("tanh").serial


# --- the primitives -------------------------------------------------------------------------------
def _bind(operation: Operation, form: Form, operands: Operands) -> list[Any]:
    """The results in their places, None where they are not needed."""
    order = highest_order(operation, form.how, operands)
    form.how.activation.trace(order)  # past the table it raises
    there = tuple(x is not None for x in operands)
    given = [x for x in operands if x is not None]
    found = _JAX_PRIMITIVES[operation.name].bind(*given, form=form._replace(there=there))
    return list(operation.cotangents(found, form.how))


# --- their rules ----------------------------------------------------------------------------------
def _batched(operation: Operation, given: Operands, axes: Operands, *, form: Form) -> Any:
    moved = in_front(given, axes)
    found = _JAX_PRIMITIVES[operation.name].bind(*moved, form=form._replace(lead=form.lead + 1))
    return found, [0] * len(found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _curve(z: Any, how: How, order: int) -> Any:
    """Return the activation's derivative of an order at `z`: XLA fuses what it multiplies."""
    act = how.activation.derived(order)
    if order in (2, 3) and how.activation.serial == _TANH:  # (shorter than the table's)
        y, slope = _curve(z, how, 0), _curve(z, how, 1)
        found = (-2 * y if order == 2 else 6 * (y * y) - 2) * slope
    else:
        form = Form(how._replace(activation=act), ())
        (found,) = _bind(PRIMITIVES["gate"], form, [z, jnp.ones_like(z)])
    return jnp.where(jnp.isfinite(found), found, 0) if order and how.guard else found


@_curve.defjvp
def _(how: How, order: int, primals: Operands, tangents: Operands) -> Any:
    return _curve(*primals, how, order), _curve(*primals, how, order + 1) * tangents[0]


def _derived(operation: Operation, primals: Operands, tangents: Operands, *, form: Form) -> Any:
    bent = operation.name == "product" and not form.how.activation.is_identity
    if bent and primals[0].dtype.itemsize >= 4:  # (else the product would be rounded once more)
        # One product, whose result all derivatives share and give one cotangent back to.
        plain = form._replace(how=form.how._replace(activation=get("none")))
        (z,), (dot,) = _derived(operation, primals, tangents, form=plain)
        return [_curve(z, form.how, 0)], [_curve(z, form.how, 1) * dot]
    outs = _JAX_PRIMITIVES[operation.name].bind(*primals, form=form)
    x = placed(form, primals)
    dots = placed(form, [None if type(t) is ad.Zero else t for t in tangents])
    n = operation.kept
    if operation.moved and all(dot is None for dot in dots[:n]):
        found: Sequence[Any] = _bind(operation, form, [*x[:n], *dots[n:]])
    else:
        found = _moved(operation, form, x, dots)
    if operation.names is not None:
        found = made(found, operation.names, form.how.needs)
    return outs, [
        jnp.zeros_like(out) if dot is None else fitted(dot, out.shape)
        for dot, out in zip(found, outs, strict=True)
    ]


def _transposed(operation: Operation, cotangents: Operands, *given: Any, form: Form) -> Any:
    x = placed(form, given)
    n = operation.kept
    asked = [ad.is_undefined_primal(one) for one in x]
    if not operation.moved or any(asked[:n]):
        raise TypeError(
            f"numfuse's {operation.name} is linear in {operation.ordered_kinds[n:] or 'nothing'} "
            f"alone, got a transposition in {operation.ordered_kinds}"
        )
    cts = [None if type(ct) is ad.Zero else ct for ct in cotangents]
    cts = list(operation.cotangents(cts, form.how))
    found: list[Any] = [
        ad.Zero(one.aval) if ask else None for one, ask in zip(x, asked, strict=True)
    ]
    parts = transpose(operation, x[:n], cts) if any(ct is not None for ct in cts) else []
    for partner, operands in parts:
        # (a double backward has d_grad before the others, which is none of them here)
        first, how = len(partner.results) - len(x[n:]), form.how
        if partner.names is not None:
            needs = zip(partner.names[first:], asked[n:], strict=True)
            how = how._replace(needs=tuple(name for name, one in needs if one))
        operands = partner.linear_last(operands)
        own = _pooling(partner, form._replace(how=how), operands, [None] * first + x[n:])
        for i, dot in enumerate(_bind(partner, own, operands)[first:], n):
            if dot is not None:
                dot = fitted(dot, x[i].aval.shape)
                found[i] = dot if type(found[i]) is ad.Zero else found[i] + dot
    return [one for one, there in zip(found, form.there, strict=True) if there]


def _pooling(partner: Operation, form: Form, operands: Operands, undefined: Operands) -> Form:
    """The form in which gradients are summed over mapped axes as they are made, if they all are
    wanted so: a cotangent of what is the same for all, for an operand that is."""
    there = tuple(x is not None for x in operands)
    form = form._replace(there=there, pooled=form.lead)
    shapes = shapes_of(partner, form, tuple(x.shape for x in operands if x is not None))
    kinds = zip(partner.results, undefined, strict=True)
    if all(
        shapes.full(kind)[i] == x.aval.shape[i] or x.aval.shape[i] == 1
        for kind, x in kinds
        if ad.is_undefined_primal(x) and kind in "abc"
        for i in range(form.lead)
    ):
        return form
    return form._replace(pooled=0)


def _moved(operation: Operation, form: Form, x: list[Any], dots: list[Any]) -> Sequence[Any]:
    """Return the tangents of the results: other operations, or those of what it is made of."""
    if operation.name == "residual":
        return _residual_tangent(form, x, dots)
    if operation.tangent is not None:
        return _bind(PRIMITIVES[operation.tangent], form, [*x, *dots])
    if operation.derivative is None:
        return _through(operation, form, x, dots)
    found: list[Any] = [None] * len(operation.results)
    x, dots = operation.in_place(x), operation.in_place(dots)
    for part, operands in backward_tangents(operation.name, x, dots):
        added = _bind(part, form, part.linear_last(operands))[-len(found) :]
        pairs = zip(found, added, strict=True)
        found = [f if g is None else g if f is None else f + g for f, g in pairs]
    return found


def _residual_tangent(form: Form, x: list[Any], dots: list[Any]) -> list[Any]:
    *product, residual = dots
    found = None
    if any(dot is not None for dot in product):
        plain = form._replace(how=form.how._replace(activation=get("none")))
        (found,) = _bind(PRIMITIVES["product_tangent"], plain, [*x[:3], *product])
    if residual is not None:
        given = tuple(one.shape for one in x if one is not None)
        rank = len(shapes_of(PRIMITIVES["residual"], form, given).own["o"])
        lead, own = residual.shape[: form.lead], residual.shape[form.lead :]
        residual = residual.reshape(lead + (1,) * (rank - len(own)) + own)
        found = residual if found is None else found + residual
    return [found]


def _through(operation: Operation, form: Form, x: list[Any], dots: list[Any]) -> Sequence[Any]:
    """Return the tangents of what an operation is made of."""
    at = [i for i, dot in enumerate(dots) if dot is not None]

    def one(*members: Any) -> Any:
        every = operation.in_place(placed(form, members))
        found = FUNCTIONS.composite(operation.name, form.how, *every)
        return found if isinstance(found, tuple) else (found,)

    shapes = shapes_of(operation, form, tuple(v.shape for v in x if v is not None))
    kinds = operation.wanted(form.how.needs)

    def moving(*values: Any) -> Any:
        every = list(x)
        for i, value in zip(at, values, strict=True):
            every[i] = value
        found = mapped(one, form.lead, [v for v in every if v is not None])
        return [fitted(f, shapes.full(kind)) for f, kind in zip(found, kinds, strict=True)]

    _, found = jax.jvp(moving, [x[i] for i in at], [dots[i] for i in at])
    return operation.cotangents(found, form.how)


def mapped(function: Callable[..., Any], lead: int, x: Sequence[Any]) -> Any:
    """A function over the `lead` axes in front, which have length 1 where all share a value."""
    if lead == 0:
        return function(*x)
    length = max(one.shape[0] for one in x)
    if any(one.shape[0] == 0 for one in x):
        length = 0
    axes = [0 if one.shape[0] == length else None for one in x]
    members = [one if axis == 0 else one[0] for one, axis in zip(x, axes, strict=True)]
    return jax.vmap(lambda *rest: mapped(function, lead - 1, rest), axes)(*members)


def _primitive(operation: Operation) -> Primitive:
    rules = [functools.partial(rule, operation) for rule in (_batched, _derived, _transposed)]
    return primitive(operation.name, functools.partial(Call, operation), *rules)


_JAX_PRIMITIVES = {name: _primitive(operation) for name, operation in PRIMITIVES.items()}


# --- calls ----------------------------------------------------------------------------------------
def call(name: str, how: How, operands: Operands) -> list[Any]:
    """Return the results of an operation in their places, after the checks that need no values.

    The operands that it is linear in come last.
    """
    operation = PRIMITIVES[name]
    pairs = zip(operation.ordered_kinds, operands, strict=True)
    given = [(kind, x) for kind, x in pairs if x is not None]
    for _, x in given:
        if not isinstance(x, (jax.Array, ndarray, np.generic)):
            found = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"operands must be JAX arrays, got {found}")
        accumulator("an operand", np.dtype(x.dtype))
    dtypes = dict.fromkeys(str(x.dtype) for _, x in given)
    if len(dtypes) > 1:
        raise TypeError(f"all operands must have the same dtype, got {', '.join(dtypes)}")
    own_shapes(operation, [(kind, x.shape) for kind, x in given])
    form = Form(how, tuple(x is not None for x in operands))
    return _bind(operation, form, placed(form, agreed([x for _, x in given])))


class _Jax(Functions):
    """The public functions over JAX's primitives."""

    what = "JAX, the arrays of which are never written to"
    arrays = jnp

    def primitive(self, name: str, how: How, *operands: Any, pre: Any = None) -> Any:
        if pre is not None:
            return self.composite(name, how, *operands, pre=pre, guard=how.guard)
        primitive = PRIMITIVES[name]
        if primitive.names is not None and not how.needs:
            return ()
        found = call(name, how, primitive.linear_last(operands))
        return found[0] if primitive.names is None else tuple(x for x in found if x is not None)

    def moves(self, x: Any) -> bool:
        """Whether a derivative may go through an array: through any that is traced."""
        return isinstance(x, jax.core.Tracer)


FUNCTIONS = _Jax()
