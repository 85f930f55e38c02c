"""Jets of layers and networks of tensors: one node (in programs of torch.compile: `compiled_jets`).

A node's backward is one call of the core, which takes what the forward has kept. What is to be
differentiated again, torch.func and forward mode go the plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from numfuse.adapters.jets import (
    Constants,
    FusedFormulas,
    JetCall,
    NetworkCall,
    layer_call,
    network_entry,
)
from numfuse.adapters.torch import eager, saved, tensors
from numfuse.adapters.torch.forms import Forms
from numfuse.adapters.torch.kept import recomputes
from numfuse.adapters.torch.operators import on_cuda
from numfuse.adapters.torch.replayed import loaded
from numfuse.adapters.torch.replayed_networks import KnownJet, flat_call
from numfuse.adapters.torch.tensors import (
    arrays_over,
    autocast,
    autocasts,
    checked,
    own_values_of,
    run_beside,
    to_tensor,
)
from numfuse.repeats import content

_WHAT = "PyTorch's autograd, transformations, modes and tracing"


# --- at once --------------------------------------------------------------------------------------
def _is_on_a_gpu(x: Iterable[Any]) -> bool:
    """Return whether operands are tensors of a GPU, of which nothing but the call is asked."""
    tensors = [y for y in x if isinstance(y, Tensor)]
    first = tensors[0] if tensors else None
    return first is not None and first.is_cuda and not autocasts(first) and eager.mode(tensors) == 1


#: Operands have their dtype already; the core's functions come to `layer` and `network` again.
_as_they_are = partial(torch.autocast, "cuda", enabled=False)


def _on_a_gpu(
    call: NetworkCall, grads: Any, x: Sequence[Any], constants: Constants, keep: Any,
    needs: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Return a network's results and what is kept, or with cotangents the gradients."""

    def long() -> Any:
        groups = call.apart(own_values_of(x))
        given = None if grads is None else own_values_of(grads)
        return on_cuda().network_once(given, *groups, call.how, constants, keep, needs)

    return on_cuda().jet_again(call, grads, x, constants, keep, needs, long)


def forward(call: JetCall, x: Sequence[Any], constants: Constants, keep: bool) -> Any:
    """Return the results as tensors, and what is kept."""
    if x[0].is_cuda:
        if isinstance(call, NetworkCall):
            found = _on_a_gpu(call, None, x, constants, keep)
            return found if keep else (found, None)
        with _as_they_are():
            return call.forward(own_values_of(x), constants, keep)
    found, kept = run_beside(call.forward, arrays_over(x), constants, keep)
    return [to_tensor(y) for y in found], kept


def backward(
    call: JetCall,
    grads: Sequence[Any],
    x: Sequence[Any],
    constants: Constants,
    needs: Sequence[bool],
    kept: Any,
) -> list[Any]:
    """Return the gradient of each operand, None where it is not needed."""
    if x[0].is_cuda:
        if isinstance(call, NetworkCall):
            found = _on_a_gpu(call, grads, x, constants, kept, call.groups(needs))
            return call.flat(found, needs)
        with _as_they_are():
            return call.backward(own_values_of(grads), own_values_of(x), constants, needs, kept)
    arrays = arrays_over(grads), arrays_over(x)
    found = run_beside(call.backward, *arrays, constants, needs, kept)
    return [None if d is None else to_tensor(d) for d in found]


# --- the plain way --------------------------------------------------------------------------------
class _Ops(FusedFormulas):
    """Operations on tensors, of which the plain way is made."""

    matmul = staticmethod(torch.matmul)
    broadcast_to = staticmethod(torch.broadcast_to)

    def constant(self, x: Any, like: Any) -> Any:
        return torch.as_tensor(x, dtype=like.dtype, device=like.device)


def plain(call: JetCall, x: Sequence[Any], constants: Constants) -> tuple[Any, ...]:
    return call.plain(_Ops(call.backend), x, constants)


def _plain_backward(
    call: JetCall,
    grads: Sequence[Any],
    x: Sequence[Any],
    constants: Constants,
    needs: Sequence[bool],
) -> list[Any]:
    """Return the gradients of a forward's operands, with derivatives of their own."""
    with torch.enable_grad():
        # (an operand that comes twice has a gradient for each of its places)
        own: list[Any] = [None if y is None else y.view_as(y) for y in x]
        for i, need in enumerate(needs):
            if need and not own[i].requires_grad:
                own[i].requires_grad_()
        pairs = zip(plain(call, own, constants), grads, strict=True)
        there = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
        wanted = [y for y, need in zip(own, needs, strict=True) if need]
        found: Any = (None,) * len(wanted)
        if there:
            ys, gs = zip(*there, strict=True)
            found = torch.autograd.grad(ys, wanted, gs, create_graph=True, allow_unused=True)
        made = [torch.zeros_like(y) if d is None else d for y, d in zip(wanted, found, strict=True)]
    rest = iter(made)
    return [next(rest) if need else None for need in needs]


# --- nodes ----------------------------------------------------------------------------------------
class _Node(Function):
    @staticmethod
    def forward(ctx: Any, call: JetCall, constants: Constants, known: Any, *x: Any) -> Any:
        found, kept = None if known is None else known.jet(call, x), None
        if found is None:
            found, kept = forward(call, x, constants, not recomputes())
        form, *own = saved.tensors_of(kept)
        ctx.how = call, constants, known, len(x), form
        ctx.save_for_backward(*x, *own)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        call, constants, known, count, form = ctx.how
        x, own = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needs = ctx.needs_input_grad[3:]
        there = [g for g in gs if g is not None]
        if not there:
            return (None,) * (3 + len(x))
        found = None
        if torch.is_grad_enabled() or eager.mode(there) != 1:
            found = _plain_backward(call, gs, x, constants, needs)
        elif known is not None and not own:
            found = known.jet_backward(call, gs, x, needs)
        if found is None:
            kept = saved.kept_again(form, own, x[0])
            found = backward(call, gs, x, constants, needs, kept)
        return None, None, None, *found


