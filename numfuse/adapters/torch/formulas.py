"""Formulas that are derived from a user's, and operators of PyTorch that run them.

In what is run, a derivative of an activation that is not finite counts as 0; what is derived from
it in turn is derived without that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from numfuse.adapters.torch import eager
from numfuse.adapters.torch.keys import backend_of, formula_of
from numfuse.definitions import UserEpilogue
from numfuse.epilogues import Epilogue
from numfuse.fused_operations import operation
from numfuse.language.curves import leaf, replace_leaves

_LIBRARY = torch.library.Library("numfuse", "FRAGMENT")


def plain(f: Any) -> Any:
    """Return what the derivatives of a formula, or of a layer with an activation, are made of."""
    return f.made.get("plain", f) if type(f) is UserEpilogue else f


def _derived(f: UserEpilogue, name: str, made: Epilogue, inputs: Sequence[str], guard: bool) -> Any:
    """Return an epilogue as a formula of inputs in this order."""
    places = {leaf(x): leaf(f"p_{i}") for i, x in enumerate(inputs)}

    def formula(epilogue: Epilogue) -> UserEpilogue:
        graphs = replace_leaves(epilogue.graphs, places)
        return UserEpilogue(f"{f.name} {name}", f.source, tuple(inputs), graphs, True)

    found = formula(made.guarded() if guard else made)
    found.made["plain"] = formula(made)
    return found


def backward_of(
    f: UserEpilogue, there: tuple[int, ...], needs: tuple[int, ...], guard: bool
) -> tuple[Any, tuple[int, ...]]:
    """Return the gradients by the inputs `needs`, a formula of the cotangents that are `there` and
    of all inputs, and which of them it has: the others are zero everywhere.
    """
    f = plain(f)
    key = "backward", there, needs, guard
    found: Any = f.made.get(key)
    if found is None:
        cotangents = {f"out_{i}": f"g_{i}" for i in there}
        made = f.over(0).pulled_back(cotangents, {f"x_{i}": f"d_{i}" for i in needs})
        inputs = [*cotangents.values(), *(f"x_{i}" for i in range(len(f.parameters)))]
        derived = _derived(f, "backward", made, inputs, guard) if made.results else None
        found = derived, tuple([int(name[2:]) for name, _ in made.results])
        f.made[key] = found
    return found


def tangent_of(f: UserEpilogue, moving: tuple[int, ...], guard: bool) -> UserEpilogue:
    """Return the results' tangents, a formula of all inputs and of the tangents of `moving`."""
    f = plain(f)
    key = "tangent", moving, guard
    found: UserEpilogue | None = f.made.get(key)
    if found is None:
        made = f.over(0).tangent(tuple([f"x_{i}" for i in moving]))
        made = made.select(*[name for name, _ in made.results[1::2]])
        inputs = [f"x_{i}" for i in range(len(f.parameters))]
        inputs += [f"x_{i}_dot" for i in moving]
        found = f.made[key] = _derived(f, "tangent", made, inputs, guard)
    return found


@cache
def operator(operands: int, results: int, pull: Callable[..., Any]) -> Any:
    """Return the operator of formulas of so many operands and results.

    `pull` returns their gradients, of what a node keeps, who asks, and the cotangents.

    Its schema has no lists, for which batches of cotangents (`is_grads_batched`) have no rule.
    """

    def at_once(*args: Any) -> Any:
        *x, key, backend = args
        f = formula_of(key)
        op = operation(f, "elementwise", "forward", 0, False, (False,) * operands)[0]
        return eager.run(op, x, f, (), (), backend_of(backend))

    def shapes(*args: Any) -> Any:
        shape = torch.broadcast_shapes(*[x.shape for x in args[:operands]])
        made = tuple([args[0].new_empty(shape) for _ in range(results)])
        return made if results > 1 else made[0]

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        *x, key, backend = inputs
        ctx.how = formula_of(key), backend_of(backend)
        ctx.save_for_backward(*x)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *gs: Any) -> Any:
        return *pull(ctx, ctx.needs_input_grad[:-2], gs), None, None

    name = f"elements_{operands}_{results}"
    given = ", ".join(f"Tensor x_{i}" for i in range(operands))
    made = ", ".join(["Tensor"] * results)
    _LIBRARY.define(f"{name}({given}, str key, str? backend) -> ({made})")
    _LIBRARY.impl(name, at_once, "CompositeExplicitAutograd")
    torch.library.register_fake(f"numfuse::{name}", shapes, lib=_LIBRARY)
    # (for programs that have it alone, as exported ones)
    torch.library.register_autograd(f"numfuse::{name}", backward, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.numfuse, name)
