"""Networks' values of tensors as one node, whose backward is one, differentiable again.

Each is one call of the core. Beyond the second derivative, under torch.func and in programs of
torch.compile the layers are nodes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from numfuse.adapters.perceptrons import value_call
from numfuse.adapters.torch import replayed_networks, saved
from numfuse.adapters.torch.device_perceptrons import again_on_device, on_device
from numfuse.adapters.torch.eager import asked_of_network, mode
from numfuse.adapters.torch.kept import recomputes
from numfuse.adapters.torch.layered_perceptrons import by_layers, twice_by_layers
from numfuse.adapters.torch.tensors import (
    array_over,
    arrays_over,
    autocasts,
    run_beside,
    to_tensors,
)
from numfuse.chains import Chain


def perceptron(chain: Chain) -> Tensor | None:
    """Return a network's value; None where its layers are operations of their own."""
    if torch.compiler.is_compiling():
        return None
    tensors = [chain.x, *(y for w, bias, _ in chain.layers for y in (w, bias))]
    how = mode(tensors)
    if not how or autocasts(chain.x):
        return None
    if not chain.x.is_cpu:
        return on_device(chain) if how == 2 else None
    found = value_call(chain)
    if found is None:
        return None
    call, operands = found
    known = replayed_networks.KnownNetwork(operands, call.backend)
    made: Tensor
    if how == 2:
        made = _apply_value(*operands, call, known)
    else:
        made, _ = known.forward(call, operands, False)
    return made


def perceptron_again(
    x: Tensor, weights: Any, biases: Any, activation: Any, final: Any, backend: Any
) -> Tensor | None:
    """Return the value of a network, the forms of whose tensors came before; or None."""
    how = activation, final, backend
    if x.is_cuda:
        return again_on_device(x, weights, biases, *how)
    return replayed_networks.again(x, weights, biases, *how, _apply_value)


# --- on the CPU -----------------------------------------------------------------------------------
class _Value(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *x, ctx.call, ctx.known = args
        made, kept = ctx.known.forward(ctx.call, x, not recomputes())
        ctx.form, *own = saved.tensors_of(kept)
        ctx.save_for_backward(*x, *own)
        return made

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        call, known = ctx.call, ctx.known
        count = 1 + 2 * len(call.activations)
        x, own = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needs = asked_of_network(ctx, x, 1, known.small)
        if not any(needs):
            return (None,) * (len(x) + 2)
        kept = saved.kept_again(ctx.form, own, g)
        if not mode((g,)):
            found = by_layers(call, g, x, needs)
        elif torch.is_grad_enabled():
            made = iter(_apply_gradients(g, *x, call, known, needs, kept))
            found = [next(made) if need else None for need in needs]
        else:
            found = known.backward(call, g, x, needs, kept)
        return *found, None, None


class _Gradients(Function):
    """A network's gradients, where they are to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        g, *x, ctx.call, ctx.known, ctx.made, kept = args
        ctx.save_for_backward(g, *x)
        ctx.set_materialize_grads(False)
        found = ctx.known.backward(ctx.call, g, x, ctx.made, kept)
        return tuple([y for y in found if y is not None])

    @staticmethod
    def backward(ctx: Any, *us: Any) -> Any:
        (g, *x), call = ctx.saved_tensors, ctx.call
        needs = asked_of_network(ctx, (g, *x), 2, ctx.known.small)
        there = [u for u in us if u is not None]
        if not there or not any(needs):
            return (None,) * (len(needs) + 4)
        if torch.is_grad_enabled() or not mode(there):
            return *twice_by_layers(call, us, g, x, ctx.made, needs), *(None,) * 4
        given = iter(us)
        cotangents = [next(given) if made else None for made in ctx.made]
        arrays = arrays_over(cotangents), array_over(g), arrays_over(x)
        return *to_tensors(run_beside(call.twice, *arrays, needs)), *(None,) * 4


#: As `apply`, without PyTorch's preparations for torch.func, which `mode` has excluded.
_apply_value: Callable[..., Any] = super(Function, _Value).apply
_apply_gradients: Callable[..., Any] = super(Function, _Gradients).apply
