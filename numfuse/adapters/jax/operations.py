"""numfuse's operations as JAX differentiates them, on NumPy arrays: shapes, batches, what runs.

The linear ones come in pairs, each the transpose of the other:

    tangent       (a, b, c | u, v, w) -> out_dot               act'(P) (u b + a v + w)
    backward      (a, b, c | grad) -> d_a, d_b, d_c
    bwd_tangent   (grad, a, b, c | grad', a', b', c') -> the derivatives of d_a, d_b, d_c
    double        (grad, a, b, c | u, v, w) -> d_grad, d_a, d_b, d_c

with P = a b + c; what stands before the bar is kept, in what stands behind it they are linear. The
gates have the same four.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.adapters.primitives import CORE, PRIMITIVES, How, Primitive, spread
from numfuse.problem.results import GATED_NEEDS, GEMM_NEEDS
from numfuse.problem.shapes import gemm_shape, residual_view

__all__ = [
    "OPERATIONS",
    "TRANSPOSES",
    "Form",
    "Operation",
    "Shape",
    "highest_order",
    "on_host",
    "own_shapes",
    "shapes_of",
]

Shape = tuple[int, ...]
Operands = Sequence[Any]


class Operation(NamedTuple):
    """A primitive of `numfuse.adapters.primitives`, or the tangent of a backward.

    Its operands are those that are kept, then those it is linear in, each by its kind. `names`: of
    the results, where `How.needs` chooses among them.
    """

    name: str
    kept: str
    moved: str
    results: str
    names: tuple[str, ...] | None
    #: (how, operands) -> the result, or the tuple of those that are wanted, over NumPy arrays.
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


class Form(NamedTuple):
    """The description of a primitive's arguments without their values; JAX compares and hashes it.

    Every operand has `lead` mapped axes in front, of length 1 where it is the same for all. The
    last `pooled` of them are summed over in the gradient of an operand that is the same for all.
    """

    how: How
    there: tuple[bool, ...]
    lead: int = 0
    pooled: int = 0


# --- shapes ---------------------------------------------------------------------------------------
def own_shapes(operation: Operation, given: Sequence[tuple[str, Shape]]) -> dict[str, Shape]:
    """The shape of each kind, mapped axes left out, after every check of shapes."""
    shapes: dict[str, Shape] = {}
    for kind, own in given:
        if shapes.setdefault(kind, own) != own:
            raise ValueError(
                f"{operation.name}: operands that belong together must have one shape, "
                f"got {shapes[kind]} and {own}"
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
def shapes_of(operation: Operation, form: Form, given: tuple[Shape, ...]) -> _Shapes:
    """The shapes that every operand is broadcast to, and that the results have."""
    lead = form.lead
    kinds = [kind for kind, t in zip(operation.operands, form.there, strict=True) if t]
    own = own_shapes(operation, [(k, s[lead:]) for k, s in zip(kinds, given, strict=True)])
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
def on_host(operation: Operation, form: Form, given: Sequence[Any]) -> list[ndarray]:
    """The results, of NumPy arrays."""
    shapes = shapes_of(operation, form, tuple(x.shape for x in given))
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
    results = operation.run(form.how, operands)
    if operation.names is None:
        results = (results,)
    # Without the axes that were put in, and those that 1-D operands leave out.
    return [
        np.reshape(x, shapes.full(kind))
        for x, kind in zip(results, operation.wanted(form.how), strict=True)
    ]


def _added(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _backward_tangent(name: str, names: tuple[str, ...]) -> Operation:
    """Return the derivative of a backward.

    It is linear in grad, and a product of the Hessian of sum(grad * act(a b + c)), which is
    symmetric: that is the double backward's.
    """
    backward, double = OPERATIONS[f"{name}_bwd"], OPERATIONS[f"{name}_double"]

    def run(how: How, operands: list[Any]) -> Any:
        n = len(operands) // 2
        grad, *kept = operands[:n]
        grad_dot, *dots = operands[n:]
        found: Sequence[Any] = [None] * len(names)
        if grad_dot is not None:
            found = spread(backward.run(how, [*kept, grad_dot]), names, how.needs)
        if any(x is not None for x in dots):
            second = spread(double.run(how, [grad, *kept, *dots]), names, how.needs)
            found = [_added(x, y) for x, y in zip(found, second, strict=True)]
        return tuple(x for x in found if x is not None)

    kinds = double.kept
    return Operation(f"{name}_bwd_tangent", kinds, kinds, kinds[1:], names, run)


def _of(primitive: Primitive) -> Operation:
    """Return a primitive with the operands that it is linear in behind the others."""
    kinds = "".join(primitive.linear_last(primitive.kinds))
    n = len(kinds) - len(primitive.moved)

    def run(how: How, x: list[Any]) -> Any:
        return primitive.run(CORE, how, *primitive.in_place(x))

    return Operation(primitive.name, kinds[:n], kinds[n:], primitive.results, primitive.names, run)


OPERATIONS = {name: _of(primitive) for name, primitive in PRIMITIVES.items()}
for _name, _names in (("product", GEMM_NEEDS), ("gate", GATED_NEEDS)):
    OPERATIONS[f"{_name}_bwd_tangent"] = _backward_tangent(_name, _names)
TRANSPOSES = {
    "product_tangent": "product_bwd",
    "product_bwd": "product_tangent",
    "product_bwd_tangent": "product_double",
    "product_double": "product_bwd_tangent",
    "gate_tangent": "gate_bwd",
    "gate_bwd": "gate_tangent",
    "gate_bwd_tangent": "gate_double",
    "gate_double": "gate_bwd_tangent",
}


def highest_order(operation: Operation, how: How, operands: Operands) -> int:
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
