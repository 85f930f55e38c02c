"""All launches of a call in one call: a compiled loop around the driver's own launch.

Python would take 2 us for each launch beside the driver's 4, and 10 us to encode a tensor map for
another address. The loop is compiled for the CPU by Numba and kept in its disk cache, as the
kernels of the CPU backend are. It is called as a function of Numba, which takes 0.2 us: ctypes
takes 0.1 us for each integer beside 0.2 for the call.
"""

# A Numba function has no annotations, and a call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, name-defined, attr-defined, unreachable"
# ruff: noqa: F821
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numfuse.backends.cuda.driver.modules import STREAMS
from numfuse.runtime import specialise

specialise.register(__name__, __file__)

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
def call(typingctx, function, *arguments):
    """A function of the driver with integers; its status."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [_I64] * len(arguments))
        given = cgutils.unpack_tuple(builder, args[1], len(arguments))
        status = builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)
        return builder.sext(status, _I64)

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@intrinsic
def claim(typingctx, address, value):
    """Write an int64 where 0 is, in one step; what was there."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        order = "monotonic"
        both = builder.cmpxchg(pointer, ir.Constant(_I64, 0), args[1], order, order)
        return builder.extract_value(both, 0)

    return types.int64(types.int64, types.int64), codegen


def launch_loop(plan, stream, graph):
    """Launch all of a call on a stream; a `graph` that is not 0 is launched instead.

    Returns the number of the launch that failed, whose status is in the plan; -1: none.

    plan: the words that `PLAN` names. launches: (config, handle, arguments) each. updates: (where,
    number of the base, offset) of each address among the arguments. maps: (where, number of the
    base, offset, launch, address that it is made for) of each tensor map. uses: the words of each
    `modules.Module` that may be unloaded; calls without one do not ask whether there is a capture.
    """
    context = LOAD(plan + CONTEXT)
    CALL(LOAD(plan + GET_CURRENT), plan + BEFORE)
    before = LOAD(plan + BEFORE)
    if before != context:
        CALL(LOAD(plan + SET_CURRENT), context)
    failed = -1
    uses = LOAD(plan + USES)
    captured = 0
    if LOAD(plan + USE_COUNT) != 0 and stream != 0:  # (the legacy stream never is)
        STORE(plan + CAPTURED, 0)
        CALL(LOAD(plan + IS_CAPTURING), stream, plan + CAPTURED)
        captured = LOAD(plan + CAPTURED)
    for i in range(LOAD(plan + USE_COUNT)):
        words = LOAD(uses + 8 * i)
        if captured != 0:
            STORE(words, 1)
        else:
            noted = False
            for j in range(STREAMS):
                at = words + 8 * (2 + j)
                found = LOAD(at)
                if found == 0:
                    found = CLAIM(at, stream + 1)
                if found == 0 or found == stream + 1:
                    noted = True
                    break
            if not noted:
                STORE(words + 8, 1)
    if graph != 0:
        status = CALL(LOAD(plan + LAUNCH_GRAPH), graph, stream)
        if status != 0:
            failed = 0
            STORE(plan + STATUS, status)
    else:
        bases = LOAD(plan + BASES)
        updates = LOAD(plan + UPDATES)
        for i in range(LOAD(plan + UPDATE_COUNT)):
            at = updates + 24 * i
            STORE(LOAD(at), LOAD(bases + 8 * LOAD(at + 8)) + LOAD(at + 16))
        maps = LOAD(plan + MAPS)
        for i in range(LOAD(plan + MAP_COUNT)):
            at = maps + 40 * i
            address = LOAD(bases + 8 * LOAD(at + 8)) + LOAD(at + 16)
            if address != LOAD(at + 32):
                status = CALL(LOAD(plan + REPLACE_ADDRESS), LOAD(at), address)
                if status != 0:
                    failed = LOAD(at + 24)
                    STORE(plan + STATUS, status)
                    break
                STORE(at + 32, address)
        if failed < 0:
            function = LOAD(plan + LAUNCH)
            launches = LOAD(plan + LAUNCHES)
            for i in range(LOAD(plan + LAUNCH_COUNT)):
                at = launches + 24 * i
                config = LOAD(at)
                STORE(config + STREAM_OFFSET, stream)
                status = CALL(function, config, LOAD(at + 8), LOAD(at + 16), 0)
                if status != 0:
                    failed = i
                    STORE(plan + STATUS, status)
                    break
    if before != context and before != 0:
        CALL(LOAD(plan + SET_CURRENT), before)
    return failed


# The text of an intrinsic is in the key by a number that a change of it raises.
load.numfuse_key, store.numfuse_key = "launcher.load 1", "launcher.store 1"
call.numfuse_key, claim.numfuse_key = "launcher.call 1", "launcher.claim 1"


#: The words of a plan: the context and the driver's functions, tables, the status of a launch that
#: failed, the context of the thread before, and whether the stream is captured.
PLAN = tuple(
    "CONTEXT LAUNCH GET_CURRENT SET_CURRENT LAUNCH_GRAPH REPLACE_ADDRESS IS_CAPTURING "
    "LAUNCH_COUNT LAUNCHES UPDATE_COUNT UPDATES MAP_COUNT MAPS USE_COUNT USES BASES "
    "STATUS BEFORE CAPTURED".split()
)


_BOUND: dict[str, Any] = {
    "LOAD": load,
    "STORE": store,
    "CLAIM": claim,
    "CALL": call,
    "STREAM_OFFSET": STREAM_OFFSET,
    "STREAMS": STREAMS,
    **{name: 8 * i for i, name in enumerate(PLAN)},
}


@functools.cache
def launch_all() -> Callable[[int, int, int], int]:
    """The compiled loop. Other threads run beside it: the driver waits where a queue is full."""
    signature = types.int64(types.int64, types.int64, types.int64)
    made: Callable[[int, int, int], int] = specialise.entry(launch_loop, signature, **_BOUND)
    return made


def inlined() -> Any:
    """Return the loop as a part of other compiled functions."""
    return specialise.device(launch_loop, **_BOUND)
