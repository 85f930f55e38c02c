"""A layer that is trained in a program of torch.compile: an operator for each of its two calls.

The forward keeps for the backward what `numfuse.adapters.torch.eager` keeps. Nothing else is
derived from them: a program of torch.compile has gradients of one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numfuse.adapters.torch import eager
from numfuse.adapters.torch.kept import recomputes, way
from numfuse.adapters.torch.keys import activation_of, backend_key, backend_of, key_of
from numfuse.problem.product import STORED
from numfuse.problem.shapes import gemm_shape

_LIBRARY = torch.library.Library("numfuse", "FRAGMENT")
_LIBRARY.define(
    "layer(Tensor a, Tensor b, Tensor? bias, str activation, bool flipped, bool keep, "
    "str? backend) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "layer_bwd(Tensor grad, Tensor a, Tensor b, Tensor? bias, Tensor? kept, str activation, "
    "str needs, bool flipped, str? backend) -> Tensor[]"
)
_OPERATORS = torch.ops.numfuse


def trains(*operands: Any) -> bool:
    """Whether torch.compile follows a call that has a gradient, and nothing else does."""
    # (PyTorch's compiler knows what these are, not what a function around them is)
    return (
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in operands)
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_exporting()
    )


def layer(
    operands: tuple[Any, ...], act: Any, backend: Any, flipped: bool = False, keep: bool = True
) -> Any:
    """Return a layer; `b` may be given transposed."""
    a, b, bias = operands
    keep = keep and not recomputes()
    return _OPERATORS.layer(a, b, bias, key_of(act), flipped, keep, backend_key(backend))[0]


def _layer(
    a: Tensor, b: Tensor, bias: Any, activation: str, flipped: bool, keep: bool, backend: Any
) -> tuple[Tensor, Tensor]:
    act, backend = activation_of(activation), backend_of(backend)
    with_pre = way(act, a, keep=keep).with_pre
    found = eager.run(eager.LAYER, (a, b, bias), act, (with_pre,), (), backend, int(flipped))
    return found if with_pre else (found, a.new_empty(0))


def _layer_bwd(
    grad: Tensor, a: Tensor, b: Tensor, bias: Any, kept: Any, activation: str, needs: str,
    flipped: bool, backend: Any,
) -> list[Tensor]:  # fmt: skip
    x, needed = (grad, a, b, bias, kept), tuple(needs.split())
    how = activation_of(activation), eager.FLAGS, needed, backend_of(backend), 2 * flipped
    found = eager.run(eager.LAYER_BACKWARD, x, *how)
    return [x.contiguous() for x in found if x is not None]


def _shapes(a: Any, b: Any, bias: Any, activation: str, flipped: bool, keep: bool, _: Any) -> Any:
    shape, *_ = gemm_shape(a, b.t() if flipped else b, bias)
    out = a.new_empty(shape.visible)
    with_pre = way(activation_of(activation), a, keep=keep).with_pre
    if not with_pre:
        return out, a.new_empty(0)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    dtype = a.dtype if with_pre == STORED else wide
    return out, a.new_empty(shape.visible, dtype=dtype)


def _gradient_shapes(grad: Any, a: Any, b: Any, bias: Any, *rest: Any) -> list[Any]:
    made = {"a": a, "b": b, "bias": bias}
    return [made[name].new_empty(made[name].shape) for name in rest[2].split()]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, bias, activation, flipped, keep, backend = inputs
    ctx.way = way(activation_of(activation), a, keep=keep)
    kept = {"pre": output[1], "out": output[0]}.get(ctx.way.keeps)
    ctx.save_for_backward(a, b, bias, kept)
    ctx.how = flipped, backend
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, g: Any, _: Any) -> Any:
    a, b, bias, kept = ctx.saved_tensors
    flipped, backend = ctx.how
    pairs = zip(("a", "b", "bias"), ctx.needs_input_grad, strict=False)
    needs = [name for name, flag in pairs if flag]
    slope = key_of(ctx.way.slope or "none")
    found = iter(
        _OPERATORS.layer_bwd(g, a, b, bias, kept, slope, " ".join(needs), flipped, backend)
    )
    return (*[next(found) if name in needs else None for name in ("a", "b", "bias")], *[None] * 4)


_LIBRARY.impl("layer", _layer, "CompositeExplicitAutograd")
_LIBRARY.impl("layer_bwd", _layer_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("numfuse::layer", _shapes, lib=_LIBRARY)
torch.library.register_fake("numfuse::layer_bwd", _gradient_shapes, lib=_LIBRARY)
torch.library.register_autograd("numfuse::layer", _pull, setup_context=_keep, lib=_LIBRARY)
