"""XLA's call of a custom operation, answered by machine code: no interpreter, no lock of its.

Its functions and those of `launches` are templates, compiled as numfuse's kernels are. XLA calls
`answer` with the address of a call frame (`xla/ffi/api/c_api.h`), at which this module looks by the
numbers below. A call names a record by its key; the record says where a program's arrays come from
and which sequences are run on them. A key that is not in the table is asked for in Python, once.

Several threads may be here at once, each with memory of its own, which is kept for the next call.
A sequence that is worth more threads asks XLA's pool for them, which may come late or never. On
CUDA the recorded launches go to XLA's stream, with memory of XLA's.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from numfuse.adapters.jax import launches
from numfuse.backends.cpu.kernels.protocol import Schema
from numfuse.backends.cpu.launch import entries
from numfuse.backends.cpu.launch.workspace import HUGE_PAGE
from numfuse.backends.cpu.llvm import intrinsics
from numfuse.backends.cpu.llvm.vectors import I64, typed_intrinsic
from numfuse.runtime import specialise

specialise.register(__name__.rpartition(".")[0], str(Path(__file__).with_name("__init__.py")))

# ruff: noqa: F821  (the free names of a template are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: The words of this process: calls that are under way; the table; what Python is asked by; the
#: version that a query is answered with; why a record is missing;
#: functions of the C library, and `help_out`; CUDA's question for the device, and that a launch
#: failed; bytes of kept memory, now and at most; the slots.
ROOT = Schema("""
    R_INSIDE R_TABLE R_RESOLVE R_VERSION R_MISSING R_NO_MEMORY
    R_ALLOCATE R_FREE R_FILL R_ADVISE R_YIELD R_HELP
    R_DEVICE R_NOT_LAUNCHED
    R_KEPT R_MOST R_SLOTS
""")
#: Memory of a launch, a line each: who has it, where it is, its bytes; what helpers need: seats,
#: how many have left theirs, and what they work at.
SLOT = Schema("S_TAKEN S_MEMORY S_SIZE S_SEATS S_LEFT S_TABLE S_STRIDE S_YIELD")
#: Calls that may have memory at once.
SLOTS = max(4, os.cpu_count() or 1)
#: A record: bytes of memory, how many arrays, arrays to be zeroed and sequences; then for each
#: array its source (a kind, and above two bits a number or an offset), for each zeroed one its
#: number and bytes, and the sequences.
RECORD = Schema("N_SIZE N_ARRAYS N_ZEROED N_SEQUENCES")
SEQUENCE = Schema("Q_STEPS Q_COUNT Q_THREADS Q_STRIDE Q_TABLE")
#: A record of CUDA's: who launches it, bytes of memory and of those the first part's, the plan of
#: `launcher.launch_loop` (0: nothing is to be done) and its bases, how many arrays; then the source
#: of each.
ON_STREAM = Schema("C_TAKEN C_SIZE C_WORK C_PLAN C_BASES C_ARRAYS")
#: Where an array of a program comes from.
SOURCE = {"NOWHERE": 0, "OPERAND": 1, "RESULT": 2, "MEMORY": 3}

_SCHEMAS = {"ROOT": ROOT, "SLOT": SLOT, "RECORD": RECORD, "SEQUENCE": SEQUENCE, "STREAM": ON_STREAM}
#: Numbers of 64-bit words in XLA's structs, and constants of its interface.
_XLA = {
    "F_EXTENSION": 1, "F_API": 2, "F_CONTEXT": 3, "F_STAGE": 4, "F_ARGS": 9, "F_RETS": 14,
    "F_ATTRS": 20, "B_DATA": 3, "A_ERROR_CREATE": 6, "A_ERROR_DESTROY": 8,
    "A_SCHEDULE": 17, "A_STREAM": 10, "A_DEVICE_ALLOCATE": 15, "A_DEVICE_FREE": 16,
    "STAGE_EXECUTE": 3, "EXTENSION_METADATA": 1, "FAILED": 9, "EXHAUSTED": 8, "INTERNAL": 13,
}  # fmt: skip
#: Bytes of which the address of CUDA's workspace is a multiple.
ALIGNED = 256
#: A key differs between devices in the bits from here on.
DEVICE_BITS = 40
_CONSTANTS = {
    "SLOTS": SLOTS,
    "ALIGNED": ALIGNED,
    "DEVICE_BITS": DEVICE_BITS,
    "HUGE_PAGE": HUGE_PAGE,
    "MADV_HUGEPAGE": 14,
    "LOW": 0xFFFFFFFF,  # what is 32 bits wide shares a word
}


# --- templates ------------------------------------------------------------------------------------
def look_up(table: int, key: int) -> int:
    """Return the record of a key, 0 where there is none; the table's first word is its mask."""
    t = WORDS(table)
    at = key & t[0]
    while t[1 + 2 * at] != 0 and t[1 + 2 * at] != key:
        at = (at + 1) & t[0]
    return t[2 + 2 * at]


