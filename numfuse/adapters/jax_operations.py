"""numfuse's operations as JAX primitives: on the host at once, or as host callbacks when compiled.

Each primitive has the rules that JAX composes: a batch (`vmap`) is one more mapped axis of the same
primitive, forward mode is a primitive that is linear in tangents, and reverse mode is that one's
transpose. The linear primitives come in pairs, each the transpose of the other:

    tangent       (a, b, c | u, v, w) -> out_dot               act'(P) (u b + a v + w)
    backward      (a, b, c | grad) -> d_a, d_b, d_c
    bwd_tangent   (grad, a, b, c | grad', a', b', c') -> the derivatives of d_a, d_b, d_c
    double        (grad, a, b, c | u, v, w) -> d_grad, d_a, d_b, d_c

with P = a b + c; what stands before the bar is kept, in what stands behind it they are linear. The
gates have the same four. What is kept moves too: the derivative of a backward is its tangent, and
that of the others goes through what they are made of (`numfuse.adapters.pieces`).

Arrays that are there are read where they are, and the results are made without a callback. A
callback reads the buffers that XLA hands over: nothing in it waits for XLA's threads, of which it
holds one, and on one core that is all there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from numpy import ndarray

from numfuse import differentials, functional
from numfuse.activations import get
from numfuse.adapters.surface import How, made, spread
from numfuse.gradients import GATED_NEEDS, GATED_SECOND_NEEDS, GEMM_NEEDS, GEMM_SECOND_NEEDS
from numfuse.layout import gemm_shape, residual_view
from numfuse.operands import accumulator

__all__ = ["OPERATIONS", "Operation", "call", "through"]

Shape = tuple[int, ...]
Operands = Sequence[Any]


class Operation(NamedTuple):
    """A function of the core; its operands are those that are kept, then those it is linear in.

    The kinds of operands and results are a, b, c (bias), r (residual) and o (result) of a product,
    e of a gate. `names`: of the results, where `How.needs` chooses among them.
    """

    name: str
    kept: str
    moved: str
    results: str
    names: tuple[str, ...] | None
    #: (how, operands) -> results, over NumPy arrays.
    run: Callable[[How, list[Any]], Any]

    @property
    def operands(self) -> str:
        return self.kept + self.moved

    def wanted(self, how: How) -> str:
        """The kinds of the results that are made."""
        if self.names is None:
            return self.results
        pairs = zip(self.results, self.names, strict=True)
        return "".join(kind for kind, name in pairs if name in how.needs)


class _Form(NamedTuple):
    """What the arguments of a primitive say beside values; JAX compares and hashes it.

    Every operand has `lead` mapped axes in front, of length 1 where it is the same for all. The
    last `pooled` of them are summed over in the gradient of an operand that is the same for all.
    """

    how: How
    there: tuple[bool, ...]
    lead: int = 0
    pooled: int = 0


# --- shapes ---------------------------------------------------------------------------------------
def _own_shapes(operation: Operation, given: Sequence[tuple[str, Shape]]) -> dict[str, Shape]:
    """The shape of each kind, mapped axes left out, after every check of shapes."""
    shapes: dict[str, Shape] = {}
    for kind, shape in given:
        if shapes.setdefault(kind, shape) != shape:
            raise ValueError(
                f"{operation.name}: operands that belong together must have one shape, "
                f"got {shapes[kind]} and {shape}"
            )
    if "a" in shapes:
        ghosts = {
            kind: np.broadcast_to(np.empty(()), shapes[kind]) for kind in "abcr" if kind in shapes
        }
        shape, *_ = gemm_shape(ghosts["a"], ghosts["b"], ghosts.get("c"))
        if "r" in ghosts:
            residual_view(shape, ghosts["r"])
        if shapes.setdefault("o", shape.visible) != shape.visible:
            raise ValueError(
                f"grad must have the result's shape {shape.visible}, got {shapes['o']}"
            )
    return shapes


class _Shapes(NamedTuple):
    #: By kind: without the mapped axes, and the mapped axes.
    own: dict[str, Shape]
    lead: dict[str, Shape]

    def full(self, kind: str) -> Shape:
        return self.lead[kind] + self.own[kind]


# As many as the core keeps forms of calls.
@functools.lru_cache(maxsize=4096)
def _shapes(operation: Operation, form: _Form, given: tuple[Shape, ...]) -> _Shapes:
    """The shapes that every operand is broadcast to, and that the results have."""
    lead = form.lead
    kinds = [kind for kind, t in zip(operation.operands, form.there, strict=True) if t]
    own = _own_shapes(operation, [(k, s[lead:]) for k, s in zip(kinds, given, strict=True)])
    batch = np.broadcast_shapes(*(shape[:lead] for shape in given))
    at = lead - form.pooled
    leads = dict.fromkeys(own, batch)
    for kind in "abc":
        parts = [shape[at:lead] for k, shape in zip(kinds, given, strict=True) if k == kind]
        if parts:
            leads[kind] = batch[:at] + np.broadcast_shapes(*parts)
    return _Shapes(own, leads)


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


# --- on the host ----------------------------------------------------------------------------------
def _on_host(operation: Operation, form: _Form, given: Sequence[Any]) -> list[ndarray]:
    """The results, of NumPy arrays."""
    shapes = _shapes(operation, form, tuple(x.shape for x in given))
    rest = iter(given)
    operands = [next(rest) if there else None for there in form.there]
    if form.lead:
        own = shapes.own
        rank = max(2, *(len(own.get(kind, ())) for kind in "abc"))
        row, column = (len(own.get(kind, (0, 0))) == 1 for kind in "ab")
        for i, (x, kind) in enumerate(zip(operands, operation.operands, strict=True)):
            if x is not None:
                x = np.broadcast_to(x, shapes.full(kind))
                if kind != "e":
                    x = _matrices(x, kind, len(own[kind]), rank, row, column)
                operands[i] = x
    found = operation.run(form.how, operands)
    found = (found,) if operation.names is None else made(found, operation.names, form.how.needs)
    # Without the axes that were put in, and those that 1-D operands leave out.
    return [
        np.reshape(x, shapes.full(kind))
        for x, kind in zip(found, operation.wanted(form.how), strict=True)
    ]


def _added(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _backward_tangent(
    backward: Callable[..., Any], double: Callable[..., Any], names: tuple[str, ...]
) -> Callable[[How, list[Any]], Any]:
    """The derivative of a backward: linear in grad, and a product of the Hessian of
    sum(grad * act(a b + c)), which is symmetric: that is the double backward's."""

    def run(how: How, operands: list[Any]) -> Any:
        n = len(operands) // 2
        grad, *kept = operands[:n]
        grad_dot, *dots = operands[n:]
        found: Sequence[Any] = [None] * len(names)
        if grad_dot is not None:
            found = spread(
                made(backward(how, [*kept, grad_dot]), names, how.needs), names, how.needs
            )
        if any(x is not None for x in dots):
            second = double(how, [grad, *kept, *dots])
            parts = [getattr(second, f"d_{name}") for name in names]
            found = [_added(x, y) for x, y in zip(found, parts, strict=True)]
        return found

    return run


