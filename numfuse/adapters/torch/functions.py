"""The public functions over PyTorch's tensors: by the operators, or at once where nothing watches.

An operator of PyTorch costs 50 us more than the call. It is for what is differentiated, traced or
transformed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from numfuse.activations import get
from numfuse.adapters.primitives import CORE, PRIMITIVES, How
from numfuse.adapters.signatures import of_module
from numfuse.adapters.surface import Functions
from numfuse.adapters.torch import compiled, eager
from numfuse.adapters.torch.compiled import call, follows
from numfuse.adapters.torch.eager import TENSORS
from numfuse.adapters.torch.epilogues import record
from numfuse.adapters.torch.kept import recomputes
from numfuse.adapters.torch.keys import key_of
from numfuse.adapters.torch.operators import on_cuda
from numfuse.adapters.torch.pieces import composite, dual
from numfuse.adapters.torch.rules import operators
from numfuse.adapters.torch.tensors import (
    autocast,
    autocasts,
    checked,
    in_dual_level,
    is_lazy,
    moves,
    own_values,
    run_beside,
    to_numpy,
    to_tensor,
    with_tensors,
)
from numfuse.functional import activation_mul
from numfuse.fused_operations import NUMBERS, FusedOperation
from numfuse.gated import layer
from numfuse.operations import OPERATIONS
from numfuse.problem.product import STORED

NONE = get("none")


class _Torch(Functions):
    """The public functions over the operators."""

    what = "PyTorch's autograd, transformations, modes and tracing"
    arrays = torch
    checked = staticmethod(checked)
    moves = staticmethod(moves)

    def __init__(self) -> None:
        self.operators = operators(self)

    def primitive(self, name: str, how: How, *operands: Any, pre: Any = None) -> Any:
        primitive = PRIMITIVES[name]
        if primitive.is_forward:
            operands = autocast(*operands)
        names = primitive.operands
        checked(**dict(zip(names, operands, strict=True)), pre_activation=pre)
        known = compiled.OPERATORS.get(primitive.function)
        if known and follows():
            return call(known, operands, how.activation, how.backend)
        if primitive.names is None:
            return self.operators[name, ()](*operands, how=how)[0]
        if not how.needs:
            return ()
        saved = (pre,) if primitive.takes_saved else ()
        return self.operators[name, how.needs](*operands, *saved, how=how)

    def refuse_out(self, out: Any) -> None:
        _outputs(out)
        super().refuse_out(out)

    def sum_to(self, x: Any, shape: Sequence[int]) -> Any:
        # (an operator's output may not be its input, and nor may this one's)
        return x.clone() if x.shape == torch.Size(shape) else x.sum_to_size(shape)

    def widened(self, x: Any) -> Any:
        return x if x.dtype == torch.float64 else x.float()

    def ones_like(self, x: Any) -> Any:
        return x.new_ones(()).expand(x.shape)  # one element in every place

    def narrowed(self, x: Any, like: Any) -> Any:
        return x.to(like.dtype)

    def saved_dtypes(self, like: Any) -> tuple[Any, ...]:
        return torch.float64 if like.dtype == torch.float64 else torch.float32, like.dtype


FUNCTIONS = _Torch()


# --- without operators --------------------------------------------------------------------------
def _bare(values: Iterable[Any]) -> Tensor | None:
    """The first tensor, where all are of one device and nothing is to be derived or traced."""
    flat: list[Any] = []
    for x in values:  # (of needs, or of out)
        flat.extend(x) if type(x) is tuple or type(x) is list else flat.append(x)
    found = [x for x in flat if type(x) in TENSORS or isinstance(x, (Tensor, np.ndarray))]
    if eager.mode(found) != 1 or autocasts(first := found[0]):
        return None
    return first if first.is_cpu or all(x.device == first.device for x in found) else None


def _outputs(out: Any) -> list[Any]:
    """The tensors of `out`, which may be written to: checked before anything is computed."""
    outs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if x is not None]
    for x in outs:
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"out must be a torch.Tensor as the operands, got {kind}")
        if is_lazy(x):
            raise ValueError(
                "out must hold its values in its memory, got a tensor with a negative bit or one "
                "of zeros without memory"
            )
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "out must be no inference tensor outside of torch.inference_mode(), where PyTorch "
                "does not let one be written to, got one: out.clone() is a tensor like others"
            )
    return outs


def _in_memory(x: Any) -> Any:
    """An argument of a call over memory that holds its values."""
    return own_values(x) if isinstance(x, Tensor) and is_lazy(x) else x


def _array(x: Any, known: dict[int, Tensor]) -> Any:
    """An argument of a call as the core takes it; `known` keeps the tensors of arrays."""
    if isinstance(x, Tensor):
        made = to_numpy(x)
        known[id(made)] = x
        return made
    if isinstance(x, (tuple, list)) and any(isinstance(y, Tensor) for y in x):
        return tuple(_array(y, known) for y in x)
    return x


def _result(x: Any, known: dict[int, Tensor]) -> Any:
    """A result of the core as tensors: the caller's own where they were given."""
    if isinstance(x, np.ndarray):
        return known[id(x)] if id(x) in known else to_tensor(x)
    if isinstance(x, tuple):
        made = [_result(y, known) for y in x]
        return x._make(made) if hasattr(x, "_make") else tuple(made)
    return x


