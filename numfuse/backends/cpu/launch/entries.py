"""The native side of a launch, as templates: descriptors are completed, and cells are run.

`entry` compiles the three ways in: in the calling thread, in that and with helpers, as a helper.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.launch.workspace import PAGE
from numfuse.backends.cpu.llvm import intrinsics
from numfuse.runtime import specialise

# ruff: noqa: F821  (the free names of a kernel are bound at specialisation)
# mypy: disable-error-code="name-defined"

#: Looks at a counter before a waiting thread lets others run: 0.2 ms.  Linux 6.18 puts who does so
#: behind OpenBLAS's threads by a whole slice: with 100, products of NumPy took 20 ms and not 1.3.
SPINS = 10_000
#: Looks at the board before a helper sleeps, 0.15 ms: a training step leaves 0.05 ms between its
#: calls.  Waking it costs the call 5 us, and it begins after 30 to 60.
PATIENCE = 5_000
#: After how many of them it looks where its caller runs.
NEIGHBOURS = 128


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

    Temporaries are moved, within a page, so that the one that is to lie beside an array begins a
    line further into its page (`HEAD`). The pass that writes grad_pre reads grad in the same places
    of other pages, and reads ahead of a write wait where both agree in the address within a page.
    """
    head = WORDS(steps)
    temporaries = workspace
    if head[H_BESIDE] >= 0:
        distance = DATA(arrays, head[H_BESIDE]) + LINE - workspace - head[H_PLACE]
        temporaries += distance % PAGE // LINE * LINE
    t = WORDS(table)
    t[T_NEXT] = 0
    t[T_FINISHED] = 0
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


def work(table: int, workspace: int, pause: int) -> int:
    """Cells of an open sequence, until none are left: what each of its threads does. Return how
    often it looked whether others had finished theirs.

    Cells are numbered through all steps and taken in that order.  A cell waits until those of the
    phases before its own are finished.  Each of these is in the hands of a thread that waits for
    earlier ones only: so there is always one that need not wait, however few threads there are and
    however late they come.  `pause` is the address of a function that lets others run, or 0.
    """
    t = WORDS(table)
    cells = t[T_CELLS]
    entry = table + 8 * T_ENTRIES
    begin = waited = 0
    cell = FETCH_ADD(table + 8 * T_NEXT, 1)
    while cell < cells:
        e = WORDS(entry)
        while cell >= e[E_END]:
            begin = e[E_END]
            entry += 8 * ENTRY_WORDS
            e = WORDS(entry)
        looks = 0
        while LOAD(table + 8 * T_FINISHED) < e[E_BEFORE]:
            looks = LOOK_AGAIN(looks, pause)
        waited += looks
        CALL(e[E_CELL], e[E_DESCRIPTOR], cell - begin, workspace)
        FETCH_ADD(table + 8 * T_FINISHED, 1)
        cell = FETCH_ADD(table + 8 * T_NEXT, 1)
    return waited


def work_alone(table: int, workspace: int) -> None:
    """All cells of an open sequence that no other thread works at: nobody counts for anybody."""
    cells = WORDS(table)[T_CELLS]
    entry = table + 8 * T_ENTRIES
    begin = cell = 0
    while cell < cells:
        e = WORDS(entry)
        while cell < e[E_END]:
            CALL(e[E_CELL], e[E_DESCRIPTOR], cell - begin, workspace)
            cell += 1
        begin = cell
        entry += 8 * ENTRY_WORDS


def run_here(steps: int, count: int, arrays: int, workspace: int, table: int) -> None:
    """A sequence in the calling thread."""
    OPEN(steps, count, arrays, workspace, workspace + table)
    WORK_ALONE(workspace + table, workspace)


