"""The gate and its derivatives: one elementwise epilogue each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from numfuse import epilogues
from numfuse.backends.webgpu.lower.elementwise import elementwise
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.stores import Store

if TYPE_CHECKING:
    from numfuse.epilogues import Epilogue
    from numfuse.language.curves import Curve
    from numfuse.problem.product import GatedBackwardProblem, GatedProblem
    from numfuse.problem.second_order import GatedDoubleBackwardProblem, GatedTangentProblem

__all__ = ["gated", "gated_backward", "gated_double_backward", "gated_tangent"]


def gate_backward(f: Curve) -> Epilogue:
    """Return the gradients of a gate's operands."""
    return epilogues.gate(f).backward()


def gate_tangent(f: Curve) -> Epilogue:
    """Return a gate and its derivative along the tangents of both operands."""
    return epilogues.gate(f).tangent()


def gated(store: Store, p: GatedProblem) -> None:
    """Record the gate."""
    _gate(store, p, epilogues.gate, {"a": p.a, "b": p.b}, {"out": p.out})


def gated_backward(store: Store, p: GatedBackwardProblem) -> None:
    """Record the gate's gradients."""
    arrays = {"grad": p.grad, "a": p.a, "b": p.b}
    _gate(store, p, gate_backward, arrays, {"d_a": p.d_a, "d_b": p.d_b}, p.guard)


def gated_double_backward(store: Store, p: GatedDoubleBackwardProblem) -> None:
    """Record the gradients of the gate's gradients."""
    arrays = {"a": p.a, "b": p.b, "grad": p.grad, "u": p.u, "v": p.v}
    outs = {"d_grad": p.d_grad, "d_a": p.d_a, "d_b": p.d_b}
    _gate(store, p, epilogues.gate_double_backward, arrays, outs, p.guard)


def gated_tangent(store: Store, p: GatedTangentProblem) -> None:
    """Record the gate and its derivative along tangents."""
    arrays = {"a": p.a, "b": p.b, "a_dot": p.u, "b_dot": p.v}
    _gate(store, p, gate_tangent, arrays, {"out": p.out, "out_dot": p.out_dot}, p.guard)


def _gate(
    store: Store,
    p: Any,
    operation: Callable[[Curve], Epilogue],
    arrays: Mapping[str, ndarray | None],
    outs: Mapping[str, ndarray | None],
    guard: bool = False,
) -> None:
    """Record an operation's formulas; an array that is None is zero, and a result not wanted."""
    wanted = {name: x for name, x in outs.items() if x is not None}
    if not wanted:
        return
    absent = tuple(name for name, x in arrays.items() if x is None)
    formula = Formula.of(operation, p.activation.curve, absent, guard).choose(*wanted)
    used = {name: x for name in formula.inputs if (x := arrays[name]) is not None}
    elementwise(
        store,
        formula,
        {name: store.source(x) for name, x in used.items()},
        {name: store.target(x) for name, x in wanted.items()},
        p.acc_dtype,
    )