#: As `apply`, without PyTorch's preparations for torch.func, which `mode` has excluded.
_apply_node: Callable[..., Any] = super(Function, _Node).apply


def _lasting(call: JetCall, x: Sequence[Any]) -> JetCall:
    """Return a call with the backend that its backward has, too."""
    backend = eager.lasting(call.backend, x[0])
    return call if backend is call.backend else replace(call, backend=backend)


def _run(call: JetCall, x: Sequence[Any], constants: Constants, keep: bool) -> Any:
    """Return a jet of tensors, and what is kept where that is asked for."""
    checked(**dict(zip(call.names, x, strict=True)))
    x = autocast(*x)
    how = 0 if torch.compiler.is_compiling() else eager.mode(x)
    if keep:
        if how != 1:
            raise ValueError(f"keep must be False under {_WHAT}, which keep what they need")
        found, kept = forward(call, x, constants, True)
        return call.result(*found), kept
    if how == 1:
        found, _ = forward(call, x, constants, False)
    elif how == 2:
        found = _apply_node(_lasting(call, x), constants, None, *x)
    else:
        found = plain(call, x, constants)
    return call.result(*found)


def _run_backward(
    call: JetCall,
    grads: Sequence[Any],
    x: Sequence[Any],
    constants: Constants,
    kept: Any,
    needs: Sequence[str],
) -> Any:
    """Return the gradients of a jet's operands, as the public function has them."""
    names = "grad", "grad_dot", "grad_ddot"
    checked(**dict(zip(call.names, x, strict=True)), **dict(zip(names, grads, strict=True)))
    pairs = zip(call.wanted(needs), x, strict=True)
    wanted = [need and y is not None for need, y in pairs]
    if eager.mode([*grads, *x]) == 1:
        found = backward(call, grads, x, constants, wanted, kept)
    else:
        found = _plain_backward(call, grads, x, constants, wanted)
    return call.gradients(found, needs)


# --- calls of the public functions ----------------------------------------------------------------
def array(x: float, like: Any) -> Tensor:
    return torch.tensor(x, dtype=None if like is None else like.dtype)


def layer(
    operation: Any, operands: Sequence[Any], activation: Any, flags: Sequence[Any], needs: Any,
    out: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run an operation of a layer's jet, or of a formula's."""
    if _is_on_a_gpu(operands):
        return on_cuda().jet(operation, operands, activation, flags, needs, out, backend)
    how = operation, operands, activation, flags, out, backend
    call, grads, x, constants, keep = layer_call(*how, _WHAT, array)
    if grads:
        kept = operands[-3:] if operands[-3] is not None else None
        return _run_backward(call, grads, x, constants, kept, needs)
    found = _run(call, x, constants, keep)
    return (*found[0], *found[1]) if keep else found


_network = network_entry(_run, _run_backward, _WHAT)


def network(grads: Any, x: Any, weights: Any, biases: Any, *rest: Any) -> Any:
    """Run a network's jet, or with cotangents its backward; see `numfuse.adapters.stacks`."""
    given = biases if isinstance(biases, Sequence) else ()
    if grads is None:
        found = _network_again(x, weights, biases, *rest)
        if found is not None:
            return found
    if _is_on_a_gpu([x, *weights, *given, *(grads or ())]):
        return on_cuda().network(grads, x, weights, biases, *rest)
    return _network(grads, x, weights, biases, *rest)


#: How networks go, as `eager.mode` says, and what knows them, on the CPU.
_KNOWN = Forms()


def _network_again(
    x: Any, weights: Any, biases: Any, how: tuple[Any, ...], constants: Constants, keep: Any,
    needs: Any, out: Any = None,
) -> Any:  # fmt: skip
    """Return a network's jet, of tensors whose forms came before: else, and of others, None.

    Of a GPU's these are nodes.
    """
    if torch.compiler.is_compiling() or keep or out is not None or not isinstance(x, Tensor):
        return None
    if not (x.is_cpu or x.is_cuda) or tensors.watched() or autocasts(x):
        return None
    activation, final, guard, backend = how
    given = flat_call(x, weights, biases, activation, final)
    if given is None:
        return None
    operands, functions = given
    backend = eager.lasting(backend, x) if x.is_cuda else loaded(backend)
    call = NetworkCall(functions, bool(guard), backend)
    asked: tuple[Any, ...] = call.mark, None
    if not x.is_cuda:
        if backend is None or not all(y is None or type(y) is np.ndarray for y in constants):
            return None  # (it is yet to be loaded, or a constant has no key)
        asked = call.mark, backend, *map(content, constants)
    found = _KNOWN.find(asked, operands)
    if found is None:
        mode = eager.mode(operands)
        if not mode or (x.is_cuda and mode == 1):
            return None
        result = _run(call, operands, constants, False)
        on_cpu = x.is_cpu

        def record() -> Any:
            return mode, KnownJet(operands, backend, asked[2:]) if on_cpu else None

        _KNOWN.keep(asked, operands, record)
        return result
    mode, known = found
    if mode == 2:
        return call.result(*_apply_node(call, constants, known, *operands))
    made = known.jet(call, operands)
    return _run(call, operands, constants, False) if made is None else call.result(*made)
