"""The places of a launch, the elements of a batch that one kernel works on, and views of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cuda.plan.product import Operand
from numfuse.backends.cuda.plan.program import View
from numfuse.problem.shapes import merge_axes

if TYPE_CHECKING:
    pass


# --- axes ---------------------------------------------------------------------------------------
def batch_steps(view: View | None, axes: int) -> tuple[int, ...]:
    """The strides of a view's batch axes, 0 where they repeat, with leading ones that it lacks."""
    if view is None:
        return (0,) * axes
    own = tuple(0 if n == 1 else s for n, s in zip(view.shape[:-2], view.strides[:-2], strict=True))
    return (0,) * (axes - len(own)) + own


def alignment(view: View, steps: Sequence[int]) -> int:
    """The power of two, at most 16, that divides every address base + sum of index * step."""
    found = 16
    for distance in (view.alignment, view.offset, *(s * view.itemsize for s in steps)):
        while distance % found:
            found //= 2
    return found


def split(batch: tuple[int, ...], result: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The axes of a batch that a result has, and those that it is summed over."""
    own = (1,) * (len(batch) - len(result)) + result
    axes = [i for i, length in enumerate(batch) if length != 1]
    return [i for i in axes if own[i] != 1], [i for i in axes if own[i] == 1]


# --- products -----------------------------------------------------------------------------------
class Places:
    """The places of a launch: axes of which the last is the kernel's, the others are loops."""

    def __init__(
        self, lengths: Sequence[int], views: dict[str, View], order: Sequence[int]
    ) -> None:
        steps = [batch_steps(view, len(lengths)) for view in views.values()]
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
        """A view as a tier sees it."""
        view = self._views[name]
        return Operand(
            view.dtype, (self.step[name], row, column), alignment(view, self._loop_steps[name])
        )

    def __iter__(self) -> Any:
        """(number of the first place, {name: (buffer, offset)}) of each launch."""
        for index in np.ndindex(*self._loops):
            at = {
                name: (
                    view.buffer,
                    view.offset
                    + view.itemsize
                    * sum(i * s for i, s in zip(index, self._loop_steps[name], strict=True)),
                )
                for name, view in self._views.items()
            }
            yield sum(i * s for i, s in zip(index, self._numbers, strict=True)), at


def contiguous(lengths: Sequence[int]) -> list[int]:
    found, run = [], 1
    for length in reversed(lengths):
        found.append(run)
        run *= length
    return found[::-1]


def matrix(view: View) -> tuple[int, int]:
    """The strides of row and column, 0 where they repeat."""
    row, column = view.strides[-2:]
    return (0 if view.shape[-2] == 1 else row), (0 if view.shape[-1] == 1 else column)


# --- views --------------------------------------------------------------------------------------
def turned(view: View) -> View:
    """The transpose."""
    (*batch, m, n), (*steps, row, column) = view.shape, view.strides
    return replace(view, shape=(*batch, n, m), strides=(*steps, column, row))


def as_rows(view: View) -> View | None:
    """(..., M, N) as one matrix of all rows; None where the strides do not allow it."""
    lengths, (steps,) = merge_axes(view.shape[:-1], view.strides[:-1])
    if len(lengths) > 1:
        return None
    count, step = (lengths[0], steps[0]) if lengths else (1, 0)
    return replace(view, shape=(count, view.shape[-1]), strides=(step, view.strides[-1]))
