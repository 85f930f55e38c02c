"""The arguments of a kernel: names and order are those of its text, a launch gives them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Schema"]


class Schema:
    """The names, types and order of a kernel's arguments.

    Parameters
    ----------
    template : callable
        The kernel's text: its parameters are the names.
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
        code = template.__code__
        self.names = code.co_varnames[: code.co_argcount]
        types = {name: other for other, names in kinds.items() for name in names.split()}
        self._require(types.keys() - set(self.names), "has no")
        self.signature = " ".join(types.get(name, kind) for name in self.names)

    def __call__(self, **values: Any) -> tuple[Any, ...]:
        """Return the values in the order of the arguments; TypeError if one is missing or unknown.

        They are numbers, and what a launch replaces by addresses (`plan.product.Slot`).
        """
        self._require(values.keys() - set(self.names), "has no")
        self._require(set(self.names) - values.keys(), "wants")
        return tuple(values[name] for name in self.names)

    @staticmethod
    def _require(names: set[str], but: str) -> None:
        if names:
            raise TypeError(f"the kernel {but} arguments {', '.join(sorted(names))}")
