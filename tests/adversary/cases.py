"""A call to make, and what it must return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from .bounded import Number
from .draws import Draw


class Want(NamedTuple):
    """A result in another dtype than the operands'."""

    number: Number
    dtype: np.dtype[Any]


@dataclass
class Case:
    """One call of a public function."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Makes the nest of the results.
    truth: Callable[[], Any]
    draw: Draw
    #: Whether values that are not finite are what IEEE arithmetic gives, in every order.
    strict: bool = False
    #: Whether `out=` is taken; "first" where it is of the first result alone.
    out: bool | str = False
    #: Operands that the result may be written over.
    in_place: tuple[ndarray, ...] = ()
    #: The names that `needs=` knows; None where there is no such option.
    names: tuple[Any, ...] | None = None
    #: Operands that a library may differentiate by, and the functions of which that is not said.
    free: tuple[ndarray, ...] = ()
    #: Constants of the host.
    constants: tuple[Any, ...] = ()
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def kind_open(self) -> bool:
        """Whether a NaN in an operand may reach more than the formula says.

        It may where a term that is absent is computed as zero times an operand, as in derivatives
        beyond the first and in jets.
        """
        words = "double_bwd", "jet", "elementwise_bwd", "epilogue_bwd", "epilogue_jvp"
        beyond = any(word in self.function for word in words)
        return beyond and self.draw.kind == "special"

    def __str__(self) -> str:
        given = ", ".join(map(_shown, self.args))
        return f"{self.function}({given}, {_options(self.kwargs)})"


def _options(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(x)}" for name, x in kwargs.items())


def _shown(x: Any) -> str:
    if isinstance(x, ndarray):
        steps = tuple(s // x.itemsize for s in x.strides)
        return f"{x.dtype.name}{x.shape}" + ("" if x.flags.c_contiguous else f" strides {steps}")
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_shown, x))})"
    return getattr(x, "__name__", None) or repr(x)


def flat(nest: Any) -> list[Any]:
    """Return the leaves of a nest of tuples and lists."""
    if isinstance(nest, (tuple, list)) and not isinstance(nest, Want):
        return [x for part in nest for x in flat(part)]
    return [nest]


def mapped(nest: Any, f: Callable[[Any], Any]) -> Any:
    """Return the nest with each leaf replaced; named tuples become plain ones."""
    if isinstance(nest, tuple) and not isinstance(nest, Want):
        return tuple(mapped(x, f) for x in nest)
    if isinstance(nest, list):
        return [mapped(x, f) for x in nest]
    return f(nest)