def public(name: str) -> Any:
    """Return a public function as the module has it: at once where that gives the same."""
    derived, core = getattr(FUNCTIONS, name), getattr(CORE, name)
    operation = OPERATIONS.get("activation_mul" if name.endswith("_mul") else name)
    recorded = operation.operands if operation in eager.DIFFERENTIABLE else None

    @functools.wraps(derived)
    def call(*args: Any, **options: Any) -> Any:
        first: Any = None
        if not torch.compiler.is_compiling():
            if recorded is not None and options.get("out") is None:
                given = *args[: len(recorded)], *[options.get(x) for x in recorded[len(args) :]]
                if eager.mode(given) == 2 and eager.complete(given):
                    return core(*args, **options)  # which comes to `again`
            first = _bare((*args, *options.values()))
        if first is None:
            return derived(*args, **options)
        outs = () if options.get("out") is None else _outputs(options["out"])
        if first.is_cuda:
            operands = [_in_memory(x) for x in args]
            named = {key: _in_memory(x) for key, x in options.items()}
            found = getattr(on_cuda(), name)(*operands, **named)
        else:
            tensors: dict[int, Tensor] = {}
            operands = [_array(x, tensors) for x in args]
            named = {key: _array(x, tensors) for key, x in options.items()}
            found = _result(run_beside(core, *operands, **named), tensors)
        for x in outs:
            # What a backward keeps of it is noticed, as where PyTorch itself writes.
            if not x.is_inference():
                increment_version(x)
        return found

    return of_module(call, __name__.rpartition(".")[0])


def again(
    operation: Any,
    operands: tuple[Any, ...],
    activation: Any,
    flags: tuple[bool, ...],
    needs: Any,
    out: Any,
    backend: Any,
) -> Any:
    """Run an operation: at once, or as a node of PyTorch's graph, where nothing else watches."""
    if follows():
        known = compiled.OPERATORS.get(operation.name)
        if known and out is None and not any(flags) and eager.complete(operands):
            return call(known, operands, get(activation), backend)
    if operation.kind == "fused":
        return fused(operation, operands, activation, flags, needs, out, backend)
    if operation.kind == "jet":
        return operation.other(operands, activation, flags, needs, out, backend)
    # (`public` tells an `out` that it was written)
    if not torch.compiler.is_compiling() and out is None:
        how = eager.mode(operands)
        if how:
            if autocasts(operands[0]) and operation.kind in ("forward", "gated"):
                operands = autocast(*operands)
            if how == 1:
                return eager.run(operation, operands, activation, flags, needs, backend)
            record = eager.DIFFERENTIABLE.get(operation)
            if record is not None and eager.complete(operands):
                return record(operands, activation, flags, backend)
    return operation.other(operands, activation, flags, needs, out, backend)


