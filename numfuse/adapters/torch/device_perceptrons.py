"""Networks' values of a GPU's tensors: one launch where a kernel runs such a network, one node.

Its backward is one launch and a join. Where that is differentiated again by the points alone, so is
the next; other second derivatives are those of the layers. Networks that no kernel runs are one
node, too (`chained_perceptrons`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from numfuse.activations import get
from numfuse.adapters.perceptrons import ValueCall
from numfuse.adapters.torch.chained_perceptrons import apply_layers, fits
from numfuse.adapters.torch.eager import lasting, mode
from numfuse.adapters.torch.forms import Forms
from numfuse.adapters.torch.layered_perceptrons import Given, by_layers, twice_by_layers
from numfuse.adapters.torch.operators import on_cuda
from numfuse.adapters.torch.replayed_networks import flat_call
from numfuse.adapters.torch.tensors import autocasts, own_values, own_values_of, watched
from numfuse.chains import Chain


def _is_alone(x: Any, others: Iterable[Any]) -> bool:
    """Return whether x is a tensor of a GPU, and nothing but a call is asked of it and others."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor) or not x.is_cuda:
        return False
    return mode([x, *others]) == 1 and not autocasts(x)


def perceptron_at_once(
    grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...], needs: Sequence[str],
    out: Any,
) -> Any:  # fmt: skip
    """Return the value, or the gradients that are needed, of tensors of which no more is asked.

    None: layers run them.
    """
    if not _is_alone(x, [*weights, *(biases or ()), grad]):
        return None
    return _serve(grad, x, weights, biases, how, needs, out)


def perceptron_along(
    x_dot: Any, grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
    needs: Sequence[str],
) -> Any:  # fmt: skip
    """Return the value and its tangent along one of the points, or the gradients of that.

    None: layers run them. No more may be asked of the tensors.
    """
    if not _is_alone(x, [x_dot, *weights, *(biases or ()), grad]):
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
    if not _is_alone(chain.x, [*(y for w, bias, _ in chain.layers for y in (w, bias)), *others]):
        return long()
    return on_cuda().repeated(chain, others, options, long)


def _serve(grad: Any, x: Any, weights: Any, biases: Any, *rest: Any) -> Any:
    """Return what one kernel makes; None where there is none for such a network."""
    groups = [None if y is None else own_values_of(y) for y in (weights, biases)]
    own = None if grad is None else own_values(grad)
    return on_cuda().perceptron_at_once(own, own_values(x), *groups, *rest)


def _serve_along(x_dot: Any, grad: Any, x: Any, weights: Any, biases: Any, *rest: Any) -> Any:
    """Return what kernels make of a tangent; None where there is none for such a network."""
    groups = [None if y is None else own_values_of(y) for y in (weights, biases)]
    own = None if grad is None else own_values(grad)
    return on_cuda().perceptron_along(own_values(x_dot), own, own_values(x), *groups, *rest)


# --- nodes ----------------------------------------------------------------------------------------
#: How a network of such tensors goes: 0 by layers; as its `mode` says where its value is one launch
#: and its gradients are one; `_CHAINED` as one node of all layers.
_KNOWN = Forms()
_CHAINED = 3


def again_on_device(
    x: Tensor, weights: Any, biases: Any, activation: Any, final: Any, backend: Any
) -> Tensor | None:
    """Return a network's value; None: it goes another way, which also says what is wrong.

    Of tensors whose forms came before nothing is asked but these.
    """
    if torch.compiler.is_compiling() or watched() or autocasts(x):
        return None
    given = flat_call(x, weights, biases, activation, final)
    if given is None:
        return None
    operands, functions = given
    backend = lasting(backend, x)
    call = ValueCall(functions, True, backend)
    asked = call.mark, backend, on_cuda().switches()
    how = _KNOWN.find(asked, operands)
    if how is None:
        how = mode(operands)
        if not how:  # (no plain tensors: these have no forms)
            return None
        checked = Chain("mlp", x, weights, biases, activation, final, True, backend)
        if whole_call(checked) is None:
            how = _CHAINED if how == 2 and fits(operands) else 0
        _KNOWN.keep(asked, operands, lambda: how)
    if not how:
        return None
    if how == 1:
        found: Tensor = _run(call, operands)
    else:
        found = (apply_layers if how == _CHAINED else _apply_value)(*operands, call)
    return found


