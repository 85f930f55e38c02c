"""The problem of an epilogue over another library's arrays: beyond the derivatives that are fused.

It takes plain products and formulas, each of which the library differentiates, so that every order
of derivative closes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from numfuse.epilogues import Epilogue
from numfuse.problem.forms import Factor
from numfuse.problem.fused import FusedProblem

#: From an epilogue and its inputs to its results, in the shape to which the inputs broadcast.
Values = Callable[[Epilogue, Sequence[Any]], Sequence[Any]]


def summed(xp: Any, x: Any, shape: Sequence[int]) -> Any:
    """Return `x` summed over the axes that `shape` lacks, or has with length 1 alone."""
    lead = x.ndim - len(shape)
    over = [i for i, n in enumerate(shape, lead) if n == 1 and x.shape[i] != 1]
    axes = *range(lead), *over
    if axes:
        x = xp.sum(x, axis=axes, keepdims=True)
        x = xp.reshape(x, x.shape[lead:])
    return x if x.shape == tuple(shape) else xp.broadcast_to(x, tuple(shape))


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


def results(
    xp: Any,
    p: FusedProblem,
    names: Sequence[str],
    given: Mapping[str, Any],
    values: Values,
    product: Callable[[Any, Any], Any],
) -> list[Any]:
    """Return the results of these names as matrices, of operands by name.

    `p` is the problem on arrays of the operands' shapes, whose values are not read; `xp` is the
    library's module of functions on arrays.
    """
    arrays = {}
    for name, x in given.items():
        if name in p.arrays:
            arrays[name] = _cast(xp.reshape(x, p.arrays[name].shape), p.acc_dtype)
    for name in p.epilogue.accumulators:
        arrays[name] = reduce(add, [product(arrays[a], arrays[b]) for a, b in p.sums[name]])
    made = values(p.epilogue, [arrays[name] for name in p.epilogue.inputs])
    for (name, _), x in zip(p.epilogue.results, made, strict=True):
        arrays[name] = xp.broadcast_to(x, p.shape)

    def factor(f: Factor) -> Any:
        return xp.swapaxes(arrays[f.name], -1, -2) if f.turned else arrays[f.name]

    found = []
    for name in names:
        out = p.arrays[name]
        terms = [product(factor(f), factor(g)) for f, g in p.products.get(name, ())]
        if name in p.zeroed:
            terms = [xp.zeros(out.shape, p.acc_dtype)]
        total = reduce(add, [summed(xp, x, out.shape) for x in terms or [arrays[name]]])
        found.append(_cast(total, out.dtype))
    return found