def _product(how: How, x: list[Any]) -> Any:
    return functional.matmul_bias_activation(*x, how.activation, backend=how.backend)


def _product_tangent(how: How, x: list[Any]) -> Any:
    return differentials.matmul_bias_activation_jvp(
        *x, how.activation, guard=how.guard, backend=how.backend
    ).out_dot


def _product_bwd(how: How, x: list[Any]) -> Any:
    return functional.matmul_bias_activation_bwd(
        x[3], *x[:3], how.activation, needs=how.needs, guard=how.guard, backend=how.backend
    )


def _product_double(how: How, x: list[Any]) -> Any:
    return differentials.matmul_bias_activation_double_bwd(
        *x[4:], *x[:4], how.activation, needs=how.needs, guard=how.guard, backend=how.backend
    )


def _residual(how: How, x: list[Any]) -> Any:
    return functional.matmul_bias_residual(*x, backend=how.backend)


def _gate(how: How, x: list[Any]) -> Any:
    return functional.activation_mul(*x, how.activation, backend=how.backend)


def _gate_tangent(how: How, x: list[Any]) -> Any:
    return differentials.activation_mul_jvp(
        *x, how.activation, guard=how.guard, backend=how.backend
    ).out_dot


def _gate_bwd(how: How, x: list[Any]) -> Any:
    return functional.activation_mul_bwd(
        x[2], *x[:2], how.activation, needs=how.needs, guard=how.guard, backend=how.backend
    )


