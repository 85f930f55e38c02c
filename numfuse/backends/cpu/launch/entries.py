"""The native side of a launch, as templates: descriptors are completed, and cells are run.

`entry` compiles the four ways in: in the calling thread, on Numba's threads, in the calling thread
with helpers, and as a helper.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange, types

from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.launch.workspace import PAGE
from numfuse.backends.cpu.llvm import intrinsics
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Looks at the counter before a waiting thread lets others run: some microseconds.
SPINS = 100
#: Looks at the gate of a launch that has not begun before a helper leaves: about a millisecond.
#: (The launch never begins if its caller was interrupted.)
PATIENCE = 200 * SPINS
#: What the gate of a launch gains when it is opened, and when it is closed.
GATE = 1 << 32


def resolve(descriptor: int, arrays: int, temporaries: int) -> None:
    """Replace the names of operands in a descriptor by the addresses of their data.

    Bit i of word D_NAMED says that operand i (A, B, then the slots) is named: by the number of its
    array in its lowest NUMBER_BITS bits, and above them how many bytes behind that array's first
    element it begins.  The last number stands for the memory at `temporaries`.
    """
    d = WORDS(descriptor)
    named = d[D_NAMED]
    word = D_A
    operand = 0
    while named != 0:
        if named & 1:
            number = d[word] & NUMBERS
            base = temporaries if number == NUMBERS else DATA(arrays, number)
            d[word] = base + (d[word] >> NUMBER_BITS)
        named = named >> 1
        operand += 1
        word = D_B if operand == 1 else D_SLOTS + 3 * (operand - 2)


def data_of_array(arrays: int, number: int) -> int:
    """Where the elements of array `number` of the tuple at `arrays` begin.

    That is the word right behind the object header.  Reading it here takes a nanosecond,
    ``__array_interface__`` a microsecond an operand.
    """
    return WORDS(WORDS(arrays + TUPLE_HEADER)[number] + HEADER)[0]


def data_of_address(arrays: int, number: int) -> int:
    """Return where the elements of array `number` begin; at `arrays` lie the data's addresses."""
    return WORDS(arrays)[number]


def open_sequence(steps: int, count: int, arrays: int, workspace: int, table: int) -> None:
    """Complete the descriptors of `count` steps for the arrays of a call, in the memory at `table`.

    A step is its cell function, the numbers of cells up to its end and before its phase, the number
    of words of its descriptor, and the descriptor, which names its operands (`resolve`).  The steps
    serve every call, so all this is done in a copy.

    Before the steps stand the number of an array that a temporary is to lie beside (-1: none), and
    where that temporary is planned: all are moved, within a page, so that it begins a line further
    into its page than the array.  The pass that writes grad_pre reads grad, and mostly a saved
    pre-activation, in the same places of other pages.  Reads that a processor takes ahead of a
    write wait where both agree in the address within a page: with grad_pre one or two KiB further,
    the pass was measured to take 1.6 times as long.
    """
    head = WORDS(steps)
    temporaries = workspace
    if head[H_BESIDE] >= 0:
        distance = DATA(arrays, head[H_BESIDE]) + LINE - workspace - head[H_PLACE]
        temporaries += distance % PAGE // LINE * LINE
    t = WORDS(table)
    t[T_NEXT] = 0
    t[T_FINISHED] = 0
    t[T_LATE] = 0
    entry = table + 8 * T_ENTRIES
    descriptor = entry + 8 * ENTRY_WORDS * count
    at = steps + 8 * HEAD_WORDS
    for _ in range(count):
        step, e, d = WORDS(at), WORDS(entry), WORDS(descriptor)
        e[E_CELL] = step[P_CELL]
        e[E_END] = step[P_END]
        e[E_BEFORE] = step[P_BEFORE]
        e[E_DESCRIPTOR] = descriptor
        t[T_CELLS] = step[P_END]
        words = step[P_LENGTH]
        for i in range(words):
            d[i] = step[STEP_WORDS + i]
        RESOLVE(descriptor, arrays, temporaries)
        at += 8 * (STEP_WORDS + words)
        entry += 8 * ENTRY_WORDS
        descriptor += 8 * words


def look_again(looks: int, pause: int) -> int:
    """Between two looks at a counter: how many there have been; now and then it lets others run."""
    PAUSE()
    looks += 1
    if looks % SPINS == 0 and pause != 0:
        CALL_PAUSE(pause)
    return looks


def work(table: int, workspace: int, pause: int) -> None:
    """Cells of an open sequence, until none are left: what each of its threads does.

    Cells are numbered through all steps and taken in that order.  A cell waits until those of the
    phases before its own are finished.  Each of these is in the hands of a thread that waits for
    earlier ones only: so there is always one that need not wait, however few threads there are and
    however late they come.  `pause` is the address of a function that lets others run, or 0.
    """
    t = WORDS(table)
    cells = t[T_CELLS]
    entry = table + 8 * T_ENTRIES
    begin = 0
    cell = FETCH_ADD(table + 8 * T_NEXT, 1)
    if cell >= cells:
        FETCH_ADD(table + 8 * T_LATE, 1)
    while cell < cells:
        e = WORDS(entry)
        while cell >= e[E_END]:
            begin = e[E_END]
            entry += 8 * ENTRY_WORDS
            e = WORDS(entry)
        looks = 0
        while LOAD(table + 8 * T_FINISHED) < e[E_BEFORE]:
            looks = LOOK_AGAIN(looks, pause)
        CALL(e[E_CELL], e[E_DESCRIPTOR], cell - begin, workspace)
        FETCH_ADD(table + 8 * T_FINISHED, 1)
        cell = FETCH_ADD(table + 8 * T_NEXT, 1)


