"""The operations of `numfuse.expr` as branch-free Numba functions.

The arithmetic is that of `numfuse.language.scalar`, without a call of libm, so that LLVM turns a
plain loop over it into vector code (Numba's wheels have no SVML). Here are the intrinsics that it
needs: integer work on the bits of a float, as Numba promotes int32 arithmetic to int64.
"""

# A Numba function has no annotations, and a call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, unreachable, var-annotated, arg-type"
from __future__ import annotations

import functools
import hashlib
import pathlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from numfuse.expr import Expr, dumps
from numfuse.language import scalar
from numfuse.language.coefficients import EXP
from numfuse.language.python import render
from numfuse.language.scalar import Target
from numfuse.runtime import machine_code
from numfuse.runtime.compilation import compiled

# An option that is left out would be the caller's: a kernel has fast-math flags.
_OPTIONS: dict[str, Any] = {"forceinline": True, "error_model": "numpy", "fastmath": False}


# --- intrinsics ---------------------------------------------------------------------------------
def _llvm(bits: int) -> tuple[Any, Any, int, int]:
    """Float type, integer type, mantissa bits and exponent bias of a float of `bits` bits."""
    if bits == 32:
        return ir.FloatType(), ir.IntType(32), 23, 127
    return ir.DoubleType(), ir.IntType(64), 52, 1023