def _gate_double(how: How, x: list[Any]) -> Any:
    return differentials.activation_mul_double_bwd(
        *x[3:], *x[:3], how.activation, needs=how.needs, guard=how.guard, backend=how.backend
    )


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("product", "abc", "", "o", None, _product),
        Operation("product_tangent", "abc", "abc", "o", None, _product_tangent),
        Operation("product_bwd", "abc", "o", "abc", GEMM_NEEDS, _product_bwd),
        Operation(
            "product_bwd_tangent",
            "oabc",
            "oabc",
            "abc",
            GEMM_NEEDS,
            _backward_tangent(_product_bwd, _product_double, GEMM_NEEDS),
        ),
        Operation("product_double", "oabc", "abc", "oabc", GEMM_SECOND_NEEDS, _product_double),
        Operation("residual", "abcr", "", "o", None, _residual),
        Operation("gate", "ee", "", "e", None, _gate),
        Operation("gate_tangent", "ee", "ee", "e", None, _gate_tangent),
        Operation("gate_bwd", "ee", "e", "ee", GATED_NEEDS, _gate_bwd),
        Operation(
            "gate_bwd_tangent",
            "eee",
            "eee",
            "ee",
            GATED_NEEDS,
            _backward_tangent(_gate_bwd, _gate_double, GATED_NEEDS),
        ),
        Operation("gate_double", "eee", "ee", "eee", GATED_SECOND_NEEDS, _gate_double),
    )
}
_TRANSPOSES = {
    "product_tangent": "product_bwd",
    "product_bwd": "product_tangent",
    "product_bwd_tangent": "product_double",
    "product_double": "product_bwd_tangent",
    "gate_tangent": "gate_bwd",
    "gate_bwd": "gate_tangent",
    "gate_bwd_tangent": "gate_double",
    "gate_double": "gate_bwd_tangent",
}


def _order(operation: Operation, how: How, operands: Operands) -> int:
    """The highest derivative of the activation that an operation evaluates."""
    moved = [x is not None for x in operands[len(operation.kept) :]]
    name, needs = operation.name, how.needs
    if name in ("product", "gate", "residual"):
        return 0
    if name == "product_double":
        return 2 if any(moved) and needs != ("grad",) else 1
    if name == "product_bwd_tangent":
        return 2 if any(moved[1:]) else 1
    # A gate's second factor bends nothing.
    if name == "gate_double":
        return 2 if moved[0] and "a" in needs else 1
    if name == "gate_bwd_tangent":
        return 2 if moved[1] and "a" in needs else 1
    if name == "gate_tangent":
        return 1 if moved[0] else 0
    return 0 if name == "gate_bwd" and "a" not in needs else 1


# --- the primitives -------------------------------------------------------------------------------
def _bind(operation: Operation, form: _Form, operands: Operands) -> list[Any]:
    """The results in their places, None where they are not needed."""
    form.how.activation.trace(_order(operation, form.how, operands))  # past the table it raises
    there = tuple(x is not None for x in operands)
    given = [x for x in operands if x is not None]
    found = _PRIMITIVES[operation.name].bind(*given, form=form._replace(there=there))
    if operation.names is None:
        return list(found)
    return spread(found, operation.names, form.how.needs)


def _refused(platform: str) -> TypeError:
    return TypeError(
        f"JAX must run on the CPU for numfuse, got the platform {platform!r}: nothing moves "
        f"between devices unasked"
    )