def fused(
    operation: FusedOperation,
    operands: tuple[Any, ...],
    activation: Any,
    flags: tuple[bool, ...],
    needs: Any,
    out: Any,
    backend: Any,
) -> Any:
    """Run an operation of epilogues: at once, as a node, in forward mode, or by its pieces."""
    act, form = operation.known(activation), operation.form
    plain = form.kind == "forward" and not operation.keep
    tensors = [x for x in operands if type(x) not in NUMBERS]
    outs = _outputs(out)
    compiling = torch.compiler.is_compiling()
    how = 0 if compiling else eager.mode((*tensors, *outs))
    if form.factors and form.kind == "forward" and isinstance(operands[0], Tensor):
        cast = iter(autocast(*tensors))
        operands = tuple([x if type(x) in NUMBERS else next(cast) for x in operands])
    if how == 1:
        if not outs:
            return eager.run(operation, operands, act, flags, needs, backend)
        if outs[0].is_cuda:
            found = on_cuda().fused(operation, operands, act, flags, needs, out, backend)
        else:
            known: dict[int, Tensor] = {}
            arrays = tuple([_array(x, known) for x in with_tensors(operands)])
            rest = act, flags, needs, _array(out, known), backend
            found = _result(run_beside(operation, arrays, *rest), known)
        for x in outs:
            if not x.is_inference():
                increment_version(x)
        return found
    FUNCTIONS.refuse_out(out)
    if how == 2 and plain:
        return record(operation, act, operands, not recomputes() and STORED, backend)
    pairs = zip(operation.operands, operands, strict=True)
    checked(**{form.label(name): x for name, x in pairs if type(x) not in NUMBERS})
    if plain and not compiling and in_dual_level():
        found = dual(operation, act, operands, backend)
        if found is not None:
            return found
    return composite(operation, act, operands, flags, needs, backend)


_GATED = public("activation_mul")


def activation(x: Any, activation: Any) -> Any:
    """The values of an activation at a tensor, on its device and differentiable."""
    return _GATED(x, FUNCTIONS.ones_like(x), activation)


def gated(a: Tensor, b: Tensor, activation: Any) -> Tensor:
    """Return activation(a) * b."""
    if follows():
        return call("gated", (a, b), activation)
    return activation_mul(a, b, activation)


def gated_linear(x: Tensor, gate: Any, up: Any, activation: Any, recompute: bool) -> Tensor:
    """Return activation(gate(x)) * up(x) of two linear layers, by their parameters."""
    operands = x, gate.weight, up.weight, gate.bias, up.bias
    if follows():
        key = activation.key or key_of(activation)
        return compiled.call_fused(key, -1, operands, None, True, not recompute)[0]
    how = 0 if torch.compiler.is_compiling() else eager.mode(operands)
    if how:
        operation, turned = layer("forward"), (1, 2)
        if autocasts(x):
            operands = autocast(*operands)
        if how == 1:
            return eager.run(operation, operands, activation, flipped=turned)
        keep = not (recompute or recomputes()) and STORED
        return record(operation, activation, operands, keep, None, turned)
    first, second = (linear(x, y.weight, y.bias, NONE, recompute) for y in (gate, up))
    return gated(first, second, activation)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, recompute: bool
) -> Tensor:
    """Return activation(x @ weight.T + bias); `recompute` the pre-activation in the backward."""
    if follows():
        return call("layer", (x, weight, bias), activation, None, True, not recompute)
    if not torch.compiler.is_compiling():
        if eager.mode((x, weight, bias)):
            if autocasts(x):
                x, weight, bias = autocast(x, weight, bias)
            return eager.layer(
                x, weight, bias, activation, None, True, False if recompute else None
            )
        if in_dual_level() and weight.requires_grad and torch.is_grad_enabled():
            # PyTorch takes over a gradient in the weight's layout, and loses a copy's tangent.
            weight = weight.view_as(weight)
            weight.register_hook(Tensor.contiguous)
    return FUNCTIONS.matmul_bias_activation(x, weight.t(), bias, activation)
