"""The places of a launch, the elements of a batch that one kernel works on, and views of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numfuse.backends.cuda.plan.product import Operand
from numfuse.backends.cuda.plan.program import View
from numfuse.problem.shapes import merge_axes
from numfuse.runtime.strided import contiguous


def split(batch: tuple[int, ...], result: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The axes of a batch that a result has, and those that it is summed over."""
    own = (1,) * (len(batch) - len(result)) + result
    axes = [i for i, length in enumerate(batch) if length != 1]
    return [i for i in axes if own[i] != 1], [i for i in axes if own[i] == 1]


class Places:
    """The places of a launch: axes of which the last is the kernel's, the others are loops."""

    def __init__(
        self, lengths: Sequence[int], views: dict[str, View], order: Sequence[int]
    ) -> None:
        steps = [view.batch_steps(len(lengths)) for view in views.values()]
        number = contiguous([lengths[i] for i in order])
        found, made = merge_axes(
            [lengths[i] for i in order], *([s[i] for i in order] for s in steps), number
        )
        self.count = found[-1] if found else 1
        self._loops = found[:-1]
        #: Of each view, the step of a place, in elements.
        self.step = {name: s[-1] if s else 0 for name, s in zip(views, made, strict=False)}
        self._loop_steps = {name: s[:-1] for name, s in zip(views, made, strict=False)}
        self._numbers = made[-1][:-1]
        self._views = views

    def operand(self, name: str, row: int, column: int) -> Operand:
        """Return a view as a tier sees it."""
        view = self._views[name]
        strides = self.step[name], row, column
        return Operand(view.dtype, strides, view.aligned(self._loop_steps[name]))

    def __iter__(self) -> Any:
        """(number of the first place, {name: (buffer, offset)}) of each launch."""
        for index in np.ndindex(*self._loops):
            at = {
                name: view.at(
                    sum(i * s for i, s in zip(index, self._loop_steps[name], strict=True))
                )
                for name, view in self._views.items()
            }
            yield sum(i * s for i, s in zip(index, self._numbers, strict=True)), at


def matrix(view: View) -> tuple[int, int]:
    """The strides of row and column, 0 where they repeat."""
    row, column = view.strides[-2:]
    return (0 if view.shape[-2] == 1 else row), (0 if view.shape[-1] == 1 else column)