@functools.partial(jax.jit, static_argnames=("name", "form"))
def _compiled(*given: Any, name: str, form: _Form) -> Any:
    return _PRIMITIVES[name].bind(*given, form=form)


def _now(operation: Operation, *given: Any, form: _Form) -> Any:
    """The results of arrays that are there: on the host, or compiled where they are on several
    devices, which JAX then brings together (or refuses to)."""
    arrays = [x for x in given if isinstance(x, jax.Array)]
    devices = {device for x in arrays for device in x.devices()}
    for device in devices:
        if device.platform != "cpu":
            raise _refused(device.platform)
    if len(devices) > 1:
        return _compiled(*given, name=operation.name, form=form)
    found = _on_host(operation, form, [np.asarray(x) for x in given])
    where = next((x.sharding for x in arrays if getattr(x, "committed", True)), None)
    return jax.device_put(found, where)


def _results(operation: Operation, *avals: Any, form: _Form) -> list[Any]:
    """The abstract results: of one shard's kind where JAX maps over a mesh."""
    shapes = _shapes(operation, form, tuple(x.shape for x in avals))
    found = []
    for kind in operation.wanted(form.how):
        shape, like = shapes.full(kind), avals[0]
        sharding: Any = getattr(like, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            found.append(jax.core.ShapedArray(shape, like.dtype))
        else:
            spec = PartitionSpec(*[None] * len(shape))
            at = type(sharding)(sharding.mesh, spec)
            found.append(like.update(shape=shape, weak_type=False, sharding=at))
    return found


def _lowered(operation: Operation, ctx: Any, *operands: Any, form: _Form) -> Any:
    """A host callback on the buffers themselves. jax.pure_callback would copy its operands on
    XLA's threads and wait for them in one of these."""

    def run(*given: Any) -> list[ndarray]:
        return _on_host(operation, form, given)

    found, *_ = mlir.emit_python_callback(
        ctx, run, None, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=False
    )
    return found


def _lowered_elsewhere(ctx: Any, *operands: Any, form: _Form) -> Any:
    raise _refused(ctx.module_context.platforms[0])


# --- their rules ----------------------------------------------------------------------------------
def _fitted(x: Any, shape: Shape) -> Any:
    """`x` summed over the axes that `shape` has with length 1, and broadcast along those of `x`."""
    over = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    x = jnp.sum(x, axis=over, keepdims=True) if over else x
    return x if x.shape == shape else jnp.broadcast_to(x, shape)


def _batched(operation: Operation, given: Operands, axes: Operands, *, form: _Form) -> Any:
    moved = [
        jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(given, axes, strict=True)
    ]
    found = _PRIMITIVES[operation.name].bind(*moved, form=form._replace(lead=form.lead + 1))
    return found, [0] * len(found)


def _placed(form: _Form, given: Operands) -> list[Any]:
    rest = iter(given)
    return [next(rest) if there else None for there in form.there]


def _derived(operation: Operation, primals: Operands, tangents: Operands, *, form: _Form) -> Any:
    outs = _PRIMITIVES[operation.name].bind(*primals, form=form)
    x = _placed(form, primals)
    dots = _placed(form, [None if type(t) is ad.Zero else t for t in tangents])
    n = len(operation.kept)
    if operation.moved and all(dot is None for dot in dots[:n]):
        found = _bind(operation, form, [*x[:n], *dots[n:]])
    else:
        found = _DERIVATIVES[operation.name](form, x, dots)
    if operation.names is not None:
        found = made(found, operation.names, form.how.needs)
    return outs, [
        jnp.zeros_like(out) if dot is None else _fitted(dot, out.shape)
        for dot, out in zip(found, outs, strict=True)
    ]


def _transposed(operation: Operation, cotangents: Operands, *given: Any, form: _Form) -> Any:
    x = _placed(form, given)
    n = len(operation.kept)
    asked = [ad.is_undefined_primal(one) for one in x]
    if operation.name not in _TRANSPOSES or any(asked[:n]):
        raise TypeError(
            f"numfuse's {operation.name} is linear in {operation.moved or 'nothing'} alone, "
            f"got a transposition in {operation.operands}"
        )
    partner = OPERATIONS[_TRANSPOSES[operation.name]]
    cts = [None if type(ct) is ad.Zero else ct for ct in cotangents]
    if operation.names is not None:
        cts = spread(cts, operation.names, form.how.needs)
    found: Sequence[Any] = [None] * len(operation.moved)
    if any(ct is not None for ct in cts):
        how = form.how
        if partner.names is not None:
            needs = zip(partner.names, asked[n:], strict=True)
            how = how._replace(needs=tuple(name for name, one in needs if one))
        form = form._replace(how=how)
        operands = [*x[:n], *cts]
        found = _bind(partner, _pooling(partner, form, operands, x[n:]), operands)
    every: list[Any] = [None] * n
    for one, dot, ask in zip(x[n:], found, asked[n:], strict=True):
        zero = ad.Zero(one.aval) if ask else None
        every.append(zero if dot is None else _fitted(dot, one.aval.shape))
    return [one for one, there in zip(every, form.there, strict=True) if there]


def _pooling(partner: Operation, form: _Form, operands: Operands, undefined: Operands) -> _Form:
    """The form in which gradients are summed over mapped axes as they are made, if they all are
    wanted so: a cotangent of what is the same for all, for an operand that is."""
    there = tuple(x is not None for x in operands)
    form = form._replace(there=there, pooled=form.lead)
    shapes = _shapes(partner, form, tuple(x.shape for x in operands if x is not None))
    kinds = zip(partner.results, undefined, strict=True)
    if all(
        shapes.full(kind)[i] == x.aval.shape[i] or x.aval.shape[i] == 1
        for kind, x in kinds
        if ad.is_undefined_primal(x) and kind in "abc"
        for i in range(form.lead)
    ):
        return form
    return form._replace(pooled=0)


def _by(name: str, first: str | None = None) -> Callable[..., list[Any]]:
    """The derivative that another operation is, linear in the tangents."""

    def derivative(form: _Form, x: list[Any], dots: list[Any]) -> list[Any]:
        if first is not None:  # the operand before the others there
            x, dots = [x[-1], *x[:-1]], [dots[-1], *dots[:-1]]
        return _bind(OPERATIONS[name], form, [*x, *dots])

    return derivative


def _residual_tangent(form: _Form, x: list[Any], dots: list[Any]) -> list[Any]:
    *product, residual = dots
    found = None
    if any(dot is not None for dot in product):
        plain = form._replace(how=form.how._replace(activation=get("none")))
        (found,) = _bind(OPERATIONS["product_tangent"], plain, [*x[:3], *product])
    if residual is not None:
        shapes = _shapes(
            OPERATIONS["residual"], form, tuple(one.shape for one in x if one is not None)
        )
        lead, visible = form.lead, shapes.own["o"]
        own = residual.shape[lead:]
        full = residual.reshape(residual.shape[:lead] + (1,) * (len(visible) - len(own)) + own)
        found = _added(found, jnp.broadcast_to(full, shapes.full("o")))
    return [found]


#: By operation: (form, operands, tangents or None) to the tangents of the results.
_DERIVATIVES: dict[str, Callable[[_Form, list[Any], list[Any]], Sequence[Any]]] = {
    "product": _by("product_tangent"),
    "product_bwd": _by("product_bwd_tangent", "grad"),
    "residual": _residual_tangent,
    "gate": _by("gate_tangent"),
    "gate_bwd": _by("gate_bwd_tangent", "grad"),
}


def through(name: str, composite: Callable[[How, list[Any]], Sequence[Any]]) -> None:
    """Differentiate an operation through what it is made of.

    `composite`: from (how, operands, None where they are not there) to all results that are needed.
    """
    operation = OPERATIONS[name]

    def derivative(form: _Form, x: list[Any], dots: list[Any]) -> list[Any]:
        at = [i for i, dot in enumerate(dots) if dot is not None]
        there = [i for i, one in enumerate(x) if one is not None]

        def one(*members: Any) -> Any:
            every = [None] * len(x)
            for i, member in zip(there, members, strict=True):
                every[i] = member
            return tuple(composite(form.how, every))

        shapes = _shapes(operation, form, tuple(x[i].shape for i in there))
        kinds = operation.wanted(form.how)

        def moving(*values: Any) -> Any:
            every = list(x)
            for i, value in zip(at, values, strict=True):
                every[i] = value
            found = _mapped(one, form.lead, [every[i] for i in there])
            return [_fitted(f, shapes.full(kind)) for f, kind in zip(found, kinds, strict=True)]

        _, found = jax.jvp(moving, [x[i] for i in at], [dots[i] for i in at])
        return found if operation.names is None else spread(found, operation.names, form.how.needs)

    _DERIVATIVES[name] = derivative


def _mapped(function: Callable[..., Any], lead: int, x: Sequence[Any]) -> Any:
    """A function over the `lead` axes in front, which have length 1 where all share a value."""
    if lead == 0:
        return function(*x)
    length = max(one.shape[0] for one in x)
    if any(one.shape[0] == 0 for one in x):
        length = 0
    axes = [0 if one.shape[0] == length else None for one in x]
    members = [one if axis == 0 else one[0] for one, axis in zip(x, axes, strict=True)]
    return jax.vmap(lambda *rest: _mapped(function, lead - 1, rest), axes)(*members)


def _primitive(operation: Operation) -> Primitive:
    p = Primitive(f"numfuse_{operation.name}")
    p.multiple_results = True
    p.def_impl(functools.partial(_now, operation))
    p.def_abstract_eval(functools.partial(_results, operation))
    mlir.register_lowering(p, functools.partial(_lowered, operation), platform="cpu")
    mlir.register_lowering(p, _lowered_elsewhere)
    batching.primitive_batchers[p] = functools.partial(_batched, operation)
    ad.primitive_jvps[p] = functools.partial(_derived, operation)
    ad.primitive_transposes[p] = functools.partial(_transposed, operation)
    return p


_PRIMITIVES = {name: _primitive(operation) for name, operation in OPERATIONS.items()}


# --- calls ----------------------------------------------------------------------------------------
def _varying(x: Any) -> frozenset[Any]:
    """The axes of a mesh along which a value differs, in `jax.shard_map`."""
    aval = jax.typeof(x)
    return getattr(getattr(aval, "manual_axis_type", aval), "varying", frozenset())


def _agreed(given: list[Any]) -> list[Any]:
    """Operands of one kind to `jax.shard_map`: each differs along the axes that any does."""
    if not hasattr(jax.lax, "pcast") or not any(isinstance(x, jax.core.Tracer) for x in given):
        return given
    axes = [_varying(x) for x in given]
    every = frozenset().union(*axes)
    return [
        x if own == every else jax.lax.pcast(x, tuple(sorted(every - own)), to="varying")
        for x, own in zip(given, axes, strict=True)
    ]


def call(name: str, how: How, operands: Operands) -> list[Any]:
    """The results of an operation in their places, after every check that needs no values."""
    operation = OPERATIONS[name]
    given: list[tuple[str, Any]] = []
    dtypes: dict[str, None] = {}
    for kind, x in zip(operation.operands, operands, strict=True):
        if x is None:
            continue
        if not isinstance(x, (jax.Array, ndarray, np.generic)):
            found = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"operands must be JAX arrays, got {found}")
        accumulator("an operand", np.dtype(x.dtype))
        dtypes[str(x.dtype)] = None
        given.append((kind, x))
    if len(dtypes) > 1:
        raise TypeError(f"all operands must have the same dtype, got {', '.join(dtypes)}")
    _own_shapes(operation, [(kind, x.shape) for kind, x in given])
    agreed = iter(_agreed([x for _, x in given]))
    return _bind(operation, _Form(how, ()), [None if x is None else next(agreed) for x in operands])
