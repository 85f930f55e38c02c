"""Operations as XLA's custom calls, which run recorded programs of the CPU backend without Python.

When JAX lowers an operation, its shapes, dtype and options are known: the program is recorded then,
and the call names it by a key, which is the digest of a text that says all of it. Another process
may find the call in JAX's compilation cache, and this one may have dropped the program: what a key
does not lead to is recorded again from the text, which the call has beside it.

Where this version of XLA is not known, or the C library lacks a function, `refusal` says so, and
`numfuse.adapters.jax.primitives` calls back to Python.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import os
import re
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.lib.stride_tricks import as_strided

from numfuse.activations import Activation, activations
from numfuse.adapters.jax.operations import Form, Operation, Shape, on_host
from numfuse.adapters.primitives import PRIMITIVES, How
from numfuse.backends import LOADED, OneRun, resolve
from numfuse.errors import BackendUnavailable
from numfuse.language.text import dumps, loads
from numfuse.operations import OPERATIONS
from numfuse.problem.operands import address
from numfuse.runtime.replay import Replay
from numfuse.runtime.strided import contiguous

__all__ = [
    "RECORDERS",
    "SLOTS",
    "TARGET",
    "describe",
    "described",
    "insert",
    "keep",
    "message",
    "placed",
    "prepared",
    "records",
    "refusal",
    "register",
    "root",
    "serves",
    "traced",
]

#: The name of the custom call.
TARGET = "numfuse_cpu"
#: The versions of XLA's interface in which the structs of `numfuse.adapters.jax.frame` are so.
VERSIONS = ((0, 1), (0, 2), (0, 3), (0, 4))
#: Calls that may have memory of their own at once.
SLOTS = max(4, os.cpu_count() or 1)
#: Places of the table, a power of two; its keys are thinned out when it is half full.
PLACES = 1 << 14


# --- the process's words --------------------------------------------------------------------------
def refusal() -> str | None:
    """Return why XLA cannot call numfuse here, or None: it can, from now on."""
    if not _started:
        with _lock:
            if not _started:
                try:
                    _started.append(_start())
                except _MISSING as error:
                    _started.append(f"{type(error).__name__}: {error}")
    return _started[0]


#: What comes of a library, or of a function in it, that is not here.
_MISSING = AttributeError, BackendUnavailable, ImportError, OSError, RuntimeError, TypeError


def _version() -> tuple[int, int]:
    """Return the version of XLA's interface, from the headers that jaxlib has."""
    place = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = place.read_text(encoding="utf-8")
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{name}\s+(\d+)", text)[1])  # type: ignore[index]
        for name in ("MAJOR", "MINOR")
    )
    return major, minor


def _start() -> str | None:

    version = _version()
    if version not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        return f"XLA's FFI must have version {known}, got {version[0]}.{version[1]}"
    library = ctypes.CDLL(None)
    functions = {
        "R_ALLOCATE": library.posix_memalign,
        "R_FREE": library.free,
        "R_FILL": library.memset,
        "R_ADVISE": getattr(library, "madvise", None),
        "R_YIELD": getattr(library, "sched_yield", None),
        "R_RESOLVE": _RESOLVE,
    }
    from numfuse.adapters.jax import frame
    from numfuse.backends.cpu import tiling

    execute, helper = frame.handlers(SLOTS)
    words = {
        name: ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0
        for name, function in functions.items()
    }
    words |= {
        "R_TABLE": _table.buffer_info()[0],
        "R_VERSION": version[0] | version[1] << 32,
        "R_NO_MEMORY": message("numfuse: the system gives no memory for the workspace of a call"),
        "R_HELP": helper.address,
        "R_MOST": tiling.KEPT_BYTES,
    }
    _root.extend(frame.ROOT.words(words)[:-1] + [0] * (SLOTS * len(frame.SLOT)))
    _at.update(frame.ROOT)
    _alive.append(helper)
    register(TARGET, execute, "cpu")
    return None


def root(words: Mapping[str, int]) -> int:
    """Return the address of the words of this process, after writing those of a platform."""
    for name, word in words.items():
        _root[_at[name]] = word
    return _root.buffer_info()[0]


def register(target: str, handler: Any, platform: str, **words: int) -> None:
    """Let XLA call machine code, which gets the words of this process; some are the platform's."""
    own = array("q", [-1, root(words)])
    ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(handler.address)(own.buffer_info()[0])
    _alive.append(handler)
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(handler.address))
    jax.ffi.register_ffi_target(target, capsule, platform=platform)


#: See `frame.ROOT`; its address is in machine code, so it never grows.
_root = array("q")
#: The numbers of its words.
_at: dict[str, int] = {}
#: The mask of the places, then for each a key and the address of its record; see `frame.look_up`.
_table = array("q", [PLACES - 1] + [0] * (2 * PLACES))
_lock = threading.RLock()
_alive: list[Any] = []
_started: list[str | None] = []
#: By text, for good: there are few.
_messages: dict[str, Any] = {}
#: What was in the table.
_leaving: deque[Any] = deque()


