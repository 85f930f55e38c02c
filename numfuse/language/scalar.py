"""The arithmetic of formulas for every target that compiles Python.

A target brings its decorator and a dozen intrinsics (:class:`Target`); the primitives
(`numfuse.language.arithmetic`) are the same, so that a formula gives the same bits on each.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from numfuse.language import arithmetic, coefficients, curves, lines, operations, python

#: The texts from which the code of a formula is made: a cache of compiled code depends on them.
_MODULES = (arithmetic, coefficients, curves, lines, operations, python)
SOURCES = [pathlib.Path(__file__), *(pathlib.Path(str(x.__file__)) for x in _MODULES)]
#: Coefficients beyond which a polynomial is two chains: the 22 fmas of Mills' ratio in float64 take
#: 88 cycles one after another, as long as all else of a vector.
LONG_CHAIN = 12


@dataclass(frozen=True)
class Target:
    """The intrinsics that a compiler of Python brings: each a function of scalars of one type."""

    #: Decorates a function that is inlined wherever it is called.
    jit: Callable[[Any], Any]
    absolute: Any
    square_root: Any
    copy_sign: Any
    #: a * b + c, rounded once
    fused: Any
    #: a * b, never merged with a sum
    rounded_product: Any
    #: a where the condition holds, else b
    select: Any
    both: Any
    either: Any
    negation: Any
    #: 2^n for a normal result, n the low bits of ``n + 1.5 * 2^mantissa``
    power_of_two: Any
    #: 2^(k - bias), k > 0 the low bits of ``k + 1.5 * 2^mantissa``
    raised_exponent: Any
    #: two normal numbers whose product is 2^n, n as above, from -2 * bias to 2 * bias
    two_powers_of_two: Any
    #: (k, m, 2^(2 - k)) of a normal u = 2^k m, m from sqrt(1/2) to sqrt(2), k above -125
    exponent_parts: Any
    #: the first argument, its sign turned where the second is negative
    toward: Any
    #: {dtype: 1 / g, rounded correctly, of a normal g with a normal inverse}; by a division where
    #: there is none
    inverses: Mapping[str, Any] | None = None
    #: Whether a long polynomial is two chains: a processor waits for each of its fmas, where a GPU
    #: has other threads.
    halves: bool = False


def primitives(dtype: str, target: Target) -> SimpleNamespace:
    """Return the primitives of one dtype ("float32" or "float64"), by their names.

    Those of `numfuse.expr` have its names; the others are what `numfuse.language.python` prints.
    """
    scope: dict[str, Any] = {"__name__": __name__, **_numbers(dtype)}
    for field in fields(target):
        scope[field.name] = getattr(target, field.name)
    scope |= {name: target.jit(made) for name, made in _polynomials(dtype, target).items()}
    for name, template in vars(arithmetic).items():
        if isinstance(template, FunctionType):
            scope[name] = target.jit(FunctionType(template.__code__, scope, name))
    known = (target.inverses or {}).get(dtype)
    if known is None:
        scope["ratio"] = scope["divided"]
    else:
        scope["inverse"] = known
    scope |= {
        "abs": target.absolute,
        "sqrt": target.square_root,
        "copysign": target.copy_sign,
        "fma": target.fused,
        "where": target.select,
    }
    return SimpleNamespace(**scope)


def _numbers(dtype: str) -> dict[str, Any]:
    """Return the constants that the primitives name, as scalars of the dtype."""
    mantissa, bias = (23, 127) if dtype == "float32" else (52, 1023)
    shift = coefficients.GROWTH_SHIFT[dtype]
    numbers = {
        "zero": 0.0,
        "quarter": 0.25,
        "half": 0.5,
        "one": 1.0,
        "two": 2.0,
        "five": 5.0,
        "share": 0.96,
        "magic": 1.5 * 2.0**mantissa,
        **coefficients.numbers(dtype),
        "growth_end": coefficients.GROWTH_END[dtype],
        "sigma": 2.0**-shift,
        # Add the exponent's bias and the shift to n, where `raised_exponent` finds them.
        "growth_magic": 1.5 * 2.0**mantissa + bias - shift,
        "decay_magic": 1.5 * 2.0**mantissa + bias + shift,
        "infinity": np.inf,
        "nan": np.nan,
    }
    real = np.dtype(dtype).type
    return {name: real(value) for name, value in numbers.items()}


def _polynomials(dtype: str, target: Target) -> dict[str, FunctionType]:
    """Return the polynomials, each as one expression: a loop over a tuple compiles slowly."""
    real = np.dtype(dtype).type
    made = {}
    for name, table in coefficients.POLYNOMIALS.items():
        names = [f"c{i}" for i in range(len(table[dtype]))]
        scope = dict(zip(names, map(real, table[dtype]), strict=True)) | {"fma": target.fused}
        if name == "exp":
            text = f"(x, square):\n    return {_paired(names)}"
        elif target.halves and len(names) > LONG_CHAIN:
            # The last one is added by itself: a value of its size is rounded once.
            *most, last = names
            text = f"(x):\n    square = x * x\n    return fma({_paired(most)}, x, {last})"
        else:
            text = f"(x):\n    return {coefficients.horner(names, 'x')}"
        exec(f"def polynomial{text}", scope)
        made[f"{name}_polynomial"] = scope["polynomial"]
    return made


def _paired(names: list[str]) -> str:
    """Return the text of a polynomial of x and x * x: as many fmas, in a chain half as long."""
    text, *names = names if len(names) % 2 else [f"fma({names[0]}, x, {names[1]})", *names[2:]]
    for odd, even in zip(names[::2], names[1::2], strict=True):
        text = f"fma({text}, square, fma({odd}, x, {even}))"
    return text
