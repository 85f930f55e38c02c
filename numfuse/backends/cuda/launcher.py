"""All launches of a call in one C call: a compiled loop around the driver's own launch.

Python would take 2 us for each launch beside the driver's 2. The loop is compiled for the CPU by
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


def launch_loop(function, count, launches, many, updates, bases, stream, status):
    """Write `many` addresses where arguments are, and make `count` launches.

    launches: (config, handle, arguments) each; updates: (where, number of the base, offset) each.
    status: which launch failed, and how; -1 where none did.
    """
    for i in range(many):
        at = updates + 24 * i
        STORE(LOAD(at), LOAD(bases + 8 * LOAD(at + 8)) + LOAD(at + 16))
    STORE(status, -1)
    for i in range(count):
        at = launches + 24 * i
        config = LOAD(at)
        STORE(config + STREAM_OFFSET, stream)
        result = CALL(function, config, LOAD(at + 8), LOAD(at + 16))
        if result != 0:
            STORE(status, i)
            STORE(status + 8, result)
            return


# The text of an intrinsic is in the key by a number that a change of it raises.
load.numfuse_key, store.numfuse_key = "launcher.load 1", "launcher.store 1"
call.numfuse_key = "launcher.call 1"


@functools.cache
def launch_all() -> Callable[..., Any]:
    """The compiled loop, with eight integers as its arguments."""
    made = specialise.kernel(
        launch_loop, LOAD=load, STORE=store, CALL=call, STREAM_OFFSET=STREAM_OFFSET
    )
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)
    function = signature(made.address)
    function.keeper = made
    return function
