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
from torch.compiler import is_dynamo_compiling, is_exporting

from numfuse.adapters.torch import eager
from numfuse.adapters.torch.kept import recomputes, way
from numfuse.adapters.torch.keys import activation_of, backend_key, backend_of, key_of
from numfuse.adapters.torch.tensors import autocast, checked, in_functorch
from numfuse.operations import OPERATIONS
from numfuse.problem.product import STORED
from numfuse.problem.shapes import gemm_shape

_LIBRARY = torch.library.Library("numfuse", "FRAGMENT")
_OPERATORS = torch.ops.numfuse
#: By operator: its operands, and the operations of its forward and its backward.
_ROWS = {
    "layer": (("a", "b", "bias"), eager.LAYER, eager.LAYER_BACKWARD),
    "gated": (("a", "b"), OPERATIONS["activation_mul"], OPERATIONS["activation_mul_bwd"]),
}
#: By public function: its operator.
OPERATORS = {row[1].name: name for name, row in _ROWS.items()}


def follows() -> bool:
    """Whether torch.compile follows a call, and neither torch.func nor an export does."""
    return is_dynamo_compiling() and not in_functorch() and not is_exporting()


def call(
    name: str, x: Any, act: Any, backend: Any = None, flipped: bool = False, keep: bool = True
) -> Any:
    """Return what an operator makes of its operands; a layer's b may be given transposed."""
    key = act.key or key_of(act)
    if backend is not None:
        backend = backend_key(backend)
    return getattr(_OPERATORS, name)(x, key, flipped, keep and not recomputes(), backend)


class _Node(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, activation: str, flipped: bool, keep: bool, backend: Any, *x: Any
    ) -> Any:
        how = way(activation_of(activation), x[0], keep=keep)
        layer, kept = name == "layer", None
        pre = str(how.with_pre) if layer and how.with_pre else ""
        found = getattr(_OPERATORS, f"{name}_fwd")(x, activation, pre, flipped, backend)
        if layer:
            activation = key_of(how.slope or "none")
            kept = found[how.keeps == "pre"] if how.keeps else None
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
    name: str, x: list[Any], activation: str, flipped: bool, keep: bool, backend: Any
) -> Any:
    cast = autocast(*x)
    checked(**dict(zip(_ROWS[name][0], cast, strict=True)))
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in cast):
        return _Node.apply(name, activation, flipped, keep, backend, *cast)
    return getattr(_OPERATORS, f"{name}_fwd")(cast, activation, "", flipped, backend)[0]


def _forward(
    name: str, x: list[Any], activation: str, pre: str, flipped: bool, backend: Any
) -> list[Tensor]:
    flags = () if name == "gated" else (pre if pre == STORED else bool(pre),)
    how = activation_of(activation), flags, (), backend_of(backend), int(flipped)
    found = eager.run(_ROWS[name][1], x, *how)
    return list(found) if pre else [found]


def _backward(
    name: str, x: list[Any], activation: str, needs: str, flipped: bool, backend: Any
) -> list[Tensor]:
    flags = (True,) if name == "gated" else eager.FLAGS
    how = activation_of(activation), flags, tuple(needs.split()), backend_of(backend), 2 * flipped
    made: Any = eager.run(_ROWS[name][2], x, *how)
    return [y.contiguous() for y in made if y is not None]


def _results(
    name: str, x: list[Any], activation: str, pre: str, flipped: bool, backend: Any
) -> list[Any]:
    a, b = x[:2]
    if name == "gated":
        if a.shape != b.shape:
            raise ValueError(f"b must have the shape of a {tuple(a.shape)}, got {tuple(b.shape)}")
        return [a.new_empty(a.shape)]
    shape, *_ = gemm_shape(a, b.t() if flipped else b, x[2])
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    dtypes = [a.dtype, a.dtype if pre == STORED else wide]
    return [a.new_empty(shape.visible, dtype=dtype) for dtype in dtypes[: 2 if pre else 1]]


def _gradients(name: str, x: list[Any], activation: str, needs: str, *rest: Any) -> list[Any]:
    made = dict(zip(_ROWS[name][0], x[1:], strict=False))
    return [made[need].new_empty(made[need].shape) for need in needs.split()]


for _name in _ROWS:
    for _suffix, _how, _run, _fake in (
        ("", "bool flipped, bool keep", _taken_apart, None),
        ("_fwd", "str pre, bool flipped", _forward, _results),
        ("_bwd", "str needs, bool flipped", _backward, _gradients),
    ):
        _given = f"Tensor?[] operands, str activation, {_how}, str? backend"
        _LIBRARY.define(f"{_name}{_suffix}({_given}) -> Tensor{'[]' if _fake else ''}")
        _kernel = "CompositeExplicitAutograd" if _fake else "CompositeImplicitAutograd"
        _LIBRARY.impl(f"{_name}{_suffix}", partial(_run, _name), _kernel)
        if _fake:
            _shapes = partial(_fake, _name)
            torch.library.register_fake(f"numfuse::{_name}{_suffix}", _shapes, lib=_LIBRARY)