def run_with_helpers(
    steps: int,
    count: int,
    arrays: int,
    workspace: int,
    table: int,
    stride: int,
    threads: int,
    board: int,
    pause: int,
    processor: int,
) -> None:
    """A sequence in the calling thread and in helpers that come; thread t works at
    ``workspace + t * stride``.

    A launch takes a place of the board, if one is free, and offers its seats there: whoever takes
    one off has it.  Operands and workspace may be gone after the return, so what seats are left are
    withdrawn before, and who took one is waited for: here, where nothing interrupts.  Nobody waits
    for a helper that has not begun.
    """
    table += workspace
    OPEN(steps, count, arrays, workspace, table)
    WORDS(board)[B_PROCESSOR] = CALL_NUMBER(processor) if processor != 0 else -1
    place = 0
    for number in range(PLACES):
        at = board + 8 * (BOARD_WORDS + number * PLACE_WORDS)
        if LOAD(at + 8 * L_TAKEN) == 0 and EXCHANGE(at + 8 * L_TAKEN, 1) == 0:
            place = at
            words = WORDS(place)
            words[L_TABLE], words[L_WORKSPACE], words[L_STRIDE] = table, workspace, stride
            EXCHANGE(place + 8 * L_SEATS, threads - 1)
            if LOAD(board + 8 * B_ASLEEP) > 0:
                WAKE(board, threads - 1)
            break
    waited = WORK(table, workspace, pause)
    if place != 0:
        # (late helpers may have counted the seats down below none)
        joined = threads - 1 - max(0, EXCHANGE(place + 8 * L_SEATS, 0))
        looks = 0
        while LOAD(place + 8 * L_LEFT) < joined:
            looks = LOOK_AGAIN(looks, pause)
        waited += looks
        EXCHANGE(place + 8 * L_LEFT, 0)
        EXCHANGE(place + 8 * L_TAKEN, 0)
    WORDS(board)[B_WAITED] = waited


def run_in_team(
    steps: int,
    count: int,
    arrays: int,
    workspace: int,
    table: int,
    stride: int,
    threads: int,
    board: int,
    pause: int,
    parallel: int,
    count_members: int,
    member: int,
    size: int,
) -> None:
    """A sequence in a team of OpenMP's threads: `size`, of which `threads` take seats.

    `parallel` is the address of the function that runs `member` in each thread of a team, and
    `count_members` that of one which tells a thread how many these are.
    """
    table += workspace
    OPEN(steps, count, arrays, workspace, table)
    t = WORDS(table)
    t[T_SEATS], t[T_CAME], t[T_PAUSE], t[T_COUNT] = threads, 0, pause, count_members
    t[T_WORKSPACE], t[T_STRIDE] = workspace, stride
    CALL_PARALLEL(parallel, member, table, size, 0)
    WORDS(board)[B_WAITED] = t[T_WAITED]


def take_seat(table: int) -> None:
    """Take a seat at the table of a launch, and cells: what a team's threads run.

    At the end of a team all wait for all. The first to come does so here, and counts its looks.
    """
    t = WORDS(table)
    came = FETCH_ADD(table + 8 * T_CAME, 1)
    seat = FETCH_ADD(table + 8 * T_SEATS, -1) - 1
    waited = looks = 0
    if seat >= 0:
        waited = WORK(table, t[T_WORKSPACE] + seat * t[T_STRIDE], t[T_PAUSE])
    if came == 0:
        size = CALL_NUMBER(t[T_COUNT])
        while LOAD(table + 8 * T_CAME) < size or LOAD(table + 8 * T_FINISHED) < t[T_CELLS]:
            looks = LOOK_AGAIN(looks, t[T_PAUSE])
        t[T_WAITED] = waited + looks


