"""The arrays that a layer keeps for its backward: what makes it fastest, or its operands alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from numfuse.activations import Activation, formulas, get
from numfuse.problem.product import STORED

_RECOMPUTES: ContextVar[bool] = ContextVar("recomputes", default=False)


@torch.compiler.assume_constant_result
def recomputes() -> bool:
    """Whether layers are in a context of :func:`recompute`: for torch.compile, when it traces."""
    return _RECOMPUTES.get()


@contextmanager
def recompute(on: bool = True) -> Iterator[None]:
    """A context whose layers keep nothing but their operands for the backward.

    That makes the pre-activation again, which is a product more: three for two in a layer's
    backward. Without it a layer keeps, of an (M, N) result, nothing more where the activation is
    "none", "relu", or "tanh" or "sigmoid" in float32 or float64, whose derivatives are functions of
    the result, and else M x N numbers of the result's dtype.
    """
    token = _RECOMPUTES.set(on)
    try:
        yield
    finally:
        _RECOMPUTES.reset(token)


def _at_output(name: str, formula: Any) -> Activation:
    """Return an activation whose derivative at f(x) is f'(x)."""
    made = Activation(f"{name} by its output", "derived")
    made.define(0, formula)
    return made


#: By serial number, what has the derivative of an activation at the activation's value.
_AT_OUTPUT: dict[int, Activation | None] = {
    get("none").serial: None,
    get("relu").serial: get("relu"),
    get("tanh").serial: _at_output("tanh", lambda y: y - y * y * y / 3.0),
    get("sigmoid").serial: _at_output("sigmoid", lambda y: y * y * (0.5 - y / 3.0)),
}
#: Serial numbers of activations whose derivatives are finite: of the table, and those above.
FINITE = {
    act.derived(order).serial
    for act in (*vars(formulas).values(), *_AT_OUTPUT.values())
    if isinstance(act, Activation)
    for order in range(4)
}
_WIDE = (torch.float32, torch.float64)


class Way(NamedTuple):
    """How a layer's forward was made, beside its tensors."""

    activation: Activation
    #: What has the derivative at the array that is kept; None of the identity.
    slope: Activation | None
    #: What is kept for the backward: "out", "pre" or nothing.
    keeps: str
    #: The core's `return_pre_activation`.
    with_pre: bool | str
    #: Whether b is given transposed.
    flipped: bool
    backend: Any


def way(
    act: Any,
    like: Any,
    with_pre: bool = False,
    flipped: bool = False,
    backend: Any = None,
    keep: bool | None = None,
) -> Way:
    """Return how a layer of an operand like this one is made; `keep` is not to recompute."""
    act = act if isinstance(act, Activation) else get(act)
    slope = _AT_OUTPUT.get(act.serial, act)
    if slope is None or (act.id is None and act.is_identity):
        slope, keeps = None, "pre" if with_pre else ""
    elif with_pre:
        slope, keeps = act, "pre"
    elif _RECOMPUTES.get() if keep is None else not keep:
        slope, keeps = act, ""
    elif act.serial in _AT_OUTPUT and (slope is act or like.dtype in _WIDE):
        keeps = "out"
    else:  # (rounded to 16 bits, 1 - tanh^2 would lose most of its own)
        slope, keeps = act, "pre"
    asked: bool | str = keeps == "pre" and (with_pre or STORED)
    return tuple.__new__(Way, (act, slope, keeps, asked, flipped, backend))
