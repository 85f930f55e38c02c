"""numfuse's operations as JAX differentiates them, on NumPy arrays: shapes, batches, what runs.

The operands of an operation are those that are kept, then those in which it is linear. The linear
ones come in pairs, each the transpose of the other:

    tangent   (a, b, c | u, v, w) -> out_dot
    backward  (a, b, c | grad) -> d_a, d_b, d_c

and what is linear in the operands of a backward (its tangent) is the transpose of

    double    (grad, a, b, c | u, v, w) -> d_grad, d_a, d_b, d_c

It is a backward of the tangent of grad, and a double backward of the others': a product of a
Hessian, which is symmetric. The gates have the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.adapters.primitives import CORE, PRIMITIVES, How, backward_tangents, matrices
from numfuse.adapters.primitives import Primitive as Operation
from numfuse.problem.shapes import gemm_shape, residual_view

Shape = tuple[int, ...]
Operands = Sequence[Any]


class Form(NamedTuple):
    """The description of a primitive's arguments without their values; JAX compares and hashes it.

    Every operand has `lead` mapped axes in front, of length 1 where it is the same for all. The
    last `pooled` of them are summed over in the gradient of an operand that is the same for all.
    """

    how: How
    there: tuple[bool, ...]
    lead: int = 0
    pooled: int = 0


class Call(NamedTuple):
    """A call of an operation without its arrays."""

    operation: Operation
    form: Form
    shapes: Sequence[Shape]
    dtype: str


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
    kinds = [kind for kind, t in zip(operation.ordered_kinds, form.there, strict=True) if t]
    own = own_shapes(operation, [(k, s[lead:]) for k, s in zip(kinds, given, strict=True)])
    batch = np.broadcast_shapes(*(shape[:lead] for shape in given))
    at = lead - form.pooled
    leads = dict.fromkeys(own, batch)
    for kind in "abc":
        parts = [shape[at:lead] for k, shape in zip(kinds, given, strict=True) if k == kind]
        if parts:
            leads[kind] = batch[:at] + np.broadcast_shapes(*parts)
    return _Shapes(own, leads)


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
        for i, (x, kind) in enumerate(zip(operands, operation.ordered_kinds, strict=True)):
            if x is not None:
                x = np.broadcast_to(x, shapes.full(kind))
                if kind != "e":
                    full = matrices(kind, own[kind], rank, row, column)
                    x = x.reshape(x.shape[: x.ndim - len(own[kind])] + full)
                operands[i] = x
    results = operation.run(CORE, form.how, *operation.in_place(operands))
    if operation.names is None:
        results = (results,)
    # Without the axes that were put in, and those that 1-D operands leave out.
    return [
        np.reshape(x, shapes.full(kind))
        for x, kind in zip(results, operation.wanted(form.how.needs), strict=True)
    ]


def transpose(
    operation: Operation, kept: Operands, cotangents: Operands
) -> list[tuple[Operation, list[Any]]]:
    """Return the operations, with operands, whose sum is the transpose in what is linear."""
    kind, _, what = operation.name.partition("_")
    if what == "double":
        return backward_tangents(f"{kind}_bwd", kept, cotangents)
    partner = PRIMITIVES[f"{kind}_bwd" if what == "tangent" else f"{kind}_tangent"]
    return [(partner, partner.in_place([*kept, *cotangents]))]


def highest_order(operation: Operation, how: How, operands: Operands) -> int:
    """The highest derivative of the activation that an operation evaluates."""
    moved = [x is not None for x in operands[operation.kept :]]
    name, needs = operation.name, how.needs
    if operation.is_forward:
        return 0
    if name == "product_double":
        return 2 if any(moved) and needs != ("grad",) else 1
    # A gate's second factor bends nothing.
    if name == "gate_double":
        return 2 if moved[0] and "a" in needs else 1
    if name == "gate_tangent":
        return 1 if moved[0] else 0
    return 0 if name == "gate_bwd" and "a" not in needs else 1
