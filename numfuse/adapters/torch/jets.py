"""Jets of layers and networks of tensors: one node, in eager mode and in programs of torch.compile.

A node's backward is one call of the core, which takes what the forward has kept. What is to be
differentiated again, torch.func and forward mode go the plain way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from numfuse import definitions, epilogue_jets, jets, networks
from numfuse.activations import get
from numfuse.adapters.jets import (
    RESULTS,
    Constants,
    FormulaCall,
    FusedFormulas,
    JetCall,
    LayerCall,
    NetworkCall,
    layer_call,
    network_call,
    network_entry,
)
from numfuse.adapters.stacks import Kept
from numfuse.adapters.torch import eager, tensors
from numfuse.adapters.torch.compiled import follows
from numfuse.adapters.torch.forms import Forms
from numfuse.adapters.torch.kept import recomputes
from numfuse.adapters.torch.keys import backend_key, backend_of, formula_key, key_of
from numfuse.adapters.torch.operators import BY_NAME, in_graph, on_cuda
from numfuse.adapters.torch.replayed_networks import KnownJet, flat_call, loaded
from numfuse.adapters.torch.tensors import (
    arrays_over,
    autocast,
    autocasts,
    checked,
    own_values,
    run_beside,
    to_tensor,
)
from numfuse.kept import Kept as KeptOnHost
from numfuse.problem.results import LayerJet, NetworkJet
from numfuse.repeats import content

_WHAT = "PyTorch's autograd, transformations, modes and tracing"
_LIBRARY = torch.library.Library("numfuse", "FRAGMENT")
_OPERATORS = torch.ops.numfuse
_FORM = 1


# --- what a forward keeps -------------------------------------------------------------------------
class KeptValue:
    """A value that a backward takes, for as long as its ticket lives.

    A ticket is a tensor of one number: PyTorch saves it, and drops it with its graph. Where it has
    become another tensor (on another device, in a file), the backward makes the forward again.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._number = np.array([next(_numbers)])
        self.__array_interface__ = self._number.__array_interface__

    def ticket(self) -> Tensor:
        """Return the value's ticket."""
        _KEPT[int(self._number[0])] = self
        return torch.from_numpy(np.asarray(self))


_numbers = itertools.count(1)
_KEPT: WeakValueDictionary[int, KeptValue] = WeakValueDictionary()


def kept_of(ticket: Any) -> Any:
    """Return the value of a ticket; None where there is none, or no value any more."""
    found = None if ticket is None else _KEPT.get(int(ticket[0]))
    return None if found is None else found.value


# --- at once --------------------------------------------------------------------------------------
def _is_on_a_gpu(x: Iterable[Any]) -> bool:
    """Return whether operands are tensors of a GPU, of which nothing but the call is asked."""
    tensors = [y for y in x if isinstance(y, Tensor)]
    first = tensors[0] if tensors else None
    return first is not None and first.is_cuda and not autocasts(first) and eager.mode(tensors) == 1


def _detached(x: Sequence[Any]) -> list[Any]:
    return [None if y is None else own_values(y) for y in x]


#: Operands have their dtype already; the core's functions come to `layer` and `network` again.
_as_they_are = partial(torch.autocast, "cuda", enabled=False)


