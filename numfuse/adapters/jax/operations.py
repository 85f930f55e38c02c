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
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation, activations
from numfuse.adapters.primitives import CORE, PRIMITIVES, How, backward_tangents, matrices
from numfuse.adapters.primitives import Primitive as Operation
from numfuse.backends import OneRun
from numfuse.language.text import dumps, loads
from numfuse.operations import OPERATIONS
from numfuse.problem.shapes import gemm_shape, residual_view
from numfuse.runtime.strided import ghost

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


class _Recorder(OneRun):
    """A backend that takes a problem and does not run it."""

    name = "recorder"
    kind = ""
    problem: Any = None

    def run(self, kind: str, p: Any) -> None:
        """Take a problem."""
        self.kind, self.problem = kind, p


def ghosts(shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[ndarray]:
    """Return arrays of these shapes and dtypes, without their memory."""
    return list(map(ghost, shapes, dtypes))


class Taken(NamedTuple):
    """A problem on arrays, before it is run, and its results."""

    kind: str
    problem: Any
    #: The fields of the problem that have the operands, and those that have the results.
    operands: Sequence[str]
    made: Sequence[str]
    results: list[ndarray]


class Call(NamedTuple):
    """A call of an operation without its arrays (`numfuse.adapters.jax.calls`)."""

    operation: Operation
    form: Form
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    def results(self) -> list[tuple[Shape, Any]]:
        """Return the shape and dtype of each result."""
        shapes = shapes_of(self.operation, self.form, self.shapes)
        dtype = np.dtype(self.dtypes[0])
        kinds = self.operation.wanted(self.form.how.needs)
        return [(shapes.full(kind), dtype) for kind in kinds]

    def on_host(self, given: Sequence[Any]) -> list[ndarray]:
        """Return the results, of NumPy arrays."""
        return on_host(self.operation, self.form, given)

    def taken(self, given: Sequence[Any]) -> Taken:
        """Return the problem on these arrays."""
        recorder, form = _Recorder(), self.form
        form = form._replace(how=form.how._replace(backend=recorder))
        results = on_host(self.operation, form, given)
        public = OPERATIONS[self.operation.function]
        count = len(public.operands)
        operands, made = public.fields[:count], public.fields[count:]
        if recorder.kind == "tangent" and form.how.activation.is_identity:
            made = made[1:]  # (without a value that nobody asked for)
        return Taken(recorder.kind, recorder.problem, operands, made, results)

    def described(self) -> list[Any]:
        """Return what JSON holds, and `read` reads."""
        how = self.form.how
        told = *text_of(how.activation), how.needs, how.guard
        return [self.operation.name, told, self.form[1:], self.shapes, self.dtypes]

    @classmethod
    def read(cls, what: Sequence[Any]) -> Call:
        """Return what was described, but with an activation that may be another object."""
        name, (act, text, needs, guard), (there, *leads), shapes, dtypes = what
        form = Form(How(activation_of(act, text), tuple(needs), guard), tuple(there), *leads)
        return cls(PRIMITIVES[name], form, tuple(map(tuple, shapes)), tuple(dtypes))

    @property
    def held(self) -> Any:
        """Return the activation where nobody else has it."""
        act = self.form.how.activation
        return None if activations().get(act.name) is act else act


def text_of(act: Activation) -> tuple[str, str]:
    """Return the name of an activation, and its formulas as text."""
    traces = []
    with suppress(ValueError):  # (where the table ends)
        for order in range(4):
            traces.append(act.trace(order))
    return act.name, dumps(traces)


def activation_of(name: str, text: str) -> Activation:
    """Return the activation of this name if it has these formulas, else one that has."""
    act = activations().get(name)
    if act is None or dumps(act.formulas()) != text:
        act = Activation(name, "of a compiled computation")
        act.restore(loads(text))
    return act


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
