"""Products that follow an epilogue: sums of products with the factors that it has made.

Factors whose products have the even and the odd columns of one array on the other side (both
weights of a gated layer) are laid out in the same way, as columns of one array that alternate. So
no weight is copied: a sum over both is one product along the columns of both arrays, and two sums
with such factors are one product of twice the columns.

On CUDA cores two factors of a sum are the halves of one array. Where that pays, the others are
copied to one array too, and the sum of two products is one, along twice the K.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numfuse import epilogues
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import layouts
from numfuse.backends.cuda.kernels.ampere import simt
from numfuse.backends.cuda.plan import batches, lower, places
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.product import Operand, Slot
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.backends.cuda.plan.tiers import takes_rich
from numfuse.epilogues import Epilogue
from numfuse.language.curves import leaf

if TYPE_CHECKING:
    from numfuse.problem.fused import FusedProblem

#: The factors of a product.
_Pair = tuple[View, View]
#: Two sums as they are.
_TWO_SUMS = Epilogue("sums", ("z", "z1"), (), (("out", leaf("z")), ("pre", leaf("z1"))))


# --- the factors ----------------------------------------------------------------------------------
def factors(
    rec: Recorder, p: FusedProblem, bind: Bind, stored: Mapping[str, View]
) -> dict[str, View]:
    """Return arrays for the factors that are neither given nor stored."""
    every = (factor.name for terms in p.products.values() for pair in terms for factor in pair)
    fresh = [x for x in dict.fromkeys(every) if x not in p.arrays and x not in stored]
    made: dict[str, View] = {}
    rich = takes_rich(p.dtype.name, rec.device.info)
    halves = _on_cores(rec, p) and p.n * p.dtype.itemsize % 16 == 0
    for terms in p.products.values() if rich or halves else ():
        for (left, right), (left1, right1) in itertools.permutations(terms, 2):
            names, others = {left.name, left1.name}, {right.name, right1.name}
            if not (names <= {*fresh} - {*made} and others <= {*p.arrays}):
                continue
            if right.turned and right1.turned and not (left.turned or left1.turned):
                pair = left.name, left1.name
                if halves:
                    made |= zip(pair, _halves(_rows_of(rec, p, 2)), strict=True)
                elif bind(right.name).woven_with(bind(right1.name)) is not None:
                    made |= zip(pair, _alternate(_rows_of(rec, p, 2)), strict=True)
    return {name: made[name] if name in made else _rows_of(rec, p) for name in fresh}


def _on_cores(rec: Recorder, p: FusedProblem) -> bool:
    """Return whether products of two matrices are float32 ones of CUDA cores."""
    storage, info = p.dtype.name, rec.device.info
    exact = rec.precision_of(storage) == "ieee" and info.capability >= (8, 0)
    return storage == "float32" and exact and not p.batch


def _rows_of(rec: Recorder, p: FusedProblem, times: int = 1) -> View:
    """Return a new matrix of so many times N columns, with rows as the fast loads want them."""
    n = times * p.n
    whole = rec.fresh((*p.batch, p.m, tiling.pitch(n, p.dtype.itemsize)), p.dtype.name)
    return replace(whole, shape=(*p.batch, p.m, n))


def _alternate(x: View) -> _Pair:
    """Return the even and the odd columns of an array."""
    shape, strides = (*x.shape[:-1], x.shape[-1] // 2), (*x.strides[:-1], 2 * x.strides[-1])
    even = replace(x, shape=shape, strides=strides)
    return even, replace(even, offset=even.offset + x.strides[-1])


def _halves(x: View) -> _Pair:
    """Return the first and the last half of the columns of an array."""
    n = x.shape[-1] // 2
    first = replace(x, shape=(*x.shape[:-1], n))
    return first, replace(first, offset=first.offset + n * x.strides[-1])


# --- the products ---------------------------------------------------------------------------------
def record(rec: Recorder, p: FusedProblem, bind: Bind, made: Mapping[str, View]) -> None:
    """Record the products of a problem, of which the epilogue has made these factors."""
    sums: dict[str, list[_Pair]] = {}
    for name, terms in p.products.items():
        pairs = []
        for pair in terms:
            views = [made[f.name] if f.name in made else bind(f.name) for f in pair]
            left, right = (x.turned if f.turned else x for f, x in zip(pair, views, strict=True))
            pairs.append((left, right))
        sums[name] = _stacked(rec, p, _joined_along_k(pairs))
    free = {name: terms[0][0].turned for name, terms in p.products.items()}
    alike = [name for name in sums if name != "d_a"]
    if len(alike) == 2:
        ((_, right), *_), ((_, other), *_) = (sums[name] for name in alike)
        if other.woven_with(right) is not None:
            alike.reverse()  # (even columns come first)
        first, last = ((sums[name], bind(name)) for name in alike)
        if _two_products(rec, p, first, last) or _side_by_side(rec, p, first, last, free[alike[0]]):
            sums = {name: pairs for name, pairs in sums.items() if name not in alike}
    for name, pairs in sums.items():
        _sum_of_products(rec, p, pairs, bind(name), free[name])


def _joined_along_k(pairs: list[_Pair]) -> list[_Pair]:
    """Return fewer terms of a sum: two whose factors alternate along K in two arrays are one."""
    for first, last in itertools.permutations(pairs, 2):
        (x, y), (x1, y1) = first, last
        left, right = x.woven_with(x1), y.turned.woven_with(y1.turned)
        if left is not None and right is not None:
            # (behind the others: those next to each other may be terms of one product)
            rest = [pair for pair in pairs if pair is not first and pair is not last]
            return [*_joined_along_k(rest), (left, right.turned)]
    return pairs


def _stacked(rec: Recorder, p: FusedProblem, pairs: list[_Pair]) -> list[_Pair]:
    """Return two terms whose left factors are halves of one array as one, where that pays.

    The right factors are copied, one below the other.
    """
    if len(pairs) != 2 or not _on_cores(rec, p):
        return pairs
    (x, y), (x1, y1) = pairs
    k, n = y.shape
    if x.strides[-1] != 1 or x1 != replace(x, offset=x.offset + k) or y.shape != y1.shape:
        return pairs
    lies = [Operand(one.dtype, (0, *places.matrix(one)), one.aligned(())) for one in (y, y1)]
    if not simt.stacking_pays(p.m, n, k, lies, rec.device.info):
        return pairs
    pitch = tiling.pitch(n, y.itemsize)
    both = rec.fresh((2 * k, pitch), y.dtype)
    for number, (operand, view) in enumerate(zip(lies, (y, y1), strict=True)):
        launch, _, _ = layouts.laid_out(operand, (k, n), 1, 2, Slot("x"), Slot("out"))
        rec.launches((launch,), {"x": view.at(), "out": both.at(number * k * pitch)})
    return [(replace(x, shape=(p.m, 2 * k)), replace(both, shape=(2 * k, n)))]


def _two_products(rec: Recorder, p: FusedProblem, *made: tuple[list[_Pair], View]) -> bool:
    """Record two results that are products of one left factor, in one product if a tier can."""
    ((left, right), *more), out = made[0]
    ((other, right1), *more1), out1 = made[1]
    if more or more1 or left != other or _summed_axes(p, out) or _summed_axes(p, out1):
        return False
    views = {"x": left, "y": right, "y1": right1, "out": out, "pre": out1}
    if any(x.strides[-1] != 1 for x in (out, out1)) or not all(left.shape) or out.dtype != p.dtype:
        return False
    sizes = (*left.shape[-2:], right.shape[-1])
    how = (sizes[0], sizes[2], sizes[1]), p.batch, range(len(p.batch)), views, p.acc_dtype.name
    return batches.launch(rec, *how, epilogue=_TWO_SUMS, free=True)[1] >= 0


def _side_by_side(
    rec: Recorder,
    p: FusedProblem,
    made: tuple[list[_Pair], View],
    made1: tuple[list[_Pair], View],
    free: bool,
) -> bool:
    """Record two results with right factors that alternate as one of twice the columns.

    Terms of which that does not hold are added behind. Return False where there are no others.
    """
    (pairs, out), (pairs1, out1) = made, made1
    if len(pairs) != len(pairs1) or out.shape != out1.shape:
        return False
    wide: list[_Pair] = []
    rest: tuple[list[_Pair], list[_Pair]] = [], []
    for (left, right), (left1, right1) in zip(pairs, pairs1, strict=True):
        both = right.woven_with(right1) if left == left1 else None
        if both is not None:
            wide.append((left, both))
        else:
            rest[0].append((left, right))
            rest[1].append((left1, right1))
    if not wide:
        return False
    target = None if rest[0] else out.woven_with(out1)
    if target is None:
        dtype = p.acc_dtype.name if rest[0] else out.dtype
        target = rec.fresh((*out.shape[:-1], 2 * out.shape[-1]), dtype)
    _sum_of_products(rec, p, wide, target, free)
    for part, more, goal in zip(_alternate(target), rest, (out, out1), strict=True):
        if more:
            _sum_of_products(rec, p, more, goal, free, part)
        elif part != goal:
            batches.copy(rec, part, goal)
    return True


def _summed_axes(p: FusedProblem, out: View) -> list[int]:
    """Return the axes of the batch that a result is summed over."""
    return places.split(p.batch, out.shape[:-2])[1]


def _sum_of_products(
    rec: Recorder, p: FusedProblem, pairs: list[_Pair], out: View, free: bool, *before: View
) -> None:
    """Record out = the sum of products and of sums that are there before, rounded once.

    Two products are one with a sum of two terms, where a tier has such a product. Of several, where
    sums are in the dtype of factors, each adds what those before it have made. With `free`, those
    over the rows, and where they are summed over a batch, they are added behind.
    """
    acc, (*first, last) = p.acc_dtype.name, pairs
    if not (first or before):
        batches.product(rec, *last, p.batch, out, acc, free=free)
    elif len(first) == 1 and not before and _two_terms(rec, p, first[0], last, out, free):
        pass
    elif free or before or out.dtype != acc or _summed_axes(p, out):
        parts = [*before]
        while pairs:
            part, taken = rec.fresh(out.shape, acc), 2
            if len(pairs) == 1 or not _two_terms(rec, p, pairs[0], pairs[1], part, free):
                batches.product(rec, *pairs[0], p.batch, part, acc, free=free)
                taken = 1
            parts.append(part)
            pairs = pairs[taken:]
        made = epilogues.sum_of_terms(len(parts) - 1)
        sources = dict(zip(made.inputs, parts, strict=True))
        lower.pointwise(rec, made, acc, p.dtype.name, sources, {"out": out})
    else:
        added: dict[str, Any] = {}
        for pair in pairs:
            target = out if pair is last else rec.fresh(out.shape, acc)
            batches.product(rec, *pair, p.batch, target, acc, **added)
            added = {"epilogue": epilogues.sum_of_terms(1), "extra": target}


def _two_terms(
    rec: Recorder, p: FusedProblem, first: _Pair, last: _Pair, out: View, free: bool
) -> bool:
    """Record the sum of two products as one product, if a tier can."""
    (x, y), (x1, y1) = first, last
    if out.strides[-1] != 1:
        (x, y), (x1, y1), out = (y.turned, x.turned), (y1.turned, x1.turned), out.turned
    if _summed_axes(p, out) or not all(out.shape) or out.strides[-1] != 1:
        return False
    if x.shape[-1] != x1.shape[-1]:
        return False
    views = {"x": x, "y": y, "x1": x1, "y1": y1, "out": out}
    sizes = x.shape[-2], y.shape[-1], x.shape[-1]
    how = sizes, p.batch, range(len(p.batch)), views, p.acc_dtype.name
    return batches.launch(rec, *how, free=free)[1] >= 0