def message(text: str) -> int:
    """Return the address of a text of C."""
    made = _messages.setdefault(text, ctypes.create_string_buffer(text.encode()))
    return ctypes.addressof(made)


# --- records --------------------------------------------------------------------------------------
class _Record:
    """What keeps a program and the words by which machine code runs it in the table."""


def _place(key: int) -> int:
    """Return the number of the word that has a key in the table, or has none yet."""
    at = key & (PLACES - 1)
    while _table[1 + 2 * at] not in (0, key):
        at = (at + 1) & (PLACES - 1)
    return 1 + 2 * at


def insert(key: int, at: int) -> None:
    """Let a key lead to the record at this address."""
    place = _place(key)
    _table[place + 1] = at
    _table[place] = key


def _remove(key: int, at: int, *parts: Any) -> None:
    """Let a key lead nowhere; a call that is under way may still be at its record's parts."""
    place = _place(key)
    if _table[place + 1] == at:
        _table[place + 1] = 0
    _leaving.append(parts)


def _sweep() -> None:
    """Drop what nobody can be at any more; take the keys out of the table that lead nowhere."""
    global _table
    left = len(_leaving)
    if _root[_at["R_INSIDE"]] == 0:  # who comes from now on does not find them
        for _ in range(left):
            _leaving.popleft()
    if len(_table) - _table.count(0) > PLACES:
        with _lock:
            kept = [(at, _table[at], _table[at + 1]) for at in range(1, len(_table), 2)]
            _leaving.append(_table)
            _table = array("q", [PLACES - 1] + [0] * (2 * PLACES))
            for _, key, record in kept:
                if record:
                    insert(key, record)
            _root[_at["R_TABLE"]] = _table.buffer_info()[0]


class _Recorder(OneRun):
    """A backend that takes a problem and does not run it."""

    name = "recorder"
    kind = ""
    problem: Any = None

    def run(self, kind: str, p: Any) -> None:
        """Take a problem."""
        self.kind, self.problem = kind, p


def _described(
    platform: str, operation: Operation, form: Form, shapes: Sequence[Shape], dtype: str
) -> str:
    """Return all that a record depends on as text, which another process can read."""
    act, traces = form.how.activation, []
    with suppress(ValueError):  # (where the table ends)
        for order in range(4):
            traces.append(act.trace(order))
    how = act.name, dumps(traces), form.how.needs, form.how.guard
    return json.dumps([platform, operation.name, how, form[1:], shapes, dtype])


def _read(what: str) -> tuple[str, Operation, Form, list[Shape], str]:
    """Return what `_described` was given, but with an activation that may be another object."""
    platform, name, how, (there, lead, pooled), shapes, dtype = json.loads(what)
    act_name, text, needs, guard = how
    act = activations().get(act_name)
    if act is None or dumps(act.formulas()) != text:
        act = Activation(act_name, "of a compiled computation")
        act.restore(loads(text))
    form = Form(How(act, tuple(needs), guard), tuple(there), lead, pooled)
    return platform, PRIMITIVES[name], form, list(map(tuple, shapes)), dtype


def _key(what: str) -> int:
    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little") >> 1 | 1


class Traced(NamedTuple):
    """The problem of an operation on buffers of XLA, none of which is there yet."""

    kind: str
    problem: Any
    #: The problem's arrays, by the fields of its public function; None: there is none.
    arrays: dict[str, np.ndarray | None]
    #: Of each, what a record says of its source; None: memory of the call's own.
    sources: list[int | None]


def traced(operation: Operation, form: Form, shapes: Sequence[Shape], dtype: str) -> Traced | None:
    """Return the problem of an operation, or None where an operand would have to be copied."""
    from numfuse.adapters.jax import frame

    recorder = _Recorder()
    form = form._replace(how=form.how._replace(backend=recorder))
    item = np.dtype(dtype).itemsize
    # Never read: there is one element behind each.
    operands = [as_strided(np.empty(1, dtype), x, contiguous(x, item)) for x in shapes]
    results = on_host(operation, form, operands)
    known: dict[int, int] = {}
    for kind, those in (("OPERAND", operands), ("RESULT", results)):
        code = frame.SOURCE[kind]
        known |= {address(x): i << 2 | code for i, x in enumerate(those) if x.size}
    public, p = OPERATIONS[operation.function], recorder.problem
    arrays: dict[str, np.ndarray | None] = {}
    sources: list[int | None] = []
    for number, name in enumerate(public.fields):
        x = getattr(p, name, None)
        arrays[name] = x if isinstance(x, np.ndarray) else None
        if not isinstance(x, np.ndarray) or not x.size:
            sources.append(frame.SOURCE["NOWHERE"])
        else:
            sources.append(known.get(address(x)))
            if sources[-1] is None and number < len(public.operands):
                return None
    return Traced(recorder.kind, p, arrays, sources)