def wake(board: int, count: int) -> None:
    """Wake up to `count` helpers that sleep, off the processor of the thread that launches.

    Linux wakes a thread where it slept while most processors are in use: helper and caller would
    take turns for tenths of a second, the other core idle.
    """
    b = WORDS(board)
    helper, processor = b[B_HELPERS], b[B_PROCESSOR]
    while helper != 0 and count > 0:
        h = WORDS(helper)
        if LOAD(helper + 8 * H_ASLEEP) == 1 and EXCHANGE(helper + 8 * H_ASLEEP, 0) == 1:
            FETCH_ADD(board + 8 * B_ASLEEP, -1)
            if processor >= 0 and processor != h[H_OFF]:
                others = helper + 8 * H_SET
                CALL_SET(b[B_PROCESSORS], h[H_PROCESS], SET_BYTES, others)
                h[H_SET + processor // 64] &= ~(1 << processor % 64)
                CALL_SET(b[B_SET_PROCESSORS], h[H_THREAD], SET_BYTES, others)
                h[H_OFF] = processor
            CALL_RELEASE(b[B_RELEASE], h[H_LOCK])
            count -= 1
        helper = h[H_NEXT]


def help_launches(board: int, helper: int, pause: int, processor: int) -> None:
    """Take part in the launches on the board, to the end of the process, as one helper.

    It sleeps where there has been none for a while, and where this is the processor of the thread
    that launches: without the interpreter's lock, which a caller may keep for milliseconds.
    `processor` is the address of a function that tells on which one a thread runs, or 0.
    """
    h = WORDS(helper)
    h[H_NEXT] = EXCHANGE(board + 8 * B_HELPERS, helper)
    looks = 0
    while True:
        for number in range(PLACES):
            place = board + 8 * (BOARD_WORDS + number * PLACE_WORDS)
            if LOAD(place + 8 * L_SEATS) > 0 and looks < PATIENCE:
                if processor != 0 and CALL_NUMBER(processor) == WORDS(board)[B_PROCESSOR]:
                    looks = PATIENCE  # here it would take the caller's time
                else:
                    seat = FETCH_ADD(place + 8 * L_SEATS, -1)
                    if seat > 0:
                        words = WORDS(place)
                        WORK(words[L_TABLE], words[L_WORKSPACE] + seat * words[L_STRIDE], pause)
                        FETCH_ADD(place + 8 * L_LEFT, 1)
                        looks = 0
        looks = LOOK_AGAIN(looks, 0)
        if looks % NEIGHBOURS == 0 and processor != 0:
            if CALL_NUMBER(processor) == WORDS(board)[B_PROCESSOR]:
                looks = PATIENCE
        if looks >= PATIENCE:
            EXCHANGE(helper + 8 * H_ASLEEP, 1)
            FETCH_ADD(board + 8 * B_ASLEEP, 1)
            CALL_ACQUIRE(WORDS(board)[B_ACQUIRE], h[H_LOCK], 1)
            looks = 0


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


def _words() -> dict[str, Any]:
    names: dict[str, Any] = {name: protocol.DESCRIPTOR[name] for name in ("D_A", "D_B", "D_NAMED")}
    numbers = "D_SLOTS NUMBER_BITS NUMBERS BOARD_WORDS PLACE_WORDS PLACES SET_BYTES"
    names |= {name: getattr(protocol, name) for name in numbers.split()}
    for words in "HEAD STEP TABLE ENTRY BOARD PLACE HELPER".split():
        names |= getattr(protocol, words)
    return names | {
        "WORDS": intrinsics.make_elements("int64"),
        "HEAD_WORDS": len(protocol.HEAD),
        "STEP_WORDS": len(protocol.STEP),
        "ENTRY_WORDS": len(protocol.ENTRY),
        "CALL_PARALLEL": intrinsics.make_call(4),
        "CALL_SET": intrinsics.make_call(3),
        "CALL_ACQUIRE": intrinsics.make_call(2),
        "CALL_RELEASE": intrinsics.make_call(1),
        "CALL_NUMBER": intrinsics.make_call_number(),
        "NEIGHBOURS": NEIGHBOURS,
        "PATIENCE": PATIENCE,
        "LINE": tiling.LINE,
        "PAGE": PAGE,
    }


def parts(data: Callable[[int, int], int]) -> dict[str, Any]:
    """Return the names that an entry binds: OPEN, WORK, WORK_ALONE, and what those who wait need.

    `data` tells where the elements of an array begin, by the arrays' address and its number.
    """
    names = _words()
    names["DATA"] = specialise.device(data, HEADER=HEADER, TUPLE_HEADER=TUPLE_HEADER, **names)
    names["RESOLVE"] = specialise.device(resolve, **names)
    waiting = {
        "FETCH_ADD": intrinsics.make_fetch_add(),
        "EXCHANGE": intrinsics.make_exchange(),
        "LOAD": intrinsics.make_atomic_load(),
        "LOOK_AGAIN": specialise.device(
            look_again,
            PAUSE=intrinsics.make_pause(),
            CALL_PAUSE=intrinsics.make_call(0),
            SPINS=SPINS,
        ),
    }
    return {
        **waiting,
        "WAKE": specialise.device(wake, **names, **waiting),
        "OPEN": specialise.device(open_sequence, **names),
        "WORK": specialise.device(work, CALL=intrinsics.make_call(3), **names, **waiting),
        "WORK_ALONE": specialise.device(work_alone, CALL=intrinsics.make_call(3), **names),
    }


@functools.cache
def entry(name: str) -> Any:
    """Return a native function: "here", "helped", "team" or "help"."""
    made = _words() | parts(data_of_array if OBJECTS_CAN_BE_READ else data_of_address)
    ways: dict[str, Callable[..., None]] = {
        "here": run_here,
        "helped": run_with_helpers,
        "team": run_in_team,
        "help": help_launches,
    }
    if name == "help":
        made.pop("OPEN")
    template = ways[name]
    signature = types.void(*[types.int64] * len(inspect.signature(template).parameters))
    # (without Numba's dispatcher, which takes 0.1 us to find out what the arguments are)
    return specialise.entry(template, signature, **made).overloads[signature.args].entry_point


@functools.cache
def member() -> specialise.Kernel:
    """Return what a team runs in each of its threads."""
    return specialise.kernel(take_seat, **_words(), **parts(data_of_address))