def _on_a_gpu(
    call: NetworkCall, grads: Any, x: Sequence[Any], constants: Constants, keep: Any,
    needs: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Return a network's results and what is kept, or with cotangents the gradients."""

    def long() -> Any:
        groups = call.apart(_detached(x))
        how = call.activations[:-1], call.activations[-1], call.guard, call.backend
        given = None if grads is None else _detached(grads)
        return on_cuda().network_once(given, *groups, how, constants, keep, needs)

    return on_cuda().jet_again(call, grads, x, constants, keep, needs, long)


def _forward(call: JetCall, x: Sequence[Any], constants: Constants, keep: bool) -> Any:
    """Return the results as tensors, and what is kept."""
    if x[0].is_cuda:
        if isinstance(call, NetworkCall):
            found = _on_a_gpu(call, None, x, constants, keep)
            return found if keep else (found, None)
        with _as_they_are():
            return call.forward(_detached(x), constants, keep)
    found, kept = run_beside(call.forward, arrays_over(x), constants, keep)
    return [to_tensor(y) for y in found], kept


def _backward(
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
            return call.backward(_detached(grads), _detached(x), constants, needs, kept)
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


def _plain(call: JetCall, x: Sequence[Any], constants: Constants) -> tuple[Any, ...]:
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
        pairs = zip(_plain(call, own, constants), grads, strict=True)
        there = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
        wanted = [y for y, need in zip(own, needs, strict=True) if need]
        found: Any = (None,) * len(wanted)
        if there:
            ys, gs = zip(*there, strict=True)
            found = torch.autograd.grad(ys, wanted, gs, create_graph=True, allow_unused=True)
        made = [torch.zeros_like(y) if d is None else d for y, d in zip(wanted, found, strict=True)]
    rest = iter(made)
    return [next(rest) if need else None for need in needs]


class _Apart:
    """The plain way as a program of torch.compile has it where torch.func is at work."""

    @staticmethod
    def apply(key: str, backend: str | None, constants: Constants, *x: Any) -> Any:
        return _plain(_call_of(key, backend), x, constants)


BY_NAME["jet"] = _Apart


# --- nodes ----------------------------------------------------------------------------------------
class _Node(Function):
    @staticmethod
    def forward(ctx: Any, call: JetCall, constants: Constants, known: Any, *x: Any) -> Any:
        found, kept = None if known is None else known.jet(call, x), None
        if found is None:
            found, kept = _forward(call, x, constants, not recomputes())
        own = _tensors_of(kept)
        ctx.how = call, constants, known, len(x), own[0]
        ctx.save_for_backward(*x, *own[1:])
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        call, constants, known, count, lengths = ctx.how
        saved = ctx.saved_tensors
        x, own = saved[:count], saved[count:]
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
            found = _backward(call, gs, x, constants, needs, _kept_again(lengths, own))
        return None, None, None, *found


#: As `apply`, without PyTorch's preparations for torch.func, which `mode` has excluded.
_apply_node: Callable[..., Any] = super(Function, _Node).apply


def _lasting(call: JetCall, x: Sequence[Any]) -> JetCall:
    """Return a call with the backend that its backward has, too."""
    backend = eager.lasting(call.backend, x[0])
    return call if backend is call.backend else replace(call, backend=backend)


def _tensors_of(kept: Any) -> list[Any]:
    """Return what PyTorch saves of what a forward kept, behind what says how it is put together."""
    if isinstance(kept, Kept):  # tensors
        lengths = len(kept.inputs), len(kept.sums)
        return [lengths, *kept.inputs, *kept.sums, kept.whole]
    if isinstance(kept, KeptOnHost) and not kept.inputs and kept.stacks is None:
        kept = None  # (it is made again)
    return [None] if kept is None else [None, KeptValue(kept).ticket()]


def _kept_again(lengths: Any, own: Sequence[Any]) -> Any:
    """Return what a forward kept, of what PyTorch saved."""
    if lengths is None:
        return kept_of(own[0]) if own else None
    first, count = lengths
    return Kept([*own[:first]], [*own[first : first + count]], own[-1])


def _run(call: JetCall, x: Sequence[Any], constants: Constants, keep: bool) -> Any:
    """Return a jet of tensors, and what is kept where that is asked for."""
    checked(**dict(zip(call.names, x, strict=True)))
    x = autocast(*x)
    how = 0 if torch.compiler.is_compiling() else eager.mode(x)
    if keep:
        if how != 1:
            raise ValueError(f"keep must be False under {_WHAT}, which keep what they need")
        found, kept = _forward(call, x, constants, True)
        return call.result(*found), kept
    if how == 1:
        found, _ = _forward(call, x, constants, False)
    elif how == 2:
        found = _apply_node(_lasting(call, x), constants, None, *x)
    else:
        found = _plain(call, x, constants)
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
        found = _backward(call, grads, x, constants, wanted, kept)
    else:
        found = _plain_backward(call, grads, x, constants, wanted)
    return call.gradients(found, needs)


# --- calls of the public functions ----------------------------------------------------------------
def _array(x: float, like: Any) -> Tensor:
    return torch.tensor(x, dtype=None if like is None else like.dtype)


def layer(
    operation: Any, operands: Sequence[Any], activation: Any, flags: Sequence[Any], needs: Any,
    out: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run an operation of a layer's jet, or of a formula's."""
    if _is_on_a_gpu(operands):
        return on_cuda().jet(operation, operands, activation, flags, needs, out, backend)
    how = operation, operands, activation, flags, out, backend
    call, grads, x, constants, keep = layer_call(*how, _WHAT, _array)
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
    call, known = NetworkCall(functions, bool(guard), backend), None
    asked: tuple[Any, ...] = call.mark, None
    if not x.is_cuda:
        if backend is None or not all(y is None or type(y) is np.ndarray for y in constants):
            return None  # (it is yet to be loaded, or a constant has no key)
        asked = call.mark, backend, *map(content, constants)
    found = _KNOWN.find(asked, operands)
    if found is not None:
        mode, known = found
    else:
        mode = eager.mode(operands)
        if not mode or (x.is_cuda and mode == 1):
            return None
    if mode == 2 and found is not None:
        return call.result(*_apply_node(call, constants, known, *operands))
    made = None if known is None else known.jet(call, operands)
    if made is not None:
        return call.result(*made)
    result = _run(call, operands, constants, False)
    if found is None:
        on_cpu = x.is_cpu

        def record() -> Any:
            return mode, KnownJet(operands, backend, asked[2:]) if on_cpu else None

        _KNOWN.keep(asked, operands, record)
    return result


# --- programs of torch.compile --------------------------------------------------------------------
_CALLS: dict[str, JetCall] = {}


@torch.compiler.assume_constant_result
def _layer_key(activation: Any, guard: bool) -> str:
    """Return a string that stands for a layer's call."""
    key = f"layer {key_of(activation)} {guard}"
    _CALLS.setdefault(key, LayerCall(get(activation), bool(guard), None))
    return key


@torch.compiler.assume_constant_result
def _formula_key(epilogue: Any, guard: bool) -> str:
    """Return a string that stands for a call of a formula's jet."""
    made = definitions.get(epilogue)
    key = f"formula {formula_key(made)} {guard}"
    _CALLS.setdefault(key, FormulaCall(made, bool(guard), None))
    return key


@torch.compiler.assume_constant_result
def _network_key(count: int, activation: Any, final: Any, guard: bool) -> str:
    """Return a string that stands for a network's call."""
    call, _ = network_call(None, (None,) * count, None, activation, final, guard, None)
    key = f"network {'|'.join(map(key_of, call.activations))} {guard}"
    _CALLS.setdefault(key, call)
    return key


def _call_of(key: str, backend: str | None) -> Any:
    found = _CALLS[key]
    return found if backend is None else replace(found, backend=backend_of(backend))


def _on_host(constants: Sequence[Any]) -> Any:
    return tuple([None if x is None else x.detach().numpy(force=True) for x in constants])


class _CompiledNode(Function):
    @staticmethod
    def forward(ctx: Any, key: str, backend: Any, constants: Any, keep: bool, *x: Any) -> Any:
        *found, ticket = _OPERATORS.jet_fwd(x, constants, key, keep, backend)
        ctx.rest = key, backend
        ctx.save_for_backward(*x, *constants, ticket)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        key, backend = ctx.rest
        *x, first, second, ticket = ctx.saved_tensors
        flags = ctx.needs_input_grad[4:]
        needs = "".join(["1" if flag else "0" for flag in flags])
        given = [*gs, *x, first, second, ticket]
        found = iter(_OPERATORS.jet_bwd(given, key, needs, backend))
        return None, None, None, None, *[next(found) if flag else None for flag in flags]


def _taken_apart(
    x: list[Any], constants: list[Any], key: str, keep: bool, form: int, backend: Any
) -> list[Tensor]:
    call = _call_of(key, backend)
    checked(**dict(zip(call.names, x, strict=True)))
    x = list(autocast(*x))
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x):
        return list(_CompiledNode.apply(key, backend, constants, keep, *x))
    return list(_OPERATORS.jet_fwd(x, constants, key, False, backend)[:RESULTS])


def _run_forward(
    x: list[Any], constants: list[Any], key: str, keep: bool, backend: Any
) -> list[Tensor]:
    found, kept = _forward(_call_of(key, backend), x, _on_host(constants), keep)
    ticket = KeptValue(kept).ticket() if keep else torch.zeros(1, dtype=torch.int64)
    return [*found, ticket]


def _run_pull(x: list[Any], key: str, needs: str, backend: Any) -> list[Tensor]:
    *given, first, second, ticket = x
    call, flags = _call_of(key, backend), [need == "1" for need in needs]
    constants = _on_host((first, second))
    how = constants, flags, kept_of(ticket)
    found = _backward(call, given[:RESULTS], given[RESULTS:], *how)
    return [d.contiguous() for d in found if d is not None]


def _results(
    x: list[Any], constants: list[Any], key: str, keep: bool, backend: Any
) -> list[Tensor]:
    call = _call_of(key, backend)
    made = [x[0].new_empty(shape) for shape in call.shapes(x, tuple(constants))]
    return [*made, torch.empty((1,), dtype=torch.int64)]  # (a ticket is on the host)


def _gradients(x: list[Any], key: str, needs: str, backend: Any) -> list[Tensor]:
    pairs = zip(x[RESULTS:], needs, strict=False)
    return [y.new_empty(y.shape) for y, need in pairs if need == "1"]


for _name, _given, _kernel, _on in (
    (
        "jet",
        "Tensor?[] x, Tensor?[] constants, str key, bool keep, int form",
        "CompositeImplicitAutograd",
        _taken_apart,
    ),
    (
        "jet_fwd",
        "Tensor?[] x, Tensor?[] constants, str key, bool keep",
        "CompositeExplicitAutograd",
        _run_forward,
    ),
    ("jet_bwd", "Tensor?[] x, str key, str needs", "CompositeExplicitAutograd", _run_pull),
):
    _LIBRARY.define(f"{_name}({_given}, str? backend) -> Tensor[]")
    _LIBRARY.impl(_name, _on, _kernel)
torch.library.register_fake("numfuse::jet_fwd", _results, lib=_LIBRARY)
torch.library.register_fake("numfuse::jet_bwd", _gradients, lib=_LIBRARY)


def _followed(key: str, x: Sequence[Any], constants: Sequence[Any], backend: Any) -> Any:
    given = [None if y is None else torch.as_tensor(y) for y in constants]
    where = None if backend is None else backend_key(backend)
    if follows():
        return _OPERATORS.jet(x, given, key, not recomputes(), _FORM, where)
    return in_graph("jet", key, where, tuple(given), *x)


def _refuse(keep: Any, out: Any) -> None:
    if keep or out is not None:
        raise ValueError("keep must be False and out None in a program of torch.compile")


@torch.compiler.substitute_in_graph(networks.mlp_jet)
def _mlp_jet(
    x: Any, weights: Any, biases: Any, activation: Any = "tanh", *, directions: Any = None,
    second: Any = None, final: Any = "none", keep: bool = False, guard: bool = True,
    out: Any = None, backend: Any = None,
) -> Any:  # fmt: skip
    _refuse(keep, out)
    count = len(weights)
    key = _network_key(count, activation, final, guard)
    operands = [x, *weights, *((None,) * count if biases is None else biases)]
    return NetworkJet(*_followed(key, operands, (directions, second), backend))


@torch.compiler.substitute_in_graph(jets.matmul_bias_activation_jet)
def _layer_jet(
    a: Any, b: Any, bias: Any, activation: Any, a_dot: Any, a_ddot: Any = None, *,
    weights: Any = None, keep: bool = False, guard: bool = True, out: Any = None,
    backend: Any = None,
) -> Any:  # fmt: skip
    _refuse(keep, out)
    key = _layer_key(activation, guard)
    operands = [a, b, bias, a_dot, a_ddot]
    return LayerJet(*_followed(key, operands, (None, weights), backend))


@torch.compiler.substitute_in_graph(epilogue_jets.matmul_epilogue_jet)
def _formula_jet(
    a: Any, b: Any, epilogue: Any, operands: Any, a_dot: Any, a_ddot: Any = None, *,
    weights: Any = None, keep: bool = False, guard: bool = True, out: Any = None,
    backend: Any = None,
) -> Any:  # fmt: skip
    _refuse(keep, out)
    own = [_array(y, a) if isinstance(y, (int, float)) else y for y in operands]
    key = _formula_key(epilogue, guard)
    return LayerJet(*_followed(key, [a, b, *own, a_dot, a_ddot], (None, weights), backend))
