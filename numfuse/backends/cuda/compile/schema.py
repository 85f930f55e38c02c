"""The arguments of a kernel: names and order are those of its text, a launch gives them by name.

A parameter whose annotation is a dataclass is a record: it stands for an argument for each field,
``x: Array`` for ``x_address, x_place, x_row, x_column``. A field may be a record again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from operator import attrgetter
from typing import Any, get_type_hints


@dataclass
class Array:
    """An array of a kernel: its address, and its strides from a place, row and column to the next.

    A kernel says whether these are bytes or elements.
    """

    address: Any
    place: Any
    row: Any
    column: Any


@dataclass
class Ends:
    """The arrays with which a product ends: what its epilogue reads, and its results."""

    bias: Array
    #: The residual or grad.
    extra: Array
    pre: Array
    out: Array


def fields_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a record's type, "bias.place" for one of a record in it.

    What is no record has none.
    """
    found: list[str] = []
    for name, inner in get_type_hints(kind).items() if is_dataclass(kind) else ():
        found += [f"{name}.{field}" for field in fields_of(inner)] or [name]
    return tuple(found)


def parameters(template: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Return {parameter: the fields of a record, or none}."""
    code, scope = template.__code__, template.__globals__
    kinds: Mapping[str, str] = getattr(template, "__annotations__", {})
    names = code.co_varnames[: code.co_argcount]
    return {name: fields_of(scope.get(kinds.get(name, ""))) for name in names}


def arguments(template: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters, records written out."""
    found: list[str] = []
    for name, own in parameters(template).items():
        found += [written(name, field) for field in own] or [name]
    return found


def written(name: str, field: str) -> str:
    """Return the name for which a field of a record stands."""
    return f"{name}.{field}".replace(".", "_")


class Schema:
    """The names, types and order of a kernel's arguments.

    Parameters
    ----------
    template : callable
        The kernel's text: its parameters, with records written out, are the names.
    kind : str
        The type of every argument that `kinds` does not name: see `toolchain.Kernel`.
    **kinds : str
        {type: names, separated by blanks}.

    Attributes
    ----------
    names : tuple of str
    signature : str
        The types in the order of the names, separated by blanks: what `toolchain.kernel` takes.
    """

    def __init__(self, template: Callable[..., Any], kind: str = "i64", **kinds: str) -> None:
        self._parameters = parameters(template)
        self.names = tuple(arguments(template))
        types = {name: other for other, names in kinds.items() for name in names.split()}
        self._require(types.keys() - set(self.names), "has no")
        self.signature = " ".join(types.get(name, kind) for name in self.names)

    def __call__(self, **values: Any) -> tuple[Any, ...]:
        """Return the values in the order of the arguments; TypeError if one is missing or unknown.

        Values are numbers, and what a launch replaces by addresses (`plan.product.Slot`), or
        records of them.
        """
        self._require(values.keys() - set(self._parameters), "has no")
        self._require(set(self._parameters) - values.keys(), "wants")
        found: list[Any] = []
        for name, own in self._parameters.items():
            found += [attrgetter(field)(values[name]) for field in own] or [values[name]]
        return tuple(found)

    @staticmethod
    def _require(names: set[str], but: str) -> None:
        if names:
            raise TypeError(f"the kernel {but} arguments {', '.join(sorted(names))}")
