"""Tensors that PyTorch saves of what a forward keeps, and how its backward gets that back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from numfuse.adapters.stacks import Kept as KeptTensors
from numfuse.kept import Kept


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


class SavedStacks(Kept):
    """A small network's stacks: a tensor, which PyTorch saves with the operands."""

    def __init__(self, tensor: Tensor) -> None:
        self.inputs, self.sums, self.tensor = [], [], tensor

    @property
    def stacks(self) -> Any:  # type: ignore[override]
        """Return it as an array."""
        return self.tensor.numpy()


def tensors_of(kept: Any) -> list[Any]:
    """Return the tensors to save of what was kept, behind what says how they are put together."""
    if isinstance(kept, KeptTensors):
        lengths = len(kept.inputs), len(kept.sums)
        return [lengths, *kept.inputs, *kept.sums, kept.whole]
    if type(kept) is SavedStacks:
        return [SavedStacks, kept.tensor]
    if kept is None or (type(kept) is Kept and not kept.inputs and kept.stacks is None):
        return [None]  # (it is made again)
    return [KeptValue, KeptValue(kept).ticket()]


def kept_again(form: Any, own: Sequence[Any], like: Tensor) -> Any:
    """Return what was kept by a network of tensors like one; None where it is to be made again."""
    if form is None:
        return None
    if form is KeptValue:
        return kept_of(own[0])
    if form is SavedStacks:  # (which may have become another tensor)
        (stacks,) = own
        alike = stacks.is_cpu and stacks.dtype == like.dtype and stacks.ndim == 1
        return SavedStacks(stacks) if alike and stacks.is_contiguous() else None
    first, count = form
    return KeptTensors([*own[:first]], [*own[first : first + count]], own[-1])
