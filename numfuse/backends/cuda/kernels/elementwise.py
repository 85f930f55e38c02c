"""The printer: an epilogue becomes a CUDA device function.

The arithmetic is that of `numfuse.language.scalar`, the same as on the CPU (errors below 2.1 units
in the last place for the table's activations, docs/numerics.md). For 16-bit results in float32, and
for float32 products of tensor cores, there is a short form: exponential and reciprocal by the
special function unit (ex2.approx and rcp.approx, PTX ISA 9.7.3, relative errors of 2^-22 and
2^-23), without low words, the normal distribution made of these, and gelu and silu in fewer
operations (`numfuse.activations.short_form`). Its relative error, below 2^-18 + |x| 2^-22 for an
argument x of the exponential, is far below the half unit (2^-9, 2^-12) that the store of 16 bits
rounds away.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from numfuse.activations import short_form
from numfuse.backends.cuda.compile import scalars
from numfuse.backends.cuda.compile.scalars import TARGET, fused, select
from numfuse.backends.cuda.compile.toolchain import SIMULATED, types
from numfuse.backends.cuda.compile.toolchain import device_function as device
from numfuse.epilogues import Epilogue
from numfuse.expr import Expr, dumps, loads
from numfuse.language.curves import expand
from numfuse.language.python import render
from numfuse.runtime.replay import kept


@dataclass(frozen=True)
class Formula:
    """A device function of scalars, to be bound to a kernel's name; built by the compiler.

    Parameters
    ----------
    graphs : str
        The graphs as text (`expr.dumps`): a kernel does not keep a formula alive. There is one for
        a scalar result, several for a tuple of results.
    dtype : str
        "float32" or "float64": of the arguments, every operation and the results.
    arguments : tuple of str, optional
        The graphs' inputs, and others, in the order of the function's arguments. By default it has
        one argument, the symbol.
    short : bool
        The short form.
    straight : bool
        Whether float64's inverse has no branch, for texts that have registers for it: a compiler
        then mixes what it computes for several points.
    ties : tuple of weakref to Expr
        As long as these formulas live, what is made of this is kept.
    """

    graphs: str
    dtype: str
    arguments: tuple[str, ...] | None = None
    short: bool = False
    straight: bool = False
    ties: tuple[weakref.ref[Expr], ...] = field(default=(), compare=False)

    def formulas(self) -> list[Expr]:
        """Return the formulas of its ties that still live."""
        return [found for tie in self.ties if (found := tie()) is not None]

    @functools.cached_property
    def numfuse_key(self) -> str:
        """Its text in the digest of a kernel."""
        graphs = hashlib.sha256(self.graphs.encode()).hexdigest()
        return f"formula {graphs} {self.dtype} {self.arguments} {self.short} {self.straight}"

    def print(self) -> tuple[str, dict[str, Any]]:
        """Return the function's text and the constants that it names."""
        graphs = loads(self.graphs)
        return render(graphs, self.dtype, growth=not self.short, arguments=self.arguments)

    def build(self) -> Any:
        """Return the device function."""
        return _built(self)


def formula(
    epilogue: Epilogue,
    arguments: tuple[str, ...],
    accumulator: str,
    *,
    short: bool,
    straight: bool = False,
) -> Formula:
    """Return the device function of an epilogue, from its inputs to its results in `accumulator`.

    `arguments` orders the inputs (others are not used). `short`: results are stored in 16 bits, or
    depend on sums that are themselves good to some units in the last place. `straight`: see
    `Formula`.
    """
    key = formula, arguments, accumulator, short, straight
    made: Formula | None = epilogue.derived.get(key)
    if made is None:
        graphs = expand(epilogue.graphs, (lambda c: short_form(c.trace)) if short else None)
        ties = tuple(map(weakref.ref, epilogue.formulas()))
        how = dumps(graphs), accumulator, arguments, short, straight
        made = epilogue.derived[key] = Formula(*how, ties)
    return made


def is_short(accumulator: str, storage: str) -> bool:
    """Return whether the results of an exact sum, stored in this dtype, take the short form."""
    return accumulator == "float32" and storage in ("float16", "bfloat16")


@kept(1024)
def _built(made: Formula) -> Any:
    text, constants = made.print()
    names = _short_primitives() if made.short else scalars.primitives(made.dtype, made.straight)
    scope: dict[str, Any] = {**vars(names), **constants}
    exec(compile(text, f"<numfuse {made.dtype} formula>", "exec"), scope)
    return device(scope["formula"])


def _alone(expr: Expr, dtype: str) -> Formula:
    """Return the function of a graph of the symbol."""
    return Formula(dumps((expr,)), dtype, ties=(weakref.ref(expr),))


