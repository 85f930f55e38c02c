"""A batch folded into the rows of a problem whose arrays have names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from typing import Any

from numpy import ndarray

from numfuse.problem.results import made_late
from numfuse.problem.shapes import merge_axes

#: What has a row for each of M, even if that is 1: a product takes no row for another.
_LEFT = frozenset(("a", "a_dot", "c_a", "d_a"))


def fold(
    p: Any,
    shared: Collection[str],
    ghosts: bool = False,
    *,
    gathered: Callable[[ndarray], ndarray] | None = None,
    scattered: Callable[[ndarray], ndarray] | None = None,
    members: Collection[str] = (),
    kept: Collection[str] = (),
) -> None:
    """Fold the batch into M where every array of `shared` serves all of it: one product, not many.

    `shared` names the right factors, and what else has no row for each of M. Arrays of `members`
    have an axis before the batch, which stays; those of `kept` stay as they are.

    What does not merge without a copy is copied, so that the sums over rows have one order whatever
    the strides are: an operand before (by `gathered`, default NumPy's way), a result when all is
    done (`scattered` returns what will be copied to it, default an array of `p.late`). Where it is
    a ghost, or where an operand repeats over the batch, but not over M, the batch stays as it is.
    """
    views: dict[str, ndarray] = {}
    apart: list[str] = []
    rows, count = (*p.batch, p.m), prod(p.batch) * p.m

    def merged(name: str, x: ndarray) -> ndarray:
        return x.reshape(*x.shape[: int(name in members)], count, x.shape[-1])

    for name, x in p.arrays.items():
        lead = int(name in members)
        lengths, steps = x.shape[lead:-1], x.strides[lead:-1]
        if name in kept:
            views[name] = x
        elif name in shared:
            if any(length != 1 for length in x.shape[:-2]):
                return
            views[name] = x[(0,) * (x.ndim - 2)]
        elif not lead and name not in _LEFT and all(length == 1 for length in lengths):
            views[name] = x.reshape(1, x.shape[-1])
        elif (1,) * (len(rows) - len(lengths)) + lengths != rows:
            return
        elif x.size and len(merge_axes(lengths, steps)[0]) > 1:
            if ghosts:
                return
            views[name] = x
            apart.append(name)
        else:
            views[name] = merged(name, x)
    late: list[tuple[ndarray, ndarray]] = []
    results = p.results
    for name in apart:
        x = views[name]
        if name not in results:
            views[name] = merged(name, x) if gathered is None else gathered(x)
        elif scattered is not None:
            views[name] = scattered(x)
        else:
            late.append(made_late(x))
            views[name] = merged(name, late[-1][1])
    p.arrays.update(views)
    p.m, p.batch, p.late = count, (), tuple(late)
