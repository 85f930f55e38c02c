"""Keys that go with the formulas that they name.

A formula's graph lives as long as an activation, or another graph, has it. What a backend keeps of
it (kernels, and how calls with them are run) must not keep it alive: so keys name a formula by its
serial number, which no other formula ever gets, and an entry is taken out of its table when one of
the formulas in its key is gone. Who runs an entry holds it, so nothing goes under a running call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from numfuse.language.graph import Expr
from numfuse.language.keys import formulas_of, named

__all__ = ["Ties", "formulas_of", "named"]


class Ties:
    """Which keys name a formula; `drop` is called with each of them when that is gone.

    Every step is one of a dict or a set, which no other thread can come between. A formula that is
    tied is alive, as the caller has it, so none goes meanwhile.
    """

    def __init__(self, drop: Callable[[Any], object]) -> None:
        self._drop = drop
        self._keys: dict[int, set[Any]] = {}
        self._watched: dict[int, weakref.ref[Expr]] = {}

    def tie(self, key: Any, formulas: Iterable[Expr]) -> None:
        """Drop `key` when one of the formulas is gone."""
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
            self._drop(key)
