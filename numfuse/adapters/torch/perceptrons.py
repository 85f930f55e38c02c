"""Networks' values of tensors as one node, whose backward is one, differentiable again.

Each is one call of the core; on a GPU, one launch where a kernel runs such a network. Beyond the
second derivative (on a GPU the first), under torch.func and in programs of torch.compile the layers
are nodes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from numfuse.activations import get
from numfuse.adapters.perceptrons import ValueCall, value_call
from numfuse.adapters.torch import replayed_networks
from numfuse.adapters.torch.eager import is_asked, mode
from numfuse.adapters.torch.jets import KeptValue, kept_of
from numfuse.adapters.torch.kept import recomputes
from numfuse.adapters.torch.operators import on_cuda
from numfuse.adapters.torch.tensors import (
    array_over,
    arrays_over,
    autocasts,
    own_values,
    run_beside,
    to_tensors,
)
from numfuse.chains import Chain

_Given = Sequence[Tensor | None]


def perceptron(chain: Chain) -> Tensor | None:
    """Return a network's value; None where its layers are operations of their own."""
    if torch.compiler.is_compiling():
        return None
    tensors = [chain.x, *(y for w, bias, _ in chain.layers for y in (w, bias))]
    how = mode(tensors)
    if not how or autocasts(chain.x):
        return None
    if not chain.x.is_cpu:
        return _on_device(chain) if how == 2 else None
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
    """Return the value of a network on the CPU, the forms of which came before; or None."""
    how = activation, final, backend
    return replayed_networks.again(x, weights, biases, *how, _apply_value)


# --- on a GPU -------------------------------------------------------------------------------------
def perceptron_at_once(
    grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...], needs: Sequence[str],
    out: Any,
) -> Any:  # fmt: skip
    """Return the value, or the gradients that are needed, of tensors of which no more is asked.

    None: layers run them.
    """
    if torch.compiler.is_compiling() or not isinstance(x, Tensor) or not x.is_cuda:
        return None
    tensors = [x, *weights, *(biases or ()), *(() if grad is None else (grad,))]
    if mode(tensors) != 1 or autocasts(x):
        return None
    return _serve(grad, x, weights, biases, how, needs, out)


def perceptron_along(
    x_dot: Any, grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
    needs: Sequence[str],
) -> Any:  # fmt: skip
    """Return the value and its tangent along one of the points, or the gradients of that.

    None: layers run them. No more may be asked of the tensors.
    """
    if torch.compiler.is_compiling() or not isinstance(x, Tensor) or not x.is_cuda:
        return None
    tensors = [x_dot, x, *weights, *(biases or ()), *(() if grad is None else (grad,))]
    if mode(tensors) != 1 or autocasts(x):
        return None
    return _serve_along(x_dot, grad, x, weights, biases, how, needs)


def perceptron_is_whole(x: Any, weights: Any, biases: Any, how: tuple[Any, ...]) -> bool:
    """Return whether one kernel makes the value of such tensors, and one the gradients."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor) or not x.is_cuda:
        return False
    # (of the others nothing but shapes and dtypes is read)
    found: bool = on_cuda().perceptron_is_whole(own_values(x), weights, biases, how)
    return found


def repeated(
    chain: Chain, others: Iterable[Any], options: tuple[Any, ...], long: Callable[[], Any]
) -> Any:
    """Return what `long` does with a chain's layers: as one program, if they come again."""
    tensors = [chain.x, *(y for w, bias, _ in chain.layers for y in (w, bias)), *others]
    if torch.compiler.is_compiling() or not isinstance(chain.x, Tensor) or not chain.x.is_cuda:
        return long()
    if mode(tensors) != 1 or autocasts(chain.x):
        return long()
    return on_cuda().repeated(chain, others, options, long)


def _serve(grad: Any, x: Any, weights: Any, biases: Any, *rest: Any) -> Any:
    """Return what one kernel makes; None where there is none for such a network."""
    groups = [None if y is None else _detached(y) for y in (weights, biases)]
    own = None if grad is None else own_values(grad)
    return on_cuda().perceptron_at_once(own, own_values(x), *groups, *rest)