def placed(nbytes: int, sources: Sequence[int | None], sizes: Sequence[int]) -> list[int]:
    """Return the bytes of memory in all, then sources: what has none lies behind `nbytes`."""
    from numfuse.adapters.jax import frame

    made = [nbytes]
    for source, size in zip(sources, sizes, strict=True):
        if source is None:
            at = -(-made[0] // frame.ALIGNED) * frame.ALIGNED
            source, made[0] = at << 2 | frame.SOURCE["MEMORY"], at + size
        made.append(source)
    return made


def keep(key: int, words: array[int], formulas: Any, nbytes: int, *held: Any) -> None:
    """Let a key lead to a record, and keep what that holds; see :class:`Replay`."""
    record, at = _Record(), words.buffer_info()[0]
    weakref.finalize(record, _remove, key, at, words, held).atexit = False
    with _lock:
        insert(key, at)
    records().keep(key, record, formulas, nbytes)


def _record(
    key: int,
    operation: Operation,
    form: Form,
    shapes: Sequence[Shape],
    dtype: str,
    held: Any = None,
) -> bool:
    """Record a program and let the key lead to it; return whether machine code alone can run it."""
    from numfuse.adapters.jax import frame
    from numfuse.backends.cpu import BACKEND

    found = traced(operation, form, shapes, dtype)
    if found is None:
        return False
    made = BACKEND.record(found.kind, found.problem, tuple(found.arrays))
    program, arrays = made.program, list(found.arrays.values())
    if program.sums or made.formulas is None or made.nbytes > BACKEND.replay.limits[1]:
        return False
    sizes = [0 if x is None else x.nbytes for x in arrays]
    zeroed = [word for n in program.zeroed for word in (n, sizes[n])]
    totals = [math.prod(shape) * item.itemsize for shape, item in program.totals]
    every = [*found.sources, *[None] * len(totals)]
    size, *sources = placed(program.size, every, [*sizes, *totals])
    head = {
        "N_SIZE": size,
        "N_ARRAYS": len(sources),
        "N_ZEROED": len(program.zeroed),
        "N_SEQUENCES": len(program.sequences),
    }
    words = array("q", [*frame.RECORD.words(head), *sources, *zeroed])
    for x in program.sequences:
        words.extend([x.address, x.steps, x.threads, x.stride, x.table])
    keep(key, words, made.formulas, made.nbytes, program, held)
    return True


#: What records a call on the host, and one on a device, whose number comes last.
RECORDERS: dict[str, Callable[..., bool]] = {"cpu": _record}


@functools.cache
def records() -> Replay[_Record]:
    from numfuse.backends.cpu import BACKEND

    return Replay(*BACKEND.replay.limits)


def _resolve(key: int, at: int, length: int, ordinal: int) -> None:
    """Record what a call says beside its key; XLA's thread is here, and an error is a text."""
    try:
        what = ctypes.string_at(at, length).decode()
        platform, operation, form, shapes, dtype = _read(what)
        act = form.how.activation
        held = None if activations().get(act.name) is act else act  # (else nobody has it)
        last = () if ordinal < 0 else (ordinal,)
        record = RECORDERS[platform]
        if _key(what) != key or not record(key, operation, form, shapes, dtype, held, *last):
            raise ValueError("it needs Python")
    except BaseException as error:
        text = f"numfuse: a call cannot be made again from its description: {error!r}"
        _root[_at["R_MISSING"]] = message(text)


_RESOLVE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(_resolve)


def serves(form: Form) -> bool:
    """Return whether XLA may call machine code: such calls are the CPU backend's."""
    return resolve(form.how.backend) is LOADED.get("cpu") and refusal() is None


def describe() -> str:
    """Return by which way XLA calls numfuse, for `python -m numfuse info`."""
    reason = refusal()
    if reason is not None:
        return f"callbacks to Python ({reason})"
    return "machine code (XLA's FFI {}.{})".format(*_version())


def described(
    platform: str, operation: Operation, form: Form, shapes: Sequence[Shape], dtype: Any
) -> tuple[int, str]:
    """Return key and description of a call."""
    _sweep()
    what = _described(platform, operation, form, shapes, np.dtype(dtype).name)
    return _key(what), what


def prepared(
    operation: Operation, form: Form, shapes: Sequence[Shape], dtype: Any
) -> tuple[int, str] | None:
    """Return key and description of a call that XLA makes, or None where it has to call back."""
    if not serves(form) or not all(type(n) is int for shape in shapes for n in shape):
        return None  # (sizes that are known when it runs)
    key, what = described("cpu", operation, form, shapes, dtype)
    name = np.dtype(dtype).name
    if records().find(key) is None and not _record(key, operation, form, shapes, name):
        return None
    return key, what
