"""Layers and gates in a program of torch.compile, and other calls that torch.func watches there.

At each call a program asks again what it depends on of the Python that torch.compile has followed
(400 questions take 60 us). So it follows no more than the way to one operator, which PyTorch takes
apart itself: into an operator of the forward, one of the backward, and between them a node, which
keeps what those of `numfuse.adapters.torch.eager` keep. No derivative belongs to the two, so that
a call costs the dispatcher's 3 us; a program of torch.compile has gradients of one order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import assume_constant_result, is_dynamo_compiling, is_exporting

from numfuse.adapters.torch import eager
from numfuse.adapters.torch.kept import recomputes, way
from numfuse.adapters.torch.keys import activation_of, backend_key, backend_of, key_of
from numfuse.adapters.torch.tensors import autocast, checked, in_functorch
from numfuse.operations import OPERATIONS
from numfuse.problem.product import STORED
from numfuse.problem.shapes import gemm_shape

_LIBRARY = torch.library.Library("numfuse", "FRAGMENT")
_OPERATORS = torch.ops.numfuse
#: Counts the forms of the inner operators: PyTorch keeps programs on disk by the calls that it has
#: followed, this number among them, and would run one of another form with these.
_FORM = 2
#: By operator: its operands, and the operations of its forward and its backward.
_ROWS: dict[str, Any] = {
    "layer": (("a", "b", "bias"), eager.LAYER, eager.LAYER_BACKWARD),
    "gated": (("a", "b"), OPERATIONS["activation_mul"], OPERATIONS["activation_mul_bwd"]),
}
#: By public function: its operator.
OPERATORS = {row[1].name: name for name, row in _ROWS.items()}


# Asked once, while a call is followed: PyTorch 2.11 answers wrongly where it follows the questions.
@assume_constant_result
def _alone() -> bool:
    return not (in_functorch() or is_exporting())


def follows() -> bool:
    """Whether torch.compile follows a call, and neither torch.func nor an export does."""
    return is_dynamo_compiling() and _alone()


def call(
    name: str, x: Any, act: Any, backend: Any = None, flipped: bool = False, keep: bool = True
) -> Any:
    """Return what an operator makes of its operands; a layer's b may be given transposed."""
    key, where = act.key or key_of(act), None if backend is None else backend_key(backend)
    return getattr(_OPERATORS, name)(x, key, flipped, keep and not recomputes(), _FORM, where)


class _Node(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, activation: str, flipped: bool, keep: bool, backend: Any, *x: Any
    ) -> Any:
        how = way(activation_of(activation), x[0], keep=keep)
        layer, kept = name == "layer", None
        pre = layer and how.keeps == "pre"
        found = getattr(_OPERATORS, f"{name}_fwd")(x, activation, pre, flipped, backend)
        if layer:
            activation = key_of(how.slope or "none")
            kept = found[pre] if how.keeps else None
        ctx.save_for_backward(*x, *[kept] * layer)
        ctx.name, ctx.activation, ctx.rest = name, activation, (flipped, backend)
        return found[0]

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        names, flags = _ROWS[ctx.name][0], ctx.needs_input_grad[5:]
        needs = " ".join([name for name, flag in zip(names, flags, strict=True) if flag])
        run = getattr(_OPERATORS, f"{ctx.name}_bwd")
        found = iter(run([g, *ctx.saved_tensors], ctx.activation, needs, *ctx.rest))
        return *[None] * 5, *[next(found) if flag else None for flag in flags]


def _taken_apart(
    name: str, x: list[Any], activation: str, flipped: bool, keep: bool, form: int, backend: Any
) -> Any:
    cast = autocast(*x)
    checked(**dict(zip(_ROWS[name][0], cast, strict=True)))
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in cast):
        return _Node.apply(name, activation, flipped, keep, backend, *cast)
    return getattr(_OPERATORS, f"{name}_fwd")(cast, activation, False, flipped, backend)[0]


def _run(
    name: str, x: list[Any], activation: str, how: Any, flipped: bool, backend: Any
) -> list[Tensor]:
    """Run a forward, `how` whether its pre-activation is kept, or a backward, `how` its needs."""
    place, gated, needs = 1 + isinstance(how, str), name == "gated", ()
    flags: tuple[Any, ...] = () if gated else (how and STORED,)
    if place == 2:
        flags, needs = (True,) if gated else eager.FLAGS, tuple(how.split())
    act, where = activation_of(activation), backend_of(backend)
    found = eager.run(_ROWS[name][place], x, act, flags, needs, where, place * flipped)
    several = found if isinstance(found, tuple) else (found,)
    return [y.contiguous() for y in several if y is not None]


def _results(name: str, x: list[Any], act: str, pre: bool, flipped: bool, *rest: Any) -> list[Any]:
    a, b = x[:2]
    if name == "gated":
        if a.shape != b.shape:
            raise ValueError(f"b must have the shape of a {tuple(a.shape)}, got {tuple(b.shape)}")
        return [a.new_empty(a.shape)]
    shape = gemm_shape(a, b.t() if flipped else b, x[2])[0].visible
    return [a.new_empty(shape) for _ in range(1 + pre)]


def _gradients(name: str, x: list[Any], activation: str, needs: str, *rest: Any) -> list[Any]:
    made = dict(zip(_ROWS[name][0], x[1:], strict=False))
    return [made[need].new_empty(made[need].shape) for need in needs.split()]


for _name in _ROWS:
    for _suffix, _how, _made, _fake in (
        ("", "bool flipped, bool keep, int form", _taken_apart, None),
        ("_fwd", "bool pre, bool flipped", _run, _results),
        ("_bwd", "str needs, bool flipped", _run, _gradients),
    ):
        _given = f"Tensor?[] operands, str activation, {_how}, str? backend"
        _LIBRARY.define(f"{_name}{_suffix}({_given}) -> Tensor{'[]' if _fake else ''}")
        _kernel = "CompositeExplicitAutograd" if _fake else "CompositeImplicitAutograd"
        _LIBRARY.impl(f"{_name}{_suffix}", partial(_made, _name), _kernel)
        if _fake:
            _shapes = partial(_fake, _name)
            torch.library.register_fake(f"numfuse::{_name}{_suffix}", _shapes, lib=_LIBRARY)