def _serve_along(x_dot: Any, grad: Any, x: Any, weights: Any, biases: Any, *rest: Any) -> Any:
    """Return what kernels make of a tangent; None where there is none for such a network."""
    groups = [None if y is None else _detached(y) for y in (weights, biases)]
    own = None if grad is None else own_values(grad)
    return on_cuda().perceptron_along(own_values(x_dot), own, own_values(x), *groups, *rest)


def _detached(x: _Given) -> list[Any]:
    return [None if y is None else own_values(y) for y in x]


def _on_device(chain: Chain) -> Tensor | None:
    """Return the value as one node; None where no kernel runs the network or its backward."""
    weights, biases, activations = zip(*chain.layers, strict=True)
    call = ValueCall(tuple(map(get, activations)), chain.guard, chain.backend)
    there = [y for y in (chain.x, *weights, *biases) if y is not None]
    if any(y.dtype != chain.x.dtype or y.device != chain.x.device for y in there):
        return None
    if not perceptron_is_whole(chain.x, weights, biases, _how(call)):
        return None
    made: Tensor = _apply_on_device(chain.x, *weights, *biases, call)
    return made


def _groups(call: ValueCall, weights: _Given, biases: _Given) -> tuple[Any, ...]:
    return _detached(weights), _detached(biases), _how(call)


def _how(call: ValueCall) -> tuple[Any, ...]:
    return call.activations[:-1], call.activations[-1], call.guard, call.backend


