"""Calls that must be refused: with a message, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from .cases import Case, Want, flat, mapped
from .draws import fenced
from .kinds import Place

#: The errors that a wrong call may raise.
REFUSED = (ValueError, TypeError)


def _arrays(case: Case) -> list[ndarray]:
    constants = case.constants
    return [
        x for x in flat(case.args) if isinstance(x, ndarray) and not any(x is y for y in constants)
    ]


def _swap(case: Case, old: Any, new: Any) -> tuple[Any, dict[str, Any]]:
    return mapped(case.args, lambda x: new if x is old else x), dict(case.kwargs)


def integers(case: Case) -> Any:
    x = case.draw.one(_arrays(case))
    kind = case.draw.one((np.int32, np.complex64, np.uint8, object, bool))
    return _swap(case, x, np.zeros(x.shape, kind))


def mixed(case: Case) -> Any:
    arrays = _arrays(case)
    if len({id(x) for x in arrays}) < 2:
        return integers(case)
    x = case.draw.one(arrays)
    other = np.float32 if case.draw.dtype == np.float64 else np.float64
    if sum(y is x for y in flat(case.args)) == len(arrays):
        return integers(case)
    return _swap(case, x, np.zeros(x.shape, other))


def longer(case: Case) -> Any:
    """An axis whose length others give, and one more."""
    bound = [(x, axis) for x, axis in case.draw.bound if any(x is y for y in flat(case.args))]
    if not bound:
        return integers(case)
    x, axis = case.draw.one(bound)
    shape = list(x.shape)
    shape[axis] += 1
    return _swap(case, x, np.zeros(shape, x.dtype))


def listed(case: Case) -> Any:
    x = case.draw.one(_arrays(case))
    others = x.tolist() if x.size and x.ndim else "x", "x", np.ma.masked_array(x), memoryview(b"x")
    return _swap(case, x, case.draw.one(others))


def activation(case: Case) -> Any:
    from .layers import NAMES

    if not any(isinstance(x, str) and x in NAMES for x in case.args):
        return integers(case)
    at = max(i for i, x in enumerate(case.args) if isinstance(x, str) and x in NAMES)
    args = list(case.args)
    args[at] = case.draw.one(("rleu", "", 5, None, np.tanh))
    return tuple(args), dict(case.kwargs)


def needs(case: Case) -> Any:
    if not case.names:
        return keyword(case)
    return case.args, case.kwargs | {"needs": case.draw.one((("zebra",), "a", 7, (None,)))}


def keyword(case: Case) -> Any:
    return case.args, case.kwargs | {"transpose": True}


def backend(case: Case) -> Any:
    return case.args, case.kwargs | {"backend": case.draw.one(("gpu", 3, object()))}


def out(case: Case) -> Any:
    """An output of a wrong shape or dtype, read-only, or over an operand."""
    if not case.out:
        return keyword(case)
    with np.errstate(all="ignore"):
        wanted = case.truth()
    target = wanted[0] if case.out == "first" else wanted
    leaves = [x for x in flat(target) if x is not None]
    if not leaves:
        return keyword(case)
    chosen, how = case.draw.one(leaves), case.draw.rng.integers(4)

    def made(x: Any) -> Any:
        if x is not chosen:
            return None
        number, dtype = (x.number, x.dtype) if isinstance(x, Want) else (x, case.draw.dtype)
        shape = number.shape
        if how == 0:
            return np.full((*shape, 2), np.nan, dtype)
        if how == 1:
            return np.full(shape, np.nan, np.float32 if dtype == np.float64 else np.float64)
        y = np.full(shape, np.nan, dtype)
        if how == 2 or not y.size:
            y.flags.writeable = False
            return y
        return np.broadcast_to(y, (2, *shape))[:1] if how == 3 else y

    return case.args, case.kwargs | {"out": mapped(target, made)}


WAYS: tuple[Callable[[Case], Any], ...] = (
    integers, mixed, longer, longer, longer, listed, activation, needs, keyword, backend, out, out,
)  # fmt: skip


def refused(case: Case, place: Place) -> list[str]:
    """Make a wrong call, and return what is wrong with how it is refused."""
    d = case.draw
    way = d.one(WAYS)
    args, kwargs = way(case)
    if "backend" in kwargs and place.backend is None:
        return []
    before = [np.ascontiguousarray(memory).tobytes() for _, memory in d.memory]
    outs: list[tuple[ndarray, ndarray]] = []
    if case.out and "out" not in kwargs and place.out and way is not keyword:
        with np.errstate(all="ignore"):
            wanted = case.truth()

        def made(x: Any) -> Any:
            if x is None:
                return None
            number, dtype = (x.number, x.dtype) if isinstance(x, Want) else (x, d.dtype)
            outs.append(fenced(number.shape, dtype, d.rng))
            return outs[-1][0]

        kwargs["out"] = mapped(wanted[0] if case.out == "first" else wanted, made)
    told = f"{way.__name__}: {Case(case.function, args, kwargs, case.truth, d)}"
    try:
        options = {} if "backend" in kwargs else place.options()
        getattr(_package(), case.function)(*args, **kwargs, **options)
    except REFUSED as error:
        faults = [] if len(str(error)) > 9 else [f"the message says {str(error)!r} ({told})"]
    except Exception as error:
        faults = [f"raised {type(error).__name__}: {error} for {told}"]
    else:
        return [f"was not refused: {told}"]
    after = [np.ascontiguousarray(memory).tobytes() for _, memory in d.memory]
    if before != after:
        faults.append(f"an operand was written, in a call that was refused ({told})")
    for view, _ in outs:
        if view.size and not np.isnan(view.astype(np.float64)).all():
            faults.append(f"an output was written, in a call that was refused ({told})")
    return faults


def _package() -> Any:
    import numfuse

    return numfuse