def whole_call(chain: Chain) -> ValueCall | None:
    """Return a chain as the call of a node; None where no kernel runs it or its backward."""
    weights, biases, activations = zip(*chain.layers, strict=True)
    backend = lasting(chain.backend, chain.x)
    call = ValueCall(tuple(map(get, activations)), chain.guard, backend)
    there = [y for y in (chain.x, *weights, *biases) if y is not None]
    if any(y.dtype != chain.x.dtype or y.device != chain.x.device for y in there):
        return None
    return call if perceptron_is_whole(chain.x, weights, biases, call.how) else None


def on_device(chain: Chain) -> Tensor | None:
    """Return the value as one node; None where no kernel runs the network or its backward."""
    call = whole_call(chain)
    if call is None:
        return None
    weights, biases, _ = zip(*chain.layers, strict=True)
    made: Tensor = _apply_value(chain.x, *weights, *biases, call)
    return made


def _run(call: ValueCall, x: Given, g: Any = None, needs: tuple[str, ...] = ()) -> Any:
    """Return the value or, with a cotangent, the gradients that are needed; None: by layers."""

    def long() -> Any:
        return _serve(g, *call.apart(x), call.how, needs, None)

    return on_cuda().call_again(("value", needs), [*x, g], call, long)


def _run_along(call: ValueCall, x_dot: Tensor, g: Tensor, x: Given, needs: tuple[str, ...]) -> Any:
    """Return the gradients of g's product with the tangent along x_dot; None: by layers."""

    def long() -> Any:
        return _serve_along(x_dot, g, *call.apart(x), call.how, needs)

    return on_cuda().call_again(("along", needs), [*x, g, x_dot], call, long)


class _Value(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *x, ctx.call = args
        ctx.save_for_backward(*x)
        made: Tensor = _run(ctx.call, x)
        return made

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, call = ctx.saved_tensors, ctx.call
        needs = list(ctx.needs_input_grad[:-1])
        found = None
        if not torch.is_grad_enabled() and mode((g,)) == 1:
            found = _run(call, x, g, call.groups(needs))
            found = None if found is None else call.flat(found, needs)
        elif torch.is_grad_enabled() and mode((g, *x)) == 2 and all(y.ndim < 3 for y in _there(x)):
            made = iter(_apply_gradients(g, *x, call, needs))
            found = [next(made) if need else None for need in needs]
        if found is None:
            found = by_layers(call, g, x, needs)
        return *found, None


def _there(x: Given) -> list[Tensor]:
    return [y for y in x if y is not None]


class _Gradients(Function):
    """The gradients of a single network, where they are to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        g, *x, ctx.call, ctx.made = args
        ctx.save_for_backward(g, *x)
        ctx.set_materialize_grads(False)
        found = _run(ctx.call, x, g, ctx.call.groups(ctx.made))
        if found is None:
            with torch.no_grad():
                made = by_layers(ctx.call, g, [_detach(y) for y in x], ctx.made)
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
            wanted = ("grad",) * needs[0] + call.groups(needs[1:])
            found = _run_along(call, us[0], g, x, wanted)
        if found is None:
            return *twice_by_layers(call, us, g, x, made, needs), None, None
        d_grad, *others = found
        return d_grad if needs[0] else None, *call.flat(others, needs[1:]), None, None


def _detach(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


#: As `apply`, without PyTorch's preparations for torch.func, which `mode` has excluded.
_apply_value: Callable[..., Any] = super(Function, _Value).apply
_apply_gradients: Callable[..., Any] = super(Function, _Gradients).apply
