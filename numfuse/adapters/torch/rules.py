"""The derivatives of PyTorch's operators: the next fused one, or what an operator is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from numfuse.adapters import pieces
from numfuse.adapters.primitives import PRIMITIVES, How, spread
from numfuse.adapters.surface import Functions
from numfuse.adapters.torch.operators import Op
from numfuse.adapters.torch.tensors import in_functorch
from numfuse.problem.results import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
)

__all__ = ["operators"]

Rule = Callable[..., Any]


def _sets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every set of names but the empty one."""
    return [
        tuple(name for i, name in enumerate(names) if bits >> i & 1)
        for bits in range(1, 1 << len(names))
    ]


def _wanted(ctx: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The operands, in front of all others, that need a gradient."""
    flags = ctx.needs_input_grad[: len(names)]
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


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
        at = [i for i in range(len(operands)) if ctx.needs_input_grad[i]]
        call = replaced(operands, how, at)
        found: list[Any] = [None] * len(operands)
        if in_functorch():
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
        # Outside of torch.func there is one level of forward mode, which is switched off while a
        # rule of it runs; torch.func.jvp would open a second one.
        with forward_ad._set_fwd_grad_enabled(True):
            duals = [
                forward_ad.make_dual(forward_ad.unpack_dual(operands[i]).primal, tangents[i])
                for i in at
            ]
            found = [forward_ad.unpack_dual(out) for out in call(*duals)]
        return tuple(
            torch.zeros_like(out.primal) if out.tangent is None else out.tangent for out in found
        )

    return pull, push


class _Rules:
    """The backward and the forward mode of each operator, over an adapter's public functions."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def of(self, name: str) -> tuple[Rule, Rule]:
        """Return the two rules of a primitive: its own, or those through its pieces."""
        own = getattr(self, f"_{name}", None)
        return own() if own is not None else self._pieces(name)

    def _pieces(self, name: str) -> tuple[Rule, Rule]:
        made_of = self._functions.composite(name)
        if not PRIMITIVES[name].takes_saved:
            return _through(made_of)
        count = len(PRIMITIVES[name].operands)
        return _through(lambda how, *x: made_of(how, *x[:-1], pre=x[-1]), count)

    def _fused(self, names: tuple[str, ...], backward: str, tangent: str) -> tuple[Rule, Rule]:
        """Return the rules of a forward: one fused call each."""
        run = self._functions.primitive

        def pull(ctx: Any, x: Any, how: How, g: Any) -> Any:
            needs = _wanted(ctx, names)
            return spread(run(backward, how._replace(needs=needs), g, *x), names, needs)

        return pull, lambda x, how, *dots: (run(tangent, how, *x, *dots),)

    def _product(self) -> tuple[Rule, Rule]:
        return self._fused(GEMM_NEEDS, "product_bwd", "product_tangent")

    def _gate(self) -> tuple[Rule, Rule]:
        return self._fused(GATED_NEEDS, "gate_bwd", "gate_tangent")

    def _product_bwd(self) -> tuple[Rule, Rule]:
        functions = self._functions
        _, through = self._pieces("product_bwd")

        def pull(ctx: Any, x: Any, how: How, *gs: Any) -> Any:
            """Return the gradients of the backward: fused, or with that of a pre-activation."""
            *operands, pre = x
            names = (*GEMM_SECOND_NEEDS, "pre")
            needs = _wanted(ctx, names)
            cotangents = spread(gs, GEMM_NEEDS, how.needs)
            how = how._replace(needs=needs)
            if "pre" not in needs:
                found = functions.primitive("product_double", how, *cotangents, *operands)
            else:
                found = functions.composite("product_double")(how, *cotangents, *operands, pre=pre)
            return spread(found, names, needs)

        def push(x: Any, how: How, *dots: Any) -> Any:
            if not how.activation.is_identity:
                return through(x, how, *dots)
            return pieces.linear_backward_tangent(functions, how, *x[:-1], *dots[:3])

        return pull, push

    def _gate_bwd(self) -> tuple[Rule, Rule]:
        run = self._functions.primitive

        def pull(ctx: Any, x: Any, how: How, *gs: Any) -> Any:
            needs = _wanted(ctx, GATED_SECOND_NEEDS)
            cotangents = spread(gs, GATED_NEEDS, how.needs)
            found = run("gate_double", how._replace(needs=needs), *cotangents, *x)
            return spread(found, GATED_SECOND_NEEDS, needs)

        return pull, self._pieces("gate_bwd")[1]

    def _residual(self) -> tuple[Rule, Rule]:
        functions = self._functions

        def pull(ctx: Any, x: Any, how: How, g: Any) -> Any:
            needs = _wanted(ctx, RESIDUAL_NEEDS)
            return functions.matmul_bias_residual_bwd(g, *x, needs=needs, backend=how.backend)

        def push(x: Any, how: How, *dots: Any) -> Any:
            return (functions.matmul_bias_residual_jvp(*x, *dots, backend=how.backend).out_dot,)

        return pull, push


def operators(functions: Functions) -> dict[tuple[str, tuple[str, ...]], Op]:
    """Return the operator of each primitive and set of gradients."""
    rules = _Rules(functions)
    return {
        (name, needs): Op(primitive, *rules.of(name), needs)
        for name, primitive in PRIMITIVES.items()
        for needs in ([()] if primitive.names is None else _sets(primitive.names))
    }
