"""Calls on tensors that are no node of their own: by differentiable pieces, or in forward mode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from numfuse.adapters.torch import eager
from numfuse.adapters.torch.eager import TENSORS
from numfuse.adapters.torch.epilogues import (
    GATE,
    elements,
    gradients,
    product,
    pushed,
    second,
    sibling,
    sums,
)
from numfuse.adapters.torch.tensors import moves, with_tensors
from numfuse.fused_operations import NUMBERS, FusedOperation
from numfuse.operations import OPERATIONS

_GATE_TANGENT = OPERATIONS["activation_mul_jvp"]


def composite(
    op: FusedOperation,
    f: Any,
    given: Sequence[Any],
    flags: Sequence[Any],
    needs: Sequence[str],
    backend: Any,
) -> Any:
    """Return what a call returns, by differentiable pieces."""
    form = op.form
    x = dict(zip(op.operands, with_tensors(given), strict=True))
    names = (*form.factor_names, *form.others)
    own = [x[name] for name in names]
    needs = tuple([name for name in needs if x[name] is not None])
    if "backward" in form.kind:
        gs = [x[name] for name in op.operands if name.startswith("g_")]
        kept = [x[name] for name in form.sums]
        if form.kind == "backward":
            if any(z is None or not moves(z) for z in kept):
                kept = []  # (made again, with what they were made of)
            z = [z.to(x["a"].dtype) for z in kept]
            found = gradients(op, f, gs, own, needs, flags[0], backend, z)
        elif any(z is not None and moves(z) for z in kept):
            raise ValueError(
                f"pre_activation of {op.name} must have no gradient: leave it out, and it is made "
                f"again"
            )
        else:
            cs = [x[f"c_{name}"] for name in names]
            found = list(second(op, f, cs, (*gs, *own), needs, flags[0], backend))
            names = ("g_0", *names)
        for i, name in enumerate(names):
            if name in needs:
                d = torch.zeros_like(x[name]) if found[i] is None else found[i]
                if flags[1] and name in form.right and d.ndim > 2:
                    d = d.sum_to_size(d.shape[-2:])
                number = name in form.others and form.numbers[int(name[2:])]
                found[i] = d.float() if number and d.dtype != torch.float64 else d
        return tuple(found)
    z = sums(op, x, backend)
    every = z if form.biases else [*z, *(x[name] for name in form.others)]
    if form.kind == "tangent":
        dots = [_moved(x, i, z[i], form.biases, backend) for i in range(form.factors)]
        if form.biases:
            return _GATE_TANGENT((*z, *dots), f, tuple(flags), (), None, backend)
        dots += [x[f"{name}_dot"] for name in form.others]
        (out,) = elements(f, every, backend)
        return out, *pushed(f, every, dots, flags[0], backend)
    results = (GATE(tuple(z), f, backend=backend),) if form.biases else elements(f, every, backend)
    if op.keep is True:
        z = [y if y.dtype == torch.float64 else y.float() for y in z]
    results = *results, *(z if op.keep else ())
    return results if len(results) > 1 else results[0]


def _moved(x: dict[str, Any], i: int, z: Any, biases: bool, backend: Any) -> Any:
    """Return the tangent of a sum, or None."""
    a_dot, b_dot = x["a_dot"], x[f"b_{i}_dot"]
    terms = []
    if a_dot is not None:
        terms.append(product(a_dot, x[f"b_{i}"], None, backend))
    if b_dot is not None:
        terms.append(product(x["a"], b_dot, None, backend))
    if biases and x[f"x_{i}_dot"] is not None:
        terms.append(x[f"x_{i}_dot"])
    return reduce(add, terms).expand(z.shape) if terms else None


# --- forward mode ---------------------------------------------------------------------------------
def dual(op: FusedOperation, f: Any, given: Sequence[Any], backend: Any) -> Any:
    """Return a forward of dual tensors that need no gradients, in one call of the core; or None."""
    tensors = [x for x in given if type(x) not in NUMBERS and x is not None]
    if any(type(x) not in TENSORS or x.layout is not torch.strided for x in tensors):
        return None
    pairs = [forward_ad.unpack_dual(x) if isinstance(x, Tensor) else (x, None) for x in given]
    primals = [primal for primal, _ in pairs]
    dots = [dot for _, dot in pairs]
    if torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in (*dots, *primals) if isinstance(y, Tensor)
    ):
        return None
    if all(dot is None for dot in dots):
        return eager.run(op, primals, f, (), (), backend)
    tangent = sibling(op, f, "tangent")
    found = eager.run(tangent, (*primals, *dots), f, (True,), (), backend)
    made = [forward_ad.make_dual(*found[i : i + 2]) for i in range(0, len(found), 2)]
    return tuple(made) if len(made) > 1 else made[0]