def failed(frame: int, message: int, code: int) -> int:
    """Return a new error of XLA's."""
    about = STACK_4()
    e = WORDS(about)
    e[0], e[1], e[2], e[3] = 28, 0, message, code  # (28: bytes of the struct up to the code)
    return ASK_1(WORDS(WORDS(frame)[F_API])[A_ERROR_CREATE], about)


def asked(frame: int, function: int, about: int, size: int) -> int:
    """Return the error of a function of XLA's, 0 for none; its struct has `size` bytes."""
    f, a = WORDS(frame), WORDS(about)
    a[0], a[1], a[2] = size, 0, f[F_CONTEXT]
    return ASK_1(WORDS(f[F_API])[function], about)


def found(frame: int, root: int, ordinal: int) -> int:
    """Return the record that a call names on a device (the host is -1), or 0."""
    r = WORDS(root)
    attributes = WORDS(WORDS(frame)[F_ATTRS])  # in the order of their names: key, what
    key = WORDS(WORDS(attributes[0])[1])[0]
    own = key ^ ((ordinal + 1) << DEVICE_BITS)
    record = LOOK_UP(r[R_TABLE], own)
    if record == 0:
        what = WORDS(attributes[1])
        CALL_4(r[R_RESOLVE], key, what[0], what[1], ordinal)
        record = LOOK_UP(r[R_TABLE], own)
    return record


def place(frame: int, source: int, memory: int) -> int:
    """Return the address of an array from its source in a record."""
    f = WORDS(frame)
    kind, number = source & 3, source >> 2
    if kind == OPERAND:
        return WORDS(WORDS(f[F_ARGS])[number])[B_DATA]
    if kind == RESULT:
        return WORDS(WORDS(f[F_RETS])[number])[B_DATA]
    return memory + number if kind == MEMORY else 0


def execute(frame: int, root: int) -> int:
    """Run the record that a call names on its buffers; return 0, or the address of an error."""
    r = WORDS(root)
    record = FOUND(frame, root, -1)
    if record == 0:
        return FAILED_WITH(frame, r[R_MISSING], FAILED)
    n = WORDS(record)
    slot = TAKE(root, n[N_SIZE])
    if slot == 0:
        return FAILED_WITH(frame, r[R_NO_MEMORY], EXHAUSTED)
    memory = WORDS(slot)[S_MEMORY]
    addresses = STACK_32()
    a = WORDS(addresses)
    at = RECORD_WORDS
    for i in range(n[N_ARRAYS]):
        a[i] = PLACE(frame, n[at], memory)
        at += 1
    for _ in range(n[N_ZEROED]):
        CALL_3(r[R_FILL], a[n[at]], 0, n[at + 1])
        at += 2
    for _ in range(n[N_SEQUENCES]):
        sequence = record + 8 * at
        q = WORDS(sequence)
        OPEN(q[Q_STEPS], q[Q_COUNT], addresses, memory, memory + q[Q_TABLE])
        if q[Q_THREADS] > 1:
            SHARE_OUT(frame, root, slot, sequence)
        else:
            WORK(memory + q[Q_TABLE], memory, 0)
        at += SEQUENCE_WORDS
    GIVE_BACK(root, slot)
    return 0


def execute_on_stream(frame: int, root: int) -> int:
    """Launch the record that a call names on XLA's stream; return 0, or the address of an error.

    The memory is XLA's, in the order of the stream: it is given back when all is launched. The
    launches read the record's words, so one thread at a time has them; the driver copies what it
    needs before it returns.
    """
    r = WORDS(root)
    about = STACK_6()
    a = WORDS(about)
    a[0] = 0
    ASK_1(r[R_DEVICE], about)
    record = FOUND(frame, root, a[0] & LOW)
    if record == 0:
        return FAILED_WITH(frame, r[R_MISSING], FAILED)
    n = WORDS(record)
    if n[C_PLAN] == 0:
        return 0
    a[3] = 0
    error = ASKED(frame, A_STREAM, about, 32)
    if error != 0:
        return error
    stream, memory, size = a[3], 0, n[C_SIZE] + ALIGNED
    if n[C_SIZE] != 0:
        a[3], a[4], a[5] = size, 16, 0  # (16: the alignment that XLA promises at most)
        error = ASKED(frame, A_DEVICE_ALLOCATE, about, 48)
        if error != 0:
            return error
        memory = a[5]
    base = (memory + ALIGNED - 1) & -ALIGNED
    looks = 0
    while FETCH_ADD(record, 1) != 0:
        FETCH_ADD(record, -1)
        looks = LOOK_AGAIN(looks, r[R_YIELD])
    b = WORDS(n[C_BASES])
    b[0], b[1] = base, base + n[C_WORK]
    for i in range(n[C_ARRAYS]):
        b[2 + i] = PLACE(frame, n[STREAM_WORDS + i], base)
    launched = LAUNCH_LOOP(n[C_PLAN], stream, 0)
    FETCH_ADD(record, -1)
    if n[C_SIZE] != 0:
        a[3], a[4] = size, memory
        error = ASKED(frame, A_DEVICE_FREE, about, 40)
        if error != 0:
            return error
    if launched >= 0:
        return FAILED_WITH(frame, r[R_NOT_LAUNCHED], INTERNAL)
    return 0