def run_here(steps: int, count: int, arrays: int, workspace: int, table: int) -> None:
    """A sequence in the calling thread."""
    OPEN(steps, count, arrays, workspace, workspace + table)
    WORK(workspace + table, workspace, 0)


def run_parallel(
    steps: int,
    count: int,
    arrays: int,
    workspace: int,
    table: int,
    stride: int,
    threads: int,
    pause: int,
) -> None:
    """A sequence on Numba's threads; thread t works at ``workspace + t * stride``."""
    OPEN(steps, count, arrays, workspace, workspace + table)
    for t in prange(threads):
        WORK(workspace + table, workspace + t * stride, pause)


def run_with_helpers(
    steps: int, count: int, arrays: int, workspace: int, table: int, gate: int, pause: int
) -> None:
    """A sequence in the calling thread and in those that `help_with` brings.

    The word at `gate` counts who is inside, above that it says whether the launch has begun (GATE)
    and is over (2 * GATE).  Operands and workspace may be gone after the return, so the gate is
    closed before, and who is inside is waited for: here, where nothing interrupts.
    """
    table += workspace
    OPEN(steps, count, arrays, workspace, table)
    FETCH_ADD(gate, GATE)
    WORK(table, workspace, pause)
    FETCH_ADD(gate, GATE)
    looks = 0
    while LOAD(gate) != 2 * GATE:
        looks = LOOK_AGAIN(looks, pause)


def help_with(gate: int, table: int, workspace: int, pause: int) -> None:
    """Take part in a launch of `run_with_helpers`, unless it is over."""
    begun = FETCH_ADD(gate, 1) // GATE
    looks = 0
    while begun == 0 and looks < PATIENCE:
        looks = LOOK_AGAIN(looks, pause)
        begun = LOAD(gate) // GATE
    if begun == 1:
        WORK(table, workspace, pause)
    FETCH_ADD(gate, -1)


#: Bytes of an object's header, behind which NumPy's C API has an array's data pointer.
HEADER = object.__basicsize__
#: Bytes of a tuple before its items.
TUPLE_HEADER = tuple.__basicsize__


def _objects_can_be_read() -> bool:
    """Whether an ndarray's data pointer and a tuple's items stand where the C APIs of NumPy and
    CPython have them (CPython: yes)."""
    probe = np.zeros(3)[1:]
    if sys.implementation.name != "cpython":
        return False
    pair = None, probe
    item = ctypes.c_void_p.from_address(id(pair) + TUPLE_HEADER + ctypes.sizeof(ctypes.c_void_p))
    return (
        item.value == id(probe)
        and ctypes.c_void_p.from_address(id(probe) + HEADER).value == probe.ctypes.data
    )


OBJECTS_CAN_BE_READ = _objects_can_be_read()


def parts(data: Callable[[int, int], int]) -> dict[str, Any]:
    """Return the names that an entry binds: OPEN, WORK, HELP, and what those who wait need.

    `data` tells where the elements of an array begin, by the arrays' address and its number.
    """
    names: dict[str, Any] = {name: protocol.DESCRIPTOR[name] for name in ("D_A", "D_B", "D_NAMED")}
    for words in (protocol.HEAD, protocol.STEP, protocol.TABLE, protocol.ENTRY):
        names |= words
    names |= {
        "D_SLOTS": protocol.D_SLOTS,
        "WORDS": intrinsics.make_elements("int64"),
        "NUMBER_BITS": protocol.NUMBER_BITS,
        "NUMBERS": protocol.NUMBERS,
        "HEAD_WORDS": len(protocol.HEAD),
        "STEP_WORDS": len(protocol.STEP),
        "ENTRY_WORDS": len(protocol.ENTRY),
        "LINE": tiling.LINE,
        "PAGE": PAGE,
    }
    names["DATA"] = specialise.device(data, HEADER=HEADER, TUPLE_HEADER=TUPLE_HEADER, **names)
    names["RESOLVE"] = specialise.device(resolve, **names)
    waiting = {
        "FETCH_ADD": intrinsics.make_fetch_add(),
        "LOAD": intrinsics.make_atomic_load(),
        "LOOK_AGAIN": specialise.device(
            look_again,
            PAUSE=intrinsics.make_pause(),
            CALL_PAUSE=intrinsics.make_call(0),
            SPINS=SPINS,
        ),
        "GATE": GATE,
    }
    done = specialise.device(work, CALL=intrinsics.make_call(3), **names, **waiting)
    return {
        **waiting,
        "OPEN": specialise.device(open_sequence, **names),
        "WORK": done,
        "HELP": specialise.device(help_with, WORK=done, PATIENCE=PATIENCE, **waiting),
    }


@functools.cache
def entry(name: str) -> Any:
    """Return a native function: "here", "parallel", "helped" or "help"."""
    made = parts(data_of_array if OBJECTS_CAN_BE_READ else data_of_address)
    ways: dict[str, tuple[Callable[..., None], str]] = {
        "here": (run_here, "OPEN WORK"),
        "parallel": (run_parallel, "OPEN WORK"),
        "helped": (run_with_helpers, "OPEN WORK GATE FETCH_ADD LOAD LOOK_AGAIN"),
        "help": (help_with, "WORK GATE FETCH_ADD LOAD LOOK_AGAIN"),
    }
    template, bound = ways[name]
    names = {name: made[name] for name in bound.split()}
    if name == "parallel":
        names["prange"] = prange
    if name == "help":
        names["PATIENCE"] = PATIENCE
    signature = types.void(*[types.int64] * len(inspect.signature(template).parameters))
    return specialise.entry(template, signature, name == "parallel", **names)
