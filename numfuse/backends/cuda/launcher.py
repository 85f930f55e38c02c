"""All launches of a call in one C call: a compiled loop around the driver's own launch.

Python would take 2 us for each launch beside the driver's 4. The loop is compiled for the CPU by
Numba and kept in its disk cache, as the kernels of the CPU backend are.
"""

# A Numba function has no annotations, and a call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, name-defined, attr-defined, unreachable"
# ruff: noqa: F821
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numfuse import specialise

__all__ = ["STREAM_OFFSET", "launch_all"]

#: Bytes from the beginning of a CUlaunchConfig to its stream.
STREAM_OFFSET = 32
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


@intrinsic
def load(typingctx, address):
    """The int64 at an address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    """Write an int64."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call(typingctx, function, config, handle, arguments):
    """cuLaunchKernelEx(config, handle, arguments, NULL)."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64] * 4)
        pointer = builder.inttoptr(args[0], kind.as_pointer())
        status = builder.call(pointer, [*args[1:], ir.Constant(_I64, 0)])
        return builder.sext(status, _I64)

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def call_one(typingctx, function, argument):
    """A function of the driver with one argument."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64])
        status = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return builder.sext(status, _I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def call_two(typingctx, function, first, second):
    """A function of the driver with two arguments."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64] * 2)
        status = builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return builder.sext(status, _I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


def launch_loop(functions, count, launches, many, updates, bases, stream, state):
    """Write `many` addresses where arguments are, and make `count` launches.

    functions: cuLaunchKernelEx, cuCtxGetCurrent, cuCtxSetCurrent, the context, cuGraphLaunch.
    launches: (config, handle, arguments) each; updates: (where, number of the base, offset) each.
    A `count` of 0 launches the graph at `launches`. state: which launch failed, how, and the
    context of the thread before; -1 where none did.
    """
    context = LOAD(functions + 24)
    CALL_ONE(LOAD(functions + 8), state + 16)
    before = LOAD(state + 16)
    if before != context:
        CALL_ONE(LOAD(functions + 16), context)
    STORE(state, -1)
    if count == 0:
        result = CALL_TWO(LOAD(functions + 32), launches, stream)
        if result != 0:
            STORE(state, 0)
            STORE(state + 8, result)
    for i in range(many):
        at = updates + 24 * i
        STORE(LOAD(at), LOAD(bases + 8 * LOAD(at + 8)) + LOAD(at + 16))
    function = LOAD(functions)
    for i in range(count):
        at = launches + 24 * i
        config = LOAD(at)
        STORE(config + STREAM_OFFSET, stream)
        result = CALL(function, config, LOAD(at + 8), LOAD(at + 16))
        if result != 0:
            STORE(state, i)
            STORE(state + 8, result)
            break
    if before != context and before != 0:
        CALL_ONE(LOAD(functions + 16), before)


# The text of an intrinsic is in the key by a number that a change of it raises.
load.numfuse_key, store.numfuse_key = "launcher.load 1", "launcher.store 1"
call.numfuse_key = "launcher.call 1"
call_one.numfuse_key, call_two.numfuse_key = "launcher.call_one 1", "launcher.call_two 1"


@functools.cache
def launch_all() -> Callable[..., Any]:
    """The compiled loop, with eight integers as its arguments."""
    made = specialise.kernel(
        launch_loop,
        LOAD=load,
        STORE=store,
        CALL=call,
        CALL_ONE=call_one,
        CALL_TWO=call_two,
        STREAM_OFFSET=STREAM_OFFSET,
    )
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)
    function = signature(made.address)
    function.keeper = made
    return function