class _DeviceValue(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, ctx.call = args
        ctx.save_for_backward(*operands)
        x, weights, biases = ctx.call.apart(operands)
        made: Tensor = _serve(None, x, *_groups(ctx.call, weights, biases), (), None)
        return made

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, call = ctx.saved_tensors, ctx.call
        needs = list(ctx.needs_input_grad[:-1])
        found = None
        if not torch.is_grad_enabled() and mode((g,)) == 1:
            points, weights, biases = call.apart(x)
            rest = *_groups(call, weights, biases), call.groups(needs), None
            found = _serve(g, points, *rest)
            found = None if found is None else call.flat(found, needs)
        elif torch.is_grad_enabled() and mode((g, *x)) == 2 and all(y.ndim < 3 for y in _there(x)):
            made = iter(_apply_on_device_again(g, *x, call, needs))
            found = [next(made) if need else None for need in needs]
        if found is None:
            found = _by_layers(call, g, x, needs)
        return *found, None


def _there(x: _Given) -> list[Tensor]:
    return [y for y in x if y is not None]


class _DeviceGradients(Function):
    """The gradients of a single network, where they are to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        g, *x, ctx.call, ctx.made = args
        ctx.save_for_backward(g, *x)
        ctx.set_materialize_grads(False)
        points, weights, biases = ctx.call.apart(x)
        rest = *_groups(ctx.call, weights, biases), ctx.call.groups(ctx.made), None
        found = _serve(g, points, *rest)
        if found is None:
            with torch.no_grad():
                made = _by_layers(ctx.call, g, [_detach(y) for y in x], ctx.made)
        else:
            made = ctx.call.flat(found, ctx.made)
        return tuple([_detach(y) for y in made if y is not None])

    @staticmethod
    def backward(ctx: Any, *us: Any) -> Any:
        (g, *x), call, made = ctx.saved_tensors, ctx.call, ctx.made
        needs = list(ctx.needs_input_grad[:-2])
        if all(u is None for u in us) or not any(needs):
            return (None,) * (len(needs) + 2)
        alone = made[0] and us[0] is not None and all(u is None for u in us[1:])
        found = None
        if alone and not torch.is_grad_enabled() and mode((us[0],)) == 1:  # x alone moves
            points, weights, biases = call.apart(x)
            wanted = ("grad",) * needs[0] + call.groups(needs[1:])
            rest = *_groups(call, weights, biases), wanted
            found = _serve_along(us[0], g, points, *rest)
        if found is None:
            return *_twice_by_layers(call, us, g, x, made, needs), None, None
        d_grad, *others = found
        return d_grad if needs[0] else None, *call.flat(others, needs[1:]), None, None


def _detach(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


_apply_on_device: Callable[..., Any] = super(Function, _DeviceValue).apply
_apply_on_device_again: Callable[..., Any] = super(Function, _DeviceGradients).apply


# --- on the CPU -----------------------------------------------------------------------------------
def _asked(ctx: Any, x: _Given, alone: int) -> list[bool]:
    """Return which gradients a backward is asked for, where the node requires them.

    So many operands are asked about by themselves, behind them one parameter for all of them: their
    products are made together, and a question may take as long as one. Where a network is small, it
    takes longer than all.
    """
    needs = list(ctx.needs_input_grad[: len(x)])
    if ctx.known.small and not torch.is_grad_enabled():
        return needs
    for i in range(alone):
        needs[i] = needs[i] and is_asked(ctx, i, x)
    flagged = [i for i in range(alone, len(x)) if needs[i]]
    if flagged and not is_asked(ctx, flagged[0], x):
        for i in flagged:
            needs[i] = i > flagged[0] and is_asked(ctx, i, x)
    return needs


class _Value(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *x, ctx.call, ctx.known = args
        made, kept = ctx.known.forward(ctx.call, x, not recomputes())
        ctx.save_for_backward(*x, None if kept is None else KeptValue(kept).ticket())
        return made

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (*x, ticket), call, known = ctx.saved_tensors, ctx.call, ctx.known
        needs = _asked(ctx, x, 1)
        if not any(needs):
            return (None,) * (len(x) + 2)
        if not mode((g,)):
            found = _by_layers(call, g, x, needs)
        elif torch.is_grad_enabled():
            made = iter(_apply_gradients(g, *x, call, known, needs, kept_of(ticket)))
            found = [next(made) if need else None for need in needs]
        else:
            found = known.backward(call, g, x, needs, kept_of(ticket))
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
        needs = _asked(ctx, (g, *x), 2)
        there = [u for u in us if u is not None]
        if not there or not any(needs):
            return (None,) * (len(needs) + 4)
        if torch.is_grad_enabled() or not mode(there):
            return *_twice_by_layers(call, us, g, x, ctx.made, needs), *(None,) * 4
        given = iter(us)
        cotangents = [next(given) if made else None for made in ctx.made]
        arrays = arrays_over(cotangents), array_over(g), arrays_over(x)
        return *to_tensors(run_beside(call.twice, *arrays, needs)), *(None,) * 4


#: As `apply`, without PyTorch's preparations for torch.func, which `mode` has excluded.
_apply_value: Callable[..., Any] = super(Function, _Value).apply
_apply_gradients: Callable[..., Any] = super(Function, _Gradients).apply


# --- by layers ------------------------------------------------------------------------------------
def _pulled(
    results: Sequence[Any], cotangents: Sequence[Any], operands: _Given, needs: Sequence[bool]
) -> list[Any]:
    """Return gradients that have derivatives of their own, None where one is not needed."""
    wanted: list[Any] = [y for y, need in zip(operands, needs, strict=True) if need]
    pairs = [(y, u) for y, u in zip(results, cotangents, strict=True) if u is not None]
    there = [(y, u) for y, u in pairs if y is not None and y.requires_grad]
    made: Any = (None,) * len(wanted)
    if there:
        how: Any = {"create_graph": True, "allow_unused": True}
        ys, gs = zip(*there, strict=True)
        made = torch.autograd.grad(ys, wanted, gs, **how)
    rest = iter(made)
    return [next(rest) if need else None for need in needs]


def _own(x: _Given, needs: Sequence[bool]) -> list[Any]:
    """Return views of operands, of which those that are needed require a gradient.

    An operand that comes twice has a gradient for each of its places.
    """
    own = [None if y is None else y.view_as(y) for y in x]
    for y, need in zip(own, needs, strict=True):
        if need and y is not None and not y.requires_grad:
            y.requires_grad_()
    return own


def _by_layers(call: ValueCall, g: Any, x: _Given, needs: Sequence[bool]) -> list[Any]:
    """Return the gradients of the layers one after another."""
    with torch.enable_grad():
        own = _own(x, needs)
        return _pulled([call.plain(own)], [g], own, needs)


def _twice_by_layers(
    call: ValueCall, us: Sequence[Any], g: Any, x: _Given, made: Sequence[bool],
    needs: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Return the gradients of the gradients that were `made` of the layers."""
    with torch.enable_grad():
        own = _own((g, *x), needs)
        found = _by_layers(call, own[0], own[1:], made)
        there = [d for d, was in zip(found, made, strict=True) if was]
        return _pulled(there, us, own, needs)
