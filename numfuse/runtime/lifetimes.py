"""Tables that keep what belongs to a formula until the formula goes.

A formula's graph lives as long as an activation, or another graph, has it. What a backend keeps of
it (kernels, and how calls with them are run) must not keep it alive: so keys name a formula by its
serial number, which no other formula ever gets, and an entry is taken out of its table when one of
the formulas in its key is gone. Who runs an entry holds it, so nothing goes under a running call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

from numfuse.language.graph import Curve, Expr, formulas_of

__all__ = ["Table", "Ties", "formulas_of", "kept", "named"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def named(value: Any) -> Any:
    """A key, or a part of one, with formulas by their serial numbers, inside tuples too."""
    if isinstance(value, Expr):
        return "formula", value.serial
    if isinstance(value, Curve):
        return "curve", value.serial
    return tuple(map(named, value)) if type(value) is tuple else value


class Ties:
    """Which keys name a formula; `forget` is called with each of them when that is gone.

    Every step is one of a dict or a set, which no other thread can come between. A formula that is
    tied is alive, as the caller has it, so none goes meanwhile.
    """

    def __init__(self, forget: Callable[[Any], object]) -> None:
        self._forget = forget
        self._keys: dict[int, set[Any]] = {}
        self._watched: dict[int, weakref.ref[Expr]] = {}

    def tie(self, key: Any, formulas: Iterable[Expr]) -> None:
        """Forget `key` when one of the formulas is gone."""
        for formula in formulas:
            number = formula.serial
            self._keys.setdefault(number, set()).add(key)
            if number not in self._watched:
                self._watched[number] = weakref.ref(formula, partial(self._gone, number))

    def untie(self, key: Any) -> None:
        """The key is gone already."""
        for keys in list(self._keys.values()):
            keys.discard(key)

    def clear(self) -> None:
        """No key is left."""
        self._keys.clear()

    def _gone(self, number: int, _: object) -> None:
        self._watched.pop(number, None)
        for key in self._keys.pop(number, ()):
            self.untie(key)  # (the other formulas of a key would hold it, and what it names)
            self._forget(key)


class Table:
    """Values by keys that name formulas (:func:`named`); beyond `length` the oldest goes."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._entries: dict[Any, Any] = {}
        self._ties = Ties(lambda key: self._entries.pop(key, None))

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[Any]:
        """The values, the oldest first."""
        return list(self._entries.values())

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self._ties.clear()

    def get(self, key: Any) -> Any:
        """The value of a key; None where there is none."""
        return self._entries.get(key)

    def keep(self, key: Any, value: Any, formulas: Iterable[Expr]) -> Any:
        """Keep a value, as long as all of these formulas live; the one that is kept."""
        found = self._entries.setdefault(key, value)
        self._ties.tie(key, formulas)
        while len(self._entries) > self._length:
            try:
                oldest = next(iter(self._entries))
            except (RuntimeError, StopIteration):  # another thread was here
                continue
            self._entries.pop(oldest, None)
            self._ties.untie(oldest)
        return found


def kept(length: int) -> Callable[[_Function], _Function]:
    """Keep what a function returns (never None), as long as the formulas in its arguments live.

    A redefined activation is another formula, and what was made of the one before goes.
    """

    def decorate(make: _Function) -> _Function:
        table = Table(length)

        @functools.wraps(make)
        def found(*args: Any, **options: Any) -> Any:
            key = named((*args, *sorted(options.items())))
            value = table.get(key)
            if value is None:
                made = make(*args, **options)
                # (after it: what is made of a curve asks it for derivatives)
                value = table.keep(key, made, formulas_of((*args, *options.values())))
            return value

        return cast(_Function, found)

    return decorate
