"""Records of what was found out about calls on PyTorch's tensors, by the forms of these."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any

import torch

#: Calls that are known, and the forms of tensors of each.
_CALLS, _FORMS = 512, 16

try:  # no public part of PyTorch
    _GUARDS: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    _GUARDS = None
_size, _stride = torch.Tensor.size, torch.Tensor.stride
_grad = torch.is_grad_enabled


class Forms:
    """Records of calls, by what is asked of a call and by the forms of its tensors.

    Forms of tensors one by one in Python take a quarter of a call. PyTorch's check of a compiled
    graph's inputs compares classes, dtypes, devices, shapes, strides, dispatch keys (negative bits,
    zeros without memory, transformations) and whether gradients are recorded, of all in one call.
    """

    def __init__(self) -> None:
        #: The latest forms first.
        self._known: dict[Any, tuple[tuple[Any, Any], ...]] = {}

    def find(self, asked: Hashable, operands: Sequence[Any]) -> Any:
        """Return the record of a call on tensors, strings and None; None where there is none."""
        tensors, key = _key(asked, operands)
        try:
            for fits, record in self._known.get(key, ()):
                if fits(*tensors):
                    return record
        except TypeError:  # lists, and what is no tensor, have to be read with care
            pass
        return None

    def keep(self, asked: Hashable, operands: Sequence[Any], record: Callable[[], Any]) -> None:
        """Let `find` return the record that is made, unless a tensor is given twice."""
        tensors, key = _key(asked, operands)
        if _GUARDS is None or len({id(x) for x in tensors}) < len(tensors):
            return
        sizes, steps = ([list(f(x)) for x in tensors] for f in (_size, _stride))
        try:
            before = self._known.get(key, ())
            how = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": steps}
            fits = _GUARDS(*tensors, **how).check
            # (arrays that are given twice never fit; another version might look at less)
            if not fits(*tensors) or fits(tensors[0][None], *tensors[1:]):
                return
        except (TypeError, SystemError):  # lists, or another version
            return
        if len(self._known) > _CALLS:
            self._known.clear()
        self._known[key] = ((fits, record()), *before)[:_FORMS]

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


def _key(asked: Hashable, operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the tensors of a call, and what else it depends on."""
    given = [x if x is None or type(x) is str else 0 for x in operands]
    tensors = [x for x, found in zip(operands, given, strict=True) if found == 0]
    return tensors, (asked, _grad(), *given)


def places(operands: Sequence[Any]) -> list[int] | None:
    """Return the addresses of tensors, None where one has no memory or an odd address.

    A program is made for addresses that 16 divides, as PyTorch's memory's are.
    """
    found = [x.data_ptr() for x in operands if x is not None and type(x) is not str]
    return None if 0 in found or any([at & 15 for at in found]) else found
