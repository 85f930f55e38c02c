"""Libraries: their arrays through every function, and derivatives as the library takes them.

A function that a library differentiates through is called on operands of which some are
differentiated by; random cotangents pull its results back, and tangents push its operands forward.
The truth is the tape of the function's own: forward mode is reverse mode of reverse mode, which is
linear in its cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

import numfuse as nf
from numfuse.backends import resolve

from . import checks
from .bounded import Number, gradients
from .cases import Case, Want, flat, mapped
from .draws import LAYOUTS, Limits
from .kinds import Place, mapped_values

#: From a library's arrays to the results of a call, a list.
Results = Callable[..., Any]


class Library(Place):
    """The arrays of a library, on the CPU."""

    #: Whether functions are called without a derivative, too.
    plain = True

    def to(self, x: ndarray, case: Case) -> Any:
        """Return NumPy's array as the library's."""
        raise NotImplementedError

    def back(self, x: Any) -> Any:
        """Return the library's array as NumPy's."""
        raise NotImplementedError

    def moved(self, case: Case) -> Callable[[Any], Any]:
        there: dict[int, Any] = {}

        def move(x: Any) -> Any:
            if not isinstance(x, ndarray) or any(x is y for y in case.constants):
                return x
            if id(x) not in there:
                there[id(x)] = self.to(x, case)
            return there[id(x)]

        return move

    def call(self, case: Case, args: Any, kwargs: dict[str, Any]) -> Any:
        move = self.moved(case)
        found = getattr(nf, case.function)(*mapped(args, move), **mapped_values(kwargs, move))
        return mapped(found, lambda x: self.back(x) if hasattr(x, "shape") else x)

    def pulled(
        self, f: Results, inputs: Sequence[ndarray], cotangents: Sequence[ndarray], case: Case
    ) -> list[Any]:
        """Return the gradients of f's results, a list, weighted with cotangents."""
        raise NotImplementedError

    def pushed(
        self, f: Results, inputs: Sequence[ndarray], dots: Sequence[ndarray], case: Case
    ) -> list[Any] | None:
        """Return the tangents of f's results; None where the library has none."""
        return None


class Torch(Library):
    def to(self, x: ndarray, case: Case) -> Any:
        import torch

        x = x.view()
        try:
            x.flags.writeable = True
        except ValueError:  # a view of what is read-only itself
            x = np.array(x)
        if any(s < 0 for s in x.strides):
            x = np.array(x)
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    def back(self, x: Any) -> Any:
        import ml_dtypes
        import torch

        x = x.detach()
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    def pulled(
        self, f: Results, inputs: Sequence[ndarray], cotangents: Sequence[ndarray], case: Case
    ) -> list[Any]:
        import torch

        leaves = [self.to(np.array(x), case).requires_grad_() for x in inputs]
        pairs = zip(f(*leaves), cotangents, strict=True)
        # (a result of none of the leaves has no gradient, and torch says so)
        pairs = [(y, self.to(np.array(x), case)) for y, x in pairs if y.requires_grad]
        results, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, leaves, given, allow_unused=True)
        return [None if x is None else self.back(x) for x in found]

    def pushed(
        self, f: Results, inputs: Sequence[ndarray], dots: Sequence[ndarray], case: Case
    ) -> list[Any] | None:
        import torch

        given = [tuple(self.to(np.array(x), case) for x in xs) for xs in (inputs, dots)]
        _, found = torch.func.jvp(lambda *x: tuple(f(*x)), *given)
        return [self.back(x) for x in found]


class Jax(Library):
    def to(self, x: ndarray, case: Case) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(np.array(x))

    def back(self, x: Any) -> Any:
        return np.array(x)

    def _f(self, f: Callable[..., Any], case: Case) -> Callable[..., Any]:
        import jax

        return jax.jit(f) if case.draw.chance(0.15) else f

    def pulled(
        self, f: Results, inputs: Sequence[ndarray], cotangents: Sequence[ndarray], case: Case
    ) -> list[Any]:
        import jax

        results, pull = jax.vjp(self._f(f, case), *(self.to(x, case) for x in inputs))
        del results
        return [self.back(x) for x in pull([self.to(x, case) for x in cotangents])]

    def pushed(
        self, f: Results, inputs: Sequence[ndarray], dots: Sequence[ndarray], case: Case
    ) -> list[Any] | None:
        import jax

        given = [tuple(self.to(x, case) for x in xs) for xs in (inputs, dots)]
        _, found = jax.jvp(self._f(f, case), *given)
        return [self.back(x) for x in found]


class Autograd(Library):
    plain = False

    def to(self, x: ndarray, case: Case) -> Any:
        return x

    def back(self, x: Any) -> Any:
        return np.asarray(x)

    def pulled(
        self, f: Results, inputs: Sequence[ndarray], cotangents: Sequence[ndarray], case: Case
    ) -> list[Any]:
        from autograd import make_vjp
        from autograd.builtins import tuple as boxes

        pull, _ = make_vjp(lambda given: boxes(f(*given)))(tuple(inputs))
        return list(pull(tuple(cotangents)))