def _named(name: str, operands: int) -> Any:
    """An LLVM intrinsic of `operands` floats of one type."""

    def typed(x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            ty = args[0].type
            function = builder.module.declare_intrinsic(
                name, [ty], ir.FunctionType(ty, [ty] * operands)
            )
            return builder.call(function, args)

        return x(*[x] * operands), codegen

    if operands == 1:
        return intrinsic(lambda typingctx, x: typed(x))
    if operands == 2:
        return intrinsic(lambda typingctx, x, y: typed(x))
    return intrinsic(lambda typingctx, x, y, z: typed(x))


absolute = _named("llvm.fabs", 1)
square_root = _named("llvm.sqrt", 1)
copy_sign = _named("llvm.copysign", 2)
fused = _named("llvm.fma", 3)


@intrinsic
def rounded_product(typingctx: Any, a: Any, b: Any) -> Any:
    """a * b as a product of its own.

    Numba gives its fast-math flags to every instruction that has none; `arcp` says nothing about a
    product, and without `contract` LLVM never merges it into an fma.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args, flags=("arcp",))

    return a(a, a), codegen


rounded_product.numfuse_key = "rounded_product"  # type: ignore[attr-defined]


@intrinsic
def select(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    """LLVM's select: both sides are computed, nothing branches."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return a(types.boolean, a, a), codegen


def _logical(name: str) -> Any:
    def typed() -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return codegen

    if name == "not_":
        return intrinsic(lambda typingctx, a: (types.boolean(types.boolean), typed()))
    return intrinsic(lambda typingctx, a, b: (types.boolean(types.boolean, types.boolean), typed()))


both, either, negation = _logical("and_"), _logical("or_"), _logical("not_")


@intrinsic
def power_of_two(typingctx: Any, shifted: Any) -> Any:
    """2^n for a normal result, n the low bits of ``n + 1.5 * 2^mantissa``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(signature.return_type.bitwidth)
        n = builder.bitcast(args[0], integer)
        raised = builder.shl(builder.add(n, integer(bias)), integer(mantissa))
        return builder.bitcast(raised, real)

    return shifted(shifted), codegen


@intrinsic
def raised_exponent(typingctx: Any, shifted: Any) -> Any:
    """2^(k - bias), k > 0 the low bits of ``k + 1.5 * 2^mantissa``: one shift drops the others."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, _ = _llvm(signature.return_type.bitwidth)
        return builder.bitcast(
            builder.shl(builder.bitcast(args[0], integer), integer(mantissa)), real
        )

    return shifted(shifted), codegen


@intrinsic
def toward(typingctx: Any, low: Any, high: Any) -> Any:
    """`low`, its sign turned where `high` is negative: the low word of abs(high + low)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, _, _ = _llvm(signature.return_type.bitwidth)
        sign = integer(1 << (integer.width - 1))
        low, high = (builder.bitcast(a, integer) for a in args)
        return builder.bitcast(builder.xor(low, builder.and_(high, sign)), real)

    return low(low, low), codegen


@intrinsic
def two_powers_of_two(typingctx: Any, shifted: Any) -> Any:
    """Two normal numbers whose product is 2^n, n from -2 * bias to 2 * bias."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(signature.args[0].bitwidth)
        # The top bits of the shifted float are those of 1.5 * 2^mantissa: take them away, and
        # work with n + 2 * bias, which is not negative (an arithmetic shift of 64 bits is slow).
        magic = 0x4B400000 if mantissa == 23 else 0x4338000000000000
        n = builder.sub(builder.bitcast(args[0], integer), integer(magic - 2 * bias))
        half = builder.lshr(n, integer(1))
        rest = builder.sub(n, half)
        parts = [builder.bitcast(builder.shl(h, integer(mantissa)), real) for h in (half, rest)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(shifted, 2)(shifted), codegen


@intrinsic
def exponent_parts(typingctx: Any, u: Any) -> Any:
    """(k, m, 2^(2 - k)) with u = 2^k m, m from sqrt(1/2) to sqrt(2); u normal, k above -125.

    2^-k itself is subnormal for the largest u.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(signature.args[0].bitwidth)
        root = 0x3F3504F3 if mantissa == 23 else 0x3FE6A09E667F3BCD
        shift = integer(mantissa)
        bits = builder.bitcast(args[0], integer)
        k = builder.ashr(builder.sub(bits, integer(root)), shift)
        m = builder.sub(bits, builder.shl(k, shift))
        scale = builder.shl(builder.sub(integer(bias + 2), k), shift)
        parts = [builder.sitofp(k, real), builder.bitcast(m, real), builder.bitcast(scale, real)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(u, 3)(u), codegen


_TARGET = Target(
    jit=functools.partial(machine_code.inlined, **_OPTIONS),
    absolute=absolute,
    square_root=square_root,
    copy_sign=copy_sign,
    fused=fused,
    rounded_product=rounded_product,
    select=select,
    both=both,
    either=either,
    negation=negation,
    power_of_two=power_of_two,
    raised_exponent=raised_exponent,
    two_powers_of_two=two_powers_of_two,
    exponent_parts=exponent_parts,
    toward=toward,
    halves=True,
)


@functools.cache
def primitives(dtype: str) -> SimpleNamespace:
    """The primitives of one dtype ("float32" or "float64"), by the names of `numfuse.expr`."""
    return scalar.primitives(dtype, _TARGET)


# --- functions ----------------------------------------------------------------------------------
@functools.cache
def _own_text() -> bytes:
    return b"".join(path.read_bytes() for path in (pathlib.Path(__file__), *scalar.SOURCES))


#: Those that a kernel, or a function of the user's, is made of.
_FUNCTIONS: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def scalar_function(
    exprs: tuple[Expr, ...], dtype: str, arguments: tuple[str, ...] | None = None
) -> Any:
    """Return graphs as one branch-free Numba function of scalars, inlined wherever it is called.

    One graph makes a scalar result, several a tuple of results that share what they can. `dtype`,
    "float32" or "float64", is that of the arguments, of every operation and of the results;
    `arguments` orders the graphs' inputs (by default there is one, the symbol). Its
    ``numfuse_key`` is the digest of its text, its dtype, this file and the coefficients.
    """
    if dtype not in EXP:
        raise TypeError(f"expected dtype 'float32' or 'float64', got {dtype!r}")
    key = dumps(exprs), dtype, arguments
    known = _FUNCTIONS.get(key)
    if known is not None:
        return known
    text, constants = render(exprs, dtype, arguments=arguments)
    material = f"{dtype}\n{constants}\n{text}".encode() + _own_text()
    scope: dict[str, Any] = {**vars(primitives(dtype)), **constants}
    exec(compile(text, f"<numfuse {dtype} formula>", "exec"), scope)
    made = machine_code.inlined(scope["formula"], **_OPTIONS)
    made.numfuse_key = hashlib.sha256(material).hexdigest()
    return _FUNCTIONS.setdefault(key, made)


def device_function(expr: Expr, name: str) -> Callable[..., Any]:
    """The graph as a Numba function for float32 and float64 scalars (integers become float64)."""

    def stub(x):
        raise NotImplementedError  # Numba replaces it by the function that its overload picks

    @overload(stub, inline="never", jit_options=_OPTIONS)
    def pick(x):
        if isinstance(x, types.Float):
            function = scalar_function((expr,), f"float{x.bitwidth}")
            return lambda x: function(x)
        if isinstance(x, (types.Integer, types.Boolean)):
            function = scalar_function((expr,), "float64")
            return lambda x: function(np.float64(x))
        return None

    def call(x):
        return stub(x)

    call.__name__ = call.__qualname__ = name
    return compiled(lambda: njit(**_OPTIONS)(call))  # (as in `machine_code.inlined`)
