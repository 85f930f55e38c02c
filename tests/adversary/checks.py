"""Make a call and say what is wrong with it.

Beside its values a call is held to what is promised of every one: operands are not written to, nor
anything around an output; results are new arrays in C order, of their dtype and shape; a call again
gives the same bits, with other threads too, and so do contiguous copies and fewer gradients.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numba
import numpy as np
from numpy import ndarray

import numfuse as nf

from .bounded import Number
from .cases import Case, Want, flat, mapped
from .draws import fenced, touched
from .kinds import Place


@dataclass
class Tally:
    """What was seen: calls, elements compared, and the largest share of its bound that one took."""

    calls: int = 0
    compared: int = 0
    open: int = 0
    share: float = 0.0
    by_function: dict[str, list[float]] = field(default_factory=dict)

    def add(self, function: str, compared: int, open_: int, share: float) -> None:
        row = self.by_function.setdefault(function, [0, 0, 0, 0.0])
        row[0] += 1
        row[1] += compared
        row[2] += open_
        row[3] = max(row[3], share)


def examine(case: Case, place: Place, tally: Tally) -> list[str]:
    """Make a call, and return what is wrong; nothing if all is well."""
    d = case.draw
    with np.errstate(all="ignore"):
        wanted = case.truth()
    before = [np.ascontiguousarray(memory).tobytes() for _, memory in d.memory]
    args, kwargs, outs, replaced = _with_out(case, place, wanted)
    threads = _threads(d.rng)
    _poison(flat(wanted))
    how = d.one(("raise", "warn", "ignore"))
    try:
        with warnings.catch_warnings(), np.errstate(all=how):
            warnings.simplefilter("error")
            got = place.call(case, args, kwargs)
    except place.refuses:
        return []
    except Exception as error:
        told = "".join(traceback.format_exception(error, limit=-3)[1:-1]).replace("\n", " ")
        return [f"raised {type(error).__name__}: {error} (NumPy's errors: {how}) {told}"]
    faults = list(compared(case, got, wanted, tally))
    if outs and not all(any(x is y for y in flat(got)) for x, _ in outs):
        faults.append("a result is not the array that out= gave")
    for view, memory in outs:
        if touched(view, memory):
            faults.append("a store went past an output")
    if not outs and not replaced:
        faults += _new(got, d.memory)
    after = [np.ascontiguousarray(memory).tobytes() for _, memory in d.memory]
    faults += [f"operand {i} was written" for i, x in enumerate(before) if x != after[i]]
    if not faults:
        faults += _again(case, place, got, wanted, threads)
    return faults


def _threads(rng: np.random.Generator) -> int:
    """Draw how many threads a call may use."""
    most = numba.config.NUMBA_NUM_THREADS
    count = int(rng.integers(1, most + 1))
    numba.set_num_threads(count)
    return count


def _poison(wanted: Sequence[Any]) -> None:
    """Leave NaN in the memory that results of these sizes will probably get."""
    for x in wanted:
        number = x.number if isinstance(x, Want) else x
        if isinstance(number, Number) and number.v.size < 1 << 20:
            width = (x.dtype if isinstance(x, Want) else number.rules.dtype).itemsize
            np.full(number.v.size * width, 255, np.uint8)


def _with_out(
    case: Case, place: Place, wanted: Any
) -> tuple[Any, dict[str, Any], list[tuple[ndarray, ndarray]], bool]:
    """Return arguments with outputs of NaN or in place, and the outputs with their memory."""
    d, kwargs = case.draw, dict(case.kwargs)
    if not case.out or not place.out or not d.chance(0.35):
        return case.args, kwargs, [], False
    if case.in_place and isinstance(wanted, Number) and d.chance(0.4):
        old = d.one(case.in_place)
        target = np.array(old, order="C")
        kwargs["out"] = target
        swapped = mapped(case.args, lambda x: target if x is old else x)
        return swapped, kwargs, [], True
    outs: list[tuple[ndarray, ndarray]] = []

    def made(x: Any) -> Any:
        if x is None or not d.chance(0.75):
            return None
        number, dtype = (x.number, x.dtype) if isinstance(x, Want) else (x, d.dtype)
        outs.append(fenced(number.shape, dtype, d.rng))
        return outs[-1][0]

    target = wanted[0] if case.out == "first" else wanted
    kwargs["out"] = _nest(target, made)
    return case.args, kwargs, outs, False


def _nest(wanted: Any, made: Any) -> Any:
    return mapped(wanted, made)


def compared(case: Case, got: Any, wanted: Any, tally: Tally | None) -> Iterator[str]:
    """Yield what is wrong with the results of a call."""
    dtype = case.draw.rules.dtype
    got_flat, wanted_flat = flat(got), flat(wanted)
    if mapped(got, lambda _: 0) != mapped(wanted, lambda _: 0):
        yield f"the results' nest is {mapped(got, _kind)}, expected {mapped(wanted, _kind)}"
        return
    for i, (x, y) in enumerate(zip(got_flat, wanted_flat, strict=True)):
        if y is None:
            if x is not None:
                yield f"result {i} must be None, got {_kind(x)}"
            continue
        number, own = (y.number, y.dtype) if isinstance(y, Want) else (y, dtype)
        if not isinstance(x, ndarray | np.generic):
            yield f"result {i} must be an array, got {type(x).__name__}"
        elif (x.shape, x.dtype) != (number.shape, own):
            yield f"result {i} must be {own}{number.shape}, got {x.dtype}{x.shape}"
        else:
            yield from _close(f"result {i}", np.asarray(x), number, own, case, tally)


def _kind(x: Any) -> str:
    if x is None:
        return "None"
    x = x.number if isinstance(x, Want) else x
    return f"{type(x).__name__}{getattr(x, 'shape', '')}"


def _close(
    what: str, got: ndarray, want: Number, dtype: np.dtype[Any], case: Case, tally: Tally | None
) -> Iterator[str]:
    """Yield what is wrong with one result, against its bound after the store."""
    r, info = want.rules, ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        size = np.abs(want.v)
        bound = want.e + float(info.eps) / 2 * (size + want.e) + r.lost
        x = got.astype(want.v.dtype)
        error = np.abs(x - want.v)
        finite = np.isfinite(want.v) & np.isfinite(bound)
        over = finite & (size + bound >= float(info.max) * (1 - float(info.eps)))
        wrong = finite & ~(error <= bound) & ~(over & (np.abs(x) >= float(info.max) / 2))
        if case.function.startswith("mlp"):
            # (layers of a device's half types overflow one by one, and inf - inf is NaN)
            wrong &= ~(over & np.isnan(x))
        if case.kind_open:
            wrong &= ~np.isnan(x)
        if case.strict:
            wrong |= np.isnan(want.v) & ~np.isnan(x)
            wrong |= np.isinf(want.v) & (x != want.v)
    if tally is not None:
        exact = finite & ~over
        part = np.where(exact & (bound > 0), error, 0) / np.where(bound > 0, bound, 1)
        share = float(np.max(part, initial=0.0, where=~np.isnan(part)))
        tally.add(case.function, int(finite.sum()), int(want.v.size - finite.sum()), share)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        yield (
            f"{what} is wrong in {int(wrong.sum())} of {wrong.size} elements, first at {at}: "
            f"got {x[at]!r}, exact {want.v[at]!r} within {bound[at]!r}"
        )


def _new(got: Any, memory: Sequence[tuple[ndarray, ndarray]]) -> Iterator[str]:
    """Yield what is wrong with results that are allocated."""
    for i, x in enumerate(flat(got)):
        if not isinstance(x, ndarray):
            continue
        if not x.flags.c_contiguous or not x.flags.writeable:
            yield f"result {i} is no writable array in C order"
        if any(np.may_share_memory(x, y) for _, y in memory if y.size):
            yield f"result {i} shares memory with an operand"


def bits(x: Any) -> bytes:
    """Return the bytes of an array; those of a NaN mean nothing but that it is one."""
    if not isinstance(x, ndarray | np.generic):
        return b""
    x = np.array(x)
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x).astype(x.dtype).tobytes()


def _same(first: Any, second: Any) -> bool:
    return list(map(bits, flat(first))) == list(map(bits, flat(second)))


def _again(case: Case, place: Place, got: Any, wanted: Any, threads: int) -> Iterator[str]:
    """Yield what is wrong with the same call again, in other ways."""
    d = case.draw
    if d.chance(0.3):
        other = _threads(d.rng)
        try:
            again = place.call(case, case.args, case.kwargs)
        except place.refuses:
            return
        if place.bits and not _same(got, again):
            yield f"another call gives other bits (with {threads} and {other} threads)"
        elif not place.bits:
            yield from (f"again: {fault}" for fault in compared(case, again, wanted, None))
    if place.bits and d.chance(0.25):
        copies = mapped(case.args, _copy), {k: mapped(x, _copy) for k, x in case.kwargs.items()}
        again = place.call(case, *copies)
        if not _same(got, again):
            yield "contiguous copies give other bits"
    if case.names and place.bits and d.palette.chance("company", 0.3) and d.chance(0.3):
        yield from _alone(case, place, got)
    if "keep" in case.told and d.chance(0.5):
        yield from _kept(case, place, wanted)


def _copy(x: Any) -> Any:
    return np.array(x, order="C") if isinstance(x, ndarray) else x


def _alone(case: Case, place: Place, got: Any) -> Iterator[str]:
    """Yield whether a gradient has other bits where it is asked for alone."""
    needs = case.kwargs["needs"]
    one = case.draw.palette.one("alone", needs)
    found = place.call(case, case.args, case.kwargs | {"needs": (one,)})
    for x, y in zip(flat(found), _leaves_like(got, found), strict=True):
        if x is not None and y is not None and bits(x) != bits(y):
            yield f"the gradient by {one!r} alone has other bits"


def _leaves_like(nest: Any, like: Any) -> list[Any]:
    """Return the leaves of a nest at the places of another's; groups may be None there."""
    if isinstance(like, tuple):
        parts = nest if isinstance(nest, tuple) else (None,) * len(like)
        return [z for x, y in zip(parts, like, strict=True) for z in _leaves_like(x, y)]
    return [None if isinstance(nest, tuple) else nest]


def _kept(case: Case, place: Place, wanted: Any) -> Iterator[str]:
    """Yield what is wrong with a backward by what its forward kept."""
    function, args, options = case.told["keep"]
    if not place.options() or place.name not in ("cpu", "reference"):
        return
    _, kept = getattr(nf, function)(*args, keep=True, **options, **place.options())
    got = place.call(case, case.args, case.kwargs | {"kept": kept})
    for fault in compared(case, got, wanted, None):
        yield f"with kept=: {fault}"
