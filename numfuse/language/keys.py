"""Formulas in keys: a key that names a formula by its serial number does not keep it alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numfuse.language.curves import Curve
from numfuse.language.graph import Expr

#: Kinds that stand for themselves; what is compared with them first is most of a key.
_PLAIN = frozenset((str, int, bool, type(None)))


def named(value: Any) -> Any:
    """Return a key, or a part of one, with formulas by their serial numbers, inside tuples too.

    A named tuple is known by its class.
    """
    if isinstance(value, tuple):
        key = []
        for part in value:
            key.append(part if type(part) in _PLAIN else named(part))
        return tuple(key) if type(value) is tuple else (type(value), *key)
    if isinstance(value, Expr):
        return "formula", value.serial
    if isinstance(value, Curve):
        return "curve", value.serial
    if isinstance(value, Keyed):
        return value.named()
    return value


class Keyed:
    """Base of a frozen dataclass (with ``eq=False``) that holds formulas and is a key.

    Equal where the fields are, formulas by identity: their own ``==`` makes a formula, which has no
    truth. The equality that a dataclass makes for itself asks for it from Python 3.13 on.
    """

    def _values(self) -> tuple[Any, ...]:
        fields: dict[str, Any] = self.__dataclass_fields__  # type: ignore[attr-defined]
        return tuple([getattr(self, name) for name in fields])

    def named(self) -> tuple[Any, ...]:
        """A key that stands for it and holds no formula."""
        return type(self), *named(self._values())

    def formulas(self) -> list[Expr]:
        """The formulas in its fields, and in tuples there."""
        return formulas_of(self._values())

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and named(self._values()) == named(other._values())

    def __hash__(self) -> int:
        return hash(named(self._values()))


def formulas_of(value: Any) -> list[Expr]:
    """The formulas in a key, in tuples there, and of what has ``formulas()``."""
    if isinstance(value, Expr):
        return [value]
    found: Callable[[], list[Expr]] | None = getattr(value, "formulas", None)
    if found is not None:
        return found()
    if isinstance(value, tuple):
        return [e for part in value for e in formulas_of(part)]
    return []