def device_function(expr: Expr, name: str) -> Any:
    """The graph as a device function for kernels of your own; integers become float64."""
    if SIMULATED:

        def simulated(x: Any) -> Any:
            dtype = "float32" if isinstance(x, np.float32) else "float64"
            return _alone(expr, dtype).build()(np.dtype(dtype).type(x))

        simulated.__name__ = simulated.__qualname__ = name
        return simulated

    def stub(x):  # type: ignore[no-untyped-def]
        raise NotImplementedError  # numba-cuda replaces it by what its overload picks

    @import_module("numba.cuda.extending").overload(stub)
    def pick(x):  # type: ignore[no-untyped-def]
        if isinstance(x, types.Float):
            function = _alone(expr, f"float{x.bitwidth}").build()
            return lambda x: function(x)
        if isinstance(x, (types.Integer, types.Boolean)):
            function = _alone(expr, "float64").build()
            return lambda x: function(types.float64(x))
        return None

    def call(x):  # type: ignore[no-untyped-def]
        return stub(x)

    call.__name__ = call.__qualname__ = name
    return device(call)


# --- the short form -----------------------------------------------------------------------------
#: 2^x, and 1 / x
power = scalars.approximate("ex2", lambda x: np.exp2(np.float32(x)))
reciprocal = scalars.approximate("rcp", lambda x: np.float32(1) / np.float32(x))


@functools.cache
def _short_primitives() -> SimpleNamespace:
    """The primitives of float32 in their short form, by the names of `numfuse.expr`.

    A low word is ignored. Factors are multiplied in last: a 16-bit result has no use for what they
    keep of a subnormal exponential.
    """
    full = scalars.primitives("float32")
    log2e, one, two, zero = (np.float32(v) for v in (math.log2(math.e), 1, 2, 0))
    third, fifth = np.float32(-1 / 3), np.float32(2 / 15)
    near_zero, five, root_two = (np.float32(v) for v in (0.0625, 5, math.sqrt(2)))
    half_log2e = np.float32(-0.5 * math.log2(math.e))
    jit, absolute, copy_sign = TARGET.jit, TARGET.absolute, TARGET.copy_sign

    @jit
    def plain_exp(factor, x):  # type: ignore[no-untyped-def]
        return factor * power(x * log2e)

    @jit
    def exp(x):  # type: ignore[no-untyped-def]
        return power(x * log2e)

    @jit
    def plain_sigmoid(factor, x):  # type: ignore[no-untyped-def]
        return factor * reciprocal(one + power(x * -log2e))

    @jit
    def plain_complement(factor, x):  # type: ignore[no-untyped-def]
        return factor * reciprocal(one + power(x * log2e))

    @jit
    def plain_bell(factor, x):  # type: ignore[no-untyped-def]
        # s (1 - s) by e^-|x|, which is at most 1
        e = power(absolute(x) * -log2e)
        r = reciprocal(one + e)
        return factor * (e * r) * r

    @jit
    def tanh(x):  # type: ignore[no-untyped-def]
        # 1 - 2 e / (1 + e) cancels near 0, where the series to x^5 is good to 2^-21. The slope, the
        # bell at 2 x, has the same e and 1 + e: beside it they are computed once.
        square = x * x
        near = fused(x * square, fused(square, fifth, third), x)
        e = power(absolute(two * x) * -log2e)
        far = fused(-two * e, reciprocal(one + e), one)
        return copy_sign(select(absolute(x) < near_zero, near, far), x)  # of -0 too

    mills_end, mills_polynomial, erf_polynomial = (
        getattr(full, name) for name in ("mills_end", "mills_polynomial", "erf_polynomial")
    )

    @jit
    def normal_tail(factor, y):  # type: ignore[no-untyped-def]
        y = select(y > mills_end, mills_end, y)
        mills = mills_polynomial((y - five) * reciprocal(y + five)) * reciprocal(one + y)
        return factor * (mills * power(y * y * half_log2e))

    @jit
    def scaled_normal_cdf(factor, x):  # type: ignore[no-untyped-def]
        positive, tail = x > zero, normal_tail(one, absolute(x))
        return factor * select(positive, one - tail, tail)

    @jit
    def erf(x):  # type: ignore[no-untyped-def]
        y = absolute(x)
        near = fused(x, erf_polynomial(x * x), x)
        far = copy_sign(fused(-two, normal_tail(one, y * root_two), one), x)
        return select(y < one, near, far)

    @jit
    def product_low(a, b):  # type: ignore[no-untyped-def]
        return zero

    def scaled(plain: Any) -> Any:
        @jit
        def made(factor, hi, lo):  # type: ignore[no-untyped-def]
            return plain(factor, hi)

        return made

    plain = {
        "exp": plain_exp,
        "sigmoid": plain_sigmoid,
        "complement": plain_complement,
        "bell": plain_bell,
    }
    short = {f"plain_{name}": function for name, function in plain.items()}
    short |= {f"scaled_{name}": scaled(function) for name, function in plain.items()}
    short |= {"exp": exp, "tanh": tanh, "product_low": product_low, "erf": erf}
    short |= {"normal_tail": normal_tail, "scaled_normal_cdf": scaled_normal_cdf}
    return SimpleNamespace(**{**vars(full), **short})
