"""Jets of layers and networks of tensors in programs of torch.compile: operators, and one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from numfuse import definitions, epilogue_jets, jets, networks
from numfuse.activations import get
from numfuse.adapters.jets import (
    RESULTS,
    Constants,
    FormulaCall,
    JetCall,
    LayerCall,
    network_call,
)
from numfuse.adapters.torch import saved
from numfuse.adapters.torch.compiled import follows
from numfuse.adapters.torch.jets import array, backward, forward, plain
from numfuse.adapters.torch.kept import recomputes
from numfuse.adapters.torch.keys import backend_key, backend_of, formula_key, key_of
from numfuse.adapters.torch.operators import BY_NAME, in_graph
from numfuse.adapters.torch.tensors import autocast, checked
from numfuse.problem.results import LayerJet, NetworkJet

_LIBRARY = torch.library.Library("numfuse", "FRAGMENT")
_OPERATORS = torch.ops.numfuse
_FORM = 1

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


class _Apart:
    """The plain way as a program of torch.compile has it where torch.func is at work."""

    @staticmethod
    def apply(key: str, backend: str | None, constants: Constants, *x: Any) -> Any:
        return plain(_call_of(key, backend), x, constants)


BY_NAME["jet"] = _Apart


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
    found, kept = forward(_call_of(key, backend), x, _on_host(constants), keep)
    ticket = saved.KeptValue(kept).ticket() if keep else torch.zeros(1, dtype=torch.int64)
    return [*found, ticket]


def _run_pull(x: list[Any], key: str, needs: str, backend: Any) -> list[Tensor]:
    *given, first, second, ticket = x
    call, flags = _call_of(key, backend), [need == "1" for need in needs]
    constants = _on_host((first, second))
    how = constants, flags, saved.kept_of(ticket)
    found = backward(call, given[:RESULTS], given[RESULTS:], *how)
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
    own = [array(y, a) if isinstance(y, (int, float)) else y for y in operands]
    key = _formula_key(epilogue, guard)
    return LayerJet(*_followed(key, [a, b, *own, a_dot, a_ddot], (None, weights), backend))
