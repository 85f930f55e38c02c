"""Gradients of networks' values layer by layer, which PyTorch differentiates to any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from numfuse.adapters.perceptrons import ValueCall

Given = Sequence[Tensor | None]


def _pulled(
    results: Sequence[Any], cotangents: Sequence[Any], operands: Given, needs: Sequence[bool]
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


def _own(x: Given, needs: Sequence[bool]) -> list[Any]:
    """Return views of operands, of which those that are needed require a gradient.

    An operand that comes twice has a gradient for each of its places.
    """
    own = [None if y is None else y.view_as(y) for y in x]
    for y, need in zip(own, needs, strict=True):
        if need and y is not None and not y.requires_grad:
            y.requires_grad_()
    return own


def by_layers(call: ValueCall, g: Any, x: Given, needs: Sequence[bool]) -> list[Any]:
    """Return the gradients of the layers one after another."""
    with torch.enable_grad():
        own = _own(x, needs)
        return _pulled([call.plain(own)], [g], own, needs)


def twice_by_layers(
    call: ValueCall, us: Sequence[Any], g: Any, x: Given, made: Sequence[bool],
    needs: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Return the gradients of the gradients that were `made` of the layers."""
    with torch.enable_grad():
        own = _own((g, *x), needs)
        found = by_layers(call, own[0], own[1:], made)
        there = [d for d, was in zip(found, made, strict=True) if was]
        return _pulled(there, us, own, needs)
