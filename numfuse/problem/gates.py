"""Hop 2 of gates: epilogues of arrays of one shape, without a product (`numfuse.problem.fused`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from numfuse import epilogues
from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.problem.fused import FusedProblem
from numfuse.problem.operands import checked, output, shaped
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    Tangent,
    check_needs,
    made_gradients,
)

#: What forward mode calls its tangents, by the names of their formula.
_LABELS = {"a_dot": "u", "b_dot": "v"}


class _Gate:
    """The operands of a gate, checked: those that are there, by the names of their formula.

    `names` are those of what is derived, if that is not everything.
    """

    def __init__(
        self, kind: str, activation: Any, guard: bool, *names: str, **operands: Any
    ) -> None:
        if type(activation) is not Activation:
            activation = get_activation(activation)
        self.activation = activation
        given, self.dtype, self.acc_dtype = checked(operands)
        self.shape = given["a"].shape
        for name, x in given.items():
            if x.shape != self.shape:
                shaped(x, name, self.shape, "the shape of a")
        self.given = {_LABELS.get(name, name): x for name, x in given.items()}
        whole = epilogues.GATES[kind](activation.curve, *names)
        whole = whole.guarded() if guard else whole
        self.epilogue = whole.without(*(name for name in whole.inputs if name not in self.given))

    def problem(self, made: dict[str, Any], result: Any) -> FusedProblem:
        """Return the problem that writes these results."""
        known, stored, zeroed = dict(self.epilogue.results), list[str](), list[str]()
        in_place: dict[str, str] = {}
        arrays, missing = dict(self.given), max(0, 2 - len(self.shape))
        for name, y in made.items():
            if y is not None:
                arrays[name] = y
                (stored if name in known else zeroed).append(name)
                for other, x in self.given.items():
                    if x is y:
                        in_place[name] = other
        if missing:
            arrays = {name: x[(None,) * missing] for name, x in arrays.items()}
        *batch, m, n = (1,) * missing + self.shape
        chosen = self.epilogue.select(*stored)
        head = self.activation, m, n, 0, tuple(batch), self.dtype, self.acc_dtype, arrays
        ends = tuple(zeroed), in_place, result
        return FusedProblem(*head, {}, chosen, tuple(stored), (), {}, *ends)

    def gradients(self, names: tuple[str, ...], needs: Any, out: Any = None) -> FusedProblem:
        """Return the problem that makes the gradients of these names."""
        shapes = dict.fromkeys(names, self.shape)
        return self.problem(*made_gradients(names, shapes, needs, out, self.dtype, self.given))


def gated(a: Any, b: Any, activation: Any, out: Any = None) -> FusedProblem:
    """The problem of `activation_mul`; see there for what is accepted and raised."""
    gate = _Gate("gated", activation, False, a=a, b=b)
    if out is None:
        made = np.empty(gate.shape, gate.dtype)
    else:
        made = output("out", out, gate.shape, gate.dtype, gate.given, may_be=("a", "b"))
    return gate.problem({"out": made}, made if out is None else out)


def gated_backward(
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    needs: Any = None,
    guard: bool = True,
    out: Any = None,
) -> FusedProblem:
    """The problem of `activation_mul_bwd`; see there for what is accepted and raised."""
    needs = GATED_NEEDS if needs is None else check_needs(needs, GATED_NEEDS)
    # (the derivative by a is one higher, which the table may lack)
    names = "".join([name for name in GATED_NEEDS if name in needs])
    gate = _Gate("gated_backward", activation, guard, names, grad=grad, a=a, b=b)
    return gate.gradients(GATED_NEEDS, needs, out)


def gated_double_backward(
    u: Any,
    v: Any,
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    needs: Any = None,
    guard: bool = True,
) -> FusedProblem:
    """The problem of `activation_mul_double_bwd`; see there for what is accepted and raised."""
    gate = _Gate("gated_double_backward", activation, guard, a=a, b=b, grad=grad, u=u, v=v)
    return gate.gradients(GATED_SECOND_NEEDS, needs)


def gated_tangent(
    a: Any, b: Any, a_dot: Any, b_dot: Any, activation: Any, guard: bool = True
) -> FusedProblem:
    """The problem of `activation_mul_jvp`; see there for what is accepted and raised."""
    gate = _Gate("gated_tangent", activation, guard, a=a, b=b, a_dot=a_dot, b_dot=b_dot)
    made = Tangent(*[np.empty(gate.shape, gate.dtype) for _ in "ab"])
    return gate.problem(made._asdict(), made)
