"""Networks' values of a GPU's tensors that no kernel runs whole: one node of all layers.

A forward is the layers' calls one after another, and so is a backward: each a program of its own
where it comes again (`backends.cuda.call.series`). They keep what nodes of the layers would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from numfuse.activations import get
from numfuse.adapters.perceptrons import ValueCall
from numfuse.adapters.torch.eager import (
    FLAGS,
    LAYER,
    LAYER_BACKWARD,
    asked_of_network,
    is_small,
    mode,
    run,
)
from numfuse.adapters.torch.kept import Way, recomputes, way
from numfuse.adapters.torch.layered_perceptrons import Given, by_layers
from numfuse.adapters.torch.operators import on_cuda
from numfuse.adapters.torch.tensors import own_values, own_values_of

_NONE = get("none")


def fits(x: Given) -> bool:
    """Return whether the layers of x, weights and biases are products of matrices, two or more."""
    points, *rest = x
    count = len(rest) // 2
    weights, biases = rest[:count], [y for y in rest[count:] if y is not None]
    there = [y for y in (*weights, *biases) if y is not None]
    if count < 2 or points is None or len(there) < count + len(biases) or points.ndim < 2:
        return False
    alike = all(y.dtype == points.dtype and y.device == points.device for y in there)
    return alike and all(y.ndim == 2 for y in there[:count]) and all(y.ndim == 1 for y in biases)


def _ways(call: ValueCall, x: Given, keep: bool) -> list[Way]:
    """Return how each layer is made; weights whose columns are runs of memory are given turned."""
    points, weights, _ = call.apart(x)
    turned = [w.stride(0) == 1 and w.stride(1) >= w.shape[0] > 1 for w in weights]
    pairs = zip(call.activations, turned, strict=True)
    return [way(f, points, False, flipped, call.backend, keep) for f, flipped in pairs]


def _forward(call: ValueCall, x: Given, keep: bool) -> tuple[Tensor, list[Any]]:
    """Return the value, and what is saved: each layer's value, and its pre-activation.

    None: that is not needed.
    """

    def long() -> Any:
        values, sums = [], []
        h, weights, biases = call.apart(own_values_of(x))
        for w, bias, how in zip(weights, biases, _ways(call, x, keep), strict=True):
            operands, flipped = (h, w.t() if how.flipped else w, bias), (1,) * how.flipped
            found = run(LAYER, operands, how.activation, (how.with_pre,), (), how.backend, flipped)
            h, pre = found if how.keeps == "pre" else (found, None)
            values.append(h)
            sums.append(pre)
        return h, [*values[:-1], h if how.keeps == "out" else None, *sums]

    made: tuple[Tensor, list[Any]] = on_cuda().call_again(("layers", keep), x, call, long)
    return made


def _backward(
    call: ValueCall, g: Tensor, x: Given, saved: Sequence[Any], keep: bool, needs: Sequence[bool]
) -> list[Any]:  # fmt: skip
    """Return the gradient of each operand, None where it is not needed."""
    values, sums = saved[: len(saved) // 2], saved[len(saved) // 2 :]

    def long() -> list[Any]:
        points, weights, biases = call.apart(own_values_of(x))
        first, *wanted = call.apart(needs)
        ways, grad = _ways(call, x, keep), own_values(g)
        groups: list[list[Any]] = [[None] * len(weights) for _ in range(2)]
        for i in range(len(weights) - 1, -1, -1):
            how = ways[i]
            below = first or any(any(group[:i]) for group in wanted)
            named = zip(("a", "b", "bias"), (below, wanted[0][i], wanted[1][i]), strict=True)
            asked = tuple([name for name, need in named if need])
            if not asked:
                return [None, *groups[0], *groups[1]]
            kept = {"pre": sums[i], "out": values[i]}.get(how.keeps)
            b = weights[i].t() if how.flipped else weights[i]
            operands = grad, values[i - 1] if i else points, b, biases[i], kept
            rest = how.slope or _NONE, FLAGS, asked, how.backend, (2,) * how.flipped
            grad, d_b, groups[1][i] = run(LAYER_BACKWARD, operands, *rest)
            groups[0][i] = d_b.t() if how.flipped and d_b is not None else d_b
        return [grad if first else None, *groups[0], *groups[1]]

    asked = "layers backward", keep, tuple(needs)
    found: list[Any] = on_cuda().call_again(asked, [g, *x, *saved], call, long)
    return found


class _Layers(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *x, ctx.call = args
        ctx.keep = not recomputes()
        made, saved = _forward(ctx.call, x, ctx.keep)
        ctx.save_for_backward(*x, *saved)
        return made

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        call, count = ctx.call, len(ctx.call.activations)
        x, saved = ctx.saved_tensors[: -2 * count], ctx.saved_tensors[-2 * count :]
        small = is_small(x[0], max(x[1 : 1 + count], key=Tensor.numel))
        needs = asked_of_network(ctx, x, 1, small)
        if not any(needs):
            found: list[Any] = [None] * len(x)
        elif torch.is_grad_enabled() or mode((g,)) != 1:
            found = by_layers(call, g, x, needs)
        else:
            found = _backward(call, g, x, saved, ctx.keep, needs)
        return *found, None


#: As `apply`, without PyTorch's preparations for torch.func, which `mode` has excluded.
apply_layers: Callable[..., Any] = super(Function, _Layers).apply
