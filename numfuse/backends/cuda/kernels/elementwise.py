"""Formulas as CUDA device functions: a recorded graph becomes the text of a function.

The arithmetic is that of `numfuse.language.scalar`, the same as on the CPU (errors below 2.1 units
in the last place for the table's activations, docs/numerics.md). For 16-bit results in float32, and
for float32 products of tensor cores, there is a short form: exponential and reciprocal by the
special function unit (ex2.approx and rcp.approx, PTX ISA 9.7.3, relative errors of 2^-22 and
2^-23), without low words, and for gelu and silu in fewer operations
(`numfuse.activations.short_form`). Its relative error, below 2^-18 + |x| 2^-22 for an argument x of
the exponential, is far below the half unit (2^-9, 2^-12) that the store of 16 bits rounds away.
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
from numfuse.backends.cuda.compile import intrinsics, scalars
from numfuse.backends.cuda.compile.scalars import TARGET, fused, is_finite, select
from numfuse.backends.cuda.compile.toolchain import SIMULATED, intrinsic, types
from numfuse.backends.cuda.compile.toolchain import device_function as device
from numfuse.expr import Expr, dumps, loads
from numfuse.language.scalar import render
from numfuse.runtime import lifetimes

__all__ = ["Scalar", "device_function", "scalar"]


@dataclass(frozen=True)
class Scalar:
    """A device function of one scalar, to be bound to a kernel's name; built by the compiler.

    Parameters
    ----------
    graph : str or None
        The formula as text (`expr.dumps`): a kernel does not keep the formula alive. None: the
        identity, or with `constant` 1.
    dtype : str
        "float32" or "float64": of the argument, every operation and the result.
    short : bool
        The short form.
    guard : bool
        A result that is not finite is 0.
    constant : bool
        Of None alone: the derivative of the identity.
    formula : weakref to Expr, optional
        As long as it lives, what is made of this is kept.
    """

    graph: str | None
    dtype: str
    short: bool = False
    guard: bool = False
    constant: bool = False
    formula: weakref.ref[Expr] | None = field(default=None, compare=False)

    def formulas(self) -> list[Expr]:
        """The formula, if there is one and it still lives."""
        found = None if self.formula is None else self.formula()
        return [] if found is None else [found]

    @property
    def numfuse_key(self) -> str:
        """Its text in the digest of a kernel."""
        graph = "1" if self.constant else "x"
        if self.graph is not None:
            graph = hashlib.sha256(self.graph.encode()).hexdigest()
        return f"scalar {graph} {self.dtype} {self.short} {self.guard}"

    def text(self) -> str:
        """The function, to be read."""
        return self.rendered()[0]

    def rendered(self) -> tuple[str, dict[str, Any]]:
        """The text, and the constants that it names."""
        if self.graph is None:
            return f"def formula(x):\n    return {'one' if self.constant else 'x'}\n", {}
        return render(loads(self.graph), self.dtype, growth=not self.short)

    def build(self) -> Any:
        """The device function."""
        return _built(self)


@lifetimes.kept(1024)
def scalar(
    expr: Expr | None,
    accumulator: str,
    storage: str,
    *,
    guard: bool = False,
    constant: bool = False,
    short: bool = False,
) -> Scalar:
    """The function of an epilogue whose result is stored as `storage`; `short`: of a value that is
    itself good to some units in the last place."""
    if expr is None:
        # f' of the identity is 1, and never needs the guard
        return Scalar(None, accumulator, constant=constant)
    short |= accumulator == "float32" and storage in ("float16", "bfloat16")
    graph = dumps((short_form(expr) if short else expr,))
    return Scalar(graph, accumulator, short, guard, constant, weakref.ref(expr))


@lifetimes.kept(1024)
def _built(function: Scalar) -> Any:
    real = np.dtype(function.dtype).type
    scope: dict[str, Any] = {"one": real(1), "zero": real(0)}
    text, constants = function.rendered()
    if function.graph is not None:
        names = _short_primitives() if function.short else scalars.primitives(function.dtype)
        scope |= {**vars(names), **constants}
    exec(compile(text, f"<numfuse {function.dtype} formula>", "exec"), scope)
    formula = device(scope["formula"])
    if not function.guard:
        return formula
    nothing = real(0)

    def guarded(x):  # type: ignore[no-untyped-def]
        value = formula(x)
        return select(is_finite(value), value, nothing)

    return device(guarded)


def device_function(expr: Expr, name: str) -> Any:
    """The graph as a device function for kernels of your own; integers become float64."""
    if SIMULATED:

        def simulated(x: Any) -> Any:
            dtype = "float32" if isinstance(x, np.float32) else "float64"
            return scalar(expr, dtype, dtype).build()(np.dtype(dtype).type(x))

        simulated.__name__ = simulated.__qualname__ = name
        return simulated

    def stub(x):  # type: ignore[no-untyped-def]
        raise NotImplementedError  # numba-cuda replaces it by what its overload picks

    @import_module("numba.cuda.extending").overload(stub)
    def pick(x):  # type: ignore[no-untyped-def]
        if isinstance(x, types.Float):
            dtype = f"float{x.bitwidth}"
            function = scalar(expr, dtype, dtype).build()
            return lambda x: function(x)
        if isinstance(x, (types.Integer, types.Boolean)):
            function = scalar(expr, "float64", "float64").build()
            return lambda x: function(types.float64(x))
        return None

    def call(x):  # type: ignore[no-untyped-def]
        return stub(x)

    call.__name__ = call.__qualname__ = name
    return device(call)


# --- the short form -----------------------------------------------------------------------------
def _approximate(name: str, simulated: Any) -> Any:
    """An instruction of the special function unit."""
    if SIMULATED:
        return simulated

    def typed(typingctx, x):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return intrinsics.approximate(builder, name, *args)

        return x(x), codegen

    typed.__name__ = typed.__qualname__ = f"{name}_approx"
    return intrinsic(typed)


def _simulated_reciprocal(x: Any) -> Any:
    return np.float32(1) / np.float32(x)


#: 2^x.
power = _approximate("ex2", lambda x: np.exp2(np.float32(x)))
#: 1 / x.
reciprocal = _approximate("rcp", _simulated_reciprocal)


@functools.cache
def _short_primitives() -> SimpleNamespace:
    """The primitives of float32 in their short form, by the names of `numfuse.expr`.

    A low word is ignored. Factors are multiplied in last: a 16-bit result has no use for what they
    keep of a subnormal exponential.
    """
    full = scalars.primitives("float32")
    log2e, one, two, zero = (np.float32(v) for v in (math.log2(math.e), 1, 2, 0))
    third, fifth = np.float32(-1 / 3), np.float32(2 / 15)
    near_zero = np.float32(0.0625)
    jit, absolute, copy_sign = TARGET.jit, TARGET.absolute, TARGET.copy_sign

    @jit
    def plain_exp(factor, x):  # type: ignore[no-untyped-def]
        return factor * power(x * log2e)

    @jit
    def scaled_exp(factor, hi, lo):  # type: ignore[no-untyped-def]
        return factor * power(hi * log2e)

    @jit
    def exp(x):  # type: ignore[no-untyped-def]
        return power(x * log2e)

    @jit
    def plain_sigmoid(factor, x):  # type: ignore[no-untyped-def]
        return factor * reciprocal(one + power(x * -log2e))

    @jit
    def scaled_sigmoid(factor, hi, lo):  # type: ignore[no-untyped-def]
        return factor * reciprocal(one + power(hi * -log2e))

    @jit
    def plain_complement(factor, x):  # type: ignore[no-untyped-def]
        return factor * reciprocal(one + power(x * log2e))

    @jit
    def scaled_complement(factor, hi, lo):  # type: ignore[no-untyped-def]
        return factor * reciprocal(one + power(hi * log2e))

    @jit
    def plain_bell(factor, x):  # type: ignore[no-untyped-def]
        # s (1 - s) by e^-|x|, which is at most 1
        e = power(absolute(x) * -log2e)
        r = reciprocal(one + e)
        return factor * (e * r) * r

    @jit
    def scaled_bell(factor, hi, lo):  # type: ignore[no-untyped-def]
        return plain_bell(factor, hi)

    @jit
    def tanh(x):  # type: ignore[no-untyped-def]
        # 1 - 2 / (e^2x + 1) cancels near 0, where the series to x^5 is good to 2^-21
        square = x * x
        near = fused(x * square, fused(square, fifth, third), x)
        far = fused(-two, reciprocal(one + power(two * log2e * x)), one)
        return copy_sign(select(absolute(x) < near_zero, near, far), x)  # of -0 too

    @jit
    def product_low(a, b):  # type: ignore[no-untyped-def]
        return zero

    return SimpleNamespace(
        **{
            **vars(full),
            "plain_exp": plain_exp,
            "scaled_exp": scaled_exp,
            "exp": exp,
            "plain_sigmoid": plain_sigmoid,
            "scaled_sigmoid": scaled_sigmoid,
            "plain_complement": plain_complement,
            "scaled_complement": scaled_complement,
            "plain_bell": plain_bell,
            "scaled_bell": scaled_bell,
            "tanh": tanh,
            "product_low": product_low,
        }
    )
