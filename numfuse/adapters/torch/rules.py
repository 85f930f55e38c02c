"""The derivatives of PyTorch's operators: the next fused one, or what an operator is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch.autograd import forward_ad

from numfuse.adapters.primitives import PRIMITIVES, How
from numfuse.adapters.surface import Functions
from numfuse.adapters.torch.operators import Op
from numfuse.adapters.torch.tensors import in_functorch

Rule = Callable[..., Any]


def _through(
    composite: Callable[..., Any], saved: int | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the backward and the forward mode of an operator through what it is made of.

    `composite` is a function of the call's how and the operands. `saved` is the place of a
    pre-activation. Where no derivative goes through that, it is made again: it stands for what it
    was made of.
    """

    def replaced(operands: Any, how: How, at: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
        def call(*values: Any) -> tuple[Any, ...]:
            every = list(operands)
            if saved is not None:
                every[saved] = None
            for i, value in zip(at, values, strict=True):
                every[i] = value
            outs = composite(how, *every)
            return outs if isinstance(outs, tuple) else (outs,)

        return call

    def pull(ctx: Any, operands: Any, how: How, *gs: Any) -> Any:
        # (that of torch.func.vjp is called when its level is left)
        operands = [x if x is None else torch._C._functorch.unwrap_if_dead(x) for x in operands]
        at = [i for i in range(len(operands)) if ctx.needs_input_grad[i]]
        call = replaced(operands, how, at)
        found: list[Any] = [None] * len(operands)
        if in_functorch() or not all(operands[i].requires_grad for i in at):
            outs, back, *_ = torch.func.vjp(call, *(operands[i] for i in at))
            full = (torch.zeros_like(o) if g is None else g for o, g in zip(outs, gs, strict=True))
            gradients = back(tuple(full))
        else:
            again = torch.is_grad_enabled()
            with torch.enable_grad():
                # Views of their own: an operand that was computed from another counts as an
                # operand, and the other's gradient has no part of it.
                views = [operands[i].view_as(operands[i]) for i in at]
                pairs = [
                    (out, g)
                    for out, g in zip(call(*views), gs, strict=True)
                    if g is not None and out.requires_grad
                ]
                if not pairs:
                    return found
                gradients = torch.autograd.grad(
                    [out for out, _ in pairs],
                    views,
                    [g for _, g in pairs],
                    create_graph=again,
                    allow_unused=True,
                )
        for i, gradient in zip(at, gradients, strict=True):
            found[i] = gradient
        return found

    def push(operands: Any, how: How, *tangents: Any) -> Any:
        at = [i for i, t in enumerate(tangents) if t is not None]
        call = replaced(operands, how, at)
        if in_functorch():
            primals = tuple(operands[i] for i in at)
            return torch.func.jvp(call, primals, tuple(tangents[i] for i in at))[1]
        # Outside of torch.func there is one level: torch.func.jvp would open another.
        duals = [forward_ad.make_dual(operands[i], tangents[i]) for i in at]
        found = [forward_ad.unpack_dual(out) for out in call(*duals)]
        return tuple(
            torch.zeros_like(out.primal) if out.tangent is None else out.tangent for out in found
        )

    return pull, push


def _rules(functions: Functions, name: str) -> tuple[Rule, Rule]:
    """Return the backward and the forward mode of a primitive: fused ones, else its pieces'."""
    primitive = PRIMITIVES[name]
    count, saved = len(primitive.operands), primitive.takes_saved

    def made_of(how: How, *x: Any) -> Any:
        pre = {"pre": x[count]} if saved else {}
        return functions.composite(name, how, *x[:count], **pre)

    through, push_through = _through(made_of, count if saved else None)
    if not primitive.is_fused:
        return through, push_through

    def pull(ctx: Any, x: Any, how: How, *gs: Any) -> Any:
        names = (*primitive.operands, "pre")[: len(x)]
        flags = zip(names, ctx.needs_input_grad, strict=False)
        needs = tuple(name for name, flag in flags if flag)
        pre = x[count] if "pre" in needs else None
        cotangents = primitive.cotangents(gs, how)
        made = functions.pulled(name, how._replace(needs=needs), cotangents, x[:count], pre)
        return made[: len(x)]

    def push(x: Any, how: How, *dots: Any) -> Any:
        if any(dot is not None for dot in dots[count:]):  # of a saved pre-activation
            return push_through(x, how, *dots)
        return functions.pushed(name, how, x[:count], dots[:count])

    return pull, push


def operators(functions: Functions) -> dict[tuple[str, tuple[str, ...]], Op]:
    """Return the operator of each primitive and set of gradients."""
    made = {}
    for name, primitive in PRIMITIVES.items():
        names, rules = primitive.names or (), _rules(functions, name)
        for count in range(min(len(names), 1), len(names) + 1):
            for needs in combinations(names, count):
                made[name, needs] = Op(primitive, *rules, needs)
    return made
