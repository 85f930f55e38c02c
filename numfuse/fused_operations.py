"""The operations of epilogues: one for each formula, kind of call and form.

What comes as a Python number is an array of the arrays' dtype from here on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends import Backend
from numfuse.definitions import UserEpilogue, get
from numfuse.epilogues import Epilogue
from numfuse.operations import Operation
from numfuse.problem import fused
from numfuse.problem.forms import Form
from numfuse.problem.operands import array_of, as_plain
from numfuse.problem.results import entries
from numfuse.runtime.dispatch import adapter_for

EpilogueLike = str | UserEpilogue | Callable[..., Any]
#: Python's numbers: each is an operand of the arrays' dtype.
NUMBERS = frozenset((int, float))
_FLAGS = {"forward": (), "tangent": ("guard",)}
#: By kind, the end of a function's name.
SUFFIXES = {"forward": "", "backward": "_bwd", "tangent": "_jvp", "double_backward": "_double_bwd"}


class FusedOperation(Operation):
    """A call of an epilogue, of one form; `form` names its arrays.

    `whole` returns the formulas of the forward from what a call gives in the place of an
    activation. With `keep` a forward returns its sums too, in the operands' dtype if it is
    "stored". `known` is what makes an activation of a name.
    """

    def __init__(
        self,
        name: str,
        form: Form,
        whole: Callable[[Any], Epilogue],
        keep: bool | str = False,
        known: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name, self.kind, self.form, self.whole, self.keep = name, "fused", form, whole, keep
        # (a str, which keeps its hash: that of a tuple is made anew in each call)
        self.mark = repr((name, form, keep))
        own = [*form.factor_names, *form.others]
        grads = [f"g_{i}" for i in range(form.results)]
        back = "backward" in form.kind
        self.operands = own
        if form.kind == "tangent":
            self.operands = [*own, *(f"{x}_dot" for x in own)]
        elif back:
            double = form.kind == "double_backward"
            self.operands = [*(f"c_{x}" for x in own if double), *grads, *own, *form.sums]
        self.needs = (*(grads if form.kind == "double_backward" else ()), *own) if back else ()
        self.scalars = self.operands
        self.flags = list(_FLAGS.get(form.kind, ("guard", "sum_batch")))
        self.options = ["activation", "needs", "out", *self.flags]
        self.named, self.taken = tuple(self.options), [True] * len(self.options)
        made = [f"d_{x}" for x in self.needs]
        if not back:
            for i in range(form.results):
                made += [f"out_{i}", *([f"out_{i}_dot"] if form.kind == "tangent" else ())]
            made += [f"pre_{i}" for i in range(form.factors) if keep]
        self.results = tuple(made)
        self.fields = (*self.operands, *made)
        self.several = back or len(made) > 1
        self.in_place = not form.factors and form.kind == "forward"
        self.problem = self._problem
        self._kin = {(form.kind, keep): self}
        if known is not None:
            self.known = known

    def of(self, kind: str, keep: bool | str = False) -> FusedOperation:
        """Return the operation of another kind of call of the same formula."""
        found = self._kin.get((kind, keep))
        if found is None:
            name = self.name.removesuffix(SUFFIXES[self.form.kind]) + SUFFIXES[kind]
            form = self.form._replace(kind=kind)
            found = FusedOperation(name, form, self.whole, keep, self.known)
            found._kin = self._kin
            self._kin[kind, keep] = found
        return found

    def _problem(
        self, activation: Any, needs: Any = (), out: Any = None, guard: bool = True,
        sum_batch: bool = False, ghosts: bool = False,
        gathered: Callable[[ndarray], ndarray] | None = None,
        scattered: Callable[[ndarray], ndarray] | None = None, **given: Any,
    ) -> fused.FusedProblem:  # fmt: skip
        outs = entries("out", out, len(self.results)) if self.several else (out,)
        how = needs, outs, guard, self.keep, sum_batch, ghosts, gathered, scattered
        return fused.make(self.form, self.whole(activation), activation, given, *how)

    def other(
        self, operands: tuple[Any, ...], activation: Any, flags: tuple[bool | str, ...],
        needs: Any, out: Any, backend: str | Backend | None,
    ) -> Any:  # fmt: skip
        """Run a call on arrays that an adapter serves, or that NumPy has to copy or view first."""
        given = dict(zip(self.operands, operands, strict=True))
        arrays = {name: x for name, x in given.items() if type(x) not in NUMBERS}
        adapter = adapter_for(**arrays)
        if adapter is not None:
            run = getattr(adapter, "fused", None)
            if run is None:
                kind = adapter.__name__.rpartition(".")[2]
                raise TypeError(f"{self.name} must have NumPy arrays, got those of {kind}")
            return run(self, operands, activation, flags, needs, out, backend)
        for name, x in arrays.items():
            if x is not None:
                given[name] = as_plain(self.form.label(name), array_of(x))
        dtype = next((given[name].dtype for name, x in arrays.items() if x is not None), None)
        for name, x in given.items():
            if name not in arrays:
                given[name] = number(x, np.dtype(np.float64) if dtype is None else dtype)
        return self(tuple(given.values()), activation, flags, needs, out, backend)


def operation(
    f: EpilogueLike, name: str, kind: str, factors: int, several: bool,
    numbers: tuple[bool, ...], keep: bool | str = False,
) -> tuple[FusedOperation, UserEpilogue]:  # fmt: skip
    """Return the operation of a call, and its epilogue; TypeError for another count of operands.

    `numbers` says which operands are Python numbers.
    """
    made = get(f)
    key = name, kind, factors, several, numbers, keep
    found: FusedOperation | None = made.made.get(key)
    if found is None:
        form = form_of(made, kind, factors, several, numbers)
        found = FusedOperation(name, form, lambda f: f.over(factors), keep, known=lambda f: f)
        made.made[key] = found
    return found, made


def form_of(
    made: UserEpilogue, kind: str, factors: int, several: bool, numbers: tuple[bool, ...]
) -> Form:
    """Return the form of a call of an epilogue; TypeError for another count of operands."""
    count = len(made.parameters)
    if count < factors:
        raise TypeError(
            f"the epilogue {made.name!r} must have a parameter for each of {factors} products, "
            f"got {count} ({', '.join(made.parameters)})"
        )
    if count != factors + len(numbers):
        sums, rest = made.parameters[:factors], made.parameters[factors:]
        took = f"{_count(count, 'argument')} ({', '.join(rest)})"
        if factors:
            took = f"{_count(count, 'argument')}, {_count(factors, 'product')} ({', '.join(sums)})"
            took += f" and {_count(len(rest), 'operand')} ({', '.join(rest)})" if rest else ""
        raise TypeError(
            f"the epilogue {made.name!r} takes {took}, got {_count(len(numbers), 'operand')}"
        )
    if factors and made.several:
        raise TypeError(
            f"the epilogue {made.name!r} of a product must return one value, got a tuple of "
            f"{len(made.graphs)}: numfuse.elementwise takes such"
        )
    return Form(kind, factors, several, made.parameters[factors:], numbers, len(made.graphs))


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def numbers_of(operands: Sequence[Any]) -> tuple[bool, ...]:
    """Return which operands are Python numbers."""
    if NUMBERS.isdisjoint(map(type, operands)):
        return (False,) * len(operands)
    return tuple([type(x) in NUMBERS for x in operands])


def arrays_of(given: Sequence[Any]) -> tuple[Any, ...]:
    """Return operands with Python numbers as arrays, where the first operand is NumPy's."""
    if NUMBERS.isdisjoint(map(type, given)):
        return tuple(given)
    first = next((x for x in given if x is not None and type(x) not in NUMBERS), None)
    if type(first) is not ndarray:
        return tuple(given)
    dtype = first.dtype
    return tuple([number(x, dtype) if type(x) in NUMBERS else x for x in given])


def number(x: float, dtype: np.dtype[Any]) -> ndarray:
    """Return a Python number as an array, rounded as IEEE rounds it: silently.

    A dtype that is not computed is float64 here: the array that it is of is refused by its name.
    """
    # (by its kind, V of bfloat16: the table of dtypes learns that one later)
    dtype = dtype if dtype.kind in "fV" else np.dtype(np.float64)
    if x == 0 or 1e-4 < abs(x) < 65504:  # (no dtype is left, whose narrowest is float16)
        return np.array(x, dtype)
    try:
        wide = float(x)
    except OverflowError:
        wide = math.inf if x > 0 else -math.inf
    with np.errstate(all="ignore"):
        return np.array(wide, dtype)
