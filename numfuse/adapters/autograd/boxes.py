"""Tuples of gradients that autograd traces, and rules through what a primitive is made of."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.builtins import tuple as traced_tuple
from autograd.core import VSpace, make_jvp, make_vjp
from autograd.extend import defjvp_argnums, defvjp_argnums
from autograd.extend import primitive as autograd_primitive
from autograd.tracer import isbox


def like(g: Any, x: Any) -> Any:
    """A cotangent in the operands' dtype: autograd makes float64 of what it meets."""
    return g if g.dtype == x.dtype else g.astype(x.dtype)


def primitive(function: Callable[..., Any]) -> Any:
    """autograd's, of a function of arrays: NumPy's arithmetic makes scalars of 0-d arrays."""

    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        return function(*[np.asarray(x) if isinstance(x, np.generic) else x for x in operands])

    return autograd_primitive(call)


class Parts(list[Any]):
    """The cotangents of a tuple of gradients; None where nobody has asked for one.

    autograd's own of a tuple are arrays of zeros to which each item's is added.
    """


class PartsSpace(VSpace):
    def _add(self, x: Parts, y: Parts) -> Parts:
        pairs = zip(x, y, strict=True)
        return Parts(b if a is None else a if b is None else a + b for a, b in pairs)

    _mut_add = _add


PartsSpace.register(Parts)
_item = autograd_primitive(lambda found, i: found[i])


def _item_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    found, place = args
    count = len(found)
    return lambda g: (Parts(g if i == place else None for i in range(count)),)


defvjp_argnums(_item, _item_reverse)
defjvp_argnums(_item, lambda argnums, gs, ans, args, kwargs: gs[0][args[1]])


def items(found: Any, count: int) -> Any:
    """Return the gradients that a primitive gives, as a sequence."""
    if count == 1:
        return (found,)
    return tuple(_item(found, i) for i in range(count)) if isbox(found) else found


def through(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the reverse and the forward rule of a primitive, through what it is made of.

    `function` takes the primitive's arguments, the last of which says what it is.
    """

    def replaced(argnums: Any, args: Any) -> Callable[[Any], Any]:
        def call(values: Any) -> Any:
            given = list(args)
            for place, i in enumerate(argnums):
                given[i] = values[place]
            found = function(*given)
            if not isinstance(found, tuple):
                return found
            return found[0] if len(found) == 1 else traced_tuple(found)

        return call

    def reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        def pull(g: Any) -> Any:
            values = traced_tuple(args[i] for i in argnums)
            if isinstance(g, Parts):
                pairs = zip(g, ans, strict=True)
                g = traced_tuple(anp.zeros_like(x) if part is None else part for part, x in pairs)
            with quiet():
                found = make_vjp(replaced(argnums, args), values)[0](g)
            return tuple(found[i] for i in range(len(argnums)))

        return pull

    def forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        values = traced_tuple(args[i] for i in argnums)
        with quiet():
            return make_jvp(replaced(argnums, args), values)(traced_tuple(gs))[1]

    return reverse, forward


@contextmanager
def quiet() -> Iterator[None]:
    """A result that does not depend on an operand has the gradient 0, and nobody need be warned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Output seems independent of input")
        yield