class Dask(Library):
    """Arrays in blocks of rows, where an operand has the rows of the result."""

    def serves(self, module: str) -> bool:
        return not module.endswith("networks")

    def to(self, x: ndarray, case: Case) -> Any:
        import dask.array as da

        if x.ndim < 2:
            return x
        rows = x.shape[-2]
        if x.shape[:-1] == case.told["rows"] and rows > 1:
            rows = case.told["chunk"]
        return da.from_array(x, chunks=(*x.shape[:-2], rows, x.shape[-1]))

    def moved(self, case: Case) -> Callable[[Any], Any]:
        """Cut what has the rows of the last array but the factors; those are in one piece."""
        arrays = [x for x in flat(case.args) if isinstance(x, ndarray) and x.ndim > 1]
        most = max((x.shape[:-1] for x in arrays), default=(1,))
        case.told["rows"] = most
        case.told["chunk"] = max(1, -(-most[-1] // int(case.draw.rng.integers(1, 5))))
        return super().moved(case)

    def back(self, x: Any) -> Any:
        return np.asarray(x.compute(scheduler="synchronous")) if hasattr(x, "dask") else x


def library(name: str) -> Library:
    """Return the place of a library."""
    layouts = tuple(x for x in LAYOUTS if x != "reversed")
    made = {"torch": Torch, "jax": Jax, "autograd": Autograd, "dask": Dask}[name]
    dtypes = ("float64", "float32")
    if name == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    limits = Limits(
        dtypes, 20_000, 10_000, 10**9, 1, layouts, tuple(LIBRARY_VALUES), 600, variants=2
    )
    place = made(name, limits, resolve("cpu").traits, out=False, bits=False)
    if name == "dask":  # (what of it can be cut is told when a graph is made)
        place.refuses = ValueError, TypeError
    return place


#: Kinds of values that derivatives are taken at: a NaN spreads as a library has it.
LIBRARY_VALUES = ("normal", "whole", "positive", "steep", "wide")


def _numbers(wanted: Any) -> list[Number]:
    return [x.number if isinstance(x, Want) else x for x in flat(wanted)]


def differentiated(case: Case, place: Any, tally: checks.Tally) -> list[str]:
    """Differentiate a function as the library does, and return what is wrong."""
    d = case.draw
    chosen = [x for x in case.free if d.chance(0.7)] or [case.free[0]]
    inputs = list({id(x): x for x in chosen}.values())
    with np.errstate(all="ignore"):
        results = _numbers(case.truth())
    numbers = [d.number(x) for x in inputs]
    move = place.moved(case)
    args, kwargs = mapped(case.args, move), mapped_values(case.kwargs, move)
    at = {id(move(x)): i for i, x in enumerate(inputs)}

    def f(*given: Any) -> list[Any]:
        def placed(x: Any) -> Any:
            return given[at[id(x)]] if id(x) in at else x

        made = getattr(nf, case.function)(*mapped(args, placed), **mapped_values(kwargs, placed))
        return flat(made)

    if d.chance(0.3) and type(place).pushed is not Library.pushed:
        return _pushed(case, place, f, inputs, numbers, results, tally)
    cotangents = [d.values(x.shape).astype(x.rules.dtype) for x in results]
    with np.errstate(all="ignore"):
        given = [d.rules.number(x) for x in cotangents]
        wanted = gradients(results, given, numbers)
    try:
        found = place.pulled(f, inputs, cotangents, case)
    except Exception as error:
        return [f"a gradient raised {type(error).__name__}: {error}"]
    pairs = zip(numbers, wanted, strict=True)
    exact = tuple(x.rules.number(np.zeros(x.shape)) if y is None else y for x, y in pairs)
    pairs = zip(inputs, found, strict=True)
    made = tuple(np.zeros(x.shape, x.dtype) if y is None else y for x, y in pairs)
    return [f"gradient: {x}" for x in checks.compared(case, made, exact, tally)]


def _pushed(
    case: Case, place: Any, f: Callable[..., Any], inputs: Sequence[ndarray],
    numbers: Sequence[Number], results: Sequence[Number], tally: checks.Tally,
) -> list[str]:  # fmt: skip
    """Return what is wrong with forward mode."""
    d = case.draw
    dots = [d.values(x.shape) for x in inputs]
    with np.errstate(all="ignore"):
        weights = [x.rules.number(np.zeros(x.shape)) for x in results]
        back = gradients(results, weights, numbers)
        pairs = [(x, d.rules.number(y)) for x, y in zip(back, dots, strict=True) if x is not None]
        moved = gradients([x for x, _ in pairs], [y for _, y in pairs], weights)
        wanted = [w if y is None else y for w, y in zip(weights, moved, strict=True)]
    try:
        found = place.pushed(f, inputs, dots, case)
    except Exception as error:
        return [f"a tangent raised {type(error).__name__}: {error}"]
    return [f"tangent: {x}" for x in checks.compared(case, tuple(found), tuple(wanted), tally)]
