"""The gate and its derivatives: one elementwise epilogue each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from numfuse import epilogues
from numfuse.backends.webgpu.lower.elementwise import elementwise
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.stores import Region, Store
from numfuse.problem.fields import FIELDS

if TYPE_CHECKING:
    pass

__all__ = ["GATES"]


def _gate(
    kind: str,
    store: Store,
    p: Any,
    outs: Mapping[str, tuple[Region, bool]],
    **inputs: str,
) -> None:
    """Record an operation's formulas; an array that is None is zero.

    `inputs` are the formula's names of arrays where the problem has others.
    """
    if not outs:
        return
    arrays = {inputs.get(name, name): getattr(p, name) for name in FIELDS[kind][0]}
    absent = tuple(name for name, x in arrays.items() if x is None)
    guard = getattr(p, "guard", False)
    formula = Formula.of(epilogues.GATES[kind], p.activation.curve, absent, guard).choose(*outs)
    used = {name: store.source(arrays[name]) for name in formula.inputs}
    regions = {name: region for name, (region, _) in outs.items()}
    elementwise(store, formula, used, regions, p.acc_dtype)


#: By the method of a backend, what records its problem.
GATES = {kind: partial(_gate, kind) for kind in epilogues.GATES}
GATES["gated_tangent"] = partial(_gate, "gated_tangent", u="a_dot", v="b_dot")