def answer(frame: int) -> int:
    """Answer a call of XLA's; return 0, or the address of an error.

    A frame whose first word, its bytes, is negative is numfuse's own: the next one is `ROOT`'s
    address.
    """
    f = WORDS(frame)
    known = WORDS(GLOBAL())
    if f[0] < 0:
        known[0] = f[1]
        return 0
    root = known[0]
    extension = f[F_EXTENSION]
    while extension != 0:
        e = WORDS(extension)
        if e[1] & LOW == EXTENSION_METADATA:
            WORDS(e[3])[3] = WORDS(root)[R_VERSION]
            return 0
        extension = e[2]
    if f[F_STAGE] & LOW != STAGE_EXECUTE:
        return 0
    FETCH_ADD(root + 8 * R_INSIDE, 1)
    error = EXECUTE(frame, root)
    FETCH_ADD(root + 8 * R_INSIDE, -1)
    return error


# --- what they are bound to -----------------------------------------------------------------------
def _ask(count: int) -> Any:
    """``ask(function, *args) -> int64``: call a function of C by its address."""

    def emit(context: Any, builder: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> ir.Value:
        ty = ir.FunctionType(I64, [I64] * count)
        return builder.call(builder.inttoptr(function, ty.as_pointer()), args)

    return typed_intrinsic(f"ask {count}", types.int64, [types.int64] * (count + 1), emit)


def _stack(count: int) -> Any:
    """``stack() -> int64``: the address of so many words, which live as long as the call."""

    def emit(context: Any, builder: ir.IRBuilder) -> ir.Value:
        return builder.ptrtoint(cgutils.alloca_once(builder, I64, size=count), I64)

    return typed_intrinsic(f"stack {count}", types.int64, [], emit)


def _global() -> Any:
    """``known() -> int64``: the address of a word that the machine code has of its own."""

    def emit(context: Any, builder: ir.IRBuilder) -> ir.Value:
        name = "numfuse_root"
        found = builder.module.globals.get(name)
        if found is None:
            found = cgutils.add_global_variable(builder.module, I64, name)
            found.initializer, found.linkage = I64(0), "internal"
        return builder.ptrtoint(found, I64)

    return typed_intrinsic("known_word", types.int64, [], emit)


@functools.cache
def _names() -> dict[str, Any]:
    """Return what the templates are bound to."""
    names: dict[str, Any] = {**entries.parts(entries.data_of_address), "GLOBAL": _global()}
    names |= {**_XLA, **_CONSTANTS, **SOURCE}
    for name, schema in _SCHEMAS.items():
        names |= {**schema, f"{name}_WORDS": len(schema)}
    names |= {f"STACK_{n}": _stack(n) for n in (4, 5, 6, 32)}
    names |= {f"ASK_{n}": _ask(n) for n in (1, 3)}
    names |= {f"CALL_{n}": intrinsics.make_call(n) for n in (1, 3, 4)}
    names["WORDS"] = intrinsics.make_elements("int64")
    # Each may call those before it.
    for name, template in (
        ("LOOK_UP", look_up),
        ("FOUND", found),
        ("PLACE", place),
        ("FAILED_WITH", failed),
        ("ASKED", asked),
        ("FREE_SLOT", launches.free_slot),
        ("TAKE", launches.take),
        ("GIVE_BACK", launches.give_back),
        ("SHARE_OUT", launches.share_out),
    ):
        names[name] = specialise.device(template, **names)
    return names


@functools.cache  # for good: XLA has the address
def handler(launch_loop: Any = None) -> specialise.Kernel:
    """Return what answers XLA: on the CPU, or on CUDA with `launcher.inlined()`."""
    names = _names()
    if launch_loop is None:
        own = specialise.device(execute, **names)
    else:
        own = specialise.device(execute_on_stream, LAUNCH_LOOP=launch_loop, **names)
    return specialise.kernel(answer, types.int64, EXECUTE=own, **names)


@functools.cache
def helper() -> specialise.Kernel:
    """Return what a thread of XLA's pool helps with."""
    return specialise.kernel(launches.help_out, **_names())
