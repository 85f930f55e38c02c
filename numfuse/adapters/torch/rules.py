"""The derivatives of PyTorch's operators: the next fused one, or what an operator is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch.autograd import forward_ad

from numfuse.adapters.primitives import PRIMITIVES, How, Primitive
from numfuse.adapters.surface import Functions
from numfuse.adapters.torch.operators import Op
from numfuse.adapters.torch.tensors import in_functorch


def _made_of(
    functions: Functions, primitive: Primitive, how: How, operands: Sequence[Any], at: Sequence[int]
) -> Callable[..., tuple[Any, ...]]:
    """Return the results of what a primitive is made of, as a function of its operands `at`.

    Where no derivative goes through a saved pre-activation, that is made again: it stands for what
    it was made of.
    """
    count = len(primitive.operands)

    def call(*values: Any) -> tuple[Any, ...]:
        every = [*operands[:count], None]
        for i, value in zip(at, values, strict=True):
            every[i] = value
        pre = {"pre": every[count]} if primitive.takes_saved else {}
        outs = functions.composite(primitive.name, how, *every[:count], **pre)
        return outs if isinstance(outs, tuple) else (outs,)

    return call


def _pull_through(
    functions: Functions, primitive: Primitive, ctx: Any, operands: Any, how: How, *gs: Any
) -> Any:
    """Return the gradients of a primitive's operands through what it is made of."""
    # (those of torch.func.vjp are asked for when its level is left)
    operands = [x if x is None else torch._C._functorch.unwrap_if_dead(x) for x in operands]
    at = [i for i in range(len(operands)) if ctx.needs_input_grad[i]]
    call = _made_of(functions, primitive, how, operands, at)
    found: list[Any] = [None] * len(operands)
    if in_functorch() or not all(operands[i].requires_grad for i in at):
        outs, back, *_ = torch.func.vjp(call, *(operands[i] for i in at))
        full = (torch.zeros_like(o) if g is None else g for o, g in zip(outs, gs, strict=True))
        gradients = back(tuple(full))
    else:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views of their own: an operand that was computed from another counts as an operand,
            # and the other's gradient has no part of it.
            views = [operands[i].view_as(operands[i]) for i in at]
            pairs = zip(call(*views), gs, strict=True)
            moving = [(out, g) for out, g in pairs if g is not None and out.requires_grad]
            if not moving:
                return found
            outs, gs = zip(*moving, strict=True)
            options = {"create_graph": again, "allow_unused": True}
            gradients = torch.autograd.grad(outs, views, gs, **options)
    for i, gradient in zip(at, gradients, strict=True):
        found[i] = gradient
    return found


def _push_through(
    functions: Functions, primitive: Primitive, operands: Any, how: How, *tangents: Any
) -> Any:
    """Return the tangents of a primitive's results through what it is made of."""
    at = [i for i, t in enumerate(tangents) if t is not None]
    call = _made_of(functions, primitive, how, operands, at)
    if in_functorch():
        primals = tuple(operands[i] for i in at)
        return torch.func.jvp(call, primals, tuple(tangents[i] for i in at))[1]
    # Outside of torch.func there is one level: torch.func.jvp would open another.
    duals = [forward_ad.make_dual(operands[i], tangents[i]) for i in at]
    found = [forward_ad.unpack_dual(out) for out in call(*duals)]
    return tuple(
        torch.zeros_like(out.primal) if out.tangent is None else out.tangent for out in found
    )


def _pull(
    functions: Functions, primitive: Primitive, ctx: Any, operands: Any, how: How, *gs: Any
) -> Any:
    """Return the gradients of a primitive's operands by another one."""
    cotangents, count = primitive.cotangents(gs, how), len(primitive.operands)
    names = (*primitive.operands, "pre")[: len(operands)]
    flags = zip(names, ctx.needs_input_grad, strict=False)
    how = how._replace(needs=tuple(name for name, flag in flags if flag))
    pre = operands[count] if "pre" in how.needs else None
    made = functions.pulled(primitive.name, how, cotangents, operands[:count], pre)
    return made[: len(operands)]


def _push(
    functions: Functions, primitive: Primitive, operands: Any, how: How, *tangents: Any
) -> Any:
    """Return the tangents of a primitive's results by other ones."""
    count = len(primitive.operands)
    if any(dot is not None for dot in tangents[count:]):  # of a saved pre-activation
        return _push_through(functions, primitive, operands, how, *tangents)
    return functions.pushed(primitive.name, how, operands[:count], tangents[:count])


def operators(functions: Functions) -> dict[tuple[str, tuple[str, ...]], Op]:
    """Return the operator of each primitive and set of gradients."""
    made = {}
    for name, primitive in PRIMITIVES.items():
        pull: Any = _pull if primitive.is_fused else _pull_through
        push: Any = _push if primitive.is_fused else _push_through
        names, own = primitive.names or (), (functions, primitive)
        for count in range(min(len(names), 1), len(names) + 1):
            for needs in combinations(names, count):
                rules = partial(pull, *own), partial(push, *own)
                made[name, needs] = Op(primitive, *rules, needs)
    return made
